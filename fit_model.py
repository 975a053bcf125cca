# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy==2.4.6", "pandas==3.1.1", "scipy==1.17.1", "pymc==5.28.5", "nutpie==0.16.8",
#     "matplotlib==3.10.9",
# ]
# ///
"""Does pretraining on unlabeled test texts inflate the score? From results.csv to a page.

Reproduces sections 5 to 8 of "Evaluating the fairness of task-adaptive pretraining on unlabeled
test data before few-shot text classification" (Dubey). m: labeled training texts; n: unlabeled
texts, and as many test texts; base, unseen, seen: accuracy without pretraining, on texts not seen
in pretraining, on texts seen; in percentage points boost = unseen - base, bias = seen - unseen.
89% intervals are for
    these tasks       the headline: the mean over tasks (model "all": averaged over models first)
    tasks like these  from five tasks on, Student's t over the means of tasks

    python fit_model.py results.csv                 # page and tables, 3 seconds
    python fit_model.py results.csv --paper-model   # then the paper's model, minutes

The paper's model: Y_ijkl ~ Binomial(n, p), logit p = mu + alpha_i + U_j + V_jk + W_jl + beta l for
model i, task j, subsample k and arm l (1: treatment), on the texts of `test`.

Writes report.html, effects.png and tables to fits/results/, with the columns
    effects.csv: experiment, m, n (empty: mean of all settings), metric, effect, model, arms
        (crossed: both sets of texts; plain: only `test`), target, tasks, subsamples (fewest of a
        task), majority (share of the most common class), base, unseen, seen (%), estimate, se, df,
        low, high (points), margin, verdict, needed (subsamples of each task that would decide)
    tasks.csv: the same for each task, sd (between subsamples), p (one-sided sign flips of a bias),
        p_adjusted (Benjamini-Hochberg); the verdicts allow for the number of tasks
    posterior.csv: experiment, m, n, effect, parameter (and predictions in points: difference (11),
        effect (12)), mean, sd, hdi_low, hdi_high, r_hat, ess_bulk, ess_tail, warning (empty: the
        fit converged; otherwise the exit status is 3)
"""

import argparse
import base64
import builtins
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

os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")  # nutpie needs no C compiler

NEAR = 0.55  # of the margin: with a smaller half-width, more data will hardly decide
WEAK = 5  # points of macro-F1 above guessing that show that a model learned something
FEW = 5  # the fewest tasks for "tasks like these" and for the paper's model
MOST = 40  # answers and lines on the page
MAX_R_HAT, MIN_ESS = 1.01, 400  # Vehtari et al. (2021)
ATTEMPTS = ((0.9, 1, 1), (0.99, 4, 2))  # target acceptance, factors of the tuning and the draws
THESE, LIKE = "these tasks", "tasks like these"
EFFECTS = {"bias": ("extra", "test"), "boost": ("base", "extra")}  # control, treatment on `test`
MEANS = ["majority", "base", "unseen", "seen"]
NAMES = {"acc": "accuracy", "f1": "macro-F1"}
UNITS = {"acc": "points", "f1": "points", "nll": "nats (lower is better)"}
GLOSS = ("base: without pretraining; unseen: pretrained on other texts; seen: pretrained on these "
         "texts; [89% interval]. tasks.csv has the results of each task.")
COLORS = """
.card { border: 1px solid; border-left-width: .6rem; padding: 0 1rem; margin: 1.5rem 0 }
.card div { color: black }
.card .large { color: inherit; font: bold 2.2rem/1.2 sans-serif }
.no { color: #006b4f }
.yes { color: #b3261e }
.near, .too { color: #8a5a00 }
"""


# The answer ---


def unit_table(rows):
    """One row per cell, model, task and subsample: means over seeds. Model "all" averages models
    with the same tasks and subsamples. The sd of a mean is at most the mean of the sds: w is the
    square of the mean of the roots. main: model "all", or each model where there is none."""
    variances = ["w_bias", "w_boost", "one_answer"]
    rows = rows.assign(**np.sqrt(rows[variances]))
    draw = [*CELL, "arms", "task", "subsample"]
    names = [*MEANS, *EFFECTS, *variances]
    groups = rows.groupby([*draw, "model"])
    units = groups[names].mean(skipna=False).assign(total=groups["bias"].sum()).reset_index()
    parts = []
    for _, mine in units.groupby(CELL):
        draws = mine.groupby(draw)
        together = draws.size().min() == mine.model.nunique() > 1
        parts.append(mine.assign(main=not together))
        if together:
            means = draws[names].mean(skipna=False).reset_index()
            parts.append(means.assign(model="all", main=True))
    units = pd.concat(parts, ignore_index=True).round({"bias": 9, "boost": 9})  # equal stay equal
    return units.assign(**units[variances] ** 2)


def task_table(units, effect, args):
    """The rows of tasks.csv of one cell and model, with v, the variance of each estimate."""
    tasks = task_means(units, effect).reset_index()
    tasks = tasks.assign(effect=effect, **units[[*CELL, "model", "arms", "main"]].iloc[0])
    if effect == "bias" and args.metric == "acc" and tasks.model[0] != "all":
        answers = units.n * np.where(units.arms == "crossed", 2, 1)
        changes = (units.total / 100 * answers).groupby(units.task)
        tasks["p"] = changes.agg(sign_flip_p).to_numpy()
        tasks["p_adjusted"] = stats.false_discovery_control(tasks.p)
    middle, df = tasks[effect], tasks.subsamples - 1
    half = stats.t.ppf((1 + SHARE) / 2, df) * np.sqrt(tasks.v)
    wide = stats.t.ppf(1 - (1 - SHARE) / 2 / len(tasks), df) * np.sqrt(tasks.v)  # Bonferroni
    verdicts = [verdict_of(*ends, args.margin) for ends in zip(middle, wide)]
    return tasks.assign(estimate=middle, low=middle - half, high=middle + half, verdict=verdicts)


def sign_flip_p(changes):
    """One-sided p-value of the sum of the changes under random signs, exact by convolution."""
    changes = changes.round().astype(int)
    share = np.ones(1)  # of all choices of signs, by the sum of the sizes that get a plus
    for size in changes.abs():
        share = (np.pad(share, (0, size)) + np.pad(share, (size, 0))) / 2
    observed = (changes.abs().sum() + changes.sum()) // 2
    return min(share[observed:].sum(), 1.0)  # rounding may exceed 1


def together(units, effect):
    """What `interval` takes, for the mean over all settings of the units: a row per task and m. A
    subsample has the same texts at every n, so its contributions are added before they are squared.
    """
    settings, groups = units.groupby(CELL), units.groupby([*CELL, "task"])
    K = groups[effect].transform("size")
    weight = 1 / (settings.ngroups * settings["task"].transform("nunique") * K)
    off = (units[effect] - groups[effect].transform("mean")) * np.sqrt(K / (K - 1))
    w = units[f"w_{effect}"]
    if effect == "bias":
        w = w + units.one_answer / K
    parts = units.assign(K=K, off=weight * off, w=weight**2 * w)
    sums = parts.groupby(["task", "m", "subsample"])[["off", "w"]].sum()
    sums = sums.assign(square=sums.off**2).groupby(["task", "m"]).sum()
    v = np.maximum(sums.square, sums.w) * len(sums) ** 2  # `interval` takes their mean
    return pd.DataFrame({"v": v, "subsamples": parts.groupby(["task", "m"])["K"].min()})


def verdict_of(middle, half, margin):
    """Where the interval middle ± half lies relative to (-margin, margin)."""
    if not margin or math.isnan(half):
        return ""
    if abs(middle) + half < margin:
        return "within the margin"
    if abs(middle) - half > margin:
        return "beyond the margin"
    return "not settled"


def effect_row(settings, noise, target, args):
    """A row of effects.csv and its words: the mean over settings, each a table of tasks, with the
    interval from noise, which is what `interval` takes."""
    tasks = pd.concat(settings)
    row = tasks[[*CELL, "effect", "model", "main"]].iloc[0].to_dict()
    row |= {"setting": title_of(*[row[name] for name in CELL]), "settings": len(settings),
            "target": target, "arms": names_of(tasks.arms), "tasks": min(map(len, settings)),
            "subsamples": tasks.subsamples.min(), "needed": math.nan, "out": 0}
    row |= pd.DataFrame([part[[*MEANS, "estimate"]].mean() for part in settings]).mean()
    row["se"], row["df"], half = interval(noise)
    row["low"], row["high"] = row["estimate"] - half, row["estimate"] + half
    row["verdict"] = verdict_of(row["estimate"], half, args.margin)
    if row["verdict"] == "not settled" and half > NEAR * args.margin and target == THESE:
        row["needed"] = math.ceil(row["subsamples"] * (2 * half / args.margin) ** 2)
    ends = np.array([row["estimate"], row["low"], row["high"]])
    ends += np.copysign(1e-9, ends)  # round halves away from 0
    places = 2 if args.metric in SHARES else 4
    middle, low, high = [f"{end:+z.{places}f}" for end in ends]
    row["words"] = f"{middle} [{low}, {high}]" if half > 0 else middle
    return row


def effects_table(units, tasks, args):
    """effects.csv, with words for the page: the mean over settings, then each setting."""
    rows = []
    for (experiment, effect, _), mine in tasks.groupby(["experiment", "effect", "model"]):
        settings = [part for _, part in mine.groupby(["m", "n"])]
        each = [effect_row([part], part, THESE, args) for part in settings]
        known = [part for part, row in zip(settings, each) if row["se"] > 0]
        if len(known) > 1:
            used = units.merge(pd.concat(known)[[*CELL, "model"]].drop_duplicates())
            rows.append(effect_row(known, together(used, effect), THESE, args) | {
                "m": "", "n": "", "setting": f"{experiment}, mean of {len(known)} settings",
                "out": sum(row["low"] * row["high"] > 0 for row in each)})
        rows += each
        for part in settings:
            if len(part) >= FEW:
                v = part.estimate.var() / len(part)
                means = pd.DataFrame({"v": [v], "subsamples": len(part)})
                rows.append(effect_row([part], means, LIKE, args))
    return pd.DataFrame(rows).assign(metric=args.metric, margin=args.margin)


# The paper's model ---


def paper_model(rows, interaction):
    """The paper's model of a cell, (1) to (10), as a pm.Model, in variables in which its chains mix
    (docs/results.md): logit p = c_jk + alpha_i + (l - 1/2) d_j."""
    import pymc as pm
    import pytensor.tensor as pt

    n, control, treatment, unit_idx = rows[["n", "control", "treatment", "unit"]].to_numpy(int).T
    model_idx, models = pd.factorize(rows.model)
    task_idx, tasks = pd.factorize(rows.task)
    task_of_unit = np.zeros(unit_idx.max() + 1, int)
    task_of_unit[unit_idx] = task_idx

    # k: the squared share of the variance of the tasks' changes that is not binomial noise
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

        # d_j: a task's effect, the more centered (k near 1) the better the data determine it
        d = beta * pt.ones(len(tasks))
        if interaction:
            s = math.sqrt(2) * sd_W
            z = pm.Normal("z", k * beta, s**k, dims="task")
            d = beta + s ** (1 - k) * (z - k * beta)
        d = pm.Deterministic("d", d, dims="task")

        level = c[unit_idx] + alpha[model_idx]
        half = d[task_idx] / 2
        pm.Binomial("control", n, logit_p=level - half, observed=control)
        pm.Binomial("treatment", n, logit_p=level + half, observed=treatment)
    return model


def predict(posterior, rows):
    """The posterior with the effects (12) and differences (11) that it predicts, in points."""
    rng = np.random.default_rng(0)
    inner = [name for name in posterior if name in ("a", "c", "z") or "__" in name]
    found = posterior.drop_vars(inner)
    effects = {}
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


def warning_of(table, divergences):
    """What is wrong with a fit, if anything. A missing value is a failure."""
    r_hat = table.r_hat.max(skipna=False)
    ess = table[["ess_bulk", "ess_tail"]].min(axis=None, skipna=False)
    if r_hat <= MAX_R_HAT and ess >= MIN_ESS and not divergences:
        return ""
    return f"not converged: r_hat {r_hat:.3f}, ESS {ess:.0f}, divergences: {divergences}"


def fit(rows, effect, args):
    """The rows of posterior.csv of a cell and effect; a fit that failed is repeated once, finer."""
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
        if trace.posterior.sizes["draw"] < args.draws * more:  # nutpie catches Ctrl-C itself
            raise SystemExit(f"stopped: the files in {args.out} stay")
        table = arviz.summary(predict(trace.posterior, rows), hdi_prob=SHARE, round_to="none")
        warning = warning_of(table, int(trace.sample_stats["diverging"].sum()))
        if not warning:
            break
    table = table.rename(columns={"hdi_5.5%": "hdi_low", "hdi_94.5%": "hdi_high"})
    return table.drop(columns=["mcse_mean", "mcse_sd"]).assign(warning=warning)


def run_paper_model(rows, args):
    """posterior.csv: the paper's model fitted to each cell and effect."""
    tables = {}
    for cell, mine in rows.groupby(CELL):
        sizes = mine.groupby(["model", "task"])["subsample"].nunique()
        if sizes.min() < 2 or mine.task.nunique() < FEW:
            print(f"{title_of(*cell)}: the paper's model needs {FEW} tasks with 2 subsamples each")
            continue
        for effect in EFFECTS:
            table = tables[*cell, effect] = fit(mine, effect, args)
            posterior = pd.concat(tables, names=[*CELL, "effect", "parameter"])
            posterior.to_csv(args.out / "posterior.csv", float_format="%.6g")
            said = table.warning.iloc[0] or "converged"
            print(f"{title_of(*cell)}, {effect}, the paper's model: {said}")
    return posterior.reset_index() if tables else pd.DataFrame()


# Words and page ---


def lines_of(table):
    """One line per setting and model: the bias on these tasks, with the words and the verdict of
    the boost, and the words of the bias on tasks like these."""
    keys = ["setting", "model"]
    bias = table[table.effect == "bias"]
    like = bias[bias.target == LIKE].set_index(keys)
    boost = table[(table.effect == "boost") & (table.target == THESE)].set_index(keys)
    more = pd.DataFrame({"boost": boost.words, "boost_verdict": boost.verdict, "like": like.words})
    return bias[bias.target == THESE].join(more, on=keys)


def short_answer(line):
    """The verdict. The page prints the part before the colon in large letters; its first word is a
    class of the style."""
    if not line.low < line.high:
        return "Too early to tell: there is no interval"
    if not line.verdict:
        return f"The interval {'excludes' if line.low * line.high > 0 else 'holds'} 0"
    unit = UNITS.get(line.metric, line.metric).replace("points", "percentage points")
    margin = f"±{line.margin:g} {unit}"
    if line.verdict == "within the margin":
        return f"No: within {margin}"
    if line.verdict == "beyond the margin":
        better = (line.low > 0) == (line.metric != "nll")
        return f"Yes: beyond {margin}" if better else f"No: even worse, beyond {margin}"
    if math.isnan(line.needed):
        return f"Near the margin: the interval is narrow and holds a bias of {margin}"
    return f"Too early to tell: the interval is still wider than {margin} allows"


def details(line):
    """The sentences below the verdict."""
    name = NAMES.get(line.metric, line.metric)
    if line.model != "all":
        name += f" of {line.model}"
    unit = UNITS.get(line.metric, line.metric)
    tasks = "1 task" if line.tasks == 1 else f"{line.tasks} tasks"
    said = [f"Pretraining on the test texts instead of other texts changes {name} by {line.words} "
            f"{unit} (bias, 89% interval, {tasks}); pretraining on other texts instead of none "
            f"changes it by {line.boost} (boost)."]
    if line.settings > 1:
        chance = (1 - SHARE) * line.settings
        found = {0: "None", 1: "One"}.get(line.out, line.out)
        have = "has an interval that excludes" if line.out < 2 else "have intervals that exclude"
        expected = "about one is" if chance < 1.5 else f"about {chance:.0f} are"
        said.append(f"{found} of the {line.settings} settings {have} 0; {expected} expected by "
                    "chance.".replace("about", "about" if chance > 0.5 else "less than"))
    return said


def advice(line, rows):
    """What to do if it is too early to tell. rows: those behind the line."""
    if not line.low < line.high:
        return ("Every task needs at least two subsamples, and two that differ if there is no column "
                "`discordant`: run more (--subsamples 3).")
    if math.isnan(line.needed):
        return ""
    text = f"About {line.needed:.0f} subsamples of each task in all would decide"
    seconds = rows.groupby([*CELL, "model", "task"])["seconds"].mean().sum()
    hours = (line.needed - line.subsamples) * seconds / 3600
    if hours > 24:
        text += (f", about {hours / 24:.0f} days on this machine: this margin is out of reach here; "
                 "a larger --n or --margin needs fewer")
    elif hours > 0:  # published rows have no seconds
        text += (f" (--subsamples {line.needed:.0f}, about {hours:.1f} hours more on this machine). "
                 "Take that answer: looking again and again leads to wrong ones")
    return f"{text}."


def caveats(line, rows):
    """What limits an answer that is not beyond the margin. rows: those behind the line."""
    said = []
    if line.verdict == "beyond the margin":
        return said
    if line.verdict == line.boost_verdict == "within the margin":
        said.append("The boost too is within the margin: pretraining did not help here, so there "
                    "was little to inflate.")
    f1 = rows[["f1_extra", "f1_test_on_extra"]].mean(axis=1)
    above = 100 * (f1 - 1 / rows.num_classes) - WEAK
    words = f"macro-F1 on unseen texts is less than {WEAK} points above guessing"
    if above.isna().any():
        above = 100 * rows[["acc_extra", "acc_test_on_extra"]].mean(axis=1) - rows.majority
        words = "accuracy on unseen texts is no higher than the share of the most common class"
    cases = rows.assign(above=above).groupby([*CELL, "model", "task"])["above"].mean()
    weak = cases[cases <= 0].reset_index().task
    if len(weak):
        said.append(f"A caveat: in {len(weak)} of {len(cases)} cases (a model, a task, m and n) "
                    f"{words}. The models barely learned these tasks: {names_of(weak)}.")
    return said


def names_of(values):
    """The different values in words, at most five."""
    names = [str(value) for value in sorted(set(values.dropna()))]
    if len(names) > 6:
        names[5:] = [f"{len(names) - 5} more"]
    return ", ".join(names)


def methods(rows, args):
    """A paragraph for a methods section."""
    tests = "both sets" if set(rows.arms) == {"crossed"} else "the first set"
    margin = f" Effects within ±{args.margin:g} are too small to matter." if args.margin else ""
    return (
        f"For each subsample of a task, m = {names_of(rows.m)} labeled texts and two disjoint sets "
        f"of n = {names_of(rows.n)} others were drawn. Each model was used as it is (base) and "
        "pretrained on the unlabeled texts of either set, then trained on the labeled texts (or "
        f"prompted, if zero-shot) and tested on {tests}. Bias: {NAMES.get(args.metric, args.metric)}"
        " on texts seen in pretraining minus that on unseen texts; boost: the latter minus that of "
        "base. Means over tasks have 89% t intervals with Satterthwaite's degrees of freedom; the "
        "variance of a task is that between its subsamples, or that of drawing its texts if larger."
        + margin)


def draw(tasks, table, args):
    """The figure: accuracies, bias and boost of each setting, or of each task of the only setting,
    and of their mean."""
    rows = table[table.target == THESE].assign(name=table.setting)
    rows = rows[rows.main | (rows.settings > 1)]
    if tasks.groupby(CELL).ngroups == 1:
        single = tasks[tasks.model != "all"].sort_values("estimate", ascending=False)
        rows = pd.concat([rows.assign(name="mean"), single.assign(name=single.task)])
    y, names = pd.factorize((rows["name"] + ", " + rows.model).str.removesuffix(", all"))
    rows, names = rows.assign(y=y)[y < MOST], names[:MOST].str[:45]
    figure = Figure((9.5, 1.5 + 0.27 * len(names)), layout="constrained")
    first, *others = figure.subplots(1, 3, sharey=True)
    marks = {"base": ("s", 130, "white"), "unseen": ("o", 60, "#88ccee"), "seen": ("D", 16, "red")}
    for name, (mark, area, color) in marks.items():  # the smaller ones above the larger
        first.scatter(rows[name], rows.y, area, color, marker=mark, edgecolor="black", label=name)
    if args.metric == "acc":
        first.scatter(rows.majority, rows.y, 110, "black", marker="|", label="most common class")
    first.set_title(NAMES.get(args.metric, args.metric))
    first.set_yticks(range(len(names)), names, parse_math=False)
    first.set_ylim(len(names) - 0.4, -0.6)
    titles = {"bias": "bias = seen - unseen", "boost": "boost = unseen - base"}
    for axis, (effect, title) in zip(others, titles.items()):
        mine = rows[rows.effect == effect]
        reach = mine.high - mine.estimate
        axis.errorbar(mine.estimate, mine.y, xerr=reach, fmt="ko", label="89% interval")
        axis.axvline(0, color="gray", ls="--")
        if args.margin:
            axis.axvspan(-args.margin, args.margin, color="#dddddd", zorder=-1, label="margin")
        axis.set_title(title)
        axis.set_xlabel(UNITS.get(args.metric, args.metric))
    handles = [axis.get_legend_handles_labels()[0] for axis in (first, others[0])]
    figure.legend(handles=sum(handles, []), loc="outside upper center", ncols=6, frameon=False)
    return figure


def publish(rows, tasks, table, posterior, args):
    """Write the page, the figure and the tables. Returns the sentences to print."""
    lines = lines_of(table)
    most = lines.groupby(["experiment", "model"])["settings"].transform("max")
    said, cards = [], []
    for line in lines[lines.main & (lines.settings == most)].itertuples():
        mine = rows
        for name in [*CELL, "model"]:
            if getattr(line, name) not in ("", "all"):
                mine = mine[mine[name] == getattr(line, name)]
        answer, limits = short_answer(line), caveats(line, mine)
        texts = [*details(line), advice(line, mine)]
        said.append(" ".join(filter(None, [f"{answer} ({line.setting}).", *texts, *limits])))
        large, _, small = answer.partition(": ")
        card = [("small", line.setting), ("large", large)]
        card += [("", text) for text in [small, *texts]] + [("warning", text) for text in limits]
        cards.append((f"card {large.partition(' ')[0].lower()}", card))
    if len(cards) > MOST:
        cards[MOST:] = [("", f"{len(cards) - MOST} more answers are in effects.csv.")]

    if len(lines) > MOST:
        lines = lines[lines.main][:MOST]
    lines = lines.rename(columns={"words": "bias", "like": f"bias, {LIKE}"})
    shown = ["setting", "model", "bias", "boost", f"bias, {LIKE}", "tasks", "subsamples", "needed"]
    runs = ["experiment", "model", "m", "n", "arms", "num_classes", "versions", "task"]
    runs = rows.reindex(columns=runs).groupby(runs[:2]).agg(names_of).reset_index()
    parts = [*cards, ("effects", draw(tasks, table, args)), ("title", "Settings"),
             ("", lines[[*shown, *MEANS]].dropna(axis=1, how="all")), ("small", GLOSS)]
    if len(posterior):
        wanted = posterior.parameter.str.contains("^beta|^difference")
        parts += [("title", "The paper's model"), ("", posterior[wanted])]
    parts += [("title", "What was run"), ("", runs), ("title", "Methods"),
              ("", methods(rows, args)), ("small", args.command)]
    effects = table.drop(columns=["setting", "settings", "out", "words", "main"])
    tasks = tasks.set_index([*CELL, "effect", "model", "task"]).reset_index()
    inner = ["bias", "boost", "w_bias", "w_boost", "one_answer", "v", "main"]
    tables = {"effects": effects, "tasks": tasks.drop(columns=inner)}
    save(args.out, "Is pretraining on the test texts unfair here?", parts, tables, STYLE + COLORS)
    return said


# The same in meta_analysis.py and, effects, in the run scripts. tests/copy_blocks.py copies them.

# --- shared: reading ---
CELL = ["experiment", "m", "n"]
RUN = ["experiment", "model", "task", "m", "n", "subsample", "seed"]  # identify a row
FILTERS = ("experiment", "m", "n", "models", "tasks")


def columns_of(metric):
    """The columns of the three arms on the texts of `test`, then on those of `extra`."""
    names = [f"{metric}_{arm}" for arm in ("base", "extra", "test")]
    return names + [f"{name}_on_extra" for name in names]


def check(rows, good, words):
    """Stop at the first row that is not good."""
    if not good.all():
        raise SystemExit(f"error: {rows.index[~good][0]}: {words}")


def read_rows(path, metric):
    """The rows of a results file; empty fields are nan."""
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False, engine="python")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: could not read {path}: {error}")
    rows.index = [f"{path}, data row {number + 1}" for number in rows.index]
    torn = rows.isna().any(axis=1)  # an empty field is "", a field that was cut off is nan
    for where in rows.index[torn]:
        print(f"{where} was cut off while it was written, so it is skipped")
    rows = rows[~torn].replace("", np.nan)
    needed = [*RUN[:-1], "majority", *columns_of("acc")[:3], *columns_of(metric)[:3]]
    shares = ["discordant", "discordant_on_extra", *columns_of("acc")]
    more = ["majority", "num_classes", *columns_of("f1"), *columns_of(metric)]
    for name in needed:
        if name not in rows:
            found = ", ".join(rows)[:150]
            raise SystemExit(f"error: {path} has no column {name}. Its columns are: {found}")
    for name in [*RUN[3:], *shares, *more]:
        rows[name] = pd.to_numeric(rows.get(name, np.nan), errors="coerce")
    for name in needed:
        check(rows, rows[name].notna(), f"{name} is empty or not a number")
    for name in shares:
        count = (rows[name] * rows["n"]).fillna(0)
        whole = (count - count.round()).abs() < 1e-4 * rows["n"]
        check(rows, whole & count.between(0, rows["n"]), f"{name} is not a share of n texts")
    rows[RUN[3:]] = rows[RUN[3:]].fillna(0).astype(int)
    return rows


def load_rows(args, metric="acc"):
    """The rows that the flags choose. arms is "crossed" if all rows of a cell have the metric on
    `extra` too. Otherwise, and with --plain, it is "plain", and *_on_extra is nan."""
    rows = pd.concat([read_rows(path, metric) for path in args.paths])
    for flag in FILTERS:
        values = rows[flag.removesuffix("s")].astype(str)
        wanted = getattr(args, flag) or values
        unknown = ", ".join(sorted(set(wanted) - set(values)))
        if unknown:
            found = ", ".join(sorted(set(values)))[:150]
            raise SystemExit(f"error: --{flag}: no rows with {unknown}. The file has: {found}")
        rows = rows[values.isin(wanted)]
    if rows.empty:
        raise SystemExit(f"error: {args.paths[0]} has no rows: run run_experiment.py first")
    scopes = dict.fromkeys(rows.select_dtypes("number"), RUN)
    scopes |= {"recipe": RUN[:5], "data": ["experiment", "task"]}
    for name, scope in scopes.items():
        if name in rows:
            values = rows.groupby(scope)[name].transform("nunique")
            words = f"other rows with the same {', '.join(scope)} have another {name}: keep one"
            check(rows, values < 2, words)
    rows = rows.groupby(RUN, as_index=False).first()
    both = rows[columns_of(metric)].notna().all(axis=1) & (not args.plain)
    crossed = both.groupby([rows[name] for name in CELL]).transform("all")
    if (both & ~crossed).any():
        print(f"some rows have no {metric}_*_on_extra: only the texts of `test` are used there")
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
div { margin: .6rem 0; overflow-x: auto }
td, th { padding-right: .9rem; text-align: left; white-space: nowrap; font-size: .85rem }
img { max-width: 100%; min-width: 45rem }
.title { font-size: 1.5rem; font-weight: bold; margin-top: 1.5rem }
.small { font-size: .85rem }
.warning { border-left: .3rem solid #8a5a00; padding-left: .8rem }
@media print { div { overflow: visible } img { min-width: 0 } td, th { white-space: normal } }
"""


def html_of(kind, part, folder):
    """A div of class `kind` with a text, a table, a figure (also saved as KIND.png) or a list of
    such parts."""
    if isinstance(part, list):
        text = "".join(html_of(*each, folder) for each in part)
    elif isinstance(part, Figure):
        path = folder / f"{kind}.png"
        part.savefig(path, dpi=130)
        picture = base64.b64encode(path.read_bytes()).decode()
        text = f'<img src="data:image/png;base64,{picture}">'
        if hasattr(builtins, "display"):  # a notebook
            builtins.display({"image/png": picture}, raw=True)
    elif isinstance(part, pd.DataFrame):
        text = part.to_html(index=False, border=0, na_rep="", float_format="{:.4g}".format)
    else:
        text = html.escape(part)
    return f'<div class="{kind}">{text}</div>' if text else ""


def save(folder, title, parts, tables, style=STYLE):
    """Write the tables as CSV files, and report.html of the parts, each a kind (see STYLE) and what
    html_of takes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    page = ['<!DOCTYPE html><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{title}</title><style>{style}</style><h1>{title}</h1>"]
    page += [html_of(kind, part, folder) for kind, part in parts]
    (folder / "report.html").write_text("\n".join(page), encoding="utf-8")
# --- end shared ---


# Flags and main ---


def parse_args(argv):
    """The flags."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FILE ...] [flags]", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("paths", nargs="*", type=Path, default=[Path("results.csv")], help="(results.csv)")
    add("--margin", type=float, help="effects within it do not matter (acc, f1: 1 point)")
    add("--metric", default="acc", help="or f1, nll, NAME of columns NAME_base, ... (acc)")
    add("--plain", action="store_true", help="use only the texts of test, as the paper does")
    for flag in FILTERS:
        add(f"--{flag}", nargs="+", help="only these (all)")
    add("--paper-model", action="store_true", help="fit the paper's model too")
    add("--no-interaction", action="store_true", help="the paper's model without W (Figure 10)")
    add("--draws", type=int, default=1000, help="of the paper's model, per chain (1000)")
    add("--out", type=Path, metavar="FOLDER", help="(fits/NAME of the first file)")
    args = parser.parse_args(argv)
    args.command = f"python fit_model.py {shlex.join(sys.argv[1:] if argv is None else argv)}"
    name = args.paths[0].stem
    if len(args.paths) > 1:
        name += f"-and-{len(args.paths) - 1}-more"
    if args.metric != "acc":
        name += f".{args.metric}"
    args.out = args.out or Path("fits", name)
    if args.margin is None and args.metric in SHARES:
        args.margin = 1.0
    if args.margin is not None and not 0 < args.margin < math.inf:
        raise SystemExit(f"error: --margin is {args.margin}: use a number above 0")
    if args.paper_model and args.metric != "acc":
        raise SystemExit("error: --paper-model needs accuracies: leave out --metric")
    return args


def main(argv=None):
    args = parse_args(argv)
    rows = add_effects(load_rows(args, args.metric), args.metric)
    rows["majority"] *= 100
    rows["seconds"] = pd.to_numeric(rows.get("seconds", np.nan), errors="coerce")
    if args.metric in SHARES:
        rows[["base", "unseen", "seen"]] *= 100
    units = unit_table(rows)
    tasks = []
    for _, mine in units.groupby([*CELL, "model"]):
        tasks += [task_table(mine, effect, args) for effect in EFFECTS]
    tasks = pd.concat(tasks, ignore_index=True)
    table = effects_table(units, tasks, args)
    said = publish(rows, tasks, table, pd.DataFrame(), args)
    print("\n".join([*said, f"page: {(args.out / 'report.html').resolve()}"]))
    (args.out / "posterior.csv").unlink(missing_ok=True)
    if args.paper_model and args.draws:
        posterior = run_paper_model(rows, args)
        publish(rows, tasks, table, posterior, args)
        if len(posterior) and posterior.warning.any():
            raise SystemExit(3)


if __name__ == "__main__":  # in a notebook cell flags go into the list: ["--m", "50"]
    main([] if "__file__" not in globals() else None)
