# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "pymc==5.28.5", "nutpie==0.16.8",
#     "matplotlib==3.10.9", "tqdm==4.70.1",
# ]
# ///
"""From results.csv to conclusions: is pretraining on unlabeled test text unfair, how sure is it?

Reproduces sections 5 to 8 and appendix D of "Evaluating the fairness of task-adaptive pretraining
on unlabeled test data before few-shot text classification" (Dubey) and adds intervals that hold
what they say. m labelled training texts, n unlabelled and n test texts; D_ijk of model i, task j,
subsample k, in points (hundredths of an accuracy), is
    boost = unseen - base      or      bias = seen - unseen,
base, unseen, seen being the accuracies of the model without pretraining, and of the pretrained ones
on texts that they were not, and were, pretrained on. A setting is one (experiment, m, n). Four
answers, with 89 % intervals:
    these tasks       the headline, in closed form: the mean over tasks of the tasks' mean
                      differences; model "all": D is averaged over the models first
    tasks like these  a t interval over the task means
    paper             Y_ijkl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + V_jk + W_jl + beta l
                      (l = 1: treatment), and the differences (11), (12) that it predicts, on the
                      texts of `test` alone; its intervals do not hold 89 %
    hierarchical      D_ijk ~ N(delta_ij, s_ij), delta_ij ~ N(beta_i, tau_i),
                      log s_ij ~ N(log s_i, omega_i): how much tasks differ, one task's effect
                      after shrinking; it weights quiet tasks most

Commands, cheapest first
    python fit_model.py results.csv --draws 0       # page, tables, figures, without the samplers
    python fit_model.py results.csv                 # these at once, then what the samplers add
    python fit_model.py results.csv more.csv folder --effects bias --n 500 --metric f1 --margin 2
    python fit_model.py accuracies       # published layout: m50/n500/bert/ag_news/accuracies.csv

Writes to fits/results/ (the first file's name) report.html, the page to read and to hand on,
figures *.png, and the columns
    effects.csv    experiment, m, n (empty: all settings together), metric, effect, model, arms
                   (crossed: tested on both sets of texts; plain: on `test` alone), target (the names
                   above), tasks, left_out (tasks with one subsample), subsamples (fewest of a task),
                   majority (share of the commonest class), base, unseen, seen, estimate, se, df,
                   low, high, margin, verdict, needed (subsamples of each task for an interval of
                   half the margin to both sides)
    means.csv      experiment, m, n, model, tasks, rows, boost, bias: Table 1, on `test` alone
    tasks.csv      experiment, m, n, effect, model, task, subsamples, arms, majority, base, unseen,
                   seen, estimate, sd (between subsamples), low, high, verdict, p (one-sided sign
                   flips of a bias), p_adjusted (Benjamini-Hochberg), paper ((12)), hierarchical,
                   their _low, _high, p_beyond (the margin)
    posterior.csv  experiment, m, n, effect, analysis, parameter, mean, sd, hdi_low, hdi_high,
                   r_hat, ess_bulk, ess_tail, warning (empty: converged; else exit status 3)

MEASURED
"""

import argparse
import base64
import contextlib
import csv
import html
import itertools
import math
import os
import re
import shlex
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import special, stats
from tqdm.auto import tqdm

W_COUNTS = 5  # subsamples seen before, as which the noise of the texts counts (docs/results.md)
QUANTILE = 0.3  # of the chi-square by which `needed` allows for noise that is badly known
NEAR = 0.55  # half-width over margin from which an open verdict is about the effect itself
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
CENTRED = 5  # tasks from which c_jk is sampled centred
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # target of acceptance, times the tuning, times the draws
FEWEST_TASKS, MOST_TASKS = 5, 100  # fewer: no W, no words on many tasks; more: no figure of tasks
MOST_CELLS = 4  # with more settings no figure of tasks
MOST_LINES = 30  # of a table on the page
SAMPLERS = ("paper", "hierarchical")
TARGETS = ("these tasks", "tasks like these", *SAMPLERS)
GROUP = [*"experiment m n effect model".split()]
ACCURACIES = ["majority", "base", "unseen", "seen"]
COLUMNS = [  # of effects.csv
    "experiment", "m", "n", "metric", "effect", "model", "arms", "target", "tasks", "left_out",
    "subsamples", *ACCURACIES, "estimate", "se", "df", "low", "high", "margin", "verdict", "needed",
]
NUISANCE = ["a", "c", "c_raw", "z", "z_new", "log_s", "effect"]  # not reported as parameters
COMPILED = {}  # models by analysis, flags and shapes of the data
STALE = ("posterior.csv", "tasks.*.png", "accuracies.*.png")  # of an earlier run
QUESTION = "Is pretraining on the test texts unfair here?"
LOOKING = (
    "Fix the number of subsamples before looking, or raise it once, to the number given here: "
    "adding subsamples until a verdict comes breaks the intervals"
)


# The answer in closed form ------------------------------------------------------------------------


class Noise(NamedTuple):
    """What is known of an estimate's noise. An item a task, or a task of each setting."""
    share: np.ndarray  # of the estimate's variance at one subsample of each task, points^2
    counts: np.ndarray  # subsamples
    prior: np.ndarray  # subsamples seen before, as which the noise of the texts counts


class Fit(NamedTuple):
    """One analysis of one effect in one setting."""
    cell: tuple
    effect: str
    analysis: str
    models: list
    posterior: object  # xarray.Dataset of the draws
    summary: pd.DataFrame  # a row a parameter
    warning: str


def average(rows, by):
    """Means of the rows that agree in `by`. How far the answers of several runs to one text go
    together is not known: w is then at most the square of the mean of its roots."""
    numbers = [*ACCURACIES, *EFFECTS, "floor", "w"]
    groups = rows.assign(w=np.sqrt(rows["w"])).groupby(by)
    table = groups[numbers].mean()
    table["w"] **= 2
    table[[*EFFECTS]] = table[[*EFFECTS]].round(9)  # equal differences stay equal
    table["counted"] = groups["counted"].all()
    return table.reset_index()


def unit_table(rows):
    """A row per cell, model, task and subsample, over seeds. Model "all": the mean over the models
    of a cell, where all have the same tasks and subsamples."""
    units = average(rows, [*CELL, "model", "task", "subsample"])
    draw = [*CELL, "task", "subsample"]
    both = average(units, draw).assign(model="all")
    fewest = units.groupby(draw).size().groupby(CELL).min().rename("fewest")
    models = units.groupby(CELL)["model"].nunique().rename("models")
    both = both.join(fewest, on=CELL).join(models, on=CELL)
    both = both[(both["models"] > 1) & (both["fewest"] == both["models"])]
    units = pd.concat([both[units.columns], units], ignore_index=True)
    return units.join(rows.groupby(CELL)["arms"].first(), on=CELL)


def interval(noise):
    """(se, df, reach of the 89 % interval): Student's t with Satterthwaite's degrees of freedom."""
    v = noise.share / noise.counts
    if not v.sum() > 0:
        return math.nan, math.nan, math.nan
    se = math.sqrt(v.sum())
    df = v.sum() ** 2 / (v**2 / (noise.prior + noise.counts - 1)).sum()
    return se, df, stats.t.ppf(UPPER, df) * se


def needed_subsamples(noise, df, half):
    """The least number R of each task at which the interval reaches `half` to both sides, if the
    noise is as large as df degrees of freedom let one fear."""
    variance = noise.share.sum()
    if not (variance > 0 and half):
        return math.nan
    variance *= df / stats.chi2.ppf(QUANTILE, df)
    fewest = 1 if noise.prior.min() > 0 else 2
    R = max(fewest, int(stats.norm.ppf(UPPER) ** 2 * variance / half**2))  # a t reaches further
    while True:
        known = Noise(noise.share, np.full(len(noise.share), R), noise.prior)
        _, df, reach = interval(known)
        if reach * math.sqrt(variance / noise.share.sum()) <= half:
            return R
        R += 1


def verdict_of(low, high, margin):
    """Where an interval lies in respect of (-margin, margin)."""
    if margin is None or math.isnan(low):
        return ""
    if -margin < low and high < margin:
        return "within the margin"
    if low > margin or high < -margin:
        return "beyond the margin"
    return "not settled"


def task_table(units, rows, args):
    """tasks.csv before the samplers, indexed by GROUP and task. `variance` of a subsample's
    difference: that between the subsamples, in which the noise of the texts, where it is known,
    counts as W_COUNTS; never less than rounding or the accuracies imply; nan of one subsample."""
    parts = {}
    for effect in args.effects:
        groups = units.groupby([*CELL, "model", "task"])
        table = groups.agg(
            subsamples=(effect, "size"), arms=("arms", "first"),
            **{name: (name, "mean") for name in ACCURACIES}, estimate=(effect, "mean"),
            sd=(effect, "std"), floor=("floor", "mean"), w=("w", "mean"),
            counted=("counted", "all"))
        if effect == "boost":
            table = table.assign(w=math.nan, counted=False)
        parts[effect] = table
    table = pd.concat(parts, names=["effect"]).reorder_levels([*GROUP, "task"]).sort_index()
    between = table["subsamples"] - 1
    table["prior"] = W_COUNTS * table["counted"]
    total = table["prior"] * table["w"].fillna(0) + between * table["sd"].fillna(0) ** 2
    least = table["floor"].where(table["counted"], table[["floor", "w"]].max(axis=1))
    df = table["prior"] + between
    table["variance"] = np.maximum(total / df.where(df > 0), least)
    reach = stats.t.ppf(UPPER, df.where(df > 0)) * np.sqrt(table["variance"] / table["subsamples"])
    table["low"] = table["estimate"] - reach
    table["high"] = table["estimate"] + reach
    ends = zip(table["low"], table["high"])
    table["verdict"] = [verdict_of(low, high, args.margin) for low, high in ends]
    if args.metric == "acc" and "bias" in args.effects:
        table = table.join(sign_flips(rows), on=[*GROUP, "task"])
    return table.drop(columns=["floor", "w", "counted"])


def sign_flips(rows):
    """p and p_adjusted of each task's bias, indexed like task_table."""
    names = [*CELL, "model", "task"]
    changes = rows.assign(change=changes_of(rows, "bias"))
    changes = changes.groupby([*names, "subsample"])["change"].sum()
    tests = changes.groupby(names).agg(sign_flip_p).to_frame("p")
    tests["p_adjusted"] = tests["p"].groupby(names[:-1]).transform(stats.false_discovery_control)
    tests = tests.assign(effect="bias").set_index("effect", append=True)
    return tests.reorder_levels([*GROUP, "task"])


def effects_table(tasks, args):
    """effects.csv before the samplers, with the column `noise`: per setting, effect and model these
    tasks and tasks like these, and the settings of an experiment together."""
    table = []
    for key, mine in tasks.groupby(GROUP):
        used = mine[mine["variance"].notna()]  # one subsample alone does not know its noise
        if used.empty:
            used = mine
        J = len(used)
        names = mine.index.get_level_values("task")
        left_out = names.difference(used.index.get_level_values("task"))
        row = dict(zip(GROUP, key)) | used[ACCURACIES].mean().to_dict()
        row |= {"arms": mine["arms"].iloc[0], "settings": 1}
        noise = Noise(*used[["variance", "subsamples", "prior"]].to_numpy(float).T)
        noise = noise._replace(share=noise.share / J**2)
        table.append(row | {
            "target": TARGETS[0], "tasks": J, "left_out": ", ".join(left_out),
            "subsamples": used["subsamples"].min(), "estimate": used["estimate"].mean(),
            "noise": noise})
        alone = Noise(np.array([mine["estimate"].var()]), np.array([len(mine)]), np.zeros(1))
        table.append(row | mine[ACCURACIES].mean().to_dict() | {
            "target": TARGETS[1], "tasks": len(mine), "left_out": "",
            "subsamples": mine["subsamples"].min(), "estimate": mine["estimate"].mean(),
            "noise": alone})
    table = finish(pd.DataFrame(table), args)
    return pd.concat([finish(all_settings(table), args), table], ignore_index=True)


def all_settings(table):
    """Rows of effects.csv over the settings of an experiment, two or more that have an interval:
    the mean of their estimates, whose noise is not correlated."""
    found = []
    table = table[(table["target"] == TARGETS[0]) & table["low"].notna()]
    for _, cells in table.groupby(["experiment", "effect", "model"]):
        C = len(cells)
        if C == 1:
            continue
        share, counts, prior = [np.concatenate(part) for part in zip(*cells["noise"])]
        sizes = np.repeat(C, len(share))
        row = cells.iloc[0].to_dict() | cells[[*ACCURACIES, "estimate"]].mean().to_dict()
        row |= {"m": "", "n": "", "settings": C, "left_out": "",
                "arms": " and ".join(sorted(set(cells["arms"]))),
                "tasks": cells["tasks"].min(), "subsamples": cells["subsamples"].min(),
                "noise": Noise(share / sizes**2, counts, prior)}
        found.append(row)
    return pd.DataFrame(found, columns=table.columns)


def finish(table, args):
    """Add interval, verdict and the number of subsamples needed to rows of effects.csv."""
    table = table.assign(metric=args.metric, margin=args.margin)
    lines = []
    for row in table.itertuples():
        se, df, reach = interval(row.noise)
        low, high = row.estimate - reach, row.estimate + reach
        needed = math.nan
        if row.target == TARGETS[0]:
            needed = needed_subsamples(row.noise, df, (args.margin or 0) / 2)
        lines.append((se, df, low, high, verdict_of(low, high, args.margin), needed))
    names = ["se", "df", "low", "high", "verdict", "needed"]
    table[names] = pd.DataFrame(lines, columns=names, index=table.index)
    return table


def means_table(rows, metric):
    """means.csv, Table 1 of the paper: means of the tasks' means, on the texts of `test`."""
    unit = [*CELL, "model"]
    plain = add_effects(rows.assign(arms="plain"), metric)
    means = plain.groupby([*unit, "task", "subsample"])[[*EFFECTS]].mean()
    means = means.groupby([*unit, "task"]).mean().groupby(unit).mean()
    table = rows.groupby(unit).agg(tasks=("task", "nunique"), rows=("task", "size"))
    return table.join(means).reset_index()


# The two models -----------------------------------------------------------------------------------


def import_pymc():
    """(pymc, arviz, pytensor.tensor), set to need no C compiler: nutpie compiles by numba."""
    os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")
    with warnings.catch_warnings(action="ignore"):  # arviz announces its next version
        import arviz
        import pymc
        import pytensor.tensor
    return pymc, arviz, pytensor.tensor


def paper_counts(rows, effect):
    """(data, models, tasks) of the paper's model. A unit is a task's subsample. data: `total`
    [model, unit] answers (0: the model lacks it), sums of right answers of both arms `by_unit`,
    `by_model`, half their difference `change` [task], `task_idx` [unit], and `known`, the squared
    share of the variance of the tasks' changes in log odds that is more than binomial noise (the
    share itself mixes badly where it is a third)."""
    rows = rows.copy()
    for name, arm in zip(("control", "treatment"), EFFECTS[effect]):
        rows[name] = (rows[f"acc_{arm}"] * rows["n"]).round().astype(int)
    sums = rows.pivot_table(
        index=["task", "subsample"], columns="model", values=["control", "treatment", "n"],
        aggfunc="sum", fill_value=0)
    both = (sums["control"] + sums["treatment"]).to_numpy().T.astype(int)
    task_idx, tasks = pd.factorize(sums.index.get_level_values("task"))

    by_task = rows.groupby("task")[["control", "treatment", "n"]].sum()
    right = by_task[["control", "treatment"]].to_numpy()
    answers = by_task[["n"]].to_numpy()
    p = (right + 0.5) / (answers + 1)
    noise = (1 / (answers * p * (1 - p))).sum(1).mean()
    spread = np.diff(special.logit(p)).var() or 1e-9
    known = max(1 - noise / spread, 0) ** 2
    data = {"total": sums["n"].to_numpy().T.astype(int), "by_unit": both.sum(0),
            "by_model": both.sum(1), "change": np.diff(right)[:, 0] / 2, "task_idx": task_idx,
            "known": np.array(float(known))}
    return data, list(sums["n"]), tasks


def paper_model(rows, effect, args):
    """The paper's model of a cell, (1) to (10), in variables that mix (docs/results.md); few tasks:
    no W, one task: no U. Exactly, with S_j = (W_j0 + W_j1) / sqrt 2, D_j = (W_j1 - W_j0) / sqrt 2:
    a_j = mu + beta / 2 + U_j + S_j / sqrt 2, c_jk = a_j + V_jk, d_j = beta + sqrt 2 D_j,
    logit p = c_jk + alpha_i + (l - 1/2) d_j; d_j is centred as far, k, as the data know it."""
    pm, _, pt = import_pymc()
    data, models, tasks = paper_counts(rows, effect)
    J = len(tasks)
    interaction = J >= FEWEST_TASKS and not args.no_interaction
    units = range(len(data["task_idx"]))
    coords = {"model": models, "later": models[1:], "task": tasks, "unit": units}
    with pm.Model(coords=coords) as model:
        data = {name: pm.Data(name, value) for name, value in data.items()}
        task_idx = data["task_idx"]
        k = data["known"]
        mu = pm.Normal("mu", 0, 1)
        beta = pm.Normal("beta", 0, 1)
        alpha = pt.zeros(1)
        if len(models) > 1:
            alpha = pt.concatenate([[0.0], pm.Normal("alpha", 0, 5, dims="later")])
        sd_U = pm.HalfNormal("sd_U", 1) if J > 1 else 0
        sd_V = pm.HalfNormal("sd_V", 1)
        sd_W = pm.HalfNormal("sd_W", 3.5355) if interaction else 0

        # c_jk: the level of a task's subsample
        a = mu + beta / 2
        if J > 1:
            a = pm.Normal("a", a, pt.sqrt(sd_U**2 + sd_W**2 / 2), dims="task")[task_idx]
        if J >= CENTRED:
            c = pm.Normal("c", a, sd_V, dims="unit")
        else:
            raw = pm.Normal("c_raw", 0, 1, dims="unit")
            c = pm.Deterministic("c", a + sd_V * raw, dims="unit")

        # d_j: a task's effect
        d = beta
        if interaction:
            s = math.sqrt(2) * sd_W
            z = pm.Normal("z", k * beta, s**k, dims="task")
            d = beta + s ** (1 - k) * (z - k * beta)
        d = pm.Deterministic("d", d * pt.ones(J), dims="task")

        # over l, with q = e^(c + alpha): log((1 + q e^(d/2)) (1 + q e^(-d/2)))
        q = pt.exp(c)[None] * pt.exp(alpha)[:, None]
        ratio = pt.exp(d / 2)
        both = data["total"] * pt.log1p(q * (ratio + 1 / ratio)[task_idx] + q**2)
        right = (data["by_unit"] * c).sum() + (data["by_model"] * alpha).sum()
        pm.Potential("likelihood", right + (data["change"] * d).sum() - both.sum())
    return model


def predict_effects(posterior, total, task_idx, rng):
    """Add the predictive effects in points to the posterior, a draw a data set: `effect` (12) by
    model, task (nan where a model lacks it), `difference` (11) over all and by model."""
    c = posterior["c"].values[:, :, None]  # [chain, draw, 1, unit]
    d = posterior["d"].values  # [chain, draw, task]
    alpha = np.zeros((*d.shape[:2], len(total), 1))
    if "alpha" in posterior:
        alpha[:, :, 1:, 0] = posterior["alpha"]
    effects = np.empty((*alpha.shape[:3], d.shape[2]))
    for j in range(d.shape[2]):  # one task at a time, for the memory
        mine = task_idx == j
        level = c[..., mine] + alpha
        half = d[:, :, j, None, None] / 2
        control = rng.binomial(total[:, mine], special.expit(level - half))
        treatment = rng.binomial(total[:, mine], special.expit(level + half))
        answers = total[:, mine].sum(1)
        answers = np.where(answers, answers, np.nan)
        effects[..., j] = 100 * (treatment - control).sum(-1) / answers
    by_model = np.nanmean(effects, axis=-1)
    over = np.concatenate([by_model.mean(-1, keepdims=True), by_model], axis=-1)
    posterior["effect"] = ("chain", "draw", "model", "task"), effects
    posterior["difference"] = ("chain", "draw", "over"), over


def hierarchical_model(units, effect):
    """The model at this script's head. units: of one cell."""
    pm, _, pt = import_pymc()
    units = units[units["model"] != "all"]
    model_codes, models = pd.factorize(units["model"])
    task_codes, tasks = pd.factorize(units["task"], sort=True)
    dims = ("model", "task")
    with pm.Model(coords={"model": models, "task": tasks}) as model:
        model_idx = pm.Data("model_idx", model_codes)
        task_idx = pm.Data("task_idx", task_codes)
        value = pm.Data("value", units[effect].to_numpy())
        rounding = pm.Data("rounding", np.array(units["floor"].mean()))
        beta = pm.Normal("beta", 0, 10, dims="model")
        tau = pm.HalfNormal("tau", 5, dims="model")
        s = pm.HalfNormal("s", 10, dims="model")
        omega = pm.HalfNormal("omega", 1, dims="model")
        z = pm.Normal("z", 0, 1, dims=dims)
        delta = pm.Deterministic("effect", beta[:, None] + tau[:, None] * z, dims=dims)
        log_s = pm.Normal("log_s", pt.log(s)[:, None], omega[:, None], dims=dims)
        sd = pt.sqrt(pt.exp(2 * log_s) + rounding)  # equal differences have a width too
        pm.Normal("D", delta[model_idx, task_idx], sd[model_idx, task_idx], observed=value)
        new = pm.Normal("z_new", 0, 1, dims="model")
        pm.Deterministic("new_task", beta + tau * new, dims="model")
        pm.Deterministic("mean", beta.mean())
    return model


def warning_of(table, divergences):
    """What is wrong with reported parameters, "" if all converged; one that is nan did not."""
    r_hat = table["r_hat"].max(skipna=False)
    ess = table[["ess_bulk", "ess_tail"]].min(axis=None, skipna=False)
    if r_hat <= MAX_R_HAT and ess >= MIN_ESS and not divergences:
        return ""
    return f"not converged: r_hat {r_hat:.3f}, ESS {ess:.0f}, {count(divergences, 'divergence')}"


def compiled(model, data, key):
    """The model compiled, once for each key and shape of the data: it takes longer than most
    samplings."""
    import nutpie

    key = (*key, *[value.shape for value in data.values()])
    if key not in COMPILED:
        with warnings.catch_warnings(action="ignore"):  # of large expressions compiled in parts
            COMPILED[key] = nutpie.compile_pymc_model(model)
    ready = COMPILED[key]
    return ready.with_data(**{name: data[name] for name in ready.shared_data})


def fit(rows, units, effect, analysis, args):
    """The Fit of a cell's rows or units; if it did not converge, once more, finer."""
    _, arviz, _ = import_pymc()
    import nutpie

    if analysis == "paper":
        model = paper_model(rows, effect, args)
    else:
        model = hierarchical_model(units, effect)
    data = {variable.name: variable.get_value() for variable in model.data_vars}
    ready = compiled(model, data, (analysis, args.no_interaction))
    models = list(model.coords["model"])
    tasks = list(model.coords["task"])
    coords = {"model": models, "task": tasks, "later": models[1:], "over": ["all", *models]}
    for accept, longer, more in ATTEMPTS:
        trace = nutpie.sample(
            ready, chains=args.chains, tune=args.tune * longer, draws=args.draws * more,
            target_accept=accept, seed=args.seed, save_warmup=False, progress_bar=False)
        posterior = trace.posterior.assign_coords(**coords)
        if analysis == "paper":
            rng = np.random.default_rng(args.seed)
            predict_effects(posterior, data["total"], data["task_idx"], rng)
        own = [name for name in posterior if name.endswith("__")]  # the sampler's own variables
        reported = posterior.drop_vars([*NUISANCE, *own], errors="ignore")
        summary = arviz.summary(reported, hdi_prob=SHARE, round_to="none")
        warning = warning_of(summary, int(trace.sample_stats["diverging"].sum()))
        if not warning:
            break
    summary = summary.rename(columns={"hdi_5.5%": "hdi_low", "hdi_94.5%": "hdi_high"})
    summary = summary.drop(columns=["mcse_mean", "mcse_sd"]).assign(warning=warning)
    cell = tuple(rows[CELL].iloc[0])
    return Fit(cell, effect, analysis, models, posterior, summary, warning)


def task_effects(result, margin):
    """A fit's columns of tasks.csv: task effects, predicted (12) or shrunken."""
    draws = result.posterior["effect"]
    name = result.analysis
    low, high = import_pymc()[1].hdi(draws, hdi_prob=SHARE)["effect"].transpose("hdi", ...)
    columns = {name: draws.mean(("chain", "draw")), f"{name}_low": low, f"{name}_high": high}
    if name == "hierarchical":
        columns["p_beyond"] = (abs(draws) > margin).mean(("chain", "draw"))
    table = pd.DataFrame({column: values.to_series() for column, values in columns.items()})
    table = pd.concat({(*result.cell, result.effect): table}, names=[*CELL, "effect"])
    return table.reorder_levels([*GROUP, "task"])


def mean_effects(result, table, margin):
    """(a fit's rows of effects.csv, (11), or beta and its mean over models; notes on hierarchical
    means that are not these tasks' mean). table: effects.csv before."""
    here = (table[[*CELL, "effect"]] == [*result.cell, result.effect]).all(axis=1)
    known = {(row["model"], row["target"]): row for row in table[here].to_dict("records")}
    rows, notes = [], []
    for model in ("all", *result.models):
        if (model, TARGETS[0]) not in known:
            continue  # the models have different tasks: none for all
        name = "mean" if model == "all" else f"beta[{model}]"
        if result.analysis == "paper":
            name = f"difference[{model}]"
        mean, sd, low, high = result.summary.loc[name, ["mean", "sd", "hdi_low", "hdi_high"]]
        row = known[model, TARGETS[1]] | dict.fromkeys(ACCURACIES, math.nan)
        row |= {"target": result.analysis, "estimate": mean, "se": sd, "df": math.nan, "low": low,
                "high": high, "verdict": verdict_of(low, high, margin)}
        if result.analysis == "paper":
            row["arms"] = "plain"
        rows.append(row)
        first = known[model, TARGETS[0]]
        off = mean - first["estimate"]
        if result.analysis == "hierarchical" and abs(off) > first["se"]:
            notes.append(f"{model}: the hierarchical mean is {signed(off)} points from the mean of "
                         "these tasks, more than its standard error: take these tasks")
    return pd.DataFrame(rows, columns=table.columns), notes


# Words --------------------------------------------------------------------------------------------


def unit_of(metric):
    """What the metric's differences are."""
    if metric in SHARES:
        return "points"
    return "nats (lower is better)" if metric == "nll" else metric


def digits_of(metric):
    """Decimals of a difference."""
    return 2 if metric in SHARES else 4


def span(row):
    """"-0.14 to +0.84"."""
    digits = digits_of(row["metric"])
    return f"{signed(row['low'], digits)} to {signed(row['high'], digits)}"


def setting_of(row):
    """The setting of a row of effects.csv in words."""
    if row["m"]:
        return title_of(row["experiment"], row["m"], row["n"])
    return f"{row['experiment']}, all {row['settings']} settings of m and n"


def command(row, rows):
    """How to come to the subsamples that a row of effects.csv needs, and how long that takes."""
    for name in (*CELL, "model"):
        if row[name] not in ("", "all"):
            rows = rows[rows[name] == row[name]]
    R = 5 if math.isnan(row["needed"]) else row["needed"]
    runs = rows.groupby([*CELL, "model", "task"])
    lacking = (R - runs["subsample"].nunique()).clip(lower=0)
    minutes = (lacking * runs["seconds"].mean()).sum(skipna=False) / 60
    text = f"run the same again with --subsamples {R:.0f}"
    if not math.isnan(minutes):
        text += f" (about {count(math.ceil(minutes), 'minute')} more in one process)"
    return text


def verdict_words(row, rows):
    """(short answer, what follows the interval) of a bias."""
    margin = f"±{row['margin'] or 0:g}"
    unfair = row["estimate"] > 0
    if row["metric"] == "nll":
        unfair = not unfair
    if math.isnan(row["low"]) and row["subsamples"] > 1:
        return "No interval", ", all differences being equal"
    if math.isnan(row["low"]):
        return "Too early to tell", f", one subsample, no interval: {command(row, rows)}"
    if not row["verdict"]:
        holds = "excludes" if row["low"] > 0 or row["high"] < 0 else "holds"
        return f"The interval {holds} 0", ""
    if row["verdict"] == "within the margin":
        return f"No, within {margin}", ""
    if row["verdict"] == "beyond the margin" and unfair:
        return f"Yes, beyond {margin}", ""
    if row["verdict"] == "beyond the margin":
        return f"No, seen texts even score worse, beyond {margin}", ""
    if row["high"] - row["low"] <= 2 * NEAR * row["margin"]:
        return f"Near the margin of {margin}", ": take the interval as the answer"
    return "Too early to tell", f", not settled against {margin}: {command(row, rows)}"


def sentence(row, rows):
    """On a row of effects.csv, of these tasks."""
    those = "this task" if row["tasks"] == 1 else f"these {row['tasks']} tasks"
    found = f"{span(row)} {unit_of(row['metric'])} for {those} (89 % interval)"
    if math.isnan(row["low"]):
        found = f"{signed(row['estimate'], digits_of(row['metric']))} for {those}"
    elif row["subsamples"] == 1:
        found += ", whose one subsample cannot show effects that differ from run to run"
    if row["left_out"]:
        found += f", without {row['left_out']}, of which there is one subsample"
    what = f"{setting_of(row)}, {row['effect']}"
    if row["model"] != "all":
        what += f" of {row['model']}"
    if row["effect"] == "boost":
        return f"{what}: {found}"
    short, more = verdict_words(row, rows)
    return f"{what}: {short}: {found}{more}"


def settings_line(cells):
    """A sentence on the single settings. cells: rows of effects.csv."""
    known = cells.dropna(subset="low")
    excluded = ((known["low"] > 0) | (known["high"] < 0)).sum()
    verdicts = [f"{number} {verdict}" for verdict, number in known["verdict"].value_counts().items()
                if verdict]
    verdicts.append(f"{excluded} exclude 0 (by chance alone about {(1 - SHARE) * len(known):.1f})")
    if len(known) < len(cells):
        verdicts.append(f"{len(cells) - len(known)} without an interval")
    return f"its {len(cells)} single settings: {', '.join(verdicts)}"


def headlines(table):
    """Rows of effects.csv that answer: of these tasks, all models together, or each where they
    differ in tasks or subsamples; bias first, all settings together first."""
    table = table[table["target"] == TARGETS[0]]
    whole = table.groupby([*CELL, "effect"])["model"].transform(lambda names: "all" in set(names))
    table = table[(table["model"] == "all") | ~whole]
    return table.sort_values(["experiment", "effect", "model"], kind="stable")


def conclusions(table, rows):
    """[(kind, sentence)] for a reader: the answers, then what they are made of."""
    lines = []
    for (_, effect, _), mine in headlines(table).groupby(["experiment", "effect", "model"]):
        kind = "answer" if effect == "bias" else ""
        over = mine[mine["m"] == ""]
        single = mine[mine["m"] != ""]
        for row in (single if over.empty else over).to_dict("records"):
            lines.append((kind, sentence(row, rows)))
        if len(over):
            lines.append(("", settings_line(single)))
    whole = set(table.loc[table["model"] == "all", "experiment"])
    for experiment, mine in rows.groupby("experiment"):
        if mine["model"].nunique() > 1 and experiment not in whole:
            lines.append(("", f"{experiment}: its models differ in tasks or subsamples: each has "
                              "its own answer"))
    return lines


def task_notes(tasks, metric):
    """What only many tasks can show: their means, sign-flip tests, tasks that one could pick."""
    digits = digits_of(metric)
    lines = []
    single = tasks[tasks["model"] != "all"]
    for (experiment, effect), mine in single.groupby(["experiment", "effect"]):
        means = mine.groupby("task")["estimate"].mean().round(9)
        if len(means) < FEWEST_TASKS:
            continue
        least = f"{signed(means.min(), digits)} ({means.idxmin()})"
        most = f"{signed(means.max(), digits)} ({means.idxmax()})"
        lines.append(f"{experiment}: mean {effect} of a task over settings and models: from {least} "
                     f"to {most}, {(means > 0).sum()} of {len(means)} above 0")
        if effect == "bias" and "p" in mine:
            p = mine["p_adjusted"]
            picked = sorted(set(mine.loc[mine["estimate"] >= 3, "task"]))
            lines.append(f"{experiment}: one-sided sign-flip tests of a task's bias: adjusted p "
                         f"below .05 in {(p < 0.05).sum()} of {len(p)}, smallest {p.min():.3f}; +3 "
                         f"points or more: {', '.join(picked) or 'none'}")
    return lines


def little_learned(tasks):
    """A warning for each experiment where unseen texts are hardly told apart better than by the
    commonest class."""
    lines = []
    one = tasks[tasks["model"] != "all"].drop_duplicates([*CELL, "model", "task"])
    for experiment, mine in one.groupby("experiment"):
        low = mine[mine["unseen"] < mine["majority"] + 0.05]
        if low.empty:
            continue
        names = sorted(set(low["task"]))
        listed = ", ".join(names[:5])
        if len(names) > 5:
            listed += f" and {len(names) - 5} more"
        lines.append(
            f"{experiment}: in {len(low)} of {len(mine)} combinations of setting, model and task "
            f"({listed}) the accuracy on unseen texts is not 5 points above the share of the "
            "commonest class: there the model has learned too little to show an inflation.")
    return lines


def methods(experiment, rows, args):
    """A paragraph for a methods section."""
    names = sorted(set(rows["task"]))
    tasks = count(len(names), "task")
    if len(names) <= 5:
        tasks += f" ({', '.join(names)})"
    runs = rows.groupby([*CELL, "model", "task"])["subsample"].nunique()
    subsamples = f"{runs.min()} to {runs.max()}" if runs.min() < runs.max() else str(runs.min())
    sizes = {name: ", ".join(map(str, sorted(set(rows[name])))) for name in ("m", "n")}
    text = (
        f"{experiment}: For each of {tasks}, {subsamples} random draws (subsamples) were made of "
        f"m = {sizes['m']} labelled training texts and of two other sets of n = {sizes['n']} texts."
        f" Models ({', '.join(sorted(set(rows['model'])))}) without further pretraining, and "
        "pretrained on the unlabelled texts of each set, were then classified on ")
    if "plain" in set(rows["arms"]):
        text += "one of the sets, the test set"
    else:
        text += "both sets"
    text += (
        f". The bias is the mean {args.metric} on texts that were seen in pretraining minus that "
        "on texts that were not. Its mean over these tasks is given with an 89 % interval "
        "(Student's t; each task's variance between its subsamples")
    if (rows["counted"]).all():
        text += (", in which the sampling noise of its texts, known from the answers on which two "
                 f"models differ, counts as {W_COUNTS} further subsamples")
    text += "; Satterthwaite's degrees of freedom)"
    if args.margin:
        text += f". An effect within ±{args.margin:g} was taken as too small to matter"
    return f"{text}. {versions_of(rows)}."


# Figures ------------------------------------------------------------------------------------------


def frame(axis, names, margin):
    """A line a name, from the top; 0 and the margin."""
    if margin:
        axis.axvspan(-margin, margin, color="grey", alpha=0.15, lw=0)
    axis.axvline(0, color="grey", lw=1, ls="--", zorder=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)


def axis_words(effect, metric):
    """The label of an axis, with the direction that is unfair."""
    if effect == "boost":
        return f"boost = unseen - base ({unit_of(metric)})"
    side = "left" if metric == "nll" else "right"
    return f"bias = seen - unseen ({unit_of(metric)})\n{side} of 0: seeing the test texts helps"


def draw_effects(table, args):
    """effects.png: a line a setting, all settings together on top, models by colour."""
    table = table[table["target"].isin(TARGETS[:2])]
    names = [setting_of(row) for row in table.to_dict("records")]
    table = table.assign(name=names)
    top = list(table.loc[table["m"] == "", "name"].unique())
    lines = list(dict.fromkeys([*top, *names]))
    models = sorted(set(table["model"]), key=lambda model: (model != "all", model))
    colours = dict(zip([model for model in models if model != "all"], itertools.cycle(COLOURS)))
    colours["all"] = "black"
    effects = [effect for effect in EFFECTS if effect in set(table["effect"])]
    sizes = sorted(set(table.loc[table["target"] == TARGETS[0], "tasks"]))
    title = (f"89 % intervals; thick: these tasks ({' to '.join(map(str, sizes[:1] + sizes[1:][-1:]))})"
             ", thin: other tasks of this kind")
    if args.margin:
        title += f"; grey: within ±{args.margin:g}"
    height = 1.6 + 0.13 * len(lines) * (len(models) + 1)
    figure, (axes,) = panels(title, 1, len(effects), 2.5 + 4 * len(effects), height,
                             sharex=True, sharey=True)
    for axis, effect in zip(axes, effects):
        for name, line in table[table["effect"] == effect].groupby("name"):
            here = [model for model in models if model in set(line["model"])]
            whole = 1.6 if name in top else 1  # stands out
            for row in line.itertuples():
                y = lines.index(name) + 0.75 * ((here.index(row.model) + 0.5) / len(here) - 0.5)
                width = whole * (2.5 if row.target == TARGETS[0] else 0.8)
                axis.plot([row.low, row.high], [y, y], color=colours[row.model], lw=width)
                axis.plot(row.estimate, y, "o", ms=3 * whole, color=colours[row.model])
        frame(axis, lines, args.margin)
        if top:
            axis.axhline(len(top) - 0.5, color="black", lw=0.8)
        for label in axis.get_yticklabels()[: len(top)]:
            label.set_fontweight("bold")
        axis.set_xlabel(axis_words(effect, args.metric))
    legend = [Line2D([], [], color=colours[model], lw=3, label=model) for model in models]
    figure.legend(handles=legend, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def draw_tasks(table, effect, title, args):
    """tasks.*.png: each task's mean and own interval beside what the samplers predict (12) or leave
    after shrinking; a panel a model. table: rows of tasks.csv of one setting and effect."""
    table = table.rename(columns={"low": "estimate_low", "high": "estimate_high"})
    table = table[table["model"] != "all"]
    order = table.groupby("task")["estimate"].mean().sort_values(ascending=False).index
    models = list(table["model"].unique())
    width = 2.5 + 4.3 * len(models)
    figure, (axes,) = panels(title, 1, len(models), width, 1.8 + 0.28 * len(order), sharex=True,
                             sharey=True)
    looks = {"estimate": "these subsamples"} | {name: name for name in SAMPLERS if name in table}
    for axis, model in zip(axes, models):
        mine = table[table["model"] == model]
        for k, (name, label) in enumerate(looks.items()):
            y = order.get_indexer(mine["task"]) + 0.7 * ((k + 0.5) / len(looks) - 0.5)
            axis.hlines(y, mine[f"{name}_low"], mine[f"{name}_high"], COLOURS[k], lw=2, label=label)
            axis.plot(mine[name], y, "o", ms=4, color=COLOURS[k], mec="black", mew=0.5)
        frame(axis, order, args.margin)
        axis.set_title(model, fontsize=10)
        axis.set_xlabel(axis_words(effect, args.metric))
    if len(looks) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_accuracies(table, experiment, args):
    """accuracies.*.png: base, unseen, seen of each task beside the commonest class, means over the
    settings; a panel a model. table: rows of tasks.csv of one experiment."""
    table = table[table["model"] != "all"].drop_duplicates([*CELL, "model", "task"])
    table = table.groupby(["model", "task"])[ACCURACIES].mean()
    models = list(table.index.unique("model"))
    order = table["unseen"].groupby("task").mean().sort_values(ascending=False).index
    scale, words = (100, "accuracy, %") if args.metric == "acc" else (1, args.metric)
    figure, (axes,) = panels(
        f"{experiment}: what the models know, means over settings", 1, len(models),
        2.5 + 4.3 * len(models), 1.8 + 0.22 * len(order), sharex=True, sharey=True)
    looks = {"base": ("s", "no pretraining"), "unseen": ("o", "pretrained on other texts"),
             "seen": ("D", "pretrained on these texts")}
    for axis, model in zip(axes, models):
        mine = table.loc[model]
        y = order.get_indexer(mine.index)
        if args.metric == "acc":
            axis.plot(100 * mine["majority"], y, "|", ms=11, mew=2, color="grey",
                      label="commonest class")
        for k, (name, (marker, label)) in enumerate(looks.items()):
            axis.plot(scale * mine[name], y + 0.22 * (k - 1), marker, ms=4.5, color=COLOURS[k],
                      label=f"{name}: {label}")
        axis.set_yticks(range(len(order)), order, fontsize=8)
        axis.set_ylim(len(order) - 0.5, -0.5)
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(model, fontsize=10)
        axis.set_xlabel(words)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def draw_all(tasks, table, folder, args):
    """Draw and save effects.png, accuracies.*.png of each experiment, and, where the settings are
    few, tasks.*.png of each and each effect. Returns {name: words} of those for the page."""
    shown = {"effects.png": "boost and bias with their intervals"}
    draw_effects(table, args).savefig(folder / "effects.png", dpi=130)
    for experiment, mine in tasks.groupby("experiment"):
        if mine["task"].nunique() <= MOST_TASKS:
            name = f"accuracies.{file_of(experiment)}.png"
            draw_accuracies(mine, experiment, args).savefig(folder / name, dpi=130)
            shown[name] = "base, unseen and seen accuracies of each task"
    cells = tasks.groupby([*CELL, "effect"])
    if len(cells) > MOST_CELLS * len(args.effects):
        return shown
    for (*cell, effect), mine in cells:
        if mine["task"].nunique() <= MOST_TASKS:
            name = f"tasks.{file_of(*cell, effect)}.png"
            title = f"{title_of(*cell)}: {effect} of each task, 89 % intervals"
            draw_tasks(mine, effect, title, args).savefig(folder / name, dpi=130)
            if effect == "bias" or len(args.effects) == 1:
                shown[name] = f"{effect} of each task"
    return shown


# The page -----------------------------------------------------------------------------------------


def answers_text(table, metric):
    """effects.csv as strings for a reader: all of it if it is short, else what answers."""
    if len(table) > MOST_LINES:
        table = headlines(table).sort_index()
    rows = table.to_dict("records")
    digits = digits_of(metric)
    return pd.DataFrame({
        "setting": [setting_of(row) for row in rows], "effect": table["effect"].to_list(),
        "model": table["model"].to_list(), "answer for": table["target"].to_list(),
        "tasks": [str(row["tasks"]) for row in rows],
        "subsamples": [str(row["subsamples"]) for row in rows],
        "estimate": [signed(row["estimate"], digits) for row in rows],
        "89 % interval": [span(row).strip(" to") for row in rows],
        "verdict": table["verdict"].to_list(),
        "needed": [f"{row['needed']:.0f}".replace("nan", "") for row in rows]})


def accuracies_text(tasks, metric):
    """The accuracies of each setting, model and task, or of their mean, as strings; and the tasks'
    differences."""
    one = tasks[tasks["model"] != "all"]
    wide = one.pivot_table(index=[*CELL, "model", "task"], columns="effect", values="estimate")
    names = [*CELL, "model", "task", "subsamples", *ACCURACIES]
    wide = one.drop_duplicates(names[:5])[names].join(wide, on=names[:5])
    if len(wide) > MOST_LINES:
        sizes = wide.groupby([*CELL, "model"])["task"].nunique()
        numbers = wide.columns.difference([*CELL, "model", "task", "subsamples"], sort=False)
        wide = wide.groupby([*CELL, "model"])[[*numbers]].mean()
        wide.insert(0, "task", "mean of " + sizes.astype(str))
        wide = wide.reset_index()
    text = pd.DataFrame({"setting": [title_of(*cell) for cell in wide[CELL].to_numpy()]})
    for name in wide.columns.drop(CELL):
        values = wide[name].to_list()
        if name in ACCURACIES:
            digits, scale = (2, 100) if metric in SHARES or name == "majority" else (4, 1)
            values = [f"{rounded(scale * value, digits):.{digits}f}" for value in values]
        elif name in EFFECTS:
            values = [signed(value, digits_of(metric)) for value in values]
        text[name.replace("majority", "commonest class")] = values
    return text


def publish(rows, tasks, table, posterior, notes, args):
    """Make tables, figures and the page, and move them into args.out."""
    tasks = tasks.drop(columns=["variance", "prior"]).reset_index()
    with draft_of(args.out, STALE) as draft:
        write(draft, effects=table[COLUMNS], means=means_table(rows, args.metric), tasks=tasks)
        if len(posterior):
            write(draft, posterior=posterior)
        figures = draw_all(tasks, table, draft, args)
        parts = [paragraph(
            "bias = seen - unseen: what the unlabelled test texts add to the accuracy, beyond "
            "pretraining on other texts. boost = unseen - base: what those are worth. m labelled "
            "training texts, n unlabelled and n test texts.", "small")]
        parts += [paragraph(text, kind) for kind, text in conclusions(table, rows)]
        if args.metric == "acc":
            parts += [paragraph(text, "warning") for text in little_learned(tasks)]
        parts.append(figure_html(draft / "effects.png", figures.pop("effects.png")))
        parts += [heading("Accuracies, in %" if args.metric == "acc" else args.metric)]
        parts.append(table_html(accuracies_text(tasks, args.metric), ("setting", "model", "task")))
        parts += [figure_html(draft / name, words) for name, words in figures.items()]
        parts.append(heading(f"Answers, in {unit_of(args.metric)}"))
        answers = answers_text(table, args.metric)
        parts.append(table_html(answers, ("setting", "effect", "model", "answer for", "verdict")))
        parts.append(paragraph(
            "needed: subsamples of each task for an interval of half the margin to both sides. "
            f"{LOOKING}. All rows: effects.csv; each task with its own interval and test: "
            "tasks.csv.", "small"))
        parts += [paragraph(note) for note in notes]
        parts.append(heading("For a methods section"))
        for experiment, mine in rows.groupby("experiment"):
            parts.append(paragraph(methods(experiment, mine, args)))
        parts.append(paragraph(
            f"Analysed on {time.strftime('%Y-%m-%d')} with numpy {np.__version__}, pandas "
            f"{pd.__version__} by: {args.command}", "small"))
        write_page(draft / "report.html", QUESTION, parts)


def run_samplers(rows, units, tasks, table, notes, args):
    """Every analysis of every effect of every cell; what each adds is published when it is done.
    Returns the warnings."""
    jobs = list(itertools.product(rows.groupby(CELL), args.effects, dict.fromkeys(args.analysis)))
    summaries, failed, fitted = {}, [], []
    bar = tqdm(jobs, desc="samplers", unit="fit", leave=False)
    for (cell, mine), effect, analysis in bar:
        where = f"{title_of(*cell)}, {effect}, {analysis}: "
        sizes = mine.groupby(["model", "task"])["subsample"].nunique()
        few = sizes.min() < 2 or sizes.groupby("model").size().min() < 2
        if analysis == "hierarchical" and few:
            notes.append(f"{where}left out, it needs two tasks with two subsamples each")
            bar.write(notes[-1])
            continue
        here = (units[CELL] == list(cell)).all(axis=1)
        result = fit(mine, units[here], effect, analysis, args)
        new, off = mean_effects(result, table, args.margin)
        note = result.warning or "converged"
        dropped = [name for name in "WU" if f"sd_{name}" not in result.posterior]
        if dropped and analysis == "paper":
            note += f" without {' and '.join(dropped)}"
        for text in (note, *off):
            notes.append(where + text)
            bar.write(where + text)
        if result.warning:
            failed.append(where + result.warning)

        # Publish what it adds
        table = in_order(pd.concat([table, new], ignore_index=True))
        fitted.append(task_effects(result, args.margin))
        columns = pd.concat(fitted).groupby(level=[*GROUP, "task"]).first()
        summaries[*cell, effect, analysis] = result.summary
        names = [*CELL, "effect", "analysis", "parameter"]
        posterior = pd.concat(summaries, names=names).reset_index()
        publish(rows, tasks.join(columns), table, posterior, notes, args)
        show_page(args.out / "report.html", update=True)
    return failed


def in_order(table):
    """effects.csv: all settings together first, then cell by cell, all models first."""
    keys = table.assign(
        m=pd.to_numeric(table["m"]).fillna(0), n=pd.to_numeric(table["n"]).fillna(0),
        model=np.where(table["model"] == "all", "", table["model"]),
        target=table["target"].map(TARGETS.index))
    keys = keys.sort_values(["experiment", "m", "n", "effect", "model", "target"], kind="stable")
    return table.loc[keys.index].reset_index(drop=True)


# The same in meta_analysis.py ---------------------------------------------------------------------

# --- shared: reading ---
ARMS = ("base", "extra", "test")
CELL = ["experiment", "m", "n"]
RUN = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # names a row
NEEDED = [*RUN[:-1], "num_classes", "majority"]
WORDS = ["experiment", "model", "task", "split", "data", "recipe", "versions"]
WHOLE = {"m": 1, "n": 1, "subsample": 1, "num_classes": 1, "seed": 0}  # whole numbers, the least
SAME = [  # (scope, column): rows that agree in the scope must agree in the column
    (RUN[:5], "recipe"),
    (["experiment", "task"], "data"),
    (["experiment", "data"], "task"),
    (["experiment", "task", "m", "n", "subsample"], "split"),
]


def columns_of(metric):
    """The metric's columns: of the three arms on the texts of `test`, then of `extra`."""
    names = [f"{metric}_{arm}" for arm in ARMS]
    return names + [f"{name}_on_extra" for name in names]


def read_rows(path, needed):
    """A CSV file as a table of words with a column `where`. Lines with fewer fields than the
    header, which killed runs leave, are left out."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file, strict=True) if any(line)]
    except (OSError, ValueError, csv.Error) as error:
        raise SystemExit(f"error: {path} cannot be read as a CSV file in UTF-8: {error}")
    header = lines[0] if lines else []
    for name in (*needed, *header):
        if header.count(name) != 1:
            raise SystemExit(f"error: {path} has {header.count(name)} columns {name!r}, not one; "
                             f"separated by commas there are: {', '.join(header) or 'none'}")
    rows = []
    for number, line in enumerate(lines[1:], start=1):
        where = f"{path}, data row {number}"
        if len(line) > len(header):
            raise SystemExit(f"error: {where} has {len(line)} fields, the header {len(header)}: "
                             "correct or delete it")
        if len(line) < len(header):
            print(f"{where}: left out, for it was cut short")
        else:
            rows.append([*line, where])
    return pd.DataFrame(rows, columns=[*header, "where"], dtype=str)


def read_path(path, needed):
    """Tables of a results file or of a folder's: results.csv, results.*-of-*.csv, or the published
    layout m50/n500/bert/ag_news/accuracies.csv, whose row k is subsample k."""
    if not path.is_dir():
        return [read_rows(path, needed)]
    files = [*path.glob("results.csv"), *path.glob("results.*-of-*.csv")]
    tables = [read_rows(file, needed) for file in sorted(files)]
    for file in sorted(path.glob("m*/n*/*/*/accuracies.csv")):
        m, n, model, task = file.parts[-5:-1]
        table = read_rows(file, ["num_classes", "majority", *ARMS])
        table = table.rename(columns={arm: f"acc_{arm}" for arm in ARMS})
        tables.append(table.assign(experiment=path.resolve().name, m=m[1:], n=n[1:], model=model,
                                   task=task, subsample=range(1, len(table) + 1)).astype(str))
    if not tables:
        raise SystemExit(f"error: {path} holds no results.csv, results.*-of-*.csv or "
                         "m*/n*/*/*/accuracies.csv: name a results file")
    return tables


def refuse(rows, bad, what):
    """End at the first of the bad rows. what: a format string of its columns."""
    if bad.any():
        row = rows[bad].iloc[0]
        raise SystemExit(f"error: {row['where']}: {what.format(**row)}: correct or delete it")


def read_results(paths, metric):
    """All rows of the paths as a table: numbers, nan where there is none; words, nan where empty.
    Accuracies become k / n exactly."""
    needed = [*NEEDED, *columns_of("acc")[:3], *columns_of(metric)[:3]]
    rows = pd.concat([table for path in paths for table in read_path(path, dict.fromkeys(needed))])
    rows = rows.reset_index(drop=True)
    rows["seed"] = rows.get("seed", pd.Series("0", rows.index)).replace("", "0")
    may_lack = ["discordant", "discordant_on_extra", "seconds"]
    for each in ("acc", "f1", "nll", metric):
        may_lack += columns_of(each)
    rows = rows.reindex(columns=[*dict.fromkeys([*rows, *may_lack, *WORDS])])
    rows = rows.replace("", np.nan)
    for name in WORDS[:3]:
        refuse(rows, rows[name].isna(), f"{name} is empty")
    refuse(rows, rows["model"] == "all", "the model 'all' would be all models together")
    for name in dict.fromkeys([*needed, "seed", *may_lack]):
        if name in WORDS:
            continue
        values = pd.to_numeric(rows[name], errors="coerce")
        bad = values.isna() & (rows[name].notna() | (name in needed))
        what = "number"
        if name in WHOLE:
            what = f"whole number from {WHOLE[name]}"
            bad |= (values < WHOLE[name]) | (values % 1 != 0)
        elif name.startswith(("majority", "acc_", "f1_", "discordant")):
            what = "number from 0 to 1"
            bad |= (values < 0) | (values > 1)
        refuse(rows, bad | np.isinf(values), f"{name} is {{{name}}}, not a {what}")
        rows[name] = values.astype(int if name in WHOLE else float)
    for name in columns_of("acc"):
        exact = (rows[name] * rows["n"]).round() / rows["n"]
        off = (rows[name] - exact).abs() > 5.1e-5  # accuracies of four decimals will do
        refuse(rows, off, f"{name} = {{{name}}} is no whole number of right answers of n = {{n}}")
        rows[name] = exact
    return rows


def choose_rows(rows, args):
    """The rows that --experiment, --m, --n, --models and --tasks name, each known."""
    choices = {"experiment": args.experiment, "m": args.m, "n": args.n, "model": args.models,
               "task": args.tasks}
    for name, wanted in choices.items():
        found = sorted(set(rows[name]))
        for value in wanted or []:
            if value not in found:
                raise SystemExit(f"error: no row of {name} {value} among those chosen so far; "
                                 f"found: {', '.join(map(str, found))}")
        if wanted:
            rows = rows[rows[name].isin(wanted)]
    return rows


def refuse_conflict(rows, scope, name):
    """End where two rows agree in the scope and differ in a column that both have."""
    known = rows.dropna(subset=[*scope, name]).drop_duplicates([*scope, name])
    known = known[known.duplicated(scope, keep=False)].sort_values(scope, kind="stable")
    if len(known):
        one, two = known.iloc[0], known.iloc[1]
        raise SystemExit(f"error: {one['where']} and {two['where']} agree in {', '.join(scope)} "
                         f"and differ in {name} ({one[name]} and {two[name]}): keep one, or give "
                         "them two names of experiments")


def each_once(rows):
    """Each run once, with the columns that any of its rows has, sorted."""
    twice = rows[rows.duplicated(RUN, keep=False)]
    for name in twice.select_dtypes("number").columns.difference([*RUN, "seconds"]):
        refuse_conflict(twice, RUN, name)
    for scope, name in SAME:
        refuse_conflict(rows, scope, name)
    again = rows.duplicated(RUN).sum()
    if again:
        print(f"rows given more than once and used once: {again}")
    return rows.groupby(RUN, as_index=False).first()


def load_rows(args, metric="acc"):
    """The chosen rows of args.paths with the column `arms`: "crossed" where every row of a cell has
    the metric on the texts of `extra` too and args.plain is off, else "plain"."""
    rows = each_once(choose_rows(read_results(args.paths, metric), args))
    if rows.empty:
        raise SystemExit(f"error: no rows in {', '.join(map(str, args.paths))}: run "
                         "run_experiment.py first")
    there = rows[columns_of(metric)].notna().all(axis=1)
    cells = there.groupby([rows[name] for name in CELL])
    rows["arms"] = np.where(cells.transform("all") & (not args.plain), "crossed", "plain")
    for cell, known in cells:
        if known.any() and not known.all():
            print(f"{title_of(*cell)}: some rows lack the columns *_on_extra: all are taken "
                  "without them, on the texts of `test` alone")
    return rows


def title_of(experiment, m, n):
    """A cell in words."""
    return f"{experiment}, m = {m}, n = {n}"


def count(number, what):
    """"1 task", "2 tasks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def versions_of(rows):
    """How many rows each version of the libraries wrote, in words."""
    numbers = rows["versions"].fillna("no version named").value_counts()
    return "; ".join([f"{count(number, 'row')} of {name}" for name, number in numbers.items()])
# --- end shared ---


# --- shared: effects ---
SHARE = 0.89  # of every interval: the paper's
UPPER = (1 + SHARE) / 2  # its upper end, as a quantile
EFFECTS = {"boost": ("base", "extra"), "bias": ("extra", "test")}  # control, treatment: plain arms
SHARES = ("acc", "f1")  # metrics whose differences are told in points, hundredths


def add_effects(rows, metric="acc"):
    """The rows with the columns
        base, unseen, seen: the metric of the model without pretraining, of the pretrained models on
            texts that they were not, and were, pretrained on; crossed arms: means over both sets
        boost = unseen - base, bias = seen - unseen: in points, or the metric's own unit
        floor: the variance of rounding to whole answers, no difference being known better
        w: that of a crossed bias in accuracy by the noise of its texts, a difference between random
            halves of the 2n texts; counted: whether it is known by `discordant`, or is the least
            that the accuracies allow. Variances are in points^2."""
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


def changes_of(rows, effect):
    """Whole numbers of answers: n times the difference of accuracies, crossed 2n times."""
    texts = rows["n"] * (1 + (rows["arms"] == "crossed"))
    return (rows[effect] / 100 * texts).round().astype(int)


def sign_flip_p(changes):
    """One-sided p of sum(changes), whole numbers, under random signs: exact if they are symmetric
    about 0. The sum of the sizes with a plus has a convolution of two-point laws."""
    sizes = np.abs(changes[changes != 0])
    share = np.zeros(sizes.sum() + 1)  # of the sign patterns, by the sum of the sizes with a plus
    share[0] = 1
    reached = 0
    for size in sizes:
        share[size : reached + size + 1] += share[: reached + 1].copy()
        share[: reached + size + 1] /= 2
        reached += size
    observed = (sizes.sum() + changes.sum()) // 2
    return min(float(share[observed:].sum()), 1.0)  # ties count; rounding may exceed 1
# --- end shared ---


# --- shared: page ---
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's
STYLE = """
.report { max-width: 58rem; margin: auto; padding: 0 1rem 2rem; color: #222; background: #fff;
          font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
.report h1 { font-size: 1.5rem; line-height: 1.25 } .report h2 { font-size: 1.15rem }
.report .answer { font-size: 1.1rem; border-left: .3rem solid #0072B2; padding-left: .8rem }
.report .warning { border-left: .3rem solid #D55E00; padding-left: .8rem }
.report .small { color: #555; font-size: .85rem }
.report .scroll { overflow-x: auto } .report img { max-width: 100% }
.report table { border-collapse: collapse; font-size: .85rem; margin: 0 }
.report th, .report td { padding: .15rem .6rem; border: 0; border-bottom: 1px solid #ddd;
                         text-align: right; white-space: nowrap; vertical-align: bottom }
.report .text { text-align: left }
"""


def rounded(value, digits):
    """Rounded half away from 0, as on paper, whatever the last bits of a mean are: alike in every
    table, figure and sentence."""
    scale = 10**digits
    return np.sign(value) * np.floor(np.abs(value) * scale + 0.5 + 1e-7) / scale


def signed(value, digits=2):
    """A difference in words, "" where there is none."""
    return "" if np.isnan(value) else f"{rounded(value, digits) + 0:+.{digits}f}"


def paragraph(text, kind=""):
    """HTML of a paragraph; kind: answer, warning, small."""
    return f'<p class="{kind}">{html.escape(text)}</p>'


def heading(text):
    """HTML of a section's title."""
    return f"<h2>{html.escape(text)}</h2>"


def table_html(table, words=()):
    """HTML of a table of strings; words: its columns of text, the others are numbers."""
    lines = []
    for cells, tag in [(list(table), "th"), *[(row, "td") for row in table.to_numpy()]]:
        line = ""
        for name, cell in zip(table, cells):
            kind = ' class="text"' if name in words else ""
            line += f"<{tag}{kind}>{html.escape(str(cell))}</{tag}>"
        lines.append(f"<tr>{line}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def figure_html(path, words):
    """HTML of a picture, which becomes a part of the page."""
    picture = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{picture}"></p>'


def write_page(path, title, parts):
    """One file: to be opened, mailed, printed. parts: HTML."""
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", *parts])
    path.write_text(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f'<style>{STYLE}</style></head><body style="margin: 0"><div class="report">\n{body}\n'
        "</div></body></html>\n", encoding="utf-8", errors="replace")


def show_page(path, update=False):
    """In a notebook's cell, show the page, or show it anew where it stands."""
    notebook = sys.modules.get("IPython")
    if notebook and notebook.get_ipython():
        page = notebook.display.HTML(path.read_text(encoding="utf-8"))
        notebook.display.display(page, display_id=str(path), update=update)


@contextlib.contextmanager
def draft_of(folder, stale=()):
    """A folder in which to make the files of `folder`; they are moved there at the end, where all
    are made. What an earlier run left there of the patterns `stale` goes then."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=folder) as draft:
            yield Path(draft)
            for pattern in stale:
                for file in folder.glob(pattern):
                    file.unlink()
            for file in sorted(Path(draft).iterdir()):
                os.replace(file, folder / file.name)
    except OSError as error:
        raise SystemExit(f"error: {folder} cannot be written ({error.strerror}): give another --out")
    except KeyboardInterrupt:
        raise SystemExit(f"stopped: {folder} is as it was")


def write(folder, **tables):
    """Write tables as CSV, numbers to 6 significant digits."""
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")


def file_of(*names):
    """A part of a file's name; a number keeps those apart that had to be changed."""
    words = ".".join(map(str, names))
    safe = re.sub(r"[^\w.=+-]", "-", words)[:60]
    if safe != words:
        safe += f"-{zlib.crc32(words.encode()):08x}"
    return safe


def panels(title, lines, columns, width, height, **more):
    """(figure, its axes [lines, columns]); sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(lines, columns, squeeze=False, **more)
# --- end shared ---


# Flags and main -----------------------------------------------------------------------------------


def whole(text):
    """argparse type: a whole number from 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse_args(argv):
    """Command-line flags; --help reads like a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument_group("what to run").add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], metavar="FILE or FOLDER",
        help="results files, folders of them, or the published layout (results.csv)")
    add("--effects", nargs="+", choices=tuple(EFFECTS), default=list(EFFECTS), help="(boost bias)")
    add("--metric", default="acc", help="acc, f1, nll or any NAME of NAME_base and so on (acc)")
    add("--margin", type=float, help="effects within it do not matter (acc, f1: 1; else none)")
    add("--plain", action="store_true", help="only the texts of test, as in the paper")
    add("--experiment", nargs="+", metavar="NAME", help="only these (all)")
    add("--m", nargs="+", type=int, help="only these (all)")
    add("--n", nargs="+", type=int, help="only these (all)")
    add("--models", nargs="+", metavar="NAME", help="only these (all)")
    add("--tasks", nargs="+", metavar="NAME", help="only these (all)")
    add = parser.add_argument_group("sampling").add_argument
    add("--analysis", nargs="+", choices=SAMPLERS, default=SAMPLERS, help="(paper hierarchical)")
    add("--draws", type=int, default=1000, help="per chain; 0: no sampler (%(default)s)")
    add("--tune", type=whole, default=500, help="tuning steps per chain (%(default)s)")
    add("--chains", type=whole, default=4, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    add("--no-interaction", action="store_true", help="the paper's model without W (Figure 10)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="FOLDER",
        help="what an earlier run left there is replaced (fits/NAME of the first file)")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python", "fit_model.py", *(sys.argv[1:] if argv is None else argv)])
    args.effects = list(dict.fromkeys(args.effects))
    if args.out is None:
        name = args.paths[0].resolve().name.removesuffix(".csv")
        if args.metric != "acc":
            name += f".{args.metric}"
        args.out = Path("fits", name)
    if args.margin is None and args.metric in SHARES:
        args.margin = 1.0
    if args.margin is not None and not 0.001 <= args.margin < math.inf:
        parser.error("--margin is a number from 0.001")
    if args.seed < 0 or args.draws < 0:
        parser.error("--seed and --draws are not below 0")
    return args


@matplotlib.rc_context({"text.parse_math": False})  # a $ in a name is a $
def main(argv=None):
    args = parse_args(argv)
    rows = add_effects(load_rows(args, args.metric), args.metric)
    units = unit_table(rows)
    tasks = task_table(units, rows, args)
    table = in_order(effects_table(tasks, args))
    notes = task_notes(tasks.reset_index(), args.metric)
    publish(rows, tasks, table, pd.DataFrame(), notes, args)
    page = args.out / "report.html"
    print(*[text for _, text in conclusions(table, rows)], "", *notes, sep="\n")
    if len(table) <= MOST_LINES:
        print("", answers_text(table, args.metric).to_string(index=False), "", sep="\n")
    print(f"page: {page.resolve()}; tables and figures beside it")
    show_page(page)
    if not args.draws or args.metric != "acc":
        return
    try:
        failed = run_samplers(rows, units, tasks, table, notes, args)
    except KeyboardInterrupt:
        raise SystemExit(f"stopped: {args.out} is complete but for the samplers that were left")
    if failed:
        print(f"warning: {count(len(failed), 'fit')} did not converge: more --tune and --draws may "
              "help", file=sys.stderr)
        raise SystemExit(3)


if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    main([] if "__file__" not in globals() else None)
