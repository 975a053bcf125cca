"""The dose curve of docs/validation.md: are texts that a model saw in pretraining told from others,
with and without their labels, and is accuracy higher on them?

    python docs/studies/dose.py             # days of one core; goes on where it was
    python docs/studies/dose.py --list      # the commands
    python docs/studies/dose.py --figure    # docs/figures/contamination.png and its tables

Fixed before looking: settings, in order of importance, and numbers of subsamples. smollm2,
rotten_tomatoes, n = 50, eight texts a sequence. After equally many epochs only the labels differ.
The first twenty subsamples of a setting are audited, so their adapters are kept; further ones cost
training and scoring alone. Accuracies go into docs/rows/dose_results.csv, audits into
docs/rows/contamination.csv. Rows of one table come from one machine: a GPU's differ in the last
digits.
"""

import argparse
import math
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from conftest import load_script

ROWS = ROOT / "docs" / "rows"
AUDITS, RESULTS = ROWS / "contamination.csv", ROWS / "dose_results.csv"
FLAGS = {"packed": "--pack", "packed-answers": "--pack --with-answers"}
SETTINGS = [("packed", 10, 48), ("packed-answers", 10, 20), ("packed", 3, 48),
            ("packed-answers", 3, 20), ("packed", 1, 20)]  # form, epochs, subsamples
AUDITED = 20  # most subsamples of a setting that are audited
DROPPED = "^(?:num_classes|f1|nll|loss|seconds|split|versions)"  # columns of an audit
MARGIN = 1  # point of the question
COLORS = {False: "#009E73", True: "#882255"}  # without, with answers; told apart by all eyes
BAND = "#dddddd"
ORDER_TESTS = {"order test": "p_exact", "relative order": "p_relative"}
TITLE = "Soon visible beside the model before; perhaps inflated after ten epochs"
UNDER = "smollm2, 50 reviews; numbers: epochs of pretraining; bars: 89% intervals"
# of a label at its interval: aligned how, at the upper or the lower end
PLACES = [("center", 1), ("center", -1), ("left", 1), ("right", 1), ("left", -1), ("right", -1)]


def commands(folder):
    """The lines of the shell, in order."""
    lines = []
    for form, epochs, subsamples in SETTINGS:
        train = (
            f"run_zero_shot.py --tasks rotten_tomatoes {FLAGS[form]} --pretrain-epochs {epochs} "
            f"--experiment packed-{epochs} --n 50 --workers 1 --out {RESULTS}"
        )
        lines.append(f"{train} --subsamples {AUDITED} --adapters {folder}/units")
        lines.append(f"contamination_test.py {folder}/units --out {folder}/contamination.csv")
        if subsamples > AUDITED:
            lines.append(f"{train} --subsamples {subsamples}")
    return lines


def run(folder):
    """Every line; each skips what is finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for line in commands(folder):
        print(f"python {line}", flush=True)
        script, *flags = shlex.split(line)
        try:
            subprocess.run([sys.executable, str(ROOT / script), *flags], check=True)
        except (KeyboardInterrupt, subprocess.CalledProcessError) as error:
            raise SystemExit(f"stopped ({error!r}): the same command goes on") from None
        if script == "contamination_test.py":
            join(folder / "contamination.csv", AUDITS)


def join(audit, table):
    """Bring the rows of an audit into the table, in place of those of the same subsamples."""
    contam = load_script("contamination_test")
    rows = pd.read_csv(audit)
    rows = rows.loc[:, ~rows.columns.str.contains(DROPPED)]
    if table.exists():
        rows = pd.concat([pd.read_csv(table), rows])
        rows = rows.drop_duplicates([*contam.SETTING, "subsample"], keep="last")
    rows.to_csv(table, index=False)


def summary():
    """A row a setting: accuracies, bias, crossed AUC of each detector and its half-width."""
    contam, fit = load_script("contamination_test"), load_script("fit_model")
    results = pd.read_csv(RESULTS)
    lines = []
    for name, audit in pd.read_csv(AUDITS).groupby("experiment"):
        epochs = name.split("-")[1]
        form = name.replace(f"-{epochs}", "")  # packed-3-answers is packed-answers
        effects = fit.effects_table(results[results["experiment"] == name])
        bias = effects[effects["effect"] == "bias"].iloc[0]
        line = {"form": form, "epochs": int(epochs), "audited": len(audit),
                "subsamples": bias.subsamples, **bias[["base", "unseen", "seen"]] / 100,
                "bias": bias.estimate, "half": bias.half}
        detectors = contam.detectors_of(audit)
        for detector in contam.DETECTORS:
            line[detector] = detectors.loc[detector, "crossed"]
            line[f"{detector} ±"] = detectors.loc[detector, "±"]
        line["alone"] = flagged_alone(contam, audit)
        line["orders"] = flagged_orders(contam, audit)
        lines.append(line)
    return pd.DataFrame(lines).sort_values(["form", "epochs"])


def flagged_alone(contam, audit):
    """{test: how many audited models are flagged by their own p-values, adjusted}"""
    n, p = audit["n"].iloc[0], {}
    for detector in contam.DETECTORS:
        z = (audit[f"{detector} test"] - 0.5) / math.sqrt((2 * n + 1) / (12 * n**2))
        p[detector] = stats.norm.sf(z)
    for test, column in ORDER_TESTS.items():
        if f"{column} test" in audit:
            p[test] = audit[f"{column} test"].to_numpy()
    flags = stats.false_discovery_control(pd.DataFrame(p), axis=1) < contam.LEVEL
    return dict(zip(p, flags.sum(0)))


def flagged_orders(contam, audit):
    """{order test and model: how many orders it flags at the level of one test}"""
    counts = {}
    for test, column in ORDER_TESTS.items():
        for arm, model in (("test", "seen"), ("extra", "others seen"), ("base", "before")):
            if f"{column} {arm}" in audit:
                counts[f"{test}, {model}"] = (audit[f"{column} {arm}"] < contam.LEVEL).sum()
    return counts


def show(table):
    """Print the tables of docs/validation.md."""
    names = [name for name in table if f"{name} ±" in table]
    settings = table["form"].str.replace("-", ", ") + ", " + table["epochs"].astype(str)
    lines = []
    for setting, row in zip(settings, table.to_dict("records")):
        cells = [setting, f"{row['subsamples']:.0f} ({row['audited']})"]
        cells += [f"{row[name]:.3f}" for name in ("base", "unseen", "seen")]
        cells.append(f"{row['bias']:+.1f} ±{row['half']:.1f}")
        lines.append(cells + [f"{row[name]:.3f} ±{row[f'{name} ±']:.3f}" for name in names])
    head = ["setting", "subsamples (audited)", "base", "unseen", "seen", "bias"]
    print_table(head + names, lines)
    for column in ("alone", "orders"):
        lines = []
        for setting, count, counts in zip(settings, table["audited"], table[column]):
            lines.append([setting, count, *counts.values()])
        print_table(["setting", "models", *table[column].iloc[0]], lines)


def print_table(head, lines):
    """A table in Markdown."""
    print(f"\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for cells in lines:
        print(f"| {' | '.join(map(str, cells))} |")


def draw(table, path):
    """Visible against harmful, by log p and by ref."""
    plt.rcParams.update({"font.size": 13, "figure.labelsize": 13})
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(9.5, 5.5), layout="constrained")
    figure.suptitle(TITLE, weight="bold", size=15)
    for axis, detector in zip(axes, ("log p", "ref")):
        draw_plane(axis, table, detector)
    axes[0].set_title("by the model alone (log p)", size=13)
    axes[1].set_title("relative to the model before (ref)", size=13)
    axes[0].legend(handles=legend_handles(), loc="lower right", frameon=False, fontsize=11)
    axes[0].set_ylabel("HARMFUL?  bias = seen - unseen, points")
    axes[0].set_ylim(-4, 6)
    figure.supxlabel("VISIBLE?  how often the model finds a seen text likelier than an unseen one\n"
                     f"({UNDER})")
    figure.draw_without_rendering()  # the axes' places are known from here on
    figure.set_layout_engine("none")
    for axis, detector in zip(axes, ("log p", "ref")):
        label_marks(axis, table, detector)
    figure.savefig(path, dpi=130)


def legend_handles():
    """What colors and the band mean."""
    handles = []
    for answers, label in ((False, "texts without labels"), (True, "texts with labels")):
        handles.append(Line2D([], [], marker="s", ls="", color=COLORS[answers], ms=9, label=label))
    handles.append(Patch(color=BAND, label=f"too small to matter (±{MARGIN} point)"))
    return handles


def draw_plane(axis, rows, detector):
    """A mark a setting at (crossed AUC, bias) with intervals."""
    axis.axhspan(-MARGIN, MARGIN, color=BAND, lw=0)
    for row in rows.to_dict("records"):
        color = COLORS[row["form"].endswith("answers")]
        x, y, wide, high = row[detector], row["bias"], row[f"{detector} ±"], row["half"]
        axis.plot([x - wide, x + wide], [y, y], color=color, lw=1.5)
        axis.plot([x, x], [y - high, y + high], color=color, lw=1.5)
        axis.plot(x, y, "s", color=color, ms=10)
    axis.set_xlim(0.44, 1.06)
    axis.set_xticks([0.5, 0.75, 1], ["50%\nby chance", "75%", "100%\nalways"])


def label_marks(axis, rows, detector):
    """The epochs over or under each interval, at the first of PLACES where nothing else lies."""
    taken = [line.get_window_extent() for line in axis.lines]
    for row in rows.to_dict("records"):
        style = {"textcoords": "offset points", "weight": "bold", "va": "center"}
        label = axis.annotate(row["epochs"], (0, 0), (0, 0), **style)
        for side, up in PLACES:
            label.xy = (row[detector], row["bias"] + up * row["half"])
            label.xyann = (0, 14 * up)
            label.set_ha(side)
            if not label.get_window_extent().count_overlaps(taken):
                break
        taken.append(label.get_window_extent())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "dose", help="units, 20 MB each (dose)"
    )
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--figure", action="store_true", help="draw what is there")
    args = parser.parse_args(argv)
    if args.list:
        print(*[f"python {line}" for line in commands(args.folder)], sep="\n")
        return
    if not args.figure:
        run(args.folder)
    table = summary()
    show(table)
    draw(table, ROOT / "docs" / "figures" / "contamination.png")


if __name__ == "__main__":
    main()
