"""From results.csv to conclusions: is pretraining on unlabeled test text unfair, and how sure can one be?

Reproduces sections 5 to 8 and 10 and appendices D to F of "Evaluating the fairness of task-adaptive pretraining on
unlabeled test data before few-shot text classification" (Dubey), and adds a calibrated analysis. With
    boost = acc_extra - acc_base   and   bias = acc_test - acc_extra
it fits, for each cell (experiment, m, n) and its models i, tasks j, subsamples k together, for each effect:

    paper    Y_ijkl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + V_jk + W_jl + beta l; l = 0 control, 1 treatment.
             Normal(0, 1) for mu and beta, Normal(0, 5) for alpha (models after the first in alphabetical order), U, V, W
             Normal(0, sd), sd_U and sd_V HalfNormal(1), sd_W HalfNormal(3.5355). For reproduction. W_jl lets an effect
             differ between tasks, but its intervals take the training runs' luck for effects: see README.md.
    paired   D_ijk = 100 (acc_treatment - acc_control) ~ Normal(delta_ij, sqrt(s_ij^2 + (100 / n)^2 / 12)),
             delta_ij ~ Normal(beta_i, tau_i), log s_ij ~ Normal(log s_i, omega_i), beta Normal(0, 10), tau HalfNormal(5),
             s HalfNormal(10), omega HalfNormal(1). In accuracy points. For conclusions: each model and task has its own noise.

The first is sampled in other variables that mix (see paper_model), both by nutpie's NUTS: 4 chains, 500 tuning steps, 1,000 draws.
Intervals are 89 % highest-density intervals. m is the number of labelled training texts, n that of test texts.

Commands, cheapest first
    python fit_model.py results.csv --draws 0                    # tables, tests and violins of the observed, no fit: seconds
    python fit_model.py results.csv                              # everything
    python fit_model.py results.csv more.csv folder --effects bias --n 500 --out fits
    python fit_model.py accuracies            # a folder in the published layout accuracies/m50/n500/bert/ag_news/accuracies.csv
    python fit_model.py --check prior                            # what the priors say (Figure 11)
    python fit_model.py --check simulation                       # known effects are recovered (Figure 12), and coverage

Reads results.csv as run_experiment.py writes it (the first eleven columns suffice). Writes to fits/, with the columns
    means.csv         experiment, model, m, n, tasks, subsamples, {boost,bias}_{mean,se,median}: Table 1, as fractions, over the
                      tasks' means
    posterior.csv     experiment, m, n, effect, analysis, interaction, parameter, mean, sd, hdi_low, hdi_high, r_hat, ess_bulk,
                      warning; paper: logit scale, but difference (11) in accuracy points; paired: points; t: the observed means
                      with standard errors and 89 % paired-t intervals over tasks, for comparison
    tasks.csv         per cell, model, task: effects in points, observed, paper (12) and paired (delta) with intervals, exact
                      sign-flip p, its Benjamini-Hochberg p, mean majority share, flag_3, flag_2: observed bias from +3, +2 points
    task_means.csv    per experiment and task, over cells and models: mean boost and bias in points and their exact signs (section 7)
    losses.csv        where two experiments share subsamples: paired ratios of their final pretraining losses (section 8)
    correlations.csv  Spearman between two models' boosts and biases of the same subsamples, with 10 permuted nulls (appendix F)
    summary.md        the mean effects of posterior.csv, side by side
    predictive.npz    draws of (11) and (12), averaged over subsamples and tasks while drawing; paired: delta
and figures *.png. Exit status 3 if a fit did not converge (then its rows say so).

Measured 2026-11-21 (Python 3.11, 2 cores, versions of requirements.txt, from the start of Python), on the published accuracies with m = 50:
--draws 0, all 13,500 rows: 6 s. One effect, paper's analysis: n = 500 20 s, n = 50 39 s; paired, n = 500: 13 s. All 8 fits of the paper's
analysis: 152 s, 1.05 GB; every parameter r_hat <= 1.006, ESS >= 757, no divergence, no rerun.
"""

import argparse
import contextlib
import csv
import ctypes
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
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from scipy import special, stats
from tqdm.auto import tqdm

COLOURS = {"boost": "tab:blue", "bias": "tab:orange"}
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021): rank-normalised split r_hat; 100 effective draws per chain
TARGET_ACCEPT = {"paper": 0.85, "paired": 0.9}  # of NUTS; SMALL_ACCEPT for few tasks or subsamples, whose spreads may be near 0
SMALL_ACCEPT = 0.99
STEP_JITTER = 0.3  # else trajectories end near their start's mirror image: means mix well, spreads hardly
RERUN_ACCEPT, RERUN_TUNE, RERUN_DRAWS = 0.95, 4, 2  # of the one rerun after a failed check: target, times the tuning, times the draws
T_FREEDOM = 8  # of the proposals of redraw_units
PRIORS = {"paper": {"mu": 1.0, "beta": 1.0}, "wide": {"mu": 1.5, "beta": 5.0}}  # sd; wide: the sensitivity check of appendix E
MANY = 10  # tasks, and subsamples of each, from which c_jk and log s_ij are sampled centred: best where they are well known
FEWEST_TASKS = 5  # below, the paper's W (task by treatment) is dropped: its spread cannot be told from beta
FLAGS = (3, 2)  # points of observed bias from which a task is lemon-picked (section 7, appendix E)
PERMUTATIONS = 10  # null correlations (appendix F)
MEAN_NAME = {"paper": "difference", "paired": "mean"}  # the mean effect over tasks among an analysis' parameters
MEANS_COLUMNS = ("experiment", "model", "m", "n", "tasks", "subsamples",
                 "boost_mean", "boost_se", "boost_median", "bias_mean", "bias_se", "bias_median")
POSTERIOR_COLUMNS = ("experiment", "m", "n", "effect", "analysis", "interaction", "parameter",
                     "mean", "sd", "hdi_low", "hdi_high", "r_hat", "ess_bulk", "warning")
LOSS_COLUMNS = ("first", "second", "model", "m", "n", "task", "subsamples", "ratio_extra", "ratio_test", "lower")

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
# Reading: many files and folders into cells
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


def build_cell(name, rows):
    """The rows of one (experiment, m, n) as arrays over models i, arms l and units r = (task, subsample), sorted by task.

    counts [i, l, r] correct answers; total [i, r] answers, 0 where a model lacks the unit; majority [r]; task_idx, subsample [r].
    Several training seeds of a subsample are added up: they are tests of one subsample."""
    experiment, m, n = name
    models, tasks = (sorted({row[column] for row in rows}) for column in ("model", "task"))
    units = {unit: r for r, unit in enumerate(sorted({(row["task"], row["subsample"]) for row in rows}))}
    counts, total = np.zeros((len(models), 3, len(units)), int), np.zeros((len(models), len(units)), int)
    majority, splits = np.zeros(len(units)), {}
    for row in rows:
        i, r = models.index(row["model"]), units[row["task"], row["subsample"]]
        counts[i, :, r] += row["counts"]
        total[i, r] += n
        majority[r] = row["majority"]
        splits.setdefault(r, set()).add((row["majority"], row["split"]))
    for model, answers in zip(models, total):
        if len(set(answers[answers > 0])) > 1:
            stop(f"experiment {experiment}, m = {m}, n = {n}, model {model}: some subsamples have more training seeds than others: "
                 "leave some out")
    names = {row["task"]: row["num_classes"] for row in rows}
    differ = sorted({unit[0] for unit, r in units.items() if len(splits[r]) > 1})
    return SimpleNamespace(
        experiment=experiment, m=m, n=n, models=models, tasks=tasks, counts=counts, total=total, majority=majority, num_classes=names,
        task_idx=np.array([tasks.index(task) for task, _ in units]), subsample=np.array([k for _, k in units]), splits_differ=differ,
        title=f"{experiment}, m = {m} training texts, n = {n} test texts", file=f"{experiment}.m{m}.n{n}".replace("/", "--"))


def build_cells(rows):
    """One cell per (experiment, m, n), in order."""
    groups = {}
    for row in rows:
        groups.setdefault((row["experiment"], row["m"], row["n"]), []).append(row)
    return [build_cell(name, groups[name]) for name in sorted(groups)]


def describe(cell):
    """Print the cell's size and what about it limits the analysis."""
    present = task_sums((cell.total > 0).astype(int), cell)
    low, high = present.min(), present.max()
    counts = f"{low} per task" if low == high else f"{low} to {high} per model and task (unequal)"
    print(f"{cell.title}: models {', '.join(cell.models)}; tasks {len(cell.tasks)}; subsamples {counts}")
    if cell.splits_differ:
        print(f"  test texts differ between models at the same subsample ({', '.join(cell.splits_differ)}): V and the correlations "
              "take them as equal")
    if len(cell.tasks) == 1:
        print("  one task: the paper's analysis goes without W and U, the paired one without tau and omega")
    elif len(cell.tasks) < FEWEST_TASKS:
        print(f"  fewer than {FEWEST_TASKS} tasks: the paper's analysis goes without W")
    if len(cell.models) == 1:
        print("  one model: no alpha, no correlations")


# ------------------------------------------------------------------------------------------------------------
# The observed: means, tests, correlations
# ------------------------------------------------------------------------------------------------------------


def task_sums(values, cell):
    """Sums over the subsamples of each task: [..., units] -> [..., tasks]."""
    return np.add.reduceat(values, np.searchsorted(cell.task_idx, range(len(cell.tasks))), axis=-1)


def task_means(values, cell):
    """Means over the subsamples of each task, [models, units] -> [models, tasks]; nan where a model lacks the task."""
    there = cell.total > 0
    with np.errstate(invalid="ignore"):
        return task_sums(np.where(there, values, 0), cell) / task_sums(there.astype(float), cell)


def count_change(cell, effect):
    """Correct answers of the treatment minus those of the control, [models, units], whole numbers."""
    control, treatment = (cell.counts[:, ARMS.index(arm)] for arm in EFFECTS[effect])
    return treatment - control


def points(cell, effect):
    """Differences in accuracy points, [models, units]; nan where a model lacks the unit."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return 100 * count_change(cell, effect) / cell.total


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


def adjust(p):
    """Benjamini-Hochberg: adjusted p-values that control the false discovery rate."""
    order = np.argsort(p)[::-1]
    scaled = np.asarray(p)[order] * len(p) / np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled), 1)
    return adjusted


def means_table(cells):
    """Rows of means.csv: Table 1, the means over tasks of the tasks' means over subsamples, as fractions."""
    rows = []
    for cell in cells:
        for i, model in enumerate(cell.models):
            row = {"experiment": cell.experiment, "model": model, "m": cell.m, "n": cell.n}
            row["subsamples"] = int((cell.total[i] > 0).sum())
            for effect in EFFECTS:
                means = task_means(points(cell, effect), cell)[i] / 100
                means = means[~np.isnan(means)]
                row |= {"tasks": len(means), f"{effect}_mean": means.mean(), f"{effect}_median": np.median(means),
                        f"{effect}_se": t_interval(means)[1]}
            rows.append(row)
    return rows


def observed_tasks(cell):
    """{(model, task): row of tasks.csv} with all that needs no fit."""
    changes, rows = count_change(cell, "bias"), {}
    means = {effect: task_means(points(cell, effect), cell) for effect in EFFECTS}
    majority = task_means(np.broadcast_to(cell.majority, cell.total.shape), cell)
    for i, model in enumerate(cell.models):
        mine = [j for j in range(len(cell.tasks)) if not np.isnan(means["bias"][i, j])]
        p = np.array([sign_flip_p(changes[i][(cell.task_idx == j) & (cell.total[i] > 0)]) for j in mine])
        for j, p_raw, p_bh in zip(mine, p, adjust(p)):
            bias = means["bias"][i, j]
            rows[model, cell.tasks[j]] = {
                "experiment": cell.experiment, "m": cell.m, "n": cell.n, "model": model, "task": cell.tasks[j],
                "subsamples": int(((cell.task_idx == j) & (cell.total[i] > 0)).sum()), "majority": majority[i, j],
                "boost_observed": means["boost"][i, j], "bias_observed": bias, "p": p_raw, "p_bh": p_bh,
                **{f"flag_{flag}": int(bias >= flag - 1e-9) for flag in FLAGS}}
    return rows


def pooled_tasks(cells):
    """Rows of task_means.csv: per experiment and task the mean over cells and models, and its exact sign."""
    rows, pooled = [], {}
    for cell in cells:
        sums = {effect: task_sums(count_change(cell, effect), cell) for effect in EFFECTS}
        total = task_sums(cell.total, cell)
        for (i, j) in np.argwhere(total):
            found = pooled.setdefault((cell.experiment, cell.tasks[j]), {effect: [] for effect in EFFECTS})
            for effect in EFFECTS:
                found[effect].append(Fraction(int(sums[effect][i, j]), int(total[i, j])))
    for (experiment, task), found in sorted(pooled.items()):
        row = {"experiment": experiment, "task": task, "configurations": len(found["bias"])}
        for effect, values in found.items():
            mean = sum(values) / len(values)
            row |= {effect: float(100 * mean), f"{effect}_sign": (mean > 0) - (mean < 0)}
        rows.append(row)
    return rows


def losses_table(rows):
    """Rows of losses.csv: final pretraining losses of the second experiment over those of the first, subsample by subsample."""
    found, ratios = {}, {}
    for row in rows:
        if row["loss_extra"] and row["loss_test"]:
            found.setdefault(tuple(row[name] for name in KEY[1:]), {})[row["experiment"]] = (row["loss_extra"], row["loss_test"])
    for (model, task, m, n, *_), losses in found.items():
        for first, second in itertools.combinations(sorted(losses), 2):
            ratios.setdefault((first, second, model, m, n, task), []).append(np.divide(losses[second], losses[first]))
    return [dict(zip(LOSS_COLUMNS, (*key, len(values), *np.mean(values, 0), np.mean(np.array(values) < 1))))
            for key, values in sorted(ratios.items())]


def spearman(a, b):
    """Rank correlation of the last axis of a and b; nan where one is constant."""
    a, b = (ranks - ranks.mean(-1, keepdims=True) for ranks in (stats.rankdata(a, axis=-1), stats.rankdata(b, axis=-1)))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a**2).sum(-1) * (b**2).sum(-1))


def correlations_table(cells, seed):
    """Rows of correlations.csv: do two models' effects go together from subsample to subsample? And if shuffled?"""
    rows = []
    for cell, effect in itertools.product(cells, EFFECTS):
        values = points(cell, effect)
        for (a, b), (j, task) in itertools.product(itertools.combinations(range(len(cell.models)), 2), enumerate(cell.tasks)):
            both = values[[a, b]][:, (cell.task_idx == j) & (cell.total[[a, b]] > 0).all(0)]
            if both.shape[1] < 3:
                continue
            rng = np.random.default_rng(int(short_hash(seed, cell.file, effect, a, b, task), 16))
            nulls = spearman(both[:1], rng.permuted(np.repeat(both[1:], PERMUTATIONS, 0), axis=1))
            rows.append({"experiment": cell.experiment, "m": cell.m, "n": cell.n, "task": task, "effect": effect,
                         "model_a": cell.models[a], "model_b": cell.models[b], "subsamples": both.shape[1], "spearman": spearman(*both),
                         **{f"null_{k}": null for k, null in enumerate(nulls, start=1)}})
    return rows


# ------------------------------------------------------------------------------------------------------------
# The two models
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


def learned(spread, error):
    """How far data tell the members of a group apart, 0 to 1, from a first guess of their spread and standard errors."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(spread**2 / (spread**2 + error**2))


def first_spread(values, error):
    """Moment estimate of the standard deviation of true values behind noisy ones, over the last axis (0 for a single one)."""
    there = np.isfinite(values) & np.isfinite(error)
    if there.sum(-1).min() < 2:
        return np.zeros(values.shape[:-1] + (1,))
    excess = np.nanvar(np.where(there, values, np.nan), axis=-1, ddof=1) - np.nanmean(np.where(there, error**2, np.nan), axis=-1)
    return np.sqrt(np.maximum(excess, 0))[..., None]


def fewest(cell):
    """The number of tasks, or of a model's subsamples of a task where that is less (a task that a model lacks does not count)."""
    present = task_sums((cell.total > 0).astype(int), cell)
    return min(len(cell.tasks), int(present[present > 0].min()))


def paper_data(cell, effect):
    """What the paper's model needs of a cell: sums of the counts, and how well each task's effect is known."""
    control, treatment = (cell.counts[:, ARMS.index(arm)].astype(float) for arm in EFFECTS[effect])
    correct = control + treatment
    answers = task_sums(cell.total.sum(0), cell)
    share = (np.array([task_sums(arm.sum(0), cell) for arm in (control, treatment)]) + 0.5) / (answers + 1)
    change, error = np.diff(special.logit(share), axis=0)[0], np.sqrt((1 / (share * (1 - share))).sum(0) / answers)
    known = learned(first_spread(change, error), error) * (fewest(cell) >= MANY)
    return {"correct_unit": correct.sum(0), "correct_model": correct.sum(1), "total": cell.total.astype(float), "task_idx": cell.task_idx,
            "change": task_sums((treatment - control).sum(0), cell) / 2, "known": known}


def paper_model(data, interaction, priors, centred):
    """The paper's model in variables that mix.

    With S_j = (W_j0 + W_j1) / sqrt 2 and D_j = (W_j1 - W_j0) / sqrt 2, again independent Normal(0, sd_W):
        a_j  = mu + beta / 2 + U_j + S_j / sqrt 2  ~ Normal(mu + beta / 2, sqrt(sd_U^2 + sd_W^2 / 2)),
        c_jk = a_j + V_jk,   d_j = beta + sqrt 2 D_j  ~ Normal(beta, sqrt 2 sd_W),   logit p = c_jk + alpha_i + (l - 1/2) d_j:
    exact, with U and S summed out. d_j is centred as far as the data know it (`known`: 1 centred, 0 not), c_jk or not. For both l,
    log((1 + e^(x + d/2)) (1 + e^(x - d/2))) = log1p(e^x (e^(d/2) + e^(-d/2)) + e^2x): one logarithm, and counts enter as sums only."""
    pm = import_pymc()
    import pytensor.tensor as pt

    (models, units), tasks = data["total"].shape, len(data["change"])
    with pm.Model() as model:
        shared = {name: pm.Data(name, value) for name, value in data.items()}
        task_idx, known = shared["task_idx"], shared["known"]
        mu, beta = pm.Normal("mu", 0, PRIORS[priors]["mu"]), pm.Normal("beta", 0, PRIORS[priors]["beta"])
        alpha = pt.concatenate([pt.zeros(1), pm.Normal("alpha", 0, 5, shape=models - 1)]) if models > 1 else pt.zeros(1)
        sd_v = pm.HalfNormal("sd_V", 1)
        sd_w = pm.HalfNormal("sd_W", 3.5355) if interaction else 0
        level = mu + beta / 2
        if tasks > 1:
            sd_u = pm.HalfNormal("sd_U", 1)
            level = pm.Normal("a", level, pt.sqrt(sd_u**2 + sd_w**2 / 2) if interaction else sd_u, shape=tasks)[task_idx]
        if centred:
            c = pm.Normal("c", level, sd_v, shape=units)
        else:
            c = pm.Deterministic("c", level + sd_v * pm.Normal("c_raw", 0, 1, shape=units))
        if interaction:
            sd_d = math.sqrt(2) * sd_w
            raw = pm.Normal("d_raw", known * beta, sd_d**known, shape=tasks)
            d = pm.Deterministic("d", (1 - known) * beta + sd_d ** (1 - known) * raw)
        else:
            d = beta * pt.ones(tasks)
        odds, ratio = pt.exp(c)[None] * pt.exp(alpha)[:, None], pt.exp(d / 2)
        both = pt.log1p(odds * (ratio + 1 / ratio)[task_idx] + odds**2)
        observed = (shared["correct_unit"] * c).sum() + (shared["correct_model"] * alpha).sum() + (shared["change"] * d).sum()
        pm.Potential("likelihood", observed - (shared["total"] * both).sum())
    return model


def paired_data(cell, effect):
    """What the paired model needs of a cell, [models, tasks]: number, mean and scatter of the differences in points."""
    values, there = points(cell, effect), cell.total > 0
    count = task_sums(there.astype(float), cell)
    mean = np.nan_to_num(task_means(values, cell))
    square = task_sums(np.where(there, (values - mean[:, cell.task_idx]) ** 2, 0), cell)
    rounding = (100 / cell.total.max()) ** 2 / 12  # variance of rounding: differences are whole multiples of 100 / n
    with np.errstate(divide="ignore", invalid="ignore"):
        log_sd, error = np.log(square / (count - 1) + rounding) / 2, np.sqrt(1 / (2 * (count - 1)))
    known = np.zeros(count.shape)
    if fewest(cell) >= MANY:
        known += learned(first_spread(log_sd, error), error)
    return {"count": count, "mean": mean, "square": square, "rounding": np.array(rounding), "known": known}


def paired_model(data):
    """Paired differences in accuracy points, for each model and task a mean delta and a noise of its own.

    Normal data enter by number, mean and scatter. delta is summed out, mean_ij ~ Normal(beta_i, sqrt(tau_i^2 + variance_ij / count_ij)),
    and drawn afterwards (draw_delta). With one task tau and omega are dropped. log s_ij is centred as far as it is known."""
    pm = import_pymc()
    import pytensor.tensor as pt

    models, tasks = data["count"].shape
    with pm.Model() as model:
        count, mean, square, rounding, known = (pm.Data(name, value) for name, value in data.items())
        beta, s = pm.Normal("beta", 0, 10, shape=models), pm.HalfNormal("s", 10, shape=models)
        log_s, between = pt.log(s)[:, None], 0
        if tasks > 1:
            between = pm.HalfNormal("tau", 5, shape=models)[:, None] ** 2
            omega = pm.HalfNormal("omega", 1, shape=models)[:, None]
            raw = pm.Normal("s_raw", known * log_s, omega**known, shape=(models, tasks))
            log_s = pm.Deterministic("log_s", (1 - known) * log_s + omega ** (1 - known) * raw)
        variance = pt.exp(2 * log_s) + rounding
        both = variance + count * between
        scatter = (count - 1) * pt.log(variance) + square / variance
        pm.Potential("likelihood", -(scatter + pt.log(both) + count * (mean - beta[:, None]) ** 2 / both).sum() / 2)
    return model


def draw_delta(draws, data, rng):
    """Draws of delta [chain, draw, model, task] given the rest: Normal by conjugacy, a weighted mean of beta and the data."""
    beta = draws["beta"][..., None]
    if "tau" not in draws:
        return beta
    within, between = np.exp(2 * draws["log_s"]) + data["rounding"], draws["tau"][..., None] ** 2
    both = within + data["count"] * between
    centre = beta + data["count"] * between / both * (data["mean"] - beta)
    return rng.normal(centre, np.sqrt(between * within / both))


# ------------------------------------------------------------------------------------------------------------
# Sampling and its checks
# ------------------------------------------------------------------------------------------------------------


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


def sample(compiled, names, args, **settings):
    """({name: draws [chain, draw, ...]}, divergences) by nutpie's NUTS."""
    import nutpie

    trace = nutpie.sample(compiled, chains=args.chains, cores=min(args.cores, args.chains), save_warmup=False, progress_bar=False,
                          **settings)
    return {name: trace.posterior[name].values for name in names}, int(trace.sample_stats["diverging"].values.sum())


def redraw_units(draws, data, seed, threads):
    """Replace the draws of c_jk [chain, draw, unit] in place by draws given all other parameters and the data.

    Given these the c_jk are independent, so each takes one Metropolis-Hastings step whose proposal, a Student t at its mode (tails
    beyond the target's), forgets the current value and is mostly taken: an exact update. NUTS alone leaves their spreads correlated
    from draw to draw, and the largest r_hat of thousands near 1.01."""
    flats = {name: flat(values) for name, values in draws.items()}
    samples, units = flats["c"].shape
    total, task_idx = data["total"], data["task_idx"]
    start = special.logit((data["correct_unit"] + 0.5) / (2 * total.sum(0) + 1))

    def redraw(part, source):
        rng = np.random.default_rng(source)
        beta, spread = flats["beta"][part, None], flats["sd_V"][part, None]
        level = flats["a"][part][:, task_idx] if "a" in flats else (flats["mu"][part, None] + beta / 2)
        half = (flats["d"][part][:, task_idx] if "d" in flats else beta) / 2
        alpha = [0, *flats["alpha"][part].T[..., None]] if "alpha" in flats else [0]

        def slopes(x):
            shares = [(n, special.expit(x + a + sign * half)) for n, a in zip(total, alpha) for sign in (-1, 1)]
            return (data["correct_unit"] - sum(n * p for n, p in shares) - (x - level) / spread**2,
                    -sum(n * p * (1 - p) for n, p in shares) - 1 / spread**2)

        def log_density(x):
            terms = [n * np.logaddexp(0, x + a + sign * half) for n, a in zip(total, alpha) for sign in (-1, 1)]
            return data["correct_unit"] * x - sum(terms) - ((x - level) / spread) ** 2 / 2

        mode = start - sum(n * a for n, a in zip(total, alpha)) / total.sum(0)
        for _ in range(4):  # Newton; where it has not arrived, proposals are refused more often, no more
            slope, curvature = slopes(mode)
            mode = mode - np.clip(slope / curvature, -2, 2)
        width = 1 / np.sqrt(-slopes(mode)[1])
        old, new = flats["c"][part], mode + width * rng.standard_t(T_FREEDOM, mode.shape)

        def log_weight(x):
            return log_density(x) + (T_FREEDOM + 1) / 2 * np.log1p(((x - mode) / width) ** 2 / T_FREEDOM)

        gain = log_weight(new) - log_weight(old)
        flats["c"][part] = np.where(np.log(rng.random(gain.shape)) < gain, new, old)

    parts = np.array_split(np.arange(samples), math.ceil(samples * units / 50_000))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(redraw, parts, np.random.SeedSequence(seed).spawn(len(parts))))
    draws["c"] = flats["c"].reshape(draws["c"].shape)


def compiled_model(analysis, interaction, data, priors, centred, cache):
    """The model compiled with these data: compiled once per shape, the data swapped."""
    key = (analysis, interaction, priors, centred, *(np.shape(value) for value in data.values()))
    if key not in cache:
        import_pymc()
        import nutpie

        model = paper_model(data, interaction, priors, centred) if analysis == "paper" else paired_model(data)
        names = [variable.name for variable in (*model.free_RVs, *model.deterministics) if not variable.name.endswith("_raw")]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large expressions that are compiled in two parts
            cache[key] = nutpie.compile_pymc_model(model), names
    compiled, names = cache[key]
    return compiled.with_data(**{name: data[name] for name in compiled.shared_data}), names


def fit(cell, effect, analysis, interaction, args, cache):
    """Sample one analysis of one effect in one cell; one rerun with more tuning and smaller steps if it did not converge.

    Returns draws {name: [chain, draw, ...]}, r_hat and ess {name: [...]}, their extremes, divergences and a warning or ""."""
    began = time.time()
    data = paper_data(cell, effect) if analysis == "paper" else paired_data(cell, effect)
    centred = fewest(cell) >= MANY
    compiled, names = compiled_model(analysis, interaction, data, args.priors, centred, cache)
    seed = int(short_hash(args.seed, cell.experiment, cell.m, cell.n, effect, analysis, interaction), 16) % 2**31
    settings = {"seed": seed, "draws": args.draws, "tune": args.tune}
    settings["target_accept"] = TARGET_ACCEPT[analysis] if centred else SMALL_ACCEPT
    if centred and analysis == "paper":
        settings["step_size_jitter"] = STEP_JITTER
    rerun = {"draws": args.draws * RERUN_DRAWS, "tune": args.tune * RERUN_TUNE, "target_accept": max(RERUN_ACCEPT, settings["target_accept"])}
    for changes in ({}, rerun):
        draws, divergences = sample(compiled, names, args, **settings | changes)
        if analysis == "paired":
            draws["delta"] = draw_delta(draws, data, np.random.default_rng(seed))
        else:
            redraw_units(draws, data, seed, args.cores)
        r_hat, ess = {}, {}
        for name, values in draws.items():
            r_hat[name], ess[name] = convergence(values)
        worst, least = max(values.max() for values in r_hat.values()), min(values.min() for values in ess.values())
        warning = f"not converged: r_hat {worst:.4f}, ESS {least:.0f}, divergences {divergences}"
        if worst <= MAX_R_HAT and least >= MIN_ESS and not divergences:
            warning = ""
            break
    return SimpleNamespace(cell=cell, effect=effect, analysis=analysis, interaction=interaction, draws=draws, r_hat=r_hat, ess=ess, worst=worst,
                           least=least, divergences=divergences, warning=warning, seconds=time.time() - began, rerun=bool(changes))


def flat(draws):
    """Draws [chain, draw, ...] with the chains joined: [sample, ...]."""
    return draws.reshape(-1, *draws.shape[2:])


def predict(result, seed, threads):
    """Posterior predictive accuracies in points, [sample, model, arm, task]: means over subsamples, made draw by draw.

    One dataset of counts is drawn per posterior draw; only its means over subsamples are kept."""
    cell, draws = result.cell, {name: flat(values) for name, values in result.draws.items()}
    samples = len(draws["beta"])
    effects = draws["d"] if "d" in draws else np.repeat(draws["beta"][:, None], len(cell.tasks), 1)
    alpha = np.concatenate([np.zeros((samples, 1)), draws.get("alpha", np.zeros((samples, 0)))], axis=1)
    answers = np.maximum(task_sums(cell.total, cell), 1)
    parts = np.array_split(np.arange(samples), math.ceil(samples * cell.total.size / 200_000))
    means = np.empty((samples, len(cell.models), 2, len(cell.tasks)))

    def fill(part, source):
        rng, base = np.random.default_rng(source), draws["c"][part][:, None] + alpha[part][:, :, None]
        for arm, sign in enumerate((-0.5, 0.5)):
            share = special.expit(base + sign * effects[part][:, None, cell.task_idx])
            means[part, :, arm] = 100 * task_sums(rng.binomial(cell.total, share), cell) / answers

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, parts, np.random.SeedSequence(seed).spawn(len(parts))))
    means[:, task_sums(cell.total, cell).astype(bool)[:, None].repeat(2, 1) == 0] = np.nan
    return means


def task_effects(result):
    """Draws of the effect in points per model and task, [sample, model, task]: (12) of the predictive, or delta."""
    if result.analysis == "paper":
        return np.diff(result.predicted, axis=2)[:, :, 0]
    return np.where(task_sums(result.cell.total, result.cell) > 0, flat(result.draws["delta"]), np.nan)


# ------------------------------------------------------------------------------------------------------------
# From draws to tables
# ------------------------------------------------------------------------------------------------------------


def named_draws(result):
    """{parameter of posterior.csv: (draws, r_hat, ess)}: the model's own, then the effects (11) per model and overall."""
    cell, own = result.cell, {}
    for name in ("mu", "alpha", "beta", "sd_U", "sd_V", "sd_W", "tau", "s", "omega"):
        if name in result.draws:
            values, r_hat, ess = flat(result.draws[name]), result.r_hat[name], result.ess[name]
            labels = cell.models[1:] if name == "alpha" else cell.models
            if values.ndim == 1:
                own[name] = values, float(r_hat), float(ess)
            else:
                own |= {f"{name}[{label}]": (values[:, i], r_hat[i], ess[i]) for i, label in enumerate(labels)}
    name = MEAN_NAME[result.analysis]
    by_model = np.nanmean(task_effects(result), axis=2)
    effects = {name: by_model.mean(1)} | {f"{name}[{model}]": by_model[:, i] for i, model in enumerate(cell.models)}
    for label, values in effects.items():
        r_hat, ess = convergence(values.reshape(*result.draws["beta"].shape[:2]))
        own[label] = values, float(r_hat), float(ess)
    return own


def posterior_rows(result):
    """Rows of posterior.csv of one fit."""
    cell, rows = result.cell, []
    for parameter, (values, r_hat, ess) in result.named.items():
        low, high = hdi(values)
        rows.append({"experiment": cell.experiment, "m": cell.m, "n": cell.n, "effect": result.effect, "analysis": result.analysis,
                     "interaction": "" if result.analysis == "paired" else int(result.interaction), "parameter": parameter,
                     "mean": values.mean(), "sd": values.std(ddof=1), "hdi_low": low, "hdi_high": high, "r_hat": r_hat,
                     "ess_bulk": ess, "warning": result.warning})
    return rows


def t_rows(cell, effect):
    """Rows of posterior.csv with the observed means over tasks, sd = standard error, and their 89 % paired-t intervals."""
    means = task_means(points(cell, effect), cell)
    values = {"mean": means.mean(0)} | {f"mean[{model}]": means[i] for i, model in enumerate(cell.models)}
    rows = []
    for parameter, column in values.items():
        mean, error, low, high = t_interval(column)
        rows.append({"experiment": cell.experiment, "m": cell.m, "n": cell.n, "effect": effect, "analysis": "t",
                     "parameter": parameter, "mean": mean, "sd": error, "hdi_low": low, "hdi_high": high})
    return rows


def add_task_effects(rows, result):
    """Add a fit's effects per model and task to the rows of tasks.csv ({(model, task): row})."""
    effects = task_effects(result)
    for (i, model), (j, task) in itertools.product(enumerate(result.cell.models), enumerate(result.cell.tasks)):
        if (model, task) in rows:
            name, row = f"{result.effect}_{result.analysis}", rows[model, task]
            row[name] = effects[:, i, j].mean()
            row[f"{name}_low"], row[f"{name}_high"] = hdi(effects[:, i, j])
            row["warning"] = "; ".join(filter(None, (row.get("warning"), result.warning and f"{name} {result.warning}")))


def verdict(effect, draws):
    """One sentence on the draws of a mean effect in points."""
    low, high = hdi(draws)
    claim = "above 0" if low > 0 else "below 0" if high < 0 else "not told from 0"
    return (f"{draws.mean():+.2f} points, 89 % interval [{low:+.2f}, {high:+.2f}]: {claim}; "
            f"P({effect} > 0) = {(draws > 0).mean():.2f}, P(|{effect}| > 1 point) = {(np.abs(draws) > 1).mean():.2f}")


# ------------------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------------------


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


def percent_axis(axis):
    """Ticks like +2% for accuracy points on the x axis, and a line at 0."""
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:+g}%" if value else "0%")
    axis.axvline(0, color="grey", lw=1, ls="--", zorder=0)
    axis.grid(axis="x", alpha=0.3)


def draw_violin(axis, values, y, colour, width=0.8):
    """A horizontal violin of the values at height y (nothing if they are all equal)."""
    if len(values) >= 10 and np.ptp(values):
        for body in axis.violinplot(values, [y], orientation="horizontal", widths=width, showextrema=False)["bodies"]:
            body.set(facecolor=colour, alpha=0.35)


def draw_differences(cell, i, folder):
    """Figures 13 to 20: boost and bias of each subsample, per task, for model i."""
    plt = import_plots()
    height = 1.9 + 0.36 * len(cell.tasks)
    figure, axes = plt.subplots(1, 2, figsize=(11, height), sharey=True)
    figure.subplots_adjust(left=0.21, right=0.98, bottom=0.55 / height, top=1 - 0.95 / height, wspace=0.05)  # constrained: twice the time
    for axis, effect in zip(axes, EFFECTS):
        values = points(cell, effect)[i]
        for j in range(len(cell.tasks)):
            mine = values[(cell.task_idx == j) & (cell.total[i] > 0)]
            draw_violin(axis, mine, j, COLOURS[effect])
            axis.scatter(mine, j + np.linspace(-0.15, 0.15, len(mine)), s=5, color=COLOURS[effect], alpha=0.5, linewidths=0)
            if len(mine):
                axis.plot(mine.mean(), j, "D", ms=4, color="black")
        percent_axis(axis)
        axis.set(title=words(effect), xlabel="difference in accuracy")
    axes[0].set_yticks(range(len(cell.tasks)), cell.tasks)
    axes[0].set_ylim(len(cell.tasks) - 0.4, -0.6)
    title = f"{cell.models[i]}, {cell.title}\npoint: one subsample; diamond: mean of the task's subsamples"
    return finish(figure, title, folder / f"differences.{cell.file}.{cell.models[i].replace('/', '--')}.png")


def draw_accuracies(cell, i, folder):
    """Densities of the three accuracies of each task over its subsamples, for model i, with the mean majority share."""
    plt = import_plots()
    columns = min(5, len(cell.tasks))
    rows = math.ceil(len(cell.tasks) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(1.2 + 2.4 * columns, 1.6 + 1.6 * rows), squeeze=False)
    inch = 1 / (1.6 + 1.6 * rows)  # a constrained layout of so many panels takes seconds
    figure.subplots_adjust(left=0.03, right=0.98, bottom=0.62 * inch, top=1 - 0.75 * inch, hspace=0.75, wspace=0.12)
    for j, axis in enumerate(axes.flat):
        axis.set_yticks([])
        if j >= len(cell.tasks):
            axis.remove()
            continue
        mine = (cell.task_idx == j) & (cell.total[i] > 0)
        for arm, colour, counts in zip(ARMS, ("grey", "tab:blue", "tab:orange"), cell.counts[i]):
            share = 100 * counts[mine] / cell.total[i, mine]
            if len(share) > 2 and np.ptp(share):
                spread = 2 * share.std()
                x = np.linspace(max(share.min() - spread, 0), min(share.max() + spread, 100), 80)
                axis.plot(x, stats.gaussian_kde(share)(x), color=colour, label=f"acc_{arm}")
            else:
                axis.plot(share, np.zeros(len(share)), "|", ms=14, color=colour, label=f"acc_{arm}")
        if mine.any():
            axis.axvline(100 * cell.majority[mine].mean(), color="black", ls=":", lw=1.2, label="majority class")
        axis.locator_params(axis="x", nbins=4)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
        axis.set_title(cell.tasks[j], fontsize=8)
        axis.tick_params(labelsize=7)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    path = folder / f"accuracies.{cell.file}.{cell.models[i].replace('/', '--')}.png"
    return finish(figure, f"Accuracy over subsamples: {cell.models[i]}, {cell.title}", path)


def draw_marginal(results, folder):
    """Figures 3, 5, 6: the mean effects by n under each analysis; one figure per (experiment, m)."""
    plt = import_plots()
    analyses = [name for name in ("paper", "paired") if any(result.analysis == name for result in results)]
    cells = {result.cell.n: result.cell for result in results}
    lines = [(n, label) for n in sorted(cells) for label in (["all models"] if len(cells[n].models) > 1 else []) + cells[n].models]
    size = (1.5 + 5 * len(analyses), 2.1 + 0.42 * len(lines))
    figure, axes = plt.subplots(1, len(analyses), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, analysis in zip(axes[0], analyses):
        for result in (result for result in results if result.analysis == analysis):
            name = MEAN_NAME[analysis]
            for label in result.cell.models + ["all models"] * (len(result.cell.models) > 1):
                draws = result.named[name if label == "all models" else f"{name}[{label}]"][0]
                y = lines.index((result.cell.n, label)) + {"boost": -0.2, "bias": 0.2}[result.effect]
                draw_violin(axis, draws, y, COLOURS[result.effect], width=0.4)
                axis.plot(hdi(draws), [y, y], color=COLOURS[result.effect], lw=2.5)
                axis.plot(draws.mean(), y, "o", ms=4, color="black")
        percent_axis(axis)
        axis.set(title={"paper": "the paper's analysis (11)", "paired": "paired analysis"}[analysis])
        axis.set_xlabel("mean difference in accuracy over tasks")
    axes[0, 0].set_yticks(range(len(lines)), [f"n = {n}   {label}" for n, label in lines])
    axes[0, 0].set_ylim(len(lines) - 0.4, -0.6)
    for effect in dict.fromkeys(result.effect for result in results):
        axes[0, -1].plot([], [], color=COLOURS[effect], lw=2.5, label=words(effect))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    cell = next(iter(cells.values()))
    title = (f"{cell.experiment}, m = {cell.m} training texts, n test texts, {len(cell.tasks)} tasks\n"
             "violin: posterior; bar: 89 % interval; point: posterior mean")
    return finish(figure, title, folder / f"marginal.{cell.experiment}.m{cell.m}.png".replace("/", "--"))


def draw_flagged(tables, folder):
    """Figure 4: the observed bias of the lemon-picked tasks in every cell, beside what is left after shrinking."""
    flagged = sorted({(row["experiment"], row["task"]) for row in tables if row[f"flag_{FLAGS[0]}"]})
    if not flagged:
        print(f"no task has an observed bias of +{FLAGS[0]} points: no figure of flagged tasks")
        return None
    plt = import_plots()
    columns = min(3, len(flagged))
    groups = {name: [row for row in tables if (row["experiment"], row["task"]) == name] for name in flagged}
    height = max(map(len, groups.values()))
    grid = math.ceil(len(flagged) / columns)
    size = (2 + 3.4 * columns, 1.6 + grid * (0.7 + 0.25 * height))
    figure, axes = plt.subplots(grid, columns, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for axis, (name, rows) in itertools.zip_longest(axes.flat, groups.items(), fillvalue=(None, [])):
        if name is None:
            axis.remove()
            continue
        for y, row in enumerate(rows):
            axis.plot(row["bias_observed"], y, "o", mfc="none", color="black", label="observed mean" if y == 0 else None)
            for analysis, shift, style, name_of in (("paper", -0.2, "s", "paper's (12)"), ("paired", 0.2, "D", "paired")):
                if f"bias_{analysis}" in row:
                    look = {"color": COLOURS["bias"], "alpha": 0.5 if analysis == "paper" else 1}
                    axis.plot([row[f"bias_{analysis}_low"], row[f"bias_{analysis}_high"]], [y + shift] * 2, lw=1.5, **look)
                    label = f"{name_of}, 89 % interval" if y == 0 else None
                    axis.plot(row[f"bias_{analysis}"], y + shift, style, ms=3.5, label=label, **look)
        axis.set_yticks(range(len(rows)), [f"m {row['m']}, n {row['n']}, {row['model']}" for row in rows], fontsize=7)
        axis.set_ylim(height - 0.4, -0.6)
        axis.set_title(f"{name[1]} ({name[0]})", fontsize=9)
        percent_axis(axis)
        axis.xaxis.set_tick_params(labelbottom=True)
    for axis in figure.axes[-columns:]:
        axis.set_xlabel("acc_test − acc_extra")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    title = f"Bias of the tasks with an observed mean of at least +{FLAGS[0]}% in any cell, in all their cells\nm training texts, n test texts"
    return finish(figure, title, folder / "flagged_tasks.png")


def draw_correlations(rows, folder):
    """Figure 8: correlations between models over all cells and tasks, beside permuted nulls; one figure per experiment (from 3 on)."""
    if min(sum(row["effect"] == effect and not math.isnan(row["spearman"]) for row in rows) for effect in EFFECTS) < 3:
        return None
    plt = import_plots()
    experiment = rows[0]["experiment"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharex=True, sharey=True, layout="constrained")
    grid = np.linspace(-1, 1, 200)
    for axis, effect in zip(axes, EFFECTS):
        mine = [row for row in rows if row["effect"] == effect]
        for k in range(PERMUTATIONS, -1, -1):
            values = np.array([row[f"null_{k}" if k else "spearman"] for row in mine])
            values = values[~np.isnan(values)]
            if len(values) > 2 and np.ptp(values):
                style = {"color": "lightgrey", "lw": 1, "label": f"{PERMUTATIONS} permuted nulls" if k == 1 else None} if k else \
                    {"color": COLOURS[effect], "lw": 2.5, "label": f"observed, mean {values.mean():+.3f}"}
                axis.plot(grid, stats.gaussian_kde(values)(grid), **style)
        axis.set(title=words(effect), xlabel="Spearman correlation over subsamples")
        axis.set_yticks([])
        axis.legend(fontsize=8)
    axes[0].set_ylabel("density over tasks and cells")
    m, n = (", ".join(map(str, sorted({row[name] for row in rows}))) for name in ("m", "n"))
    title = f"{experiment}: effects of the same subsample on two models, m = {m} training texts, n = {n} test texts"
    return finish(figure, title, folder / f"correlations.{experiment}.png".replace("/", "--"))


def draw_calibration(results, folder):
    """Figures 9 and 10: predicted against observed task accuracies and task effects of a cell, with W and (if fitted) without."""
    plt = import_plots()
    cell = results[0].cell
    figure, axes = plt.subplots(2, len(results), figsize=(1 + 3.6 * len(results), 7.6), squeeze=False, layout="constrained")
    for (top, bottom), result in zip(axes.T, results):
        arms = [100 * task_means(cell.counts[:, ARMS.index(arm)] / np.maximum(cell.total, 1), cell) for arm in EFFECTS[result.effect]]
        predicted, change = np.nanmean(result.predicted, axis=0), np.nanmean(task_effects(result), axis=0)
        for i, (model, marker) in enumerate(zip(cell.models, itertools.cycle("os^Dv"))):
            colour = COLOURS[result.effect]
            style = {"ls": "", "marker": marker, "ms": 4, "mfc": "none" if i else colour, "color": colour, "label": model}
            top.plot(np.ravel(predicted[i]), np.ravel([arm[i] for arm in arms]), **style)
            bottom.plot(change[i], (arms[1] - arms[0])[i], **style)
        top.set_title(f"{result.effect}, {'with' if result.interaction else 'without'} W")
        top.set(xlabel="predicted accuracy", ylabel="observed accuracy")
        bottom.set(xlabel=f"predicted {result.effect}", ylabel=f"observed {result.effect}")
        for axis in (top, bottom):
            low, high = min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], axis.get_ylim()[1])
            axis.plot([low, high], [low, high], color="grey", lw=1, ls="--", zorder=0)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
            axis.set_aspect("equal", adjustable="datalim")
        top.legend(fontsize=8)
    title = f"Is the paper's model calibrated? {cell.title}\npoint: a task and a model (top: and an arm), mean over subsamples"
    return finish(figure, title, folder / f"calibration.{cell.file}.png")


def draw_traces(results, path):
    """Figure 12: densities and traces of beta, one row per fit, one line per chain."""
    plt = import_plots()
    shown = [(result, i) for result in results for i in range(1 if result.draws["beta"].ndim == 2 else len(result.cell.models))]
    figure, axes = plt.subplots(len(shown), 2, figsize=(10, 1.2 + 1.7 * len(shown)), squeeze=False, layout="constrained")
    for (left, right), (result, i) in zip(axes, shown):
        beta = result.draws["beta"] if result.draws["beta"].ndim == 2 else result.draws["beta"][..., i]
        grid = np.linspace(beta.min(), beta.max(), 150)
        for chain in beta:
            left.plot(grid, stats.gaussian_kde(chain)(grid), color=COLOURS[result.effect], alpha=0.6)
            right.plot(chain, color=COLOURS[result.effect], lw=0.4, alpha=0.6)
        left.axvline(0, color="grey", lw=1, ls="--")
        left.set_yticks([])
        name = {"paper": f"paper, {'with' if result.interaction else 'without'} W (log odds)", "paired": f"paired, {result.cell.models[i]} (points)"}
        left.set_title(f"beta of {result.effect}: {name[result.analysis]}", fontsize=9)
        right.set_title(f"all parameters: max r_hat {result.worst:.3f}, min ESS {result.least:.0f}, divergences {result.divergences}", fontsize=9)
    axes[-1, 0].set_xlabel("beta")
    axes[-1, 1].set_xlabel("draw")
    return finish(figure, f"Posterior of beta by chain: {results[0].cell.title}", path)


# ------------------------------------------------------------------------------------------------------------
# Checks by simulation
# ------------------------------------------------------------------------------------------------------------


def prior_predictive(priors, samples, rng, tasks=25, models=2, subsamples=50, n=200):
    """Draws from the paper's model before any data, at the shape of Figure 11: (accuracies of units, effects (11)) in points."""
    accuracies, effects = [], []
    for _ in range(samples):
        sd_u, sd_v, sd_w = np.abs(rng.normal(0, [1, 1, 3.5355]))
        mu, beta = rng.normal(0, priors["mu"]), rng.normal(0, priors["beta"])
        alpha = np.concatenate([[0], rng.normal(0, 5, models - 1)])
        base = mu + alpha[:, None, None] + rng.normal(0, sd_u, (tasks, 1)) + rng.normal(0, sd_v, (tasks, subsamples))
        shares = [special.expit(base + arm * beta + rng.normal(0, sd_w, (tasks, 1))) for arm in (0, 1)]
        control, treatment = (100 * rng.binomial(n, share) / n for share in shares)
        accuracies.append(control[0, 0])
        effects.append((treatment - control).mean())
    return np.concatenate(accuracies), np.array(effects)


def check_prior(args):
    """Figure 11: what the priors of beta say about accuracies and mean effects."""
    plt = import_plots()
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex="col", layout="constrained")
    for row, sd in zip(axes, (PRIORS["paper"]["beta"], PRIORS["wide"]["beta"])):
        accuracies, effects = prior_predictive({"mu": 1, "beta": sd}, 1000, np.random.default_rng(args.seed))
        for axis, values, name in zip(row, (accuracies, effects), ("accuracy of a subsample, control arm", "mean effect (11)")):
            axis.hist(values, 40, density=True, color="tab:blue", alpha=0.6)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
            axis.set(title=f"beta ~ Normal(0, {sd:g})", xlabel=name, yticks=[])
        low, high = hdi(effects)
        print(f"prior beta ~ Normal(0, {sd:g}): 89 % of the mean effects lie in [{low:+.1f}, {high:+.1f}] points")
    title = "Prior predictive of the paper's model: m = 100, n = 200, 25 tasks, 2 models, 50 subsamples"
    path = finish(figure, title, args.out / "prior.png")
    print(f"plot: {path.resolve()}")


def simulate_cell(rng, tasks, models, subsamples, n, boost, bias, tau=0.5, m=100):
    """(cell, {effect: true effects in points [models, tasks]}) from a mechanism that is neither of the fitted models.

    Each training run draws its own luck, with a spread that differs by model (the first is noisy, the second quiet, and so on) and
    task; levels differ by task, model within task, and subsample; the arms are tested on the same texts, each text being as easy
    for all arms or not. Accuracies stay inside 0 to 1, so the expected difference of two arms is exactly the true effect."""
    shape = (models, tasks, subsamples)
    loud = np.resize([0.05, 0.012], models)[:, None]
    luck = np.minimum(loud * np.exp(rng.normal(0, 0.6, shape[:2])), 0.08)  # sd of a run's accuracy
    shared = np.resize([0.3, 0.8], models)  # share of the texts that are equally easy for both arms of a model
    level = rng.uniform(0.38, 0.7, (tasks, 1)) + rng.uniform(-0.05, 0.05, shape[1:]) + rng.uniform(-0.05, 0.05, (models, tasks, 1))
    effects = {name: mean + rng.normal(0, tau, shape[:2]) for name, mean in (("boost", boost), ("bias", bias))}
    start = level - effects["boost"][..., None] / 200
    arms = [start, start + effects["boost"][..., None] / 100, start + (effects["boost"] + effects["bias"])[..., None] / 100]
    counts = np.zeros((models, 3, tasks * subsamples), int)
    for i in range(models):
        common = rng.random((tasks, subsamples, n))  # how hard each text is
        for arm, share in enumerate(arms):
            run = share[i] + luck[i][:, None] * rng.uniform(-math.sqrt(3), math.sqrt(3), shape[1:])
            hard = np.where(rng.random(common.shape) < shared[i], common, rng.random(common.shape))
            counts[i, arm] = (hard < run[..., None]).sum(-1).ravel()
            assert 0 <= run.min() and run.max() <= 1
    names = [f"task {j + 1:02}" for j in range(tasks)]
    return SimpleNamespace(
        experiment="simulation", m=m, n=n, models=[f"model {i + 1}" for i in range(models)], tasks=names, counts=counts,
        total=np.full((models, tasks * subsamples), n), majority=np.full(tasks * subsamples, 0.5), num_classes=dict.fromkeys(names, 2),
        task_idx=np.repeat(range(tasks), subsamples), subsample=np.tile(range(1, subsamples + 1), tasks), splits_differ=[],
        title=f"simulation, m = {m} training texts, n = {n} test texts", file=f"simulation.m{m}.n{n}"), effects


def mean_intervals(cell, effect, args, cache):
    """{(analysis, "mean" or model): (low, high)} of the mean effect in points: each analysis asked for, and the paired t."""
    found = {}
    for analysis in args.analysis:
        result = analyse(cell, effect, analysis, True, args, cache)
        name = MEAN_NAME[analysis]
        for label in ("mean", *cell.models):
            found[analysis, label] = hdi(result.named[name if label == "mean" else f"{name}[{label}]"][0])
    for row in t_rows(cell, effect):
        found["t", row["parameter"].removeprefix("mean[").removesuffix("]")] = row["hdi_low"], row["hdi_high"]
    return found


def check_simulation(args):
    """Figure 12: is a boost of 3 points recovered, and a bias of 0? Then: how often do the intervals cover the truth?"""
    cache, rng = {}, np.random.default_rng(args.seed)
    cell, truth = simulate_cell(rng, 25, 2, 50, 200, boost=3, bias=0)
    print(f"one data set: {cell.title}, 25 tasks, 2 models, 50 subsamples")
    results = [analyse(cell, effect, analysis, True, args, cache) for effect in EFFECTS for analysis in args.analysis]
    for result in results:
        draws = result.named[MEAN_NAME[result.analysis]][0]
        print(f"  {result.effect}, {result.analysis}: truth {truth[result.effect].mean():+.2f}; {verdict(result.effect, draws)}{warned(result)}")
    print(f"plot: {draw_traces(results, args.out / 'simulation_trace.png').resolve()}")

    covered = {}
    for _ in tqdm(range(args.simulations), desc="coverage", leave=False):
        cell, truth = simulate_cell(rng, 8, 2, 10, 100, boost=3, bias=0)
        for effect in args.effects:
            for (analysis, label), (low, high) in mean_intervals(cell, effect, args, cache).items():
                true = truth[effect].mean() if label == "mean" else truth[effect][cell.models.index(label)].mean()
                covered.setdefault((effect, analysis, label), []).append(low <= true <= high)
    print(f"coverage of the mean effect by 89 % intervals, {args.simulations} data sets of 8 tasks, 2 models, 10 subsamples, n = 100:")
    for (effect, analysis, label), hits in covered.items():
        print(f"  {effect:<6} {analysis:<7} {label:<8} {np.mean(hits):.2f}")


# ------------------------------------------------------------------------------------------------------------
# What is printed and written
# ------------------------------------------------------------------------------------------------------------


def warned(result):
    """The warning of a fit as words to append."""
    return f"  WARNING: {result.warning}" if result.warning else ""


# --- shared: write_table ---
def write_table(path, rows, columns=None):
    """Rows (dicts) as a CSV file, whole or not at all."""
    header = list(columns or dict.fromkeys(name for row in rows for name in row))
    replace_file(path, ",".join(header) + "\n" + to_csv(header, rows))
# --- end shared ---


def print_means(rows):
    """Table 1: mean boost and bias over tasks in percent, with standard errors over the tasks' means."""
    print("\nTable 1: means over tasks in percent, ± one standard error over the tasks' means (the paper rounds three decimals to one or two)")
    print(f"{'experiment':<18} {'m':>5} {'n':>5} {'model':<14} {'tasks':>5} {'subsamples':>10} {'boost':>17} {'median':>8} "
          f"{'bias':>16} {'median':>8}")
    for row in sorted(rows, key=lambda row: (row["experiment"], row["m"], row["n"])):
        effects = "".join(f"{100 * row[f'{e}_mean']:>+9.3f} ±{100 * row[f'{e}_se']:6.3f} {100 * row[f'{e}_median']:>+8.3f}" for e in EFFECTS)
        print(f"{row['experiment']:<18} {row['m']:>5} {row['n']:>5} {row['model']:<14} {row['tasks']:>5} {row['subsamples']:>10} "
              f"{effects.replace('±   nan', '       ')}")


def print_tasks(tables, pooled, losses):
    """Signs of the pooled task means, flagged tasks and tests; losses where two experiments share subsamples."""
    print("\nTasks, averaged over cells and models: effects above, at and below 0 (compared as exact fractions)")
    for experiment in sorted({row["experiment"] for row in pooled}):
        for effect in EFFECTS:
            mine = [row for row in pooled if row["experiment"] == experiment]
            signs = [sum(row[f"{effect}_sign"] == sign for row in mine) for sign in (1, 0, -1)]
            low, high = min(mine, key=lambda row: row[effect]), max(mine, key=lambda row: row[effect])
            print(f"{experiment:<18} {effect:<6} {signs[0]} positive, {signs[1]} zero, {signs[2]} negative; "
                  f"from {low[effect]:+.2f} ({low['task']}) to {high[effect]:+.2f} points ({high['task']})")
    for flag in FLAGS:
        flagged = sorted({row["task"] for row in tables if row[f"flag_{flag}"]})
        print(f"observed bias of at least +{flag} points in some cell: {', '.join(flagged) or 'no task'}")
    small = [row for row in tables if row["p_bh"] < 0.05]
    print(f"sign-flip tests of a positive bias: {len(tables)}; adjusted p below .05: {len(small)}; "
          f"smallest adjusted p {min(row['p_bh'] for row in tables):.3f}")
    for pair in sorted({(row["first"], row["second"]) for row in losses}):
        mine = [row for row in losses if (row["first"], row["second"]) == pair]
        extra, test = (np.mean([row[name] for row in mine]) for name in ("ratio_extra", "ratio_test"))
        print(f"final pretraining loss of {pair[1]} over that of {pair[0]}: {extra:.3f} (extra), {test:.3f} (test), "
              f"mean over {len(mine)} cells and tasks; lower in {100 * np.mean([row['lower'] for row in mine]):.0f} % of the subsamples and arms")


def summary(rows):
    """The mean effects of posterior.csv as a Markdown table: observed with its t interval, the paper's (11), the paired mean."""
    cells = {}
    for row in rows:
        kind, _, model = row["parameter"].removesuffix("]").partition("[")
        if kind in ("mean", "difference"):
            key = (row["experiment"], row["m"], row["n"], row["effect"], model or "all models")
            cells.setdefault(key, {})[row["analysis"]] = f"{row['mean']:+.2f} [{row['hdi_low']:+.2f}, {row['hdi_high']:+.2f}]"
    alone = {key[:4] for key in cells} - {key[:4] for key in cells if sum(other[:4] == key[:4] for other in cells) > 2}
    cells = {key: cell for key, cell in cells.items() if key[4] != "all models" or key[:4] not in alone}  # one model: all is that model
    names = [name for name in ("t", "paper", "paired") if any(name in cell for cell in cells.values())]
    titles = {"t": "observed, paired t", "paper": "paper's analysis (11)", "paired": "paired analysis"}
    lines = [["experiment", "m", "n", "effect", "model", *(titles[name] for name in names)]]
    lines += [["---"] * len(lines[0])] + [[*key, *(cell.get(name, "") for name in names)] for key, cell in cells.items()]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def print_verdicts(results):
    """Per effect and cell, overall and per model: the verdict of our analysis, the paper's (11) and the paired t beside it."""
    cell = results[0].cell
    print(f"\n{cell.title}")
    for effect in dict.fromkeys(result.effect for result in results):
        mine = {result.analysis: result for result in results if result.effect == effect and not result.aside}
        for label in ["all models"] * (len(cell.models) > 1) + cell.models:
            for analysis in [name for name in ("paired", "paper") if name in mine]:
                name = MEAN_NAME[analysis]
                draws = mine[analysis].named[name if label == "all models" else f"{name}[{label}]"][0]
                print(f"  {effect:<6} {label:<12} {analysis:<7} {verdict(effect, draws)}")
            (row,) = [row for row in t_rows(cell, effect) if row["parameter"] == ("mean" if label == "all models" else f"mean[{label}]")]
            interval = "no interval from one task" if math.isnan(row["sd"]) else f"89 % paired-t interval [{row['hdi_low']:+.2f}, {row['hdi_high']:+.2f}]"
            print(f"  {effect:<6} {label:<12} {'t':<7} {row['mean']:+.2f} points observed, {interval}")
    for result in results:
        name = result.analysis + ("" if result.analysis == "paired" or result.interaction else " without W")
        print(f"  fit {result.effect}, {name}: max r_hat {result.worst:.3f}, min ESS {result.least:.0f}, divergences {result.divergences}, "
              f"{result.seconds:.1f} s{' (rerun once)' * result.rerun}{warned(result)}")


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
    add("--effects", nargs="+", choices=tuple(EFFECTS), default=list(EFFECTS), help="(boost bias)")
    add("--analysis", nargs="+", choices=("paper", "paired"), default=["paper", "paired"], help="(paper paired)")
    add("--priors", choices=tuple(PRIORS), default="paper", help="of the paper's model; wide: sd 1.5 for mu, 5 for beta (%(default)s)")
    add("--no-interaction", action="store_true", help="the paper's model without W, as in its earlier drafts")
    for flag, kind in (("experiment", str), ("m", int), ("n", int), ("models", str), ("tasks", str)):
        name = flag.removesuffix("s")
        add(f"--{flag}", nargs="+", type=kind, metavar=name.upper(), help=f"only these values of {name} (all)")
    add("--check", choices=("prior", "simulation"), help="no data: what the priors say; whether known effects are recovered")
    add("--simulations", type=positive, default=50, metavar="N", help="small data sets of --check simulation (%(default)s)")
    add = parser.add_argument_group("sampling").add_argument
    add("--draws", type=int, default=1000, metavar="N", help="per chain, after tuning; 0: no fits, only the observed (%(default)s)")
    add("--tune", type=positive, default=500, metavar="N", help="tuning steps per chain (%(default)s)")
    add("--chains", type=positive, default=4, metavar="N", help="(%(default)s)")
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    add("--cores", type=positive, default=os.cpu_count() or 1, metavar="N", help="chains at once (all of the machine's)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("fits"), metavar="FOLDER", help="tables and figures (%(default)s)")
    add("--no-figures", action="store_true", help="tables only")
    return parser.parse_args(argv)


# --- shared: positive ---
def positive(text):
    """A whole number from 1 to a billion."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
# --- end shared ---


def prepare(args):
    """Check what can be checked before any reading: sampling sizes, the output folder, the sampler."""
    if args.draws and (args.draws < 10 or args.chains < 2):
        stop(f"--draws {args.draws} --chains {args.chains}: convergence needs at least 2 chains of 10 draws; 0 draws fit nothing")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / ".try").touch()
        (args.out / ".try").unlink()
    except OSError as error:
        stop(f"--out {args.out} cannot be written ({error.strerror}): give another folder")
    if args.draws and importlib.util.find_spec("nutpie") is None:
        stop("nutpie, the sampler, is not installed: pip install -r requirements.txt, or give --draws 0")


def analyse(cell, effect, analysis, interaction, args, cache, aside=False):
    """Fit, predict and summarise one analysis of one effect in one cell; large draws are dropped. aside: for a figure only."""
    result = fit(cell, effect, analysis, interaction and len(cell.tasks) >= FEWEST_TASKS and analysis == "paper", args, cache)
    if analysis == "paper":
        seed = int(short_hash(args.seed, cell.file, effect, "predictive"), 16)
        result.predicted = predict(result, seed, args.cores)
    result.named, result.aside = named_draws(result), aside
    result.draws = {name: result.draws[name] for name in ("beta", "delta") if name in result.draws}
    return result


def fit_cell(cell, args, cache, compare):
    """All fits of a cell: effects x analyses; compare: the paper's also without W, for Figures 9 and 10."""
    results = []
    for effect, analysis in itertools.product(args.effects, dict.fromkeys(args.analysis)):
        results.append(analyse(cell, effect, analysis, not args.no_interaction, args, cache))
        if compare and analysis == "paper" and results[-1].interaction:
            results.append(analyse(cell, effect, "paper", False, args, cache, aside=True))
    return results


def observed_report(cells, rows, args):
    """Tables and figures that need no fit; returns ({cell file: {(model, task): row of tasks.csv}}, paths)."""
    tables = {cell.file: observed_tasks(cell) for cell in cells}
    every = [row for table in tables.values() for row in table.values()]
    means, pooled, losses = means_table(cells), pooled_tasks(cells), losses_table(rows)
    correlations = correlations_table(cells, args.seed)
    print_means(means)
    print_tasks(every, pooled, losses)
    write_table(args.out / "means.csv", means, MEANS_COLUMNS)
    write_table(args.out / "tasks.csv", every)
    write_table(args.out / "task_means.csv", pooled)
    if losses:
        write_table(args.out / "losses.csv", losses)
    if correlations:
        write_table(args.out / "correlations.csv", correlations)
    figures = []
    if not args.no_figures:
        figures += [draw_differences(cell, i, args.out) for cell in cells for i in range(len(cell.models))]
        for experiment in sorted({row["experiment"] for row in correlations}):
            figures.append(draw_correlations([row for row in correlations if row["experiment"] == experiment], args.out))
    return tables, figures


def spare_memory():
    """Linux: two pools for small blocks instead of one per thread, and blocks from 1 MB on go back when freed."""
    with contextlib.suppress(OSError, AttributeError):
        for option, value in ((-8, 2), (-3, 2**20), (-1, 2**25)):  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL("libc.so.6").mallopt(option, value)


def fitted_report(cells, tables, args):
    """Fit every cell, print the verdicts, write posterior.csv and predictive.npz; returns (results, paths of figures)."""
    results, rows, aside, arrays, figures, cache = [], [], [], {}, [], {}
    largest = {(cell.experiment, cell.m): cell.n for cell in cells}
    bar = tqdm(cells, desc="cells", leave=False)
    for cell in bar:
        bar.set_postfix_str(cell.title)
        mine = fit_cell(cell, args, cache, compare=not args.no_figures and cell.n == largest[cell.experiment, cell.m])
        with tqdm.external_write_mode():
            print_verdicts(mine)
        for result in mine:
            (aside if result.aside else rows).extend(posterior_rows(result))
            if not result.aside:
                add_task_effects(tables[cell.file], result)
            name = "/".join(map(str, (cell.experiment, cell.m, cell.n, result.effect, result.analysis, int(result.interaction))))
            arrays[f"{name}/tasks"] = np.float32(task_effects(result))
            arrays[f"{name}/mean"] = np.float32(result.named[MEAN_NAME[result.analysis]][0])
        rows += [row for effect in args.effects for row in t_rows(cell, effect)]
        if not args.no_figures:
            figures += [draw_accuracies(cell, i, args.out) for i in range(len(cell.models))]
            figures.append(draw_traces(mine, args.out / f"trace.{cell.file}.png"))
            if paper := [result for result in mine if result.analysis == "paper"]:
                figures.append(draw_calibration(paper, args.out))
        results += mine
        write_table(args.out / "posterior.csv", rows + aside, POSTERIOR_COLUMNS)
        write_table(args.out / "tasks.csv", [row for table in tables.values() for row in table.values()])
    np.savez_compressed(args.out / "predictive.npz", **arrays)
    replace_file(args.out / "summary.md", summary(rows))
    return results, figures


def main(argv=None):
    args = parse_args(argv)
    prepare(args)
    spare_memory()
    if args.check:
        return {"prior": check_prior, "simulation": check_simulation}[args.check](args)

    # Everything that can be wrong with the data is found before anything is fitted.
    rows = choose_rows(read_rows(args.paths), args)
    cells = build_cells(rows)
    for cell in cells:
        describe(cell)
    tables, figures = observed_report(cells, rows, args)
    results = []
    if args.draws:
        results, drawn = fitted_report(cells, tables, args)
        figures += drawn

    # Figures over several cells
    if not args.no_figures:
        shown = [result for result in results if not result.aside]
        for name in dict.fromkeys((result.cell.experiment, result.cell.m) for result in shown):
            figures.append(draw_marginal([result for result in shown if (result.cell.experiment, result.cell.m) == name], args.out))
        figures.append(draw_flagged([row for table in tables.values() for row in table.values()], args.out))
    print(f"\ntables: {', '.join(sorted(path.name for path in args.out.glob('*.csv')))}, in {args.out.resolve()}")
    for path in filter(None, figures):
        print(f"figure: {path.resolve()}")
    if failed := sum(bool(result.warning) for result in results):
        tqdm.write(f"warning: {failed} of {len(results)} fits did not converge; their rows say so (more --tune and --draws may help)",
                   file=sys.stderr)
        raise SystemExit(3)


# --- shared: guard ---
if __name__ == "__main__":
    main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
