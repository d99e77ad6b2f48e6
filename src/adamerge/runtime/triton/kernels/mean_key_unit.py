"""What ToMe compares: attention keys averaged over heads, scaled to length 1."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.runtime.packed.layout import PackedHeads
from adamerge.runtime.triton.kernels.launch import blocks, next_pow2, pdl_options, pdl_wait

ROWS = 16


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["counted"])
@no_type_check
def _mean_key_unit(
    key, out, counted, rows, row_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    pdl_wait(EARLY)
    if COUNTED:
        rows = tl.minimum(rows, tl.load(counted))
        if tl.program_id(0) * ROWS >= rows:
            return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, DIMS)
    inside = (row < rows)[:, None] & (channel < DIM)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + channel[None, :]
    sum_ = tl.zeros([ROWS, DIMS], tl.float32)
    for head in tl.static_range(HEADS):
        sum_ += tl.load(key + at + head * head_stride, mask=inside, other=0.0).to(tl.float32)
    mean = sum_ / HEADS
    length = tl.maximum(tl.sqrt(tl.sum(mean * mean, 1)), 1e-12)
    tl.store(out + row.to(tl.int64)[:, None] * DIM + channel[None, :], mean / length[:, None], mask=inside)


def mean_key_unit(key: PackedHeads, counted: Int[Tensor, " one"] | None = None) -> Float[Tensor, "total k"]:
    """The direction of each token's mean key.  Rows from `counted[0]` on are neither read nor written.

    In float32, or in float16 if keys are in half precision: of numbers up to 1 that keeps more than bfloat16 keys have.
    """
    rows, heads, dim = key.shape
    exact = key.dtype == torch.float32
    out = torch.empty((rows, dim), dtype=torch.float32 if exact else torch.float16, device=key.device)
    if rows:
        _mean_key_unit[(blocks(rows, ROWS),)](
            key, out, counted, rows, key.stride(0), key.stride(1),
            HEADS=heads, DIM=dim, DIMS=next_pow2(dim), ROWS=ROWS, COUNTED=counted is not None, num_warps=4,
            **pdl_options(key),
        )  # fmt: skip
    return out


def mean_key_unit_reference(key: PackedHeads) -> Float[Tensor, "total k"]:
    """The same in plain torch."""
    return torch.nn.functional.normalize(key.float().mean(1), dim=-1)
