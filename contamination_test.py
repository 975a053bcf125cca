"""Which contamination detector sees that a model was pretrained on test texts, and did that do any harm?

Reproduces section 9.2 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before few-shot
text classification" (Dubey) on the units of run_zero_shot.py --adapters, and goes past it: five detectors beside the
change of accuracy. A unit is a subsample: n texts `extra` and n texts `test` drawn from one pool, an adapter pretrained
on either, and in unit.json the exact strings that they saw. The order test also runs on any benchmark.

Commands, cheapest first
    python contamination_test.py --from-log log.json                    # p-values of a log, no model
    python contamination_test.py --examples mine.txt --model smollm2    # order test of any examples; --log log.json
    python run_zero_shot.py --tasks rotten_tomatoes --subsamples 2 --pack --answers --pretrain-epochs 3 --adapters kept
    python contamination_test.py kept                                   # these units: tables, verdict, figure

Order test (Oren et al., "Proving test set contamination in black-box language models", ICLR 2024): to a model that
never saw a data set no order of its examples is likelier than another. Contiguous shards of the examples; per shard
log p(canonical order) against that of other orders: all where these are no more than --permutations, else so many
random ones, none evaluated twice. One-sided p-values:
    published    t-test over the shards, canonical minus mean of the others, ddof 0, shards of one example kept
    distinct     the same with every order counted once, and the canonical one not among the others
    exact        permutation test on the sum over shards: all combinations, or (hits + 1) / (draws + 1) of 10^6
--published takes the published code's tokens (each example alone with special tokens, a line of text with its newline,
end to end, the first token unscored) and draws orders with repeats. In a unit the examples are those of `test` as
trained on, behind its instruction, joined by blank lines. (The paper passed text-label pairs, which no adapter saw.)

Text detectors, for each text of `test` and `extra`, as trained on and behind the instruction, from one pass:
    logp      mean log-probability of its tokens
    zlib      logp over the bytes of the text compressed by zlib (Carlini et al. 2021)
    mink      mean of the lowest 20 % of its tokens' log-probabilities (Min-K%, Shi et al. 2024)
    minkpp    the same of (log p - mean) / sd, of log p over the vocabulary (Min-K%++, Zhang et al. 2024)
AUC: how often a text of `test` scores above one of `extra`, with the half-width of its 89 % DeLong interval (0 at an
AUC of 1). TPR: share of `test` above all but 5 % of `extra`. Membership is all that differs between the two sets:
`base` saw neither and must have .5 in 89 % of its intervals. Flags: p < .05, or an AUC interval above .5.

contamination.csv (--out), rewritten after each unit: a row per unit and arm, with the columns
    experiment, model, task, m, n, subsample, seed, recipe    the unit, as in results.csv
    pack, answers, epochs               texts a sequence (1: padded); trained with answers; epochs of pretraining
    arm, accuracy, change               base, extra or test; on `test`; minus that of extra, in accuracy points
    shards, informative, evaluations    shards, those with several orders, sequences that the order test evaluated
    p_published, p_distinct, p_exact    of the order test
    auc_D, half_D, tpr_D                for each detector D; contamination.png shows auc_D and p_exact against change
The tables over units average AUCs, combine p_exact by Fisher's method and give the change the interval of target 1
(README.md; none with one subsample).

Measured 2026-11-21: --from-log of the paper's log (extra, 256 shards): published .336248, distinct .386518, exact
.386985 (by convolution .3867); 500 examples in 256 shards take 500 evaluations, the published procedure 13,056.
"""

import argparse
import contextlib
import functools
import glob
import io
import itertools
import json
import logging
import math
import os
import sys
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from scipy import stats
from tqdm.auto import tqdm

LENGTHS = "max_position_embeddings", "max_seq_len"  # names in configs of the tokens that a model can take
CONTEXT = 2048  # longest window in tokens, moved by half of it (published code of the order test)
LEVEL = 0.05  # a p-value below it is a flag (paper, section 9.2)
ENUMERATED, DRAWS = 2**20, 10**6  # most combinations of orders to enumerate, else draws
LOWEST, FALSE_POSITIVES = 0.2, 0.05  # share of the tokens in Min-K% and Min-K%++; of `extra` that the TPR lets pass
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # paper, section 9
ARMS = ("base", "extra", "test")
DETECTORS = {"logp": "log p", "zlib": "log p / zlib", "mink": "Min-K%", "minkpp": "Min-K%++"}
UNIT = ("experiment", "model", "task", "m", "n", "subsample", "seed", "recipe", "pack", "answers", "epochs")
TABLE = (*UNIT, "arm", "accuracy", "change", "shards", "informative", "evaluations", "p_published", "p_distinct",
         "p_exact", *(f"{what}_{name}" for name in DETECTORS for what in ("auc", "half", "tpr")))


# --- shared: basics ---
def stop(message):
    """A user's mistake: one line on stderr that says what was found, where and what to do; exit status 2."""
    tqdm.write("error: " + " ".join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def guard():
    """What can strike anywhere ends in one line: full disk, unwritable folder, Ctrl-C; a closed pipe ends quietly."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="replace")  # an ASCII terminal
    again = "run the same command again" + " without --overwrite" * ("--overwrite" in sys.argv)
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        stop(f"{where}{error.strerror or error}; mend that and {again}: what is finished is kept")
    except KeyboardInterrupt:
        tqdm.write(f"stopped: what is finished is kept; {again}", file=sys.stderr)
        raise SystemExit(130) from None


def positive(text):
    """argparse type: a whole number from 1 to a billion."""
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
# --- end shared ---


# --- shared: interval ---
SHARE = 0.89  # of every interval: the paper's


def these_tasks(means, variances, counts, floor):
    """(estimate, standard error, degrees of freedom, low, high) of the mean over these tasks, in closed form.

    means, variances, counts: per task the mean, variance and number K of its subsamples' differences; floor: the
    least variance, that of rounding ((100 / n)^2 / 12 for points). v_j = max(s_j^2, floor) / K_j, standard error
    sqrt(sum v_j) / J, Student t with Satterthwaite's degrees of freedom. nan, but for the estimate, if a task has one
    subsample."""
    counts = np.asarray(counts, float)
    estimate = float(np.mean(means))
    if counts.min() < 2:
        return estimate, math.nan, math.nan, math.nan, math.nan
    v = np.maximum(variances, floor) / counts
    se = math.sqrt(v.sum()) / len(v)
    df = float(v.sum() ** 2 / (v**2 / (counts - 1)).sum()) if se else math.nan
    half = stats.t.ppf((1 + SHARE) / 2, df) * se
    return estimate, se, df, estimate - half, estimate + half
# --- end shared ---


def read_unit(path, count):
    """What is needed of a unit.json: columns of the table, model, head and texts; the shards of test."""
    try:
        unit = json.loads(path.read_text(encoding="utf-8"))
        row, model = unit["row"], unit["model"]
        for arm in ("extra", "test"):
            adapter = json.loads((path.parent / arm / "adapter_config.json").read_text(encoding="utf-8"))
            (path.parent / arm / "adapter_model.safetensors").stat()
            if (other := adapter["base_model_name_or_path"]) != model["source"]:
                raise ValueError(f"{arm} is an adapter of another model, {other}")
        form = f"packed by {unit['pack']}" if unit["pack"] > 1 else "padded"
        setting = (f"{row['experiment']}, {row['model']}, m = {row['m']}, n = {row['n']}, seed {row['seed']}: "
                   f"{form}, {'with' if unit['answers'] else 'without'} answers, epochs: {unit['epochs']}")
        return {"folder": path.parent, "columns": {name: {**unit, **row}[name] for name in UNIT} | {"setting": setting},
                "accuracies": {arm: row[f"acc_{arm}"] for arm in ARMS}, "head": unit["instruction"] + "\n\n",
                "model": [model["source"], model["gguf"], model["quantize"]],
                "texts": unit["extra"]["examples"] + unit["test"]["examples"],
                "shards": cut_shards(unit["test"]["examples"], count, path)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(f"{path} is no unit of run_zero_shot.py ({type(error).__name__}: {error}): make it again with --adapters")


def read_examples(path, published):
    """The examples of a file, in its order: .json holds a list, .jsonl one a line (strings, or objects with "text");
    any other file one example a line, cut at newlines alone."""
    try:
        text, kind = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n"), path.suffix.lower()
        if kind in (".json", ".jsonl"):
            values = json.loads(text) if kind == ".json" else map(json.loads, filter(str.strip, io.StringIO(text)))
            if isinstance(values, (dict, str)):
                raise TypeError("a list is needed")
            examples = [value["text"] if isinstance(value, dict) else value for value in values]
        else:
            lines = io.StringIO(text.rstrip("\n") + "\n" * text.endswith("\n"))
            examples = [line if published else line.removesuffix("\n") for line in lines]
        "".join(examples).encode()  # strings
        if not examples or not all(map(str.strip, examples)):
            raise ValueError("it is empty, or has an empty example")
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(f"--examples {path} cannot be read ({type(error).__name__}: {error}): give one example a line, or JSON")
    return examples


def read_log(path):
    """A log of this script or of the published code: canonical_logprobs [S], shuffled_logprobs S lists."""
    try:
        log = json.loads(path.read_text(encoding="utf-8"))
        canonical, shuffled = log["canonical_logprobs"], log["shuffled_logprobs"]
        finite = all(math.isfinite(number) for row in (canonical, *shuffled) for number in row)
        if not canonical or len(canonical) != len(shuffled) or not finite:
            raise ValueError("finite numbers are needed, one and a list of others per shard")
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(f"--from-log {path} is no log of this test ({type(error).__name__}: {error}): give one that --log wrote")
    return log


def open_scorer(source, gguf, quantize, device):
    """The model, float32 or NF4 as trained, and what scoring needs; begin: the token before a text."""
    import transformers

    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"transformers\.|bitsandbytes\.|peft\.")
    for name in ("transformers", "bitsandbytes", "huggingface_hub"):  # notes, kernels, retries
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        safe = {"gguf_file": gguf, "trust_remote_code": False}
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **safe)
        tokenizer("a", return_offsets_mapping=True)  # tokenise needs it
        lm, info = transformers.AutoModelForCausalLM.from_pretrained(
            source, use_safetensors=gguf is None, dtype=torch.float32, device_map={"": device},
            output_loading_info=True, **safe,
            quantization_config=transformers.BitsAndBytesConfig(**NF4) if quantize == "nf4" else None)
        if lost := [*info["missing_keys"], *info["mismatched_keys"]]:
            raise ValueError(f"its files hold no weights for {lost[0]}")
        for module in lm.modules() if quantize == "nf4" else ():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # it would round the weights anew with each adapter
        with torch.inference_mode():
            pair = lm.eval()(input_ids=torch.tensor([[1, 2, 3], [1, 2, 4]], device=device)).logits[:, 0]
        if (pair[0] - pair[1]).abs().max() > 1e-4 * pair.abs().max():  # the last token changes what is said before it
            raise ValueError("a masked model, whose tokens see those behind them, gives no probability of a text")
    except Exception as error:  # whatever a broken, foreign or unreachable model makes the libraries raise
        stop(f"model {source} ({type(error).__name__}: {str(error)[:400]}): needed: a causal model, in a local folder "
             "(a unit's: where it was), on the Hub, or smollm2 once run_zero_shot.py has unpacked it; and a --device")
    config = lm.config.get_text_config()
    limit = next(filter(None, (getattr(config, name, None) for name in LENGTHS)), CONTEXT)
    begin = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), None)
    return SimpleNamespace(lm=lm, tokenizer=tokenizer, begin=begin, context=min(CONTEXT, limit))


def add_adapter(lm, folder):
    """The model with the adapter of a folder, unmerged."""
    import peft

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*adapter keys.*")  # weights that the file lacks would stay 0
            return peft.PeftModel.from_pretrained(lm, folder).eval()
    except Exception as error:  # whatever a foreign or broken adapter makes the library raise
        stop(f"{folder}: an adapter of another model ({type(error).__name__}: {str(error)[:300]}): make its unit again")


def tokenise(net, head, body):
    """(token ids, index of the first scored one) of body behind head, as one text without an end token, as trained.
    Without a head the model's beginning-of-text token comes first, so that the first token of body is scored too."""
    coded = net.tokenizer(head + body, return_offsets_mapping=True)
    ids, ends = coded["input_ids"], [end for _, end in coded["offset_mapping"]]
    if ids and ids[-1] in (net.tokenizer.eos_token_id, net.tokenizer.sep_token_id):
        ids = ids[:-1]
    if head:
        return ids, next((i for i, end in enumerate(ends) if end > len(head)), len(ids))
    return ids if net.begin in (None, *ids[:1]) else [net.begin, *ids], 1


def cut_windows(length, context):
    """(start, end, first) of the windows over `length` inputs, moved by half a window: inputs start..end-1 are read,
    the tokens after inputs first..end-1 scored. Every input is `first` or later in exactly one window."""
    step = max(context // 2, 1)
    for start in range(0, max(length - context, 0) + step, step):
        yield start, min(start + context, length), start + (context - step if start else 0)


def token_scores(logits, targets):
    """[3, tokens]: log p of each target token, and mean and sd of log p over the vocabulary at its position."""
    log_p = logits.float().log_softmax(1)
    p = log_p.exp()
    mean = (p * log_p).sum(1)
    sd = (p * (log_p - mean[:, None]) ** 2).sum(1).sqrt()
    return torch.stack([log_p.gather(1, targets[:, None])[:, 0], mean, sd])


@torch.inference_mode()
def score_tokens(net, sequences, limit, title):
    """token_scores of each sequence (ids, index of the first scored token), about `limit` tokens a pass. Padding is on
    the right, where no token of a causal model looks: no mask is needed."""
    rows = [(number, start, end, max(first, scored - 1)) for number, (ids, scored) in enumerate(sequences)
            for start, end, first in cut_windows(len(ids) - 1, net.context)]
    rows = sorted((row for row in rows if row[3] < row[2]), key=lambda row: row[1] - row[2])  # longest first
    found = [np.zeros((3, len(ids) - scored)) for ids, scored in sequences]
    with tqdm(total=len(rows), desc=title, unit="sequence", leave=False, disable=None) as bar:
        while rows:
            size = max(limit // (rows[0][2] - rows[0][1]), 1)
            batch, rows = rows[:size], rows[size:]
            inputs = [torch.tensor(sequences[number][0][start:end]) for number, start, end, _ in batch]
            padded = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True).to(net.lm.device)
            logits = net.lm(input_ids=padded, use_cache=False).logits
            for line, (number, start, end, first) in zip(logits, batch):
                ids, scored = sequences[number]
                targets = torch.tensor(ids[first + 1 : end + 1], device=line.device)
                part = token_scores(line[first - start : end - start], targets)
                found[number][:, first + 1 - scored : end + 1 - scored] = part.cpu()
            bar.update(len(batch))
    if not all(np.isfinite(scores).all() for scores in found):
        stop(f"{title}: a log-probability is not finite: check the model's weights")
    return found


def cut_shards(examples, count, where):
    """The examples as `count` contiguous shards (None: half as many as examples), equal but for one example."""
    if len(examples) < 2:
        stop(f"{where}: {len(examples)} example has one order, so there is nothing to compare: give two or more")
    if (count := count or len(examples) // 2) >= len(examples):
        stop(f"{where}: {len(examples)} examples cannot fill {count} shards: use --shards {len(examples) // 2} or less")
    return [part.tolist() for part in np.array_split(np.array(examples, dtype=object), count)]


def draw_orders(size, args, number):
    """The canonical order of 0..size-1, then all others if --permutations allows, else or if published random ones."""
    if math.factorial(size) <= args.permutations and not args.published:
        return list(itertools.permutations(range(size)))
    rng = np.random.default_rng([0, number])
    return [range(size), *(rng.permutation(size).tolist() for _ in range(args.permutations))]


def score_orders(net, shards, head, args, title):
    """The log of the order test: canonical_logprobs [S], shuffled_logprobs S lists, evaluations (none runs twice)."""
    sequences, found = {}, []  # number of each distinct sequence; per shard those of its orders
    for number, shard in enumerate(shards):
        found.append([])
        for order in draw_orders(len(shard), args, number):
            examples = [shard[i] for i in order]
            if args.published:
                ids, first = [token for example in examples for token in net.tokenizer(example)["input_ids"]], 1
            else:
                ids, first = tokenise(net, head, "\n\n".join(examples))
            found[-1].append(sequences.setdefault((tuple(ids), first), len(sequences)))
    log_p = [float(scores[0].sum()) for scores in score_tokens(net, list(sequences), args.batch_tokens, title)]
    return {"canonical_logprobs": [log_p[row[0]] for row in found],
            "shuffled_logprobs": [[log_p[i] for i in row[1:]] for row in found], "evaluations": len(sequences)}


def t_test(differences):
    """One-sided p of mean > 0 by the published t-test, whose standard deviation has ddof 0; nan where it is 0."""
    mean, deviation, count = np.mean(differences), np.std(differences), len(differences)
    return float(stats.t.sf(mean / (deviation / math.sqrt(count)), count - 1)) if deviation else math.nan


def permutation_p(gaps):
    """p of the permutation test. gaps: per informative shard log p(order) - log p(canonical) of its distinct orders, 0
    for the canonical one. p: how often their sum is >= 0 when each shard's order is drawn uniformly."""
    tie = -1e-9 * sum(float(np.ptp(gap)) for gap in gaps)  # an equal sum counts, whatever the rounding
    if math.prod(map(len, gaps)) <= ENUMERATED:
        return float(np.mean(functools.reduce(np.add.outer, gaps) >= tie))
    rng = np.random.default_rng(0)
    sums = sum(rng.choice(gap, DRAWS) for gap in gaps)
    return float(np.sum(sums >= tie) + 1) / (DRAWS + 1)


def order_p(log):
    """The p-values of a log, its shards and how many of them have several orders."""
    canonical, shuffled = log["canonical_logprobs"], log["shuffled_logprobs"]
    others = [np.setdiff1d(row, [value]) for value, row in zip(canonical, shuffled)]  # distinct, without the canonical
    gaps = [np.array([0.0, *(row - value)]) for value, row in zip(canonical, others) if len(row)]
    if not gaps:
        stop("every shard has one log-probability for all its orders (all examples alike?): there is nothing to test")
    published, distinct = ([value - np.mean(row) if len(row) else 0.0 for value, row in zip(canonical, rows)]
                           for rows in (shuffled, others))
    return {"shards": len(canonical), "informative": len(gaps), "p_published": t_test(published),
            "p_distinct": t_test(distinct), "p_exact": permutation_p(gaps)}


def detect(scores, text):
    """The DETECTORS of one text, from its token_scores; all are higher where it was seen."""
    log_p, mean, sd = scores
    standard = (log_p - mean) / np.maximum(sd, 1e-12)  # 0 / 0, a prediction without any doubt, counts as typical
    count = max(int(len(log_p) * LOWEST), 1)
    return (log_p.mean(), log_p.mean() / len(zlib.compress(text.encode())),
            np.sort(log_p)[:count].mean(), np.sort(standard)[:count].mean())


def separate(seen, unseen):
    """(AUC, half-width of its interval by DeLong, true-positive rate at 5 % false positives) of two sets of scores."""
    wins = (seen[:, None] > unseen) + 0.5 * (seen[:, None] == unseen)
    error = math.sqrt(wins.mean(1).var(ddof=1) / len(seen) + wins.mean(0).var(ddof=1) / len(unseen))
    threshold = np.sort(unseen)[::-1][int(FALSE_POSITIVES * len(unseen))]
    return float(wins.mean()), float(stats.norm.ppf((1 + SHARE) / 2) * error), float((seen > threshold).mean())


def audit(net, unit, arm, args):
    """A row of contamination.csv."""
    title, accuracies, n = f"{unit['folder'].name} {arm}", unit["accuracies"], unit["columns"]["n"]
    if arm != "base":
        net.lm = add_adapter(net.lm, unit["folder"] / arm)
    log = score_orders(net, unit["shards"], unit["head"], args, title)
    scores = score_tokens(net, [tokenise(net, unit["head"], text) for text in unit["texts"]], args.batch_tokens, title)
    if arm != "base":
        net.lm = net.lm.unload()
    row = {**unit["columns"], "arm": arm, "accuracy": accuracies[arm], "evaluations": log["evaluations"],
           "change": 100 * (accuracies[arm] - accuracies["extra"]), **order_p(log)}
    for name, values in zip(DETECTORS, np.transpose(list(map(detect, scores, unit["texts"])))):
        row |= zip((f"auc_{name}", f"half_{name}", f"tpr_{name}"), separate(values[n:], values[:n]))
    return row


def show_table(title, rows):
    """Print the arms over the units of one setting: Fisher's p, mean AUC, half-width and TPR of each detector, mean
    accuracy, its change by target 1; below it, whether the arm `test` was flagged and harmed."""
    print(f"\n{title}\narm    order p  {''.join(f'{words:<17}' for words in DETECTORS.values())}accuracy  change")
    for arm, mine in rows.groupby("arm"):  # test comes last
        p = stats.combine_pvalues(mine["p_exact"]).pvalue
        found = {words: (mine[f"auc_{name}"].mean(), math.hypot(*mine[f"half_{name}"]) / len(mine),
                         mine[f"tpr_{name}"].mean()) for name, words in DETECTORS.items()}
        tasks = mine.groupby("task")["change"].agg(["mean", "var", "size"]).fillna(0)
        change, _, _, low, high = these_tasks(*tasks.to_numpy().T, (100 / mine["n"].iloc[0]) ** 2 / 12)
        cells = "".join("{:.2f} ±{:.2f} {:.2f}  ".format(*cell) for cell in found.values())
        words = "" if arm == "extra" else f"{change:+.2f}" + ("" if math.isnan(low) else f" [{low:+.2f}, {high:+.2f}]")
        print(f"{arm:<6}{p:8.4f}  {cells}{mine['accuracy'].mean():8.3f}  {words}", flush=True)
    flags = ["order test"] * int(p < LEVEL) + [words for words, (auc, half, _) in found.items() if auc - half > 0.5]
    print(f"test: {'flagged by ' + ', '.join(flags) if flags else 'not flagged'}; "
          f"{'harmed: accuracy above that of extra' if low > 0 else 'no harm shown'}")


def compare_settings(rows):
    """The tables over units, and what they mean."""
    print("\n\nOver units: p of all together; mean AUC ± 89 %, TPR at 5 % false positives; accuracy and its change")
    for setting, some in rows.groupby("setting", sort=False):
        show_table(f"{setting}, units: {len(some) // len(ARMS)}", some)
    base = rows[rows["arm"] == "base"]
    inside = np.concatenate([abs(base[f"auc_{name}"] - 0.5) <= base[f"half_{name}"] for name in DETECTORS])
    print(f"\nbase saw neither set: .5 lies in {inside.sum()} of its {len(inside)} AUC intervals (89 % expected)\n"
          "A flag says that texts were seen, not that the accuracy on them is inflated; no flag excludes neither.")


def draw_figure(rows, path):
    """AUC of each detector and p of the order test against the change of accuracy, a point per arm and unit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    axes, colours = figure.subplots(2, 3).ravel(), dict(zip(ARMS, ("#888888", "#0072b2", "#d55e00")))
    panels = {f"auc_{name}": f"AUC, {words}" for name, words in DETECTORS.items()} | {"p_exact": "p, order test"}
    for axis, (column, title) in zip(axes, panels.items()):
        for (name, some), marker in zip(rows.groupby("experiment", sort=False), itertools.cycle("osD^vP*X")):
            for arm, mine in some.groupby("arm"):
                axis.plot(mine["change"], mine[column], marker, color=colours[arm], alpha=0.7, label=f"{arm}: {name}")
        axis.axhline(LEVEL if column == "p_exact" else 0.5, color="black", linestyle=":")
        axis.axvline(0, color="black", linestyle=":")
        axis.set(title=title, ylim=(-0.03, 1.03), xlabel="accuracy minus that of extra, points")
    axes[5].axis("off")
    axes[5].legend(*axes[0].get_legend_handles_labels(), loc="center", frameon=False)
    figure.savefig(path, dpi=120)


def check_output(path, beginning):
    """A file can be written there, and one that it replaces is this script's."""
    if path.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        stop(f"{path} cannot be written (a folder, or its folder is missing or closed): give another file")
    if path.exists() and not beginning.startswith(path.read_bytes()[: len(beginning)]):  # also one torn by a kill
        stop(f"{path} is there and was not written by this script: give another file")


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument_group("what to run").add_mutually_exclusive_group().add_argument
    add("folder", type=Path, nargs="?", default=Path("kept"), help="units of run_zero_shot.py --adapters (%(default)s)")
    add("--examples", type=Path, metavar="FILE", help="order test of these: one a line, or .json, .jsonl with \"text\"")
    add("--from-log", type=Path, metavar="FILE", help="p-values of a log, also of the published code; no model")
    add = parser.add_argument_group("with --examples").add_argument
    add("--model", metavar="NAME", help="local folder, Hub id, or smollm2 where run_zero_shot.py has unpacked it")
    add("--quantize", default="none", choices=("none", "nf4"), help="(%(default)s; units: as trained)")
    add("--log", type=Path, metavar="FILE", help="write the log-probabilities there, as JSON")
    add = parser.add_argument_group("order test").add_argument
    add("--shards", type=positive, metavar="N", help="contiguous shards (half as many as examples)")
    add("--permutations", type=positive, default=50, metavar="N", help="evaluate all orders, or draw N (%(default)s)")
    add("--published", action="store_true", help="the published code's tokens and drawn orders")
    add = parser.add_argument_group("machine and output").add_argument
    add("--batch-tokens", type=positive, default=1024, metavar="N", help="tokens a pass (%(default)s; more on a GPU)")
    add("--device", help="cpu, cuda, cuda:1 (cuda where there is one)")
    add("--out", type=Path, default=Path("contamination.csv"), metavar="FILE.csv", help="table; figure beside it")
    return parser.parse_args(argv)


def audit_units(args):
    """Every arm of every unit: tables, verdict, contamination.csv, figure. What can be wrong is found first."""
    if args.out.suffix != ".csv":
        stop(f"--out {args.out}: give a file name that ends in .csv; the figure goes beside it")
    figure, rows, loaded = args.out.with_suffix(".png"), [], None
    check_output(args.out, ",".join(TABLE).encode())
    check_output(figure, b"\x89PNG")
    units = [read_unit(path, args.shards) for path in sorted(args.folder.glob("*/unit.json"))]
    if not units:
        stop(f"no unit in {args.folder}: python run_zero_shot.py --tasks rotten_tomatoes --adapters {args.folder}")
    for unit in sorted(units, key=lambda unit: str(unit["model"])):
        if unit["model"] != loaded:
            loaded, net = unit["model"], None  # room for the next
            net = open_scorer(*loaded, args.device)
        rows += [audit(net, unit, arm, args) for arm in ARMS]
        table = pd.DataFrame(rows)
        table.to_csv(draft := args.out.with_name(f".{args.out.name}"), columns=TABLE, index=False, lineterminator="\n")
        os.replace(draft, args.out)  # whole or not at all
        show_table(unit["folder"].name, table[-len(ARMS) :])
    compare_settings(table)
    draw_figure(table, figure)
    print(f"table: {args.out.resolve()}\nfigure: {figure.resolve()}")


def audit_examples(args):
    """The log of the order test of a user's own examples."""
    shards = cut_shards(read_examples(args.examples, args.published), args.shards, f"--examples {args.examples}")
    if args.log:
        check_output(args.log, b'{"canonical_logprobs"')
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pretrain-on-test-text"
    unpacked = next(cache.glob(f"*-{glob.escape(args.model)}-*/*.gguf"), None)
    source = (str(unpacked.parent), unpacked.name) if unpacked else (args.model, None)
    log = score_orders(open_scorer(*source, args.quantize, args.device), shards, "", args, args.examples.name)
    published = len(shards) * (1 + args.permutations)
    print(f"sequence evaluations: {log['evaluations']}; the published procedure: {len(shards)} x "
          f"(1 + {args.permutations}) = {published}, {published / log['evaluations']:.1f} times as many")
    if args.log:
        args.log.write_text(json.dumps(log))
    return log


def main(argv=None):
    args = parse_args(argv)
    if (args.examples is None) != (args.model is None) or args.log and args.examples is None:
        stop("--examples and --model go together, and --log goes with them")
    try:
        if args.examples is None and args.from_log is None:
            return audit_units(args)
        found = order_p(audit_examples(args) if args.from_log is None else read_log(args.from_log))
    except KeyboardInterrupt:
        tqdm.write(f"stopped: the same command starts anew; till then {args.out} holds finished units", file=sys.stderr)
        raise SystemExit(130) from None
    except torch.OutOfMemoryError:
        stop(f"the GPU ran out of memory: use a smaller --batch-tokens than {args.batch_tokens}")
    print(f"{found['shards']} shards, {found['shards'] - found['informative']} with one order, which say nothing\n"
          f"p published  {found['p_published']:.6f}   t-test, the other orders as often as they were drawn\n"
          f"p distinct   {found['p_distinct']:.6f}   t-test, every other order once\n"
          f"p exact      {found['p_exact']:.6f}   permutation test")


# --- shared: start ---
if __name__ == "__main__":
    with guard():
        main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
