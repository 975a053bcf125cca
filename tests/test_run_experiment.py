"""The splits, the packing and the training of run_experiment.py against independent oracles: plain loops, hand arithmetic,
transformers' own models, classifiers and Trainer."""

import math
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

TEXTS = ["a short one", "this text is a good deal longer than the others, with commas, and it goes on for some time",
         "no", "the film was neither good nor bad but it was certainly a film", "yes it was"]


def network(script, folder, objective, precision="float32"):
    return script.load_network({"folder": folder, "gguf": None, "objective": objective}, "cpu", precision)


def tokens(net, texts=TEXTS):
    return [np.array(ids) for ids in net.tokenizer(texts)["input_ids"]]


def padded(net, ids):
    return net.tokenizer.pad({"input_ids": [text.tolist() for text in ids]}, padding_side="right", return_tensors="pt")


# Splits ------------------------------------------------------------------------------------------------------


def split_by_hand(labels, m, n, k):
    """The published splits (pandas sample per label, then scikit-learn's train_test_split): pandas itself, then plain loops."""
    frame = pd.DataFrame({"label": labels})
    each = m // len(set(labels))
    train = [row for c in sorted(set(labels)) for row in frame[frame["label"] == c].sample(n=each, random_state=42 + k).index]
    rest = [row for row in range(len(labels)) if row not in set(train)]
    order = list(np.random.RandomState(42 + k).permutation(len(rest)))
    return {"train": train, "test": [rest[i] for i in order[:n]], "extra": [rest[i] for i in order[n : 2 * n]]}


@pytest.mark.parametrize("m, n, k", [(50, 100, 1), (10, 3, 2), (7, 50, 100), (100, 120, 5)])
def test_splits_are_the_published_ones(script, m, n, k):
    labels = np.random.default_rng(m).choice(3, size=400, p=[0.6, 0.3, 0.1])  # imbalanced, rows of a class scattered
    found, expected = script.split_rows(labels, m, n, k), split_by_hand(labels, m, n, k)
    assert {name: rows.tolist() for name, rows in found.items()} == expected and len(found["train"]) == 3 * (m // 3)


# Masks, packing, logits and losses ---------------------------------------------------------------------------


def test_mask_rates(script):
    ids = np.tile(np.r_[101, np.arange(1000, 1098), 102], 4000)  # 98 plain tokens between two special ones
    rng = np.random.default_rng(0)
    corrupted, scored = script.mask_tokens(ids, [101, 102, 103], 103, 30000, rng)
    plain = np.count_nonzero((ids != 101) & (ids != 102))
    assert np.all((ids[scored] != 101) & (ids[scored] != 102)), "special tokens are never scored"
    untouched = np.setdiff1d(np.arange(len(ids)), scored)
    assert np.array_equal(corrupted[untouched], ids[untouched])
    masked, kept = corrupted[scored] == 103, corrupted[scored] == ids[scored]
    for found, expected, count in ((len(scored) / plain, 0.15, plain), (masked.mean(), 0.8, len(scored)), (kept.mean(), 0.1, len(scored))):
        assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / count)
    random = corrupted[scored][~masked & ~kept]
    assert abs(random.mean() - 15000) < 4 * 30000 / math.sqrt(12 * len(random)), "random tokens are uniform over the vocabulary"
    assert script.mask_tokens(ids, [101, 102, 103], 103, 30000, rng)[1].tolist() != scored.tolist(), "each epoch has its own masks"


# Each architecture that the script packs, and four that it does not.
ARCHITECTURES = {
    "albert": "mlm", "bert": "mlm", "camembert": "mlm", "distilbert": "mlm", "electra": "mlm", "gpt2": "clm", "gpt_neox": "clm", "llama": "clm",
    "opt": "clm", "roberta": "mlm", "xlm-roberta": "mlm",
    "bloom": "clm", "gptneo": "clm", "gemma2": "clm", "modernbert": "mlm"}


def test_every_packed_architecture_is_tried(script):
    assert script.PACKED <= set(ARCHITECTURES)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_packed_texts_give_the_hidden_states_of_texts_alone(script, model_dir, kind):
    net = network(script, model_dir(kind), ARCHITECTURES[kind])
    ids = tokens(net)
    net.lm.eval()
    plain = transformers.AutoModel.from_pretrained(net.lm.name_or_path).eval()
    with torch.inference_mode():
        found = script.hidden_states(net, ids, [np.arange(len(text)) for text in ids])
        alone = torch.cat([plain(input_ids=torch.tensor(text)[None]).last_hidden_state[0] for text in ids])
    assert torch.allclose(found, alone, atol=2e-5)
    rows, _ = script.pack(net, ids, ids)["input_ids"].shape
    assert (rows < len(ids)) == (kind in script.PACKED), "texts share rows, or nothing was tried"


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [7, 1, 2, 4, 3, 7, 5], np.random.default_rng(0).integers(1, 60, 64).tolist()])
def test_the_grid_holds_every_token_once_and_wastes_little(script, lengths):
    rows, width, starts = script.lay_out(np.array(lengths), True)
    places = np.concatenate([start + np.arange(length) for start, length in zip(starts, lengths)])
    assert len(set(places.tolist())) == sum(lengths) and places.max() < rows * width
    assert all(start // width == (start + length - 1) // width for start, length in zip(starts, lengths)), "a text lies in one row"
    assert rows * width <= max(lengths) * len(lengths) and rows * width < 1.2 * sum(lengths) + max(lengths)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "bert"])
def test_the_loss_equals_transformers_loss_of_whole_sequences(script, model_dir, kind):
    """The output layer runs at the kept positions alone. Gemma 2 squashes the logits after it."""
    causal = "bert" not in kind
    net = network(script, model_dir(kind), "clm" if causal else "mlm")
    ids, net.lm = tokens(net), net.lm.eval()
    keeps = [np.arange(len(text) - 1) if causal else np.arange(1, len(text), 3) for text in ids]
    targets = np.concatenate([text[keep + 1] if causal else text[keep] for text, keep in zip(ids, keeps)])
    assert script.lm_logits(net, ids, keeps).shape == (len(targets), len(net.tokenizer))
    plain = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    rows = padded(net, ids)
    labels = torch.full_like(rows["input_ids"], -100)
    for row, (text, keep) in enumerate(zip(ids, keeps)):
        labels[row, keep + causal] = torch.from_numpy(text[keep + causal])
    expected = plain.from_pretrained(net.lm.name_or_path).eval()(**rows, labels=labels).loss
    found = torch.nn.functional.cross_entropy(script.lm_logits(net, ids, keeps), torch.from_numpy(targets))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("kind, saved_as", [("bert", transformers.BertForMaskedLM), ("bert", transformers.BertModel), ("gpt2", None), ("albert", None),
                                            ("opt", None)])
def test_class_logits_equal_transformers_classifiers(script, model_dir, kind, saved_as):
    """BERT: pooler, dropout, linear (ALBERT's pooler is a bare layer); GPT-2: linear on the last real token (OPT's may be narrower than
    its layers). A pooler that the checkpoint holds is used, though a checkpoint saved from BertForMaskedLM has none and gets a fresh one."""
    causal, narrow = "bert" not in kind, {"word_embed_proj_dim": 16} if kind == "opt" else {}
    net = network(script, model_dir(kind, saved_as, **narrow), "clm" if causal else "mlm")
    assert net.fresh_pooler == (not causal and saved_as is not transformers.BertModel)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(net.lm.name_or_path, num_labels=3).eval()
    head, ids, net.lm = torch.nn.Linear(16 if narrow else 32, 3, bias=not causal).eval(), tokens(net), net.lm.eval()
    with torch.no_grad():
        if causal:
            theirs.score.weight.copy_(head.weight)
            theirs.config.pad_token_id = 0
        else:
            theirs.classifier.load_state_dict(head.state_dict())
            theirs.base_model.pooler.load_state_dict((net.pooler[1] if kind == "albert" else net.pooler).state_dict())
        found = script.class_logits(net, head, ids, [np.array([len(text) - 1 if causal else 0]) for text in ids])
        assert torch.allclose(found, theirs(**padded(net, ids)).logits, atol=2e-5)


@pytest.mark.parametrize("labels, found, acc, f1", [
    ([0, 0, 1, 1], [0, 1, 1, 1], 3 / 4, (2 / 3 + 4 / 5 + 0) / 3),  # class 2 neither occurs nor is predicted: 0
    ([0, 1, 2, 2], [0, 1, 2, 2], 1, 1),
    ([0, 0, 0, 1], [2, 2, 2, 2], 0, 0),
])
def test_scores_by_hand(script, labels, found, acc, f1):
    probabilities = np.where(np.arange(3) == np.array(found)[:, None], 0.6, 0.2)
    right = [0.6 if a == b else 0.2 for a, b in zip(labels, found)]
    expected = acc, f1, -sum(math.log(p) for p in right) / 4
    assert script.scores(np.log(probabilities), np.array(labels)) == pytest.approx(expected)


# Training against transformers' Trainer and a plain loop: in groups of few tokens, whose gradients add up -----------


def trainer_weights(model, rows, epochs, rate, decay, collator, folder):
    """Weights after the Trainer has taken one full batch per epoch (so that the batch order cannot matter)."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=len(rows), learning_rate=rate, weight_decay=decay,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", use_cpu=True)
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator).train()
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.fixture
def small_groups(script, monkeypatch):
    monkeypatch.setattr(script, "CPU_TOKENS", 30)


@pytest.mark.parametrize("kind, config", [("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}), ("llama", {})])
def test_causal_pretraining_equals_the_trainer(script, model_dir, tmp_path, small_groups, kind, config):
    """GPT-2's output layer is tied to its embeddings, Llama's is its own."""
    net = network(script, model_dir(kind, initializer_range=0.02, **config), "clm")
    ids = tokens(net)
    recipe = {"epochs": {"pretrain": 5}, "batch_sizes": {"pretrain": len(ids)}, "learning_rates": {"pretrain": 3e-3}}
    script.pretrain(net, ids, recipe, seed=1)
    rows = [{"input_ids": text.tolist()} for text in ids]
    collator = transformers.DataCollatorForLanguageModeling(net.tokenizer, mlm=False)
    weights = trainer_weights(transformers.AutoModelForCausalLM.from_pretrained(net.lm.name_or_path), rows, 5, 3e-3, 0.0, collator, tmp_path)
    for name, weight in net.lm.named_parameters():
        assert torch.allclose(weight, weights[name], atol=2e-5), name


def test_masked_pretraining_equals_a_plain_loop(script, model_dir, small_groups):
    """Batches of 2, padded, with the same masks, in a loop of transformers' model, AdamW and LambdaLR."""
    folder = model_dir("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.02)
    net = network(script, folder, "mlm")
    ids = tokens(net)
    recipe = {"epochs": {"pretrain": 2}, "batch_sizes": {"pretrain": 2}, "learning_rates": {"pretrain": 3e-3}}
    loss = script.pretrain(net, ids, recipe, seed=4)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)
    order, masks, history = np.random.default_rng([4, 0]), np.random.default_rng([4, 1]), []
    for epoch in range(2):
        rows = order.permutation(5)
        for start in (0, 2, 4):
            inputs, targets = [], []
            for row in rows[start : start + 2]:
                corrupted, scored = script.mask_tokens(ids[row], net.tokenizer.all_special_ids, 103, len(net.tokenizer), masks)
                inputs.append(corrupted)
                targets.append(np.where(np.isin(np.arange(len(corrupted)), scored), ids[row], -100))
            batch = padded(net, inputs)
            labels = torch.nn.utils.rnn.pad_sequence(list(map(torch.from_numpy, targets)), batch_first=True, padding_value=-100)
            logits = theirs(**batch).logits
            summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            count = int((labels != -100).sum())
            history.append((summed.item(), count))
            (summed / max(1, count)).backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert loss == pytest.approx(sum(s for s, _ in history[3:]) / sum(c for _, c in history[3:]), rel=1e-4)
    for (name, weight), other in zip(net.lm.named_parameters(), theirs.parameters()):
        assert torch.allclose(weight, other, atol=2e-5), name


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_classification_equals_the_trainer(script, model_dir, tmp_path, small_groups, kind):
    """The trained weights, read where they lie; and the class probabilities of both sets of texts that were not trained on."""
    none = {"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
    folder = model_dir(kind, transformers.BertModel if kind == "bert" else None, initializer_range=0.02, **none[kind])
    net = network(script, folder, "mlm" if kind == "bert" else "clm")
    ids, labels = tokens(net), np.array([0, 1, 2, 1, 0])
    test, extra = tokens(net, ["a new film, good and long", "no", "it was so"]), tokens(net, ["strange words, all", "yes"])
    recipe = {"epochs": {"train": 6}, "batch_sizes": {"train": len(ids)}, "learning_rates": {"train": 2e-3}}
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0)
    head = theirs.classifier if kind == "bert" else theirs.score
    torch.manual_seed(8)
    fresh = torch.nn.Linear(32, 3, bias=kind == "bert")
    torch.nn.init.normal_(fresh.weight, std=0.02)  # the head that classify makes with this seed
    with torch.no_grad():
        head.weight.copy_(fresh.weight)
        if kind == "bert":
            head.bias.zero_()
    _, found = script.classify(net, {"train": ids, "test": test, "extra": extra}, labels, 3, recipe, seed=8)
    rows = [{"input_ids": text.tolist(), "label": int(label)} for text, label in zip(ids, labels)]
    weights = trainer_weights(theirs, rows, 6, 2e-3, 0.01, transformers.DataCollatorWithPadding(net.tokenizer), tmp_path)
    for name, texts in (("test", test), ("extra", extra)):
        with torch.inference_mode():
            expected = theirs.eval()(**padded(net, texts)).logits.log_softmax(-1)
        assert np.allclose(found[name], expected, atol=2e-4)
    for name, weight in net.lm.base_model.named_parameters():  # the words' table is judged by what comes out
        other = weights[f"{'bert' if kind == 'bert' else 'transformer'}.{name}"]
        assert len(weight) == len(net.tokenizer) or torch.allclose(weight, other, atol=2e-5), name
    assert torch.equal(net.lm.get_input_embeddings().weight, net.checkpoint[0][1]), "the whole table is back, untouched"


def test_a_batch_without_a_masked_token_changes_nothing(script, model_dir):
    net = network(script, model_dir("bert"), "mlm")
    recipe = {"epochs": {"pretrain": 1}, "batch_sizes": {"pretrain": 1}, "learning_rates": {"pretrain": 1e-3}}
    without_mask = next(seed for seed in range(100) if np.random.default_rng([seed, 1]).random(3).min() > 0.15)
    loss = script.pretrain(net, tokens(net, ["no"]), recipe, without_mask)  # [CLS] no [SEP]
    assert loss == 0.0 and all(torch.equal(weight, saved) for weight, saved in net.checkpoint)


@pytest.mark.parametrize("kind, config", [("bert", {}), ("gpt2", {}), ("opt", {"word_embed_proj_dim": 16})])
def test_dropout_is_on_in_training_and_off_in_the_test(script, model_dir, kind, config):
    """Without it, the loss of one epoch at a learning rate of almost 0 is that of the model in evaluation."""
    net = network(script, model_dir(kind, **config), "mlm" if kind == "bert" else "clm")
    recipe = {name: {"pretrain": 1, "train": 1} for name in ("epochs", "batch_sizes")} | {"learning_rates": {"pretrain": 1e-12, "train": 1e-12}}
    ids = tokens(net)
    noisy = {script.pretrain(net, ids, recipe, seed=1), script.pretrain(net, ids, recipe, seed=1)}
    net.lm.train = lambda mode=True: torch.nn.Module.train(net.lm, False)
    assert len(noisy) == 1 and noisy != {script.pretrain(net, ids, recipe, seed=1)}
    del net.lm.train
    sets = {"train": ids, "test": [ids[0], ids[1], ids[0]], "extra": [ids[1]]}
    _, found = script.classify(net, sets, np.array([0, 1, 0, 1, 0]), 2, recipe, seed=1)
    assert np.allclose(found["test"][0], found["test"][2], atol=1e-6) and np.allclose(found["test"][1], found["extra"][0], atol=1e-6)


@pytest.mark.parametrize("kind, config, rate", [("bert", {"hidden_dropout_prob": 0.3}, 0.3), ("bert", {"classifier_dropout": 0.2}, 0.2),
                                                ("distilbert", {"seq_classif_dropout": 0.4}, 0.4), ("modernbert", {}, 0.0)])
def test_the_head_has_the_dropout_of_the_checkpoint(script, model_dir, monkeypatch, kind, config, rate):
    net, rates = network(script, model_dir(kind, **config), "mlm"), []
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda hidden, p, *_: rates.append(p) or hidden)
    script.class_logits(net, torch.nn.Linear(32, 2).train(), tokens(net)[:1], [np.array([0])])
    assert rates[-1] == rate


# Precision, memory, devices ----------------------------------------------------------------------------------


def unit_of(script, texts, labels, m=6, n=8, k=1, precision="float32", **row):
    labels = np.array(labels)
    split = script.split_rows(labels, m, n, k)
    recipe = {"objective": "mlm", "epochs": {"pretrain": 1, "train": 2}, "batch_sizes": {"pretrain": 4, "train": 4},
              "learning_rates": {"pretrain": 1e-3, "train": 1e-3}, "precision": precision, "max_length": 32}
    row = {"experiment": "e", "model": "tiny", "task": "task", "m": m, "n": n, "subsample": k, "num_classes": 2, "seed": 0} | row
    return {"row": row, "recipe": recipe, "rows": split, "labels": {name: labels[rows] for name, rows in split.items()},
            "texts": {name: [texts[r] for r in rows] for name, rows in split.items()}, "classes": ["a", "b"]}


def many(script, **changes):
    return unit_of(script, [f"text number {i} of many" for i in range(40)], [0, 1] * 20, **changes)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_near_float32(script, model_dir, precision):
    model = {"folder": model_dir("bert"), "gguf": None, "objective": "mlm"}
    rows = [script.run_subsample(many(script, precision=p), model, "cpu", 1)[0] for p in ("float32", precision)]
    assert rows[0]["loss_extra"] != rows[1]["loss_extra"] == pytest.approx(rows[0]["loss_extra"], rel=0.02)


def test_fp16_skips_a_step_whose_gradients_overflow(script, model_dir, monkeypatch):
    net, ids = network(script, model_dir("bert"), "mlm", "fp16"), None
    ids = tokens(net)
    recipe = {"epochs": {"pretrain": 1}, "batch_sizes": {"pretrain": len(ids)}, "learning_rates": {"pretrain": 1e-3}}

    def changed(scale):
        monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, init_scale=scale, enabled=enabled))
        assert 5 < script.pretrain(net, ids, recipe, seed=1) < 200
        return any(not torch.equal(weight, saved) for weight, saved in net.checkpoint)

    scaler = torch.amp.GradScaler
    assert not changed(2.0**60) and changed(1.0)


@pytest.mark.parametrize("capability, precision, words", [((7, 5), "bf16", "fp16"), ((7, 5), "tf32", "fp16"), ((7, 5), "fp16", None), ((8, 0), "bf16", None)])
def test_a_card_before_8_0_is_told_to_use_fp16(script, monkeypatch, capability, precision, words):
    """And under torchrun each process looks at its own GPU alone: a look would keep some hundred MB of the first one."""
    used = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: used.append(device) or capability)
    monkeypatch.setattr(torch, "ones", lambda *_, device: used.append(device) or np.ones(()))
    monkeypatch.setenv("LOCAL_RANK", "3")
    args = SimpleNamespace(device="auto", precision=precision)
    if words:
        with pytest.raises(script.UserError, match=words):
            script.choose_device(args)
    else:
        assert script.choose_device(args) == "cuda:3"
    assert set(used) == {"cuda:3"}


def test_default_workers_and_threads(script, monkeypatch):
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda _: range(16))
    args, small, large = SimpleNamespace(workers=None, threads=None), {"size": 17e6}, {"size": 5e8}
    found = [script.choose_processes(args, model, device, 99) for model, device in ((small, "cpu"), (large, "cpu"), (small, "cuda"))]
    assert found == [(16, 1), (1, 16), (1, 16)] and script.choose_processes(args, small, "cpu", 3) == (3, 1)


# The arms ----------------------------------------------------------------------------------------------------


def test_arms_share_everything_but_the_pretraining_text(script, model_dir):
    """With extra = test the arms extra and test must agree to the last bit; and the checkpoint comes back unharmed."""
    model = {"folder": model_dir("bert"), "gguf": None, "objective": "mlm"}
    unit = many(script)
    unit["texts"]["extra"] = unit["texts"]["test"]
    row, found = script.run_subsample(unit, model, "cpu", 1)
    assert row["acc_extra"] == row["acc_test"] and row["loss_extra"] == row["loss_test"]
    assert np.array_equal(found["extra"]["test"], found["test"]["test"]) and not np.array_equal(found["extra"]["test"], found["base"]["test"])
    assert np.array_equal(found["extra"]["test"], found["extra"]["extra"]), "the same texts in both sets"
    script.run_subsample(many(script, k=2), model, "cpu", 1)
    again, same = script.run_subsample(unit, model, "cpu", 1)
    assert row["loss_extra"] == again["loss_extra"]
    assert all(np.array_equal(found[arm]["test"], same[arm]["test"]) for arm in same), "what ran before plays no part"


def test_after_an_interruption_the_same_numbers_come_again(script, model_dir, monkeypatch):
    """In a notebook the module lives on: what was interrupted in the middle of a training is not used again."""
    model = {"folder": model_dir("bert"), "gguf": None, "objective": "mlm"}
    row, _ = script.run_subsample(many(script), model, "cpu", 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script, "class_logits", lambda *_: signal.raise_signal(signal.SIGINT))
        script.run_subsample(many(script), model, "cpu", 1)
    again, _ = script.run_subsample(many(script), model, "cpu", 1)
    assert {**again, "seconds": 0} == {**row, "seconds": 0}


def test_seed_changes_the_training_and_nothing_else_does(script, model_dir):
    model = {"folder": model_dir("bert"), "gguf": None, "objective": "mlm"}
    losses = [script.run_subsample(many(script, **row), model, "cpu", 1)[0]["loss_extra"] for row in ({}, {}, {"seed": 1}, {"task": "other"})]
    assert losses[0] == losses[1] and len(set(losses)) == 3


def test_no_memory_on_the_gpu_suggests_a_batch_size(script, model_dir, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")  # what torch raises on a full GPU; none is at hand here

    monkeypatch.setattr(script, "lm_logits", full)
    with pytest.raises(script.UserError, match="--batch-size 2"):
        script.run_subsample(many(script), {"folder": model_dir("bert"), "gguf": None, "objective": "mlm"}, "cpu", 1)


def test_a_model_file_that_changes_during_a_run_leaves_the_checkpoint_alone(script, model_dir, tmp_path):
    """Loaded weights are pages of the file: days into a run somebody may save another model there."""
    shutil.copytree(model_dir("gpt2"), tmp_path / "model")
    net = network(script, tmp_path / "model", "clm")
    before = [saved.clone() for _, saved in net.checkpoint]
    file = tmp_path / "model" / "model.safetensors"
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size // 4)
        opened.write(bytes(file.stat().st_size // 2))
    assert all(torch.equal(saved, old) for (_, saved), old in zip(net.checkpoint, before))


# Crossed arms ------------------------------------------------------------------------------------------------


def test_crossed_effects_by_hand(script):
    row = {"acc_base": 0.50, "acc_extra": 0.60, "acc_test": 0.66, "acc_base_on_extra": 0.40, "acc_extra_on_extra": 0.58, "acc_test_on_extra": 0.54}
    assert script.effects_of(row, crossed=False) == pytest.approx((0.10, 0.06))
    # boost: extra on test + .10, test on extra + .14; bias: on test + .06, on extra .58 - .54
    assert script.effects_of(row) == pytest.approx((0.12, 0.05))


@pytest.mark.parametrize("kind, objective", [("bert", "mlm"), ("gpt2", "clm")])
def test_when_test_and_extra_change_places_the_crossed_effects_stay(script, model_dir, kind, objective):
    """Exactly: the models are trained on the same texts with the same seeds, only their names change."""
    model = {"folder": model_dir(kind), "gguf": None, "objective": objective}
    unit, swapped = many(script, n=12), many(script, n=12)
    for part in ("texts", "labels", "rows"):
        swapped[part] = {"train": unit[part]["train"], "test": unit[part]["extra"], "extra": unit[part]["test"]}
    row, other = script.run_subsample(unit, model, "cpu", 1)[0], script.run_subsample(swapped, model, "cpu", 1)[0]
    for metric in ("acc", "f1", "nll"):
        assert script.effects_of(row, metric) == script.effects_of(other, metric)
    assert script.effects_of(row, "nll", crossed=False) != script.effects_of(other, "nll", crossed=False)
    assert row["nll_extra"] == other["nll_test_on_extra"] and row["nll_base"] == other["nll_base_on_extra"]
