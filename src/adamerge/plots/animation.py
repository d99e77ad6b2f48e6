"""An animation over the layers: the input beside its tokens, one picture for each layer."""

import os
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from adamerge.core.errors import BadOption
from adamerge.core.files import write_atomically
from adamerge.plots.canvas import FAINT, TEXT
from adamerge.plots.image_view import ImageView
from adamerge.plots.layer_sheet import as_strip
from adamerge.plots.one_image import mosaic
from adamerge.plots.sheet import resized, tile_scale

TILE, FRAME, MARGIN, CAPTION = 336, 150, 12, 40
# Milliseconds: each layer, and the last one.
LAYER_TIME, LAST_TIME = 500, 1800
FORMATS = {".webp": "WEBP", ".gif": "GIF"}


def animation(view: ImageView, path: str | os.PathLike[str]) -> Path:
    """Write the animation as WebP or GIF, by the end of the path; it repeats for ever."""
    kind = FORMATS.get(Path(path).suffix.lower())
    if kind is None:
        raise BadOption(f"an animation is written as {' or '.join(FORMATS)}; got the path {str(path)!r}")
    tile = TILE if view.moments == 1 else FRAME
    scale = tile_scale(view.pixels.shape[2], view.grid[1], tile)
    size = mosaic(view.pixels, view.leaving[0], grid=view.grid, scale=scale).size
    start = as_strip(resized(view.pixels, size), view.moments)
    pictures = [_page(start, start, f"{view.name}: {view.patches} patches", view.method)]
    for layer, count in enumerate(view.counts):
        drawn = as_strip(mosaic(view.pixels, view.leaving[layer], grid=view.grid, scale=scale), view.moments)
        pictures.append(_page(start, drawn, f"after layer {layer}: {count} of {view.patches} tokens", view.method))
    content = BytesIO()
    times = [LAYER_TIME] * (len(pictures) - 1) + [LAST_TIME]
    options = {"quality": 82, "method": 4} if kind == "WEBP" else {}
    pictures[0].save(content, kind, save_all=True, append_images=pictures[1:], duration=times, loop=0, **options)
    write_atomically(path, content.getvalue())
    return Path(path)


def _page(left: Image.Image, right: Image.Image, caption: str, method: str) -> Image.Image:
    """The input and the tokens with a line of text: side by side, or one above the other for a video."""
    wide = left.width > 2 * left.height
    width = (left.width if wide else 2 * left.width + MARGIN) + 2 * MARGIN
    height = (2 * left.height + MARGIN if wide else left.height) + 2 * MARGIN + CAPTION
    page = Image.new("RGB", (width, height), "white")
    page.paste(left, (MARGIN, MARGIN))
    page.paste(right, (MARGIN, 2 * MARGIN + left.height) if wide else (2 * MARGIN + left.width, MARGIN))
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(18)
    pen.text((MARGIN, height - CAPTION), caption, fill=TEXT, font=font)
    pen.text((width - MARGIN, height - CAPTION), method, fill=FAINT, font=font, anchor="ra")
    return page
