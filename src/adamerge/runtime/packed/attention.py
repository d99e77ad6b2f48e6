"""Attention over packed tokens in plain torch: every image attends to its own tokens."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from adamerge.runtime.packed.layout import Layout, PackedHeads, PerRow

# Above this many tokens, torch's own attention is faster than two matrix products.
MOST_TOKENS_BY_PRODUCTS = 256


def attend_each(
    query: PackedHeads, key: PackedHeads, value: PackedHeads, layout: Layout, scale: float, size: PerRow | None
) -> PackedHeads:
    """Attention of every image's queries to its own keys: `(total, heads, k)` in and out.

    `size` makes it proportional: its logarithm is added to the scores of each key.  Rows after the last image get 0.
    If all images have the same length and torch's own attention is used, one call takes them all; otherwise images
    are computed in a loop.
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
        # Computed per image: a slice of one long bias array is not aligned as attention on CUDA needs it.
        bias = None if size is None else size[begin:end].log().to(q.dtype)
        # Chosen by this image's own length, so that its result does not depend on the other images.
        attend = _attend_by_products if _products_are_faster(query, end - begin) else _attend
        out[begin:end] = attend(q, k, v, scale, bias).transpose(0, 1)
    out[layout.total :] = 0
    return out


def _products_are_faster(query: PackedHeads, tokens: int) -> bool:
    """Whether attention by two matrix products is faster than torch's own, whose blocks of queries are then small.

    Measured on CPUs of two makers with two and four cores.  With more threads than half the number of heads, one image
    has too little work for them.  In half precision the products would round the scores.
    """
    exact, short = query.dtype in (torch.float32, torch.float64), tokens <= MOST_TOKENS_BY_PRODUCTS
    return query.device.type == "cpu" and exact and short and query.shape[1] >= 2 * torch.get_num_threads()


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Torch's own attention within one image, `(heads, tokens, k)` in and out; `bias` is `(tokens,)`."""
    added = None if bias is None else bias[None, None, None]
    return scaled_dot_product_attention(query[None], key[None], value[None], added, scale=scale)[0]


def _attend_by_products(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """The same as `_attend`, by two matrix products with a softmax between them."""
    added = query.new_zeros(()) if bias is None else bias
    scores = torch.baddbmm(added, query, key.mT, beta=0 if bias is None else 1, alpha=scale)
    return torch.bmm(scores.softmax(-1), value)
