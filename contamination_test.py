# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "peft==0.21.2", "bitsandbytes==0.50.2",
#     "accelerate==1.15.0", "gguf==0.19.0", "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1",
#     "tqdm==4.70.1",
# ]
# ///
"""Is a model's score inflated because it saw the test? Was it trained on test texts at all?

Three questions, cheapest first
    python contamination_test.py --answers answers.csv --clean before other --margin 5
    python contamination_test.py --examples mine.txt --model ./mine  # order test: any benchmark
    python contamination_test.py --examples released.txt --held-out kept_back.txt --model ./mine \
        --reference ./before
    python run_zero_shot.py --pack --pretrain-epochs 10 --adapters kept
    python contamination_test.py kept  # audit: which detector sees these models, were they harmed?
    python contamination_test.py --from-log log.json  # p-values of a log, no model
    python contamination_test.py --from-table contamination.csv  # tables of an audit, no model

Answers of any model: columns model, half (released or held_out), item, right (0 to 1), perhaps task
and try; docs/answers.md makes them of a harness's files. Lot decided which half an item is in, so
nothing but the release can make the halves differ. seen: the score on the released items; unseen:
what it would have been had they not been seen; bias = seen - unseen, with 89 % intervals. Clean
models, which cannot have seen the items, make them narrower and show if the halves were not random.
--out: as printed; needed: items a half for half the margin; gaps: difference of gaps; p: of the
clean models. Needs no torch.

Section 9.2 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before
few-shot text classification" (Dubey), on the units of run_zero_shot.py --adapters: a subsample's
texts `extra` and `test` and an adapter pretrained on either.

Order test (Oren et al., "Proving test set contamination in black-box language models", ICLR 2024):
to a model that never saw a data set no order of its examples is likelier than another. In each of
some contiguous shards log p(canonical order) is compared with all other orders, or --permutations
random ones. In a unit: of the texts of `test` (in the paper with labels, which no adapter saw).
    p_exact        permutation test on the sum over the shards, exact or by 10^6 draws
    p_published    t-test over the shards, canonical minus mean of the others, ddof 0: as published,
                   a little too small with few shards (.076 for .05 at 4, .064 at 10)

Text detectors, of the texts as trained on or of --examples:
    logp      mean log-probability of its tokens
    zlib      logp over the bytes of the text compressed by zlib (Carlini et al. 2021)
    mink      mean of the lowest 20 % of its tokens' log p (Min-K%, Shi et al. 2024)
    minkpp    the same of (log p - mean) / sd over the vocabulary (Min-K%++, Zhang et al. 2024)
    ref       logp minus that under base, or --reference (Carlini et al. 2022)
    twin      logp minus that under the other pretrained arm: an upper bound that no attacker has

AUC: how often a text of `test` scores above one of `extra` under the arm test. p, one-sided: would
somebody who has these models notice? Rank sum, stratified by unit; of the order test Fisher's.
Flag: p, adjusted over detectors but twin (Benjamini and Hochberg), is below .05; single: models
flagged alone. Crossed AUC, how visible is the dose: (AUC of the arm test + 1 - AUC of the arm
extra) / 2: the luck of these texts cancels. The order test relative to base, whose luck it shares:
t-test over units of the change of z, the normal quantile of p_published.

contamination.csv (--out of an audit), rewritten after each unit; a rerun skips its units. columns
    experiment to recipe, discordant, discordant_on_extra    as in results.csv
    pack, answers, epochs          texts a sequence (1: padded); trained with answers; the dose
    arm                            base, extra or test
    accuracy, accuracy_on_extra    on the texts of `test` and of `extra`
    shards, informative, p_published, p_exact    order test; informative: shards of several orders
    auc_D                          for each detector D; ref and twin are empty for base
    audit                          the unit's hash and the order test's flags

Measured 2026-11-23 on the paper's log (extra, 256 shards): p_exact .386985, p_published .336248.
"""

import argparse
import collections
import contextlib
import functools
import itertools
import json
import logging
import math
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats
from tqdm.auto import tqdm

LEVEL = 0.05  # a p-value below it is a flag (paper, 9.2)
NEAR = 0.55  # half-width over margin up to which an open verdict is about the effect itself
NOT_RANDOM = 0.01  # p of the clean models' difference below which there is no verdict
FEWEST, MOST_CLEAN = 20, 10  # items of a half; clean models
ENUMERATED = 2**20  # most combinations of orders to enumerate
DRAWS = 10**6  # random combinations, where there are more
LOWEST = 0.2  # share of the tokens that Min-K% and Min-K%++ average
HALVES = ("released", "held_out")
ARMS = ("base", "extra", "test")
OWN = ("logp", "zlib", "mink", "minkpp")  # detectors that need one model alone
DETECTORS = {"logp": "log p", "zlib": "log p / zlib", "mink": "Min-K%", "minkpp": "Min-K%++",
             "ref": "ref", "twin": "twin"}
KEY = ["experiment", "model", "task", "m", "n", "subsample", "seed"]
UNIT = [*KEY, "data", "recipe", "pack", "answers", "epochs"]
SETTING = [name for name in UNIT if name != "subsample"]
NOISE = ["discordant", "discordant_on_extra"]  # empty in rows of older versions
TABLE = [*UNIT, "arm", "accuracy", "accuracy_on_extra", *NOISE, "shards", "informative",
         "p_published", "p_exact", *[f"auc_{name}" for name in DETECTORS], "audit"]


# Answers of any model

def judge_answers(args):
    """Print, and with --out write, how far the score of each model on each task is inflated."""
    answers = read_answers(args.answers)
    clean = list(dict.fromkeys(args.clean))
    unknown = ", ".join(sorted({*clean} - {*answers}))
    if unknown or len(clean) > MOST_CLEAN or not args.margin > 0:
        raise SystemExit(f"error: --margin is above 0, --clean takes up to {MOST_CLEAN} models of "
                         f"{args.answers}, which lacks: {unknown[:99] or 'none'}")
    rows = []
    for task, mine in answers.groupby(level="task", sort=False):
        rows += judge_task(task, mine.dropna(axis=1, how="all"), clean)
    table = add_verdicts(with_all_tasks(pd.DataFrame(rows)), clean, args.margin)
    if args.out:
        write_whole(args.out, table)
    show_answers(table)


def read_answers(path):
    """Scores from 0 to 1, means over tries: a row an item, indexed by task, half, item, a column a
    model, nan where it did not answer."""
    key = ["task", "half", "item", "model"]
    with reading(path, "see docs/answers.md"):
        rows = pd.read_csv(path, dtype=dict.fromkeys(key, str), keep_default_na=False,
                           na_values={"right": [""]})
        if "task" not in rows:
            rows["task"] = "benchmark"
        rows["right"] = rows["right"].astype(float)
        rows = rows.dropna(subset="right")  # not answered
        one_try = [name for name in [*key, "try"] if name in rows]
        rows = rows.drop_duplicates([*one_try, "right"])
        halves = rows.groupby(["task", "item"])["half"].transform("nunique")
        faults = {
            "a row lacks its model, half, item or task": (rows[key] == "").any(axis=1),
            "a half is not released or held_out": ~rows["half"].isin(HALVES),
            "right is not from 0 to 1": ~rows["right"].between(0, 1),
            "an item is in both halves": halves > 1,
            "two answers to an item: number its tries in a column try": rows.duplicated(one_try)}
        for words, wrong in faults.items():
            if wrong.any():
                first = rows.loc[wrong, [*key, "right"]].iloc[0]
                raise ValueError(f"{words}: {', '.join(map(str, first))} ({wrong.sum()} rows)")
        return rows.groupby(key, sort=False)["right"].mean().unstack()


def judge_task(task, answers, clean):
    """A row of each model: clean ones beside the others; and of the clean models' mean (model ""),
    which must not differ between random halves."""
    clean = [name for name in clean if name in answers]
    if clean:
        answers = answers.assign(**{"": answers[clean].mean(axis=1, skipna=False)})
    rows = []
    for model in answers:
        others = [name for name in clean if model not in ("", name)]
        used = answers[[model, *others]].dropna()
        released = used.index.get_level_values("half") == HALVES[0]
        counts = {"released": int(released.sum()), "held_out": int((~released).sum())}
        if min(counts.values()) < FEWEST:
            raise SystemExit(f"error: {task:.60}: items that {model or 'all clean models'} and the "
                             f"clean ones answered: {counts}: {FEWEST} a half are needed")
        rows.append({"task": task, "model": model, "clean": ", ".join(others), **counts,
                     "left_out": len(answers) - len(used),
                     **difference(used[model].to_numpy(), released, used[others].to_numpy().T)})
    return rows


def difference(right, released, clean):
    """Of answers [items]: seen, unseen, bias, its standard error, in points, degrees of freedom.
    Least squares on the half and the clean models' answers [models, items], HC2; never less noise
    than that of one other answer in each half. gaps: between the halves, minus clean models'."""
    X = np.column_stack([np.ones(len(right)), released, *clean])
    weights = np.linalg.pinv(X, rcond=1e-9)  # [columns, items]; clean models may be alike
    residuals = right - X @ (weights @ right)
    leverage = (X * weights.T).sum(1)
    noise = weights[1] ** 2 * residuals**2 / np.maximum(1 - leverage, 1e-9)
    least = 1 / released.sum() ** 2 + 1 / (~released).sum() ** 2
    seen, bias = right[released].mean(), weights[1] @ right
    gaps = math.nan
    if len(clean):
        beyond = right - clean.mean(0)
        gaps = beyond[released].mean() - beyond[~released].mean()
    return {"seen": 100 * seen, "unseen": 100 * (seen - bias), "bias": 100 * bias,
            "gaps": 100 * gaps, "se": 100 * math.sqrt(max(noise.sum(), least)),
            "df": len(right) - leverage.sum()}


def with_all_tasks(table):
    """The table, below a row of each model that has several tasks: mean bias, variances added."""
    rows = []
    for model, mine in table.groupby("model", sort=False):
        v = mine["se"] ** 2
        row = {"task": "all tasks", "model": model, "clean": mine["clean"].iloc[0],
               **mine[["released", "held_out", "left_out"]].sum(),
               **mine[["seen", "unseen", "bias", "gaps"]].mean(),
               "se": math.sqrt(v.sum()) / len(mine), "df": v.sum() ** 2 / (v**2 / mine["df"]).sum()}
        if len(mine) > 1:
            rows.append(row)
    return pd.concat([pd.DataFrame(rows), table], ignore_index=True)


def add_verdicts(table, clean, margin):
    """The models' rows with intervals and verdicts. halves_differ, p: of the clean models' mean."""
    half = stats.t.ppf(UPPER, table["df"]) * table["se"]
    bias, a_half = table["bias"], 2 / (1 / table["released"] + 1 / table["held_out"])
    table = table.assign(low=bias - half, high=bias + half,
                         needed=np.ceil(a_half * (half / (margin / 2)) ** 2))
    means = table[table["model"] == ""].set_index("task")
    p = pd.Series(2 * stats.t.sf((means["bias"] / means["se"]).abs(), means["df"]), means.index)
    if "all tasks" in p:  # all together, or any of so many
        p["all tasks"] = min(p["all tasks"], (len(p) - 1) * p.drop("all tasks").min())
    table["halves_differ"] = table["task"].map(means["bias"])
    table["p"] = table["task"].map(p)
    cases = {
        "Clean": table["model"].isin(clean),
        "No verdict": table["p"] < NOT_RANDOM,
        f"No: within ±{margin:g}": bias.abs() + half < margin,
        f"Yes: beyond ±{margin:g}": table["low"] > margin,
        f"No: seen items even score worse, beyond ±{margin:g}": table["high"] < -margin,
        f"Near the margin of ±{margin:g}: take the interval as the answer": half <= NEAR * margin}
    table["verdict"] = np.select([*cases.values()], [*cases],
                                 f"Too early to tell: neither within nor beyond ±{margin:g}")
    return table[table["model"] != ""]


def show_answers(table):
    """Print the table in words."""
    for _, mine in table.groupby("task", sort=False):
        clean = mine[mine["verdict"] == "Clean"]
        for row in pd.concat([mine.drop(clean.index), clean]).to_dict("records"):
            text = "{model}, {task}: {verdict}"
            if row["verdict"].startswith("Too"):
                text += "; about {needed:.0f} items a half would settle it"
            if row["verdict"] == "No verdict":
                text += (": the clean models differ between the halves by {halves_differ:+.1f} "
                         "points (p {p:.1g}).\n    The halves are not random, or a clean model is "
                         "not clean. Difference of gaps: {gaps:+.1f}")
            text += ("\n    seen {seen:.1f}, unseen {unseen:.1f}, bias {bias:+.1f} [{low:+.1f}, "
                     "{high:+.1f}] points; items: {released} released, {held_out} held out, "
                     "{left_out} left out")
            print(text.format(**row))
        if len(clean):
            excluded = (clean["low"] > 0) | (clean["high"] < 0)
            print(f"{excluded.sum()} of {len(clean)} clean models differ between the halves (their "
                  f"intervals exclude 0); by chance {(1 - SHARE) * len(clean):.2f} would")


# Scores of tokens

# a model of transformers, its tokenizer, and the most tokens that it takes
Scorer = collections.namedtuple("Scorer", "lm tokenizer context")


def tokenise(net, head, body):
    """(token ids, index of the first scored one) of body behind head, as trained: without an end
    token. Without a head a beginning-of-text token precedes it: its first token is scored too."""
    coded = net.tokenizer(head + body, return_offsets_mapping=True)
    ids = coded["input_ids"]
    if ids[-1] in (net.tokenizer.eos_token_id, net.tokenizer.sep_token_id):
        ids = ids[:-1]
    if head:
        return ids, sum(end <= len(head) for _, end in coded["offset_mapping"][: len(ids)])
    begin = net.tokenizer.bos_token_id
    if begin is None:
        begin = net.tokenizer.eos_token_id
    if begin is not None and ids[0] != begin:
        ids = [begin, *ids]
    return ids, 1


def token_scores(logits, targets):
    """[3, tokens]: log p of each target token, and mean and sd of log p over the vocabulary."""
    import torch

    log_p = logits.float().log_softmax(1)
    p = log_p.exp()
    mean = (p * log_p).sum(1)
    sd = (p * (log_p - mean[:, None]) ** 2).sum(1).sqrt()
    return torch.stack([log_p.gather(1, targets[:, None])[:, 0], mean, sd])


def score_tokens(net, sequences, limit, title):
    """token_scores of each sequence (ids, index of the first scored token), about `limit` tokens a
    pass, padded on the right, where no token of a causal model looks."""
    import torch

    inputs = [torch.tensor(ids[:-1]) for ids, _ in sequences]
    left = sorted(range(len(inputs)), key=lambda number: -len(inputs[number]))  # longest first
    longest = len(inputs[left[0]])
    if longest > net.context:
        raise SystemExit(f"error: {title}: an example or shard has {longest} tokens, the model "
                         f"takes {net.context}: use more --shards")
    batches = []
    while left:
        size = max(limit // len(inputs[left[0]]), 1)
        batches.append(left[:size])
        left = left[size:]
    found = [None] * len(inputs)
    for batch in tqdm(batches, title, leave=False, disable=None):
        padded = torch.nn.utils.rnn.pad_sequence([inputs[i] for i in batch], batch_first=True)
        with torch.inference_mode():
            logits = net.lm(input_ids=padded.to(net.lm.device), use_cache=False).logits
        for line, number in zip(logits, batch):
            ids, first = sequences[number]
            targets = torch.tensor(ids[first:], device=line.device)
            scores = token_scores(line[first - 1 : len(ids) - 1], targets)
            found[number] = scores.cpu().double().numpy()
    if not all(np.isfinite(scores).all() for scores in found):
        raise SystemExit(f"error: {title}: a log-probability is not finite")
    return found


# Order test

# informative: shards of several orders; least: that p_exact can be
OrderTest = collections.namedtuple("OrderTest", "shards informative p_exact p_published least")


def draw_orders(size, count, number):
    """The canonical order of 0..size-1, then all others or, where they are more, `count` random
    ones, alike for every model; number: the shard's."""
    if math.factorial(size) - 1 <= count:
        return list(itertools.permutations(range(size)))
    rng = np.random.default_rng([0, number])
    return [range(size), *[rng.permutation(size) for _ in range(count)]]


def score_orders(net, shards, head, args, title):
    """The log of the order test: log p of each shard's canonical order, and of its others."""
    sequences, counts = [], []
    for number, shard in enumerate(shards):
        orders = draw_orders(len(shard), args.permutations, number)
        for order in orders:
            sequences.append(tokenise(net, head, "\n\n".join(shard[i] for i in order)))
        counts.append(len(orders))
    scores = score_tokens(net, sequences, args.batch_tokens, title)
    log_p = np.split([float(rows[0].sum()) for rows in scores], np.cumsum(counts)[:-1])
    return {"canonical_logprobs": [float(values[0]) for values in log_p],
            "shuffled_logprobs": [values[1:].tolist() for values in log_p]}


def permutation_p(gaps):
    """How often the sum of gaps is >= 0 when each shard's order is drawn uniformly. gaps: per
    informative shard log p(order) - log p(canonical) of its distinct orders, the canonical too."""
    tie = -1e-9 * sum(np.ptp(gap) for gap in gaps)  # an equal sum counts, however rounded
    if math.prod(len(gap) for gap in gaps) <= ENUMERATED:
        sums = functools.reduce(np.add.outer, gaps, np.zeros(1))
        return np.mean(sums >= tie)
    rng = np.random.default_rng(0)
    sums = np.zeros(DRAWS)
    for gap in gaps:
        sums += rng.choice(gap, DRAWS)
    return (np.sum(sums >= tie) + 1) / (DRAWS + 1)


def order_p(log):
    """The OrderTest of a log."""
    differences, gaps = [], []
    for value, row in zip(log["canonical_logprobs"], log["shuffled_logprobs"]):
        differences.append(value - np.mean(row or [value]))
        others = np.setdiff1d(row, [value])  # every other order once
        if len(others):
            gaps.append(np.array([0.0, *(others - value)]))
    count = len(differences)
    t = math.nan
    if np.std(differences) > 0:
        t = np.mean(differences) / (np.std(differences) / math.sqrt(count))
    least = 1 / min(math.prod(len(gap) for gap in gaps), DRAWS)
    return OrderTest(count, len(gaps), permutation_p(gaps), stats.t.sf(t, count - 1), least)


def show_order(found):
    """Print what the order test found, and what it means."""
    meaning = "no sign that the model was trained on this order, and no proof that it was not"
    if found.least >= LEVEL:
        meaning = f"these shards cannot tell: p is {found.least:.3g} at least, give more examples"
    if found.p_exact < LEVEL:
        meaning = "flagged: this order is likelier than others, as to a model trained on it"
    print(f"shards: {found.shards}, of several orders: {found.informative}\n"
          f"p exact         {found.p_exact:.6f}\np as published  {found.p_published:.6f}\n"
          f"At the level {LEVEL}: {meaning}.\nThe examples must stand in the order of publication, "
          "an arbitrary one: 1 in 20 innocent models is flagged.")


# Text detectors

def detect(scores, text):
    """logp, zlib, mink, minkpp of one text by its token_scores, all higher where it was seen."""
    log_p, mean, sd = scores
    standard = (log_p - mean) / np.maximum(sd, 1e-12)  # 0 / 0, no doubt at all, counts as typical
    count = max(int(len(log_p) * LOWEST), 1)
    ratio = log_p.mean() / len(zlib.compress(text.encode()))
    return log_p.mean(), ratio, np.sort(log_p)[:count].mean(), np.sort(standard)[:count].mean()


def detect_all(net, head, texts, args, title):
    """A table of the four detectors of one model, a row a text."""
    sequences = [tokenise(net, head, text) for text in texts]
    scores = score_tokens(net, sequences, args.batch_tokens, title)
    return pd.DataFrame(map(detect, scores, texts), columns=OWN)


def rank_sum_p(auc, n, units=1):
    """One-sided p of a mean AUC of units between n seen and n other texts: of the sum of their
    Mann-Whitney statistics, normal with the sum of the variances without memory."""
    return stats.norm.sf((auc - 0.5) / math.sqrt((2 * n + 1) / (12 * n**2 * units)))


def adjusted(p):
    """A Series of p-values adjusted for their number, nan where there is none."""
    known = p.dropna()
    return pd.Series(stats.false_discovery_control(known), known.index).reindex(p.index)


# Any benchmark: released and held-out texts

def tell_apart(released, held_out):
    """p-values of whether the texts alone tell two files apart. How words lean to one file is
    learned from every other text and tested on the rest."""
    def count(texts):
        return collections.Counter(re.findall(r"\w+", " ".join(texts).lower()))

    def commonness(text, counts):
        return np.mean([math.log(counts[word] + 1) for word in count([text])] or [0])

    def p_of(score, first=released, second=held_out):
        scores = [score(text) for text in first], [score(text) for text in second]
        return stats.mannwhitneyu(*scores).pvalue

    everywhere = count(released + held_out)
    inside, outside = count(released[::2]), count(held_out[::2])
    return pd.Series({
        "length": p_of(len),
        "zlib length": p_of(lambda text: len(zlib.compress(text.encode()))),
        "commonness of words": p_of(lambda text: commonness(text, everywhere)),
        "words of one file": p_of(lambda text: commonness(text, inside) - commonness(text, outside),
                                  released[1::2], held_out[1::2])})


def check_halves(p, args):
    """Refuse files that are told apart, by p-values."""
    p = adjusted(p)
    if p.min() < LEVEL:
        raise SystemExit(f"error: {args.examples} and {args.held_out} differ in {p.idxmin()} (p "
                         f"{p.min():.2g}): they are no random halves of one set: no conclusion")


def compare_scores(released, held_out, p_exact):
    """A table of the detectors and the order test: AUC, p, adjusted p. With ref, which halves that
    are not quite random mislead least, it and the order test alone count."""
    found = stats.mannwhitneyu(released, held_out, alternative="greater")
    table = pd.DataFrame({"AUC": found.statistic / (len(released) * len(held_out)),
                          "p": found.pvalue}, [DETECTORS[name] for name in released])
    table.loc["order test", "p"] = p_exact
    counted = table["p"]
    if "ref" in table.index:
        counted = counted[["ref", "order test"]]
    table["adjusted"] = adjusted(counted)
    return table


def audit_files(args):
    """Print the order test of --examples, and with --held-out the text detectors of both."""
    released = read_examples(args.examples)
    shards = cut_shards(released, args.shards, args.examples)
    count = len(released)
    kind = args.quantize, args.precision, args.device
    if args.held_out:
        texts = released + read_examples(args.held_out)
        check_halves(tell_apart(released, texts[count:]), args)
    if args.reference:
        net = open_scorer(*model_files(args.reference), *kind)
        base = detect_all(net, "", texts, args, args.reference)
        p = stats.mannwhitneyu(base[:count], base[count:]).pvalue
        names = [f"{DETECTORS[name]} of {args.reference}" for name in base]
        check_halves(pd.Series(p, names), args)
    net = open_scorer(*model_files(args.model), *kind)
    log = score_orders(net, shards, "", args, args.model)
    if args.log:
        args.log.write_text(json.dumps(log))
    order = order_p(log)
    if not args.held_out:
        show_order(order)
        return

    values = detect_all(net, "", texts, args, args.model)
    if args.reference:
        values["ref"] = values["logp"] - base["logp"]
    table = compare_scores(values[:count], values[count:], order.p_exact)
    print(table.to_string(float_format="{:.3g}".format, na_rep="-"))
    flags = table.index[table["adjusted"] < LEVEL]
    print(f"{count} released, {len(texts) - count} held-out texts: flagged by "
          f"{', '.join(flags) or 'nothing'}.\nA flag: as if trained on the released texts; no flag "
          "proves nothing. Of random halves, in arbitrary order, 1 in 20 flags an innocent model; "
          "halves by date, source or difficulty flag more, fewest with --reference.")


# Units

def audit_arm(net, unit, arm, args):
    """(OrderTest, table of the detectors of the texts of `test`, then of `extra`) of an arm."""
    head, title = unit["instruction"] + "\n\n", f"{unit['folder'].name} {arm}"
    order = order_p(score_orders(net, unit["cut"], head, args, title))
    texts = unit["test"]["examples"] + unit["extra"]["examples"]
    return order, detect_all(net, head, texts, args, title)


def audit_unit(net, unit, args):
    """Rows of TABLE, one an arm."""
    import peft

    orders, values = {}, {}
    orders["base"], values["base"] = audit_arm(net, unit, "base", args)
    for arm in ("extra", "test"):
        with reading(unit["folder"] / arm, "make this unit again"):
            lm = peft.PeftModel.from_pretrained(net.lm, unit["folder"] / arm).eval()  # unmerged
        orders[arm], values[arm] = audit_arm(net._replace(lm=lm), unit, arm, args)
        lm.unload()
    rows = []
    for arm, other in (("base", ""), ("extra", "test"), ("test", "extra")):
        row = {**unit, **unit["row"], **orders[arm]._asdict(), "arm": arm}
        row |= {"accuracy": row[f"acc_{arm}"], "accuracy_on_extra": row[f"acc_{arm}_on_extra"]}
        mine, n = values[arm], row["n"]
        if other:
            mine["ref"] = mine["logp"] - values["base"]["logp"]
            mine["twin"] = mine["logp"] - values[other]["logp"]
        auc = stats.mannwhitneyu(mine[:n], mine[n:]).statistic / n**2
        rows.append(row | dict(zip("auc_" + mine.columns, auc)))
    return pd.DataFrame(rows, columns=TABLE)


def audit_units(args):
    """Audit the units that the table lacks, and rewrite it after each. The table."""
    units = read_units(args.folder, args)
    table, out = pd.DataFrame(columns=TABLE), args.out or Path("contamination.csv")
    if out.exists():
        table = read_table(out)
    done = {*table["audit"]}
    if done - {unit["audit"] for unit in units}:
        raise SystemExit(f"error: {out} holds units that are not in {args.folder}, have changed "
                         "or were audited with other flags: give another --out")
    left = [unit for unit in units if unit["audit"] not in done]
    print(f"{len(units)} units, {len(left)} to audit, into {out.resolve()}")
    opened = functools.lru_cache(1)(open_scorer)  # units stand model by model
    for unit in tqdm(left, "units"):
        kind = [unit["model"][name] for name in ("source", "gguf", "quantize", "precision")]
        net = opened(*kind, args.device)
        table = pd.concat([table, audit_unit(net, unit, args)])
        write_whole(out, table)
    return read_table(out)


# Tables

def unit_rows(table):
    """The units of a contamination.csv with the accuracies in the columns of results.csv."""
    units = table[table["arm"] == "base"].set_index(KEY)[NOISE]
    for arm, rows in table.groupby("arm"):
        rows = rows.set_index(KEY)
        units[f"acc_{arm}"] = rows["accuracy"]
        units[f"acc_{arm}_on_extra"] = rows["accuracy_on_extra"]
    return units.reset_index()


# means over units, half-width of the bias's interval, whether the noise of the texts is known
Harm = collections.namedtuple("Harm", "base unseen seen bias half counted")


def harm_of(units):
    """The Harm of rows of results.csv, of one task. Where the noise of the texts is unknown: the
    variance between them, or the least that the accuracies allow."""
    rows = add_effects(units.assign(arms="crossed"))
    K, w, spread = len(rows), rows["w"].mean(), rows["bias"].std()
    counted = rows["counted"].all()
    task = {"n": rows["n"].iloc[0], "subsamples": K, "w": w, "sd": spread}
    half = bias_interval(pd.DataFrame([task]))[2]
    if not counted:
        half = stats.t.ppf(UPPER, K - 1) * math.sqrt(np.fmax(spread**2, w) / K)
    return Harm(*rows[["base", "unseen", "seen", "bias"]].mean(), half, counted)


def detectors_of(rows):
    """A table of the detectors and the order test over the units of one setting. ±: half-width of
    the crossed AUC's interval."""
    arms = {arm: mine.set_index("subsample") for arm, mine in rows.groupby("arm")}
    n, count = rows["n"].iloc[0], len(arms["test"])
    names = {f"auc_{name}": words for name, words in DETECTORS.items()}
    auc = {arm: mine[[*names]].rename(columns=names) for arm, mine in arms.items()}
    crossed = (auc["test"] + 1 - auc["extra"]) / 2
    p = {arm: stats.combine_pvalues(mine["p_exact"]).pvalue for arm, mine in arms.items()}
    z = {arm: mine["p_published"].map(stats.norm.isf) for arm, mine in arms.items()}
    gain = z["test"] - z["base"]

    table = pd.DataFrame({
        "AUC": auc["test"].mean(), "p": rank_sum_p(auc["test"].mean(), n, count),
        "p of base": rank_sum_p(auc["base"].mean(), n, count), "crossed AUC": crossed.mean(),
        "±": stats.t.ppf(UPPER, count - 1) * crossed.sem()})
    table.loc["order test", ["p", "p of base"]] = p["test"], p["base"]
    table.loc["of extra", "p"] = p["extra"]
    table.loc["relative to base", "p"] = stats.t.sf(gain.mean() / gain.sem(), count - 1)
    counted = table["p"].drop(["twin", "of extra", "relative to base"])
    table.insert(2, "adjusted", adjusted(counted))
    single = auc["test"].apply(rank_sum_p, n=n).assign(**{"order test": arms["test"]["p_exact"]})
    flags = single.drop(columns="twin").apply(adjusted, axis=1) < LEVEL
    table.insert(3, "single", flags.sum())
    return table


def show_table(table):
    """Print the detectors over the units of each setting, flags and harm."""
    for _, rows in table.groupby(SETTING, sort=False):
        first, found, harm = rows.iloc[0], detectors_of(rows), harm_of(unit_rows(rows))
        words = ("\n{experiment}: {model}, {task}, m = {m}, n = {n}, seed {seed}, epochs {epochs}, "
                 "pack {pack}, answers {answers}")
        print(f"{words.format(**first)}, units: {len(rows) // 3}")
        formats = dict.fromkeys(["p", "adjusted", "p of base"], "{:.2g}".format)
        formats["single"] = f"{{:.0f}} of {len(rows) // 3}".format
        print(found.to_string(float_format="{:.3f}".format, formatters=formats, na_rep="-"))
        flags = found.index[found["adjusted"] < LEVEL]
        print(f"flagged by {', '.join(flags) or 'nothing'}")
        verdict = "no harm shown"
        if harm.bias > harm.half:
            verdict = "harm: accuracy is higher on texts that were seen"
        if not harm.counted:
            verdict += " (older rows: of their noise a bound is known)"
        print(f"base {harm.base:.3f}, unseen {harm.unseen:.3f}, seen {harm.seen:.3f}, bias "
              f"{harm.bias:+.2f} ±{harm.half:.2f} points: {verdict}")
    print("\nWhere nothing was seen 1 setting in 20 is flagged by any detector. A flag says "
          "nothing about accuracy.")


# Files and models

@contextlib.contextmanager
def reading(path, advice):
    """What a file of another form raises, as one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"error: {path} cannot be used ({error!r:.200}): {advice}") from None


def read_unit(path, args):
    """What a unit.json holds, its folder, the shards of its `test`, and what decides its rows."""
    with reading(path, "make this unit again"):
        unit = json.loads(path.read_text(encoding="utf-8"))
        unit["cut"] = cut_shards(unit["test"]["examples"], args.shards, path)
        unit["audit"] = f"{unit['hash']} {args.shards} {args.permutations}"
    return {**unit, "folder": path.parent}


def read_units(folder, args):
    """The units of a folder, model by model, each once."""
    units = [read_unit(path, args) for path in sorted(folder.glob("*/unit.json"))]
    if not units:
        raise SystemExit(f"error: no unit in {folder}: python run_zero_shot.py --adapters {folder}")
    rows = pd.DataFrame([unit["row"] for unit in units], [unit["folder"] for unit in units])
    twice = rows.duplicated(KEY)
    if twice.any():
        raise SystemExit(f"error: {twice.idxmax()} is there twice: move one away")
    return sorted(units, key=lambda unit: str(unit["model"]))


def read_examples(path):
    """The examples of a file, one a line, cut at newlines alone; .json and .jsonl hold strings or
    objects with "text", one a line or as one list."""
    with reading(path, "give one example a line"):
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        examples = text.rstrip("\n").split("\n")
        if path.suffix.lower() in (".json", ".jsonl"):
            if not text.lstrip().startswith("["):
                text = f"[{','.join(examples)}]"
            examples = json.loads(text)
        for number, value in enumerate(examples):
            if isinstance(value, dict):
                examples[number] = value["text"]
            examples[number].encode()  # half a character pair ends here
            if not examples[number].strip():
                raise ValueError("it is empty, or has an empty example")
        if not examples:
            raise ValueError("it is empty")
    return examples


def read_log(path):
    """A log of this script or the published code."""
    with reading(path, "give a log that --log wrote"):
        log = json.loads(path.read_text(encoding="utf-8"))
        for value, others in zip(log["canonical_logprobs"], log["shuffled_logprobs"], strict=True):
            if not np.isfinite([value, *others]).all():
                raise ValueError("a log-probability is not finite")
    return log


def read_table(path):
    """The rows of a contamination.csv."""
    words = ["experiment", "model", "task", "data", "recipe", "arm", "audit"]
    with reading(path, "give the table as this script wrote it"):
        table = pd.read_csv(path, dtype=dict.fromkeys(words, str), keep_default_na=False,
                            na_values=[""])[TABLE]
        if {tuple(arms) for _, arms in table.groupby(KEY)["arm"]} != {ARMS}:
            raise ValueError("a unit has not one row of each arm")
    return table


def cut_shards(examples, count, where):
    """The examples as `count` contiguous shards (None: half as many)."""
    count = count or len(examples) // 2
    if not 0 < count < len(examples):
        raise SystemExit(f"error: {where}: {len(examples)} examples cannot fill {count} shards")
    shards = [part.tolist() for part in np.array_split(np.array(examples, dtype=object), count)]
    if max([len({*shard}) for shard in shards]) == 1:
        raise SystemExit(f"error: {where}: examples of a shard are all alike: use fewer --shards")
    return shards


def model_files(name):
    """(folder or Hub id, the .gguf file in it or None) of --model."""
    path = Path(name)
    if path.suffix == ".gguf":
        return str(path.parent), path.name
    return name, None


def open_scorer(source, gguf, quantize, precision, device):
    """The Scorer of a model, loaded and computing as run_zero_shot.py does."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel("ERROR")  # advises what is not needed
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    options = {"gguf_file": gguf, "trust_remote_code": False}
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        if quantize == "nf4":
            options["quantization_config"] = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype)
        lm, info = transformers.AutoModelForCausalLM.from_pretrained(
            source, use_safetensors=gguf is None, dtype=torch.float32, device_map={"": device},
            output_loading_info=True, **options)
        if info["missing_keys"]:
            raise ValueError(f"its files hold no weights for {min(info['missing_keys'])}")
        for module in lm.modules():  # bitsandbytes would round such weights whenever they are read
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        if "MaskedLM" in str(lm.config.architectures):
            raise ValueError("a masked model gives no probability of a text")
        lm.forward = torch.autocast(device.type, dtype, enabled=dtype is not None)(lm.forward)
    except Exception as error:
        raise SystemExit(f"error: model {source} cannot be used ({error!r:.150}): give a causal "
                         "one, for smollm2 the path that run_zero_shot.py prints, and a --device "
                         "that is there") from None
    context = getattr(lm.config.get_text_config(), "max_position_embeddings", 10**6)
    return Scorer(lm.eval(), tokenizer, context)


def write_whole(path, table):
    """Write the table, whole or not at all."""
    path = path.resolve()  # a link stays one
    draft = path.with_name(f"{path.name}.draft")
    table.to_csv(draft, index=False)
    draft.replace(path)


# The same in fit_model.py, meta_analysis.py and the run scripts

# --- shared: effects ---
SHARE = 0.89  # of every interval: the paper's
UPPER = (1 + SHARE) / 2  # its upper end, as a quantile
EFFECTS = {"boost": ("base", "extra"), "bias": ("extra", "test")}  # control, treatment: plain arms
SHARES = ("acc", "f1")  # metrics whose differences are told in points, hundredths
TEXTS_DF = 5  # degrees of freedom that the noise of the texts, known from every row, is worth


def add_effects(rows, metric="acc"):
    """The rows with base, unseen, seen (of the metric; crossed: means over both sets of texts),
    boost, bias (points, or the metric's own unit) and variances in points^2: floor, of rounding to
    whole answers; w, of a crossed bias in accuracy by the noise of its texts, a difference between
    random halves of 2n; counted: whether w is known, or the least that the accuracies allow."""
    rows = rows.copy()
    crossed = rows["arms"] == "crossed"
    n = rows["n"]
    scale = 100 if metric in SHARES else 1
    places = {"base": ("base", "base"), "unseen": ("extra", "test"), "seen": ("test", "extra")}
    for name, (arm, mirrored) in places.items():
        on_test = rows[f"{metric}_{arm}"]
        both = (on_test + rows[f"{metric}_{mirrored}_on_extra"]) / 2
        rows[name] = both.where(crossed, on_test)
    rows["boost"] = scale * (rows["unseen"] - rows["base"])
    rows["bias"] = scale * (rows["seen"] - rows["unseen"])
    rows["floor"] = (100 / (n * (1 + crossed))) ** 2 / 12 * (metric in SHARES)

    noise = 0
    for ending, (one, other) in {"": ("extra", "test"), "_on_extra": ("test", "extra")}.items():
        change = rows[f"acc_{other}{ending}"] - rows[f"acc_{one}{ending}"]
        noise = noise + rows[f"discordant{ending}"].fillna(change.abs()) - change**2
    known = crossed & (metric == "acc")
    rows["w"] = np.maximum(100**2 / (4 * n) * noise, rows["floor"]).where(known)
    lacking = rows[["discordant", "discordant_on_extra"]].isna().any(axis=1)
    rows["counted"] = known & ~lacking
    return rows


def pool_noise(tasks):
    """(variance of a crossed accuracy bias of one subsample of each task, points^2; degrees of
    freedom). tasks: a row a task of n, subsamples, w (their mean), sd (of their biases, nan of
    one). The noise of the texts, with one imaginary discordant text a set and task, plus what
    effects that differ from run to run add, which all tasks know together."""
    K, n = tasks["subsamples"], tasks["n"]
    w = tasks["w"] + 100**2 * 2 / (4 * n**2 * K)
    excess = (K - 1) * (tasks["sd"].fillna(0) ** 2 - w)
    between = max(0, excess.sum() / max(1, (K - 1).sum()))
    return w + between, K.sum() - len(K) + TEXTS_DF


def bias_interval(tasks):
    """(standard error, degrees of freedom, half-width) of the 89 % interval of the mean over tasks
    of their crossed accuracy biases, in points, by Student's t. tasks: as pool_noise takes them."""
    variance, df = pool_noise(tasks)
    se = math.sqrt((variance / tasks["subsamples"]).sum()) / len(tasks)
    return se, df, stats.t.ppf(UPPER, df) * se
# --- end shared ---


# Flags and main

def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [folder] [flags]", description=__doc__.partition("\n\n")[0])
    add = parser.add_mutually_exclusive_group().add_argument
    add("folder", type=Path, nargs="?", default=Path("kept"),
        help="units of run_zero_shot.py --adapters (kept)")
    add("--answers", type=Path, help="table of answers of any models")
    add("--examples", type=Path, help="one a line, or .json, .jsonl")
    add("--from-log", type=Path, help="p-values of a log, also a published one")
    add("--from-table", type=Path, help="tables of an audit's --out")
    add = parser.add_argument_group("with --answers").add_argument
    add("--clean", nargs="+", default=[], help="models that cannot have seen the released half")
    add("--margin", type=float, default=5.0, help="points that matter to you (5)")
    add = parser.add_argument_group("with --examples").add_argument
    add("--model", help="folder, Hub id or .gguf file; for smollm2 what run_zero_shot.py prints")
    add("--log", type=Path, help="write log-probabilities there, as JSON")
    add("--held-out", type=Path, help="kept-back half: text detectors, too")
    add("--reference", help="a model that saw neither half, for ref")
    add("--precision", default="float32", choices=("float32", "tf32", "bf16", "fp16"),
        help="what a model computes in (float32)")
    add("--quantize", default="none", choices=("none", "nf4"), help="weights in 4 bits (none)")
    add = parser.add_argument
    add("--shards", type=int, help="contiguous parts of the order test (half as many as examples)")
    add("--permutations", type=int, default=50, help="most other orders of a shard (50)")
    add("--batch-tokens", type=int, default=1024, help="tokens a pass (1024)")
    add("--device", help="cpu, cuda, cuda:1 (cuda where there is one)")
    add("--out", type=Path, help="table; of an audit contamination.csv, whose units are skipped")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    needs = {"examples": "model", "model": "examples", "log": "examples", "held_out": "examples",
             "reference": "held_out", "clean": "answers"}
    for flag, other in needs.items():
        if getattr(args, flag) and not getattr(args, other):
            flags = f"--{flag} needs --{other}".replace("_", "-")
            raise SystemExit(f"error: {flags}")
    for path in (args.out, args.log):
        if path and not os.access(path.parent, os.W_OK):
            raise SystemExit(f"error: {path} cannot be written: name another folder")
    try:
        if args.answers:
            judge_answers(args)
        elif args.from_log:
            show_order(order_p(read_log(args.from_log)))
        elif args.from_table:
            show_table(read_table(args.from_table))
        elif args.examples:
            audit_files(args)
        else:
            show_table(audit_units(args))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        raise SystemExit("error: the GPU ran out of memory: use a smaller --batch-tokens")
    except KeyboardInterrupt:
        raise SystemExit("stopped: audited units are kept, the same command goes on")


if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    main([] if "__file__" not in globals() else None)
