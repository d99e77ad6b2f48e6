"""The dtype in which `torch.autocast` computes, where it is on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast computes on devices of this kind now; None where it is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextmanager
def without_cached_casts(device: torch.device) -> Iterator[None]:
    """Autocast as it is, but every weight is cast again at each use.

    Autocast keeps the cast weights until its outermost context ends.  A CUDA graph that was captured inside would go on
    reading them after that, and would not see changes of the weights.
    """
    dtype = autocast_dtype(device)
    if dtype is None:
        yield
        return
    with torch.autocast(device.type, dtype, cache_enabled=False):
        yield
