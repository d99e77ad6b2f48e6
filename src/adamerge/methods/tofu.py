"""ToFu: token fusion, pruning early and merging late (Kim et al., WACV 2024)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.evidence import Evidence
from adamerge.core.parts import part
from adamerge.core.plan import fold
from adamerge.core.recipe import Decision, Drop, Recipe
from adamerge.core.types import Features
from adamerge.methods.tome import tome


@part
@dataclass(frozen=True)
class KeepNorm:
    """MLERP: the weighted mean's direction with the greatest norm of its members, so that averaging shrinks nobody."""

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        plan, weight = decision.plan, decision.weight
        mean = fold(x.to(weight.dtype), plan, weight)
        norm = x.to(weight.dtype).norm(dim=-1)
        seen = torch.where(plan.slot < 0, 0, norm)
        largest = norm.new_zeros(len(x), plan.width).scatter_reduce(1, plan.slot.clamp_min(0), seen, "amax")
        factor = largest / mean.norm(dim=-1).clamp_min(torch.finfo(norm.dtype).tiny)
        alone = norm.new_zeros(len(x), plan.width).scatter_add(
            1, plan.slot.clamp_min(0), (plan.slot >= 0).to(norm.dtype)
        )
        return (mean * torch.where(alone > 1, factor, 1)[..., None]).to(x.dtype)


@part
@dataclass(frozen=True)
class DropThenKeepNorm:
    """Prune in the first `until` of the depth, merge with kept norms after it."""

    until: float = 0.5

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        early = evidence.layer < self.until * evidence.depth
        return (Drop() if early else KeepNorm())(x, decision, evidence)


def tofu(r: float, *, until: float = 0.5, proportional_attention: bool = True) -> Recipe:
    """ToMe's pairs, pruned in early blocks and averaged with their norm kept in late ones.

    From the paper: early blocks respond to interpolated inputs far from linearly, so that pruning hurts less than
    averaging there; MLERP keeps the norm.  Our reading: the norm is the greatest of the members', and the change comes
    in the middle of the depth.  No official code was found.

    Args:
        r: tokens removed at each layer; a fraction is spread over the layers.
        until: the share of the depth that prunes.
        proportional_attention: count a merged token as often as the patches it stands for.
    """
    return replace(tome(r, proportional_attention=proportional_attention), combine=DropThenKeepNorm(until))
