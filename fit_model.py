"""From results.csv to conclusions: is pretraining on unlabeled test text unfair, and how sure can one be?

Reproduces sections 5 to 8 and appendices D to F of "Evaluating the fairness of task-adaptive pretraining on unlabeled
test data before few-shot text classification" (Dubey) and adds intervals that hold what they say. m labelled training
texts, n unlabelled and n test texts; D_ijk of model i, task j, subsample k, in points (hundredths of an accuracy), is
    boost = acc_extra - acc_base      or      bias = acc_test - acc_extra
A cell is one (experiment, m, n). Four answers, always under these names; all intervals hold 89 %:
    these tasks       the headline, closed form: the mean over tasks of the tasks' mean differences; standard error
                      sqrt(sum v_j) / J, v_j = max(s_j^2, (100 / n)^2 / 12) / K_j, s_j^2 the variance of D between
                      task j's K_j subsamples; Student t with Satterthwaite's degrees of freedom. All models
                      together: D is averaged over them first. It needs two subsamples of every task
    tasks like these  a t interval over the J task means: tasks as a sample of tasks
    paper             Y_ijkl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + V_jk + W_jl + beta l (l = 0 control, 1
                      treatment), equations (1) to (10); its predictive mean differences (11) and (12). For
                      reproduction: its intervals do not hold 89 %
    hierarchical      D_ijk ~ N(delta_ij, s_ij), delta_ij ~ N(beta_i, tau_i), log s_ij ~ N(log s_i, omega_i): how much
                      tasks differ, one task's effect after shrinking. It weights quiet tasks most: no headline

Commands, cheapest first
    python fit_model.py results.csv --draws 0                    # conclusions, tables, figures, no sampler: seconds
    python fit_model.py results.csv --plan                       # how many subsamples are needed
    python fit_model.py results.csv                              # everything
    python fit_model.py results.csv --metric f1 --margin 2       # any columns NAME_base, NAME_extra, NAME_test
    python fit_model.py results.csv more.csv folder --effects bias --n 500 --out fits
    python fit_model.py accuracies            # the published layout, accuracies/m50/n500/bert/ag_news/accuracies.csv

Writes to fits/ summary.md, which a person reads first, figures *.png, and tables with the columns
    effects.csv       experiment, m, n, metric, effect, model (all: mean over models), target (the names above), tasks,
                      subsamples (fewest of a task), estimate, se, df, low, high, margin, verdict, needed (subsamples a
                      task until the half-width is below the margin), detectable (told from 0 with 80 % power)
    means.csv         experiment, model, m, n, tasks, rows, boost, boost_median, bias, bias_median: Table 1
    tasks.csv         experiment, m, n, effect, model, task, subsamples, estimate, sd, majority, low, high, p (one-sided
                      sign-flip test of a bias), p_adjusted (Benjamini-Hochberg in cell and model), flag_3, flag_2 (bias
                      from +3, +2 points); after the fits paper, paper_low, paper_high ((12)), the same of
                      hierarchical, p_beyond (P(|delta| > margin))
    losses.csv        first, second, model, m, n, task, subsamples, ratio_extra, ratio_test: final pretraining losses
                      of one experiment over those of another at the same subsamples (section 8)
    correlations.csv  experiment, m, n, effect, task, model_a, model_b, subsamples, spearman (appendix F)
    posterior.csv     experiment, m, n, effect, analysis, parameter, mean, sd, hdi_low, hdi_high, r_hat, ess_bulk,
                      ess_tail, warning
    plan.csv          experiment, m, n, model, quantity, test_set, tasks, subsamples, mean, sd (of one subsample of a
                      task), half_width, needed, needed_low, needed_high
Exit status 3 if a fit did not converge: its rows and the output say so.

Measured 2026-11-21 on 2 cores with other work beside it (Python 3.11, versions of requirements.txt), published
accuracies: --draws 0 --no-figures, all 27,500 rows, 2.9 s from the start of Python; one fit of the paper's model 70
to 96 s at n = 50 and 100 (10,000 counts), 24 s at n = 500 once a cell of its shape is compiled. Bias of both models,
m = 50, n = 500: these tasks +0.20 [-0.15, +0.55], tasks like these +0.20 [-0.29, +0.69], paper +0.20 [-0.00, +0.39],
hierarchical +0.11 [-0.12, +0.36]. Coverage of these tasks: docs/results.md.
"""

import argparse
import contextlib
import csv
import io
import itertools
import math
import os
import re
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
from scipy import optimize, special, stats
from tqdm.auto import tqdm

COLOURS = {"boost": "tab:blue", "bias": "tab:orange"}
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
TARGET_ACCEPT = {"paper": 0.8, "hierarchical": 0.9}
CENTRED = {"paper": 5, "hierarchical": 10}  # tasks from which c_jk, log s_ij are sampled centred: spread away from 0
RERUN = (0.99, 4, 2)  # of the one rerun of a fit that did not converge: target, times the tuning, times the draws
PRIORS = {"paper": (1.0, 1.0), "wide": (1.5, 5.0)}  # sd of mu and beta; wide: the sensitivity check of appendix E
FEWEST_TASKS = 5  # below, the paper's W is dropped, and what needs many tasks is not shown
FLAGS = (3, 2)  # points of bias from which a task is lemon-picked (section 7, appendix E)
CEILING = 0.95  # accuracy above which there is little room for an effect
POWER = 0.8
SHOWN = 40  # tasks in a figure
CELL = ["experiment", "m", "n"]
GROUP = [*CELL, "effect", "model"]
COMPILED = {}  # models by analysis and shape
POSTERIOR = [*CELL, "effect", "analysis", "parameter", "mean", "sd", "hdi_low", "hdi_high", "r_hat", "ess_bulk",
             "ess_tail", "warning"]


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


# --- shared: reading ---
ARMS = ("base", "extra", "test")
EFFECTS = {"boost": ("base", "extra"), "bias": ("extra", "test")}  # control, treatment
RUN = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # names a row
WHOLE = ["m", "n", "subsample", "num_classes", "seed"]
REQUIRED = [*RUN[:-1], "num_classes", "majority", *(f"acc_{arm}" for arm in ARMS)]


def refuse(table, bad, what):
    """Stop at the first of the bad rows; what: a format string of the row's columns."""
    if bad.any():
        row = table[bad].iloc[0]
        stop(f"{row['where']}: {what.format(**row)}: correct or delete the line")


def read_file(path):
    """A CSV file as a DataFrame of str with the column `where` (file, line); a torn last line is left out, and said."""
    raw = path.read_bytes()
    try:
        reader = csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline=""), strict=True)
        lines = [(f"{path}, line {reader.line_num}", *line) for line in reader if any(line)]
    except (UnicodeDecodeError, csv.Error) as error:
        stop(f"{path} is no CSV file in UTF-8 ({error}): give a results file, as run_experiment.py writes it")
    header = ["where", *(name.strip() for name in (lines or [("",)])[0][1:])]
    if twice := [name for name in header if header.count(name) > 1]:
        stop(f"{path} has two columns {twice[0]!r}: delete or rename one")
    if len(lines) > 1 and len(lines[-1]) < len(header) and raw[-1:] not in b"\r\n":  # what a killed run leaves at most
        print(f"{path}: the last line is torn (its run was killed); it is left out")
        lines.pop()
    for where, *fields in lines:
        if len(fields) != len(header) - 1:
            stop(f"{where}: {count(len(fields), 'field')} where the header has {len(header) - 1}: correct or delete it")
    return pd.DataFrame(lines[1:], columns=header, dtype=str)


def read_published(folder):
    """Tables of folder/m50/n500/bert/ag_news/accuracies.csv and its like: row k is subsample k."""
    for path in sorted(folder.glob("m*/n*/*/*/accuracies.csv")):
        m, n, model, task = path.parts[-5:-1]
        table = read_file(path).rename(columns={arm: f"acc_{arm}" for arm in ARMS})
        names = {"experiment": folder.resolve().name, "model": model, "task": task, "m": m[1:], "n": n[1:]}
        yield table.assign(**names, subsample=[str(k) for k in range(1, len(table) + 1)])


def read_path(path):
    """Tables of a results file, of a folder's results.csv and results.*-of-*.csv, or of one in the published layout."""
    if not path.exists():
        stop(f"{path} does not exist: give results files of run_experiment.py, or folders of them")
    if not path.is_dir():
        return [read_file(path)]
    files = [file for name in ("results.csv", "results.*-of-*.csv") for file in sorted(path.glob(name))]
    if not (tables := [*map(read_file, files), *read_published(path)]):
        stop(f"{path} holds no results.csv, results.*-of-*.csv, m<m>/n<n>/<model>/<task>/accuracies.csv: name a file")
    return tables


def read_results(paths, metric="acc"):
    """All rows of the paths as one DataFrame, typed and checked, each run once; accuracies become k / n exactly.

    The columns right_{arm} hold k, the number of correct answers. Conflicting rows and mixed recipes are refused."""
    tables, wanted = [table for path in paths for table in read_path(path)], [f"{metric}_{arm}" for arm in ARMS]
    for table in tables:
        if missing := [name for name in REQUIRED + wanted if name not in table]:
            where = table["where"].iloc[0].rpartition(", line")[0] if len(table) else "a file without rows"
            stop(f"{where} has no column {missing[0]!r}; columns found: {', '.join(table.columns.drop('where'))}")
    rows = pd.concat(tables, ignore_index=True)
    if rows.empty:
        stop(f"no rows in {', '.join(map(str, paths))}: run run_experiment.py first")
    for name in ("seed", "split", "data", "recipe", "loss_extra", "loss_test"):
        rows[name] = rows[name].fillna("") if name in rows else ""
    rows["seed"] = rows["seed"].replace("", "0")
    for name in dict.fromkeys([*WHOLE, "majority", *REQUIRED[-3:], *wanted]):
        values = pd.to_numeric(rows[name], errors="coerce")
        refuse(rows, ~np.isfinite(values), f"{name} is {{{name}!r}}, not a number")
        if name in WHOLE:
            bad = (values % 1 != 0) | (values < (name != "seed")) | (values > 1e9)
            refuse(rows, bad, f"{name} is {{{name}}}, not a whole number from 1")
        rows[name] = values.astype(int) if name in WHOLE else values
    refuse(rows, (rows["majority"] <= 0) | (rows["majority"] > 1), "majority is {majority}, not above 0 and at most 1")
    refuse(rows, rows["model"].isin(["", "all"]), "the model is called {model!r}, which stands for all models together")
    for arm in ARMS:
        share = rows[f"acc_{arm}"]
        rows[f"right_{arm}"] = (share * rows["n"]).round().astype(int)
        off = (share - rows[f"right_{arm}"] / rows["n"]).abs() > 5.1e-5  # accuracies of four decimals will do
        off |= (share < 0) | (share > 1)
        refuse(rows, off, f"acc_{arm} = {{acc_{arm}}} is no whole number of correct answers out of n = {{n}}")
        rows[f"acc_{arm}"] = rows[f"right_{arm}"] / rows["n"]
    for name in ("loss_extra", "loss_test"):
        rows[name] = pd.to_numeric(rows[name], errors="coerce")
    return each_once(rows, wanted)


def each_once(rows, wanted):
    """The rows, each run once; a run with other values, and one setting with two recipes or data sets, are refused."""
    values = [*(f"right_{arm}" for arm in ARMS), *wanted, "num_classes", "majority", "split", "data", "recipe"]
    checks = [(RUN, name) for name in values] + [(RUN[:5], "recipe"), (["experiment", "task"], "data")]
    for scope, name in checks:
        known = rows[rows[name].astype(str) != ""]
        if (differ := known.groupby(scope)[name].transform("nunique") > 1).any():
            first = known[differ].iloc[0]
            other = known[(known[scope] == first[scope]).all(axis=1) & (known[name] != first[name])].iloc[0]
            stop(f"{first['where']} and {other['where']} agree in {', '.join(scope)} and differ in {name} "
                 f"({first[name]} and {other[name]}): keep one of them, or name their experiments differently")
    twice = rows.duplicated(RUN)
    if twice.any():
        print(f"{twice.sum()} rows were given twice, with equal values: each is used once")
    return rows[~twice].sort_values(RUN, ignore_index=True)


def add_choices(add):
    """The flags that choose_rows reads."""
    for flag, kind in (("experiment", str), ("m", int), ("n", int), ("models", str), ("tasks", str)):
        name = flag.removesuffix("s")
        add(f"--{flag}", nargs="+", type=kind, metavar=name.upper(), help=f"only these values of {name} (all)")


def choose_rows(rows, args):
    """The rows that --experiment, --m, --n, --models and --tasks name; an unknown value ends the run."""
    for flag, name in (("experiment", "experiment"), ("m", "m"), ("n", "n"), ("models", "model"), ("tasks", "task")):
        wanted, found = getattr(args, flag), sorted(set(rows[name]))
        if unknown := [value for value in wanted or [] if value not in found]:
            stop(f"--{flag} {unknown[0]}: not in the data chosen so far; found: {', '.join(map(str, found))}")
        rows = rows[rows[name].isin(wanted or found)]
    return rows


def count(number, what):
    """"1 task", "2 tasks"."""
    return f"{number} {what}{'s' if number != 1 else ''}"


def title_of(experiment, m, n):
    """A cell in words. Zero-shot runs train on no labelled text: their m only fixes the split."""
    return f"{experiment}, " + (f"n = {n}" if experiment.startswith("zero-shot") else f"m = {m}, n = {n}")


def file_of(*names):
    """A file's name from names that may hold anything."""
    return ".".join(re.sub(r"[^\w=+-]+", "-", str(name)) for name in names)
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
UPPER = (1 + SHARE) / 2  # the upper end, as a quantile


# --- shared: noise ---
def training_variance(shares, n):
    """(variance, told from 0?) of a mean accuracy over tasks at one subsample a task, fixed test set, in points^2.

    shares: per task the accuracies of its subsamples, each on n fresh test texts. Their variance less the binomial one,
    p (1 - p) / n: a lower bound, since single answers also flip from run to run. Told from 0 by the dispersion test:
    the sum of (K - 1) s^2 / binomial against chi-square."""
    observed = np.array([np.var(share, ddof=1) for share in shares])
    binomial = np.array([np.mean(share * (1 - share)) / max(n - 1, 1) for share in shares])
    known, freedom = binomial > 0, np.array([len(share) - 1 for share in shares])
    p = stats.chi2.sf((freedom * observed)[known] @ (1 / binomial[known]), freedom[known].sum()) if known.any() else 1
    excess = (observed - binomial).sum()
    return 1e4 * max(excess, 0) / len(shares) ** 2, bool(excess > 0 and p < (1 - SHARE) / 2)
# --- end shared ---


# --- shared: tests ---
def sign_flip_p(changes):
    """One-sided exact p of sum(changes) under independent random signs: the share of all sign patterns that reach it.

    The sum's distribution is the convolution of the two-point distributions at +-|change|; changes are whole numbers.
    Exact for differences that are symmetric about 0."""
    sizes = np.abs(changes[changes != 0])
    share = np.ones(1)  # of the sign patterns, by the sum of the sizes with a plus
    for size in sizes:
        share = (np.pad(share, (0, size)) + np.pad(share, (size, 0))) / 2
    return float(share[(sizes.sum() + changes.sum()) // 2 :].sum())  # ties count
# --- end shared ---


# The observed: from rows to a verdict -----------------------------------------------------------------------


def differences(rows, metric):
    """A row per cell, quantity (boost, bias, acc_extra), model, task, subsample; `value` in points (acc, f1) or as is.

    Runs that differ in `seed` alone are averaged; model "all": means over models of the subsamples they share."""
    unit = [*CELL, "model", "task", "subsample"]
    means = rows.groupby(unit, as_index=False)[[f"{metric}_{arm}" for arm in ARMS]].mean()
    base, extra, test = (means[f"{metric}_{arm}"] * (100 if metric in ("acc", "f1") else 1) for arm in ARMS)
    values = {"boost": extra - base, "bias": test - extra, f"{metric}_extra": extra}
    long = [means[unit].assign(effect=name, value=value.round(9)) for name, value in values.items()]
    long = pd.concat(long, ignore_index=True)
    models = long.groupby(CELL)["model"].transform("nunique")
    shared = long.groupby([*CELL, "effect", "task", "subsample"])["model"].transform("nunique")
    both = long[(models > 1) & (shared == models)].groupby([*CELL, "effect", "task", "subsample"], as_index=False)
    return pd.concat([both["value"].mean().assign(model="all"), long], ignore_index=True)


def floor_of(metric, n):
    """Variance that rounding to whole answers adds to a difference in points: none of them is known better."""
    return (100 / n) ** 2 / 12 * (metric in ("acc", "f1"))


def t_interval(means):
    """Tasks like these: as these_tasks, of the mean of task means; nan for a single one."""
    J, mean = len(means), float(np.mean(means))
    se = float(np.std(means, ddof=1) / math.sqrt(J)) if J > 1 else math.nan
    half = stats.t.ppf(UPPER, J - 1) * se
    return mean, se, J - 1 or math.nan, mean - half, mean + half


def verdict_of(low, high, margin):
    """Where an interval lies in respect of (-margin, margin)."""
    if margin is None or math.isnan(low):
        return ""
    return "within the margin" if -margin < low and high < margin else \
        "beyond the margin" if low > margin or high < -margin else "not settled"


def needed_subsamples(se_1, tasks, margin):
    """The least R >= 2 with half-width t(J (R - 1)) se_1 / sqrt(R) below the margin; se_1: at one subsample a task."""
    R = max(int((stats.norm.ppf(UPPER) * se_1 / margin) ** 2), 2)  # from below: a t is wider than a Normal
    while stats.t.ppf(UPPER, tasks * (R - 1)) * se_1 / math.sqrt(R) >= margin:
        R += max(R // 1000, 1)
    return R


def detectable_effect(se, df):
    """The effect whose 89 % interval excludes 0 on its side with 80 % power: a root in the noncentral t."""
    if not se > 0:
        return math.nan
    limit = stats.t.ppf(UPPER, df)
    return se * optimize.brentq(lambda shift: stats.nct.sf(limit, df, shift) - POWER, 0, 20 * limit)


def task_table(rows, long, metric):
    """tasks.csv before any fit, indexed by cell, effect, model, task: mean, sd, interval of the differences, tests."""
    names = [*CELL, "model", "task"]
    table = long[long["effect"].isin(EFFECTS)].groupby([*GROUP, "task"])["value"]
    table = table.agg(subsamples="count", estimate="mean", sd="std")
    table = table.join(rows.groupby(names)["majority"].mean(), on=names)
    floors = floor_of(metric, table.index.get_level_values("n"))
    half = np.sqrt(np.maximum(table["sd"] ** 2, floors) / table["subsamples"])  # stays nan where there is one subsample
    half *= stats.t.ppf(UPPER, np.maximum(table["subsamples"] - 1, 1))
    table["low"], table["high"] = table["estimate"] - half, table["estimate"] + half
    if metric == "acc":
        right = rows.groupby([*names, "subsample"])[["right_test", "right_extra"]].sum()
        changes = (right["right_test"] - right["right_extra"]).groupby(level=names)
        tests = changes.agg(lambda values: sign_flip_p(values.to_numpy())).to_frame("p").assign(effect="bias")
        tests["p_adjusted"] = tests["p"].groupby(level=names[:-1]).transform(stats.false_discovery_control)
        table = table.join(tests.set_index("effect", append=True).reorder_levels([*GROUP, "task"]))
        for flag in FLAGS:
            flagged = (table.index.get_level_values("effect") == "bias") & (table["estimate"] >= flag)
            table[f"flag_{flag}"] = flagged.astype(int)
    return table


def effects_table(tasks, metric, margin):
    """effects.csv before any fit: {(cell, effect, model, target): row}, targets 1 and 2; "all" models come first."""
    effects = {}
    for key, mine in sorted(tasks.groupby(GROUP), key=lambda group: (*group[0][:4], group[0][4] != "all", group[0][4])):
        K, means, v = mine["subsamples"], mine["estimate"], mine["sd"] ** 2
        J, floor = len(mine), floor_of(metric, key[2])
        found = {"these tasks": these_tasks(means, v, K, floor), "tasks like these": t_interval(means)}
        for target, (estimate, se, df, low, high) in found.items():
            row = effects[*key, target] = dict(
                zip(CELL, key), metric=metric, effect=key[3], model=key[4], target=target, tasks=J, subsamples=K.min(),
                estimate=estimate, se=se, df=df, low=low, high=high, margin=margin,
                verdict=verdict_of(low, high, margin), needed=math.nan, detectable=detectable_effect(se, df))
            if target == "these tasks" and margin and K.min() > 1:
                row["needed"] = needed_subsamples(math.sqrt(np.maximum(v, floor).sum()) / J, J, margin)
    return effects


def means_table(rows, long):
    """means.csv, Table 1 of the paper: means and medians over tasks of the tasks' means over subsamples."""
    unit = [*CELL, "model"]
    table = rows.groupby(unit).agg(tasks=("task", "nunique"), rows=("task", "size"))
    for effect in EFFECTS:
        means = long[long["effect"] == effect].groupby([*unit, "task"])["value"].mean().groupby(level=unit)
        table[effect], table[f"{effect}_median"] = means.mean(), means.median()
    return table.reset_index()


def losses_table(rows):
    """losses.csv: final pretraining losses of one experiment over those of another, subsample by subsample."""
    known = rows.dropna(subset=["loss_extra", "loss_test"])
    both = known.merge(known, on=RUN[1:], suffixes=("_1", "_2")).query("experiment_1 < experiment_2")
    both = both.rename(columns={"experiment_1": "first", "experiment_2": "second"})
    for arm in ("extra", "test"):
        both[f"ratio_{arm}"] = both[f"loss_{arm}_2"] / both[f"loss_{arm}_1"]
    groups = both.groupby(["first", "second", "model", "m", "n", "task"])[["ratio_extra", "ratio_test"]]
    return groups.mean().assign(subsamples=groups.size())[["subsamples", "ratio_extra", "ratio_test"]].reset_index()


def correlations_table(long):
    """correlations.csv: do two models' effects go together over a task's subsamples? Rank correlation in each task."""
    unit = [*CELL, "effect", "task"]
    effects = long[long["effect"].isin(EFFECTS) & (long["model"] != "all")]
    wide, tables = effects.pivot(index=[*unit, "subsample"], columns="model", values="value"), []
    for a, b in itertools.combinations(wide.columns, 2):
        ranks = wide[[a, b]].dropna().groupby(level=unit).rank()
        d = ranks - ranks.groupby(level=unit).transform("mean")
        sums = pd.DataFrame({"ab": d[a] * d[b], "aa": d[a] ** 2, "bb": d[b] ** 2}).groupby(level=unit).sum()
        spearman = (sums["ab"] / np.sqrt(sums["aa"] * sums["bb"]).replace(0, np.nan)).rename("spearman")
        table = spearman.to_frame().assign(model_a=a, model_b=b, subsamples=ranks.groupby(level=unit).size())
        tables.append(table.query("subsamples > 2").dropna().reset_index())
    columns = [*unit, "model_a", "model_b", "subsamples", "spearman"]
    return pd.concat(tables)[columns] if tables else pd.DataFrame(columns=columns)


def plan_table(long, metric, margin):
    """plan.csv: how well a quantity is known, how many subsamples are needed; accuracies also with a fixed test set."""
    table = []
    for (*cell, quantity, model), mine in long.groupby(GROUP):
        groups = [group.to_numpy() for _, group in mine.groupby("task")["value"]]
        K, J = np.array([len(group) for group in groups]), len(groups)
        plans, df, spread = {"redrawn": math.nan}, 1, (1, 1)
        if K.min() > 1:
            v = np.maximum([group.var(ddof=1) for group in groups], floor_of(metric, cell[2]))
            plans = {"redrawn": math.sqrt(v.sum()) / J}  # standard errors at one subsample a task
            if v.any():
                df = v.sum() ** 2 / (v**2 / (K - 1)).sum()
                spread = np.sqrt(df / stats.chi2.ppf([UPPER, 1 - UPPER], df))  # of a standard deviation so known
            if quantity == "acc_extra" and model != "all":
                variance, told = training_variance([group / 100 for group in groups], cell[2])
                plans["fixed"] = math.sqrt(variance) if told else math.nan
        for test_set, se_1 in plans.items():
            row = dict(zip(CELL, cell), model=model, quantity=quantity, test_set=test_set, tasks=J, subsamples=K.min(),
                       mean=np.mean([group.mean() for group in groups]), sd=se_1 * math.sqrt(J),
                       half_width=stats.t.ppf(UPPER, df) * se_1 / math.sqrt(K.min()))
            for name, factor in zip(("needed", "needed_low", "needed_high"), (1, *spread)):
                row[name] = needed_subsamples(se_1 * factor, J, margin) if margin and se_1 > 0 else math.nan
            table.append(row)
    return pd.DataFrame(table)


# The two models ---------------------------------------------------------------------------------------------


def import_pymc():
    """(pymc, arviz, pytensor.tensor), set to need no C compiler: nutpie compiles by numba, the rest is Python."""
    os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")
    with warnings.catch_warnings(action="ignore"):  # arviz announces its next version
        import arviz
        import pymc
        import pytensor.tensor
    return pymc, arviz, pytensor.tensor


def paper_data(rows, effect):
    """What the paper's model needs of a cell: models i, units r = (task, subsample) by task; starts: first units.

    total [i, r]: answers, 0 where a model lacks the unit; a subsample's seeds are added up. known: the share of the
    variance of the tasks' changes in log odds that is more than binomial noise, 0 to 1."""
    names = [f"right_{arm}" for arm in EFFECTS[effect]]
    values = {"index": ["task", "subsample"], "columns": "model", "values": [*names, "n"]}
    sums = rows.pivot_table(**values, aggfunc="sum", fill_value=0)
    control, treatment, total = (sums[name].to_numpy().T.astype(int) for name in (*names, "n"))
    task_idx, tasks = pd.factorize(sums.index.get_level_values("task"))
    starts = np.searchsorted(task_idx, range(len(tasks)))
    by_task = np.add.reduceat([part.sum(0) for part in (control, treatment, total)], starts, axis=1)
    right, answers = by_task[:2], by_task[2]
    p = (right + 0.5) / (answers + 1)
    noise, spread = (1 / (answers * p * (1 - p))).sum(0).mean(), np.diff(special.logit(p), axis=0).var()
    known, both = max(1 - noise / spread, 0) if spread else 0, control + treatment
    data = {"unit_right": both.sum(0), "model_right": both.sum(1), "change": np.diff(right, axis=0)[0] / 2,
            "total": total, "task_idx": task_idx, "known": np.array(float(known))}
    return SimpleNamespace(models=list(sums["n"].columns), tasks=list(tasks), task_idx=task_idx, total=total,
                           starts=starts, data=data)


def paper_model(cell, interaction=True, priors=PRIORS["paper"]):
    """The paper's model, (1) to (10), in variables that mix; no W if not interaction, no U if one task. Exactly,
    with S_j = (W_j0 + W_j1) / sqrt 2 and D_j = (W_j1 - W_j0) / sqrt 2, independent Normal(0, sd_W),
        a_j = mu + beta / 2 + U_j + S_j / sqrt 2 ~ Normal(mu + beta / 2, sqrt(sd_U^2 + sd_W^2 / 2)),
        c_jk = a_j + V_jk ~ Normal(a_j, sd_V),   d_j = beta + sqrt 2 D_j,   logit p = c_jk + alpha_i + (l - 1/2) d_j.
    d_j is centred as far as the data know it, k: with s = sqrt 2 sd_W,
        d_j = beta + s^(1-k) (z_j - k beta),   z_j ~ Normal(k beta, s^k).
    Over l, with q = e^(c + alpha): log((1 + q e^(d/2)) (1 + q e^(-d/2))) = log1p(q (e^(d/2) + e^(-d/2)) + q^2)."""
    pm, _, pt = import_pymc()
    several = len(cell.tasks) > 1
    with pm.Model(coords={"later": cell.models[1:], "task": cell.tasks, "unit": range(len(cell.task_idx))}) as model:
        data = {name: pm.Data(name, value) for name, value in cell.data.items()}
        task_idx, k = data["task_idx"], data["known"]
        mu, beta = pm.Normal("mu", 0, priors[0]), pm.Normal("beta", 0, priors[1])
        alpha = pt.concatenate([[0.0], pm.Normal("alpha", 0, 5, dims="later")]) if len(cell.models) > 1 else pt.zeros(1)
        sd_U = pm.HalfNormal("sd_U", 1) if several else 0
        sd_V, sd_W = pm.HalfNormal("sd_V", 1), pm.HalfNormal("sd_W", 3.5355) if interaction else 0
        level, s = mu + beta / 2, math.sqrt(2) * sd_W
        a = pm.Normal("a", level, pt.sqrt(sd_U**2 + sd_W**2 / 2), dims="task")[task_idx] if several else level
        if len(cell.tasks) >= CENTRED["paper"]:
            c = pm.Normal("c", a, sd_V, dims="unit")
        else:
            c = pm.Deterministic("c", a + sd_V * pm.Normal("c_raw", 0, 1, dims="unit"), dims="unit")
        d = beta + s ** (1 - k) * (pm.Normal("z", k * beta, s**k, dims="task") - k * beta) if interaction else beta
        d = pm.Deterministic("d", d * pt.ones(len(cell.tasks)), dims="task")
        q, ratio = pt.exp(c)[None] * pt.exp(alpha)[:, None], pt.exp(d / 2)
        both = (data["total"] * pt.log1p(q * (ratio + 1 / ratio)[task_idx] + q**2)).sum()
        observed = (data["unit_right"] * c).sum() + (data["model_right"] * alpha).sum() + (data["change"] * d).sum()
        pm.Potential("likelihood", observed - both)
    return model


def predict(posterior, cell, rng):
    """Add to the posterior the predictive effects in points: `effect` (12) by model, task, means over subsamples (nan
    where a model lacks the task); `difference` (11) by model, over all. A draw is a data set; few draws at a time."""
    shape = posterior["beta"].shape
    c, d = (posterior[name].values.reshape(math.prod(shape), -1) for name in ("c", "d"))
    alpha = np.zeros((len(c), len(cell.models)))
    if "alpha" in posterior:
        alpha[:, 1:] = posterior["alpha"].values.reshape(len(c), -1)
    answers = np.add.reduceat(cell.total, cell.starts, axis=1)
    effects = np.empty((len(c), *answers.shape))
    for part in np.array_split(np.arange(len(c)), math.ceil(len(c) * cell.total.size / 1e6)):
        logit, half = c[part, None] + alpha[part, :, None], d[part][:, None, cell.task_idx] / 2
        treatment, control = (rng.binomial(cell.total, special.expit(logit + sign * half)) for sign in (1, -1))
        change = np.add.reduceat(treatment - control, cell.starts, axis=2)
        effects[part] = 100 * change / np.where(answers, answers, np.nan)
    by_model = np.nanmean(effects, axis=2)
    posterior["effect"] = ("chain", "draw", "model", "task"), effects.reshape(*shape, *answers.shape)
    posterior["difference"] = ("chain", "draw", "over"), np.c_[by_model.mean(1), by_model].reshape(*shape, -1)


def hierarchical_data(table):
    """Number, mean, scatter (sum of squares) of a cell's differences, [models, tasks]; 0: none. table: of tasks.csv."""
    wide = table.pivot(index="model", columns="task", values=["subsamples", "estimate", "sd"])
    number, mean, sd = (np.nan_to_num(wide[name].to_numpy(float)) for name in ("subsamples", "estimate", "sd"))
    data = {"number": number, "average": mean, "square": sd**2 * np.maximum(number - 1, 0),
            "rounding": np.array(floor_of("acc", table["n"].iloc[0]))}
    return SimpleNamespace(models=list(wide.index), tasks=list(wide["sd"].columns), data=data)


def hierarchical_model(cell):
    """D_ijk ~ N(delta_ij, s_ij), delta_ij ~ N(beta_i, tau_i), log s_ij ~ N(log s_i, omega_i); plus rounding's variance.

    delta is summed out, mean_ij ~ N(beta_i, sqrt(tau_i^2 + s_ij^2 / K_ij)), and drawn afterwards by draw_delta."""
    pm, _, pt = import_pymc()
    with pm.Model(coords={"model": cell.models, "task": cell.tasks}) as model:
        number, average, square, rounding = (pm.Data(name, value) for name, value in cell.data.items())
        beta, tau = pm.Normal("beta", 0, 10, dims="model"), pm.HalfNormal("tau", 5, dims="model")
        s, omega = pm.HalfNormal("s", 10, dims="model"), pm.HalfNormal("omega", 1, dims="model")
        level, spread, dims = pt.log(s)[:, None], omega[:, None], ("model", "task")
        if len(cell.tasks) >= CENTRED["hierarchical"]:
            log_s = pm.Normal("log_s", level, spread, dims=dims)
        else:
            log_s = pm.Deterministic("log_s", level + spread * pm.Normal("log_s_raw", 0, 1, dims=dims), dims=dims)
        pm.Deterministic("mean", beta.mean())
        within, between = pt.exp(2 * log_s) + rounding, tau[:, None] ** 2
        both = within + number * between
        squares = square / within + number * (average - beta[:, None]) ** 2 / both
        logs = pt.maximum(number - 1, 0) * pt.log(within) + (number > 0) * pt.log(both)
        pm.Potential("likelihood", -(logs + squares).sum() / 2)
    return model


def draw_delta(posterior, cell, rng):
    """Add draws of delta given the rest (Normal, conjugate) as `effect` by model, task; of a `new_task`'s effect."""
    beta, tau, number = posterior["beta"].values, posterior["tau"].values, cell.data["number"]
    within, between = np.exp(2 * posterior["log_s"].values) + cell.data["rounding"], tau[..., None] ** 2
    weight, level = number * between / (within + number * between), beta[..., None]
    delta = rng.normal(level + weight * (cell.data["average"] - level), np.sqrt(between * (1 - weight)))
    posterior["effect"] = ("chain", "draw", "model", "task"), np.where(number, delta, np.nan)
    posterior["new_task"] = ("chain", "draw", "model"), rng.normal(beta, tau)


def summarise(posterior):
    """Mean, sd, 89 % highest-density interval, rank-normalised r_hat, bulk and tail ESS of what is reported, by ArviZ.

    What is reported is judged: hyperparameters, d, mean effects. c_jk, a_j and log s_ij are nuisance."""
    nuisance = ("a", "c", "c_raw", "z", "log_s", "log_s_raw", "effect")
    names = [name for name in posterior if name not in nuisance and not name.endswith("__")]
    table = import_pymc()[1].summary(posterior[names], hdi_prob=SHARE, round_to="none")
    return table.rename(columns={"hdi_5.5%": "hdi_low", "hdi_94.5%": "hdi_high"})


def warning_of(table, divergences):
    """"" if every reported parameter converged, else what is wrong; a value that is not a number fails."""
    r_hat, (bulk, tail) = table["r_hat"].max(skipna=False), table[["ess_bulk", "ess_tail"]].min(skipna=False)
    if r_hat <= MAX_R_HAT and bulk >= MIN_ESS and tail >= MIN_ESS and not divergences:
        return ""
    return f"not converged: r_hat {r_hat:.3f}, ESS {bulk:.0f} bulk, {tail:.0f} tail, {count(divergences, 'divergence')}"


def fit(rows, table, effect, analysis, args):
    """One analysis of one effect in one cell by nutpie's NUTS; if it did not converge, once more, longer, finer.

    table: the cell's rows of tasks.csv. Returns the posterior (xarray, [chain, draw, ...]), its summary, a warning."""
    import_pymc()
    import nutpie

    began, rng = time.time(), np.random.default_rng(args.seed)
    cell = paper_data(rows, effect) if analysis == "paper" else hierarchical_data(table)
    interaction, priors = not args.no_interaction and len(cell.tasks) >= FEWEST_TASKS, PRIORS[args.priors]
    key = (analysis, interaction, priors, *(value.shape for value in cell.data.values()))
    if key not in COMPILED:  # once for each shape of the data: it takes longer than most samplings
        model = paper_model(cell, interaction, priors) if analysis == "paper" else hierarchical_model(cell)
        with warnings.catch_warnings(action="ignore"):  # of large expressions that are compiled in two parts
            COMPILED[key] = nutpie.compile_pymc_model(model)
    shared = COMPILED[key].shared_data
    compiled = COMPILED[key].with_data(**{name: value for name, value in cell.data.items() if name in shared})
    names = {"model": cell.models, "task": cell.tasks, "over": ["all", *cell.models]}
    names |= {"later": cell.models[1:]} if len(cell.models) > 1 else {}
    for accept, longer, more in ((TARGET_ACCEPT[analysis], 1, 1), RERUN):
        trace = nutpie.sample(compiled, chains=args.chains, cores=min(args.cores, args.chains), seed=args.seed,
                              save_warmup=False, progress_bar=False, tune=args.tune * longer, draws=args.draws * more,
                              target_accept=accept)
        posterior = trace.posterior.assign_coords(names)
        (predict if analysis == "paper" else draw_delta)(posterior, cell, rng)
        summary, divergences = summarise(posterior), int(trace.sample_stats["diverging"].sum())
        if not (warning := warning_of(summary, divergences)):
            break
    return SimpleNamespace(
        cell=tuple(rows[CELL].iloc[0]), effect=effect, analysis=analysis, models=cell.models, tasks=cell.tasks,
        posterior=posterior, summary=summary.assign(warning=warning), warning=warning, seconds=time.time() - began)


def task_effects(result, margin):
    """The columns that a fit adds to tasks.csv: task effects, predicted (12) or shrunken, indexed as that table."""
    draws, name = result.posterior[["effect"]], result.analysis
    low, high = import_pymc()[1].hdi(draws, hdi_prob=SHARE)["effect"].transpose("hdi", ...)
    columns = {name: draws["effect"].mean(("chain", "draw")), f"{name}_low": low, f"{name}_high": high}
    if name == "hierarchical":
        columns["p_beyond"] = (abs(draws["effect"]) > margin).mean(("chain", "draw"))
    table = pd.DataFrame({column: values.to_series() for column, values in columns.items()})
    return pd.concat({(*result.cell, result.effect): table}, names=[*CELL, "effect"])


def mean_effects(result, effects, margin):
    """Rows of effects.csv of a fit: (11), or beta and its mean over models."""
    for model in (["all"] if len(result.models) > 1 else []) + result.models:
        paper = result.analysis == "paper"
        label = f"difference[{model}]" if paper else "mean" if model == "all" else f"beta[{model}]"
        mean, sd, low, high = result.summary.loc[label, ["mean", "sd", "hdi_low", "hdi_high"]]
        key = (*result.cell, result.effect, model)
        like = effects.get((*key, "these tasks")) or dict(zip(GROUP, key), metric="acc", margin=margin)
        effects[*key, result.analysis] = like | {
            "target": result.analysis, "tasks": len(result.tasks), "estimate": mean, "se": sd, "df": math.nan,
            "low": low, "high": high, "verdict": verdict_of(low, high, margin), "needed": math.nan,
            "detectable": math.nan}


def fit_all(rows, tasks, args):
    """Every analysis of every effect of every cell that it can be made of."""
    jobs, results = list(itertools.product(rows.groupby(CELL), args.effects, dict.fromkeys(args.analysis))), []
    for (cell, mine), effect, analysis in (bar := tqdm(jobs, desc="fits", leave=False)):
        where = f"{title_of(*cell)}, {effect}, {analysis}"
        bar.set_postfix_str(where)
        table = tasks.loc[(*cell, effect)].drop(index="all", errors="ignore").reset_index().assign(n=cell[2])
        if analysis == "hierarchical" and (table["subsamples"].min() < 2 or table.groupby("model").size().min() < 2):
            tqdm.write(f"{where}: left out, it needs two tasks with two subsamples each", file=sys.stdout)
            continue
        results.append(result := fit(mine, table, effect, analysis, args))
        r_hat, ess = result.summary["r_hat"].max(), result.summary[["ess_bulk", "ess_tail"]].min()
        tqdm.write(f"{where}: {result.warning or 'converged'} (r_hat {r_hat:.4f}, ESS {ess['ess_bulk']:.0f} bulk, "
                   f"{ess['ess_tail']:.0f} tail; {result.seconds:.0f} s)", file=sys.stdout)
    return results


# Words ------------------------------------------------------------------------------------------------------


def conclusion(row, unit):
    """One sentence on a row of effects.csv (target: these tasks)."""
    what = f"{row.effect}{'' if row.model == 'all' else ' of ' + row.model}"
    if math.isnan(row.low):
        why = "it takes two subsamples of each task" if row.subsamples < 2 else "all differences are equal"
        return f"{what}: {row.estimate:+.3g} {unit} observed, without an interval: {why}"
    half, digits = (row.high - row.low) / 2, 1 if row.high - row.low > 0.5 else 2 if unit == "points" else 4
    those = "this task" if row.tasks == 1 else f"these {row.tasks} tasks"
    text = f"{what}: between {row.low:+.{digits}f} and {row.high:+.{digits}f} {unit} for {those} (89 % interval): "
    if not row.verdict:
        return text + ("told from 0" if row.low > 0 or row.high < 0 else "not told from 0")
    limit = f"{row.margin:g} {unit.removesuffix('s') if row.margin == 1 else unit}"
    if row.verdict != "not settled":
        return text + f"{row.verdict} of {limit}"
    if half < row.margin:
        return text + f"not settled: it reaches across the margin of {limit}"
    factor = row.needed / row.subsamples
    more = f"about {factor:.0f} times as many subsamples" if factor >= 1.8 else f"{row.needed:.0f} subsamples a task"
    known = f"not settled: these data know it to ±{half:.{digits}f} {unit}"
    return text + f"{known}; {more} would settle it against a margin of {limit}"


def conclusions(effects, rows, metric, unit):
    """What a reader sees first: a sentence per experiment and effect, all models together; one on accuracies near 1."""
    mine = effects[effects["target"] == "these tasks"].drop_duplicates([*CELL, "effect"])  # "all" comes first
    for (experiment, effect), cells in mine.groupby(["experiment", "effect"], sort=False):
        known = cells.dropna(subset="low")
        if len(cells) == 1 or known.empty:
            for row in cells.itertuples():
                yield f"{title_of(row.experiment, row.m, row.n)}: {conclusion(row, unit)}"
            continue
        low, high, estimates = known["low"], known["high"], known["estimate"]
        verdicts = ", ".join(f"{name} in {number}" for name, number in known["verdict"].value_counts().items() if name)
        verdicts += f" (margin {known['margin'].iloc[0]:g}); " if verdicts else ""
        yield (f"{experiment}: {effect}: estimates from {estimates.min():+.2f} to {estimates.max():+.2f} {unit}, 89 % "
               f"intervals from {low.min():+.2f} to {high.max():+.2f}, in {len(known)} settings of m and n: {verdicts}"
               f"{((low > 0) | (high < 0)).sum()} exclude 0, by chance alone {(1 - SHARE) * len(known):.1f} would")
    for cell, share in rows.groupby(CELL)["acc_extra"].mean().items():
        if metric == "acc" and share > CEILING:
            yield f"{title_of(*cell)}: acc_extra is {share:.3f} on average: so near 1 an effect has little room"


def effects_text(effects):
    """The effects of every cell and model as aligned lines: a column a target, then the verdict on these tasks."""
    def number(row):
        digits = 2 if row.metric in ("acc", "f1") or abs(row.high - row.low) > 0.1 else 4
        interval = "" if math.isnan(row.low) else f" [{row.low:+.{digits}f}, {row.high:+.{digits}f}]"
        return f"{row.estimate:+.{digits}f}{interval}"

    targets = list(dict.fromkeys(effects["target"]))
    table = [[*GROUP, "tasks", *targets, "verdict", "needed"]]
    for key, mine in effects.groupby(GROUP, sort=False):
        by_target = {row.target: row for row in mine.itertuples()}
        first = next(iter(by_target.values()))
        shown = [number(by_target[name]) if name in by_target else "" for name in targets]
        needed = "" if math.isnan(first.needed) else f"{first.needed:.0f}"
        table.append([*map(str, key), str(first.tasks), *shown, first.verdict, needed])
    widths = [max(map(len, column)) for column in zip(*table)]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in table]


def many_lines(tasks, losses, correlations):
    """What only many tasks can show: signs of means, sign-flip tests, lemon-picked tasks, correlations; and losses."""
    for (experiment, effect), mine in tasks[tasks["model"] != "all"].groupby(["experiment", "effect"]):
        means = mine.groupby("task")["estimate"].mean().round(9)
        if len(means) < FEWEST_TASKS:
            continue
        yield (f"{experiment}, {effect} of the tasks over settings and models: {(means > 0).sum()} positive, "
               f"{(means == 0).sum()} zero, {(means < 0).sum()} negative; "
               f"from {means.min():+.2f} ({means.idxmin()}) to {means.max():+.2f} ({means.idxmax()})")
        if effect == "bias" and "p" in mine:
            picked = ", ".join(sorted(set(mine[mine[f"flag_{FLAGS[0]}"] == 1]["task"]))) or "none"
            p = mine["p_adjusted"]
            yield (f"{experiment}, one-sided sign-flip tests of a positive bias: {len(p)}, adjusted p below .05: "
                   f"{(p < 0.05).sum()}, smallest {p.min():.3f}; bias from +{FLAGS[0]} points: {picked}")
    for (experiment, effect), mine in correlations.groupby(["experiment", "effect"]):
        if mine["task"].nunique() >= FEWEST_TASKS:
            chance, found = math.sqrt((1 / (mine["subsamples"] - 1)).mean()), mine["spearman"]
            yield (f"{experiment}, rank correlation of two models' {effect} over the same subsamples: mean "
                   f"{found.mean():+.3f}, sd {found.std():.3f}; of unrelated ones 0 and {chance:.3f}")
    for (first, second), mine in losses.groupby(["first", "second"]):
        extra, test = mine[["ratio_extra", "ratio_test"]].mean()
        yield (f"final pretraining loss of {second} over that of {first}: {extra:.3f} (extra), {test:.3f} (test), mean "
               f"over {count(len(mine), 'setting')} of task, model, m and n")


def notes(effects, results):
    """Sentences on fits: where the hierarchical mean leaves the headline, what was dropped, what did not converge."""
    for (*cell, effect, model, target), row in effects.items():
        first = effects.get((*cell, effect, model, "these tasks"))
        if target == "hierarchical" and first and abs(gap := row["estimate"] - first["estimate"]) > first["se"]:
            yield (f"{title_of(*cell)}, {effect}, {model}: the hierarchical mean is {gap:+.2f} points from the mean of "
                   "these tasks, more than its standard error: it weights quiet tasks most; take these tasks")
    for result in results:
        where = f"{title_of(*result.cell)}, {result.effect}, {result.analysis}"
        if result.analysis == "paper" and "sd_W" not in result.posterior:
            without = "W" if "sd_U" in result.posterior else "W and U"
            yield f"{where}: without {without} ({count(len(result.tasks), 'task')})"
        if result.warning:
            yield f"{where}: {result.warning}"


def plan_lines(plan, margin, unit):
    """The plan in sentences: per cell and model what is known, and how many subsamples a task would do."""
    sets = {"redrawn": " with test texts drawn anew each time", "fixed": " with a fixed test set"}
    for (*cell, model), mine in plan.groupby([*CELL, "model"], sort=False):
        who = "mean over models" if model == "all" else model
        yield f"{title_of(*cell)}, {who}, {count(mine['tasks'].max(), 'task')}:"
        for row in mine.itertuples():
            name = row.quantity + ("" if row.quantity in EFFECTS else sets[row.test_set])
            if row.subsamples < 2:
                yield f"  {name}: no plan from one subsample of a task; run at least 2"
            elif math.isnan(row.sd):
                told = "is not told from 0 by these data; more subsamples could tell"
                yield f"  {name}: the variance of training alone {told}"
            else:
                one = stats.norm.ppf(UPPER) * row.sd / math.sqrt(row.tasks)
                known = f"known to ±{row.half_width:.2f} by {row.subsamples} subsamples a task (one: ±{one:.2f})"
                more = f"; {row.needed:.0f} bring that below {margin or 0:g} (89 % interval: "
                more += f"{row.needed_low:.0f} to {row.needed_high:.0f})"
                yield f"  {name}: {row.mean:+.2f} {unit}, {known}{more * (row.needed > 0)}"


# Figures ----------------------------------------------------------------------------------------------------


# --- shared: figures ---
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
# --- end shared ---


def label(effect, unit=None):
    """An effect and its definition, for titles and axes."""
    return f"{effect}: acc_{EFFECTS[effect][1]} − acc_{EFFECTS[effect][0]}" + (f" ({unit})" if unit else "")


def zero_axis(axis, text, names):
    """An x axis of differences with a line at 0; the names of the lines downwards on the y axis."""
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
    axis.axvline(0, color="grey", lw=1, ls="--", zorder=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel(text)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.7)


def largest(values):
    """The SHOWN largest tasks of a Series of effects, from high to low, and words for a title if some are left out."""
    means = values.groupby("task").mean()
    cut = f" ({SHOWN} of {len(means)} tasks, the largest)" * (len(means) > SHOWN)
    return list(means.loc[means.abs().nlargest(SHOWN).index].sort_values(ascending=False).index), cut


def draw_violin(axis, values, y, width, colour, alpha):
    """The distribution of the values as a lying violin at y."""
    for body in axis.violinplot(values, [y], orientation="horizontal", widths=width, showextrema=False)["bodies"]:
        body.set(facecolor=colour, alpha=alpha)


def draw_effects(effects, unit, margin, path):
    """effects.png: these tasks and tasks like these by cell and model, a row an experiment, one x scale for all."""
    experiments, kinds = sorted(set(effects["experiment"])), sorted(set(effects["effect"]), key=list(EFFECTS).index)
    lines = [effects[effects["experiment"] == name].groupby(["m", "n", "model"]).ngroups + 2 for name in experiments]
    figure, axes = import_plots().subplots(
        len(experiments), len(kinds), figsize=(2 + 4.4 * len(kinds), 1.2 + 0.3 * sum(lines)), squeeze=False,
        sharex=True, sharey="row", layout="constrained", height_ratios=lines)
    for (row, name), (column, effect) in itertools.product(enumerate(experiments), enumerate(kinds)):
        axis, mine = axes[row, column], effects[(effects["experiment"] == name) & (effects["effect"] == effect)]
        keys = list(dict.fromkeys(zip(mine["m"], mine["n"], mine["model"])))
        for target, shift, width, alpha in (("these tasks", -0.12, 3, 1), ("tasks like these", 0.2, 1.2, 0.6)):
            for one in mine[mine["target"] == target].itertuples():
                y = keys.index((one.m, one.n, one.model)) + shift
                axis.plot([one.low, one.high], [y, y], color=COLOURS[effect], lw=width, alpha=alpha)
                axis.plot(one.estimate, y, "o", ms=4 if shift < 0 else 2.5, color="black")
        if margin:
            axis.axvspan(-margin, margin, color="grey", alpha=0.12, lw=0)
        names = [f"{title_of(name, m, n).partition(', ')[2]}  {model}" for m, n, model in keys]
        zero_axis(axis, unit if row == len(experiments) - 1 else "", names)
        axis.set_title(f"{name}\n{label(effect)}", fontsize=9)
    sizes = " or ".join(map(str, sorted(set(effects["tasks"]))))
    title = f"Mean effects over {sizes} task{'s' * (sizes != '1')}, 89 % intervals\n"
    grey = f"; grey: margin of {margin:g}" if margin else ""
    return finish(figure, f"{title}thick: these tasks; thin: tasks like these{grey}", path)


def draw_tasks(table, cell, effect, unit, path):
    """tasks.*.png: each task's mean and own interval beside what is left after shrinking; sd, number at the right."""
    table, colour = table.drop(index="all", level="model", errors="ignore"), COLOURS[effect]
    models, (order, cut) = list(table.index.unique("model")), largest(table["estimate"])
    size, at = (2.2 + 4.2 * len(models), 1.6 + 0.27 * len(order)), ("axes fraction", "data")
    panels = {"sharey": True, "squeeze": False, "layout": "constrained"}
    figure, axes = import_plots().subplots(1, len(models), figsize=size, **panels)
    for axis, model in zip(axes[0], models):
        axis.annotate("sd, K", (1.01, -0.9), xycoords=at, va="center", fontsize=7)
        for one in table.loc[model].reindex(order).dropna(subset="estimate").itertuples():
            y = order.index(one.Index)
            axis.plot([one.low, one.high], [y - 0.15] * 2, color="grey", lw=1)
            axis.plot(one.estimate, y - 0.15, "o", ms=4, mfc="none", color="black", label="" if y else "observed")
            if math.isfinite(getattr(one, "hierarchical", math.nan)):
                axis.plot([one.hierarchical_low, one.hierarchical_high], [y + 0.2] * 2, color=colour, lw=2.5)
                axis.plot(one.hierarchical, y + 0.2, "D", ms=3.5, color=colour, label="" if y else "hierarchical")
            sd = "" if math.isnan(one.sd) else f"{one.sd:.1f}, "
            axis.annotate(f"{sd}{one.subsamples:.0f}", (1.01, y), xycoords=at, va="center", fontsize=7)
        zero_axis(axis, label(effect, unit), order)
        axis.set_title(model, fontsize=10)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return finish(figure, f"{effect} of each task{cut}, 89 % intervals: {title_of(*cell)}", path)


def draw_differences(long, cell, model, unit, path):
    """differences.*.png, Figures 13 to 20: boost and bias of each subsample as violins, per task, for one model."""
    effects = [name for name in EFFECTS if name in set(long["effect"])]
    order, cut = largest(long.set_index("task")["value"])
    order, width, height = sorted(order), 2 + 4.5 * len(effects), 1.7 + 0.34 * len(order)
    figure, axes = import_plots().subplots(1, len(effects), figsize=(width, height), sharey=True, squeeze=False)
    left = (0.3 + 0.075 * max(map(len, order))) / width  # a constrained layout takes twice the time
    figure.subplots_adjust(left=left, right=1 - 0.2 / width, top=1 - 1 / height, bottom=0.55 / height, wspace=0.05)
    for axis, effect in zip(axes[0], effects):
        colour, mine = COLOURS[effect], long[(long["effect"] == effect) & long["task"].isin(order)]
        for task, values in mine.groupby("task")["value"]:
            y = order.index(task)
            if len(values) >= 10 and values.nunique() > 1:
                draw_violin(axis, values, y, 0.8, colour, 0.35)
            shifts = np.linspace(-0.15, 0.15, len(values))
            axis.scatter(values, y + shifts, s=5, color=colour, alpha=0.5, linewidths=0)
            axis.plot(values.mean(), y, "D", ms=4, color="black")
        zero_axis(axis, unit, order)
        axis.set_title(label(effect), fontsize=10)
    note = "point: a subsample; diamond: mean of the task's subsamples"
    return finish(figure, f"{model}, {title_of(*cell)}{cut}\n{note}", path)


def draw_plan(plan, margin, unit, path):
    """plan.png: half-width of the 89 % interval against the number of subsamples a task, a panel a cell."""
    plt = import_plots()
    cells, models = [*plan[plan["sd"] > 0].groupby(CELL)], sorted(set(plan["model"]))
    columns, R = min(len(cells), 3), np.unique(np.geomspace(2, 200, 60).astype(int))
    lines = math.ceil(len(cells) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(1 + 4 * columns, 7), 2.2 + 3.2 * lines), squeeze=False, layout="constrained")
    for axis in axes.flat[len(cells):]:
        axis.remove()
    for axis, (cell, mine) in zip(axes.flat, cells):
        for one in mine.itertuples():
            fixed, style = one.test_set == "fixed", ("-", "--", ":", "-.")[models.index(one.model) % 4]
            half = stats.t.ppf(UPPER, one.tasks * (R - 1)) * one.sd / np.sqrt(R * one.tasks)
            axis.plot(R, half, style, color=COLOURS.get(one.quantity, "tab:green"), alpha=0.45 if fixed else 1,
                      label=f"{one.quantity}{', fixed test set' * fixed}, {one.model}")
        if margin:
            axis.axhline(margin, color="grey", lw=1)
        axis.set(xscale="log", yscale="log", title=title_of(*cell), xlabel="R, subsamples a task",
                 ylabel=f"half-width ({unit})")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
            scale.set_major_formatter(lambda value, _: f"{value:g}")
            scale.set_minor_locator(plt.NullLocator())
        axis.grid(alpha=0.3)
    look = {"loc": "outside lower center", "ncols": 2 if columns == 1 else 4, "frameon": False, "fontsize": 8}
    figure.legend(*axes[0, 0].get_legend_handles_labels(), **look)
    title = "How well do R subsamples a task know the mean over tasks?"
    return finish(figure, title + (f"\ngrey: margin of {margin:g}" if margin else ""), path)


def draw_paper(results, path):
    """paper.png, Figures 3, 5 and 6: the paper's distributions of the average accuracy differences (11), by cell."""
    cells = list(dict.fromkeys(result.cell for result in results))
    figure, axis = import_plots().subplots(figsize=(8, 2 + 0.7 * len(cells)), layout="constrained")
    for result in results:
        y = cells.index(result.cell) + (0.2 if result.effect == "bias" else -0.2)
        one, colour = result.summary.loc["difference[all]"], COLOURS[result.effect]
        name = "" if result.cell != cells[0] else label(result.effect)
        draw_violin(axis, result.posterior["difference"].sel(over="all").values.ravel(), y, 0.4, colour, 0.4)
        axis.plot(one[["hdi_low", "hdi_high"]], [y, y], color=colour, lw=2.5, label=name)
        axis.plot(one["mean"], y, "o", ms=4, color="black")
    zero_axis(axis, "mean difference over models, tasks and subsamples (points)", [title_of(*cell) for cell in cells])
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    title = "The paper's model: predictive mean differences (11)\nits 89 % intervals do not hold 89 %"
    return finish(figure, title, path)


def draw_calibration(result, tasks, path):
    """calibration.*.png, Figures 9 and 10: task effects that the paper's model predicts (12) against the observed."""
    figure, axis = import_plots().subplots(figsize=(5.4, 5.6), layout="constrained")
    for model, marker in zip(result.models, itertools.cycle("os^Dv")):
        one, colour = tasks.loc[(*result.cell, result.effect, model)], COLOURS[result.effect]
        axis.plot(one["paper"], one["estimate"], marker, ms=5, mfc="none", color=colour, label=model)
    ends = min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], axis.get_ylim()[1])
    axis.plot(ends, ends, color="grey", lw=1, ls="--", zorder=0)
    names = {"xlabel": f"predicted {result.effect} (points)", "ylabel": f"observed {result.effect} (points)"}
    axis.set(**names, xlim=ends, ylim=ends, aspect="equal")
    axis.legend()
    cell = title_of(*result.cell) + ("" if "sd_W" in result.posterior else ", without W")
    return finish(figure, f"Does the paper's model fit?\n{cell}; a point: a task and model", path)


def draw_traces(result, path):
    """traces/*.png: densities and traces of the hyperparameters by chain, by ArviZ (Figure 12)."""
    hyper = ("mu", "alpha", "beta", "sd_U", "sd_V", "sd_W", "tau", "s", "omega")
    names = [name for name in hyper if name in result.posterior]
    size, more = (10, 1.5 * len(names)), {"layout": "constrained"}
    axes = import_pymc()[1].plot_trace(result.posterior, var_names=names, figsize=size, backend_kwargs=more)
    path.parent.mkdir(exist_ok=True)
    return finish(axes[0, 0].figure, f"{result.analysis}, {result.effect}: {title_of(*result.cell)}", path)


def draw_all(long, tasks, effects, results, unit, args):
    """All figures; returns their paths."""
    paths = [draw_effects(effects, unit, args.margin, args.out / "effects.png")]
    for (*cell, effect), mine in tasks.groupby([*CELL, "effect"]):
        if mine.index.unique("task").size >= FEWEST_TASKS:
            path = args.out / f"tasks.{file_of(*cell, effect)}.png"
            paths.append(draw_tasks(mine.loc[(*cell, effect)], cell, effect, unit, path))
    shown = long[(long["model"] != "all") & long["effect"].isin(args.effects)]
    for (*cell, model), mine in shown.groupby([*CELL, "model"]):
        paths.append(draw_differences(mine, cell, model, unit, args.out / f"differences.{file_of(*cell, model)}.png"))
    if paper := [result for result in results if result.analysis == "paper"]:
        paths.append(draw_paper(paper, args.out / "paper.png"))
    for result in results:
        name = file_of(*result.cell, result.effect)
        if result.analysis == "paper" and len(result.tasks) >= FEWEST_TASKS:
            paths.append(draw_calibration(result, tasks, args.out / f"calibration.{name}.png"))
        paths.append(draw_traces(result, args.out / "traces" / f"{name}.{result.analysis}.png"))
    return paths


# Command line -----------------------------------------------------------------------------------------------


# --- shared: above_0 ---
def count_from_0(text):
    """argparse type: a whole number from 0."""
    return 0 if text == "0" else positive(text)


def above_0(text):
    """argparse type: a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
# --- end shared ---


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0],
                                     epilog="Columns, files and models: see the head of this script and README.md.")
    add = parser.add_argument_group("what to run").add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], metavar="FILE or FOLDER",
        help="results files, folders of them, or folders in the published layout (results.csv)")
    add("--effects", nargs="+", choices=tuple(EFFECTS), default=list(EFFECTS), help="(boost bias)")
    add("--metric", default="acc", help="acc, f1, nll or any NAME of NAME_base, NAME_extra, NAME_test (%(default)s)")
    add("--margin", type=above_0, metavar="POINTS", help="effects within it do not matter (acc, f1: 1; others: none)")
    add("--plan", action="store_true", help="only: how many subsamples a task effects and acc_extra need")
    add_choices(add)
    add = parser.add_argument_group("sampling").add_argument
    add("--analysis", nargs="+", choices=tuple(TARGET_ACCEPT), default=list(TARGET_ACCEPT), help="(paper hierarchical)")
    add("--draws", type=int, default=1000, metavar="N", help="per chain, after tuning; 0: no sampler (%(default)s)")
    add("--tune", type=positive, default=500, metavar="N", help="tuning steps per chain (%(default)s)")
    add("--chains", type=positive, default=4, metavar="N", help="(%(default)s)")
    add("--seed", type=count_from_0, default=0, help="of all random numbers (%(default)s)")
    add("--cores", type=positive, default=os.cpu_count() or 1, metavar="N", help="chains at once (all there are)")
    add("--priors", choices=tuple(PRIORS), default="paper", help="wide: sd 1.5 for mu, 5 for beta (%(default)s)")
    add("--no-interaction", action="store_true", help="the paper's model without W, as in Figure 10")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("fits"), metavar="FOLDER", help="tables and figures (%(default)s)")
    add("--no-figures", action="store_true", help="tables only")
    args = parser.parse_args(argv)
    args.effects = [effect for effect in EFFECTS if effect in args.effects]
    if args.margin is None and args.metric in ("acc", "f1"):
        args.margin = 1.0
    if args.draws and (args.draws < 10 or args.chains < 2):
        parser.error(f"--draws {args.draws} --chains {args.chains}: take 2 chains of 10 draws at least, or 0 draws")
    return args


# --- shared: write ---
def write(folder, **tables):
    """Write DataFrames as CSV, numbers to 6 significant digits; empty ones not at all."""
    for name, table in tables.items():
        if len(table):
            table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
# --- end shared ---


def main(argv=None):
    args = parse_args(argv)

    # Rows, differences
    unit = {"acc": "points", "f1": "points", "nll": "nats"}.get(args.metric, args.metric)
    rows = choose_rows(read_results(args.paths, args.metric), args)
    long = differences(rows, args.metric)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plan:
        plan = plan_table(long, args.metric, args.margin)
        print(*plan_lines(plan, args.margin, unit), sep="\n")
        write(args.out, plan=plan)
        if not args.no_figures and (plan["sd"] > 0).any():
            print(f"figure: {draw_plan(plan, args.margin, unit, args.out / 'plan.png').resolve()}")
        return

    # The conclusion first, then the tables
    tasks = task_table(rows, long, args.metric).query("effect in @args.effects")
    effects = effects_table(tasks, args.metric, args.margin)
    table, losses, correlations = pd.DataFrame(effects.values()), losses_table(rows), correlations_table(long)
    lines = list(conclusions(table, rows, args.metric, unit))
    print(*lines, f"\nEffects in {unit}, 89 % intervals", *effects_text(table), sep="\n")
    print("", *many_lines(tasks.reset_index(), losses, correlations), sep="\n")
    write(args.out, means=means_table(rows, long), losses=losses, correlations=correlations, effects=table,
          tasks=tasks.reset_index())

    # The two samplers
    results = fit_all(rows, tasks, args) if args.draws and args.metric == "acc" else []
    for analysis in dict.fromkeys(result.analysis for result in results):
        tasks = tasks.join(pd.concat([task_effects(one, args.margin) for one in results if one.analysis == analysis]))
    for result in results:
        mean_effects(result, effects, args.margin)
    table, remarks = pd.DataFrame(effects.values()), list(notes(effects, results))
    if results:
        print("", *effects_text(table), "", *remarks, sep="\n")
        names = [*CELL, "effect", "analysis"]
        posterior = {(*result.cell, result.effect, result.analysis): result.summary for result in results}
        posterior = pd.concat(posterior, names=[*names, "parameter"]).reset_index()[POSTERIOR]
        write(args.out, tasks=tasks.reset_index(), effects=table, posterior=posterior)
    text = ["# Is pretraining on the test texts unfair here?", "", *(f"- {line}" for line in lines + remarks), "",
            f"Effects in {unit}, 89 % intervals; the verdict is on these tasks", "", "```", *effects_text(table), "```"]
    (args.out / "summary.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    figures = [] if args.no_figures else draw_all(long, tasks, table, results, unit, args)
    names = ", ".join(sorted(path.name for path in args.out.glob("*.csv")))
    print(f"in {args.out.resolve()}: summary.md, {names}, {count(len(figures), 'figure')}")
    if failed := sum(bool(result.warning) for result in results):
        fits = f"{failed} of {count(len(results), 'fit')} did not converge"
        tqdm.write(f"warning: {fits}; more --tune and --draws may help", file=sys.stderr)
        raise SystemExit(3)


# --- shared: start ---
if __name__ == "__main__":
    with guard():
        main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
