"""Many processes share one grid: real torchrun workers, processes in the environment of a Slurm job array, a worker killed half
way, another number of shards. Every row comes once, and equals that of one plain process. (A real Slurm: tests/slurm_one_node.sh.)"""

import os
import re
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from conftest import ROOT, load_script
from test_runs import comparable, rows_of

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
OF_A_JOB = ("SLURM_", "RANK", "WORLD_", "LOCAL_")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_JOB)} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def grids(model_dir, benchmark_csv):
    """{script: its command for a small grid}: 24 rows of a random BERT, 6 of a random Llama, a tenth of a second each."""
    common = ["--csv", str(benchmark_csv), "--m", "6", "--threads", "1", "--device", "cpu"]
    small = {kind: str(model_dir(kind, initializer_range=0.02)) for kind in ("bert", "llama")}
    few_shot = ["--n", "8", "12", "--subsamples", "12", "--train-epochs", "1", "--pretrain-epochs", "1", "--workers", "1"]
    return {"run_experiment": [str(ROOT / "run_experiment.py"), *common, "--model", small["bert"], *few_shot],
            "run_zero_shot": [str(ROOT / "run_zero_shot.py"), *common, "--model", small["llama"], "--n", "4", "--subsamples", "6"]}


@pytest.fixture(scope="module")
def plain(grids, tmp_path_factory):
    """{script: rows of one plain run}, in this process."""
    folder, rows = tmp_path_factory.mktemp("plain"), {}
    for name, (_, *flags) in grids.items():
        load_script(name).main([*flags, "--out", str(folder / f"{name}.csv")])
        rows[name] = rows_of(folder / f"{name}.csv")
    assert len(rows["run_experiment"]) == 24 and len(rows["run_zero_shot"]) == 6
    return rows


def rows_in(folder):
    return [row for file in sorted(folder.glob("results*.csv")) for row in rows_of(file)]


def keys(rows):
    return sorted(tuple(row[name] for name in ("experiment", "model", "task", "m", "n", "subsample", "seed")) for row in rows)


def job_array(command, tasks, folder):
    """Start the command at once as every task of `sbatch --array=0-<last>:3`, without Slurm; returns their outputs."""
    bounds = {"MIN": 0, "MAX": 3 * (tasks - 1), "STEP": 3, "COUNT": tasks}
    runs = []
    for task in range(tasks):
        array = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in {**bounds, "ID": 3 * task}.items()}
        runs.append(subprocess.Popen([sys.executable, *command], cwd=folder, env=ENVIRONMENT | array, text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert not any(run.returncode for run in runs), outputs
    return outputs


@pytest.mark.parametrize("name", ["run_experiment", "run_zero_shot"])
def test_torchrun_splits_the_grid(name, grids, plain, tmp_path, capsys):
    command = [*TORCHRUN, *grids[name], "--out", "new/folder/results.csv"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "new" / "folder"
    half = len(plain[name]) // 2
    assert [len(rows_of(folder / f"results.{i}-of-2.csv")) for i in (1, 2)] == [half, half]
    assert comparable(rows_in(folder)) == comparable(plain[name])
    assert not list(folder.glob("*.png")) and "boost" not in done.stdout and done.stdout.count("fit_model.py") == 2
    read = load_script("fit_model").read_rows([folder])
    assert keys(row | {part: str(row[part]) for part in ("m", "n", "subsample", "seed")} for row in read) == keys(plain[name])
    assert "given twice" not in capsys.readouterr().out


def test_a_job_array_splits_the_grid(grids, plain, tmp_path):
    job_array(grids["run_experiment"], 2, tmp_path)
    assert [len(rows_of(tmp_path / f"results.{i}-of-2.csv")) for i in (1, 2)] == [12, 12]
    assert comparable(rows_in(tmp_path)) == comparable(plain["run_experiment"])


def test_a_killed_worker_and_a_rerun_with_another_number_of_shards(script, grids, plain, tmp_path, capsys):
    command = grids["run_experiment"]
    run = subprocess.Popen([*TORCHRUN, *command], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 60
    while time.time() < deadline and not list(tmp_path.glob("results*.csv")):
        time.sleep(0.01)
    workers = [child for child in psutil.Process(run.pid).children() if any("run_experiment.py" in word for word in child.cmdline())]
    assert len(workers) == 2
    workers[0].kill()
    assert run.wait(timeout=60) == 1  # torchrun ends the other worker too
    before = {file: file.read_text() for file in tmp_path.glob("results*.csv")}
    whole = {file: text[: text.rfind("\n") + 1] for file, text in before.items()}
    count = sum(text.count("\n") - 1 for text in whole.values())
    assert 1 <= count < 24
    outputs = job_array(command, 3, tmp_path)
    assert sum(int(re.search(r"(\d+) finished before", output)[1]) for output in outputs) >= count
    assert all(file.read_text().startswith(text) for file, text in whole.items())
    assert comparable(rows_in(tmp_path)) == comparable(plain["run_experiment"])
    script.main([*command[1:], "--out", str(tmp_path / "results.csv")])
    assert "24 finished before, 0 to run" in capsys.readouterr().out and len(rows_in(tmp_path)) == 24


def test_each_torchrun_worker_uses_its_own_gpu_and_no_other(script, monkeypatch):
    """Even a look at the first GPU would keep some hundred MB of its memory, for each of the processes."""
    used = []
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script.torch, "zeros", lambda *_, device: used.append(device))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert script.choose_device(SimpleNamespace(device="auto", precision="float32")) == "cuda:3"
    assert script.choose_device(SimpleNamespace(device="cuda:1", precision="float32")) == "cuda:1"
    assert used == ["cuda:3", "cuda:1"]


def test_an_array_with_gaps_has_no_shares(script, monkeypatch, capsys):
    """`sbatch --array=3,7` sets these (Slurm 22.05): task 3 would take the first half of the grid and task 7 none."""
    for name, value in {"ID": 3, "MIN": 3, "MAX": 7, "STEP": 1, "COUNT": 2}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    with pytest.raises(SystemExit):
        script.shard_of(None)
    assert "no such share" in capsys.readouterr().err and script.shard_of("3/64") == (2, 64)
    monkeypatch.setenv("SLURM_ARRAY_TASK_STEP", "4")  # --array=3-7:4
    assert script.shard_of(None) == (0, 2)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")  # between two steps, which a list of ranges can hold
    with pytest.raises(SystemExit):
        script.shard_of(None)


def test_the_look_before_a_run_leaves_results_files_alone(script, tmp_path, monkeypatch):
    """It used to make and remove its own file; another shard that was just listing the folder then failed."""
    monkeypatch.setattr(script.Path, "unlink", lambda *_, **__: pytest.fail("a file was removed"))
    out = tmp_path / "new" / "results.csv"
    assert script.prepare_output(SimpleNamespace(shard="2/3", out=out, dry_run=False, predictions=None)) == (1, 3)
    assert [path.name for path in out.parent.iterdir()] == [".results.2-of-3.csv.lock"]


@pytest.mark.parametrize("document", ["README.md", "docs/scale.md"])
def test_the_commands_of_the_guide_parse(document):
    """torchrun reads --m and --n of the script as beginnings of its own flags, unless a lone -- comes before the script."""
    from torch.distributed.run import get_args_parser

    guide = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"^(?:torchrun .*|python \w+\.py.*)$", guide, re.MULTILINE)]
    assert {words[0] for words in commands} == {"torchrun", "python"}
    for launcher, *words in commands:
        if launcher == "torchrun":
            args = get_args_parser().parse_args(words)
            words = [args.training_script, *args.training_script_args]
        load_script(words[0].removesuffix(".py")).parse_args(words[1:])
