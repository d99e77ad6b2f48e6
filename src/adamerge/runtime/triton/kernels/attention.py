"""Attention over packed tokens, each image over its own keys; a key of size s counts as s equal keys.

The logarithm of a key's size is added to its scores.  It is loaded one tile ahead, to hide the latency of the load.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from adamerge.runtime.packed.attention import attend_each
from adamerge.runtime.packed.layout import Layout, PackedHeads, PerRow
from adamerge.runtime.triton.kernels.launch import (
    LOG2E,
    blocks,
    head_offset,
    head_rows,
    head_rows_if,
    next_pow2,
    num_stages_for,
    pdl_options,
    pdl_wait,
    precision,
    split_head,
)


@triton.jit
@no_type_check
def _bias(logs, begin, column, n, SIZED: tl.constexpr):
    """What is added to the scores of keys: the logarithms of their sizes; beyond the last one, minus infinity."""
    if SIZED:
        return tl.load(logs + begin + column, mask=column < n, other=float("-inf"))
    return tl.where(column < n, 0.0, float("-inf"))


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def _attend(
    query, key, value, out, log_sums, logs, offsets, scale, row_stride, head_stride, out_row_stride, rows,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, TAIL: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, SIZED: tl.constexpr, SUMS: tl.constexpr, BY_EIGHT: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    block, image, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    begin = tl.load(offsets + image)
    n = tl.load(offsets + image + 1) - begin
    pdl_wait(EARLY)
    if block * QUERIES >= n:
        return
    channel = tl.arange(0, DIMS)
    tail = DIMS + tl.arange(0, TAIL)
    column = tl.arange(0, KEYS)
    row = block * QUERIES + tl.arange(0, QUERIES)
    here = row < n
    first = begin.to(tl.int64) * row_stride + head_offset(head, head_stride, BY_EIGHT)
    q = head_rows_if(here, query + first + row[:, None] * row_stride, channel, DIM)
    key += first
    value += first
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sum_ = tl.zeros([QUERIES, DIMS], tl.float32)
    if DIM > DIMS:
        q_tail = head_rows_if(here, query + first + row[:, None] * row_stride, tail, DIM)
        sum_tail = tl.zeros([QUERIES, TAIL], tl.float32)
    bias = _bias(logs, begin, column, n, SIZED)
    for start in range(0, n, KEYS):
        # Beyond the last key a tile repeats that key; the bias of minus infinity masks it.
        at = tl.minimum(start + column, n - 1)[:, None] * row_stride
        k = head_rows(key + at, channel, DIM, DIMS)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if DIM > DIMS:
            k_tail = head_rows(key + at, tail, DIM, DIMS + TAIL)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
        scores = scores * scale + bias[None, :]
        bias = _bias(logs, begin, start + KEYS + column, n, SIZED)
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(most - higher)
        v = head_rows(value + at, channel, DIM, DIMS)
        sum_ = sum_ * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        if DIM > DIMS:
            v_tail = head_rows(value + at, tail, DIM, DIMS + TAIL)
            sum_tail = sum_tail * shrink[:, None] + tl.dot(weights.to(v.dtype), v_tail, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        most = higher
    goes = out + (begin + row[:, None]).to(tl.int64) * out_row_stride + head * DIM
    result = (sum_ / total[:, None]).to(out.dtype.element_ty)
    tl.store(goes + channel[None, :], result, mask=here[:, None] & (channel < DIM)[None, :])
    if DIM > DIMS:
        result = (sum_tail / total[:, None]).to(out.dtype.element_ty)
        tl.store(goes + tail[None, :], result, mask=here[:, None] & (tail < DIM)[None, :])
    if SUMS:
        tl.store(log_sums + head.to(tl.int64) * rows + begin + row, most + tl.log2(total), mask=here)


def attend(
    query: PackedHeads,
    key: PackedHeads,
    value: PackedHeads,
    layout: Layout,
    scale: float,
    logs: PerRow | None = None,
    log_sums: Float[Tensor, "heads total"] | None = None,
) -> PackedHeads:
    """Attention of every image's queries to its own keys; `logs` are the base-2 logarithms of the keys' sizes.

    `log_sums` is filled, if given: the base-2 logarithm of the sum of each query's exponentiated scores.
    """
    rows, heads, dim = query.shape
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    if rows == 0 or layout.images == 0:
        return out
    if not query.stride() == key.stride() == value.stride() or query.stride(2) != 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    queries, keys = _shape(layout.longest, query)
    dims, tail = split_head(dim)
    _attend[(blocks(layout.longest, queries), layout.images * heads)](
        query, key, value, out, log_sums, logs, layout.offsets, scale * LOG2E, query.stride(0), query.stride(1),
        out.stride(0), rows,
        HEADS=heads, DIM=dim, DIMS=dims, TAIL=tail, QUERIES=queries, KEYS=keys, SIZED=logs is not None,
        SUMS=log_sums is not None, BY_EIGHT=query.stride(1) % 8 == 0, PRECISION=precision(query), num_warps=4,
        num_stages=num_stages_for(3, query, keys, keys, dims + tail),
        **pdl_options(query),
    )  # fmt: skip
    return out


def _shape(longest: int, query: PackedHeads) -> tuple[int, int]:
    """Queries and keys of a tile.  Twice as many queries are no faster, and round up further."""
    return (32, 32) if query.dtype == torch.float32 else (min(64, next_pow2(longest)), 32)


attend_reference = attend_each
