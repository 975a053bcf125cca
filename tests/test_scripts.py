"""Every script of the top level: it stands alone, documents itself, and shares code only as identical marked blocks;
and every command of the README and of the scripts' heads exists. Nothing here names the scripts: they are found."""

import ast
import re
import shlex
import subprocess
import symtable
import sys

import pytest

from conftest import ROOT, load_script

SCRIPTS = sorted(ROOT.glob("*.py"))
BLOCK = re.compile(r"^# --- shared: (\w+) ---\n(.*?)^# --- end shared ---$", re.DOTALL | re.MULTILINE)


def blocks(path):
    return dict(BLOCK.findall(path.read_text(encoding="utf-8")))


def commands():
    """(file, command) of every line in the README's code blocks and the scripts' heads that calls one of the scripts."""
    texts = [("README.md", "\n".join(re.findall(r"```.*?\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)))]
    texts += [(path.name, ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))) for path in SCRIPTS]
    for name, text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            line = line.rpartition("&&")[2]
            if re.search(r"\w+\.py( |$)", line) and re.match(r"\s*(python|torchrun|srun|sbatch|!python|%run)", line):
                yield name, re.sub(r"\s+", " ", line.split("#")[0]).strip()


def test_the_top_level_holds_what_the_design_names():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert names, "git lists the files"
    top = {name.partition("/")[0] for name in names}
    allowed = {"run_experiment.py", "run_zero_shot.py", "fit_model.py", "meta_analysis.py", "contamination_test.py", "tasks.json",
               "requirements.txt", "tests", "README.md", "LICENSE", "docs", ".ci", ".gitignore"}
    assert SCRIPTS and top <= allowed, top - allowed


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_stands_alone_and_explains_itself(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    siblings = {other.stem for other in SCRIPTS} | {"tests", "conftest"}
    for node in ast.walk(tree):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.partition(".")[0] for name in imported} & siblings
    manual = ast.get_docstring(tree)
    assert f"python {path.name}" in manual and "columns" in manual
    wide = [number for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 100]
    assert not wide, f"{path.name}: lines wider than 100: {wide}"
    undocumented = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "main" and not ast.get_docstring(node)]
    assert not undocumented
    done = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "what to run" in done.stdout and "Traceback" not in done.stderr


def test_shared_blocks_are_identical_and_names_have_one_body():
    found = {path: blocks(path) for path in SCRIPTS}
    assert all(found.values()), "every script has shared blocks"
    for name in {name for block in found.values() for name in block}:
        versions = {path.name: block[name] for path, block in found.items() if name in block}
        assert len(set(versions.values())) == 1, f"block {name} differs between {', '.join(versions)}"
        assert len(versions) > 1 or len(SCRIPTS) == 1, f"block {name} stands in {', '.join(versions)} alone: it is not shared"
    bodies = {}
    for path in SCRIPTS:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in ("main", "parse_args"):
                other, body = bodies.setdefault(node.name, (path.name, ast.dump(node)))
                assert body == ast.dump(node), f"{node.name} differs between {other} and {path.name}"


def test_shared_blocks_use_no_global_of_their_own_script():
    """A block may use what it defines, imports, and other blocks: else pasting it elsewhere breaks."""
    def globals_of(table):
        return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}.union(*map(globals_of, table.get_children()))

    for path in SCRIPTS:
        outside = BLOCK.sub("", path.read_text(encoding="utf-8"))
        private = {node.name for node in ast.parse(outside).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        private |= {name.id for node in ast.parse(outside).body if isinstance(node, ast.Assign) for name in ast.walk(node)
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
        used = globals_of(symtable.symtable("\n".join(blocks(path).values()), path.name, "exec"))
        assert used and not used & private - {"main"}, f"{path.name}: shared blocks use {used & private - {'main'}}"


def test_there_are_commands_to_check():
    assert {"README.md", *(path.name for path in SCRIPTS)} == {name for name, _ in commands()}


@pytest.mark.parametrize("source, command", sorted(set(commands())))
def test_every_command_of_the_readme_and_the_heads_parses(source, command):
    """The script exists, argparse takes the flags, and the tasks and models named are in the registry."""
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
    for model in [models] if isinstance(models, str) else models:
        assert model in registry["models"] or "/" in model, model  # a Hub id
