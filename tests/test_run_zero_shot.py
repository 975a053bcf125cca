"""run_zero_shot.py against the paper's prompts, uncached scores, peft and a plain loop, and what
the model really saw."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import peft
import pytest
import torch
import transformers as t

from conftest import (
    ARMS,
    SETS,
    byte_tokenizer,
    end_of,
    plain_training,
    recipe_of,
    rows_of,
    write_csv,
)

CLASSES = ["World", "Sports", "Business", "Sci/Tech"]
TEXTS = ["US Electoral College withstands critics ... so far (AFP)",
         "Voters in Hungary decide referenda", "Fans rush"]


@pytest.fixture
def load(zero, byte_model):
    """load(kind) -> (folder, the script's network with a fresh adapter, its tokenizer)."""
    def call(kind, precision="float32", **changes):
        folder = byte_model(kind, **changes)
        model = zero.find_model(str(folder), zero.load_registry())
        net, tokenizer = zero.load_net(model, "none", precision, "cpu")
        zero.fresh_adapter(net, 5)
        return folder, net, tokenizer

    return call


@pytest.fixture
def run(zero, benchmark_csv, empty_folder):
    """run(model, flags as typed) -> (None or an error's message, rows of results.csv)."""
    ours = ("--m 3 --n 9 --subsamples 1 --workers 1 --device cpu --out results.csv "
            f"--csv {benchmark_csv}")
    about = ["--about", "a remark", "--answer", "its subject"]

    def call(model, typed=""):
        message = end_of(zero.main, *about, *f"{ours} --model {model} {typed}".split())
        return message, rows_of() if Path("results.csv").exists() else []

    return call


# Prompts, typed from the paper's appendix G

HEAD = ("Your task is to classify a given text as one of these categories:\nWorld\nSports\n"
        "Business\nSci/Tech\n\nThe text is a news article. Answer with its topic.")


@pytest.fixture
def strings(zero, byte_model):
    """arm_strings, as one key of them, of TEXTS with the classes in order."""
    tokenizer = t.AutoTokenizer.from_pretrained(byte_model("gpt2"))

    def call(key, pack=1, answers=False, texts=TEXTS, max_length=9999):
        changes = {"pack": pack, "answers": answers, "max_length": max_length}
        recipe = recipe_with(zero, "") | changes
        return zero.arm_strings(tokenizer, recipe, CLASSES, texts, np.arange(len(texts)))[key]

    return call


def test_prompts_are_the_papers(strings):
    first = "\n\n### Text: US Electoral College withstands critics ... so far (AFP)"
    second = "\n\n### Text: Voters in Hungary decide referenda"
    third = "\n\n### Text: Fans rush"
    slot = "\n### Answer:"
    prompts = [HEAD + text + slot for text in (first, second, third)]
    assert strings("sequences") == strings("prompts") == prompts
    assert strings("prompts", answers=True) == strings("prompts", pack=2) == prompts
    assert strings("sequences", answers=True)[1] == prompts[1] + " Sports"
    assert strings("sequences", pack=2) == [HEAD + first + second, HEAD + third]
    assert strings("sequences", pack=2, answers=True) == [
        f"{HEAD}{first}{slot} World{second}{slot} Sports", f"{HEAD}{third}{slot} Business"]


def test_long_texts_are_cut_and_nothing_else(strings):
    long = ["x" * 5000, "short", "y" * 70]
    slot = "\n### Answer:"
    assert strings("examples", texts=long)[0] == f"### Text: {'x' * 1000}{slot}"  # paper's code
    short = [f"### Text: {text}" for text in ("x" * 60, "short", "y" * 60)]
    frame = len(f"{HEAD}\n\n### Text: {slot} Sci/Tech") + 1  # bytes are tokens
    cut = {"texts": long, "max_length": frame + 60}
    assert strings("examples", answers=True, **cut) == [
        f"{short[0]}{slot} World", f"{short[1]}{slot} Sports", f"{short[2]}{slot} Business"]
    for most, typed in (frame + 19, {}), (frame + 16 * 3 + 22, {"pack": 3}):
        with pytest.raises(ValueError, match="characters of a text .* longer window"):
            strings("examples", texts=["x" * 99] * 3, max_length=most, **typed)
    assert strings("prompts", **cut) == [f"{HEAD}\n\n{text}{slot}" for text in short]
    frame = len(HEAD) + 3 * len("\n\n### Text: ") + len(" Sci/Tech") + 1
    assert strings("examples", pack=3, texts=long, max_length=frame + 60 + 5 + 60) == short


@pytest.mark.parametrize("words, front", [
    (byte_tokenizer([], "$A !"), ""), (byte_tokenizer([], "? $A ! <end>"), "?"),
    (t.ByT5Tokenizer(), "")])
def test_nothing_is_appended(words, front, zero):
    for text in "a goal!", "!":
        assert words.decode(zero.encode(words, text)) == front + text


def plain_scores(model, tokenizer, prompts, classes, counts):
    """An uncached pass per prompt and class: mean log-probability of its last `counts` tokens."""
    means = np.empty((len(prompts), len(classes)))
    for i, prompt in enumerate(prompts):
        for k, name in enumerate(classes):
            ids = tokenizer(f"{prompt} {name}")["input_ids"]
            with torch.no_grad():
                logs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(1)
            scored = range(len(ids) - counts[k], len(ids))
            means[i, k] = np.mean([logs[at - 1, ids[at]].item() for at in scored])
    return means


@pytest.mark.parametrize("kind, changes", [
    ("llama", {}), ("gpt2", {"saved_as": t.GPT2Model}), ("bloom", {}),
    ("mistral", {"sliding_window": 400}),
    ("gpt_neo", {"window_size": 64, "attention_types": [[["global", "local"], 1]]}),
    ("gemma3_text", {"sliding_window": 64})])
def test_prompts_scored_together_score_as_alone(kind, changes, zero, load, monkeypatch):
    """To this tokenizer ": " is one token, as is ": W": what prompt and class share is scored. Also
    where a pass has room for some of the classes alone."""
    _, net, tokenizer = load(kind, merges=[("Ġ", "a"), (":", "Ġ"), (":Ġ", "W")], **changes)
    texts = ["no rain at all " * 20, "", "x", "a goal", "Fans rush " * 5, "a goal"]
    prompts = [f"What are these remarks about?\n### Text: {text}\n### Answer:" for text in texts]
    classes = ["a", "b", "of", "cat", "World"]
    expected = plain_scores(net.eval(), tokenizer, prompts, classes, [1, 2, 3, 4, 5])
    found = zero.score_classes(net, tokenizer, prompts, classes)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    alone = zero.score_classes(net, tokenizer, prompts[:1], classes)
    np.testing.assert_allclose(alone, expected[:1], atol=1e-5)
    monkeypatch.setattr(zero, "SCORED", 2)
    few = zero.score_classes(net, tokenizer, prompts, classes)
    np.testing.assert_allclose(few, expected, atol=1e-5)


def recipe_with(zero, typed, task="ag_news", weights=""):
    entry = SimpleNamespace(classes=CLASSES, groups=None, spec=zero.load_registry()["tasks"][task])
    return recipe_of(zero, typed, entry, "mistral", "mistral", weights=weights)


@pytest.mark.parametrize("task, typed, size, pack", [
    ("ag_news", "", 16, 1), ("movie_rationales", "", 8, 1),
    ("movie_rationales", "--pack --with-answers --max-length 999", 1, 8),
    ("movie_rationales", "--pack --with-answers --batch-size 3", 3, 8)])
def test_zero_shot_recipes_are_the_papers(task, typed, size, pack, zero):
    """Appendix G and section 9.1, typed from there: short texts, long ones, and packs."""
    recipe = recipe_with(zero, typed, task)
    found = [recipe[key] for key in ("batch_size", "pack", "epochs", "learning_rate", "max_length")]
    assert found == [size, pack, 1, 2e-4, 512] and recipe["answers"] == (pack > 1)
    assert recipe["lora"]["lora_dropout"] == 0.05
    wanted = "zero-shot-packed-answers" if pack > 1 else "zero-shot"
    assert zero.parse_args(typed.split()).experiment == wanted


def test_the_hash_covers_whatever_decides_the_numbers(zero, monkeypatch):
    """Flags, the weights, the task's words, and this script's constants."""
    flags = ["", "--precision bf16", "--precision fp16", "--quantize nf4", "--pretrain-lr 1",
             "--pretrain-epochs 2", "--batch-size 3", "--max-length 9", "--pack", "--with-answers"]
    recipes = [recipe_with(zero, typed) for typed in flags]
    recipes += [recipe_with(zero, "", weights="other"), recipe_with(zero, "", "rotten_tomatoes")]
    for name in ("LORA", "TEXT_CHARACTERS", "RECIPE_VERSION"):
        monkeypatch.setattr(zero, name, 9)
        recipes.append(recipe_with(zero, ""))
    assert len({*map(zero.short_hash, recipes)}) == len(recipes)


RECIPE = {"epochs": 2, "batch_size": 3, "learning_rate": 0.01, "quantize": "none",
          "precision": "float32"}
WORDS = [f"{'word ' * n}end {n}" for n in (3, 9, 1, 110, 12, 2, 5)]


def train(zero, net, tokenizer, texts, **changes):
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return zero.train_adapter(net, ids, RECIPE | changes, 7)


def no_dropout(net):
    """Switch dropout off; copies of all weights."""
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return {name: weight.clone() for name, weight in net.state_dict().items()}


def plain_adapter(folder, dtype, start):
    """peft's own model with the adapter of `start`."""
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
                             task_type="CAUSAL_LM")
    model = t.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = peft.get_peft_model(model, config).eval()
    new = {name: weight for name, weight in start.items() if "lora_" in name}
    model.load_state_dict(new, strict=False)
    return model


def epochs_of(tokenizer):
    order = np.random.default_rng([7, 0])
    epochs = []
    for _ in range(2):
        ids = [np.array(tokenizer(WORDS[row])["input_ids"]) for row in order.permutation(7)]
        pairs = [*zip(ids, ids)]
        epochs.append([pairs[:3], pairs[3:6], pairs[6:]])
    return epochs


@pytest.mark.parametrize("kind, most, bf16", [
    ("llama", 0, False), ("gpt2", 90, False), ("llama", 0, True)])
def test_pretraining_is_a_plain_loop(kind, most, bf16, zero, load, norms, monkeypatch):
    monkeypatch.setattr(zero, "CPU_TOKENS", most)
    precision = "bf16" if bf16 else "float32"
    folder, net, tokenizer = load(kind, precision=precision)
    if not bf16:
        net.double()
    start = no_dropout(net)
    loss = train(zero, net, tokenizer, WORDS, precision=precision)
    other = plain_adapter(folder, torch.float32 if bf16 else torch.float64, start)
    expected = plain_training(other, epochs_of(tokenizer), 0.01, bf16)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert norms[:6] == pytest.approx(norms[6:], rel=0.1 if bf16 else 1e-5)
    trained = net.state_dict()
    for name, weight in other.state_dict().items():
        if not bf16:
            torch.testing.assert_close(trained[name], weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(trained[name], start[name]) == ("lora_" not in name)


def test_fp16_takes_its_first_step(zero, load, norms):
    """At torch's own scale these gradients overflow."""
    for precision in ("fp16", "float32"):
        _, net, tokenizer = load("gpt2", precision=precision, initializer_range=1.0)
        no_dropout(net)
        train(zero, net, tokenizer, TEXTS, precision=precision)
    assert norms[0] == pytest.approx(norms[2], rel=0.1)


# A run against its unit.json, the model's inputs and the plain loop


@pytest.mark.parametrize("kind, typed", [
    ("llama", "--with-answers"), ("gpt2", "--pack"), ("opt", "--pack --with-answers")])
def test_a_run_is_what_its_files_say(kind, typed, zero, byte_model, run, monkeypatch,
                                     benchmark_csv):
    folder = byte_model(kind)
    trained = []
    train_adapter = zero.train_adapter
    tokenizer = t.AutoTokenizer.from_pretrained(folder)

    def watched(net, ids, *rest):
        trained.append(tokenizer.batch_decode(ids))
        return train_adapter(net, ids, *rest)

    monkeypatch.setattr(zero, "train_adapter", watched)
    length = 640 if "--pack" in typed else 185  # cuts texts
    message, (row,) = run(folder, "--adapters kept --pretrain-lr 0.02 "
                          f"--max-length {length} {typed}")
    (path,) = Path("kept").glob("*/unit.json")
    unit = json.loads(path.read_text())
    assert message is None and {name: str(value) for name, value in unit["row"].items()} == row
    assert "instruction" not in row["versions"], "a prompt is long"
    assert unit.pop("hash") == zero.short_hash(unit)
    assert min(map(len, unit["test"]["examples"])) < 60  # some are cut
    assert trained == [unit[name]["sequences"] for name in ("extra", "test")]
    assert len(trained[0]) == (2 if "pack" in typed else 9)

    nlls = set()
    right = {}
    table = pd.read_csv(benchmark_csv)
    counts = [len(f" {name}") for name in unit["classes"]]  # bytes are tokens
    texts = table["text"]
    codes = table["label"].astype("category").cat.codes.to_numpy()
    split = zero.split_rows(codes, int(row["m"]), 9, 1)
    for arm, name in itertools.product(ARMS, SETS):
        prompts = unit[name]["prompts"]
        labels = np.array(unit[name]["labels"])
        assert labels.tolist() == codes[split[name]].tolist()
        for prompt, text in zip(prompts, texts[split[name]], strict=True):
            assert f"\n\n### Text: {text[:3]}" in prompt
        model = t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if arm != "base":
            model = peft.PeftModel.from_pretrained(model, path.parent / arm)
        expected = plain_scores(model, tokenizer, prompts, unit["classes"], counts)
        expected -= np.log(np.exp(expected).sum(1, keepdims=True))
        right[arm, name] = expected.argmax(1) == labels
        nll = -expected[np.arange(9), labels].mean()
        scores = [float(row[f"{metric}_{arm}{SETS[name]}"]) for metric in ("acc", "nll")]
        assert scores == pytest.approx([np.mean(right[arm, name]), nll], abs=2e-5)
        nlls.add(round(nll, 4))
    assert len(nlls) == 6
    for name, ending in SETS.items():
        differ = np.mean(right["extra", name] != right["test", name])
        assert float(row[f"discordant{ending}"]) == differ


def test_a_run_goes_on_and_mixes_no_recipes(zero, byte_model, run, monkeypatch):
    """unit.json goes before the adapters that it describes, and is written whole."""
    folder = byte_model("gpt2")
    _, first = run(folder, "--adapters kept")
    (path,) = Path("kept").glob("*/unit.json")
    _, rows = run(folder, "--seed 1 --subsamples 2 --adapters others")
    assert rows[:1] == first and len(rows) == 3
    for score, same in (("nll_test", False), ("nll_base", True)):  # base keeps no adapter
        assert (rows[0][score] == rows[1][score]) == same
    run(folder, "--adapters kept --out other.csv --about tweets")
    assert len([*Path("kept").glob("*/unit.json")]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(zero, "train_adapter", Mock(side_effect=KeyboardInterrupt))
        message, _ = run(folder, "--adapters kept --out stopped.csv")
    assert "stopped" in message and path.parent.is_dir() and not path.exists()
    path.with_name("draft.json").symlink_to("/dev/full")
    message, _ = run(folder, "--adapters kept --out stopped.csv")
    assert "[Errno 28] No space" in message and not path.exists()
    message, again = run(folder, "--about tweets")
    assert "use a different --out" in message and again == rows


def test_show_prompts(byte_model, run, capsys):
    """A pack to pretrain on and a prompt to score."""
    run(byte_model("gpt2"), "--show-prompts --with-answers --pack")
    out = capsys.readouterr().out
    head = "\nfood\nsky\nsport\n\nThe text is a remark. Answer with its subject.\n\n### Text: "
    counts = [out.count(words) for words in (head, "### Text: ", "### Answer: ", "### Answer:\n")]
    assert counts == [2, 9, 8, 1] and not Path("results.csv").exists()


@pytest.mark.parametrize("text, classes, words", [
    ("ខ្ញុំ a b", "ab", "does not know 2"), ("mail", "👍👎", "rename")])
def test_a_mistake_ends_in_one_line_without_a_row(text, classes, words, model_dir, run):
    write_csv("mail.csv", [(f"{text} {chr(97 + n % 26)}", classes[n % 9 == 8]) for n in range(90)])
    message, rows = run(model_dir("llama"), "--csv mail.csv")
    assert message.startswith("error: ") and words in message and not rows


@pytest.mark.parametrize("kind, changes, words, precision", [
    ("openai-gpt", {}, "no cache", "bf16"),
    ("bert", {}, "is masked: use run_experiment.py", "float32"),
    ("llama", {"is_causal": False}, "not causal", "bf16"),
    ("llama", {"saved_as": t.LlamaModel}, "output layer", "float32"),
    ("gpt2", {"initializer_range": 1e30}, "not finite", "float32")])
def test_a_model_that_cannot_serve_is_refused(kind, changes, words, precision, byte_model, run):
    message, rows = run(byte_model(kind, **changes),
                        f"--max-length 900 --precision {precision} --adapters kept")
    assert message.startswith("error: ") and words in message and not rows
