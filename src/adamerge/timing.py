"""Wall-clock time of a call; the device is synchronised before and after it."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def time_call(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result of `call` and the seconds it took, including the work that it queued on `device`."""
    _synchronise(device)
    begin = time.perf_counter()
    result = call()
    _synchronise(device)
    return result, time.perf_counter() - begin


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
