# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "matplotlib==3.10.9",
# ]
# ///
"""How far can one subsample be trusted? Section 10 of the paper; and leaderboards.

Reproduces Figure 7 of "Evaluating the fairness of task-adaptive pretraining on unlabeled test data
before few-shot text classification" (Dubey): keep one subsample per model and task, as most
benchmarks do, analyse that slice, draw another.
    paper   posterior of beta (log odds): right_ijl ~ Binomial(n, p), logit p = mu + alpha_i + U_j
            + beta l for model i, task j, arm l (1: treatment), on the texts of `test`
    t       t interval over tasks of the effect (models: averaged), in points, crossed where it can
In shuffled slices the arms of each model and task change places at random: nothing is to be found.

Commands, cheapest first
    python meta_analysis.py results.csv --slices 20
    python meta_analysis.py results.csv --m 50 --n 500 --effects boost bias
    python meta_analysis.py results.csv --n 500 --leaderboard board.csv   # columns name, score

Reads what fit_model.py reads. Writes to meta/results/ (the first file's name), of a leaderboard to
meta/results.board/: report.html, and tables with the columns
    meta.csv         experiment, m, n, effect, arms (crossed, plain), model (all: all together),
                     kind (drawn, shuffled), slice, paper_mean, paper_low, paper_high (log odds),
                     t_mean, t_low, t_high (points); 89 % intervals
    shares.csv       of slices: threshold, outside (paper_mean beyond it), paper, t (exclude 0)
    leaderboard.csv  rank, name, score, gap (points to the next), p_wrong (their order is wrong),
                     p_swap_1, p_swap_5, p_swap_20 (they swap in a rerun with so many training sets
                     a task), and whose noise: experiment, m, n, model

Measured 2026-11-23: 500 slices and 500 shuffled ones of 25 tasks and 2 models take 3 s.
"""

import argparse
import base64
import html
import io
import itertools
import math
import shlex
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import color_sequences
from matplotlib.figure import Figure
from scipy import special, stats

KINDS = ("drawn", "shuffled")


# Slices --------------------


def draw_slices(rows, effect, slices, shuffled):
    """Slices of one run per model and task: right answers on test [slices, 2 arms, models, tasks],
    effects in points [slices, models, tasks], n [models, tasks], 0: none."""
    rng = np.random.default_rng(0)
    models = sorted(set(rows["model"]))
    tasks = sorted(set(rows["task"]))
    arms = [f"acc_{arm}" for arm in EFFECTS[effect]]
    total = np.zeros((len(models), len(tasks)), int)
    counts = np.zeros((slices, 2, *total.shape))
    effects = np.zeros((slices, *total.shape))
    for (model, task), runs in rows.groupby(["model", "task"]):
        i, j = models.index(model), tasks.index(task)
        drawn = runs.iloc[rng.integers(len(runs), size=slices)]
        total[i, j] = runs["n"].iloc[0]
        counts[:, :, i, j] = (drawn[arms] * total[i, j]).round()
        effects[:, i, j] = drawn[effect]
    if shuffled:
        swap = rng.random(effects.shape) < 0.5
        counts = np.where(swap[:, None], counts[:, ::-1], counts)
        effects = np.where(swap, -effects, effects)
    return counts, effects, total


def slice_posterior(counts, total):
    """(mean, sd) of beta [slices], one task: without U. The mode of the log posterior given sd_U by
    Newton's method, and the inverse curvature there; sd_U at its own mode by EM: the root of
    sd^4 + J sd^2 = sum E U_j^2 (HalfNormal(1) prior). `g`: mu, beta, alpha; each U_j meets only
    these, so it is eliminated first."""
    slices, _, models, tasks = counts.shape
    arm, model = (axis.ravel() for axis in np.indices((2, models)))
    Z = np.column_stack([np.ones(2 * models), arm, model[:, None] == np.arange(1, models)])
    prior = np.array([1, 1, *[1 / 25] * (models - 1)])  # precisions; alpha ~ N(0, 5)
    y = counts.reshape(slices, 2 * models, tasks)
    n = np.tile(total, (2, 1))
    g = np.zeros((slices, len(prior)))
    U = np.zeros((slices, tasks))
    precision = np.full((slices, 1), 1.0 if tasks > 1 else 1e12)  # of U
    for _ in range(200):  # ten will do, but for EM where tasks hardly differ
        p = special.expit((g @ Z.T)[:, :, None] + U[:, None])
        weight = n * p * (1 - p)
        slope_g = (y - n * p).sum(2) @ Z - prior * g
        slope_U = (y - n * p).sum(1) - precision * U

        # The Hessian is [[head, border], [border.T, diag(shaft)]]
        head = (Z.T * weight.sum(2)[:, None]) @ Z + np.diag(prior)
        border = Z.T @ weight
        shaft = weight.sum(1) + precision
        ratio = border / shaft[:, None]
        covariance = np.linalg.inv(head - ratio @ border.mT)  # of g
        step_g = (covariance @ (slope_g[..., None] - ratio @ slope_U[..., None]))[..., 0]
        step_U = slope_U / shaft - (step_g[:, None] @ ratio)[:, 0]
        g += step_g
        U += step_U
        if max(np.abs(step_g).max(), np.abs(step_U).max()) < 1e-7:
            break
        if tasks > 1:
            variance_U = 1 / shaft + (ratio * (covariance @ ratio)).sum(1)
            square = (U**2 + variance_U).sum(1, keepdims=True)
            variance = (np.sqrt(tasks**2 + 4 * square) - tasks) / 2
            precision = 1 / np.maximum(variance, 1e-4)
    return g[:, 1], np.sqrt(covariance[:, 1, 1])


def slice_table(counts, effects, total):
    """A row per slice: the paper's posterior of beta and the t interval over tasks."""
    own = total.all(axis=0)  # a model may lack tasks
    mean, sd = slice_posterior(counts[..., own], total[:, own])
    D = pd.DataFrame(effects[..., own].mean(1))  # slices, tasks
    half = stats.t.ppf(UPPER, D.shape[1] - 1) * D.sem(axis=1)  # nan of one task
    table = pd.DataFrame({"slice": range(1, len(D) + 1)})
    ways = {"paper": (mean, stats.norm.ppf(UPPER) * sd), "t": (D.mean(axis=1), half)}
    for way, (middle, reach) in ways.items():
        table[f"{way}_mean"] = middle
        table[f"{way}_low"] = middle - reach
        table[f"{way}_high"] = middle + reach
    return table


def analyse(rows, effect, slices):
    """Rows of meta.csv of a cell: of each model, and of all where they have the same tasks."""
    groups = {model: [i] for i, model in enumerate(sorted(set(rows["model"])))}
    tables = []
    for kind in KINDS:
        counts, effects, total = draw_slices(rows, effect, slices, kind == "shuffled")
        if len(total) > 1 and total.all():
            groups["all"] = list(range(len(total)))
        for model, i in groups.items():
            table = slice_table(counts[:, :, i], effects[:, i], total[i])
            names = dict(rows[CELL].iloc[0], effect=effect, arms=rows["arms"].iloc[0], model=model,
                         kind=kind)
            tables.append(table.assign(**names)[[*names, *table]])
    return pd.concat(tables)


def shares_of(meta):
    """shares.csv."""
    zero_shot = meta["experiment"].str.contains("zero.shot")
    meta = meta.assign(threshold=np.where(zero_shot, 0.08, 0.04))  # section 10
    meta["outside"] = meta["paper_mean"].abs() > meta["threshold"]
    meta["paper"] = meta["paper_low"] * meta["paper_high"] > 0
    t = meta["t_low"] * meta["t_high"] > 0
    meta["t"] = t.where(meta["t_low"].notna()).astype(float)  # of one task there is none
    names = [*CELL, "effect", "arms", "model", "kind", "threshold"]
    return meta.groupby(names)[["outside", "paper", "t"]].mean().reset_index()


def answer_of(shares, effect):
    """What one subsample would have claimed, least to most of settings and models."""
    found = []
    for kind in KINDS:
        mine = shares[(shares["effect"] == effect) & (shares["kind"] == kind)]
        ends = (100 * mine["paper"]).agg(["min", "max"]).round().unique()
        found.append(" to ".join(f"{end:.0f}" for end in ends))
    drawn, shuffled = found
    return (f"With one subsample of each task, the paper's model would have claimed a {effect} in "
            f"{drawn} % of the draws (by setting and model). Where there is none, since seen and "
            f"unseen are exchanged by lot, it claims one in {shuffled} %; an honest interval would "
            "in 11 %.")


def draw_distributions(meta, shares, effect):
    """PNG of Figure 7, a panel per cell: distributions over slices of the paper's estimates."""
    cells = shares[shares["effect"] == effect].groupby(CELL)["threshold"].first()
    figure = Figure(figsize=(8, 1.4 + 2 * len(cells)), layout="constrained")
    title = f"The {effect} in single subsamples: share of draws at or below"
    axes = figure.subplots(len(cells), 1, squeeze=False, sharex=True)[:, 0]
    models = list(shares["model"].unique())
    groups, legend = meta.groupby([*CELL, "effect"]), {}
    for axis, (cell, threshold) in zip(axes, cells.items()):
        for (model, kind), slices in groups.get_group((*cell, effect)).groupby(["model", "kind"]):
            style = "-" if kind == "drawn" else "--"
            colour = color_sequences["petroff10"][models.index(model) % 10]
            axis.ecdf(slices["paper_mean"], color=colour, ls=style, label=f"{model} {kind}")
        axis.axvspan(-threshold, threshold, color="grey", alpha=0.2, lw=0)
        axis.set_title(f"{title_of(*cell)}; grey: within ±{threshold:g}", fontsize=9)
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles))  # a panel may lack models
    axis.set_xlabel("mean of beta in the paper's model (log odds)")
    figure.legend(legend.values(), legend.keys(), loc="outside upper center",
                  ncols=len(models), frameon=False, title=title)
    return png_of(figure)


# A leaderboard --------------------


def read_board(path):
    """Table with name and score (points), best first."""
    board = read_rows(path, ["name", "score"])
    scores = pd.to_numeric(board["score"], errors="coerce")
    refuse(board, scores.isna(), "score", "a number")
    board["score"] = 100 * scores if scores.max() <= 1 else scores
    return board.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def noise_of(rows):
    """The variance of a model's mean acc_extra over tasks, one subsample of each, in points^2."""
    one = rows.drop_duplicates(RUN[:-1])  # one seed of each subsample
    variances = (100 * one["acc_extra"]).groupby(one["task"]).var()
    if variances.isna().any():
        raise SystemExit(f"error: one subsample of {variances.isna().idxmax()} cannot show how "
                         "runs differ: run more, or choose others by --tasks")
    rounding = (100 / rows["n"].iloc[0]) ** 2 / 12
    return variances.clip(lower=rounding).sum() / len(variances) ** 2


def board_table(board, v):
    """leaderboard.csv with noise of variance v in every score x. Of Normal true scores a gap, given
    the gap seen, is Normal(B gap, 2 B v), B = 1 - v / var(x). A rerun of R training sets a task
    adds 2 v / R."""
    scores = board["score"].to_numpy()
    B = max(1 - v / max(scores.var(ddof=1), 1e-9), 1e-9)  # above 0: it divides
    gap = board["score"].diff(-1)
    table = board[["name", "score"]].assign(gap=gap)
    table.insert(0, "rank", range(1, len(board) + 1))
    table["p_wrong"] = stats.norm.sf(gap * math.sqrt(B / (2 * v)))
    for R in (1, 5, 20):
        table[f"p_swap_{R}"] = stats.norm.sf(B * gap / math.sqrt(2 * v * (B + 1 / R)))
    return table


# The page --------------------


def report_slices(rows, args):
    """(tables, figures, the page's parts) of all slices."""
    if rows.groupby(RUN[:5])["subsample"].nunique().max() < 2:
        raise SystemExit("error: one subsample per model and task: all slices are the same")
    tables = []
    for effect, (_, mine) in itertools.product(args.effects, rows.groupby(CELL)):
        tables.append(analyse(mine, effect, args.slices))
    meta = pd.concat(tables)
    shares = shares_of(meta)
    parts, figures = [], {}
    for effect in args.effects:
        answer = answer_of(shares, effect)
        print(answer)
        figures[effect] = draw_distributions(meta, shares, effect)
        parts += [paragraph(answer, "large"), figure_html(figures[effect])]
    parts.append(paragraph("outside: posterior mean beyond the threshold; paper, t: 89 % interval "
                           "excludes 0. Shuffled: arms change places at random."))
    parts.append(table_html(shares, float_format="{:.3f}".format))
    return {"meta": meta, "shares": shares}, figures, parts


def report_board(rows, board):
    """(tables, figures, the page's parts) of the board with each model's noise in each cell."""
    parts = []
    tables = []
    for (*cell, model), mine in rows.groupby([*CELL, "model"]):
        v = noise_of(mine)
        table = board_table(board, v)
        tables.append(table.assign(**dict(zip(CELL, cell)), model=model))
        doubtful = (table["p_wrong"] > 1 - SHARE).sum()
        answer = (f"Neighbours in the wrong order with a chance above 11 %: {doubtful} of "
                  f"{len(board) - 1} (noise of {model}, {title_of(*cell)}).")
        print(answer)
        sd = math.sqrt(v)
        words = (f"Noise: {sd:.2f} points, the standard deviation of the mean accuracy over tasks: "
                 "an upper bound, since entries share their test texts. gap: points to the next; "
                 "p_wrong: their order is wrong; p_swap: they swap in a rerun with so many "
                 "training sets a task.")
        parts += [paragraph(answer, "large"), paragraph(words),
                  table_html(table, float_format="{:.3f}".format)]
    return {"leaderboard": pd.concat(tables)}, {}, parts


# The same in fit_model.py: reading, effects, page --------------------

# --- shared: reading ---
ARMS = ("base", "extra", "test")
CELL = ["experiment", "m", "n"]
RUN = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # names a row
WORDS = [*RUN[:3], "seconds", "split", "data", "recipe", "versions"]
WHOLE = {"m": 1, "n": 1, "subsample": 1, "seed": 0}  # whole numbers, the least
SAME = [  # (scope, column): rows that agree in the scope must agree in the column
    (RUN[:5], "recipe"),
    (["experiment", "task"], "data"),
    (["experiment", "data"], "task"),
    (["experiment", "task", "m", "n", "subsample"], "split"),
]


def columns_of(metric):
    """The metric's columns: of the arms on the texts of `test`, then of `extra`."""
    names = [f"{metric}_{arm}" for arm in ARMS]
    return names + [f"{name}_on_extra" for name in names]


def read_rows(path, needed):
    """A CSV file as a table of words with a column `where`, without lines cut short by a kill."""
    try:
        table = pd.read_csv(path, header=None, dtype=str, keep_default_na=False,
                            encoding="utf-8-sig", engine="python")  # fields cut off are nan
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {path} cannot be read as a CSV file in UTF-8: {error}")
    header = [*table.iloc[0]]
    for name in (*needed, *header):
        if header.count(name) != 1:
            raise SystemExit(f"error: {path} has {header.count(name)} columns {name!r}, not one; "
                             f"separated by commas: {', '.join(header)}")
    table = table[(table > "").any(axis=1)].set_axis(header, axis=1)[1:]
    table["where"] = [f"{path}, data row {number}" for number in range(1, len(table) + 1)]
    torn = table.isna().any(axis=1)
    for where in table["where"][torn]:
        print(f"{where}: left out, for it was cut short")
    return table[~torn]


def read_path(path, needed):
    """Tables of a results file, or of those of a folder."""
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("results.csv"), *path.glob("results.*-of-*.csv")])
    if not files:
        raise SystemExit(f"error: {path} holds no results.csv")
    return [read_rows(file, needed) for file in files]


def refuse(rows, bad, name, what):
    """End at the first of the bad rows; what: how the column should be."""
    if bad.any():
        row = rows[bad].iloc[0]
        raise SystemExit(f"error: {row['where']}: {name} is {row[name]}, not {what}: correct it")


def read_results(paths, metric):
    """All rows of the paths: what is empty is nan, accuracies are k / n exactly."""
    needed = [*RUN[:-1], "majority", *columns_of("acc")[:3], *columns_of(metric)[:3]]
    tables = []
    for path in paths:
        tables += read_path(path, needed)
    rows = pd.concat(tables, ignore_index=True)
    numbers = [*WHOLE, "majority", "num_classes", "discordant", "discordant_on_extra"]
    numbers += [*columns_of("acc"), *columns_of("f1"), *columns_of(metric)]
    rows = rows.reindex(columns=dict.fromkeys([*rows, *numbers, *WORDS])).replace("", np.nan)
    rows["seed"] = rows["seed"].astype(object).fillna(0)
    for name in WORDS[:3]:
        refuse(rows, rows[name].isna(), name, "a name")
    for name in numbers:
        values = pd.to_numeric(rows[name], errors="coerce")
        bad = ~np.isfinite(values) & (rows[name].notna() | (name in needed))
        what = "a number"
        if name in WHOLE:
            what = f"a whole number from {WHOLE[name]}"
            bad |= (values < WHOLE[name]) | (values % 1 != 0)
        elif name.startswith(("majority", "acc_", "f1_", "discordant")):
            what = "a number from 0 to 1"
            bad |= (values < 0) | (values > 1)
        refuse(rows, bad, name, what)
        rows[name] = values.astype(int if name in WHOLE else float)
    for name in columns_of("acc"):
        exact = (rows[name] * rows["n"]).round() / rows["n"]
        off = (rows[name] - exact).abs() > 5.1e-5  # accuracies of four decimals will do
        refuse(rows, off, name, "a whole number of right answers over n")
        rows[name] = exact
    return rows


def choose_rows(rows, args):
    """The rows that the flags name."""
    for flag in ("experiment", "m", "n", "models", "tasks"):
        name = flag.removesuffix("s")
        found = set(rows[name])
        wanted = set(getattr(args, flag) or found)
        if not wanted <= found:
            raise SystemExit(f"error: --{flag}: no rows of {wanted - found}, only of {found}")
        rows = rows[rows[name].isin(wanted)]
    return rows


def refuse_conflict(rows, scope, name):
    """End where two rows agree in the scope and differ in a column that both have."""
    known = rows.dropna(subset=[*scope, name]).drop_duplicates([*scope, name])
    known = known[known.duplicated(scope, keep=False)].sort_values(scope, kind="stable")
    if len(known):
        first, second = known["where"].iloc[:2]
        values = " and ".join(map(str, known[name].iloc[:2]))
        raise SystemExit(f"error: {first} and {second} agree in {', '.join(scope)} and differ in "
                         f"{name} ({values}): keep one")


def load_rows(args, metric="acc"):
    """The chosen rows, each run once, with the column `arms`: "crossed" where all rows of a cell
    have the metric on the texts of `extra` too, and no --plain."""
    rows = choose_rows(read_results(args.paths, metric), args)
    if rows.empty:
        raise SystemExit(f"error: {args.paths[0]} has no rows: run run_experiment.py first")
    numbers = [(RUN, name) for name in rows.select_dtypes("number")]
    for scope, name in [*numbers, *SAME]:
        refuse_conflict(rows, scope, name)
    twice = rows.duplicated(RUN).sum()
    if twice:
        print(f"rows given more than once and used once: {twice}")
    rows = rows.groupby(RUN, as_index=False).first()  # the first value that a column has

    there = rows[columns_of(metric)].notna().all(axis=1)
    cells = there.groupby([rows[name] for name in CELL])
    rows["arms"] = np.where(cells.transform("all") & (not args.plain), "crossed", "plain")
    for cell, known in cells:
        if known.any() and not known.all():
            print(f"{title_of(*cell)}: some rows lack {metric}_*_on_extra: none are used")
    return rows


def title_of(experiment, m, n):
    """A cell in words."""
    return f"{experiment}, m = {m}, n = {n}"
# --- end shared ---


# --- shared: effects ---
SHARE = 0.89  # of every interval: the paper's
UPPER = (1 + SHARE) / 2  # its upper end, as a quantile
EFFECTS = {"boost": ("base", "extra"), "bias": ("extra", "test")}  # control, treatment: plain arms
SHARES = ("acc", "f1")  # metrics whose differences are told in points, hundredths
TEXTS_DF = 5  # degrees of freedom that the noise of the texts, known from every row, is worth


def add_effects(rows, metric="acc"):
    """The rows with base, unseen, seen (of the metric; crossed: means over both sets of texts),
    boost, bias (points, or the metric's own unit) and variances in points^2: floor, of rounding to
    whole answers; w, of a crossed bias in accuracy by the noise of its texts, a difference between
    random halves of 2n; counted: whether w is known, or the least that the accuracies allow."""
    rows = rows.copy()
    crossed = rows["arms"] == "crossed"
    n = rows["n"]
    scale = 100 if metric in SHARES else 1
    places = {"base": ("base", "base"), "unseen": ("extra", "test"), "seen": ("test", "extra")}
    for name, (arm, mirrored) in places.items():
        on_test = rows[f"{metric}_{arm}"]
        both = (on_test + rows[f"{metric}_{mirrored}_on_extra"]) / 2
        rows[name] = both.where(crossed, on_test)
    rows["boost"] = scale * (rows["unseen"] - rows["base"])
    rows["bias"] = scale * (rows["seen"] - rows["unseen"])
    rows["floor"] = (100 / (n * (1 + crossed))) ** 2 / 12 * (metric in SHARES)

    noise = 0
    for ending, (one, other) in {"": ("extra", "test"), "_on_extra": ("test", "extra")}.items():
        change = rows[f"acc_{other}{ending}"] - rows[f"acc_{one}{ending}"]
        noise = noise + rows[f"discordant{ending}"].fillna(change.abs()) - change**2
    known = crossed & (metric == "acc")
    rows["w"] = np.maximum(100**2 / (4 * n) * noise, rows["floor"]).where(known)
    lacking = rows[["discordant", "discordant_on_extra"]].isna().any(axis=1)
    rows["counted"] = known & ~lacking
    return rows


def pool_noise(tasks):
    """(variance of a crossed accuracy bias of one subsample of each task, points^2; degrees of
    freedom). tasks: a row a task of n, subsamples, w (their mean), sd (of their biases, nan of
    one). The noise of the texts, with one imaginary discordant text a set and task, plus what
    effects that differ from run to run add, which all tasks know together."""
    K, n = tasks["subsamples"], tasks["n"]
    w = tasks["w"] + 100**2 * 2 / (4 * n**2 * K)
    excess = (K - 1) * (tasks["sd"].fillna(0) ** 2 - w)
    between = max(0, excess.sum() / max(1, (K - 1).sum()))
    return w + between, K.sum() - len(K) + TEXTS_DF


def bias_interval(tasks):
    """(standard error, degrees of freedom, half-width) of the 89 % interval of the mean over tasks
    of their crossed accuracy biases, in points, by Student's t. tasks: as pool_noise takes them."""
    variance, df = pool_noise(tasks)
    se = math.sqrt((variance / tasks["subsamples"]).sum()) / len(tasks)
    return se, df, stats.t.ppf(UPPER, df) * se
# --- end shared ---


# --- shared: page ---
STYLE = """
.report { max-width: 70rem; margin: auto; font: 16px/1.5 sans-serif; overflow-wrap: break-word;
  .card { border: 1px solid; border-left-width: .6rem; padding: .5rem 1rem; margin: 1rem 0;
    b { font-size: 2.2rem } p { color: black; margin: .4rem 0 } }
  td b { font-size: 1.4rem }
  .no { color: #006b4f } .yes { color: #b3261e } .near, .too { color: #8a5a00 }
  .warning { border-left: .3rem solid #8a5a00; padding-left: .8rem }
  .small { font-size: .85rem } .large { font-size: 1.3rem }
  table { font-size: .85rem; border-collapse: collapse }
  td, th { padding: .15rem .8rem .15rem 0; text-align: left }
  .scroll { overflow-x: auto }
  img { max-width: 100%; min-width: 30rem }
  @media print { .scroll { overflow: visible } img { min-width: 0 } table { font-size: .6rem } }
}
"""


def paragraph(text, kind=""):
    """HTML of a paragraph, if there is a text; kind: warning, small."""
    return f'<p class="{kind}">{html.escape(text)}</p>' if text else ""


def table_html(table, **formats):
    """HTML of a table; formats: those of pandas."""
    text = table.to_html(index=False, border=0, justify="left", na_rep="", **formats)
    return f'<div class="scroll">{text}</div>'


def png_of(figure):
    """The bytes of its file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def figure_html(png):
    """HTML of a figure as a part of the page."""
    picture = base64.b64encode(png).decode()
    return f'<div class="scroll"><img src="data:image/png;base64,{picture}"></div>'


def name_of(paths):
    """Of the folder of results of these files."""
    name = paths[0].resolve().stem
    return name if len(paths) == 1 else f"{name}-and-{len(paths) - 1}-more"


def save(folder, tables, figures, title, parts):
    """Write tables, figures and report.html of these parts, beside the old ones, which are replaced
    when all is written."""
    page = "\n".join([
        '<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{title}</title><style>{STYLE}</style>",
        f'<div class="report"><h1>{title}</h1>', *parts, "</div>"])
    files = {"report.html": page.encode()}
    for name, table in tables.items():
        files[f"{name}.csv"] = table.to_csv(index=False, float_format="%.6g").encode()
    for name, png in figures.items():
        files[f"{name}.png"] = png
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.new").write_bytes(content)
    for name in files:
        (folder / f"{name}.new").replace(folder / name)
    for path in [*folder.glob("posterior.csv"), *folder.glob("setting-*.png")]:
        if path.name not in files:
            path.unlink()  # of an earlier run
# --- end shared ---


# Flags --------------------


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FILE or FOLDER ...] [flags]", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], metavar="FILE or FOLDER",
        help="(results.csv)")
    add("--slices", type=int, default=500, help="and as many shuffled ones (500)")
    add("--effects", nargs="+", choices=list(EFFECTS), default=["bias"], help="(bias)")
    add("--plain", action="store_true", help="only the texts of test, as in the paper")
    add("--leaderboard", type=Path, metavar="FILE",
        help="instead: is the order of its entries right, would they swap?")
    kinds = {"experiment": str, "m": int, "n": int, "models": str, "tasks": str}
    for flag, kind in kinds.items():
        add(f"--{flag}", nargs="+", type=kind, help="only these (all)")
    add("--out", type=Path, metavar="FOLDER", help="(meta/ and the first file's name)")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    name = name_of(args.paths)
    try:
        rows = add_effects(load_rows(args))
        if args.leaderboard:
            title = "Would the leaderboard keep its order?"
            name = f"{name}.{args.leaderboard.stem}"
            tables, figures, parts = report_board(rows, read_board(args.leaderboard))
        else:
            title = "How far can one subsample be trusted?"
            tables, figures, parts = report_slices(rows, args)
    except KeyboardInterrupt:
        raise SystemExit("stopped: nothing was written")
    flags = shlex.join(sys.argv[1:] if argv is None else argv)
    parts.append(paragraph(f"python meta_analysis.py {flags}", "small"))
    folder = args.out or Path("meta", name)
    save(folder, tables, figures, title, parts)
    print(f"in {folder.resolve()}: report.html, tables, figures")


if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    main([] if "__file__" not in globals() else None)
