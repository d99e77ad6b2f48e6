"""Reads the counts of a merge back from the device while the host goes on launching kernels."""

from dataclasses import replace

import torch
from torch import Tensor

from adamerge.core.types import Counts
from adamerge.runtime.packed.layout import Layout
from adamerge.runtime.packed.state import PackedState


class Readback:
    """The counts of a merge, being copied to the host.

    Nothing is copied where the host knows them (`merges` for every image of a uniform layout), nor with `wait=False`,
    under graph capture: then the arrays keep their length.
    """

    def __init__(self, counts: Counts, layout: Layout, merges: int | None, wait: bool = True):
        self.merges = merges if layout.uniform else None
        self.host, self.event = None, None
        if self.merges is None and wait:
            self.host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
            self.host.copy_(counts, non_blocking=True)
            if counts.is_cuda:
                self.event = torch.cuda.Event()
                self.event.record()

    def cut(self, state: PackedState) -> PackedState:
        """The state with as many rows as there are tokens; synchronises with the copy if there is one."""
        layout = state.layout
        if self.merges is not None:
            longest = layout.longest - self.merges
            total, uniform = layout.images * longest, True
        elif self.host is None:
            return state
        else:
            if self.event is not None:
                self.event.synchronize()
            counts = self.host.tolist()
            longest, total = max(counts, default=0) + layout.prefix, sum(counts) + layout.prefix * len(counts)
            uniform = total == longest * len(counts)
        layout = replace(layout, total=total, longest=longest, uniform=uniform)
        normed = None if state.normed is None else state.normed[:total]
        logs = None if state.logs is None else state.logs[:total]
        return replace(state, x=state.x[:total], size=state.size[:total], logs=logs, normed=normed, layout=layout)


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
