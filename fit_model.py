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
                      "all": D is averaged over the models first
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

Writes to fits/results/ (the first file's name) report.html, its figures as PNG, and the columns
    effects.csv    experiment, m, n (empty: all settings together), metric, effect, model, arms
                   (crossed: both sets of texts; plain: `test` alone), target (the names above),
                   tasks, left_out (tasks with one subsample), subsamples (fewest of a task),
                   majority (share of the commonest class), base, unseen, seen, estimate, se, df,
                   low, high, margin, verdict, needed (subsamples for a half-width of half the
                   margin)
    means.csv      experiment, m, n, model, tasks, rows, boost, bias: Table 1, on `test` alone
    tasks.csv      experiment, m, n, effect, model, task, subsamples, arms, majority, base, unseen,
                   seen, estimate, sd (between subsamples), low, high, verdict, p (one-sided sign
                   flips of a bias), p_adjusted (Benjamini-Hochberg), paper ((12)), hierarchical,
                   their _low, _high, p_beyond (the margin)
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

W_COUNTS = 5  # subsamples, seen before, as which the noise of the texts counts
QUANTILE = 0.3  # of the chi-square by which `needed` allows for noise that is badly known
NEAR = 0.55  # half-width over margin up to which an open verdict is about the effect itself
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # target of acceptance, times the tuning, the draws
FEWEST_TASKS = 5  # fewer: no W, c_jk not centred, no figure of other tasks
MOST_FIGURES, MOST_LINES = 8, 30  # of single settings; of a table on the page
SAMPLERS = ("paper", "hierarchical")
TARGETS = ("these tasks", "tasks like these", *SAMPLERS)
GROUP = ["experiment", "m", "n", "effect", "model"]
UNIT = [*GROUP[:3], "model", "task", "subsample"]
ACCURACIES = ["base", "unseen", "seen", "majority"]
REPORTED = ("mu", "beta", "alpha", "sd_U", "sd_V", "sd_W", "d", "tau", "s", "omega", "new_task",
            "difference")  # parameters
UNITS = {"acc": "points", "f1": "points", "nll": "nats (lower is better)"}  # of differences
GLOSS = (
    "base: without pretraining; unseen, seen: pretrained on other texts, on these texts; majority: "
    "share of the commonest class (acc, f1: in %). boost = unseen - base, bias = seen - unseen; "
    "low, high: 89 % interval; needed: subsamples for a half-width of half the margin. Fix their "
    "number before looking, or raise it once, to this: adding subsamples until a verdict comes "
    "breaks the intervals."
)


# The answer in closed form --------------------


class Noise(NamedTuple):
    """Of an estimate. An item a task, or a task of each setting."""
    share: np.ndarray  # of its variance at one subsample of each task, points^2
    counts: np.ndarray  # subsamples
    prior: np.ndarray  # W_COUNTS where the noise of the texts is known, else 0


def average(rows, by):
    """Means of the rows that agree in `by`. How far their answers to one text go together is not
    known: w is at most the square of the mean of its roots."""
    seconds = pd.to_numeric(rows["seconds"], errors="coerce")
    groups = rows.assign(w=np.sqrt(rows["w"]), seconds=seconds).groupby(by)
    table = groups[[*ACCURACIES, *EFFECTS, "floor", "w", "seconds"]].mean()
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


def interval(noise):
    """(se, df, half-width) of the 89 % interval: Student's t with Satterthwaite's df."""
    v = noise.share / noise.counts
    if not v.sum() > 0:
        return math.nan, math.nan, math.nan
    se = math.sqrt(v.sum())
    df = v.sum() ** 2 / (v**2 / (noise.prior + noise.counts - 1)).sum()
    return se, df, stats.t.ppf(UPPER, df) * se


def needed_subsamples(noise, half):
    """The least number R of each task that brings the half-width down to `half`, with the noise at
    the upper end of what is known of it."""
    _, df, _ = interval(noise)
    if not (df > 0 and half):
        return math.nan
    share = noise.share * df / stats.chi2.ppf(QUANTILE, df)
    R = max(1, int(stats.norm.ppf(UPPER) ** 2 * share.sum() / half**2))  # t reaches further
    if not noise.prior.all():
        R = max(R, 2)
    while interval(Noise(share, np.full(len(share), R), noise.prior))[2] > half:
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


def task_table(units, rows, args):
    """tasks.csv before the samplers, indexed by GROUP and task. `variance`: between subsamples, the
    noise of the texts, if known, counting as W_COUNTS of them; at least what rounding or the
    accuracies imply; nan of one subsample alone."""
    parts = {}
    for effect in args.effects:
        groups = units.groupby([*CELL, "model", "task"])
        table = groups[[*ACCURACIES, "floor", "w", "seconds"]].mean()
        table = table.assign(arms=groups["arms"].first(), subsamples=groups.size(),
                             estimate=groups[effect].mean(), sd=groups[effect].std())
        table["prior"] = W_COUNTS * groups["counted"].all()
        if effect == "boost":
            table = table.assign(w=math.nan, prior=0)
        parts[effect] = table
    table = pd.concat(parts, names=["effect"]).reorder_levels([*GROUP, "task"]).sort_index()
    K, prior = table["subsamples"], table["prior"]
    df = (prior + K - 1).replace(0, math.nan)
    least = table["floor"].where(prior > 0, table[["floor", "w"]].max(axis=1))
    total = prior * table["w"].fillna(0) + (K - 1) * table["sd"].fillna(0) ** 2
    table["variance"] = np.maximum(total / df, least)
    half = stats.t.ppf(UPPER, df) * np.sqrt(table["variance"] / K)
    table["low"], table["high"] = table["estimate"] - half, table["estimate"] + half
    table["verdict"] = verdicts_of(table, args.margin)
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


def effects_table(tasks, args):
    """effects.csv before the samplers, with `noise`; m = n = 0: the mean over the settings of an
    experiment that have an interval; their noise is not correlated."""
    rows = []
    for key, mine in tasks.groupby(GROUP):
        used = mine[mine["variance"].notna()]  # one subsample alone does not know its noise
        if used.empty:
            used = mine
        noise = Noise(*used[["variance", "subsamples", "prior"]].to_numpy(float).T)
        noise = noise._replace(share=noise.share / len(used) ** 2)
        between = Noise(*np.array([[mine["estimate"].var()], [len(mine)], [0]], float))
        for target, part, noise in zip(TARGETS, (used, mine), (noise, between)):
            left_out = mine.index.difference(part.index).get_level_values("task")
            rows.append(dict(zip(GROUP, key)) | {"arms": mine["arms"].iloc[0], "settings": 1}
                        | part[[*ACCURACIES, "estimate"]].mean().to_dict() | {
                            "target": target, "tasks": len(part),
                            "subsamples": part["subsamples"].min(),
                            "seconds": part["seconds"].sum(),
                            "left_out": ", ".join(left_out), "noise": noise})
    known = [row for row in rows if row["target"] == TARGETS[0] and interval(row["noise"])[0] > 0]
    known = pd.DataFrame(known, columns=[*rows[0]])
    for _, cells in known.groupby(["experiment", "effect", "model"]):
        C = len(cells)
        if C > 1:
            noise = Noise(*map(np.concatenate, zip(*cells["noise"])))
            rows.append(cells.iloc[0].to_dict() | {
                "m": 0, "n": 0, "settings": C, "arms": " and ".join(sorted(set(cells["arms"]))),
                "noise": noise._replace(share=noise.share / C**2),
                "left_out": ", ".join(sorted(set(cells["left_out"]) - {""})),
                **cells[[*ACCURACIES, "estimate"]].mean(), **cells[["tasks", "subsamples"]].min()})
    table = in_order(pd.DataFrame(rows)).assign(metric=args.metric, margin=args.margin)
    table[["se", "df", "half"]] = [interval(noise) for noise in table["noise"]]
    table["low"] = table["estimate"] - table["half"]
    table["high"] = table["estimate"] + table["half"]
    table["verdict"] = verdicts_of(table, args.margin)
    wanted = (args.margin or 0) / 2
    table["needed"] = [needed_subsamples(noise, wanted) for noise in table["noise"]]
    table["needed"] = table["needed"].where(table["target"] == TARGETS[0])
    return table


def in_order(table):
    """effects.csv: all settings together first, then cell by cell, all models first."""
    return table.sort_values(GROUP, kind="stable", ignore_index=True,
                             key=lambda names: names.replace("all", ""))


def means_table(rows, metric):
    """means.csv, Table 1 of the paper: means of the tasks' means, on the texts of `test`."""
    unit = [*CELL, "model"]
    plain = add_effects(rows.assign(arms="plain"), metric)
    means = plain.groupby([*unit, "task", "subsample"])[[*EFFECTS]].mean()
    means = means.groupby([*unit, "task"]).mean().groupby(unit).mean()
    table = rows.groupby(unit).agg(tasks=("task", "nunique"), rows=("task", "size"))
    return table.join(means).reset_index()


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
    digits = 2 if metric in SHARES else 4
    return f"{value + math.copysign(1e-9, value):+z.{digits}f}"


def count(number, what):
    """"1 task", "2 tasks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def setting_of(row):
    """The setting of a row of effects.csv in words."""
    if row["m"]:
        return title_of(*[row[name] for name in CELL])
    return f"{row['experiment']}, {row['settings']} settings of m and n together"


def sentence(row):
    """On a row of effects.csv, of these tasks; on a bias with a short answer and what to do."""
    metric, margin = row["metric"], f"±{row['margin'] or 0:g}"
    low, high = row["low"], row["high"]
    text = f"{setting_of(row)}: {row['effect']} "
    if row["model"] != "all":
        text += f"of {row['model']} "
    text += f"{signed(row['estimate'], metric)} "
    if low < high:
        text += f"[{signed(low, metric)}, {signed(high, metric)}] "
    text += f"{UNITS.get(metric, metric)} for {count(row['tasks'], 'task')}"
    if row["left_out"]:
        text += f", without {row['left_out']}, of which there is one subsample"
    if row["effect"] == "boost":
        return f"{text}."
    if row["subsamples"] == 1:
        text += "; one subsample cannot show effects that differ from run to run"
    again = ""
    if not low < high:
        short, again = "Too early to tell: no interval", 5
    elif row["verdict"] == "within the margin":
        short = f"No: within {margin}"
    elif row["verdict"] == "beyond the margin":
        better = (low > 0) == (metric != "nll")
        short = ("Yes: " if better else "No: seen texts even score worse, ") + f"beyond {margin}"
    elif not row["verdict"]:
        short = "The interval excludes 0" if low > 0 or high < 0 else "The interval holds 0"
    elif high - low <= 2 * NEAR * row["margin"]:
        short = f"Near the margin of {margin}: take the interval as the answer"
    else:
        short, again = f"Too early to tell: neither within nor beyond {margin}", row["needed"]
    if again:
        text += f". Run the same again with --subsamples {again:.0f}"
        minutes = (again - row["subsamples"]) * row["seconds"] / 60
        if minutes > 0:
            text += f" (about {minutes:.0f} minutes of one process)"
    return f"{short}. {text}."


def headlines(table):
    """Rows of effects.csv that answer: these tasks, all models together, or each where they differ
    in tasks or subsamples."""
    table = table[table["target"] == TARGETS[0]]
    whole = table.groupby([*CELL, "effect"])["model"].transform(lambda names: "all" in set(names))
    return table[(table["model"] == "all") | ~whole]


def conclusions(table, tasks):
    """[(kind, sentence)] for a reader: answers, and warnings where the accuracy on unseen texts is
    hardly that of guessing."""
    lines = []
    for (_, effect, _), mine in headlines(table).groupby(["experiment", "effect", "model"]):
        over, single = mine[mine["m"] == 0], mine[mine["m"] > 0]
        shown = single if over.empty else over
        for row in shown.to_dict("records"):
            lines.append(("answer" if effect == "bias" else "", sentence(row)))
        if len(over):
            known = single.dropna(subset="low")
            excluded = ((known["low"] > 0) | (known["high"] < 0)).sum()
            lines.append(("", f"Alone, {excluded} of {len(known)} settings exclude 0 (by chance "
                              f"about {(1 - SHARE) * len(known):.1f})."))
    if set(table["metric"]) != {"acc"}:
        return lines
    cases = tasks.reset_index().query("model != 'all'").drop_duplicates([*CELL, "model", "task"])
    for experiment, mine in cases.groupby("experiment"):
        low = mine[mine["unseen"] < mine["majority"] + 0.05]
        if len(low):
            names = ", ".join(sorted(set(low["task"]))[:5])
            text = (f"{experiment}: unseen is not 5 points above the share of the commonest class "
                    f"in {len(low)} of {len(mine)} cases (such as {names}): there the model has "
                    "learned too little to show an inflation.")
            lines.append(("warning", text))
    return lines


def methods(rows, args):
    """A paragraph for a methods section on an experiment's rows."""
    names = {name: ", ".join(map(str, sorted(set(rows[name])))) for name in ("model", "m", "n")}
    runs = rows.groupby([*CELL, "model", "task"])["subsample"].nunique()
    sets = {"crossed": "both sets", "plain": "the first set"}
    sets = " or ".join([sets[arms] for arms in sorted(set(rows["arms"]))])
    text = (
        f"{rows['experiment'].iloc[0]}: from each of {count(rows['task'].nunique(), 'task')}, "
        f"{runs.min()} or more random subsamples of m = {names['m']} labelled training texts and "
        f"two other sets of n = {names['n']} texts were drawn. Models ({names['model']}), as they "
        "are and pretrained on the unlabelled texts of either set, were (but for zero-shot) trained"
        f" on the labelled texts and tested on {sets}. The bias is {args.metric} on texts seen in "
        "pretraining minus that on others; its mean over these tasks has an 89 % interval "
        "(Student's t, Satterthwaite's degrees of freedom) from the variance between a task's "
        "subsamples")
    if rows["counted"].any():
        text += f", to which the noise of drawing the texts, where known, adds as {W_COUNTS} more"
    if args.margin:
        text += f". Effects within ±{args.margin:g} were taken as too small to matter"
    return f"{text}. {', '.join(sorted(set(rows['versions'].dropna())))}"


# Figures --------------------


def plot(table, title, args):
    """PNG of a figure from a row a point: panel, line (from the top), series (by colour), effect,
    value, low, high, width."""
    names = sorted(set(table["panel"]))
    lines, series = list(dict.fromkeys(table["line"])), list(dict.fromkeys(table["series"]))
    size = 2.5 + 4.2 * len(names), 1.8 + 0.1 * len(lines) * (1 + len(series))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(1, len(names), squeeze=False, sharex=True, sharey=True)[0]
    for axis, panel in zip(axes, names):
        here = table[table["panel"] == panel]
        for k, name in enumerate(series):
            mine = here[here["series"] == name]
            y = mine["line"].map(lines.index) + 0.75 * ((k + 0.5) / len(series) - 0.5)
            colour = COLOURS[k % len(COLOURS)]
            axis.hlines(y, mine["low"], mine["high"], colour, lw=mine["width"])
            axis.scatter(mine["value"], y, 10 * mine["width"], color=colour, marker="osD^"[k % 4],
                         label=name)
        axis.axvline(0, color="grey", lw=1, ls="--", zorder=0)
        axis.grid(axis="x", alpha=0.3)
        axis.set_yticks(range(len(lines)), lines, fontsize=8)
        axis.set_ylim(len(lines) - 0.5, -0.5)
        axis.set_title(panel)
        words = f"{here['effect'].iloc[0]}, {UNITS.get(args.metric, args.metric)}"
        if args.margin:
            axis.axvspan(-args.margin, args.margin, color="grey", alpha=0.15, lw=0)
            words += "; grey: within the margin"
        if words.startswith("bias") and args.metric != "nll":
            words += "\nright of 0: seeing the test texts helps"
        axis.set_xlabel(words)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return png_of(figure)


def plot_accuracies(tasks, metric):
    """PNG of base, unseen and seen of each task, means over settings; a panel a model."""
    means = tasks.groupby(["experiment", "model", "task"])[ACCURACIES].mean()
    unit = metric
    if metric in SHARES:
        means, unit = 100 * means, f"{metric}, %; majority: commonest class"
    else:
        means = means.drop(columns="majority")
    panels = means.groupby(level=["experiment", "model"])
    sizes = panels.size()
    height = 1 + 0.7 * len(sizes) + 0.2 * sizes.sum()
    figure = Figure(figsize=(7, height), layout="constrained")
    axes = figure.subplots(len(sizes), squeeze=False, sharex=True, height_ratios=sizes)[:, 0]
    for axis, (names, mine) in zip(axes, panels):
        mine = mine.droplevel(["experiment", "model"]).sort_values("unseen")
        for name, mark, colour in zip(means, "so^|", (*COLOURS[:3], "black")):
            axis.plot(mine[name], mine.index, mark, color=colour, label=name)
        axis.set_ylim(-0.5, len(mine) - 0.5)
        axis.tick_params("y", labelsize=8)
        axis.set_title(", ".join(names), fontsize=10)
        axis.grid(alpha=0.3)
    axis.set_xlabel(unit)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return png_of(figure)


def draw_all(tasks, table, args):
    """PNGs by name: effects, accuracies; if they are few, tasks of each setting and effect."""
    few = (table["target"] != TARGETS[0]) & (table["tasks"] < FEWEST_TASKS)  # which tell nothing
    points = table[table["target"].isin(TARGETS[:2]) & ~few].copy()
    points["line"] = [setting_of(row) for row in points.to_dict("records")]
    thick = np.where(points["m"] > 0, 2.5, 4)  # all settings together stand out
    points["width"] = np.where(points["target"] == TARGETS[0], thick, 0.8)
    points = points.assign(panel=points["effect"], series=points["model"], value=points["estimate"])
    number = " to ".join(map(str, sorted({points["tasks"].min(), points["tasks"].max()})))
    title = f"89 % intervals; thick: these tasks ({number}), thin: tasks like these"
    figures = {"effects": plot(points, title, args)}

    tasks = tasks.reset_index().query("model != 'all'").sort_values("estimate", ascending=False)
    figures["accuracies"] = plot_accuracies(tasks, args.metric)
    tasks = tasks.assign(panel=tasks["model"], line=tasks["task"], width=2.5)
    cells = tasks.groupby([*CELL, "effect"])
    if len(cells) > MOST_FIGURES:
        return figures
    for number, ((*cell, effect), mine) in enumerate(cells, 1):
        parts = [mine.assign(series="observed", value=mine["estimate"])]
        for name in SAMPLERS:
            if name in mine:
                parts.append(mine.assign(series=name, value=mine[name], low=mine[f"{name}_low"],
                                         high=mine[f"{name}_high"]))
        title = f"{title_of(*cell)}: {effect} of each task, 89 % intervals"
        figures[f"tasks-{number}"] = plot(pd.concat(parts), title, args)
    return figures


# The page --------------------


def rows_html(table, names, metric):
    """HTML of columns of effects.csv or tasks.csv, accuracies in percent."""
    shown = table[[*GROUP, *names]].replace({"m": {0: "all"}, "n": {0: "all"}})
    if metric in SHARES:
        shown[ACCURACIES] *= 100
    formats = dict.fromkeys(["estimate", "low", "high"], lambda value: signed(value, metric))
    formats["needed"] = "{:.0f}".format
    digits = 2 if metric in SHARES else 4
    return table_html(shown, formatters=formats, float_format=f"{{:.{digits}f}}".format)


def publish(rows, tasks, table, summaries, notes, args):
    """Make figures, page and tables, then save them."""
    figures = draw_all(tasks, table, args)
    first, second, *others = [figure_html(png) for png in figures.values()]
    parts = [paragraph(text, kind) for kind, text in conclusions(table, tasks)]
    parts += [first, second, "<h2>Settings</h2>"]
    short = table if len(table) <= MOST_LINES else headlines(table)
    shown = ["subsamples", *ACCURACIES, "estimate", "low", "high", "verdict"]
    parts.append(rows_html(short, ["target", "tasks", *shown, "needed"], args.metric))
    parts.append(paragraph(GLOSS, "small"))
    parts += [paragraph(note) for note in notes]
    parts += ["<h2>Tasks</h2>", paragraph("All, with a test of each: tasks.csv", "small"), *others]
    if len(tasks) <= MOST_LINES:
        parts.append(rows_html(tasks.reset_index(), ["task", *shown], args.metric))
    parts.append("<h2>For a methods section</h2>")
    parts += [paragraph(methods(mine, args)) for _, mine in rows.groupby("experiment")]
    versions = f"; numpy {np.__version__}, pandas {pd.__version__}"
    parts.append(paragraph(args.command + versions, "small"))

    inner = ["variance", "prior", "floor", "w", "seconds"]
    cells = table.assign(m=table["m"].replace(0, ""), n=table["n"].replace(0, ""))
    tables = {"effects": cells.drop(columns=["noise", "half", "settings", "seconds"]),
              "means": means_table(rows, args.metric),
              "tasks": tasks.reset_index().drop(columns=inner)}
    for path in [*args.out.glob("posterior.csv"), *args.out.glob("tasks-*.png")]:
        path.unlink()  # of an earlier run
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
    numbers = [*WHOLE, "majority", *columns_of("acc"), *columns_of(metric)]
    numbers += ["discordant", "discordant_on_extra"]
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
# --- end shared ---


# --- shared: page ---
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's
STYLE = """
.report { max-width: 70rem; margin: auto; font: 16px/1.5 sans-serif; overflow-wrap: break-word;
  .answer, .warning { border-left: .3rem solid #0072B2; padding-left: .8rem }
  .warning { border-color: #D55E00 }
  .small { font-size: .85rem }
  table { font-size: .75rem }
  .scroll { overflow-x: auto }
  img { max-width: 100%; min-width: 34rem }
  td, th { padding: .15rem .5rem; text-align: left; white-space: nowrap }
  @media print { .scroll { overflow: visible } }
}
"""


def paragraph(text, kind=""):
    """HTML of a paragraph; kind: answer, warning, small."""
    return f'<p class="{kind}">{html.escape(text)}</p>'


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


def save(folder, tables, figures, title, parts, again=False):
    """Write tables and figures by name, and report.html of these parts in HTML, one file to be
    handed on. In a notebook's cell it is shown; again: in its old place."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    for name, png in figures.items():
        (folder / f"{name}.png").write_bytes(png)
    page = "\n".join([
        '<!DOCTYPE html><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{title}</title><style>{STYLE}</style>",
        f'<div class="report"><h1>{title}</h1>', *parts, "</div>"])
    (folder / "report.html").write_text(page, encoding="utf-8")
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
        name = args.paths[0].resolve().stem
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
        rows = add_effects(load_rows(args, args.metric), args.metric)
        tasks = task_table(unit_table(rows), rows, args)
        table = effects_table(tasks, args)
        publish(rows, tasks, table, {}, [], args)
        print(*[text for _, text in conclusions(table, tasks)], sep="\n")
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
