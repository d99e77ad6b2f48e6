"""Every way to make one token of several: the weights of an average, and what the average becomes."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.decision import Decision
from adamerge.core.evidence import Evidence
from adamerge.core.parts import part
from adamerge.core.plan import Plan, fold, tally
from adamerge.core.types import Features, PerToken


@runtime_checkable
class Weight(Protocol):
    """Gives each token's weight in the average of its slot."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken: ...


@part
@dataclass(frozen=True)
class BySalience:
    """Tokens are averaged in proportion to their salience (published, eq. 5)."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return salience


@part
@dataclass(frozen=True)
class BySize:
    """Tokens are averaged in proportion to the number of patches they stand for (ToMe)."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return evidence.size


@part
@dataclass(frozen=True)
class BySalienceAndSize:
    """Tokens are averaged in proportion to salience times size."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return salience * evidence.size


@runtime_checkable
class Combine(Protocol):
    """Makes one token of each slot's tokens: `x`, `(b, n, d)`, becomes `(b, m, d)`."""

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]: ...


@part
@dataclass(frozen=True)
class Average:
    """The weighted mean of a slot's tokens."""

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        return fold(x, decision.plan, decision.weight)


@part
@dataclass(frozen=True)
class Drop:
    """Pruning: the token that keeps its slot is unchanged; tokens merged into it are lost."""

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        return fold(x, decision.plan, decision.kept.to(decision.weight.dtype))


@part
@dataclass(frozen=True)
class MeanNorm:
    """The weighted mean, rescaled to the weighted mean of its members' norms (ours).

    The mean of tokens with different directions is shorter than they are; the layers that follow were trained on
    tokens of full length.
    """

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        plan, weight = decision.plan, decision.weight
        wide = x.to(weight.dtype)
        length = fold(wide.norm(dim=-1, keepdim=True), plan, weight)
        return _rescaled(fold(wide, plan, weight), length, plan).to(x.dtype)


@part
@dataclass(frozen=True)
class KeepNorm:
    """MLERP (ToFu): the weighted mean, rescaled to the greatest norm of its members."""

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        plan, weight = decision.plan, decision.weight
        wide = x.to(weight.dtype)
        norm = torch.where(plan.slot < 0, 0, wide.norm(dim=-1))
        largest = norm.new_zeros(len(x), plan.width).scatter_reduce(1, plan.slot.clamp_min(0), norm, "amax")
        return _rescaled(fold(wide, plan, weight), largest[..., None], plan).to(x.dtype)


def _rescaled(mean: Float[Tensor, "b m d"], length: Float[Tensor, "b m 1"], plan: Plan) -> Float[Tensor, "b m d"]:
    """The means of all slots with these lengths."""
    factor = length / mean.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
    # A token alone in its slot is returned bit for bit (D7).  A mean of length 0 has no direction to rescale.
    shared = tally(torch.ones(plan.slot.shape, dtype=mean.dtype, device=mean.device), plan)[..., None] > 1
    return mean * torch.where(shared & factor.isfinite(), factor, 1)
