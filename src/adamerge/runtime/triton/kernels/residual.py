"""The residual sum and what follows it: the next layer norm, and the lengths that cosines divide by."""

from functools import reduce
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.runtime.block_view import NormParams
from adamerge.runtime.packed.layout import Packed, PerRow
from adamerge.runtime.triton.kernels.launch import blocks, next_pow2, pdl_options, pdl_wait

# As torch.nn.functional.normalize.
SHORTEST = 1e-12


@triton.jit
@no_type_check
def sum_as_torch(a, b):
    """`a + b` in the type that torch gives it: that of both, or float32 where they differ."""
    wide = a.to(tl.float32) + b.to(tl.float32)
    if a.dtype == b.dtype:
        return wide.to(a.dtype)
    else:
        return wide


@triton.jit
@no_type_check
def product_as_torch(a, b):
    """`a * b` in the type that torch gives it: that of both, or float32 where they differ."""
    wide = a.to(tl.float32) * b.to(tl.float32)
    if a.dtype == b.dtype:
        return wide.to(a.dtype)
    else:
        return wide


@triton.jit
@no_type_check
def norm_numbers(weight, bias, channel, WIDTH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """A layer norm's weight and bias in float32, loaded before its input; 1 and 0 if it has none."""
    there = channel < WIDTH
    factor = tl.full(channel.shape, 1.0, tl.float32)
    more = tl.full(channel.shape, 0.0, tl.float32)
    if WEIGHT:
        factor = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        more = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    return factor, more


@triton.jit
@no_type_check
def norm_row(y, inside, factor, more, eps, WIDTH: tl.constexpr):
    """Layer norm of a tile of rows in float32."""
    mean = tl.sum(tl.where(inside, y, 0.0), 1) / WIDTH
    centred = tl.where(inside, y - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / WIDTH
    return centred / tl.sqrt(variance + eps)[:, None] * factor[None, :] + more[None, :]


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["counted"])
@no_type_check
def _add(
    x, branch, gamma, y, normed, inverse, weight, bias, counted, eps, rows, stride_x, stride_branch,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BRANCH: tl.constexpr, GAMMA: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, INVERSE: tl.constexpr, COUNTED: tl.constexpr,
    SHORTEST_: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    if NORM:
        norm_factor, norm_more = norm_numbers(weight, bias, channel, WIDTH, WEIGHT, BIAS)
    pdl_wait(EARLY)
    if COUNTED:
        rows = tl.minimum(rows, tl.load(counted))
        if tl.program_id(0) * ROWS >= rows:
            return
    inside = (row < rows)[:, None] & (channel < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None]
    value = tl.load(x + at * stride_x + channel[None, :], mask=inside, other=0.0)
    if BRANCH:
        added = tl.load(branch + at * stride_branch + channel[None, :], mask=inside, other=0.0)
        if GAMMA:
            factor = tl.load(gamma + channel, mask=channel < WIDTH, other=0.0)
            added = product_as_torch(added, factor[None, :])
        value = sum_as_torch(value, added)
        tl.store(y + at * WIDTH + channel[None, :], value, mask=inside)
    wide = value.to(tl.float32)
    if INVERSE:
        length = tl.sqrt(tl.sum(wide * wide, 1))
        tl.store(inverse + row, 1.0 / tl.maximum(length, SHORTEST_), mask=row < rows)
    if NORM:
        out = norm_row(wide, inside, norm_factor, norm_more, eps, WIDTH)
        tl.store(normed + at * WIDTH + channel[None, :], out.to(normed.dtype.element_ty), mask=inside)


def add(
    x: Packed,
    branch: Packed | None,
    *,
    gamma: Float[Tensor, " d"] | None = None,
    norm: NormParams | None = None,
    inverse: bool = False,
    counted: Int[Tensor, " one"] | None = None,
) -> tuple[Packed, Packed | None, PerRow | None]:
    """`x + gamma * branch`, its layer norm if asked for, and one over the length of each row if asked for.

    Where `x`, `branch` and `gamma` differ in dtype, the sum has the dtype that torch gives it.  Rows from `counted[0]`
    on are neither read nor written.
    """
    rows, width = x.shape
    y = x if branch is None else torch.empty((rows, width), dtype=sum_dtype(x, branch, gamma), device=x.device)
    normed = None if norm is None else torch.empty((rows, width), dtype=norm.dtype or y.dtype, device=x.device)
    lengths = torch.empty(rows, dtype=torch.float32, device=x.device) if inverse else None
    if rows == 0:
        return y, normed, lengths
    channels = next_pow2(width)
    per = max(1, min(4, 4096 // channels))
    _add[(blocks(rows, per),)](
        x, branch, gamma, y, normed, lengths, None if norm is None else norm.weight,
        None if norm is None else norm.bias, counted, 0.0 if norm is None else norm.eps, rows, x.stride(0),
        0 if branch is None else branch.stride(0), WIDTH=width, CHANNELS=channels, ROWS=per,
        BRANCH=branch is not None, GAMMA=gamma is not None, NORM=norm is not None,
        WEIGHT=norm is not None and norm.weight is not None, BIAS=norm is not None and norm.bias is not None,
        INVERSE=inverse, COUNTED=counted is not None, SHORTEST_=SHORTEST, num_warps=4,
        **pdl_options(x),
    )  # fmt: skip
    return y, normed, lengths


def sum_dtype(x: Packed, branch: Packed | None, gamma: Float[Tensor, " d"] | None) -> torch.dtype:
    """The dtype of `x + gamma * branch`."""
    dtypes = [each.dtype for each in (branch, gamma) if each is not None]
    return reduce(torch.promote_types, dtypes, x.dtype)


def add_reference(
    x: Packed,
    branch: Packed | None,
    *,
    gamma: Float[Tensor, " d"] | None = None,
    norm: NormParams | None = None,
    inverse: bool = False,
) -> tuple[Packed, Packed | None, PerRow | None]:
    """The same in plain torch."""
    if branch is not None:
        x = x + (branch if gamma is None else branch * gamma)
    normed = None
    if norm is not None:
        normed = torch.nn.functional.layer_norm(x, x.shape[1:], norm.weight, norm.bias, norm.eps)
        normed = normed.to(norm.dtype or x.dtype)
    return x, normed, 1 / x.float().norm(dim=1).clamp_min(SHORTEST) if inverse else None
