"""False alarms of contamination_test.py's order test, by hand; a minute for each subsample:

    python tests/studies/orders.py 11 41

smollm2, without any training, and the test texts of other subsamples of rotten_tomatoes as --pack
would lay them out; and what docs/contamination.csv says of the first ten.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import load_script  # noqa: E402

contam = load_script("contamination_test")


def false_orders(first, last):
    """Print how many orders of test texts the order test flags, though nobody trained on them."""
    table = pd.read_csv(Path(__file__).parents[2] / "docs" / "contamination.csv")
    p = table[table["experiment"] == "packed-3"][["p_exact base", "p_exact extra"]]
    flags = p < contam.LEVEL
    print(f"audited: before the training {flags['p_exact base'].sum()}, trained on the other set "
          f"{flags['p_exact extra'].sum()}, either {flags.any(axis=1).sum()} of {len(p)} orders; "
          f"correlation {p.corr().iloc[0, 1]:.2f}", flush=True)
    zero_shot = load_script("run_zero_shot")
    registry = zero_shot.load_registry()
    spec = registry["tasks"]["rotten_tomatoes"]
    task = zero_shot.load_task("rotten_tomatoes", spec)
    model = zero_shot.find_model("smollm2", registry)
    recipe = zero_shot.prompt_recipe(registry, zero_shot.parse_args(["--pack"]), model, task)
    net, found = contam.open_model("smollm2", "float32"), []
    for k in range(first, last + 1):
        rows = zero_shot.split_rows(task.labels, 100, 50, k)["test"]
        texts = [task.texts[row] for row in rows]
        strings = zero_shot.arm_strings(net[1], recipe, task.classes, texts, task.labels[rows])
        head = recipe["instruction"] + "\n\n"
        log = contam.order_log(net, head, contam.draw_orders(strings["examples"], recipe["pack"]))
        found.append(contam.order_p(log)[0])
        print(f"subsample {k}: p {found[-1]:.4f}", flush=True)
    print(f"{sum(p < contam.LEVEL for p in found)} of {len(found)} fresh orders are flagged")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("subsamples", type=int, nargs=2, help="the first and the last one")
    false_orders(*parser.parse_args().subsamples)
