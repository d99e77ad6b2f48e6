"""Attention on a CPU by matrix products, for some images at once.

torch's own attention computes small blocks of scores one after the other.  Two products and a softmax over whole images
take less time while images are short.  In bfloat16, scores and their softmax are in float32, as in torch's own.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, PackedHeads, PerRow

# Above this many tokens, torch's own attention is faster.
MOST_TOKENS_BY_PRODUCTS = 256
# As many scores are computed at once: they stay in a cache.
MOST_SCORES = 1 << 20
# torch adds up fewer numbers on one thread, in an order that does not depend on how many images there are.
MOST_ON_ONE_THREAD = 32768 - 1
# Images whose lengths differ by less may be computed at once, padded to a multiple of the second number.
NEAR, WIDTHS = 32, 16

# The weights of images that were computed at once, `(b, heads, queries, tokens)`.
Weights = Float[Tensor, "b h q n"]
ReadWeights = Callable[[Sequence[int], Sequence[int], Weights], None]


def products_known(dtype: torch.dtype) -> bool:
    """Whether attention may be computed by products: in bfloat16 where oneDNN computes in it, and not with AMX.

    torch's own attention is fast with AMX, and some versions of oneDNN let a row of a product read the next one there.
    """
    return _half_products() if dtype is torch.bfloat16 else dtype in (torch.float32, torch.float64)


@lru_cache(1)
def _half_products() -> bool:
    supported = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # A version of torch that cannot say whether there is AMX is taken to have it.
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    return supported and not has_amx()


def attend_by_products(
    sides: tuple[PackedHeads, PackedHeads, PackedHeads],
    attended: PackedHeads,
    layout: Layout,
    images: Sequence[int],
    scale: float,
    bias: PerRow | None,
    read: ReadWeights | None,
) -> None:
    """Write the attention of some images into their rows of `attended`.

    `bias` is added to the scores of each key.  `read` gets the weights, with the numbers and the lengths of the images.
    """
    heads, channels = attended.shape[1:]
    for group in _groups(layout, images, heads, channels, attended.dtype):
        lengths = [layout.counts[image] + layout.prefix for image in group]
        begin = layout.bounds[group[0]]
        rows = slice(begin, begin + len(group) * lengths[0])
        if layout.bounds[group[-1]] + lengths[-1] == rows.stop and min(lengths) == max(lengths):
            shape = (len(group), lengths[0])
            own = None if bias is None else bias[rows]
            found, weights = _attend([side[rows] for side in sides], shape, scale, own)
            attended[rows].view(*shape, heads, channels).copy_(found.transpose(1, 2))
        else:
            width = -(-max(lengths) // WIDTHS) * WIDTHS
            index, padding = _padded(layout, group, lengths, width)
            own = padding if bias is None else bias.index_select(0, index).add_(padding)
            taken = [side.index_select(0, index) for side in sides]
            found, weights = _attend(taken, (len(group), width), scale, own)
            for image, length, each in zip(group, lengths, found, strict=True):
                first = layout.bounds[image]
                attended[first : first + length].copy_(each[:, :length].transpose(0, 1))
        if read is not None:
            read(group, lengths, weights)


def _groups(
    layout: Layout, images: Sequence[int], heads: int, channels: int, dtype: torch.dtype
) -> Iterator[Sequence[int]]:
    """Images that are computed at once: of nearly the same length, and few enough for a cache.

    Only where each gets the same bits as alone.
    """
    if len(images) == 1 or dtype is not torch.bfloat16:
        # In float32 the products take so long that it does not matter for how many images they are.
        yield from ([image] for image in images)
        return
    near: dict[int, list[int]] = {}
    lengths = {image: layout.counts[image] + layout.prefix for image in images}
    for image, length in lengths.items():
        near.setdefault(-(-length // NEAR), []).append(image)
    for group in near.values():
        longest = max(lengths[image] for image in group)
        equal = all(lengths[image] == longest for image in group)
        width = longest if equal else -(-longest // WIDTHS) * WIDTHS
        step = images_at_once(width, heads)
        some = min(1 << (len(group) - 1).bit_length(), step)
        threads = torch.get_num_threads()
        each = {lengths[image] for image in group}
        if some > 1 and not all(_same_together(some, width, n, heads, channels, dtype, threads) for n in each):
            step = 1
        for begin in range(0, len(group), step):
            yield group[begin : begin + step]


def images_at_once(tokens: int, heads: int) -> int:
    """How many images with so many tokens are computed at once."""
    return max(min(MOST_SCORES // (heads * tokens * tokens), MOST_ON_ONE_THREAD // (heads * tokens)), 1)


def _padded(layout: Layout, group: Sequence[int], lengths: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """The rows of some images, each with its first row repeated up to `width`, and -inf for those that are repeated."""
    place = np.arange(width)
    exists = place < np.array(lengths)[:, None]
    first = np.array([layout.bounds[image] for image in group])[:, None]
    index, added = first + place * exists, np.where(exists, np.float32(0), np.float32("-inf"))
    return torch.from_numpy(index.ravel()), torch.from_numpy(added.ravel())


def _attend(
    sides: Sequence[PackedHeads], shape: tuple[int, int], scale: float, bias: PerRow | None
) -> tuple[Float[Tensor, "b h n k"], Weights]:
    """The attention of images of the same length, and its weights in float32 or better; `shape` is `(b, n)`."""
    images, tokens = shape
    heads, channels = sides[0].shape[1:]
    wide = torch.promote_types(sides[0].dtype, torch.float32)
    query, key = (_matrices(side, images, wide) for side in sides[:2])
    value = _matrices(sides[2], images, sides[2].dtype)
    if bias is None:
        scores = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=scale)
    else:
        added = bias.to(wide)
        if images > 1:
            added = added.view(images, 1, 1, tokens).expand(images, heads, 1, tokens).reshape(-1, 1, tokens)
        scores = torch.baddbmm(added, query, key.mT, alpha=scale)
    weights = scores.softmax(-1)
    attended = torch.bmm(weights.to(value.dtype), value)
    return attended.view(images, heads, tokens, channels), weights.view(images, heads, tokens, tokens)


def _matrices(side: PackedHeads, images: int, dtype: torch.dtype) -> Float[Tensor, "bh n k"]:
    """A matrix for each image and head."""
    if images == 1:
        return side.transpose(0, 1).to(dtype)
    rows, heads, channels = side.shape
    by_head = side.view(images, rows // images, heads, channels).transpose(1, 2)
    shape = (images * heads, rows // images, channels)
    if side.dtype is dtype:
        return by_head.reshape(shape)
    return by_head.to(dtype, memory_format=torch.contiguous_format).view(shape)


@lru_cache(4096)
def _same_together(
    images: int, width: int, tokens: int, heads: int, channels: int, dtype: torch.dtype, threads: int
) -> bool:
    """Whether this machine computes an image among others and padded to `width` as alone, to the bit.

    In which order a library adds up is its own affair, so this is tried, once for each shape.
    """
    random = torch.Generator().manual_seed(tokens)
    # As rows of a layer's output: queries, keys and values beside each other.
    rows = torch.randn(tokens, 3, heads, channels, generator=random).to(dtype)
    bias = torch.rand(tokens, generator=random)
    many = rows.new_full((images, width, *rows.shape[1:]), float("nan"))
    many[-1], many[-1, :tokens] = rows[0], rows
    added = torch.full((images, width), float("-inf"))
    added[-1, :tokens] = bias
    alone, weights = _attend(rows.unbind(1), (1, tokens), 0.1, bias)
    among, together = _attend(many.flatten(0, 1).unbind(1), (images, width), 0.1, added.view(-1))
    same = torch.equal(among[-1, :, :tokens], alone[0])
    return same and torch.equal(together[-1, :, :tokens, :tokens], weights[0])
