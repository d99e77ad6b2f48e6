"""How the tokens of a slot become one token: the weights of the average, and the way to combine."""

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
    """The weight part of a recipe: gives each token's weight in the average of its slot, `(b, n)`."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken: ...


@part
@dataclass(frozen=True)
class BySalience:
    """Weights are the salience of the tokens (published, eq. 5)."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return salience


@part
@dataclass(frozen=True)
class BySize:
    """Weights are the sizes of the tokens, the number of patches each stands for (ToMe)."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return evidence.size


@part
@dataclass(frozen=True)
class BySalienceAndSize:
    """Weights are salience times size."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return salience * evidence.size


@runtime_checkable
class Combine(Protocol):
    """The combine part of a recipe: makes one token from the tokens of each slot, `(b, n, d)` -> `(b, m, d)`."""

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]: ...


@runtime_checkable
class CombineByLayer(Combine, Protocol):
    """A combine part that acts as one of several parts, by the layer.  Backends with kernels ask for them."""

    @property
    def parts(self) -> tuple[Combine, ...]:
        """All the parts it can act as."""
        ...

    def at(self, layer: int, depth: int) -> Combine:
        """The part it acts as at `layer` of `depth` layers."""
        ...


@part
@dataclass(frozen=True)
class Average:
    """The weighted mean of a slot's tokens."""

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        return fold(x, decision.plan, decision.weight)


@part
@dataclass(frozen=True)
class Drop:
    """Pruning: the destination token stays unchanged; the tokens merged into it are dropped."""

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        return fold(x, decision.plan, decision.kept.to(decision.weight.dtype))


@part
@dataclass(frozen=True)
class MeanNorm:
    """The weighted mean, rescaled to the weighted mean of its members' norms (ours).

    The mean of tokens with different directions has a smaller norm than they have, but the next layers were trained on
    tokens of full norm.
    """

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        plan, weight = decision.plan, decision.weight
        wide = x.to(weight.dtype)
        length = fold(wide.norm(dim=-1, keepdim=True), plan, weight)
        return _rescaled(fold(wide, plan, weight), length, plan).to(x.dtype)


@part
@dataclass(frozen=True)
class KeepNorm:
    """MLERP (ToFu): the weighted mean, rescaled to the largest norm of its members."""

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        plan, weight = decision.plan, decision.weight
        wide = x.to(weight.dtype)
        norm = torch.where(plan.slot < 0, 0, wide.norm(dim=-1))
        largest = norm.new_zeros(len(x), plan.width).scatter_reduce(1, plan.slot.clamp_min(0), norm, "amax")
        return _rescaled(fold(wide, plan, weight), largest[..., None], plan).to(x.dtype)


def _rescaled(mean: Float[Tensor, "b m d"], length: Float[Tensor, "b m 1"], plan: Plan) -> Float[Tensor, "b m d"]:
    """The mean of each slot, rescaled to have norm `length`."""
    factor = length / mean.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
    # A token alone in its slot stays bit-identical (D7).  A mean of norm 0 has no direction and is not rescaled.
    shared = tally(torch.ones(plan.slot.shape, dtype=mean.dtype, device=mean.device), plan)[..., None] > 1
    return mean * torch.where(shared & factor.isfinite(), factor, 1)


def parts_of(combine: Combine) -> tuple[Combine, ...]:
    """The parts that `combine` can act as: those it names, or itself."""
    return combine.parts if isinstance(combine, CombineByLayer) else (combine,)


def part_at(combine: Combine, layer: int, depth: int) -> Combine:
    """The part that `combine` acts as at a layer."""
    return combine.at(layer, depth) if isinstance(combine, CombineByLayer) else combine
