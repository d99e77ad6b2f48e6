"""Budgets: the rules that say how many tokens merge at a layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from adamerge.core.checks import MOST_TOKENS, check_number, check_numbers
from adamerge.core.errors import BadOption, BadStats
from adamerge.core.evidence import Evidence
from adamerge.core.layer_numbers import calibrated, check_length, wanted
from adamerge.core.match import Links
from adamerge.core.parts import part
from adamerge.core.stats import LayerStats
from adamerge.core.types import Counts

# Used in place of a smaller standard deviation, so that the z-score stays finite (D9).
SMALLEST_STD = 1e-6
# Lower than every score.  The threshold of a layer at which all links shall merge, and of idle layers.
LOWEST_THRESHOLD = -1e9


@runtime_checkable
class Budget(Protocol):
    """A count rule: how many tokens of each image merge at a layer.

    A layer is idle where `may_merge` is False: no backend computes salience or links there.

    A budget may have a method `check_depth(depth, *, with_stats)`, which raises an error where it cannot run on a model
    of `depth` blocks.  Calibration calls it with `with_stats=False`, before there are statistics.
    """

    @property
    def ragged(self) -> bool:
        """Whether counts can differ between the images of a batch."""
        ...

    def may_merge(self, layer: int, depth: int) -> bool:
        """Whether images may merge tokens at `layer` of `depth` layers; known before any token is read."""
        ...

    def fixed_count(self, layer: int, depth: int, patches: int) -> int | None:
        """The number of merges asked for in every image of `patches` patch tokens; None if it depends on the image."""
        ...

    def __call__(self, links: Links, evidence: Evidence) -> int | Counts:
        """The number of merges: one for the whole batch, or one for each image, `(b,)`."""
        ...


@runtime_checkable
class Adaptive(Budget, Protocol):
    """A count rule that compares an image with calibrated statistics."""

    @property
    def stats(self) -> LayerStats | None: ...

    def with_stats(self, stats: LayerStats | None) -> "Adaptive":
        """The same rule with other statistics.  With None it can only be calibrated."""
        ...

    @property
    def needs_thresholds(self) -> bool:
        """Whether calibration must find a threshold for each layer."""
        ...

    def threshold(self, links: Sequence[Links], layer: int) -> float:
        """The threshold for one layer, from the links of all calibration images."""
        ...


@part
@dataclass(frozen=True)
class Fixed:
    """The same number of merges for every image.

    `r` is one number for all layers, or one for each.  The first `delay` layers merge nothing.  Fractions are carried
    over to later layers: r = 2.5 merges 2, 3, 2, 3, … tokens, so that any target cost can be met.
    """

    r: float | tuple[float, ...]
    delay: int = 0

    def __post_init__(self) -> None:
        check_numbers("r", self.r)
        if isinstance(self.delay, bool) or not isinstance(self.delay, int) or self.delay < 0:
            raise BadOption(f"delay is a number of layers and must be a whole number >= 0; got {self.delay!r}")

    def check_depth(self, depth: int, *, with_stats: bool = True) -> None:
        check_length("r", self.r, depth)

    @property
    def ragged(self) -> bool:
        return False

    def at(self, layer: int) -> int:
        """How many merges a layer gets."""
        if layer < self.delay or wanted(self.r, layer) == 0:
            return 0
        # An image has fewer tokens than this, and greater numbers overflow where counts are tensors.
        if wanted(self.r, layer) > MOST_TOKENS:
            return MOST_TOKENS
        if isinstance(self.r, tuple):
            before = math.fsum(min(number, MOST_TOKENS) for number in self.r[self.delay : layer])
            return math.floor(before + self.r[layer]) - math.floor(before)
        done = layer - self.delay
        return math.floor(self.r * (done + 1)) - math.floor(self.r * done)

    def may_merge(self, layer: int, depth: int) -> bool:
        return self.at(layer) > 0

    def fixed_count(self, layer: int, depth: int, patches: int) -> int:
        return self.at(layer)

    def __call__(self, links: Links, evidence: Evidence) -> int:
        return self.at(evidence.layer)


@part
@dataclass(frozen=True)
class ZScore:
    """`r = floor(r_max * sigmoid(alpha * z / T))`, where `z` is the z-score of the image's redundancy: eq. (4).

    `r_max` is one number for all layers, or one for each; a layer whose number is below 1 is idle.  Without `stats`
    the rule can only be calibrated.
    """

    r_max: float | tuple[float, ...]
    stats: LayerStats | None = None
    alpha: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_numbers("r_max", self.r_max)
        check_number("alpha", self.alpha)
        check_number("temperature", self.temperature)
        if self.temperature <= 0:
            raise BadOption(f"temperature divides the z-score and must be > 0; got {self.temperature!r}")

    def check_depth(self, depth: int, *, with_stats: bool = True) -> None:
        check_length("r_max", self.r_max, depth)
        if with_stats and self.ragged:
            calibrated(self.stats, depth - 1)

    @property
    def ragged(self) -> bool:
        return any(number >= 1 for number in self.r_max) if isinstance(self.r_max, tuple) else self.r_max >= 1

    def most(self, layer: int) -> float:
        """How many tokens a layer may merge."""
        return wanted(self.r_max, layer, "r_max")

    def may_merge(self, layer: int, depth: int) -> bool:
        return self.most(layer) >= 1

    def fixed_count(self, layer: int, depth: int, patches: int) -> int | None:
        return None if self.may_merge(layer, depth) else 0

    def with_stats(self, stats: LayerStats | None) -> "ZScore":
        return replace(self, stats=stats)

    @property
    def needs_thresholds(self) -> bool:
        return False

    def threshold(self, links: Sequence[Links], layer: int = 0) -> float:
        raise BadOption("the z-score rule has no thresholds")

    def __call__(self, links: Links, evidence: Evidence) -> int | Counts:
        stats, layer = calibrated(self.stats, evidence.layer), evidence.layer
        if not self.ragged:
            return 0
        redundancy = links.redundancy.detach().double()
        z = (redundancy - stats.mean[layer]) / max(stats.std[layer], SMALLEST_STD)
        r = (self.most(layer) * torch.sigmoid(self.alpha * z / self.temperature)).floor()
        return torch.where(redundancy.isfinite(), r, 0).clamp_max(MOST_TOKENS).long()


@part
@dataclass(frozen=True)
class Threshold:
    """Merge all links of an image whose value exceeds the calibrated threshold of the layer.

    `r` is the mean number of merges over the calibration images: one number for all layers, or one for each.
    Calibration finds the thresholds.
    """

    r: float | tuple[float, ...]
    stats: LayerStats | None = None

    def __post_init__(self) -> None:
        check_numbers("r", self.r)

    def check_depth(self, depth: int, *, with_stats: bool = True) -> None:
        check_length("r", self.r, depth)
        if with_stats and self.ragged:
            self.known(depth - 1)

    @property
    def ragged(self) -> bool:
        return any(number > 0 for number in self.r) if isinstance(self.r, tuple) else self.r > 0

    def known(self, layer: int) -> float:
        """The calibrated threshold of a layer."""
        stats = calibrated(self.stats, layer)
        if len(stats.threshold) != stats.depth:
            raise BadStats(
                "these statistics hold no thresholds, which this recipe needs; "
                "run `adamerge calibrate --how sequential` for this recipe"
            )
        return stats.threshold[layer]

    def wanted(self, layer: int) -> float:
        """The mean number of merges at a layer over the calibration images."""
        return wanted(self.r, layer)

    def may_merge(self, layer: int, depth: int) -> bool:
        return self.wanted(layer) > 0

    def fixed_count(self, layer: int, depth: int, patches: int) -> int | None:
        return None if self.may_merge(layer, depth) else 0

    def with_stats(self, stats: LayerStats | None) -> "Threshold":
        return replace(self, stats=stats)

    @property
    def needs_thresholds(self) -> bool:
        return True

    def threshold(self, links: Sequence[Links], layer: int = 0) -> float:
        """The value that `r` links per image exceed on average.  Links with a value that is not finite do not count."""
        images = sum(len(batch.value) for batch in links)
        values = torch.cat([batch.value[batch.source & batch.value.isfinite()].double().cpu() for batch in links])
        rank = round(self.wanted(layer) * images)
        if rank >= len(values):
            return LOWEST_THRESHOLD
        values = values.sort(descending=True).values
        # The middle of two values, so that rounding does not change the counts of the calibration images.
        return float(values[max(rank - 1, 0) : rank + 1].mean())

    def __call__(self, links: Links, evidence: Evidence) -> int | Counts:
        threshold = self.known(evidence.layer)
        if self.wanted(evidence.layer) == 0:
            return 0
        return (links.source & (links.value.double() > threshold)).sum(1)


@part
@dataclass(frozen=True)
class Everything:
    """Merge all sources: for matchings that choose the number of merges themselves."""

    @property
    def ragged(self) -> bool:
        return True

    def may_merge(self, layer: int, depth: int) -> bool:
        return True

    def fixed_count(self, layer: int, depth: int, patches: int) -> None:
        return None

    def __call__(self, links: Links, evidence: Evidence) -> Counts:
        return links.source.sum(1)


@part
@dataclass(frozen=True)
class Keep:
    """Keep a share of the tokens at a few layers (EViT): `ceil(rate * n)` stay, the others become one.

    `stages` are fractions of the depth: in a twelve-block model the blocks 3, 6 and 9.
    """

    rate: float
    stages: tuple[float, ...] = (0.25, 0.5, 0.75)

    def __post_init__(self) -> None:
        check_number("keep", self.rate, at_least=0)
        if not 0 < self.rate <= 1:
            raise BadOption(f"keep is the share of tokens that stay and must be in (0, 1]; got {self.rate!r}")
        for stage in self.stages:
            check_number("a stage, a fraction of the depth,", stage, at_least=0, at_most=1)

    @property
    def ragged(self) -> bool:
        return False

    def may_merge(self, layer: int, depth: int) -> bool:
        return self.rate < 1 and layer in {math.floor(stage * depth) for stage in self.stages}

    def fixed_count(self, layer: int, depth: int, patches: int) -> int:
        if not self.may_merge(layer, depth):
            return 0
        return max(patches - math.ceil(self.rate * patches) - 1, 0)

    def __call__(self, links: Links, evidence: Evidence) -> int | Counts:
        return asked(self, evidence)


def asked(budget: Budget, evidence: Evidence) -> int | Counts:
    """How many merges a budget with fixed counts asks for: one number, or one for each image where lengths differ."""

    def count(patches: int) -> int:
        return budget.fixed_count(evidence.layer, evidence.depth, patches) or 0

    if evidence.count is None:
        return count(evidence.size.shape[1])
    return torch.tensor([count(patches) for patches in evidence.count.tolist()], device=evidence.size.device)
