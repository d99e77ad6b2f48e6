"""The unmerged model, as a recipe."""

from dataclasses import dataclass

import torch
from torch import Tensor

from adamerge.core.budget import Fixed
from adamerge.core.combine import BySize
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.match import Links
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform
from adamerge.core.types import PerToken


@part
@dataclass(frozen=True)
class Nobody:
    """No token is linked to any other."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links:
        everyone = torch.arange(salience.shape[1], device=salience.device).expand(salience.shape)
        return Links(torch.zeros_like(salience), everyone, torch.zeros_like(everyone, dtype=torch.bool), 0)

    def macs(self, n: Tensor, at: Widths) -> Tensor:
        return 0 * n


def none() -> Recipe:
    """Merge nothing: bit for bit the host, at the host's cost."""
    return Recipe(site="before_block", salience=Uniform(), links=Nobody(), budget=Fixed(0), weight=BySize())
