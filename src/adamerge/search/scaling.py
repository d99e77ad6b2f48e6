"""Scales the schedule of a recipe family until the mean cost over the images meets a target."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adamerge.core.recipe import Recipe
from adamerge.search.evaluator import Evaluator, SweepResult
from adamerge.search.families import protect, rates
from adamerge.search.schedule import Rates, expected_macs, scale_rates, with_rates
from adamerge.search.target import Target

# A cost is met within this share of it.
TOLERANCE = 0.005
# Minus the slope of log(loss) over log(cost): about 8 on vit_tiny and deit_tiny at cuts of 20 to 50 %.  The score
# corrects for it, so that no candidate wins only because its cost is higher within the tolerance.
STEEPNESS = 8.0
MAX_CORRECTIONS = 4


@dataclass(frozen=True)
class Candidate:
    """A family with the rates that meet the goal, and its mean loss and cost over the images.

    `score` is the loss corrected for the remaining difference between the cost and the goal.
    """

    family: Recipe
    rates: Rates
    recipe: Recipe
    loss: float
    macs: float
    score: float


class Scaler:
    """Scales schedules to one goal; keeps the ratio of measured to expected cost from one schedule to the next.

    `measure` gives the mean loss and the mean cost of a recipe; by default one sweep of the evaluator.
    """

    def __init__(
        self, evaluator: Evaluator, target: Target, measure: Callable[[Recipe], tuple[float, float]] | None = None
    ):
        self.evaluator, self.goal = evaluator, target.macs_below(evaluator.full)
        self.measure = measure if measure is not None else lambda recipe: mean_loss_and_macs(evaluator, recipe)
        # The mean cost over the images, divided by the expected cost of the schedule.
        self.excess = 1.0

    def scale(self, family: Recipe, rates: Sequence[float]) -> Candidate:
        """Scale the rates to the goal, measure, and correct the scale until the measured cost meets the goal.

        Returns the candidate whose cost is nearest to the goal.
        """
        prices, cost = self.evaluator.prices, self.evaluator.cost
        nearest = None
        for _ in range(MAX_CORRECTIONS):
            scaled = scale_rates(rates, self.goal / self.excess, prices, family, cost)
            recipe = with_rates(family, scaled, prices.patches)
            loss, macs = self.measure(recipe)
            score = loss * math.exp(STEEPNESS * (macs / self.goal - 1))
            candidate = Candidate(family, scaled, recipe, loss, macs, score)
            if nearest is None or abs(macs - self.goal) < abs(nearest.macs - self.goal):
                nearest = candidate
            if self.meets_goal(candidate):
                break
            self.excess = macs / expected_macs(scaled, prices, family, cost)
        assert nearest is not None
        return nearest

    def meets_goal(self, candidate: Candidate) -> bool:
        """Whether the candidate's cost is within the tolerance."""
        return abs(candidate.macs / self.goal - 1) <= TOLERANCE


def mean_loss_and_macs(evaluator: Evaluator, recipe: Recipe) -> tuple[float, float]:
    """The mean loss and the mean multiply-accumulates per image, calibrating the recipe if it adapts."""
    result = evaluator.sweep(recipe)
    return result.loss.mean().item(), result.macs.mean().item()


def scale_to_target(evaluator: Evaluator, family: Recipe, rates: Rates, target: Target) -> Candidate:
    """A family with these rates, scaled to a target; its recipe is not calibrated yet."""
    return Scaler(evaluator, target).scale(family, rates)


def preset_at(evaluator: Evaluator, target: Target, static: bool = False, merge_every: int = 1) -> Recipe:
    """The preset at a target, calibrated on the evaluator's images."""
    return sweep_preset(evaluator, target, static, merge_every).recipe


def sweep_preset(evaluator: Evaluator, target: Target, static: bool = False, merge_every: int = 1) -> SweepResult:
    """The preset at a target, with its loss and cost on the evaluator's images."""
    host = evaluator.host
    cut = 1 - target.macs(evaluator.full) / evaluator.full
    spread = rates(cut, host.depth, evaluator.reads_patches, merge_every)
    family = protect(class_token=host.class_token, static=static)
    return evaluator.sweep(scale_to_target(evaluator, family, spread, target).recipe)
