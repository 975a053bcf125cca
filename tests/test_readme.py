"""Every command of README.md, in its order, in one folder, on tiny settings: what one writes, the
next reads."""

import re
import shlex

from conftest import ROOT, end_of, load_script

RUN = "--tasks rotten_tomatoes --m 6 --n 8 --subsamples 2 --workers 1"
TINY = {  # flags that come last and so win; the models are random ones of two layers
    "run_experiment": f"{RUN} --max-length 24 --batch-size 4",
    "run_zero_shot": f"{RUN} --quantize none",
    "fit_model": "",
    "meta_analysis": "--slices 10 --experiment few-shot --m 6 --n 8",
    "contamination_test": "",
}


def readme_commands():
    """[(script, flags)] of the code blocks, in order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = []
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        for name, flags in re.findall(r"^(?:.*&& )?python (\w+)\.py ?(.*)", block, re.MULTILINE):
            found.append((name, shlex.split(flags, comments=True)))
    return found


def test_the_commands_run_in_order(empty_folder, tmp_path, model_dir, benchmark_csv):
    commands = readme_commands()
    assert {name for name, _ in commands} == set(TINY)
    masked, causal = str(model_dir("bert")), str(model_dir("gpt2"))
    mine = benchmark_csv.read_text().replace("text,label", "text,sentiment", 1)
    (tmp_path / "mine.csv").write_text(mine)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    lines = [f"example number {k} of mine\n" for k in range(40)]
    for file, part in (("mine", lines), ("released", lines[::2]), ("held", lines[1::2])):
        (tmp_path / f"{file}.txt").write_text("".join(part))
    for name, flags in commands:
        if "--hub" in flags:
            continue  # tests/test_tasks.py, on a hub of its own
        tiny = TINY[name].split()
        if "--csv" in flags:  # its own text is the task
            tiny = tiny[2:]
        if name == "run_experiment":
            tiny += ["--model", masked]
        elif name == "run_zero_shot" or "--model" in flags:
            tiny += ["--model", causal]
        if "--reference" in flags:
            tiny += ["--reference", causal]
        words = []
        for flag in flags:  # the shell's work
            words += sorted(ROOT.glob(flag)) if "*" in flag else [flag]
        assert not end_of(load_script(name).main, *words, *tiny), (name, flags)
    for name in ("results.csv", "mine_results.csv", "kept", "meta/results/slices.png",
                 "fits/mine_results/report.html"):
        assert (tmp_path / name).exists(), name
