"""contamination_test.py: log-probabilities against a plain loop, p-values against brute force and the published log,
detectors by hand; silence where nothing was seen, alarm where it was, and tables that agree with the units."""

import csv
import itertools
import json
import math
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from conftest import ROOT, load_script

PAPER = Path(os.environ.get("PAPER_DATA") or ROOT.parent / "shared" / "paper")
WORDS = "river stone green paper quick north salt window apple seven music cold glass horse metal night seed".split()
TASK = "Classify a given text as one of these categories:\nbad\ngood\n\nThe text is a note. Answer with its mood."
HEAD = TASK + "\n\n"


@pytest.fixture(scope="module")
def contam():
    torch.set_num_threads(1)
    return load_script("contamination_test")


def make_texts(count, seed, size=7):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size)) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    """GPT-2's kind, byte pairs learned from a few texts: blank lines fall apart before ###, as with real ones."""
    import tokenizers as t
    import transformers

    bpe = t.Tokenizer(t.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = t.pre_tokenizers.ByteLevel(add_prefix_space=False), t.decoders.ByteLevel()
    trainer = t.trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], show_progress=False,
                                    initial_alphabet=t.pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator([*make_texts(300, 0), *[HEAD + "### Text: a\n### Answer: good\n\n"] * 20], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<end>", eos_token="<end>")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    """Maker of model folders, weights seeded, then changed by `train`: model_dir(kind, train, **config)."""
    import transformers as t

    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    tiny = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    kinds = {"gpt2": (t.GPT2Config, t.GPT2LMHeadModel, tiny),
             "bert": (t.BertConfig, t.BertForMaskedLM, size | {"initializer_range": 0.3}),
             "llama": (t.LlamaConfig, t.LlamaForCausalLM, size | {"num_key_value_heads": 2, "initializer_range": 0.1})}

    def make(kind, train=None, **changes):
        config_class, model_class, config = kinds[kind]
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        ends = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": len(tokenizer)}
        lm = model_class(config_class(**(config | ends | changes))).eval()
        if train:
            train(lm)
        lm.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def fit(lm, tokenizer, batches, lr):
    """AdamW over batches (lists of texts), without dropout."""
    optimizer = torch.optim.AdamW([w for w in lm.parameters() if w.requires_grad], lr=lr, weight_decay=0)
    for texts in batches:
        ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
        labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
        lm(input_ids=labels.clamp(min=0), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def opened(contam):
    def load(folder, *flags):
        args = contam.parse_args(["--model", str(folder), *map(str, flags)])
        return contam.open_scorer(*contam.locate(str(folder)), args.quantize, args), args

    return load


def make_unit(kept, model, tokenizer, k=1, pack=1, answers=False, steps=0, cut=None, acc=(0.5, 0.6, 0.6), n=24, lr=1e-2):
    """A unit as run_zero_shot.py leaves it, its adapters trained for so many steps. Returns its folder."""
    import peft
    import transformers

    experiment = "zero-shot" + "-packed" * (pack > 1) + "-answers" * answers
    row = {"experiment": experiment, "model": model.name, "task": "notes", "m": 4, "n": n, "subsample": k, "seed": 0,
           **dict(zip(("acc_base", "acc_extra", "acc_test"), acc)), "recipe": "0123456789ab"}
    source = {"name": model.name, "source": str(model), "gguf": None, "quantize": "none", "precision": "float32"}
    unit = {"row": row, "model": source, "classes": ["bad", "good"], "pack": pack, "answers": answers, "epochs": 1,
            "instruction": TASK}
    folder = kept / f"{experiment}.{model.name}.notes.m4.n{n}.k{k}.seed0"
    for arm, texts in zip(("extra", "test"), (make_texts(n, 2 * k + 100), make_texts(n, 2 * k + 101))):
        end = "\n### Answer: good" if answers else "\n### Answer:" * (pack == 1)
        examples = [f"### Text: {text[:cut]}{end}" for text in texts]
        unit[arm] = {"sequences": [HEAD + "\n\n".join(examples[i : i + pack]) for i in range(0, n, pack)],
                     "examples": examples, "labels": [1] * n,
                     "prompts": [f"{HEAD}### Text: {text}\n### Answer:" for text in texts]}
        torch.manual_seed(k)
        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        lm = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(model), config).eval()
        fit(lm, tokenizer, [unit[arm]["sequences"]] * steps, lr)
        lm.save_pretrained(folder / arm)
    (folder / "unit.json").write_text(json.dumps(unit))
    return folder


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
def test_scores_equal_one_token_at_a_time(kind, contam, opened, model_dir):
    """Token i is predicted from the first window (they begin at 0, half a window, a window, …) that reaches it."""
    import transformers

    folder, rng = model_dir(kind), np.random.default_rng(1)
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    sizes = ((2, 1), (31, 1), (9, 4), (8, 1), (10, 9), (17, 12), (1, 1))  # tokens, first that is scored
    sequences = [(rng.integers(1, 390, size).tolist(), first) for size, first in sizes]
    for context in (8, 5, 64):
        expected = []
        for ids, first in sequences:
            rows = []
            for i in range(first, len(ids)):
                start = next(start for start in range(0, len(ids), context // 2) if i - 1 < start + context)
                with torch.no_grad():
                    log_p = lm(input_ids=torch.tensor([ids[start:i]])).logits[0, -1].double().log_softmax(0)
                mean = float(log_p.exp() @ log_p)
                rows.append((float(log_p[ids[i]]), mean, math.sqrt(float(log_p.exp() @ (log_p - mean) ** 2))))
            expected.append(np.array(rows).reshape(-1, 3).T)
        net, _ = opened(folder, "--context", context)
        for limit in (1, 20, 1000):
            for found, wanted in zip(contam.score_tokens(net, sequences, limit, ""), expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=1e-4)
    assert np.ptp(np.concatenate(expected, axis=1)[0]) > 3


@pytest.mark.parametrize("length, context", [(0, 4), (1, 4), (4, 4), (5, 4), (11, 4), (100, 7), (23, 1)])
def test_windows_score_every_token_once_with_half_a_window_before_it(length, context, contam):
    found = list(contam.cut_windows(length, context))
    assert [i for _, end, first in found for i in range(first, end)] == list(range(length))
    assert all(end - start <= context for start, end, _ in found)
    assert all(first - start >= context // 2 for start, _, first in found[1:])


def test_the_scored_tokens_are_the_examples_own(contam, opened, model_dir, tokenizer):
    net, _ = opened(model_dir("gpt2"))
    text = "### Text: cold wheel\n### Answer: good"
    ids, first = contam.tokenise(net, HEAD, text)
    assert ids == tokenizer(HEAD + text)["input_ids"] and tokenizer.decode(ids[first:]) == text
    assert contam.tokenise(net, "", text) == ([0, *tokenizer(text)["input_ids"]], 1)  # its first token is scored, too
    net.tokenizer = lambda body, **_: {"input_ids": [7, 8, 0], "offset_mapping": [(0, 1), (1, 2), (2, 2)]}
    net.tokenizer.eos_token_id = net.tokenizer.sep_token_id = 0  # one that ends every text: no end token is scored
    assert contam.tokenise(net, "", "ab") == ([0, 7, 8], 1) and contam.tokenise(net, "a", "b") == ([7, 8], 1)


def test_min_k_plus_plus_by_hand_on_three_words(contam):
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


def test_auc_is_mann_whitneys_u_and_its_interval_covers(contam):
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


def test_shards_are_scored_order_by_order_and_no_sequence_twice(contam, opened, model_dir, tokenizer):
    import transformers

    folder = model_dir("llama")
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    examples = ["red apple", "cold night", "seven wheels of glass", "salt", "red apple", "red apple", "salt"]
    net, args = opened(folder, "--permutations", 5)
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


def test_orders_are_enumerated_or_drawn(contam):
    for size in (1, 2, 3, 4):
        orders = [tuple(order) for order in contam.draw_orders(size, contam.parse_args([]), 0)]
        assert orders[0] == tuple(range(size)) and len(orders) == math.factorial(size) == len(set(orders))
    args = contam.parse_args(["--seed", "3"])
    orders, again, other = ([list(order) for order in contam.draw_orders(5, args, shard)] for shard in (7, 7, 8))
    assert len(orders) == 51 and all(sorted(order) == list(range(5)) for order in orders) and orders == again != other
    args = contam.parse_args(["--published", "--permutations", "4000"])
    firsts = [order[0] for order in contam.draw_orders(2, args, 0)[1:]]
    assert abs(sum(firsts) - 2000) < 4 * math.sqrt(1000)  # the canonical order is drawn as often as the other


def test_500_short_examples_take_20_times_fewer_evaluations(contam, model_dir, capsys, tmp_path):
    file, log = tmp_path / "mine.txt", tmp_path / "log.json"
    file.write_text("\n".join(make_texts(500, 3, size=3)) + "\n")
    contam.main(["--examples", str(file), "--model", str(model_dir("gpt2")), "--shards", "256", "--log", str(log)])
    text, rows = capsys.readouterr().out, json.loads(log.read_text())["shuffled_logprobs"]
    assert "evaluations: 500; the published procedure: 256 x (1 + 50) = 13056, 26.1 times as many" in text
    assert "256 shards, 12 with one order" in text and [len(row) for row in rows] == [1] * 244 + [0] * 12
    contam.main(["--from-log", str(log)])
    assert capsys.readouterr().out.splitlines() == text.splitlines()[1:]


def test_text_files_are_cut_at_newlines_alone(contam, tmp_path):
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


def test_permutation_p_equals_brute_force_and_monte_carlo_agrees(contam, monkeypatch):
    rng = np.random.default_rng(0)
    for sizes, shift in itertools.product(((2,), (2, 2, 2), (6, 2, 6), (2, 24, 6, 2), (2,) * 10), (-1.0, 0.0, 3.0)):
        gaps = [np.array([0.0, *rng.normal(-shift, 2, size - 1)]) for size in sizes]
        sums = [sum(values) for values in itertools.product(*gaps)]
        brute = sum(value >= -1e-12 for value in sums) / len(sums)
        assert contam.permutation_p(gaps, 0) == (brute, "every combination of orders")
        with monkeypatch.context() as patch:
            patch.setattr(contam, "ENUMERATED", 0)
            drawn = contam.permutation_p(gaps, 1)[0]
        assert drawn == pytest.approx(brute, abs=5 * math.sqrt(brute * (1 - brute) / 1e6) + 2e-6)
    best = [np.array([0.0, -1.0])] * 300  # the canonical order is the best of 2^300: no draw reaches it
    assert contam.permutation_p(best, 0)[0] == pytest.approx(1 / (10**6 + 1), rel=1e-12)
    assert contam.permutation_p(best[:20], 0)[0] == 2.0**-20


def test_the_published_log_gives_the_published_p(contam, capsys):
    path = PAPER / "contamination_log_extra.json"
    if not path.exists():
        pytest.skip(f"the published log is not here ({path}): set PAPER_DATA to its folder")
    found, log = contam.order_p(contam.read_log(path), 0), json.loads(path.read_text())
    assert (found["shards"], found["informative"]) == (256, 244)
    assert found["p_published"] == pytest.approx(log["pval"], abs=1e-9) and abs(log["pval"] - 0.336248) < 1e-6
    assert found["p_distinct"] == pytest.approx(0.3865, abs=5e-5) and found["p_exact"] == pytest.approx(0.387, abs=5e-4)
    contam.main(["--from-log", str(path)])
    assert "p published  0.336248" in capsys.readouterr().out
    pairs = zip(log["canonical_logprobs"], log["shuffled_logprobs"])
    gaps = np.array([canonical - other for canonical, row in pairs for other in set(row) - {canonical}])
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (50_000, 244)) @ gaps >= gaps.sum()  # each order or its reverse
    assert found["p_exact"] == pytest.approx(signs.mean(), abs=4 * 0.5 / math.sqrt(50_000))
    t = stats.ttest_1samp(gaps, 0).statistic * math.sqrt(244 / 243)  # ddof 0 makes the deviation smaller by this much
    assert contam.t_test(gaps) == pytest.approx(stats.t.sf(t, 243), rel=1e-9)


def test_p_is_uniform_on_a_model_that_never_saw_the_examples(contam, opened, model_dir):
    """Many random canonical orders of the same 24 examples: 12 shards of two. Every ordered pair is scored once."""
    examples, pairs = make_texts(24, 0), list(itertools.permutations(range(24), 2))
    net, _ = opened(model_dir("gpt2"))
    sequences = [contam.tokenise(net, "", f"{examples[i]}\n\n{examples[j]}") for i, j in pairs]
    score = {pair: float(part[0].sum()) for pair, part in zip(pairs, contam.score_tokens(net, sequences, 4096, ""))}
    rng, p = np.random.default_rng(2), []
    for _ in range(400):
        order = rng.permutation(24).tolist()
        shards = list(zip(order[::2], order[1::2]))
        log = {"canonical_logprobs": [score[a, b] for a, b in shards],
               "shuffled_logprobs": [[score[b, a]] for a, b in shards]}
        p.append([contam.order_p(log, 0)[name] for name in ("p_exact", "p_distinct")])
    exact, distinct = np.transpose(p)
    assert stats.kstest(exact, "uniform").pvalue > 0.01 and stats.kstest(distinct, "uniform").pvalue > 0.01
    assert 0.02 < np.mean(exact < 0.05) < 0.09
    assert stats.kstest(0.8 * exact, "uniform").pvalue < 1e-4  # this many orders would show a fault


def test_overtraining_on_one_order_is_flagged_and_on_shuffled_orders_is_not(contam, model_dir, tokenizer, tmp_path):
    examples, rng, p = make_texts(24, 7), np.random.default_rng(0), {}
    (tmp_path / "mine.json").write_text(json.dumps(examples))
    for kind in ("canonical", "shuffled"):

        def train(lm):
            orders = [np.arange(24) if kind == "canonical" else rng.permutation(24) for _ in range(80)]
            fit(lm, tokenizer, [["<end>" + "\n\n".join(examples[i] for i in order[start : start + 4])
                                 for start in range(0, 24, 4)] for order in orders], 3e-3)

        log, model = tmp_path / f"{kind}.json", model_dir("gpt2", train, initializer_range=0.05)
        flags = ["--model", str(model), "--shards", "6", "--log", str(log)]  # shards of 4, as the packs trained on
        contam.main(["--examples", str(tmp_path / "mine.json"), *flags])
        p[kind] = contam.order_p(json.loads(log.read_text()), 0)
    assert p["canonical"]["p_exact"] < 1e-3 and p["canonical"]["p_published"] < 1e-3
    assert p["shuffled"]["p_exact"] > 0.05 and p["shuffled"]["p_published"] > 0.05


@pytest.fixture(scope="module")
def kept(tmp_path_factory, model_dir, tokenizer):
    """(folder, model): a small model that knows the words and the form, and four units: padded ones with answers,
    learned by heart, and packed ones, hardly seen and cut to 30 characters a text, as where the context is short."""
    pool, rng = make_texts(300, 9), np.random.default_rng(0)

    def train(lm):
        ends = ["", "\n### Answer:", "\n### Answer: good"] * 3
        batches = [["\n\n".join([TASK, *(f"### Text: {text}{end}" for text in rng.choice(pool, 2))]) for end in ends]
                   for _ in range(40)]
        fit(lm, tokenizer, batches, 3e-3)

    folder, model = tmp_path_factory.mktemp("kept"), model_dir("llama", train)
    for k, change in ((1, -0.5 / 24), (2, 0.5 / 24)):
        make_unit(folder, model, tokenizer, k, answers=True, steps=15, acc=(0.5, 0.625, 0.75))
        make_unit(folder, model, tokenizer, k, pack=8, steps=1, cut=30, acc=(0.5, 0.75, 0.75 + change), lr=1e-4)
    return folder, model


@pytest.fixture
def audited(contam, kept, tmp_path, monkeypatch, capsys):
    """(rows of contamination.csv by (pack, subsample, arm), what was printed)."""
    monkeypatch.chdir(tmp_path)
    contam.main([str(kept[0]), "--log", "log.json"])
    with open("contamination.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == contam.TABLE and len(rows) == 12
    assert Path("contamination.png").read_bytes().startswith(b"\x89PNG")
    return {(int(row["pack"]), int(row["subsample"]), row["arm"]): row for row in rows}, capsys.readouterr().out


def test_a_units_rows_equal_a_plain_loop_over_its_exact_strings(contam, kept, audited, tokenizer):
    """One text at a time, on a model that peft loads afresh; the packs of this unit were cut."""
    import peft
    import transformers

    folder, model = kept
    path = folder / f"zero-shot-packed.{model.name}.notes.m4.n24.k1.seed0"
    unit = json.loads((path / "unit.json").read_text())
    texts = {side: unit[side]["examples"] for side in ("extra", "test")}
    assert all(len(text) == 40 for text in texts["test"]) and len(make_texts(24, 103)[0]) > 30
    for arm in ("base", "extra", "test"):
        lm = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
        lm = lm if arm == "base" else peft.PeftModel.from_pretrained(lm, path / arm).eval()
        values = {side: [plain_detectors(plain_scores(lm, tokenizer, HEAD, text), text) for text in texts[side]]
                  for side in texts}
        row, log = audited[0][8, 1, arm], json.loads(Path(f"log.{path.name}.{arm}.json").read_text())
        for name, seen, unseen in zip(contam.DETECTORS, zip(*values["test"]), zip(*values["extra"]), strict=True):
            auc = stats.mannwhitneyu(seen, unseen).statistic / 24**2
            assert float(row[f"auc_{name}"]) == pytest.approx(auc, abs=1e-4) and 0 < auc < 1
            over = np.mean(np.array(seen) > sorted(unseen)[-2])  # one of 24 is less than 5 %, two are more
            assert float(row[f"tpr_{name}"]) == over
        pair = texts["test"][2:4]
        for value, order in ((log["canonical_logprobs"][1], pair), (log["shuffled_logprobs"][1][0], pair[::-1])):
            assert value == pytest.approx(plain_scores(lm, tokenizer, HEAD, "\n\n".join(order))[:, 0].sum(), abs=1e-3)
        assert float(row["p_exact"]) == contam.order_p(log, 0)["p_exact"]
        assert (row["shards"], row["informative"], row["evaluations"]) == ("12", "12", "24")
        change = 100 * (unit["row"][f"acc_{arm}"] - unit["row"]["acc_extra"])
        assert float(row["accuracy"]) == unit["row"][f"acc_{arm}"] and float(row["change"]) == pytest.approx(change)


def test_a_memorised_set_is_told_and_the_base_model_is_not(contam, audited):
    rows, text = audited
    for k, name in itertools.product((1, 2), contam.DETECTORS):
        assert float(rows[1, k, "test"][f"auc_{name}"]) > 0.9 and float(rows[1, k, "extra"][f"auc_{name}"]) < 0.1
    inside = [abs(float(rows[pack, k, "base"][f"auc_{name}"]) - 0.5) <= float(rows[pack, k, "base"][f"half_{name}"])
              for pack, k, name in itertools.product((1, 8), (1, 2), contam.DETECTORS)]
    assert sum(inside) >= 10 and f".5 lies in {sum(inside)} of its 16 AUC intervals" in text


def test_the_tables_over_units_say_what_was_flagged_and_what_was_harmed(audited):
    """Padded: two subsamples agree on +12.5 points; the floor (100/24)^2/12 gives a standard error of .8505 and one
    degree of freedom a t of 5.729: ± 4.87. Packed: -2.083 and +2.083, a standard error of 2.083: ± 11.94."""
    rows, text = audited
    over = text[text.index("Over units"):]
    assert "0.750  +12.50 [+7.63, +17.37]" in over and "0.750  +0.00 [-11.94, +11.94]" in over
    assert "0.500  -12.50 [-17.37, -7.63]" in over and "0.500  -25.00 [-29.87, -20.13]" in over
    for arm in ("base", "test"):
        auc, half, p = ([float(rows[1, k, arm][name]) for k in (1, 2)] for name in ("auc_zlib", "half_zlib", "p_exact"))
        line = next(line for line in over[over.index("padded") :].splitlines() if line.startswith(arm)).split()
        product = p[0] * p[1]
        assert float(line[1].rstrip("*")) == pytest.approx(product * (1 - math.log(product)), abs=6e-5)  # Fisher's
        assert float(line[5]) == pytest.approx(np.mean(auc), abs=6e-3)
        assert float(line[6].strip("±*")) == pytest.approx(math.hypot(*half) / 2, abs=6e-3)
    setting = re.escape(f"zero-shot-answers, {rows[1, 1, 'test']['model']}: padded, with answers, epochs: 1")
    assert re.search(rf"flagged:\n    {setting} \(log p, log p / zlib, Min-K%, Min-K%\+\+", over)
    assert re.search(rf"extra's:\n    {setting} \(\+12.50 \[\+7.63, \+17.37\] points\)\n  neither:", over)


def test_several_tasks_are_one_setting_whatever_their_recipes(contam, capsys):
    """Changes of task a: 2, 4 points (variance 2), of b: 8, 8 (0: the floor (100/50)^2/12 = 1/3). Mean 5.5, v = 1, 1/6;
    standard error sqrt(7/6)/2, degrees of freedom (7/6)^2 / (1 + 1/36)."""
    rows = []
    for (task, k, change), arm in itertools.product(
            (("a", 1, 2.0), ("a", 2, 4.0), ("b", 1, 8.0), ("b", 2, 8.0)), ("base", "extra", "test")):
        row = {"experiment": "e", "model": "m", "task": task, "m": 4, "n": 50, "subsample": k, "seed": 0, "recipe": task,
               "pack": 1, "answers": 0, "epochs": 1, "arm": arm, "accuracy": 0.5, "p_exact": 0.5}
        row |= {f"{what}_{name}": 0.5 for name in contam.DETECTORS for what in ("auc", "half", "tpr")}
        rows.append(row | {"change": change * (arm == "test")})
    contam.compare_settings(rows)
    half = stats.t.ppf(0.945, (7 / 6) ** 2 / (1 + 1 / 36)) * math.sqrt(7 / 6) / 2
    text = capsys.readouterr().out
    assert "units: 4\n" in text and f"+5.50 [{5.5 - half:+.2f}, {5.5 + half:+.2f}]\n" in text


def test_one_subsample_has_no_interval_and_a_run_repeats_itself(contam, kept, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_unit(tmp_path / "one", kept[1], tokenizer, n=10)
    tables = []
    for seed in "5", "5", "6":
        contam.main(["one", "--shards", "2", "--seed", seed])  # 5! = 120 orders: drawn
        tables.append(Path("contamination.csv").read_bytes())
        text = capsys.readouterr().out
        assert text.count("+0.00\n") == 2 and "+0.00 [" not in text
    assert tables[0] == tables[1] != tables[2]


def test_what_run_zero_shot_leaves_is_read(contam, model_dir, benchmark_csv, tmp_path, monkeypatch, capsys):
    """The two scripts together, packs cut to a short context included."""
    monkeypatch.chdir(tmp_path)
    model = model_dir("llama", max_position_embeddings=300)
    load_script("run_zero_shot").main([
        "--csv", str(benchmark_csv), "--model", str(model), "--m", "4", "--n", "10", "--subsamples", "2", "--pack",
        "--answers", "--threads", "1", "--workers", "1", "--adapters", "kept"])
    contam.main([])  # the folder kept
    with open("contamination.csv", newline="") as file, open("results.csv", newline="") as other:
        table, results = list(csv.DictReader(file)), {row["subsample"]: row for row in csv.DictReader(other)}
    assert [(row["subsample"], row["arm"]) for row in table] == [*itertools.product("12", ("base", "extra", "test"))]
    for row in table:
        assert float(row["accuracy"]) == float(results[row["subsample"]][f"acc_{row['arm']}"])
        assert (row["pack"], row["answers"]) == ("8", "1")


def test_a_pasted_cell_runs(kept, tmp_path, capsys):
    cell = {"__name__": "notebook"}
    exec((ROOT / "contamination_test.py").read_text(encoding="utf-8"), cell)
    (tmp_path / "mine.txt").write_text("a b\nc d\ne f\n")
    cell["main"](["--examples", str(tmp_path / "mine.txt"), "--model", str(kept[1])])
    assert "p exact" in capsys.readouterr().out


def test_nf4_runs_on_the_cpu(contam, opened, kept):
    whole, nf4 = (contam.score_tokens(opened(kept[1], "--quantize", kind)[0], [([0, 5, 6, 7], 1)], 10, "")[0]
                  for kind in ("none", "nf4"))
    assert not np.allclose(whole, nf4, rtol=1e-5) and np.allclose(whole, nf4, rtol=0.3)


def refused(contam, capsys, *flags):
    """The one line with which these flags end."""
    with pytest.raises(SystemExit) as end:
        contam.main(list(map(str, flags)))
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and error.startswith("error: ") and "\n" not in error, error
    return error


@pytest.mark.parametrize("content, flags, words", [
    ("a b\nc d\ne f\n", ["--shards", "4"], "3 examples cannot fill 4 shards"), ("same\nsame\n", [], "all alike"),
    ("a b\nc d\ne f\n", ["--shards", "3"], "cannot fill 3"), ("a b\n", [], "1 example has one order"),
    ("", [], "is empty"), ("\n\n", [], "is empty"), ("a b\n\nc d\n", [], "empty example"), (None, [], "No such file"),
    (b"\xff\xfea", [], "UnicodeDecodeError"), ("a b\nc d\n", ["--context", "9999"], "takes 1024 tokens"),
    ("a b\nc d\n", ["--log", "no/such/log.json"], "cannot be written"), ("a b\nc d\n", ["--model", ""], "model"),
    ("a b\nc d\n", ["--log", "mine.txt"], "not written by this script"), ("a\nb\n", ["--examples", ""], "Is a directory"),
    ("a b\nc d\n", ["--from-log", "x"], "do not go together"), ("a b\nc d\n", ["--device", "cuda:7"], "--model")])
def test_a_mistake_in_the_examples_is_one_line(content, flags, words, contam, model_dir, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = content.encode() if isinstance(content, str) else content
    if content is not None:
        Path("mine.txt").write_bytes(content)
    assert words in refused(contam, capsys, "--model", model_dir("gpt2"), "--examples", "mine.txt", *flags)
    assert content is None or Path("mine.txt").read_bytes() == content


@pytest.mark.parametrize("content, words", [
    ('["a", 3]', "TypeError"), ('["a", "b"', "JSONDecodeError"), ("[]", "is empty"), ("3", "TypeError"),
    ('[{"txt": "a"}]', "KeyError"), ('["a", "\\ud800"]', "UnicodeEncodeError"), ('["a", ""]', "empty example")])
def test_json_of_another_form_is_one_line(content, words, contam, capsys, tmp_path):
    (tmp_path / "mine.json").write_text(content)
    assert words in refused(contam, capsys, "--examples", tmp_path / "mine.json")


@pytest.mark.parametrize("content", [
    "{}", "not json", "[1]", None, '{"canonical_logprobs": [-1], "shuffled_logprobs": []}',
    '{"canonical_logprobs": [-1, NaN], "shuffled_logprobs": [[-1], [-2]]}',
    '{"canonical_logprobs": [-1], "shuffled_logprobs": [[-1, "x"]]}',
    '{"canonical_logprobs": [-1, -2], "shuffled_logprobs": [[-1, -1], []]}'])
def test_a_wrong_log_is_one_line(content, contam, capsys, tmp_path):
    if content is not None:
        (tmp_path / "log.json").write_text(content)
    assert "log" in refused(contam, capsys, "--from-log", tmp_path / "log.json")


def test_models_that_give_no_probability_are_refused(contam, model_dir, capsys, tmp_path, monkeypatch):
    import huggingface_hub
    from safetensors.torch import load_file, save_file

    (tmp_path / "mine.txt").write_text("a b\nc d\n")
    flags = ["--examples", tmp_path / "mine.txt", "--log", tmp_path / "log.json", "--model"]
    assert "masked model" in refused(contam, capsys, *flags, model_dir("bert"))
    folder = model_dir("gpt2", lambda lm: lm.transformer.ln_f.weight.data[0].fill_(math.nan))
    assert "not finite" in refused(contam, capsys, *flags, folder) and not (tmp_path / "log.json").exists()
    weights = load_file(folder / "model.safetensors")
    save_file({f"foreign.{name}": w for name, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    assert "no weights for" in refused(contam, capsys, *flags, folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "smollm2 once run_zero_shot.py has unpacked it" in refused(contam, capsys, *flags, "no/such")


def test_what_is_no_unit_is_refused_before_anything_is_written(
        contam, kept, model_dir, tokenizer, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "run_zero_shot.py --tasks rotten_tomatoes --adapters nowhere" in refused(contam, capsys, "nowhere")
    path = make_unit(tmp_path / "kept", kept[1], tokenizer, n=4)
    whole = (path / "unit.json").read_text()
    unit = json.loads(whole)
    cut = {**unit, "test": {**unit["test"], "examples": ["### Text: a", *unit["test"]["examples"][1:]]}}
    other = {**unit, "model": {**unit["model"], "source": "/elsewhere"}}
    for content, words in (
            (whole[:-9], "JSONDecodeError"), ("[]", "TypeError"), (json.dumps({**unit, "row": {}}), "lacks acc_base"),
            (json.dumps(cut), "do not make up its sequences"), (json.dumps(other), "adapter of another model")):
        (path / "unit.json").write_text(content)
        assert words in refused(contam, capsys, "kept")
    (path / "unit.json").write_text(whole)
    assert "cannot fill 4 shards" in refused(contam, capsys, "kept", "--shards", 4)
    small = model_dir("llama", hidden_size=32)  # the adapters do not fit it
    assert "adapter of another model" in refused(contam, capsys, "kept", "--model", small)
    assert not list(tmp_path.glob("contamination.*"))
    Path("results.csv").write_text("experiment,model\n")
    assert "not written by this script" in refused(contam, capsys, "kept", "--out", "results.csv")
    assert Path("results.csv").read_text() == "experiment,model\n"
    (path / "test" / "adapter_model.safetensors").unlink()
    assert "No such file" in refused(contam, capsys, "kept")
