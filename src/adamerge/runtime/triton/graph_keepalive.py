"""Collects the objects that a captured graph reads, to keep them alive as long as the graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_collected: list[Any] | None = None


@contextmanager
def collect_used() -> Iterator[list[Any]]:
    """A list of the objects passed to `note_used` inside."""
    global _collected
    before, _collected = _collected, []
    try:
        yield _collected
    finally:
        _collected = before


def note_used(used: Any) -> None:
    """Add an object to the innermost list that is being collected, if any."""
    if _collected is not None:
        _collected.append(used)
