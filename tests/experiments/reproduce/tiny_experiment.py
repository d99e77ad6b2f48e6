"""An experiment small enough for seconds, and hand-made outcomes to judge."""

from typing import Any

import torch
from hosts.families import build, pictures
from torch import Tensor

from adamerge.experiments.bootstrap import Interval
from adamerge.experiments.reproduce import Experiment
from adamerge.experiments.reproduce.outcome import Outcome

IMAGES, CALIBRATION = 8, 10


def tiny(**options: Any) -> Experiment:
    """Three random blocks over 16 patches, 8 images in uneven batches."""
    images = pictures(IMAGES + CALIBRATION)
    labels = torch.arange(IMAGES) % 10
    data = list(zip(images[:IMAGES].split(5), labels.split(5), strict=True))
    names = {"model": "tiny", "data": "8 random images", "calibration": "10 random images"}
    return Experiment(build("vit"), data, images[IMAGES:], names, progress=False, **options)


def interval(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high)


def outcome(top1: Tensor, r: Tensor | None = None) -> Outcome:
    """An outcome of which only the answers, and maybe the merges, matter."""
    n = len(top1)
    merges = torch.zeros(n, 12, dtype=torch.long) if r is None else r
    zero = torch.zeros(n, dtype=torch.float64)
    return Outcome(top1.bool(), zero, merges, zero + 1e9, zero + 1e9, 1.0, n)
