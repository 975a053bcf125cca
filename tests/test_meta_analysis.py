"""meta_analysis.py against quadrature, a plain PyMC model, scipy, hand arithmetic and the paper's 47 %."""

import itertools
import math
import re

import numpy as np
import pandas as pd
import pytest
from scipy import special, stats

from conftest import load_script
from test_fit_model import PAPER, made_rows, needs_paper, saved, with_line


@pytest.fixture(scope="module")
def m():
    return load_script("meta_analysis")


@pytest.fixture
def run(m, tmp_path, capsys, monkeypatch):
    """run(flags...) -> (exit status, stdout, stderr) of main() in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        status = 0
        try:
            m.main(list(map(str, flags)))
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


# The posterior of a slice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("control, treatment, n", [(30, 36, 60), (5, 3, 40), (480, 455, 500)])
def test_one_model_and_task_against_quadrature(m, control, treatment, n):
    """Two parameters, mu and beta: their posterior on a grid. The curvature at the mode is close, not equal: .03 and 4 %."""
    mu, beta = np.meshgrid(np.linspace(-4, 4, 1601), np.linspace(-3, 3, 1201), indexing="ij")
    log_p = -(mu**2 + beta**2) / 2
    for y, eta in ((control, mu), (treatment, mu + beta)):
        log_p = log_p + y * eta - n * np.logaddexp(0, eta)
    weight = np.exp(log_p - log_p.max())
    mean = (weight * beta).sum() / weight.sum()
    sd = math.sqrt((weight * (beta - mean) ** 2).sum() / weight.sum())
    (found,), (spread,) = m.slice_posterior(np.array([[[[control]], [[treatment]]]]), np.array([[n]]))
    assert found == pytest.approx(mean, abs=0.1 * sd) and spread == pytest.approx(sd, rel=0.04)


def plain_slice(counts, total):
    """The paper's model of a slice as it is written: no V and W."""
    import pymc as pm
    import pytensor.tensor as pt

    _, models, tasks = counts.shape
    with pm.Model() as model:
        mu, beta = pm.Normal("mu", 0, 1), pm.Normal("beta", 0, 1)
        alpha = pt.concatenate([pt.zeros(1), pm.Normal("alpha", 0, 5, shape=models - 1)])
        U = pm.HalfNormal("sd_U", 1) * pm.Normal("U_raw", 0, 1, shape=tasks)
        for l, i in itertools.product((0, 1), range(models)):
            pm.Binomial(f"y{l}{i}", total[i], logit_p=mu + alpha[i] + U + beta * l, observed=counts[l, i])
    return model


@pytest.mark.parametrize("tasks, n, missing", [(8, 50, False), (4, 200, True)])
def test_slices_against_mcmc(m, tasks, n, missing):
    load_script("fit_model").import_pymc()
    import nutpie

    rng = np.random.default_rng(tasks)
    shares = special.expit(rng.normal(0.5, 1, tasks) + np.array([0, 0.4])[:, None] + np.array([0, 0.2])[:, None, None])
    counts, total = rng.binomial(n, shares), np.full((2, tasks), n)
    if missing:
        counts[:, 1, 0], total[1, 0] = 0, 0
    (mean,), (sd,) = m.slice_posterior(counts[None], total)
    trace = nutpie.sample(nutpie.compile_pymc_model(plain_slice(counts, total)), draws=2000, tune=700, chains=4, cores=2, seed=1, progress_bar=False,
                          target_accept=0.95)
    beta = trace.posterior["beta"].values
    assert mean == pytest.approx(beta.mean(), abs=0.08 * beta.std()) and sd == pytest.approx(beta.std(), rel=0.05)


@needs_paper
def test_the_papers_coin_flip(m):
    """Section 10: 47 % of 500 slices at m = 100, n = 500 (standard error 2.2 %), 50 % of the zero-shot ones."""
    for name, n, threshold, share in (("few_shot_m100", 500, 0.04, 0.47), ("zero_shot_m100_n100", 100, 0.08, 0.5)):
        rows = m.read_results([PAPER / f"{name}.csv"]).query("n == @n")
        mean, _ = m.slice_posterior(*m.draw_slices(rows, "bias", 2000, np.random.default_rng(0)))
        assert np.mean(np.abs(mean) > threshold) == pytest.approx(share, abs=2.5 * math.sqrt(0.25 / 500 + 0.25 / 2000))


# Slices, nulls, tables -------------------------------------------------------------------------------------------


def test_a_slice_holds_one_run_of_each_model_and_task(m, tmp_path):
    table = made_rows(tasks=3, subsamples=5)
    table = table[~((table["model"] == "b") & (table["task"] == "task01"))]
    rows = m.read_results([saved(table, tmp_path / "r.csv")])
    models, tasks = ["a", "b"], ["task00", "task01", "task02"]
    counts, total = m.draw_slices(rows, "bias", 4000, np.random.default_rng(0))
    assert total.tolist() == [[40, 40, 40], [40, 0, 40]] and (counts[:, :, 1, 1] == 0).all()
    for i, j in np.argwhere(total):
        mine = rows[(rows["model"] == models[i]) & (rows["task"] == tasks[j])]
        expected = mine.groupby(["right_extra", "right_test"]).size() / 5
        found = pd.Series(list(map(tuple, counts[:, :, i, j]))).value_counts(normalize=True)
        assert set(found.index) == set(expected.index) and all(abs(found[pair] - expected[pair]) < 0.04 for pair in found.index)
    nulls, _ = m.draw_slices(rows, "bias", 4000, np.random.default_rng(0), null=True)
    assert (nulls.sum(1) == counts.sum(1)).all()  # the same slices, arms changed
    differ = counts[:, 0] != counts[:, 1]
    assert ((nulls[:, 0] == counts[:, 1])[differ]).mean() == pytest.approx(0.5, abs=0.02)


def test_the_t_interval_and_p_of_slices_are_scipys(m):
    rng = np.random.default_rng(0)
    counts, total = rng.binomial(50, 0.6, (5, 2, 2, 6)), np.full((2, 6), 50)
    found = m.slice_rows(counts, total)
    for k in range(5):
        D = 100 * (counts[k, 1] - counts[k, 0]).mean(0) / 50
        interval = stats.ttest_1samp(D, 0).confidence_interval(0.89)
        assert tuple(found.loc[k, ["t_mean", "t_low", "t_high"]]) == pytest.approx((D.mean(), interval.low, interval.high))
        changes = (counts[k, 1] - counts[k, 0]).ravel()
        sums = np.array(list(itertools.product((-1, 1), repeat=12))) @ changes
        assert found.loc[k, "p"] == pytest.approx(min(1, 2 * np.mean(sums >= abs(changes.sum()))))


def test_the_variance_ratio_by_hand_counts_a_subsample_once(m, tmp_path):
    table = made_rows(tasks=1, subsamples=2, models=("a",)).assign(acc_extra=[0.5, 0.5], acc_test=[0.5, 0.6])
    expected = 0.005 / np.mean([2 * 0.25 / 40, (0.25 + 0.24) / 40])
    for seeds in (1, 3):
        rows = m.read_results([saved(pd.concat([table.assign(seed=seed) for seed in range(seeds)]), tmp_path / "r.csv")])
        assert m.variance_ratio(rows, "bias") == pytest.approx(expected)


def test_tables_figures_and_words(run, tmp_path):
    saved(pd.concat([made_rows(tasks=6), made_rows(tasks=2, models=("a",), experiment="zero-shot")]), tmp_path / "results.csv")
    status, out, err = run("--slices", 60, "--effects", "boost", "bias")
    meta, shares = pd.read_csv("meta/meta.csv"), pd.read_csv("meta/shares.csv")
    assert status == 0 and len(meta) == 60 * 2 * 2 * (3 + 1) and len(shares) == 2 * 2 * (3 + 1) and "nan" not in out
    for row in shares.itertuples():
        mine = meta[(meta["experiment"] == row.experiment) & (meta["effect"] == row.effect) & (meta["model"] == row.model) & (meta["kind"] == row.kind)]
        assert row.outside == pytest.approx((mine["paper_mean"].abs() > (0.08 if row.experiment == "zero-shot" else 0.04)).mean(), abs=1e-5)
        assert row.t == pytest.approx(((mine["t_low"] > 0) | (mine["t_high"] < 0)).mean(), abs=1e-5)
        assert row.sign_flip == pytest.approx((mine["p"] < 0.11).mean(), abs=1e-5)
    manual = load_script("meta_analysis").__doc__
    assert all(column in manual for column in [*meta.columns, *shares.columns])
    names = sorted(path.name for path in tmp_path.joinpath("meta").glob("*.png"))
    assert names == ["nulls.png", *(f"slices.{cell}.{effect}.png" for cell in ("few-shot.10.40", "zero-shot.10.40") for effect in ("bias", "boost"))]


@pytest.mark.parametrize("changes", [dict(tasks=1), dict(subsamples=1), dict(models=("a",), tasks=1, subsamples=1)])
def test_small_data(run, tmp_path, changes):
    status, out, err = run(saved(made_rows(**changes), tmp_path / "results.csv"), "--slices", 20)
    assert status == 0 and "nan" not in out and "Warning" not in err


def test_equal_arms_give_no_effect(m):
    mean, sd = m.slice_posterior(np.full((2, 2, 2, 5), 20), np.full((2, 5), 40))
    assert np.abs(mean).max() < 1e-9 and (sd > 0).all()


# Leaderboards -----------------------------------------------------------------------------------------------------


def noisy_rows():
    """One model, two tasks, eight subsamples whose accuracies jump by far more than their test texts explain."""
    table = made_rows(tasks=2, subsamples=8, models=("a",), n=100)
    return table.assign(acc_extra=np.tile([0.5, 0.7], 8))


def test_a_leaderboard_by_hand(run, tmp_path):
    saved(noisy_rows(), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text("name,score,n\nsecond,70,400\nfirst,75,400\nthird,60,400\n")
    status, out, _ = run("--leaderboard", "board.csv")
    table = pd.read_csv("meta/leaderboard.csv").set_index("name")
    observed = 0.01 * 8 / 7  # variance of eight values that are .5 or .7
    binomial = (0.25 + 0.21) / 2 / 99
    variance = 1e4 * 2 * (observed - binomial) / 4  # of the mean over two tasks
    assert status == 0 and list(table.index) == ["first", "second", "third"] and table.loc["first", "gap"] == pytest.approx(5)
    assert table.loc["first", "p_wrong"] == pytest.approx(stats.norm.sf(5 / math.sqrt(2 * variance)), rel=1e-4)
    assert table.loc["first", "p_swap_5"] == pytest.approx(stats.norm.sf(5 / math.sqrt(2 * variance / 5)), rel=1e-4)
    texts = 1e4 * (0.75 * 0.25 + 0.7 * 0.3) / 400
    assert table.loc["first", "p_wrong_texts"] == pytest.approx(stats.norm.sf(5 / math.sqrt(2 * variance + texts)), rel=1e-4)
    scores, sd = np.array([75, 70, 60]), math.sqrt(variance)
    grid = np.linspace(20, 130, 4001)
    best = [np.trapezoid(stats.norm.pdf(grid, scores[k], sd) * np.prod([stats.norm.cdf(grid, s, sd) for i, s in enumerate(scores) if i != k], axis=0), grid)
            for k in range(3)]
    assert table["p_best"].to_numpy() == pytest.approx(best, abs=0.006)
    assert "gap is taken as true" in out and "share their test texts" in out


def test_noise_that_is_not_told_from_0_is_not_0_percent(run, tmp_path):
    saved(noisy_rows().assign(acc_extra=0.6), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text("name,score\nx,.9\ny,.8\n")
    status, out, _ = run("--leaderboard", "board.csv")
    assert status == 0 and "training noise is not told from 0" in out
    assert pd.read_csv("meta/leaderboard.csv")[["p_wrong", "p_swap_1", "p_best"]].isna().all().all()


@pytest.mark.parametrize("board, message", [
    ("name,points\nx,1\n", "no column 'score'"), ("name,score\nx,.5\n", "a board needs two"), ("name,score\nx,high\ny,.5\n", "score is 'high'"),
    ("name,score\nx,-.1\ny,.5\n", "scores lie in 0 to 1"), ("name,score\nx,.1\ny,.5,7\n", "Expected 2 fields in line 3, saw 3"),
    ('name,score\n"x,.1\n', "no CSV file")])
def test_bad_boards_end_in_one_line(run, tmp_path, board, message):
    saved(noisy_rows(), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text(board)
    status, _, err = run("--leaderboard", "board.csv")
    assert status == 2 and message in err and err.count("\n") == 1


def test_slices_of_one_subsample_are_said_to_be_the_same(run, tmp_path):
    assert "all its slices are the same" in run(saved(made_rows(subsamples=1), tmp_path / "one.csv"), "--slices", 5)[1]
    assert "the same" not in run(saved(made_rows(), tmp_path / "four.csv"), "--slices", 5)[1]


def test_bad_input_ends_in_one_line(run, tmp_path):
    saved(with_line(noisy_rows(), 0, acc_base=0.123), tmp_path / "results.csv")
    status, _, err = run()
    assert status == 2 and "no whole number of correct answers" in err and err.count("\n") == 1
    saved(made_rows(subsamples=1), tmp_path / "one.csv")
    (tmp_path / "board.csv").write_text("name,score\nx,.9\ny,.8\n")
    assert "has one subsample of task00" in run("one.csv", "--leaderboard", "board.csv")[2]
    saved(pd.concat([noisy_rows(), noisy_rows().assign(m=20)]), tmp_path / "two.csv")
    assert re.search(r"choose by --experiment few-shot --m 10 --n 100; --exp", run("two.csv", "--leaderboard", "board.csv")[2])
