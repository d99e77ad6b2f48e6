"""Figures of results: what was merged in images, accuracy against cost, merges per layer."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

from adamerge.core.errors import BadImages, BadOption
from adamerge.plots.canvas import COLOURS, FAINT, MARKERS, RULE, TEXT, drawing
from adamerge.plots.one_image import grid_of, heat, mosaic, slots_entering
from adamerge.plots.sheet import resized, tile_scale, write_sheet
from adamerge.runtime.trace import Trace

# Axis labels of costs; any other name is its own label.
COSTS = {
    "gmacs": "GMACs per image",
    "gmacs_paper": "GMACs per image (blocks only)",
    "gmacs_true": "GMACs per image",
    "cut": "compute saved",
    "speedup": "speed-up",
}
SPREAD = (10, 90)


def gallery(
    images: Tensor,
    trace: Trace,
    path: str | os.PathLike[str],
    *,
    titles: Sequence[str] | None = None,
    salience_layers: tuple[int, int] | None = None,
    merged_layers: tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
) -> Path:
    """One row per image: the image, its salience early and late, its tokens halfway and at the end.

    Args:
        images: (images, 3, height, width) in [0, 1], in the order of the batch that was traced.
        trace: the trace of the merged model on them; it may hold further images.
        path: the PNG to write.
        titles: a caption for each image.
        salience_layers: the early and the late layer whose salience is shown; the second and the last unless given.
        merged_layers: the layers after which the tokens are shown; the middle and the last unless given.
        grid: rows and columns of patches; square unless given.
    """
    if images.dim() != 4 or len(images) == 0 or len(images) > len(trace.counts):
        raise BadImages(
            f"expected 1 to {len(trace.counts)} images as (images, 3, height, width), those that were traced; "
            f"got shape {tuple(images.shape)}"
        )
    if titles is not None and len(titles) != len(images):
        raise BadOption(f"titles must be one for each of the {len(images)} images; got {len(titles)}")
    depth = len(trace.layers)
    early, late = _layers_of(depth, "salience_layers", salience_layers or (min(1, depth - 1), depth - 1))
    middle, last = _layers_of(depth, "merged_layers", merged_layers or ((depth - 1) // 2, depth - 1))

    rows, cols = grid_of(trace.patches, grid)
    scale = tile_scale(images.shape[3], cols)
    sources = slots_entering(trace, early), slots_entering(trace, late)
    results = trace.slots(middle), trace.slots(last)
    counts = trace.counts.tolist()
    entering = [[trace.patches, *row][:-1] for row in counts]

    strips: list[list[Image.Image]] = []
    captions: list[list[str]] = []
    for i, image in enumerate(images):
        merged = [mosaic(image, slots[i], grid=grid, scale=scale) for slots in results]
        heats = [
            heat(image, trace.layers[layer].salience[i], slots[i], grid=grid, scale=scale)
            for layer, slots in zip((early, late), sources, strict=True)
        ]
        strips.append([resized(image, merged[0].size), *heats, *merged])
        captions.append(
            [
                titles[i] if titles is not None else "",
                *(f"{entering[i][layer]} tokens" for layer in (early, late)),
                *(f"{trace.patches} → {counts[i][layer]} tokens" for layer in (middle, last)),
            ]
        )
    headings = [("Image", f"{rows} × {cols} patches"), *_headings(depth, (early, late), (middle, last))]
    write_sheet(path, strips, captions, headings)
    return Path(path)


def _headings(depth: int, salience_layers: tuple[int, int], merged_layers: tuple[int, int]) -> list[tuple[str, str]]:
    """Title and subtitle of the four columns that show layers."""
    (early, late), (middle, last) = salience_layers, merged_layers
    return [
        ("Salience, early", f"layer {early}, ranked dark to bright"),
        ("Salience, late", f"layer {late}, ranked dark to bright"),
        ("Merged, halfway" if 0 < middle < last else "Merged", f"after {middle + 1} of {depth} layers"),
        ("Merged, final" if last == depth - 1 else "Merged", f"after {last + 1} of {depth} layers"),
    ]


def frontier(
    rows: Sequence[Mapping[str, Any] | Any], path: str | os.PathLike[str], *, cost: str = "gmacs", title: str = ""
) -> Path:
    """Accuracy against cost: a line with markers for each method, the unmerged model as a dashed line.

    Args:
        rows: mappings or dataclasses with `method`, `top1` (a fraction) and the cost; the row of method "none" is the
            unmerged model.
        path: the PNG to write.
        cost: which field is the cost: "gmacs", "cut" (a fraction), or any other number.
        title: the title of the figure.
    """
    points = [_point(index, row, cost) for index, row in enumerate(rows)]
    curves: dict[str, list[tuple[float, float]]] = {}
    for method, price, top1 in points:
        curves.setdefault(method, []).append((price, 100 * top1))
    unmerged = curves.pop("none", [])
    if not curves:
        raise BadOption("frontier needs at least one row of a method that merges; got none")
    if len({top1 for _, top1 in unmerged}) > 1:
        raise BadOption(f"the unmerged model (method 'none') must have one top1; got {[y for _, y in unmerged]}")

    with drawing(path, 1200, 800) as figure:
        axes = _axes(figure, left=0.088, right=0.965, bottom=0.125, top=0.9 if title else 0.955)
        for index, (method, curve) in enumerate(curves.items()):
            curve.sort()
            axes.plot(
                *zip(*curve, strict=True),
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                markersize=6.5,
                markeredgecolor="white",
                markeredgewidth=1.0,
                linewidth=2.0,
                label=method,
                zorder=3,
            )
        if unmerged:
            level = unmerged[0][1]
            axes.axhline(level, color=FAINT, linestyle=(0, (5, 3)), linewidth=1.3, zorder=2)
            words = f"unmerged {level:.1f} %"
            axes.annotate(
                words, (0.01, level), (0, 5), axes.get_yaxis_transform(), "offset points", fontsize=10, color=FAINT
            )
        axes.set_xlabel(COSTS.get(cost, cost), fontsize=11, color=TEXT, labelpad=8)
        axes.set_ylabel("top-1 accuracy (%)", fontsize=11, color=TEXT, labelpad=8)
        if cost == "cut":
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.grid(color=RULE, linewidth=0.8)
        # Accuracy rises with cost and falls with savings, so the corner without curves differs.
        corner = "lower left" if cost in ("cut", "speedup") else "lower right"
        axes.legend(loc=corner, frameon=False, fontsize=10.5, labelcolor=TEXT, handlelength=2.4)
        _write_title(figure, title)
    return Path(path)


def layers(
    settings: Trace | Tensor | Mapping[str, Trace | Tensor], path: str | os.PathLike[str], *, title: str = ""
) -> Path:
    """Tokens merged at each layer: the mean as a bar, the middle 80 % of the images as a line, for each setting.

    Args:
        settings: a trace or a table (images, layers) of merged tokens, such as `evaluation.r`; or several, by name.
        path: the PNG to write.
        title: the title of the figure.
    """
    named = settings if isinstance(settings, Mapping) else {"": settings}
    tables = {name: _table(name, of) for name, of in named.items()}
    depths = {name: table.shape[1] for name, table in tables.items()}
    if len(set(depths.values())) != 1:
        raise BadOption(f"settings must be at least one, all with the same number of layers; got {depths}")
    depth = next(iter(depths.values()))

    with drawing(path, 1200, 640) as figure:
        axes = _axes(figure, left=0.078, right=0.975, bottom=0.15, top=0.86 if title or len(tables) > 1 else 0.95)
        width = 0.76 / len(tables)
        for index, (name, table) in enumerate(tables.items()):
            at = np.arange(depth) + (index - (len(tables) - 1) / 2) * width
            low, high = np.percentile(table, SPREAD, axis=0)
            colour = COLOURS[index % len(COLOURS)]
            axes.bar(at, table.mean(0), 0.92 * width, color=colour, alpha=0.85, linewidth=0, label=name, zorder=2)
            axes.vlines(at, low, high, color=TEXT, linewidth=1.1, alpha=0.8, zorder=3)
        axes.set_xticks(range(depth))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.set_xlim(-0.6, depth - 0.4)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("layer", fontsize=11, color=TEXT, labelpad=8)
        axes.set_ylabel("tokens merged per image", fontsize=11, color=TEXT, labelpad=8)
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.spines["left"].set_visible(False)
        if len(tables) > 1:
            figure.legend(
                loc="upper right",
                bbox_to_anchor=(0.98, 0.985),
                ncols=min(len(tables), 4),
                frameon=False,
                fontsize=10.5,
                labelcolor=TEXT,
                handlelength=1.0,
                handleheight=1.0,
            )
        axes.text(
            1.0,
            1.01,
            f"bar: mean   line: {SPREAD[0]}th to {SPREAD[1]}th percentile of images",
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            fontsize=9,
            color=FAINT,
        )
        _write_title(figure, title)
    return Path(path)


def _layers_of(depth: int, name: str, pair: tuple[int, int]) -> tuple[int, int]:
    """Two layer indices, with negative ones counted from the end."""
    if len(pair) != 2 or any(not -depth <= layer < depth for layer in pair):
        raise BadOption(f"{name} must be two layers from 0 to {depth - 1} (or -{depth} to -1); got {pair}")
    return pair[0] % depth, pair[1] % depth


def _axes(figure: Figure, *, left: float, right: float, bottom: float, top: float) -> Axes:
    axes = figure.add_axes((left, bottom, right - left, top - bottom))
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=TEXT, labelsize=10, length=0, pad=6)
    axes.margins(0.06, 0.1)
    return axes


def _write_title(figure: Figure, title: str) -> None:
    figure.text(0.022, 0.965, title, va="top", fontsize=13, fontweight="bold", color=TEXT, parse_math=False)


def _point(index: int, row: Mapping[str, Any] | Any, cost: str) -> tuple[str, float, float]:
    """Method, cost and top-1 of one row; the unmerged model may lack a cost."""
    fields = asdict(row) if is_dataclass(row) and not isinstance(row, type) else row
    if not isinstance(fields, Mapping):
        raise BadOption(f"rows must be mappings or dataclasses; row {index} is a {type(row).__name__}")
    wanted = ("method", "top1") if fields.get("method") == "none" else ("method", cost, "top1")
    missing = [name for name in wanted if name not in fields]
    if missing:
        raise BadOption(f"row {index} lacks {', '.join(missing)}; it has {', '.join(map(str, fields))}")
    price, top1 = fields.get(cost, 0.0), fields["top1"]
    for name, value in ((cost, price), ("top1", top1)):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise BadOption(f"{name} of row {index} must be a finite number; got {value!r}")
    if not 0 <= top1 <= 1:
        raise BadOption(f"top1 of row {index} must be a fraction from 0 to 1; got {top1!r}. Divide percentages by 100.")
    return str(fields["method"]), float(price), float(top1)


def _table(name: str, of: Trace | Tensor) -> np.ndarray:
    """Merged tokens as (images, layers)."""
    r = of.r if isinstance(of, Trace) else of
    if r.dim() != 2 or 0 in r.shape:
        raise BadOption(
            f"expected a trace or a table of merged tokens (images, layers){f' for {name!r}' if name else ''}; "
            f"got shape {tuple(r.shape)}"
        )
    return r.detach().cpu().double().numpy()
