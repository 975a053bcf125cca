"""Whole runs of run_experiment.py on a tiny model and a benchmark made by hand: resuming, killing, two processes,
shards, the notebook cell, and every mistake a user can make. One run on real weights and real text."""

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from conftest import ROOT
from fake_hub import commit, fake_hub

NOT_COMPARED = ("seconds",)  # the only column that may differ between two runs of the same thing


@pytest.fixture(scope="session")
def tiny(model_dir):
    """A random BERT of 2 layers x 32: a subsample takes a tenth of a second."""
    return str(model_dir("bert", initializer_range=0.02))


@pytest.fixture
def run(script, tiny, benchmark_csv, tmp_path, capsys, monkeypatch):
    """run(flags...) -> (exit status, stdout, stderr) of main() in this process, in an empty folder, on the hand-made
    benchmark with one worker; a flag given again wins."""
    monkeypatch.chdir(tmp_path)

    def call(*flags, base=True):
        ours = ["--model", tiny, "--csv", str(benchmark_csv), "--m", "30", "--n", "20", "--subsamples", "2", "--train-epochs", "2",
                "--pretrain-epochs", "1", "--workers", "1", "--threads", "1", "--device", "cpu"]
        status = 0
        try:
            script.main([*(ours if base else []), *map(str, flags)])
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def comparable(rows):
    return sorted(tuple((name, value) for name, value in row.items() if name not in NOT_COMPARED) for row in rows)


def command(tiny, benchmark_csv, *flags):
    return [sys.executable, str(ROOT / "run_experiment.py"), "--model", tiny, "--csv", str(benchmark_csv), "--m", "30", "--n", "20",
            "--train-epochs", "2", "--pretrain-epochs", "1", "--device", "cpu", "--threads", "1", *flags]


# What a run writes -------------------------------------------------------------------------------------------


def test_a_run_writes_rows_a_table_and_a_plot(run, script, tmp_path):
    status, out, _ = run()
    rows = rows_of("results.csv")
    assert status == 0 and tuple(rows[0]) == script.COLUMNS and len(rows) == 2
    for row in rows:
        assert (row["experiment"], row["task"], row["m"], row["n"], row["num_classes"]) == ("few-shot", "topics", "30", "20", "3")
        for name in ("acc_base", "acc_extra", "acc_test", "majority"):
            count = float(row[name]) * 20
            assert 0 <= count <= 20 and abs(count - round(count)) < 1e-9
        assert 8 < float(row["loss_extra"]) < 12  # ln 30522 = 10.3 for a model that knows nothing
        assert all(row.values())
    assert str(tmp_path / "results.csv") in out and "mean" not in out.splitlines()[0]
    assert (tmp_path / f"results.few-shot.{rows[0]['model']}.m30.n20.png").stat().st_size > 10_000
    change = [100 * (float(row["acc_extra"]) - float(row["acc_base"])) for row in rows]
    assert f"{np.mean(change):+.2f} ±{np.std(change, ddof=1) / 2**.5:5.2f}" in out


def test_majority_and_split_are_those_of_the_test_rows(run, script, benchmark_csv):
    run()
    labels = [line["label"] for line in rows_of(benchmark_csv)]
    codes = np.array([sorted(set(labels)).index(label) for label in labels])
    for row in rows_of("results.csv"):
        split = script.split_rows(codes, 30, 20, int(row["subsample"]))
        assert float(row["majority"]) == np.bincount(codes[split["test"]]).max() / 20
        assert row["split"] == script.short_hash(*(split[name].tolist() for name in ("train", "extra", "test")))


def test_the_grid_of_all_combinations_runs(run, tiny, model_dir):
    status, out, _ = run("--model", tiny, model_dir("gpt2"), "--m", 6, 9, "--n", 4, 8, "--subsamples", 1)
    keys = {(row["model"], row["m"], row["n"]) for row in rows_of("results.csv")}
    assert status == 0 and len(keys) == 8 and out.count("plot:") == 8


def test_predictions_reproduce_the_accuracies(run, script, benchmark_csv):
    run("--predictions", "kept", "--subsamples", 1)
    (row,), (file,) = rows_of("results.csv"), list(os.listdir("kept"))
    lines, labels = rows_of(f"kept/{file}"), [line["label"] for line in rows_of(benchmark_csv)]
    for arm in ("base", "extra", "test"):
        mine = [line for line in lines if line["arm"] == arm]
        probabilities = np.array([[float(line[f"p{c}"]) for c in range(3)] for line in mine])
        assert np.allclose(probabilities.sum(1), 1, atol=1e-5)
        assert np.mean(probabilities.argmax(1) == [int(line["label"]) for line in mine]) == pytest.approx(float(row[f"acc_{arm}"]))
        assert [sorted(set(labels))[int(line["label"])] for line in mine] == [labels[int(line["row"])] for line in mine]


def test_a_dry_run_counts_estimates_and_writes_nothing(run, tmp_path):
    assert run("--dry-run", "--out", "new/folder/results.csv")[0] == 0 and not os.listdir(tmp_path)
    run("--subsamples", 1)
    before = sorted(os.listdir(tmp_path))
    status, out, _ = run("--dry-run", "--subsamples", 4)
    assert status == 0 and "3 of 4 subsamples to run" in out and "hours" in out
    assert sorted(os.listdir(tmp_path)) == before and len(rows_of("results.csv")) == 1


def test_a_model_of_the_hub_is_fetched_without_pickled_weights_and_runs_again_without_the_hub(tiny, benchmark_csv, tmp_path):
    served = tmp_path / "hub" / "someone" / "tiny-bert" / commit("someone/tiny-bert", "main")
    shutil.copytree(tiny, served)
    (served / "pytorch_model.bin").write_bytes(b"pickled")
    (served / "onnx").mkdir()
    (served / "onnx" / "config.json").write_text("{}")
    flags = command("someone/tiny-bert", benchmark_csv, "--subsamples", "1", "--workers", "1")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    with fake_hub(tmp_path / "hub") as url:
        done = subprocess.run(flags, cwd=tmp_path, env=environment | {"HF_ENDPOINT": url}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fetched = {path.name for path in (tmp_path / "home").rglob("*")}
    assert "model.safetensors" in fetched and not {"pytorch_model.bin", "onnx"} & fetched
    (row,) = rows_of(tmp_path / "results.csv")
    assert row["model"] == "someone/tiny-bert"
    again = subprocess.run([*flags, "--out", "again.csv"], cwd=tmp_path, env=environment | {"HF_ENDPOINT": url}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr  # the address answers no more: the cache serves
    assert comparable(rows_of(tmp_path / "again.csv")) == comparable([row])


def test_a_task_alone_equals_the_same_task_in_a_longer_run(run, tiny, tmp_path):
    flags = ["--model", tiny, "--m", 10, "--n", 10, "--subsamples", 1, "--train-epochs", 1, "--pretrain-epochs", 1, "--workers", 1, "--threads", 1]
    assert run(*flags, "--max-length", 16, "--tasks", "bbc_news", "rotten_tomatoes", base=False)[0] == 0
    assert run(*flags, "--max-length", 16, "--tasks", "rotten_tomatoes", "--out", "alone.csv", base=False)[0] == 0
    assert comparable(rows_of("alone.csv")) == comparable([row for row in rows_of("results.csv") if row["task"] == "rotten_tomatoes"])


# Resuming ----------------------------------------------------------------------------------------------------


def test_a_rerun_skips_finished_rows_and_a_longer_one_adds_to_them(run):
    run()
    before = rows_of("results.csv")
    status, out, _ = run()
    assert status == 0 and "2 finished before, 0 to run" in out and rows_of("results.csv") == before
    run("--subsamples", 3)
    assert rows_of("results.csv")[:2] == before and len(rows_of("results.csv")) == 3


def test_one_subsample_alone_equals_the_same_in_a_full_run(run):
    run("--subsamples", 3)
    run("--first-subsample", 3, "--subsamples", 1, "--out", "alone.csv")
    assert comparable(rows_of("alone.csv")) == comparable(rows_of("results.csv")[2:])


def test_another_recipe_or_other_data_is_refused_and_overwrite_redoes_it(run, benchmark_csv, tmp_path):
    run()
    before = rows_of("results.csv")
    status, _, err = run("--pretrain-epochs", 2)
    assert status == 2 and before[0]["recipe"] in err and "--overwrite" in err and err.count("\n") == 1
    other = tmp_path / "other" / "topics.csv"
    other.parent.mkdir()
    other.write_text(benchmark_csv.read_text().replace("goal", "gaol"))
    status, _, err = run("--csv", other)
    assert status == 2 and before[0]["data"] in err and "data" in err
    assert rows_of("results.csv") == before
    status, *_ = run("--pretrain-epochs", 2, "--overwrite")
    after = rows_of("results.csv")
    assert status == 0 and len(after) == 2 and after[0]["recipe"] != before[0]["recipe"]


def test_batch_size_of_the_evaluation_is_no_part_of_the_recipe_but_seed_is_part_of_the_key(run):
    run("--subsamples", 1)
    run("--subsamples", 1, "--seed", 1)
    rows = rows_of("results.csv")
    assert [row["seed"] for row in rows] == ["0", "1"] and rows[0]["split"] == rows[1]["split"] and rows[0]["loss_extra"] != rows[1]["loss_extra"]


@pytest.mark.parametrize("torn", ["few-shot,tiny,topi", "few-shot,tiny,topics,30,20,2,3,0.55,0.5,0.5,0.5,9,9,0,1,a,b,c,d"])
def test_a_torn_last_line_is_dropped_and_run_again(run, torn):
    run("--subsamples", 1)
    before = rows_of("results.csv")
    with open("results.csv", "a") as file:
        file.write(torn)
    status, out, _ = run()
    assert status == 0 and "torn" in out and rows_of("results.csv")[:1] == before and len(rows_of("results.csv")) == 2


@pytest.mark.parametrize("content", ["", "experiment,mod"])
def test_an_empty_file_and_a_torn_header_are_begun_anew(run, content):
    open("results.csv", "w").write(content)
    assert run()[0] == 0 and len(rows_of("results.csv")) == 2


def test_kill_9_loses_nothing_and_leaves_no_process(tiny, benchmark_csv, tmp_path):
    flags = ["--subsamples", "60", "--workers", "2"]
    process = subprocess.Popen(command(tiny, benchmark_csv, *flags), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    file = tmp_path / "results.csv"
    deadline = time.time() + 120
    while time.time() < deadline and not (file.exists() and file.read_text().count("\n") > 6):
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = file.read_text()
    whole = before[: before.rfind("\n") + 1].splitlines()
    assert 6 < len(whole) < 60 and len(children) >= 2
    while time.time() < deadline and any(os.path.exists(f"/proc/{child}") for child in children):
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{child}") for child in children), "workers end with their parent"
    done = subprocess.run(command(tiny, benchmark_csv, "--subsamples", "60", "--workers", "1"), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(whole) - 1} finished before" in done.stdout, done.stderr
    rows = rows_of(file)
    assert file.read_text().splitlines()[: len(whole)] == whole and len(rows) == 60
    assert sorted(int(row["subsample"]) for row in rows) == list(range(1, 61))


def test_ctrl_c_ends_in_one_line_and_keeps_the_rows(tiny, benchmark_csv, tmp_path):
    process = subprocess.Popen(command(tiny, benchmark_csv, "--subsamples", "500", "--workers", "2"), cwd=tmp_path, text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background job ignores it
    deadline = time.time() + 120
    try:
        while time.time() < deadline and not ((tmp_path / "results.csv").exists() and len(rows_of(tmp_path / "results.csv")) > 3):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        _, err = process.communicate(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and "interrupted" in err.splitlines()[0] and "Traceback" not in err, err
    assert 3 < len(rows_of(tmp_path / "results.csv")) < 500


def test_two_processes_on_one_file_and_any_number_of_workers_give_the_same_rows(run, tiny, benchmark_csv, tmp_path):
    flags = ["--subsamples", "12"]
    runs = [subprocess.Popen(command(tiny, benchmark_csv, *flags, "--workers", workers, "--out", out), cwd=tmp_path, stdout=subprocess.DEVNULL)
            for workers, out in (("1", "shared.csv"), ("2", "shared.csv"))]
    assert [process.wait() for process in runs] == [0, 0]
    rows = rows_of("shared.csv")
    assert sorted(int(row["subsample"]) for row in rows) == list(range(1, 13))
    run("--subsamples", 12, "--out", "single.csv")
    assert comparable(rows) == comparable(rows_of("single.csv"))


def test_a_full_disk_keeps_the_file_and_shows_the_row(script, tmp_path, capsys, monkeypatch):
    row = {name: "0" for name in script.COLUMNS} | {"n": "10", "m": "10", "experiment": "e", "model": "m", "task": "t"}
    path = tmp_path / "results.csv"
    script.append_row(path, row)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as end:
        script.append_row(path, row | {"subsample": "1"})
    message = capsys.readouterr().err
    assert end.value.code == 2 and "No space left on device" in message and "e,m,t,10,10,1" in message
    monkeypatch.undo()
    assert path.read_bytes().startswith(before)
    assert len(script.read_results(path)[1]) >= 1


# Shards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environments", [
    [{"RANK": str(i), "WORLD_SIZE": "3"} for i in range(3)],
    [{"SLURM_ARRAY_TASK_ID": str(i), "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "5", "SLURM_ARRAY_TASK_COUNT": "3"} for i in (10, 15, 20)],
], ids=["torchrun", "slurm"])
def test_shards_cover_the_grid_once_and_skip_what_the_others_did(run, monkeypatch, environments):
    for environment in environments:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            assert run("--subsamples", 7)[0] == 0
    files = [f"results.{i}-of-3.csv" for i in (1, 2, 3)]
    assert [len(rows_of(file)) for file in files] == [3, 2, 2]
    assert sorted(int(row["subsample"]) for file in files for row in rows_of(file)) == list(range(1, 8))
    _, out, _ = run("--subsamples", 8)
    assert "7 finished before, 1 to run" in out


def test_shard_flag_and_the_two_schedulers_together(script, monkeypatch, capsys):
    assert script.shard_of("2/8") == (1, 8) and script.shard_of(None) == (0, 1)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "SLURM_ARRAY_TASK_ID": 3, "SLURM_ARRAY_TASK_MIN": 1, "SLURM_ARRAY_TASK_STEP": 1, "SLURM_ARRAY_TASK_COUNT": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert script.shard_of(None) == (5, 8) and script.shard_of("2/8") == (1, 8)
    for name, value in (("RANK", "2"), ("RANK", "-1"), ("RANK", "first"), ("WORLD_SIZE", "0"), ("SLURM_ARRAY_TASK_ID", "7")):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setenv(name, value)
            script.shard_of(None)
        assert capsys.readouterr().err.startswith("error: ")
    for wrong in ("0/8", "9/8", "3", "a/b"):
        with pytest.raises(SystemExit):
            script.shard_of(wrong)
        assert "i/k" in capsys.readouterr().err


def test_conflicting_rows_in_two_files_are_refused(run):
    run("--subsamples", 1)
    text = open("results.csv").read()
    header, line = text.splitlines()
    fields = dict(zip(header.split(","), line.split(",")))
    fields["acc_base"] = "0.05" if fields["acc_base"] != "0.05" else "0.1"
    open("results.2-of-2.csv", "w").write(f"{header}\n{','.join(fields.values())}\n")
    status, _, err = run("--subsamples", 1)
    assert status == 2 and "two different rows" in err
    open("results.2-of-2.csv", "w").write(text)  # an identical duplicate is no conflict
    open("results_notes.csv", "w").write("some,other\ntable,here\n")  # and another table is none of our business
    os.mkdir("results_old.csv")
    assert run("--subsamples", 1)[0] == 0


def test_overwrite_does_not_reach_into_the_file_of_another_shard(run):
    run("--shard", "1/2")
    run("--shard", "2/2")
    before = rows_of("results.1-of-2.csv")
    status, _, err = run("--overwrite")
    assert status == 2 and "results.1-of-2.csv" in err and rows_of("results.1-of-2.csv") == before
    assert run("--overwrite", "--shard", "1/2")[0] == 0


def test_rows_of_a_file_with_the_first_eleven_columns_are_kept_and_ours_are_whole(run, script):
    run("--subsamples", 1)
    (row,) = rows_of("results.csv")
    other = {name: row[name] for name in script.REQUIRED} | {"subsample": "9", "mine": "kept"}
    open("results.csv", "w").write(",".join(other) + "\n" + ",".join(other.values()) + "\n")
    assert run("--subsamples", 1)[0] == 0
    rows = rows_of("results.csv")
    assert rows[0]["mine"] == "kept" and rows[0]["recipe"] == "" and {**row, "seconds": ""} == {name: rows[1][name] for name in row} | {"seconds": ""}
    assert "1 finished before" in run("--subsamples", 1)[1]


def test_a_value_given_twice_counts_once(run):
    run("--m", 30, 30, "--n", 20, 20, "--subsamples", 1)
    assert len(rows_of("results.csv")) == 1


# A notebook cell ---------------------------------------------------------------------------------------------


def test_pasted_into_a_notebook_cell(tiny, benchmark_csv, tmp_path, monkeypatch):
    """Without __file__, under another name, with a kernel's argv; tasks.json in the current folder; one worker."""
    shutil.copy(ROOT / "tasks.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    cell = {"__name__": "cell"}
    exec(compile((ROOT / "run_experiment.py").read_text(), "<cell>", "exec"), cell)
    flags = command(tiny, benchmark_csv, "--subsamples", "2", "--workers", "2")[2:]
    cell["main"](flags)
    assert len(rows_of("results.csv")) == 2
    called = []
    guarded = (ROOT / "run_experiment.py").read_text().split("# --- shared: guard ---")[1]
    exec(compile(guarded, "<cell>", "exec"), {"__name__": "__main__", "main": called.append})
    assert called == [[]], "a pasted cell runs with the defaults, not with the kernel's arguments"


# Mistakes: one line, exit status 2, nothing written -----------------------------------------------------------


def make_csv(folder, lines, name="mine.csv"):
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")  # \udce9 becomes the byte of a latin-1 é
    return folder / name


TWENTY = [f"text {i},{'ab'[i % 2]}" for i in range(20)]


@pytest.mark.parametrize("lines, flags, words", [
    (["text,label", *TWENTY], ["--text", "body"], ["no column 'body'", "text, label"]),
    (["text,label", *TWENTY], ["--label", "y"], ["no column 'y'", "text, label"]),
    (["text,label", *TWENTY, ",a"], [], ["1 of 21 texts are empty", "data row 21"]),
    (["text,label", *TWENTY], ["--m", 4, "--n", 9], ["has 20 rows", "need 22", "--n 8"]),
    (["text,label", *TWENTY], ["--m", 1, "--n", 2], ["2 classes", "--m 2"]),
    (["text,label", *TWENTY, "rare,c"], ["--m", 6, "--n", 2], ["class 'c' has 1 texts", "--m 3"]),
    (["text,label"], [], ["has no rows"]),
    (["text;label", *TWENTY], [], ["no column 'text'", "text;label"]),
    (["text,label", *TWENTY, "one, two,a"], [], ["data row 21", "quotes"]),
    (["text,label", *TWENTY, '"begun and never ended,a'], [], ["CSV"]),
    (["text,label,text", *(f"{line},x" for line in TWENTY)], [], ["two columns 'text'"]),
    (["text,label", *(line.replace(",b", ",a") for line in TWENTY)], [], ["one class"]),
    (["text,label", *TWENTY, "nameless,"], [], ["1 of 21 labels are empty", "data row 21"]),
    (["text,label", *TWENTY, "caf\udce9,a"], [], ["UTF-8"]),
], ids=["text column", "label column", "empty text", "too few rows", "m below K", "rare class", "no rows", "semicolons", "a comma too many",
        "a quote too many", "two text columns", "one class", "empty label", "latin-1"])
def test_mistakes_in_a_csv(run, tmp_path, lines, flags, words):
    status, _, err = run("--csv", make_csv(tmp_path, lines), *flags)
    assert status == 2 and err.count("\n") == 1 and err.startswith("error: ") and all(word in err for word in words), err
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.parametrize("flags, words", [
    (["--tasks", "agnews"], ["unknown task 'agnews'", "ag_news", "bbc_news"]),
    (["--model", "bort"], ["unknown model 'bort'", "bert-tiny", "smollm2"]),
    (["--model", "mistral"], ["run_zero_shot.py"]),
    (["--csv", "absent.csv"], ["absent.csv", "no such file"]),
    (["--device", "cuda"], ["no CUDA GPU", "--device cpu"]),
    (["--precision", "tf32"], ["CUDA", "float32"]),
    (["--subsamples", "paper"], ["n = 50, 100, 200, 500"]),
    (["--max-length", 4096], ["--max-length is 4096", "512"]),
    (["--out", "results.txt"], [".csv"]),
    (["--out", "/proc/none/results.csv"], ["cannot be written"]),
    (["--shard", "4/3"], ["i/k"]),
    (["--device", "toaster"], ["--device toaster"]),
    (["--experiment", "a/b"], ["file name"]),
    (["--experiment", "two\nlines"], ["file name"]),
    (["--predictions", "/proc/none"], ["cannot be written"]),
    (["--check-tasks"], ["--csv"]),
])
def test_mistakes_in_flags(run, tmp_path, flags, words, request):
    if flags[-1] == "cuda" and __import__("torch").cuda.is_available():
        pytest.skip("this machine has a CUDA GPU")
    if flags == ["--model", "mistral"]:  # its weights are not fetched for an error
        request.getfixturevalue("monkeypatch").setattr("run_experiment.model_folder", lambda *_: (tmp_path, None))
        request.getfixturevalue("monkeypatch").setattr("run_experiment.hash_files", lambda *_: "0")
    status, _, err = run(*flags)
    assert status == 2 and err.count("\n") == 1 and all(word in err for word in words), err
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.parametrize("flag, value", [("--m", "0"), ("--n", "-3"), ("--subsamples", "some"), ("--train-lr", "0"), ("--precision", "fp16")])
def test_impossible_flag_values_are_argparse_errors(run, flag, value):
    status, _, err = run(flag, value)
    assert status == 2 and flag in err


@pytest.mark.parametrize("edit, words", [
    (lambda text: text.replace("acc_extra", "acc_exta"), ["no column 'acc_extra'", "acc_exta"]),
    (lambda text: text.replace(",topics,30,20,", ",topics,30,21,"), ["line 2", "whole number of correct answers"]),
    (lambda text: text.replace(",topics,30,", ",topics,many,"), ["line 2", "many"]),
    (lambda text: text + "a,b\n", ["line 3", "2 fields"]),
    (lambda text: "oh no\n", ["no column 'experiment'"]),
], ids=["columns", "impossible accuracy", "not a number", "short line", "another file"])
def test_a_results_file_that_is_not_ours_is_left_alone(run, edit, words):
    run("--subsamples", 1)
    text = edit(open("results.csv").read())
    open("results.csv", "w").write(text)
    status, _, err = run()
    assert status == 2 and err.count("\n") == 1 and all(word in err for word in words), err
    assert open("results.csv").read() == text


def test_duplicate_keys_with_different_numbers_in_one_file(run):
    run("--subsamples", 1)
    header, line = open("results.csv").read().splitlines()
    fields = dict(zip(header.split(","), line.split(",")))
    fields["acc_test"] = "0.05" if fields["acc_test"] != "0.05" else "0.1"
    open("results.csv", "a").write(",".join(fields.values()) + "\n")
    status, _, err = run()
    assert status == 2 and "two different rows" in err


def test_a_wheel_with_another_hash_is_not_used(script, tmp_path, capsys):
    (tmp_path / "some_words-1.0-py3-none-any.whl").write_bytes(b"not what the registry knows")
    with pytest.raises(SystemExit) as end:
        script.fetch_wheel("some-words==1.0", "0" * 64, tmp_path)
    message = capsys.readouterr().err
    assert end.value.code == 2 and "sha256" in message and "0" * 64 in message and message.count("\n") == 1


def test_a_model_folder_without_safe_weights(run, tiny, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(tiny, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    status, _, err = run("--model", folder)
    assert status == 2 and "safetensors" in err and err.count("\n") == 1


@pytest.mark.parametrize("missing, words", [("tokenizer*", "no tokenizer"), ("config.json", "config.json"), ("model.safetensors", "safetensors")])
def test_a_model_folder_that_lacks_something(run, tiny, tmp_path, missing, words):
    folder = tmp_path / "broken"
    shutil.copytree(tiny, folder)
    for file in folder.glob(missing):
        file.unlink()
    status, _, err = run("--model", folder)
    assert status == 2 and words in err and err.count("\n") == 1 and not (tmp_path / "results.csv").exists()


def test_damaged_weights_end_in_one_line(run, tiny, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny, folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    status, _, err = run("--model", folder)
    assert status == 2 and "cannot be loaded" in err and err.count("\n") == 1


def test_the_objective_is_read_from_the_config(script, tmp_path):
    for config, expected in (({"architectures": ["BertForMaskedLM"]}, "mlm"), ({"architectures": ["GPT2LMHeadModel"]}, "clm"),
                             ({"architectures": ["LlamaForCausalLM"]}, "clm"), ({"model_type": "bert", "architectures": ["BertModel"]}, "mlm"), ({"model_type": "gpt2"}, "clm")):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert script.find_objective(tmp_path) == expected


def test_paper_subsamples_and_tasks(script):
    assert [script.subsample_count("paper", n) for n in (50, 100, 200, 500)] == [100, 100, 50, 20]
    args = script.parse_args(["--tasks", "all"])
    assert len(script.choose_tasks(args, script.load_registry())) == 25


# Real weights, real text -------------------------------------------------------------------------------------


def test_real_news_is_learnt_and_shuffled_labels_are_not(run, script, tmp_path):
    """bert-tiny on bbc_news is far above the majority; with shuffled labels it is at chance."""
    flags = ["--model", "bert-tiny", "--m", 50, "--n", 100, "--pretrain-epochs", 1, "--train-epochs", 8, "--subsamples", 2, "--max-length", 64]
    status, _, err = run(*flags, "--tasks", "bbc_news", base=False)
    assert status == 0, err
    real = rows_of("results.csv")
    task = script.load_task("bbc_news", script.load_registry()["tasks"]["bbc_news"], script.parse_args([]).cache)
    shuffled = np.random.default_rng(0).permutation(task["labels"])
    with open("shuffled.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows((text[:400], task["classes"][label]) for text, label in zip(task["texts"], shuffled))
    status, _, err = run(*flags, "--csv", "shuffled.csv", base=False)
    assert status == 0, err
    chance = [row for row in rows_of("results.csv") if row["task"] == "shuffled"]
    for arm in ("acc_base", "acc_extra", "acc_test"):
        assert np.mean([float(row[arm]) for row in real]) > 0.25 + np.mean([float(row["majority"]) for row in real])
        # 200 guesses: one standard error is at most 3 points; 5 classes of nearly equal size
        assert abs(np.mean([float(row[arm]) for row in chance]) - 0.2) < 0.1
