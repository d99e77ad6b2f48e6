"""Which links of packed tokens merge, on a CPU.  In NumPy: these arrays are so small that the calls take the time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from adamerge.core.budget import SMALLEST_STD, Fixed, Threshold, ZScore
from adamerge.core.checks import MOST_TOKENS
from adamerge.core.layer_numbers import calibrated
from adamerge.core.recipe import Recipe
from adamerge.core.types import PerImage
from adamerge.runtime.packed.links import PackedLinks


@dataclass(frozen=True)
class Selection:
    """The links that merge, by image and then by source; `number` is how many of each image."""

    image: np.ndarray
    source: np.ndarray
    number: Sequence[int]


def select_links(links: PackedLinks, recipe: Recipe, layer: int) -> Selection:
    """The links that the recipe's budget merges."""
    budget, room = recipe.budget, [split.room for split in links.splits]
    value = links.value.numpy()
    if isinstance(budget, Threshold):
        image, source = ((value.astype(np.float64) > budget.known(layer)) & source_mask(links)).nonzero()
        number = np.bincount(image, minlength=len(value)).tolist()
        if all(map(int.__le__, number, room)):
            return Selection(image, source, number)
    elif isinstance(budget, Fixed):
        number = [budget.at(layer)] * len(room)
    else:
        assert isinstance(budget, ZScore)
        number = [_by_z_score(budget, layer, mean) for mean in redundancy_of(links).double().tolist()]
    number = list(map(min, number, room))
    return _strongest(links, number)


def redundancy_of(links: PackedLinks) -> PerImage:
    """The mean value of each image's links."""
    value = np.where(source_mask(links), links.value.numpy(), 0)
    number = np.array([max(split.sources, 1) for split in links.splits], dtype=value.dtype)
    return torch.from_numpy(value.sum(1) / number)


def source_mask(links: PackedLinks) -> np.ndarray:
    """Which columns are sources, `(b, columns)`."""
    sources = np.array([split.sources for split in links.splits])
    return np.arange(links.value.shape[1]) < sources[:, None]


def _strongest(links: PackedLinks, number: Sequence[int]) -> Selection:
    """The strongest links of each image, `number` of them; ties go to the lower index, and NaN comes first."""
    most, value, first = max(number), links.value.numpy(), links.splits[0]
    # Sorted upwards.
    if all(split.n == first.n for split in links.splits):
        rank = -value[:, : first.sources]
    else:
        # Sources rank before all other columns, even if their value is -inf.
        rank = np.where(source_mask(links), -np.maximum(value, np.finfo(value.dtype).min), np.inf)
    missing = np.isnan(rank)
    if missing.any():
        rank[missing] = -np.inf
    best = rank.argsort(axis=1, kind="stable")[:, :most]
    if min(number) == most:
        best.sort(axis=1)
        return Selection(np.arange(len(best)).repeat(most), best.ravel(), number)
    merged = np.zeros(rank.shape, dtype=bool)
    np.put_along_axis(merged, best, np.arange(most) < np.array(number)[:, None], axis=1)
    image, source = merged.nonzero()
    return Selection(image, source, number)


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
