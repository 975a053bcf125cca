# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "matplotlib==3.10.9"]
# ///
"""Does pretraining on unlabeled test texts inflate the score? This script answers from results.csv.

Sections 5 to 8 of the paper (Dubey 2024).

    python fit_model.py results.csv   # page and tables, 3 seconds
    python fit_model.py results.csv --paper-model   # the paper's model: minutes

In a notebook: effects_table(pd.read_csv("results.csv"), margin=1.0)

Writes report.html, effects.png and tables to fits/results/, with the columns
    effects.csv: estimate, low, high (these tasks), like_low, like_high (tasks like these), verdict
        (yes, yes-open: perhaps over the margin, yes-under, no, open, depends, none), p_alike (do
        tasks differ?), largest (the most inflated task), ... for each setting (m and n empty: their
        mean) and model (models: how many a row is the mean of; if more than one, model
        is "all")
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
import html
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

MIN_DRAWS = 8  # of a task; the spread of fewer varies too much (run_experiment.py --margin)
COLUMNS = "part draws guess base unseen seen boost bias inflated?".split()  # of the table
GROUPS = {"yes": "Inflated by over {}", "yes-open": "Inflated, perhaps by over {}", "open": "Open",
          "yes-under": "Inflated by under {}", "no": "Not over {}",
          "none": "Unknown"}  # parts of a table, by verdict
WEAK, BARELY = "WEAK TESTS, which say little", "Barely learned"
NAMED = 5  # names in a sentence, most and least inflated tasks in a table
MANY = 20  # tasks from which others like them can be told
MOST_DRAWN = 31  # rows of the figure, such as 30 tasks and their mean; else only means
PAPER_MODEL_NEEDS = "pymc==5.28.5,nutpie==0.16.8,arviz==0.23.4,pytensor==2.38.3"
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # acceptance, times tuning, times draws
EFFECTS = {"bias": ("extra", "test"), "boost": ("base", "extra")}  # control, treatment on `test`
MEANS = ["majority", "base", "unseen", "seen"]
GLOSSARY = """\
m: labeled texts (0: trained elsewhere). n: unlabeled texts in each set. Draws (subsamples): \
random choices of texts. base: score without further pretraining. unseen, seen: score on texts not \
seen, or seen, in pretraining. boost = unseen - base, bias = seen - unseen. majority, guess: share \
of the most common class.
In brackets: the 89% interval, a range that should hold the true value 89 times in 100 (86 to 93 \
of a run by --margin). It is the wider of two: Student's t, from how much draws (for tasks \
like these: tasks) differ, and Normal, from the draw of texts or rounding. The bias of one of J \
tasks or models has an interval at 5.5% / J a side, so that an innocent one is called inflated in \
at most 5.5% of tables. barely learned: accuracy on unseen texts is less than 5 points above \
guess. Read a verdict at the number of draws that was fixed before, or, with --margin, at its end.
The margin (--margin) is the bias that would matter. What each verdict means, and what to do next: \
docs/verdicts.md. README.md explains the experiment."""
HEAD = """<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Does pretraining on the test texts inflate the score?</title><style>
body { max-width: 62rem; margin: auto; padding: 0 .6rem; font: 16px/1.4 sans-serif }
div { margin: .3em 0 }
td, th { padding-right: .9rem; text-align: right; white-space: nowrap; font-size: .85rem }
td:first-child, th:first-child { text-align: left }
tr:last-child td { font-weight: bold }
details tr:last-child td { font-weight: normal }
img { width: 42rem }
.key { white-space: pre-line; margin-top: 1.2rem; font-size: .9rem; color: #333 }
.note { margin-left: 1.2rem; text-indent: -.8rem; overflow-wrap: anywhere; white-space: pre-line }
.note::before { content: "\\2013\\a0" }
.done { border-top: 2px solid #bbb; margin-top: 1.2rem; padding-top: .4rem }
.large { font: bold 1.2rem sans-serif; margin-top: .8rem }
.typed { font: .8rem monospace; white-space: pre-line; background: #eee; margin: .3rem 1.2rem }
.small { font-size: .8rem; overflow-wrap: anywhere; white-space: pre-line }
table { display: block; overflow-x: auto; border: 0 }
body { overflow-x: auto }
</style><h1>Does pretraining on the test texts inflate the score?</h1>
"""


class Metric(NamedTuple):
    name: str  # of columns: acc_base, ...
    words: str
    unit: str
    sign: int  # -1 if lower is better, else 1
    margin: float  # the bias that would matter, or None: no verdict
    limit: str  # the same in words
    digits: int  # of effects; scores have one less


def metric_of(name, margin, lower_is_better):
    words, unit, digits, sign = name, name, 4, 1
    if name in POINTS:
        words, unit = f"{name} in %".replace("acc", "accuracy"), "points"
        digits, margin = 2, margin or 1.0
    limit = f"{margin:g} {unit}" if margin else "the margin"
    if lower_is_better or name in LOWER_IS_BETTER:
        words, sign = f"{words} (lower: better)", -1
    limit = re.sub("^1 points", "1 point", limit)
    return Metric(name, words, unit, sign, margin, limit, digits)


def effects_table(rows, margin=None, metric="acc", lower_is_better=False):
    """The table of effects.csv from rows in the columns of results.csv, as pd.read_csv gives them.
    margin: in points (1 if not given) for acc and f1; for other metrics in their unit, and no
    verdict if not given."""
    return analyze(clean_rows(rows, metric), metric_of(metric, margin, lower_is_better))[1]


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
    effects = pd.DataFrame(effects)
    biases = effects[effects.effect == "bias"]
    for number, mean in biases[biases.models > 1].iterrows():
        verdicts = {part_verdict(model, metric) for model in models_of(biases, mean).itertuples()}
        if depends(p_of_alike_models(part_of(units[units.models == 1], mean)), verdicts):
            effects.loc[number, "verdict"] = "depends"
    return pd.concat(tasks), effects


def unit_table(rows, metric):
    """One row per cell, model, task and subsample, in percent and points: means over seeds. Where
    the models of an experiment have the same settings, tasks and subsamples, two or more, also a
    row of their mean: model "all", models: how many. (Crossed answers, m = 0, are of methods, which
    no mean should hide.)"""
    variances = ["text_variance_bias", "text_variance_boost", "one_answer_variance",
                 "item_variance_boost"]
    parts = []
    for _, model_rows in rows.assign(models=1).groupby("experiment"):
        models = model_rows.model.nunique()
        answered = model_rows.groupby([*CELL, "task", "subsample"])["model"].nunique()
        # several models, and each has all
        if answered.min() == models > 1 and model_rows.m.min() > 0:
            all_models = model_rows.assign(model="all", models=models)
            # assumes that models change different answers; else the spread widens the interval
            all_models[variances] /= models
            parts.append(all_models)
        parts.append(model_rows)
    groups = pd.concat(parts).groupby([*CELL, "arms", "model", "models", "task", "subsample"])
    # seeds share texts: the variance of their mean is at most the mean of their variances
    units = groups[[*MEANS, *EFFECTS, *variances]].mean(skipna=False)
    units["majority"] *= 100 if metric.name == "acc" else math.nan  # what guessing scores
    if metric.name in POINTS:
        units[MEANS[1:]] *= 100
        units["item_variance_boost"] *= 100**2
    return units.round(9).reset_index()  # equal effects stay equal


def task_table(units, effect, metric):
    """The rows of tasks.csv of one cell and model. shown_low, shown_high: the ends of the interval
    that judges and is shown; those of the biases of J tasks hold together."""
    estimates = units.groupby("task")[effect].mean(skipna=False)  # unknown if a base is
    tasks = task_means(units, effect).assign(estimate=estimates).reset_index()
    tasks = tasks[["task", *MEANS, "subsamples", "sd", "spread_variance", "text_variance",
                   "item_variance_boost", "estimate"]]
    names = [*CELL, "model", "models", "arms"]
    tasks = tasks.assign(effect=effect, **units[names].iloc[0])
    tail = TAIL / len(tasks) if effect == "bias" else TAIL
    for name, its_tail in (("", TAIL), ("shown_", tail)):
        half = [interval(task, its_tail)[2] for _, task in tasks.groupby("task")]
        tasks[f"{name}low"] = tasks.estimate - half
        tasks[f"{name}high"] = tasks.estimate + half
        # low and high, which tell a weak test, are for these items; shown_low and shown_high, and
        # text_variance in tasks.csv, are for items like them
        if effect == "boost":
            tasks["text_variance"] = np.fmax(tasks.text_variance, tasks.item_variance_boost)
    if effect == "bias" and metric.name == "acc" and tasks.models[0] == 1:
        texts = units.n * np.where(units.arms == "crossed", 2, 1)
        changes = units.bias / 100 * texts  # of right answers
        tasks["p"] = changes.groupby(units.task).agg(sign_flip_p).to_numpy()
        tasks["p_adjusted"] = stats.false_discovery_control(tasks.p)
    return tasks


def draws_needed(parts, tail, goal):
    """How many draws narrow the interval of `parts`, which `interval` takes, to ± goal."""
    se, df, _ = interval(parts)
    K = parts.subsamples.min()
    counts = np.arange(K, 500 * K)
    half = stats.t.isf(tail, df * (counts - 1) / (K - 1)) * se * np.sqrt(K / counts)
    return K + (half > goal).sum()


def sign_flip_p(changes):
    """One-sided p-value of the sum of the changes under random signs, exact by convolution. Changes
    are numbers of answers, or means over up to six seeds: whole numbers of sixtieths."""
    changes = (60 * changes).round().astype(int)
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
    row = {**first[[*CELL, "effect", "model", "models"]],
           **tasks[MEANS].mean(skipna=False), "setting": title_of(*first[CELL])}
    means = tasks.groupby("task")["estimate"].mean(skipna=False)
    J, K, estimate = len(means), tasks.subsamples.min(), means.mean(skipna=False)
    if settings > 1:
        row |= {"m": "", "n": "",
                "setting": f"{first.experiment}, mean of {J} tasks in {settings} settings of m, n"}
    se, df, half = interval(parts)
    like_half = stats.t.isf(TAIL, J - 1) * means.sem() if J >= MANY else math.nan

    p_alike = math.nan
    verdict = "none"
    if K > 1 and half > 0:  # which is false of nan, too
        if J > 1:
            # J times the sum of squared shares of the variances v is 1 + (sd of v / mean of v)²
            p_alike = p_of_alike(means.var() / J / se**2, J,
                                 1 + stats.variation(parts.spread_variance + 1e-20) ** 2, df)
        if first.effect == "bias":
            verdict = verdict_on(estimate - half, estimate + half, metric.margin, metric.sign)
            if settings == first.models == 1 and depends(
                    p_alike, {part_verdict(task, metric) for task in tasks.itertuples()}):
                verdict = "depends"
    return row | {
        "largest": f"{(metric.sign * means).sort_values(na_position='first').index[-1]} "
                   f"{metric.sign * (metric.sign * means).max():+.{metric.digits}f}",
        "settings": settings, "tasks": J, "subsamples": K, "se": se, "df": df,
        "estimate": estimate, "low": estimate - half, "high": estimate + half,
        "like_low": estimate - like_half, "like_high": estimate + like_half,
        "p_alike": p_alike, "verdict": verdict}


def part_verdict(part, metric):
    """The verdict on a row of tasks.csv or effects.csv by the interval that is shown."""
    return verdict_on(part.shown_low, part.shown_high, metric.margin, metric.sign)


def models_of(effects, mean):
    """The biases of the models whose mean is a row of effects.csv, with intervals that hold
    together."""
    models = effects[(effects[CELL] == mean[CELL]).all(axis=1) & (effects.models == 1)]
    half = stats.t.isf(TAIL / len(models), models.df) * models.se
    return models.assign(
        task=models.model, shown_low=models.estimate - half, shown_high=models.estimate + half)


def p_of_alike_models(units):
    """p-value of the two models that differ most: paired t over draws. It is not adjusted for the
    choice of these two: the models' intervals, which must have other verdicts, too, are."""
    of_draws = units.pivot_table("bias", "subsample", "model")
    means = of_draws.mean()
    return stats.ttest_rel(of_draws[means.idxmax()], of_draws[means.idxmin()]).pvalue


# What is printed, and the page


def publish(rows, metric, folder, command):
    """Print verdicts, tables and notes on each experiment and model: on means over settings, else
    on settings. Write the files. Return the tables as one."""
    rows = rows.assign(models=1, versions=rows.get("versions", "")).fillna({"versions": ""})
    tasks, effects = analyze(rows, metric)
    tasks.to_csv(folder / "tasks.csv", **CSV)
    effects.to_csv(folder / "effects.csv", **CSV)
    effects = effects.assign(shown_low=effects.low, shown_high=effects.high,
                             is_control=effects.experiment.str.endswith("-answers"))
    lines = with_boost(effects, metric)
    task_lines = with_boost(tasks, metric)
    # what is reported of each experiment and model: the mean over settings, or else each setting
    widest = lines.groupby(["experiment", "model"])["settings"].transform("max")
    # a mean over settings has no tasks below it: the table of models has all of it
    chosen = lines[(lines.settings == widest) & ((widest == 1) | lines.is_top)]
    control = "in its own table" if lines.is_control.any() else "none here; --with-answers adds it"
    form = {"index": False, "na_rep": "", "float_format": f"%.{metric.digits - 1}f"}
    key = key_of(metric)
    answers, sections, drawn, views = [], [], {}, []
    page = HEAD + div("small", f"{date.today()}: {command} ({len(rows)} rows)")
    cards = div("key", key)
    # its answer, table and notes, for the screen (answers, sections) and for the page (page, cards)
    for _, line in chosen.sort_values("models", ascending=False).iterrows():
        its_rows = part_of(rows, line)
        parts = part_of(task_lines, line)
        what_ran = f"{line.setting}, {line.model}"
        if line.models > 1:
            parts = models_of(lines, line)
            what_ran = f"{line.setting}, mean of {line.models} models"
        elif line.settings > 1:
            parts = parts[:0]
        table = judged_table(line, parts, metric)
        view = shown(table)
        done = f"{what_ran} (test texts without labels; control: {control})"
        if line.is_control:
            done = f"{what_ran} (control: pretraining texts carry labels, so a bias should show)"
        verdict, sentence = headline(line, table, metric)
        answers.append(wrap(f"{what_ran}: {verdict}. {sentence}"))
        sections.append(f"\n{wrap(done)}\n\n{view.to_string(**form)}\n")
        page += div("large", f"{what_ran}: {verdict}") + div("", sentence)
        cards += div("done", done) + view.to_html(border=0, **form)
        for note in notes(line, table, its_rows, metric, command):
            text, newline, typed = note.partition("\n")  # what to type stays on its line
            sections.append(wrap(text, "- ") + newline + typed)
            cards += div("note", text) + div("typed", typed)
        drawn[what_ran] = table
        views.append(view.assign(run=done))
    print(*answers, f"\n{key}", *sections, sep="\n")

    page += picture(drawn, metric, folder / "effects.png") + cards
    columns = ["bias", "boost", "subsamples", *MEANS]
    for title, closed in {
            "Words and intervals": div("small", GLOSSARY),
            "What was run": div("small", "\n".join(rows.versions.unique())),
            "All settings": lines[["setting", "model", "tasks", *columns]].to_html(**form),
            "All tasks": task_lines[[*CELL, "model", "task", *columns]].to_html(**form)}.items():
        page += f"<details><summary>{title}</summary>{closed}</details>\n"
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    print(f"\nReport, for a browser: {path.resolve()}")
    return pd.concat(views)


def with_boost(table, metric):
    """The rows of the bias, with both effects in words. weak: is the boost not above 0? is_top: no
    mean over models stands above the row."""
    table = table.assign(
        words=[in_words(*pair, metric) for pair in zip(table.estimate, table.shown_high)])
    # analyze gives both in one order
    bias, boost = [table[table.effect == effect].reset_index(drop=True) for effect in EFFECTS]
    return bias.assign(
        bias=bias.words, boost=boost.words,
        weak=metric.sign * boost.estimate <= boost.high - boost.estimate,
        is_top=bias.models == bias.groupby("experiment")["models"].transform("max"))


def in_words(estimate, high, metric):
    """Estimate and interval, with one more digit if an end would round to 0 or to the margin.
    Nothing of what is unknown."""
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
        keys += ["model", "models"]  # a model may be called "all"
    return table[(table[keys] == line[keys]).all(axis=1)]


def judged_table(line, parts, metric):
    """The parts (tasks or models), the most inflated first, and their mean, if they are several:
    rows of with_boost with the interval, the verdict and the words that are shown."""
    of_what = f"{line.models} models" if line.models > 1 else f"{line.tasks} tasks"
    rows = [row for _, row in parts.sort_values("estimate", ascending=metric.sign < 0).iterrows()]
    if len(parts) != 1:
        rows.append(pd.Series({**line, "task": f"mean of {of_what}"}))
    for row in rows:
        row["verdict"] = part_verdict(row, metric)
        remarks = []
        row["bias"] = in_words(row.estimate, row.shown_high, metric)
        row["inflated?"] = VERDICTS[row.verdict].format(metric.limit)
        row["below"] = row.shown_high < 0 if metric.sign > 0 else row.shown_low > 0
        # the last that applies: the verdict, barely learned, a weak test
        row["group"] = GROUPS[row.verdict].format(metric.limit)
        if row.below:
            remarks.append("lower" if metric.sign > 0 else "higher")
        row["barely"] = row.unseen < row.majority + 5
        if row.barely:
            remarks.append("barely learned")
            if row.verdict == "no":
                row["group"] = BARELY
        if row.weak and row.verdict in ("no", "yes-under", "open"):
            remarks.append("weak test")
            row["group"] = WEAK
        if remarks:
            row["inflated?"] += f" ({'; '.join(remarks)})"
    if line.verdict == "depends":
        rows[-1]["inflated?"] = "IT DEPENDS"
    return pd.DataFrame(rows)


def shown(table):
    """What is printed of a table. Of more than ten parts, the five most and the five least
    inflated."""
    table = table.astype({"subsamples": str}).rename(
        columns={"task": "part", "subsamples": "draws", "majority": "guess"})[COLUMNS]
    left_out = len(table) - 1 - 2 * NAMED
    if left_out > 0:
        table = pd.concat([table[:NAMED], pd.DataFrame({"part": [f"({left_out} between)"]}),
                           table[-NAMED - 1 :]])
    return table.dropna(axis=1, how="all")


def headline(line, table, metric):
    """The verdict in capitals, and a sentence that names the parts."""
    mean = table.iloc[-1]
    parts = table[:-1]
    if line.verdict == "none":
        reason = "TWO DRAWS THAT DIFFER ARE NEEDED" if metric.margin else "GIVE A --margin"
        return f"NO VERDICT: {reason}", f"The bias is {mean.bias}."
    if line.is_control:
        large = "NOT PASSED: no bias is shown"
        if table.verdict.str.contains("yes").any():
            large = "PASSED: with labels a bias shows, so this setup can detect one of that size"
        return f"CONTROL {large}", f"Bias: {some_of(table.task + ' ' + table.bias)}."
    large = VERDICTS[line.verdict].format(metric.limit).upper()
    if line.verdict == "no" and mean.group == WEAK:
        large = "NO INFLATION SEEN, BUT A WEAK TEST"
    if line.models > 1:
        large = large.replace("THE TASK", "THE MODEL")
    if line.verdict != "depends":
        average = "ON AVERAGE " if line.tasks > 1 else ""
        large = f"{average}{large} (bias {mean.bias})"
    if line.verdict == "no" and mean.group == BARELY:
        large += f", BUT {some_of(parts.task[parts.group == BARELY]) or mean.task} BARELY LEARNED"
    sentences = []
    for group, its in parts.groupby("group", sort=False):
        names = its.task if group == WEAK else its.task + " " + its.bias
        if group == "Open" and line.verdict == "no":
            large = f"OPEN FOR {some_of(names)}"  # in its place: no mean hides an open part
        else:
            sentences.append(f"{group}: {some_of(names)}.")
    return large, " ".join(sentences)


def some_of(names):
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def notes(line, table, rows, metric, command):
    """Yield sentences: what weakens the verdict, what it means, what to do next (and, each on a
    line of its own, what to type)."""
    tests = table[:-1] if len(table) > 1 else table
    weak = tests[tests.group == WEAK]
    if not line.boost:
        yield f"The boost is unknown: {metric.name}_base, the score before training, is empty."
    if line.verdict == "none":
        return
    if tests.below.any():
        yield (f"Lower on seen texts: {some_of(tests.task[tests.below])}. This is no inflation, "
               "but may mask some. Possible cause: the model has read the test texts, but not the "
               "labeled ones that it learns from, so the two look different to it. To check: "
               "--pretrain-on-labeled (docs/verdicts.md). If you split the items yourself: Were "
               "the halves mixed up?")
    if tests.barely.any():
        yield (f"Barely learned: {some_of(tests.task[tests.barely])}. The unseen score is less "
               "than 5 points above guess, or below it, so inflation may have no room to show. "
               "Next: a larger --m or --model.")
    if pd.notna(line.like_low):
        words = in_words(line.estimate, line.like_high, metric)
        yield (f"Over all tasks like these {line.tasks}, expect a mean bias of {words}. That of "
               f"one task may differ more (here the largest: {line.largest}).")
    if line.is_control:
        return
    if line.p_alike < LEVEL:
        yield (f"The tasks' biases differ by more than chance (p = {line.p_alike:.1g}, F test; "
               f"limit {LEVEL}): judge each task, not the mean.")
    elif line.tasks > 1:
        yield ("The tasks' biases are not shown to differ "
               f"(p = {line.p_alike:.1g}, F test; limit {LEVEL}).")
    loose = tests[tests.verdict.str.contains("open") & (tests.group != WEAK)]
    one = line.settings == line.models == 1
    if len(loose) and one:
        yield more_draws(line, loose[:1], rows, metric, command)
    if len(weak):
        learned = weak[~weak.barely]
        what = (f"Weak test: {some_of(weak.task)}. Pretraining on other texts is not shown to help "
                "(where the boost [ ] is all below 0, it hurts), so there was little to inflate. "
                f"Next, for {some_of(learned.task) or 'what is learned'}: another learning rate, "
                "such as the 3e-4 of the command, more --pretrain-epochs or a larger --model. "
                "Choose by the boost, never by the bias (docs/own_texts.md). Rows are added to "
                "the file; give each recipe its own --experiment.")
        if one and len(learned):
            what += rerun(rows, learned.task, f"{line.experiment}-other-rate", command,
                          "--subsamples", line.subsamples, "--pretrain-lr", "3e-4")
        yield what


def more_draws(line, part, rows, metric, command):
    """How many more draws of a task would narrow its interval to half the margin, or to half if it
    is narrower; what they tell, and the commands. part: a table of one row. The spread of few draws
    says too little for that."""
    task = part.iloc[0]
    margin = metric.margin
    half = task.shown_high - task.estimate
    goal = half / 2 if half < margin / 2 else margin / 2
    if task.subsamples < MIN_DRAWS:
        total = MIN_DRAWS
        what = f"Next: {task.task} needs {total} draws for a first look (rows are added)."
    else:
        total = draws_needed(part, TAIL / line.tasks, goal)
        now = f"{metric.sign * task.estimate:+.{metric.digits}f}"
        what = (f"Next: {total - task.subsamples} more draws of {task.task} ({total} in all, added "
                f"to the file) narrow its inflation, now {now}, to about ±{goal:.2g}. If it is "
                f"then below {goal:.3g}: NO; from {margin - goal:.3g} on: YES, perhaps by over "
                f"{metric.limit} (between them: by under); from {margin + goal:.3g} on: YES, by "
                f"over {metric.limit}. Likeliest: the answer in whose range {now} lies. "
                f"Decide on {total} now: to stop when the answer pleases voids the 89%.")
    return what + rerun(rows, [task.task], line.experiment, command, "--subsamples", total)


def rerun(rows, tasks, experiment, command, *flags):
    """What to type for runs of tasks in the setting of the rows, and to judge them, each on a line.
    Nothing if the rows do not tell the flags of their run."""
    last = rows[rows.task.isin(tasks)].iloc[-1]
    if " flags" not in last.versions:
        return ""
    script = "run_zero_shot.py" if " quantize: " in last.versions else "run_experiment.py"
    typed = re.findall(" flags (.*) torch ", last.versions)
    names = [] if re.search(" --(csv|hub)[ =]", last.versions) else ["--tasks", *tasks]
    flags = ["--experiment", experiment, *names, "--m", last.m, "--n", last.n, *flags, "--out",
             last.file]
    typed = [script, *typed, shlex.join(map(str, flags))]  # the last of two equal flags counts
    took = f"\n# the last draw of {last.task} took {last.get('seconds', '?')} s on a core or GPU"
    return f"{took}\npython {' '.join(typed)}\npython {command}"


def key_of(metric):
    """The question and what the columns mean: five lines."""
    above, below = ("above", "below ") if metric.sign > 0 else ("below", "above -")
    return f"""\
Does pretraining on the test texts inflate the score, and by over {metric.limit} (--margin)?
{metric.words}. base: no added pretraining; unseen: on n other texts; seen: on n test texts.
boost = unseen - base: fair gain. bias = seen - unseen: unfair gain. guess: most common class.
Draw: n test, n other, m labeled texts. [ ]: 89% interval; parts' bias, wider: 89% that all hold.
YES: bias [ ] all {above} 0; else NO: all {below}{metric.limit}; else OPEN. weak: boost [ ] not \
all {above} 0."""


def div(kind, text):
    text = html.escape(text)
    if Path("docs").exists():  # the page lies in fits/NAME
        text = re.sub(r"docs/\w+\.md", r'<a href="../../\g<0>">\g<0></a>', text)
    return f'<div class="{kind}">{text}</div>\n'


def picture(tables, metric, path):
    """Save effects.png. Return its HTML."""
    draw_effects(tables, metric).savefig(path, dpi=130)
    coded = base64.b64encode(path.read_bytes()).decode()
    if hasattr(builtins, "display"):  # notebook
        builtins.display({"image/png": coded}, raw=True)
    return f'<img alt="The effects, drawn" src="data:image/png;base64,{coded}">'


def draw_effects(tables, metric):
    """The biases of the parts and, in bold, their mean, or only of the mean if there are many.
    tables: of judged_table, by title."""
    rows = []
    few = sum(map(len, tables.values())) <= MOST_DRAWN
    for title, table in tables.items():
        rows.append({"task": title, "weight": "bold"})
        rows += (table if few else table[-1:]).to_dict("records")
        rows[-1]["weight"] = "bold"
    rows = pd.DataFrame(rows)
    figure = Figure((8, 1.5 + 0.27 * len(rows)), layout="constrained")
    axis = figure.subplots()
    axis.errorbar(rows.estimate, rows.index, xerr=rows.shown_high - rows.estimate, fmt="ko")
    axis.axvline(0, color="gray", ls="--")
    if metric.margin:
        axis.axvline(metric.sign * metric.margin, color="#cc3311", ls=":")
    figure.supxlabel(
        f"bias = seen - unseen, {metric.unit}, with 89% intervals (dashed: 0; dotted: margin)")
    axis.set_yticks(rows.index, rows.task.str[:60], parse_math=False)  # "$" is no formula
    for label, weight in zip(axis.get_yticklabels(), rows.weight.fillna("normal")):
        label.set_fontweight(weight)
    axis.set_ylim(len(rows) - 0.5, -0.5)
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
            table = tables[*cell, effect].filter(regex="beta|diff", axis="index")
            print(table.to_string(columns=["mean", "hdi_5.5%", "hdi_94.5%", "r_hat", "warning"]))
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
        table = arviz.summary(predict(trace.posterior, rows), ["~^([acz]|.*__)$"], "regex",
                              hdi_prob=SHARE, round_to="none")
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
    predicted = posterior.copy()
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
    try:
        yield
        print(end="", flush=True)  # also without a stdout, as under cron
    except KeyboardInterrupt:
        raise SystemExit("stopped. Run the same command again: written rows and audits stay")
    except BrokenPipeError:
        os._exit(1)  # head has read enough
    except Exception as error:
        if os.environ.get("TRACEBACK"):
            raise
        raise SystemExit(f"error: {brief(error)}")


def brief(error, limit=290):
    """An error on one line, of 3 rows of a screen at most. A long path loses its start."""
    text = str(error).replace(
        "'utf-8' codec", "save it as UTF-8 text (if compressed, unpack it; a spreadsheet: as CSV):")
    if " " not in text:  # as of KeyError
        text = repr(error)
    text = re.sub(r"\S{40,}(\S{40})", r"...\1", text)
    return textwrap.shorten(text, limit, placeholder=" ...")


def user_path(text):
    """The path of a flag. bash leaves the ~ of --out=~/mine.csv as it is."""
    return Path(os.path.expanduser(text))
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
        raise ValueError(f"{path} has no column {metric}_extra, but {lines[0]:.120}. A table of "
                         "answers? contamination_test.py --answers makes results of it")
    mark = max(",;\t", key=lines[0].count)
    # line by line: one cut short in quotes would swallow the next
    header, *lines = [next(csv.reader([line], delimiter=mark), []) for line in lines]
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
    rows = rows.replace("", np.nan)
    needed = [*RUN[:-1], f"{metric}_extra", f"{metric}_test"]
    shares = ["majority", "discordant", "discordant_on_extra", *columns_of("acc")]
    for name in [*RUN, "num_classes", "item_variance_boost", *shares, *columns_of(metric)]:
        rows[name] = rows.get(name, np.nan)
        empty = rows[name].isin(["NA", "nan", np.nan])  # but for names: a task may be called NA
        if name not in RUN[:3]:
            rows[name] = pd.to_numeric(rows[name].replace(",", ".", regex=True), errors="coerce")
        refuse(rows, rows[name].isna() & (~empty | (name in needed)),
               f"column {name} is missing, empty or not like 0.5")
        if name in shares and metric in POINTS:
            refuse(rows, ~rows[name].fillna(0).between(0, 1), f"{name} is not between 0 and 1")
    rows[RUN[3:]] = rows[RUN[3:]].fillna(0).astype(int)
    for flag in FILTERS:
        values = rows[flag.removesuffix("s")].astype(str)
        wanted = flags.get(flag) or [*values]
        for name in {*wanted} - {*values}:
            raise ValueError(f"no rows have --{flag} {name}. There are {[*values.unique()]}")
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


# --- shared: verdict ---
TAIL = 0.055  # of an 89% interval, on each side (the paper's)
LEVEL = 0.05  # p below it: what is compared differs
LOWER_IS_BETTER = "nll loss bpb perplexity brier wer error".split()  # metrics
VERDICTS = {"yes": "YES, by over {}", "yes-open": "YES, perhaps by over {}",
            "yes-under": "YES, by under {}", "no": "NO", "open": "OPEN",
            "depends": "IT DEPENDS ON THE TASK", "none": "NO VERDICT"}


def verdict_on(low, high, margin, sign=1):
    """Is a score inflated, and by more than the margin? By its bias's interval: one of VERDICTS.
    sign: -1 if lower is better."""
    if sign < 0:
        low, high = -high, -low
    if not (margin and low < high):  # of nan, too
        return "none"
    if low > margin:
        return "yes"
    if high < margin:
        return "yes-under" if low > 0 else "no"
    return "yes-open" if low > 0 else "open"


def depends(p_alike, verdicts):
    """Do parts that differ by more than chance lie on other sides of the margin (a yes-open counts
    as above it)? Then no mean speaks for all. verdicts: a set."""
    below = {"no", "yes-under"} & verdicts
    return p_alike < LEVEL and below and {"yes", "yes-open"} & verdicts


def p_of_alike(F, J, concentration, df):
    """p-value of J equal means by Brown and Forsythe's F with the degrees of freedom of Mehrotra
    (1997), of which df is the denominator's; of two means, Welch's t test. concentration: J times
    the sum of squared shares of their variances, 1 if these are equal."""
    top = (J - 1) ** 2 / (1 + (J - 2) * concentration)
    return stats.f.sf(F, min(J - 1, top), min(df, 1e9))  # SciPy knows no infinite df


def wrap(text, start=""):
    return textwrap.fill(text, 100, initial_indent=start, subsequent_indent=" " * len(start),
                         break_on_hyphens=False)
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
                          metric is accuracy, or m is 0: answers of contamination_test.py (nan
                          without `discordant`), else by rounding
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
    if metric == "acc" or rows["m"].max() == 0:  # crossed answers may have any score
        variances = 0  # the sum over both sets of the variance of one text's change
        for ending in ("", "_on_extra"):
            change = rows[f"{metric}_test{ending}"] - rows[f"{metric}_extra{ending}"]
            variances += rows[f"discordant{ending}"] - change**2
        added["text_variance_bias"] = (scale**2 / (4 * n) * variances).where(
            crossed, added["text_variance_boost"])
    if metric == "acc":
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


def interval(tasks, tail=(1 - SHARE) / 2):
    """(standard error, degrees of freedom, half-width) of the mean over the rows of task_means: the
    wider of two 89% intervals, Student's t by spread_variance (with Satterthwaite's degrees of
    freedom) and Normal by text_variance. nan if a spread_variance is. tail: outside, a side."""
    spread = tasks["spread_variance"].to_numpy().clip(1e-20)  # if all were 0, df would be 0 / 0
    df = [spread.sum() ** 2 / (spread**2 / (tasks["subsamples"] - 1).clip(1)).sum(), math.inf]
    se = np.sqrt([spread.sum(), tasks["text_variance"].sum()]) / len(tasks)
    half = stats.t.isf(tail, df) * se
    wider = half.argmax()  # argmax also picks a nan
    return se[wider], df[wider], half[wider]
# --- end shared ---


def parse_args(argv):
    parser = argparse.ArgumentParser(
        epilog=GLOSSARY,
        description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", metavar="FILE", nargs="*", type=user_path, default=[Path("results.csv")],
        help="default results.csv")
    add("--margin", type=float,
        help="the bias that would matter; default 1 (acc, f1), else none")
    add("--metric", default="acc",
        help="acc, f1, nll, or X with columns X_base, X_extra, X_test; default acc")
    add("--plain", action="store_true", help="test on one set, as the paper does; default both")
    add("--lower-is-better", action="store_true",
        help=f"as of an error; default for {', '.join(LOWER_IS_BETTER)}")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="use only these; default all")
    add("--paper-model", action="store_true", help="fit the paper's model of accuracy, with uv run "
        f"--with {PAPER_MODEL_NEEDS} or requirements.txt; default no")
    add("--no-interaction", action="store_true", help="leave out W, effects by task; default no")
    add("--draws", type=int, default=1000,
        help="draws per chain; half as many tune it; default 1000")
    add("--out", type=user_path, metavar="FOLDER", help="of page and tables; default fits/FILE")
    args = parser.parse_args(argv)
    args.command = shlex.join(["fit_model.py", *(sys.argv[1:] if argv is None else argv)])
    if args.margin is not None and not 0 < args.margin < math.inf:
        parser.error("--margin must be positive")
    name = "+".join(path.stem for path in args.paths)
    if args.metric != "acc":
        name += f".{args.metric}"
    args.out = args.out or Path("fits", name)
    return args


@errors_on_one_line()
def main(argv=None):
    args = parse_args(argv)
    rows = pd.concat([read_rows(path, args.metric).assign(file=str(path)) for path in args.paths])
    rows = clean_rows(rows, args.metric, args.plain, vars(args))
    args.out.mkdir(parents=True, exist_ok=True)
    metric = metric_of(args.metric, args.margin, args.lower_is_better)
    table = publish(rows, metric, args.out, args.command)
    if args.paper_model and not run_paper_model(
            rows, not args.no_interaction, args.draws, args.out / "posterior.csv"):
        sys.exit(3)
    return table


if __name__ == "__main__":  # in a notebook or VS Code flags go into the list: ["--m", "50"]
    main([] if "__file__" not in globals() or "kernel_launcher" in sys.argv[0] else None)
