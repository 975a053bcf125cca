"""What chance does to a reader: few tasks, many looks, many models. Run by hand, on one core.

    python docs/studies/chance.py like     # is the mean over tasks like these known? 10 seconds
    python docs/studies/chance.py looks    # a run is read after every draw, or longer: 20 seconds
    python docs/studies/chance.py models   # 20 innocent models beside each other: 20 seconds

Draws vary by Normal(0, 1.4 points). All rules are written here again; at the start of each case the
scripts must give the same for some data sets.

like: one task in ten, drawn at random, leaks by 10 points, or none; 8 draws of each task. Does the
interval hold the mean over all tasks that could have been drawn (1 point, or 0)?
looks: no bias. In how many runs does an interval lie above 0 (a YES) at some look? Then: draws are
added where a part is OPEN after eight, as many as fit_model.py names, once, or while it is OPEN. In
how many tables is some task falsely a YES (no bias), or a NO (the bias of each is the margin)?
models: no bias. In runs, models are independent. In --answers, 20 models answer the same items:
abilities are Normal(0.5, 0.7) and difficulties Normal(0, 1.5) on the scale of log odds (as in
answers.py), and one random half was released.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from calibrate import MARGIN, half_width, rule  # noqa: E402
from conftest import load_script  # noqa: E402
from parts import SD, TAIL, analyzed, any_of, half_of, mean_over_tasks, percent  # noqa: E402

fit = load_script("fit_model")
SETS, TABLES, CHECKED = 10_000, 2000, 10
LEAK, MODELS, LOOKS = 10, 20, 30
FIRST, MOST = 8, 200  # draws


def tell_like():
    print("| tasks | plain t: none leaks | one in ten leaks | former: none leaks | one in ten |"
          "\n|" + " --- |" * 5)
    K = 8
    for J in (5, 10, 20, 25):
        plain, former = [], []
        for share in (0, 0.1):
            rng = np.random.default_rng(4)
            leaks = rng.random((SETS, J, 1)) < share
            D = LEAK * leaks + SD * rng.standard_normal((SETS, J, K))
            of_tasks = D.mean(axis=2)
            sem = of_tasks.std(axis=1, ddof=1) / np.sqrt(J)
            half = half_of(sem, J - 1)
            mean, se, _ = mean_over_tasks(D)
            wider = np.maximum(half, stats.norm.isf(TAIL) * se)
            off = np.abs(mean - LEAK * share)
            plain.append(percent(off <= half))
            former.append(percent(off <= wider))
            if J >= 20:  # fit_model.py says nothing of fewer
                _, effects = analyzed(D[:CHECKED, None])
                assert np.allclose(effects["like_high"] - effects["estimate"], half[:CHECKED])
        print(f"| {J} |", " | ".join(plain + former), "|", flush=True)


def tell_looks():
    print("| tasks | draw 8 alone | draw 30 alone | every draw from 8 to 30 | from 2 to 30 |\n|"
          + " --- |" * 5)
    every = np.arange(2, 61)
    rounding = (100 / 200) ** 2 / 12
    for J in (1, 2, 5):
        D = SD * np.random.default_rng(5).standard_normal((SETS, J, every[-1]))
        mean, *variances = rule(D, np.full(D.shape, rounding), 0)
        halves = half_width(*[part[:, :, 1:].transpose(0, 2, 1) for part in variances],
                            every[:, None])
        above = mean.mean(axis=1)[:, 1:] > halves  # [sets, every]
        for K in (2, 8, 30):
            _, effects = analyzed(D[:CHECKED, None, :, :K])
            assert ((effects["low"] > 0) == above[:CHECKED, K - 2]).all()
            assert np.allclose(effects["high"] - effects["estimate"], halves[:CHECKED, K - 2])
        looks = [above[:, 6], above[:, LOOKS - 2], above[:, 6 : LOOKS - 1].any(axis=1),
                 above[:, : LOOKS - 1].any(axis=1)]
        print(f"| {J} |", " | ".join(map(percent, looks)), "|", flush=True)


def tell_added():
    print("\n| tasks | falsely | after eight draws | some added once | again and again |\n|"
          + " --- |" * 5)
    for J in (1, 2, 5):
        for name, bias in (("a YES", 0), ("a NO", MARGIN)):
            D = bias + SD * np.random.default_rng(8).standard_normal((SETS, J, MOST))
            wrong = []
            for yes, no in judged_while_open(D):
                wrong.append(any_of(no if bias else yes))
            print(f"| {J} | {name} |", " | ".join(map(percent, [wrong[0], wrong[1], wrong[-1]])),
                  "|", flush=True)


def judged_while_open(D):
    """Yield which parts [sets, tasks] are a YES, and a NO, after eight draws, and each time that
    OPEN ones got the draws which would narrow their intervals to half the margin."""
    every = np.arange(1, MOST + 1)
    mean = D.cumsum(axis=2) / every
    variance = ((D**2).cumsum(axis=2) - every * mean**2) / np.maximum(every - 1, 1)
    factor = half_of(1 / np.sqrt(every), np.maximum(every - 1, 1), D.shape[1])
    is_open, K = np.ones(D.shape[:2], bool), np.full(D.shape[:2], FIRST)
    while is_open.any():
        last = (*np.indices(K.shape), K - 1)
        middle, sd = mean[last], np.sqrt(variance[last])
        yes, no = middle > factor[K - 1] * sd, middle + factor[K - 1] * sd < MARGIN
        yield yes, no & ~yes
        is_open = ~yes & ~no & (K < MOST)
        needed = np.searchsorted(-factor, -MARGIN / 2 / sd) + 1
        if (K == FIRST).all():
            check_needed(D[:CHECKED, None, :, :FIRST], needed)
        K = np.where(is_open, needed.clip(K + 1, MOST), K)


def check_needed(D, needed):
    parts, _ = analyzed(D)
    for shares, ours in zip(parts.shares, needed.ravel()):
        assert fit.draws_needed(shares, TAIL / D.shape[2], MARGIN / 2, FIRST) == max(ours, FIRST)


def low_ends(right, released, clean):
    """Low ends [models] of the biases of right [items, models], in points, by least squares on the
    half and the clean models' answers [items, models], HC2 and Student's t."""
    X = np.column_stack([np.ones(len(right)), released, clean])
    inverse = np.linalg.inv(X.T @ X)
    weights = X @ inverse  # [items, columns]
    leverage = (weights * X).sum(axis=1)
    coefficients = weights.T @ right
    residuals = right - X @ coefficients
    noise = (weights[:, 1] ** 2 / (1 - leverage)) @ residuals**2
    least = 2 / (len(right) / 2) ** 2  # one more right answer in each half
    se = np.sqrt(np.maximum(noise, least))
    return 100 * (coefficients[1] - half_of(se, len(right) - X.shape[1]))


def draw_answers(rng, items, models):
    hard, ability = rng.normal(0, 1.5, (items, 1)), rng.normal(0.5, 0.7, models)
    right = rng.random((items, models)) < 1 / (1 + np.exp(hard - ability))
    return right.astype(float), rng.permutation(items) < items // 2


def check_answers(right, released, clean, low):
    """contamination_test.py must find the low end of the first model."""
    half = pd.Index(np.where(released, "released", "held_out"), name="half")
    found = load_script("contamination_test").difference(
        pd.Series(right[:, 0], half), pd.DataFrame(clean, half))
    assert np.isclose(found["bias"] - half_of(found["bias_se"], found["bias_df"]), low[0])


def tell_models():
    print("| 20 innocent models | tables with one called inflated | mean number called | 90th "
          "percentile |\n|" + " --- |" * 4)
    D = SD * np.random.default_rng(6).standard_normal((SETS, MODELS, 1, 8))
    mean, se, df = mean_over_tasks(D)
    counts = (mean > half_of(se, df)).sum(axis=1)
    _, effects = analyzed(D[:CHECKED])
    of_models = effects[effects["models"] == 1].groupby("experiment")
    assert (of_models["low"].agg(lambda low: (low > 0).sum()) == counts[:CHECKED]).all()
    tell_counts("runs of one task, 8 draws", counts)
    for size in (100, 300, 1000):
        for clean in (0, 1):
            rng, counts = np.random.default_rng(7), []
            for table in range(TABLES):
                right, released = draw_answers(rng, 2 * size, clean + MODELS)
                low = low_ends(right[:, clean:], released, right[:, :clean])
                if table < CHECKED:
                    check_answers(right[:, clean:], released, right[:, :clean], low)
                counts.append((low > 0).sum())
            others = "one clean model" if clean else "no clean model"
            tell_counts(f"answers to {size:,} items a half, {others}", np.array(counts))


def tell_counts(name, counts):
    many = np.quantile(counts, 0.9)
    print(f"| {name} | {percent(counts > 0)} | {counts.mean():.1f} | {many:.0f} |", flush=True)


def main():
    studies = {"like": [tell_like], "looks": [tell_looks, tell_added], "models": [tell_models]}
    for tell in studies[sys.argv[1]]:
        tell()


if __name__ == "__main__":
    main()
