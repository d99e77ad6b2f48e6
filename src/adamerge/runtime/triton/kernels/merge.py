"""Carries out a choice: average, compact, and the layer norm that follows, in one pass over the tokens.

Each token that stays is one program of one warp.
"""

from itertools import pairwise
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.runtime.block_view import NormParams
from adamerge.runtime.packed.layout import Layout, Packed, PerRow, ragged_layout
from adamerge.runtime.triton.kernels.choice import Choice, Length
from adamerge.runtime.triton.kernels.launch import empty_rows, next_pow2, pdl_options, pdl_wait
from adamerge.runtime.triton.kernels.residual import (
    add_reference,
    norm_numbers,
    norm_row,
    product_as_torch,
    sum_as_torch,
    sum_dtype,
)

# The smallest normal number of float32.
SMALLEST_NORMAL = tl.constexpr(2.0**-126)

# Counts read at once, at least: one kernel for all batches of up to so many images.
FEWEST_COUNTS = 64

# The values of the kernel's constexpr LENGTH.
LENGTH_OF_MEAN, LENGTH_MEAN, LENGTH_LARGEST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LENGTHS = {None: LENGTH_OF_MEAN, "mean": LENGTH_MEAN, "largest": LENGTH_LARGEST}


@triton.jit
@no_type_check
def _row(x, branch, gamma, at, stride_x, stride_branch, channel, inside, BRANCH: tl.constexpr, GAMMA: tl.constexpr):
    """A row of `x + gamma * branch`, rounded as the host rounds it, then in float32."""
    value = tl.load(x + at.to(tl.int64) * stride_x + channel, mask=inside, other=0.0)
    if BRANCH:
        added = tl.load(branch + at.to(tl.int64) * stride_branch + channel, mask=inside, other=0.0)
        if GAMMA:
            factor = tl.load(gamma + channel, mask=inside, other=0.0)
            added = product_as_torch(added, factor)
        value = sum_as_torch(value, added)
    return value.to(tl.float32)


@triton.jit
@no_type_check
def _gone(gone, goal, base, place, merged, start, n, LIST: tl.constexpr):
    """A piece of the list of tokens that merged away: numbers, tokens, and which of them go to `place`."""
    entry = start + tl.arange(0, LIST)
    token = tl.load(gone + base + entry, mask=entry < n, other=0)
    into = tl.load(goal + base + entry, mask=entry < n, other=0)
    return entry, token, (into == place) & (entry < merged)


@triton.jit
@no_type_check
def _totals(size, weight, base, token, arrives):
    """The sizes, the weights and the number of the tokens of a piece that arrive."""
    sized = tl.sum(tl.load(size + base + token, mask=arrives, other=0.0), 0)
    total = tl.sum(tl.load(weight + base + token, mask=arrives, other=0.0), 0)
    return sized, total, tl.sum(arrives.to(tl.int32), 0)


@triton.jit
@no_type_check
def _added(
    entry, token, arrives, merged, plain, divisor, x, branch, gamma, weight, base, stride_x, stride_branch, channel,
    inside, mean, length, BRANCH: tl.constexpr, GAMMA: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Mean and mean or largest length with the tokens of a piece that arrive added to them, in order."""
    waiting = tl.where(arrives, entry, merged)
    next_ = tl.min(waiting, 0)
    while next_ < merged:
        at = base + tl.sum(tl.where(entry == next_, token, 0), 0)
        other = _row(x, branch, gamma, at, stride_x, stride_branch, channel, inside, BRANCH, GAMMA)
        share = tl.where(plain, 1.0, tl.load(weight + at)) / divisor
        mean += share * other
        if LENGTH == LENGTH_MEAN:
            length += share * tl.sqrt(tl.sum(other * other))
        if LENGTH == LENGTH_LARGEST:
            length = tl.maximum(length, tl.sqrt(tl.sum(other * other)))
        waiting = tl.where(entry == next_, merged, waiting)
        next_ = tl.min(waiting, 0)
    return mean, length


@triton.jit
@no_type_check
def _average(
    own, alone, total, members, entry, token, arrives, merged, gone, goal, x, branch, gamma, weight, base, place, n,
    stride_x, stride_branch, channel, inside,
    BRANCH: tl.constexpr, GAMMA: tl.constexpr, LENGTH: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """The weighted mean of the token `own` and the `members - 1` others that arrive; a plain mean if all weigh 0."""
    plain = total == 0.0
    divisor = tl.where(plain, members.to(tl.float32), total)
    share = tl.where(plain, 1.0, alone) / divisor
    mean = own * share
    length = share
    if LENGTH == LENGTH_MEAN:
        length = tl.sqrt(tl.sum(own * own)) * share
    if LENGTH == LENGTH_LARGEST:
        length = tl.sqrt(tl.sum(own * own))
    mean, length = _added(
        entry, token, arrives, merged, plain, divisor, x, branch, gamma, weight, base, stride_x, stride_branch,
        channel, inside, mean, length, BRANCH, GAMMA, LENGTH,
    )  # fmt: skip
    for start in range(LIST, merged, LIST):
        later, moved, here = _gone(gone, goal, base, place, merged, start, n, LIST)
        mean, length = _added(
            later, moved, here, merged, plain, divisor, x, branch, gamma, weight, base, stride_x, stride_branch,
            channel, inside, mean, length, BRANCH, GAMMA, LENGTH,
        )  # fmt: skip
    if LENGTH != LENGTH_OF_MEAN:
        factor = length / tl.maximum(tl.sqrt(tl.sum(mean * mean)), SMALLEST_NORMAL)
        # A mean of length 0 has no direction and stays as it is.
        mean *= tl.where(tl.abs(factor) < float("inf"), factor, 1.0)
    return mean


@triton.jit(do_not_specialize=["images"])
@no_type_check
def _merge(
    x, branch, gamma, gone, goal, origin, count, weight, size, offsets,
    y, normed, new_size, new_logs, new_offsets, norm_weight, norm_bias, eps, images, prefix, stride_x, stride_branch,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, IMAGES: tl.constexpr,
    BRANCH: tl.constexpr, GAMMA: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    LENGTH: tl.constexpr, LIST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, image = tl.program_id(0), tl.program_id(1)
    begin = tl.load(offsets + image)
    base = begin + prefix
    n = tl.load(offsets + image + 1) - base
    if row >= tl.maximum(prefix + n, 1):
        return
    place = row - prefix
    number = tl.arange(0, CHANNELS)
    channel = number[None, :]
    inside = channel < WIDTH
    if NORM and EARLY:
        # Loaded during the wait.  With many rows they would only take registers from other programs.
        norm_factor, norm_more = norm_numbers(norm_weight, norm_bias, number, WIDTH, WEIGHT, BIAS)
    pdl_wait(EARLY)
    # These loads are issued together, before it is known how much of them is used: memory latency dominates here.
    left = tl.load(count + image)
    came = tl.load(origin + base + place, mask=(place >= 0) & (place < n), other=0)
    merged = n - left
    entry, token, arrives = _gone(gone, goal, base, place, merged, 0, n, LIST)
    earlier = tl.arange(0, IMAGES)
    before = tl.sum(tl.load(count + earlier, mask=earlier < image, other=0), 0) + image * prefix
    if row == 0:
        tl.store(new_offsets + image, before)
        if image == images - 1:
            tl.store(new_offsets + images, before + prefix + left)
    if row >= prefix + left:
        return
    at = tl.where(place >= 0, base + came, begin + row)
    own = _row(x, branch, gamma, at, stride_x, stride_branch, channel, inside, BRANCH, GAMMA)
    alone = tl.load(weight + at, mask=place >= 0, other=1.0)
    more_size, more_weight, more = _totals(size, weight, base, token, arrives)
    sized, total, members = tl.load(size + at) + more_size, alone + more_weight, 1 + more
    for start in range(LIST, merged, LIST):
        _, moved, here = _gone(gone, goal, base, place, merged, start, n, LIST)
        more_size, more_weight, more = _totals(size, weight, base, moved, here)
        sized += more_size
        total += more_weight
        members += more
    # A token without others comes back bit for bit.
    mean = own
    if members > 1:
        mean = _average(
            own, alone, total, members, entry, token, arrives, merged, gone, goal, x, branch, gamma, weight, base,
            place, n, stride_x, stride_branch, channel, inside, BRANCH, GAMMA, LENGTH, LIST,
        )  # fmt: skip
    result = mean.to(y.dtype.element_ty)
    goes = (before + row).to(tl.int64) * WIDTH + channel
    tl.store(y + goes, result, mask=inside)
    tl.store(new_size + before + row, sized)
    tl.store(new_logs + before + row, tl.log2(sized))
    if NORM:
        if not EARLY:
            norm_factor, norm_more = norm_numbers(norm_weight, norm_bias, number, WIDTH, WEIGHT, BIAS)
        out = norm_row(result.to(tl.float32), inside, norm_factor, norm_more, eps, WIDTH)
        tl.store(normed + goes, out.to(normed.dtype.element_ty), mask=inside)


def merge(
    x: Packed,
    size: PerRow,
    layout: Layout,
    choice: Choice,
    *,
    branch: Packed | None = None,
    gamma: Float[Tensor, " d"] | None = None,
    norm: NormParams | None = None,
    length: Length | None = None,
) -> tuple[Packed, Packed | None, PerRow, PerRow, Int[Tensor, " bounds"]]:
    """The merged tokens of `x + gamma * branch`, their layer norm if asked for, their sizes, the base-2 logarithms of
    these, and the new offsets.

    `length` gives a merged token the mean or the largest length of its members.  The arrays are as long as before,
    because the device alone knows the new counts; rows behind the last image are left unwritten.
    """
    total, width = x.shape
    y = torch.empty((total, width), dtype=sum_dtype(x, branch, gamma), device=x.device)
    normed = None if norm is None else torch.empty_like(y, dtype=norm.dtype)
    new_size, logs = empty_rows(2, total, torch.float32, x.device)
    offsets = torch.empty_like(layout.offsets)
    if layout.images == 0:
        return y, normed, new_size, logs, layout.offsets
    channels = next_pow2(width)
    _merge[(layout.longest, layout.images)](
        x, branch, gamma, choice.gone, choice.goal, choice.origin, choice.count, choice.weight, size, layout.offsets,
        y, normed, new_size, logs, offsets, None if norm is None else norm.weight, None if norm is None else norm.bias,
        0.0 if norm is None else norm.eps, layout.images, layout.prefix, x.stride(0),
        0 if branch is None else branch.stride(0), WIDTH=width, CHANNELS=channels,
        IMAGES=next_pow2(layout.images, FEWEST_COUNTS), BRANCH=branch is not None, GAMMA=gamma is not None,
        NORM=norm is not None,
        WEIGHT=norm is not None and norm.weight is not None, BIAS=norm is not None and norm.bias is not None,
        LENGTH=LENGTHS[length].value, LIST=32, num_warps=max(1, channels // 1024),
        **pdl_options(x),
    )  # fmt: skip
    return y, normed, new_size, logs, offsets


def merge_reference(
    x: Packed,
    size: PerRow,
    layout: Layout,
    choice: Choice,
    *,
    branch: Packed | None = None,
    gamma: Float[Tensor, " d"] | None = None,
    norm: NormParams | None = None,
    length: Length | None = None,
) -> tuple[Packed, Packed | None, PerRow, PerRow, Int[Tensor, " bounds"]]:
    """The same in plain torch, one token at a time; rows behind the last image are 0."""
    x, prefix = add_reference(x, branch, gamma=gamma)[0], layout.prefix
    offsets = ragged_layout(choice.count.tolist(), prefix, x.device).offsets
    y, new_size = torch.zeros_like(x), torch.zeros_like(size)
    for (begin, end), (first, last) in zip(pairwise(layout.offsets.tolist()), pairwise(offsets.tolist()), strict=True):
        y[first : first + prefix], new_size[first : first + prefix] = (a[begin : begin + prefix] for a in (x, size))
        for place in range(last - first - prefix):
            members = begin + prefix + (choice.slot[begin + prefix : end] == place).nonzero()[:, 0]
            y[first + prefix + place] = _average_reference(x[members].float(), choice.weight[members], length)
            new_size[first + prefix + place] = size[members].sum()
    return y, add_reference(y, None, norm=norm)[1], new_size, new_size.log2(), offsets


def _average_reference(tokens: Packed, weight: PerRow, length: Length | None) -> Float[Tensor, " d"]:
    if len(tokens) == 1:
        return tokens[0]
    weight = weight if weight.sum() != 0 else torch.ones_like(weight)
    share = weight / weight.sum()
    mean = share @ tokens
    if length is None:
        return mean
    wanted = share @ tokens.norm(dim=1) if length == "mean" else tokens.norm(dim=1).amax()
    factor = wanted / mean.norm().clamp_min(SMALLEST_NORMAL.value)
    return mean * factor if factor.isfinite() else mean
