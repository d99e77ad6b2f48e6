"""Where tokens go in a merge, for the kernels that choose which of them merge."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _new_place(kept, source, staying, sources, merges, SOURCES_FIRST: tl.constexpr):
    """The new place of each token that stays; `staying` counts those up to and including each place."""
    position = staying - 1
    if SOURCES_FIRST:
        ahead = tl.cumsum((kept & source).to(tl.int32), 0)
        reordered = tl.where(source, ahead, sources - merges + staying - ahead) - 1
        position = tl.where(merges > 0, reordered, position)
    return position


@triton.jit
@no_type_check
def write_places(
    merged, source, there, partners, place, base, sources, merges,
    slot, gone, goal, origin,
    SOURCES_FIRST: tl.constexpr,
):  # fmt: skip
    """Write an image's part of a `Choice`: new places, and the lists of tokens that merge.

    Gives which tokens stay, and the new place of every token: that of its partner for one that merges.
    """
    kept = there & (merged == 0)
    staying = tl.cumsum(kept.to(tl.int32), 0)
    position = _new_place(kept, source, staying, sources, merges, SOURCES_FIRST)
    goes = tl.where(merged, tl.gather(position, partners, 0), position)
    tl.store(slot + base + place, goes, mask=there)
    tl.store(origin + base + position, place, mask=kept)
    # As many tokens are gone up to a place as do not stay.
    listed = base + place - staying
    tl.store(gone + listed, place, mask=merged)
    tl.store(goal + listed, goes, mask=merged)
    return kept, goes
