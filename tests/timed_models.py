"""A model whose answers and times are known: hand-made logits, and a clock that only its forward pass moves."""

import torch
from hosts.families import build
from torch import Tensor

from adamerge.patching.stack import Stack

# Seconds for each image.
UNMERGED, MERGED = 0.5, 0.125


class Clock:
    """Replaces the clock of `adamerge.timing`.  `slowness` is the factor of the next batch of either model."""

    def __init__(self, monkeypatch):
        self.now, self.slowness = 100.0, 1.0
        monkeypatch.setattr("adamerge.timing.time", self)

    def perf_counter(self) -> float:
        return self.now


class TimedModel:
    """A tiny model that answers with the rows of `full`, and when it merges with those of `merged`.

    Image `i` of `images` gets row `i`.  Merged forward passes come after unmerged ones, and after both the slowness of
    the clock is over.
    """

    def __init__(self, full: Tensor, merged: Tensor, clock: Clock):
        self.full, self.merged, self.clock = full, merged, clock
        self.model = build("vit", num_classes=full.shape[1])
        self.images = torch.randn(len(full), 3, 64, 64, generator=torch.Generator().manual_seed(0))
        # The first pixel tells which image it is.
        self.images[:, 0, 0, 0] = torch.arange(len(full))
        self.model.register_forward_hook(self._answer)

    def _answer(self, model: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        which = args[0][:, 0, 0, 0].round().long()
        merging = isinstance(self.model.blocks, Stack)
        self.clock.now += len(which) * (MERGED if merging else UNMERGED) * self.clock.slowness
        if merging:
            self.clock.slowness = 1.0
        return (self.merged if merging else self.full)[which].to(output)
