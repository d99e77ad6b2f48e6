"""Attention over packed tokens in plain torch: every image attends to its own tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from adamerge.core.types import PerToken
from adamerge.runtime.packed import products
from adamerge.runtime.packed.layout import Layout, PackedHeads, PerRow
from adamerge.runtime.packed.products import Weights, attend_by_products, products_known


@dataclass(frozen=True)
class AttentionReader:
    """Writes down how much attention each patch token gets, `(b, patches)`, while attention is computed.

    `queries` says whose attention: that of the class token, or of all tokens.  It is averaged over heads.
    """

    queries: Literal["class token", "all tokens"]
    received: PerToken
    prefix: int

    def read(self, images: Sequence[int], lengths: Sequence[int], weights: Weights) -> None:
        """Read the weights of images with these numbers of tokens; what is behind an image's last token is 0.

        The class token's weights are the first.
        """
        if self.queries == "class token":
            shares = weights[:, :, 0, self.prefix : self.prefix + self.received.shape[1]]
            self.received[images, : shares.shape[2]] = shares.mean(1, dtype=self.received.dtype)
            return
        for image, length, own in zip(images, lengths, weights, strict=True):
            row = self.received[image, : length - self.prefix]
            torch.sum(own[:, :length, self.prefix : length], (0, 1), dtype=row.dtype, out=row)

    def compute(self, image: int, query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> None:
        """Compute the weights of one image and read them, where attention did not."""
        wide = self.received.dtype
        asking = query[:, :1] if self.queries == "class token" else query
        added = None if bias is None else bias.to(wide)
        weights = _weights(asking.to(wide), key.to(wide), scale, added)
        self.read([image], [weights.shape[2]], weights[None])


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
    computed in a loop, or some at once.  An image's result does not depend on the others.
    """
    # Chosen by each image's own length, so that its result does not depend on the other images.
    by_products = [_by_products(query, count + layout.prefix, reader) for count in layout.counts]
    if layout.uniform and layout.total and not any(by_products):
        return _attend_all(query, key, value, layout, scale, bias, reader)
    attended = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if len(query) > layout.total:
        attended[layout.total :] = 0
    whole = [count == patches for count in layout.counts]
    for unmerged in {*whole}:
        chosen = [image for image, each in enumerate(whole) if each is unmerged and by_products[image]]
        read = None if reader is None else reader.read
        added = None if unmerged else bias
        attend_by_products((query, key, value), attended, layout, chosen, scale, added, read)
    for image in (image for image, chosen in enumerate(by_products) if not chosen):
        rows = slice(*layout.bounds[image : image + 2])
        q, k, v = (side[rows].transpose(0, 1) for side in (query, key, value))
        own = None if bias is None or whole[image] else bias[rows].to(query.dtype)
        if own is not None and own.is_cuda:
            # A copy: a slice of one long array is not aligned as attention on CUDA needs it.
            own = own.clone()
        attended[rows] = _attend(q, k, v, scale, own).transpose(0, 1)
        if reader is not None:
            reader.compute(image, q, k, scale, own)
    return attended


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
    """Whether attention by matrix products is faster than torch's own, in an image with so many tokens.

    Measured on CPUs of two makers with two and four cores.  With as many threads as heads, an image alone has too
    little work for them.
    """
    if query.device.type != "cpu" or not products_known(query.dtype):
        return False
    if reader is not None and reader.queries == "all tokens":
        return True
    few_threads = query.shape[1] // (1 if query.dtype is torch.bfloat16 else 2)
    return tokens <= products.MOST_TOKENS_BY_PRODUCTS and torch.get_num_threads() <= few_threads


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Torch's own attention within one image, `(heads, tokens, k)` in and out; `bias` is `(tokens,)`."""
    added = None if bias is None else bias[None, None, None]
    return scaled_dot_product_attention(query[None], key[None], value[None], added, scale=scale)[0]


def _weights(query: Tensor, key: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """The attention weights within one image, `(heads, queries, tokens)`."""
    added = query.new_zeros(()) if bias is None else bias
    return torch.baddbmm(added, query, key.mT, beta=0 if bias is None else 1, alpha=scale).softmax(-1)
