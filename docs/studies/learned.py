"""The published bias where the models learned the task: docs/findings.md. Run by hand; it takes
seconds.

    python docs/studies/learned.py

They did where they score at least 5 points above chance, 100 / classes. That is what blind guesses
score, and the labeled texts do not tell which class is the most common: they have equally many of
each. Beside it, the stricter yardstick of earlier versions, the share of the most common class.
"""

import itertools

import pandas as pd
from scipy import stats

CELL = ["model", "task", "m", "n"]


def main():
    few = pd.concat([pd.read_csv(f"tests/published/few_shot_m{m}.csv") for m in (50, 100)])
    few["bias"] = 100 * (few["acc_test"] - few["acc_extra"])
    sd = few.groupby(CELL)["bias"].std()
    print(f"{len(sd)} cells, sd: median {sd.median():.1f}, largest {sd.max():.1f}, "
          f"above 10: {sum(sd > 10)}")
    few["chance"] = 1 / few["num_classes"]
    columns = ["chance", "majority", "acc_base", "acc_extra", "acc_test"]
    mean = 100 * few.groupby(CELL)[columns].mean()
    print(mean.mean().round(1).to_dict())
    for accuracy, guess in itertools.product(("acc_extra", "acc_test"), ("chance", "majority")):
        chosen = mean[mean[accuracy] >= mean[guess] + 5]
        mine = few.set_index(CELL).loc[chosen.index].reset_index()
        size = mine.groupby(CELL)["bias"].transform("size")
        off = mine["bias"] - mine.groupby(CELL)["bias"].transform("mean")
        mine["part"] = off * (size / (size - 1)) ** 0.5 / size / len(chosen)
        bias = mine.groupby(CELL)["bias"].mean().mean()
        # both models and all n share the texts of a subsample: add its parts, then square
        parts = mine.groupby(["task", "m", "subsample"])["part"].sum()
        v = (parts**2).groupby(["task", "m"]).sum()
        df = v.sum() ** 2 / (v**2 / (size.groupby([mine["task"], mine["m"]]).min() - 1)).sum()
        half = stats.t.ppf(0.945, df) * v.sum() ** 0.5
        print(f"{accuracy} above {guess}: {len(chosen)} cells, "
              f"bias {bias:+.2f} [{bias - half:+.2f}, {bias + half:+.2f}]")
        print(chosen.mean().round(1).to_dict(), chosen.groupby("model").size().to_dict(),
              chosen.groupby("task").ngroups)


if __name__ == "__main__":
    main()
