"""The dose curve and numbers of docs/validation.md against plain arithmetic on their CSV files."""

import pandas as pd
import pytest
from pytest import approx
from scipy import stats

from conftest import ROOT
from docs.studies import dose

ROWS = ROOT / "docs" / "rows"


@pytest.fixture(scope="module")
def table():
    return dose.summary()


def test_the_table_holds_what_the_files_hold(table):
    audits = pd.read_csv(ROWS / "contamination.csv")
    results = pd.read_csv(ROWS / "dose_results.csv")
    assert results["discordant"].notna().all() and audits["discordant"].notna().all()
    assert len(table) == audits["experiment"].nunique() >= 3
    for row in table.to_dict("records"):
        name = row["form"].replace("packed", f"packed-{row['epochs']}")
        audit = audits[audits["experiment"] == name]
        assert row["audited"] == len(audit)
        for detector in ("log p", "ref"):
            visible = (audit[f"{detector} test"] + 1 - audit[f"{detector} extra"]) / 2
            assert row[detector] == approx(visible.mean())
        for model, column in (("seen", "test"), ("others seen", "extra"), ("before", "base")):
            flags = [p < 0.05 for p in audit[f"p_exact {column}"]]
            assert row["orders"][f"order test, {model}"] == sum(flags)
        mine = results[results["experiment"] == name]
        seen = mine["acc_test"] + mine["acc_extra_on_extra"]
        bias = 50 * (seen - mine["acc_extra"] - mine["acc_test_on_extra"])
        assert row["bias"] == approx(bias.mean())
        assert row["half"] >= 0.999 * stats.t.ppf(0.945, len(mine) - 1) * bias.sem()
    above = table[table["bias"] - table["half"] > 0]
    assert {*zip(above["form"], above["epochs"])} == {("packed", 10), ("packed-answers", 10)}
