"""The published bias where the models learned the task: docs/findings.md. Run by hand, from the
repository's folder; it takes seconds.

    python docs/studies/learned.py

A cell is one model, task, m and n. A model learned its task if its accuracy is at least 5 points
above a yardstick: chance, 100 / classes, which is what a model scores that learned nothing, since
the labeled texts have equally many of each class; or the share of the most common class, which is
what an earlier version took.
"""

import pandas as pd
from scipy import stats

CELL = ["model", "task", "m", "n"]
YARDSTICKS, ACCURACIES = ["chance", "majority"], ["acc_base", "acc_extra", "acc_test"]
FAR = 5  # points above the yardstick


def main():
    few = pd.concat([pd.read_csv(f"tests/published/few_shot_m{m}.csv") for m in (50, 100)])
    few["bias"] = 100 * (few["acc_test"] - few["acc_extra"])
    few["chance"] = 1 / few["num_classes"]
    sd = few.groupby(CELL)["bias"].std()
    print(f"{len(sd)} cells, sd: median {sd.median():.1f}, largest {sd.max():.1f}, "
          f"above 10: {sum(sd > 10)}")
    mean = 100 * few.groupby(CELL)[YARDSTICKS + ACCURACIES].mean()
    print(mean.mean().round(1).to_dict())
    for yardstick in YARDSTICKS:
        for accuracy in ("acc_extra", "acc_test"):
            chosen = mean[mean[accuracy] >= mean[yardstick] + FAR]
            bias, half = bias_of(few.set_index(CELL).loc[chosen.index].reset_index())
            print(f"{accuracy} above {yardstick}: {len(chosen)} cells, bias {bias:+.2f} ± {half:.2f}")
            print(chosen.mean().round(1).to_dict(), chosen.groupby("model").size().to_dict(),
                  chosen.groupby("task").ngroups)


def bias_of(rows):
    """Mean bias over the cells of the rows, and the half-width of its 89% interval."""
    cells = rows.groupby(CELL)["bias"]
    size = cells.transform("size")
    off = rows["bias"] - cells.transform("mean")
    rows["part"] = off * (size / (size - 1)) ** 0.5 / size / cells.ngroups
    # both models and all n share the texts of a subsample: add its parts, then square
    parts = rows.groupby(["task", "m", "subsample"])["part"].sum()
    v = (parts**2).groupby(["task", "m"]).sum()
    df = v.sum() ** 2 / (v**2 / (size.groupby([rows["task"], rows["m"]]).min() - 1)).sum()
    return cells.mean().mean(), stats.t.ppf(0.945, df) * v.sum() ** 0.5


if __name__ == "__main__":
    main()
