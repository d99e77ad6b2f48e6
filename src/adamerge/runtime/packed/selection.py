"""Which links of packed tokens merge, on a CPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from adamerge.core.budget import SMALLEST_STD, Fixed, Threshold, ZScore
from adamerge.core.checks import MOST_TOKENS
from adamerge.core.layer_numbers import calibrated
from adamerge.core.recipe import Recipe
from adamerge.core.types import PerImage
from adamerge.runtime.packed.links import PackedLinks
from adamerge.runtime.packed.split import ImageSplit


@dataclass(frozen=True)
class Selection:
    """`merged` are the links that merge, `(b, columns)`; `number` is how many of each image."""

    merged: Bool[Tensor, "b columns"]
    number: Sequence[int]


def select_links(links: PackedLinks, recipe: Recipe, layer: int) -> Selection:
    """The links that the recipe's budget merges."""
    budget, room = recipe.budget, [split.room for split in links.splits]
    if isinstance(budget, Threshold):
        merged = links.value.double() > budget.known(layer)
        merged &= source_mask(links)
        number = merged.sum(1).tolist()
        if all(map(int.__le__, number, room)):
            return Selection(merged, number)
    elif isinstance(budget, Fixed):
        number = [budget.at(layer)] * len(room)
    else:
        assert isinstance(budget, ZScore)
        number = [_by_z_score(budget, layer, mean) for mean in redundancy_of(links).double().tolist()]
    number = list(map(min, number, room))
    return Selection(_strongest(links, number), number)


def redundancy_of(links: PackedLinks) -> PerImage:
    """The mean value of each image's links."""
    number = torch.tensor([split.sources for split in links.splits]).clamp_min(1)
    return torch.where(source_mask(links), links.value, 0).sum(1) / number


def source_mask(links: PackedLinks) -> Bool[Tensor, "b columns"]:
    """Which columns are sources."""
    columns = torch.arange(links.value.shape[1])
    if _all_alike(links.splits):
        return (columns < links.splits[0].sources).expand(links.value.shape)
    return columns < torch.tensor([split.sources for split in links.splits])[:, None]


def _strongest(links: PackedLinks, number: Sequence[int]) -> Bool[Tensor, "b columns"]:
    """The strongest links of each image, `number` of them; ties go to the lower index."""
    lowest = torch.finfo(links.value.dtype).min
    # Sources rank before all other columns, even if their value is -inf.
    value = torch.where(source_mask(links), links.value.clamp_min(lowest), float("-inf"))
    most = max(number)
    best = value.sort(dim=1, descending=True, stable=True).indices[:, :most]
    within = torch.ones(1, dtype=torch.bool).expand(best.shape)
    if min(number) != most:
        within = torch.arange(most) < torch.tensor(number)[:, None]
    return torch.zeros(value.shape, dtype=torch.bool).scatter_(1, best, within)


def _by_z_score(budget: ZScore, layer: int, redundancy: float) -> int:
    """`r = floor(r_max * sigmoid(alpha * z / T))` in Python: torch rounds a sigmoid by its place in an array."""
    if not math.isfinite(redundancy):
        return 0
    stats = calibrated(budget.stats, layer)
    z = (redundancy - stats.mean[layer]) / max(stats.std[layer], SMALLEST_STD)
    steepness = budget.alpha * z / budget.temperature
    # Beyond this the sigmoid is 0 or 1, and the exponential would overflow.
    share = 1 / (1 + math.exp(-max(min(steepness, 700.0), -700.0)))
    return min(math.floor(budget.most(layer) * share), MOST_TOKENS)


def _all_alike(splits: Sequence[ImageSplit]) -> bool:
    return all(split.n == splits[0].n for split in splits)
