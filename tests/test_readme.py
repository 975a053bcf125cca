"""Every command of README.md, in its order, in one folder, on tiny settings: what one writes, the next reads."""

import re
import shlex

import pytest

from conftest import ROOT, load_script

TINY = {  # flags that come last and so win; the models are random ones of two layers
    "run_experiment": "--tasks rotten_tomatoes --m 6 --n 8 --subsamples 2 --workers 1 --max-length 24 --batch-size 4",
    "run_zero_shot": "--tasks rotten_tomatoes --m 6 --n 8 --subsamples 2 --workers 1 --quantize none",
    "fit_model": "--draws 0 --no-figures", "meta_analysis": "--slices 10 --experiment few-shot --m 6 --n 8", "contamination_test": "--device cpu"}


def readme_commands():
    """[(script, flags)] of the code blocks, in order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line.rpartition("&& ")[2] for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.replace("\\\n", " ").splitlines()]
    return [(match[1], shlex.split(match[2])) for line in lines if (match := re.match(r"python (\w+)\.py ?(.*)", line))]


def test_the_commands_run_in_order(tmp_path, monkeypatch, model_dir, benchmark_csv, capsys):
    commands = readme_commands()
    assert {name for name, _ in commands} == set(TINY)
    mlm, clm = str(model_dir("bert")), str(model_dir("gpt2"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(benchmark_csv.read_text())
    (tmp_path / "board.csv").write_text("name,score\nfirst,70\nsecond,65\n")
    (tmp_path / "mine.txt").write_text("\n".join(f"example number {k} of mine" for k in range(40)) + "\n")
    for name, flags in commands:
        tiny = shlex.split(TINY[name])
        if "--csv" in flags:  # its own text is the task
            tiny = tiny[2:]
        if name == "contamination_test" and "--examples" not in flags:
            tiny = []
        if name == "contamination_test" and flags[:1] == ["--from-log"]:
            continue  # of a log that the paper's authors publish; tests/test_contamination_test.py reads it
        model = ["--model", clm if name != "run_experiment" else mlm] if "--model" in flags or name.startswith("run_") else []
        words = []
        for flag in flags:  # the shell's work
            words += sorted(map(str, ROOT.glob(flag))) if "*" in flag else [flag]
        try:
            load_script(name).main([*words, *tiny, *model])
        except SystemExit as end:
            assert not end.code, (name, flags, capsys.readouterr().err)
    results = {path.name for path in tmp_path.iterdir()}
    assert {"results.csv", "mine_results.csv", "fits", "meta", "kept"} <= results
    assert (tmp_path / "plan" / "plan.csv").exists() and (tmp_path / "meta" / "leaderboard.csv").exists()
