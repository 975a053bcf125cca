"""Crossed answers by generation: does training on the inputs of test items inflate the score? With
run_zero_shot.py's training, but answers that are decoded and marked, as a harness does it:

    python docs/studies/generation.py   # the tables of OUTS; a rerun goes on
    python contamination_test.py --answers docs/rows/crossed_example.csv
    python fit_model.py crossed.csv

smollm2 reads the first 80 characters of a news item (bbc_news) behind 30 solved examples, and
decodes two tokens greedily. An answer is right if it starts with the name of the item's class. In
each draw the 300 items are split at random into halves a and b. Model A is trained on the inputs of
a, B on those of b, from the same first weights of the adapter and in the same order. Both answer
all 300 items, as does the model before. In the control, the training texts end in the right answer.

Fixed by the model before alone: task, prompt (seven numbers and orders of solved examples were
tried on 100 other items: 56% are right, the most common class has 30%) and the 300 items. The three
epochs were given, and the number of draws is a matter of time. The learning rate of the inputs is
run_zero_shot.py's. With batches of four, draw 1 lost 17 points of accuracy (boost), so batches of
sixteen, as the paper has them, were tried on other items (boost +0.7) and taken. At that rate the
labels were not learned either (draw 1 of the control: boost -6.0, bias 0.0). So the control was
given five times the rate, before any draw at that rate was made. All on 2026-11-27.

docs/rows/crossed_example.csv also holds the first three draws of the control, as an experiment of its own
(crossed-answers), which were copied from crossed_control.csv.

Three draws, 89% intervals: the bias of the inputs is +0.33 [-2.48, +3.14], the boost -3.22 [-7.07,
+0.62]; the bias of the control is +2.56 [+0.47, +4.64], the boost +13.11 [-4.92, +31.14].
"""

import argparse
import collections
import copy
import os
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from conftest import load_script  # noqa: E402

zero_shot = load_script("run_zero_shot")
TASK, MODEL = "bbc_news", "smollm2"
HEAD = "Each news item has one topic: business, entertainment, politics, sport or technology.\n\n"
QUESTION = "News: {}\nTopic:"
CHARACTERS, EXAMPLES_OF_A_CLASS, NEW_TOKENS = 80, 6, 2
ITEMS, LOOKED_AT = 300, 150  # the items of the prompt's choice are not used again
SEED = 100
ORDER_OF_EXAMPLES = 1  # the best of seven orders and numbers for the model before
RECIPE = {"epochs": 3, "batch_size": 16, "quantize": "none", "precision": "float32"}
RATES = {"inputs": zero_shot.LEARNING_RATE, "answers": 5 * zero_shot.LEARNING_RATE}
OUTS = {"inputs": ROOT / "docs" / "rows" / "crossed_example.csv",
        "answers": Path(__file__).with_name("crossed_control.csv")}


def study(net, tokenizer, draws, adapters):
    """Append the answers of each draw to the tables OUTS, without and with labels in training."""
    task = zero_shot.load_task(TASK, zero_shot.load_registry()["tasks"][TASK])
    prefix, items = choose_items(task)
    zero_shot.fresh_adapter(net, 0)  # which changes nothing until it is trained
    before = answer(net, tokenizer, prefix, items)
    print(f"{len(items)} items: the model before is right on {before.mean():.1%}, the most common "
          f"class has {items['answer'].value_counts(normalize=True).max():.1%}", flush=True)
    for draw in range(1, draws + 1):
        in_a = np.random.default_rng([SEED, draw]).permutation(ITEMS) < ITEMS // 2
        halves = pd.Series(np.where(in_a, "a", "b"), items.index)
        for kind, out in OUTS.items():
            if out.exists() and draw in set(pd.read_csv(out)["draw"]):
                continue
            started, right = time.perf_counter(), {"": before}
            recipe, texts = {**RECIPE, "learning_rate": RATES[kind]}, items["question"]
            if kind == "answers":
                texts = texts + " " + items["answer"]
            for half in ("a", "b"):
                ids = [zero_shot.encode(tokenizer, text) for text in texts[halves == half]]
                zero_shot.fresh_adapter(net, draw)
                loss = zero_shot.train_adapter(net, ids, recipe, draw)
                print(f"draw {draw}, {kind} of {half}: loss {loss:.3f}", flush=True)
                right[half] = answer(net, tokenizer, prefix, items)
                if adapters:
                    net.save_pretrained(adapters / f"{kind}-{draw}-{half}",
                                        save_embedding_layers=False)
            write(out, kind, draw, halves, right)
            print(f"{(time.perf_counter() - started) / 60:.1f} minutes", flush=True)


def write(out, kind, draw, halves, right):
    """Append {trained_on: right [items]} to a table, and print the accuracies."""
    parts = []
    for trained_on, answers in right.items():
        parts.append(pd.DataFrame({
            "model": MODEL, "trained_on": trained_on, "draw": draw, "half": halves,
            "item": halves.index, "right": answers.astype(int)}))
    table = pd.concat(parts)
    table.insert(0, "experiment", "crossed-answers" if kind == "answers" else "crossed")
    table["control"] = int(kind == "answers")
    table.to_csv(out, mode="a", header=not out.exists(), index=False)
    print(table.groupby(["trained_on", "half"])["right"].mean().unstack().round(3), flush=True)


def choose_items(task):
    """(prefix with 30 solved examples, table of ITEMS other items: question, answer; indexed by
    the row of the task). Texts that are cut to the same characters are one item."""
    rows = np.random.default_rng(SEED).permutation(len(task.texts))
    table = pd.DataFrame({
        "question": [QUESTION.format(cut(task.texts[row])) for row in rows],
        "answer": [task.classes[task.labels[row]] for row in rows]}, index=rows)
    table = table[:-LOOKED_AT].drop_duplicates("question")
    examples = table.groupby("answer").head(EXAMPLES_OF_A_CLASS)
    items = table.drop(examples.index)[:ITEMS]
    shuffled = examples.sample(frac=1, random_state=ORDER_OF_EXAMPLES)
    rounds = shuffled.groupby("answer").cumcount()  # a class comes once in each
    solved = shuffled.loc[rounds.sort_values(kind="stable").index]
    solved = solved["question"] + " " + solved["answer"] + "\n\n"
    return HEAD + "".join(solved), items


def cut(text):
    """The first characters of a text on one line."""
    return " ".join(" ".join(text.split())[:CHARACTERS].split())


def answer(net, tokenizer, prefix, items):
    """[items]: is the answer that the model decodes right?"""
    answers = decode(net, tokenizer, prefix, list(items["question"]))
    return np.array([text.strip().startswith(name)
                     for text, name in zip(answers, items["answer"])])


@torch.inference_mode()
def decode(net, tokenizer, prefix, questions):
    """What the model writes behind each question, greedily. The tokens that all prompts share run
    once; prompts of equal length run together, so nothing is padded."""
    net.eval()
    coded = {question: zero_shot.encode(tokenizer, prefix + question) for question in questions}
    shared = os.path.commonprefix([*coded.values()])
    first = net(input_ids=torch.tensor([shared]), use_cache=True).past_key_values
    by_length, answers = collections.defaultdict(list), {}
    for question, ids in coded.items():
        by_length[len(ids)].append((question, ids[len(shared):]))
    for group in by_length.values():
        cache = copy.deepcopy(first)
        cache.batch_repeat_interleave(len(group))
        tokens, written = torch.tensor([ids for _, ids in group]), []
        for _ in range(NEW_TOKENS):
            logits = net(input_ids=tokens, past_key_values=cache, use_cache=True,
                         logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(1, keepdim=True)  # [questions, 1]
            written.append(tokens)
        texts = tokenizer.batch_decode(torch.cat(written, 1))
        answers.update(zip([question for question, _ in group], texts))
    return [answers[question] for question in questions]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--adapters", type=Path, help="folder to keep them in, 20 MB each")
    args = parser.parse_args()
    model = zero_shot.find_model(MODEL, zero_shot.load_registry())
    net, tokenizer = zero_shot.load_net(model, "none", "float32", "cpu")
    study(net, tokenizer, args.draws, args.adapters)


if __name__ == "__main__":
    main()
