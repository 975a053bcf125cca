"""contamination_test.py --answers: least squares and HC2 by explicit loops, verdicts at their
borders, the guard
by scipy's Student t, refusals, and the blocks of docs/answers.md on small files of each harness's
form."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from conftest import ROOT, load_script

contam = load_script("contamination_test")
GUIDE = ROOT / "docs" / "answers.md"


def plain_inflation(right, released, clean):
    """(bias, standard error HC2, columns), in points, by the normal equations and the hat matrix,
    an item at a
    time; clean: lists of answers."""
    rows = [[1.0, float(half), *answers] for half, *answers in zip(released, *clean)]
    size = len(rows[0])
    square = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    found = np.linalg.solve(
        square, [sum(row[i] * y for row, y in zip(rows, right)) for i in range(size)]
    )
    meat = np.zeros((size, size))
    for row, y in zip(rows, right):
        left = y - sum(b * x for b, x in zip(found, row))
        leverage = sum(x * z for x, z in zip(row, np.linalg.solve(square, row)))
        meat += np.outer(row, row) * left**2 / (1 - leverage)
    bread = np.linalg.inv(square)
    return 100 * found[1], 100 * math.sqrt((bread @ meat @ bread)[1, 1]), size


def make_answers(seed=0, released=60, held_out=45, clean=2, bias=0.0):
    """answers.csv's rows: `mine` keeps four answers of five of `before`; others of like
    strength."""
    rng = np.random.default_rng(seed)
    size = released + held_out
    hard = rng.normal(0, 1, size)
    half = np.repeat(["released", "held_out"], [released, held_out])
    names = ["before", *[f"other{k}" for k in range(1, clean)]][:clean]
    answers = {}
    for name in ["before", *names]:
        answers[name] = (rng.normal(0.3, 1, size) > hard).astype(float)
    fresh = (rng.normal(0.3, 1, size) > hard).astype(float)
    mine = np.where(rng.random(size) < 0.8, answers["before"], fresh)
    answers["mine"] = np.where((half == "released") & (rng.random(size) < bias), 1.0, mine)
    rows = []
    for name in ["mine", *names]:
        rows.append(
            pd.DataFrame({"model": name, "half": half, "item": range(size), "right": answers[name]})
        )
    return pd.concat(rows, ignore_index=True)


def judge(path, rows, *flags):
    """(the printed text is left to capsys) the table of --out."""
    rows.to_csv(path / "answers.csv", index=False)
    contam.main(
        ["--answers", str(path / "answers.csv"), "--out", str(path / "out.csv"), *map(str, flags)]
    )
    return pd.read_csv(path / "out.csv", keep_default_na=False, na_values=[""])


def columns_of(rows, task=None):
    """(released [items], {model: answers [items]}) of complete rows."""
    if task:
        rows = rows[rows["task"] == task]
    wide = rows.pivot(index=["half", "item"], columns="model", values="right")
    return (wide.index.get_level_values("half") == "released").tolist(), {
        name: wide[name].tolist() for name in wide
    }


@pytest.mark.parametrize("clean", [[], ["before"], ["before", "other1", "other2"]])
def test_bias_and_interval_equal_plain_least_squares(clean, tmp_path):
    """Also of the clean models, each against the others; degrees of freedom: items minus
    columns."""
    rows = make_answers(1, clean=3, bias=0.3)
    rows["right"] = (
        rows["right"] + np.random.default_rng(2).random(len(rows))
    ) / 2  # graded answers
    table = judge(tmp_path, rows, *(["--clean", *clean] if clean else [])).set_index("model")
    released, answers = columns_of(rows)
    for model, row in table.iterrows():
        others = [answers[name] for name in clean if name != model]
        bias, se, size = plain_inflation(answers[model], released, others)
        half = stats.t.ppf(0.945, 105 - size) * se
        assert row["df"] == pytest.approx(105 - size)
        assert [row["bias"], row["low"], row["high"]] == pytest.approx(
            [bias, bias - half, bias + half]
        )
        seen = 100 * np.mean([y for y, half in zip(answers[model], released) if half])
        assert (row["seen"], row["unseen"]) == pytest.approx((seen, seen - bias))
        assert (row["released"], row["held_out"], row["left_out"]) == (60, 45, 0)
        if others:
            gap = np.array(answers[model]) - np.mean(others, axis=0)
            released_gap = np.mean(gap[np.array(released)]) - np.mean(gap[~np.array(released)])
            assert row["gaps"] == pytest.approx(100 * released_gap)
    assert (
        table.loc["mine", "low"] < table.loc["mine", "bias"] - 2
    )  # wide enough that a fault would show


def test_without_clean_models_it_is_welchs_difference_of_means():
    rng = np.random.default_rng(0)
    x, y = rng.random(30), rng.random(50)
    found = contam.difference(
        np.concatenate([x, y]), np.repeat([True, False], [30, 50]), np.empty((0, 80))
    )
    assert found["bias"] == pytest.approx(100 * (x.mean() - y.mean()))
    assert found["se"] == pytest.approx(100 * math.sqrt(x.var(ddof=1) / 30 + y.var(ddof=1) / 50))
    assert found["df"] == pytest.approx(78)


def test_clean_models_that_repeat_others_or_never_vary_change_nothing():
    """Twice the same, its opposite, all right, all wrong: the columns that count are the others."""
    released, answers = columns_of(make_answers(3))
    right, half = np.array(answers["mine"]), np.array(released)
    before = np.array(answers["before"])
    once = contam.difference(right, half, before[None])
    bias, se, size = plain_inflation(right, released, [before])
    assert [once["bias"], once["se"], once["df"]] == pytest.approx([bias, se, 105 - 3])
    more = np.array([before, before, 1 - before, np.ones(105), np.zeros(105)])
    again = contam.difference(right, half, more)
    for name in ("bias", "se", "df", "unseen"):
        assert again[name] == pytest.approx(once[name], rel=1e-6)


def test_a_clean_model_with_one_right_answer_takes_that_item_out():
    """Leverage 1: the estimate is that of the other items."""
    released, answers = columns_of(make_answers(4))
    right, half, lone = np.array(answers["mine"]), np.array(released), np.zeros(105)
    lone[7] = 1
    found = contam.difference(right, half, lone[None])
    rest = np.arange(105) != 7
    bias, se, _ = plain_inflation(right[rest], half[rest], [])
    assert [found["bias"], found["se"], found["df"]] == pytest.approx([bias, se, 105 - 3], rel=1e-6)


@pytest.mark.parametrize("same", ["all right", "all wrong", "the clean model's"])
def test_answers_without_noise_have_the_noise_of_one_answer_a_half(same, tmp_path):
    """A perfect score is no certainty: 100 sqrt(1/60^2 + 1/45^2) points."""
    rows = make_answers(5)
    mine = rows["model"] == "mine"
    values = {
        "all right": 1,
        "all wrong": 0,
        "the clean model's": rows.loc[rows["model"] == "before", "right"].values,
    }
    rows.loc[mine, "right"] = values[same]
    row = judge(tmp_path, rows, "--clean", "before").set_index("model").loc["mine"]
    half = stats.t.ppf(0.945, 105 - 3) * 100 * math.sqrt(1 / 60**2 + 1 / 45**2)
    assert row["bias"] == pytest.approx(0, abs=1e-9) and row["high"] == pytest.approx(half)
    assert row["verdict"] == "No: within ±5"


@pytest.mark.parametrize("clean, size", [(0, 40), (1, 40), (3, 150)])
def test_intervals_cover_the_truth(clean, size):
    """800 random halves of one set of items, where release added nothing and where it made a third
    right."""
    rng = np.random.default_rng(clean)
    hard = rng.normal(0, 1, 2 * size)
    models = (rng.normal(0.3, 1, (clean + 1, 2 * size)) > hard).astype(float)
    fresh = (rng.normal(0.3, 1, 2 * size) > hard).astype(float)
    if clean:
        fresh = np.where(rng.random(2 * size) < 0.8, models[1], fresh)
    covered = {0.0: [], 0.33: []}
    for bias, hits in covered.items():
        gained = np.maximum(fresh, rng.random(2 * size) < bias)
        truth = 100 * (gained - fresh).mean()
        for _ in range(800):
            half = rng.permutation(2 * size) < size
            found = contam.difference(np.where(half, gained, fresh), half, models[1:])
            reach = stats.t.ppf(0.945, found["df"]) * found["se"]
            hits.append(abs(found["bias"] - truth) <= reach)
    assert 0.85 < np.mean(covered[0.0]) < 0.93 and 0.85 < np.mean(covered[0.33]) < 0.96


def test_the_verdict_changes_at_its_borders(tmp_path, capsys):
    """An interval of bias b and half-width h against margins on either side of |b| + h, |b| - h, h
    / .55."""
    rows = make_answers(7, 300, 200, bias=0.5)
    table = judge(tmp_path, rows, "--clean", "before").set_index("model").loc["mine"]
    b, h = table["bias"], table["high"] - table["bias"]
    assert b > h / 0.55  # else Near could not come
    near = "Near the margin of ±%g: take the interval as the answer"
    early = "Too early to tell: neither within nor beyond ±%g"
    swapped = rows.assign(half=rows["half"].map({"released": "held_out", "held_out": "released"}))
    for data, better in (
        (rows, "Yes: beyond ±%g"),
        (swapped, "No: seen items even score worse, beyond ±%g"),
    ):
        for margin, words in (
            (b + h + 0.01, "No: within ±%g"),
            (b + h - 0.01, near),
            (b - h + 0.01, near),
            (b - h - 0.01, better),
        ):
            row = (
                judge(tmp_path, data, "--clean", "before", "--margin", margin)
                .set_index("model")
                .loc["mine"]
            )
            assert row["verdict"] == words % margin
            n = 2 / (1 / 300 + 1 / 200)
            assert row["needed"] == math.ceil(n * (h / (margin / 2)) ** 2)
    less = make_answers(20, 30, 30, bias=0.3)
    table = judge(tmp_path, less, "--clean", "before").set_index("model").loc["mine"]
    b, h = table["bias"], table["high"] - table["bias"]
    assert abs(b) - h < 0.99 * h / 0.55 < 1.01 * h / 0.55 < abs(b) + h
    capsys.readouterr()
    for margin, words in ((1.01 * h / 0.55, near), (0.99 * h / 0.55, early)):
        row = (
            judge(tmp_path, less, "--clean", "before", "--margin", margin)
            .set_index("model")
            .loc["mine"]
        )
        assert row["verdict"] == words % margin
    text = capsys.readouterr().out
    assert f"; about {math.ceil(30 * (2 * 0.55 / 0.99) ** 2)} items a half would settle it" in text
    table = judge(tmp_path, less, "--clean", "before").set_index("model")
    assert "neither within nor beyond ±5" in table.loc["mine", "verdict"]  # the default margin


def test_clean_models_are_counted_against_chance(tmp_path, capsys):
    rows = make_answers(9, clean=4)
    rng = np.random.default_rng(1)
    for name, share in (("other1", 0.85), ("other2", 0.15)):  # one above 0, one below
        mine = (rows["model"] == name) & (rows["half"] == "released")
        rows.loc[mine, "right"] = (rng.random(60) < share).astype(float)
    names = ["before", "other1", "other2", "other3"]
    judge(tmp_path, rows, "--clean", *names)
    released, answers = columns_of(rows)
    above, below = 0, 0
    for name in names:
        bias, se, size = plain_inflation(
            answers[name], released, [answers[other] for other in names if other != name]
        )
        half = stats.t.ppf(0.945, 105 - size) * se
        above += bias > half
        below += bias < -half
    text = capsys.readouterr().out
    words = f"{above + below} of 4 clean models differ between the halves"
    assert above and below and above + below < 4 and words in text and "chance 0.44" in text
    assert text.count(": Clean\n") == 4 and text.index("mine, benchmark") < text.index(words)


def test_no_verdict_where_the_clean_models_differ_between_the_halves(tmp_path, capsys):
    """200 + 200 items: of so many right answers of the clean models' mean that p is just above,
    just below .01."""
    half = np.repeat([True, False], 200)
    rng, found = np.random.default_rng(0), {}
    for more in range(200 - 120):
        mean = np.concatenate([np.arange(200) < 120 + more, np.arange(200) < 120]).astype(float)
        p = stats.ttest_ind(mean[half], mean[~half], equal_var=False).pvalue
        found["above" if p > 0.01 else "below"] = (more, p)
        if p < 0.01:
            break
    assert found["below"][1] > 0.005 and found["above"][1] < 0.02
    for kind, (more, p) in found.items():
        mean = np.concatenate([np.arange(200) < 120 + more, np.arange(200) < 120]).astype(float)
        models = {"one": mean, "two": mean, "mine": (rng.random(400) < 0.5).astype(float)}
        rows = [
            pd.DataFrame(
                {
                    "model": name,
                    "half": np.where(half, "released", "held_out"),
                    "item": range(400),
                    "right": right,
                }
            )
            for name, right in models.items()
        ]
        table = judge(tmp_path, pd.concat(rows), "--clean", "one", "two").set_index("model")
        assert table.loc["mine", "p"] == pytest.approx(p, rel=0.01)
        assert table.loc["mine", "halves_differ"] == pytest.approx(100 * more / 200)
        assert (table.loc["mine", "verdict"] == "No verdict") == (kind == "below")
        text = capsys.readouterr().out
        assert ("a clean model is not clean. Difference of gaps: " in text) == (kind == "below")


def test_several_tasks_have_the_mean_of_their_biases_and_their_variances_added(tmp_path, capsys):
    parts = [
        make_answers(11, 60, 45).assign(task="a"),
        make_answers(12, 90, 90, bias=0.2).assign(task="b"),
    ]
    short = parts[1]["model"] != "other1"  # a clean model that only one task has
    rows = pd.concat([parts[0], parts[1][short]])
    table = judge(tmp_path, rows, "--clean", "before", "other1").set_index(["task", "model"])
    singles = []
    for task, clean in (("a", ["before", "other1"]), ("b", ["before"])):
        released, answers = columns_of(rows, task)
        bias, se, size = plain_inflation(
            answers["mine"], released, [answers[name] for name in clean]
        )
        assert table.loc[(task, "mine"), "bias"] == pytest.approx(bias)
        singles.append((bias, se, len(released) - size))
    b, se, df = np.transpose(singles)
    whole = table.loc[("all tasks", "mine")]
    welch = (se**2).sum() ** 2 / (se**4 / df).sum()
    half = stats.t.ppf(0.945, welch) * math.sqrt((se**2).sum()) / 2
    assert (whole["bias"], whole["high"]) == pytest.approx((b.mean(), b.mean() + half))
    assert (whole["released"], whole["held_out"]) == (150, 135)
    text = capsys.readouterr().out.splitlines()
    assert "mine, all tasks: " in text[0]  # the answer comes first
    assert not any("other1, all tasks" in line for line in text)


def test_a_task_without_random_halves_takes_the_verdict_of_all(tmp_path):
    """The other task is as large and leans the other way by less: together p is above .01."""
    rows = [
        make_answers(20, 200, 200, clean=1).assign(task="a"),
        make_answers(22, 200, 200, clean=1).assign(task="b"),
    ]
    before = rows[0]["model"].eq("before") & rows[0]["half"].eq("released")
    rows[0].loc[before, "right"] = (np.arange(200) < 170).astype(float)
    other = rows[1]["model"].eq("before") & rows[1]["half"].eq("held_out")
    rows[1].loc[other, "right"] = (np.arange(200) < 135).astype(float)
    table = judge(tmp_path, pd.concat(rows), "--clean", "before").set_index(["task", "model"])
    p, verdict = table["p"], table["verdict"]
    assert p["a", "mine"] < 0.001 and p["b", "mine"] > 0.01
    assert p["all tasks", "mine"] == pytest.approx(2 * p["a", "mine"])
    assert (
        verdict["all tasks", "mine"] == verdict["a", "mine"] == "No verdict" != verdict["b", "mine"]
    )


def test_tries_are_averaged_and_items_not_answered_are_left_out(tmp_path, capsys):
    rows = make_answers(13)
    tries = [
        rows.assign(right=np.where(np.arange(len(rows)) % 7 < k, rows["right"], 0.5), **{"try": k})
        for k in range(3)
    ]
    means = rows.assign(right=sum(part["right"] for part in tries) / 3)
    single = judge(tmp_path, means, "--clean", "before")
    assert "tries" not in capsys.readouterr().out
    ten = judge(tmp_path, pd.concat(tries), "--clean", "before")
    assert capsys.readouterr().out.startswith(
        "Up to 3 tries of an item, averaged: an item is one unit"
    )
    pd.testing.assert_frame_equal(ten, single)
    gone = [3, 4, 50]
    lacking = rows["model"].eq("before") & rows["item"].isin(gone[:2]) | rows["model"].eq(
        "mine"
    ) & rows["item"].eq(50)
    empty = judge(
        tmp_path, rows.assign(right=rows["right"].mask(lacking)), "--clean", "before"
    ).set_index("model")
    fewer = judge(tmp_path, rows[~rows["item"].isin(gone)], "--clean", "before").set_index("model")
    assert empty.loc["mine", "left_out"] == 3 and fewer.loc["mine", "left_out"] == 0
    assert empty.loc["mine", "bias"] == pytest.approx(fewer.loc["mine", "bias"])
    two = ["--clean", "before", "other1"]  # their mean, too, is of items that both answered
    both = judge(tmp_path, rows.assign(right=rows["right"].mask(lacking)), *two)
    complete = judge(tmp_path, rows[~rows["item"].isin(gone[:2])], *two)
    assert both["halves_differ"].tolist() == pytest.approx(complete["halves_differ"].tolist())
    assert empty.loc["mine", "released"] == 57 and empty.loc["before", "left_out"] == 2
    pd.concat([rows, rows]).to_csv(tmp_path / "answers.csv", index=False)  # a file joined twice
    twice = judge(tmp_path, pd.concat([rows, rows]))
    assert (twice["released"] == 60).all()


def test_lines_of_json_say_the_same(tmp_path):
    rows = make_answers(14)
    table = judge(tmp_path, rows, "--clean", "before")
    rows.assign(right=rows["right"] == 1).to_json(
        tmp_path / "answers.jsonl", orient="records", lines=True
    )
    contam.main(
        [
            "--answers",
            str(tmp_path / "answers.jsonl"),
            "--clean",
            "before",
            "--out",
            str(tmp_path / "o.csv"),
        ]
    )
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "o.csv"), table)


FIRST = {"model": "mine", "half": "released", "item": 0}
REFUSED = [  # what the first row, or a row more, is; flags; words
    ({"half": "dev"}, "", "a half is not released or held_out: benchmark, dev, 0, mine, 1.0"),
    ({"half": "held_out", "model": "other1"}, "", "an item is in both halves"),
    ({"right": 1.01}, "", "right is not from 0 to 1"),
    ({"right": -0.01}, "", "right is not from 0 to 1"),
    ({"right": "C"}, "", "C"),
    ({"model": ""}, "", "lacks its model"),
    ({}, "--clean gone", "which lacks: gone"),
    ({}, "--margin 0", "--margin is above 0"),
    ({}, "--margin nan", "--margin is above 0"),
]


@pytest.mark.parametrize("change, flags, words", REFUSED)
def test_mistakes_are_one_line(change, flags, words, tmp_path):
    rows = make_answers(15).astype({"right": object})
    for name, value in change.items():
        rows.loc[(rows["item"] == 0) & (rows["model"] == change.get("model", "mine")), name] = value
        if name == "model":
            rows.loc[0, "model"] = value
    check_refused(rows, flags, words, tmp_path)


def check_refused(rows, flags, words, tmp_path):
    (tmp_path / "out.csv").unlink(missing_ok=True)
    path = tmp_path / "answers.csv"
    rows.to_csv(path, index=False)
    with pytest.raises(SystemExit) as end:
        contam.main(["--answers", str(path), "--out", str(tmp_path / "out.csv"), *flags.split()])
    error = str(end.value)
    assert error.startswith("error: ") and words in error and "\n" not in error, error
    assert len(error.replace(str(path), "")) <= 300 and not (tmp_path / "out.csv").exists()


def test_other_mistakes_are_one_line(tmp_path):
    rows = make_answers(16)
    check_refused(rows.drop(columns="half"), "", "['half'] not in index", tmp_path)
    check_refused(
        pd.concat([rows, rows.assign(right=1 - rows["right"])]),
        "",
        "two answers to an item",
        tmp_path,
    )
    tries = pd.concat([rows.assign(**{"try": 1}), rows[:1].assign(right=0.3, **{"try": 1})])
    check_refused(tries, "", "two answers to an item", tmp_path)
    few = rows[(rows["half"] == "released") | (rows["item"] < 79)]
    check_refused(few, "", "60 released, 19 held-out items: 20 are needed", tmp_path)
    check_refused(rows[rows["half"] == "released"], "", "60 released, 0 held-out items", tmp_path)
    apart = rows[(rows["model"] != "before") | (rows["item"] % 5 == 0)]
    check_refused(apart, "--clean before", "20 are needed", tmp_path)
    assert (
        len(judge(tmp_path, rows[(rows["half"] == "released") | (rows["item"] < 80)])) == 3
    )  # 20 are enough
    many = make_answers(17, clean=11)
    names = [name for name in many["model"].unique() if name != "mine"]
    check_refused(many, "--clean " + " ".join(names), "takes up to 10 models", tmp_path)
    assert len(judge(tmp_path, many, "--clean", *names[:10], names[0])) == 12  # a name twice is one
    with pytest.raises(SystemExit, match="--clean needs --answers"):
        contam.main(["kept", "--clean", "before"])


def blocks():
    """The code of docs/answers.md by the heading or bold word before it."""
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def harness_line(number, half, right, filter_name):
    """A line of lm-evaluation-harness's samples_*.jsonl, version 0.4.9."""
    document = {"question": f"{half} {number // 2}", "answer": number % 4}  # every document twice
    return {
        "doc_id": number,
        "doc": document,
        "target": str(number % 4),
        "arguments": {"gen_args_0": {"arg_0": f"Q: {number}", "arg_1": " a"}},
        "resps": [[["-1.5", "False"]]],
        "filtered_resps": [["-1.5", "False"]],
        "filter": filter_name,
        "metrics": ["acc", "acc_norm"],
        "doc_hash": f"{hash_of(half, number // 2)}",
        "prompt_hash": "0" * 64,
        "target_hash": "1" * 64,
        "acc": right,
        "acc_norm": 1 - right,
    }


def hash_of(half, number):
    return f"{number:x}{half[0].encode().hex()}" + "e0" * 20


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def by_half(seed=18):
    """[(model, half, its right answers)] of 60 + 45 items, and what the command says of them."""
    rows = make_answers(seed, clean=1)
    return [
        (model, half, mine["right"].tolist())
        for (model, half), mine in rows.groupby(["model", "half"])
    ], rows


def run_block(number, path, monkeypatch, *flags):
    """The table that --answers makes of the file that a block of the guide writes."""
    code = blocks()[number]
    assert len(code.strip().splitlines()) <= 8
    monkeypatch.chdir(path)
    exec(code, {})
    contam.main(["--answers", "answers.csv", "--out", "out.csv", *flags])
    return pd.read_csv("out.csv", keep_default_na=False, na_values=[""]).set_index("model")


NUMBERS = ["released", "held_out", "left_out", "seen", "unseen", "bias", "low", "high"]


def test_the_block_for_lm_evaluation_harness(tmp_path, monkeypatch):
    """Two filters, of which one counts; documents that repeat; models by their folders."""
    parts, rows = by_half()
    for model, half, right in parts:
        lines = []
        for number, value in enumerate(right):
            lines.append(harness_line(number, half, value, "none"))
            lines.append(harness_line(number, half, 1.0, "flexible-extract"))
        write_lines(
            tmp_path
            / "results"
            / f"lab__{model}"
            / f"samples_mine_{half}_2026-11-23T10-00-00.123.jsonl",
            lines,
        )
    table = run_block(0, tmp_path, monkeypatch, "--clean", "lab__before")
    wanted = judge(tmp_path, rows, "--clean", "before").set_index("model")
    for model in ("mine", "before"):
        pd.testing.assert_series_equal(
            table.loc[f"lab__{model}", NUMBERS], wanted.loc[model, NUMBERS], check_names=False
        )


def test_the_block_for_inspect(tmp_path, monkeypatch):
    """samples_df with EvalModel and EvalTask, two epochs of each sample; ids from 1 on in either
    task."""
    parts, rows = by_half()
    lines = []
    for model, half, right in parts:
        for number, value in enumerate(right):
            for epoch in (1, 2):
                letter = "C" if value else "I"
                lines.append(
                    {
                        "sample_id": f"u{len(lines)}",
                        "eval_id": "e",
                        "log": "logs/a.eval",
                        "model": f"lab/{model}",
                        "task_name": f"mine_{half}",
                        "id": number + 1,
                        "epoch": epoch,
                        "input": "Q",
                        "target": "A",
                        "score_match": letter,
                        "error": "",
                    }
                )
    pd.DataFrame(lines).to_csv(tmp_path / "samples.csv")
    table = run_block(1, tmp_path, monkeypatch, "--clean", "lab/before")
    wanted = judge(tmp_path, rows, "--clean", "before").set_index("model")
    pd.testing.assert_series_equal(
        table.loc["lab/mine", NUMBERS], wanted.loc["mine", NUMBERS], check_names=False
    )


def test_the_block_for_every_eval_ever(tmp_path, monkeypatch):
    """instance_level_eval 0.2.1."""
    parts, rows = by_half()
    for model, half, right in parts:
        lines = []
        for number, value in enumerate(right):
            lines.append(
                {
                    "schema_version": "instance_level_eval_0.2.1",
                    "evaluation_id": f"mine_{half}/lab/{model}/1",
                    "model_id": f"lab/{model}",
                    "evaluation_name": f"mine_{half}",
                    "sample_id": str(number),
                    "interaction_type": "single_turn",
                    "input": {"raw": "Q", "reference": ["A"]},
                    "output": {"raw": ["A"]},
                    "answer_attribution": [],
                    "evaluation": {"score": value, "is_correct": value == 1},
                }
            )
        write_lines(tmp_path / "data" / f"mine_{half}" / "lab" / model / "0-0.jsonl", lines)
    table = run_block(2, tmp_path, monkeypatch, "--clean", "lab/before")
    wanted = judge(tmp_path, rows, "--clean", "before").set_index("model")
    pd.testing.assert_series_equal(
        table.loc["lab/mine", NUMBERS], wanted.loc["mine", NUMBERS], check_names=False
    )


def test_the_block_for_our_own_predictions(tmp_path, monkeypatch, model_dir, benchmark_csv):
    """Of a run of run_experiment.py: seen and unseen of the arm test on either set are its row's
    accuracies."""
    monkeypatch.chdir(tmp_path)
    flags = [
        "--csv",
        str(benchmark_csv),
        "--model",
        str(model_dir("bert")),
        "--predictions",
        "probs",
    ]
    flags += "--m 6 --n 40 --subsamples 1 --workers 1 --threads 1 --out rows.csv".split()
    load_script("run_experiment").main(flags)
    table = run_block(3, tmp_path, monkeypatch)
    row = pd.read_csv("rows.csv").iloc[0]
    for arm in ("base", "extra", "test"):
        on_test, on_extra = row[f"acc_{arm}"], row[f"acc_{arm}_on_extra"]
        assert table.loc[arm, "seen"] == pytest.approx(100 * on_test)
        assert table.loc[arm, "unseen"] == pytest.approx(100 * on_extra)
    bias = (table.loc["test", "bias"] - table.loc["extra", "bias"]) / 2
    crossed = (
        row["acc_test"] - row["acc_extra"] + row["acc_extra_on_extra"] - row["acc_test_on_extra"]
    )
    assert bias == pytest.approx(50 * crossed)


def test_the_block_that_makes_halves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    items = [json.dumps({"question": f"{k}\u2028"}, ensure_ascii=False) for k in range(101)]
    (tmp_path / "benchmark.jsonl").write_text(
        "\n".join([*items, items[0]]) + "\n", encoding="utf-8"
    )
    code = blocks()[4]
    assert len(code.strip().splitlines()) == 5
    exec(code, {})
    halves = [
        (tmp_path / f"{half}.jsonl").read_text(encoding="utf-8").strip().split("\n")
        for half in contam.HALVES
    ]
    assert [len(half) for half in halves] == [51, 50] and sorted(halves[0] + halves[1]) == sorted(
        items
    )
    assert halves[0] != sorted(items)[::2] and set(halves[0]) != set(items[:51])


def test_the_guides_command_says_what_the_guide_shows(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command, shown = re.findall(r"```\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[:2]
    script, *flags = command.split()[1:]
    assert script == "contamination_test.py"
    contam.main(flags)
    assert capsys.readouterr().out == shown


def test_it_needs_no_torch(tmp_path, monkeypatch):
    """A fresh module, where torch and transformers cannot be imported."""
    import sys

    for name in ("torch", "transformers", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    cell = {"__name__": "notebook"}
    exec((ROOT / "contamination_test.py").read_text(encoding="utf-8"), cell)
    make_answers(19).to_csv(tmp_path / "answers.csv", index=False)
    cell["main"](["--answers", str(tmp_path / "answers.csv")])
