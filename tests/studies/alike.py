"""May the test of Alexander and Govern, scipy.stats.alexandergovern on the draws of a setting's
tasks, replace the p_alike of fit_model.py (Mehrotra's F; for two tasks Welch's t)?

    python tests/studies/alike.py   # three minutes on one core

Simulated as in calibrate.py, crossed biases of n = 200: 4,000 data sets a cell, the same for both
tests. `sd`: of the tasks' own draws of luck, in points, in turn. Size: how often tasks are said to
differ (p < .05) that have the same bias; a standard error is .3%. Power: how often where the biases
are -1.06 and +1.06 points in turn, and where one task has +3 and the others 0. A data set in which
a task's draws are all equal has no p by Alexander and Govern, and is not counted as "differ".
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
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
            assert np.isclose(stats.alexandergovern(*draws).pvalue, value, rtol=1e-6), (draws, value)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--chunks", type=int, default=16, help="of 250 data sets")
    chunks = parser.parse_args().chunks
    print("| case | J | sd |", " | ".join(f"K = {K}: ours, AG" for K in DRAWS), "|")
    print("| --- " * (3 + len(DRAWS)) + "|")
    cases = {"size": lambda J: [0] * J, "±1.06": lambda J: np.resize([-1.06, 1.06], J),
             "one at +3": lambda J: [3] + [0] * (J - 1)}
    for case, effects in cases.items():
        for J in TASKS:
            for luck, sds in LUCK.items():
                found = shares(np.resize(sds, J), effects(J), chunks)
                cells = [f"{100 * found[K, 'ours']:.1f}, {100 * found[K, 'AG']:.1f}" for K in DRAWS]
                print("|", " | ".join([case, str(J), luck, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
