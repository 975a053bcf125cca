"""docs/answers.md: logs against plain readers and the harnesses' scores; its blocks."""

import csv
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from pyarrow import parquet
from pytest import approx

from conftest import ROOT, load_script

pytestmark = pytest.mark.usefixtures("empty_folder")

contam = load_script("contamination_test")
GUIDE = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
INSPECT_TASK, *BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
NAMES = re.compile(r"(before|after).*mine.*?(released|held_out)")
LOGS = "--answers logs --metric acc".split()
FAILED = "2026-11-25T07-36-06"  # inspect_ai's first run of a half, which a retry continued


def judge(answers="mine.csv", flags="", main=contam.main):
    main(["--answers", answers, "--out", "out.csv", *flags.split()])
    return pd.read_csv("out.csv").set_index("model")


def unpack(name):
    shutil.unpack_archive(ROOT / "tests" / "harness_logs" / f"{name}.tar.xz", filter="data")


def read_lm_eval():
    for path in Path("results").rglob("samples_*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["filter"] == "strict-match":
                name = f"{line['doc_hash']} {line['doc_id']}"
                yield str(path), name, "", line["exact_match"]


def read_inspect_ai():
    for line in csv.DictReader(Path("samples.csv").read_text().splitlines()):
        if FAILED not in line["log"]:
            yield (line["args"] + line["task_name"], line["id"], line["epoch"],
                   {"C": 1, "I": 0}.get(line["score_match"], ""))


def read_lighteval():
    for path in Path("results").rglob("details_*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            yield str(path), row["doc"]["id"], "", row["metric"]["em"]


def fake_inspect(monkeypatch):
    """In place of inspect_ai, which would read its logs: their table in samples.csv."""
    def read_eval_log(path):
        rows = table[table.log == path]
        first, samples = rows.iloc[0], []
        for row in rows.itertuples():
            messages = [SimpleNamespace(role="user", text=row.input),
                        SimpleNamespace(role="assistant", text="7")]
            scores = {name: SimpleNamespace(value=getattr(row, f"score_{name}"))
                      for name in ("match", "includes") if not isinstance(row.error, str)}
            samples.append(SimpleNamespace(
                id=row.id, epoch=row.epoch, messages=messages, scores=scores,
                error=row.error if isinstance(row.error, str) else None,
                invalidation="leaked" if row.id == "1" else None))
        task, _, half = first.task_name.partition("_")
        spec = SimpleNamespace(model=first.model, model_args=json.loads(first.args), task=task,
                               task_args={"data": f"data/{half}", "shots": None})
        return SimpleNamespace(eval=spec, samples=samples)

    table = pd.read_csv("samples.csv", dtype=str)
    for path in map(Path, table.log.unique()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    log = SimpleNamespace(read_eval_log=read_eval_log)
    monkeypatch.setitem(sys.modules, "inspect_ai", SimpleNamespace(log=log))
    monkeypatch.setitem(sys.modules, "inspect_ai.log", log)


def fill_runs(**columns):
    """A person fills in columns of runs.csv, by functions of the run."""
    runs = pd.read_csv("runs.csv", dtype=str, keep_default_na=False)
    runs = runs.assign(**{name: runs.run.map(function) for name, function in columns.items()})
    runs.to_csv("runs.csv", index=False)


@pytest.mark.parametrize("read, folder, metric, printed", [  # before and after, held out first
    (read_lm_eval, "results", "exact_match,strict-match", [0.2143, 0.8710, 0.2000, 0.2581]),
    (read_inspect_ai, "logs", "match", [0.2586, 0.6667, 0.3103, 0.2833]),
    (read_lighteval, "results", "em", [0.2333, 0.8710, 0.2000, 0.2581])])
def test_logs_of_a_harness(read, folder, metric, printed, monkeypatch, said):
    """The mean score is what the harness printed."""
    unpack(read.__name__.removeprefix("read_"))
    if read == read_inspect_ai:
        fake_inspect(monkeypatch)
    found = said(contam.main, "--answers", folder).end
    assert f"no logs with the metric right, but ['" in found and metric in found
    flags = f"--metric {metric} --clean before"
    said(contam.main, "--answers", folder, *flags.split())
    if read == read_inspect_ai:
        fill_runs(half=lambda run: "" if FAILED in run else NAMES.search(run)[2],
                  model=lambda run: NAMES.search(run)[1])
    rows = contam.name_runs(contam.read_logs(Path(folder), metric)).astype(object).fillna("")
    rows["score"] = rows[metric].replace({"C": 1, "I": 0})
    tries = rows.get("try", [""] * 200)
    found = zip(rows.model, rows.half, rows["item"], tries, rows.score)
    wanted = []
    for name, item, k, value in read():
        if NAMES.search(name):
            model, half = NAMES.search(name).groups()
            wanted.append((model, half, item, k, value))
    assert sorted(found, key=str) == sorted(wanted, key=str) and len(wanted) > 100
    if read == read_inspect_ai:  # of each log two errors, and two tries of an invalid sample
        assert rows.error.ne("").sum() == 4 * (2 + 2)
    means = pd.to_numeric(rows.score).groupby([rows.model, rows.half]).mean()
    assert means.tolist() == approx(printed, abs=5e-5)
    table = judge(folder, flags)
    # tries are averaged, and errors left out
    assert table.acc_test.to_dict() == approx(means.xs("released", level=1).to_dict(), abs=0.02)
    assert table.bias.max() > 30 and "named clean" in table.reason.tolist()


def log_of(model, task, right, items=None, **more):
    """A log of lm-eval, in which every question has a grade."""
    path = Path(f"logs/{model}/samples_{task}_2026-11-25.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for k, grade in enumerate(right):
        name = zlib.crc32(f"{task} {k}".encode())  # as in hexadecimal digits of a hash
        doc = {"question": f"How many has {name}?", "item": f"x{name}"}
        if items is not None:
            doc["item"] = items[k]
        lines.append(json.dumps({
            "doc_id": k, "doc": doc, "filter": "none", "metrics": ["acc"], "doc_hash": f"{task}{k}",
            "acc": int(grade), "arguments": {"gen_args_0": {"arg_0": f"Q: {doc['question']}"}},
            **more}))
    path.write_text("\n".join(lines) + "\n")
    return path


def two_halves(**more):
    rng = np.random.default_rng(1)
    for half in ("held_out", "released"):
        path = log_of("mine", f"mine_{half}", rng.random(60) < 0.6, **more)
    return path


@pytest.mark.parametrize("more, words", [
    ({"acc": [1, 0]}, "line 1: acc is '[1, 0]': use a number, or name another"),
    ({"doc_hash": "a", "filter": "x"}, "but ['acc,x']: name one by --metric"),
    ({"acc": None}, "no model has 20 answers"), ({}, "next: ")])
def test_metrics_of_a_log(more, words, said):
    two_halves(**more)
    found = said(contam.main, *LOGS)
    assert words in (found.end or found.out)


def test_a_line_that_is_torn_or_doubled_is_named(said):
    path = two_halves()
    text = path.read_text()
    path.write_text(text[:-30])
    assert f"{path}: " in said(contam.main, *LOGS).end
    path.write_text(text + text.splitlines()[0])
    found = said(contam.main, *LOGS).end
    assert f"{path.relative_to('logs')} line 61: mine has another answer to item 'x" in found


def test_what_a_person_filled_in_is_kept(said):
    """Also of a log that is gone, and columns of their own. New logs are added, and logs without a
    half are left out. unreleased is no half."""
    two_halves()
    for _ in "12":
        assert "next: " in said(contam.main, *LOGS).out
    assert "next: " in said(contam.main, *LOGS, "--answers", Path("logs").resolve()).out  # the same
    fill_runs(model=lambda run: "A", seed=lambda run: "7")
    log_of("mine", "mine_unreleased", [1, 0])
    Path("logs/mine/samples_mine_released_2026-11-25.jsonl").rename("gone")
    found = said(contam.main, *LOGS)
    assert "names 2 of 3 logs" in found.out and "half is held_out: use released" in found.end
    runs = pd.read_csv("runs.csv").set_index("run")
    assert runs.model.tolist() == ["A", "A", "mine"] and runs.seed.tolist()[:2] == [7, 7]
    fill_runs(half=lambda run: "")
    assert "fill in the column half of runs.csv" in said(contam.main, *LOGS).end
    table = "run,score,lr\na,.7,1\n"
    Path("runs.csv").write_text(table)
    assert "runs.csv is there and has no column tr" in said(contam.main, *LOGS).end
    assert Path("runs.csv").read_text() == table


def test_logs_of_two_draws_of_one_task(said):
    """By halves.csv; the original answered once. Names of folders tell which model is which.
    Against a table by plain loops."""
    rng, rows = np.random.default_rng(3), []
    names = [f"x{zlib.crc32(f'mine {k}'.encode())}" for k in range(80)]
    half_of = {draw: rng.permutation([*"AB"] * 40) for draw in "12"}
    for name in ("mine_1_A", "mine_1_B", "mine_2_A", "org__mine_2_B", "mine_original"):
        right = rng.random(80) < 0.6
        log_of(name, "mine", right)
        _, draw, trained_on = name.split("_")[-3:] if name[-1] in "AB" else ["", "12", ""]
        for draw in draw:
            for k in range(80):
                rows.append(("mine", trained_on, draw, half_of[draw][k], names[k], int(right[k])))
    table = pd.DataFrame(rows, columns="model trained_on draw half item right".split())
    halves = table["draw item half".split()].drop_duplicates()
    table.to_csv("answers.csv", index=False)
    contam.main(["--answers", "answers.csv", "--out", "wanted.csv"])
    flags = *LOGS, "--halves", "halves.csv"
    log_of("other", "mine", [1] * 80)  # is not named, so it must not become the original
    halves.to_csv("halves.csv", index=False)
    assert "names 5 of 6 logs" in said(contam.main, *flags, "--out", "found.csv").out
    found, wanted = pd.read_csv("found.csv"), pd.read_csv("wanted.csv")
    pd.testing.assert_frame_equal(found, wanted, check_like=True)
    draws = {"_1_": "1.0", "_2_": "2.0"}  # as pandas writes them beside an empty cell
    fill_runs(draw=lambda run: "".join(draws[key] for key in draws if key in run))
    assert "next: " in said(contam.main, *flags).out


@pytest.mark.parametrize("items, draws, words", [
    (range(80), "12", "bare numbers, such as 0: some count from 0, some from 1. Name items by c"),
    (range(1, 81), "12", "item: only answers have ['80'], only halves.csv has ['0']. Both need"),
    ([f"x{k}" for k in range(80)], "12", "item: only answers have ['x"),
    (range(80), "01", "only answers have ['2'], only halves.csv has ['0']. Both need")])
def test_halves_of_other_items_or_draws(items, draws, words, said):
    """inspect_ai counts from 1 what others count from 0; a shift makes the memory a fair gain."""
    for name in ("mine_1_A", "mine_1_B", "mine_2_A", "mine_2_B", "mine_original"):
        log_of(name, "mine", [1, 0] * 40, items=[*items])
    halves = [(draw, k, "AB"[k % 2]) for draw in draws for k in range(80)]
    pd.DataFrame(halves, columns=["draw", "item", "half"]).to_csv("halves.csv", index=False)
    found = said(contam.main, *LOGS, "--halves", "halves.csv").end
    assert words in found


def test_another_template_in_one_half(said):
    """Five shots against four are told by how prompts begin, though not by their length."""
    shots = "".join(f"Q: How many has {k}{'0' * 90}?\nA: 2\n" for k in range(5))
    path = two_halves()
    for path in Path("logs").rglob("*.jsonl"):
        start = shots if "held_out" in path.name else shots[:-99]
        path.write_text(path.read_text().replace("Q: How", json.dumps(start)[1:-1] + "Q: How"))
    assert "mine: one half was asked in another way" in said(contam.main, *LOGS).end


def test_the_block_that_makes_halves(capsys):
    items = [{"question": f"{k}\u2028", "item": 7} for k in range(101)]
    lines = [json.dumps(item, ensure_ascii=False) for item in items]
    for text in ("\r\n".join([*lines, "", lines[0]]), json.dumps(items, indent=1)):
        Path("benchmark.jsonl").write_text(text, encoding="utf-8")
        exec(BLOCKS[0], {})
        halves = [Path(f"{half}.jsonl").read_text(encoding="utf-8").strip().split("\n")
                  for half in ("released", "held_out")]
        assert capsys.readouterr().out == "51 items in released\n50 items in held_out\n"
        assert sorted(sum(halves, [])) == sorted(lines) and sorted(halves[0]) != sorted(lines)[::2]


def split_in_draws():
    """By the guide to one's own training, for a benchmark of 40 items and a repeated one."""
    items = [{"question": f"{k}?", "answer": str(k % 7)} for k in (*range(40), 0)]
    Path("benchmark.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    guide = (ROOT / "docs" / "own_training.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1], {})
    return {row["item"] for row in csv.DictReader(open("halves.csv"))}


def test_items_of_the_guides_task_for_inspect_ai_have_their_names():
    pytest.importorskip("inspect_ai")
    names = split_in_draws()
    exec(INSPECT_TASK, globals())
    assert {sample.id for sample in mine().dataset} == names  # noqa: F821


def test_items_of_the_guides_task_for_lm_eval_have_their_names():
    pytest.importorskip("lm_eval")
    names = split_in_draws()
    Path("mine.yaml").write_text(re.search(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)[1])
    subprocess.run([sys.executable, *"-m lm_eval run --model dummy --tasks mine --include_path . "
                    "--log_samples --output_path logs".split()], check=True)
    assert {*contam.read_logs(Path("logs"), "exact_match")["item"]} == names


def test_the_block_of_versions(capsys):
    Path("items.jsonl").write_text('["a", "b"]\n\n["c", "d", "e"]\n')
    exec(BLOCKS[1], {})
    found = contam.read_examples(Path("versions.jsonl"))
    assert [*map(sorted, found)] == [["a", "b"], ["c", "d", "e"]]
    assert capsys.readouterr().out == "2 items in versions.jsonl\n"
    for text in ('["a", "a"]', '[["a", "b"], ["c", "d"]]', '["a"]'):
        Path("items.jsonl").write_text(text)
        with pytest.raises((AssertionError, TypeError)):
            exec(BLOCKS[1], {})


def test_the_block_of_trap_items(capsys):
    """p is (10 * 4 + 5 * 2 + 1) / 3^5."""
    Path("traps.csv").write_text("right,published,answer\nA,B,A\nA,B, c\na,C,b\nA,B,"
                                 + "\nA,B,b " * 3)
    exec(BLOCKS[2], {})
    assert capsys.readouterr().out == ("3 of 5 wrong answers are the published ones: p = 0.21 "
                                       "(1 traps without an answer are left out)\n")
    Path("traps.csv").write_text("right,published,answer\nA,B,E")
    with pytest.raises(AssertionError, match="an entry is none of"):
        exec(BLOCKS[2], {})


def test_the_guides_example(monkeypatch, capsys):
    """By a pasted cell, without torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    cell = {"__name__": "notebook"}
    exec((ROOT / "contamination_test.py").read_text(encoding="utf-8"), cell)
    shutil.copy(ROOT / "docs" / "rows" / "answers_example.csv", "mine.csv")
    table = judge(flags="--clean clean-5 clean-10", main=cell["main"])
    assert table.bias.round(1).to_dict() == {
        "clean-10": 1.9, "clean-5": -1.7, "contaminated-10": 8.6, "contaminated-5": 7.1}
