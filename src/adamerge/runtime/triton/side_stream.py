"""Work beside other work: in a CUDA graph, decisions by keys run while attention does, and in its wake."""

from types import TracebackType

import torch
from torch import Tensor

from adamerge.runtime.triton.readback import capturing


class SideStream:
    """What is launched inside runs beside what follows, until `join`; elsewhere it runs before.

    Whatever it reads has to be kept until then: the memory of what is freed is given to the next who asks.
    """

    def __init__(self, x: Tensor):
        self.active = capturing(x)

    def __enter__(self) -> "SideStream":
        if self.active:
            here = torch.cuda.current_stream()
            self.stream = torch.cuda.Stream()
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
        """What follows waits for it."""
        if self.active:
            torch.cuda.current_stream().wait_stream(self.stream)
