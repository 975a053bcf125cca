"""Many processes share one grid: real torchrun workers, one killed half way, another number of
shares. Every row comes once, and equals that of one plain process."""

import os
import re
import shlex
import subprocess
import sys
import time

import psutil
import pytest

from conftest import ROOT, comparable, load_script, rows_of

TORCHRUN = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2 --".split()]
ENVIRONMENT = {name: os.environ[name] for name in os.environ
               if not name.startswith(("RANK", "WORLD_", "LOCAL_"))}


@pytest.fixture(scope="module")
def grid(model_dir, benchmark_csv):
    """The command of 24 subsamples of a random BERT, a tenth of a second each."""
    return (f"{ROOT / 'run_experiment.py'} --model {model_dir('bert')} --csv {benchmark_csv} --m 6 "
            "--n 8 12 --subsamples 12 --train-epochs 1 --pretrain-epochs 1 --device cpu "
            "--workers 1 --threads 1").split()


@pytest.fixture(scope="module")
def plain(script, grid, tmp_path_factory):
    """The rows of one process."""
    out = tmp_path_factory.mktemp("plain") / "results.csv"
    script.main([*grid[1:], "--out", str(out)])
    assert len(rows_of(out)) == 24
    return comparable(rows_of(out))


def rows_in(folder):
    return [row for file in sorted(folder.glob("results*.csv")) for row in rows_of(file)]


def test_a_rank_of_torchrun_is_a_share(script, grid, plain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        script.main([*grid[1:], "--out", "new/folder/results.csv"])
    folder = tmp_path / "new" / "folder"
    assert [len(rows_of(folder / f"results.{i}-of-2.csv")) for i in (1, 2)] == [12, 12]
    assert comparable(rows_in(folder)) == plain
    assert "fit_model.py new/folder/results.1-of-2.csv" in capsys.readouterr().out


def test_a_killed_worker_and_a_rerun_with_another_number_of_shares(
        script, grid, plain, tmp_path, capsys):
    run = subprocess.Popen([*TORCHRUN, *grid], cwd=tmp_path, env=ENVIRONMENT,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while time.time() < deadline and not rows_in(tmp_path):
        time.sleep(0.01)
    workers = [child for child in psutil.Process(run.pid).children() if grid[0] in child.cmdline()]
    assert len(workers) == 2
    workers[0].kill()
    assert run.wait(timeout=60) == 1  # torchrun ends the other worker too
    names = {file.name for file in tmp_path.glob("results*.csv")}
    assert names <= {"results.1-of-2.csv", "results.2-of-2.csv"}
    whole = {}
    for file in tmp_path.glob("results*.csv"):
        text = file.read_text()
        whole[file] = text[: text.rfind("\n") + 1]
    assert 1 <= sum([text.count("\n") - 1 for text in whole.values()]) < 24
    words = [*grid[1:], "--out", str(tmp_path / "results.csv")]
    for i in (1, 2, 3):
        script.main([*words, "--shard", f"{i}/3"])
    assert all([file.read_text().startswith(text) for file, text in whole.items()])
    assert comparable(rows_in(tmp_path)) == plain
    capsys.readouterr()
    script.main(words)
    assert "24 subsamples finished before, 0 to run" in capsys.readouterr().out
    assert len(rows_in(tmp_path)) == 24


def test_the_commands_of_the_guide_parse(monkeypatch):
    """torchrun reads --m and --n as beginnings of its own flags, unless a lone -- comes first."""
    from torch.distributed.run import get_args_parser

    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "64")
    guide = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    guide = os.path.expandvars(guide.replace("\\\n", " "))
    lines = re.findall(r"^(?:torchrun .*|python \w+\.py.*)$", guide, re.MULTILINE)
    commands = [shlex.split(line) for line in lines]
    assert {words[0] for words in commands} == {"torchrun", "python"}
    for launcher, *words in commands:
        if launcher == "torchrun":
            args = get_args_parser().parse_args(words)
            words = [args.training_script, *args.training_script_args]
        load_script(words[0].removesuffix(".py")).parse_args(words[1:])
