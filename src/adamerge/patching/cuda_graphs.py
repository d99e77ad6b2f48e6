"""CUDA graphs: a whole forward pass launched at once, for batches so small that launching takes longest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadImages, BadOption
from adamerge.patching.stack import Stack
from adamerge.runtime.triton.graph_keepalive import collect_used

# Calls on a side stream before a CUDA graph is captured, so that whatever sets itself up lazily has done so.
WARM_UP_CALLS = 3


def capture(model: Callable[[Tensor], Any], images: Tensor) -> Callable[[Tensor], Any]:
    """`model` as a CUDA graph for batches shaped like `images`, merged or not, adaptive counts included.

    The result is called like the model, with the weights and the recipe that it has now; it copies the images to where
    the graph looks for them, and what it returns is overwritten by the next call.
    """
    if not images.is_cuda:
        raise BadImages(f"CUDA graphs need images on a CUDA device; these are on {images.device}")
    with torch.inference_mode():
        check_backend(model, images)
    seat = images.clone()
    here, aside = torch.cuda.current_stream(images.device), torch.cuda.Stream(images.device)
    aside.wait_stream(here)
    with torch.inference_mode(), torch.cuda.stream(aside):
        for _ in range(WARM_UP_CALLS):
            model(seat)
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph), collect_used() as used:
        out = model(seat)
    return _Replay(graph, seat, out, [model, *used])


def check_backend(model: Callable[[Tensor], Any], images: Tensor) -> None:
    """Refuse counts that the host would have to wait for: in a graph nobody waits."""
    stacks = [part for part in model.modules() if isinstance(part, Stack)] if isinstance(model, nn.Module) else []
    for stack in stacks:
        reason = stack.selector.why_reference(images, stack.training) if stack.recipe.ragged else None
        if reason is not None:
            raise BadOption(
                f"a CUDA graph of a recipe whose counts adapt to the image needs the kernels, but {reason}. Apply the "
                "recipe with runtime='auto' to a model in evaluation mode, or take one with fixed counts."
            )


@dataclass(frozen=True)
class _Replay:
    """A captured graph with all that it reads: weights, and what a runtime set up for batches of this shape."""

    graph: torch.cuda.CUDAGraph
    seat: Tensor
    out: Any
    read: Sequence[Any]

    def __call__(self, images: Tensor) -> Any:
        seat = self.seat
        if images.shape != seat.shape or images.dtype != seat.dtype:
            raise BadImages(
                f"this graph was captured for images {tuple(seat.shape)} of {seat.dtype}; got {tuple(images.shape)} "
                f"of {images.dtype}. Capture another for these."
            )
        seat.copy_(images)
        self.graph.replay()
        return self.out
