"""run_experiment.py and its shared blocks against plain loops, hand arithmetic, transformers' own
models and Trainer; whole runs in real processes."""

import csv
import ctypes
import fcntl
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import dask
import distributed
import joblib
import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from conftest import (
    MASKED,
    ROOT,
    cases,
    comparable,
    end_of,
    load_script,
    plain_training,
    recipe_of,
    rows_of,
    write_csv,
)

PACKED = load_script("run_experiment").PACKED
RUN_SUBSAMPLE = load_script("run_experiment").run_subsample
TEXTS = ["a short one", "no", "yes it was", "the film was neither good nor bad but it was a film",
         "this text is a good deal longer than the others, with commas, and goes on for some time"]
NEAR = {"atol": 2e-4}  # Adam, in steps of 2e-3, magnifies what rounding does to small gradients
NO_DROPOUT = {"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
              "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "llama": {}}


@pytest.fixture
def load(script, model_dir):
    """load(kind) -> (folder of a random model, the script's network of it)."""
    def call(kind, saved_as=None, precision="float32", **config):
        folder = model_dir(kind, saved_as, **config)
        objective = "mlm" if kind in MASKED else "clm"
        model = script.Model("tiny", "bert", folder, None, objective, "", 10**6, 512)
        return folder, script.load_network(model, "cpu", precision)

    return call


def tokens(net, texts=TEXTS):
    return [np.array(ids) for ids in net.tokenizer(texts)["input_ids"]]


def stock(folder, kind):
    own = transformers.AutoModelForCausalLM
    if kind in MASKED:
        own = transformers.AutoModelForMaskedLM
    return own.from_pretrained(folder)


def recipe_for(stage, epochs, size, rate):
    return {"epochs": {stage: epochs}, "batch_sizes": {stage: size},
            "learning_rates": {stage: rate}}


# Splits and masks


@pytest.mark.parametrize("m, n, k", [(7, 50, 100), (100, 120, 5)])
def test_splits_are_the_published_ones(script, m, n, k):
    """pandas' sample of each class, then scikit-learn's train_test_split."""
    labels = pd.Series(np.random.default_rng(m).choice(3, 400, p=[0.6, 0.3, 0.1]))
    train = []
    for c in range(3):
        train += [*labels[labels == c].sample(m // 3, random_state=42 + k).index]
    rest = np.random.RandomState(42 + k).permutation(labels.drop(train).index)
    found = script.split_rows(labels.to_numpy(), m, n, k)
    assert [*itertools.chain(*found.values())] == [*train, *rest[n : 2 * n], *rest[:n]]


def test_splits_have_the_published_majorities(script):
    """Of the paper's own results: share of the most common label, subsamples 1 to 8."""
    spec = script.load_registry()["tasks"]["rotten_tomatoes"]
    labels = script.load_task("rotten_tomatoes", spec).labels
    tests = [labels[script.split_rows(labels, 100, 500, k)["test"]] for k in range(1, 9)]
    assert [np.bincount(test).max() / 500 for test in tests] == [
        .504, .522, .506, .506, .51, .53, .508, .51]


def test_mask_rates(script, tokenizer):
    ids = np.tile(np.r_[101, np.arange(1000, 1098), 102], 4000)  # 98 plain tokens, two special
    rng = np.random.default_rng(0)
    corrupted, scored = script.mask_tokens(ids, tokenizer, rng)
    assert ids[scored].min() >= 1000, "special tokens are never scored"
    untouched = np.setdiff1d(np.arange(len(ids)), scored)
    assert np.array_equal(corrupted[untouched], ids[untouched])
    masked = corrupted[scored] == 103
    kept = corrupted[scored] == ids[scored]
    random = corrupted[scored][~masked & ~kept]  # uniform over the vocabulary
    shares = [len(scored) / len(ids), masked.mean(), kept.mean(), random.mean() / 30522]
    assert shares == pytest.approx([0.15 * 0.98, 0.8, 0.1, 0.5], rel=0.02)


# Packing, groups, logits


@pytest.mark.parametrize("kind", sorted({*PACKED, *MASKED, "mistral", "rwkv"}))
def test_texts_together_give_the_logits_of_texts_alone(script, load, kind):
    folder, net = load(kind)
    theirs = stock(folder, kind).eval()
    ids = tokens(net)
    net.lm.eval()
    batch = script.pack(net, [script.Example(text, np.arange(len(text)), text) for text in ids])
    with torch.inference_mode():
        alone = [theirs(input_ids=torch.tensor(text)[None]).logits[0] for text in ids]
        assert torch.allclose(script.lm_logits(net, batch), torch.cat(alone), atol=1e-4)
    assert (len(batch.inputs["input_ids"]) < len(ids)) == (kind in PACKED)


# Training against transformers' Trainer and a plain loop

@pytest.fixture
def small_groups(script, monkeypatch):
    """A batch goes through the model in parts, whose gradients add up."""
    monkeypatch.setattr(script, "CPU_TOKENS", 30)


@pytest.mark.parametrize("kind, size", [("bert", 1), ("bert", 2), ("gpt2", 2), ("llama", 5)])
def test_pretraining_equals_a_plain_loop(script, load, small_groups, norms, kind, size):
    """With the same masks: a batch of one text may have none. Llama's output layer is its own."""
    folder, net = load(kind, initializer_range=0.02, **NO_DROPOUT[kind])
    ids = tokens(net)
    plain = [(text, 0) for text in ids]
    loss = script.pretrain(net, plain, recipe_for("pretrain", 2, size, 3e-3), seed=4)
    theirs = stock(folder, kind).train()
    order = np.random.default_rng([4, 0])
    masks = np.random.default_rng([4, 1])
    epochs = []
    scores = []
    for _ in range(2):
        examples = []
        for row in order.permutation(5):
            corrupted = ids[row]
            labels = ids[row]
            if kind == "bert":
                corrupted, scored = script.mask_tokens(ids[row], net.tokenizer, masks)
                labels = np.full(len(corrupted), -100)
                labels[scored] = ids[row][scored]
                scores.append(len(scored))
            examples.append((corrupted, labels))
        epochs.append([examples[start : start + size] for start in range(0, 5, size)])
    assert kind != "bert" or 0 in scores
    assert loss == pytest.approx(plain_training(theirs, epochs, 3e-3), rel=1e-4)
    steps = len(norms) // 2
    assert norms[:steps] == pytest.approx(norms[steps:], rel=1e-2)
    for (name, weight), other in zip(net.lm.named_parameters(), theirs.parameters()):
        assert torch.allclose(weight, other, **NEAR), name


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_classification_equals_the_trainer(
        script, load, tmp_path, small_groups, monkeypatch, kind):
    """One full batch per epoch: batch order cannot matter. A decay of 5 can be seen."""
    assert script.WEIGHT_DECAY == {"pretrain": 0.0, "train": 0.01}
    monkeypatch.setitem(script.WEIGHT_DECAY, "train", 5.0)
    saved_as = transformers.BertForPreTraining if kind == "bert" else None  # with a pooler
    folder, net = load(kind, saved_as, initializer_range=0.03, **NO_DROPOUT[kind])
    labels = np.array([0, 1, 2, 1, 0])
    ids = {"train": tokens(net), "test": tokens(net, ["a new film, good and long", "no", "it is"]),
           "extra": tokens(net, ["strange words, all", "yes"])}
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, pad_token_id=0)
    torch.manual_seed(8)
    head = torch.nn.Linear(32, 3, bias=kind == "bert")
    torch.nn.init.normal_(head.weight, std=0.03)  # the head that classify makes with this seed
    if kind == "bert":
        torch.nn.init.zeros_(head.bias)
    (theirs.classifier if kind == "bert" else theirs.score).load_state_dict(head.state_dict())
    found = script.classify(net, ids, labels, 3, recipe_for("train", 6, 5, 2e-3), seed=8)
    assert not net.fresh
    rows = [{"input_ids": text, "label": label} for text, label in zip(ids["train"], labels)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=6, per_device_train_batch_size=5, learning_rate=2e-3,
        weight_decay=5.0, report_to=[], disable_tqdm=True, save_strategy="no", use_cpu=True)
    collator = transformers.DataCollatorWithPadding(net.tokenizer)
    transformers.Trainer(theirs, arguments, collator, rows).train()
    for name in ("test", "extra"):
        with torch.inference_mode():
            batch = net.tokenizer.pad({"input_ids": ids[name]}, padding_side="right",
                                      return_tensors="pt")
            expected = theirs.eval()(**batch).logits.log_softmax(-1)
        assert np.allclose(found[name], expected, atol=2e-4)
    for name, weight in net.lm.base_model.named_parameters():
        assert torch.allclose(weight, theirs.base_model.get_parameter(name), **NEAR), name


def test_dropout_before_the_head(script, load):
    _, net = load("bert", hidden_dropout_prob=0.3)
    batch = script.pack(net, script.class_examples(net, tokens(net) * 40, range(200)))
    dropped = script.class_logits(net, batch, torch.nn.Identity()) == 0
    assert abs(dropped.float().mean() - 0.3) < 0.02


def test_fp16_gradients_are_unscaled_before_they_are_clipped(script, load, norms):
    for precision in ("fp16", "float32"):
        _, net = load("gpt2", precision=precision, **NO_DROPOUT["gpt2"])
        texts = [(text, 0) for text in tokens(net)]
        script.pretrain(net, texts, recipe_for("pretrain", 1, 5, 1e-4), seed=1)
    assert norms[0] == pytest.approx(norms[1], rel=0.1) and norms[0] != norms[1]


# A subsample: the three arms


@pytest.mark.parametrize("name, kind", [("run_experiment", "bert"), ("run_zero_shot", "gpt2")])
def test_arms_share_everything_but_the_pretraining_text(
        name, kind, model_dir, empty_folder, benchmark_csv, monkeypatch):
    """With extra = test they agree to the last bit."""
    script = load_script(name)
    sample_of = script.sample_of

    def twins(*planned):
        sample = sample_of(*planned)
        sample.texts["extra"] = sample.texts["test"]
        sample.labels["extra"] = sample.labels["test"]
        return sample

    monkeypatch.setattr(script, "sample_of", twins)
    script.main(f"--csv {benchmark_csv} --model {model_dir(kind)} --m 6 --n 8 --subsamples 1 --out "
                "results.csv --workers 1 --device cpu --pretrain-lr 0.02".split())
    (row,) = rows_of()
    assert row["nll_base"] != row["nll_extra"] == row["nll_test"] == row["nll_extra_on_extra"]
    assert row["loss_extra"] == row["loss_test"]


@pytest.mark.parametrize("kind, length, expected", [
    ("bert", 8, ["[CLS] sport a b is the story [SEP]", "[CLS] very cold a b is the [SEP]"]),
    ("gpt2", 20, ["a b is the sto sport", "a b is the very cold"])])  # bytes are tokens
def test_answers_in_pretraining(script, load, monkeypatch, kind, length, expected):
    """A name, masked and scored, stands after [CLS], or at the end: that of the text's own class,
    also if the labeled texts are read, too."""
    _, net = load(kind, merges=None if kind == "bert" else ())
    recipe = {"answers": ["sport", "very cold"], "max_length": length, "labeled_read": True}
    sample = SimpleNamespace(
        recipe=recipe, texts=dict.fromkeys(("test", "train"), ["a b is the story of"] * 2),
        labels={"test": [0, 1], "train": [1, 0]})
    texts = script.pretraining_texts(net, sample, "test")
    assert [net.tokenizer.decode(ids) for ids, _ in texts] == [*expected, *expected[::-1]]
    train = Mock()
    monkeypatch.setattr(script, "train", train)
    script.pretrain(net, texts, recipe, 1)
    for row, names in enumerate([[1], [1, 2]]):
        ids, kept, targets = train.call_args.args[3](row)
        if kind == "bert":
            assert {*names} <= {*kept} and {*ids[names]} == {net.tokenizer.mask_token_id}
            ids[kept] = targets
        else:
            assert kept.tolist() == [*range(19)] and targets.tolist() == [*ids[1:]]
        assert net.tokenizer.decode(ids) == expected[row]


@pytest.mark.parametrize("flag, name, count", [
    ("", "few-shot", 20), ("--pretrain-on-labeled", "few-shot-labeled-read", 50)])
def test_nothing_learned_is_no_bias(run, flag, name, count):
    """A null check, at a rate that moves no weight. The flag lets both read the m = 30 texts."""
    run(f"--pretrain-lr 1e-12 {flag}")
    (row,) = rows_of()
    for score in ("acc_{}", "nll_{}", "acc_{}_on_extra", "nll_{}_on_extra"):
        assert len({row[score.format(arm)] for arm in ("base", "extra", "test")}) == 1
    assert row["experiment"] == name and row["versions"].endswith(f" texts read {count}")


@pytest.mark.parametrize("kind", ["bert", "roberta"])  # which begins at pad + 1
def test_the_longest_text_fits(run, model_dir, kind):
    write_csv("mine.csv", [(f"{chr(97 + k)} {'word ' * 60}", k % 2) for k in range(26)])
    folder = model_dir(kind, max_position_embeddings=40)
    assert run(f"--csv mine.csv --m 4 --n 9 --model {folder}")[0] is None


@pytest.mark.parametrize("names, words", [
    ("👍 👎", "class '👍' is"), ("Good good", "class 'Good' is"), ("cafe café", "class 'cafe' is"),
    ("[MASK] a", "class '[MASK]' is")])
def test_names_that_cannot_be_learned_are_refused(refused, names, words):
    """The tokenizer knows no emoji, upper case or accents."""
    write_csv("mine.csv", [(f"{chr(97 + k)} b", names.split()[k % 2]) for k in range(26)])
    refused(words, "--csv mine.csv --with-answers --m 4 --n 9")


# Whole runs: what they write


@pytest.fixture(scope="session")
def tiny(model_dir, tmp_path_factory):
    folder = model_dir("bert", initializer_range=0.1)
    return str(folder.rename(tmp_path_factory.mktemp("named") / "tiny-bert"))  # it enters the seeds


@pytest.fixture
def flags(tiny, benchmark_csv):
    return (f"--model {tiny} --csv {benchmark_csv} --m 30 --n 20 --train-epochs 2 --pretrain-epochs"
            " 1 --train-lr 0.01 --pretrain-lr 0.01 --device cpu --workers 1"
            " --subsamples 1 --out results.csv").split()


@pytest.fixture
def run(script, flags, empty_folder, capsys):
    """run(flags, as typed) -> (message at its end or None, stdout) of main() in an empty folder; a
    flag given again wins."""
    def call(typed=""):
        capsys.readouterr()  # what making the models printed
        message = end_of(script.main, *flags, *typed.split())
        out, call.err = capsys.readouterr()
        return message, out

    return call


@pytest.fixture
def refused(run):
    """refused(words, flags): the run ends in one line, which names the words."""
    def call(words, typed=""):
        message, _ = run(typed)
        assert message.startswith("error: ") and words in message, message

    return call


def test_a_run_writes_rows(run, script, monkeypatch):
    """And prints base, unseen and seen of one set, and what to do next. A row is on the disk before
    the next is computed."""
    written = []
    append = script.append_row
    monkeypatch.setattr(
        script, "append_row", lambda *of: [append(*of), written.append(len(rows_of()))][0])
    message, out = run("--subsamples 2")
    rows = rows_of()
    assert message is None
    for k, row in enumerate(rows, 1):
        known = f"few-shot tiny-bert topics 30 20 {k} 3".split()
        assert [*row.values()][:7] == known and all(row.values())
        scores = [float(row[f"acc_{arm}"]) for arm in ("base", "extra", "test")]
        (line,) = re.findall(rf"topics draw {k} (base .* unseen .* seen \S+) ", out)
        assert [float(number) for number in re.findall(r"\d\.\d{3}", line)] == scores
        assert not re.search("[,'\"]", row["versions"]), "a plain cell"
        assert re.search(r" epochs: pretrain: 1 train: 2 .* script \w{12} texts read 20$", row["versions"])
    assert "0 rows are in results.csv, 2 draws are left" in out
    assert out.endswith(f"rows: {Path.cwd()}/results.csv\nnext: python fit_model.py results.csv\n")
    message, out = run("--subsamples 2")
    assert "2 rows are in results.csv, 0 draws are left" in out and "\nnext: " in out
    assert message is None and written == [1, 2], "finished rows are skipped"
    run("--seed 1")
    *before, row = rows_of()
    assert before == rows and [row["seed"], row["split"]] == ["1", rows[0]["split"]]
    assert row["loss_extra"] != rows[0]["loss_extra"]


def test_a_bert_may_be_causal(script, model_dir):
    folder = model_dir("bert", transformers.BertLMHeadModel, is_decoder=True)
    assert script.find_model(str(folder), script.load_registry()).objective == "clm"


def test_scores_by_hand(script):
    """A class that is nowhere counts 0. Class 0: precision 1/2, recall 1/2; class 1: 1/2, 1."""
    log_p = np.log(np.full((4, 4), 0.1) + 0.6 * np.eye(4)[[0, 1, 1, 0]])
    found = script.scores_of(log_p, np.array([0, 0, 1, 2]))
    nll = -(math.log(0.7) + math.log(0.1)) / 2
    assert found == pytest.approx({"acc": 0.5, "f1": (1 / 2 + 2 / 3) / 4, "nll": nll})


def test_the_grid_of_all_combinations_runs(run, model_dir):
    """Each once. An XLM is masked, although it calls its layer lm_head; an OPT's output may be
    narrower."""
    xlm = model_dir("xlm")
    opt = model_dir("opt", word_embed_proj_dim=16)
    run(f"--model {xlm} {opt} --m 6 9 6 --n 4 8 --subsamples 2 1")
    found = Counter([(row["model"], row["m"], row["n"]) for row in rows_of()])
    assert found == {(model.name, m, n): {"4": 2, "8": 1}[n]
                     for model in (xlm, opt) for m in "69" for n in "48"}


def test_rows_of_older_versions_are_reproduced_and_go_on(script, said):
    """Of 30b0605 and of c3971ba, which wrote flags into `versions`. Other processors round
    otherwise; other draws change losses by over a hundredth."""
    flags = ("--tasks rotten_tomatoes --m 20 --n 40 --max-length 96 --workers 1 --device cpu "
             "--pretrain-epochs 4 --pretrain-lr 5e-4 --subsamples").split()
    script.main([*flags, "1"])
    (new,) = rows_of()
    shutil.copy(ROOT / "tests" / "rows_before.csv", "results.csv")
    old = rows_of()
    assert "2 rows are in results.csv, 0 draws are left" in said(script.main, *flags, 2).out
    assert rows_of() == old and [*new] == [*old[0]]
    assert said(load_script("fit_model").main, "results.csv").end is None
    for name, value in old[0].items():
        if name.startswith(("nll", "loss")):
            assert float(new[name]) == pytest.approx(float(value), rel=2e-3), name
        elif name.startswith(("acc", "discordant")):
            assert abs(float(new[name]) - float(value)) < 1.01 / 40, name
        elif not name.startswith(("f1", "seconds", "versions")):
            assert new[name] == value, name


# Going on


def test_another_recipe_or_other_data_is_refused(run, refused, tiny, benchmark_csv):
    Path("other").mkdir()
    other = Path("other/topics.csv")
    other.write_text(benchmark_csv.read_text().replace("goal", "gaol"))
    run()
    (before,) = rows_of()
    for typed in ("--pretrain-epochs 2", "--precision bf16", f"--csv {other}"):
        refused("has few-shot tiny-bert topics 30 20 1 0 with other texts, settings or model files:"
                " use", typed)
    twin = shutil.copytree(tiny, "twin/tiny-bert")
    Path(twin, "merges.txt").touch()
    refused("this run, has few-shot tiny-bert ", f"--model {tiny} {twin} --out twin.csv")
    assert not Path("twin.csv").exists()
    assert rows_of() == [before]


@pytest.mark.parametrize("place, change, whole", [
    (r"\Z", "few-shot,tiny,topi", 2), (r"\Z", "caf\udce9\n", 2), (r",[^,]*\Z", "", 1),
    (r"..\Z", "", 2), (r"\n(?!\Z)", "\r\n", 2), (r"\A", "\ufeff", 2), (r"\Z", "\r\n", 2),
    (r"\A.*?\n", r'\g<0>"torn, inside quo\n', 2)])
def test_a_torn_line_stands_alone_and_no_editor_loses_a_row(run, place, change, whole):
    typed = '--experiment few,"shot'  # is in quotes in the file
    run(f"--subsamples 2 {typed}")
    file = Path("results.csv")
    text = re.sub(place, change, file.read_text(), flags=re.DOTALL)
    text = text.encode(errors="surrogateescape")
    file.write_bytes(text)
    for _ in range(2):
        run(f"--subsamples 3 {typed}")
        assert file.read_bytes().startswith(text)
        added = csv.reader(file.read_bytes()[len(text) :].decode().strip().split("\n"))
        assert [cells[5] for cells in added] == ["2", "3"][whole - 1 :], "on lines of their own"


# Processes


def wait_for_rows(count, file, process=None):
    """Until they are there, or the process has ended."""
    deadline = time.time() + 100
    while time.time() < deadline and not (file.exists() and len(rows_of(file)) >= count):
        if process and process.poll() is not None:
            break
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_keeps_its_rows(number, flags, run):
    """By Ctrl-C, which its workers get, too, or by kill -9."""
    flags += "--workers 2 --subsamples 5000".split()
    process = subprocess.Popen(
        [sys.executable, ROOT / "run_experiment.py", *flags], text=True,
        stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    file = Path("results.csv")
    wait_for_rows(4, file, process)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=200)
    if number == signal.SIGINT:
        assert process.returncode == 1 and err.count("\n") == 1 and err.startswith("stopped"), err
    whole = file.read_text().splitlines()
    assert 4 < len(whole) < 5000
    run(f"--subsamples {len(whole)}")
    assert file.read_text().splitlines()[: len(whole)] == whole
    found = [int(row["subsample"]) for row in rows_of()]
    assert sorted({*found, *range(1, len(whole) + 1)}) == sorted(found), "each once"


def waited(folder, sample, *_, **__):
    """The first ends, then the second fails, while the third goes on."""
    k = sample.row["subsample"]
    if k == 2:
        wait_for_rows(1, folder / "results.csv")
        raise ValueError("diverged")
    if k == 3:
        time.sleep(60)
        (folder / "third").touch()
    return dict.fromkeys(load_script("run_experiment").COLUMNS, 0.5) | sample.row


def test_a_failure_ends_the_others_and_keeps_what_ended(refused, script, monkeypatch):
    monkeypatch.setattr(script, "run_subsample", functools.partial(waited, Path.cwd()))
    refused("diverged", "--workers 2 --subsamples 3")
    assert [row["subsample"] for row in rows_of()] == ["1"] and not Path("third").exists()


def counted(sample, device, threads, **_):
    """run_subsample; versions: its process and how many models that loaded."""
    row = RUN_SUBSAMPLE(sample, device, threads)
    loads = load_script("run_experiment").load_network.cache_info().misses
    return row | {"versions": f"{os.getpid()} {loads}"}


def test_a_process_loads_its_model_once(run, script, monkeypatch):
    monkeypatch.setattr(script, "run_subsample", counted)
    run("--workers 2 --subsamples 4 --m 30 24")
    found = {row["versions"] for row in rows_of()}
    processes = {words.split()[0] for words in found}
    assert len(rows_of()) == 8 and len(found) == len(processes) <= 2
    assert str(os.getpid()) not in processes


@pytest.mark.parametrize("device, numbers", [
    ("cpu", "49 9 0 4 1"), ("cpu", "49 2 0 2 1"), ("meta", "49 9 0 1 9"), ("cpu", "51 9 0 1 9"),
    ("cpu", "51 9 2 2 4"), ("cpu", "51 9 20 20 1")])
def test_only_small_models_on_a_cpu_get_four_workers(script, monkeypatch, device, numbers):
    """The cores are shared among workers. The largest model of a run decides."""
    size, cores, asked, workers, threads = map(int, numbers.split())  # in MB; 0: not asked
    monkeypatch.setattr(joblib, "cpu_count", lambda: cores)
    left = [(None, None, SimpleNamespace(size=own), None) for own in (9, size * 1e6, 8)]
    args = SimpleNamespace(device=device, workers=asked, dask=None, precision="float32")
    pool, found = script.open_pool(left, args)
    assert [pool.parallel_config["n_jobs"], found] == [workers, threads]


HASHES = {"split": "a99446012345", "data": "00123456789e", "recipe": "12345678901a"}


@pytest.mark.parametrize("hashes", ["299446012345 012345678901 2994460e1234",
                                    "0a2345678901 01234567890e e12345678901"])
def test_no_spreadsheet_takes_a_hash_for_a_number(script, tmp_path, hashes):
    path = tmp_path / "results.csv"
    row = dict.fromkeys(script.COLUMNS, "1") | dict(zip(HASHES, hashes.split()))
    script.append_row(path, {**row})
    file = pd.read_csv(path)[[*HASHES]]
    assert not file.apply(pd.to_numeric, errors="coerce").notna().any(axis=None)
    assert script.finished_rows(path)[script.key_of(row)] == (row["data"], row["recipe"])


def test_two_processes_append_whole_rows_below_one_header(script, tmp_path):
    """Each row twice, and it is there once."""
    rows = [dict.fromkeys(script.COLUMNS, f"{k}" * 1000) | HASHES for k in (1, 2)]
    jobs = [(tmp_path / f"{k // 4}.csv", rows[k % 2]) for k in range(160)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap(script.append_row, jobs, chunksize=1)
    whole = {",".join(line) for line in (script.COLUMNS, *[row.values() for row in rows])}
    for path, _ in jobs:
        lines = path.read_text().splitlines()
        assert {*lines} == whole and len(lines) == 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(address of a real Dask scheduler, processes of it and its two workers). A worker gives its
    number as the version of torch, so that a row tells where it was made."""
    folder = tmp_path_factory.mktemp("dask")
    processes = []
    for words in ("scheduler --host 127.0.0.1 --port 0", *["worker --nthreads 2 --no-nanny"] * 2):
        command = [sys.executable, "-m", "dask", *words.split(), "--no-dashboard",
                   "--scheduler-file", "scheduler.json"]
        processes.append(subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)))  # ends with the tests
    with distributed.Client(scheduler_file=str(folder / "scheduler.json")) as client:
        client.wait_for_workers(2, timeout=60)
        client.run(exec, "import os, torch; torch.__version__ = f'2.13.0+{os.getpid()}'")
        address = client.scheduler.address
    yield address, processes
    for process in processes:
        process.kill()
        process.wait()


def makers(rows):
    """Numbers of the processes that made the rows. Sets the version that they give right."""
    found = set()
    for row in rows:
        (number,) = re.findall(r" torch 2\.13\.0\+(\d+) ", row["versions"])
        row["versions"] = row["versions"].replace(f" 2.13.0+{number} ", f" {torch.__version__} ")
        found.add(int(number))
    return found


def test_dask_workers_make_rows_and_may_die(run, refused, cluster):
    """Both make rows, and the other goes on if one dies. A failure is one line."""
    address, (scheduler, worker, last) = cluster
    typed = f"--subsamples 8 --dask {address}"
    file = Path("results.csv")
    left = []
    run("--subsamples 8 --out local.csv")
    assert run(f"{typed} --out quiet.csv")[0] is None

    def kill():
        wait_for_rows(1, file)
        left.append(8 - len(rows_of(file)))
        worker.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert run(typed)[0] is None
    killer.join()
    rows = rows_of()
    quiet = rows_of("quiet.csv")
    assert left[0] > 0 and worker.wait() < 0 and last.pid in makers(rows)
    assert makers(quiet) == {worker.pid, last.pid}
    assert comparable(rows) == comparable(quiet) == comparable(rows_of("local.csv"))
    refused("the loss of arm extra", f"{typed} --seed 1 --pretrain-lr 1e30")
    assert not run.err, "what the scheduler says is not for the user"
    last.kill()
    last.wait()
    threading.Timer(2, scheduler.kill).start()
    with dask.config.set({"distributed.comm.timeouts.connect": "2s"}):
        message, _ = run(f"{typed} --seed 2 --subsamples 500")
    assert message.startswith("error: ") and not run.err


# Names and files


def test_a_results_file_that_is_not_ours_is_left_alone(run, refused, script):
    """Also if it came during the run."""
    run()
    file = Path("results.csv")
    rows = rows_of()
    before = file.read_text()
    for old, new in (("acc_extra", "acc_exta"), (",", ";")):
        text = before.replace(old, new)
        file.write_text(text)
        refused("results.csv has other columns")
        with pytest.raises(ValueError, match="other columns"):
            script.append_row(file, rows[0])
        assert file.read_text() == text
    file.write_text("")  # of a run that was killed before its first row
    assert run()[0] is None and len(rows_of()) == 1


def test_a_pasted_cell_runs(flags, empty_folder, monkeypatch):
    """Without __file__, with a kernel's argv, on two workers that could not import it."""
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    source = (ROOT / "run_experiment.py").read_text(encoding="utf-8")
    cell = {"__name__": "cell"}
    exec(compile(source, "<cell>", "exec"), cell)
    assert "'tasks.json'" in end_of(cell["main"], *flags)
    shutil.copy(ROOT / "tasks.json", ".")
    flags += ["--workers", "2"]
    assert end_of(cell["main"], *flags) is None and len(rows_of()) == 1
    called = []
    guard = source[source.index('if __name__ == "__main__":') :]
    exec(compile(guard, "<cell>", "exec"), {"__name__": "__main__", "main": called.append})
    assert called == [[]], "a pasted cell runs with the defaults, not with the kernel's arguments"


# Mistakes in flags


@pytest.mark.parametrize("typed, words", cases("""
    --model bort                         | could not load bort
    --csv absent.csv                     | No such file
    --device toaster                     | Expected one of cpu, cuda
    --out /sys/rows.csv                  | /sys/
    --experiment my-answers              | my-answers:
    --experiment my-labeled-read         | my-labeled-read:
    --n 5 10 20 --subsamples 7 3         | one for each of --n
    --m 3 30 9 --n 5 300 7               | topics is too small
    --tasks imdb --csv imdb.csv          | two tasks have one name: imdb
    --text text label                    | 'label' is the --label, so it cannot be a --text
    --pretrain-lr 1e30 --batch-size 64   | topics: the loss of arm extra is not finite"""))
def test_mistakes_in_flags(refused, typed, words):
    refused(words, typed)
    assert not [*Path().glob("*.csv")], "a refused start leaves no results"


@pytest.mark.parametrize("typed, words", [
    ("mine.csv", "unrecognized arguments: mine.csv"), ("--hub owner/name", "not allowed with"),
    ("--m 0", "invalid whole value: '0'"),
    ("--train-lr 0", "invalid "), ("--pretrain-lr inf", "invalid "),
    ("--tasks agnews", "invalid choice: 'agnews'")])
def test_mistakes_that_argparse_tells(run, typed, words):
    assert run(typed)[0] == 2 and words in run.err


def test_a_file_that_cannot_be_written_is_found_before_training(refused, script, monkeypatch):
    """The tests may run as root, who may write anywhere."""
    monkeypatch.setattr(script, "run_subsample", Mock(side_effect=ValueError("trained")))
    Path("results.csv").touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "no")))
        refused("PermissionError: [Errno 13]")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(37, "none")))
    refused("OSError: [Errno 37]")


@pytest.mark.parametrize("name, flags", [
    ("run_experiment", "--text, --label, --name, --split"),
    ("run_zero_shot", "--text, --label, --name, --split, --about, --answer")])
def test_words_for_ones_own_data_need_it(name, flags):
    message = end_of(load_script(name).main, *f"{flags},".replace(",", "=x").split())
    assert message == f"error: only for --csv and --hub: {flags}"


# Models


def edit_json(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    return edit


@pytest.mark.parametrize("edit, words", [
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
     "model.safetensors"),
    (lambda folder: os.truncate(folder / "model.safetensors", 9000), "SafetensorError"),
    (edit_json(num_hidden_layers=3), "layer.2")])
def test_a_model_that_cannot_be_used(refused, model_dir, edit, words):
    folder = model_dir("bert")
    edit(folder)
    refused(words, f"--model {folder}")


def with_nan(config):
    model = transformers.LlamaForCausalLM(config)
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = math.nan
    return model


@pytest.mark.parametrize("kind, changes, words", [
    ("bert", {"saved_as": transformers.BertModel}, "output layer: .* no .*'cls.predictions.bias'"),
    ("bert", {"initializer_range": 1e30}, "not finite"),
    ("llama", {"saved_as": with_nan}, "not finite"),
    ("mistral", {"is_causal": False, "initializer_range": 0.01}, "later tokens"),  # seen faintly
    ("mistral", {"is_causal": False, "precision": "bf16"}, "later tokens")])
def test_a_network_that_cannot_be_used(load, kind, changes, words):
    load("mistral", initializer_range=0.01)
    load("opt", initializer_range=9)  # rounding moves such logits by more than .001
    with pytest.raises(ValueError, match=words):
        load(kind, **changes)


def test_texts_that_a_model_does_not_know(script, tokenizer):
    script.check_known(tokenizer, ["a b c d e f", "a b c d e ខ្ញុំ"])
    with pytest.raises(ValueError, match="not know 50%"):
        script.check_known(tokenizer, ["ខ្ញុំ b"])


def test_a_models_own_code_is_never_run(refused, model_dir, monkeypatch):
    folder = model_dir("bert")
    edit_json(model_type="own", auto_map={"AutoConfig": "code.Own"})(folder)
    (folder / "code.py").write_text("open('executed', 'w')\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")  # what transformers asks: run it?
    refused("custom code", f"--model {folder}")
    assert not Path("executed").exists()


def test_the_hash_of_a_model_is_of_all_files_that_decide_its_numbers(script, tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "mine")
    found = []
    for name in ("README.md", "config.json", "model.safetensors", "a.Q4_1.gguf", "merges.txt",
                 "model-00001-of-00002.safetensors", "tokenizer.json", "tekken.json", "vocab.txt",
                 "spiece.model"):
        (folder / name).write_text((folder / "config.json").read_text() + " ")
        found.append(script.find_model(str(folder), script.load_registry()).weights_hash)
    assert len({*found}) == 10


OWN = {"epochs": {"pretrain": 5, "train": 7}, "learning_rates": {"train": 0.5},
       "batch_sizes": {"pretrain": 9}}


@pytest.mark.parametrize("typed, numbers", cases("""
    |                                                5 7 1e-4 0.5 9 16
    --train-epochs 8 --pretrain-lr 2 |                 5 8 2 0.5 9 16
    --pretrain-epochs 8 --train-lr 2 --batch-size 3 |  8 7 1e-4 2 3 3"""))
def test_a_flag_comes_before_a_tasks_recipe_and_that_before_the_models(script, typed, numbers):
    task = script.Task([], None, [], "", {"recipes": {"bert": OWN}})
    recipe = recipe_of(script, typed, task, "mine", "bert")
    assert [value for name in OWN for value in recipe[name].values()] == [
        *map(float, numbers.split())]
    assert recipe["max_length"] == 256
    with pytest.raises(ValueError, match="mistral works only with run_zero_shot.py"):
        recipe_of(script, typed, task, "mistral", "mistral")
