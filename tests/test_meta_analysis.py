"""meta_analysis.py: the posterior of a slice by autograd; slices; leaderboards."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng
from pytest import approx
from scipy import optimize, special, stats

from conftest import ROOT, coin_rows, load_script, path_of

meta = load_script("meta_analysis")
pytestmark = pytest.mark.usefixtures("empty_folder")

PUBLISHED = ROOT / "tests" / "published"
MIRROR = {"base": "base", "extra": "test", "test": "extra"}


@pytest.fixture
def run(said):
    """run(rows, flags...) -> end, out of main()."""
    return lambda rows, *flags: said(meta.main, path_of(rows), *flags)


def loaded(rows, *flags):
    args = meta.parse_args([str(path_of(rows)), *flags])
    return meta.add_effects(meta.load_rows(args))


def csv_of(name):
    return pd.read_csv(f"meta/results/{name}.csv")


# The posterior of a slice --------------------


def drawn(models, tasks, missing=False):
    """Right answers and n of three slices with a planted effect."""
    rng = default_rng(tasks)
    logits = rng.normal(0.5, 0.6, tasks) + rng.normal(0, 0.4, models)[:, None]
    total = np.full((models, tasks), 200)
    if missing:
        total[1, 0] = 0
    shares = special.expit(logits + np.array([0, 0.2])[:, None, None])
    return rng.binomial(total, np.broadcast_to(shares, (3, 2, models, tasks))), total


def dense_posterior(counts, total):
    """(mode, sd) of beta in one slice with the model written as it is: scipy finds the mode,
    autograd the whole Hessian, and sd_U maximises its expected log density (EM)."""
    import torch
    from torch.autograd.functional import hessian, jacobian

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

    def downhill(derivative):
        return lambda theta: -derivative(log_posterior, torch.tensor(theta)).numpy()

    theta = np.zeros(models + 1 + tasks * (tasks > 1))
    for _ in range(300):
        theta = optimize.minimize(
            downhill(lambda f, theta: f(theta)), theta, jac=downhill(jacobian),
            hess=downhill(hessian), method="trust-exact", options={"gtol": 1e-9}).x
        covariance = np.linalg.inv(downhill(hessian)(theta))
        square = (theta**2 + np.diag(covariance))[models + 1 :].sum()
        new = optimize.minimize_scalar(
            lambda sd: tasks * math.log(sd) + square / (2 * sd**2) + sd**2 / 2,
            bounds=(0.01, 5), method="bounded", options={"xatol": 1e-10}).x
        if abs(new - scale) < 1e-8:
            break
        scale = new
    return theta[1], math.sqrt(covariance[1, 1])


# Answers that no sum of model and task can tell: with steps of at most 2 the mean is .18 off
ODD = [[[[0, 0], [50, 50], [0, 0]], [[0, 50], [50, 50], [50, 0]]]]
# Tasks in which all answers are right or none is
FAR = [[[[50, 0, 50, 0, 50, 0]] * 2, [[49, 0, 50, 0, 50, 0]] * 2]]


@pytest.mark.parametrize("counts, total, near", [
    (*drawn(1, 1), 1e-6), (*drawn(2, 6), 1e-6), (*drawn(3, 4, missing=True), 1e-6),
    (np.array(ODD), np.full((3, 2), 50), 1e-4), (np.array(FAR), np.full((2, 6), 50), 1e-4)])
def test_mode_and_curvature_against_autograd(counts, total, near):
    means, sds = meta.slice_posterior(counts, total)
    for one, mean, sd in zip(counts, means, sds):
        assert (mean, sd) == approx(dense_posterior(one, total), abs=near)


@pytest.mark.parametrize("name, n, threshold, share", [
    ("few_shot_m100", 500, 0.04, 0.47), ("zero_shot_m100_n100", 100, 0.08, 0.5)])
def test_the_papers_coin_flip(name, n, threshold, share):
    """Section 10: 47 % of 500 slices at m = 100, n = 500 (standard error 2.2 %), 50 % zero-shot."""
    rows = loaded(PUBLISHED / f"{name}.csv", "--n", str(n))
    counts, _, total = meta.draw_slices(rows, "bias", 2000, False)
    mean, _ = meta.slice_posterior(counts, total)
    error = math.sqrt(0.25 / 500 + 0.25 / 2000)
    assert np.mean(np.abs(mean) > threshold) == approx(share, abs=2.5 * error)


# Slices, shuffled slices, tables --------------------


@pytest.mark.parametrize("effect, control, treatment",
                         [("boost", "base", "extra"), ("bias", "extra", "test")])
@pytest.mark.parametrize("crossed", [True, False])
def test_a_slice_holds_one_run_of_each(effect, control, treatment, crossed):
    """Plain counts, and the effect of the same run, which a shuffle turns around with them."""
    table = coin_rows(subsamples=5, crossed=crossed)
    table = table[~((table["model"] == "b") & (table["task"] == "task01"))]
    counts, effects, total = meta.draw_slices(loaded(table), effect, 4000, False)
    assert total.tolist() == [[40, 40, 40], [40, 0, 40]] and (counts[:, :, 1, 1] == 0).all()
    for i, j in np.argwhere(total):
        mine = table[(table["model"] == "ab"[i]) & (table["task"] == f"task{j:02}")]
        change = mine[f"acc_{treatment}"] - mine[f"acc_{control}"]
        if crossed:
            change += mine[f"acc_{MIRROR[treatment]}_on_extra"]
            change -= mine[f"acc_{MIRROR[control]}_on_extra"]
            change /= 2
        right = [40 * mine[f"acc_{arm}"] for arm in (control, treatment)]
        runs = np.column_stack([*right, 100 * change])
        slices = np.column_stack([counts[:, :, i, j], effects[:, i, j]])
        same = np.isclose(slices[:, None], runs).all(-1)  # slice, run
        twins = np.isclose(runs[:, None], runs).all(-1)  # runs may be alike
        assert same.any(1).all()
        assert same.mean(0) == approx(twins.mean(0), abs=0.04)
    shuffled, signs, _ = meta.draw_slices(loaded(table), effect, 4000, True)
    assert (shuffled.sum(1) == counts.sum(1)).all() and (np.abs(signs) == np.abs(effects)).all()
    swapped = signs != effects
    assert swapped[effects != 0].mean() == approx(0.5, abs=0.02)
    assert (shuffled[:, 0] == np.where(swapped, counts[:, 1], counts[:, 0]))[effects != 0].all()


def test_the_intervals_of_slices_are_scipys():
    rng = default_rng(0)
    counts, total = rng.binomial(50, 0.6, (5, 2, 2, 6)), np.full((2, 6), 50)
    effects = rng.normal(0, 3, (5, 2, 6))
    found = meta.slice_table(counts, effects, total)
    D = effects.mean(1)
    interval = stats.ttest_1samp(D, 0, axis=1).confidence_interval(0.89)
    low, high = stats.norm.interval(0.89, *meta.slice_posterior(counts, total))
    expected = {"t_mean": D.mean(1), "t_low": interval.low, "t_high": interval.high,
                "paper_low": low, "paper_high": high}
    for name, values in expected.items():
        assert found[name].to_numpy() == approx(values)


def test_tables_figures_and_page(run):
    """The second experiment has a bias, which the shuffled slices must not have."""
    name = "<b>my</b> zero-shot $"
    zero_shot = coin_rows(tasks=8, n=400, models=("a",), experiment=name, acc_extra=0.5,
                          acc_test=0.6)
    rows = pd.concat([coin_rows(tasks=6), zero_shot])
    found = run(rows, "--slices", 60, "--effects", "boost", "bias")
    assert found.end is None and "nan" not in found.out
    slices, shares = csv_of("meta"), csv_of("shares")
    assert len(slices) == 60 * 2 * 2 * (3 + 1) and len(shares) == 2 * 2 * (3 + 1)
    keys = ["experiment", "effect", "model", "kind"]
    shares = shares.set_index(keys).sort_index()
    for key, mine in slices.groupby(keys):
        row = shares.loc[key]
        assert row["threshold"] == (0.08 if "zero-shot" in key[0] else 0.04)
        outside = (mine["paper_mean"].abs() > row["threshold"]).mean()
        assert row["outside"] == approx(outside, abs=1e-5)
        for way in ("paper", "t"):
            beyond = (mine[f"{way}_low"] > 0) | (mine[f"{way}_high"] < 0)
            assert row[way] == approx(beyond.mean(), abs=1e-5)
    biased = shares["t"][name, "bias", "a"]
    assert biased["drawn"] == 1 and biased["shuffled"] < 0.5
    assert all(column in meta.__doc__ for column in [*slices, *shares.reset_index()])
    page = Path("meta/results/report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert name not in page and "&lt;b&gt;my" in page
    for effect, line in zip(("boost", "bias"), found.out.splitlines()):
        expected = []
        for kind in ("drawn", "shuffled"):
            mine = 100 * shares["paper"].xs((effect, kind), level=("effect", "kind"))
            expected.append(f"{mine.min():.0f} to {mine.max():.0f}")
        assert re.findall(r"in (\d+ to \d+) %", line) == expected


def test_all_models_only_where_they_have_the_same_tasks(run):
    """One that lacks tasks is analysed as if alone: here there is but one slice."""
    same = {"acc_extra": 0.5, "acc_test": 0.6}
    few = coin_rows(tasks=2, models=("c",), **same)
    found = []
    for rows in (few, pd.concat([coin_rows(**same), few])):
        run(rows, "--slices", 1)
        slices = csv_of("meta")
        assert "all" not in set(slices["model"])
        mine = slices.query("kind == 'drawn' and model == 'c'")
        found.append(mine[["paper_mean", "paper_low", "t_mean", "t_low"]].to_numpy())
    assert found[0] == approx(found[1])
    run(coin_rows(), "--slices", 5)
    assert set(csv_of("meta")["model"]) == {"a", "b", "all"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("changes", [
    dict(tasks=1), dict(subsamples=2), dict(tasks=1, acc_extra=1, acc_test=1),
    dict(acc_extra=0, acc_test=0)])
def test_small_data(run, changes):
    found = run(coin_rows(**changes), "--slices", 10)
    assert found.end is None and "nan" not in found.out
    if "acc_test" in changes:
        assert not (csv_of("shares")[["paper", "t"]] > 0).any(axis=None)


def test_bad_rows_leave_the_old_page(run):
    run(coin_rows(), "--slices", 5)
    page = Path("meta/results/report.html")
    before = page.read_text()
    assert run(coin_rows(subsamples=1)).end.startswith("error: one subsample per model and task")
    assert page.read_text() == before


# Leaderboards --------------------


NOISY = coin_rows(tasks=2, subsamples=8, models=("a",), n=100)
NOISY["acc_extra"] = np.tile([0.5, 0.7], 8)
NOISE = 2 * 100 * (8 / 7) / 4  # of the mean of two tasks whose accuracies lie 10 points off theirs


@pytest.fixture
def board(run):
    """board(text, rows) -> end, out, and the table of a leaderboard, if there is one."""
    def call(text, rows=NOISY):
        Path("board.csv").write_text(text)
        found = run(rows, "--leaderboard", "board.csv")
        path = Path("meta/results.board/leaderboard.csv")
        if path.exists():
            found.table = pd.read_csv(path)
        return found

    return call


def test_a_leaderboard_by_hand(board):
    """Scores 75, 70, 50: variance 175, so the true gaps are B = 1 - 57.1 / 175 of those seen."""
    found = board("name,score\nsecond,70\nfirst,75\nthird,50\n")
    B = 1 - NOISE / 175
    assert list(found.table["name"]) == ["first", "second", "third"]
    first = found.table.loc[0]
    assert first["gap"] == 5 and first["rank"] == 1
    known = math.sqrt(2 * B * NOISE)  # sd of the true gap, given the scores
    assert first["p_wrong"] == approx(stats.norm.sf(5 * B / known), rel=1e-4)
    for R in (1, 5, 20):
        rerun = math.sqrt(known**2 + 2 * NOISE / R)
        assert first[f"p_swap_{R}"] == approx(stats.norm.sf(5 * B / rerun), rel=1e-4)
    page = Path("meta/results.board/report.html").read_text()
    assert f"Noise: {math.sqrt(NOISE):.2f} points" in page
    assert "with a chance above 11 %: 1 of 2 (noise of a, " in found.out
    assert all(column in meta.__doc__ for column in found.table)


def test_announced_chances_come_true():
    """Boards of 20 entries whose true scores spread as much as their noise. Neighbours whose gap
    alone announces less than .1 are in the wrong order more often; the table says so."""
    seeds = pd.concat([NOISY, NOISY.assign(seed=1)])  # one of each subsample counts
    assert meta.noise_of(loaded(seeds)) == approx(NOISE)
    rng = default_rng(0)
    found = []
    for _ in range(1000):
        true = rng.normal(50, math.sqrt(NOISE), 20)
        scores = true + rng.normal(0, math.sqrt(NOISE), 20)
        entries = pd.DataFrame({"name": np.arange(20), "score": scores})
        entries = entries.sort_values("score", ascending=False, ignore_index=True)
        table = meta.board_table(entries, NOISE)
        gaps = -np.diff(true[entries["name"]])
        again = gaps + rng.normal(0, math.sqrt(2 * NOISE), 19)
        found.append(table[:-1].assign(wrong=gaps < 0, swap=again < 0))
    found = pd.concat(found)
    for announced, true in (("p_wrong", "wrong"), ("p_swap_1", "swap")):
        assert found[announced].mean() == approx(found[true].mean(), abs=0.015)
    clear = found[stats.norm.sf(found["gap"] / math.sqrt(2 * NOISE)) < 0.1]
    assert clear["p_wrong"].mean() == approx(clear["wrong"].mean(), abs=0.025)


def test_rows_without_noise_and_boards_within_it(board):
    """Without noise the rounding to whole texts is left: a variance of 1 / 12 a task."""
    table = board("name,score\nx,62\ny,60\nz,58\n").table
    assert table["p_wrong"].dropna().to_numpy() == approx(0.5, abs=1e-3)
    table = board("name,score\nx,.99\ny,.101\nz,.1\n", NOISY.assign(acc_extra=0.6)).table
    assert table["p_swap_1"][0] == 0
    assert table["p_wrong"][1] == approx(stats.norm.sf(0.1 / math.sqrt(2 / 24)), abs=1e-4)
    page = Path("meta/results.board/report.html").read_text()
    assert "e-" not in page.split("<table")[1] and "nan" not in page


@pytest.mark.parametrize("text, rows, message", [
    ("name,points\nx,1\n", NOISY, "0 columns 'score'"),
    ("name,score\nx,high\ny,.5\n", NOISY, "score is high, not a number"),
    ("name;score\nx;.9\ny;.8\n", NOISY, "name;score"),
    ("name,score\nx,.9\ny,.8\n", coin_rows(subsamples=1), "one subsample of task00")])
def test_bad_boards(board, text, rows, message):
    end = board(text, rows).end
    assert end.startswith("error: ") and message in end
    assert not Path("meta").exists()


def test_a_board_has_a_part_for_each_noise(board):
    rows = pd.concat([coin_rows(), NOISY.assign(m=20)])
    table = board("name,score\nx,.9\ny,.8\n", rows).table
    assert list(zip(table["m"], table["model"]))[::2] == [(10, "a"), (10, "b"), (20, "a")]
