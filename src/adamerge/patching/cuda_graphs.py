"""CUDA graphs: a whole forward pass launched at once, for batches so small that launching takes longest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadImages, BadOption
from adamerge.patching.stack import Stack
from adamerge.runtime.triton.graph_cache import CALLS_BEFORE_CAPTURE, without_cached_graphs
from adamerge.runtime.triton.graph_capture import CapturedGraph, capture_graph

# Calls on a side stream before a CUDA graph is captured, so that whatever sets itself up lazily has done so.
WARM_UP_CALLS = 3


def capture(model: Callable[[Tensor], Any], images: Tensor) -> Callable[[Tensor], Any]:
    """`model` as a CUDA graph for batches shaped like `images`, merged or not, adaptive counts included.

    The result is called like the model, with the weights and the recipe that it has now; it copies the images to where
    the graph looks for them, and what it returns is overwritten by the next call.
    """
    if not images.is_cuda:
        raise BadImages(f"CUDA graphs need images on a CUDA device; these are on {images.device}")
    with torch.inference_mode(), without_cached_graphs():
        check_backend(model, images)
        return _Replay(model, capture_graph(model, images, warm_up_calls=WARM_UP_CALLS))


def warmup(model: nn.Module, *shapes: Sequence[int]) -> None:
    """Compile the kernels and capture the CUDA graphs of a merged model before the first batch comes.

    Args:
        model: a model on a CUDA device, in evaluation mode.  Elsewhere there is nothing to warm up.
        shapes: shapes of batches, such as `(32, 3, 224, 224)`.  Four graphs are kept: with more shapes the last four
            have graphs, and the others have their kernels.
    """
    parameter = next(model.parameters())
    if parameter.device.type != "cuda":
        return
    for shape in shapes:
        images = torch.zeros(tuple(shape), device=parameter.device, dtype=parameter.dtype)
        with torch.inference_mode():
            for _ in range(CALLS_BEFORE_CAPTURE + 1):
                model(images)


def check_backend(model: Callable[[Tensor], Any], images: Tensor) -> None:
    """Refuse adaptive counts without the kernels: they are read back from the device, which a graph cannot do."""
    stacks = [part for part in model.modules() if isinstance(part, Stack)] if isinstance(model, nn.Module) else []
    for stack in stacks:
        if not stack.recipe.ragged:
            continue
        hooks = stack.find_hooks()
        reason = stack.selector.why_reference(images, stack.training) or (hooks and hooks.reason)
        if reason is not None:
            raise BadOption(
                f"a CUDA graph of a recipe whose counts adapt to the image needs the kernels, but {reason}. Apply the "
                "recipe with runtime='auto' to a model in evaluation mode, or take one with fixed counts."
            )


@dataclass(frozen=True)
class _Replay:
    """A model's graph, called like the model.  The graph reads the model's weights: both live equally long."""

    model: Callable[[Tensor], Any]
    captured: CapturedGraph

    def __call__(self, images: Tensor) -> Any:
        (static,) = self.captured.inputs
        if images.shape != static.shape or images.dtype != static.dtype:
            raise BadImages(
                f"this graph was captured for images {tuple(static.shape)} of {static.dtype}; got "
                f"{tuple(images.shape)} of {images.dtype}. Capture another for these."
            )
        static.copy_(images)
        self.captured.graph.replay()
        return self.captured.output
