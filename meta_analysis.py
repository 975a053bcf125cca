# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "matplotlib==3.10.9"]
# ///
"""How far can one draw of texts be trusted? Section 10 of the paper (Dubey 2024).

A slice keeps one random draw (a `subsample` of results.csv) of each model and task, as if the
experiment had been run once.
In shuffled slices `extra` and `test` are swapped at random, so that the bias is 0 on average. Each
slice is analyzed in two ways:
    paper   the paper's model, on the texts of `test`: right_ijl ~ Binomial(n, p), logit p = mu +
            alpha_i + U_j + beta l, model i, task j, arm l (0: extra, 1: test)
    t       a t interval over tasks for the bias in percentage points, averaged over models

    python meta_analysis.py results.csv --model bert --slices 20

In a notebook: shares_table(pd.read_csv("results.csv"))

Writes slices.png and two tables to meta/results/. Their columns, with 89% intervals:
    meta.csv: experiment, m, n, arms, kind, slice, paper_mean, paper_low, paper_high (beta, log
        odds), t_mean, t_low, t_high (points)
    shares.csv: threshold (log odds), shares of slices with paper_mean beyond it (outside) and with
        an interval that excludes 0 (paper, t)
"""

import argparse
import contextlib
import csv
import os
import sys
import textwrap
from pathlib import Path

try:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure
    from scipy import special, stats
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}. Run pip install -r requirements.txt, or start this script "
                     "with uv run meta_analysis.py")

SHARE = 0.89  # coverage of intervals, as in the paper
KEY = """\
A slice keeps one random draw of each model and task, as if the experiment had been run once. In
shuffled slices, seen and unseen are exchanged at random, so that the bias is 0 on average. outside:
share of slices whose bias is beyond the threshold, in log odds (the paper's: 0.08 for experiments
whose names begin with zero-shot, else 0.04). paper, t: share with an 89% interval that excludes 0,
by the paper's model, and by t over tasks."""


def shares_table(rows, slices=500, threshold=None):
    """The table of shares.csv from rows in the columns of results.csv, as pd.read_csv gives them.
    threshold: of beta, in log odds. None: the paper's."""
    return shares_of(claims_of(clean_rows(rows), slices, threshold))


def claims_of(rows, slices, threshold):
    """Rows of meta.csv from those of clean_rows. outside, paper, t: does the slice claim a bias?"""
    unseen, seen = [rows[[f"acc_{arm}" for arm in CROSSED[mean]]].mean(axis=1)
                    for mean in ("unseen", "seen")]  # *_on_extra is nan where arms are plain
    rows = rows.assign(bias=100 * (seen - unseen))
    names = [*CELL, "arms"]
    tables = {cell: slice_table(part, slices) for cell, part in rows.groupby(names)}
    meta = pd.concat(tables, names=names).reset_index(names)
    if threshold is None:  # the paper's
        threshold = np.where(meta.experiment.str.startswith("zero-shot"), 0.08, 0.04)
    return meta.assign(
        threshold=threshold, outside=meta.paper_mean.abs() > threshold,
        paper=meta.paper_low * meta.paper_high > 0,
        # 1 or 0, but nan where there is only one task: shares must not count that as 0
        t=np.sign(meta.t_low * meta.t_high).clip(lower=0))


def shares_of(claims):
    """Of each setting: which share of its slices claims a bias?"""
    names = [*CELL, "arms", "kind", "threshold"]
    return claims.groupby(names)[["outside", "paper", "t"]].mean().reset_index()


def print_shares(claims, shares):
    """The answer of each experiment in capitals, the key and the table."""
    for experiment, claimed in claims.groupby("experiment"):  # none is averaged with its control
        claimed = claimed.groupby("kind").outside.mean()
        print(textwrap.fill(
            f"{experiment}: ONE DRAW OF EACH TASK CLAIMS A BIAS IN {claimed.drawn:.0%} OF SLICES, "
            f"AND IN {claimed.shuffled:.0%} OF THOSE IN WHICH SEEN AND UNSEEN WERE SHUFFLED.", 100))
        if claimed.shuffled > 1 - SHARE:  # what an honest 89% interval claims
            print("- So one slice says little: this rule claims a bias even where there is none on "
                  "average.\n  Use all draws: fit_model.py.")
    shown = shares.astype({"threshold": str})
    print(f"\n{KEY}\n\n{shown.to_string(index=False, float_format='{:.0%}'.format)}\n")


def slice_table(rows, slices):
    """Rows of meta.csv for one setting: slices, then the same slices shuffled."""
    rng = np.random.default_rng(0)
    n = rows["n"].iloc[0]
    groups = rows.groupby(["model", "task"])
    right, bias = [], []
    for _, draws in groups:
        drawn = draws.iloc[rng.integers(len(draws), size=slices)]
        right.append((n * drawn[["acc_extra", "acc_test"]]).round())
        bias.append(drawn["bias"])
    right = np.stack(right, axis=2)  # [slices, arms, pairs of model and task]
    bias = np.stack(bias, axis=1)  # [slices, pairs], in points
    swap = rng.random(bias.shape) < 0.5
    right = np.vstack([right, np.where(swap[:, None], right[:, ::-1], right)])
    bias = np.vstack([bias, np.where(swap, -bias, bias)])  # [2 slices, pairs]

    models, tasks = zip(*groups.groups)
    # which pair is of which model, but the first one [pairs, models - 1], and of which task
    alpha = pd.get_dummies(models, drop_first=True, dtype=float).to_numpy()
    U = pd.get_dummies(tasks, dtype=float).to_numpy()  # [pairs, tasks]
    mean, sd = slice_posterior(right, n, alpha, U)
    low, high = stats.norm.interval(SHARE, mean, sd)
    D = pd.DataFrame(bias @ (U / U.sum(axis=0)))  # means over models [2 slices, tasks]
    t = D.mean(axis=1)
    half = stats.t.ppf((1 + SHARE) / 2, D.shape[1] - 1) * D.sem(axis=1)
    return pd.DataFrame({
        "kind": np.repeat(["drawn", "shuffled"], slices), "slice": D.index % slices + 1,
        "paper_mean": mean, "paper_low": low, "paper_high": high,
        "t_mean": t, "t_low": t - half, "t_high": t + half})


def slice_posterior(right, n, alpha, U):
    """(mean, sd) of beta [slices] from numbers of right answers to n texts [slices, arms, pairs],
    with indicators alpha [pairs, models - 1] and U [pairs, tasks]. Priors: mu, beta ~ N(0, 1),
    alpha ~ N(0, 5), U_j ~ N(0, sd_U), sd_U ~ HalfNormal(1), all N(mean, sd). Newton's method finds
    the mode, the inverse curvature gives sd; EM finds the mode of sd_U, where sd_U^4 + J sd_U^2 =
    sum of E U_j^2."""
    y = right.reshape(len(right), -1)
    arm = np.repeat([0, 1], len(U))
    Z = np.column_stack([np.ones(len(arm)), arm, np.tile(alpha, (2, 1))])
    U = np.tile(U, (2, 1))
    J = U.shape[1]
    prior = np.array([1, 1] + [1 / 25] * alpha.shape[1])  # precisions
    theta = np.zeros((len(y), len(prior)))  # mu, beta, alpha
    level = np.zeros((len(y), J))  # U_j
    precision = np.ones((len(y), 1))  # 1 / sd_U^2
    # sixteen steps suffice where tasks differ as the paper's do. Where they hardly differ, sd_U
    # creeps towards 0: beta is right to 1e-3 for 5 tasks of 100 texts up to an accuracy of .98
    for _ in range(2000):
        p = special.expit(theta @ Z.T + level @ U.T)
        slope = (y - n * p) @ Z - prior * theta
        slope_U = (y - n * p) @ U - precision * level

        # The curvature is an arrow matrix, [[head, side], [side.T, diag(shaft)]] of each slice:
        # eliminating U leaves the Schur complement of theta
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
        if max(np.abs(step).max(), np.abs(step_U).max()) < 1e-6:  # log odds
            break
        variance_U = 1 / shaft + (ratio * (covariance @ ratio)).sum(axis=1)
        square = (level**2 + variance_U).sum(axis=1, keepdims=True)
        precision = 1 / np.maximum((np.sqrt(J**2 + 4 * square) - J) / 2, 1e-4)  # not infinite
    if np.abs(step).max() > 1e-5:  # near accuracy 1 sd_U may have two modes
        print("the paper's model has not settled in some slices (is nearly all right?): prefer t")
    return theta[:, 1], np.sqrt(covariance[:, 1, 1])


def plot(claims, path):
    """Figure 7: the paper's estimates in the slices of each setting."""
    cells = claims.groupby(CELL)
    figure = Figure((8, 0.5 + 2.2 * len(cells)), layout="constrained")
    axes = figure.subplots(len(cells), squeeze=False, sharex=True)[:, 0]
    for axis, (cell, part) in zip(axes, cells):
        threshold = part["threshold"].iloc[0]
        axis.axvspan(-threshold, threshold, color="0.88", label="within the threshold")
        for kind, line in (("drawn", "-"), ("shuffled", "--")):
            axis.ecdf(part.paper_mean[part.kind == kind], linestyle=line, label=kind)
        # two dollar signs in a name are no formula
        axis.set_title(f"{cell[0]}, {title_of(*cell[1:])}", parse_math=False)
        axis.set_ylabel("share of slices\nat or below")
    axis.set_xlabel("posterior mean of beta (log odds)")
    axes[0].legend()
    figure.savefig(path, dpi=130)


# From here on: files and flags. Also in other scripts: see tests/copy_blocks.py

# --- shared: border ---
@contextlib.contextmanager
def errors_on_one_line():
    """Around main: errors end in one line; with TRACEBACK=1 in a traceback."""
    try:
        yield
        print(end="", flush=True)  # here a closed pipe is noticed
    except KeyboardInterrupt:
        raise SystemExit("stopped. Run the same command again: what is written stays")
    except BrokenPipeError:
        os._exit(1)  # head has read enough
    except Exception as error:
        if os.environ.get("TRACEBACK"):
            raise
        raise SystemExit(f"error: {brief(error)}")


def brief(error):
    """An error on one line, of 3 rows of a screen at most. Ours are ValueErrors and say all; others
    need their kind."""
    text = str(error)
    if not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, 290, placeholder=" ...")


def user_path(text):
    """The path of a flag. bash leaves the ~ of --out=~/mine.csv as it is."""
    return Path(text).expanduser()
# --- end shared ---


# --- shared: crossing ---
CROSSED = {  # by mean: the arm that gives it on the texts of `test`, that on the texts of `extra`
    "base": ("base", "base_on_extra"),
    "unseen": ("extra", "test_on_extra"),  # pretrained on the other set
    "seen": ("test", "extra_on_extra")}
# --- end shared ---


# --- shared: reading ---
CELL = ["experiment", "m", "n"]  # a setting
RUN = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # identify a row
REASONS = ["reason", "reason_unless_yes"]  # why nothing may be concluded of some answers
WORDS = ["recipe", "data", "versions", *REASONS]  # other columns that need not be there
FILTERS = ("experiment", "m", "n", "model", "tasks")
FACTS = ["num_classes", "discordant", "discordant_on_extra", "item_variance_boost", "control",
         "bias_se", "bias_df"]
CSV = {"index": False, "float_format": "%.6g"}  # of written tables


def columns_of(metric):
    """Of three arms, on `test` and on `extra`."""
    return [f"{metric}_{arm}" for arm in sum(CROSSED.values(), ())]


def refuse(rows, bad, words):
    if bad.any():
        raise ValueError(f"{rows.index[bad][0]}: {words}")


def read_results(path, metric="acc"):
    """The cells of a results file, as text. The index says where each row stands."""
    if not path.exists():
        there = [other.name for other in path.parent.glob("*_results.csv")]
        raise ValueError(f"there is no {path}. Results here: {there}")
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    mark = max(",;\t", key=lines[0].count)
    # line by line: one cut short in quotes would swallow the next
    header, *lines = [next(csv.reader([line], delimiter=mark), []) for line in lines]
    if f"{metric}_extra" not in header:
        raise ValueError(f"{path} has no column {metric}_extra, but "
                         f"{[name for name in header if name.endswith('_extra')] or header}. A "
                         "table of answers? contamination_test.py --answers makes results of it")
    rows = {}
    for number, cells in enumerate(lines, 2):
        if len(cells) == len(header):  # if cut short in `versions`, its numbers are whole
            rows[f"{path}, line {number}"] = cells
        elif cells:
            print(f"{path}, line {number} is broken: left out")
    if not rows:
        raise ValueError(f"{path} has no rows: run run_experiment.py first")
    return pd.DataFrame.from_dict(rows, "index", columns=header)


def clean_rows(rows, metric="acc", plain=False, flags={}):
    """The rows of results files that the flags choose, checked. arms: crossed if all rows of a cell
    have the metric on `extra`; else, or if plain, plain: *_on_extra is nan."""
    numbers = [*RUN[3:], *FACTS, *columns_of("acc"), *columns_of(metric)]
    needed = [*RUN[:-1], f"{metric}_extra", f"{metric}_test"]
    rows = rows.reindex(columns=[*dict.fromkeys([*rows, *RUN, *WORDS, *numbers])])
    rows = rows.replace("", np.nan)
    for name in numbers:
        given = rows[name].replace(["NA", "nan"], np.nan)  # of a name, no: a task may be called NA
        rows[name] = pd.to_numeric(given, errors="coerce")
        refuse(rows, rows[name].isna() & given.notna(), f"{name} is not a number like 0.5")
    for name in needed:
        refuse(rows, rows[name].isna(), f"column {name} is missing or empty")
    rows[RUN[3:]] = rows[RUN[3:]].fillna(0).astype(int)
    for flag in FILTERS:
        values = rows[flag.removesuffix("s")].astype(str)
        chosen = values.isin(flags.get(flag) or values)
        if not chosen.any():
            raise ValueError(f"no rows have --{flag} {flags[flag]}, but {[*values.unique()]}")
        rows = rows[chosen]
    scopes = dict.fromkeys(rows.select_dtypes("number").columns, RUN)
    scopes |= {"recipe": RUN[:5], "data": ["experiment", "task"]}
    for name, scope in scopes.items():
        refuse(rows, rows.groupby(scope)[name].transform("nunique") > 1,
               f"another row has the same {', '.join(scope)} but not {name}: keep one")
    rows = rows.groupby(RUN, as_index=False).first()
    rows["both"] = rows[[f"{metric}_extra_on_extra", f"{metric}_test_on_extra"]].notna().all(axis=1)
    crossed = rows.groupby(CELL)["both"].transform("all") & (not plain)
    rows["arms"] = np.where(crossed, "crossed", "plain")
    rows.loc[~crossed, rows.columns.str.endswith("_on_extra")] = np.nan
    return rows


def title_of(m, n):
    labeled = f"m = {m}, " if m else ""  # 0: trained elsewhere
    return f"{labeled}n = {n}"
# --- end shared ---


def parse_args(argv):
    """The flags, checked for their form alone: clean_rows looks for the values in the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", metavar="FILE", nargs="*", type=user_path, default=[Path("results.csv")],
        help="results; default results.csv")
    add("--slices", type=int, default=500,
        help="how many slices, each one random draw of each model and task; default 500")
    add("--threshold", type=float, help="for beta, in log odds; default the paper's")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="use only these; default all")
    add("--out", type=user_path, metavar="FOLDER", help="of figure and tables; default meta/FILE")
    args = parser.parse_args(argv)
    if args.slices < 1:
        parser.error("--slices: give a number above 0")
    return args


@errors_on_one_line()
def main(argv=None):
    args = parse_args(argv)
    rows = clean_rows(pd.concat([read_results(path) for path in args.paths]), flags=vars(args))
    folder = args.out or Path("meta", "+".join(path.stem for path in args.paths)[:99])
    folder.mkdir(parents=True, exist_ok=True)
    claims = claims_of(rows, args.slices, args.threshold)
    shares = shares_of(claims)
    print_shares(claims, shares)
    claims.loc[:, :"t_high"].to_csv(folder / "meta.csv", **CSV)
    shares.to_csv(folder / "shares.csv", **CSV)
    plot(claims, folder / "slices.png")
    print(f"figure and tables: {folder.resolve()}")


if __name__ == "__main__":  # in a notebook or VS Code flags go into the list: ["--m", "50"]
    main([] if "__file__" not in globals() or "kernel_launcher" in sys.argv[0] else None)
