"""The three layers of queries, keys and values as one, so that one product computes all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adamerge.runtime.block_view import LinearParams, PlainBlockParams, SplitBlockParams


def join_params(blocks: Sequence[PlainBlockParams | SplitBlockParams | None]) -> list[PlainBlockParams | None]:
    """Blocks in which one layer gives queries, keys and values.

    The copies of all blocks are one operation.  They are repeated at every pass, and by every replay of a CUDA graph,
    so that changes of the weights are always seen.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    joined = [_join(block, copies) if isinstance(block, SplitBlockParams) else block for block in blocks]
    if copies:
        torch._foreach_copy_([to for to, _ in copies], [part for _, part in copies])  # pyright: ignore
    return joined


def _join(block: SplitBlockParams, copies: list[tuple[Tensor, Tensor]]) -> PlainBlockParams:
    """A block with one layer for three, whose memory `copies` will fill."""
    rows = [len(layer.weight) for layer in block.qkv]
    first = block.qkv[0].weight.detach()
    weight, bias = first.new_empty(sum(rows), first.shape[1]), None
    copies += zip(weight.split(rows), (layer.weight.detach() for layer in block.qkv), strict=True)
    if any(layer.bias is not None for layer in block.qkv):
        # A layer without a bias has a bias of 0.
        missing = any(layer.bias is None for layer in block.qkv)
        bias = first.new_zeros(sum(rows)) if missing else first.new_empty(sum(rows))
        parts = zip(bias.split(rows), (layer.bias for layer in block.qkv), strict=True)
        copies += [(to, part.detach()) for to, part in parts if part is not None]
    return block.with_qkv(LinearParams(weight, bias))
