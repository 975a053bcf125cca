"""Many processes share one grid: real torchrun workers, --shard as a Slurm job array gives it, a worker killed half way, another
number of shards. Every row comes once, and equals that of one plain process. (A real Slurm: tests/slurm_one_node.sh.)"""

import os
import re
import shlex
import subprocess
import sys
import time

import psutil
import pytest

from conftest import ROOT, load_script
from test_runs import comparable, rows_of

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_", "LOCAL_"))} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def grids(model_dir, benchmark_csv):
    """{script: its command for a small grid}: 24 rows of a random BERT, 4 of a random Llama, a tenth of a second each."""
    common = ["--csv", str(benchmark_csv), "--m", "6", "--threads", "1", "--device", "cpu", "--workers", "1"]
    small = {kind: str(model_dir(kind, initializer_range=0.02)) for kind in ("bert", "llama")}
    few_shot = ["--n", "8", "12", "--subsamples", "12", "--train-epochs", "1", "--pretrain-epochs", "1"]
    return {"run_experiment": [str(ROOT / "run_experiment.py"), *common, "--model", small["bert"], *few_shot],
            "run_zero_shot": [str(ROOT / "run_zero_shot.py"), *common, "--model", small["llama"], "--n", "4", "--subsamples", "4"]}


@pytest.fixture(scope="module")
def plain(grids, tmp_path_factory):
    """{script: rows of one plain run}, in this process."""
    folder, rows = tmp_path_factory.mktemp("plain"), {}
    for name, (_, *flags) in grids.items():
        load_script(name).main([*flags, "--out", str(folder / f"{name}.csv")])
        rows[name] = rows_of(folder / f"{name}.csv")
    assert len(rows["run_experiment"]) == 24 and len(rows["run_zero_shot"]) == 4
    return rows


def rows_in(folder):
    return [row for file in sorted(folder.glob("results*.csv")) for row in rows_of(file)]


@pytest.mark.parametrize("name", ["run_experiment", "run_zero_shot"])
def test_torchrun_splits_the_grid(name, grids, plain, tmp_path):
    done = subprocess.run([*TORCHRUN, *grids[name], "--out", "new/folder/results.csv"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder, half = tmp_path / "new" / "folder", len(plain[name]) // 2
    assert [len(rows_of(folder / f"results.{i}-of-2.csv")) for i in (1, 2)] == [half, half]
    assert comparable(rows_in(folder)) == comparable(plain[name])
    assert "results.1-of-2.csv" in done.stdout and done.stdout.count("fit_model.py") == 2


def test_a_killed_worker_and_a_rerun_with_another_number_of_shards(script, grids, plain, tmp_path, capsys):
    command = grids["run_experiment"]
    run = subprocess.Popen([*TORCHRUN, *command], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while time.time() < deadline and not list(tmp_path.glob("results*.csv")):
        time.sleep(0.01)
    workers = [child for child in psutil.Process(run.pid).children() if any("run_experiment.py" in word for word in child.cmdline())]
    assert len(workers) == 2
    workers[0].kill()
    assert run.wait(timeout=60) == 1  # torchrun ends the other worker too
    before = {file: file.read_text() for file in tmp_path.glob("results*.csv")}
    whole = {file: text[: text.rfind("\n") + 1] for file, text in before.items()}
    assert 1 <= (count := sum(text.count("\n") - 1 for text in whole.values())) < 24
    shares = [subprocess.Popen([sys.executable, *command, "--shard", f"{i}/3"], cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE)
              for i in (1, 2, 3)]  # a job array passes --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT
    outputs = [share.communicate(timeout=300)[0] for share in shares]
    assert not any(share.returncode for share in shares) and sum(int(re.search(r"(\d+) finished before", text)[1]) for text in outputs) >= count
    assert all(file.read_text().startswith(text) for file, text in whole.items())
    assert comparable(rows_in(tmp_path)) == comparable(plain["run_experiment"])
    script.main([*command[1:], "--out", str(tmp_path / "results.csv")])
    out = capsys.readouterr().out
    assert "24 finished before, 0 to run" in out and len(rows_in(tmp_path)) == 24 and "-of-3.csv" in out.splitlines()[-1], "it names the files"
    with pytest.raises(script.UserError, match="-of-"):
        script.main([*command[1:], "--out", str(tmp_path / "results.csv"), "--overwrite"])
    assert len(rows_in(tmp_path)) == 24, "another shard's rows are not taken out"


@pytest.mark.parametrize("rank, world", [("2", "2"), ("-1", "2"), ("first", "2"), ("0", "0")])
def test_a_rank_that_is_no_share(script, monkeypatch, rank, world):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(script.UserError, match="no share"):
        script.shard_of(None)
    assert script.shard_of("2/8") == (1, 8)


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
