"""A clock that only contenders move, and a benchmark by it."""

from pathlib import Path
from typing import Any

import torch
from hosts.families import pictures
from PIL import Image
from torch import nn

from adamerge.experiments.benchmark import (
    BenchmarkRow,
    Way,
    bench,
)
from adamerge.methods import tome


class Clock:
    """A clock that moves only when a contender runs, and logs which contender ran on which images."""

    def __init__(self):
        self.now = 0.0
        self.log: list[tuple[str, float]] = []

    def perf_counter(self) -> float:
        return self.now

    def way(self, name: str, milliseconds: float, **options: Any) -> Way:
        """A way to run a model that takes this long."""

        def make(model: nn.Module, images: torch.Tensor):
            def run(images: torch.Tensor) -> torch.Tensor:
                self.now += milliseconds / 1e3
                self.log.append((name, images.sum().item()))
                return model(images)

            return run

        return Way(make, **options)


def run(model: nn.Module, recipes: Any = None, **options: Any) -> list[BenchmarkRow]:
    settings: dict[str, Any] = dict(
        batch_sizes=[2], rounds=4, inner=1, merged=["reference"], progress=False, name="tiny"
    )
    return bench(model, pictures(6), {"tome": tome(3)} if recipes is None else recipes, **{**settings, **options})


def save_images(root: Path, number: int) -> Path:
    for index in range(number):
        home = root / f"class{index % 3}"
        home.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (90, 80), (20 * index, 100, 50)).save(home / f"{index}.png")
    return root
