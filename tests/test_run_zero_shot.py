"""run_zero_shot.py: prompts as the paper prints them, scores and training against transformers' and peft's own, and that
unit.json holds what the model really saw."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers as t

from conftest import ROOT, load_script

CLASSES = ["World", "Sports", "Business", "Sci/Tech"]
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
        "initializer_range": 0.3}
KINDS = {
    "llama": (t.LlamaConfig, t.LlamaForCausalLM, SIZE),
    "sliding": (t.MistralConfig, t.MistralForCausalLM, SIZE | {"sliding_window": 40}),
    "gpt2": (t.GPT2Config, t.GPT2LMHeadModel, {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
    "opt": (t.OPTConfig, t.OPTForCausalLM, {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4,
                                            "word_embed_proj_dim": 32, "init_std": 0.3, "pad_token_id": 256}),
    "bloom": (t.BloomConfig, t.BloomForCausalLM, {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
    "mamba": (t.MambaConfig, t.MambaForCausalLM, {"hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 256}),
}


@pytest.fixture(scope="session")
def zero():
    return load_script("run_zero_shot")


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """byte_model(kind) -> folder of a random model that reads a byte as a token: what it saw can be decoded, cuts counted."""
    import tokenizers

    def make(kind, merges=(), **changes):
        vocabulary = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "<end>", *("".join(pair) for pair in merges)]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(vocabulary)}, list(merges)))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        folder = tmp_path_factory.mktemp(kind)
        t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
        config, model, size = KINDS[kind]
        torch.manual_seed(0)
        size = size | {"vocab_size": len(vocabulary), "bos_token_id": 256, "eos_token_id": 256} | changes
        model(config(**size)).save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def run(zero, benchmark_csv, tmp_path, monkeypatch, capsys):
    """run(model folder, flags...) -> (exit status, rows, stdout, stderr) of main() in an empty folder; a flag given again wins."""
    monkeypatch.chdir(tmp_path)
    zero.LOADED.clear()

    def call(model, *flags):
        ours = ["--csv", benchmark_csv, "--m", 3, "--n", 9, "--subsamples", 1, "--workers", 1, "--threads", 1, "--device", "cpu",
                "--about", "a remark", "--answer", "its subject", "--model", model]
        status = 0
        try:
            with zero.guard():
                zero.main([str(flag) for flag in (*ours, *flags)])
        except SystemExit as end:
            status = end.code
        return status, rows_of("results.csv") if os.path.exists("results.csv") else [], *capsys.readouterr()

    return call


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def units_of(folder):
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/unit.json"))]


# Prompts -----------------------------------------------------------------------------------------------------

# Typed from the paper's appendix G (its line breaks inside a text are the page's).
HEAD = ("Your task is to classify a given text as one of these categories:\nWorld\nSports\nBusiness\nSci/Tech\n\n"
        "The text is a news article. Answer with its topic.")
TEXTS = ["US Electoral College withstands critics ... so far (AFP)", "Voters in Hungary decide referenda", "Fans rush to create mods"]


def strings(zero, folder, pack=1, answers=False, texts=TEXTS, max_length=9999):
    model = {"tokenizer": t.AutoTokenizer.from_pretrained(folder)}
    unit = {"recipe": {"pack": pack, "answers": answers, "max_length": max_length}, "classes": CLASSES, "texts": {"test": texts},
            "labels": {"test": np.arange(len(texts))}, "spec": {"about": "a news article", "answer": "its topic"}}
    return zero.arm_strings(model, unit, "test")


def test_prompts_are_the_papers_character_for_character(zero, byte_model):
    folder = byte_model("gpt2")
    prompts = [HEAD + "\n\n### Text: US Electoral College withstands critics ... so far (AFP)\n### Answer:",
               HEAD + "\n\n### Text: Voters in Hungary decide referenda\n### Answer:",
               HEAD + "\n\n### Text: Fans rush to create mods\n### Answer:"]
    assert strings(zero, folder)["sequences"] == strings(zero, folder)["prompts"] == prompts
    padded = strings(zero, folder, answers=True)
    assert padded["prompts"] == prompts and padded["sequences"][1] == prompts[1] + " Sports"
    packed = strings(zero, folder, pack=2)
    assert packed["prompts"] == prompts and packed["sequences"] == [
        HEAD + "\n\n### Text: US Electoral College withstands critics ... so far (AFP)\n\n### Text: Voters in Hungary decide referenda",
        HEAD + "\n\n### Text: Fans rush to create mods"]
    assert strings(zero, folder, pack=2, answers=True)["sequences"] == [
        HEAD + "\n\n### Text: US Electoral College withstands critics ... so far (AFP)\n### Answer: World"
        "\n\n### Text: Voters in Hungary decide referenda\n### Answer: Sports",
        HEAD + "\n\n### Text: Fans rush to create mods\n### Answer: Business"]


def test_long_texts_are_cut_and_nothing_else(zero, byte_model):
    folder, long = byte_model("gpt2"), ["x" * 5000, "short", "y" * 70]
    assert strings(zero, folder, texts=long)["examples"][0] == f"### Text: {'x' * 1000}\n### Answer:"  # the paper's cut
    frame = len(HEAD) + len("\n\n### Text: \n### Answer:") + len(" Sci/Tech") + 1  # bytes are tokens
    cut = strings(zero, folder, answers=True, texts=long, max_length=frame + 60)
    assert cut["examples"] == [f"### Text: {text}\n### Answer: {name}" for text, name in zip(("x" * 60, "short", "y" * 60), CLASSES)]
    assert cut["prompts"][2] == f"{HEAD}\n\n### Text: {'y' * 60}\n### Answer:"
    frame = len(HEAD) + 3 * len("\n\n### Text: ") + len(" Sci/Tech") + 1
    packed = strings(zero, folder, pack=3, texts=long, max_length=frame + 5 + 60 + 60)
    assert packed["examples"] == [f"### Text: {text}" for text in ("x" * 60, "short", "y" * 60)]


# Scores ------------------------------------------------------------------------------------------------------


def plain_scores(model, tokenizer, prompts, classes):
    """One uncached pass per prompt and class: the mean log-probability of the class's tokens, as log-probabilities over classes."""
    means = np.empty((len(prompts), len(classes)))
    for i, prompt in enumerate(prompts):
        for k, name in enumerate(classes):
            start, ids = len(tokenizer(prompt)["input_ids"]), tokenizer(f"{prompt} {name}")["input_ids"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].double()
            means[i, k] = np.mean([torch.log_softmax(logits[at - 1], 0)[ids[at]].item() for at in range(start, len(ids))])
    return means - np.log(np.exp(means).sum(1, keepdims=True))


@pytest.mark.parametrize("kind, flags", [("llama", []), ("gpt2", ["--pack"]), ("opt", ["--answers"]), ("sliding", []), ("bloom", [])])
def test_a_runs_numbers_are_those_of_its_kept_adapters_in_a_plain_loop(kind, flags, byte_model, run, tmp_path):
    import peft

    folder = byte_model(kind)
    status, (row,), _, err = run(folder, "--adapters", "kept", "--predictions", "kept", "--pretrain-lr", 0.02, *flags)
    (unit,), (predictions,) = units_of(tmp_path / "kept"), (tmp_path / "kept").glob("*.csv")
    assert status == 0 and {name: str(value) for name, value in unit["row"].items()} == row, err
    labels, tokenizer, seen = np.array(unit["test"]["labels"]), t.AutoTokenizer.from_pretrained(folder), []
    for arm in ("base", "extra", "test"):
        model = t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if arm != "base":
            model = peft.PeftModel.from_pretrained(model, predictions.with_suffix("") / arm)
        expected = plain_scores(model, tokenizer, unit["test"]["prompts"], unit["classes"])
        mine = [line for line in rows_of(predictions) if line["arm"] == arm]
        found = np.array([[float(line[f"p{k}"]) for k in range(3)] for line in mine])
        np.testing.assert_allclose(found, np.exp(expected), atol=2e-5)
        assert [int(line["label"]) for line in mine] == labels.tolist()
        guess, f1 = expected.argmax(1), []
        for k in range(3):
            hits = ((guess == k) & (labels == k)).sum()
            f1.append(2 * hits / total if (total := (guess == k).sum() + (labels == k).sum()) else 0)
        assert float(row[f"acc_{arm}"]) == (guess == labels).mean() and float(row[f"f1_{arm}"]) == pytest.approx(np.mean(f1))
        assert float(row[f"nll_{arm}"]) == pytest.approx(-expected[np.arange(9), labels].mean(), abs=2e-5)
        seen.append(expected)
    assert min(np.abs(a - b).max() for a, b in zip(seen, seen[1:])) > 0.01  # three different models


def test_a_token_that_class_and_prompt_share_is_scored(zero, byte_model):
    """A tokenizer that joins the prompt's last character, the blank and the class's first: ':' + ' W' is one token."""
    folder = byte_model("llama", merges=[(":", "Ġ"), (":Ġ", "W")])
    model, tokenizer = t.AutoModelForCausalLM.from_pretrained(folder).eval(), t.AutoTokenizer.from_pretrained(folder)
    net = zero.Adapted(model, tokenizer, torch.device("cpu"), None, True, False)
    prompts = ["Sort.\n### Text: rain\n### Answer:", "Sort.\n### Text: a goal\n### Answer:"]
    found, means = zero.score_classes(net, prompts, ["World", "of"]), np.empty((2, 2))
    for i, prompt in enumerate(prompts):
        for k, name in enumerate(["World", "of"]):
            ids, tokens = tokenizer(f"{prompt} {name}")["input_ids"], [[":ĠW", "o", "r", "l", "d"], [":Ġ", "o", "f"]][k]
            start = len(ids) - len(tokens)
            assert tokenizer.convert_ids_to_tokens(ids[start:]) == tokens
            logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(1)
            means[i, k] = np.mean([logs[at - 1, ids[at]].item() for at in range(start, len(ids))])
    np.testing.assert_allclose(found, means - np.log(np.exp(means).sum(1, keepdims=True)), atol=1e-5)


# Training ----------------------------------------------------------------------------------------------------


def test_mistral_7b_gets_the_papers_number_of_new_parameters(zero):
    import peft

    config = t.MistralConfig(vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                             num_key_value_heads=8)
    with torch.device("meta"):
        model = peft.get_peft_model(t.MistralForCausalLM(config), zero.lora_config())
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == 41_943_040


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("most", [0, 150, 10_000])
def test_pretraining_is_that_of_peft_and_a_plain_loop(kind, most, zero, byte_model, monkeypatch):
    """Without dropout, in float64: the loss of the last epoch and every trained weight. `most`: one sequence at a time, some, all."""
    import peft

    folder, texts = byte_model(kind), [f"{'word ' * n}end {n}" for n in (3, 9, 1, 6, 12, 2, 5)]
    recipe = {"epochs": 2, "batch_size": 3, "learning_rate": 0.01}
    monkeypatch.setattr(zero, "LORA_DROPOUT", 0.0)
    monkeypatch.setattr(zero, "GROUP_TOKENS", {"cpu": most})
    model = {"folder": folder, "gguf": None, "name": kind, "tokenizer": t.AutoTokenizer.from_pretrained(folder)}
    net = zero.load_adapted(model, {"precision": "float32", "quantize": "none"}, "cpu")
    net.model.double()
    if kind == "gpt2":  # its own dropout too
        [setattr(module, "p", 0.0) for module in net.model.modules() if isinstance(module, torch.nn.Dropout)]
    zero.fresh_adapter(net, 5)
    start = {name: weight.clone() for name, weight in net.model.state_dict().items()}
    loss = zero.pretrain(net, texts, recipe, 7)

    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    other = peft.get_peft_model(t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), config).eval()
    other.load_state_dict(start)
    weights = [weight for weight in other.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.01, weight_decay=0.0)
    schedule = t.get_linear_schedule_with_warmup(optimizer, 0, 6)
    order = np.random.default_rng([7, 0])
    for _ in range(2):
        losses = []
        for rows in np.split(order.permutation(7), [3, 6]):
            labels = model["tokenizer"]([texts[row] for row in rows], padding=False)["input_ids"]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in labels], True, 0)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=int) for row in labels], True, 0)
            step = other(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
            step.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step(), schedule.step(), optimizer.zero_grad()
            losses.append((step.item(), int(mask.sum()) - len(rows)))
    assert loss == pytest.approx(sum(value * tokens for value, tokens in losses) / sum(tokens for _, tokens in losses), rel=1e-6)
    trained = net.model.state_dict()
    for name, weight in other.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(trained[name], start[name]) == ("lora_" not in name)  # nothing but the adapter changes


@pytest.mark.parametrize("kind, quantize, precision", [("llama", "nf4", "bf16"), ("gpt2", "none", "fp16"), ("llama", "none", "bf16")])
def test_nf4_bf16_and_fp16_train_and_score_like_float32(kind, quantize, precision, zero, byte_model):
    folder = byte_model(kind, **({"hidden_size": 128, "intermediate_size": 128} if kind == "llama" else {}))
    model = {"folder": folder, "gguf": None, "name": kind, "tokenizer": t.AutoTokenizer.from_pretrained(folder)}
    recipe = {"epochs": 6, "batch_size": 2, "learning_rate": 0.01}
    found = []
    for settings in ({"quantize": quantize, "precision": precision}, {"quantize": "none", "precision": "float32"}):
        net = zero.load_adapted(model, settings, "cpu")
        zero.fresh_adapter(net, 1)
        first = zero.pretrain(net, TEXTS, recipe, 1)
        found.append((first, zero.pretrain(net, TEXTS, recipe, 1), *zero.score_classes(net, TEXTS, CLASSES).ravel()))
    if quantize == "nf4":
        from bitsandbytes.nn import Linear4bit

        layers = [module for module in net.model.modules()]
        assert not any(isinstance(module, Linear4bit) for module in layers)
    low, full = np.array(found)
    assert np.isfinite(low).all() and low[1] < low[0] - 0.1  # it learns
    np.testing.assert_allclose(low[:2], full[:2], atol=0.4)
    assert not np.array_equal(low, full)


def test_a_step_whose_fp16_gradients_overflow_is_skipped(zero, byte_model):
    folder = byte_model("gpt2")
    model = {"folder": folder, "gguf": None, "name": "gpt2", "tokenizer": t.AutoTokenizer.from_pretrained(folder)}
    net = zero.load_adapted(model, {"precision": "fp16", "quantize": "none"}, "cpu")
    zero.fresh_adapter(net, 1)
    for parameter in net.model.parameters():
        parameter.register_hook(lambda gradient: gradient * np.inf) if parameter.requires_grad else None
    start = {name: weight.clone() for name, weight in net.model.state_dict().items()}
    zero.pretrain(net, TEXTS, {"epochs": 1, "batch_size": 3, "learning_rate": 0.1}, 1)
    assert all(torch.equal(weight, start[name]) for name, weight in net.model.state_dict().items())


@pytest.mark.parametrize("capability, precision", [((7, 5), "fp16"), ((8, 0), "bf16")])
def test_nf4_computes_in_what_the_card_can(capability, precision, zero, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    args = zero.parse_args(["--quantize", "nf4", "--pack"])
    model = {"like": "smollm2", "name": "smollm2", "context": 64, "weights": "w"}
    task = {"classes": CLASSES, "spec": {"about": "a text", "answer": "its topic"}}
    assert zero.prompt_recipe(zero.load_registry(), "cuda", args, model, task)["precision"] == precision


# Runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--pack"], ["--answers"], ["--pack", "--answers"]])
def test_unit_json_holds_what_the_model_saw(flags, zero, byte_model, run, tmp_path, monkeypatch, benchmark_csv):
    """Every sequence that ran in training mode, and the instruction, prompts and classes that ran behind it, decoded. The
    context is so short that texts are cut."""
    folder, seen = byte_model("gpt2"), {True: [], False: []}
    tokenizer, load = t.AutoTokenizer.from_pretrained(folder), zero.load_adapted

    def watched(*args):
        net = load(*args)
        hook = lambda module, args, kwargs: seen[module.training].extend(tokenizer.batch_decode(kwargs["input_ids"]))
        net.model.register_forward_pre_hook(hook, with_kwargs=True)
        return net

    monkeypatch.setattr(zero, "load_adapted", watched)
    status, (row,), _, err = run(folder, "--adapters", "kept", "--predictions", "kept", "--n", 12, "--max-length", 640 if "--pack" in flags else 160, *flags)
    (unit,) = units_of(tmp_path / "kept")
    assert status == 0 and "#" not in unit["instruction"], err
    for arm in ("extra", "test"):
        strings, step = unit[arm], unit["pack"]
        joined = ["\n\n".join([unit["instruction"], *strings["examples"][at : at + step]]) for at in range(0, 12, step)]
        assert strings["sequences"] == joined and len(strings["prompts"]) == len(strings["labels"]) == 12
        assert all(example.startswith("### Text: ") for example in strings["examples"])
        for example, prompt, label in zip(strings["examples"], strings["prompts"], strings["labels"]):
            end = f"\n### Answer: {unit['classes'][label]}" if unit["answers"] else "" if step > 1 else "\n### Answer:"
            assert example.endswith(end) and ("### Answer" in example) == bool(end)
            assert prompt.startswith(unit["instruction"] + "\n\n### Text: ") and prompt.endswith("\n### Answer:")
    lines, (predictions,) = rows_of(benchmark_csv), (tmp_path / "kept").glob("*.csv")
    whole = [lines[int(line["row"])] for line in rows_of(predictions)[:12]]
    texts = [prompt.split("### Text: ")[1].removesuffix("\n### Answer:") for prompt in unit["test"]["prompts"]]
    assert all(line["text"].startswith(text) for line, text in zip(whole, texts)) and len("".join(texts)) < 12 * 60
    assert [line["label"] for line in whole] == [unit["classes"][label] for label in unit["test"]["labels"]]
    assert sorted(seen[True]) == sorted(unit["extra"]["sequences"] + unit["test"]["sequences"])
    scored, prompts = iter(seen[False]), unit["test"]["prompts"]
    for _ in range(3):
        begin = next(scored)
        for prompt in prompts:
            assert begin + next(scored) == prompt
            for name in unit["classes"]:
                assert next(scored).rstrip("!") == f" {name}"[:-1]  # "!" is token 0, the padding; a last token predicts nothing
    assert next(scored, None) is None


def test_arms_of_the_same_texts_get_the_same_numbers(byte_model, run):
    """Common random numbers, with dropout: extra and test are the same sequences in the same order."""
    with open("same.csv", "w") as file:
        file.write("text,label\n" + "".join(f"the same text,{'ab'[n % 2]}\n" for n in range(60)))
    status, (row,), _, _ = run(byte_model("gpt2"), "--csv", "same.csv", "--pretrain-lr", 0.02)
    assert status == 0 and [row[f"{name}_extra"] for name in ("loss", "nll")] == [row[f"{name}_test"] for name in ("loss", "nll")]
    assert row["nll_base"] != row["nll_extra"]


def test_a_run_goes_on_and_says_which_rows_have_no_adapters(byte_model, run, tmp_path, benchmark_csv):
    folder = byte_model("gpt2")
    _, first, _, _ = run(folder)
    status, rows, out, _ = run(folder, "--subsamples", 2, "--adapters", "kept")
    assert status == 0 and rows[:1] == first and len(rows) == 2 and "1 finished rows have none" in out
    (unit,) = units_of(tmp_path / "kept")
    assert unit["row"]["subsample"] == 2
    _, alone, _, _ = run(folder, "--first-subsample", 2, "--out", "alone.csv")
    assert [{**row, "seconds": 0} for row in rows_of("alone.csv")] == [{**rows[1], "seconds": 0}]
    assert "finished rows have none" not in run(folder, "--first-subsample", 2, "--adapters", "kept")[2]
    for flags, words in ((["--pretrain-epochs", 2], "recipe"), (["--about", "a tweet"], "recipe"), (["--max-length", 200], "recipe"),
                         (["--out", "new.csv", "--first-subsample", 2, "--adapters", "kept", "--pretrain-lr", 1], "another --adapters")):
        status, again, _, err = run(folder, *flags)
        assert status == 2 and words in err and err.count("\n") == 1 and again == rows and not (tmp_path / "new.csv").exists()
    names = [run(folder, "--out", f"{n}.csv", *flags) and rows_of(f"{n}.csv")[0]["experiment"]
             for n, flags in enumerate((["--pack"], ["--answers"], ["--pack", "--answers"]))]
    assert names == ["zero-shot-packed", "zero-shot-answers", "zero-shot-packed-answers"]


def test_a_dry_run_keeps_its_row_and_show_prompts_shows_a_short_task(byte_model, run):
    status, rows, out, _ = run(byte_model("gpt2"), "--dry-run", "--subsamples", 3)
    assert status == 0 and len(rows) == 1 and "3 subsamples, 3 to run" in out and "hours" in out
    with open("short.csv", "w") as file:
        file.write("text,label\nrain again,wet\nno clouds,dry\n")
    status, rows, out, _ = run("no such model", "--csv", "short.csv", "--show-prompts", "--answers", "--out", "none.csv")
    head = ("Your task is to classify a given text as one of these categories:\ndry\nwet\n\nThe text is a remark. Answer with its subject."
            "\n\n### Text: ")
    assert status == 0 and out.count(head) == 2 and out.count("rain again\n### Answer: wet") + out.count("no clouds\n### Answer: dry") == 3
    assert not os.path.exists("none.csv")


def test_answers_raise_acc_test_the_positive_control(zero, run, monkeypatch):
    """The labels are coin flips, so nothing is to be learnt from `extra`; with its answers, `test` is learnt by heart.
    The model has a vocabulary of words, so that few tokens of a prompt are not the text or its answer."""
    import tokenizers

    rng, words = np.random.default_rng(0), "river stone green paper quick north salt window apple seven music cold".split()
    with open("coins.csv", "w") as file:
        file.write("text,label\n" + "".join(f"{' '.join(rng.choice(words, 3))},{rng.choice(['heads', 'tails'])}\n" for _ in range(80)))
    prompt = zero.instruction(["heads", "tails"], {"about": "a remark", "answer": "its subject"}) + "\n\n### Text: \n### Answer:"
    vocabulary = ["<end>", "?", *words, *dict.fromkeys(re.findall(r"\w+|[^\w\s]+", prompt))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained("tiny")
    torch.manual_seed(0)
    changes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": len(vocabulary), "bos_token_id": 0, "eos_token_id": 0}
    t.LlamaForCausalLM(t.LlamaConfig(**SIZE | changes | {"initializer_range": 0.1})).save_pretrained("tiny")
    monkeypatch.setattr(zero, "GROUP_TOKENS", {"cpu": 4096})  # a step's prompts at once, as on a GPU: three times as fast
    flags = ["--csv", "coins.csv", "--n", 24, "--answers", "--pretrain-epochs", 40, "--pretrain-lr", 0.01]
    status, (row,), _, _ = run("tiny", *flags)
    assert status == 0 and float(row["acc_test"]) >= 0.9 and float(row["acc_test"]) - float(row["acc_extra"]) >= 0.2


@pytest.mark.parametrize("flags, words", [
    (["--max-length", "30"], "without its text"),
    (["--pack", "--batch-size", "2"], "leave one of the two out"),
    (["--model", "smollm2", "--quantize", "nf4"], "GGUF"),
    (["--precision", "tf32"], "tf32"),
    (["--adapters", "topics.csv/kept"], "Not a directory"),
    (["--pretrain-lr", "1e30", "--batch-size", "1", "--pretrain-epochs", "3"], "arm extra"),
    (["--m", "2"], "m = 2")])
def test_a_mistake_ends_in_one_line_before_a_row_is_written(flags, words, byte_model, run, benchmark_csv, tmp_path):
    shutil.copy(benchmark_csv, "topics.csv")
    status, rows, _, err = run(byte_model("gpt2"), *flags)
    assert status == 2 and words in err and err.count("\n") == 1 and not rows


def test_models_that_cannot_serve_are_refused(byte_model, model_dir, run, tmp_path):
    twin = shutil.copytree(byte_model("gpt2"), tmp_path / "twin")
    short = byte_model("gpt2", n_positions=60)
    broken = byte_model("llama")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    for models, words in (([model_dir("bert")], "masked"), ([byte_model("mamba")], "no cache"), ([short], "without its text"),
                          ([twin, shutil.copytree(twin, tmp_path / "other" / "twin")], "same name"), ([broken], "do not fit its config")):
        status, rows, _, err = run(*models)
        assert status == 2 and words in err and err.count("\n") == 1 and not rows, err


@pytest.mark.parametrize("classes, words", [(["Spam", "spam"], "alike"), (["fine", "\u200b"], "no tokens")])
def test_class_names_must_have_tokens_of_their_own(classes, words, model_dir, run):
    """bert-tiny's tokenizer knows no capitals and drops what cannot be seen."""
    with open("mail.csv", "w", encoding="utf-8") as file:
        file.write("text,label\n" + "".join(f"mail {n},{classes[n % 2]}\n" for n in range(60)))
    status, rows, _, err = run(model_dir("llama"), "--csv", "mail.csv")
    assert status == 2 and words in err and err.count("\n") == 1 and not rows


def test_pasted_into_a_notebook_cell_it_runs(byte_model, benchmark_csv, tmp_path):
    shutil.copy(ROOT / "tasks.json", tmp_path)
    cell = (f"source = open({str(ROOT / 'run_zero_shot.py')!r}).read()\nspace = {{'__name__': 'cell'}}\nexec(source, space)\n"
            f"space['main'](['--csv', {str(benchmark_csv)!r}, '--model', {str(byte_model('gpt2'))!r}, '--m', '3', '--n', '6', '--subsamples', '1'])")
    done = subprocess.run([sys.executable, "-c", cell], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and len(rows_of(tmp_path / "results.csv")) == 1, done.stderr
