"""meta_analysis.py: the posterior by dense matrices; slices."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from pytest import approx
from scipy import optimize, special

from conftest import ROOT, coin_rows, load_script, path_of

meta = load_script("meta_analysis")
pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def run(said):
    """run(rows, flags...) -> end, out."""
    return lambda rows, *flags: said(meta.main, path_of(rows), *flags, "--out", "page")


def csv_of(name):
    return pd.read_csv(f"page/{name}.csv")


def indicators(pairs):
    """alpha and U of slice_posterior."""
    models, tasks = np.array([*map(list, pairs)]).T[:, :, None]
    return (models == np.unique(models)[1:]) + 0.0, (tasks == np.unique(tasks)) + 0.0


def dense_posterior(right, n, alpha, U):
    """(mode, sd) of beta in one slice: a logistic regression with all parameters in one Newton
    step; scipy finds the mode of sd_U."""
    pairs, J = U.shape
    X = np.column_stack([
        np.ones(2 * pairs), np.repeat([0, 1], pairs), np.vstack([alpha, alpha]), np.vstack([U, U])])
    sd = np.array([1, 1, *[5] * alpha.shape[1], *[1.0] * J])  # of the priors
    theta = np.zeros(len(sd))
    for _ in range(2000):
        p = special.expit(X @ theta)
        covariance = np.linalg.inv(X.T @ (n * p * (1 - p) * X.T).T + np.diag(sd**-2))
        theta += covariance @ (X.T @ (right.ravel() - n * p) - theta / sd**2)
        square = (theta**2 + covariance.diagonal())[-J:].sum()
        sd[-J:] = optimize.minimize_scalar(
            lambda sd: J * math.log(sd) + square / (2 * sd**2) + sd**2 / 2,
            bounds=(0.01, 5), options={"xatol": 1e-9}).x
    return theta[1], math.sqrt(covariance[1, 1])


@pytest.mark.parametrize("pairs, logit", [
    ("a0", 0.5), ("a0 a1 a2 a3 b0 b1 b2 b3", 0.5), ("a0 a1 a2 b1 b2 c0 c1 c2", 0.5),
    ("a0 a1 a2 a3 a4 a5 a6 a7", 3)])
def test_mode_and_curvature_against_dense_matrices(pairs, logit):
    """Near accuracy 1 sd_U takes hundreds of steps."""
    pairs = pairs.split()
    rng = np.random.default_rng(0)
    share = special.expit(rng.normal(logit, 1.5, len(pairs)) + np.array([[0], [0.2]]))
    right = rng.binomial(20, share, (2, *share.shape))
    means, sds = meta.slice_posterior(right, 20, *indicators(pairs))
    for one, mean, sd in zip(right, means, sds):
        assert (mean, sd) == approx(dense_posterior(one, 20, *indicators(pairs)), abs=5e-5)


@pytest.mark.parametrize("name, n, drawn, shuffled", [
    ("few_shot_m100", 500, 0.47, 0.42), ("zero_shot_m100_n100", 100, 0.5, 0.46)])
def test_the_papers_coin_flip(run, name, n, drawn, shuffled):
    """Section 10: 47% of 500 slices (standard error 2.2%), zero-shot 50%."""
    found = run(ROOT / f"tests/published/{name}.csv", "--n", n, "--slices", 1000)
    near = 2.5 * math.sqrt(0.25 / 500 + 0.25 / 1000)
    assert [*csv_of("shares").outside] == approx([drawn, shuffled], abs=near)
    assert "- So one slice says little" in found.out


def test_a_slice_is_one_run(run):
    """Each run is drawn, and a shuffle turns its bias and its answers around."""
    table = coin_rows(tasks=1, subsamples=5, models=("a",), crossed=True)
    run(table, "--slices", 200)
    change = table.eval("acc_test - acc_extra + acc_extra_on_extra - acc_test_on_extra")
    right, runs = 40 * table[["acc_extra", "acc_test"]].to_numpy()[:, :, None], []
    for answers, bias in ((right, 50 * change), (right[:, ::-1], -50 * change)):
        beta, _ = meta.slice_posterior(answers, 40, *indicators(["ax"]))
        runs += zip(beta.round(3), bias.round(3))
    for part, (_, slices) in zip((runs[:5], runs), csv_of("meta").groupby("kind")):
        assert {*zip(slices.paper_mean.round(3), slices.t_mean.round(3))} == {*part}


def test_the_intervals_of_a_slice(run):
    """All drawn slices are the same, for subsamples are. Model b lacks a task."""
    table = coin_rows(subsamples=1).drop(4)
    run(pd.concat([table, table.assign(subsample=2)]), "--slices", 400)
    drawn, shuffled = (slices for _, slices in csv_of("meta").groupby("kind"))
    bias = 100 * (table.acc_test - table.acc_extra)
    D = bias.groupby(table.task).mean()
    t, half = D.mean(), 2.76044 * D.sem()
    right = 40 * table[["acc_extra", "acc_test"]].to_numpy().T[None]
    mean, sd = np.ravel(
        meta.slice_posterior(right, 40, *indicators(zip(table.model, table.task))))
    expected = [18, mean, mean - 1.59819 * sd, mean + 1.59819 * sd, t, t - half, t + half]
    assert [*drawn.iloc[17, 5:]] == approx(expected, rel=1e-4)
    weights = np.array([0.5, 1, 0.5, 0.5, 0.5]) / 3 * bias
    combinations = np.array([*itertools.product([1, -1], repeat=5)]) @ weights
    assert {*shuffled.t_mean.round(2)} == {*combinations.round(2)}


@pytest.mark.parametrize("n, bias, little", [(5000, 0, False), (2000, 0.1, True)])
def test_what_is_said_of_one_slice(run, n, bias, little):
    """That it says little where shuffled slices are claimed in more than 11%, at any bias. The
    threshold is that of the paper's experiment with which a name begins."""
    rows = coin_rows(6, 20, ("a",), n, experiment="zero-shot-packed")
    rows["acc_test"] += bias
    found, shares = run(rows, "--slices", 100), csv_of("shares")
    assert {*shares.threshold} == {0.08} and " plain " in found.out
    assert ("says little" in found.out) == (shares.outside[1] > 0.11) == little
    table = meta.shares_table(pd.read_csv("results.csv"), 100)  # as in a notebook
    pd.testing.assert_frame_equal(table, shares, check_dtype=False)


def test_experiments_are_not_averaged(run):
    """A control has its own answer. The threshold is a flag."""
    rows = coin_rows(subsamples=4)
    rows = pd.concat([rows, rows.assign(experiment="x-answers")])
    out = " ".join(run(rows, "--slices", 5, "--threshold", 0).out.split())
    assert {*csv_of("shares").threshold} == {0}
    for name, shares in csv_of("shares").groupby("experiment"):
        drawn, shuffled = (f"{share:.0%}" for share in shares.outside)
        said = f"{name}: ONE DRAW OF EACH TASK CLAIMS A BIAS IN {drawn} OF SLICES, AND IN {shuffled} "
        assert said in out
    assert "--slices: give a number above 0" in run(rows, "--slices", 0).err
