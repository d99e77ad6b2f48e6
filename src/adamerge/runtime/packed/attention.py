"""Attention over packed tokens in plain torch: every image attends to its own tokens."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from adamerge.core.types import PerToken
from adamerge.runtime.packed.layout import Layout, PackedHeads, PerRow

# Above this many tokens, torch's own attention is faster than two matrix products.
MOST_TOKENS_BY_PRODUCTS = 256


@dataclass(frozen=True)
class AttentionReader:
    """Writes down how much attention each patch token gets, `(b, patches)`, while attention is computed.

    `queries` says whose attention: that of the class token, or of all tokens.  It is averaged over heads.
    """

    queries: Literal["class token", "all tokens"]
    received: PerToken
    prefix: int

    def read(self, image: int, weights: Tensor) -> None:
        """Read the weights of one image, `(heads, queries, tokens)`; the class token's are the first."""
        patches = weights[:, :, self.prefix :]
        row = self.received[image, : patches.shape[2]]
        if self.queries == "class token":
            torch.mean(patches[:, 0], 0, dtype=row.dtype, out=row)
        else:
            torch.sum(patches, (0, 1), dtype=row.dtype, out=row)

    def compute(self, image: int, query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> None:
        """Compute the weights of one image and read them, where attention did not."""
        wide = self.received.dtype
        asking = query[:, :1] if self.queries == "class token" else query
        added = None if bias is None else bias.to(wide)
        self.read(image, _weights(asking.to(wide), key.to(wide), scale, added))


def attend_each(
    query: PackedHeads, key: PackedHeads, value: PackedHeads, layout: Layout, scale: float, size: PerRow | None
) -> PackedHeads:
    """Attention of every image's queries to its own keys: `(total, heads, k)` in and out.

    `size` makes it proportional: its logarithm is added to the scores of each key.  Rows after the last image get 0.
    """
    return attend_with_bias(query, key, value, layout, scale, None if size is None else size.log())


def attend_with_bias(
    query: PackedHeads,
    key: PackedHeads,
    value: PackedHeads,
    layout: Layout,
    scale: float,
    bias: PerRow | None,
    patches: int | None = None,
    reader: AttentionReader | None = None,
) -> PackedHeads:
    """As `attend_each`, with what is added to the scores of each key.

    An image that still has all of its `patches` patch tokens merged nothing, and nothing is added.
    If all images have the same length and torch's own attention is used, one call takes them all; otherwise images are
    computed in a loop.  An image's result does not depend on the others.
    """
    if layout.uniform and layout.total and not _by_products(query, layout.longest, reader):
        return _attend_all(query, key, value, layout, scale, bias, reader)
    spare = len(query) - layout.total
    lengths = [count + layout.prefix for count in layout.counts]
    q, k, v = (side.transpose(0, 1).split([*lengths, spare], 1) for side in (query, key, value))
    added = None if bias is None else bias.to(query.dtype).split([*lengths, spare])
    pieces = []
    for image, length in enumerate(lengths):
        whole = patches is not None and length == layout.prefix + patches
        own = None if added is None or whole else added[image]
        if own is not None and own.is_cuda:
            # A copy: a slice of one long array is not aligned as attention on CUDA needs it.
            own = own.clone()
        # Chosen by this image's own length, so that its result does not depend on the other images.
        if _by_products(query, length, reader):
            weights = _weights(q[image], k[image], scale, own)
            pieces.append(torch.bmm(weights, v[image]))
            if reader is not None:
                reader.read(image, weights)
            continue
        pieces.append(_attend(q[image], k[image], v[image], scale, own))
        if reader is not None:
            reader.compute(image, q[image], k[image], scale, own)
    if spare or not pieces:
        pieces.append(query.new_zeros((query.shape[1], spare, query.shape[2])))
    return torch.cat([piece.transpose(0, 1) for piece in pieces])


def _attend_all(
    query: PackedHeads,
    key: PackedHeads,
    value: PackedHeads,
    layout: Layout,
    scale: float,
    bias: PerRow | None,
    reader: AttentionReader | None,
) -> PackedHeads:
    """One call of torch's own attention for images of the same length."""
    rows, spare = layout.total, len(query) - layout.total
    if spare:
        query, key, value = query[:rows], key[:rows], value[:rows]
        bias = None if bias is None else bias[:rows]
    shape = (layout.images, layout.longest, *query.shape[1:])
    q, k, v = (side.view(shape).transpose(1, 2) for side in (query, key, value))
    added = None if bias is None else bias.to(q.dtype).view(layout.images, 1, 1, -1)
    attended = scaled_dot_product_attention(q, k, v, added, scale=scale).transpose(1, 2).flatten(0, 1)
    for image in range(layout.images if reader is not None else 0):
        assert reader is not None
        reader.compute(image, q[image], k[image], scale, None if added is None else added[image, 0, 0])
    return torch.nn.functional.pad(attended, (0, 0, 0, 0, 0, spare)) if spare else attended


def _by_products(query: PackedHeads, tokens: int, reader: AttentionReader | None) -> bool:
    """Whether attention by two matrix products is faster than torch's own, whose blocks of queries are then small.

    Measured on CPUs of two makers with two and four cores.  With more threads than half the number of heads, one image
    has too little work for them.  In half precision the products would round the scores.
    """
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64):
        return False
    if reader is not None and reader.queries == "all tokens":
        return True
    return tokens <= MOST_TOKENS_BY_PRODUCTS and query.shape[1] >= 2 * torch.get_num_threads()


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Torch's own attention within one image, `(heads, tokens, k)` in and out; `bias` is `(tokens,)`."""
    added = None if bias is None else bias[None, None, None]
    return scaled_dot_product_attention(query[None], key[None], value[None], added, scale=scale)[0]


def _weights(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """The attention weights within one image, `(heads, queries, tokens)`."""
    added = query.new_zeros(()) if bias is None else bias
    return torch.baddbmm(added, query, key.mT, beta=0 if bias is None else 1, alpha=scale).softmax(-1)
