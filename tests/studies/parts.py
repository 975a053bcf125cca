"""Are the right tasks and models called inflated? Run by hand, each in a minute on one core.

    python tests/studies/parts.py            # tasks of one table, also in two settings
    python tests/studies/parts.py --models   # two models, or two methods in one table of answers

The bias of task j in draw k is Normal(true bias of j, 1.4 points), and the margin is 1 point (5 of
methods). Two rules read the same 10,000 tables (standard error of a share: .5 points at most):

    former    intervals of J tasks that hold together (.055 / J a side), behind a gate: the headline
              names a task that is or may be over the margin only if the F test finds p < .05 and a
              task lies below the margin. Of several settings, only the mean.
    present   the same intervals without a gate: every YES is named. Of several settings, a task's
              interval is by its draws' mean over settings.

Both are written here again, for all tables at once. At the start of each scenario fit_model.py must
give the same intervals, p-values and verdicts for some of its tables. The last line counts them.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import load_script  # noqa: E402

fit = load_script("fit_model")
TABLES, CHECKED = 10_000, 15
SD, TAIL, DRAWS = 1.4, 0.055, (8, 20)
SCENARIOS = {  # true biases of tasks
    "1 at 0": [0],
    "2 at 0": [0, 0],
    "5 at 0": [0] * 5,
    "25 at 0": [0] * 25,
    "1 of 5 at +2": [0] * 4 + [2],
    "1 of 5 at +3": [0] * 4 + [3],
    "1 of 25 at +2": [0] * 24 + [2],
    "1 of 25 at +3": [0] * 24 + [3],
    "+3 and -3": [3, -3],
}
METHODS = ((0, 8), (-4, 8))  # true biases of two methods
MODELS = ((0, 0), (0.8, 0.8), (0, 3))  # of two models of one experiment


def draw_biases(rng, biases, K, J=1):
    """Biases [tables, parts, J, K draws] of parts with these true biases, in J tasks each."""
    noise = rng.standard_normal((TABLES, len(biases), J, K))
    return np.reshape(biases, (-1, 1, 1)) + SD * noise


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
    if J == 1:
        return np.full(len(D), np.nan)
    _, se, df = mean_over_tasks(D)
    F = D.mean(axis=2).var(axis=1, ddof=1) / J / se**2
    top = (J - 1) ** 2 / (1 + (J - 2) * J * (K - 1) / df)
    return stats.f.sf(F, np.minimum(J - 1, top), df)


def judge_parts(mean, half, margin):
    """Of parts [tables, parts]: is it called inflated (over the margin or not), is it below it?"""
    return mean - half > 0, mean + half < margin


def judge_tasks(D, margin=1):
    """Columns of D [tables, tasks, draws]."""
    mean, se, df = mean_over_tasks(D[:, :, None])
    half, p = half_of(se, df, D.shape[1]), p_of_alike(D)
    inflated, no = judge_parts(mean, half, margin)
    gate = (p < 0.05) & (inflated & (mean + half >= margin)).any(axis=1) & no.any(axis=1)
    if D.shape[1] == 1:
        gate[:] = True  # a task alone was always named
    middle, middle_se, middle_df = mean_over_tasks(D)
    middle_half = half_of(middle_se, middle_df)
    return {"shown_low": mean - half, "p": p, "inflated": inflated, "gate": gate,
            "mean_low": middle - middle_half, "mean_no": middle + middle_half < margin}


# fit_model.py must agree


def rows_of(D, m, n=200):
    """Rows of results.csv, an experiment a table; D [tables, models, tasks, draws]."""
    tables, model, task, draw = np.indices(D.shape)
    table = {"experiment": tables, "model": model, "task": task, "subsample": draw}
    rows = pd.DataFrame({name: column.ravel() for name, column in table.items()})
    names = ["experiment", "model", "task"]
    rows[names] = names + rows[names].astype(str).map("{:0>3}".format)
    return rows.assign(m=m, n=n, acc_base=0.5, acc_extra=0.5, acc_test=0.5 + D.ravel() / 100)


def judged(rows, margin):
    """Biases in tasks.csv and effects.csv; each row of effects is a table or a model of it."""
    lines = fit.analyze(fit.clean_rows(rows), fit.metric_of("acc", margin, False))
    lines = lines[lines["effect"] == "bias"].sort_values(["experiment", "model"], kind="stable")
    return lines[~lines["is_mean"]], lines[lines["is_mean"]]


def analyzed(D, margin, m=50):
    return judged(rows_of(D, m), margin)


def agree(column, ours):
    assert np.allclose(np.ravel(ours), column, rtol=1e-6, atol=1e-9, equal_nan=True), (column, ours)


def check_tasks(lines, judgment):
    tasks, effects = lines
    first = {name: column[:CHECKED] for name, column in judgment.items()}
    agree(tasks["shown_low"], first["shown_low"])
    agree(tasks["verdict"].isin(fit.YES), first["inflated"])
    agree(effects["low"], first["mean_low"])
    agree(effects["p_alike"], first["p"])
    agree(effects["verdict"].isin(["no", "yes-under"]), first["mean_no"])
    return CHECKED


def check_models(D, margin, mean_no, low, m=50):
    """D [tables, models, tasks, draws]. With m = 0 no row may be a mean over models."""
    _, effects = analyzed(D[:CHECKED], margin, m)
    means = effects[effects["models"] > 1]
    agree(effects.loc[effects["models"] == 1, "low"], low[:CHECKED])
    assert len(means) == (CHECKED if m else 0)
    if m:
        agree(means["verdict"].isin(["no", "yes-under"]), mean_no[:CHECKED])
    return CHECKED


# Tables of docs/results.md


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


def tell_line(name, K, true, judgment, named_before):
    inflated, mean_yes = judgment["inflated"], judgment["mean_low"] > 0
    innocent = inflated[:, ~true]
    either = any_of(innocent) if true.any() else any_of(innocent) | mean_yes
    cells = [percent(any_of(innocent)), percent(either),
             percent(*[part[:, true] for part in (named_before, inflated)]),
             percent(judgment["mean_no"])]
    print(f"| {name} | {K} |", " | ".join(cells), "|", flush=True)


def tell_tasks():
    print("| true biases | draws | an innocent task is named | or the mean, if all are innocent | "
          "inflated tasks that the headline names: former, present | the mean is a NO |\n|"
          + " --- |" * 6)
    checked = 0
    for name, biases in SCENARIOS.items():
        true = np.array(biases) > 0
        for K in DRAWS:
            D = draw_biases(np.random.default_rng(1), biases, K)[:, :, 0]
            judgment = judge_tasks(D)
            checked += check_tasks(analyzed(D[:CHECKED, None], margin=1), judgment)
            tell_line(name, K, true, judgment, judgment["inflated"] & judgment["gate"][:, None])
    # n = 100 and 200: a task is known by its draws' means over both
    both = [draw_biases(np.random.default_rng(seed), [3, -3], 20)[:, :, 0] for seed in (1, 2)]
    judgment = judge_tasks(np.mean(both, axis=0))
    rows = [rows_of(D[:CHECKED, None], 50, n) for D, n in zip(both, (100, 200))]
    lines = judged(pd.concat(rows), margin=1)
    checked += check_tasks([part[part["settings"] == 2] for part in lines], judgment)
    tell_line("+3 and -3 in two settings", 20, np.array([True, False]), judgment,
              np.zeros_like(judgment["inflated"]))
    print(f"fit_model.py says the same of {checked} of these tables")


def tell_methods(margin=5):
    """Two methods in one table of crossed answers (m = 0), which share draws."""
    print("| true biases | K | one verdict for both: no, yes | first method: no, called inflated | "
          "second method: no, yes |\n|" + " --- |" * 5)
    checked = 0
    for biases in METHODS:
        for K in (5, *DRAWS):
            D = draw_biases(np.random.default_rng(2), biases, K)
            mean, se, df = mean_over_tasks(D)
            half = half_of(se, df)
            inflated, no = judge_parts(mean, half, margin)
            middle, middle_se, middle_df = mean_over_tasks(D.mean(axis=1))
            middle_half = half_of(middle_se, middle_df)
            checked += check_models(D, margin, None, mean - half, m=0)
            one = middle + middle_half < margin, middle - middle_half > margin
            second_yes = mean[:, 1] - half[:, 1] > margin
            print(f"| {biases[0]} and {biases[1]} | {K} | {percent(*one)} "
                  f"| {percent(no[:, 0], inflated[:, 0])} | {percent(no[:, 1], second_yes)} |",
                  flush=True)
    return checked


def tell_models(margin=1):
    """Two models that share draws (m > 0), with independent biases of a draw."""
    print("| true biases | tasks | K | an innocent model is named | inflated ones that are | the "
          "mean is a NO |\n|" + " --- |" * 6)
    checked = 0
    for biases in MODELS:
        for J in (1, 2):
            for K in DRAWS:
                D = draw_biases(np.random.default_rng(3), biases, K, J)
                mean, se, df = mean_over_tasks(D)
                inflated, _ = judge_parts(mean, half_of(se, df, len(biases)), margin)
                middle, middle_se, middle_df = mean_over_tasks(D.mean(axis=1))
                mean_no = middle + half_of(middle_se, middle_df) < margin
                checked += check_models(D, margin, mean_no, mean - half_of(se, df))
                true = np.array(biases) > 0
                cells = [percent(any_of(inflated[:, ~true])), percent(inflated[:, true]),
                         percent(mean_no)]
                print(f"| {biases[0]:g} and {biases[1]:g} | {J} | {K} |", " | ".join(cells), "|",
                      flush=True)
    return checked


def main():
    if sys.argv[1:] == ["--models"]:
        checked = tell_methods() + tell_models()
        print(f"fit_model.py says the same of {checked} of these tables")
    else:
        tell_tasks()


if __name__ == "__main__":
    main()
