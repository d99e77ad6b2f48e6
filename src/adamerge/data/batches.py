"""Whatever a user passes as images, as an iterable of image batches."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch import Tensor

from adamerge.core.errors import BadImages

Images = Tensor | Iterable[Any]

# How many images of a plain tensor go through a model at once.
BATCH = 64


def batches(images: Images) -> Iterator[Tensor]:
    """The image batches of a tensor `(images, 3, h, w)`, or of an iterable of batches or of `(batch, labels)`."""
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
    """How many batches there will be, if that is known; for progress bars."""
    if isinstance(images, Tensor):
        return -(-len(images) // BATCH)
    return len(images) if isinstance(images, Sized) else None


def _check(batch: Tensor) -> None:
    if batch.dim() not in (4, 5) or not batch.is_floating_point():
        raise BadImages(
            "expected image batches as floating-point tensors (images, channels, height, width), preprocessed for the "
            f"model; got {batch.dtype} of shape {tuple(batch.shape)}. Is the batch dimension or the transform missing?"
        )
