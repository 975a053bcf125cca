"""meta_analysis.py against independent oracles: quadrature, a plain long run, closed forms, simulated variances, arithmetic."""

import csv
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import special, stats

from conftest import ROOT, load_script

PAPER = Path(os.environ.get("PAPER_DATA", ROOT.parent / "shared" / "paper"))
needs_paper = pytest.mark.skipif(not PAPER.exists(), reason=f"the published accuracies are not in {PAPER} (set PAPER_DATA to their folder)")
SCRIPT = ROOT / "meta_analysis.py"


@pytest.fixture(scope="session")
def meta():
    return load_script("meta_analysis")


@pytest.fixture
def run(meta, tmp_path, capsys, monkeypatch):
    """run(flags...) -> (exit status, stdout, stderr) of main() in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        status = 0
        try:
            meta.main(list(map(str, flags)))
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def made_rows(tasks=3, subsamples=4, models=("a", "b"), n=40, seed=0, luck=0.0, seeds=(0,), draw_luck=0.0, spread=0.05):
    """Rows in our columns. Each arm of a run: accuracy = task's level + the draw's luck (both arms) + the run's own luck, then coins."""
    rng = np.random.default_rng(seed)
    rows = []
    for model, j in itertools.product(models, range(tasks)):
        for k in range(1, subsamples + 1):
            drawn = rng.normal(0, draw_luck)
            for training in seeds:
                share = np.clip(0.5 + spread * ((j % 5) - 2) + drawn + rng.normal(0, luck, 3) if luck else
                                np.full(3, 0.5 + spread * ((j % 5) - 2) + drawn), 0.01, 0.99)
                row = {"experiment": "few-shot", "model": model, "task": f"task{j:02}", "m": 10, "n": n, "subsample": k, "num_classes": 2,
                       "majority": 0.5, "seed": training}
                rows.append(row | dict(zip(("acc_base", "acc_extra", "acc_test"), rng.binomial(n, share) / n)))
    return rows


def cell_of(meta, rows):
    (cell,) = meta.pool_runs([meta.typed({name: str(value) for name, value in row.items()} | {"where": "here"}) for row in rows])
    return cell


def settings(**changes):
    return SimpleNamespace(**{"seed": 0, "effect": "bias", "gap": 0.6} | changes)


# Slices ---------------------------------------------------------------------------------------------------------------


def test_a_slice_holds_one_row_per_model_and_task_and_slices_differ(meta):
    rows = made_rows(tasks=4, subsamples=9)
    cell = cell_of(meta, rows)
    known = {(row["model"], row["task"], str(row["subsample"])): [round(row[f"acc_{arm}"] * 40) for arm in ("extra", "test")]
             for row in rows}
    seen = []
    for number in range(200):
        drawn = meta.draw_slice(cell, 0, number, "bias")
        assert drawn.counts.shape == (2, 2, 4) and (drawn.total == 40).all()
        for (i, model), (j, task) in itertools.product(enumerate(cell.models), enumerate(cell.tasks)):
            assert known[model, task, drawn.chosen[i].split()[j]] == drawn.counts[i, :, j].tolist()
        seen.append(drawn.chosen)
    assert len(set(map(tuple, seen))) > 195  # of 9^8 possible ones
    picks = np.array([[list(map(int, part.split())) for part in chosen] for chosen in seen])
    assert np.mean(picks[:, 0] == picks[:, 1]) == pytest.approx(1 / 9, abs=0.04)  # each model is drawn independently
    assert stats.chisquare(np.bincount(picks.ravel(), minlength=10)[1:]).pvalue > 1e-3  # every subsample is as likely
    alone = cell_of(meta, [row for row in rows if row["model"] == "b"])
    assert [meta.draw_slice(alone, 0, number, "bias").chosen[0] for number in range(200)] == [chosen[1] for chosen in seen]
    assert meta.draw_slice(cell, 1, 0, "bias").chosen != seen[0]


def test_few_possible_slices_are_taken_once_each(meta):
    cell = cell_of(meta, made_rows(tasks=2, subsamples=5, models=("a",)))
    every = [meta.draw_slice(cell, 0, number, "bias").chosen[0] for number in range(meta.possible_slices(cell))]
    assert sorted(every) == sorted(f"{a} {b}" for a in range(1, 6) for b in range(1, 6)) and every != sorted(every)


def test_nulls_swap_the_arms_of_each_model_and_task_half_of_the_time(meta):
    cell = cell_of(meta, made_rows(tasks=5, subsamples=1))
    plain = np.array([[runs[0, 3:5] for runs in model_runs] for model_runs in cell.runs]).transpose(0, 2, 1)  # one subsample: one slice
    swaps = []
    for number in range(400):
        drawn = meta.draw_slice(cell, 0, number, "bias", null=True)
        swapped = np.array([[part.endswith("*") for part in chosen.split()] for chosen in drawn.chosen])
        assert np.array_equal(drawn.counts, np.where(swapped[:, None], plain[:, ::-1], plain))
        swaps.append(swapped)
    assert np.abs(np.mean(swaps, axis=0) - 0.5).max() < 4 * 0.025
    assert np.abs(np.corrcoef(np.reshape(swaps, (400, -1)).T) - np.eye(10)).max() < 0.25  # one by one, not all together


def test_seeds_of_a_subsample_are_rows_of_their_own(meta):
    cell = cell_of(meta, made_rows(tasks=1, subsamples=2, models=("a",), seeds=(0, 3)))
    assert sorted(meta.draw_slice(cell, 0, number, "bias").chosen[0] for number in range(4)) == ["1", "1/3", "2", "2/3"]


def test_a_model_without_a_task_is_left_out_there(meta):
    cell = cell_of(meta, [row for row in made_rows() if (row["model"], row["task"]) != ("a", "task01")])
    drawn = meta.draw_slice(cell, 0, 0, "bias")
    assert drawn.total.tolist() == [[40, 0, 40], [40, 40, 40]] and drawn.chosen[0].split()[1] == "-"
    rows = meta.analyse_slice(cell, 0, [("paired", meta.ALL), ("paired", "a")], settings(), False)
    differences = meta.slice_differences(drawn)
    assert rows[0]["mean"] == pytest.approx(differences[:, [0, 2]].mean())
    assert rows[1]["mean"] == pytest.approx(differences[0, [0, 2]].mean())


# The paper's model ----------------------------------------------------------------------------------------------------


def test_the_posterior_equals_quadrature(meta):
    """mu, alpha, beta, sd_U and each task's level on grids: no sampling, and none of our change of variables.

    Accuracies far from one half, so that the priors of mu and U matter for sd_U."""
    compiled, names = meta.compiled_slice_model(2, 3)  # before nutpie: it sets PyMC up
    import nutpie

    counts, total = np.array([[[38, 34, 39], [36, 36, 39]], [[35, 30, 38], [37, 29, 36]]]), np.full((2, 3), 40)
    mu, sd_u = np.linspace(-3, 5, 49), np.linspace(0.03, 4.5, 60)
    alpha, beta, level = np.linspace(-2.5, 1.5, 51), np.linspace(-1.4, 1.4, 51), np.linspace(-1, 8, 241)
    log_density = stats.norm.logpdf(mu)[:, None, None, None] + stats.halfnorm.logpdf(sd_u)[:, None, None]
    log_density = log_density + stats.norm.logpdf(alpha, 0, 5)[:, None] + stats.norm.logpdf(beta)
    prior = stats.norm.pdf(level, mu[:, None, None], sd_u[:, None])  # of a task's level mu + U_j
    for j in range(3):
        log_likelihood = 0
        for i, arm in itertools.product((0, 1), (0, 1)):
            share = special.expit(level[:, None, None] + i * alpha[:, None] + arm * beta)
            log_likelihood = log_likelihood + stats.binom.logpmf(counts[i, arm, j], 40, share)
        log_density = log_density + np.log(np.tensordot(prior, np.exp(log_likelihood - log_likelihood.max()), 1) + 1e-300)
    weight = np.exp(log_density - log_density.max())
    trace = nutpie.sample(compiled.with_data(**meta.slice_data(counts, total)), chains=4, cores=2, seed=1, draws=2000, tune=500,
                          target_accept=0.95, save_warmup=False, progress_bar=False).posterior
    draws, r_hat, _ = meta.fit_slice(counts, total, seed=1)
    assert r_hat <= 1.02 and "sd_U" in names
    for found, grid, axis in ((draws, beta, 3), (trace["alpha"].values, alpha, 2), (trace["sd_U"].values, sd_u, 1)):
        share = weight.sum(tuple({0, 1, 2, 3} - {axis})) / weight.sum()
        mean = (share * grid).sum()
        sd = math.sqrt((share * (grid - mean) ** 2).sum())
        assert found.mean() == pytest.approx(mean, abs=0.06 * sd) and found.std() == pytest.approx(sd, rel=0.05)
        edges = np.interp([0.055, 0.945], np.cumsum(share) - share / 2, grid)
        assert np.quantile(found, [0.055, 0.945]) == pytest.approx(edges, abs=0.12 * sd)


def test_one_task_equals_quadrature(meta):
    """No U: mu and beta alone."""
    counts, total = np.array([[[24], [31]]]), np.array([[40]])
    draws, r_hat, _ = meta.fit_slice(counts, total, seed=1)
    mu, beta = np.linspace(-4, 4, 400)[:, None], np.linspace(-4, 4, 401)
    density = stats.norm.pdf(mu) * stats.norm.pdf(beta)
    density = density * stats.binom.pmf(24, 40, special.expit(mu)) * stats.binom.pmf(31, 40, special.expit(mu + beta))
    weight = density.sum(0) / density.sum()
    mean = (weight * beta).sum()
    assert r_hat <= 1.02 and draws.mean() == pytest.approx(mean, abs=0.03)
    assert draws.std() == pytest.approx(math.sqrt((weight * (beta - mean) ** 2).sum()), rel=0.05)


@needs_paper
def test_a_published_slice_equals_a_separate_long_run_of_the_model_as_written(meta):
    """Binomial likelihood, mu + alpha z + U_j + beta x, non-centred: another program, ten times as long."""
    pm = meta.import_pymc()
    import nutpie

    (cell,) = [cell for cell in meta.pool_runs(meta.read_rows([PAPER / "few_shot_m50.csv"])) if cell.n == 500]
    drawn = meta.draw_slice(cell, 0, 7, "bias")
    with pm.Model() as plain:
        mu, alpha, beta = pm.Normal("mu", 0, 1), pm.Normal("alpha", 0, 5), pm.Normal("beta", 0, 1)
        u = pm.HalfNormal("sd_U", 1) * pm.Normal("u", shape=25)
        for z, x in itertools.product((0, 1), (0, 1)):
            pm.Binomial(f"y{z}{x}", 500, logit_p=mu + alpha * z + u + beta * x, observed=drawn.counts[z, x])
    long = nutpie.sample(nutpie.compile_pymc_model(plain), draws=5000, tune=1000, chains=4, cores=2, seed=5, progress_bar=False,
                         save_warmup=False).posterior["beta"].values
    draws, r_hat, refits = meta.fit_slice(drawn.counts, drawn.total, seed=1)
    assert r_hat <= 1.02 and refits == 0
    assert draws.mean() == pytest.approx(long.mean(), abs=0.08 * long.std()) and draws.std() == pytest.approx(long.std(), rel=0.05)
    assert meta.hdi(draws) == pytest.approx(meta.hdi(long), abs=0.25 * long.std())


# Figure 7, resumed and repeated -----------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_file_for_one_and_two_workers(run, tmp_path):
    path = write_rows(tmp_path / "results.csv", made_rows())
    for workers in (1, 2):
        status, out, _ = run(path, "--slices", 6, "--workers", workers, "--out", f"out{workers}", "--no-figures")
        assert status == 0 and "6 fits of the paper's model" in out
    assert Path("out1/meta.csv").read_bytes() == Path("out2/meta.csv").read_bytes()
    rows = rows_of("out1/meta.csv")
    assert len(rows) == 6 * 4 and all(float(row["r_hat"]) <= 1.02 for row in rows if row["analysis"] == "paper")
    assert {(row["analysis"], row["model"]) for row in rows} == {("paper", "all models"), *zip(["paired"] * 3, ("all models", "a", "b"))}
    run(path, "--slices", 6, "--seed", 1, "--out", "other", "--no-figures")
    assert [row["chosen"] for row in rows_of("other/meta.csv")] != [row["chosen"] for row in rows]


def test_the_table_of_shares_is_what_the_slices_say(run, tmp_path):
    path = write_rows(tmp_path / "results.csv", made_rows(tasks=6, subsamples=8, luck=0.08))
    run(path, "--analysis", "paired", "--slices", 300, "--threshold", 0.2, "--no-figures")
    rows = [row for row in rows_of("meta/meta.csv") if row["model"] == "a"]
    (share,) = [row for row in rows_of("meta/shares.csv") if row["model"] == "a"]
    means = np.array([float(row["mean"]) for row in rows])
    apart = [float(row["hdi_low"]) > 0 or float(row["hdi_high"]) < 0 for row in rows]
    counts = [float(row[f"acc_{arm}"]) for row in rows_of(path) for arm in ("extra", "test")]
    assert float(share["threshold"]) == pytest.approx(20 * np.mean(counts) * (1 - np.mean(counts)), rel=0.05)  # 100 t p (1 - p) points
    assert float(share["outside"]) == pytest.approx((np.abs(means) > float(share["threshold"])).mean())
    assert float(share["excludes_0"]) == pytest.approx(np.mean(apart)) and float(share["mean"]) == pytest.approx(means.mean())
    for row in rows[:20]:  # the interval is scipy's
        chosen = dict(zip([f"task{j:02}" for j in range(6)], row["chosen"].split()))
        mine = [r for r in rows_of(path) if r["model"] == "a" and chosen[r["task"]] == r["subsample"]]
        values = [100 * (float(r["acc_test"]) - float(r["acc_extra"])) for r in mine]
        interval = stats.ttest_1samp(values, 0).confidence_interval(0.89)
        assert (float(row["hdi_low"]), float(row["hdi_high"])) == pytest.approx((interval.low, interval.high))


@needs_paper
def test_slices_of_the_published_data_have_the_mean_and_spread_of_the_variances(meta, run):
    """Over all slices the mean is Table 1's, and the variance is the plan's for R = 1 times (K - 1) / K, as K subsamples are all."""
    run(PAPER / "few_shot_m50.csv", "--n", 500, "--analysis", "paired", "--slices", 1500, "--no-figures")
    (cell,) = [cell for cell in meta.pool_runs(meta.read_rows([PAPER / "few_shot_m50.csv"])) if cell.n == 500]
    for i, (model, published) in enumerate((("bert", 0.476), ("gpt2", -0.076))):
        means = np.array([float(row["mean"]) for row in rows_of("meta/meta.csv") if row["model"] == model])
        sd = meta.cell_components(cell, i, "bias")["se_1"] * math.sqrt(19 / 20)
        assert means.mean() == pytest.approx(published, abs=4 * sd / math.sqrt(1500)) and means.std() == pytest.approx(sd, rel=0.08)


def test_any_torn_file_is_completed_to_the_same_bytes(run, tmp_path):
    path = write_rows(tmp_path / "results.csv", made_rows(tasks=4, subsamples=6))
    flags = (path, "--analysis", "paired", "--slices", 12, "--no-figures")
    run(*flags)
    file = Path("meta/meta.csv")
    whole = file.read_bytes()
    for cut in [0, 3, 100, *np.random.default_rng(0).integers(0, len(whole), 12)]:
        file.write_bytes(whole[:cut])
        status, out, _ = run(*flags)
        assert status == 0 and file.read_bytes() == whole, cut
        assert ("the last line is torn" in out) == (cut > 0 and whole[cut - 1 : cut] != b"\n")
    status, out, _ = run(*flags)
    assert "12 of 12 slices are finished already" in out and file.read_bytes() == whole
    run(*flags[:-2], 15, "--no-figures")
    assert file.read_bytes().startswith(whole) and len(rows_of(file)) == 45


def launched(tmp_path, *flags):
    """The script in a process of its own, once it has written some slices."""
    process = subprocess.Popen([sys.executable, SCRIPT, "results.csv", "--analysis", "paired", "--slices", "100000", *flags],
                               cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background job ignores it
    file, deadline = tmp_path / "meta" / "meta.csv", time.time() + 60
    while not (file.exists() and file.stat().st_size > 20_000) and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    return process


def test_kill_9_loses_nothing_and_a_second_process_is_kept_out(run, tmp_path):
    path = write_rows(tmp_path / "results.csv", made_rows(tasks=4, subsamples=6))
    process = launched(tmp_path)
    status, _, err = run(path, "--analysis", "paired", "--slices", 3, "--no-figures")
    assert status == 2 and "another meta_analysis.py is writing" in err and err.count("\n") == 1
    process.kill()
    process.communicate()
    there = len(rows_of("meta/meta.csv")) // 3
    status, out, _ = run(path, "--analysis", "paired", "--slices", there + 5, "--no-figures")
    assert status == 0 and "finished already" in out
    run(path, "--analysis", "paired", "--slices", there + 5, "--no-figures", "--out", "fresh")
    assert Path("meta/meta.csv").read_bytes() == Path("fresh/meta.csv").read_bytes()


def test_ctrl_c_ends_with_a_word_and_whole_lines(tmp_path):
    write_rows(tmp_path / "results.csv", made_rows(tasks=4, subsamples=6))
    process = launched(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "finished slices are kept" in err and "Traceback" not in err
    assert (tmp_path / "meta" / "meta.csv").read_bytes().endswith(b"\n")


def test_another_effect_is_kept_apart_and_other_data_are_refused(run, tmp_path):
    rows = made_rows(tasks=4, subsamples=6)
    path = write_rows(tmp_path / "results.csv", rows)
    run(path, "--analysis", "paired", "--slices", 5, "--no-figures")
    status, out, _ = run(path, "--analysis", "paired", "--slices", 5, "--no-figures", "--effect", "boost")
    assert status == 0 and "15 rows of other cells, effects or seeds: they are kept" in out
    boost = [row for row in rows_of("meta/meta.csv") if (row["effect"], row["slice"], row["model"]) == ("boost", "1", "a")]
    chosen = dict(zip([f"task{j:02}" for j in range(4)], boost[0]["chosen"].split()))
    mine = [row for row in rows if row["model"] == "a" and chosen[row["task"]] == str(row["subsample"])]
    values = [100 * (row["acc_extra"] - row["acc_base"]) for row in mine]
    assert len(boost) == 1 and float(boost[0]["mean"]) == pytest.approx(np.mean(values))
    before = Path("meta/meta.csv").read_bytes()
    for flags in (("--models", "a"), ("--tasks", "task00", "task01")):
        status, _, err = run(path, "--analysis", "paired", "--slices", 5, "--no-figures", *flags)
        assert status == 2 and "other rows, models, tasks or sampling" in err and Path("meta/meta.csv").read_bytes() == before


def test_a_fit_that_does_not_converge_is_refitted_reported_and_ends_with_status_3(meta, run, tmp_path, monkeypatch):
    monkeypatch.setattr(meta, "MAX_R_HAT", 0.99)  # no chains reach that
    path = write_rows(tmp_path / "results.csv", made_rows())
    status, out, err = run(path, "--slices", 2, "--no-figures", "--analysis", "paper")
    assert status == 3 and "refits 2" in out and "2 of 2 fits" in err
    assert [row["refits"] for row in rows_of("meta/meta.csv")] == ["1", "1"]


# Calibration ------------------------------------------------------------------------------------------------------------


def test_on_exact_nulls_the_t_and_the_sign_flip_test_reject_11_percent(run, tmp_path):
    """1,000 nulls of noisy data with real effects in them, which the swaps remove."""
    rows = made_rows(tasks=25, subsamples=10, models=("a",), n=200, luck=0.06)
    for row in rows:
        row["acc_test"] = round(min(row["acc_test"] + 0.05, 1) * 200) / 200
    run(write_rows(tmp_path / "results.csv", rows), "--calibrate", "--analysis", "paired", "--slices", 1000, "--no-figures")
    shares = {row["analysis"]: float(row["rejected"]) for row in rows_of("meta/calibration.csv")}
    assert shares["sign-flip"] == pytest.approx(0.11, abs=0.02) and 0.08 <= shares["paired"] <= 0.14
    run("results.csv", "--analysis", "paired", "--slices", 200, "--no-figures")
    assert float(rows_of("meta/shares.csv")[0]["excludes_0"]) > 0.5  # the effect is there when nothing is swapped


def test_on_exact_nulls_the_papers_model_rejects_as_often_as_the_noise_says(meta, run, tmp_path):
    """z of the binomial has variance = the variance ratio, so 0 is excluded in P(|N(0, ratio)| > 1.6): 11 % without luck."""
    for luck, low, high in ((0.1, 0.5, 1), (0, 0, 0.25)):
        path = write_rows(tmp_path / f"luck{luck}.csv", made_rows(tasks=2, subsamples=200, models=("a",), n=400, luck=luck))
        status, out, _ = run(path, "--calibrate", "--slices", 60, "--out", f"luck{luck}")
        row = rows_of(f"luck{luck}/calibration.csv")[0]
        ratio, rejected = float(row["variance_ratio"]), float(row["rejected"])
        expected = 2 * stats.norm.sf(stats.norm.isf(0.055) / math.sqrt(ratio))
        assert row["analysis"] == "paper" and ratio == pytest.approx(1 + 400 * luck**2 / 0.245, rel=0.2)  # binomial: p (1 - p) / n per arm
        assert low < rejected < high and rejected == pytest.approx(expected, abs=3.5 * math.sqrt(expected * (1 - expected) / 60))
        assert status == 0 and "nominal 11" in out and Path(f"luck{luck}/calibration.bias.png").stat().st_size > 10_000


@needs_paper
def test_variance_ratios_of_the_published_data(meta):
    """Against a direct computation from the accuracies."""
    raw = rows_of(PAPER / "few_shot_m50.csv")
    for cell in meta.pool_runs(meta.read_rows([PAPER / "few_shot_m50.csv"])):
        for i, model in enumerate(cell.models):
            observed, binomial = [], []
            for task in cell.tasks:
                arms = np.array([(float(row["acc_extra"]), float(row["acc_test"])) for row in raw
                                 if (row["model"], row["task"], int(row["n"])) == (model, task, cell.n)])
                observed.append(np.var(arms[:, 1] - arms[:, 0], ddof=1))
                binomial.append(np.mean(arms * (1 - arms)) * 2 / cell.n)
            assert meta.variance_ratio(cell, [i], "bias") == pytest.approx(sum(observed) / sum(binomial))


# The plan ---------------------------------------------------------------------------------------------------------------


def test_the_plan_recovers_a_known_decomposition(meta):
    """Accuracy: 5 points between subsamples, 3 between runs on one, coins of n = 2,000; bias: the runs' luck twice, and coins."""
    rows = made_rows(tasks=40, subsamples=25, models=("a",), n=2000, luck=0.03, draw_luck=0.05, seeds=(0, 1, 2))
    cell = cell_of(meta, rows)
    row = meta.cell_components(cell, 0, "acc_extra")
    coins = 100 * math.sqrt(0.24 / 2000)
    assert row["sd_subsample"] == pytest.approx(5, rel=0.06) and row["sd_run"] == pytest.approx(math.hypot(3, coins), rel=0.04)
    assert row["sd_total"] == pytest.approx(math.hypot(5, 3, coins), rel=0.05) and row["sd_test_texts"] == pytest.approx(coins, rel=0.03)
    assert row["sd_training"] == pytest.approx(math.hypot(5, 3), rel=0.05) and row["sd_tasks"] == pytest.approx(5 * math.sqrt(2), rel=0.1)
    bias = meta.cell_components(cell, 0, "bias")
    assert bias["sd_run"] == pytest.approx(math.sqrt(2) * math.hypot(3, coins), rel=0.04) and bias["sd_subsample"] < 1  # 0 but for chance
    assert bias["se_1"] == pytest.approx(bias["sd_total"] / math.sqrt(40)) and bias["sd_tasks"] < 0.5
    once = meta.cell_components(cell_of(meta, [row for row in rows if row["seed"] == 0]), 0, "acc_extra")
    assert once["sd_total"] == pytest.approx(math.hypot(5, 3, coins), rel=0.05)
    assert math.isnan(once["sd_run"]) and math.isnan(once["sd_subsample"])


def test_the_plans_errors_are_those_of_fresh_data(meta):
    """P(wrong) and the half-width for R = 1 and 4 against the means of 3,000 new experiments; resampling agrees too."""
    cell = cell_of(meta, made_rows(tasks=6, subsamples=200, models=("a",), n=500, luck=0.03))
    rows = meta.plan_rows(cell, 0, meta.cell_components(cell, 0, "bias"), settings())
    rng = np.random.default_rng(1)
    for R in (1, 4):
        share = 0.5 + 0.05 * ((np.arange(6) % 5) - 2) + rng.normal(0, 0.03, (3000, R, 2, 6))
        errors = 100 * np.diff(rng.binomial(500, share) / 500, axis=2).mean((1, 2, 3))
        row = rows[R - 1]
        assert row["R"] == R and row["p_wrong"] == pytest.approx((np.abs(errors) > 0.6).mean(), abs=0.035)
        assert row["half_width"] == pytest.approx(np.quantile(np.abs(errors), 0.89), rel=0.07)
        assert row["resampled_p_wrong"] == pytest.approx(row["p_wrong"], abs=0.03)
        assert row["resampled_half_width"] == pytest.approx(row["half_width"], rel=0.05)
    assert [row["basis"] for row in rows[:101]] == ["checked"] * 100 + ["extrapolation"] and rows[100]["resampled_p_wrong"] == ""


def test_two_disjoint_groups_have_the_variance_of_the_formula_for_every_r(meta):
    """Not only on average: skewed values, 6 subsamples, R = 1, 2, 3; all splits are equally likely."""
    rows = made_rows(tasks=2, subsamples=6, models=("a",), n=100)
    for row, change in zip(rows, [0, 0, 1, 1, 3, 40, 0, 2, 2, 5, 9, 30]):
        row |= {"acc_extra": 0.2, "acc_test": (20 + change) / 100}
    cell = cell_of(meta, rows)
    errors = meta.resampled_errors(cell, 0, "bias", 0)
    variance = (np.var([0, 0, 1, 1, 3, 40], ddof=1) + np.var([0, 2, 2, 5, 9, 30], ddof=1)) / 4
    assert errors.var(axis=1) == pytest.approx(variance / np.arange(1, 4), rel=0.06)
    assert np.abs(errors.mean(axis=1)).max() < 4 * math.sqrt(variance / 4000)


def test_the_needed_number_is_the_smallest_and_its_interval_covers(meta):
    for se_1, gap in ((1.95, 0.6), (0.1, 0.6), (3, 3 / stats.norm.isf(0.025)), (0.7, 0.31)):
        R = meta.needed_subsamples(se_1, gap)
        p = [2 * (1 - stats.norm.cdf(gap * math.sqrt(r) / se_1)) for r in (R - 1, R) if r]
        assert p[-1] < 0.05 and (R == 1 or p[0] >= 0.05 - 1e-12)
    rng, truth, inside = np.random.default_rng(0), meta.needed_subsamples(2.0, 0.6), 0
    for _ in range(400):  # 5 tasks, 5 subsamples each, of sd 2 sqrt 5: se_1 = 2
        variances = rng.normal(0, 2 * math.sqrt(5), (5, 5)).var(axis=1, ddof=1)
        row = {"se_1": math.sqrt(variances.sum()) / 5, "freedom": variances.sum() ** 2 / (variances**2 / 4).sum()}
        low, high = meta.needed_range(row, 0.6)
        inside += low <= truth <= high
    assert inside / 400 == pytest.approx(0.89, abs=0.05)


def test_the_plan_says_what_it_extrapolates(run, tmp_path):
    path = write_rows(tmp_path / "results.csv", made_rows(tasks=4, subsamples=6, luck=0.05))
    status, out, _ = run(path, "--plan", "--gap", 1)
    rows, parts = rows_of("meta/plan.csv"), rows_of("meta/components.csv")
    assert status == 0 and out.count("per task bring that below 5 %") == 4 and "an extrapolation, resampling can check 3" in out
    assert {(row["model"], row["quantity"]) for row in rows} == set(itertools.product("ab", ("bias", "acc_extra"))) and len(parts) == 4
    assert {(int(row["R"]) <= 3, row["basis"]) for row in rows} == {(True, "checked"), (False, "extrapolation")}
    assert Path("meta/plan.few-shot.m10.n40.bias.png").stat().st_size > 10_000 and not Path("meta/meta.csv").exists()


def test_equal_subsamples_need_one(run, tmp_path):
    rows = [row | {"acc_extra": 0.5, "acc_test": 0.55} for row in made_rows(models=("a",))]
    status, out, _ = run(write_rows(tmp_path / "results.csv", rows), "--plan")
    assert status == 0 and "with probability 0.00; 1 per task" in out


# The leaderboard --------------------------------------------------------------------------------------------------------


def test_the_leaderboards_arithmetic_by_hand(meta, tmp_path):
    (tmp_path / "board.csv").write_text("name,score,n\nlow,60,1000\ntop,64,1000\nmid,62,500\n")
    board = meta.read_board(tmp_path / "board.csv")
    assert [name for name, *_ in board] == ["top", "mid", "low"] and board[0][1:] == (0.64, 1000)
    component = {"model": "a", "sd_training": 5.0, "tasks": 25}
    first, second = meta.board_rows([(name, score, None) for name, score, _ in board], [component])[::3]
    assert first["gap"] == pytest.approx(2) and first["odds_ratio"] == pytest.approx((0.64 / 0.36) / (0.62 / 0.38))
    assert (second["name"], second["below"], second["rank"]) == ("mid", "low", 2)
    assert second["odds_ratio"] == pytest.approx((0.62 / 0.38) / 1.5)
    assert first["p_swap"] == pytest.approx(stats.norm.cdf(-2 / math.sqrt(2)), abs=1e-12)  # each mean has sd 5 / sqrt 25 = 1 point
    assert meta.swap_probability(("x", 0.64, None), ("y", 0.62, None), 1.0, 20) == pytest.approx(stats.norm.cdf(-2 / math.sqrt(0.1)))
    texts = 1e4 * (0.64 * 0.36 / 1000 + 0.62 * 0.38 / 500)
    assert meta.swap_probability(*board[:2], 1.0, 5) == pytest.approx(stats.norm.cdf(-2 / math.sqrt(2 / 5 + texts)))
    rng = np.random.default_rng(0)  # and by simulation
    swapped = 62 + rng.normal(0, 1 / math.sqrt(5), 200_000) > 64 + rng.normal(0, 1 / math.sqrt(5), 200_000)
    assert meta.swap_probability(("x", 0.64, None), ("y", 0.62, None), 1.0, 5) == pytest.approx(swapped.mean(), abs=2e-3 * 0.5)


def test_a_leaderboard_run(run, tmp_path):
    path = write_rows(tmp_path / "results.csv", made_rows(luck=0.05, subsamples=8))
    board = tmp_path / "board.csv"
    board.write_text("name,score\none,0.7\ntwo,0.7\nthree,0.65\n")
    status, out, _ = run(path, "--leaderboard", board)
    rows = rows_of("meta/leaderboard.csv")
    assert status == 0 and "Assumed" in out and len(rows) == 2 * 2 * 3 and float(rows[0]["p_swap"]) == 0.5  # equal scores
    p = [float(row["p_swap"]) for row in rows if (row["rank"], row["model"]) == ("2", "a")]
    assert 0.5 > p[0] > p[1] > p[2]


# Whole runs, and mistakes -------------------------------------------------------------------------------------------------


def test_the_default_runs_shape_works_without_a_flag(run, tmp_path):
    """Two tasks, one model, five subsamples: 25 slices, all of them, with figures; then nulls."""
    write_rows(tmp_path / "results.csv", made_rows(tasks=2, subsamples=5, models=("bert-tiny",), n=200, luck=0.03))
    status, out, _ = run()
    assert status == 0 and "only 25 different slices exist" in out and "25 fits" in out
    assert len(rows_of("meta/meta.csv")) == 50 and Path("meta/ecdf.few-shot.m10.n200.bias.png").stat().st_size > 10_000
    assert {row["model"] for row in rows_of("meta/meta.csv")} == {"bert-tiny"}
    status, out, _ = run("--calibrate", "--slices", 20, "--no-figures")
    assert status == 0 and len(rows_of("meta/nulls.csv")) == 60


def test_one_task_and_one_subsample_have_no_interval_but_an_answer(run, tmp_path):
    path = write_rows(tmp_path / "results.csv", made_rows(tasks=1, subsamples=1, models=("a",)))
    status, out, _ = run(path, "--analysis", "paired")
    assert status == 0 and "one task: no interval" in out and len(rows_of("meta/meta.csv")) == 1
    status, _, err = run(path, "--plan")
    assert status == 2 and "one subsample of task00" in err


def test_figures_are_not_blank_and_have_their_labels(meta, run, tmp_path, monkeypatch):
    plt, seen = meta.import_plots(), []
    monkeypatch.setattr(plt, "close", seen.append)
    path = write_rows(tmp_path / "results.csv", made_rows(tasks=4, subsamples=8, luck=0.05))
    for flags in ((), ("--calibrate",), ("--plan",)):
        assert run(path, "--analysis", "paired", "--slices", 30, *flags)[0] == 0
    for figure, name in zip(seen, ("ecdf.few-shot.m10.n40.bias", "calibration.bias", "plan.few-shot.m10.n40.bias"), strict=True):
        pixels = plt.imread(f"meta/{name}.png")[..., :3]
        assert (pixels < 0.9).any(axis=2).mean() > 0.005 and all(axis.get_xlabel() for axis in figure.axes)
        assert any("%" in label.get_text() for axis in figure.axes for label in axis.get_xticklabels() + axis.get_yticklabels())
        assert "subsample" in figure.get_suptitle()
    monkeypatch.undo()
    plt.close("all")


MISTAKES = {
    "no file": (None, ("missing.csv",), "missing.csv does not exist"),
    "several cells": ({"n": 80, "acc_base": 0.5, "acc_extra": 0.5, "acc_test": 0.5}, (),
                      "choose by --experiment few-shot --m 10 --n 40; --experiment"),
    "no such n": ({}, ("--n", "41"), "found: 40"),
    "no such model": ({}, ("--models", "c"), "found: a, b"),
    "impossible accuracy": ({"acc_test": 0.51234}, (), "not a whole number of correct answers"),
    "conflicting duplicate": ({"subsample": 1}, (), "are the same subsample"),
    "out is a file": ({}, ("--out", "results.csv"), "cannot be written"),
    "another meta.csv": ({}, ("--out", "foreign"), "has other columns than this script writes"),
    "edited meta.csv": ({}, ("--out", "edited"), "line 2 is not as this script writes it"),
    "board missing": ({}, ("--leaderboard", "none.csv"), "cannot be read"),
    "board columns": ({}, ("--leaderboard", "results.csv"), "no column 'name'"),
    "board text": ({}, ("--leaderboard", "text.csv"), "text.csv, line 3"),
    "board range": ({}, ("--leaderboard", "range.csv"), "-1.0"),
    "board of one": ({}, ("--leaderboard", "one.csv"), "1 entries"),
    "board n": ({}, ("--leaderboard", "n.csv"), "n.csv, line 2"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_line_before_any_fit(name, run, tmp_path):
    changes, flags, message = MISTAKES[name]
    rows = made_rows()
    rows[1] |= changes or {}
    path = write_rows(tmp_path / "results.csv", rows)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "meta.csv").write_text("a,b\n1,2\n")
    (tmp_path / "edited").mkdir()
    (tmp_path / "edited" / "meta.csv").write_text(",".join(load_script("meta_analysis").META_COLUMNS) + "\na,b\n")
    for board, text in (("text", "a,0.5\nb,high"), ("range", "a,0.5\nb,-1"), ("one", "a,0.5"), ("n", "a,0.5,0\nb,0.4,10")):
        (tmp_path / f"{board}.csv").write_text(f"name,score{',n' * (board == 'n')}\n{text}\n")
    status, _, err = run(*([path] if changes is not None else []), *flags, "--analysis", "paired")
    assert status == 2 and message in err and err.count("\n") == 1 and err.startswith("error: ")
    assert not Path("meta/meta.csv").exists() and (tmp_path / "foreign" / "meta.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("flags", [("--slices", "0"), ("--threshold", "-1"), ("--gap", "nan"), ("--workers", "two")])
def test_a_bad_number_is_refused_by_argparse(run, flags):
    status, _, err = run(*flags)
    assert status == 2 and flags[0] in err


def test_an_empty_file_is_refused(run, tmp_path):
    (tmp_path / "results.csv").touch()
    status, _, err = run()
    assert status == 2 and "no rows in results.csv" in err and err.count("\n") == 1


def test_help_and_the_plan_do_not_import_the_sampler(tmp_path):
    write_rows(tmp_path / "results.csv", made_rows())
    code = ("import sys, runpy; sys.argv = ['meta_analysis.py', '--plan', '--no-figures']; runpy.run_path(%r, run_name='__main__'); "
            "assert not {'pymc', 'nutpie', 'torch', 'matplotlib'} & set(sys.modules)" % str(SCRIPT))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_pasted_cell_reads_results_csv(tmp_path, monkeypatch):
    """No __file__, a kernel's sys.argv: main's tiny flags stand for an edited guard."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    write_rows(tmp_path / "results.csv", made_rows())
    names = {"__name__": "pasted"}
    exec(compile(SCRIPT.read_text(encoding="utf-8"), "cell", "exec"), names)
    names["main"](["--analysis", "paired", "--slices", "4", "--no-figures"])
    assert len(rows_of("meta/meta.csv")) == 12
