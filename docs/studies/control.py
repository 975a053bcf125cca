"""The positive control, run again: docs/findings.md. Run by hand; the last line takes seconds.

    python docs/studies/control.py --subsamples 12   # trains: run_experiment.py as it is
    python docs/studies/control.py --subsamples 20 --with-answers   # the control
    python docs/studies/control.py --subsamples 10 --shuffled   # the names of other texts
    python docs/studies/control.py   # what docs/rows/control.csv, those rows, says

With --shuffled each text of pretraining begins with the class name of a text of the same set that
is drawn at random: there are as many names, but they say nothing about their texts.
"""

import math
import sys
import zlib
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conftest import ROOT, load_script  # noqa: E402

SHUFFLED = "few-shot-shuffled-answers"


def train(flags):
    """run_experiment.py, in this process, so that the names can be shuffled."""
    script = load_script("run_experiment")
    pretraining_texts = script.pretraining_texts

    def shuffled(net, sample, arm, *others):
        rng = np.random.default_rng(zlib.crc32("\n".join(sample.texts[arm]).encode()))
        labels = {**sample.labels, arm: rng.permutation(sample.labels[arm])}
        mixed = sample._replace(labels=labels)
        return pretraining_texts(net, mixed, arm, *others)

    if "--shuffled" in flags:
        flags = [flag for flag in flags if flag != "--shuffled"]
        flags += ["--with-answers", "--experiment", SHUFFLED]
        script.pretraining_texts = shuffled
    script.main([*flags, "--workers", "1", "--out", "control.csv"])


def tell_effects(name, rows):
    """Bias of each experiment as fit_model.py judges it."""
    table = load_script("fit_model").effects_table(rows)
    for line in table[table.effect == "bias"].itertuples():
        interval = f"{line.estimate:+.2f} [{line.low:+.2f}, {line.high:+.2f}]"
        print(f"{name}, {line.experiment}: {interval} {line.verdict}; K = {line.subsamples}, "
              f"tasks alike: p = {line.p_alike:.2g}")


def tell_labels(rows, experiment):
    """What the names add to the bias on the same subsamples: by task, and the mean."""
    script = load_script("fit_model")
    bias = rows.set_index(["task", "subsample", "experiment"])["bias"].unstack()
    added = (bias[experiment] - bias["few-shot"]).dropna().groupby("task").agg(
        ["mean", "var", "size"])
    tasks = pd.DataFrame({"df": added["size"] - 1, "text_variance": 0.0,
                          "spread_variance": added["var"] / added["size"]})
    for task in tasks.index:
        half = script.interval(tasks.loc[[task]])[2]
        print(f"{experiment} adds, {task}: {added['mean'][task]:+.2f} ± {half:.2f}")
    print(f"mean: {added['mean'].mean():+.2f} ± {script.interval(tasks)[2]:.2f}",
          added["size"].to_dict())


def main():
    if sys.argv[1:]:
        train(sys.argv[1:])
        return
    rows = pd.read_csv(ROOT / "docs/rows/control.csv")
    tell_effects("all", rows)
    tell_effects("subsamples 1 to 10", rows[rows.subsample <= 10])
    tell_effects("subsamples 11 to 20", rows[rows.subsample > 10])
    rows = load_script("fit_model").add_effects(
        rows.assign(arms="crossed", item_variance_boost=math.nan))
    for experiment in sorted({*rows.experiment} - {"few-shot"}):
        tell_labels(rows[rows.subsample <= 10], experiment)


if __name__ == "__main__":
    main()
