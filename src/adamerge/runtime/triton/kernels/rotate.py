"""Rotary position embedding: queries and keys are turned by the place of their token."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.runtime.block_view import Rotation
from adamerge.runtime.packed.layout import Layout, PackedHeads, RowSlots
from adamerge.runtime.triton.kernels.launch import blocks, next_pow2, pdl_options, pdl_wait

# Rows and heads of a tile, and tokens or patches of an image at a time.
ROWS, GROUP, STEP = 8, 8, 1024


# Not one kernel for batches of a multiple of 16 and another for the rest.
@triton.jit(do_not_specialize=["images", "patches", "prefix", "total"])
@no_type_check
def _token_places(history, offsets, place, images, patches, prefix, total, STEP: tl.constexpr, EARLY: tl.constexpr):
    pdl_wait(EARLY)
    image = tl.program_id(0)
    begin, end = tl.load(offsets + image), tl.load(offsets + image + 1)
    number = tl.arange(0, STEP)
    for start in range(0, end - begin, STEP):
        token = start + number
        tl.store(place + begin + token, tl.where(token < prefix, -1, patches), mask=token < end - begin)
    # Rows behind the last image have no place.  All programs share the work.
    for start in range(tl.load(offsets + images) + image * STEP, total, images * STEP):
        row = start + number
        tl.store(place + row, tl.full([STEP], -1, tl.int32), mask=row < total)
    # Other threads take the minimum than wrote the first value.
    tl.debug_barrier()
    for start in range(0, patches, STEP):
        patch = start + number
        token = tl.load(history + image * patches + patch, mask=patch < patches, other=0)
        tl.atomic_min(place + begin + prefix + token, patch, mask=patch < patches)


def token_places(history: Int[Tensor, "b patches"], layout: Layout) -> RowSlots:
    """The place of each packed row: the first patch that its token stands for, -1 for prefix tokens and unused rows."""
    images, patches = history.shape
    place = torch.empty(layout.total, dtype=torch.int32, device=history.device)
    if images:
        _token_places[(images,)](
            history, layout.offsets, place, images, patches, layout.prefix, layout.total, STEP=STEP, num_warps=4,
            **pdl_options(place),
        )  # fmt: skip
    return place


def token_places_reference(history: Int[Tensor, "b patches"], layout: Layout) -> RowSlots:
    """The same in plain torch."""
    row = layout.offsets[:-1, None].long() + layout.prefix + history
    patch = torch.arange(history.shape[1], dtype=torch.int32, device=history.device).expand(history.shape)
    place = torch.full((layout.total,), -1, dtype=torch.int32, device=history.device)
    return place.scatter_reduce(0, row.flatten(), patch.flatten(), "amin", include_self=False)


@triton.jit(do_not_specialize=["rows", "patches"])
@no_type_check
def _rotate(
    x, out, cos, sin, place, rows, patches, row_stride, head_stride, out_row_stride, out_head_stride,
    table_row_stride, table_head_stride,
    HEADS: tl.constexpr, TABLE_HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, COPY: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pdl_wait(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None]
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    at = tl.load(place + row, mask=row < rows, other=-1)
    turned = (at >= 0) & (at < patches)
    here = tl.where(turned, at, 0) * table_row_stride
    known = turned & (pair < HALF)
    if TABLE_HEADS > 1:
        here = here + (head % TABLE_HEADS) * table_head_stride
        known = known & (head < HEADS)
    inside = (head < HEADS) & (pair < HALF)
    inside = inside & (row < rows) if COPY else inside & turned
    came = x + row.to(tl.int64) * row_stride + head * head_stride
    low, high = tl.load(came + first, mask=inside, other=0.0), tl.load(came + second, mask=inside, other=0.0)
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    cos_low = tl.load(cos + here + first, mask=known, other=1.0).to(tl.float32)
    sin_low = tl.load(sin + here + first, mask=known, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + here + second, mask=known, other=1.0).to(tl.float32)
    sin_high = tl.load(sin + here + second, mask=known, other=0.0).to(tl.float32)
    new_low = (wide_low * cos_low - wide_high * sin_low).to(low.dtype)
    new_high = (wide_high * cos_high + wide_low * sin_high).to(high.dtype)
    if COPY:
        new_low, new_high = tl.where(turned, new_low, low), tl.where(turned, new_high, high)
    goes = out + row.to(tl.int64) * out_row_stride + head * out_head_stride
    tl.store(goes + first, new_low, mask=inside)
    tl.store(goes + second, new_high, mask=inside)


def rotate(x: PackedHeads, place: RowSlots, rotation: Rotation, *, in_place: bool = False) -> PackedHeads:
    """Queries or keys turned by the table row at their place.  Rows whose place is not in the table stay as they are.

    If the tables have heads, `x` may have a multiple of them: head `h` takes table `h % heads`.
    """
    rows, heads, dim = x.shape
    cos, sin = rotation.cos, rotation.sin
    table_heads = cos.shape[0] if cos.dim() == 3 else 1
    if cos.shape[-1] != dim or sin.shape != cos.shape or heads % table_heads:
        raise BadOption(
            f"rotary tables of heads with {dim} channels must be (patches, {dim}) or (heads, patches, {dim}), with a "
            f"number of heads that divides {heads}; got {tuple(cos.shape)} and {tuple(sin.shape)}. Correct `rotation` "
            "of the block's view."
        )
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    if x.stride(2) != 1:
        assert not in_place
        x = x.contiguous()
    out = x if in_place else torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    if rows:
        _rotate[(blocks(rows, ROWS), blocks(heads, GROUP))](
            x, out, cos, sin, place, rows, cos.shape[-2], x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            cos.stride(-2), cos.stride(0) if table_heads > 1 else 0,
            HEADS=heads, TABLE_HEADS=table_heads, HALF=dim // 2, PAIRS=next_pow2(dim // 2),
            INTERLEAVED=rotation.interleaved, COPY=not in_place, ROWS=ROWS, GROUP=GROUP, num_warps=4,
            **pdl_options(x),
        )  # fmt: skip
    return out


def rotate_reference(x: PackedHeads, place: RowSlots, rotation: Rotation) -> PackedHeads:
    """The same in plain torch."""
    tables = [table if table.dim() == 3 else table[None] for table in (rotation.cos, rotation.sin)]
    patches = tables[0].shape[1]
    turned = (place >= 0) & (place < patches)
    rows = torch.where(turned, place, 0)
    cos, sin = (table[:, rows].float().transpose(0, 1) for table in tables)
    repeats = x.shape[1] // cos.shape[1]
    cos, sin = cos.repeat(1, repeats, 1), sin.repeat(1, repeats, 1)
    wide = x.float()
    if rotation.interleaved:
        crossed = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).flatten(-2)
    else:
        low, high = wide.chunk(2, -1)
        crossed = torch.cat([-high, low], -1)
    return torch.where(turned[:, None, None], wide * cos + crossed * sin, wide).to(x.dtype)
