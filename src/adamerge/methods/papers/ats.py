"""ATS: adaptive token sampling (Fayyaz et al., ECCV 2022)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adamerge.core.budget import Everything
from adamerge.core.checks import MOST_TOKENS, check_number
from adamerge.core.combine import BySize, Drop
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.match import Links, no_links
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.salience import ClassAttention
from adamerge.core.types import Counts, Mask, PerToken

# More points than this are counted and not listed.
MANY_POINTS = 2**16


@part
@dataclass(frozen=True)
class Sampled:
    """Keeps the tokens that inverse-transform sampling hits: `points` even steps over the cumulative sum of the scores.

    The score is class attention times the norm of the value.  Several points can hit the same token, so the number of
    kept tokens depends on the image.  Every other token is linked to the next kept one.  Nothing is linked in the
    `first` share of the depth.
    """

    needs_attention: ClassVar[str] = "values"
    points: float
    first: float = 0.25

    def __post_init__(self) -> None:
        check_number("points", self.points, at_least=1, at_most=MOST_TOKENS)
        check_number("first, a share of the depth,", self.first, at_least=0, at_most=1)

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links:
        if evidence.layer < self.first * evidence.depth:
            return no_links(salience)
        b, n = salience.shape
        position = torch.arange(n, device=salience.device).expand(b, n)
        score = salience * evidence.value_norms
        valid = evidence.valid
        if valid is not None:
            score = score.masked_fill(~valid, 0)
        total = (score / score.sum(1, keepdim=True).clamp_min(torch.finfo(score.dtype).tiny)).cumsum(1).nan_to_num(0)
        sampled = _hit(total, max(1, round(self.points)), evidence.counts)
        # The next sampled position; after the last one, that one.
        last = torch.where(sampled, position, -1).amax(1, keepdim=True)
        following = torch.where(sampled, position, n).flip(1).cummin(1).values.flip(1)
        source = ~sampled if valid is None else valid & ~sampled
        return Links(0 * salience, torch.where(following == n, last, following), source, None)

    def macs(self, n: Tensor, at: Widths) -> Tensor:
        return 0 * n


def _hit(total: PerToken, points: int, counts: Counts) -> Mask:
    """Which tokens `points` even steps over the cumulative sums `total` hit; steps past the end hit the last token."""
    b, n = total.shape
    if points <= MANY_POINTS:
        at = (torch.arange(points, device=total.device, dtype=total.dtype) + 0.5) / points
        hit = torch.searchsorted(total, at.expand(b, -1).contiguous()).minimum(counts[:, None] - 1)
        return torch.zeros_like(total, dtype=torch.bool).scatter(1, hit, True)
    # Too many to list: count those up to the end of each token.
    passed = (total.double() * points + 0.5).floor()
    before = torch.nn.functional.pad(passed[:, :-1], (1, 0))
    last = torch.arange(n, device=total.device) == counts[:, None] - 1
    return (passed > before) | (last & (passed < points))


def ats(tokens: float, *, first: float = 0.25, proportional_attention: bool = False) -> Recipe:
    """Keep at most `tokens` tokens per layer, sampled by class attention times value norm; drop the others.

    From the paper: the score, inverse-transform sampling at fixed points (no randomness at inference), and counts that
    vary with the image.  Our reading: sampling starts after a quarter of the blocks.  The original removes the queries
    of dropped tokens from the attention of the same block; here they are dropped right after attention, with the same
    result at a slightly higher cost.

    Args:
        tokens: the number of sampling points, and so the most patch tokens that can stay.  It may exceed the number of
            tokens; then more of them stay.
        first: the share of the depth that runs on all tokens.
        proportional_attention: count a kept token as often as the patches it stands for.
    """
    check_number("tokens", tokens, at_least=1, at_most=MOST_TOKENS)
    return Recipe(
        site="after_attention",
        salience=ClassAttention(),
        links=Sampled(tokens, first),
        budget=Everything(),
        weight=BySize(),
        combine=Drop(),
        proportional_attention=proportional_attention,
    )
