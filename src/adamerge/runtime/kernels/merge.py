"""Carrying out a choice: average, compact, and the layer norm that follows, in one pass over the tokens."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.runtime.kernels.decide import Choice
from adamerge.runtime.kernels.launch import blocks, others_done, placed, power, processors
from adamerge.runtime.kernels.residual import norm_row
from adamerge.runtime.ragged import Layout, Packed, PerRow
from adamerge.runtime.view import Norm


@triton.jit
@no_type_check
def _row(x, branch, gamma, at, stride_x, stride_branch, channel, there, BRANCH: tl.constexpr, GAMMA: tl.constexpr):
    """Rows of `x + gamma * branch`, rounded as the host rounds them, then in float32."""
    value = tl.load(x + at * stride_x + channel, mask=there, other=0.0)
    if BRANCH:
        added = tl.load(branch + at * stride_branch + channel, mask=there, other=0.0)
        if GAMMA:
            factor = tl.load(gamma + channel, mask=there, other=0.0)
            added = (added.to(tl.float32) * factor.to(tl.float32)).to(added.dtype)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
@no_type_check
def _merge(
    x, branch, gamma, slot, gone, origin, count, weight, sizes, members, totals, size, offsets,
    y, normed, new_size, new_logs, new_offsets, norm_weight, norm_bias, eps, images, prefix, stride_x, stride_branch,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, IMAGES: tl.constexpr,
    BRANCH: tl.constexpr, GAMMA: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    LENGTH: tl.constexpr, LIST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_done(EARLY)
    block, image = tl.program_id(0), tl.program_id(1)
    begin = tl.load(offsets + image)
    base = begin + prefix
    left = tl.load(count + image)
    merged = tl.load(offsets + image + 1) - base - left
    earlier = tl.arange(0, IMAGES)
    before = tl.sum(tl.load(count + earlier, mask=earlier < image, other=0), 0) + image * prefix
    if block == 0:
        tl.store(new_offsets + image, before)
        if image == images - 1:
            tl.store(new_offsets + images, before + prefix + left)
    if block * ROWS >= prefix + left:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < prefix + left
    place = row - prefix
    patch = there & (place >= 0)
    came = tl.load(origin + base + place, mask=patch, other=0)
    at = tl.where(patch, base + came, begin + row)
    channel = tl.arange(0, CHANNELS)
    inside = there[:, None] & (channel < WIDTH)[None, :]
    own = _row(
        x, branch, gamma, at.to(tl.int64)[:, None], stride_x, stride_branch, channel[None, :], inside, BRANCH, GAMMA
    )
    number = tl.load(members + base + place, mask=patch, other=1.0)
    total = tl.load(totals + base + place, mask=patch, other=1.0)
    sized = tl.where(
        patch, tl.load(sizes + base + place, mask=patch, other=1.0), tl.load(size + at, mask=there, other=1.0)
    )
    # All weights 0: a plain mean.
    plain = total == 0.0
    divisor = tl.where(plain, number, total)
    mean = own
    if tl.max(number, 0) > 1.0:
        share = tl.where(plain, 1.0, tl.load(weight + at, mask=patch, other=1.0)) / divisor
        mean = own * share[:, None]
        if LENGTH:
            length = tl.sqrt(tl.sum(own * own, 1)) * share
        low, high = block * ROWS - prefix, (block + 1) * ROWS - prefix
        for start in range(0, merged, LIST):
            entry = start + tl.arange(0, LIST)
            token = tl.load(gone + base + entry, mask=entry < merged, other=0)
            into = tl.load(slot + base + token, mask=entry < merged, other=-1)
            # Only those that come to this program's rows, in order.
            waiting = tl.where((into >= low) & (into < high) & (into >= 0), entry, merged)
            next_ = tl.min(waiting, 0)
            while next_ < merged:
                chosen = entry == next_
                goal, moved = tl.sum(tl.where(chosen, into, 0), 0), tl.sum(tl.where(chosen, token, 0), 0)
                other = _row(
                    x, branch, gamma, (base + moved).to(tl.int64), stride_x, stride_branch, channel,
                    channel < WIDTH, BRANCH, GAMMA,
                )  # fmt: skip
                part = tl.where(plain, 1.0, tl.load(weight + base + moved)) / divisor
                part = tl.where(place == goal, part, 0.0)
                mean += part[:, None] * other[None, :]
                if LENGTH:
                    length += part * tl.sqrt(tl.sum(other * other, 0))
                waiting = tl.where(chosen, merged, waiting)
                next_ = tl.min(waiting, 0)
        if LENGTH:
            factor = length / tl.maximum(tl.sqrt(tl.sum(mean * mean, 1)), 1.1754943508222875e-38)
            # Nothing can be scaled to a length that has no direction.
            mean *= tl.where(tl.abs(factor) < float("inf"), factor, 1.0)[:, None]
    # Who stays alone comes back bit for bit.
    result = tl.where((number > 1.0)[:, None], mean, own).to(y.dtype.element_ty)
    goes = (before + row).to(tl.int64)[:, None] * WIDTH + channel[None, :]
    tl.store(y + goes, result, mask=inside)
    tl.store(new_size + before + row, sized, mask=there)
    tl.store(new_logs + before + row, tl.log2(sized), mask=there)
    if NORM:
        out = norm_row(result.to(tl.float32), inside, norm_weight, norm_bias, channel, eps, WIDTH, WEIGHT, BIAS)
        tl.store(normed + goes, out.to(y.dtype.element_ty), mask=inside)


def merge(
    x: Packed,
    size: PerRow,
    layout: Layout,
    choice: Choice,
    *,
    branch: Packed | None = None,
    gamma: Float[Tensor, " d"] | None = None,
    norm: Norm | None = None,
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
    channels = power(width)
    per = max(1, min(4, 4096 // channels))
    programs = blocks(layout.longest, per) * layout.images
    _merge[(blocks(layout.longest, per), layout.images)](
        x, branch, gamma, choice.slot, choice.gone, choice.origin, choice.count, choice.weight, choice.size,
        choice.members, choice.total, size, layout.offsets,
        y, normed, new_size, logs, offsets, None if norm is None else norm.weight, None if norm is None else norm.bias,
        0.0 if norm is None else norm.eps, layout.images, layout.prefix, x.stride(0),
        0 if branch is None else branch.stride(0), WIDTH=width, CHANNELS=channels, ROWS=per,
        IMAGES=power(layout.images), BRANCH=branch is not None, GAMMA=gamma is not None, NORM=norm is not None,
        WEIGHT=norm is not None and norm.weight is not None, BIAS=norm is not None and norm.bias is not None,
        LENGTH=keep_length, LIST=32,
        # Many programs get the most out of memory with one warp each; few would leave it idle.
        num_warps=1 if programs >= 32 * processors(x.device) else 4,
        **placed(x),
    )  # fmt: skip
    return y, normed, new_size, logs, offsets
