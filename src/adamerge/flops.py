"""Multiply-accumulates of a model, unmerged or from the token counts of real images, counted two ways.

`paper` counts as the paper does: the blocks alone, every block at the number of tokens that enter it.
`true` counts every matrix product that is executed: patch embedding, head, the two halves of each block at their
own token counts, and what the decision itself costs (affinity, similarity).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adamerge.core.evidence import Widths
from adamerge.core.recipe import Recipe
from adamerge.models.host import find_host
from adamerge.models.surgery import applied, borrowed, trace
from adamerge.runtime.view import BlockShape


@dataclass(frozen=True)
class Cost:
    """Multiply-accumulates of each image, in the paper's sense and in the true sense."""

    paper: Float[Tensor, "b"]
    true: Float[Tensor, "b"]


@dataclass(frozen=True)
class Meter:
    """A model's prices: what its blocks cost per token and pair, and what the rest of it costs per image."""

    blocks: tuple[BlockShape, ...]
    prefix: int
    patches: int
    outside: int

    def unmerged(self) -> Cost:
        """What the model costs without merging."""
        return self.cost(torch.full((1, len(self.blocks)), self.patches), None)

    def cost(self, counts: Int[Tensor, "b l"], recipe: Recipe | None) -> Cost:
        """What images cost that have `counts` patch tokens left after the merge of each layer."""
        after = counts.double() + self.prefix
        before = torch.cat([torch.full_like(after[:, :1], self.patches + self.prefix), after[:, :-1]], 1)
        attending = after if recipe is None or recipe.site == "before_block" else before
        paper = true = torch.zeros(len(counts), dtype=torch.float64, device=counts.device)
        for layer, block in enumerate(self.blocks):
            n, left = attending[:, layer], after[:, layer]
            pairs = block.per_pair * n * n
            paper = paper + block.per_token * n + pairs
            true = true + (block.qkv + block.project) * n + pairs + block.mlp * left
            if recipe is not None:
                seen = (before[:, layer] - self.prefix).long()
                at = Widths(block.dim, block.heads, block.key_dim, self.prefix)
                true = true + recipe.salience.macs(seen, at) + recipe.links.macs(seen, at)
        return Cost(paper, true + self.outside)


def meter(model: nn.Module) -> Meter:
    """Read a model's prices.  Everything outside the blocks is counted by running it once on a blank image."""
    # It loads Triton, which nobody needs who only merges.
    from torch.utils.flop_counter import FlopCounterMode

    host = find_host(model)
    passage = _Passage()
    parameter = next(model.parameters())
    blank = torch.zeros(1, *host.image, device=parameter.device, dtype=parameter.dtype)
    counter = FlopCounterMode(display=False)
    with borrowed(model), torch.no_grad(), counter:
        host.put(passage)
        model(blank)
    return Meter(
        blocks=tuple(view.shape for view in host.views),
        prefix=host.prefix,
        patches=passage.tokens - host.prefix,
        outside=counter.get_total_flops() // 2,
    )


class _Passage(nn.Module):
    """Stands where the blocks are, lets tokens through and counts them."""

    tokens = 0

    def forward(self, x: Tensor) -> Tensor:
        self.tokens = x.shape[1]
        return x


def cost(model: nn.Module) -> Cost:
    """What each image of a merged model's last forward pass cost."""
    stack = applied(model)
    return meter(model).cost(trace(model).counts, stack.recipe)
