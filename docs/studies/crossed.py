"""Crossed answers: does the interval of the boost hold, and do the checks spare honest tables? Run
by hand, in two minutes.

    python docs/studies/crossed.py          # the boost's interval, with items as the population
    python docs/studies/crossed.py checks   # honest tables that are refused, and faults

Each table draws its items anew; half of the answers of the original are right. 30% of the items
are mobile: after a training, each of these is right with a chance of its own (Beta with a mean of
.5), so that an item's change from the original correlates between draws, as it does in
docs/rows/crossed_example.csv. Trainings have luck: in each, all these chances are shifted alike,
by a Normal number whose standard deviation is given in points of accuracy. So the true boost and
the true bias are 0.

2026-11-27, with 200 to 2,000 items, two to ten draws and a luck of 0 to 2 points: t over draws
alone, as before, holds the boost in 18% to 85% of the tables (without luck, five draws: 29% to
30%), the wider of it and the draw of the items in 83% to 94%, and both added in 87% to 97%. Of
tables whose answers are missing at random, 0.3% are refused.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import load_script  # noqa: E402

contam = load_script("contamination_test")
TABLES, TAIL, MOBILE, SHAPE = 1000, 0.055, 0.3, 0.25  # shape: of Beta


def answers_of(items, draws, luck, rng):
    """(base [items], right [draws, half trained on, items], number of the half [draws, items])"""
    base = rng.random(items) < 0.5
    mobile = rng.random(items) < MOBILE
    chance = rng.beta(SHAPE, SHAPE, items)
    shift = rng.normal(0, luck / 100 / MOBILE, (draws, 2, 1))
    after = rng.random((draws, 2, items)) < (chance + shift)
    right = np.where(mobile, after, base)
    halves = rng.permuted(np.tile(np.arange(items) % 2, (draws, 1)), axis=1)
    return base, right, halves


def boosts_of(base, right, halves):
    """(boost of each draw, variance of their mean by the draw of the items, correlation of items'
    changes between draws), in points."""
    unseen = np.where(halves == 1, right[:, 0], right[:, 1])
    changes = 100 * (unseen - base.astype(float))
    item_variance = changes.mean(0).var(ddof=1) / len(base)
    return changes.mean(1), item_variance, np.corrcoef(changes)[0, 1]


def as_table(base, right, halves):
    """The same answers as an author's table."""
    rows = [pd.DataFrame({"trained_on": "original", "draw": "", "half": "", "right": base * 1})]
    for draw, of_draw in enumerate(right, 1):
        for half, of_model in enumerate(of_draw):
            rows.append(pd.DataFrame({"trained_on": f"h{half}", "draw": draw, "right": of_model * 1,
                                      "half": pd.Series(halves[draw - 1]).map("h{}".format)}))
    table = pd.concat([part.rename_axis("item").reset_index() for part in rows], ignore_index=True)
    return table.assign(model="mine")


def tell_boost():
    """A line a case: shares of intervals that hold the true boost, and mean half-widths, of t over
    draws, of the wider of it and the draw of the items, and of the root of both variances' sum."""
    rng = np.random.default_rng(0)
    print("| items | draws | luck | correlation | t over draws | wider of two | both added |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for items in (200, 600, 2000):
        for draws in (2, 3, 5, 10):
            for luck in (0, 1, 2):
                tell_case(items, draws, luck, rng)


def tell_case(items, draws, luck, rng):
    cases = []
    for _ in range(TABLES):
        boosts, item_variance, correlation = boosts_of(*answers_of(items, draws, luck, rng))
        variance, t = boosts.var(ddof=1) / draws, stats.t.isf(TAIL, draws - 1)
        spread, of_items = t * variance**0.5, stats.norm.isf(TAIL) * item_variance**0.5
        cases.append([boosts.mean(), correlation, spread, max(spread, of_items),
                      (spread**2 + of_items**2) ** 0.5])
    distance, correlation, *half = np.transpose(cases)
    words = [f"{np.mean(np.abs(distance) <= each):.0%}, ±{each.mean():.1f}" for each in half]
    print(f"| {items} | {draws} | {luck} | {correlation.mean():.2f} |", " | ".join(words), "|")


def tell_checks():
    """A line a case of 300 items and five draws: the share of tables that are refused."""
    print("| answers that are missing | refused | bias without the check |\n| --- | --- | --- |")
    cases = {"1% of each model, at random": (0.01, 0, 0),
             "5% of the items, for all models": (0, 0.05, 0),
             "10% of the wrong answers to seen items, draw 1, one model": (0, 0, 0.1),
             "20% of the wrong answers to seen items, draw 1, one model": (0, 0, 0.2)}
    for words, (of_model, of_items, of_wrong) in cases.items():
        refused, biases, rng = 0, [], np.random.default_rng(2)
        for _ in range(TABLES):
            _, right, halves = answers_of(300, 5, 1, rng)
            is_seen = halves[:, None] == np.arange(2)[:, None]  # [draws, half trained on, items]
            lost = (rng.random(right.shape) < of_model) | (rng.random(300) < of_items)
            lost[0, 0] |= is_seen[0, 0] & ~right[0, 0] & (rng.random(300) < of_wrong)
            kept = ~lost.any(1)[0]  # of draw 1
            gains = np.where(halves[0] == 0, 1, -1) * (right[0, 0] * 1.0 - right[0, 1])
            biases.append(50 * sum(gains[kept & (halves[0] == half)].mean() for half in (0, 1)))
            try:
                contam.check_missing(lost.sum(), (lost & is_seen).sum())
            except ValueError:
                refused += 1
        print(f"| {words} | {refused / TABLES:.1%} | {np.mean(biases):+.2f} (draw 1) |", flush=True)


def main():
    answers = answers_of(200, 3, 1, np.random.default_rng(1))
    rows, *_ = contam.parse_answers(as_table(*answers))
    found = contam.cross_answers(rows)  # whose number is the one simulated here
    boosts, item_variance, _ = boosts_of(*answers)
    assert np.isclose(1e4 * found["item_variance_boost"], item_variance).all()
    if sys.argv[1:] == ["checks"]:
        tell_checks()
    else:
        tell_boost()


if __name__ == "__main__":
    main()
