"""ToFu: token fusion, pruning early and merging late (Kim et al., WACV 2024)."""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from adamerge.core.combine import Drop, KeepNorm
from adamerge.core.decision import Decision
from adamerge.core.evidence import Evidence
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.types import Features
from adamerge.methods.papers.tome import tome


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
