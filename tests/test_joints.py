"""What joins the parts: flags against what runs, rows against what is printed and shown. The
libraries are watched while they do their work."""

import html
import re
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import joblib
import pandas as pd
import pytest
import torch
import transformers
from matplotlib.figure import Figure
from pytest import approx
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from conftest import ARMS, ROOT, coin_rows, end_of, load_script, path_of, rows_of

fit, meta = load_script("fit_model"), load_script("meta_analysis")
contam = load_script("contamination_test")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEANS = ["chance", "base", "unseen", "seen"]
pytestmark = pytest.mark.usefixtures("empty_folder")


# Tables against page and figures


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    saved = []
    savefig = Figure.savefig

    def watched(self, *args, **options):
        saved.append(self)
        savefig(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", watched)
    return saved


@pytest.mark.parametrize("shared", [True, False])
def test_page_and_figure_show_the_tables(shared, said, figures):
    """One setting of two models with the same tasks, or two settings where b lacks a task."""
    name = "US$_<b>&"
    rows = pd.concat([coin_rows(2, n=n, crossed=True, experiment=name) for n in (30, 40)])
    rows["acc_test"] += 0.3 * (rows["model"] == "b")  # another verdict
    rows["acc_base"] *= rows["model"] == "b"
    rows["task"] = rows["task"].replace("task00", "price_$_and_$<b>" + 60 * "x")
    rows = rows.query("n == 40" if shared else "model == 'a' or task == 'task01'")
    tables = []
    out = said(lambda typed: tables.append(fit.main(typed)), path_of(rows), "--margin", 2, "--out",
               "out").out
    (shown,) = tables
    page = Path("out/report.html").read_text()
    assert "<b>" not in page and re.findall('(?:src|href)="(.{5})', page) == ["data:"]
    page = html.unescape(page)
    tasks = pd.read_csv("out/tasks.csv")
    # Percent, by hand: the texts of a set are seen by the model pretrained on it
    rows = rows.eval("""chance = 100 / num_classes
        base = 50 * (acc_base + acc_base_on_extra)
        unseen = 50 * (acc_extra + acc_test_on_extra)
        seen = 50 * (acc_test + acc_extra_on_extra)""")
    by_hand, in_table = [part.groupby(["n", "model", "task"])[MEANS].mean()
                         for part in (rows, tasks.query("model != 'all' and n > 0"))]
    pd.testing.assert_frame_equal(in_table, by_hand, check_index_type=False)

    # One table is returned, printed and on the page
    printed = [line.split() for line in out.splitlines()]
    on_page = []
    for table in page.split("<table")[1:]:
        if "<th>part</th>" in table:
            on_page += re.findall("<td>(.*?)</td>", table)
    for row in shown.drop(columns="run").to_dict("split")["data"]:
        cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row]
        assert " ".join(cells).split() in printed
        assert [on_page.pop(0) for _ in cells] == cells
    assert not on_page

    # The figure: a pair of panels for each table
    axes = figures[0].axes
    runs = shown.groupby("run", sort=False)
    for (run, lines), left, right in zip(runs, axes[::2], axes[1::2], strict=True):
        assert left.get_title("left").replace("\n", " ") == run
        assert [line.get_xdata()[0] for line in right.lines] == [0, 2]
        assert left.get_ylim() == right.get_ylim() == (len(lines) - 0.5, -0.5)
        ranges, dots = right.collections
        for y, part in enumerate(lines.to_dict("records")):
            names = left.get_yticklabels()[y]
            answers = right.get_yticklabels()[y]
            said_here = [names.get_text(), answers.get_text()]
            assert said_here == [part["part"][:50], f"{part['bias']}  {part['inflated?']}"]
            color = {"YES": "#cc3311", "OPEN": "#aa5500"}.get(
                part["inflated?"].partition(",")[0], "#666666")
            assert names.get_color() == answers.get_color() == color
            numbers = [*map(float, re.findall(r"[+-][\d.]+", part["bias"]))]
            numbers += [part[mean] for mean in MEANS[1:]]
            found = [dots.get_offsets()[y][0], *[x for x, _ in ranges.get_segments()[y]]]
            found += [line.get_xdata()[y] for line in left.lines]
            assert found == approx(numbers, abs=0.051, nan_ok=True)


def test_slices_are_drawn_as_they_are_in_the_table(said, figures):
    """The band is the threshold of each experiment; shares.csv by hand."""
    rows = pd.concat([coin_rows(6), coin_rows(8, n=400, models=("a",), experiment="zero-shot")])
    said(meta.main, path_of(rows), "results.csv", "--slices", 60)
    slices, shares = (
        pd.read_csv(f"meta/results+results/{name}.csv").set_index(["experiment", "kind"])
        .sort_index() for name in ("meta", "shares"))
    assert len(slices) == 60 * 2 * 2
    settings = [("few-shot, m = 10, n = 40", 0.04), ("zero-shot, m = 10, n = 400", 0.08)]
    for axis, (title, threshold) in zip(figures[0].axes, settings, strict=True):
        (band,) = axis.patches
        assert axis.get_title() == title and len(axis.lines) == 2
        assert [band.get_x(), band.get_width()] == approx([-threshold, 2 * threshold])
        for line in axis.lines:
            key = title.split(",")[0], line.get_label()
            mine = slices.loc[key]
            assert line.get_xdata()[1:] == approx(mine["paper_mean"].sort_values(), abs=1e-5)
            expected = [threshold, (mine["paper_mean"].abs() > threshold).mean()]
            for way in ("paper", "t"):
                expected.append((mine[f"{way}_low"] * mine[f"{way}_high"] > 0).mean())
            assert [*shares.loc[key, "threshold":]] == approx(expected, abs=1e-5)


# Flags against what runs


@pytest.fixture
def watched(monkeypatch):
    """What the libraries do: loads: options; others: how many older models are then there; modes:
    (training, gradients) of modules; dtypes: (training, dtype) of linear layers; four_bit: type,
    scales a weight and their bytes, of those of 4 bits; steps: optimizers."""
    found = SimpleNamespace(
        loads=[], others=[], modes=set(), dtypes=set(), steps=[], four_bit=set())
    models = []
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM):
        def load(*args, real=kind.from_pretrained, **options):
            found.loads.append(options)
            found.others.append(sum(model() is not None for model in models))
            loaded = real(*args, **options)
            models.append(weakref.ref(loaded[0]))
            return loaded

        monkeypatch.setattr(kind, "from_pretrained", load)

    def see(module, _, output):
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # not a probe
            found.modes.add((module.training, torch.is_grad_enabled()))
        if isinstance(module, torch.nn.Linear):  # of 4 bits: it gives what it got
            dtype = getattr(module, "compute_dtype", output.dtype)
            found.dtypes.add((module.training, dtype))
            state = getattr(module.weight, "quant_state", None)
            if state:
                share = state.absmax.numel() / state.shape.numel()
                found.four_bit.add((state.quant_type, share, state.absmax.element_size()))

    hooks = [register_module_forward_hook(see),
             register_optimizer_step_post_hook(lambda own, *_: found.steps.append(own))]
    found.clear = lambda: [part.clear() for part in (
        found.modes, found.dtypes, found.steps, found.four_bit)]
    yield found
    for hook in hooks:
        hook.remove()


@pytest.fixture
def run(said, benchmark_csv, monkeypatch):
    """run(script, flags as typed) -> rows. The machine has two cores, and no model is small."""
    monkeypatch.setattr(joblib, "cpu_count", lambda: 2)

    def call(script, typed):
        monkeypatch.setattr(script, "SMALL", 0)
        ours = f"--csv {benchmark_csv} --workers 1 --device cpu --out results.csv --m 6 --n 10"
        assert said(script.main, *f"{ours} --subsamples 1 {typed}".split()).end is None
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)  # as in conftest.py
        return rows_of()

    return call


def test_flags_of_run_experiment_are_what_runs(script, run, watched, model_dir):
    """Precision in both stages and in tests, dropout only where there are gradients, rates, epochs
    and batch sizes. A network goes before the next comes."""
    for precision, dtype in DTYPES.items():
        watched.clear()
        run(script, f"--model {model_dir('bert')} --precision {precision} --batch-size 4 --train-lr"
            " 0.02 --pretrain-lr 0.003 --pretrain-epochs 3 --train-epochs 2")
        assert watched.dtypes == {(True, dtype), (False, dtype)}
        assert watched.modes == {(True, True), (False, False)}
        done = Counter(own.param_groups[0]["initial_lr"] for own in watched.steps)
        assert done == {0.02: 3 * 2 * 2, 0.003: 2 * 3 * 3}  # arms, epochs, batches
        assert {weight.dtype for own in watched.steps for group in own.param_groups
                for weight in group["params"]} == {torch.float32}
    assert watched.others == [0, 0, 0]


def test_flags_of_run_zero_shot_are_what_runs_there_and_in_an_audit(
        zero, run, watched, byte_model):
    for typed, precision in (
            ("", "float32"), ("--precision bf16", "bf16"), ("--quantize nf4", "bf16")):
        watched.clear()
        folder = byte_model("llama", hidden_size=64)
        dtype = DTYPES[precision]
        row = run(zero, f"--model {folder} --adapters {folder.name} --batch-size 4 {typed} "
                  "--pretrain-epochs 2 --pretrain-lr 0.003")[-1]
        assert len({row[f"nll_{arm}"] for arm in ARMS}) == 3, "they learn"
        qlora = {("nf4", 1 / 64, 1)} if "nf4" in typed else set()
        assert watched.four_bit == qlora
        assert watched.dtypes == {(True, dtype), (False, dtype)}
        assert watched.modes == {(True, True), (False, False)}
        assert len(watched.steps) == 2 * 2 * 3  # arms, epochs, batches
        for own in watched.steps:
            assert type(own).__name__ == ("AdamW8bit" if "nf4" in typed else "AdamW")
            (group,) = own.param_groups
            assert [group["initial_lr"], group["weight_decay"]] == [0.003, 0]
        watched.clear()
        assert end_of(contam.main, folder.name) is None and watched.dtypes == {(False, dtype)}
        assert watched.four_bit == qlora
        ours, audits = [f"{options.get('quantization_config')} {options['dtype']}"
                        for options in watched.loads[-2:]]
        assert ours == audits and ("nf4" in ours) == ("nf4" in typed)
    Path("a.txt").write_text("\n".join(["one", "another"] * 9))
    flags = ["--examples", "a.txt", "--model", str(folder), "--precision", "bf16"]
    assert end_of(contam.main, *flags) is None and watched.loads[-1]["dtype"] == torch.bfloat16
    assert watched.others == [0, 1, 1, 1, 1, 1, 1], "the last one of the other script"


@pytest.mark.parametrize("kind", ["verl", "LLaMA-Factory"])
def test_the_blocks_of_the_guide_to_own_training(kind):
    """The model trained on A is right, the other one is wrong."""
    guide = (ROOT / "docs/own_training.md").read_text(encoding="utf-8")
    split, table = re.findall("```python\n(.*?)```", guide, re.DOTALL)
    lines = [f'{{"question": "{k}\u2028"}}' for k in [*range(40), 7]]
    Path("benchmark.jsonl").write_text("\n".join(lines), encoding="utf-8")
    exec(split, {})
    for (draw, half), items in pd.read_csv("halves.csv").groupby(["draw", "half"])["item"]:
        text = Path(f"draw_{draw}_{half}.jsonl").read_text()
        assert re.findall(r"\w+(?=\"}\n)", text) == [*map(str, items)] and len(items) == 20
        for trained_on, right in (("A", 1), ("B", 0)):
            rows = pd.DataFrame({"prompt": items, "predict": f"{right} ", "label": "1"})
            if kind == "verl":
                rows = pd.DataFrame({"input": [*items] * 2, "gts": "1", "score": right})
            Path("runs", str(draw), trained_on, half).mkdir(parents=True)
            rows.to_json(f"runs/{draw}/{trained_on}/{half}/0.jsonl", orient="records", lines=True)
    exec(table, {})
    contam.main(["--answers", "mine.csv"])
    found = pd.read_csv("crossed.csv")[["acc_extra", "acc_test", "acc_test_on_extra"]]
    assert (found == [1, 0, 0]).all(axis=None) and len(found) == 5
