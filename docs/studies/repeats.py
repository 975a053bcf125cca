"""Are innocent models flagged where an item's list of versions holds a text twice?

    python docs/studies/repeats.py   # a minute

Items have three versions, one of them drawn at random and published. In some items two of the three
are the same text, as tools that paraphrase make them, so it is published in two of three draws. No
model was trained on anything: log p of a text is normal (sd 3 nats between the versions of an
item, of the size measured in versions.py), and the repeated text is the likelier one by `gap` nats. The
test counts a text that stands twice once, since equal orders of a shard must count once, so it takes
each of the two texts for equally likely to be published. Before: the items are tested as they are.
After: contamination_test.py refuses such an item and says to leave it out; the others are tested.

2026-11-27, shares of 400 innocent models that are flagged (p < .05):

| items | with a repeat | gap | before | after |
| --- | --- | --- | --- | --- |
| 50 | 100% | 0 | 3.8% | too few |
| 50 | 100% | 3 | 44.8% | too few |
| 50 | 100% | 6 | 63.5% | too few |
| 50 | 25% | 0 | 4.0% | 7.2% |
| 50 | 25% | 3 | 8.5% | 7.2% |
| 50 | 25% | 6 | 13.5% | 7.2% |
| 200 | 100% | 0 | 4.5% | too few |
| 200 | 100% | 3 | 85.0% | too few |
| 200 | 100% | 6 | 98.8% | too few |
| 200 | 25% | 0 | 2.8% | 4.2% |
| 200 | 25% | 3 | 17.0% | 4.2% |
| 200 | 25% | 6 | 35.2% | 4.2% |
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import load_script  # noqa: E402

contam = load_script("contamination_test")
contam.DRAWS = 4000  # for speed: p at .05 is known to .003
SD = 3.0  # nats, between versions of an item


def flagged(rng, items, share, gap, models):
    """Shares of models that are flagged, with the items that have a repeat and without them."""
    before, after = [], []
    for _ in range(models):
        log = rng.normal(0, SD, (items, 3))
        repeats = rng.random(items) < share
        log[repeats, 0] += gap
        log[repeats, 1] = log[repeats, 0]
        log = rng.permuted(log, axis=1)  # the published one comes first
        before.append(contam.order_p(log)[0])
        if not repeats.all():
            after.append(contam.order_p(log[~repeats])[0])
    return [f"{np.mean(np.less(p, contam.LEVEL)):.1%}" if p else "too few" for p in (before, after)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", type=int, default=400)
    models = parser.parse_args().models
    for items in (50, 200):
        for share in (1, 0.25):
            for gap in (0, 3, 6):
                rng = np.random.default_rng(0)
                cells = [items, f"{share:.0%}", gap, *flagged(rng, items, share, gap, models)]
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
