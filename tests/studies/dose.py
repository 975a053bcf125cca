"""The dose curve of docs/results.md: are texts that a model saw in pretraining told from others, at
which dose, and is accuracy higher on them?

    python tests/studies/dose.py             # days of one core; goes on where it was
    python tests/studies/dose.py --list      # the commands
    python tests/studies/dose.py --figure    # docs/contamination.png and its table, from docs/

Fixed before looking: settings, order, number of subsamples or margin, roles. smollm2,
rotten_tomatoes, n = 50; the question is put to three packed epochs. The first ten subsamples of a
setting are audited, so their adapters are kept; the others, which settle the bias, cost training
and scoring alone. Accuracies go into docs/dose_results.csv, audits into docs/contamination.csv. The
figure and the table show settings that both files have. The few-shot twin, bert-tiny on the two
default tasks, has no adapters to audit: python fit_model.py docs/dose_results.csv
"""

import argparse
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from conftest import load_script

AUDITS, RESULTS = ROOT / "docs" / "contamination.csv", ROOT / "docs" / "dose_results.csv"
FLAGS = {
    "packed": "--pack",
    "padded-answers": "--with-answers",
    "padded": "",
    "packed-answers": "--pack --with-answers",
}
SETTINGS = [  # form, epochs, until, role
    ("packed", 3, "--margin 1", "question"),
    ("padded-answers", 10, "--subsamples 10", "control"),
    ("padded", 10, "--subsamples 10", "completes the control"),
    ("packed-answers", 10, "--subsamples 10", "completes the control"),
    ("packed", 10, "--margin 2", "second question"),
    ("packed", 30, "--subsamples 10", "description"),
    ("packed", 1, "--subsamples 6", "description"),
    ("padded-answers", 3, "--subsamples 4", "description"),
    ("padded-answers", 1, "--subsamples 4", "description"),
]
# epochs of bert-tiny, until
TWIN = [(2, "--margin 1"), (20, "--margin 1"), (100, "--margin 2")]
AUDITED = 10  # most subsamples of a setting that are audited
MARGIN = 1  # point of the question
COLORS = {False: "#009E73", True: "#882255"}  # without, with answers; told apart by all eyes
BAND = "#dddddd"
MARKS = {"packed": "s", "padded": "o"}
TITLE = "Pretraining on test texts leaves traces; with labels the score rises, too"
UNDER = "one model (smollm2), one task (rotten_tomatoes), 50 texts; bars: 89% intervals"
# of a label at its interval: aligned how, at the upper or the lower end
PLACES = [("center", 1), ("center", -1), ("left", 1), ("right", 1), ("left", -1), ("right", -1)]


def commands(folder):
    """(setting or None, lines of the shell) of every step, in order."""
    steps = []
    shared = f"--n 50 --workers 1 --threads 1 --out {RESULTS}"
    for form, epochs, until, _ in SETTINGS:
        train = (
            f"run_zero_shot.py --tasks rotten_tomatoes {FLAGS[form]} --pretrain-epochs {epochs} "
            f"--experiment {form}-{epochs} {shared}"
        )
        first = until
        if "margin" in until:
            first = f"--subsamples {AUDITED}"
        lines = [f"{train} {first} --adapters {folder}/units"]
        lines.append(f"contamination_test.py {folder}/units --out {folder}/contamination.csv")
        if first != until:
            lines.append(f"{train} {until}")
        steps.append((f"{form}-{epochs}", lines))
    for epochs, until in TWIN:
        train = (
            f"run_experiment.py --model bert-tiny --pretrain-epochs {epochs} "
            f"--experiment few-shot-{epochs} {shared} {until}"
        )
        steps.append((None, [train]))
    return steps


def run(folder):
    """Every step; each skips what is finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for _, lines in commands(folder):
        for line in lines:
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
    rows = pd.concat([contam.read_table(table), contam.read_table(audit)])
    rows = rows[contam.read_table(table).columns]
    rows = rows.drop_duplicates([*contam.SETTING, "subsample"], keep="last")
    rows.to_csv(table, index=False)


def summary():
    """A row a setting: accuracies, bias, crossed AUC of each detector and its half-width."""
    contam = load_script("contamination_test")
    results = pd.read_csv(RESULTS)
    lines = []
    for name, audit in contam.read_table(AUDITS).groupby("experiment"):
        form, _, epochs = name.rpartition("-")
        rows = results[results["experiment"] == name].assign(arms="crossed")
        tasks = contam.task_means(contam.add_effects(rows))
        line = {"form": form, "epochs": int(epochs), "audited": len(audit), **tasks.iloc[0]}
        line["half"] = contam.interval(tasks)[2]
        detectors = contam.detectors_of(audit)
        for detector in contam.DETECTORS:
            line[detector] = detectors.loc[detector, "crossed"]
            line[f"{detector} ±"] = detectors.loc[detector, "±"]
        lines.append(line)
    return pd.DataFrame(lines).sort_values(["form", "epochs"])


def show(table):
    """Print the table of docs/results.md."""
    names = [name for name in table if f"{name} ±" in table]
    head = ["setting", "subsamples (audited)", "base", "unseen", "seen", "bias", *names]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for _, row in table.iterrows():
        cells = [f"{row['form'].replace('-', ', ')}, {row['epochs']}"]
        cells.append(f"{row['subsamples']:.0f} ({row['audited']})")
        cells += [f"{row[name]:.3f}" for name in ("base", "unseen", "seen")]
        cells.append(f"{row['bias']:+.1f} ±{row['half']:.1f}")
        cells += [f"{row[name]:.3f} ±{row[f'{name} ±']:.3f}" for name in names]
        print(f"| {' | '.join(cells)} |")


def draw(table, path):
    """Visible against harmful, without and with answers, by log p and, small, by ref."""
    plt.rcParams.update({"font.size": 13, "figure.labelsize": 13})
    figure = plt.figure(figsize=(9.5, 9.5), layout="constrained")
    figure.suptitle(TITLE, weight="bold", size=15)
    large, small = figure.subfigures(2, 1, height_ratios=(1.8, 1))
    planes = []
    for part, detector in ((large, "log p"), (small, "ref")):
        axes = part.subplots(1, 2, sharex=True, sharey=True)
        for axis, answers in zip(axes, COLORS):
            rows = table[table["form"].str.endswith("answers") == answers]
            draw_plane(axis, rows, detector)
            planes.append((axis, rows, detector))
    large.suptitle(UNDER, size=12)
    left, right = large.axes
    left.set_title("texts without labels", weight="bold", color=COLORS[False])
    right.set_title("texts with labels", weight="bold", color=COLORS[True])
    left.legend(handles=legend_handles(), loc="upper left", frameon=False)
    large.supylabel("HARMFUL?  bias = seen - unseen, points")
    large.supxlabel("VISIBLE?  how often the model finds a seen text likelier than an unseen one")
    small.supylabel("bias, points")
    small.supxlabel("the same, relative to the model before pretraining (ref)")
    figure.draw_without_rendering()  # the axes' places are known from here on
    figure.set_layout_engine("none")
    for plane in planes:
        label_marks(*plane)
    figure.savefig(path, dpi=130)


def legend_handles():
    """What shapes and the band mean."""
    words = [
        (MARKS["packed"], "full", "packed: eight texts a sequence"),
        (MARKS["padded"], "full", "padded: one text a sequence"),
        ("", "none", "numbers: epochs of pretraining"),
    ]
    handles = []
    for mark, filling, label in words:
        style = {"marker": mark, "fillstyle": filling, "label": label}
        handles.append(Line2D([], [], ls="", color="black", ms=9, mew=2, **style))
    handles.append(Patch(color=BAND, label=f"gray: too small to matter (±{MARGIN} point)"))
    return handles


def draw_plane(axis, rows, detector):
    """A mark a setting at (crossed AUC, bias) with intervals."""
    axis.axhspan(-MARGIN, MARGIN, color=BAND, lw=0)
    for row in rows.to_dict("records"):
        shape, _, answers = row["form"].partition("-")
        color = COLORS[bool(answers)]
        x, y, wide, high = row[detector], row["bias"], row[f"{detector} ±"], row["half"]
        axis.plot([x - wide, x + wide], [y, y], color=color, lw=1.5)
        axis.plot([x, x], [y - high, y + high], color=color, lw=1.5)
        axis.plot(x, y, MARKS[shape], color=color, ms=10, mew=2)
    axis.margins(y=0.2)
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
        for _, lines in commands(args.folder):
            print(*[f"python {line}" for line in lines], sep="\n")
        return
    if not args.figure:
        run(args.folder)
    table = summary()
    show(table)
    draw(table, AUDITS.with_suffix(".png"))


if __name__ == "__main__":
    main()
