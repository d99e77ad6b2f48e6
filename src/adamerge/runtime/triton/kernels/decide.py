"""From similarities to a plan, one program per image: salience, score, redundancy, count, selection, slots."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, PerRow, RowSlots
from adamerge.runtime.triton.kernels.choice import Choice, ColumnSums, Entropy, Policy, Rule
from adamerge.runtime.triton.kernels.launch import empty_rows, next_pow2, pdl_options, pdl_wait, processors
from adamerge.runtime.triton.kernels.match import source_at, source_count
from adamerge.runtime.triton.kernels.places import write_places

# The values of the kernel's constexpr SALIENCE, SCORE, WEIGHT and RULE.
SALIENCE_UNIFORM, SALIENCE_AFFINITY = tl.constexpr(0), tl.constexpr(1)
SALIENCE_ATTENTION, SALIENCE_SHARPNESS = tl.constexpr(2), tl.constexpr(3)
SCORE_SIMILARITY, SCORE_FIRST = tl.constexpr(0), tl.constexpr(1)
SCORE_LAST, SCORE_PROTECT = tl.constexpr(2), tl.constexpr(3)
WEIGHT_SALIENCE, WEIGHT_SIZE = tl.constexpr(0), tl.constexpr(1)
WEIGHT_SALIENCE_SIZE, WEIGHT_KEEP = tl.constexpr(2), tl.constexpr(3)
RULE_FIXED, RULE_ZSCORE, RULE_THRESHOLD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

SCORES = {"similarity": SCORE_SIMILARITY, "first": SCORE_FIRST, "last": SCORE_LAST, "protect": SCORE_PROTECT}
WEIGHTS = {
    "salience": WEIGHT_SALIENCE,
    "size": WEIGHT_SIZE,
    "salience_size": WEIGHT_SALIENCE_SIZE,
    "keep": WEIGHT_KEEP,
}
RULES = {"fixed": RULE_FIXED, "zscore": RULE_ZSCORE, "threshold": RULE_THRESHOLD}

# Column sums whose range is within eight roundings of float32 count as equal.
FLAT = 2.0**-20


@triton.jit
@no_type_check
def _salience(
    sums, base, place, n, rows, total,
    SALIENCE: tl.constexpr, PARTS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """The salience of each token: 1, column sums scaled to [0, 1], the attention it gets, with a mean of 1, or minus
    the entropy of its own, scaled to [0, 1], and 0 below the mean."""
    there = place < n
    if SALIENCE == SALIENCE_UNIFORM:
        s = tl.where(there, 1.0, 0.0)
    else:
        part = tl.arange(0, PARTS)[:, None]
        given = (part < ((n + rows - 1) // rows if SALIENCE == SALIENCE_AFFINITY else rows)) & there[None, :]
        s = tl.sum(tl.load(sums + part.to(tl.int64) * total + base + place[None, :], mask=given, other=0.0), 0)
    if SALIENCE == SALIENCE_SHARPNESS:
        s = -s
    SCALED: tl.constexpr = (SALIENCE == SALIENCE_AFFINITY) | (SALIENCE == SALIENCE_SHARPNESS)
    if SCALED:
        low = tl.min(tl.where(there, s, float("inf")), 0)
        high = tl.max(tl.where(there, s, float("-inf")), 0)
        flat = high - low <= FLAT * tl.where(n > 0, tl.abs(high), 0.0)
        s = tl.where(flat, 1.0, (s - low) / tl.where(flat, 1.0, high - low))
        s = tl.where(there, s, 0.0)
    if SALIENCE == SALIENCE_SHARPNESS:
        s = tl.where(s < tl.sum(s, 0) / tl.maximum(n, 1), 0.0, s)
    if SALIENCE == SALIENCE_ATTENTION:
        s = s / rows
        average = tl.sum(s, 0) / tl.maximum(n, 1)
        s = tl.where(average > 0.0, s / tl.where(average > 0.0, average, 1.0), tl.where(there, 1.0, 0.0))
    return s


@triton.jit
@no_type_check
def _scored(similarity, s, strength, SCORE: tl.constexpr):
    """The score of each source from its similarity and its salience."""
    score = similarity
    if SCORE == SCORE_FIRST:
        score = score * s
    if SCORE == SCORE_LAST:
        score = score * (1.0 - s)
    if SCORE == SCORE_PROTECT:
        # A power as torch has it: 0 to the power of 0 is 1.
        raised = tl.exp2(strength * tl.log2(tl.where(s > 0.0, s, 1.0)))
        factor = tl.where(s > 0.0, raised, tl.where(strength == 0.0, 1.0, s))
        score = (score - 1.0) * factor
    return score


@triton.jit
@no_type_check
def _rule_numbers(numbers, RULE: tl.constexpr):
    """The calibrated numbers of the count rule in float64: a threshold, or mean, std, r_max and slope."""
    first, std, most, slope = 0.0, 0.0, 0.0, 0.0
    if RULE == RULE_ZSCORE:
        first, std, most, slope = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    elif RULE == RULE_THRESHOLD:
        first = tl.load(numbers)
    return first, std, most, slope


@triton.jit
@no_type_check
def _merge_count(score, source, mean, r, first, std, most, slope, RULE: tl.constexpr):
    """How many sources the rule would merge; `first` is the mean of a z-score or the threshold."""
    if RULE == RULE_FIXED:
        merges = r
    elif RULE == RULE_ZSCORE:
        z = (mean.to(tl.float64) - first) / std
        wanted = tl.floor(most / (1.0 + tl.exp(-slope * z)))
        finite = (mean == mean) & (tl.abs(mean) < float("inf"))
        merges = tl.where(finite, tl.minimum(wanted, 1e6), 0.0).to(tl.int32)
    else:
        merges = tl.sum((source & (score.to(tl.float64) > first)).to(tl.int32), 0)
    return merges


@triton.jit
@no_type_check
def _merged(
    score, source, place, sources, merges,
    ALTERNATING: tl.constexpr, FIRST: tl.constexpr, SOURCES: tl.constexpr, RIVALS: tl.constexpr,
):  # fmt: skip
    """Which sources merge: the highest scores first, ties by place.

    The rank of a source is how many other sources go before it, counted in tiles of RIVALS.
    """
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
    return source & (tl.gather(rank, place // 2 if ALTERNATING else tl.minimum(place, SOURCES - 1), 0) < merges)


@triton.jit
@no_type_check
def _weights(s, size, kept, WEIGHT: tl.constexpr):
    """The weight of each token in the average that it becomes part of."""
    if WEIGHT == WEIGHT_SALIENCE:
        w = s
    elif WEIGHT == WEIGHT_SIZE:
        w = size
    elif WEIGHT == WEIGHT_SALIENCE_SIZE:
        w = s * size
    else:
        w = kept.to(tl.float32)
    return w


@triton.jit(do_not_specialize=["total", "r"], do_not_specialize_on_alignment=["numbers"])
@no_type_check
def _decide(
    sums, value, partner, size, numbers, offsets, old_history,
    slot, gone, goal, origin, count, weight, salience, redundancy, history,
    total, prefix, rows, r, strength, patches,
    SALIENCE: tl.constexpr, SCORE: tl.constexpr, WEIGHT: tl.constexpr, RULE: tl.constexpr,
    ALTERNATING: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr, SOURCES_FIRST: tl.constexpr,
    TOKENS: tl.constexpr, RIVALS: tl.constexpr, PARTS: tl.constexpr, PATCHES: tl.constexpr,
    FLAT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # All loads come first: with few images, memory latency takes most of the time.
    image = tl.program_id(0)
    base = tl.load(offsets + image) + prefix
    n = tl.load(offsets + image + 1) - base
    place, patch = tl.arange(0, TOKENS), tl.arange(0, PATCHES)
    there = place < n
    source = source_at(place, n, ALTERNATING, FIRST)
    sized = tl.load(size + base + place, mask=there, other=0.0)
    past = tl.load(old_history + image * patches + patch, mask=patch < patches, other=0)
    first, std, most, slope = _rule_numbers(numbers, RULE)
    pdl_wait(EARLY)
    similarity = tl.load(value + base + place, mask=source, other=0.0)
    partners = tl.load(partner + base + place, mask=source, other=0)

    s = _salience(sums, base, place, n, rows, total, SALIENCE, PARTS, FLAT)
    score = tl.where(source, _scored(similarity, s, strength, SCORE), 0.0)
    sources = source_count(n, ALTERNATING, FIRST)
    mean = tl.sum(score, 0) / tl.maximum(sources, 1)
    merges = _merge_count(score, source, mean, r, first, std, most, slope, RULE)
    merges = tl.minimum(merges, tl.minimum(sources, n - sources) if HALF else sources)
    merged = _merged(score, source, place, sources, merges, ALTERNATING, FIRST, TOKENS // 2, RIVALS)

    kept, goes = write_places(
        merged, source, there, partners, place, base, sources, merges, slot, gone, goal, origin, SOURCES_FIRST
    )
    tl.store(weight + base + place, _weights(s, sized, kept, WEIGHT), mask=there)
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
    salience: ColumnSums | Entropy | Float[Tensor, "heads total"] | None = None,
) -> Choice:
    """Decide a merge from each source's similarity `value` and `partner`.

    `salience` is the column sums of an affinity, scaled here to [0, 1], or the attention that each token gets, from the
    class token or from all tokens, averaged here over heads and scaled to a mean of 1, or the entropy of each token's
    own attention, which becomes its sharpness.  None stands for 1 everywhere.
    """
    total, images, device = len(value), layout.images, value.device
    places = empty_rows(4, total, torch.int32, device)
    weight, scaled = empty_rows(2, total, torch.float32, device)
    count = torch.empty(images, dtype=torch.int32, device=device)
    redundancy = torch.empty(images, dtype=torch.float32, device=device)
    after = torch.empty_like(history)
    if images:
        split = policy.split
        kind, parts, rows, flat = _salience_options(salience)
        tokens, patches = next_pow2(layout.longest - layout.prefix), history.shape[1]
        _decide[(images,)](
            parts, value, partner, size, rule.numbers, layout.offsets, history,
            *places, count, weight, scaled, redundancy, after,
            total, layout.prefix, rows, rule.r, policy.strength, patches,
            SALIENCE=kind, SCORE=SCORES[policy.score].value, WEIGHT=WEIGHTS[policy.weigh].value,
            RULE=RULES[rule.kind].value,
            ALTERNATING=split.alternating, FIRST=split.first, HALF=split.half, SOURCES_FIRST=policy.sources_first,
            TOKENS=tokens, RIVALS=min(32, tokens // 2), PATCHES=next_pow2(patches),
            PARTS=1 if parts is None else next_pow2(len(parts), 1), FLAT=flat,
            # With few images most processors are idle, so each program gets more warps.
            num_warps=4 if tokens <= 512 and images >= processors(device) else 8,
            **pdl_options(value),
        )  # fmt: skip
    return Choice(*places, count, weight, scaled, redundancy, after)


def _salience_options(
    salience: ColumnSums | Entropy | Float[Tensor, "heads total"] | None,
) -> tuple[int, Tensor | None, int, float]:
    """The kernel's SALIENCE, the array it reads, the number of its rows, and the range that counts as equal."""
    if isinstance(salience, ColumnSums):
        return SALIENCE_AFFINITY.value, salience.parts, salience.rows, FLAT
    if isinstance(salience, Entropy):
        return SALIENCE_SHARPNESS.value, salience.of_token[None], 1, 0.0
    if salience is None:
        return SALIENCE_UNIFORM.value, None, 1, FLAT
    return SALIENCE_ATTENTION.value, salience, len(salience), FLAT
