"""The tasks of tasks.json, from a stand-in for the Hub and real wheels, and files as people have
them."""

import csv
import functools
import hashlib
import itertools
import json
import re
import zipfile
from pathlib import Path
from unittest.mock import Mock, call

import datasets
import huggingface_hub
import numpy as np
import pandas as pd
import pytest

import fake_hub
from conftest import ROOT, cases, end_of
from docs.studies import check_tasks

TASKS = json.loads((ROOT / "tasks.json").read_text(encoding="utf-8"))["tasks"]
LISTED = {"sources": [{"csv": "mine.csv"}], "text": ["text"], "label": "label"}
WHEELS = "bbc_news imdb reuters rotten_tomatoes tweets".split()


def text_of(number):
    """With the number in letters, since texts that differ in digits alone are one text."""
    return "text " + "".join(["abcdefghij"[int(digit)] for digit in str(number)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    fake_hub.write_hub(folder)
    return folder


@pytest.fixture
def hub(folder, monkeypatch):
    """A Hub without a network: main branches are folders here, parquet branches are cached."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "prepared"))


@pytest.fixture
def own(script, capsys, empty_folder):
    """own(name, content, flags, kind) -> (Task or None, its line or the message) of --csv NAME or
    --hub NAME. Without a content the file is there."""
    def call(name, content=None, flags="", kind="csv"):
        if isinstance(content, pd.DataFrame):
            content.to_parquet(name)
        elif content is not None:
            Path(name).write_bytes(content.encode(errors="surrogateescape"))
        args = script.parse_args([f"--{kind}", name, *f"--m 3 --n 1 {flags}".split()])
        tasks = {}
        message = end_of(script.errors_on_one_line()(
            lambda _: tasks.update(script.load_tasks(TASKS, [], args, "text label name split"))))
        return [*tasks.values(), None][0], message or capsys.readouterr().out

    return call


def cells_of(task):
    return [(text, task.classes[label]) for text, label in zip(task.texts, task.labels)]


def table(labels, *extra):
    """A CSV with these labels of text_of(0), text_of(1) and so on, and more rows."""
    rows = [f"{text_of(number)},{label}" for number, label in enumerate(labels)]
    return "\n".join(["text ,label", *rows, *extra])


@pytest.mark.parametrize("name", fake_hub.TASKS)
def test_a_task_is_the_published_one(script, hub, name, capsys):
    sources = [source for source in TASKS[name]["sources"] if "hub" in source]
    task = script.load_task(name, {**TASKS[name], "sources": [{"hub": "no/thing"}, *sources]})
    _, classes, (repository, *_) = fake_hub.TASKS[name]
    assert [*zip(task.texts, task.labels)] == fake_hub.expected(name)
    assert task.classes == classes
    assert f"task {name} from {repository}: " in capsys.readouterr().out


def test_the_wheels_hold_what_the_registry_says(capsys, empty_folder):
    assert all(TASKS[name]["data"] for name in WHEELS), "a hash of texts and labels in order"
    assert check_tasks.main(["--tasks", *WHEELS]) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line[0] in WHEELS] == [
        ["bbc_news", "2225", "5"], ["imdb", "25000", "2"], ["reuters", "5485", "8"],
        ["rotten_tomatoes", "8530", "2"], ["tweets", "38158", "3"]]
    wrong = TASKS["tweets"] | {"data": "0" * 12}
    Path("tasks.json").write_text(json.dumps({"tasks": {"tweets": wrong}}))
    assert check_tasks.main([]) == 2


def test_a_wheel_with_another_hash_is_not_used(script, tmp_path, monkeypatch):
    """By the real pip. With the right hash its texts are there, and pip is not asked again, unless
    the registry names another hash."""
    wheel = tmp_path / "words-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {
                "words/all.csv": "text,label\na word,a\nanother,b",
                "words-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: words\nVersion: 1.0",
                "words-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any",
                "words-1.0.dist-info/RECORD": ""}.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(script, "CACHE", tmp_path / "cache")
    source = {"wheel": "words==1.0", "sha256": "0" * 64, "path": "words/all.csv"}
    load = functools.partial(script.load_task, "mine")
    entry = {**LISTED, "sources": [source]}
    with pytest.raises(ValueError, match="sha256 0000"):
        load(entry)
    assert not [*script.CACHE.iterdir()]
    source["sha256"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert load(entry).texts == ["a word", "another"]
    with pytest.raises(ValueError, match="sha256 1111"):
        load(entry | {"sources": [source | {"sha256": "1" * 64}]})
    wheel.unlink()
    assert load(entry).texts == ["a word", "another"] and len([*script.CACHE.iterdir()]) == 1


def test_data_sets_of_the_hub(own, hub, script, monkeypatch):
    """--name and --split, and whatever a source in tasks.json says, reach the Hub."""
    task, _ = own("dair-ai/emotion", None, "--name split --split test --m 6", "hub")
    assert task.texts[0].startswith("split/test")
    asked = Mock(side_effect=ValueError("asked"))
    monkeypatch.setattr(datasets, "load_dataset", asked)
    source = dict(zip("name data_dir data_files revision split".split(), "abcde"))
    with pytest.raises(ValueError, match="asked"):
        script.load_task("mine", {**LISTED, "sources": [{"hub": "a/b", **source}]})
    assert asked.call_args == call("a/b", **source)


TEXTS = ["one, two", "bare\rreturn", 'a "5"\r1', "a\nbreak\n", 'say "no"', "NA", "007", "é; x",
         "None", "a, b;\tc|\n20\n", 'say "1"\n"01"', '""\n', "1\n\n20\n", "\n01", "one\tthree",
         "- 1,5\n- 2,20\n", "C:\\", "null\u2028\x85.", "Is it?\n20,really",
         "So?\n1, no.\n20, not once", "long " * 30000]
MINE = pd.DataFrame({"text": TEXTS, "label": ["1", "01", "20"] * 7})
JSONL = MINE.to_json(orient="records", lines=True, force_ascii=False)
FILES = [
    ("mine.csv", MINE.to_csv(lineterminator="\r\n")),
    ("mine.csv", MINE.to_csv(sep="|", quoting=csv.QUOTE_ALL)),
    ("mine.csv", "\ufeff" + MINE.to_csv(sep=";", index=False, lineterminator="\r\n")),
    ("mine.TSV", MINE.to_csv(sep="\t", lineterminator="\r\n")),
    ("mine.JSONL", "\ufeff" + JSONL.replace("\n", "\r\n\n")),
    ("mine.jsonl", JSONL.replace("{", "{\n ").replace(',"label', ',\n "label').replace("}", "\n}")),
    ("mine.ndjson", MINE.to_json(orient="records")), ("mine.parquet", MINE.set_index("label")),
    ("mine.csv", MINE.to_csv(quoting=csv.QUOTE_ALL).replace('","', '", "'))]


@pytest.mark.parametrize("number", range(len(FILES)))
def test_a_file_is_read_as_it_was_written(own, number):
    task, line = own(*FILES[number])
    assert cells_of(task) == [*zip(MINE["text"], MINE["label"])]
    assert task.classes == ["01", "1", "20"] and "21 of 21 rows" in line


@pytest.mark.parametrize("end, words", [
    ('a screen of 15"', "1 of 56 rows span lines"),
    ('he called it "good"', "ends in line 15: .* double the quote marks"),
    ("plain", "line 61: unexpected end")])
def test_rows_that_lone_quote_marks_join_are_told(own, end, words):
    texts = [text_of(row) for row in range(60)]
    texts[9] = '"begun'
    texts[13] = end
    rows = ["label,text", *map(",".join, zip("ab" * 30, texts))]
    task, message = own("mine.csv", "\r\n".join(rows))
    assert re.search(words, message) and (not task or len(task.texts) == 56)
    task, _ = own("mine.tsv", "\n".join(rows).replace(",", "\t"))
    assert len(task.texts) == 56 or task.texts == texts, "a TSV is then read without quotes"


@pytest.mark.parametrize("name, content, words", [
    ("mine.csv", table("abc", '"a \\"b\\" c",a'), "mine.csv: .* line 5: .* Put cells with ','"),
    ("mine.csv", table("abc", "text"), "mine.csv: .* line 5: 1 cells, but 2 columns. Put cells"),
    ("mine.xlsx", "PK\0\udcff", r"mine.xlsx: .* can't decode"),
    ("mine.csv", ";text;y\n;a;b", r"line 2: KeyError: 'label'.* Here are \['', 'text', 'y'\]"),
    ("mine.csv", "text,label,text\na,b,c", r"two columns have one name: \['text', 'label', 'text'"),
    ("mine.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label"\n', "mine.jsonl: .* line 2"),
    ("mine.json", '{"text": {"0": "a"}, "label": {"0": 1}}', "line 1: .* one object a row, not"),
    ("mine.jsonl", '{"text": "a", "label": 1}\n{"text": 42, "label": 1}', "line 2: TypeError")])
def test_mistakes_in_a_file(own, name, content, words):
    """Only a row that does not fit brings up quotes, and none brings up the Hub."""
    message = own(name, content)[1]
    assert re.search(words, message), message
    assert "Hub" not in message and ("in quotes" in message) == ("Put cells" in words)


def test_a_misspelt_flag_stands_below_the_right_one(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--lable"])
    assert "--text text --label label\n" in capsys.readouterr().err


def test_names_of_classes_in_a_file(own):
    """As Dataset.to_parquet writes them. Unused classes go."""
    labels = [0, 2, 2] * 3 + [-1, None, 0]
    data = datasets.Dataset.from_dict({"text": [*map(text_of, range(12))], "label": labels})
    names = datasets.ClassLabel(names=["b", "never", "a"])
    data.cast_column("label", names).to_parquet("mine.parquet")
    task, line = own("mine.parquet")
    assert cells_of(task) == [*[(text_of(i), "baa"[i % 3]) for i in range(9)], (text_of(11), "b")]
    assert task.classes == ["b", "a"] and "10 of 12 rows" in line


@pytest.mark.parametrize("kind, labels, classes", cases("""
    csv     | 10, 9, -1         | -1 10 9
    json    | 10, 9, -1         | -1 9 10
    json    | 2.5, 10, null, 9  | 2.5 9 10
    parquet | 10, 9, -1         | -1 9 10
    json    | "b", 10, "B", 9   | 10 9 B b"""))
def test_classes_have_the_order_of_strings_or_of_numbers(own, kind, labels, classes):
    """And -1 is one of them."""
    labels = json.loads(f"[{labels}]") * 4
    rows = [{"text": text_of(number), "label": label} for number, label in enumerate(labels)]
    content = pd.DataFrame(rows)
    if kind == "csv":
        content = content.to_csv(index=False)
    elif kind == "json":
        content = json.dumps(rows)
    task, _ = own(f"mine.{kind}", content, "--m 4")
    assert task.classes == classes.split()
    assert [name for _, name in cells_of(task)] == [str(label) for label in labels if label]


def test_labels_that_look_the_same_are_one(own):
    looks = ["caf\u00e9", "cafe\u0301", "no  tea ", "no tea", 2, "2"] * 2
    rows = [{"text": text_of(number), "label": label} for number, label in enumerate(looks)]
    task, _ = own("mine.json", json.dumps(rows))
    assert task.classes == ["2", "caf\u00e9", "no tea"]
    assert task.labels.tolist() == [1, 1, 2, 2, 0, 0] * 2


KEPT = ["a word,a", "new,b", "7,a", "8,b", "新 1,a", "caf\u00e9,a", "\ud55c,b", "X!,b",
        "ที่ดี,a", "ทุดู,b", "good 😀,a", "good 😡,b"]
LEFT_OUT = ["x,", "y, ", "z,\t", " ,b", " , ", " A WORD!,b", "a-word 2.,a", "新,b", "cafe\u0301,b",
            "\u1112\u1161\u11ab,b", "NEW,a"]


def test_repeated_texts_are_read_once(own, script):
    """Else a test text could stand, with its label, in train. The first stays. Letters with accents
    are one sign (NFC) or two (NFD). A label of blanks is none."""
    task, line = own("mine.csv", "\n".join(["text,label", *KEPT, *LEFT_OUT]))
    assert [",".join(cells) for cells in cells_of(task)] == KEPT
    assert f"{len(KEPT)} of {len(KEPT + LEFT_OUT)} rows" in line
    task = script.load_task("mine", {**LISTED, "labels": ["b", "a"], "classes": ["B", "A"]})
    assert len(task.texts) == len(KEPT) + 6, "of tasks.json all rows stay"
    assert task.classes == ["B", "A"] and task.labels[:4].tolist() == [1, 0, 1, 0]
    for wrong in ({"classes": [*"ABC"]}, {"sources": []}):
        with pytest.raises(ValueError, match="named .'A', 'B', 'C'|load mine: $"):
            script.load_task("mine", LISTED | wrong)


def test_all_tasks_are_the_papers(script, monkeypatch):
    task = script.Task([], [0], [], "", {})
    monkeypatch.setattr(script, "load_task", lambda *_: task)
    tasks = script.load_tasks(TASKS, [], script.parse_args(["--tasks", "all"]), "")
    assert {*tasks} == {*fake_hub.TASKS}


def test_a_folder_of_parquet_files(own):
    Path("mine").mkdir()
    MINE.to_parquet("mine/one.parquet")
    assert cells_of(own("mine/", kind="hub")[0]) == [*zip(MINE["text"], MINE["label"])]


def test_sizes_that_fit(script):
    """Every m and n fit if there are m // K texts of each class and 2 n others."""
    for counts in ([3, 9], [4, 5, 6], [1, 1, 40], [30, 2], [9]):
        labels = np.repeat(np.arange(len(counts)), counts)
        K = len(counts)
        task = script.Task([*map(text_of, labels)], labels, [*"abc"[:K]], "", {})
        for m, n in itertools.product(range(1, 40), range(1, 30, 4)):
            row = {"task": "mine", "m": m, "n": n, "subsample": 1}
            if K > 1 and 1 <= m // K <= min(counts) and m // K * K + 2 * n <= len(labels):
                texts = script.sample_of(row, {}, None, task).texts
                assert [*map(len, texts.values())] == [m // K * K, n, n]
            else:
                with pytest.raises(ValueError, match="mine is too small. Use another --m or --n"):
                    script.sample_of(row, {}, None, task)
