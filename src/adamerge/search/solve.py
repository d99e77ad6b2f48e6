"""Methods at a wanted cost: their variants, and the value of the knob that meets a target on calibration images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from adamerge.calibration import How, calibrate
from adamerge.core.budget import Adaptive, Everything, check_number
from adamerge.core.errors import BadImages, BadOption
from adamerge.core.match import Bipartite, Everywhere
from adamerge.core.recipe import Recipe
from adamerge.data.batches import Images, batches
from adamerge.flops import meter
from adamerge.hosts.base import image_entry
from adamerge.methods import Method
from adamerge.patching.apply import apply, temporarily_patched, trace

Sense = Literal["true", "paper"]


@dataclass(frozen=True)
class Variant:
    """A method by name, with options besides its knob and a way of calibration."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    how: How | None = None


_UNWEIGHTED = {"proportional_attention": False}
_EXCHANGED = {"split": "alternating", "averaging": "size", "proportional_attention": True}
# What a comparison compares unless told otherwise: every method, and what its own paper or code leaves open.
VARIANTS: dict[str, Variant] = {
    "adamerge": Variant("adamerge"),
    "adamerge (sequential calibration)": Variant("adamerge", how="sequential"),
    "adamerge (cosine)": Variant("adamerge", {"affinity": "cosine"}),
    "adamerge (cosine, exchanged)": Variant("adamerge", {"affinity": "cosine", **_EXCHANGED}),
    "adamerge (protecting, exchanged)": Variant("adamerge", {"direction": "protecting", **_EXCHANGED}),
    "tome": Variant("tome"),
    "tome (no proportional attention)": Variant("tome", _UNWEIGHTED),
    "pitome": Variant("pitome"),
    "pitome (no proportional attention)": Variant("pitome", _UNWEIGHTED),
    "dsm": Variant("dsm", {"delay": 4}),
    "dsm (windows)": Variant("dsm", {"delay": 4, "windows": True}),
    "tofu": Variant("tofu"),
    "evit": Variant("evit"),
    "ats": Variant("ats"),
    "dymu": Variant("dymu"),
    "vid_tldr": Variant("vid_tldr"),
    "random": Variant("random"),
}

MOST_TRIES = 40
# Knob values closer than this share of the knob's range are one value: finer than a token in one layer.
FINEST = 1e-5
# Interpolation may not stay at an end of the bracket, which would never move the other one.
MARGIN = 0.02


@dataclass(frozen=True)
class Target:
    """A cost to meet: the share of the unmerged cost to save, or 10^9 multiply-accumulates per image."""

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
        """The cost to meet for a model that costs `full` unmerged."""
        return (1 - self.cut) * full if self.cut is not None else 1e9 * (self.gmacs or 0)

    def __str__(self) -> str:
        return f"cut {100 * self.cut:g} %" if self.cut is not None else f"{self.gmacs:g} GMACs"


@dataclass(frozen=True)
class Solution:
    """A recipe of the wanted cost, with its statistics where it adapts.

    `met` is False where the cost jumps over the target, because the knob moves whole tokens: then this is the nearest.
    """

    recipe: Recipe
    knob: float
    gmacs: float
    cut: float
    target_cut: float
    met: bool


@dataclass(frozen=True)
class Try:
    """A value of the knob, what it makes and what that costs on average."""

    knob: float
    recipe: Recipe
    macs: float

    def error(self, goal: float) -> float:
        """How far the cost is from the goal, as a share of the goal."""
        return abs(self.macs / goal - 1)


def find_variant(label: str) -> Variant:
    """The variant of that label."""
    if label not in VARIANTS:
        raise BadOption(f"there is no variant {label!r}; choose from {', '.join(VARIANTS)}")
    return VARIANTS[label]


def make(method: Method, options: Mapping[str, Any]) -> Recipe:
    """The method's recipe with these options, without statistics."""
    try:
        return method(**options)
    except TypeError as error:
        raise BadOption(f"{_name(method)} cannot be made with {dict(options)}: {error}") from error


def make_ready(model: nn.Module, images: Images, method: Method, options: Mapping[str, Any], how: How | None) -> Recipe:
    """The method's recipe with these options, calibrated on `images` if it adapts."""
    recipe = make(method, options)
    if isinstance(recipe.budget, Adaptive):
        recipe = recipe.with_stats(calibrate(model, images, recipe, how=how, progress=False))
    return recipe


def check_sense(sense: str) -> None:
    """Refuse what is no way to count."""
    if sense not in get_args(Sense):
        raise BadOption(f"sense must be one of {', '.join(get_args(Sense))}; got {sense!r}")


def solve(
    model: nn.Module,
    images: Images,
    method: Method,
    target: Target | float,
    *,
    sense: Sense = "true",
    tolerance: float = 0.005,
    options: Mapping[str, Any] | None = None,
    how: How | None = None,
) -> Solution:
    """Find the knob at which the mean cost over `images` is the target's; the model is left as it was found.

    Args:
        model: a supported model.
        images: the calibration images; adaptive methods are calibrated on them anew for every value that is tried.
            Methods whose cost is the same for all images run on the first one only.
        method: a method with a knob, such as `METHODS["tome"]`.
        target: a Target; a number is a cut.
        sense: which count of multiply-accumulates has to meet it, the true one or the paper's.
        tolerance: how far the cost may be from the target, as a share of the target.
        options: of the method, besides its knob.
        how: the way of calibration; see `calibrate`.
    """
    target = target if isinstance(target, Target) else Target(cut=target)
    check_number("tolerance", tolerance, at_least=0)
    check_sense(sense)
    if method.knob is None:
        raise BadOption(f"{_name(method)} has no knob that sets its cost and can meet no target; leave it out")
    with temporarily_patched(model), torch.inference_mode():
        gauge = Gauge(model, images, method, sense, options or {}, how)
        goal = target.macs(gauge.full)
        mild, hard = gauge.read(method.gentle), gauge.read(method.strong)
        best = min(mild, hard, key=lambda one: one.error(goal))
        if best.error(goal) > tolerance:
            _check_reach(gauge, mild, hard, target, goal)
            best = _search(gauge, mild, hard, goal, tolerance)
    return Solution(
        recipe=best.recipe,
        knob=best.knob,
        gmacs=best.macs / 1e9,
        cut=1 - best.macs / gauge.full,
        target_cut=1 - goal / gauge.full,
        met=best.error(goal) <= tolerance,
    )


class Gauge:
    """Reads the mean cost of a method at any value of its knob."""

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        method: Method,
        sense: Sense,
        options: Mapping[str, Any],
        how: How | None,
    ):
        parameter = next(model.parameters())
        self.model, self.method, self.sense, self.options = model, method, sense, options
        self.how: How | None = how
        self.images = [batch.to(parameter.device, parameter.dtype) for batch in batches(images)]
        if not self.images:
            raise BadImages("there are no images to measure the cost on; pass at least one batch")
        self.prices = meter(model)
        self.full = float(getattr(self.prices.unmerged(), sense))

    def read(self, knob: float) -> Try:
        """The recipe at this value, calibrated if it adapts, and its mean cost."""
        options = {**self.options, str(self.method.knob): knob}
        recipe = make_ready(self.model, self.images, self.method, options, self.how)
        apply(self.model, recipe)
        counts: list[Tensor] = []
        for batch in self.images if _varies(recipe) else [self.images[0][:1]]:
            image_entry(self.model)(batch)
            counts.append(trace(self.model).counts)
        cost = self.prices.cost(torch.cat(counts), recipe)
        return Try(knob, recipe, getattr(cost, self.sense).mean().item())


def _varies(recipe: Recipe) -> bool:
    """Whether images of one model can cost differently."""
    near = isinstance(recipe.links, Bipartite) and not isinstance(recipe.links.reach, Everywhere)
    return near or isinstance(recipe.budget, (Adaptive, Everything))


def _check_reach(gauge: Gauge, mild: Try, hard: Try, target: Target, goal: float) -> None:
    if hard.macs < goal < mild.macs:
        return
    cuts = [f"{100 * (1 - end.macs / gauge.full):.1f} %" for end in (mild, hard)]
    raise BadOption(
        f"{_name(gauge.method)} cannot meet {target} on this model: {gauge.method.knob} from {mild.knob:g} to "
        f"{hard.knob:g} reaches {mild.macs / 1e9:.4g} to {hard.macs / 1e9:.4g} GMACs in the {gauge.sense} count "
        f"(cuts of {cuts[0]} to {cuts[1]}), and {goal / 1e9:.4g} are asked for; choose a target in between"
    )


def _search(gauge: Gauge, mild: Try, hard: Try, goal: float, tolerance: float) -> Try:
    """Narrow the bracket by interpolation and halving in turn; the best value seen.

    Interpolation is quick where the cost is smooth, halving never gets stuck where it is a staircase.
    """
    finest = FINEST * abs(hard.knob - mild.knob)
    best = min(mild, hard, key=lambda one: one.error(goal))
    for turn in range(MOST_TRIES):
        if best.error(goal) <= tolerance or abs(hard.knob - mild.knob) <= finest:
            break
        share = (mild.macs - goal) / (mild.macs - hard.macs) if turn % 2 else 0.5
        share = min(max(share, MARGIN), 1 - MARGIN)
        middle = gauge.read(mild.knob + share * (hard.knob - mild.knob))
        best = min(best, middle, key=lambda one: one.error(goal))
        if middle.macs > goal:
            mild = middle
        else:
            hard = middle
    return best


def _name(method: Method) -> str:
    return getattr(method.make, "__name__", str(method.make))
