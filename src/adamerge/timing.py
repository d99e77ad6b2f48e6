"""The wall-clock time of one call, with the device idle before and after it."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def time_call(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What `call` returns and the seconds it took, work that it queued on `device` included."""
    _synchronise(device)
    begin = time.perf_counter()
    result = call()
    _synchronise(device)
    return result, time.perf_counter() - begin


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
