"""Carrying out a choice: average, compact, and the layer norm that follows, in one pass over the tokens.

A token that stays is one program of one warp: they are many, small, and wait for memory each on its own.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.runtime.block_view import NormParams
from adamerge.runtime.packed.layout import Layout, Packed, PerRow
from adamerge.runtime.triton.kernels.choice import Choice
from adamerge.runtime.triton.kernels.launch import next_pow2, pdl_options, pdl_wait
from adamerge.runtime.triton.kernels.residual import norm_numbers, norm_row


@triton.jit
@no_type_check
def _row(x, branch, gamma, at, stride_x, stride_branch, channel, inside, BRANCH: tl.constexpr, GAMMA: tl.constexpr):
    """A row of `x + gamma * branch`, rounded as the host rounds it, then in float32."""
    value = tl.load(x + at.to(tl.int64) * stride_x + channel, mask=inside, other=0.0)
    if BRANCH:
        added = tl.load(branch + at.to(tl.int64) * stride_branch + channel, mask=inside, other=0.0)
        if GAMMA:
            factor = tl.load(gamma + channel, mask=inside, other=0.0)
            added = (added.to(tl.float32) * factor.to(tl.float32)).to(added.dtype)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
@no_type_check
def _gone(gone, goal, base, start, n, LIST: tl.constexpr):
    """A piece of the list of those that are gone, and where they went; behind its end there is anything."""
    entry = start + tl.arange(0, LIST)
    token = tl.load(gone + base + entry, mask=entry < n, other=0)
    return entry, token, tl.load(goal + base + entry, mask=entry < n, other=0)


@triton.jit
@no_type_check
def _added(
    entry, token, arrives, merged, plain, divisor, x, branch, gamma, weight, base, stride_x, stride_branch, channel,
    inside, mean, length, BRANCH: tl.constexpr, GAMMA: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Mean and mean length, with those of a piece of the list that arrive here, in order."""
    waiting = tl.where(arrives, entry, merged)
    next_ = tl.min(waiting, 0)
    while next_ < merged:
        at = base + tl.sum(tl.where(entry == next_, token, 0), 0)
        other = _row(x, branch, gamma, at, stride_x, stride_branch, channel, inside, BRANCH, GAMMA)
        share = tl.where(plain, 1.0, tl.load(weight + at)) / divisor
        mean += share * other
        if LENGTH:
            length += share * tl.sqrt(tl.sum(other * other))
        waiting = tl.where(entry == next_, merged, waiting)
        next_ = tl.min(waiting, 0)
    return mean, length


@triton.jit
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
        # While it waits anyway.  With many rows, keeping these takes registers that another program could have.
        norm_factor, norm_more = norm_numbers(norm_weight, norm_bias, number, WIDTH, WEIGHT, BIAS)
    pdl_wait(EARLY)
    # Asked for together, before anybody knows how much of it counts: waiting for memory is what takes time here.
    left = tl.load(count + image)
    came = tl.load(origin + base + place, mask=(place >= 0) & (place < n), other=0)
    entry, token, into = _gone(gone, goal, base, 0, n, LIST)
    earlier = tl.arange(0, IMAGES)
    before = tl.sum(tl.load(count + earlier, mask=earlier < image, other=0), 0) + image * prefix
    merged = n - left
    if row == 0:
        tl.store(new_offsets + image, before)
        if image == images - 1:
            tl.store(new_offsets + images, before + prefix + left)
    if row >= prefix + left:
        return
    at = tl.where(place >= 0, base + came, begin + row)
    own = _row(x, branch, gamma, at, stride_x, stride_branch, channel, inside, BRANCH, GAMMA)
    alone = tl.load(weight + at, mask=place >= 0, other=1.0)
    # What comes to this place: who stays brings itself, those that are gone are added in order.
    arrives = (into == place) & (entry < merged)
    sized = tl.load(size + at) + tl.sum(tl.load(size + base + token, mask=arrives, other=0.0), 0)
    total = alone + tl.sum(tl.load(weight + base + token, mask=arrives, other=0.0), 0)
    members = 1 + tl.sum(arrives.to(tl.int32), 0)
    for start in range(LIST, merged, LIST):
        later, moved, to = _gone(gone, goal, base, start, n, LIST)
        here = (to == place) & (later < merged)
        sized += tl.sum(tl.load(size + base + moved, mask=here, other=0.0), 0)
        total += tl.sum(tl.load(weight + base + moved, mask=here, other=0.0), 0)
        members += tl.sum(here.to(tl.int32), 0)
    # Who stays alone comes back bit for bit.
    mean = own
    if members > 1:
        # All weights 0: a plain mean.
        plain = total == 0.0
        divisor = tl.where(plain, members.to(tl.float32), total)
        share = tl.where(plain, 1.0, alone) / divisor
        mean = own * share
        length = tl.sqrt(tl.sum(own * own)) * share if LENGTH else share
        mean, length = _added(
            entry, token, arrives, merged, plain, divisor, x, branch, gamma, weight, base, stride_x, stride_branch,
            channel, inside, mean, length, BRANCH, GAMMA, LENGTH,
        )  # fmt: skip
        for start in range(LIST, merged, LIST):
            later, moved, to = _gone(gone, goal, base, start, n, LIST)
            mean, length = _added(
                later, moved, (to == place) & (later < merged), merged, plain, divisor, x, branch, gamma, weight, base,
                stride_x, stride_branch, channel, inside, mean, length, BRANCH, GAMMA, LENGTH,
            )  # fmt: skip
        if LENGTH:
            factor = length / tl.maximum(tl.sqrt(tl.sum(mean * mean)), 1.1754943508222875e-38)
            # Nothing can be scaled to a length that has no direction.
            mean *= tl.where(tl.abs(factor) < float("inf"), factor, 1.0)
    result = mean.to(y.dtype.element_ty)
    goes = (before + row).to(tl.int64) * WIDTH + channel
    tl.store(y + goes, result, mask=inside)
    tl.store(new_size + before + row, sized)
    tl.store(new_logs + before + row, tl.log2(sized))
    if NORM:
        if not EARLY:
            norm_factor, norm_more = norm_numbers(norm_weight, norm_bias, number, WIDTH, WEIGHT, BIAS)
        out = norm_row(result.to(tl.float32), inside, norm_factor, norm_more, eps, WIDTH)
        tl.store(normed + goes, out.to(y.dtype.element_ty), mask=inside)


def merge(
    x: Packed,
    size: PerRow,
    layout: Layout,
    choice: Choice,
    *,
    branch: Packed | None = None,
    gamma: Float[Tensor, " d"] | None = None,
    norm: NormParams | None = None,
    keep_length: bool = False,
) -> tuple[Packed, Packed | None, PerRow, PerRow, Int[Tensor, "bounds"]]:
    """The merged tokens of `x + gamma * branch`, their layer norm if asked for, their sizes, the base-2 logarithms of
    these, and the new offsets.

    `keep_length` gives a merged token the mean length of its members.  The arrays are as long as before, because the
    device alone knows the new counts; rows behind the last image are left unwritten.
    """
    total, width = x.shape
    y = torch.empty((total, width), dtype=x.dtype, device=x.device)
    normed = None if norm is None else torch.empty_like(y)
    new_size, logs = torch.empty((2, total), dtype=torch.float32, device=x.device).unbind()
    offsets = torch.empty_like(layout.offsets)
    if layout.images == 0:
        return y, normed, new_size, logs, layout.offsets
    channels = next_pow2(width)
    _merge[(layout.longest, layout.images)](
        x, branch, gamma, choice.gone, choice.goal, choice.origin, choice.count, choice.weight, size, layout.offsets,
        y, normed, new_size, logs, offsets, None if norm is None else norm.weight, None if norm is None else norm.bias,
        0.0 if norm is None else norm.eps, layout.images, layout.prefix, x.stride(0),
        0 if branch is None else branch.stride(0), WIDTH=width, CHANNELS=channels,
        IMAGES=next_pow2(layout.images), BRANCH=branch is not None, GAMMA=gamma is not None, NORM=norm is not None,
        WEIGHT=norm is not None and norm.weight is not None, BIAS=norm is not None and norm.bias is not None,
        LENGTH=keep_length, LIST=32, num_warps=max(1, channels // 1024),
        **pdl_options(x),
    )  # fmt: skip
    return y, normed, new_size, logs, offsets
