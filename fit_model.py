# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "pymc==5.28.5", "nutpie==0.16.8",
#     "arviz==0.23.4", "pytensor==2.38.3", "matplotlib==3.10.9",
# ]
# ///
"""Does pretraining on unlabeled test texts inflate the score? This script answers from results.csv.

Sections 5 to 8 of the paper (Dubey 2024).

    python fit_model.py results.csv   # page and tables, 3 seconds
    python fit_model.py results.csv --paper-model   # the paper's model: minutes

Writes report.html, effects.png and tables to fits/results/, with the columns
    effects.csv: estimate, low, high (these tasks), like_low, like_high (tasks like these), verdict,
        p_alike (do tasks differ?), ... for each setting (m and n empty: their mean)
    tasks.csv: the same for each task, sd (between subsamples), v, noise (variances: by sd, by the
        draw of texts), p (one-sided sign flips of a bias), p_adjusted (Benjamini-Hochberg)
    posterior.csv: ArviZ's summary; warning (not converged)
"""

import argparse
import base64
import builtins
import contextlib
import csv
import html
import math
import os
import re
import shutil
import sys
import textwrap
import warnings
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd

if "__file__" in globals():  # a notebook's may not be installed here
    os.environ.pop("MPLBACKEND", None)

from matplotlib.figure import Figure
from scipy import special, stats

os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")  # nutpie needs no C compiler
warnings.simplefilter("ignore", FutureWarning)  # of ArviZ

NEAR = 0.55  # half-width, in margins; a run stops at 0.5
FIVE = 5  # tasks for "tasks like these", subsamples for `needed`
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # acceptance, times tuning, times draws
EFFECTS = {"bias": ("extra", "test"), "boost": ("base", "extra")}  # control, treatment on `test`
MEANS = ["majority", "base", "unseen", "seen"]
WORDS = {"acc": ("accuracy", "points"), "f1": ("macro-F1", "points"),
         "nll": ("nll (lower is better)", "nats")}
GLOSSARY = (
    "m: labeled texts. n: unlabeled texts in each set. base: score without further pretraining. "
    "unseen, seen: score on texts not seen, or seen, in pretraining. boost = unseen - base, bias = "
    "seen - unseen. subsamples: random draws of texts. majority: share of the most common class.\n"
    "In brackets: the 89% interval, a range that should hold the true value 89 times in 100 (86 to "
    "93 where a run stops by itself). It is the wider of two: Student's t, from how much "
    "subsamples (for tasks like these: tasks) differ, and Normal, from the draw of texts or "
    "rounding.")
HEAD = """<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>%s: bias</title><style>
body { max-width: 75rem; margin: auto; padding: 0 .6rem; font: 16px/1.4 sans-serif }
div { margin: .3em 0 }
td, th { padding-right: .9rem; text-align: left; white-space: nowrap; font-size: .8rem }
img { max-width: 100%% }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: .8rem }
.card { border: 2px solid #bbb; padding: 0 .6rem }
.large { font: bold 2rem sans-serif }
.warning { border-left: .3rem solid #8a5a00; padding-left: .8rem }
.small { font-size: .8rem; overflow-wrap: anywhere; white-space: pre-line }
.table { overflow-x: auto }
@media (max-width: 48rem) { .table::before { content: "scrolls sideways \\2192" } }
</style><h1>Does pretraining on test texts inflate scores?</h1>
"""


def unit_table(rows):
    """One row per cell, model, task and subsample: means over seeds; model "all": over models with
    the same settings, tasks and subsamples. main: "all" or, where there is none, each model."""
    parts = []
    for _, mine in rows.assign(main=True).groupby("experiment"):
        models = mine.groupby([*CELL, "task", "subsample"])["model"].nunique()
        if models.min() == mine.model.nunique() > 1:  # each has all tasks and subsamples
            parts.append(mine.assign(model="all"))
            mine = mine.assign(main=False)
        parts.append(mine)
    rows = pd.concat(parts)
    variances = ["w_bias", "w_boost", "one_answer"]
    rows[variances] = np.sqrt(rows[variances])  # a mean's sd is at most the mean of the sds
    groups = rows.groupby([*CELL, "arms", "model", "main", "task", "subsample"])
    units = groups[[*MEANS, *EFFECTS, *variances]].mean().round(9)  # equal effects stay equal
    units[variances] **= 2
    return units.reset_index()


def task_table(units, effect, args):
    """The rows of tasks.csv of one cell and model."""
    tasks = task_means(units, effect).reset_index().rename(columns={effect: "estimate"})
    tasks = tasks[["task", *MEANS, "subsamples", "sd", "v", "noise", "estimate"]]
    tasks = tasks.assign(effect=effect, **units[[*CELL, "model", "arms", "main"]].iloc[0])
    half = [interval(task)[2] for _, task in tasks.groupby("task")]
    tasks = tasks.assign(low=tasks.estimate - half, high=tasks.estimate + half)
    if effect == "bias" and args.metric == "acc" and tasks.model[0] != "all":
        texts = units.n * np.where(units.arms == "crossed", 2, 1)
        changes = units.bias / 100 * texts  # of right answers
        tasks["p"] = changes.groupby(units.task).agg(sign_flip_p).to_numpy()
        tasks["p_adjusted"] = stats.false_discovery_control(tasks.p)
    return tasks


def sign_flip_p(changes):
    """One-sided p-value of the sum of the changes under random signs, exact by convolution."""
    changes = changes.round().astype(int)
    share = np.ones(1)  # of choices of signs, by the sum of what gets a plus
    for size in changes.abs():
        share = (np.pad(share, (0, size)) + np.pad(share, (size, 0))) / 2
    observed = (changes.abs().sum() + changes.sum()) // 2
    return min(share[observed:].sum(), 1.0)


def together(units, effect):
    """What `interval` takes, for the mean over settings: a row per task and m. The texts of a
    subsample overlap across n: its contributions are added, then squared."""
    groups = units.groupby([*CELL, "task"])
    K = groups[effect].transform("size")
    weight = 1 / (groups.ngroups * K)  # of a subsample in the mean
    off = (units[effect] - groups[effect].transform("mean")) * np.sqrt(K / (K - 1))
    w = units[f"w_{effect}"]
    if effect == "bias":
        w = w + units.one_answer / K
    parts = units.assign(K=K, off=weight * off, w=weight**2 * w)
    sums = parts.groupby(["task", "m", "subsample"])[["off", "w"]].sum()
    sums = sums.assign(v=sums.off**2).groupby(["task", "m"]).sum()
    sums = sums[["v", "w"]] * len(sums) ** 2  # `interval` takes their mean
    K = parts.groupby(["task", "m"])["K"].min()
    v = sums.v.where((K > 1) & (np.fmax(sums.v, sums.w) > 0))
    return pd.DataFrame({"v": v, "noise": sums.w, "subsamples": K})


def effect_row(tasks, noise, args):
    """A row of effects.csv: tasks of one setting or of several. noise: what `interval` takes."""
    first, settings = tasks.iloc[0], tasks.groupby(CELL).ngroups
    m, n, setting = first.m, first.n, title_of(*first[CELL])
    if settings > 1:
        m, n, setting = "", "", f"{first.experiment}, mean of {settings} settings"
    each = tasks.groupby("task")["estimate"].mean()
    J, K, middle = len(each), tasks.subsamples.min(), each.mean()

    se, df, half = interval(noise)
    spread = each.var() / J
    p_alike = p_of_alike_tasks(spread / se**2, J, K, len(noise), df)
    reach = math.nan  # half of the interval for tasks like these
    if J >= FIVE:
        t, z = stats.t.ppf((1 + SHARE) / 2, [J - 1, math.inf])
        reach = np.fmax(t * math.sqrt(spread), z * se)

    verdict, needed = "", math.nan
    if first.effect == "bias":
        verdict = verdict_on(middle, half, J, args)
        if verdict.startswith("Too early") and args.margin and K >= FIVE:
            needed = np.ceil(K * (half / (args.margin / 2)) ** 2)
    return {
        **first[[*CELL, "effect", "model", "main"]], "m": m, "n": n, **tasks[MEANS].mean(),
        "setting": setting, "settings": settings, "tasks": J, "subsamples": K, "se": se, "df": df,
        "estimate": middle, "low": middle - half, "high": middle + half,
        "like_low": middle - reach, "like_high": middle + reach, "lowest": each.min(),
        "highest": each.max(), "p_alike": p_alike, "needed": needed, "verdict": verdict}


def p_of_alike_tasks(F, J, K, rows, df):
    """p-value of J tasks' equality by Brown and Forsythe's F with the degrees of freedom of Mehrotra
    (1997), df below; of two tasks, Welch's t test. rows: of `noise`, each of K subsamples."""
    if J == 1:
        return math.nan
    top = (J - 1) ** 2 / (1 + (J - 2) * rows * (K - 1) / df)
    return stats.f.sf(F, min(J - 1, top), min(df, 1e9))  # SciPy knows no infinite df


def verdict_on(middle, half, tasks, args):
    """What precedes the colon is printed large."""
    if math.isnan(half):
        return "Too early to tell: an interval needs two subsamples that differ"
    if not args.margin:
        return f"The interval {'excludes' if abs(middle) > half else 'includes'} 0"
    margin = f"±{args.margin:g} {args.unit}".replace("points", "percentage points")
    mean = ", on average" if tasks > 1 else ""
    if abs(middle) + half < args.margin:
        return f"No{mean}: within {margin}"
    if abs(middle) - half > args.margin:
        if (middle > 0) == (args.metric != "nll"):
            return f"Yes{mean}: beyond {margin}"
        return f"No{mean}: seen texts even score worse, beyond {margin}"
    if half <= NEAR * args.margin:
        return f"Near the margin{mean}: the interval is narrow and crosses {margin}"
    return f"Too early to tell: the interval is too wide for {margin}"


def effects_table(units, tasks, args):
    """effects.csv: the mean over settings, if they have the same tasks, then each."""
    rows = []
    for (experiment, effect, model), mine in tasks.groupby(["experiment", "effect", "model"]):
        each = [effect_row(part, part, args) for _, part in mine.groupby(CELL)]
        shared = mine.groupby("task").size().min() == len(each)
        if shared and len(each) > 1:
            used = units[(units.experiment == experiment) & (units.model == model)]
            rows.append(effect_row(mine, together(used, effect), args))
        rows += each
    return pd.DataFrame(rows)


# The page


def publish(rows, tasks, table, args):
    """Print verdicts on means over settings, else on settings. Write the files."""
    lines = side_by_side(table, args)
    each = side_by_side(tasks[tasks.main], args)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10**6
    most = lines.groupby(["experiment", "model"])["settings"].transform("max")
    cards = ""
    for _, line in lines[lines.main & (lines.settings == most)].iterrows():
        texts = notes(line, part_of(rows, line), part_of(each, line), args)
        said = [f"{line.verdict} ({line.setting}).", *[text for _, text in texts]]
        print(textwrap.fill(" ".join(said), width))
        large, _, small = line.verdict.partition(": ")
        texts = [("", line.setting), ("large", large), ("", small), *texts]
        cards += div("card", "".join([div(kind, html.escape(text)) for kind, text in texts]))

    table.to_csv(args.out / "effects.csv", **CSV)
    tasks.to_csv(args.out / "tasks.csv", **CSV)
    shown = ["bias", "boost", "subsamples", *MEANS]
    tables = {"Settings": lines[["setting", "model", "tasks", *shown]],
              "Tasks": each[[*CELL, "model", "task", *shown]]}
    files = ", ".join([path.name for path in args.paths])
    footer = [f"{date.today()}: {args.command}", f"{len(rows)} rows of {files}"]
    if "versions" in rows:
        footer += [*rows.versions.dropna().unique()]
    page = HEAD % html.escape(args.out.name) + div("cards", cards) + div("small", GLOSSARY)
    page += pictures(tasks, table, args)
    for title, part in tables.items():
        page += f"<h2>{title}</h2>" + div("table", part.to_html(index=False, border=0))
    page += div("small", html.escape("; ".join(footer)))
    path = args.out / "report.html"
    path.write_text(page, encoding="utf-8")
    print(f"page: {path.resolve()}")


def div(kind, text):
    return f'<div class="{kind}">{text}</div>\n'


def side_by_side(table, args):
    """The rows of the bias, with both effects in words."""
    table = table.assign(words=table.apply(in_words, axis=1, args=[args]))
    bias, boost = [table[table.effect == effect].reset_index(drop=True) for effect in EFFECTS]
    lines = bias.assign(bias=bias.words, boost=boost.words)
    lines["helps"] = boost.high < 0 if args.metric == "nll" else boost.low > 0
    lines[MEANS] = lines[MEANS].map(lambda mean: f"{mean:.{args.digits}f}")
    return lines


def in_words(row, args, target=""):
    """Estimate and interval, no end rounded to 0 or to the margin."""
    low, high = row[[f"{target}low", f"{target}high"]]
    digits = args.digits
    if any(round(abs(end), digits) in (0, args.margin) for end in (low, high)):
        digits += 1
    words = f"{row.estimate:+z.{digits}f}"
    if low < high:  # not nan
        words += f" [{low:+z.{digits}f}, {high:+z.{digits}f}]"
    return words


def part_of(table, line):
    """The rows of a table that a line sums up."""
    keys = [name for name in (*CELL, "model") if line[name] not in ("", "all")]
    return table[(table[keys] == line[keys]).all(axis=1)]


def notes(line, rows, tasks, args):
    """(class, sentence) pairs. rows, tasks: those that the line sums up."""
    name = args.name if line.model == "all" else f"{args.name} of {line.model}"
    mean = ""
    if line.tasks > 1:
        ends = [f"{end:+z.{args.digits}f}" for end in line[["lowest", "highest"]]]
        mean = f"; mean of {line.tasks} tasks' estimates, from {ends[0]} to {ends[1]}"
    kind = "labeled " if "answers" in line.experiment else ""
    said = [("", f"Pretraining on the {kind}test texts instead of other texts changes {name} by "
                 f"{line.bias} {args.unit} (bias, 89% interval{mean}). Pretraining on other "
                 f"texts changes it by {line.boost} (boost).")]
    if line.p_alike < 0.05:
        alone = ""
        if line.settings == 1 and line.tasks <= FIVE:
            alone = ": " + ", ".join(tasks.task + " " + tasks.bias)
        said.append(("warning", f"The tasks differ by more than chance (p = {line.p_alike:.1g})"
                                f"{alone}. Judge each alone, with --tasks."))
    if pd.notna(line.like_low):
        said.append(("", "Over all tasks like these, the mean bias is "
                         f"{in_words(line, args, 'like_')}."))
    if line.needed > 0:
        said.append(("", f"About {line.needed:.0f} subsamples of each task would narrow the "
                         f"interval to ±{args.margin / 2:g}; that may not settle it."))
    if not line.verdict.startswith("Yes"):
        if line.low < line.high and not line.helps:
            said.append(("warning", "Pretraining on other texts is not shown to help here; a "
                                    "recipe that helps may inflate more."))
        said += caveat(rows)
    return said


def caveat(rows):
    """Where models barely learned the task, by macro-F1 or else accuracy."""
    name, guess = "macro-F1", 1 / rows.num_classes
    score = rows[["f1_extra", "f1_test_on_extra"]].mean(axis=1)
    if (score - guess).isna().any():
        name, guess = "accuracy", rows.majority / 100
        score = rows[["acc_extra", "acc_test_on_extra"]].mean(axis=1)
    rows = rows.assign(above=score - guess)
    cases = rows.groupby([*CELL, "model", "task"])["above"].mean()
    weak = cases[cases < 0.05 - 1e-9]  # 5 points, but for rounding
    if weak.empty:
        return []
    tasks = weak.index.unique("task")
    which = ", ".join(tasks)
    if len(tasks) > FIVE:
        which = f"{len(tasks)} of {rows.task.nunique()} tasks"
    return [("warning", f"The models barely learned the task in {len(weak)} of {len(cases)} cases "
                        f"(model, task, m, n) from {which}: {name} on unseen texts is less than 5 "
                        "points above guessing.")]


def pictures(tasks, table, args):
    """Save effects.png. Return its HTML, also narrow."""
    path, coded = args.out / "effects.png", []
    for narrow in (True, False):  # wide last
        draw_effects(tasks, table, args, narrow).savefig(path, dpi=130)
        picture = base64.b64encode(path.read_bytes()).decode()
        coded.append(f"data:image/png;base64,{picture}")
    if hasattr(builtins, "display"):  # notebook
        builtins.display({"image/png": picture}, raw=True)
    narrow, wide = coded
    return (f'<picture><source media="(max-width: 48rem)" srcset="{narrow}">'
            f'<img alt="The effects, drawn" src="{wide}"></picture>')


def draw_effects(tasks, table, args, narrow):
    """Each setting, or each task of a single one, and the mean."""
    rows = table[table.main | (table.settings > 1)]
    if tasks.groupby(CELL).ngroups == 1:
        single = tasks[tasks.model != "all"].sort_values(["effect", "estimate"], ascending=[1, 0])
        rows = pd.concat([rows.assign(setting="mean"), single.assign(setting=single.task)])
    y, names = pd.factorize((rows.setting + ", " + rows.model).str.removesuffix(", all"))

    size, grid, width = (9.5, 1.7 + 0.27 * len(names)), (1, 3), 50
    if narrow:
        size, grid, width = (5, 4.2 + 1.2 * len(names)), (3, 1), 27
    names = [textwrap.fill(name, width) for name in names]
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(*grid, sharey=True)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    axes[0].set(title="bias = seen - unseen", xlabel=args.unit)
    axes[1].set(title="boost = unseen - base", xlabel=args.unit)
    axes[2].set(title=args.name, xlabel=args.unit.replace("points", "%"))
    for axis, effect in zip(axes, EFFECTS):
        mine = rows.assign(y=y)[rows.effect == effect]
        axis.errorbar(mine.estimate, mine.y, xerr=mine.high - mine.estimate, fmt="ko")
        axis.axvline(0, color="gray", ls="--")
    axes[0].containers[0].set_label("89% interval")
    if args.margin:
        axes[0].axvspan(-args.margin, args.margin, color="#dddddd", label="margin")
    marks = {"base": ("s", 130, "white"), "unseen": ("o", 60, "#88ccee"), "seen": ("D", 16, "red")}
    for name, (mark, area, color) in marks.items():
        axes[2].scatter(rows[name], y, area, color, marker=mark, edgecolor="k", label=name)
    if args.metric == "acc":
        axes[2].scatter(rows.majority, y, 110, "k", marker="|", label="most common class")
    figure.legend(
        title="m labeled, n unlabeled texts", loc="outside upper center", ncols=2 * grid[1])
    return figure


# The paper's model


def run_paper_model(rows, args):
    """Write posterior.csv. Print beta and the differences. Return whether all fits converged."""
    tables = {}
    for cell, mine in rows.groupby(CELL):
        for effect in EFFECTS:
            tables[*cell, effect] = fit(mine, effect, args)
            posterior = pd.concat(tables, names=[*CELL, "effect", "parameter"]).reset_index()
            posterior.to_csv(args.out / "posterior.csv", **CSV)
            print(f"the paper's model, {title_of(*cell)}, {effect}: beta (log odds), differences")
            shown = tables[*cell, effect].filter(regex="beta|diff", axis="index")
            print(shown[["mean", "hdi_5.5%", "hdi_94.5%", "r_hat", "warning"]].to_string())
    return not any(posterior.warning)


def fit(rows, effect, args):
    """The rows of posterior.csv of a cell and effect, if need be from a second, finer fit."""
    import arviz
    import nutpie

    control, treatment = EFFECTS[effect]
    rows = rows.assign(control=(rows[f"acc_{control}"] * rows.n).round(),
                       treatment=(rows[f"acc_{treatment}"] * rows.n).round(),
                       unit=rows.groupby(["task", "subsample"]).ngroup())
    ready = nutpie.compile_pymc_model(paper_model(rows, not args.no_interaction))
    for accept, longer, more in ATTEMPTS:
        trace = nutpie.sample(  # blocking would catch Ctrl-C
            ready, chains=4, tune=args.draws // 2 * longer, draws=args.draws * more, seed=0,
            target_accept=accept, progress_bar=False, blocking=False).wait()
        table = arviz.summary(predict(trace.posterior, rows), hdi_prob=SHARE, round_to="none")
        r_hat = table.r_hat.max(skipna=False)
        ess = table[["ess_bulk", "ess_tail"]].min(axis=None, skipna=False)
        divergences = int(trace.sample_stats["diverging"].sum())
        if r_hat <= MAX_R_HAT and ess >= MIN_ESS and not divergences:
            return table.assign(warning="")
    warning = f"not converged: r_hat {r_hat:.3f}, ESS {ess:.0f}, divergences: {divergences}"
    return table.assign(warning=warning)


def paper_model(rows, interaction):
    """Y_ijkl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + V_jk + W_jl + beta l for model i,
    task j, subsample k, arm l (1: treatment) on the texts of `test`: (1) to (10), but in variables
    that mix (docs/results.md): logit p = c_jk + alpha_i + (l - 1/2) d_j. A task's level a_j = mu +
    beta/2 + U_j + (W_j0 + W_j1)/2 and its effect d_j = beta + W_j1 - W_j0 are independent."""
    import pymc as pm
    import pytensor.tensor as pt

    n, control, treatment, unit_idx = rows[["n", "control", "treatment", "unit"]].to_numpy(int).T
    model_idx, models = pd.factorize(rows.model)
    task_idx, tasks = pd.factorize(rows.task)
    task_of_unit = np.zeros(unit_idx.max() + 1, int)
    task_of_unit[unit_idx] = task_idx

    # d is centered more where less of the variance of tasks' changes is binomial noise
    sums = rows.groupby("task")[["control", "treatment", "n"]].sum()
    right = sums[["control", "treatment"]] + 0.5  # none is 0
    wrong = right.rsub(sums.n + 1, axis=0)
    noise = (1 / right + 1 / wrong).sum(axis=1).mean()
    varied = np.log(right / wrong).diff(axis=1).treatment.var()
    centered = max(0, 1 - noise / max(varied, 1e-9)) ** 2

    with pm.Model(coords={"later": models[1:], "task": tasks}) as model:
        mu = pm.Normal("mu", 0, 1)
        beta = pm.Normal("beta", 0, 1)
        alpha = pt.zeros(1)
        if len(models) > 1:
            alpha = pt.concatenate([[0.0], pm.Normal("alpha", 0, 5, dims="later")])
        sd_U = pm.HalfNormal("sd_U", 1)
        sd_V = pm.HalfNormal("sd_V", 1)
        sd_W = pm.HalfNormal("sd_W", 3.5355) if interaction else 0  # 5 / sqrt(2)

        a = pm.Normal("a", mu + beta / 2, pt.sqrt(sd_U**2 + sd_W**2 / 2), dims="task")
        c = pm.Normal("c", a[task_of_unit], sd_V)

        d = beta * pt.ones(len(tasks))
        if interaction:
            s = math.sqrt(2) * sd_W
            z = pm.Normal("z", centered * beta, s**centered, dims="task")
            d = beta + s ** (1 - centered) * (z - centered * beta)
        d = pm.Deterministic("d", d, dims="task")

        level = c[unit_idx] + alpha[model_idx]
        half = d[task_idx] / 2
        pm.Binomial("control", n, logit_p=level - half, observed=control)
        pm.Binomial("treatment", n, logit_p=level + half, observed=treatment)
    return model


def predict(posterior, rows):
    """The posterior with the effects (12) and differences (11) that it predicts."""
    rng = np.random.default_rng(0)
    logs = [f"sd_{name}_log__" for name in "UVW"]
    found = posterior.drop_vars(["a", "c", "z", *logs], errors="ignore")
    effects = {}
    for (model, task), runs in rows.groupby(["model", "task"]):
        level = posterior.c.values[:, :, runs.unit]  # [chain, draw, run]
        if model in posterior.get("later", ()):
            level = level + posterior.alpha.sel(later=model).values[:, :, None]
        half = posterior.d.sel(task=task).values[:, :, None] / 2
        change = rng.binomial(runs.n, special.expit(level + half))
        change -= rng.binomial(runs.n, special.expit(level - half))
        effect = 100 * change.sum(axis=2) / runs.n.sum()
        found[f"effect[{model}, {task}]"] = ("chain", "draw"), effect
        effects.setdefault(model, []).append(effect)
    effects["all"] = [np.mean(each, axis=0) for each in effects.values()]
    for model, each in effects.items():
        found[f"difference[{model}]"] = ("chain", "draw"), np.mean(each, axis=0)
    return found


# Also in other scripts: see tests/copy_blocks.py

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


# --- shared: effects ---
SHARE = 0.89  # coverage of every interval (the paper's)
POINTS = ("acc", "f1")  # metrics whose differences are in percentage points


def add_effects(rows, metric="acc"):
    """Add to rows: base, unseen, seen (means over both sets where `arms` is "crossed"), boost and
    bias, and w_*, an effect's variance by rounding or, for a crossed bias in accuracy, by the split
    of 2n texts (nan without `discordant`); with K subsamples one_answer / K is added."""
    crossed, n = rows["arms"] == "crossed", rows["n"]
    scale = 100 if metric in POINTS else 1
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
    """A row per task: means over K subsamples, K, the effect's sd, its mean's variance v from the
    spread (nan if K is 1, or sd is 0 and w unknown) and noise from w."""
    groups = rows.groupby("task")
    tasks, K = groups.mean(numeric_only=True), groups.size()
    w = tasks[f"w_{effect}"]
    if effect == "bias":
        w = w + tasks["one_answer"] / K
    sd = groups[effect].std()
    v = (sd**2 / K).where(np.fmax(sd, w) > 0)
    return tasks.assign(subsamples=K, sd=sd, v=v, noise=w / K)


def interval(tasks):
    """(standard error, degrees of freedom, half-width) of the mean over the rows of task_means: the
    wider of two 89% intervals, t from v (Satterthwaite) and Normal from noise. nan if a v is."""
    v = tasks["v"].to_numpy().clip(1e-20)  # not 0 / 0
    df = [v.sum() ** 2 / (v**2 / (tasks["subsamples"] - 1)).sum(), math.inf]
    se = np.sqrt([v.sum(), tasks["noise"].sum()]) / len(tasks)
    half = stats.t.ppf((1 + SHARE) / 2, df) * se
    wider = half.argmax()  # or nan
    return se[wider], df[wider], half[wider]
# --- end shared ---


def parse_args(argv):
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FILE ...] [flags]", epilog=GLOSSARY,
        description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", metavar="FILE", nargs="*", type=Path, default=[Path("results.csv")],
        help="default results.csv")
    add("--margin", type=float,
        help="bias that does not matter; default 1 (acc, f1), else none")
    add("--metric", default="acc",
        help="acc, f1, nll, or X with columns X_base, X_extra, X_test; default acc")
    add("--plain", action="store_true", help="test on one set, as the paper does; default both")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="use only these; default all")
    add("--paper-model", action="store_true", help="fit the paper's model; default no")
    add("--no-interaction", action="store_true", help="leave out W, effects by task; default no")
    add("--draws", type=int, default=1000,
        help="draws per chain; half as many tune it; default 1000")
    add("--out", type=Path, metavar="FOLDER", help="of page and tables; default fits/FILE")
    args = parser.parse_args(argv)
    if args.paper_model and args.metric != "acc":
        parser.error("--paper-model fits accuracy: leave out --metric")
    if not args.paper_model and (args.no_interaction or args.draws != 1000):
        parser.error("--no-interaction and --draws need --paper-model")
    args.command = " ".join(["fit_model.py", *(sys.argv[1:] if argv is None else argv)])
    args.name, args.unit = WORDS.get(args.metric, (args.metric, args.metric))
    args.digits = 2 if args.metric in POINTS else 4
    if args.margin is None:
        args.margin = 1.0 if args.metric in POINTS else None
    elif not 0 < args.margin < math.inf:
        parser.error("--margin must be positive")
    name = "+".join(path.stem for path in args.paths)
    if args.metric != "acc":
        name += f".{args.metric}"
    args.out = args.out or Path("fits", name)
    return args


@errors_on_one_line()
def main(argv=None):
    args = parse_args(argv)
    rows = load_rows(args, args.metric)
    for end in ("", "_on_extra"):
        change = (rows[f"acc_test{end}"] - rows[f"acc_extra{end}"]).abs()
        bad = rows[f"discordant{end}"] < change - 0.5 / rows.n  # half an answer: rounding
        refuse(rows.set_index("task"), bad.array, "discordant is less than the accuracies differ")
    rows = add_effects(rows, args.metric)
    args.out.mkdir(parents=True, exist_ok=True)
    rows["majority"] *= 100
    if args.metric in POINTS:
        rows[["base", "unseen", "seen"]] *= 100
    units = unit_table(rows)
    tasks = []
    for _, mine in units.groupby([*CELL, "model"]):
        tasks += [task_table(mine, effect, args) for effect in EFFECTS]
    tasks = pd.concat(tasks, ignore_index=True)
    table = effects_table(units, tasks, args)
    publish(rows, tasks, table, args)
    if args.paper_model and not run_paper_model(rows, args):
        sys.exit(3)


if __name__ == "__main__":  # in a notebook cell flags go into the list: ["--m", "50"]
    main([] if "__file__" not in globals() else None)
