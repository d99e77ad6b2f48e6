"""The entropy of every token's attention, averaged over heads before, without an n by n array in memory."""

from itertools import pairwise
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, PackedHeads, PerRow
from adamerge.runtime.triton.kernels.launch import (
    LOG2E,
    blocks,
    head_offset,
    head_rows_if,
    next_pow2,
    pdl_options,
    pdl_wait,
    precision,
    split_head,
)


@triton.jit(do_not_specialize=["total"])
@no_type_check
def _entropy(
    query, key, log_sums, out, logs, offsets, scale, row_stride, head_stride, total,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, TAIL: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, SIZED: tl.constexpr, BY_EIGHT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The entropy in bits of each query's weights, averaged over heads."""
    block, image = tl.program_id(0), tl.program_id(1)
    begin = tl.load(offsets + image)
    n = tl.load(offsets + image + 1) - begin
    pdl_wait(EARLY)
    if block * QUERIES >= n:
        return
    channel, tail = tl.arange(0, DIMS), DIMS + tl.arange(0, TAIL)
    row = block * QUERIES + tl.arange(0, QUERIES)
    sum_ = tl.zeros([QUERIES], tl.float32)
    for start in range(0, n, KEYS):
        column = start + tl.arange(0, KEYS)
        bias = tl.where(column < n, 0.0, float("-inf"))
        if SIZED:
            bias += tl.load(logs + begin + column, mask=column < n, other=0.0)
        weights = tl.zeros([QUERIES, KEYS], tl.float32)
        for head in range(HEADS):
            first = begin.to(tl.int64) * row_stride + head_offset(head, head_stride, BY_EIGHT)
            rows, columns = query + first + row[:, None] * row_stride, key + first + column[:, None] * row_stride
            q = head_rows_if(row < n, rows, channel, DIM)
            k = head_rows_if(column < n, columns, channel, DIM)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if DIM > DIMS:
                q = head_rows_if(row < n, rows, tail, DIM)
                k = head_rows_if(column < n, columns, tail, DIM)
                scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
            here = tl.full([], head, tl.int64) * total + begin
            log_sum = tl.load(log_sums + here + row, mask=row < n, other=float("inf"))
            scores = scores * scale + bias[None, :]
            weights += tl.exp2(scores - log_sum[:, None])
        weights = weights / HEADS
        some = weights > 0.0
        sum_ -= tl.sum(tl.where(some, weights * tl.log2(tl.where(some, weights, 1.0)), 0.0), 1)
    tl.store(out + begin + row, sum_, mask=row < n)


def attention_entropy(
    query: PackedHeads,
    key: PackedHeads,
    log_sums: Float[Tensor, "heads total"],
    layout: Layout,
    scale: float,
    logs: PerRow | None = None,
) -> PerRow:
    """The entropy in bits of each token's attention, averaged over heads.

    `log_sums` and `logs` are those of `attend`.
    """
    rows, heads, dim = query.shape
    out = torch.empty(rows, dtype=torch.float32, device=query.device)
    if rows == 0 or layout.images == 0:
        return out
    if query.stride() != key.stride() or query.stride(2) != 1:
        query, key = query.contiguous(), key.contiguous()
    side = 32 if query.dtype == torch.float32 else min(64, max(16, next_pow2(layout.longest)))
    dims, tail = split_head(dim)
    _entropy[(blocks(layout.longest, side), layout.images)](
        query, key, log_sums, out, logs, layout.offsets, scale * LOG2E, query.stride(0), query.stride(1), rows,
        HEADS=heads, DIM=dim, DIMS=dims, TAIL=tail, QUERIES=side, KEYS=side, SIZED=logs is not None,
        BY_EIGHT=query.stride(1) % 8 == 0, PRECISION=precision(query), num_warps=4, num_stages=3, **pdl_options(query),
    )  # fmt: skip
    return out


def attention_entropy_reference(
    query: PackedHeads, key: PackedHeads, layout: Layout, scale: float, logs: PerRow | None = None
) -> PerRow:
    """The same in plain torch, per image."""
    query, key = query.float(), key.float()
    images = []
    for begin, end in pairwise(layout.offsets.tolist()):
        scores = scale * torch.einsum("qhk,nhk->hqn", query[begin:end], key[begin:end])
        if logs is not None:
            scores = scores + logs[begin:end] / LOG2E
        images.append(torch.special.entr(scores.softmax(2).mean(0)).sum(1) * LOG2E)
    return torch.cat(images)
