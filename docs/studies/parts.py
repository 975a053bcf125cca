"""Are the right tasks and models called inflated? Run by hand, each in a minute on one core.

    python docs/studies/parts.py            # tasks of one table
    python docs/studies/parts.py --models   # two models, or two methods in one table of answers

The bias of task j in draw k is Normal(true bias of j, 1.4 points), and the margin is 1 point (5 of
methods). Two rules judge the same 10,000 tables (standard error of a share: .5 points at most):

    former    the interval of each task alone. "It depends": p_alike < .05, and there are intervals
              above 0 and below 0.
    present   the intervals of J tasks hold together (.055 / J a side). "It depends": p_alike < .05,
              and there are a yes that is or may be over the margin, and a part that is below it.

Both are written here again, for all tables at once. At the start of each scenario fit_model.py must
give the same intervals, p-values and verdicts for some of its tables. The last line counts them.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import load_script  # noqa: E402

fit = load_script("fit_model")
TABLES, CHECKED = 10_000, 15
SD, TAIL, DRAWS = 1.4, 0.055, (8, 12)
SCENARIOS = {  # true biases of tasks
    "2 tasks at 0": [0, 0],
    "2 at +0.8": [0.8, 0.8],
    "0 and +3": [0, 3],
    "-1.06 and +1.06": [-1.06, 1.06],
    "5 at 0": [0] * 5,
    "1 of 5 at +3": [0] * 4 + [3],
    "12 of 25 at +4": [0] * 13 + [4] * 12,
    "1 of 25 at +5": [0] * 24 + [5],
    "25 at 0": [0] * 25,
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
    _, se, df = mean_over_tasks(D)
    F = D.mean(axis=2).var(axis=1, ddof=1) / J / se**2
    top = (J - 1) ** 2 / (1 + (J - 2) * J * (K - 1) / df)
    return stats.f.sf(F, np.minimum(J - 1, top), df)


def judge_parts(mean, half, margin):
    """Of parts [tables, parts]: is it called inflated (over the margin or not), is it below it?"""
    return mean - half > 0, mean + half < margin


def depends(p, inflated, no):
    return (p < 0.05) & (inflated & ~no).any(axis=1) & no.any(axis=1)


def judge_tasks(D, margin=1):
    """Columns of D [tables, tasks, draws] by the present rule, and by the former what differs."""
    mean, se, df = mean_over_tasks(D[:, :, None])
    half, shown_half, p = half_of(se, df), half_of(se, df, D.shape[1]), p_of_alike(D)
    inflated, no = judge_parts(mean, shown_half, margin)
    middle, middle_se, middle_df = mean_over_tasks(D)
    middle_half = half_of(middle_se, middle_df)
    former_depends = (p < 0.05) & (mean - half > 0).any(axis=1) & (mean + half < 0).any(axis=1)
    return {"low": mean - half, "shown_low": mean - shown_half, "p": p, "inflated": inflated,
            "depends": depends(p, inflated, no), "mean_low": middle - middle_half,
            "mean_no": middle + middle_half < margin, "former_inflated": mean - half > 0,
            "former_depends": former_depends,
            "former_no": ~former_depends & (np.abs(middle) + middle_half < margin)}


# fit_model.py must agree


def rows_of(D, m):
    """Rows of results.csv, an experiment a table; D [tables, models, tasks, draws]."""
    tables, model, task, draw = np.indices(D.shape)
    table = {"experiment": tables, "model": model, "task": task, "subsample": draw}
    rows = pd.DataFrame({name: column.ravel() for name, column in table.items()})
    names = ["experiment", "model", "task"]
    rows[names] = names + rows[names].astype(str).map("{:0>3}".format)
    return rows.assign(m=m, n=200, majority=0.3, acc_base=0.5, acc_extra=0.5,
                       acc_test=0.5 + D.ravel() / 100)


def analyzed(D, margin, m=50):
    """Biases in tasks.csv and effects.csv; each row of effects is a table or a model of it."""
    rows = fit.clean_rows(rows_of(D, m))
    tasks, effects = fit.analyze(rows, fit.metric_of("acc", margin, False))
    return [table[table["effect"] == "bias"].sort_values(["experiment", "model"], kind="stable")
            for table in (tasks, effects)]


def agree(column, ours):
    assert np.allclose(np.ravel(ours), column, rtol=1e-6, atol=1e-9), (column, ours)


def check_tasks(D, judged):
    tasks, effects = analyzed(D[:CHECKED, None], margin=1)
    first = {name: column[:CHECKED] for name, column in judged.items()}
    agree(tasks["low"], first["low"])
    agree(tasks["shown_low"], first["shown_low"])
    agree(effects["low"], first["mean_low"])
    agree(effects["p_alike"], first["p"])
    agree(effects["verdict"] == "depends", first["depends"])
    said = effects["verdict"].isin(["no", "yes-under"])
    agree(said, first["mean_no"] & ~first["depends"])
    return CHECKED


def check_models(D, margin, mean_no, low, depend, m=50):
    """D [tables, models, tasks, draws]. With m = 0 no row may be a mean over models."""
    _, effects = analyzed(D[:CHECKED], margin, m)
    means = effects[effects["models"] > 1]
    agree(effects.loc[effects["models"] == 1, "low"], low[:CHECKED])
    assert len(means) == (CHECKED if m else 0)
    if m:
        agree(means["verdict"] == "depends", depend[:CHECKED])
        agree(means["verdict"].isin(["no", "yes-under"]), (mean_no & ~depend)[:CHECKED])
    return CHECKED


# Tables of docs/validation.md


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


def tell_tasks():
    print("| true biases | K | depends: former, present | an innocent task is called inflated: "
          "former, present | inflated tasks that are: former, present | no, on average: by the "
          "mean alone, former, present |\n|" + " --- |" * 6)
    checked = 0
    for name, biases in SCENARIOS.items():
        for K in DRAWS:
            D = draw_biases(np.random.default_rng(1), biases, K)[:, :, 0]
            judged = judge_tasks(D)
            checked += check_tasks(D, judged)
            true = np.array(biases) > 0
            called = judged["former_inflated"], judged["inflated"]
            present_no = judged["mean_no"] & ~judged["depends"]
            cells = [percent(judged["former_depends"], judged["depends"]),
                     percent(*[any_of(part[:, ~true]) for part in called]),
                     percent(*[part[:, true] for part in called]),
                     percent(judged["mean_no"], judged["former_no"], present_no)]
            print(f"| {name} | {K} |", " | ".join(cells), "|", flush=True)
    print(f"fit_model.py says the same of {checked} of these tables")


def tell_methods(margin=5):
    """Two methods in one table of crossed answers (m = 0), which share draws."""
    print("| true biases | K | former, one verdict: no, yes | present, first method: no, called "
          "inflated | second method: no, yes |\n|" + " --- |" * 5)
    checked = 0
    for biases in METHODS:
        for K in (5, *DRAWS):
            D = draw_biases(np.random.default_rng(2), biases, K)
            mean, se, df = mean_over_tasks(D)
            half = half_of(se, df)
            inflated, no = judge_parts(mean, half, margin)
            middle, middle_se, middle_df = mean_over_tasks(D.mean(axis=1))
            middle_half = half_of(middle_se, middle_df)
            checked += check_models(D, margin, None, mean - half, None, m=0)
            one = np.abs(middle) + middle_half < margin, middle - middle_half > margin
            second_yes = mean[:, 1] - half[:, 1] > margin
            print(f"| {biases[0]} and {biases[1]} | {K} | {percent(*one)} "
                  f"| {percent(no[:, 0], inflated[:, 0])} | {percent(no[:, 1], second_yes)} |",
                  flush=True)
    return checked


def tell_models(margin=1):
    """Two models that share draws (m > 0), with independent biases of a draw."""
    print("| true biases | tasks | K | depends on the model | an innocent model is called inflated "
          "| inflated ones that are | no, on average: by the mean alone, present |\n|"
          + " --- |" * 7)
    checked = 0
    for biases in MODELS:
        for J in (1, 2):
            for K in DRAWS:
                D = draw_biases(np.random.default_rng(3), biases, K, J)
                mean, se, df = mean_over_tasks(D)
                inflated, no = judge_parts(mean, half_of(se, df, len(biases)), margin)
                middle, middle_se, middle_df = mean_over_tasks(D.mean(axis=1))
                mean_no = middle + half_of(middle_se, middle_df) < margin
                of_draws = D.mean(axis=2)
                p = stats.ttest_rel(of_draws[:, 0], of_draws[:, 1], axis=1).pvalue
                depend = depends(p, inflated, no)
                checked += check_models(D, margin, mean_no, mean - half_of(se, df), depend)
                true = np.array(biases) > 0
                cells = [percent(depend), percent(any_of(inflated[:, ~true])),
                         percent(inflated[:, true]), percent(mean_no, mean_no & ~depend)]
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
