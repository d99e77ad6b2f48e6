"""The attention that every token receives from all tokens of its image, per head, without an n by n array in memory.

Attention itself leaves the logarithm of each query's sum; with it, the weights of all queries are added for each key,
in the order of the queries.  So an image's result does not depend on the batch or on scheduling.
"""

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
def _received(
    query, key, log_sums, out, logs, offsets, scale, row_stride, head_stride, total,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, TAIL: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, SIZED: tl.constexpr, BY_EIGHT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The sum of all queries' weights for each key."""
    block, image, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    begin = tl.load(offsets + image)
    n = tl.load(offsets + image + 1) - begin
    pdl_wait(EARLY)
    if block * KEYS >= n:
        return
    channel, tail = tl.arange(0, DIMS), DIMS + tl.arange(0, TAIL)
    column = block * KEYS + tl.arange(0, KEYS)
    first = begin.to(tl.int64) * row_stride + head_offset(head, head_stride, BY_EIGHT)
    here = head.to(tl.int64) * total + begin
    key += first + column[:, None] * row_stride
    k = head_rows_if(column < n, key, channel, DIM)
    if DIM > DIMS:
        k_tail = head_rows_if(column < n, key, tail, DIM)
    bias = tl.zeros([KEYS], tl.float32)
    if SIZED:
        bias += tl.load(logs + begin + column, mask=column < n, other=0.0)
    sum_ = tl.zeros([KEYS], tl.float32)
    for start in range(0, n, QUERIES):
        row = start + tl.arange(0, QUERIES)
        at = query + first + row[:, None] * row_stride
        q = head_rows_if(row < n, at, channel, DIM)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if DIM > DIMS:
            q_tail = head_rows_if(row < n, at, tail, DIM)
            scores = tl.dot(k_tail, tl.trans(q_tail), scores, input_precision=PRECISION)
        # Beyond the last query the weight is exp2(-inf).
        log_sum = tl.load(log_sums + here + row, mask=row < n, other=float("inf"))
        scores = scores * scale + bias[:, None]
        sum_ += tl.sum(tl.exp2(scores - log_sum[None, :]), 1)
    tl.store(out + here + column, sum_, mask=column < n)


def received_attention(
    query: PackedHeads,
    key: PackedHeads,
    log_sums: Float[Tensor, "heads total"],
    layout: Layout,
    scale: float,
    logs: PerRow | None = None,
) -> Float[Tensor, "heads total"]:
    """For each head and token, the sum of the attention of all tokens of its image to it.

    `log_sums` and `logs` are those of `attend`.
    """
    rows, heads, dim = query.shape
    out = torch.empty((heads, rows), dtype=torch.float32, device=query.device)
    if rows == 0 or layout.images == 0:
        return out
    if query.stride() != key.stride() or query.stride(2) != 1:
        query, key = query.contiguous(), key.contiguous()
    queries, keys = (32, 32) if query.dtype == torch.float32 else (64, min(128, next_pow2(layout.longest)))
    dims, tail = split_head(dim)
    _received[(blocks(layout.longest, keys), layout.images * heads)](
        query, key, log_sums, out, logs, layout.offsets, scale * LOG2E, query.stride(0), query.stride(1), rows,
        HEADS=heads, DIM=dim, DIMS=dims, TAIL=tail, QUERIES=queries, KEYS=keys, SIZED=logs is not None,
        BY_EIGHT=query.stride(1) % 8 == 0, PRECISION=precision(query), num_warps=4, num_stages=3, **pdl_options(query),
    )  # fmt: skip
    return out


def received_attention_reference(
    query: PackedHeads, key: PackedHeads, layout: Layout, scale: float, logs: PerRow | None = None
) -> Float[Tensor, "heads total"]:
    """The same in plain torch, per image."""
    query, key = query.float(), key.float()
    images = []
    for begin, end in pairwise(layout.offsets.tolist()):
        scores = scale * torch.einsum("qhk,nhk->hqn", query[begin:end], key[begin:end])
        if logs is not None:
            scores = scores + logs[begin:end] / LOG2E
        images.append(scores.softmax(2).sum(1))
    return torch.cat(images, 1)
