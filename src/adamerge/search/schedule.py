"""Schedules: how the merges are spread over the layers, scaled until the whole costs what was asked for."""

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
from adamerge.flops import Meter
from adamerge.search.solve import Sense

# A layer's rate is -log of the share of tokens it keeps: rates add up over layers, and scaling them keeps their shape.
Rates = tuple[float, ...]
# At most every second token merges in a layer: the other side of a bipartite matching stays.
MOST = 0.5
# Beyond any share that can merge: the layer merges all it can.
ALL = 50.0
LIMIT = 2.0**16
HELP = 0.05
# The factor is found by cutting its range into pieces, again and again.
PIECES, ROUNDS = 32, 9


def shape(depth: int, first: int, slope: float = 0.0, last: float | None = None) -> Rates:
    """Nothing before layer `first`, then rates from 1 to 1 + `slope`; the last layer's is `last` if given."""
    span = max(depth - 1 - first, 1)
    rates = [0.0 if layer < first else max(1 + slope * (layer - first) / span, 0.0) for layer in range(depth)]
    if last is not None:
        rates[-1] = last
    return tuple(rates)


def merges(rates: Sequence[float], patches: int) -> tuple[float, ...]:
    """How many tokens each layer merges on average."""
    counts = _counts(torch.tensor([rates], dtype=torch.float64), patches)[0].tolist()
    return tuple(before - after for before, after in pairwise([float(patches), *counts]))


def expected(rates: Sequence[float], prices: Meter, recipe: Recipe, sense: Sense) -> float:
    """What an image costs that merges exactly what these rates say; on average images cost a little more."""
    return _costs(torch.tensor([rates], dtype=torch.float64), prices, recipe, sense).item()


def fit(rates: Sequence[float], goal: float, prices: Meter, recipe: Recipe, sense: Sense) -> Rates:
    """These rates times a common factor, so that the expected cost is `goal`; layers that merge all stay so."""

    def costs(factors: Tensor) -> Tensor:
        return _costs(_scaled(rates, factors), prices, recipe, sense)

    if costs(torch.zeros(1)).item() < goal:
        # What merges all saves more than was asked for: then it, too, merges only as much as it takes.
        rates = tuple(min(rate, math.log(2)) for rate in rates)
    if costs(torch.tensor([LIMIT])).item() > goal:
        # Not enough layers merge; the others help out, late and little.
        rates = tuple(max(rate, HELP * max(rates)) for rate in rates)
    least = costs(torch.tensor([LIMIT])).item()
    if least > goal:
        raise BadOption(
            f"{goal / 1e9:.4g} GMACs are asked for, but merging every second token at each layer still leaves "
            f"{least / 1e9:.4g}; ask for a smaller cut"
        )
    low, high = 0.0, LIMIT
    for _ in range(ROUNDS):
        factors = torch.linspace(low, high, PIECES + 1, dtype=torch.float64)
        enough = int((costs(factors) <= goal).int().argmax())
        low, high = factors[max(enough - 1, 0)].item(), factors[enough].item()
    return tuple(_scaled(rates, torch.tensor([high]))[0].tolist())


def scheduled(recipe: Recipe, rates: Sequence[float], patches: int) -> Recipe:
    """The recipe merging in each layer what its rate says: in every image, or on average by thresholds to be found."""
    r = tuple(round(r, 3) for r in merges(rates, patches))
    return replace(recipe, budget=Fixed(r) if isinstance(recipe.budget, Fixed) else Threshold(r))


def _scaled(rates: Sequence[float], factors: Tensor) -> Float[Tensor, "f l"]:
    """The rates times each factor."""
    plain = torch.tensor(rates, dtype=torch.float64)
    return torch.where(plain >= ALL, plain, (factors.double()[:, None] * plain).clamp_max(ALL / 2))


def _counts(rates: Float[Tensor, "f l"], patches: int) -> Float[Tensor, "f l"]:
    """The tokens left after each layer."""
    return patches * (1 + torch.expm1(-rates).clamp_min(-MOST)).cumprod(1)


def _costs(rates: Float[Tensor, "f l"], prices: Meter, recipe: Recipe, sense: Sense) -> Float[Tensor, " f"]:
    """What each row of rates costs.  Layers without a rate are not looked at."""
    whole = replace(recipe, budget=Threshold(tuple(rates.amax(0).tolist())))
    return getattr(prices.cost(_counts(rates, prices.patches), whole), sense)
