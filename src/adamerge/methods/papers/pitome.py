"""PiToMe: energy-based protection of informative tokens (Tran et al., NeurIPS 2024)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import elu, normalize

from adamerge.core.budget import Budget, Fixed, asked
from adamerge.core.checks import check_number
from adamerge.core.combine import BySize
from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence
from adamerge.core.match import Bipartite, Keys, Links, Sides, SimilarityOnly
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform
from adamerge.core.types import Counts


@part
@dataclass(frozen=True)
class Ratio:
    """Keep the share `ratio` of the patch tokens at every layer."""

    ratio: float

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, at_least=0)
        if not 0 < self.ratio <= 1:
            raise BadOption(
                f"ratio is the share of tokens kept at each layer and must be in (0, 1]; got {self.ratio!r}"
            )

    @property
    def ragged(self) -> bool:
        return False

    def may_merge(self, layer: int, depth: int) -> bool:
        return self.ratio < 1

    def fixed_count(self, layer: int, depth: int, patches: int) -> int:
        return min(math.floor(patches - patches * self.ratio), patches // 2)

    def __call__(self, links: Links, evidence: Evidence) -> int | Counts:
        return asked(self, evidence)


@part
@dataclass(frozen=True)
class ByEnergy:
    """Sorts tokens by falling energy and makes them source and target in turn.

    The energy `E_i = mean_j ELU(cos(k_i, k_j) - m)` is high for tokens that many others are similar to.  The margin `m`
    falls linearly from `margin` to 0 over the depth.  In the first half of the blocks all tokens take part; in the
    second half only the `2 r` tokens of highest energy, and the others are protected.
    """

    needs_attention: ClassVar[str] = "keys"
    margin: float
    budget: Budget

    def __post_init__(self) -> None:
        if self.budget.ragged:
            raise BadOption(f"PiToMe needs a budget with the same count for every image; got {self.budget}")

    def __call__(self, evidence: Evidence) -> Sides:
        keys = normalize(evidence.keys, dim=-1)
        margin = self.margin - self.margin * evidence.layer / evidence.depth
        energy, valid = elu(keys @ keys.mT - margin), evidence.valid
        if valid is None:
            energy = energy.mean(-1)
        else:
            energy = energy.masked_fill(~valid[:, None, :], 0).sum(-1) / evidence.counts[:, None]
            energy = energy.masked_fill(~valid, float("-inf"))
        order = energy.argsort(dim=1, descending=True, stable=True)
        taking_part = evidence.counts[:, None]
        if evidence.layer >= math.ceil(evidence.depth / 2):
            merges = asked(self.budget, evidence)
            taking_part = taking_part.clamp(max=2 * (merges if isinstance(merges, int) else merges[:, None]))
        rank = torch.arange(order.shape[1], device=order.device).expand_as(order)
        part = rank < taking_part
        return Sides(order[:, ::2], order[:, 1::2], part[:, ::2], part[:, 1::2])

    def pairs(self, n: Tensor) -> Tensor:
        return n * n + (n // 2) * (n - n // 2)


def pitome(
    r: float | None = None, ratio: float | None = None, *, margin: float = 0.9, proportional_attention: bool = True
) -> Recipe:
    """Merge tokens of high energy, which many others are similar to; protect the others.

    From the paper: energy, the falling margin, ordered bipartite matching, protection of low-energy tokens, averaging
    by size.  Our reading follows the original code where it differs: it protects only in the second half of the blocks.
    Its other choices are options here: it takes the share `ratio` of tokens to keep; its margin starts at 0.9 for
    AugReg and CLIP models and at 0.75 for DeiT and MAE; its timm patch never passes sizes to attention, which is
    `proportional_attention=False`.

    Args:
        r: tokens merged at each layer; fractions carry over to later layers.
        ratio: instead of `r`, the share of tokens kept at each layer.
        margin: the margin in the first block.
        proportional_attention: add the log of its size to the attention scores of a merged token.
    """
    if (r is None) == (ratio is None):
        raise BadOption(f"give either r or ratio; got r={r!r} and ratio={ratio!r}")
    check_number("margin", margin)
    budget = Fixed(r) if r is not None else Ratio(ratio if ratio is not None else 1.0)
    return Recipe(
        site="after_attention",
        salience=Uniform(),
        links=Bipartite(ByEnergy(margin, budget), Keys(), SimilarityOnly()),
        budget=budget,
        weight=BySize(),
        proportional_attention=proportional_attention,
    )
