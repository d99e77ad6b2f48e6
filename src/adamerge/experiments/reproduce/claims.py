"""Claims of the paper: each has the paper's figure, our figure and a verdict."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adamerge.experiments.bootstrap import Interval, intervals

Verdict = Literal["holds", "does not hold", "cannot tell", "not applicable"]
# The verdict on several figures is the first of these that one of them has.
ORDER: tuple[Verdict, ...] = ("does not hold", "cannot tell", "holds", "not applicable")
WORDS: dict[str, str] = {"cannot tell": "cannot tell at this sample size"}


@dataclass(frozen=True)
class Claim:
    """A statement of the paper with its figure, our figure, and the verdict.

    `decisive` is, of several figures, the one that decides the verdict; the summary shows it.
    """

    text: str
    paper: str
    ours: str
    verdict: Verdict
    decisive: str = ""

    @property
    def verdict_text(self) -> str:
        """The verdict as tables show it."""
        return WORDS.get(self.verdict, self.verdict)


def differences(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Interval]:
    """The mean of `a - b` over the images for each pair (a, b), with a paired bootstrap interval."""
    return intervals(torch.stack([a.double() - b.double() for a, b in pairs], 1)) if pairs else []


def not_applicable(text: str, paper: str, why: str) -> Claim:
    """A claim about something that this model does not have, such as a block number beyond its depth."""
    return Claim(text, paper, f"not applicable: {why}", "not applicable")


def fact(statement: bool) -> Verdict:
    """The verdict on a statement that needs no statistics."""
    return "holds" if statement else "does not hold"


def every(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on all statements together: one that fails decides it, then one that is open."""
    return ORDER[min(map(ORDER.index, verdicts), default=-1)]


def at_least(interval: Interval, bound: float = 0.0) -> Verdict:
    """Is the figure at least `bound`?  An interval that contains lower and higher values cannot tell."""
    if interval.low >= bound:
        return "holds"
    return "does not hold" if interval.high < bound else "cannot tell"


def above(interval: Interval, bound: float = 0.0) -> Verdict:
    """Is the figure greater than `bound`?  An interval that contains `bound` cannot tell."""
    if interval.low > bound:
        return "holds"
    return "does not hold" if interval.high < bound else "cannot tell"


def below(interval: Interval, bound: float = 0.0) -> Verdict:
    """Is the figure less than `bound`?  An interval that contains `bound` cannot tell."""
    if interval.high < bound:
        return "holds"
    return "does not hold" if interval.low > bound else "cannot tell"


def within(interval: Interval, bound: float) -> Verdict:
    """Is the figure between `-bound` and `bound`?"""
    if -bound <= interval.low and interval.high <= bound:
        return "holds"
    return "does not hold" if interval.low > bound or interval.high < -bound else "cannot tell"


def spell(interval: Interval, digits: int = 2) -> str:
    """The interval as text, such as `+0.37 [-0.10, +0.84]`."""
    return f"{interval.mean:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def judge_all(
    text: str, paper: str, found: Sequence[Interval], names: Sequence[str], judge: Callable[[Interval], Verdict]
) -> Claim:
    """A claim about several figures, such as one for each tier; the worst one decides."""
    worst = min(range(len(found)), key=lambda i: (ORDER.index(judge(found[i])), found[i].high))
    ours = "; ".join(spell(interval) for interval in found)
    return Claim(text, paper, ours, every(map(judge, found)), f"{spell(found[worst])} {names[worst]}")
