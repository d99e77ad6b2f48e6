"""Capturing a CUDA graph in a process that goes on using the device."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from adamerge.runtime.autocast import without_cached_casts
from adamerge.runtime.triton.graph_keepalive import collect_used
from adamerge.runtime.triton.side_stream import stream_for_capture

# One capture at a time in a process: captures share the allocator and the list of collected objects.
_CAPTURE = threading.Lock()


@runtime_checkable
class Replayable(Protocol):
    """What is used of a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph that reads `inputs` and writes `output`, which the next replay overwrites.

    `keepalive` holds the other objects whose memory the graph reads.
    """

    graph: Replayable
    inputs: tuple[Tensor, ...]
    output: Any
    keepalive: Sequence[Any]


def capture_graph(
    run: Callable[..., Any], *examples: Tensor, pool: Any = None, warm_up_calls: int = 0
) -> CapturedGraph:
    """`run(*inputs)` as a CUDA graph, for tensors shaped like `examples`.

    Args:
        run: launches work on the current stream and never synchronises with the device.
        examples: inputs on one CUDA device.
        pool: the memory pool of earlier graphs, from `torch.cuda.graph_pool_handle`, for graphs that never run at the
            same time.
        warm_up_calls: calls on a side stream before the capture, for whatever initialises itself at its first call.
    """
    device = examples[0].device
    with _CAPTURE, torch.cuda.device(device), _no_garbage_collection(), without_cached_casts(device):
        current, side = torch.cuda.current_stream(device), stream_for_capture(device)
        # Normal tensors, so that new inputs may be copied into them outside of inference mode too.
        with torch.inference_mode(False), torch.no_grad():
            inputs = tuple(torch.empty_like(example).copy_(example) for example in examples)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(warm_up_calls):
                run(*inputs)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating and launching on streams of their own.
        captured = torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local")
        with captured, collect_used() as used:
            output = run(*inputs)
        current.wait_stream(side)
    return CapturedGraph(graph, inputs, output, used)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside: destroying an older graph would invalidate the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
