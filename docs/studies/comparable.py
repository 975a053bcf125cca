"""How often are honest answers refused as "No verdict", since models answered alike, other items or
other prompts? (contamination_test.py --answers; the table is in docs/validation.md.)

    python docs/studies/comparable.py --sets 200

Models of equal ability answer two random halves. `kept`: the share of a model's answers that the
next one keeps; the rest is drawn anew. Prompts have lengths with a long tail, each model its own
template, and 2% of the items have a twin in the other half. Crossed: the original, and two models
that were trained on one half each.

Models that keep 80% of the answers or fewer answer everything alike in no table. At 95% kept, where
98% to 99% of the grades are equal, up to a third of small tables cannot be told from a cache,
whatever the rule.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import load_script  # noqa: E402

contam = load_script("contamination_test")


def honest_rows(rng, size, accuracy, kept, crossed):
    """Answers of three models to `size` items in each half, as parse_answers leaves them."""
    hard = rng.normal(0, 1.5, 2 * size)
    easy = np.quantile(rng.logistic(size=100_000) + rng.normal(0, 1.5, 100_000), accuracy)
    lengths = rng.lognormal(5, 1, 2 * size).astype(int) + 10
    number = np.arange(2 * size)
    text = np.where(rng.random(2 * size) < 0.02, number // 2, number)
    half = rng.permutation(np.repeat(contam.HALVES, size))
    parts, score = [], None
    for model, trained_on in enumerate(["neither", *contam.HALVES]):
        is_kept = (rng.random(2 * size) < kept) & bool(parts)
        fresh = rng.logistic(size=2 * size) + hard < easy
        score = np.where(is_kept, score, fresh)
        template = "" if crossed else "x" * 50 * model
        prompts = [f"{template} {k} ".ljust(lengths[k], "a") for k in text]
        parts.append(pd.DataFrame({
            "task": "benchmark", "draw": "1", "model": f"model {model}", "half": half,
            "trained_on": trained_on, "item": number, "score": score.astype(float),
            "prompt": prompts}))
    return pd.concat(parts, ignore_index=True)


def reason_of(rows, arm):
    """As contamination_test.py asks. Crossed answers have one prompt for each item, or are refused."""
    if contam.alike_models(rows.pivot_table("score", "item", arm)):
        return "alike"
    if arm == "trained_on":
        return ""
    return max(contam.other_prompts(answers) for _, answers in rows.groupby("model"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", type=int, default=200)
    sets = parser.parse_args().sets
    rng = np.random.default_rng(0)
    print("| items in each half | accuracy | kept | design | no verdict | alike | other |")
    for kept, size, accuracy, arm in itertools.product(
            (0, 0.8, 0.95), (30, 100, 300), (0.5, 0.9), ("model", "trained_on")):
        reasons = []
        for _ in range(sets):
            rows = honest_rows(rng, size, accuracy, kept, arm == "trained_on")
            reasons.append(reason_of(rows, arm))
        found = pd.Series(reasons)
        alike = found.str.contains("alike").mean()
        withheld = (found != "").mean()
        print(f"| {size} | {accuracy:.0%} | {kept:.0%} | {arm} | {withheld:.1%} | {alike:.1%} | "
              f"{withheld - alike:.1%} |", flush=True)


if __name__ == "__main__":
    main()
