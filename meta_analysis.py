"""How far can one subsample be trusted, and how many are enough? Section 10 of the paper, checked and turned into advice.

Reproduces Figure 7 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before few-shot text
classification" (Dubey): keep one subsample per (model, task), as most benchmarks do, analyse that slice, and do it again with
other slices. How different are the conclusions? For effect = bias (acc_test - acc_extra) or boost (acc_extra - acc_base):

    paper    Y_ijl ~ Binomial(n, p), logit p = mu + alpha z_i + U_j + beta x_l (models i, tasks j, arms l), mu and beta Normal(0, 1),
             alpha Normal(0, 5), U Normal(0, sd_U), sd_U HalfNormal(1). The result is the posterior of beta: the mean increase in the
             log odds of a correct answer. The threshold .04 (zero-shot: .08) of Figure 7 is on the posterior mean of beta.
    paired   the paired t interval over tasks of 100 (acc_treatment - acc_control), in accuracy points, per model and for the equal-weight
             mean over models. No sampling. Its threshold is about the same in points: 100 p (1 - p) times, on average over the cell.

Intervals hold 89 %. m is the number of labelled training texts, n that of test texts. A row of results.csv is one training run on
one subsample; a slice draws one row per (model, task), independently for each model.

Commands, cheapest first
    python meta_analysis.py --plan                          # how many subsamples per task are needed: seconds, no sampling
    python meta_analysis.py --slices 20                     # a preview, on results.csv
    python meta_analysis.py                                 # 500 slices
    python meta_analysis.py results.csv --experiment few-shot --m 50 --n 500 --effect boost
    python meta_analysis.py results.csv --calibrate         # the same on exact nulls: how often does each analysis see an effect?
    python meta_analysis.py results.csv --n 500 --leaderboard board.csv     # would neighbours on a board swap? columns name, score[, n]

Reads what fit_model.py reads: results files, folders of them, the published layout. Writes to meta/, with the columns
    meta.csv         experiment, m, n, effect, seed, settings (hash of data and sampling), slice, analysis, model, mean, sd, hdi_low,
                     hdi_high, excludes_0, r_hat, refits, chosen (per model the subsample of each task in alphabetical order; /s: seed s).
                     Appended slice by slice; finished slices are skipped
    shares.csv       of the last call, per analysis and model: slices; mean, sd and 89 % interval of their means; shares outside the
                     threshold and with intervals that exclude 0 (above: wholly above); mean sd of an interval
    nulls.csv        --calibrate: as meta.csv, of slices in which the two arms of each (model, task) changed places at random (*: they did);
                     sign-flip: mean is the p-value
    calibration.csv  experiment, m, n, effect, model, analysis, nulls, rejected, se, threshold, outside, variance_ratio: how often 0 is
                     excluded where it is true; variance of the difference between subsamples over the binomial one
    plan.csv         --plan: experiment, m, n, model, quantity (effect or acc_extra), tasks, R, half_width, p_wrong,
                     resampled_half_width, resampled_p_wrong, basis (checked by resampling, or extrapolation)
    components.csv   --plan: sd between tasks, between subsamples (with the training run), of both parts where seeds were repeated
    leaderboard.csv  --leaderboard: rank, name, below, gap, odds_ratio, model, R, p_swap
and figures *.png. Exit status 3 if a fit still had r_hat above 1.02 after its refit.

Measured 2026-11-21 (Python 3.11, 2 shared cores, load 1.8 at the start, versions of requirements.txt) on the published accuracies,
m = 50, n = 500, 25 tasks, 2 models: 500 slices with compilation and figure 81 s (139 s at a load of 6), largest r_hat 1.0095, no refit;
49 % of the posterior means of the bias outside ±.04 (the paper, m = 100: 47 %), 57 % of the paper's and 12 % of the paired intervals
exclude 0. 500 nulls, the paper's model also for each model alone: 196 s; 54 % of the paper's and 11 % of the paired intervals exclude 0.
--plan of all n: 4 s.
"""

import argparse
import csv
import fcntl
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from scipy import special, stats
from tqdm.auto import tqdm

CHAINS, TUNE, DRAWS = 4, 500, 1000  # the paper's sizes (appendix E)
FEWEST_TASKS = 10  # below, the spread of the tasks may be near 0 (see slice_model)
TARGET_ACCEPT, SMALL_ACCEPT = 0.8, 0.95  # of NUTS; the second below FEWEST_TASKS
MAX_R_HAT = 1.02
REFIT_TUNE, REFIT_DRAWS, REFIT_ACCEPT = 4, 2, 0.95  # of the one refit: times the tuning, times the draws, target
THRESHOLD, ZERO_SHOT_THRESHOLD = 0.04, 0.08  # of |posterior mean of beta| (section 10)
ENUMERATE = 500  # up to so many possible slices each is taken once, in random order, instead of drawing with repetition
WRONG = 0.05  # probability below which --plan calls the mean known
RESAMPLES, MOST_R = 4000, 1000  # of --plan: draws of two disjoint groups of subsamples; longest table
FOLDS = (1, 5, 20)  # of --leaderboard
COLOURS_OF = {"paper": "tab:red", "paired": "tab:blue", "sign-flip": "tab:green"}
META_COLUMNS = ("experiment", "m", "n", "effect", "seed", "settings", "slice", "analysis", "model",
                "mean", "sd", "hdi_low", "hdi_high", "excludes_0", "r_hat", "refits", "chosen")
ALL = "all models"

# --- shared: columns ---
ARMS = ("base", "extra", "test")
KEY = ("experiment", "model", "task", "m", "n", "subsample", "seed")
REQUIRED = ("experiment", "model", "task", "m", "n", "subsample", "num_classes", "majority", "acc_base", "acc_extra", "acc_test")
COLUMNS = REQUIRED + ("loss_extra", "loss_test", "seed", "seconds", "split", "data", "recipe", "versions")
# --- end shared ---
# --- shared: effects ---
EFFECTS = {"boost": ("base", "extra"), "bias": ("extra", "test")}  # control, treatment
# --- end shared ---


# --- shared: stop ---
def stop(message):
    """A user's mistake: one line on stderr that says what was found, where and what to do; exit status 2."""
    tqdm.write(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
# --- end shared ---


# --- shared: short_hash ---
def short_hash(*parts):
    """Twelve hexadecimal digits that stand for the parts (anything JSON can write), the same on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
# --- end shared ---


# ------------------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------------------

# --- shared: read_results ---
def key_of(row):
    """The seven values that name a subsample's row."""
    return tuple(int(row.get(name) or 0) if name in ("m", "n", "subsample", "seed") else row[name] for name in KEY)


def read_results(path):
    """(header, rows as dicts of str, bytes) of a results file; a torn last line is left out of both.

    A process killed while writing leaves at most one line without its newline: `bytes` is where it begins."""
    raw = path.read_bytes() if path.exists() else b""
    whole = raw[: raw.rfind(b"\n") + 1]
    try:
        lines = list(csv.reader(io.StringIO(whole.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        stop(f"{path} is no CSV file in UTF-8 ({error})")
    if not lines:
        return list(COLUMNS), [], 0
    header, rows = lines[0], []
    if missing := [column for column in REQUIRED if column not in header]:
        stop(f"{path} has no column {missing[0]!r}; columns found: {', '.join(header)}: this is no results file")
    for number, line in enumerate(lines[1:], start=2):
        row = dict(zip(header, line))
        if len(line) != len(header):
            stop(f"{path}, line {number}: {len(line)} fields where the header has {len(header)}: correct or delete the line")
        try:
            key_of(row)
            counts = [float(row[f"acc_{arm}"]) * int(row["n"]) for arm in ("base", "extra", "test")]
        except ValueError as error:
            stop(f"{path}, line {number}: {error}: correct or delete the line")
        if not all(0 <= count <= int(row["n"]) and abs(count - round(count)) < 1e-6 for count in counts):
            stop(f"{path}, line {number}: an accuracy is not a whole number of correct answers out of n = {row['n']}: correct or delete the line")
        rows.append(row)
    return header, rows, len(whole)
# --- end shared ---


# --- shared: write_csv ---
def to_csv(header, rows):
    """Rows (dicts) as CSV text under the header; columns that a row lacks are blank."""
    text = io.StringIO(newline="")
    csv.DictWriter(text, header, restval="", extrasaction="ignore", lineterminator="\n").writerows(rows)
    return text.getvalue()


def replace_file(path, text):
    """Write a file whole or not at all."""
    path = path.resolve()  # a link stays a link
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with open(draft, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
# --- end shared ---


# --- shared: write_table ---
def write_table(path, rows, columns=None):
    """Rows (dicts) as a CSV file, whole or not at all."""
    header = list(columns or dict.fromkeys(name for row in rows for name in row))
    replace_file(path, ",".join(header) + "\n" + to_csv(header, rows))
# --- end shared ---


# --- shared: read_files ---
def read_published(folder):
    """Rows, as read_results gives them, of folder/m50/n500/bert/ag_news/accuracies.csv and its like: row k is subsample k."""
    rows = []
    for path in sorted(folder.glob("m*/n*/*/*/accuracies.csv")):
        m, n, model, task = path.parts[-5:-1]
        if not (m[1:].isdecimal() and n[1:].isdecimal()):
            stop(f"{path}: its folders are not named m<number>/n<number>/<model>/<task>: rename them")
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file)
            if missing := [name for name in (*ARMS, "majority", "num_classes") if name not in (lines.fieldnames or [])]:
                stop(f"{path} has no column {missing[0]!r}; columns found: {', '.join(lines.fieldnames or ['none'])}")
            for k, line in enumerate(lines, start=1):
                row = {"experiment": folder.name, "model": model, "task": task, "m": m[1:], "n": n[1:], "subsample": str(k)}
                row |= {f"acc_{arm}": line[arm] for arm in ARMS} | {name: line[name] for name in ("majority", "num_classes")}
                rows.append(row | {"where": f"{path}, line {k + 1}"})
    return rows


def read_path(path):
    """Rows (dicts of str, with `where`) of a results file, a folder of them, or a folder in the published layout."""
    if not path.exists():
        stop(f"{path} does not exist: give results files of run_experiment.py, or folders of them")
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    rows = read_published(Path(os.path.abspath(path))) if path.is_dir() else []
    if not files and not rows:
        stop(f"{path} holds no *.csv and no m<m>/n<n>/<model>/<task>/accuracies.csv: give results files, or folders of them")
    for file in files:
        try:
            _, found, size = read_results(file)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            stop(f"{file} cannot be read as a CSV file in UTF-8 ({error}): give a results file")
        if file.stat().st_size > size:
            print(f"{file}: the last line is torn (its run was killed); it is left out")
        rows += [row | {"where": f"{file}, line {number}"} for number, row in enumerate(found, start=2)]
    return rows


def typed(row):
    """A row with numbers for its text: accuracies become counts of correct answers; what is blank or absent is None."""
    try:
        new = {name: int(row[name]) for name in ("m", "n", "subsample", "num_classes")} | {"seed": int(row.get("seed") or 0)}
        new["majority"] = float(row["majority"])
        counts = [float(row[f"acc_{arm}"]) * new["n"] for arm in ARMS]
        losses = {name: float(row[name]) if row.get(name) else None for name in ("loss_extra", "loss_test")}
    except (TypeError, ValueError) as error:
        stop(f"{row['where']}: {error}: correct or delete the line")
    if min(new["m"], new["n"], new["subsample"], new["num_classes"]) < 1 or not 0 < new["majority"] <= 1:
        stop(f"{row['where']}: m, n, subsample and num_classes are whole numbers from 1, majority is above 0 and at most 1: "
             "correct or delete the line")
    if not all(0 <= count <= new["n"] and abs(count - round(count)) < 1e-6 for count in counts):
        stop(f"{row['where']}: an accuracy is not a whole number of correct answers out of n = {new['n']}: correct or delete the line")
    texts = {name: row.get(name) or None for name in ("split", "data", "recipe", "where")}
    return {name: row[name] for name in ("experiment", "model", "task")} | new | losses | texts | {"counts": tuple(map(round, counts))}


def read_rows(paths):
    """All rows of the paths, typed: identical duplicates dropped with a note, conflicting ones and mixtures refused."""
    rows, repeated = {}, 0
    settings = {}
    for row in map(typed, itertools.chain.from_iterable(map(read_path, paths))):
        key = tuple(row[name] for name in KEY)
        other = rows.setdefault(key, row)
        for name in ("counts", "num_classes", "majority", "split", "data", "recipe"):
            if None not in (other[name], row[name]) and other[name] != row[name]:
                stop(f"{row['where']} and {other['where']} are the same subsample ({', '.join(map(str, key))}) with different "
                     f"{name} ({row[name]} and {other[name]}): keep one of them")
        repeated += other is not row
        for name, scope in (("recipe", ("experiment", "model", "task", "m", "n")), ("data", ("experiment", "task"))):
            first = settings.setdefault((name, *(row[part] for part in scope)), row) if row[name] else row
            if first[name] != row[name]:
                stop(f"{row['where']} has {name} {row[name]}, {first['where']} has {first[name]}, both in experiment "
                     f"{row['experiment']}, task {row['task']}: give them different values of `experiment`, or leave one out")
    if not rows:
        stop(f"no rows in {', '.join(map(str, paths))}: run run_experiment.py first")
    if repeated:
        print(f"{repeated} rows were given twice, with equal values: each is used once")
    return list(rows.values())


def choose_rows(rows, args):
    """The rows that --experiment, --m, --n, --models and --tasks name; an unknown value ends the run."""
    for flag, name in (("experiment", "experiment"), ("m", "m"), ("n", "n"), ("models", "model"), ("tasks", "task")):
        wanted, found = getattr(args, flag), sorted({row[name] for row in rows})
        if wanted:
            if unknown := [value for value in wanted if value not in found]:
                stop(f"--{flag} {unknown[0]}: not in the data chosen so far; found: {', '.join(map(str, found))}")
            rows = [row for row in rows if row[name] in wanted]
    return rows
# --- end shared ---


def pool_runs(rows):
    """One cell per (experiment, m, n): its models i, tasks j, and runs[i][j] = rows (subsample, seed, counts of the three arms)."""
    cells = []
    for name in sorted({(row["experiment"], row["m"], row["n"]) for row in rows}):
        mine = [row for row in rows if (row["experiment"], row["m"], row["n"]) == name]
        models, tasks = (sorted({row[column] for row in mine}) for column in ("model", "task"))
        runs = [[[] for _ in tasks] for _ in models]
        for row in sorted(mine, key=lambda row: (row["subsample"], row["seed"])):
            runs[models.index(row["model"])][tasks.index(row["task"])].append((row["subsample"], row["seed"], *row["counts"]))
        runs = [[np.array(task_runs, int).reshape(-1, 5) for task_runs in model_runs] for model_runs in runs]
        experiment, m, n = name
        cells.append(SimpleNamespace(
            experiment=experiment, m=m, n=n, models=models, tasks=tasks, runs=runs,
            title=f"{experiment}, m = {m} training texts, n = {n} test texts", file=f"{experiment}.m{m}.n{n}".replace("/", "--")))
    return cells


def only_cell(cells):
    """The one cell that was asked for; several end the run with the flags that tell them apart."""
    if len(cells) > 1:
        found = "; ".join(f"--experiment {cell.experiment} --m {cell.m} --n {cell.n}" for cell in cells)
        stop(f"the data hold {len(cells)} cells, one is analysed at a time: choose by {found}")
    return cells[0]


def arms_of(effect):
    """Columns of runs that hold the control's and the treatment's counts."""
    return [2 + ARMS.index(arm) for arm in EFFECTS[effect]]


# ------------------------------------------------------------------------------------------------------------
# Slices
# ------------------------------------------------------------------------------------------------------------


def possible_slices(cell):
    """The number of different slices."""
    return math.prod(max(len(runs), 1) for model_runs in cell.runs for runs in model_runs)


def draw_slice(cell, seed, number, effect, null=False):
    """One row per (model, task): counts [models, (control, treatment), tasks], total [models, tasks], chosen [models].

    The draw depends on the seed, the cell, the model and the slice's number alone: not on the other models or slices. null: the
    arms of each (model, task) change places with probability 1/2, so that any effect is gone and all noise stays."""
    counts = np.zeros((len(cell.models), 2, len(cell.tasks)), int)
    total, chosen = np.zeros((len(cell.models), len(cell.tasks)), int), []
    few = possible_slices(cell) <= ENUMERATE and not null
    if few:
        order = np.random.default_rng(int(short_hash(seed, cell.file, "order"), 16)).permutation(possible_slices(cell))
        sizes = [max(len(runs), 1) for model_runs in cell.runs for runs in model_runs]
        picks = np.reshape(np.unravel_index(order[number], sizes), total.shape)
    for i, model in enumerate(cell.models):
        rng, words_of = np.random.default_rng(int(short_hash(seed, cell.file, model, number), 16)), []
        for j, runs in enumerate(cell.runs[i]):
            if not len(runs):
                words_of.append("-")
                continue
            subsample, run_seed, *correct = runs[picks[i, j] if few else rng.integers(len(runs))].tolist()
            pair = [correct[arm - 2] for arm in arms_of(effect)]
            swap = null and rng.random() < 0.5
            counts[i, :, j], total[i, j] = pair[::-1] if swap else pair, cell.n
            words_of.append(f"{subsample}{f'/{run_seed}' * (run_seed > 0)}{'*' * swap}")
        chosen.append(" ".join(words_of))
    return SimpleNamespace(counts=counts, total=total, chosen=chosen)


# ------------------------------------------------------------------------------------------------------------
# The paper's model of a slice
# ------------------------------------------------------------------------------------------------------------

# --- shared: import_pymc ---
def import_pymc():
    """PyMC, set to need no C compiler: the models are compiled by numba, and the little else runs as Python."""
    os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arviz announces its next version
        import pymc

    return pymc
# --- end shared ---


# --- shared: convergence ---
def normal_scores(x):
    """Ranks over chains and draws as standard normal quantiles, [chain, draw, k] (Vehtari et al., 2021)."""
    ranks = stats.rankdata(x.reshape(-1, x.shape[-1]), axis=0).reshape(x.shape)
    return special.ndtri((ranks - 0.375) / (x.shape[0] * x.shape[1] + 0.25))


def plain_r_hat(x):
    """Gelman and Rubin's statistic of [chain, draw, k]: sqrt of pooled over mean within-chain variance."""
    draws = x.shape[1]
    between, within = draws * x.mean(1).var(0, ddof=1), x.var(1, ddof=1).mean(0)
    return np.sqrt((between / within + draws - 1) / draws)


def bulk_ess(scores):
    """Effective sample size of normal scores [chain, draw, k] by Geyer's initial monotone sequence."""
    chains, draws, _ = scores.shape
    centred = scores - scores.mean(1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * draws, axis=1)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, :draws].mean(0) / draws
    within = covariance[0] * draws / (draws - 1)
    pooled = covariance[0] + (scores.mean(1).var(0, ddof=1) if chains > 1 else 0)
    rho = 1 - (within - covariance) / pooled
    rho[0] = 1
    pairs = rho[: draws // 2 * 2].reshape(draws // 2, 2, -1).sum(1)
    going = np.logical_and.accumulate(pairs[: (draws - 3) // 2] > 0, axis=0)  # up to the first pair that is not positive
    tail = np.maximum(np.take_along_axis(rho, 2 * going.sum(0)[None], 0)[0], 0)  # a positive even term after them still counts
    total = -1 + 2 * (np.minimum.accumulate(pairs[: len(going)], axis=0) * going).sum(0) + tail
    return chains * draws / np.maximum(total, 1 / math.log10(chains * draws))


def convergence(x):
    """(r_hat, ess_bulk) of draws [chain, draw, ...]: the larger of the bulk's and the tails' rank-normalised split r_hat."""
    joined = x.reshape(*x.shape[:2], -1)
    half = joined.shape[1] // 2
    r_hat, ess = [], []
    for part in np.array_split(joined, math.ceil(joined.shape[2] / 500), axis=2):  # few at a time: less memory
        split = np.concatenate([part[:, :half], part[:, -half:]])
        scores = normal_scores(split)
        folded = normal_scores(np.abs(split - np.median(split, axis=(0, 1))))
        r_hat.append(np.maximum(plain_r_hat(scores), plain_r_hat(folded)))
        ess.append(bulk_ess(scores))
    return tuple(np.concatenate(values).reshape(x.shape[2:]) for values in (r_hat, ess))
# --- end shared ---


# --- shared: intervals ---
HDI_SHARE = 0.89  # the paper's (arviz' older default)


def hdi(draws):
    """(low, high): the shortest interval that holds k = ceil(.89 S) of the S draws."""
    ordered = np.sort(np.ravel(draws))
    k = math.ceil(HDI_SHARE * len(ordered))
    widths = ordered[k - 1 :] - ordered[: len(ordered) - k + 1]
    start = int(np.argmin(widths))
    return ordered[start], ordered[start + k - 1]


def t_interval(values):
    """(mean, standard error, low, high): the 89 % paired-t interval of the mean of the values (nan for a single one)."""
    values = values[~np.isnan(values)]
    if len(values) < 2:
        return float(np.mean(values)), math.nan, math.nan, math.nan
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    half = stats.t.ppf((1 + HDI_SHARE) / 2, len(values) - 1) * error
    return float(np.mean(values)), float(error), np.mean(values) - half, np.mean(values) + half
# --- end shared ---


# --- shared: sign_flip ---
def sign_flip_p(changes):
    """One-sided exact p of sum(changes) under independent random signs: the share of all sign patterns that reach it.

    The distribution of the sum is the convolution of the two-point distributions at +-|change|; changes are whole numbers."""
    sizes = np.abs(changes[changes != 0])
    share = np.ones(1)  # of the sign patterns, by sum of the sizes with a plus
    for size in sizes:
        share = (np.pad(share, (0, size)) + np.pad(share, (size, 0))) / 2
    reached = (sizes.sum() + changes.sum()) // 2  # that sum in the data; ties count
    return float(share[reached:].sum())
# --- end shared ---


def slice_data(counts, total):
    """What the model needs of a slice: sums of its counts."""
    both = counts.sum(1).astype(float)
    change = np.array((counts[:, 1] - counts[:, 0]).sum() / 2)
    return {"task_sum": both.sum(0), "model_sum": both.sum(1), "change": change, "total": total.astype(float)}


def slice_model(data):
    """The paper's model without V and W, in variables that mix: with mid = mean(alpha) and a_j = mu + beta / 2 + mid + U_j,
    logit p = a_j + (alpha_i - mid) + (l - 1/2) beta. Exact, and a_j centred: a slice knows each task's level well.

    With few tasks their spread may be near 0, where that sticks. Then mu is summed out of the mean of a_j, and orthonormal contrasts
    between tasks (Normal(0, sd_U) each) are centred half way. With one task U cannot be told from mu and is dropped.
    For both arms, log((1 + e^(x + b/2)) (1 + e^(x - b/2))) = log1p(e^x (e^(b/2) + e^(-b/2)) + e^2x); counts enter as sums."""
    pm = import_pymc()
    import pytensor.tensor as pt

    models, tasks = data["total"].shape
    with pm.Model() as model:
        task_sum, model_sum, change, total = (pm.Data(name, value) for name, value in data.items())
        mu = pm.Normal("mu", 0, 1) if tasks >= FEWEST_TASKS else 0
        beta = pm.Normal("beta", 0, 1)
        alpha = pt.concatenate([pt.zeros(1), pm.Normal("alpha", 0, 5, shape=models - 1)]) if models > 1 else pt.zeros(1)
        level, shift = mu + beta / 2 + alpha.mean(), alpha - alpha.mean()
        sd_u = pm.HalfNormal("sd_U", 1) if tasks > 1 else 0
        if tasks >= FEWEST_TASKS:
            a = pm.Normal("a", level, sd_u, shape=tasks)
        else:
            a = pm.Normal("a_mean", level, pt.sqrt(1 + sd_u**2 / tasks)) * pt.ones(tasks)
            if tasks > 1:
                contrasts = np.linalg.qr(np.c_[np.ones(tasks), np.eye(tasks)[:, 1:]])[0][:, 1:]
                a += pt.dot(contrasts, pt.sqrt(sd_u) * pm.Normal("contrast", 0, pt.sqrt(sd_u), shape=tasks - 1))
        odds, ratio = pt.exp(a)[None] * pt.exp(shift)[:, None], pt.exp(beta / 2)
        both = pt.log1p(odds * (ratio + 1 / ratio) + odds**2)
        pm.Potential("likelihood", (task_sum * a).sum() + (model_sum * shift).sum() + change * beta - (total * both).sum())
    return model


@functools.cache
def compiled_slice_model(models, tasks):
    """(compiled model, names of its variables) for so many models and tasks: compiled once, the data are swapped."""
    import_pymc()
    import nutpie

    model = slice_model(slice_data(np.ones((models, 2, tasks), int), np.full((models, tasks), 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large expressions that are compiled in two parts
        return nutpie.compile_pymc_model(model), [variable.name for variable in model.free_RVs]


def fit_slice(counts, total, seed, draws=DRAWS):
    """(draws of beta [chain, draw], largest r_hat of all variables, number of refits) of one slice, by nutpie's NUTS.

    The chains run one after the other: slices run side by side, in threads (the sampler lets go of Python's lock)."""
    import nutpie

    compiled, names = compiled_slice_model(*total.shape)
    compiled = compiled.with_data(**slice_data(counts, total))
    first = {"tune": TUNE, "draws": draws, "target_accept": TARGET_ACCEPT if total.shape[1] >= FEWEST_TASKS else SMALL_ACCEPT}
    again = {"tune": TUNE * REFIT_TUNE, "draws": draws * REFIT_DRAWS, "target_accept": REFIT_ACCEPT}
    for refits, settings in enumerate((first, again)):
        trace = nutpie.sample(compiled, chains=CHAINS, cores=1, seed=seed, save_warmup=False, progress_bar=False, **settings)
        r_hat = max(convergence(trace.posterior[name].values)[0].max() for name in names)
        if r_hat <= MAX_R_HAT:
            break
    return trace.posterior["beta"].values, float(r_hat), refits


# ------------------------------------------------------------------------------------------------------------
# The analyses of a slice
# ------------------------------------------------------------------------------------------------------------


def groups_of(cell):
    """{label: models' indices}: all models together where there are several, and each model."""
    groups = {ALL: list(range(len(cell.models)))} if len(cell.models) > 1 else {}
    return groups | {model: [i] for i, model in enumerate(cell.models)}


def wanted_rows(cell, analyses, null):
    """(analysis, model) of a slice's rows. The paper's model takes all models at once; on nulls also each alone."""
    groups = list(groups_of(cell))
    return [(analysis, model) for analysis in analyses for model in (groups if analysis != "paper" or null else groups[:1])]


def slice_differences(drawn):
    """Differences of a slice in accuracy points, [models, tasks]; nan where a model lacks the task."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * (drawn.counts[:, 1] - drawn.counts[:, 0]) / drawn.total


def analyse_slice(cell, number, wanted, args, null):
    """Rows of meta.csv (or nulls.csv) of one slice, without the columns that all slices share."""
    drawn, rows = draw_slice(cell, args.seed, number, args.effect, null), []
    groups = groups_of(cell)
    for analysis, label in wanted:
        chosen, r_hat, refits = groups[label], "", ""
        if analysis == "paper":
            seed = int(short_hash(args.seed, cell.file, args.effect, label, number, null), 16) % 2**31
            draws, r_hat, refits = fit_slice(drawn.counts[chosen], drawn.total[chosen], seed)
            mean, sd, (low, high) = draws.mean(), draws.std(ddof=1), hdi(draws)
        elif analysis == "paired":  # a task that one of the models lacks is left out of the mean over models
            mean, sd, low, high = t_interval(slice_differences(drawn)[chosen].mean(0))
        else:
            changes = np.diff(drawn.counts[chosen], axis=1).ravel()
            mean, sd, low, high = min(1, 2 * min(sign_flip_p(changes), sign_flip_p(-changes))), "", "", ""
        excludes = mean < 1 - HDI_SHARE if analysis == "sign-flip" else low > 0 or high < 0
        rows.append({"slice": number + 1, "analysis": analysis, "model": label, "mean": mean, "sd": sd, "hdi_low": low, "hdi_high": high,
                     "excludes_0": int(excludes), "r_hat": r_hat, "refits": refits, "chosen": "; ".join(drawn.chosen[i] for i in chosen)})
    return rows


# ------------------------------------------------------------------------------------------------------------
# meta.csv and nulls.csv: appended, resumed
# ------------------------------------------------------------------------------------------------------------


def lock_folder(folder):
    """Make the output folder and hold it: a second process that would write there ends with a word. Returns the open lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".meta.lock", "w")
    except OSError as error:
        stop(f"--out {folder} cannot be written ({error.strerror}): give another folder")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stop(f"another meta_analysis.py is writing to {folder}: wait for it, or give another --out")
    return lock


def settings_of(cell, args, null):
    """The columns that all rows of one run share: what it analyses, and a hash of the data and all that shapes the numbers."""
    data = [[runs.tolist() for runs in model_runs] for model_runs in cell.runs]
    sampling = (CHAINS, TUNE, DRAWS, TARGET_ACCEPT, SMALL_ACCEPT, FEWEST_TASKS, ENUMERATE, null)
    return {"experiment": cell.experiment, "m": cell.m, "n": cell.n, "effect": args.effect, "seed": args.seed,
            "settings": short_hash(cell.models, cell.tasks, data, sampling)}


def read_slices(path, shared):
    """Finished rows of these settings, as dicts of str; a torn last line is cut off, the same cell under other settings refused."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    lines = list(csv.reader(io.StringIO(whole.decode("utf-8", errors="replace"), newline="")))
    header = ",".join(META_COLUMNS) + "\n"
    if raw and not (header.startswith(raw.decode(errors="replace")) or lines and tuple(lines[0]) == META_COLUMNS):
        stop(f"{path} has other columns than this script writes: move it away, or give another --out")
    if len(whole) < len(raw):
        print(f"{path}: the last line is torn (its run was killed); it is cut off")
        os.truncate(path, len(whole))
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(META_COLUMNS) or not line[META_COLUMNS.index("slice")].isdecimal():
            stop(f"{path}, line {number} is not as this script writes it: delete the line, and its slice is analysed again")
    rows = [dict(zip(META_COLUMNS, line)) for line in lines[1:]]
    mine = [row for row in rows if all(row[name] == str(shared[name]) for name in ("experiment", "m", "n", "effect", "seed"))]
    if other := [row for row in mine if row["settings"] != shared["settings"]]:
        stop(f"{path} holds slices of this cell, effect and seed with settings {other[0]['settings']}, now they are {shared['settings']} "
             "(other rows, models, tasks or sampling): delete the file, or give another --out")
    if len(rows) > len(mine):
        print(f"{path} also holds {len(rows) - len(mine)} rows of other cells, effects or seeds: they are kept")
    return mine


def run_slices(cell, args, path, analyses, null=False):
    """Analyse all slices that are not finished; append each to the file when done, in order. Returns all rows of these settings."""
    shared, count = settings_of(cell, args, null), args.slices
    if not null and possible_slices(cell) <= ENUMERATE:
        count = min(count, possible_slices(cell))
        print(f"{cell.title}: only {possible_slices(cell)} different slices exist; {count} are analysed, each once")
    wanted, finished = wanted_rows(cell, analyses, null), read_slices(path, shared)
    there = {(int(row["slice"]) - 1, row["analysis"], row["model"]) for row in finished}
    todo = {number: rest for number in range(count) if (rest := [pair for pair in wanted if (number, *pair) not in there])}
    if len(todo) < count:
        print(f"{path}: {count - len(todo)} of {count} slices are finished already and skipped")
    if todo and "paper" in analyses:
        for size in {len(groups_of(cell)[label]) for analysis, label in wanted if analysis == "paper"}:
            compiled_slice_model(size, len(cell.tasks))
    rows, pool = [], ThreadPoolExecutor(args.workers)
    try:
        with open(path, "a", encoding="utf-8", newline="") as file:
            if not file.tell():
                file.write(",".join(META_COLUMNS) + "\n")
            found = pool.map(lambda number: analyse_slice(cell, number, todo[number], args, null), todo)
            for new in tqdm(found, desc=f"{'nulls' if null else 'slices'} {cell.file}", total=len(todo), leave=False, disable=not todo):
                rows += [shared | row for row in new]
                file.write(to_csv(META_COLUMNS, rows[-len(new):]))
                file.flush()
                os.fsync(file.fileno())
    finally:
        pool.shutdown(cancel_futures=True)
    rows = [{name: str(row[name]) for name in META_COLUMNS} for row in rows]
    return [row for row in finished + rows if int(row["slice"]) <= count and (row["analysis"], row["model"]) in wanted]


def warn_of_r_hat(rows, path):
    """Report the refits; True if a fit still has not converged after its own."""
    fits = [row for row in rows if row["analysis"] == "paper"]
    if not fits:
        return False
    worst, refits = max(float(row["r_hat"]) for row in fits), sum(int(row["refits"]) for row in fits)
    failed = [row for row in fits if not float(row["r_hat"]) <= MAX_R_HAT]
    print(f"{len(fits)} fits of the paper's model: largest r_hat {worst:.4f}, refits {refits}")
    if failed:
        tqdm.write(f"warning: {len(failed)} of {len(fits)} fits have r_hat above {MAX_R_HAT} after a refit (see {path})", file=sys.stderr)
    return bool(failed)


# ------------------------------------------------------------------------------------------------------------
# How different are the conclusions?
# ------------------------------------------------------------------------------------------------------------


def pooled_share(cell, effect):
    """Accuracy of each (model, task), [models, tasks], over both arms and all runs; nan where there is none."""
    def share(runs):
        return runs[:, arms_of(effect)].mean() / cell.n if len(runs) else math.nan

    return np.array([[share(runs) for runs in model_runs] for model_runs in cell.runs])


def in_points(cell, effect, log_odds):
    """Accuracy points that a small change of the log odds makes on average in this cell: 100 p (1 - p) each."""
    share = pooled_share(cell, effect)
    return 100 * log_odds * float(np.nanmean(share * (1 - share)))


def threshold_of(cell, args, analysis):
    """|Mean effect| beyond which section 10 speaks of a bias: log odds of the paper's model, or about as much in points."""
    threshold = args.threshold or (ZERO_SHOT_THRESHOLD if cell.experiment.startswith("zero-shot") else THRESHOLD)
    return threshold if analysis == "paper" else in_points(cell, args.effect, threshold)


def shares_table(cell, rows, args):
    """Rows of shares.csv: per analysis and model, what the slices' conclusions are."""
    table, effect = [], args.effect
    for analysis, model in dict.fromkeys((row["analysis"], row["model"]) for row in rows):
        mine = [row for row in rows if (row["analysis"], row["model"]) == (analysis, model)]
        means, excludes = (np.array([float(row[name]) for row in mine]) for name in ("mean", "excludes_0"))
        limit = threshold_of(cell, args, analysis)
        lows = np.array([float(row["hdi_low"]) for row in mine])
        known = not np.isnan(lows).any()  # a t interval needs two tasks
        outside, (low, high) = np.abs(means) > limit, hdi(means)
        table.append({
            "experiment": cell.experiment, "m": cell.m, "n": cell.n, "effect": effect, "analysis": analysis, "model": model,
            "unit": "log odds" if analysis == "paper" else "points", "slices": len(mine), "mean": means.mean(),
            "sd": means.std(ddof=1) if len(mine) > 1 else math.nan, "hdi_low": low, "hdi_high": high, "threshold": limit,
            "outside": outside.mean(), "excludes_0": excludes.mean() if known else math.nan,
            "above": (lows > 0).mean() if known else math.nan,
            "outside_excludes_0": excludes[outside].mean() if outside.any() and known else math.nan,
            "interval_sd": np.mean([float(row["sd"]) for row in mine])})
    return table


def print_shares(cell, table):
    """The table of shares in words and numbers."""
    print(f"\n{cell.title}: one subsample per model and task, {table[0]['effect']}")
    print(f"{'analysis':<9} {'model':<14} {'slices':>6} {'mean':>8} {'sd':>7} {'89 % of the means':>20} {'threshold':>12} {'outside':>8} "
          f"{'excludes 0':>11} {'above':>6} {'below':>6}")
    for row in table:
        unit, digits = ("", 3) if row["unit"] == "log odds" else (" points", 2)
        limit = f"±{row['threshold']:.{digits}f}{unit}"
        interval = f"[{row['hdi_low']:+.{digits}f}, {row['hdi_high']:+.{digits}f}]"
        share = "   one task: no interval" if math.isnan(row["excludes_0"]) else \
            f"{100 * row['excludes_0']:>9.1f} % {100 * row['above']:>5.1f} {100 * (row['excludes_0'] - row['above']):>6.1f}"
        print(f"{row['analysis']:<9} {row['model']:<14} {row['slices']:>6} {row['mean']:>+8.{digits}f} {row['sd']:>7.{digits}f} "
              f"{interval:>20} {limit:>12} {100 * row['outside']:>6.1f} % {share}")
    for row in table:
        if row["analysis"] == "paper":
            low, high, limit = (math.exp(row[name]) for name in ("hdi_low", "hdi_high", "threshold"))
            print(f"paper: posterior means of beta, in log odds; as odds ratios 89 % of them lie in [{low:.3f}, {high:.3f}], the threshold "
                  f"is {limit:.3f};\nof the slices outside it {100 * row['outside_excludes_0']:.0f} % have an interval that excludes 0")


# --- shared: plots ---
def import_plots():
    """matplotlib's pyplot, for files only."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt


def finish(figure, title, path):
    """Title, write and close a figure; returns its path."""
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    import_plots().close(figure)
    return path


def words(effect):
    """An effect and its definition, for titles and legends."""
    control, treatment = EFFECTS[effect]
    return f"{effect}: acc_{treatment} − acc_{control}"
# --- end shared ---


def draw_ecdf(cell, rows, table, folder):
    """Figure 7: the cumulative distribution over slices of the posterior means, with its 89 % HDI and the threshold."""
    plt = import_plots()
    analyses = list(dict.fromkeys(row["analysis"] for row in table))
    figure, axes = plt.subplots(1, len(analyses), figsize=(1 + 4.9 * len(analyses), 5.2), sharey=True, squeeze=False, layout="constrained")
    for axis, analysis in zip(axes[0], analyses):
        mine = [row for row in table if row["analysis"] == analysis]
        for row, colour in zip(mine, itertools.cycle(("black", "tab:orange", "tab:blue", "tab:green"))):
            means = np.sort([float(other["mean"]) for other in rows if (other["analysis"], other["model"]) == (analysis, row["model"])])
            axis.step(np.r_[means[0], means], np.arange(len(means) + 1) / len(means), where="post", color=colour,
                      label=f"{row['model']}: {100 * row['outside']:.0f} % outside ±{row['threshold']:.2g}, "
                            f"{100 * row['excludes_0']:.0f} % of intervals exclude 0")
            if row is mine[0]:
                axis.axvspan(row["hdi_low"], row["hdi_high"], color="grey", alpha=0.18, lw=0, label=f"89 % of the slices ({row['model']})")
                for limit in (-row["threshold"], row["threshold"]):
                    axis.axvline(limit, color="grey", lw=1, ls="--", zorder=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
        axis.set_yticks(np.linspace(0, 1, 6), [f"{share:.0%}" for share in np.linspace(0, 1, 6)])
        axis.set_xlabel({"paper": "posterior mean of beta (log odds)", "paired": "mean difference over tasks (accuracy points)"}[analysis])
        axis.set_title({"paper": "the paper's model", "paired": "paired t over tasks"}[analysis], fontsize=10)
    axes[0, 0].set_ylabel("share of slices at or below")
    effect = table[0]["effect"]
    title = f"{words(effect)}, from one subsample per model and task\n{cell.title}, {len(cell.tasks)} tasks, {table[0]['slices']} slices"
    return finish(figure, title, folder / f"ecdf.{cell.file}.{effect}.png")


def run_meta(cell, args):
    """Figure 7: slices, their table and figure; True if a fit did not converge."""
    began = time.time()
    rows = run_slices(cell, args, args.out / "meta.csv", args.analysis)
    table = shares_table(cell, rows, args)
    print_shares(cell, table)
    failed = warn_of_r_hat(rows, args.out / "meta.csv")
    write_table(args.out / "shares.csv", table)
    if not args.no_figures:
        print(f"figure: {draw_ecdf(cell, rows, table, args.out).resolve()}")
    print(f"tables: meta.csv, shares.csv, in {args.out.resolve()}; {time.time() - began:.0f} s")
    return failed


# ------------------------------------------------------------------------------------------------------------
# Calibration on exact nulls
# ------------------------------------------------------------------------------------------------------------


def variance_ratio(cell, chosen, effect):
    """Variance of the difference between the subsamples of a task over that of two independent binomials, means over tasks."""
    observed, binomial = [], []
    for runs in (runs for i in chosen for runs in cell.runs[i] if len(runs) > 1):
        arms = runs[:, arms_of(effect)] / cell.n
        observed.append(np.diff(arms, axis=1).var(ddof=1))
        binomial.append((arms * (1 - arms)).mean(0).sum() / cell.n)
    return np.mean(observed) / np.mean(binomial) if observed and np.mean(binomial) else math.nan


def calibration_table(cell, rows, args):
    """Rows of calibration.csv: how often each analysis excludes 0 on nulls (nominal: 11 %), or has a mean outside the threshold."""
    table = []
    for (label, chosen), analysis in itertools.product(groups_of(cell).items(), dict.fromkeys(row["analysis"] for row in rows)):
        mine = [row for row in rows if (row["analysis"], row["model"]) == (analysis, label)]
        share, limit = np.mean([int(row["excludes_0"]) for row in mine]), threshold_of(cell, args, analysis)
        table.append({"experiment": cell.experiment, "m": cell.m, "n": cell.n, "effect": args.effect, "model": label, "analysis": analysis,
                      "nulls": len(mine), "rejected": share, "se": math.sqrt(share * (1 - share) / len(mine)), "threshold": limit,
                      "outside": "" if analysis == "sign-flip" else np.mean([abs(float(row["mean"])) > limit for row in mine]),
                      "variance_ratio": variance_ratio(cell, chosen, args.effect)})
    return table


def print_calibration(table):
    """One line per cell and model, one column per analysis."""
    analyses = list(dict.fromkeys(row["analysis"] for row in table))
    nominal = f"nominal {100 * (1 - HDI_SHARE):.0f}"
    print(f"\nExact nulls of the {table[0]['effect']}: how often 0 is excluded, in percent ({nominal}), ± standard error")
    print(f"{'experiment':<18} {'m':>5} {'n':>5} {'model':<14} {'nulls':>6} {'variance ratio':>15}", *(f"{name:>14}" for name in analyses))
    for name, group in itertools.groupby(table, key=lambda row: (row["experiment"], row["m"], row["n"], row["model"])):
        group = list(group)
        shares = "".join(f"{100 * row['rejected']:>9.1f} ± {100 * row['se']:.1f}" for row in group)
        print(f"{name[0]:<18} {name[1]:>5} {name[2]:>5} {name[3]:<14} {group[0]['nulls']:>6} {group[0]['variance_ratio']:>15.2f}{shares}")
    for row in (row for row in table if row["analysis"] == "paper"):
        print(f"paper, {row['experiment']}, m = {row['m']}, n = {row['n']}, {row['model']}: {100 * row['outside']:.0f} % of the nulls' "
              f"posterior means lie outside ±{row['threshold']:g}")


def draw_calibration_shares(table, folder):
    """How often each analysis excludes 0 on exact nulls, by cell and model."""
    plt = import_plots()
    lines = list(dict.fromkeys((row["experiment"], row["m"], row["n"], row["model"]) for row in table))
    figure, axis = plt.subplots(figsize=(8.5, 2.1 + 0.36 * len(lines)), layout="constrained")
    for analysis, marker, shift, label in (("paper", "s", -0.15, "the paper's model"), ("paired", "o", 0, "paired t"),
                                           ("sign-flip", "D", 0.15, "sign-flip test")):
        mine = [row for row in table if row["analysis"] == analysis]
        if mine:
            y = [lines.index((row["experiment"], row["m"], row["n"], row["model"])) + shift for row in mine]
            axis.errorbar([100 * row["rejected"] for row in mine], y, xerr=[100 * row["se"] for row in mine], fmt=marker, ms=5,
                          color=COLOURS_OF[analysis], label=label)
    axis.axvline(100 * (1 - HDI_SHARE), color="grey", lw=1, ls="--", label=f"nominal {100 * (1 - HDI_SHARE):.0f} %")
    axis.set_yticks(range(len(lines)), [f"{name[0]}, m {name[1]}, n {name[2]}, {name[3]}" for name in lines], fontsize=8)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.set_xlim(left=-1)  # a marker at 0 is not cut
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axis.set_xlabel("share of exact nulls in which 0 is excluded (bar: standard error)")
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    title = f"Who sees a {table[0]['effect']} where there is none? One subsample per model and task, arms swapped at random"
    return finish(figure, title, folder / f"calibration.{table[0]['effect']}.png")


def run_calibration(cells, args):
    """Exact nulls of every cell, their table and figure; True if a fit did not converge."""
    began, table, every = time.time(), [], []
    analyses = [name for name in ("paper", "paired") if name in args.analysis] + ["sign-flip"]
    for cell in cells:
        rows = run_slices(cell, args, args.out / "nulls.csv", analyses, null=True)
        table += calibration_table(cell, rows, args)
        every += rows
    print_calibration(table)
    failed = warn_of_r_hat(every, args.out / "nulls.csv")
    write_table(args.out / "calibration.csv", table)
    if not args.no_figures:
        print(f"figure: {draw_calibration_shares(table, args.out).resolve()}")
    print(f"tables: nulls.csv, calibration.csv, in {args.out.resolve()}; {time.time() - began:.0f} s")
    return failed


# ------------------------------------------------------------------------------------------------------------
# The plan: how many subsamples are enough?
# ------------------------------------------------------------------------------------------------------------


def run_values(runs, quantity, n):
    """Accuracy points of a task's runs: the difference of an effect, or the accuracy of the arm that quantity names."""
    if quantity in EFFECTS:
        control, treatment = arms_of(quantity)
        return 100 * (runs[:, treatment] - runs[:, control]) / n
    return 100 * runs[:, 2 + ARMS.index(quantity.removeprefix("acc_"))] / n


def task_components(runs, quantity, n):
    """Of one task: (mean, variance of one run on one subsample, its parts from subsample, run and test texts, number of subsamples).

    With seeds repeated on a subsample, run is the variance between its seeds, and subsample that between the subsamples' means less
    the run's part in it; else the two cannot be told apart and are nan. Test texts: the binomial part of an accuracy."""
    values = run_values(runs, quantity, n)
    names, where, repeats = np.unique(runs[:, 0], return_inverse=True, return_counts=True)
    means = np.bincount(where, values) / repeats
    total, subsample, run = means.var(ddof=1), math.nan, math.nan
    if repeats.max() > 1:
        run = ((values - means[where]) ** 2).sum() / (repeats - 1).sum()
        subsample = total - run * np.mean(1 / repeats)  # may fall below 0 by chance: only its mean over tasks is cut at 0
        total = subsample + run
    texts = math.nan if quantity in EFFECTS or n < 2 else np.mean(values * (100 - values)) / (n - 1)
    return means.mean(), total, subsample, run, texts, len(names)


def root_mean(variances):
    """Standard deviation of the mean variance over the tasks that have one; nan where none has."""
    known = variances[~np.isnan(variances)]
    return math.sqrt(max(known.mean(), 0)) if len(known) else math.nan


def cell_components(cell, i, quantity):
    """Row of components.csv of model i: standard deviations in points, and what the plan needs.

    se_1 is the standard error of the mean over these tasks from one subsample each; freedom (Satterthwaite) says how well it is known."""
    parts = [task_components(runs, quantity, cell.n) for runs in cell.runs[i] if len(runs)]
    mean, total, subsample, run, texts, number = map(np.array, zip(*parts))
    freedom = total.sum() ** 2 / np.sum(total**2 / (number - 1)) if total.any() else math.nan
    between = mean.var(ddof=1) - np.mean(total / number) if len(parts) > 1 else math.nan
    texts = texts.mean()
    return {"experiment": cell.experiment, "m": cell.m, "n": cell.n, "model": cell.models[i], "quantity": quantity, "tasks": len(parts),
            "subsamples": int(number.min()), "mean": mean.mean(), "sd_tasks": math.sqrt(max(between, 0)) if len(parts) > 1 else math.nan,
            "sd_total": math.sqrt(total.mean()), "sd_subsample": root_mean(subsample), "sd_run": root_mean(run),
            "sd_test_texts": math.sqrt(texts),
            "sd_training": math.sqrt(np.maximum(total.mean() - texts, 0)),  # without the luck of the test texts
            "se_1": math.sqrt(total.sum()) / len(parts), "freedom": freedom}


Z = stats.norm.isf((1 - HDI_SHARE) / 2)  # half-width of an 89 % interval in standard errors


def wrong_probability(se, gap):
    """P(|error of the mean| > gap) of a Normal error."""
    return 2 * stats.norm.sf(gap / se) if se else 0.0


def needed_subsamples(se_1, gap):
    """The smallest R with P(wrong) < 5 %."""
    R = max(math.floor((stats.norm.isf(WRONG / 2) * se_1 / gap) ** 2), 1)
    return R if wrong_probability(se_1 / math.sqrt(R), gap) < WRONG else R + 1


def needed_range(row, gap):
    """89 % interval of the needed R: se_1^2 is known as well as a chi-square of its degrees of freedom."""
    if math.isnan(row["freedom"]):
        return needed_subsamples(row["se_1"], gap), needed_subsamples(row["se_1"], gap)
    tails = stats.chi2.ppf([(1 + HDI_SHARE) / 2, (1 - HDI_SHARE) / 2], row["freedom"])
    return tuple(needed_subsamples(row["se_1"] * math.sqrt(row["freedom"] / tail), gap) for tail in tails)


def resampled_errors(cell, i, quantity, seed):
    """Errors of the mean over tasks, [R - 1, resamples], from the data alone: two disjoint groups of R subsamples of each task are
    drawn, and their means' difference over sqrt 2 has the variance of one's error. So R goes up to half the subsamples."""
    values = []
    for runs in (runs for runs in cell.runs[i] if len(runs)):
        _, first = np.unique(runs[:, 0], return_index=True)  # one run of each subsample
        values.append(run_values(runs, quantity, cell.n)[first])
    half = min(map(len, values)) // 2
    rng, errors = np.random.default_rng(int(short_hash(seed, cell.file, cell.models[i], quantity, "plan"), 16)), np.zeros((half, RESAMPLES))
    sizes = np.arange(1, half + 1)
    for value in values:
        sums = np.cumsum(rng.permuted(np.tile(value, (RESAMPLES, 1)), axis=1)[:, : 2 * half], axis=1).T
        one, two = sums[sizes - 1], sums[2 * sizes - 1]
        errors += (2 * one - two) / sizes[:, None] / len(values)
    return errors / math.sqrt(2)


def plan_rows(cell, i, row, args):
    """Rows of plan.csv: for R = 1, 2, ... the 89 % half-width and P(wrong), beside resampling as far as the data go."""
    errors = np.abs(resampled_errors(cell, i, row["quantity"], args.seed))
    last = min(max(2 * row["subsamples"], needed_subsamples(row["se_1"], args.gap)), MOST_R)
    rows = []
    for R in range(1, last + 1):
        se, checked = row["se_1"] / math.sqrt(R), R <= len(errors)
        rows.append({
            **{name: row[name] for name in ("experiment", "m", "n", "model", "quantity", "tasks")}, "R": R,
            "half_width": Z * se, "p_wrong": wrong_probability(se, args.gap),
            "resampled_half_width": np.quantile(errors[R - 1], HDI_SHARE) if checked else "",
            "resampled_p_wrong": np.mean(errors[R - 1] > args.gap) if checked else "", "basis": "checked" if checked else "extrapolation"})
    return rows


def advice(row, gap):
    """One sentence per model and quantity."""
    R, (low, high), half = needed_subsamples(row["se_1"], gap), needed_range(row, gap), row["subsamples"] // 2
    basis = "" if R <= half else f"; an extrapolation, resampling can check {half}"
    return (f"{row['model']}: one subsample per task gives the mean {row['quantity']} over these {row['tasks']} tasks to "
            f"±{Z * row['se_1']:.2f} points (89 %) and is off by more than {gap:g} points with probability "
            f"{wrong_probability(row['se_1'], gap):.2f}; {R} per task bring that below {100 * WRONG:.0f} % (89 % interval of "
            f"that number: {low} to {high}{basis}).")


def check_repeats(cell):
    """Variances between subsamples need at least two of each."""
    for model, model_runs in zip(cell.models, cell.runs):
        for task, runs in zip(cell.tasks, model_runs):
            if len(runs) and len(set(runs[:, 0])) < 2:
                stop(f"{cell.title}: {model} has one subsample of {task}, which cannot show how subsamples differ: "
                     "run at least 2, or leave it out by --tasks")


def print_components(table):
    """Standard deviations in points, one line per model and quantity."""
    print("\nMean and standard deviations in accuracy points: between tasks; of one subsample in all; of its draw and of its training run\n"
          "(told apart where seeds were repeated); of its test texts (part of the draw; binomial, of an accuracy)")
    print(f"{'experiment':<18} {'m':>5} {'n':>5} {'model':<14} {'quantity':<10} {'mean':>7} {'tasks':>7} {'one subsample':>14} "
          f"{'its draw':>9} {'its run':>8} {'test texts':>11}")
    for row in table:
        values = "".join(f"{row[name]:>{width}.2f}" for name, width in (
            ("sd_tasks", 8), ("sd_total", 15), ("sd_subsample", 10), ("sd_run", 9), ("sd_test_texts", 12)))
        print(f"{row['experiment']:<18} {row['m']:>5} {row['n']:>5} {row['model']:<14} {row['quantity']:<10} {row['mean']:>+7.2f}"
              f"{values.replace('nan', '   ')}")


def draw_plan(cell, rows, table, gap, folder):
    """Half-width and P(wrong) against R, per model and quantity; points: resampled from the data; dashed: extrapolation."""
    plt = import_plots()
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.1), layout="constrained")
    for component, colour in zip(table, itertools.cycle(plt.get_cmap("tab10").colors)):
        mine = [row for row in rows if (row["model"], row["quantity"]) == (component["model"], component["quantity"])]
        R, checked = np.array([row["R"] for row in mine]), np.array([row["basis"] == "checked" for row in mine])
        for axis, name, scale in ((axes[0], "half_width", 1), (axes[1], "p_wrong", 100)):
            values = scale * np.array([row[name] for row in mine])
            label = f"{component['model']}, {component['quantity']}: R = {needed_subsamples(component['se_1'], gap)}"
            axis.plot(R, values, color=colour, ls="--", lw=1)
            axis.plot(R[checked], values[checked], color=colour, lw=2, label=label if axis is axes[1] else None)
            axis.plot(R[checked], [scale * row[f"resampled_{name}"] for row in mine if row["basis"] == "checked"], "o", ms=3, color=colour)
    axes[0].set(ylabel="half-width of the 89 % interval (accuracy points)")
    axes[1].set_ylabel(f"P(mean off by more than {gap:g} points)")
    axes[1].yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axes[1].axhline(100 * WRONG, color="grey", lw=1, ls=":")
    axes[1].legend(fontsize=8, title=f"R for less than {100 * WRONG:.0f} %", title_fontsize=8)
    for axis in axes:
        axis.set(xscale="log", xlabel="R, subsamples per task")
        axis.grid(alpha=0.3)
    logarithmic = [axes[0].xaxis, axes[1].xaxis]
    if any(row["half_width"] for row in rows):
        axes[0].set_yscale("log")
        logarithmic.append(axes[0].yaxis)
    for scale in logarithmic:  # 0.5, 1, 2, 5, 10 rather than powers of ten
        scale.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
        scale.set_major_formatter(lambda value, _: f"{value:g}")
        scale.set_minor_locator(plt.NullLocator())
    title = (f"How many subsamples per task? Mean over {len(cell.tasks)} tasks, {cell.title}\n"
             "line: from the variances; points: resampled from the data; dashed: beyond half of the data, extrapolated")
    return finish(figure, title, folder / f"plan.{cell.file}.{table[0]['quantity']}.png")


def run_plan(cells, args):
    """The plan of every cell: components.csv, plan.csv, figures and advice."""
    table, rows, figures = [], [], []
    for cell in cells:
        check_repeats(cell)
    for cell in cells:
        mine, planned = [], []
        for i, quantity in itertools.product(range(len(cell.models)), (args.effect, "acc_extra")):
            mine.append(cell_components(cell, i, quantity))
            planned += plan_rows(cell, i, mine[-1], args)
        if not args.no_figures:
            figures.append(draw_plan(cell, planned, mine, args.gap, args.out))
        table, rows = table + mine, rows + planned
    print_components(table)
    for cell in cells:
        print(f"\n{cell.title}")
        for row in table:
            if (row["experiment"], row["m"], row["n"]) == (cell.experiment, cell.m, cell.n):
                print(f"  {advice(row, args.gap)}")
    write_table(args.out / "components.csv", table)
    write_table(args.out / "plan.csv", rows)
    print(f"\ntables: components.csv, plan.csv, in {args.out.resolve()}")
    for path in figures:
        print(f"figure: {path.resolve()}")


# ------------------------------------------------------------------------------------------------------------
# A leaderboard
# ------------------------------------------------------------------------------------------------------------


def read_board(path):
    """[(name, score as a fraction, n or None)], best first, of a CSV with the columns name, score and perhaps n (test texts)."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            lines, header = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        stop(f"--leaderboard {path} cannot be read ({error}): give a CSV file with the columns name, score and perhaps n")
    if missing := [name for name in ("name", "score") if name not in header]:
        stop(f"{path} has no column {missing[0]!r}; columns found: {', '.join(map(str, header)) or 'none'}: give a board")
    entries = []
    for number, line in enumerate(lines, start=2):
        try:
            entries.append((line["name"], float(line["score"]), positive(line["n"]) if "n" in header else None))
        except (TypeError, ValueError, AttributeError, argparse.ArgumentTypeError) as error:
            stop(f"{path}, line {number}: {error}: score is a number, n a whole number")
    scale = 100 if any(score > 1 for _, score, _ in entries) else 1
    if wrong := [entry for entry in entries if not 0 < entry[1] < scale]:
        stop(f"{path}: {wrong[0][0]} has score {wrong[0][1]}: scores are fractions between 0 and 1, or all in percent")
    if len(entries) < 2:
        stop(f"{path} has {len(entries)} entries: neighbours need at least 2")
    return sorted(((name, score / scale, n) for name, score, n in entries), key=lambda entry: -entry[1])


def swap_probability(upper, lower, training_variance, R):
    """Probability that a rerun of both with R fresh subsamples per task puts the lower of two entries first, the gap taken as true.

    training_variance: of one entry's mean score, in points^2, at R = 1. With n, the binomial noise of both entries' n test texts too."""
    variance = 2 * training_variance / R
    variance += sum(1e4 * score * (1 - score) / n for _, score, n in (upper, lower) if n)
    gap = 100 * (upper[1] - lower[1])
    return float(stats.norm.sf(gap / math.sqrt(variance))) if variance else 0.5 * (gap == 0)


def board_rows(board, components):
    """Rows of leaderboard.csv: for each pair of neighbours, each model's noise and R = 1, 5, 20."""
    rows = []
    for rank, (upper, lower) in enumerate(itertools.pairwise(board), start=1):
        pair = {"rank": rank, "name": upper[0], "below": lower[0], "gap": 100 * (upper[1] - lower[1]),
                "odds_ratio": math.exp(special.logit(upper[1]) - special.logit(lower[1]))}
        for row, R in itertools.product(components, FOLDS):
            p = swap_probability(upper, lower, row["sd_training"] ** 2 / row["tasks"], R)
            rows.append(pair | {"model": row["model"], "R": R, "p_swap": p})
    return rows


def run_board(cell, board, args):
    """The leaderboard's neighbours, under the noise measured in this cell."""
    check_repeats(cell)
    components = [cell_components(cell, i, "acc_extra") for i in range(len(cell.models))]
    rows = board_rows(board, components)
    print(f"\n{args.leaderboard}: gaps in points, odds ratios, and the chance that neighbours swap when both are rerun with R folds,\n"
          f"under the noise of {cell.title}, mean of {len(cell.tasks)} tasks")
    names = [f"{row['model']}, R = {R}" for row, R in itertools.product(components, FOLDS)]
    width = max(18, *(len(name) for name, _, _ in board)) + 1
    print(f"{'':>4} {'entry':<{width}} {'next below':<{width}} {'gap':>6} {'odds':>6}  " + "  ".join(names))
    pairs = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["rank"])]
    for pair in pairs:
        row = pair[0]
        swaps = "  ".join(f"{100 * other['p_swap']:>{len(name) - 2}.0f} %" for name, other in zip(names, pair))
        print(f"{row['rank']:>4} {row['name']:<{width}} {row['below']:<{width}} {row['gap']:>6.2f} {row['odds_ratio']:>6.3f}  {swaps}")
    gaps, odds = ([pair[0][name] for pair in pairs] for name in ("gap", "odds_ratio"))
    print(f"mean over {len(pairs)} pairs: gap {np.mean(gaps):.2f} points, odds ratio {np.mean(odds):.3f}; expected swaps: "
          + ", ".join(f"{sum(pair[k]['p_swap'] for pair in pairs):.1f} ({name})" for k, name in enumerate(names)))
    print(f"Assumed: the gaps are the true ones; each entry's training varies between folds as this model's does here (acc_extra, "
          f"m = {cell.m}),\nover {len(cell.tasks)} tasks; errors are Normal and independent between entries. Noise of the test texts: "
          f"{'binomial, from n' if board[0][2] else 'left out (no column n)'}.")
    write_table(args.out / "leaderboard.csv", rows)
    print(f"table: {(args.out / 'leaderboard.csv').resolve()}")


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0],
                                     epilog="Columns, files and models: see the head of this script and README.md.")
    add = parser.add_argument_group("what to run").add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], metavar="FILE or FOLDER",
        help="results files, folders of them, or folders in the published layout (results.csv)")
    add("--slices", type=positive, default=500, metavar="N", help="random slices with one subsample per model and task (%(default)s)")
    add("--calibrate", action="store_true", help="instead: exact nulls made of so many slices, for every cell chosen")
    add("--plan", action="store_true", help="instead: how many subsamples per task are needed, for every cell chosen")
    add("--leaderboard", type=Path, metavar="FILE", help="instead: would neighbours swap? CSV with the columns name, score and perhaps n")
    add("--effect", choices=tuple(EFFECTS), default="bias", help="(%(default)s)")
    add("--analysis", nargs="+", choices=("paper", "paired"), default=["paper", "paired"], help="(paper paired)")
    for flag, kind in (("experiment", str), ("m", int), ("n", int), ("models", str), ("tasks", str)):
        name = flag.removesuffix("s")
        add(f"--{flag}", nargs="+", type=kind, metavar=name.upper(), help=f"only these values of {name} (all; slices take one cell)")
    add("--threshold", type=above_0, metavar="T", help="of the posterior mean of beta, in log odds (0.04; zero-shot: 0.08)")
    add("--gap", type=above_0, default=0.6, metavar="POINTS", help="--plan: error that would be wrong; the mean gap between neighbours on "
        "the RAFT board (%(default)s)")
    add = parser.add_argument_group("machine").add_argument
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    add("--workers", type=positive, default=os.cpu_count() or 1, metavar="N", help="slices at once (all of the machine's cores)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("meta"), metavar="FOLDER", help="tables and figures (%(default)s)")
    add("--no-figures", action="store_true", help="tables only")
    return parser.parse_args(argv)


# --- shared: positive ---
def positive(text):
    """A whole number from 1 to a billion."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
# --- end shared ---


def above_0(text):
    """A finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def main(argv=None):
    args = parse_args(argv)

    # Everything that can be wrong with the data is found before anything is fitted or written.
    args.analysis = [name for name in ("paper", "paired") if name in args.analysis]
    board = read_board(args.leaderboard) if args.leaderboard else None
    cells = pool_runs(choose_rows(read_rows(args.paths), args))
    for cell in cells:
        sizes = [len(runs) for model_runs in cell.runs for runs in model_runs if len(runs)]
        print(f"{cell.title}: models {', '.join(cell.models)}; tasks {len(cell.tasks)}; rows per model and task "
              f"{min(sizes)}{f' to {max(sizes)}' * (max(sizes) > min(sizes))}")
    slices = not (args.calibrate or args.plan or board)
    cell = only_cell(cells) if slices or board else None
    if (slices or args.calibrate) and "paper" in args.analysis and importlib.util.find_spec("nutpie") is None:
        stop("nutpie, the sampler, is not installed: pip install -r requirements.txt, or give --analysis paired")

    lock, failed = lock_folder(args.out), False
    try:
        if slices:
            failed = run_meta(cell, args)
        if args.calibrate:
            failed = run_calibration(cells, args)
        if args.plan:
            run_plan(cells, args)
        if board:
            run_board(cell, board, args)
    except KeyboardInterrupt:
        tqdm.write("stopped; finished slices are kept: the same command goes on from there", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:  # a full disk; a torn last line is cut off by the next run
        stop(f"{error.filename or args.out} cannot be written ({error.strerror}): mend that and run again; finished slices are kept")
    finally:
        lock.close()
    if failed:
        raise SystemExit(3)


# --- shared: guard ---
if __name__ == "__main__":
    main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
