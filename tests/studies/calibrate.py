"""Do the 89% intervals of a crossed bias hold 89%? Run by hand; it takes 2 minutes on one core.

    python tests/studies/calibrate.py            # prints the table of docs/results.md
    python tests/studies/calibrate.py --alike    # how often the page says that tasks differ
    python tests/studies/calibrate.py --boost    # the boost over the published settings

Each study simulates 4,000 data sets with a known bias (standard error of a share near .89: .005).
In a subsample the two pretrained models answer a share of about d of the n texts of each set
differently, half of them each way. The run's own bias, Normal(true bias, sd) points, adds texts
that only the model that has seen them gets right (or only the other one). d is .03 to .13 by task,
or .01, and varies by a third between subsamples. The wider of the two intervals is computed for all
K at once; in each study block `effects` must give the same for some of the data sets.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import ROOT, load_script  # noqa: E402

CHUNK = 250  # data sets at once
CHUNKS = 16
MARGIN = 1.0  # points
LEAST = 8  # subsamples of each task, before a run may stop
SIZES = (2, 3, 5, 10, (3, 30))  # K of each task, or of the tasks in turn
CHANGES = {"0": [[0]], "1": [[1]], "2": [[2]], "0 and 4": [[0, 4], [4, 0]]}  # sd of the tasks


def simulate(rng, sds, d, bias, most, n):
    """How many of the n texts only the model that has seen them gets right, and only the other one:
    each [data sets, tasks, subsamples, 2 sets of texts]."""
    size = (CHUNK, len(sds), most)
    effect = (bias + sds[:, None] * rng.standard_normal(size)) / 100
    level = rng.uniform(*d, size[:2])[..., None, None] * rng.gamma(8, 1 / 8, (*size, 2))
    seen = level / 2 + np.maximum(effect, 0)[..., None]
    unseen = level / 2 + np.maximum(-effect, 0)[..., None]
    only_seen = rng.binomial(n, seen)
    return only_seen, rng.binomial(n - only_seen, unseen / (1 - seen))


def rule(only_seen, only_unseen, n):
    """Mean and its variance by the spread and by the noise of the texts, of each task after its
    first K subsamples: each [data sets, tasks, most]."""
    change = (only_seen - only_unseen) / n
    noise = (only_seen + only_unseen) / n - change**2
    K = np.arange(1, change.shape[2] + 1)
    D = 100 * change.mean(axis=3)
    mean = D.cumsum(axis=2) / K
    squares = (D**2).cumsum(axis=2) - K * mean**2
    w = 100**2 / (4 * n) * noise.sum(axis=3).cumsum(axis=2) / K + 100**2 / (2 * n**2 * K)
    return mean, np.maximum(squares, 0) / np.maximum(K - 1, 1) / K, w / K


def half_width(v, noise, K):
    """Of the mean over tasks; v, noise and K [..., tasks]."""
    total = v.sum(axis=-1)
    with np.errstate(invalid="ignore"):  # 0 / 0, whose square root decides nothing
        df = total**2 / (v**2 / (K - 1)).sum(axis=-1)
    t = stats.t.ppf(0.945, df) * np.sqrt(total)
    return np.fmax(t, stats.norm.ppf(0.945) * np.sqrt(noise.sum(axis=-1))) / v.shape[-1]


def check(only_seen, only_unseen, n, K, half):
    """Block `effects` must find these half-widths [data sets] with K subsamples [tasks]."""
    script = load_script("fit_model")
    for s in range(5):
        table = {"task": np.repeat(np.arange(len(K)), K), "n": n, "majority": 0.5,
                 "arms": "crossed", "acc_base": 0.4, "acc_base_on_extra": 0.4}
        arms = ("extra", "test")
        for place, ending in enumerate(("", "_on_extra")):
            pair = []
            for answers in (only_unseen, only_seen):
                pair.append(np.concatenate([t[:k, place] for t, k in zip(answers[s], K)]) / n)
            table[f"discordant{ending}"] = pair[0] + pair[1]
            table[f"acc_{arms[0]}{ending}"] = 0.4 + pair[place]
            table[f"acc_{arms[1]}{ending}"] = 0.4 + pair[1 - place]
        tasks = script.task_means(script.add_effects(pd.DataFrame(table)))
        assert np.isclose(script.interval(tasks)[2], half[s], rtol=1e-9), (tasks, half[s])


def study(sds, d, bias, n):
    """Shares of intervals that cover the bias at each of SIZES, then what happens at the stop of
    --margin: the share that covers, mean K, shares of the verdicts No and Yes."""
    rng = np.random.default_rng(1)
    J = len(sds)
    most = 40 + int(60 * ((sds**2).mean() + 2) / J)
    every = np.arange(LEAST, most + 1)
    one = np.arange(CHUNK)
    found = []
    for chunk in range(CHUNKS):
        answers = simulate(rng, sds, d, bias, most, n)
        mean, v, noise = rule(*answers, n)
        columns = []
        for size in SIZES:
            K = np.resize(size, J)
            last = np.arange(J), K - 1
            half = half_width(v[:, *last], noise[:, *last], K)
            if chunk == 0:
                check(*answers, n, K, half)
            columns.append(np.abs(mean[:, *last].mean(axis=1) - bias) <= half)

        late = [part[:, :, LEAST - 1 :].transpose(0, 2, 1) for part in (v, noise)]
        halves = half_width(*late, every[:, None])
        enough = halves <= MARGIN / 2
        assert enough.any(axis=1).mean() > 0.99, "raise `most`"
        first = enough.argmax(axis=1)
        middle = mean[:, :, LEAST - 1 :].mean(axis=1)[one, first]
        half = halves[one, first]
        columns += [np.abs(middle - bias) <= half, every[first],
                    np.abs(middle) + half < MARGIN, np.abs(middle) - half > MARGIN]
        found.append(columns)
    return np.concatenate(found, axis=1).mean(axis=1)


def say_differ(sds, biases, K):
    """Share of data sets in which p_alike is below .05: Mehrotra's F test of the tasks' means."""
    rng = np.random.default_rng(2)
    J = len(sds)
    count = 0
    for _ in range(CHUNKS):
        answers = [simulate(rng, sds[j : j + 1], (0.03, 0.13), biases[j], K, 200) for j in range(J)]
        answers = [np.concatenate(part, axis=1) for part in zip(*answers)]
        mean, v, noise = [part[:, :, -1] for part in rule(*answers, 200)]
        df = v.sum(axis=1) ** 2 / (v**2).sum(axis=1) * (K - 1)
        normal = 1.5982**2 * noise.sum(axis=1) > stats.t.ppf(0.945, df) ** 2 * v.sum(axis=1)
        total = np.where(normal, noise.sum(axis=1), v.sum(axis=1))
        df = np.where(normal, 1e9, df)
        F = J * mean.var(axis=1, ddof=1) / total
        top = np.minimum(J - 1, (J - 1) ** 2 / (1 + (J - 2) * J * (K - 1) / df))
        count += (stats.f.sf(F, top, df) < 0.05).sum()
    return count / (CHUNK * CHUNKS)


def tell_alike():
    """Print how often tasks are said to differ: alike, and with a bias of ±1.06 or ±1.5 in turn."""
    for name, sds in CHANGES.items():
        for J in (2, 5):
            cells = []
            for K in (5, 12):
                for bias in (0, 1.06, 1.5):
                    signs = np.resize([-bias, bias], J)
                    cells.append(f"{100 * say_differ(np.resize(sds[0], J), signs, K):.0f}")
            print("|", " | ".join([name, str(J), *cells]), "|", flush=True)


def tell(name, J, sds, ds, biases, n=200):
    """Print a row of the table: ranges over sds, ds and biases."""
    found = []
    for bias in biases:
        for d in ds:
            found += [study(np.resize(sd, J), d, bias, n) for sd in sds]
    found = np.array(found)
    found[:, :-3] *= 100
    at_margin = 100 * found[-len(ds) * len(sds) :, -2:]
    cells = []
    for cell in [*found[:, :-2].T, *at_margin.T]:
        cells.append(" to ".join(dict.fromkeys([f"{min(cell):.0f}", f"{max(cell):.0f}"])))
    print("|", " | ".join([name, str(J), *cells]), "|", flush=True)


def boost_over_settings():
    """Bootstrap of the mean boost over the published settings, by subsamples of a task and m."""
    rows = pd.concat(map(pd.read_csv, sorted((ROOT / "tests/published").glob("few_shot*.csv"))))
    rows["boost"] = 100 * (rows["acc_extra"] - rows["acc_base"])
    means = rows.groupby(["task", "m", "n", "subsample"])["boost"].mean().unstack()
    grid = means.to_numpy().reshape(50, 4, 100)  # task and m; n; subsample: nan where there is none
    rng = np.random.default_rng(0)
    again = []
    for _ in range(4000):
        times = rng.multinomial(100, np.full(100, 0.01), len(grid))[:, None]
        count = (times * ~np.isnan(grid)).sum(axis=2)
        again.append((np.nansum(times * grid, axis=2) / count).mean())
    print(np.nanmean(grid, axis=2).mean(), np.quantile(again, [0.055, 0.945]), np.std(again))


def main():
    if sys.argv[1:] == ["--boost"]:
        boost_over_settings()
        return
    if sys.argv[1:] == ["--alike"]:
        tell_alike()
        return
    for name, sds in CHANGES.items():
        for J in (1, 2, 5):
            if J >= len(sds):
                tell(name, J, sds, ((0.03, 0.13), (0.01, 0.01)), (0.0, MARGIN))
    for J in (1, 2, 5):  # only 1 text in 100 changes, always in favor of the model that has seen it
        tell("0, n = 50, d = 0", J, [[0]], [(0, 0)], [MARGIN], n=50)
    for name, J, sds in (("1", 1, [1]), ("0 and 2", 2, [0, 2]), ("1", 5, [1])):
        tell(f"{name}, n = 1,000", J, [sds], [(0.01, 0.01)], (0.0, MARGIN), n=1000)


if __name__ == "__main__":
    main()
