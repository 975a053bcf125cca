"""run_zero_shot.py: prompts as the paper prints them, scores and training against transformers' and peft's own, and
unit.json against what the model really saw."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import peft
import pytest
import safetensors
import tokenizers as tk
import torch
import transformers as t

from conftest import ROOT, load_script

CLASSES, NEWS = ["World", "Sports", "Business", "Sci/Tech"], {"about": "a news article", "answer": "its topic"}
TEXTS = ["US Electoral College withstands critics ... so far (AFP)", "Voters in Hungary decide referenda", "Fans rush"]
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
GROUPED = SIZE | {"intermediate_size": 64, "num_key_value_heads": 2}
KINDS = {
    "llama": (t.LlamaConfig, t.LlamaForCausalLM, GROUPED),
    "sliding": (t.MistralConfig, t.MistralForCausalLM, GROUPED | {"sliding_window": 40}),
    "gpt2": (t.GPT2Config, t.GPT2LMHeadModel, SIZE),
    "opt": (t.OPTConfig, t.OPTForCausalLM, SIZE | {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "bloom": (t.BloomConfig, t.BloomForCausalLM, SIZE),
    "rwkv": (t.RwkvConfig, t.RwkvForCausalLM, {"hidden_size": 32, "num_hidden_layers": 2}),
}


@pytest.fixture(scope="session")
def zero():
    return load_script("run_zero_shot")


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """byte_model(kind) -> folder of a random model whose tokens are bytes: what it saw can be decoded and counted."""

    def make(kind, merges=(), **changes):
        vocabulary = [*sorted(tk.pre_tokenizers.ByteLevel.alphabet()), "<end>", *("".join(pair) for pair in merges)]
        tokenizer = tk.Tokenizer(tk.models.BPE({c: i for i, c in enumerate(vocabulary)}, list(merges)))
        tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tk.decoders.ByteLevel()
        folder, (config, model, size) = tmp_path_factory.mktemp(kind), KINDS[kind]
        t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256)
        torch.manual_seed(0)
        model(config(**size | ids | {"vocab_size": len(vocabulary)} | changes)).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def load(zero, byte_model):
    """load(kind, quantize, precision) -> (folder, the script's network on it with a fresh adapter)."""

    def call(kind, quantize="none", precision="float32", **changes):
        folder = byte_model(kind, **changes)
        model = {"folder": folder, "gguf": None, "name": kind, "tokenizer": t.AutoTokenizer.from_pretrained(folder)}
        net = zero.load_adapted(model, {"quantize": quantize, "precision": precision}, "cpu")
        zero.fresh_adapter(net, 5)
        return folder, net

    return call


@pytest.fixture
def run(zero, benchmark_csv, tmp_path, monkeypatch, capsys):
    """run(model folder, flags...) -> (exit status, rows, stdout, stderr) of main() in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(model, *flags):
        ours = ["--csv", benchmark_csv, "--about", "a remark", "--answer", "its subject", "--m", 3, "--n", 9,
                "--subsamples", 1, "--workers", 1, "--threads", 1, "--device", "cpu", "--model", model]
        status, _ = 0, capsys.readouterr()  # what making the models printed
        try:
            zero.run_script(zero.main, [str(flag) for flag in (*ours, *flags)])
        except SystemExit as end:
            status = end.code
        return status, rows_of("results.csv") if os.path.exists("results.csv") else [], *capsys.readouterr()

    return call


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path, lines):
    with open(path, "w", encoding="utf-8") as file:
        file.write("text,label\n" + "".join(f"{text},{label}\n" for text, label in lines))


# Prompts: typed from the paper's appendix G (its line breaks inside a text are the page's) ----------------------

HEAD = ("Your task is to classify a given text as one of these categories:\nWorld\nSports\nBusiness\nSci/Tech\n\n"
        "The text is a news article. Answer with its topic.")


@pytest.fixture
def strings(zero, byte_model):
    tokenizer = t.AutoTokenizer.from_pretrained(byte_model("gpt2"))

    def call(pack=1, answers=False, texts=TEXTS, max_length=9999):
        unit = {"recipe": {"pack": pack, "answers": answers, "max_length": max_length}, "classes": CLASSES,
                "spec": NEWS, "texts": {"test": texts}, "labels": {"test": np.arange(len(texts))}}
        return zero.arm_strings({"tokenizer": tokenizer}, unit, "test")

    return call


def test_prompts_are_the_papers_character_for_character(strings):
    prompts = [HEAD + "\n\n### Text: US Electoral College withstands critics ... so far (AFP)\n### Answer:",
               HEAD + "\n\n### Text: Voters in Hungary decide referenda\n### Answer:",
               HEAD + "\n\n### Text: Fans rush\n### Answer:"]
    assert strings()["sequences"] == strings()["prompts"] == prompts
    padded, packed = strings(answers=True), strings(pack=2)
    assert padded["prompts"] == packed["prompts"] == prompts and padded["sequences"][1] == prompts[1] + " Sports"
    assert packed["sequences"] == [
        HEAD + "\n\n### Text: US Electoral College withstands critics ... so far (AFP)"
        "\n\n### Text: Voters in Hungary decide referenda",
        HEAD + "\n\n### Text: Fans rush"]
    assert strings(pack=2, answers=True)["sequences"] == [
        HEAD + "\n\n### Text: US Electoral College withstands critics ... so far (AFP)\n### Answer: World"
        "\n\n### Text: Voters in Hungary decide referenda\n### Answer: Sports",
        HEAD + "\n\n### Text: Fans rush\n### Answer: Business"]


def test_long_texts_are_cut_and_nothing_else(strings):
    long = ["x" * 5000, "short", "y" * 70]
    assert strings(texts=long)["examples"][0] == f"### Text: {'x' * 1000}\n### Answer:"  # the paper's cut
    frame = len(HEAD) + len("\n\n### Text: \n### Answer:") + len(" Sci/Tech") + 1  # bytes are tokens
    cut = strings(answers=True, texts=long, max_length=frame + 60)
    assert cut["examples"] == [f"### Text: {'x' * 60}\n### Answer: World", "### Text: short\n### Answer: Sports",
                               f"### Text: {'y' * 60}\n### Answer: Business"]
    assert cut["prompts"][2] == f"{HEAD}\n\n### Text: {'y' * 60}\n### Answer:"
    frame = len(HEAD) + 3 * len("\n\n### Text: ") + len(" Sci/Tech") + 1
    packed = strings(pack=3, texts=long, max_length=frame + 60 + 5 + 60)
    assert packed["examples"] == [f"### Text: {text}" for text in ("x" * 60, "short", "y" * 60)]


# A run against its unit.json, the model's inputs and a plain loop ------------------------------------------------


def plain_scores(model, tokenizer, prompts, classes):
    """An uncached pass per prompt and class: mean log-probabilities of the classes' tokens, normalised over classes."""
    means = np.empty((len(prompts), len(classes)))
    for i, prompt in enumerate(prompts):
        for k, name in enumerate(classes):
            start, ids = len(tokenizer(prompt)["input_ids"]), tokenizer(f"{prompt} {name}")["input_ids"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].double()
            means[i, k] = np.mean([logits[at - 1].log_softmax(0)[ids[at]].item() for at in range(start, len(ids))])
    return means - np.log(np.exp(means).sum(1, keepdims=True))


def check_form(unit):
    """The contract of unit.json."""
    for arm, step in (("extra", unit["pack"]), ("test", unit["pack"])):
        found, head = unit[arm], unit["instruction"]
        joined = ["\n\n".join([head, *found["examples"][at : at + step]]) for at in range(0, 9, step)]
        assert found["sequences"] == joined and len(found["examples"]) == 9
        for example, prompt, label in zip(found["examples"], found["prompts"], found["labels"], strict=True):
            end = f"\n### Answer: {unit['classes'][label]}" if unit["answers"] else "" if step > 1 else "\n### Answer:"
            assert example.startswith("### Text: ") and example.endswith(end) and ("### Answer" in example) == bool(end)
            assert prompt.startswith(f"{head}\n\n### Text: ") and prompt.endswith("\n### Answer:")


def check_seen(unit, trained, scored):
    """Decoded inputs: in training every sequence once; in scoring, by each of three models, of both sets, the instruction,
    then prompt by prompt its rest and the class names behind it, but their last byte, which predicts nothing ("!" is the
    padding)."""
    assert sorted(trained) == sorted(unit["extra"]["sequences"] + unit["test"]["sequences"])
    scored, names = iter(scored), [f" {name}"[:-1] for name in unit["classes"]]
    for name in ("test", "extra") * 3:
        begin = next(scored)
        assert begin.startswith(unit["instruction"])
        for prompt in unit[name]["prompts"]:
            assert begin + next(scored) == prompt and [next(scored).rstrip("!") for _ in names] == names
    assert next(scored, None) is None


@pytest.mark.parametrize("kind, flags", [
    ("llama", ["--answers"]), ("gpt2", ["--pack"]), ("opt", []), ("sliding", ["--pack", "--answers"]), ("bloom", [])])
def test_a_run_is_what_its_files_say(kind, flags, zero, byte_model, run, tmp_path, monkeypatch, benchmark_csv):
    folder, seen, load_adapted = byte_model(kind), {True: [], False: []}, zero.load_adapted
    tokenizer = t.AutoTokenizer.from_pretrained(folder)

    def watched(*args):
        net = load_adapted(*args)
        net.model.register_forward_pre_hook(lambda module, args, kwargs: seen[module.training].extend(
            tokenizer.batch_decode(kwargs["input_ids"].tolist())), with_kwargs=True)
        return net

    monkeypatch.setattr(zero, "load_adapted", watched)
    length = 640 if "--pack" in flags else 165  # so short that texts are cut
    status, (row,), _, err = run(folder, "--adapters", "kept", "--predictions", "kept", "--max-length", length,
                                 "--pretrain-lr", 0.02, *flags)
    (predictions,) = (tmp_path / "kept").glob("*.csv")
    unit = json.loads((predictions.with_suffix("") / "unit.json").read_text())
    assert status == 0 and {name: str(value) for name, value in unit["row"].items()} == row, err
    assert min(len(example) for example in unit["test"]["examples"]) < 60  # some are cut
    check_form(unit)
    check_seen(unit, seen[True], seen[False])

    lines, predicted = rows_of(benchmark_csv), {}
    for line in rows_of(predictions):
        predicted.setdefault((line["arm"], line["set"]), []).append(line)
    assert len(predicted) == 6
    passes = []
    for (arm, name), mine in predicted.items():
        labels = np.array(unit[name]["labels"])
        for prompt, label, line in zip(unit[name]["prompts"], labels, mine, strict=True):
            whole = lines[int(line["row"])]
            assert whole["text"].startswith(prompt.split("### Text: ")[1].removesuffix("\n### Answer:"))
            assert whole["label"] == unit["classes"][label] and int(line["label"]) == label
        model = t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model = model if arm == "base" else peft.PeftModel.from_pretrained(model, predictions.with_suffix("") / arm)
        expected = plain_scores(model, tokenizer, unit[name]["prompts"], unit["classes"])
        found = [[float(line[f"p{k}"]) for k in range(3)] for line in mine]
        np.testing.assert_allclose(found, np.exp(expected), atol=2e-5)
        guess, f1 = expected.argmax(1), []
        for k in range(3):
            total = (guess == k).sum() + (labels == k).sum()
            f1.append(2 * ((guess == k) & (labels == k)).sum() / total if total else 0)
        ending = {"test": "", "extra": "_on_extra"}[name]
        assert float(row[f"acc_{arm}{ending}"]) == (guess == labels).mean()
        assert float(row[f"f1_{arm}{ending}"]) == pytest.approx(np.mean(f1))
        assert float(row[f"nll_{arm}{ending}"]) == pytest.approx(-expected[np.arange(9), labels].mean(), abs=2e-5)
        passes.append(expected)
    assert min(np.abs(a - b).max() for a, b in zip(passes, passes[2:])) > 0.01  # three different models


def test_a_token_that_class_and_prompt_share_is_scored(zero, byte_model):
    """A tokenizer that joins the prompt's last character, the blank and the class's first: ':' + ' W' is one token."""
    folder = byte_model("llama", merges=[(":", "Ġ"), (":Ġ", "W")])
    model, tokenizer = t.AutoModelForCausalLM.from_pretrained(folder).eval(), t.AutoTokenizer.from_pretrained(folder)
    net = zero.Adapted(model, tokenizer, torch.device("cpu"), None, True, False)
    prompts = ["Sort.\n### Text: rain\n### Answer:", "Sort.\n### Text: a goal\n### Answer:"]
    found, means = zero.score_classes(net, prompts, ["World", "of"]), np.empty((2, 2))
    for i, prompt in enumerate(prompts):
        for k, tokens in enumerate([[":ĠW", "o", "r", "l", "d"], [":Ġ", "o", "f"]]):
            ids = tokenizer(f"{prompt} {['World', 'of'][k]}")["input_ids"]
            start, logs = len(ids) - len(tokens), model(input_ids=torch.tensor([ids])).logits[0].log_softmax(1)
            assert tokenizer.convert_ids_to_tokens(ids[start:]) == tokens
            means[i, k] = np.mean([logs[at - 1, ids[at]].item() for at in range(start, len(ids))])
    np.testing.assert_allclose(found, means - np.log(np.exp(means).sum(1, keepdims=True)), atol=1e-5)


# Training --------------------------------------------------------------------------------------------------------


def test_mistral_7b_gets_the_papers_number_of_new_parameters(zero):
    config = t.MistralConfig(vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                             num_attention_heads=32, num_key_value_heads=8)
    with torch.device("meta"):
        model = peft.get_peft_model(t.MistralForCausalLM(config), zero.lora_config())
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == 41_943_040


@pytest.mark.parametrize("kind, most, long, clip", [
    ("llama", 0, 512, 1.0), ("gpt2", 90, 20, 1.0), ("gpt2", 999, 512, 1e9)])
def test_pretraining_is_that_of_peft_and_a_plain_loop(kind, most, long, clip, zero, load, monkeypatch):
    """In float64 without dropout: last loss and all weights. Gradients of single sequences, of some or of whole batches
    (`most` tokens) are added up; activations are kept, or computed twice (from `long` tokens on)."""
    monkeypatch.setattr(zero, "CLIP_NORM", clip)
    texts = [f"{'word ' * n}end {n}" for n in (3, 9, 1, 6, 12, 2, 5)]
    monkeypatch.setattr(zero, "GROUP_TOKENS", {"cpu": most})
    monkeypatch.setattr(zero, "LONG_SEQUENCE", long)
    folder, net = load(kind)
    net.model.double()
    for module in net.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    start = {name: weight.clone() for name, weight in net.model.state_dict().items()}
    loss = zero.train_adapter(net, texts, {"epochs": 2, "batch_size": 3, "learning_rate": 0.01}, 7)

    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    other = peft.get_peft_model(t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), config).eval()
    other.load_state_dict(start)
    weights = [weight for weight in other.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.01, weight_decay=0.0)
    schedule, order = t.get_linear_schedule_with_warmup(optimizer, 0, 6), np.random.default_rng([7, 0])
    for _ in range(2):
        losses = []
        for rows in np.split(order.permutation(7), [3, 6]):
            ids = [torch.tensor(net.tokenizer(texts[row])["input_ids"]) for row in rows]
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], True)
            ids = torch.nn.utils.rnn.pad_sequence(ids, True)
            step = other(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            step.backward()
            torch.nn.utils.clip_grad_norm_(weights, clip)
            optimizer.step(), schedule.step(), optimizer.zero_grad()
            losses += [step.item()] * (int(mask.sum()) - len(rows))
    assert loss == pytest.approx(np.mean(losses), rel=1e-6)
    trained = net.model.state_dict()
    for name, weight in other.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(trained[name], start[name]) == ("lora_" not in name)  # nothing but the adapter changes


@pytest.mark.parametrize("kind, quantize, precision", [("llama", "nf4", "bf16"), ("gpt2", "none", "fp16")])
def test_nf4_and_fp16_train_and_score_like_float32(kind, quantize, precision, zero, load, monkeypatch):
    recipe, found, norms = {"epochs": 6, "batch_size": 2, "learning_rate": 0.01}, [], []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: norms.append(float(clip(*args))))
    wide = {"hidden_size": 128, "initializer_range": 0.05} if kind == "llama" else {}
    for settings in ((quantize, precision), ("none", "float32")):
        _, net = load(kind, *settings, **wide)
        losses = [zero.train_adapter(net, TEXTS, recipe, 1) for _ in range(2)]
        found.append([*losses, *zero.score_classes(net, TEXTS, CLASSES).ravel()])
        assert any(type(module).__name__ == "Linear4bit" for module in net.model.modules()) == (settings[0] == "nf4")
    assert np.isfinite(found).all() and found[0][1] < found[0][0] - 0.1 and found[0] != found[1]  # it learns
    np.testing.assert_allclose(found[0][:2], found[1][:2], atol=0.4)
    assert norms[0] == pytest.approx(norms[len(norms) // 2], rel=0.2)  # unscaled before it is clipped


def test_a_step_whose_fp16_gradients_overflow_is_skipped(zero, load):
    _, net = load("gpt2", precision="fp16")
    start = {name: weight.clone() for name, weight in net.model.state_dict().items()}
    for weight in net.model.parameters():
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient * np.inf)
    zero.train_adapter(net, TEXTS, {"epochs": 1, "batch_size": 3, "learning_rate": 0.1}, 1)
    assert all(torch.equal(weight, start[name]) for name, weight in net.model.state_dict().items())


@pytest.mark.parametrize("capability, precision", [((7, 5), "fp16"), ((8, 0), "bf16")])
def test_nf4_computes_in_what_the_card_can(capability, precision, zero, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    args, task = zero.parse_args(["--quantize", "nf4"]), {"classes": CLASSES, "spec": NEWS}
    model = {"like": "smollm2", "name": "smollm2", "context": 64, "weights": ""}
    recipe = zero.prompt_recipe(zero.load_registry(), "cuda", args, model, task)
    assert recipe["precision"] == precision


# Runs ------------------------------------------------------------------------------------------------------------


def test_arms_of_the_same_texts_get_the_same_numbers(byte_model, run):
    """Common random numbers, with dropout: extra and test are the same sequences in the same order."""
    write_csv("same.csv", [("the same text", "ab"[n % 2]) for n in range(60)])
    status, (row,), _, _ = run(byte_model("gpt2"), "--csv", "same.csv", "--pretrain-lr", 0.02)
    assert status == 0 and row["nll_base"] != row["nll_extra"]
    assert [row["loss_extra"], row["nll_extra"]] == [row["loss_test"], row["nll_test"]]


def test_a_run_goes_on_and_leaves_kept_units_alone(zero, byte_model, run, tmp_path, monkeypatch):
    folder = byte_model("gpt2")
    _, first, _, _ = run(folder)
    status, rows, out, _ = run(folder, "--subsamples", 2, "--adapters", "kept")
    assert status == 0 and rows[:1] == first and len(rows) == 2
    assert [path.parent.name[-8:] for path in (tmp_path / "kept").glob("*/unit.json")] == ["k2.seed0"]
    run(folder, "--first-subsample", 2, "--out", "alone.csv")
    assert rows_of("alone.csv") == [{**rows[1], "seconds": rows_of("alone.csv")[0]["seconds"]}]
    for flags, words in ((["--pretrain-epochs", 2], "with recipe"), (["--about", "a tweet"], "with recipe"),
                         (["--out", "new.csv", "--first-subsample", 2, "--adapters", "kept",
                           "--pretrain-lr", 1], "of another recipe")):
        status, again, _, err = run(folder, *flags)
        assert status == 2 and words in err and err.count("\n") == 1 and again == rows and not os.path.exists("new.csv")
    for text in (json.dumps({"row": rows[1] | {"data": "other"}}), "{}", "torn"):
        (next((tmp_path / "kept").glob("*.k2.*")) / "unit.json").write_text(text)
        status, _, _, err = run(folder, "--first-subsample", 2, "--adapters", "kept")
        assert status == 2 and "other data" in err and err.count("\n") == 1
    with monkeypatch.context() as patch:
        patch.setattr(zero, "train_adapter", lambda *_: signal.raise_signal(signal.SIGINT))
        status, _, _, err = run(folder, "--subsamples", 2, "--adapters", "kept", "--overwrite", "--pretrain-epochs", 2)
    assert status == 130 and err.count("\n") == 1 and not list((tmp_path / "kept").glob("*/unit.json"))
    forms = {"packed": ["--pack"], "answers": ["--answers"], "packed-answers": ["--pack", "--answers"]}
    for name, flags in forms.items():
        assert run(folder, *flags)[1][-1]["experiment"] == f"zero-shot-{name}"


def test_show_prompts_shows_a_short_task(run):
    write_csv("short.csv", [("rain again", "wet"), ("no clouds", "dry")])
    status, _, out, _ = run("no model", "--csv", "short.csv", "--show-prompts", "--answers", "--out", "none.csv")
    head = "one of these categories:\ndry\nwet\n\nThe text is a remark. Answer with its subject.\n\n### Text: "
    assert status == 0 and out.count(head) == 2 and not os.path.exists("none.csv")
    assert out.count("rain again\n### Answer: wet") + out.count("no clouds\n### Answer: dry") == 3


def test_answers_raise_acc_test_the_positive_control(zero, run, monkeypatch):
    """The labels are coin flips: nothing is to be learnt from `extra`; with its answers, `test` is learnt by heart. The
    model has a vocabulary of words, so that few tokens of a prompt are not the text or its answer."""
    words = "river stone green paper quick north salt window apple seven music cold".split()
    rng = np.random.default_rng(0)
    write_csv("coins.csv", [(" ".join(rng.choice(words, 3)), rng.choice(["heads", "tails"])) for _ in range(80)])
    prompt = zero.instruction(["heads", "tails"], {"about": "a remark", "answer": "its subject"}) + " ### Text: Answer"
    vocabulary = ["<end>", "?", *words, *dict.fromkeys(re.findall(r"\w+|[^\w\s]+", prompt))]
    tokenizer = tk.Tokenizer(tk.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = tk.pre_tokenizers.Whitespace()
    t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained("tiny")
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": len(vocabulary), "initializer_range": 0.1}
    t.LlamaForCausalLM(t.LlamaConfig(**GROUPED | size | {"bos_token_id": 0, "eos_token_id": 0})).save_pretrained("tiny")
    monkeypatch.setattr(zero, "GROUP_TOKENS", {"cpu": 4096})  # a step at once, as on a GPU: three times as fast
    flags = ["--csv", "coins.csv", "--n", 24, "--answers", "--pretrain-epochs", 40, "--pretrain-lr", 0.01, "--subsamples", 3]
    status, rows, _, _ = run("tiny", *flags)
    acc = {name: np.array([float(row[f"acc_{name}"]) for row in rows]) for name in ("test", "extra", "test_on_extra", "extra_on_extra")}
    plain = acc["test"] - acc["extra"]
    crossed = (plain + acc["extra_on_extra"] - acc["test_on_extra"]) / 2
    assert status == 0 and len(rows) == 3 and acc["test"].min() >= 0.9 and plain.min() >= 0.2 and crossed.min() >= 0.2


@pytest.mark.parametrize("flags, words", [
    (["--max-length", 30], "without its text"), (["--pack", "--batch-size", 2], "leave one of the two out"),
    (["--model", "smollm2", "--quantize", "nf4"], "GGUF"), (["--adapters", "file/kept"], "Not a directory"),
    (["--pretrain-lr", "1e30", "--batch-size", 1], "arm extra"), (["--m", 2], "m = 2")])
def test_a_mistake_ends_in_one_line_before_a_row_is_written(flags, words, byte_model, run, tmp_path):
    (tmp_path / "file").write_text("")
    status, rows, _, err = run(byte_model("gpt2"), *flags)
    assert status == 2 and words in err and err.count("\n") == 1 and not rows


def test_a_full_disk_under_an_adapter_ends_in_one_line(byte_model, run, monkeypatch):
    def full(*_, **__):
        raise safetensors.SafetensorError("No space left on device (os error 28)")  # what it raises there, no OSError

    monkeypatch.setattr(peft.PeftModel, "save_pretrained", full)
    status, rows, _, err = run(byte_model("gpt2"), "--adapters", "kept")
    assert status == 2 and "No space left" in err and err.count("\n") == 1 and not rows


def test_a_pack_of_the_longest_answers_must_fit(byte_model, run):
    """Found before anything is trained, though the first texts have short ones."""
    write_csv("long.csv", [(f"mail {n}", "x" * 60 if n % 9 == 8 else "ab"[n % 2]) for n in range(90)])
    flags = ["--csv", "long.csv", "--pack", "--answers", "--max-length", 530]
    status, rows, _, err = run(byte_model("gpt2"), *flags)
    assert status == 2 and "without its text" in err and not rows


def test_models_that_cannot_serve_are_refused(byte_model, model_dir, run, tmp_path):
    twin, broken = shutil.copytree(byte_model("gpt2"), tmp_path / "twin"), byte_model("llama")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    for models, words in (([model_dir("bert")], "masked"), ([byte_model("rwkv")], "no cache"),
                          ([byte_model("gpt2", n_positions=60)], "without its text"), ([broken], "do not fit"),
                          ([twin, shutil.copytree(twin, tmp_path / "other" / "twin")], "rename a folder")):
        status, rows, _, err = run(*models)
        assert status == 2 and words in err and err.count("\n") == 1 and not rows, err


@pytest.mark.parametrize("classes, words", [(["Spam", "spam"], "alike"), (["fine", "\u200b"], "no tokens")])
def test_class_names_must_have_tokens_of_their_own(classes, words, model_dir, run):
    """bert-tiny's tokenizer knows no capitals and drops what cannot be seen."""
    write_csv("mail.csv", [(f"mail {n}", classes[n % 2]) for n in range(60)])
    status, rows, _, err = run(model_dir("llama"), "--csv", "mail.csv")
    assert status == 2 and words in err and err.count("\n") == 1 and not rows


def test_pasted_into_a_notebook_cell_it_runs(byte_model, benchmark_csv, tmp_path):
    shutil.copy(ROOT / "tasks.json", tmp_path)
    flags = ["--csv", str(benchmark_csv), "--model", str(byte_model("gpt2")), "--m", "3", "--n", "6"]
    cell = f"space = {{}}\nexec(open({str(ROOT / 'run_zero_shot.py')!r}).read(), space)\nspace['main']({flags!r})"
    done = subprocess.run([sys.executable, "-c", cell], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and len(rows_of(tmp_path / "results.csv")) == 2, done.stderr
