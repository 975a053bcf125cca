# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "pymc==5.28.5", "nutpie==0.16.8",
#     "matplotlib==3.10.9",
# ]
# ///
"""From results.csv to conclusions: is pretraining on unlabeled test text unfair, how sure is it?

Reproduces sections 5 to 8 and appendix D of "Evaluating the fairness of task-adaptive pretraining
on unlabeled test data before few-shot text classification" (Dubey) and adds intervals that hold
what they say. m labelled training texts, n unlabelled and n test texts; base, unseen, seen:
accuracies of the model without pretraining, and of the pretrained ones on texts that they were not,
and were, pretrained on; boost = unseen - base, bias = seen - unseen, in points (hundredths). With
89 % intervals, for each setting (experiment, m, n):
    these tasks       the headline, in closed form: the mean over tasks; model "all": of the effect
                      averaged over models
    tasks like these  a t interval over the task means
and the paper's model: Y_ijkl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + V_jk + W_jl + beta l
for model i, task j, subsample k, arm l (1: treatment), on the texts of `test` alone.

    python fit_model.py results.csv --draws 0      # page and tables in 3 seconds
    python fit_model.py results.csv                # then the paper's model, minutes

Writes to fits/results/ report.html, effects.png, and tables with the columns
    effects.csv: experiment, m, n (empty: the mean of all settings), arms (crossed: both sets of
        texts; plain: `test`), effect, model, target, tasks, subsamples (fewest of a task), majority
        (share of the commonest class), base, unseen, seen (%), estimate, se, df, low, high
        (points), verdict, needed (subsamples of a task for a half-width of half the margin),
        metric, margin
    tasks.csv: these of each task, sd (between subsamples), verdict (at 1 - .11 / tasks, so that all
        hold together), p (one-sided sign flips of a bias), p_adjusted (Benjamini-Hochberg)
    posterior.csv: experiment, m, n, effect, parameter (and predictions in points: difference (11),
        effect (12)), ArviZ's summary, warning (empty: converged; else exit status 3)
"""

import argparse
import base64
import html
import math
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import special, stats

os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")  # needs no C compiler

QUANTILE = 0.3  # of the chi-square by which `needed` allows for noise badly known
NEAR = 0.55  # half-width over margin up to which an open verdict is about the effect
WEAK = 5  # points of macro-F1 above guessing that show learning
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # acceptance, times the tuning, the draws
THESE, LIKE = "these tasks", "tasks like these"
EFFECTS = {"boost": ("base", "extra"), "bias": ("extra", "test")}  # control, treatment on `test`
KEYS = ["experiment", "m", "n", "arms", "model"]
MEANS = ["majority", "base", "unseen", "seen"]
UNITS = {"acc": "points", "f1": "points", "nll": "nats (lower is better)"}
COLOURS = """
.no { color: #006b4f }
.yes, .warning { color: #b3261e }
.near, .too { color: #8a5a00 }
"""


# The answer in closed form ---


def unit_table(rows):
    """A row per cell, model, task and subsample: means over seeds; "all": over models that have the
    same tasks and subsamples. The root of w of a mean is the mean of the roots, its most."""
    rows = rows.assign(w=np.sqrt(rows.w))
    draw = [*KEYS[:4], "task", "subsample"]
    names = [*MEANS, *EFFECTS, "w"]
    groups = rows.groupby([*draw, "model"])
    units = groups[names].mean(skipna=False).assign(total=groups["bias"].sum()).reset_index()
    parts = [units]
    for _, mine in units.groupby(CELL):
        draws = mine.groupby(draw)
        if draws.size().min() == mine.model.nunique() > 1:
            parts.append(draws[names].mean(skipna=False).reset_index().assign(model="all"))
    units = pd.concat(parts).round({"bias": 9, "boost": 9})  # equal stay equal
    return units.assign(w=units.w**2)


def task_table(units, effect, args):
    """Rows of tasks.csv of a cell and model. `variance`: of one subsample, nan if unknown; pooled:
    whether all tasks know it together."""
    n, arms, model = units[["n", "arms", "model"]].iloc[0]
    texts = 2 * n if arms == "crossed" else n
    groups = units.groupby([*KEYS, "task"])
    tasks = groups[[*MEANS, "w"]].mean(skipna=False).assign(
        effect=effect, subsamples=groups.size(), estimate=groups[effect].mean(),
        sd=groups[effect].std())
    tested = effect == "bias" and args.metric == "acc"
    if tested and model != "all":
        tasks["p"] = groups["total"].agg(lambda biases: sign_flip_p(biases * texts / 100))
        tasks["p_adjusted"] = stats.false_discovery_control(tasks["p"])
    tasks = tasks.reset_index()
    pooled = tested and tasks.w.notna().all()
    variance, df = tasks.sd**2, tasks.subsamples - 1
    if pooled:
        variance, df, _ = bias_interval(tasks)
    elif args.metric in SHARES:
        variance = np.maximum(variance, (100 / texts) ** 2 / 12)  # that of rounding
    se = np.sqrt(variance / tasks.subsamples)
    half = stats.t.ppf(UPPER, df) * se
    wide = stats.t.ppf(1 - (1 - UPPER) / len(tasks), df) * se  # all hold together
    verdicts = [verdict_of(*ends, args.margin) for ends in zip(tasks.estimate, wide)]
    return tasks.assign(low=tasks.estimate - half, high=tasks.estimate + half, verdict=verdicts,
                        variance=variance, pooled=pooled)


def sign_flip_p(changes):
    """One-sided p of the sum of changes under random signs: exact if symmetric about 0."""
    changes = changes.round().astype(int)
    share = np.ones(1)  # of the signs, by the sum of the sizes with a plus
    for size in changes.abs():
        share = (np.pad(share, (0, size)) + np.pad(share, (size, 0))) / 2
    observed = (changes.abs().sum() + changes.sum()) // 2
    return min(share[observed:].sum(), 1.0)  # rounding may exceed 1


def interval(settings):
    """(se, df, half-width) of a mean of settings, tables with a row a task: an 89 % t interval with
    Satterthwaite's df."""
    variance = square = 0
    for tasks in settings:
        K = tasks.subsamples.to_numpy()
        v = tasks.variance.to_numpy() / K / (len(tasks) * len(settings)) ** 2
        df = np.maximum(K - 1, 1e-9)
        if tasks.pooled.all():
            v, df = v.sum(), K.sum() - len(K) + TEXTS_DF
        variance += v.sum()
        square += (v**2 / df).sum()
    se, df = math.sqrt(variance), variance**2 / (square or math.nan)
    return se, df, stats.t.ppf(UPPER, df) * se


def runs_needed(settings, half):
    """The least number of subsamples of each task that brings the half-width down to `half` with
    noise at the upper end of what is known."""
    _, df, _ = interval(settings)
    if not (df > 0 and half):
        return math.nan
    more = df / stats.chi2.ppf(QUANTILE, df)
    settings = [tasks.assign(variance=more * tasks.variance) for tasks in settings]
    R = 1
    while True:
        se, _, reach = interval([tasks.assign(subsamples=R) for tasks in settings])
        if reach <= half:
            return R
        R = max(R + 1, int(R * (stats.norm.ppf(UPPER) * se / half) ** 2))  # t reaches further


def verdict_of(middle, half, margin):
    """Where the interval middle ± half lies in respect of (-margin, margin)."""
    if not margin or math.isnan(half):
        return ""
    if abs(middle) + half < margin:
        return "within the margin"
    if abs(middle) - half > margin:
        return "beyond the margin"
    return "not settled"


def effect_row(settings, target, args):
    """A row of effects.csv, the mean of settings, with its interval in words."""
    tasks = pd.concat(settings)
    row = tasks[[*KEYS, "effect"]].iloc[0].to_dict()
    row |= {"arms": names_of(tasks.arms), "target": target, "tasks": min(map(len, settings)),
            "subsamples": tasks.subsamples.min(), "setting": title_of(*tasks[CELL].iloc[0])}
    row |= pd.DataFrame([part[[*MEANS, "estimate"]].mean() for part in settings]).mean()
    if target == THESE:
        row["needed"] = runs_needed(settings, args.margin / 2)
    else:  # the means of tasks, as subsamples of one
        variance = [tasks.estimate.var()]
        settings = [pd.DataFrame({"variance": variance, "subsamples": len(tasks), "pooled": False})]
    row["se"], row["df"], half = interval(settings)
    row["verdict"] = verdict_of(row["estimate"], half, args.margin)
    row["low"], row["high"] = row["estimate"] - half, row["estimate"] + half
    ends = np.array([row["estimate"], row["low"], row["high"]])
    ends += np.copysign(1e-9, ends)  # halves go away from 0
    places = 2 if args.metric in SHARES else 4
    words = [f"{end:+z.{places}f}" for end in ends]
    row["words"] = f"{words[0]} [{words[1]}, {words[2]}]" if half > 0 else words[0]
    return row


def effects_table(tasks, args):
    """effects.csv. main: the rows that answer, of all models, or each where there is no "all"."""
    rows = []
    for (experiment, *_), mine in tasks.groupby(["experiment", "effect", "model"]):
        settings = [part for _, part in mine.groupby(["m", "n"])]
        each = [effect_row([part], THESE, args) for part in settings]
        rows += each + [effect_row([part], LIKE, args) for part in settings]
        known = [part for part in settings if part.variance.notna().all()]
        if len(known) > 1:
            words = f"{len(known)} settings"
            out = sum(row["low"] * row["high"] > 0 for row in each)
            chance = (1 - SHARE) * len(known)
            rows.append(effect_row(known, THESE, args) | {
                "m": -1, "n": -1, "setting": f"{experiment}, mean of {words}",
                "remark": f"Alone, {out} of {words} exclude 0 (by chance about {chance:.1f})."})
    table = pd.DataFrame(rows).assign(metric=args.metric, margin=args.margin)
    shared = table.groupby(CELL)["model"].transform(lambda names: "all" in set(names))
    table["main"] = (table.target == THESE) & ((table.model == "all") | ~shared)
    return table


# The paper's model ---


def paper_model(rows, interaction):
    """The paper's model of a cell, (1) to (10), in variables that mix (docs/results.md):
    logit p = c_jk + alpha_i + (l - 1/2) d_j."""
    import pymc as pm
    import pytensor.tensor as pt

    n, control, treatment, unit_idx = rows[["n", "control", "treatment", "unit"]].to_numpy(int).T
    model_idx, models = pd.factorize(rows.model)
    task_idx, tasks = pd.factorize(rows.task)
    task_of_unit = np.zeros(unit_idx.max() + 1, int)
    task_of_unit[unit_idx] = task_idx

    # k: the squared share of the variance of tasks' changes that is more than binomial noise
    sums = rows.groupby("task")[["control", "treatment", "n"]].sum()
    p = sums[["control", "treatment"]].add(0.5).div(sums.n + 1, axis=0)
    noise = (1 / (p * (1 - p)).mul(sums.n, axis=0)).sum(axis=1).mean()
    k = max(0, 1 - noise / special.logit(p).diff(axis=1).treatment.var()) ** 2

    with pm.Model(coords={"later": models[1:], "task": tasks}) as model:
        mu = pm.Normal("mu", 0, 1)
        beta = pm.Normal("beta", 0, 1)
        alpha = pt.zeros(1)
        if len(models) > 1:
            alpha = pt.concatenate([[0.0], pm.Normal("alpha", 0, 5, dims="later")])
        sd_U = pm.HalfNormal("sd_U", 1)
        sd_V = pm.HalfNormal("sd_V", 1)
        sd_W = pm.HalfNormal("sd_W", 3.5355) if interaction else 0

        # c_jk: the level of a task's subsample
        a = pm.Normal("a", mu + beta / 2, pt.sqrt(sd_U**2 + sd_W**2 / 2), dims="task")
        c = pm.Normal("c", a[task_of_unit], sd_V)

        # d_j: a task's effect, centred as far, k, as the data know it
        d = beta * pt.ones(len(tasks))
        if interaction:
            s = math.sqrt(2) * sd_W
            z = pm.Normal("z", k * beta, s**k, dims="task")
            d = beta + s ** (1 - k) * (z - k * beta)
        d = pm.Deterministic("d", d, dims="task")

        # the counts of both arms: log (1 + e^(level + half)) (1 + e^(level - half))
        level = c[unit_idx] + alpha[model_idx]
        half = d[task_idx] / 2
        both = pt.log1p(pt.exp(level) * (pt.exp(half) + pt.exp(-half)) + pt.exp(2 * level))
        right = (control + treatment) * level + (treatment - control) * half
        pm.Potential("likelihood", (right - n * both).sum())
    return model


def predict(posterior, rows):
    """The posterior with the effects (12) and differences (11) that it predicts."""
    rng = np.random.default_rng(0)
    effects = {}
    inner = [name for name in posterior if name in ("a", "c", "z") or "__" in name]
    found = posterior.drop_vars(inner)
    for (model, task), runs in rows.groupby(["model", "task"]):
        level = posterior.c.values[:, :, runs.unit]
        if model in posterior.get("later", ()):
            level = level + posterior.alpha.sel(later=model).values[:, :, None]
        half = posterior.d.sel(task=task).values[:, :, None] / 2
        n = runs.n.to_numpy()
        change = rng.binomial(n, special.expit(level + half))
        change -= rng.binomial(n, special.expit(level - half))
        effect = 100 * change.sum(axis=2) / n.sum()
        found[f"effect[{model}, {task}]"] = ("chain", "draw"), effect
        effects.setdefault(model, []).append(effect)
    effects["all"] = [np.mean(each, axis=0) for each in effects.values()]
    for model, each in effects.items():
        found[f"difference[{model}]"] = ("chain", "draw"), np.mean(each, axis=0)
    return found


def fit(rows, effect, args):
    """Rows of posterior.csv of a cell; if it did not converge, once more, finer."""
    import arviz
    import nutpie

    control, treatment = EFFECTS[effect]
    rows = rows.assign(control=(rows[f"acc_{control}"] * rows.n).round(),
                       treatment=(rows[f"acc_{treatment}"] * rows.n).round(),
                       unit=rows.groupby(["task", "subsample"]).ngroup())
    ready = nutpie.compile_pymc_model(paper_model(rows, not args.no_interaction))
    for accept, longer, more in ATTEMPTS:
        trace = nutpie.sample(
            ready, chains=4, tune=args.draws // 2 * longer, draws=args.draws * more, seed=0,
            target_accept=accept, save_warmup=False, progress_bar=False)
        if trace.posterior.sizes["draw"] < args.draws * more:
            raise KeyboardInterrupt  # nutpie swallows Ctrl-C
        table = arviz.summary(predict(trace.posterior, rows), hdi_prob=SHARE, round_to="none")
        r_hat = table.r_hat.max(skipna=False)
        ess = table[["ess_bulk", "ess_tail"]].min(axis=None, skipna=False)
        divergences = int(trace.sample_stats["diverging"].sum())
        if r_hat <= MAX_R_HAT and ess >= MIN_ESS and not divergences:
            warning = ""
            break
        warning = f"not converged: r_hat {r_hat:.3f}, ESS {ess:.0f}, divergences: {divergences}"
    return table.assign(warning=warning)


def run_paper_model(rows, args):
    """Fit it to each cell and effect: posterior.csv. Returns whether one did not converge."""
    tables, failed = {}, False
    for cell, mine in rows.groupby(CELL):
        sizes = mine.groupby(["model", "task"])["subsample"].nunique()
        if sizes.min() < 2 or mine.task.nunique() < 5:
            print(f"{title_of(*cell)}, paper: left out, it needs 5 tasks with two subsamples each.")
            continue
        for effect in args.effects:
            table = tables[*cell, effect] = fit(mine, effect, args)
            posterior = pd.concat(tables, names=[*CELL, "effect", "parameter"])
            posterior.to_csv(args.out / "posterior.csv", float_format="%.6g")
            said = table.warning.iloc[0] or "converged"
            print(f"{title_of(*cell)}, {effect}, paper: {said}.")
            failed |= said != "converged"
    return failed


# Words and page ---


def lines_of(table):
    """A line a setting, model and target: its bias with its boost, or the only effect."""
    keys = [*CELL, "model", "target"]
    boosts = table[table.effect == "boost"].set_index(keys)[["words", "verdict"]]
    first = table[table.effect == table.effect.iloc[0]]
    return first.join(boosts, on=keys, suffixes=("", "_boost"))


def answers_of(table):
    """The lines that answer: the mean of an experiment's settings, if there are several."""
    lines = lines_of(table[table.main])
    together = lines.groupby(["experiment", "model"])["m"].transform("min") < 0
    return [*lines[(lines.m < 0) | ~together].itertuples()]


def short_answer(line):
    """Its first word is a class of the style."""
    margin = f"±{line.margin:g}"
    if line.effect == "boost":
        return ""
    if not line.low < line.high:
        return "Too early to tell: no interval"
    if line.verdict == "within the margin":
        return f"No: within {margin}"
    if line.verdict == "beyond the margin":
        if (line.low > 0) == (line.metric != "nll"):
            return f"Yes: beyond {margin}"
        return f"No: seen texts even score worse, beyond {margin}"
    if not line.verdict:
        return "The interval excludes 0" if line.low * line.high > 0 else "The interval holds 0"
    if line.high - line.low <= 2 * NEAR * line.margin:
        return f"Near the margin of {margin}: take the interval as the answer"
    return f"Too early to tell: neither within nor beyond {margin}"


def details(line):
    """Bias, boost and what is to be known of them."""
    model = f" of {line.model}".removesuffix(" of all")
    tasks = "1 task" if line.tasks == 1 else f"{line.tasks} tasks"
    unit = UNITS.get(line.metric, line.metric)
    text = f"{line.setting}: {line.effect}{model} {line.words} {unit} for {tasks}"
    if line.effect == "bias" and isinstance(line.words_boost, str):
        text += f"; boost {line.words_boost}"
    text += "."
    if line.m < 0:
        text += f" {line.remark}"
    if "Too early" in short_answer(line) and line.needed > 0:
        text += f" About {line.needed:g} subsamples of each task, in all, would decide."
    return text


def limits_of(lines, rows):
    """Sentences on what limits the answers."""
    said = []
    for line in lines:
        if line.effect == "bias" and line.verdict == line.verdict_boost == "within the margin":
            said.append(f"{line.setting}: the boost too is within the margin: where pretraining "
                        "does nothing a bias can hardly arise.")
    f1 = rows[["f1_extra", "f1_test_on_extra"]].mean(axis=1)
    rows = rows.assign(above=100 * (f1 - 1 / rows.num_classes)).dropna(subset="above")
    cases = rows.groupby([*KEYS, "task"], as_index=False)["above"].mean()
    for experiment, mine in cases.groupby("experiment"):
        weak = mine.task[mine.above < WEAK]
        if len(weak):
            said.append(f"{experiment}: macro-F1 on unseen texts is not {WEAK} points above "
                        f"guessing in {len(weak)} of {len(mine)} cases ({names_of(weak[:5])}): "
                        "too little was learned there to show an inflation.")
    return said


def names_of(values):
    """All different values in words."""
    return ", ".join(map(str, sorted(set(values.dropna()))))


def methods(rows, args):
    """A paragraph for a methods section."""
    tests = names_of(rows.arms.map({"crossed": "both sets", "plain": "the first set"}))
    return (
        f"For each subsample of a task, m = {names_of(rows.m)} labelled texts and two disjoint "
        f"sets of n = {names_of(rows.n)} others were drawn. Models were taken as they are (base) "
        "and pretrained on the texts of either set, without labels, then trained on the labelled "
        f"ones (or prompted) and tested on {tests}. Bias: the score ({args.metric}) on texts seen "
        "in pretraining minus that on unseen ones; boost: the latter minus base. Means over tasks "
        "have 89 % t intervals, from the variance between subsamples and, where known, the noise "
        f"of drawing texts. Biases within ±{args.margin:g} are too small to matter.")


def forest(tasks, table, args):
    """The figure: effects of each setting, or of the tasks of the only one, and their means."""
    rows = table[table.main].assign(name=table.setting)
    if len(tasks.groupby(CELL)) == 1:
        single = tasks[tasks.model != "all"].sort_values("estimate", ascending=False)
        rows = pd.concat([single.assign(name=single.task), rows.assign(name="mean")])
    rows["y"], names = pd.factorize((rows["name"] + ", " + rows.model).str.removesuffix(", all"))
    figure = Figure((9, 1 + 0.27 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(args.effects), sharey=True, squeeze=False)[0]
    axes[0].set_yticks(range(len(names)), names, parse_math=False)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    for axis, effect in zip(axes, args.effects):
        mine = rows[rows.effect == effect]
        axis.errorbar(mine.estimate, mine.y, xerr=mine.high - mine.estimate, fmt="ko")
        axis.axvspan(-args.margin, args.margin, color="#dddddd", zorder=-1)
        axis.axvline(0, color="grey", ls="--")
        axis.set_title(f"{effect}, {UNITS.get(args.metric, args.metric)}")
    return figure


def publish(rows, tasks, table, args):
    """Write page, figure and tables. Returns the sentences."""
    lines = answers_of(table)
    said = [(short_answer(line), details(line)) for line in lines]
    limits = limits_of(lines, rows)
    parts = []
    for answer, text in said:
        parts += [("title " + answer.lower().partition(":")[0], answer), ("", text)]
    parts += [("warning", text) for text in limits]
    shown = lines_of(table).rename(columns={"words": args.effects[0], "words_boost": "boost"})
    names = ["setting", "model", "target", *args.effects, "tasks", "subsamples", "needed", *MEANS]
    runs = ["experiment", "model", "m", "n", "arms", "num_classes", "versions", "task"]
    runs = rows.reindex(columns=runs).groupby(runs[:2]).agg(names_of).reset_index()
    parts += [("effects", forest(tasks, table, args)), ("title", "Settings"), ("", shown[names]),
              ("title", "What was run"), ("", runs), ("", methods(rows, args)), ("", args.command),
              ("manual", __doc__)]
    table = table.drop(columns=["setting", "words", "remark", "main"], errors="ignore")
    tables = {"effects": table.replace({"m": {-1: ""}, "n": {-1: ""}}),
              "tasks": tasks.drop(columns=["w", "variance", "pooled"])}
    save(args.out, "Is pretraining on the test texts unfair here?", parts, tables, STYLE + COLOURS)
    return [f"{answer}. {text}".removeprefix(". ") for answer, text in said] + limits


# The same in meta_analysis.py ---

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


# Flags and main ---


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FILE ...] [flags]", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], help="(results.csv)")
    add("--effects", nargs="+", choices=EFFECTS, default=[*EFFECTS], help="(both)")
    add("--metric", default="acc", help="or f1, nll, NAME of columns NAME_base, ... (acc)")
    add("--margin", type=float, help="effects within it do not matter (acc, f1: 1)")
    add("--plain", action="store_true", help="only the texts of test")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="only these (all)")
    add("--no-interaction", action="store_true", help="the model without W (Figure 10)")
    add("--draws", type=int, default=1000, help="sampled per chain; 0: none (1000)")
    add("--out", type=Path, metavar="FOLDER", help="(fits/NAME)")
    args = parser.parse_args(argv)
    args.command = f"python fit_model.py {shlex.join(sys.argv[1:] if argv is None else argv)}"
    args.effects = sorted(set(args.effects))
    name = args.paths[0].stem if args.metric == "acc" else f"{args.paths[0].stem}.{args.metric}"
    args.out = args.out or Path("fits", name)
    if args.margin is None:
        args.margin = float(args.metric in SHARES)  # 0: none
    return args


def main(argv=None):
    args = parse_args(argv)
    rows = add_effects(load_rows(args, args.metric), args.metric)
    rows["majority"] *= 100
    if args.metric in SHARES:
        rows[["base", "unseen", "seen"]] *= 100
    tasks = []
    for _, units in unit_table(rows).groupby([*CELL, "model"]):
        tasks += [task_table(units, effect, args) for effect in args.effects]
    tasks = pd.concat(tasks, ignore_index=True)
    said = publish(rows, tasks, effects_table(tasks, args), args)
    print("\n".join([*said, f"page: {(args.out / 'report.html').resolve()}"]))
    (args.out / "posterior.csv").unlink(missing_ok=True)
    if args.draws and args.metric == "acc" and run_paper_model(rows, args):
        raise SystemExit(3)


if __name__ == "__main__":  # in a notebook cell flags go into the list: ["--m", "50"]
    main([] if "__file__" not in globals() else None)
