"""docs/answers.md: logs against plain readers and the harnesses' scores; its blocks."""

import csv
import json
import re
import shutil
import sys
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
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
NAMES = re.compile(r"(before|after).*mine_(released|held_out)")
FAILED = "2026-11-25 07:36:06+00:00"  # inspect_ai's first run of a half, which a retry continued


def judge(answers="answers.csv", flags="", main=contam.main):
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
        if line["created"] != FAILED:
            yield (line["args"] + line["task_name"], line["id"], line["epoch"],
                   {"C": 1, "I": 0}.get(line["score_match"], ""))


def read_lighteval():
    for path in Path("results").rglob("details_*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            yield str(path), row["doc"]["id"], "", row["metric"]["em"]


def fake_inspect(monkeypatch):
    """In place of inspect_ai, which would read its logs: their table in samples.csv."""
    def samples_df(path, quiet, columns):
        rows = table[table.log == path]
        first, columns = rows.iloc[0], dict(columns)
        log = SimpleNamespace(model=first.model, model_args=json.loads(first.args),
                              task=first.task_name, created=first.created)
        return rows.assign(run=columns["run"](SimpleNamespace(eval=log)),
                           response="", invalid=np.where(rows.id == "1", "leaked", None))

    table = pd.read_csv("samples.csv", dtype=str)
    for path in map(Path, table.log.unique()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    analysis = SimpleNamespace(
        SampleSummary=[], EvalColumn=lambda name, path: (name, path), samples_df=samples_df,
        SampleColumn=lambda name, path, full: (name, path))
    monkeypatch.setitem(sys.modules, "inspect_ai", SimpleNamespace(analysis=analysis))


def fill_runs(**columns):
    """A person fills in columns of runs.csv, by functions of the run, and deletes one."""
    runs = pd.read_csv("runs.csv", dtype=str, keep_default_na=False)
    runs = runs.assign(**{name: runs.run.map(function) for name, function in columns.items()})
    del runs["empty"]
    runs.to_csv("runs.csv", index=False)


@pytest.mark.parametrize("read, folder, metric, printed", [  # before and after, held out first
    (read_lm_eval, "results", "strict-match exact_match", [0.2143, 0.8710, 0.2000, 0.2581]),
    (read_inspect_ai, "logs", "score_match", [0.2586, 0.6667, 0.3103, 0.2833]),
    (read_lighteval, "results", "em", [0.2333, 0.8710, 0.2000, 0.2581])])
def test_logs_of_a_harness(read, folder, metric, printed, monkeypatch, said):
    """With one metric nothing has to be filled in. Of several runs and metrics one has a half."""
    unpack(read.__name__.removeprefix("read_"))
    if read == read_inspect_ai:
        Path("logs").mkdir()
        Path("logs/a.eval").touch()
        monkeypatch.setitem(sys.modules, "inspect_ai", None)
        assert "uv run --no-project --with inspect-ai" in said(contam.main, "--answers", folder).end
        Path("logs/a.eval").unlink()
        fake_inspect(monkeypatch)
    end = said(contam.main, "--answers", folder).end or ""
    assert ("name one run and metric" in end) == (metric != "em")

    def half_of(run):
        found = NAMES.search(run)
        return found[2] if found and run.endswith(metric) and FAILED not in run else ""

    fill_runs(half=half_of, model=lambda run: re.search("before|after", run)[0])
    rows = contam.name_runs(contam.read_logs(Path(folder), "right"), Path("runs.csv"))
    rows = rows.astype(object).fillna("")
    right = rows.right.replace({"C": 1, "I": 0})
    found = zip(rows.model, rows.half, rows.item, rows.get("try", [""] * 200), right)
    wanted = []
    for name, item, k, value in read():
        if NAMES.search(name):
            model, half = NAMES.search(name).groups()
            wanted.append((model, half, item, k, value))
    assert sorted(found, key=str) == sorted(wanted, key=str) and len(wanted) > 100
    if read == read_inspect_ai:  # of each log two errors, and two tries of an invalid sample
        assert rows.error.ne("").sum() == 4 * (2 + 2)
    runs = pd.read_csv("runs.csv").dropna(subset="half").sort_values(["model", "half"])
    assert runs.score.tolist() == approx(printed, abs=5e-5)
    assert runs["empty"].any() == (read == read_inspect_ai)
    table = judge(folder, "--clean before")
    assert table.verdict["after"] == "yes" and table.reason["before"] == "named clean"


def log_of(model, task, right):
    """A log of lm-eval, in which every question has a grade. Wrong responses are empty."""
    path = Path(f"logs/{model}/samples_{task}_2026-11-25.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for k, grade in enumerate(right):
        prompt = f"Q: How many has {task} {k}?\nA:"
        lines.append(json.dumps({
            "doc_id": k, "doc": {"item": k}, "filter": "none", "metrics": ["acc"],
            "doc_hash": f"{task}{k}", "acc": int(grade), "resps": [["yes" * int(grade)]],
            "arguments": {"arg_0": prompt}}))
    path.write_text("\n".join(lines) + "\n")
    return path


def two_halves():
    rng = np.random.default_rng(1)
    for half in ("held_out", "released"):
        path = log_of("mine", f"mine_{half}", rng.random(60) < 0.6)
    return path


def test_a_line_that_is_torn_or_doubled_is_named(said):
    path = two_halves()
    text = path.read_text()
    path.write_text(text[:-30])
    found = said(contam.main, "--answers", "logs").end
    assert f"{path} (if empty or old" in found and "line 60" in found
    path.write_text(text + text.splitlines()[0])
    found = said(contam.main, "--answers", "logs").end
    assert f"{path} none acc line 61: 'released 0' has two answers" in found


def test_what_a_person_filled_in_is_kept(said):
    """Also of a log that is gone. New logs are added, and logs without a half are left out."""
    two_halves()
    for _ in "12":
        assert "mine: OPEN: " in said(contam.main, "--answers", "logs").out
    fill_runs(model=lambda run: "A", seed=lambda run: "7")
    log_of("mine", "others", [1, 0])
    Path("logs/mine/samples_mine_released_2026-11-25.jsonl").rename("gone")
    found = said(contam.main, "--answers", "logs")
    assert "does not name them (if any):\n    logs/mine/samples_others_2026" in found.out
    runs = pd.read_csv("runs.csv").set_index("run")
    assert runs.model.str.len().tolist() == [1, 1, 9] and runs.seed.tolist()[:2] == [7, 7]
    fill_runs(half=lambda run: "")
    assert "Fill in its column half" in said(contam.main, "--answers", "logs").end


def test_logs_of_two_draws_of_one_task(said):
    """By halves.csv; the original answered once. Against a table by plain loops."""
    rng, rows = np.random.default_rng(3), []
    half_of = {draw: rng.permutation([*"AB"] * 40) for draw in "12"}
    for name in ("A1", "B1", "A2", "B2", "base"):
        right = rng.random(80) < 0.6
        log_of(name, "mine", right)
        for draw in name[1] if name != "base" else "12":
            for k in range(80):
                rows.append(("mine", name[0] * (name != "base"), draw, half_of[draw][k], k,
                             int(right[k])))
    table = pd.DataFrame(rows, columns="model trained_on draw half item right".split())
    table["draw item half".split()].drop_duplicates().to_csv("halves.csv", index=False)
    table.to_csv("answers.csv", index=False)
    contam.main(["--answers", "answers.csv", "--out", "wanted.csv"])
    flags = "--answers", "logs", "--halves", "halves.csv"
    assert "trained_on and draw, too" in said(contam.main, *flags).end
    log_of("other", "mine", [1] * 80)  # is not named, so it must not become the original
    fill_runs(trained_on=lambda run: run[5].replace("b", "original"), model=lambda run: "mine",
              draw=lambda run: run[6].replace("a", ""), task=lambda run: "")
    assert "logs/other/samples" in said(contam.main, *flags, "--out", "found.csv").out
    found, wanted = pd.read_csv("found.csv"), pd.read_csv("wanted.csv")
    pd.testing.assert_frame_equal(found, wanted, check_like=True)
    fill_runs(draw=lambda run: "")  # of which draw were A and B?
    assert "two answers with trained_on 'A'" in said(contam.main, *flags).end


def test_both_halves_in_one_task(said, capsys):
    """h.csv lacks two items."""
    log_of("mine", "all", [1, 0, 1] * 20)
    pd.DataFrame({"item": range(58), "half": ["released", "held_out"] * 29}).to_csv("h.csv")
    said(contam.main, "--answers", "logs")
    fill_runs(half=lambda run: "both")
    Path("runs.csv").rename("mine.csv")
    for metric in ("", "--metric any --margin .1"):
        row = judge("logs", f"--halves h.csv --runs mine.csv {metric}").iloc[0]
        assert row.released == row.held_out == 29
        assert "\n2 answers are left out, since no half" in capsys.readouterr().out
    assert row.seen == approx(np.mean([1, 1, 0] * 9 + [1, 1]))
    assert [*pd.read_csv("mine.csv")["empty"]] == [20]


@pytest.mark.parametrize("form", "lines,array,indented,blank lines,csv,objects".split(","))
def test_the_block_that_makes_halves(form, capsys):
    items = [{"question": f"{k}\u2028", "item": 7} for k in range(101)]
    lines = [json.dumps(item, ensure_ascii=False) for item in items]
    text = {"lines": "\r\n".join([*lines, lines[0], ""]), "blank lines": "\n\n".join(lines),
            "array": json.dumps(items), "indented": json.dumps(items, indent=1),
            "csv": "question\n1\n2", "objects": json.dumps(items[0], indent=1)}[form]
    Path("benchmark.jsonl").write_text(text, encoding="utf-8")
    if form in ("csv", "objects"):
        with pytest.raises((AssertionError, json.JSONDecodeError)):
            exec(BLOCKS[0], {})
        return
    exec(BLOCKS[0], {})
    released, held_out = [Path(f"{half}.jsonl").read_text(encoding="utf-8").strip().split("\n")
                          for half in ("released", "held_out")]
    assert capsys.readouterr().out == "51 items in released\n50 items in held_out\n"
    assert len(released) == 51
    assert sorted(released + held_out) == sorted(lines) and released != sorted(lines)[::2]


def test_the_block_of_versions(capsys):
    Path("items.jsonl").write_text('["a", "b"]\n\n["c", "d", "e"]\n')
    exec(BLOCKS[1], {})
    found = [json.loads(line) for line in Path("versions.jsonl").read_text().splitlines()]
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
    shutil.copy(ROOT / "docs" / "rows" / "answers_example.csv", "answers.csv")
    table = judge(flags="--clean clean-5 clean-10", main=cell["main"])
    assert "contaminated-5: YES, PERHAPS BY OVER 5 POINTS: +7.1 [+1.5, +12.7]" in (
        capsys.readouterr().out)
    table = table["seen unseen bias low high".split()]
    shown = re.findall(r"\| (\S+-\d+) \| (.*?) \| (.*?) \| (.*?) \| (.*?) to (.*?) \|", GUIDE)
    numbers = pd.DataFrame(shown).set_index(0).astype(float).loc[table.index]
    assert numbers.to_numpy() == approx(table.to_numpy(), abs=0.051)
