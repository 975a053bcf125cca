# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "matplotlib==3.10.9"]
# ///
"""Does pretraining on unlabeled test texts inflate the score? This script answers from results.csv.

Sections 5 to 8 of the paper (Dubey 2024).

    python fit_model.py results.csv   # page and tables, 3 seconds
    python fit_model.py results.csv --paper-model   # the paper's model: minutes

In a notebook: effects_table(pd.read_csv("results.csv"), margin=1.0)

Writes report.html, effects.png and tables to fits/results/, with the columns
    effects.csv: estimate, low, high (these tasks), like_low, like_high (tasks like these), verdict,
        p_alike (do tasks differ?), ... for each setting (m and n empty: their mean) and model
        (models: how many a row is the mean of; if more than one, model is "all")
    tasks.csv: the same for each task, sd (between subsamples), spread_variance, text_variance (of
        the estimate: by sd, by the draw of texts), p (one-sided sign flips of a bias), p_adjusted
        (Benjamini-Hochberg)
    posterior.csv: ArviZ's summary; warning (not converged)
"""

import argparse
import base64
import builtins
import contextlib
import csv
import difflib
import html
import importlib.util
import math
import os
import re
import shlex
import sys
import textwrap
import warnings
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

if "__file__" in globals():  # a notebook's may not be installed here
    os.environ.pop("MPLBACKEND", None)

from matplotlib.figure import Figure
from scipy import special, stats

os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")  # nutpie needs no C compiler
warnings.simplefilter("ignore", FutureWarning)  # of ArviZ
warnings.filterwarnings("ignore", "Glyph")  # a letter without a font is drawn as a box

NEAR = 0.55  # half-width, in margins; run_experiment.py --margin stops at 0.5
LEVEL = 0.05  # p below it: the tasks differ
FIVE = 5  # tasks for "tasks like these", subsamples for `needed`
PAPER_MODEL_NEEDS = "pymc==5.28.5,nutpie==0.16.8,arviz==0.23.4,pytensor==2.38.3"
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # acceptance, times tuning, times draws
EFFECTS = {"bias": ("extra", "test"), "boost": ("base", "extra")}  # control, treatment on `test`
MEANS = ["majority", "base", "unseen", "seen"]
WORDS = {"acc": ("accuracy", "points"), "f1": ("macro-F1", "points"), 
         "nll": ("nll (lower is better)", "nats")}
GLOSSARY = """\
m: labeled texts (0: trained elsewhere). n: unlabeled texts in each set. base: score without \
further pretraining. unseen, seen: score on texts not seen, or seen, in pretraining. boost = \
unseen - base, bias = seen - unseen. subsamples: random draws of texts. majority: share of the \
most common class.
In brackets: the 89% interval, a range that should hold the true value 89 times in 100 (86 to 93 \
where a run stops by itself). It is the wider of two: Student's t, from how much subsamples (for \
tasks like these: tasks) differ, and Normal, from the draw of texts or rounding. One draw has only \
the latter.
The margin (--margin) is the bias that would matter. What each verdict and warning means, and what \
to do next: docs/verdicts.md. README.md explains the experiment."""
HEAD = """<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>bias</title><style>
body { max-width: 75rem; margin: auto; padding: 0 .6rem; font: 16px/1.4 sans-serif }
div { margin: .3em 0 }
td, th { padding-right: .9rem; text-align: left; white-space: nowrap; font-size: .8rem }
img { max-width: 100% }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: .8rem }
.card { border: 2px solid #bbb; padding: 0 .6rem; overflow-wrap: anywhere }
.large { font: bold 2rem sans-serif }
.warning { border-left: .3rem solid #8a5a00; padding-left: .8rem }
.small { font-size: .8rem; overflow-wrap: anywhere; white-space: pre-line }
.table { overflow-x: auto }
@media (max-width: 48rem) { .table::before { content: "scrolls sideways \\2192" } }
</style><h1>Does training on test texts inflate scores?</h1>
"""


class Metric(NamedTuple):
    name: str  # of columns: acc_base, ...
    words: str
    unit: str
    lower_is_better: bool
    margin: float  # a bias that does not matter, or None: no verdict
    digits: int  # printed


def metric_of(name, margin, lower_is_better):
    words_and_unit = WORDS.get(name, (name, name))
    return Metric(name, *words_and_unit, lower_is_better or name == "nll", margin,
                  2 if name in POINTS else 4)


def effects_table(rows, margin=1.0, metric="acc", lower_is_better=False):
    """The table of effects.csv from rows in the columns of results.csv, as pd.read_csv gives them.
    margin: in points, or in the unit of a metric other than acc and f1. None: no verdict."""
    rows = clean_rows(rows, metric)
    return analyze(rows, metric_of(metric, margin, lower_is_better))[1]


def analyze(rows, metric):
    """(tasks.csv, effects.csv) of the rows of clean_rows."""
    units = unit_table(add_effects(rows, metric.name), metric)
    tasks, effects = [], []
    for _, model_units in units.groupby(["experiment", "model", "models"]):
        for effect in EFFECTS:
            settings = [task_table(cell_units, effect, metric)
                        for _, cell_units in model_units.groupby(CELL)]
            all_tasks = pd.concat(settings)
            if all_tasks.groupby("task").size().min() == len(settings) > 1:  # each has all tasks
                effects.append(effect_row(all_tasks, together(model_units, effect), metric))
            effects += [effect_row(table, table, metric) for table in settings]
            tasks.append(all_tasks)
    return pd.concat(tasks), pd.DataFrame(effects)


def unit_table(rows, metric):
    """One row per cell, model, task and subsample, in percent and points: means over seeds. Where
    the models of an experiment have the same settings, tasks and subsamples, two or more, also a
    row of their mean: model "all", models: how many. main: what the page judges, that mean or else
    each model.
    """
    variances = ["text_variance_bias", "text_variance_boost", "one_answer_variance"]
    parts = []
    for _, model_rows in rows.assign(main=True, models=1).groupby("experiment"):
        models = model_rows.model.nunique()
        answered = model_rows.groupby([*CELL, "task", "subsample"])["model"].nunique()
        if answered.min() == models > 1 and model_rows.subsample.nunique() > 1:
            all_models = model_rows.assign(model="all", models=models)
            # assumes that models change different answers; else the spread widens the interval
            all_models[variances] /= models
            parts.append(all_models)
            model_rows = model_rows.assign(main=False)
        parts.append(model_rows)
    groups = pd.concat(parts).groupby(
        [*CELL, "arms", "model", "models", "main", "task", "subsample"])
    # seeds share texts: the variance of their mean is at most the mean of their variances
    units = groups[[*MEANS, *EFFECTS, *variances]].mean(skipna=False)
    units["majority"] *= 100
    if metric.name in POINTS:
        units[["base", "unseen", "seen"]] *= 100
    return units.round(9).reset_index()  # equal effects stay equal


def task_table(units, effect, metric):
    """The rows of tasks.csv of one cell and model."""
    estimates = units.groupby("task")[effect].mean(skipna=False)  # unknown if a base is
    tasks = task_means(units, effect).assign(estimate=estimates).reset_index()
    tasks = tasks[["task", *MEANS, "subsamples", "sd", "spread_variance", "text_variance",
                   "estimate"]]
    names = [*CELL, "model", "models", "arms", "main"]
    tasks = tasks.assign(effect=effect, **units[names].iloc[0])
    if effect == "bias" and units.one_answer_variance.min() > 0:  # crossed, in accuracy
        # a single draw shows no spread: the draw of its texts alone gives the interval (0 times,
        # since an unknown text_variance must stay nan)
        tasks.loc[tasks.subsamples == 1, "spread_variance"] = 0 * tasks.text_variance
    half = [interval(task)[2] for _, task in tasks.groupby("task")]
    tasks = tasks.assign(low=tasks.estimate - half, high=tasks.estimate + half)
    if effect == "bias" and metric.name == "acc" and tasks.models[0] == 1:
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
    """What `interval` takes, for the mean over settings or other cases (model, task, m, n): a row
    per task and m with spread_variance, text_variance and subsamples. Models share the texts of a
    subsample, which also overlap across n, so the deviations that it contributes are added, then
    squared; the variances by its texts are only added."""
    groups = units.groupby(RUN[:5])
    K = groups[effect].transform("size")
    weight = 1 / (groups.ngroups * K)  # of a subsample in the mean
    # K / (K - 1) makes the sum of squares an unbiased estimate of the variance
    deviation = (units[effect] - groups[effect].transform("mean")) * np.sqrt(K / (K - 1))
    text_variance = units[f"text_variance_{effect}"]
    if effect == "bias":
        text_variance = text_variance + units.one_answer_variance / K
    parts = units.assign(
        K=K, deviation=weight * deviation, text_variance=weight**2 * text_variance)
    sums = parts.groupby(["task", "m", "subsample"])[["deviation", "text_variance"]].sum()
    sums = sums.assign(deviation=sums.deviation**2).groupby(["task", "m"]).sum()
    sums *= len(sums) ** 2  # undoes that `interval` takes a mean of rows
    K = parts.groupby(["task", "m"])["K"].min()
    known = (K > 1) & (sums.max(axis=1) > 0)
    return sums.assign(spread_variance=sums.deviation.where(known), subsamples=K)


def effect_row(tasks, parts, metric):
    """A row of effects.csv: the mean over the tasks of one setting or of several. parts: what
    `interval` takes."""
    first, settings = tasks.iloc[0], tasks.groupby(CELL).ngroups
    row = {**first[[*CELL, "effect", "model", "models", "main"]],
           **tasks[MEANS].mean(skipna=False), "setting": title_of(*first[CELL])}
    if settings > 1:
        row |= {"m": "", "n": "", "setting": f"{first.experiment}, mean of {settings} settings"}
    means = tasks.groupby("task")["estimate"].mean(skipna=False)
    J, K, estimate = len(means), tasks.subsamples.min(), means.mean(skipna=False)
    se, df, half = interval(parts)
    like_half = math.nan
    if J >= FIVE:  # Student's t over the tasks' means or, if wider, Normal as for these tasks
        t, z = stats.t.ppf((1 + SHARE) / 2, [J - 1, math.inf])
        like_half = np.fmax(t * means.sem(), z * se)

    p_alike, verdict, needed = math.nan, "", math.nan
    judged = K > 1 and half > 0  # which is false of nan, too
    if judged and J > 1:
        p_alike = p_of_alike_tasks(means.var() / J / se**2, J, K, len(parts), df)
    if first.effect == "bias":
        verdict = "Too early to tell: a verdict needs two subsamples (draws) that differ"
        if judged:
            verdict = verdict_on(estimate, half, J, metric)
            if p_alike < LEVEL and settings == 1 and tasks.low.max() > 0 > tasks.high.min():
                of_mean = verdict.partition(": ")[2]
                verdict = f"It depends on the task: on average {of_mean}"
            elif metric.margin and K >= FIVE and not is_settled(estimate, half, metric.margin):
                needed = np.ceil(K * (half / (metric.margin / 2)) ** 2)
    return row | {
        "settings": settings, "tasks": J, "subsamples": K, "se": se, "df": df,
        "estimate": estimate, "low": estimate - half, "high": estimate + half,
        "like_low": estimate - like_half, "like_high": estimate + like_half,
        "p_alike": p_alike, "needed": needed, "verdict": verdict}


def p_of_alike_tasks(F, J, K, parts, df):
    """p-value of J tasks' equality by Brown and Forsythe's F with the degrees of freedom of
    Mehrotra (1997), of which df is the denominator's; of two tasks, Welch's t test. parts: number
    of rows of what `interval` takes, each of K subsamples."""
    top = (J - 1) ** 2 / (1 + (J - 2) * parts * (K - 1) / df)
    return stats.f.sf(F, min(J - 1, top), min(df, 1e9))  # SciPy knows no infinite df


def is_settled(estimate, half, margin):
    """Is an interval within the margin, beyond it, or so narrow that more runs hardly help?"""
    size = abs(estimate)
    return size + half < margin or size - half > margin or half <= NEAR * margin


def verdict_on(estimate, half, tasks, metric):
    """What precedes the colon is printed large. docs/verdicts.md explains each."""
    side = "includes"
    if abs(estimate) > half:
        side = "lies above" if estimate > 0 else "lies below"
    if not metric.margin:
        return f"No verdict without --margin: the interval {side} 0"
    margin = f"±{metric.margin:g} {metric.unit}".replace("points", "percentage points")
    mean = ", on average" if tasks > 1 else ""
    inflated = (estimate > 0) != metric.lower_is_better
    if abs(estimate) + half < metric.margin:
        return f"No{mean}: within {margin}"
    if abs(estimate) - half > metric.margin:
        if inflated:
            return f"Yes{mean}: beyond {margin}"
        return f"No{mean}: seen texts even score worse, beyond {margin}"
    if half <= NEAR * metric.margin:
        return f"Near the margin{mean}: the interval is narrow, {side} 0 and is near {margin}"
    if side == "includes":
        return f"Too early to tell: the interval is too wide for {margin}"
    effect = "Inflated" if inflated else "Seen texts score worse"
    return (f"{effect}{mean}, but too early to tell by how much: the interval {side} 0 and is "
            f"partly beyond {margin}")


# The page


def publish(rows, metric, folder, command):
    """Print verdicts on means over settings, else on settings. Write the files."""
    tasks, effects = analyze(rows, metric)
    lines = side_by_side(effects, metric)
    task_lines = side_by_side(tasks[tasks.main], metric)
    widest = lines.groupby(["experiment", "model"])["settings"].transform("max")
    cards = ""
    for _, line in lines[lines.main & (lines.settings == widest)].iterrows():
        its_tasks = part_of(task_lines, line)
        texts = [*notes(line, part_of(rows, line), its_tasks, metric, command)]
        done = summary(line, its_tasks)
        print(f"{line.verdict} ({done}).", *[text for _, text in texts])
        large, _, small = line.verdict.partition(": ")
        texts = [("", done), ("large", large), ("", small), *texts]
        cards += div("card", "".join(div(kind, html.escape(text)) for kind, text in texts))

    effects.to_csv(folder / "effects.csv", **CSV)
    tasks.to_csv(folder / "tasks.csv", **CSV)
    shown = ["bias", "boost", "subsamples", *MEANS]
    tables = {"Settings": lines[["setting", "model", "tasks", *shown]],
              "Tasks": task_lines[[*CELL, "model", "task", *shown]]}
    page = HEAD + div("cards", cards) + div("small", GLOSSARY)
    page += pictures(tasks, effects, metric, folder / "effects.png")
    for title, table in tables.items():
        page += f"<h2>{title}</h2>" + div("table", table.to_html(
            index=False, border=0, na_rep="", float_format=f"%.{metric.digits}f"))
    footer = [f"{date.today()}: {command} ({len(rows)} rows)"]
    if "versions" in rows:
        footer += [*rows.versions.dropna().unique()]
    page += div("small", html.escape("\n".join(footer)))
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    print(f"page: {path.resolve()}")


def div(kind, text):
    return f'<div class="{kind}">{text}</div>\n'


def side_by_side(table, metric):
    """The rows of the bias, with both effects in words."""
    table = table.assign(words=[
        in_words(*pair, metric) for pair in zip(table.estimate, table.high)])
    bias, boost = [table[table.effect == effect].reset_index(drop=True) for effect in EFFECTS]
    lines = bias.assign(bias=bias.words, boost=boost.words)
    lines["least_gain"] = -boost.high if metric.lower_is_better else boost.low
    return lines


def in_words(estimate, high, metric):
    """Estimate and interval, no end rounded to 0 or to the margin. Nothing of what is unknown."""
    if math.isnan(estimate):
        return ""
    low, digits = 2 * estimate - high, metric.digits
    if any(round(abs(end), digits) in (0, metric.margin) for end in (low, high)):
        digits += 1
    words = f"{estimate:+z.{digits}f}"
    if low < high:  # not nan
        words += f" [{low:+z.{digits}f}, {high:+z.{digits}f}]"
    return words


def part_of(table, line):
    """The rows of a table that a line sums up."""
    keys = [name for name in CELL if line[name] != ""]
    if line.models == 1:
        keys.append("model")
    return table[(table[keys] == line[keys]).all(axis=1)]


def summary(line, tasks):
    """What was run, in words."""
    benchmark, model = tasks.task.iloc[0], line.model
    draws, sizes = f"{line.subsamples} draws of texts", f"two sets of n = {line.n}"
    if line.subsamples == 1:
        draws = "one draw of texts"
    if tasks.subsamples.max() > line.subsamples:
        draws = f"at least {draws}"
    if line.tasks > 1:
        benchmark, draws = f"{line.tasks} tasks", f"{draws} each"
    if line.models > 1:
        model = f"{line.models} models"
    if line.m:
        sizes = f"m = {line.m} labeled texts, {sizes}"
    if line.settings > 1:
        sizes = f"mean of {line.settings} settings"
    return f"{line.experiment}: {benchmark}, {model}, {draws}; {sizes}"


def notes(line, rows, tasks, metric, command):
    """Yield (class, sentence). rows, tasks: those that the line sums up."""
    kind = "labeled " if line.experiment.endswith("-answers") else ""
    training = "Pretraining"
    advice = "another --pretrain-lr or --pretrain-epochs or, with a GPU, a larger --model"
    if line.m == 0:  # crossed answers hold any training
        training, advice = "Training", "another learning rate or number of steps"
    details = "bias, 89% interval"
    if line.subsamples == 1:
        details = "bias of one draw"
    boost = f"{training} on other texts changes it by {line.boost} (boost)."
    if not line.boost:
        boost = f"The boost is unknown: {metric.name}_base, the score before pretraining, is empty."
    yield "", (f"{training} on the {kind}test texts instead of other texts changes "
               f"{metric.words} by {line.bias} {metric.unit} ({details}). {boost}")
    if line.subsamples == 1 and line.low < line.high:
        yield "warning", ("The interval is from the draw of the texts alone and leaves out the "
                          "luck of training: such an interval held in 73 to 94% of our own single "
                          "draws. A verdict needs two draws.")
    if line.p_alike < LEVEL:
        p = f"{line.p_alike:.1g}"
        yield "warning", f"The tasks differ by more than chance (p = {p}). Judge each alone:"
        if line.settings == 1:
            for _, task in tasks.iterrows():
                verdict = verdict_on(task.estimate, task.high - task.estimate, 1, metric)
                yield "", f"{task.task}: {task.bias}. {verdict}."
        task = shlex.quote(tasks.task.iloc[-1])
        yield "", f"A page for one: python {command} --tasks {task} --out fits/one"
    if pd.notna(line.like_low):
        words = in_words(line.estimate, line.like_high, metric)
        yield "", f"Over all tasks like these, the mean bias is {words}."
    if line.needed > 0:
        yield "", (f"About {line.needed:.0f} subsamples of each task would narrow the interval to "
                   f"±{metric.margin / 2:g}; that may not settle it.")
    if not line.verdict.startswith("Yes"):
        if line.least_gain <= 0:
            yield "warning", (f"{training} on other texts hurts here, or is not shown to help; a "
                              f"recipe that helps may inflate more. Try {advice}.")
        yield from caveat(rows, metric)


def caveat(rows, metric):
    """Where models barely learned the task, by macro-F1 or else accuracy; the bias elsewhere."""
    name, above = "macro-F1", add_effects(rows, "f1").unseen - 1 / rows.num_classes
    if above.isna().any():
        name, above = "accuracy", add_effects(rows).unseen - rows.majority
    cases = rows.assign(above=above).groupby(RUN[:5])["above"].mean()
    weak = cases.index[cases < 0.05 - 1e-9]  # 5 points, but for rounding
    tasks = weak.unique("task")
    which = ", ".join(tasks)
    if len(tasks) > FIVE:
        which = f"{len(tasks)} of {rows.task.nunique()} tasks"
    words = (f"The models barely learned the task in {len(weak)} of {len(cases)} cases (model, "
             f"task, m, n) from {which}: {name} on unseen texts is less than 5 points above "
             "guessing.")
    learned = cases.index.difference(weak)
    if len(learned) >= FIVE:
        units = unit_table(add_effects(rows, metric.name), metric).set_index(RUN[:5])
        units = units[units.index.isin(learned)]
        mean = units.groupby(RUN[:5])["bias"].mean().mean()
        bias = in_words(mean, mean + interval(together(units, "bias"))[2], metric)
        words += f" In the other {len(learned)} the mean bias is {bias}."
    if len(weak):
        yield "warning", words


def pictures(tasks, effects, metric, path):
    """Save effects.png. Return its HTML, also narrow."""
    coded = []
    for narrow in (True, False):  # wide last
        draw_effects(tasks, effects, metric, narrow).savefig(path, dpi=130)
        picture = base64.b64encode(path.read_bytes()).decode()
        coded.append(f"data:image/png;base64,{picture}")
    if hasattr(builtins, "display"):  # notebook
        builtins.display({"image/png": picture}, raw=True)
    narrow, wide = coded
    return (f'<picture><source media="(max-width: 48rem)" srcset="{narrow}">'
            f'<img alt="The effects, drawn" src="{wide}"></picture>')


def draw_effects(tasks, effects, metric, narrow):
    """Each setting, or each task of a single one, and the mean."""
    rows = effects[effects.main | (effects.settings > 1)]
    if tasks.groupby(CELL).ngroups == 1:
        single = tasks[tasks.models == 1].sort_values(["effect", "estimate"], ascending=[1, 0])
        rows = pd.concat([rows.assign(setting="mean"), single.assign(setting=single.task)])
    y, names = pd.factorize(rows.setting.where(rows.models > 1, rows.setting + ", " + rows.model))

    size, grid, width = (9.5, 1.7 + 0.27 * len(names)), (1, 3), 50
    if narrow:
        size, grid, width = (5, 4.2 + 1.2 * len(names)), (3, 1), 27
    names = [textwrap.fill(name, width) for name in names]
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(*grid, sharey=True)
    axes[0].set_yticks(range(len(names)), names, parse_math=False)  # "$" is no formula
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    axes[0].set(title="bias = seen - unseen", xlabel=metric.unit)
    axes[1].set(title="boost = unseen - base", xlabel=metric.unit)
    axes[2].set(title=metric.words, xlabel=metric.unit.replace("points", "%"))
    for axis, effect in zip(axes, EFFECTS):
        shown = rows.assign(y=y)[rows.effect == effect]
        axis.errorbar(shown.estimate, shown.y, xerr=shown.high - shown.estimate, fmt="ko")
        axis.axvline(0, color="gray", ls="--")
    axes[0].containers[0].set_label("89% interval")
    if metric.margin:
        axes[0].axvspan(-metric.margin, metric.margin, color="#dddddd", label="margin")
    marks = {"base": ("s", 130, "white"), "unseen": ("o", 60, "#88ccee"), "seen": ("D", 16, "red")}
    for name, (mark, area, color) in marks.items():
        axes[2].scatter(rows[name], y, area, color, marker=mark, edgecolor="k", label=name)
    if metric.name == "acc":
        axes[2].scatter(rows.majority, y, 110, "k", marker="|", label="most common class")
    figure.legend(
        title="m labeled, n unlabeled texts", loc="outside upper center", ncols=2 * grid[1])
    return figure


# The paper's model


def run_paper_model(rows, interaction, draws, path):
    """Write posterior.csv. Print beta and the differences. Return whether all fits converged."""
    tables = {}
    for cell, cell_rows in rows.groupby(CELL):
        for effect in EFFECTS:
            tables[*cell, effect] = fit(cell_rows, effect, interaction, draws)
            posterior = pd.concat(tables, names=[*CELL, "effect", "parameter"]).reset_index()
            posterior.to_csv(path, **CSV)
            print(f"the paper's model, {title_of(*cell)}, {effect}: beta (log odds), differences")
            shown = tables[*cell, effect].filter(regex="beta|diff", axis="index")
            print(shown[["mean", "hdi_5.5%", "hdi_94.5%", "r_hat", "warning"]].to_string())
    return not any(posterior.warning)


def fit(rows, effect, interaction, draws):
    """The rows of posterior.csv of a cell and effect, if need be from a second, finer fit."""
    import arviz
    import nutpie

    control, treatment = EFFECTS[effect]
    rows = rows.assign(control=(rows[f"acc_{control}"] * rows.n).round(),
                       treatment=(rows[f"acc_{treatment}"] * rows.n).round(),
                       unit=rows.groupby(["task", "subsample"]).ngroup())
    ready = nutpie.compile_pymc_model(paper_model(rows, interaction))
    for accept, times_tuning, times_draws in ATTEMPTS:
        trace = nutpie.sample(  # blocking would catch Ctrl-C
            ready, chains=4, tune=draws // 2 * times_tuning, draws=draws * times_draws, seed=0,
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
    whose chains mix well (docs/results.md): logit p = c_jk + alpha_i + (l - 1/2) d_j. A task's
    level a_j = mu + beta/2 + U_j + (W_j0 + W_j1)/2 and its effect d_j = beta + W_j1 - W_j0 are
    independent."""
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
    centering = max(0, 1 - noise / max(varied, 1e-9)) ** 2

    with pm.Model(coords={"later": models[1:], "task": tasks}) as model:
        mu = pm.Normal("mu", 0, 1)
        beta = pm.Normal("beta", 0, 1)
        alpha = pt.zeros(1)
        if len(models) > 1:
            alpha = pt.concatenate([[0.0], pm.Normal("alpha", 0, 5, dims="later")])
        sd_U = pm.HalfNormal("sd_U", 1)
        sd_V = pm.HalfNormal("sd_V", 1)
        sd_W = pm.HalfNormal("sd_W", 3.5355) if interaction else 0  # sd of d: HalfNormal(5)

        a = pm.Normal("a", mu + beta / 2, pt.sqrt(sd_U**2 + sd_W**2 / 2), dims="task")
        c = pm.Normal("c", a[task_of_unit], sd_V)

        d = beta * pt.ones(len(tasks))
        if interaction:
            s = math.sqrt(2) * sd_W
            z = pm.Normal("z", centering * beta, s**centering, dims="task")
            d = beta + s ** (1 - centering) * (z - centering * beta)
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
    predicted = posterior.drop_vars(["a", "c", "z", *logs], errors="ignore")
    effects = {}
    for (model, task), runs in rows.groupby(["model", "task"]):
        level = posterior.c.values[:, :, runs.unit]  # [chain, draw, run]
        if model in posterior.get("later", ()):
            level = level + posterior.alpha.sel(later=model).values[:, :, None]
        half = posterior.d.sel(task=task).values[:, :, None] / 2
        change = rng.binomial(runs.n, special.expit(level + half))
        change -= rng.binomial(runs.n, special.expit(level - half))
        effect = 100 * change.sum(axis=2) / runs.n.sum()
        predicted[f"effect[{model}, {task}]"] = ("chain", "draw"), effect
        effects.setdefault(model, []).append(effect)
    effects["all"] = [np.mean(of_tasks, axis=0) for of_tasks in effects.values()]
    for model, of_tasks in effects.items():
        predicted[f"difference[{model}]"] = ("chain", "draw"), np.mean(of_tasks, axis=0)
    return predicted


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
        raise SystemExit("stopped: run the same command again to continue. Finished work is kept")
    except BrokenPipeError:
        os._exit(1)  # head has read enough
    except Exception as error:
        if os.environ.get("TRACEBACK"):
            raise
        raise SystemExit(f"error: {brief(error)}")


def brief(error, limit=290):
    """An error on one line, of 3 rows of a screen at most. A long path loses its start."""
    text = str(error).replace("'utf-8' codec", "save it as UTF-8 text:")
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
    """Of three arms, on `test` and on `extra`."""
    return [f"{metric}_{arm}" for arm in sum(CROSSED.values(), ())]


def refuse(rows, bad, words):
    if bad.any():
        raise ValueError(f"{rows.index[bad][0]}: {words}")


def read_rows(path, metric="acc"):
    """The cells of a results file, as text. The index says where each row stands."""
    text = path.read_text(encoding="utf-8-sig")
    lines = text.split("\n")
    if f"{metric}_extra" not in lines[0]:
        metrics = re.findall(r"(\w+)_base\b", lines[0])
        raise ValueError(f"{path} has no column {metric}_extra. It has the metrics {metrics}; if "
                         f"none, did you mean {path.stem}_results.csv?")
    mark = max(",;\t", key=lines[0].count)
    # line by line: one cut short in quotes would swallow the next
    header, *lines = [next(csv.reader([line], delimiter=mark), []) for line in lines]
    rows = {}
    for number, cells in enumerate(lines, 2):
        whole = len(cells) == len(header)
        if whole and number > len(lines) and header[-1] == "versions":
            # no line break follows: is the cell whole, with a hash at its end or as in other rows?
            whole = re.search(" script [0-9a-f]{12}$", cells[-1]) or f"{mark}{cells[-1]}\n" in text
        if whole:
            rows[f"{path}, line {number}"] = cells
        elif cells:
            print(f"{path}, line {number} is broken: left out")
    if not rows:
        raise ValueError(f"{path} has no rows: run run_experiment.py first")
    return pd.DataFrame.from_dict(rows, "index", columns=header)


def clean_rows(rows, metric="acc", plain=False, flags={}):
    """The rows of results files that the flags choose, checked. arms: crossed if all rows of a cell
    have the metric on `extra`; else, or if plain, plain: *_on_extra is nan."""
    rows = rows.replace("", np.nan)
    needed = [*RUN[:-1], f"{metric}_extra", f"{metric}_test"]
    shares = ["majority", "discordant", "discordant_on_extra", *columns_of("acc")]
    for name in [*RUN, "num_classes", *shares, *columns_of("f1"), *columns_of(metric)]:
        rows[name] = rows.get(name, np.nan)
        empty = rows[name].isin(["NA", "nan", np.nan])  # but for names: a task may be called NA
        if name not in RUN[:3]:
            rows[name] = pd.to_numeric(rows[name], errors="coerce")
        refuse(rows, rows[name].isna() & (~empty | (name in needed)),
               f"column {name} is missing, empty or not like 0.5")
        if name in shares:
            refuse(rows, ~rows[name].fillna(0).between(0, 1), f"{name} is not between 0 and 1")
    rows[RUN[3:]] = rows[RUN[3:]].fillna(0).astype(int)
    for flag in FILTERS:
        values = rows[flag.removesuffix("s")].astype(str)
        wanted = flags.get(flag) or [*values]
        for name in {*wanted} - {*values}:
            near = difflib.get_close_matches(name, {*values}, 9, 0)
            raise ValueError(f"no rows have --{flag} {name}. There are, nearest first: {near}")
        rows = rows[values.isin(wanted)]
    scopes = dict.fromkeys(rows.select_dtypes("number").columns, RUN)
    scopes |= {"recipe": RUN[:5], "data": ["experiment", "task"],
               "subsample": [*RUN[:5], "split"],  # a draw, or a data set, counts once
               "task": [*CELL, "model", "data"]}
    for name, scope in scopes.items():
        if {name, *scope} <= {*rows}:
            refuse(rows, rows.groupby(scope)[name].transform("nunique") > 1,
                   f"another row has the same {', '.join(scope)} but not {name}: keep one")
    rows = rows.groupby(RUN, as_index=False).first()
    rows["both"] = rows[[f"{metric}_extra_on_extra", f"{metric}_test_on_extra"]].notna().all(axis=1)
    crossed = rows.groupby(CELL)["both"].transform("all") & (not plain)
    rows["arms"] = np.where(crossed, "crossed", "plain")
    rows.loc[~crossed, rows.columns.str.endswith("_on_extra")] = np.nan
    return rows


def title_of(experiment, m, n):
    labeled = f", m = {m}" if m else ""  # 0: trained elsewhere
    return f"{experiment}{labeled}, n = {n}"
# --- end shared ---


# --- shared: crossing ---
CROSSED = {  # by mean: the arm that gives it on the texts of `test`, that on the texts of `extra`
    "base": ("base", "base_on_extra"),
    "unseen": ("extra", "test_on_extra"),  # pretrained on the other set
    "seen": ("test", "extra_on_extra")}
# --- end shared ---


# --- shared: effects ---
SHARE = 0.89  # coverage of every interval (the paper's)
POINTS = ("acc", "f1")  # metrics whose differences are in percentage points


def add_effects(rows, metric="acc"):
    """Add columns to a table of rows, a subsample each:
    base, unseen, seen    scores; means over both sets where `arms` is "crossed"
    boost, bias           unseen - base and seen - unseen, in points if the metric is in POINTS
    text_variance_boost   variance of the boost by rounding to 1 / n
    text_variance_bias    of the bias, by the draw of the 2n texts if arms are crossed and the
                          metric is accuracy (nan without `discordant`), else by rounding
    one_answer_variance   what one more text of each set that is answered differently would add to
                          that draw's variance; / K in the mean of K subsamples (else 0)"""
    crossed, n = rows["arms"] == "crossed", rows["n"]
    scale = 100 if metric in POINTS else 1
    added = {}
    for name, arms in CROSSED.items():  # *_on_extra is nan where arms are plain
        added[name] = rows[[f"{metric}_{arm}" for arm in arms]].mean(axis=1)
    added["boost"] = scale * (added["unseen"] - added["base"])
    added["bias"] = scale * (added["seen"] - added["unseen"])
    added["text_variance_boost"] = added["text_variance_bias"] = (scale / n) ** 2 / 12
    added["one_answer_variance"] = 0.0
    if metric == "acc":
        variances = 0  # the sum over both sets of the variance of one text's change (-1, 0, 1)
        for ending in ("", "_on_extra"):
            change = rows[f"acc_test{ending}"] - rows[f"acc_extra{ending}"]
            variances += rows[f"discordant{ending}"] - change**2
        added["text_variance_bias"] = (100**2 / (4 * n) * variances).where(
            crossed, added["text_variance_boost"])
        added["one_answer_variance"] = crossed * 100**2 / (2 * n**2)
    return rows.assign(**added)


def task_means(rows, effect="bias"):
    """A row per task: means over K subsamples, K, the effect's sd and two variances of its mean:
    spread_variance, by how much subsamples differ (nan if K is 1, or if they are equal and nothing
    is known of their texts), and text_variance, by the draw of the texts."""
    groups = rows.groupby("task")
    tasks, K = groups.mean(numeric_only=True), groups.size()
    of_one = tasks[f"text_variance_{effect}"]
    if effect == "bias":
        of_one = of_one + tasks["one_answer_variance"] / K
    sd = groups[effect].std()
    spread_variance = (sd**2 / K).where(np.fmax(sd, of_one) > 0)
    return tasks.assign(
        subsamples=K, sd=sd, spread_variance=spread_variance, text_variance=of_one / K)


def interval(tasks):
    """(standard error, degrees of freedom, half-width) of the mean over the rows of task_means: the
    wider of two 89% intervals, Student's t by spread_variance (with Satterthwaite's degrees of
    freedom) and Normal by text_variance. nan if a spread_variance is."""
    spread = tasks["spread_variance"].to_numpy().clip(1e-20)  # if all were 0, df would be 0 / 0
    df = [spread.sum() ** 2 / (spread**2 / (tasks["subsamples"] - 1).clip(1)).sum(), math.inf]
    se = np.sqrt([spread.sum(), tasks["text_variance"].sum()]) / len(tasks)
    half = stats.t.ppf((1 + SHARE) / 2, df) * se
    wider = half.argmax()  # argmax also picks a nan
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
    add("--lower-is-better", action="store_true", help="as of an error; default no, but for nll")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="use only these; default all")
    add("--paper-model", action="store_true", help="fit the paper's model of accuracy; default no")
    add("--no-interaction", action="store_true", help="leave out W, effects by task; default no")
    add("--draws", type=int, default=1000,
        help="draws per chain; half as many tune it; default 1000")
    add("--out", type=Path, metavar="FOLDER", help="of page and tables; default fits/FILE")
    args = parser.parse_args(argv)
    args.command = shlex.join(["fit_model.py", *(sys.argv[1:] if argv is None else argv)])
    if args.margin is None:
        args.margin = 1.0 if args.metric in POINTS else None
    elif not 0 < args.margin < math.inf:
        parser.error("--margin must be positive")
    name = "+".join(path.stem for path in args.paths)[:99]  # a folder's may have 255 bytes
    if args.metric != "acc":
        name += f".{args.metric}"
    args.out = args.out or Path("fits", name)
    return args


@errors_on_one_line()
def main(argv=None):
    args = parse_args(argv)
    if args.paper_model and not importlib.util.find_spec("nutpie"):
        raise ValueError("--paper-model needs packages that are not installed: uv run --with "
                         f"{PAPER_MODEL_NEEDS} {args.command}")
    rows = pd.concat([read_rows(path, args.metric) for path in args.paths])
    rows = clean_rows(rows, args.metric, args.plain, vars(args))
    args.out.mkdir(parents=True, exist_ok=True)
    publish(rows, metric_of(args.metric, args.margin, args.lower_is_better), args.out, args.command)
    if args.paper_model and not run_paper_model(
            rows, not args.no_interaction, args.draws, args.out / "posterior.csv"):
        sys.exit(3)


if __name__ == "__main__":  # in a notebook or VS Code flags go into the list: ["--m", "50"]
    main([] if "__file__" not in globals() or "kernel_launcher" in sys.argv[0] else None)
