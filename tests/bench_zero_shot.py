"""Time run_zero_shot.py's scoring and training on real weights and text. Run by hand on a quiet machine; pytest does not collect it.

    python tests/bench_zero_shot.py                     # smollm2, 5 classes, an instruction of about 150 tokens
    python tests/bench_zero_shot.py --texts 4 --rounds 1

Scoring: ours (instruction cached, classes of a prompt as one tree) against the usual way, one forward pass per (prompt, class) without
a cache, in alternating rounds; the scores are compared. Training: tokens per second of LoRA pretraining (batch 4), the multiplications
it needs (4 per weight and token: forward, and backward to the inputs, since the weights are frozen), and their share of the machine's
own matrix-multiply rate at these sizes, measured between the rounds.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import CACHE, load_script  # noqa: E402

CLASSES = ["negative about the story", "positive about the story", "negative about the actors and their work",
           "positive about the actors and their work", "neutral"]
ABOUT = ("a sentence from a review of a film that ran in cinemas, written by a professional critic for a newspaper, a magazine or a web site, "
         "cut out of its review by an editor who wanted to show in one line what the critic thought of the film as a whole, of its story, "
         "of the people who act in it, or of the way in which it was made")


def double_loop(net, prompts, classes):
    """One uncached forward pass per prompt and class: what a user would write first."""
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


def matrix_rate(rows, net):
    """Multiply-adds times two per second of plain float32 products [rows, hidden] x [hidden, 2.67 hidden]."""
    hidden = net.lm.config.hidden_size
    a, b = torch.randn(rows, hidden), torch.randn(hidden, 8 * hidden // 3)
    began, count = time.perf_counter(), 200
    for _ in range(count):
        a @ b
    return count * 2 * rows * hidden * b.shape[1] / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    zero = load_script("run_zero_shot")
    registry = zero.load_registry()
    model = zero.find_model("smollm2", registry, CACHE)
    net = zero.load_adapted(str(model["folder"]), model["gguf"], "cpu", "float32", "none", (16, 32, 0.05), None)
    head = zero.instruction(CLASSES, {"about": ABOUT, "answer": "what it is"})
    task = zero.load_task("rotten_tomatoes", registry["tasks"]["rotten_tomatoes"], CACHE)
    rows = zero.split_rows(task["labels"], 100, args.texts, 1)["test"].tolist()
    prompts = [zero.padded_prompt(head, task["texts"][row]) for row in rows]
    tokens = sum(len(zero.encode(net, prompt)) for prompt in prompts)
    print(f"instruction {len(zero.encode(net, head))} tokens, {len(prompts)} prompts, {tokens} tokens, {len(CLASSES)} classes, "
          f"threads {torch.get_num_threads()}")
    times = {"ours": [], "double loop": []}
    net.model.eval()
    for _ in range(args.rounds + 1):  # the first warms up
        for name, score in (("ours", lambda: zero.score_classes(net, prompts, CLASSES, 16)), ("double loop", lambda: double_loop(net, prompts, CLASSES))):
            began = time.perf_counter()
            found = score()
            times[name].append(time.perf_counter() - began)
            expected = found if name == "ours" else np.testing.assert_allclose(found, expected, atol=1e-4)
    ours, plain = (times[name][1:] for name in times)
    ratios = [b / a for a, b in zip(ours, plain)]
    print(f"scoring: ours {statistics.median(ours):.2f} s, double loop {statistics.median(plain):.2f} s, ratio of paired rounds "
          f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")

    article = zero.load_task("bbc_news", registry["tasks"]["bbc_news"], CACHE)
    recipe = {"epochs": {"pretrain": 1}, "batch_sizes": {"pretrain": 4}, "learning_rates": {"pretrain": 1e-4}}
    for name, source in (("rotten_tomatoes", task), ("bbc_news", article)):
        head = zero.instruction(source["classes"], {"about": "a text", "answer": "its topic"})
        ids = [zero.encode(net, zero.padded_prompt(head, text[:1000])) for text in source["texts"][:8]]
        count, speeds, shares = sum(map(len, ids)), [], []
        for _ in range(args.rounds + 1):
            zero.fresh_adapter(net, 0)
            rate, began = matrix_rate(max(map(len, ids)), net), time.perf_counter()
            zero.pretrain_adapter(net, ids, recipe, 0, "")
            seconds = time.perf_counter() - began
            speeds.append(count / seconds)
            shares.append(4 * sum(weight.numel() for weight in net.model.parameters()) * count / seconds / rate)
        print(f"training on {name}: {statistics.median(speeds[1:]):.0f} tokens/s, {statistics.median(shares[1:]):.0%} of the matrix rate "
              f"({rate / 1e9:.0f} GFLOP/s in the last round)")


if __name__ == "__main__":
    main()
