"""From similarities to a plan, one program an image: salience, score, redundancy, count, selection, slots."""

from dataclasses import dataclass
from typing import Literal, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.core.types import Counts, PerImage
from adamerge.runtime.packed.layout import Layout, PerRow, RowSlots
from adamerge.runtime.triton.kernels.launch import next_pow2, pdl_options, pdl_wait, processors
from adamerge.runtime.triton.kernels.match import Split, source_at

Score = Literal["similarity", "first", "last", "protect"]
Weigh = Literal["salience", "size", "salience_size", "keep"]
SCORES: dict[str, int] = {"similarity": 0, "first": 1, "last": 2, "protect": 3}
WEIGHTS: dict[str, int] = {"salience": 0, "size": 1, "salience_size": 2, "keep": 3}
RULES: dict[str, int] = {"fixed": 0, "zscore": 1, "threshold": 2}
SALIENCE_UNIFORM, SALIENCE_AFFINITY, SALIENCE_CLASS = 0, 1, 2


@dataclass(frozen=True)
class Rule:
    """How many merge.  fixed: `r`.  zscore: `numbers` = mean, std, r_max, alpha / T.  threshold: `numbers` = it."""

    kind: Literal["fixed", "zscore", "threshold"]
    r: int = 0
    numbers: Float[Tensor, "k"] | None = None


@dataclass(frozen=True)
class Policy:
    """What is the same at every layer: the split, the score and its strength, the weights, the order of the result."""

    split: Split
    score: Score = "similarity"
    strength: float = 0.0
    weigh: Weigh = "size"
    sources_first: bool = False


@dataclass(frozen=True)
class ColumnSums:
    """The column sums of an affinity in parts, `(parts, total)`, one for each `rows` rows of an image."""

    parts: Float[Tensor, "parts total"]
    rows: int


@dataclass(frozen=True)
class Choice:
    """A decision for packed tokens.  Places are those of patches within their image.

    `slot` is the place each patch goes to; `gone` the patches that merged away, in order, and `goal` where each of them
    went; `origin` the patch that each new place came from.  All are as long as the packed array, at the rows of the
    patches' own image.
    """

    slot: RowSlots
    gone: RowSlots
    goal: RowSlots
    origin: RowSlots
    count: Counts
    weight: PerRow
    salience: PerRow
    redundancy: PerImage
    history: Int[Tensor, "b patches"]


@triton.jit
@no_type_check
def _decide(
    sums, value, partner, size, numbers, offsets, old_history,
    slot, gone, goal, origin, count, weight, salience, redundancy, history,
    total, prefix, rows, r, strength, patches,
    SALIENCE: tl.constexpr, SCORE: tl.constexpr, WEIGHT: tl.constexpr, RULE: tl.constexpr,
    ALTERNATING: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr, SOURCES_FIRST: tl.constexpr,
    TOKENS: tl.constexpr, SOURCES: tl.constexpr, RIVALS: tl.constexpr, PARTS: tl.constexpr, PATCHES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # All that is read is asked for first: with few images, waiting for memory is what takes time here.
    image = tl.program_id(0)
    base = tl.load(offsets + image) + prefix
    n = tl.load(offsets + image + 1) - base
    place, patch = tl.arange(0, TOKENS), tl.arange(0, PATCHES)
    there = place < n
    source = source_at(place, n, ALTERNATING, FIRST)
    sized = tl.load(size + base + place, mask=there, other=0.0)
    past = tl.load(old_history + image * patches + patch, mask=patch < patches, other=0)
    if RULE == 1:
        centre, spread = tl.load(numbers), tl.load(numbers + 1)
        most, steepness = tl.load(numbers + 2), tl.load(numbers + 3)
    if RULE == 2:
        threshold = tl.load(numbers)
    pdl_wait(EARLY)
    score = tl.load(value + base + place, mask=source, other=0.0)
    partners = tl.load(partner + base + place, mask=source, other=0)

    if SALIENCE == 0:
        s = tl.where(there, 1.0, 0.0)
    else:
        part = tl.arange(0, PARTS)[:, None]
        given = (part < ((n + rows - 1) // rows if SALIENCE == 1 else rows)) & there[None, :]
        s = tl.sum(tl.load(sums + part.to(tl.int64) * total + base + place[None, :], mask=given, other=0.0), 0)
    if SALIENCE == 1:
        low = tl.min(tl.where(there, s, float("inf")), 0)
        high = tl.max(tl.where(there, s, float("-inf")), 0)
        # Eight roundings are no difference.
        flat = high - low <= 9.5367431640625e-07 * tl.abs(high)
        s = tl.where(flat, 1.0, (s - low) / tl.where(flat, 1.0, high - low))
        s = tl.where(there, s, 0.0)
    if SALIENCE == 2:
        s = s / rows
        average = tl.sum(s, 0) / tl.maximum(n, 1)
        s = tl.where(average > 0.0, s / tl.where(average > 0.0, average, 1.0), tl.where(there, 1.0, 0.0))

    if SCORE == 1:
        score = score * s
    if SCORE == 2:
        score = score * (1.0 - s)
    if SCORE == 3:
        # A power as torch has it: 0 to the power of 0 is 1.
        raised = tl.exp2(strength * tl.log2(tl.where(s > 0.0, s, 1.0)))
        factor = tl.where(s > 0.0, raised, tl.where(strength == 0.0, 1.0, s))
        score = (score - 1.0) * factor
    score = tl.where(source, score, 0.0)
    sources = tl.where(n > 1, (n + 1 - FIRST) // 2, 0) if ALTERNATING else n // 2
    room = sources
    if HALF:
        room = tl.minimum(sources, n - sources)
    mean = tl.sum(score, 0) / tl.maximum(sources, 1)
    if RULE == 0:
        merges = r
    elif RULE == 1:
        z = (mean.to(tl.float64) - centre) / spread
        wanted = tl.floor(most / (1.0 + tl.exp(-steepness * z)))
        finite = (mean == mean) & (tl.abs(mean) < float("inf"))
        merges = tl.where(finite, tl.minimum(wanted, 1e6), 0.0).to(tl.int32)
    else:
        merges = tl.sum((source & (score.to(tl.float64) > threshold)).to(tl.int32), 0)
    merges = tl.minimum(merges, room)

    # The strongest first, ties by place: the rank of a source is how many go before it.
    clean = tl.where(score == score, score, float("-inf"))
    number = tl.arange(0, SOURCES)
    mine = tl.gather(clean, 2 * number + FIRST if ALTERNATING else number, 0)
    rank = tl.zeros([SOURCES], tl.int32)
    for start in range(0, sources, RIVALS):
        rival = start + tl.arange(0, RIVALS)
        theirs = tl.gather(mine, rival, 0)[None, :]
        earlier = (theirs == mine[:, None]) & (rival[None, :] < number[:, None])
        ahead = (theirs > mine[:, None]) | earlier
        rank += tl.sum((ahead & (rival < sources)[None, :]).to(tl.int32), 1)
    merged = source & (tl.gather(rank, place // 2 if ALTERNATING else tl.minimum(place, SOURCES - 1), 0) < merges)

    kept = there & (merged == 0)
    staying = tl.cumsum(kept.to(tl.int32), 0)
    position = staying - 1
    if SOURCES_FIRST:
        ahead = tl.cumsum((kept & source).to(tl.int32), 0)
        reordered = tl.where(source, ahead, sources - merges + staying - ahead) - 1
        position = tl.where(merges > 0, reordered, position)
    goes = tl.where(merged, tl.gather(position, partners, 0), position)
    if WEIGHT == 0:
        w = s
    elif WEIGHT == 1:
        w = sized
    elif WEIGHT == 2:
        w = s * sized
    else:
        w = kept.to(tl.float32)
    tl.store(slot + base + place, goes, mask=there)
    tl.store(origin + base + position, place, mask=kept)
    # As many are gone up to a place as do not stay.
    listed = base + place - staying
    tl.store(gone + listed, place, mask=merged)
    tl.store(goal + listed, goes, mask=merged)
    tl.store(weight + base + place, w, mask=there)
    tl.store(salience + base + place, s, mask=there)
    tl.store(count + image, n - merges)
    tl.store(redundancy + image, mean)
    tl.store(history + image * patches + patch, tl.gather(goes, past, 0), mask=patch < patches)


def decide(
    value: PerRow,
    partner: RowSlots,
    size: PerRow,
    history: Int[Tensor, "b patches"],
    layout: Layout,
    policy: Policy,
    rule: Rule,
    salience: ColumnSums | Float[Tensor, "heads total"] | None = None,
) -> Choice:
    """Decide a merge from each source's similarity `value` and `partner`.

    `salience` is the column sums of an affinity, scaled here to [0, 1], or the class token's attention, averaged over
    heads and scaled to a mean of 1; None stands for 1 everywhere.
    """
    total, images, device = len(value), layout.images, value.device
    places = torch.empty((4, total), dtype=torch.int32, device=device).unbind()
    weight, scaled = torch.empty((2, total), dtype=torch.float32, device=device).unbind()
    count = torch.empty(images, dtype=torch.int32, device=device)
    redundancy = torch.empty(images, dtype=torch.float32, device=device)
    after = torch.empty_like(history)
    if images:
        split = policy.split
        if isinstance(salience, ColumnSums):
            kind, parts, rows = SALIENCE_AFFINITY, salience.parts, salience.rows
        elif salience is None:
            kind, parts, rows = SALIENCE_UNIFORM, None, 1
        else:
            kind, parts, rows = SALIENCE_CLASS, salience, len(salience)
        tokens = next_pow2(layout.longest - layout.prefix)
        patches = history.shape[1]
        _decide[(images,)](
            parts, value, partner, size, rule.numbers, layout.offsets, history,
            *places, count, weight, scaled, redundancy, after,
            total, layout.prefix, rows, rule.r, policy.strength, patches,
            SALIENCE=kind, SCORE=SCORES[policy.score], WEIGHT=WEIGHTS[policy.weigh], RULE=RULES[rule.kind],
            ALTERNATING=split.alternating, FIRST=split.first, HALF=split.half, SOURCES_FIRST=policy.sources_first,
            TOKENS=tokens, SOURCES=tokens // 2, RIVALS=min(32, tokens // 2), PATCHES=next_pow2(patches),
            PARTS=1 if parts is None else next_pow2(len(parts), 1),
            # Few images leave most processors idle; the others work at them with all they have.
            num_warps=4 if tokens <= 512 and images >= processors(device) else 8,
            **pdl_options(value),
        )  # fmt: skip
    return Choice(*places, count, weight, scaled, redundancy, after)
