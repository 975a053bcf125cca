"""How far can one subsample be trusted? Section 10 of the paper, checked on exact nulls; and leaderboards.

Reproduces Figure 7 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before few-shot text
classification" (Dubey): keep one subsample per model and task, as most benchmarks do, analyse that slice, do it again
with other slices. How different are the conclusions? With the slice's differences D_ij of model i and task j:
    paper      posterior of beta (log odds): Y_ijl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + beta l (l = 1:
               treatment), by Newton's method; the threshold .04 (zero-shot: .08) is on its mean
    t          mean and t interval over the tasks of D_ij (all models: averaged over them), in points
    sign flip  two-sided exact p of the sum of the differences under random signs
    nulls      the same slices with the two arms of each model and task changed at random: no effect is left, noise is
               made symmetric, real effects of single tasks become noise

Commands, cheapest first
    python meta_analysis.py results.csv --slices 20
    python meta_analysis.py results.csv --m 50 --n 500 --effects boost bias   # 500 slices, 500 nulls of a cell: seconds
    python meta_analysis.py results.csv --n 500 --leaderboard board.csv       # a CSV with name, score and perhaps n

Reads what fit_model.py reads. Writes to meta/ figures *.png and the columns
    meta.csv         experiment, m, n, effect, model (all: all models together), kind (slice, swapped), slice,
                     paper_mean, paper_low, paper_high (log odds), t_mean, t_low, t_high (points), p
    shares.csv       per cell, effect, model and kind: slices, paper_mean, paper_sd (of the slices' means), threshold,
                     outside (share of paper's means beyond it), paper, t, sign_flip (shares that exclude 0 at 89 %),
                     variance_ratio (of D between subsamples over that of two binomials)
    leaderboard.csv  rank, name, score, model, gap (to the next below, points), p_wrong (the order with the next now),
                     p_wrong_texts (with the luck of the test texts), p_swap_1, p_swap_5, p_swap_20 (in a rerun with so
                     many training sets a task), p_best

Measured 2026-11-21: 500 slices and 500 nulls of a cell with 25 tasks and 2 models take 5 s with their figure. Published
accuracies, m = 100, n = 500: 43 % of 5,000 slices lie outside .04 (the paper: 47 % of 500). All: docs/results.md.
"""

import argparse
import contextlib
import io
import itertools
import math
import os
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import special, stats
from tqdm.auto import tqdm

THRESHOLD, ZERO_SHOT_THRESHOLD = 0.04, 0.08  # of |posterior mean of beta| (section 10)
SHARE = 0.89  # of every interval: the paper's
LOOKS = {"slice": ("slices", "-"), "swapped": ("nulls", "--")}  # name, line style


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


def draw_slices(rows, effect, slices, rng, null=False):
    """Counts [slices, 2, models, tasks] of one run per model and task, total [models, tasks] (0 where there is none).
    null: control and treatment of each model and task change places with probability 1/2."""
    models, tasks = sorted(set(rows["model"])), sorted(set(rows["task"]))
    total = np.zeros((len(models), len(tasks)), int)
    counts = np.zeros((slices, 2, *total.shape), int)
    for (model, task), runs in rows.groupby(["model", "task"])[[f"right_{arm}" for arm in EFFECTS[effect]]]:
        i, j = models.index(model), tasks.index(task)
        total[i, j], counts[:, :, i, j] = rows["n"].iloc[0], runs.to_numpy()[rng.integers(len(runs), size=slices)]
    if null:
        swap = rng.random((slices, 1, *total.shape)) < 0.5
        counts = np.where(swap, counts[:, ::-1], counts)
    return counts, total


def slice_posterior(counts, total):
    """(mean, sd) of beta [slices] under the paper's model without V and W (one task: without U); counts, total: see
    draw_slices. Given sd_U the log posterior is concave: Newton's method finds its mode, the inverse curvature is the
    covariance. sd_U is set to its own mode by EM: the root of sd^4 + J sd^2 = sum E U_j^2 (HalfNormal(1) prior)."""
    slices, _, models, tasks = counts.shape
    l, i, j = (axis.ravel() for axis in np.indices((2, models, tasks)))
    X = np.vstack([np.ones(len(l)), l, i == np.arange(1, models)[:, None], j == np.arange(tasks)[:, None]])
    X = X.T[:, : None if tasks > 1 else -1]  # columns mu, beta, alpha of the later models, U
    n, y = np.tile(total.ravel(), 2), counts.reshape(slices, -1)
    precision = np.tile(np.r_[1, 1, np.full(models - 1, 1 / 25), np.ones(X.shape[1] - models - 1)], (slices, 1))
    theta, U = np.zeros(precision.shape), slice(models + 1, None)
    for _ in range(200):
        p = special.expit(theta @ X.T)
        curvature = (X.T * (n * p * (1 - p))[:, None]) @ X + precision[:, None] * np.eye(X.shape[1])
        covariance = np.linalg.inv(curvature)
        step = (covariance @ ((y - n * p) @ X - precision * theta)[..., None])[..., 0]
        theta += np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-7:
            break
        square = (theta[:, U] ** 2 + np.diagonal(covariance, axis1=1, axis2=2)[:, U]).sum(1)
        variance = (np.sqrt(tasks**2 + 4 * square) - tasks) / 2
        precision[:, U] = 1 / np.maximum(variance, 1e-4)[:, None]
    return theta[:, 1], np.sqrt(covariance[:, 1, 1])


def slice_rows(counts, total):
    """One row per slice: the paper's posterior of beta, the t interval over tasks, the sign-flip p."""
    mean, sd = slice_posterior(counts, total)
    there, changes = total.all(axis=0), counts[:, 1] - counts[:, 0]  # a task that a model lacks is no part of the mean
    D, J, upper = 100 * changes[:, :, there].mean(1) / total.max(), there.sum(), (1 + SHARE) / 2
    t = D.mean(1) if J else math.nan
    half = stats.t.ppf(upper, J - 1) * D.std(1, ddof=1) / math.sqrt(J) if J > 1 else math.nan
    p = [min(1, 2 * sign_flip_p(change if change.sum() > 0 else -change)) for change in changes.reshape(len(D), -1)]
    low, high = (mean + z * sd for z in stats.norm.ppf([1 - upper, upper]))
    return pd.DataFrame({"slice": np.arange(1, len(D) + 1), "paper_mean": mean, "paper_low": low, "paper_high": high,
                         "t_mean": t, "t_low": t - half, "t_high": t + half, "p": p})


def variance_ratio(rows, effect):
    """Variance of D between a task's subsamples over that of two independent binomials, means over models and tasks."""
    one = rows.drop_duplicates(RUN[:-1])  # one seed of each subsample
    control, treatment = (one[f"acc_{arm}"] for arm in EFFECTS[effect])
    table = one.assign(D=treatment - control, binomial=sum(p * (1 - p) / one["n"] for p in (control, treatment)))
    groups = table.groupby(["model", "task"])
    return groups["D"].var().mean() / groups["binomial"].mean().mean()


def analyse(rows, effect, args):
    """(rows of meta.csv, rows of shares.csv) of a cell and effect: slices and nulls, all models together and each."""
    cell, models = dict(zip(CELL, rows[CELL].iloc[0])), sorted(set(rows["model"]))
    threshold = args.threshold or (ZERO_SHOT_THRESHOLD if cell["experiment"].startswith("zero-shot") else THRESHOLD)
    groups = {"all": models} | {model: [model] for model in models}
    if len(models) == 1:
        del groups["all"]
    tables, shares = [], []
    for kind, (model, names) in itertools.product(LOOKS, groups.items()):
        counts, total = draw_slices(rows, effect, args.slices, np.random.default_rng(args.seed), kind == "swapped")
        chosen = [models.index(name) for name in names]
        own = total[chosen].any(axis=0)
        found = slice_rows(counts[:, :, chosen][..., own], total[chosen][:, own])
        names_of, means = {**cell, "effect": effect, "model": model, "kind": kind}, found["paper_mean"]
        tables.append(found.assign(**names_of)[[*names_of, *found]])
        told = {by: ((found[f"{by}_low"] > 0) | (found[f"{by}_high"] < 0)).mean() for by in ("paper", "t")}
        told["t"] = told["t"] if found["t_low"].notna().any() else math.nan  # one task: no interval
        shares.append(names_of | {
            "slices": len(found), "paper_mean": means.mean(), "paper_sd": means.std(), "threshold": threshold,
            "outside": (means.abs() > threshold).mean(), **told, "sign_flip": (found["p"] < 1 - SHARE).mean(),
            "variance_ratio": variance_ratio(rows[rows["model"].isin(names)], effect)})
    return pd.concat(tables), pd.DataFrame(shares)


# Figures ----------------------------------------------------------------------------------------------------


def draw_ecdf(table, shares):
    """Figure 7: cumulative distributions over slices, and nulls (dashed), of the paper's posterior and t means."""
    first, groups, models = shares.iloc[0], table.groupby(["model", "kind"]), list(dict.fromkeys(shares["model"]))
    title = f"{first['effect']} from one subsample per model and task: {title_of(*first[CELL])}"
    title += f"\n{count(first['slices'], 'slice')}; dashed: nulls; grey: within {first['threshold']:g}"
    figure, (axes,) = panels(title, 1, 2, 11, 4 + 0.25 * len(shares), sharey=True)
    texts = "the paper's model: posterior mean of beta (log odds)", "mean difference over tasks (points)"
    for axis, name, text in zip(axes, ("paper", "t"), texts):
        for row in shares.itertuples():
            (what, style), colour = LOOKS[row.kind], f"C{models.index(row.model)}"
            note = f": {100 * getattr(row, name):.0f} % exclude 0".replace(": nan % exclude 0", "")  # one task
            means = groups.get_group((row.model, row.kind))[f"{name}_mean"]
            if means.notna().all():  # else the models share no task
                axis.ecdf(means, color=colour, ls=style, label=f"{row.model}, {what}{note}")
        axis.set_xlabel(text)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)
    axes[0].axvspan(-first["threshold"], first["threshold"], color="grey", alpha=0.15, lw=0)
    axes[0].set_ylabel("share of slices at or below")
    return figure


def draw_nulls(shares):
    """nulls.png: how often each analysis excludes 0 on exact nulls, by cell and model."""
    nulls = shares[shares["kind"] == "swapped"]
    names = [f"{title_of(row.experiment, row.m, row.n)}, {row.effect}, {row.model}" for row in nulls.itertuples()]
    title = "Who sees an effect where there is none? One subsample per model and task"
    figure, ((axis,),) = panels(title, 1, 1, 8.5, 2.2 + 0.3 * len(nulls))
    for column, marker in zip(("paper", "t", "sign_flip"), "soD"):
        axis.plot(100 * nulls[column], range(len(nulls)), marker, ms=4, label=column)
    axis.axvline(100 * (1 - SHARE), color="grey", lw=1, ls="--", label="nominal")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set(ylim=(len(names) - 0.5, -0.5), xlim=(-1, None), xlabel="nulls in which 0 is excluded, percent")
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


# A leaderboard ----------------------------------------------------------------------------------------------


def read_board(path):
    """DataFrame with name, score (fraction) and n (nan if not given), best first."""
    board = read_file(path, ("name", "score"))
    for name in ("score", "n") if "n" in board else ("score",):
        values = pd.to_numeric(board[name], errors="coerce")
        refuse(board, ~np.isfinite(values), f"{name} is {{{name}!r}}, not a number")
        board[name] = values
    board = board.assign(n=board.get("n", math.nan))
    board["score"] /= 100 if (board["score"] > 1).any() else 1
    bad = (board["score"] < 0) | (board["score"] > 1) | (board["n"] < 1)
    refuse(board, bad, "scores lie in 0 to 1, or all in percent; n is from 1")
    if len(board) < 2:
        stop(f"{path} has fewer than two entries: a board needs two")
    return board.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def board_table(board, rows, seed):
    """leaderboard.csv of one model's rows, whose training noise the entries are taken to have; nan: not told from 0."""
    subsamples, scores = rows.groupby(["task", "subsample"])["acc_extra"].mean(), 100 * board["score"].to_numpy()
    variance, told = training_variance([share.to_numpy() for _, share in subsamples.groupby("task")], rows["n"].iloc[0])
    variance = variance if told else math.nan
    text = 1e4 * (board["score"] * (1 - board["score"]) / board["n"]).to_numpy()  # of its n test texts; nan without n
    gap = np.append(scores[:-1] - scores[1:], math.nan)
    table = pd.DataFrame({"rank": range(1, len(board) + 1), "name": board["name"], "score": board["score"],
                          "model": rows["model"].iloc[0], "gap": gap})
    noises = {"p_wrong": 2 * variance, "p_wrong_texts": 2 * variance + text + np.append(text[1:], math.nan)}
    for name, noise in (noises | {f"p_swap_{R}": 2 * variance / R for R in (1, 5, 20)}).items():
        table[name] = stats.norm.sf(gap / np.sqrt(noise))
    draws = scores + np.random.default_rng(seed).normal(0, math.sqrt(variance), (100_000, len(board)))
    best = np.bincount(draws.argmax(1), minlength=len(board)) / len(draws)
    return table.assign(p_best=best if told else math.nan)


def run_board(rows, args):
    """The leaderboard under the training noise of one cell, model by model."""
    if len(cells := rows.groupby(CELL).size().index) > 1:
        choices = "; ".join(f"--experiment {e} --m {m} --n {n}" for e, m, n in cells)
        stop(f"--leaderboard takes the noise of one cell; choose by {choices}")
    sizes = rows.groupby(["model", "task"])["subsample"].nunique()
    for model, task in sizes.index[sizes < 2]:
        stop(f"{model} has one subsample of {task}, which cannot show how runs differ: run at least 2, or use --tasks")
    board = read_board(args.leaderboard)
    table = pd.concat(board_table(board, mine, args.seed) for _, mine in rows.groupby("model"))
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out, leaderboard=table)
    print(f"{args.leaderboard}: each entry's mean accuracy over {count(rows['task'].nunique(), 'task')} is taken to "
          f"vary from training run to training run as acc_extra of each model here ({title_of(*cells[0])}). The gap is "
          "taken as true; the entries share their test texts, which are held fixed; with a column n, p_wrong_texts "
          "adds their luck as if they were not shared, which is at most too much.\n")
    print(table.to_string(index=False, na_rep="", float_format="{:.3g}".format))
    for model in table.loc[table["p_best"].isna(), "model"].unique():
        print(f"{model}: training noise is not told from 0 by these data: nothing is said on swaps; run more")
    print(f"\ntable: {(args.out / 'leaderboard.csv').resolve()}")


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], epilog="Columns: see the script's head.")
    add = parser.add_argument_group("what to run").add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], metavar="FILE or FOLDER",
        help="results files, folders of them, or folders in the published layout (results.csv)")
    add("--slices", type=positive, default=500, metavar="N", help="slices, and so many nulls (%(default)s)")
    add("--effects", nargs="+", choices=tuple(EFFECTS), default=["bias"], help="(bias)")
    add("--leaderboard", type=Path, metavar="FILE", help="instead: is the order of its entries right, would they swap?")
    add("--threshold", type=float, metavar="T", help="on beta's posterior mean, log odds (0.04; zero-shot: 0.08)")
    for flag, name in CHOICES.items():
        add(f"--{flag}", nargs="+", type=int if name in WHOLE else str, metavar=name.upper(), help="only these (all)")
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("meta"), metavar="FOLDER", help="tables and figures (%(default)s)")
    add("--no-figures", action="store_true", help="tables only")
    args = parser.parse_args(argv)
    args.effects = list(dict.fromkeys(args.effects))
    if args.seed < 0 or args.threshold is not None and not args.threshold > 0:
        parser.error(f"--seed {args.seed} --threshold {args.threshold}: a seed is from 0, a threshold above 0")
    return args


@matplotlib.rc_context({"text.parse_math": False})  # a $ in a name is a $
def main(argv=None):
    args = parse_args(argv)
    rows = choose_rows(read_results(args.paths), args)
    if args.leaderboard:
        return run_board(rows, args)
    args.out.mkdir(parents=True, exist_ok=True)
    found, jobs = [], list(itertools.product(rows.groupby(CELL), args.effects))
    for (cell, mine), effect in tqdm(jobs, leave=False):
        found.append(analyse(mine, effect, args))
        if not args.no_figures:
            draw_ecdf(*found[-1]).savefig(args.out / f"slices.{file_of(*cell, effect)}.png", dpi=130)
    table, shares = map(pd.concat, zip(*found))
    write(args.out, meta=table, shares=shares)
    names = [*CELL, "effect", "model", "threshold", "variance_ratio"]
    wide = 100 * shares.pivot_table(["outside", "paper", "t", "sign_flip"], names, "kind", sort=False, dropna=False)
    wide = wide.rename(columns={"slice": "slices", "swapped": "nulls", "paper": "paper excludes 0"}).dropna(how="all")
    print("one subsample per model and task: percent beyond the threshold; percent of 89 % intervals that exclude 0")
    for cell, runs in rows.groupby([*CELL, "model", "task"])["subsample"].nunique().groupby(CELL).max().items():
        if runs < 2:
            print(f"{title_of(*cell)} has one subsample per model and task: all its slices are the same")
    print(wide.reset_index().to_string(index=False, na_rep="", float_format="{:.4g}".format))
    if not args.no_figures:
        draw_nulls(shares).savefig(args.out / "nulls.png", dpi=130)
    print(f"in {args.out.resolve()}: meta.csv, shares.csv{'' if args.no_figures else ', figures'}")


# --- shared: start ---
if __name__ == "__main__":
    with guard():
        main([] if "__file__" not in globals() else None)  # pasted into a notebook cell: sys.argv is the kernel's
# --- end shared ---
