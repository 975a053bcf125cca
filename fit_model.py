"""From results.csv to conclusions: is pretraining on unlabeled test text unfair, and how sure can one be?

Reproduces sections 5 to 8 and appendices D to F of "Evaluating the fairness of task-adaptive pretraining on unlabeled
test data before few-shot text classification" (Dubey) and adds intervals that hold what they say. m labelled training
texts, n unlabelled and n test texts; D_ijk of model i, task j, subsample k, in points (hundredths of an accuracy), is
    boost = acc_extra - acc_base      or      bias = acc_test - acc_extra
A cell is one (experiment, m, n). Four answers, always under these names, with 89 % intervals:
    these tasks       the headline, in closed form (these_tasks): the mean over tasks of the tasks' mean differences;
                      all models: D is averaged over them first. It needs two subsamples a task
    tasks like these  a t interval over the task means: tasks as a sample of tasks
    paper             Y_ijkl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + V_jk + W_jl + beta l (l = 1: treatment),
                      (1) to (10), and the differences (11), (12) that it predicts; its intervals do not hold 89 %
    hierarchical      D_ijk ~ N(delta_ij, s_ij), delta_ij ~ N(beta_i, tau_i), log s_ij ~ N(log s_i, omega_i): how much
                      tasks differ, one task's effect after shrinking. It weights quiet tasks most: no headline

Commands, cheapest first
    python fit_model.py results.csv --draws 0                    # conclusions, tables, figures, no sampler: seconds
    python fit_model.py results.csv --plan                       # how many subsamples are needed
    python fit_model.py results.csv                              # everything
    python fit_model.py results.csv more.csv folder --effects bias --n 500 --metric f1 --margin 2
    python fit_model.py accuracies            # the published layout, accuracies/m50/n500/bert/ag_news/accuracies.csv

Writes to fits/ summary.md, which a person reads first, figures *.png, and tables with the columns
    effects.csv       experiment, m, n, metric, effect, model (all: mean over models), target (the names above), tasks,
                      subsamples (fewest of a task), estimate, se, df, low, high, margin, verdict, needed (subsamples a
                      task for a half-width below the margin), detectable (told from 0 with 80 % power)
    means.csv         experiment, m, n, model, tasks, rows, boost, boost_median, bias, bias_median: Table 1
    tasks.csv         experiment, m, n, effect, model, task, subsamples, estimate, sd, majority, low, high, p (one-sided
                      sign flips of a bias), p_adjusted (Benjamini-Hochberg), flag_3, flag_2 (bias from +3, +2 points);
                      of the fits paper ((12)), hierarchical, their _low, _high, p_beyond (the margin)
    losses.csv        first, second (experiments), model, m, n, task, subsamples, ratio_extra, ratio_test (section 8)
    correlations.csv  experiment, m, n, effect, task, model_a, model_b, subsamples, spearman (appendix F)
    posterior.csv     experiment, m, n, effect, analysis, parameter, mean, sd, hdi_low, hdi_high, r_hat, ess_bulk,
                      ess_tail, warning (empty if it converged; else exit status 3)
    plan.csv          experiment, m, n, model, quantity, test_set, tasks, effective_tasks (equally noisy), subsamples,
                      mean, sd (of one subsample of a task), half_width, needed, needed_low, needed_high

Measured 2026-11-22 on 2 cores: --draws 0 --no-figures takes 4 s from the start of Python on all 27,500 published
rows; a fit 3 to 40 s, of which up to 16 compile the model once per shape, 160 s where it was done again: one in 16.
"""

import argparse
import contextlib
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

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from scipy import special, stats
from tqdm.auto import tqdm

MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
CENTRED = {"paper": 5, "hierarchical": 10}  # tasks from which c_jk, log s_ij are sampled centred: spread away from 0
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # target of acceptance, times the tuning, times the draws; the second: a rerun
PRIORS = {"paper": (1.0, 1.0), "wide": (1.5, 5.0)}  # sd of mu and beta; wide: the sensitivity check of appendix E
FEWEST_TASKS, MOST_TASKS = 5, 100  # with fewer the paper's W and words on many tasks are left out, with more figures
COMPILED = {}  # models by analysis, flags and shapes of the data
HYPER = ("mu", "alpha", "beta", "sd_U", "sd_V", "sd_W", "tau", "s", "omega")
SUMMARY = ["mean", "sd", "hdi_low", "hdi_high", "r_hat", "ess_bulk", "ess_tail", "warning"]


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


# --- shared: reading ---
ARMS = ("base", "extra", "test")
EFFECTS = {"boost": ("base", "extra"), "bias": ("extra", "test")}  # control, treatment
CELL = ["experiment", "m", "n"]
RUN = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # names a row
WHOLE = ["m", "n", "subsample", "num_classes", "seed"]
REQUIRED = [*RUN[:-1], "num_classes", "majority", *(f"acc_{arm}" for arm in ARMS)]
CHOICES = {"experiment": "experiment", "m": "m", "n": "n", "models": "model", "tasks": "task"}  # flag: column


def refuse(table, bad, what):
    """Stop at the first of the bad rows; what: a format string of the row's columns."""
    if bad.any():
        row = table[bad].iloc[0]
        stop(f"{row['where']}: {what.format(**row)}: correct or delete the line")


def read_file(path, needed):
    """A CSV file as a DataFrame of str with the column `where` (file, line); a torn last line is left out, and said."""
    raw = path.read_bytes()
    try:
        table = pd.read_csv(io.BytesIO(raw), header=None, dtype=str, keep_default_na=False, skip_blank_lines=False,
                            encoding="utf-8-sig", engine="python").dropna(how="all")  # nan: no such field
    except ValueError as error:
        stop(f"{path} is no CSV file in UTF-8 with equal lines: {error}")
    table.columns = header = [str(name).strip() for name in table.iloc[0]]
    for name in [name for name in (*needed, *header) if header.count(name) != 1]:
        found = "two columns" if name in header else "no column"
        stop(f"{path} has {found} {name!r}; columns found: {', '.join(header)}")
    table = table.assign(where=[f"{path}, line {index + 1}" for index in table.index])[1:]
    if table[-1:].isna().any(axis=None) and raw[-1:] not in b"\r\n":  # what a killed run leaves at most
        print(f"{path}: the last line is torn (its run was killed); it is left out")
        table = table[:-1]
    refuse(table, table.isna().any(axis=1), "fewer fields than the header has")
    return table


def read_path(path, needed):
    """Tables of a results file, or of a folder's results.csv, results.*-of-*.csv or files in the published layout."""
    if not path.exists():
        stop(f"{path} does not exist: give results files of run_experiment.py, or folders of them")
    files = [*path.glob("results.csv"), *path.glob("results.*-of-*.csv")] if path.is_dir() else [path]
    tables = [read_file(file, needed) for file in sorted(files)]
    for file in sorted(path.glob("m*/n*/*/*/accuracies.csv")):  # row k is subsample k
        m, n, model, task = file.parts[-5:-1]
        table = read_file(file, ARMS).rename(columns={arm: f"acc_{arm}" for arm in ARMS})
        names = {"experiment": path.resolve().name, "model": model, "task": task, "m": m[1:], "n": n[1:]}
        tables.append(table.assign(**names, subsample=np.arange(1, len(table) + 1).astype(str)))
    if not tables:
        stop(f"{path} holds no results.csv, results.*-of-*.csv, m<m>/n<n>/<model>/<task>/accuracies.csv: name a file")
    return tables


def read_results(paths, metric="acc"):
    """All rows of the paths, typed and checked, each run once; accuracies become k / n exactly, right_{arm} holds k."""
    wanted = [] if metric == "acc" else [f"{metric}_{arm}" for arm in ARMS]
    rows = pd.concat([table for path in paths for table in read_path(path, REQUIRED + wanted)], ignore_index=True)
    if rows.empty:
        stop(f"no rows in {', '.join(map(str, paths))}: run run_experiment.py first")
    more = ["seed", "split", "data", "recipe", "loss_extra", "loss_test", *wanted]
    rows = rows.reindex(columns=rows.columns.union(more, sort=False), fill_value="").fillna("")
    rows["seed"] = rows["seed"].replace("", "0")
    for name in ["seed", *REQUIRED[3:], *wanted]:
        values, kind, bad = pd.to_numeric(rows[name], errors="coerce"), "number", False
        if name in WHOLE:
            least = int(name != "seed")
            kind, bad = f"whole number from {least}", (values % 1 != 0) | ~values.between(least, 1e9)
        refuse(rows, bad | ~np.isfinite(values), f"{name} is {{{name}!r}}, not a {kind}")
        rows[name] = values.astype(int if name in WHOLE else float)
    refuse(rows, (rows["majority"] <= 0) | (rows["majority"] > 1), "majority is {majority}, not above 0 and at most 1")
    refuse(rows, (rows[RUN[:3]] == "").any(axis=1), "the experiment, the model or the task has no name")
    refuse(rows, rows["model"] == "all", "the model is called 'all', which stands for all models together")
    for arm in ARMS:
        share, right = rows[f"acc_{arm}"], (rows[f"acc_{arm}"] * rows["n"]).round().astype(int)
        off = (share - right / rows["n"]).abs() > 5.1e-5  # accuracies of four decimals will do
        what = f"acc_{arm} = {{acc_{arm}}} is no whole number of correct answers out of n = {{n}}"
        refuse(rows, off | ~share.between(0, 1), what)
        rows[f"right_{arm}"], rows[f"acc_{arm}"] = right, right / rows["n"]
    rows[["loss_extra", "loss_test"]] = rows[["loss_extra", "loss_test"]].apply(pd.to_numeric, errors="coerce")
    return each_once(rows, [*REQUIRED[-3:], *wanted])


def each_once(rows, values):
    """The rows, each run once; a run with other values, and one setting with two recipes or data sets, are refused."""
    checks = [(RUN, name) for name in [*values, "split"]] + [(RUN[:5], "recipe"), (["experiment", "task"], "data")]
    for scope, name in checks:
        known = rows[rows[name].astype(str) != ""].drop_duplicates([*scope, name])
        for _, two in known[known.duplicated(scope, keep=False)].groupby(scope):
            (first, a), (other, b) = two[["where", name]].to_numpy()[:2]
            stop(f"{first} and {other} agree in {', '.join(scope)} and differ in {name} ({a} and {b}): keep one of "
                 "them, or name their experiments differently")
    if (twice := rows.duplicated(RUN)).any():
        print(f"given twice, with equal values, and used once: {count(twice.sum(), 'row')}")
    return rows[~twice].sort_values(RUN, ignore_index=True)


def choose_rows(rows, args):
    """The rows that --experiment, --m, --n, --models and --tasks name; an unknown value ends the run."""
    for flag, name in CHOICES.items():
        found = sorted(set(rows[name]))
        wanted = getattr(args, flag) or found
        for value in sorted(set(wanted) - set(found)):
            stop(f"--{flag} {value}: not in the data chosen so far; found: {', '.join(map(str, found))}")
        rows = rows[rows[name].isin(wanted)]
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
GROUP, INTERVAL = [*CELL, "effect", "model"], ["estimate", "low", "high"]


# --- shared: tools ---
def training_variance(shares, n):
    """(variance, told from 0?) of a mean accuracy over tasks at one subsample a task, fixed test set, in points^2.
    shares: per task the accuracies of its subsamples, each on n fresh test texts. Their variance less the binomial one:
    a lower bound, since single answers also flip. Told from 0 by sum((K - 1) s^2 / binomial) against chi-square."""
    observed = np.array([np.var(share, ddof=1) for share in shares])
    binomial = np.array([np.mean(share * (1 - share)) / max(n - 1, 1) for share in shares])
    known, freedom = binomial > 0, np.array([len(share) - 1 for share in shares])
    p = stats.chi2.sf((freedom * observed)[known] @ (1 / binomial[known]), freedom[known].sum()) if known.any() else 1
    excess = (observed - binomial).sum()
    return 1e4 * max(excess, 0) / len(shares) ** 2, bool(excess > 0 and p < 0.055)  # one end of 89 %


def sign_flip_p(changes):
    """One-sided exact p of sum(changes), whole numbers, under random signs: exact if they are symmetric about 0."""
    sizes = np.abs(changes[changes != 0])
    share = np.ones(1)  # of the sign patterns, by the sum of the sizes with a plus: a convolution of two-point laws
    for size in sizes:
        share = (np.pad(share, (0, size)) + np.pad(share, (size, 0))) / 2
    return min(float(share[(sizes.sum() + changes.sum()) // 2 :].sum()), 1.0)  # ties count; rounding may exceed 1


def panels(title, lines, columns, width, height, **more):
    """(figure, its axes [lines, columns]); sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(lines, columns, squeeze=False, **more)


def write(folder, **tables):
    """Write DataFrames as CSV, numbers to 6 significant digits; of empty ones no file is left, not an earlier one."""
    for name, table in tables.items():
        (folder / f"{name}.csv").unlink(missing_ok=True)
        if len(table):
            table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
# --- end shared ---


def differences(rows, metric):
    """A row per cell, effect (boost, bias, acc_extra), model, task, subsample; `value` in points (acc, f1) or as is.
    Runs that differ in `seed` alone are averaged; model "all": means over models of the subsamples they share."""
    arms = rows.groupby([*CELL, "model", "task", "subsample"])[[f"{metric}_{arm}" for arm in ARMS]].mean()
    base, extra, test = (arms[name] * (100 if metric in ("acc", "f1") else 1) for name in arms)
    long = pd.concat({"boost": extra - base, "bias": test - extra, f"{metric}_extra": extra}, names=["effect"])
    long = long.round(9).rename("value").reset_index()
    unit = [*CELL, "effect", "task", "subsample"]
    models, shared = (long.groupby(names)["model"].transform("nunique") for names in (CELL, unit))
    both = long[(models > 1) & (shared == models)].groupby(unit, as_index=False)["value"].mean()
    return pd.concat([both.assign(model="all"), long], ignore_index=True)


def floor_of(metric, n):
    """Variance that rounding to whole answers adds to a difference in points: none of them is known better."""
    return (100 / n) ** 2 / 12 * (metric in ("acc", "f1"))


def verdict_of(low, high, margin):
    """Where an interval lies in respect of (-margin, margin)."""
    if margin is None or math.isnan(low):
        return ""
    if -margin < low and high < margin:
        return "within the margin"
    return "beyond the margin" if low > margin or high < -margin else "not settled"


def effective_tasks(variances):
    """How many equally noisy tasks would have the degrees of freedom of tasks with these variances (Satterthwaite)."""
    return variances.sum() ** 2 / (variances**2).sum() if variances.any() else len(variances)


def needed_subsamples(se_1, tasks, margin):
    """The least R >= 2 with half-width t(tasks (R - 1)) se_1 / sqrt(R) below the margin; se_1: at one subsample a task;
    tasks: as in effective_tasks, so that at R = K the half-width is that of these_tasks."""
    if not (margin and se_1 > 0):
        return math.nan
    R = max(int((stats.norm.ppf(UPPER) * se_1 / margin) ** 2), 2)  # from below: a t is wider than a Normal
    while stats.t.ppf(UPPER, tasks * (R - 1)) * se_1 / math.sqrt(R) >= margin:
        R += max(R // 1000, 1)
    return R


def detectable_effect(se, df):
    """The effect whose 89 % interval excludes 0 on its side with 80 % power, by the noncentral t; nan if se is 0."""
    return (se or math.nan) * special.nctdtrinc(df, 0.2, stats.t.ppf(UPPER, df))


def task_table(rows, long, metric):
    """tasks.csv before any fit, indexed by cell, effect, model, task: mean, sd, interval of the differences, tests."""
    names = [*CELL, "model", "task"]
    table = long[long["effect"].isin(EFFECTS)].groupby([*GROUP, "task"])["value"]
    table = table.agg(subsamples="count", estimate="mean", sd="std")
    table = table.join(rows.groupby(names)["majority"].mean(), on=names)
    K, variance = table["subsamples"], np.maximum(table["sd"] ** 2, floor_of(metric, table.index.get_level_values("n")))
    half = stats.t.ppf(UPPER, K - 1) * np.sqrt(variance / K)  # nan where there is one subsample
    table["low"], table["high"] = table["estimate"] - half, table["estimate"] + half
    if metric == "acc":
        changes = rows.assign(change=rows["right_test"] - rows["right_extra"]).groupby([*names, "subsample"])["change"]
        tests = changes.sum().groupby(names).agg(sign_flip_p).to_frame("p")
        tests["p_adjusted"] = tests["p"].groupby(names[:-1]).transform(stats.false_discovery_control)
        bias = table.index.get_level_values("effect") == "bias"
        table = table.join(tests, on=names)
        table.loc[~bias, ["p", "p_adjusted"]] = math.nan
        for flag in (3, 2):  # points of bias from which a task is lemon-picked (section 7, appendix E)
            table[f"flag_{flag}"] = (bias & (table["estimate"] >= flag)).astype(int)
    return table


def effects_table(tasks, metric, margin):
    """effects.csv before any fit: {(cell, effect, model, target): row}, targets 1 and 2; "all" models come first."""
    effects = {}
    for key, mine in sorted(tasks.groupby(GROUP), key=lambda group: (*group[0][:4], group[0][4] != "all", group[0][4])):
        K, means, v, J = mine["subsamples"], mine["estimate"], mine["sd"] ** 2, len(mine)
        floor, mean, se, df = floor_of(metric, key[2]), means.mean(), means.sem() or math.nan, J - 1 or math.nan
        half, w = stats.t.ppf(UPPER, df) * se, np.maximum(v, floor)
        needed = needed_subsamples(math.sqrt(w.sum(skipna=False)) / J, effective_tasks(w), margin)
        found = {"these tasks": (*these_tasks(means, v, K, floor), needed),
                 "tasks like these": (mean, se, df, mean - half, mean + half, math.nan)}
        for target, (estimate, se, df, low, high, needed) in found.items():
            effects[*key, target] = dict(
                zip(CELL, key), metric=metric, effect=key[3], model=key[4], target=target, tasks=J, subsamples=K.min(),
                estimate=estimate, se=se, df=df, low=low, high=high, margin=margin,
                verdict=verdict_of(low, high, margin), needed=needed, detectable=detectable_effect(se, df))
    return effects


def means_table(rows, long):
    """means.csv, Table 1 of the paper: means and medians over tasks of the tasks' means over subsamples."""
    unit = [*CELL, "model"]
    table = rows.groupby(unit).agg(tasks=("task", "nunique"), rows=("task", "size"))
    for effect in EFFECTS:
        means = long[long["effect"] == effect].groupby([*unit, "task"])["value"].mean().groupby(unit)
        table[effect], table[f"{effect}_median"] = means.mean(), means.median()
    return table.reset_index()


def losses_table(rows):
    """losses.csv: final pretraining losses of one experiment over those of another, subsample by subsample."""
    known = rows.dropna(subset=["loss_extra", "loss_test"])
    both = known.merge(known, on=RUN[1:], suffixes=("", "_2")).query("experiment < experiment_2")
    both = both.rename(columns={"experiment": "first", "experiment_2": "second"}).assign(
        ratio_extra=both["loss_extra_2"] / both["loss_extra"], ratio_test=both["loss_test_2"] / both["loss_test"])
    return both.groupby(["first", "second", "model", "m", "n", "task"], as_index=False).agg(
        subsamples=("subsample", "nunique"), ratio_extra=("ratio_extra", "mean"), ratio_test=("ratio_test", "mean"))


def correlations_table(long):
    """correlations.csv: do two models' effects go together over a task's subsamples? Rank correlation in each task."""
    unit, effects = [*CELL, "effect", "task"], long[long["effect"].isin(EFFECTS) & (long["model"] != "all")]
    both = effects.merge(effects, on=[*unit, "subsample"], suffixes=("_a", "_b")).query("model_a < model_b")
    groups = both.groupby(["model_a", "model_b", *unit])[["value_a", "value_b"]]
    table = groups.size().to_frame("subsamples")
    table["spearman"] = groups.corr(method="spearman", min_periods=3)["value_b"].to_numpy()[::2]  # rows a, b in turn
    return table.dropna().reset_index()[[*unit, "model_a", "model_b", "subsamples", "spearman"]]


def plan_table(long, metric, margin):
    """plan.csv: how well a quantity is known, how many subsamples are needed; accuracies also with a fixed test set."""
    table = []
    for (*cell, quantity, model), mine in long.groupby(GROUP):
        groups, floor = mine.groupby("task")["value"], floor_of(metric, cell[2])
        means, v, K, J = groups.mean(), groups.var(), groups.size(), groups.ngroups
        df = np.nan_to_num(these_tasks(means, v, K, floor)[2], nan=1)
        spread = np.sqrt(df / stats.chi2.ppf([UPPER, 1 - UPPER], df))  # of a standard deviation so known
        w = np.maximum(v, floor)
        plans, tasks = {"redrawn": math.sqrt(w.sum(skipna=False)) / J}, effective_tasks(w)  # errors at one subsample
        if quantity == "acc_extra" and model != "all" and K.min() > 1:
            variance, told = training_variance([group.to_numpy() / 100 for _, group in groups], cell[2])
            plans["fixed"] = math.sqrt(variance) if told else math.nan
        for test_set, se_1 in plans.items():
            half, sd = stats.t.ppf(UPPER, df) * se_1 / math.sqrt(K.min()), se_1 * math.sqrt(J)
            total, rest = (plans["redrawn"] * spread) ** 2, plans["redrawn"] ** 2 - se_1**2  # rest: of the test texts
            bounds = np.sqrt(np.maximum(total - rest, 1e-12)) * (se_1 > 0)
            needed = [needed_subsamples(se, tasks, margin) for se in (se_1, *bounds)]
            table.append([*cell, model, quantity, test_set, J, tasks, K.min(), means.mean(), sd, half, *needed])
    names = "tasks effective_tasks subsamples mean sd half_width needed needed_low needed_high".split()
    return pd.DataFrame(table, columns=[*CELL, "model", "quantity", "test_set", *names])


# The two models ---------------------------------------------------------------------------------------------


def import_pymc():
    """(pymc, arviz, pytensor.tensor), set to need no C compiler: nutpie compiles by numba, the rest is Python."""
    os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")
    with warnings.catch_warnings(action="ignore"):  # arviz announces its next version
        import arviz
        import pymc
        import pytensor.tensor
    return pymc, arviz, pytensor.tensor


def paper_model(rows, effect, args):
    """The paper's model of a cell, (1) to (10), in variables that mix; few tasks: no W, one task: no U. Exactly, with
    S_j = (W_j0 + W_j1) / sqrt 2 and D_j = (W_j1 - W_j0) / sqrt 2, independent Normal(0, sd_W),
        a_j = mu + beta / 2 + U_j + S_j / sqrt 2 ~ Normal(mu + beta / 2, sqrt(sd_U^2 + sd_W^2 / 2)),
        c_jk = a_j + V_jk ~ Normal(a_j, sd_V),   d_j = beta + sqrt 2 D_j,   logit p = c_jk + alpha_i + (l - 1/2) d_j.
    d_j is centred as far as the data know it: with s = sqrt 2 sd_W and k, the squared share of the variance of the
    tasks' changes in log odds that is more than binomial noise (the share itself mixes badly where it is a third),
        d_j = beta + s^(1-k) (z_j - k beta),   z_j ~ Normal(k beta, s^k).
    Over l, with q = e^(c + alpha): log((1 + q e^(d/2)) (1 + q e^(-d/2))) = log1p(q (e^(d/2) + e^(-d/2)) + q^2)."""
    pm, _, pt = import_pymc()
    names = [*(f"right_{arm}" for arm in EFFECTS[effect]), "n"]
    sums = rows.pivot_table(index=["task", "subsample"], columns="model", values=names, aggfunc="sum", fill_value=0)
    control, treatment, total = (sums[name].to_numpy().T.astype(int) for name in names)  # total 0: the model lacks it
    task_idx, tasks = pd.factorize(sums.index.get_level_values("task"))
    right, answers = (rows.groupby("task")[part].sum().to_numpy() for part in (names[:2], names[2:]))
    p = (right + 0.5) / (answers + 1)
    noise, spread = (1 / (answers * p * (1 - p))).sum(1).mean(), np.diff(special.logit(p)).var() or 1e-9
    both, known, models, J = control + treatment, max(1 - noise / spread, 0) ** 2, list(sums["n"]), len(tasks)
    data = {"total": total, "by_unit": both.sum(0), "by_model": both.sum(1), "change": np.diff(right)[:, 0] / 2,
            "task_idx": task_idx, "known": np.array(float(known))}
    interaction, (sd_mu, sd_beta) = J >= FEWEST_TASKS and not args.no_interaction, PRIORS[args.priors]
    coords = {"model": models, "later": models[1:], "task": tasks, "unit": range(len(task_idx))}
    with pm.Model(coords=coords) as model:
        total, by_unit, by_model, change, task_idx, k = (pm.Data(name, value) for name, value in data.items())
        mu, beta = pm.Normal("mu", 0, sd_mu), pm.Normal("beta", 0, sd_beta)
        alpha = pt.concatenate([[0.0], pm.Normal("alpha", 0, 5, dims="later")]) if len(models) > 1 else pt.zeros(1)
        sd_U = pm.HalfNormal("sd_U", 1) if J > 1 else 0
        sd_V, sd_W = pm.HalfNormal("sd_V", 1), pm.HalfNormal("sd_W", 3.5355) if interaction else 0
        level, s = mu + beta / 2, math.sqrt(2) * sd_W
        a = pm.Normal("a", level, pt.sqrt(sd_U**2 + sd_W**2 / 2), dims="task")[task_idx] if J > 1 else level
        c = (pm.Normal("c", a, sd_V, dims="unit") if J >= CENTRED["paper"] else
             pm.Deterministic("c", a + sd_V * pm.Normal("c_raw", 0, 1, dims="unit"), dims="unit"))
        d = beta + s ** (1 - k) * (pm.Normal("z", k * beta, s**k, dims="task") - k * beta) if interaction else beta
        d = pm.Deterministic("d", d * pt.ones(J), dims="task")
        q, ratio = pt.exp(c)[None] * pt.exp(alpha)[:, None], pt.exp(d / 2)
        both = (total * pt.log1p(q * (ratio + 1 / ratio)[task_idx] + q**2)).sum()
        pm.Potential("likelihood", (by_unit * c).sum() + (by_model * alpha).sum() + (change * d).sum() - both)
    return model


def predict(posterior, total, task_idx, rng):
    """Add to the posterior the predictive effects in points: `effect` (12) by model, task, means over subsamples (nan
    where a model lacks the task); `difference` (11) over all and by model. A draw is a data set."""
    c, d = posterior["c"].values[:, :, None], posterior["d"].values  # [chain, draw, 1, unit], [chain, draw, task]
    alpha = np.zeros((*d.shape[:2], len(total), 1))
    if "alpha" in posterior:
        alpha[:, :, 1:, 0] = posterior["alpha"]
    effects = np.empty((*alpha.shape[:3], d.shape[2]))
    for j in range(d.shape[2]):  # one task at a time, for the memory
        mine, half = task_idx == j, d[:, :, j, None, None] / 2
        control, treatment = (rng.binomial(total[:, mine], special.expit(c[..., mine] + alpha + sign * half))
                              for sign in (-1, 1))
        answers = total[:, mine].sum(1)
        effects[..., j] = 100 * (treatment - control).sum(-1) / np.where(answers, answers, np.nan)
    by_model = np.nanmean(effects, axis=-1)
    over = np.concatenate([by_model.mean(-1, keepdims=True), by_model], axis=-1)
    posterior["effect"] = ("chain", "draw", "model", "task"), effects
    posterior["difference"] = ("chain", "draw", "over"), over


def hierarchical_model(rows, effect):
    """The model at this script's head, of a cell, rounding's variance added to each s_ij^2. delta is summed out,
    mean_ij ~ N(beta_i, sqrt(tau_i^2 + s_ij^2 / K_ij)), and drawn given the rest as `effect`."""
    pm, _, pt = import_pymc()
    long = differences(rows, "acc").query("effect == @effect and model != 'all'")
    wide = long.pivot_table("value", "model", "task", aggfunc=["count", "mean", "var"]).fillna(0).astype(float)
    with pm.Model(coords={"model": wide.index, "task": wide["mean"].columns}) as model:
        number, average, variance = (pm.Data(f"D_{name}", wide[name].to_numpy()) for name in ("count", "mean", "var"))
        rounding, more = pm.Data("rounding", np.array(floor_of("acc", rows["n"].iloc[0]))), pt.maximum(number - 1, 0)
        beta, tau = pm.Normal("beta", 0, 10, dims="model"), pm.HalfNormal("tau", 5, dims="model")
        s, omega = pm.HalfNormal("s", 10, dims="model"), pm.HalfNormal("omega", 1, dims="model")
        level, spread, dims = pt.log(s)[:, None], omega[:, None], ("model", "task")
        centred = wide["mean"].shape[1] >= CENTRED["hierarchical"]
        log_s = pm.Normal("log_s", *((level, spread) if centred else (0, 1)), dims=dims)
        log_s = log_s if centred else level + spread * log_s
        within, between, gap = pt.exp(2 * log_s) + rounding, tau[:, None] ** 2, average - beta[:, None]
        both = within + number * between
        means = (number > 0) * pt.log(both) + number * gap**2 / both
        pm.Potential("likelihood", -(more * (pt.log(within) + variance / within) + means).sum() / 2)
        delta = beta[:, None] + number * between / both * gap
        delta += pt.sqrt(between * within / both) * pm.Normal("z", 0, 1, dims=dims)
        pm.Deterministic("effect", pt.switch(number > 0, delta, np.nan), dims=dims)
        pm.Deterministic("new_task", beta + tau * pm.Normal("z_new", 0, 1, dims="model"), dims="model")
        pm.Deterministic("mean", beta.mean())
    return model


def warning_of(table, divergences):
    """"" if every reported parameter converged, else what is wrong; a value that is not a number fails."""
    r_hat, (bulk, tail) = table["r_hat"].max(skipna=False), table[["ess_bulk", "ess_tail"]].min(skipna=False)
    if r_hat <= MAX_R_HAT and bulk >= MIN_ESS and tail >= MIN_ESS and not divergences:
        return ""
    return f"not converged: r_hat {r_hat:.3f}, ESS {bulk:.0f} bulk, {tail:.0f} tail, {count(divergences, 'divergence')}"


def fit(rows, effect, analysis, args):
    """One analysis of one effect in one cell by nutpie's NUTS; if it did not converge, once more, longer, finer."""
    _, arviz, _ = import_pymc()
    import nutpie

    began, paper = time.time(), analysis == "paper"
    model = paper_model(rows, effect, args) if paper else hierarchical_model(rows, effect)
    data = {variable.name: variable.get_value() for variable in model.data_vars}
    key = (analysis, args.priors, args.no_interaction, *(value.shape for value in data.values()))
    if key not in COMPILED:  # once for each shape of the data: it takes longer than most samplings
        with warnings.catch_warnings(action="ignore"):  # of large expressions that are compiled in two parts
            COMPILED[key] = nutpie.compile_pymc_model(model)
    compiled = COMPILED[key].with_data(**{name: data[name] for name in COMPILED[key].shared_data})
    models, tasks = (list(model.coords[name]) for name in ("model", "task"))
    for accept, longer, more in ATTEMPTS:
        trace = nutpie.sample(compiled, chains=args.chains, cores=min(args.cores, args.chains), tune=args.tune * longer,
                              draws=args.draws * more, target_accept=accept, seed=args.seed, save_warmup=False,
                              progress_bar=False)
        posterior = trace.posterior.assign_coords(model=models, task=tasks, later=models[1:], over=["all", *models])
        if paper:
            predict(posterior, data["total"], data["task_idx"], np.random.default_rng(args.seed))
        reported = [name for name in posterior if name in (*HYPER, "d", "difference", "mean", "new_task")]
        summary = arviz.summary(posterior[reported], hdi_prob=SHARE, round_to="none")
        if not (warning := warning_of(summary, int(trace.sample_stats["diverging"].sum()))):
            break
    summary = summary.rename(columns={"hdi_5.5%": "hdi_low", "hdi_94.5%": "hdi_high"}).assign(warning=warning)[SUMMARY]
    return SimpleNamespace(cell=tuple(rows[CELL].iloc[0]), effect=effect, analysis=analysis, models=models, tasks=tasks,
                           posterior=posterior, summary=summary, warning=warning, seconds=time.time() - began)


def task_effects(result, margin):
    """The columns that a fit adds to tasks.csv: task effects, predicted (12) or shrunken, indexed as that table."""
    draws, name = result.posterior["effect"], result.analysis
    low, high = import_pymc()[1].hdi(draws, hdi_prob=SHARE)["effect"].transpose("hdi", ...)
    columns = {name: draws.mean(("chain", "draw")), f"{name}_low": low, f"{name}_high": high}
    if name == "hierarchical":
        columns["p_beyond"] = (abs(draws) > margin).mean(("chain", "draw"))
    table = pd.DataFrame({column: values.to_series() for column, values in columns.items()})
    return pd.concat({(*result.cell, result.effect): table}, names=[*CELL, "effect"])


def mean_effects(result, effects, margin):
    """Add a fit's rows to effects (see effects_table): (11), or beta and its mean over models."""
    for model in ["all"] * (len(result.models) > 1) + result.models:
        name = f"difference[{model}]" if result.analysis == "paper" else "mean" if model == "all" else f"beta[{model}]"
        mean, sd, low, high = result.summary.loc[name, ["mean", "sd", "hdi_low", "hdi_high"]]
        key = (*result.cell, result.effect, model)
        first = effects.get((*key, "these tasks")) or dict(zip(GROUP, key), metric="acc", margin=margin)
        effects[*key, result.analysis] = first | dict(
            target=result.analysis, tasks=len(result.tasks), estimate=mean, se=sd, df=math.nan, low=low, high=high,
            verdict=verdict_of(low, high, margin), needed=math.nan, detectable=math.nan)
        headline, se = (first.get(name, math.nan) for name in ("estimate", "se"))  # nan: the models share no subsample
        if result.analysis == "hierarchical" and abs(mean - headline) > se:
            yield (f"{model}: the hierarchical mean is {mean - headline:+.2f} points from the mean of these tasks, more"
                   " than its standard error: it shrinks, and weights quiet tasks most; take these tasks")


def fit_all(rows, effects, args):
    """Every analysis of every effect of every cell that it can be made of; adds to effects, prints notes on them."""
    jobs, results = list(itertools.product(rows.groupby(CELL), args.effects, dict.fromkeys(args.analysis))), []
    for (cell, mine), effect, analysis in tqdm(jobs, desc="fits", leave=False):
        where = f"{title_of(*cell)}, {effect}, {analysis}: "
        sizes = mine.groupby(["model", "task"])["subsample"].nunique()
        if analysis == "hierarchical" and (sizes.min() < 2 or sizes.groupby("model").size().min() < 2):
            tqdm.write(f"{where}left out, it needs two tasks with two subsamples each", file=sys.stdout)
            continue
        results.append(result := fit(mine, effect, analysis, args))
        dropped = " and ".join(name for name in "WU" if f"sd_{name}" not in result.posterior and analysis == "paper")
        without = f" without {dropped} ({count(len(result.tasks), 'task')})" if dropped else ""
        notes = [f"{result.warning or 'converged'}{without} ({result.seconds:.0f} s)"]
        result.notes = [where + note for note in notes + list(mean_effects(result, effects, args.margin))]
        tqdm.write("\n".join(result.notes), file=sys.stdout)
    return results


# Words ------------------------------------------------------------------------------------------------------


def conclusion(row, unit):
    """One sentence on a row of effects.csv (target: these tasks)."""
    what = f"{title_of(row.experiment, row.m, row.n)}: {row.effect}" + f" of {row.model}" * (row.model != "all")
    if math.isnan(row.low):
        why = "it takes two subsamples of each task" if row.subsamples < 2 else "all differences are equal"
        return f"{what}: {row.estimate:+.3g} {unit} observed, without an interval: {why}"
    half, times = (row.high - row.low) / 2, row.needed / row.subsamples
    D = 1 if half > 0.25 else 2 if unit == "points" else 4
    margin = f"{row.margin or 0:g} {unit.removesuffix('s') if row.margin == 1 else unit}"
    if not row.verdict:
        verdict = "told from 0" if row.low > 0 or row.high < 0 else "not told from 0"
    elif row.verdict != "not settled":
        verdict = f"{row.verdict} of {margin}"
    elif half < row.margin:
        verdict = f"not settled: it reaches across the margin of {margin}"
    else:
        more = f"about {times:.0f} times as many subsamples" if times >= 1.8 else f"{row.needed:.0f} subsamples a task"
        verdict = f"not settled: these data know it to ±{half:.{D}f} {unit}; "
        verdict += f"{more} would settle it against a margin of {margin}"
    those = "this task" if row.tasks == 1 else f"these {row.tasks} tasks"
    return f"{what}: between {row.low:+.{D}f} and {row.high:+.{D}f} {unit} for {those} (89 % interval): {verdict}"


def conclusions(effects, rows, metric, unit):
    """What a reader sees first: a sentence per experiment and effect, all models together; one on accuracies near 1."""
    mine, D = effects[effects["target"] == "these tasks"], 2 if unit == "points" else 4
    both = (mine["model"] == "all") & mine["low"].notna()  # else the models share too little: each for itself
    known = both.groupby([mine[name] for name in (*CELL, "effect")]).transform("any")
    mine = mine[both | ~known & (mine["model"] != "all")]
    for (experiment, effect, model), cells in mine.groupby(["experiment", "effect", "model"], sort=False):
        known, what = cells.dropna(subset="low"), effect + f" of {model}" * (model != "all")
        if len(cells) == 1 or known.empty:
            yield from (conclusion(row, unit) for row in cells.itertuples())
            continue
        low, high, estimates = known["low"], known["high"], known["estimate"]
        verdicts = ", ".join(f"{name} in {number}" for name, number in known["verdict"].value_counts().items() if name)
        verdicts += f" (margin {known['margin'].iloc[0]:g}); " if verdicts else ""
        estimates, intervals = (f"from {least:+.{D}f} to {most:+.{D}f}" for least, most in (
            (estimates.min(), estimates.max()), (low.min(), high.max())))
        silent = f" ({len(cells) - len(known)} without an interval left out)" * (len(cells) > len(known))
        yield (f"{experiment}: {what}: estimates {estimates} {unit}, 89 % intervals {intervals}, in {len(known)} "
               f"settings of m and n{silent}: {verdicts}{((low > 0) | (high < 0)).sum()} exclude 0, by chance alone "
               f"{(1 - SHARE) * len(known):.1f} would")
    for cell, share in rows.groupby(CELL)["acc_extra"].mean().items():
        if metric == "acc" and share > 0.95:
            yield f"{title_of(*cell)}: acc_extra is {share:.3f} on average: so near 1 an effect has little room"


def effects_text(effects, unit):
    """The effects of every cell and model: a column a target, then the verdict on these tasks."""
    D = 2 if unit == "points" else 4
    shown = [f"{row.estimate:+.{D}f} [{row.low:+.{D}f}, {row.high:+.{D}f}]" for row in effects.itertuples()]
    wide = effects.assign(shown=shown).pivot_table("shown", GROUP, "target", aggfunc="first", sort=False)
    tasks, verdicts = effects.drop_duplicates(GROUP), effects[effects["target"] == "these tasks"]
    wide = wide.join(tasks.set_index(GROUP)["tasks"]).join(verdicts.set_index(GROUP)[["verdict", "needed"]])
    table = wide.astype({"needed": "Int64"}).reset_index()
    return re.sub(r"\[\+nan, \+nan\]|<NA>", "", table.to_string(index=False, na_rep=""))


def many_lines(tasks, losses, correlations, unit):
    """What only many tasks can show: signs of means, sign-flip tests, lemon-picked tasks, correlations; and losses."""
    D = 2 if unit == "points" else 4
    for (experiment, effect), mine in tasks[tasks["model"] != "all"].groupby(["experiment", "effect"]):
        means = mine.groupby("task")["estimate"].mean().round(9)
        if len(means) < FEWEST_TASKS:
            continue
        yield (f"{experiment}, {effect} of the tasks over settings and models: {(means > 0).sum()} positive, "
               f"{(means == 0).sum()} zero, {(means < 0).sum()} negative; "
               f"from {means.min():+.{D}f} ({means.idxmin()}) to {means.max():+.{D}f} ({means.idxmax()})")
        if effect == "bias" and "p" in mine:
            p, picked = mine["p_adjusted"], ", ".join(sorted(set(mine.loc[mine["flag_3"] == 1, "task"])))
            yield (f"{experiment}, one-sided sign-flip tests of a positive bias: {len(p)}, adjusted p below .05: "
                   f"{(p < 0.05).sum()}, smallest {p.min():.3f}; bias from +3 points: {picked or 'none'}")
        if len(found := correlations.query("experiment == @experiment and effect == @effect")):
            chance, rho = math.sqrt((1 / (found["subsamples"] - 1)).mean()), found["spearman"]
            yield (f"{experiment}, rank correlation of two models' {effect} over the same subsamples: mean "
                   f"{rho.mean():+.3f}, sd {rho.std():.3f}; of unrelated ones 0 and {chance:.3f}")
    for (first, second), mine in losses.groupby(["first", "second"]):
        extra, test = mine[["ratio_extra", "ratio_test"]].mean()
        yield f"final pretraining loss of {second} over that of {first}: {extra:.3f} (extra), {test:.3f} (test)"


def plan_lines(plan, margin, unit):
    """The plan in sentences: per cell and model what is known, and how many subsamples a task would do."""
    D = 2 if unit == "points" else 4
    sets = {"redrawn": " with test texts drawn anew each time", "fixed": " with a fixed test set"}
    for (*cell, model), mine in plan.groupby([*CELL, "model"], sort=False):
        who = "mean over models" if model == "all" else model
        yield f"{title_of(*cell)}, {who}, {count(mine['tasks'].max(), 'task')}:"
        for row in mine.itertuples():
            known = f"{'known' if row.test_set == 'redrawn' else 'would be known'} to ±{row.half_width:.{D}f} by"
            one = row.half_width * math.sqrt(row.subsamples)  # the noise being as well known as it is
            text = f"{row.mean:+.{D}f} {unit}, {known} {row.subsamples} subsamples a task (one: ±{one:.{D}f})"
            if row.needed > 0:
                between = f"{row.needed_low:.0f} to {row.needed_high:.0f}"
                text += f"; {row.needed:.0f} bring that below {margin:g} (89 % interval: {between})"
            elif row.subsamples < 2:
                text = "no plan from one subsample of a task; run at least 2"
            elif math.isnan(row.sd):
                text = "the variance of training alone is not told from 0 by these data; more subsamples could tell"
            yield f"  {row.quantity}{'' if row.quantity in EFFECTS else sets[row.test_set]}: {text}"


# Figures ----------------------------------------------------------------------------------------------------


def forest(title, names, parts, **more):
    """(figure, its axes): a panel of differences a label of parts, a line at 0, the names downwards. parts[label] holds
    {name in the legend: DataFrame estimate, low, high, indexed by the names}: points with intervals."""
    width, height = 2.5 + 4.3 * len(parts), 2.1 + 0.32 * len(names)
    figure, (axes,) = panels(title, 1, len(parts), width, height, sharey=True, **more)
    for axis, (label, tables) in zip(axes, parts.items()):
        for k, (name, table) in enumerate(tables.items()):
            y = pd.Index(names).get_indexer(table.index) + 0.7 * (k + 0.5) / len(tables) - 0.35
            axis.hlines(y, *table.iloc[:, 1:].to_numpy().T, f"C{k}", lw=2, label=name)
            axis.plot(table.iloc[:, 0], y, "ko", ms=3)
        axis.axvline(0, color="grey", lw=1, ls="--", zorder=0)
        axis.grid(axis="x", alpha=0.3)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set(xlabel=label, ylim=(len(names) - 0.4, -0.7))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure, axes


def draw_effects(effects, kinds, unit, margin):
    """effects.png: every answer by cell and model; one x scale for both effects, the kinds."""
    lines = [f"{title_of(row.experiment, row.m, row.n)}  {row.model}" for row in effects.itertuples()]
    groups = effects.assign(line=lines).set_index("line").groupby(["effect", "target"], sort=False)[INTERVAL]
    parts = {f"{kind} ({unit})": {name: mine for (effect, name), mine in groups if effect == kind} for kind in kinds}
    names, title = list(dict.fromkeys(lines)), "Mean effects, 89 % intervals; grey: the margin"
    figure, axes = forest(title, names, parts, sharex=True)
    for axis in axes:
        axis.axvspan(-(margin or 0), margin or 0, color="grey", alpha=0.12, lw=0)
    return figure


def draw_tasks(table, cell, effect, unit):
    """tasks.*.png: each task's mean and own interval beside what the fits predict (12) or leave after shrinking."""
    table = table.drop(index="all", level="model", errors="ignore")
    order = table["estimate"].groupby("task").mean().sort_values(ascending=False).index
    looks = {"observed": INTERVAL} | {name: [name, f"{name}_low", f"{name}_high"] for name in CENTRED if name in table}
    models = {model: mine.droplevel("model") for model, mine in table.groupby("model")}
    parts = {model: {name: mine[columns] for name, columns in looks.items()} for model, mine in models.items()}
    figure, axes = forest(f"{effect} of each task ({unit}), 89 % intervals: {title_of(*cell)}", order, parts)
    for axis, mine in zip(axes, models.values()):
        texts = [f"{sd:.1f}, {K}".removeprefix("nan, ") for sd, K in zip(mine["sd"], mine["subsamples"])]
        right = axis.secondary_yaxis("right")
        right.set_yticks(order.get_indexer(mine.index), texts, fontsize=7)
        right.set_ylabel("sd and number of subsamples", fontsize=7)
    return figure


def draw_differences(long, kinds, cell, model, unit):
    """differences.*.png, Figures 13 to 20: boost and bias of each subsample as violins, per task, for one model."""
    title = f"{model}, {title_of(*cell)}\nline: a subsample; diamond: the task's mean"
    figure, axes = forest(title, sorted(set(long["task"])), {f"{effect} ({unit})": {} for effect in kinds})
    for axis, effect in zip(axes, kinds):
        mine = long[long["effect"] == effect]
        tasks = mine.groupby("task")["value"]
        axis.violinplot([values for _, values in tasks], range(tasks.ngroups), orientation="horizontal", widths=0.8,
                        showextrema=False)
        axis.plot(mine["value"], tasks.ngroup(), "C0|", alpha=0.5)
        axis.plot(tasks.mean(), range(tasks.ngroups), "kD", ms=4)
    return figure


def draw_plan(plan, margin, unit):
    """plan.png: half-width of the 89 % interval against the number of subsamples a task, a panel a cell."""
    cells, R = plan[plan["sd"] > 0].groupby(CELL), np.unique(np.geomspace(2, 200, 60).astype(int))
    title = "How well do R subsamples a task know the mean over tasks?"
    figure, axes = panels(title, len(cells), 1, 8, 1 + 3.5 * len(cells))
    for axis, (cell, mine) in zip(axes[:, 0], cells):
        for row in mine.itertuples():
            half = stats.t.ppf(UPPER, row.effective_tasks * (R - 1)) * row.sd / np.sqrt(R * row.tasks)
            fixed, style = row.test_set == "fixed", ":" if row.model == "all" else "-"
            name = f"{row.quantity}{', fixed test set' * fixed}, {row.model}"
            axis.loglog(R, half, "--" if fixed else style, label=name)
        axis.axhline(margin or math.nan, color="black", lw=1, ls="-.", label="margin")
        axis.set(title=title_of(*cell), xlabel="R, subsamples a task", ylabel=f"half-width ({unit})")
        for scale in (axis.xaxis, axis.yaxis):
            scale.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator(), major_formatter="{x:g}")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def draw_paper(results):
    """paper.*.png of one cell: the paper's distributions of the average differences (11), Figures 3, 5 and 6."""
    title = f"The paper's model: {title_of(*results[0].cell)}\nits 89 % intervals do not hold 89 %"
    label = "mean difference over models, tasks, subsamples (points)"
    figure, (axis,) = forest(title, [result.effect for result in results], {label: {}})
    for y, result in enumerate(results):
        draws = result.posterior["difference"].sel(over="all").values.ravel()
        axis.violinplot(draws, [y], orientation="horizontal", widths=0.7, showextrema=False)
        axis.plot(result.summary.loc["difference[all]", ["hdi_low", "mean", "hdi_high"]], [y] * 3, "ko-", ms=4)
    return figure


def draw_all(long, tasks, effects, results, unit, args):
    """(name, figure) of all figures, one at a time."""
    yield "effects", draw_effects(effects, args.effects, unit, args.margin)
    for (*cell, effect), mine in tasks.groupby([*CELL, "effect"]):
        if FEWEST_TASKS <= mine.index.unique("task").size <= MOST_TASKS:
            yield f"tasks.{file_of(*cell, effect)}", draw_tasks(mine.loc[(*cell, effect)], cell, effect, unit)
    for (*cell, model), mine in long[long["model"] != "all"].groupby([*CELL, "model"]):
        if mine["task"].nunique() <= MOST_TASKS:
            yield f"differences.{file_of(*cell, model)}", draw_differences(mine, args.effects, cell, model, unit)
    paper = [result for result in results if result.analysis == "paper"]
    for cell, own in itertools.groupby(paper, key=lambda result: result.cell):
        yield f"paper.{file_of(*cell)}", draw_paper(list(own))
    for result in results:  # densities and traces of the hyperparameters by chain (Figure 12)
        names, what = [name for name in HYPER if name in result.posterior], f"{result.analysis}, {result.effect}"
        figure, axes = panels(f"{what}: {title_of(*result.cell)}", len(names), 2, 10, 1.5 * len(names))
        import_pymc()[1].plot_trace(result.posterior, var_names=names, axes=axes)
        yield f"traces/{result.analysis}.{file_of(*result.cell, result.effect)}", figure


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], epilog="Columns: see the script's head.")
    add = parser.add_argument_group("what to run").add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], metavar="FILE or FOLDER",
        help="results files, folders of them, or folders in the published layout (results.csv)")
    add("--effects", nargs="+", choices=tuple(EFFECTS), default=list(EFFECTS), help="(boost bias)")
    add("--metric", default="acc", help="acc, f1, nll or any NAME of NAME_base, NAME_extra, NAME_test (%(default)s)")
    add("--margin", type=float, metavar="POINTS", help="effects within it do not matter (acc, f1: 1; others: none)")
    add("--plan", action="store_true", help="only: how many subsamples a task effects and acc_extra need")
    for flag, name in CHOICES.items():
        add(f"--{flag}", nargs="+", type=int if name in WHOLE else str, metavar=name.upper(), help="only these (all)")
    add = parser.add_argument_group("sampling").add_argument
    add("--analysis", nargs="+", choices=tuple(CENTRED), default=list(CENTRED), help="(paper hierarchical)")
    add("--draws", type=int, default=1000, metavar="N", help="per chain, after tuning; 0: no sampler (%(default)s)")
    add("--tune", type=positive, default=500, metavar="N", help="tuning steps per chain (%(default)s)")
    add("--chains", type=positive, default=4, metavar="N", help="(%(default)s)")
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    add("--cores", type=positive, default=os.cpu_count() or 1, metavar="N", help="chains at once (all there are)")
    add("--priors", choices=tuple(PRIORS), default="paper", help="wide: sd 1.5 for mu, 5 for beta (%(default)s)")
    add("--no-interaction", action="store_true", help="the paper's model without W, as in Figure 10")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("fits"), metavar="FOLDER", help="tables and figures (%(default)s)")
    add("--no-figures", action="store_true", help="tables only")
    args = parser.parse_args(argv)
    if args.margin is None and args.metric in ("acc", "f1"):
        args.margin = 1.0
    few = args.draws and (args.draws < 10 or args.chains < 2)
    wrong = args.seed < 0 or not args.metric.isidentifier() or not (args.margin is None or 0 < args.margin < math.inf)
    if few or wrong:
        parser.error("a seed is from 0, a margin above 0, a metric of letters, digits and _; take 2 chains of 10 draws "
                     "at least, or 0 draws")
    return args


@matplotlib.rc_context({"text.parse_math": False})  # a $ in a name is a $
def main(argv=None):
    args = parse_args(argv)
    unit = {"acc": "points", "f1": "points", "nll": "nats"}.get(args.metric, args.metric)
    rows = choose_rows(read_results(args.paths, args.metric), args)
    long = differences(rows, args.metric)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plan:
        plan = plan_table(long, args.metric, args.margin)
        print(*plan_lines(plan, args.margin, unit), sep="\n")
        write(args.out, plan=plan)
        if drawn := not args.no_figures and bool((plan["sd"] > 0).any()):
            draw_plan(plan, args.margin, unit).savefig(args.out / "plan.png", dpi=130)
        print(f"in {args.out.resolve()}: plan.csv{', plan.png' * drawn}")
        return

    # The conclusion first, then the tables
    tasks = task_table(rows, long, args.metric).query("effect in @args.effects")
    effects = effects_table(tasks, args.metric, args.margin)
    table, losses, correlations = pd.DataFrame(effects.values()), losses_table(rows), correlations_table(long)
    lines = list(conclusions(table, rows, args.metric, unit))
    print(*lines, f"\nEffects in {unit}, 89 % intervals", effects_text(table, unit), sep="\n")
    print("", *many_lines(tasks.reset_index(), losses, correlations, unit), sep="\n")
    write(args.out, means=means_table(rows, long), losses=losses, correlations=correlations, effects=table,
          tasks=tasks.reset_index())

    # The two samplers
    results = fit_all(rows, effects, args) if args.draws and args.metric == "acc" else []
    if results:
        fitted = pd.concat([task_effects(result, args.margin) for result in results]).groupby(tasks.index.names).first()
        tasks, table = tasks.join(fitted), pd.DataFrame(effects.values())
        lines += itertools.chain(*(result.notes for result in results))
        print("", effects_text(table, unit), sep="\n")
        posterior = {(*result.cell, result.effect, result.analysis): result.summary for result in results}
        posterior = pd.concat(posterior, names=[*CELL, "effect", "analysis", "parameter"]).reset_index()
        write(args.out, tasks=tasks.reset_index(), effects=table, posterior=posterior)

    # What a person reads
    text = ["# Is pretraining on the test texts unfair here?\n", *(f"- {line}" for line in lines), "",
            f"Effects in {unit}, 89 % intervals; verdict on these tasks\n\n```", effects_text(table, unit), "```\n"]
    (args.out / "summary.md").write_text("\n".join(text), encoding="utf-8")
    for name, figure in draw_all(long, tasks, table, results, unit, args) if not args.no_figures else ():
        (args.out / f"{name}.png").parent.mkdir(exist_ok=True)
        figure.savefig(args.out / f"{name}.png", dpi=130)
    print(f"in {args.out.resolve()}: summary.md, tables *.csv{'' if args.no_figures else ', figures *.png'}")
    if failed := sum(bool(result.warning) for result in results):
        fits = f"{failed} of {count(len(results), 'fit')} did not converge"
        tqdm.write(f"warning: {fits}; more --tune and --draws may help", file=sys.stderr)
        raise SystemExit(3)


# --- shared: start ---
if __name__ == "__main__":
    with guard():
        main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
