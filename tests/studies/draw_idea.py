"""docs/idea.png, the picture of the question in the README: python tests/studies/draw_idea.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

COLORS = {"base": "#bbbbbb", "unseen": "#88ccee", "seen": "#ee9966"}  # distinguishable for color-blind readers
MODELS = (
    ("no further pretraining", ("base", "base")),
    ("pretrained on texts A", ("seen", "unseen")),
    ("pretrained on texts B", ("unseen", "seen")),
)
LABELS = """Pretraining uses no labels. In few-shot runs all three
are trained on the same m labeled texts."""


def draw_cells(axis):
    """Who is tested on what."""
    for row, (model, kinds) in enumerate(MODELS):
        axis.text(-0.08, 2.5 - row, model, ha="right", va="center")
        for column, kind in enumerate(kinds):
            axis.add_patch(Rectangle((column, 2 - row), 1, 1, fc=COLORS[kind], ec="white", lw=4))
            axis.text(column + 0.5, 2.5 - row, kind, ha="center", va="center")
    for column, name in enumerate("AB"):
        axis.text(column + 0.5, 3.08, f"tested on\ntexts {name}", ha="center", va="bottom")
    axis.text(-1.75, -0.25, LABELS, va="top")
    axis.set(xlim=(-1.75, 2.1), ylim=(-1, 3.8))


def draw_steps(axis):
    """The three accuracies as steps, as measured: a boost and hardly any bias."""
    heights = {"base": 1.0, "unseen": 2.3, "seen": 2.34}
    for place, (kind, height) in enumerate(heights.items()):
        axis.bar(place, height, 0.7, color=COLORS[kind])
        axis.text(place, 0.4, kind, ha="center", va="center")
    axis.plot([-0.35, 0.65], [heights["unseen"]] * 2, color="#444444", lw=1, ls=":")
    arrow = {"arrowstyle": "<->", "color": "#444444"}
    axis.annotate("", xy=(0, heights["unseen"]), xytext=(0, heights["base"]), arrowprops=arrow)
    words = "boost: the gain from\npretraining on other text"
    axis.text(-0.15, 1.65, words, ha="right", va="center")
    axis.plot([1, 1, 2, 2], [2.42, 2.55, 2.55, 2.46], color="#444444", lw=1)
    axis.text(1.5, 2.92, "bias: close to zero on average", ha="center", va="bottom", weight="bold")
    axis.text(1.5, 2.62, "(what pretraining on the test text adds)", ha="center", va="bottom")
    axis.set(xlim=(-1.75, 3.1), ylim=(-0.05, 3.2))


def main():
    plt.rcParams["font.size"] = 10
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.5), width_ratios=(1, 1.05))
    draw_cells(left)
    draw_steps(right)
    titles = (
        "1. Two random sets of texts, three models, six accuracies",
        "2. Their means, and the two steps between them (not to scale)",
    )
    for axis, title in zip((left, right), titles):
        axis.axis("off")
        axis.set_title(title, loc="left", weight="bold", size=10)
    figure.tight_layout()
    figure.savefig(Path(__file__).resolve().parents[2] / "docs" / "idea.png", dpi=130)


if __name__ == "__main__":
    main()
