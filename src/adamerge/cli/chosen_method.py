"""The method of `eval` and `flops`: a recipe, or something that becomes one with a model and images to calibrate on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from adamerge.calibration import calibrate
from adamerge.cli.options import RECIPE, read_options, read_recipe
from adamerge.core.recipe import Recipe
from adamerge.flops import CostCount, check_cost
from adamerge.search.evaluator import Loss, check_loss
from adamerge.search.options import check_merge_every
from adamerge.search.solve_variant import solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import PRESET, Variant


def preset(
    cut: float = 0.3,
    gmacs: float | None = None,
    cost: CostCount = "true",
    loss: Loss | None = None,
    static: bool = False,
    merge_every: int = 1,
) -> "PresetChoice":
    """The recipe of `adamerge.presets.best`: ours, good at any cost, calibrated on images, nothing searched."""
    check_cost(cost)
    check_loss(loss)
    check_merge_every(merge_every)
    target = Target(gmacs=gmacs) if gmacs is not None else Target(cut=cut)
    return PresetChoice(target, cost, Variant(PRESET, {"loss": loss, "static": static, "merge_every": merge_every}))


@dataclass(frozen=True)
class PresetChoice:
    """The preset at a cost."""

    target: Target
    cost: CostCount
    variant: Variant

    def make(self, model: nn.Module, images: Iterable[Any]) -> Recipe:
        """The recipe for a model, calibrated on these images."""
        return solve_variant(model, list(images), self.variant, self.target, cost=self.cost).recipe


Choice = Recipe | PresetChoice


def read_choice(name: str, words: Sequence[str]) -> tuple[str, Choice]:
    """The name of the method for reports, and the method `name` with the options in `words`."""
    if any(word.partition("=")[0] == "--recipe" for word in words):
        name = RECIPE
    if name == PRESET:
        return name, preset(**read_options(name, preset, words))
    return name, read_recipe(name, words)


def make_calibrated(choice: Choice, model: nn.Module, images: Callable[[], Iterable[Any]], given: bool) -> Recipe:
    """The recipe of a choice.

    A preset is always made on `images()`.  A recipe that needs statistics and has none is calibrated on them if they
    were `given` by the user.
    """
    if isinstance(choice, PresetChoice):
        return choice.make(model, images())
    if given and choice.adaptive is not None and choice.stats is None:
        return choice.with_stats(calibrate(model, list(images()), choice))
    return choice
