"""The recipes of a benchmark: variants solved for a target cost, as in a comparison."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from tqdm import tqdm

from adamerge.core.errors import AdamergeError
from adamerge.core.recipe import Recipe
from adamerge.data.batches import Images
from adamerge.flops import CostCount, check_cost
from adamerge.methods import METHODS
from adamerge.search.solve import make_calibrated_recipe
from adamerge.search.solve_variant import check_variant, solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import Variant, find_variant


@dataclass(frozen=True)
class Entry:
    """A recipe with its name, options and target; `error` says why there is no recipe."""

    method: str
    recipe: Recipe | None
    options: str = ""
    knob: float | None = None
    target: str = ""
    cost: str = ""
    error: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """The entry's columns in a row."""
        return {"options": self.options, "knob": self.knob, "target": self.target, "cost": self.cost}


def make_entries(
    model: nn.Module,
    calibration: Images,
    methods: Sequence[str] | Mapping[str, Variant],
    targets: Sequence[Target | float],
    *,
    native: Mapping[str, Variant] | None = None,
    recipes: Mapping[str, Recipe] | None = None,
    cost: CostCount = "true",
    tolerance: float = 0.005,
    progress: bool = True,
) -> list[Entry]:
    """Every method at every target, calibrated if it adapts; an unreachable target gives an entry with an error.

    Args:
        model: a supported model; restored afterwards.
        calibration: images to solve targets and calibrate on; use others for timing.
        methods: labels of `VARIANTS` or `PRESETS`, or variants by label.
        targets: cuts, or Targets.
        native: further variants whose options set their strength.
        recipes: further recipes by label, such as those of `adamerge.tune`.
        cost: the count of multiply-accumulates that the targets are given in, "true" or "paper".
        tolerance: how far a cost may be from its target, as a share of it.
        progress: show a progress bar.
    """
    check_cost(cost)
    chosen = dict(methods) if isinstance(methods, Mapping) else {label: find_variant(label) for label in methods}
    native = native or {}
    for variant in chosen.values():
        check_variant(variant)
    for variant in native.values():
        check_variant(variant, native=True)
    goals = [target if isinstance(target, Target) else Target(cut=target) for target in targets]
    asked: list[tuple[str, Variant, Target | None]] = [
        (label, v, goal) for goal in goals for label, v in chosen.items()
    ]
    asked += [(label, variant, None) for label, variant in native.items()]
    shown = tqdm(asked, "solving", leave=False, disable=not progress)
    solved = [_entry(model, calibration, *one, cost, tolerance) for one in shown]
    return solved + [Entry(label, recipe, target="recipe", cost=cost) for label, recipe in (recipes or {}).items()]


def _entry(
    model: nn.Module,
    calibration: Images,
    label: str,
    variant: Variant,
    target: Target | None,
    cost: CostCount,
    tolerance: float,
) -> Entry:
    how = variant.how
    options = json.dumps({**variant.options, **({} if how is None else {"how": how})})
    words = "native" if target is None else str(target)
    try:
        if target is None:
            method = METHODS[variant.method]
            recipe = make_calibrated_recipe(model, calibration, method, variant.options, how)
            return Entry(label, recipe, options, variant.options.get(str(method.knob)), words, cost)
        found = solve_variant(model, calibration, variant, target, cost=cost, tolerance=tolerance)
        return Entry(label, found.recipe, options, found.knob, words, cost)
    except AdamergeError as error:
        return Entry(label, None, options, None, words, cost, f"{type(error).__name__}: {error}")
