"""Merges pairs of tokens by gathers and one-hot products: no scatter, which other engines lack or get wrong."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adamerge.core.combine import Average, Combine, Drop, KeepNorm, MeanNorm
from adamerge.core.errors import BadOption
from adamerge.exporting.pairs import MergePairs
from adamerge.exporting.state import ExportState, count, rows


@dataclass(frozen=True)
class Fold:
    """A merge of `r` pairs as gathers.

    * `kept`: the token that becomes each of the `m` tokens after the merge, `(b, m)`.
    * `source`: the tokens that are merged into others, `(b, r)`.
    * `slot`: which of the `m` tokens each of those becomes part of, `(b, r)`.
    * `joins`: whether source `j` becomes part of token `i`, `(b, m, r)`.
    * `pairs`: what all this was computed from.
    """

    kept: Tensor
    source: Tensor
    slot: Tensor
    joins: Tensor
    pairs: MergePairs


def plan_fold(pairs: MergePairs, tokens: int) -> Fold:
    """Where the tokens of `pairs` go, of `tokens` tokens with the prefix."""
    source, target = pairs.source, pairs.target
    r = source.shape[1]
    m = tokens - r
    # Sources before each source, and sources up to each target.
    earlier = count(source[:, None, :] < source[:, :, None])
    slot = target - count(source[:, None, :] <= target[:, :, None])
    number = torch.arange(m, device=source.device)
    kept = number + count((source - earlier)[:, None, :] <= number[:, None])
    joins = slot[:, None, :] == number[:, None]
    if pairs.order is not None:
        order = torch.tensor(pairs.order, device=source.device)
        kept, source = order[kept], order[source]
    return Fold(kept, source, slot, joins, pairs)


def slots_of(fold: Fold, tokens: int) -> Tensor:
    """The token after the merge that each token becomes part of, `(b, t)`."""
    source = fold.pairs.source[:, None, :]
    number = torch.arange(tokens, device=source.device)
    if fold.pairs.order is not None:
        number = torch.tensor(fold.pairs.order, device=source.device).argsort()
    number = number[:, None]
    alone = number[:, 0] - count(source < number)
    merged = source == number
    return torch.where(merged.any(-1), torch.where(merged, fold.slot[:, None, :], 0).sum(-1), alone)


def merge_pairs(state: ExportState, pairs: MergePairs, weight: Tensor, combine: Combine) -> ExportState:
    """The state after a merge; `weight` is that of each patch token in the average."""
    tokens, prefix = state.tokens, state.prefix
    fold = plan_fold(pairs, tokens)
    sizes = rows(state.size, fold.source)
    size = rows(state.size, fold.kept) + torch.where(fold.joins, sizes[:, None, :], 0).sum(-1)
    places = state.places
    low = torch.where(fold.joins, rows(places, fold.source)[:, None, :], tokens + state.original).amin(-1)
    slots = slots_of(fold, tokens)
    return replace(
        state,
        x=combined(state.x, fold, torch.nn.functional.pad(weight, (prefix, 0), value=1.0), combine),
        size=size,
        place=rows(places, fold.kept).minimum(low),
        slot=slots if state.slot is None else rows(slots, state.slot),
    )


def combined(x: Tensor, fold: Fold, weight: Tensor, combine: Combine) -> Tensor:
    """The tokens after the merge."""
    kept = rows(x, fold.kept)
    if isinstance(combine, Drop):
        return kept
    wide, merged = kept.to(weight.dtype), rows(x, fold.source).to(weight.dtype)
    own, others = shares(fold, weight)
    mean = own[..., None] * wide + others @ merged
    if isinstance(combine, Average):
        return mean.to(x.dtype)
    norm, norms = wide.norm(dim=-1), merged.norm(dim=-1)
    if isinstance(combine, MeanNorm):
        length = own * norm + (others * norms[:, None, :]).sum(-1)
    elif isinstance(combine, KeepNorm):
        length = norm.maximum(torch.where(fold.joins, norms[:, None, :], 0).amax(-1))
    else:
        raise BadOption(
            f"a recipe whose combine part is {combine} cannot be exported: it may use operators that other engines do "
            "not have. Known are Average, Drop, MeanNorm and KeepNorm of adamerge.core.combine."
        )
    factor = length / mean.norm(dim=-1).clamp_min(torch.finfo(mean.dtype).tiny)
    return (mean * torch.where(fold.joins.any(-1) & factor.isfinite(), factor, 1)[..., None]).to(x.dtype)


def shares(fold: Fold, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The share of each kept token in its average, `(b, m)`, and those of the tokens merged into it, `(b, m, r)`.

    If all weights of an average are 0, its tokens have equal shares (D6).
    """
    own, others = rows(weight, fold.kept), torch.where(fold.joins, rows(weight, fold.source)[:, None, :], 0)
    total = own + others.sum(-1)
    zero = total == 0
    equal = fold.joins.to(weight.dtype)
    total = torch.where(zero, 1 + equal.sum(-1), total)
    return torch.where(zero, 1, own) / total, torch.where(zero[..., None], equal, others) / total[..., None]
