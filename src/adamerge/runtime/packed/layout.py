"""Where each image's tokens lie in one packed array."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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

    `total` and `longest` are Python numbers, so that nobody asks the device for them.  They are exact, or upper bounds
    where the counts of a merge have not come back from the device yet; rows behind the last image belong to nobody.
    `uniform` says that every image is known to have `longest` tokens.
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


def uniform_layout(images: int, tokens: int, prefix: int, device: torch.device) -> Layout:
    """The layout of images that all have `tokens` tokens."""
    offsets = torch.arange(0, (images + 1) * tokens, max(tokens, 1), device=device, dtype=torch.int32)
    return Layout(offsets, prefix, images * tokens, tokens, uniform=True)


def padded_rows(layout: Layout, width: int) -> tuple[Int[Tensor, "b w"], Tensor]:
    """For a padded array of `width` patch tokens: the packed row of each place, and whether there is a token."""
    places = torch.arange(width, device=layout.offsets.device)
    there = places < layout.patches[:, None]
    row = layout.offsets[:-1, None].long() + layout.prefix + places
    return torch.where(there, row, 0), there


def pad(packed: Tensor, layout: Layout, width: int, fill: float = 0.0) -> Tensor:
    """Per-token values of the patches, packed `(total, …)`, as a padded `(b, width, …)` array.

    A view where there is nothing to pad.
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
    # Elsewhere counts are on the device, where nobody asks for them.
    row, there = padded_rows(layout, width)
    return torch.where(there.view(*there.shape, *[1] * (packed.dim() - 1)), packed[row], fill)


def round_up_rows(total: int) -> int:
    """A number of rows for so many tokens, one of few: libraries that make code for each number seldom make it anew.

    At most seven rows or two percent of them stay empty.
    """
    step = max(8, 1 << max(total.bit_length() - 7, 0))
    return -(-total // step) * step


def token_index(layout: Layout) -> Int[Tensor, " total"] | None:
    """Where the tokens lie in a padded `(b, longest, …)` array whose rows are counted through; None: everywhere."""
    if layout.uniform:
        return None
    there = torch.arange(layout.longest, device=layout.offsets.device) < layout.offsets.diff()[:, None]
    return there.flatten().nonzero()[:, 0]


def unpad(padded: Tensor, where: Int[Tensor, " total"] | None) -> Tensor:
    """Per-token values, padded `(b, longest, …)`, as a packed `(total, …)` array, by what `inside` says."""
    return padded.flatten(0, 1) if where is None else padded.flatten(0, 1).index_select(0, where)


def ragged_layout(counts: Sequence[int], prefix: int, device: torch.device) -> Layout:
    """The layout of images with so many patches each."""
    ends = torch.tensor([0, *counts], device=device) + prefix
    ends[0] = 0
    longest = max(counts, default=0) + prefix
    total = sum(counts) + prefix * len(counts)
    return Layout(ends.cumsum(0).int(), prefix, total, longest, uniform=total == longest * len(counts))


def unfold(x: Packed, history: Int[Tensor, "b patches"], layout: Layout) -> AllTokens:
    """Packed tokens as `(b, prefix + patches, d)`: every patch gets a copy of the token it became part of."""
    images, patches = history.shape
    begin = layout.offsets[:-1, None]
    head = torch.arange(layout.prefix, device=begin.device).expand(images, layout.prefix)
    row = begin + torch.cat([head, history + layout.prefix], 1)
    return x.index_select(0, row.flatten()).view(images, layout.prefix + patches, x.shape[1])
