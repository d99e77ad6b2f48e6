"""Making one token of several without shrinking it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.evidence import Evidence
from adamerge.core.parts import part
from adamerge.core.plan import fold, tally
from adamerge.core.recipe import Decision
from adamerge.core.types import Features


@part
@dataclass(frozen=True)
class MeanNorm:
    """The weighted mean's direction with the weighted mean of its members' norms (ours).

    Tokens that point different ways have a short mean; what follows was trained on tokens of full length.
    """

    def __call__(self, x: Features, decision: Decision, evidence: Evidence) -> Float[Tensor, "b m d"]:
        plan, weight = decision.plan, decision.weight
        wide = x.to(weight.dtype)
        mean = fold(wide, plan, weight)
        wanted = fold(wide.norm(dim=-1, keepdim=True), plan, weight)
        factor = wanted / mean.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
        # A token alone comes back bit for bit (D7), and nothing can be scaled to a length that has no direction.
        company = tally(torch.ones_like(weight), plan)[..., None] > 1
        return (mean * torch.where(company & factor.isfinite(), factor, 1)).to(x.dtype)
