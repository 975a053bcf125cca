"""docs/idea.png, the picture of the question in the README: python tests/studies/draw_idea.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402

COLOURS = {"base": "#bbbbbb", "unseen": "#88ccee", "seen": "#ee9966"}  # told apart by all eyes
MODELS = (
    ("not pretrained", ("base", "base")),
    ("pretrained on texts A", ("seen", "unseen")),
    ("pretrained on texts B", ("unseen", "seen")),
)


def draw_cells(axis):
    """Who is tested on what."""
    for row, (model, kinds) in enumerate(MODELS):
        axis.text(-0.08, 2.5 - row, model, ha="right", va="center")
        for column, kind in enumerate(kinds):
            box = Rectangle((column, 2 - row), 1, 1, facecolor=COLOURS[kind], edgecolor="white", lw=4)
            axis.add_patch(box)
            axis.text(column + 0.5, 2.5 - row, kind, ha="center", va="center")
    for column, name in enumerate("AB"):
        axis.text(column + 0.5, 3.08, f"tested on\ntexts {name}", ha="center", va="bottom")
    axis.text(-1.75, 3.95, "1. Two random sets of texts, three models, six accuracies", weight="bold")
    axis.set(xlim=(-1.75, 2.1), ylim=(-0.05, 4.2))


def draw_steps(axis):
    """The three accuracies as steps; their heights are an example."""
    heights = {"base": 1.0, "unseen": 2.0, "seen": 2.4}
    for place, (kind, height) in enumerate(heights.items()):
        axis.bar(place, height, 0.7, color=COLOURS[kind])
        axis.text(place, 0.4, kind, ha="center", va="center")
    arrow = {"arrowstyle": "<->", "color": "#444444"}
    for place, low, high in ((0, 1.0, 2.0), (1, 2.0, 2.4)):
        axis.plot([place - 0.35, place + 0.65], [high] * 2, color="#444444", lw=1, ls=":")
        axis.annotate("", xy=(place, high), xytext=(place, low), arrowprops=arrow)
    axis.text(-0.15, 1.5, "boost: what pretraining\non other text is worth", ha="right", va="center")
    axis.text(0.55, 2.35, "bias: what pretraining on\nthe test text adds to it", ha="right", va="center")
    axis.text(-2.2, 3.1, "2. Their means and the two steps between them (an example)", weight="bold")
    axis.set(xlim=(-2.2, 2.6), ylim=(-0.05, 3.3))


def main():
    plt.rcParams["font.size"] = 10
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.1), width_ratios=(1, 1.05))
    draw_cells(left)
    draw_steps(right)
    for axis in (left, right):
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(Path(__file__).resolve().parents[2] / "docs" / "idea.png", dpi=130)


if __name__ == "__main__":
    main()
