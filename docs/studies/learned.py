"""The published bias where the models learned the task: docs/results.md. Run by hand; it takes
seconds.

    python docs/studies/learned.py
"""

import pandas as pd
from scipy import stats

CELL = ["model", "task", "m", "n"]


def main():
    few = pd.concat([pd.read_csv(f"tests/published/few_shot_m{m}.csv") for m in (50, 100)])
    few["bias"] = 100 * (few["acc_test"] - few["acc_extra"])
    sd = few.groupby(CELL)["bias"].std()
    print(f"{len(sd)} cells, sd: median {sd.median():.1f}, largest {sd.max():.1f}, "
          f"above 10: {sum(sd > 10)}")
    mean = 100 * few.groupby(CELL)[["majority", "acc_base", "acc_extra", "acc_test"]].mean()
    print(mean.mean().round(1).to_dict())
    for accuracy in ("acc_extra", "acc_test"):
        chosen = mean[mean[accuracy] >= mean["majority"] + 5]
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
        print(f"{accuracy}: {len(chosen)} cells, bias {bias:+.2f} ± {half:.2f}")
        print(chosen.mean().round(1).to_dict(), chosen.groupby("model").size().to_dict(),
              chosen.groupby("task").ngroups)


if __name__ == "__main__":
    main()
