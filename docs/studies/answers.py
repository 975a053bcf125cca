"""Does `contamination_test.py --answers` hold what it says? The numbers of "Answers of any model"
in docs/validation.md, cheapest first.

    python docs/studies/answers.py halves docs/studies/constat_halves.csv
    python docs/studies/answers.py tries docs/rows/answers_example.csv
    python docs/studies/answers.py missing --sets 2000
    python docs/studies/answers.py simulate --sets 2000
    python docs/studies/answers.py pooled --sets 200
    python docs/studies/answers.py leaked --sets 200
    python docs/studies/answers.py differ --sets 100

halves: real models, clean ones and ones trained on one half, of which there are counts and no
items, so no model can explain another. tries: a 7B model that saw copies of the items, and its twin
that did not. missing: coverage where models did not answer all items. simulate: coverage, ten
minutes of one core. pooled: verdicts on an innocent model over many tasks, by what is wrong in all.
leaked: the model named clean saw the released half, too. differ: one of many tasks is leaked; each
before and after the rule that is for it.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import load_script  # noqa: E402

contam, fit = map(load_script, ["contamination_test", "fit_model"])
HALVES = ("released", "held_out")


def judged(answers, released, clean=()):
    """(bias, half-width) in points of the first column of answers [items, models], as the script
    takes them; clean: names of columns. Gaps are filled and models left out as in the script."""
    answers = answers.set_axis(pd.Index(np.where(released, *HALVES), name="half"))
    right = answers.iloc[:, 0].dropna()
    others = answers[[*clean]]
    others = others.loc[:, others.notna().mean() >= contam.ENOUGH]
    others = others.fillna(others.mean())[answers.iloc[:, 0].notna()]
    found = contam.difference(100 * right, others)
    return found["bias"], stats.t.ppf(0.945, found["bias_df"]) * found["bias_se"]


def draw_models(rng, items, clean, before=0.0, easier=0.0):
    """Answers [items, 1 + clean] of a model (column 0) and of clean ones; abilities of models and
    difficulties of items are normal on the scale of log odds. before: the share of the first clean
    one's answers that the model keeps. easier: of the first half of the items."""
    hard = rng.normal(0, 1.5, items) - easier * (np.arange(items) < items // 2)
    ability = rng.normal(0.5, 0.7, clean + 1)
    right = rng.random((items, clean + 1)) < 1 / (1 + np.exp(hard[:, None] - ability))
    if before:
        right[:, 0] = np.where(rng.random(items) < before, right[:, 1], right[:, 0])
    return pd.DataFrame(right.astype(float))


def simulate(args):
    """Print the coverage, without and with a bias (a fifth of the wrong answers learned), and the
    mean half-width."""
    rng = np.random.default_rng(0)
    print("| items a half | clean models | model before | no bias | half-width | bias |")
    for size, clean, before in itertools.product((30, 100, 300, 1000), (0, 1, 3, 10), (0, 1)):
        hits, widths = {0.0: [], 0.2: []}, []
        for _ in range(args.sets if clean or not before else 0):
            fresh = draw_models(rng, 2 * size, clean, before * args.kept)
            half = rng.permutation(2 * size) < size
            for gain in hits:
                learned = np.maximum(fresh[0], rng.random(2 * size) < gain)
                answers = fresh.copy()
                answers[0] = np.where(half, learned, fresh[0])
                bias, reach = judged(answers, half, range(1, clean + 1))
                hits[gain].append(abs(bias - 100 * (learned - fresh[0]).mean()) <= reach)
                if not gain:
                    widths.append(reach)
        if widths:
            none, some = [100 * np.mean(hits[gain]) for gain in hits]
            print(f"| {size} | {clean} | {before} | {none:.1f}% | ±{np.mean(widths):.2f} | "
                  f"{some:.1f}% |", flush=True)
    by_strength(args.sets, rng)
    by_unit(args.sets, rng)
    by_gap(args.sets, rng)


def missing(args):
    """Print the coverage for halves of 100 where clean models, or all models, miss a share of the
    answers, the harder items twice as often; and how often there is no verdict by chance."""
    rng = np.random.default_rng(1)
    for share, clean, who in itertools.product((0.05, 0.2), (1, 3), ("clean", "all")):
        hits, silent, used = [], [], []
        for _ in range(args.sets):
            answers = draw_models(rng, 200, clean, before=0.8)
            weights = np.where(answers.mean(axis=1) < 0.5, 2, 1)
            gone = rng.random(answers.shape) < (share * weights / weights.mean())[:, None]
            if who == "clean":
                gone[:, 0] = False
            half = rng.permutation(200) < 100
            seen = answers.mask(gone)
            bias, reach = judged(seen, half, range(1, clean + 1))
            hits.append(abs(bias) <= reach)
            counts = [[gone[rows, 0].sum(), (~gone[rows, 0]).sum()] for rows in (half, ~half)]
            silent.append(stats.fisher_exact(counts).pvalue < contam.NOT_RANDOM)
            used.append((seen.iloc[:, 1:].notna().mean() >= contam.ENOUGH).sum())
        print(f"{share:.0%} of the answers of {who}, {clean} clean: covers {np.mean(hits):.1%}, "
              f"no verdict {np.mean(silent):.1%}, clean models used {np.mean(used):.2f}")


def judge_tables(tables, clean):
    """fit_model.py's verdicts on tables of answers [items, models], one a task, the mean first; the
    first half of the items is released."""
    parts = []
    for task, answers in enumerate(tables):
        halves = np.where(np.arange(len(answers)) < len(answers) // 2, *HALVES)
        part = answers.assign(task=task, half=halves, item=np.arange(len(answers)))
        parts.append(part.melt(["task", "half", "item"], var_name="model", value_name="right"))
    rows, *_ = contam.parse_answers(pd.concat(parts, ignore_index=True))
    rows = fit.clean_rows(contam.judge_answers(rows, clean))
    lines = fit.analyze(rows, fit.metric_of("acc", 5.0, False)).query("effect == 'bias'")
    lines = lines.assign(bias=lines.estimate, low=lines.shown_low, high=lines.shown_high)
    return lines.sort_values("is_mean", ascending=False, kind="stable")


def pooled(args):
    """Print what is said of an innocent model over all tasks, and how often an interval above 0 is
    shown with a verdict: nothing is wrong; a tenth of its wrong answers lacks in the released half
    of every task; or the released halves are 4 points easier."""
    names = ["mine", *[f"clean {number + 1}" for number in range(args.clean)]]
    for (tasks, items), kind in itertools.product(
            ((20, 100), (57, 50)), ("nothing", "missing", "easier")):
        rng, withheld, above = np.random.default_rng(3), [], []
        for _ in range(args.sets):
            tables = []
            for _ in range(tasks):
                answers = draw_models(rng, items, args.clean, easier=0.22 * (kind == "easier"))
                answers.columns = names
                half = np.arange(items) < items // 2
                wrong = half & (answers["mine"] == 0)
                gone = wrong & (rng.random(items) < 0.1) & (kind == "missing")
                answers["mine"] = answers["mine"].mask(gone)
                tables.append(answers)
            row = judge_tables(tables, names[1:]).query("model == 'mine'").iloc[0]
            withheld.append(row["verdict"] == "none")
            above.append(row["low"] > 0 and not withheld[-1])
        print(f"{tasks} tasks of {items}, {kind}, {args.clean} clean models, {args.sets} sets: "
              f"no verdict {np.mean(withheld):.1%}, an interval "
              f"above 0 {np.mean(above):.1%}", flush=True)


def leaked(args):
    """A model keeps four of five answers of a checkpoint that is named clean. The checkpoint saw
    the released half (it learned a share of its wrong answers), or did not. Print the model's true
    bias, what the interval says, and how often the verdict is "No: within" or withheld, before and
    after the rule that a clean model must not be better on the released half."""
    print("| items a half | other clean models | learned | true bias | interval | No, before | "
          "No, after | withheld, before | withheld, after |")
    for size, clean, learned in itertools.product((300, 1000), (0, 4), (0.0, 0.15, 0.3)):
        rng, found = np.random.default_rng(4), []
        names = ["mine", "checkpoint", *[f"clean {k + 1}" for k in range(clean)]]
        for _ in range(args.sets):
            answers = draw_models(rng, 2 * size, clean + 1, args.kept).set_axis(names, axis=1)
            innocent = answers["mine"].copy()
            gained = (np.arange(2 * size) < size) & (rng.random(2 * size) < learned)
            kept = rng.random(2 * size) < args.kept  # of what the checkpoint learned
            answers["checkpoint"] = answers["checkpoint"].mask(gained, 1.0)
            answers["mine"] = answers["mine"].mask(gained & kept, 1.0)
            row = judge_tables([answers], names[1:]).query("model == 'mine'").iloc[0]
            before = fit.verdict_on(row["low"], row["high"], 5.0)
            truth = 100 * (answers["mine"] - innocent)[:size].mean()
            found.append([truth, row["bias"], row["high"] - row["bias"]] + [
                verdict in wanted for wanted in (("no", "yes-under"), ("none",))
                for verdict in (before, row["verdict"])])
        truth, bias, reach, *shares = np.mean(found, axis=0)
        print(f"| {size} | {clean} | {learned:.0%} | {truth:+.1f} | {bias:+.1f} ± {reach:.1f} | "
              + " | ".join([f"{share:.0%}" for share in shares]) + " |", flush=True)


    by_dropping(10 * args.sets)


def by_dropping(sets):
    """Honest tables: the coverage if a checkpoint whose own interval excludes 0 is left out, as an
    earlier guide advised, and if it is kept; and of the tables in which it is left out."""
    rng, found = np.random.default_rng(6), []
    for _ in range(sets):
        answers, half = draw_models(rng, 600, 1, before=0.8), np.arange(600) < 300
        kept, alone, own = [judged(answers[columns], half, columns[1:])
                            for columns in ([0, 1], [0], [1])]
        excludes = abs(own[0]) > own[1]
        bias, reach = alone if excludes else kept
        found.append([abs(kept[0]) <= kept[1], abs(bias) <= reach, excludes])
    kept, dropped, share = np.mean(found, axis=0)
    rest = np.mean([row[1] for row in found if row[2]])
    print(f"300 items a half, {sets} honest tables: covers {kept:.1%} with the checkpoint, "
          f"{dropped:.1%} if it is left out where its interval excludes 0 ({share:.1%} of tables: "
          f"{rest:.1%})")


def differ(args):
    """One of many tasks is leaked: a model learned none, half or all of its wrong answers in the
    released half of it. Print the mean bias, how often the row over all tasks says "No: within"
    without a word on differing tasks, before and after p_alike; how often it says that they differ;
    and how often some task gets "Yes", before (any interval above the margin) and after."""
    print("| tasks | checkpoint | learned | mean bias | No, before | No, after | they differ | "
          "some Yes, before | some Yes, after |")
    for (tasks, items), clean, learned in itertools.product(
            ((20, 100), (57, 50)), (0, 1), (0.0, 0.5, 1.0)):
        rng, found, names = np.random.default_rng(5), [], ["mine", "checkpoint"][: clean + 1]
        for _ in range(args.sets):
            tables = []
            for _ in range(tasks):
                answers = draw_models(rng, items, clean, args.kept * clean)
                tables.append(answers.set_axis(names, axis=1))
            gained = (np.arange(items) < items // 2) & (rng.random(items) < learned)
            tables[0]["mine"] = tables[0]["mine"].mask(gained, 1.0)
            rows = judge_tables(tables, names[1:]).query("model == 'mine'")
            row, parts = rows.iloc[0], rows.iloc[1:]
            says_no = fit.verdict_on(row["low"], row["high"], 5.0) in ("no", "yes-under")
            differs = row["p_alike"] < fit.LEVEL
            found.append([row["bias"], says_no, says_no and not differs, differs,
                          (parts["low"] > 5).any(), (parts["verdict"] == "yes").any()])
        bias, *shares = np.mean(found, axis=0)
        print(f"| {tasks} of {items} | {clean} | {learned:.0%} | {bias:+.1f} | "
              + " | ".join([f"{share:.0%}" for share in shares]) + " |", flush=True)


def by_strength(sets, rng):
    """A model that is wrong on one item in a hundred or fewer: HC2 alone would be too sure. Where all
    its answers are right, the script gives no verdict."""
    for size, wrong in itertools.product((30, 100, 1000), (0.01, 0.001)):
        hits = []
        for _ in range(sets):
            fresh = pd.DataFrame({0: (rng.random(2 * size) > wrong).astype(float)})
            half = rng.permutation(2 * size) < size
            if fresh[0].nunique() > 1:
                bias, reach = judged(fresh, half)
                hits.append(abs(bias) <= reach)
        print(f"right on {1 - wrong:.1%}, {size} a half: covers {np.mean(hits):.1%} of the "
              f"{len(hits)} tables with a wrong answer")


def by_unit(sets, rng):
    """Ten tries of an item as one unit, and as ten (a z-test of tries, which does not hold)."""
    for size in (100, 500):
        units, single = [], []
        for _ in range(sets):
            right = rng.binomial(10, 1 / (1 + np.exp(rng.normal(0, 1.5, 2 * size) - 0.5)))
            half = rng.permutation(2 * size) < size
            bias, reach = judged(pd.DataFrame({0: right / 10}), half)
            units.append(abs(bias) <= reach)
            p = [right[rows].mean() / 10 for rows in (half, ~half)]
            se = math.sqrt(sum(value * (1 - value) for value in p) / (10 * size))
            single.append(abs(p[0] - p[1]) <= stats.norm.ppf(0.945) * se)
        print(f"ten tries, {size} items a half: as one unit covers {np.mean(units):.1%}, as ten "
              f"{np.mean(single):.1%}")


def by_gap(sets, rng):
    """Halves that differ by about 4 points: how often there is no verdict, and what is left in the
    bias of a model that nothing was released to."""
    for size, clean in itertools.product((300, 1000), (1, 5)):
        found = []
        for _ in range(sets):
            answers = draw_models(rng, 2 * size, clean, easier=0.22)
            half = np.arange(2 * size) < size
            bias, _ = judged(answers, half, range(1, clean + 1))
            means = pd.DataFrame({0: answers.iloc[:, 1:].mean(axis=1)})
            differ, reach = judged(means, half)
            z = abs(differ) / reach * stats.t.ppf(0.945, 2 * size - 2)
            p = 2 * stats.t.sf(z, 2 * size - 2)
            found.append((bias, differ, p < contam.NOT_RANDOM))
        bias, differ, silent = np.mean(found, axis=0)
        print(f"halves differ by {differ:+.1f}, {size} a half, {clean} clean: bias left "
              f"{bias:+.2f}, no verdict in {silent:.0%}")


def halves(args):
    """Print how many intervals of clean models exclude 0, and of trained ones, by benchmark."""
    table = pd.read_csv(args.file)
    found = []
    for row in table.to_dict("records"):
        counts = [(row[f"right_{half}"], row[f"n_{half}"]) for half in HALVES]
        right = np.concatenate([np.arange(n) < k for k, n in counts]).astype(float)
        released = np.repeat([True, False], [n for _, n in counts])
        found.append(judged(pd.DataFrame({0: right}), released))
    table["bias"], table["reach"] = np.transpose(found)
    table["excludes"] = table["bias"].abs() > table["reach"]
    table["above"] = table["bias"] > table["reach"]
    chance = table["benchmark"].map({"mmlu": 25, "gsm8k": 0})  # of four choices; a number
    table["at_chance"] = 100 * table["right_held_out"] / table["n_held_out"] < chance + 5
    keys = ["benchmark", "trained_on_released"]
    columns = ["excludes", "above", "bias", "reach"]
    print(table.groupby(keys)[columns].agg(["size", "sum", "mean"]).round(2).to_string())
    able = table[~table["at_chance"]].groupby(keys)["above"].agg(["size", "sum"])
    print(f"those not within 5 points of chance on unseen items:\n{able.to_string()}")
    clean = table[table["trained_on_released"] == 0]["excludes"]
    print(f"clean: {clean.sum()} of {len(clean)} intervals exclude 0, {clean.mean():.1%}")


def by_tries(args):
    """Print our interval of each model that saw copies, with its twin as the clean model, beside a
    z-test that takes ten tries for ten items."""
    rows = pd.read_csv(args.file)
    answers = rows.pivot(index=["half", "item"], columns="model", values="right")
    released = answers.index.get_level_values("half") == "released"
    for epochs in (5, 10):
        pair = answers[[f"contaminated-{epochs}", f"clean-{epochs}"]]
        for clean in ([], [f"clean-{epochs}"]):
            bias, reach = judged(pair, released, clean)
            print(f"{epochs} epochs, clean {clean}: bias {bias:+.1f} ± {reach:.1f}")
        seen, unseen = pair.iloc[released, 0], pair.iloc[~released, 0]
        print(f"  tries as items, z-test: between the halves p {two_shares(seen, unseen):.1g}, "
              f"released items with and without copies p "
              f"{two_shares(seen, pair.iloc[released, 1]):.1g}")


def two_shares(one, other):
    """p of a z-test of two means of ten tries an item, taken for shares of items."""
    sizes = 10 * len(one), 10 * len(other)
    both = (one.sum() + other.sum()) * 10 / sum(sizes)
    se = math.sqrt(both * (1 - both) * sum(1 / size for size in sizes))
    return 2 * stats.norm.sf(abs(one.mean() - other.mean()) / se)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    studies = parser.add_subparsers(required=True)
    for name, run in (("simulate", simulate), ("missing", missing), ("pooled", pooled),
                      ("leaked", leaked), ("differ", differ)):
        study = studies.add_parser(name)
        study.add_argument("--sets", type=int, default=2000)
        study.add_argument("--kept", type=float, default=0.8, help="of the model before's answers")
        study.add_argument("--clean", type=int, default=1, help="clean models of pooled")
        study.set_defaults(run=run)
    for name, run in (("halves", halves), ("tries", by_tries)):
        study = studies.add_parser(name)
        study.add_argument("file", type=Path)
        study.set_defaults(run=run)
    given = parser.parse_args()
    given.run(given)
