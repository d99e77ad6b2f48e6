"""The state of a batch before the first block.  What depends on the shape of the tokens alone is built once."""

from dataclasses import dataclass
from threading import get_ident

import torch
from torch import Tensor

from adamerge.core.types import AllTokens
from adamerge.runtime.packed.layout import Layout, PerRow
from adamerge.runtime.packed.state import PackedState, pack, pack_rows
from adamerge.runtime.triton.graph_keepalive import note_used


@dataclass(frozen=True)
class KeptState:
    """The parts of a state that depend on the shape, for the thread and the stream that made them."""

    made_for: tuple[object, ...]
    stream: int
    layout: Layout
    size: PerRow
    history: Tensor


class FirstState:
    """Makes the state of each batch.  It keeps the parts of the last shape.  Several threads may call it."""

    def __init__(self, prefix: int, class_token: bool):
        self.prefix, self.class_token = prefix, class_token
        self._kept: KeptState | None = None
        # What graphs read that were captured by other means than ours.
        self._captured: list[KeptState] = []

    def make(self, x: AllTokens, captured: bool) -> PackedState:
        """The state of tokens `x`; `captured` says whether a CUDA graph is being captured."""
        made_for, stream = (x.shape[:2], x.device, get_ident()), _stream_number(x)
        # Read once: another thread may replace it at any time.
        kept = self._kept
        # On another stream it may not be there yet.  A capture begins by waiting for the device.
        if kept is None or kept.made_for != made_for or not (captured or kept.stream == stream):
            state = pack(x, self.prefix, self.class_token)
            if not captured:
                self._kept = KeptState(made_for, stream, state.layout, state.size, state.history)
            return state
        if captured and not note_used(kept):
            self._captured.append(kept)
        return PackedState(pack_rows(x), kept.layout, kept.size, kept.history, self.class_token)


def _stream_number(x: Tensor) -> int:
    """The stream that `x` is used on; 0 on a CPU, and for a fake tensor where there is no CUDA device."""
    used = x.is_cuda and torch.cuda.is_initialized()
    return torch.cuda.current_stream(x.device).cuda_stream if used else 0
