# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "matplotlib==3.10.9"]
# ///
"""How far can one subsample be trusted? Section 10 of the paper (Dubey 2024).

A slice keeps one random subsample of each model and task, as if the experiment had been run once.
In shuffled slices `extra` and `test` are swapped at random, so there is no bias to find. Each slice
is analyzed in two ways:
    paper   the paper's model, on the texts of `test`: right_ijl ~ Binomial(n, p), logit p = mu +
            alpha_i + U_j + beta l, model i, task j, arm l (0: extra, 1: test)
    t       a t interval over tasks for the bias in percentage points, averaged over models

    python meta_analysis.py results.csv --model bert --slices 20

Writes slices.png and two tables to meta/results/. Their columns, with 89% intervals:
    meta.csv: experiment, m, n, arms, kind, slice, paper_mean, paper_low, paper_high (beta, log
        odds), t_mean, t_low, t_high (points)
    shares.csv: threshold (log odds), shares of slices with paper_mean beyond it (outside; 43% in
        README) and with an interval that excludes 0 (paper, t)
"""

import argparse
import contextlib
import csv
import os
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd

if "__file__" in globals():  # a notebook's may not be installed here
    os.environ.pop("MPLBACKEND", None)

from matplotlib.figure import Figure
from scipy import special, stats

SHARE = 0.89  # coverage of intervals, as in the paper


def report_slices(rows, slices, folder):
    """Write the tables and the figure. Print the answer."""
    names = [*CELL, "arms"]
    tables = {cell: slice_table(mine, slices) for cell, mine in rows.groupby(names)}
    meta = pd.concat(tables, names=names).reset_index(names)
    threshold = np.where(meta["experiment"].str.contains("zero.shot"), 0.08, 0.04)  # paper's
    found = meta.assign(
        threshold=threshold, outside=meta["paper_mean"].abs() > threshold,
        paper=meta["paper_low"] * meta["paper_high"] > 0,
        t=np.sign(meta["t_low"] * meta["t_high"]).clip(lower=0))  # 1, 0 or, for one task, nan
    groups = found.groupby([*names, "kind", "threshold"])
    shares = groups[["outside", "paper", "t"]].mean().reset_index()

    meta.to_csv(folder / "meta.csv", **CSV)
    shares.to_csv(folder / "shares.csv", **CSV)
    plot(found).savefig(folder / "slices.png", dpi=130)

    words = {"kind": "slices", "threshold": "threshold for beta", "outside": "share beyond it",
             "paper": "paper's interval excludes 0", "t": "t interval excludes 0"}
    shown = shares.astype({"threshold": str}).rename(columns=words)
    print(shown.to_string(index=False, float_format="{:.0%}".format))
    claimed = found.groupby("kind")["outside"].mean()
    print(f"With one subsample of each task you would have claimed a bias in {claimed.drawn:.0%} "
          "of slices: beta, the bias in log odds, is beyond the paper's threshold. In shuffled "
          f"slices, which hold no bias, you would have claimed one in {claimed.shuffled:.0%}.")
    if claimed.shuffled > 0.5:
        print("So it is the rule that claims a bias, not the data: its threshold lies within the "
              "noise of a slice.")


def slice_table(rows, slices):
    """Rows of meta.csv for one setting: slices, then the same slices shuffled."""
    rng = np.random.default_rng(0)
    n = rows["n"].iloc[0]
    groups = rows.groupby(["model", "task"])
    right, bias = [], []
    for _, runs in groups:
        drawn = runs.iloc[rng.integers(len(runs), size=slices)]
        right.append((n * drawn[["acc_extra", "acc_test"]]).round())
        bias.append(drawn["bias"])
    right = np.stack(right, axis=2)  # [slices, arms, pairs of model and task]
    bias = np.stack(bias, axis=1)
    swap = rng.random(bias.shape) < 0.5
    right = np.vstack([right, np.where(swap[:, None], right[:, ::-1], right)])
    bias = np.vstack([bias, np.where(swap, -bias, bias)])

    models, tasks = zip(*groups.groups)
    alpha = pd.get_dummies(models, dtype=float).to_numpy()[:, 1:]
    U = pd.get_dummies(tasks, dtype=float).to_numpy()
    mean, sd = slice_posterior(right, n, alpha, U)
    low, high = stats.norm.interval(SHARE, mean, sd)
    D = pd.DataFrame(bias @ (U / U.sum(axis=0)))  # means over models [slices, tasks]
    t = D.mean(axis=1)
    half = stats.t.ppf((1 + SHARE) / 2, D.shape[1] - 1) * D.sem(axis=1)
    return pd.DataFrame({
        "kind": np.repeat(["drawn", "shuffled"], slices), "slice": D.index % slices + 1,
        "paper_mean": mean, "paper_low": low, "paper_high": high,
        "t_mean": t, "t_low": t - half, "t_high": t + half})


def slice_posterior(right, n, alpha, U):
    """(mean, sd) of beta [slices] from right answers [slices, arms, pairs], with indicators alpha
    [pairs, models - 1] and U [pairs, tasks]. Priors: mu, beta ~ N(0, 1), alpha ~ N(0, 5), U_j ~
    N(0, sd_U), sd_U ~ HalfNormal(1). Newton's method finds the mode, the inverse curvature gives
    sd; EM finds the mode of sd_U, where sd_U^4 + J sd_U^2 = sum of E U_j^2."""
    y = right.reshape(len(right), -1)
    arm = np.repeat([0, 1], len(U))
    Z = np.column_stack([np.ones(len(arm)), arm, np.tile(alpha, (2, 1))])
    U = np.tile(U, (2, 1))
    J = U.shape[1]
    prior = np.array([1, 1] + [1 / 25] * alpha.shape[1])  # precisions
    theta = np.zeros((len(y), len(prior)))  # mu, beta, alpha
    level = np.zeros((len(y), J))  # U_j
    precision = np.ones((len(y), 1))  # 1 / sd_U^2
    for _ in range(200):  # usually, ten are enough
        p = special.expit(theta @ Z.T + level @ U.T)
        slope = (y - n * p) @ Z - prior * theta
        slope_U = (y - n * p) @ U - precision * level

        # The curvature is [[head, side], [side.T, diag(shaft)]]
        weight = n * p * (1 - p)
        weighted = Z.T * weight[:, None]
        head = weighted @ Z + np.diag(prior)
        side = weighted @ U
        shaft = weight @ U + precision
        ratio = side / shaft[:, None]
        covariance = np.linalg.inv(head - ratio @ side.mT)  # of theta
        step = (covariance @ (slope[..., None] - ratio @ slope_U[..., None]))[..., 0]
        step_U = slope_U / shaft - (step[:, None] @ ratio)[:, 0]
        theta += step
        level += step_U
        if max(np.abs(step).max(), np.abs(step_U).max()) < 1e-7:  # log odds
            break
        variance_U = 1 / shaft + (ratio * (covariance @ ratio)).sum(axis=1)
        square = (level**2 + variance_U).sum(axis=1, keepdims=True)
        precision = 1 / np.maximum((np.sqrt(J**2 + 4 * square) - J) / 2, 1e-4)  # not infinite
    return theta[:, 1], np.sqrt(covariance[:, 1, 1])


def plot(found):
    """Figure 7: the paper's estimates in the slices of each setting."""
    cells = found.groupby(CELL)
    figure = Figure((8, 0.5 + 2.2 * len(cells)), layout="constrained")
    axes = figure.subplots(len(cells), squeeze=False, sharex=True)[:, 0]
    for axis, (cell, mine) in zip(axes, cells):
        threshold = mine["threshold"].iloc[0]
        axis.axvspan(-threshold, threshold, color="0.88", label="within the threshold")
        for kind, line in (("drawn", "-"), ("shuffled", "--")):
            axis.ecdf(mine["paper_mean"][mine["kind"] == kind], linestyle=line, label=kind)
        axis.set(title=title_of(*cell), ylabel="share of slices\nat or below")
    axis.set_xlabel("posterior mean of beta (log odds)")
    axes[0].legend(loc="lower right")
    return figure


# Also in fit_model.py

# --- shared: border ---
@contextlib.contextmanager
def errors_on_one_line():
    """Around main: errors end in one line; with TRACEBACK=1 in a traceback."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # cron may close it
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit("stopped: finished work is kept")
    except BrokenPipeError:
        os._exit(1)  # head has read enough
    except Exception as error:
        if os.environ.get("TRACEBACK"):
            raise
        raise SystemExit(f"error: {brief(error)}")


def brief(error, limit=290):
    """An error on one line, of 3 rows of a screen at most. A long path loses its start."""
    text = str(error).replace("'utf-8' codec", "save it as UTF-8:")
    if " " not in text:  # as of KeyError
        text = repr(error)
    text = re.sub(r"\S{40,}(\S{40})", r"...\1", text)
    return textwrap.shorten(text, limit, placeholder=" ...")
# --- end shared ---


# --- shared: reading ---
CELL = ["experiment", "m", "n"]  # a setting
RUN = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # identify a row
FILTERS = ("experiment", "m", "n", "model", "tasks")
CSV = {"index": False, "float_format": "%.6g"}  # of written tables


def columns_of(metric):
    """Columns of the three arms on `test`, then on `extra`."""
    names = [f"{metric}_{arm}" for arm in ("base", "extra", "test")]
    return names + [f"{name}_on_extra" for name in names]


def refuse(rows, bad, words):
    if bad.any():
        raise ValueError(f"{rows.index[bad][0]}: {words}")


def read_rows(path, metric):
    """The rows of a results file; empty fields are nan."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    if lines[0] and "acc_base" not in lines[0]:
        raise ValueError(f"{path} has no column acc_base: did you mean {path.stem}_results.csv?")
    mark = max(",;\t", key=lines[0].count)
    # line by line: one cut short in quotes would swallow the next
    header, *cells = [next(csv.reader([line], delimiter=mark), []) for line in lines]
    whole = {}
    for number, row in enumerate(cells, 2):
        place = f"{path}, line {number}"
        if len(row) == len(header) and number <= len(cells):
            whole[place] = row
        elif row:
            print(f"{place} is broken: left out")
    rows = pd.DataFrame.from_dict(whole, "index", columns=[name.strip() for name in header])
    rows = rows.replace(["", "NA", "nan"], np.nan)
    needed = [*RUN[:-1], "majority", *columns_of("acc")[:3], *columns_of(metric)[:3]]
    shares = ["majority", "discordant", "discordant_on_extra", *columns_of("acc")]
    more = ["seed", "num_classes", *columns_of("f1"), *columns_of(metric)]
    for name in [*needed, *shares, *more]:
        rows[name] = rows.get(name, np.nan)
        filled = rows[name].notna()
        if name not in RUN[:3]:
            rows[name] = pd.to_numeric(rows[name], errors="coerce")
        bad = rows[name].isna() & (filled | (name in needed))
        refuse(rows, bad, f"column {name} is missing, empty or not like 0.5")
        if name in shares:
            refuse(rows, ~rows[name].fillna(0).between(0, 1), f"{name} is not between 0 and 1")
    rows[RUN[3:]] = rows[RUN[3:]].fillna(0).astype(int)
    return rows


def load_rows(args, metric="acc"):
    """The rows that the flags choose. arms: crossed if all rows of a cell have the metric on
    `extra`; else, or with --plain, plain: *_on_extra is nan."""
    rows = pd.concat([read_rows(path, metric) for path in args.paths])
    for flag in FILTERS:
        values = rows[flag.removesuffix("s")].astype(str)
        wanted = getattr(args, flag) or [*values]
        for name in {*wanted} - {*values}:
            raise ValueError(f"no rows have --{flag} {name}. There are: {sorted({*values})}")
        rows = rows[values.isin(wanted)]
    if rows.empty:
        raise ValueError(f"{args.paths[0]} has no rows: run run_experiment.py first")
    scopes = dict.fromkeys(rows.select_dtypes("number").columns, RUN)
    scopes |= {"recipe": RUN[:5], "data": ["experiment", "task"],
               "subsample": [*RUN[:5], "seed", "split"],  # a draw, or a data set, counts once
               "task": ["experiment", "model", "m", "n", "seed", "data"]}
    for name, scope in scopes.items():
        if {name, *scope} <= {*rows}:
            values = rows.groupby(scope)[name].transform("nunique")
            words = f"another row has the same {', '.join(scope)} but not {name}: keep one"
            refuse(rows, values > 1, words)
    rows = rows.groupby(RUN, as_index=False).first()
    rows["both"] = rows[columns_of(metric)].notna().all(axis=1) & (not args.plain)
    crossed = rows.groupby(CELL)["both"].transform("all")
    rows["arms"] = np.where(crossed, "crossed", "plain")
    rows.loc[~crossed, rows.columns.str.endswith("_on_extra")] = np.nan
    return rows


def title_of(experiment, m, n):
    return f"{experiment}, m = {m}, n = {n}"
# --- end shared ---


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FILE ...] [flags]", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", metavar="FILE", nargs="*", type=Path, default=[Path("results.csv")],
        help="results; default results.csv")
    add("--slices", type=int, default=500,
        help="draws of one subsample of each model and task; default 500")
    add("--plain", action="store_true", help="test on one set, as the paper does; default both")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="use only these; default all")
    add("--out", type=Path, metavar="FOLDER", help="of figure and tables; default meta/FILE")
    args = parser.parse_args(argv)
    if args.slices < 1:
        parser.error("--slices must be positive")
    return args


@errors_on_one_line()
def main(argv=None):
    args = parse_args(argv)
    rows = load_rows(args)
    fewest = rows.groupby(RUN[:5])["subsample"].nunique().min()
    tasks = rows["task"].nunique()
    if fewest < 5 or tasks < 2:
        print(f"Too few to rely on. Tasks: {tasks}; subsamples of a task: {fewest}")
    bias = rows["acc_test"] - rows["acc_extra"]
    mirrored = rows["acc_extra_on_extra"] - rows["acc_test_on_extra"]  # nan: plain arms
    rows["bias"] = 100 * (bias + mirrored.fillna(bias)) / 2
    folder = args.out or Path("meta", "+".join(path.stem for path in args.paths))
    folder.mkdir(parents=True, exist_ok=True)
    report_slices(rows, args.slices, folder)
    print(f"figure and tables: {folder.resolve()}")


if __name__ == "__main__":  # in a notebook cell flags go into the list: ["--m", "50"]
    main([] if "__file__" not in globals() else None)
