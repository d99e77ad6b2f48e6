"""The layout of a packed array: which rows belong to which image, and the ways to and from padded arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.core.types import AllTokens, Counts

Packed = Float[Tensor, "total d"]
PackedHeads = Float[Tensor, "total h k"]
PerRow = Float[Tensor, " total"]
RowSlots = Int[Tensor, " total"]


@dataclass(frozen=True)
class Layout:
    """Image `b` owns rows `offsets[b] .. offsets[b + 1] - 1`: its prefix first, then its patches.

    `total` is the number of rows and `longest` the most tokens of an image.  Both are Python integers, so that reading
    them needs no synchronisation with the device.  They are upper bounds while the counts of a merge have not been read
    back from the device; rows after the last image are unused.  `uniform` is True if every image is known to have
    `longest` tokens.
    """

    offsets: Int[Tensor, " bounds"]
    prefix: int
    total: int
    longest: int
    uniform: bool = False

    @property
    def most(self) -> int:
        """The most patch tokens an image has."""
        return self.longest - self.prefix

    @property
    def images(self) -> int:
        return len(self.offsets) - 1

    @property
    def patches(self) -> Counts:
        """How many patch tokens each image has."""
        return self.offsets.diff() - self.prefix

    @cached_property
    def bounds(self) -> list[int]:
        """The offsets as Python integers; reading them synchronises with the device."""
        return self.offsets.tolist()

    @cached_property
    def counts(self) -> list[int]:
        """How many patch tokens each image has, as Python integers."""
        return [end - begin - self.prefix for begin, end in pairwise(self.bounds)]

    @cached_property
    def first_patches(self) -> np.ndarray:
        """The row of the first patch token of each image, `(b, 1)`."""
        return np.array(self.bounds[:-1], dtype=np.int64)[:, None] + self.prefix


def uniform_layout(images: int, tokens: int, prefix: int, device: torch.device) -> Layout:
    """The layout of images that all have `tokens` tokens."""
    offsets = torch.arange(0, (images + 1) * tokens, max(tokens, 1), device=device, dtype=torch.int32)
    return Layout(offsets, prefix, images * tokens, tokens, uniform=True)


def padded_rows(layout: Layout, width: int) -> tuple[Int[Tensor, "b w"], Tensor]:
    """For a padded `(b, width)` array of patch tokens: the packed row of each entry, and a mask of those that exist."""
    positions = torch.arange(width, device=layout.offsets.device)
    valid = positions < layout.patches[:, None]
    row = layout.offsets[:-1, None].long() + layout.prefix + positions
    return torch.where(valid, row, 0), valid


def pad(packed: Tensor, layout: Layout, width: int, fill: float = 0.0) -> Tensor:
    """Per-token values, packed `(total, …)`, as a padded `(b, width, …)` array of the patches alone.

    `fill` is written into the padding.  The result is a view of `packed` when nothing has to be padded.
    """
    if layout.uniform and width == layout.most and layout.images:
        return packed[: layout.total].unflatten(0, (layout.images, layout.longest))[:, layout.prefix :]
    if packed.device.type == "cpu":
        padded = packed.new_empty((layout.images, width, *packed.shape[1:]))
        for image, (begin, end) in zip(padded, pairwise(layout.offsets.tolist()), strict=True):
            count = end - begin - layout.prefix
            image[:count] = packed[begin + layout.prefix : end]
            image[count:] = fill
        return padded
    # On other devices a gather is used: a loop would have to read the offsets back.
    row, valid = padded_rows(layout, width)
    return torch.where(valid.view(*valid.shape, *[1] * (packed.dim() - 1)), packed[row], fill)


def round_up_rows(total: int) -> int:
    """The number of rows to allocate for `total` tokens, rounded up so that few different numbers occur.

    oneDNN compiles and caches a kernel for each number of rows; fewer numbers mean fewer compilations.  At most seven
    rows, or two percent of them, stay unused.
    """
    step = max(8, 1 << max(total.bit_length() - 7, 0))
    return -(-total // step) * step


def token_index(layout: Layout) -> Int[Tensor, " total"] | None:
    """The indices of the tokens in a padded `(b, longest, …)` array with its first two dimensions flattened.

    None if the array has no padding.
    """
    if layout.uniform:
        return None
    valid = torch.arange(layout.longest, device=layout.offsets.device) < layout.offsets.diff()[:, None]
    return valid.flatten().nonzero()[:, 0]


def unpad(padded: Tensor, tokens: Int[Tensor, " total"] | None) -> Tensor:
    """Per-token values, padded `(b, longest, …)`, as a packed `(total, …)` array; `tokens` is from `token_index`."""
    return padded.flatten(0, 1) if tokens is None else padded.flatten(0, 1).index_select(0, tokens)


def ragged_layout(counts: Sequence[int], prefix: int, device: torch.device) -> Layout:
    """The layout of images with `counts` patch tokens each."""
    bounds = [0, *accumulate(count + prefix for count in counts)]
    longest, total = max(counts, default=0) + prefix, bounds[-1]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    layout = Layout(offsets, prefix, total, longest, uniform=total == longest * len(counts))
    # They need not be read back.
    vars(layout).update(bounds=bounds, counts=[*counts])
    return layout


def unfold(x: Packed, history: Int[Tensor, "b patches"], layout: Layout) -> AllTokens:
    """Packed tokens as `(b, prefix + patches, d)`: every original patch gets a copy of the token it was merged into."""
    images, patches = history.shape
    begin = layout.offsets[:-1, None]
    head = torch.arange(layout.prefix, device=begin.device).expand(images, layout.prefix)
    row = begin + torch.cat([head, history + layout.prefix], 1)
    return x.index_select(0, row.flatten()).view(images, layout.prefix + patches, x.shape[1])
