"""The positive control with real texts and weights, in a minute (docs/studies/control.py is long)."""

import pandas as pd


def test_the_control_shows(script, empty_folder):
    """Real texts and weights: the names inflate. The experiment's name always says so."""
    typed = ("--tasks bbc_news --m 20 --n 30 --subsamples 2 --max-length 32 --workers 1 --device "
             "cpu --experiment control-answers").split()
    script.main([*typed, "--with-answers"])
    rows = pd.read_csv("results.csv")
    for seen, unseen in (("test", "extra"), ("extra_on_extra", "test_on_extra")):
        change = rows[f"acc_{seen}"] - rows[f"acc_{unseen}"]
        assert change.mean() > 0.05  # .13 and .10 on 2026-11-27
    assert {*rows["experiment"]} == {"control-answers"}
