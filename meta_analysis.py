# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "matplotlib==3.10.9"]
# ///
"""How far can one subsample be trusted? Section 10 of the paper; and leaderboards.

Figure 7 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data before
few-shot text classification" (Dubey): keep one subsample per model and task, look for a bias in
that slice, draw another. In shuffled slices its arms change places by lot, so there is none.
    paper   posterior of beta (log odds): right_ijl ~ Binomial(n, p), logit p = mu + alpha_i + U_j
            + beta l for model i, task j, arm l (0: extra, 1: test), on the texts of `test`
    t       t interval over tasks of the bias (models: averaged), in points

    python meta_analysis.py results.csv --models bert --slices 20
    python meta_analysis.py results.csv --leaderboard board.csv   # columns name, score

Writes to meta/results/ report.html, slices.png and tables with the columns
    meta.csv: experiment, m, n, arms, kind (drawn, shuffled), slice, paper_mean, paper_low,
        paper_high, t_mean, t_low, t_high
    shares.csv: of slices: threshold, outside (paper_mean beyond it), paper, t (exclude 0)
    leaderboard.csv: by the noise of experiment, m, n, model: rank, name, score, gap (to the next),
        p_wrong (their order is wrong), p_swap_1, p_swap_5, p_swap_20 (they swap in a rerun of so
        many training sets)
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


def slice_table(rows, slices):
    """Rows of meta.csv of a cell: slices of one run of each pair of a model and a task."""
    rng = np.random.default_rng(0)
    n = rows.n.iloc[0]
    pairs = rows.groupby(["model", "task"])
    drawn = []
    for _, runs in pairs:
        one = runs.iloc[rng.integers(len(runs), size=slices)]
        drawn.append([(n * one.acc_extra).round(), (n * one.acc_test).round(), one.bias])
    control, treatment, bias = np.moveaxis(drawn, 0, 2)  # each [slices, pairs]
    swap = rng.random(bias.shape) < 0.5
    first = np.vstack([control, np.where(swap, treatment, control)])
    second = np.vstack([treatment, np.where(swap, control, treatment)])
    bias = np.vstack([bias, np.where(swap, -bias, bias)])

    models, tasks = zip(*pairs.groups)
    alpha = pd.get_dummies(models).to_numpy(float)[:, 1:]
    U = pd.get_dummies(tasks).to_numpy(float)
    mean, sd = slice_posterior(np.hstack([first, second]), n, alpha, U)
    reach = stats.norm.ppf(UPPER) * sd
    D = pd.DataFrame(bias @ (U / U.sum(axis=0)))  # slices, tasks
    t = D.mean(axis=1)
    half = stats.t.ppf(UPPER, D.shape[1] - 1) * D.sem(axis=1)
    return pd.DataFrame({
        "kind": np.repeat(["drawn", "shuffled"], slices), "slice": D.index % slices + 1,
        "paper_mean": mean, "paper_low": mean - reach, "paper_high": mean + reach,
        "t_mean": t, "t_low": t - half, "t_high": t + half})


def slice_posterior(right, n, alpha, U):
    """(mean, sd) of beta in each slice: the mode of the log posterior by Newton's method, and the
    inverse curvature; sd_U at its own mode by EM, the root of sd^4 + J sd^2 = sum E U_j^2. right:
    answers [slices, 2 * pairs], of both arms."""
    J = U.shape[1]
    arm = np.repeat([0, 1], len(U))
    X = np.column_stack([arm**0, arm, np.tile(alpha, (2, 1)), np.tile(U, (2, 1))])
    theta = np.zeros((len(right), X.shape[1]))  # mu, beta, alpha, U
    precision = np.ones_like(theta)  # of the priors
    precision[:, 2:-J] = 1 / 25
    for _ in range(200):  # ten mostly do
        p = special.expit(theta @ X.T)
        slope = (right - n * p) @ X - precision * theta
        curvature = (X.T * (n * p * (1 - p))[:, None]) @ X
        covariance = np.linalg.inv(curvature + precision[:, None] * np.eye(X.shape[1]))
        step = (covariance @ slope[:, :, None])[:, :, 0]
        theta += step
        if np.abs(step).max() < 1e-7:
            break
        squares = theta**2 + np.diagonal(covariance, axis1=1, axis2=2)
        square = squares[:, -J:].sum(axis=1, keepdims=True)
        variance = (np.sqrt(J**2 + 4 * square) - J) / 2
        precision[:, -J:] = 1 / np.maximum(variance, 1e-4)
    return theta[:, 1], np.sqrt(covariance[:, 1, 1])


def plot(meta):
    """Figure 7, a panel per cell: distributions over slices of the paper's estimates."""
    cells = meta.groupby(CELL)
    figure = Figure((8, 2.4 * len(cells)), layout="constrained")
    axes = figure.subplots(len(cells), squeeze=False, sharex=True)[:, 0]
    for axis, (cell, slices) in zip(axes, cells):
        for kind, mine in slices.groupby("kind"):
            axis.ecdf(mine.paper_mean, label=kind)
        axis.set(title=title_of(*cell), xlabel="posterior mean of beta")
        axis.legend()
    return figure


def report_slices(rows, slices):
    """(the page's parts, tables) of slices of each cell."""
    if rows.subsample.nunique() < 2:
        raise SystemExit("error: of one subsample all slices are the same")
    names = [*CELL, "arms"]
    tables = {cell: slice_table(mine, slices) for cell, mine in rows.groupby(names)}
    meta = pd.concat(tables, names=names).reset_index(names)
    zero_shot = meta.experiment.str.contains("zero.shot")
    threshold = np.where(zero_shot, 0.08, 0.04)  # section 10
    found = meta.assign(
        threshold=threshold, outside=meta.paper_mean.abs() > threshold,
        paper=meta.paper_low * meta.paper_high > 0, t=meta.t_low * meta.t_high > 0)
    shares = found.groupby([*names, "kind", "threshold"])[["outside", "paper", "t"]].mean()
    drawn, shuffled = 100 * shares.groupby("kind")["paper"].mean()
    answer = ("With one subsample of each task, the paper's model would have claimed a bias in "
              f"{drawn:.0f} % of the draws (mean over settings). Where there is none, since seen "
              f"and unseen are exchanged by lot, it claims one in {shuffled:.0f} %; an honest "
              "interval would in 11 %.")
    print(answer)
    tables = {"meta": meta, "shares": shares.reset_index()}
    return [("", answer), ("slices", plot(meta)), ("", tables["shares"])], tables


def report_board(rows, path):
    """(the page's parts, tables): the board with the noise of each model in each cell."""
    board = pd.read_csv(path)[["name", "score"]].sort_values("score", ascending=False)
    if board.score.max() <= 1:
        board.score *= 100
    board.insert(0, "rank", range(1, len(board) + 1))
    parts, tables, names = [], {}, [*CELL, "model"]
    for key, mine in rows.groupby(names):
        draws = mine.drop_duplicates(RUN[:-1]).groupby("task")["acc_extra"]  # of one seed
        v = 100**2 * draws.var().sum(skipna=False) / draws.ngroups**2  # noise of each score
        table = tables[key] = board_table(board, v)
        doubtful = (table.p_wrong > 1 - SHARE).sum()
        answer = (f"Neighbours in the wrong order with a chance above 11 %: {doubtful} of "
                  f"{len(board) - 1} (noise of {key[3]}, {title_of(*key[:3])}).")
        print(answer)
        parts += [("", answer), ("", table)]
    return parts, {"leaderboard": pd.concat(tables, names=names).reset_index(names)}


def board_table(board, v):
    """leaderboard.csv. Given the gap seen, that of Normal true scores is Normal(B gap, 2 B v), B =
    1 - v / var; a rerun of R training sets adds 2 v / R."""
    B = max(0, 1 - v / board.score.var())
    gap = board.score.diff(-1)
    table = board.assign(gap=gap, p_wrong=stats.norm.sf(gap * math.sqrt(B / (2 * v))))
    for R in (1, 5, 20):
        table[f"p_swap_{R}"] = stats.norm.sf(B * gap / math.sqrt(2 * v * (B + 1 / R)))
    return table


# The same in fit_model.py ---

# --- shared: reading ---
CELL = ["experiment", "m", "n"]
RUN = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # identify a row
FILTERS = ("experiment", "m", "n", "models", "tasks")


def columns_of(metric):
    """Those of the three arms on the texts of `test`, then of `extra`."""
    names = [f"{metric}_{arm}" for arm in ("base", "extra", "test")]
    return names + [f"{name}_on_extra" for name in names]


def check(rows, good, words):
    """Stop at the first row that is not good."""
    if not good.all():
        raise SystemExit(f"error: {rows.index[~good][0]}: {words}")


def read_rows(path, metric):
    """The rows of a results file; empty fields are nan."""
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, engine="python")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: could not read {path}: {error}")
    rows.index = [f"{path}, data row {number + 1}" for number in rows.index]
    torn = rows.isna().any(axis=1)  # by a kill: an empty field is "", one cut off is nan
    rows = rows[~torn].replace("", np.nan)
    needed = [*RUN[:-1], "majority", *columns_of("acc")[:3], *columns_of(metric)[:3]]
    shares = ["majority", "discordant", "discordant_on_extra", *columns_of("acc")]
    for name in [*needed, *shares, "seed", "num_classes", *columns_of("f1"), *columns_of(metric)]:
        rows[name] = rows.get(name, np.nan)
        if name not in RUN[:3]:
            rows[name] = pd.to_numeric(rows[name], errors="coerce")
        if name in needed:
            check(rows, rows[name].notna(), f"the column {name} is missing, empty or no number")
    for name in shares:
        check(rows, rows[name].fillna(0).between(0, 1), f"{name} is not between 0 and 1")
    rows[RUN[3:]] = rows[RUN[3:]].fillna(0).astype(int)
    return rows


def load_rows(args, metric="acc"):
    """The rows that the flags choose. arms: crossed if all rows of a cell have the metric on
    `extra`; otherwise, or with --plain, plain, and *_on_extra is nan."""
    rows = pd.concat([read_rows(path, metric) for path in args.paths])
    for flag in FILTERS:
        values = rows[flag.removesuffix("s")].astype(str)
        wanted = set(getattr(args, flag) or values)
        if not wanted <= set(values):
            found = ", ".join(sorted(set(values)))[:150]
            wanted = ", ".join(wanted)
            raise SystemExit(f"error: no rows with --{flag} {wanted}. There are: {found}")
        rows = rows[values.isin(wanted)]
    if rows.empty:
        raise SystemExit(f"error: {args.paths[0]} has no rows: run run_experiment.py first")
    scopes = dict.fromkeys(rows.select_dtypes("number"), RUN)
    scopes |= {"recipe": RUN[:5], "data": ["experiment", "task"]}
    for name, scope in scopes.items():
        if name in rows:
            values = rows.groupby(scope)[name].transform("nunique")
            check(rows, values < 2, f"another row has the same {', '.join(scope)} but not {name}")
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


# --- shared: effects ---
SHARE = 0.89  # of every interval: the paper's
SHARES = ("acc", "f1")  # metrics whose differences are told in percentage points


def add_effects(rows, metric="acc"):
    """The rows with base, unseen, seen (of the metric; crossed: means over both sets of texts),
    boost, bias (points, or the metric's own unit) and the variance that their measurement alone
    gives one subsample: w_boost, w_bias (DESIGN.md 7). w_bias of a crossed accuracy is that of a
    difference between random halves of 2n texts, nan without `discordant`, and one_answer / K is
    added for K subsamples: one imaginary answer that changed in each set. Elsewhere it is that of
    rounding to whole answers."""
    crossed, n = rows["arms"] == "crossed", rows["n"]
    scale = 100 if metric in SHARES else 1
    found = {}
    places = {"base": ("base", "base"), "unseen": ("extra", "test"), "seen": ("test", "extra")}
    for name, (arm, mirrored) in places.items():
        on_test = rows[f"{metric}_{arm}"]
        both = (on_test + rows[f"{metric}_{mirrored}_on_extra"]) / 2
        found[name] = both.where(crossed, on_test)
    found["boost"] = scale * (found["unseen"] - found["base"])
    found["bias"] = scale * (found["seen"] - found["unseen"])
    found["w_boost"] = found["w_bias"] = (scale / n) ** 2 / 12
    found["one_answer"] = 0.0
    if metric == "acc":
        noise = 0
        for ending in ("", "_on_extra"):
            change = rows[f"acc_test{ending}"] - rows[f"acc_extra{ending}"]
            noise = noise + rows[f"discordant{ending}"] - change**2
        found["w_bias"] = (100**2 / (4 * n) * noise).where(crossed, found["w_boost"])
        found["one_answer"] = (100**2 / (2 * n**2)).where(crossed, 0.0)
    return rows.assign(**found)


def task_means(rows, effect="bias"):
    """A row a task: means over its subsamples, their number, the effect's sd, and v, the variance
    of its mean: max(sd^2, w) / K. v is nan for one subsample, and where sd is 0 and w unknown."""
    names = ["n", "majority", "base", "unseen", "seen", "boost", "bias", f"w_{effect}",
             "one_answer"]
    groups = rows.groupby("task")
    tasks = groups[names].mean()
    K = groups.size()
    w = tasks[f"w_{effect}"]
    if effect == "bias":
        w = w + tasks["one_answer"] / K
    sd = groups[effect].std()
    v = np.fmax(sd**2, w) / K
    return tasks.assign(subsamples=K, sd=sd, v=v.where((K > 1) & (v > 0)))


def interval(tasks):
    """(standard error, degrees of freedom, half-width) of the 89 % interval of a mean over tasks by
    Student's t, with Satterthwaite's degrees of freedom; tasks: what task_means gives. nan where a
    task has one subsample."""
    v = tasks["v"] / len(tasks) ** 2
    se = math.sqrt(v.sum(skipna=False))
    df = v.sum() ** 2 / (v**2 / (tasks["subsamples"] - 1)).sum()
    return se, df, stats.t.ppf((1 + SHARE) / 2, df) * se
# --- end shared ---


# --- shared: page ---
STYLE = """
body { max-width: 70rem; margin: auto; padding: 0 1rem; font: 16px/1.5 sans-serif }
div { margin: .6rem 0; overflow-x: auto }
td, th { padding-right: .9rem; text-align: left; white-space: nowrap; font-size: .8rem }
img { max-width: 100%; min-width: 45rem }
.title { font-size: 1.5rem; font-weight: bold }
.warning { border-left: .3rem solid #8a5a00; padding-left: .8rem }
@media print { div { overflow: visible } td, th { white-space: normal } }
"""


def html_of(kind, part, folder):
    """A div of class `kind`: a text, table, figure (saved as KIND.png too), or list of these."""
    if isinstance(part, list):
        text = "".join(html_of(*each, folder) for each in part)
    elif isinstance(part, Figure):
        path = folder / f"{kind}.png"
        part.savefig(path, dpi=130)
        picture = base64.b64encode(path.read_bytes()).decode()
        text = f'<img src="data:image/png;base64,{picture}">'
        if hasattr(builtins, "display"):  # in a notebook
            builtins.display({"image/png": picture}, raw=True)
    elif isinstance(part, pd.DataFrame):
        text = part.to_html(index=False, border=0, na_rep="", float_format="{:.4g}".format)
    else:
        text = html.escape(part)
    return f'<div class="{kind}">{text}</div>' if text else ""


def save(folder, title, parts, tables, style=STYLE):
    """Write CSV files, and report.html of (kind, part) pairs as html_of takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    page = ['<!DOCTYPE html><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{title}</title><style>{style}</style><h1>{title}</h1>"]
    page += [html_of(kind, part, folder) for kind, part in parts]
    (folder / "report.html").write_text("\n".join(page), encoding="utf-8")
# --- end shared ---


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FILE ...] [flags]", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], help="(results.csv)")
    add("--slices", type=int, default=500, help="(500)")
    add("--plain", action="store_true", help="t on the texts of test, too")
    add("--leaderboard", type=Path, metavar="FILE", help="would entries swap?")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="only these (all)")
    add("--out", type=Path, metavar="FOLDER", help="(meta/NAME)")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    rows = add_effects(load_rows(args))
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
