"""Finds the value of a method's knob at which its mean cost over calibration images meets a target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.calibration import How, calibrate
from adamerge.core.checks import check_number
from adamerge.core.errors import BadImages, BadOption
from adamerge.core.match import Bipartite, Everywhere
from adamerge.core.recipe import Recipe
from adamerge.data.batches import Images, batches
from adamerge.distributed import in_order, my_share
from adamerge.flops import CostCount, check_cost, meter
from adamerge.hosts.base import image_entry
from adamerge.methods import Method
from adamerge.patching.apply import apply, temporarily_patched, trace
from adamerge.search.target import Target

MAX_STEPS = 40
# The search stops when the bracket is narrower than this share of the knob's range: less than one token in one layer.
MIN_BRACKET = 1e-5
# An interpolated value keeps this distance from both ends of the bracket, so that the bracket always shrinks.
MARGIN = 0.02


@dataclass(frozen=True)
class Solution:
    """A recipe that meets a target, calibrated if it adapts.

    `met` is False where no knob value meets the target, because the cost moves in steps of whole tokens; then this is
    the nearest.  `knob` is None for a preset, which has none.
    """

    recipe: Recipe
    knob: float | None
    gmacs: float
    cut: float
    target_cut: float
    met: bool


@dataclass(frozen=True)
class KnobCost:
    """A value of the knob, its recipe, and the mean multiply-accumulates per image."""

    knob: float
    recipe: Recipe
    macs: float

    def error(self, goal: float) -> float:
        """How far the cost is from `goal`, as a share of `goal`."""
        return abs(self.macs / goal - 1)


def make_recipe(method: Method, options: Mapping[str, Any]) -> Recipe:
    """The method's recipe with these options, without statistics."""
    try:
        return method(**options)
    except TypeError as error:
        raise BadOption(f"{_name(method)} cannot be made with {dict(options)}: {error}") from error


def make_calibrated_recipe(
    model: nn.Module, images: Images, method: Method, options: Mapping[str, Any], how: How | None
) -> Recipe:
    """The method's recipe with these options, calibrated on `images` if it adapts."""
    recipe = make_recipe(method, options)
    if recipe.adaptive is not None:
        recipe = recipe.with_stats(calibrate(model, images, recipe, how=how, progress=False))
    return recipe


def solve(
    model: nn.Module,
    images: Images,
    method: Method,
    target: Target | float,
    *,
    cost: CostCount = "true",
    tolerance: float = 0.005,
    options: Mapping[str, Any] | None = None,
    how: How | None = None,
) -> Solution:
    """Find the knob value at which the mean cost over `images` meets the target; the model itself is not changed.

    Args:
        model: a supported model.
        images: the calibration images; an adaptive method is calibrated on them for every value that is tried.
            A method whose cost is the same for all images runs on the first one only.
        method: a method with a knob, such as `METHODS["tome"]`.
        target: a Target; a number is a cut.
        cost: which count of multiply-accumulates has to meet it: "true" or "paper"; see `adamerge.flops`.
        tolerance: how far the cost may be from the target, as a share of the target.
        options: of the method, besides its knob.
        how: how to calibrate; see `calibrate`.
    """
    target = target if isinstance(target, Target) else Target(cut=target)
    check_number("tolerance", tolerance, at_least=0)
    check_cost(cost)
    if method.knob is None:
        raise BadOption(f"{_name(method)} has no knob that sets its cost and can meet no target; leave it out")
    with temporarily_patched(model), torch.inference_mode():
        costs = KnobCosts(model, images, method, cost, options or {}, how)
        goal = target.macs(costs.full)
        gentle, strong = costs.measure(method.gentle), costs.measure(method.strong)
        best = min(gentle, strong, key=lambda one: one.error(goal))
        if best.error(goal) > tolerance:
            _check_reachable(costs, gentle, strong, target)
            best = _narrow(costs, gentle, strong, goal, tolerance)
    return Solution(
        recipe=best.recipe,
        knob=best.knob,
        gmacs=best.macs / 1e9,
        cut=1 - best.macs / costs.full,
        target_cut=1 - goal / costs.full,
        met=best.error(goal) <= tolerance,
    )


class KnobCosts:
    """Measures the mean cost of a method at any value of its knob; the model stays patched."""

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        method: Method,
        cost: CostCount,
        options: Mapping[str, Any],
        how: How | None,
    ):
        parameter = next(model.parameters())
        self.model, self.method, self.cost, self.options = model, method, cost, options
        self.how: How | None = how
        self.images = [batch.to(parameter.device, parameter.dtype) for batch in batches(images)]
        if not self.images:
            raise BadImages("there are no images to measure the cost on; pass at least one batch")
        self.prices = meter(model)
        self.full = float(getattr(self.prices.unmerged(), cost))

    def measure(self, knob: float) -> KnobCost:
        """The recipe at this value, calibrated if it adapts, and its mean cost."""
        options = {**self.options, str(self.method.knob): knob}
        recipe = make_calibrated_recipe(self.model, self.images, self.method, options, self.how)
        apply(self.model, recipe)
        counts: list[Tensor] = []
        for batch in my_share(self.images) if _varies(recipe) else [self.images[0][:1]]:
            image_entry(self.model)(batch)
            counts.append(trace(self.model).counts.cpu())
        costs = self.prices.cost(torch.cat(in_order(counts)), recipe)
        return KnobCost(knob, recipe, getattr(costs, self.cost).mean().item())


def _varies(recipe: Recipe) -> bool:
    """Whether the cost can differ between images."""
    near = isinstance(recipe.links, Bipartite) and not isinstance(recipe.links.reach, Everywhere)
    return near or recipe.ragged


def _check_reachable(costs: KnobCosts, gentle: KnobCost, strong: KnobCost, target: Target) -> None:
    """Refuse a target that the knob's whole range does not reach."""
    goal = target.macs(costs.full)
    if strong.macs < goal < gentle.macs:
        return
    cuts = [f"{100 * (1 - end.macs / costs.full):.1f} %" for end in (gentle, strong)]
    raise BadOption(
        f"{_name(costs.method)} cannot meet {target} on this model: {costs.method.knob} from {gentle.knob:g} to "
        f"{strong.knob:g} reaches {gentle.macs / 1e9:.4g} to {strong.macs / 1e9:.4g} GMACs in the {costs.cost} count "
        f"(cuts of {cuts[0]} to {cuts[1]}), and {goal / 1e9:.4g} are asked for; choose a target in between"
    )


def _narrow(costs: KnobCosts, gentle: KnobCost, strong: KnobCost, goal: float, tolerance: float) -> KnobCost:
    """Narrow the bracket by halving and interpolation in turn; returns the value whose cost is nearest to `goal`.

    Interpolation is fast where the cost is smooth; halving still makes progress where the cost moves in steps.
    """
    narrowest = MIN_BRACKET * abs(strong.knob - gentle.knob)
    best = min(gentle, strong, key=lambda one: one.error(goal))
    for step in range(MAX_STEPS):
        if best.error(goal) <= tolerance or abs(strong.knob - gentle.knob) <= narrowest:
            break
        share = (gentle.macs - goal) / (gentle.macs - strong.macs) if step % 2 else 0.5
        share = min(max(share, MARGIN), 1 - MARGIN)
        middle = costs.measure(gentle.knob + share * (strong.knob - gentle.knob))
        best = min(best, middle, key=lambda one: one.error(goal))
        if middle.macs > goal:
            gentle = middle
        else:
            strong = middle
    return best


def _name(method: Method) -> str:
    return getattr(method.make, "__name__", str(method.make))
