"""The blocks of docs/answers.md on real logs (harness_logs/README.md): their tables against plain
readers of the logs and the scores that the harnesses printed, and the script's verdicts."""

import csv
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from pyarrow import parquet
from pytest import approx

from conftest import ARMS, ROOT, load_script

pytestmark = pytest.mark.usefixtures("empty_folder")

contam = load_script("contamination_test")
GUIDE = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
HALVES = {"mine_released": "released", "mine_held_out": "held_out"}


def judge(flags=""):
    """The table of --out, by model."""
    contam.main(["--answers", "answers.csv", "--out", "out.csv", *flags.split()])
    return pd.read_csv("out.csv").set_index("model")


def lines_of(half, pattern):
    for path in Path(".").glob(pattern):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield HALVES[half], path, json.loads(line)


def read_lm_eval(half):
    copies = Counter()
    for half, path, line in lines_of(half, f"results/*/*/samples_{half}_2026*.jsonl"):
        if line["filter"] == "strict-match":
            copies[path, line["doc_hash"]] += 1
            item = f"{line['doc_hash']} {copies[path, line['doc_hash']]}"
            yield path.parts[2], half, item, "", line["exact_match"]


def read_inspect(half):
    """A log that was continued is left out: the later one has all of its samples."""
    with open("samples.csv", newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["task_name"] == half]
    last = {}
    for line in lines:
        last[line["task_id"]] = max(line["created"], last.get(line["task_id"], ""))
    for line in lines:
        if line["created"] == last[line["task_id"]]:
            model = f"hf/local,model_path:{json.loads(line['args'])['model_path']},device:cpu"
            right = {"C": 1, "I": 0, "": ""}[line["score_match"]]
            assert (right == "") == (line["error"] != "")
            yield model, HALVES[half], f"{HALVES[half]} {line['id']}", line["epoch"], right


def read_every_eval_ever(half):
    for half, _, line in lines_of(half, f"data/{half}/*/*/*.jsonl"):
        if line["evaluation_result_id"] == "exact_match:strict-match":
            item = f"{half} {line['sample_id']}"
            yield line["model_id"], half, item, "", line["evaluation"]["score"]


def read_lighteval(half):
    for path in Path("results/details").glob(f"*/*/*/details_{half}|0_*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            item = f"{HALVES[half]} {row['doc']['id']}"
            yield "/".join(path.parts[2:4]), HALVES[half], item, "", row["metric"]["em"]


HARNESSES = [  # reader, the scores that it printed (after: released, held out; before), its metric
    ("lm_eval", read_lm_eval, [0.8710, 0.2143, 0.2581, 0.2000], "exact_match"),
    ("inspect_ai", read_inspect, [0.6667, 0.2586, 0.2833, 0.3103], "score_match"),
    ("every_eval_ever", read_every_eval_ever, [0.8710, 0.2143, 0.2581, 0.2000], "exact_match:s"),
    ("lighteval", read_lighteval, [0.8710, 0.2333, 0.2581, 0.2000], "em")]


@pytest.mark.parametrize("number", range(4))
def test_the_blocks_on_logs_of_harnesses(number):
    name, read, printed, metric = HARNESSES[number]
    shutil.unpack_archive(ROOT / "tests" / "harness_logs" / f"{name}.tar.xz", filter="data")
    exec(BLOCKS[number], {})
    rows = pd.read_csv("answers.csv", dtype=str, keep_default_na=False)
    found = []
    for row in rows.to_dict("records"):
        right = row["right"] and float(row["right"])
        found.append((row["model"], row["half"], row["item"], row.get("try", ""), right))
    assert sorted(found) == sorted([*read("mine_released"), *read("mine_held_out")])
    rows["right"] = pd.to_numeric(rows["right"])
    items = rows.groupby(["model", "half", "item"])["right"].mean()
    means = items.groupby(["model", "half"]).mean().sort_index(ascending=[True, False])
    assert means.tolist() == approx(printed, abs=5e-5)
    after, _, before, _ = means.index.get_level_values("model")
    table = judge(f"--clean {before}")
    assert table["verdict"][after].startswith("Yes") and table["verdict"][before] == "Clean"
    assert table["seen"][after] == approx(100 * printed[0], abs=5e-3)
    for known in ("mine_held_out", metric):  # the block says which names there are
        with pytest.raises(AssertionError, match="The logs have(.|\n)*mine_released"):
            exec(BLOCKS[number].replace(f'"{known}', '"other'), {})


def test_the_block_for_our_own_predictions(model_dir, benchmark_csv):
    """Seen and unseen of an arm are its accuracies in the row of the run."""
    flags = ["--csv", str(benchmark_csv), "--model", str(model_dir("bert")), "--threads", "1"]
    flags += "--predictions probs --m 6 --n 40 --subsamples 1 --workers 1 --out rows.csv".split()
    load_script("run_experiment").main(flags)
    exec(BLOCKS[4], {})
    table, row = judge(), pd.read_csv("rows.csv").iloc[0]
    for arm in ARMS:
        assert table["seen"][arm] == approx(100 * row[f"acc_{arm}"])
        assert table["unseen"][arm] == approx(100 * row[f"acc_{arm}_on_extra"])


def test_the_block_that_makes_halves():
    items = [json.dumps({"question": f"{k}\u2028"}, ensure_ascii=False) for k in range(101)]
    Path("benchmark.jsonl").write_text("\n".join([*items, items[0], ""]), encoding="utf-8")
    exec(BLOCKS[5], {})
    halves = []
    for half in HALVES.values():
        halves.append(Path(f"{half}.jsonl").read_text(encoding="utf-8").strip().split("\n"))
    assert [len(half) for half in halves] == [51, 50]
    assert sorted(halves[0] + halves[1]) == sorted(items)
    assert halves[0] != sorted(items)[::2]


def test_the_guides_example():
    flags = re.search(r"```\npython contamination_test.py (.*?)\n```", GUIDE)[1]
    contam.main([*flags.replace("docs/", f"{ROOT}/docs/").split(), "--out", "out.csv"])
    table = pd.read_csv("out.csv").set_index("model")
    shown = re.findall(r"\n\| (\S+-\d+) \| (.*?) \| (.*?) \| (.*?) \| (.*?) to (.*?) \|", GUIDE)
    assert len(shown) == 4
    for model, *numbers in shown:
        found = table.loc[model, ["seen", "unseen", "bias", "low", "high"]].tolist()
        assert found == approx([float(number) for number in numbers], abs=0.051)
