"""tests/studies/bench.py: its arithmetic by hand, and that the page's commands parse. Run by hand, it
measures; here nothing is measured."""

import re
import shlex

from studies import bench
from conftest import ROOT


def test_a_row_compares_medians_and_pairs():
    memory = [(0, 0), (300, 0), (200, 0)]
    ours = [{"seconds": seconds, "memory": memory} for seconds in (1, 2, 4)]
    line = bench.row("case", ours, [8, 10, 16], 5)
    assert line == ["case", "2 s (1 to 4)", "10 s (8 to 16)", "5x (4 to 8)", "5x", "300", "-"]
    assert bench.row("case", [-1], [3])[3] == "-"  # a difference of two commands may be noise
    runs = {"ours 2": [{"seconds": 10}], "ours 6": [{"seconds": 18}]}
    assert bench.one_more(runs, 2, 6, "ours") == [2]


def test_the_commands_of_the_page_parse():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python tests/studies/bench.py.*$", page, re.MULTILINE)
    assert commands
    for command in commands:
        assert bench.parse_args(shlex.split(command, comments=True)[2:]).stages
