"""run_experiment.py and the blocks that it shares with run_zero_shot.py, against independent oracles:
plain loops, hand arithmetic, transformers' own models and Trainer, whole runs in real processes."""

import contextlib
import csv
import functools
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import peft
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from scipy import stats

from conftest import ARMS, MODELS, ROOT, SETS, comparable, end_of, load_script, plain_training
from conftest import rows_of

RUN_SUBSAMPLE = load_script("run_experiment").run_subsample
TEXTS = ["a short one", "no", "yes it was", "the film was neither good nor bad but it was a film",
         "this text is a good deal longer than the others, with commas, and goes on for some time"]
NEAR = {"atol": 2e-4}  # Adam, in steps of 2e-3, magnifies what rounding does to small gradients
NO_DROPOUT = {"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
              "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "llama": {}}


def model_of(script, folder, kind):
    return script.Model("tiny", "bert", folder, None, MODELS[kind][0], "", 10**6, 512)


@pytest.fixture
def load(script, model_dir):
    """load(kind) -> (folder of a random model, the script's Network of it)."""
    def call(kind, saved_as=None, precision="float32", **config):
        folder = model_dir(kind, saved_as, **config)
        return folder, script.load_network(model_of(script, folder, kind), "cpu", precision)

    return call


def tokens(net, texts=TEXTS):
    return [np.array(ids) for ids in net.tokenizer(texts)["input_ids"]]


def padded(net, ids):
    rows = {"input_ids": [text.tolist() for text in ids]}
    return net.tokenizer.pad(rows, padding_side="right", return_tensors="pt")


def stock(folder, kind):
    """transformers' own language model."""
    causal = MODELS[kind][0] == "clm"
    own = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    return own.from_pretrained(folder)


def recipe_of(stage, epochs, size, rate):
    return {"epochs": {stage: epochs}, "batch_sizes": {stage: size},
            "learning_rates": {stage: rate}}


def both_logits(script, net, folder, kind, ids):
    """Our logits of texts together, and those of transformers' own model of each alone."""
    theirs = stock(folder, kind).eval()
    net.lm.eval()
    batch = script.pack(net, ids, [np.arange(len(text)) for text in ids], ids)
    with torch.inference_mode():
        alone = [theirs(input_ids=torch.tensor(text)[None]).logits[0] for text in ids]
        return script.lm_logits(net, batch), torch.cat(alone)


# Splits and masks


def split_by_hand(labels, m, n, k):
    """The published splits: pandas' sample per label, then scikit-learn's train_test_split."""
    labels, train = pd.Series(labels), []
    for c in (0, 1, 2):
        train += [*labels[labels == c].sample(n=m // 3, random_state=42 + k).index]
    rest = labels.drop(train).index
    order = np.random.RandomState(42 + k).permutation(len(rest))
    test, extra = rest[order[:n]], rest[order[n : 2 * n]]
    return {"train": train, "test": [*test], "extra": [*extra]}


@pytest.mark.parametrize("m, n, k", [(50, 100, 1), (10, 3, 2), (7, 50, 100), (100, 120, 5)])
def test_splits_are_the_published_ones(script, m, n, k):
    labels = np.random.default_rng(m).choice(3, size=400, p=[0.6, 0.3, 0.1])
    found = script.split_rows(labels, m, n, k)
    assert {name: rows.tolist() for name, rows in found.items()} == split_by_hand(labels, m, n, k)
    assert len(found["train"]) == 3 * (m // 3)


def test_splits_have_the_published_majorities(script):
    """From the paper's own results: share of the most common label in test, subsamples 1 to 12."""
    published = {
        (50, 50): [.64, .58, .56, .52, .58, .54, .5, .52, .54, .64, .54, .52],
        (100, 500): [.504, .522, .506, .506, .51, .53, .508, .51, .506, .514, .516, .512]}
    spec = script.load_registry()["tasks"]["rotten_tomatoes"]
    labels = script.load_task("rotten_tomatoes", spec).labels
    for (m, n), majorities in published.items():
        tests = [labels[script.split_rows(labels, m, n, k)["test"]] for k in range(1, 13)]
        assert [np.bincount(test).max() / n for test in tests] == majorities


def test_mask_rates(script):
    ids = np.tile(np.r_[101, np.arange(1000, 1098), 102], 4000)  # 98 plain tokens, two special
    rng = np.random.default_rng(0)
    corrupted, scored = script.mask_tokens(ids, [101, 102, 103], 103, 30000, rng)
    plain = np.count_nonzero((ids != 101) & (ids != 102))
    assert np.all((ids[scored] != 101) & (ids[scored] != 102)), "special tokens are never scored"
    untouched = np.setdiff1d(np.arange(len(ids)), scored)
    assert np.array_equal(corrupted[untouched], ids[untouched])
    masked, kept = corrupted[scored] == 103, corrupted[scored] == ids[scored]
    for found, p, count in ((len(scored) / plain, 0.15, plain), (masked.mean(), 0.8, len(scored)),
                            (kept.mean(), 0.1, len(scored))):
        assert abs(found - p) < 4 * math.sqrt(p * (1 - p) / count)
    random = corrupted[scored][~masked & ~kept]  # uniform over the vocabulary
    assert abs(random.mean() - 15000) < 4 * 30000 / math.sqrt(12 * len(random))
    _, others = script.mask_tokens(ids, [101, 102, 103], 103, 30000, rng)
    assert others.tolist() != scored.tolist(), "each epoch has its own masks"


# Packing, groups, logits


@pytest.mark.parametrize("kind", sorted(load_script("run_experiment").PACKED) + ["modernbert",
                                                                                 "mistral"])
def test_texts_together_give_the_logits_of_texts_alone(script, load, kind):
    folder, net = load(kind)
    ids = tokens(net)
    found, alone = both_logits(script, net, folder, kind, ids)
    assert torch.allclose(found, alone, atol=1e-4)
    rows, _, _ = script.lay_out(np.array([len(text) for text in ids]), net.packed)
    assert (rows < len(ids)) == (kind in script.PACKED)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_bf16_computes_as_autocast_does(script, load, kind):
    folder, net = load(kind, precision="bf16")
    ids = tokens(net)[:1]
    found, plain = both_logits(script, net, folder, kind, ids)
    with torch.autocast("cpu", torch.bfloat16):
        _, rounded = both_logits(script, net, folder, kind, ids)
    spread = (rounded - plain).abs().max()
    assert spread > 0 and (found - rounded).abs().max() < spread / 4


@pytest.mark.parametrize("kind", ["bert", "roberta"])  # RoBERTa's positions begin after the pad's id
def test_the_longest_text_fits(script, load, kind):
    folder, net = load(kind, max_position_embeddings=40)
    registry, task = script.load_registry(), script.Task([], None, [], "", "", {})
    model = script.find_model(str(folder), registry)
    ids = [np.full(script.recipe_of(registry, script.parse_args([]), model, task)["max_length"], 9)]
    assert len(ids[0]) == 38
    script.lm_logits(net, script.pack(net, ids, [np.arange(38)], ids))


@pytest.mark.parametrize("lengths", [
    [5], [3, 3, 3], [7, 1, 2, 4, 3, 7, 5], np.random.default_rng(0).integers(1, 60, 64).tolist()])
def test_the_grid_holds_every_token_once_and_wastes_little(script, lengths):
    rows, width, starts = script.lay_out(np.array(lengths), True)
    places = []
    for start, length in zip(starts, lengths):
        assert start // width == (start + length - 1) // width, "a text lies in one row"
        places += range(start, start + length)
    assert len(set(places)) == sum(lengths) and max(places) < rows * width
    assert rows * width <= max(lengths) * len(lengths)
    assert rows * width < 1.2 * sum(lengths) + max(lengths)


@pytest.mark.parametrize("packed, most", [(True, 25), (False, 25), (True, 1)])
def test_groups_hold_each_text_once_within_the_limit(script, monkeypatch, packed, most):
    config = SimpleNamespace(hidden_size=512)  # wide: half of the tokens
    net = SimpleNamespace(packed=packed, device=torch.device("cpu"),
                          lm=SimpleNamespace(config=config))
    monkeypatch.setattr(script, "CPU_TOKENS", 2 * most)
    texts = [np.full(length, number) for number, length in enumerate([3, 9, 4, 12, 4, 30, 9])]
    found = script.groups(net, [(text, None, None) for text in texts])
    for group in found:
        lengths = [len(text) for text, *_ in group]
        tokens = sum(lengths) if packed else max(lengths) * len(lengths)
        assert len(group) == 1 or tokens <= most
    assert sorted([text[0] for group in found for text, *_ in group]) == [*range(7)]
    assert len(found) == (7 if most == 1 else 4 if packed else 5)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_the_loss_equals_that_of_whole_sequences(script, load, kind):
    """Here the output layer runs at the kept positions alone."""
    folder, net = load(kind)
    causal, theirs, ids = net.causal, stock(folder, kind).eval(), tokens(net)
    net.lm.eval()
    rows = padded(net, ids)
    labels = torch.full_like(rows["input_ids"], -100)
    keeps, targets = [], []
    for row, text in enumerate(ids):
        scored = np.arange(1, len(text), 1 if causal else 3)
        labels[row, scored] = torch.from_numpy(text[scored])
        keeps.append(scored - causal)
        targets.append(text[scored])
    batch = script.pack(net, ids, keeps, targets)
    logits = script.lm_logits(net, batch)
    assert logits.shape == (len(batch.targets), len(net.tokenizer))
    found = torch.nn.functional.cross_entropy(logits, batch.targets)
    assert found.item() == pytest.approx(theirs(**rows, labels=labels).loss.item(), rel=1e-5)


@pytest.mark.parametrize("kind, saved_as, config", [
    ("bert", None, {}), ("bert", transformers.BertModel, {}), ("gpt2", None, {}),
    ("opt", None, {"word_embed_proj_dim": 16})])
def test_class_logits_equal_transformers_classifiers(script, load, kind, saved_as, config):
    """BERT: pooler, dropout, linear. GPT-2: linear on the last token, which in OPT may be narrower
    than its layers. A pooler of the checkpoint is used, though a BertForMaskedLM has none."""
    folder, net = load(kind, saved_as, **config)
    causal = kind in ("gpt2", "opt")
    assert net.fresh_pooler == (not causal and saved_as is None)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    head = script.fresh_head(net, 3).eval()
    ids = tokens(net)
    net.lm.eval()
    last = [np.array([len(text) - 1 if causal else 0]) for text in ids]
    with torch.no_grad():
        if causal:
            theirs.score.weight.copy_(head.weight)
            theirs.config.pad_token_id = 0
        else:
            theirs.classifier.load_state_dict(head.state_dict())
            if net.fresh_pooler:
                theirs.base_model.pooler.load_state_dict(net.pooler.state_dict())
        found = script.class_logits(net, head, script.pack(net, ids, last, last))
        assert torch.allclose(found, theirs.eval()(**padded(net, ids)).logits, atol=2e-5)


# Effects and their interval


def interval_by_hand(rows, effect="bias"):
    """(mean, half of its 89% interval) over tasks: DESIGN.md 7 in plain Python, row by row."""
    tasks = {}
    for row in rows:
        n, n_of = float(row["n"]), {name: float(row[name]) for name in row if name[:4] in
                                    ("acc_", "disc")}
        change = n_of["acc_test"] - n_of["acc_extra"]
        mirrored = n_of["acc_extra_on_extra"] - n_of["acc_test_on_extra"]
        noise = n_of["discordant"] - change**2 + n_of["discordant_on_extra"] - mirrored**2
        value, w = 50 * (change + mirrored), 100**2 / (4 * n) * noise
        if effect == "boost":
            gain = n_of["acc_extra"] - n_of["acc_base"]
            value = 50 * (gain + n_of["acc_test_on_extra"] - n_of["acc_base_on_extra"])
            w = (100 / n) ** 2 / 12
        tasks.setdefault(row["task"], []).append((value, w))
    means, variances, squares = [], [], 0
    for found in tasks.values():
        K, (values, ws) = len(found), zip(*found)
        w = statistics.mean(ws)
        if effect == "bias":
            w += 100**2 / (2 * n**2 * K)
        means.append(statistics.mean(values))
        variances.append(max(statistics.variance(values), w) / K)
        squares += variances[-1] ** 2 / (K - 1)
    df, se = sum(variances) ** 2 / squares, math.sqrt(sum(variances)) / len(means)
    return statistics.mean(means), stats.t.interval(0.89, df, 0, se)[1]


def coins(n=50, subsamples=(4, 4, 6), spread=(0.01, 0.1, 0.05)):
    """Rows of three tasks whose biases vary little, much and a bit, as a file holds them."""
    rng, rows = np.random.default_rng(1), []
    for j, (count, sd) in enumerate(zip(subsamples, spread)):
        for k in range(1, count + 1):
            row = {"task": f"task {j}", "n": str(n), "subsample": str(k), "majority": "0.5"}
            for ending in SETS.values():
                for arm in ARMS:
                    row[f"acc_{arm}{ending}"] = str(rng.binomial(n, 0.6 + sd * rng.normal()) / n)
                row[f"discordant{ending}"] = str(0.4)
            rows.append(row)
    return rows


ROW = {"task": "a", "n": "100", "majority": "0.5", "discordant": "0.10",
       "discordant_on_extra": "0.08", "acc_base": "0.50", "acc_extra": "0.60", "acc_test": "0.66",
       "acc_base_on_extra": "0.40", "acc_extra_on_extra": "0.58", "acc_test_on_extra": "0.54"}


def test_effects_by_hand(script):
    (found,) = script.with_effects([ROW]).to_dict("records")
    expected = {"base": 0.45, "unseen": 0.57, "seen": 0.62, "boost": 12, "bias": 5,
                "w_bias": 25 * (0.10 - 0.06**2 + 0.08 - 0.04**2), "w_boost": 1 / 12,
                "one_answer": 0.5}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("arms, metric, expected", [
    ("plain", "acc", {"base": 0.5, "unseen": 0.6, "seen": 0.66, "boost": 10, "bias": 6,
                      "w_bias": 1 / 12, "one_answer": 0}),
    ("crossed", "f1", {"boost": 12, "bias": 5, "w_bias": 1 / 12, "one_answer": 0}),
    ("crossed", "nll", {"boost": 0.12, "bias": 0.05, "w_bias": 1e-4 / 12, "w_boost": 1e-4 / 12})])
def test_effects_of_plain_rows_and_of_other_metrics(script, arms, metric, expected):
    """Not in points where the metric is no share; their noise is that of rounding."""
    row = {name: float(ROW[name]) for name in ROW if name != "task"} | {"arms": arms}
    row |= {name.replace("acc", metric): row[name] for name in row if name.startswith("acc")}
    (found,) = script.add_effects(pd.DataFrame([row]), metric).to_dict("records")
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_the_interval_by_hand(script):
    """Three subsamples each of two tasks without spread: w and one imaginary answer; df 2 + 2."""
    rows = [ROW | {"task": task} for task in "ababab"]
    means = script.task_means(script.with_effects(rows))
    w = 25 * (0.0964 + 0.0784) + 0.5 / 3
    se, df, half = script.interval(means)
    assert (se, df) == pytest.approx((math.sqrt(2 * w / 3) / 2, 4))
    assert half == pytest.approx(2.05308 * se, rel=1e-4), "t's quantile .945, from a table"


@pytest.mark.parametrize("effect", ["bias", "boost"])
@pytest.mark.parametrize("subsamples", [(4, 4, 6), (2, 9, 3), (3, 3, 3)])
def test_the_interval_equals_plain_code(script, effect, subsamples):
    rows = coins(subsamples=subsamples)
    means = script.task_means(script.with_effects(rows), effect)
    ours = means[effect].mean(), script.interval(means)[2]
    assert ours == pytest.approx(interval_by_hand(rows, effect))


def test_the_interval_needs_two_subsamples_and_some_noise(script):
    """Two tasks of which one has one subsample; equal biases, and nothing that tells their noise."""
    means = script.task_means(script.with_effects([ROW, ROW, ROW | {"task": "b"}]))
    assert math.isnan(script.interval(means)[0])
    unknown = ROW | {"discordant": "", "discordant_on_extra": ""}
    rows = pd.DataFrame([unknown, unknown]).replace("", "nan")
    means = script.task_means(script.with_effects(rows))
    assert math.isnan(script.interval(means)[2])
    rows["acc_test"] = ["0.66", "0.70"]  # their spread alone: biases 5 and 7
    means = script.task_means(script.with_effects(rows))
    assert means["v"].tolist() == pytest.approx([1.0])


# Training against transformers' Trainer and a plain loop

@pytest.fixture
def small_groups(script, monkeypatch):
    """A batch goes through the model in parts, whose gradients add up."""
    monkeypatch.setattr(script, "CPU_TOKENS", 30)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])  # Llama's output layer is its own
def test_pretraining_equals_a_plain_loop(script, load, small_groups, kind):
    """Batches of 2, same masks."""
    folder, net = load(kind, initializer_range=0.02, **NO_DROPOUT[kind])
    ids = tokens(net)
    loss = script.pretrain(net, ids, recipe_of("pretrain", 2, 2, 3e-3), seed=4)
    theirs = stock(folder, kind).train()
    order, masks = np.random.default_rng([4, 0]), np.random.default_rng([4, 1])
    epochs = []
    for _ in range(2):
        examples = []
        for row in order.permutation(5):
            corrupted, labels = ids[row], ids[row]
            if kind == "bert":
                corrupted, scored = script.mask_tokens(
                    ids[row], net.tokenizer.all_special_ids, 103, len(net.tokenizer), masks)
                labels = np.full(len(corrupted), -100)
                labels[scored] = ids[row][scored]
            examples.append((corrupted, labels))
        epochs.append([examples[:2], examples[2:4], examples[4:]])
    assert loss == pytest.approx(plain_training(theirs, epochs, 3e-3), rel=1e-4)
    for (name, weight), other in zip(net.lm.named_parameters(), theirs.parameters()):
        assert torch.allclose(weight, other, **NEAR), name


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_classification_equals_the_trainer(script, load, tmp_path, small_groups, kind):
    """One full batch per epoch: batch order cannot matter. The trained weights, and the
    probabilities of both sets of texts that were not trained on."""
    saved_as = transformers.BertModel if kind == "bert" else None
    folder, net = load(kind, saved_as, initializer_range=0.02, **NO_DROPOUT[kind])
    labels = np.array([0, 1, 2, 1, 0])
    ids = {"train": tokens(net), "test": tokens(net, ["a new film, good and long", "no", "it is"]),
           "extra": tokens(net, ["strange words, all", "yes"])}
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, pad_token_id=0)
    torch.manual_seed(8)
    fresh = torch.nn.Linear(32, 3, bias=kind == "bert")
    torch.nn.init.normal_(fresh.weight, std=0.02)  # the head that classify makes with this seed
    with torch.no_grad():
        if kind == "bert":
            theirs.classifier.weight.copy_(fresh.weight)
            theirs.classifier.bias.zero_()
        else:
            theirs.score.weight.copy_(fresh.weight)
    found = script.classify(net, ids, labels, 3, recipe_of("train", 6, 5, 2e-3), seed=8)
    rows = [{"input_ids": text.tolist(), "label": int(label)}
            for text, label in zip(ids["train"], labels)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=6, per_device_train_batch_size=5,
        learning_rate=2e-3, weight_decay=0.01, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", use_cpu=True)
    transformers.Trainer(
        model=theirs, args=arguments, train_dataset=rows,
        data_collator=transformers.DataCollatorWithPadding(net.tokenizer)).train()
    for name in ("test", "extra"):
        with torch.inference_mode():
            expected = theirs.eval()(**padded(net, ids[name])).logits.log_softmax(-1)
        assert np.allclose(found[name], expected, atol=2e-4)
    for name, weight in net.lm.base_model.named_parameters():
        assert torch.allclose(weight, theirs.base_model.get_parameter(name), **NEAR), name


def test_classification_decays_matrices_and_nothing_else(script, load):
    """By .01 a step. Positions past the end of all texts have no gradient: what is left of them is
    the decay alone. The biases start so large that it would show."""
    folder, net = load("bert", transformers.BertModel, **NO_DROPOUT["bert"])
    bias = net.lm.bert.encoder.layer[0].attention.self.key.bias
    with torch.no_grad():
        bias.fill_(1e4)  # that of the keys plays no part in attention
    ids, labels = tokens(net), np.array([0, 1, 0, 1, 0])
    sets = {"train": ids, "test": ids[:2], "extra": ids[:2]}
    script.classify(net, sets, labels, 2, recipe_of("train", 8, 5, 0.05), seed=3)
    name = "embeddings.position_embeddings.weight"
    before = stock(folder, "bert").bert.get_parameter(name)[100:]
    kept = math.prod([1 - 0.01 * 0.05 * (1 - step / 8) for step in range(8)])
    assert torch.allclose(net.lm.bert.get_parameter(name)[100:], before * kept, rtol=1e-6)
    assert abs(bias.mean().item() - 1e4) < 5, "decay would take 22 of it"


def test_a_batch_without_a_masked_token_changes_nothing(script, load):
    _, net = load("bert")
    seed = 0
    while np.random.default_rng([seed, 1]).random(3).min() < 0.15:
        seed += 1  # until none of [CLS] no [SEP] is drawn
    before = [weight.clone() for weight in net.modules.state_dict().values()]
    loss = script.pretrain(net, tokens(net, ["no"]), recipe_of("pretrain", 1, 1, 1e-3), seed)
    weights = net.modules.state_dict().values()
    assert loss == 0 and all(map(torch.equal, weights, before))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_dropout_is_on_in_training_and_off_in_the_test(script, load, kind):
    """At a learning rate of almost 0: without dropout the loss is that of the model itself."""
    _, net = load(kind)
    ids, recipe = tokens(net), recipe_of("pretrain", 1, 2, 1e-12)
    noisy = script.pretrain(net, ids, recipe, seed=1)
    assert noisy == script.pretrain(net, ids, recipe, seed=1)
    net.lm.train = lambda mode=True: torch.nn.Module.train(net.lm, False)
    assert noisy != script.pretrain(net, ids, recipe, seed=1)
    del net.lm.train
    sets = {"train": ids, "test": [ids[0], ids[1], ids[0]], "extra": [ids[1]]}
    labels = np.array([0, 1, 0, 1, 0])
    found = script.classify(net, sets, labels, 2, recipe_of("train", 1, 2, 1e-3), seed=1)
    assert np.allclose(found["test"][0], found["test"][2], atol=1e-6)
    assert np.allclose(found["test"][1], found["extra"][0], atol=1e-6)


def test_the_head_has_the_dropout_of_the_checkpoint(script, load, monkeypatch):
    rates, (_, net) = [], load("bert", hidden_dropout_prob=0.3)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p, *_: rates.append(p) or x)
    first = [np.array([0])]
    batch = script.pack(net, tokens(net)[:1], first, first)
    script.class_logits(net, torch.nn.Linear(32, 2).train(), batch)
    assert rates[-1] == 0.3


# Precision and devices


def test_fp16s_gradients_are_unscaled_before_they_are_clipped(script, load, monkeypatch):
    """Clipping at 1 leaves gradients that are 4,096 times too large no size of their own."""
    norms, clip = [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *args: norms.append(float(clip(*args))))
    for precision in ("fp16", "float32"):
        _, net = load("gpt2", precision=precision, **NO_DROPOUT["gpt2"])
        script.pretrain(net, tokens(net), recipe_of("pretrain", 1, 5, 1e-4), seed=1)
    assert len(norms) == 2 and norms[0] == pytest.approx(norms[1], rel=0.1)


@pytest.mark.parametrize("capability, precision, end", [
    ((7, 5), "bf16", pytest.raises(SystemExit, match="use fp16")),
    ((7, 5), "tf32", pytest.raises(SystemExit, match="use fp16")),
    ((7, 5), "fp16", contextlib.nullcontext()), ((8, 0), "bf16", contextlib.nullcontext())])
def test_a_card_before_8_0_is_told_to_use_fp16(script, monkeypatch, capability, precision, end):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with end:
        args = SimpleNamespace(device="auto", precision=precision)
        assert script.choose_device(args) == "cuda"


# A subsample: the three arms


@pytest.fixture
def sample_of(script, model_dir):
    """sample_of(kind) -> a Sample of 40 texts, of one and the same model."""
    folder_of = functools.cache(model_dir)
    task = script.Task([f"text number {i} of many" for i in range(40)], np.array([0, 1] * 20),
                       ["a", "b"], "data", "", {})

    def call(kind="bert", n=8, k=1, **changes):
        row = {"experiment": "e", "model": "tiny", "task": "task", "m": 6, "n": n, "subsample": k,
               "seed": 0} | changes
        recipe = {"objective": MODELS[kind][0], "precision": "float32", "max_length": 32,
                  "epochs": {"pretrain": 1, "train": 2}, "batch_sizes": {"pretrain": 4, "train": 4},
                  "learning_rates": {"pretrain": 1e-3, "train": 1e-3}}
        return script.draw(row, recipe, model_of(script, folder_of(kind), kind), task)

    return call


def test_arms_share_everything_but_the_pretraining_text(script, sample_of):
    """With extra = test the two arms agree to the last bit, and the checkpoint is unharmed."""
    sample = sample_of()
    sample.texts["extra"] = sample.texts["test"]
    sample.labels["extra"] = sample.labels["test"]
    row, found = script.run_subsample(sample, "cpu", 1)
    assert row["nll_extra"] == row["nll_test"] and row["loss_extra"] == row["loss_test"]
    assert np.array_equal(found["extra"]["test"], found["test"]["test"])
    assert np.array_equal(found["extra"]["test"], found["extra"]["extra"]), "the same texts"
    assert not np.array_equal(found["extra"]["test"], found["base"]["test"])
    script.run_subsample(sample_of(k=2), "cpu", 1)
    again, same = script.run_subsample(sample, "cpu", 1)
    assert again | {"seconds": 0} == row | {"seconds": 0}, "what ran before plays no part"
    assert all([np.array_equal(found[arm]["test"], same[arm]["test"]) for arm in ARMS])


def test_a_text_is_cut_after_its_first_tokens(script, sample_of):
    """6 tokens are [CLS], 4 of 5 words and [SEP]."""
    sample, other = sample_of(), sample_of()
    sample.recipe["max_length"] = 6
    for texts in other.texts.values():
        texts[:] = [text.removesuffix(" many") for text in texts]
    found = [script.run_subsample(each, "cpu", 1)[0] for each in (sample, other)]
    assert found[0] | {"seconds": 0} == found[1] | {"seconds": 0}


def test_each_arm_is_pretrained_on_its_own_texts(script, sample_of):
    sample = sample_of()
    net = script.load_network(sample.model, "cpu", "float32")
    row, _ = script.run_subsample(sample, "cpu", 1)
    for arm in ("extra", "test"):
        net.modules.load_state_dict(net.checkpoint)
        ids = tokens(net, sample.texts[arm])
        assert row[f"loss_{arm}"] == script.pretrain(
            net, ids, sample.recipe, script.training_seed(row))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_test_and_extra_may_change_places(script, sample_of, kind):
    """To the last bit: the same texts and seeds, only the names of two models change."""
    sample, other = sample_of(kind, n=12), sample_of(kind, n=12)
    for part in (other.texts, other.labels, other.numbers):
        part["test"], part["extra"] = part["extra"], part["test"]
    row, swapped = [script.run_subsample(each, "cpu", 1)[0] for each in (sample, other)]
    for arm, twin in (("base", "base"), ("extra", "test"), ("test", "extra")):
        assert row[f"nll_{arm}"] == swapped[f"nll_{twin}_on_extra"]
        assert row[f"nll_{arm}_on_extra"] == swapped[f"nll_{twin}"]
    names = ["base", "unseen", "seen", "boost", "bias", "w_bias"]
    effects = script.with_effects([row, swapped])[names]
    assert np.allclose(*effects.to_numpy(), atol=1e-12)


def test_seed_and_task_change_the_training_alone(script, sample_of):
    losses = []
    for changes in ({}, {"experiment": "other"}, {"seed": 1}, {"task": "other"}):
        row, _ = script.run_subsample(sample_of(**changes), "cpu", 1)
        losses.append(row["loss_extra"])
    assert losses[0] == losses[1] and len(set(losses)) == 3


def test_after_an_interruption_come_the_same_numbers(script, sample_of, monkeypatch):
    """In a notebook the module lives on, with a model in the middle of its training."""
    def interrupted(*_):
        raise KeyboardInterrupt

    row, _ = script.run_subsample(sample_of(), "cpu", 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "class_logits", interrupted)
        script.run_subsample(sample_of(), "cpu", 1)
    again, _ = script.run_subsample(sample_of(), "cpu", 1)
    assert {**again, "seconds": 0} == {**row, "seconds": 0}
