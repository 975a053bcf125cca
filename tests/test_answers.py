"""contamination_test.py --answers: least squares and HC2 by the textbook, verdicts at borders, the
guard by scipy, refusals, and the blocks of docs/answers.md on files of each harness's form."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pytest import approx
from scipy import stats

from conftest import ARMS, ROOT, end_of, load_script

pytestmark = pytest.mark.usefixtures("empty_folder")

contam = load_script("contamination_test")
GUIDE = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")


def plain_inflation(right, released, clean):
    """(bias, standard error HC2, columns), in points, by the normal equations and the hat matrix;
    clean: lists of answers."""
    X = np.column_stack([np.ones(len(right)), released, *clean])
    bread = np.linalg.inv(X.T @ X)
    found = bread @ X.T @ right
    hat = X @ bread @ X.T
    squares = (right - X @ found) ** 2 / (1 - np.diag(hat))
    variances = bread @ X.T @ np.diag(squares) @ X @ bread
    return 100 * found[1], 100 * math.sqrt(variances[1, 1]), X.shape[1]


def make_answers(seed=0, released=60, held_out=45, clean=2, bias=0.0):
    """Rows of answers: `mine` keeps four answers of five of `before`; others of like strength."""
    rng = np.random.default_rng(seed)
    size = released + held_out
    hard = rng.normal(0, 1, size)
    half = np.repeat(["released", "held_out"], [released, held_out])
    answers = {"mine": None, "before": None}
    for name in ["before", *[f"other{k}" for k in range(1, clean)], "fresh"]:
        answers[name] = (rng.normal(0.3, 1, size) > hard).astype(float)
    mine = np.where(rng.random(size) < 0.8, answers["before"], answers.pop("fresh"))
    answers["mine"] = np.where((half == "released") & (rng.random(size) < bias), 1.0, mine)
    return as_rows(answers, half)


def as_rows(answers, half):
    table = pd.DataFrame(answers).assign(half=half, item=range(len(half)))
    return table.melt(["half", "item"], var_name="model", value_name="right")


def table_of(flags=""):
    """The table of --out, by model; what is printed is left to capsys."""
    contam.main(["--answers", "answers.csv", "--out", "out.csv", *flags.split()])
    return pd.read_csv("out.csv", keep_default_na=False, na_values=[""]).set_index("model")


def judge(rows, flags=""):
    rows.to_csv("answers.csv", index=False)
    return table_of(flags)


def columns_of(rows):
    """(released [items], {model: answers [items]}) of complete rows."""
    wide = rows.pivot(index=["half", "item"], columns="model", values="right")
    answers = {name: right.to_numpy() for name, right in wide.items()}
    return wide.index.get_level_values("half") == "released", answers


@pytest.mark.parametrize("flags", ["", "--clean before", "--clean before other1 other2"])
def test_bias_and_interval_equal_plain_least_squares(flags):
    """Also of the clean models, each against the others."""
    rows = make_answers(1, clean=3, bias=0.3)
    rows["right"] = (rows["right"] + np.random.default_rng(2).random(len(rows))) / 2  # graded
    table, clean = judge(rows, flags), flags.split()[1:]
    released, answers = columns_of(rows)
    for model, row in table.iterrows():
        others = [answers[name] for name in clean if name != model]
        bias, se, size = plain_inflation(answers[model], released, others)
        half = stats.t.ppf(0.945, 105 - size) * se
        assert row["df"] == approx(105 - size)
        found = row[["bias", "low", "high"]].tolist()
        assert found == approx([bias, bias - half, bias + half])
        seen = 100 * answers[model][released].mean()
        assert (row["seen"], row["unseen"]) == approx((seen, seen - bias))
        assert (row["released"], row["held_out"], row["left_out"]) == (60, 45, 0)
        if others:
            gap = 100 * (answers[model] - np.mean(others, axis=0))
            assert row["gaps"] == approx(gap[released].mean() - gap[~released].mean())
    assert half > 2  # wide enough that a fault would show


def test_clean_models_that_add_nothing():
    """Twice the same, its opposite, all right, all wrong: the columns that count are the others.
    One right answer, leverage 1: the estimate is that of the other items."""
    half, answers = columns_of(make_answers(4))
    right, before = answers["mine"], answers["before"]
    repeats = np.array([before, before, 1 - before, np.ones(105), np.zeros(105)])
    rest = np.arange(105) != 7
    for clean, wanted in ((repeats, plain_inflation(right, half, [before])),
                          (1.0 * ~rest[None], plain_inflation(right[rest], half[rest], []))):
        found = contam.difference(right, half, clean)
        assert (found["bias"], found["se"]) == approx(wanted[:2], rel=1e-6)
        assert found["df"] == approx(105 - 3)


@pytest.mark.parametrize("perfect", [True, False])
def test_a_perfect_score_is_no_certainty(perfect):
    """Nor are a clean model's answers: the noise is that of one answer a half."""
    rows = make_answers(5)
    right = rows.loc[rows["model"] == "before", "right"].to_numpy()
    rows.loc[rows["model"] == "mine", "right"] = 1 if perfect else right
    row = judge(rows, "--clean before").loc["mine"]
    half = stats.t.ppf(0.945, 105 - 3) * 100 * math.sqrt(1 / 60**2 + 1 / 45**2)
    assert row["bias"] == approx(0, abs=1e-9) and row["high"] == approx(half)
    assert row["verdict"] == "No: within ±5"


def test_the_verdict_changes_at_its_borders():
    """An interval of bias b and half-width h against margins on either side of |b| + h, |b| - h,
    h / .55."""

    def judged(rows, margin=5):
        row = judge(rows, f"--clean before --margin {margin}").loc["mine"]
        n, h = 2 / (1 / row["released"] + 1 / row["held_out"]), row["high"] - row["bias"]
        assert row["needed"] == math.ceil(n * (h / (margin / 2)) ** 2)
        return abs(row["bias"]), h, row["verdict"].replace(f"±{margin:g}", "±")

    near = "Near the margin of ±: take the interval as the answer"
    rows = make_answers(7, 300, 200, bias=0.5)
    swapped = rows.assign(half=rows["half"].map({"released": "held_out", "held_out": "released"}))
    for data, beyond in ((rows, "Yes: beyond ±"),
                         (swapped, "No: seen items even score worse, beyond ±")):
        b, h, _ = judged(data)
        assert b > h / 0.55  # else Near could not come
        for margin, words in ((b + h + 0.01, "No: within ±"), (b + h - 0.01, near),
                              (b - h + 0.01, near), (b - h - 0.01, beyond)):
            assert judged(data, margin)[2] == words
    less = make_answers(14, 30, 30, bias=0.3)
    b, h, _ = judged(less)
    assert b - h < 0.99 * h / 0.55 < 1.01 * h / 0.55 < b + h
    assert judged(less, 1.01 * h / 0.55)[2] == near
    early = "Too early to tell: neither within nor beyond ±"
    assert judged(less, 0.99 * h / 0.55)[2] == early


@pytest.mark.parametrize("more, silent, halves", [
    (24, False, ["released", "held_out"]), (25, True, ["held_out", "released"])])
def test_no_verdict_where_the_clean_models_differ(more, silent, halves, capsys):
    """By so many of 200 right answers that p is just above or just below .01, of either sign."""
    mean = np.concatenate([np.arange(200) < 120 + more, np.arange(200) < 120]).astype(float)
    p = stats.ttest_ind(mean[:200], mean[200:], equal_var=False).pvalue
    assert 0.005 < p < 0.02 and (p < 0.01) == silent
    mine = np.random.default_rng(0).integers(0, 2, 400)
    rows = as_rows({"one": mean, "two": mean, "mine": mine}, np.repeat(halves, 200))
    row = judge(rows, "--clean one two").loc["mine"]
    assert row["p"] == approx(p, rel=0.01)
    assert abs(row["halves_differ"]) == approx(100 * more / 200)
    assert (row["halves_differ"] < 0) == silent == (row["verdict"] == "No verdict")
    text = capsys.readouterr().out
    assert ("a clean model is not clean. Difference of gaps: " in text) == silent
    judge(rows, "--clean one")
    text = capsys.readouterr().out
    assert "1 of 1 clean models differ between the halves" in text and "chance 0.11" in text


def test_several_tasks_by_hand():
    parts = {"a": make_answers(11, 60, 45), "b": make_answers(12, 90, 90, bias=0.2)}
    parts["b"] = parts["b"][parts["b"]["model"] != "other1"]  # a clean model that one task has
    rows = pd.concat([mine.assign(task=task) for task, mine in parts.items()])
    table = judge(rows, "--clean before other1").set_index("task", append=True)
    singles = []
    for task, clean in (("a", ["before", "other1"]), ("b", ["before"])):
        released, answers = columns_of(parts[task])
        others = [answers[name] for name in clean]
        bias, se, size = plain_inflation(answers["mine"], released, others)
        assert table.loc[("mine", task), "bias"] == approx(bias)
        singles.append((bias, se, len(released) - size))
    b, se, df = np.transpose(singles)
    whole = table.loc[("mine", "all tasks")]
    welch = (se**2).sum() ** 2 / (se**4 / df).sum()
    half = stats.t.ppf(0.945, welch) * math.sqrt((se**2).sum()) / 2
    assert (whole["bias"], whole["high"]) == approx((b.mean(), b.mean() + half))
    assert (whole["released"], whole["held_out"]) == (150, 135)
    assert table.index[0] == ("mine", "all tasks") and ("other1", "all tasks") not in table.index


def test_a_task_without_random_halves_takes_the_verdict_of_all():
    """The other task is as large and leans the other way by less: together p is above .01."""
    parts = []
    for task, seed, half, more in (("a", 20, "released", 170), ("b", 22, "held_out", 135)):
        rows = make_answers(seed, 200, 200, clean=1).assign(task=task)
        before = rows["model"].eq("before") & rows["half"].eq(half)
        rows.loc[before, "right"] = (np.arange(200) < more).astype(float)
        parts.append(rows)
    table = judge(pd.concat(parts), "--clean before").loc["mine"].set_index("task")
    p, verdict = table["p"], table["verdict"]
    assert p["a"] < 0.001 and p["b"] > 0.01 and p["all tasks"] == approx(2 * p["a"])
    assert verdict["all tasks"] == verdict["a"] == "No verdict" != verdict["b"]


def test_tries_are_averaged_and_gaps_left_out():
    rows, tries = make_answers(13), []
    for k in range(3):
        right = np.where(np.arange(len(rows)) % 7 < k, rows["right"], 0.5)
        tries.append(rows.assign(right=right, **{"try": k}))
    means = rows.assign(right=sum(part["right"] for part in tries) / 3)
    many = judge(pd.concat(tries), "--clean before")
    pd.testing.assert_frame_equal(many, judge(means, "--clean before"))
    holes = rows.set_index(["model", "item"])
    holes.loc[[("before", 3), ("before", 4), ("mine", 50)], "right"] = math.nan
    holes = holes.reset_index()
    empty = judge(holes, "--clean before")
    fewer = judge(rows[~rows["item"].isin([3, 4, 50])], "--clean before")
    assert empty.loc["mine", "left_out"] == 3 and fewer.loc["mine", "left_out"] == 0
    assert empty.loc["mine", "bias"] == approx(fewer.loc["mine", "bias"])
    assert empty.loc["mine", "released"] == 57 and empty.loc["before", "left_out"] == 2
    two = "--clean before other1"  # their mean, too, is of items that both answered
    complete = judge(rows[~rows["item"].isin([3, 4])], two)["halves_differ"]
    both = judge(holes, two)["halves_differ"]
    assert both.tolist() == approx(complete.tolist())
    twice = judge(pd.concat([rows, rows]))  # a file joined twice
    assert (twice["released"] == 60).all()


def refused(rows, flags=""):
    """The one line with which --answers ends, without a table."""
    rows.to_csv("answers.csv", index=False)
    Path("out.csv").unlink(missing_ok=True)
    error = end_of(contam.main, "--answers", "answers.csv", "--out", "out.csv", *flags.split())
    assert error.startswith("error: ") and not Path("out.csv").exists()
    return error


@pytest.mark.parametrize("change, flags, words", [
    ({"half": "dev"}, "", "a half is not released or held_out: benchmark, dev, 0, mine, 1.0"),
    ({"half": "held_out"}, "", "an item is in both halves"),
    ({"right": 1.01}, "", "right is not from 0 to 1"),
    ({"right": -0.01}, "", "right is not from 0 to 1"),
    ({"right": "C"}, "", "C"),
    ({"model": ""}, "", "lacks its model"),
    ({}, "--clean gone", "which lacks: gone"),
    ({}, "--margin 0", "--margin is above 0"),
    ({}, "--margin nan", "--margin is above 0"),
])
def test_mistakes_are_one_line(change, flags, words):
    rows = make_answers(15).astype({"right": object})
    for name, value in change.items():
        rows.loc[0, name] = value
    assert words in refused(rows, flags)


def test_other_mistakes_are_one_line():
    rows = make_answers(16)
    assert "half" in refused(rows.drop(columns="half"))
    both = pd.concat([rows, rows.assign(right=1 - rows["right"])])
    assert "two answers to an item" in refused(both)
    tries = pd.concat([rows, rows[:1].assign(right=0.3)]).assign(**{"try": 1})
    assert "two answers to an item" in refused(tries)
    released = rows["half"] == "released"
    assert "'held_out': 19}: 20 a half" in refused(rows[released | (rows["item"] < 79)])
    assert "'held_out': 0}" in refused(rows[released])
    assert len(judge(rows[released | (rows["item"] < 80)])) == 3  # 20 are enough
    apart = rows[(rows["model"] != "before") | (rows["item"] % 5 == 0)]
    assert "20 a half are needed" in refused(apart, "--clean before")
    many = make_answers(17, clean=11)
    ten = "--clean before " + " ".join([f"other{k}" for k in range(1, 10)])
    assert "takes up to 10 models" in refused(many, f"{ten} other10")
    assert len(judge(many, f"{ten} before")) == 12  # twice is once
    assert "--clean needs --answers" in end_of(contam.main, "kept", "--clean", "before")


BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
NUMBERS = ["released", "held_out", "left_out", "seen", "unseen", "bias", "low", "high"]


def run_block(number, flags=""):
    """The table that --answers makes of the file that a block of the guide writes."""
    assert len(BLOCKS[number].strip().splitlines()) <= 8
    exec(BLOCKS[number], {})
    return table_of(flags)


def lines_of(kind, model, half, right):
    """What a harness writes of a model's answers to a half: lm-evaluation-harness 0.4.9, two
    filters, every document twice; inspect_ai, two epochs; Every Eval Ever 0.2.1."""
    for number, value in enumerate(right):
        if kind == "lm-eval":
            name = f"{number // 2:x}{half[0].encode().hex()}" + "e0" * 20
            line = {"doc_id": number, "doc": {"question": "Q"}, "metrics": ["acc", "acc_norm"],
                    "doc_hash": name, "prompt_hash": "0" * 64, "acc_norm": 1 - value}
            yield line | {"filter": "none", "acc": value}
            yield line | {"filter": "flexible-extract", "acc": 1.0}
        elif kind == "inspect":
            line = {"sample_id": "u", "model": f"lab/{model}", "id": number + 1,
                    "task_name": f"mine_{half}", "score_match": "C" if value else "I"}
            yield line | {"epoch": 1}
            yield line | {"epoch": 2}
        else:
            yield {"model_id": f"lab/{model}", "evaluation_name": f"mine_{half}",
                   "sample_id": str(number), "evaluation": {"score": value}}


@pytest.mark.parametrize("number, kind, file", [
    (0, "lm-eval", "results/lab__{model}/samples_mine_{half}_2026-11-23T10-00-00.123.jsonl"),
    (1, "inspect", "samples.csv"),
    (2, "every eval ever", "data/mine_{half}/lab/{model}/0-0.jsonl")])
def test_the_blocks_for_harnesses(number, kind, file):
    rows, lines = make_answers(18, clean=1), []
    wanted = judge(rows, "--clean before")
    for (model, half), mine in rows.groupby(["model", "half"]):
        own = list(lines_of(kind, model, half, mine["right"]))
        lines += own
        path = Path(file.format(model=model, half=half))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in own), encoding="utf-8")
    if kind == "inspect":
        pd.DataFrame(lines).to_csv("samples.csv")
    lab = "lab__" if kind == "lm-eval" else "lab/"
    table = run_block(number, f"--clean {lab}before")
    found = table.rename(index=lambda name: name.removeprefix(lab))
    names = ["mine", "before"]
    pd.testing.assert_frame_equal(found.loc[names, NUMBERS], wanted.loc[names, NUMBERS])


def test_the_block_for_our_own_predictions(model_dir, benchmark_csv):
    """Seen and unseen of an arm are its accuracies in the row of the run."""
    flags = ["--csv", str(benchmark_csv), "--model", str(model_dir("bert")), "--threads", "1"]
    flags += "--predictions probs --m 6 --n 40 --subsamples 1 --workers 1 --out rows.csv".split()
    load_script("run_experiment").main(flags)
    table, row = run_block(3), pd.read_csv("rows.csv").iloc[0]
    for arm in ARMS:
        assert table.loc[arm, "seen"] == approx(100 * row[f"acc_{arm}"])
        assert table.loc[arm, "unseen"] == approx(100 * row[f"acc_{arm}_on_extra"])


def test_the_block_that_makes_halves():
    items = [json.dumps({"question": f"{k}\u2028"}, ensure_ascii=False) for k in range(101)]
    text = "\n".join([*items, items[0]]) + "\n"
    Path("benchmark.jsonl").write_text(text, encoding="utf-8")
    exec(BLOCKS[4], {})
    halves = []
    for half in contam.HALVES:
        text = Path(f"{half}.jsonl").read_text(encoding="utf-8")
        halves.append(text.strip().split("\n"))
    assert [len(half) for half in halves] == [51, 50]
    assert sorted(halves[0] + halves[1]) == sorted(items)
    assert halves[0] != sorted(items)[::2] and {*halves[0]} != {*items[:51]}


def test_the_guides_command_without_torch(monkeypatch, capsys):
    """As a pasted cell, where torch and transformers cannot be imported."""
    monkeypatch.chdir(ROOT)
    command, shown = re.findall(r"```\n(.*?)```", GUIDE, re.DOTALL)[:2]
    script, *flags = command.split()[1:]
    for name in ("torch", "transformers", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    cell = {"__name__": "notebook"}
    exec((ROOT / script).read_text(encoding="utf-8"), cell)
    cell["main"](flags)
    assert capsys.readouterr().out == shown
