"""Salience and matching from the same dot products, without writing an n by n array to memory.

The paper's affinity of all patches gives, row by row, a softmax whose column sums are the salience, and the cosines
that find each source its partner.  A block of rows is one program; it leaves its part of the column sums, which are
added in a fixed order, so that an image's salience never depends on the scheduling.  It does not depend on the batch in
float32; in half precision few images are cut into smaller blocks, and long ones beside it bring another kernel, whose
sums may round otherwise.
"""

from itertools import pairwise
from typing import Literal, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, Packed, PerRow, RowSlots
from adamerge.runtime.triton.kernels.affinity_one_program import affinity_one_program, worthwhile
from adamerge.runtime.triton.kernels.affinity_row_resident import affinity_row_resident, fits_registers
from adamerge.runtime.triton.kernels.launch import (
    blocks,
    next_pow2,
    num_stages_for,
    pdl_options,
    pdl_wait,
    precision,
    processors,
    tma_describable,
    tma_descriptor,
)
from adamerge.runtime.triton.kernels.match import NO_PARTNER, Split, best_of, products, source_at, store_partners
from adamerge.runtime.triton.kernels.residual import add

Kind = Literal["dot", "scaled", "cosine"]


@triton.jit
@no_type_check
def _tile(
    x, upper, lower, inverse, base, row, begin, n, stride, scale, own, COSINE: tl.constexpr, DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the affinity, -inf where there is no column, and the cosines of the same products."""
    column = begin + tl.arange(0, COLUMNS)
    if DESCRIBED:
        # Tiles reach into the next image; what they find there is masked below.
        first = base + tl.program_id(0) * ROWS
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for channel in range(0, WIDTH, STEP):
            product = tl.dot(upper.load([first, channel]), lower.load([base + begin, channel]).T, product)
    else:
        at_row, at_column = (base + row).to(tl.int64) * stride, (base + column).to(tl.int64) * stride
        product = products(x, at_row, at_column, row < n, column < n, ROWS, COLUMNS, WIDTH, STEP, PRECISION)
    other = tl.load(inverse + base + column, mask=column < n, other=0.0)
    cosine = product * own[:, None] * other[None, :]
    score = cosine if COSINE else product * scale
    return tl.where((column < n)[None, :], score, float("-inf")), cosine, column


@triton.jit(do_not_specialize=["total"])
@no_type_check
def _affinity(
    x, upper, lower, inverse, sums, value, partner, offsets, stride, prefix, scale, total,
    COSINE: tl.constexpr, DESCRIBED: tl.constexpr, ONE_TILE: tl.constexpr, ALTERNATING: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    block, image = tl.program_id(0), tl.program_id(1)
    base = tl.load(offsets + image) + prefix
    n = tl.load(offsets + image + 1) - base
    pdl_wait(EARLY)
    if block * ROWS >= n:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    own = tl.load(inverse + base + row, mask=row < n, other=0.0)
    high = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    which = tl.full([ROWS], NO_PARTNER, tl.int32)
    out = sums + block.to(tl.int64) * total + base
    if ONE_TILE:
        score, cosine, column = _tile(
            x, upper, lower, inverse, base, row, 0, n, stride, scale, own,
            COSINE, DESCRIBED, ROWS, COLUMNS, WIDTH, STEP, PRECISION,
        )  # fmt: skip
        target = (column < n) & ~source_at(column, n, ALTERNATING, FIRST)
        best, which = best_of(cosine, target[None, :], column, best, which)
        high = tl.max(score, 1)
        weight = tl.exp(score - high[:, None])
        weight = tl.where((row < n)[:, None], weight / tl.sum(weight, 1)[:, None], 0.0)
        tl.store(out + column, tl.sum(weight, 0), mask=column < n)
    else:
        for begin in range(0, n, COLUMNS):
            score, cosine, column = _tile(
                x, upper, lower, inverse, base, row, begin, n, stride, scale, own,
                COSINE, DESCRIBED, ROWS, COLUMNS, WIDTH, STEP, PRECISION,
            )  # fmt: skip
            target = (column < n) & ~source_at(column, n, ALTERNATING, FIRST)
            best, which = best_of(cosine, target[None, :], column, best, which)
            higher = tl.maximum(high, tl.max(score, 1))
            mass = mass * tl.exp(high - higher) + tl.sum(tl.exp(score - higher[:, None]), 1)
            high = higher
        for begin in range(0, n, COLUMNS):
            score, cosine, column = _tile(
                x, upper, lower, inverse, base, row, begin, n, stride, scale, own,
                COSINE, DESCRIBED, ROWS, COLUMNS, WIDTH, STEP, PRECISION,
            )  # fmt: skip
            weight = tl.exp(score - high[:, None]) / mass[:, None]
            tl.store(out + column, tl.sum(tl.where((row < n)[:, None], weight, 0.0), 0), mask=column < n)
    store_partners(value, partner, base, row, best, which, n, ALTERNATING, FIRST)


def affinity(
    x: Packed, inverse: PerRow | None, layout: Layout, split: Split, kind: Kind
) -> tuple[Float[Tensor, "blocks total"], int, PerRow, RowSlots]:
    """The column sums of the row-softmaxed affinity in parts, the rows of a part, and each source's best partner.

    `inverse` is one over the length of each token, if somebody has it already.  An image's salience is the sum of its
    first `ceil(n / rows)` parts.
    """
    total, width = x.shape
    scale = width**-0.5 if kind == "scaled" else 1.0
    if worthwhile(x, layout):
        return affinity_one_program(x, layout, split, scale, cosine=kind == "cosine")
    inverse = add(x, None, inverse=True, counted=layout.offsets[-1:])[2] if inverse is None else inverse
    if fits_registers(x, layout):
        return affinity_row_resident(x, inverse, layout, split, scale, cosine=kind == "cosine")
    rows, columns, warps, stages = _shape(layout, x)
    parts = blocks(layout.longest - layout.prefix, rows)
    sums = torch.empty((max(parts, 1), total), dtype=torch.float32, device=x.device)
    value = torch.empty(total, dtype=torch.float32, device=x.device)
    partner = torch.empty(total, dtype=torch.int32, device=x.device)
    if parts and layout.images:
        step = min(64, next_pow2(width))
        described = tma_describable(x)
        upper, lower = (tma_descriptor(x, [rows, step]), tma_descriptor(x, [columns, step])) if described else (x, x)
        _affinity[(parts, layout.images)](
            x, upper, lower, inverse, sums, value, partner, layout.offsets, x.stride(0), layout.prefix,
            scale, total,
            COSINE=kind == "cosine", DESCRIBED=described, ALTERNATING=split.alternating, FIRST=split.first,
            ONE_TILE=layout.longest - layout.prefix <= columns, ROWS=rows, COLUMNS=columns, WIDTH=width,
            STEP=step, PRECISION=precision(x), num_warps=warps,
            num_stages=num_stages_for(stages, x, rows, columns, step),
            **pdl_options(x),
        )  # fmt: skip
    return sums, rows, value, partner


def _shape(layout: Layout, x: Packed) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps and stages.  One tile holds a whole row of up to 256 tokens.

    Few images are cut finer, so that more processors take part.
    """
    if x.dtype == torch.float32:
        return 32, 64, 4, 2
    longest = layout.longest - layout.prefix
    columns = min(next_pow2(longest, 64), 256) if longest <= 256 else 128
    warps = 4 if columns < 256 else 8
    if blocks(longest, 64) * layout.images < processors(x.device) // 2:
        # With little to do, what takes long is waiting for memory: more is asked for ahead.
        return 16, columns, 4, 6
    return 64, columns, warps, 4


def affinity_reference(x: Packed, layout: Layout, split: Split, kind: Kind) -> tuple[PerRow, PerRow, RowSlots]:
    """Column sums, best cosine and partner, image by image in plain torch."""
    x = x.float()
    sums, value = x.new_zeros(len(x)), x.new_zeros(len(x))
    partner = torch.zeros(len(x), dtype=torch.int32)
    bounds = layout.offsets.tolist()
    for begin, end in pairwise(bounds):
        tokens = x[begin + layout.prefix : end]
        unit = torch.nn.functional.normalize(tokens, dim=-1)
        product = unit @ unit.mT if kind == "cosine" else tokens @ tokens.mT
        product = product / tokens.shape[1] ** 0.5 if kind == "scaled" else product
        base = begin + layout.prefix
        sums[base:end] = product.softmax(-1).sum(0)
        sources, targets = split.sides(len(tokens), x.device)
        if len(sources) and len(targets):
            best, which = (unit[sources] @ unit[targets].mT).max(1)
            value[base + sources] = best
            partner[base + sources] = targets[which].int()
    return sums, value, partner
