"""Faults that once passed every other test, planted one at a time: each test here falls for one of
them, by an oracle of its own (hand arithmetic, transformers' Trainer, torch, two processes)."""

import math
import multiprocessing
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from scipy import stats
from torch.optim.optimizer import register_optimizer_step_post_hook

from conftest import load_script
from test_run_experiment import NO_DROPOUT, network, recipe_of, stock, tokens, trainer_weights
from test_run_zero_shot import RECIPE, TEXTS, byte_model, load, zero  # noqa: F401
from test_runs import refused, rows_of, run, tiny  # noqa: F401

ARMS = ("base", "extra", "test")


# Training -----------------------------------------------------------------------------------------


def test_classification_decays_matrices_and_nothing_else(script, model_dir, tmp_path):
    """As the Trainer does by .01 a step. Positions past the end of all texts have no gradient: what
    is left of them is the decay alone. The biases and norms start so large that it would show."""
    folder = model_dir("bert", transformers.BertModel, **NO_DROPOUT["bert"])
    net = network(script, folder, "bert")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    for model in (net.lm.bert, theirs.bert):
        with torch.no_grad():  # a bias of the keys plays no part in attention
            model.encoder.layer[0].attention.self.key.bias.fill_(1e4)
    ids, labels = tokens(net), np.array([0, 1, 0, 1, 0])
    sets = {"train": ids, "test": ids[:2], "extra": ids[:2]}
    script.classify(net, sets, labels, 2, recipe_of("train", 8, 5, 0.05), seed=3)
    rows = [{"input_ids": text.tolist(), "label": int(label)} for text, label in zip(ids, labels)]
    collator = transformers.DataCollatorWithPadding(net.tokenizer)
    weights = trainer_weights(theirs, rows, 8, 0.05, 0.01, collator, tmp_path)
    name = "embeddings.position_embeddings.weight"
    ours, other = net.lm.bert.get_parameter(name)[100:], weights[f"bert.{name}"][100:]
    before = stock(folder, "bert").bert.get_parameter(name)[100:]
    kept = math.prod([1 - 0.01 * 0.05 * (1 - step / 8) for step in range(8)])
    assert torch.allclose(ours, other, rtol=1e-6) and torch.allclose(ours, before * kept, rtol=1e-6)
    bias = net.lm.bert.encoder.layer[0].attention.self.key.bias
    assert abs(bias.mean().item() - 1e4) < 5, "decay would take 22 of it"


def test_fp16s_scale_never_grows(script):
    """If it did, skipped steps that halve it could not be counted. torch's own grows after 2,000."""
    net = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float16)
    scaler, weight = script.gradient_scaler(net), torch.zeros(1, requires_grad=True)
    optimizer, scales = torch.optim.SGD([weight], lr=1e-3), []
    for _ in range(2500):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert weight.item() == pytest.approx(-2.5, rel=1e-3) and {*scales} == {4096.0}


def test_fp16s_gradients_are_unscaled_before_they_are_clipped(script, model_dir, monkeypatch):
    """Clipping at 1 leaves gradients that are 4,096 times too large no size of their own."""
    folder, norms, clip = model_dir("gpt2", **NO_DROPOUT["gpt2"]), [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *args: norms.append(float(clip(*args))))
    for precision in ("fp16", "float32"):
        net = network(script, folder, "gpt2", precision)
        script.pretrain(net, tokens(net), recipe_of("pretrain", 1, 5, 1e-4), seed=1)
    assert len(norms) == 2 and norms[0] == pytest.approx(norms[1], rel=0.1)


def test_nf4_is_the_papers_qlora(zero, load):  # noqa: F811
    """Double quantised: the scale of each 64 weights takes one byte, and not four. The adapter is
    trained by Adam with states of a byte, and activations are computed twice."""
    _, net = load("llama", "nf4", "bf16", hidden_size=256)
    layers = [module for module in net.model.modules() if hasattr(module, "weight")
              and hasattr(module.weight, "quant_state")]
    assert {*layers} and len({id(layer.weight) for layer in layers}) == 2 * 7
    for layer in layers:
        state = layer.weight.quant_state
        scales = state.absmax
        assert state.quant_type == "nf4" and scales.numel() == math.prod(state.shape) / 64
        assert scales.element_size() == 1, "the scales are quantised, too"

    passes, states, decays = [], set(), set()
    inner = net.model.base_model.model.model
    for name, module in (("model", inner), ("layer", inner.layers[0].mlp)):
        module.register_forward_pre_hook(lambda *_, name=name: passes.append(name))

    def see(optimizer, *_):
        decays.update([group["weight_decay"] for group in optimizer.param_groups])
        for state in optimizer.state.values():
            states.update([value.dtype for value in state.values()
                           if torch.is_tensor(value) and value.numel() >= 4096])

    hook = register_optimizer_step_post_hook(see)
    zero.train_adapter(net, TEXTS, RECIPE | {"epochs": 1}, 1)
    hook.remove()
    assert states == {torch.uint8} and decays == {0.0}
    assert passes.count("layer") == 2 * passes.count("model") > 0


def test_zero_shot_recipes_are_the_papers(zero):
    """Appendix G and section 9.1, typed from there: padded and packed, short texts and long ones."""
    registry, model = zero.load_registry(), zero.Model("mistral", "mistral", None, None, "clm", "", 512)
    for name, flags, size, pack in (
            ("ag_news", [], 16, 1), ("movie_rationales", [], 8, 1), ("ag_news", ["--pack"], 1, 8),
            ("movie_rationales", ["--pack", "--answers"], 1, 8)):
        task = zero.Task([], [], ["a", "b"], "", "", registry["tasks"][name])
        recipe = zero.prompt_recipe(registry, "cpu", zero.parse_args(flags), model, task)
        found = [recipe[key] for key in ("batch_size", "pack", "epochs", "learning_rate")]
        assert found == [size, pack, 1, 2e-4], name


def test_the_adapter_has_the_papers_dropout(load):  # noqa: F811
    _, net = load("llama")  # which has none of its own
    rates = [module.p for module in net.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert rates == [0.05] * 2 * 7


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_bf16_computes_as_autocast_does(script, model_dir, kind):
    folder = model_dir(kind)
    net, theirs = network(script, folder, kind, "bf16"), stock(folder, kind).eval()
    ids = tokens(net)[:1]
    net.lm.eval()
    with torch.no_grad():
        found = script.lm_logits(net, script.pack(net, ids, [np.arange(len(ids[0]))], ids))
        plain = theirs(input_ids=torch.tensor(ids[0])[None]).logits[0]
        with torch.autocast("cpu", torch.bfloat16):
            rounded = theirs(input_ids=torch.tensor(ids[0])[None]).logits[0].float()
    spread = (rounded - plain).abs().max()
    assert spread > 0 and (found - rounded).abs().max() < spread / 4


# Checks of what is loaded -------------------------------------------------------------------------


@pytest.mark.parametrize("distinct", [1, 4, 5])
def test_a_tokenizer_that_knows_fewer_than_five_words_is_refused(script, tokenizer, distinct):
    words = "ball team match win goal".split()[:distinct]
    text = np.array(tokenizer(" ".join(words))["input_ids"])
    assert len(text) == distinct + 2
    row = {"model": "mine", "task": "topics"}
    if distinct == 5:
        script.check_tokens(tokenizer, [text] * 50, row)
    else:
        with pytest.raises(SystemExit, match="vocabulary"):
            script.check_tokens(tokenizer, [text] * 50, row)


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
        model_dir, byte_model, name, kind, flags, spread, most):  # noqa: F811
    """Of at most so much in the logits: a looser probe would let it pass."""
    script, make = load_script(name), model_dir if kind == "mistral" else byte_model
    for is_causal in (True, False):
        folder = make(kind, initializer_range=spread, is_causal=is_causal)
        model = script.find_model(str(folder), script.load_registry())
        load_it = script.load_network if name == "run_experiment" else script.load_net
        if is_causal:
            assert sight(folder) < 1e-5
            load_it(model, *flags)
            continue
        assert most / 10 < sight(folder) < most
        with pytest.raises(SystemExit, match="causal|later tokens"):
            load_it(model, *flags)


def test_the_hash_of_a_model_is_of_all_files_that_decide_its_numbers(script, tmp_path):
    weights = ["model.safetensors", "model-00001-of-00002.safetensors", "small.Q4_1.gguf"]
    words = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
             "vocab.txt", "added_tokens.json", "merges.txt", "spiece.model", "config.json"]
    found = [script.weights_hash(tmp_path)]
    for name in (*weights, *words):
        for content in ("one", "other"):
            (tmp_path / name).write_text(content)
            found.append(script.weights_hash(tmp_path))
    assert len({*found}) == len(found)
    for name in ("README.md", "pytorch_model.bin", "trainer_state.json", "optimizer.pt"):
        (tmp_path / name).write_text("none of these is read")
    assert script.weights_hash(tmp_path) == found[-1]


def test_a_text_is_cut_after_its_first_tokens(run, tmp_path):  # noqa: F811
    """10 tokens are [CLS], 8 words and [SEP]: the 8th plays a part, and none after it."""
    words = "ball team match bread cheese soup star moon cloud night".split()
    rng, found = np.random.default_rng(0), []
    texts = [[*rng.choice(words, 20)] for _ in range(60)]
    for changed in ([], [*range(8, 20)], [7]):
        for text in texts:
            for place in changed:
                text[place] = words[(words.index(text[place]) + 1) % len(words)]
        lines = [f"{' '.join(text)},{'ab'[k % 2]}" for k, text in enumerate(texts)]
        (tmp_path / "long.csv").write_text("\n".join(["text,label", *lines]) + "\n")
        message, _ = run("--csv", "long.csv", "--m", 6, "--n", 8, "--max-length", 10,
                         "--subsamples", 1, "--out", f"{len(found)}.csv")
        assert message is None
        (row,) = rows_of(f"{len(found)}.csv")
        found.append([row[name] for name in ("loss_extra", "nll_base", "nll_test")])
    assert found[0] == found[1] and not {*found[1]} & {*found[2]}


# Rows ---------------------------------------------------------------------------------------------


def f1_by_hand(found, truth, classes):
    """Macro-F1 as scikit-learn defines it: the mean over all classes of the harmonic mean of
    precision and recall, each 0 where nothing is counted. And how many classes are nowhere."""
    scores, absent = [], 0
    for c in range(classes):
        hits = sum([a == b == c for a, b in zip(found, truth)])
        precision = hits / found.count(c) if c in found else 0
        recall = hits / truth.count(c) if c in truth else 0
        scores.append(2 * precision * recall / (precision + recall) if hits else 0)
        absent += c not in found and c not in truth
    return sum(scores) / classes, absent


def test_a_class_that_is_nowhere_counts_0_in_macro_f1(run, tmp_path):  # noqa: F811
    texts = [(f"{'ball soup moon star wind rain goal cook'.split()[k % 8]} {k}", k % 8)
             for k in range(80)]
    pd.DataFrame(texts, columns=["text", "label"]).to_csv(tmp_path / "eight.csv", index=False)
    run("--csv", "eight.csv", "--m", 8, "--n", 5, "--predictions", "kept")
    for row in rows_of():
        (file,) = (tmp_path / "kept").glob(f"*-{row['subsample']}-0-*.csv")
        table = pd.read_csv(file)
        for (arm, name), mine in table.groupby(["arm", "set"]):
            found = mine[[f"p{c}" for c in range(8)]].to_numpy().argmax(1).tolist()
            f1, absent = f1_by_hand(found, mine["label"].tolist(), 8)
            assert absent > 0
            ending = {"test": "", "extra": "_on_extra"}[name]
            assert float(row[f"f1_{arm}{ending}"]) == pytest.approx(f1)


def append_many(folder, number, barrier):
    """One of two processes: a row of 40 kB to each of 25 new files, in step with the other."""
    script = load_script("run_experiment")
    row = dict.fromkeys(script.COLUMNS, f"{number}" * 1000)
    for k in range(25):
        barrier.wait()
        script.append_row(folder / f"{k}.csv", row)


def test_two_processes_append_whole_rows_below_one_header(script, tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(2, timeout=60)
    both = [fork.Process(target=append_many, args=(tmp_path, number, barrier)) for number in (1, 2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    for k in range(25):
        header, *lines = (tmp_path / f"{k}.csv").read_text().splitlines()
        assert header == ",".join(script.COLUMNS)
        assert sorted(lines) == [",".join([f"{number}" * 1000] * len(script.COLUMNS))
                                 for number in (1, 2)]


def seven_units(sample, device, threads):
    """Stands for a subsample: the first ends at once, then three fail and three end, while the
    first is written."""
    k = sample.row["subsample"]
    if k > 1:
        time.sleep(1)
    if 2 <= k <= 4:
        raise SystemExit("error: diverged")
    return dict.fromkeys(load_script("run_experiment").COLUMNS, 0.5) | sample.row, {}


def test_all_that_has_ended_is_written_before_a_failure_is_told(run, script, monkeypatch):  # noqa: F811
    append, get_context = script.append_row, multiprocessing.get_context

    def slowly(path, row):
        time.sleep(3)
        append(path, row)

    monkeypatch.setattr(script, "append_row", slowly)
    monkeypatch.setattr(script, "run_subsample", seven_units)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: get_context("fork"))
    refused(run("--workers", 7, "--subsamples", 7), "diverged")
    assert sorted([row["subsample"] for row in rows_of()]) == ["1", "5", "6", "7"]


# contamination_test.py ----------------------------------------------------------------------------


def test_two_halves_differ_where_one_of_four_tests_would_say_so_is_no_proof(
        model_dir, tmp_path, capsys, monkeypatch):
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
        ["--examples", "released.txt", "--held-out", "held.txt", "--device", "cpu", "--permutations",
         "1", "--model", str(model_dir("gpt2"))])
    assert "40 released, 40 held-out" in capsys.readouterr().out


class Full:
    """What stands for a full disk: a cell that cannot be written."""

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
