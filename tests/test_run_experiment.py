"""The training and the splits of run_experiment.py against independent oracles: plain loops, whole-sequence losses of
transformers, transformers' own classifiers, and its Trainer."""

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

TEXTS = ["a short one", "this text is a good deal longer than the others, with commas, and it goes on for some time",
         "no", "the film was neither good nor bad but it was certainly a film", "yes it was"]


def network(script, folder, objective, precision="float32", max_length=64):
    script.load_network.cache_clear()
    return script.load_network(str(folder), None, objective, "cpu", precision, max_length)


# Splits ------------------------------------------------------------------------------------------------------


def split_by_hand(labels, m, n, k):
    """The published splits (pandas sample per label, then scikit-learn's train_test_split) in plain loops."""
    labels, train = list(labels), []
    for c in sorted(set(labels)):
        rows = [row for row, label in enumerate(labels) if label == c]
        order = list(np.random.RandomState(42 + k).permutation(len(rows)))
        train += [rows[order[i]] for i in range(m // len(set(labels)))]
    rest = [row for row in range(len(labels)) if row not in set(train)]
    order = list(np.random.RandomState(42 + k).permutation(len(rest)))
    return {"train": train, "test": [rest[i] for i in order[:n]], "extra": [rest[i] for i in order[n : 2 * n]]}


@pytest.mark.parametrize("m, n, k", [(50, 100, 1), (10, 3, 2), (7, 50, 100), (100, 120, 5)])
def test_split_equals_plain_loops(script, m, n, k):
    labels = np.random.default_rng(m).choice(3, size=400, p=[0.6, 0.3, 0.1])  # imbalanced, rows of a class scattered
    found, expected = script.split_rows(labels, m, n, k), split_by_hand(labels, m, n, k)
    for name in ("train", "extra", "test"):
        assert found[name].tolist() == expected[name], name
    assert len(found["train"]) == 3 * (m // 3)


def test_split_equals_the_published_libraries(script):
    sklearn = pytest.importorskip("sklearn.model_selection", reason="scikit-learn is not a dependency; run by hand where it is installed")
    import pandas as pd

    frame = pd.DataFrame({"label": np.random.default_rng(0).choice(4, size=500)})
    train = frame.groupby("label").sample(n=50 // 4, random_state=43)
    extra, test = sklearn.train_test_split(frame.drop(train.index), train_size=100, test_size=100, random_state=43)
    found = script.split_rows(frame["label"].to_numpy(), 50, 100, 1)
    assert [found[name].tolist() for name in ("train", "extra", "test")] == [list(part.index) for part in (train, extra, test)]


def test_changing_m_changes_test_and_changing_n_keeps_train(script):
    labels = np.random.default_rng(1).choice(2, size=500)
    a, b, c = (script.split_rows(labels, m, n, 1) for m, n in ((50, 100), (100, 100), (50, 50)))
    assert a["test"].tolist() != b["test"].tolist()
    assert a["train"].tolist() == c["train"].tolist() and a["test"][:50].tolist() == c["test"].tolist()


# Masks, losses and hidden states -----------------------------------------------------------------------------


def test_mask_rates(script):
    ids = np.tile(np.r_[101, np.arange(1000, 1098), 102], 4000)  # 98 plain tokens between two special ones
    corrupted, scored = script.mask_tokens(ids, [101, 102, 103], 103, 30000, np.random.default_rng(0))
    plain = np.count_nonzero((ids != 101) & (ids != 102))
    assert np.all((ids[scored] != 101) & (ids[scored] != 102)), "special tokens are never scored"
    untouched = np.setdiff1d(np.arange(len(ids)), scored)
    assert np.array_equal(corrupted[untouched], ids[untouched])
    masked, kept = corrupted[scored] == 103, corrupted[scored] == ids[scored]
    for found, expected, count in ((len(scored) / plain, 0.15, plain), (masked.mean(), 0.8, len(scored)), (kept.mean(), 0.1, len(scored))):
        assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / count)
    random = corrupted[scored][~masked & ~kept]
    assert abs(random.mean() - 15000) < 4 * 30000 / math.sqrt(12 * len(random)), "random tokens are uniform over the vocabulary"


def test_masks_differ_between_epochs_and_repeat_with_the_seed(script):
    ids = np.arange(1000, 2000)
    first, again = np.random.default_rng(3), np.random.default_rng(3)
    epochs = [script.mask_tokens(ids, [], 103, 30000, first)[1].tolist() for _ in range(2)]
    assert epochs[0] != epochs[1] and epochs[0] == script.mask_tokens(ids, [], 103, 30000, again)[1].tolist()


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2", "llama", "modernbert"])
def test_packed_texts_give_the_hidden_states_of_texts_alone(script, model_dir, kind):
    objective = "clm" if kind in ("gpt2", "llama") else "mlm"
    net = network(script, model_dir(kind), objective)
    # RoBERTa counts positions from its pad token (0 here) + 1; ModernBERT's sliding window wants padded batches.
    assert net.first_position == {"roberta": 1, "modernbert": None}.get(kind, 0)
    ids = script.tokenise(net, TEXTS)
    net.lm.eval()
    plain = transformers.AutoModel.from_pretrained(net.lm.name_or_path).eval()
    with torch.inference_mode():
        found = script.run_model(net, ids, np.arange(sum(map(len, ids))), head=False)
        alone = torch.cat([plain(input_ids=torch.tensor(text)[None]).last_hidden_state[0] for text in ids])
        padded = net.tokenizer.pad({"input_ids": [text.tolist() for text in ids]}, padding_side="right", return_tensors="pt")
        together = plain(**padded).last_hidden_state[padded["attention_mask"].bool()]
    assert torch.allclose(found, alone, atol=2e-5)
    assert torch.allclose(found, together, atol=2e-5), "padding does not change hidden states"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_causal_loss_equals_the_whole_sequence_loss(script, model_dir, kind):
    net = network(script, model_dir(kind), "clm")
    ids = script.tokenise(net, TEXTS)
    net.lm.eval()
    if net.decoder is not None:
        net.scratch = torch.empty(7, len(net.decoder.weight)), torch.empty_like(net.decoder.weight)  # several parts
    loss, count = script.lm_loss(net, ids, None)
    plain = transformers.AutoModelForCausalLM.from_pretrained(net.lm.name_or_path).eval()
    rows = net.tokenizer.pad({"input_ids": [text.tolist() for text in ids]}, padding_side="right", return_tensors="pt")
    targets = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    assert count == sum(len(text) - 1 for text in ids)
    assert loss.item() == pytest.approx(plain(**rows, labels=targets).loss.item(), rel=1e-5)


def test_masked_loss_equals_the_whole_sequence_loss(script, model_dir):
    net = network(script, model_dir("bert"), "mlm")
    ids = script.tokenise(net, TEXTS)
    net.lm.eval()
    loss, count = script.lm_loss(net, ids, np.random.default_rng(5))
    corrupted, scored = script.mask_tokens(np.concatenate(ids), net.tokenizer.all_special_ids, net.tokenizer.mask_token_id, len(net.tokenizer), np.random.default_rng(5))
    targets = np.full(len(corrupted), -100)
    targets[scored] = np.concatenate(ids)[scored]
    ends = np.cumsum([len(text) for text in ids])[:-1]
    plain = transformers.AutoModelForMaskedLM.from_pretrained(net.lm.name_or_path).eval()
    rows = net.tokenizer.pad({"input_ids": [part.tolist() for part in np.split(corrupted, ends)]}, padding_side="right", return_tensors="pt")
    labels = torch.full_like(rows["input_ids"], -100)
    labels[rows["attention_mask"].bool()] = torch.from_numpy(targets)
    expected = plain(**rows, labels=labels).loss
    assert count == len(scored) > 3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for (name, weight), theirs in zip(net.lm.named_parameters(), plain.parameters()):
        assert torch.allclose(weight.grad, theirs.grad, atol=1e-5), f"gradient of {name}"


@pytest.mark.parametrize("kind, saved_as", [("bert", transformers.BertForMaskedLM), ("bert", transformers.BertModel), ("gpt2", None)])
def test_class_logits_equal_transformers_classifiers(script, model_dir, kind, saved_as):
    """BERT: pooler, dropout, linear; GPT-2: linear on the last real token. A pooler that the checkpoint holds is used,
    though a checkpoint saved from BertForMaskedLM has none and gets a fresh one."""
    folder = model_dir(kind, saved_as)
    net = network(script, folder, "clm" if kind == "gpt2" else "mlm")
    assert net.fresh_pooler == (saved_as is transformers.BertForMaskedLM)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    head = torch.nn.Linear(32, 3, bias=kind == "bert").eval()
    with torch.no_grad():
        if kind == "bert":
            theirs.classifier.load_state_dict(head.state_dict())
            if net.fresh_pooler:
                theirs.bert.pooler.load_state_dict(net.pooler.state_dict())
        else:
            theirs.score.weight.copy_(head.weight)
            theirs.config.pad_token_id = 0
        ids = script.tokenise(net, TEXTS)
        net.lm.eval()
        found = script.class_logits(net, head, ids)
        rows = net.tokenizer.pad({"input_ids": [text.tolist() for text in ids]}, padding_side="right", return_tensors="pt")
        assert torch.allclose(found, theirs(**rows).logits, atol=2e-5)


# Rows of several texts, dropout, and the loss of the head's last layer -------------------------------------


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [7, 1, 2, 4, 3, 7, 5], np.random.default_rng(0).integers(1, 60, 64).tolist()])
@pytest.mark.parametrize("causal", [False, True])
def test_lay_out_shares_rows_between_texts(script, lengths, causal):
    """Every token has a place of its own, a text lies in one row in its order, and the mask lets it see itself alone."""
    lengths = np.array(lengths)
    rows, longest, slots, mask = script.lay_out(lengths, causal)
    assert longest == lengths.max() and mask.shape == (rows, 1, longest, longest) and len(set(slots.tolist())) == lengths.sum()
    assert math.ceil(lengths.sum() / longest) <= rows <= len(lengths)
    expected = np.zeros((rows, longest, longest), dtype=bool)
    pads = np.ones((rows, longest), dtype=bool)
    for places in np.split(slots, np.cumsum(lengths)[:-1]):
        row, first, count = places[0] // longest, places[0] % longest, len(places)
        assert places.tolist() == list(range(places[0], places[0] + count)) and (places // longest == row).all()
        expected[row, first : first + count, first : first + count] = np.tri(count, dtype=bool) if causal else True
        pads[row, first : first + count] = False
    found = mask[:, 0] == 0
    assert np.array_equal(found & ~pads[:, :, None], expected), "a token sees the tokens of its text (causal: before it) and itself"
    assert np.isneginf(mask[:, 0][~found]).all() and found.any(2).all(), "each pad sees one, or its softmax is not a number"


def test_lay_out_fills_rows(script):
    assert script.lay_out(np.array([5, 3, 2, 4, 1]), False)[0] == 3
    assert script.lay_out(np.array([5, 3, 2]), False)[0] == 2


@pytest.mark.parametrize("causal, rate", [(False, 0.3), (True, 0.3), (False, 0.0)])
def test_packed_attention_and_its_gradients_equal_one_text_at_a_time(script, causal, rate):
    """Also with dropout: the oracle is given the same factors and takes one text after the other, in float64."""
    lengths, heads, size = np.array([4, 9, 2, 6, 3]), 3, 5
    rows, longest, slots, mask = script.lay_out(lengths, causal)
    assert rows < len(lengths)
    back = slots[:, None] // longest * heads * longest + np.arange(heads) * longest + slots[:, None] % longest
    there = np.zeros(rows * heads * longest, dtype=np.int64)
    there[back.ravel()] = np.arange(back.size)
    places = {heads: (torch.from_numpy(there), torch.from_numpy(back.ravel()))}.__getitem__
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 24, size, requires_grad=True) for _ in range(3)]
    packing = rows, places, torch.from_numpy(mask), np.random.SFC64(7)
    out, _ = script.packed_attention(None, *inputs, None, packing=packing, dropout=rate, scaling=0.4)
    upstream = torch.randn(1, 24, heads, size)
    out.backward(upstream)
    assert out.shape == upstream.shape
    factors = script.keep_factors(np.random.SFC64(7), torch.empty(rows, heads, longest, longest), rate)
    assert rate == 0 or 0.2 < (factors == 0).float().mean() < 0.4
    copies = [part.detach().double().requires_grad_() for part in inputs]
    for places, tokens in zip(np.split(slots, np.cumsum(lengths)[:-1]), np.split(np.arange(24), np.cumsum(lengths)[:-1])):
        query, key, value = (part[0][:, tokens] for part in copies)
        scores = query @ key.transpose(1, 2) * 0.4
        if causal:
            scores = scores.masked_fill(torch.ones(len(tokens), len(tokens)).triu(1).bool(), -math.inf)
        inside = places % longest
        kept = factors[places[0] // longest][:, inside][:, :, inside].double()
        expected = ((scores.softmax(2) * kept) @ value).transpose(0, 1)
        assert torch.allclose(out[0, tokens].double(), expected, atol=1e-6)
        expected.backward(upstream[0, tokens].double())
    for part, copy in zip(inputs, copies):
        assert torch.allclose(part.grad.double(), copy.grad, atol=1e-6)


def test_packed_attention_refuses_squashed_scores(script):
    """It would leave the squashing out; find_first_position then takes padded batches."""
    x = torch.randn(1, 2, 3, 4)
    places = torch.arange(6), torch.arange(6)
    with pytest.raises(ValueError):
        script.packed_attention(None, x, x, x, None, packing=(1, lambda heads: places, torch.zeros(1, 1, 3, 3), None), softcap=5.0)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_factors(script, rate):
    """As torch.nn.Dropout: dropped at the rate, independently, the rest scaled so that the mean stays; same seed, same draws."""
    like = torch.empty(1000, 999)
    factors = script.keep_factors(np.random.SFC64(1), like, rate)
    dropped, error = (factors == 0).double(), math.sqrt(rate * (1 - rate) / like.numel())
    assert factors.shape == like.shape and factors.dtype == torch.float32 and factors[factors > 0].unique().numel() == 1
    assert abs(dropped.mean() - rate) < 4 * error and factors.max().item() == pytest.approx(1 / (1 - rate), rel=2e-5)
    for lag in (1, 2, 3, 4, 999):  # four draws come from one random number
        pairs = dropped.flatten()[lag:] * dropped.flatten()[:-lag]
        assert abs(pairs.mean() - rate**2) < 5 * math.sqrt(rate**2 / like.numel())
    assert torch.equal(factors, script.keep_factors(np.random.SFC64(1), like, rate))
    assert not torch.equal(factors, script.keep_factors(np.random.SFC64(2), like, rate))
    assert script.keep_factors(np.random.SFC64(1), like.bfloat16(), rate).dtype == torch.bfloat16
    assert script.keep_factors(np.random.SFC64(1), like, 1.0).count_nonzero() < 50, "a rate of 1, less a step"


@pytest.mark.parametrize("kind, objective", [("bert", "mlm"), ("gpt2", "clm")])
def test_dropout_is_on_in_training_alone_and_follows_the_seed(script, model_dir, kind, objective):
    net = network(script, model_dir(kind), objective)
    ids = script.tokenise(net, TEXTS)
    everything = np.arange(sum(map(len, ids)))

    def hidden(seed):
        net.noise = np.random.SFC64(seed)
        return script.run_model(net, ids, everything, head=False)

    assert sum(type(module) is script.Dropout for module in net.lm.modules()) >= 5
    assert not any(type(module) is torch.nn.Dropout for module in net.lm.modules())
    net.lm.eval()
    assert torch.equal(hidden(1), hidden(2))
    plain = hidden(1)
    net.lm.train()
    assert torch.equal(hidden(1), hidden(1)) and not torch.equal(hidden(1), hidden(2)) and not torch.allclose(hidden(1), plain, atol=0.1)


def test_mean_output_under_dropout_equals_torch(script, model_dir):
    """2,000 draws of ours and of torch's own dropout, in the hidden states of one layer: same mean and same spread."""
    folder = model_dir("bert", num_hidden_layers=1, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    net, draws = network(script, folder, "mlm"), 2000
    ids = [np.array([101, 2003, 2143, 102])] * 50
    net.lm.train()
    keep = np.arange(4 * len(ids))
    plain = transformers.AutoModel.from_pretrained(folder).train()
    torch.manual_seed(0)
    with torch.no_grad():
        ours = torch.cat([script.run_model(net, ids, keep, head=False).view(-1, 4, 32) for _ in range(draws // 50)]).double()
        theirs = torch.cat([plain(torch.from_numpy(np.array(ids))).last_hidden_state for _ in range(draws // 50)]).double()
    error = torch.sqrt((ours.var(0) + theirs.var(0)) / draws)
    assert ((ours.mean(0) - theirs.mean(0)) / error).abs().max() < 4.5
    assert (ours.var(0) / theirs.var(0)).log().abs().max() < 0.35 and (ours.var(0) / theirs.var(0)).log().mean().abs() < 0.05


@pytest.mark.parametrize("rows", [4, 10, 64])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("upstream", [1.0, 2.5])
def test_decoder_loss_equals_cross_entropy(script, rows, with_bias, upstream):
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(23, 8, requires_grad=True)
    bias, targets = torch.randn(23, requires_grad=True) if with_bias else None, torch.randint(23, (10,))
    inputs = [part for part in (hidden, weight, bias) if part is not None]
    expected = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight, bias), targets)
    gradients = torch.autograd.grad(upstream * expected, inputs)
    stale = torch.full((rows, 23), math.nan), torch.full((23, 8), math.nan)
    loss = script.DecoderLoss.apply(hidden, weight, bias, targets, *stale)
    (upstream * loss).backward() if upstream != 1 else loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for part, gradient in zip(inputs, gradients):
        assert torch.allclose(part.grad, gradient, atol=1e-6)


@pytest.mark.parametrize("kind, found", [("bert", True), ("gpt2", True), ("llama", True), ("modernbert", True),
                                         ("gemma2", False), ("esm", False), ("mobilebert", False)])
def test_decoder_is_used_where_it_ends_the_head(script, model_dir, kind, found):
    """Gemma 2 squashes the logits after it, ESM adds a bias, MobileBERT uses the weights alone: those keep their own way to the loss."""
    objective = "mlm" if "bert" in kind or kind == "esm" else "clm"
    net = network(script, model_dir(kind), objective)
    assert (net.decoder is not None) == found
    loss, count = script.lm_loss(net, script.tokenise(net, TEXTS), np.random.default_rng(5))
    loss.backward()
    assert 0 < loss.item() < 60 and count > 3 and all(weight.grad.isfinite().all() for weight in net.lm.parameters() if weight.grad is not None)
    assert network(script, model_dir(kind), objective, precision="bf16").decoder is None, "its products are not made in bf16"


# Training against transformers' Trainer ----------------------------------------------------------------------


def trainer_weights(model, rows, epochs, rate, decay, collator, folder):
    """Weights after the Trainer has taken one full batch per epoch (so that the batch order cannot matter)."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=len(rows), learning_rate=rate, weight_decay=decay,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", use_cpu=True)
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator).train()
    return {name: weight.detach() for name, weight in model.named_parameters()}


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.mark.parametrize("kind, config", [("gpt2", NO_DROPOUT), ("llama", {})], ids=["tied output layer", "output layer of its own"])
def test_causal_pretraining_equals_the_trainer(script, model_dir, tmp_path, kind, config):
    folder = model_dir(kind, initializer_range=0.02, **config)
    net = network(script, folder, "clm")
    ids = script.tokenise(net, TEXTS)
    recipe = {"epochs": {"pretrain": 5}, "batch_sizes": {"pretrain": len(ids)}, "learning_rates": {"pretrain": 3e-3}}
    script.pretrain(net, ids, recipe, seed=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rows = [{"input_ids": text.tolist()} for text in ids]
    collator = transformers.DataCollatorForLanguageModeling(net.tokenizer, mlm=False)
    weights = trainer_weights(theirs, rows, 5, 3e-3, 0.0, collator, tmp_path)
    for name, weight in net.lm.named_parameters():
        assert torch.allclose(weight, weights[name], atol=2e-5), name


def test_classification_training_equals_the_trainer(script, model_dir, tmp_path):
    folder = model_dir("bert", transformers.BertModel, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.02)
    net = network(script, folder, "mlm")
    ids, labels = script.tokenise(net, TEXTS), np.array([0, 1, 2, 1, 0])
    recipe = {"epochs": {"train": 6}, "batch_sizes": {"train": len(ids)}, "learning_rates": {"train": 2e-3}}
    torch.manual_seed(8)
    fresh = torch.nn.Linear(32, 3)
    torch.nn.init.normal_(fresh.weight, std=0.02)  # the head that train_classifier makes with this seed
    torch.nn.init.zeros_(fresh.bias)
    head, _ = script.train_classifier(net, ids, labels, 3, recipe, seed=8)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    theirs.classifier.load_state_dict(fresh.state_dict())
    rows = [{"input_ids": text.tolist(), "label": int(label)} for text, label in zip(ids, labels)]
    weights = trainer_weights(theirs, rows, 6, 2e-3, 0.01, transformers.DataCollatorWithPadding(net.tokenizer), tmp_path)
    ours = {f"bert.{name}": weight for name, weight in net.lm.bert.named_parameters()}
    words = "bert.embeddings.word_embeddings.weight"  # trained in a table of the words that occur
    ours[words], weights[words] = net.table, weights[words][net.vocabulary]
    assert sorted(set(np.concatenate(ids))) == net.vocabulary.tolist()
    ours |= {f"bert.pooler.{name}": weight for name, weight in net.pooler.named_parameters()}
    ours |= {f"classifier.{name}": weight for name, weight in head.named_parameters()}
    assert set(ours) == set(weights)
    for name, weight in ours.items():
        assert torch.allclose(weight, weights[name], atol=2e-5), name


def test_a_batch_without_a_masked_token_changes_nothing(script, model_dir):
    net = network(script, model_dir("bert"), "mlm")
    before = [weight.clone() for weight in net.weights]
    recipe = {"epochs": {"pretrain": 1}, "batch_sizes": {"pretrain": 1}, "learning_rates": {"pretrain": 1e-3}}
    rng_without_mask = next(seed for seed in range(100) if np.random.default_rng([seed, 1]).random(3).min() > 0.15)
    loss = script.pretrain(net, script.tokenise(net, ["no"]), recipe, rng_without_mask)  # [CLS] no [SEP]
    assert loss == 0.0 and all(torch.equal(a, b) for a, b in zip(before, net.weights))


# The arms ----------------------------------------------------------------------------------------------------


def unit_of(script, texts, labels, m=6, n=8, k=1, **row):
    split = script.split_rows(np.array(labels), m, n, k)
    recipe = {"objective": "mlm", "epochs": {"pretrain": 1, "train": 2}, "batch_sizes": {"pretrain": 4, "train": 4, "evaluate": 4},
              "learning_rates": {"pretrain": 1e-3, "train": 1e-3}, "precision": "float32", "max_length": 32}
    row = {"model": "tiny", "task": "task", "m": m, "n": n, "subsample": k, "num_classes": len(set(labels)), "seed": 0} | row
    return {"row": row, "recipe": recipe, "rows": split["test"], "labels": {name: np.array(labels)[rows] for name, rows in split.items()},
            "texts": {name: [texts[r] for r in rows] for name, rows in split.items()}}


def test_arms_share_everything_but_the_pretraining_text(script, model_dir):
    """With extra = test the arms extra and test must agree to the last bit; and the checkpoint comes back unharmed."""
    model = {"folder": model_dir("bert"), "gguf": None, "objective": "mlm"}
    unit = unit_of(script, [f"text number {i} of many" for i in range(40)], [0, 1] * 20)
    unit["texts"]["extra"] = unit["texts"]["test"]
    script.load_network.cache_clear()
    row, probabilities = script.run_subsample(unit, model, "cpu", 1)
    assert row["acc_extra"] == row["acc_test"] and row["loss_extra"] == row["loss_test"]
    assert np.array_equal(probabilities["extra"], probabilities["test"])
    assert not np.array_equal(probabilities["extra"], probabilities["base"])
    again, same = script.run_subsample(unit, model, "cpu", 1)
    assert row["loss_extra"] == again["loss_extra"], "what ran before plays no part"
    assert all(np.array_equal(probabilities[arm], same[arm]) for arm in same)
    net = script.load_network(str(model["folder"]), None, "mlm", "cpu", "float32", 32)
    script.restore(net)
    fresh = transformers.AutoModelForMaskedLM.from_pretrained(model["folder"])
    for (name, weight), theirs in zip(net.lm.named_parameters(), fresh.parameters()):
        assert torch.equal(weight, theirs), name


def test_seed_changes_the_training_and_nothing_else_does(script, model_dir):
    model = {"folder": model_dir("bert"), "gguf": None, "objective": "mlm"}
    texts, labels = [f"text number {i} of many" for i in range(40)], [0, 1] * 20
    runs = [script.run_subsample(unit_of(script, texts, labels, **row), model, "cpu", 1)[0] for row in ({}, {}, {"seed": 1}, {"task": "other"})]
    losses = [row["loss_extra"] for row in runs]
    assert losses[0] == losses[1] and len(set(losses)) == 3


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_place(script, model_dir, capsys):
    model = {"folder": model_dir("gpt2"), "gguf": None, "objective": "clm"}
    unit = unit_of(script, [f"text number {i} of many" for i in range(40)], [0, 1] * 20, k=3)
    unit["recipe"]["learning_rates"]["pretrain"] = 1e38
    unit["recipe"]["epochs"]["pretrain"] = 3
    with pytest.raises(SystemExit) as end:
        script.run_subsample(unit, model, "cpu", 1)
    message = capsys.readouterr().err
    assert end.value.code == 2 and "arm extra, task task, subsample 3" in message and "--pretrain-lr" in message


def test_no_memory_on_the_gpu_suggests_a_batch_size(script, model_dir, capsys, monkeypatch):
    model = {"folder": model_dir("bert"), "gguf": None, "objective": "mlm"}
    unit = unit_of(script, [f"text number {i} of many" for i in range(40)], [0, 1] * 20)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")  # what torch raises on a full GPU; none is at hand here

    monkeypatch.setattr(script, "lm_loss", full)
    with pytest.raises(SystemExit):
        script.run_subsample(unit, model, "cpu", 1)
    assert "--batch-size 2" in capsys.readouterr().err


def test_bf16_stays_near_float32(script, model_dir):
    model = {"folder": model_dir("bert"), "gguf": None, "objective": "mlm"}
    losses = {}
    for precision in ("float32", "bf16"):
        unit = unit_of(script, [f"text number {i} of many" for i in range(40)], [0, 1] * 20)
        unit["recipe"]["precision"] = precision
        losses[precision] = script.run_subsample(unit, model, "cpu", 1)[0]["loss_extra"]
    assert losses["bf16"] != losses["float32"] and losses["bf16"] == pytest.approx(losses["float32"], rel=0.02)


def test_a_model_file_that_changes_during_a_run_leaves_the_checkpoint_alone(script, model_dir, tmp_path):
    """Loaded weights are pages of the file: days into a run somebody may save another model there."""
    shutil.copytree(model_dir("gpt2"), tmp_path / "model")
    script.load_network.cache_clear()
    net = script.load_network(str(tmp_path / "model"), None, "clm", "cpu", "float32", 32)
    before = [weight.clone() for weight in net.checkpoint]
    file = tmp_path / "model" / "model.safetensors"
    with open(file, "r+b") as opened:
        opened.seek(file.stat().st_size // 4)
        opened.write(bytes(file.stat().st_size // 2))
    script.restore(net)
    script.load_network.cache_clear()
    assert all(torch.equal(weight, saved) for weight, saved in zip(net.weights, before))
