"""False alarms and hits of `contamination_test.py --held-out` on real texts and weights, by hand:

    python tests/studies/held_out.py                    # false alarms: half an hour of one core
    python tests/studies/held_out.py dose/units/*       # hits: units of run_zero_shot.py --adapters

Null: 400 texts of rotten_tomatoes are scored once by smollm2; random halves of them, as often as
asked, go through the checks of the texts alone and the detectors; the order test has random orders
of 20 texts in ten shards. Planted: the texts that a unit's adapter was trained on, without the
instruction, against those that it was not, with smollm2 as the reference, by the command itself.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import load_script  # noqa: E402

contam = load_script("contamination_test")


def smollm2():
    """The path of its file, as run_zero_shot.py unpacks it."""
    zero_shot = load_script("run_zero_shot")
    model = zero_shot.find_model("smollm2", zero_shot.load_registry())
    return str(model.folder / model.gguf)


def false_alarms(draws):
    """Print the shares of random halves that are refused, and flagged, by each detector."""
    zero_shot = load_script("run_zero_shot")
    task = zero_shot.load_task("rotten_tomatoes", zero_shot.load_registry()["tasks"]["rotten_tomatoes"])
    rng = np.random.default_rng(0)
    texts = [task.texts[number] for number in rng.choice(len(task.texts), 400, replace=False)]
    args = contam.parse_args([])
    net = contam.open_scorer(*contam.model_files(smollm2()), "none", "float32", None)
    values = contam.detect_all(net, "", texts, args, "texts")
    pairs = list(itertools.permutations(range(20), 2))
    sequences = [contam.tokenise(net, "", f"{texts[i]}\n\n{texts[j]}") for i, j in pairs]
    scores = contam.score_tokens(net, sequences, 1024, "pairs")
    log_p = {pair: float(rows[0].sum()) for pair, rows in zip(pairs, scores)}

    flagged, refused = [], []
    for _ in range(draws):
        order = rng.permutation(20).tolist()
        shards = list(zip(order[::2], order[1::2]))
        p_exact = contam.order_p(
            {
                "canonical_logprobs": [log_p[a, b] for a, b in shards],
                "shuffled_logprobs": [[log_p[b, a]] for a, b in shards],
            }
        ).p_exact
        rows = rng.permutation(len(texts))
        half = len(texts) // 2
        table = contam.compare_scores(values.iloc[rows[:half]], values.iloc[rows[half:]], p_exact)
        flagged.append(
            {**(table["p"] < contam.LEVEL), "any, adjusted": table["adjusted"].min() < contam.LEVEL}
        )
    for _ in range(draws // 5):
        shuffled = rng.permutation(np.array(texts, dtype=object)).tolist()
        p = contam.tell_apart(shuffled[:half], shuffled[half:])
        refused.append({**(p < contam.LEVEL), "any, adjusted": contam.adjusted(p).min() < contam.LEVEL})
    for name, found in (("flagged", flagged), ("texts alone", refused)):
        table = pd.DataFrame(found).agg(["mean", "sem"]).mul(100)
        print(f"\n{name}, % of {len(found)} random halves\n{table.round(2).T.to_string()}")


def hits(path):
    """Run the command on the texts of a unit, against its adapter merged into its base model."""
    import peft

    unit = json.loads((path / "unit.json").read_text())
    model = unit["model"]
    net = contam.open_scorer(model["source"], model["gguf"], "none", "float32", None)
    merged = peft.PeftModel.from_pretrained(net.lm, path / "test").merge_and_unload()
    with tempfile.TemporaryDirectory() as folder:
        del merged.forward  # the autocast around it
        merged.hf_quantizer = None  # it was read from 4 bits, and is float32 now
        merged.config.quantization_config = None
        merged.save_pretrained(folder)
        net.tokenizer.save_pretrained(folder)
        flags = ["--model", folder, "--reference", smollm2()]
        for flag, name in (("--examples", "test"), ("--held-out", "extra")):
            file = Path(folder) / f"{name}.jsonl"
            texts = [
                text.removeprefix("### Text: ").partition("\n### Answer:")[0]
                for text in unit[name]["examples"]
            ]
            file.write_text("\n".join(map(json.dumps, texts)))
            flags += [flag, str(file)]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            contam.main(flags)
    print(f"\n{path.name}\n{printed.getvalue()}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("units", type=Path, nargs="*")
    parser.add_argument("--draws", type=int, default=10000)
    given = parser.parse_args()
    for unit_path in given.units:
        hits(unit_path)
    if not given.units:
        false_alarms(given.draws)
