"""docs/figures/idea.png, the picture of the question in the README.

    python docs/studies/draw_idea.py
"""

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
LABELS = """Pretraining uses no labels. All three models then
learn from the same labeled training texts."""


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
    """The three accuracies as steps: the fair gain, and the one that is in question."""
    heights = {"base": 1.0, "unseen": 2.1, "seen": 2.75}
    for place, (kind, height) in enumerate(heights.items()):
        known = min(height, heights["unseen"])
        axis.bar(place, known, 0.7, color=COLORS[kind])
        axis.text(place, 0.4, kind, ha="center", va="center")
    axis.plot([-0.35, 2.75], [heights["unseen"]] * 2, color="#444444", lw=1, ls=":")
    arrow = {"arrowstyle": "<->", "color": "#444444"}
    axis.annotate("", xy=(0, heights["unseen"]), xytext=(0, heights["base"]), arrowprops=arrow)
    axis.text(-0.15, 1.55, "boost: from reading\nother texts (fair)", ha="right", va="center")
    axis.add_patch(Rectangle((1.65, heights["unseen"]), 0.7, heights["seen"] - heights["unseen"],
                             fc="white", ec=COLORS["seen"], lw=2, ls="--"))
    axis.text(2, 2.42, "?", ha="center", va="center", size=14, weight="bold")
    axis.plot([2.35, 2.75], [heights["seen"]] * 2, color="#444444", lw=1, ls=":")
    axis.annotate("", xy=(2.6, heights["seen"]), xytext=(2.6, heights["unseen"]), arrowprops=arrow)
    axis.text(2.75, 2.42, "bias: from reading the\ntest texts (unfair)",
              ha="left", va="center", weight="bold")
    axis.set(xlim=(-1.6, 5.1), ylim=(-0.05, 3.2))


def main():
    plt.rcParams["font.size"] = 10
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.5), width_ratios=(1, 1.25))
    draw_cells(left)
    draw_steps(right)
    titles = (
        "1. Three models, tested on two random sets of texts",
        "2. Mean accuracies (not to scale): is seen above unseen?",
    )
    for axis, title in zip((left, right), titles):
        axis.axis("off")
        axis.set_title(title, loc="left", weight="bold", size=10)
    figure.tight_layout()
    figure.savefig(Path(__file__).resolve().parents[2] / "docs" / "figures" / "idea.png", dpi=130)


if __name__ == "__main__":
    main()
