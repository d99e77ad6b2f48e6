"""Merges pairs of tokens by gathers and one-hot products: no scatter, which other engines lack or get wrong."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adamerge.core.combine import Average, Combine, Drop, KeepNorm, MeanNorm
from adamerge.core.errors import CannotExport
from adamerge.exporting.pairs import MergePairs
from adamerge.exporting.state import ExportState, numbers, rows


@dataclass(frozen=True)
class Weights:
    """The weights of the tokens in their averages: of each kept token, `(b, m)`, and of the others, `(b, r)`.

    `total` is the sum of the weights of each average, `(b, m)`.
    """

    own: Tensor
    others: Tensor
    total: Tensor


def merge_pairs(state: ExportState, pairs: MergePairs, weight: Tensor | None, combine: Combine) -> ExportState:
    """The state after a merge; `weight` is that of each patch token in the average, None for its size."""
    onto = pairs.onto.to(state.size.dtype)
    by_size = weigh(state.size, pairs, onto)
    weights = by_size
    if weight is not None:
        weights = weigh(torch.nn.functional.pad(weight, (state.prefix, 0), value=1.0), pairs, onto, positive=False)
    places = state.places
    low = torch.where(onto > 0, rows(places, pairs.source)[:, :, None], state.tokens + state.original).amin(1)
    slots = slots_of(pairs)
    return replace(
        state,
        x=combined(state.x, pairs, onto, weights, combine),
        size=by_size.total,
        place=rows(places, pairs.kept).minimum(low),
        slot=slots if state.slot is None else rows(slots, state.slot),
    )


def slots_of(pairs: MergePairs) -> Tensor:
    """The token after the merge that each token becomes part of, `(b, t)`."""
    where = torch.cat([pairs.kept, pairs.source], 1).argsort(1)
    return rows(torch.cat([numbers(pairs.kept, pairs.kept.shape[1]), pairs.slot], 1), where)


def weigh(weight: Tensor, pairs: MergePairs, onto: Tensor, positive: bool = True) -> Weights:
    """The weights of all tokens as weights of averages.

    Unless weights are `positive`, all weights of an average can be 0; its tokens have equal shares then (D6).
    """
    own, others = rows(weight, pairs.kept), rows(weight, pairs.source)
    total = own + received(others, onto)
    if not positive:
        zero = total == 0
        own, others = torch.where(zero, 1, own), torch.where(rows(zero, pairs.slot), 1, others)
        total = own + received(others, onto)
    return Weights(own, others, total)


def received(values: Tensor, onto: Tensor) -> Tensor:
    """What each token after the merge gets of the values `(b, r)` of the tokens that are merged into it, `(b, m)`."""
    return (values[:, None, :] @ onto)[:, 0]


def combined(x: Tensor, pairs: MergePairs, onto: Tensor, weights: Weights, combine: Combine) -> Tensor:
    """The tokens after the merge."""
    kept = rows(x, pairs.kept)
    if isinstance(combine, Drop):
        return kept
    own, others, total = weights.own, weights.others, weights.total
    wide, merged = kept.to(own.dtype), rows(x, pairs.source).to(own.dtype)
    # The few tokens that are merged are weighted, not the large one-hot matrix.
    mean = (onto.mT @ (merged * others[..., None]) + wide * own[..., None]) / total[..., None]
    if isinstance(combine, Average):
        return mean.to(x.dtype)
    norm, norms = wide.norm(dim=-1), merged.norm(dim=-1)
    if isinstance(combine, MeanNorm):
        length = (own * norm + received(others * norms, onto)) / total
    elif isinstance(combine, KeepNorm):
        length = norm.maximum((onto * norms[..., None]).amax(1))
    else:
        raise CannotExport(
            f"a recipe whose combine part is {combine} cannot be exported: it may use operators that other engines do "
            "not have. Known are Average, Drop, MeanNorm and KeepNorm of adamerge.core.combine."
        )
    factor = length / mean.norm(dim=-1).clamp_min(torch.finfo(mean.dtype).tiny)
    return (mean * torch.where((onto.amax(1) > 0) & factor.isfinite(), factor, 1)[..., None]).to(x.dtype)
