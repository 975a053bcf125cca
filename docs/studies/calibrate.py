"""Do the 89% intervals of a crossed bias hold 89%? Run by hand; each takes 2 minutes on one core.

    python docs/studies/calibrate.py            # prints the table of docs/validation.md
    python docs/studies/calibrate.py --alike    # how often the page says that tasks differ
    python docs/studies/calibrate.py --models   # the mean over models
    python docs/studies/calibrate.py --skew     # published subsamples that are skewed
    python docs/studies/calibrate.py --boost    # the boost over the published settings

Each study simulates 4,000 data sets with a known bias (standard error of a share near .89: .005).
In a subsample the two pretrained models answer a share of about d of the n texts of each set
differently, half of them each way. The run's own bias, Normal(true bias, sd) points, adds texts
that only the model that has seen them gets right (or only the other one). d is .03 to .13 by task,
or .01, and varies by a third between subsamples. The wider of the two intervals is computed for all
K at once; in each study fit_model.py must give the same for some of the data sets.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import ROOT, load_script  # noqa: E402

CHUNK = 250  # data sets at once
CHUNKS = 16
MARGIN = 1.0  # points
DEFAULT = 40  # subsamples of each task in a run of run_experiment.py
SIZES = (2, 3, 5, 10, (3, 30), DEFAULT)  # K of each task, or of the tasks in turn
CHANGES = {"0": [[0]], "1": [[1]], "2": [[2]], "0 and 4": [[0, 4], [4, 0]]}  # sd of the tasks


def simulate(rng, sds, d, bias, max_subsamples, n):
    """How many of the n texts only the model that has seen them gets right, and only the other one:
    each [data sets, tasks, subsamples, 2 sets of texts]."""
    size = (CHUNK, len(sds), max_subsamples)
    effect = (bias + sds[:, None] * rng.standard_normal(size)) / 100
    level = rng.uniform(*d, size[:2])[..., None, None] * rng.gamma(8, 1 / 8, (*size, 2))
    seen = level / 2 + np.maximum(effect, 0)[..., None]
    unseen = level / 2 + np.maximum(-effect, 0)[..., None]
    only_seen = rng.binomial(n, seen)
    return only_seen, rng.binomial(n - only_seen, unseen / (1 - seen))


def biases_of(only_seen, only_unseen, n):
    """Bias of each subsample, and its variance by the draw of the texts: each [..., subsamples]."""
    change = (only_seen - only_unseen) / n
    differ = (only_seen + only_unseen) / n
    text_variance = 100**2 / (4 * n) * (differ - change**2).sum(axis=-1)
    return 100 * change.mean(axis=-1), text_variance


def rule(bias, text_variance, one_answer):
    """Mean and its variance by the spread and by the draw of the texts, of each task after its
    first K subsamples: each [data sets, tasks, max_subsamples]. one_answer: a variance that is
    divided by K."""
    K = np.arange(1, bias.shape[2] + 1)
    mean = bias.cumsum(axis=2) / K
    squares = (bias**2).cumsum(axis=2) - K * mean**2
    spread_variance = np.maximum(squares, 0) / np.maximum(K - 1, 1) / K
    return mean, spread_variance, (text_variance.cumsum(axis=2) / K + one_answer / K) / K


def rule_of_answers(only_seen, only_unseen, n):
    return rule(*biases_of(only_seen, only_unseen, n), one_answer_of(n))


def one_answer_of(n):
    """The variance by one imaginary answer in each of the two sets."""
    return 100**2 / (2 * n**2)


def half_width(spread_variance, text_variance, K):
    """Of the mean over tasks; the variances and K [..., tasks]."""
    total = spread_variance.sum(axis=-1)
    with np.errstate(invalid="ignore"):  # 0 / 0, whose square root decides nothing
        df = total**2 / (spread_variance**2 / (K - 1)).sum(axis=-1)
    t = stats.t.ppf(0.945, df) * np.sqrt(total)
    normal = stats.norm.ppf(0.945) * np.sqrt(text_variance.sum(axis=-1))
    return np.fmax(t, normal) / spread_variance.shape[-1]


def check(only_seen, only_unseen, n, K, half):
    """fit_model.py must find these half-widths [data sets] with K subsamples [tasks]."""
    script = load_script("fit_model")
    for s in range(5):
        table = {"task": np.repeat(np.arange(len(K)), K), "n": n, "arms": "crossed", "m": 50,
                 "subsample": np.arange(sum(K)), "experiment": "", "model": "",
                 "acc_base": 0.4, "acc_base_on_extra": 0.4,
                 "item_variance_boost": np.nan, "bias_se": np.nan, "bias_df": np.nan}
        arms = ("extra", "test")
        for place, ending in enumerate(("", "_on_extra")):
            pair = []
            for answers in (only_unseen, only_seen):
                pair.append(np.concatenate([t[:k, place] for t, k in zip(answers[s], K)]) / n)
            table[f"discordant{ending}"] = pair[0] + pair[1]
            table[f"acc_{arms[0]}{ending}"] = 0.4 + pair[place]
            table[f"acc_{arms[1]}{ending}"] = 0.4 + pair[1 - place]
        shares = script.task_shares(script.add_effects(pd.DataFrame(table)), "bias")
        assert np.isclose(script.interval(shares)[2], half[s], rtol=1e-9), (shares, half[s])


def study(sds, d, bias, n):
    """Shares of intervals that cover the bias at each of SIZES, then those that lie below it and
    above it at the last of them."""
    rng = np.random.default_rng(1)
    J = len(sds)
    max_subsamples = 40 + int(60 * ((sds**2).mean() + 2) / J)
    parts = []
    for chunk in range(CHUNKS):
        answers = simulate(rng, sds, d, bias, max_subsamples, n)
        mean, *variances = rule_of_answers(*answers, n)
        columns = []
        for size in SIZES:
            K = np.resize(size, J)
            last = np.arange(J), K - 1
            half = half_width(*[part[:, *last] for part in variances], K)
            if chunk == 0:
                check(*answers, n, K, half)
            off = mean[:, *last].mean(axis=1) - bias
            columns.append(np.abs(off) <= half)
        parts.append([*columns, off + half < 0, off - half > 0])
    return np.concatenate(parts, axis=1).mean(axis=1)


def p_of_alike_tasks(mean, spread_variance, text_variance, K):
    """Mehrotra's F test of the tasks' means; all [data sets, tasks]."""
    J = mean.shape[1]
    df = spread_variance.sum(axis=1) ** 2 / (spread_variance**2).sum(axis=1) * (K - 1)
    spread, text = spread_variance.sum(axis=1), text_variance.sum(axis=1)
    normal = stats.norm.ppf(0.945) ** 2 * text > stats.t.ppf(0.945, df) ** 2 * spread
    df = np.where(normal, 1e9, df)
    F = J * mean.var(axis=1, ddof=1) / np.where(normal, text, spread)
    top = np.minimum(J - 1, (J - 1) ** 2 / (1 + (J - 2) * J * (K - 1) / df))
    return stats.f.sf(F, top, df)


def say_differ(sds, biases, K):
    """Share of data sets in which p_alike is below .05."""
    rng = np.random.default_rng(2)
    J = len(sds)
    count = 0
    for _ in range(CHUNKS):
        answers = [simulate(rng, sds[j : j + 1], (0.03, 0.13), biases[j], K, 200) for j in range(J)]
        answers = [np.concatenate(part, axis=1) for part in zip(*answers)]
        table = [part[:, :, -1] for part in rule_of_answers(*answers, 200)]
        count += (p_of_alike_tasks(*table, K) < 0.05).sum()
    return count / (CHUNK * CHUNKS)


def tell_alike():
    """Print how often tasks are said to differ: alike, and with a bias of ±1.06 or ±1.5 in turn."""
    for name, sds in CHANGES.items():
        for J in (2, 5):
            cells = []
            for K in (5, 12):
                for bias in (0, 1.06, 1.5):
                    signs = np.resize([-bias, bias], J)
                    cells.append(f"{100 * say_differ(np.resize(sds[0], J), signs, K):.0f}")
            print("|", " | ".join([name, str(J), *cells]), "|", flush=True)


def tell(name, J, sds, ds, biases, n=200):
    """Print a row of the table: ranges over sds, ds and biases."""
    table = []
    for bias in biases:
        for d in ds:
            table += [study(np.resize(sd, J), d, bias, n) for sd in sds]
    cells = [range_of(100 * cell, 0) for cell in np.transpose(table)]
    print("|", " | ".join([name, str(J), *cells]), "|", flush=True)


def simulate_models(rng, models, sds, d, max_subsamples, n, correlation):
    """As simulate(), of several models without a bias: a list of what it returns. A text changes
    for each model with the same probabilities. Each copies a text's change from a common one with
    probability sqrt(correlation), so that the changes of two models correlate by that."""
    size = (CHUNK, len(sds), max_subsamples)
    level = rng.uniform(*d, size[:2])[..., None, None] * rng.gamma(8, 1 / 8, (*size, 2))
    common_seen = rng.binomial(n, level / 2)
    common_unseen = rng.binomial(n - common_seen, level / 2 / (1 - level / 2))
    common_same = n - common_seen - common_unseen
    copying = np.sqrt(correlation)
    answers = []
    for _ in range(models):
        copied_seen = rng.binomial(common_seen, copying)
        copied_unseen = rng.binomial(common_unseen, copying)
        own = n - copied_seen - copied_unseen - rng.binomial(common_same, copying)
        luck = sds[:, None] * rng.standard_normal(size) / 100 / (1 - copying)
        seen = level / 2 + np.maximum(luck, 0)[..., None]
        unseen = level / 2 + np.maximum(-luck, 0)[..., None]
        own_seen = rng.binomial(own, seen)
        own_unseen = rng.binomial(own - own_seen, unseen / (1 - seen))
        answers.append((copied_seen + own_seen, copied_unseen + own_unseen))
    return answers


def study_models(models, J, sd, correlation, n=200, max_subsamples=60):
    """Shares of data sets whose interval covers 0 after 3 and 12 subsamples of each task, and in
    which p_alike is below .05 after 12."""
    rng = np.random.default_rng(3)
    sds = np.full(J, sd)
    parts = []
    for chunk in range(CHUNKS):
        answers = simulate_models(rng, models, sds, (0.03, 0.13), max_subsamples, n, correlation)
        biases, variances = zip(*[biases_of(*pair, n) for pair in answers])
        own = np.mean(variances, axis=0) / models  # each model changes its own texts
        table = rule(np.mean(biases, axis=0), own, one_answer_of(n) / models)
        columns = []
        for K in (3, 12):
            mean, *after = [part[:, :, K - 1] for part in table]
            half = half_width(*after, np.full(J, K))
            columns.append(np.abs(mean.mean(axis=1)) <= half)
            if chunk == 0 and K == 3:
                check_models(answers, n, half)
        differ = J > 1 and p_of_alike_tasks(mean, *after, K) < 0.05
        parts.append([*columns, np.broadcast_to(differ, CHUNK)])
    return np.concatenate(parts, axis=1).mean(axis=1)


def check_models(answers, n, half):
    """fit_model.py must find these half-widths [data sets] of the mean over models, K = 3."""
    script = load_script("fit_model")
    for s in range(2):
        parts = []
        for number, (only_seen, only_unseen) in enumerate(answers):
            seen, unseen = [part[s, :, :3].reshape(-1, 2) / n for part in (only_seen, only_unseen)]
            table = {"experiment": "few-shot", "model": f"model {number}", "m": 50, "n": n,
                     "task": np.repeat(np.arange(len(seen) // 3), 3).astype(str), "seed": 0,
                     "subsample": np.resize([1, 2, 3], len(seen)), "majority": 0.3,
                     "acc_base": 0.4, "acc_base_on_extra": 0.4,
                     "acc_extra": 0.4 + unseen[:, 0], "acc_test": 0.4 + seen[:, 0],
                     "acc_extra_on_extra": 0.4 + seen[:, 1],
                     "acc_test_on_extra": 0.4 + unseen[:, 1],
                     "discordant": (seen + unseen)[:, 0],
                     "discordant_on_extra": (seen + unseen)[:, 1]}
            parts.append(pd.DataFrame(table))
        table = script.effects_table(pd.concat(parts, ignore_index=True))
        row = table[(table.model == "all") & (table.effect == "bias")].iloc[0]
        assert np.isclose((row.high - row.low) / 2, half[s], rtol=1e-6), (row, half[s])


def tell_models():
    """Print a row for each number of models and correlation: lowest to highest of one and two tasks
    and of runs that vary by 0 or 1 point."""
    for models in (2, 4):
        for correlation in (0, 0.1, 0.3, 0.6):
            rows = []
            for J in (1, 2):
                rows += [study_models(models, J, sd, correlation) for sd in (0, 1)]
            three, twelve, alike = 100 * np.transpose(rows)
            of_two_tasks = alike[2:]  # one task has no p_alike
            cells = [range_of(column, 0) for column in (three, twelve, of_two_tasks)]
            print(f"| {models} | {correlation:g} |", " | ".join(cells), "|", flush=True)
    published = published_few_shot().set_index(["task", "m", "n", "subsample", "model"])["bias"]
    cells = published.unstack().groupby(["task", "m", "n"]).corr().xs("bert", level="model")["gpt2"]
    half = stats.norm.ppf(0.945) * cells.std() / np.sqrt(len(cells))
    print(f"published BERT and GPT-2: correlation {cells.mean():+.3f} ± {half:.3f} ({len(cells)})")


def range_of(values, digits):
    """Lowest to highest, or the one number that both are."""
    ends = [f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"]
    return " to ".join(dict.fromkeys(ends))


def published_few_shot():
    rows = pd.concat(map(pd.read_csv, sorted((ROOT / "tests/published").glob("few_shot*.csv"))))
    return rows.assign(bias=100 * (rows["acc_test"] - rows["acc_extra"]),
                       boost=100 * (rows["acc_extra"] - rows["acc_base"]))


def study_skew(bias, text_variance, one_answer, K):
    """Runs of K draws from the subsamples of one cell, whose mean is the truth: shares of intervals
    that cover it, and that lie on one side of it (the side where more do)."""
    drawn = np.random.default_rng(4).integers(len(bias), size=(CHUNK * CHUNKS, 1, K))
    table = rule((bias - bias.mean())[drawn], text_variance[drawn], one_answer)
    mean, *variances = [part[:, :, -1] for part in table]
    half = half_width(*variances, np.array([K]))
    off = mean[:, 0]
    return (np.abs(off) <= half).mean(), max((off + half < 0).mean(), (off - half > 0).mean())


def tell_skew():
    """Print a row for each kind of cells, at 8 and 40 subsamples: lowest to highest over cells."""
    cells = {"published, below 0.2": [], "published, 1 to 2": [], "published, above 3": []}
    for (*_, n), rows in published_few_shot().groupby(["model", "task", "m", "n"]):
        skew = abs(stats.skew(rows["bias"]))
        rounding = np.full(len(rows), (100 / n) ** 2 / 12)
        for kind, chosen in zip(cells, (skew < 0.2, 1 < skew < 2, skew > 3)):
            if chosen and len(cells[kind]) < 40:
                cells[kind].append((rows["bias"].to_numpy(), rounding, 0))
    cells["bert_tiny_n200.csv, crossed"] = []
    ours = pd.read_csv(ROOT / "docs/rows/bert_tiny_n200.csv")
    ours = ours.assign(arms="crossed", item_variance_boost=np.nan)
    for _, rows in load_script("fit_model").add_effects(ours).groupby("task"):
        columns = rows[["bias", "text_variance_bias"]].to_numpy().T
        cells["bert_tiny_n200.csv, crossed"].append((*columns, one_answer_of(200)))
    for kind, chosen in cells.items():
        skews = [stats.skew(bias) for bias, *_ in chosen]
        columns = []
        for K in (8, DEFAULT):
            shares = np.transpose([study_skew(*cell, K) for cell in chosen])
            columns += [range_of(100 * share, 0) for share in shares]
        print(f"| {kind} | {len(chosen)} | {range_of(skews, 1)} |", " | ".join(columns), "|",
              flush=True)


def boost_over_settings():
    """Bootstrap of the mean boost over the published settings, by subsamples of a task and m."""
    rows = published_few_shot()
    means = rows.groupby(["task", "m", "n", "subsample"])["boost"].mean().unstack()
    grid = means.to_numpy().reshape(50, 4, 100)  # task and m; n; subsample: nan where there is none
    rng = np.random.default_rng(0)
    again = []
    for _ in range(4000):
        times = rng.multinomial(100, np.full(100, 0.01), len(grid))[:, None]
        count = (times * ~np.isnan(grid)).sum(axis=2)
        again.append((np.nansum(times * grid, axis=2) / count).mean())
    print(np.nanmean(grid, axis=2).mean(), np.quantile(again, [0.055, 0.945]), np.std(again))


def main():
    others = {"--alike": tell_alike, "--models": tell_models, "--skew": tell_skew,
              "--boost": boost_over_settings}
    if sys.argv[1:]:
        others[sys.argv[1]]()
        return
    for name, sds in CHANGES.items():
        for J in (1, 2, 5):
            if J >= len(sds):
                tell(name, J, sds, ((0.03, 0.13), (0.01, 0.01)), (0.0, MARGIN))
    for J in (1, 2, 5):  # only 1 text in 100 changes, always in favor of the model that has seen it
        tell("0, n = 50, d = 0", J, [[0]], [(0, 0)], [MARGIN], n=50)
    for name, J, sds in (("1", 1, [1]), ("0 and 2", 2, [0, 2]), ("1", 5, [1])):
        tell(f"{name}, n = 1,000", J, [sds], [(0.01, 0.01)], (0.0, MARGIN), n=1000)


if __name__ == "__main__":
    main()
