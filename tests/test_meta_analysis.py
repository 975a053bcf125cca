"""meta_analysis.py: the posterior of a slice by quadrature and autograd; slices; leaderboards."""

import itertools
import math
import re
import time

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, special, stats

from conftest import ROOT, load_script

PUBLISHED = ROOT / "tests" / "published"
MIRROR = {"base": "base", "extra": "test", "test": "extra"}


@pytest.fixture(scope="module")
def m():
    return load_script("meta_analysis")


@pytest.fixture
def run(m, tmp_path, capsys, monkeypatch):
    """run(flags...) -> (stdout, error), in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        error = ""
        try:
            m.main([*map(str, flags)])
        except SystemExit as end:
            error = str(end.code)
        captured = capsys.readouterr()
        if error == "2":  # of argparse, which prints
            error = captured.err
        return captured.out, error

    return call


@pytest.fixture
def rows_of(m):
    return lambda path, *flags: m.add_effects(m.load_rows(m.parse_args([str(path), *flags])))


def coins(tasks=3, subsamples=4, models=("a", "b"), n=40, crossed=False, **changes):
    """Rows of results.csv, every answer a coin."""
    rng = np.random.default_rng(0)
    rows = []
    for model, j, k in itertools.product(models, range(tasks), range(1, subsamples + 1)):
        row = {"experiment": "few-shot", "model": model, "task": f"task{j:02}", "m": 10, "n": n,
               "subsample": k, "num_classes": 2, "majority": 0.5}
        names = ["acc_base", "acc_extra", "acc_test"]
        if crossed:
            names += [f"{name}_on_extra" for name in names]
        for name in names:
            row[name] = rng.binomial(n, min(0.5 + 0.01 * j, 0.9)) / n
        rows.append(row | changes)
    return pd.DataFrame(rows)


def saved(table, path):
    table.to_csv(path, index=False)
    return path


# The posterior of a slice -----------------------------------------------------


def drawn(models, tasks, n, slices=3, missing=False):
    """Right answers and n of slices with a planted effect."""
    rng = np.random.default_rng(tasks)
    logits = rng.normal(0.5, 0.6, tasks) + rng.normal(0, 0.4, models)[:, None]
    total = np.full((models, tasks), n)
    if missing:
        total[1, 0] = 0
    shares = special.expit(logits + np.array([0, 0.2])[:, None, None])
    return rng.binomial(total, np.broadcast_to(shares, (slices, 2, models, tasks))), total


def dense_posterior(counts, total):
    """(mode, sd) of beta in one slice with the model written as it is: scipy finds the mode,
    autograd the whole Hessian, and sd_U maximises its expected log density (EM)."""
    import torch

    _, models, tasks = counts.shape
    y, n = torch.tensor(counts, dtype=torch.float64), torch.tensor(total)
    scale = 1.0

    def log_posterior(theta):
        mu, beta = theta[0], theta[1]
        alpha = torch.cat([torch.zeros(1), theta[2 : models + 1]])
        U = theta[models + 1 :]  # one task: none
        if tasks == 1:
            U = torch.zeros(1)
        value = -(mu**2) / 2 - beta**2 / 2 - (alpha**2).sum() / 50 - (U**2).sum() / (2 * scale**2)
        for l in (0, 1):
            eta = mu + beta * l + alpha[:, None] + U
            value = value + (y[l] * eta - n * torch.nn.functional.softplus(eta)).sum()
        return value

    def downhill(theta):
        theta = torch.tensor(theta, requires_grad=True)
        value = -log_posterior(theta)
        value.backward()
        return value.item(), theta.grad.numpy()

    def hessian(theta):
        return -torch.autograd.functional.hessian(log_posterior, torch.tensor(theta)).numpy()

    theta = np.zeros(models + 1 + tasks * (tasks > 1))
    for _ in range(300):
        found = optimize.minimize(downhill, theta, jac=True, hess=hessian, method="trust-exact",
                                  options={"gtol": 1e-9})
        theta, covariance = found.x, np.linalg.inv(hessian(found.x))
        square = (theta**2 + np.diag(covariance))[models + 1 :].sum()
        new = optimize.minimize_scalar(
            lambda sd: tasks * math.log(sd) + square / (2 * sd**2) + sd**2 / 2,
            bounds=(0.01, 5), method="bounded", options={"xatol": 1e-10}).x
        if abs(new - scale) < 1e-8:
            break
        scale = new
    return theta[1], math.sqrt(covariance[1, 1])


@pytest.mark.parametrize("models, tasks, missing", [(1, 1, False), (2, 6, False), (3, 4, True)])
def test_mode_and_curvature_against_autograd(m, models, tasks, missing):
    counts, total = drawn(models, tasks, 200, missing=missing)
    means, sds = m.slice_posterior(counts, total)
    for one, mean, sd in zip(counts, means, sds):
        assert (mean, sd) == pytest.approx(dense_posterior(one, total), abs=1e-6)


def test_newtons_steps_are_whole(m):
    """Answers that no sum of model and task can tell: with steps of at most 2 the mean is .18 off.
    Tasks in which all answers are right or none is."""
    odd = np.array([[[[0, 0], [50, 50], [0, 0]], [[0, 50], [50, 50], [50, 0]]]])
    far = np.zeros((1, 2, 2, 6), int)
    far[..., ::2] = 50
    far[:, 1, :, 0] = 49
    for counts in (odd, far):
        total = np.full(counts.shape[2:], 50)
        (mean,), (sd,) = m.slice_posterior(counts, total)
        assert (mean, sd) == pytest.approx(dense_posterior(counts[0], total), abs=1e-4)


def test_several_tasks_against_quadrature(m):
    """The whole posterior on a grid of mu, beta and sd_U; each task's U is integrated out of its
    likelihood, a function of eta = mu + U and beta."""
    counts, total = drawn(1, 8, 50, slices=1)
    eta, beta = np.linspace(-3, 4, 281), np.linspace(-1, 1.5, 61)
    mu, sd_U = np.meshgrid(np.linspace(-1.5, 2.5, 41), np.linspace(0.05, 3, 50), indexing="ij")
    weights = stats.norm.pdf(eta, mu[..., None], sd_U[..., None])
    log_p = stats.norm.logpdf(mu) + stats.halfnorm.logpdf(sd_U)
    log_p = log_p[..., None] + stats.norm.logpdf(beta)
    for j in range(8):
        control = stats.binom.logpmf(counts[0, 0, 0, j], 50, special.expit(eta))
        shares = special.expit(eta[:, None] + beta)
        treatment = stats.binom.logpmf(counts[0, 1, 0, j], 50, shares)
        log_p = log_p + np.log(weights @ np.exp(control[:, None] + treatment))
    marginal = np.exp(log_p - log_p.max()).sum(axis=(0, 1))
    expected = (marginal * beta).sum() / marginal.sum()
    spread = math.sqrt((marginal * (beta - expected) ** 2).sum() / marginal.sum())
    (mean,), (sd,) = m.slice_posterior(counts, total)
    assert mean == pytest.approx(expected, abs=0.05 * spread)
    assert sd == pytest.approx(spread, rel=0.03)


def test_the_papers_coin_flip(m, rows_of):
    """Section 10: 47 % of 500 slices at m = 100, n = 500 (standard error 2.2 %), 50 % zero-shot."""
    for name, n, threshold, share in (("few_shot_m100", 500, 0.04, 0.47),
                                      ("zero_shot_m100_n100", 100, 0.08, 0.5)):
        rows = rows_of(PUBLISHED / f"{name}.csv", "--n", str(n))
        counts, _, total = m.draw_slices(rows, "bias", 2000, False)
        mean, _ = m.slice_posterior(counts, total)
        error = math.sqrt(0.25 / 500 + 0.25 / 2000)
        assert np.mean(np.abs(mean) > threshold) == pytest.approx(share, abs=2.5 * error)


def test_a_hundred_tasks_take_seconds(run, tmp_path):
    saved(coins(tasks=100, n=200), tmp_path / "results.csv")
    start = time.process_time()
    run("--slices", 500, "--models", "a")
    assert time.process_time() - start < 10


# Slices, shuffled slices, tables ----------------------------------------------


@pytest.mark.parametrize("effect, control, treatment",
                         [("boost", "base", "extra"), ("bias", "extra", "test")])
@pytest.mark.parametrize("crossed", [True, False])
def test_a_slice_holds_one_run_of_each_model_and_task(m, rows_of, tmp_path, effect, control, treatment, crossed):
    """Plain counts, and the effect of the same run, which a shuffle turns around with them."""
    table = coins(subsamples=5, crossed=crossed)
    table = table[~((table["model"] == "b") & (table["task"] == "task01"))]
    rows = rows_of(saved(table, tmp_path / "r.csv"))
    models, tasks = ["a", "b"], ["task00", "task01", "task02"]
    counts, effects, total = m.draw_slices(rows, effect, 4000, False)
    assert total.tolist() == [[40, 40, 40], [40, 0, 40]] and (counts[:, :, 1, 1] == 0).all()
    for i, j in np.argwhere(total):
        expected = []
        for row in table[(table["model"] == models[i]) & (table["task"] == tasks[j])].to_dict("records"):
            change = row[f"acc_{treatment}"] - row[f"acc_{control}"]
            if crossed:
                second = row[f"acc_{MIRROR[treatment]}_on_extra"] - row[f"acc_{MIRROR[control]}_on_extra"]
                change = (change + second) / 2
            expected.append((40 * row[f"acc_{control}"], 40 * row[f"acc_{treatment}"], 80 * change))
        expected = pd.DataFrame(expected).round().value_counts(normalize=True)
        found = pd.DataFrame([*counts[:, :, i, j].T, effects[:, i, j] * 80 / 100]).T.round().value_counts(normalize=True)
        assert set(found.index) == set(expected.index)
        assert (found - expected).abs().max() < 0.04
    shuffled, signs, _ = m.draw_slices(rows, effect, 4000, True)
    assert (shuffled.sum(1) == counts.sum(1)).all() and (np.abs(signs) == np.abs(effects)).all()
    swapped = signs != effects
    assert swapped[effects != 0].mean() == pytest.approx(0.5, abs=0.02)
    assert (shuffled[:, 0] == np.where(swapped, counts[:, 1], counts[:, 0]))[effects != 0].all()


def test_the_t_interval_of_slices_is_scipys(m):
    rng = np.random.default_rng(0)
    counts, total = rng.binomial(50, 0.6, (5, 2, 2, 6)), np.full((2, 6), 50)
    effects = rng.normal(0, 3, (5, 2, 6))
    found = m.slice_table(counts, effects, total)
    for k in range(5):
        D = effects[k].mean(0)
        interval = stats.ttest_1samp(D, 0).confidence_interval(0.89)
        expected = (D.mean(), interval.low, interval.high)
        assert tuple(found.loc[k, ["t_mean", "t_low", "t_high"]]) == pytest.approx(expected)
    low, high = stats.norm.interval(0.89, *m.slice_posterior(counts, total))
    assert found["paper_low"].to_numpy() == pytest.approx(low)
    assert found["paper_high"].to_numpy() == pytest.approx(high)


def test_tables_figures_and_page(m, run, tmp_path):
    name = "<b>my</b> zero-shot $"
    zero_shot = coins(tasks=2, models=("a",), experiment=name)
    saved(pd.concat([coins(tasks=6), zero_shot]), tmp_path / "results.csv")
    out, error = run("--slices", 60, "--effects", "boost", "bias")
    folder = tmp_path / "meta" / "results"
    meta, shares = pd.read_csv(folder / "meta.csv"), pd.read_csv(folder / "shares.csv")
    assert not error and "nan" not in out
    assert len(meta) == 60 * 2 * 2 * (3 + 1) and len(shares) == 2 * 2 * (3 + 1)
    keys = ["experiment", "effect", "model", "kind"]
    for key, mine in meta.groupby(keys):
        row = shares[(shares[keys] == [*key]).all(axis=1)].iloc[0]
        assert row["threshold"] == (0.08 if "zero-shot" in key[0] else 0.04)
        outside = (mine["paper_mean"].abs() > row["threshold"]).mean()
        assert row["outside"] == pytest.approx(outside, abs=1e-5)
        for way in ("paper", "t"):
            beyond = (mine[f"{way}_low"] > 0) | (mine[f"{way}_high"] < 0)
            assert row[way] == pytest.approx(beyond.mean(), abs=1e-5)
    assert all(column in m.__doc__ for column in [*meta, *shares])
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and name not in page and "&lt;b&gt;my" in page
    for effect, line in zip(("boost", "bias"), out.splitlines()):
        told = [[float(end) for end in ends.split(" to ")] for ends in re.findall(r"in ([\d to]+) %", line)]
        for kind, ends in zip(("drawn", "shuffled"), told[:2]):
            mine = 100 * shares.query(f"effect == '{effect}' and kind == '{kind}'")["paper"]
            assert (ends[0], ends[-1]) == pytest.approx((mine.min(), mine.max()), abs=0.51)


def test_a_bias_is_found_in_drawn_slices_and_not_in_shuffled_ones(run, tmp_path):
    table = coins(tasks=8, n=400, models=("a",), acc_extra=0.5, acc_test=0.6)
    run(saved(table, tmp_path / "results.csv"), "--slices", 80)
    shares = pd.read_csv("meta/results/shares.csv").set_index("kind")
    assert shares.loc["drawn", "t"] == 1 and shares.loc["shuffled", "t"] < 0.5


def test_all_models_together_only_where_they_have_the_same_tasks(run, tmp_path):
    """One that lacks tasks is analysed as if alone: here there is but one slice."""
    same = {"acc_extra": 0.5, "acc_test": 0.6}
    few = coins(tasks=2, models=("c",), **same)
    columns = ["paper_mean", "paper_low", "t_mean", "t_low"]
    found = []
    for name, rows in (("both", pd.concat([coins(**same), few])), ("alone", few)):
        run(saved(rows, tmp_path / f"{name}.csv"), "--slices", 1)
        meta = pd.read_csv(f"meta/{name}/meta.csv")
        assert "all" not in set(meta["model"])
        found.append(meta.query("kind == 'drawn' and model == 'c'")[columns].to_numpy())
    assert found[0] == pytest.approx(found[1])
    run(saved(coins(), tmp_path / "same.csv"), "--slices", 5)
    assert set(pd.read_csv("meta/same/meta.csv")["model"]) == {"a", "b", "all"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("changes", [
    dict(tasks=1), dict(subsamples=2), dict(tasks=1, acc_extra=1, acc_test=1),
    dict(acc_extra=0, acc_test=0)])
def test_small_data_and_answers_that_never_differ(run, tmp_path, changes):
    path = saved(coins(**changes), tmp_path / "results.csv")
    out, error = run(path, "--slices", 10)
    assert not error and "nan" not in out
    if "acc_test" in changes:
        shares = pd.read_csv("meta/results/shares.csv")
        assert not (shares[["paper", "t"]] > 0).any(axis=None)


# What comes in, and the folder that goes out ----------------------------------


def test_bad_rows_end_in_one_line_and_leave_the_old_page(run, tmp_path):
    saved(coins(), tmp_path / "results.csv")
    run("--slices", 5)
    page = tmp_path / "meta" / "results" / "report.html"
    before = page.read_text()
    saved(coins(subsamples=1), tmp_path / "results.csv")
    assert run()[1].startswith("error: one subsample per model and task")
    assert page.read_text() == before


# Leaderboards -----------------------------------------------------------------


def noisy_rows():
    """One model, two tasks, eight subsamples each."""
    table = coins(tasks=2, subsamples=8, models=("a",), n=100)
    return table.assign(acc_extra=np.tile([0.5, 0.7], 8))


NOISE = 2 * 100 * (8 / 7) / 4  # of the mean of two tasks whose accuracies lie 10 points off theirs


def a_board(run, tmp_path, board, *flags):
    """(leaderboard.csv by name, stdout)."""
    saved(noisy_rows(), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text(board)
    out, error = run("--leaderboard", "board.csv", *flags)
    assert not error
    return pd.read_csv("meta/results.board/leaderboard.csv").set_index("name"), out


def test_a_leaderboard_by_hand(m, run, tmp_path):
    """Scores 75, 70, 50: variance 175, so the true gaps are B = 1 - 57.1 / 175 of those seen."""
    table, out = a_board(run, tmp_path, "name,score\nsecond,70\nfirst,75\nthird,50\n")
    B = 1 - NOISE / 175
    assert list(table.index) == ["first", "second", "third"]
    first = table.loc["first"]
    assert first["gap"] == 5 and first["rank"] == 1
    known = math.sqrt(2 * B * NOISE)  # sd of the true gap, given the scores
    assert first["p_wrong"] == pytest.approx(stats.norm.sf(5 * B / known), rel=1e-4)
    for R in (1, 5, 20):
        rerun = math.sqrt(known**2 + 2 * NOISE / R)
        assert first[f"p_swap_{R}"] == pytest.approx(stats.norm.sf(5 * B / rerun), rel=1e-4)
    page = (tmp_path / "meta/results.board/report.html").read_text()
    assert f"Noise: {math.sqrt(NOISE):.2f} points" in page and "upper bound" in page
    assert out.startswith("Neighbours in the wrong order with a chance above 11 %: 1 of 2 (noise of a, ")
    assert all(column in m.__doc__ for column in ["name", *table])


def test_announced_chances_come_true(m, rows_of, tmp_path):
    """Boards of 20 entries whose true scores spread as much as their noise. Neighbours whose gap
    alone announces less than .1 are in the wrong order twice as often; the table says so."""
    seeds = pd.concat([noisy_rows(), noisy_rows().assign(seed=1)])  # one of each subsample counts
    assert m.noise_of(rows_of(saved(seeds, tmp_path / "r.csv"))) == pytest.approx(NOISE)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(1000):
        true = rng.normal(50, math.sqrt(NOISE), 20)
        scores = true + rng.normal(0, math.sqrt(NOISE), 20)
        board = pd.DataFrame({"name": np.arange(20), "score": scores})
        board = board.sort_values("score", ascending=False, ignore_index=True)
        table = m.board_table(board, NOISE)
        ordered = true[board["name"]]
        gaps = ordered[:-1] - ordered[1:]
        again = gaps + rng.normal(0, math.sqrt(2 * NOISE), 19)
        found.append(table[:-1].assign(wrong=gaps < 0, swap=again < 0))
    found = pd.concat(found)
    for announced, true in (("p_wrong", "wrong"), ("p_swap_1", "swap")):
        assert found[announced].mean() == pytest.approx(found[true].mean(), abs=0.015)
    naive = stats.norm.sf(found["gap"] / math.sqrt(2 * NOISE))
    clear = found[naive < 0.1]
    assert naive[naive < 0.1].mean() == pytest.approx(0.063, abs=0.009)
    assert clear["wrong"].mean() == pytest.approx(0.13, abs=0.025)
    assert clear["p_wrong"].mean() == pytest.approx(clear["wrong"].mean(), abs=0.025)


def test_rows_without_noise_and_boards_within_it(run, tmp_path):
    """Without noise the rounding to whole texts is left: a variance of 1 / 12 a task."""
    table, _ = a_board(run, tmp_path, "name,score\nx,62\ny,60\nz,58\n")
    assert table["p_wrong"].dropna().to_numpy() == pytest.approx(0.5, abs=1e-3)
    saved(noisy_rows().assign(acc_extra=0.6), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text("name,score\nx,.99\ny,.101\nz,.1\n")
    run("--leaderboard", "board.csv")
    table = pd.read_csv("meta/results.board/leaderboard.csv")
    assert table["p_swap_1"][0] == 0
    assert table["p_wrong"][1] == pytest.approx(stats.norm.sf(0.1 / math.sqrt(2 / 24)), abs=1e-4)
    page = (tmp_path / "meta/results.board/report.html").read_text()
    assert "e-" not in page.split("<table")[1] and "nan" not in page


@pytest.mark.parametrize("board, message", [
    ("name,points\nx,1\n", "0 columns 'score'"),
    ("name,score\nx,high\ny,.5\n", "score is high, not a number"),
    ("name;score\nx;.9\ny;.8\n", "name;score")])
def test_bad_boards_end_in_one_line(run, tmp_path, board, message):
    saved(noisy_rows(), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text(board)
    _, error = run("--leaderboard", "board.csv")
    assert error.startswith("error: ") and message in error and "\n" not in error
    assert not (tmp_path / "meta").exists()


def test_a_board_has_a_part_for_each_noise_and_needs_two_subsamples(run, tmp_path):
    (tmp_path / "board.csv").write_text("name,score\nx,.9\ny,.8\n")
    saved(coins(subsamples=1), tmp_path / "one.csv")
    assert "error: one subsample of task00" in run("one.csv", "--leaderboard", "board.csv")[1]
    saved(pd.concat([coins(), noisy_rows().assign(m=20)]), tmp_path / "two.csv")
    run("two.csv", "--leaderboard", "board.csv")
    table = pd.read_csv("meta/two.board/leaderboard.csv")
    assert list(zip(table["m"], table["model"]))[::2] == [(10, "a"), (10, "b"), (20, "a")]
