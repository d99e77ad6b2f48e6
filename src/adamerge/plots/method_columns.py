"""Methods side by side: each row is an image, each column the tokens that a method leaves of it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from adamerge.core.errors import BadImages, BadOption
from adamerge.plots.one_image import grid_of, mosaic
from adamerge.plots.sheet import resized, tile_scale, write_sheet


@dataclass(frozen=True)
class MethodColumn:
    """What one method left of every image: its slots, a caption for each image, and a subtitle for the method."""

    slots: Int[Tensor, "images patches"]
    captions: Sequence[str]
    subtitle: str = ""


def side_by_side(
    images: Tensor,
    columns: Mapping[str, MethodColumn],
    path: str | os.PathLike[str],
    *,
    titles: Sequence[str],
    grid: tuple[int, int] | None = None,
) -> Path:
    """One row per image: the image, then its tokens after the last layer by each method.

    Args:
        images: (images, 3, height, width) in [0, 1].
        columns: the methods by name; slots are `trace.slots()` of the merged model on these images.
        path: the PNG to write.
        titles: a caption for each image.
        grid: rows and columns of patches; square unless given.
    """
    if images.dim() != 4 or len(images) == 0 or not columns:
        raise BadImages(f"expected images as (images, 3, height, width) and a method; got shape {tuple(images.shape)}")
    given = {name: (len(column.slots), len(column.captions)) for name, column in columns.items()}
    if set(given.values()) != {(len(images), len(images))} or len(titles) != len(images):
        raise BadOption(
            f"expected slots, captions and titles for each of the {len(images)} images; got {len(titles)} titles and "
            f"(slots, captions) of {given}"
        )
    rows, cols = grid_of(next(iter(columns.values())).slots.shape[1], grid)
    scale = tile_scale(images.shape[3], cols)
    strips, captions = [], []
    for i, image in enumerate(images):
        merged = [mosaic(image, column.slots[i], grid=grid, scale=scale) for column in columns.values()]
        strips.append([resized(image, merged[0].size), *merged])
        captions.append([titles[i], *(column.captions[i] for column in columns.values())])
    headings = [("Image", f"{rows} × {cols} patches"), *((name, one.subtitle) for name, one in columns.items())]
    write_sheet(path, strips, captions, headings)
    return Path(path)
