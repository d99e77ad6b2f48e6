"""ATS: adaptive token sampling (Fayyaz et al., ECCV 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from adamerge.core.budget import Everything
from adamerge.core.checks import check_number
from adamerge.core.combine import BySize, Drop
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.match import Links
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.salience import ClassAttention
from adamerge.core.types import PerToken


@part
@dataclass(frozen=True)
class Sampled:
    """Sample tokens by inverse transform at evenly spaced points of the scores' cumulative sum.

    The score is class attention times the norm of the value; several points may hit one token, so rich images keep
    more.  Who is not hit is linked to the next token that is.
    """

    points: float
    first: float = 0.25

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links:
        b, n = salience.shape
        everyone = torch.arange(n, device=salience.device).expand(b, n)
        if evidence.layer < self.first * evidence.depth:
            return Links(0 * salience, everyone, torch.zeros_like(everyone, dtype=torch.bool), 0)
        norm = evidence.values.norm(dim=-1)
        score = salience * norm
        valid = evidence.valid
        if valid is not None:
            score = score.masked_fill(~valid, 0)
        total = (score / score.sum(1, keepdim=True).clamp_min(torch.finfo(score.dtype).tiny)).cumsum(1).nan_to_num(0)
        points = max(1, round(self.points))
        at = (torch.arange(points, device=score.device, dtype=score.dtype) + 0.5) / points
        hit = torch.searchsorted(total, at.expand(b, -1).contiguous()).minimum(evidence.counts[:, None] - 1)
        sampled = torch.zeros_like(everyone, dtype=torch.bool).scatter(1, hit, True)
        # The next sampled position, or the last one for those behind it.
        last = torch.where(sampled, everyone, -1).amax(1, keepdim=True)
        following = torch.where(sampled, everyone, n).flip(1).cummin(1).values.flip(1)
        source = ~sampled if valid is None else valid & ~sampled
        return Links(0 * salience, torch.where(following == n, last, following), source, None)

    def macs(self, n: Tensor, at: Widths) -> Tensor:
        return 0 * n


def ats(tokens: float, *, first: float = 0.25, proportional_attention: bool = False) -> Recipe:
    """Keep at most `tokens` tokens a layer, sampled by class attention times value norm; drop the others.

    From the paper: the score, inverse-transform sampling at fixed points (no randomness at inference), and counts that
    vary with the image.  Our reading: sampling starts after a quarter of the blocks.  The original leaves the queries
    of dropped tokens out of the attention matrix of the same block; here they are dropped right after it, with the same
    result and a slightly higher cost.

    Args:
        tokens: sampling points, the most patch tokens that can stay; more points than tokens spare more of them.
        first: the share of the depth that runs on all tokens.
        proportional_attention: count a kept token as often as the patches it stands for.
    """
    check_number("tokens", tokens, at_least=1)
    return Recipe(
        site="after_attention",
        salience=ClassAttention(),
        links=Sampled(tokens, first),
        budget=Everything(),
        weight=BySize(),
        combine=Drop(),
        proportional_attention=proportional_attention,
    )
