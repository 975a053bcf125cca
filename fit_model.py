# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "matplotlib==3.10.9"]
# ///
"""Does pretraining on unlabeled test texts inflate the score? This script answers from results.csv.

It follows sections 5 to 8 of the paper (Dubey 2024).

    python fit_model.py results.csv   # page and tables, 3 seconds
    python fit_model.py results.csv --paper-model   # the paper's model: minutes

In a notebook: effects_table(pd.read_csv("results.csv"), margin=1.0)

Writes report.html, effects.png and tables to fits/results/, with the columns
    effects.csv: estimate, low, high (these tasks), like_low, like_high (tasks like these), half
        (of the interval: high - estimate), verdict (yes: by over the margin, yes-open: perhaps by
        over it, yes-under, no, open, none), p_alike (do tasks differ?), ... for each setting (m and
        n empty: their mean) and model (models: how many a row is the mean of; if more than one,
        model is "all")
    tasks.csv: the same for each task; shown_low, shown_high, by which it is judged; p (one-sided
        sign flips of a bias), p_adjusted (Benjamini-Hochberg)
    posterior.csv: ArviZ's summary; warning (not converged)
"""

import argparse
import base64
import bisect
import contextlib
import csv
import html
import math
import os
import re
import sys
import textwrap
import warnings
from datetime import date
from pathlib import Path
from typing import NamedTuple

try:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure
    from scipy import special, stats
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}. Run pip install -r requirements.txt, or start this script "
                     "with uv run fit_model.py")

os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")  # nutpie needs no C compiler
warnings.simplefilter("ignore", FutureWarning)  # of ArviZ

FEWEST = {True: 8, False: 5}  # draws of a task that are advised, by whether run scripts make them
MOST = 100  # draws that are advised to show a boost
ROOM = 5  # points above chance; an unseen score that is closer leaves inflation little room
COLUMNS = "part draws chance base unseen seen boost bias inflated?".split()  # of the table
YES = ("yes", "yes-open", "yes-under")  # verdicts
COLORS = dict.fromkeys(YES, "#cc3311") | {  # of answers, what matters most first
    "open": "#aa5500", "remark": "#666666", "none": "#666666", "no": "#007755",
    "control": "#335599"}
NUMBERS = {"na_rep": "", "float_format": "%#.3g"}  # of a printed table
NAMED = 5  # names in a sentence
MANY = 20  # tasks from which others like them can be told
PAPER_MODEL_NEEDS = "pymc==5.28.5,nutpie==0.16.8,arviz==0.23.4,pytensor==2.38.3"
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # acceptance, times tuning, times draws
EFFECTS = {"bias": ("extra", "test"), "boost": ("base", "extra")}  # control, treatment on `test`
MEANS = ["chance", "base", "unseen", "seen"]
NOT_WRITTEN = ["shares", "words"]  # columns of `analyze`
KINDS = {  # of texts that pretraining read
    "control": "control: both sets of texts with their labels",
    "held-out": "released and held-out items",
    "labeled-read": "test texts and the m labeled texts, all without labels",
    "plain": "test texts without labels"}
CAUSES = {  # by kind: why seen texts may score lower
    "held-out": "Were the halves swapped, or not drawn at random? Is lower better "
                "(--lower-is-better)?",
    "labeled-read": "Here the labeled texts were read, too, so the cause is not known.",
    "plain": "A possible cause: to the model, the labeled texts look different from test texts "
             "that it has read. A run with --pretrain-on-labeled bears on this: make one, or "
             "look at it if it is here. (In your own training: were the halves swapped, or not "
             "drawn at random? Is lower better, --lower-is-better?)"}
CONTROLS = {  # by whether it is passed
    True: "CONTROL PASSED, as it should be: the labels were in the texts, and the bias is found. A "
          "smaller one may be missed: see how wide the interval of the run without labels is.",
    False: "CONTROL NOT PASSED: the labels were in the texts, yet no bias is shown, so a NO of "
           "this set-up means little. Next: a larger model or more texts."}
KEY_OF_RUNS = """\
part: a task, or the mean of all
draw: a random choice of texts, with a base, an unseen and a seen score (of a mean: the fewest of \
its tasks and settings)
m: labeled texts of a draw, from which the model learns the classes (zero-shot: they are left out)
n: unlabeled texts in each of the two sets of a draw. A model is pretrained on each set, and both \
are tested on both
base: {metric.words} of the model as it comes, without further pretraining
unseen: the same after pretraining on the other set (of a control: with its labels)
seen: the same after pretraining on the very texts of the test
boost: unseen - base: what pretraining on such texts adds, the fair gain
bias: seen - unseen: what having read these very texts adds, the inflation (it can be below 0: to \
the model, texts that it has read may also look different from labeled ones that it has not)
chance: score of blind guesses, 100 / classes, since the labeled texts have equally many of each \
class
"""
KEY_OF_HALVES = """\
n: released items, and as many held-out ones (if not, about their mean)
seen: {metric.words}, the mean of the released items
unseen: that of held-out items which are as hard, judging by the clean models
bias: seen - unseen. Of innocent models chance calls about 1 in 18 a YES
"""
KEY_OF_ANSWERS = """\
[ , ]: 89% interval: it should hold the true value 89 times in 100 (with a third digit where two \
would round an end to 0 or to the margin)
YES: the whole interval of the bias says that seen texts score better: by over {metric.limit} if \
all of it lies beyond that, perhaps by over if it holds {metric.limit}, else by under
OPEN: the interval holds 0 and {metric.limit}, so too few draws to tell
NO: no YES, and the interval ends before {metric.limit}: so much is ruled out, less is possible \
(seen is worse: the whole interval says that seen texts score worse)
weak test: NO or OPEN, but the boost is not shown to help, or unseen is less than {room} points \
above chance (before rounding), so that inflation may have little room; a mean: if most of its \
tasks are so
tasks: where there are several, the interval of the bias of each is wider, so that all of them \
hold together 89 times in 100: of runs without inflation, at most 5.5% have a task with a YES
mean: its interval is for the mean of these very tasks. Where they differ by more than chance (F \
test, p below 0.05), judge each
"""
INTERVALS = """\
An 89% interval is the wider of two: Student's t, from how much draws differ, and Normal, from the \
draw of texts or rounding. The bias of one of \
J tasks or models has an interval at 5.5% / J a side, so that an innocent one is called inflated \
in at most 5.5% of tables. Read a verdict at the number of draws that was fixed before. The margin \
(--margin) is the bias that would matter. What each verdict means, and what to do next: \
docs/verdicts.md. README.md explains the experiment."""
HEAD = """<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Does pretraining on the test texts inflate the score?</title><style>
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 sans-serif }
h1 { font-size: 1.6rem; margin: 0 }
h2 { font-size: 1rem; margin: 1.8rem 0 .4rem }
div { margin: .3em 0 }
.card { border-left: .4rem solid #666; background: #f6f6f6; padding: .6rem 1rem; margin: 1rem 0 }
.card h2 { margin: 0; font-weight: normal; color: #666 }
.card div:first-of-type { font-weight: bold; font-size: 1.15rem }
.wide, table { display: block; overflow-x: auto }
img { min-width: 56rem; width: 100% }
table { border-collapse: collapse }
td, th { padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap; font-size: .8rem }
tr { border-bottom: 1px solid #ddd }
td:first-child, th:first-child, .key td { text-align: left }
.key td { white-space: normal }
li, details div { overflow-wrap: anywhere }
li { margin: .3rem 0 .3rem 1.2rem }
details { margin-top: 1rem }
details div { font-size: .8rem; color: #666; white-space: pre-line }
</style><h1>Does pretraining on the test texts inflate the score?</h1>
"""


class Metric(NamedTuple):
    name: str  # of columns: acc_base, ...
    words: str
    unit: str
    sign: int  # -1 if lower is better, else 1
    margin: float  # the bias that would matter, or None: no verdict
    limit: str  # the same in words
    digits: int  # of effects


def metric_of(name, margin, lower_is_better, rows=None):
    """The metric and its margin: if not given, 1 point, or 5 if the rows are answers (m = 0), which
    vary more. Refuses a margin that says nothing."""
    words, unit, digits, sign = name, name, 4, 1
    if name in POINTS:
        words, unit, digits = f"{name} in %".replace("acc", "accuracy"), "points", 2
        if margin is None:
            margin = 1.0 if rows.m.any() else 5.0
    elif (margin or 0) > 1 and rows[f"{name}_test"].between(0, 1).all():
        raise ValueError(f"{name} lies between 0 and 1, so a --margin of {margin:g} says nothing")
    limit = f"{margin:g} {unit}" if margin else "unknown size"
    if is_error(name) if lower_is_better is None else lower_is_better:
        words, sign = f"{words} (lower: better)", -1
    return Metric(name, words, unit, sign, margin, re.sub("^1 points", "1 point", limit), digits)


def effects_table(rows, margin=None, metric="acc", lower_is_better=None):
    """The table of effects.csv from rows in the columns of results.csv, as pd.read_csv gives them.
    margin: in points (1 if not given) for acc and f1; for other metrics in their unit, and no
    verdict if not given."""
    rows = clean_rows(rows, metric)
    lines = analyze(rows, metric_of(metric, margin, lower_is_better, rows))
    return lines[lines.is_mean].drop(columns=NOT_WRITTEN).reset_index(drop=True)


def analyze(rows, metric):
    """A row for each effect on each task, and on their mean, of each model: in each setting and, if
    all settings have all tasks, in the mean over settings (m and n are empty). shown_low,
    shown_high: the ends that judge and are shown; those of the biases of J tasks hold together."""
    units, tables = unit_table(rows, metric), []
    for _, its_units in units.groupby(["experiment", -units.models, "model"]):
        parts = [cell_units for _, cell_units in its_units.groupby(CELL)]
        tasks = its_units.groupby(CELL)["task"].nunique()
        if len(tasks) > 1 and tasks.min() == its_units.task.nunique():
            parts.insert(0, its_units)  # else a task would weigh less in their mean, silently
        for effect in EFFECTS:
            tables += [effect_rows(part, effect, metric) for part in parts]
    return with_verdicts(pd.concat(tables), metric)


def with_verdicts(table, metric):
    """With the ends of intervals, and verdicts on biases, unless there is a reason for none."""
    for name in ("", "like_", "shown_"):
        table[f"{name}low"] = table.estimate - table[f"{name}half"]
        table[f"{name}high"] = table.estimate + table[f"{name}half"]
    ends = zip(table.shown_low, table.shown_high)
    table["verdict"] = [verdict_on(*pair, metric.margin, metric.sign) for pair in ends]
    table["reason"] = table.reason.fillna(table.reason_unless_yes.where(table.verdict != "yes"))
    table["verdict"] = table.verdict.where(table.reason.isna() & (table.effect == "bias"), "none")
    table["words"] = [in_words(*pair, metric) for pair in zip(table.estimate, table.shown_half)]
    return table


def unit_table(rows, metric):
    """One row per cell, model, task and subsample, in percent and points: means over seeds. Where
    the models of an experiment have the same settings, tasks and subsamples, two or more, also a
    row of their mean: model "all", models: how many. (Crossed answers, m = 0, are of methods, which
    no mean should hide.)"""
    variances = ["text_variance_bias", "text_variance_boost", "one_answer_variance",
                 "item_variance_boost"]
    numbers = [*MEANS, *EFFECTS, "texts", *variances, "bias_se", "bias_df"]
    names = [*CELL, "model", "models", "task", "subsample"]
    # the labeled texts have equally many of each class, so blind guesses score 1 / classes
    chance = 100 / rows.num_classes if metric.name == "acc" else math.nan
    rows = add_effects(rows, metric.name).assign(models=1, chance=chance)
    # seeds share texts: the variance of their mean is at most the mean of their variances
    groups = rows.groupby(names)
    units = groups[numbers].mean(skipna=False).join(groups[REASONS].first()).reset_index()
    tables = [units]
    for _, table in units.groupby("experiment"):
        models = table.model.nunique()
        answered = table.groupby([*CELL, "task", "subsample"])["model"].nunique()
        # several models, and each has all
        if answered.min() == models > 1 and table.m.min() > 0:
            mean = table.assign(model="all", models=models)
            mean = mean.groupby(names)[numbers].mean(skipna=False)
            # assumes that models change different answers; else the spread widens the interval
            mean[variances] /= models
            tables.append(mean.reset_index())
    units = pd.concat(tables, ignore_index=True)
    return units.round(9)  # equal effects stay equal


def effect_rows(units, effect, metric):
    """The rows of `analyze` for an effect on the tasks of one model, and on their mean, in one
    setting or in the mean over several."""
    settings = units.groupby(CELL).ngroups
    means = units.groupby(["task", "m", "n"])[[*MEANS, effect]].mean(skipna=False)
    means = means.groupby("task").mean(skipna=False).rename(columns={effect: "estimate"})
    J, estimates, name = len(means), means.estimate, f"mean of {len(means)} tasks"
    means.loc[name] = means.mean(skipna=False)
    shares = task_shares(units, effect)
    means["shares"] = [*[share for _, share in shares.groupby("task")], shares]
    means["subsamples"] = [share.subsamples.min() for share in means.shares]
    means[REASONS] = units.groupby("task")[REASONS].first()
    # a task with one score everywhere does not silence the mean
    means.loc[name, REASONS] = units[REASONS].where(units.bias_se != 0).bfill().iloc[0]
    means[["se", "df", "half"]] = [*map(interval, means.shares)]
    tail = TAIL / J if effect == "bias" else TAIL
    means["shown_half"] = [interval(share, tail)[2] for share in means.shares]
    se, df, means.loc[name, "shown_half"] = means.loc[name, ["se", "df", "half"]]
    like_half = p_alike = math.nan
    if J > 1:
        # J times the sum of squared shares of the variances v is 1 + (sd of v / mean of v)²
        p_alike = p_of_alike(estimates.var() / J / se**2, J,
                             1 + stats.variation(shares.spread_variance + 1e-20) ** 2, df)
    if J >= MANY:
        like_half = stats.t.isf(TAIL, J - 1) * estimates.sem()
    facts = units[["experiment", "model", "models", "m", "n"]].iloc[0]
    facts["setting"] = title_of(facts.m, facts.n)
    if settings > 1:
        facts[["m", "n", "setting"]] = "", "", (
            f"mean over m in {sorted({*units.m.tolist()})}, n in {sorted({*units.n.tolist()})}")
    if settings == facts.models == 1 and effect == "bias" and metric.name == "acc":
        changes = units.bias / 100 * units.texts  # of right answers
        means["p"] = p = changes.groupby(units.task).agg(sign_flip_p)
        means["p_adjusted"] = pd.Series(stats.false_discovery_control(p), p.index)
    return means.reset_index().assign(
        **facts, effect=effect, settings=settings, tasks=J, is_mean=means.index == name,
        like_half=like_half, p_alike=p_alike)


def task_shares(units, effect):
    """What `interval` takes, for each task (its rows) and for their mean (all rows): a row per task
    and m with subsamples, spread_variance, by how much subsamples differ (nan if there is one, or
    if they are equal and nothing is known of their texts), and text_variance, by the draw of the
    texts. Models share the texts of a subsample, which also overlap across n, so the deviations
    that it contributes are added, then squared; the variances by its texts are only added."""
    groups = units.groupby(RUN[:5])
    K = groups[effect].transform("size")
    weight = units.task.nunique() / (groups.ngroups * K)  # of a subsample in the mean of its task
    # K / (K - 1) makes the sum of squares an unbiased estimate of the variance
    deviation = (units[effect] - groups[effect].transform("mean")) * np.sqrt(K / (K - 1))
    text_variance = units[f"text_variance_{effect}"]
    if effect == "bias":
        text_variance = text_variance + units.one_answer_variance / K
    else:  # all draws of crossed answers share their items, so more draws do not narrow this
        text_variance = np.fmax(text_variance, units.item_variance_boost * K)
    draws = units.assign(subsamples=K, deviation=weight * deviation,
                         text_variance=weight**2 * text_variance)
    sums = draws.groupby(["task", "m", "subsample"])[["deviation", "text_variance"]]
    sums = sums.sum(min_count=1)
    sums = sums.assign(deviation=sums.deviation**2).groupby(["task", "m"]).sum(min_count=1)
    sums *= units.m.nunique() ** 2  # undoes that `interval` takes a mean of rows
    shares = sums.join(draws.groupby(["task", "m"])[["subsamples", "bias_se", "bias_df"]].min())
    known = (shares.subsamples > 1) & (sums.max(axis=1) > 0)
    # contamination_test.py knows the error of a bias between released and held-out items
    return shares.assign(
        df=shares.bias_df.fillna(shares.subsamples - 1),
        spread_variance=(shares.bias_se**2).fillna(sums.deviation.where(known)),
        text_variance=shares.text_variance.where(shares.bias_se.isna(), 0))


def draws_needed(share, tail, goal, fewest):
    """How many draws narrow the interval of a task to ± goal."""
    K = share.subsamples.min()

    def is_narrow(draws):
        more = (share * K / draws).assign(df=draws - 1)
        return interval(more, tail)[2] <= goal

    return bisect.bisect_left(range(500 * K), True, max(K, fewest), key=is_narrow)


def sign_flip_p(changes):
    """One-sided p-value of the sum of the changes under random signs, exact by convolution. Changes
    are numbers of answers, or means over up to six seeds: whole numbers of sixtieths."""
    changes = (60 * changes).round().astype(int)
    share = np.ones(1)  # of choices of signs, by the sum of what gets a plus
    for size in changes.abs():
        share = (np.pad(share, (0, size)) + np.pad(share, (size, 0))) / 2
    observed = (changes.abs().sum() + changes.sum()) // 2
    return min(share[observed:].sum(), 1.0)


# Effects, intervals, verdicts

TAIL = 0.055  # of an 89% interval, on each side (the paper's)
LEVEL = 0.05  # p below it: what is compared differs
VERDICTS = {"yes": "YES, by over {}", "yes-open": "YES, perhaps by over {}",
            "yes-under": "YES, by under {}", "open": "OPEN", "no": "NO, not over {}",
            "none": "NO VERDICT"}
SHARE = 0.89  # coverage of every interval (the paper's)
POINTS = ("acc", "f1")  # metrics whose differences are in percentage points


def add_effects(rows, metric="acc"):
    """Add columns to a table of rows, a subsample each:
    base, unseen, seen    scores, in percent if the metric is in POINTS; means over both sets where
                          `arms` is "crossed"
    boost, bias           unseen - base and seen - unseen
    text_variance_boost   variance of the boost by rounding to 1 / n
    text_variance_bias    of the bias, by the draw of the 2n texts if arms are crossed and the
                          metric is accuracy, or m is 0: answers of contamination_test.py (nan
                          without `discordant`), else by rounding
    texts                 how many are tested
    one_answer_variance   what one more text of each set that is answered differently would add to
                          that draw's variance; / K in the mean of K subsamples (else 0)"""
    crossed, n = rows["arms"] == "crossed", rows["n"]
    scale = 100 if metric in POINTS else 1
    added = {}
    for name, arms in CROSSED.items():  # *_on_extra is nan where arms are plain
        added[name] = scale * rows[[f"{metric}_{arm}" for arm in arms]].mean(axis=1)
    added["boost"] = added["unseen"] - added["base"]
    added["bias"] = added["seen"] - added["unseen"]
    added["text_variance_boost"] = added["text_variance_bias"] = (scale / n) ** 2 / 12
    added["item_variance_boost"] = scale**2 * rows["item_variance_boost"]
    added["one_answer_variance"] = crossed * (metric == "acc") * 100**2 / (2 * n**2)
    added["texts"] = n * (1 + crossed)
    if metric == "acc" or rows["m"].max() == 0:  # crossed answers may have any score
        variances = 0  # the sum over both sets of the variance of one text's change
        for ending in ("", "_on_extra"):
            change = rows[f"{metric}_test{ending}"] - rows[f"{metric}_extra{ending}"]
            variances += rows[f"discordant{ending}"] - change**2
        added["text_variance_bias"] = (scale**2 / (4 * n) * variances).where(
            crossed, added["text_variance_boost"])
    return rows.assign(**added)


def interval(shares, tail=TAIL):
    """(standard error, degrees of freedom, half-width) of the mean over the rows of task_shares:
    the wider of two 89% intervals, Student's t by spread_variance (with Satterthwaite's degrees of
    freedom) and Normal by text_variance. nan if a spread_variance is. tail: what is outside, on
    each side."""
    spread = shares["spread_variance"].to_numpy().clip(1e-20)  # if all were 0, df would be 0 / 0
    df = [spread.sum() ** 2 / (spread**2 / shares["df"].clip(1)).sum(), math.inf]
    se = np.sqrt([spread.sum(), shares["text_variance"].sum()]) / len(shares)
    half = stats.t.isf(tail, df) * se
    wider = half.argmax()  # argmax also picks a nan
    return se[wider], df[wider], half[wider]


def verdict_on(low, high, margin, sign=1):
    """Is a score inflated, and by more than the margin? By its bias's interval: one of VERDICTS.
    margin: None gives no verdict. sign: -1 if lower is better."""
    if margin is not None and not 0 < margin < math.inf:
        raise ValueError(f"the margin is {margin}: give a positive number")
    if sign < 0:
        low, high = -high, -low
    if not (margin and low < high):  # of nan, too
        return "none"
    if low > margin:
        return "yes"
    if high < margin:
        return "yes-under" if low > 0 else "no"
    return "yes-open" if low > 0 else "open"


def p_of_alike(F, J, concentration, df):
    """p-value of J equal means by Brown and Forsythe's F with the degrees of freedom of Mehrotra
    (1997), of which df is the denominator's; of two means, Welch's t test. concentration: J times
    the sum of squared shares of their variances, 1 if these are equal."""
    top = (J - 1) ** 2 / (1 + (J - 2) * concentration)
    return stats.f.sf(F, min(J - 1, top), min(df, 1e9))  # SciPy knows no infinite df


def wrap(text, start=""):
    return textwrap.fill(text, 100, initial_indent=start, break_on_hyphens=False,
                         subsequent_indent=" " * (len(start) or 2))


# What is printed, and the page


class Report(NamedTuple):
    """What is said of one run: an experiment with one model, or the mean of its models."""
    name: str  # with the kind of texts that pretraining read
    answers: list  # sentences, what matters most first
    table: pd.DataFrame  # of told
    notes: list


def publish(rows, metric, folder, source):
    """Write the files, and print answers, tables and notes on each experiment and model. Return
    the tables as one. source: where the rows are from."""
    effects = analyze(rows, metric)
    reports, common = reports_of(with_boost(effects, rows, metric), metric)
    key = key_words(metric, rows.bias_df.notna().all())
    screen(reports, common, key)

    folder.mkdir(parents=True, exist_ok=True)
    effects = effects.drop(columns=NOT_WRITTEN)
    effects[effects.is_mean].to_csv(folder / "effects.csv", **CSV)
    effects[~effects.is_mean].to_csv(folder / "tasks.csv", **CSV)
    draw_effects(reports, metric).savefig(folder / "effects.png")
    picture = base64.b64encode((folder / "effects.png").read_bytes()).decode()
    source = f"{date.today()}: {source} ({len(rows)} rows). {common}"
    ran = "\n".join(rows.versions.dropna().unique())
    path = folder / "report.html"
    path.write_text(page(reports, source, key, picture, ran), encoding="utf-8")
    print(f"\nReport, for a browser: {path.resolve()}")
    return pd.concat([shown(report.table).assign(run=report.name) for report in reports])


def with_boost(effects, rows, metric):
    """The rows of the bias, with the boost (gain: above 0 if it helps), the kind of texts that
    pretraining read (KINDS) and whether there is a control of all tasks. The run scripts end the
    names of experiments with labels so; of answers (m = 0), a column says it."""
    # analyze gives both in one order
    bias, boost = [its.reset_index(drop=True) for _, its in effects.groupby("effect")]
    with_labels = rows.experiment.str.endswith("-answers").where(rows.m > 0, rows.control > 0)
    versions = rows.versions.map(str)  # none is the same as none
    kinds = np.select([with_labels, rows.bias_df.notna(), versions.str.contains("labeled_read")],
                      [*KINDS][:3], "plain")
    # a control has the model, the task and, but for labels, the name and settings of its run;
    # held-out items need none
    name = rows.experiment.str.removesuffix("-answers").where(rows.m > 0, "")
    settings = versions.str.replace(r"answers: (\[.*?\]|\w+) |(flags|torch).*", "", regex=True)
    runs = name + settings + rows.model + rows.task
    alone = (rows.experiment + rows.model)[~runs.isin(runs[with_labels | rows.bias_df.notna()])]
    return bias.assign(
        gain=metric.sign * boost.estimate, gain_half=boost.half, boost=boost.words,
        boost_shares=boost.shares, kind=bias.experiment.map(dict(zip(rows.experiment, kinds))),
        is_ours=rows.versions.notna().all(),
        needs_control=(bias.experiment + bias.model).isin(alone))


def reports_of(lines, metric):
    """A Report of each experiment and model, on the mean over settings or else on each setting; and
    what is said once of all."""
    ids = ["experiment", "models", "model"]
    chosen = lines[lines.settings == lines.groupby(ids)["settings"].transform("max")]
    differ = chosen[["setting", "model"]].nunique() > 1
    reports, runs, found, bare = [], 0, 0, []
    for _, table in chosen.groupby([*ids, "setting"], sort=False):
        mean = table.iloc[-1]
        facts = mean[differ.index]
        if mean.models > 1:
            facts["model"] = f"mean of {mean.models} models"
            table = table[-1:].assign(task=facts.model)
        elif mean.tasks == 1:
            table = table[:1]
        table = told(table, metric)
        name = ", ".join([mean.experiment, *facts[differ]])
        answers = answers_of(table)
        if mean.kind != "control":
            is_yes = table.verdict.isin(YES)
            runs += 1
            found += is_yes.any()
            if mean.needs_control and not is_yes.all():
                bare.append(name)
        elif mean.verdict != "none":
            answers.insert(0, CONTROLS[mean.verdict in YES])
        reports.append(Report(f"{name} ({KINDS[mean.kind]})", answers, table,
                              [*notes(table, metric)]))
    controls = ""
    if bare:
        controls = f"No control (see --with-answers, docs/own_training.md) of {'; '.join(bare)}. "
    return reports, (
        f"Bias in {metric.unit} [89% interval]; a bias of {metric.limit} would matter (--margin). "
        f"YES in {found} of {runs} runs (even if nothing is inflated, some task is a YES by chance "
        f"in up to {min(100, 100 * TAIL * runs):.3g}% of such files). {controls}All: "
        f"{', '.join(facts[~differ]) or 'several settings and models'}.")


def in_words(estimate, half, metric):
    """Estimate and interval, with one more digit if an end would round to 0 or to the margin.
    Nothing of what is unknown."""
    if math.isnan(estimate):
        return None
    low, high, digits = estimate - half, estimate + half, metric.digits
    if any(round(abs(end), digits) in (0, metric.margin) for end in (low, high)):
        digits += 1
    words = f"{estimate:+z.{digits}f}"
    if low < high:  # not nan
        words += f" [{low:+z.{digits}f}, {high:+z.{digits}f}]"
    return words


def told(table, metric):
    """The table in the words that are shown."""
    table = table.rename(columns={"task": "part", "subsamples": "draws", "words": "bias"})
    table = table.sort_values(["is_mean", "estimate"], ascending=[True, metric.sign < 0])
    ends = metric.sign * table.estimate + table.shown_half
    table["worse"] = np.where(ends < 0, " (seen is worse)", "")
    table["near_chance"] = table.unseen < table.chance + ROOM
    says_little = table.near_chance | (table.gain <= table.gain_half)
    says_little |= table.is_mean & (says_little[~table.is_mean].mean() > 0.5)
    table["weak"] = table.verdict.isin(["no", "open"]) & says_little
    table["answer"] = [VERDICTS[code].format(metric.limit) for code in table.verdict]
    table["answer"] += np.where(table.weak, " (weak test, tells little)", "")
    hides = table.is_mean & (table.p_alike < LEVEL)
    table["inflated?"] = table.answer + table.worse + np.where(
        hides, f", but tasks differ (p = {table.p_alike.iloc[0]:.1g})", "")
    code = table.verdict.mask(table.weak | hides | (table.worse != ""), "remark")
    table["color"] = code.mask(table.kind == "control", "control").map(COLORS)
    return table.assign(reason=table.reason.astype(object).fillna(
        "two draws that differ and a --margin are needed"))


def answers_of(table):
    """Sentences, what matters most first: each YES with its number, then OPEN, NO and weak tests,
    and the mean."""
    mean, parts, answers = table.iloc[-1], table[~table.is_mean], []
    order = parts.verdict.map([*VERDICTS].index)
    for _, its in parts.groupby([order, "weak", "reason"]):
        first, names = its.iloc[0], [*(its.part + " " + its.bias + its.worse)]
        reason = f" ({first.reason})" if first.verdict == "none" else ""
        if len(its) > NAMED and first.verdict not in YES:
            names = [f"{len(its)} tasks, largest first: {names[0]}", *its.part[1:]]
        answers.append(f"{first.answer}{reason}: {', '.join(names)}.")
    if mean.is_mean:
        answers.append(f"{mean.part.capitalize()}: {mean.bias}, {mean['inflated?']}.")
    return answers


def notes(table, metric):
    """Yield sentences: what weakens the answers, what they mean, what to do next."""
    mean, parts = table.iloc[-1], table[~table.is_mean]
    if mean.kind == "control" or mean.models > 1:
        return
    low, inflated = parts.part[parts.worse != ""], table.part[table.verdict.isin(YES)]
    if len(low):
        yield f"Seen is worse: {', '.join(low)}. Inflation may hide below it. {CAUSES[mean.kind]}"
    if len(inflated):
        yield f"Next, for {', '.join(inflated)}: report the unseen score, not the seen one."
    # published rows and held-out items are what they are
    if mean.kind == "held-out" or (mean.m != 0 and not mean.is_ours):
        yield "Next: nothing can be added to these rows. Report what is OPEN as not decided."
        return
    yield from next_draws(parts, metric)
    if {*parts.color} == {COLORS["no"]}:
        yield "Next: no more draws are needed. Report the seen score with the interval of its bias."


def next_draws(parts, metric):
    """Yield how many draws would answer a part that is open or, if its test is weak, show its
    boost; and for which parts to try another recipe."""
    hopeless = []
    for part in parts[parts.weak | (parts.verdict == "open")].itertuples():
        share, tail, goal = part.shares, TAIL / len(parts), metric.margin / 2
        use = f"narrow the interval of its bias to about ±{goal:g}, which should settle it"
        if part.weak:
            share, tail, goal = part.boost_shares, TAIL, part.gain
            use = "show a boost of the size found (so far the test is weak)"
        total = draws_needed(share, tail, goal, FEWEST[part.is_ours])
        if part.weak and (part.near_chance or total > MOST or not part.is_ours):
            hopeless.append(part.part)
            continue
        how = "split and train again (docs/own_training.md)"
        if part.is_ours:
            how = (f"repeat the command that you ran with --tasks {part.part} --subsamples {total} "
                   f"(the {part.draws} draws that are there count)")
        yield (f"Next, for {part.part}: {total} draws in all ({total - part.draws} more) would "
               f"{use}: {how}. Fix the number before you look, and add draws only once.")
    if hopeless:
        yield (f"Next, for {', '.join(hopeless)}: another recipe: first other learning rates, then "
               "more epochs or labeled texts, then a larger model (docs/own_texts.md). Choose by "
               "its boost, never by the bias, on draws that you do not report. A recipe that helps "
               "may inflate more.")


def key_words(metric, is_held_out):
    """What the words mean. is_held_out: Are all rows answers to released and held-out items?"""
    text = (KEY_OF_HALVES if is_held_out else KEY_OF_RUNS) + KEY_OF_ANSWERS
    lines = text.format(metric=metric, room=ROOM).splitlines()
    return dict(line.split(": ", 1) for line in lines)


def screen(reports, common, key):
    print(wrap(f"Does pretraining on the test texts inflate the score? {common}"))
    for report in reports:
        print(f"\n{report.name}:")
        for answer in report.answers:
            print(wrap(answer, "  "))
        for note in report.notes:
            print(wrap(note, "  - "))
    for report in reports:
        view = shown(report.table).to_string(index=False, **NUMBERS)
        print(f"\n{wrap(report.name)}\n\n{view}")
    print()
    for term, meaning in key.items():
        print(wrap(meaning, f"  {term:11}"))


def shown(table):
    """What is printed of a table."""
    return table[COLUMNS].dropna(axis=1, how="all")


def page(reports, source, key, picture, ran):
    text = f"{HEAD}<p>{html.escape(source)}</p>\n"
    for report in reports:
        color = min(report.table.color, key=[*COLORS.values()].index)
        card = f"<h2>{html.escape(report.name)}</h2>\n"
        card += "".join(tag("div", answer) for answer in report.answers)
        card += "".join(tag("li", note) for note in report.notes)
        text += f'<div class="card" style="border-color: {color}">{card}</div>\n'
    text += f'<div class="wide"><img alt="Effects" src="data:image/png;base64,{picture}"></div>'
    for report in reports:
        table = shown(report.table).to_html(border=0, index=False, **NUMBERS)
        text += f"<h2>{html.escape(report.name)}</h2>\n{table}"
    words = [f"<tr><th>{term}<td>{html.escape(meaning)}"
             for term, meaning in key.items()]
    return (f'{text}<h2>Words</h2><table class="key">{"".join(words)}</table>'
            f"<details><summary>Intervals</summary>{tag('div', INTERVALS)}</details>"
            f"<details><summary>What was run</summary>{tag('div', ran or 'not known')}</details>")


def tag(name, text):
    return f"<{name}>{html.escape(text)}</{name}>\n"


def draw_effects(reports, metric):
    """Two panels for each run, with a row for each part and for their mean: the scores; and the
    biases, in the color of their verdicts, beside 0 and the margin."""
    heights = [len(report.table) for report in reports]
    figure = Figure((13, 1.6 + 0.7 * len(heights) + 0.28 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(reports), 2, squeeze=False, sharex="col", width_ratios=(3, 4),
                             height_ratios=heights)
    for (scores, biases), report in zip(panels, reports):
        rows = report.table.reset_index(drop=True)
        # in two lines: a wide title would narrow the panels
        scores.set_title(report.name.replace(" (", "\n("), loc="left")
        scores.hlines(rows.index, rows.base, rows.unseen, color="#bbbbbb", lw=5, label="boost")
        scores.plot(rows.base, rows.index, "k|", label="base")
        scores.plot(rows.unseen, rows.index, "ko", ms=8, mfc="white", label="unseen")
        scores.plot(rows.seen, rows.index, "bd", label="seen")
        biases.hlines(rows.index, rows.shown_low, rows.shown_high, color=rows.color)
        biases.scatter(rows.estimate, rows.index, color=rows.color)
        biases.axvline(0, color="gray")
        if metric.margin:
            biases.axvline(metric.sign * metric.margin, color="k", ls=":")
        biases.yaxis.tick_right()
        for axis, words in ((scores, rows.part.str[:50]),
                            (biases, rows.bias + "  " + rows["inflated?"])):
            axis.set_yticks(rows.index, words, parse_math=False)  # "$" is no formula
            axis.set_ylim(len(rows) - 0.5, -0.5)
            axis.set_frame_on(False)
            axis.grid(axis="x")
            axis.tick_params(length=0)
            for tick, color in zip(axis.get_yticklabels(), rows.color):
                tick.set_color(color)
    scores.set_xlabel(metric.words)
    biases.set_xlabel(f"bias = seen - unseen, {metric.unit}\n(89% intervals; dotted: "
                      f"{metric.limit};\nred: YES, orange: OPEN,\ngreen: NO, blue: control,\n"
                      "gray: see the remark)")
    figure.legend(*scores.get_legend_handles_labels(), loc="outside upper left", ncols=4)
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
            print(f"the paper's model, {cell[0]}, {title_of(*cell[1:])}, {effect}: beta (log "
                  "odds), differences")
            table = tables[*cell, effect].filter(regex="beta|diff", axis="index")
            print(table.to_string())
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
    whose chains mix well (docs/validation.md): logit p = c_jk + alpha_i + (l - 1/2) d_j. A task's
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


# --- shared: direction ---
LOWER_IS_BETTER = set("""nll loss bpb bits perplexity ppl brier error errors err wer cer mer ter
    eer mae mse rmse entropy surprisal""".split())


def is_error(metric):
    """Is a lower value of the metric better? Its name is split where it has no letter."""
    return not LOWER_IS_BETTER.isdisjoint(re.split("[^a-z]+", metric.lower()))
# --- end shared ---


# --- shared: crossing ---
CROSSED = {  # by mean: the arm that gives it on the texts of `test`, that on the texts of `extra`
    "base": ("base", "base_on_extra"),
    "unseen": ("extra", "test_on_extra"),  # pretrained on the other set
    "seen": ("test", "extra_on_extra")}
# --- end shared ---


def parse_args(argv):
    parser = argparse.ArgumentParser(
        epilog=INTERVALS,
        description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", metavar="FILE", nargs="*", type=user_path, default=[Path("results.csv")],
        help="default results.csv")
    add("--margin", type=float,
        help="the bias that would matter; default 1 (acc, f1), else none")
    add("--metric", default="acc",
        help="acc, f1, nll, or X with columns X_base, X_extra, X_test; default acc")
    add("--plain", action="store_true", help="test on one set, as the paper does; default both")
    add("--lower-is-better", action=argparse.BooleanOptionalAction,
        help="as of an error; default for nll, loss, bits and the like")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="use only these; default all")
    add("--paper-model", action="store_true", help="fit the paper's model of accuracy, with uv run "
        f"--with {PAPER_MODEL_NEEDS} or requirements.txt; default no")
    add("--no-interaction", action="store_true", help="leave out W, effects by task; default no")
    add("--draws", type=int, default=1000,
        help="draws per chain; half as many tune it; default 1000")
    add("--out", type=user_path, metavar="FOLDER", help="of page and tables; default fits/FILE")
    args = parser.parse_args(argv)
    if args.draws < 1:
        parser.error("--draws: give a number above 0")
    name = "+".join(path.stem for path in args.paths)[:99]
    if args.metric != "acc":
        name += f".{args.metric}"
    args.out = args.out or Path("fits", name)
    return args


@errors_on_one_line()
def main(argv=None):
    args = parse_args(argv)
    rows = pd.concat([read_results(path, args.metric) for path in args.paths])
    rows = clean_rows(rows, args.metric, args.plain, vars(args))
    metric = metric_of(args.metric, args.margin, args.lower_is_better, rows)
    table = publish(rows, metric, args.out, ", ".join(path.name for path in args.paths))
    if args.paper_model and not run_paper_model(
            rows, not args.no_interaction, args.draws, args.out / "posterior.csv"):
        sys.exit(3)
    return table


if __name__ == "__main__":  # in a notebook or VS Code flags go into the list: ["--m", "50"]
    main([] if "__file__" not in globals() or "kernel_launcher" in sys.argv[0] else None)
