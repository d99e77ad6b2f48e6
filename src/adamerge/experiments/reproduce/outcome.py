"""What a recipe did on each evaluation image, as the tables of the paper need it."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from adamerge.experiments.store import StoredResult


@dataclass(frozen=True)
class Outcome:
    """Per image: top-1, KL divergence from the unmerged model, merges per layer and both costs.

    `seconds` is the time that the last `timed` images took together.
    """

    top1: Bool[Tensor, " n"]
    kl: Float[Tensor, " n"]
    r: Int[Tensor, "n l"]
    paper: Float[Tensor, " n"]
    true: Float[Tensor, " n"]
    seconds: float
    timed: int

    @property
    def points(self) -> Float[Tensor, " n"]:
        """Top-1 of each image in percentage points: 100 where it is right, else 0."""
        return 100.0 * self.top1.double()

    @property
    def merged(self) -> Float[Tensor, " n"]:
        """Tokens merged in each image over all layers."""
        return self.r.sum(1).double()

    @property
    def gmacs(self) -> float:
        """The mean cost in the paper's count, in 10^9 multiply-accumulates."""
        return self.paper.mean().item() / 1e9

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.timed / self.seconds

    def to_stored(self) -> StoredResult:
        """The outcome as a `ResultStore` saves it."""
        tensors = {"top1": self.top1, "kl": self.kl, "r": self.r, "paper": self.paper, "true": self.true}
        return StoredResult({"seconds": self.seconds, "timed": self.timed}, tensors)

    @staticmethod
    def from_stored(result: StoredResult) -> "Outcome":
        """The outcome that `to_stored` gave."""
        return Outcome(**result.tensors, **result.facts)
