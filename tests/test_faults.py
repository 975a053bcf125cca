"""Each test falls for a fault that once passed every other one."""

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from scipy import stats

from conftest import load_script


# Checks of what is loaded


@pytest.mark.parametrize("distinct", [0, 1, 4, 5])
def test_a_tokenizer_that_knows_fewer_than_five_words_is_refused(script, tokenizer, distinct):
    words = "ball team match win goal".split()[:distinct]
    text = np.array(tokenizer(" ".join(words))["input_ids"])
    row = {"model": "mine", "task": "topics"}
    texts = [text] * 50
    if distinct == 5:
        script.check_tokens(tokenizer, texts, row)
        texts.append(text[:0])  # of invisible characters
    with pytest.raises(SystemExit, match="vocabulary"):
        script.check_tokens(tokenizer, texts, row)


def sight(folder):
    """How far later tokens change the logits of the first seven, in transformers' own model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(5, 37)[None]
    with torch.no_grad():
        alone, together = model(input_ids=ids[:, :7]).logits, model(input_ids=ids).logits
    return (alone - together[:, :7]).abs().max().item()


@pytest.mark.parametrize("name, kind, flags, spread, most", [
    ("run_experiment", "mistral", ["cpu", "float32"], 0.01, 0.1),
    ("run_zero_shot", "llama", ["none", "float32", "cpu"], 0.03, 0.5)])
def test_a_faint_sight_of_later_tokens_is_seen(
        model_dir, byte_model, name, kind, flags, spread, most):
    """Of at most so much in the logits: a looser probe would let it pass."""
    script, make = load_script(name), model_dir if kind == "mistral" else byte_model
    load_it = script.load_network if name == "run_experiment" else script.load_net
    for is_causal in (True, False):
        folder = make(kind, initializer_range=spread, is_causal=is_causal)
        model = script.find_model(str(folder), script.load_registry())
        if is_causal:
            assert sight(folder) < 1e-5
            load_it(model, *flags)
        else:
            assert most / 10 < sight(folder) < most
            with pytest.raises(SystemExit, match="causal|later tokens"):
                load_it(model, *flags)


def test_the_hash_of_a_model_is_of_all_files_that_decide_its_numbers(script, tmp_path):
    names = """model.safetensors model-00001-of-00002.safetensors small.Q4_1.gguf tokenizer.json
        tokenizer_config.json special_tokens_map.json vocab.json vocab.txt added_tokens.json
        merges.txt spiece.model config.json"""
    found = [script.weights_hash(tmp_path)]
    for name in names.split():
        for content in ("one", "other"):
            (tmp_path / name).write_text(content)
            found.append(script.weights_hash(tmp_path))
    assert len({*found}) == len(found)
    for name in ("README.md", "pytorch_model.bin", "trainer_state.json", "optimizer.pt"):
        (tmp_path / name).write_text("none of these is read")
    assert script.weights_hash(tmp_path) == found[-1]


# contamination_test.py


def test_one_of_four_tests_is_no_proof_that_halves_differ(model_dir, tmp_path, capsys, monkeypatch):
    """Random halves are told apart by 1 in 20 of each test, so by 1 in 20 of all together only if
    their p-values are adjusted."""
    rng = np.random.default_rng(99)
    words = "ball team match bread cheese soup star moon cloud".split()
    texts = [" ".join(rng.choice(words, size)) for size in rng.integers(5, 30, 80)]
    halves = texts[:40], texts[40:]
    p = stats.mannwhitneyu(*[[len(text) for text in half] for half in halves]).pvalue
    monkeypatch.chdir(tmp_path)
    for name, half in zip(("released", "held"), halves):
        (tmp_path / f"{name}.txt").write_text("\n".join(half) + "\n")
    assert 0.02 < p < 0.05
    load_script("contamination_test").main(
        ["--examples", "released.txt", "--held-out", "held.txt", "--device", "cpu",
         "--permutations", "1", "--model", str(model_dir("gpt2"))])
    assert "40 released, 40 held-out" in capsys.readouterr().out


class Full:
    """A cell that cannot be written, as if the disk were full."""

    def __str__(self):
        raise OSError("no space left on device")


def test_a_table_is_written_whole_or_not_at_all(tmp_path):
    path, write = tmp_path / "contamination.csv", load_script("contamination_test").write_whole
    write(path, pd.DataFrame({"audit": ["one", "two"]}))
    before = path.read_text()
    assert before == "audit\none\ntwo\n"
    cells = [*range(500_000), Full()]
    with pytest.raises(OSError):
        write(path, pd.DataFrame({"audit": pd.Series(cells, dtype=object)}))
    assert path.read_text() == before
