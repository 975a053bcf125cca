"""Do intervals of the bias hold where texts belong together? A simulation, in half a minute.

    python docs/studies/grouped.py

A benchmark has 3,000 texts in groups of 1, 5 or 50. A group moves all its texts, in all draws: how
hard they are, and whether the model that read them answers them better, or worse, than the other
one. The true bias, the mean over the benchmark, is near 0 or near 2 points. Draws are made by
split_rows of run_experiment.py with --group, bias and intervals as in fit_model.py: t over draws;
the draw of the texts, as if each were drawn alone; the wider of the two, which is fit_model.py's.
Columns: the share of 1,000 studies in which the 89% interval holds the true bias.
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import load_script  # noqa: E402

N, TEXTS, STUDIES = 200, 3000, 1000
EASE, GAIN = 0.25, 0.2  # a group moves its texts' chances by up to these; all stay within 0 and 1


def draw_biases(rng, split, groups, ease, gain):
    """Of one draw in each study, from what each group adds to chances [studies, groups]: (its bias
    in points, the variance by the draw of the texts)."""
    changes, variances = [], []
    for name in ("test", "extra"):
        of = groups[split[name]]
        luck = rng.random((STUDIES, N))  # of both models: their answers hardly differ
        unseen = luck < 0.5 + ease[:, of]
        seen = luck < 0.5 + ease[:, of] + gain[:, of]
        change = seen.astype(float) - unseen
        changes.append(100 * change.mean(1))
        variances.append(100**2 / (4 * N) * ((change != 0).mean(1) - change.mean(1) ** 2))
    return np.mean(changes, axis=0), np.sum(variances, axis=0)


def coverage(size, draws, bias):
    rng, split_rows = np.random.default_rng(size), load_script("run_experiment").split_rows
    groups = np.arange(TEXTS) // size
    shape = STUDIES, groups.max() + 1
    ease, gain = rng.uniform(-EASE, EASE, shape), bias + rng.uniform(-GAIN, GAIN, shape)
    found = []
    for k in range(1, draws + 1):
        split = split_rows(groups % 2, 50, N, k, groups.tolist())
        found.append(draw_biases(rng, split, groups, ease, gain))
    biases, variances = np.moveaxis(found, 0, 1)  # [draws, studies]
    miss = abs(biases.mean(0) - 100 * gain.mean(1))
    by_draws = stats.t.ppf(0.945, draws - 1) * biases.std(0, ddof=1) / np.sqrt(draws)
    by_texts = stats.norm.ppf(0.945) * np.sqrt(variances.sum(0)) / draws
    return [np.mean(miss <= half) for half in (by_draws, by_texts, np.maximum(by_draws, by_texts))]


def main():
    print("| texts of a group | draws | true bias | t over draws | draw of texts | the wider |\n"
          "| --- | --- | --- | --- | --- | --- |")
    for size in (1, 5, 50):
        for draws in (3, 10, 40):
            for bias in (0, 0.02):
                shares = [f"{share:.3f}" for share in coverage(size, draws, bias)]
                print(f"| {size} | {draws} | {100 * bias:+.0f} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
