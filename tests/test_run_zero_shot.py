"""run_zero_shot.py: prompts as the paper prints them, scores against a plain double loop, adapters that change nothing else."""

import csv
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from conftest import CACHE, ROOT, load_script

CLASSES = ["World", "Sports", "Business", "Sci/Tech"]
NEWS = {"about": "a news article", "answer": "its topic"}
TEXTS = ["Shares fall again", "A long match of two halves\nends", "", "Rocket lands on the sea (AFP) AFP - It did.", "Talks"]


@pytest.fixture(scope="session")
def zero():
    return load_script("run_zero_shot")


@pytest.fixture
def loaded(zero):
    """Load a model folder with an adapter that is not zero: loaded(folder) -> net."""

    def load(folder, quantize="none", rank=4, active=True, max_length=None):
        zero.load_adapted.cache_clear()
        torch.set_num_threads(1)
        net = zero.load_adapted(str(folder), None, "cpu", "float32", quantize, (rank, 8, 0.05), max_length)
        zero.fresh_adapter(net, 3)
        if active:
            with torch.no_grad():
                for name, weight in net.model.named_parameters():
                    if "lora_B" in name:
                        weight.normal_(0, 0.1)
        return net

    return load


def plain_scores(net, prompts, classes):
    """An uncached double loop over (prompt, class), by transformers' own forward: mean log-probability of the class's tokens."""
    net.model.eval()
    scores = np.empty((len(prompts), len(classes)))
    head = net.lm.get_output_embeddings()
    hooks, head._forward_pre_hooks = head._forward_pre_hooks, type(head._forward_pre_hooks)()  # the model as it came
    for i, prompt in enumerate(prompts):
        for k, name in enumerate(classes):
            prompt_ids, ids = net.tokenizer(prompt)["input_ids"], net.tokenizer(f"{prompt} {name}")["input_ids"]
            if net.tokenizer.sep_token_id is not None:  # a WordPiece tokenizer ends each text
                prompt_ids, ids = prompt_ids[:-1], ids[:-1]
            split = len(prompt_ids)
            while prompt_ids[:split] != ids[:split]:
                split -= 1
            with torch.no_grad():
                logits = net.model(input_ids=torch.tensor([ids])).logits[0].float()
            steps = [torch.log_softmax(logits[t - 1], 0)[ids[t]].item() for t in range(split, len(ids))]
            scores[i, k] = sum(steps) / len(steps)
    head._forward_pre_hooks = hooks
    return scores


# ------------------------------------------------------------------------------------------------------------
# Prompts
# ------------------------------------------------------------------------------------------------------------

# Typed from the paper's appendix G (its line breaks inside a text are the page's).
HEAD = ("Your task is to classify a given text as one of these categories:\nWorld\nSports\nBusiness\nSci/Tech\n\n"
        "The text is a news article. Answer with its topic.")
PADDED = HEAD + ("\n\n### Text: Bombardier CEO Quits, Shares Dive Paul Tellier stepped down on Monday as president and chief executive of "
                 "Bombardier Inc. (BBDsvb.TO: Quote, Profile, Research) (BBDsb).\n### Answer:")
PACKED = HEAD + ("\n\n### Text: US Electoral College withstands critics ... so far (AFP)\n\n### Text: Voters in Hungary decide referenda"
                 "\n\n### Text: Fans rush to create mods for long-awaited 'Doom 3'")


def test_prompts_are_the_papers_character_for_character(zero):
    head = zero.instruction(CLASSES, NEWS)
    assert head == HEAD
    text = PADDED[len(HEAD) + len("\n\n### Text: ") : -len("\n### Answer:")]
    assert zero.padded_prompt(head, text) == PADDED
    assert zero.padded_prompt(head, text, "Business") == PADDED + " Business"
    texts = [line.removeprefix("### Text: ") for line in PACKED[len(HEAD) + 2 :].split("\n\n")]
    assert len(texts) == 3 and zero.packed_prompt(head, texts) == PACKED
    assert zero.packed_prompt(head, texts[:2], ["World", "World"]) == (
        HEAD + "\n\n### Text: US Electoral College withstands critics ... so far (AFP)\n### Answer: World"
        "\n\n### Text: Voters in Hungary decide referenda\n### Answer: World")


def unit_of(pack, answers, texts=TEXTS, classes=CLASSES):
    labels = {arm: np.arange(len(texts)) % len(classes) for arm in ("extra", "test")}
    return {"instruction": "Sort.", "classes": classes, "labels": labels, "recipe": {"prompt": {"pack": pack, "answers": answers}},
            "texts": {"extra": [text.upper() for text in texts], "test": texts}}


def test_packs_hold_consecutive_texts_and_the_last_may_be_short(zero, loaded, model_dir):
    net = loaded(model_dir("gpt2"))
    prompts, pretraining = zero.make_prompts(net, unit_of(2, False))
    assert prompts == [f"Sort.\n\n### Text: {text}\n### Answer:" for text in TEXTS]
    assert [prompt.count("### Text:") for prompt in pretraining["test"]] == [2, 2, 1]
    assert pretraining["test"][1] == f"Sort.\n\n### Text: {TEXTS[2]}\n\n### Text: {TEXTS[3]}"
    assert "Answer" not in "".join(pretraining["extra"]) and TEXTS[0].upper() in pretraining["extra"][0]
    _, padded = zero.make_prompts(net, unit_of(0, True))
    assert [prompt.rpartition(": ")[2] for prompt in padded["test"]] == [CLASSES[i % 4] for i in range(5)]
    _, packed = zero.make_prompts(net, unit_of(2, True))
    assert packed["test"][2] == f"Sort.\n\n### Text: {TEXTS[4]}\n### Answer: World"


def test_long_texts_are_cut_and_never_the_instruction_or_the_answer_slot(zero, loaded, model_dir, capsys):
    long = ["x" * 5000, "many words " * 400, "short"]
    net = loaded(model_dir("gpt2"), max_length=600)
    prompts, pretraining = zero.make_prompts(net, unit_of(0, False, long))
    assert prompts[0] == f"Sort.\n\n### Text: {'x' * 1000}\n### Answer:"  # 1,000 characters, the paper's cut
    net = loaded(model_dir("gpt2"), max_length=60)
    for pack in (0, 3):
        prompts, pretraining = zero.make_prompts(net, unit_of(pack, False, long))
        assert all(p.startswith("Sort.\n\n### Text: ") and p.endswith("\n### Answer:") for p in prompts) and prompts[2].count("short") == 1
        room = max(len(zero.encode(net, f" {name}")) for name in CLASSES)
        assert all(len(zero.encode(net, prompt)) + room <= 60 for prompt in [*prompts, *pretraining["test"]])
        assert len(zero.encode(net, prompts[1])) > 45  # and no more is cut than need be
    with pytest.raises(SystemExit) as end:
        zero.make_prompts(loaded(model_dir("gpt2"), max_length=8), unit_of(0, False, long))
    assert end.value.code == 2 and "without its text" in capsys.readouterr().err


def test_no_end_token_is_left(zero, loaded, model_dir):
    net = loaded(model_dir("llama"))
    ids = zero.encode(net, "a text")
    assert net.tokenizer("a text")["input_ids"] == [*ids, net.tokenizer.sep_token_id]


# ------------------------------------------------------------------------------------------------------------
# Scoring
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "opt", "gptneo"])
@pytest.mark.parametrize("classes", [CLASSES, list("12345"), ["not spam", "not spam at all, no", "spam"]], ids=["names", "digits", "lengths"])
def test_scores_equal_a_plain_double_loop(kind, classes, zero, loaded, model_dir):
    net = loaded(model_dir(kind))
    prompts = [zero.padded_prompt(zero.instruction(classes, NEWS), text) for text in TEXTS]
    assert net.tree
    expected = plain_scores(net, prompts, classes)
    net.bf16 = True
    assert np.abs(zero.score_classes(net, prompts, classes, 2) - expected).mean() < 0.1  # rounding; a wrong mask gives 1 and more
    net.bf16 = False
    assert np.ptp(expected) > 0.1  # else equality would say little
    for size in (1, 2, 16):
        np.testing.assert_allclose(zero.score_classes(net, prompts, classes, size), expected, atol=1e-4)
    np.testing.assert_allclose(zero.score_classes(net, prompts[:1], classes, 4), expected[:1], atol=1e-4)
    net.tree = False
    np.testing.assert_allclose(zero.score_classes(net, prompts, classes, 4), expected, atol=1e-4)


def test_scores_equal_where_nothing_is_shared_or_everything_is(zero, loaded, model_dir):
    net = loaded(model_dir("llama"))
    for prompts in (["one", "two words here"], ["the same", "the same"], ["a b", "a b c d e f"]):
        np.testing.assert_allclose(zero.score_classes(net, prompts, CLASSES, 2), plain_scores(net, prompts, CLASSES), atol=1e-4)


def test_tokens_that_a_class_shares_with_the_prompt_are_scored(zero, loaded, model_dir, monkeypatch):
    """A tokenizer that merges across the boundary: 'so' + ' me' -> one other token. The split moves back, for that class alone."""
    net = loaded(model_dir("gpt2"))
    words = {"Answer so": [10, 11], "Answer so me": [10, 12, 13], "Answer so far": [10, 11, 14, 15], "Answer so you": [10, 11, 16]}
    monkeypatch.setattr(zero, "encode", lambda net, text: words[text])
    ((me, far, you),) = zero.tokenise_answers(net, ["Answer so"], ["me", "far", "you"])
    assert me == ([10, 12, 13], 1) and far == ([10, 11, 14, 15], 2) and you == ([10, 11, 16], 2)
    found = zero.score_classes(net, ["Answer so"], ["me", "far", "you"], 4)
    assert net.tree
    with torch.no_grad():
        for k, (ids, split) in enumerate((me, far, you)):
            net.keep = torch.arange(len(ids))
            logits = net.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(1)
            assert found[0, k] == pytest.approx(np.mean([logits[t - 1, ids[t]].item() for t in range(split, len(ids))]), abs=1e-4)


def test_an_architecture_without_trees_is_scored_one_class_at_a_time(zero, loaded, model_dir, capsys):
    """BLOOM adds its positions to the attention scores by counting tokens, so a tree would be misread."""
    net = loaded(model_dir("bloom"))
    assert not net.tree and "one at a time" in capsys.readouterr().out
    prompts = [zero.padded_prompt("Sort.", text) for text in TEXTS]
    np.testing.assert_allclose(zero.score_classes(net, prompts, CLASSES, 2), plain_scores(net, prompts, CLASSES), atol=1e-4)


@pytest.fixture(scope="session")
def smollm2(zero):
    entry = zero.load_registry()["models"]["smollm2"]
    folder, gguf = zero.model_folder("smollm2", entry["sources"], CACHE)
    zero.load_adapted.cache_clear()
    return zero.load_adapted(str(folder), gguf, "cpu", "float32", "none", (16, 32, 0.05), None)


def test_the_real_smollm2_knows_sense_from_nonsense(zero, smollm2, record_property):
    net = smollm2
    assert net.tree and sum(weight.numel() for weight in net.weights) == 4_884_480
    prompts = ["The capital of France is", "The opposite of cold is"]
    scores = zero.score_classes(net, prompts, ["Paris", "hot", "a purple of seventeen", "1"], 4)
    assert scores[0].argmax() == 0 and scores[1].argmax() == 1
    names = ["1", "2", "not a thing", "Description and abstract concept", "Sci/Tech"]
    texts = [zero.padded_prompt(zero.instruction(names, NEWS), text) for text in TEXTS[:3]]
    np.testing.assert_allclose(zero.score_classes(net, texts, names, 3), plain_scores(net, texts, names), atol=1e-4)

    task = zero.load_task("rotten_tomatoes", zero.load_registry()["tasks"]["rotten_tomatoes"], CACHE)
    rows = zero.split_rows(task["labels"], 100, 40, 1)["test"].tolist()
    head = zero.instruction(task["classes"], {"about": "a sentence from a movie review", "answer": "its sentiment"})
    scores = zero.score_classes(net, [zero.padded_prompt(head, task["texts"][row]) for row in rows], task["classes"], 20)
    accuracy = (scores.argmax(1) == task["labels"][rows]).mean()
    print(f"smollm2, 40 rotten_tomatoes texts: accuracy {accuracy:.3f}")
    assert accuracy >= 0.6  # chance 0.5; 0.6 is 1.3 standard errors above


# ------------------------------------------------------------------------------------------------------------
# Pretraining and adapters
# ------------------------------------------------------------------------------------------------------------

RECIPE = {"epochs": {"pretrain": 2}, "batch_sizes": {"pretrain": 2, "evaluate": 4}, "learning_rates": {"pretrain": 1e-3}}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_loss_and_its_gradients_are_transformers_own(kind, zero, loaded, model_dir):
    net = loaded(model_dir(kind))
    ids = [[5, 9, 7, 30, 2], [8, 6], [11, 12, 13, 14, 15, 16, 17]]
    net.model.eval()
    count = 4 + 1 + 6
    groups = list(zero.small_groups(ids, 10))
    assert [list(map(len, group)) for group in groups] == [[2, 5], [7]]  # the gradients of the groups add up to the step's
    loss = sum(zero.sequence_loss(net, group) for group in groups)
    (loss / count).backward()
    found = [weight.grad.clone() for weight in net.weights]
    net.model.zero_grad()
    net.lm.get_output_embeddings()._forward_pre_hooks.clear()
    rows = torch.tensor([row + [0] * (7 - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (7 - len(row)) for row in ids])
    expected = net.model(input_ids=rows, attention_mask=mask, labels=rows.masked_fill(mask == 0, -100)).loss
    expected.backward()
    assert float(loss / count) == pytest.approx(float(expected), rel=1e-5)
    for mine, weight in zip(found, net.weights):
        torch.testing.assert_close(mine, weight.grad, rtol=1e-3, atol=1e-6)
    assert max(float(weight.abs().max()) for weight in found) > 1e-4


def test_an_arm_changes_its_adapter_alone_and_arms_start_alike(zero, loaded, model_dir):
    from transformers import AutoModelForCausalLM

    folder = model_dir("llama")
    net = loaded(folder, active=False)
    frozen = {name: weight.clone() for name, weight in net.model.state_dict().items() if "lora" not in name}
    start = [weight.clone() for weight in net.weights]
    ids = [[5, 9, 7, 30, 2], [8, 6, 4], [11, 12, 13, 14, 15]]
    losses = []
    for _ in range(2):
        zero.fresh_adapter(net, 3)
        assert all(torch.equal(a, b) for a, b in zip(start, net.weights))
        losses.append(zero.pretrain_adapter(net, ids, RECIPE, 7, ""))
        assert any(not torch.equal(a, b) for a, b in zip(start, net.weights))
    assert losses[0] == losses[1]
    assert all(torch.equal(weight, frozen[name]) for name, weight in net.model.state_dict().items() if "lora" not in name)
    with net.model.disable_adapter(), torch.no_grad():
        net.model.eval()
        net.keep = torch.arange(3)
        untouched = AutoModelForCausalLM.from_pretrained(folder).eval()
        torch.testing.assert_close(net.model(input_ids=torch.tensor([[5, 9, 7]])).logits, untouched(input_ids=torch.tensor([[5, 9, 7]])).logits)
    zero.fresh_adapter(net, 4)
    assert any(not torch.equal(a, b) for a, b in zip(start, net.weights))


def test_arms_with_the_same_texts_get_the_same_numbers(zero, loaded, model_dir):
    """Common random numbers: if extra and test are the same texts, loss and probabilities are equal to the last bit."""
    folder = model_dir("gpt2")
    row = {"experiment": "x", "model": "m", "task": "t", "m": 4, "n": 5, "subsample": 1, "seed": 0, "num_classes": 4}
    unit = {**unit_of(0, False), "row": row}
    unit["texts"]["extra"] = unit["texts"]["test"]
    recipe = {**RECIPE, "prompt": {"pack": 0, "answers": False}, "precision": "float32", "quantize": "none", "max_length": None,
              "lora": {"rank": 4, "alpha": 8, "dropout": 0.3}}
    row, probabilities = zero.run_prompts({**unit, "recipe": recipe}, {"folder": folder, "gguf": None, "name": "m"}, "cpu", 1)
    assert row["loss_extra"] == row["loss_test"] and np.array_equal(probabilities["extra"], probabilities["test"])
    assert not np.array_equal(probabilities["base"], probabilities["test"])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_linear_layer_but_the_output_is_adapted(kind, loaded, model_dir):
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    net = loaded(model_dir(kind))
    adapted = {name for name, module in net.model.named_modules() if isinstance(module, LoraLayer)}
    linear = {name.removesuffix(".base_layer") for name, module in net.model.named_modules()
              if isinstance(module, (torch.nn.Linear, Conv1D)) and "lora_" not in name}
    assert adapted and linear - adapted == {name for name in linear if name.endswith("lm_head")} and len(linear - adapted) == 1


def test_mistral_7b_gets_the_papers_number_of_new_parameters():
    """41,943,040 (appendix G), from the published shape of Mistral 7B v0.3 without its weights, adapted as load_adapted does."""
    import peft
    import transformers

    config = transformers.MistralConfig(vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                                        num_attention_heads=32, num_key_value_heads=8, sliding_window=None)
    zero = load_script("run_zero_shot")
    args = zero.parse_args([])
    with torch.device("meta"):
        model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), zero.lora_config(
            args.lora_rank, args.lora_alpha, args.lora_dropout))
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == 41_943_040


def test_adapters_have_the_faster_dropout_unless_its_draws_are_repeated(zero, loaded, model_dir):
    """nf4 computes activations twice (gradient checkpointing), and only torch's own generator then draws the same again."""
    net = loaded(model_dir("llama"))
    assert {type(module) for module in net.model.modules() if isinstance(module, torch.nn.Dropout)} == {zero.Dropout}
    slow = loaded(model_dir("llama", hidden_size=64, intermediate_size=128), quantize="nf4")
    assert {type(module) for module in slow.model.modules() if isinstance(module, torch.nn.Dropout)} == {torch.nn.Dropout}
    net.model.train()
    losses = []
    for seed in (1, 1, 2):
        net.noise = np.random.SFC64(seed)
        losses.append(float(zero.sequence_loss(net, [[5, 9, 7, 30, 2], [8, 6, 4]]).detach()))
    assert losses[0] == losses[1] != losses[2]


def test_nf4_quantises_trains_and_scores_on_the_cpu(zero, loaded, model_dir):
    import bitsandbytes as bnb

    net = loaded(model_dir("llama", hidden_size=64, intermediate_size=128), quantize="nf4", active=False)
    layers = [module for module in net.model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(layers) == 2 * 7 and all(layer.weight.dtype == torch.uint8 and layer.weight.quant_state.nested for layer in layers)
    packed = [layer.weight.detach().clone() for layer in layers]
    start = [weight.clone() for weight in net.weights]
    loss = zero.pretrain_adapter(net, [[5, 9, 7, 30, 2], [8, 6, 4], [11, 12, 13]], {**RECIPE, "epochs": {"pretrain": 1}}, 7, "")
    assert np.isfinite(loss) and any(not torch.equal(a, b) for a, b in zip(start, net.weights))
    assert all(torch.equal(a, layer.weight) for a, layer in zip(packed, layers))
    prompts = [zero.padded_prompt("Sort.", text) for text in TEXTS]

    def gradient():
        net.model.zero_grad()
        zero.sequence_loss(net, [[5, 9, 7, 30, 2]]).backward()
        return [weight.grad.clone() for weight in net.weights]

    net.model.eval()
    before = gradient()
    np.testing.assert_allclose(zero.score_classes(net, prompts, CLASSES, 4), plain_scores(net, prompts, CLASSES), atol=0.1)
    after = gradient()  # scoring must not repack the weights into a form that has no gradient
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and max(float(a.abs().max()) for a in before) > 0


# ------------------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(zero, tmp_path, monkeypatch, benchmark_csv, model_dir):
    """Run the script in an empty folder on a benchmark made by hand and a tiny GPT-2; returns the rows."""
    monkeypatch.chdir(tmp_path)
    folder = model_dir("gpt2")

    def go(*flags, model=folder):
        zero.load_adapted.cache_clear()
        zero.main(["--csv", str(benchmark_csv), "--model", str(model), "--m", "4", "--n", "6", "--subsamples", "2", "--threads", "1",
                   *map(str, flags)])
        with open("results.csv", newline="") as file:
            return list(csv.DictReader(file))

    return go


def test_a_run_writes_rows_adapters_and_predictions_that_agree(zero, start, tmp_path, capsys):
    rows = start("--adapters", "kept", "--predictions", "kept")
    assert [row["experiment"] for row in rows] == ["zero-shot"] * 2 and list(rows[0]) == list(zero.COLUMNS)
    assert all(0 <= float(row[f"acc_{arm}"]) <= 1 for row in rows for arm in zero.ARMS) and all(float(row["loss_test"]) > 0 for row in rows)
    folder = tmp_path / "kept" / zero.unit_name(rows[0])
    assert {path.name for path in folder.iterdir()} == {"extra", "test"} and (folder / "test" / "adapter_model.safetensors").exists()
    assert json.loads((folder / "test" / "adapter_config.json").read_text())["r"] == 16
    with open(tmp_path / "kept" / f"{zero.unit_name(rows[0])}.csv", newline="") as file:
        kept = list(csv.DictReader(file))
    classes = int(rows[0]["num_classes"])
    for arm in zero.ARMS:
        mine = [row for row in kept if row["arm"] == arm]
        p = np.array([[float(row[f"p{c}"]) for c in range(classes)] for row in mine])
        np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
        assert (p.argmax(1) == [int(row["label"]) for row in mine]).mean() == pytest.approx(float(rows[0][f"acc_{arm}"]))


def test_a_rerun_skips_and_makes_up_for_adapters_and_other_forms_are_other_experiments(zero, start, tmp_path, capsys):
    first = start()
    again = start("--adapters", "kept")
    assert again == first and len(list((tmp_path / "kept").iterdir())) == 2
    capsys.readouterr()
    assert start("--adapters", "kept") == first and "2 finished before, 0 to run" in capsys.readouterr().out
    names = [row["experiment"] for row in start("--pack", "--subsamples", "1") + start("--answers", "--pack", "--subsamples", "1")]
    assert set(names) == {"zero-shot", "zero-shot-packed", "zero-shot-packed-answers"}
    alone = start("--out", "alone.csv", "--first-subsample", "2", "--subsamples", "1")
    with open("alone.csv", newline="") as file:
        (alone,) = csv.DictReader(file)
    same = [name for name in zero.COLUMNS if name != "seconds"]
    assert [alone[name] for name in same] == [first[1][name] for name in same]


@pytest.mark.parametrize("flags, words", [
    (["--lora-rank", "8"], "recipe"), (["--about", "a tweet"], "recipe"), (["--pretrain-epochs", "2"], "recipe")])
def test_another_recipe_is_refused(flags, words, start, capsys):
    start("--subsamples", "1")
    with pytest.raises(SystemExit) as end:
        start("--subsamples", "1", *flags)
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_a_masked_model_is_refused(start, model_dir, capsys):
    with pytest.raises(SystemExit) as end:
        start(model=model_dir("bert"))
    assert end.value.code == 2 and "causal" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run_and_writes_nothing(start, capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        start("--pretrain-lr", "1e30", "--batch-size", "1")
    assert end.value.code == 2 and "arm extra" in capsys.readouterr().err and not (tmp_path / "results.csv").exists()


def test_adapters_of_another_recipe_are_refused_and_a_dry_run_writes_nothing(start, zero, capsys, tmp_path, benchmark_csv, model_dir):
    start("--subsamples", "1", "--adapters", "kept")
    with pytest.raises(SystemExit) as end:
        start("--subsamples", "1", "--adapters", "kept", "--out", "other.csv", "--pretrain-epochs", "2")
    assert end.value.code == 2 and "adapter of recipe" in capsys.readouterr().err
    start("--subsamples", "1", "--dry-run", "--adapters", "none", "--out", "dry.csv", "--experiment", "another")
    assert "about" in capsys.readouterr().out and not (tmp_path / "none").exists() and not (tmp_path / "dry.csv").exists()


def test_an_instruction_that_does_not_fit_is_found_before_anything_is_trained(start, capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        start("--max-length", "12")
    assert end.value.code == 2 and "without its text" in capsys.readouterr().err and not (tmp_path / "results.csv").exists()


def test_show_prompts_prints_and_runs_nothing(start, zero, tmp_path, capsys, benchmark_csv):
    zero.main(["--csv", str(benchmark_csv), "--m", "4", "--n", "6", "--show-prompts", "--about", "a remark", "--answer", "its mood"])
    text = capsys.readouterr().out
    assert "The text is a remark. Answer with its mood.\n\n### Text: " in text and text.count("### Answer:") == 1 and "packed" in text
    assert not list(tmp_path.glob("*.csv"))


def test_answers_raise_acc_test_the_positive_control(zero, tmp_path, monkeypatch):
    """Pretraining on the test prompts with their answers must show up as a large bias. The labels are coin flips, so that nothing
    is to be learnt from `extra`; the model is a tiny Llama with a vocabulary of 40 words, trained for 50 epochs."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    monkeypatch.chdir(tmp_path)
    words = "river stone green paper quick north salt window apple seven music cold".split()
    prompt = zero.padded_prompt(zero.instruction(["heads", "tails"], {"about": "a text", "answer": "its side"}), "")
    vocabulary = ["[UNK]", "[PAD]", "[END]", *words, *dict.fromkeys(re.findall(r"\w+|[^\w\s]+", prompt))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", eos_token="[END]").save_pretrained("tiny")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=2, eos_token_id=2, initializer_range=0.1)).save_pretrained("tiny")
    rng = np.random.default_rng(0)
    with open("coins.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label"])
        table.writerows([" ".join(rng.choice(words, 3)), rng.choice(["heads", "tails"])] for _ in range(80))
    flags = ["--csv", "coins.csv", "--about", "a text", "--answer", "its side", "--model", "tiny", "--m", "2", "--n", "24", "--subsamples", "2",
             "--threads", "1", "--pretrain-epochs", "50", "--pretrain-lr", "0.003", "--lora-rank", "32", "--lora-alpha", "64", "--lora-dropout", "0"]
    zero.load_adapted.cache_clear()
    zero.main([*flags, "--answers"])
    with open("results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert min(float(row["acc_test"]) for row in rows) >= 0.9
    assert min(float(row["acc_test"]) - float(row["acc_extra"]) for row in rows) >= 0.2


def test_a_gated_model_is_explained_in_one_line(tmp_path, benchmark_csv):
    """Mistral's entry of tasks.json against a Hub (real huggingface_hub code, a local server) that wants its licence accepted."""
    import fake_hub

    with fake_hub.fake_hub(tmp_path / "hub") as url:
        branch = tmp_path / "hub" / "mistralai/Mistral-7B-v0.3" / fake_hub.commit("mistralai/Mistral-7B-v0.3", "main")
        branch.mkdir(parents=True)
        for name in (".gated", "config.json", "model.safetensors", "tokenizer.json"):
            (branch / name).write_text("{}")
        done = subprocess.run(
            [sys.executable, str(ROOT / "run_zero_shot.py"), "--csv", str(benchmark_csv), "--model", "mistral", "--m", "4", "--n", "6"],
            cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")})
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr, done.stderr
    assert "gated: accept its licence at https://huggingface.co/mistralai/Mistral-7B-v0.3" in done.stderr
    assert not (tmp_path / "results.csv").exists()


def test_interrupted_by_kill_9_it_goes_on(tmp_path, benchmark_csv, model_dir):
    flags = [sys.executable, str(ROOT / "run_zero_shot.py"), "--csv", str(benchmark_csv), "--model", str(model_dir("gpt2")), "--m", "4",
             "--n", "6", "--subsamples", "4", "--threads", "1"]
    run = subprocess.Popen(flags, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    out, began = tmp_path / "results.csv", time.time()
    while time.time() - began < 100 and not (out.exists() and out.read_bytes().count(b"\n") > 1):
        time.sleep(0.02)
    run.kill()
    assert run.wait() == -9  # it was under way
    done = subprocess.run(flags, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with open(out, newline="") as file:
        assert sorted(row["subsample"] for row in csv.DictReader(file)) == list("1234")
