"""One image, several methods: a row of pictures for each method at a few layers, in one sheet."""

import os
from collections.abc import Sequence
from pathlib import Path

from adamerge.core.errors import BadOption
from adamerge.plots.image_view import ImageView
from adamerge.plots.layer_sheet import as_strip, shown_layers
from adamerge.plots.one_image import mosaic
from adamerge.plots.sheet import TILE, tile_scale, write_sheet

LAYERS, LAYERS_OF_A_VIDEO, FRAME = 5, 2, 84


def compare_methods(views: Sequence[ImageView], path: str | os.PathLike[str]) -> Path:
    """Write a sheet: a row for each method, a column for each of a few layers; the last has what the model says."""
    if not views or len({(view.name, view.grid, view.depth) for view in views}) != 1:
        raise BadOption(f"expected views of one image; got {[view.name for view in views]}")
    first = views[0]
    layers = shown_layers(first.depth, LAYERS if first.moments == 1 else LAYERS_OF_A_VIDEO)
    scale = tile_scale(first.pixels.shape[2], first.grid[1], TILE if first.moments == 1 else FRAME)
    strips, captions = [], []
    for view in views:
        drawn = [mosaic(view.pixels, view.leaving[layer], grid=view.grid, scale=scale) for layer in layers]
        strips.append([as_strip(picture, view.moments) for picture in drawn])
        words = [f"{view.counts[layer]} tokens" for layer in layers]
        words[0] = f"{view.method}: {words[0]}"
        words[-1] = f"{view.counts[layers[-1]]}: {view.after[0]}" if view.after else words[-1]
        captions.append(words)
    headings = [(f"After layer {layer}", "") for layer in layers]
    headings[0] = (headings[0][0], f"unmerged: {first.before[0]}" if first.before else "")
    headings[-1] = (headings[-1][0], "compute saved: " + ", ".join(f"{view.cut:.0%}" for view in views))
    write_sheet(path, strips, captions, headings)
    return Path(path)
