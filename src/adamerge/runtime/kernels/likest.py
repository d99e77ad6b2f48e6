"""Each source's most similar target by its keys: `directions` and `match` in one pass, an image a program.

For many images whose patches fit into one tile and take turns as sources and targets, as in all methods of ToMe's kind.
Few images leave most processors idle here; the two kernels do better then.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from adamerge.runtime.kernels.directions import directions_reference
from adamerge.runtime.kernels.launch import others_done, placed, power, processors
from adamerge.runtime.kernels.match import Split, best_of, match_reference, source_at
from adamerge.runtime.ragged import Layout, PackedHeads, PerRow, RowSlots

# Patches of a tile.
MOST = 256


@triton.jit
@no_type_check
def _likest(
    key, value, partner, offsets, row_stride, head_stride, prefix,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    base = tl.load(offsets + image) + prefix
    n = tl.load(offsets + image + 1) - base
    others_done(EARLY)
    place, channel = tl.arange(0, 2 * PAIRS), tl.arange(0, DIMS)
    inside = (place < n)[:, None] & (channel < DIM)[None, :]
    at = (base + place).to(tl.int64)[:, None] * row_stride + channel[None, :]
    sum_ = tl.zeros([2 * PAIRS, DIMS], tl.float32)
    for head in range(HEADS):
        sum_ += tl.load(key + at + head * head_stride, mask=inside, other=0.0).to(tl.float32)
    mean = sum_ / HEADS
    unit = mean / tl.maximum(tl.sqrt(tl.sum(mean * mean, 1)), 1e-12)[:, None]
    even, odd = tl.split(tl.permute(tl.reshape(unit, (PAIRS, 2, DIMS)), (0, 2, 1)))
    if FIRST == 0:
        similarity = tl.dot(even, tl.trans(odd), input_precision=PRECISION)
    else:
        similarity = tl.dot(odd, tl.trans(even), input_precision=PRECISION)
    pair = tl.arange(0, PAIRS)
    source, target = 2 * pair + FIRST, 2 * pair + 1 - FIRST
    best = tl.full([PAIRS], float("-inf"), tl.float32)
    which = tl.full([PAIRS], 2147483647, tl.int32)
    best, which = best_of(similarity, (target < n)[None, :], target, best, which, 2147483647)
    is_source = source_at(source, n, True, FIRST)
    # Keys that are not numbers have no best partner; everybody needs a valid one.
    tl.store(value + base + source, best, mask=is_source)
    tl.store(partner + base + source, tl.where(which < n, which, source), mask=is_source)


def likest(key: PackedHeads, layout: Layout, split: Split, *, exact: bool = True) -> tuple[PerRow, RowSlots]:
    """For every source the greatest cosine with a target by their mean keys, and that target's place.

    `exact` as `match` takes it.
    """
    total, heads, dim = key.shape
    value = torch.empty(total, dtype=torch.float32, device=key.device)
    partner = torch.empty(total, dtype=torch.int32, device=key.device)
    if layout.images and layout.most:
        pairs = power(layout.most, 32) // 2
        _likest[(layout.images,)](
            key, value, partner, layout.offsets, key.stride(0), key.stride(1), layout.prefix,
            HEADS=heads, DIM=dim, DIMS=power(dim), PAIRS=pairs, FIRST=split.first,
            PRECISION="ieee" if exact else "tf32x3", num_warps=8 if pairs > 64 else 4,
            **placed(key),
        )  # fmt: skip
    return value, partner


def fits(layout: Layout, split: Split) -> bool:
    """Whether there are many images, the patches of each fit into one tile, and are sources and targets in turn."""
    many = 2 * layout.images >= processors(layout.offsets.device)
    return many and split.alternating and layout.most <= MOST


def likest_reference(key: PackedHeads, layout: Layout, split: Split) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    return match_reference(directions_reference(key), layout, split)
