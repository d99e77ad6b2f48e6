"""The decision of `decide` in plain torch, one image at a time."""

import math
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, PerRow, RowSlots
from adamerge.runtime.triton.kernels.choice import Choice, ColumnSums, Entropy, Policy, Rule
from adamerge.runtime.triton.kernels.decide import FLAT


def decide_reference(
    value: PerRow,
    partner: RowSlots,
    size: PerRow,
    history: Int[Tensor, "b patches"],
    layout: Layout,
    policy: Policy,
    rule: Rule,
    salience: ColumnSums | Entropy | Float[Tensor, "heads total"] | None = None,
) -> Choice:
    """As `decide`; entries that it leaves undefined are 0.  The history of an image without patches is -1."""
    slot, gone, goal, origin = value.new_zeros((4, len(value)), dtype=torch.int32).unbind()
    weight, scaled = value.new_zeros((2, len(value))).unbind()
    count, redundancy = value.new_zeros(layout.images, dtype=torch.int32), value.new_zeros(layout.images)
    after = torch.full_like(history, -1)
    for image, (begin, end) in enumerate(pairwise(layout.offsets.tolist())):
        n, at = end - begin - layout.prefix, slice(begin + layout.prefix, end)
        sources, _ = policy.split.sides(n, value.device)
        s = _salience(salience, at, value)
        score = _score(value[at][sources], s[sources], policy)
        mean = score.sum() / max(len(sources), 1)
        merges = min(_merge_count(score, mean.item(), rule), policy.split.most_merges(n))
        best = score.nan_to_num(-math.inf, math.inf, -math.inf).argsort(descending=True, stable=True)
        merged = torch.zeros(n, dtype=torch.bool, device=value.device)
        merged[sources[best[:merges]]] = True
        kept, away = (~merged).nonzero()[:, 0], merged.nonzero()[:, 0]
        if policy.sources_first and merges:
            staying = torch.isin(kept, sources)
            kept = torch.cat([kept[staying], kept[~staying]])
        place = torch.zeros(n, dtype=torch.int32, device=value.device)
        place[kept] = torch.arange(len(kept), dtype=torch.int32, device=value.device)
        place[away] = place[partner[at][away].long()]
        slot[at], scaled[at], weight[at] = place, s, _weight(s, size[at], merged, policy)
        gone[at][: len(away)], goal[at][: len(away)] = away.int(), place[away]
        origin[at][: len(kept)] = kept.int()
        count[image], redundancy[image] = len(kept), mean
        if n:
            after[image] = place[history[image].long()]
    return Choice(slot, gone, goal, origin, count, weight, scaled, redundancy, after)


def _salience(given: ColumnSums | Entropy | Tensor | None, at: slice, value: PerRow) -> Tensor:
    """The salience of an image's tokens: 1, column sums scaled to [0, 1], the attention they get, or its sharpness."""
    ones = torch.ones_like(value[at])
    if given is None or not len(ones):
        return ones
    if isinstance(given, ColumnSums):
        s = given.parts[: -(-len(ones) // given.rows), at].sum(0)
        low, high = s.min(), s.max()
        return ones if high - low <= FLAT * high.abs() else (s - low) / (high - low)
    if isinstance(given, Entropy):
        s = -given.of_token[at]
        s = ones if s.max() == s.min() else (s - s.min()) / (s.max() - s.min())
        return torch.where(s < s.mean(), 0, s)
    s = given[:, at].mean(0)
    return s / s.mean() if s.mean() > 0 else ones


def _score(similarity: Tensor, s: Tensor, policy: Policy) -> Tensor:
    """The score of each source."""
    if policy.score == "similarity":
        return similarity
    if policy.score == "protect":
        return (similarity - 1) * s**policy.strength
    return similarity * (s if policy.score == "first" else 1 - s)


def _merge_count(score: Tensor, mean: float, rule: Rule) -> int:
    """How many sources the rule would merge."""
    if rule.numbers is None:
        return rule.r
    if rule.kind == "threshold":
        return int((score.double() > rule.numbers[0]).sum())
    centre, std, most, slope = rule.numbers.tolist()
    if not math.isfinite(mean):
        return 0
    return math.floor(most / (1 + math.exp(-slope * (mean - centre) / std)))


def _weight(s: Tensor, size: Tensor, merged: Tensor, policy: Policy) -> Tensor:
    """The weight of each token in the average that it becomes part of."""
    if policy.weigh == "keep":
        return (~merged).float()
    return {"salience": s, "size": size, "salience_size": s * size}[policy.weigh]
