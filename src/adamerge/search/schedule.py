"""Schedules: merge rates per layer, and the common factor by which they meet a cost."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.budget import Fixed, Threshold
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.flops import CostCount, Meter

# One rate per layer: minus the logarithm of the share of tokens that the layer keeps.  Rates of layers add up, and
# multiplying all of them by one factor keeps the shape of the schedule.
Rates = tuple[float, ...]
# A bipartite matching merges at most every second token of a layer.
MAX_MERGED_SHARE = 0.5
# The rate of a layer that merges all it can; larger than any rate that matters.
MERGE_ALL = 50.0
MAX_FACTOR = 2.0**16
# The rate that idle layers get, as a share of the largest, where the other layers alone cannot meet the cost.
IDLE_LAYER_SHARE = 0.05
# The factor is searched on a grid of this many intervals; each round searches the interval that the last one found.
GRID_INTERVALS, GRID_ROUNDS = 32, 9


def linear_rates(depth: int, first: int, slope: float = 0.0, last: float | None = None) -> Rates:
    """No merges before layer `first`, then rates from 1 to 1 + `slope`; `last` replaces the last layer's rate."""
    span = max(depth - 1 - first, 1)
    rates = [0.0 if layer < first else max(1 + slope * (layer - first) / span, 0.0) for layer in range(depth)]
    if last is not None:
        rates[-1] = last
    return tuple(rates)


def at_every(rates: Sequence[float], every: int) -> Rates:
    """The rates of every `every`-th layer, counted from the first one that merges, and of the last; 0 at the others."""
    first = next((layer for layer, rate in enumerate(rates) if rate > 0), 0)
    kept = {*range(first, len(rates), every), len(rates) - 1}
    return tuple(rate if layer in kept else 0.0 for layer, rate in enumerate(rates))


def merged_per_layer(rates: Sequence[float], patches: int) -> tuple[float, ...]:
    """How many of `patches` tokens each layer merges on average."""
    counts = _counts(torch.tensor([rates], dtype=torch.float64), patches)[0].tolist()
    return tuple(before - after for before, after in pairwise([float(patches), *counts]))


def expected_macs(rates: Sequence[float], prices: Meter, recipe: Recipe, cost: CostCount) -> float:
    """The cost of an image that merges exactly as many tokens as the rates say.

    The mean over real images is a little higher, because costs grow faster than token counts.
    """
    return _costs(torch.tensor([rates], dtype=torch.float64), prices, recipe, cost).item()


def scale_rates(rates: Sequence[float], goal: float, prices: Meter, recipe: Recipe, cost: CostCount) -> Rates:
    """The rates times the factor at which the expected cost is `goal`; layers at MERGE_ALL stay there."""

    def costs(factors: Tensor) -> Tensor:
        return _costs(_scaled(rates, factors), prices, recipe, cost)

    if costs(torch.zeros(1)).item() < goal:
        # The layers at MERGE_ALL alone save more than was asked for: they get a rate that can be scaled, too.
        rates = tuple(min(rate, math.log(2)) for rate in rates)
    if costs(torch.tensor([MAX_FACTOR])).item() > goal:
        # Too few layers merge: idle layers get a small rate, which becomes noticeable only at large factors.
        rates = tuple(max(rate, IDLE_LAYER_SHARE * max(rates)) for rate in rates)
    least = costs(torch.tensor([MAX_FACTOR])).item()
    if least > goal:
        raise BadOption(
            f"{goal / 1e9:.4g} GMACs are asked for, but merging every second token at each layer still leaves "
            f"{least / 1e9:.4g}; ask for a smaller cut"
        )
    low, high = 0.0, MAX_FACTOR
    for _ in range(GRID_ROUNDS):
        factors = torch.linspace(low, high, GRID_INTERVALS + 1, dtype=torch.float64)
        enough = int((costs(factors) <= goal).int().argmax())
        low, high = factors[max(enough - 1, 0)].item(), factors[enough].item()
    return tuple(_scaled(rates, torch.tensor([high]))[0].tolist())


def with_rates(recipe: Recipe, rates: Sequence[float], patches: int) -> Recipe:
    """The recipe with the budget that the rates give on `patches` tokens.

    A fixed budget merges the same number in every image; else thresholds, still to be calibrated, merge it on average.
    """
    r = tuple(round(r, 3) for r in merged_per_layer(rates, patches))
    return replace(recipe, budget=Fixed(r) if recipe.adaptive is None else Threshold(r))


def _scaled(rates: Sequence[float], factors: Tensor) -> Float[Tensor, "f l"]:
    """The rates times each factor."""
    plain = torch.tensor(rates, dtype=torch.float64)
    return torch.where(plain >= MERGE_ALL, plain, (factors.double()[:, None] * plain).clamp_max(MERGE_ALL / 2))


def _counts(rates: Float[Tensor, "f l"], patches: int) -> Float[Tensor, "f l"]:
    """The tokens left after each layer."""
    return patches * (1 + torch.expm1(-rates).clamp_min(-MAX_MERGED_SHARE)).cumprod(1)


def _costs(rates: Float[Tensor, "f l"], prices: Meter, recipe: Recipe, cost: CostCount) -> Float[Tensor, " f"]:
    """The cost of each row of rates.  A layer whose rate is 0 in all rows has no cost of a decision."""
    largest = replace(recipe, budget=Threshold(tuple(rates.amax(0).tolist())))
    return getattr(prices.cost(_counts(rates, prices.patches), largest), cost)
