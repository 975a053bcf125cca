"""contamination_test.py: log-probabilities against a plain loop, p-values against brute force and the published log,
detectors by hand; silence where nothing was seen, alarm where it was, and tables that agree with the units."""

import contextlib
import csv
import io
import itertools
import json
import math
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tokenizers
import torch
import transformers
from scipy import signal, stats

from conftest import ROOT, load_script

PAPER = Path(os.environ.get("PAPER_DATA") or ROOT.parent / "shared" / "paper")
WORDS = "river stone green paper quick north salt window apple seven music cold glass horse metal night seed".split()
HEAD = "Classify a given text as one of these categories:\nbad\ngood\n\nThe text is a note. Answer with its mood.\n\n"
ARMS = ("base", "extra", "test")
contam = load_script("contamination_test")


def make_texts(count, seed, size=7):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size)) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    """GPT-2's kind, byte pairs learned from a few texts: blank lines fall apart before ###, as with real ones."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    texts = [*make_texts(300, 0), *[HEAD + "### Text: a\n### Answer: good\n\n"] * 20]
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=["<end>"], show_progress=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<end>", eos_token="<end>")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    """Maker of model folders, weights seeded, then changed by `train`."""

    def make(kind, train=None, **changes):
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": len(tokenizer)}
        size |= {} if kind == "gpt2" else {"intermediate_size": 128}
        ends = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1}
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **(size | ends | changes))
        folder = tmp_path_factory.mktemp(kind)
        auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
        lm = auto.from_config(config).eval()
        if train:
            train(lm)
        lm.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def open_both(folder):
    """(the script's net, the model as transformers loads it)"""
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return contam.open_scorer(str(folder), None, "none", "cpu"), lm


def plain_scores(lm, tokenizer, head, text):
    """[tokens, 3]: log p, mean and sd of log p over the vocabulary, of each token that ends behind the head; by
    transformers' forward, one text at a time, in Python's own arithmetic."""
    ids = tokenizer(head + text)["input_ids"]
    first = next(i for i in range(len(ids)) if len(tokenizer.decode(ids[: i + 1])) > len(head))
    with torch.no_grad():
        log_p = lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(1).tolist()
    found = []
    for row, token in zip(log_p[first - 1 :], ids[first:]):
        mean = sum(math.exp(x) * x for x in row)
        found.append((row[token], mean, math.sqrt(sum(math.exp(x) * (x - mean) ** 2 for x in row))))
    return np.array(found)


def plain_detectors(scores, text):
    log_p, count = [row[0] for row in scores], max(int(0.2 * len(scores)), 1)
    mean = sum(log_p) / len(log_p)
    return (mean, mean / len(zlib.compress(text.encode())), sum(sorted(log_p)[:count]) / count,
            sum(sorted((x - mu) / sd for x, mu, sd in scores)[:count]) / count)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_scores_equal_one_token_at_a_time(kind, model_dir):
    """Token i is predicted from the first window (they begin at 0, half a window, a window, …) that reaches it."""
    (net, lm), rng = open_both(model_dir(kind, initializer_range=0.3)), np.random.default_rng(1)
    sizes = ((2, 1), (31, 1), (9, 4), (8, 1), (10, 9), (17, 12), (1, 1))  # tokens, first that is scored
    sequences = [(rng.integers(1, 390, size).tolist(), first) for size, first in sizes]
    for net.context in (8, 5, 64):
        expected = []
        for ids, first in sequences:
            rows = []
            for i in range(first, len(ids)):
                start = next(start for start in range(0, len(ids), net.context // 2) if i - 1 < start + net.context)
                with torch.no_grad():
                    log_p = lm(input_ids=torch.tensor([ids[start:i]])).logits[0, -1].double().log_softmax(0)
                mean = float(log_p.exp() @ log_p)
                rows.append((float(log_p[ids[i]]), mean, math.sqrt(float(log_p.exp() @ (log_p - mean) ** 2))))
            expected.append(np.array(rows).reshape(-1, 3).T)
        for limit in (1, 20, 1000):
            for found, wanted in zip(contam.score_tokens(net, sequences, limit, ""), expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-4)
    assert np.ptp(np.concatenate(expected, axis=1)[0]) > 3


def test_the_scored_tokens_are_the_examples_own(model_dir, tokenizer):
    net, _ = open_both(model_dir("gpt2"))
    text = "### Text: cold wheel\n### Answer: good"
    ids, first = contam.tokenise(net, HEAD, text)
    assert ids == tokenizer(HEAD + text)["input_ids"] and tokenizer.decode(ids[first:]) == text
    assert contam.tokenise(net, "", text) == ([0, *tokenizer(text)["input_ids"]], 1)  # its first token is scored, too
    net.tokenizer = lambda body, **_: {"input_ids": [7, 8, 0], "offset_mapping": [(0, 1), (1, 2), (2, 2)]}
    net.tokenizer.eos_token_id = net.tokenizer.sep_token_id = 0  # one that ends every text: no end token is scored
    assert contam.tokenise(net, "", "ab") == ([0, 7, 8], 1) and contam.tokenise(net, "a", "b") == ([7, 8], 1)


def test_min_k_plus_plus_by_hand_on_three_words():
    """p = (1/2, 1/4, 1/4): in units of log 2, log p is (-1, -2, -2), its mean -1.5 and its sd 1/2. p = (1/8, 7/8, 0+):
    the word of 1/8 is the lowest of five tokens, by log p and by (log p - mean) / sd."""
    logits = torch.log(torch.tensor([[4.0, 2, 2], [4, 2, 2], [1, 7, 1e-30], [4, 2, 2], [4, 2, 2]]))
    scores, two = contam.token_scores(logits, torch.tensor([0, 1, 0, 2, 0])).numpy(), math.log(2)
    mean = math.log(1 / 8) / 8 + 7 * math.log(7 / 8) / 8
    sd = math.sqrt((math.log(1 / 8) - mean) ** 2 / 8 + 7 * (math.log(7 / 8) - mean) ** 2 / 8)
    np.testing.assert_allclose(scores[0], [-two, -2 * two, -3 * two, -2 * two, -two], rtol=1e-6)
    np.testing.assert_allclose(scores[1:, [0, 2]], [[-1.5 * two, mean], [0.5 * two, sd]], rtol=1e-6)
    log_p, ratio, min_k, plus = contam.detect(scores, "some text")
    assert log_p == pytest.approx(-1.8 * two) and ratio == pytest.approx(-1.8 * two / len(zlib.compress(b"some text")))
    assert min_k == pytest.approx(-3 * two) and plus == pytest.approx((-3 * two - mean) / sd)
    assert contam.detect(np.repeat(scores, 2, axis=1), "x")[2:] == (min_k, plus)  # two of ten
    assert contam.detect(np.hstack([scores, scores[:, [0] * 9]]), "x")[2] == pytest.approx(-2.5 * two)  # two of 14
    assert contam.detect(np.zeros((3, 4)), "x")[3] == 0  # a model without any doubt


def test_auc_is_mann_whitneys_u_and_its_interval_covers():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(600):
        auc, half, _ = contam.separate(rng.normal(0.5, 1, 40), rng.normal(0, 1, 50))
        covered += abs(auc - stats.norm.cdf(0.5 / math.sqrt(2))) < half
    assert 0.85 < covered / 600 < 0.93
    seen, unseen = rng.integers(0, 9, 30).astype(float), rng.integers(0, 8, 41).astype(float)  # with ties
    assert contam.separate(seen, unseen)[0] == pytest.approx(stats.mannwhitneyu(seen, unseen).statistic / (30 * 41))
    # by hand: of seen 1, 3 over unseen 0, 2, 3 the wins are (1, 0, 0) and (1, 1, 1/2); means 1/3, 5/6 and 1, 1/2, 1/4
    auc, half, _ = contam.separate(np.array([1.0, 3]), np.array([0.0, 2, 3]))
    error = math.sqrt(0.125 / 2 + np.var([1, 0.5, 0.25], ddof=1) / 3)
    assert auc == pytest.approx(7 / 12) and half == pytest.approx(1.5981931 * error, rel=1e-6)
    # two of 50 unseen texts may pass: the threshold is the third largest, 47
    assert contam.separate(np.array([46.5, 47, 47.5, 60]), np.arange(50.0))[2] == 0.5


def test_shards_are_scored_order_by_order_and_no_sequence_twice(model_dir, tokenizer):
    (net, lm), args = open_both(model_dir("llama")), contam.parse_args(["--permutations", "5"])
    examples = ["red apple", "cold night", "seven wheels of glass", "salt", "red apple", "red apple", "salt"]
    shards = contam.cut_shards(examples, 3, "")
    assert shards == [examples[:3], examples[3:5], examples[5:]]
    log = contam.score_orders(net, shards, HEAD, args, "")

    def plain(texts):
        return plain_scores(lm, tokenizer, HEAD, "\n\n".join(texts))[:, 0].sum()

    assert [len(row) for row in log["shuffled_logprobs"]] == [5, 1, 1]  # 3! = 6 orders are more than 5: drawn
    possible = [plain([shards[0][i] for i in order]) for order in itertools.permutations(range(3))]
    assert log["canonical_logprobs"] == pytest.approx([plain(shard) for shard in shards], rel=2e-5)
    assert all(min(abs(value - other) for other in possible) < 1e-3 for value in log["shuffled_logprobs"][0])
    assert log["canonical_logprobs"][2] == log["shuffled_logprobs"][1][0]  # shard 3 is shard 2 the other way round
    assert log["evaluations"] == len({tuple(order) for order in contam.draw_orders(3, args, 0)}) + 2
    args.published = True  # each example alone, end to end, the first token unscored
    ids = [token for text in shards[1] for token in tokenizer(text)["input_ids"]]
    with torch.no_grad():
        log_p = lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(1)
    published = contam.score_orders(net, shards[1:2], HEAD, args, "")
    expected = sum(log_p[i, token].item() for i, token in enumerate(ids[1:]))
    assert published["canonical_logprobs"] == [pytest.approx(expected, rel=1e-5)]
    assert len(published["shuffled_logprobs"][0]) == 5


def test_orders_are_enumerated_or_drawn():
    for size in (1, 2, 3, 4):
        orders = [tuple(order) for order in contam.draw_orders(size, contam.parse_args([]), 0)]
        assert orders[0] == tuple(range(size)) and len(orders) == math.factorial(size) == len(set(orders))
    args = contam.parse_args([])
    orders, again, other = ([list(order) for order in contam.draw_orders(5, args, shard)] for shard in (7, 7, 8))
    assert len(orders) == 51 and all(sorted(order) == list(range(5)) for order in orders) and orders == again != other
    args = contam.parse_args(["--published", "--permutations", "4000"])
    firsts = [order[0] for order in contam.draw_orders(2, args, 0)]
    assert abs(sum(firsts) - 2000) < 4 * math.sqrt(1000)  # the canonical order is drawn as often as the other


def test_500_short_examples_take_20_times_fewer_evaluations(model_dir, capsys, tmp_path):
    file, log = tmp_path / "mine.txt", tmp_path / "log.json"
    file.write_text("\n".join(make_texts(500, 3, size=3)) + "\n")
    contam.main(["--examples", str(file), "--model", str(model_dir("gpt2")), "--shards", "256", "--log", str(log)])
    text, rows = capsys.readouterr().out, json.loads(log.read_text())["shuffled_logprobs"]
    assert "evaluations: 500; the published procedure: 256 x (1 + 50) = 13056, 26.1 times as many" in text
    assert "256 shards, 12 with one order" in text and [len(row) for row in rows] == [1] * 244 + [0] * 12
    contam.main(["--from-log", str(log)])
    assert capsys.readouterr().out.splitlines() == text.splitlines()[1:]


def test_text_files_are_cut_at_newlines_alone(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("[a\u2028b\nc\x0cd\x85e\r\nf\n\n", encoding="utf-8-sig")
    assert contam.read_examples(path, False) == ["[a\u2028b", "c\x0cd\x85e", "f"]
    assert contam.read_examples(path, True) == ["[a\u2028b\n", "c\x0cd\x85e\n", "f\n"]  # as published: with its newline
    path.write_text("a\nb")
    assert contam.read_examples(path, True) == ["a\n", "b"] and contam.read_examples(path, False) == ["a", "b"]
    (tmp_path / "list.JSON").write_text(json.dumps(["a\nb", {"text": "c"}]))
    (tmp_path / "rows.jsonl").write_text('{"text": "a\\nb", "label": 1}\n\n"c\u2028d"\n', encoding="utf-8")
    assert contam.read_examples(tmp_path / "list.JSON", True) == ["a\nb", "c"]
    assert contam.read_examples(tmp_path / "rows.jsonl", False) == ["a\nb", "c\u2028d"]


def test_permutation_p_equals_brute_force_and_monte_carlo_agrees(monkeypatch):
    rng = np.random.default_rng(0)
    for sizes, shift in itertools.product(((2,), (2, 2, 2), (6, 2, 6), (2, 24, 6, 2), (2,) * 10), (-1.0, 0.0, 3.0)):
        gaps = [np.array([0.0, *rng.normal(-shift, 2, size - 1)]) for size in sizes]
        sums = [sum(values) for values in itertools.product(*gaps)]
        brute = sum(value >= -1e-12 for value in sums) / len(sums)
        assert contam.permutation_p(gaps) == brute
        with monkeypatch.context() as patch:
            patch.setattr(contam, "ENUMERATED", 0)
            drawn = contam.permutation_p(gaps)
        assert drawn == pytest.approx(brute, abs=5 * math.sqrt(brute * (1 - brute) / 1e6) + 2e-6)
    best = [np.array([0.0, -1.0])] * 300  # the canonical order is the best of 2^300: no draw reaches it
    assert contam.permutation_p(best) == pytest.approx(1 / (10**6 + 1), rel=1e-12)
    assert contam.permutation_p(best[:20]) == 2.0**-20


def test_the_published_log_gives_the_published_p():
    """256 shards, 244 of them of two examples: 2^244 combinations, whose sums on a grid of .0002 have a distribution by
    convolution. Rounding moves a sum by 244 x .0001 (122 steps) at most, which brackets the exact p."""
    path = PAPER / "contamination_log_extra.json"
    if not path.exists():
        pytest.skip(f"the published log is not here ({path}): set PAPER_DATA to its folder")
    log = contam.read_log(path)
    found, rows = contam.order_p(log), zip(log["canonical_logprobs"], log["shuffled_logprobs"])
    assert (found["shards"], found["informative"]) == (256, 244)
    assert found["p_published"] == pytest.approx(log["pval"], abs=1e-9) and abs(log["pval"] - 0.336248) < 1e-6
    gaps = np.array([sum(set(others) - {value}) - value * (set(others) != {value}) for value, others in rows])
    t = stats.ttest_1samp(-gaps, 0).statistic * math.sqrt(256 / 255)  # ddof 0 makes the deviation smaller by this much
    assert found["p_distinct"] == pytest.approx(stats.t.sf(t, 255), rel=1e-9) == pytest.approx(0.3865, abs=5e-5)
    steps = np.round(gaps / 2e-4).astype(int)
    parts = [np.bincount([0, abs(step)]) / 2 for step in steps]
    while len(parts) > 1:
        parts = [signal.fftconvolve(a, b) for a, b in zip(parts[::2], parts[1::2])]
    zero = -steps[steps < 0].sum()
    low, exact, high = (parts[0][zero + shift :].sum() for shift in (123, 0, -122))
    assert 0.3865 < low < exact < high < 0.3875  # .387, as the paper's log is quoted
    assert found["p_exact"] == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 1e6))


def test_p_is_uniform_on_a_model_that_never_saw_the_examples(model_dir):
    """Many random canonical orders of the same 24 examples: 12 shards of two. Every ordered pair is scored once."""
    examples, pairs = make_texts(24, 0), list(itertools.permutations(range(24), 2))
    net, _ = open_both(model_dir("gpt2", initializer_range=0.3))
    sequences = [contam.tokenise(net, "", f"{examples[i]}\n\n{examples[j]}") for i, j in pairs]
    score = {pair: float(part[0].sum()) for pair, part in zip(pairs, contam.score_tokens(net, sequences, 4096, ""))}
    rng, p = np.random.default_rng(2), []
    for _ in range(400):
        order = rng.permutation(24).tolist()
        shards = list(zip(order[::2], order[1::2]))
        log = {"canonical_logprobs": [score[a, b] for a, b in shards],
               "shuffled_logprobs": [[score[b, a]] for a, b in shards]}
        p.append([contam.order_p(log)[name] for name in ("p_exact", "p_distinct")])
    exact, distinct = np.transpose(p)
    assert stats.kstest(exact, "uniform").pvalue > 0.01 and stats.kstest(distinct, "uniform").pvalue > 0.01
    assert 0.02 < np.mean(exact < 0.05) < 0.09
    assert stats.kstest(0.8 * exact, "uniform").pvalue < 1e-4  # this many orders would show a fault


def test_overtraining_on_one_order_is_flagged_and_on_shuffled_orders_is_not(model_dir, tokenizer, tmp_path):
    examples, p = make_texts(24, 7), {}
    (tmp_path / "mine.json").write_text(json.dumps(examples))
    for kind in ("canonical", "shuffled"):

        def train(lm):
            optimizer, rng = torch.optim.AdamW(lm.parameters(), lr=3e-3, weight_decay=0), np.random.default_rng(0)
            for _ in range(80):
                order = np.arange(24) if kind == "canonical" else rng.permutation(24)
                texts = ["<end>" + "\n\n".join(examples[i] for i in some) for some in order.reshape(6, 4)]
                ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
                labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
                lm(input_ids=labels.clamp(min=0), labels=labels).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        log, model = tmp_path / f"{kind}.json", model_dir("gpt2", train, initializer_range=0.05)
        flags = ["--model", str(model), "--shards", "6", "--log", str(log)]  # shards of 4, as trained on
        contam.main(["--examples", str(tmp_path / "mine.json"), *flags])
        p[kind] = contam.order_p(json.loads(log.read_text()))
    assert p["canonical"]["p_exact"] < 1e-3 and p["canonical"]["p_published"] < 1e-3
    assert p["shuffled"]["p_exact"] > 0.05 and p["shuffled"]["p_published"] > 0.05


@pytest.fixture(scope="module")
def audited(tmp_path_factory, model_dir, benchmark_csv):
    """Four units of run_zero_shot.py, padded ones with answers, learned by heart, and packed ones, hardly seen and cut
    to a short context: (their folder, the model, {(pack, subsample, arm): row of the table}, what was printed)"""
    folder, model = tmp_path_factory.mktemp("audited"), model_dir("llama", max_position_embeddings=250)
    flags = ["--csv", str(benchmark_csv), "--model", str(model), *"--m 4 --n 24 --threads 1 --workers 1".split()]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        for more in ("--answers --pretrain-epochs 25 --pretrain-lr 1e-2 --batch-size 8", "--pack --pretrain-epochs 1"):
            load_script("run_zero_shot").main([*flags, "--adapters", "kept", *more.split()])
        contam.main([])  # the folder kept
    with open(folder / "contamination.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == contam.TABLE and len(rows) == 12
    assert (folder / "contamination.png").read_bytes().startswith(b"\x89PNG")
    rows = {(int(row["pack"]), int(row["subsample"]), row["arm"]): row for row in rows}
    return folder / "kept", model, rows, printed.getvalue()


def test_a_units_rows_equal_a_plain_loop_over_its_exact_strings(audited, tokenizer):
    """One text at a time, on a model that peft loads afresh; the packs of this unit were cut."""
    import peft

    folder, model, rows, _ = audited
    path = next(folder.glob("zero-shot-packed.*.k1.*"))
    unit = json.loads((path / "unit.json").read_text())
    texts, head = {side: unit[side]["examples"] for side in ARMS[1:]}, unit["instruction"] + "\n\n"
    for side in texts:  # they make up what was trained on, and are shorter than what was tested
        packs = ["\n\n".join(texts[side][i : i + 8]) for i in (0, 8, 16)]
        assert unit[side]["sequences"] == [head + pack for pack in packs]
    whole = [prompt.removesuffix("\n### Answer:") for prompt in unit["test"]["prompts"]]
    assert sum(head + text != prompt for text, prompt in zip(texts["test"], whole)) > 12
    for arm in ARMS:
        lm = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
        lm = lm if arm == "base" else peft.PeftModel.from_pretrained(lm, path / arm).eval()
        values = {side: [plain_detectors(plain_scores(lm, tokenizer, head, text), text) for text in texts[side]]
                  for side in texts}
        row = rows[8, 1, arm]
        for name, seen, unseen in zip(contam.DETECTORS, zip(*values["test"]), zip(*values["extra"]), strict=True):
            auc = stats.mannwhitneyu(seen, unseen).statistic / 24**2
            assert float(row[f"auc_{name}"]) == pytest.approx(auc, abs=1e-4) and 0 < auc < 1
            over = np.mean(np.array(seen) > sorted(unseen)[-2])  # one of 24 is less than 5 %, two are more
            assert float(row[f"tpr_{name}"]) == over
        canonical, other = ([plain_scores(lm, tokenizer, head, f"{pair[i]}\n\n{pair[1 - i]}")[:, 0].sum()
                             for pair in zip(texts["test"][::2], texts["test"][1::2])] for i in (0, 1))
        p = contam.order_p({"canonical_logprobs": canonical, "shuffled_logprobs": [[value] for value in other]})
        assert float(row["p_exact"]) == pytest.approx(p["p_exact"], abs=2 / 4096)
        assert float(row["p_distinct"]) == pytest.approx(p["p_distinct"], abs=1e-3)
        assert (row["shards"], row["informative"], row["evaluations"]) == ("12", "12", "24")
        change = 100 * (unit["row"][f"acc_{arm}"] - unit["row"]["acc_extra"])
        assert float(row["accuracy"]) == unit["row"][f"acc_{arm}"] and float(row["change"]) == pytest.approx(change)


def test_a_memorised_set_is_told_and_the_base_model_is_not(audited):
    rows, text = audited[2:]
    for k, name in itertools.product((1, 2), contam.DETECTORS):
        assert float(rows[1, k, "test"][f"auc_{name}"]) > 0.9 and float(rows[1, k, "extra"][f"auc_{name}"]) < 0.1
    base = [row for (_, _, arm), row in rows.items() if arm == "base"]
    inside = [abs(float(row[f"auc_{name}"]) - 0.5) <= float(row[f"half_{name}"])
              for row in base for name in contam.DETECTORS]
    assert sum(inside) >= 10 and f".5 lies in {sum(inside)} of its 16 AUC intervals" in text


def test_the_tables_over_units_agree_with_the_rows(audited):
    rows, text = audited[2:]
    single, over = text.split("Over units")
    padded = over[over.index("padded, with answers, epochs: 25, units: 2") :].split("\n\n")[0].splitlines()
    for line in padded[2], padded[4]:  # base, test
        auc, half, p, change = ([float(rows[1, k, line.split()[0]][name]) for k in (1, 2)]
                                for name in ("auc_zlib", "half_zlib", "p_exact", "change"))
        product, error = p[0] * p[1], math.sqrt(max(np.var(change, ddof=1), (100 / 24) ** 2 / 12) / 2)
        p, auc, half = product * (1 - math.log(product)), np.mean(auc), math.hypot(*half) / 2  # p: Fisher's
        cells = [float(line.split()[i].strip("±")) for i in (1, 5, 6)]
        assert np.allclose(cells, [p, auc, half], atol=[6e-5, 6e-3, 6e-3])
        change, half = np.mean(change), stats.t.ppf(0.945, 1) * error
        assert line.endswith(f" {change:+.2f} [{change - half:+.2f}, {change + half:+.2f}]")
    assert "log p, log p / zlib, Min-K%, Min-K%++; " in padded[-1] and single.count("no harm shown") == 4


def test_several_tasks_are_one_setting_and_harm_is_an_interval_above_0(capsys):
    """Changes of task a: 2, 4 points (variance 2), of b: 8, 8 (0: the floor (100/50)^2/12 = 1/3). Mean 5.5, v = 1, 1/6;
    standard error sqrt(7/6)/2, degrees of freedom (7/6)^2 / (1 + 1/36)."""
    cells = {f"{what}_{name}": 0.5 for name in contam.DETECTORS for what in ("auc", "half", "tpr")}
    rows = [{**cells, "setting": "words", "task": task, "n": 50, "arm": arm, "accuracy": 0.5, "p_exact": 0.5,
             "change": change * (arm == "test")}
            for (task, change), arm in itertools.product((("a", 2.0), ("a", 4.0), ("b", 8.0), ("b", 8.0)), ARMS)]
    contam.compare_settings(pd.DataFrame(rows))
    half, text = stats.t.ppf(0.945, (7 / 6) ** 2 / (1 + 1 / 36)) * math.sqrt(7 / 6) / 2, capsys.readouterr().out
    assert "units: 4\n" in text and f"+5.50 [{5.5 - half:+.2f}, {5.5 + half:+.2f}]\ntest: not flagged; harmed" in text


def test_a_pasted_cell_runs_and_nf4_on_the_cpu(model_dir, tmp_path, capsys):
    cell, model = {"__name__": "notebook"}, str(model_dir("llama"))
    exec((ROOT / "contamination_test.py").read_text(encoding="utf-8"), cell)
    (tmp_path / "mine.txt").write_text("a b\nc d\ne f\n")
    cell["main"](["--examples", str(tmp_path / "mine.txt"), "--model", model])
    assert "p exact" in capsys.readouterr().out
    nets = [contam.open_scorer(model, None, kind, "cpu") for kind in ("none", "nf4")]
    whole, nf4, again = (contam.score_tokens(net, [([0, 5, 6, 7], 1)], 10, "")[0] for net in (*nets, nets[1]) if net.lm.state_dict())
    assert np.array_equal(nf4, again)  # bitsandbytes packs weights on some CPUs, and rounds them anew when they are read
    assert not np.allclose(whole, nf4, rtol=1e-5) and np.allclose(whole, nf4, rtol=0.3)


def refused(capsys, *flags):
    """The one line with which these flags end."""
    capsys.readouterr()  # what making a model printed
    with pytest.raises(SystemExit) as end:
        contam.main(list(map(str, flags)))
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and error.startswith("error: ") and "\n" not in error, error
    return error


TWO, THREE, LOG = "a b\nc d\n", "a b\nc d\ne f\n", '{"canonical_logprobs": [-1, %s], "shuffled_logprobs": [%s]}'


@pytest.mark.parametrize("name, content, flags, words", [
    ("mine.txt", THREE, "--shards 4", "3 examples cannot fill 4 shards"), ("mine.txt", "same\nsame\n", "", "alike"),
    ("mine.txt", THREE, "--shards 3", "cannot fill 3"), ("mine.txt", "a b\n", "", "1 example has one order"),
    ("mine.txt", "", "", "is empty"), ("mine.txt", "\n\n", "", "is empty"), ("mine.txt", "a\n\nb", "", "empty example"),
    ("mine.txt", None, "", "No such file"), ("mine.txt", b"\xff\xfea", "", "UnicodeDecodeError"),
    ("mine.txt", TWO, "--model=", "model"), ("mine.txt", TWO, "--examples=", "Is a directory"),
    ("mine.txt", TWO, "--log no/such/log.json", "cannot be written"), ("mine.txt", TWO, "--device cuda:7", "--device"),
    ("mine.txt", TWO, "--log mine.txt", "not written by this script"), ("a.json", '["a", 3]', "", "TypeError"),
    ("a.json", '["a", "b"', "", "JSONDecodeError"), ("a.json", "[]", "", "is empty"), ("a.json", "3", "", "TypeError"),
    ("a.json", '[{"txt": "a"}]', "", "KeyError"), ("a.json", '["a", "\\ud800"]', "", "UnicodeEncodeError"),
    ("a.json", '{"a": 1, "b": 2}', "", "a list is"), ("a.json", '"ab"', "", "a list is"),
    ("a.json", '["a", ""]', "", "empty example"), ("log", "{}", "", "KeyError"), ("log", "not json", "", "JSONDecode"),
    ("log", "[1]", "", "TypeError"), ("log", None, "", "No such file"), ("log", LOG % (-1, "[-1]"), "", "finite"),
    ("log", LOG % ("NaN", "[-1], [-2]"), "", "finite"), ("log", LOG % (-2, '[-1], ["x"]'), "", "TypeError"),
    ("log", LOG % (-2, "[-1, -1], []"), "", "one log-probability")])
def test_a_mistake_in_a_file_is_one_line(name, content, flags, words, model_dir, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = content.encode() if isinstance(content, str) else content
    if content is not None:
        Path(name).write_bytes(content)
    what = ["--from-log", name] if name == "log" else ["--model", model_dir("gpt2"), "--examples", name]
    assert words in refused(capsys, *what, *flags.split())
    assert content is None or Path(name).read_bytes() == content


def test_an_interruption_says_that_the_same_command_starts_anew(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(contam, "audit_units", interrupted)
    with pytest.raises(SystemExit) as end:
        contam.main([])
    error = capsys.readouterr().err
    assert end.value.code == 130 and "starts anew" in error and error.count("\n") == 1


def test_flags_that_do_not_go_together_are_refused(capsys):
    for flags in ("kept --model gpt2", "--examples mine.txt", "--log log.json"):
        assert "go together" in refused(capsys, *flags.split())
    for flags in ("kept --examples mine.txt", "--examples mine.txt --from-log log.json"):
        with pytest.raises(SystemExit) as end:
            contam.main(flags.split())
        assert end.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_models_that_give_no_probability_are_refused(model_dir, capsys, tmp_path, monkeypatch):
    import huggingface_hub
    from safetensors.torch import load_file, save_file

    (tmp_path / "mine.txt").write_text(TWO)
    flags = ["--examples", tmp_path / "mine.txt", "--log", tmp_path / "log.json", "--model"]
    assert "masked model" in refused(capsys, *flags, model_dir("bert", initializer_range=0.3))
    folder = model_dir("gpt2", lambda lm: lm.transformer.ln_f.weight.data[0].fill_(math.nan))
    assert "not finite" in refused(capsys, *flags, folder) and not (tmp_path / "log.json").exists()
    weights = load_file(folder / "model.safetensors")
    save_file({f"foreign.{name}": w for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    assert "no weights for" in refused(capsys, *flags, folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "smollm2 once run_zero_shot.py has unpacked it" in refused(capsys, *flags, "no/such")


def test_what_is_no_unit_is_refused_before_anything_is_written(audited, model_dir, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "run_zero_shot.py --tasks rotten_tomatoes --adapters nowhere" in refused(capsys, "nowhere")
    path = tmp_path / "kept" / "one"
    shutil.copytree(next(audited[0].glob("zero-shot-packed.*.k1.*")), path)
    whole = (path / "unit.json").read_text()
    unit = json.loads(whole)
    other = {**unit, "model": {**unit["model"], "source": str(model_dir("llama", hidden_size=32))}}
    for content, words in ((whole[:-9], "JSONDecodeError"), ("[]", "TypeError"),
                           (json.dumps(other), "of another model"), (json.dumps({**unit, "row": {}}), "KeyError")):
        (path / "unit.json").write_text(content)
        assert words in refused(capsys, "kept")
    for arm in ARMS[1:]:  # one that says that it is of this model, and is not
        config = json.loads((path / arm / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = other["model"]["source"]
        (path / arm / "adapter_config.json").write_text(json.dumps(config))
    (path / "unit.json").write_text(json.dumps(other))
    assert "adapter of another model" in refused(capsys, "kept")
    assert "cannot fill 24 shards" in refused(capsys, "kept", "--shards", 24)
    assert "ends in .csv" in refused(capsys, "kept", "--out", "table.png")
    (path / "test" / "adapter_model.safetensors").unlink()
    assert "FileNotFoundError" in refused(capsys, "kept")
    assert not list(tmp_path.glob("contamination.*"))
    Path("results.csv").write_text("experiment,model\n")
    assert "not written by this script" in refused(capsys, "kept", "--out", "results.csv")
    assert Path("results.csv").read_text() == "experiment,model\n"


@pytest.mark.parametrize("content, accepted", [(b"", True), (b"experi", True), (b"other", False)])
def test_a_table_torn_by_a_kill_is_replaced_and_another_file_is_not(tmp_path, content, accepted):
    script = load_script("contamination_test")
    (tmp_path / "table.csv").write_bytes(content)
    with contextlib.nullcontext() if accepted else pytest.raises(SystemExit):
        script.check_output(tmp_path / "table.csv", ",".join(script.TABLE).encode())
