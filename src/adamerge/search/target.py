"""The cost that a recipe has to meet, as a share of the unmerged cost to save or in absolute terms."""

from dataclasses import dataclass

from adamerge.core.checks import check_number
from adamerge.core.errors import BadOption


@dataclass(frozen=True)
class Target:
    """A cost to meet: `cut` is the share of the unmerged cost to save, `gmacs` is 10^9 multiply-accumulates per image.

    Exactly one of the two is given.
    """

    cut: float | None = None
    gmacs: float | None = None

    def __post_init__(self) -> None:
        if (self.cut is None) == (self.gmacs is None):
            raise BadOption(f"a target is either a cut or a cost; got cut={self.cut!r} and gmacs={self.gmacs!r}")
        if self.cut is not None:
            check_number("cut", self.cut)
            if not 0 < self.cut < 1:
                raise BadOption(f"cut is the share of the cost to save and must be between 0 and 1; got {self.cut!r}")
        if self.gmacs is not None:
            check_number("gmacs", self.gmacs)
            if self.gmacs <= 0:
                raise BadOption(f"gmacs is a cost and must be above 0; got {self.gmacs!r}")

    def macs(self, full: float) -> float:
        """The multiply-accumulates per image to meet, for a model that needs `full` unmerged."""
        return (1 - self.cut) * full if self.cut is not None else 1e9 * (self.gmacs or 0)

    def macs_below(self, full: float) -> float:
        """`macs(full)`; refuses a target that is not below the unmerged cost."""
        macs = self.macs(full)
        if not macs < full:
            raise BadOption(f"{self} is no saving: the unmerged model costs {full / 1e9:.4g} GMACs")
        return macs

    def __str__(self) -> str:
        return f"cut {100 * self.cut:g} %" if self.cut is not None else f"{self.gmacs:g} GMACs"
