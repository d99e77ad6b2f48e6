"""The tokens that enter the blocks, in one kernel: class token and registers before the patches, positions added.

Hosts do this in two passes over the tokens: concatenate, then add, or the other way round.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from adamerge.core.types import AllTokens
from adamerge.runtime.triton.kernels.launch import blocks, next_pow2, pdl_options, pdl_wait


@triton.jit
@no_type_check
def _embed(
    patches, first, more, positions, out, count, extra,
    FIRST: tl.constexpr, MORE: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pdl_wait(EARLY)
    image, channel = tl.program_id(1), tl.arange(0, CHANNELS)[None, :]
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    patch = place - extra
    inside = channel < WIDTH
    mine = (patch >= 0) & (patch < count) & inside
    token = tl.load(patches + (image * count + patch).to(tl.int64) * WIDTH + channel, mask=mine, other=0.0)
    if FIRST:
        token = tl.where(place == 0, tl.load(first + channel, mask=inside, other=0.0), token)
    if MORE:
        other = (place >= FIRST) & (patch < 0)
        token = tl.where(other, tl.load(more + (place - FIRST) * WIDTH + channel, mask=other & inside), token)
    there = (patch < count) & inside
    # Either all tokens have a position, or only the patches have one.
    if ALL:
        position = tl.load(positions + place * WIDTH + channel, mask=there, other=0.0)
    else:
        position = tl.load(positions + patch * WIDTH + channel, mask=mine, other=0.0)
    sum_ = token.to(tl.float32) + position.to(tl.float32)
    goes = (image * (extra + count) + place).to(tl.int64) * WIDTH + channel
    tl.store(out + goes, sum_.to(out.dtype.element_ty), mask=there)


def embed(
    patches: Float[Tensor, "b patches d"],
    positions: Float[Tensor, "1 m d"],
    first: Float[Tensor, "1 1 d"] | None = None,
    more: Float[Tensor, "1 k d"] | None = None,
) -> AllTokens:
    """The class token `first`, the registers `more` and the patches of every image, with their `positions`.

    There are as many positions as tokens, or as many as patches; then the others have none.
    """
    images, count, width = patches.shape
    extra = sum(0 if given is None else given.shape[1] for given in (first, more))
    out = torch.empty((images, extra + count, width), dtype=patches.dtype, device=patches.device)
    if images:
        channels = next_pow2(width)
        rows = max(1, 4096 // channels)
        _embed[(blocks(extra + count, rows), images)](
            patches, first, more, positions, out, count, extra, FIRST=int(first is not None), MORE=more is not None,
            ALL=positions.shape[1] == extra + count, WIDTH=width, CHANNELS=channels, ROWS=rows, num_warps=4,
            **pdl_options(patches.flatten(0, 1)),
        )  # fmt: skip
    return out


def embed_reference(
    patches: Float[Tensor, "b patches d"],
    positions: Float[Tensor, "1 m d"],
    first: Float[Tensor, "1 1 d"] | None = None,
    more: Float[Tensor, "1 k d"] | None = None,
) -> AllTokens:
    """The same in plain torch."""
    others = [given.expand(len(patches), -1, -1) for given in (first, more) if given is not None]
    if positions.shape[1] == patches.shape[1]:
        return torch.cat([*others, patches + positions], 1)
    return torch.cat([*others, patches], 1) + positions
