"""A side stream for captured graphs: key-based matching runs on it, concurrently with attention."""

from types import TracebackType

import torch
from torch import Tensor

from adamerge.runtime.triton.readback import capturing

# torch hands out the streams of each priority in turn from a ring of 32.  A capture must not take the stream on which
# another thread runs: that thread's work would become a part of the graph.  Nobody else asks for this priority.
CAPTURE_PRIORITY = -3


def stream_for_capture(device: torch.device) -> torch.cuda.Stream:
    """A stream on which no other thread runs."""
    return torch.cuda.Stream(device, priority=CAPTURE_PRIORITY)


class SideStream:
    """Under graph capture, kernels launched inside run concurrently with those launched after it, until `join`.

    Outside capture it does nothing.  Keep every tensor that the side stream reads alive until `join`: the allocator
    may give freed memory to the main stream.
    """

    def __init__(self, x: Tensor):
        self.active = capturing(x)

    def __enter__(self) -> "SideStream":
        if self.active:
            here = torch.cuda.current_stream()
            self.stream = stream_for_capture(here.device)
            self.stream.wait_stream(here)
            self.aside = torch.cuda.stream(self.stream)
            self.aside.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.active:
            self.aside.__exit__(kind, error, traceback)

    def join(self) -> None:
        """The current stream waits for the side stream."""
        if self.active:
            torch.cuda.current_stream().wait_stream(self.stream)
