"""Salience and matching of an image by one program, which loads every token once.

The affinity is symmetric: only three of its four quadrants are computed, and the off-diagonal one serves the rows of
both halves.  The squared lengths are on the diagonal.  Column sums of a diagonal quadrant are computed as row sums,
which are cheaper.

For images of up to 256 patches in half precision.  There must be many images, or most processors are idle.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, Packed, PerRow, RowSlots
from adamerge.runtime.triton.kernels.launch import (
    LOG2E,
    blocks,
    empty_rows,
    next_pow2,
    pdl_options,
    pdl_wait,
    processors,
    tma_describable,
    tma_descriptor,
)
from adamerge.runtime.triton.kernels.match import NO_PARTNER, Split, best_of, source_at, store_partners
from adamerge.runtime.triton.kernels.residual import SHORTEST

# Tokens in the first quadrant; the last one has as many, or half of that, or there is none.
NEAR = 128
STEP = 64


@triton.jit
@no_type_check
def _inverse(square, SHORTEST_: tl.constexpr):
    """One over a length."""
    return 1.0 / tl.maximum(tl.sqrt(square), SHORTEST_)


@triton.jit
@no_type_check
def _diagonal(product):
    """The squares of the lengths."""
    place = tl.arange(0, product.shape[0])
    return tl.sum(tl.where(place[:, None] == place[None, :], product, 0.0), 1)


@triton.jit
@no_type_check
def _best_down(similarity, allowed, row):
    """The best of each column, and in which row; ties go to the upper one."""
    similarity = tl.where(allowed, similarity, float("-inf"))
    high = tl.max(similarity, 0)
    return high, tl.min(tl.where((similarity == high[None, :]) & allowed, row[:, None], NO_PARTNER), 0)


@triton.jit
@no_type_check
def scores(product, column, own, other, n, scale, COSINE: tl.constexpr):
    """The affinity, -inf where there is no column."""
    score = product * scale
    if COSINE:
        score = score * own[:, None] * other[None, :]
    return tl.where((column < n)[None, :], score, float("-inf"))


@triton.jit
@no_type_check
def _small(
    near, sums, value, partner, base, n, scale,
    COSINE: tl.constexpr, ALTERNATING: tl.constexpr, FIRST: tl.constexpr, NEAR: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, SHORTEST_: tl.constexpr,
):  # fmt: skip
    """An image whose tokens are in one quadrant."""
    upper = tl.zeros([NEAR, NEAR], tl.float32)
    for channel in range(0, WIDTH, STEP):
        one = near.load([base, channel])
        upper = tl.dot(one, one.T, upper)
    p = tl.arange(0, NEAR)
    own = _inverse(_diagonal(upper), SHORTEST_)
    target = (p < n) & ~source_at(p, n, ALTERNATING, FIRST)
    best = tl.full([NEAR], float("-inf"), tl.float32)
    which = tl.full([NEAR], NO_PARTNER, tl.int32)
    best, which = best_of(upper * own[None, :], target[None, :], p, best, which)
    store_partners(value, partner, base, p, best * own, which, n, ALTERNATING, FIRST)
    upper = scores(upper, p, own, own, n, scale, COSINE)
    high = tl.where(p < n, tl.max(upper, 1), 0.0)
    part = (p < n) / tl.where(p < n, tl.sum(tl.exp2(upper - high[:, None]), 1), 1.0)
    tl.store(sums + base + p, tl.sum(tl.exp2(upper - high[None, :]) * part[None, :], 1), mask=p < n)


@triton.jit
@no_type_check
def _large(
    near, far, sums, value, partner, base, n, scale,
    COSINE: tl.constexpr, ALTERNATING: tl.constexpr, FIRST: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, SHORTEST_: tl.constexpr,
):  # fmt: skip
    """An image whose first NEAR tokens are all there, and up to FAR more."""
    upper = tl.zeros([NEAR, NEAR], tl.float32)
    beside = tl.zeros([NEAR, FAR], tl.float32)
    lower = tl.zeros([FAR, FAR], tl.float32)
    square = tl.zeros([FAR], tl.float32)
    for channel in range(0, WIDTH, STEP):
        one, two = near.load([base, channel]), far.load([base + NEAR, channel])
        upper = tl.dot(one, one.T, upper)
        beside = tl.dot(one, two.T, beside)
        if FAR < NEAR:
            lower = tl.dot(two, two.T, lower)
        else:
            wide = two.to(tl.float32)
            square += tl.sum(wide * wide, 1)
    p, q = tl.arange(0, NEAR), NEAR + tl.arange(0, FAR)
    own, other = _inverse(_diagonal(upper), SHORTEST_), _inverse(_diagonal(lower) if FAR < NEAR else square, SHORTEST_)

    # A row's own length changes none of its comparisons; it is put in at the end.
    target = ~source_at(p, n, ALTERNATING, FIRST)
    further = (q < n) & ~source_at(q, n, ALTERNATING, FIRST)
    best = tl.full([NEAR], float("-inf"), tl.float32)
    which = tl.full([NEAR], NO_PARTNER, tl.int32)
    best, which = best_of(upper * own[None, :], target[None, :], p, best, which)
    best, which = best_of(beside * other[None, :], further[None, :], q, best, which)
    store_partners(value, partner, base, p, best * own, which, n, ALTERNATING, FIRST)
    if ALTERNATING:
        best, which = _best_down(beside * own[:, None], target[:, None], p)

    # Columns that are not there have nothing to give.
    upper = scores(upper, p, own, own, n, scale, COSINE)
    beside = scores(beside, q, own, other, n, scale, COSINE)
    high = tl.maximum(tl.max(upper, 1), tl.max(beside, 1))
    right = tl.exp2(beside - high[:, None])
    part = 1.0 / (tl.sum(tl.exp2(upper - high[:, None]), 1) + tl.sum(right, 1))
    here = tl.sum(tl.exp2(upper - high[None, :]) * part[None, :], 1)
    there = tl.sum(right * part[:, None], 0)

    if FAR == NEAR:
        # Registers hold two quadrants of this size and no third; some tokens are fetched again.
        for channel in range(0, WIDTH, STEP):
            two = far.load([base + NEAR, channel])
            lower = tl.dot(two, two.T, lower)
    if ALTERNATING:
        # Otherwise sources are the first half, all of them above.
        best, which = best_of(lower * other[None, :], further[None, :], q, best, which)
        store_partners(value, partner, base, q, best * other, which, n, ALTERNATING, FIRST)
    lower = scores(lower, q, other, other, n, scale, COSINE)
    high = tl.where(q < n, tl.maximum(tl.max(beside, 0), tl.max(lower, 1)), 0.0)
    beside = tl.exp2(beside - high[None, :])
    part = (q < n) / tl.where(q < n, tl.sum(beside, 0) + tl.sum(tl.exp2(lower - high[:, None]), 1), 1.0)
    here += tl.sum(beside * part[None, :], 1)
    there += tl.sum(tl.exp2(lower - high[None, :]) * part[None, :], 1)
    tl.store(sums + base + p, here)
    tl.store(sums + base + q, there, mask=q < n)


@triton.jit
@no_type_check
def _affinity_one_program(
    near, middle, sums, value, partner, offsets, prefix, scale,
    COSINE: tl.constexpr, ALTERNATING: tl.constexpr, FIRST: tl.constexpr, NEAR: tl.constexpr, MOST: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, SHORTEST_: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles reach into the next image; what they find there is masked."""
    image = tl.program_id(0)
    base = tl.load(offsets + image) + prefix
    n = tl.load(offsets + image + 1) - base
    pdl_wait(EARLY)
    HALF: tl.constexpr = NEAR // 2
    if n <= NEAR:
        _small(near, sums, value, partner, base, n, scale, COSINE, ALTERNATING, FIRST, NEAR, WIDTH, STEP, SHORTEST_)
    elif MOST > NEAR:
        if n <= NEAR + HALF:
            _large(
                near, middle, sums, value, partner, base, n, scale, COSINE, ALTERNATING, FIRST, NEAR, HALF, WIDTH, STEP,
                SHORTEST_,
            )  # fmt: skip
        elif MOST > NEAR + HALF:
            _large(
                near, near, sums, value, partner, base, n, scale, COSINE, ALTERNATING, FIRST, NEAR, NEAR, WIDTH, STEP,
                SHORTEST_,
            )  # fmt: skip


def worthwhile(x: Packed, layout: Layout) -> bool:
    """Whether the images are small enough, and enough of them."""
    fits = 0 < layout.longest - layout.prefix <= 2 * NEAR
    return fits and tma_describable(x) and 2 * layout.images >= processors(x.device)


def affinity_one_program(
    x: Packed, layout: Layout, split: Split, scale: float, cosine: bool
) -> tuple[Float[Tensor, "one total"], int, PerRow, RowSlots]:
    """As `affinity` in one part, for layouts that are `worthwhile`; its reference is that of `affinity`."""
    total, width = x.shape
    sums, value = empty_rows(2, total, torch.float32, x.device)
    partner = torch.empty(total, dtype=torch.int32, device=x.device)
    step = min(STEP, next_pow2(width))
    _affinity_one_program[(layout.images,)](
        tma_descriptor(x, [NEAR, step]), tma_descriptor(x, [NEAR // 2, step]),
        sums, value, partner, layout.offsets, layout.prefix,
        scale * LOG2E, COSINE=cosine, ALTERNATING=split.alternating, FIRST=split.first, NEAR=NEAR,
        MOST=blocks(layout.longest - layout.prefix, NEAR // 2) * (NEAR // 2), WIDTH=width, STEP=step,
        SHORTEST_=SHORTEST, num_warps=16, num_stages=4, **pdl_options(x),
    )  # fmt: skip
    return sums[None], 2 * NEAR, value, partner
