"""Boost and bias over the number of passes of pretraining: docs/figures/passes.png and its table.

    for E in 2 6 15 40; do python run_experiment.py --max-length 96 --pretrain-epochs $E \
        --subsamples 16 --experiment passes-$E; done
    python docs/studies/passes.py

The other experiments of docs/rows/passes.csv, `-slow`, add --train-lr 5e-4 --train-epochs 15. One
NVIDIA H200 made most rows (--device cuda); 8 of the 255 come from its processor.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from conftest import load_script

COLORS = {"boost": "#0072B2", "bias": "#D55E00"}
WORDS = {"boost": "boost: pretraining on other texts", "bias": "bias: on the test texts instead"}


def effect_of(rows, effect):
    """{task: mean}, mean over tasks, half-width."""
    fit = load_script("fit_model")
    units = fit.add_effects(fit.clean_rows(rows))
    tasks = units.groupby("task")[effect].mean()
    return tasks.to_dict(), tasks.mean(), fit.interval(fit.task_shares(units, effect))[2]


def main():
    rows = pd.read_csv(ROOT / "docs" / "rows" / "passes.csv")
    parts = rows["experiment"].str.split("-", expand=True)
    rows = rows.assign(passes=parts[1].astype(int), slow=parts[2].notna())
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for slow, mine in rows.groupby("slow"):
        for effect in ("boost", "bias"):
            table = {}
            for passes, own in mine.groupby("passes"):
                by_task, mean, half = effect_of(own, effect)
                table[passes] = {"mean": mean, "half": half, **by_task}
                print("slow" if slow else "default", passes, effect, f"{mean:+.2f} ± {half:.2f}",
                      {task: f"{value:+.2f}" for task, value in by_task.items()})
            if slow:
                continue
            table = pd.DataFrame(table).T
            axes.errorbar(table.index, table["mean"], table["half"], color=COLORS[effect], fmt="o-",
                          capsize=4, lw=2, label=WORDS[effect])
            for task, style, below in (("bbc_news", ":", 0), ("reuters", "--", 8)):
                axes.plot(table.index, table[task], style, color=COLORS[effect], lw=1)
                axes.annotate(task, (40, table[task].iloc[-1]), xytext=(8, -below),
                              textcoords="offset points", fontsize=8, color=COLORS[effect])
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.set_xticks([2, 6, 15, 40], ["2", "6", "15", "40"])
    axes.minorticks_off()
    axes.set_xlim(1.7, 62)
    axes.set_xlabel("passes over the texts in pretraining (epochs)")
    axes.set_ylabel("change of accuracy, percentage points")
    axes.set_title("Longer pretraining helps, and no more on the texts that it saw", loc="left")
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "figures" / "passes.png", dpi=150)


if __name__ == "__main__":
    main()
