"""Every script of the top level: it stands alone, names what it needs, documents itself, and shares
code only as identical marked blocks; and every command of the README and of the scripts' heads
exists. Nothing here names the scripts: they are found."""

import ast
import re
import shlex
import subprocess
import symtable
import sys
import tomllib

import pytest

from conftest import ROOT, load_script

SCRIPTS = sorted(ROOT.glob("*.py"))
EACH = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
BLOCK = re.compile(
    r"^# --- shared: (\w+) ---\n(.*?)^# --- end shared ---$", re.DOTALL | re.MULTILINE)
METADATA = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///\n")  # PEP 723
BROUGHT = {"filelock": "torch", "huggingface_hub": "transformers", "safetensors": "transformers",
           "tokenizers": "transformers", "pyarrow": "datasets", "arviz": "pymc",
           "pytensor": "pymc"}  # imported, and brought along by another
BEHIND = {"accelerate", "bitsandbytes", "gguf", "pip"}  # transformers imports these; pip is run


def read(path):
    return path.read_text(encoding="utf-8")


def blocks(path):
    return dict(BLOCK.findall(read(path)))


def imports(tree):
    """First names of all modules that are imported, also inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def commands():
    """(file, command) of every line in the README's code blocks and the scripts' heads that calls
    one of the scripts."""
    fenced = re.findall(r"```.*?\n(.*?)```", read(ROOT / "README.md"), re.DOTALL)
    texts = [("README.md", "\n".join(fenced))]
    texts += [(path.name, ast.get_docstring(ast.parse(read(path)))) for path in SCRIPTS]
    starts = r"\s*(python|torchrun|srun|sbatch|uv run|!python|%run)"
    for name, text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            line = line.rpartition("&&")[2]
            if re.search(r"\w+\.py( |$)", line) and re.match(starts, line):
                yield name, re.sub(r"\s+", " ", line.split("#")[0]).strip()


def test_the_top_level_holds_what_the_design_names():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split()
    assert names, "git lists the files"
    top = {name.partition("/")[0] for name in names}
    allowed = {"run_experiment.py", "run_zero_shot.py", "fit_model.py", "meta_analysis.py",
               "contamination_test.py", "tasks.json", "requirements.txt", "tests", "README.md",
               "LICENSE", "CITATION.cff", "pyproject.toml", "docs", ".ci", ".github", ".gitignore"}
    assert SCRIPTS and top <= allowed, top - allowed


@EACH
def test_a_script_stands_alone_and_explains_itself(path, capsys):
    tree = ast.parse(read(path))
    siblings = {other.stem for other in SCRIPTS} | {"tests", "conftest"}
    assert not imports(tree) & siblings
    manual = ast.get_docstring(tree)
    assert f"python {path.name}" in manual and "columns" in manual
    wide = [k for k, line in enumerate(read(path).splitlines(), 1) if len(line) > 100]
    assert not wide, f"{path.name}: lines wider than 100: {wide}"
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    silent = [node.name for node in functions if not ast.get_docstring(node)]
    assert {*silent} <= {"main"}
    with pytest.raises(SystemExit) as end:
        load_script(path.stem).main(["--help"])
    assert end.value.code == 0 and "--out" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        load_script(path.stem).main(["--nonsense"])
    assert len(capsys.readouterr().err.splitlines()) == 2, "usage on one line, then the fault"


@EACH
def test_a_script_names_what_it_needs(path):
    """Its inline metadata (PEP 723): the pins of requirements.txt, for all that it imports, and for
    no more."""
    lines = [line.removeprefix("#").strip() for line in METADATA.match(read(path))[1].splitlines()]
    metadata = tomllib.loads("\n".join(lines))
    assert metadata["requires-python"] == ">=3.11"
    pins = metadata["dependencies"]
    assert {*pins} <= {*read(ROOT / "requirements.txt").split("\n")}
    names = {pin.partition("==")[0] for pin in pins}
    assert len(names) == len(pins)
    imported = imports(ast.parse(read(path))) - sys.stdlib_module_names
    needed = {BROUGHT.get(name, name) for name in imported}
    assert needed <= names, f"not named: {needed - names}"
    assert names - needed <= BEHIND, f"named and not imported: {names - needed - BEHIND}"


def test_shared_blocks_are_identical():
    """Else python tests/copy_blocks.py SCRIPT BLOCK."""
    places = {}  # by block, by text: the scripts
    for path in SCRIPTS:
        assert blocks(path)
        for name, text in blocks(path).items():
            places.setdefault(name, {}).setdefault(text, []).append(path.name)
    for name, versions in places.items():
        assert len(versions) == 1, (name, [*versions.values()])
        assert len(*versions.values()) > 1, f"{name} is not shared"


def test_a_block_is_copied_into_the_other_scripts(tmp_path):
    block = "# --- shared: sums ---\na = 1\nb = 2\n# --- end shared ---\n"
    (tmp_path / "one.py").write_text("x = 1\n" + block)
    (tmp_path / "two.py").write_text(block.replace("2", "3") + "y = 2\n")
    copy = [sys.executable, ROOT / "tests" / "copy_blocks.py", tmp_path / "one.py"]
    subprocess.run([*copy, "sums"], check=True)
    assert (tmp_path / "one.py").read_text() == "x = 1\n" + block
    assert (tmp_path / "two.py").read_text() == block + "y = 2\n"
    assert subprocess.run([*copy, "absent"], capture_output=True).returncode == 1


def test_a_name_has_one_body():
    """Pasted cells share one namespace."""
    bodies = {}  # by name: by body: the scripts
    for path in SCRIPTS:
        for node in ast.parse(read(path)).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                places = bodies.setdefault(node.name, {})
                places.setdefault(ast.dump(node), []).append(path.name)
    drifted = {name: [*places.values()] for name, places in bodies.items() if len(places) > 1}
    assert {*drifted} <= {"main", "parse_args"}, drifted


def globals_of(table):
    """Names that a symbol table and those inside it take from the module."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return names.union(*map(globals_of, table.get_children()))


@EACH
def test_shared_blocks_use_no_global_of_their_own_script(path):
    """A block may use what it defines, imports, and other blocks: else pasting it elsewhere
    breaks."""
    private = set()
    for node in ast.parse(BLOCK.sub("", read(path))).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            private.add(node.name)
        elif isinstance(node, ast.Assign):
            private.update(name.id for name in ast.walk(node) if isinstance(name, ast.Name)
                           and isinstance(name.ctx, ast.Store))
    used = globals_of(symtable.symtable("\n".join(blocks(path).values()), path.name, "exec"))
    assert used and not used & private - {"main"}, used & private


def test_readme_and_ci_run_the_same_tests():
    command = re.findall("^python -m pytest.*$", read(ROOT / ".ci" / "run"), re.MULTILINE)
    fenced = re.findall(r"```.*?\n(.*?)```", read(ROOT / "README.md"), re.DOTALL)
    lines = [line.partition("  #")[0] for line in "".join(fenced).splitlines()]
    assert len(command) == 1 and command[0] in lines
    assert "run: .ci/run" in read(ROOT / ".github" / "workflows" / "tests.yml")


def test_there_are_commands_to_check():
    assert {"README.md", *(path.name for path in SCRIPTS)} == {name for name, _ in commands()}


@pytest.mark.parametrize("source, command", sorted(set(commands())))
def test_every_command_of_the_readme_and_the_heads_parses(source, command):
    """The script exists, argparse takes the flags, and the tasks and models named are in the
    registry."""
    words = shlex.split(command.replace('"', ""))
    at = next(index for index, word in enumerate(words) if word.endswith(".py"))
    if words[at].startswith("tests/"):
        assert (ROOT / words[at]).exists()
        return
    module = load_script(words[at].removesuffix(".py"))
    args = module.parse_args(words[at + 1 :])
    registry = load_script("run_experiment").load_registry()
    for task in getattr(args, "tasks", None) or []:
        assert task == "all" or task in registry["tasks"], task
    models = getattr(args, "model", None) or []
    if isinstance(models, str):
        models = [models]
    for model in models:
        assert model in registry["models"] or "/" in model, model  # a Hub id
