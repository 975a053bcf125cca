"""contamination_test.py against plain loops, brute force, scipy, the textbook's least squares, hand
arithmetic and the published log."""

import itertools
import json
import math
import os
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import peft
import pytest
import torch
import transformers
from pytest import approx
from safetensors.torch import load_file, save_file
from scipy import stats

from conftest import ARMS, ROOT, byte_tokenizer, cases, end_of, load_script

pytestmark = pytest.mark.usefixtures("empty_folder")

HEAD = "Classify a text as one of these:\nbad\ngood\n\nAnswer with its mood.\n\n"
# some tokens have two bytes, and one straddles the end of a head
MERGES = [*map(tuple, "Ċ# eĠ or Ġs en sĠ er th ap Ġg ic te as iv tĠ wi re al on ev nd co".split())]
TEN = "\n".join("abcdefghij")
UNITS = re.compile(r"units\n.* (\d+)\n")
encode = byte_tokenizer(MERGES)
contam = load_script("contamination_test")
fit = load_script("fit_model")
MANY, contam.DRAWS = contam.DRAWS, 10**5  # for speed; the published log gets them all


@pytest.fixture
def say(said):
    """What main prints, or the error with which it ends."""
    def run(flags):
        found = said(contam.main, *flags.split())
        return found.end or found.out

    return run


def plain_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def both(model_dir):
    """(folder, the script's net, the model as transformers loads it)"""
    folder = model_dir("llama", merges=MERGES)
    return folder, contam.open_model(folder, "float32"), plain_model(folder)


def plain_scores(lm, head, text):
    """[tokens, 2]: log p of each token that ends behind the head, and the same standardized."""
    ids = encode(head + text)["input_ids"]
    first = next(i for i in range(len(ids)) if len(encode.decode(ids[: i + 1])) > len(head))
    with torch.no_grad():
        log_p = lm(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(1).numpy()
    found = []
    for row, token in zip(log_p[first - 1 :], ids[first:]):
        p = np.exp(row)
        mean = p @ row
        sd = math.sqrt(p @ (row - mean) ** 2)
        found.append((row[token], (row[token] - mean) / sd))
    return np.array(found)


def brute_p(log):
    """Of all combinations of the shards' orders, the share that is as likely as that given."""
    sums = [sum(values) for values in itertools.product(*log)]
    return np.mean([value >= sums[0] - 1e-9 for value in sums])


def near(p):
    """Of a share of DRAWS."""
    return approx(p, abs=5 * math.sqrt(p * (1 - p) / 1e5) + 2e-5)


def test_scores_equal_a_plain_loop(both, monkeypatch):
    _, (lm, tokenizer), plain = both
    texts = ["river stone", "seven cold", "x" * 20]
    longest = max([len(encode(HEAD + text)["input_ids"]) for text in texts])
    monkeypatch.setattr(lm.config, "max_position_embeddings", longest - 1)  # the last is not read
    found = contam.score_texts((lm, tokenizer), HEAD, texts)
    for text in texts:
        np.testing.assert_allclose(found[text].T, plain_scores(plain, HEAD, text), 2e-4, 1e-4)


def test_the_scored_tokens_are_the_examples_own(both):
    """And one that is partly the head's. Something stands before the first, and nothing behind."""
    tokenizer = both[1][1]
    text = "### Text: cold wheel\n### Answer: good"
    ids, first = contam.token_ids(tokenizer, HEAD, text)
    assert ids == encode(HEAD + text)["input_ids"] and encode.decode(ids[first:]) == "\n" + text
    assert contam.token_ids(tokenizer, "", text) == (encode("<end>" + text)["input_ids"], 1)
    for template, named in ("$A !", {"bos_token": "?"}), ("? $A ! <end>", {}):
        words = byte_tokenizer([], template, **named)
        ids, first = contam.token_ids(words, "", "ab!")
        assert (words.decode(ids), first) == ("?ab!", 1)
        ids, first = contam.token_ids(words, "a", "b")
        assert words.decode(ids).endswith("ab") and first == len(ids) - 1


@pytest.mark.parametrize("size, counts", [
    (2, [2] * 9), (3, [6] * 6), (4, [12] * 4 + [2]), (8, [12, 12, 2]), (17, [12])])
def test_shards_are_scored_order_by_order(size, counts, both):
    """As given, then in distinct other orders. A last text alone has none."""
    _, net, lm = both
    letters = "ABCDEFGHIJKLMNOPQR"
    shards = contam.draw_orders([*letters], size)
    assert [*map(len, shards)] == counts
    for k, scores in enumerate(contam.order_log(net, HEAD, shards)):
        orders, shard = shards[k], letters[k * size : (k + 1) * size]
        assert orders[0] == "\n\n".join(shard) and len({*orders}) == len(orders)
        assert {"".join(sorted(order)) for order in orders} == {"\n" * (2 * len(shard) - 2) + shard}
        for text, score in zip(orders, scores, strict=True):
            assert score == approx(plain_scores(lm, HEAD, text)[:, 0].sum(), rel=1e-5)
    # drawn by the set of texts: a reference gets the same orders, another file others
    for others, alike in ((letters[::-1], True), ("0123456789!?+-*/=_", size == 2)):
        same = str(shards).translate(str.maketrans(letters, others))
        assert (str(contam.draw_orders([*others], size)) == same) == alike


def test_p_exact_equals_brute_force():
    rng = np.random.default_rng(0)
    for sizes, shift in itertools.product(((2,), (2, 24, 6, 2), (2,) * 10), (-1.0, 0.0, 3.0)):
        log = [np.array([0.0, *rng.normal(-shift, 2, size - 1)]) for size in sizes]
        assert contam.order_p(log)[0] == near(brute_p(log))
    best = [[0.0, -1.0]] * 50  # of 2^50 orders
    assert contam.order_p(best)[0] == approx(1 / (10**5 + 1), rel=1e-12)
    equal = [[0.0, 0.3 - 0.1 - 0.2], [0.0, 1, -1]]  # but for rounding
    assert contam.order_p(equal)[0] == approx(2 / 3, abs=0.01)
    repeats = contam.order_p([[-1.0, -2, -3, -3]] * 2)[0]  # each of two other orders counts once
    assert repeats == approx(1 / 9, abs=5e-3)


def test_the_published_log_gives_the_published_p(monkeypatch):
    """By the convolution of its 2^244 combinations on a grid of .0005, p exact is .386 to .388."""
    log = json.loads((ROOT / "tests" / "published" / "contamination_log_extra.json").read_text())
    monkeypatch.setattr(contam, "DRAWS", MANY)
    parts = zip(log["canonical_logprobs"], log["shuffled_logprobs"], strict=True)
    found = contam.order_p([[value, *others] for value, others in parts])
    assert found == approx((0.386985, log["pval"]), abs=1e-6)


@pytest.mark.parametrize("name, content, examples", [
    ("a.txt", "\ufeff[a\u2028b\r\nc\x0cd\x85e\nf\n\n", ["[a\u2028b", "c\x0cd\x85e", "f"]),
    ("a.jsonl", '{"text": "a\\nb", "label": 1}\n{"text": "c\u2028d"}\n', ["a\nb", "c\u2028d"]),
    ("a.jsonl", '{"text": ["a", "b"]}', [["a", "b"]]),
    ("a.json", '[{"text": "a"}]', ["a"]),
])
def test_examples_are_read_from_lines_columns_and_keys(name, content, examples):
    Path(name).write_bytes(content.encode())
    assert [*contam.read_examples(Path(name))] == examples


@pytest.mark.parametrize("name, content, flags, words", [
    ("a.txt", "x" * 2100 + TEN, "", "a text has 2122 tokens, the model reads 2048: lower"),
    ("a.jsonl", json.dumps({"text": [*"abcdefghijklmnopqrs"]}), "", "too few to be flagged"),
    *cases(r"""
    a.txt | a\nb\nc\nd\ne\nf\ng\nh\ni | --shard-size 2 | too few to be flagged: give at least 48
    a.jsonl | {"text": ["a", "b"]}\n{"text": ["c", ""]} | | a.jsonl: item 2 lacks a text
    a.txt | a\n\nb | | item 2 lacks a text
    a.jsonl | {"text": "a"}\n{"text": ["a", "b", "a"]} | | item 2 lacks a text, or has a version twice
    a.jsonl | {"words": "b"} | | has ['words']: call that of the texts so""")])
def test_a_mistake_is_one_line(name, content, flags, words, both, say):
    Path(name).write_text(content)
    assert words in say(f"--model {both[0]} --examples {name} {flags}")
    assert "needs a --model" in say(f"--examples {name}")


@pytest.mark.parametrize("versions", [False, True])
@pytest.mark.parametrize("best, flags, nets, words", cases("""
    0 | | m float32 | : flagged: the model prefers what was published
    1 | | m float32 | : not flagged
    0 | --reference r --precision bf16 | m bf16 r bf16 | : not flagged"""))
def test_what_is_preferred(best, flags, nets, words, versions, say, monkeypatch):
    """A model that likes an order as much before is not flagged. p_exact decides. An item with one
    version is left out."""
    opened, texts, compared = [], [*map(str, range(41))], "41 texts in 5 groups of 8"
    if versions:
        texts, compared = [["a", "b"]] * 40 + [["a"]], "40 items in several versions (1 in one"
    monkeypatch.setattr(contam, "open_model", lambda *net: net)
    monkeypatch.setattr(contam, "order_log", lambda net, head, shards: opened.extend(net) or [
        [float(k == int(best)) for k in range(len(shard))] for shard in shards])
    pd.DataFrame({"text": texts}).to_json("a.jsonl", orient="records", lines=True)
    out = say(f"--examples a.jsonl --model m {flags}")
    assert words in out and compared in out and " ".join(map(str, opened)) == nets


def test_a_name_in_tasks_json_is_fetched():
    """From the first of its sources."""
    folder, file = contam.find_files("smollm2")
    assert (folder / file).exists() and file.endswith(".gguf")


def test_unfit_models_are_refused(model_dir, say):
    Path("a.txt").write_text(TEN)  # the least that can be flagged
    for name in ("no/such-model", "/moved/to/model"):
        assert f"error: {Path(name)}: " in say(f"--examples a.txt --model {name}")
    folder = model_dir("bert", words=encode)
    assert "weights are missing, or tokens see later ones: give a model" in say(
        f"--examples a.txt --model {folder}")
    folder = model_dir("gpt2", merges=MERGES)
    file = folder / "model.safetensors"
    weights = load_file(file)
    torch.save(weights, folder / "pytorch_model.bin")
    nans = weights["transformer.ln_f.weight"] * math.nan
    for saved, words in ((weights | {"transformer.ln_f.weight": nans}, "not finite"),
                         ({"foreign": nans}, "weights are missing"), ({}, "model.safetensors")):
        file.unlink()
        if saved:  # else there is only a pickle
            save_file(saved, file, {"format": "pt"})
        contam.open_model.cache_clear()
        assert words in say(f"--examples a.txt --model {folder}")


def test_nf4_scores_as_in_run_zero_shot(both, zero):
    folder, _, lm = both
    theirs, _ = zero.load_net(zero.find_model(str(folder), zero.load_registry()), "nf4",
                              "bf16", "cpu")
    found = contam.score_texts(contam.open_model(folder, "bf16", "nf4"), "It is", [HEAD])[HEAD].T
    np.testing.assert_allclose(found, plain_scores(theirs.eval(), "It is", HEAD), rtol=1e-4)
    assert np.abs(found - plain_scores(lm, "It is", HEAD)).max() > 1e-3


@pytest.fixture(scope="module")
def audited(tmp_path_factory, model_dir, benchmark_csv, zero):
    """Two packed units of run_zero_shot.py, cut to a short context: (folders, model, table)."""
    folder = tmp_path_factory.mktemp("audited")
    model = model_dir("llama", merges=MERGES, hidden_size=64, max_position_embeddings=360)
    flags = f"--csv {benchmark_csv} --model {model} --adapters kept --m 4 --n 24"
    flags += " --workers 1 --out results.csv --pack --pretrain-epochs 1 --subsamples 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        zero.main(flags.split())
        contam.main([])  # the folder kept
        table = read_audits()
    units = [next(folder.glob(f"kept/zero-shot-packed-*-24-{k}-0-*")) for k in (1, 2)]
    return units, model, table


def test_a_units_row_equals_a_plain_loop(audited):
    (_, path), model, rows = audited
    unit = json.loads((path / "unit.json").read_text())
    head = unit["model"]["instruction"] + "\n\n"
    texts = unit["test"]["examples"] + unit["extra"]["examples"]
    row, before = rows.iloc[1], None
    for arm in ARMS:
        lm, values = plain_model(model), []
        if arm != "base":
            lm = peft.PeftModel.from_pretrained(lm, path / arm).eval()
        log = [np.array([plain_scores(lm, head, text)[:, 0].sum() for text in orders])
               for orders in contam.draw_orders(texts[:24], 8)]  # of the pack
        assert row[f"p_exact {arm}"] == near(brute_p(log))
        for text in texts:
            log_p, standard = plain_scores(lm, head, text).T
            count, mean = max(int(0.2 * len(log_p)), 1), np.mean(log_p)
            lowest = [np.mean(sorted(part)[:count]) for part in (log_p, standard)]
            values.append((mean, mean / len(zlib.compress(text.encode())), *lowest))
        values = [*np.transpose(values)]
        if before is None:
            base, before = values[0], log
            continue
        assert row[f"p_relative {arm}"] == near(brute_p([*map(np.subtract, log, before)]))
        values.append(values[0] - base)
        for name, scores in zip(contam.DETECTORS, values, strict=True):
            wins = (scores[:24, None] > scores[24:]).mean()
            assert row[f"{name} {arm}"] == approx(wins, abs=2.1e-3) and 0 < wins < 1


@pytest.fixture
def table(audited):
    """The table of the units, which now lie in kept/one and kept/two."""
    for path, name in zip(audited[0], ("one", "two")):
        shutil.copytree(path, f"kept/{name}")
    return audited[2]


def read_audits():
    return pd.read_csv("contamination.csv", dtype={"recipe": str})


def test_an_audit_goes_on_where_it_was(table, say, monkeypatch):
    """Killed while it writes its second unit: the first is not scored again."""
    audit_unit, to_csv, calls = contam.audit_unit, pd.DataFrame.to_csv, []

    def count(*args):
        calls.append(args[1].name)
        return audit_unit(*args)

    def write(table, path, **options):
        to_csv(table, path, **options)
        if len(calls) == 2:
            os.truncate(path, 700)
            raise KeyboardInterrupt

    monkeypatch.setattr(contam, "audit_unit", count)
    monkeypatch.setattr(pd.DataFrame, "to_csv", write)
    assert "stopped" in end_of(contam.main, "kept")
    assert UNITS.search(say("kept"))[1] == "2" and calls == ["one", "two", "two"]
    pd.testing.assert_frame_equal(read_audits(), table)
    assert UNITS.findall(say("gone")) == ["2"]  # of the table alone
    assert "folder nowhere: give --answers FILE, --ex" in say("nowhere --out new.csv")
    calls.clear()
    assert "/proc" in say("kept --out /proc/new.csv") and not calls


@pytest.mark.parametrize("name", ["unit.json", "test/adapter_model.safetensors"])
def test_a_damaged_unit_is_named_and_others_stay(name, table, said):
    lost = Path("kept/two", name)
    os.truncate(lost, lost.stat().st_size * 2 // 3)
    assert "error: kept/two: " in said(contam.main).end
    pd.testing.assert_frame_equal(read_audits(), table[:1], atol=2.1e-3)


def test_the_table_of_detectors_by_hand(capsys):
    """The variance of an AUC without memory is (2 n + 1) / (12 n^2) = 101 / 30000. Benjamini and
    Hochberg: p times 7 / rank, the least from there on."""
    sd = math.sqrt(101 / 30000)
    A, B = 0.5 + sd * stats.norm.isf([0.008, 0.016, 0.5]), np.array([0.5, 0.4, 0.6])
    rows = pd.DataFrame(dict.fromkeys(contam.SETTING, [50] * 3))
    rows[[f"{name} {arm}" for name in contam.DETECTORS for arm in ARMS]] = 0.5
    rows[["zlib test", "Min-K% test", "Min-K%++ test"]] = 0.4
    rows["log p test"] = 0.5 + sd * stats.norm.isf(0.03) / math.sqrt(3)  # adjusted, p is .1
    rows = rows.assign(**{"ref test": A, "ref extra": B, "p_exact test": [0.1, 0.3, 0.5],
                          "p_relative test": [0.1, 0.2, 0.3]})
    table = contam.detectors_of(rows)
    crossed = (A + 1 - B) / 2
    half = stats.t.ppf(0.945, 2) * crossed.std(ddof=1) / math.sqrt(3)
    p = stats.norm.sf((A.mean() - 0.5) / sd * math.sqrt(3))
    assert [*table.loc["ref"][:4]] == approx([A.mean(), crossed.mean(), half, p], rel=1e-9)
    fisher = [product * (1 - math.log(product) + math.log(product) ** 2 / 2)
              for product in (0.015, 0.006)]
    assert table.p[["order test", "relative order"]].tolist() == approx(fisher)
    p = table.p.sort_values()
    by_hand = (p * 7 / np.arange(1, 8))[::-1].cummin()
    assert table.adjusted.to_dict() == approx(by_hand.to_dict())
    contam.show_audits(rows)
    assert re.findall("(.+?)  .*True\n", capsys.readouterr().out) == ["ref"]


def plain_inflation(right, released, clean):
    """(bias, standard error HC2, columns), in points, by the normal equations and the hat matrix;
    clean: lists of answers."""
    X = np.column_stack([np.ones(len(right)), released, *clean])
    bread = np.linalg.inv(X.T @ X)
    found = bread @ X.T @ right
    hat = X @ bread @ X.T
    squares = (right - X @ found) ** 2 / (1 - np.diag(hat))
    variances = bread @ X.T @ np.diag(squares) @ X @ bread
    return 100 * found[1], 100 * math.sqrt(variances[1, 1]), X.shape[1]


def make_answers(seed=0, released=60, held_out=45, clean=2, bias=0.0):
    """Rows of answers: `mine` keeps four answers of five of `before`; others of like strength."""
    rng = np.random.default_rng(seed)
    size = released + held_out
    hard = rng.normal(0, 1, size)
    half = np.repeat(["released", "held_out"], [released, held_out])
    answers = {"mine": None, "before": None}
    for name in ["before", *[f"other{k}" for k in range(1, clean)], "fresh"]:
        answers[name] = (rng.normal(0.3, 1, size) > hard).astype(float)
    mine = np.where(rng.random(size) < 0.8, answers["before"], answers.pop("fresh"))
    answers["mine"] = np.where((half == "released") & (rng.random(size) < bias), 1.0, mine)
    return as_rows(answers, half)


def as_rows(answers, half):
    table = pd.DataFrame(answers).assign(half=half, item=range(len(half)))
    return table.melt(["half", "item"], var_name="model", value_name="right")


def judge(rows, flags="--clean before", sep=","):
    """The rows of --out, by model."""
    rows.to_csv("mine.csv", index=False, sep=sep)
    contam.main(["--answers", "mine.csv", "--out", "out.csv", *flags.split()])
    table = pd.read_csv("out.csv", keep_default_na=False, na_values=[""]).set_index("model")
    return table.fillna({"reason": "", "reason_unless_yes": ""})


def columns_of(rows):
    """(released [items], {model: answers [items]}) of complete rows."""
    wide = rows.pivot(index=["half", "item"], columns="model", values="right")
    answers = {name: right.to_numpy() for name, right in wide.items()}
    return wide.index.get_level_values("half") == "released", answers


@pytest.mark.parametrize("metric, clean, name, unit", cases("""
    right | | acc | 100
    right | before other1 other2 before | acc | 100
    rouge | before | acc | 100
    f1 | before | f1 | 100
    brier | before | brier | 1
    exact_match | before | acc | 100"""))
def test_bias_and_its_error_equal_plain_least_squares(metric, clean, name, unit, capsys):
    """Also of the clean models, each against the others. Shares, but errors, are in points."""
    rows = make_answers(1, clean=3, bias=0.9)
    grades = np.random.default_rng(2).random(len(rows))
    if metric == "exact_match":
        grades = grades.round()
    rows["right"] = (rows.right + grades) / 2
    released, answers = columns_of(rows)
    flags = f"--metric {metric}" + f" --clean {clean}" * (clean != "")
    table = judge(rows.rename(columns={"right": metric}), flags)
    assert f"next: python fit_model.py out.csv --metric {name}\n" in capsys.readouterr().out
    for model, row in table.iterrows():
        others = [answers[other] for other in clean.split()[:3] if other != model]
        bias, se, size = plain_inflation(answers[model], released, others)
        seen = answers[model][released].mean()
        found = row[["bias_df", "bias_se", f"{name}_test", f"{name}_extra", "n"]]
        assert [*found] == approx(
            [105 - size, se * int(unit) / 100, seen, seen - bias / 100, 51])


@pytest.mark.parametrize("gone, easier, words", [
    ([], 7, "clean models differ"), ([1, 2, 4], 0, "more missing")])
def test_what_is_wrong_in_every_task_is_seen_over_all(gone, easier, words):
    """Not in a single one, and not where half of the tasks are wrong the other way around."""
    items = np.arange(100)
    mine, clean = 1.0 * (items % 3 == 0), 1.0 * (items % 50 < 25 + easier * (items < 50))
    mine[gone] = math.nan
    rows = as_rows({"mine": mine, "clean": clean}, np.repeat(contam.HALVES, 50))
    turned = rows.replace({"half": {"released": "held_out", "held_out": "released"}})
    p = stats.ttest_ind(clean[:50], clean[50:], equal_var=False).pvalue
    others = rows.query("model == 'mine'")  # tasks that the clean model was not asked
    for parts, silent in ([rows], 0), ([rows] * 6, 1), ([rows] * 6 + [turned] * 6, 0), (
            [rows] * 6 + [others] * 6, 1):
        tasks = pd.concat([part.assign(task=k) for k, part in enumerate(parts)])
        found = judge(tasks, "--clean clean").loc[["mine"]]
        assert found.reason.str.contains(words).tolist() == [bool(silent)] * len(parts)
        z = found.z_halves.dropna()
        assert [*2 * stats.norm.sf(z.abs())] == approx([p] * len(z), rel=0.05)


@pytest.mark.parametrize("gone, more", [(7, 24), (8, 25)])
def test_a_task_with_a_fault_is_enough(gone, more):
    """p of chi-square, (gone / 2)^2 over gone (1 - gone / 400) 100 / 399, is .0077 or .0043, and
    twice that for two tasks. The other task lacks six of the other half. Of the clean model's
    halves p, too, is next to .01."""
    items = np.arange(400)
    clean = 1.0 * (items % 200 < 120 + more * (items < 200))
    p = stats.ttest_ind(clean[:200], clean[200:], equal_var=False).pvalue
    rows = as_rows({"clean": clean, "mine": items % 3 == 0}, np.repeat(contam.HALVES, 200))
    reason = judge(rows, "--clean clean").reason["mine"]
    assert (p < 0.01) == (more == 25) == (reason == "clean models differ between the halves")
    mine = rows[rows.model == "mine"]
    tasks = [mine.assign(task=task, right=mine.right.mask(lost)) for task, lost in
             enumerate([mine["item"] < gone, mine["item"] > 393])]
    reasons = judge(pd.concat(tasks), "").reason
    assert reasons.str.contains("more missing").tolist() == [gone == 8, False]


@pytest.mark.parametrize("counts, p", [  # of each task: missing and all released, held out
    # refused admissions to Berkeley, men and women by department (Bickel et al., 1975): p by SAS
    ("313 825 19 108 207 560 8 25 205 325 391 593 279 417 244 375 138 191 299 393 351 373 317 341",
     0.2169),
    ("25 100 46 300 24 300 0 100 " * 10, 7.43e-27),  # p of the sums is .32
    ("80 400 20 100 2 100 8 400", 1)])  # 5e-8
def test_missing_answers_are_compared_within_tasks(counts, p):
    parts = []
    for task in np.reshape(counts.split(), (-1, 2, 2)).astype(int):
        halves = [pd.Series(np.arange(size) < gaps) for gaps, size in task]
        parts.append(contam.missing_excess(pd.concat(halves, keys=contam.HALVES)))
    assert contam.missing_p(*pd.DataFrame(parts).sum()) == approx(p, rel=2e-3)


@pytest.mark.parametrize("count, flat", [(1, []), (5, [0]), (2, [0, 1])])
def test_fit_model_judges_these_rows(count, flat):
    """By hand: each task's interval adjusted for their number, the mean by Welch and Satterthwaite.
    One score everywhere in one task does not withhold the mean. A missing base is no boost."""
    tasks, singles = [], []
    for k in range(count):
        part = make_answers(11 + k, bias=0.1 * k).assign(task=f"task {k}")
        part["right"] = part.right.mask(part.model.eq("mine") & (k in flat), 1.0)
        released, answers = columns_of(part)
        bias, se, size = plain_inflation(answers["mine"], released, [answers["before"]])
        singles.append([bias, se, len(released) - size, count])
        tasks.append(part)
    b, se, df, _ = np.transpose(singles)
    v = se**2
    singles.append([b.mean(), math.sqrt(v.sum()) / count, v.sum() ** 2 / (v**2 / df).sum(), 1])
    rows, *_ = contam.parse_answers(pd.concat(tasks))
    rows = fit.clean_rows(contam.judge_answers(rows, ["before"]))
    lines = fit.analyze(rows, fit.metric_of("acc", 5.0, False)).query("effect == 'bias'")
    mine = lines[lines.model == "mine"]
    if len(flat) < count:
        found = np.column_stack([mine.estimate, mine.shown_high - mine.estimate])
        wanted = [[b, stats.t.ppf(1 - 0.055 / J, df) * se] for b, se, df, J in singles]
        assert found == approx(np.array(wanted), abs=2e-8)
    withheld = [k in flat for k in range(count)] + [len(flat) == count]
    assert mine.verdict.eq("none").tolist() == withheld
    assert mine.reason.eq("one score everywhere. Check filter and metric").tolist() == withheld


@pytest.mark.parametrize("last, left_out", [(40, True), (39, False)])
def test_a_task_with_few_answers_is_left_out(last, left_out):
    """19 answers to the released half, or 20."""
    rows = make_answers(11)
    table = judge(rows[rows.model.ne("other1") | ~rows.item.between(0, last)])
    assert ("other1" not in table.index) == left_out


def test_tries_and_groups_are_averaged():
    """Task a has two tries, b has one. A group lacks an answer if one of its items does."""
    rows = "a g1 i1 1 1,a g1 i1 2 0,a g1 i2 1 C,a g2 i3 1 1,a g2 i3 2 1,b g3 i4 1 P,b g4 i5 1 NA"
    rows = pd.DataFrame([row.split() for row in rows.split(",")],
                        columns="task group item try right".split())
    rows, *_ = contam.parse_answers(rows.assign(half="released", model="m"))
    found = contam.average_tries(rows, ["task"], "model")
    np.testing.assert_equal([table.m.tolist() for table in found], [
        [0.75, 1, 0.5, math.nan], [False, False, False, True]])


@pytest.mark.parametrize("kind", ["empty", "no row", "nobody"])
def test_missing_answers_are_counted_and_must_not_depend_on_the_half(kind):
    """Eight of 100 held-out answers; p is .0067 by the hypergeometric distribution."""
    rows = make_answers(21, 100, 100, clean=1)
    lost = rows["item"].gt(191) & (rows.model.eq("mine") | (kind == "nobody"))
    rows["right"] = rows.right.mask(lost)
    table = judge(rows.dropna() if kind == "no row" else rows, "")
    assert table.loc["mine", [*contam.HALVES, "left_out"]].tolist() == [100, 92, 8]
    silent = table.reason.str.contains("one half has more missing answers")
    assert silent.to_dict() == {"mine": True, "before": kind == "nobody"}


def test_models_are_compared_where_they_were_asked_the_same(capsys):
    """In task b the models were asked two sets of items, which share one, and of which one has more
    released ones. other1 lacks an answer, which counts for it alone."""
    asked = "(50 <= item < 190) == (model != 'before') or item == 70"
    rows = make_answers(5, 150, 150).query(asked).assign(task="b")
    rows["right"] = rows.right.mask(rows.model.eq("other1") & rows["item"].eq(60))
    alone = rows[rows.model == "mine"].assign(task="a")
    table = judge(pd.concat([alone, rows]), "--clean before other1").fillna("")
    assert table.loc["mine", ["clean", "reason"]].values.tolist() == [["", ""], ["other1", ""]]
    assert ("mine, a: judged without before, other1, over 5% missing\nmine, b: judged without before"
            ", over 5% missing\nitems left out, since an answer is missing: 1\n"
            ) in capsys.readouterr().out


def test_gaps_of_clean_models():
    """other1 lacks 5% of the items: its mean over both halves stands there. other2 lacks more, and
    is not used."""
    rows = make_answers(22, 100, 100, clean=3)
    for model, last in ("other1", 105), ("other2", 106):
        gone = rows.model.eq(model) & rows["item"].isin([*range(5), *range(100, last)])
        rows["right"] = rows.right.mask(gone)
    released, answers = columns_of(rows)
    few = pd.Series(answers["other1"])
    bias, se, size = plain_inflation(answers["mine"], released,
                                     [answers["before"], few.fillna(few.mean())])
    row = judge(rows, "--clean before other1 other2").loc["mine"]
    assert (row.bias, row.bias_se, row.bias_df) == approx((bias, se, 200 - size))
    assert row.clean == "before, other1"


@pytest.mark.parametrize("gain, others, silent", cases("""
    .22 | | no
    .24 | | yes
    .24 | other1 | no
    .26 | other1 | yes"""))
def test_a_clean_model_that_saw_the_released_half_withholds_a_no(gain, others, silent):
    """One-sided p, times the number of clean models, is below .055 or not."""
    rows = make_answers(43, 300, 300)
    learned = rows.model.isin(["mine", "before"]) & rows.item.lt(300 * float(gain))
    rows["right"] = rows.right.mask(learned, 1.0)
    table = judge(rows, f"--clean before {others}")
    before, reason = table.loc["before"], table.reason_unless_yes["mine"]
    p = stats.t.sf(before.bias / before.bias_se, before.bias_df)
    assert (p * (1 + bool(others)) < 0.055) == (silent == "yes")
    assert reason.startswith("named clean, but better on") == (silent == "yes")


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("kind, amount, design, words", cases("""
    alike | 80 | False True | alike
    alike | 79 | neither |
    nearly all right | 80 | neither |
    shots | 18 | False | one half was asked in another way. Prompts of released begin like 'xWhat is '
    shots | 17 | neither |
    other | 1 | True | item '0' was asked in several ways
    metric | 24 | False True | alike
    metric | 23 | neither |"""))
def test_answers_that_cannot_be_compared(kind, amount, design, words, crossed, say):
    """At the borders; 40 items in each half. Honest models have other templates. design: whether
    the answers that are refused are crossed."""
    rows = make_answers(1, 40, 40)
    item, amount, mine = rows.item, int(amount), rows.model == "mine"
    first = item < amount
    prompts = item.map("What is {:02}?".format)
    if kind in ("alike", "nearly all right"):
        right = item % 3 > 0 if kind == "alike" else item > 1
        rows["right"] = np.where(rows.model == "before", rows.right, right ^ (mine & ~first))
    if kind == "shots":  # of one half all, of the other less than half, and two of each otherwise
        has_shot = rows.half.eq("released") ^ item.isin([1, 2])
        has_shot |= (item - 40).between(0, 36 - amount)
        prompts = has_shot.map({True: "x", False: ""}) + prompts
    if kind == "other":
        prompts = prompts.mask(mine & first, "x")
    if kind == "metric":  # a loss of each item, equal in two models
        rows = rows.assign(bpb=item / 1000 + rows.model.eq("other1"))[item % 40 < amount]
    if crossed:
        arms = {"mine": "released", "other1": "held_out", "before": ""}
        rows = rows.assign(trained_on=rows.model.map(arms), model="m")
    rows.assign(prompt=prompts).to_csv("mine.csv", index=False)
    out = say("--answers mine.csv --out out.csv" + " --metric bpb" * (kind == "metric"))
    if "next: " in out and not crossed:
        out += pd.read_csv("out.csv", dtype=str, keep_default_na=False).reason.max()
    if str(crossed) in design:
        assert words in out
    else:
        assert out.endswith(("acc\n", "bpb\n"))


@pytest.mark.parametrize("metric, lowest, flags, sign", cases("""
    bits_per_byte | .4 | | -1
    byte-perplexity | 2 | | -1
    TER | 30 | | -1
    answer | .1 | | 1
    rating | .1 | --lower-is-better | -1
    rating | 30 | --no-lower-is-better | 1
    rating | 30 | | 0
    answer | 2 | | 0"""))
def test_is_lower_better(metric, lowest, flags, sign, say):
    """A clean model that is better on the released half is found. Names count by their words."""
    rows = make_answers(3)
    better = rows.half.eq("released") & rows.model.eq("before")
    rows[metric] = float(lowest) + 0.1 * rows.right + 0.2 * float(sign) * better
    rows.to_csv("mine.csv")
    out = say(f"--answers mine.csv --clean before --metric {metric} {flags}")
    if sign == "0":
        assert "is higher better? Add --lower-is-better" in out
    else:
        assert "the released half, too: before" in Path("answers.csv").read_text()
        assert ("--lower-is-better" in out) == (flags == "--lower-is-better")


@pytest.mark.parametrize("error", [False, 0, "None", "", "0", None])
def test_an_error_of_none_or_false_is_no_error(error, capsys):
    """A metric called error is no reason for missing answers. It is in points, better if lower."""
    rows = make_answers(2, bias=0.9)
    wanted = judge(rows)
    pd.testing.assert_frame_equal(judge(rows.assign(error=error)), wanted)
    found = judge(rows.assign(error=1 - rows.right), "--metric error --clean before")
    assert "fit_model.py out.csv --metric acc --lower-is-better\n" in capsys.readouterr().out
    assert [*found.bias] == approx([*-wanted.bias]) and not found.reason["mine"]
    assert not found.left_out.any()


@pytest.mark.parametrize("half, silent", [("held_out", True), ("released", False)])
def test_no_verdict_where_seen_items_are_worse_than_by_chance(half, silent):
    """As if halves were swapped, or drawn by topic: of no model, also of innocent ones. A model of
    one score, which has no interval, hides nothing."""
    rows = make_answers(7, 150, 150)
    learned = rows.model.eq("mine") & rows.half.eq(half)
    rows["right"] = rows.right.mask(learned, 1.0)
    one_score = rows[rows.model == "mine"].assign(model="first", right=1.0)
    table = judge(pd.concat([one_score, rows]), "")
    assert table.reason.str.startswith("a model is better on the held-out half").to_dict() == {
        "first": False, "mine": silent, "before": silent, "other1": silent}


def test_words_and_names():
    """A model may be named NA, or like a formula. Halves may number their items alike."""
    rows = make_answers(24, held_out=60).astype({"right": object})
    rows = rows.replace({"model": {"other1": "NA", "mine": "a$_$b^"}})
    rows.loc[::9, "right"], rows.loc[1::9, "right"] = "", 0.5
    other = rows.replace({"right": {0.0: "n", 1.0: "TRUE", 0.5: "P", "": "None"}})
    other["item"] %= 60
    pd.testing.assert_frame_equal(judge(other, "--clean NA"), judge(rows, "--clean NA"))


OTHER = "a,held_out,five,1"


@pytest.mark.parametrize("rows, flags, words", cases(r"""
    a,hold out,0,1 | | half is held_out, hold out: use released and held_out, and both
    a,released,0,maybe | | line 2: right is 'maybe': use a number
    a,released,0,1\na,released,1,87 | | right is up to 87. Percent? Divide by 100
    a,released,0,1\na,released,0,.5 | | line 2 and line 3: a has two answers to item '0'. Two
    a,released,0,1 | --clean gone | --clean: the models are a
    a,released,0,1 | | none of a has 20 answers to each half of a task
    a,released,x,1\na,held_out,x,1 | --halves a.csv | not unique"""))
def test_mistakes_in_a_table_are_one_line(rows, flags, words, say, recwarn):
    Path("a.csv").write_text(f"model,half,item,right\n{rows}\n{OTHER}\n")
    assert words in say(f"--answers a.csv --out b.csv {flags}") and not recwarn


# Answers of models that were trained on the halves


def make_crossed(seed=8):
    """Of 60 released and 45 held-out items, by models trained on one half, or on neither."""
    arms = {"mine": "released", "other1": "held_out", "before": ""}
    rows = make_answers(seed)
    return rows.assign(trained_on=rows.model.map(arms), model="m", draw=1)


def second_draw(draw=2):
    rows = make_crossed(9).assign(draw=draw)
    return rows.assign(half=rows.half.mask(rows.item % 2 == 1, "held_out"))


def judge_draws(say, *draws):
    pd.concat(draws).to_csv("a.csv")
    return say("--answers a.csv")


@pytest.mark.parametrize("chosen, change, words", cases("""
    trained_on != 'held_out' | draw = 1 | trained_on is ['released']: use the same two words
    half == 'released' | draw = 1 | m, benchmark, draw 1: half is ['released'], but
    item > 5 or trained_on != 'released' | draw = 1 | 99 of 105 items have all answers
    item > 5 or trained_on != 'released' | draw = 1 | {'released': {'held_out': 0, 'released': 6
    item >= 0 | trained_on = trained_on.str[:4] | but trained_on is ['held', 'rele']
    item >= 0 | trained_on = trained_on.replace('held_out', 'released') | m has two answers to
    item >= 0 | trained_on = trained_on.replace('held_out', 'other') | is ['other', 'released']
    item >= 0 | draw = draw.where(item != 9) | m, benchmark, draw : half is ['released'], but
    item >= 0 | item = item.replace(7, 104) | m has two answers to item '104'
    item >= 0 | model = trained_on.replace('', 'm') | the original is named 'm', but trained
    trained_on != '' | model = trained_on | is ['held_out']: use the same two words in both, and one name in"""))
def test_mistakes_in_crossed_answers_are_one_line(chosen, change, words, say):
    make_crossed().query(chosen).eval(change).to_csv("a.csv", index=False)
    assert words in say("--answers a.csv")


def test_an_original_without_experiment_serves_all_and_controls_are_marked():
    one, control = make_crossed(), make_crossed(9).query("trained_on != ''")
    both = pd.concat([one, control.assign(experiment="answers", control="1")])
    table, alone = [contam.cross_answers(contam.parse_answers(rows.fillna(""))[0])
                    for rows in (both, one)]
    assert table.acc_base.tolist() == [*alone.acc_base] * 2
    assert dict(zip(table.experiment, table.control)) == {"crossed": "", "answers": "1"}


def test_fit_model_says_that_seen_scores_are_lower(said):
    """All halves swapped: a model is right on what it did not see. A bias of 5 points matters."""
    rows = pd.concat([make_crossed(), second_draw()])
    rows["right"] = 1 * (np.random.default_rng(0).random(630)
                         < np.where(rows.half == rows.trained_on, 0.3, 0.9))
    rows.to_csv("a.csv")
    assert "fit_model.py crossed.csv --metric acc\n" in said(contam.main, "--answers", "a.csv").out
    out = " ".join(said(fit.main, "crossed.csv").out.split())
    assert "] (seen is worse). " in out and "were the halves swapped, or not drawn at random?" in out
    assert "a bias of 5 points would matter" in out


def test_draws_with_the_same_halves_are_refused(say):
    """Also if the halves exchanged their names and items are missing. Seeds may have them."""
    again = make_crossed(9).query("item > 3")
    assert "next: " in judge_draws(say, make_crossed().assign(seed=1), again.assign(seed=2))
    again = again.assign(draw=2).replace({"released": "held_out", "held_out": "released"})
    assert "draws 1, 2 have the same halves: split anew" in judge_draws(say, make_crossed(), again)


@pytest.mark.parametrize("copied, draw, words", cases("""
    mine   | 2 | answered everything alike: crossed 1 0 released; crossed 2 0 released. Was
    before | 2 | answered everything alike: crossed 2 0 released; the original
    none   | 2 | next: """))
def test_a_model_that_answers_like_another_is_refused(copied, draw, words, say):
    """Logs of draw 1 in the folder of draw 2; an adapter that was not loaded. In each draw another
    answer is missing."""
    rows, second = make_crossed(), second_draw(draw).query("trained_on != ''")
    rows["right"] = rows.right.mask(rows["item"] == 3)
    name = {"mine": "released", "before": "", "none": "?"}[copied]
    answers = rows[rows.trained_on == name].set_index("item").right
    copy = second.item.map(answers).where(second.trained_on == "released")
    right = copy.fillna(second.right).mask(second["item"] == 90)
    assert words in judge_draws(say, rows, second.assign(right=right))


def test_models_are_alike_by_the_items_that_both_answered():
    """64 of them are enough, 62 are not."""
    right = pd.Series([0.0, 1] * 50)
    for gap in 18, 19:
        table = pd.DataFrame({"a": right[gap:], "b": right[:-gap]})
        assert contam.alike_models(table) == [*"ab"] * (gap == 18)


@pytest.mark.parametrize("metric, spelled, draws", cases("""
    right | Original |
    right | NONE | 2.0
    bpb | Before | 1.0 2.0"""))
def test_crossed_answers_by_loops(metric, spelled, draws):
    """Two draws, the second with two seeds and other names of halves. The original answers once, or
    in each draw."""
    rng, parts, wanted, changes = np.random.default_rng(4), [], [], []
    base = rng.integers(0, 2, 40) * (1 if metric == "right" else -9)
    items = pd.DataFrame({"model": "m", "item": range(40), "seed": "", "half": ""})
    for draw in draws.split() or [""]:
        parts.append(items.assign(trained_on=spelled, draw=draw, **{metric: base}))
    for draw, seed, halves in (
            ("1.0", 0, "xyxyx" * 8), ("2.0", 0, "ppqq" * 10), ("2.0", 1, "ppqq" * 10)):
        halves, (x, y) = np.array([*halves]), rng.permuted([base, base], axis=1)
        first, last = sorted({*halves})
        parts += [items.assign(draw=draw, seed=seed, half=halves, trained_on=arm, **{metric: answers})
                  for arm, answers in ((first, x), (last, y))]
        changes.append(np.where(halves == first, y, x) - base)
        for half in (last, first):  # the first is `extra`
            wanted += [scores[halves == half].mean() for scores in (x, y, base, (x - y) ** 2)]
    rows, name, _ = contam.parse_answers(pd.concat(parts, ignore_index=True), metric, False)
    table = contam.cross_answers(rows, name)
    found = table.filter(regex=f"{name}_|discordant").to_numpy().ravel()
    assert found == approx(wanted) and [*table.seed] == [*"001"]
    assert table.item_variance_boost.to_numpy() == approx(np.mean(changes, 0).var(ddof=1) / 40)


@pytest.mark.parametrize("lost, half, words", cases("""
    7 | released | an answer is missing: 7
    8 | released | 8 answers to seen items are missing and 0 to unseen
    8 | held_out | 0 answers to seen items are missing and 8 to unseen"""))
def test_missing_answers_to_seen_or_unseen_items(lost, half, words, say):
    """In two draws, whose halves differ; p of the sign test is 2 / 2^8 for eight of them."""
    first, second = make_crossed(), second_draw()
    for rows, some in ((first, 4), (second, int(lost) - 4)):
        gone = rows.eval("trained_on == 'released' and half == @half")
        rows["right"] = rows.right.mask(gone & (gone.cumsum() <= some))
    assert words in judge_draws(say, first, second)


def test_a_file_of_another_program_is_not_replaced(say):
    make_crossed().to_csv("a.csv")
    assert "another program wrote a.csv: move it" in say("--answers a.csv --out a.csv")
