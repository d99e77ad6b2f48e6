"""Converts the `images` and `data` arguments of the library's functions to batches of images and labels."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from adamerge.core.errors import BadImages

Images = Tensor | Iterable[Any]

# A tensor of images is split into batches of this size.
BATCH = 64
# Where a batch that is a dict may have its images and its labels; transformers and datasets use the first of each.
IMAGE_KEYS = ("pixel_values", "images", "image")
LABEL_KEYS = ("labels", "label")


def batches(images: Images) -> Iterator[Tensor]:
    """The image batches of a tensor (n, channels, height, width), or of an iterable.

    The iterable gives batches, pairs of (batch, labels), or dicts with the batch under one of `IMAGE_KEYS`.
    """
    if isinstance(images, Tensor):
        _check(images)
        yield from images.split(BATCH) if len(images) else ()
        return
    for item in images:
        batch = _images_of(item)
        if len(batch):
            yield batch


def labelled_batches(data: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The (images, labels) of an iterable of such pairs, or of dicts with `IMAGE_KEYS` and `LABEL_KEYS`."""
    for item in data:
        images = _images_of(item)
        if isinstance(item, Mapping):
            labels = _under(item, LABEL_KEYS, "labels")
        elif isinstance(item, (tuple, list)) and len(item) > 1:
            labels = item[1]
        else:
            raise BadImages(
                "expected batches of (images, labels), or dicts with pixel_values and labels; it gave images without "
                "labels"
            )
        labels = torch.as_tensor(labels)
        if labels.shape != images.shape[:1] or labels.is_floating_point():
            raise BadImages(
                f"expected one whole number as the label of each of {len(images)} images; got {labels.dtype} of shape "
                f"{tuple(labels.shape)}"
            )
        yield images, labels


def number_of_batches(images: Images) -> int | None:
    """The number of batches for progress bars; None if unknown."""
    if isinstance(images, Tensor):
        return -(-len(images) // BATCH)
    return len(images) if isinstance(images, Sized) else None


def _images_of(item: Any) -> Tensor:
    """The images of a batch, of a pair (images, labels) or of a dict."""
    if isinstance(item, Mapping):
        batch = _under(item, IMAGE_KEYS, "images")
    else:
        batch = item[0] if isinstance(item, (tuple, list)) and len(item) else item
    if not isinstance(batch, Tensor):
        raise BadImages(
            "expected a tensor of images, or an iterable of image batches, of (images, labels) pairs or of dicts with "
            f"pixel_values; it gave a {type(batch).__name__}"
        )
    _check(batch)
    return batch


def _under(batch: Mapping[str, Any], keys: tuple[str, ...], what: str) -> Any:
    """The value under the first of `keys` that the batch has."""
    for key in keys:
        if key in batch:
            return batch[key]
    raise BadImages(
        f"a batch that is a dict has its {what} under {' or '.join(map(repr, keys))}; this one has "
        f"{', '.join(map(repr, batch)) or 'no keys'}"
    )


def _check(batch: Tensor) -> None:
    if batch.dim() not in (4, 5) or not batch.is_floating_point():
        raise BadImages(
            "expected image batches as floating-point tensors (images, channels, height, width), preprocessed for the "
            f"model; got {batch.dtype} of shape {tuple(batch.shape)}. Is the batch dimension or the transform missing?"
        )
