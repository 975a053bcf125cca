"""The dose curve and the numbers of docs/results.md against plain arithmetic on their CSV files."""

import re
import subprocess
import sys
import textwrap

import pandas as pd
import pytest
from conftest import ROOT, load_script
from pytest import approx

DOCS = ROOT / "docs"
dose = load_script("tests/studies/dose")


@pytest.fixture(scope="module")
def table():
    return dose.summary()


def test_the_table_holds_what_the_files_hold(table, capsys):
    audits = pd.read_csv(DOCS / "contamination.csv")
    results = pd.read_csv(DOCS / "dose_results.csv")
    for row in table.to_dict("records"):
        name = f"{row['form']}-{row['epochs']}"
        audit = audits[audits["experiment"] == name]
        mean = audit.groupby("arm").mean(numeric_only=True)
        assert row["audited"] == sum(audit["arm"] == "test")
        for column, detector in (("auc_logp", "log p"), ("auc_ref", "ref")):
            visible = (mean.loc["test", column] + 1 - mean.loc["extra", column]) / 2
            assert row[detector] == approx(visible)
        mine = results[results["experiment"] == name]
        if len(mine) >= row["audited"]:
            seen = mine["acc_test"].mean() + mine["acc_extra_on_extra"].mean()
            unseen = mine["acc_extra"].mean() + mine["acc_test_on_extra"].mean()
        else:
            mine = audit
            seen = mean.loc["test", "accuracy"] + mean.loc["extra", "accuracy_on_extra"]
            unseen = mean.loc["extra", "accuracy"] + mean.loc["test", "accuracy_on_extra"]
        assert row["bias"] == approx(100 * (seen - unseen) / 2)
        assert row["counted"] == mine["discordant"].notna().all()
    dose.show(table)
    lines = capsys.readouterr().out.splitlines()[2:]
    stars = [line.split("|")[2].endswith("* ") for line in lines]
    assert stars == [not counted for counted in table["counted"]]


def test_marks_stand_where_the_table_says(table):
    """Visible to the right, harmful upwards; hollow is what lacks the noise of its texts."""
    figure, axis = dose.plt.subplots()
    dose.draw_plane(axis, table, "ref")
    found = set()
    for line in axis.lines:
        if line.get_marker() in ("s", "o"):
            look = (line.get_marker(), line.get_color(), line.get_markerfacecolor())
            found.add((line.get_xdata()[0], line.get_ydata()[0], *look))
    dose.plt.close(figure)
    expected = set()
    for row in table.itertuples():
        colour = "#882255" if "answers" in row.form else "#009E73"
        face = colour if row.counted else "white"
        mark = {"packed": "s", "padded": "o"}[row.form.split("-")[0]]
        expected.add((row.ref, row.bias, mark, colour, face))
    assert found == expected and len(found) == len(table)


def test_the_figure_is_legible_and_its_title_true(table, tmp_path):
    """Nothing lies on anything else or is cut; beyond the margin lie only settings with answers."""
    for hollow in (True, False):
        dose.draw(table.assign(counted=not hollow), tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        figure = dose.plt.gcf()
        figure.draw_without_rendering()
        left, right, *_ = figure.axes
        legend = left.get_legend()
        assert hollow == any("hollow" in text.get_text() for text in legend.get_texts())
        for axis in figure.axes:
            taken = [line.get_window_extent() for line in axis.lines]
            labels = axis.texts
            if axis is left:
                labels = [legend, *labels]
            for label in labels:
                box = label.get_window_extent()
                assert not box.count_overlaps(taken), f"{label} lies on something"
                assert all(axis.bbox.contains(*corner) for corner in box.corners())
                taken.append(box)
        assert len(left.texts) + len(right.texts) == len(table)
        dose.plt.close(figure)
    beyond = table[table["bias"] - table["half"] > dose.MARGIN]
    assert len(beyond) and beyond["form"].str.endswith("answers").all()


def test_the_published_numbers():
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    section = text.split("## How noisy is a plain bias")[1].split("\n## ")[0]
    block = re.search(r"python - <<END\n(.*?)\n    END", section, re.DOTALL)[1]
    command = [sys.executable, "-c", textwrap.dedent(block)]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    prose = " ".join(section.split("END\n")[-1].replace("**", "").split())
    for line, words in (
        ("400 cells, sd: median 4.6, largest 21.7, above 10: 80", "above 10 in 80 of the 400"),
        ("25 cells, sd: median 6.4, largest 34.2, above 10: 5", "in 5 of 25 cells, at most 34.2"),
        ("'majority': 46.2, 'acc_base': 43.5, 'acc_extra': 47.8", "unseen is 47.8 %, that of"),
        ("acc_extra: 145 cells, bias -0.03 [-0.18, +0.11]", "is -0.03 [-0.18, +0.11]: the mean"),
        ("acc_test: 146 cells, bias -0.00 [-0.15, +0.15]", "-0.00 [-0.15, +0.15] (146 cells)"),
    ):
        assert line in found and words in prose
