"""EViT: keep the attentive tokens, fuse the others into one (Liang et al., ICLR 2022), without training."""

from dataclasses import dataclass

import torch
from torch import Tensor

from adamerge.core.budget import Keep
from adamerge.core.combine import BySalience
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.match import Links
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.salience import ClassAttention
from adamerge.core.types import PerToken


@part
@dataclass(frozen=True)
class IntoOne:
    """Links every token to the least salient one, so that all merged tokens become one fused token."""

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links:
        valid = evidence.valid
        low = salience if valid is None else salience.masked_fill(~valid, float("inf"))
        partner = low.argmin(1, keepdim=True)
        source = torch.ones_like(salience, dtype=torch.bool) if valid is None else valid
        source = source.scatter(1, partner, False)
        return Links(-salience, partner.expand_as(salience).clone(), source, salience.shape[1] - 1)

    def macs(self, n: Tensor, at: Widths) -> Tensor:
        return 0 * n


def evit(keep: float, *, proportional_attention: bool = False) -> Recipe:
    """At three depths keep the share `keep` of the tokens, those the class token attends to most; fuse the others.

    From the paper: class attention averaged over heads, and a fused token weighted by it, at blocks 3, 6 and 9 of
    twelve.  The published models are trained with EViT; here nothing is trained, so accuracy is lower.

    Args:
        keep: the share of tokens that stay at each of the three stages.
        proportional_attention: add the log of its size to the attention scores of the fused token.
    """
    return Recipe(
        site="after_attention",
        salience=ClassAttention(),
        links=IntoOne(),
        budget=Keep(keep),
        weight=BySalience(),
        proportional_attention=proportional_attention,
    )
