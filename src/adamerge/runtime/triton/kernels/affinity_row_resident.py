"""Salience and matching of images too large for one program: each program keeps all dot products of its rows.

A softmax needs the greatest score of its row first.  64 rows of up to 640 products fit into the registers of a
multiprocessor, so that none is computed twice.  For half precision; longer rows take two passes.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, Packed, PerRow, RowSlots
from adamerge.runtime.triton.kernels.affinity_one_program import scores
from adamerge.runtime.triton.kernels.launch import (
    LOG2E,
    blocks,
    next_pow2,
    num_stages_for,
    pdl_options,
    pdl_wait,
    tma_describable,
    tma_descriptor,
)
from adamerge.runtime.triton.kernels.match import NO_PARTNER, Split, best_of, source_at, source_count, store_partners

ROWS, STEP, WIDE = 64, 64, 256
# How many columns the tiles of a program have together: as few of these as hold the image.
COLUMNS = (WIDE + WIDE // 2, 2 * WIDE, 2 * WIDE + WIDE // 4, 2 * WIDE + WIDE // 2)


@triton.jit
@no_type_check
def _products(
    rows, columns, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Dot products of a block of rows and a block of columns."""
    sum_ = tl.zeros([ROWS, COLUMNS], tl.float32)
    for channel in range(0, WIDTH, STEP):
        sum_ = tl.dot(rows.load([row, channel]), columns.load([column, channel]).T, sum_)
    return sum_


@triton.jit
@no_type_check
def _matched(product, inverse, base, column, n, best, which, ALTERNATING: tl.constexpr, FIRST: tl.constexpr):
    """Fold a tile into the best partner so far; a row's own length changes none of its comparisons."""
    other = tl.load(inverse + base + column, mask=column < n, other=0.0)
    target = (column < n) & ~source_at(column, n, ALTERNATING, FIRST)
    return best_of(product * other[None, :], target[None, :], column, best, which)


@triton.jit
@no_type_check
def _scored(product, inverse, base, column, n, scale, own, COSINE: tl.constexpr):
    """The affinity of a tile."""
    other = own
    if COSINE:
        other = tl.load(inverse + base + column, mask=column < n, other=0.0)
    return scores(product, column, own, other, n, scale, COSINE)


@triton.jit
@no_type_check
def _give(out, weight, part, there, column, n):
    """Write what the rows give to some columns."""
    tl.store(out + column, tl.sum(tl.where(there[:, None], weight * part[:, None], 0.0), 0), mask=column < n)


@triton.jit
@no_type_check
def _block(
    rows, wide, middle, narrow, inverse, out, value, partner, base, row, n, scale,
    COSINE: tl.constexpr, ALTERNATING: tl.constexpr, FIRST: tl.constexpr,
    ONE: tl.constexpr, TWO: tl.constexpr, THREE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rows against tiles of so many columns, the third of which may be missing."""
    begin = tl.program_id(0) * ROWS
    p, q = tl.arange(0, ONE), ONE + tl.arange(0, TWO)
    a = _products(rows, wide, base + begin, base, ROWS, ONE, WIDTH, STEP)
    b = _products(rows, wide if TWO == ONE else middle, base + begin, base + ONE, ROWS, TWO, WIDTH, STEP)
    if THREE:
        s = ONE + TWO + tl.arange(0, THREE)
        last = middle if THREE == ONE // 2 else narrow
        c = _products(rows, last, base + begin, base + ONE + TWO, ROWS, THREE, WIDTH, STEP)
    own = tl.load(inverse + base + row, mask=row < n, other=0.0)

    # Where sources are the first half, the rows of the others have no partner to find.
    if ALTERNATING or begin < source_count(n, ALTERNATING, FIRST):
        best = tl.full([ROWS], float("-inf"), tl.float32)
        which = tl.full([ROWS], NO_PARTNER, tl.int32)
        best, which = _matched(a, inverse, base, p, n, best, which, ALTERNATING, FIRST)
        best, which = _matched(b, inverse, base, q, n, best, which, ALTERNATING, FIRST)
        if THREE:
            best, which = _matched(c, inverse, base, s, n, best, which, ALTERNATING, FIRST)
        store_partners(value, partner, base, row, best * own, which, n, ALTERNATING, FIRST)

    a = _scored(a, inverse, base, p, n, scale, own, COSINE)
    b = _scored(b, inverse, base, q, n, scale, own, COSINE)
    high = tl.maximum(tl.max(a, 1), tl.max(b, 1))
    if THREE:
        c = _scored(c, inverse, base, s, n, scale, own, COSINE)
        high = tl.maximum(high, tl.max(c, 1))
    a, b = tl.exp2(a - high[:, None]), tl.exp2(b - high[:, None])
    mass = tl.sum(a, 1) + tl.sum(b, 1)
    if THREE:
        c = tl.exp2(c - high[:, None])
        mass += tl.sum(c, 1)
    _give(out, a, 1.0 / mass, row < n, p, n)
    _give(out, b, 1.0 / mass, row < n, q, n)
    if THREE:
        _give(out, c, 1.0 / mass, row < n, s, n)


@triton.jit(do_not_specialize=["total"])
@no_type_check
def _affinity_row_resident(
    rows, wide, middle, narrow, inverse, sums, value, partner, offsets, prefix, scale, total,
    COSINE: tl.constexpr, ALTERNATING: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles reach into the next image; what they find there is masked.  No image has more than COLUMNS patches."""
    block, image = tl.program_id(0), tl.program_id(1)
    base = tl.load(offsets + image) + prefix
    n = tl.load(offsets + image + 1) - base
    pdl_wait(EARLY)
    if block * ROWS >= n:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    out = sums + block.to(tl.int64) * total + base
    MIDDLE: tl.constexpr = WIDE // 2
    NARROW: tl.constexpr = WIDE // 4
    if n <= WIDE + MIDDLE:
        _block(
            rows, wide, middle, narrow, inverse, out, value, partner, base, row, n, scale,
            COSINE, ALTERNATING, FIRST, WIDE, MIDDLE, 0, ROWS, WIDTH, STEP,
        )  # fmt: skip
    elif COLUMNS > WIDE + MIDDLE:
        if n <= 2 * WIDE:
            _block(
                rows, wide, middle, narrow, inverse, out, value, partner, base, row, n, scale,
                COSINE, ALTERNATING, FIRST, WIDE, WIDE, 0, ROWS, WIDTH, STEP,
            )  # fmt: skip
        elif COLUMNS > 2 * WIDE:
            if n <= 2 * WIDE + NARROW:
                _block(
                    rows, wide, middle, narrow, inverse, out, value, partner, base, row, n, scale,
                    COSINE, ALTERNATING, FIRST, WIDE, WIDE, NARROW, ROWS, WIDTH, STEP,
                )  # fmt: skip
            elif COLUMNS > 2 * WIDE + NARROW:
                _block(
                    rows, wide, middle, narrow, inverse, out, value, partner, base, row, n, scale,
                    COSINE, ALTERNATING, FIRST, WIDE, WIDE, MIDDLE, ROWS, WIDTH, STEP,
                )  # fmt: skip


def fits_registers(x: Packed, layout: Layout) -> bool:
    """Whether the images are too large for one tile of columns, and their rows small enough for registers."""
    return WIDE < layout.longest - layout.prefix <= COLUMNS[-1] and tma_describable(x)


def affinity_row_resident(
    x: Packed, inverse: PerRow, layout: Layout, split: Split, scale: float, cosine: bool
) -> tuple[Float[Tensor, "blocks total"], int, PerRow, RowSlots]:
    """As `affinity`, for images whose rows fit into registers; its reference is that of `affinity`."""
    total, width = x.shape
    longest = layout.longest - layout.prefix
    parts = blocks(longest, ROWS)
    sums = torch.empty((parts, total), dtype=torch.float32, device=x.device)
    value = torch.empty(total, dtype=torch.float32, device=x.device)
    partner = torch.empty(total, dtype=torch.int32, device=x.device)
    step = min(STEP, next_pow2(width))
    rows, wide, middle, narrow = (tma_descriptor(x, [size, step]) for size in (ROWS, WIDE, WIDE // 2, WIDE // 4))
    _affinity_row_resident[(parts, layout.images)](
        rows, wide, middle, narrow, inverse, sums, value, partner, layout.offsets, layout.prefix, scale * LOG2E, total,
        COSINE=cosine, ALTERNATING=split.alternating, FIRST=split.first,
        COLUMNS=next(columns for columns in COLUMNS if longest <= columns), WIDE=WIDE, ROWS=ROWS, WIDTH=width,
        STEP=step,
        num_warps=8, num_stages=num_stages_for(4, x, ROWS, WIDE, step), **pdl_options(x),
    )  # fmt: skip
    return sums, ROWS, value, partner
