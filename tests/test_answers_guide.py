"""The blocks of docs/answers.md on real logs, against plain readers and the harnesses' scores."""

import csv
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from pyarrow import parquet
from pytest import approx

from conftest import ROOT, load_script

pytestmark = pytest.mark.usefixtures("empty_folder")

contam = load_script("contamination_test")
GUIDE = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
HALVES = {"mine_released": "released", "mine_held_out": "held_out"}


def judge(flags="", main=contam.main):
    main(["--answers", "answers.csv", "--out", "out.csv", *flags.split()])
    return pd.read_csv("out.csv").set_index("model")


def unpack(name):
    shutil.unpack_archive(ROOT / "tests" / "harness_logs" / f"{name}.tar.xz", filter="data")


def lines_of(half, pattern):
    for path in Path(".").glob(pattern):
        for line in path.read_text().splitlines():
            yield HALVES[half], path, json.loads(line)


def read_lm_eval(half):
    copies = Counter()
    for half, path, line in lines_of(half, f"results/*/*/samples_{half}_2026*.jsonl"):
        if line["filter"] == "strict-match":
            key = path.parts[2], half, line["doc_hash"]
            copies[key] += 1
            yield *key[:2], f"{key[2]} {copies[key]}", "", line["exact_match"]


def read_inspect_ai(half):
    latest = {}  # one log continues another
    for line in csv.DictReader(Path("samples.csv").read_text().splitlines()):
        key = line["task_id"], line["id"], line["epoch"]
        latest[key] = max(line, latest.get(key, line), key=lambda line: line["created"])
    for line in latest.values():
        if line["task_name"] == half:
            model = f"hf/local,model_path:{json.loads(line['args'])['model_path']},device:cpu"
            right = {"C": 1, "I": 0, "": ""}[line["score_match"]]
            yield model, HALVES[half], f"{HALVES[half]} {line['id']}", line["epoch"], right


def read_every_eval_ever(half):
    copies = Counter()
    for half, _, line in lines_of(half, f"data/{half}/*/*/*.jsonl"):
        if line["evaluation_result_id"] == "exact_match:strict-match":
            key = line["model_id"], half, line["sample_hash"]
            copies[key] += 1
            yield *key[:2], f"{key[2]} {copies[key]}", "", line["evaluation"]["score"]


def read_lighteval(half):
    for path in Path("results/details").glob(f"*/*/*/details_{half}|0_*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            item = f"{HALVES[half]} {row['doc']['id']}"
            yield "/".join(path.parts[2:4]), HALVES[half], item, "", row["metric"]["em"]


HARNESSES = [  # reader, scores printed (after: both halves, before), a name in the block
    (read_lm_eval, [0.8710, 0.2143, 0.2581, 0.2000], "strict-match"),
    (read_inspect_ai, [0.6667, 0.2586, 0.2833, 0.3103], "score_match"),
    (read_every_eval_ever, [0.8710, 0.2143, 0.2581, 0.2000], "exact_match"),
    (read_lighteval, [0.8710, 0.2333, 0.2581, 0.2000], "em")]


@pytest.mark.parametrize("number", range(4))
def test_the_blocks_on_real_logs(number, capsys):
    read, printed, known = HARNESSES[number]
    unpack(read.__name__.removeprefix("read_"))
    if number == 3:
        pd.DataFrame({"example": []}).to_parquet("results/details_old.parquet")
        Path("results/details_empty.parquet").touch()
    for folder in ("data", "results"):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "samples_old.jsonl").write_text("")
        Path(folder, "samples_older.jsonl").write_text('{"doc_id": 1}')
    exec(BLOCKS[number], {})
    assert capsys.readouterr().out.count("skipped, since") == [2, 0, 2, 2][number]
    rows = pd.read_csv("answers.csv", dtype=str, keep_default_na=False)
    right = [value and float(value) for value in rows["right"]]
    found = zip(rows["model"], rows["half"], rows["item"], rows.get("try", [""] * 200), right)
    assert sorted(found) == sorted([*read("mine_released"), *read("mine_held_out")])
    rows["right"] = pd.to_numeric(rows["right"])
    items = rows.groupby(["model", "half", "item"])["right"].mean()
    means = items.groupby(["model", "half"]).mean().sort_index(ascending=[True, False])
    assert means.tolist() == approx(printed, abs=5e-5)
    after, _, before, _ = means.index.get_level_values("model")
    verdict = judge(f"--clean {before}")["verdict"]
    assert verdict[after].startswith("Yes") and verdict[before] == "Named clean"
    for name in ("mine_held_out", known):
        with pytest.raises(AssertionError, match=f"The logs have(.|\n)*{name}"):
            exec(BLOCKS[number].replace(f'"{name}', '"other'), {})


def test_a_partial_answer_of_inspect_ai():
    unpack("inspect_ai")
    text = Path("samples.csv").read_text()
    Path("samples.csv").write_text(text.replace("C,C,", "C,P,"))
    exec(BLOCKS[1], {})
    assert {*pd.read_csv("answers.csv")["right"].dropna()} == {0, 0.5}


def test_errors_are_empty():
    unpack("every_eval_ever")
    block = BLOCKS[2].replace("exact_match:strict-match", "match:accuracy")
    exec(block.replace("/strict-match", ""), {})
    right = pd.read_csv("answers.csv")["right"]
    assert len(right) == 122 and right.isna().sum() == 4


def test_odd_logs_of_lm_eval(capsys):
    """A number above 2 ** 64 in a document, empty responses, logs without a folder."""
    unpack("lm_eval")
    for path in Path("results").rglob("samples_mine_released*"):
        text = path.read_text().replace('{"question"', '{"seed": 99999999999999999999, "question"')
        path.write_text(text.replace('[[" #### 3"]]', '[[""]]'))
    exec(BLOCKS[0], {})
    assert re.findall(r"released .* ([1-9]\d*)\n", capsys.readouterr().out)
    shutil.copy(path, f"results/{path.name}")
    with pytest.raises(AssertionError, match="into a folder with the model's name"):
        exec(BLOCKS[0], {})


def test_the_block_that_makes_halves():
    items = [f'{{"question": "{k}\u2028"}}' for k in range(101)]
    Path("benchmark.jsonl").write_text("\n".join([*items, items[0], ""]), encoding="utf-8")
    exec(BLOCKS[4], {})
    released, held_out = [Path(f"{half}.jsonl").read_text(encoding="utf-8").strip().split("\n")
                          for half in HALVES.values()]
    assert len(released) == 51
    assert sorted(released + held_out) == sorted(items) and released != sorted(items)[::2]


def test_the_block_of_trap_items(capsys):
    """p is (10 * 4 + 5 * 2 + 1) / 3^5."""
    Path("traps.csv").write_text("right,published,answer\nA,B,A\nA,B,C\nA,C,B" + "\nA,B,B" * 3)
    exec(BLOCKS[6], {})
    assert capsys.readouterr().out == "3 of 5 wrong answers are the published ones: p = 0.21\n"


def test_the_guides_example(monkeypatch, capsys):
    """By a pasted cell, without torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    cell = {"__name__": "notebook"}
    exec((ROOT / "contamination_test.py").read_text(encoding="utf-8"), cell)
    shutil.copy(ROOT / "docs" / "answers_example.csv", "answers.csv")
    table = judge("--clean clean-5 clean-10", cell["main"])
    assert "whether by more than 5 points: about 631 items in each" in capsys.readouterr().out
    table = table[["seen", "unseen", "bias", "low", "high"]]
    shown = re.findall(r"\| (\S+-\d+) \| (.*?) \| (.*?) \| (.*?) \| (.*?) to (.*?) \|", GUIDE)
    numbers = pd.DataFrame(shown).set_index(0).astype(float).loc[table.index]
    assert numbers.to_numpy() == approx(table.to_numpy(), abs=0.051)
