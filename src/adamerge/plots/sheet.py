"""A sheet of pictures: rows and columns with headings above the columns and captions below the pictures."""

import os
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from adamerge.plots.canvas import FAINT, TEXT, drawing

# Pixels.  Five tiles make a figure about 1600 pixels wide: the full width of a README at two pixels per point.
TILE, GAP, MARGIN, HEADER, CAPTION = 306, 14, 20, 74, 44
# A character is about this many pixels wide at the sizes of captions and of headings.
CHARACTER, SMALL_CHARACTER, BOLD_CHARACTER = 11, 9, 14


def tile_scale(width: int, cols: int, tile: int = TILE) -> float:
    """How much to enlarge an image `width` pixels wide, so that its `cols` patches fill a tile."""
    return max(round(tile / cols), 4) / max(width // cols, 1)


def resized(image: Tensor, size: tuple[int, int]) -> Image.Image:
    """An image (3, height, width) in [0, 1] as a picture of `size` (width, height)."""
    pixels = (image.detach().cpu().double().permute(1, 2, 0).clamp(0, 1) * 255).round().byte().numpy()
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def write_sheet(
    path: str | os.PathLike[str],
    strips: Sequence[Sequence[Image.Image]],
    captions: Sequence[Sequence[str]],
    headings: Sequence[tuple[str, str]],
) -> None:
    """Write pictures in rows and columns, unscaled; all have the size of the first.

    `headings` are a title and a subtitle for each column.
    """
    width, height = strips[0][0].size
    across = 2 * MARGIN + len(headings) * (width + GAP) - GAP
    down = HEADER + len(strips) * (height + CAPTION) + MARGIN // 2
    with drawing(path, across, down) as figure:

        def write(x: int, y: int, text: str, character: int, **style: Any) -> None:
            # Titles are plain text: a dollar sign does not start a formula.
            text = shorten(text, max(width // character, 8), placeholder=" …")
            figure.text(x / across, 1 - y / down, text, va="baseline", parse_math=False, **style)

        for column, (heading, subheading) in enumerate(headings):
            x = MARGIN + column * (width + GAP)
            write(x, 34, heading, BOLD_CHARACTER, fontsize=11.5, fontweight="bold", color=TEXT)
            write(x, 60, subheading, SMALL_CHARACTER, fontsize=8.5, color=FAINT)
        for line, (strip, words) in enumerate(zip(strips, captions, strict=True)):
            y = HEADER + line * (height + CAPTION)
            for column, (picture, caption) in enumerate(zip(strip, words, strict=True)):
                x = MARGIN + column * (width + GAP)
                figure.figimage(np.asarray(picture), xo=x, yo=down - y - height, origin="upper")
                write(x, y + height + 24, caption, CHARACTER, fontsize=9.5, color=TEXT)
