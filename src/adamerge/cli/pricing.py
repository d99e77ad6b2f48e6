"""The output of `adamerge flops`: costs without a data set."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from adamerge.cli.chosen_method import Choice, make_calibrated
from adamerge.core.budget import Fixed, Threshold, ZScore
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.data.image_tensors import drawn_images
from adamerge.embedded.scene_generator import CALIBRATION_SEED
from adamerge.flops import Cost, Meter, cost, meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, trace

# A preset is made on this many generated images.
PRESET_IMAGES = 16


def price(name: str, model: nn.Module, choice: Choice) -> Iterator[str]:
    """Lines of text with both counts of cost, unmerged and with a method, for an image of average redundancy."""
    recipe = make_calibrated(choice, model, partial(_drawn, model), given=False)
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


def _drawn(model: nn.Module) -> list[Tensor]:
    return [drawn_images(model, PRESET_IMAGES, seed=CALIBRATION_SEED)]


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
