"""--group: no group is in two sets of a draw. --also-read: what both pretrained models read."""

from pathlib import Path

import numpy as np
import pytest

from conftest import end_of, rows_of

TEXTS = [f"{author} {word}" for author in "abcdefghijklmnopqrst" for word in "abcdef"]


@pytest.fixture
def run(script, model_dir, empty_folder):
    """run(flags as typed) -> end of main, for six texts of each of twenty authors."""
    rows = [f"{text},{'xy'[text[2] in 'abc']},{text[0]}" for text in TEXTS]
    Path("mine.csv").write_text("\n".join(["text,label,author", *rows]))
    folder = model_dir("bert")
    return lambda typed="": end_of(script.main, *(
        f"--model {folder} --csv mine.csv --m 8 --n 20 --subsamples 1 --workers 1 --device cpu "
        f"--out rows.csv {typed}").split())


def walked(groups, n, order):
    """test and extra, from group to group, and the groups that are left."""
    sets, order = [[], []], iter(order)
    for found in sets:
        while len(found) < n:
            group = next(order)
            found += [row for row, own in enumerate(groups) if own == group]
        del found[n:]
    return sets, {*order}


@pytest.mark.parametrize("size", [1, 4, 9])
def test_sets_take_whole_groups_in_random_order(script, size):
    """Of about this size. `train` is drawn by class from those that are left."""
    rng = np.random.default_rng(size)
    groups = [f"g{number:03}" for number in rng.integers(300 // size, size=300)]
    labels = rng.integers(3, size=300)
    for k in range(1, 20):
        train, test, extra = script.split_rows(labels, 31, 40, k, groups).values()
        order = zip(np.random.RandomState(42 + k).permutation(300), sorted({*groups}))
        sets, left = walked(groups, 40, [group for _, group in sorted(order)])
        assert [test.tolist(), extra.tolist()] == sets
        assert {groups[row] for row in train} <= left and len({*train}) == 30
        assert np.bincount(labels[train]).tolist() == [10, 10, 10]


def test_a_column_of_groups(run):
    """Has its own recipe, and may not change."""
    assert run() == run("--group author") == None
    plain, grouped = rows_of("rows.csv")
    assert grouped["experiment"] == "few-shot-grouped" and grouped["recipe"] != plain["recipe"]
    assert "a group has 6 texts" in run("--group author --n 5")
    assert "Draw 1 has sets of [0, 110, 6]" in run("--group author --n 110")
    Path("mine.csv").write_text(Path("mine.csv").read_text().replace(",a\n", ",z\n"))
    assert "with other texts, settings" in run("--group author")


def test_both_models_read_the_other_texts(run, script, monkeypatch):
    """But those with the letters of a text in one of the three sets. They have no answer."""
    read, pretrain = [], script.pretrain

    def watched(net, coded, *rest):
        read.append([(net.tokenizer.decode(ids[1:-1]), length) for ids, length in coded])
        return pretrain(net, coded, *rest)

    monkeypatch.setattr(script, "pretrain", watched)
    other = Path("more.csv")
    other.write_text("\n".join(["text,", "a post,", *[f"{text.upper()}!," for text in TEXTS]]))
    typed = "--with-answers --also-read more.csv"
    assert run("--with-answers") == run(typed) == None
    plain, row = rows_of("rows.csv")
    others = read[2][20:]
    assert read[2:] == [read[0] + others, read[1] + others] and others[0] == ("a post", 0)
    assert len({text for text, length in others if length == 0}) == len(others) == 1 + 72
    assert not {text[-3:] for text, _ in read[0] + read[1]} & {text[:3] for text, _ in others}
    assert row["versions"].endswith(" texts read 93") and "post" not in row["versions"]
    assert row["experiment"] == "few-shot-also-read-answers"
    assert row["nll_base"] == plain["nll_base"] and row["nll_test"] != plain["nll_test"]
    other.write_text("text\nanother post")
    assert "with other texts, settings" in run(typed)
