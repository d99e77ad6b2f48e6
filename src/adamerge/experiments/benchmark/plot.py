"""Plots a benchmark: speed-up against batch size, with the ratio of costs for comparison."""

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from adamerge.core.errors import BadOption
from adamerge.experiments.benchmark.rows import BenchmarkRow
from adamerge.plots.canvas import COLOURS, FAINT, MARKERS, RULE, TEXT, drawing

# Pixels: one panel, the legend below it.
WIDTH, PANEL, LEGEND_LINE, LEGEND_COLUMNS = 1280, 800, 34, 3
DASHES = (0, (4, 2))


def speed(rows: Sequence[BenchmarkRow], path: str | os.PathLike[str], *, title: str = "") -> Path:
    """Plot the speed-up of each method, run in its fastest way, over the fastest unmerged contender.

    Bars show the 20th to the 80th percentile of the method's time; dashed lines show the ratio of true costs.

    Args:
        rows: the rows of `bench`, for one model, dtype and device.
        path: the PNG to write.
        title: the title of the figure; by default the model, the image size and the device.
    """
    curves = _curves(rows)
    if not curves:
        raise BadOption("a picture of speed needs at least one merged row with a speed-up; got none")
    kinds = {(row.model, row.image_size, row.dtype, row.device) for points in curves.values() for row in points}
    if len(kinds) > 1:
        raise BadOption(f"one picture shows one model, dtype and device; these rows have {sorted(kinds)}")
    ((model, size, dtype, device),) = kinds
    height = PANEL + LEGEND_LINE * -(-(len(curves) + 1) // LEGEND_COLUMNS)
    with drawing(path, WIDTH, height) as figure:
        bottom, top = (height - PANEL + 100) / height, 1 - 80 / height
        axes = figure.add_axes((0.08, bottom, 0.89, top - bottom))
        _style(axes, sorted({row.batch for points in curves.values() for row in points}))
        for index, (name, points) in enumerate(curves.items()):
            _curve(axes, points, index, name)
        words = title or f"{model}, {size} pixels, {dtype} on {device}"
        figure.text(
            0.03, 1 - 22 / height, words, va="top", fontsize=13, fontweight="bold", color=TEXT, parse_math=False
        )
        ideal = Line2D([], [], color=FAINT, linestyle=DASHES, label="ratio of costs")
        handles = [*axes.get_legend_handles_labels()[0], ideal]
        figure.legend(
            handles=handles, loc="lower center", ncols=LEGEND_COLUMNS, frameon=False, fontsize=10, labelcolor=TEXT
        )
    return Path(path)


def _curves(rows: Sequence[BenchmarkRow]) -> dict[str, list[BenchmarkRow]]:
    """For each method and target, the row of the fastest way in the latest run at each batch size."""
    found: dict[tuple[int, str], BenchmarkRow] = {}
    for row in rows:
        if row.method == "none" or row.speedup is None:
            continue
        key = row.batch, f"{row.method}, {row.target}" if row.target else row.method
        known = found.get(key)
        if known is None or (row.date, row.speedup) > (known.date, known.speedup or 0):
            found[key] = row
    curves: dict[str, list[BenchmarkRow]] = {}
    for (_, name), row in sorted(found.items(), key=lambda pair: pair[0][0]):
        curves.setdefault(name, []).append(row)
    return curves


def _curve(axes: Axes, points: Sequence[BenchmarkRow], index: int, name: str) -> None:
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    x = [row.batch for row in points]
    y = [row.speedup or 0 for row in points]
    axes.plot(
        x,
        y,
        color=colour,
        marker=marker,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.8,
        linewidth=1.6,
        label=name,
        zorder=3,
    )
    for row, height in zip(points, y, strict=True):
        low, middle, high = row.ms_p20, row.ms_p50, row.ms_p80
        if low and middle and high:
            axes.vlines(row.batch, height * middle / high, height * middle / low, color=colour, alpha=0.6, zorder=2)
    ideal = [(row.batch, row.ideal_true) for row in points if row.ideal_true is not None]
    if ideal:
        axes.plot(*zip(*ideal, strict=True), color=colour, linestyle=DASHES, linewidth=1.1, alpha=0.8, zorder=2)


def _style(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_axisbelow(True)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.axhline(1, color=FAINT, linewidth=1.2, zorder=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=TEXT, labelsize=10, length=0, pad=6)
    axes.grid(color=RULE, linewidth=0.8)
    axes.set_xlabel("images in a batch", fontsize=11, color=TEXT, labelpad=8)
    axes.set_ylabel("speed-up over the fastest unmerged model", fontsize=11, color=TEXT, labelpad=8)
