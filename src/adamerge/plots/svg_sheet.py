"""The same sheet as SVG: regions and borders are vectors, for papers and slides."""

import base64
import os
from html import escape
from io import BytesIO
from pathlib import Path

import numpy as np
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.core.files import write_atomically
from adamerge.plots.image_view import ImageView
from adamerge.plots.layer_sheet import MOST_LAYERS, shown_layers
from adamerge.plots.sheet import resized

TILE, GAP, MARGIN, ABOVE, LEFT = 150, 10, 20, 22, 120
ROWS = ("Salience", "Kept, merged", "Groups")
KEPT, MERGED = "#009e73", "#d55e00"


def svg_sheet(view: ImageView, path: str | os.PathLike[str]) -> Path:
    """Write salience, kept and merged patches, and groups of every layer; the frames of a video stand in a column."""
    if Path(path).suffix.lower() != ".svg":
        raise BadOption(f"expected a path that ends in .svg; got {str(path)!r}")
    rows, cols = view.grid
    high = TILE * rows / cols
    layers = shown_layers(view.depth, MOST_LAYERS)
    across = 2 * MARGIN + LEFT + len(layers) * (TILE + GAP)
    down = 2 * MARGIN + 2 * ABOVE + 3 * (high + GAP) + 40
    title = f"{view.name} · {view.method} · {view.cut:.0%} of the compute saved"
    said = " → ".join(text[0] for text in (view.before, view.after) if text)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{across:g}" '
        f'height="{down:g}" viewBox="0 0 {across:g} {down:g}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" '
        'fill="#1a1a1f" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{across:g}" height="{down:g}" fill="white"/>',
        f'<defs><image id="input" width="{cols}" height="{rows}" preserveAspectRatio="none" '
        f'href="{data_uri(view.pixels)}" xlink:href="{data_uri(view.pixels)}"/></defs>',
        f'<text x="{MARGIN}" y="{MARGIN + 14}" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="{MARGIN}" y="{MARGIN + 34}">{escape(said)}</text>',
    ]
    top = MARGIN + ABOVE + 44
    for row, name in enumerate(ROWS):
        parts.append(f'<text x="{MARGIN}" y="{top + row * (high + GAP) + 16:g}" font-weight="bold">{name}</text>')
    for column, layer in enumerate(layers):
        x = MARGIN + LEFT + column * (TILE + GAP)
        parts.append(f'<text x="{x}" y="{top - 8:g}">layer {layer}, {view.counts[layer]} tokens</text>')
        for row, shapes in enumerate((_salience(view, layer), _survivors(view, layer), _groups(view, layer))):
            scale = TILE / cols
            parts.append(f'<g transform="translate({x} {top + row * (high + GAP):g}) scale({scale:g})">')
            parts += ['<use href="#input" xlink:href="#input"/>', *shapes, "</g>"]
    write_atomically(path, "\n".join([*parts, "</svg>"]) + "\n")
    return Path(path)


def data_uri(pixels: Tensor) -> str:
    """An image (3, height, width) as the text of a JPEG inside a page."""
    content = BytesIO()
    resized(pixels, (pixels.shape[2], pixels.shape[1])).save(content, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def ranks_of(view: ImageView, layer: int) -> np.ndarray:
    """The salience of the token of each patch as a rank among the tokens that enter the layer, from 0 to 1."""
    _, first = np.unique(view.entering[layer].numpy(), return_index=True)
    tokens, values = np.sort(view.salience[layer].numpy()[first]), view.salience[layer].numpy()
    if tokens[0] == tokens[-1]:
        return np.full(view.patches, 0.5)
    return np.searchsorted(tokens, values) / (len(tokens) - 1)


def mean_colours(view: ImageView, layer: int) -> list[str]:
    """For each patch, the mean colour of the patches of its token after the layer."""
    rows, cols = view.grid
    pixels = view.pixels.permute(1, 2, 0).numpy()
    patches = pixels.reshape(rows, pixels.shape[0] // rows, cols, -1, 3).mean((1, 3)).reshape(-1, 3)
    slots = view.leaving[layer].numpy()
    total = np.zeros((view.counts[layer], 3))
    np.add.at(total, slots, patches)
    means = total / np.bincount(slots, minlength=view.counts[layer])[:, None].clip(1)
    return ["#" + bytes((255 * colour.clip(0, 1)).round().astype(np.uint8)).hex() for colour in means[slots]]


def _cells(view: ImageView, patches: np.ndarray) -> str:
    """The path of these patches, in units of a patch."""
    cols = view.grid[1]
    return "".join(f"M{patch % cols} {patch // cols}h1v1h-1z" for patch in patches)


def _salience(view: ImageView, layer: int) -> list[str]:
    from matplotlib import colormaps

    levels = np.round(15 * ranks_of(view, layer)).astype(int)
    colours = [
        "#" + bytes((255 * np.array(colormaps["magma"](0.1 + 0.058 * n)[:3])).astype(np.uint8)).hex() for n in range(16)
    ]
    return [
        f'<path d="{_cells(view, np.flatnonzero(levels == level))}" fill="{colours[level]}" fill-opacity=".85"/>'
        for level in np.unique(levels)
    ]


def _survivors(view: ImageView, layer: int) -> list[str]:
    kept = view.kept(layer).numpy()
    cols = view.grid[1]
    frames = "".join(f"M{p % cols + 0.05:g} {p // cols + 0.05:g}h.9v.9h-.9z" for p in np.flatnonzero(kept))
    return [
        f'<path d="{_cells(view, np.flatnonzero(~kept))}" fill="{MERGED}" fill-opacity=".62"/>',
        f'<path d="{frames}" fill="none" stroke="{KEPT}" stroke-width=".1"/>',
    ]


def _groups(view: ImageView, layer: int) -> list[str]:
    slots, colours = view.leaving[layer].numpy(), mean_colours(view, layer)
    shapes = []
    for token in np.unique(slots):
        members = np.flatnonzero(slots == token)
        if len(members) > 1:
            shapes.append(f'<path d="{_cells(view, members)}" fill="{colours[members[0]]}"/>')
    lines = borders(slots.reshape(view.grid))
    return [
        *shapes,
        f'<path d="{lines}" stroke="black" stroke-opacity=".5" stroke-width=".11" fill="none"/>',
        f'<path d="{lines}" stroke="white" stroke-width=".06" fill="none"/>',
    ]


def borders(slots: np.ndarray) -> str:
    """The path of all lines between patches of different tokens."""
    down, across = np.nonzero(slots[:, 1:] != slots[:, :-1]), np.nonzero(slots[1:] != slots[:-1])
    vertical = "".join(f"M{x + 1} {y}v1" for y, x in zip(*down, strict=True))
    return vertical + "".join(f"M{x} {y + 1}h1" for y, x in zip(*across, strict=True))
