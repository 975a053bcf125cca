"""fit_model.py against independent oracles: the paper's Table 1, hand arithmetic, brute force, scipy, plain PyMC
models, simulation."""

import csv
import itertools
import math
import re
import warnings
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from scipy import special, stats

from conftest import ROOT, load_script

PAPER = ROOT / "tests" / "published"
TABLE_1 = {  # boost, bias in percent by (m, model, n), as printed in the paper: Tables 1a and 1b
    (50, "bert", 50): ("4.1", "0.19"),
    (50, "bert", 100): ("3.9", "0.18"),
    (50, "bert", 200): ("3.9", "-0.39"),
    (50, "bert", 500): ("3.5", "0.48"),
    (50, "gpt2", 50): ("3.8", "0.18"),
    (50, "gpt2", 100): ("4.1", "0.11"),
    (50, "gpt2", 200): ("4.4", "-0.05"),
    (50, "gpt2", 500): ("4.6", "-0.08"),
    (100, "bert", 50): ("6.2", "-0.08"),
    (100, "bert", 100): ("6.1", "-0.37"),
    (100, "bert", 200): ("4.1", "0.33"),
    (100, "bert", 500): ("6.1", "-0.16"),
    (100, "gpt2", 50): ("2.2", "-0.05"),
    (100, "gpt2", 100): ("2.5", "0.03"),
    (100, "gpt2", 200): ("6.3", "-0.01"),
    (100, "gpt2", 500): ("3.9", "-0.21"),
}


MIRRORED = ("acc_base_on_extra", "acc_extra_on_extra", "acc_test_on_extra")


@pytest.fixture(scope="module")
def f():
    return load_script("fit_model")


@pytest.fixture
def run(f, tmp_path, capsys, monkeypatch):
    """run(flags...) -> (exit status, stdout, stderr) of main() in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        status = 0
        try:
            f.run_script(f.main, list(map(str, flags)))
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def made_rows(tasks=3, subsamples=4, models=("a", "b"), n=40, seed=0, **changes):
    """A DataFrame in our columns, from coins."""
    rng, rows = np.random.default_rng(seed), []
    for model, j, k in itertools.product(models, range(tasks), range(1, subsamples + 1)):
        counts = rng.binomial(n, [0.5 + 0.01 * j, 0.55 + 0.01 * j, 0.55 + 0.01 * j])
        row = {
            "experiment": "few-shot",
            "model": model,
            "task": f"task{j:02}",
            "m": 10,
            "n": n,
            "subsample": k,
            "num_classes": 2,
            "majority": 0.5,
        }
        rows.append(row | dict(zip(("acc_base", "acc_extra", "acc_test"), counts / n)) | changes)
    return pd.DataFrame(rows)


def saved(table, path):
    table.to_csv(path, index=False)
    return path


def load(f, *paths, metric="acc", plain=False, **chosen):
    """The rows of the paths as main reads them."""
    flags = dict.fromkeys(("experiment", "m", "n", "models", "tasks")) | chosen
    return f.load_rows(SimpleNamespace(paths=[Path(path) for path in paths], plain=plain, **flags), metric)


def tables_of(f, table, path, metric="acc", plain=False):
    """(rows, differences, tasks.csv, effects.csv as a dict) of rows."""
    rows = load(f, saved(table, path), metric=metric, plain=plain)
    long = f.differences(rows, metric)
    tasks = f.task_table(rows, long[long["effect"].isin(f.EFFECTS)], metric, 1.0)
    if metric == "acc":
        tasks = f.with_tests(tasks, rows)
    return rows, long, tasks, f.effects_table(tasks, metric, 1.0)


def plan_of(f, rows, quantity, margin=1):
    """plan.csv of rows as main loads them, of one quantity."""
    long = f.differences(rows, "acc").query("effect == @quantity")
    return f.plan_table(f.effects_table(f.task_table(rows, long, "acc"), "acc", margin), long, margin)


def round_twice(value, digits):
    """Half up to three decimals, then to the table's: 0.1848 becomes 0.185 and then 0.19, as printed in the paper."""
    thrice = Decimal(str(round(value, 6))).quantize(Decimal("0.001"), ROUND_HALF_UP)
    return str(thrice.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


# The published numbers ------------------------------------------------------------------------------------------


def test_tables_1a_and_1b_are_the_papers(run):
    status, out, _ = run(
        PAPER / "few_shot_m50.csv", PAPER / "few_shot_m100.csv", "--draws", 0, "--no-figures"
    )
    means = pd.read_csv("fits/means.csv")
    assert status == 0 and len(means) == 16 and set(means["tasks"]) == {25}
    for row in means.itertuples():
        boost, bias = TABLE_1[row.m, row.model, row.n]
        assert round_twice(row.boost, len(boost.partition(".")[2])) == boost
        assert round_twice(row.bias, len(bias.partition(".")[2])) == bias
    assert re.search(
        r"mean bias of a task over settings and models: from .* 12 of 25 above 0", out
    )  # section 7
    assert re.search(
        r"mean boost of a task .*: from -0.96 \(blog_authorship_corpus\) .* 23 of 25 above 0", out
    )
    assert (
        "adjusted p below .05 in 0 of 400, smallest 0.081; +3 points or more: amazon_counterfactual_en,"
        in out
    )
    picked = pd.read_csv("fits/tasks.csv").query("effect == 'bias' and estimate >= 3 and model != 'all'")
    assert set(picked["model"]) == {"bert"}  # as the paper reports


def test_these_tasks_on_the_published_rows_by_plain_loops(f, tmp_path):
    """Estimate, standard error and degrees of freedom of every cell, all models together, from counts."""
    path = PAPER / "few_shot_m100.csv"
    *_, effects = tables_of(f, pd.read_csv(path), tmp_path / "r.csv")
    values = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            n = int(row["n"])
            change = (round(float(row["acc_test"]) * n) - round(float(row["acc_extra"]) * n)) / n
            values.setdefault(n, {}).setdefault(row["task"], {}).setdefault(row["subsample"], []).append(
                100 * change
            )
    cells = []
    for n, tasks in values.items():
        means, v, K = [], [], []
        for subsamples in tasks.values():
            D = [sum(both) / 2 for both in subsamples.values()]
            mean = sum(D) / len(D)
            means.append(mean)
            K.append(len(D))
            v.append(max(sum((d - mean) ** 2 for d in D) / (len(D) - 1), (100 / n) ** 2 / 12) / len(D))
        estimate, se = sum(means) / 25, math.sqrt(sum(v)) / 25
        df = sum(v) ** 2 / sum(x**2 / (k - 1) for x, k in zip(v, K))
        row = effects["few-shot", 100, n, "bias", "all", "these tasks"]
        half = stats.t.ppf(0.945, df) * se
        assert [row[name] for name in ("estimate", "se", "df", "low", "high")] == pytest.approx(
            [estimate, se, df, estimate - half, estimate + half]
        )
        cells.append((estimate, se, df))
    assert effects["few-shot", 100, 50, "bias", "all", "these tasks"]["verdict"] == "within the margin"

    # All settings together: the mean of the four, each with its own noise
    v = [(se / 4) ** 2 for _, se, _ in cells]
    df = sum(v) ** 2 / sum(x**2 / cell[2] for x, cell in zip(v, cells))
    row = effects["few-shot", "", "", "bias", "all", "these tasks"]
    assert row["estimate"] == pytest.approx(sum(cell[0] for cell in cells) / 4)
    assert (row["se"], row["df"]) == pytest.approx((math.sqrt(sum(v)), df)) and row["settings"] == 4
    assert row["high"] - row["estimate"] == pytest.approx(stats.t.ppf(0.945, df) * math.sqrt(sum(v)))


def test_zero_shot_signs_are_exact(run):
    status, out, _ = run(PAPER / "zero_shot_m100_n100.csv", "--draws", 0, "--no-figures")
    (row,) = pd.read_csv("fits/means.csv").itertuples()
    assert status == 0 and (round_twice(row.boost, 2), round_twice(row.bias, 2)) == ("5.25", "-0.04")
    assert re.search(r"mean bias of a task .* 12 of 25 above 0", out)  # 12 negative, one is 0


def test_the_answer_over_the_published_settings(run):
    """Eight settings: +.006 +- .089 points (DESIGN), said first, on top of effects.csv, and in the figure of half a
    page."""
    status, out, _ = run(PAPER / "few_shot_m50.csv", PAPER / "few_shot_m100.csv", "--draws", 0)
    first = out.splitlines()[0]
    assert status == 0 and first.startswith(
        "few-shot: bias over all 8 settings of m and n: between -0.08 and +0.10 points for these 25 tasks"
    )
    assert first.endswith("within the margin of 1; an effect of 0.14 would show with 80 % probability")
    assert "1 of 8 exclude 0 (chance alone: about 0.9)" in out.splitlines()[1]
    effects = pd.read_csv("fits/effects.csv")
    top = effects.iloc[0]
    assert top[["m", "n"]].isna().all() and (top["model"], top["effect"], top["target"]) == (
        "all",
        "bias",
        "these tasks",
    )
    assert top["estimate"] == pytest.approx(0.006, abs=0.0005) and top["high"] - top[
        "estimate"
    ] == pytest.approx(0.089, abs=0.0005)
    assert (
        len(effects) == 8 * 2 * 3 * 2 + 2 * 3
    )  # settings, effects, models and all, targets; over all settings
    width, height = matplotlib.image.imread("fits/effects.png").shape[1::-1]
    assert height / width < 0.72  # 6.5 inches wide on paper, it takes less than half of 9.5


def test_the_published_layout_gives_the_numbers_of_the_flat_file(f, tmp_path):
    flat = (
        pd.read_csv(PAPER / "few_shot_m50.csv")
        .query("n == 500 and task in ('ag_news', 'trec')")
        .sort_values(["model", "task", "subsample"])
    )
    for (model, task), mine in flat.groupby(["model", "task"]):
        folder = tmp_path / "accuracies_zero_shot" / "m50" / "n500" / model / task
        folder.mkdir(parents=True)
        mine.rename(columns=lambda name: name.removeprefix("acc_"))[
            ["num_classes", "majority", "base", "extra", "test"]
        ].to_csv(folder / "accuracies.csv", index=False)
    laid = load(f, tmp_path / "accuracies_zero_shot")
    columns = [
        "model",
        "task",
        "m",
        "n",
        "subsample",
        "num_classes",
        "majority",
        "acc_base",
        "acc_extra",
        "acc_test",
    ]
    pd.testing.assert_frame_equal(laid[columns], flat[columns].reset_index(drop=True))
    assert set(laid["experiment"]) == {"accuracies_zero_shot"}


# Targets, verdicts, plans: by hand and against scipy --------------------------------------------------------------


def hand_rows():
    """Three tasks, two models, unequal K: points of bias given, n = 100, acc_extra = .5."""
    bias = {
        ("a", "x"): [1, 3],
        ("b", "x"): [3, 5],
        ("a", "y"): [0, 2, 4],
        ("b", "y"): [2, 0, 2],
        ("a", "z"): [1, 1],
        ("b", "z"): [1, 1],
    }
    rows = [
        {
            "experiment": "e",
            "model": model,
            "task": task,
            "m": 8,
            "n": 100,
            "subsample": k,
            "num_classes": 2,
            "majority": 0.5,
            "acc_base": 0.4,
            "acc_extra": 0.5,
            "acc_test": 0.5 + value / 100,
        }
        for (model, task), values in bias.items()
        for k, value in enumerate(values, 1)
    ]
    return pd.DataFrame(rows)


def test_these_tasks_by_hand(f, tmp_path):
    """Means over models: x (2, 4), y (1, 1, 3), z (1, 1). Task means 3, 5/3, 1; s^2 = 2, 4/3, floor 1/12; v = 1, 4/9,
    1/24."""
    *_, effects = tables_of(f, hand_rows(), tmp_path / "r.csv")
    row = effects["e", 8, 100, "bias", "all", "these tasks"]
    v = np.array([1, 4 / 9, 1 / 24])
    assert row["estimate"] == pytest.approx(17 / 9)
    assert row["se"] == pytest.approx(math.sqrt(107 / 72) / 3)
    assert row["df"] == pytest.approx((107 / 72) ** 2 / (1 / 1 + (16 / 81) / 2 + (1 / 576) / 1))
    assert (row["tasks"], row["subsamples"]) == (3, 2) and row["se"] == pytest.approx(np.sqrt(v.sum()) / 3)
    one = effects["e", 8, 100, "bias", "a", "these tasks"]  # x (1, 3), y (0, 2, 4), z (1, 1)
    assert one["se"] == pytest.approx(math.sqrt(2 / 2 + 4 / 3 + (1 / 12) / 2) / 3)
    like = effects["e", 8, 100, "bias", "all", "tasks like these"]
    expected = stats.ttest_1samp([3, 5 / 3, 1], 0).confidence_interval(0.89)
    assert (like["low"], like["high"]) == pytest.approx((expected.low, expected.high)) and like["df"] == 2


def test_one_task_is_a_t_interval_and_equal_differences_have_width(f, tmp_path):
    rows = hand_rows().query("model == 'a' and task == 'y'")
    _, _, tasks, effects = tables_of(f, rows, tmp_path / "r.csv")
    row, expected = (
        effects["e", 8, 100, "bias", "a", "these tasks"],
        stats.ttest_1samp([0, 2, 4], 0).confidence_interval(0.89),
    )
    assert (row["low"], row["high"]) == pytest.approx((expected.low, expected.high))
    assert tuple(tasks.xs("bias", level="effect")[["low", "high"]].iloc[0]) == pytest.approx(
        (expected.low, expected.high)
    )
    *_, effects = tables_of(f, hand_rows().query("task == 'z'"), tmp_path / "z.csv")  # two equal values
    row = effects["e", 8, 100, "bias", "all", "these tasks"]
    assert row["high"] - row["low"] == pytest.approx(2 * stats.t.ppf(0.945, 1) * math.sqrt(1 / 12 / 2))


def test_verdicts_and_needed_subsamples(f):
    assert (
        f.verdict_of(-0.9, 0.9, 1) == "within the margin" and f.verdict_of(1.1, 2, 1) == "beyond the margin"
    )
    assert (
        f.verdict_of(-2, -1.1, 1) == "beyond the margin"
        and f.verdict_of(0.5, 1.5, 1) == "not settled"
        and f.verdict_of(math.nan, math.nan, 1) == ""
    )
    for se_1, tasks, margin in ((2.0, 5, 1), (0.1, 3, 1), (7.3, 25, 0.6), (3.0, 1, 1)):
        assert f.effective_tasks(np.full(tasks, 3.0)) == pytest.approx(tasks)
        by_search = next(
            R for R in range(2, 10**6) if stats.t.ppf(0.945, tasks * (R - 1)) * se_1 / math.sqrt(R) < margin
        )
        assert f.needed_subsamples(se_1, tasks, margin) == by_search


def bias_rows(tasks, n=200, **more):
    """Rows with acc_extra .5 and these biases in points, {task: [one a subsample]}."""
    rows = [
        {
            "experiment": "few-shot",
            "model": "bert",
            "task": task,
            "m": 50,
            "n": n,
            "subsample": k,
            "num_classes": 2,
            "majority": 0.5,
            "acc_base": 0.5,
            "acc_extra": 0.5,
            "acc_test": 0.5 + value / 100,
        }
        | more
        for task, values in tasks.items()
        for k, value in enumerate(values, 1)
    ]
    return pd.DataFrame(rows)


def test_needed_is_more_than_there_is_where_one_task_makes_the_noise(f, tmp_path):
    """At R = K the half-width is the observed one: Satterthwaite's df, not those of equally noisy tasks."""
    rows = bias_rows({"a": [-3, 3, 0]} | {task: [0.5, 0, 0.5] for task in "bcd"})
    *_, effects = tables_of(f, rows, tmp_path / "r.csv")
    row = effects["few-shot", 50, 200, "bias", "bert", "these tasks"]
    assert (row["high"] - row["low"]) / 2 > 1 and row["needed"] == 4
    K, w = 3, np.array([9, *[1 / 12] * 3])  # variances
    half = [
        stats.t.ppf(0.945, w.sum() ** 2 / (w**2).sum() * (R - 1)) * math.sqrt(w.sum() / R) / 4 for R in (K, 4)
    ]
    assert (row["high"] - row["low"]) / 2 == pytest.approx(half[0], abs=1e-3) and half[1] < 1
    plan = plan_of(f, load(f, tmp_path / "r.csv"), "bias").iloc[0]
    assert plan["needed"] == 4 and plan["half_width"] == pytest.approx(half[0], abs=1e-3)


def test_the_interval_of_needed_with_a_fixed_test_set_holds_the_truth(f):
    """Shares that vary with a known sd from training to training, on fresh test texts: what is needed is known in
    advance."""
    rng, n, sd, J, K, held, told = np.random.default_rng(0), 100, 0.06, 5, 10, 0, 0
    nothing = dict.fromkeys(MIRRORED, math.nan)
    truth = f.needed_subsamples(100 * sd / math.sqrt(J), J, 1)
    for _ in range(120):
        shares = rng.binomial(n, np.clip(rng.normal(0.6, sd, (J, K)), 0, 1)) / n
        rows = [
            {
                "experiment": "e",
                "model": "a",
                "task": str(j),
                "m": 8,
                "n": n,
                "subsample": k,
                "num_classes": 2,
                "majority": 0.5,
                "acc_base": 0.5,
                "acc_extra": shares[j, k],
                "acc_test": 0.5,
            }
            for j in range(J)
            for k in range(K)
        ]
        plan = (
            plan_of(f, pd.DataFrame(rows).assign(arms="plain", **nothing), "acc_extra")
            .query("test_set == 'fixed'")
            .iloc[0]
        )
        told += plan["needed"] > 0
        held += plan["needed_low"] <= truth <= plan["needed_high"]
    assert told > 80 and held / told > 0.82


def test_what_the_first_sentences_leave_out_is_said(run, tmp_path):
    """Models that share no subsample each for itself; settings without an interval counted; equal task means give no
    interval."""
    one, two = bias_rows({"a": [3, 5, 4]}), bias_rows({"b": [-42, -41, -43]}, model="gpt2")
    _, out, _ = run(
        saved(pd.concat([one, two]), tmp_path / "r.csv"), "--draws", 0, "--effects", "bias", "--no-figures"
    )
    first = out.partition("\n\n")[0]
    assert "bias of bert: between" in first and "bias of gpt2: between -43" in first
    both = pd.concat([one, one.assign(m=100), one[:1].assign(m=200)])
    _, out, _ = run(saved(both, tmp_path / "r.csv"), "--draws", 0, "--effects", "bias", "--no-figures")
    assert (
        "over all 2 settings of m and n" in out
        and "few-shot, m = 200, n = 200: bias of bert: +3.00 points for this task (observed): no interval"
        in out
    )
    run(
        saved(bias_rows({"a": [2, 4, 6], "b": [0, 4, 8]}), tmp_path / "r.csv"),
        "--draws",
        0,
        "--effects",
        "bias",
        "--no-figures",
    )
    like = pd.read_csv("fits/effects.csv").query("target == 'tasks like these'").iloc[0]
    assert like["estimate"] == 4 and pd.isna(like["low"]) and pd.isna(like["verdict"])


def test_consistent_harm_many_subsamples_and_dollars(f, run, tmp_path):
    rng = np.random.default_rng(0)
    for _ in range(100):  # sums of shares that rounding would let exceed 1
        assert f.sign_flip_p(-rng.integers(1, 30, 70)) <= 1
    harm = bias_rows({f"US$_{j}_$": -rng.integers(1, 30, 70) for j in range(5)})
    status, _, err = run(saved(harm, tmp_path / "h.csv"), "--draws", 0)
    assert status == 0 and not err and len(list(Path("fits").glob("*.png"))) == 3


@pytest.mark.parametrize("df", [1, 4, 30])
def test_the_detectable_effect_has_80_percent_power(f, df):
    rng, effect = np.random.default_rng(df), f.detectable_effect(0.5, df)
    t = (effect / 0.5 + rng.normal(size=400_000)) / np.sqrt(rng.chisquare(df, 400_000) / df)
    assert np.mean(t > stats.t.ppf(0.945, df)) == pytest.approx(0.8, abs=0.004)


@pytest.mark.parametrize("seed", range(20))
def test_sign_flip_p_is_the_share_of_all_sign_patterns(f, seed):
    rng = np.random.default_rng(seed)
    changes = rng.integers(-5, 6, rng.integers(1, 11))
    sums = [np.dot(signs, changes) for signs in itertools.product((-1, 1), repeat=len(changes))]
    assert f.sign_flip_p(changes) == pytest.approx(np.mean(np.array(sums) >= changes.sum()), abs=1e-12)


def test_adjusted_p_equals_scipys(f, tmp_path):
    _, _, tasks, _ = tables_of(f, made_rows(tasks=6, subsamples=9), tmp_path / "r.csv")
    mine = tasks.loc[("few-shot", 10, 40, "bias", "a")]
    assert mine["p_adjusted"].to_numpy() == pytest.approx(stats.false_discovery_control(mine["p"]))


def test_seeds_are_averaged_first(f, tmp_path):
    one = made_rows(tasks=2)
    two = pd.concat(
        [one.assign(seed=0), one.assign(seed=1, acc_test=one["acc_extra"])]
    )  # a second seed without bias
    _, long, _, effects = tables_of(f, two, tmp_path / "two.csv")
    _, alone, _, single = tables_of(f, one, tmp_path / "one.csv")
    key = ("few-shot", 10, 40, "bias", "a", "these tasks")
    assert (
        effects[key]["estimate"] == pytest.approx(single[key]["estimate"] / 2)
        and effects[key]["subsamples"] == 4
    )
    assert len(long) == len(alone)


def test_training_variance_of_simulated_runs(f):
    """Shares with a known spread between training runs, each on fresh test texts: found; without any: not told from
    0."""
    rng, n, J, K = np.random.default_rng(0), 200, 400, 10
    skill = np.clip(rng.normal(0.7, 0.04, (J, K)), 0, 1)
    variance = f.training_variance(list(rng.binomial(n, skill) / n), n)
    assert variance == pytest.approx(1e4 * 0.04**2 / J, rel=0.05)
    variances = [f.training_variance(list(rng.binomial(n, 0.7, (20, 5)) / n), n) for _ in range(300)]
    assert np.mean(np.isfinite(variances)) == pytest.approx(0.055, abs=0.04)


def test_the_plan_by_hand(run, tmp_path):
    rows = pd.concat(
        [
            hand_rows(),
            hand_rows()
            .query("task == 'z'")
            .assign(subsample=lambda t: t["subsample"] + 2, acc_extra=0.7, acc_test=0.71),
        ]
    )
    status, out, _ = run(
        saved(rows.query("task == 'z' and model == 'a'"), tmp_path / "r.csv"), "--plan", "--margin", 5
    )
    plan = pd.read_csv("plan/plan.csv").set_index(["quantity", "test_set"])
    redrawn, fixed = (
        plan.loc["acc_extra", "redrawn"],
        plan.loc["acc_extra", "fixed"],
    )  # accuracies .5, .5, .7, .7
    assert status == 0 and redrawn["sd"] == pytest.approx(math.sqrt(400 / 3), rel=1e-5)
    binomial = 1e4 * (0.25 + 0.21) / 2 / 99
    assert fixed["sd"] == pytest.approx(math.sqrt(400 / 3 - binomial), rel=1e-5)
    assert redrawn["half_width"] == pytest.approx(stats.t.ppf(0.945, 3) * math.sqrt(100 / 3), rel=1e-5)
    assert plan.loc["bias", "redrawn"]["sd"] == pytest.approx(math.sqrt(1 / 12), rel=1e-5)
    assert plan["one"].to_numpy() == pytest.approx(
        2 * plan["half_width"], rel=1e-5
    )  # four know twice as much
    page = Path("plan/summary.md").read_text()
    assert "Written by fit_model.py" in page and out.splitlines()[1] in page
    rows = made_rows(models=("a",), tasks=1).assign(acc_extra=0.5)
    run(saved(rows, tmp_path / "same.csv"), "--plan")
    fixed = pd.read_csv("plan/plan.csv").query("test_set == 'fixed'").iloc[0]
    assert fixed["mean"] == 50 and fixed[["sd", "half_width", "needed"]].isna().all()  # no noise is seen


# The models against plain ones --------------------------------------------------------------------------------------


def settings(**changes):
    return SimpleNamespace(
        **{"draws": 1000, "tune": 500, "chains": 4, "seed": 1, "no_interaction": False} | changes
    )


def fitted(f, rows, effect, analysis, **changes):
    return f.fit(rows, effect, analysis, settings(**changes))


def plain_paper(rows):
    """The paper's model as it writes it, with a binomial likelihood, everything non-centred: bias."""
    import pymc as pm
    import pytensor.tensor as pt

    task, tasks = pd.factorize(rows["task"], sort=True)
    unit, units = pd.factorize(rows["task"] + "/" + rows["subsample"].astype(str))
    model_idx, models = pd.factorize(rows["model"], sort=True)
    with pm.Model() as model:
        mu, beta = pm.Normal("mu", 0, 1), pm.Normal("beta", 0, 1)
        alpha = pt.concatenate([pt.zeros(1), pm.Normal("alpha", 0, 5, shape=len(models) - 1)])
        sd_U, sd_V, sd_W = pm.HalfNormal("sd_U", 1), pm.HalfNormal("sd_V", 1), pm.HalfNormal("sd_W", 3.5355)
        u, v, w = (
            sd_U * pm.Normal("u", shape=len(tasks)),
            sd_V * pm.Normal("v", shape=len(units)),
            sd_W * pm.Normal("w", shape=(len(tasks), 2)),
        )
        pm.Deterministic("d", beta + w[:, 1] - w[:, 0])
        for l, arm in enumerate(("extra", "test")):
            eta = mu + alpha[model_idx] + u[task] + v[unit] + w[task, l] + beta * l
            pm.Binomial(
                f"y{l}",
                rows["n"].to_numpy(),
                logit_p=eta,
                observed=(rows[f"acc_{arm}"] * rows["n"]).round().astype(int).to_numpy(),
            )
    return model


def plain_hierarchical(rows):
    """The hierarchical model as it is written, one Normal term per difference: bias."""
    import pymc as pm

    task, tasks = pd.factorize(rows["task"], sort=True)
    model_idx, models = pd.factorize(rows["model"], sort=True)
    D, n = 100 * (rows["acc_test"] - rows["acc_extra"]).to_numpy(), rows["n"].iloc[0]
    with pm.Model() as model:
        beta, tau = pm.Normal("beta", 0, 10, shape=len(models)), pm.HalfNormal("tau", 5, shape=len(models))
        s, omega = pm.HalfNormal("s", 10, shape=len(models)), pm.HalfNormal("omega", 1, shape=len(models))
        delta = pm.Deterministic(
            "effect", beta[:, None] + tau[:, None] * pm.Normal("z", shape=(len(models), len(tasks)))
        )
        s_task = s[:, None] * pm.math.exp(omega[:, None] * pm.Normal("r", shape=(len(models), len(tasks))))
        pm.Normal(
            "D",
            delta[model_idx, task],
            pm.math.sqrt(s_task[model_idx, task] ** 2 + (100 / n) ** 2 / 12),
            observed=D,
        )
    return model


def assert_same_posterior(ours, plain, names):
    """Mean and quantiles of every component agree within Monte Carlo error."""
    import arviz

    for name in names:
        ess = [np.atleast_1d(arviz.ess(data[name])[name].values).ravel() for data in (ours, plain)]
        a, b = (data[name].values.reshape(math.prod(data[name].shape[:2]), -1) for data in (ours, plain))
        for k in range(a.shape[1]):
            sd, error = b[:, k].std(), b[:, k].std() * math.sqrt(1 / ess[0][k] + 1 / ess[1][k])
            assert abs(a[:, k].mean() - b[:, k].mean()) < 4 * error, (
                name,
                k,
                a[:, k].mean(),
                b[:, k].mean(),
                error,
            )
            assert np.quantile(a[:, k], [0.1, 0.9]) == pytest.approx(
                np.quantile(b[:, k], [0.1, 0.9]), abs=0.1 * sd + 4 * error
            ), (name, k)


@pytest.mark.parametrize("tasks, analysis", [(5, "paper"), (10, "hierarchical"), (5, "hierarchical")])
def test_every_reported_parameter_has_the_posterior_of_a_plain_model(f, tmp_path, tasks, analysis):
    """Small data, so that the priors matter too, with an effect that varies between tasks."""
    f.import_pymc()
    import nutpie

    rng, table = np.random.default_rng(3), made_rows(tasks=tasks, subsamples=3, n=60)
    table["acc_test"] = (
        table["acc_extra"]
        + table["task"].map(dict(zip(sorted(set(table["task"])), rng.normal(0.05, 0.06, tasks))))
    ).clip(0, 1)
    table["acc_test"] = (60 * table["acc_test"]).round() / 60
    rows = load(f, saved(table, tmp_path / "r.csv"))
    ours = fitted(f, rows, "bias", analysis, draws=2000)
    plain = (plain_paper if analysis == "paper" else plain_hierarchical)(rows)
    compiled = nutpie.compile_pymc_model(plain)
    plain = nutpie.sample(
        compiled,
        draws=1000,
        tune=500,
        chains=4,
        cores=2,
        seed=1,
        progress_bar=False,
        save_warmup=False,
        target_accept=0.9,
    )
    names = (
        ("mu", "beta", "alpha", "sd_U", "sd_V", "sd_W", "d")
        if analysis == "paper"
        else ("beta", "tau", "s", "omega", "effect")
    )
    assert_same_posterior(ours.posterior, plain.posterior, names)


def test_the_reference_posterior_of_a_published_cell(f):
    """m = 100, n = 500, bias: beta -.008 (sd .0115), alpha -.566 (.0046), sd_U 1.14, sd_V .182, sd_W .0365: a long
    run of the model as the paper writes it."""
    rows = load(f, PAPER / "few_shot_m100.csv", n=[500])
    result = fitted(f, rows, "bias", "paper")
    mean, sd = result.summary["mean"], result.summary["sd"]
    assert result.warning == ""
    assert mean["beta"] == pytest.approx(-0.0080, abs=0.0012) and sd["beta"] == pytest.approx(
        0.0115, abs=0.001
    )
    assert mean["alpha[gpt2]"] == pytest.approx(-0.566, abs=0.001) and sd["alpha[gpt2]"] == pytest.approx(
        0.0046, abs=0.0003
    )
    assert mean["sd_U"] == pytest.approx(1.14, abs=0.03) and sd["sd_U"] == pytest.approx(0.16, abs=0.02)
    assert mean["sd_V"] == pytest.approx(0.182, abs=0.002) and sd["sd_V"] == pytest.approx(0.0063, abs=0.0006)
    assert mean["sd_W"] == pytest.approx(0.0365, abs=0.0015) and sd["sd_W"] == pytest.approx(
        0.0067, abs=0.0007
    )


def test_predictive_effects_are_binomial_means(f):
    """Fixed parameters: the mean over draws is the difference of the shares, the variance that of two binomials."""
    import xarray

    c, d, alpha, K, n = np.array([0.2, -0.4, 1.0]), np.array([0.5, -0.3]), 0.7, [2, 1], 50
    task_idx = np.array([0, 0, 1])
    shape = (2, 20_000)
    posterior = xarray.Dataset(
        {
            "beta": (("chain", "draw"), np.zeros(shape)),
            "c": (("chain", "draw", "unit"), np.tile(c, (*shape, 1))),
            "d": (("chain", "draw", "task"), np.tile(d, (*shape, 1))),
            "alpha": (("chain", "draw", "later"), np.full((*shape, 1), alpha)),
        }
    )
    f.predict_effects(posterior, np.array([[n, n, n], [n, n, 0]]), task_idx, np.random.default_rng(0))
    effects = posterior["effect"].values.reshape(-1, 2, 2)
    for i, j in ((0, 0), (1, 0), (0, 1)):
        logits = c[task_idx == j] + i * alpha
        shares = [special.expit(logits + sign * d[j] / 2) for sign in (1, -1)]
        assert effects[:, i, j].mean() == pytest.approx(100 * np.mean(shares[0] - shares[1]), abs=0.15)
        assert effects[:, i, j].var() == pytest.approx(
            1e4 * sum((p * (1 - p)).sum() for p in shares) / n / K[j] ** 2, rel=0.04
        )
    assert np.isnan(effects[:, 1, 1]).all() and np.isfinite(posterior["difference"].values).all()
    assert posterior["difference"].values[..., 0].mean() == pytest.approx(
        np.mean([np.nanmean(effects[:, i].mean(0)) for i in (0, 1)]), abs=1e-6
    )


def test_a_hierarchical_mean_off_the_headline_is_said(f):
    names = ["mean", "beta[a]", "beta[b]"]
    summary = pd.DataFrame({"mean": 1.0, "sd": 0.1, "hdi_low": 0.8, "hdi_high": 1.2}, index=names)
    result = SimpleNamespace(
        cell=("e", 8, 100), effect="bias", analysis="hierarchical", models=["a", "b"], summary=summary
    )
    cases = (
        (("all", "a", "b"), 0.4, 3),
        (("all", "a", "b"), 0.6, 0),
        (("a", "b"), 0.4, 2),
    )  # no "all": models differ
    for models, estimate, notes in cases:
        effects = {}
        for model in models:
            row = {"estimate": estimate, "se": 0.5, "arms": "crossed", "tasks": 1, "subsamples": 5}
            effects["e", 8, 100, "bias", model, "these tasks"] = row
            effects["e", 8, 100, "bias", model, "tasks like these"] = row | {"tasks": 2}
        found = f.mean_effects(result, effects, 1.0)
        assert len(found) == notes and all(
            "+0.60 points from the mean of these tasks" in note for note in found
        )
        row = effects["e", 8, 100, "bias", "b", "hierarchical"]
        assert (row["estimate"], row["tasks"], row["subsamples"], row["arms"]) == (1, 2, 5, "crossed")
        assert (("e", 8, 100, "bias", "all", "hierarchical") in effects) == ("all" in models)


@pytest.mark.parametrize(
    "column, value",
    [("r_hat", math.nan), ("r_hat", 1.02), ("ess_bulk", 399), ("ess_tail", math.nan), ("ess_tail", 200)],
)
def test_the_gate_of_convergence(f, column, value):
    good = pd.DataFrame({"r_hat": [1.001] * 3, "ess_bulk": [900.0] * 3, "ess_tail": [800.0] * 3})
    assert f.warning_of(good, 0) == "" and "1 divergence" in f.warning_of(good, 1)
    for place in range(3):  # a missing value counts wherever it stands
        bad = good.copy()
        bad.loc[place, column] = value
        assert "not converged" in f.warning_of(bad, 0)


# The command line ---------------------------------------------------------------------------------------------------


def test_the_conclusion_comes_first_and_every_table_is_there(run, tmp_path):
    table = made_rows(tasks=5, subsamples=3)
    status, out, err = run(
        saved(table, tmp_path / "results.csv"), "--draws", 50, "--tune", 100, "--chains", 2
    )
    assert status in (0, 3) and ("not converged" in out) == (status == 3) == ("did not converge" in err)
    first = out.splitlines()[0]
    assert first.startswith("few-shot, m = 10, n = 40: bias: between ")
    assert out.index("bias:") < out.index(", paper: ") < out.index("tasks like these")
    names = {path.name for path in Path("fits").glob("*.csv")}
    assert names == {"effects.csv", "means.csv", "tasks.csv", "posterior.csv"}
    manual = load_script("fit_model").__doc__
    for name in names:  # the manual names every column
        block = re.search(rf"    {name} +(.*?)(?=\n    \w+\.csv|\nExit)", manual, re.S).group(1)
        assert all(
            column in block
            for column in pd.read_csv(f"fits/{name}").columns
            if not column.endswith(("_low", "_high"))
        ), name
    effects = pd.read_csv("fits/effects.csv")
    assert (
        set(effects["target"]) == {"these tasks", "tasks like these", "paper", "hierarchical"}
        and len(effects) == 2 * 3 * 4
    )
    tasks = pd.read_csv("fits/tasks.csv").query("model != 'all'")
    assert tasks[["paper", "hierarchical", "p_beyond", "paper_low", "hierarchical_high"]].notna().all().all()
    posterior = pd.read_csv("fits/posterior.csv")
    assert {
        "beta",
        "sd_W",
        "alpha[b]",
        "d[task00]",
        "difference[all]",
        "tau[a]",
        "new_task[b]",
        "mean",
    } <= set(posterior["parameter"])
    figures = {path.name for path in Path("fits").rglob("*.png")}
    assert figures == {"effects.png", "tasks.few-shot.10.40.bias.png", "tasks.few-shot.10.40.boost.png"}
    page = Path("fits/summary.md").read_text()
    assert (
        first in page
        and "paper: " in page
        and "](effects.png)" in page
        and "](tasks.few-shot.10.40.bias.png)" in page
    )
    for text in (
        "Fix the number of subsamples before looking",
        "## Answers in points",
        "## Tasks",
        "p_adjusted",
        "## What was run",
        "30 rows of no version named",
    ):
        assert text in page, text
    assert page.rstrip().endswith("Written by fit_model.py.")


def test_too_few_draws_end_with_status_3_and_say_so_in_every_row(run, tmp_path):
    saved(made_rows(tasks=5, subsamples=3), tmp_path / "results.csv")
    status, _, err = run("--draws", 20, "--tune", 2, "--chains", 2, "--analysis", "paper", "--no-figures")
    assert status == 3 and "2 of 2 fits did not converge" in err
    assert pd.read_csv("fits/posterior.csv")["warning"].str.contains("not converged").all()


def test_words_for_margins(run, tmp_path):
    rows = hand_rows().query("model == 'a'")
    _, out, _ = run(
        saved(rows.query("task == 'y'"), tmp_path / "y.csv"),
        "--draws",
        0,
        "--no-figures",
        "--margin",
        0.1,
        "--effects",
        "bias",
    )
    assert re.search(
        r"not settled against the margin of 0.1: uncertainty ±\d\.\d+; "
        r"the same run with --subsamples \d+ settles it with 80 %",
        out,
    )
    _, out, _ = run(saved(rows, tmp_path / "r.csv"), "--draws", 0, "--no-figures", "--margin", 30)
    assert "within the margin of 30" in out and "these 3 tasks" in out and "boost" in out
    _, out, _ = run(
        tmp_path / "r.csv", "--draws", 0, "--no-figures", "--effects", "boost"
    )  # all boosts are 10 points
    assert "beyond the margin of 1" in out and "sign-flip" not in out  # few tasks


def test_other_metrics(run, tmp_path):
    table = made_rows().assign(f1_base=0.5, f1_extra=0.61234, f1_test=0.62234)
    for arm, value in (("base", 1.0), ("extra", 0.9), ("test", 0.95)):
        table[f"nll_{arm}"] = value + 0.01 * table["subsample"] * (arm == "test")
    saved(table, tmp_path / "r.csv")
    status, out, _ = run("r.csv", "--metric", "f1", "--no-figures")
    effects = pd.read_csv("fits/effects.csv")
    assert (
        status == 0
        and set(effects["metric"]) == {"f1"}
        and set(effects["target"]) == {"these tasks", "tasks like these"}
    )
    assert effects.query("effect == 'bias'")["estimate"].to_numpy() == pytest.approx(1)
    status, out, _ = run("r.csv", "--metric", "nll")
    row = (
        pd.read_csv("fits/effects.csv")
        .query("effect == 'bias' and model == 'a' and target == 'these tasks'")
        .iloc[0]
    )
    assert (
        status == 0
        and row["estimate"] == pytest.approx(0.075)
        and "nats (lower is better) for these 3 tasks" in out
        and pd.isna(row["verdict"])
    )
    status, out, _ = run("r.csv", "--metric", "nll", "--plan", "--margin", 0.1)  # all boosts are equal
    assert status == 0 and "nan" not in out and "<NA>" not in out and "bias: between +0.0" in out
    saved(pd.concat([table, table.assign(m=20)]), tmp_path / "two.csv")
    status, out, _ = run("two.csv", "--metric", "nll", "--no-figures")
    assert (
        status == 0
        and "(no --margin is given)" in out
        and re.search(r"single settings: intervals from .*, \d of 2 exclude 0", out)
    )
    status, _, err = run("r.csv", "--metric", "bleu")
    assert status == 2 and "0 columns 'bleu_base'" in err


SMALL = {
    "one task": dict(tasks=1),
    "one subsample": dict(subsamples=1),
    "one model": dict(models=("a",)),
    "two tasks, one model": dict(tasks=2, models=("a",)),
    "one task, one subsample, one model": dict(tasks=1, subsamples=1, models=("a",)),
    "seven tasks": dict(tasks=7, subsamples=12),
}


@pytest.mark.parametrize("name", [*SMALL, "no differences", "no shared task", "45 tasks"])
def test_small_data(run, tmp_path, name):
    table = made_rows(**SMALL.get(name, {}))
    if name == "no differences":
        table = table.assign(acc_base=0.5, acc_extra=0.5, acc_test=0.5)
    if name == "no shared task":
        table = table[(table["model"] == "a") == (table["task"] == "task00")]
    if name == "45 tasks":
        table = made_rows(tasks=45, models=("a",))
    status, out, err = run(saved(table, tmp_path / "results.csv"), "--draws", 0)
    text = out + Path("fits/summary.md").read_text()
    assert (
        status == 0
        and "nan" not in text
        and "<NA>" not in text
        and not re.search(r"\b1 (tasks|subsamples)\b", text)
        and not err
    )
    assert all(path.stat().st_size > 5_000 for path in Path("fits").glob("*.png"))
    if "subsample" in name:
        assert "no interval, which takes two subsamples of each task: the same run with --subsamples 5" in out
    status, out, err = run("results.csv", "--plan")
    assert status == 0 and "nan" not in out and "<NA>" not in out and not err


@pytest.mark.parametrize("name", ["one task", "no differences"])
def test_the_samplers_run_on_small_data(run, tmp_path, name):
    table = (
        made_rows(tasks=1)
        if name == "one task"
        else made_rows(tasks=5, subsamples=3).assign(acc_base=0.5, acc_extra=0.5, acc_test=0.5)
    )
    status, out, _ = run(
        saved(table, tmp_path / "results.csv"),
        "--draws",
        50,
        "--tune",
        100,
        "--chains",
        2,
        "--effects",
        "bias",
        "--no-figures",
    )
    assert status in (0, 3) and "nan" not in out.replace("r_hat nan", "")
    assert ("left out, it needs two tasks" in out) == ("without W and U" in out) == (name == "one task")


# Bad input ------------------------------------------------------------------------------------------------------------


def with_line(table, k, **changes):
    table = table.astype(object).copy()
    for name, value in changes.items():
        table.loc[k, name] = value
    return table


BAD = {  # name: (what becomes of the rows' text, what the message says)
    "no accuracies": (
        lambda t: t.drop(columns="acc_extra").to_csv(index=False),
        "0 columns 'acc_extra', not one; separated by commas: experiment",
    ),
    "empty file": (lambda t: "", "0 columns 'experiment'"),
    "blank lines": (lambda t: "\n\n  \n,,\n".replace("  ", ""), "0 columns 'experiment'"),
    "n of a billion": (
        lambda t: t.assign(n=10**9).to_csv(index=False),
        "line 2: n is '1000000000', not a whole number from 1 to 1000000",
    ),
    "semicolons": (lambda t: t.to_csv(index=False, sep=";"), "separated by commas: experiment;model"),
    "split": (
        lambda t: t.assign(split=["x"] * 12 + ["y"] * 12).to_csv(index=False),
        "agree in experiment, task, m, n, subsample and differ in split (x and y)",
    ),
    "one data set twice": (
        lambda t: t.assign(data="x").to_csv(index=False),
        "agree in experiment, data and differ in task (task00 and task01)",
    ),
    "f1 of one run": (
        lambda t: pd.concat([t.assign(f1_base=0.5), t[:1].assign(f1_base=0.6)]).to_csv(index=False),
        "differ in f1_base (0.5 and 0.6)",
    ),
    "nll of one run": (
        lambda t: pd.concat([t.assign(nll_test=0.5), t[:1].assign(nll_test=0.6)]).to_csv(index=False),
        "differ in nll_test",
    ),
    "loss of one run": (
        lambda t: pd.concat([t.assign(loss_test=0.5), t[:1].assign(loss_test=0.6)]).to_csv(index=False),
        "differ in loss_test",
    ),
    "majority of one run": (
        lambda t: pd.concat([t, t[:1].assign(majority=0.6)]).to_csv(index=False),
        "differ in majority",
    ),
    "classes of one run": (
        lambda t: pd.concat([t, t[:1].assign(num_classes=3)]).to_csv(index=False),
        "differ in num_classes",
    ),
    "loss in words": (
        lambda t: t.assign(loss_extra="x").to_csv(index=False),
        "line 2: loss_extra is 'x', not a number",
    ),
    "f1 in percent": (
        lambda t: t.assign(f1_test=85.0).to_csv(index=False),
        "line 2: f1_test is '85.0', not a number from 0 to 1",
    ),
    "negative f1": (
        lambda t: t.assign(f1_test=-0.1).to_csv(index=False),
        "line 2: f1_test is '-0.1', not a number from 0 to 1",
    ),
    "no rows": (lambda t: t[:0].to_csv(index=False), "no rows"),
    "no CSV": (lambda t: t.to_csv(index=False) + 'x,"y\n', "no CSV file in UTF-8"),
    "more fields": (
        lambda t: t.to_csv(index=False) + "a" + ",1" * 15 + "\n",
        "line 26: 16 fields where the header has 11",
    ),
    "two columns of one name": (
        lambda t: (
            t.assign(x=1)
            .rename(columns={"x": "acc_test2"})
            .to_csv(index=False)
            .replace("acc_test2", "acc_test")
        ),
        "2 columns 'acc_test', not one",
    ),
    "not k / n": (
        lambda t: with_line(t, 3, acc_test=0.123).to_csv(index=False),
        "line 5: acc_test = 0.123 is no whole number of right answers of n = 40",
    ),
    "above 1": (
        lambda t: with_line(t, 3, acc_test=1.025).to_csv(index=False),
        "line 5: acc_test is '1.025', not a number from 0 to 1",
    ),
    "no number": (
        lambda t: with_line(t, 3, acc_base="?").to_csv(index=False),
        "line 5: acc_base is '?', not a number from 0 to 1",
    ),
    "infinite": (lambda t: with_line(t, 3, acc_base="inf").to_csv(index=False), "acc_base is 'inf'"),
    "fraction": (
        lambda t: with_line(t, 3, m="8.5").to_csv(index=False),
        "line 5: m is '8.5', not a whole number",
    ),
    "zero": (lambda t: with_line(t, 3, subsample=0).to_csv(index=False), "not a whole number from 1"),
    "majority": (lambda t: with_line(t, 3, majority=1.5).to_csv(index=False), "majority is '1.5'"),
    "model all": (lambda t: with_line(t, 3, model="all").to_csv(index=False), "would be all models together"),
    "conflict": (
        lambda t: pd.concat([t, with_line(t[:1], 0, acc_test=0.1)]).to_csv(index=False),
        "line 2 and",
    ),
    "recipes": (
        lambda t: t.assign(recipe=["x"] * 11 + ["y"] * 13).to_csv(index=False),
        "differ in recipe (x and y)",
    ),
    "data": (lambda t: t.assign(data=["x"] + ["y"] * 23).to_csv(index=False), "differ in data"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_line(run, tmp_path, name):
    change, message = BAD[name]
    (tmp_path / "results.csv").write_text(change(made_rows()))
    status, out, err = run("--draws", 0)
    assert (
        status == 2
        and message in err
        and err.count("\n") == 1
        and err.startswith("error: ")
        and not Path("fits").exists()
    )


def test_other_bad_arguments(run, tmp_path):
    assert run("nowhere.csv")[0] == 2
    (tmp_path / "folder").mkdir()
    assert "holds no results.csv" in run("folder")[2]
    saved(made_rows(), tmp_path / "results.csv")
    status, _, err = run("--models", "c")
    assert status == 2 and "--models c: not in the rows chosen so far; found: a, b" in err
    for flags in (["--margin", 0], ["--margin", "nan"], ["--metric", "f.x"]):
        assert run(*flags)[0] == 2
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00experiment")
    assert "UTF-8" in run("bytes.csv")[2]


def test_natural_variations_are_accepted(f, run, tmp_path, capsys):
    table = made_rows()
    plain = load(f, saved(table, tmp_path / "results.csv"))
    text = (tmp_path / "results.csv").read_text()
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "results.csv"
    variations = {
        "BOM": "\ufeff" + text,
        "CR": text.replace("\n", "\r"),
        "CRLF": text.replace("\n", "\r\n"),
        "no newline": text.rstrip("\n"),
        "blank lines": text.replace("\nfew", "\n\nfew", 3) + "\n\n",
        "m = 10.0": text.replace(",10,40,", ",10.0,40,"),
        "four decimals": table.round(4).to_csv(index=False),
        "torn": text + "few-shot,a,task09,10,40,1,2,0",
        "torn within": text.replace("\nfew", "\nfew-shot,a,task0\nfew", 1),
    }
    for name, changed in variations.items():
        other.write_bytes(changed.encode())
        found = load(f, tmp_path / "other")
        pd.testing.assert_frame_equal(found.drop(columns="where"), plain.drop(columns="where"), obj=name)
        assert ("left out as torn" in capsys.readouterr().out) == name.startswith("torn")
    other.write_text(text)
    saved(with_line(table, 0, acc_test=0.9), tmp_path / "other" / "results_backup.csv")  # no file of the run
    assert len(load(f, tmp_path, tmp_path / "other")) == len(table)
    assert "used once: 24 rows" in capsys.readouterr().out
    saved(
        table[:12].assign(subsample=lambda t: t["subsample"] + 50), tmp_path / "other" / "results.2-of-2.csv"
    )
    assert len(load(f, tmp_path / "other")) == 36
    hostile = table[:12].assign(experiment="../../x", model="a/b")
    status, out, _ = run(saved(hostile, tmp_path / "h.csv"), "--draws", 0)
    assert status == 0 and {path.parent for path in tmp_path.rglob("*.png")} == {tmp_path / "fits"}


# Two numbers of subsamples, all models, settings, folders ------------------------------------------------------------


@pytest.mark.parametrize("tasks, K", [(1, 6), (3, 5), (25, 5)])
def test_at_to_settle_a_null_is_settled_in_80_percent(f, tasks, K):
    """Normal differences without any effect, subsamples as the plan from the true noise says: four of five verdicts;
    at `needed` few."""
    rng = np.random.default_rng(tasks)
    sd = np.linspace(1, 3, tasks)
    se_1 = math.sqrt((sd**2).sum()) / tasks
    effective = f.effective_tasks(sd**2)
    margin = 1.5 * se_1 / math.sqrt(K)
    shares = []
    for R in (
        f.needed_subsamples(se_1, effective, margin),
        f.needed_subsamples(se_1, effective, f.SETTLING * margin),
    ):
        settled = 0
        for _ in range(1500):
            D = rng.normal(0, sd[:, None], (tasks, R))
            found = f.these_tasks(D.mean(1), D.var(1, ddof=1), np.full(tasks, R), 0)
            settled += f.verdict_of(found["low"], found["high"], margin) == "within the margin"
        shares.append(settled / 1500)
    assert shares[0] < 0.45 and shares[1] == pytest.approx(0.8, abs=0.06)


def test_thousands_of_subsamples_are_counted_exactly(f):
    R = f.needed_subsamples(40.0, 2, 1)
    half = [stats.t.ppf(0.945, 2 * (k - 1)) * 40 / math.sqrt(k) for k in (R - 1, R)]
    assert R > 4000 and half[0] >= 1 > half[1]


def test_with_unequal_subsamples_the_numbers_are_totals(f, run, tmp_path):
    """One task of 3, another of 30 subsamples: the plan's uncertainty is that of effects.csv, and the command counts
    subsamples of each task."""
    rng = np.random.default_rng(1)
    rows = bias_rows({"a": rng.choice([-2, 0, 2.5], 3), "b": rng.choice([-9, 0, 9], 30)}).assign(seconds=10.0)
    run(saved(rows, tmp_path / "r.csv"), "--draws", 0, "--no-figures")
    effect = pd.read_csv("fits/effects.csv").query("effect == 'bias' and target == 'these tasks'").iloc[0]
    _, out, _ = run("r.csv", "--plan", "--effects", "bias")
    plan = pd.read_csv("plan/plan.csv").query("quantity == 'bias'").iloc[0]
    assert plan["half_width"] == pytest.approx((effect["high"] - effect["low"]) / 2, rel=1e-5)
    assert plan["to_settle"] == effect["to_settle"] > effect["needed"] > 3
    R = int(effect["to_settle"])
    assert R > 30  # both tasks are to have so many
    minutes = round((R - 3 + R - 30) * 10 / 60)
    last = out.splitlines()[-3]
    assert (
        f"the same run with --subsamples {R} (about {minutes} minutes more by these rows' seconds, one process)"
        in last
    )
    assert f"{int(effect['needed'])} subsamples give ±1" in last and "Fix the number" in out.splitlines()[-2]
    assert (
        "times as many" not in out
        and "fewer than 10 (m + 2n) rows" in out
        and "of these rows, not of new" in out
    )


def test_near_the_margin_no_number_of_subsamples_is_promised(run, tmp_path):
    _, out, _ = run(
        saved(bias_rows({"a": [0.5, 1, 1.5] * 10}), tmp_path / "r.csv"),
        "--draws",
        0,
        "--effects",
        "bias",
        "--no-figures",
    )
    assert "so the effect itself seems near the margin" in out and "--subsamples" not in out.splitlines()[0]


def test_two_rows_of_a_third_model_do_not_make_the_headline(run, tmp_path):
    """25 noisy tasks of one model, one task of another: "all" was the mean over that task."""
    rng = np.random.default_rng(0)
    rows = pd.concat(
        [
            bias_rows({f"t{j:02}": rng.normal(0, 20, 4).round() / 2 for j in range(25)}),
            bias_rows({"t00": [0.5, 0]}, model="third"),
        ]
    )
    status, out, _ = run(saved(rows, tmp_path / "r.csv"), "--draws", 0, "--no-figures", "--effects", "bias")
    effects = pd.read_csv("fits/effects.csv")
    assert status == 0 and set(effects["model"]) == {"bert", "third"}
    assert "bias of bert: between" in out.splitlines()[0] and "these 25 tasks" in out.splitlines()[0]
    assert "its models differ in tasks or subsamples: each has its own answer" in out
    assert set(effects.query("model == 'third'")["tasks"]) == {1} and set(
        effects.query("model == 'bert'")["tasks"]
    ) == {25}


def test_rows_of_effects_are_in_order_though_the_grid_has_holes(f):
    """Fits add their rows at the end; a cell without "all", all settings together."""
    keys = [
        ("", "all", "these tasks"),
        (50, "all", "these tasks"),
        (50, "all", "paper"),
        (50, "a", "these tasks"),
        (50, "a", "paper"),
        (100, "b", "these tasks"),
        (100, "b", "tasks like these"),
        (100, "b", "hierarchical"),
    ]
    rows = {
        key: dict(
            zip(
                ("experiment", "m", "n", "effect", "model", "target"), ("e", key[0], key[0], "bias", *key[1:])
            )
        )
        for key in keys
    }
    shuffled = {key: rows[key] for key in sorted(keys, key=lambda key: key[2], reverse=True)}
    table = f.as_table(shuffled)
    assert list(zip(table["m"], table["model"], table["target"])) == keys


def test_a_task_with_one_subsample_is_named_and_left_out(f, run, tmp_path):
    several = {"a": [1, 2, 4], "b": [0, -1, 2], "c": [1, 1, 0]}
    *_, without = tables_of(f, bias_rows(several), tmp_path / "w.csv")
    _, out, _ = run(
        saved(bias_rows(several | {"lonely": [30]}), tmp_path / "r.csv"),
        "--draws",
        0,
        "--effects",
        "bias",
        "--no-figures",
    )
    effects = pd.read_csv("fits/effects.csv").set_index("target")
    row = without["few-shot", 50, 200, "bias", "bert", "these tasks"]
    found = effects.loc["these tasks"]
    assert found[["estimate", "low", "high"]].tolist() == pytest.approx(
        [row[name] for name in ("estimate", "low", "high")], rel=1e-5
    )
    assert (found["tasks"], found["left_out"], found["subsamples"]) == (3, "lonely", 3) and effects.loc[
        "tasks like these", "tasks"
    ] == 4
    assert "without lonely, of which there is one subsample" in out.splitlines()[0]
    _, out, _ = run("r.csv", "--plan", "--effects", "bias")
    plan = pd.read_csv("plan/plan.csv").query("quantity == 'bias'").iloc[0]
    assert (plan["tasks"], plan["arms"]) == (3, "plain") and plan["needed"] > 1


def crossed_rows(tasks=3, subsamples=4, n=50, seed=0):
    """Rows of one model with the texts of `extra`, from coins."""
    rng = np.random.default_rng(seed)
    rows = made_rows(tasks=tasks, subsamples=subsamples, models=("a",), n=n)
    for name in ("acc_base", "acc_extra", "acc_test", *MIRRORED):
        rows[name] = rng.binomial(n, 0.6, len(rows)) / n
    return rows


def test_crossed_effects_by_hand(f, run, tmp_path):
    """Both brackets by plain loops; sign flips of their sums by brute force; rounding's floor a quarter; --plain and
    the gain in words."""
    table = crossed_rows(subsamples=10)
    _, long, tasks, effects = tables_of(f, table, tmp_path / "r.csv")
    for task, mine in table.groupby("task"):
        boosts, biases = [], []
        for row in mine.itertuples():
            biases.append(
                100 * ((row.acc_test - row.acc_extra) + (row.acc_extra_on_extra - row.acc_test_on_extra)) / 2
            )
            boosts.append(
                100 * ((row.acc_extra - row.acc_base) + (row.acc_test_on_extra - row.acc_base_on_extra)) / 2
            )
        found = tasks.xs(task, level="task")
        assert found.loc[("few-shot", 10, 50, "bias", "a"), "estimate"] == pytest.approx(np.mean(biases))
        assert found.loc[("few-shot", 10, 50, "boost", "a"), "sd"] == pytest.approx(np.std(boosts, ddof=1))
        sums = [np.dot(signs, biases) for signs in itertools.product((-1, 1), repeat=len(biases))]
        assert found.loc[("few-shot", 10, 50, "bias", "a"), "p"] == pytest.approx(
            np.mean(np.array(sums) >= sum(biases) - 1e-9)
        )
    assert f.floor_of("acc", 50, True) == pytest.approx(1 / 12) and f.floor_of(
        "acc", 50, False
    ) == pytest.approx(4 / 12)

    # The means of Table 1 and --plain are of the texts of test alone
    status, out, _ = run("r.csv", "--draws", 0, "--no-figures")
    crossed = pd.read_csv("fits/effects.csv")
    means = pd.read_csv("fits/means.csv").iloc[0]
    plain = 100 * (table["acc_test"] - table["acc_extra"])
    assert status == 0 and means["bias"] == pytest.approx(
        plain.groupby(table["task"]).mean().mean(), rel=1e-5
    )
    one = tables_of(f, table, tmp_path / "r.csv", plain=True)[2]
    ratio = (one["sd"] ** 2).groupby("effect").sum() / (tasks["sd"] ** 2).groupby("effect").sum()
    for effect in ("bias", "boost"):
        assert (
            f"{effect} of a: crossed arms: as precise as {ratio[effect]:.1f} times as many subsamples without"
            in out
        )
    _, out, _ = run(saved(table.query("subsample < 10"), tmp_path / "few.csv"), "--draws", 0, "--no-figures")
    assert status == 0 and "crossed arms" not in out  # too few runs to say what they gain
    saved(table, tmp_path / "r.csv")
    _, out, _ = run("r.csv", "--draws", 0, "--no-figures", "--plain")
    alone = pd.read_csv("fits/effects.csv")
    assert (
        set(crossed["arms"]) == {"crossed"} and set(alone["arms"]) == {"plain"} and "crossed arms" not in out
    )
    assert alone["estimate"].iloc[0] == pytest.approx(means["bias"], rel=1e-5) != crossed["estimate"].iloc[0]


def test_the_luck_of_a_training_run_cancels_from_a_crossed_bias(f, tmp_path):
    """A run that is better by 10 points on all texts changes a plain bias by 10, a crossed one not at all."""
    table = crossed_rows().round(2)
    lucky = table.assign(acc_test=table["acc_test"] + 0.1, acc_test_on_extra=table["acc_test_on_extra"] + 0.1)
    for plain, expected in ((False, 0), (True, 10)):
        estimates = [
            tables_of(f, rows, tmp_path / "r.csv", plain=plain)[3][
                "few-shot", 10, 50, "bias", "a", "these tasks"
            ]["estimate"]
            for rows in (table, lucky)
        ]
        assert estimates[1] - estimates[0] == pytest.approx(expected)


def test_a_cell_with_some_rows_of_old_is_plain_and_says_so(f, capsys, tmp_path):
    table = crossed_rows()
    table.loc[2, MIRRORED[0]] = math.nan
    rows = load(f, saved(pd.concat([table, crossed_rows().assign(m=20)]), tmp_path / "r.csv"))
    assert (
        rows.groupby("m")["arms"].first().to_dict() == {10: "plain", 20: "crossed"}
        and rows.groupby("m")["arms"].nunique().max() == 1
    )
    assert (
        "few-shot, m = 10, n = 50: some rows lack acc_base_on_extra and so on: plain effects"
        in capsys.readouterr().out
    )


def test_a_folder_that_is_not_ours_is_left_alone(run, tmp_path):
    saved(made_rows(), tmp_path / "results.csv")
    (tmp_path / "losses.csv").write_text("mine")
    for flags in ([], ["--plan"]):
        status, _, err = run("--draws", 0, "--out", ".", *flags)
        assert (
            status == 2 and "no summary.md of fit_model.py" in err and "--out" in err and err.count("\n") == 1
        )
    assert (tmp_path / "losses.csv").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "summary.md").write_text("Written by meta_analysis.py.\n")
    assert run("--draws", 0, "--out", "meta")[0] == 2
    (tmp_path / "empty").mkdir()
    assert run("--draws", 0, "--out", "empty", "--no-figures")[0] == 0


def test_nothing_of_an_earlier_analysis_stays(run, tmp_path):
    saved(made_rows(tasks=5), tmp_path / "r.csv")
    run("r.csv", "--draws", 0, "--effects", "bias")
    Path("fits/posterior.csv").write_text("of an earlier fit")
    Path("fits/notes.txt").write_text("mine")
    assert Path("fits/tasks.few-shot.10.40.bias.png").exists()
    status, _, _ = run(
        saved(made_rows(tasks=2, models=("a",)).assign(m=11), tmp_path / "s.csv"),
        "--draws",
        0,
        "--no-figures",
    )
    names = {path.name for path in Path("fits").iterdir()}
    assert status == 0 and names == {"effects.csv", "means.csv", "tasks.csv", "summary.md", "notes.txt"}


def test_rows_of_several_versions_are_counted(run, tmp_path):
    rows = made_rows().assign(versions=["code 1"] * 4 + ["code 2"] * 20)
    _, out, _ = run(saved(rows, tmp_path / "r.csv"), "--draws", 0, "--no-figures")
    assert out.startswith("rows of several versions are taken together: 20 rows of code 2; 4 rows of code 1")
    assert "20 rows of code 2; 4 rows of code 1. Analysed on 20" in Path("fits/summary.md").read_text()
    assert "several versions" not in run("r.csv", "--draws", 0, "--no-figures", "--models", "b")[1]


def test_a_metric_may_have_any_name(run, tmp_path):
    rows = made_rows()
    for arm, value in (("base", 1.0), ("extra", 2.0), ("test", 3.5)):
        rows[f"right_{arm}"] = value
    status, out, _ = run(saved(rows, tmp_path / "r.csv"), "--metric", "right", "--no-figures")
    assert status == 0 and set(pd.read_csv("fits/effects.csv").query("effect == 'bias'")["estimate"]) == {1.5}


def test_names_that_differ_have_files_and_titles_that_differ(f, run, tmp_path):
    rows = pd.concat(
        [made_rows(tasks=2).assign(experiment=name) for name in ("few shot", "few-shot", "few/shot")]
    )
    status, _, _ = run(saved(rows, tmp_path / "r.csv"), "--draws", 0, "--effects", "bias")
    assert status == 0 and len(list(Path("fits").glob("tasks.*.png"))) == 3
    assert f.title_of("zero-shot", 50, 100) != f.title_of("zero-shot", 100, 100)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_accuracies_of_0_or_1_alone(run, tmp_path, value):
    rows = made_rows().assign(acc_base=value, acc_extra=value, acc_test=value)
    with warnings.catch_warnings(action="error"):
        for flags in (["--draws", 0], ["--plan"]):
            status, out, err = run(saved(rows, tmp_path / "r.csv"), *flags)
            assert status == 0 and not err and "nan" not in out


def test_sign_flips_of_a_million_texts_take_seconds(f):
    changes = np.random.default_rng(0).integers(-50_000, 50_000, 40)
    assert 0 < f.sign_flip_p(changes) <= 1
