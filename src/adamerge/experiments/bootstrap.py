"""Bootstrap intervals of means over images."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.errors import BadOption

RESAMPLES = 10_000
# The middle 95 % of the resampled means.
LOW, HIGH = 0.025, 0.975
# Random numbers per chunk; limits the memory.
CHUNK = 2**22


@dataclass(frozen=True)
class Interval:
    """A mean and the 95 % interval around it."""

    mean: float
    low: float
    high: float


def paired(a: Float[Tensor, " n"], b: Float[Tensor, " n"], *, seed: int = 0) -> Interval:
    """The mean of `a - b` over the images with its interval; a resample takes both numbers of each drawn image."""
    if a.shape != b.shape:
        raise BadOption(f"paired needs the same images on both sides; got {len(a)} and {len(b)}")
    return intervals((a.double() - b.double())[:, None], seed=seed)[0]


def intervals(values: Float[Tensor, "n k"], *, seed: int = 0) -> list[Interval]:
    """The mean of each column of `values` (images, columns) with its interval.

    All columns use the same resamples, which depend only on the number of images and the seed.  So the interval of a
    column does not depend on the other columns.
    """
    if len(values) == 0:
        raise BadOption("an interval needs at least one image; got none")
    values = values.detach().double().cpu()
    resampled = _means(values, seed)
    ends = torch.tensor([LOW, HIGH], dtype=torch.float64)
    found: list[Interval] = []
    for column, drawn in zip(values.T, resampled.T, strict=True):
        low, high = drawn.quantile(ends).tolist()
        found.append(Interval(column.mean().item(), low, high))
    return found


def _means(values: Float[Tensor, "n k"], seed: int) -> Float[Tensor, "r k"]:
    """The means of every resample: the matrix of how often each image was drawn, times the values."""
    n = len(values)
    dice = torch.Generator().manual_seed(seed)
    step = max(1, CHUNK // n)
    parts: list[Tensor] = []
    for first in range(0, RESAMPLES, step):
        drawn = torch.randint(n, (min(step, RESAMPLES - first), n), generator=dice)
        times = torch.zeros(drawn.shape, dtype=torch.float64)
        times.scatter_add_(1, drawn, torch.ones((), dtype=torch.float64).expand(drawn.shape))
        parts.append(times @ values / n)
    return torch.cat(parts)
