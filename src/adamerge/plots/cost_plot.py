"""A plot of few lines that a reader takes in at a glance: accuracy against compute saved, the best line marked."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from adamerge.core.errors import BadOption
from adamerge.plots.canvas import COLOURS, FAINT, MARKERS, RULE, TEXT, drawing

# (share of the cost saved, accuracy), both as fractions.
Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 1200, 720
# More lines than colours that can be told apart are no use.
MOST_LINES = len(COLOURS)
# A line that loses this many times as much as the next better one, and at least so many points, leaves the plot at the
# bottom, so that the others can be told apart; its label says how low it goes.
OUTSIDE, OUTSIDE_POINTS = 2.5, 4.0
# The least distance of two labels, as a share of the height of the axes.
LABEL_STEP = 0.062


def tradeoff(
    curves: Mapping[str, Points],
    unmerged: float,
    path: str | os.PathLike[str],
    *,
    winner: str = "",
    title: str = "",
    quantity: str = "top-1 accuracy (%)",
) -> Path:
    """Accuracy against the share of the cost that is saved: a line for each method, with its name at its end.

    Args:
        curves: for each method, points of (share of the cost saved, accuracy) as fractions.
        unmerged: accuracy of the unmerged model, where every line starts.
        path: the PNG to write.
        winner: the method whose line is thick.
        title: the title of the figure.
        quantity: the label of the axis of accuracy.
    """
    if not 1 <= len(curves) <= MOST_LINES or not all(curves.values()):
        raise BadOption(f"tradeoff draws 1 to {MOST_LINES} methods with at least one point each; got {len(curves)}")
    if winner and winner not in curves:
        raise BadOption(f"the winner must be one of {', '.join(curves)}; got {winner!r}")
    percent = {
        name: [(0.0, 100 * unmerged), *sorted((100 * cut, 100 * accuracy) for cut, accuracy in points)]
        for name, points in curves.items()
    }
    bottom, top = _limits(percent, 100 * unmerged)
    with drawing(path, WIDTH, HEIGHT) as figure:
        axes = figure.add_axes((0.085, 0.125, 0.635, 0.765 if title else 0.83))
        _style(axes, max(points[-1][0] for points in percent.values()), quantity)
        axes.set_ylim(bottom, top)
        axes.axhline(100 * unmerged, color=FAINT, linestyle=(0, (5, 3)), linewidth=1.3, zorder=2)
        words = f"unmerged {100 * unmerged:.1f} %"
        axes.annotate(words, (0, 100 * unmerged), (6, 6), textcoords="offset points", fontsize=10.5, color=FAINT)
        for index, (name, points) in enumerate(percent.items()):
            best = name == winner
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[index],
                marker=MARKERS[index],
                markersize=9 if best else 6.5,
                markeredgecolor="white",
                markeredgewidth=1.0,
                linewidth=3.6 if best else 1.7,
                zorder=5 if best else 3,
            )
        _write_labels(axes, percent, winner)
        figure.text(0.022, 0.965, title, va="top", fontsize=13, fontweight="bold", color=TEXT, parse_math=False)
    return Path(path)


def _limits(curves: Mapping[str, Points], unmerged: float) -> tuple[float, float]:
    """The lowest and the highest accuracy of the axis, in percent."""
    shown = 0.5
    for lost in sorted(unmerged - min(accuracy for _, accuracy in points) for points in curves.values()):
        if lost > max(OUTSIDE * shown, OUTSIDE_POINTS):
            break
        shown = max(shown, lost)
    gained = max(accuracy for points in curves.values() for _, accuracy in points) - unmerged
    return unmerged - 1.12 * shown, unmerged + max(gained, 0) + 0.12 * shown


def _style(axes: Axes, widest: float, quantity: str) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=TEXT, labelsize=10.5, length=0, pad=6)
    axes.grid(color=RULE, linewidth=0.8)
    axes.set_xlim(0, 1.02 * widest)
    axes.set_xlabel("compute saved (%)", fontsize=11.5, color=TEXT, labelpad=8)
    axes.set_ylabel(quantity, fontsize=11.5, color=TEXT, labelpad=8)


def _write_labels(axes: Axes, curves: Mapping[str, Points], winner: str) -> None:
    """Write each name beside the end of its line, moved apart where lines end close together."""
    bottom, top = axes.get_ylim()
    ends = {name: (points[-1][1] - bottom) / (top - bottom) for name, points in curves.items()}
    heights = spread_apart(list(ends.values()), LABEL_STEP)
    for index, (name, height) in enumerate(zip(ends, heights, strict=True)):
        axes.text(
            1.02,
            height,
            f"{name} {curves[name][-1][1]:.1f} %" + (" ↓" if ends[name] < 0 else ""),
            transform=axes.transAxes,
            color=COLOURS[index],
            fontsize=12 if name == winner else 10.5,
            fontweight="bold" if name == winner else "normal",
            va="center",
            parse_math=False,
        )


def spread_apart(heights: Sequence[float], step: float) -> list[float]:
    """Heights from 0 to 1 near the given ones and in their order, each at least `step` from the next."""
    order = sorted(range(len(heights)), key=lambda index: -heights[index])
    found = [0.0] * len(heights)
    above = 1 + step
    for index in order:
        found[index] = above = min(above - step, heights[index])
    below = -step
    for index in reversed(order):
        found[index] = below = max(below + step, found[index])
    return found
