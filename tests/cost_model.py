"""What a subsample costs: operations, bytes and seconds from the shape of the model and the texts; and what the paper's grid costs.

    python tests/cost_model.py               # measures, predicts, rewrites the generated part of docs/scale.md: about 3 minutes
    python tests/cost_model.py --arithmetic  # the paper's grid alone: seconds, no model is run, nothing is written

Run by hand on a quiet machine; pytest does not collect it. docs/scale.md derives the formulas and defines the terms. Three constants
are measured by small tests of one core (matrix rate, memory rate, time per layer and step). The fourth, the time of what is done to
each value between the products, is set so that the first measured point fits. The other points are predicted and printed beside the
measured.
"""

import argparse
import csv
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import NormalDist, mean

import numpy as np
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import run_experiment as experiment

SHAPES = {  # layers, hidden size, vocabulary, objective
    "bert": (12, 768, 30522, "mlm"), "gpt2": (12, 768, 50257, "clm"), "bert-tiny": (2, 128, 30522, "mlm"),
    "bert-4x256": (4, 256, 30522, "mlm"), "gpt2-4x256": (4, 256, 30522, "clm"),
}
POINTS = [("bert-tiny", "rotten_tomatoes", 50), ("bert-tiny", "rotten_tomatoes", 200), ("bert-tiny", "bbc_news", 200),
          ("bert-4x256", "rotten_tomatoes", 50), ("gpt2-4x256", "rotten_tomatoes", 50)]  # the first sets the time per value
EPOCHS, BATCHES, M, LENGTH = {"pretrain": 2, "train": 3}, {"pretrain": 16, "train": 16, "evaluate": 64}, 50, 96
STEP_BYTES = 44  # per weight: gradient written 4, its norm 4, clipped 8; AdamW reads 16 and writes 12
RATES = {"2 TFLOP/s (a quarter of a T4's 8.1, float32)": 2, "20 (30 % of an H200's 67, float32)": 20, "100 (H200, tf32 or bf16)": 100}
PER_TOKEN = 4.4  # characters; see the generated part of docs/scale.md


def cost(shape, tokens, m, n, epochs, batches):
    """(operations, bytes that optimiser steps move, layer passes, steps, values) of a subsample; tokens: mean per text, after the cut.

    values: hidden values per token and layer, for what happens to them between the products; evaluation, without backward, a third."""
    layers, hidden, vocabulary, objective = shape
    body = 12 * layers * hidden**2  # weights: attention 4 h^2, feed-forward 8 h^2 per layer
    attention = 2 * layers * hidden * tokens  # multiplications per token: scores and their use, in every layer
    clm = objective == "clm"
    head, scored = (vocabulary * hidden, 1 - 1 / tokens) if clm else ((vocabulary + hidden) * hidden, experiment.MASK_SHARE)
    pretrain, train, evaluate = 2 * n * tokens * epochs["pretrain"], 3 * m * tokens * epochs["train"], 3 * n * tokens  # tokens
    operations = 6 * (body + attention) * (pretrain + train) + 6 * head * scored * pretrain + 2 * (body + attention) * evaluate
    first = 2 * epochs["pretrain"] * math.ceil(n / batches["pretrain"])  # steps
    second = 3 * epochs["train"] * math.ceil(m / batches["train"])
    everything = body + vocabulary * hidden
    moved = STEP_BYTES * (first * everything + second * body) + 3 * 8 * everything  # and the weights are restored three times
    passes = layers * (first + second + math.ceil(n / batches["evaluate"]))  # three evaluations, without backward, count as one step each
    values = layers * hidden * (pretrain + train + evaluate / 3)
    return operations, moved, passes, first + second, values


def seconds(costs, machine):
    """The time of a subsample on a machine."""
    return costs[0] / machine["matrix"] + costs[1] / machine["memory"] + costs[2] * machine["layer"] + costs[4] * machine["value"]


def best_time(call):
    """Shortest time of a call, in seconds."""
    times = [time.perf_counter()]
    for _ in range(20):
        call()
        times.append(time.perf_counter())
    return min(np.diff(times))


def measure_machine():
    """Of one core: matrix rate (operations per second), memory rate (bytes per second), seconds per layer and step of next to no work."""
    torch.set_num_threads(1)
    texts, weights, (source, target) = torch.randn(1024, 768), torch.randn(768, 3072), torch.ones(2, 2**25)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    network, few = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(2, 4, 32)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)

    def step():
        network(few).sum().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"matrix": 2 * 1024 * 768 * 3072 / best_time(lambda: texts @ weights),
            "memory": 2 * 4 * 2**25 / best_time(lambda: target.copy_(source)), "layer": best_time(step) / 4}


def tiny_tokenizer():
    """bert-tiny's WordPiece tokenizer."""
    sources = experiment.load_registry()["models"]["bert-tiny"]["sources"]
    return transformers.AutoTokenizer.from_pretrained(experiment.model_folder("bert-tiny", sources, experiment.parse_args([]).cache)[0])


def count_tokens(task):
    """(characters per token, mean tokens per text after the cut) of a task's first 2,000 texts."""
    texts = experiment.load_task(task, experiment.load_registry()["tasks"][task], experiment.parse_args([]).cache)["texts"][:2000]
    counts = [len(ids) for ids in tiny_tokenizer()(texts, verbose=False)["input_ids"]]
    return sum(map(len, texts)) / sum(counts), mean(min(count, LENGTH) for count in counts)


def make_model(name, folder):
    """Save a model of this shape, with random weights and bert-tiny's tokenizer, in the folder."""
    layers, hidden, vocabulary, objective = SHAPES[name]
    if objective == "mlm":
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * hidden}
        network = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=vocabulary, **sizes))
    else:
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": 4, "bos_token_id": 101, "eos_token_id": 102}
        network = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocabulary, **sizes))
    network.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def measure_point(model, task, n):
    """(seconds of the fastest of three subsamples, bytes of a row, bytes of a predictions file) of a run of run_experiment.py."""
    with tempfile.TemporaryDirectory() as folder:
        out, kept = Path(folder) / "results.csv", Path(folder) / "kept"
        if model != "bert-tiny":
            make_model(model, Path(folder) / model)
        flags = {"--model": model if model == "bert-tiny" else Path(folder) / model, "--tasks": task, "--m": M, "--n": n, "--subsamples": 3,
                 "--pretrain-epochs": EPOCHS["pretrain"], "--train-epochs": EPOCHS["train"], "--batch-size": BATCHES["train"], "--out": out,
                 "--max-length": LENGTH, "--workers": 1, "--threads": 1, "--device": "cpu", "--predictions": kept}
        command = [sys.executable, ROOT / "run_experiment.py", *(word for flag in flags.items() for word in flag)]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)  # its seconds hold no start-up
        with open(out, newline="") as file:
            times = [float(row["seconds"]) for row in csv.DictReader(file)]
        return min(times), out.stat().st_size / 3, mean(file.stat().st_size for file in kept.iterdir())


def describe_machine():
    """Lines about this machine: its constants; per point predicted and measured seconds and bytes on disk; memory."""
    machine, lines = measure_machine(), []
    tokens = {task: count_tokens(task) for _, task, _ in POINTS}
    for model, task, n in POINTS:
        costs = cost(SHAPES[model], tokens[task][1], M, n, EPOCHS, BATCHES)
        measured, row, kept = measure_point(model, task, n)
        machine.setdefault("value", max(0, measured - seconds(costs, machine | {"value": 0})) / costs[4])
        products, predicted = costs[0] / machine["matrix"], seconds(costs, machine)
        parts = f"{products:.2f} | {costs[4] * machine['value']:.2f} | {predicted - products - costs[4] * machine['value']:.2f}"
        times = f"{parts} | {predicted:.2f} | {measured:.2f} | {predicted / measured:.2f}"
        lines.append(f"| {model} | {task} | {n} | {tokens[task][1]:.1f} | {costs[0] / 1e9:.0f} | {times} | {row:.0f} | {kept:,.0f} |")
    texts = ", ".join(f"{task} {each[0]:.2f}" for task, each in tokens.items())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return [f"One core: matrix rate {machine['matrix'] / 1e9:.0f} GFLOP/s, memory rate {machine['memory'] / 1e9:.1f} GB/s, "
            f"{1e6 * machine['layer']:.0f} microseconds per layer and step.",
            f"Time per value, set by the first line: {1e9 * machine['value']:.0f} nanoseconds. Most memory of a process: {peak:.0f} MB.",
            f"Characters per token of bert-tiny's WordPiece, special tokens counted: {texts}.", "",
            "| model | task | n | L | GFLOP | s: products | values | steps | predicted | measured | predicted / measured | bytes: row "
            "| predictions |",
            "| --- " * 13 + "|", *lines]


def paper_tokens(percentiles, length=256):
    """Estimated mean tokens per text after the cut: characters log-normal with these quartiles, two special tokens."""
    low, high = map(math.log, percentiles)
    normal = NormalDist((low + high) / 2, (high - low) / 2 / NormalDist().inv_cdf(0.75))
    return mean(min(length, 2 + math.exp(normal.inv_cdf((i + 0.5) / 200)) / PER_TOKEN) for i in range(200))


def paper_grid():
    """[(model, costs)] of all 27,000 subsamples, in the order in which run_experiment.py deals them to shards."""
    registry, units = experiment.load_registry(), []
    for model in ("bert", "gpt2"):
        for spec in (spec for spec in registry["tasks"].values() if spec.get("paper", True)):
            recipe = registry["models"][model] | spec.get("recipes", {}).get(model, {})
            tokens, classes = paper_tokens(spec["length_percentiles"]), len(spec["classes"])
            for n, count in experiment.PAPER_SUBSAMPLES.items():
                for m in (50, 100):
                    each = cost(SHAPES[model], tokens, m // classes * classes, n, recipe["epochs"], recipe["batch_sizes"])
                    units += [(model, each)] * count
    return units


def describe_grid():
    """Lines about the paper's grid: operations, steps, hours, balance of the shares."""
    units = paper_grid()
    lines = [f"| model | subsamples | operations | optimiser steps | hours at {' | at '.join(RATES)} |", "| --- " * (4 + len(RATES)) + "|"]
    for name in ("bert", "gpt2", "both"):
        costs = np.array([costs for model, costs in units if name in (model, "both")])
        hours = " | ".join(f"{costs[:, 0].sum() / rate / 3.6e15:.1f}" for rate in RATES.values())
        lines.append(f"| {name} | {len(costs):,} | {costs[:, 0].sum():.2e} | {costs[:, 3].sum():,.0f} | {hours} |")
    work = costs[:, 0]
    shares = {count: max(work[i::count].sum() for i in range(count)) / work.sum() * count for count in (8, 16, 32, 60, 64, 108, 128, 270)}
    rate, steps = work.sum() / (5 * 86400), costs[:, 3].sum()
    balance = ", ".join(f"{share:.3f} of {count}" for count, share in shares.items())
    return [*lines, "",
            f"Hours are operations alone; {steps / 1e6:.2f} million optimiser steps of t milliseconds each that are not products add "
            f"{steps / 3.6e6:.1f} t hours.",
            f"Eight GPUs of one node: an eighth of the hours, times {shares[8]:.3f} for the largest share (below).", "",
            f"The paper's 5 days on a T4 are {rate / 1e12:.2f} TFLOP/s of this arithmetic, {rate / 8.1e12:.0%} of its peak in float32.", "",
            f"The dearest subsample costs {work.max() / work.min():.0f} times the cheapest. Largest share over the mean share:",
            f"{balance}."]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arithmetic", action="store_true", help="the paper's grid alone; nothing is run or written")
    grid = [f"The paper's grid, by arithmetic, at {PER_TOKEN} characters per token:", "", *describe_grid()]
    if parser.parse_args().arithmetic:
        return print("\n".join(grid))
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    processor = next((line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")), platform.machine())
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    where = f"on one of {os.cpu_count()} cores ({processor.strip()}; load average at the start {os.getloadavg()[0]:.1f})"
    lines = [f"Measured {date.today()} by `python tests/cost_model.py` {where}, {versions}.", *describe_machine(), "", *grid]
    print("\n".join(lines))
    guide, begin, end = ROOT / "docs" / "scale.md", "<!-- begin: python tests/cost_model.py -->\n", "<!-- end -->"
    before, _, rest = guide.read_text(encoding="utf-8").partition(begin)
    guide.write_text(before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
