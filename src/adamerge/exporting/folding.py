"""Merges pairs of tokens by gathers and one-hot products: no scatter, which other engines lack or get wrong."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adamerge.core.combine import Average, Combine, Drop, KeepNorm, MeanNorm
from adamerge.core.errors import CannotExport
from adamerge.exporting.pairs import MergePairs
from adamerge.exporting.state import ExportState, numbers, rows


@dataclass(frozen=True)
class Shares:
    """The shares of the tokens in their averages: of each kept token, `(b, m)`, and of the others, `(b, m, r)`.

    `total` is the sum of the weights of each average.
    """

    own: Tensor
    others: Tensor
    total: Tensor


def merge_pairs(state: ExportState, pairs: MergePairs, weight: Tensor | None, combine: Combine) -> ExportState:
    """The state after a merge; `weight` is that of each patch token in the average, None for its size."""
    m = pairs.kept.shape[1]
    joins = pairs.slot[:, None, :] == torch.arange(m, device=state.x.device)[:, None]
    by_size = average(state.size, pairs, joins)
    shares = by_size
    if weight is not None:
        shares = average(torch.nn.functional.pad(weight, (state.prefix, 0), value=1.0), pairs, joins, positive=False)
    places = state.places
    low = torch.where(joins, rows(places, pairs.source)[:, None, :], state.tokens + state.original).amin(-1)
    slots = slots_of(pairs)
    return replace(
        state,
        x=combined(state.x, pairs, joins, shares, combine),
        size=by_size.total,
        place=rows(places, pairs.kept).minimum(low),
        slot=slots if state.slot is None else rows(slots, state.slot),
    )


def slots_of(pairs: MergePairs) -> Tensor:
    """The token after the merge that each token becomes part of, `(b, t)`."""
    where = torch.cat([pairs.kept, pairs.source], 1).argsort(1)
    return rows(torch.cat([numbers(pairs.kept, pairs.kept.shape[1]), pairs.slot], 1), where)


def average(weight: Tensor, pairs: MergePairs, joins: Tensor, positive: bool = True) -> Shares:
    """The shares for the weights of all tokens.

    Unless weights are `positive`, all weights of an average can be 0; its tokens have equal shares then (D6).
    """
    one_hot = joins.to(weight.dtype)
    own, others = rows(weight, pairs.kept), one_hot * rows(weight, pairs.source)[:, None, :]
    total = own + others.sum(-1)
    if not positive:
        zero = total == 0
        own, others = torch.where(zero, 1, own), torch.where(zero[..., None], one_hot, others)
        total = torch.where(zero, 1 + one_hot.sum(-1), total)
    return Shares(own / total, others / total[..., None], total)


def combined(x: Tensor, pairs: MergePairs, joins: Tensor, shares: Shares, combine: Combine) -> Tensor:
    """The tokens after the merge."""
    kept = rows(x, pairs.kept)
    if isinstance(combine, Drop):
        return kept
    wide, merged = kept.to(shares.own.dtype), rows(x, pairs.source).to(shares.own.dtype)
    mean = shares.own[..., None] * wide + shares.others @ merged
    if isinstance(combine, Average):
        return mean.to(x.dtype)
    norm, norms = wide.norm(dim=-1), merged.norm(dim=-1)
    if isinstance(combine, MeanNorm):
        length = shares.own * norm + (shares.others * norms[:, None, :]).sum(-1)
    elif isinstance(combine, KeepNorm):
        length = norm.maximum(torch.where(joins, norms[:, None, :], 0).amax(-1))
    else:
        raise CannotExport(
            f"a recipe whose combine part is {combine} cannot be exported: it may use operators that other engines do "
            "not have. Known are Average, Drop, MeanNorm and KeepNorm of adamerge.core.combine."
        )
    factor = length / mean.norm(dim=-1).clamp_min(torch.finfo(mean.dtype).tiny)
    return (mean * torch.where(joins.any(-1) & factor.isfinite(), factor, 1)[..., None]).to(x.dtype)
