"""The numbers of README.md and docs/ are what today's code makes of the committed rows.

evidence.toml says which. Each entry gives facts and, under the name of a document, layouts: pieces
of its text with names in place of numbers. Filled in from each fact, they must stand there, where
** and line breaks do not count. Facts are lines of fit_model.py's tables (bias, and boost beside
it; task mean: over all tasks), or what a command prints.
"""

import functools
import math
import re
import runpy
import sys
import tomllib

import pandas as pd
import pytest

from conftest import ROOT, load_script

fit, contam = load_script("fit_model"), load_script("contamination_test")
ENTRIES = tomllib.loads((ROOT / "tests/evidence.toml").read_text(encoding="utf-8"))


@functools.cache
def effects_of(files, chosen, margin):
    """Lines of tasks.csv and effects.csv with intervals in words: of the bias, of the boost."""
    paths = sorted(ROOT.glob(files))
    if "crossed" in files:
        contam.main(["--answers", str(paths[0]), "--out", "rows.csv"])
        paths = ROOT.cwd().glob("rows.csv")
    rows = fit.clean_rows(pd.concat(map(fit.read_results, paths)))
    metric = fit.metric_of("acc", margin, False)
    rows = rows.query(chosen)
    rows = rows.assign(majority=pd.to_numeric(rows.get("majority", math.nan)))
    lines = fit.analyze(rows, metric)
    majority = rows.groupby(["experiment", "task"])["majority"].mean().rename("majority")
    means = majority.groupby("experiment").mean()
    lines = lines.join(100 * majority, on=["experiment", "task"])
    lines["majority"] = lines["majority"].fillna(100 * lines["experiment"].map(means))
    crossed = pd.DataFrame({
        "bias": rows.eval("acc_test - acc_extra + acc_extra_on_extra - acc_test_on_extra"),
        "boost": rows.eval("acc_extra - acc_base + acc_test_on_extra - acc_base_on_extra")})
    sds = (50 * crossed).groupby([rows["experiment"], rows["task"]]).std().stack()
    lines = lines.join(sds.rename("sd"), on=["experiment", "task", "effect"])
    lines["task"] = lines["task"].mask(lines["is_mean"], "mean")
    lines["settings"] = lines["settings"].where(lines["is_mean"])
    for name, half in (("words", "half"), ("like", "like_half")):
        pairs = zip(lines["estimate"], lines[half])
        lines[name] = [fit.in_words(*pair, metric) for pair in pairs]
    return [lines[lines["effect"] == effect].reset_index() for effect in fit.EFFECTS]


def facts_of(rows, lines, of_them="n > 0", margin=1):
    bias, boost = effects_of(rows, of_them, margin)
    return [{"bias": bias.loc[k], "boost": boost.loc[k]} for k in bias.query(lines).index]


@pytest.mark.parametrize("entry", ENTRIES["table"], ids=lambda entry: entry["source"]["lines"])
def test_lines_of_the_tables_stand_in_the_documents(entry, empty_folder):
    check(facts_of(**entry["source"]), entry["documents"])


@pytest.mark.parametrize("entry", ENTRIES["printed"], ids=lambda entry: entry["command"])
def test_what_commands_print_stands_in_the_documents(entry, tmp_path, said, monkeypatch):
    for folder in ("docs", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.syspath_prepend(ROOT / "docs/studies")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kwargs: None)
    script, *sys.argv[1:] = entry["command"].split()
    out = said(lambda _: runpy.run_path(str(ROOT / script), run_name="__main__"), []).out
    facts = [found.groupdict() for found in re.finditer(entry["prints"], out)]
    check(facts, entry["documents"])


def check(facts, documents):
    assert facts
    for document, layouts in documents.items():
        text = (ROOT / document).read_text(encoding="utf-8").replace("**", "")
        for layout in layouts:
            for fact in facts:
                assert layout.format(**fact) in " ".join(text.split())
