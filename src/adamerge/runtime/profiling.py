"""Where the time of a forward pass goes: backends mark their stages, and `Stages` records how long each takes."""

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

# The stages of every backend; the time between them belongs to the host.
STAGES = ("qkv", "attention", "project", "decide", "merge", "mlp", "finish")

# Kernel name -> stage, for replayed graphs, which run no Python.  GEMMs and the host's kernels are not listed.  The
# residual sum and the norm after it are one kernel, which ends the attention or the MLP; a merge kernel does both too.
KERNELS = {
    "_attend": "attention",
    "_rotate": "qkv",
    "_token_places": "qkv",
    "_affinity": "decide",
    "_affinity_one_program": "decide",
    "_affinity_row_resident": "decide",
    "_mean_key_unit": "decide",
    "_class_attention": "decide",
    "_received": "decide",
    "_entropy": "decide",
    "_match": "decide",
    "_decide": "decide",
    "_select": "decide",
    "_merge": "merge",
    "_add": "residual",
    "_unfold": "finish",
}

# One object for all stages while nothing records: backends pass here seven times in every block.
_NOT_RECORDING: AbstractContextManager[None] = nullcontext()
_listener: "Stages | None" = None


def stage(name: str) -> AbstractContextManager[None]:
    """Mark the work inside as belonging to stage `name`; stages follow each other and are not nested."""
    return _NOT_RECORDING if _listener is None else _Timed(_listener, name)


class Stages:
    """Records, while active, how long each stage takes.

    On CUDA, events are put into the stream and read after a single synchronisation at the end; elsewhere the clock is
    read.  A replayed CUDA graph passes no stage, so listen to the forward pass itself.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.milliseconds: dict[str, float] = {}
        self.total = 0.0
        self._spans: list[tuple[str, Any, Any]] = []
        self._begin: Any = None
        self._before: Stages | None = None

    def __enter__(self) -> "Stages":
        global _listener
        self._before, _listener = _listener, self
        self._begin = self.moment()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _listener
        _listener = self._before
        end = self.moment()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for name, first, last in self._spans:
            self.milliseconds[name] = self.milliseconds.get(name, 0.0) + self._between(first, last)
        self.total += self._between(self._begin, end)
        self._spans.clear()

    def moment(self) -> Any:
        """Now, as the device sees it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, name: str, first: Any, last: Any) -> None:
        """Keep a span between two moments."""
        self._spans.append((name, first, last))

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) if self.device.type == "cuda" else 1e3 * (last - first)


class _Timed:
    """One passage through a stage."""

    def __init__(self, listener: Stages, name: str):
        self.listener, self.name = listener, name

    def __enter__(self) -> None:
        self.first = self.listener.moment()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.listener.add(self.name, self.first, self.listener.moment())
