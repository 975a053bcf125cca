"""Time run_experiment.py against the usual way of running the same experiment: a plain transformers Trainer pipeline.

    python tests/bench_experiment.py                              # all cases, 3 repeats each (bert-base: 1)
    python tests/bench_experiment.py --cases bert-tiny --repeats 1
    python tests/bench_experiment.py --cases gpt2-tiny --only usual --m 4 --n 4 --subsamples 1 --repeats 1
    python tests/bench_experiment.py --markdown table.md          # also appends the table to a file

Run by hand on a quiet machine; pytest does not collect it. Nothing is fetched but the wheels of rotten_tomatoes and bert-tiny.

The usual way, for each subsample and arm: from_pretrained, Trainer pretraining on the arm's texts, save_pretrained to a temporary
folder, from_pretrained with a classification head, Trainer classification on train, predict on test; batches padded to their longest
text. Splits, weights, epochs, learning rates, batch sizes and max_length are ours, and so is the optimiser (AdamW, linear decay, no
warm-up, clipping at 1, weight decay .01 in classification only). Otherwise it keeps the Trainer's defaults and PyTorch's own number
of threads, keeps no other checkpoint or log, and gets texts and splits ready made. Ours runs with the script's default workers and
threads. Dropout, masks, batch order and heads are other random draws, so accuracies and losses agree only on average.

Each run is a fresh process; usual and ours alternate, and the first to go alternates too. A small run of each is discarded.
  command s    the whole command, with imports and start-up: median (lowest-highest)
  subsample s  one more subsample, without start-up: (command at S subsamples - command at S/2) / (S/2), paired within a repeat, median.
               It holds for parallel workers too if their number divides S/2 (else give another --subsamples). Blank for S = 1.
  peak MB      highest resident memory of the process and its children together, sampled every .1 s, median over repeats.
               Pages that workers share are counted once for each.
  others %     the machine's processor time that went to anything else meanwhile, the most in any repeat. Above about 5 the ratios mean
               little: threads that share a product all wait for the one that is held up (the usual way then took 2 to 6 times as long).
  acc_, loss_  means over subsamples (loss: last pretraining epoch): they show that the same work is done. The Trainer divides a
               causal loss by one token per text too many, so gpt2-tiny's is 4 % lower in the usual way.
In the rows "usual / ours", the ratios of the medians, above 1 means that ours is faster or smaller.
"""
import argparse
import contextlib
import csv
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import mean, median

import psutil
import torch
import transformers
from transformers import (
    AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForMaskedLM,
    DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed)

SCRIPT = Path(__file__).resolve().parent.parent / "run_experiment.py"
TASK = "rotten_tomatoes"
CASES = {  # epochs and learning rates of pretraining, classification; the paper's rates are too low for the small models
    "bert-tiny": dict(mlm=True, epochs=(2, 3), rates=(5e-4, 1e-3), subsamples=4, repeats=3),
    "gpt2-tiny": dict(mlm=False, epochs=(1, 3), rates=(5e-4, 1e-3), subsamples=4, repeats=3),
    "bert-base": dict(mlm=True, epochs=(2, 3), rates=(1e-4, 5e-5), subsamples=1, repeats=1),
}
BATCH, EVALUATE_BATCH, MAX_LENGTH = 16, 64, 256
SCORES = ("acc_base", "acc_extra", "acc_test", "loss_extra", "loss_test")

transformers.utils.logging.disable_progress_bar()


# The usual way


def usual_way(case):
    """Run a subsample for each of the case's splits; return their SCORES."""
    tokenizer, rows = AutoTokenizer.from_pretrained(case["folder"]), []
    for seed, split in enumerate(case["splits"], start=43):
        data = {name: encode(tokenizer, case, indices) for name, indices in split.items()}
        row = {"acc_base": classify(case, tokenizer, case["folder"], data, seed)}
        for arm in ("extra", "test"):
            with tempfile.TemporaryDirectory() as folder:
                row[f"loss_{arm}"] = pretrain(case, tokenizer, data[arm], folder, seed)
                row[f"acc_{arm}"] = classify(case, tokenizer, folder, data, seed)
        rows.append(row)
    return rows


def encode(tokenizer, case, indices):
    """The rows as a list of examples: input_ids, attention_mask and so on, and label."""
    encoded = tokenizer([case["texts"][i] for i in indices], truncation=True, max_length=MAX_LENGTH)
    return [{**{key: values[j] for key, values in encoded.items()}, "label": case["labels"][i]} for j, i in enumerate(indices)]


def arguments(case, stage, seed, **settings):
    return TrainingArguments(
        case["work"], num_train_epochs=case["epochs"][stage], learning_rate=case["rates"][stage], seed=seed,
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=EVALUATE_BATCH, dataloader_pin_memory=False,
        save_strategy="no", report_to="none", disable_tqdm=True, **settings)


def pretrain(case, tokenizer, examples, folder, seed):
    """Pretrain the checkpoint on the examples without labels, save it to the folder, return the loss of the last epoch."""
    set_seed(seed)
    model = (AutoModelForMaskedLM if case["mlm"] else AutoModelForCausalLM).from_pretrained(case["folder"])
    unlabelled = [{key: values for key, values in example.items() if key != "label"} for example in examples]
    trainer = Trainer(
        model, arguments(case, 0, seed, logging_strategy="epoch"), train_dataset=unlabelled,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=case["mlm"], mlm_probability=0.15))
    trainer.train()
    model.save_pretrained(folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]


def classify(case, tokenizer, folder, data, seed):
    """Train a classifier from the folder's checkpoint on train, return its accuracy on test."""
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=case["num_classes"])
    settings = arguments(case, 1, seed, weight_decay=0.01, logging_strategy="no")
    trainer = Trainer(model, settings, train_dataset=data["train"], processing_class=tokenizer)
    trainer.train()
    predicted = trainer.predict(data["test"])
    return float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())


# The same for both ways


def save_random_model(name, tokenizer_folder, folder):
    """Save a model of seeded random weights with the tokenizer of another."""
    torch.manual_seed(0)
    tokens = AutoTokenizer.from_pretrained(tokenizer_folder)
    shape = dict(vocab_size=len(tokens), pad_token_id=tokens.pad_token_id)
    gpt2 = dict(n_layer=2, n_embd=128, n_head=2, bos_token_id=tokens.cls_token_id, eos_token_id=tokens.sep_token_id)
    model = GPT2LMHeadModel(GPT2Config(**gpt2, **shape)) if name == "gpt2-tiny" else BertForMaskedLM(BertConfig(**shape))
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)


# Measuring


def command_for(way, case, subsamples, out):
    """The command line of one way, which writes its results to the file `out`."""
    if way == "usual":
        job = out.with_name("job.json")
        job.write_text(json.dumps(dict(case, splits=case["splits"][:subsamples], work=str(out.parent / "trainer"))))
        return [sys.executable, str(Path(__file__).resolve()), "usual-way", str(job), str(out)]
    flags = {"model": case["folder"], "tasks": TASK, "m": case["m"], "n": case["n"], "subsamples": subsamples,
             "pretrain-epochs": case["epochs"][0], "train-epochs": case["epochs"][1], "pretrain-lr": case["rates"][0],
             "train-lr": case["rates"][1], "batch-size": BATCH, "max-length": MAX_LENGTH, "cache": case["cache"], "out": out}
    return [sys.executable, str(SCRIPT)] + [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


def measure(way, case, subsamples):
    """Run one way in a fresh process; return its seconds, peak MB and mean SCORES."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "results.csv", Path(folder) / "log"
        command = command_for(way, case, subsamples, out)
        with open(log, "w") as file:
            start, own, busy = time.perf_counter(), sum(os.times()[:4]), busy_seconds()
            process = psutil.Popen(command, stdout=file, stderr=file, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            peak = wait_and_watch(process)
            seconds, own, busy = time.perf_counter() - start, sum(os.times()[:4]) - own, busy_seconds() - busy
        if process.returncode:
            raise SystemExit(f"error: {way} ended with exit status {process.returncode}:\n{log.read_text()}")
        with open(out, newline="") as file:
            rows = list(csv.DictReader(file))
    assert len(rows) == subsamples, f"{way}: {len(rows)} rows, expected {subsamples}"
    scores = {score: mean(float(row[score]) for row in rows) for score in SCORES}
    return {"command s": seconds, "peak MB": peak, "others %": 100 * max(0, busy - own) / seconds / os.cpu_count(), **scores}


def busy_seconds():
    """Processor time that everything on the machine has used, with what a virtual machine's host withheld."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0)


def wait_and_watch(process):
    """Wait for a process to end; return the highest resident MB of it and its children."""
    peak = 0
    while True:
        try:
            process.wait(0.1)
            return peak
        except psutil.TimeoutExpired:
            with contextlib.suppress(psutil.NoSuchProcess):  # a child may end between the listing and the reading
                peak = max(peak, sum(each.memory_info().rss for each in [process, *process.children(recursive=True)]) / 2**20)


def run_case(name, case, ways):
    """Measure each way at all and at half the subsamples; return {way: summary}."""
    full = case["subsamples"]
    sizes = (full, full // 2) if full > 1 else (full,)
    runs = {(way, size): [] for way in ways for size in sizes}
    for way in ways:  # warms the file cache
        small = {part: rows[:4] for part, rows in case["splits"][0].items()}
        measure(way, dict(case, m=4, n=4, epochs=(1, 1), splits=[small]), 1)
    for repeat in range(case["repeats"]):
        for size in sizes:
            for way in ways if repeat % 2 == 0 else ways[::-1]:
                runs[way, size].append(measure(way, case, size))
                run = runs[way, size][-1]
                print(f"{name:9}  {way:5}  {size} subsamples  {run['command s']:8.1f} s, others {run['others %']:.0f} %", flush=True)
    return {way: summarise([runs[way, size] for size in sizes], sizes) for way in ways}


def summarise(runs, sizes):
    """Medians and means over the repeats of one way, with the seconds of one more subsample."""
    full = runs[0]
    row = {key: (mean if key in SCORES else median)(run[key] for run in full) for key in full[0]}
    row["spread"] = "{:.1f}-{:.1f}".format(min(run["command s"] for run in full), max(run["command s"] for run in full))
    pairs = [(a["command s"] - b["command s"]) / (sizes[0] - sizes[1]) for a, b in zip(*runs)] if len(runs) == 2 else []
    return row | {"subsample s": median(pairs) if pairs else None, "others %": max(run["others %"] for size in runs for run in size)}


def table_lines(name, summary):
    """The case's lines of the Markdown table."""
    lines, measures = [], ("command s", "subsample s", "peak MB")
    for way, row in summary.items():
        seconds, marginal, peak = (row[key] for key in measures)
        cells = [f"{seconds:.1f} ({row['spread']})", f"{marginal:.2f}" if marginal else "", f"{peak:.0f}", f"{row['others %']:.0f}"]
        lines.append([name, way, *cells, *(f"{row[score]:.3f}" for score in SCORES)])
    if len(summary) == 2:
        pairs = [(summary["usual"][key], summary["ours"][key]) for key in measures]
        lines.append([name, "usual / ours", *(f"{usual / ours:.2f}" if usual else "" for usual, ours in pairs), *[""] * (1 + len(SCORES))])
    return ["| " + " | ".join(line) + " |" for line in lines]


def machine():
    """One line on the machine, the versions and the date."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    processor = next((line.split(": ")[1] for line in cpuinfo.splitlines() if line.startswith("model name")), platform.machine())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{os.cpu_count()} cores ({processor}), {versions}, {date.today()}"


def main():
    if sys.argv[1:2] == ["usual-way"]:  # the child process: a job file and where to write the results
        rows = usual_way(json.loads(Path(sys.argv[2]).read_text()))
        with open(sys.argv[3], "w", newline="") as file:
            writer = csv.DictWriter(file, SCORES)
            writer.writeheader()
            return writer.writerows(rows)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--only", choices=("usual", "ours"), help="measure one way alone")
    parser.add_argument("--m", type=int, default=50, help="labelled training texts (default: 50)")
    parser.add_argument("--n", type=int, default=50, help="unlabelled texts, and also test texts (default: 50)")
    parser.add_argument("--subsamples", type=int, help="in place of each case's own (4, bert-base 1)")
    parser.add_argument("--repeats", type=int, help="in place of each case's own (3, bert-base 1)")
    parser.add_argument("--cache", type=Path, help="folder for downloads (default: the script's own)")
    parser.add_argument("--markdown", metavar="FILE", help="append machine and table to this file")
    args = parser.parse_args()

    spec = importlib.util.spec_from_file_location("run_experiment", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    registry, cache = script.load_registry(), args.cache or script.parse_args([]).cache
    task = script.load_task(TASK, registry["tasks"][TASK], cache)
    bert_tiny, _ = script.model_folder("bert-tiny", registry["models"]["bert-tiny"]["sources"], cache)
    header = ["case", "way", "command s", "subsample s", "peak MB", "others %", *SCORES]
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    about = machine()
    print(about)
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = bert_tiny if name == "bert-tiny" else Path(folder) / name  # the folder's name seeds our training
            if checkpoint != bert_tiny:
                save_random_model(name, bert_tiny, checkpoint)
            case = CASES[name] | {key: getattr(args, key) for key in ("m", "n", "subsamples", "repeats") if getattr(args, key)}
            splits = [script.split_rows(task["labels"], args.m, args.n, k) for k in range(1, case["subsamples"] + 1)]
            case |= dict(
                cache=str(cache), folder=str(checkpoint), texts=task["texts"], labels=task["labels"].tolist(),
                num_classes=len(task["classes"]), splits=[{part: rows.tolist() for part, rows in split.items()} for split in splits])
            summary = run_case(name, case, [args.only] if args.only else ["usual", "ours"])
            lines += table_lines(f"{name}, {case['subsamples']} subsamples", summary)
    print("\n".join(lines))
    if args.markdown:
        with open(args.markdown, "a", encoding="utf-8") as file:
            file.write("\n".join([f"m = {args.m}, n = {args.n}, batches of {BATCH}. {about}", "", *lines, "", ""]))


if __name__ == "__main__":
    main()
