"""What a captured graph reads has to live as long as the graph: whoever captures listens to what is used."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_listener: list[Any] | None = None


@contextmanager
def collect_used() -> Iterator[list[Any]]:
    """A list of what was used inside."""
    global _listener
    before, _listener = _listener, []
    try:
        yield _listener
    finally:
        _listener = before


def note_used(used: Any) -> None:
    """Tell whoever listens."""
    if _listener is not None:
        _listener.append(used)
