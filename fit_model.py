# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "pymc==5.28.5", "nutpie==0.16.8",
#     "matplotlib==3.10.9", "tqdm==4.70.1",
# ]
# ///
"""From results.csv to conclusions: is pretraining on unlabeled test text unfair, how sure is it?

Reproduces sections 5 to 8 and appendix D of "Evaluating the fairness of task-adaptive pretraining
on unlabeled test data before few-shot text classification" (Dubey) and adds intervals that hold
what they say. m labelled training texts, n unlabelled and n test texts; D_ijk of model i, task j,
subsample k, in points (hundredths of an accuracy), is
    boost = acc_extra - acc_base      or      bias = acc_test - acc_extra
on the texts of `test`; with crossed arms its mean with the mirror image on the texts of `extra`, so
that the luck of a training run cancels from the bias. A cell is one (experiment, m, n). Four
answers, with 89 % intervals:
    these tasks       the headline, in closed form: the mean over tasks of the tasks' mean
                      differences; model "all": D is averaged over the models first
    tasks like these  a t interval over the task means
    paper             Y_ijkl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + V_jk + W_jl + beta l
                      (l = 1: treatment), and the differences (11), (12) that it predicts, of
                      plain arms; its intervals do not hold 89 %
    hierarchical      D_ijk ~ N(delta_ij, s_ij), delta_ij ~ N(beta_i, tau_i),
                      log s_ij ~ N(log s_i, omega_i): how much tasks differ, one task's effect
                      after shrinking; it weights quiet tasks most

Commands, cheapest first
    python fit_model.py results.csv --draws 0       # conclusions, tables, figures: seconds
    python fit_model.py results.csv --plan          # how many subsamples are needed
    python fit_model.py results.csv                 # everything
    python fit_model.py results.csv more.csv folder --effects bias --n 500 --metric f1 --margin 2
    python fit_model.py accuracies       # published layout: m50/n500/bert/ag_news/accuracies.csv

Writes to fits/ (--plan: plan/) summary.md, the page to hand on, figures *.png, and the columns
    effects.csv    experiment, m, n (empty: all settings together), metric, effect, model, arms,
                   target (the names above), tasks, left_out (tasks with one subsample), subsamples
                   (fewest of a task), estimate, se, df, low, high, margin, verdict, needed
                   (subsamples of each task that give ± the margin), to_settle (a verdict with 80 %
                   probability if there is no effect), detectable (effect, with 80 % power)
    means.csv      experiment, m, n, model, tasks, rows, boost, bias: Table 1
    tasks.csv      experiment, m, n, effect, model, task, subsamples, estimate, sd, arms, low, high,
                   verdict, p (one-sided sign flips of a bias), p_adjusted (Benjamini-Hochberg),
                   paper ((12)), hierarchical, their _low, _high, p_beyond (the margin)
    posterior.csv  experiment, m, n, effect, analysis, parameter, mean, sd, hdi_low, hdi_high,
                   r_hat, ess_bulk, ess_tail, warning (empty: converged; else exit status 3)
    plan.csv       experiment, m, n, model, arms, tasks, subsamples, quantity, test_set (redrawn,
                   fixed), mean, sd (of one subsample of a task), half_width (of the interval), one
                   (with one subsample), needed, needed_low, needed_high (its interval), to_settle

Measured 2026-11-22 on 2 cores of an AMD EPYC that did other work, seconds of CPU: --draws 0
--no-figures 3.4 on 27,500 published rows; a fit 3 to 40, of which up to 16 compile the model once
per shape, 160 where it was done again: one in 16.
"""

import argparse
import csv
import itertools
import math
import os
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import special, stats
from tqdm.auto import tqdm

MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
CENTRED = {"paper": 5, "hierarchical": 10}  # tasks from which c_jk, log s_ij are sampled centred
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # target of acceptance, times the tuning, times the draws
FEWEST_TASKS, MOST_TASKS = 5, 100  # fewer: no W, no words on many tasks; more: no figure of tasks
PILOT = 5  # subsamples of each task to begin with
COMPILED = {}  # models by analysis, flags and shapes of the data
NUISANCE = ["a", "c", "c_raw", "z", "z_new", "log_s", "effect"]  # not reported as parameters
MADE = (  # what an earlier run may have left in the output folder
    "effects.csv", "means.csv", "tasks.csv", "posterior.csv", "plan.csv", "effects.png",
    "tasks.*.png",
)
SCRIPT = "fit_model.py"
PLAN = (
    "half_width: the uncertainty of the mean, one: with one subsample of each task; needed: the "
    "subsamples that give ± the margin (low to high: so well is the noise known), to_settle: a "
    "verdict with 80 % probability if there is no effect. A task with fewer than 10 (m + 2n) rows "
    "has subsamples that overlap: all this is then of these rows, not of new ones"
)
LOOKING = (
    "Fix the number of subsamples before looking, or raise it once, to the number given here: "
    "adding subsamples until a verdict comes breaks the intervals"
)


# --- shared: basics ---
class UserError(Exception):
    """What the user can mend. The message says what was found, where, and what to do."""


def run_script(main, argv):
    """Run main(argv). What can strike anywhere ends in one line on stderr, without a traceback:
    exit status 2, after Ctrl-C 130, and 141 where nobody reads the output any more."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="replace")  # an ASCII terminal
    again = "what is finished is kept; run the same command again"
    try:
        status = main(argv)
        message = ""
        sys.stdout.flush()
    except UserError as error:
        status = 2
        message = f"error: {error}"
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # quiet at exit
        status = 141
        message = f"stopped: what reads the output has ended; {again}"
    except OSError as error:  # a full disk, a folder that cannot be written
        status = 2
        message = f"error: {error.filename or ''} {error.strerror or error}; mend that: {again}"
    except KeyboardInterrupt:
        status = 130
        message = f"stopped: {again}"
    if message:
        tqdm.write(" ".join(message.split()), file=sys.stderr)
    if status:
        raise SystemExit(status)


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
REQUIRED = [*RUN[:-1], "num_classes", "majority", "acc_base", "acc_extra", "acc_test"]
WORDS = ["split", "data", "recipe", "versions"]
CHOICES = {"experiment": "experiment", "m": "m", "n": "n", "models": "model", "tasks": "task"}
LEAST = {"m": 1, "n": 1, "subsample": 1, "num_classes": 1, "seed": 0}  # whole numbers
SAME = [  # (scope, column): rows that agree in the scope must agree in the column
    (RUN[:5], "recipe"),
    (["experiment", "task"], "data"),
    (["experiment", "data"], "task"),
    (["experiment", "task", "m", "n", "subsample"], "split"),
]


def columns_of(metric):
    """The metric's columns: of the three arms on the texts of `test`, then of `extra`."""
    names = [f"{metric}_{arm}" for arm in ARMS]
    return names + [f"{name}_on_extra" for name in names]


def refuse(table, bad, what):
    """Refuse the first of the bad rows; what: a format string of the row's columns."""
    if bad.any():
        row = table[bad].iloc[0]
        raise UserError(f"{row['where']}: {what.format(**row)}: correct or delete the line")


def read_file(path, needed, torn=True):
    """A CSV file as a DataFrame of str with the column `where` (file, line). torn: lines with fewer
    fields than the header, which killed runs leave, are left out; else refused."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            lines = [[f"{path}, line {reader.line_num}", *line] for line in reader if any(line)]
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file in UTF-8: {error}") from None
    header = ["where"]
    if lines:
        header += [name.strip() for name in lines[0][1:]]
    for name in (*needed, *header):
        number = header.count(name)
        if number != 1:
            found = f"{number} columns {name!r}, not one"
            raise UserError(f"{path} has {found}; separated by commas: {', '.join(header[1:])}")
    whole = []
    for line in lines[1:]:
        what = f"{line[0]}: {len(line) - 1} fields where the header has {len(header) - 1}"
        if len(line) == len(header):
            whole.append(line)
        elif len(line) < len(header) and torn:
            print(f"{what}: left out as torn")
        else:
            raise UserError(f"{what}: correct or delete the line")
    return pd.DataFrame(whole, columns=header, dtype=str)


def read_path(path, needed):
    """Tables of a results file, or of a folder's: results.csv, results.*-of-*.csv, the published
    layout m50/n500/bert/ag_news/accuracies.csv, whose row k is subsample k."""
    if not path.is_dir():
        return [read_file(path, needed)]
    files = [*path.glob("results.csv"), *path.glob("results.*-of-*.csv")]
    tables = [read_file(file, needed) for file in sorted(files)]
    for file in sorted(path.glob("m*/n*/*/*/accuracies.csv")):
        table = read_file(file, ("num_classes", "majority", *ARMS))
        table = table.rename(columns={arm: f"acc_{arm}" for arm in ARMS})
        m, n, model, task = file.parts[-5:-1]
        table = table.assign(experiment=path.resolve().name, model=model, task=task)
        tables.append(table.assign(m=m[1:], n=n[1:], subsample=range(1, len(table) + 1)))
    if not tables:
        layout = "m*/n*/*/*/accuracies.csv"
        raise UserError(f"{path} holds no results.csv, results.*-of-*.csv, {layout}: name a file")
    return tables


def typed(rows, name, may_lack):
    """The numbers of a column of str; empty ones become nan if the rows may lack them."""
    values = pd.to_numeric(rows[name], errors="coerce")
    least, most = LEAST.get(name, -(10**9)), 10**9
    if name == "n":
        most = 10**6  # sign flips of more take hours
    if name.startswith(("majority", "acc_", "f1_")):
        least, most = 0, 1
    bad = ~values.between(least, most) & ~(may_lack & (rows[name] == ""))
    kind = "number"
    if name in LEAST:
        kind = "whole number"
        bad |= values % 1 != 0
    refuse(rows, bad, f"{name} is {{{name}!r}}, not a {kind} from {least} to {most}")
    return values.astype(int if name in LEAST else float)


def read_results(paths, metric="acc"):
    """All rows of the paths, typed and checked; accuracies become k / n exactly, missing numbers
    nan, missing words empty."""
    needed = [*REQUIRED, *columns_of(metric)[:3]]
    tables = [table for path in paths for table in read_path(path, needed)]
    numbers = ["seed", *REQUIRED[3:], "loss_extra", "loss_test", "seconds"]
    for each in ("acc", "f1", "nll", metric):
        numbers += columns_of(each)
    tables.append(pd.DataFrame(columns=[*dict.fromkeys(numbers), *WORDS]))  # those that may lack
    rows = pd.concat(tables, ignore_index=True).fillna("")
    if rows.empty:
        raise UserError(f"no rows in {', '.join(map(str, paths))}: run run_experiment.py first")
    rows["seed"] = rows["seed"].replace("", "0")
    for name in dict.fromkeys(numbers):
        rows[name] = typed(rows, name, may_lack=name not in needed)
    refuse(rows, rows["model"] == "all", "the model 'all' would be all models together")
    for name in columns_of("acc"):
        exact = (rows[name] * rows["n"]).round() / rows["n"]
        off = (rows[name] - exact).abs() > 5.1e-5  # accuracies of four decimals will do
        refuse(rows, off, f"{name} = {{{name}}} is no whole number of right answers of n = {{n}}")
        rows[name] = exact
    return rows


def choose_rows(rows, args):
    """The rows that --experiment, --m, --n, --models and --tasks name, each known."""
    for flag, name in CHOICES.items():
        found = sorted(set(rows[name]))
        wanted = getattr(args, flag) or found
        for value in sorted(set(wanted) - set(found)):
            names = ", ".join(map(str, found))
            raise UserError(f"--{flag} {value}: not in the rows chosen so far; found: {names}")
        rows = rows[rows[name].isin(wanted)]
    return rows


def refuse_conflict(rows, scope, name):
    """Refuse two rows that agree in the scope and differ in a column that both have."""
    known = rows[rows[name].notna() & (rows[[*scope, name]] != "").all(axis=1)]
    known = known.drop_duplicates([*scope, name])
    known = known[known.duplicated(scope, keep=False)].sort_values(scope, kind="stable")
    if len(known):
        one, two = known.iloc[0], known.iloc[1]
        agree = f"{one['where']} and {two['where']} agree in {', '.join(scope)}"
        values = f"differ in {name} ({one[name]} and {two[name]})"
        raise UserError(f"{agree} and {values}: keep one, or give them two names of experiments")


def each_once(rows):
    """The rows, each run once, sorted; runs that contradict each other are refused."""
    twice = rows[rows.duplicated(RUN, keep=False)]
    for name in twice.select_dtypes("number").columns.difference([*RUN, "seconds"], sort=False):
        refuse_conflict(twice, RUN, name)
    for scope, name in SAME:
        refuse_conflict(rows, scope, name)
    again = rows.duplicated(RUN)
    if again.any():
        print(f"given twice and used once: {count(again.sum(), 'row')}")
    return rows[~again].sort_values(RUN, ignore_index=True)


def versions_of(rows):
    """How many rows each version of code and libraries wrote, in words."""
    numbers = rows["versions"].replace("", "no version named").value_counts()
    return "; ".join(f"{count(number, 'row')} of {name}" for name, number in numbers.items())


def load_rows(args, metric="acc"):
    """The chosen rows of args.paths with the column `arms`: "crossed" where every row of a cell has
    the columns *_on_extra of the metric and args.plain is off, else "plain"."""
    rows = each_once(choose_rows(read_results(args.paths, metric), args))
    if rows["versions"].nunique() > 1:
        print(f"rows of several versions are taken together: {versions_of(rows)}")
    rows["arms"] = "plain"
    if args.plain:
        return rows
    there = rows[columns_of(metric)].notna().all(axis=1)
    for cell, known in there.groupby([rows[name] for name in CELL]):
        if known.all():
            rows.loc[known.index, "arms"] = "crossed"
        elif known.any():
            lack = f"some rows lack {metric}_base_on_extra and so on"
            print(f"{title_of(*cell)}: {lack}: plain effects, without crossed arms")
    return rows


def count(number, what):
    """"1 task", "2 tasks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def title_of(experiment, m, n):
    """A cell in words."""
    return f"{experiment}, m = {m}, n = {n}"


def file_of(*names):
    """A file's name from names that may hold anything; different names give different files."""
    return ".".join(quote(str(name), safe="") for name in names).replace("%", "=")
# --- end shared ---


# --- shared: effects ---
SHARE = 0.89  # of every interval: the paper's


def effects_of(row, metric="acc", crossed=True):
    """(boost, bias) of a row, or of a table of rows, as fractions or nats.

    Plain: acc_extra - acc_base and acc_test - acc_extra, on the texts of `test`. Crossed: the mean
    of these and of their mirror images on the texts of `extra`, where `extra` and `test` change
    places; a training run that is better or worse on all texts then cancels from the bias."""
    boost = row[f"{metric}_extra"] - row[f"{metric}_base"]
    bias = row[f"{metric}_test"] - row[f"{metric}_extra"]
    if crossed:
        mirrored_boost = row[f"{metric}_test_on_extra"] - row[f"{metric}_base_on_extra"]
        mirrored_bias = row[f"{metric}_extra_on_extra"] - row[f"{metric}_test_on_extra"]
        boost = (boost + mirrored_boost) / 2
        bias = (bias + mirrored_bias) / 2
    return boost, bias
# --- end shared ---


# --- shared: interval ---
def these_tasks(means, variances, counts, floor):
    """The mean over these tasks in closed form: a dict of estimate, se, df, low, high.

    means, variances, counts: per task the mean, variance and number K of its subsamples'
    differences, K from 2; floor: the least variance, that of rounding: for points (100 / n)^2 / 12,
    a quarter of that where they are crossed. v_j = max(s_j^2, floor) / K_j, the standard error is
    sqrt(sum v_j) / J, Student t with Satterthwaite's degrees of freedom. With a K of 1 all but the
    estimate are nan."""
    counts = np.asarray(counts, float)
    found = {"estimate": float(np.mean(means)), "se": math.nan, "df": math.nan}
    if counts.min() > 1:
        v = np.maximum(variances, floor) / counts
        found["se"] = math.sqrt(v.sum()) / len(v)
        if v.sum() > 0:
            found["df"] = float(v.sum() ** 2 / (v**2 / (counts - 1)).sum())
    half = float(stats.t.ppf((1 + SHARE) / 2, found["df"])) * found["se"]
    found["low"] = found["estimate"] - half
    found["high"] = found["estimate"] + half
    return found
# --- end shared ---


# --- shared: tools ---
UPPER = (1 + SHARE) / 2  # the upper end of an interval, as a quantile


def changes_of(rows, effect, crossed):
    """Whole numbers that are n times the row's difference, crossed 2n times: for sign flips."""
    boost, bias = effects_of(rows, "acc", crossed)
    change = boost if effect == "boost" else bias
    if crossed:
        change = 2 * change
    return (change * rows["n"]).round().astype(int)


def training_variance(shares, n):
    """The variance of a mean accuracy over tasks at one subsample a task, on a fixed test set, in
    points^2; nan if not told from 0 by a chi-square. shares: per task the accuracies of its
    subsamples, each on n fresh test texts. Their variance less the binomial one: a lower bound,
    since single answers also flip."""
    observed = np.array([np.var(share, ddof=1) for share in shares])
    binomial = np.array([np.mean(share * (1 - share)) / max(n - 1, 1) for share in shares])
    freedom = np.array([len(share) - 1 for share in shares])
    chi_square = (freedom * observed / np.maximum(binomial, 1e-9)).sum()  # 0 where all are right
    excess = (observed - binomial).sum()
    if excess <= 0 or stats.chi2.cdf(chi_square, freedom.sum()) < UPPER:
        return math.nan
    return 1e4 * excess / len(shares) ** 2


def sign_flip_p(changes):
    """One-sided p of sum(changes), whole numbers, under random signs: exact if they are symmetric
    about 0. The sum of the sizes with a plus has a convolution of two-point laws."""
    sizes = np.abs(changes[changes != 0])
    share = np.zeros(sizes.sum() + 1)  # of the sign patterns, by the sum of the sizes with a plus
    share[0] = 1
    reached = 0
    for size in sizes:
        share[size : reached + size + 1] += share[: reached + 1].copy()
        share[: reached + size + 1] /= 2
        reached += size
    observed = (sizes.sum() + changes.sum()) // 2
    return min(float(share[observed:].sum()), 1.0)  # ties count; rounding may exceed 1


def panels(title, lines, columns, width, height, **more):
    """(figure, its axes [lines, columns]); sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(lines, columns, squeeze=False, **more)


def open_folder(folder, script, made):
    """Make a folder ready for a script's output. It is new, empty, or holds the script's own
    summary.md: then what earlier runs made (patterns of names) is removed. Else it is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "summary.md"
    ours = page.exists() and f"Written by {script}" in page.read_text(errors="replace")
    if any(folder.iterdir()) and not ours:
        raise UserError(f"{folder} holds files, no summary.md of {script}: give a new one by --out")
    for pattern in made:
        for file in folder.glob(pattern):
            file.unlink()
    write_page(folder, script, ["Not finished."])


def write_page(folder, script, lines):
    """Write summary.md; its last line names the script, by which open_folder knows the folder."""
    text = "\n".join([*lines, "", f"Written by {script}.", ""])
    (folder / "summary.md").write_text(text, encoding="utf-8")


def write(folder, **tables):
    """Write DataFrames as CSV, numbers to 6 significant digits."""
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
# --- end shared ---
GROUP = [*CELL, "effect", "model"]
INTERVAL = ["estimate", "low", "high"]
TARGETS = ["these tasks", "tasks like these", "paper", "hierarchical"]
COLUMNS = [  # of effects.csv
    *CELL, "metric", "effect", "model", "arms", "target", "tasks", "left_out", "subsamples",
    "estimate", "se", "df", "low", "high", "margin", "verdict", "needed", "to_settle", "detectable",
]
# A verdict has 80 % probability without an effect where an interval's half-width is this share of
# the margin: .555
SETTLING = stats.norm.ppf(UPPER) / (stats.norm.ppf(UPPER) + stats.norm.ppf(0.9))


def scale_of(metric):
    """Points for shares, else the metric's own unit."""
    return 100 if metric in ("acc", "f1") else 1


def differences(rows, metric):
    """A row per cell, effect (boost, bias, acc_extra), model, task, subsample; `value` in points
    (acc, f1) or as it is. Runs that differ in `seed` alone are averaged. Model "all": the mean over
    the models of a cell, where all have the same tasks and subsamples."""
    unit = [*CELL, "model", "task", "subsample"]
    plain = effects_of(rows, metric, crossed=False)
    crossed = effects_of(rows, metric, crossed=True)
    table = rows[unit].copy()
    for effect, one, both in zip(EFFECTS, plain, crossed):
        table[effect] = both.where(rows["arms"] == "crossed", one)
    table[f"{metric}_extra"] = rows[f"{metric}_extra"]
    means = scale_of(metric) * table.groupby(unit).mean()
    long = means.round(9).reset_index().melt(unit, var_name="effect")

    both = long.groupby([*CELL, "effect", "task", "subsample"])["value"].agg(["mean", "size"])
    both = both.reset_index().rename(columns={"mean": "value"}).assign(model="all")
    fewest = both.groupby(CELL)["size"].transform("min")
    models = both[CELL].join(long.groupby(CELL)["model"].nunique(), on=CELL)["model"]
    both = both[(fewest == models) & (models > 1)]
    return pd.concat([both, long], ignore_index=True)[long.columns]


def floor_of(metric, n, crossed):
    """The variance of rounding to whole answers, in points^2: no difference is known better."""
    if scale_of(metric) == 1:
        return 0.0 * n
    return (100 / (n * (1 + crossed))) ** 2 / 12  # crossed: on 2n texts


def verdict_of(low, high, margin):
    """Where an interval lies in respect of (-margin, margin)."""
    if margin is None or math.isnan(low):
        return ""
    if -margin < low and high < margin:
        return "within the margin"
    if low > margin or high < -margin:
        return "beyond the margin"
    return "not settled"


def effective_tasks(variances):
    """How many equally noisy tasks have the degrees of freedom of these (Satterthwaite)."""
    if not variances.any():
        return len(variances)
    return variances.sum() ** 2 / (variances**2).sum()


def needed_subsamples(se_1, tasks, half):
    """The least R >= 2 with t(tasks (R - 1)) se_1 / sqrt(R) below half. se_1: the standard error at
    one subsample a task; tasks: as in effective_tasks: at R = K this is these_tasks' half-width."""
    if not (half and se_1 > 0):
        return math.nan
    R = max(int((stats.norm.ppf(UPPER) * se_1 / half) ** 2), 2)  # from below: a t is wider
    while stats.t.ppf(UPPER, tasks * (R - 1)) * se_1 / math.sqrt(R) >= half:
        R += 1
    return R


def detectable_effect(se, df):
    """The effect whose 89 % interval excludes 0 on its side with 80 % power, by the noncentral t;
    nan if se is 0."""
    return (se or math.nan) * special.nctdtrinc(df, 0.2, stats.t.ppf(UPPER, df))


def with_tests(table, rows):
    """task_table with the sign-flip tests of each task's bias."""
    names = [*CELL, "model", "task"]
    parts = [changes_of(mine, "bias", arms == "crossed") for arms, mine in rows.groupby("arms")]
    changes = rows.assign(change=pd.concat(parts)).groupby([*names, "subsample"])["change"].sum()
    tests = changes.groupby(names).agg(sign_flip_p).to_frame("p")
    tests["p_adjusted"] = tests["p"].groupby(names[:-1]).transform(stats.false_discovery_control)
    tests = tests.assign(effect="bias").set_index("effect", append=True)
    return table.join(tests, on=tests.index.names)


def task_table(rows, long, metric, margin=None):
    """tasks.csv before tests and fits, indexed by cell, effect (of long), model, task; and each
    task's variance, from the floor up."""
    values = long.groupby([*GROUP, "task"])["value"]
    table = values.agg(subsamples="count", estimate="mean", sd="std")
    table = table.join(rows.groupby(CELL)["arms"].first(), on=CELL)
    effect = table.index.get_level_values("effect")
    table["arms"] = table["arms"].where(effect.isin(EFFECTS), "plain")
    n = table.index.get_level_values("n")
    floor = floor_of(metric, n, table["arms"] == "crossed")
    table["variance"] = np.maximum(table["sd"] ** 2, floor)  # nan where there is one subsample
    K = table["subsamples"]
    half = stats.t.ppf(UPPER, K - 1) * np.sqrt(table["variance"] / K)
    table["low"] = table["estimate"] - half
    table["high"] = table["estimate"] + half
    ends = zip(table["low"], table["high"])
    table["verdict"] = [verdict_of(low, high, margin) for low, high in ends]
    return table


def t_interval(estimate, se, df):
    """What these_tasks returns, of an estimate with its standard error."""
    half = float(stats.t.ppf(UPPER, df)) * se
    return {"estimate": estimate, "se": se, "df": df, "low": estimate - half,
            "high": estimate + half}


def answer(row, found, margin, se_1=math.nan, tasks=math.nan):
    """Complete a row of effects.csv by an interval and (se_1, tasks) as in needed_subsamples."""
    row = row | found | {"margin": margin, "se_1": se_1, "effective_tasks": tasks}
    row["verdict"] = verdict_of(row["low"], row["high"], margin)
    row["needed"] = needed_subsamples(se_1, tasks, margin)
    row["to_settle"] = needed_subsamples(se_1, tasks, SETTLING * (margin or 0))
    row["detectable"] = detectable_effect(row["se"], row["df"])
    return row


def effects_table(tasks, metric, margin):
    """effects.csv before any fit: {(experiment, m, n, effect, model, target): row} of these tasks
    and tasks like these, and of all settings together (m, n "")."""
    effects = {}
    for key, mine in tasks.groupby(GROUP):
        used = mine[mine["subsamples"] > 1]  # a task with one subsample has no variance
        if used.empty:
            used = mine
        names = mine.index.get_level_values("task")
        arms = mine["arms"].iloc[0]
        row = dict(zip(GROUP, key)) | {"metric": metric, "arms": arms, "target": "these tasks"}
        row |= {"tasks": len(used), "subsamples": used["subsamples"].min()}
        row["left_out"] = ", ".join(names.difference(used.index.get_level_values("task")))
        floor = float(floor_of(metric, row["n"], arms == "crossed"))
        found = these_tasks(used["estimate"], used["sd"] ** 2, used["subsamples"], floor)
        share = used["variance"] / len(used) ** 2  # of the mean's variance at one subsample a task
        se_1 = math.sqrt(share.sum(skipna=False))
        effects[*key, row["target"]] = answer(row, found, margin, se_1, effective_tasks(share))

        row |= {"target": "tasks like these", "tasks": len(mine), "left_out": ""}
        row["subsamples"] = mine["subsamples"].min()
        se = mine["estimate"].sem() or math.nan
        found = t_interval(mine["estimate"].mean(), se, len(mine) - 1 or math.nan)
        effects[*key, row["target"]] = answer(row, found, margin)
    return effects | all_settings(effects, margin)


def all_settings(effects, margin):
    """Rows of effects over the cells of an experiment that have an interval, two or more: the mean
    of their estimates, whose noise is not correlated."""
    table = pd.DataFrame(effects.values())
    table = table[(table["target"] == "these tasks") & table["low"].notna()]
    found = {}
    for (experiment, effect, model), cells in table.groupby(["experiment", "effect", "model"]):
        C = len(cells)
        if C > 1:
            row = cells.iloc[0].to_dict() | {"m": "", "n": "", "left_out": "", "settings": C}
            row |= cells[["tasks", "subsamples"]].min()
            row["arms"] = " and ".join(sorted(set(cells["arms"])))
            v = (cells["se"] / C) ** 2
            df = v.sum() ** 2 / (v**2 / cells["df"]).sum()
            mean = t_interval(cells["estimate"].mean(), math.sqrt(v.sum()), df)
            share = (cells["se_1"] / C) ** 2
            effective = share.sum() ** 2 / (share**2 / cells["effective_tasks"]).sum()
            row = answer(row, mean, margin, math.sqrt(share.sum()), effective)
            found[experiment, "", "", effect, model, "these tasks"] = row
    return found


def as_table(effects):
    """effects.csv: all settings together first, then cell by cell, all models first."""

    def order(row):
        cell = (row["experiment"], row["m"] or 0, row["n"] or 0, row["effect"])
        return (*cell, row["model"] != "all", row["model"], TARGETS.index(row["target"]))

    rows = sorted(effects.values(), key=order)
    return pd.DataFrame(rows, columns=COLUMNS)


def means_table(rows, metric):
    """means.csv, Table 1 of the paper: means of the tasks' means, of plain arms."""
    unit = [*CELL, "model"]
    long = differences(rows.assign(arms="plain"), metric)
    means = long.groupby([*unit, "effect", "task"])["value"].mean()
    table = rows.groupby(unit).agg(tasks=("task", "nunique"), rows=("task", "size"))
    return table.join(means.groupby([*unit, "effect"]).mean().unstack()[[*EFFECTS]]).reset_index()


def plan_table(effects, long, margin):
    """plan.csv: how well the effects of long, acc_extra too, are known, how many subsamples are
    needed; accuracies also with a fixed test set."""
    groups = long.groupby(GROUP)
    table = []
    for key, row in effects.items():
        if row["target"] != "these tasks" or row["m"] == "":
            continue
        redrawn = row["se_1"]
        plans = {"redrawn": redrawn}  # standard errors at one subsample a task
        if row["effect"] == "acc_extra" and row["model"] != "all" and row["subsamples"] > 1:
            values = groups.get_group(key[:5]).groupby("task")["value"]
            shares = [own.to_numpy() / 100 for _, own in values if len(own) > 1]
            plans["fixed"] = math.sqrt(training_variance(shares, row["n"]))
        df = np.nan_to_num(row["df"], nan=1)
        spread = np.sqrt(df / stats.chi2.ppf([UPPER, 1 - UPPER], df))  # of an error so known
        for test_set, se_1 in plans.items():
            line = {name: row[name] for name in (*CELL, "model", "arms", "tasks", "subsamples")}
            line |= {"quantity": row["effect"], "test_set": test_set, "mean": row["estimate"]}
            line["sd"] = se_1 * math.sqrt(row["tasks"])
            line["half_width"] = (row["high"] - row["low"]) / 2 * se_1 / (redrawn or math.nan)
            line["one"] = line["half_width"] * math.sqrt(row["subsamples"])
            texts = redrawn**2 - se_1**2  # the part of the test texts
            bounds = np.sqrt(np.maximum((redrawn * spread) ** 2 - texts, 1e-12)) * (se_1 > 0)
            for name, se in zip(("needed", "needed_low", "needed_high"), (se_1, *bounds)):
                line[name] = needed_subsamples(se, row["effective_tasks"], margin)
            if row["effect"] in EFFECTS:
                line["to_settle"] = row["to_settle"]
            table.append(line)
    return pd.DataFrame(table)


# The two models -------------------------------------------------------------------------------


def import_pymc():
    """(pymc, arviz, pytensor.tensor), set to need no C compiler: nutpie compiles by numba."""
    os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")
    with warnings.catch_warnings(action="ignore"):  # arviz announces its next version
        import arviz
        import pymc
        import pytensor.tensor
    return pymc, arviz, pytensor.tensor


def paper_counts(rows, effect):
    """(data, models, tasks) of the paper's model. A unit is a task's subsample. data: `total`
    [model, unit] answers (0: the model lacks it), sums of right answers of both arms `by_unit`,
    `by_model`, half their difference `change` [task], `task_idx` [unit], and `known`, the squared
    share of the variance of the tasks' changes in log odds that is more than binomial noise (the
    share itself mixes badly where it is a third)."""
    rows = rows.copy()
    for name, arm in zip(("control", "treatment"), EFFECTS[effect]):
        rows[name] = (rows[f"acc_{arm}"] * rows["n"]).round().astype(int)
    sums = rows.pivot_table(
        index=["task", "subsample"], columns="model", values=["control", "treatment", "n"],
        aggfunc="sum", fill_value=0,
    )
    both = (sums["control"] + sums["treatment"]).to_numpy().T.astype(int)
    task_idx, tasks = pd.factorize(sums.index.get_level_values("task"))

    by_task = rows.groupby("task")[["control", "treatment", "n"]].sum()
    right = by_task[["control", "treatment"]].to_numpy()
    answers = by_task[["n"]].to_numpy()
    p = (right + 0.5) / (answers + 1)
    noise = (1 / (answers * p * (1 - p))).sum(1).mean()
    spread = np.diff(special.logit(p)).var() or 1e-9
    known = max(1 - noise / spread, 0) ** 2
    data = {"total": sums["n"].to_numpy().T.astype(int), "by_unit": both.sum(0)}
    data |= {"by_model": both.sum(1), "change": np.diff(right)[:, 0] / 2}
    data |= {"task_idx": task_idx, "known": np.array(float(known))}
    return data, list(sums["n"]), tasks


def paper_model(rows, effect, args):
    """The paper's model of a cell, (1) to (10), in variables that mix; few tasks: no W, one task:
    no U. Exactly, with S_j = (W_j0 + W_j1) / sqrt 2 and D_j = (W_j1 - W_j0) / sqrt 2, which are
    independent Normal(0, sd_W),
        a_j = mu + beta / 2 + U_j + S_j / sqrt 2 ~ Normal(mu + beta / 2, sqrt(sd_U^2 + sd_W^2 / 2)),
        c_jk = a_j + V_jk ~ Normal(a_j, sd_V),   d_j = beta + sqrt 2 D_j,
        logit p = c_jk + alpha_i + (l - 1/2) d_j.
    d_j is centred as far as the data know it: with s = sqrt 2 sd_W and k = known (paper_counts),
        d_j = beta + s^(1-k) (z_j - k beta),   z_j ~ Normal(k beta, s^k).
    Over l, with q = e^(c + alpha): log((1 + q e^(d/2)) (1 + q e^(-d/2)))
        = log1p(q (e^(d/2) + e^(-d/2)) + q^2)."""
    pm, _, pt = import_pymc()
    data, models, tasks = paper_counts(rows, effect)
    J = len(tasks)
    interaction = J >= FEWEST_TASKS and not args.no_interaction
    units = range(len(data["task_idx"]))
    coords = {"model": models, "later": models[1:], "task": tasks, "unit": units}
    with pm.Model(coords=coords) as model:
        data = {name: pm.Data(name, value) for name, value in data.items()}
        task_idx = data["task_idx"]
        k = data["known"]
        mu = pm.Normal("mu", 0, 1)
        beta = pm.Normal("beta", 0, 1)
        alpha = pt.zeros(1)
        if len(models) > 1:
            alpha = pt.concatenate([[0.0], pm.Normal("alpha", 0, 5, dims="later")])
        sd_U = pm.HalfNormal("sd_U", 1) if J > 1 else 0
        sd_V = pm.HalfNormal("sd_V", 1)
        sd_W = pm.HalfNormal("sd_W", 3.5355) if interaction else 0

        # c_jk: the level of a task's subsample
        a = mu + beta / 2
        if J > 1:
            a = pm.Normal("a", a, pt.sqrt(sd_U**2 + sd_W**2 / 2), dims="task")[task_idx]
        if J >= CENTRED["paper"]:
            c = pm.Normal("c", a, sd_V, dims="unit")
        else:
            raw = pm.Normal("c_raw", 0, 1, dims="unit")
            c = pm.Deterministic("c", a + sd_V * raw, dims="unit")

        # d_j: a task's effect
        d = beta
        if interaction:
            s = math.sqrt(2) * sd_W
            z = pm.Normal("z", k * beta, s**k, dims="task")
            d = beta + s ** (1 - k) * (z - k * beta)
        d = pm.Deterministic("d", d * pt.ones(J), dims="task")

        q = pt.exp(c)[None] * pt.exp(alpha)[:, None]
        ratio = pt.exp(d / 2)
        both = data["total"] * pt.log1p(q * (ratio + 1 / ratio)[task_idx] + q**2)
        right = (data["by_unit"] * c).sum() + (data["by_model"] * alpha).sum()
        pm.Potential("likelihood", right + (data["change"] * d).sum() - both.sum())
    return model


def predict_effects(posterior, total, task_idx, rng):
    """Add the predictive effects in points to the posterior, a draw a data set: `effect` (12) by
    model, task (nan where a model lacks it), `difference` (11) over all and by model."""
    c = posterior["c"].values[:, :, None]  # [chain, draw, 1, unit]
    d = posterior["d"].values  # [chain, draw, task]
    alpha = np.zeros((*d.shape[:2], len(total), 1))
    if "alpha" in posterior:
        alpha[:, :, 1:, 0] = posterior["alpha"]
    effects = np.empty((*alpha.shape[:3], d.shape[2]))
    for j in range(d.shape[2]):  # one task at a time, for the memory
        mine = task_idx == j
        level = c[..., mine] + alpha
        half = d[:, :, j, None, None] / 2
        control = rng.binomial(total[:, mine], special.expit(level - half))
        treatment = rng.binomial(total[:, mine], special.expit(level + half))
        answers = total[:, mine].sum(1)
        answers = np.where(answers, answers, np.nan)
        effects[..., j] = 100 * (treatment - control).sum(-1) / answers
    by_model = np.nanmean(effects, axis=-1)
    over = np.concatenate([by_model.mean(-1, keepdims=True), by_model], axis=-1)
    posterior["effect"] = ("chain", "draw", "model", "task"), effects
    posterior["difference"] = ("chain", "draw", "over"), over


def hierarchical_model(rows, effect):
    """The model at this script's head, rounding's variance added to each s_ij^2. delta is summed
    out, mean_ij ~ N(beta_i, sqrt(tau_i^2 + s_ij^2 / K_ij)), and drawn given the rest: `effect`."""
    pm, _, pt = import_pymc()
    long = differences(rows, "acc")
    long = long[(long["effect"] == effect) & (long["model"] != "all")]
    wide = long.pivot_table("value", "model", "task", aggfunc=["count", "mean", "var"])
    wide = wide.fillna(0).astype(float)
    floor = float(floor_of("acc", rows["n"].iloc[0], rows["arms"].iloc[0] == "crossed"))
    dims = ("model", "task")
    with pm.Model(coords={"model": wide.index, "task": wide["mean"].columns}) as model:
        number = pm.Data("D_count", wide["count"].to_numpy())  # 0 where a model lacks the task
        average = pm.Data("D_mean", wide["mean"].to_numpy())
        variance = pm.Data("D_var", wide["var"].to_numpy())
        rounding = pm.Data("rounding", np.array(floor))
        beta = pm.Normal("beta", 0, 10, dims="model")
        tau = pm.HalfNormal("tau", 5, dims="model")
        s = pm.HalfNormal("s", 10, dims="model")
        omega = pm.HalfNormal("omega", 1, dims="model")
        if wide["mean"].shape[1] >= CENTRED["hierarchical"]:
            log_s = pm.Normal("log_s", pt.log(s)[:, None], omega[:, None], dims=dims)
        else:
            raw = pm.Normal("log_s", 0, 1, dims=dims)
            log_s = pt.log(s)[:, None] + omega[:, None] * raw

        within = pt.exp(2 * log_s) + rounding
        between = tau[:, None] ** 2
        both = within + number * between
        gap = average - beta[:, None]
        spreads = pt.maximum(number - 1, 0) * (pt.log(within) + variance / within)
        means = (number > 0) * pt.log(both) + number * gap**2 / both
        pm.Potential("likelihood", -(spreads + means).sum() / 2)

        delta = beta[:, None] + number * between / both * gap
        delta += pt.sqrt(between * within / both) * pm.Normal("z", 0, 1, dims=dims)
        pm.Deterministic("effect", pt.switch(number > 0, delta, np.nan), dims=dims)
        new = pm.Normal("z_new", 0, 1, dims="model")
        pm.Deterministic("new_task", beta + tau * new, dims="model")
        pm.Deterministic("mean", beta.mean())
    return model


def warning_of(table, divergences):
    """What is wrong with reported parameters, "" if all converged; one that is nan did not."""
    r_hat = table["r_hat"].max(skipna=False)
    ess = table[["ess_bulk", "ess_tail"]].min(axis=None, skipna=False)
    if r_hat <= MAX_R_HAT and ess >= MIN_ESS and not divergences:
        return ""
    return f"not converged: r_hat {r_hat:.3f}, ESS {ess:.0f}, {count(divergences, 'divergence')}"


def compiled(model, data, key):
    """The model compiled, once for each key and shape of the data: it takes longer than most
    samplings."""
    import nutpie

    key = (*key, *[value.shape for value in data.values()])
    if key not in COMPILED:
        with warnings.catch_warnings(action="ignore"):  # of large expressions compiled in parts
            COMPILED[key] = nutpie.compile_pymc_model(model)
    ready = COMPILED[key]
    return ready.with_data(**{name: data[name] for name in ready.shared_data})


def fit(rows, effect, analysis, args):
    """One analysis of one effect in one cell; if it did not converge, once more, finer."""
    _, arviz, _ = import_pymc()
    import nutpie

    if analysis == "paper":
        model = paper_model(rows, effect, args)
    else:
        model = hierarchical_model(rows, effect)
    data = {variable.name: variable.get_value() for variable in model.data_vars}
    ready = compiled(model, data, (analysis, args.no_interaction))
    models = list(model.coords["model"])
    tasks = list(model.coords["task"])
    coords = {"model": models, "task": tasks, "later": models[1:], "over": ["all", *models]}
    for accept, longer, more in ATTEMPTS:
        trace = nutpie.sample(
            ready, chains=args.chains, tune=args.tune * longer, draws=args.draws * more,
            target_accept=accept, seed=args.seed, save_warmup=False, progress_bar=False,
        )
        posterior = trace.posterior.assign_coords(**coords)
        if analysis == "paper":
            rng = np.random.default_rng(args.seed)
            predict_effects(posterior, data["total"], data["task_idx"], rng)
        reported = posterior.drop_vars(NUISANCE, errors="ignore")
        summary = arviz.summary(reported, hdi_prob=SHARE, round_to="none")
        warning = warning_of(summary, int(trace.sample_stats["diverging"].sum()))
        if not warning:
            break
    summary = summary.rename(columns={"hdi_5.5%": "hdi_low", "hdi_94.5%": "hdi_high"})
    summary = summary.drop(columns=["mcse_mean", "mcse_sd"]).assign(warning=warning)
    return SimpleNamespace(
        cell=tuple(rows[CELL].iloc[0]), effect=effect, analysis=analysis, models=models,
        posterior=posterior, summary=summary, warning=warning,
    )


def task_effects(result, margin):
    """A fit's columns of tasks.csv: task effects, predicted (12) or shrunken."""
    draws = result.posterior["effect"]
    name = result.analysis
    low, high = import_pymc()[1].hdi(draws, hdi_prob=SHARE)["effect"].transpose("hdi", ...)
    columns = {name: draws.mean(("chain", "draw")), f"{name}_low": low, f"{name}_high": high}
    if name == "hierarchical":
        columns["p_beyond"] = (abs(draws) > margin).mean(("chain", "draw"))
    table = pd.DataFrame({column: values.to_series() for column, values in columns.items()})
    return pd.concat({(*result.cell, result.effect): table}, names=[*CELL, "effect"])


def mean_effects(result, effects, margin):
    """Add a fit's rows, (11), or beta and its mean over models, to effects (see effects_table);
    returns notes on hierarchical means that are not these tasks' mean."""
    names = {"all": "mean"} | {model: f"beta[{model}]" for model in result.models}
    if result.analysis == "paper":
        names = {model: f"difference[{model}]" for model in names}
    notes = []
    for model, name in names.items():
        key = (*result.cell, result.effect, model)
        if (*key, "these tasks") not in effects:
            continue  # the models have different tasks: none for all
        found = result.summary.loc[name, ["mean", "sd", "hdi_low", "hdi_high"]]
        found = dict(zip(("estimate", "se", "low", "high"), found)) | {"df": math.nan}
        row = effects[*key, "tasks like these"] | {"target": result.analysis}
        if result.analysis == "paper":
            row["arms"] = "plain"
        effects[*key, result.analysis] = answer(row, found, margin)
        first = effects[*key, "these tasks"]
        off = found["estimate"] - first["estimate"]
        if result.analysis == "hierarchical" and abs(off) > first["se"]:
            far = f"{off:+.2f} points from the mean of these tasks, more than its standard error"
            notes.append(f"{model}: the hierarchical mean is {far}: take these tasks")
    return notes


def fit_all(rows, effects, args):
    """Every analysis of every effect of every cell; adds to effects, prints notes."""
    jobs = list(itertools.product(rows.groupby(CELL), args.effects, dict.fromkeys(args.analysis)))
    results = []
    for (cell, mine), effect, analysis in tqdm(jobs, desc="fits", leave=False):
        where = f"{title_of(*cell)}, {effect}, {analysis}: "
        sizes = mine.groupby(["model", "task"])["subsample"].nunique()
        few = sizes.min() < 2 or sizes.groupby("model").size().min() < 2
        if analysis == "hierarchical" and few:
            print(f"{where}left out, it needs two tasks with two subsamples each")
            continue
        result = fit(mine, effect, analysis, args)
        note = result.warning or "converged"
        dropped = [name for name in "WU" if f"sd_{name}" not in result.posterior]
        if dropped and analysis == "paper":
            note += f" without {' and '.join(dropped)}"
        notes = [note, *mean_effects(result, effects, args.margin)]
        result.notes = [where + note for note in notes]
        tqdm.write("\n".join(result.notes), file=sys.stdout)
        results.append(result)
    return results


# Words ----------------------------------------------------------------------------------------


def unit_of(metric):
    """What the metric's numbers are."""
    if scale_of(metric) == 100:
        return "points"
    return "nats (lower is better)" if metric == "nll" else metric


def decimals(metric):
    """Of a number in a table."""
    return 2 if scale_of(metric) == 100 else 4


def command(rows, R):
    """How to come to R subsamples of each task of these rows, and how long that takes."""
    runs = rows.groupby([*CELL, "model", "task"])
    lacking = (R - runs["subsample"].nunique()).clip(lower=0)
    seconds = (lacking * runs["seconds"].mean()).sum(skipna=False)
    text = f"the same run with --subsamples {R:.0f}"
    if math.isnan(seconds):
        return text
    minutes = count(round(seconds / 60), "minute")
    return f"{text} (about {minutes} more by these rows' seconds, one process)"


def way_out(row, rows):
    """What a verdict on a row of effects.csv takes that is not settled."""
    known = f"uncertainty ±{(row['high'] - row['low']) / 2:.3g}"
    if row["to_settle"] <= row["subsamples"]:
        return f"{known}, so the effect itself seems near the margin: take the interval as answer"
    for name in (*CELL, "model"):
        if row[name] not in ("", "all"):
            rows = rows[rows[name] == row[name]]
    if row["subsamples"] < 2:
        return command(rows, PILOT)
    settles = "settles it with 80 % probability if there is no effect"
    text = f"{known}; {command(rows, row['to_settle'])} {settles}"
    if row["needed"] > row["subsamples"]:
        text += f"; {row['needed']:.0f} subsamples give ±{row['margin']:g}"
    return text


def verdict_in_words(row, rows):
    """The verdict on a row of effects.csv, and what to do where there is none."""
    if math.isnan(row["low"]) and row["subsamples"] > 1:
        return "no interval, for all differences are equal"
    if math.isnan(row["low"]):
        return f"no interval, which takes two subsamples of each task: {way_out(row, rows)}"
    if not row["verdict"]:
        holds = "excludes" if row["low"] > 0 or row["high"] < 0 else "holds"
        return f"the interval {holds} 0 (no --margin is given)"
    if row["verdict"] == "not settled":
        return f"not settled against the margin of {row['margin']:g}: {way_out(row, rows)}"
    words = f"{row['verdict']} of {row['margin']:g}"
    if row["verdict"] == "within the margin":
        words += f"; an effect of {row['detectable']:.2g} would show with 80 % probability"
    return words


def what_of(row):
    """The setting, the effect and the model of a row of effects.csv in words."""
    where = row["experiment"]
    over = ""
    if row["m"]:
        where = title_of(row["experiment"], row["m"], row["n"])
    elif "settings" in row:
        over = f" over all {row['settings']} settings of m and n"
    model = "" if row["model"] == "all" else f" of {row['model']}"
    return f"{where}: {row['effect']}{model}{over}"


def conclusion(row, rows):
    """One sentence on a row of effects.csv (target: these tasks)."""
    D = decimals(row["metric"])
    those = "this task" if row["tasks"] == 1 else f"these {row['tasks']} tasks"
    found = f"between {row['low']:+.{D}f} and {row['high']:+.{D}f}"
    about = "89 % interval"
    if math.isnan(row["low"]):
        found = f"{row['estimate']:+.{D}f}"
        about = "observed"
    if row["left_out"]:
        about += f"; without {row['left_out']}, of which there is one subsample"
    verdict = verdict_in_words(row, rows)
    return f"{what_of(row)}: {found} {unit_of(row['metric'])} for {those} ({about}): {verdict}"


def settings_line(cells):
    """One sentence on the single settings of an experiment, effect and model. cells: rows of
    effects.csv."""
    table = pd.DataFrame(cells).dropna(subset="low")
    D = decimals(cells[0]["metric"])
    low, high = table["low"].min(), table["high"].max()
    excluded = ((table["low"] > 0) | (table["high"] < 0)).sum()
    chance = (1 - SHARE) * len(table)
    verdicts = ""
    for verdict, number in table["verdict"].value_counts().items():
        if verdict:
            verdicts += f"{verdict} in {number} of {len(table)}, "
    verdicts += f"{excluded} of {len(table)} exclude 0 (chance alone: about {chance:.1f})"
    what = what_of(cells[0] | {"m": ""})
    return f"{what} in single settings: intervals from {low:+.{D}f} to {high:+.{D}f}, {verdicts}"


def conclusions(effects, rows):
    """What a reader sees first: per experiment and effect a sentence on all settings together, on
    the single ones, and on each that is not settled; all models together, or each where they differ
    in tasks or subsamples."""
    whole = {key[:3] for key in effects if key[4] == "all"}
    groups = {}
    for (experiment, m, n, effect, model, target), row in effects.items():
        if target == "these tasks" and (model == "all" or (experiment, m, n) not in whole):
            groups.setdefault((experiment, effect, model), []).append(row)
    lines = []
    for _, mine in sorted(groups.items()):
        over = [row for row in mine if row["m"] == ""]
        single = [row for row in mine if row["m"]]
        if over:
            lines += [conclusion(over[0], rows), settings_line(single)]
        for row in single:
            if not over or row["verdict"] == "not settled" or math.isnan(row["low"]):
                lines.append(conclusion(row, rows))
    for cell, mine in rows.groupby(CELL):
        if mine["model"].nunique() > 1 and cell not in whole:
            why = "its models differ in tasks or subsamples: each has its own answer"
            lines.append(f"{title_of(*cell)}: {why}")
    if any("--subsamples" in line for line in lines):
        lines.append(LOOKING)
    return lines


def gain_lines(rows, tasks, metric):
    """What crossed arms are worth: the ratio of the variances of plain and crossed differences,
    over the tasks of a cell and model."""
    crossed = tasks[tasks["arms"] == "crossed"].dropna(subset="variance")
    if crossed.empty:
        return []
    rows = rows.assign(arms="plain")
    plain = task_table(rows, differences(rows, metric), metric)["variance"]
    lines = []
    for (*cell, effect, model), mine in crossed.groupby(GROUP):
        total = mine["variance"].sum()
        if mine["subsamples"].min() >= 10 and total > 0:  # of fewer it says nothing
            gain = plain[mine.index].sum() / total
            gain = f"crossed arms: as precise as {gain:.1f} times as many subsamples without"
            lines.append(f"{title_of(*cell)}: {effect} of {model}: {gain}")
    return lines


def effects_text(table, metric):
    """effects.csv for a reader: its first columns."""
    table = table.copy()
    for name in INTERVAL:
        table[name] = table[name].map(f"{{:+.{decimals(metric)}f}}".format).replace("+nan", "")
    names = [*GROUP, "target", "tasks", *INTERVAL, "verdict", "needed", "to_settle"]
    return table[names].to_string(index=False, na_rep="", float_format="{:.0f}".format)


def many_lines(tasks, metric):
    """What only many tasks can show: their means, sign-flip tests, lemon-picked tasks."""
    D = decimals(metric)
    lines = []
    single = tasks[tasks["model"] != "all"]
    for (experiment, effect), mine in single.groupby(["experiment", "effect"]):
        means = mine.groupby("task")["estimate"].mean().round(9)
        if len(means) < FEWEST_TASKS:
            continue
        above = (means > 0).sum()
        least = f"{means.min():+.{D}f} ({means.idxmin()})"
        most = f"{means.max():+.{D}f} ({means.idxmax()})"
        what = f"{experiment}: mean {effect} of a task over settings and models"
        lines.append(f"{what}: from {least} to {most}, {above} of {len(means)} above 0")
        if effect == "bias" and "p" in mine:
            p = mine["p_adjusted"]
            small = (p < 0.05).sum()
            found = f"adjusted p below .05 in {small} of {len(p)}, smallest {p.min():.3f}"
            picked = ", ".join(sorted(set(mine.loc[mine["estimate"] >= 3, "task"]))) or "none"
            what = f"{experiment}: one-sided sign-flip tests of a bias"
            lines.append(f"{what}: {found}; +3 points or more: {picked}")
    return lines


def page(lines, notes, table, tasks, rows, figures, args):
    """The lines of summary.md. lines: conclusions; notes: on crossed arms, many tasks, fits; table:
    effects.csv."""
    text = [
        "# Is pretraining on the test texts unfair here?", "",
        "bias = acc_test - acc_extra: what the unlabelled test texts add to pretraining on others; "
        "boost = acc_extra - acc_base: what those are worth. m labelled training texts, n "
        "unlabelled and n test texts. An effect within the margin would not matter.", "",
    ]
    text += [f"- {line}" for line in lines]
    if LOOKING not in lines:
        text.append(f"- {LOOKING}")
    for name in figures:
        text += ["", f"![{name}]({name}.png)"]
    mine = tasks[tasks.index.get_level_values("model") != "all"].reset_index()
    names = [*GROUP, "task", "subsamples", *INTERVAL, "verdict", "p_adjusted"]
    mine = mine.reindex(columns=names).round(decimals(args.metric))
    runs = rows.groupby([*CELL, "model", "arms"])
    runs = runs.agg(rows=("task", "size"), tasks=("task", "nunique"), seeds=("seed", "nunique"))
    parts = {
        f"Answers in {unit_of(args.metric)}; needed: subsamples that give ± the margin, to_settle: "
        "a verdict if there is no effect": effects_text(table, args.metric),
        "Tasks (p: sign flips of the bias)": mine.to_string(index=False, na_rep=""),
        "What was run": runs.reset_index().to_string(index=False),
    }
    text += ["", *[f"- {note}" for note in notes]]
    for title, part in parts.items():
        text += ["", f"## {title}", "", "```", part, "```"]
    return [*text, "", f"{versions_of(rows)}. Analysed on {time.strftime('%Y-%m-%d')}."]


# Figures --------------------------------------------------------------------------------------


def frame(axis, names, margin):
    """A line a name, from the top; 0 and the margin."""
    if margin:
        axis.axvspan(-margin, margin, color="grey", alpha=0.15, lw=0)
    axis.axvline(0, color="grey", lw=1, ls="--", zorder=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)


def draw_effects(table, kinds, unit, margin):
    """effects.png: a line a setting, all settings together on top, models by colour. table:
    effects.csv."""
    table = table[table["target"].isin(TARGETS[:2])]
    whole = table["m"] == ""
    names = [title_of(*cell) for cell in table[CELL].to_numpy()]
    table = table.assign(name=np.where(whole, table["experiment"] + ": all settings", names))
    top = table.loc[whole, "name"].unique()
    lines = list(dict.fromkeys([*top, *table["name"]]))
    models = sorted(set(table["model"]), key=lambda model: (model != "all", model))
    colours = {model: f"C{k}" for k, model in enumerate(models)} | {"all": "black"}
    title = "boost: what pretraining on other texts is worth; bias: what the test texts add\n"
    title += "thick: these tasks; thin: other tasks of this kind; grey: within the margin"
    size = 1.5 + 4 * len(kinds), 1.5 + 0.25 * len(lines)
    figure, (axes,) = panels(title, 1, len(kinds), *size, sharey=True)
    for axis, effect in zip(axes, kinds):
        for name, line in table[table["effect"] == effect].groupby("name"):
            here = [model for model in models if model in set(line["model"])]
            for row in line.itertuples():
                place = (here.index(row.model) + 0.5) / len(here) - 0.5
                y = [lines.index(name) + 0.75 * place] * 2
                width = 2.5 if row.target == "these tasks" else 0.8
                axis.plot([row.low, row.high], y, color=colours[row.model], lw=width)
                axis.plot(row.estimate, y[0], "o", ms=3, color=colours[row.model])
        frame(axis, lines, margin)
        if len(top):
            axis.axhline(len(top) - 0.5, color="black", lw=0.8)
        axis.set_xlabel(f"{effect} ({unit})")
    legend = [Line2D([], [], color=colours[model], lw=3, label=model) for model in models]
    figure.legend(handles=legend, loc="outside lower center", ncols=7, frameon=False, fontsize=8)
    return figure


def draw_tasks(table, title, margin):
    """tasks.*.png: each task's mean and own interval beside what the fits predict (12) or leave
    after shrinking; a panel a model. table: of task_table, one cell and effect."""
    table = table.drop(index="all", level="model", errors="ignore")
    table = table.rename(columns={"low": "estimate_low", "high": "estimate_high"})
    order = table["estimate"].groupby("task").mean().sort_values(ascending=False).index
    models = table.index.unique("model")
    width = 2.5 + 4.3 * len(models)
    figure, (axes,) = panels(title, 1, len(models), width, 1.8 + 0.3 * len(order), sharey=True)
    looks = {"estimate": "observed"} | {name: name for name in CENTRED if name in table}
    for axis, model in zip(axes, models):
        mine = table.xs(model, level="model")
        for k, (name, label) in enumerate(looks.items()):
            y = order.get_indexer(mine.index) + 0.7 * ((k + 0.5) / len(looks) - 0.5)
            axis.hlines(y, mine[f"{name}_low"], mine[f"{name}_high"], f"C{k}", lw=2, label=label)
            axis.plot(mine[name], y, "ko", ms=3)
        frame(axis, order, margin)
        axis.set_xlabel(model)
    if len(looks) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_all(tasks, table, args):
    """Draw and save effects.png, and tasks.*.png of every cell and effect; the names for the page:
    of tasks the bias, if it stands in four cells or fewer."""
    unit = unit_of(args.metric)
    figure = draw_effects(table, args.effects, unit, args.margin)
    figure.savefig(args.out / "effects.png", dpi=130)
    shown = []
    for (*cell, effect), mine in tasks.groupby([*CELL, "effect"]):
        if mine.index.unique("task").size <= MOST_TASKS:
            name = f"tasks.{file_of(*cell, effect)}"
            title = f"{title_of(*cell)}: {effect} of each task ({unit})"
            figure = draw_tasks(mine.loc[(*cell, effect)], title, args.margin)
            figure.savefig(args.out / f"{name}.png", dpi=130)
            if effect == args.effects[-1]:
                shown.append(name)
    return ["effects", *shown] if len(shown) <= 4 else ["effects"]


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument_group("what to run").add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], metavar="FILE or FOLDER",
        help="results files, folders of them, or the published layout (results.csv)")
    add("--effects", nargs="+", choices=tuple(EFFECTS), default=list(EFFECTS), help="(boost bias)")
    add("--metric", default="acc", help="acc, f1, nll or any NAME of NAME_base and so on (acc)")
    add("--margin", type=float, help="effects within it do not matter (acc, f1: 1; else none)")
    add("--plan", action="store_true", help="only: how many subsamples a task are needed")
    add("--plain", action="store_true", help="only the texts of test, as in the paper")
    for flag, name in CHOICES.items():
        kind = int if name in LEAST else str
        add(f"--{flag}", nargs="+", type=kind, metavar=name.upper(), help="only these (all)")
    add = parser.add_argument_group("sampling").add_argument
    add("--analysis", nargs="+", choices=tuple(CENTRED), default=list(CENTRED),
        help="(paper hierarchical)")
    add("--draws", type=int, default=1000, help="per chain; 0: no sampler (%(default)s)")
    add("--tune", type=positive, default=500, help="tuning steps per chain (%(default)s)")
    add("--chains", type=positive, default=4, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    add("--no-interaction", action="store_true", help="the paper's model without W (Figure 10)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="FOLDER",
        help="new, empty, or of an earlier run, which it replaces (fits; with --plan: plan)")
    add("--no-figures", action="store_true", help="tables only")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = Path("plan" if args.plan else "fits")
    if args.margin is None and scale_of(args.metric) == 100:
        args.margin = 1.0
    if args.margin is not None and not args.margin > 0:
        parser.error("--margin is above 0")
    return args


def run_plan(rows, long, args):
    """--plan: print it and what to type next, and write plan.csv and the page."""
    quantities = task_table(rows, long, args.metric)
    known = effects_table(quantities, args.metric, args.margin)
    plan = plan_table(known, long, args.margin)
    text = plan.round(decimals(args.metric))
    text = text.to_string(index=False, na_rep="", float_format="{:g}".format)
    effects = {key: row for key, row in known.items() if row["effect"] in args.effects}
    lines = [PLAN, *conclusions(effects, rows)]
    print(text, "", *lines, sep="\n")
    write(args.out, plan=plan)
    items = [f"- {line}" for line in lines]
    write_page(args.out, SCRIPT, ["# How many subsamples?", "", "```", text, "```", "", *items])
    print(f"in {args.out.resolve()}: summary.md, plan.csv")


@matplotlib.rc_context({"text.parse_math": False})  # a $ in a name is a $
def main(argv=None):
    args = parse_args(argv)
    rows = load_rows(args, args.metric)
    open_folder(args.out, SCRIPT, MADE)
    long = differences(rows, args.metric)
    if args.plan:
        return run_plan(rows, long, args)
    mine = long[long["effect"].isin(args.effects)]
    tasks = task_table(rows, mine, args.metric, args.margin)
    if args.metric == "acc":
        tasks = with_tests(tasks, rows)
    effects = effects_table(tasks, args.metric, args.margin)

    # The conclusion first, then the tables
    lines = conclusions(effects, rows)
    notes = gain_lines(rows, tasks, args.metric)
    notes += many_lines(tasks.reset_index(), args.metric)
    print(*lines, "", *notes, sep="\n")
    write(args.out, means=means_table(rows, args.metric))

    # The two samplers
    results = []
    if args.draws and args.metric == "acc":
        results = fit_all(rows, effects, args)
    if results:
        fitted = pd.concat([task_effects(result, args.margin) for result in results])
        tasks = tasks.join(fitted.groupby(tasks.index.names).first())
        parts = {}
        for result in results:
            parts[*result.cell, result.effect, result.analysis] = result.summary
            notes += result.notes
        names = [*CELL, "effect", "analysis", "parameter"]
        write(args.out, posterior=pd.concat(parts, names=names).reset_index())
    table = as_table(effects)
    write(args.out, effects=table, tasks=tasks.drop(columns="variance").reset_index())

    # What a person reads
    if len(table) <= 40:  # a screen
        print("", effects_text(table, args.metric), "", sep="\n")
    figures = [] if args.no_figures else draw_all(tasks, table, args)
    text = page(lines, notes, table, tasks, rows, figures, args)
    write_page(args.out, SCRIPT, text)
    print(f"in {args.out.resolve()}: summary.md, tables *.csv, figures *.png")
    failed = sum(bool(result.warning) for result in results)
    if failed:
        fits = f"{failed} of {count(len(results), 'fit')} did not converge"
        tqdm.write(f"warning: {fits}; more --tune and --draws may help", file=sys.stderr)
        return 3


# --- shared: start ---
if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    run_script(main, [] if "__file__" not in globals() else None)
# --- end shared ---
