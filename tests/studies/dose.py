"""The dose curve of docs/results.md: which detector sees which dose of test texts, and is accuracy higher on
them?

    python tests/studies/dose.py             # days of one core; goes on where it was
    python tests/studies/dose.py --list      # the commands that are left
    python tests/studies/dose.py --figure    # docs/contamination.png and its numbers, from docs/

Fixed before looking: settings, order, number of subsamples or margin, roles. smollm2, rotten_tomatoes, n =
50; the question is put to three packed epochs. The first ten subsamples of a setting are audited, so their
adapters are kept; the others, which settle the harm, cost training and scoring alone. Rows of accuracies go
into docs/dose_results.csv, audits into docs/contamination.csv, where those of the third version stay until
they are made anew: they lack the noise of their texts. The figure takes a setting's new rows where they are
as many, else those, and says so. The few-shot twin, bert-tiny on the two default tasks, has no adapters to
audit: python fit_model.py docs/dose_results.csv
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import pandas as pd  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from conftest import load_script  # noqa: E402

AUDITS, RESULTS = ROOT / "docs" / "contamination.csv", ROOT / "docs" / "dose_results.csv"
FORMS = {  # flags, title
    "packed": ("--pack", "packed, without answers"),
    "padded-answers": ("--answers", "padded, with answers"),
    "padded": ("", "padded, without answers"),
    "packed-answers": ("--pack --answers", "packed, with answers"),
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
    ("packed-answers", 30, "--subsamples 2", "description"),
]
TWIN = [(2, "--margin 1"), (20, "--margin 1"), (100, "--margin 2")]  # epochs of bert-tiny, until
AUDITED, FEWEST = 10, 6  # subsamples of a setting that are audited at most, and drawn at least
MARGIN = 1  # point of the question


def commands(folder):
    """(setting or None, lines of the shell) of every step, in order."""
    steps = []
    shared = f"--n 50 --workers 1 --threads 1 --out {RESULTS}"
    for form, epochs, until, _ in SETTINGS:
        train = (
            f"run_zero_shot.py --tasks rotten_tomatoes {FORMS[form][0]} --pretrain-epochs {epochs} "
            f"--experiment {form}-{epochs} {shared}"
        )
        first = until
        if "margin" in until:
            first = f"--subsamples {AUDITED}"
        lines = [f"{train} {first} --adapters {folder}/units"]
        lines += [f"contamination_test.py {folder}/units --out {folder}/contamination.csv"]
        if first != until:
            lines.append(f"{train} {until}")
        steps.append((f"{form}-{epochs}", lines))
    for epochs, until in TWIN:
        steps.append(
            (
                None,
                [
                    f"run_experiment.py --model bert-tiny --pretrain-epochs {epochs} "
                    f"--experiment few-shot-{epochs} {shared} {until}"
                ],
            )
        )
    return steps


def join(audit, table):
    """Bring the rows of an audit into the table, in place of those of the same subsamples."""
    contam = load_script("contamination_test")
    rows = contam.read_table(audit)
    if table.exists():
        rows = pd.concat([contam.read_table(table), rows])
        rows = rows.drop_duplicates([*contam.KEY, "arm"], keep="last")
    contam.write_whole(table, rows)


def setting_of(name):
    """(form, epochs) of an experiment."""
    form, _, epochs = name.rpartition("-")
    return form, int(epochs)


def accuracies(audits):
    """{experiment: rows with the columns of results.csv}: the new ones where they are as many as those beside
    audits, which may be older."""
    contam = load_script("contamination_test")
    found = {name: contam.unit_rows(rows) for name, rows in audits.groupby("experiment")}
    if RESULTS.exists():
        for name, rows in pd.read_csv(RESULTS).groupby("experiment"):
            if setting_of(name)[0] in FORMS and len(rows) >= len(found.get(name, [])):
                found[name] = rows
    return found


def summary():
    """(detectors of each audited setting {experiment: table}, a row a setting: units, accuracies, bias)."""
    contam = load_script("contamination_test")
    audits = contam.read_table(AUDITS)
    detectors, units = {}, {}
    for name, rows in audits.groupby("experiment"):
        detectors[name] = contam.detectors_of(rows)
        units[name] = len(rows) // 3
    lines = []
    for name, rows in accuracies(audits).items():
        form, epochs = setting_of(name)
        role = [one[3] for one in SETTINGS if one[:2] == (form, epochs)]
        lines.append(
            {
                "experiment": name,
                "form": form,
                "epochs": epochs,
                "role": role[0],
                "audited": units.get(name, 0),
                "subsamples": len(rows),
                **contam.harm_of(rows)._asdict(),
            }
        )
    return detectors, pd.DataFrame(lines).sort_values(["form", "epochs"])


def draw(path):
    """The figure, and its numbers printed."""
    contam = load_script("contamination_test")
    detectors, harm = summary()
    shown = harm.assign(noise=harm["counted"].map({True: "known", False: "a bound: third version's rows"}))
    print(shown.drop(columns=["form", "epochs", "counted"]).round(3).to_string(index=False))
    for name, table in detectors.items():
        print(f"\n{name}\n{table.to_string(float_format='{:.3g}'.format, na_rep='-')}")
    drawn = harm[(harm["subsamples"] >= FEWEST) | (harm["audited"] >= FEWEST)]
    forms = [form for form in FORMS if form in set(drawn["form"])]
    doses = sorted(drawn["epochs"].unique())
    figure = plt.figure(figsize=(2.2 + 3.3 * len(forms), 11), layout="constrained")
    figure.suptitle("smollm2 pretrained on texts of rotten_tomatoes, 50 a subsample", fontsize=10)
    rows = figure.subfigures(3, 1, height_ratios=[1.35, 1, 1])
    titles = (
        "How well can seen texts be told from unseen?",
        "Does the order test flag the model?",
        "Is accuracy higher on seen texts?",
    )
    axes = []
    for part, title in zip(rows, titles):
        part.suptitle(title, fontsize=12, fontweight="bold")
        axes.append(part.subplots(1, len(forms), sharex=True, sharey=True, squeeze=False)[0])
    for form, auc, order, change in zip(forms, *axes):
        mine = drawn[drawn["form"] == form]
        audited = mine[mine["audited"] >= FEWEST]
        draw_detectors(
            auc, {doses.index(row.epochs): detectors[row.experiment] for row in audited.itertuples()}
        )
        draw_order(
            order, {doses.index(row.epochs): detectors[row.experiment] for row in audited.itertuples()}
        )
        draw_bias(change, mine[mine["subsamples"] >= FEWEST], doses)
        auc.set_title(FORMS[form][1], fontsize=10)
        for axis in (auc, order, change):
            axis.set_xticks(range(len(doses)), map(str, doses))
            axis.set_xlim(-0.5, len(doses) - 0.5)
            axis.set_xlabel("epochs of pretraining on the texts", fontsize=8)
    axes[0][0].set_ylabel("crossed AUC")
    axes[1][0].set_ylabel("p (cut at 1e-10)")
    axes[2][0].set_ylabel("bias = seen - unseen, points")
    axes[1][0].set_yscale("log")
    words = {
        "ref": "ref: log p minus that under the model before pretraining",
        "twin": "twin: log p minus that under the model trained on the other texts\n(an upper bound, which no "
        "attacker has)",
    }
    for part, line, columns in zip(rows, axes, (2, 4, 2)):
        handles, labels = line[0].get_legend_handles_labels()
        part.legend(
            handles,
            [words.get(label, label) for label in labels],
            loc="outside lower center",
            ncols=columns,
            fontsize=8,
            frameon=False,
        )
    figure.savefig(path, dpi=130)
    print(f"\n{path}; {contam.LEVEL} is the level of a flag, bars are 89 % intervals")


def draw_detectors(axis, tables):
    """Crossed AUC of each detector with its interval, side by side. tables: by position."""
    axis.axhline(0.5, color="black", lw=0.8)
    axis.text(
        0.98, 0.49, "0.5: not at all", fontsize=9, ha="right", va="top", transform=axis.get_yaxis_transform()
    )
    names = ("log p", "log p / zlib", "Min-K%", "Min-K%++", "ref", "twin")
    colours = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#777777")
    for number, (name, colour, mark) in enumerate(zip(names, colours, "osD^vP")):
        x = [place + 0.11 * (number - 2.5) for place in tables]
        found = [table.loc[name] for table in tables.values()]
        axis.errorbar(
            x,
            [row["crossed AUC"] for row in found],
            [row["±"] for row in found],
            fmt=mark,
            ms=5,
            color=colour,
            capsize=2,
            label=name,
        )
    axis.set_ylim(0.44, 1.03)
    axis.grid(axis="y", alpha=0.3)


def draw_order(axis, tables):
    """p of the order test: of the model before pretraining, pretrained on other texts, and on these."""
    lines = (
        ("not pretrained", "order test", "p of base", "s", "#777777"),
        ("pretrained on other texts", "of extra", "p", "^", "#0072B2"),
        ("pretrained on these texts", "order test", "p", "o", "#D55E00"),
        ("the last relative to the first", "relative to base", "p", "x", "black"),
    )
    for number, (words, row, column, mark, colour) in enumerate(lines):
        x = [place + 0.12 * (number - 1.5) for place in tables]
        p = [max(table.loc[row, column], 1e-10) for table in tables.values()]
        axis.plot(x, p, mark, color=colour, ms=6, label=words)
    axis.axhline(0.05, color="black", lw=0.8)
    axis.set_ylim(3e-11, 3)
    for p, side, words in ((0.06, "bottom", "not flagged"), (0.04, "top", "flagged")):
        axis.text(0.98, p, words, ha="right", va=side, fontsize=9, transform=axis.get_yaxis_transform())
    axis.grid(axis="y", alpha=0.3)


def draw_bias(axis, rows, doses):
    """The bias of each dose with its interval, the margin shaded."""
    axis.axhspan(
        -MARGIN,
        MARGIN,
        color="grey",
        alpha=0.25,
        lw=0,
        label=f"margin: too small to matter (±{MARGIN} point)",
    )
    axis.axhline(0, color="black", lw=0.8)
    for known, face, words in (
        (True, "#D55E00", "bias with its 89 % interval"),
        (False, "white", "bias with its 89 % interval, rows of an older version: their noise is not known"),
    ):
        mine = rows[rows["counted"] == known]
        if mine.empty:
            continue
        x = [doses.index(epochs) for epochs in mine["epochs"]]
        axis.errorbar(
            x, mine["bias"], mine["half"], fmt="o", ms=6, color="#D55E00", mfc=face, capsize=4, label=words
        )
    for row in rows.itertuples():
        axis.text(
            doses.index(row.epochs),
            0.02,
            f"{row.subsamples} subsamples",
            fontsize=7,
            ha="center",
            transform=axis.get_xaxis_transform(),
        )
    axis.text(0.02, 0.97, "harm: accuracy is inflated", va="top", fontsize=9, transform=axis.transAxes)
    limit = 1.35 * (rows["bias"].abs() + rows["half"]).max()
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -limit), max(high, limit))
    axis.grid(axis="y", alpha=0.3)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "dose", help="units, 20 MB each (dose)")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--figure", action="store_true", help="draw what is there")
    args = parser.parse_args(argv)
    picture = AUDITS.with_suffix(".png")
    if args.figure:
        draw(picture)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, lines in commands(args.folder):
        for line in lines:  # each skips what is finished
            print(f"python {line}", flush=True)
            if args.list:
                continue
            script, *flags = shlex.split(line)
            try:
                subprocess.run([sys.executable, str(ROOT / script), *flags], check=True)
            except (KeyboardInterrupt, subprocess.CalledProcessError) as error:
                raise SystemExit(f"stopped ({error!r}): the same command goes on") from None
            if script == "contamination_test.py":
                join(args.folder / "contamination.csv", AUDITS)
                draw(picture)
    if not args.list:
        draw(picture)


if __name__ == "__main__":
    main()
