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
what they say. m labelled training texts, n unlabelled and n test texts; base, unseen, seen:
accuracies of the model without pretraining, and of the pretrained ones on texts that they were not,
and were, pretrained on. D_ijk of model i, task j, subsample k, in points (hundredths), is
    boost = unseen - base      or      bias = seen - unseen
Four answers for each setting (experiment, m, n), with 89 % intervals:
    these tasks       the headline, in closed form: the mean over tasks of their mean D; model
                      "all": D is averaged over the models first (three subsamples of models whose
                      noise is independent: it covers 98 %)
    tasks like these  a t interval over the task means
    paper             Y_ijkl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + V_jk + W_jl + beta l
                      (l = 1: treatment), and the differences (11), (12) that it predicts, on the
                      texts of `test` alone; its intervals do not hold 89 %
    hierarchical      D_ijk ~ N(delta_ij, s_ij), delta_ij ~ N(beta_i, tau_i), log s_ij ~ N(log s_i,
                      omega_i): how much tasks differ; it weights quiet tasks most

Commands, cheapest first
    python fit_model.py results.csv --draws 0      # page and tables in 3 seconds
    python fit_model.py results.csv                # then the two samplers, minutes
    python fit_model.py results.csv more.csv folder --effects bias --n 500 --metric f1 --margin 2

Writes to fits/results/ (the first file's name) report.html, its figures, and the columns
    effects.csv    experiment, m, n (empty: all settings together), metric, effect, model, arms
                   (crossed: both sets of texts; plain: `test` alone), target (the names above),
                   tasks, left_out (tasks with one subsample), subsamples (fewest of a task),
                   majority (share of the commonest class), base, unseen, seen (all four in %, but
                   for nll), estimate, se, df, low, high (points), margin, verdict, needed
                   (subsamples for a half-width of half the margin)
    tasks.csv      experiment, m, n, effect, model, task, subsamples, arms, majority, base, unseen,
                   seen, estimate, sd (between subsamples), low, high, verdict (at 1 - .11 / tasks,
                   so that all hold together), p (one-sided sign flips of a bias), p_adjusted
                   (Benjamini-Hochberg), paper ((12)), hierarchical, their _low, _high, p_beyond
                   (the margin)
    posterior.csv  experiment, m, n, effect, analysis, parameter, mean, sd, hdi_low, hdi_high,
                   r_hat, ess_bulk, ess_tail, warning (empty: converged; else exit status 3)

Measured 2026-11-23, seconds of CPU: --draws 0 takes 3 on two tasks, 6 on 37,500 published rows; all
on two tasks of 14 subsamples 38, on 25 published tasks of two models, n = 500, bias alone, 54.
"""

import argparse
import base64
import csv
import html
import io
import itertools
import math
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import special, stats
from tqdm.auto import tqdm

os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")  # no C compiler is needed: nutpie takes numba
warnings.filterwarnings("ignore", "\nArviZ")  # it announces its next version

QUANTILE = 0.3  # of the chi-square by which `needed` allows for noise that is badly known
NEAR = 0.55  # half-width over margin up to which an open verdict is about the effect itself
WEAK = 5  # points of macro-F1 above guessing, below which a model has learned too little
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # target of acceptance, times the tuning, the draws
FEWEST_TASKS = 5  # fewer: no W, c_jk not centred, no line of other tasks
MOST_FIGURES, MOST_ROWS, MOST_LINES = 8, 80, 30  # of single settings; in a figure; in a table
SAMPLERS = ("paper", "hierarchical")
TARGETS = ("these tasks", "tasks like these", *SAMPLERS)
GROUP = ["experiment", "m", "n", "effect", "model"]
UNIT = [*GROUP[:3], "model", "task", "subsample"]
ACCURACIES = ["base", "unseen", "seen", "majority"]
MEANS = [*ACCURACIES, "f1", "chance", "floor", "w", "seconds"]
REPORTED = ("mu", "beta", "alpha", "sd_U", "sd_V", "sd_W", "d", "tau", "s", "omega", "new_task",
            "difference")  # parameters
NAMES = {"acc": "accuracy", "f1": "macro-F1", "nll": "mean negative log-probability"}
DIGITS = {"acc": 2, "f1": 2}
UNITS = {"acc": "points", "f1": "points", "nll": "nats (lower is better)"}  # of differences
MARKS = {  # of the accuracies: colour as in docs/idea.png, marker, area
    "base": ("#bbbbbb", "s", 45), "unseen": ("#88ccee", "o", 75), "seen": ("#ee9966", "D", 28)}
TWO_LOOKS = "at a bias of the margin 12 to 16 % of second looks are wrong, 10 % of single ones"
GLOSS = (
    "Accuracies in %; base: without pretraining; unseen, seen: pretrained on other texts, on these "
    "texts. boost = unseen - base, bias = seen - unseen, in points [89 % interval]; needed: "
    "subsamples for a half-width of half the margin. Every task: tasks.csv."
)


# The answer in closed form --------------------


def measure(args):
    """The rows with their effects; accuracies and shares in percent; `f1`: macro-F1 on unseen
    texts, `chance`: what guessing gives."""
    rows = add_effects(load_rows(args, args.metric), args.metric)
    rows["f1"] = 100 * add_effects(rows, "f1")["unseen"]
    rows["chance"] = 100 / rows["num_classes"]
    rows["majority"] *= 100
    if args.metric in SHARES:
        rows[["base", "unseen", "seen"]] *= 100
    rows["seconds"] = pd.to_numeric(rows["seconds"], errors="coerce")
    return rows


def average(rows, by):
    """Means of the rows that agree in `by`. How far their answers to one text go together is not
    known: w is at most the square of the mean of its roots."""
    groups = rows.assign(w=np.sqrt(rows["w"])).groupby(by)
    table = groups[[*MEANS, *EFFECTS]].mean()
    table["w"] **= 2
    table[[*EFFECTS]] = table[[*EFFECTS]].round(9)  # equal differences stay equal
    table["counted"] = groups["counted"].all()
    table["arms"] = groups["arms"].first()
    return table.reset_index()


def unit_table(rows):
    """A row per cell, model, task and subsample, over seeds. Model "all": the mean over the models
    of a cell, where all have the same tasks and subsamples."""
    units = average(rows, UNIT)
    parts = [units]
    for _, mine in units.groupby(CELL):
        draws = mine.groupby(["task", "subsample"]).size()
        models = mine["model"].nunique()
        if draws.min() == models > 1:
            together = average(mine, [*CELL, "task", "subsample"]).assign(model="all")
            together["seconds"] *= models
            parts.append(together)
    return pd.concat(parts, ignore_index=True)


def task_table(units, rows, args):
    """tasks.csv before the samplers, indexed by GROUP and task, with what is known of the noise:
    `variance` of one subsample, nan where it is not known, its `df`, and whether they are `pooled`
    over the tasks of a cell: of a bias, where all rows know the noise of their texts."""
    groups = units.groupby([*CELL, "model", "task"])
    parts = []
    for effect in args.effects:
        part = groups[MEANS].mean().assign(
            effect=effect, arms=groups["arms"].first(), subsamples=groups.size(),
            estimate=groups[effect].mean(), sd=groups[effect].std(),
            pooled=groups["counted"].all())
        if effect == "boost":
            part = part.assign(w=math.nan, pooled=False)
        parts.append(part.reset_index())
    cells = []
    for _, cell in pd.concat(parts).groupby(GROUP):
        if cell["pooled"].all():
            variance, df = pool_noise(cell)
        else:  # at least what rounding or the accuracies imply
            variance = np.maximum(cell["sd"] ** 2, cell[["floor", "w"]].max(axis=1))
            df = cell["subsamples"] - 1
        cells.append(cell.assign(variance=variance, df=df, pooled=cell["pooled"].all()))
    table = pd.concat(cells).set_index([*GROUP, "task"])

    se = np.sqrt(table["variance"] / table["subsamples"])
    half = stats.t.ppf(UPPER, table["df"]) * se
    table["low"], table["high"] = table["estimate"] - half, table["estimate"] + half
    J = table.groupby(GROUP)["df"].transform("size")
    wide = stats.t.ppf(1 - (1 - UPPER) / J, table["df"]) * se  # all J hold together
    joint = pd.DataFrame({"low": table["estimate"] - wide, "high": table["estimate"] + wide})
    table["verdict"] = verdicts_of(joint, args.margin)
    if args.metric == "acc" and "bias" in args.effects:
        table = table.join(sign_flips(rows))
    return table


def sign_flips(rows):
    """p and p_adjusted of each task's bias, indexed like task_table."""
    texts = rows["n"] * (1 + (rows["arms"] == "crossed"))
    change = (rows["bias"] / 100 * texts).round().astype(int)  # of right answers
    groups = rows.assign(change=change, effect="bias").groupby([*GROUP, "task", "subsample"])
    tests = groups["change"].sum().groupby([*GROUP, "task"]).agg(sign_flip_p).to_frame("p")
    tests["p_adjusted"] = tests["p"].groupby(GROUP).transform(stats.false_discovery_control)
    return tests


def sign_flip_p(changes):
    """One-sided p of sum(changes), whole numbers, under random signs, exact if they are symmetric
    about 0: the sum of those with a plus has a convolution of two-point laws."""
    sizes = np.abs(changes[changes != 0])
    share = np.ones(1)  # of the sign patterns, by the sum of the sizes with a plus
    for size in sizes:
        two_points = np.zeros(size + 1)
        two_points[[0, size]] = 0.5
        share = np.convolve(share, two_points)
    observed = (sizes.sum() + changes.sum()) // 2
    return min(float(share[observed:].sum()), 1.0)  # rounding may exceed 1


class Noise(NamedTuple):
    """Of a mean over the tasks of a cell."""
    variance: np.ndarray  # of a task's single subsample, points^2
    counts: np.ndarray  # its subsamples
    pooled: bool  # whether all tasks share their degrees of freedom
    mean: float


def interval(cells, R=None, more=1):
    """(se, df, half-width) of the 89 % interval of a mean over cells (Noise) that are not
    correlated: Student's t with Satterthwaite's df. R: at so many subsamples of each task; more:
    noise than is known, as a factor of the variance."""
    variance = square = 0
    for cell in cells:
        J = len(cell.counts)
        K = cell.counts if R is None else np.full(J, R)
        v = more * cell.variance / K / (J * len(cells)) ** 2
        variance += v.sum()
        if cell.pooled:
            square += v.sum() ** 2 / (K.sum() - J + TEXTS_DF)
        else:
            square += (v**2 / np.maximum(K - 1, 0.5)).sum()  # one alone: its v is nan
    if not variance > 0:
        return math.nan, math.nan, math.nan
    se, df = math.sqrt(variance), variance**2 / square
    return se, df, stats.t.ppf(UPPER, df) * se


def needed_subsamples(cells, half):
    """The least number of subsamples of each task that brings the half-width down to `half`, with
    the noise at the upper end of what is known of it."""
    _, df, _ = interval(cells)
    if not (df > 0 and half):
        return math.nan
    more = df / stats.chi2.ppf(QUANTILE, df)
    at_2, df, _ = interval(cells, 2, more)
    R = max(2, int(2 * (stats.norm.ppf(UPPER) * at_2 / half) ** 2))  # t reaches further
    if R == 2 and all(cell.pooled for cell in cells):
        R = 1
    while interval(cells, R, more)[2] > half:
        R += 1
    return R


def verdicts_of(table, margin):
    """Where intervals lie in respect of (-margin, margin)."""
    low, high = table["low"], table["high"]
    if margin is None:
        return ""
    within = (-margin < low) & (high < margin)
    beyond = (low > margin) | (high < -margin)
    return np.select([low.isna(), within, beyond],
                     ["", "within the margin", "beyond the margin"], "not settled")


def effect_row(key, target, part, cells, **more):
    """A row of effects.csv: means over part, rows of tasks.csv or of this table; `cells`: what
    `interval` takes."""
    row = dict(zip(GROUP, key), target=target, cells=cells, subsamples=part["subsamples"].min(),
               arms=" and ".join(sorted(set(part["arms"]))), seconds=part["seconds"].sum(), **more)
    return row | part[[*ACCURACIES, "estimate"]].mean().to_dict()


def effects_table(tasks, args):
    """effects.csv before the samplers; m = n = 0: the mean over the settings of an experiment that
    have an interval."""
    rows = []
    for key, cell in tasks.reset_index().groupby(GROUP):
        used = cell[cell["variance"].notna()]  # one subsample alone does not know its noise
        if used.empty:
            used = cell
        left_out = ", ".join(sorted(set(cell["task"]) - set(used["task"])))
        noise = Noise(used["variance"].to_numpy(), used["subsamples"].to_numpy(),
                      used["pooled"].all(), used["estimate"].mean())
        rows.append(effect_row(key, TARGETS[0], used, [noise], tasks=len(used), left_out=left_out))
        spread = cell["estimate"].var(ddof=1)
        noise = Noise(np.array([spread]), np.array([len(cell)]), False, noise.mean)
        rows.append(effect_row(key, TARGETS[1], cell, [noise], tasks=len(cell), left_out=""))
    known = [row for row in rows if row["target"] == TARGETS[0] and interval(row["cells"])[0] > 0]
    known = pd.DataFrame(known, columns=[*rows[0]])
    for (experiment, effect, model), mine in known.groupby(["experiment", "effect", "model"]):
        if len(mine) > 1:
            left_out = ", ".join(sorted(set(mine["left_out"]) - {""}))
            rows.append(effect_row((experiment, 0, 0, effect, model), TARGETS[0], mine,
                                   mine["cells"].sum(), tasks=mine["tasks"].min(),
                                   left_out=left_out))
    table = in_order(pd.DataFrame(rows)).assign(metric=args.metric, margin=args.margin)
    table[["se", "df", "half"]] = [interval(cells) for cells in table["cells"]]
    table["low"] = table["estimate"] - table["half"]
    table["high"] = table["estimate"] + table["half"]
    table["verdict"] = verdicts_of(table, args.margin)
    wanted = (args.margin or 0) / 2
    table["needed"] = [needed_subsamples(cells, wanted) for cells in table["cells"]]
    table["needed"] = table["needed"].where(table["target"] == TARGETS[0])
    return table


def in_order(table):
    """effects.csv: all settings together first, then cell by cell, all models first."""
    return table.sort_values(GROUP, kind="stable", ignore_index=True,
                             key=lambda names: names.replace("all", ""))


# The two models --------------------


def paper_counts(rows, effect):
    """(data, models, tasks) of the paper's model. A unit is a task's subsample. data: answers
    `total` [model, unit], right ones of both arms `by_unit`, `by_model`, half their difference
    `change` [task], `task_idx` [unit], and `known`, the squared share of the variance of the tasks'
    changes in log odds that is more than binomial noise."""
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
            "known": known}
    return data, list(sums["n"]), tasks


def paper_model(data, models, tasks, interaction=True):
    """The paper's model of a cell, (1) to (10), in variables that mix (docs/results.md):
    logit p = c_jk + alpha_i + (l - 1/2) d_j. Few tasks: no W, one task: no U."""
    import pymc as pm
    import pytensor.tensor as pt

    task_idx = data["task_idx"]
    k = data["known"]
    J = len(tasks)
    interaction = interaction and J >= FEWEST_TASKS
    coords = {"later": models[1:], "task": tasks, "unit": range(len(task_idx))}
    with pm.Model(coords=coords) as model:
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
        if J >= FEWEST_TASKS:
            c = pm.Normal("c", a, sd_V, dims="unit")
        else:
            raw = pm.Normal("c_raw", 0, 1, dims="unit")
            c = pm.Deterministic("c", a + sd_V * raw, dims="unit")

        # d_j: a task's effect, centred as far, k, as the data know it
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


def predict_effects(posterior, data, models, rng):
    """The posterior with predictive effects in points: `effect` (12) by model, task (nan where a
    model lacks it), `difference` (11) over all and by model."""
    c = posterior["c"].values[:, :, None]  # [chain, draw, 1, unit]
    d = posterior["d"].values  # [chain, draw, task]
    alpha = np.zeros((*d.shape[:2], len(models), 1))
    if "alpha" in posterior:
        alpha[:, :, 1:, 0] = posterior["alpha"]
    effects = np.empty((*alpha.shape[:3], d.shape[2]))
    for j in range(d.shape[2]):  # one task at a time, for the memory
        mine = data["task_idx"] == j
        total = data["total"][:, mine]
        level = c[..., mine] + alpha
        half = d[:, :, j, None, None] / 2
        control = rng.binomial(total, special.expit(level - half))
        treatment = rng.binomial(total, special.expit(level + half))
        answers = np.where(total.any(1), total.sum(1), np.nan)
        effects[..., j] = 100 * (treatment - control).sum(-1) / answers
    by_model = np.nanmean(effects, axis=-1)
    over = np.concatenate([by_model.mean(-1, keepdims=True), by_model], axis=-1)
    return posterior.assign_coords(model=models, over=["all", *models]).assign(
        effect=(("chain", "draw", "model", "task"), effects),
        difference=(("chain", "draw", "over"), over))


def hierarchical_model(units, effect):
    """The model at this script's head. units: of one cell."""
    import pymc as pm
    import pytensor.tensor as pt

    model_idx, models = pd.factorize(units["model"])
    task_idx, tasks = pd.factorize(units["task"], sort=True)
    dims = ("model", "task")
    coords = {"model": models, "task": tasks, "over": ["all", *models]}
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", 0, 10, dims="model")
        tau = pm.HalfNormal("tau", 5, dims="model")
        s = pm.HalfNormal("s", 10, dims="model")
        omega = pm.HalfNormal("omega", 1, dims="model")
        z = pm.Normal("z", 0, 1, dims=dims)
        delta = pm.Deterministic("effect", beta[:, None] + tau[:, None] * z, dims=dims)
        if len(tasks) >= 2 * FEWEST_TASKS:
            log_s = pm.Normal("log_s", pt.log(s)[:, None], omega[:, None], dims=dims)
        else:
            log_s = pt.log(s)[:, None] + omega[:, None] * pm.Normal("log_s", 0, 1, dims=dims)
        rounding = units["floor"].mean()  # equal differences have a width too
        sd = pt.sqrt(pt.exp(2 * log_s) + rounding)[model_idx, task_idx]
        pm.Normal("D", delta[model_idx, task_idx], sd, observed=units[effect].to_numpy())
        new = pm.Normal("z_new", 0, 1, dims="model")
        pm.Deterministic("new_task", beta + tau * new, dims="model")
        pm.Deterministic("difference", pt.concatenate([[beta.mean()], beta]), dims="over")
    return model


def warning_of(table, divergences):
    """What is wrong with reported parameters, "" if all converged; one that is nan did not."""
    r_hat = table["r_hat"].max(skipna=False)
    ess = table[["ess_bulk", "ess_tail"]].min(axis=None, skipna=False)
    if r_hat <= MAX_R_HAT and ess >= MIN_ESS and not divergences:
        return ""
    return f"not converged: r_hat {r_hat:.3f}, ESS {ess:.0f}, divergences: {divergences}"


def fit(rows, effect, analysis, draws, interaction=True):
    """(draws, a row of posterior.csv for each parameter) of a cell's rows; if it did not converge,
    once more, finer."""
    import arviz
    import nutpie

    if analysis == "paper":
        data, models, tasks = paper_counts(rows, effect)
        model = paper_model(data, models, tasks, interaction)
    else:
        model = hierarchical_model(average(rows, UNIT), effect)
    with warnings.catch_warnings(action="ignore"):  # of large expressions compiled in parts
        ready = nutpie.compile_pymc_model(model)
    for accept, longer, more in ATTEMPTS:
        trace = nutpie.sample(
            ready, chains=4, tune=draws // 2 * longer, draws=draws * more,
            target_accept=accept, seed=0, save_warmup=False, progress_bar=False)
        posterior = trace.posterior
        if posterior.sizes["draw"] < draws * more or posterior["beta"].isnull().any():
            raise KeyboardInterrupt  # nutpie takes Ctrl-C for itself and returns what it has
        if analysis == "paper":
            posterior = predict_effects(posterior, data, models, np.random.default_rng(0))
        reported = posterior[[name for name in REPORTED if name in posterior]]
        summary = arviz.summary(reported, hdi_prob=SHARE, round_to="none")
        warning = warning_of(summary, int(trace.sample_stats["diverging"].sum()))
        if not warning:
            break
    summary = summary.rename(columns={"hdi_5.5%": "hdi_low", "hdi_94.5%": "hdi_high"})
    return posterior, summary.drop(columns=["mcse_mean", "mcse_sd"]).assign(warning=warning)


def add_fit(posterior, summary, key, table, tasks, margin):
    """(effects.csv, tasks.csv, note) with what a fit adds. key: CELL, effect, analysis."""
    import arviz

    *cell, analysis = key
    here = table[(table[GROUP[:-1]] == cell).all(axis=1)]
    first = here[here["target"] == TARGETS[0]].set_index("model")
    new = here[here["target"] == TARGETS[1]].assign(target=analysis, df=math.nan)
    new[ACCURACIES] = math.nan
    columns = ["mean", "sd", "hdi_low", "hdi_high"]
    found = summary.loc["difference[" + new["model"] + "]", columns]
    new[["estimate", "se", "low", "high"]] = found.to_numpy()
    new["verdict"] = verdicts_of(new, margin)
    note = summary["warning"].iloc[0] or "converged"
    dropped = " and ".join([name for name in "WU" if f"sd_{name}" not in posterior])
    off = new.set_index("model")["estimate"] - first["estimate"]
    far = ", ".join(off.index[off.abs() > first["se"]])
    if analysis == "paper":
        new["arms"] = "plain"
        if dropped:
            note += f" without {dropped}"
    elif far:
        note += f"; the mean is over a standard error from that of these tasks, take that: {far}"

    draws = posterior["effect"]
    low, high = arviz.hdi(draws, hdi_prob=SHARE)["effect"].transpose("hdi", ...)
    columns = {analysis: draws.mean(("chain", "draw")), f"{analysis}_low": low,
               f"{analysis}_high": high}
    if analysis == "hierarchical" and margin:
        columns["p_beyond"] = (abs(draws) > margin).mean(("chain", "draw"))
    found = pd.DataFrame({name: values.to_series() for name, values in columns.items()})
    found = pd.concat({tuple(cell): found}, names=GROUP[:-1])
    tasks = tasks.reindex(columns=dict.fromkeys([*tasks, *found]))
    tasks.update(found)
    return in_order(pd.concat([table, new], ignore_index=True)), tasks, note


# Words --------------------


def signed(value, metric):
    """A difference in words; halves go away from 0, whatever the last bits of a mean are."""
    return f"{value + math.copysign(1e-9, value):+z.{DIGITS.get(metric, 4)}f}"


def count(number, what):
    """"1 task", "2 tasks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def setting_of(row):
    """The setting of a row of effects.csv in words."""
    if row["m"]:
        return title_of(*[row[name] for name in CELL])
    return f"{row['experiment']}, {len(row['cells'])} settings together"


def span(values):
    """The least and the greatest in words."""
    ends = sorted({*values.dropna().agg(["min", "max"]).dropna()})
    return " to ".join(f"{end:.0f}" for end in ends)


def subsamples_of(rows):
    """How many there are of a task."""
    return span(rows.groupby([*CELL, "model", "task"])["subsample"].nunique())


def names_of(values):
    """All different values in words."""
    return ", ".join(map(str, sorted(set(values.dropna()))))


def short_answer(row):
    """(kind of card, answer) of a row of effects.csv."""
    margin = f"±{row['margin'] or 0:g}"
    low, high = row["low"], row["high"]
    if row["effect"] == "boost":
        return "", ""
    if not low < high:
        return "open", "Too early to tell: no interval"
    if row["verdict"] == "within the margin":
        return "no", f"No: within {margin}"
    if row["verdict"] == "beyond the margin":
        if (low > 0) == (row["metric"] != "nll"):
            return "yes", f"Yes: beyond {margin}"
        return "no", f"No: seen texts even score worse, beyond {margin}"
    if not row["verdict"]:
        return "", "The interval excludes 0" if low > 0 or high < 0 else "The interval holds 0"
    if high - low <= 2 * NEAR * row["margin"]:
        return "open", f"Near the margin of {margin}: take the interval as the answer"
    return "open", f"Too early to tell: neither within nor beyond {margin}"


def next_step(row):
    """What to do where it is too early to tell; of rows that nobody here ran, how far it is."""
    if not short_answer(row)[1].startswith("Too early"):
        return ""
    again = row["needed"] if row["needed"] > 0 else 5
    if not row["seconds"] > 0:
        return f"{again:.0f} subsamples of each task would do."
    minutes = math.ceil((again - row["subsamples"]) * row["seconds"] / 60)
    return (f"Run the same again with --subsamples {again:.0f} (about "
            f"{count(minutes, 'minute')} of one process) and take that answer: {TWO_LOOKS}.")


def bracket(row):
    """An estimate with its interval, if it has one."""
    estimate, low, high = (signed(row[name], row["metric"]) for name in ("estimate", "low", "high"))
    return f"{estimate} [{low}, {high}]" if row["low"] < row["high"] else estimate


def remarks(row):
    """What is to be known of a row of effects.csv, if anything."""
    text = ""
    if row["left_out"]:
        text += f" Without {row['left_out']}, of which there is one subsample."
    if row["subsamples"] == 1:
        text += " One subsample cannot show effects that differ from run to run."
    if not row["m"]:
        cells = row["cells"]
        excluded = sum(abs(cell.mean) > interval([cell])[2] for cell in cells)
        text += (f" Alone, {excluded} of {len(cells)} settings exclude 0 (by chance about "
                 f"{(1 - SHARE) * len(cells):.1f}).")
    return text


def sentence(head):
    """A head in one line: answer, bias, boost, what to do."""
    (first, row), *others = head.items()
    name = f"{first} of {row['model']}".removesuffix(" of all")
    text = (f"{setting_of(row)}: {name} {bracket(row)} {UNITS.get(row['metric'], row['metric'])} "
            f"for {count(row['tasks'], 'task')}")
    for effect, other in others:
        text += f"; {effect} {bracket(other)}"
    answer = short_answer(row)[1]
    return f"{answer}. {text}.{remarks(row)} {next_step(row)}".removeprefix(". ").strip()


def in_words(row):
    """A bias with its interval as a sentence."""
    metric = row["metric"]
    model = row["model"].replace("all", "the models")
    text = (f"Having seen the texts in pretraining changes the score of {model} by "
            f"{signed(row['estimate'], metric)} {UNITS.get(metric, metric)}, on average over "
            f"{count(row['tasks'], 'task')}")
    if row["low"] < row["high"]:
        text += (f"; the true bias lies between {signed(row['low'], metric)} and "
                 f"{signed(row['high'], metric)} with 89 % confidence")
    return f"{text}.{remarks(row)}"


def headlines(table):
    """Rows of effects.csv that answer: these tasks, all models together, or each where they differ
    in tasks or subsamples."""
    table = table[table["target"] == TARGETS[0]]
    whole = table.groupby([*CELL, "effect"])["model"].transform(lambda names: "all" in set(names))
    return table[(table["model"] == "all") | ~whole]


def heads_of(table):
    """[{effect: row}, bias first] of rows of effects.csv, by setting, model and target."""
    heads = {}
    for row in table.to_dict("records"):
        key = (*[row[name] for name in CELL], row["model"], row["target"])
        heads.setdefault(key, {})[row["effect"]] = row
    return [dict(sorted(head.items())) for head in heads.values()]


def answers_of(table):
    """The heads that are answered: an experiment's settings together, if there are several."""
    table = headlines(table)
    together = table.groupby(["experiment", "effect", "model"])["m"].transform("min") == 0
    return heads_of(table[(table["m"] == 0) | ~together])


def limits_of(heads, tasks):
    """Sentences on what limits an answer: pretraining does nothing, or little was learned."""
    lines = []
    for head in heads:
        if len(head) == 2 and {row["verdict"] for row in head.values()} == {"within the margin"}:
            lines.append(f"{setting_of(head['bias'])}: the boost too is within the margin: "
                         "where pretraining does nothing a bias can hardly arise.")
    cases = tasks.reset_index().query("model != 'all'").drop_duplicates([*CELL, "model", "task"])
    for experiment, mine in cases.dropna(subset=["f1", "chance"]).groupby("experiment"):
        weak = mine[mine["f1"] < mine["chance"] + WEAK]
        if len(weak):
            lines.append(f"{experiment}: macro-F1 on unseen texts is not {WEAK} points above "
                         f"guessing in {len(weak)} of {len(mine)} cases "
                         f"({names_of(weak['task'][:5])}): the "
                         "model has learned too little there to show an inflation.")
    return lines


def methods(rows, args):
    """A paragraph for a methods section."""
    tests = "both sets" if rows["arms"].eq("crossed").all() else "the first set"
    noise = "the variance between its subsamples"
    if rows["counted"].all():
        noise = ("the noise of drawing its texts, known from those that only one of the two "
                 "pretrained models gets right, plus what all subsamples vary beyond it")
    margin = ""
    if args.margin:
        margin = f" Effects within ±{args.margin:g} were taken as too small to matter."
    return (
        f"From each of {count(rows['task'].nunique(), 'task')}, {subsamples_of(rows)} random "
        f"subsamples of m = {names_of(rows['m'])} labelled texts and of two disjoint sets of n = "
        f"{names_of(rows['n'])} other texts were drawn. In each, {names_of(rows['model'])} was "
        "taken as it is, and pretrained on the unlabelled texts of either set; it was then trained "
        f"on the labelled texts, or prompted where the task is zero-shot, and tested on {tests}. "
        f"The bias is the {NAMES.get(args.metric, args.metric)} on texts seen in pretraining minus "
        "that on unseen ones. We report its mean over these tasks with an 89 % interval by "
        f"Student's t; the variance of a task is {noise}.{margin}")


# Figures --------------------


def forest(parts, title, args):
    """PNG of a figure: accuracies, boost, bias side by side. parts: rows of tasks.csv or
    effects.csv, set off from each other, with the columns line, its name, and weight, from thin (1)
    to bold (4).
    """
    rows = pd.concat(parts)
    lines = rows.drop_duplicates("line")
    if len(lines) > MOST_ROWS:
        title += f" (the first {MOST_ROWS} of {len(lines)} lines)"
        lines = lines[:MOST_ROWS]
        rows = rows[rows["line"].isin(lines["line"])]
    apart = lines["weight"].diff().fillna(0) != 0
    places = dict(zip(lines["line"], np.arange(len(lines)) + 0.5 * apart.cumsum()))
    rows = rows.assign(y=rows["line"].map(places))
    bottom = max(places.values())

    effects = [effect for effect in ("boost", "bias") if effect in args.effects]
    size = 4.6 + 2.2 * len(effects), 1.8 + 0.27 * bottom
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, 1 + len(effects), sharey=True)
    draw_accuracies(axes[0], rows.drop_duplicates("line"), args.metric)
    for axis, effect in zip(axes[1:], effects):
        draw_effect(axis, rows[rows["effect"] == effect], effect, args)
    marks = {}
    for axis in axes:
        axis.grid(axis="x", alpha=0.3)
        handles, words = axis.get_legend_handles_labels()
        marks.update(zip(words, handles))
    figure.legend(marks.values(), marks, loc="outside upper center", ncols=6, frameon=False,
                  title=title, handletextpad=0.3, columnspacing=1.2)
    names = [name if len(name) < 45 else f"{name[:43]}…" for name in places]
    axes[0].set_yticks([*places.values()], names, parse_math=False)
    axes[0].set_ylim(bottom + 0.7, -0.7)
    for label, weight in zip(axes[0].get_yticklabels(), lines["weight"]):
        label.set_fontweight("bold" if weight == 4 else "normal")
    return png_of(figure)


def draw_accuracies(axis, lines, metric):
    """base, unseen, seen of each line as marks on it."""
    shown = lines[["base", "unseen", "seen"]]
    axis.hlines(lines["y"], shown.min(axis=1), shown.max(axis=1), "#777777", lw=1)
    for name, (colour, mark, area) in MARKS.items():
        axis.scatter(lines[name], lines["y"], area, color=colour, marker=mark, label=name,
                     edgecolor="#333333", lw=0.5, zorder=3)
    words = NAMES.get(metric, metric)
    if metric in SHARES:
        axis.scatter(lines["majority"], lines["y"], 90, "black", marker="|",
                     label="commonest class")
        words += ", %"
    axis.set_title(words, fontsize=10)


def draw_effect(axis, rows, effect, args):
    """Estimates and intervals of each line; of a bias the margin too."""
    axis.hlines(rows["y"], rows["low"], rows["high"], "black", lw=rows["weight"],
                label="89 % interval")
    axis.scatter(rows["estimate"], rows["y"], 8 + 8 * rows["weight"], "black", zorder=3)
    axis.axvline(0, color="#777777", lw=1, ls="--", zorder=0)
    words = {"boost": "boost = unseen - base", "bias": "bias = seen - unseen"}[effect]
    axis.set_title(f"{words}\n{UNITS.get(args.metric, args.metric)}", fontsize=10)
    if effect == "bias" and args.margin:
        axis.axvspan(-args.margin, args.margin, color="#dddddd", lw=0, zorder=-1,
                     label=f"margin ±{args.margin:g}")
        axis.axvspan(-1.3 * args.margin, 1.3 * args.margin, alpha=0)  # so that its ends are seen


def named(rows, names, weight):
    """Rows as a part of a figure, with the model where it is not "all"."""
    lines = [f"{name}, {model}".removesuffix(", all") for name, model in zip(names, rows["model"])]
    return rows.assign(line=lines, weight=weight)


def draw_all(tasks, table, args):
    """PNGs by name: effects, of the only setting or a line a setting; if they are few, each: its
    tasks model by model, the greatest effect first, and their means below."""
    these = table[table["target"] == TARGETS[0]]
    like = table[(table["target"] == TARGETS[1]) & (table["tasks"] >= FEWEST_TASKS)]
    cells = tasks.reset_index().query("model != 'all'").groupby(CELL)
    figures = {}
    if len(cells) > 1:
        single, together = headlines(table).query("m > 0"), these[these["m"] == 0]
        parts = [named(part, [setting_of(row) for row in part.to_dict("records")], weight)
                 for part, weight in ((single, 2), (together, 4))]
        title = "Means of tasks; bold: all settings of m and n of an experiment together"
        figures["effects"] = forest(parts, title, args)
    if len(cells) > MOST_FIGURES:
        return figures
    for number, (cell, mine) in enumerate(cells, 1):
        mine = mine.sort_values("estimate", ascending=False)
        mine = mine.sort_values(["effect", "model"], kind="stable")
        parts = [named(mine, mine["task"], 2)]
        alone = len(mine) == mine["effect"].nunique()
        if alone and len(cells) > 1:
            continue  # the line of its setting says the same
        if not alone:
            kinds = (these, "these {} tasks", 4), (like, "tasks like these", 1)
            for means, words, weight in kinds:
                means = means[(means[CELL] == [*cell]).all(axis=1)]
                parts.append(named(means, map(words.format, means["tasks"]), weight))
        name = f"setting-{number}" if len(cells) > 1 else "effects"
        figures[name] = forest(parts, title_of(*cell), args)
    return figures


# The page --------------------


def heads_html(heads, names):
    """HTML of a table with a line a head and these columns."""
    lines = []
    for head in heads:
        row = [*head.values()][0]
        kind, answer = short_answer(row)
        name = f"{setting_of(row)}, {row['model']}".removesuffix(", all")
        short = f'<b class="{kind}">{answer.partition(":")[0]}</b>'
        line = {"": short, "setting": html.escape(name)}
        line |= {name: row[name] for name in ("target", "tasks", "subsamples")}
        line |= {name: f"{row[name]:.{DIGITS.get(row['metric'], 4)}f}" for name in ACCURACIES}
        line |= {effect: bracket(mine) for effect, mine in head.items()}
        lines.append(line | {"needed": row["needed"]})
    table = pd.DataFrame(lines).reindex(columns=names)
    table = table.rename(columns={"majority": "commonest class"})
    return table_html(table, escape=False, formatters={"needed": "{:.0f}".format})


def cards(heads):
    """HTML: the short answer of the only head in large letters, of several a line each."""
    rows = [[*head.values()][0] for head in heads]
    if len(rows) == 1:
        row = rows[0]
        kind, answer = short_answer(row)
        large, _, small = answer.partition(":")
        return (f'<div class="card {kind}">{paragraph(setting_of(row), "small")}<b>{large}</b> '
                f"{small}{paragraph(in_words(row))}{paragraph(next_step(row))}</div>")
    parts = [heads_html(heads, ["", "setting", "bias", "boost"])]
    for row in rows:
        text = f"{remarks(row)} {next_step(row)}".strip()
        if text:
            parts.append(paragraph(f"{setting_of(row)}: {text}", "small"))
    return "".join(parts)


def runs_html(rows):
    """HTML of what was run: a line a task, of many an experiment."""
    by = ["experiment", "task"]
    if rows.groupby(by).ngroups > MOST_LINES:
        by = ["experiment"]
    lines = []
    for _, mine in rows.groupby(by):
        K, m = mine["num_classes"], mine["m"]
        task = mine["task"].iloc[0]
        if len(by) == 1:
            task = count(mine["task"].nunique(), "task")
        lines.append({
            "experiment": mine["experiment"].iloc[0], "task": task,
            "model": names_of(mine["model"]).replace("bert-tiny", "bert-tiny (a demonstration)"),
            "classes": span(K), "m": names_of(m), "of it used": span(K * (m // K)),
            "n": names_of(mine["n"]), "subsamples": subsamples_of(mine),
            "versions": names_of(mine["versions"])})
    return table_html(pd.DataFrame(lines))


def publish(rows, tasks, table, summaries, notes, args):
    """Make figures, page and tables, then save them."""
    figures = draw_all(tasks, table, args)
    heads = answers_of(table)
    shown = table[table["low"].notna() | (table["target"] == TARGETS[0])]
    if len(shown) > MOST_LINES:
        shown = headlines(table)
    names = ["setting", "target", "tasks", "subsamples", *ACCURACIES, "bias", "boost", "needed"]
    parts = [cards(heads), *map(figure_html, figures.values()), "<h2>Settings</h2>",
             heads_html(heads_of(shown), names), paragraph(GLOSS, "small")]
    parts += [paragraph(text, "warning") for text in limits_of(heads, tasks)]
    parts += [paragraph(note) for note in notes]
    parts += ["<h2>What was run</h2>", runs_html(rows)]
    parts += ["<h2>For a methods section</h2>", paragraph(methods(rows, args))]
    versions = f"; numpy {np.__version__}, pandas {pd.__version__}"
    parts.append(paragraph(args.command + versions, "small"))

    inner = ["variance", "df", "pooled", "f1", "chance", "floor", "w", "seconds"]
    cells = table.assign(m=table["m"].replace(0, ""), n=table["n"].replace(0, ""))
    tables = {"effects": cells.drop(columns=["cells", "half", "seconds"]),
              "tasks": tasks.reset_index().drop(columns=inner)}
    if summaries:
        posterior = pd.concat(summaries, names=[*GROUP[:-1], "analysis", "parameter"])
        tables["posterior"] = posterior.reset_index()
    title = "Is pretraining on the test texts unfair here?"
    save(args.out, tables, figures, title, parts, again=bool(notes))


def run_samplers(rows, tasks, table, args):
    """Fit and publish all models, one by one. Returns how many did not converge."""
    jobs = list(itertools.product(rows.groupby(CELL), args.effects, args.analysis))
    summaries, notes, failed = {}, [], 0
    for (cell, mine), effect, analysis in tqdm(jobs, desc="samplers"):
        sizes = mine.groupby(["model", "task"])["subsample"].nunique()
        enough = sizes.min() > 1 and sizes.groupby("model").size().min() >= FEWEST_TASKS
        note = f"left out, it needs {FEWEST_TASKS} tasks with two subsamples each"
        if analysis == "paper" or enough:
            posterior, summary = fit(mine, effect, analysis, args.draws, not args.no_interaction)
            key = *cell, effect, analysis
            table, tasks, note = add_fit(posterior, summary, key, table, tasks, args.margin)
            failed += note.startswith("not converged")
            summaries[key] = summary
        notes.append(f"{title_of(*cell)}, {effect}, {analysis}: {note}.")
        tqdm.write(notes[-1])
        publish(rows, tasks, table, summaries, notes, args)
    return failed


# The same in meta_analysis.py --------------------

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
    return [f"{metric}_{arm}{on}" for on in ("", "_on_extra") for arm in ARMS]


def read_rows(path, needed):
    """A CSV file as a table of words with a column `where`, without lines cut short by a kill."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header, *lines = [line for line in csv.reader(file, strict=True) if any(line)] or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise SystemExit(f"error: {path} cannot be read as a CSV file in UTF-8: {error}")
    for name in (*needed, *header):
        if header.count(name) != 1:
            raise SystemExit(f"error: {path} has {header.count(name)} columns {name!r}, not one; "
                             f"separated by commas: {', '.join(header)}")
    rows = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, data row {number}"
        if len(line) > len(header):
            raise SystemExit(f"error: {where} has more fields than the header: correct it")
        if len(line) < len(header):
            print(f"{where}: left out, for it was cut short")
        else:
            rows.append([*line, where])
    return pd.DataFrame(rows, columns=[*header, "where"], dtype=str)


def read_path(path, needed):
    """Tables of a results file, or of a folder's results.csv and results.*-of-*.csv."""
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
        bad = np.isinf(values) | values.isna() & (rows[name].notna() | (name in needed))
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
    """The rows that --experiment, --m, --n, --models and --tasks name, each known."""
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
        one, two = known.iloc[0], known.iloc[1]
        raise SystemExit(f"error: {one['where']} and {two['where']} agree in {', '.join(scope)} "
                         f"and differ in {name} ({one[name]} and {two[name]}): keep one")


def load_rows(args, metric="acc"):
    """The chosen rows, each run once, with the column `arms`: "crossed" where every row of a cell
    has the metric on the texts of `extra` too, and no --plain, else "plain"."""
    rows = choose_rows(read_results(args.paths, metric), args)
    if rows.empty:
        raise SystemExit(f"error: {args.paths[0]} has no rows: run run_experiment.py first")
    twice = rows[rows.duplicated(RUN, keep=False)]
    for name in twice.select_dtypes("number"):
        refuse_conflict(twice, RUN, name)
    for scope, name in SAME:
        refuse_conflict(rows, scope, name)
    if len(twice):
        print(f"rows given more than once and used once: {rows.duplicated(RUN).sum()}")
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
  .no { color: #006b4f } .yes { color: #b3261e } .open { color: #8a5a00 }
  .warning { border-left: .3rem solid #8a5a00; padding-left: .8rem }
  .small { font-size: .85rem } .large { font-size: 1.3rem }
  table { font-size: .85rem; border-collapse: collapse }
  td, th { padding: .15rem .8rem .15rem 0; text-align: left; white-space: nowrap }
  .scroll { overflow-x: auto }
  img { max-width: 100%; min-width: 34rem }
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
    """HTML of a figure, which becomes a part of the page."""
    picture = base64.b64encode(png).decode()
    return f'<div class="scroll"><img src="data:image/png;base64,{picture}"></div>'


def name_of(paths):
    """Of the folder of results of these files."""
    name = paths[0].resolve().stem
    return name if len(paths) == 1 else f"{name}-and-{len(paths) - 1}-more"


def save(folder, tables, figures, title, parts, again=False):
    """Write tables and figures by name, and report.html of these parts in HTML, one file to be
    handed on: beside the old ones, which are replaced when all is written. In a notebook's cell it
    is shown; again: in its old place."""
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
    notebook = sys.modules.get("IPython")
    if notebook and notebook.get_ipython():
        page = notebook.display.HTML(page)
        notebook.display.display(page, display_id=str(folder), update=again)
# --- end shared ---


# Flags and main --------------------


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], metavar="FILE or FOLDER",
        help="(results.csv)")
    add("--effects", nargs="+", choices=list(EFFECTS), default=["bias", "boost"], help="(both)")
    add("--metric", default="acc", help="or f1, nll, any NAME of columns NAME_base, ... (acc)")
    add("--margin", type=float, help="effects within it do not matter (acc, f1: 1)")
    add("--plain", action="store_true", help="only the texts of test, as in the paper")
    kinds = {"experiment": str, "m": int, "n": int, "models": str, "tasks": str}
    for flag, kind in kinds.items():
        add(f"--{flag}", nargs="+", type=kind, help="only these (all)")
    add("--analysis", nargs="+", choices=SAMPLERS, default=SAMPLERS, help="samplers (both)")
    add("--no-interaction", action="store_true", help="the paper's model without W (Figure 10)")
    add("--draws", type=int, default=1000, help="of the samplers per chain; 0: none (1000)")
    add("--out", type=Path, metavar="FOLDER", help="(fits/NAME of the first file)")
    args = parser.parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    args.command = f"python fit_model.py {shlex.join(words)}"
    if args.out is None:
        name = name_of(args.paths)
        args.out = Path("fits", name if args.metric == "acc" else f"{name}.{args.metric}")
    if args.margin is None and args.metric in SHARES:
        args.margin = 1.0
    if args.draws < 0 or not (args.margin is None or args.margin >= 0.001):
        parser.error("--draws begins at 0, --margin at 0.001")
    return args


def main(argv=None):
    args = parse_args(argv)
    failed = 0
    try:
        rows = measure(args)
        tasks = task_table(unit_table(rows), rows, args)
        table = effects_table(tasks, args)
        publish(rows, tasks, table, {}, [], args)
        heads = answers_of(table)
        for head in heads:
            print(sentence(head))
        for text in limits_of(heads, tasks):
            print(text)
        print(f"page: {(args.out / 'report.html').resolve()}")
        if args.draws and args.metric == "acc":
            failed = run_samplers(rows, tasks, table, args)
    except KeyboardInterrupt:
        raise SystemExit(f"stopped: what stands in {args.out} stays")
    if failed:
        print(f"warning: fits that did not converge: {failed}; more --draws may help")
        raise SystemExit(3)


if __name__ == "__main__":
    # in a notebook cell sys.argv is the kernel's: give flags in the list, such as ["--m", "50"]
    main([] if "__file__" not in globals() else None)
