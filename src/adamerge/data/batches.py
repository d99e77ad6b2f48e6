"""Converts the `images` argument of the library's functions to image batches."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch import Tensor

from adamerge.core.errors import BadImages

Images = Tensor | Iterable[Any]

# A tensor of images is split into batches of this size.
BATCH = 64


def batches(images: Images) -> Iterator[Tensor]:
    """The image batches of a tensor (n, channels, height, width), or of an iterable of batches or (batch, labels)."""
    if isinstance(images, Tensor):
        _check(images)
        yield from images.split(BATCH) if len(images) else ()
        return
    for item in images:
        batch = item[0] if isinstance(item, (tuple, list)) and len(item) else item
        if not isinstance(batch, Tensor):
            raise BadImages(
                "expected a tensor of images, or an iterable of image batches or of (images, labels) pairs; "
                f"it gave a {type(batch).__name__}"
            )
        _check(batch)
        if len(batch):
            yield batch


def number_of_batches(images: Images) -> int | None:
    """The number of batches for progress bars; None if unknown."""
    if isinstance(images, Tensor):
        return -(-len(images) // BATCH)
    return len(images) if isinstance(images, Sized) else None


def _check(batch: Tensor) -> None:
    if batch.dim() not in (4, 5) or not batch.is_floating_point():
        raise BadImages(
            "expected image batches as floating-point tensors (images, channels, height, width), preprocessed for the "
            f"model; got {batch.dtype} of shape {tuple(batch.shape)}. Is the batch dimension or the transform missing?"
        )
