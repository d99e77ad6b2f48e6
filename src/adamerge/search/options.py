"""The options of the tuner, all checked in one place."""

import os
from dataclasses import dataclass
from typing import Any

from adamerge.core.checks import check_number
from adamerge.core.errors import BadOption
from adamerge.core.files import check_can_write
from adamerge.flops import CostCount, check_cost
from adamerge.search.evaluator import Loss, check_loss
from adamerge.search.target import Target

DEFAULT_CUT = 0.3


@dataclass(frozen=True)
class TuningOptions:
    """The options of `adamerge.tune`, which its docstring explains; wrong values are refused by name."""

    cut: float | None = None
    cost: CostCount = "true"
    gmacs: float | None = None
    latency_ratio: float | None = None
    loss: Loss | None = None
    static: bool = False
    merge_every: int | None = None
    seed: int = 0
    tries: int = 100
    time_limit: float | None = None
    progress: bool = True
    resume: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.cut, self.gmacs, self.latency_ratio)) > 1:
            raise BadOption("give one of cut, gmacs and latency_ratio, to say what it may cost")
        # `target` checks cut and gmacs.
        if self.target is None:
            _check_latency_ratio(self.latency_ratio)
        check_cost(self.cost)
        check_loss(self.loss)
        if not _is_whole(self.seed):
            raise BadOption(f"seed must be a whole number; got {self.seed!r}")
        if self.merge_every is not None:
            check_merge_every(self.merge_every)
        if not _is_whole(self.tries) or self.tries < 1:
            raise BadOption(f"tries must be a whole number >= 1; got {self.tries!r}")
        if self.time_limit is not None:
            check_number("time_limit", self.time_limit, at_least=0)
        if self.resume is not None:
            check_can_write(self.resume)

    @property
    def target(self) -> Target | None:
        """The cost to meet; None for a latency ratio, whose cut has to be measured."""
        if self.latency_ratio is not None:
            return None
        if self.gmacs is not None:
            return Target(gmacs=self.gmacs)
        return Target(cut=self.cut if self.cut is not None else DEFAULT_CUT)


def check_merge_every(number: Any) -> None:
    """Refuse what is no whole number from 1 up."""
    if not _is_whole(number) or number < 1:
        raise BadOption(f"merge_every must be a whole number >= 1: 2 merges at every second block; got {number!r}")


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _check_latency_ratio(ratio: Any) -> None:
    check_number("latency_ratio", ratio)
    if not 0 < ratio < 1:
        raise BadOption(f"latency_ratio is a share of the unmerged time and must be between 0 and 1; got {ratio!r}")
