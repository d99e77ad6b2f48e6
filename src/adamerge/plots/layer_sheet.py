"""The picture of one image and one method: salience, kept patches and groups at every layer, in one sheet."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from adamerge.plots.canvas import COLOURS, FAINT, RULE, TEXT, drawing
from adamerge.plots.image_view import ImageView
from adamerge.plots.one_image import heat, mosaic, survivors
from adamerge.plots.sheet import resized, tile_scale

# Pixels: the width of a tile, of a frame of a video, the gap between tiles, the margin, the header with the input and
# the predictions, the text above a tile, and the text left of a row.
TILE, FRAME, GAP, MARGIN, HEADER, ABOVE, LEFT = 150, 84, 8, 24, 262, 24, 156
MOST_LAYERS = 12
MOST_LAYERS_OF_A_VIDEO = 7
KINDS = (
    ("Salience", "entering a layer,", "dark to bright"),
    ("Kept, merged", "green frame: kept", "orange: merged"),
    ("Groups", "mean colour of the", "patches of a token"),
)


def shown_layers(depth: int, most: int = MOST_LAYERS) -> list[int]:
    """All layers, or `most` evenly spaced ones with the first and the last among them."""
    if depth <= most:
        return list(range(depth))
    return sorted({round(index * (depth - 1) / (most - 1)) for index in range(most)})


def as_strip(picture: Image.Image, moments: int) -> Image.Image:
    """The frames of a video, which stand one below the other, side by side."""
    if moments == 1:
        return picture
    width, height = picture.width, picture.height // moments
    strip = Image.new("RGB", (moments * (width + 2) - 2, height), "white")
    for moment in range(moments):
        strip.paste(picture.crop((0, moment * height, width, (moment + 1) * height)), (moment * (width + 2), 0))
    return strip


def layer_pictures(view: ImageView, layer: int, tile: int) -> list[Image.Image]:
    """Salience, kept and merged patches, and groups at one layer; `tile` is the width of a frame in pixels."""
    scale, grid = tile_scale(view.pixels.shape[2], view.grid[1], tile), view.grid
    salience = view.salience[layer].new_zeros(view.patches)
    salience[view.entering[layer]] = view.salience[layer]
    drawn = [
        heat(view.pixels, salience, view.entering[layer], grid=grid, scale=scale),
        survivors(view.pixels, view.kept(layer), grid=grid, scale=scale),
        mosaic(view.pixels, view.leaving[layer], grid=grid, scale=scale),
    ]
    return [as_strip(picture, view.moments) for picture in drawn]


def layer_sheet(view: ImageView, path: str | os.PathLike[str]) -> Path:
    """Write the sheet as PNG: input, predictions, tokens per layer, then every layer; for a video a strip per layer."""
    video = view.moments > 1
    layers = shown_layers(view.depth, MOST_LAYERS_OF_A_VIDEO if video else MOST_LAYERS)
    pictures = [layer_pictures(view, layer, FRAME if video else TILE) for layer in layers]
    words = [(f"layer {layer}", f"{view.counts[layer]} tokens", "") for layer in layers]
    if video:
        tiles, across_titles, down_titles = pictures, list(KINDS), words
    else:
        tiles = [list(row) for row in zip(*pictures, strict=True)]
        across_titles, down_titles = words, list(KINDS)
    wide, high = tiles[0][0].size
    across = 2 * MARGIN + LEFT + len(tiles[0]) * (wide + GAP) - GAP
    across = max(across, 1250)
    down = HEADER + 2 * MARGIN + ABOVE + len(tiles) * (high + GAP)
    with drawing(path, across, down) as figure:
        page = TextFigure(figure, across, down)
        _draw_header(page, view)
        for row, strip in enumerate(tiles):
            y = HEADER + MARGIN + ABOVE + row * (high + GAP)
            page.write_lines(down_titles[row], MARGIN, y + 22)
            for column, picture in enumerate(strip):
                x = MARGIN + LEFT + column * (wide + GAP)
                figure.figimage(np.asarray(picture), xo=x, yo=down - y - high, origin="upper")
                if row == 0:
                    title = "  ".join(word for word in across_titles[column][: 1 if video else 2])
                    page.write(title, x, HEADER + MARGIN + ABOVE - 8, size=8.5)
    return Path(path)


def _draw_header(page: "TextFigure", view: ImageView) -> None:
    """The input, what the model says before and after, and the number of tokens after every layer."""
    figure, across, down = page.figure, page.across, page.down
    height = HEADER - 52
    tall = view.pixels.shape[1] // view.moments
    shown = min(view.moments, 4)
    step = view.moments // shown
    x = MARGIN
    for moment in range(0, shown * step, step):
        frame = view.pixels[:, moment * tall : (moment + 1) * tall]
        tile = height if view.moments == 1 else height // 2
        size = (round(tile * frame.shape[2] / frame.shape[1]), tile)
        figure.figimage(np.asarray(resized(frame, size)), xo=x, yo=down - 52 - tile, origin="upper")
        x += size[0] + GAP
    title = f"{shorten(view.name, 60, placeholder=' …')}  ·  {view.method}  ·  {view.cut:.0%} of the compute saved"
    page.write(title, MARGIN, 34, size=12, bold=True)
    for line, (heading, lines) in enumerate((("before merging", view.before), ("after merging", view.after))):
        at = x + 16, 74 + line * (height // 2)
        page.write(heading, *at, size=9, colour=FAINT)
        for number, text in enumerate(lines[:3]):
            page.write(shorten(text, 40, placeholder=" …"), at[0], at[1] + 24 * (number + 1), bold=number == 0)
    left = x + 400
    axes = figure.add_axes((left / across, 1 - (HEADER - 22) / down, (across - MARGIN - left) / across, 148 / down))
    counts = (view.patches, *view.counts)
    axes.bar(range(len(counts)), counts, color=COLOURS[0], width=0.72)
    for at, count in enumerate(counts):
        axes.text(at, count + 0.02 * view.patches, str(count), ha="center", fontsize=7.5, color=TEXT)
    axes.set_xticks(range(len(counts)), ["in", *map(str, range(view.depth))])
    axes.set_title("tokens after each layer", fontsize=9, color=FAINT, loc="left", pad=12)
    axes.tick_params(colors=TEXT, labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.yaxis.set_visible(False)


@dataclass(frozen=True)
class TextFigure:
    """A figure of `across` x `down` pixels; text is placed in pixels from the top left."""

    figure: Figure
    across: int
    down: int

    def write(self, text: str, x: int, y: int, *, size: float = 9.5, bold: bool = False, colour: str = TEXT) -> None:
        """Write a line of plain text."""
        weight = "bold" if bold else "normal"
        at = x / self.across, 1 - y / self.down
        self.figure.text(*at, text, va="baseline", fontsize=size, fontweight=weight, color=colour, parse_math=False)

    def write_lines(self, lines: Sequence[str], x: int, y: int) -> None:
        """Write a heading and smaller lines below it."""
        heading, *rest = lines
        self.write(heading, x, y, size=10.5, bold=True)
        for number, line in enumerate(rest, 1):
            self.write(line, x, y + 22 * number, size=8, colour=FAINT)
