"""Do the 89% intervals of a crossed bias hold 89%? Run by hand; each takes 2 minutes on one core.

    python tests/studies/calibrate.py            # prints the table of docs/results.md
    python tests/studies/calibrate.py --alike    # how often the page says that tasks differ
    python tests/studies/calibrate.py --models   # the mean over models, by the old and the new rule
    python tests/studies/calibrate.py --skew     # published subsamples that are skewed
    python tests/studies/calibrate.py --boost    # the boost over the published settings

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import ROOT, load_script  # noqa: E402

CHUNK = 250  # data sets at once
CHUNKS = 16
MARGIN = 1.0  # points
LEAST = 8  # subsamples of each task, before a run may stop
SIZES = (2, 3, 5, 10, (3, 30))  # K of each task, or of the tasks in turn
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
                 "acc_base": 0.4, "acc_base_on_extra": 0.4, "item_variance_boost": np.nan}
        arms = ("extra", "test")
        for place, ending in enumerate(("", "_on_extra")):
            pair = []
            for answers in (only_unseen, only_seen):
                pair.append(np.concatenate([t[:k, place] for t, k in zip(answers[s], K)]) / n)
            table[f"discordant{ending}"] = pair[0] + pair[1]
            table[f"acc_{arms[0]}{ending}"] = 0.4 + pair[place]
            table[f"acc_{arms[1]}{ending}"] = 0.4 + pair[1 - place]
        shares = script.shares_of(script.add_effects(pd.DataFrame(table)), "bias")
        assert np.isclose(script.interval(shares)[2], half[s], rtol=1e-9), (shares, half[s])


def study(sds, d, bias, n):
    """Shares of intervals that cover the bias at each of SIZES, then what happens at the stop of
    --margin: the share that covers, mean K, shares of the verdicts No and Yes."""
    rng = np.random.default_rng(1)
    J = len(sds)
    max_subsamples = 40 + int(60 * ((sds**2).mean() + 2) / J)
    every = np.arange(LEAST, max_subsamples + 1)
    one = np.arange(CHUNK)
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
            columns.append(np.abs(mean[:, *last].mean(axis=1) - bias) <= half)

        late = [part[:, :, LEAST - 1 :].transpose(0, 2, 1) for part in variances]
        halves = half_width(*late, every[:, None])
        enough = halves <= MARGIN / 2
        assert enough.any(axis=1).mean() > 0.99, "raise max_subsamples"
        first = enough.argmax(axis=1)
        middle = mean[:, :, LEAST - 1 :].mean(axis=1)[one, first]
        half = halves[one, first]
        columns += [np.abs(middle - bias) <= half, every[first],
                    np.abs(middle) + half < MARGIN, np.abs(middle) - half > MARGIN]
        parts.append(columns)
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
    table = np.array(table)
    table[:, :-3] *= 100
    at_margin = 100 * table[-len(ds) * len(sds) :, -2:]
    cells = [range_of(cell, 0) for cell in [*table[:, :-2].T, *at_margin.T]]
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
    """[2 rules, 5]: by the old rule (all models change the same texts) and the new one (each its
    own), the shares of data sets whose interval covers 0 after 3 and 12 subsamples of each task and
    at the stop, the mean half-width after 12 and the share in which p_alike is below .05 then."""
    rng = np.random.default_rng(3)
    sds = np.full(J, sd)
    one, every = np.arange(CHUNK), np.arange(LEAST, max_subsamples + 1)
    parts = []
    for chunk in range(CHUNKS):
        answers = simulate_models(rng, models, sds, (0.03, 0.13), max_subsamples, n, correlation)
        biases, variances = zip(*[biases_of(*pair, n) for pair in answers])
        bias = np.mean(biases, axis=0)
        bound = np.mean(np.sqrt(variances), axis=0) ** 2  # of a mean: its sd is at most the sds'
        own = np.mean(variances, axis=0) / models
        columns = []
        for text_variance, shrink in ((bound, 1), (own, models)):
            mean, *table = rule(bias, text_variance, one_answer_of(n) / shrink)
            halves = half_width(*[part.transpose(0, 2, 1)[:, 1:] for part in table],
                                np.arange(2, max_subsamples + 1)[:, None])  # [data sets, K - 2]
            middle = np.abs(mean.mean(axis=1))
            enough = halves[:, LEAST - 2 :] <= MARGIN / 2
            assert enough.any(axis=1).mean() > 0.99, "raise max_subsamples"
            stop = every[enough.argmax(axis=1)] - 1
            after = [part[:, :, 11] for part in (mean, *table)]
            columns += [middle[:, 2] <= halves[:, 1], middle[:, 11] <= halves[:, 10],
                        middle[one, stop] <= halves[one, stop - 1], halves[:, 10]]
            differ = J > 1 and p_of_alike_tasks(*after, 12) < 0.05
            columns.append(np.broadcast_to(differ, CHUNK))
        if chunk == 0:
            check_models(answers, n, halves[:, 1])
        parts.append(columns)
    return np.concatenate(parts, axis=1).mean(axis=1).reshape(2, -1)


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
    """Print a row for each number of models and correlation: old rule, new rule; lowest to highest
    of one and two tasks and of runs that vary by 0 or 1 point."""
    for models in (2, 4):
        for correlation in (0, 0.1, 0.3, 0.6):
            rows = []
            for J in (1, 2):
                rows += [study_models(models, J, sd, correlation) for sd in (0, 1)]
            old, new = np.transpose(rows, (1, 2, 0))
            cells = []
            for column in range(5):
                if column == 3:
                    cells.append(range_of(old[column] / new[column], 1))
                    continue
                values = slice(2, None) if column == 4 else slice(None)  # one task has no p_alike
                for rule_columns in (old, new):
                    cells.append(range_of(100 * rule_columns[column][values], 0))
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


def study_skew(bias, text_variance, one_answer, margin):
    """Runs drawn from the subsamples [K] of one cell, whose mean is the truth, until the half-width
    is at most half the margin: mean K, share that covers, and the share of a false No if the true
    bias is the margin or minus the margin, whichever is more."""
    rng = np.random.default_rng(4)
    max_subsamples = 40 + int(40 * bias.var() / margin**2)
    every = np.arange(LEAST, max_subsamples + 1)
    drawn = rng.integers(len(bias), size=(CHUNK * CHUNKS, 1, max_subsamples))
    mean, *table = rule((bias - bias.mean())[drawn], text_variance[drawn], one_answer)
    halves = half_width(*[part[:, 0, LEAST - 1 :, None] for part in table], every[:, None])
    enough = halves <= margin / 2
    assert enough.any(axis=1).mean() > 0.99, "raise max_subsamples"
    stop = enough.argmax(axis=1)
    runs = np.arange(len(stop))
    middle, half = mean[runs, 0, LEAST - 1 + stop], halves[runs, stop]
    no = [(np.abs(middle + bias) + half < margin).mean() for bias in (-margin, margin)]
    return every[stop].mean(), (np.abs(middle) <= half).mean(), max(no)


def tell_skew():
    """Print a row for each kind of cells: lowest to highest over cells and margins of 1, 0.5 and
    0.25 sd of the cell's subsamples."""
    cells = {"published, below 0.2": [], "published, 1 to 2": [], "published, above 3": []}
    for (*_, n), rows in published_few_shot().groupby(["model", "task", "m", "n"]):
        skew = abs(stats.skew(rows["bias"]))
        rounding = np.full(len(rows), (100 / n) ** 2 / 12)
        for kind, chosen in zip(cells, (skew < 0.2, 1 < skew < 2, skew > 3)):
            if chosen and len(cells[kind]) < 40:
                cells[kind].append((rows["bias"].to_numpy(), rounding, 0))
    cells["bert_tiny_n200.csv, crossed"] = []
    ours = pd.read_csv(ROOT / "tests/bert_tiny_n200.csv").assign(arms="crossed")
    for _, rows in load_script("fit_model").add_effects(ours).groupby("task"):
        columns = rows[["bias", "text_variance_bias"]].to_numpy().T
        cells["bert_tiny_n200.csv, crossed"].append((*columns, one_answer_of(200)))
    for kind, chosen in cells.items():
        skews = [stats.skew(bias) for bias, *_ in chosen]
        table = []
        for margin in (1, 0.5, 0.25):
            table += [study_skew(*cell, margin * cell[0].std()) for cell in chosen]
        K, covers, no = np.transpose(table)
        print(f"| {kind} | {len(chosen)} | {range_of(skews, 1)} | {range_of(K, 0)} "
              f"| {range_of(100 * covers, 0)} | {range_of(100 * no, 0)} |", flush=True)


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
