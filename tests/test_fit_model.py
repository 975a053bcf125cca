"""fit_model.py against the paper's tables, hand arithmetic, scipy, plain models, simulation."""

import itertools
import math
import re
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng
from pytest import approx
from scipy import special, stats

from conftest import ARMS, ROOT, coin_rows, load_script, path_of

fit = load_script("fit_model")
pytestmark = pytest.mark.usefixtures("empty_folder")

PAPER = ROOT / "tests" / "published"
TINY = ROOT / "tests" / "bert_tiny_n200.csv"
SIZES = [50, 100, 200, 500]  # n
TABLE_1 = {  # by (m, model): boost, bias in percent by n, as printed in the paper
    (50, "bert"): ([4.1, 3.9, 3.9, 3.5], [0.19, 0.18, -0.39, 0.48]),
    (50, "gpt2"): ([3.8, 4.1, 4.4, 4.6], [0.18, 0.11, -0.05, -0.08]),
    (100, "bert"): ([6.2, 6.1, 4.1, 6.1], [-0.08, -0.37, 0.33, -0.16]),
    (100, "gpt2"): ([2.2, 2.5, 6.3, 3.9], [-0.05, 0.03, -0.01, -0.21]),
}


@pytest.fixture
def run(said):
    """run(rows, flags...) -> end, out, err of main(), without samplers by default."""
    return lambda rows, *flags: said(fit.main, "--draws", 0, path_of(rows), *flags)


def tables_of(rows, *flags):
    """(rows, tasks.csv, effects.csv) as main makes them."""
    args = fit.parse_args([str(path_of(rows)), *map(str, flags)])
    rows = fit.measure(args)
    tasks = fit.task_table(fit.unit_table(rows), rows, args)
    return rows, tasks, fit.effects_table(tasks, args)


def one(table, target="these tasks", **wanted):
    """The only row of effects.csv with these values."""
    table = table[table["target"] == target]
    for name, value in wanted.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def bias_of(rows, *flags):
    """Its only row of effects.csv on these tasks."""
    _, _, effects = tables_of(rows, *flags)
    return one(effects, effect="bias")


def csv_of(name, folder="results"):
    return pd.read_csv(f"fits/{folder}/{name}.csv")


def page(folder="results"):
    return Path("fits", folder, "report.html").read_text()


def row_of(task="a", k=1, model="bert", n=100, m=8, base=0.4, extra=0.5, bias=0.0, on_extra=(),
           **more):
    """A row; bias in points; on_extra: accuracies of the arms, if they are crossed."""
    names = [f"acc_{arm}_on_extra" for arm in ARMS]
    return {"experiment": "few-shot", "model": model, "task": task, "m": m, "n": n, "subsample": k,
            "num_classes": 2, "majority": 0.5, "acc_base": base, "acc_extra": extra,
            "acc_test": extra + bias / 100, **dict(zip(names, on_extra)), **more}


def bias_rows(tasks, **more):
    """Rows with these biases in points, {task: [one a subsample]}."""
    rows = []
    for task, values in tasks.items():
        for k, value in enumerate(values, 1):
            rows.append(row_of(task, k, bias=value, **more))
    return pd.DataFrame(rows)


def crossed_row(right, **names):
    """A row, or columns, from right answers [set: test, extra; arm; ..., text]."""
    row = row_of(n=right.shape[-1], **names)
    for texts, ending in zip(right, ("", "_on_extra")):
        for arm, answers in zip(ARMS, texts):
            row[f"acc_{arm}{ending}"] = answers.mean(-1)
        row[f"discordant{ending}"] = (texts[1] != texts[2]).mean(-1)
    return row


def trained(rng, shape, flips=0.08, effect=0.0):
    """Right answers of models that flip so many and know so many more of their texts."""
    right = []
    for own in (2, 1):  # the arm that has seen the set
        known = rng.random(shape) < 0.7
        for arm in range(3):
            flipped = known ^ (rng.random(shape) < flips)
            right.append(flipped | (rng.random(shape) < effect * (arm == own)))
    return np.reshape(right, (2, 3, *known.shape))


def crossed_rows(sets, tasks, subsamples, n, rng, luck=0.0, effect=0.0):
    """Rows of many experiments; luck: sd, in points, by which the effect differs between runs."""
    units = itertools.product(range(sets), range(tasks), range(1, subsamples + 1))
    numbers, tasks, subsamples = np.array([*units]).T
    right = trained(rng, (len(numbers), n), effect=effect)
    rows = pd.DataFrame(crossed_row(right, task=[f"t{task}" for task in tasks], k=subsamples))
    rows["experiment"] = [f"e{number}" for number in numbers]
    more = (n * rng.normal(0, luck / 100, len(rows))).round() / n
    rows["acc_test"] += more
    rows["acc_extra_on_extra"] += more
    return rows


# The published numbers --------------------


def test_tables_1a_and_1b_and_section_7(run):
    """The paper rounds 3 decimals half up, then those of the table: .1848 is .185 and then .19."""
    found = run(PAPER / "few_shot_m50.csv", PAPER / "few_shot_m100.csv")
    assert found.end is None
    folder = "few_shot_m50-and-1-more"
    effects = csv_of("effects", folder)
    means = effects.query("target == 'these tasks' and model != 'all'").dropna(subset="m")
    assert len(means) == 32 and set(means["tasks"]) == {25}
    for row in means.itertuples():
        boosts, biases = TABLE_1[row.m, row.model]
        expected, near = {"boost": (boosts, 0.0506), "bias": (biases, 0.00551)}[row.effect]
        assert abs(row.estimate - expected[SIZES.index(row.n)]) < near
    tasks = csv_of("tasks", folder).query("model != 'all'")
    of_tasks = tasks.groupby(["effect", "task"])["estimate"].mean().round(9)
    assert (of_tasks["bias"] > 0).sum() == 12 and (of_tasks["boost"] > 0).sum() == 23
    adjusted = tasks.query("effect == 'bias'")["p_adjusted"]
    assert len(adjusted) == 400 and adjusted.min() == approx(0.081, abs=5e-4)

    # Eight settings, said first, on top of effects.csv
    assert found.out.startswith(
        "No: within ±1. few-shot, mean of 8 settings: bias +0.01 [-0.08, +0.10] points for 25 "
        "tasks; boost +4.35 [+4.25, +4.45]. Alone, 1 of 8 settings exclude 0 (by chance about "
        "0.9).\n")
    top = effects.iloc[0]
    assert math.isnan(top["m"])
    assert top[["model", "effect", "arms"]].tolist() == ["all", "bias", "plain"]
    found = [top["estimate"], top["high"] - top["estimate"]]
    assert found == approx([0.006, 0.089], abs=5e-4)


def test_zero_shot_signs_are_exact():
    _, tasks, effects = tables_of(PAPER / "zero_shot_m100_n100.csv")
    assert one(effects, effect="boost")["estimate"] == approx(5.25, abs=5e-3)
    assert one(effects, effect="bias")["estimate"] == approx(-0.04, abs=5e-3)
    bias = tasks.xs("bias", level="effect")["estimate"]
    assert [(bias > 0).sum(), (bias == 0).sum(), (bias < 0).sum()] == [12, 1, 12]


# Target 1 by hand --------------------


def test_plain_effects_by_hand():
    """Means over models: x (2, 4), y (1, 1, 3), z (1, 1); s^2 = 2, 4/3, rounding's 1/12."""
    a = bias_rows({"x": [1, 3], "y": [0, 2, 4], "z": [1, 1]}, model="a")
    b = bias_rows({"x": [3, 5], "y": [2, 0, 2], "z": [1, 1]}, model="b")
    _, tasks, effects = tables_of(pd.concat([a, b]), "--effects", "bias")
    row = one(effects, model="all")
    df = (107 / 72) ** 2 / (1 / 1 + (16 / 81) / 2 + (1 / 576) / 1)
    expected = [17 / 9, math.sqrt(107 / 72) / 3, df]
    assert row[["estimate", "se", "df"]].tolist() == approx(expected)
    assert (row["tasks"], row["subsamples"], row["arms"]) == (3, 2, "plain")
    expected = math.sqrt(2 / 2 + 4 / 3 + (1 / 12) / 2) / 3
    assert one(effects, model="a")["se"] == approx(expected)
    like = one(effects, "tasks like these", model="all")
    task = tasks.loc[("few-shot", 8, 100, "bias", "a", "y")]  # its own t interval
    for row, values in ((like, [3, 5 / 3, 1]), (task, [0, 2, 4])):
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.89)
        assert (row["low"], row["high"]) == approx((expected.low, expected.high))
    equal = tasks.loc[("few-shot", 8, 100, "bias", "a", "z")]
    expected = 2 * stats.t.ppf(0.945, 1) * math.sqrt(1 / 12 / 2)
    assert equal["high"] - equal["low"] == approx(expected)


def test_crossed_effects_by_hand():
    """n = 100. By subsample the two biases are 4 and 2, -2 and 0."""
    first = row_of("a", 1, bias=4, on_extra=(0.42, 0.56, 0.54), discordant=0.06,
                   discordant_on_extra=0.04)
    second = row_of("a", 2, bias=-2, on_extra=(0.4, 0.6, 0.6), discordant=0.02,
                    discordant_on_extra=0.08)
    w = [25 * (0.06 - 0.04**2 + 0.04 - 0.02**2), 25 * (0.02 - 0.02**2 + 0.08)]
    rows, _, effects = tables_of(pd.DataFrame([first, second]))
    expected = {"w": w, "bias": [3, -1], "boost": [11, 15], "base": [41, 40], "unseen": [52, 55],
                "seen": [55, 54]}
    for name, values in expected.items():
        assert rows[name].tolist() == approx(values)
    row = one(effects, effect="bias")  # s^2 = 8, more than w; df: one and the texts' five
    half = stats.t.ppf(0.945, 6) * math.sqrt(8 / 2)
    names = ["estimate", "df", "low", "high", "base", "unseen", "seen"]
    assert row[names].tolist() == approx([1, 6, 1 - half, 1 + half, 40.5, 53.5, 54.5])
    assert row["arms"] == "crossed"
    assert one(effects, effect="boost")["df"] == approx(1)  # s^2 alone
    plain = bias_of(Path("results.csv"), "--plain")
    assert (plain["estimate"], plain["df"], plain["arms"]) == approx((1, 1, "plain"))

    # One subsample is enough for the bias: w, and one text of 100 on each set
    second |= {"task": "b", "subsample": 1}
    _, _, effects = tables_of(pd.DataFrame([first, second]))
    row = one(effects, effect="bias")
    assert row["df"] == 5
    more = 2 * 1e4 / (4 * 100) * 2 / 100
    half = stats.t.ppf(0.945, 5) * math.sqrt(sum(w) + more) / 2
    assert row["high"] - 1 == approx(half)
    assert math.isnan(one(effects, effect="boost")["low"])


@pytest.mark.parametrize("luck", [0, 2.5])
def test_the_pooled_variance(luck):
    """Two settings, tasks of 2, 3, 5 and 9 subsamples; without luck s^2 adds nothing."""
    rng = default_rng(10)
    rows = pd.concat([crossed_rows(1, 4, 9, 100, rng, luck=luck).assign(m=m) for m in (8, 16)])
    rows = rows[rows["subsample"] <= rows["task"].map({"t0": 2, "t1": 3, "t2": 5, "t3": 9})]
    rows, tasks, effects = tables_of(rows, "--margin", 3)
    v, square = 0, 0
    for m in (8, 16):
        groups = rows[rows["m"] == m].groupby("task")
        D, K = groups["bias"], groups.size()
        texts = groups["w"].mean() + 25 * 2 / (100 * K)
        excess = ((K - 1) * (D.var() - texts)).sum() / (K - 1).sum()
        more = max(0, excess)
        assert (excess > 0) == bool(luck)
        df = K.sum() - 4 + 5
        variance = (texts + more) / K  # of a task's mean
        se = math.sqrt(variance.sum()) / 4
        row = one(effects, m=m, effect="bias")
        expected = [D.mean().mean(), se, df, stats.t.ppf(0.945, df) * se]
        assert row[["estimate", "se", "df", "half"]].tolist() == approx(expected)
        v += (se / 2) ** 2
        square += (se / 2) ** 4 / df
        for task, middle in D.mean().items():
            found = tasks.loc[("e0", m, 100, "bias", "bert", task)]
            spread = math.sqrt(variance[task])
            assert found["high"] - middle == approx(stats.t.ppf(0.945, df) * spread)
            reach = stats.t.ppf(1 - 0.055 / 4, df) * spread  # 1 - .11 / 4 for each of four
            expected = "not settled"
            if abs(middle) + reach < 3:
                expected = "within the margin"
            elif abs(middle) - reach > 3:
                expected = "beyond the margin"
            assert found["verdict"] == expected
    row = one(effects, m=0, effect="bias")
    assert (row["se"], row["df"]) == approx((math.sqrt(v), v**2 / square))
    assert row["high"] - row["estimate"] == approx(row["half"])


def test_a_cell_that_does_not_know_all_noise_takes_s2():
    rows = crossed_rows(1, 2, 4, 100, default_rng(4), luck=5)
    rows.loc[0, "discordant"] = math.nan
    rows, _, effects = tables_of(rows)
    v = rows.groupby("task")["bias"].var() / 4
    row = one(effects, effect="bias")
    expected = (math.sqrt(v.sum()) / 2, sum(v) ** 2 / sum(v**2 / 3))
    assert (row["se"], row["df"]) == approx(expected)


def test_without_discordant_accuracies_bound_the_noise():
    """Two subsamples with equal biases of 16: at least 16 of 100 texts differ on each set."""
    rows = bias_rows({"a": [16, 16]}, on_extra=(0.4, 0.66, 0.5))
    row = bias_of(rows)
    bound = 25 * 2 * (0.16 - 0.16**2)
    assert (row["se"], row["df"]) == approx((math.sqrt(bound / 2), 1))
    assert math.isnan(bias_of(rows[:1])["low"])


def test_noise_over_models_and_seeds():
    """Their answers may go together wholly: the sd of a mean is at most the mean of the sds."""
    rng = default_rng(1)
    rows = pd.DataFrame([crossed_row(trained(rng, 100, 0.05), model="a"),
                         crossed_row(trained(rng, 100, 0.2), model="b")])
    found, tasks, _ = tables_of(rows)
    a, b = found["w"]
    both = ((math.sqrt(a) + math.sqrt(b)) / 2) ** 2
    variance = tasks["variance"].xs("bias", level="effect")
    imaginary = 0.5  # of the imaginary texts
    assert variance.to_numpy() - imaginary == approx([a, both, b])
    _, tasks, _ = tables_of(rows.assign(model="a", seed=[0, 1]))
    variance = tasks["variance"].xs("bias", level="effect")
    assert variance.to_numpy() - imaginary == approx([both])
    assert set(tasks["subsamples"]) == {1}


@pytest.mark.parametrize("flips", [0.02, 0.1, 0.3])
def test_w_by_dealing_the_texts_out_again(flips):
    """The 2n texts of a subsample fall into test and extra anew, the models stay. The variance over
    deals, less what the observed difference itself adds, is w."""
    rng, n = default_rng(2), 150
    right = trained(rng, n, flips)
    row = tables_of(pd.DataFrame([crossed_row(right)]))[0].iloc[0]
    x = (right[:, 2].astype(int) - right[:, 1]).ravel()
    deals = np.array([rng.permutation(x) for _ in range(10_000)])
    biases = 50 * (deals[:, :n].mean(1) - deals[:, n:].mean(1))
    observed = 50 * (x[:n].mean() - x[n:].mean())
    assert row["bias"] == approx(observed)
    between = observed**2 / (2 * n)  # w looks at each set around its own mean
    assert biases.var() - between == approx(row["w"], rel=0.05)


def test_intervals_cover_and_the_promise_is_kept():
    """60 data sets without an effect. Who runs as many as three subsamples say is within the margin
    in 80 of 100."""
    def found(rows, *flags):
        effects = tables_of(rows, "--effects", "bias", *flags)[2]
        return effects[effects["target"] == "these tasks"]

    def covers(table):
        return ((table["low"] < 0) & (table["high"] > 0)).mean()

    rng = default_rng(1)
    rows = crossed_rows(60, 2, 20, 100, rng)
    pilot = found(rows[rows["subsample"] <= 3], "--margin", 3.5)
    wanted = dict(zip(pilot["experiment"], pilot["needed"].clip(lower=3)))
    assert covers(pilot) > 0.85 and 3 < np.median([*wanted.values()]) < 15
    final = found(rows[rows["subsample"] <= rows["experiment"].map(wanted)], "--margin", 3.5)
    assert (final["verdict"] == "within the margin").mean() > 0.8
    assert (final["verdict"] == "beyond the margin").mean() < 0.02
    assert covers(found(crossed_rows(60, 1, 5, 100, rng, luck=5))) > 0.78


def test_needed_by_search():
    """Unequal noise, unequal K; .3 of a chi-square."""
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
        row = bias_of(rows, "--margin", margin)
        later = lambda R: u.sum() ** 2 / (u**2 / (R - 1)).sum()
        assert row["df"] == approx(df)
        assert row["needed"] == search(u, df, later, 2, margin / 2) > 2
    single = crossed_rows(1, 2, 1, 200, default_rng(0))
    rows, _, effects = tables_of(single, "--margin", 1)
    u = rows["w"].to_numpy() + 1e4 * 2 / (4 * 200 * 200)
    expected = search(u, 5, lambda R: 2 * R - 2 + 5, 1, 0.5)
    assert one(effects, effect="bias")["needed"] == expected > 3
    assert math.isnan(one(effects, effect="boost")["needed"])
    assert bias_of(single, "--margin", 20)["needed"] == 1


def test_together_only_where_models_share_tasks(run):
    """Two tasks of one model, one of another: "all" was once the mean over that one."""
    rows = bias_rows({"a": [9, -9], "b": [0, 5]})
    rows = pd.concat([rows, bias_rows({"a": [1, 0]}, model="third")])
    out = run(rows, "--effects", "bias").out
    assert "bias of bert" in out and "bias of third" in out
    tasks = csv_of("effects").groupby("model")["tasks"].first()
    assert tasks.to_dict() == {"bert": 2, "third": 1}


def test_one_subsample_is_named_and_left_out(run):
    several = {"a": [1, 2, 4], "b": [0, -1, 2], "c": [1, 1, 0, 1]}
    without = bias_of(bias_rows(several))
    out = run(bias_rows(several | {"lonely": [30]}), "--effects", "bias").out
    effects = csv_of("effects").set_index("target")
    found = effects.loc["these tasks"]
    names = ["estimate", "low", "high", "seen"]
    assert found[names].tolist() == approx(without[names].tolist(), rel=1e-5)
    assert (found["tasks"], found["left_out"], found["subsamples"]) == (3, "lonely", 3)
    assert effects.loc["tasks like these", "tasks"] == 4
    assert "Without lonely" in out.splitlines()[0]


def test_sign_flips_and_their_adjustment():
    rows = crossed_rows(1, 4, 8, 50, default_rng(3), effect=0.05)
    rows, tasks, _ = tables_of(rows)
    bias = tasks.xs("bias", level="effect").reset_index().set_index("task")
    signs = np.array([*itertools.product((-1, 1), repeat=8)])
    for task, mine in rows.groupby("task")["bias"]:
        expected = np.mean(signs @ mine >= mine.sum() - 1e-9)
        assert bias.loc[task, "p"] == approx(expected)
    expected = stats.false_discovery_control(bias["p"])
    assert bias["p_adjusted"].to_numpy() == approx(expected)
    assert tasks.xs("boost", level="effect")["p"].isna().all()
    rng = default_rng(0)
    for _ in range(100):  # sums of shares that rounding would let exceed 1
        assert fit.sign_flip_p(-rng.integers(1, 30, 70)) <= 1


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
        sd_U, sd_V = pm.HalfNormal("sd_U", 1), pm.HalfNormal("sd_V", 1)
        sd_W = pm.HalfNormal("sd_W", 3.5355)
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
        z = pm.Normal("z", shape=J)
        delta = pm.Deterministic("effect", beta[:, None] + tau[:, None] * z)
        s_task = s[:, None] * pm.math.exp(omega[:, None] * pm.Normal("r", shape=J))
        sd = pm.math.sqrt(s_task[model_idx, task] ** 2 + (100 / n) ** 2 / 12)
        pm.Normal("D", delta[model_idx, task], sd, observed=D)
    return model


def assert_same_posterior(ours, plain, names):
    """Mean and quantiles of every component agree within Monte Carlo error."""
    import arviz

    for name in names:
        draws, precision = [], []
        for data in (ours, plain):
            values = data[name].values
            draws.append(values.reshape(-1, *values.shape[2:]))  # chain and draw in one
            precision.append(1 / arviz.ess(data[name])[name].values)
        a, b = draws
        sd = b.std(0)
        error = sd * np.sqrt(sum(precision))
        assert (abs(a.mean(0) - b.mean(0)) < 4 * error).all(), name
        for share in (0.1, 0.9):
            off = abs(np.quantile(a, share, 0) - np.quantile(b, share, 0))
            assert (off <= 0.1 * sd + 4 * error).all(), name


# An effect that varies between tasks, so few that the priors matter too
SMALL = coin_rows(tasks=5, subsamples=3, n=60)
shift = 0.1 * pd.factorize(SMALL["task"])[0] - 0.1
SMALL["acc_test"] = (SMALL["acc_extra"] + shift).clip(0, 1)
COMPILED = {}


@pytest.fixture
def compiled_once(monkeypatch):
    """Of one data set: a model, named by its parameters, is compiled once."""
    import nutpie

    compile_anew = nutpie.compile_pymc_model

    def compiled(model):
        names = str(model.free_RVs)
        if names not in COMPILED:
            COMPILED[names] = compile_anew(model)
        return COMPILED[names]

    monkeypatch.setattr(nutpie, "compile_pymc_model", compiled)


@pytest.mark.parametrize("analysis, plain, names", [
    ("paper", plain_paper, ("mu", "beta", "alpha", "sd_U", "sd_V", "sd_W", "d")),
    ("hierarchical", plain_hierarchical, ("beta", "tau", "s", "omega", "effect"))])
def test_the_posterior_of_a_plain_model(compiled_once, analysis, plain, names):
    import nutpie

    rows, _, _ = tables_of(SMALL)
    posterior, _ = fit.fit(rows, "bias", analysis, 1000)
    expected = nutpie.sample(
        nutpie.compile_pymc_model(plain(rows)), draws=700, tune=400, chains=4, seed=1,
        progress_bar=False, save_warmup=False, target_accept=0.95)
    assert_same_posterior(posterior, expected.posterior, names)


def test_the_reference_posterior_of_a_published_cell():
    """m = 100, n = 500, bias: means and sds of a long run of the model as the paper writes it."""
    rows, _, _ = tables_of(PAPER / "few_shot_m100.csv", "--n", 500)
    _, summary = fit.fit(rows, "bias", "paper", 1000)
    assert set(summary["warning"]) == {""}
    known = {"beta": (-0.008, 0.0012, 0.0115, 0.001),
             "alpha[gpt2]": (-0.566, 0.001, 0.0046, 0.0003),
             "sd_U": (1.14, 0.03, 0.16, 0.02), "sd_V": (0.182, 0.002, 0.0063, 0.0006),
             "sd_W": (0.0365, 0.0015, 0.0067, 0.0007)}
    for name, (mean, near, sd, close) in known.items():
        assert summary.loc[name, "mean"] == approx(mean, abs=near)
        assert summary.loc[name, "sd"] == approx(sd, abs=close)


def test_predictive_effects_are_binomial_means():
    """Fixed parameters: the difference of the shares, the variance of two binomials."""
    import xarray

    def always(name, values):
        return ("chain", "draw", name), np.tile(values, (2, 20_000, 1))

    c, d, alpha, n = np.array([0.2, -0.4, 1.0]), [0.5, -0.3], 0.7, 50
    parameters = {"c": always("unit", c), "d": always("task", d), "alpha": always("later", [alpha])}
    data = {"total": np.array([[n, n, n], [n, n, 0]]), "task_idx": np.array([0, 0, 1])}
    posterior = fit.predict_effects(
        xarray.Dataset(parameters), data, ["a", "b"], default_rng(0))
    effects = posterior["effect"].values.reshape(-1, 2, 2)
    for i, j, units in ((0, 0, [0, 1]), (1, 0, [0, 1]), (0, 1, [2])):
        level = c[units] + i * alpha
        low, high = special.expit(level - d[j] / 2), special.expit(level + d[j] / 2)
        assert effects[:, i, j].mean() == approx(100 * np.mean(high - low), abs=0.15)
        variance = 1e4 * (low * (1 - low) + high * (1 - high)).mean() / (n * len(units))
        assert effects[:, i, j].var() == approx(variance, rel=0.04)
    assert np.isnan(effects[:, 1, 1]).all()  # a model that lacks the task
    expected = (effects[:, 0].mean() + effects[:, 1, 0].mean()) / 2
    assert posterior["difference"].values[..., 0].mean() == approx(expected, abs=1e-6)


@pytest.mark.parametrize("column, value", [
    ("r_hat", math.nan), ("r_hat", 1.02), ("ess_bulk", 399), ("ess_tail", math.nan)])
def test_the_gate_of_convergence(column, value):
    good = pd.DataFrame({"r_hat": 1.001, "ess_bulk": 900.0, "ess_tail": 800.0}, index=range(3))
    assert fit.warning_of(good, 0) == "" and "divergences: 1" in fit.warning_of(good, 1)
    for place in range(3):  # a missing value counts wherever it stands
        bad = good.copy()
        bad.loc[place, column] = value
        assert "not converged" in fit.warning_of(bad, 0)


@pytest.mark.parametrize("name, law", [
    ("mu", stats.norm), ("beta", stats.norm), ("alpha", stats.norm(0, 5)),
    ("sd_U", stats.halfnorm), ("sd_V", stats.halfnorm), ("sd_W", stats.halfnorm(0, 3.5355))])
def test_the_priors_are_the_papers(name, law):
    """Section 6."""
    import pymc as pm

    rows, _, _ = tables_of(coin_rows(tasks=5))
    prior = fit.paper_model(*fit.paper_counts(rows, "bias"))[name]
    for value in (0.3, 4.0):
        found = pm.logp(prior, np.full([1] * prior.ndim, value)).eval()
        assert np.ravel(found) == approx(law.logpdf(value))


def test_what_the_samplers_add(run, compiled_once):
    """Few draws: exit status 3, said in every row; all files, whose columns the manual names."""
    found = run(SMALL, "--draws", 40, "--effects", "bias")
    out = found.out
    assert found.end == 3 and "did not converge: 2" in out and out.count(": not converged") == 2
    for path in Path("fits/results").glob("*.csv"):
        block = re.search(rf"    {path.name} +(.*?)(?=\n    \w+\.csv|\n\n)", fit.__doc__, re.S)[1]
        for column in pd.read_csv(path).columns:
            known = re.search(rf"\b{column}\b", block) or column.endswith(("_low", "_high"))
            assert known, (path, column)
    effects = csv_of("effects").query("target == 'paper'")
    assert sorted(effects["model"]) == ["a", "all", "b"]
    tasks = csv_of("tasks").query("model != 'all'")
    assert len(tasks) == 10
    assert tasks[["paper", "hierarchical", "paper_low"]].notna().all(axis=None)
    sd = (tasks["hierarchical_high"] - tasks["hierarchical_low"]) / (2 * stats.norm.ppf(0.945))
    law = stats.norm(tasks["hierarchical"], sd)  # nearly
    assert np.allclose(tasks["p_beyond"], 1 - law.cdf(1) + law.cdf(-1), atol=0.15)
    posterior = csv_of("posterior")
    assert posterior["warning"].str.contains("not converged").all()
    names = set(posterior["parameter"])
    assert {"beta", "sd_W", "alpha[b]", "d[task00]", "difference[all]", "tau[a]",
            "new_task[b]"} <= names
    assert not any("effect" in name or "__" in name for name in names)
    assert "hierarchical: not converged" in page()


def test_too_little_for_the_samplers(run):
    found = run(bias_rows({"a": [1, 2]}), "--draws", 40, "--effects", "bias")
    assert found.end is None and found.out.count("left out, it needs 5 tasks") == 2


def test_ctrl_c_leaves_the_page():
    path = path_of(coin_rows(tasks=5))
    command = [sys.executable, "-u", ROOT / "fit_model.py", path, "--draws", "2000000"]
    process = Popen(command, stdout=PIPE, stderr=PIPE, text=True)
    for line in process.stdout:
        if line.startswith("page:"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1 and "Traceback" not in err
    assert err.strip().endswith("stopped: what stands in fits/results stays")
    names = {file.name for file in Path("fits/results").iterdir()}
    assert names == {"report.html", "effects.csv", "tasks.csv", "effects.png"}


# What a person gets --------------------


def told(rows, *flags):
    """The only sentence on a bias."""
    _, _, effects = tables_of(rows, "--effects", "bias", *flags)
    (line,) = fit.answers_of(effects)
    assert "nan" not in fit.cards([line])
    return fit.sentence(line)


@pytest.mark.parametrize("biases, margin, start", [
    ({"a": [0, 1, -1] * 9, "b": [0, 1] * 9}, 1, "No: within ±1. few-shot"),
    ({"a": [7, 8, 9]}, 1, "Yes: beyond ±1. few-shot"),
    ({"a": [-7, -8, -9]}, 1, "No: seen texts even score worse, beyond ±1."),
    ({"a": [-3, 0, 4]}, 30, "No: within ±30."),
    # half-widths of .527 and .658, below and above .55 of the margin
    ({"a": [-0.6, 1.8] * 8}, 1, "Near the margin of ±1"),
    ({"a": [-0.9, 2.1] * 8}, 1, "Too early to tell: neither within nor beyond ±1."),
    ({"a": [3]}, 1, "Too early to tell: no interval. few-shot, m = 8, n = 1000: bias of bert +3.00 "
                    "points for 1 task. One subsample")])
def test_answers(biases, margin, start):
    text = told(bias_rows(biases, n=1000, seconds=9), "--margin", margin)
    assert text.startswith(start) and "nan" not in text
    assert ("--subsamples" in text) == start.startswith("Too early")


def test_how_much_more_to_run():
    lonely = told(bias_rows({"a": [3]}, seconds=9))
    assert "--subsamples 5 (about 1 minute of one process)" in lonely
    rows = bias_rows({"a": [-3, 0, 4], "b": [-4, 2, 1, 0]})
    text = told(rows)  # of rows that nobody here ran there is no command
    R = int(bias_of(rows)["needed"])
    assert R > 20 and text.endswith(f"{R} subsamples of each task, in all, would decide.")
    expected = f"--subsamples {R} (about {R - 3} minutes of one process)"  # two tasks
    assert expected in told(rows.assign(seconds=30))

    # Two models, settings of 30 s and 330 s: once the time of the first alone was said
    rows = bias_rows({"a": [-3, 0, 4]}, seconds=30)
    rows = pd.concat([rows, rows.assign(m=16, seconds=330)])
    rows = pd.concat([rows, rows.assign(model="other")])
    R = int(one(tables_of(rows)[2], effect="bias", m=0, model="all")["needed"])
    assert f"--subsamples {R} (about {(R - 3) * 12} minutes of one process)" in told(rows)


def test_what_limits_an_answer(run):
    """A boost within the margin; macro-F1 on unseen texts 5 points above 1 / K, if it is there."""
    biases = {"a": [0, 0, 1], "b": [0, 0, -1]}
    out = run(bias_rows(biases, base=0.5)).out
    assert "the boost too is within the margin" in out
    rows = bias_rows(biases)
    for f1, cases in (({"a": 0.53, "b": 0.9}, "1 of 2 cases (a)"), ({"a": 0.56, "b": 0.56}, ""),
                      ({}, "")):
        scores = {"f1_base": 0.5, "f1_extra": rows["task"].map(f1), "f1_test": 0.8}
        out = run(rows.assign(**scores)).out
        assert ("not 5 points above guessing" in out) == bool(cases) and cases in out
        assert ('class="warning"' in page()) == bool(cases)


def test_several_settings(run):
    """Each has a figure too, but for one of a single task, whose line says the same."""
    def figures():
        return {path.name for path in Path("fits/results").glob("*.png")}

    rows = pd.concat([bias_rows({"a": [3, 4], "b": [3, 3]}, m=m) for m in (6, 8)])
    alone = bias_rows({"a": [9]}, m=4)  # has no interval
    first = run(pd.concat([rows, alone])).out.splitlines()[0]
    assert "mean of 2 settings: bias of bert +3.25" in first
    assert "Alone, 2 of 2 settings exclude 0 (by chance about 0.2)." in first
    assert figures() == {"effects.png", "setting-2.png", "setting-3.png"}
    run(alone)
    assert figures() == {"effects.png"}


def test_other_metrics(run):
    table = coin_rows().assign(f1_base=0.5, f1_extra=0.61234, f1_test=0.62234)
    for arm, value in (("base", 1.0), ("extra", 0.9), ("test", 0.95)):
        table[f"nll_{arm}"] = value + 0.01 * table["subsample"] * (arm == "test")
    assert run(table, "--metric", "f1", "--draws", 9).end is None  # samplers take accuracies alone
    effects = csv_of("effects", "results.f1").query("effect == 'bias'")
    assert set(effects["metric"]) == {"f1"} and set(effects["margin"]) == {1}
    assert effects["estimate"].to_numpy() == approx(1)
    out = run(table, "--metric", "nll").out
    row = one(csv_of("effects", "results.nll"), effect="bias", model="a")
    assert row["estimate"] == approx(0.075) and math.isnan(row["margin"])
    assert out.startswith("The interval excludes 0.")
    assert "nats (lower is better) for 3 tasks" in out
    out = run(table, "--metric", "nll", "--margin", 0.001).out
    assert out.startswith("No: seen texts even score worse")  # a higher nll
    assert "0 columns 'bleu_base'" in run(table, "--metric", "bleu").end


@pytest.mark.parametrize("rows, sentences, lines", [
    (coin_rows(tasks=1, subsamples=1, models=("a",)), 1, [0, 2, 2, 0]),
    (coin_rows(tasks=45), 1, [0, 7, 1 + 2, 0]),
    (coin_rows(acc_base=1.0, acc_extra=1.0, acc_test=1.0), 2, [0, 4, 7, 0]),
    (coin_rows().query("(model == 'a') == (task == 'task00')"), 2, [3, 4, 4, 0]),
    (pd.concat([coin_rows(tasks=2, models=("a",), experiment=f"e{k}") for k in range(40)]), 40,
     [1 + 40, 1 + 40, 1 + 31, 0])])
def test_small_and_large_data(run, rows, sentences, lines):
    """Lines of the tables of answers, settings, what was run: of many tasks one a model, of still
    more the first and last."""
    found = run(rows)
    text = re.sub('base64,[^"]*', "", page())
    assert found.end is None and not found.err and "nan" not in text + found.out
    assert not re.search(r"\b1 (tasks|subsamples)\b", found.out)
    assert found.out.count("\n") == sentences + 1 and text.count("<img") == 1
    assert [part.count("<tr") for part in text.split("<h2>")] == lines


def test_the_page_is_one_file_with_names_escaped(run):
    """Tables of one run only."""
    hostile = 'US$_<b>&"x"/../../я' + "ы" * 45
    rows = coin_rows(tasks=5).assign(experiment=hostile, versions="code <1>")
    folder = Path("fits/results")
    folder.mkdir(parents=True)
    (folder / "posterior.csv").write_text("of an earlier run")
    (folder / "notes.txt").write_text("mine")
    assert run(rows).end is None
    text = page()
    assert "<b>&" not in text and "US$_&lt;b&gt;&amp;" in text and "code &lt;1&gt;" in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert text.count("data:image/png;base64,") == 1
    names = {path.name for path in folder.iterdir()}
    assert names == {"effects.csv", "tasks.csv", "report.html", "notes.txt", "effects.png"}


def test_a_file_that_cannot_be_written_leaves_the_old_page(run):
    run(coin_rows())
    folder = Path("fits/results")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (folder / "tasks.csv.new").mkdir()  # in the way of a file
    with pytest.raises(OSError):
        run(coin_rows(), "--margin", 3)
    assert {path: path.read_bytes() for path in before} == before


def test_a_page_says_only_what_is_there(run):
    run(bias_rows({"a": [3]}))
    assert "within the brackets" not in page()
    own = {f"own_{arm}": value for arm, value in zip(ARMS, (0.6, 0.66234, 2.16234))}
    rows = bias_rows({"a": [3, 4]}, **own)
    run(rows)
    assert "within the brackets" in page() and "Black tick" in page()
    run(rows, "--metric", "own")
    assert "Black tick" not in page("results.own") and "0.6623" in page("results.own")
    assert csv_of("effects", "results.own")["estimate"].max() == approx(1.5)
    run(bias_rows({"a": [-0.6, 1.8] * 8}, n=1000), "--effects", "bias")
    assert "Near the margin" in page() and "<th>needed</th>" not in page()


def test_what_was_run_and_what_is_needed(run):
    """50 texts of six classes are 48; a verdict that stands needs no more subsamples."""
    rows = coin_rows(models=("bert-tiny",), m=50, num_classes=6, versions="torch 9")
    run(rows)
    settings, _, runs = page().partition("What was run")
    assert "<th>needed" in settings
    assert re.findall("<td>(.*?)</td>", runs)[:10] == [
        "few-shot", "50", "48", "40", "bert-tiny (a demonstration)", "task00", "6", "plain", "4",
        "torch 9"]
    run(rows, "--margin", 30)
    assert "<th>needed" not in page()


def test_rounding_is_half_away_from_0():
    """Whatever the last bits of a mean are."""
    values = np.array([-1.1, -0.95, -1.025])
    for value in (-1.025, values.mean(), values.sum() / 3, np.mean([-2.05, 0])):
        assert fit.signed(value, "acc") == "-1.03"
    assert fit.signed(1.005, "acc") == "+1.01" and fit.signed(-0.004, "f1") == "+0.00"


# Reading --------------------


def loaded(*words):
    return fit.load_rows(fit.parse_args([*map(str, words)]))


def test_natural_variations_are_accepted(capsys):
    table = coin_rows(n=70)
    plain = loaded(path_of(table)).drop(columns="where")
    text = Path("results.csv").read_text()
    variations = {
        "BOM": "\ufeff" + text, "CRLF": text.replace("\n", "\r\n"), "no newline": text.rstrip("\n"),
        "blank lines": text.replace("\nfew", "\n\nfew", 3) + "\n,,,\n\n",
        "m = 10.0": text.replace(",10,70,", ",10.0,70,"),
        "four decimals": table.round(4).to_csv(index=False),
        "torn": text + "few-shot,a,task09,10,70,1,2,0",
        "torn within": text.replace("\nfew", "\nfew-shot,a,task0\nfew", 1)}
    other = Path("other")
    other.mkdir()
    for name, changed in variations.items():
        (other / "results.csv").write_bytes(changed.encode())
        found = loaded(other).drop(columns="where")
        pd.testing.assert_frame_equal(found, plain, obj=name)
        torn = "left out, for it was cut short" in capsys.readouterr().out
        assert torn == name.startswith("torn"), name
    (other / "results.csv").write_text(text)
    (other / "results_backup.csv").write_text(text.replace(",1,2,", ",9,2,"))  # not of the run
    assert len(loaded(".", other)) == 24
    assert "rows given more than once and used once: 24" in capsys.readouterr().out
    table["subsample"] += 50
    table[:12].to_csv(other / "results.2-of-2.csv", index=False)
    assert len(loaded(other)) == 36
    assert len(loaded(other, "--models", "b", "--tasks", "task01", "task02")) == 8


def test_one_run_in_old_and_new_columns():
    """The fuller row counts, whatever the order of files; differing numbers are refused."""
    new, old = Path("new.csv"), Path("old.csv")
    rows = pd.read_csv(TINY).query("subsample <= 6")
    rows.to_csv(new, index=False)
    rows = rows[[name for name in rows if "_on_extra" not in name and name != "discordant"]]
    rows.to_csv(old, index=False)
    expected = tables_of(new)[2].drop(columns="cells")
    assert set(expected["arms"]) == {"crossed"}
    for paths in ((old, new), (new, old)):
        pd.testing.assert_frame_equal(tables_of(*paths)[2].drop(columns="cells"), expected)
    rows.loc[3, "acc_test"] += 0.005
    rows.to_csv(old, index=False)
    with pytest.raises(SystemExit, match=r"row 4 .* differ in acc_test \(0.\d+ and 0.\d+\)"):
        tables_of(new, old)


def test_some_rows_of_old_make_a_cell_plain(run):
    table = crossed_rows(1, 2, 3, 50, default_rng(0))
    partly = table.copy()
    partly.loc[2, "acc_base_on_extra"] = math.nan
    out = run(pd.concat([partly, table.assign(m=20)])).out
    arms = csv_of("effects").dropna(subset="m").groupby("m")["arms"].unique()
    assert arms.map(list).to_dict() == {8: ["plain"], 20: ["crossed"]}
    assert "m = 8, n = 50: some rows lack acc_*_on_extra" in out
    crossed, plain, *_ = re.findall("<p.*?</p>", page().partition("For a methods section")[2])
    for text, *words in (
        (plain, "m = 8 labelled", "on the first set", "the variance between its subsamples"),
        (crossed, "m = 20 labelled", "on both sets", "the noise of drawing its texts"),
    ):
        assert all(part in text for part in words)


def changed(name, *values):
    """The text of 24 rows, the last with these values."""
    rows = coin_rows().astype(object)
    rows.loc[24 - len(values) :, name] = values
    return rows.to_csv(index=False)


TEXT = coin_rows().to_csv(index=False)
BAD = [  # a file, what is said of it
    ("", "cannot be read as a CSV file"),
    (TEXT + 'x,"y\n', "cannot be read as a CSV file"),
    (TEXT + "a" + ",1" * 15, "Expected 11 fields in line 26, saw 16"),
    (TEXT.replace(",", ";"), "separated by commas: experiment;model"),
    (TEXT.replace("acc_extra", "x"), "0 columns 'acc_extra', not one"),
    (changed("x", 1).replace("x\n", "num_classes\n", 1), "2 columns 'num_classes', not one"),
    (TEXT.partition("\n")[0], "has no rows"),
    (changed("acc_test", 0.123), "acc_test is 0.123, not a whole number"),
    (changed("acc_test", 1.025), "acc_test is 1.025, not a number from 0 to 1"),
    (changed("acc_test", -0.025), "acc_test is -0.025, not a number from 0 to 1"),
    (changed("num_classes", "inf"), "num_classes is inf, not a number"),
    (changed("m", 8.5), "m is 8.5, not a whole number from 1"),
    (changed("m", 0), "m is 0, not a whole number from 1"),
    (changed("experiment", ""), "data row 24: experiment is nan, not a name"),
    (TEXT + changed("acc_test", 0.1).splitlines()[-1],
     "data row 24 and results.csv, data row 25 agree in experiment, model, task"),
    (changed("data", *"x" * 24), "differ in task"),
    (changed("data", *"xy" * 12), "differ in data (x and y)"),
    (changed("split", *"x" * 12, *"y" * 12), "differ in split (x and y)"),
    (changed("recipe", *"x" * 11, *"y" * 13), "differ in recipe (x and y)")]


@pytest.mark.parametrize("text, message", BAD, ids=[message for _, message in BAD])
def test_bad_input_ends_in_one_line(run, text, message):
    path = Path("results.csv")
    path.write_text(text)
    end = run(path).end
    assert message in end and end.startswith("error: ")
    assert not Path("fits").exists()


@pytest.mark.parametrize("flags, message", [
    (["nowhere.csv"], "cannot be read"), (["."], "holds no results.csv"),
    (["r.csv", "--models", "c"], "no rows of {'c'}, only of {"),
    (["--margin", 0], "--margin at 0.001"), (["--margin", "nan"], "--margin at 0.001"),
    (["--draws", -5], "--draws begins at 0")])
def test_bad_arguments(said, flags, message):
    coin_rows().to_csv("r.csv", index=False)
    found = said(fit.main, *flags)
    assert message in f"{found.end} {found.err}" and not Path("fits").exists()
