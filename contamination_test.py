"""Which contamination detector sees that a model was pretrained on test texts, and did that do any harm?

Reproduces section 9.2 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before few-shot
text classification" (Dubey) on the units that run_zero_shot.py --adapters leaves, and goes past it: five detectors,
padded and packed, without and with answers, beside the change of accuracy. The order test also runs on any benchmark.
A unit is a subsample: n texts `extra` and n texts `test` drawn from one pool, an adapter pretrained on either, and in
unit.json the exact strings that they saw (m, the labelled texts set aside, only fixes the draw).

Commands, cheapest first
    python contamination_test.py --from-log log.json                    # p-values of a log, no model
    python contamination_test.py --examples mine.txt --model smollm2    # order test of any examples, in their order
    python contamination_test.py --examples mine.jsonl --model gpt2 --shards 20 --log log.json
    python run_zero_shot.py --tasks rotten_tomatoes --subsamples 2 --pack --answers --pretrain-epochs 3 --adapters kept
    python contamination_test.py kept                                   # these units: tables, verdict, figure

Order test (Oren et al., "Proving test set contamination in black-box language models", ICLR 2024): to a model that
never saw a data set no order of its examples is likelier than another. Contiguous shards of the examples; per shard
log p(canonical order) against that of other orders: all where these are no more than --permutations, else so many
random ones, none evaluated twice. One-sided p-values:
    published    t-test over the shards, canonical minus mean of the others, ddof 0, shards of one example kept
    distinct     the same with every order counted once, and the canonical one not among the others
    exact        permutation test on the sum over shards: by enumeration, or (hits + 1) / (draws + 1) of a million
                 draws (standard error .0005 at most); the p of the tables
--published takes the published code's tokens (each example alone with special tokens, a line of text with its newline,
end to end, the first token unscored) and draws orders with repeats. In a unit the examples are those of `test` exactly
as trained on, behind the unit's instruction, joined by blank lines as in a packed sequence. The paper passed text-label
pairs to every arm, which its adapters had not seen; here the answer is there only if the unit was trained with it.

Text detectors, for each text of `test` and `extra`, as trained on and behind the instruction, all from one pass:
    logp      mean log-probability of its tokens
    zlib      logp over the bytes of the text compressed by zlib (Carlini et al. 2021)
    mink      mean of the lowest 20 % of its tokens' log-probabilities (Min-K%, Shi et al. 2024)
    minkpp    the same of (log p - mean) / sd, of log p over the vocabulary (Min-K%++, Zhang et al. 2024)
AUC: how often a text of `test` scores above one of `extra`, with the half-width of its 89 % DeLong interval (0 at an
AUC of 1). TPR: share of `test` above all but 5 % of `extra`. Both are drawn alike, so membership is all that differs:
`base` saw neither and must have .5 in 89 % of its intervals; for `extra`, an AUC below .5 is its memory of the others.

contamination.csv (--out), rewritten after each unit: a row per unit and arm, with the columns
    experiment, model, task, m, n, subsample, seed, recipe    the unit, as in results.csv
    pack, answers, epochs               texts a sequence (1: padded); 1 if trained with answers; epochs of pretraining
    arm, accuracy, change               base, extra or test; on `test`; minus that of extra, in accuracy points
    shards, informative, evaluations    shards, those with several orders, sequences that the order test evaluated
    p_published, p_distinct, p_exact    of the order test
    auc_D, half_D, tpr_D                for each detector D; contamination.png shows auc_D and p_exact against change
The tables over units average the AUCs of a setting, combine its p by Fisher's method and give the change the interval
of target 1 (README.md; none with one subsample). * is a flag: p < .05, or an AUC interval above .5; without memory
about one cell in 18 has one.

Measured 2026-11-21: --from-log of the paper's log (extra, 256 shards): published .336248, distinct .386518, exact
.386777 ± .0005; 500 examples in 256 shards take 500 evaluations, the published procedure 13,056; smollm2, n = 50:
2.4 minutes of CPU a unit, on a busy machine. Two subsamples of rotten_tomatoes, packed, with answers, 3 epochs:
accuracy +15.0 [+9.3, +20.7] points over extra, and no detector flags it (AUC .49 to .56, p .18; base .45 to .51).
"""

import argparse
import contextlib
import csv
import functools
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
import torch
from scipy import stats
from tqdm.auto import tqdm

CONTEXT = 2048  # longest window in tokens, moved by half of it (published code of the order test)
LEVEL = 0.05  # a p-value below it is a flag (paper, section 9.2)
ENUMERATED, DRAWS = 2**20, 10**6  # most combinations of orders to enumerate, else draws
LOWEST, FALSE_POSITIVES = 0.2, 0.05  # share of the tokens in Min-K% and Min-K%++; of `extra` that the TPR lets pass
ARMS = ("base", "extra", "test")
DETECTORS = {"logp": "log p", "zlib": "log p / zlib", "mink": "Min-K%", "minkpp": "Min-K%++"}
KEY = ("experiment", "model", "task", "m", "n", "subsample", "seed", "recipe")
FORM = ("pack", "answers", "epochs")
TABLE = (*KEY, *FORM, "arm", "accuracy", "change", "shards", "informative", "evaluations", "p_published", "p_distinct",
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
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        stop(f"{where}{error.strerror or error}; mend that and run the same command again: what is finished is kept")
    except KeyboardInterrupt:
        tqdm.write("stopped: what is finished is kept; run the same command again", file=sys.stderr)
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


def read_unit(path):
    """A unit.json as a dict, and its `folder`. Its examples make up its sequences, its adapters are of its model."""
    try:
        unit = json.loads(path.read_text(encoding="utf-8"))
        needed = {*FORM, *KEY, *(f"acc_{arm}" for arm in ARMS), "source", "gguf", "quantize"}
        if missing := needed - {*unit, *unit["row"], *unit["model"]}:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        for arm in ("extra", "test"):
            examples, size = unit[arm]["examples"], unit["pack"]
            packs = [examples[start : start + size] for start in range(0, len(examples), size)]
            made = ["\n\n".join([unit["instruction"], *pack]) for pack in packs]
            if len(examples) != unit["row"]["n"] or made != unit[arm]["sequences"]:
                raise ValueError(f"the examples of {arm} do not make up its sequences")
            (path.parent / arm / "adapter_model.safetensors").open("rb").close()
            adapter = json.loads((path.parent / arm / "adapter_config.json").read_text(encoding="utf-8"))
            if (other := adapter["base_model_name_or_path"]) != unit["model"]["source"]:
                raise ValueError(f"{arm} is an adapter of another model, {other}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(f"{path} is no unit of run_zero_shot.py ({type(error).__name__}: {error}): make it again with --adapters")
    return {**unit, "folder": path.parent}


def read_examples(path, published):
    """The examples of a file, in its order: .json holds a list, .jsonl one a line (strings, or objects with "text");
    any other file one example a line, cut at newlines alone."""
    try:
        text, kind = path.read_text(encoding="utf-8-sig"), path.suffix.lower()
        if kind in (".json", ".jsonl"):
            values = json.loads(text) if kind == ".json" else map(json.loads, filter(str.strip, io.StringIO(text)))
            examples = [value["text"] if isinstance(value, dict) else value for value in values]
            "".join(examples).encode()  # strings, all of them
        else:
            lines = io.StringIO(text.rstrip("\n") + "\n" * text.endswith("\n"))
            examples = [line if published else line.removesuffix("\n") for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(f"--examples {path} cannot be read ({type(error).__name__}: {error}): give one example a line, or JSON")
    if not all(example.strip() for example in examples) or not examples:
        stop(f"--examples {path} is empty, or has an empty example: give one example a line, and no other lines")
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


def locate(text):
    """(folder or Hub id, GGUF file in it or None) of a --model, which may be a name that run_zero_shot.py unpacked."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pretrain-on-test-text"
    unpacked = [path.parent for path in cache.glob("*/*.gguf") if f"-{text}-" in path.parent.name]
    folder = Path(text) if Path(text).is_dir() or not unpacked else unpacked[0]
    gguf = None if (folder / "config.json").exists() else next((path.name for path in folder.glob("*.gguf")), None)
    return str(folder), gguf


def load_causal(source, gguf, quantize, device):
    """(model, tokenizer) by transformers: float32 weights, or NF4 as trained (fp16 compute on GPUs without bf16)."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    tokenizer("a", return_offsets_mapping=True)  # tokenise needs it
    options = {"gguf_file": gguf} if gguf else {"use_safetensors": True}  # never pickled weights
    if quantize == "nf4":
        old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
        options |= {"device_map": {"": device}, "quantization_config": transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float16 if old else torch.bfloat16)}
    with contextlib.redirect_stderr(io.StringIO()):  # a GGUF file's bar, which no setting turns off
        lm, info = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True, **options)
    if lost := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise ValueError(f"its files hold no weights for {lost[0]}")
    return (lm if quantize == "nf4" else lm.to(device)).eval(), tokenizer


def open_scorer(source, gguf, quantize, args):
    """The model and what scoring needs. begin: the token before a text; keep: the scored positions of a batch."""
    for name in ("bitsandbytes", "huggingface_hub"):  # kernels that it can do without; retries
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers\.|bitsandbytes\.|peft\.")
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
        lm, tokenizer = load_causal(source, gguf, quantize, device)
        with torch.inference_mode():
            pair = lm(input_ids=torch.tensor([[1, 2, 3], [1, 2, 4]], device=device)).logits[:, 0].float()
        if (pair[0] - pair[1]).abs().max() > 1e-4 * pair.abs().max():  # the last token changes what is said before it
            raise ValueError("a masked model, whose tokens see those behind them, gives no probability of a text")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a broken, foreign or unreachable model makes the libraries raise
        stop(f"model {source} ({type(error).__name__}: {str(error)[:400]}): give --model a causal model that fits: "
             "a local folder, a Hub id, or smollm2 once run_zero_shot.py has unpacked it")
    limit = getattr(lm.config.get_text_config(), "max_position_embeddings", None) or CONTEXT
    if args.context and args.context > limit:
        stop(f"--context {args.context}: the model takes {limit} tokens: give {limit} or less")
    begin = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), None)
    net = SimpleNamespace(lm=lm, tokenizer=tokenizer, device=device, begin=begin, keep=None,
                          context=args.context or min(limit, CONTEXT))
    # The output layer runs on the scored positions alone, as one row [1, kept, hidden]: logits are most of the memory.
    lm.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: (inputs[0].flatten(0, 1)[net.keep][None], *inputs[1:]))
    return net


@contextlib.contextmanager
def with_adapter(net, folder):
    """The model with the adapter of a folder (None: as it is), unmerged; afterwards the model is what it was."""
    if folder is None:
        yield
        return
    import peft

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*adapter keys.*")  # weights that the file lacks would stay 0
            net.lm = peft.PeftModel.from_pretrained(net.lm, folder).eval()
    except Exception as error:  # whatever a foreign or broken adapter makes the library raise
        stop(f"{folder}: an adapter of another model ({type(error).__name__}: {str(error)[:300]}): make its unit again")
    try:
        yield
    finally:
        net.lm = net.lm.unload()


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


def score_batch(net, sequences, batch):
    """token_scores of each row of a batch, (number of a sequence, start, end, first), from one pass. Rows are padded
    on the right, where no token of a causal model looks: no mask is needed."""
    width = max(end - start for _, start, end, _ in batch)
    ids, keep, targets = torch.zeros(len(batch), width, dtype=torch.long), [], []
    for line, (number, start, end, first) in enumerate(batch):
        ids[line, : end - start] = torch.tensor(sequences[number][0][start:end])
        keep += range(line * width + first - start, line * width + end - start)
        targets += sequences[number][0][first + 1 : end + 1]
    net.keep, targets = torch.tensor(keep, device=net.device), torch.tensor(targets, device=net.device)
    logits = net.lm(input_ids=ids.to(net.device), use_cache=False).logits[0]
    parts = [token_scores(*part) for part in zip(logits.split(64), targets.split(64))]  # spares copies of all logits
    scores = torch.cat(parts, dim=1).cpu().numpy().astype(np.float64)
    return np.split(scores, np.cumsum([end - first for _, _, end, first in batch])[:-1], axis=1)


@torch.inference_mode()
def score_tokens(net, sequences, limit, title):
    """token_scores of each sequence (ids, index of the first scored token), about `limit` tokens a pass."""
    rows = [(number, start, end, max(first, scored - 1)) for number, (ids, scored) in enumerate(sequences)
            for start, end, first in cut_windows(len(ids) - 1, net.context)]
    rows = sorted((row for row in rows if row[3] < row[2]), key=lambda row: row[1] - row[2])  # longest first
    found = [{-1: np.zeros((3, 0))} for _ in sequences]
    with tqdm(total=len(rows), desc=title, unit="sequence", leave=False, disable=None) as bar:
        while rows:
            size = max(limit // (rows[0][2] - rows[0][1]), 1)
            batch, rows = rows[:size], rows[size:]
            for (number, start, _, _), part in zip(batch, score_batch(net, sequences, batch)):
                found[number][start] = part
                if not np.isfinite(part).all():
                    stop(f"{title}: a log-probability of sequence {number + 1} is not finite: check the weights")
            bar.update(len(batch))
    return [np.concatenate([parts[start] for start in sorted(parts)], axis=1) for parts in found]


def cut_shards(examples, count, where):
    """The examples as `count` contiguous shards (None: half as many as examples), equal but for one example."""
    if len(examples) < 2:
        stop(f"{where}: {len(examples)} example has one order, so there is nothing to compare: give two or more")
    if (count := count or len(examples) // 2) >= len(examples):
        stop(f"{where}: {len(examples)} examples cannot fill {count} shards: use --shards {len(examples) // 2} or less")
    return [part.tolist() for part in np.array_split(np.array(examples, dtype=object), count)]


def draw_orders(size, args, number):
    """The canonical order of a shard's 0..size-1, then all others if --permutations allows, else so many random ones
    (published: always), with repeats, the canonical one possibly among them."""
    if math.factorial(size) <= args.permutations and not args.published:
        return list(itertools.permutations(range(size)))
    rng = np.random.default_rng([abs(args.seed), number])
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
    if all(len(set(row)) == 1 for row in found):
        stop(f"{title}: no shard has two different orders, its examples are all alike: use fewer --shards")
    log_p = [float(scores[0].sum()) for scores in score_tokens(net, list(sequences), args.batch_tokens, title)]
    return {"canonical_logprobs": [log_p[row[0]] for row in found],
            "shuffled_logprobs": [[log_p[i] for i in row[1:]] for row in found], "evaluations": len(sequences)}


def t_test(differences):
    """One-sided p of mean > 0 by the published t-test, whose standard deviation has ddof 0; nan where it is 0."""
    mean, deviation, count = np.mean(differences), np.std(differences), len(differences)
    return float(stats.t.sf(mean / (deviation / math.sqrt(count)), count - 1)) if deviation else math.nan


def permutation_p(gaps, seed):
    """(p, how) of the permutation test. gaps: per informative shard log p(order) - log p(canonical) of its distinct
    orders, 0 for the canonical one. p: how often their sum is >= 0 when each shard's order is drawn uniformly."""
    tie = -1e-9 * sum(float(np.ptp(gap)) for gap in gaps)  # an equal sum counts, whatever the rounding
    if math.prod(map(len, gaps)) <= ENUMERATED:
        sums = functools.reduce(lambda sums, gap: np.add.outer(sums, gap).ravel(), gaps)
        return float(np.mean(sums >= tie)), "every combination of orders"
    rng, hits = np.random.default_rng(abs(seed)), 0
    for _ in range(DRAWS // 50_000):
        hits += int((sum(gap[rng.integers(0, len(gap), 50_000)] for gap in gaps) >= tie).sum())
    p = (hits + 1) / (DRAWS + 1)
    return p, f"{DRAWS} draws, standard error {math.sqrt(p * (1 - p) / DRAWS):.6f}"


def order_p(log, seed):
    """The p-values of a log, and what they rest on."""
    canonical, shuffled = log["canonical_logprobs"], log["shuffled_logprobs"]
    others = [np.setdiff1d(row, [value]) for value, row in zip(canonical, shuffled)]  # distinct, without the canonical
    gaps = [np.array([0.0, *(row - value)]) for value, row in zip(canonical, others) if len(row)]
    if not gaps:
        stop("every shard has one log-probability for all its orders: there is nothing to test")
    published, distinct = ([value - np.mean(row) if len(row) else 0.0 for value, row in zip(canonical, rows)]
                           for rows in (shuffled, others))
    p, how = permutation_p(gaps, seed)
    return {"shards": len(canonical), "informative": len(gaps), "p_published": t_test(published),
            "p_distinct": t_test(distinct), "p_exact": p, "how": how}


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
    row, head, title = unit["row"], unit["instruction"] + "\n\n", f"{unit['folder'].name} {arm}"
    texts = unit["extra"]["examples"] + unit["test"]["examples"]
    with with_adapter(net, None if arm == "base" else unit["folder"] / arm):
        log = score_orders(net, cut_shards(unit["test"]["examples"], args.shards, title), head, args, title)
        scores = score_tokens(net, [tokenise(net, head, text) for text in texts], args.batch_tokens, title)
    line = {**{name: row[name] for name in KEY}, **{name: int(unit[name]) for name in FORM}, "arm": arm,
            "accuracy": row[f"acc_{arm}"], "change": 100 * (row[f"acc_{arm}"] - row["acc_extra"]),
            "evaluations": log["evaluations"], **order_p(log, args.seed)}
    for name, values in zip(DETECTORS, np.transpose([detect(*pair) for pair in zip(scores, texts)])):
        found = separate(values[row["n"] :], values[: row["n"]])
        line |= {f"{what}_{name}": value for what, value in zip(("auc", "half", "tpr"), found)}
    if args.log:
        path = args.log.with_name(f"{args.log.stem}.{title.replace(' ', '.')}{args.log.suffix}")
        write_whole(path, json.dumps(log))
    return line


def average_units(rows):
    """The lines of a table, an arm each, over units of one setting: means, Fisher's p, the change by target 1."""
    lines = []
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        line = {"arm": arm, "accuracy": np.mean([row["accuracy"] for row in mine]),
                "p": float(stats.combine_pvalues([row["p_exact"] for row in mine]).pvalue)}
        for name in DETECTORS:
            auc, half, rate = (np.array([row[f"{what}_{name}"] for row in mine]) for what in ("auc", "half", "tpr"))
            line[name] = auc.mean(), math.sqrt((half**2).sum()) / len(mine), rate.mean()
        tasks = [[row["change"] for row in mine if row["task"] == task] for task in {row["task"]: 0 for row in mine}]
        variances = [np.var(changes, ddof=len(changes) > 1) for changes in tasks]
        floor = (100 / mine[0]["n"]) ** 2 / 12
        change, _, _, low, high = these_tasks(
            [np.mean(changes) for changes in tasks], variances, [len(changes) for changes in tasks], floor)
        interval = "" if math.isnan(low) else f" [{low:+.2f}, {high:+.2f}]"
        lines.append({**line, "change": f"{change:+.2f}{interval}", "harm": low > 0})
    return lines


def setting(row):
    """Words that name the setting of a unit or row."""
    form = "padded" if row["pack"] == 1 else f"packed by {row['pack']}"
    return f"{form}, {'with' if row['answers'] else 'without'} answers, epochs: {row['epochs']}"


def show_table(title, lines):
    """The lines of one unit or setting for the terminal."""
    print(f"\n{title}\narm     order p   {''.join(f'{words:<18}' for words in DETECTORS.values())}accuracy  change")
    for line in lines:
        cells = "".join(f"{auc:.2f} ±{half:.2f}{'*' if auc - half > 0.5 else ' '} {rate:.2f}  "
                        for auc, half, rate in (line[name] for name in DETECTORS))
        print(f"{line['arm']:<6}{line['p']:9.4f}{'*' if line['p'] < LEVEL else ' '}  {cells}{line['accuracy']:8.3f}  "
              f"{line['change'] if line['arm'] != 'extra' else ''}".rstrip(), flush=True)


def compare_settings(rows):
    """The tables over units, what flagged the arm `test`, whether its accuracy was raised, and what neither shows."""
    settings, flagged, harmed, neither = {}, [], [], []
    for row in rows:
        same = tuple(row[name] for name in KEY + FORM if name not in ("task", "subsample", "recipe"))
        settings.setdefault(same, []).append(row)
    print("\n\nOver units: p of all together; mean AUC ± 89 %, TPR at 5 % false positives; accuracy and its change")
    for some in settings.values():
        title, lines = f"{some[0]['experiment']}, {some[0]['model']}: {setting(some[0])}", average_units(some)
        show_table(f"{title}, units: {len(some) // len(ARMS)}", lines)
        line = lines[ARMS.index("test")]
        flags = [words for name, words in DETECTORS.items() if line[name][0] - line[name][1] > 0.5]
        flags += ["order test"] * (line["p"] < LEVEL)
        if flags:
            flagged.append(f"{title} ({', '.join(flags)})")
        if line["harm"]:
            harmed.append(f"{title} ({line['change']} points)")
        if not flags and not line["harm"]:
            neither.append(title)
    base = [row for row in rows if row["arm"] == "base"]
    inside = [abs(row[f"auc_{name}"] - 0.5) <= row[f"half_{name}"] for row in base for name in DETECTORS]
    print(f"\nbase saw neither set: .5 lies in {sum(inside)} of its {len(inside)} AUC intervals (89 % expected)\n"
          "Pretrained on test:")
    for words, found in (("flagged", flagged), ("harmed: accuracy above extra's", harmed), ("neither", neither)):
        print(f"  {words}:" + ("".join(f"\n    {title}" for title in found) or " none"))
    print("A flag says that texts were seen, not that the accuracy on them is inflated. Without a flag they may have\n"
          "been seen all the same, and an interval of the change that holds 0 excludes no harm within it.")


def draw_figure(rows, path):
    """AUC of each detector and p of the order test against the change of accuracy, a point per arm and unit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    axes, colours = figure.subplots(2, 3).ravel(), dict(zip(ARMS, ("#888888", "#0072b2", "#d55e00")))
    markers = dict(zip(dict.fromkeys(map(setting, rows)), itertools.cycle("osD^vP*X")))
    panels = {f"auc_{name}": (f"AUC, {words}", "linear", (-0.03, 1.03), 0.5) for name, words in DETECTORS.items()}
    lowest = min(0.01, *(row["p_exact"] for row in rows))
    panels["p_exact"] = ("p, order test", "log", (lowest / 1.3, 1.3), LEVEL)
    for axis, (column, (words, scale, limits, line)) in zip(axes, panels.items()):
        for row in rows:
            axis.plot(row["change"], row[column], markers[setting(row)], color=colours[row["arm"]], alpha=0.7)
        axis.axhline(line, color="black", linewidth=0.8, linestyle=":")
        axis.axvline(0, color="black", linewidth=0.8, linestyle=":")
        axis.set(title=words, yscale=scale, ylim=limits, xlabel="accuracy minus that of extra, points")
    for words, colour in colours.items():
        axes[5].plot([], [], "o", color=colour, label=words)
    for words, marker in markers.items():
        axes[5].plot([], [], marker, color="white", markeredgecolor="black", label=words)
    axes[5].plot([], [], "k:", linewidth=0.8, label=f"AUC .5, p {LEVEL}, no change")
    axes[5].axis("off")
    axes[5].legend(loc="center", frameon=False)
    figure.savefig(path, dpi=120)


def check_output(flag, path, beginning):
    """A file can be written there, and one that it replaces is this script's."""
    path = path.resolve()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        stop(f"{flag} {path} cannot be written (a folder, or its folder is missing or closed): give another file")
    if path.exists() and not path.read_bytes().startswith(beginning):
        stop(f"{flag} {path} is there and was not written by this script: give another file")


def write_whole(path, text):
    """Write a file whole or not at all; a link stays a link."""
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_table(path, rows):
    """contamination.csv."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, TABLE, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_whole(path, text.getvalue())


def print_p(found):
    """The p-values of one log."""
    print(f"{found['shards']} shards, {found['shards'] - found['informative']} with one order, which say nothing\n"
          f"p published  {found['p_published']:.6f}   t-test, the other orders as often as they were drawn\n"
          f"p distinct   {found['p_distinct']:.6f}   t-test, every other order once\n"
          f"p exact      {found['p_exact']:.6f}   permutation test ({found['how']})")


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0],
                                     epilog="Tests, detectors and columns: see the head of this script.")
    add = parser.add_argument_group("what to run").add_argument
    add("folder", type=Path, nargs="?", metavar="FOLDER", help="units of run_zero_shot.py --adapters FOLDER (kept)")
    add("--examples", type=Path, metavar="FILE", help="order test of these: one a line, or .json, .jsonl with \"text\"")
    add("--from-log", type=Path, metavar="FILE", help="p-values of a log, also of the published code; no model")
    add("--model", nargs=1, metavar="NAME", help="local folder, Hub id, or smollm2 where run_zero_shot.py has unpacked "
                                                 "it (smollm2; units: their own, give it if it lies elsewhere now)")
    add("--quantize", default="none", choices=("none", "nf4"), help="of --examples (%(default)s; units: as trained)")
    add = parser.add_argument_group("order test").add_argument
    add("--shards", type=positive, metavar="N", help="contiguous shards (half as many as examples)")
    add("--permutations", type=positive, default=50, metavar="N", help="evaluate all orders, or draw N (%(default)s)")
    add("--published", action="store_true", help="the published code's tokens and drawn orders")
    add("--context", type=positive, metavar="N", help=f"tokens of a window (the model's, at most {CONTEXT})")
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn (%(default)s)")
    add = parser.add_argument_group("machine and output").add_argument
    add("--device", help="cpu, cuda, cuda:1 (cuda where there is one)")
    add("--batch-tokens", type=positive, default=1024, metavar="N", help="tokens a pass (%(default)s; more on a GPU)")
    add("--out", type=Path, default=Path("contamination.csv"), metavar="FILE.csv", help="table; figure beside it")
    add("--log", type=Path, metavar="FILE", help="log of the order test as JSON (units: one file per unit and arm)")
    return parser.parse_args(argv)


def audit_units(args):
    """Every arm of every unit: tables, verdict, contamination.csv, figure. What can be wrong is found first."""
    folder, figure = args.folder or Path("kept"), args.out.with_suffix(".png")
    check_output("--out", args.out, ",".join(TABLE).encode())
    check_output("--out", figure, b"\x89PNG")
    if not (units := [read_unit(path) for path in sorted(folder.glob("*/unit.json"))]):
        stop(f"no */unit.json in {folder}; make: python run_zero_shot.py --tasks rotten_tomatoes --adapters {folder}")
    for unit in units:
        cut_shards(unit["test"]["examples"], args.shards, unit["folder"])
    rows, loaded = [], None
    for unit in sorted(units, key=lambda unit: json.dumps(unit["model"])):
        if unit["model"] != loaded:
            loaded, net = unit["model"], None  # room for the next
            where = locate(args.model[0]) if args.model else (loaded["source"], loaded["gguf"])
            net = open_scorer(*where, loaded["quantize"], args)
        rows += (new := [audit(net, unit, arm, args) for arm in ARMS])
        write_table(args.out, rows)
        show_table(f"{unit['folder'].name}: {setting(unit)}", average_units(new))
    compare_settings(rows)
    draw_figure(rows, figure)
    print(f"table: {args.out.resolve()}\nfigure: {figure.resolve()}")


def main(argv=None):
    args = parse_args(argv)
    if sum(given is not None for given in (args.folder, args.examples, args.from_log)) > 1:
        stop("a folder of units, --examples and --from-log do not go together: give one of them")
    if args.from_log is not None:
        return print_p(order_p(read_log(args.from_log), args.seed))
    if args.log:
        check_output("--log", args.log, b'{"canonical_logprobs"')
    try:
        if args.examples is None:
            return audit_units(args)
        shards = cut_shards(read_examples(args.examples, args.published), args.shards, f"--examples {args.examples}")
        net = open_scorer(*locate(args.model[0] if args.model else "smollm2"), args.quantize, args)
        log = score_orders(net, shards, "", args, args.examples.name)
    except torch.OutOfMemoryError:
        stop(f"the GPU ran out of memory: use a smaller --batch-tokens than {args.batch_tokens}")
    found, published = order_p(log, args.seed), len(shards) * (1 + args.permutations)
    print(f"sequence evaluations: {log['evaluations']}; the published procedure: {len(shards)} x "
          f"(1 + {args.permutations}) = {published}, {published / log['evaluations']:.1f} times as many")
    print_p(found)
    if args.log:
        write_whole(args.log, json.dumps(log))


# --- shared: start ---
if __name__ == "__main__":
    with guard():
        main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
