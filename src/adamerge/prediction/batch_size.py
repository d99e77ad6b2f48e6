"""How many images make a batch of a given number of tokens."""

from torch import nn

from adamerge.core.budget import Threshold, ZScore
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.flops import meter
from adamerge.hosts.base import find_host


def images_in_batch(model: nn.Module, recipe: Recipe | None, tokens: int) -> int:
    """The number of images whose tokens, averaged over the blocks, are about `tokens`; at least 1.

    A merged image has fewer tokens in later blocks, so that more images fit.  The number depends on the model and the
    recipe only, not on the images: batches are then the same in every run.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise BadOption(f"batch_tokens is the number of tokens in a batch, at least 1; got {tokens!r}")
    prices = meter(model)
    counts = expected_counts(recipe, find_host(model).depth, prices.patches)
    return max(1, int(tokens / (prices.prefix + sum(counts) / len(counts))))


def expected_counts(recipe: Recipe | None, depth: int, patches: int) -> list[float]:
    """The patch tokens of an average image after the merge of each block, as far as the recipe says it."""
    left, counts = float(patches), []
    for layer in range(depth):
        if recipe is not None and recipe.may_merge(layer, depth):
            left -= min(_expected_merges(recipe, layer, depth, left), left // 2)
        counts.append(left)
    return counts


def _expected_merges(recipe: Recipe, layer: int, depth: int, left: float) -> float:
    budget = recipe.budget
    if isinstance(budget, Threshold):
        return budget.wanted(layer)
    if isinstance(budget, ZScore):
        return budget.most(layer) / 2
    return budget.fixed_count(layer, depth, int(left)) or 0
