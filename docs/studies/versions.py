"""Does contamination_test.py's order test find models that were trained on the published versions of
items, one version of each drawn at random and published, the others kept?

    python docs/studies/versions.py train --draws 2   # half an hour of one core; a rerun goes on
    python docs/studies/versions.py count   # its tables, from versions.csv
    python docs/studies/versions.py power   # how many items one epoch takes; three minutes

Two kinds of versions, four of each item. *Wording*: a sentence of a movie review (rotten_tomatoes,
50 to 90 characters) in four templates. *Order*: three short neighboring sentences of a movie review
(imdb) in their own order and in three others. Of 250 items of each kind smollm2 reads all versions
(before). In each draw, the published version of each item is drawn. smollm2 is then trained as
run_zero_shot.py trains it (LoRA, 2e-4, batches of four, each text alone) on the published versions
of 200 items for one epoch, or for three, and reads all versions again. In draw 1 it also reads the
50 items that it was not trained on.

Tests of 20 and 50 items take disjoint parts of the 200, so their models were trained on the other
items of the 200, too. Models that did not see the published versions need no training of their own:
versions are drawn again, as if those had been published.
"""

import argparse
import re
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import load_script  # noqa: E402

contam, zero_shot, orders = map(load_script, ["contamination_test", "run_zero_shot", "orders"])
TABLE = Path(__file__).with_suffix(".csv")
TEMPLATES = ("Review: {}", "A viewer wrote: {}", "From a movie review: {}", "Someone said: {}")
VERSIONS, TRAINED, OTHERS = 4, 200, 50  # of an item; items
COLUMNS = [f"log_p_{version}" for version in range(VERSIONS)]
EPOCHS = (1, 3)
RECIPE = {"batch_size": 4, "learning_rate": zero_shot.LEARNING_RATE, "quantize": "none",
          "precision": "float32"}
SIZES = (20, 50, 200)  # items in a test
POWER_SIZES, POWER_TESTS = (50, 200, 350), 200
REDRAWN, NULL = 10**4, 10**5  # draws of the published versions; of the test's own


def train(draws):
    """Append the log p of all versions by the model before and by each trained model."""
    import torch

    torch.set_num_threads(1)
    finished = set()
    if TABLE.exists():
        finished = set(map(tuple, pd.read_csv(TABLE)[["kind", "epochs", "draw"]].to_numpy()))
    model = zero_shot.find_model("smollm2", zero_shot.load_registry())
    net, tokenizer = zero_shot.load_net(model, "none", "float32", "cpu")
    items = {"wording": worded_items(), "order": ordered_items()}
    for draw in range(draws + 1):
        for kind, texts in items.items():
            for epochs in EPOCHS if draw else [0]:
                if (kind, epochs, draw) in finished:
                    continue
                started = time.perf_counter()
                zero_shot.fresh_adapter(net, draw)  # which changes nothing until it is trained
                read, published = texts, pd.Series(dtype=int)
                if draw:
                    published = draw_published(kind, draw)
                    ids = [zero_shot.encode(tokenizer, versions[number])
                           for versions, number in zip(texts, published)]
                    zero_shot.train_adapter(net, ids, {**RECIPE, "epochs": epochs}, draw)
                if draw > 1:
                    read = texts[:TRAINED]
                table = pd.DataFrame({"kind": kind, "epochs": epochs, "draw": draw,
                                      "item": range(len(read))})
                table["published"] = published.astype("Int64")  # empty for items not trained on
                table[COLUMNS] = read_all(net, tokenizer, read).round(2)
                table.to_csv(TABLE, mode="a", header=not TABLE.exists(), index=False)
                print(f"{kind}, {epochs} epochs, draw {draw}: "
                      f"{time.perf_counter() - started:.0f} seconds", flush=True)


def draw_published(kind, draw):
    """Which version of each item is published."""
    rng = np.random.default_rng([draw, len(kind)])
    return pd.Series(rng.integers(VERSIONS, size=TRAINED))


def worded_items():
    """[items][versions] by templates."""
    texts = [text for text in read_texts("rotten_tomatoes") if 50 <= len(text) <= 90]
    return [[template.format(text) for template in TEMPLATES] for text in choose(texts)]


def ordered_items():
    """[items][versions] by the order of three sentences, their own first."""
    passages = []
    for text in read_texts("imdb"):
        sentences = re.split(r"(?<=[.!?]) ", text)
        for start in range(0, len(sentences) - 2, 3):
            three = sentences[start : start + 3]
            if all(18 <= len(sentence) <= 45 for sentence in three):
                passages.append(three)
    rng, items = np.random.default_rng(1), []
    for three in choose(passages):
        drawn = {(0, 1, 2): None}
        while len(drawn) < VERSIONS:
            drawn[tuple(rng.permutation(3).tolist())] = None
        items.append([" ".join([three[k] for k in order]) for order in drawn])
    return items


def read_texts(task):
    texts = zero_shot.load_task(task, zero_shot.load_registry()["tasks"][task]).texts
    return [" ".join(text.replace("<br />", " ").split()) for text in texts]


def choose(items):
    """Different ones, at random."""
    order = np.random.default_rng(0).permutation(len(items))
    different = {str(items[number]): items[number] for number in order}
    return list(different.values())[: TRAINED + OTHERS]


def read_all(net, tokenizer, items):
    """log p [items, versions], in passes of 16 texts of like length."""
    net.eval()
    texts = sorted(sum(items, []), key=len)
    log_p = {}
    for start in range(0, len(texts), 16):
        part = texts[start : start + 16]
        log_p.update(zip(part, orders.log_p(net, tokenizer, part)))
    return np.array([[log_p[text] for text in versions] for versions in items])


def count():
    """Print how often p is below .05 for models that saw the published versions, and for others."""
    table = pd.read_csv(TABLE)
    for kind, rows in table.groupby("kind", sort=False):
        logs, published = {}, {}
        for key, part in rows.groupby(["epochs", "draw"]):
            logs[key] = part[COLUMNS].to_numpy()
            published[key] = part["published"].dropna().to_numpy(int)
        before = logs.pop((0, 0))
        print(f"\n# {kind}: versions of an item differ by {before.std(1, ddof=1).mean():.1f} nats "
              "(sd, model before)")
        seen, clean = [], []
        for (epochs, draw), log in logs.items():
            seen += test_seen(epochs, draw, log[:TRAINED], before[:TRAINED],
                              published[epochs, draw])
            clean.append(test_clean(epochs, draw, log, before, published[epochs, draw]))
        report_seen(pd.DataFrame(seen))
        report_clean(pd.concat(clean))


def first(log, published):
    """[items, versions], with the published version of each item first."""
    others = [np.delete(row, number) for row, number in zip(log, published)]
    return np.column_stack([log[np.arange(len(log)), published], others])


def test_seen(epochs, draw, log, before, published):
    """Tests of a model that was trained on the published versions, of disjoint parts of items."""
    contam.DRAWS = NULL  # for speed
    log, before, tests = first(log, published), first(before, published), []
    for size in SIZES:
        for start in range(0, len(log) - size + 1, size):
            part = slice(start, start + size)
            change = log[part] - before[part]
            gain = change[:, 0] - change[:, 1:].mean(1)
            tests.append({"epochs": epochs, "items": size, "draw": draw, "gain": gain.mean(),
                          "absolute": contam.order_p(log[part])[0],
                          "relative": contam.order_p(log[part], before[part])[0]})
    return tests


def test_clean(epochs, draw, log, before, trained_on):
    """Tests of REDRAWN draws of published versions that the model was not trained on."""
    rng, tests, some = np.random.default_rng(draw), [], slice(OTHERS)
    shifts = rng.integers(1, VERSIONS, size=(REDRAWN, OTHERS))
    unpublished = (trained_on[some] + shifts) % VERSIONS
    cases = [("an unpublished version", log[some], before[some], unpublished)]
    if len(log) > TRAINED:
        any_version = rng.integers(VERSIONS, size=(REDRAWN, OTHERS))
        cases.append(("other items", log[TRAINED:], before[TRAINED:], any_version))
    for name, after, untrained, drawn in cases:
        p = {"before": p_of_draws(untrained, drawn), "absolute": p_of_draws(after, drawn),
             "relative": p_of_draws(after - untrained, drawn)}
        tests.append(pd.DataFrame({"trained on": name, "epochs": epochs, **p}))
    return pd.concat(tests)


def p_of_draws(log, drawn):
    """p_exact of each row of drawn versions [draws, items], by one sample of random ones."""
    rng, items = np.random.default_rng(0), np.arange(len(log))
    null = np.zeros(NULL)
    for values in log:
        null += rng.choice(np.unique(values), NULL)  # equal versions count once
    sums = log[items, drawn].sum(1)
    p = (NULL - np.searchsorted(np.sort(null), sums - 1e-9) + 1) / (NULL + 1)
    expected = contam.order_p(first(log, drawn[0]))[0]
    assert abs(p[0] - expected) < 0.01, (p[0], expected)
    return p


def power():
    """Print how often one epoch is found with a reference: tests of items drawn with replacement
    from those on which a model was trained."""
    contam.DRAWS = 2000  # for speed: p at .05 is known to .005
    table, rng = pd.read_csv(TABLE), np.random.default_rng(0)
    for kind, rows in table.groupby("kind", sort=False):
        before = rows[rows["epochs"] == 0][COLUMNS].to_numpy()[:TRAINED]
        for draw, part in rows[rows["epochs"] == 1].groupby("draw"):
            published = part["published"].dropna().to_numpy(int)
            change = first(part[COLUMNS].to_numpy()[:TRAINED] - before, published)
            for items in POWER_SIZES:
                p = [contam.order_p(change[rng.integers(TRAINED, size=items)])[0]
                     for _ in range(POWER_TESTS)]
                share = np.mean(np.less(p, contam.LEVEL))
                print(f"{kind}, draw {draw}, {items} items: {share:.2f}", flush=True)


def report_seen(tests):
    """Flags and median p-values by epochs and items."""
    parts = tests.groupby(["epochs", "items"])
    table = parts.size().to_frame("tests").assign(gain=parts["gain"].mean().round(2))
    for kind in ("absolute", "relative"):
        table[f"{kind}: flagged"] = parts[kind].agg(lambda p: (p < contam.LEVEL).sum())
        table[f"{kind}: median p"] = parts[kind].median().map("{:.2g}".format)
    print(f"trained on the published versions\n{table.to_string()}")


def report_clean(tests):
    """Shares of flags, and of flags again for those draws that are flagged before."""
    kinds = ["before", "absolute", "relative"]
    tests = tests.assign(**(tests[kinds] < contam.LEVEL))
    table = tests.groupby(["trained on", "epochs"])[kinds].mean()
    again = tests[tests["before"]].groupby(["trained on", "epochs"])[kinds[1:]].mean()
    table = table.join(again.add_suffix(" again")).map("{:.1%}".format)
    print(f"{OTHERS} items, {REDRAWN} draws of published versions for each model, flagged:\n"
          f"{table.to_string()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("train").add_argument("--draws", type=int, default=2)
    steps.add_parser("count")
    steps.add_parser("power")
    args = parser.parse_args()
    if args.step == "train":
        train(args.draws)
    else:
        {"count": count, "power": power}[args.step]()


if __name__ == "__main__":
    main()
