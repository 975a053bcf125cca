import itertools
import math
import re
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import special, stats

from conftest import ROOT, load_script

PUBLISHED = ROOT / "tests" / "published"
MIRROR = {
    "base": "base",
    "extra": "test",
    "test": "extra",
}  # what plays an arm's part on the texts of `extra`


@pytest.fixture(scope="module")
def m():
    return load_script("meta_analysis")


@pytest.fixture
def run(m, tmp_path, capsys, monkeypatch):
    """run(flags...) -> (exit status, stdout, stderr) of the script in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        status = 0
        try:
            m.run_script(m.main, list(map(str, flags)))
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def rows_of(m):
    """rows_of(path, flags...) -> the rows as main() takes them."""
    return lambda path, *flags: m.load_rows(m.parse_args([str(path), *flags]))


def coins(tasks=3, subsamples=4, models=("a", "b"), n=40, crossed=False, **changes):
    """A DataFrame in the columns of results.csv, every answer a coin."""
    rng = np.random.default_rng(0)
    rows = []
    for model, j, k in itertools.product(models, range(tasks), range(1, subsamples + 1)):
        row = {
            "experiment": "few-shot",
            "model": model,
            "task": f"task{j:02}",
            "m": 10,
            "n": n,
            "subsample": k,
            "num_classes": 2,
            "majority": 0.5,
        }
        names = ["acc_base", "acc_extra", "acc_test"]
        if crossed:
            names += [f"{name}_on_extra" for name in names]
        for name in names:
            row[name] = rng.binomial(n, 0.5 + 0.01 * j) / n
        rows.append(row | changes)
    return pd.DataFrame(rows)


def saved(table, path):
    table.to_csv(path, index=False)
    return path


def with_value(table, line, **changes):
    """The table with other values in one line."""
    table = table.copy()
    for name, value in changes.items():
        table[name] = table[name].astype(object)
        table.loc[line, name] = value
    return table


# The posterior of a slice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("control, treatment, n", [(30, 36, 60), (5, 3, 40), (480, 455, 500)])
def test_one_model_and_task_against_quadrature(m, control, treatment, n):
    """Two parameters, mu and beta: their posterior on a grid. The curvature at the mode is close, not equal."""
    mu, beta = np.meshgrid(np.linspace(-4, 4, 1601), np.linspace(-3, 3, 1201), indexing="ij")
    log_p = -(mu**2 + beta**2) / 2
    for y, eta in ((control, mu), (treatment, mu + beta)):
        log_p = log_p + y * eta - n * np.logaddexp(0, eta)
    weight = np.exp(log_p - log_p.max())
    mean = (weight * beta).sum() / weight.sum()
    sd = math.sqrt((weight * (beta - mean) ** 2).sum() / weight.sum())
    (found,), (spread,) = m.slice_posterior(np.array([[[[control]], [[treatment]]]]), np.array([[n]]))
    assert found == pytest.approx(mean, abs=0.1 * sd) and spread == pytest.approx(sd, rel=0.04)


def plain_slice(counts, total):
    """The paper's model of a slice as it is written: no V and W."""
    import pymc as pm
    import pytensor.tensor as pt

    _, models, tasks = counts.shape
    with pm.Model() as model:
        mu, beta = pm.Normal("mu", 0, 1), pm.Normal("beta", 0, 1)
        alpha = pt.concatenate([pt.zeros(1), pm.Normal("alpha", 0, 5, shape=models - 1)])
        U = pm.HalfNormal("sd_U", 1) * pm.Normal("U_raw", 0, 1, shape=tasks)
        for l, i in itertools.product((0, 1), range(models)):
            pm.Binomial(f"y{l}{i}", total[i], logit_p=mu + alpha[i] + U + beta * l, observed=counts[l, i])
    return model


@pytest.mark.parametrize("tasks, n, missing", [(8, 50, False), (4, 200, True)])
def test_slices_against_mcmc(m, tasks, n, missing):
    load_script("fit_model").import_pymc()
    import nutpie

    rng = np.random.default_rng(tasks)
    shares = special.expit(
        rng.normal(0.5, 1, tasks) + np.array([0, 0.4])[:, None] + np.array([0, 0.2])[:, None, None]
    )
    counts, total = rng.binomial(n, shares), np.full((2, tasks), n)
    if missing:
        counts[:, 1, 0], total[1, 0] = 0, 0
    (mean,), (sd,) = m.slice_posterior(counts[None], total)
    model = nutpie.compile_pymc_model(plain_slice(counts, total))
    lengths = {"draws": 2000, "tune": 700, "chains": 4, "cores": 2}
    trace = nutpie.sample(model, **lengths, seed=1, progress_bar=False, target_accept=0.95)
    beta = trace.posterior["beta"].values
    assert mean == pytest.approx(beta.mean(), abs=0.08 * beta.std()) and sd == pytest.approx(
        beta.std(), rel=0.05
    )


def test_the_papers_coin_flip(m, rows_of):
    """Section 10: 47 % of 500 slices at m = 100, n = 500 (standard error 2.2 %), 50 % of the zero-shot ones."""
    for name, n, threshold, share in (
        ("few_shot_m100", 500, 0.04, 0.47),
        ("zero_shot_m100_n100", 100, 0.08, 0.5),
    ):
        rows = rows_of(PUBLISHED / f"{name}.csv", "--n", str(n))
        counts, _, total = m.draw_slices(rows, "bias", 2000, np.random.default_rng(0))
        mean, _ = m.slice_posterior(counts, total)
        assert np.mean(np.abs(mean) > threshold) == pytest.approx(
            share, abs=2.5 * math.sqrt(0.25 / 500 + 0.25 / 2000)
        )


# Slices, shuffled slices, tables ------------------------------------------------------------------------------------


def test_a_slice_holds_one_run_of_each_model_and_task(m, rows_of, tmp_path):
    table = coins(subsamples=5)
    table = table[~((table["model"] == "b") & (table["task"] == "task01"))]
    rows = rows_of(saved(table, tmp_path / "r.csv"))
    models, tasks = ["a", "b"], ["task00", "task01", "task02"]
    counts, changes, total = m.draw_slices(rows, "bias", 4000, np.random.default_rng(0))
    assert total.tolist() == [[40, 40, 40], [40, 0, 40]] and (counts[:, :, 1, 1] == 0).all()
    assert (changes == counts[:, 1] - counts[:, 0]).all()
    for i, j in np.argwhere(total):
        mine = rows[(rows["model"] == models[i]) & (rows["task"] == tasks[j])]
        right = (40 * mine[["acc_extra", "acc_test"]]).round().astype(int)
        expected = right.groupby(["acc_extra", "acc_test"]).size() / 5
        found = pd.Series(list(map(tuple, counts[:, :, i, j]))).value_counts(normalize=True)
        assert set(found.index) == set(expected.index)
        assert all(abs(found[pair] - expected[pair]) < 0.04 for pair in found.index)
    shuffled, signs, _ = m.draw_slices(rows, "bias", 4000, np.random.default_rng(0), shuffled=True)
    assert (shuffled.sum(1) == counts.sum(1)).all()  # the same slices, arms changed
    assert (signs == shuffled[:, 1] - shuffled[:, 0]).all()
    differ = counts[:, 0] != counts[:, 1]
    assert ((shuffled[:, 0] == counts[:, 1])[differ]).mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    "effect, control, treatment", [("boost", "base", "extra"), ("bias", "extra", "test")]
)
def test_crossed_changes_and_shuffling_that_turns_their_sign(
    m, rows_of, tmp_path, effect, control, treatment
):
    path = saved(coins(tasks=2, subsamples=6, crossed=True), tmp_path / "r.csv")
    rows = rows_of(path)
    counts, changes, _ = m.draw_slices(rows, effect, 300, np.random.default_rng(1))
    assert set(rows["arms"]) == {"crossed"}
    for (i, model), (j, task) in itertools.product(enumerate("ab"), enumerate(["task00", "task01"])):
        possible = set()
        for row in rows[(rows["model"] == model) & (rows["task"] == task)].to_dict("records"):
            first = row[f"acc_{treatment}"] - row[f"acc_{control}"]
            mirrored = row[f"acc_{MIRROR[treatment]}_on_extra"] - row[f"acc_{MIRROR[control]}_on_extra"]
            right = [40 * row[f"acc_{control}"], 40 * row[f"acc_{treatment}"], 40 * (first + mirrored)]
            possible.add(tuple(map(round, right)))
        drawn = zip(counts[:, 0, i, j], counts[:, 1, i, j], changes[:, i, j])
        assert {tuple(map(int, one)) for one in drawn} == possible
    plain = m.draw_slices(rows_of(path, "--plain"), effect, 300, np.random.default_rng(1))
    assert (plain[0] == counts).all() and (plain[1] == counts[:, 1] - counts[:, 0]).all()
    _, shuffled, _ = m.draw_slices(rows, effect, 300, np.random.default_rng(1), shuffled=True)
    assert (np.abs(shuffled) == np.abs(changes)).all()
    assert (shuffled == changes)[changes != 0].mean() == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("crossed", [False, True])
def test_the_t_interval_and_p_of_slices_are_scipys(m, crossed):
    rng = np.random.default_rng(0)
    counts, total = rng.binomial(50, 0.6, (5, 2, 2, 6)), np.full((2, 6), 50)
    changes = counts[:, 1] - counts[:, 0]
    texts = 50
    if crossed:
        changes = changes + rng.integers(-9, 10, changes.shape)
        texts = 100
    found = m.slice_rows(counts, changes, total, crossed)
    for k in range(5):
        D = 100 * changes[k].mean(0) / texts
        interval = stats.ttest_1samp(D, 0).confidence_interval(0.89)
        expected = (D.mean(), interval.low, interval.high)
        assert tuple(found.loc[k, ["t_mean", "t_low", "t_high"]]) == pytest.approx(expected)
        sums = np.array(list(itertools.product((-1, 1), repeat=12))) @ changes[k].ravel()
        assert found.loc[k, "p"] == pytest.approx(min(1, 2 * np.mean(sums >= abs(changes[k].sum()))))
    mean, _ = m.slice_posterior(counts, total)
    assert found["paper_mean"].to_numpy() == pytest.approx(mean)  # the paper's model stays plain


def test_the_variance_ratio_by_hand_counts_a_subsample_once(m, rows_of, tmp_path):
    table = coins(tasks=1, subsamples=2, models=("a",)).assign(acc_extra=[0.5, 0.5], acc_test=[0.5, 0.6])
    expected = 0.005 / np.mean([2 * 0.25 / 40, (0.25 + 0.24) / 40])
    for seeds in (1, 3):
        again = pd.concat([table.assign(seed=seed) for seed in range(seeds)])
        rows = rows_of(saved(again, tmp_path / "r.csv"))
        assert m.variance_ratio(rows, "bias") == pytest.approx(expected)


def test_tables_figures_and_words(run, tmp_path):
    zero_shot = coins(tasks=2, models=("a",), experiment="zero-shot")
    saved(pd.concat([coins(tasks=6), zero_shot]), tmp_path / "results.csv")
    status, out, err = run("--slices", 60, "--effects", "boost", "bias")
    meta, shares = pd.read_csv("meta/meta.csv"), pd.read_csv("meta/shares.csv")
    assert (
        status == 0
        and len(meta) == 60 * 2 * 2 * (3 + 1)
        and len(shares) == 2 * 2 * (3 + 1)
        and "nan" not in out
    )
    for row in shares.itertuples():
        mine = meta[(meta["experiment"] == row.experiment) & (meta["effect"] == row.effect)]
        mine = mine[(mine["model"] == row.model) & (mine["kind"] == row.kind)]
        assert row.outside == pytest.approx((mine["paper_mean"].abs() > row.threshold).mean(), abs=1e-5)
        assert row.paper == pytest.approx(
            ((mine["paper_low"] > 0) | (mine["paper_high"] < 0)).mean(), abs=1e-5
        )
        assert row.t == pytest.approx(((mine["t_low"] > 0) | (mine["t_high"] < 0)).mean(), abs=1e-5)
        assert row.sign_flip == pytest.approx((mine["p"] < 0.11).mean(), abs=1e-5)
    manual = load_script("meta_analysis").__doc__
    assert all(column in manual for column in [*meta.columns, *shares.columns])
    figures = []
    for cell, effect in itertools.product(("few-shot.10.40", "zero-shot.10.40"), ("bias", "boost")):
        figures.append(f"slices.{cell}.{effect}.png")
    names = sorted(path.name for path in tmp_path.joinpath("meta").glob("*.png"))
    assert names == ["nulls.png", *figures]
    page = (tmp_path / "meta" / "summary.md").read_text()
    assert all(f"({name})" in page for name in names)


def test_a_sentence_a_cell_says_what_single_studies_and_shuffled_ones_claim(run, tmp_path):
    saved(coins(tasks=8, n=400, acc_extra=0.5), tmp_path / "results.csv")
    _, out, _ = run("--slices", 80, "--no-figures")
    shares = pd.read_csv("meta/shares.csv").query("model == 'all'").set_index("kind")
    claims = re.search(
        r"Of 80 studies with one subsample per model and task, (\d+)% by the paper's model, "
        r"(\d+)% by a t interval, (\d+)% by sign flips would have claimed a bias \(all\)",
        out,
    )
    alarms = re.search(
        r"Of as many shuffled ones, in which there is none, (\d+)%, (\d+)%, (\d+)%: false", out
    )
    for kind, found in {"slice": claims, "swapped": alarms}.items():
        expected = 100 * shares.loc[kind, ["paper", "t", "sign_flip"]].astype(float)
        assert [float(share) for share in found.groups()] == pytest.approx(expected.to_list(), abs=0.51)
    assert out.index("Of 80 studies") < re.search(r"^ +all +slice ", out, re.M).start()
    assert claims.group() in (tmp_path / "meta" / "summary.md").read_text()


def test_crossed_arms_change_t_and_sign_flips_alone(run, tmp_path):
    saved(coins(tasks=6, crossed=True), tmp_path / "results.csv")
    _, out, _ = run("--slices", 40, "--no-figures")
    crossed = pd.read_csv("meta/meta.csv")
    assert "t and sign flips take crossed arms" in out
    _, out, _ = run("--slices", 40, "--no-figures", "--plain")
    plain = pd.read_csv("meta/meta.csv")
    assert (
        "crossed arms" not in out and set(crossed["arms"]) == {"crossed"} and set(plain["arms"]) == {"plain"}
    )
    same = [
        "experiment",
        "m",
        "n",
        "effect",
        "model",
        "kind",
        "slice",
        "paper_mean",
        "paper_low",
        "paper_high",
    ]
    assert crossed[same].equals(plain[same])
    assert not np.allclose(crossed["t_mean"], plain["t_mean"]) and not np.allclose(crossed["p"], plain["p"])


@pytest.mark.parametrize(
    "experiment, threshold",
    [("few-shot", 0.04), ("zero-shot", 0.08), ("accuracies_zero_shot", 0.08), ("my-zero-shot-packed", 0.08)],
)
def test_the_threshold_goes_by_the_experiments_name(run, tmp_path, experiment, threshold):
    saved(coins(experiment=experiment), tmp_path / "results.csv")
    run("--slices", 5, "--no-figures")
    assert set(pd.read_csv("meta/shares.csv")["threshold"]) == {threshold}


def test_all_models_together_only_where_they_have_the_same_tasks(run, tmp_path):
    saved(coins(), tmp_path / "r.csv")
    assert re.search(r"^ +all +slice ", run("r.csv", "--slices", 5, "--no-figures")[1], re.M)
    table = pd.concat([coins(), coins(tasks=1, models=("c",))])
    saved(table, tmp_path / "r.csv")
    _, out, _ = run("r.csv", "--slices", 5, "--no-figures")
    assert "all " not in re.findall(r"^ *(\S+ )", out, re.M) and "nothing is said of all together" in out
    meta = pd.read_csv("meta/meta.csv")
    assert set(meta["model"]) == {"a", "b", "c"}


def test_a_model_that_lacks_tasks_is_analysed_as_if_alone(run, tmp_path):
    """One subsample: there is but one slice."""
    few = coins(tasks=2, models=("c",), subsamples=1)
    saved(pd.concat([coins(subsamples=1), few]), tmp_path / "both.csv")
    saved(few, tmp_path / "alone.csv")
    run("both.csv", "--slices", 1, "--no-figures")
    run("alone.csv", "--slices", 1, "--no-figures", "--out", "alone")
    found = pd.read_csv("meta/meta.csv").query("kind == 'slice' and model == 'c'")
    alone = pd.read_csv("alone/meta.csv").query("kind == 'slice'")
    columns = ["paper_mean", "paper_low", "t_mean", "t_low", "p"]
    assert found[columns].to_numpy() == pytest.approx(alone[columns].to_numpy())


@pytest.mark.parametrize(
    "changes", [dict(tasks=1), dict(subsamples=1), dict(models=("a",), tasks=1, subsamples=1)]
)
def test_small_data(run, tmp_path, changes):
    status, out, err = run(saved(coins(**changes), tmp_path / "results.csv"), "--slices", 20)
    assert status == 0 and "nan" not in out and "Warning" not in err


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("tasks", [1, 3])
def test_answers_that_never_differ(run, tmp_path, share, tasks):
    """No warning, no effect, no ratio of variances."""
    changes = {f"acc_{arm}": share for arm in ("base", "extra", "test")}
    path = saved(coins(tasks=tasks, **changes), tmp_path / "results.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, out, err = run(path, "--slices", 10)
    shares = pd.read_csv("meta/shares.csv")
    assert status == 0 and "nan" not in out and shares["variance_ratio"].isna().all()
    assert (shares[["paper", "sign_flip"]] == 0).all(axis=None) and not (shares["t"] > 0).any()


def test_equal_arms_give_no_effect(m):
    mean, sd = m.slice_posterior(np.full((2, 2, 2, 5), 20), np.full((2, 5), 40))
    assert np.abs(mean).max() < 1e-9 and (sd > 0).all()


def test_slices_of_one_subsample_are_said_to_be_the_same(run, tmp_path):
    assert (
        "all slices are the same" in run(saved(coins(subsamples=1), tmp_path / "one.csv"), "--slices", 5)[1]
    )
    assert "the same" not in run(saved(coins(), tmp_path / "four.csv"), "--slices", 5)[1]


# What comes in, and the folder that goes out --------------------------------------------------------------------------


def test_bad_input_ends_in_one_line(run, tmp_path):
    saved(with_value(noisy_rows(), 0, acc_base=0.123), tmp_path / "results.csv")
    status, _, err = run()
    assert status == 2 and "no whole number of right answers" in err and err.count("\n") == 1
    assert not (tmp_path / "meta").exists()
    saved(coins(subsamples=1), tmp_path / "one.csv")
    (tmp_path / "board.csv").write_text("name,score\nx,.9\ny,.8\n")
    assert "has one subsample of task00" in run("one.csv", "--leaderboard", "board.csv")[2]
    saved(pd.concat([noisy_rows(), noisy_rows().assign(m=20)]), tmp_path / "two.csv")
    _, _, err = run("two.csv", "--leaderboard", "board.csv")
    assert re.search(r"choose by --experiment few-shot --m 10 --n 100; --exp", err)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n": 10**9}, "not a whole number from 1 to 1000000"),
        ({"majority": 0.6}, "differ in majority"),
        ({"num_classes": 3}, "differ in num_classes"),
    ],
)
def test_an_enormous_n_and_a_run_with_two_values_are_refused(run, tmp_path, changes, message):
    table = coins(tasks=1, subsamples=1, models=("a",), acc_base=0.5, acc_extra=0.5, acc_test=0.5)
    if "n" not in changes:
        table = pd.concat([table, table.assign(**changes)])
    else:
        table = table.assign(**changes)
    status, _, err = run(saved(table, tmp_path / "results.csv"))
    assert status == 2 and message in err and err.count("\n") == 1


def test_other_texts_under_one_name_are_refused(run, tmp_path):
    table = coins(tasks=2).assign(split="s", data="d")
    status, _, err = run(saved(table, tmp_path / "r.csv"))
    assert status == 2 and "agree in experiment, data and differ in task (task00 and task01)" in err
    table = coins(tasks=1).assign(split="s", data="d")
    assert run(saved(table, tmp_path / "r.csv"), "--slices", 5, "--no-figures")[0] == 0
    status, _, err = run(saved(with_value(table, 5, split="other"), tmp_path / "r.csv"))
    assert status == 2 and "differ in split (s and other)" in err


def test_rows_of_several_versions_are_counted(run, tmp_path):
    table = coins(tasks=1, models=("a",)).assign(versions=["one", "two", "two", "two"])
    _, out, _ = run(saved(table, tmp_path / "r.csv"), "--slices", 5, "--no-figures")
    assert "3 rows of two; 1 row of one" in out
    assert "3 rows of two; 1 row of one" in (tmp_path / "meta" / "summary.md").read_text()


def test_blank_files_and_layouts_without_classes_end_in_one_line(run, tmp_path):
    (tmp_path / "blank.csv").write_text("\n\n\n")
    status, _, err = run("blank.csv")
    assert status == 2 and "blank.csv has 0 columns 'experiment'" in err and err.count("\n") == 1
    folder = tmp_path / "accuracies" / "m50" / "n500" / "bert" / "trec"
    folder.mkdir(parents=True)
    (folder / "accuracies.csv").write_text("base,extra,test,majority\n.5,.5,.5,.2\n")
    status, _, err = run("accuracies")
    assert status == 2 and "0 columns 'num_classes'" in err and err.count("\n") == 1


def test_experiments_of_like_names_have_figures_of_their_own(run, tmp_path):
    cells = [coins(tasks=2, experiment=name) for name in ("few-shot", "few shot")]
    cells.append(coins(tasks=2, experiment="zero-shot").assign(m=20))
    cells.append(coins(tasks=2, experiment="zero-shot"))
    _, out, _ = run(saved(pd.concat(cells), tmp_path / "r.csv"), "--slices", 5)
    assert len(list((tmp_path / "meta").glob("slices.*.png"))) == 4
    assert "zero-shot, m = 10, n = 40, bias" in out and "zero-shot, m = 20, n = 40, bias" in out


@pytest.mark.parametrize("board", [False, True])
def test_a_folder_of_other_files_is_refused_and_left_alone(run, tmp_path, board):
    saved(noisy_rows(), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text("name,score\nx,.9\ny,.8\n")
    names = ("meta.csv", "shares.csv", "leaderboard.csv", "summary.md")
    for name in names:
        (tmp_path / name).write_text("mine")
    flags = ["--leaderboard", "board.csv"] if board else ["--slices", 5]
    status, _, err = run(*flags, "--out", ".")
    assert status == 2 and "--out" in err and err.count("\n") == 1
    assert {(tmp_path / name).read_text() for name in names} == {"mine"}
    assert not list(tmp_path.glob("*.png"))


def test_a_folder_of_an_earlier_run_is_replaced(run, tmp_path):
    saved(coins(), tmp_path / "results.csv")
    saved(coins(n=80), tmp_path / "other.csv")
    assert run("--slices", 5)[0] == 0
    (tmp_path / "meta" / "notes.txt").write_text("mine")
    assert run("other.csv", "--slices", 5, "--effects", "boost")[0] == 0
    names = sorted(path.name for path in (tmp_path / "meta").iterdir())
    figures = ["nulls.png", "slices.few-shot.10.80.boost.png"]
    assert names == sorted(["meta.csv", "notes.txt", "shares.csv", "summary.md", *figures])
    (tmp_path / "board.csv").write_text("name,score\nx,.9\ny,.8\n")
    assert run("--leaderboard", "board.csv")[0] == 0
    assert sorted(path.name for path in (tmp_path / "meta").iterdir()) == [
        "leaderboard.csv",
        "notes.txt",
        "summary.md",
    ]


# Leaderboards -----------------------------------------------------------------------------------------------------


def noisy_rows():
    """One model, two tasks, eight subsamples whose accuracies jump by far more than their test texts explain."""
    table = coins(tasks=2, subsamples=8, models=("a",), n=100)
    return table.assign(acc_extra=np.tile([0.5, 0.7], 8))


def noisy_variance():
    """Of noisy_rows' mean over two tasks, in points^2, by hand."""
    observed = 0.01 * 8 / 7  # of eight values that are .5 or .7
    binomial = (0.25 + 0.21) / 2 / 99
    return 1e4 * 2 * (observed - binomial) / 4


def test_a_leaderboard_by_hand(run, tmp_path):
    saved(noisy_rows(), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text("name,score\nsecond,70\nfirst,75\nthird,60\n")
    status, out, _ = run("--leaderboard", "board.csv")
    table = pd.read_csv("meta/leaderboard.csv").set_index("name")
    variance = noisy_variance()
    first = table.loc["first"]
    assert (
        status == 0 and list(table.index) == ["first", "second", "third"] and first["gap"] == pytest.approx(5)
    )
    assert first["p_wrong"] == pytest.approx(stats.norm.sf(5 / math.sqrt(2 * variance)), rel=1e-4)
    assert first["p_swap_1"] == pytest.approx(stats.norm.sf(5 / math.sqrt(2 * variance * 2)), rel=1e-4)
    assert first["p_swap_5"] == pytest.approx(stats.norm.sf(5 / math.sqrt(2 * variance * 1.2)), rel=1e-4)
    assert first["p_swap_20"] == pytest.approx(stats.norm.sf(5 / math.sqrt(2 * variance * 1.05)), rel=1e-4)
    scores, sd = np.array([75, 70, 60]), math.sqrt(variance)
    grid = np.linspace(20, 130, 4001)
    best = []
    for k in range(3):
        others = [stats.norm.cdf(grid, score, sd) for i, score in enumerate(scores) if i != k]
        best.append(np.trapezoid(stats.norm.pdf(grid, scores[k], sd) * np.prod(others, axis=0), grid))
    assert table["p_best"].to_numpy() == pytest.approx(best, abs=0.006)
    assert "share their test texts" in " ".join(out.split())
    manual = load_script("meta_analysis").__doc__
    assert all(column in manual for column in ["name", *table.columns])


def test_swaps_in_reruns_are_simulated(run, tmp_path):
    """Any true gap alike; a board of one run each; a rerun of R runs each. Of the boards with a gap of 5 points, how
    many turn round? Taking the gap as true would say far fewer."""
    saved(noisy_rows(), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text("name,score\nx,75\ny,70\nz,70\n")
    run("--leaderboard", "board.csv")
    table = pd.read_csv("meta/leaderboard.csv").set_index("name")
    rng = np.random.default_rng(0)
    sd = math.sqrt(2 * noisy_variance())
    true = rng.uniform(-60, 60, 4_000_000)
    chosen = true[np.abs(true + rng.normal(0, sd, len(true)) - 5) < 0.2]
    for R in (1, 5, 20):
        again = chosen + rng.normal(0, sd / math.sqrt(R), len(chosen))
        assert table.loc["x", f"p_swap_{R}"] == pytest.approx((again < 0).mean(), abs=0.02)
        assert table.loc["y", f"p_swap_{R}"] == 0.5  # equal entries
    assert table.loc["x", "p_swap_1"] > table.loc["x", "p_swap_20"] > table.loc["x", "p_wrong"] > 0.2


def test_chances_below_a_thousandth_are_written_so(run, tmp_path):
    saved(noisy_rows(), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text("name,score\nx,99\ny,10\n")
    _, out, _ = run("--leaderboard", "board.csv")
    assert re.search(r"^ +1 +x +0.99 +a +89.0 +<.001 ", out, re.M) and "e-" not in out


def test_noise_that_is_not_told_from_0_is_not_0_percent(run, tmp_path):
    saved(noisy_rows().assign(acc_extra=0.6), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text("name,score\nx,.9\ny,.8\n")
    status, out, _ = run("--leaderboard", "board.csv")
    assert status == 0 and "training noise is not told from 0" in out and "nan" not in out
    assert pd.read_csv("meta/leaderboard.csv")[["p_wrong", "p_swap_1", "p_best"]].isna().all().all()


@pytest.mark.parametrize(
    "board, message",
    [
        ("name,points\nx,1\n", "0 columns 'score'"),
        ("name,score\nx,.5\n", "a board needs two"),
        ("name,score\nx,high\ny,.5\n", "score is 'high'"),
        ("name,score\nx,nan\ny,.5\n", "score is 'nan'"),
        ("name,score\nx,-.1\ny,.5\n", "scores lie in 0 to 1"),
        ("name,score\nx,.1\ny,.5,7\n", "line 3: 3 fields where the header has 2"),
        ('name,score\n"x,.1\n', "no CSV file"),
        ("name,score\nx,85\ny,0.91\nz,80\n", "line 3: score is 0.91 beside scores above 1"),
        ("name,score,n\nx,.9,100\ny,.8", "line 3: 2 fields where the header has 3"),
        ("name;score\nx;.9\ny;.8\n", "separated by commas: name;score"),
    ],
)
def test_bad_boards_end_in_one_line(run, tmp_path, board, message):
    saved(noisy_rows(), tmp_path / "results.csv")
    (tmp_path / "board.csv").write_text(board)
    status, _, err = run("--leaderboard", "board.csv")
    assert status == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "meta").exists()
