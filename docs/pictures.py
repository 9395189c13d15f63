"""Draws the pictures of the documentation: `python docs/pictures.py` (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

IMAGES = Path(__file__).parent / "images"
WEIGHT, STATE, GRADIENT, WIRE = "#4c78a8", "#f58518", "#72b7b2", "#b279a2"
REPLICAS = 4


def canvas(width, height):
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained", facecolor="white")
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")
    return figure, axes


def block(axes, x, y, colour, part=None, size=0.9):
    """A replica's copy of a value: all of it, or one part."""
    axes.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor="#b0b4ba", linewidth=1))
    top, high = (y, size) if part is None else (y + size * (1 - (part + 1) / REPLICAS), size / REPLICAS)
    axes.add_patch(Rectangle((x, top), size, high, color=colour, linewidth=0))


def arrow(axes, x, y, text):
    axes.add_patch(FancyBboxPatch((x, y), 1.5, 3.6, boxstyle="round,pad=0.05", color=WIRE, alpha=0.18, linewidth=0))
    axes.text(x + 0.75, y + 1.8, text, ha="center", va="center", color="#8a4f83", fontsize=17, weight="bold")


def update():
    """One update on four replicas, before and after."""
    figure, axes = canvas(12, 10.6)
    for top, title, split, steps in (
        (5.6, "before: every replica updates everything", False, ("all-\nreduce", "")),
        (0.2, "after: each replica updates its part", True, ("reduce-\nscatter", "all-\ngather")),
    ):
        axes.text(0, top + 4.62, title, fontsize=21, weight="bold")
        for r in range(REPLICAS):
            y, part = top + 0.95 * (REPLICAS - 1 - r), r if split else None
            axes.text(0, y + 0.45, f"replica {r}", va="center", fontsize=16)
            block(axes, 1.3, y, GRADIENT)
            block(axes, 4.4, y, GRADIENT, part)
            block(axes, 5.6, y, STATE, part)
            block(axes, 6.8, y, WEIGHT, part)
            block(axes, 10.2 if split else 8.4, y, WEIGHT)
        arrow(axes, 2.55, top + 0.05, steps[0])
        if split:
            arrow(axes, 8.2, top + 0.05, steps[1])
        for x, text in ((1.3, "gradient\nterms"), (4.4, "gradient"), (5.6, "moments"), (6.8, "update")):
            axes.text(x + 0.45, top + 3.83, text, ha="center", va="bottom", fontsize=16, color="#5b6470")
        axes.text(
            (10.65 if split else 8.85), top + 3.83, "weights", ha="center", va="bottom", fontsize=16, color="#5b6470"
        )
    figure.savefig(IMAGES / "update.svg", metadata={"Date": None})
    plt.close(figure)


def layouts():
    """What four replicas hold of one value."""
    figure, axes = canvas(12, 2.9)
    for x, title, said in (
        (0.2, "Replicated", "each replica holds all of it"),
        (4.2, "Split(0)", "each replica holds one block"),
        (8.2, "Partial(sum)", "each holds a term of the sum"),
    ):
        axes.text(x, 2.4, title, fontsize=20, weight="bold")
        axes.text(x, 1.85, said, fontsize=14, color="#5b6470")
        for r in range(REPLICAS):
            colour = GRADIENT if title.startswith("Partial") else WEIGHT
            block(axes, x + 0.85 * r, 0.6, colour, r if title.startswith("Split") else None, 0.75)
            sign = " + " if title.startswith("Partial") and r else ""
            axes.text(x + 0.85 * r + 0.37, 0.22, f"{sign}{r}", ha="center", fontsize=15, color="#5b6470")
    figure.savefig(IMAGES / "layouts.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    plt.switch_backend("Agg")
    plt.rcParams["svg.hashsalt"] = "shardstep"  # the same file from the same script
    IMAGES.mkdir(exist_ok=True)
    update()
    layouts()
