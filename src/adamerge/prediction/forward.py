"""Runs batches of pixels through the model; on CUDA without waiting for the device."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.data.folders import normalise
from adamerge.flops import meter
from adamerge.hosts.base import find_host
from adamerge.patching.stack import installed
from adamerge.prediction.reader import Chunk, Transform
from adamerge.prediction.report import Clock
from adamerge.prediction.tasks import Task

# Tokens in a batch, averaged over the blocks.
BATCH_TOKENS = {"cpu": 8192}
BATCH_TOKENS_ELSEWHERE = 65536


@dataclass(frozen=True)
class InFlight:
    """A batch that was started: its results arrive in memory when `done` has happened."""

    chunk: Chunk
    results: dict[str, Tensor]
    begun: Any = None
    done: Any = None

    def finish(self, clock: Clock) -> dict[str, Tensor]:
        """The results, on the CPU."""
        if self.done is not None:
            self.done.synchronize()
            clock.computed += self.begun.elapsed_time(self.done) / 1000
        return self.results


class Forward:
    """A model with a task: makes columns of a batch of pixels."""

    def __init__(self, model: nn.Module, task: Task):
        parameter = next(model.parameters())
        self.model, self.device, self.dtype = model, parameter.device, parameter.dtype
        self.host = find_host(model)
        self.transform = Transform(model)
        self.columns = task.function(model)

    def example(self) -> tuple[Chunk, dict[str, Tensor]]:
        """A batch of one blank image with its results: shows the columns, and whether the task fits the model."""
        chunk = Chunk(0, ("",), ("",), torch.zeros(1, *self.host.image, dtype=torch.uint8))
        clock = Clock(self.device)
        return chunk, self.start(chunk, clock).finish(clock)

    def start(self, chunk: Chunk, clock: Clock) -> InFlight:
        """Start a batch."""
        if chunk.pixels is None:
            return InFlight(chunk, {})
        if self.device.type != "cuda":
            with clock.computing():
                return InFlight(chunk, self._run(chunk.pixels))
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        pixels = chunk.pixels.to(self.device, non_blocking=True)
        begun.record()
        results = {name: values.to("cpu", non_blocking=True) for name, values in self._run(pixels).items()}
        done.record()
        return InFlight(chunk, results, begun, done)

    def _run(self, pixels: Tensor) -> dict[str, Tensor]:
        """The columns of a batch on the device, and the patch tokens that each image kept."""
        # As torchvision's ToTensor and Normalize compute it, so that `adamerge eval` sees the same numbers.
        images = normalise(self.model, pixels.to(self.device).float().div(255))
        columns = self.columns(images.to(self.dtype))
        stack = installed(self.host)
        kept = None if stack is None else stack.tokens_left
        tokens = torch.full((len(pixels),), self.patches) if kept is None else kept
        return {**columns, "tokens": tokens.int()}

    @cached_property
    def patches(self) -> int:
        """The patch tokens of an image without merging."""
        return meter(self.model).patches


def default_batch_tokens(device: torch.device) -> int:
    """How many tokens a batch has on average over the blocks."""
    return BATCH_TOKENS.get(device.type, BATCH_TOKENS_ELSEWHERE)
