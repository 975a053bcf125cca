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
The last two take samplers, and five tasks with two subsamples each.

Commands, cheapest first
    python fit_model.py results.csv --draws 0      # page and tables in 3 seconds
    python fit_model.py results.csv                # then the two samplers, minutes
    python fit_model.py results.csv more.csv folder --effects bias --n 500 --metric f1 --margin 2

Writes to fits/results/ (the first file's name) report.html, its figures, and the columns
    effects.csv    experiment, m, n (empty: the mean of all settings), metric, effect, model, arms
                   (crossed: both sets of texts; plain: `test` alone), target (as above), tasks,
                   left_out (tasks with one subsample), subsamples (fewest of a task), majority
                   (share of the commonest class), base, unseen, seen (all four in %, but for nll),
                   estimate, se, df, low, high (points), margin, verdict, needed (subsamples for a
                   half-width of half the margin)
    tasks.csv      experiment, m, n, effect, model, task, subsamples, arms, majority, base, unseen,
                   seen, estimate, sd (between subsamples), low, high, verdict (at 1 - .11 / tasks,
                   so that all hold together), p (one-sided sign flips of a bias), p_adjusted
                   (Benjamini-Hochberg), paper ((12)), hierarchical, their _low, _high, p_beyond
                   (the margin)
    posterior.csv  experiment, m, n, effect, analysis, parameter, mean, sd, hdi_low, hdi_high,
                   r_hat, ess_bulk, ess_tail, warning (empty: converged; else exit status 3)

Seconds of CPU: --draws 0 takes 3 on 37,500 published rows (2026-11-24); all on 25 published tasks
of two models, n = 500, bias alone, 54 (2026-11-23).
"""

import argparse
import base64
import html
import io
import itertools
import math
import os
import shlex
import sys
import warnings
from pathlib import Path

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
FEWEST_TASKS = 5  # fewer: no samplers, no line of other tasks in a figure
MOST_LINES, MOST_FIGURES = 30, 8  # in a table of the page; of single settings
SAMPLERS = ("paper", "hierarchical")
TARGETS = ("these tasks", "tasks like these", *SAMPLERS)
GROUP = ["experiment", "m", "n", "effect", "model"]
UNIT = [*GROUP[:3], "model", "task", "subsample"]
ACCURACIES = ["base", "unseen", "seen", "majority"]
MEANS = [*ACCURACIES, "f1", "chance", "floor", "w", "seconds"]
REPORTED = ("mu", "beta", "alpha", "sd_U", "sd_V", "sd_W", "d", "tau", "s", "omega", "new_task",
            "difference")  # parameters
NAMES = {"acc": "accuracy", "f1": "macro-F1", "nll": "mean negative log-probability"}
UNITS = {"acc": "points", "f1": "points", "nll": "nats (lower is better)"}  # of differences
MARKS = {  # of the accuracies: colour as in docs/idea.png, marker, area
    "base": ("#bbbbbb", "s", 45), "unseen": ("#88ccee", "o", 75), "seen": ("#ee9966", "D", 28)}
SECOND_LOOK = ("Where the bias is as large as the margin, a first look is wrong 10 times in 100, a "
               "second one 12 to 16 times.")
GLOSS = ("Accuracies in %; base: without pretraining; unseen, seen: pretrained on other texts, on "
         "these texts. boost = unseen - base, bias = seen - unseen [89 % interval]; needed: "
         "subsamples of each task until the interval can decide. Every task: tasks.csv.")
TICK = ("Black tick: always naming the commonest class. A model whose marks lie left of it may "
        "have learned too little to show a bias.")


# The answer in closed form --------------------


def measure(args):
    """The rows with effects; accuracies and shares in %; `f1` of unseen texts, `chance`: 1 / K."""
    rows = add_effects(load_rows(args, args.metric), args.metric)
    rows["f1"] = 100 * add_effects(rows, "f1")["unseen"]
    rows["chance"] = 100 / rows["num_classes"]
    rows["majority"] *= 100
    if args.metric in SHARES:
        rows[["base", "unseen", "seen"]] *= 100
    rows["seconds"] = pd.to_numeric(rows["seconds"], errors="coerce")
    return rows


def average(rows, by):
    """Means of the rows that agree in `by`. Their answers to one text may go together: w is at most
    the square of the mean of its roots."""
    groups = rows.assign(w=np.sqrt(rows["w"])).groupby(by)
    table = groups[[*MEANS, *EFFECTS]].mean()
    table["w"] **= 2
    table[[*EFFECTS]] = table[[*EFFECTS]].round(9)  # equal differences stay equal
    table["counted"] = groups["counted"].all()
    table["arms"] = groups["arms"].first()
    return table.reset_index()


def unit_table(rows):
    """A row per cell, model, task and subsample. Model "all": the mean over the models of a cell,
    where all have the same tasks and subsamples."""
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
    """tasks.csv before the samplers, indexed by GROUP and task, with the `variance` of one
    subsample (nan: not known), its `df`, and `pooled`: whether all rows of a cell know their w."""
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
    table["verdict"] = verdicts_of(table["estimate"], wide, args.margin)
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
    """One-sided p of the sum of changes under random signs, exact if they are symmetric about 0:
    the sum of those with a plus has a convolution of two-point laws."""
    sizes = np.abs(changes[changes != 0])
    share = np.ones(1)  # of the sign patterns, by the sum of the sizes with a plus
    for size in sizes:
        two_points = np.zeros(size + 1)
        two_points[[0, size]] = 0.5
        share = np.convolve(share, two_points)
    observed = (sizes.sum() + changes.sum()) // 2
    return min(float(share[observed:].sum()), 1.0)  # rounding may exceed 1


def interval(cells, R=None, more=1):
    """(se, df, half-width) of the 89 % interval of a mean over independent cells, of a row a task:
    Student's t with Satterthwaite's df. R: at so many subsamples of each task; more: a factor of
    the variance."""
    variance = square = 0
    for cell in cells:
        J = len(cell)
        K = cell["subsamples"] if R is None else np.full(J, R)
        v = more * cell["variance"] / K / (J * len(cells)) ** 2
        variance += v.sum()
        if cell["pooled"].all():
            square += v.sum() ** 2 / (K.sum() - J + TEXTS_DF)
        else:
            square += (v**2 / np.maximum(K - 1, 0.5)).sum()  # one alone: its v is nan
    if not variance > 0:
        return math.nan, math.nan, math.nan
    se, df = math.sqrt(variance), variance**2 / square
    return se, df, stats.t.ppf(UPPER, df) * se


def needed_subsamples(cells, half):
    """The least number of subsamples of each task that brings the half-width down to `half` with
    noise at the upper end of what is known."""
    _, df, _ = interval(cells)
    if not (df > 0 and half):
        return math.nan
    more = df / stats.chi2.ppf(QUANTILE, df)
    at_2, _, _ = interval(cells, 2, more)
    R = max(2, int(2 * (stats.norm.ppf(UPPER) * at_2 / half) ** 2))  # t reaches further
    if R == 2 and all(cell["pooled"].all() for cell in cells):
        R = 1
    while interval(cells, R, more)[2] > half:
        R += 1
    return R


def verdicts_of(middle, half, margin):
    """Where intervals middle ± half lie in respect of (-margin, margin)."""
    if margin is None:
        return ""
    within = middle.abs() + half < margin
    beyond = middle.abs() - half > margin
    return np.select([half.isna(), within, beyond],
                     ["", "within the margin", "beyond the margin"], "not settled")


def effect_row(key, target, part, cells, **more):
    """A row of effects.csv: means over part; `cells`: what `interval` takes."""
    setting = title_of(*key[:3])
    if len(cells) > 1:
        setting = f"{key[0]}, mean of {len(cells)} settings"
    row = dict(zip(GROUP, key), setting=setting, target=target, cells=cells,
               subsamples=part["subsamples"].min(), arms=" and ".join(sorted(set(part["arms"]))),
               seconds=part["seconds"].sum(), **more)
    return row | part[[*ACCURACIES, "estimate"]].mean().to_dict()


def effects_table(tasks, args):
    """effects.csv before the samplers; m = n = 0: the mean of an experiment's settings that have an
    interval."""
    rows = []
    for key, cell in tasks.reset_index().groupby(GROUP):
        used = cell.dropna(subset="variance")  # one subsample alone does not know its noise
        if used.empty:
            used = cell
        left_out = ", ".join(cell["task"].drop(used.index))
        rows.append(effect_row(key, TARGETS[0], used, [used], tasks=len(used), left_out=left_out))
        means = pd.DataFrame({"subsamples": [len(cell)], "pooled": False,
                              "variance": cell["estimate"].var()})
        rows.append(effect_row(key, TARGETS[1], cell, [means], tasks=len(cell), left_out=""))
    table = pd.DataFrame(rows)
    known = table["cells"].map(lambda cells: interval(cells)[0] > 0)
    these = table[known & (table["target"] == TARGETS[0])]
    for (experiment, effect, model), mine in these.groupby(["experiment", "effect", "model"]):
        if len(mine) > 1:
            key = experiment, 0, 0, effect, model
            left_out = ", ".join(sorted(set(mine["left_out"]) - {""}))
            rows.append(effect_row(key, TARGETS[0], mine, mine["cells"].sum(),
                                   tasks=mine["tasks"].min(), left_out=left_out))

    table = in_order(pd.DataFrame(rows)).assign(metric=args.metric, margin=args.margin)
    table[["se", "df", "half"]] = [interval(cells) for cells in table["cells"]]
    table["low"] = table["estimate"] - table["half"]
    table["high"] = table["estimate"] + table["half"]
    table["verdict"] = verdicts_of(table["estimate"], table["half"], args.margin)
    wanted = (args.margin or 0) / 2
    needed = table["cells"].map(lambda cells: needed_subsamples(cells, wanted))
    table["needed"] = needed.where(table["target"] == TARGETS[0])
    return table


def in_order(table):
    """The mean of all settings first, then cell by cell, all models first."""
    return table.sort_values(GROUP, kind="stable", ignore_index=True,
                             key=lambda names: names.replace("all", ""))


# The two models --------------------


def paper_counts(rows, effect):
    """(data, models, tasks) of the paper's model. A unit is a task's subsample; `total` has all
    answers [model, unit], `change` half the difference of right ones [task]; `known`: the squared
    share of the variance of the tasks' changes in log odds that is more than binomial noise."""
    arms = dict(zip(("control", "treatment"), EFFECTS[effect]))
    right = {name: (rows[f"acc_{arm}"] * rows["n"]).round().astype(int)
             for name, arm in arms.items()}
    rows = rows.assign(**right)
    sums = rows.pivot_table(index=["task", "subsample"], columns="model", aggfunc="sum",
                            values=["control", "treatment", "n"], fill_value=0)
    both = (sums["control"] + sums["treatment"]).to_numpy().T.astype(int)
    task_idx, tasks = pd.factorize(sums.index.get_level_values("task"))

    by_task = rows.groupby("task")[["control", "treatment", "n"]].sum()
    right = by_task[["control", "treatment"]].to_numpy()
    answers = by_task[["n"]].to_numpy()
    p = (right + 0.5) / (answers + 1)
    noise = (1 / (answers * p * (1 - p))).sum(1).mean()
    spread = np.diff(special.logit(p)).var() or 1e-9
    data = {"total": sums["n"].to_numpy().T.astype(int), "by_unit": both.sum(0),
            "by_model": both.sum(1), "change": np.diff(right)[:, 0] / 2, "task_idx": task_idx,
            "known": max(1 - noise / spread, 0) ** 2}
    return data, list(sums["n"]), tasks


def paper_model(data, models, tasks, interaction=True):
    """The paper's model of a cell, (1) to (10), in variables that mix (docs/results.md):
    logit p = c_jk + alpha_i + (l - 1/2) d_j."""
    import pymc as pm
    import pytensor.tensor as pt

    task_idx = data["task_idx"]
    k = data["known"]
    coords = {"later": models[1:], "task": tasks, "unit": range(len(task_idx))}
    with pm.Model(coords=coords) as model:
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
        c = pm.Normal("c", a[task_idx], sd_V, dims="unit")

        # d_j: a task's effect, centred as far, k, as the data know it
        d = beta * pt.ones(len(tasks))
        if interaction:
            s = math.sqrt(2) * sd_W
            z = pm.Normal("z", k * beta, s**k, dims="task")
            d = beta + s ** (1 - k) * (z - k * beta)
        d = pm.Deterministic("d", d, dims="task")

        # over l, with q = e^(c + alpha): log((1 + q e^(d/2)) (1 + q e^(-d/2)))
        q = pt.exp(c)[None] * pt.exp(alpha)[:, None]
        ratio = pt.exp(d / 2)
        both = data["total"] * pt.log1p(q * (ratio + 1 / ratio)[task_idx] + q**2)
        right = (data["by_unit"] * c).sum() + (data["by_model"] * alpha).sum()
        pm.Potential("likelihood", right + (data["change"] * d).sum() - both.sum())
    return model


def predict_effects(posterior, data, models, rng):
    """The posterior with predictive effects in points: `effect` (12) by model and task, nan where a
    model lacks it, `difference` (11) over tasks."""
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


def add_fit(posterior, summary, key, table, tasks):
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
    middle, half = (new["low"] + new["high"]) / 2, (new["high"] - new["low"]) / 2
    new["verdict"] = verdicts_of(middle, half, table["margin"].iloc[0])
    note = summary["warning"].iloc[0] or "converged"
    off = new.set_index("model")["estimate"] - first["estimate"]
    far = ", ".join(off.index[off.abs() > first["se"]])
    if analysis == "paper":
        new["arms"] = "plain"
    elif far:
        note += f"; the mean is over a standard error from that of these tasks, take that: {far}"

    draws = posterior["effect"]
    low, high = arviz.hdi(draws, hdi_prob=SHARE)["effect"].transpose("hdi", ...)
    found = pd.DataFrame({
        analysis: draws.mean(("chain", "draw")).to_series(),
        f"{analysis}_low": low.to_series(), f"{analysis}_high": high.to_series()})
    if analysis == "hierarchical":
        beyond = abs(draws) > table["margin"].iloc[0]
        found["p_beyond"] = beyond.mean(("chain", "draw")).to_series()
    found = pd.concat({tuple(cell): found}, names=GROUP[:-1])
    tasks = tasks.reindex(columns=dict.fromkeys([*tasks, *found]))
    tasks.update(found)
    return in_order(pd.concat([table, new], ignore_index=True)), tasks, note


# Words --------------------


def signed(value, metric):
    """A difference in words; halves go away from 0, whatever the last bits of a mean are."""
    places = 2 if metric in SHARES else 4
    return f"{value + math.copysign(1e-9, value):+z.{places}f}"


def count(number, what):
    """"1 task", "2 tasks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def names_of(values):
    """All different values in words."""
    return ", ".join(map(str, sorted(set(values.dropna()))))


def short_answer(row):
    """Of a row of effects.csv; its first words are large on the page, and a class of its style."""
    margin = f"±{row['margin'] or 0:g}"
    low, high = row["low"], row["high"]
    if row["effect"] == "boost":
        return ""
    if not low < high:
        return "Too early to tell: no interval"
    if row["verdict"] == "within the margin":
        return f"No: within {margin}"
    if row["verdict"] == "beyond the margin":
        if (low > 0) == (row["metric"] != "nll"):
            return f"Yes: beyond {margin}"
        return f"No: seen texts even score worse, beyond {margin}"
    if not row["verdict"]:
        return "The interval excludes 0" if low > 0 or high < 0 else "The interval holds 0"
    if high - low <= 2 * NEAR * row["margin"]:
        return f"Near the margin of {margin}: take the interval as the answer"
    return f"Too early to tell: neither within nor beyond {margin}"


def remarks(row):
    """What is to be known of a row of effects.csv, and where it is too early what to do."""
    said = []
    if row["left_out"]:
        said.append(f"Without {row['left_out']}, of which there is one subsample.")
    if row["subsamples"] == 1:
        said.append("One subsample cannot show effects that differ from run to run.")
    cells = row["cells"]
    if len(cells) > 1:
        excluded = sum(abs(cell["estimate"].mean()) > interval([cell])[2] for cell in cells)
        chance = (1 - SHARE) * len(cells)
        said.append(f"Alone, {excluded} of {len(cells)} settings exclude 0 (by chance about "
                    f"{chance:.1f}).")
    if short_answer(row).startswith("Too early"):
        again = row["needed"] if row["needed"] > 0 else 5
        minutes = (again - row["subsamples"]) * row["seconds"] / 60
        todo = f"About {again:.0f} subsamples of each task, in all, would decide."
        if row["seconds"] > 0:  # else nobody here ran it
            time = count(math.ceil(minutes), "minute")
            todo = (f"Run the same again with --subsamples {again:.0f} (about {time} of one "
                    f"process) and take that answer. {SECOND_LOOK}")
        said.append(todo)
    return " ".join(said)


def bracket(row):
    """An estimate with its interval, if it has one."""
    estimate, low, high = (signed(row[name], row["metric"]) for name in ("estimate", "low", "high"))
    return f"{estimate} [{low}, {high}]" if row["low"] < row["high"] else estimate


def headlines(table):
    """Rows of effects.csv that answer: these tasks, all models, or each where there is no "all"."""
    table = table[table["target"] == TARGETS[0]]
    whole = table.groupby([*CELL, "effect"])["model"].transform(lambda names: "all" in set(names))
    return table[(table["model"] == "all") | ~whole]


def lines_of(table):
    """Rows of effects.csv of one bias and boost as one: the first, with what is said of both."""
    lines = {}
    for row in table.to_dict("records"):  # a bias comes first
        name = f"{row['setting']}, {row['model']}".removesuffix(", all")
        line = lines.setdefault((name, row["target"]), row | {"name": name})
        line[row["effect"]] = bracket(row)
        line[f"{row['effect']}_verdict"] = row["verdict"]
    return [*lines.values()]


def answers_of(table):
    """The lines that answer: the mean of an experiment's settings, if there are several."""
    table = headlines(table)
    together = table.groupby(["experiment", "effect", "model"])["m"].transform("min") == 0
    return lines_of(table[(table["m"] == 0) | ~together])


def sentence(line):
    """Answer, bias, boost, remarks."""
    effect = line["effect"]
    name = f"{effect} of {line['model']}".removesuffix(" of all")
    unit = UNITS.get(line["metric"], line["metric"])
    text = f"{line['setting']}: {name} {line[effect]} {unit} for {count(line['tasks'], 'task')}"
    if effect == "bias" and "boost" in line:
        text += f"; boost {line['boost']}"
    return f"{short_answer(line)}. {text}. {remarks(line)}".removeprefix(". ").strip()


def in_words(line):
    """The effect as a sentence."""
    effect = line["effect"]
    cause = {"bias": "Having seen the texts", "boost": "Having seen other texts"}[effect]
    model = line["model"].replace("all", "the models")
    unit = UNITS.get(line["metric"], line["metric"])
    text = (f"{cause} in pretraining changes the score of {model} by {line[effect]} {unit}, on "
            f"average over {count(line['tasks'], 'task')}.")
    if line["low"] < line["high"]:
        text += " With 89 % confidence the truth lies within the brackets."
    return text


def limits_of(lines, tasks):
    """Sentences on what limits an answer: pretraining does nothing, or little was learned."""
    said = []
    for line in lines:
        if line.get("bias_verdict") == line.get("boost_verdict") == "within the margin":
            said.append(f"{line['setting']}: the boost too is within the margin: where pretraining "
                        "does nothing a bias can hardly arise.")
    cases = tasks.reset_index().query("model != 'all'").drop_duplicates([*CELL, "model", "task"])
    for experiment, mine in cases.dropna(subset=["f1", "chance"]).groupby("experiment"):
        weak = mine["task"][mine["f1"] < mine["chance"] + WEAK]
        if len(weak):
            said.append(f"{experiment}: macro-F1 on unseen texts is not {WEAK} points above "
                        f"guessing in {len(weak)} of {len(mine)} cases ({names_of(weak[:5])}): "
                        "too little was learned there to show an inflation.")
    return said


def methods(rows, args):
    """A paragraph for a methods section that is true of all these rows."""
    tests = "both sets" if rows["arms"].eq("crossed").all() else "the first set"
    noise = "the variance between its subsamples"
    if rows["counted"].all():
        noise = ("the noise of drawing its texts, known from those that only one of the two "
                 "pretrained models gets right, plus what all subsamples vary beyond it")
    m, n = [f"{name} = {names_of(rows[name])}" for name in ("m", "n")]
    margin = ""
    if args.margin:
        margin = f" Effects within ±{args.margin:g} were taken as too small to matter."
    return (
        f"For each subsample of a task, {m} labelled texts and two disjoint sets of {n} other "
        "texts were drawn. Each model was taken as it is, and pretrained on the unlabelled texts "
        "of either set; it was then trained on the labelled texts, or prompted where the task is "
        f"zero-shot, and tested on {tests}. The bias is the "
        f"{NAMES.get(args.metric, args.metric)} on texts seen in pretraining minus that on unseen "
        "ones. We report its mean over these tasks with an 89 % interval by Student's t; the "
        f"variance of a task is {noise}.{margin}")


# Figure --------------------


def draw_all(tasks, table, args):
    """PNGs by name: effects, of the only setting, or of several a line each and their means; then,
    if these are few, each alone."""
    cells = tasks.groupby(CELL)
    if len(cells) == 1:
        return {"effects": draw_setting(tasks, table, args)}
    single = headlines(table).query("m > 0")
    mean = table[table["m"] == 0]
    parts = [named(single, single["setting"], 2), named(mean, mean["setting"], 4)]
    figures = {"effects": forest(pd.concat(parts), "Means of tasks", args)}
    if len(cells) <= MOST_FIGURES:
        for number, (cell, mine) in enumerate(cells, 1):
            here = table[(table[CELL] == [*cell]).all(axis=1)]
            if len(mine) > len(args.effects):  # else its line says the same
                figures[f"setting-{number}"] = draw_setting(mine, here, args)
    return figures


def draw_setting(tasks, table, args):
    """PNG of the tasks of a setting, model by model, the greatest bias first, and their means."""
    mine = tasks.reset_index().query("model != 'all'").sort_values("estimate", ascending=False)
    mine = mine.sort_values(["effect", "model"], kind="stable")
    these = table[table["target"] == TARGETS[0]]
    mean = these[(these["tasks"] > 1) | (these["model"] == "all")]
    like = table[(table["target"] == TARGETS[1]) & (table["tasks"] >= FEWEST_TASKS)]
    parts = [named(mine, mine["task"], 2), named(mean, mean["target"], 4),
             named(like, like["target"], 1)]
    return forest(pd.concat(parts), these["setting"].iloc[0], args)


def named(rows, names, weight):
    """Rows for a figure, with the model where it is not "all"; weight: thin (1) to bold (4)."""
    lines = [f"{name}, {model}".removesuffix(", all") for name, model in zip(names, rows["model"])]
    return rows.assign(line=lines, weight=weight)


def forest(rows, title, args):
    """PNG: accuracies, bias, boost of each line side by side."""
    rows["y"], names = pd.factorize(rows["line"])
    lines = rows.drop_duplicates("y")
    effects = sorted(set(args.effects))
    figure = Figure(figsize=(4 + 2 * len(effects), 2 + 0.27 * len(names)), layout="constrained")
    axes = figure.subplots(1, 1 + len(effects), sharey=True)
    draw_accuracies(axes[0], lines, args.metric)
    for axis, effect in zip(axes[1:], effects):
        draw_effect(axis, rows[rows["effect"] == effect], effect, args)
    for axis in axes:
        axis.grid(alpha=0.3)
    marks = [axis.get_legend_handles_labels()[0] for axis in axes[:2]]
    figure.legend(handles=marks[0] + marks[1], title=title, loc="outside upper center", ncols=3,
                  frameon=False)
    axes[0].set_ylim(len(names) - 0.3, -0.7)
    axes[0].set_yticks(range(len(names)), names.str[:45], parse_math=False)
    for label, weight in zip(axes[0].get_yticklabels(), lines["weight"]):
        label.set_fontweight("bold" if weight == 4 else "normal")
    return png_of(figure)


def draw_accuracies(axis, lines, metric):
    """base, unseen, seen of each line as marks."""
    for name, (colour, mark, area) in MARKS.items():
        axis.scatter(lines[name], lines["y"], area, color=colour, marker=mark, label=name,
                     edgecolor="#333333", lw=0.5, zorder=3)
    if metric == "acc":
        axis.scatter(lines["majority"], lines["y"], 90, "black", marker="|",
                     label="commonest class")
    axis.set_title(NAMES.get(metric, metric))
    axis.set_xlabel("%" if metric in SHARES else UNITS.get(metric, metric))


def draw_effect(axis, rows, effect, args):
    """Intervals of each line, on the margin."""
    axis.hlines(rows["y"], rows["low"], rows["high"], "black", lw=rows["weight"],
                label="89 % interval")
    axis.scatter(rows["estimate"], rows["y"], 8 + 8 * rows["weight"], "black", zorder=3)
    axis.axvline(0, color="#777777", lw=1, ls="--", zorder=0)
    axis.set_title({"boost": "boost\nunseen - base", "bias": "bias\nseen - unseen"}[effect])
    axis.set_xlabel(UNITS.get(args.metric, args.metric))
    if args.margin:
        axis.axvspan(-args.margin, args.margin, color="#dddddd", lw=0, zorder=-1,
                     label=f"margin ±{args.margin:g}")


# The page --------------------


def lines_html(lines, names):
    """HTML of a table of these columns."""
    table = pd.DataFrame(lines)
    table["name"] = table["name"].map(html.escape)
    large = [short_answer(line).partition(":")[0] for line in lines]
    table["needed"] = table["needed"].where([words.startswith("Too early") for words in large])
    table["answer"] = [f'<b class="{words.lower()}">{words}</b>' for words in large]
    table = table.reindex(columns=names).dropna(axis=1, how="all")
    for name in {"name", *EFFECTS} & {*table}:  # an interval stays in one line
        table[name] = table[name].str.replace(" = ", "&nbsp;=&nbsp;").str.replace(" [", "&nbsp;[")
        table[name] = table[name].str.replace(", +", ",&nbsp;+").str.replace(", -", ",&nbsp;-")
    table = table.rename(columns={"name": "setting", "majority": "commonest class"})
    form = "{:.2f}" if lines[0]["metric"] in SHARES else "{:.4f}"
    return table_html(table, escape=False, float_format=form.format,
                      formatters={"needed": "{:.0f}".format})


def cards(lines):
    """HTML: the short answer of the only line in large letters, of several a line each."""
    if len(lines) > 1:
        notes = [paragraph(f"{line['name']}: {remarks(line)}", "small")
                 for line in lines if remarks(line)]
        unit = f"In {UNITS.get(lines[0]['metric'], lines[0]['metric'])} [89 % interval]."
        table = lines_html(lines, ["answer", "name", "bias", "boost"])
        return table + paragraph(unit, "small") + "".join(notes)
    (line,) = lines
    large, _, small = short_answer(line).partition(":")
    return (f'<div class="card {large.lower()}">{paragraph(line["name"], "small")}'
            f"<b>{large}</b> {small}{paragraph(in_words(line))}{paragraph(remarks(line))}</div>")


def runs_html(rows):
    """HTML of what was run: a line a task of a setting; of many, a line a model of an experiment.
    """
    runs = rows.groupby([*CELL, "model", "task"]).agg(
        classes=("num_classes", "first"), arms=("arms", "first"),
        subsamples=("subsample", "nunique"), versions=("versions", names_of)).reset_index()
    runs["classes"] = runs["classes"].astype("Int64")
    runs.insert(2, "of it used", runs["classes"] * (runs["m"] // runs["classes"]))
    runs["model"] = runs["model"].replace("bert-tiny", "bert-tiny (a demonstration)")
    if len(runs) > MOST_LINES:
        groups = runs.groupby(["experiment", "model"])
        tasks = groups["task"].nunique()
        runs = groups[["m", "n", "classes", "arms", "subsamples", "versions"]].agg(names_of)
        runs = runs.assign(tasks=tasks).reset_index()
    runs = runs.replace("", np.nan).dropna(axis=1, how="all")
    return table_html(runs, max_rows=MOST_LINES)


def publish(rows, tasks, table, summaries, notes, args):
    """Make figures, page and tables, then save them."""
    figures = draw_all(tasks, table, args)
    lines = answers_of(table)
    shown = table[table["low"].notna() | (table["target"] == TARGETS[0])]
    if len(shown) > MOST_LINES:
        shown = headlines(table)
    names = ["name", "target", "bias", "boost", "tasks", "subsamples", "needed", *ACCURACIES]
    tick = TICK if args.metric == "acc" else ""
    parts = [cards(lines), *map(figure_html, figures.values()), paragraph(tick, "small"),
             "<h2>Settings</h2>", lines_html(lines_of(shown), names), paragraph(GLOSS, "small")]
    parts += [paragraph(text, "warning") for text in limits_of(lines, tasks)]
    parts += [paragraph(note) for note in notes]
    parts += ["<h2>What was run</h2>", runs_html(rows)]
    parts.append("<h2>For a methods section</h2>")
    known = rows.groupby(CELL)["counted"].transform("all")
    for _, mine in rows.groupby(["arms", known]):
        parts.append(paragraph(methods(mine, args)))
    parts.append(paragraph(args.command, "small"))

    inner = ["variance", "df", "pooled", "f1", "chance", "floor", "w", "seconds"]
    outer = table.drop(columns=["cells", "half", "seconds", "setting"])
    tables = {"effects": outer.replace({"m": {0: ""}, "n": {0: ""}}),
              "tasks": tasks.reset_index().drop(columns=inner)}
    if summaries:
        posterior = pd.concat(summaries, names=[*GROUP[:-1], "analysis", "parameter"])
        tables["posterior"] = posterior.reset_index()
    save(args.out, tables, figures, "Is pretraining on the test texts unfair here?", parts)


def run_samplers(rows, tasks, table, args):
    """Fit and publish all models, one by one. Returns how many did not converge."""
    jobs = list(itertools.product(rows.groupby(CELL), args.effects, args.analysis))
    summaries, notes, failed = {}, [], 0
    for (cell, mine), effect, analysis in tqdm(jobs, desc="samplers"):
        sizes = mine.groupby(["model", "task"])["subsample"].nunique()
        note = f"left out, it needs {FEWEST_TASKS} tasks with two subsamples each"
        if sizes.min() > 1 and sizes.groupby("model").size().min() >= FEWEST_TASKS:
            posterior, summary = fit(mine, effect, analysis, args.draws, not args.no_interaction)
            key = *cell, effect, analysis
            table, tasks, note = add_fit(posterior, summary, key, table, tasks)
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


# Flags and main --------------------


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FILE or FOLDER ...] [flags]", description=__doc__.partition("\n\n")[0])
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
        lines = answers_of(table)
        said = [*map(sentence, lines), *limits_of(lines, tasks)]
        print("\n".join(said))
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
