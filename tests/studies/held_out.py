"""False alarms and hits of `contamination_test.py --held-out` on real texts and weights, by hand:

    python tests/studies/held_out.py                    # false alarms: half an hour of one core
    python tests/studies/held_out.py dose/units/*       # hits: units of run_zero_shot.py --adapters
    python tests/studies/held_out.py --orders 11 41     # of --pack; a minute each

Null: 400 texts of rotten_tomatoes are scored once by smollm2 and by an adapter that was trained on
other texts (--unit), else by smollm2 alone; random halves of them go through the check by the
reference and the detectors, and random orders of 20 texts in ten shards through the order test.
Planted: the texts that a unit's adapter was trained on, without the instruction, against those that
it was not, with smollm2 as the reference, by the command itself. Orders: the order test of smollm2,
without any training, on the test texts of other subsamples, and what docs/contamination.csv says
of the first ten.
"""

import argparse
import contextlib
import io
import itertools
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import load_script  # noqa: E402

contam = load_script("contamination_test")


def with_adapter(unit):
    """(model, tokenizer): smollm2 with the adapter `test` of a unit."""
    import peft

    lm, tokenizer = contam.open_model("smollm2", "float32")
    return peft.PeftModel.from_pretrained(lm, unit / "test").eval(), tokenizer


def false_alarms(draws, unit):
    """Print the shares of random halves that are refused, and flagged, by each detector."""
    zero_shot = load_script("run_zero_shot")
    spec = zero_shot.load_registry()["tasks"]["rotten_tomatoes"]
    task = zero_shot.load_task("rotten_tomatoes", spec)
    rng = np.random.default_rng(0)
    texts = [task.texts[number] for number in rng.choice(len(task.texts), 400, replace=False)]
    net = contam.open_model("smollm2", "float32")
    base = contam.detect(net, "", texts)
    pairs = list(itertools.permutations(range(20), 2))
    scores = contam.score_texts(net, "", [f"{texts[i]}\n\n{texts[j]}" for i, j in pairs])
    log_p = {(i, j): scores[f"{texts[i]}\n\n{texts[j]}"][0].sum() for i, j in pairs}
    values = base
    if unit:
        values = contam.detect(with_adapter(unit), "", texts, base)
    found, half = [], len(texts) // 2
    for _ in range(draws):
        order = rng.permutation(20).tolist()
        log = [[log_p[a, b], log_p[b, a]] for a, b in zip(order[::2], order[1::2])]
        rows = rng.permutation(len(texts))
        one, other = values.iloc[rows[:half]], values.iloc[rows[half:]]
        p = stats.mannwhitneyu(one, other, alternative="greater").pvalue
        mine = dict(zip(values, p < contam.LEVEL))
        mine["order test"] = contam.order_p(log)[0] < contam.LEVEL
        likely = base["log p"].to_numpy()[rows]
        check = stats.mannwhitneyu(likely[:half], likely[half:]).pvalue
        found.append(mine | {"refused": check < contam.NOT_RANDOM})
    table = pd.DataFrame(found).astype(float)
    print(f"% of {draws} random halves\n{table.agg(['mean', 'sem']).mul(100).round(2).T.to_string()}")
    kept = table[table["refused"] == 0]
    print(f"% of those that are not refused\n{kept.mean().mul(100).round(2).to_string()}")


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
        shards = contam.draw_orders(strings["examples"], recipe["pack"])
        log = contam.score_orders(net, recipe["instruction"] + "\n\n", shards)
        found.append(contam.order_p(log)[0])
        print(f"subsample {k}: p {found[-1]:.4f}", flush=True)
    print(f"{sum(p < contam.LEVEL for p in found)} of {len(found)} fresh orders are flagged")


def hits(path):
    """Run the command on the texts of a unit, against its adapter merged into its base model."""
    unit = json.loads((path / "unit.json").read_text())
    contam.open_model.cache_clear()
    net, tokenizer = with_adapter(path)
    merged = net.merge_and_unload()
    with tempfile.TemporaryDirectory() as folder:
        del merged.forward  # the autocast around it
        merged.hf_quantizer = None  # it was read from 4 bits, and is float32 now
        merged.config.quantization_config = None
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        contam.open_model.cache_clear()
        flags = ["--model", folder, "--reference", "smollm2"]
        for flag, name in (("--examples", "test"), ("--held-out", "extra")):
            lines = []
            for text in unit[name]["examples"]:
                text = text.removeprefix("### Text: ").partition("\n### Answer:")[0]
                lines.append(json.dumps({"text": text}))
            file = Path(folder) / f"{name}.jsonl"
            file.write_text("\n".join(lines))
            flags += [flag, str(file)]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            contam.main(flags)
    print(f"\n{path.name}\n{printed.getvalue()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("units", type=Path, nargs="*")
    parser.add_argument("--draws", type=int, default=10000)
    parser.add_argument("--unit", type=Path, help="whose adapter is the model in false alarms")
    parser.add_argument("--orders", type=int, nargs=2, help="first and last subsample")
    given = parser.parse_args()
    for unit_path in given.units:
        hits(unit_path)
    if given.orders:
        false_orders(*given.orders)
    elif not given.units:
        false_alarms(given.draws, given.unit)
