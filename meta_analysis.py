# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "matplotlib==3.10.9"]
# ///
"""How far can one subsample be trusted? Section 10 of the paper, and leaderboards.

Figure 7 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before
few-shot text classification" (Dubey). A slice keeps one subsample of each model and task, as most
benchmarks do. This script draws many slices and asks what each would have claimed. In shuffled
slices `extra` and `test` are swapped at random, so there is no bias to find. Two analyses:
    paper   the paper's model, on the texts of `test`: right_ijl ~ Binomial(n, p), logit p = mu +
            alpha_i + U_j + beta l, for model i, task j, arm l (0: extra, 1: test). U_j is in the
            model even if there is only one task.
    t       a t interval over tasks for the bias in percentage points, averaged over models

    python meta_analysis.py results.csv --models bert --slices 20
    python meta_analysis.py results.csv --leaderboard board.csv   # columns name, score

Writes report.html and tables to meta/results/ (with a leaderboard: meta/board/). Their columns,
with 89% intervals:
    meta.csv: experiment, m, n, arms, kind (drawn, shuffled), slice, paper_mean, paper_low,
        paper_high (beta, log odds), t_mean, t_low, t_high (points)
    shares.csv: threshold (log odds) and the shares of slices with paper_mean beyond it (outside)
        and with an interval that excludes 0 (paper, t)
    leaderboard.csv: experiment, m, n, model (whose runs show the noise), rank, name, score, gap
        (points to the next), p_wrong (probability that these two are in the wrong order),
        p_swap_1, p_swap_5, p_swap_20 (that they swap in a rerun with so many training sets)
"""

import argparse
import base64
import html
import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import special, stats

LEVEL = 0.89  # of intervals, as in the paper


def report_slices(rows, slices):
    """(parts of the page, tables): the slices of all settings."""
    names = [*CELL, "arms"]
    tables = {cell: slice_table(mine, slices) for cell, mine in rows.groupby(names)}
    meta = pd.concat(tables, names=names).reset_index(names)
    zero_shot = meta["experiment"].str.contains("zero.shot")
    threshold = np.where(zero_shot, 0.08, 0.04)  # section 10
    found = meta.assign(
        threshold=threshold, outside=meta["paper_mean"].abs() > threshold,
        paper=meta["paper_low"] * meta["paper_high"] > 0,
        t=np.sign(meta["t_low"] * meta["t_high"]).clip(lower=0))  # nan for one task
    groups = found.groupby([*names, "kind", "threshold"])
    shares = groups[["outside", "paper", "t"]].mean().reset_index()

    said = {}
    for kind, share in shares.groupby("kind")["outside"]:
        said[kind] = f"{share.min():.0%}"
        if len(share) > 1:
            said[kind] += f" to {share.max():.0%}"
    drawn = ("With one subsample of each task you would have claimed a bias in "
             f"{said['drawn']} of the draws: beta is beyond the paper's threshold.")
    shuffled = ("In shuffled draws, where there is no bias to find, you would have claimed one in "
                f"{said['shuffled']}.")
    print(drawn, shuffled, sep="\n")
    parts = [("", drawn), ("", shuffled), ("slices", plot(found)), ("", shares)]
    return parts, {"meta": meta, "shares": shares}


def slice_table(rows, slices):
    """Rows of meta.csv for one setting."""
    right, bias = draw_slices(rows, slices)
    models, tasks = zip(*rows.groupby(["model", "task"]).groups)
    alpha = pd.get_dummies(models).to_numpy(float)[:, 1:]  # of the first model: 0
    U = pd.get_dummies(tasks).to_numpy(float)
    mean, sd = slice_posterior(right, rows["n"].iloc[0], alpha, U)
    low, high = stats.norm.interval(LEVEL, mean, sd)
    D = pd.DataFrame(bias @ (U / U.sum(axis=0)))  # [slices, tasks]
    t = D.mean(axis=1)
    half = stats.t.ppf((1 + LEVEL) / 2, D.shape[1] - 1) * D.sem(axis=1)
    return pd.DataFrame({
        "kind": np.repeat(["drawn", "shuffled"], slices), "slice": D.index % slices + 1,
        "paper_mean": mean, "paper_low": low, "paper_high": high,
        "t_mean": t, "t_low": t - half, "t_high": t + half})


def draw_slices(rows, slices):
    """Right answers on `test` [2 * slices, arms, pairs of model and task] and bias [2 * slices,
    pairs]: the slices, then the same slices shuffled."""
    rng = np.random.default_rng(0)
    right, bias = [], []
    for _, runs in rows.groupby(["model", "task"]):
        drawn = runs.iloc[rng.integers(len(runs), size=slices)]
        right.append(drawn[["acc_extra", "acc_test"]].mul(drawn["n"], axis=0).round())
        bias.append(drawn["bias"])
    right = np.transpose(right, (1, 2, 0))
    bias = np.transpose(bias)
    swap = rng.random(bias.shape) < 0.5
    shuffled = np.where(swap[:, None], right[:, ::-1], right)
    return np.vstack([right, shuffled]), np.vstack([bias, np.where(swap, -bias, bias)])


def slice_posterior(right, n, alpha, U):
    """(mean, sd) of beta [slices] from right answers [slices, arms, pairs], with indicators alpha
    [pairs, models - 1] and U [pairs, tasks]. Priors: mu, beta ~ N(0, 1), alpha ~ N(0, 5), U_j ~
    N(0, sd_U), sd_U ~ HalfNormal(1). Newton's method finds the mode, the inverse curvature gives
    sd; EM finds the mode of sd_U, where sd_U^4 + J sd_U^2 = sum of E U_j^2. Each step eliminates
    U_j first, which keeps the matrices small."""
    y = right.reshape(len(right), -1)
    arm = np.repeat([0, 1], len(U))
    Z = np.column_stack([np.ones(len(arm)), arm, np.tile(alpha, (2, 1))])
    U = np.tile(U, (2, 1))
    J = U.shape[1]
    prior = np.array([1, 1] + [1 / 25] * alpha.shape[1])  # precisions
    theta = np.zeros((len(y), len(prior)))  # mu, beta, alpha
    level = np.zeros((len(y), J))  # U_j
    precision = np.ones((len(y), 1))  # 1 / sd_U^2
    for _ in range(200):  # about ten are enough, except where tasks hardly differ
        p = special.expit(theta @ Z.T + level @ U.T)
        slope = (y - n * p) @ Z - prior * theta
        slope_U = (y - n * p) @ U - precision * level

        # The curvature is [[head, border], [border.T, diag(shaft)]]
        weight = n * p * (1 - p)
        weighted = Z.T * weight[:, None]
        head = weighted @ Z + np.diag(prior)
        border = weighted @ U
        shaft = weight @ U + precision
        ratio = border / shaft[:, None]
        covariance = np.linalg.inv(head - ratio @ border.mT)  # of theta
        step = (covariance @ (slope[..., None] - ratio @ slope_U[..., None]))[..., 0]
        step_U = slope_U / shaft - (step[:, None] @ ratio)[:, 0]
        theta += step
        level += step_U
        if max(np.abs(step).max(), np.abs(step_U).max()) < 1e-7:
            break
        variance_U = 1 / shaft + (ratio * (covariance @ ratio)).sum(axis=1)
        square = (level**2 + variance_U).sum(axis=1, keepdims=True)
        precision = 1 / np.maximum((np.sqrt(J**2 + 4 * square) - J) / 2, 1e-4)
    return theta[:, 1], np.sqrt(covariance[:, 1, 1])


def plot(found):
    """Figure 7, a panel for each setting: the paper's estimates in all slices."""
    cells = found.groupby(CELL)
    figure = Figure((8, 1 + 2.2 * len(cells)), layout="constrained")
    axes = figure.subplots(len(cells), squeeze=False, sharex=True)[:, 0]
    for axis, (cell, mine) in zip(axes, cells):
        threshold = mine["threshold"].iloc[0]
        axis.axvspan(-threshold, threshold, color="0.88", label="within the paper's threshold")
        for line, (kind, means) in zip(("-", "--"), mine.groupby("kind")["paper_mean"]):
            axis.ecdf(means, linestyle=line, label=kind)
        axis.set(title=title_of(*cell), ylabel="share of slices\nat or below")
    axis.set_xlabel("posterior mean of beta (log odds)")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def report_board(rows, path):
    """(parts of the page, tables): the board, for the noise of each model in each setting."""
    try:
        board = pd.read_csv(path, engine="python")[["name", "score"]].astype({"score": float})
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"error: {path} needs the columns name and score (a number): {error}")
    board = board.sort_values("score", ascending=False)
    if board["score"].max() <= 1:
        board["score"] *= 100
    board.insert(0, "rank", range(1, len(board) + 1))
    parts, tables, names = [], {}, [*CELL, "model"]
    for key, mine in rows.groupby(names):
        runs = mine.drop_duplicates(RUN[:-1]).groupby("task")["acc_extra"]  # of one seed
        v = 100**2 * runs.var().sum() / len(runs) ** 2  # of the mean over tasks in one run
        table = tables[key] = board_table(board, v)
        answer = "One run cannot tell the order of these entries"
        if v < board["score"].var():
            doubtful = (table["p_wrong"] > 0.1).sum()
            answer = (f"{doubtful} of {len(board) - 1} neighboring pairs are in the wrong order "
                      "with a probability above 10%")
        answer += (f": mean accuracy varies by {math.sqrt(v):.2f} percentage points (standard "
                   f"deviation) between runs of {key[3]} ({title_of(*key[:3])}).")
        print(answer)
        parts += [("", answer), ("", table.dropna(axis=1, how="all"))]
    return parts, {"leaderboard": pd.concat(tables, names=names).reset_index(names)}


def board_table(board, v):
    """Columns of leaderboard.csv with noise of variance v in each score. If true scores are Normal,
    a true gap is Normal(B gap, 2 B v) given the observed one, with B = 1 - v / var(scores), and a
    rerun with R training sets adds 2 v / R. All p are nan unless B > 0."""
    B = 1 - v / board["score"].var()
    if B <= 0:
        B = math.nan
    gap = board["score"].diff(-1)
    table = board.assign(gap=gap, p_wrong=stats.norm.sf(gap * math.sqrt(B / (2 * v))))
    for R in (1, 5, 20):
        table[f"p_swap_{R}"] = stats.norm.sf(B * gap / math.sqrt(2 * v * (B + 1 / R)))
    return table


# The same in fit_model.py ---

# --- shared: reading ---
CELL = ["experiment", "m", "n"]
RUN = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # names a row
FILTERS = ("experiment", "m", "n", "models", "tasks")


def columns_of(metric):
    """Of the arms on the texts of `test`, then of `extra`."""
    names = [f"{metric}_{arm}" for arm in ("base", "extra", "test")]
    return names + [f"{name}_on_extra" for name in names]


def check(rows, good, words):
    """End at the first row that is not good."""
    if not good.all():
        raise SystemExit(f"error: {rows.index[~good][0]}: {words}")


def read_rows(path, metric):
    """Rows of a file; what is empty is nan."""
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, engine="python")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {path}: {error}")
    rows.index = [f"{path}, data row {number + 1}" for number in rows.index]
    torn = rows.isna().any(axis=1)  # the empty is "", what was cut off is nan
    for where in rows.index[torn]:
        print(f"{where}: left out, for it was cut short")
    rows = rows[~torn].replace("", np.nan)
    needed = [*RUN[:-1], "majority", *columns_of("acc")[:3], *columns_of(metric)[:3]]
    shares = ["discordant", "discordant_on_extra", *columns_of("acc")]
    more = ["majority", "num_classes", *columns_of("f1"), *columns_of(metric)]
    for name in needed:
        if name not in rows:
            raise SystemExit(f"error: {path} has no column {name}, only {', '.join(rows)}")
    for name in [*RUN[3:], *shares, *more]:
        rows[name] = pd.to_numeric(rows.get(name, np.nan), errors="coerce")
    for name in needed:
        check(rows, rows[name].notna(), f"{name} is empty or no number")
    for name in shares:
        count = (rows[name] * rows.n).fillna(0)
        whole = (count - count.round()).abs() < 1e-4 * rows.n
        check(rows, whole & count.between(0, rows.n), f"{name} is no share of n texts")
    rows[RUN[3:]] = rows[RUN[3:]].fillna(0).astype(int)
    return rows


def load_rows(args, metric="acc"):
    """The rows that the flags name. arms: crossed, where all of a cell have the metric on `extra`;
    else, or with --plain, plain, and *_on_extra is nan."""
    rows = pd.concat([read_rows(path, metric) for path in args.paths])
    for flag in FILTERS:
        values = rows[flag.removesuffix("s")].astype(str)
        wanted = set(getattr(args, flag) or values)
        if not wanted <= set(values):
            raise SystemExit(f"error: --{flag}: {wanted} are not all in {set(values)}")
        rows = rows[values.isin(wanted)]
    if rows.empty:
        raise SystemExit("error: no rows")
    scopes = dict.fromkeys(rows.select_dtypes("number"), RUN)
    scopes |= {"recipe": RUN[:5], "data": ["experiment", "task"]}
    for name, scope in scopes.items():
        if name in rows:
            values = rows.groupby(scope)[name].transform("nunique")
            check(rows, values < 2, f"{name} varies in rows of one {', '.join(scope)}")
    rows = rows.groupby(RUN, as_index=False).first()
    rows["both"] = rows[columns_of(metric)].notna().all(axis=1) & (not args.plain)
    crossed = rows.groupby(CELL)["both"].transform("all")
    rows["arms"] = np.where(crossed, "crossed", "plain")
    rows.loc[~crossed, rows.columns.str.endswith("_on_extra")] = np.nan
    return rows


def title_of(experiment, m, n):
    """A cell in words."""
    return f"{experiment}, m = {m}, n = {n}"
# --- end shared ---


# --- shared: page ---
STYLE = """
body { max-width: 70rem; margin: auto; padding: 0 1rem; font: 16px/1.5 sans-serif }
div { margin: .8rem 0; overflow: auto }
td, th { padding-right: .6rem; text-align: left; white-space: nowrap; font-size: .8rem }
img { max-width: 100%; min-width: 30rem }
.title { font-size: 1.5rem; font-weight: bold }
.manual { white-space: pre-wrap; font-size: .8rem }
"""


def save(folder, title, parts, tables, style=STYLE):
    """Write the tables, and report.html of the parts: (class, a text, table or figure)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    page = ['<!DOCTYPE html><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{title}</title><style>{style}</style><h1>{title}</h1>"]
    for kind, part in parts:
        if isinstance(part, Figure):
            path = folder / f"{kind}.png"
            part.savefig(path, dpi=130)
            picture = base64.b64encode(path.read_bytes()).decode()
            text = f'<img src="data:image/png;base64,{picture}">'
        elif isinstance(part, pd.DataFrame):
            text = part.to_html(index=False, border=0, na_rep="", float_format="{:.4g}".format)
        else:
            text = html.escape(part)
        page.append(f'<div class="{kind}">{text}</div>')
    (folder / "report.html").write_text("\n".join(page), encoding="utf-8")
# --- end shared ---


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FILE ...] [flags]", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")],
        help="results files (results.csv)")
    add("--slices", type=int, default=500, help="number of slices (500)")
    add("--plain", action="store_true", help="bias on the texts of test alone")
    add("--leaderboard", type=Path, metavar="FILE", help="would its entries swap?")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="only these (all)")
    add("--out", type=Path, metavar="FOLDER", help="folder of the page (meta/NAME)")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    rows = load_rows(args)
    counts = rows.groupby(RUN[:5])["subsample"].nunique()
    if counts.min() < 2:
        raise SystemExit(f"error: task {counts.idxmin()[2]} has one subsample: run more, or leave "
                         "the task out with --tasks")
    bias = rows["acc_test"] - rows["acc_extra"]
    mirrored = rows["acc_extra_on_extra"] - rows["acc_test_on_extra"]  # nan: plain arms
    rows["bias"] = 100 * (bias + mirrored.fillna(bias)) / 2
    folder = args.out or Path("meta", (args.leaderboard or args.paths[0]).stem)
    if args.leaderboard:
        parts, tables = report_board(rows, args.leaderboard)
    else:
        parts, tables = report_slices(rows, args.slices)
    parts.append(("manual", __doc__))
    save(folder, "How far can one subsample be trusted?", parts, tables)
    print(f"page: {(folder / 'report.html').resolve()}")


if __name__ == "__main__":  # in a notebook cell flags go into the list: ["--m", "50"]
    main([] if "__file__" not in globals() else None)
