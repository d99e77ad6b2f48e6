"""The class token's attention to every token, per head."""

from itertools import pairwise
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, PackedHeads, PerRow
from adamerge.runtime.triton.kernels.launch import LOG2E, next_pow2, pdl_options, pdl_wait

# Most images fit into one tile of this many keys.
KEYS = 256


@triton.jit(do_not_specialize=["total"])
@no_type_check
def _class_attention(
    query, key, out, logs, offsets, scale, row_stride, head_stride, total,
    DIM: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr, SIZED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    head, image = tl.program_id(0), tl.program_id(1)
    begin = tl.load(offsets + image)
    n = tl.load(offsets + image + 1) - begin
    pdl_wait(EARLY)
    channel = tl.arange(0, DIMS)
    first = begin.to(tl.int64) * row_stride + head * head_stride
    q = tl.load(query + first + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    most = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    out += head.to(tl.int64) * total + begin
    for start in range(0, n, KEYS):
        column = start + tl.arange(0, KEYS)
        inside = (column < n)[:, None] & (channel < DIM)[None, :]
        k = tl.load(key + first + column[:, None] * row_stride + channel[None, :], mask=inside, other=0.0)
        score = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale
        if SIZED:
            score += tl.load(logs + begin + column, mask=column < n, other=0.0)
        tl.store(out + column, score, mask=column < n)
        score = tl.where(column < n, score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 0))
        mass = mass * tl.exp2(most - higher) + tl.sum(tl.exp2(score - higher), 0)
        most = higher
    # Other threads read the scores than wrote them.
    tl.debug_barrier()
    for start in range(0, n, KEYS):
        column = start + tl.arange(0, KEYS)
        score = tl.load(out + column, mask=column < n, other=0.0)
        tl.store(out + column, tl.exp2(score - most) / mass, mask=column < n)


def class_attention(
    query: PackedHeads, key: PackedHeads, layout: Layout, scale: float, logs: PerRow | None = None
) -> Float[Tensor, "heads total"]:
    """Each head's attention of an image's first token to all of its tokens; `logs` as `attend` takes them."""
    rows, heads, dim = query.shape
    out = torch.empty((heads, rows), dtype=torch.float32, device=query.device)
    if rows == 0 or layout.images == 0:
        return out
    if query.stride() != key.stride() or query.stride(2) != 1:
        query, key = query.contiguous(), key.contiguous()
    _class_attention[(heads, layout.images)](
        query, key, out, logs, layout.offsets, scale * LOG2E, query.stride(0), query.stride(1), rows,
        DIM=dim, DIMS=next_pow2(dim), KEYS=min(next_pow2(layout.longest), KEYS), SIZED=logs is not None, num_warps=4,
        **pdl_options(query),
    )  # fmt: skip
    return out


def class_attention_reference(
    query: PackedHeads, key: PackedHeads, layout: Layout, scale: float, logs: PerRow | None = None
) -> Float[Tensor, "heads total"]:
    """The same in plain torch, per image."""
    query, key = query.float(), key.float()
    images = []
    for begin, end in pairwise(layout.offsets.tolist()):
        scores = scale * torch.einsum("hk,nhk->hn", query[begin], key[begin:end])
        if logs is not None:
            scores = scores + logs[begin:end] / LOG2E
        images.append(scores.softmax(1))
    return torch.cat(images, 1)
