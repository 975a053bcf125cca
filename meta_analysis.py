# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "matplotlib==3.10.9", "tqdm==4.70.1",
# ]
# ///
"""How far can one subsample be trusted? Section 10 of the paper; and leaderboards.

Reproduces Figure 7 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data
before few-shot text classification" (Dubey): keep one subsample per model and task, as most
benchmarks do, analyse that slice, do it again with others. How different are the conclusions?
    paper      posterior of beta (log odds): right_ijl ~ Binomial(n, p), logit p = mu + alpha_i
               + U_j + beta l for model i, task j, arm l (1: treatment), on the texts of `test`
    t          t interval over the tasks of the differences (all models: averaged), in points
    sign flip  two-sided exact p of the sum of the differences under random signs
t and sign flips take crossed arms where the rows have them. In shuffled slices the arms of each
model and task change places at random: no effect is left (the noise becomes symmetric, and real
effects of single tasks become noise), but false alarms.

Commands, cheapest first
    python meta_analysis.py results.csv --slices 20
    python meta_analysis.py results.csv --m 50 --n 500 --effects boost bias
    python meta_analysis.py results.csv --n 500 --leaderboard board.csv   # columns name, score

Reads what fit_model.py reads. Writes to meta/ summary.md, figures, and the columns
    meta.csv         experiment, m, n, effect, arms (crossed, plain), model (all: all together),
                     kind (slice, swapped: shuffled), slice, paper_mean, paper_low, paper_high (log
                     odds), t_mean, t_low, t_high (points), p (sign flip)
    shares.csv       per cell, effect, model, kind: slices, paper_mean, paper_sd (of the slices'
                     means), threshold, outside (share of paper's means beyond it), paper, t,
                     sign_flip (shares that exclude 0 at 89 %), variance_ratio (of a task's plain
                     differences over that of two binomials)
    leaderboard.csv  rank, name, score, model, gap (to the next below, points), p_wrong (the order
                     with the next is wrong, by the luck of training), p_swap_1, p_swap_5, p_swap_20
                     (they swap in a rerun with so many training sets a task), p_best

Measured 2026-11-22: 500 slices and 500 shuffled ones of a cell with 25 tasks and 2 models take 5 s
of CPU. Published accuracies, m = 100, n = 500: 43 % of 5,000 slices lie outside .04 (the paper:
47 % of 500). All: docs/results.md.
"""

import argparse
import csv
import math
import os
import re
import sys
from pathlib import Path
from urllib.parse import quote

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import special, stats
from tqdm.auto import tqdm

THRESHOLD = 0.04  # of |posterior mean of beta|, log odds (section 10)
ZERO_SHOT_THRESHOLD = 0.08
WAYS = {"paper": "the paper's model", "t": "a t interval", "sign_flip": "sign flips"}
SCRIPT = "meta_analysis.py"
MADE = ("meta.csv", "shares.csv", "leaderboard.csv", "slices.*.png", "nulls.png")  # by any run


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


# Slices -----------------------------------------------------------------------------------------


def draw_slices(rows, effect, slices, rng, shuffled=False):
    """Slices of one run per model and task. Returns the right answers [slices, 2, models, tasks] of
    control and treatment, the changes [slices, models, tasks] in whole numbers (see changes_of) and
    n [models, tasks], 0 where a model lacks a task."""
    models = sorted(set(rows["model"]))
    tasks = sorted(set(rows["task"]))
    crossed = rows["arms"].iloc[0] == "crossed"
    columns = [f"acc_{arm}" for arm in EFFECTS[effect]]
    total = np.zeros((len(models), len(tasks)), int)
    counts = np.zeros((slices, 2, *total.shape), int)
    changes = np.zeros((slices, *total.shape), int)
    for (model, task), runs in rows.groupby(["model", "task"]):
        i, j = models.index(model), tasks.index(task)
        drawn = runs.iloc[rng.integers(len(runs), size=slices)]
        total[i, j] = runs["n"].iloc[0]
        counts[:, :, i, j] = (drawn[columns] * total[i, j]).round()
        changes[:, i, j] = changes_of(drawn, effect, crossed)
    if shuffled:
        swap = rng.random(changes.shape) < 0.5
        counts = np.where(swap[:, None], counts[:, ::-1], counts)
        changes = np.where(swap, -changes, changes)
    return counts, changes, total


def slice_posterior(counts, total):
    """(mean, sd) of beta [slices] under the paper's model without V and W (one task: without U).
    Given sd_U the log posterior is concave: Newton's method finds its mode, the inverse curvature
    is the covariance. sd_U is set to its own mode by EM: the root of sd^4 + J sd^2 = sum E U_j^2
    (HalfNormal(1) prior)."""
    slices, _, models, tasks = counts.shape
    arm, model, task = (axis.ravel() for axis in np.indices((2, models, tasks)))
    columns = [np.ones(len(arm)), arm]  # mu, beta
    columns += [model == i for i in range(1, models)]  # alpha of the later models
    if tasks > 1:
        columns += [task == j for j in range(tasks)]  # U
    X = np.array(columns, float).T
    n = np.tile(total.ravel(), 2)
    y = counts.reshape(slices, -1)
    precision = np.ones((slices, len(columns)))
    precision[:, 2 : models + 1] = 1 / 25  # alpha ~ N(0, 5)
    U = slice(models + 1, None)
    theta = np.zeros(precision.shape)
    for _ in range(200):
        p = special.expit(theta @ X.T)
        weighted = X.T * (n * p * (1 - p))[:, None]
        covariance = np.linalg.inv(weighted @ X + precision[:, None] * np.eye(len(columns)))
        gradient = (y - n * p) @ X - precision * theta
        step = (covariance @ gradient[..., None])[..., 0]
        theta += np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-7:
            break
        spread = np.diagonal(covariance, axis1=1, axis2=2)
        square = (theta**2 + spread)[:, U].sum(1)
        variance = (np.sqrt(tasks**2 + 4 * square) - tasks) / 2
        precision[:, U] = 1 / np.maximum(variance, 1e-4)[:, None]
    return theta[:, 1], np.sqrt(covariance[:, 1, 1])


def slice_rows(counts, changes, total, crossed):
    """A row per slice: the paper's posterior of beta, the t interval over tasks, sign-flip p."""
    own = total.all(axis=0)  # a model may lack tasks
    mean, sd = slice_posterior(counts[..., own], total[:, own])
    reach = stats.norm.ppf(UPPER) * sd
    D = 100 * changes[..., own].mean(1) / total.max()  # [slices, tasks]
    if crossed:
        D = D / 2
    J = D.shape[1]
    t = D.mean(1)
    half = np.full(len(t), math.nan)
    if J > 1:
        half = stats.t.ppf(UPPER, J - 1) * D.std(1, ddof=1) / math.sqrt(J)
    p = []
    for change in changes.reshape(len(t), -1):
        if change.sum() < 0:
            change = -change
        p.append(min(1, 2 * sign_flip_p(change)))
    return pd.DataFrame({
        "slice": np.arange(1, len(t) + 1),
        "paper_mean": mean, "paper_low": mean - reach, "paper_high": mean + reach,
        "t_mean": t, "t_low": t - half, "t_high": t + half, "p": p,
    })


def variance_ratio(rows, effect):
    """Variance of plain differences between a task's subsamples over that of two independent
    binomials, means over models and tasks; nan where no answer differs."""
    one = rows.drop_duplicates(RUN[:-1])  # one seed of each subsample
    runs = [one["model"], one["task"]]
    control, treatment = (one[f"acc_{arm}"] for arm in EFFECTS[effect])
    binomial = (control * (1 - control) + treatment * (1 - treatment)) / one["n"]
    expected = binomial.groupby(runs).mean().mean()
    observed = (treatment - control).groupby(runs).var().mean()
    return observed / expected if expected > 0 else math.nan


def shares_of(found, rows, effect):
    """The columns of shares.csv from a kind's slices of a model, and the model's rows."""
    means = found["paper_mean"]
    threshold = THRESHOLD
    if re.search("zero.shot", rows["experiment"].iloc[0]):
        threshold = ZERO_SHOT_THRESHOLD
    shares = {"slices": len(found), "paper_mean": means.mean(), "paper_sd": means.std()}
    shares["threshold"] = threshold
    shares["outside"] = (means.abs() > threshold).mean()
    for way in ("paper", "t"):
        told = (found[f"{way}_low"] > 0) | (found[f"{way}_high"] < 0)
        shares[way] = told.mean() if found[f"{way}_low"].notna().all() else math.nan
    shares["sign_flip"] = (found["p"] < 1 - SHARE).mean()
    shares["variance_ratio"] = variance_ratio(rows, effect)
    return shares


def analyse(rows, effect, args):
    """(rows of meta.csv, rows of shares.csv) of a cell and effect: slices, then shuffled ones, of
    all models together, where they have the same tasks, and of each."""
    models = sorted(set(rows["model"]))
    arms = rows["arms"].iloc[0]
    tables = []
    shares = []
    for kind in ("slice", "swapped"):
        rng = np.random.default_rng(args.seed)
        counts, changes, total = draw_slices(rows, effect, args.slices, rng, kind == "swapped")
        groups = {model: [i] for i, model in enumerate(models)}
        if len(models) > 1 and total.all():
            groups = {"all": list(range(len(models))), **groups}
        for model, i in groups.items():
            found = slice_rows(counts[:, :, i], changes[:, i], total[i], arms == "crossed")
            names = dict(rows[CELL].iloc[0])
            names |= {"effect": effect, "arms": arms, "model": model, "kind": kind}
            tables.append(found.assign(**names)[[*names, *found]])
            mine = rows if model == "all" else rows[rows["model"] == model]
            shares.append({**names, **shares_of(found, mine, effect)})
    return pd.concat(tables), pd.DataFrame(shares)


def cell_text(rows, shares):
    """(sentence, table) of a cell and effect: what studies of one subsample would have claimed."""
    slices = shares[shares["kind"] == "slice"].iloc[0]
    shuffled = shares[shares["kind"] == "swapped"].iloc[0]
    claims = [f"{slices[way]:.0%} by {name}" for way, name in WAYS.items() if slices[way] >= 0]
    alarms = [f"{share:.0%}" for share in shuffled[list(WAYS)].dropna()]
    text = (
        f"Of {slices['slices']} studies with one subsample per model and task, {', '.join(claims)} "
        f"would have claimed a {slices['effect']} ({slices['model']}). Of as many shuffled ones, "
        f"in which there is none, {', '.join(alarms)}: false alarms, where 11% are to be expected."
    )
    if slices["arms"] == "crossed":
        text += " t and sign flips take crossed arms, the paper's model plain ones."
    if rows.groupby(["model", "task"])["subsample"].nunique().max() < 2:
        text += " There is one subsample per model and task: all slices are the same."
    if slices["model"] != "all" and rows["model"].nunique() > 1:
        text += " The models have different tasks: nothing is said of all together."
    table = shares[["model", "kind", "variance_ratio", "threshold", "outside", *WAYS]]
    return text, table.to_string(index=False, na_rep="", float_format="{:.3g}".format)


# Figures ----------------------------------------------------------------------------------------


def draw_ecdf(table, shares):
    """Figure 7: distributions over slices, and shuffled ones (dashed), of the paper's posterior
    means and of the means over tasks."""
    first = shares.iloc[0]
    reach = first["threshold"]
    title = f"{title_of(*first[CELL])}: {first['effect']} of single subsamples; grey: ±{reach:g}"
    figure, (axes,) = panels(title, 1, 2, 11, 5, sharey=True)
    models = list(shares["model"].unique())
    for (model, kind), mine in table.groupby(["model", "kind"]):
        style = "-" if kind == "slice" else "--"
        for axis, way in zip(axes, ("paper_mean", "t_mean")):
            colour = f"C{models.index(model)}"
            axis.ecdf(mine[way], color=colour, ls=style, label=f"{model}, {kind}")
    axes[0].axvspan(-reach, reach, color="grey", alpha=0.15, lw=0)
    axes[0].set_ylabel("share of slices at or below")
    axes[0].set_xlabel("the paper's model: posterior mean of beta (log odds)")
    axes[1].set_xlabel(f"mean difference over tasks (points, {first['arms']} arms)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_nulls(shares):
    """nulls.png: how often each way claims an effect of shuffled slices, by cell and model."""
    nulls = shares[shares["kind"] == "swapped"]
    names = []
    for row in nulls.itertuples():
        names.append(f"{title_of(row.experiment, row.m, row.n)}, {row.effect}, {row.model}")
    title = "False alarms in shuffled data, one subsample per model and task"
    figure, ((axis,),) = panels(title, 1, 1, 8.5, 1.8 + 0.2 * len(nulls))
    for (way, name), marker in zip(WAYS.items(), "soD"):
        axis.plot(100 * nulls[way], range(len(nulls)), marker, ms=4, label=name)
    axis.axvline(100 * (1 - SHARE), color="grey", lw=1, ls="--", label="to be expected")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set(ylim=(len(names) - 0.5, -0.5), xlim=(-1, None))
    axis.set_xlabel("shuffled slices in which 0 is excluded, percent")
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


# A leaderboard ----------------------------------------------------------------------------------


def read_board(path):
    """DataFrame with name and score (fraction), best first."""
    board = read_file(path, ("name", "score"), torn=False)
    board["score"] = typed(board, "score", may_lack=False)
    if (board["score"] > 1).any():
        mixed = (board["score"] > 0) & (board["score"] <= 1)
        refuse(board, mixed, "score is {score} beside scores above 1: write all as percent or none")
        board["score"] /= 100
    refuse(board, ~board["score"].between(0, 1), "scores lie in 0 to 1, or all in percent")
    if len(board) < 2:
        raise UserError(f"{path} has fewer than two entries: a board needs two")
    return board.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def board_table(board, rows, seed):
    """leaderboard.csv under one model's training noise, which each entry is taken to have; nan
    where the noise is not told from 0."""
    accuracies = rows.groupby(["task", "subsample"])["acc_extra"].mean()  # over seeds
    shares = [share.to_numpy() for _, share in accuracies.groupby("task")]
    variance = training_variance(shares, rows["n"].iloc[0])
    scores = 100 * board["score"].to_numpy()
    gap = pd.Series(scores).diff(-1)
    table = board[["name", "score"]].assign(model=rows["model"].iloc[0], gap=gap)
    table.insert(0, "rank", range(1, len(board) + 1))

    # The true gap is Normal(gap, 2 variance); a rerun's is its own, with noise of its own
    table["p_wrong"] = stats.norm.sf(gap / math.sqrt(2 * variance))
    for R in (1, 5, 20):
        table[f"p_swap_{R}"] = stats.norm.sf(gap / math.sqrt(2 * variance * (1 + 1 / R)))
    noise = np.random.default_rng(seed).normal(0, math.sqrt(variance), (100_000, len(board)))
    best = np.bincount((scores + noise).argmax(1), minlength=len(board)) / len(noise)
    table["p_best"] = best
    if math.isnan(variance):
        table["p_best"] = math.nan
    return table


def run_board(rows, args):
    """The leaderboard under the training noise of one cell, model by model."""
    cells = list(rows.groupby(CELL).groups)
    if len(cells) > 1:
        choices = "; ".join(f"--experiment {e} --m {m} --n {n}" for e, m, n in cells)
        raise UserError(f"--leaderboard takes the noise of one cell; choose by {choices}")
    sizes = rows.groupby(["model", "task"])["subsample"].nunique()
    for model, task in sizes.index[sizes < 2]:
        found = f"{model} has one subsample of {task}, which cannot show how runs differ"
        raise UserError(f"{found}: run at least 2, or use --tasks")
    board = read_board(args.leaderboard)
    table = pd.concat(board_table(board, mine, args.seed) for _, mine in rows.groupby("model"))
    words = table.round(3).astype(object)
    chances = [name for name in table if name.startswith("p_")]
    words[chances] = words[chances].replace(0, "<.001")
    lines = [
        f"Each entry of {args.leaderboard} is taken to vary between training runs as the mean "
        f"acc_extra of each model here does ({title_of(*cells[0])}). The entries share their test "
        "texts, which are held fixed. A rerun has luck of its own, as the board has.",
        "", "```", words.to_string(index=False, na_rep=""), "```",
    ]
    for model in table.loc[table["p_best"].isna(), "model"].unique():
        lines += ["", f"{model}: training noise is not told from 0 by these data: run more"]
    open_folder(args.out, SCRIPT, MADE)
    write(args.out, leaderboard=table)
    write_page(args.out, SCRIPT, ["# A leaderboard", "", *lines])
    print("\n".join(lines))
    print(f"\nin {args.out.resolve()}: summary.md, leaderboard.csv")


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument_group("what to run").add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], metavar="FILE or FOLDER",
        help="results files, folders of them, or folders in the published layout (results.csv)")
    add("--slices", type=positive, default=500, metavar="N", help="and shuffled ones (%(default)s)")
    add("--effects", nargs="+", choices=tuple(EFFECTS), default=["bias"], help="(bias)")
    add("--plain", action="store_true", help="plain effects even where arms are crossed")
    add("--leaderboard", type=Path, metavar="FILE",
        help="instead: is the order of its entries right, would they swap?")
    for flag, name in CHOICES.items():
        kind = int if name in LEAST else str
        add(f"--{flag}", nargs="+", type=kind, metavar=name.upper(), help="only these (all)")
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("meta"), metavar="FOLDER",
        help="new, empty, or of an earlier run, which is replaced (%(default)s)")
    add("--no-figures", action="store_true", help="tables only")
    args = parser.parse_args(argv)
    args.effects = list(dict.fromkeys(args.effects))
    return args


@matplotlib.rc_context({"text.parse_math": False})  # a $ in a name is a $
def main(argv=None):
    args = parse_args(argv)
    rows = load_rows(args)
    if args.leaderboard:
        return run_board(rows, args)
    open_folder(args.out, SCRIPT, MADE)

    # A section for every cell and effect
    tables = []
    shares = []
    page = [
        "# How far can one subsample be trusted?", "",
        "Tables: the shares of slices and of shuffled ones (swapped) in which the paper's mean is "
        "outside its threshold, and in which each analysis excludes 0 at 89 %.", "",
        f"{len(rows)} rows: {versions_of(rows)}",
    ]
    jobs = [(*job, effect) for job in rows.groupby(CELL) for effect in args.effects]
    for cell, mine, effect in tqdm(jobs, leave=False):
        found, shared = analyse(mine, effect, args)
        tables.append(found)
        shares.append(shared)
        head = f"{title_of(*cell)}, {effect}"
        text, table = cell_text(mine, shared)
        tqdm.write(f"{head}\n{text}\n{table}\n")
        page += ["", f"## {head}", "", text, "", "```", table, "```"]
        if not args.no_figures:
            name = f"slices.{file_of(*cell, effect)}.png"
            draw_ecdf(found, shared).savefig(args.out / name, dpi=130)
            page += ["", f"![distributions over slices]({name})"]

    # All of them together
    shares = pd.concat(shares)
    write(args.out, meta=pd.concat(tables), shares=shares)
    if not args.no_figures:
        draw_nulls(shares).savefig(args.out / "nulls.png", dpi=130)
        page += ["", "## False alarms", "", "![shuffled slices in which 0 is excluded](nulls.png)"]
    write_page(args.out, SCRIPT, page)
    print(f"in {args.out.resolve()}: summary.md, meta.csv, shares.csv, figures *.png")


# --- shared: start ---
if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    run_script(main, [] if "__file__" not in globals() else None)
# --- end shared ---
