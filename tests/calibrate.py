"""Do the 89 % intervals hold 89 %? Run by hand on the published accuracies; pytest does not collect it.

    python tests/calibrate.py few_shot_m50.csv                       # target 1, every model, n, tasks J, subsamples K: minutes
    python tests/calibrate.py few_shot_m50.csv --models-too --n 500  # also the hierarchical mean and the paper's (11): slow

Truth known by resampling: each task's published differences, centred to mean 0, are the noise; --sets data sets are drawn from them
with replacement (J random tasks, K subsamples each), to which a known effect of each task is added. Effects: "none" (0 for every
task), "spread" (Normal(0, 1) point), "noise" (proportional to the task's standard deviation, mean 1 point: effects that go with
noise). The target is the mean effect of the J drawn tasks. Columns: share of intervals that cover it, standard error of a share
near .89 with 4,000 sets: .005; width: mean width in points.
"""

import argparse
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent))
from conftest import load_script  # noqa: E402


def residuals(path, n, effect):
    """({model or "all": list over tasks of centred differences in points}), of one n; tasks in one order."""
    table = pd.read_csv(path).query("n == @n")
    control, treatment = {"boost": ("acc_base", "acc_extra"), "bias": ("acc_extra", "acc_test")}[effect]
    wide = (100 * (table[treatment] - table[control])).groupby([table["task"], table["subsample"], table["model"]]).mean().unstack("model")
    wide["all"] = wide.mean(axis=1)
    return {model: [group.to_numpy() - group.mean() for _, group in wide[model].groupby(level="task")] for model in wide}


def effects_of(kind, noises, rng):
    """A known effect for each task."""
    sd = np.array([noise.std() for noise in noises])
    return {"none": np.zeros(len(sd)), "spread": rng.normal(0, 1, len(sd)), "noise": sd / sd.mean()}[kind]


def cover_target_1(script, noises, n, J, K, sets, kind, rng):
    """(coverage, mean width) of these_tasks."""
    hits, widths = [], []
    for _ in range(sets):
        chosen = rng.choice(len(noises), J, replace=False)
        truth = effects_of(kind, noises, rng)[chosen]
        D = np.array([rng.choice(noises[j], K) for j in chosen]) + truth[:, None]
        *_, low, high = script.these_tasks(D.mean(1), D.var(1, ddof=1), np.full(J, K), (100 / n) ** 2 / 12)
        hits.append(low <= truth.mean() <= high)
        widths.append(high - low)
    return np.mean(hits), np.mean(widths)


def cover_models(script, path, n, sets, kind, rng):
    """Coverage of the mean over both models by the paper's (11) and the hierarchical mean, and by these tasks, on all tasks and 20
    subsamples: differences are added to the published counts of acc_extra, so both arms stay counts."""
    table = pd.read_csv(path).query("n == @n and subsample <= 20").assign(experiment="x")
    script.ATTEMPTS = script.ATTEMPTS[:1]  # a share of intervals does not need 400 effective draws of each
    args = SimpleNamespace(draws=500, tune=400, chains=2, cores=2, seed=0, priors="paper", no_interaction=False)
    centred = table["acc_test"] - table["acc_extra"]
    centred -= centred.groupby([table["model"], table["task"]]).transform("mean")
    noise, hits = centred.groupby([table["model"], table["task"]]).transform("std"), {"these tasks": [], "paper": [], "hierarchical": []}
    for number in range(sets):
        drawn = table.groupby(["model", "task"])["acc_extra"].transform(lambda group: rng.integers(len(group), size=len(group)))
        pick = table.groupby(["model", "task"]).cumcount()
        position = pd.Series(np.arange(len(table)), index=pd.MultiIndex.from_arrays([table["model"], table["task"], pick]))
        rows = table.reset_index(drop=True)
        chosen = position.loc[list(zip(table["model"], table["task"], drawn))].to_numpy()
        true = {"none": 0 * noise, "noise": 0.01 * noise / noise.mean()}[kind].to_numpy()
        extra = table["acc_extra"].to_numpy()[chosen]
        counts = np.round(n * np.clip(extra + centred.to_numpy()[chosen] + true, 0, 1)).astype(int)
        truth = 100 * pd.Series(true).groupby(rows["task"]).mean().mean()  # clipping and rounding move it by hundredths of a point
        rows = rows.assign(acc_extra=extra, acc_test=counts / n, right_extra=np.round(n * extra).astype(int), right_test=counts, seed=0,
                           right_base=0, acc_base=0.0)
        rows["subsample"] = pick.to_numpy() + 1
        long = script.differences(rows, "acc")
        tasks = script.task_table(rows, long, "acc")
        cell = tuple(rows[script.CELL].iloc[0])
        effects = script.effects_table(tasks, "acc", 1.0)
        for analysis in ("paper", "hierarchical"):
            list(script.mean_effects(script.fit(rows, "bias", analysis, args), effects, 1.0))
        for name, found in hits.items():
            row = effects[(*cell, "bias", "all", name)]
            found.append(row["low"] <= truth <= row["high"])
        print(f"  {number + 1} sets, effects {kind}: " + ", ".join(f"{name} {np.mean(found):.2f}" for name, found in hits.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("path", type=Path, help="published accuracies, a results file with several subsamples of many tasks")
    parser.add_argument("--effect", choices=("boost", "bias"), default="bias")
    parser.add_argument("--n", type=int, nargs="+", help="(all)")
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--models-too", action="store_true", help="the samplers' means instead, --sets data sets of each kind")
    args = parser.parse_args()
    script, rng = load_script("fit_model"), np.random.default_rng(0)
    sizes = args.n or sorted(set(pd.read_csv(args.path)["n"]))
    for n in sizes:
        if args.models_too:
            for kind in ("none", "noise"):
                cover_models(script, args.path, n, args.sets, kind, rng)
            continue
        shares = []
        for model, noises in residuals(args.path, n, args.effect).items():
            for J, kind in ((J, kind) for J in (2, 5, 25) for kind in ("none", "spread", "noise")):
                found = [cover_target_1(script, noises, n, J, K, args.sets, kind, rng) for K in (3, 5, 10, 20)]
                shares += [share for share, _ in found]
                print(f"n = {n}, {model}, J = {J}, effects {kind}: "
                      + ", ".join(f"K = {K}: {share:.3f} ({width:.2f})" for K, (share, width) in zip((3, 5, 10, 20), found)), flush=True)
        print(f"n = {n}: coverage from {min(shares):.3f} to {max(shares):.3f} in {len(shares)} cells, "
              f"standard error {math.sqrt(0.89 * 0.11 / args.sets):.3f}")


if __name__ == "__main__":
    main()
