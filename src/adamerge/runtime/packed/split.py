"""Which tokens of one image are sources and which are targets, as slices of its rows."""

from dataclasses import dataclass
from functools import lru_cache

from adamerge.core.match import Alternating, Sequential, SplitRule


@dataclass(frozen=True)
class ImageSplit:
    """The sides of an image with `n` patch tokens: token `first + step * i` is source `i`, and the same for targets.

    `room` is the most sources that may merge.
    """

    n: int
    first_source: int
    sources: int
    first_target: int
    targets: int
    step: int
    room: int

    @property
    def source_rows(self) -> slice:
        return slice(self.first_source, self.first_source + self.step * self.sources, self.step)

    @property
    def target_rows(self) -> slice:
        return slice(self.first_target, self.first_target + self.step * self.targets, self.step)


@lru_cache(1024)
def split_image(rule: SplitRule, prefix: int, n: int) -> ImageSplit:
    """The sides that `rule`, `Sequential` or `Alternating`, gives an image with `n` patch tokens."""
    if isinstance(rule, Sequential):
        half = n // 2
        return ImageSplit(n, 0, half, half, n - half, 1, half)
    assert isinstance(rule, Alternating)
    first = prefix % 2 if rule.from_prefix else 0
    sources, targets = (n - first + 1) // 2, (n - (1 - first) + 1) // 2
    # The only token of an image is no source: there is no target for it.
    sources = sources if n > 1 else 0
    room = min(sources, targets) if rule.from_prefix else sources
    return ImageSplit(n, first, sources, 1 - first, max(targets, 0), 2, room)
