"""Plots a comparison: accuracy against cost, accuracy against speed, KL divergence against compute saved."""

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from adamerge.core.errors import BadOption
from adamerge.experiments.comparison_rows import ComparisonRow
from adamerge.plots.canvas import COLOURS, FAINT, MARKERS, RULE, TEXT, drawing

# Pixels: three square panels in a row, the legend below them.
WIDTH, PANELS, LEGEND_LINE, LEGEND_COLUMNS = 2400, 860, 34, 5
LINES = ("-", (0, (4, 2)), (0, (1, 1.5)))


def pareto(rows: Sequence[ComparisonRow], path: str | os.PathLike[str], *, title: str = "") -> Path:
    """Plot a comparison: a curve for each method with 95 % intervals; hollow markers missed their target.

    Args:
        rows: what `compare` returns; the row of method "none" is the unmerged model.
        path: the PNG to write.
        title: the title of the figure; by default the model, the images and the device.
    """
    if not rows:
        raise BadOption("pareto needs at least one row; got none")
    unmerged = next((row for row in rows if row.method == "none"), None)
    curves: dict[str, list[ComparisonRow]] = {}
    for row in rows:
        if row.method != "none":
            curves.setdefault(row.method, []).append(row)
    cost = rows[0].cost
    height = PANELS + LEGEND_LINE * -(-len(curves) // LEGEND_COLUMNS)
    with drawing(path, WIDTH, height) as figure:
        bottom, top = (height - PANELS + 110) / height, 1 - 90 / height
        panels = [figure.add_axes((left, bottom, 0.27, top - bottom)) for left in (0.05, 0.385, 0.72)]
        _style(panels[0], f"GMACs per image ({cost})", "top-1 accuracy (%)")
        _style(panels[1], "speed-up", "top-1 accuracy (%)")
        _style(panels[2], f"compute saved ({cost}, %)", "KL(unmerged ‖ merged)")
        panels[2].set_yscale("log")
        for index, (method, points) in enumerate(curves.items()):
            gmacs = [(getattr(row, f"gmacs_{cost}"), *_accuracy(row), row.met) for row in points]
            speed = [(row.speedup, *_accuracy(row), row.met) for row in points]
            # A logarithmic axis cannot show 0.
            divergence = [
                (100 * getattr(row, f"cut_{cost}"), row.kl, max(row.kl_low, row.kl / 100), row.kl_high, row.met)
                for row in points
                if row.kl > 0
            ]
            for axes, curve in zip(panels, (gmacs, speed, divergence), strict=True):
                _curve(axes, curve, index, method)
        if unmerged is not None:
            for axes in panels[:2]:
                axes.axhline(100 * unmerged.top1, color=FAINT, linestyle=(0, (5, 3)), linewidth=1.2, zorder=2)
        words = title or f"{rows[0].model}, {rows[0].images} images, {rows[0].dtype} on {rows[0].device}"
        figure.text(
            0.02, 1 - 24 / height, words, va="top", fontsize=13, fontweight="bold", color=TEXT, parse_math=False
        )
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="lower center",
            ncols=LEGEND_COLUMNS,
            frameon=False,
            fontsize=10,
            labelcolor=TEXT,
        )
    return Path(path)


def _accuracy(row: ComparisonRow) -> tuple[float, float, float]:
    """Top-1 in percent, and the ends of an interval around it: the interval of its difference to the unmerged model.

    All methods use the same images, so the interval of the accuracy itself would be too wide for comparing them.
    """
    unmerged = 100 * row.top1 - row.delta_top1
    return 100 * row.top1, unmerged + row.delta_top1_low, unmerged + row.delta_top1_high


def _curve(axes: Axes, points: list[tuple[float, float, float, float, bool]], index: int, method: str) -> None:
    """A line through (x, y) with the interval from low to high at each."""
    if not points:
        return
    x, y, low, high, met = zip(*sorted(points), strict=True)
    colour = COLOURS[index % len(COLOURS)]
    # When the colours repeat, markers and line styles differ.
    marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
    axes.plot(
        x,
        y,
        color=colour,
        linestyle=LINES[index // len(COLOURS) % len(LINES)],
        marker=marker,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        linewidth=1.5,
        label=method,
        zorder=3,
    )
    axes.vlines(x, low, high, color=colour, linewidth=1.0, alpha=0.6, zorder=2)
    missed = [(a, b) for a, b, hit in zip(x, y, met, strict=True) if not hit]
    if missed:
        axes.plot(
            *zip(*missed, strict=True),
            linestyle="none",
            marker=marker,
            markersize=5.5,
            markerfacecolor="white",
            markeredgecolor=colour,
            zorder=4,
        )


def _style(axes: Axes, x: str, y: str) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=TEXT, labelsize=10, length=0, pad=6)
    axes.grid(color=RULE, linewidth=0.8)
    axes.set_xlabel(x, fontsize=11, color=TEXT, labelpad=8)
    axes.set_ylabel(y, fontsize=11, color=TEXT, labelpad=8)
