"""Do the 89 % intervals hold 89 %, and is what the sentences promise true? Run by hand.

    python tests/studies/calibrate.py tests/bert_tiny_n200.csv                # crossed arms: 3 minutes
    python tests/studies/calibrate.py tests/published/few_shot_m50.csv --n 50 500    # plain arms

Truth is known by resampling: a task's biases, centred, are its noise. --sets data sets are drawn from it with
replacement (J random tasks, with replacement where the file has fewer), a true effect is added, and what a user sees
after 1, 2, 3, ... subsamples of each task is computed for all of them at once, anew, from the formulas of
docs/results.md. The first rows of a crossed file go through fit_model.py too, which must agree. A share near .89 of
4,000 sets has a standard error of .005.

Studies, each line with the shares of intervals that cover the truth, and of verdicts within and beyond the margin
of 1 point; with no effect "beyond" is wrong, with an effect equal to the margin both are:
    coverage    K subsamples of each of J tasks, and half the interval's mean width. With crossed arms also where the
                effect differs from run to run (normal, 1 or 2 points), of which the noise of the texts knows nothing
    pilot       after K subsamples the user reads how many are needed, runs so many in all, once, and takes that
                verdict (one look); or takes the pilot's where it has one (two looks)
    until       the user adds a subsample of each task until a verdict comes
    --margin    run_experiment.py --margin 1: from the third subsample of each task on, the least K at which the
                interval's half-width is at most half the margin (100 at most)
    agreeing    crossed arms of a strong model, n = 50: of the texts 1 in 100 is answered differently, always in favour
                of the model that has seen it: a bias equal to the margin. Without the imaginary text beside it
"""

import argparse
import contextlib
import io
import math
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import load_script  # noqa: E402

MARGIN = 1.0
CHUNK = 250  # sets at once
PRIOR = 5  # degrees of freedom that the noise of the texts is worth


class Seen(NamedTuple):
    """What is known after 1, 2, ... `most` subsamples of each of J tasks, each [sets, most], in points."""

    middle: np.ndarray
    half: np.ndarray  # of the 89 % interval
    se_1: np.ndarray  # the standard error with one subsample a task
    tasks: np.ndarray  # plain arms: degrees of freedom per degree of a task; crossed: J


def noises_of(table, effect="bias"):
    """{model, or "all" for their mean: a list over tasks of [rows, 2]: w, centred effect}, in points. w is nan where
    arms are plain or the effect is a boost."""
    table = table.copy()
    low, high = {"bias": ("extra", "test"), "boost": ("base", "extra")}[effect]
    table["D"] = 100 * (table[f"acc_{high}"] - table[f"acc_{low}"])
    table["w"] = np.nan
    if "discordant" in table:
        low, high = {"bias": ("test", "extra"), "boost": ("base", "test")}[effect]
        mirror = 100 * (table[f"acc_{high}_on_extra"] - table[f"acc_{low}_on_extra"])
        if effect == "bias":
            noise = table["discordant"] - (table["D"] / 100) ** 2
            noise += table["discordant_on_extra"] - (mirror / 100) ** 2
            table["w"] = np.maximum(1e4 / (4 * table["n"]) * noise, (50 / table["n"]) ** 2 / 12)
        table["D"] = (table["D"] + mirror) / 2
    models = dict([*table.groupby("model")])
    if len(models) > 1:
        models["all"] = table.groupby(["task", "subsample"], as_index=False)[["w", "D"]].mean()
    found = {}
    for model, rows in models.items():
        tasks = [task[["w", "D"]].to_numpy() for _, task in rows.groupby("task")]
        found[model] = [task - [0, task[:, 1].mean()] for task in tasks]
    return found


def draw(noises, J, sets, most, rng):
    """(w, D), each [sets, J, most]."""
    again = J > len(noises)
    tasks = np.array([rng.choice(len(noises), J, replace=again) for _ in range(sets)])
    grid = np.zeros((len(noises), max(map(len, noises)), 2))
    for task, noise in enumerate(noises):
        grid[task, : len(noise)] = noise
    sizes = np.array([len(noise) for noise in noises])[tasks]
    rows = (rng.random((sets, J, most)) * sizes[..., None]).astype(int)
    found = grid[tasks[..., None], rows]
    return found[..., 0], found[..., 1]


def see(w, D, n, floor, imaginary=1):
    """Seen, from the formulas of docs/results.md, by cumulative sums."""
    J, K = D.shape[1], np.arange(1, D.shape[2] + 1)
    means = D.cumsum(2) / K
    squares = np.maximum((D**2).cumsum(2) - K * means**2, 0)
    if np.isnan(w).any():
        with np.errstate(invalid="ignore", divide="ignore"):
            variance = np.maximum(squares / (K - 1), floor)
            tasks = variance.sum(1) ** 2 / (variance**2).sum(1)
            df = tasks * (K - 1)
    else:
        texts = w.cumsum(2) / K + imaginary * 1e4 * 2 / (4 * n * n * K)
        beyond = (squares - (K - 1) * texts).sum(1) / (J * np.maximum(K - 1, 1))
        variance = texts + np.maximum(beyond, 0)[:, None]
        tasks = np.full((len(D), len(K)), J)
        df = np.broadcast_to(J * (K - 1) + PRIOR, tasks.shape)
    half = student(df) * np.sqrt((variance / K).sum(1)) / J
    return Seen(means.mean(1), half, np.sqrt(variance.sum(1)) / J, tasks)


def student(df):
    """The .945 quantile of Student's t, each df once."""
    values, places = np.unique(df, return_inverse=True)
    return stats.t.ppf(0.945, values)[places].reshape(np.shape(df))


def needed(se_1, tasks, K, prior, most):
    """Subsamples of each task at which the half-width is half the margin [sets], se_1 at its upper end."""
    df = tasks * (K - 1) + prior
    upper = se_1 * np.sqrt(df / stats.chi2.ppf(0.3, df))
    R = np.full(len(se_1), 1 if prior else 2)
    wide = np.ones(len(se_1), dtype=bool)
    while wide.any():
        half = student(tasks * (R - 1) + prior) * upper / np.sqrt(R)
        wide = (half > MARGIN / 2) & (R < most)
        R = R + wide
    return R


def at(values, K):
    """The value of each set after its K subsamples."""
    return values[np.arange(len(values)), np.asarray(K) - 1]


def say(words, low, high, truth, R=None):
    within, beyond = (-MARGIN < low) & (high < MARGIN), (low > MARGIN) | (high < -MARGIN)
    covers = (low <= truth) & (truth <= high)
    size = "" if R is None else f", subsamples {np.mean(R):.1f} ({np.percentile(R, 5):.0f} to {np.percentile(R, 95):.0f})"
    print(f"{words}: covers {covers.mean():.3f}, within {within.mean():.3f}, beyond {beyond.mean():.3f}{size}", flush=True)


def until_known(seen):
    """Subsamples of each task when a run by --margin ends [sets]."""
    known = seen.half[:, 2:100] <= MARGIN / 2
    return np.where(known.any(1), 3 + known.argmax(1), 100)


def study(name, noises, n, floor, J, sets, most, rng):
    """Print all studies of J tasks."""
    prior = 0 if np.isnan(noises[0]).any() else PRIOR
    sizes = (1, 2, 3, 5, 10) if prior else (2, 3, 5, 10, 20)
    for luck in (0, 1, 2) if prior else (0,):
        parts = []
        for _ in range(sets // CHUNK):
            w, D = draw(noises, J, CHUNK, most, rng)
            parts.append(see(w, D + luck * rng.standard_normal(D.shape), n, floor))
        seen = Seen(*map(np.concatenate, zip(*parts)))
        words = []
        for K in sizes:
            middle, half = seen.middle[:, K - 1], seen.half[:, K - 1]
            words.append(f"{np.mean(np.abs(middle) <= half):.3f} (±{half.mean():.2f})")
        print(f"{name}, J = {J}, effects of runs differ by {luck}, K = {sizes}: covers {', '.join(words)}", flush=True)
        if prior:
            R = until_known(seen)
            say(f"{name}, J = {J}, effects of runs differ by {luck}, --margin", at(seen.middle - seen.half, R),
                at(seen.middle + seen.half, R), 0, R)
        if not luck:
            plain = seen
    for effect in (0, MARGIN):
        low, high = plain.middle + effect - plain.half, plain.middle + effect + plain.half
        done = (low > MARGIN) | (high < -MARGIN) | ((-MARGIN < low) & (high < MARGIN))
        where = f"{name}, J = {J}, effect {effect:g}"
        for K in sizes[:1] * bool(prior) + (3, 5, 10):
            R = np.maximum(K, needed(plain.se_1[:, K - 1], plain.tasks[:, K - 1], K, prior, most))
            say(f"{where}, pilot of {K}, one look", at(low, R), at(high, R), effect, R)
            R = np.where(done[:, K - 1], K, R)
            say(f"{where}, pilot of {K}, two looks", at(low, R), at(high, R), effect, R)
        first = 0 if prior else 1
        R = np.where(done[:, first:].any(1), 1 + first + done[:, first:].argmax(1), most)
        say(f"{where}, until a verdict", at(low, R), at(high, R), effect, R)
        if prior:
            R = until_known(plain)
            say(f"{where}, --margin", at(low, R), at(high, R), effect, R)


def agreeing(sets, rng, n=50, share=0.01):
    """Print what becomes of a bias equal to the margin where the arms hardly ever disagree."""
    for J in (1, 2, 5):
        counts = rng.binomial(n, share, (2, sets, J, 100)) / n  # of both sets: discordant, and the bracket too
        w = 1e4 / (4 * n) * (counts - counts**2).sum(0)
        D = 50 * counts.sum(0)
        for imaginary in (1, 0):
            seen = see(np.maximum(w, (50 / n) ** 2 / 12), D, n, 0, imaginary)
            R = until_known(seen)
            say(f"agreeing models, J = {J}, imaginary texts {imaginary}, --margin", at(seen.middle - seen.half, R),
                at(seen.middle + seen.half, R), MARGIN, R)


def check(table, n):
    """fit_model.py must see in the first rows of a file what is seen here."""
    noises = noises_of(table.assign(model="any"))["any"]
    centres = [50 * (task["acc_test"] - task["acc_extra"] + task["acc_extra_on_extra"] - task["acc_test_on_extra"]).mean()
               for _, task in table.groupby("task")]
    w = np.array([noise[:100, 0] for noise in noises])
    D = np.array([noise[:100, 1] + centre for noise, centre in zip(noises, centres)])
    seen = see(w[None], D[None], n, 0)
    with tempfile.TemporaryDirectory() as folder:
        for K in (1, 2, 5, 40):
            first = pd.concat([task[:K] for _, task in table.groupby("task")])
            first.to_csv(f"{folder}/rows.csv", index=False)
            with contextlib.redirect_stdout(io.StringIO()):
                load_script("fit_model").main(
                    [f"{folder}/rows.csv", "--draws", "0", "--effects", "bias", "--out", f"{folder}/{K}"])
            row = pd.read_csv(f"{folder}/{K}/effects.csv").query("target == 'these tasks'").iloc[0]
            assert math.isclose(row["estimate"], seen.middle[0, K - 1], rel_tol=1e-4)
            assert math.isclose(row["high"] - row["estimate"], seen.half[0, K - 1], rel_tol=1e-4)
            args = seen.se_1[:, K - 1], seen.tasks[:, K - 1], K, PRIOR, 3000
            assert row["needed"] == needed(*args)[0], (row["needed"], needed(*args))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("path", type=Path, help="a results file with several subsamples of each task")
    parser.add_argument("--effect", choices=("boost", "bias"), default="bias")
    parser.add_argument("--n", type=int, nargs="+", help="(all)")
    parser.add_argument("--tasks", type=int, nargs="+", default=(1, 2, 5, 25), help="J (1 2 5 25)")
    parser.add_argument("--sets", type=int, default=4000)
    parser.add_argument("--most", type=int, default=120, help="subsamples of a task (120)")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = pd.read_csv(args.path)
    if "discordant" in rows:
        agreeing(args.sets, rng)
    for n in args.n or sorted(set(rows["n"])):
        table = rows[rows["n"] == n]
        floor = (100 / n) ** 2 / 12
        if "discordant" in table:
            floor /= 4
            check(table, n)
        for model, noises in noises_of(table, args.effect).items():
            if not np.isnan(noises[0]).any():
                for task, noise in enumerate(noises):
                    w, D = draw([noise], 1, args.sets, 120, rng)
                    seen = see(w, D, n, floor)
                    R = until_known(seen)
                    say(f"n = {n}, {model}, task {task} alone, --margin", at(seen.middle - seen.half, R),
                        at(seen.middle + seen.half, R), 0, R)
            for J in args.tasks:
                study(f"n = {n}, {model}", noises, n, floor, J, args.sets, args.most, rng)


if __name__ == "__main__":
    main()
