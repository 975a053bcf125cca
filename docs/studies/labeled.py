"""Does it matter whether pretraining also reads the labeled texts? Is the bias of an innocent model
0? docs/findings.md. Run by hand; the last line takes seconds.

    python docs/studies/labeled.py placebo --subsamples 60   # trains: run_experiment.py, see below
    python docs/studies/labeled.py   # what docs/rows/labeled_read.csv and docs/rows/placebo.csv say

The rows of docs/rows/labeled_read.csv are of run_experiment.py, with and without
--pretrain-on-labeled, for the default tasks also with --pretrain-epochs 24 (experiments
*-epochs24). A placebo: the two models are pretrained on a third and a fourth set of n texts, then
tested as if these were `extra` and `test`, of which neither has read a text. The true bias is 0.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import ROOT, load_script  # noqa: E402

OTHER = {"extra": "third", "test": "fourth"}  # what a placebo's arm reads
READ, UNREAD = "few-shot-labeled-read", "few-shot"


def run_placebo(flags):
    script = load_script("run_experiment")
    sample_of, pretraining_texts = script.sample_of, script.pretraining_texts

    def draw_four(row, recipe, model, task):
        sample = sample_of(row, recipe, model, task)
        n = row["n"]
        twice = script.split_rows(task.labels, row["m"], 2 * n, row["subsample"])
        assert [task.texts[number] for number in twice["test"][:n]] == sample.texts["test"]
        for name, numbers in (("third", twice["extra"][:n]), ("fourth", twice["extra"][n:])):
            sample.texts[name] = [task.texts[number] for number in numbers]
            sample.labels[name] = task.labels[numbers]
        return sample

    def other_texts(net, sample, arm, *others):
        changed = SimpleNamespace(**sample._asdict())
        changed.texts = {**sample.texts, arm: sample.texts[OTHER[arm]]}
        changed.labels = {**sample.labels, arm: sample.labels[OTHER[arm]]}
        return pretraining_texts(net, changed, arm, *others)

    script.sample_of, script.pretraining_texts = draw_four, other_texts
    script.main([*flags, "--workers", "1", "--experiment", "placebo"])


def units_of(name):
    script = load_script("fit_model")
    rows = script.clean_rows(script.read_results(ROOT / "docs" / "rows" / f"{name}.csv"))
    return script.add_effects(rows)


def mean_and_half(values):
    """Of independent values: the mean, and the half-width of its 89% t interval."""
    values = np.asarray(values, float)
    half = stats.t.ppf(0.945, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return values.mean(), half


def words(values):
    return "{:+.2f} ± {:.2f}".format(*mean_and_half(values))


def paired(units, ending, effect, first, last):
    """Columns UNREAD and READ of an effect, a row for each task and draw from first to last."""
    wide = units[units.subsample.between(first, last)].set_index(
        ["task", "subsample", "experiment"])[effect].unstack()
    return wide[[UNREAD + ending, READ + ending]].set_axis(["unread", "read"], axis=1).dropna()


def tell_row(name, table, tasks):
    """A line of the table: each task, and the mean of those that all have the draw."""
    whole = table.groupby("subsample").filter(lambda rows: len(rows) == len(tasks))
    parts = {task: table.loc[task] for task in tasks}
    parts["mean"] = whole.groupby("subsample").mean()
    for task, part in parts.items():
        change = part["read"] - part["unread"]
        print(f"| {name} ({len(part)}) | {task} | {words(part['unread'])} | "
              f"{words(part['read'])} | {words(change)} |")


def tell():
    units, default = units_of("labeled_read"), ["bbc_news", "reuters"]
    print("| draws | task | as the paper | labeled texts read, too | difference |")
    print("| --- | --- | --- | --- | --- |")
    two = units[units.task.isin(default)]
    for first, last in ((1, 12), (13, 23), (24, 60)):
        tell_row(f"bias, {first} to {last}", paired(two, "", "bias", first, last), default)
    tell_row("boost, 24 to 60", paired(two, "", "boost", 24, 60), default)
    tell_row("bias, 24 epochs, 1 to 40", paired(two, "-epochs24", "bias", 1, 40), default)
    five = paired(units, "", "bias", 1, 8)
    tell_row("bias, 1 to 8", five, [*five.index.unique("task")])
    placebo = units_of("placebo")
    for last in (20, 60):
        some = placebo[placebo.subsample <= last]
        by_task = ", ".join(f"{task} {words(rows.bias)}" for task, rows in some.groupby("task"))
        means = some.groupby("subsample")["bias"].mean()
        print(f"placebo, draws 1 to {last}: {words(means)} ({by_task})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["placebo"]:
        run_placebo(sys.argv[2:])
    else:
        tell()
