"""fit_model.py against independent oracles: the paper's tables, hand arithmetic, brute force, scipy,
plain PyMC models, simulation, the texts dealt out again."""

import itertools
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import special, stats

from conftest import ROOT, load_script

PAPER = ROOT / "tests" / "published"
TINY = ROOT / "tests" / "bert_tiny_n200.csv"
TABLE_1 = {  # boost, bias in percent by (m, model, n), as printed in the paper: Tables 1a and 1b
    (50, "bert", 50): (4.1, 0.19), (50, "bert", 100): (3.9, 0.18), (50, "bert", 200): (3.9, -0.39),
    (50, "bert", 500): (3.5, 0.48), (50, "gpt2", 50): (3.8, 0.18), (50, "gpt2", 100): (4.1, 0.11),
    (50, "gpt2", 200): (4.4, -0.05), (50, "gpt2", 500): (4.6, -0.08), (100, "bert", 50): (6.2, -0.08),
    (100, "bert", 100): (6.1, -0.37), (100, "bert", 200): (4.1, 0.33), (100, "bert", 500): (6.1, -0.16),
    (100, "gpt2", 50): (2.2, -0.05), (100, "gpt2", 100): (2.5, 0.03), (100, "gpt2", 200): (6.3, -0.01),
    (100, "gpt2", 500): (3.9, -0.21)}
MIRRORED = ("acc_base_on_extra", "acc_extra_on_extra", "acc_test_on_extra")


@pytest.fixture(scope="module")
def f():
    return load_script("fit_model")


@pytest.fixture
def run(f, tmp_path, capsys, monkeypatch):
    """run(flags...) -> (exit status, stdout, stderr) of main() in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        status, said = 0, ""
        try:
            f.main([str(flag) for flag in flags])
        except SystemExit as end:
            status = end.code
            if isinstance(end.code, str):  # what Python itself prints, with status 1
                status, said = 1, end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err + said

    return call


def saved(table, path):
    table.to_csv(path, index=False)
    return path


def row_of(task="a", k=1, model="bert", n=100, m=8, base=0.4, extra=0.5, bias=0.0, **more):
    """A row of plain arms; bias in points."""
    return {"experiment": "few-shot", "model": model, "task": task, "m": m, "n": n, "subsample": k,
            "num_classes": 2, "majority": 0.5, "acc_base": base, "acc_extra": extra,
            "acc_test": extra + bias / 100, **more}


def bias_rows(tasks, **more):
    """Rows of plain arms with these biases in points, {task: [one a subsample]}."""
    rows = []
    for task, values in tasks.items():
        for k, value in enumerate(values, 1):
            rows.append(row_of(task, k, bias=value, **more))
    return pd.DataFrame(rows)


def coin_rows(tasks=3, subsamples=4, models=("a", "b"), n=40, seed=0):
    """Rows of plain arms, from coins."""
    rng, rows = np.random.default_rng(seed), []
    for model, j, k in itertools.product(models, range(tasks), range(1, subsamples + 1)):
        base, extra, test = rng.binomial(n, [0.5 + 0.01 * j, 0.55 + 0.01 * j, 0.55 + 0.01 * j]) / n
        row = row_of(f"task{j:02}", k, model, n, 10, base, extra)
        rows.append(row | {"acc_test": test})
    return pd.DataFrame(rows)


def crossed_row(right, **names):
    """A row, or columns, from right[arm][set]: 0 or 1 a text, texts last."""
    row = row_of(n=right["base"]["test"].shape[-1], **names)
    for arm in ("base", "extra", "test"):
        row[f"acc_{arm}"] = right[arm]["test"].mean(-1)
        row[f"acc_{arm}_on_extra"] = right[arm]["extra"].mean(-1)
    for name, ending in (("test", ""), ("extra", "_on_extra")):
        row[f"discordant{ending}"] = np.mean(right["extra"][name] != right["test"][name], -1)
    return row


def trained(rng, shape, flips=0.08, effect=0.0):
    """right[arm][set] of models that flip so many answers and know so many more of their own texts."""
    right = {arm: {} for arm in ("base", "extra", "test")}
    for name in ("test", "extra"):
        known = rng.random(shape) < 0.7
        for arm in right:
            flipped = known ^ (rng.random(shape) < flips)
            right[arm][name] = (flipped | (rng.random(shape) < effect * (arm == name))).astype(int)
    return right


def crossed_rows(sets, tasks, subsamples, n, rng, luck=0.0, effect=0.0):
    """Rows of many experiments; luck: sd, in points, by which the effect differs from run to run."""
    units = itertools.product(range(sets), range(tasks), range(1, subsamples + 1))
    numbers, tasks, subsamples = np.array([*units]).T
    right = trained(rng, (len(numbers), n), effect=effect)
    rows = pd.DataFrame(crossed_row(right, task=[f"t{task}" for task in tasks], k=subsamples))
    rows["experiment"] = [f"e{number}" for number in numbers]
    more = (n * rng.normal(0, luck / 100, len(rows))).round() / n
    rows["acc_test"] += more
    rows["acc_extra_on_extra"] += more
    return rows


def args_of(f, *flags):
    return f.parse_args([str(flag) for flag in flags])


def tables_of(f, *flags):
    """(rows, tasks.csv, effects.csv of these tasks) as main makes them."""
    args = args_of(f, *flags)
    rows = f.measure(args)
    tasks = f.task_table(f.unit_table(rows), rows, args)
    effects = f.effects_table(tasks, args)
    return rows, tasks, effects[effects["target"] == "these tasks"]


def one(table, **wanted):
    """The only row of a table with these values."""
    for name, value in wanted.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


# The published numbers --------------------


def test_tables_1a_and_1b_and_section_7(run):
    """The paper rounds 3 decimals half up, then those of the table: .1848 is .185 and then .19."""
    status, out, _ = run(PAPER / "few_shot_m50.csv", PAPER / "few_shot_m100.csv", "--draws", 0)
    folder = Path("fits/few_shot_m50-and-1-more")
    effects = pd.read_csv(folder / "effects.csv")
    means = effects[(effects["target"] == "these tasks") & (effects["model"] != "all")].dropna(subset="m")
    assert status == 0 and len(means) == 32 and set(means["tasks"]) == {25}
    for row in means.itertuples():
        boost, bias = TABLE_1[row.m, row.model, row.n]
        expected, near = {"boost": (boost, 0.0506), "bias": (bias, 0.00551)}[row.effect]
        assert abs(row.estimate - expected) < near
    tasks = pd.read_csv(folder / "tasks.csv").query("model != 'all'")
    of_tasks = tasks.groupby(["effect", "task"])["estimate"].mean().round(9)
    assert (of_tasks["bias"] > 0).sum() == 12 and (of_tasks["boost"] > 0).sum() == 23
    adjusted = tasks.query("effect == 'bias'")["p_adjusted"]
    assert len(adjusted) == 400 and adjusted.min() == pytest.approx(0.081, abs=5e-4)

    # Eight settings: +.006 +- .089 points (DESIGN), said first, on top of effects.csv
    (first,) = out.splitlines()[:-1]
    assert first == ("No: within ±1. few-shot, mean of 8 settings: bias +0.01 [-0.08, +0.10] points for 25 tasks; "
                     "boost +4.35 [+4.25, +4.45]. Alone, 1 of 8 settings exclude 0 (by chance about 0.9).")
    top = effects.iloc[0]
    assert math.isnan(top["m"]) and (top["model"], top["effect"], top["arms"]) == ("all", "bias", "plain")
    assert top["estimate"] == pytest.approx(0.006, abs=5e-4)
    assert top["high"] - top["estimate"] == pytest.approx(0.089, abs=5e-4)


def test_zero_shot_signs_are_exact(run):
    status, _, _ = run(PAPER / "zero_shot_m100_n100.csv", "--draws", 0)
    effects = pd.read_csv("fits/zero_shot_m100_n100/effects.csv").set_index(["target", "effect"])["estimate"]
    assert status == 0 and effects["these tasks"]["boost"] == pytest.approx(5.25, abs=5e-3)
    assert effects["these tasks"]["bias"] == pytest.approx(-0.04, abs=5e-3)
    bias = pd.read_csv("fits/zero_shot_m100_n100/tasks.csv").query("effect == 'bias'")["estimate"]
    assert [(bias > 0).sum(), (bias == 0).sum(), (bias < 0).sum()] == [12, 1, 12]


# Target 1 by hand --------------------


def test_plain_effects_by_hand(f, tmp_path):
    """Means over models: x (2, 4), y (1, 1, 3), z (1, 1). Means 3, 5/3, 1; s^2 = 2, 4/3, rounding's 1/12."""
    a = bias_rows({"x": [1, 3], "y": [0, 2, 4], "z": [1, 1]}, model="a")
    b = bias_rows({"x": [3, 5], "y": [2, 0, 2], "z": [1, 1]}, model="b")
    path = saved(pd.concat([a, b]), tmp_path / "r.csv")
    _, tasks, effects = tables_of(f, path, "--effects", "bias")
    row = one(effects, model="all")
    assert row["estimate"] == pytest.approx(17 / 9) and row["se"] == pytest.approx(math.sqrt(107 / 72) / 3)
    assert row["df"] == pytest.approx((107 / 72) ** 2 / (1 / 1 + (16 / 81) / 2 + (1 / 576) / 1))
    assert (row["tasks"], row["subsamples"], row["arms"]) == (3, 2, "plain")
    assert one(effects, model="a")["se"] == pytest.approx(math.sqrt(2 / 2 + 4 / 3 + (1 / 12) / 2) / 3)
    both = f.effects_table(tasks, args_of(f, path, "--effects", "bias"))
    like = one(both, model="all", target="tasks like these")
    expected = stats.ttest_1samp([3, 5 / 3, 1], 0).confidence_interval(0.89)
    assert (like["low"], like["high"]) == pytest.approx((expected.low, expected.high))

    # One task: a t interval, which is the task's own; equal differences have a width
    one_task = tasks.reset_index().query("model == 'a' and task == 'y'").iloc[0]
    expected = stats.ttest_1samp([0, 2, 4], 0).confidence_interval(0.89)
    assert (one_task["low"], one_task["high"]) == pytest.approx((expected.low, expected.high))
    equal = tasks.reset_index().query("model == 'a' and task == 'z'").iloc[0]
    assert equal["high"] - equal["low"] == pytest.approx(2 * stats.t.ppf(0.945, 1) * math.sqrt(1 / 12 / 2))


def test_crossed_effects_with_the_noise_of_the_texts_by_hand(f, tmp_path):
    """n = 100. Subsample 1: brackets 4 and 2, discordant .06 and .04; subsample 2: -2 and 0, .02 and .08."""
    first = row_of("a", 1, bias=4, acc_base_on_extra=0.42, acc_extra_on_extra=0.56, acc_test_on_extra=0.54,
                   discordant=0.06, discordant_on_extra=0.04)
    second = row_of("a", 2, bias=-2, acc_base_on_extra=0.4, acc_extra_on_extra=0.6, acc_test_on_extra=0.6,
                    discordant=0.02, discordant_on_extra=0.08)
    w = [25 * (0.06 - 0.04**2 + 0.04 - 0.02**2), 25 * (0.02 - 0.02**2 + 0.08)]
    path = saved(pd.DataFrame([first, second]), tmp_path / "r.csv")
    rows, _, effects = tables_of(f, path)
    for name, values in {"w": w, "bias": [3, -1], "boost": [11, 15], "base": [41, 40], "unseen": [52, 55],
                         "seen": [55, 54]}.items():
        assert rows[name].tolist() == pytest.approx(values)
    row = one(effects, effect="bias")  # s^2 = 8: more than w, so all of it; one degree of freedom and the texts' five
    half = stats.t.ppf(0.945, 6) * math.sqrt(8 / 2)
    assert (row["estimate"], row["df"], row["low"], row["high"]) == pytest.approx((1, 6, 1 - half, 1 + half))
    assert (row["base"], row["unseen"], row["seen"]) == pytest.approx((40.5, 53.5, 54.5))
    assert row["arms"] == "crossed" and one(effects, effect="boost")["df"] == pytest.approx(1)  # s^2 alone
    plain = one(tables_of(f, path, "--plain")[2], effect="bias")
    assert (plain["estimate"], plain["df"], plain["arms"]) == pytest.approx((1, 1, "plain"))

    # One subsample is enough for the bias: w, and one text of 100 on each set, 10^4 / (4 * 100) * 2 / 100
    rows = pd.DataFrame([first, second | {"task": "b", "subsample": 1}])
    effects = tables_of(f, saved(rows, tmp_path / "r.csv"))[2]
    row = one(effects, effect="bias")
    assert row["df"] == 5
    assert row["high"] - 1 == pytest.approx(stats.t.ppf(0.945, 5) * math.sqrt(sum(w) + 2 * 0.5) / 2)
    assert math.isnan(one(effects, effect="boost")["low"])


@pytest.mark.parametrize("luck", [0, 2.5])
def test_the_pooled_variance_by_plain_loops(f, tmp_path, luck):
    """Tasks of 2, 3, 5 and 9 subsamples; without effects that differ from run to run their variance adds
    nothing; the settings together; each task's own interval; verdicts of all tasks at once."""
    rng = np.random.default_rng(8)
    rows = pd.concat([crossed_rows(1, 4, 9, 100, rng, luck=luck).assign(m=m) for m in (8, 16)])
    rows = rows[rows["subsample"] <= rows["task"].map({"t0": 2, "t1": 3, "t2": 5, "t3": 9})]
    _, tasks, effects = tables_of(f, saved(rows, tmp_path / "r.csv"), "--margin", 3)
    v, square = [], 0
    for m in (8, 16):
        D, w = {}, {}
        for row in rows[rows["m"] == m].to_dict("records"):
            one_way = row["acc_test"] - row["acc_extra"]
            other = row["acc_extra_on_extra"] - row["acc_test_on_extra"]
            D.setdefault(row["task"], []).append(50 * (one_way + other))
            noise = row["discordant"] - one_way**2 + row["discordant_on_extra"] - other**2
            w.setdefault(row["task"], []).append(25 * noise)
        texts = {t: sum(w[t]) / len(w[t]) + 25 * 2 / (100 * len(w[t])) for t in D}
        excess = sum((len(D[t]) - 1) * (np.var(D[t], ddof=1) - texts[t]) for t in D)
        more = max(0, excess / sum(len(D[t]) - 1 for t in D))
        assert more > 1 or not luck
        df = sum(map(len, D.values())) - 4 + 5
        variance = {t: (texts[t] + more) / len(D[t]) for t in D}  # of its mean
        se = math.sqrt(sum(variance.values())) / 4
        row = one(effects, m=m, effect="bias")
        estimate = sum(map(np.mean, D.values())) / 4
        assert [row["estimate"], row["se"], row["df"]] == pytest.approx([estimate, se, df])
        assert row["high"] - row["estimate"] == pytest.approx(stats.t.ppf(0.945, df) * se)
        v.append((se / 2) ** 2)
        square += (se / 2) ** 4 / df
        for t in D:
            mine = tasks.loc[("e0", m, 100, "bias", "bert", t)]
            middle, spread = np.mean(D[t]), math.sqrt(variance[t])
            assert mine["high"] - middle == pytest.approx(stats.t.ppf(0.945, df) * spread)
            reach = stats.t.ppf(1 - 0.055 / 4, df) * spread  # 1 - .11 / 4 for each of four
            expected = "within the margin" if abs(middle) + reach < 3 else "not settled"
            assert mine["verdict"] == ("beyond the margin" if abs(middle) - reach > 3 else expected)
    row = one(effects, m=0, effect="bias")
    assert (row["se"], row["df"]) == pytest.approx((math.sqrt(sum(v)), sum(v) ** 2 / square))


def test_a_cell_that_does_not_know_all_its_noise_takes_s2(f, tmp_path):
    rows = crossed_rows(1, 2, 4, 100, np.random.default_rng(4), luck=5)
    rows.loc[0, "discordant"] = math.nan
    D = 50 * (rows["acc_test"] - rows["acc_extra"] + rows["acc_extra_on_extra"] - rows["acc_test_on_extra"])
    v = D.groupby(rows["task"]).var() / 4
    row = one(tables_of(f, saved(rows, tmp_path / "r.csv"))[2], effect="bias")
    assert (row["se"], row["df"]) == pytest.approx((math.sqrt(v.sum()) / 2, sum(v) ** 2 / sum(v**2 / 3)))


def test_without_discordant_the_accuracies_bound_the_noise(f, tmp_path):
    """Two subsamples with equal biases of 16: at least 16 of 100 texts differ on each set."""
    rows = [row_of("a", k, bias=16, acc_base_on_extra=0.4, acc_extra_on_extra=0.66, acc_test_on_extra=0.5)
            for k in (1, 2)]
    _, tasks, effects = tables_of(f, saved(pd.DataFrame(rows), tmp_path / "r.csv"))
    bound = 25 * 2 * (0.16 - 0.16**2)
    row = one(effects, effect="bias")
    assert row["se"] == pytest.approx(math.sqrt(bound / 2)) and row["df"] == pytest.approx(1)
    alone = tables_of(f, saved(pd.DataFrame(rows[:1]), tmp_path / "r.csv"))[2]
    assert math.isnan(one(alone, effect="bias")["low"])
    rows[1]["acc_test"] -= 0.32  # now s^2 is far above the bound
    row = one(tables_of(f, saved(pd.DataFrame(rows), tmp_path / "r.csv"))[2], effect="bias")
    assert row["se"] == pytest.approx(math.sqrt(16**2 / 2 / 2))


def test_over_models_and_seeds_the_bound_of_the_noise_is_taken(f, tmp_path):
    """Their answers may go together wholly: the sd of a mean is at most the mean of the sds."""
    rng = np.random.default_rng(1)
    rows = pd.DataFrame([crossed_row(trained(rng, 100, 0.05), model="a"),
                         crossed_row(trained(rng, 100, 0.2), model="b")])
    found, tasks, _ = tables_of(f, saved(rows, tmp_path / "r.csv"))
    w = found["w"].to_numpy()
    expected = ((math.sqrt(w[0]) + math.sqrt(w[1])) / 2) ** 2
    variance = tasks["variance"].xs("bias", level="effect") - 0.5  # of the imaginary texts
    assert variance.xs("all", level="model").iloc[0] == pytest.approx(expected)
    assert variance.xs("a", level="model").iloc[0] == pytest.approx(w[0])
    seeds = rows.assign(model="a", seed=[0, 1])
    _, tasks, _ = tables_of(f, saved(seeds, tmp_path / "s.csv"))
    assert tasks["variance"].xs("bias", level="effect").tolist() == pytest.approx([expected + 0.5])
    assert set(tasks["subsamples"]) == {1}


@pytest.mark.parametrize("flips", [0.02, 0.1, 0.3])
def test_w_is_what_dealing_the_texts_out_again_gives(f, tmp_path, flips):
    """The 2n texts of a subsample fall into test and extra anew, the models stay. The variance over
    deals, less what the observed difference itself adds, is w."""
    rng, n = np.random.default_rng(2), 150
    right = trained(rng, n, flips)
    row = tables_of(f, saved(pd.DataFrame([crossed_row(right)]), tmp_path / "r.csv"))[0].iloc[0]
    x = np.concatenate([right["test"][name] - right["extra"][name] for name in ("test", "extra")])
    deals = np.array([rng.permutation(x) for _ in range(10_000)])
    biases = 50 * (deals[:, :n].mean(1) - deals[:, n:].mean(1))
    observed = 50 * (x[:n].mean() - x[n:].mean())
    assert row["bias"] == pytest.approx(observed)
    between = observed**2 / (2 * n)  # w looks at each set around its own mean
    assert biases.var() - between == pytest.approx(row["w"], rel=0.05)


def test_intervals_cover_and_the_promise_is_kept(f, tmp_path):
    """60 data sets without an effect. The interval of three subsamples holds 0 in 85 of 100; who runs as
    many as they say is within the margin in 80. Where the effect differs much from run to run (sd 5
    points) one subsample knows nothing of it; five hold 80 of 100."""
    def found(rows, *flags):
        return tables_of(f, saved(rows, tmp_path / "r.csv"), "--effects", "bias", *flags)[2]

    def covers(table):
        return ((table["low"] < 0) & (table["high"] > 0)).mean()

    rng = np.random.default_rng(1)
    rows = crossed_rows(60, 2, 20, 100, rng)
    pilot = found(rows[rows["subsample"] <= 3], "--margin", 3.5)
    wanted = dict(zip(pilot["experiment"], pilot["needed"].clip(lower=3)))
    assert covers(pilot) > 0.85 and 3 < np.median([*wanted.values()]) < 15
    final = found(rows[rows["subsample"] <= rows["experiment"].map(wanted)], "--margin", 3.5)
    assert (final["verdict"] == "within the margin").mean() > 0.8
    assert (final["verdict"] == "beyond the margin").mean() < 0.02
    rows = crossed_rows(60, 1, 5, 100, rng, luck=5)
    assert covers(found(rows[rows["subsample"] == 1])) < 0.75 and covers(found(rows)) > 0.78


def test_needed_by_search(f, tmp_path):
    """The half-width of R subsamples, anew: unequal noise, unequal K; .3 of a chi-square."""
    def search(u, df, later, R, half):
        upper = math.sqrt(sum(u) * df / stats.chi2.ppf(0.3, df)) / len(u)
        while stats.t.ppf(0.945, later(R)) * upper / math.sqrt(R) > half:
            R += 1
        return R

    rows = bias_rows({"a": [-3, 3, 0], "b": [0.5, 0, 0.5, 0.5], "c": [1, 2]}, n=200)
    u = np.array([9, 0.0625, 0.5])
    v = u / [3, 4, 2]
    df = v.sum() ** 2 / (v**2 / [2, 3, 1]).sum()
    for margin in (1, 2.5):
        row = one(tables_of(f, saved(rows, tmp_path / "r.csv"), "--margin", margin)[2], effect="bias")
        expected = search(u, df, lambda R: u.sum() ** 2 / (u**2 / (R - 1)).sum(), 2, margin / 2)
        assert row["df"] == pytest.approx(df) and row["needed"] == expected > 2
    path = saved(crossed_rows(1, 2, 1, 200, np.random.default_rng(0)), tmp_path / "one.csv")
    rows, _, effects = tables_of(f, path, "--margin", 1)
    u = rows["w"].to_numpy() + 1e4 * 2 / (4 * 200 * 200)
    expected = search(u, 5, lambda R: 2 * R - 2 + 5, 1, 0.5)
    assert one(effects, effect="bias")["needed"] == expected > 3
    assert math.isnan(one(effects, effect="boost")["needed"])
    assert one(tables_of(f, path, "--margin", 20)[2], effect="bias")["needed"] == 1


def test_all_models_together_only_where_they_share_tasks_and_subsamples(run, tmp_path):
    """25 noisy tasks of one model, one task of another: "all" was once the mean over that task."""
    rng = np.random.default_rng(0)
    many = bias_rows({f"t{j:02}": rng.normal(0, 20, 4).round() for j in range(25)})
    rows = pd.concat([many, bias_rows({"t00": [1, 0]}, model="third")])
    out = run(saved(rows, tmp_path / "r.csv"), "--draws", 0, "--effects", "bias")[1]
    effects = pd.read_csv("fits/r/effects.csv")
    assert "bias of bert" in out and "bias of third" in out
    assert effects.groupby("model")["tasks"].first().to_dict() == {"bert": 25, "third": 1}


def test_a_task_with_one_subsample_is_named_and_left_out(f, run, tmp_path):
    several = {"a": [1, 2, 4], "b": [0, -1, 2], "c": [1, 1, 0]}
    without = one(tables_of(f, saved(bias_rows(several), tmp_path / "w.csv"))[2], effect="bias")
    rows = bias_rows(several | {"lonely": [30]})
    out = run(saved(rows, tmp_path / "r.csv"), "--draws", 0, "--effects", "bias")[1]
    effects = pd.read_csv("fits/r/effects.csv").set_index("target")
    found = effects.loc["these tasks"]
    names = ["estimate", "low", "high", "seen"]
    assert found[names].tolist() == pytest.approx(without[names].tolist(), rel=1e-5)
    assert (found["tasks"], found["left_out"], found["subsamples"]) == (3, "lonely", 3)
    assert effects.loc["tasks like these", "tasks"] == 4
    assert "Without lonely, of which there is one subsample" in out.splitlines()[0]


# Tests of single tasks --------------------


def test_sign_flips_of_crossed_rows_and_their_adjustment(f, tmp_path):
    rows = crossed_rows(1, 4, 8, 50, np.random.default_rng(3), effect=0.05)
    rows, tasks, _ = tables_of(f, saved(rows, tmp_path / "r.csv"))
    bias = tasks.xs("bias", level="effect").reset_index().set_index("task")
    for task, mine in rows.groupby("task"):
        sums = [np.dot(signs, mine["bias"]) for signs in itertools.product((-1, 1), repeat=8)]
        expected = np.mean(np.array(sums) >= mine["bias"].sum() - 1e-9)
        assert bias.loc[task, "p"] == pytest.approx(expected)
    assert bias["p_adjusted"].tolist() == pytest.approx(stats.false_discovery_control(bias["p"]).tolist())
    assert tasks.xs("boost", level="effect")["p"].isna().all()
    rng = np.random.default_rng(0)
    for _ in range(100):  # sums of shares that rounding would let exceed 1
        assert f.sign_flip_p(-rng.integers(1, 30, 70)) <= 1


# The models against plain ones --------------------


def plain_paper(rows):
    """The paper's model as it writes it, with binomial counts, everything non-centred: bias."""
    import pymc as pm
    import pytensor.tensor as pt

    task, tasks = pd.factorize(rows["task"], sort=True)
    unit, units = pd.factorize(rows["task"] + "/" + rows["subsample"].astype(str))
    model_idx, models = pd.factorize(rows["model"], sort=True)
    with pm.Model() as model:
        mu, beta = pm.Normal("mu", 0, 1), pm.Normal("beta", 0, 1)
        alpha = pt.concatenate([pt.zeros(1), pm.Normal("alpha", 0, 5, shape=len(models) - 1)])
        sd_U, sd_V, sd_W = pm.HalfNormal("sd_U", 1), pm.HalfNormal("sd_V", 1), pm.HalfNormal("sd_W", 3.5355)
        u = sd_U * pm.Normal("u", shape=len(tasks))
        v = sd_V * pm.Normal("v", shape=len(units))
        w = sd_W * pm.Normal("w", shape=(len(tasks), 2))
        pm.Deterministic("d", beta + w[:, 1] - w[:, 0])
        for arm, name in enumerate(("extra", "test")):
            eta = mu + alpha[model_idx] + u[task] + v[unit] + w[task, arm] + beta * arm
            right = (rows[f"acc_{name}"] * rows["n"]).round().astype(int).to_numpy()
            pm.Binomial(f"y{arm}", rows["n"].to_numpy(), logit_p=eta, observed=right)
    return model


def plain_hierarchical(rows):
    """The hierarchical model, everything non-centred: bias."""
    import pymc as pm

    task, tasks = pd.factorize(rows["task"], sort=True)
    model_idx, models = pd.factorize(rows["model"], sort=True)
    D, n = 100 * (rows["acc_test"] - rows["acc_extra"]).to_numpy(), rows["n"].iloc[0]
    J = len(models), len(tasks)
    with pm.Model() as model:
        beta, tau = pm.Normal("beta", 0, 10, shape=J[0]), pm.HalfNormal("tau", 5, shape=J[0])
        s, omega = pm.HalfNormal("s", 10, shape=J[0]), pm.HalfNormal("omega", 1, shape=J[0])
        delta = pm.Deterministic("effect", beta[:, None] + tau[:, None] * pm.Normal("z", shape=J))
        s_task = s[:, None] * pm.math.exp(omega[:, None] * pm.Normal("r", shape=J))
        sd = pm.math.sqrt(s_task[model_idx, task] ** 2 + (100 / n) ** 2 / 12)
        pm.Normal("D", delta[model_idx, task], sd, observed=D)
    return model


def assert_same_posterior(ours, plain, names):
    """Mean and quantiles of every component agree within Monte Carlo error."""
    import arviz

    for name in names:
        ess = [np.atleast_1d(arviz.ess(data[name])[name].values).ravel() for data in (ours, plain)]
        a, b = (data[name].values.reshape(math.prod(data[name].shape[:2]), -1) for data in (ours, plain))
        for k in range(a.shape[1]):
            sd = b[:, k].std()
            error = sd * math.sqrt(1 / ess[0][k] + 1 / ess[1][k])
            assert abs(a[:, k].mean() - b[:, k].mean()) < 4 * error, (name, k)
            expected = np.quantile(b[:, k], [0.1, 0.9])
            near = pytest.approx(expected, abs=0.1 * sd + 4 * error)
            assert np.quantile(a[:, k], [0.1, 0.9]) == near, (name, k)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Results with an effect that varies between tasks, so few that the priors matter too."""
    rng, table = np.random.default_rng(3), coin_rows(tasks=5, subsamples=3, n=60)
    effects = dict(zip(sorted(set(table["task"])), rng.normal(0.05, 0.06, 5)))
    shifted = (table["acc_extra"] + table["task"].map(effects)).clip(0, 1)
    path = tmp_path_factory.mktemp("small") / "results.csv"
    return saved(table.assign(acc_test=(60 * shifted).round() / 60), path)


@pytest.fixture
def compiled_once(monkeypatch):
    """Of one data set: a model, named by its parameters, is compiled once."""
    import nutpie

    def compiled(model):
        names = tuple(variable.name for variable in model.free_RVs)
        if names not in COMPILED:
            COMPILED[names] = compile_anew(model)
        return COMPILED[names]

    compile_anew = nutpie.compile_pymc_model
    monkeypatch.setattr(nutpie, "compile_pymc_model", compiled)


COMPILED = {}


@pytest.mark.parametrize("analysis", ["paper", "hierarchical"])
def test_every_reported_parameter_has_the_posterior_of_a_plain_model(f, small, compiled_once, analysis):
    import nutpie

    rows = f.measure(args_of(f, small))
    posterior, _ = f.fit(rows, "bias", analysis, 1000)
    model, names = plain_paper(rows), ("mu", "beta", "alpha", "sd_U", "sd_V", "sd_W", "d")
    if analysis == "hierarchical":
        model, names = plain_hierarchical(rows), ("beta", "tau", "s", "omega", "effect")
    plain = nutpie.sample(nutpie.compile_pymc_model(model), draws=700, tune=400, chains=4, seed=1,
                          progress_bar=False, save_warmup=False, target_accept=0.95)
    assert_same_posterior(posterior, plain.posterior, names)


def test_the_reference_posterior_of_a_published_cell(f):
    """m = 100, n = 500, bias: a long run of the model as the paper writes it gave these means and sds."""
    args = args_of(f, PAPER / "few_shot_m100.csv", "--n", 500)
    rows = f.load_rows(args)
    _, summary = f.fit(rows, "bias", "paper", args.draws)
    assert summary["warning"].eq("").all()
    known = {"beta": (-0.0080, 0.0012, 0.0115, 0.001), "alpha[gpt2]": (-0.566, 0.001, 0.0046, 0.0003),
             "sd_U": (1.14, 0.03, 0.16, 0.02), "sd_V": (0.182, 0.002, 0.0063, 0.0006),
             "sd_W": (0.0365, 0.0015, 0.0067, 0.0007)}
    for name, (mean, near, sd, close) in known.items():
        assert summary.loc[name, "mean"] == pytest.approx(mean, abs=near)
        assert summary.loc[name, "sd"] == pytest.approx(sd, abs=close)


def test_predictive_effects_are_binomial_means(f):
    """Fixed parameters: the mean is the difference of the shares, the variance that of two binomials."""
    import xarray

    c, d, alpha, K, n = np.array([0.2, -0.4, 1.0]), np.array([0.5, -0.3]), 0.7, [2, 1], 50
    task_idx, shape = np.array([0, 0, 1]), (2, 20_000)
    posterior = xarray.Dataset({
        "c": (("chain", "draw", "unit"), np.tile(c, (*shape, 1))),
        "d": (("chain", "draw", "task"), np.tile(d, (*shape, 1))),
        "alpha": (("chain", "draw", "later"), np.full((*shape, 1), alpha))})
    data = {"total": np.array([[n, n, n], [n, n, 0]]), "task_idx": task_idx}
    posterior = f.predict_effects(posterior, data, ["a", "b"], np.random.default_rng(0))
    effects = posterior["effect"].values.reshape(-1, 2, 2)
    for i, j in ((0, 0), (1, 0), (0, 1)):
        logits = c[task_idx == j] + i * alpha
        shares = [special.expit(logits + sign * d[j] / 2) for sign in (1, -1)]
        assert effects[:, i, j].mean() == pytest.approx(100 * np.mean(shares[0] - shares[1]), abs=0.15)
        variance = 1e4 * sum((p * (1 - p)).sum() for p in shares) / n / K[j] ** 2
        assert effects[:, i, j].var() == pytest.approx(variance, rel=0.04)
    assert np.isnan(effects[:, 1, 1]).all()  # a model that lacks the task
    expected = np.mean([np.nanmean(effects[:, i].mean(0)) for i in (0, 1)])
    assert posterior["difference"].values[..., 0].mean() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("column, value", [("r_hat", math.nan), ("r_hat", 1.02), ("ess_bulk", 399),
                                           ("ess_tail", math.nan)])
def test_the_gate_of_convergence(f, column, value):
    good = pd.DataFrame({"r_hat": [1.001] * 3, "ess_bulk": [900.0] * 3, "ess_tail": [800.0] * 3})
    assert f.warning_of(good, 0) == "" and "divergences: 1" in f.warning_of(good, 1)
    for place in range(3):  # a missing value counts wherever it stands
        bad = good.copy()
        bad.loc[place, column] = value
        assert "not converged" in f.warning_of(bad, 0)


@pytest.mark.parametrize("name, scale", [("sd_W", 3.5355), ("sd_U", 1), ("sd_V", 1), ("mu", None),
                                         ("beta", None), ("alpha", 5)])
def test_the_priors_are_the_papers(f, name, scale):
    """Section 6: Normal(0, 1), alpha Normal(0, 5); HalfNormal(1), sd_W HalfNormal(3.5355)."""
    import pymc as pm

    rows = f.add_effects(coin_rows(tasks=5).assign(arms="plain", discordant=math.nan, discordant_on_extra=math.nan,
                                                   **dict.fromkeys(MIRRORED, math.nan)))
    model = f.paper_model(*f.paper_counts(rows, "bias"))
    if name == "alpha" or scale is None:
        law = stats.norm(0, scale or 1)
    else:
        law = stats.halfnorm(0, scale)
    for value in (0.3, 4.0):
        found = np.ravel(pm.logp(model[name], np.full(model[name].ndim, value) if model[name].ndim else value).eval())
        assert found == pytest.approx(law.logpdf(value))


def test_what_the_samplers_add(run, small, compiled_once):
    """Few draws: exit status 3, said in every row; all files, whose columns the manual names."""
    status, out, err = run(small, "--draws", 40, "--effects", "bias")
    assert status == 3 and "did not converge: 2" in out and out.count(": not converged") == 2
    assert out.index("page: ") < out.index(", paper: ") < out.index(", hierarchical: ")
    folder = Path("fits/results")
    manual = load_script("fit_model").__doc__
    for path in folder.glob("*.csv"):
        block = re.search(rf"    {path.name} +(.*?)(?=\n    \w+\.csv|\n\n)", manual, re.S)[1]
        for column in pd.read_csv(path).columns:
            assert re.search(rf"\b{column}\b", block) or column.endswith(("_low", "_high")), (path, column)
    effects = pd.read_csv(folder / "effects.csv")
    assert len(effects) == 3 * 4 and set(effects.query("target == 'paper'")["model"]) == {"all", "a", "b"}
    tasks = pd.read_csv(folder / "tasks.csv").query("model != 'all'")
    assert len(tasks) == 10 and tasks[["paper", "hierarchical", "paper_low"]].notna().all().all()
    sd = (tasks["hierarchical_high"] - tasks["hierarchical_low"]) / (2 * stats.norm.ppf(0.945))
    law = stats.norm(tasks["hierarchical"], sd)  # nearly
    assert np.allclose(tasks["p_beyond"], 1 - law.cdf(1) + law.cdf(-1), atol=0.15)
    posterior = pd.read_csv(folder / "posterior.csv")
    assert posterior["warning"].str.contains("not converged").all()
    names = set(posterior["parameter"])
    assert {"beta", "sd_W", "alpha[b]", "d[task00]", "difference[all]", "tau[a]", "new_task[b]"} <= names
    assert not any("__" in name or name.startswith("effect") for name in names)
    assert "hierarchical: not converged" in (folder / "report.html").read_text()


def test_too_little_for_the_samplers(run, tmp_path):
    path = saved(bias_rows({"a": [1, 2]}), tmp_path / "r.csv")
    status, out, _ = run(path, "--draws", 40, "--effects", "bias")
    assert status == 0 and out.count("left out, it needs 5 tasks with two subsamples each") == 2


def test_ctrl_c_in_the_samplers_leaves_all_else(tmp_path):
    path = saved(coin_rows(tasks=5), tmp_path / "results.csv")
    command = [sys.executable, "-u", ROOT / "fit_model.py", path, "--draws", "2000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    for line in process.stdout:
        if line.startswith("page:"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    names = {file.name for file in (tmp_path / "fits" / "results").iterdir()}
    assert process.returncode == 1 and "Traceback" not in err
    assert err.strip().endswith("stopped: what stands in fits/results stays")
    assert {"report.html", "effects.csv", "tasks.csv", "effects.png"} <= names
    assert "posterior.csv" not in names


# What a person gets --------------------


def test_sentences(f, tmp_path):
    def said(rows, *flags):
        _, _, effects = tables_of(f, saved(rows, tmp_path / "r.csv"), "--effects", "bias", *flags)
        (line,) = f.answers_of(effects)
        text, card = f.sentence(line), f.cards([line])
        large = text.partition(":")[0]
        assert "nan" not in text + card and f'<div class="card {large.lower()}">' in card and f"<b>{large}</b>" in card
        return text

    assert said(bias_rows({"a": [0, 1, -1] * 9, "b": [0, 1] * 9})).startswith("No: within ±1. few-shot")
    assert said(bias_rows({"a": [7, 8, 9]})).startswith("Yes: beyond ±1. few-shot")
    assert said(bias_rows({"a": [-7, -8, -9]})).startswith("No: seen texts even score worse, beyond ±1.")
    # sixteen biases of .6 - x and .6 + x: half-widths of .527 and .658, below and above .55 of the margin
    near = said(bias_rows({"a": [-0.6, 1.8] * 8}, n=1000, seconds=9))
    assert near.startswith("Near the margin of ±1") and "--subsamples" not in near
    early = said(bias_rows({"a": [-0.9, 2.1] * 8}, n=1000, seconds=9))
    assert early.startswith("Too early to tell: neither within nor beyond ±1.") and "12 to 16 times" in early
    lonely = said(bias_rows({"a": [3]}, seconds=9))
    assert lonely.startswith("Too early to tell: no interval.") and "+3.00 points for 1 task. One subsample" in lonely
    assert "Run the same again with --subsamples 5 (about 1 minute of one process)" in lonely
    rows = bias_rows({"a": [-3, 0, 4], "b": [-4, 2, 1, 0]})
    text = said(rows)  # of rows that nobody here ran there is no command
    R = int(one(tables_of(f, tmp_path / "r.csv")[2], effect="bias")["needed"])
    assert R > 20 and text.endswith(f"{R} subsamples of each task, in all, would decide.")
    assert f"--subsamples {R} (about {R - 3} minutes of one process)" in said(rows.assign(seconds=30))  # two tasks
    assert said(bias_rows({"a": [-3, 0, 4]}), "--margin", 30).startswith("No: within ±30.")


def test_all_settings_and_models_together_take_the_time_of_all(f, tmp_path):
    """Two models, settings of 30 s and 330 s a subsample; once the time of the first alone was said."""
    rows = bias_rows({"a": [-3, 0, 4]}, seconds=30)
    rows = pd.concat([rows, rows.assign(m=16, seconds=330)])
    path = saved(pd.concat([rows, rows.assign(model="other")]), tmp_path / "r.csv")
    effects = tables_of(f, path, "--effects", "bias")[2]
    R = int(one(effects, m=0, model="all")["needed"])
    (line,) = f.answers_of(effects)
    assert f"--subsamples {R} (about {(R - 3) * 12} minutes of one process)" in f.sentence(line)


def test_what_limits_an_answer(run, tmp_path):
    """A boost within the margin; macro-F1 on unseen texts 5 points above 1 / K, if it is there."""
    rows = bias_rows({"a": [0, 0, 1], "b": [0, 0, -1]}, base=0.5, extra=0.5)
    assert "the boost too is within the margin" in run(saved(rows, tmp_path / "r.csv"), "--draws", 0)[1]
    rows = bias_rows({"a": [0, 0, 1], "b": [0, 0, -1]}, base=0.4, extra=0.5)
    for f1, cases in (({"a": 0.53, "b": 0.9}, "1 of 2 cases (a)"), ({"a": 0.56, "b": 0.56}, None), ({}, None)):
        scores = {f"f1_{arm}": rows["task"].map(f1) for arm in ("base", "extra", "test")}
        out = run(saved(rows.assign(**scores), tmp_path / "r.csv"), "--draws", 0)[1]
        assert ("not 5 points above guessing" in out) == bool(cases) and (cases or "") in out
        assert ('class="warning"' in Path("fits/r/report.html").read_text()) == bool(cases)


def test_sentences_over_several_settings(run, tmp_path):
    rows = pd.concat([bias_rows({"a": [3, 4], "b": [3, 3]}, m=m) for m in (6, 8)])
    alone = bias_rows({"a": [9]}, m=4)  # a setting without an interval
    first = run(saved(pd.concat([rows, alone]), tmp_path / "r.csv"), "--draws", 0)[1].splitlines()[0]
    assert "mean of 2 settings: bias of bert +3.25" in first
    assert "Alone, 2 of 2 settings exclude 0 (by chance about 0.2)." in first


def test_other_metrics(run, tmp_path):
    table = coin_rows().assign(f1_base=0.5, f1_extra=0.61234, f1_test=0.62234)
    for arm, value in (("base", 1.0), ("extra", 0.9), ("test", 0.95)):
        table[f"nll_{arm}"] = value + 0.01 * table["subsample"] * (arm == "test")
        table[f"mine_{arm}"] = 2.0 + 1.5 * (arm == "test")
    saved(table, tmp_path / "r.csv")
    assert run("r.csv", "--metric", "f1")[0] == 0  # the samplers take accuracies alone
    effects = pd.read_csv("fits/r.f1/effects.csv").query("effect == 'bias'")
    assert set(effects["metric"]) == {"f1"} and effects["estimate"].to_numpy() == pytest.approx(1)
    out = run("r.csv", "--metric", "nll")[1]
    row = one(pd.read_csv("fits/r.nll/effects.csv"), effect="bias", model="a", target="these tasks")
    assert row["estimate"] == pytest.approx(0.075) and math.isnan(row["margin"])
    assert out.startswith("The interval excludes 0.") and "nats (lower is better) for 3 tasks" in out
    out = run("r.csv", "--metric", "nll", "--margin", 0.001)[1]
    assert out.startswith("No: seen texts even score worse")  # a higher nll
    assert run("r.csv", "--metric", "mine", "--effects", "bias")[0] == 0
    assert set(pd.read_csv("fits/r.mine/effects.csv")["estimate"]) == {1.5}
    assert "0 columns 'bleu_base'" in run("r.csv", "--metric", "bleu")[2]


@pytest.mark.parametrize("rows", [
    coin_rows(tasks=1, subsamples=1, models=("a",)), coin_rows(tasks=45),
    coin_rows().assign(acc_base=1.0, acc_extra=1.0, acc_test=1.0),
    coin_rows().query("(model == 'a') == (task == 'task00')")])
def test_small_and_large_data(run, tmp_path, rows):
    """One row, many tasks, all answers right, models that share no task."""
    status, out, err = run(saved(rows, tmp_path / "results.csv"), "--draws", 0)
    page = Path("fits/results/report.html").read_text()
    assert status == 0 and not err and "nan" not in re.sub("base64,[^\"]*", "", page) + out
    assert not re.search(r"\b1 (tasks|subsamples)\b", out) and page.count("<tr") < 80


def test_the_page_is_one_file_with_names_escaped(run, tmp_path):
    """Names that may hold anything; figures inside; tables of one run only."""
    hostile = 'US$_<b>&"x"/../../я' + "ы" * 45
    rows = coin_rows(tasks=5).assign(experiment=hostile, versions="code <1>")
    assert run(saved(rows, tmp_path / "r.csv"), "--draws", 0)[0] == 0
    folder = tmp_path / "fits" / "r"
    page = (folder / "report.html").read_text()
    assert "<b>&" not in page and "US$_&lt;b&gt;&amp;" in page and "code &lt;1&gt;" in page
    assert not re.search(r'(src|href)="(?!data:)', page) and page.count("data:image/png;base64,") == 1
    assert page.count("<tr") == 1 + 6 + 1 + 10  # settings, what was run
    (folder / "posterior.csv").write_text("of an earlier run")
    (folder / "notes.txt").write_text("mine")
    run("r.csv", "--draws", 0)
    names = {path.name for path in folder.iterdir()}
    assert names == {"effects.csv", "tasks.csv", "report.html", "notes.txt", "effects.png"}


def test_a_full_disk_leaves_the_old_page(f, run, tmp_path, monkeypatch):
    """All is written anew beside the old, which is replaced at the end."""
    run(saved(coin_rows(), tmp_path / "r.csv"), "--draws", 0)
    before = {path: path.read_bytes() for path in Path("fits/r").iterdir()}
    write = Path.write_bytes

    def full(path, content):
        if path.name.startswith("tasks.csv"):
            raise OSError("No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError):
        run("r.csv", "--draws", 0, "--margin", 3)
    assert {path: path.read_bytes() for path in before} == before


def test_a_page_says_only_what_is_there(run, tmp_path):
    """No brackets without an interval; no commonest class and four digits for a metric of one's own;
    no number of subsamples near the margin; of many tasks a line a model."""
    def page_of(rows, *flags):
        run(saved(rows, tmp_path / "r.csv") if isinstance(rows, pd.DataFrame) else rows, "--draws", 0, "--out", "p",
            *flags)
        return Path("p/report.html").read_text()

    assert "within the brackets" not in page_of(bias_rows({"a": [3]}))
    page = page_of(bias_rows({"a": [3, 4]}))
    assert "within the brackets" in page and "Black tick" in page
    own = {f"own_{arm}": [0.61234, 0.71234] for arm in ("base", "extra", "test")}
    page = page_of(bias_rows({"a": [3, 4]}).assign(**own), "--metric", "own")
    assert "Black tick" not in page and "0.6623" in page
    near = page_of(bias_rows({"a": [-0.6, 1.8] * 8}, n=1000), "--effects", "bias")
    assert "Near the margin" in near and "<th>needed</th>" not in near
    page = page_of(PAPER / "few_shot_m100.csv")
    assert page.partition("What was run")[2].count("<tr") == 1 + 2


def test_each_of_a_few_settings_has_a_figure_too(run, tmp_path):
    """But for one of a single task, whose line says the same; later, of two settings alone."""
    few = [coin_rows().assign(m=m) for m in (4, 8)]
    rows = pd.concat([*few, coin_rows(tasks=1, models=("a",)).assign(m=16)])
    run(saved(rows, tmp_path / "r.csv"), "--draws", 0)
    assert {path.name for path in Path("fits/r").glob("*.png")} == {"effects.png", "setting-1.png", "setting-2.png"}
    run(saved(few[0], tmp_path / "r.csv"), "--draws", 0)
    assert {path.name for path in Path("fits/r").glob("*.png")} == {"effects.png"}


def test_many_experiments_have_one_figure_and_a_line_each(run, tmp_path):
    rows = pd.concat([coin_rows(tasks=1, models=("a",)).assign(experiment=f"e{k:03}") for k in range(40)])
    status, out, _ = run(saved(rows, tmp_path / "r.csv"), "--draws", 0, "--effects", "bias")
    page = Path("fits/r/report.html").read_text()
    assert status == 0 and len(out.splitlines()) == 41 and page.count("base64,") == 1
    assert page.count("<tr") == 1 + 40 + 1 + 40 + 1 + 31  # answers, settings, the first and last of what was run


def test_the_page_says_what_was_run_and_what_is_needed(run, tmp_path):
    """50 texts of six classes are 48; a verdict that stands needs no more subsamples."""
    rows = coin_rows(models=("bert-tiny",)).assign(m=50, num_classes=6, versions="torch 9")
    for margin, needed in ((1, True), (30, False)):
        run(saved(rows, tmp_path / "r.csv"), "--draws", 0, "--margin", margin)
        settings, _, runs = Path("fits/r/report.html").read_text().partition("What was run")
        assert ("<th>needed" in settings) == needed
        assert re.findall("<td>(.*?)</td>", runs)[:10] == [
            "few-shot", "50", "48", "40", "bert-tiny (a demonstration)", "task00", "6", "plain", "4", "torch 9"]


def test_rounding_is_half_away_from_0(f):
    """Whatever the last bits of a mean are."""
    values = np.array([-1.1, -0.95, -1.025])
    for value in (-1.025, values.mean(), values.sum() / 3, np.mean([-2.05, 0])):
        assert f.signed(value, "acc") == "-1.03"
    assert f.signed(1.005, "acc") == "+1.01" and f.signed(-0.004, "f1") == "+0.00"


# Reading --------------------


def test_natural_variations_are_accepted(f, tmp_path, capsys):
    table = coin_rows()
    plain = f.load_rows(args_of(f, saved(table, tmp_path / "results.csv")))
    text = (tmp_path / "results.csv").read_text()
    other = tmp_path / "other" / "results.csv"
    other.parent.mkdir()
    variations = {
        "BOM": "\ufeff" + text, "CRLF": text.replace("\n", "\r\n"), "no newline": text.rstrip("\n"),
        "blank lines": text.replace("\nfew", "\n\nfew", 3) + "\n,,,\n\n",
        "m = 10.0": text.replace(",10,40,", ",10.0,40,"),
        "four decimals": table.round(4).to_csv(index=False),
        "torn": text + "few-shot,a,task09,10,40,1,2,0",
        "torn within": text.replace("\nfew", "\nfew-shot,a,task0\nfew", 1)}
    for name, changed in variations.items():
        other.write_bytes(changed.encode())
        found = f.load_rows(args_of(f, other.parent))
        pd.testing.assert_frame_equal(found.drop(columns="where"), plain.drop(columns="where"), obj=name)
        assert ("left out, for it was cut short" in capsys.readouterr().out) == name.startswith("torn"), name
    other.write_text(text)
    saved(table.assign(acc_test=0.9), other.parent / "results_backup.csv")  # no file of the run
    assert len(f.load_rows(args_of(f, tmp_path, other.parent))) == 24
    assert "rows given more than once and used once: 24" in capsys.readouterr().out
    saved(table[:12].assign(subsample=table["subsample"] + 50), other.parent / "results.2-of-2.csv")
    assert len(f.load_rows(args_of(f, other.parent))) == 36
    assert len(f.load_rows(args_of(f, other.parent, "--models", "b", "--tasks", "task01", "task02"))) == 8


def test_one_run_in_old_and_new_columns(f, tmp_path):
    """The fuller row counts, whatever the order of files; differing numbers are refused, with both values."""
    new = pd.read_csv(TINY).query("subsample <= 6")
    old = saved(new.drop(columns=[name for name in new if "_on_extra" in name or name == "discordant"]),
                tmp_path / "old.csv")
    new = saved(new, tmp_path / "new.csv")
    found = [tables_of(f, *paths)[2] for paths in ((new,), (old, new), (new, old))]
    for other in found[1:]:
        pd.testing.assert_frame_equal(found[0].drop(columns="cells"), other.drop(columns="cells"))
    assert set(found[0]["arms"]) == {"crossed"}
    changed = pd.read_csv(old)
    changed.loc[3, "acc_test"] += 0.005
    with pytest.raises(SystemExit, match=r"data row 4 .* differ in acc_test \(0.\d+ and 0.\d+\)"):
        tables_of(f, new, saved(changed, tmp_path / "old.csv"))


def test_a_cell_with_some_rows_of_old_is_plain_and_says_so(f, run, capsys, tmp_path):
    """The methods paragraph is right for either kind."""
    table = crossed_rows(1, 2, 3, 50, np.random.default_rng(0))
    partly = table.copy()
    partly.loc[2, MIRRORED[0]] = math.nan
    out = run(saved(pd.concat([partly, table.assign(m=20)]), tmp_path / "r.csv"), "--draws", 0)[1]
    arms = pd.read_csv("fits/r/effects.csv").dropna(subset="m").groupby("m")["arms"].unique()
    assert arms.map(list).to_dict() == {8: ["plain"], 20: ["crossed"]}
    assert "e0, m = 8, n = 50: some rows lack acc_*_on_extra" in out
    page = Path("fits/r/report.html").read_text().partition("<h2>For a methods section")[2]
    crossed, plain, *_ = re.findall("<p.*?</p>", page)
    assert "m = 8 labelled texts" in plain and "tested on the first set" in plain
    assert "the variance between its subsamples" in plain
    assert "m = 20 labelled texts" in crossed and "tested on both sets" in crossed
    assert "the noise of drawing its texts" in crossed


def with_value(table, name, value, k=3):
    """The table as text, with a value in data row k + 1."""
    table = table.astype(object)
    table.loc[k, name] = value
    return table.to_csv(index=False)


BAD = {  # name: (what becomes of the rows' text, what the message says)
    "no accuracies": (lambda t: t.drop(columns="acc_extra").to_csv(index=False),
                      "0 columns 'acc_extra', not one; separated by commas: experiment"),
    "empty file": (lambda t: "", "cannot be read as a CSV file"),
    "semicolons": (lambda t: t.to_csv(index=False, sep=";"), "separated by commas: experiment;model"),
    "no rows": (lambda t: t[:0].to_csv(index=False), "has no rows"),
    "no CSV": (lambda t: t.to_csv(index=False) + 'x,"y\n', "cannot be read as a CSV file"),
    "more fields": (lambda t: t.to_csv(index=False) + "a" + ",1" * 15, "Expected 11 fields in line 26, saw 16"),
    "two columns of one name": (lambda t: t.assign(x=1).to_csv(index=False).replace(",x\n", ",acc_test\n"),
                                "2 columns 'acc_test', not one"),
    "not k / n": (lambda t: with_value(t, "acc_test", 0.123),
                  "data row 4: acc_test is 0.123, not a whole number of right answers over n"),
    "above 1": (lambda t: with_value(t, "acc_test", 1.025), "acc_test is 1.025, not a number from 0 to 1"),
    "infinite": (lambda t: t.assign(num_classes="inf").to_csv(index=False), "num_classes is inf, not a number"),
    "fraction": (lambda t: with_value(t, "m", "8.5"), "data row 4: m is 8.5, not a whole number from 1"),
    "no experiment": (lambda t: with_value(t, "experiment", ""), "data row 4: experiment is nan, not a name"),
    "one data set as two tasks": (lambda t: t.assign(data="x").to_csv(index=False), "differ in task"),
    "conflict": (lambda t: t.to_csv(index=False) + with_value(t[:1], "acc_test", 0.1, 0).split("\n", 1)[1],
                 "data row 1 and results.csv, data row 25 agree in experiment, model, task"),
    "splits": (lambda t: t.assign(split=["x"] * 12 + ["y"] * 12).to_csv(index=False), "differ in split (x and y)"),
    "recipes": (lambda t: t.assign(recipe=["x"] * 11 + ["y"] * 13).to_csv(index=False),
                "differ in recipe (x and y)")}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_line(run, tmp_path, name):
    change, message = BAD[name]
    (tmp_path / "results.csv").write_text(change(coin_rows()))
    status, _, err = run("results.csv", "--draws", 0)
    assert status == 1 and message in err and err.count("\n") == 0 and err.startswith("error: ")
    assert not Path("fits").exists()


@pytest.mark.parametrize("flags, message", [
    (["nowhere.csv"], "cannot be read"), (["."], "holds no results.csv"),
    (["r.csv", "--models", "c"], "no rows of {'c'}, only of {"), (["--margin", 0], "--margin at 0.001"),
    (["--margin", "nan"], "--margin at 0.001"), (["--draws", -5], "--draws begins at 0")])
def test_bad_arguments(run, tmp_path, flags, message):
    saved(coin_rows(), tmp_path / "r.csv")
    status, _, err = run(*flags)
    assert status == 1 + ("--" in message) and message in err and not Path("fits").exists()
