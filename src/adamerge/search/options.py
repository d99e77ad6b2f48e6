"""The options of the tuner, checked once."""

import os
from dataclasses import dataclass
from typing import Any

from adamerge.core.budget import check_number
from adamerge.core.errors import BadOption
from adamerge.flops import CostCount, check_cost
from adamerge.search.evaluator import Loss
from adamerge.search.target import Target

DEFAULT_CUT = 0.3


@dataclass(frozen=True)
class TuningOptions:
    """What `adamerge.tune` takes besides the model and the images; its docstring says what each means."""

    cut: float | None = None
    cost: CostCount = "true"
    gmacs: float | None = None
    latency_ratio: float | None = None
    loss: Loss | None = None
    static: bool = False
    seed: int = 0
    tries: int = 100
    time_limit: float | None = None
    progress: bool = True
    resume: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.cut, self.gmacs, self.latency_ratio)) > 1:
            raise BadOption("give one of cut, gmacs and latency_ratio, to say what it may cost")
        check_cost(self.cost)
        # Making the target refuses a cut or a cost that means nothing.
        if self.target is None:
            _check_latency_ratio(self.latency_ratio)
        if isinstance(self.tries, bool) or not isinstance(self.tries, int) or self.tries < 1:
            raise BadOption(f"tries must be a whole number >= 1; got {self.tries!r}")
        if self.time_limit is not None:
            check_number("time_limit", self.time_limit, at_least=0)

    @property
    def target(self) -> Target | None:
        """The cost to meet; None where it follows from the latency, which has to be measured."""
        if self.latency_ratio is not None:
            return None
        if self.gmacs is not None:
            return Target(gmacs=self.gmacs)
        return Target(cut=self.cut if self.cut is not None else DEFAULT_CUT)


def _check_latency_ratio(ratio: Any) -> None:
    check_number("latency_ratio", ratio)
    if not 0 < ratio < 1:
        raise BadOption(f"latency_ratio is a share of the unmerged time and must be between 0 and 1; got {ratio!r}")
