"""fit_model.py against independent oracles: the paper's Table 1, brute force, scipy, arviz, closed forms, a grid, another model."""

import csv
import itertools
import os
import shutil
import subprocess
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, special, stats

from conftest import ROOT, load_script

PAPER = Path(os.environ.get("PAPER_DATA", ROOT.parent / "shared" / "paper"))
needs_paper = pytest.mark.skipif(not PAPER.exists(), reason=f"the published accuracies are not in {PAPER} (set PAPER_DATA to their folder)")
TABLE_1A = {  # boost, bias in percent by (model, n), as printed in the paper
    ("bert", 50): ("4.1", "0.19"), ("bert", 100): ("3.9", "0.18"), ("bert", 200): ("3.9", "-0.39"), ("bert", 500): ("3.5", "0.48"),
    ("gpt2", 50): ("3.8", "0.18"), ("gpt2", 100): ("4.1", "0.11"), ("gpt2", 200): ("4.4", "-0.05"), ("gpt2", 500): ("4.6", "-0.08")}


@pytest.fixture(scope="session")
def fit_model():
    return load_script("fit_model")


@pytest.fixture
def run(fit_model, tmp_path, capsys, monkeypatch):
    """run(flags...) -> (exit status, stdout, stderr) of main() in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        status = 0
        try:
            fit_model.main(list(map(str, flags)))
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def made_rows(tasks=3, subsamples=4, models=("a", "b"), n=40, seed=0, **changes):
    """Rows in our columns, from coins."""
    rng = np.random.default_rng(seed)
    rows = []
    for model, j, k in itertools.product(models, range(tasks), range(1, subsamples + 1)):
        counts = rng.binomial(n, [0.5 + 0.05 * j, 0.55 + 0.05 * j, 0.55 + 0.05 * j])
        row = {"experiment": "few-shot", "model": model, "task": f"task{j}", "m": 10, "n": n, "subsample": k, "num_classes": 2, "majority": 0.5}
        rows.append(row | dict(zip(("acc_base", "acc_extra", "acc_test"), counts / n)) | changes)
    return rows


def round_twice(value, digits):
    """Half up to three decimals, then to the table's: 0.1848 becomes 0.185 and then 0.19, as printed in the paper."""
    thrice = Decimal(str(value)).quantize(Decimal("0.001"), ROUND_HALF_UP)
    return str(thrice.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


# The published numbers ------------------------------------------------------------------------------------------


@needs_paper
def test_table_1a_is_the_papers(run):
    status, out, _ = run(PAPER / "few_shot_m50.csv", "--draws", 0, "--no-figures")
    assert status == 0
    for row in rows_of("fits/means.csv"):
        boost, bias = TABLE_1A[row["model"], int(row["n"])]
        exact = {name: round(100 * float(row[f"{name}_mean"]), 6) for name in ("boost", "bias")}
        assert round_twice(exact["boost"], 1) == boost and round_twice(exact["bias"], 2) == bias
        assert f"{exact['boost']:+.3f}" in out and f"{exact['bias']:+.3f}" in out
        assert row["tasks"] == "25"
    assert len(rows_of("fits/means.csv")) == 8


@needs_paper
def test_means_equal_a_direct_computation_from_counts(fit_model):
    """The mean of means over 25 equal groups is the mean of all rows; the standard error is across the groups."""
    raw = rows_of(PAPER / "few_shot_m50.csv")
    rows = fit_model.means_table(fit_model.build_cells(fit_model.read_rows([PAPER / "few_shot_m50.csv"])))
    for row in rows:
        mine = [r for r in raw if r["model"] == row["model"] and int(r["n"]) == row["n"]]
        changes = {}
        for r in mine:
            counts = [round(float(r[f"acc_{arm}"]) * row["n"]) for arm in ("extra", "test")]
            changes.setdefault(r["task"], []).append((counts[1] - counts[0]) / row["n"])
        means = [np.mean(values) for values in changes.values()]
        assert row["bias_mean"] == pytest.approx(np.mean(means), abs=1e-12)
        assert row["bias_se"] == pytest.approx(np.std(means, ddof=1) / 5)
        assert row["bias_median"] == pytest.approx(np.median(means))


@needs_paper
def test_zero_shot_signs_and_means_are_exact(run):
    status, out, _ = run(PAPER / "zero_shot_m100_n100.csv", "--draws", 0, "--no-figures")
    (row,), signs = rows_of("fits/means.csv"), [int(row["bias_sign"]) for row in rows_of("fits/task_means.csv")]
    assert status == 0 and (signs.count(1), signs.count(0), signs.count(-1)) == (12, 1, 12)  # the paper counts the zero as negative
    assert round_twice(round(100 * float(row["boost_mean"]), 6), 2) == "5.25" and round_twice(round(100 * float(row["bias_mean"]), 6), 2) == "-0.04"
    assert "12 positive, 1 zero, 12 negative" in out and not Path("fits/correlations.csv").exists()


@needs_paper
def test_flagged_tasks_and_reported_differences_of_test_texts(run):
    _, out, _ = run(PAPER / "few_shot_m50.csv", "--draws", 0, "--no-figures")
    flagged = {row["task"] for row in rows_of("fits/tasks.csv") if row["flag_3"] == "1"}
    assert flagged == {"amazon_counterfactual_en", "emo", "financial_phrasebank", "mtop_domain"}
    assert {row["model"] for row in rows_of("fits/tasks.csv") if row["flag_3"] == "1"} == {"bert"}  # as the paper reports
    assert out.count("test texts differ") == 1 and "craigslist_bargains" in out
    assert min(float(row["p_bh"]) for row in rows_of("fits/tasks.csv")) > 0.05  # as the paper reports


@needs_paper
def test_the_published_layout_gives_the_numbers_of_the_flat_file(fit_model, tmp_path):
    link = tmp_path / "few-shot"
    link.mkdir()
    (link / "m50").symlink_to(PAPER / "published_layout" / "m50")
    (laid,) = fit_model.build_cells(fit_model.read_rows([link]))
    every = fit_model.build_cells(fit_model.read_rows([PAPER / "few_shot_m50.csv"]))
    (flat,) = [cell for cell in every if cell.n == laid.n]
    assert laid.experiment == "few-shot" and laid.models == flat.models and laid.tasks == flat.tasks
    assert np.array_equal(laid.counts, flat.counts) and np.array_equal(laid.majority, flat.majority) and laid.title == flat.title


# Tests, intervals, diagnostics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_sign_flip_p_is_the_share_of_all_sign_patterns(fit_model, seed):
    rng = np.random.default_rng(seed)
    changes = rng.integers(-5, 6, rng.integers(1, 11))
    sums = [np.dot(signs, changes) for signs in itertools.product((-1, 1), repeat=len(changes))]
    assert fit_model.sign_flip_p(changes) == pytest.approx(np.mean(np.array(sums) >= changes.sum()), abs=1e-12)


def test_sign_flip_p_of_a_hand_made_case(fit_model):
    assert fit_model.sign_flip_p(np.array([3, 1])) == 0.25  # only ++ of four reaches 4
    assert fit_model.sign_flip_p(np.array([0, 0])) == 1 and fit_model.sign_flip_p(np.array([-2])) == 1


def test_adjusted_p_equal_scipys(fit_model):
    p = np.random.default_rng(0).random(25) ** 2
    assert fit_model.adjust(p) == pytest.approx(stats.false_discovery_control(p))


def test_hdi_of_known_densities(fit_model):
    """Exponential: from 0 to -log(.11). And the number of draws inside is ceil(.89 S) exactly."""
    q = (np.arange(20_000) + 0.5) / 20_000
    low, high = fit_model.hdi(-np.log(1 - q))
    assert low == pytest.approx(0, abs=1e-3) and high == pytest.approx(-np.log(0.11), abs=2e-3)
    low, high = fit_model.hdi(stats.norm.ppf(q))
    assert (low, high) == pytest.approx((-1.598, 1.598), abs=0.02)
    draws = np.random.default_rng(0).normal(size=37)
    low, high = fit_model.hdi(draws)
    assert ((draws >= low) & (draws <= high)).sum() == 33  # ceil(.89 * 37)


@pytest.mark.parametrize("chains, draws", [(4, 200), (4, 201), (2, 60), (3, 37)])
def test_convergence_equals_arvizs(fit_model, chains, draws):
    import arviz

    rng = np.random.default_rng(draws)
    x = rng.normal(size=(chains, draws, 8))
    for t in range(1, draws):  # from antithetic to slow, and one whose chains disagree
        x[:, t] += np.linspace(-0.8, 0.97, 8) * x[:, t - 1]
    x[0, :, 3] += 2
    x[..., 4] = np.round(x[..., 4])  # ties
    r_hat, ess = fit_model.convergence(x)
    for k in range(8):
        assert r_hat[k] == pytest.approx(float(arviz.rhat(x[..., k])), rel=1e-9)
        assert ess[k] == pytest.approx(float(arviz.ess(x[..., k])), rel=1e-9)


def test_spearman_equals_scipys(fit_model):
    a, b = np.random.default_rng(0).integers(0, 6, (2, 30))
    assert fit_model.spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert np.isnan(fit_model.spearman(a, np.ones(30)))


def test_t_interval_equals_scipys(fit_model):
    values = np.random.default_rng(0).normal(size=12)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.89)
    assert fit_model.t_interval(values)[2:] == pytest.approx((expected.low, expected.high))


def test_losses_are_paired(fit_model, tmp_path):
    """Two experiments at the same subsamples, the second's losses lower by 20 %."""
    first = [row | {"loss_extra": 2 + 0.1 * k, "loss_test": 3} for k, row in enumerate(made_rows(tasks=1, models=("a",)))]
    second = [row | {"experiment": "overtrained", "loss_extra": 0.8 * row["loss_extra"], "loss_test": 2.4} for row in first]
    rows = fit_model.read_rows([write_rows(tmp_path / "first.csv", first), write_rows(tmp_path / "second.csv", second)])
    (row,) = fit_model.losses_table(rows)
    assert (row["first"], row["second"], row["subsamples"]) == ("few-shot", "overtrained", 4)
    assert row["ratio_extra"] == pytest.approx(0.8) and row["ratio_test"] == pytest.approx(0.8) and row["lower"] == 1


def test_seeds_of_a_subsample_are_added_and_unequal_subsamples_reported(fit_model, run, tmp_path):
    rows = made_rows(tasks=2)
    doubled = [row | {"seed": seed} for row in rows for seed in (0, 1)]
    (cell,) = fit_model.build_cells(fit_model.read_rows([write_rows(tmp_path / "seeds.csv", doubled)]))
    (single,) = fit_model.build_cells(fit_model.read_rows([write_rows(tmp_path / "one.csv", rows)]))
    assert np.array_equal(cell.counts, 2 * single.counts) and np.array_equal(cell.total, 2 * single.total)
    assert np.allclose(fit_model.points(cell, "bias"), fit_model.points(single, "bias"))
    status, out, _ = run(write_rows(tmp_path / "fewer.csv", rows[:-2]), "--draws", 0, "--no-figures")
    assert status == 0 and "2 to 4 per model and task (unequal)" in out


# The models against other ways of computing them --------------------------------------------------------------------


def settings(**changes):
    from types import SimpleNamespace

    return SimpleNamespace(**{"draws": 1000, "tune": 500, "chains": 4, "cores": 2, "seed": 1, "priors": "paper"} | changes)


def plain_model(cell):
    """The paper's model as it writes it, with a binomial likelihood and everything non-centred."""
    import pymc as pm
    import pytensor.tensor as pt

    jk, j = len(cell.task_idx), len(cell.tasks)
    with pm.Model() as model:
        mu, beta = pm.Normal("mu", 0, 1), pm.Normal("beta", 0, 1)
        alpha = pt.concatenate([pt.zeros(1), pm.Normal("alpha", 0, 5, shape=len(cell.models) - 1)])
        sd_u, sd_v, sd_w = pm.HalfNormal("sd_U", 1), pm.HalfNormal("sd_V", 1), pm.HalfNormal("sd_W", 3.5355)
        u, v = sd_u * pm.Normal("u", shape=j), sd_v * pm.Normal("v", shape=jk)
        w = sd_w * pm.Normal("w", shape=(j, 2))
        for i in range(len(cell.models)):
            for arm in (0, 1):
                eta = mu + alpha[i] + u[cell.task_idx] + v + w[cell.task_idx, arm] + beta * arm
                pm.Binomial(f"y{i}{arm}", cell.total[i], logit_p=eta, observed=cell.counts[i, 1 + arm])
    return model


def test_the_papers_model_in_our_variables_has_the_posterior_of_the_plain_one(fit_model):
    """Small data, so that the priors matter too; the plain model mixes badly and needs a long run."""
    fit_model.import_pymc()
    import nutpie

    cell, _ = fit_model.simulate_cell(np.random.default_rng(3), 6, 2, 3, 60, boost=3, bias=2)
    ours = fit_model.fit(cell, "bias", "paper", True, settings(draws=3000), {})
    assert ours.worst <= 1.01 and ours.least >= 400 and ours.divergences < 10  # of 12,000 draws
    plain = nutpie.sample(nutpie.compile_pymc_model(plain_model(cell)), draws=5000, tune=1500, chains=4, cores=2, seed=1, progress_bar=False,
                          save_warmup=False, target_accept=0.95).posterior
    for name in ("mu", "beta", "alpha", "sd_U", "sd_V", "sd_W"):
        a, b = np.ravel(ours.draws[name]), np.ravel(plain[name].values)
        sd = b.std()
        error = sd * np.sqrt(1 / ours.ess[name].min() + 1 / fit_model.convergence(np.atleast_3d(plain[name].values))[1].min())
        assert abs(a.mean() - b.mean()) < 4 * error + 1e-3, name
        assert np.quantile(a, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(b, [0.1, 0.5, 0.9]), abs=0.12 * sd + 5 * error), name


def test_our_variables_have_the_prior_of_the_plain_ones():
    """Covariances of logit p given the spreads: sd_U^2 for a task, + sd_V^2 for a unit, + sd_W^2 for an arm of a task."""
    u, v, w = 0.7, 0.4, 1.3
    for same_unit, same_arm in itertools.product((0, 1), (0, 1)):  # two logits of one task
        plain = u**2 + same_unit * v**2 + same_arm * w**2
        sign = 1 if same_arm else -1  # (l - 1/2)(l' - 1/2) = +-1/4
        ours = (u**2 + w**2 / 2) + same_unit * v**2 + sign / 4 * 2 * w**2
        assert plain == pytest.approx(ours)


def test_the_likelihood_of_the_papers_model_is_the_binomial_one(fit_model):
    """log p(data | c, alpha, d) of our summed form differs from the sum of binomial terms by a constant only."""
    cell, _ = fit_model.simulate_cell(np.random.default_rng(0), 5, 2, 4, 50, boost=3, bias=2)
    data, differences = fit_model.paper_data(cell, "bias"), []
    model = fit_model.paper_model(data, True, "paper", True)
    potential = model.compile_fn(model.potentiallogp, inputs=model.value_vars, mode="FAST_COMPILE", on_unused_input="ignore")
    for seed in range(3):
        rng = np.random.default_rng(seed)
        point = {v.name: rng.normal(size=np.shape(value)) for v, value in zip(model.value_vars, model.initial_point().values())}
        sd_d, known = np.sqrt(2) * np.exp(point["sd_W_log__"]), data["known"]
        d = (1 - known) * point["beta"] + sd_d ** (1 - known) * point["d_raw"]
        alpha, total = np.array([0, *point["alpha"]]), 0
        for i, arm in itertools.product(range(2), (0, 1)):
            share = special.expit(point["c"] + alpha[i] + (arm - 0.5) * d[cell.task_idx])
            total += stats.binom.logpmf(cell.counts[i, 1 + arm], cell.total[i], share).sum()
        differences.append(float(potential(point)) - total)
    assert np.ptp(differences) < 1e-8 * abs(differences[0])


def test_a_task_that_one_model_lacks_does_not_make_the_cell_small(fit_model):
    """How a cell is sampled depends on its smallest group; a missing one is no group, and its unit still has data."""
    cell, _ = fit_model.simulate_cell(np.random.default_rng(5), 12, 2, 11, 30, boost=3, bias=2)
    assert fit_model.fewest(cell) == 11
    gone = cell.task_idx == 3
    cell.counts[1][:, gone], cell.total[1, gone] = 0, 0
    assert fit_model.fewest(cell) == 11
    data = fit_model.paper_data(cell, "bias")
    assert np.isfinite(data["known"]).all()
    assert np.isnan(fit_model.task_means(fit_model.points(cell, "bias"), cell)[1, 3])


def test_units_are_redrawn_from_their_exact_conditional(fit_model):
    """By quadrature: Binomial counts of two models and two arms times Normal(a_j, sd_V); one unit is of one model alone."""
    cell, _ = fit_model.simulate_cell(np.random.default_rng(5), 2, 2, 2, 30, boost=3, bias=2)
    cell.counts[1, :, 3], cell.total[1, 3] = 0, 0
    cell.counts[0, 1:, 0] = 30  # all correct: far from Normal
    data, size = fit_model.paper_data(cell, "bias"), (4, 3000)
    draws = {name: np.full(size, value) for name, value in (("mu", 0.2), ("beta", 0.3), ("sd_V", 0.9), ("sd_W", 0.5))}
    draws |= {"alpha": np.full((*size, 1), -1.5), "a": np.tile([0.4, -0.7], (*size, 1)), "d": np.tile([1.2, -0.4], (*size, 1))}
    draws["c"] = np.full((*size, 4), 2.0)  # far off: what is left of it would show
    for seed in range(4):
        before = draws["c"].copy()
        fit_model.redraw_units(draws, data, seed, 2)
    assert (draws["c"] != before).mean() > 0.9
    x = np.linspace(-7, 9, 4001)
    for r, j in enumerate(cell.task_idx):
        density = stats.norm.logpdf(x, (0.4, -0.7)[j], 0.9)
        for i, arm in itertools.product(range(2), (0, 1)):
            share = special.expit(x + (0, -1.5)[i] + (arm - 0.5) * (1.2, -0.4)[j])
            density = density + stats.binom.logpmf(cell.counts[i, 1 + arm, r], cell.total[i, r], share)
        cumulative = np.cumsum(np.exp(density - density.max()))
        assert stats.kstest(draws["c"][..., r].ravel(), lambda v: np.interp(v, x, cumulative / cumulative[-1])).statistic < 0.02  # 1 %: .015


def paired_cell(fit_model, rng, tasks, subsamples, n=100):
    """One model; differences with spreads of their own."""
    rows = made_rows(tasks=tasks, subsamples=subsamples, models=("a",), n=n, seed=int(rng.integers(1000)))
    return fit_model.build_cells([fit_model.typed({k: str(v) for k, v in row.items()} | {"where": "here"}) for row in rows])[0]


def test_the_paired_posterior_with_one_task_equals_a_grid(fit_model):
    """beta Normal(0, 10), s HalfNormal(10), each difference Normal(beta, sqrt(s^2 + 1 / 12)) at n = 100, by quadrature."""
    cell = paired_cell(fit_model, np.random.default_rng(0), 1, 8)
    values = fit_model.points(cell, "bias")[0]
    result = fit_model.fit(cell, "bias", "paired", False, settings(), {})
    beta, s = np.linspace(-25, 25, 800)[:, None], np.linspace(0.01, 45, 900)[None]
    density = stats.norm.logpdf(beta, 0, 10) + stats.halfnorm.logpdf(s, 0, 10)
    for value in values:
        density = density + stats.norm.logpdf(value, beta, np.sqrt(s**2 + 1 / 12))
    weight = np.exp(density - density.max())
    weight /= weight.sum()
    for name, grid in (("beta", beta), ("s", s)):
        mean = (weight * grid).sum()
        sd = np.sqrt((weight * (grid - mean) ** 2).sum())
        assert result.draws[name].mean() == pytest.approx(mean, abs=0.08 * sd) and result.draws[name].std() == pytest.approx(sd, rel=0.08)
    assert result.warning == "" and "tau" not in result.draws


def test_delta_given_the_rest_is_the_conjugate_normal(fit_model):
    """By quadrature: Normal(beta, tau) prior times the Normal likelihood of 6 differences with mean 2."""
    draws = {"beta": np.full((2, 20_000, 1), 0.5), "tau": np.full((2, 20_000, 1), 1.5), "log_s": np.full((2, 20_000, 1, 1), np.log(3.0))}
    data = {"count": np.array([[6.0]]), "mean": np.array([[2.0]]), "rounding": 0.25}
    delta = fit_model.draw_delta(draws, data, np.random.default_rng(0)).ravel()

    def density(x):
        return stats.norm.pdf(x, 0.5, 1.5) * stats.norm.pdf(2, x, np.sqrt(9.25 / 6))

    total = integrate.quad(density, -10, 12)[0]
    mean = integrate.quad(lambda x: x * density(x), -10, 12)[0] / total
    sd = np.sqrt(integrate.quad(lambda x: (x - mean) ** 2 * density(x), -10, 12)[0] / total)
    assert delta.mean() == pytest.approx(mean, abs=0.02) and delta.std() == pytest.approx(sd, rel=0.02)


def test_the_paired_likelihood_with_delta_summed_out_is_the_normal_one(fit_model):
    """Against the integral over delta of the product of Normal densities, at three points; they differ by a constant."""
    cell = paired_cell(fit_model, np.random.default_rng(1), 2, 4)
    data, values = fit_model.paired_data(cell, "bias"), fit_model.points(cell, "bias")[0]
    model = fit_model.paired_model(data | {"known": np.ones((1, 2))})
    potential = model.compile_fn(model.potentiallogp, inputs=model.value_vars, mode="FAST_COMPILE", on_unused_input="ignore")
    differences = []
    for beta, tau, log_s in ((0.3, 0.8, (1.0, 2.0)), (-2.0, 4.0, (0.5, 1.5)), (5.0, 0.1, (2.0, 2.5))):
        point = model.initial_point() | {"beta": np.array([beta]), "tau_log__": np.log([tau]), "s_raw": np.array([log_s])}
        total = 0
        for j in (0, 1):
            sd = np.sqrt(np.exp(2 * log_s[j]) + float(data["rounding"]))
            grid = np.linspace(beta - 12 * tau, beta + 12 * tau, 20_001)
            density = stats.norm.logpdf(grid, beta, tau) + stats.norm.logpdf(values[cell.task_idx == j][:, None], grid, sd).sum(0)
            total += special.logsumexp(density) + np.log(grid[1] - grid[0])
        differences.append(float(potential(point)) - total)
    assert np.ptp(differences) < 1e-4


def test_the_predictive_has_the_moments_of_the_draws(fit_model):
    """One point repeated: means and variances over draws are those of averaged binomials."""
    cell, _ = fit_model.simulate_cell(np.random.default_rng(2), 3, 2, 4, 50, boost=0, bias=0)
    from types import SimpleNamespace

    rng, size = np.random.default_rng(0), (2, 4000)
    point = {"c": rng.normal(0, 0.5, 12), "alpha": np.array([-0.4]), "d": np.array([0.3, -0.2, 0.5]), "beta": np.array(0.1)}
    result = SimpleNamespace(cell=cell, draws={name: np.broadcast_to(value, (*size, *value.shape)) for name, value in point.items()})
    means = fit_model.predict(result, 1, 2)
    for i, arm in itertools.product(range(2), (0, 1)):
        share = special.expit(point["c"] + (0, -0.4)[i] + (arm - 0.5) * point["d"][cell.task_idx]).reshape(3, 4)
        assert means[:, i, arm].mean(0) == pytest.approx(100 * share.mean(1), abs=0.3)
        assert means[:, i, arm].var(0) == pytest.approx(1e4 * (share * (1 - share)).sum(1) / 50 / 16, rel=0.1)


@needs_paper
def test_a_published_cell_converges_and_gives_the_published_bias(run):
    status, out, _ = run(PAPER / "few_shot_m50.csv", "--n", 500, "--effects", "bias", "--no-figures")
    rows = {(row["analysis"], row["parameter"]): row for row in rows_of("fits/posterior.csv")}
    assert status == 0 and "WARNING" not in out
    for (analysis, _), row in rows.items():
        assert analysis == "t" or (float(row["r_hat"]) <= 1.01 and float(row["ess_bulk"]) >= 400)
    assert float(rows["paper", "difference"]["mean"]) == pytest.approx(0.2, abs=0.1)  # the mean of .476 and -.076, Table 1a
    assert abs(float(rows["paired", "mean[gpt2]"]["mean"])) < 0.3
    archive = np.load("fits/predictive.npz")
    assert all(len(archive[name]) == 4000 for name in archive)


# Whole runs, and mistakes --------------------------------------------------------------------------------------


def test_small_data_give_an_answer_and_every_figure(run, tmp_path):
    """Two tasks, one model, five subsamples: W, alpha and correlations are left out, and it says so."""
    path = write_rows(tmp_path / "results.csv", made_rows(tasks=2, subsamples=5, models=("a",), n=200))
    status, out, _ = run()
    assert status in (0, 3) and "fewer than 5 tasks" in out and "one model" in out
    assert ("WARNING" in out) == (status == 3)
    parameters = {(row["effect"], row["analysis"], row["parameter"]) for row in rows_of("fits/posterior.csv")}
    assert {("bias", "paper", "difference"), ("boost", "paired", "mean[a]"), ("bias", "paired", "tau[a]"), ("bias", "t", "mean")} <= parameters
    assert not any(parameter == "sd_W" for _, _, parameter in parameters)
    row = rows_of("fits/tasks.csv")[0]
    assert float(row["bias_paired_low"]) < float(row["bias_paired"]) < float(row["bias_paired_high"])
    figures = {path.name.split(".")[0] for path in Path("fits").glob("*.png")}
    assert {"differences", "accuracies", "marginal", "calibration", "trace"} <= figures
    assert path.exists() and "P(bias > 0)" in out and Path("fits/summary.md").read_text().count("\n") == 4


def test_figures_are_not_blank_and_have_their_labels(fit_model, tmp_path, monkeypatch):
    """Every figure drawn without a fit, looked at as matplotlib objects and as pixels."""
    plt, seen = fit_model.import_plots(), []
    monkeypatch.setattr(plt, "close", seen.append)
    rows = made_rows(tasks=3, subsamples=12, n=40)
    for row in rows:
        row["acc_test"] = min(row["acc_test"] + 0.1, 1)
    cells = fit_model.build_cells(fit_model.read_rows([write_rows(tmp_path / "results.csv", rows)]))
    paths = [draw(cells[0], 0, tmp_path) for draw in (fit_model.draw_differences, fit_model.draw_accuracies)]
    paths.append(fit_model.draw_correlations(fit_model.correlations_table(cells, 0), tmp_path))
    paths.append(fit_model.draw_flagged(list(fit_model.observed_tasks(cells[0]).values()), tmp_path))
    for figure, path in zip(seen, paths):
        title = figure.get_suptitle()
        pixels = plt.imread(path)[..., :3]
        assert pixels.std() > 0.02 and (pixels < 0.9).any(axis=2).mean() > 0.005
        assert "n" in title and "m" in title and len(figure.axes) >= 2
        assert any(axis.get_xlabel() for axis in figure.axes) or figure.legends
        labels = [label.get_text() for axis in figure.axes for label in axis.get_xticklabels()]
        assert any("%" in label for label in labels) or "Spearman" in figure.axes[0].get_xlabel()
    monkeypatch.undo()
    plt.close("all")


def test_check_prior_draws_figure_11(run):
    status, out, _ = run("--check", "prior")
    assert status == 0 and Path("fits/prior.png").stat().st_size > 10_000 and out.count("89 % of the mean effects") == 2


def test_help_and_tables_do_not_import_the_sampler(tmp_path):
    path = write_rows(tmp_path / "results.csv", made_rows())
    code = ("import sys, runpy; sys.argv = ['fit_model.py', %r, '--draws', '0', '--no-figures']; runpy.run_path(%r, run_name='__main__'); "
            "assert not {'pymc', 'nutpie', 'torch', 'matplotlib'} & set(sys.modules)" % (str(path), str(ROOT / "fit_model.py")))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_pasted_cell_reads_results_csv(tmp_path, monkeypatch):
    """No __file__, a kernel's sys.argv: main's tiny flags stand for an edited guard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    write_rows(tmp_path / "results.csv", made_rows())
    names = {"__name__": "pasted"}
    exec(compile((ROOT / "fit_model.py").read_text(encoding="utf-8"), "cell", "exec"), names)
    names["main"](["--draws", "0", "--no-figures"])
    assert len(rows_of("fits/means.csv")) == 2


def test_files_folders_duplicates_and_filters(run, tmp_path):
    rows = made_rows()
    folder = tmp_path / "many"
    folder.mkdir()
    write_rows(folder / "results.1-of-2.csv", rows[:14])
    write_rows(folder / "results.2-of-2.csv", rows[10:])
    status, out, _ = run(folder, "--draws", 0, "--no-figures")
    together = rows_of("fits/means.csv")
    assert status == 0 and "4 rows were given twice" in out
    run(write_rows(tmp_path / "one.csv", rows), "--draws", 0, "--no-figures", "--out", "other")
    assert rows_of("other/means.csv") == together and len(together) == 2
    run(tmp_path / "one.csv", "--draws", 0, "--no-figures", "--models", "a", "--tasks", "task1", "--out", "chosen")
    assert [(row["model"], row["tasks"]) for row in rows_of("chosen/means.csv")] == [("a", "1")]
    shutil.rmtree("fits")


MISTAKES = {
    "no file": (None, ("missing.csv",), "missing.csv does not exist"),
    "no such model": ({}, ("--models", "c"), "found: a, b"),
    "no such n": ({}, ("--n", "41"), "found: 40"),
    "impossible accuracy": ({"acc_test": 0.51234}, (), "not a whole number of correct answers"),
    "accuracy above 1": ({"acc_test": 1.2}, (), "not a whole number of correct answers"),
    "accuracy nan": ({"acc_test": "nan"}, (), "line 3"),
    "text for a number": ({"m": "ten"}, (), "line 3"),
    "majority": ({"majority": 1.5}, (), "majority"),
    "another recipe": ({"recipe": "abc"}, (), "recipe abc"),
    "other data": ({"data": "abc"}, (), "data abc"),
    "conflicting duplicate": ({"subsample": 1}, (), "are the same subsample"),
    "too few draws": ({}, ("--draws", "3"), "--draws 3"),
    "out is a file": ({}, ("--out", "results.csv"), "cannot be written"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_line_before_any_fit(name, run, tmp_path):
    changes, flags, message = MISTAKES[name]
    rows = made_rows() if name not in ("another recipe", "other data") else made_rows(recipe="first", data="first")
    rows[1] |= changes or {}
    path = write_rows(tmp_path / "results.csv", rows)
    status, _, err = run(*([path] if changes is not None else []), *flags)
    assert status == 2 and message in err and err.count("\n") == 1 and err.startswith("error: ")
    assert not Path("fits/posterior.csv").exists()


def test_a_file_with_other_columns_or_a_bad_published_folder_is_refused(run, tmp_path):
    status, _, err = run(write_rows(tmp_path / "other.csv", [{"a": 1}]))
    assert status == 2 and "no column 'experiment'" in err
    folder = tmp_path / "published" / "m50" / "n20" / "bert" / "emo"
    folder.mkdir(parents=True)
    write_rows(folder / "accuracies.csv", [{"base": 0.5, "extra": 0.5, "majority": 0.3, "num_classes": 4}])
    status, _, err = run(tmp_path / "published")
    assert status == 2 and "no column 'test'" in err
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty")[0] == 2


def test_a_torn_last_line_is_reported_and_left_out(run, tmp_path):
    path = write_rows(tmp_path / "results.csv", made_rows())
    path.write_text(path.read_text() + "few-shot,a,ta")
    status, out, _ = run(path, "--draws", 0, "--no-figures")
    assert status == 0 and "torn" in out
