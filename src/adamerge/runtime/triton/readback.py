"""The counts of a merge come back from the device while the host already goes on."""

from dataclasses import replace

import torch
from torch import Tensor

from adamerge.core.types import Counts
from adamerge.runtime.packed.layout import Layout
from adamerge.runtime.packed.state import PackedState


class Readback:
    """The counts of a merge on their way back from the device; there is nothing to wait for where they are known."""

    def __init__(self, counts: Counts, layout: Layout, merges: int | None):
        self.merges = merges if layout.uniform else None
        self.host, self.event = None, None
        if self.merges is None and not capturing(counts):
            self.host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
            self.host.copy_(counts, non_blocking=True)
            if counts.is_cuda:
                self.event = torch.cuda.Event()
                self.event.record()

    def over(self, state: PackedState) -> PackedState:
        """The state with as many rows as there are tokens."""
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
            longest, total = max(counts) + layout.prefix, sum(counts) + layout.prefix * len(counts)
            uniform = total == longest * len(counts)
        layout = replace(layout, total=total, longest=longest, uniform=uniform)
        normed = None if state.normed is None else state.normed[:total]
        logs = None if state.logs is None else state.logs[:total]
        return replace(state, x=state.x[:total], size=state.size[:total], logs=logs, normed=normed, layout=layout)


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
