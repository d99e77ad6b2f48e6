"""What the decision kernel takes and gives: the options of a decision, and the decision itself."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from adamerge.core.types import Counts, PerImage
from adamerge.runtime.packed.layout import PerRow, RowSlots
from adamerge.runtime.triton.kernels.match import Split

Score = Literal["similarity", "first", "last", "protect"]
Weigh = Literal["salience", "size", "salience_size", "keep"]
# The length of a merged token, where it is not that of the average.
Length = Literal["mean", "largest"]


@dataclass(frozen=True)
class Policy:
    """What is the same at every layer.

    `score` says what becomes of a source's similarity: nothing, times its salience, times one minus it, or protection
    of `strength`.  `weigh` names the weights of the average; "keep" counts only the token that stays.  `sources_first`
    puts the sources that stay before the targets, at layers that merge anything.
    """

    split: Split
    score: Score = "similarity"
    strength: float = 0.0
    weigh: Weigh = "size"
    sources_first: bool = False


@dataclass(frozen=True)
class Rule:
    """How many merge.  fixed: `r`.  zscore: `numbers` = mean, std, r_max, alpha / T.  threshold: `numbers` = it."""

    kind: Literal["fixed", "zscore", "threshold"]
    r: int = 0
    numbers: Float[Tensor, " k"] | None = None


@dataclass(frozen=True)
class ColumnSums:
    """The column sums of an affinity in parts, `(parts, total)`, one for each `rows` rows of an image."""

    parts: Float[Tensor, "parts total"]
    rows: int


@dataclass(frozen=True)
class Entropy:
    """The entropy of each token's attention; decisions turn it into the sharpness of vid-TLDR."""

    of_token: PerRow


@dataclass(frozen=True)
class Choice:
    """A decision for packed tokens.  Places are those of patches within their image.

    `slot` is the place each patch goes to; `gone` the patches that merged away, in order, and `goal` where each of them
    went; `origin` the patch that each new place came from.  All are as long as the packed array, at the rows of the
    patches' own image; entries behind the last are undefined.
    """

    slot: RowSlots
    gone: RowSlots
    goal: RowSlots
    origin: RowSlots
    count: Counts
    weight: PerRow
    salience: PerRow
    redundancy: PerImage
    history: Int[Tensor, "b patches"]
