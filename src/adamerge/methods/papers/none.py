"""The unmerged model as a recipe."""

from dataclasses import dataclass

from torch import Tensor

from adamerge.core.budget import Fixed
from adamerge.core.combine import BySize
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.match import Links, no_links
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform
from adamerge.core.types import PerToken


@part
@dataclass(frozen=True)
class Nobody:
    """No token is linked to any other."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links:
        return no_links(salience)

    def macs(self, n: Tensor, at: Widths) -> Tensor:
        return 0 * n


def none() -> Recipe:
    """Merge nothing: outputs and cost are exactly those of the unmerged model."""
    return Recipe(site="before_block", salience=Uniform(), links=Nobody(), budget=Fixed(0), weight=BySize())
