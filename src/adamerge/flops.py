"""Costs: the multiply-accumulates (MACs) of a model, unmerged or for given token counts, counted in two ways.

`paper` is the count of the paper: the blocks only, each at the number of tokens that enter it.
`true` counts every matrix product that is executed: patch embedding, head, attention and MLP of each block at their
own token counts, and the products of the decision (affinity, similarity) at layers that may merge.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Real
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from adamerge.core.errors import BadOption
from adamerge.core.evidence import Widths
from adamerge.core.recipe import Recipe
from adamerge.hosts.base import find_host
from adamerge.patching.apply import stack_of, temporarily_patched, trace
from adamerge.patching.probes import PassThrough
from adamerge.patching.stack import install
from adamerge.runtime.block_view import BlockShape

# The names of the two counts, which are also the fields of `Cost`.
CostCount = Literal["true", "paper"]


def check_cost(cost: object) -> None:
    """Raise BadOption unless `cost` is the name of a count."""
    if cost not in get_args(CostCount):
        raise BadOption(f"cost must be one of {', '.join(get_args(CostCount))}; got {cost!r}")


@dataclass(frozen=True)
class Cost:
    """The MACs of each image in both counts."""

    paper: Float[Tensor, " b"]
    true: Float[Tensor, " b"]


@dataclass(frozen=True)
class Meter:
    """The MACs of a model's parts: of each block, of the embedding per patch, and of the head per image."""

    blocks: tuple[BlockShape, ...]
    prefix: int
    patches: int
    embedding: float
    head: int

    def unmerged(self) -> Cost:
        """The cost of one image without merging."""
        return self.cost(torch.full((1, len(self.blocks)), self.patches), None)

    def cost(self, counts: Real[Tensor, "b l"], recipe: Recipe | None, patches: int | None = None) -> Cost:
        """The cost of images with `counts` patch tokens left after the merge of each layer.

        `patches` is their number of patches, for images of another size than the model's own.  Counts may be means
        over images; this gives a little less than the mean cost, because costs grow faster than counts.
        """
        patches = self.patches if patches is None else patches
        after = counts.double() + self.prefix
        before = torch.cat([torch.full_like(after[:, :1], patches + self.prefix), after[:, :-1]], 1)
        attending = after if recipe is None or recipe.site == "before_block" else before
        paper = true = torch.zeros(len(counts), dtype=torch.float64, device=counts.device)
        for layer, block in enumerate(self.blocks):
            n, left = attending[:, layer], after[:, layer]
            pairs = block.per_pair * n * n
            paper = paper + block.per_token * n + pairs
            true = true + (block.qkv + block.project) * n + pairs + block.mlp * left
            if recipe is not None and recipe.may_merge(layer, len(self.blocks)):
                seen = (before[:, layer] - self.prefix).long()
                at = Widths(block.dim, block.heads, block.key_dim, self.prefix)
                true = true + recipe.salience.macs(seen, at) + recipe.links.macs(seen, at)
        return Cost(paper, true + self.embedding * patches + self.head)


def meter(model: nn.Module) -> Meter:
    """Count the MACs of a model's parts.  What is outside the blocks is run once on a blank image."""
    # Imported here because it loads Triton, which merging alone does not need.
    from torch.utils.flop_counter import FlopCounterMode

    host = find_host(model)
    counter = FlopCounterMode(display=False)
    seen: list[tuple[int, int]] = []
    probe = PassThrough(host, lambda x: seen.append((x.shape[1], counter.get_total_flops())))
    parameter = next(model.parameters())
    # The counter misses fused attention on a CPU (in a pooling head), so the math backend runs.
    # The counter's module tracker needs gradients where a parameter is an input of a module.
    with (
        temporarily_patched(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        counter,
    ):
        install(host, probe)
        entry = host.entry or model
        blank = torch.zeros(1, *host.image, device=parameter.device, dtype=parameter.dtype)
        functional_call(entry, _copies_for_autograd(entry), (blank,))
    tokens, before = seen[-1]
    return Meter(
        blocks=tuple(view.shape for view in host.views),
        prefix=host.prefix,
        patches=tokens - host.prefix,
        embedding=before / 2 / (tokens - host.prefix),
        head=(counter.get_total_flops() - before) // 2,
    )


def _copies_for_autograd(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters and buffers that were made in inference mode: autograd does not accept those.

    The blocks are not in the model at that time, so the copies are small.
    """
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in tensors
        if tensor.is_inference()
    }


def cost(model: nn.Module) -> Cost:
    """The cost of each image in the last forward pass of a merged model."""
    stack = stack_of(model)
    seen = trace(model)
    return meter(model).cost(seen.counts, stack.recipe, seen.patches)
