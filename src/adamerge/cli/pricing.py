"""The output of `adamerge flops`: costs without weights and without a data set."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from adamerge.cli.loading import load_model
from adamerge.core.budget import Fixed, Threshold, ZScore
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.flops import Cost, Meter, cost, meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, trace


def price(name: str, recipe: Recipe) -> Iterator[str]:
    """Lines of text with both counts of cost, unmerged and with `recipe`, for an image of average redundancy."""
    model = load_model(name, None, False, "cpu", "fp32", random=True)
    prices, image = meter(model), find_host(model).image
    full = prices.unmerged()
    yield f"{name}: {prices.patches} patch tokens + {prices.prefix} prefix, {len(prices.blocks)} blocks"
    yield _line("unmerged", full, full)
    if isinstance(recipe.budget, Threshold):
        counts = _average(recipe.budget, prices)
        price = prices.cost(counts, recipe)
    else:
        apply(model, _typical(recipe))
        with torch.inference_mode():
            model(torch.randn(1, *image, generator=torch.Generator().manual_seed(0)))
        counts, price = trace(model).counts, cost(model)
    yield _line("merged", price, full)
    yield f"tokens left after each layer's merge: {' '.join(f'{n:.4g}' for n in counts[0].tolist())}"


def _average(budget: Threshold, prices: Meter) -> Tensor:
    """The token counts (1, layers) of an image that merges at each layer the calibrated mean number of tokens."""
    left, counts = float(prices.patches), []
    for layer in range(len(prices.blocks)):
        left -= min(budget.wanted(layer), left // 2)
        counts.append(left)
    return torch.tensor([counts], dtype=torch.float64)


def _typical(recipe: Recipe) -> Recipe:
    """The recipe with a fixed budget: a z-score of 0, that of an average image, merges half of the maximum."""
    if isinstance(recipe.budget, ZScore):
        most = recipe.budget.r_max
        half = tuple(number // 2 for number in most) if isinstance(most, tuple) else most // 2
        return replace(recipe, budget=Fixed(half))
    if recipe.ragged:
        raise BadOption("what this method costs depends on the images; measure it with `adamerge eval --data …`")
    return recipe


def _line(label: str, price: Cost, full: Cost) -> str:
    paper, true = price.paper.item(), price.true.item()
    changes = f"({paper / full.paper.item() - 1:+.1%} / {true / full.true.item() - 1:+.1%})"
    text = f"{label:>9}: {paper / 1e9:.3f} GMACs in the paper's count, {true / 1e9:.3f} true"
    return text if price is full else f"{text} {changes}"
