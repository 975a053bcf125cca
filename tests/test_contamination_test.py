"""contamination_test.py: log-probabilities against a plain loop, p-values against brute force and the published log, a test
that stays silent where nothing was seen and speaks where it was, and a table that agrees with the runs it is made of."""

import csv
import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from conftest import CACHE, ROOT, load_script

PAPER = os.environ.get("PAPER_DATA") or ROOT.parent / "shared" / "paper"
WORDS = "river stone green paper quick north salt window apple seven music cold glass horse metal night seed wheel cloud hand".split()


@pytest.fixture(scope="session")
def contam():
    return load_script("contamination_test")


@pytest.fixture
def opened(contam):
    """Load a model folder: opened(folder, *flags) -> (net, args)."""

    def load(folder, *flags):
        torch.set_num_threads(1)
        args = contam.parse_args(["--model", str(folder), *map(str, flags)])
        return contam.open_model(contam.find_model(str(folder), contam.load_registry(), CACHE), args, "cpu"), args

    return load


def make_examples(count, seed=0, size=5):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size)) for _ in range(count)]


# ------------------------------------------------------------------------------------------------------------
# Log-probabilities
# ------------------------------------------------------------------------------------------------------------


def plain_log_p(folder, sequence, context, stride, first=1):
    """log p by transformers' own forward, one token at a time: token i is predicted from the first window (they begin at
    0, stride, 2 stride, …) that reaches it, so from tokens[start : i]. Unbatched, no padding, no hook."""
    import transformers

    lm = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    total = 0.0
    for i in range(first, len(sequence)):
        start = next(start for start in range(0, len(sequence), stride) if i - 1 < start + context)
        with torch.no_grad():
            logits = lm(input_ids=torch.tensor([sequence[start:i]])).logits[0, -1].double()
        total += torch.log_softmax(logits, 0)[sequence[i]].item()
    return total


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom", "opt"])
def test_log_probabilities_equal_one_token_at_a_time(kind, contam, opened, model_dir):
    folder, rng = model_dir(kind), np.random.default_rng(1)
    sequences = [rng.integers(1000, 30000, size).tolist() for size in (2, 31, 9, 8, 10, 17, 9)]
    for context, stride in ((8, 3), (8, 8), (5, 1), (64, 32)):
        expected = [plain_log_p(folder, sequence, context, stride) for sequence in sequences]
        assert np.ptp(expected) > 10
        net, _ = opened(folder, "--context", context, "--stride", stride)
        for limit in (1, 20, 1000):
            np.testing.assert_allclose(contam.score_sequences(net, sequences, limit), expected, rtol=2e-5)
    assert contam.score_sequences(net, [[7]], 10)[0] == 0  # nothing is predicted


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "bloom"])
def test_reused_prefixes_change_nothing(kind, contam, opened, model_dir, monkeypatch):
    folder, rng = model_dir(kind), np.random.default_rng(2)
    blocks = [rng.integers(1000, 30000, size).tolist() for size in (12, 9, 15, 10)]
    whole = [tuple([101, *itertools.chain(*order)]) for order in itertools.permutations(blocks)]
    most = rng.integers(1000, 30000, 9).tolist()
    pair = [(101, *most, last) for last in (5, 6)]  # they differ in the last token alone
    sequences = [*whole[::-1], *pair, pair[0][:-1], (7, 8), (9,)]
    families = contam.share_prefixes(sequences, 100)
    assert sorted(number for _, numbers in families for number in numbers) == list(range(27))
    assert all(len({sequences[i][:prefix] for i in numbers}) == 1 and prefix < min(len(sequences[i]) for i in numbers) for prefix, numbers in families)
    monkeypatch.setattr(contam, "SAVED", 2.0)
    assert contam.share_prefixes(sequences, 100) == []
    net, _ = opened(folder)
    expected = contam.score_sequences(net, sequences, 300)
    assert expected[0] == pytest.approx(plain_log_p(folder, list(sequences[0]), 100, 50), rel=2e-5)
    monkeypatch.undo()
    runs, own = [], contam.score_family
    monkeypatch.setattr(contam, "score_family", lambda *args: runs.append(own(*args)) or runs[-1])
    for limit in (1, 60, 1000):
        np.testing.assert_allclose(contam.score_sequences(net, sequences, limit), expected, rtol=2e-5)
    assert len(runs) > 3  # reuse did happen
    monkeypatch.setattr(contam, "score_family", lambda *args: own(*args) + 1)  # an architecture that cannot
    np.testing.assert_allclose(contam.score_sequences(net, sequences, 300), expected, rtol=1e-6)
    assert contam.share_prefixes(sequences, 12) == [] or max(len(sequences[i]) for _, numbers in contam.share_prefixes(sequences, 12) for i in numbers) <= 12


@pytest.mark.parametrize("length, context, stride", [(1, 4, 2), (4, 4, 2), (5, 4, 2), (11, 4, 3), (100, 7, 7), (23, 8, 1)])
def test_windows_score_every_token_once_with_as_much_context_as_there_is(length, context, stride, contam):
    found = list(contam.windows(length, context, stride))
    assert [i for start, end, first in found for i in range(first, end)] == list(range(length))
    assert all(end - start <= context and start <= first < end for start, end, first in found)
    assert all(first - start >= context - stride for start, _, first in found[1:])


def test_the_first_token_is_scored_and_published_leaves_it_out(contam, opened, model_dir, tokenizer):
    folder = model_dir("gpt2")
    examples = ["Stocks fall\n### Answer: Business", "A long match\n### Answer: Sports"]
    net, _ = opened(folder)
    text = tokenizer("\n\n".join(examples))["input_ids"]
    assert text[0] == tokenizer.cls_token_id and text[-1] == tokenizer.sep_token_id
    assert contam.tokenise_order(net, examples, False) == text[:-1]  # its beginning, no end, nothing between the examples but blank lines
    own = contam.tokenise_order(net, examples, True)
    assert own == [token for example in examples for token in tokenizer(example)["input_ids"]] and own.count(tokenizer.cls_token_id) == 2
    net.tokenizer = type("Bare", (), {"eos_token_id": 102, "sep_token_id": 102, "__call__": lambda self, text: {"input_ids": [9, 8]}})()
    assert contam.tokenise_order(net, examples, False) == [net.begin, 9, 8]  # as for GPT-2, whose tokenizer adds no beginning
    # so the first token of the text counts, as a loop from the first token after the beginning says
    assert contam.score_sequences(net, [[101, 9, 8]], 10)[0] == pytest.approx(plain_log_p(folder, [101, 9, 8], 50, 25), rel=1e-5)
    assert contam.score_sequences(net, [[9, 8]], 10)[0] == pytest.approx(plain_log_p(folder, [9, 8], 50, 25), rel=1e-5)


def test_shards_are_scored_order_by_order_and_no_sequence_twice(contam, opened, model_dir, tokenizer):
    folder = model_dir("llama")
    examples = ["red apple", "cold night", "seven wheels of glass", "salt", "red apple", "red apple", "salt"]
    net, args = opened(folder, "--max-orders", 2, "--permutations", 9)
    shards = contam.cut_shards(examples, 3)
    assert shards == [examples[:3], examples[3:5], examples[5:]]
    log = contam.score_shards(net, shards, args)

    def plain(texts):
        return plain_log_p(folder, tokenizer("\n\n".join(texts))["input_ids"][:-1], 64, 32)

    assert log["enumerated"] == [False, True, True] and [len(row) for row in log["shuffled_logprobs"]] == [9, 1, 1]
    possible = [plain([shards[0][i] for i in order]) for order in itertools.permutations(range(3))]
    assert log["canonical_logprobs"] == pytest.approx([plain(shard) for shard in shards], rel=2e-5)
    assert all(min(abs(value - other) for other in possible) < 1e-3 for value in log["shuffled_logprobs"][0])
    assert log["shuffled_logprobs"][1:] == [pytest.approx([plain(shard[::-1])], rel=2e-5) for shard in shards[1:]]
    # shard 3 is shard 2 the other way round: the same two sequences
    assert log["canonical_logprobs"][2] == log["shuffled_logprobs"][1][0]
    drawn = {tuple(order) for order in contam.shard_orders(3, 2, 9, [0, 0])[0]}
    assert log["sequences"] == len(drawn) + 2


def test_orders_are_enumerated_or_drawn(contam):
    for size in range(1, 6):
        orders, complete = contam.shard_orders(size, 120, 50, 0)
        assert complete and orders[0] == list(range(size)) and len(orders) == math.factorial(size) == len(set(map(tuple, orders)))
    orders, complete = contam.shard_orders(6, 120, 50, [0, 3])
    assert not complete and orders[0] == list(range(6)) and len(orders) == 51 and all(sorted(order) == list(range(6)) for order in orders)
    assert orders == contam.shard_orders(6, 120, 50, [0, 3])[0] != contam.shard_orders(6, 120, 50, [0, 4])[0]
    counts = np.bincount([order[0] for order in contam.shard_orders(2, 1, 4000, 0)[0][1:]])
    assert abs(counts[0] - 2000) < 4 * math.sqrt(1000)  # the canonical order is drawn as often as the other


# ------------------------------------------------------------------------------------------------------------
# p-values
# ------------------------------------------------------------------------------------------------------------


def random_gaps(rng, sizes, shift=0.0):
    return [np.array([0.0, *(rng.normal(-shift, 2, size - 1))]) for size in sizes]


def brute_p(gaps):
    sums = [sum(values) for values in itertools.product(*map(list, gaps))]
    return sum(value >= -1e-12 for value in sums) / len(sums)


@pytest.mark.parametrize("sizes", [(2,), (2, 2, 2), (6, 2, 6), (2, 24, 6, 2), (2,) * 10, (3, 5, 2, 4)])
def test_permutation_p_equals_brute_force(sizes, contam):
    rng = np.random.default_rng(len(sizes))
    for shift in (-1.0, 0.0, 3.0):
        gaps = random_gaps(rng, sizes, shift)
        p, low, high, method = contam.permutation_p(gaps)
        assert method == "enumeration" and p == low == high == brute_p(gaps)
        mid, low, high = contam.convolution_p(gaps)
        assert low - 1e-12 <= p <= high + 1e-12 and high - low < 0.01 + 2 / math.prod(sizes) and mid == pytest.approx(p, abs=1e-3)
        p_random, low, high = contam.monte_carlo_p(gaps, 100_000)
        assert p_random == pytest.approx(p, abs=5 * (p * (1 - p) / 100_000) ** 0.5 + 2e-5) and low <= p_random <= high


def test_many_shards_by_convolution_are_the_sign_flip_test_and_monte_carlo_agrees(contam):
    rng = np.random.default_rng(5)
    counts = rng.integers(1, 30, 200)  # whole numbers: the sign-flip p by convolution of counts, with Python's own integers
    gaps = [np.array([0.0, float(value)]) if rng.random() < 0.45 else np.array([0.0, -float(value)]) for value in counts]
    ways = {0: 1}
    for gap in gaps:
        new = {}
        for total, number in ways.items():
            for value in gap:
                new[total + int(value)] = new.get(total + int(value), 0) + number
        ways = new
    exact = sum(number for total, number in ways.items() if total >= 0) / 2**200
    p, low, high, method = contam.permutation_p(gaps)
    assert method == "convolution" and low <= exact <= high and p == pytest.approx(exact, rel=1e-3)
    assert high - low < 0.005 and contam.monte_carlo_p(gaps)[0] == pytest.approx(exact, abs=5 * (exact * (1 - exact) / 1e6) ** 0.5)
    tail = [np.array([0.0, -1.0])] * 300  # the canonical order of every shard is the best: p = 2^-300, far below any Monte Carlo
    assert contam.permutation_p(tail)[0] == pytest.approx(2.0**-300, rel=1e-9)
    assert contam.permutation_p(random_gaps(rng, (120,) * 40))[3] == "Monte Carlo"


def test_the_t_test_is_the_published_one(contam):
    values = np.random.default_rng(0).normal(0.3, 1, 40)
    library = stats.ttest_1samp(values, 0, alternative="greater")
    t = library.statistic * math.sqrt(40 / 39)  # ddof 0 makes the deviation smaller by this much
    assert contam.t_test(values) == pytest.approx(stats.t.sf(t, 39), rel=1e-12) and contam.t_test(values) != pytest.approx(library.pvalue, rel=1e-3)


def test_the_published_log_gives_the_published_p(contam, capsys, tmp_path):
    path = ROOT.parent.joinpath(PAPER, "contamination_log_extra.json")
    if not path.exists():
        pytest.skip(f"the published log is not here ({path}): set PAPER_DATA to its folder")
    found = contam.analyse_log(contam.read_log(path))
    assert found["shards"] == 256 and found["informative"] == 244 and found["orders"] == 500
    assert found["p_published"] == pytest.approx(0.336248, abs=1e-6) and found["p_published"] == pytest.approx(json.loads(path.read_text())["pval"], abs=1e-9)
    assert found["p_distinct"] == pytest.approx(0.3865, abs=5e-5)
    assert found["p_low"] <= found["p_exact"] <= found["p_high"] and found["p_high"] - found["p_low"] < 1e-3
    assert found["p_exact"] == pytest.approx(0.386, abs=1.5e-3)
    contam.main(["--from-log", str(path)])
    assert "p published  0.336248" in capsys.readouterr().out
    # an oracle of its own: random signs of the 244 differences
    log, rng = json.loads(path.read_text()), np.random.default_rng(1)
    half = np.array([c - s for c, row in zip(log["canonical_logprobs"], log["shuffled_logprobs"]) for s in set(row) - {c}]) / 2
    signs = rng.choice([-1.0, 1.0], (200_000, len(half))) @ half >= half.sum()
    assert found["p_exact"] == pytest.approx(signs.mean(), abs=4 * 0.5 / math.sqrt(200_000))


# ------------------------------------------------------------------------------------------------------------
# Silent where nothing was seen, loud where it was
# ------------------------------------------------------------------------------------------------------------


def test_p_is_uniform_on_a_model_that_never_saw_the_examples(contam, opened, model_dir):
    """Many random canonical orders of the same 24 examples: 12 shards of two. Every ordered pair is scored once."""
    examples = make_examples(24)
    net, args = opened(model_dir("gpt2"))
    pairs = list(itertools.permutations(range(24), 2))
    scores = contam.score_sequences(net, [contam.tokenise_order(net, [examples[i], examples[j]], False) for i, j in pairs], 1024)
    score, rng = dict(zip(pairs, scores)), np.random.default_rng(2)
    p, p_t = [], []
    for _ in range(600):
        order = rng.permutation(24).tolist()
        shards = list(zip(order[::2], order[1::2]))
        found = contam.analyse_log({"canonical_logprobs": [score[a, b] for a, b in shards], "shuffled_logprobs": [[score[b, a]] for a, b in shards]})
        p.append(found["p_exact"])
        p_t.append(found["p_distinct"])
    assert stats.kstest(p, "uniform").pvalue > 0.01 and stats.kstest(p_t, "uniform").pvalue > 0.01
    assert 0.02 < np.mean(np.array(p) < 0.05) < 0.08
    assert stats.kstest(np.array(p) * 0.8, "uniform").pvalue < 1e-4  # this many orders would show a fault


def test_p_is_uniform_with_drawn_orders_of_longer_shards(contam):
    """log p a random function of the order, shards of 4, of which 10 orders are drawn with repeats: the exact p stays uniform."""
    rng, p = np.random.default_rng(3), []
    for _ in range(500):
        log = {"canonical_logprobs": [], "shuffled_logprobs": []}
        for _ in range(3):
            table = {order: rng.normal() for order in itertools.permutations(range(4))}
            canonical = tuple(rng.permutation(4).tolist())  # the data's order; drawn orders are relative to it
            orders, complete = contam.shard_orders(4, 1, 10, int(rng.integers(2**31)))
            values = [table[tuple(canonical[i] for i in order)] for order in orders]
            assert not complete
            log["canonical_logprobs"].append(values[0])
            log["shuffled_logprobs"].append(values[1:])
        p.append(contam.analyse_log(log)["p_exact"])
    assert stats.kstest(p, "uniform").pvalue > 0.01


@pytest.fixture(scope="module")
def trained(model_dir, tokenizer):
    """A small GPT-2 overtrained on the canonical order of 24 examples, and one trained alike on new orders at every step."""
    import transformers

    examples, folders = make_examples(24, 7), {}
    for kind in ("canonical", "shuffled"):
        folder = model_dir("gpt2", initializer_range=0.05)
        lm = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()  # without dropout: overtraining is wanted
        optimizer, rng = torch.optim.AdamW(lm.parameters(), lr=1e-2), np.random.default_rng(0)
        torch.set_num_threads(1)
        for _ in range(120):
            order = np.arange(24) if kind == "canonical" else rng.permutation(24)
            packs = ["\n\n".join(examples[i] for i in order[start : start + 4]) for start in range(0, 24, 4)]
            ids = torch.tensor([tokenizer(pack)["input_ids"][:-1] for pack in packs])  # common words: one token each
            loss = lm(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        lm.save_pretrained(folder)
        folders[kind] = folder
    return examples, folders


def test_overtraining_on_the_canonical_order_is_flagged_and_on_other_orders_is_not(contam, trained, tmp_path, capsys):
    examples, folders = trained
    file, p = tmp_path / "examples.json", {}
    file.write_text(json.dumps(examples))
    for kind, folder in folders.items():
        flags = ["--shards", "6", "--threads", "1", "--log", str(tmp_path / f"{kind}.json")]  # shards of 4, as the packs trained on
        contam.main(["--examples", str(file), "--model", str(folder), *flags])
        p[kind] = json.loads((tmp_path / f"{kind}.json").read_text())
    print({kind: (log["p_exact"], log["p_published"]) for kind, log in p.items()})
    assert p["canonical"]["p_exact"] < 0.01 and p["canonical"]["p_published"] < 0.01
    assert p["shuffled"]["p_exact"] > 0.05 and p["shuffled"]["p_published"] > 0.05


# ------------------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(contam, tmp_path, monkeypatch, benchmark_csv, model_dir):
    """Run the script in an empty folder on a benchmark made by hand and a tiny GPT-2."""
    monkeypatch.chdir(tmp_path)
    folder = model_dir("gpt2")

    def go(*flags, model=folder):
        contam.main(["--csv", str(benchmark_csv), "--model", str(model), "--m", "4", "--n", "6", "--threads", "1", *map(str, flags)])

    go.folder = folder
    return go


def test_a_run_tests_the_pairs_of_the_subsample_and_its_log_says_the_same(contam, start, benchmark_csv, capsys, tokenizer):
    start("--subsample", "2", "--shards", "2", "--log", "log.json")
    text = capsys.readouterr().out
    log = json.loads(open("log.json").read())
    assert "sequence evaluations: 12; the published procedure: 2 x (1 + 50) = 102, 8.5 times as many" in text
    assert log["shard_sizes"] == [3, 3] and [len(row) for row in log["shuffled_logprobs"]] == [5, 5] and log["settings"]["subsample"] == 2
    # the examples, by the data and the split alone
    with open(benchmark_csv, newline="") as file:
        rows = list(csv.DictReader(file))
    classes = sorted({row["label"] for row in rows})
    labels = np.array([classes.index(row["label"]) for row in rows])
    test = [rows[i] for i in load_script("run_zero_shot").split_rows(labels, 4, 6, 2)["test"]]
    pairs = [f"### Text: {row['text']}\n### Answer: {row['label']}" for row in test]
    expected = plain_log_p(start.folder, tokenizer("\n\n".join(pairs[:3]))["input_ids"][:-1], 2048, 1024)
    assert log["canonical_logprobs"][0] == pytest.approx(expected, rel=1e-5)
    contam.main(["--from-log", "log.json"])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("p ")] == [line for line in text.splitlines() if line.startswith("p ")]


def test_a_pasted_cell_runs(start, benchmark_csv, tmp_path, capsys):
    """Without __file__, under another name; tasks.json in the current folder."""
    shutil.copy(ROOT / "tasks.json", tmp_path)
    cell = {"__name__": "notebook"}
    exec((ROOT / "contamination_test.py").read_text(encoding="utf-8"), cell)
    cell["main"](["--csv", str(benchmark_csv), "--model", str(start.folder), "--m", "4", "--n", "6", "--threads", "1"])
    assert "p exact" in capsys.readouterr().out


def test_nf4_runs_on_the_cpu(start, model_dir, capsys):
    import bitsandbytes  # noqa: F401

    folder = model_dir("llama", hidden_size=64, intermediate_size=128)
    start("--log", "whole.json", model=folder)
    start("--quantize", "nf4", "--log", "nf4.json", model=folder)
    whole, nf4 = (np.array(json.loads(open(name).read())["canonical_logprobs"]) for name in ("whole.json", "nf4.json"))
    assert np.isfinite(nf4).all() and not np.allclose(whole, nf4, rtol=1e-5) and np.allclose(whole, nf4, rtol=0.2)


def test_long_texts_are_cut_and_the_form_is_the_papers(contam):
    # typed from appendix G
    text = "Blair gives partial Iraq apology Tony Blair has offered his Labour party a partial apology for waging war in Iraq"
    assert contam.write_pair(text, "World") == f"### Text: {text}\n### Answer: World"
    assert contam.write_pair("x" * 5000, "a") == f"### Text: {'x' * 1000}\n### Answer: a"


def test_500_short_examples_take_20_times_fewer_evaluations(contam, opened, model_dir):
    net, args = opened(model_dir("gpt2"))
    shards = contam.cut_shards(make_examples(500, size=3), 256)
    assert [len(shard) for shard in shards] == [2] * 244 + [1] * 12
    assert 256 * (1 + args.permutations) / contam.score_shards(net, shards, args)["sequences"] >= 20
    args.max_orders, args.published = 1, True  # 50 draws of each shard, as published: still no sequence twice
    log = contam.score_shards(net, shards[:20] + shards[-2:], args)
    assert log["sequences"] == 42 and not any(log["enumerated"][:20]) and all(len(row) == 50 for row in log["shuffled_logprobs"][:20])
    assert all({*row} == {log["canonical_logprobs"][i], *row} and len({*row}) == 2 for i, row in enumerate(log["shuffled_logprobs"][:20]))


@pytest.fixture(scope="module")
def kept(tmp_path_factory, benchmark_csv, model_dir):
    """run_zero_shot.py with and without --answers on two subsamples of the tiny benchmark: (folder, model)."""
    zero, folder, model = load_script("run_zero_shot"), tmp_path_factory.mktemp("kept"), model_dir("gpt2")
    for flags in ([], ["--answers"]):
        zero.load_adapted.cache_clear()
        zero.main(["--csv", str(benchmark_csv), "--model", str(model), "--m", "4", "--n", "6", "--subsamples", "2", "--threads", "1", "--pack",
                   "--pretrain-lr", "0.02", "--adapters", str(folder / "kept"), "--out", str(folder / "results.csv"), *flags])
    zero.load_adapted.cache_clear()
    return folder, model


def test_compare_puts_the_flag_beside_the_accuracy(contam, kept, start, capsys):
    folder, model = kept
    start("--compare", folder / "kept", "--results", folder / "results.csv", "--pack", "--log", "log.json", model=model)
    text = capsys.readouterr().out
    with open("contamination.csv", newline="") as file:
        table = list(csv.DictReader(file))
    with open(folder / "results.csv", newline="") as file:
        rows = {(row["experiment"], row["subsample"]): row for row in csv.DictReader(file)}
    assert [row["arm"] for row in table] == ["base", "extra", "test", "extra with answers", "test with answers"] and "missing" not in text
    assert tuple(table[0]) == contam.TABLE and "Verdict\n" in text and "not mean that its accuracy" in text

    def accuracies(ending, arm):
        return np.array([float(rows[f"zero-shot-packed{ending}", k][f"acc_{arm}"]) for k in "12"])

    pairs = [(("", "base"), ("", "extra")), None, (("", "test"), ("", "extra")), (("-answers", "extra"), ("", "extra")),
             (("-answers", "test"), ("-answers", "extra"))]
    for line, pair in zip(table, pairs):
        assert (line["flagged"] == "1") == (float(line["p_exact"]) < 0.05) and line["sequences"] == "6"
        if pair is None:
            assert line["change"] == line["against"] == ""
            continue
        assert float(line["accuracy"]) == accuracies(*pair[0])[0]
        changes = 100 * (accuracies(*pair[0]) - accuracies(*pair[1]))
        assert float(line["change"]) == pytest.approx(changes.mean()) and line["subsamples"] == "2"
        interval = (changes.mean(),) * 2 if not changes.std() else stats.ttest_1samp(changes, 0).confidence_interval(0.89)
        assert [float(line["low"]), float(line["high"])] == pytest.approx(list(interval))
    # each arm alone gives the same, and the base model is left as it was by the adapters tested before
    folders = [None, *(folder / "kept" / f"zero-shot-packed{ending}.{model.name}.topics.m4.n6.k1.seed0" / arm
                       for ending in ("", "-answers") for arm in ("extra", "test"))]
    logs = [json.loads(open(f"log.{line['arm'].replace(' ', '-')}.json").read()) for line in table]
    for adapter, line, log in zip(folders, table, logs):
        start(*(["--adapter", adapter] if adapter else []), "--log", "alone.json", model=model)
        alone = json.loads(open("alone.json").read())
        assert alone["canonical_logprobs"] == log["canonical_logprobs"] and alone["p_exact"] == float(line["p_exact"])
    assert len({log["canonical_logprobs"][0] for log in logs}) == 5


def test_an_adapter_changes_log_p_as_transformers_says(contam, kept, opened):
    import peft
    import transformers

    folder, model = kept
    adapter = folder / "kept" / f"zero-shot-packed.{model.name}.topics.m4.n6.k1.seed0" / "test"
    net, _ = opened(model)
    before = contam.score_sequences(net, [[101, 9, 8, 1996]], 10)[0]
    with contam.adapted(net, adapter):
        inside = contam.score_sequences(net, [[101, 9, 8, 1996]], 10)[0]
    other = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    with torch.no_grad():
        logits = other(input_ids=torch.tensor([[101, 9, 8]])).logits[0].log_softmax(1)
    assert inside == pytest.approx(sum(logits[i, token].item() for i, token in enumerate((9, 8, 1996))), abs=1e-4) and abs(inside - before) > 1e-3
    assert contam.score_sequences(net, [[101, 9, 8, 1996]], 10)[0] == before


def test_compare_says_what_is_missing_and_the_command_makes_it(contam, kept, start, capsys, tmp_path, benchmark_csv):
    folder, model = kept
    with open(folder / "results.csv") as file:
        lines = [line for line in file if "answers" not in line]
    (tmp_path / "some.csv").write_text("".join(lines))
    start("--compare", folder / "kept", "--results", "some.csv", "--pack", model=model)
    text = capsys.readouterr().out
    assert "missing: extra with answers (no row in some.csv); test with answers" in text
    with open("contamination.csv", newline="") as file:
        assert [row["arm"] for row in csv.DictReader(file)] == ["base", "extra", "test"]
    command = shlex.split(next(line for line in text.splitlines() if "python run_zero_shot.py" in line))
    args = load_script("run_zero_shot").parse_args(command[2:])
    assert args.answers and args.pack and args.n == [6] and args.m == [4] and args.csv == str(benchmark_csv) and args.experiment == "zero-shot-packed-answers"


def test_interrupted_it_leaves_no_half_table(start, kept, tmp_path, benchmark_csv):
    folder, model = kept
    (tmp_path / "contamination.csv").write_text("old\n")
    command = [sys.executable, str(ROOT / "contamination_test.py"), "--csv", str(benchmark_csv), "--model", str(model), "--m", "4", "--n", "6",
               "--threads", "1", "--pack", "--compare", str(folder / "kept"), "--results", str(folder / "results.csv")]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    for line in run.stdout:
        if "examples in" in line:  # the first arm is about to be tested
            run.kill()
            break
    run.wait()
    assert (tmp_path / "contamination.csv").read_text() == "old\n"


# ------------------------------------------------------------------------------------------------------------
# What a user may get wrong
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content, flags, words", [
    ("a b\nc d\ne f\n", ["--shards", "4"], "3 examples cannot fill 4 shards"),
    ("a b\nc d\ne f\n", ["--shards", "3"], "hold one each"),
    ("a b\n", [], "1 example"),
    ("", [], "is empty"),
    ("[]", [], "is empty"),
    ('["a", 3]', [], "example 2 of 2 is '3', not a string"),
    ('["a", "b"', [], "JSON list"),
    ("a b\n\nc d\n", [], "example 2 of 3 is empty"),
    ("same\nsame\n", [], "all alike"),
    (None, [], "No such file"),
    ("a b\nc d\n", ["--context", "4096"], "takes 1024 tokens"),
    ("a b\nc d\n", ["--context", "8", "--stride", "9"], "larger than the context"),
    ("a b\nc d\n", ["--adapter", "nowhere"], "holds no adapter"),
    ("a b\nc d\n", ["--log", "no/such/log.json"], "cannot be written"),
    ("a b\nc d\n", ["--from-log", "log.json"], "do not go together"),
])
def test_a_mistake_in_the_examples_is_one_line(content, flags, words, start, capsys, tmp_path):
    if content is not None:
        (tmp_path / "examples.txt").write_text(content)
    with pytest.raises(SystemExit) as end:
        start("--examples", "examples.txt", *flags)
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and words in error and error.startswith("error: ") and error.count("\n") == 0, error


@pytest.mark.parametrize("content, words", [
    ("{}", "canonical_logprobs"), ("not json", "no log"), ('{"canonical_logprobs": [-1], "shuffled_logprobs": []}', "as many of each"),
    ('{"canonical_logprobs": [-1, NaN], "shuffled_logprobs": [[-1], [-2]]}', "shard 2 holds nan"),
    ('{"canonical_logprobs": [-1], "shuffled_logprobs": [[-1, "x"]]}', "shard 1 holds 'x'"),
    ('{"canonical_logprobs": [-1, -2], "shuffled_logprobs": [[-1, -1], []]}', "nothing to test"), (None, "No such file")])
def test_a_wrong_log_is_one_line(content, words, contam, capsys, tmp_path):
    if content is not None:
        (tmp_path / "log.json").write_text(content)
    with pytest.raises(SystemExit) as end:
        contam.main(["--from-log", str(tmp_path / "log.json")])
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and words in error and error.count("\n") == 0, error


def refused(start, capsys, *flags, **options):
    with pytest.raises(SystemExit) as end:
        start(*flags, **options)
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and error.startswith("error: "), error
    return error


def test_models_and_adapters_that_do_not_fit_are_refused(start, kept, model_dir, capsys, tmp_path):
    folder, model = kept
    adapter = folder / "kept" / f"zero-shot-packed.{model.name}.topics.m4.n6.k1.seed0" / "test"
    assert "masked language model" in refused(start, capsys, model=model_dir("bert"))
    others = [model_dir("llama"), model_dir("gpt2", n_embd=64), model_dir("gpt2", n_layer=3)]
    assert f"was trained on {model}" in refused(start, capsys, "--adapter", adapter, model=others[2])
    moved = tmp_path / "moved"
    shutil.copytree(adapter, moved)
    config = json.loads((moved / "adapter_config.json").read_text())
    for other in others[:2]:  # trained on another machine: its weights have to fit
        (moved / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/elsewhere"}))
        assert "cannot be put on this model" in refused(start, capsys, "--adapter", moved, model=other)
    start("--adapter", moved, model=model)
    (moved / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refused(start, capsys, "--adapter", moved, model=model)


def test_log_probabilities_that_are_not_finite_end_the_run(start, model_dir, capsys):
    import transformers

    folder = model_dir("gpt2")
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        lm.transformer.ln_f.weight[0] = math.nan
    lm.save_pretrained(folder)
    assert "shard 1 of 3 is nan" in refused(start, capsys, "--log", "log.json", model=folder) and not os.path.exists("log.json")


def test_compare_refuses_what_does_not_belong_together(start, kept, capsys, tmp_path):
    folder, model = kept
    flags = ["--compare", folder / "kept", "--pack"]
    assert "run_zero_shot.py --model" in refused(start, capsys, *flags, model=model)  # no results.csv here
    assert "has no adapter" in refused(start, capsys, "--compare", tmp_path, "--results", folder / "results.csv", "--pack", model=model)
    with open(folder / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("split", "data"):
        changed = [{**row, name: "0123456789ab"} for row in rows]
        with open("changed.csv", "w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(changed)
        assert f"has {name} 0123456789ab" in refused(start, capsys, *flags, "--results", "changed.csv", model=model)
    with open("recipe.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows([{**row, "recipe": "0123456789ab"} for row in rows])
    assert "by 0123456789ab" in refused(start, capsys, *flags, "--results", "recipe.csv", model=model)
    changed[0]["acc_test"] = str((float(changed[0]["acc_test"]) + 0.5) % 1)
    with open("other.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(changed)
    assert "two different rows" in refused(start, capsys, *flags, "--results", folder / "results.csv", "other.csv", model=model)
