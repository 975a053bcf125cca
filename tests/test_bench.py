"""tests/bench.py: its count of operations against torch's own counter, its arithmetic, its file, and that the usual ways are what they say.

That ours and the usual ways give the same numbers is tested where the scripts are: trained weights against the Trainer
(test_run_experiment.py), scores against a plain double loop (test_run_zero_shot.py), the posterior against the plain model
(test_fit_model.py), a slice against quadrature (test_meta_analysis.py), log p and p-values (test_contamination_test.py)."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench


@pytest.mark.parametrize("kind, close", [("bert", 0.04), ("gpt2", 1e-4)])
def test_operations_are_those_that_torch_counts_in_a_subsample(kind, close, script, model_dir):
    """The real run of the three arms. GPT-2's differs by the class head alone, BERT's also by the pooler and by the number of tokens
    that happen to be masked. These texts have one length: others would be padded in attention, which operations() leaves out."""
    wide = {"hidden_size": 128, "intermediate_size": 512} if kind == "bert" else {"n_embd": 128}
    folder = model_dir(kind, **wide)
    texts = [" ".join(np.random.default_rng(i).choice(["film", "good", "bad", "plot", "cast"], 30)) for i in range(40)]
    model = {"folder": folder, "gguf": None, "objective": "mlm" if kind == "bert" else "clm"}
    parts = {"train": texts[:8], "extra": texts[8:24], "test": texts[24:]}
    recipe = {"epochs": {"pretrain": 2, "train": 3}, "batch_sizes": dict.fromkeys(("pretrain", "train", "evaluate"), 4),
              "precision": "float32", "learning_rates": {"pretrain": 1e-4, "train": 1e-4}, "max_length": 64}
    row = {"model": "tiny", "task": "task", "m": 8, "n": 16, "subsample": 1, "num_classes": 2, "seed": 0}
    unit = {"row": row, "recipe": recipe, "texts": parts, "labels": {part: np.arange(len(texts)) % 2 for part, texts in parts.items()}}
    script.load_network.cache_clear()
    script.load_network(str(folder), None, model["objective"], "cpu", "float32", 64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # torch has no count for its kernel on the CPU
        script.run_subsample(unit, model, "cpu", 1)
    script.load_network.cache_clear()
    lengths = {part: [32] * len(texts) for part, texts in parts.items()}
    assert counter.get_total_flops() == pytest.approx(bench.operations(bench.shape_of(folder), lengths, (2, 3)), rel=close)


def test_a_row_compares_medians_and_pairs():
    line = bench.row("case", [1, 2, 4], [8, 10, 12], target=5, work=3e9, rate=6e9)
    assert (line["ours"], line["usual"], line["ratio"], line["reached"]) == ("2 s", "10 s", "5.0x (3.0 to 8.0)", "yes")
    assert (line["share ours"], line["share usual"]) == ("25.0%", "5.0%")
    assert bench.row("case", [1, 2, 4], [8, 9, 12], target=5)["reached"] == "no"
    alone = bench.row("case", [2], target=5)  # and a difference of two commands may be noise below 0
    assert alone["reached"] == bench.row("case", [-1], [3], target=5)["reached"] == "not measured" and alone["ratio"] == "-"


def test_measure_reports_memory_and_the_time(tmp_path):
    code = "import time, pathlib; x = bytearray(200 * 2**20); time.sleep(1); pathlib.Path('result').write_text(str(len(x)))"
    run = bench.measure([sys.executable, "-c", code], lambda folder: int((folder / "result").read_text()))
    assert run["found"] == 200 * 2**20 and 195 < run["peak"] < 260 and 1 < run["seconds"] < 30 and 0 <= run["others"] <= 100
    with pytest.raises(SystemExit, match="exit status 1"):
        bench.measure([sys.executable, "-c", "raise ValueError"], lambda folder: None)


@pytest.fixture
def staged(tmp_path, monkeypatch):
    """Run stages that measure nothing: staged(stage, ratio) -> text of the file."""
    args = SimpleNamespace(out=tmp_path / "benchmarks.md", quick=True, rounds=None)

    def run(stage, ratio):
        def measured(args):
            "What was measured."
            return [bench.row(f"{stage} case", [1], [ratio], target=5), bench.row("other", [1], [2])], ["a note"], ["| a | table |"]

        monkeypatch.setitem(bench.STAGES, stage, measured if ratio else bench.stage_gpu)
        bench.run_stage(stage, args, "python tests/bench.py")
        return args.out.read_text()

    return run


def test_a_stage_replaces_its_section_alone_and_the_summary_follows(staged):
    staged("meta", 7)
    both = staged("fit", 3)
    again = staged("fit", 9)
    meta = both[both.index("<!-- begin meta") : both.index("<!-- end meta")]
    assert meta in again and again.index("<!-- begin fit") < again.index(meta) and again.count("<!-- begin") == 2
    summary = again[: again.index("<!-- begin")]
    assert "| meta | meta case | >= 5x | 7.0x (7.0 to 7.0) | yes |" in summary and "| fit | fit case | >= 5x | 9.0x" in summary
    assert "| fit | fit case | >= 5x | 3.0x (3.0 to 3.0) | no |" in both and "3.0x" not in again and "other" not in summary


def test_without_a_gpu_nothing_is_claimed_and_nothing_measured_is_lost(staged, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = staged("gpu", None)
    assert text.count("not measured") >= 6 and "< 6 h" in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    measured = staged("gpu", 12)
    assert "not measured" not in measured
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert staged("gpu", None) == measured


def test_the_model_as_written_is_the_papers():
    """log p of the usual way's model and a sum of terms by hand, at random values of every parameter."""
    pytest.importorskip("pymc")
    rng = np.random.default_rng(0)
    total, task_idx = rng.integers(20, 50, (2, 6)), np.array([0, 0, 1, 1, 2, 2])
    counts = rng.integers(0, total, (2, 2, 6))  # [arm, model, unit]
    model = bench.model_as_written({"counts": counts, "total": total, "task_idx": task_idx})
    sizes = {"mu": (), "alpha": (1,), "beta": (), "sd_U": (), "sd_V": (), "sd_W": (), "U": (3,), "V": (6,), "W": (3, 2)}
    x = {name: rng.normal(size=size) for name, size in sizes.items()}
    sd = {name: np.exp(x[f"sd_{name}"]) for name in "UVW"}  # sampled as their logarithms
    expected = stats.norm.logpdf([x["mu"], x["beta"]]).sum() + stats.norm.logpdf(x["alpha"], 0, 5).sum()
    for name, scale in (("U", 1), ("V", 1), ("W", 3.5355)):
        expected += stats.halfnorm.logpdf(sd[name], 0, scale) + x[f"sd_{name}"] + stats.norm.logpdf(x[name], 0, sd[name]).sum()
    for arm in (0, 1):
        for i in (0, 1):
            logit = x["mu"] + (0, x["alpha"][0])[i] + x["U"][task_idx] + x["V"] + x["W"][task_idx, arm] + x["beta"] * arm
            expected += stats.binom.logpmf(counts[arm, i], total[i], special.expit(logit)).sum()
    point = {f"{name}_log__" if name.startswith("sd") else name: value for name, value in x.items()}
    log_p = model.compile_fn(model.logp(), inputs=model.value_vars, mode="FAST_COMPILE")
    assert float(log_p(point)) == pytest.approx(expected, rel=1e-9)
