"""Each source's most similar target, from packed features."""

from dataclasses import dataclass
from itertools import pairwise
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, PerRow, RowSlots
from adamerge.runtime.triton.kernels.launch import (
    blocks,
    next_pow2,
    num_stages_for,
    pdl_options,
    pdl_wait,
    precision,
    processors,
)

# Greater than every place: the partner of a source that has none yet.
NO_PARTNER = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Split:
    """Who is a source: the first half of the patches, or every second one beginning with `first`.

    `half` limits merges to the number of targets (ToMe).
    """

    alternating: bool
    first: int = 0
    half: bool = False

    def sides(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The sources and targets among `n` tokens."""
        everyone = torch.arange(n, device=device)
        if self.alternating:
            sources, targets = everyone[self.first :: 2], everyone[1 - self.first :: 2]
        else:
            sources, targets = everyone[: n // 2], everyone[n // 2 :]
        return (sources, targets) if n > 1 else (everyone[:0], targets)

    def source_count(self, n: int) -> int:
        """How many of `n` tokens are sources; `source_count` of the kernels says the same."""
        if not self.alternating:
            return n // 2
        return (n + 1 - self.first) // 2 if n > 1 else 0

    def most_merges(self, n: int) -> int:
        """How many of `n` tokens can merge away."""
        sources = self.source_count(n)
        return min(sources, n - sources) if self.half else sources


@triton.jit
@no_type_check
def source_count(n, ALTERNATING: tl.constexpr, FIRST: tl.constexpr):
    """How many of `n` tokens are sources."""
    if ALTERNATING:
        # A single token has no target.
        return tl.where(n > 1, (n + 1 - FIRST) // 2, 0)
    return n // 2


@triton.jit
@no_type_check
def target_count(n, ALTERNATING: tl.constexpr, FIRST: tl.constexpr):
    """How many of `n` tokens are targets, at least; a single token is one or none."""
    if ALTERNATING:
        return (n + FIRST) // 2
    return n - n // 2


@triton.jit
@no_type_check
def source_at(place, n, ALTERNATING: tl.constexpr, FIRST: tl.constexpr):
    """Whether the token at a place is a source."""
    if ALTERNATING:
        return (place % 2 == FIRST) & (place < tl.where(n > 1, n, 0))
    return place < source_count(n, ALTERNATING, FIRST)


@triton.jit
@no_type_check
def products(
    x, row, column, row_there, column_there,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Dot products of two blocks of tokens; `row` and `column` are where they begin in memory."""
    sum_ = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, WIDTH, STEP):
        channel = begin + tl.arange(0, STEP)
        inside = (channel < WIDTH)[None, :]
        a = tl.load(x + row[:, None] + channel[None, :], mask=row_there[:, None] & inside, other=0.0)
        b = tl.load(x + column[:, None] + channel[None, :], mask=column_there[:, None] & inside, other=0.0)
        sum_ = tl.dot(a, tl.trans(b), sum_, input_precision=PRECISION)
    return sum_


@triton.jit
@no_type_check
def best_of(similarity, allowed, column, best, partner):
    """Fold a tile of similarities into the best one so far of each row; ties go to the lower column."""
    similarity = tl.where(allowed, similarity, float("-inf"))
    high = tl.max(similarity, 1)
    which = tl.min(tl.where((similarity == high[:, None]) & allowed, column[None, :], NO_PARTNER), 1)
    better = high > best
    return tl.where(better, high, best), tl.where(better, which, partner)


@triton.jit
@no_type_check
def store_partners(value, partner, base, place, best, which, n, ALTERNATING: tl.constexpr, FIRST: tl.constexpr):
    """Store the partners of sources.  A source of NaN features has no best target; as in torch, it gets the first."""
    source = source_at(place, n, ALTERNATING, FIRST)
    first_target = 1 - FIRST if ALTERNATING else source_count(n, ALTERNATING, FIRST)
    tl.store(value + base + place, best, mask=source)
    tl.store(partner + base + place, tl.where(which < n, which, first_target), mask=source)


@triton.jit
@no_type_check
def _match(
    features, inverse, value, partner, offsets, stride, prefix,
    WIDTH: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ALTERNATING: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    block, image = tl.program_id(0), tl.program_id(1)
    base = tl.load(offsets + image) + prefix
    n = tl.load(offsets + image + 1) - base
    pdl_wait(EARLY)
    number = block * ROWS + tl.arange(0, ROWS)
    source = 2 * number + FIRST if ALTERNATING else number
    is_source = source_at(source, n, ALTERNATING, FIRST)
    if (2 * block * ROWS + FIRST if ALTERNATING else block * ROWS) >= n:
        return
    best = tl.full([ROWS], float("-inf"), tl.float32)
    which = tl.full([ROWS], NO_PARTNER, tl.int32)
    row = (base + source).to(tl.int64) * stride
    if SCALED:
        own = tl.load(inverse + base + source, mask=is_source, other=0.0)
    for begin in range(0, target_count(n, ALTERNATING, FIRST), COLUMNS):
        other = begin + tl.arange(0, COLUMNS)
        target = 2 * other + (1 - FIRST) if ALTERNATING else source_count(n, ALTERNATING, FIRST) + other
        there = target < n
        column = (base + target).to(tl.int64) * stride
        similarity = products(features, row, column, is_source, there, ROWS, COLUMNS, WIDTH, STEP, PRECISION)
        if SCALED:
            similarity *= own[:, None] * tl.load(inverse + base + target, mask=there, other=0.0)[None, :]
        best, which = best_of(similarity, there[None, :], target, best, which)
    store_partners(value, partner, base, source, best, which, n, ALTERNATING, FIRST)


def match(
    features: Float[Tensor, "total k"],
    layout: Layout,
    split: Split,
    *,
    inverse: PerRow | None = None,
) -> tuple[PerRow, RowSlots]:
    """For every source the greatest product with a target, and that target's place; other entries mean nothing.

    The features have length 1, so that products are cosines, or `inverse` is one over their lengths.
    """
    total, width = features.shape
    value = torch.empty(total, dtype=torch.float32, device=features.device)
    partner = torch.empty(total, dtype=torch.int32, device=features.device)
    sources = split.source_count(layout.most)
    if sources == 0 or layout.images == 0:
        return value, partner
    rows, columns, step, stages = _shape(features, blocks(sources, 64) * layout.images)
    step = min(step, next_pow2(width))
    _match[(blocks(sources, rows), layout.images)](
        features, inverse, value, partner, layout.offsets, features.stride(0), layout.prefix,
        WIDTH=width, STEP=step, ROWS=rows, COLUMNS=columns, ALTERNATING=split.alternating,
        FIRST=split.first, PRECISION=precision(features),
        SCALED=inverse is not None, num_warps=4,
        num_stages=num_stages_for(stages, features, rows, columns, step),
        **pdl_options(features),
    )  # fmt: skip
    return value, partner


def _shape(features: Float[Tensor, "total k"], programs: int) -> tuple[int, int, int, int]:
    """Rows, columns and channels of a tile, and stages.  `programs` are those of 64 rows each."""
    if features.dtype == torch.float32:
        return 32, 32, 64, 3
    # Few images are cut finer, so that more processors take part, and asked for further ahead.
    return (64, 64, 64, 3) if programs >= processors(features.device) // 2 else (16, 128, 128, 4)


def match_reference(features: Float[Tensor, "total k"], layout: Layout, split: Split) -> tuple[PerRow, RowSlots]:
    """The same, image by image in plain torch."""
    value, partner = features.new_zeros(len(features)), torch.zeros(len(features), dtype=torch.int32)
    for begin, end in pairwise(layout.offsets.tolist()):
        base = begin + layout.prefix
        sources, targets = split.sides(end - base, features.device)
        if len(sources) and len(targets):
            best, which = (features[base:end][sources] @ features[base:end][targets].mT).max(1)
            value[base + sources] = best
            partner[base + sources] = targets[which].int()
    return value, partner
