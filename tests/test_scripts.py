"""Every script stands alone, names what it needs, and shares code only as identical marked blocks.
Every command of README.md, two guides and the scripts' heads exists; those of the documents run.
Every link of the documents leads somewhere."""

import ast
import re
import shlex
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

from conftest import ROOT, end_of, load_script

SCRIPTS = sorted(ROOT.glob("*.py"))
EACH = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
BLOCK = re.compile(
    r"^# --- shared: (\w+) ---\n(.*?)^# --- end shared ---$", re.DOTALL | re.MULTILINE)
TOP = re.compile(r"(?ms)^((?:def|class) \w+)(.*?)^(?=\S)")  # functions and classes
GUIDES = ("README.md", "docs/own_texts.md", "docs/paper.md")
METADATA = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///\n")  # PEP 723
BEHIND = {"accelerate", "bitsandbytes", "gguf", "pip"}  # transformers imports these; pip is run
# for --dask, --paper-model and logs of inspect_ai
OPTIONAL = {"distributed", "arviz", "nutpie", "pymc", "pytensor", "inspect_ai"}


def read(path):
    return path.read_text(encoding="utf-8")


def imports(path):
    pattern = r"(?m)^ *(?:import (\w+)[\w.]*(?: as \w+)?|from (\w+)[\w.]* import .*)$"
    return {first or second for first, second in re.findall(pattern, read(path))}


def commands():
    """[(file, command)] of the code blocks of README.md, the guides and the scripts' heads."""
    texts = [(name, "\n".join(re.findall(r"(?s)```.*?\n(.*?)```", read(ROOT / name))))
             for name in GUIDES]
    texts += [(path.name, ast.get_docstring(ast.parse(read(path)))) for path in SCRIPTS]
    for name, text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            line = re.sub(r"\$\(.*\)", "ADDRESS", line).rpartition("&&")[2]
            if re.match(r"\s*(!?python|%run|uv run) .*\w+\.py( |$)", line):
                yield name, re.sub(r"\s+", " ", line.split("#")[0]).strip()


@EACH
def test_a_script_stands_alone_and_explains_itself(path, capsys):
    assert not imports(path) & {"tests", "conftest", *[other.stem for other in SCRIPTS]}
    manual = load_script(path.stem).__doc__
    assert f"python {path.name}" in manual and "columns" in manual
    with pytest.raises(SystemExit) as end:
        load_script(path.stem).main(["--help"])
    assert end.value.code == 0 and "--out" in capsys.readouterr().out


@EACH
def test_a_tilde_is_the_home_folder(path):
    """bash leaves it where a flag and its path are one word."""
    flags = re.findall(r'"--(\w+)", type=\w*[Pp]ath', read(path))
    args = load_script(path.stem).parse_args([f"--{flag}=~/{flag}.csv" for flag in flags])
    assert "out" in flags
    assert all(getattr(args, flag) == Path.home() / f"{flag}.csv" for flag in flags)


@EACH
@pytest.mark.parametrize("error, end", [
    (ValueError("in two\nlines"), "in two lines"), (KeyError("a"), "KeyError: 'a'")])
def test_an_error_is_one_line(path, error, end, monkeypatch):
    script = load_script(path.stem)
    monkeypatch.setattr(script, "parse_args", Mock(side_effect=error))
    assert end_of(script.main) == f"error: {end}"
    monkeypatch.setenv("TRACEBACK", "1")
    with pytest.raises(type(error)):
        script.main()


@EACH
def test_a_missing_package_is_one_line(path):
    """-S hides those that are installed."""
    done = subprocess.run([sys.executable, "-S", path], capture_output=True, text=True)
    words = rf"error: No module named '\w+'\. Run pip install -r .* uv run {path.name}\n"
    assert done.returncode == 1 and re.fullmatch(words, done.stderr), done.stderr


@EACH
@pytest.mark.parametrize("argv, flags", [
    (["/bin/ipykernel_launcher.py", "--f=kernel.json"], []), (["edited.py", "--m=9"], ["--m=9"])])
def test_run_magic_runs_the_text_of_now(path, argv, flags, tmp_path, monkeypatch):
    """Although the process has imported an older one. VS Code's window also sets __file__, but a
    kernel's flags are not ours. IPython prepends the folder of what it runs."""
    monkeypatch.syspath_prepend(tmp_path)
    edited = tmp_path / f"{path.stem}_edited.py"
    guard = read(path).partition("\nif __name__")
    monkeypatch.setattr(sys, "argv", argv)
    for word in ("old", "edited"):
        edited.write_text("import importlib, sys\nfrom pathlib import Path\ndef main(argv=None):\n"
                          f"    sys.ran = {word!r}, sys.argv[1:] if argv is None else argv"
                          + "".join(guard[1:]))
        exec(compile(read(edited), edited, "exec"), {"__name__": "__main__", "__file__": edited})
        assert sys.ran == (word, flags)


@EACH
def test_a_script_names_what_it_needs(path):
    """Its inline metadata (PEP 723): the pins of requirements.txt for what it imports."""
    lines = [line.removeprefix("#").strip() for line in METADATA.match(read(path))[1].splitlines()]
    metadata = tomllib.loads("\n".join(lines))
    pins = metadata["dependencies"]
    assert {*pins} <= {*read(ROOT / "requirements.txt").split("\n")}
    names = {pin.partition("==")[0] for pin in pins}
    assert len(names) == len(pins)
    imported = imports(path) - sys.stdlib_module_names
    needed = imported - OPTIONAL
    assert needed <= names, f"not named: {needed - names}"
    assert names - needed <= BEHIND, f"named and not imported: {names - needed - BEHIND}"


def test_what_scripts_share_is_identical():
    """Blocks (else python tests/copy_blocks.py SCRIPT BLOCK), and functions and classes of one
    name, since pasted cells share one namespace."""
    places = {}  # by name, by text: the scripts
    for path in SCRIPTS:
        for name, text in BLOCK.findall(read(path)) + TOP.findall(read(path)):
            places.setdefault(name, {}).setdefault(text, []).append(path.name)
    drifted = {name: [*texts.values()] for name, texts in places.items() if len(texts) > 1}
    assert {*drifted} <= {"def main", "def parse_args"}, drifted
    alone = [name for name, texts in places.items() if len([*texts.values()][0]) == 1]
    assert len(SCRIPTS) == 5 and all(" " in name for name in alone), alone


# tokens of code
MOST = {"run_experiment": 8500, "run_zero_shot": 8600, "fit_model": 7700, "meta_analysis": 2700,
        "contamination_test": 7400}


def size_of(path):
    """Tokens, but comments, docstrings, line breaks and indents."""
    with path.open("rb") as file:
        kinds = [tokenize.tok_name[token.type] for token in tokenize.tokenize(file.readline)]
    words = " ".join(kind for kind in kinds if kind not in ("COMMENT", "NL"))
    # a string that is a whole statement, after ENCODING, NEWLINE, INDENT or DEDENT
    words = re.sub(r"(?<=ODING|WLINE|NDENT|EDENT) STRING(?= NEWLINE)", "", words)
    return len(re.findall(r"\b(?:NAME|NUMBER|STRING|OP)\b", words))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="elsewhere an f-string is many tokens")
def test_code_stays_small():
    sizes = {path.stem: size_of(path) for path in SCRIPTS}
    grown = [name for name in sizes if sizes[name] > MOST[name]]
    assert not grown, sizes
    assert sum(map(size_of, ROOT.glob("tests/*.py"))) <= 43000


COMMANDS = [*dict.fromkeys(commands())]
assert {name for name, _ in COMMANDS} > {*GUIDES, SCRIPTS[0].name}


def parts_of(command):
    """(script, flags)."""
    words = shlex.split(command.replace('"', ""))
    at = [word.endswith(".py") for word in words].index(True)
    return words[at].removesuffix(".py"), words[at + 1 :]


@pytest.mark.parametrize("source, command", COMMANDS)
def test_every_command_parses(source, command):
    """The script exists and argparse takes the flags; the tasks named are in tasks.json."""
    name, flags = parts_of(command)
    if name.startswith("docs/studies/"):
        assert (ROOT / f"{name}.py").exists()
        return
    args = load_script(name).parse_args(flags)
    known = {"all", *load_script("run_experiment").load_registry()["tasks"]}
    assert {*(getattr(args, "tasks", None) or [])} <= known


def test_no_link_is_dead():
    """Files exist, and so do headings, by the names that GitHub gives them."""
    # gone: blocks of code, where # begins a comment; addresses; the blank behind #; punctuation
    gone = r"(?ms)^```.*?```|\]\(.*?\)|^\[[^\n]*\]: \S+|(?<=#) |[^\w\n #-]"
    names = {path: re.sub(gone, "", read(path)).lower().replace(" ", "-")
             for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"),
                          *ROOT.glob("tests/**/*.md")]}
    for path in names:
        for place, anchor in re.findall(
                r"(?m)(?:\]\(|^\[.*\]: )(?!http)([^)#\s]*)([^)\s]*)", read(path)):
            target = (path.parent / (place or path.name)).resolve()
            alive = target.exists() and f"{anchor}\n" in names.get(target, "\n")
            assert alive, f"{path}: {place}{anchor}"


RUN = "--tasks bbc_news --m 6 --n 8 --subsamples 2 --workers 1"
TINY = {  # flags that come last and so win; the models are random ones of two layers
    "run_experiment": f"{RUN} --max-length 24 --batch-size 4 --model",
    "run_zero_shot": f"{RUN} --quantize none --max-length 200 --model", "fit_model": "",
    "meta_analysis": "--slices 10"}
COSTLY = {"uv", "--dask", "--paper-model", "zero.csv"}  # the last is of a run in bf16


def test_the_commands_of_readme_and_guides_run_in_order(
        empty_folder, tmp_path, model_dir, benchmark_csv):
    """In one folder: what one writes, the next reads."""
    models = {"run_experiment": [str(model_dir("bert"))], "run_zero_shot": [str(model_dir("gpt2"))]}
    texts = benchmark_csv.read_text()
    for name, header in (
            ("posts", "Text,Category"), ("mine", "text,sentiment"), ("tries", "text,sentiment")):
        (tmp_path / f"{name}.csv").write_text(texts.replace("text,label", header, 1))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    ran = set()
    for source, command in COMMANDS:
        name, flags = parts_of(command)
        if source not in GUIDES or name not in TINY or COSTLY & {*command.split()}:
            continue
        ran.add(name)
        tiny = TINY[name].split()
        if "--csv" in flags:  # its own text is the task
            tiny = tiny[2:]
        end = end_of(load_script(name).main, *flags, *tiny, *models.get(name, []))
        assert not end, command
    assert ran == {*TINY}
    for name in ("results.csv", "grid/results.csv", "meta/few_shot_m100/slices.png",
                 "fits/posts_results/report.html", "fits/tries_results/tasks.csv"):
        assert (tmp_path / name).exists(), name
