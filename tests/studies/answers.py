"""Does `contamination_test.py --answers` hold what it says? The numbers of "Answers of any model"
in docs/results.md, cheapest first.

    python tests/studies/answers.py halves tests/studies/constat_halves.csv
    python tests/studies/answers.py tries docs/answers_example.csv
    python tests/studies/answers.py simulate --sets 2000
    python tests/studies/answers.py planted probs planted.csv

halves: real models, clean and trained on one half, of which there are counts and no items, so no
model can explain another. tries: a 7B model that saw copies of the items, and its twin that did
not. simulate: coverage, ten minutes of one core. planted: what

    python run_zero_shot.py --tasks rotten_tomatoes --n 1000 --subsamples 1 --pack --answers \\
        --pretrain-epochs 3 --experiment planted-answers --predictions probs --out planted.csv

writes, and the same without --answers: the arm `test` alone, its texts as the released half, `base`
as the clean model; beside it the crossed bias of the same run, which needs the arm `extra` too.
"""

import argparse
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import load_script  # noqa: E402

contam = load_script("contamination_test")
UPPER = 0.945


def interval(right, released, clean):
    """(bias, half-width of its 89 % interval), points, as the script takes them."""
    found = contam.difference(right, released, clean)
    return found["bias"], stats.t.ppf(UPPER, found["df"]) * found["se"]


# Simulated


def draw_models(rng, items, clean, before):
    """(right answers of the model, as if nothing were released [items], of clean models [clean,
    items]): abilities
    of models and difficulties of items are normal on the scale of log-odds; the model keeps four
    answers of five of
    the first clean one if that is the model before its training."""
    hard = rng.normal(0, 1.5, items)
    ability = rng.normal(0.5, 0.7, clean + 1)
    right = (rng.random((clean + 1, items)) < 1 / (1 + np.exp(hard - ability[:, None]))).astype(
        float
    )
    mine = right[-1]
    if before:
        mine = np.where(rng.random(items) < 0.8, right[0], mine)
    return mine, right[:clean]


def simulate(args):
    """Print the coverage, without and with a bias (a fifth of the wrong answers learned), and the
    mean half-width."""
    rng = np.random.default_rng(0)
    print(
        "| items a half | clean models | the model before among them | covers, no bias | half-width | covers, bias |"
    )
    for size, clean in itertools.product((30, 100, 300, 1000), (0, 1, 3, 10)):
        for before in (False, True)[: 1 + (clean > 0)]:
            hits, widths = {0.0: [], 0.2: []}, []
            for _ in range(args.sets):
                fresh, others = draw_models(rng, 2 * size, clean, before)
                half = rng.permutation(2 * size) < size
                for gain in hits:
                    learned = np.maximum(fresh, rng.random(2 * size) < gain)
                    bias, reach = interval(np.where(half, learned, fresh), half, others)
                    hits[gain].append(abs(bias - 100 * (learned - fresh).mean()) <= reach)
                    if not gain:
                        widths.append(reach)
            none, some = [100 * np.mean(hits[gain]) for gain in hits]
            print(
                f"| {size} | {clean} | {'yes' if before else 'no'} | {none:.1f} % | ±{np.mean(widths):.1f} | "
                f"{some:.1f} % |",
                flush=True,
            )
    strong(args.sets, rng)
    tries(args.sets, rng)
    gap(args.sets, rng)


def strong(sets, rng):
    """A model that is wrong on one item in a hundred or fewer: HC2 alone would be too sure."""
    for size, wrong in itertools.product((30, 100, 1000), (0.01, 0.001)):
        hits = []
        for _ in range(sets):
            fresh = (rng.random(2 * size) > wrong).astype(float)
            bias, reach = interval(fresh, rng.permutation(2 * size) < size, np.empty((0, 2 * size)))
            hits.append(abs(bias) <= reach)
        print(
            f"right on {1 - wrong:.1%}, {size} a half, no clean model: covers {np.mean(hits):.1%}"
        )


def tries(sets, rng):
    """Ten tries of an item as one unit, and as ten (a two-sample z-test of tries, which does not
    hold)."""
    for size in (100, 500):
        units, single = [], []
        for _ in range(sets):
            p = 1 / (1 + np.exp(rng.normal(0, 1.5, 2 * size) - 0.5))
            right = rng.binomial(10, p)
            half = rng.permutation(2 * size) < size
            bias, reach = interval(right / 10, half, np.empty((0, 2 * size)))
            units.append(abs(bias) <= reach)
            share = right[half].mean() / 10, right[~half].mean() / 10
            se = math.sqrt(sum(value * (1 - value) for value in share) / (10 * size))
            single.append(abs(share[0] - share[1]) <= stats.norm.ppf(UPPER) * se)
        print(
            f"ten tries, {size} items a half: as one unit covers {np.mean(units):.1%}, as ten {np.mean(single):.1%}"
        )


def gap(sets, rng):
    """Halves that differ by about 4 points for clean models: how often there is no verdict, and
    what is left in
    the bias of a model that nothing was released to."""
    for size, clean in itertools.product((300, 1000), (1, 5)):
        found = []
        for _ in range(sets):
            hard = rng.normal(0, 1.5, 2 * size)
            half = np.arange(2 * size) < size
            hard[half] -= 0.22
            ability = rng.normal(0.5, 0.7, clean + 1)
            right = (
                rng.random((clean + 1, 2 * size)) < 1 / (1 + np.exp(hard - ability[:, None]))
            ).astype(float)
            bias, _ = interval(right[-1], half, right[:-1])
            check = contam.difference(right[:-1].mean(0), half, np.empty((0, 2 * size)))
            p = 2 * stats.t.sf(abs(check["bias"] / check["se"]), check["df"])
            found.append((bias, check["bias"], p < contam.NOT_RANDOM))
        bias, differ, silent = np.mean(found, axis=0)
        print(
            f"halves differ by {differ:+.1f}, {size} a half, {clean} clean: bias left {bias:+.2f}, "
            f"no verdict in {silent:.0%}"
        )


# Real models


def halves(args):
    """Print how many intervals of clean models exclude 0, and of trained ones, by benchmark."""
    table = pd.read_csv(args.file)
    found = []
    for row in table.to_dict("records"):
        counts = [(row[f"right_{half}"], row[f"n_{half}"]) for half in contam.HALVES]
        right = np.concatenate([np.arange(n) < k for k, n in counts]).astype(float)
        released = np.repeat([True, False], [n for _, n in counts])
        bias, reach = interval(right, released, np.empty((0, len(right))))
        found.append({"bias": bias, "reach": reach, "unseen": 100 * counts[1][0] / counts[1][1]})
    table = pd.concat([table, pd.DataFrame(found)], axis=1)
    table["excludes"] = table["bias"].abs() > table["reach"]
    table["above"] = table["bias"] > table["reach"]
    chance = table["benchmark"].map({"mmlu": 25, "gsm8k": 0})  # of four choices; a number
    table["at_chance"] = table["unseen"] < chance + 5
    groups = table.groupby(["benchmark", "trained_on_released"])
    print(
        groups.agg(
            models=("excludes", "size"),
            excludes=("excludes", "sum"),
            above=("above", "sum"),
            bias=("bias", "mean"),
            least=("bias", "min"),
            most=("bias", "max"),
            reach=("reach", "mean"),
        )
        .round(2)
        .to_string()
    )
    able = table[~table["at_chance"]].groupby(["benchmark", "trained_on_released"])
    print(
        f"those not within 5 points of chance on unseen items:\n{able['above'].agg(['size', 'sum']).to_string()}"
    )
    clean = table[table["trained_on_released"] == 0]
    print(
        f"clean: {clean['excludes'].sum()} of {len(clean)} intervals exclude 0, {clean['excludes'].mean():.1%}"
    )


def by_tries(args):
    """Print our interval of each model that saw copies, with its twin as the clean model, beside a
    z-test that takes
    ten tries for ten items."""
    rows = pd.read_csv(args.file)
    answers = rows.pivot(index=["half", "item"], columns="model", values="right")
    released = answers.index.get_level_values("half") == "released"
    for epochs in (5, 10):
        right = answers[f"contaminated-{epochs}"].to_numpy()
        for clean in ([], [f"clean-{epochs}"]):
            bias, reach = interval(right, released, answers[clean].to_numpy().T)
            print(f"{epochs} epochs, clean {clean}: bias {bias:+.1f} ± {reach:.1f}")
        wins = [10 * right[half].sum() for half in (released, ~released)]
        sizes = [10 * half.sum() for half in (released, ~released)]
        both = sum(wins) / sum(sizes)
        z = (wins[0] / sizes[0] - wins[1] / sizes[1]) / math.sqrt(
            both * (1 - both) * sum(1 / size for size in sizes)
        )
        paired = right - answers[f"clean-{epochs}"].to_numpy()
        print(
            f"  tries as items, z-test between the halves: p {2 * stats.norm.sf(abs(z)):.1g}; "
            f"released items, with against without copies: p {pairs_p(answers, epochs, released):.1g}; "
            f"the same by items: p {stats.ttest_1samp(paired[released], 0).pvalue:.1g}"
        )


def pairs_p(answers, epochs, released):
    """p of a z-test of the released items' tries of the model with copies against the one
    without."""
    wins = [
        10 * answers.loc[released, f"{kind}-{epochs}"].sum() for kind in ("contaminated", "clean")
    ]
    size = 10 * released.sum()
    both = sum(wins) / (2 * size)
    return 2 * stats.norm.sf(
        abs(wins[0] - wins[1]) / size / math.sqrt(both * (1 - both) * 2 / size)
    )


# A model of ours


def planted(args):
    """Print the bias by --answers of the arm test, and of extra on its own half, beside the crossed
    bias."""
    results = pd.read_csv(args.results)
    effects = contam.add_effects(results.assign(arms="crossed"))
    for row in effects.to_dict("records"):
        name = f"{row['experiment']}-*-{row['n']}-{row['subsample']}-{row['seed']}-*.csv"
        (path,) = args.folder.glob(name)
        rows = pd.read_csv(path)
        rows["right"] = rows.filter(regex="^p[0-9]+$").to_numpy().argmax(1) == rows["label"]
        answers = rows.pivot(index=["set", "row"], columns="arm", values="right").astype(float)
        for arm, clean in itertools.product(("test", "extra"), ([], ["base"])):
            released = answers.index.get_level_values("set") == arm
            bias, reach = interval(answers[arm].to_numpy(), released, answers[clean].to_numpy().T)
            print(f"{row['experiment']}, arm {arm}, clean {clean}: bias {bias:+.2f} ± {reach:.2f}")
        one = {"n": row["n"], "subsamples": 1, "w": row["w"], "sd": math.nan}
        half = contam.bias_interval(pd.DataFrame([one]))[2]
        print(
            f"{row['experiment']}: base {row['base']:.4f}, unseen {row['unseen']:.4f}, seen {row['seen']:.4f}, "
            f"crossed bias {row['bias']:+.2f} ± {half:.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    studies = parser.add_subparsers(required=True)
    study = studies.add_parser("simulate")
    study.add_argument("--sets", type=int, default=4000)
    study.set_defaults(run=simulate)
    study = studies.add_parser("halves")
    study.add_argument("file", type=Path)
    study.set_defaults(run=halves)
    study = studies.add_parser("tries")
    study.add_argument("file", type=Path)
    study.set_defaults(run=by_tries)
    study = studies.add_parser("planted")
    study.add_argument("folder", type=Path)
    study.add_argument("results", type=Path)
    study.set_defaults(run=planted)
    given = parser.parse_args()
    given.run(given)
