"""Collects the objects that a captured graph reads, to keep them alive as long as the graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_collected: ContextVar[list[Any] | None] = ContextVar("adamerge_used_by_graph", default=None)


@contextmanager
def collect_used() -> Iterator[list[Any]]:
    """A list that fills with the objects that this thread notes inside."""
    used: list[Any] = []
    token = _collected.set(used)
    try:
        yield used
    finally:
        _collected.reset(token)


def note_used(used: Any) -> bool:
    """Note an object whose memory kernels read.  Whether there is a list that keeps it."""
    collected = _collected.get()
    if collected is not None:
        collected.append(used)
    return collected is not None
