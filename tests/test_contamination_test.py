"""contamination_test.py: log-probabilities against a plain loop, p-values against brute force, scipy,
simulated nulls and the published log, detectors by hand; silence where nothing was seen, alarm where it
was."""

import contextlib
import hashlib
import io
import itertools
import json
import math
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

WORDS = "river stone green paper quick north salt window apple seven music cold glass horse".split()
WORDS += "metal night seed".split()
HEAD = "Classify a given text as one of these categories:\nbad\ngood\n\n"
HEAD += "The text is a note. Answer with its mood.\n\n"
ARMS = ("base", "extra", "test")
OWN = ("logp", "zlib", "mink", "minkpp")  # the detectors that need one model alone
contam = load_script("contamination_test")


def make_texts(count, seed, size=7):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size)) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    """GPT-2's kind, byte pairs learned from a few texts: blank lines fall apart before ###, as with real
    ones."""
    bpe = tokenizers.ByteLevelBPETokenizer()
    texts = [*make_texts(300, 0), *[HEAD + "### Text: a\n### Answer: good\n\n"] * 20]
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=["<end>"], show_progress=False)
    ends = {"bos_token": "<end>", "eos_token": "<end>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **ends)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    """Maker of model folders, weights seeded, then changed by `train`."""

    def make(kind, train=None, **changes):
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        size |= {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
        if kind != "gpt2":
            size["intermediate_size"] = 128
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **(size | {"initializer_range": 0.1} | changes))
        folder = tmp_path_factory.mktemp(kind)
        auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
        lm = auto.from_config(config).eval()
        if train:
            train(lm)
        lm.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def trainer(tokenizer, texts_of_steps):
    """What trains a model on the texts of one step after the other."""

    def train(lm):
        optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3, weight_decay=0)
        for texts in texts_of_steps:
            ids = [torch.tensor(tokenizer("<end>" + text)["input_ids"]) for text in texts]
            labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
            lm(input_ids=labels.clamp(min=0), labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def open_both(folder):
    """(the script's net, the model as transformers loads it)"""
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return contam.open_scorer(str(folder), None, "none", "float32", "cpu"), lm


def plain_scores(lm, tokenizer, head, text):
    """[tokens, 3]: log p, mean and sd of log p over the vocabulary, of each token that ends behind the
    head; by transformers' forward, one text at a time, in Python's own arithmetic."""
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
    with pytest.raises(SystemExit, match="has 30 tokens, the model takes 29: .*more --shards"):
        contam.score_tokens(net._replace(context=29), sequences, 20, "")  # the longest has 30 inputs


def test_the_scored_tokens_are_the_examples_own(model_dir, tokenizer):
    net, _ = open_both(model_dir("gpt2"))
    text = "### Text: cold wheel\n### Answer: good"
    ids, first = contam.tokenise(net, HEAD, text)
    assert ids == tokenizer(HEAD + text)["input_ids"] and tokenizer.decode(ids[first:]) == text
    assert contam.tokenise(net, "", text) == ([0, *tokenizer(text)["input_ids"]], 1)  # its first one, too

    def ending(body, **_):
        return {"input_ids": [7, 8, 0], "offset_mapping": [(0, 1), (1, 2), (2, 2)]}

    ending.bos_token_id = ending.eos_token_id = ending.sep_token_id = 0  # it ends every text: not scored
    net = net._replace(tokenizer=ending)
    assert contam.tokenise(net, "", "ab") == ([0, 7, 8], 1) and contam.tokenise(net, "a", "b") == ([7, 8], 1)


def test_min_k_plus_plus_by_hand_on_three_words():
    """p = (1/2, 1/4, 1/4): in units of log 2, log p is (-1, -2, -2), its mean -1.5 and its sd 1/2. p =
    (1/8, 7/8, 0+): the word of 1/8 is the lowest of five tokens, by log p and by (log p - mean) / sd."""
    logits = torch.log(torch.tensor([[4.0, 2, 2], [4, 2, 2], [1, 7, 1e-30], [4, 2, 2], [4, 2, 2]]))
    scores, two = contam.token_scores(logits, torch.tensor([0, 1, 0, 2, 0])).numpy(), math.log(2)
    mean = math.log(1 / 8) / 8 + 7 * math.log(7 / 8) / 8
    sd = math.sqrt((math.log(1 / 8) - mean) ** 2 / 8 + 7 * (math.log(7 / 8) - mean) ** 2 / 8)
    np.testing.assert_allclose(scores[0], [-two, -2 * two, -3 * two, -2 * two, -two], rtol=1e-6)
    np.testing.assert_allclose(scores[1:, [0, 2]], [[-1.5 * two, mean], [0.5 * two, sd]], rtol=1e-6)
    log_p, ratio, min_k, plus = contam.detect(scores, "some text")
    assert log_p == pytest.approx(-1.8 * two)
    assert ratio == pytest.approx(-1.8 * two / len(zlib.compress(b"some text")))
    assert min_k == pytest.approx(-3 * two) and plus == pytest.approx((-3 * two - mean) / sd)
    assert contam.detect(np.repeat(scores, 2, axis=1), "x")[2:] == (min_k, plus)  # two of ten
    fourteen = np.hstack([scores, scores[:, [0] * 9]])
    assert contam.detect(fourteen, "x")[2] == pytest.approx(-2.5 * two)  # two of 14
    assert contam.detect(np.zeros((3, 4)), "x")[3] == 0  # a model without any doubt


def test_shards_are_scored_order_by_order(model_dir, tokenizer):
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
    assert log["shuffled_logprobs"][1] == pytest.approx([plain(shards[1][::-1])], rel=2e-5)


def test_a_log_gives_the_same_p_and_the_precision_asked_for_is_used(model_dir, capsys, tmp_path):
    """12 shards of two and 6 of one."""
    file, log, model = tmp_path / "mine.txt", tmp_path / "log.json", model_dir("llama", initializer_range=0.3)
    file.write_text("\n".join(make_texts(30, 3, size=3)) + "\n")
    flags = ["--examples", str(file), "--model", str(model), "--shards", "18", "--log", str(log)]
    capsys.readouterr()
    contam.main(flags)
    text, written = capsys.readouterr().out, json.loads(log.read_text())
    assert "shards: 18, of several orders: 12" in text
    assert [len(row) for row in written["shuffled_logprobs"]] == [1] * 12 + [0] * 6
    contam.main(["--from-log", str(log)])
    assert capsys.readouterr().out == text
    shards = contam.cut_shards(contam.read_examples(file), 18, "")
    for kind in (("none", "bf16"), ("nf4", "float32")):
        contam.main([*flags, "--quantize", kind[0], "--precision", kind[1]])
        other = json.loads(log.read_text())["canonical_logprobs"]
        net = contam.open_scorer(str(model), None, *kind, "cpu")
        wanted = contam.score_orders(net, shards, "", contam.parse_args([]), "")["canonical_logprobs"]
        assert other == pytest.approx(wanted, rel=1e-6) != pytest.approx(written["canonical_logprobs"], rel=1e-4)


def test_text_files_are_cut_at_newlines_alone(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("[a\u2028b\nc\x0cd\x85e\r\nf\n\n", encoding="utf-8-sig")
    assert contam.read_examples(path) == ["[a\u2028b", "c\x0cd\x85e", "f"]
    path.write_text("a\nb")
    assert contam.read_examples(path) == ["a", "b"]
    (tmp_path / "rows.JSONL").write_text('{"text": "a\\nb", "label": 1}\n"c\u2028d"\n', encoding="utf-8")
    assert contam.read_examples(tmp_path / "rows.JSONL") == ["a\nb", "c\u2028d"]
    path = tmp_path / "list.json"  # as the order test's authors publish
    path.write_text('[\n  "a\\nb", {"text": "c"}\n]\n')
    assert contam.read_examples(path) == ["a\nb", "c"]
    path.write_text('"a"\n{"text": "b"}')  # lines under that name
    assert contam.read_examples(path) == ["a", "b"]


def test_the_order_test_says_what_its_p_means(capsys, tmp_path):
    """Ten shards of two: the canonical order is the likelier one in all, p = 2^-10, or in half of them; four: p is
    1/16 at least."""
    for count, better, words in ((10, 10, ": flagged"), (10, 5, ": no sign"), (4, 4, ": these shards cannot tell: p is "
                                 "0.0625 at least"), (5, 5, ": flagged"), (5, 0, ": no sign")):
        log = {"canonical_logprobs": [-1.0] * better + [-2.0] * (count - better),
               "shuffled_logprobs": [[-2.0]] * better + [[-1.0]] * (count - better)}
        (tmp_path / "log.json").write_text(json.dumps(log))
        contam.main(["--from-log", str(tmp_path / "log.json")])
        text = capsys.readouterr().out
        assert f"At the level 0.05{words}" in text and "in the order of publication" in text
        assert text.index(f"p exact         {contam.order_p(log).p_exact:.6f}") < text.index("p as published  ")
    assert contam.order_p({"canonical_logprobs": [-1], "shuffled_logprobs": [[-2]]}).p_exact == 0.5
    alike = contam.order_p({"canonical_logprobs": [-1, -2], "shuffled_logprobs": [[-1], []]})
    assert alike.p_exact == alike.least == 1 and alike.informative == 0
    assert contam.order_p({"canonical_logprobs": [-1] * 2, "shuffled_logprobs": [[-2, -3, -3]] * 2}).least == 1 / 9
    one = contam.order_p({"canonical_logprobs": [-1, -1], "shuffled_logprobs": [[-2], [-2]]})
    assert math.isnan(one.p_published)


def test_permutation_p_equals_brute_force_and_monte_carlo_agrees(monkeypatch):
    rng = np.random.default_rng(0)
    for sizes, shift in itertools.product(
            ((2,), (2, 2, 2), (6, 2, 6), (2, 24, 6, 2), (2,) * 10), (-1.0, 0.0, 3.0)):
        gaps = [np.array([0.0, *rng.normal(-shift, 2, size - 1)]) for size in sizes]
        sums = [sum(values) for values in itertools.product(*gaps)]
        brute = sum(value >= -1e-12 for value in sums) / len(sums)
        assert contam.permutation_p(gaps) == brute
        with monkeypatch.context() as patch:
            patch.setattr(contam, "ENUMERATED", 0)
            patch.setattr(contam, "DRAWS", 10**5)
            drawn = contam.permutation_p(gaps)
        assert drawn == pytest.approx(brute, abs=5 * math.sqrt(brute * (1 - brute) / 1e5) + 2e-5)
    best = [np.array([0.0, -1.0])] * 50  # the canonical order is the best of 2^50: no draw reaches it
    assert contam.permutation_p(best) == pytest.approx(1 / (10**6 + 1), rel=1e-12)
    assert contam.permutation_p(best[:20]) == 2.0**-20


def test_the_published_log_gives_the_published_p(monkeypatch):
    """256 shards, 244 of them of two examples: 2^244 combinations, whose sums on a grid of .0002 have a
    distribution by convolution. Rounding moves a sum by 244 x .0001 (122 steps) at most, which brackets
    the exact p."""
    log = contam.read_log(ROOT / "tests" / "published" / "contamination_log_extra.json")
    monkeypatch.setattr(contam, "DRAWS", 10**5)
    found, rows = contam.order_p(log), zip(log["canonical_logprobs"], log["shuffled_logprobs"])
    assert (found.shards, found.informative) == (256, 244)
    assert found.p_published == pytest.approx(log["pval"], abs=1e-9) and abs(log["pval"] - 0.336248) < 1e-6
    gaps = np.array([sum(set(others) - {value}) - value * (set(others) != {value}) for value, others in rows])
    steps = np.round(gaps / 2e-4).astype(int)
    parts = [np.bincount([0, abs(step)]) / 2 for step in steps]
    while len(parts) > 1:
        parts = [signal.fftconvolve(a, b) for a, b in zip(parts[::2], parts[1::2])]
    zero = -steps[steps < 0].sum()
    low, exact, high = (parts[0][zero + shift :].sum() for shift in (123, 0, -122))
    assert 0.3865 < low < exact < high < 0.3875  # .387, as the paper's log is quoted
    assert found.p_exact == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 1e5))


def test_p_is_uniform_on_a_model_that_never_saw_the_examples(model_dir):
    """Many random canonical orders of the same 24 examples: 12 shards of two. Every ordered pair is scored
    once."""
    examples, pairs = make_texts(24, 0), list(itertools.permutations(range(24), 2))
    net, _ = open_both(model_dir("gpt2", initializer_range=0.3))
    sequences = [contam.tokenise(net, "", f"{examples[i]}\n\n{examples[j]}") for i, j in pairs]
    scores = contam.score_tokens(net, sequences, 4096, "")
    score = {pair: float(part[0].sum()) for pair, part in zip(pairs, scores)}
    rng, p = np.random.default_rng(2), []
    for _ in range(300):
        order = rng.permutation(24).tolist()
        shards = list(zip(order[::2], order[1::2]))
        log = {"canonical_logprobs": [score[a, b] for a, b in shards],
               "shuffled_logprobs": [[score[b, a]] for a, b in shards]}
        p.append(contam.order_p(log)[2:4])
    exact, published = np.transpose(p)
    assert stats.kstest(exact, "uniform").pvalue > 0.01 and stats.kstest(published, "uniform").pvalue > 0.01
    assert 0.02 < np.mean(exact < 0.05) < 0.09
    assert stats.kstest(0.8 * exact, "uniform").pvalue < 1e-4  # this many orders would show a fault


def test_overtraining_on_one_order_is_flagged_and_on_shuffled_orders_is_not(model_dir, tokenizer, tmp_path):
    examples, p = make_texts(24, 7), {}
    (tmp_path / "mine.txt").write_text("\n".join(examples))
    rng = np.random.default_rng(0)
    for kind in ("canonical", "shuffled"):
        steps = []
        for _ in range(80):
            order = np.arange(24) if kind == "canonical" else rng.permutation(24)
            steps.append(["\n\n".join(examples[i] for i in some) for some in order.reshape(6, 4)])
        train = trainer(tokenizer, steps)
        log, model = tmp_path / f"{kind}.json", model_dir("gpt2", train, initializer_range=0.05)
        flags = ["--model", str(model), "--shards", "6", "--log", str(log)]  # shards of 4, as trained on
        contam.main(["--examples", str(tmp_path / "mine.txt"), *flags])
        p[kind] = contam.order_p(json.loads(log.read_text()))
    assert p["canonical"].p_exact < 1e-3 and p["canonical"].p_published < 1e-3
    assert p["shuffled"].p_exact > 0.05 and p["shuffled"].p_published > 0.05


def read_rows(path):
    """{(pack, subsample, arm): row} of a contamination.csv, as strings"""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    assert list(table.columns) == contam.TABLE
    return {(int(row["pack"]), int(row["subsample"]), row["arm"]): row for row in table.to_dict("records")}


@pytest.fixture(scope="module")
def audited(tmp_path_factory, model_dir, benchmark_csv):
    """Units of run_zero_shot.py: a padded one with answers, learned by heart, and two packed ones, hardly seen
    and cut to a short context: (their folder, the model, {(pack, subsample, arm): row of the table}, what
    was printed)."""
    folder, model = tmp_path_factory.mktemp("audited"), model_dir("llama", max_position_embeddings=250)
    flags = ["--csv", str(benchmark_csv), "--model", str(model), "--adapters", "kept"]
    flags += "--m 4 --n 24 --threads 1 --workers 1".split()
    padded = "--answers --pretrain-epochs 20 --pretrain-lr 1e-2 --batch-size 8 --subsamples 1"
    forms = padded, "--pack --pretrain-epochs 1 --subsamples 2"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        for more in forms:
            load_script("run_zero_shot").main([*flags, *more.split()])
        contam.main([])  # the folder kept
    rows = read_rows(folder / "contamination.csv")
    assert len(rows) == 9
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
        order_values[arm] = [], []
        for pair in zip(texts["test"][::2], texts["test"][1::2]):
            for values_of, order in zip(order_values[arm], (pair, pair[::-1])):
                values_of.append(plain_scores(lm, tokenizer, head, "\n\n".join(order))[:, 0].sum())
    for arm, other in (("extra", "test"), ("test", "extra")):
        for side in texts:
            values[arm, side, "ref"] = values[arm, side, "logp"] - values["base", side, "logp"]
            values[arm, side, "twin"] = values[arm, side, "logp"] - values[other, side, "logp"]
    for arm in ARMS:
        row = rows[8, 1, arm]
        for name in contam.DETECTORS:
            if arm == "base" and name in ("ref", "twin"):
                assert row[f"auc_{name}"] == ""
                continue
            auc = stats.mannwhitneyu(values[arm, "test", name], values[arm, "extra", name]).statistic / 24**2
            assert float(row[f"auc_{name}"]) == pytest.approx(auc, abs=2e-3 + 1e-4) and 0 < auc < 1
        canonical, other = order_values[arm]
        log = {"canonical_logprobs": canonical, "shuffled_logprobs": [[value] for value in other]}
        p = contam.order_p(log)
        assert float(row["p_exact"]) == pytest.approx(p.p_exact, abs=2 / 4096)
        assert float(row["p_published"]) == pytest.approx(p.p_published, abs=1e-3)
        assert (row["shards"], row["informative"]) == ("12", "12")
    twin = [float(rows[8, 1, arm]["auc_twin"]) for arm in ("test", "extra")]
    assert 0.5 < twin[0] == pytest.approx(1 - twin[1])


def test_a_pasted_cell_runs_and_nf4_on_the_cpu(model_dir, tmp_path, capsys):
    cell, model = {"__name__": "notebook"}, str(model_dir("llama"))
    exec((ROOT / "contamination_test.py").read_text(encoding="utf-8"), cell)
    (tmp_path / "mine.txt").write_text("a b\nc d\ne f\n")
    cell["main"](["--examples", str(tmp_path / "mine.txt"), "--model", model])
    assert "p exact" in capsys.readouterr().out
    whole = contam.open_scorer(model, None, "none", "float32", "cpu")
    nf4 = contam.open_scorer(model, None, "nf4", "float32", "cpu")
    found = []
    for net in (whole, nf4, nf4):
        found.append(contam.score_tokens(net, [([0, 5, 6, 7], 1)], 10, "")[0])
        net.lm.state_dict()  # bitsandbytes packs weights on some CPUs, and would round them anew here
    assert np.array_equal(found[1], found[2])
    assert not np.allclose(found[0], found[1], rtol=1e-5) and np.allclose(found[0], found[1], rtol=0.3)


def refused(capsys, *flags):
    """The one line with which these flags end."""
    capsys.readouterr()  # what making a model printed
    with pytest.raises(SystemExit) as end:
        contam.main(list(map(str, flags)))
    error = str(end.value)
    assert error.startswith("error: ") and "\n" not in error, error
    return error


TWO, THREE = "a b\nc d\n", "a b\nc d\ne f\n"
LOG = '{"canonical_logprobs": [-1, %s], "shuffled_logprobs": [%s]}'


@pytest.mark.parametrize("name, content, flags, words", [
    ("mine.txt", THREE, "--shards 4", "3 examples cannot fill 4 shards"),
    ("mine.txt", "same\nsame\n", "", "alike"),
    ("mine.txt", "a b\n", "", "1 examples cannot fill 0 shards"),
    ("mine.txt", "", "", "is empty"),
    ("mine.txt", "a\n\nb", "", "empty example"),
    ("mine.txt", None, "", "No such file"),
    ("mine.txt", b"\xff\xfea", "", "UnicodeDecodeError"),
    ("mine.txt", TWO, "--model=", "--examples needs --model"),
    ("mine.txt", TWO, "--reference other", "--reference needs --held-out"),
    ("mine.txt", TWO, "--held-out gone.txt", "gone.txt cannot be used"),
    ("mine.txt", TWO, "--log no/such/log.json", "cannot be written"),
    ("mine.txt", TWO, "--device cuda:7", "--device"),
    ("a.jsonl", '"a"\n"\\ud800"', "", "UnicodeEncodeError"),
    ("a.jsonl", '"a"\n3', "", "AttributeError"),
    ("a.jsonl", '"a"\n"b', "", "JSONDecodeError"),
    ("a.jsonl", '{"txt": "a"}', "", "KeyError"),
    ("a.json", '["a", 3]', "", "AttributeError"),
    ("log", "not json", "", "JSONDecode"),
    ("log", LOG % (-1, "[-1]"), "", "shorter"),
    ("log", LOG % ("NaN", "[-1], [-2]"), "", "finite"),
])
def test_a_mistake_is_one_line(name, content, flags, words, model_dir, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = content.encode() if isinstance(content, str) else content
    if content is not None:
        Path(name).write_bytes(content)
    what = ["--from-log", name] if name == "log" else ["--model", model_dir("gpt2"), "--examples", name]
    assert words in refused(capsys, *what, *flags.split())
    assert content is None or Path(name).read_bytes() == content


def test_a_model_is_a_folder_a_name_or_a_gguf_file(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    assert contam.model_files("owner/name") == ("owner/name", None)
    assert contam.model_files(str(folder)) == (str(folder), None)
    (folder / "some.Q4_1.gguf").touch()
    assert contam.model_files(str(folder)) == (str(folder), "some.Q4_1.gguf")
    assert contam.model_files(str(folder / "some.Q4_1.gguf")) == (str(folder), "some.Q4_1.gguf")
    (folder / "config.json").touch()  # weights beside it count
    assert contam.model_files(str(folder)) == (str(folder), None)


def test_smollm2_runs_on_a_users_examples(capsys, tmp_path):
    """The real weights, by the path of the file."""
    zero_shot = load_script("run_zero_shot")
    model = zero_shot.find_model("smollm2", zero_shot.load_registry())
    steps = ["First, open the door.", "Second, walk in.", "Third, sit down."]
    (tmp_path / "mine.txt").write_text("\n".join(steps))
    path = model.folder / model.gguf
    contam.main(["--examples", str(tmp_path / "mine.txt"), "--model", str(path), "--shards", "1"])
    text = capsys.readouterr().out
    assert "p exact         0.166667" in text  # 1/6: the order that they are in is the likeliest


def test_models_that_give_no_probability_are_refused(model_dir, capsys, tmp_path, monkeypatch):
    import huggingface_hub
    from safetensors.torch import load_file, save_file

    (tmp_path / "mine.txt").write_text(TWO)
    flags = ["--examples", tmp_path / "mine.txt", "--log", tmp_path / "log.json", "--model"]
    assert "masked model" in refused(capsys, *flags, model_dir("bert", initializer_range=0.3))
    folder = model_dir("gpt2", lambda lm: lm.transformer.ln_f.weight.data[0].fill_(math.nan))
    assert "not finite" in refused(capsys, *flags, folder) and not (tmp_path / "log.json").exists()
    weights = load_file(folder / "model.safetensors")
    foreign = {f"foreign.{name}": weight for name, weight in weights.items()}
    save_file(foreign, folder / "model.safetensors", {"format": "pt"})
    assert "no weights for" in refused(capsys, *flags, folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "for smollm2 the path that run_zero_shot.py" in refused(capsys, *flags, "no/such")


@pytest.fixture
def unit_path(audited, tmp_path, monkeypatch):
    """A copy of one unit, in the folder kept of an empty directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kept" / "one"
    shutil.copytree(next(audited[0].glob("zero-shot-packed-*-24-1-0-*")), path)
    return path


def change_unit(path, change):
    """As run_zero_shot.py would have written it."""
    unit = json.loads((path / "unit.json").read_text())
    del unit["hash"]
    change(unit)
    unit["hash"] = hashlib.sha256(json.dumps([unit], sort_keys=True).encode()).hexdigest()[:12]
    (path / "unit.json").write_text(json.dumps(unit))


def test_a_unit_that_cannot_be_read_is_one_line(unit_path, model_dir, capsys, monkeypatch):
    """A file of another form, no adapter, too few examples; before a model runs where that can be."""
    file = unit_path / "unit.json"
    whole = file.read_text()
    (unit_path / "test" / "adapter_model.safetensors").unlink()
    assert "make this unit again" in refused(capsys, "kept") and not Path("contamination.csv").exists()
    monkeypatch.setattr(contam, "open_scorer", None)
    for text in (whole[:-9], "[]", "3", "{}"):
        file.write_text(text)
        error = refused(capsys, "kept")
        assert "make this unit again" in error and "unit.json" in error
    file.write_text(whole)
    change_unit(unit_path, lambda unit: unit["test"].update(examples=["same"] * 24))
    error = refused(capsys, "kept")
    assert "alike" in error and "unit.json" in error


def test_units_count_once_and_recipes_are_not_mixed(unit_path, capsys, monkeypatch):
    monkeypatch.setattr(contam, "open_scorer", None)
    two = unit_path.with_name("two")
    shutil.copytree(unit_path, two)
    assert "two is there twice" in refused(capsys, "kept")
    change_unit(two, lambda unit: unit["row"].update(recipe="0" * 12, data="0" * 12))
    assert "two is there twice" in refused(capsys, "kept")
    change_unit(two, lambda unit: unit["row"].update(experiment="other"))
    assert len(contam.read_units(Path("kept"), contam.parse_args([]))) == 2
    for name in ("recipe", "data"):  # other subsamples of another recipe: a table of their own
        rows = make_table()
        rows.loc[rows["subsample"] == 2, name] = "other"
        rows.to_csv("table.csv", index=False)
        contam.main(["--from-table", "table.csv"])
        assert capsys.readouterr().out.count("units: 1\n") == 2


def test_an_audit_goes_on_where_it_was(audited, unit_path, capsys, monkeypatch):
    """Killed in its second unit; the first is kept and not scored again; the result is that of one run."""
    shutil.copytree(next(audited[0].glob("zero-shot-packed-*-24-2-0-*")), unit_path.with_name("two"))
    audit_unit, calls = contam.audit_unit, []

    def kill(net, unit, args):
        calls.append(unit.folder.name)
        if calls == ["one", "two"]:
            raise KeyboardInterrupt
        return audit_unit(net, unit, args)

    monkeypatch.setattr(contam, "audit_unit", kill)
    with pytest.raises(SystemExit, match="^stopped: audited units are kept"):
        contam.main(["kept"])
    contam.main(["kept"])
    text = capsys.readouterr().out
    assert calls == ["one", "two", "two"] and "2 units, 1 to audit" in text
    rows = read_rows("contamination.csv")
    for key, row in rows.items():
        assert row == audited[2][key]
    assert not list(Path().glob("*draft"))
    contam.main(["kept"])
    assert len(calls) == 3 and "2 units, 0 to audit" in capsys.readouterr().out
    before = Path("contamination.csv").read_bytes()
    assert "with other flags: give another --out" in refused(capsys, "kept", "--shards", 6)
    shutil.rmtree(unit_path)
    assert "holds units that are not in kept" in refused(capsys, "kept")
    assert Path("contamination.csv").read_bytes() == before


def test_only_files_of_this_script_are_replaced(unit_path, capsys, monkeypatch):
    monkeypatch.setattr(contam, "open_scorer", None)
    assert "run_zero_shot.py --adapters nowhere" in refused(capsys, "nowhere")
    assert "cannot fill 24 shards" in refused(capsys, "kept", "--shards", 24)
    assert "cannot be written" in refused(capsys, "kept", "--out", "no/such/folder/table.csv")
    Path("results.csv").write_text("experiment,model\n")
    for flags in (["kept", "--out"], ["--from-table"]):
        assert "results.csv cannot be used" in refused(capsys, *flags, "results.csv")
    assert Path("results.csv").read_text() == "experiment,model\n"
    assert "No such file" in refused(capsys, "--from-table", "missing.csv")
    assert "need --examples" in refused(capsys, "--held-out", "held.txt")


def make_table(units=2, **columns):
    """Rows of a table: AUCs .5 of normal noise, or as given for the arm test; p-values .5; equal
    accuracies."""
    rng, rows = np.random.default_rng(0), []
    for k, arm in itertools.product(range(1, units + 1), ARMS):
        row = {"experiment": "packed", "model": "m", "task": "a", "m": 4, "n": 50, "subsample": k, "seed": 0,
               "data": "d", "recipe": "r", "pack": 8, "answers": False, "epochs": 1, "arm": arm,
               "accuracy": 0.5, "accuracy_on_extra": 0.5, "discordant": 0.1, "discordant_on_extra": 0.1,
               "shards": 25, "informative": 25, "p_published": 0.5, "p_exact": 0.5, "audit": f"a{k}"}
        for name in OWN if arm == "base" else contam.DETECTORS:
            row[f"auc_{name}"] = rng.normal(0.5, 0.01)
        if arm == "test":
            row |= {name: value[k - 1] for name, value in columns.items()}
        rows.append(row)
    return pd.DataFrame(rows, columns=contam.TABLE)


def test_p_of_one_unit_is_scipys_and_of_several_that_of_shuffled_memberships():
    """The sum over units against 20,000 random memberships of the same scores; nan where a detector has no
    score."""
    rng = np.random.default_rng(3)
    units = [(rng.normal(0.25, 1, 20), rng.normal(0, 1, 20)) for _ in range(4)]
    normal = {"method": "asymptotic", "use_continuity": False, "alternative": "greater"}
    found = [stats.mannwhitneyu(*unit, **normal) for unit in units]
    auc = pd.Series([one.statistic / 400 for one in found])
    for k in range(4):
        assert contam.rank_sum_p(auc[[k]], 20) == pytest.approx(found[k].pvalue, rel=1e-9)
    ranks = np.array([stats.rankdata(np.concatenate(unit)) for unit in units])
    sums = np.array([sum(rng.permutation(row)[:20].sum() for row in ranks) for _ in range(20000)])
    brute = np.mean(sums >= ranks[:, :20].sum())
    p = contam.rank_sum_p(auc, 20)
    assert p == pytest.approx(brute, abs=5 * math.sqrt(brute / 20000)) and 0.001 < p < 0.2
    assert math.isnan(contam.rank_sum_p(pd.Series([0.5, np.nan]), 20))


def test_the_table_of_detectors_by_hand():
    """Crossed AUC (A + 1 - B) / 2 of A, B = (.6, .5), (.8, .4): .55 and .7, mean .625, t of one degree of
    freedom; adjusted by Benjamini and Hochberg: p times 6 / rank, the least from there on; twin is not
    counted."""
    rows = make_table(auc_ref=[0.6, 0.8], p_exact=[0.01, 0.03], p_published=[0.02, 0.2])
    rows.loc[rows["arm"] == "extra", "auc_ref"] = [0.5, 0.4]
    table = contam.detectors_of(rows.sample(frac=1, random_state=0))
    ref = table.loc["ref"]
    half = stats.t.ppf(0.945, 1) * 0.15 / 2
    assert (ref["AUC"], ref["crossed AUC"], ref["±"]) == pytest.approx((0.7, 0.625, half))
    product = 0.01 * 0.03
    fisher = product * (1 - math.log(product))  # of two p-values
    assert table.loc["order test", "p"] == pytest.approx(fisher)
    assert table.loc["of extra", "p"] == table.loc["order test", "p of base"]
    gain = stats.norm.isf([0.02, 0.2])  # base: .5, whose z is 0
    t = gain.mean() / (gain.std(ddof=1) / math.sqrt(2))
    assert table.loc["relative to base", "p"] == pytest.approx(stats.t.sf(t, 1))
    names = [*[contam.DETECTORS[name] for name in OWN], "ref", "order test"]
    p = table.loc[names, "p"].sort_values()
    by_hand = (p * 6 / np.arange(1, 7))[::-1].cummin()
    for name in names:
        assert table.loc[name, "adjusted"] == pytest.approx(by_hand[name])
    assert table["adjusted"].notna().sum() == 6 and math.isnan(table.loc["ref", "p of base"])
    assert contam.detectors_of(rows[:3])["±"].isna().all()  # one unit


def test_single_models_are_flagged_after_adjustment_over_the_detectors():
    """n = 50: the normal's p of an AUC A is that of (A - .5) / sqrt(101 / 30000). Of six p-values the least counts
    six times, two equal ones three times: .0085 and .0165 twice are flagged, .0083 x 6 is not with .009."""
    def auc(p):
        return 0.5 + stats.norm.isf(p) * math.sqrt(101 / 30000)

    ones = dict.fromkeys(["auc_zlib", "auc_mink", "auc_minkpp", "auc_twin"], [0.4] * 3)
    ones["auc_logp"] = [auc(0.5), auc(0.016), auc(0.009)]
    ones["auc_ref"] = [auc(0.008), auc(0.016), auc(0.5)]
    table = contam.detectors_of(make_table(3, p_exact=[0.5, 0.5, 0.5], **ones))
    single = table["single"]
    assert (single["ref"], single["log p"], single["order test"], single["Min-K%"]) == (2, 1, 0, 0)
    assert single[["twin", "of extra", "relative to base"]].isna().all()


def test_harm_is_the_crossed_bias_with_the_noise_of_its_texts():
    """By hand, n = 50. Unit 1: on test .7 - .6, on extra .5 - .5: bias 5; w = 50 (.2 - .01 + .1). Unit 2: bias 3. One
    imaginary text a set is 10^4 2 / (4 50^2) = 2 points^2, shared by the units; six degrees of freedom."""
    one = {"n": 50, "acc_base": 0.5, "acc_extra": 0.6, "acc_test": 0.7, "acc_base_on_extra": 0.6,
           "acc_extra_on_extra": 0.5, "acc_test_on_extra": 0.5, "discordant": 0.2, "discordant_on_extra": 0.1}
    units = pd.DataFrame([one, one | {"acc_test": 0.62, "acc_extra_on_extra": 0.54, "discordant": 0.1}])
    w = [50 * (0.2 - 0.01 + 0.1), 50 * (0.1 - 0.0004 + 0.1 - 0.0016)]
    harm = contam.harm_of(units)
    half = stats.t.ppf(0.945, 6) * math.sqrt((np.mean(w) + 2 / 2) / 2)  # the units vary by 2 points^2, less than that
    assert harm == pytest.approx((0.55, 0.55, 0.59, 4, half, True))
    far = contam.harm_of(pd.DataFrame([one, one | {"acc_test": 0.3}]))  # biases 5 and -15
    assert far.half == pytest.approx(stats.t.ppf(0.945, 6) * math.sqrt(200 / 2))
    assert contam.harm_of(units[:1]).half == pytest.approx(stats.t.ppf(0.945, 5) * math.sqrt(w[0] + 2))
    old = contam.harm_of(units.assign(discordant=np.nan, discordant_on_extra=np.nan))
    bound = np.mean([50 * (0.1 - 0.01), 50 * (0.02 - 0.0004 + 0.04 - 0.0016)])  # d >= |b|
    assert bound > 2 and not old.counted
    assert old.half == pytest.approx(stats.t.ppf(0.945, 1) * math.sqrt(bound / 2))
    assert math.isnan(contam.harm_of(units[:1].assign(discordant=np.nan)).half)


def test_a_units_accuracies_and_noise_are_those_of_the_run(audited):
    """As run_zero_shot.py wrote them."""
    folder = audited[0]
    results = pd.read_csv(folder.parent / "results.csv").set_index(["experiment", "subsample"]).sort_index()
    table = contam.read_table(folder.parent / "contamination.csv")
    found = contam.unit_rows(table).set_index(["experiment", "subsample"]).sort_index()
    names = [f"acc_{arm}{ending}" for arm in ARMS for ending in ("", "_on_extra")]
    names += ["n", "discordant", "discordant_on_extra"]
    pd.testing.assert_frame_equal(found[names], results[names], check_dtype=False)
    assert results["discordant"].sum() > 0 and len(results) == 3


def test_a_memorised_set_is_told_and_the_base_model_is_not(audited):
    rows, text = audited[2:]
    for name in contam.DETECTORS:
        auc = [float(rows[1, 1, arm][f"auc_{name}"]) for arm in ("test", "extra")]
        assert auc[0] > 0.9 and auc[1] < 0.1
    padded = text[text.index("epochs 20, padded, with answers, units: 1") :].split("\n\n")[0]
    assert "remembered (twin); flagged by log p, log p / zlib, Min-K%, Min-K%++, ref" in padded
    assert padded.count("1 of 1") == 5
    table = contam.read_table(ROOT / "docs" / "contamination.csv")
    base = table[table["arm"] == "base"].drop_duplicates(["task", "subsample"])
    assert all(contam.rank_sum_p(base[f"auc_{name}"], 50) > 0.05 for name in OWN)


def test_harm_is_said_where_the_interval_is_above_0(capsys, tmp_path):
    path = tmp_path / "table.csv"
    for accuracy, words in ((0.5, "no harm shown"), (0.9, "harm: accuracy is higher on texts that")):
        make_table(accuracy=[accuracy] * 2, p_published=[0.4, 0.6]).to_csv(path, index=False)
        contam.main(["--from-table", str(path)])
        text = capsys.readouterr().out
        assert words in text and "units: 2\n" in text
        assert "no memory of single texts shown; flagged by nothing" in text
    make_table(p_published=[0.4, 0.6]).assign(discordant=np.nan).to_csv(path, index=False)
    contam.main(["--from-table", str(path)])
    assert "no harm shown (older rows" in capsys.readouterr().out


def test_a_table_of_another_form_is_refused(capsys, tmp_path):
    rows, path = make_table(), tmp_path / "table.csv"
    wrongs = [pd.concat([rows, rows[:3]]), rows[:5], rows[:0], rows.drop(columns="p_exact")]
    for wrong in [*wrongs, rows.assign(arm="test")]:
        wrong.to_csv(path, index=False)
        assert "table.csv cannot be used" in refused(capsys, "--from-table", path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be used" in refused(capsys, "--from-table", path)


def test_a_units_precision_and_quantisation_are_used(model_dir, tokenizer):
    """bf16 as torch's autocast around transformers' own forward; NF4 computes in the dtype that it was
    trained in."""
    folder = model_dir("llama", initializer_range=0.3)
    ids = tokenizer(HEAD)["input_ids"][:60]
    scores = {}
    for kind in (("none", "float32"), ("none", "bf16"), ("nf4", "bf16"), ("nf4", "fp16")):
        net = contam.open_scorer(str(folder), None, *kind, "cpu")
        scores[kind] = contam.score_tokens(net, [(ids, 1)], 1000, "")[0][0]
        if kind[0] == "nf4":
            dtypes = {module.compute_dtype for module in net.lm.modules() if hasattr(module, "compute_dtype")}
            assert dtypes == {torch.bfloat16 if kind[1] == "bf16" else torch.float16}
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        log_p = lm(input_ids=torch.tensor([ids[:-1]])).logits[0].float().log_softmax(1)
    wanted = log_p[range(len(ids) - 1), ids[1:]].numpy()
    bf16, whole, nf4 = scores["none", "bf16"], scores["none", "float32"], scores["nf4", "bf16"]
    assert np.allclose(bf16, wanted, atol=0.02) and np.abs(bf16 - whole).max() > 1e-3
    assert not np.allclose(nf4, whole, 1e-3)


def test_a_unit_of_bf16_is_audited_in_bf16(audited, unit_path, monkeypatch):
    """The same adapters said to be of bf16: the untouched model's tokens are scored by a bf16 model."""
    change_unit(unit_path, lambda unit: unit["model"].update(precision="bf16"))
    opened, audit_arm = [], contam.audit_arm

    def keep(net, unit, arm, args):
        opened.append(net)
        return audit_arm(net, unit, arm, args)

    monkeypatch.setattr(contam, "audit_arm", keep)
    contam.main(["kept"])
    sequences = [([0, *range(5, 60)], 1)]
    found = contam.score_tokens(opened[0], sequences, 1000, "")[0][0]
    for precision, differs in (("bf16", False), ("float32", True)):
        net = contam.open_scorer(str(audited[1]), None, "none", precision, "cpu")
        wanted = contam.score_tokens(net, sequences, 1000, "")[0][0]
        assert (np.abs(found - wanted).max() > 1e-4) == differs


def halves(texts, seed):
    rows = np.random.default_rng(seed).permutation(len(texts))
    return [texts[i] for i in rows[::2]], [texts[i] for i in rows[1::2]]


@pytest.fixture(scope="module")
def reviews():
    """400 real texts."""
    zero_shot = load_script("run_zero_shot")
    task = zero_shot.load_task("rotten_tomatoes", zero_shot.load_registry()["tasks"]["rotten_tomatoes"])
    return [task.texts[i] for i in np.random.default_rng(0).choice(len(task.texts), 400, replace=False)]


def test_random_halves_are_told_apart_by_chance_alone_and_others_are(reviews, capsys, tmp_path):
    """120 random halves of 100 real texts: each score of the texts alone has a p below .05 in 5 % of them."""
    p = pd.DataFrame([contam.tell_apart(*halves(reviews[:100], seed)) for seed in range(120)])
    assert (p < 0.05).mean().between(0.005, 0.11).all()
    assert np.mean([contam.adjusted(row).min() < 0.05 for _, row in p.iterrows()]) < 0.1
    longest = sorted(reviews, key=len)
    renamed = [text.replace("film", "series").replace("movie", "show") for text in reviews]
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    flags = ["--examples", files[0], "--held-out", files[1], "--model", "never/loaded"]
    for released, held_out, words in ((longest[:200], longest[200:], "length"),
                                      (reviews[:200], renamed[200:], "words of one file")):
        for file, texts in zip(files, (released, held_out)):
            file.write_text("\n".join(texts))
        error = refused(capsys, *flags)
        assert f"differ in {words}" in error and "no random halves" in error and "no conclusion" in error


def test_held_out_halves_flag_no_innocent_model(model_dir, reviews):
    """Scores of a model that saw neither, 200 random halves of 80 real texts: 5 % a detector, at most so
    any."""
    net, _ = open_both(model_dir("gpt2", initializer_range=0.3))
    args = contam.parse_args([])
    values = contam.detect_all(net, "", reviews[:80], args, "")
    other, _ = open_both(model_dir("llama", initializer_range=0.3))
    values["ref"] = values["logp"] - contam.detect_all(other, "", reviews[:80], args, "")["logp"]
    rng, p, any_flag = np.random.default_rng(0), [], []
    for _ in range(200):
        rows = rng.permutation(80)
        table = contam.compare_scores(values.iloc[rows[:40]], values.iloc[rows[40:]], rng.uniform())
        p.append(table["p"])
        any_flag.append(table["adjusted"].min() < 0.05)
    assert (pd.DataFrame(p) < 0.05).mean().between(0.01, 0.1).all() and np.mean(any_flag) < 0.1


def test_the_released_half_is_flagged_in_the_model_trained_on_it(model_dir, tokenizer, tmp_path, capsys):
    """One model trained on a random half of 80 texts, and one that was not, by the command; numbers by
    scipy."""
    released, held_out = halves(make_texts(80, 5, size=10), 1)
    for name, texts in (("a.txt", released), ("b.txt", held_out)):
        (tmp_path / name).write_text("\n".join(texts))

    train = trainer(tokenizer, [released] * 60)
    innocent = model_dir("gpt2", initializer_range=0.05)
    guilty = model_dir("gpt2", train, initializer_range=0.05)
    capsys.readouterr()
    files = ["--examples", str(tmp_path / "a.txt"), "--held-out", str(tmp_path / "b.txt")]
    printed = {}
    for model in (guilty, innocent):
        contam.main([*files, "--model", str(model), "--reference", str(innocent)])
        printed[model] = capsys.readouterr().out
    assert "held-out texts: flagged by ref.\n" in printed[guilty] and "Valid only" not in printed[guilty]
    assert "40 released, 40 held-out texts: flagged by nothing.\n" in printed[innocent]
    contam.main([*files, "--model", str(guilty)])
    alone = capsys.readouterr().out
    assert alone.startswith("Valid only if lot decided which text was released")
    assert "flagged by log p, log p / zlib, Min-K%, Min-K%++.\n" in alone
    error = refused(capsys, *files, "--model", innocent, "--reference", guilty)  # it saw one half
    assert f"of {guilty} (p " in error and "no random halves" in error
    _, lm = open_both(guilty)
    log_p = []
    for texts in (released, held_out):
        log_p.append([plain_scores(lm, tokenizer, "<end>", text)[:, 0].mean() for text in texts])
    found = stats.mannwhitneyu(*log_p, alternative="greater")
    line = printed[guilty].split("\nlog p ")[1].split()
    assert float(line[0]) == pytest.approx(found.statistic / 1600, abs=2e-3)
    assert float(line[1]) == pytest.approx(found.pvalue, rel=0.1)


def test_halves_are_refused_after_adjustment(capsys):
    """Four p-values: the least counts four times."""
    args = contam.parse_args(["--examples", "a.txt", "--held-out", "b.txt", "--model", "mine"])
    contam.check_halves(pd.Series({"one": 0.02, "two": 0.5, "three": 0.6, "four": 0.7}), args)
    with pytest.raises(SystemExit, match="a.txt and b.txt differ in one "):
        contam.check_halves(pd.Series({"one": 0.012, "two": 0.5, "three": 0.6, "four": 0.7}), args)


def test_with_a_reference_ref_and_the_order_test_decide():
    rng = np.random.default_rng(0)
    low = pd.DataFrame(rng.normal(0, 1, (40, 4)), columns=OWN)
    high = low + 2
    alone = contam.compare_scores(high, low, 0.5)
    assert (alone["adjusted"].drop("order test") < 0.05).all()
    with_ref = contam.compare_scores(high.assign(ref=low["logp"]), low.assign(ref=low["logp"]), 0.024)
    assert with_ref["adjusted"].notna().sum() == 2
    assert with_ref.loc["order test", "adjusted"] == pytest.approx(0.048)
