"""Several processes that share the images of a command, as torchrun starts them.

Every process takes each n-th batch, the results of all batches are put in order again, and every process then has the
same numbers.  In one process all functions here do nothing.  Only small objects travel, on the CPU, by gloo.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist

from adamerge.core.errors import BadOption, ProcessLost

T = TypeVar("T")
# Processes wait for each other at most so long: a process that has finished its files waits for the slowest.  One that
# dies is noticed at once, by torchrun and by the closed connection.
LONGEST_WAIT = timedelta(days=7)


@dataclass(frozen=True)
class Place:
    """Which of `world` processes this one is; `local` is its number on this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0


_ALONE = Place()
_place = _ALONE
# What torchrun sets, in the order of the fields of `Place`.
_NAMES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def read_place(environment: Mapping[str, str] = os.environ) -> Place:
    """What torchrun says in the environment; one process without it."""
    if any(name not in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return _ALONE
    try:
        found = Place(*(int(environment.get(name, default)) for name, default in _NAMES.items()))
    except ValueError as error:
        raise BadOption(f"{', '.join(_NAMES)} must be whole numbers, as torchrun sets them: {error}") from error
    if not 0 <= found.rank < found.world:
        raise BadOption(f"expected 0 <= RANK < WORLD_SIZE, as torchrun sets them; got {found.rank} and {found.world}")
    return found


@contextmanager
def sharing() -> Iterator[Place]:
    """Share the images of all calls inside among the processes that torchrun started; alone, nothing is shared.

    `adamerge.calibrate`, `evaluate`, `tune`, `predict`, `embed` and `compare` then give every process the result for
    all images.  Each process has to make the same calls with the same arguments.
    """
    global _place
    found = read_place()
    if found.world == 1 or _place != _ALONE:
        yield _place
        return
    dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    _place = found
    try:
        yield found
    finally:
        _place = _ALONE
        dist.destroy_process_group()


def place() -> Place:
    """Where this process is among those that share images now."""
    return _place


def is_first() -> bool:
    """Whether this process prints and writes files."""
    return _place.rank == 0


class Share(list[T]):
    """Batches that are this process's share already."""


def is_share(data: Any) -> bool:
    """Whether `data` gives only the batches of this process: a `Share`, or a loader that says so."""
    return isinstance(data, Share) or bool(getattr(data, "is_share", False))


def my_share(items: Iterable[T], data: Any = None) -> Iterable[T]:
    """Each n-th of the items; all, if they are from `data` that is a share already."""
    if _place.world == 1 or is_share(items) or is_share(data):
        return items
    return islice(items, _place.rank, None, _place.world)


def in_order(mine: Sequence[T]) -> list[T]:
    """The items of all processes, in the order of what `my_share` was given; tensors have to be on the CPU."""
    if _place.world == 1:
        return list(mine)
    everything: list[Any] = [None] * _place.world
    with _named_losses():
        dist.all_gather_object(everything, list(mine))
    longest = max(len(theirs) for theirs in everything)
    return [theirs[index] for index in range(longest) for theirs in everything if index < len(theirs)]


@contextmanager
def _named_losses() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(
            f"another process of this run ended early ({str(error).splitlines()[0][:200]}). Its own message, or "
            "torchrun's report, says why. Run the same command again: predict, embed, compare and tune --resume keep "
            "what is finished."
        ) from error


def from_first(make: Callable[[], T]) -> T:
    """What `make` gives in the first process, or the error that it raises there, in all processes."""
    if _place.world == 1:
        return make()
    answer: list[Any] = [None, None]
    if is_first():
        try:
            answer[0] = make()
        except Exception as error:
            answer[1] = error
    with _named_losses():
        dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
