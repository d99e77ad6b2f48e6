"""Random merging: the baseline that every method should beat."""

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.budget import Fixed
from adamerge.core.combine import BySize
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.match import Alternating, Links
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform
from adamerge.core.types import PerToken


def _draws(seed: int, like: PerToken) -> Float[Tensor, "2 n"]:
    """Two numbers for each token of an image, on the device of `like`: the same on every device.

    They are drawn on the CPU.  A copy to the device cannot be part of a CUDA graph, so they are copied once and kept.
    """
    traced = torch.compiler.is_compiling() or type(like) is not Tensor
    return (_draw if traced else _kept_draw)(seed, like.shape[1], like.device, like.dtype)


def _draw(seed: int, n: int, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "2 n"]:
    return torch.rand(2, n, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@cache
def _kept_draw(seed: int, n: int, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "2 n"]:
    """The same; never dropped, because CUDA graphs go on reading them.  A layer's draws are a few kilobytes."""
    with torch.inference_mode(False):
        return _draw(seed, n, device, dtype)


@part
@dataclass(frozen=True)
class AtRandom:
    """Links every second token to a random one of the others; the draws are the same for all images and runs."""

    seed: int = 0

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links:
        b, n = salience.shape
        sides = Alternating()(evidence)
        draw = _draws(self.seed * 1009 + evidence.layer, salience)
        targets = sides.target_valid.sum(1, keepdim=True).clamp_min(1)
        which = (draw[1] * targets).long().minimum(targets - 1)
        partner = (2 * which + 1).clamp_max(n - 1)
        source = torch.zeros(b, n, dtype=torch.bool, device=draw.device)
        source = source.scatter(1, sides.source, sides.source_valid & (sides.target_valid.sum(1, keepdim=True) > 0))
        return Links(draw[0].expand(b, n).contiguous(), partner, source, sides.source.shape[1] if n > 1 else 0)

    def macs(self, n: Tensor, at: Widths) -> Tensor:
        return 0 * n


def random(r: float, *, seed: int = 0, proportional_attention: bool = True) -> Recipe:
    """Merge `r` random pairs at each layer.

    Args:
        r: tokens merged at each layer; fractions carry over to later layers.
        seed: seed of the random pairs.
        proportional_attention: add the log of its size to the attention scores of a merged token.
    """
    return Recipe(
        site="after_attention",
        salience=Uniform(),
        links=AtRandom(seed),
        budget=Fixed(r),
        weight=BySize(),
        proportional_attention=proportional_attention,
    )
