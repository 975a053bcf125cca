"""docs/answers.md: logs against the harnesses' scores; its blocks."""

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
from pytest import approx

from conftest import ROOT, cases, load_script

pytestmark = pytest.mark.usefixtures("empty_folder")

contam = load_script("contamination_test")
GUIDE = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
NOTEBOOK, INSPECT_TASK, *BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
NAMES = re.compile(r"(before|after).*mine.*?(released|held_out)")
LOGS = "--answers logs --metric acc".split()
FAILED = "2026-11-25T07-36-06"  # inspect_ai's first run of a half, which a retry continued


def judge(answers="mine.csv", flags="", main=contam.main):
    main(["--answers", answers, "--out", "out.csv", *flags.split()])
    return pd.read_csv("out.csv").set_index("model")


def fake_inspect(monkeypatch):
    """In place of inspect_ai, which would read its logs: their table in samples.csv."""
    def read_eval_log(path):
        samples = []
        for row in logs[path]:
            asked = [SimpleNamespace(role=role, text=role) for role in ("user", "assistant")]
            samples.append(SimpleNamespace(
                id=row["id"], epoch=row["epoch"], messages=asked, error=row["error"],
                scores=None if row["error"] else {"match": SimpleNamespace(value=row["score_match"])},
                invalidation="leaked" * (row["id"] == "1")))
        spec = SimpleNamespace(
            model=row["model"], model_args=json.loads(row["args"]), task=row["task_name"],
            task_args={"data": "a/b"})
        return SimpleNamespace(eval=spec, samples=samples)

    logs = {}
    for row in csv.DictReader(open("samples.csv")):
        logs.setdefault(row["log"], []).append(row)
    for path in map(Path, logs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    log = SimpleNamespace(read_eval_log=read_eval_log)
    monkeypatch.setitem(sys.modules, "inspect_ai.log", log)


def fill_runs(**columns):
    """A person fills in columns of runs.csv, by functions of the run."""
    runs = pd.read_csv("runs.csv", dtype=str, keep_default_na=False)
    runs = runs.assign(**{name: runs.run.map(function) for name, function in columns.items()})
    runs.to_csv("runs.csv", index=False)


@pytest.mark.parametrize("name, folder, metric, items, printed", [
    ("lm_eval", "results", "exact_match,strict-match", [28, 31, 30, 31],
     [0.2143, 0.8710, 0.2000, 0.2581]),
    ("inspect_ai", "logs", "match", [30, 31, 30, 31], [0.2586, 0.6667, 0.3103, 0.2833]),
    ("lighteval", "results", "em", [30, 31, 30, 31], [0.2333, 0.8710, 0.2000, 0.2581])])
def test_logs_of_a_harness(name, folder, metric, items, printed, monkeypatch, said):
    """The mean score is what the harness printed. Before and after, held out first."""
    shutil.unpack_archive(ROOT / "tests" / "harness_logs" / f"{name}.tar.xz", filter="data")
    if name == "inspect_ai":
        fake_inspect(monkeypatch)
    found = said(contam.main, "--answers", folder).end
    assert "no logs with the metric right, but ['" in found and metric in found
    flags = f"--metric {metric} --clean before"
    said(contam.main, "--answers", folder, *flags.split())
    if name == "inspect_ai":
        fill_runs(half=lambda run: "" if FAILED in run else NAMES.search(run)[2],
                  model=lambda run: NAMES.search(run)[1])
    rows = contam.name_runs(contam.read_logs(Path(folder), metric))
    if name == "inspect_ai":  # of each log two errors, and two tries of an invalid sample
        assert (rows.error != "").sum() == 4 * (2 + 2) and {*rows["try"]} == {*"12"}
        assert {*rows.prompt} == {"user"}
    rows["score"] = pd.to_numeric(rows[metric].replace({"C": 1, "I": 0, "": None}))
    logs = rows.groupby(["model", "half"])
    means = logs.score.mean()
    assert means.tolist() == approx(printed, abs=5e-5)
    assert logs["item"].nunique().tolist() == items
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
        lines.append(json.dumps({
            "doc_id": k, "doc": {"item": items[k] if items else f"x{name}"}, "filter": "none",
            "metrics": ["acc"], "doc_hash": f"{task}{k}", "acc": int(grade),
            "arguments": {"gen_args_0": {"arg_0": f"Q: How many has {name}?"}}, **more}))
    path.write_text("\n".join(lines) + "\n")
    return path


def two_halves(**more):
    rng = np.random.default_rng(1)
    for half in ("held_out", "released"):
        path = log_of("mine", f"mine_{half}", rng.random(60) < 0.6, **more)
    return path


@pytest.mark.parametrize("more, words", [
    ({"acc": [1, 0]}, "line 2: acc is '[1, 0]': use a number, or another --metric"),
    ({"doc_hash": "a", "filter": "x"}, "but ['acc,x']: name one by --metric"),
    ({"acc": None}, "none of mine has 20 answers"), ({}, "next: ")])
def test_metrics_of_a_log(more, words, said):
    two_halves(**more)
    found = said(contam.main, *LOGS)
    assert words in (found.end or found.out)


def test_a_line_that_is_torn_or_doubled_is_named(said):
    path = two_halves()
    text = path.read_text()
    path.write_text(text[:-30])
    assert f"{path}: " in said(contam.main, *LOGS).end
    path.write_text(text.replace('"filter"', '"x"'))
    assert "before 0.4.6 wrote this" in said(contam.main, *LOGS).end
    path.write_text(text + "\n".join(text.splitlines()[1::-1]))
    found = said(contam.main, *LOGS).end
    name = path.relative_to("logs")
    assert f"{name} line 2 and {name} line 61: mine has two answers to item 'x" in found


def test_what_a_person_filled_in_is_kept(said):
    """Also of a log that is gone, and columns of their own. New logs are added, and logs without a
    half are left out. unreleased is no half."""
    two_halves()
    for folder in ("logs", Path("logs").resolve()):  # the same logs
        assert "next: " in said(contam.main, *LOGS, "--answers", folder).out
    fill_runs(model=lambda run: "A", seed=lambda run: "7")
    log_of("mine", "mine_unreleased", [1, 0])
    Path("logs/mine/samples_mine_released_2026-11-25.jsonl").rename("gone")
    found = said(contam.main, *LOGS)
    assert "names 2 of 3 logs" in found.out and "half is held_out: use released" in found.end
    runs = pd.read_csv("runs.csv")
    assert runs.model.tolist() == ["A", "A", "mine"] and runs.seed.tolist()[:2] == [7, 7]
    fill_runs(half=lambda run: "")
    assert "fill in the column half of runs.csv" in said(contam.main, *LOGS).end
    Path("runs.csv").write_text("run,score,lr\na,.7,1\n")
    assert "another program wrote runs.csv: move it" in said(contam.main, *LOGS).end
    assert Path("runs.csv").read_text() == "run,score,lr\na,.7,1\n"


def test_logs_of_two_draws_of_one_task(said):
    """By halves.csv; the original answered once. Names of folders tell which model is which.
    Against a table by plain loops."""
    rng, rows = np.random.default_rng(3), []
    half_of = {draw: rng.permutation([*"AB"] * 40) for draw in "12"}
    names = [f"x{k}" for k in range(80)]
    for model in ("mine_1_A", "mine_1_B", "mine_2_A", "org__mine_2_B", "mine_original"):
        right = rng.random(80) < 0.6
        log_of(model, "mine", right, names)
        *_, draw, trained_on = model.split("_")
        for draw in draw if draw in half_of else half_of:
            rows += zip([trained_on] * 80, [draw] * 80, half_of[draw], names, right)
    table = pd.DataFrame(rows, columns="trained_on draw half item right".split())
    table[["draw", "item", "half"]].drop_duplicates().to_csv("halves.csv", index=False)
    table.assign(model="mine").to_csv("answers.csv", index=False)
    contam.main(["--answers", "answers.csv", "--out", "wanted.csv"])
    log_of("other", "mine", [1] * 80, names)  # is not named, so it must not become the original
    flags = *LOGS, "--halves", "halves.csv"
    assert "names 5 of 6 logs" in said(contam.main, *flags, "--out", "found.csv").out
    found, wanted = pd.read_csv("found.csv"), pd.read_csv("wanted.csv")
    pd.testing.assert_frame_equal(found, wanted, check_like=True)
    folders = pd.Series(["runs/2/B/samples_x.jsonl"]).str.extract(contam.NAMES_IN_RUN)
    assert folders.iloc[0, :3].tolist() == ["", "2", "B"]
    draws = {"_1_": "1.0", "_2_": "2.0"}  # as pandas writes them beside an empty cell
    fill_runs(draw=lambda run: "".join(draws[key] for key in draws if key in run))
    assert "next: " in said(contam.main, *flags).out


@pytest.mark.parametrize("first, name, draws, words", cases("""
    0 | | 12 | bare numbers, such as 0: some count from 0, some from 1. Name items by c
    1 | | 12 | item: only answers have ['80'], only halves.csv has ['0']. Both need
    0 | x | 12 | item: only answers have ['x
    0 | | 01 | draw: only answers have ['2'], only halves.csv has ['0']. Both need"""))
def test_halves_of_other_items_or_draws(first, name, draws, words):
    """inspect_ai counts from 1 what others count from 0; a shift makes the memory a fair gain."""
    answers = [(draw, f"{name}{int(first) + k}") for draw in ("", "1", "2") for k in range(80)]
    halves = [(draw, k, "AB"[k % 2]) for draw in draws for k in range(80)]
    pd.DataFrame(halves, columns=["draw", "item", "half"]).to_csv("halves.csv", index=False)
    with pytest.raises(ValueError, match=re.escape(words)):
        contam.add_halves(pd.DataFrame(answers, columns=["draw", "item"]), Path("halves.csv"))


def test_other_shots_in_one_half_of_a_task():
    """The other task and the other model keep their verdicts. Prompts of the tasks begin in different ways."""
    for name, shots in ("add_held_out", 5), ("add_released", 4), ("sort_held_out", 5), (
            "sort_released", 5):
        log_of("mine", name, [1, 0] * 30, arguments=f"{name[:4]}: {shots} shots")
        log_of("before", name, [0, 1] * 30, arguments=name[:4])
    contam.main(LOGS)
    reasons = pd.read_csv("answers.csv", index_col=["model", "task"]).reason.dropna()
    assert len(reasons) == 1 and "held_out begin like 'add_: 5 shots'" in reasons["mine", "add"]


def test_the_block_that_makes_halves(capsys):
    items = [{"question": f"{k}\u2028", "item": 7} for k in range(101)]
    lines = [json.dumps(item, ensure_ascii=False) for item in items]
    for text in ("\r\n".join([*lines, "", lines[0]]), json.dumps(items, indent=1)):
        Path("benchmark.jsonl").write_text(text, encoding="utf-8")
        exec(BLOCKS[0], {})
        assert capsys.readouterr().out == "51 items in released\n50 items in held_out\n"
        halves = [Path(f"{half}.jsonl").read_text(encoding="utf-8").strip().split("\n")
                  for half in contam.HALVES]
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
    exec(f"import pandas as pd, contamination_test, fit_model\n{NOTEBOOK}")
