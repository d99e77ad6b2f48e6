"""Schedules: how the merges are spread over the layers, scaled until the whole costs what was asked for."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from adamerge.core.budget import Threshold
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.flops import Meter
from adamerge.solve import Sense

# A layer's rate is -log of the share of tokens it keeps: rates add up over layers, and scaling them keeps their shape.
Rates = tuple[float, ...]
# At most every second token merges in a layer: the other side of a bipartite matching stays.
MOST = 0.5
# Beyond any share that can merge: the layer merges all it can.
ALL = 50.0
LIMIT = 2.0**16
HELP = 0.05
STEPS = 80


def shape(depth: int, first: int, slope: float = 0.0, last: float | None = None) -> Rates:
    """Nothing before layer `first`, then rates from 1 to 1 + `slope`; the last layer's is `last` if given."""
    span = max(depth - 1 - first, 1)
    rates = [0.0 if layer < first else max(1 + slope * (layer - first) / span, 0.0) for layer in range(depth)]
    if last is not None:
        rates[-1] = last
    return tuple(rates)


def merges(rates: Sequence[float], patches: int) -> tuple[float, ...]:
    """How many tokens each layer merges on average."""
    left, found = float(patches), []
    for rate in rates:
        found.append(min(-math.expm1(-rate), MOST) * left)
        left -= found[-1]
    return tuple(found)


def expected(rates: Sequence[float], prices: Meter, recipe: Recipe, sense: Sense) -> float:
    """What an image costs that merges exactly what these rates say; on average images cost a little more."""
    left, counts = float(prices.patches), []
    for r in merges(rates, prices.patches):
        left -= r
        counts.append(left)
    return getattr(prices.cost(torch.tensor([counts], dtype=torch.float64), recipe), sense).item()


def fit(rates: Sequence[float], goal: float, prices: Meter, recipe: Recipe, sense: Sense) -> Rates:
    """These rates times a common factor, so that the expected cost is `goal`; layers that merge all stay so."""
    if _scaled_cost(rates, 0.0, prices, recipe, sense) < goal:
        # What merges all saves more than was asked for: then it, too, merges only as much as it takes.
        rates = tuple(min(rate, math.log(2)) for rate in rates)
    if _scaled_cost(rates, LIMIT, prices, recipe, sense) > goal:
        # Not enough layers merge; the others help out, late and little.
        rates = tuple(max(rate, HELP * max(rates)) for rate in rates)
    low, high = 0.0, LIMIT
    if _scaled_cost(rates, high, prices, recipe, sense) > goal:
        least = _scaled_cost(rates, high, prices, recipe, sense)
        raise BadOption(
            f"{goal / 1e9:.4g} GMACs are asked for, but merging every second token at each layer still leaves "
            f"{least / 1e9:.4g}; ask for a smaller cut"
        )
    for _ in range(STEPS):
        middle = (low + high) / 2
        if _scaled_cost(rates, middle, prices, recipe, sense) > goal:
            low = middle
        else:
            high = middle
    return _scaled(rates, high)


def scheduled(recipe: Recipe, rates: Sequence[float], patches: int) -> Recipe:
    """The recipe with thresholds to be found such that each layer merges what its rate says."""
    return replace(recipe, budget=Threshold(tuple(round(r, 3) for r in merges(rates, patches))))


def _scaled(rates: Sequence[float], factor: float) -> Rates:
    return tuple(rate if rate >= ALL else min(factor * rate, ALL / 2) for rate in rates)


def _scaled_cost(rates: Sequence[float], factor: float, prices: Meter, recipe: Recipe, sense: Sense) -> float:
    return expected(_scaled(rates, factor), prices, recipe, sense)
