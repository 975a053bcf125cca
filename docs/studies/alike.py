"""May the test of Alexander and Govern, scipy.stats.alexandergovern on the draws of a setting's
tasks, replace the p_alike of fit_model.py (Mehrotra's F; for two tasks Welch's t)?

    python docs/studies/alike.py   # a minute on one core

Simulated as in calibrate.py, crossed biases of n = 200: 2,000 data sets a cell, the same for both
tests. `sd`: of the tasks' own draws of luck, in points, in turn. Size: how often tasks are said to
differ (p < .05) that have the same bias; a standard error is .5%. Power: how often where the biases
are -1.06 and +1.06 points in turn, and where one task has +3 and the others 0. A data set in which
a task's draws are all equal has no p by Alexander and Govern, and is not counted as "differ".

2026-11-27. **Keep ours.** Of two tasks both tests are Welch's and agree (from three draws on). Of
more, Alexander and Govern's (AG) is too often wrong with few draws: with 25 tasks it calls 6 to 9%
of alike ones different at K = 3, 6 to 7% at 4 and 6% at 8, ours 2 to 4%. Its power is not the same,
either: it is better where the tasks that differ have less luck than others (sd 0 and 4), and worse
where one of many tasks has leaked and all have the same luck, which is the case that a mean hides
(one of 25 at +3, K = 8: 24 to 40%, ours 48 to 86%; one of five: 64 to 86%, ours 74 to 96%). And it
has no p where a task's draws are equal.

| case | J | sd | K = 2: ours, AG | K = 3: ours, AG | K = 4: ours, AG | K = 8: ours, AG | K = 12: ours, AG |
| --- | --- | --- | --- | --- | --- | --- | --- |
| size | 2 | 0 | 0.9, 2.6 | 1.7, 3.1 | 2.4, 3.9 | 3.0, 4.6 | 3.3, 4.9 |
| size | 2 | 1.4 | 1.6, 2.6 | 2.6, 2.9 | 3.5, 3.6 | 4.5, 4.3 | 4.5, 4.4 |
| size | 2 | 0 and 4 | 3.4, 4.4 | 5.4, 5.4 | 5.0, 5.0 | 5.8, 5.8 | 5.0, 5.0 |
| size | 2 | 4 and 0 | 3.5, 4.7 | 5.2, 5.4 | 5.1, 5.1 | 5.1, 4.8 | 5.1, 5.1 |
| size | 5 | 0 | 1.3, 2.4 | 1.8, 4.4 | 2.1, 5.3 | 2.5, 4.9 | 3.4, 4.2 |
| size | 5 | 1.4 | 1.7, 3.1 | 2.0, 4.5 | 3.2, 4.0 | 4.5, 5.2 | 5.0, 5.8 |
| size | 5 | 0 and 4 | 2.9, 5.4 | 3.9, 4.8 | 4.0, 5.4 | 5.2, 4.8 | 5.4, 4.5 |
| size | 5 | 4 and 0 | 1.8, 6.6 | 2.7, 6.1 | 3.9, 4.6 | 3.8, 4.7 | 3.6, 4.2 |
| size | 25 | 0 | 1.9, 0.2 | 2.4, 6.7 | 2.8, 7.3 | 3.3, 5.9 | 3.6, 4.8 |
| size | 25 | 1.4 | 0.8, 1.2 | 1.7, 7.8 | 2.8, 6.8 | 3.9, 5.9 | 4.2, 4.8 |
| size | 25 | 0 and 4 | 0.4, 3.1 | 2.1, 8.9 | 2.7, 6.7 | 3.7, 6.0 | 3.9, 4.9 |
| size | 25 | 4 and 0 | 0.8, 3.5 | 2.2, 8.6 | 2.8, 6.3 | 3.9, 5.9 | 3.4, 5.1 |
| ±1.06 | 2 | 0 | 4.9, 7.2 | 20.2, 20.6 | 33.8, 35.3 | 74.6, 75.4 | 90.5, 91.1 |
| ±1.06 | 2 | 1.4 | 4.4, 6.2 | 11.5, 11.1 | 18.9, 17.9 | 46.1, 45.2 | 66.8, 66.2 |
| ±1.06 | 2 | 0 and 4 | 4.5, 5.2 | 7.7, 7.8 | 11.5, 11.5 | 21.6, 21.2 | 32.6, 32.5 |
| ±1.06 | 2 | 4 and 0 | 4.0, 5.6 | 8.1, 7.9 | 11.1, 11.0 | 19.9, 19.7 | 32.4, 32.2 |
| ±1.06 | 5 | 0 | 6.5, 9.2 | 22.6, 28.8 | 43.1, 46.4 | 88.8, 92.0 | 98.2, 99.0 |
| ±1.06 | 5 | 1.4 | 4.5, 7.9 | 11.1, 14.0 | 21.0, 23.5 | 60.2, 59.8 | 83.9, 83.5 |
| ±1.06 | 5 | 0 and 4 | 3.8, 6.4 | 7.9, 8.1 | 9.7, 9.8 | 24.1, 20.8 | 37.6, 36.2 |
| ±1.06 | 5 | 4 and 0 | 2.9, 9.0 | 4.8, 11.0 | 7.3, 13.2 | 17.6, 30.4 | 29.2, 49.1 |
| ±1.06 | 25 | 0 | 27.2, 7.8 | 70.0, 72.6 | 94.2, 96.0 | 100.0, 100.0 | 100.0, 100.0 |
| ±1.06 | 25 | 1.4 | 4.5, 7.2 | 31.4, 40.2 | 62.1, 66.5 | 99.4, 99.0 | 100.0, 100.0 |
| ±1.06 | 25 | 0 and 4 | 2.3, 6.2 | 8.4, 18.4 | 15.3, 24.3 | 49.9, 61.1 | 80.8, 89.6 |
| ±1.06 | 25 | 4 and 0 | 2.0, 7.4 | 6.3, 18.6 | 11.3, 24.7 | 47.4, 67.0 | 80.3, 92.2 |
| +3 | 2 | 0 | 10.0, 12.6 | 35.4, 35.8 | 57.6, 58.1 | 94.3, 94.4 | 99.3, 99.3 |
| +3 | 2 | 1.4 | 6.2, 8.0 | 19.8, 18.9 | 34.6, 33.1 | 73.7, 73.1 | 92.0, 91.5 |
| +3 | 2 | 0 and 4 | 5.1, 6.1 | 10.9, 10.6 | 15.8, 15.4 | 37.6, 37.1 | 56.8, 56.4 |
| +3 | 2 | 4 and 0 | 6.3, 7.3 | 12.2, 12.4 | 18.9, 18.6 | 38.6, 37.9 | 57.8, 57.4 |
| +3 | 5 | 0 | 9.8, 10.2 | 32.2, 24.6 | 56.5, 37.5 | 95.6, 86.5 | 99.8, 97.8 |
| +3 | 5 | 1.4 | 4.1, 7.5 | 15.4, 14.9 | 30.0, 23.9 | 74.2, 63.8 | 93.2, 88.1 |
| +3 | 5 | 0 and 4 | 3.8, 10.8 | 8.5, 24.0 | 11.9, 40.2 | 31.2, 84.7 | 54.6, 97.4 |
| +3 | 5 | 4 and 0 | 2.9, 8.0 | 5.9, 9.4 | 9.3, 9.3 | 24.2, 21.1 | 41.5, 33.0 |
| +3 | 25 | 0 | 9.4, 0.9 | 21.2, 12.8 | 38.1, 18.0 | 86.4, 40.5 | 98.2, 69.2 |
| +3 | 25 | 1.4 | 1.8, 2.1 | 5.5, 11.7 | 11.5, 13.1 | 47.9, 24.1 | 75.9, 45.1 |
| +3 | 25 | 0 and 4 | 1.0, 4.5 | 2.8, 14.4 | 4.2, 17.9 | 10.2, 42.0 | 19.9, 70.3 |
| +3 | 25 | 4 and 0 | 1.2, 5.0 | 3.4, 9.8 | 4.9, 7.8 | 13.3, 9.8 | 22.6, 14.5 |
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import calibrate  # noqa: E402

DRAWS, TASKS = (2, 3, 4, 8, 12), (2, 5, 25)
LUCK = {"0": [0], "1.4": [1.4], "0 and 4": [0, 4], "4 and 0": [4, 0]}
N, LEVEL = 200, 0.05


def alexander_govern(biases):
    """p-values of the tasks' equality from draws [data sets, tasks, K]; nan if draws are equal."""
    v = biases.shape[2] - 1
    mean, variance = biases.mean(axis=2), biases.var(axis=2, ddof=1) / (v + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = 1 / variance
        weight = weight / weight.sum(axis=1, keepdims=True)
        grand = (weight * mean).sum(axis=1, keepdims=True)
        t2 = (mean - grand) ** 2 / variance
        a = v - 0.5
        b, c = 48 * a**2, np.sqrt(a * np.log1p(t2 / v))
        z = c + (c**3 + 3 * c) / b
        z -= (4 * c**7 + 33 * c**5 + 240 * c**3 + 855 * c) / (10 * b**2 + 8 * b * c**4 + 1000 * b)
    p = stats.chi2.sf((z**2).sum(axis=1), mean.shape[1] - 1)
    return np.where(variance.min(axis=1) > 1e-9, p, np.nan)


def shares(sds, effects, chunks):
    """{(K, test): share of data sets in which the tasks are said to differ}."""
    rng, found = np.random.default_rng(3), {}
    for _ in range(chunks):
        answers = [calibrate.simulate(rng, np.array([sd]), (0.03, 0.13), effect, max(DRAWS), N)
                   for sd, effect in zip(sds, effects)]
        answers = [np.concatenate(part, axis=1) for part in zip(*answers)]
        biases, _ = calibrate.biases_of(*answers, N)
        table = calibrate.rule_of_answers(*answers, N)
        for K in DRAWS:
            with np.errstate(divide="ignore", invalid="ignore"):  # where all draws are equal
                ours = calibrate.p_of_alike_tasks(*[part[:, :, K - 1] for part in table], K)
            theirs = alexander_govern(biases[:, :, :K])
            check(biases[:2, :, :K], theirs)
            for name, p in (("ours", ours), ("AG", theirs)):
                found.setdefault((K, name), []).append(np.mean(p < LEVEL))
    return {key: np.mean(values) for key, values in found.items()}


def check(biases, p):
    """The same as SciPy's."""
    for draws, value in zip(biases, p):
        if not np.isnan(value):
            expected = stats.alexandergovern(*draws).pvalue
            assert np.isclose(expected, value, rtol=1e-6), (draws, value)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--chunks", type=int, default=8, help="of 250 data sets")
    chunks = parser.parse_args().chunks
    print("| case | J | sd |", " | ".join(f"K = {K}: ours, AG" for K in DRAWS), "|")
    print("| --- " * (3 + len(DRAWS)) + "|")
    cases = {"size": lambda J: [0] * J, "±1.06": lambda J: np.resize([-1.06, 1.06], J),
             "+3": lambda J: [3] + [0] * (J - 1)}
    for case, effects in cases.items():
        for J in TASKS:
            for luck, sds in LUCK.items():
                found = shares(np.resize(sds, J), effects(J), chunks)
                cells = [f"{100 * found[K, 'ours']:.1f}, {100 * found[K, 'AG']:.1f}" for K in DRAWS]
                print("|", " | ".join([case, str(J), luck, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
