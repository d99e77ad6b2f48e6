"""From links that torch computed to a plan, one program per image: selection, slots, lists of who merges away."""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from adamerge.core.types import Counts, Mask, PerToken, Slots
from adamerge.runtime.packed.layout import Layout
from adamerge.runtime.triton.kernels.choice import Choice
from adamerge.runtime.triton.kernels.launch import empty_rows, next_pow2, pdl_options, pdl_wait
from adamerge.runtime.triton.kernels.places import write_places

# The most entries of a tile in which scores are compared.
MOST_COMPARED = 2**15
# The lowest number of float32.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@dataclass(frozen=True)
class PaddedLinks:
    """What the parts of a recipe say about each patch token of padded images: see `core.match.Links`.

    `weight` is None where only the token that stays counts.
    """

    value: PerToken
    partner: Slots
    source: Mask
    salience: PerToken
    weight: PerToken | None


@triton.jit
@no_type_check
def _rank(score, place, n, TOKENS: tl.constexpr, RIVALS: tl.constexpr):
    """How many tokens have a higher score, or the same at a lower place; counted in tiles of RIVALS."""
    rank = tl.zeros([TOKENS], tl.int32)
    for start in range(0, n, RIVALS):
        rival = start + tl.arange(0, RIVALS)
        theirs = tl.gather(score, rival, 0)[None, :]
        earlier = (theirs == score[:, None]) & (rival[None, :] < place[:, None])
        rank += tl.sum(((theirs > score[:, None]) | earlier).to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["r", "width"])
@no_type_check
def _select(
    value, partner, source, padded_salience, padded_weight, merges, offsets, old_history,
    slot, gone, goal, origin, count, weight, salience, redundancy, history,
    prefix, r, width, patches,
    COUNTED: tl.constexpr, KEEP: tl.constexpr, SOURCES_FIRST: tl.constexpr,
    TOKENS: tl.constexpr, RIVALS: tl.constexpr, PATCHES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    base = tl.load(offsets + image) + prefix
    n = tl.load(offsets + image + 1) - base
    pdl_wait(EARLY)
    place, patch = tl.arange(0, TOKENS), tl.arange(0, PATCHES)
    there = place < n
    at = image * width + place
    past = tl.load(old_history + image * patches + patch, mask=patch < patches, other=0)
    is_source = there & (tl.load(source + at, mask=there, other=0) != 0)
    score = tl.load(value + at, mask=is_source, other=0.0)
    partners = tl.load(partner + at, mask=is_source, other=0).to(tl.int32)
    s = tl.load(padded_salience + at, mask=there, other=0.0)
    sources = tl.sum(is_source.to(tl.int32), 0)
    wanted = tl.load(merges + image) if COUNTED else r
    limit = tl.minimum(tl.maximum(wanted, 0), sources).to(tl.int32)
    # As in `core.select`: scores that are no numbers first, and every source before the other tokens.
    finite = tl.maximum(tl.where(score == score, score, float("inf")), LOWEST)
    rank = _rank(tl.where(is_source, finite, float("-inf")), place, n, TOKENS, RIVALS)
    merged = is_source & (rank < limit)

    kept, goes = write_places(
        merged, is_source, there, partners, place, base, sources, limit, slot, gone, goal, origin, SOURCES_FIRST
    )
    w = kept.to(tl.float32) if KEEP else tl.load(padded_weight + at, mask=there, other=0.0)
    tl.store(weight + base + place, w, mask=there)
    tl.store(salience + base + place, s, mask=there)
    tl.store(count + image, n - limit)
    tl.store(redundancy + image, tl.sum(score, 0) / tl.maximum(sources, 1))
    tl.store(history + image * patches + patch, tl.gather(goes, past, 0), mask=patch < patches)


def select(
    links: PaddedLinks,
    merges: int | Counts,
    history: Int[Tensor, "b patches"],
    layout: Layout,
    *,
    sources_first: bool,
) -> Choice:
    """The choice that merges the strongest `merges` links of each image, ties by place, or all it has if fewer."""
    total, images, device = layout.total, layout.images, layout.offsets.device
    places = empty_rows(4, total, torch.int32, device)
    weight, salience = empty_rows(2, total, torch.float32, device)
    count = torch.empty(images, dtype=torch.int32, device=device)
    redundancy = torch.empty(images, dtype=torch.float32, device=device)
    after = torch.empty_like(history)
    if images:
        counted = None if isinstance(merges, int) else merges
        tokens, patches = next_pow2(layout.most), history.shape[1]
        _select[(images,)](
            links.value.contiguous(), links.partner.contiguous(), links.source.contiguous().view(torch.int8),
            links.salience.contiguous(), None if links.weight is None else links.weight.contiguous(), counted,
            layout.offsets, history, *places, count, weight, salience, redundancy, after,
            layout.prefix, min(merges, layout.most) if isinstance(merges, int) else 0, links.value.shape[1], patches,
            COUNTED=counted is not None, KEEP=links.weight is None, SOURCES_FIRST=sources_first, TOKENS=tokens,
            RIVALS=min(32, tokens, max(1, MOST_COMPARED // tokens)), PATCHES=next_pow2(patches),
            num_warps=4 if tokens <= 256 else 8, **pdl_options(weight),
        )  # fmt: skip
    return Choice(*places, count, weight, salience, redundancy, after)
