"""Attention of packed images in plain torch."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from adamerge.runtime.packed.layout import Layout, PackedHeads, PerRow

# Up to how many tokens attention by products can be the quicker one.
MOST_TOKENS_BY_PRODUCTS = 256


def attend_each(
    query: PackedHeads, key: PackedHeads, value: PackedHeads, layout: Layout, scale: float, size: PerRow | None
) -> PackedHeads:
    """Attention of every image's queries to its own keys; log `size` is added to the scores.  Rows of nobody get 0.

    Images attend one after the other, unless all have the same length and torch's own attention takes them at once.
    """
    if layout.uniform and layout.total and not _products_are_faster(query, layout.longest):
        images = (layout.images, layout.longest)
        q, k, v = (side[: layout.total].unflatten(0, images).transpose(1, 2) for side in (query, key, value))
        bias = None if size is None else size[: layout.total].log().to(q.dtype).view(layout.images, 1, 1, -1)
        attended = scaled_dot_product_attention(q, k, v, bias, scale=scale).transpose(1, 2).flatten(0, 1)
        spare = len(query) - layout.total
        return torch.nn.functional.pad(attended, (0, 0, 0, 0, 0, spare)) if spare else attended
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for begin, end in pairwise(layout.offsets.tolist()):
        q, k, v = (side[begin:end].transpose(0, 1) for side in (query, key, value))
        # A piece of a longer array of biases would lie where attention on CUDA cannot read it.
        bias = None if size is None else size[begin:end].log().to(q.dtype)
        # By its own length: how an image is computed must not depend on its neighbours.
        attend = _attend_by_products if _products_are_faster(query, end - begin) else _attend
        out[begin:end] = attend(q, k, v, scale, bias).transpose(0, 1)
    out[layout.total :] = 0
    return out


def _products_are_faster(query: PackedHeads, tokens: int) -> bool:
    """Whether attention as two products beats torch's own, which takes few queries at a time when there are few.

    So it was on two and four cores of two makers; many cores, with less than two heads each, have too little to do
    in one image.  Half precision would round the scores.
    """
    wide, few = query.dtype in (torch.float32, torch.float64), tokens <= MOST_TOKENS_BY_PRODUCTS
    return query.device.type == "cpu" and wide and few and query.shape[1] >= 2 * torch.get_num_threads()


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Attention within one image, `(heads, tokens, k)` in and out."""
    added = None if bias is None else bias[None, None, None]
    return scaled_dot_product_attention(query[None], key[None], value[None], added, scale=scale)[0]


def _attend_by_products(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """The same by two products and a softmax between them."""
    added = query.new_zeros(()) if bias is None else bias
    scores = torch.baddbmm(added, query, key.mT, beta=0 if bias is None else 1, alpha=scale)
    return torch.bmm(scores.softmax(-1), value)
