"""The price of one more merge at each layer, from one backward pass: every merge is a share between 0 and 1.

A token that merges with a value near the threshold stays in the batch with size 0.  It gets no attention and has no
influence on the output, but the loss has a gradient with respect to the share by which it merged.  So the forward pass
gives what the recipe gives, and the gradients say what the next merge would lose and what the last one lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from adamerge.core.combine import MeanNorm
from adamerge.core.evidence import Evidence, Heads
from adamerge.core.match import Links
from adamerge.core.recipe import Recipe
from adamerge.runtime.block_view import View
from adamerge.runtime.reference import State

# The size of a token that was merged away; its logarithm is added to attention scores.
TINY = 1e-6
# Marginal links are those next to the threshold: this share of all links above it (merged) and below it.
MERGED_MARGIN, UNMERGED_MARGIN = 0.02, 0.06


@dataclass(frozen=True)
class Step:
    """What one layer merged: the share of each token (a leaf of autograd), which merged, and the marginal links.

    All are in the order of the tokens before the merge; `place` is the patch at which each began.
    """

    share: Float[Tensor, "b w"]
    merged: Tensor
    margin: Float[Tensor, "b w"]
    place: Tensor


@dataclass(frozen=True)
class SoftTokens:
    """The tokens of a batch.  `live` is False for tokens that were merged away and for padding.

    `presence` is 1 for live tokens and 0 for others, with gradients; `size` likewise, times the number of patches.
    """

    x: Tensor
    size: Tensor
    presence: Tensor
    live: Tensor
    place: Tensor
    prefix: int

    def at(self, index: Tensor, exists: Tensor) -> "SoftTokens":
        """The tokens at these positions; where `exists` is False, padding."""
        size, presence, live, place = (x.gather(1, index) for x in (self.size, self.presence, self.live, self.place))
        x = with_prefix(self.x, index, self.prefix)
        size, presence = (torch.where(exists, one, 0) for one in (size, presence))
        return SoftTokens(x, size, presence, live & exists, place, self.prefix)


def with_prefix(x: Tensor, index: Tensor, prefix: int) -> Tensor:
    """The prefix tokens and the patch tokens at `index`."""
    whole = torch.cat([torch.arange(prefix, device=index.device).expand(len(index), -1), prefix + index], 1)
    return x.gather(1, whole.view(*whole.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def first_where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The positions where `mask` is True, in order, padded to the longest row; and which of them are no padding."""
    count = mask.sum(1)
    index = (~mask).int().argsort(dim=1, stable=True)[:, : int(count.amax())]
    return index, torch.arange(index.shape[1], device=index.device) < count[:, None]


def soft_blocks(
    state: State, views: Sequence[View], recipe: Recipe, r: Sequence[float]
) -> tuple[Float[Tensor, "b t d"], list[Step]]:
    """Run all blocks, merging `r[layer]` tokens on average over the batch; gives the tokens and the merges."""
    ones = torch.ones(state.size.shape, dtype=state.size.dtype, device=state.size.device)
    tokens = SoftTokens(state.x.clone(), ones, ones, ones > 0, state.place.clone(), state.prefix)
    steps: list[Step] = []
    for layer, view in enumerate(views):
        tokens, heads = _attention(tokens, view, recipe.proportional_attention)
        evidence = Evidence(tokens.x, ones, layer, len(views), state.prefix, state.class_token, patches=ones.shape[1])
        tokens, step = _merge(tokens, recipe, replace(evidence, heads=heads), r[layer])
        tokens = replace(tokens, x=tokens.x + view.mlp(tokens.x))
        steps.append(step)
    return tokens.x, steps


def _attention(tokens: SoftTokens, view: View, proportional: bool) -> tuple[SoftTokens, Heads]:
    """Add the attention branch; a token of size 0 gets no attention."""
    query, key, value = view.qkv(tokens.x)
    counted = tokens.size if proportional else tokens.presence
    bias = pad((counted + TINY).log(), (tokens.prefix, 0))[:, None, None, :]
    q, k, v = (side.transpose(1, 2) for side in (query, key, value))
    weights = ((q * view.scale) @ k.mT + bias).softmax(-1)
    x = tokens.x + view.project((weights @ v).transpose(1, 2))
    return replace(tokens, x=x), Heads(query.detach(), key.detach(), value.detach(), view.scale, bias.detach())


def _merge(tokens: SoftTokens, recipe: Recipe, evidence: Evidence, r: float) -> tuple[SoftTokens, Step]:
    """Merge as the recipe says, by shares that have gradients; merged tokens stay if they were marginal."""
    with torch.no_grad():
        index, exists = first_where(tokens.live)
        seen = _of_live(tokens, evidence, index, exists)
        salience = recipe.salience(seen)
        links: Links = recipe.links(seen, salience)
        merged, margin = _chosen(links, r)
        itself = torch.arange(tokens.size.shape[1], device=index.device).repeat(len(index), 1)
        partner = itself.scatter(1, index, torch.where(links.source, index.gather(1, links.partner), index))
        nothing = torch.zeros_like(tokens.size)
        weight = nothing.scatter(1, index, torch.where(exists, recipe.weight(seen, salience), 0))
        gone, marginal = (torch.zeros_like(tokens.live).scatter(1, index, one) for one in (merged, margin > 0))
        place = torch.where(exists, tokens.place.gather(1, index), evidence.patches)
    share = merged.to(nothing.dtype).requires_grad_()
    m = nothing.scatter(1, index, share)
    x = _combined(tokens, m, weight, partner, isinstance(recipe.combine, MeanNorm))
    moved = m * tokens.size
    size = tokens.size - moved + nothing.scatter_add(1, partner, moved)
    left = replace(tokens, x=x, size=size, presence=tokens.presence * (1 - m), live=tokens.live & ~gone)
    kept = left.live | (gone & marginal) | (~tokens.live & (tokens.place < evidence.patches))
    index, exists = first_where(kept)
    left = left.at(index, exists)
    return replace(left, place=torch.where(exists, left.place, evidence.patches)), Step(share, merged, margin, place)


def _combined(tokens: SoftTokens, m: Tensor, weight: Tensor, partner: Tensor, mean_norm: bool) -> Tensor:
    """Each target becomes the mean of itself and the shares of its sources."""
    patches, own = tokens.x[:, tokens.prefix :], weight * tokens.presence
    source = partner != torch.arange(partner.shape[1], device=partner.device)
    given = torch.where(source, own * m, 0)
    target = torch.zeros_like(source).scatter_reduce(1, partner, source, "amax")
    total = own + torch.zeros_like(own).scatter_add(1, partner, given)
    target = target & (total > 0)
    total, wide = torch.where(target, total, 1)[..., None], partner[..., None].expand_as(patches)
    mean = own[..., None] * patches + torch.zeros_like(patches).scatter_add(1, wide, given[..., None] * patches)
    mean = torch.where(target[..., None], mean / total, patches)
    if mean_norm:
        norm = patches.norm(dim=-1, keepdim=True)
        length = own[..., None] * norm + torch.zeros_like(norm).scatter_add(
            1, partner[..., None], given[..., None] * norm
        )
        mean = mean * torch.where(target[..., None], length / total / mean.norm(dim=-1, keepdim=True), 1)
    return torch.cat([tokens.x[:, : tokens.prefix], mean], 1)


def _of_live(tokens: SoftTokens, evidence: Evidence, index: Tensor, exists: Tensor) -> Evidence:
    """What the recipe sees: the live tokens only."""
    heads, prefix = evidence.heads, tokens.prefix
    assert heads is not None and heads.bias is not None
    bias = heads.bias[:, 0, 0, prefix:].gather(1, index).masked_fill(~exists, float("-inf"))
    query, key, value = (with_prefix(side, index, prefix) for side in (heads.query, heads.key, heads.value))
    return replace(
        evidence,
        raw=with_prefix(tokens.x, index, prefix)[:, prefix:],
        size=torch.where(exists, tokens.size.gather(1, index), 0),
        count=exists.sum(1),
        heads=Heads(query, key, value, heads.scale, pad(bias, (prefix, 0))[:, None, None, :]),
        place=tokens.place.gather(1, index),
    )


def _chosen(links: Links, r: float) -> tuple[Tensor, Tensor]:
    """The best `r` links per image over the whole batch, and the weights of the marginal ones, whose sum is 1."""
    value = torch.where(links.source & links.value.isfinite(), links.value.double(), float("-inf")).flatten()
    number = int((value > float("-inf")).sum())
    wanted = min(round(r * len(links.value)), number)
    order = value.argsort(dim=0, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    sides = []
    for distance, share in ((wanted - 1 - rank, MERGED_MARGIN), (rank - wanted, UNMERGED_MARGIN)):
        side = torch.where((distance >= 0) & (rank < number), 1 - distance / max(share * number, 1), 0).clamp_min(0)
        sides.append(side / side.sum().clamp_min(TINY))
    margin = (sides[0] + sides[1]) / max(sum(float(side.sum()) for side in sides), TINY)
    return (rank < wanted).view_as(links.value), margin.view_as(links.value)


def slopes_and_returns(outcome: Tensor, steps: Sequence[Step], patches: int) -> tuple[Tensor, Tensor]:
    """Of the marginal links of each layer: the mean size of the gradient of `outcome`, and where they merge otherwise.

    `outcome` is a sum over the images.  The second result has in row `l` and column `k` the share of links that do not
    merge at layer `l`, but later at layer `k`.
    """
    depth = len(steps)
    found = torch.autograd.grad(outcome, [step.share for step in steps], allow_unused=True)
    slopes, returns = torch.zeros(depth, dtype=torch.float64), torch.zeros(depth, depth + 1, dtype=torch.float64)
    merged_at = torch.full((len(steps[0].share), patches + 1), depth)
    for layer in reversed(range(depth)):
        step, slope = steps[layer], found[layer]
        later = merged_at.gather(1, step.place)
        if slope is not None:
            slopes[layer] = (step.margin * slope.abs()).sum()
        returns[layer].scatter_add_(0, later.flatten(), torch.where(step.merged, 0, step.margin).flatten().double())
        now = torch.where(step.merged, layer, later)
        merged_at = merged_at.scatter(1, step.place, torch.where(step.place < patches, now, depth))
    return slopes, returns[:, :depth]
