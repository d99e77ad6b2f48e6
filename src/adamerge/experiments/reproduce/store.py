"""Results that survive an interruption: one file for each thing that was measured, named after its settings."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adamerge.core.errors import BadStats
from adamerge.core.stats import LayerStats


@dataclass(frozen=True)
class Outcome:
    """What a recipe did, image by image: right or wrong, distance from the unmerged model, merges, costs; its time."""

    top1: Bool[Tensor, " n"]
    kl: Float[Tensor, " n"]
    r: Int[Tensor, "n l"]
    paper: Float[Tensor, " n"]
    true: Float[Tensor, " n"]
    seconds: float
    timed: int

    @property
    def points(self) -> Float[Tensor, " n"]:
        """Top-1 of each image in points: 100 where it is right, else 0."""
        return 100.0 * self.top1.double()

    @property
    def merged(self) -> Float[Tensor, " n"]:
        """Tokens merged in each image over all layers."""
        return self.r.sum(1).double()

    @property
    def gmacs(self) -> float:
        """The mean cost in the paper's count, in 10^9 multiply-accumulates."""
        return self.paper.mean().item() / 1e9

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.timed / self.seconds


FIELDS = ("top1", "kl", "r", "paper", "true")


class Store:
    """A folder of results, each under the key of all settings that shaped it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def outcome(self, key: str) -> Outcome | None:
        """The kept outcome, or none."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / f"outcome-{key}.safetensors"
        try:
            with safe_open(path, "pt") as file:
                kept = {name: file.get_tensor(name) for name in FIELDS}
                said = file.metadata()
            return Outcome(
                kept["top1"].bool(),
                kept["kl"],
                kept["r"].long(),
                kept["paper"],
                kept["true"],
                float(said["seconds"]),
                int(said["timed"]),
            )
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            # Missing or damaged is the same here: it is measured again.
            return None

    def keep_outcome(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome; whole or not at all."""
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"outcome-{key}.safetensors"
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        tensors = {"top1": outcome.top1.to(torch.uint8), "kl": outcome.kl, "r": outcome.r.to(torch.int32)}
        tensors |= {"paper": outcome.paper, "true": outcome.true}
        said = {"seconds": repr(outcome.seconds), "timed": str(outcome.timed)}
        try:
            save_file({name: t.contiguous().clone() for name, t in tensors.items()}, partial, said)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def stats(self, key: str) -> LayerStats | None:
        """The kept statistics, or none."""
        try:
            return LayerStats.load(self.folder / f"stats-{key}.json")
        except BadStats:
            return None

    def keep_stats(self, key: str, stats: LayerStats) -> None:
        """Keep statistics."""
        stats.save(self.folder / f"stats-{key}.json")


def key_of(settings: Any) -> str:
    """A short name for JSON data, different for different data."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
