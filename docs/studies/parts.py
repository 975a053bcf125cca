"""Are the right tasks and models called inflated? Run by hand, half a minute on one core.

    python docs/studies/parts.py   # prints the table of docs/validation.md

The bias of a part in a draw is Normal(its true bias, 1.4 points), and the margin is 1 point: 10,000
tables a row (standard error of a share: .5 points at most). Each row counts, in percent of tables:

    innocent  some part whose true bias is not above 0 is a YES, by intervals that hold together
              (.055 / J a side); and if each part were judged alone
    some YES  the same with the mean, of which any part and the mean may be a YES
    found     inflated parts that are a YES
    hidden    inflated parts were found, but not named: until 2026-11-28 a table named its parts
              where p_alike < .05 and a part was a NO, else its mean alone
    mean NO   the mean is a NO: not to be read alone

The rule is written here again, for all tables at once. In each row fit_model.py must give the same
intervals, p-values and verdicts for some of its tables. The last line counts them.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import load_script  # noqa: E402

fit = load_script("fit_model")
TABLES, CHECKED = 10_000, 2
SD, TAIL, MARGIN = 1.4, 0.055, 1.0
TASKS = {  # true biases of tasks
    "2 tasks at 0": [0, 0],
    "5 at 0": [0] * 5,
    "25 at 0": [0] * 25,
    "2 at +0.8": [0.8, 0.8],
    "1 of 5 at +2": [0] * 4 + [2],
    "1 of 5 at +3": [0] * 4 + [3],
    "1 of 25 at +2": [0] * 24 + [2],
    "1 of 25 at +3": [0] * 24 + [3],
}


def draw_biases(biases, shape):
    """Biases [tables, parts, *shape] of parts with these true biases."""
    noise = np.random.default_rng(1).standard_normal((TABLES, len(biases), *shape))
    return np.reshape(biases, (-1, *[1] * len(shape))) + SD * noise


def mean_over_tasks(D):
    """Mean, standard error and Satterthwaite's degrees of freedom [...]; D [..., tasks, draws]."""
    K = D.shape[-1]
    variance = D.var(axis=-1, ddof=1) / K
    total = variance.sum(axis=-1)
    df = (K - 1) * total**2 / (variance**2).sum(axis=-1)
    return D.mean(axis=(-2, -1)), np.sqrt(total) / D.shape[-2], df


def half_of(se, df, parts=1):
    return stats.t.isf(TAIL / parts, df) * se


def p_of_alike(D):
    """p-value of equal tasks by Mehrotra's F [tables]; D [tables, tasks, draws]."""
    J, K = D.shape[1:]
    _, se, df = mean_over_tasks(D)
    F = D.mean(axis=2).var(axis=1, ddof=1) / J / se**2
    top = (J - 1) ** 2 / (1 + (J - 2) * J * (K - 1) / df)
    return stats.f.sf(F, np.minimum(J - 1, top), df)


def analyzed(D, n=(200,)):
    """Biases of parts and of means by fit_model.py, an experiment a table; D [tables, models,
    tasks, settings, draws] with a setting for each n, or without settings."""
    D = D.reshape(*D.shape[:3], len(n), -1)
    tables, model, task, setting, draw = np.indices(D.shape)
    columns = {"experiment": tables, "model": model, "task": task, "subsample": draw}
    rows = pd.DataFrame({name: column.ravel() for name, column in columns.items()})
    names = ["experiment", "model", "task"]
    rows[names] = names + rows[names].astype(str).map("{:0>3}".format)
    rows = rows.assign(m=50, n=np.array(n)[setting.ravel()], acc_base=0.5, acc_extra=0.5,
                       acc_test=0.5 + D.ravel() / 100)
    lines = fit.analyze(fit.clean_rows(rows), fit.metric_of("acc", MARGIN, False))
    lines = lines[lines.effect == "bias"]
    return lines[~lines.is_mean], lines[lines.is_mean]


def agree(column, ours):
    assert np.allclose(column, np.ravel(ours[:CHECKED]), rtol=1e-6, atol=1e-9), (column, ours)


def tell(name, biases, K, parts, middle, p, checked):
    """Print a row. parts, middle: mean, standard error and degrees of freedom of each part
    [tables, parts] and of the mean [tables]; p: p_alike [tables]; checked: what
    fit_model.py says of the first tables, parts and means."""
    J, true = len(biases), np.array(biases) > 0
    alone, half, middle_half = half_of(*parts[1:]), half_of(*parts[1:], J), half_of(*middle[1:])
    called, no = parts[0] > half, parts[0] + half < MARGIN
    its_parts, its_mean = checked
    agree(its_parts.shown_low, parts[0] - half)
    agree(its_parts.verdict.isin(fit.YES), called)
    agree(its_mean.shown_low, middle[0] - middle_half)
    mean_called, mean_no = middle[0] > middle_half, middle[0] + middle_half < MARGIN
    agree(its_mean.verdict == "no", mean_no & ~mean_called)
    hidden = []
    if true.any():
        agree(its_mean.p_alike, p)
        was_named = (p < 0.05) & (called & ~no).any(axis=1) & no.any(axis=1)
        hidden = called[:, true].any(axis=1) & ~was_named
    cells = [percent(any_of(called[:, ~true]), any_of((parts[0] > alone)[:, ~true])),
             percent(called.any(axis=1) | mean_called), percent(called[:, true]),
             percent(hidden), percent(mean_no & ~mean_called)]
    print(f"| {name} | {K} |", " | ".join(cell or "-" for cell in cells), "|", flush=True)


def percent(*shares):
    """Shares in percent, with a digit below 10; of nothing, nothing."""
    words = []
    for hits in shares:
        if np.size(hits):
            share = 100 * np.mean(hits)
            words.append(f"{share:.0f}" if share >= 9.95 else f"{share:.1f}")
    return ", ".join(words)


def any_of(called):
    """In which tables [tables, parts] is one called so? Nothing of no parts."""
    return called.any(axis=1) if called.shape[1] else called


def tell_tasks(name, biases, K, n=(200,)):
    """With several n a task's biases are its means over settings."""
    D = draw_biases(biases, (len(n), K))
    parts, means = analyzed(D[:CHECKED, None], n)
    if len(n) > 1:
        parts, means = parts[parts.settings > 1], means[means.settings > 1]
    D = D.mean(axis=2)
    tell(name, biases, K, mean_over_tasks(D[:, :, None]), mean_over_tasks(D), p_of_alike(D),
         (parts, means))


def tell_models(K):
    """Four models at 0, each of which has a table of its own, of two tasks. They share draws; the
    biases of a draw are independent."""
    D = draw_biases([0] * 4, (2, K))
    mean, *spread = mean_over_tasks(D)
    called = mean > half_of(*spread)
    _, means = analyzed(D[:CHECKED])
    agree(means[means.models == 1].verdict.isin(fit.YES), called)
    print(f"one of 4 models at 0 is a YES after {K} draws: {percent(any_of(called))}%")


def main():
    print("| true biases | draws | innocent: together, alone | some YES | found | hidden | mean NO "
          "|\n|" + " --- |" * 7)
    for name, biases in TASKS.items():
        for K in (8, 40):
            tell_tasks(name, biases, K)
    tell_tasks("-3 and +3, n = 100 and 200", [-3, 3], 20, n=(100, 200))
    for K in (8, 40):
        tell_models(K)
    print(f"fit_model.py says the same of {CHECKED} tables in each row")


if __name__ == "__main__":
    main()
