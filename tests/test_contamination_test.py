"""contamination_test.py: log-probabilities against a plain loop, p-values against brute force,
scipy and the published log, detectors by hand; silence where nothing was seen, else alarm."""

import functools
import itertools
import json
import math
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pandas as pd
import peft
import pytest
import torch
import transformers
from pytest import approx
from safetensors.torch import load_file, save_file
from scipy import stats

from conftest import ARMS, ROOT, byte_tokenizer, end_of, load_script

pytestmark = pytest.mark.usefixtures("empty_folder")

WORDS = "river stone green paper quick north salt window apple seven music cold".split()
HEAD = "Classify a text as one of these:\nbad\ngood\n\nAnswer with its mood.\n\n"
OWN = ("logp", "zlib", "mink", "minkpp")  # the detectors that need one model alone
# tokens of two bytes, one of which straddles the end of a head; all others have one
PAIRS = "Ċ# eĠ or Ġs en sĠ er th ap Ġg ic te as iv tĠ wi re al on ev nd co pl ow mu dĠ kĠ".split()
MERGES = [tuple(pair) for pair in PAIRS]
encode = byte_tokenizer(MERGES)
contam = load_script("contamination_test")


@pytest.fixture
def say(capsys):
    """What main prints."""

    def run(flags):
        capsys.readouterr()
        contam.main(flags.split())
        return capsys.readouterr().out

    return run


def refused(flags):
    """The one line with which these flags end."""
    error = end_of(contam.main, *flags.split())
    assert error.startswith("error: ")
    return error


def make_texts(count, size):
    rng = np.random.default_rng(3)
    return [" ".join(rng.choice(WORDS, size)) for _ in range(count)]


@pytest.fixture(scope="module")
def make_model(model_dir):
    return functools.partial(model_dir, merges=MERGES)


def plain_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def both(make_model):
    """{kind: (folder, the script's net, the model as transformers loads it)}"""
    models = {}
    for kind in ("gpt2", "llama"):
        folder = make_model(kind)
        net = contam.open_scorer(str(folder), None, "none", "float32", "cpu")
        models[kind] = folder, net, plain_model(folder)
    return models


def plain_rows(lm, ids, first):
    """[tokens, 3]: log p, mean and sd of log p over the vocabulary, of each token from `first` on;
    by transformers' forward, one sequence at a time."""
    with torch.no_grad():
        log_p = lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(1).numpy()
    found = []
    for row, token in zip(log_p[first - 1 :], ids[first:]):
        p = np.exp(row)
        mean = (p * row).sum()
        found.append((row[token], mean, math.sqrt((p * (row - mean) ** 2).sum())))
    return np.array(found)


def plain_scores(lm, head, text):
    """plain_rows of the tokens that end behind the head."""
    ids = encode(head + text)["input_ids"]
    first = next(i for i in range(len(ids)) if len(encode.decode(ids[: i + 1])) > len(head))
    return plain_rows(lm, ids, first)


def plain_sum(lm, head, texts):
    return plain_scores(lm, head, "\n\n".join(texts))[:, 0].sum()


def plain_detectors(scores, text):
    log_p, mean, sd = scores.T
    count = max(int(0.2 * len(scores)), 1)
    lowest, standard = sorted(log_p)[:count], sorted((log_p - mean) / sd)[:count]
    ratio = np.mean(log_p) / len(zlib.compress(text.encode()))
    return np.mean(log_p), ratio, np.mean(lowest), np.mean(standard)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_padded_batches_equal_a_plain_loop(kind, both):
    (_, net, lm), rng = both[kind], np.random.default_rng(1)
    sizes = ((2, 1), (31, 1), (9, 4), (8, 1), (10, 9), (17, 12))  # tokens, first that is scored
    sequences = [(rng.integers(1, 250, size).tolist(), first) for size, first in sizes]
    expected = [plain_rows(lm, ids, first).T for ids, first in sequences]
    for limit in (1, 20, 1000):
        found = contam.score_tokens(net._replace(context=30), sequences, limit, "")
        for scores, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(scores, wanted, rtol=2e-4, atol=1e-4)
    assert np.ptp(np.concatenate(expected, axis=1)[0]) > 3
    with pytest.raises(SystemExit, match="has 30 tokens, the model takes 29: "):
        contam.score_tokens(net._replace(context=29), sequences, 20, "")


def test_the_scored_tokens_are_the_examples_own(both):
    """And one that is partly the head's."""
    net = both["gpt2"][1]
    text = "### Text: cold wheel\n### Answer: good"
    ids, first = contam.tokenise(net, HEAD, text)
    assert ids == encode(HEAD + text)["input_ids"] and encode.decode(ids[first:]) == "\n" + text
    assert contam.tokenise(net, "", text) == (encode("<end>" + text)["input_ids"], 1)

    def ending(body, **_):  # a tokenizer that ends every text
        return {"input_ids": [7, 8, 0], "offset_mapping": [(0, 1), (1, 2), (0, 0)]}

    net = net._replace(tokenizer=ending)
    for eos, sep, bos, begin in ((0, None, 5, [5]), (None, 0, 7, [])):  # 7: it is there already
        ending.eos_token_id = eos
        ending.sep_token_id = sep
        ending.bos_token_id = bos
        assert contam.tokenise(net, "", "ab") == ([*begin, 7, 8], 1)
        assert contam.tokenise(net, "a", "b") == ([7, 8], 1)


def test_text_detectors_by_hand():
    """p = (1/2, 1/4, 1/4): in units of log 2, log p is (-1, -2, -2), its mean -1.5, its sd 1/2.
    Five tokens, standardised: 1, -1, -1, -1, -4."""
    found = contam.token_scores(torch.log(torch.tensor([[4.0, 2, 2]])), torch.tensor([1]))
    np.testing.assert_allclose(found[:, 0] / math.log(2), [-2, -1.5, 0.5], rtol=1e-6)
    log_p, mean = [-1, -2, -3, -2, -2.5], [-1.5, -1.5, -2, -1.5, -1.5]
    scores = np.array([log_p, mean, [0.5, 0.5, 1, 0.5, 0.25]])
    by_hand = -2.1, -2.1 / len(zlib.compress("ä text".encode())), -3, -4
    assert contam.detect(scores, "ä text") == approx(by_hand)
    assert contam.detect(np.repeat(scores, 2, axis=1), "x")[2:] == (-3, -4)  # two of ten
    fourteen = np.hstack([scores, scores[:, [0] * 9]])
    assert contam.detect(fourteen, "x")[2:] == (-2.75, -2.5)  # two of 14
    assert contam.detect(np.zeros((3, 4)), "x")[3] == 0  # a model without any doubt


def test_shards_are_scored_order_by_order(both):
    """Of three examples there are five other orders: all of them, or four random ones."""
    _, net, lm = both["llama"]
    examples = "red apple,cold night,seven wheels of glass,salt,red apple,red apple,salt".split(",")
    shards = contam.cut_shards(examples, 3, "")
    assert shards == [examples[:3], examples[3:5], examples[5:]]
    possible = [plain_sum(lm, HEAD, texts) for texts in itertools.permutations(shards[0])]
    for count in (5, 4):
        args = contam.parse_args(["--permutations", str(count)])
        log = contam.score_orders(net, shards, HEAD, args, "")
        first, second, third = log["shuffled_logprobs"]
        assert (len(first), len(third)) == (count, 1)
        canonical = log["canonical_logprobs"]
        assert canonical == approx([plain_sum(lm, HEAD, s) for s in shards], rel=2e-5)
        assert second == approx([plain_sum(lm, HEAD, shards[1][::-1])], rel=2e-5)
        if count == 5:
            assert sorted([canonical[0], *first]) == approx(sorted(possible), rel=2e-5)
        assert all(np.min(np.abs(np.subtract(possible, value))) < 1e-3 for value in first)


def test_a_log_gives_the_same_p(both, say):
    """12 shards of two and 6 of one."""
    texts = make_texts(30, 3)
    Path("mine.txt").write_text("\n".join(texts) + "\n")
    folder, _, lm = both["llama"]
    text = say(f"--examples mine.txt --shards 18 --log log.json --model {folder}")
    written = json.loads(Path("log.json").read_text())
    assert "shards: 18, of several orders: 12" in text
    assert [len(row) for row in written["shuffled_logprobs"]] == [1] * 12 + [0] * 6
    plain = plain_sum(lm, "<end>", texts[:2])
    assert written["canonical_logprobs"][0] == approx(plain, rel=2e-5)
    assert say("--from-log log.json") == text


@pytest.mark.parametrize("name, content, examples", [
    ("a.txt", "\ufeff[a\u2028b\r\nc\x0cd\x85e\r\nf\n\n", ["[a\u2028b", "c\x0cd\x85e", "f"]),
    ("a.JSONL", '{"text": "a\\nb", "label": 1}\n"c\u2028d"\n', ["a\nb", "c\u2028d"]),
    ("a.json", '[\n  "a\\nb", {"text": "c"}\n]\n', ["a\nb", "c"]),  # as its authors publish
])
def test_texts_are_cut_at_newlines_alone(name, content, examples):
    Path(name).write_bytes(content.encode())
    assert contam.read_examples(Path(name)) == examples


def test_the_order_test_says_what_its_p_means(say):
    """Ten shards of two: the canonical order is the likelier one in all, p = 2^-10, or in half of
    them: as many of five coins or more as of five others; of four: p is 1/16 at least."""
    cannot = "these shards cannot tell: p is 0.0625 at least"
    half = (1 + 252 / 1024) / 2
    for count, better, p, words in ((10, 10, 2**-10, "flagged"), (10, 5, half, "no sign"),
                                    (5, 5, 2**-5, "flagged"), (4, 4, 2**-4, cannot)):
        log = {"canonical_logprobs": [-1.0] * better + [-2.0] * (count - better),
               "shuffled_logprobs": [[-2.0]] * better + [[-1.0]] * (count - better)}
        Path("log.json").write_text(json.dumps(log))
        text = say("--from-log log.json")
        assert f"At the level 0.05: {words}" in text
        assert f"p exact         {p:.6f}\np as published  " in text
    alike = contam.order_p({"canonical_logprobs": [-1, -2], "shuffled_logprobs": [[-1], []]})
    assert alike.p_exact == alike.least == 1 and alike.informative == 0
    repeats = {"canonical_logprobs": [-1] * 2, "shuffled_logprobs": [[-2, -3, -3]] * 2}
    assert contam.order_p(repeats).least == 1 / 9
    one = contam.order_p({"canonical_logprobs": [-1, -1], "shuffled_logprobs": [[-2], [-2]]})
    assert one.p_exact == 0.25 and math.isnan(one.p_published)


def test_permutation_p_equals_brute_force(monkeypatch):
    rng = np.random.default_rng(0)
    kinds = (2,), (6, 2, 6), (2, 24, 6, 2), (2,) * 10
    for sizes, shift in itertools.product(kinds, (-1.0, 0.0, 3.0)):
        gaps = [np.array([0.0, *rng.normal(-shift, 2, size - 1)]) for size in sizes]
        sums = [sum(values) for values in itertools.product(*gaps)]
        brute = sum(value >= -1e-12 for value in sums) / len(sums)
        assert contam.permutation_p(gaps) == brute
        with monkeypatch.context() as patch:
            patch.setattr(contam, "ENUMERATED", 0)
            patch.setattr(contam, "DRAWS", 10**5)
            drawn = contam.permutation_p(gaps)
        assert drawn == approx(brute, abs=5 * math.sqrt(brute * (1 - brute) / 1e5) + 2e-5)
    best = [np.array([0.0, -1.0])] * 50  # the best of 2^50 orders: no draw reaches it
    assert contam.permutation_p(best) == approx(1 / (10**6 + 1), rel=1e-12)
    assert contam.permutation_p(best[:20]) == 2.0**-20


def test_the_published_log_gives_the_published_p(monkeypatch):
    """Of 2^244 combinations; by their convolution on a grid of .0005 p exact is .386 to .388, that
    of 10^5 draws has a standard deviation of .0015."""
    log = contam.read_log(ROOT / "tests" / "published" / "contamination_log_extra.json")
    monkeypatch.setattr(contam, "DRAWS", 10**5)
    found = contam.order_p(log)
    assert (found.shards, found.informative) == (256, 244)
    assert found.p_published == approx(log["pval"], abs=1e-9)
    assert abs(log["pval"] - 0.336248) < 1e-6
    assert found.p_exact == approx(0.387, abs=0.006)


def read_rows(path):
    """A contamination.csv, as strings"""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    assert list(table.columns) == contam.TABLE
    return table.set_index(["pack", "subsample", "arm"])


@pytest.fixture(scope="module")
def audited(tmp_path_factory, make_model, benchmark_csv, zero):
    """Units of run_zero_shot.py: a padded one with answers, learned by heart, and two packed ones,
    hardly seen and cut to a short context: (their folder, the model, the table)."""
    folder = tmp_path_factory.mktemp("audited")
    model = make_model("llama", hidden_size=64, max_position_embeddings=300)
    flags = ["--csv", str(benchmark_csv), "--model", str(model), "--adapters", "kept"]
    flags += "--m 4 --n 24 --threads 1 --workers 1".split()
    padded = "--answers --pretrain-epochs 8 --pretrain-lr 1e-2 --batch-size 4 --subsamples 1"
    packed = "--pack --pretrain-epochs 1 --subsamples 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for more in (padded, packed):
            zero.main([*flags, *more.split()])
        contam.main([])  # the folder kept
    rows = read_rows(folder / "contamination.csv")
    assert len(rows) == 9
    return folder / "kept", model, rows


def unit_of(audited, subsample):
    """The folder of a packed unit."""
    return next(audited[0].glob(f"zero-shot-packed-*-24-{subsample}-0-*"))


def test_a_units_rows_equal_a_plain_loop(audited):
    """One text at a time, on a model that peft loads afresh; the packs of this unit were cut."""
    _, model, rows = audited
    path = unit_of(audited, 1)
    unit = json.loads((path / "unit.json").read_text())
    head, texts = unit["instruction"] + "\n\n", unit["test"]["examples"] + unit["extra"]["examples"]
    values, logs = {}, {}
    for arm in ARMS:
        lm = plain_model(model)
        if arm != "base":
            lm = peft.PeftModel.from_pretrained(lm, path / arm).eval()
        found = [plain_detectors(plain_scores(lm, head, text), text) for text in texts]
        values[arm] = pd.DataFrame(found, columns=OWN)
        logs[arm] = {"canonical_logprobs": [], "shuffled_logprobs": []}
        for one, two in zip(texts[:24:2], texts[1:24:2]):
            logs[arm]["canonical_logprobs"].append(plain_sum(lm, head, [one, two]))
            logs[arm]["shuffled_logprobs"].append([plain_sum(lm, head, [two, one])])
    for arm, other in (("extra", "test"), ("test", "extra")):
        for name, less in (("ref", "base"), ("twin", other)):
            values[arm][name] = values[arm]["logp"] - values[less]["logp"]
    for arm in ARMS:
        row = rows.loc["8", "1", arm]
        for name in contam.DETECTORS:
            if arm == "base" and name in ("ref", "twin"):
                assert row[f"auc_{name}"] == ""
                continue
            scores = values[arm][name].to_numpy()
            wins = (scores[:24, None] > scores[24:]).mean()
            assert float(row[f"auc_{name}"]) == approx(wins, abs=2.1e-3) and 0 < wins < 1
        p = contam.order_p(logs[arm])
        assert float(row["p_exact"]) == approx(p.p_exact, abs=2 / 4096)
        assert float(row["p_published"]) == approx(p.p_published, abs=1e-3)
        assert (row["shards"], row["informative"]) == ("12", "12")


TWO = "a b\nc d\n"
LOG = '{"canonical_logprobs": [-1, %s], "shuffled_logprobs": [%s]}'


@pytest.mark.parametrize("name, content, flags, words", [
    ("a.txt", "a b\nc d\ne f\n", "--shards 4", "3 examples cannot fill 4 shards"),
    ("a.txt", "a b\n", "", "1 examples cannot fill 0 shards"),
    ("a.txt", "", "", "is empty"),
    ("a.txt", "a\n\nb", "", "empty example"),
    ("a.txt", "a\na\nb\nb\n", "", "use fewer --shards"),
    ("a.txt", TWO, "--examples gone.txt", "No such file"),
    ("a.txt", "\xff\xfea", "", "UnicodeDecodeError"),
    ("a.txt", TWO, "--model=", "--examples needs --model"),
    ("a.txt", TWO, "--reference other", "--reference needs --held-out"),
    ("a.txt", TWO, "--held-out gone.txt", "gone.txt cannot be used"),
    ("a.txt", TWO, "--log no/such/log.json", "cannot be written"),
    ("a.txt", TWO, "--device cuda:7", "--device"),
    ("a.jsonl", '"a"\n3', "", "AttributeError"),
    ("a.jsonl", '"a"\n"b', "", "JSONDecodeError"),
    ("a.jsonl", "", "", "is empty"),
    ("a.json", '["a", "\\ud800"]', "", "UnicodeEncodeError"),
    ("a.json", '[{"txt": "a"}]', "", "KeyError"),
    ("log", LOG % (-1, "[-1]"), "", "shorter"),
    ("log", LOG % ("NaN", "[-1], [-2]"), "", "finite"),
])
def test_a_mistake_is_one_line(name, content, flags, words, both):
    Path(name).write_text(content, "latin-1")
    what = f"--model {both['gpt2'][0]} --examples"
    if name == "log":
        what = "--from-log"
    assert words in refused(f"{what} {name} {flags}")
    assert Path(name).read_text("latin-1") == content


def test_a_gguf_file_is_read_from_its_folder(monkeypatch):
    found = []

    def load(source, gguf_file, use_safetensors=None, **_):
        found.append((source, gguf_file, use_safetensors))

    for auto in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        monkeypatch.setattr(auto, "from_pretrained", load)
    with pytest.raises(SystemExit):
        contam.open_scorer(*contam.model_files("mine/some.Q4_1.gguf"), "none", "float32", "cpu")
    assert found == [("mine", "some.Q4_1.gguf", None), ("mine", "some.Q4_1.gguf", False)]


def test_unfit_models_are_refused(make_model, monkeypatch):
    Path("mine.txt").write_text(TWO)
    flags = "--examples mine.txt --log log.json --model"
    assert "masked model" in refused(f"{flags} {make_model('bert')}")
    folder = make_model("gpt2")
    weights = load_file(folder / "model.safetensors")
    weights["transformer.ln_f.weight"][0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "not finite" in refused(f"{flags} {folder}") and not Path("log.json").exists()
    foreign = {f"foreign.{name}": weight for name, weight in weights.items()}
    save_file(foreign, folder / "model.safetensors", {"format": "pt"})
    assert "no weights for" in refused(f"{flags} {folder}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "for smollm2 the path that run_zero_shot.py" in refused(f"{flags} no/such")


@pytest.fixture
def unit_path(audited):
    """A copy of one unit, in the folder kept."""
    return shutil.copytree(unit_of(audited, 1), Path("kept/one"))


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(contam, "open_scorer", None)


def change_unit(path, change):
    """As run_zero_shot.py would have written it."""
    unit = json.loads((path / "unit.json").read_text())
    del unit["hash"]
    change(unit)
    unit["hash"] = load_script("run_zero_shot").short_hash(unit)
    (path / "unit.json").write_text(json.dumps(unit))


def test_a_unit_without_its_adapter_is_refused(unit_path):
    (unit_path / "test" / "adapter_model.safetensors").unlink()
    assert "make this unit again" in refused("kept")
    assert not Path("contamination.csv").exists()


def test_a_unit_of_another_form_is_refused(unit_path, no_model):
    file = unit_path / "unit.json"
    for text in (file.read_text()[:-9], "[]", "{}"):
        file.write_text(text)
        assert "unit.json cannot be used" in refused("kept")


def test_units_count_once(unit_path, no_model):
    two = shutil.copytree(unit_path, Path("kept/two"))
    change_unit(two, lambda unit: unit["row"].update(recipe="0" * 12, data="0" * 12))
    assert "two is there twice" in refused("kept")
    change_unit(two, lambda unit: unit["row"].update(experiment="other"))
    assert len(contam.read_units(Path("kept"), contam.parse_args([]))) == 2


def test_an_audit_goes_on_where_it_was(audited, unit_path, say, monkeypatch):
    """Killed in its second unit; the first is not scored again; the result is that of one run.
    Other flags, a unit that was made again or is gone: refused, the table stays."""
    two = shutil.copytree(unit_of(audited, 2), Path("kept/two"))
    audit_unit, calls = contam.audit_unit, []

    def kill(net, unit, args):
        calls.append(unit["folder"].name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return audit_unit(net, unit, args)

    monkeypatch.setattr(contam, "audit_unit", kill)
    assert end_of(contam.main, "kept").startswith("stopped: audited units are kept")
    text = say("kept")
    assert calls == ["one", "two", "two"] and "2 units, 1 to audit" in text
    assert "answers False, units: 2\n" in text
    pd.testing.assert_frame_equal(read_rows("contamination.csv"), audited[2].loc[["8"]])
    assert not list(Path().glob("*draft"))
    assert "2 units, 0 to audit" in say("kept") and len(calls) == 3
    before = Path("contamination.csv").read_bytes()
    for flag in ("--shards", "--permutations"):
        assert "with other flags" in refused(f"kept {flag} 6")
    for name in ("adapters", "model"):  # trained again; other weights of the base model
        whole = (two / "unit.json").read_text()
        change_unit(two, lambda unit: unit[name].update(weights="other"))
        assert "have changed" in refused("kept")
        (two / "unit.json").write_text(whole)
    shutil.rmtree(unit_path)
    assert "holds units that are not in kept" in refused("kept")
    assert Path("contamination.csv").read_bytes() == before


def test_only_files_of_this_script_are_replaced(unit_path, no_model):
    assert "run_zero_shot.py --adapters nowhere" in refused("nowhere")
    assert "cannot fill 24 shards" in refused("kept --shards 24")
    assert "cannot be written" in refused("kept --out no/such/table.csv")
    assert "--held-out needs --examples" in refused("--held-out held.txt")
    rows = make_table()
    for wrong in (pd.concat([rows, rows[:3]]), rows[:5], rows[:0], rows.drop(columns="p_exact")):
        wrong.to_csv("results.csv", index=False)
        before = Path("results.csv").read_bytes()
        for flags in ("kept --out", "--from-table"):
            assert "results.csv cannot be used" in refused(f"{flags} results.csv")
        assert Path("results.csv").read_bytes() == before


def test_a_model_is_opened_as_told(audited, unit_path, monkeypatch):
    def stop(*kind):
        raise SystemExit(repr(kind))

    monkeypatch.setattr(contam, "open_scorer", stop)
    Path("mine.txt").write_text(TWO)
    flags = "--examples mine.txt --model lab/m --shards 1 --quantize nf4 --precision bf16".split()
    assert end_of(contam.main, *flags) == repr(("lab/m", None, "nf4", "bf16", None))
    change_unit(unit_path, lambda unit: unit["model"].update(precision="bf16"))
    wanted = str(audited[1]), None, "none", "bf16", "cpu"
    assert end_of(contam.main, "kept", "--device", "cpu") == repr(wanted)


def make_table(units=2, **columns):
    """Rows of a table: AUCs .5 with normal noise, or as given for the arm test; p-values .5; equal
    accuracies."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({
        "experiment": "packed", "model": "m", "task": "a", "m": 4, "n": 50,
        "subsample": np.repeat(np.arange(units) + 1, 3), "seed": 0, "data": "d", "recipe": "r",
        "pack": 8, "answers": False, "epochs": 1, "arm": [*ARMS] * units, "accuracy": 0.5,
        "accuracy_on_extra": 0.5, "discordant": 0.1, "discordant_on_extra": 0.1, "shards": 25,
        "informative": 25, "p_published": 0.5, "p_exact": 0.5})
    rows["audit"] = rows["subsample"].astype(str)
    for name in contam.DETECTORS:
        rows[f"auc_{name}"] = rng.normal(0.5, 0.01, len(rows))
    rows.loc[rows["arm"] == "base", ["auc_ref", "auc_twin"]] = math.nan
    for name, values in columns.items():
        rows.loc[rows["arm"] == "test", name] = values
    return rows[contam.TABLE]


def test_the_table_of_detectors_by_hand():
    """Crossed AUC (A + 1 - B) / 2 of A, B = (.6, .5), (.8, .4): .55 and .7, mean .625; the variance
    of an AUC of two units is (2 n + 1) / (12 n^2 2) = 101 / 60000; adjusted by Benjamini and
    Hochberg: p times 6 / rank, the least from there on; twin is not counted."""
    rows = make_table(auc_ref=[0.6, 0.8], p_exact=[0.01, 0.03], p_published=[0.02, 0.2])
    rows.loc[rows["arm"] == "extra", ["auc_ref", "p_exact"]] = [[0.5, 0.2], [0.4, 0.3]]
    rows.loc[rows["arm"] == "base", ["p_exact", "p_published"]] = [[0.4, 0.1], [0.6, 0.7]]
    table = contam.detectors_of(rows.sample(frac=1, random_state=0))
    ref = table.loc["ref"]
    half = stats.t.ppf(0.945, 1) * 0.15 / 2
    assert (ref["AUC"], ref["crossed AUC"], ref["±"]) == approx((0.7, 0.625, half))
    for line, column, product in (("order test", "p", 0.01 * 0.03), ("of extra", "p", 0.2 * 0.3),
                                  ("order test", "p of base", 0.4 * 0.6)):
        fisher = product * (1 - math.log(product))  # of two p-values
        assert table.loc[line, column] == approx(fisher)
    gain = stats.norm.isf([0.02, 0.2]) - stats.norm.isf([0.1, 0.7])
    t = gain.mean() / (gain.std(ddof=1) / math.sqrt(2))
    assert table.loc["relative to base", "p"] == approx(stats.t.sf(t, 1))
    sd = math.sqrt(101 / 60000)
    auc = rows[rows["arm"] == "base"]["auc_mink"]
    p_of_base = stats.norm.sf((auc.mean() - 0.5) / sd)
    assert table.loc["Min-K%", "p of base"] == approx(p_of_base, rel=1e-9)
    assert ref["p"] == approx(stats.norm.sf(0.2 / sd), rel=1e-9)
    names = [*[contam.DETECTORS[name] for name in OWN], "ref", "order test"]
    p = table.loc[names, "p"].sort_values()
    by_hand = (p * 6 / np.arange(1, 7))[::-1].cummin()
    for name in names:
        assert table.loc[name, "adjusted"] == approx(by_hand[name])
    assert table["adjusted"].notna().sum() == 6 and math.isnan(table.loc["ref", "p of base"])
    assert contam.detectors_of(rows[:3])["±"].isna().all()  # one unit


def test_single_models_are_flagged_after_adjustment():
    """n = 50: the normal's p of an AUC A is that of (A - .5) / sqrt(101 / 30000). Of six p-values
    the least counts six times, two equal ones three times: .008 and .016 twice are flagged, .009 is
    not."""
    def auc(p):
        return 0.5 + stats.norm.isf(p) * math.sqrt(101 / 30000)

    ones = dict.fromkeys(["auc_zlib", "auc_mink", "auc_minkpp", "auc_twin"], [0.4] * 3)
    ones["auc_logp"] = [auc(0.5), auc(0.016), auc(0.009)]
    ones["auc_ref"] = [auc(0.008), auc(0.016), auc(0.5)]
    single = contam.detectors_of(make_table(3, p_published=[1e-6] * 3, **ones))["single"]
    assert (single["ref"], single["log p"], single["order test"], single["Min-K%"]) == (2, 1, 0, 0)
    assert single[["twin", "of extra", "relative to base"]].isna().all()


def test_harm_by_hand():
    """n = 50. Unit 1: on test .7 - .6, on extra .5 - .5: bias 5; w = 50 (.2 - .01 + .1).
    Unit 2: bias 3. One imaginary text a set is 10^4 2 / (4 50^2) = 2 points^2, shared by the units;
    six degrees of freedom."""
    units = pd.DataFrame({"n": 50, "acc_base": 0.5, "acc_extra": 0.6, "acc_test": [0.7, 0.62],
                          "acc_base_on_extra": 0.6, "acc_extra_on_extra": [0.5, 0.54],
                          "acc_test_on_extra": 0.5, "discordant": [0.2, 0.1],
                          "discordant_on_extra": 0.1})
    w = [50 * (0.2 - 0.01 + 0.1), 50 * (0.1 - 0.0004 + 0.1 - 0.0016)]
    harm = contam.harm_of(units)
    half = stats.t.ppf(0.945, 6) * math.sqrt((np.mean(w) + 2 / 2) / 2)  # they vary by less, 2
    assert harm == approx((0.55, 0.55, 0.59, 4, half, True))
    far = units.assign(acc_test=[0.7, 0.3], acc_extra_on_extra=0.5)  # biases 5 and -15
    assert contam.harm_of(far).half == approx(stats.t.ppf(0.945, 6) * math.sqrt(200 / 2))
    unknown = dict.fromkeys(contam.NOISE, math.nan)
    old = contam.harm_of(far.assign(**unknown))
    assert old.half == approx(stats.t.ppf(0.945, 1) * math.sqrt(200 / 2))
    old = contam.harm_of(units.assign(**unknown))
    bound = np.mean([50 * (0.1 - 0.01), 50 * (0.02 - 0.0004 + 0.04 - 0.0016)])  # d >= |b|
    assert bound > 2 and not old.counted
    assert old.half == approx(stats.t.ppf(0.945, 1) * math.sqrt(bound / 2))
    assert math.isnan(contam.harm_of(units[:1].assign(discordant=np.nan)).half)


def test_a_units_accuracies_are_those_of_the_run(audited):
    folder, key = audited[0].parent, ["experiment", "subsample"]
    results = pd.read_csv(folder / "results.csv").set_index(key).sort_index()
    found = contam.unit_rows(contam.read_table(folder / "contamination.csv"))
    names = ["n", "discordant", "discordant_on_extra"]
    for arm in ARMS:
        names += [f"acc_{arm}", f"acc_{arm}_on_extra"]
    found = found.set_index(key).sort_index()
    pd.testing.assert_frame_equal(found[names], results[names], check_dtype=False)
    assert results["discordant"].sum() > 0 and len(results) == 3


def test_a_memorised_set_is_told(audited, say):
    folder, _, rows = audited
    for name in contam.DETECTORS:
        auc = rows.loc[("1", "1"), f"auc_{name}"].replace("", "nan").astype(float)
        assert auc["test"] > 0.9 and auc["extra"] < 0.1
    text = say(f"--from-table {folder.parent}/contamination.csv")
    padded = text[text.index("epochs 8, pack 1, answers True, units: 1") :].split("\n\n")[0]
    assert "\nflagged by log p, log p / zlib, Min-K%, Min-K%++, ref\n" in padded
    assert padded.count("1 of 1") == 5
    table = contam.read_table(ROOT / "docs" / "contamination.csv")
    base = table[table["arm"] == "base"].drop_duplicates(["task", "subsample"])
    for name in OWN:
        assert contam.rank_sum_p(base[f"auc_{name}"].mean(), 50, len(base)) > 0.05


def test_harm_is_said_and_recipes_are_not_mixed(say):
    def told(rows):
        rows.to_csv("table.csv", index=False)
        return say("--from-table table.csv")

    for accuracy, words in ((0.5, "no harm shown"), (0.9, "harm: accuracy is higher on texts")):
        text = told(make_table(accuracy=[accuracy] * 2, p_published=[0.4, 0.6]))
        assert words in text and "units: 2\n" in text and "\nflagged by nothing\n" in text
    rows = make_table(p_published=[0.4, 0.6])
    assert "no harm shown (older rows" in told(rows.assign(discordant=np.nan))
    for name in ("recipe", "data"):  # other subsamples of another recipe: a table of their own
        mixed = rows.assign(**{name: rows["subsample"].astype(str)})
        assert told(mixed).count("units: 1\n") == 2


def test_precision_and_quantisation_are_used(both):
    """bf16 as torch's autocast around transformers' forward; NF4 computes in bf16, and weights that
    bitsandbytes packs on some CPUs are not rounded anew."""
    folder, whole, lm = both["llama"]
    ids = encode(HEAD)["input_ids"]
    bf16, nf4 = [contam.open_scorer(str(folder), None, kind, "bf16", "cpu")
                 for kind in ("none", "nf4")]
    scores = []
    for net in (whole, bf16, nf4, nf4):
        scores.append(contam.score_tokens(net, [(ids, 1)], 1000, "")[0][0])
        net.lm.state_dict()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        log_p = lm(input_ids=torch.tensor([ids[:-1]])).logits[0].float().log_softmax(1)
    wanted = log_p[range(len(ids) - 1), ids[1:]].numpy()
    assert np.allclose(scores[1], wanted, atol=0.02)
    assert np.abs(scores[1] - scores[0]).max() > 1e-3
    assert not np.allclose(scores[2], scores[0], 1e-3)
    assert np.array_equal(scores[3], scores[2])
    assert nf4.lm.model.layers[0].mlp.up_proj.compute_dtype == torch.bfloat16


def halves(texts, seed):
    rows = np.random.default_rng(seed).permutation(len(texts))
    return [texts[i] for i in rows[::2]], [texts[i] for i in rows[1::2]]


def test_random_halves_are_told_apart_by_chance_alone(zero):
    """100 random halves of 100 real texts: each score of the texts has a p below .05 in 5 %."""
    spec = zero.load_registry()["tasks"]["rotten_tomatoes"]
    texts = np.array(zero.load_task("rotten_tomatoes", spec).texts, object)
    reviews = np.random.default_rng(0).choice(texts, 400, replace=False).tolist()
    p = [contam.tell_apart(*halves(reviews[:100], seed)) for seed in range(100)]
    assert (pd.DataFrame(p) < 0.05).mean().between(0.005, 0.11).all()
    assert np.mean([contam.adjusted(row).min() < 0.05 for row in p]) < 0.1
    names = SimpleNamespace(examples="a", held_out="b")
    contam.check_halves(pd.Series([0.026, 0.3, 0.9]), names)  # one of three: .078 adjusted
    with pytest.raises(SystemExit, match="differ in 1 "):
        contam.check_halves(pd.Series([0.5, 0.009, 0.9]), names)
    longest = sorted(reviews, key=len)
    renamed = [text.replace("film", "series").replace("movie", "show") for text in reviews]
    for released, held_out, words in ((longest[:200], longest[200:], "length"),
                                      (reviews[:200], renamed[200:], "words of one file")):
        Path("a").write_text("\n".join(released))
        Path("b").write_text("\n".join(held_out))
        error = refused("--examples a --held-out b --model never/loaded")
        assert f"differ in {words}" in error and "no random halves" in error


def test_the_released_half_is_flagged(make_model, say):
    """A model trained on one random half, pairs of neighbours in their order, and one that was not;
    the AUC by hand. In another order the order test is silent."""
    released, held_out = halves(make_texts(80, 7), 1)
    for name, texts in (("a", released), ("b", held_out), ("turned", released[::-1])):
        Path(name).write_text("\n".join(texts))
    pairs = ["<end>" + "\n\n".join(released[k : k + 2]) for k in range(0, 40, 2)]
    ids = [torch.tensor(encode(pair)["input_ids"]) for pair in pairs]
    labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)

    def trained(config):
        lm = transformers.AutoModelForCausalLM.from_config(config).eval()
        optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3, weight_decay=0)
        for _ in range(60):
            lm(input_ids=labels.clamp(min=0), labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return lm

    innocent = make_model("gpt2", initializer_range=0.05)
    guilty = make_model("gpt2", trained, initializer_range=0.05)

    held = "--examples a --held-out b --model"
    text = say(f"{held} {guilty} --reference {innocent}")
    assert "held-out texts: flagged by ref, order test.\n" in text
    text = say(f"{held} {innocent} --reference {innocent}")
    assert "40 released, 40 held-out texts: flagged by nothing.\n" in text
    assert ": flagged" in say(f"--examples a --model {guilty}")
    assert ": no sign" in say(f"--examples turned --model {guilty}")
    alone = say(f"{held} {guilty}")
    assert "flagged by log p, log p / zlib, Min-K%, Min-K%++, order test.\n" in alone
    error = refused(f"{held} {innocent} --reference {guilty}")  # saw one half
    assert f"of {guilty} (p " in error and "no random halves" in error
    lm = plain_model(guilty)
    log_p = []
    for text in released + held_out:
        log_p.append(plain_scores(lm, "<end>", text)[:, 0].mean())
    wins = np.array(log_p)[:40, None] > log_p[40:]
    assert float(alone.split("\nlog p ")[1].split()[0]) == approx(wins.mean(), abs=2e-3)


def test_with_a_reference_ref_and_the_order_test_decide():
    rng = np.random.default_rng(0)
    low = pd.DataFrame(rng.normal(0, 1, (40, 4)), columns=OWN)
    high = low[:30] + 0.5
    alone = contam.compare_scores(high, low, 0.5)
    p = [stats.mannwhitneyu(high[name], low[name], alternative="greater").pvalue for name in OWN]
    assert alone["p"].tolist() == [*p, 0.5] and max(p) > 1e-4
    assert alone["adjusted"].tolist() == stats.false_discovery_control([*p, 0.5]).tolist()
    high["ref"], low["ref"] = low["logp"], low["logp"]
    with_ref = contam.compare_scores(high, low, 0.024)
    assert with_ref["adjusted"].notna().sum() == 2
    assert with_ref.loc["order test", "adjusted"] == approx(0.048)
