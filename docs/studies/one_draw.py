"""One draw, or a few: does the interval hold, and how wide is it? Run by hand, in a minute.

    python docs/studies/one_draw.py            # does it hold? single subsamples of committed rows
    python docs/studies/one_draw.py --widths   # how wide is it? by items, changes and draws
    python docs/studies/one_draw.py --draws    # how wide is it? by draws and their spread
    python docs/studies/one_draw.py --luck     # does that of one draw hold if training has luck?
    python docs/studies/one_draw.py --tenth    # and of several, if the same items are learned?

From one draw the interval of a crossed bias is Normal, from the draw of the texts alone: the luck
of training is not in it. Each single subsample is compared with the mean of the other ones of its
cell. That mean is noisy, too: of K subsamples with variance s², the distance has the variance
s² (1 + 1 / (K - 1)), so that it is multiplied by sqrt((K - 1) / K), to vary as the distance from
the true bias does.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import integrate, stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from calibrate import half_width, rule_of_answers  # noqa: E402
from conftest import ROOT, load_script  # noqa: E402

NAMES = ("bert_tiny_n200", "control", "dose_results", "passes")
FILES = [f"docs/rows/{name}.csv" for name in NAMES]
Z = stats.norm.ppf(0.945)  # of an 89% interval
ITEMS = (15, 100, 300, 1000, 5000)
COLUMNS = ((2, 0.1), (5, 0.03), (5, 0.1), (5, 0.2))  # draws, share that differs
SPREADS = (1, 1.5, 2, 3)  # points
SETS = 4000  # simulated for each number of --widths


def hold_of_single_subsamples(rows):
    """A row per experiment and task: K subsamples, how many have an interval that holds, the
    variance of their biases, and what it would be by the draw of the texts alone."""
    rows = load_script("fit_model").add_effects(
        rows.assign(arms="crossed", item_variance_boost=math.nan))
    rows["variance"] = rows["text_variance_bias"] + rows["one_answer_variance"]
    groups = rows.groupby(["experiment", "task"])
    K = groups["bias"].transform("size")
    mean_of_others = (K * groups["bias"].transform("mean") - rows["bias"]) / (K - 1)
    distance = (rows["bias"] - mean_of_others) * np.sqrt((K - 1) / K)
    rows["holds"] = distance.abs() <= Z * np.sqrt(rows["variance"])
    return rows.groupby(["experiment", "task"]).agg(
        K=("bias", "size"), holds=("holds", "sum"), variance=("bias", "var"),
        text_variance=("variance", "mean"))


def expected_half_width(n, changed, K):
    """Mean half-width, in points, from K draws of two halves of n items, if the two models answer a
    share `changed` differently, the true bias is 0 and runs have no luck. One draw: Normal. More:
    the wider of the Normal and of t, whose standard deviation s varies as chi does."""
    sd = math.sqrt(100**2 / (4 * n) * 2 * changed)
    text_sd = math.sqrt(sd**2 + 100**2 / (2 * n**2 * K))  # one imaginary answer a half
    normal = Z * text_sd / math.sqrt(K)
    if K == 1:
        return normal
    t = stats.t.ppf(0.945, K - 1) * sd / math.sqrt(K * (K - 1))
    chi = stats.chi(K - 1)
    narrow = chi.cdf(normal / t)
    return normal * narrow + integrate.quad(lambda s: t * s * chi.pdf(s), normal / t, np.inf)[0]


def simulated_half_width(n, changed, K, rng):
    """The same by simulation, with the rule of calibrate.py, which checks that it is ours."""
    differ = rng.binomial(n, changed, (SETS, 1, K, 2))
    only_seen = rng.binomial(differ, 0.5)
    _, spread_variance, text_variance = rule_of_answers(only_seen, differ - only_seen, n)
    if K == 1:
        return Z * np.sqrt(text_variance).mean()
    return half_width(spread_variance[:, :, -1], text_variance[:, :, -1], K).mean()


def tell_hold():
    """Print the table of docs/validation.md: a row per file and task, over its experiments."""
    for file in FILES:
        cells = hold_of_single_subsamples(pd.read_csv(ROOT / file))
        for task, part in cells.groupby("task"):
            share = 100 * part["holds"] / part["K"]
            hold = 100 * part["holds"].sum() / part["K"].sum()
            sd, text_sd = np.sqrt(part[["variance", "text_variance"]].mean())
            print(f"| {file} | {task} | {len(part)} | {part['K'].sum()} | {hold:.0f}% "
                  f"| {share.min():.0f} to {share.max():.0f}% | {sd:.1f} | {text_sd:.1f} |")


def tell_widths():
    """Print the table of docs/own_training.md: a row per number of items, a column per number of
    draws and share of items that A and B answer differently. The simulation must agree."""
    rng = np.random.default_rng(0)
    print("| items in each half |", " | ".join([f"{K} draws, {changed:.0%}" for K, changed in COLUMNS]),
          "|\n| --- |" + " --- |" * len(COLUMNS))
    for n in ITEMS:
        cells = []
        for K, changed in COLUMNS:
            half = expected_half_width(n, changed, K)
            if n >= 100:  # the integral takes counts for Normal
                assert abs(simulated_half_width(n, changed, K, rng) / half - 1) < 0.05, (n, K)
            else:
                half = simulated_half_width(n, changed, K, rng)
            cells.append(f"±{half:.1f}")
        print(f"| {n:,} |", " | ".join(cells), "|", flush=True)


def tell_draws():
    """Print the table of docs/own_texts.md: half-widths by draws (rows) and the standard deviation
    of a draw (columns), in points; and how many draws narrow it to half a point."""
    for K in (8, 12, 20, 40, 60, 100):
        cells = [f"±{stats.t.isf(0.055, K - 1) * sd / math.sqrt(K):.2f}" for sd in SPREADS]
        print(f"| {K} |", " | ".join(cells), "|")
    for sd in SPREADS:
        K = 2
        while stats.t.isf(0.055, K - 1) * sd / math.sqrt(K) > 0.5:
            K += 1
        print(f"{K} for an sd of {sd}")


def tell_luck():
    """A line a number of items in each half and sd of luck in points: how often the interval of one
    draw, by the draw of its items, holds, if A and B differ on 5% to 20% of the items."""
    rng = np.random.default_rng(0)
    for luck in (1, 2):
        for n in (200, 1000, 5000):
            shares = []
            for changed in (0.05, 0.2):
                differ = rng.binomial(n, changed, (20000, 1, 1, 2))
                only_seen = rng.binomial(differ, 0.5)
                biases, _, text_variance = rule_of_answers(only_seen, differ - only_seen, n)
                off = biases.ravel() + rng.normal(0, luck, 20000)
                shares.append(np.mean(np.abs(off) < Z * np.sqrt(text_variance.ravel())))
            print(f"luck {luck}, {n} items: {shares[0]:.0%} to {shares[1]:.0%}")


def tell_tenth():
    """A line a number of draws: how often the interval of the bias holds for items like these, if a
    tenth of the items, the same in every draw, are right where they were seen. (100 or 1,000 items
    in each half give the same.)"""
    rng = np.random.default_rng(0)
    for K in (5, 10):
        held = np.mean([tenth_holds(300, K, rng) for _ in range(1000)])
        print(f"300 items, {K} draws: {held:.0%}")


def tenth_holds(n, K, rng, changed=0.03):
    """Half of the learned items are right anyway, so that the true bias is 5 points."""
    learned, right = rng.random(2 * n) < 0.1, rng.random(2 * n) < 0.5
    biases, variances = [], []
    for _ in range(K):
        halves = rng.permutation(np.repeat([0, 1], n))
        seen, unseen = [right ^ (rng.random(2 * n) < changed / 2) for _ in range(2)]
        change = 100 * ((seen | learned) * 1.0 - unseen)
        biases.append(change.mean())
        variances.append(sum(change[halves == half].var() for half in (0, 1)) / (4 * n))
    t = stats.t.ppf(0.945, K - 1) * np.std(biases, ddof=1) / math.sqrt(K)
    normal = Z * math.sqrt((np.mean(variances) + 100**2 / (2 * n**2 * K)) / K)
    return abs(np.mean(biases) - 5) < max(t, normal)


def main():
    tell = {"--widths": tell_widths, "--draws": tell_draws, "--luck": tell_luck,
            "--tenth": tell_tenth}
    tell.get("".join(sys.argv[1:]), tell_hold)()


if __name__ == "__main__":
    main()
