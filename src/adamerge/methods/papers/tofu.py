"""ToFu: token fusion, pruning early and merging late (Kim et al., WACV 2024)."""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from adamerge.core.checks import check_number
from adamerge.core.combine import Combine, Drop, KeepNorm
from adamerge.core.decision import Decision
from adamerge.core.evidence import Evidence
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.types import Features
from adamerge.methods.papers.tome import tome


@part
@dataclass(frozen=True)
class DropThenKeepNorm:
    """Drops merged tokens in the first `until` of the depth; after it averages them and keeps the largest norm."""

    until: float = 0.5

    def __post_init__(self) -> None:
        check_number("until, a share of the depth,", self.until, at_least=0, at_most=1)

    @property
    def parts(self) -> tuple[Combine, ...]:
        return Drop(), KeepNorm()

    def at(self, layer: int, depth: int) -> Combine:
        return Drop() if layer < self.until * depth else KeepNorm()

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        return self.at(evidence.layer, evidence.depth)(x, decision, evidence)


def tofu(r: float, *, until: float = 0.5, proportional_attention: bool = True) -> Recipe:
    """ToMe's pairs: early blocks drop the source, late blocks average both and keep the norm.

    From the paper: early blocks are far from linear between two inputs, so that dropping a token hurts less there than
    averaging; MLERP keeps the norm.  Our reading: the norm is the largest of the members, and the change is at half of
    the depth.  No official code was found.

    Args:
        r: tokens removed at each layer; fractions carry over to later layers.
        until: the share of the depth that prunes.
        proportional_attention: add the log of its size to the attention scores of a merged token.
    """
    return replace(tome(r, proportional_attention=proportional_attention), combine=DropThenKeepNorm(until))
