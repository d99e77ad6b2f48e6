"""Finds the recipe of a variant at a target cost: by the knob of its method, or by scaling the rates of the preset."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from adamerge.core.errors import BadOption
from adamerge.data.batches import Images
from adamerge.flops import CostCount
from adamerge.methods import METHODS
from adamerge.search.evaluator import Evaluator, gather_images
from adamerge.search.options import check_merge_every
from adamerge.search.scaling import sweep_preset
from adamerge.search.solve import Solution, make_recipe, solve
from adamerge.search.target import Target
from adamerge.search.variants import PRESET, Variant

PRESET_OPTIONS = ("loss", "static", "merge_every")


def check_variant(variant: Variant, *, native: bool = False) -> None:
    """Refuse a variant of an unknown method, or with options that it does not take.

    The options of a `native` variant have to set its strength; those of others have to leave it open.
    """
    if variant.method == PRESET:
        _check_preset(variant.options, native)
        return
    if variant.method not in METHODS:
        raise BadOption(f"there is no method {variant.method!r}; choose one of {', '.join((*METHODS, PRESET))}")
    method = METHODS[variant.method]
    make_recipe(method, variant.options if native else {**variant.options, str(method.knob): method.gentle})


def solve_variant(
    model: nn.Module,
    images: Images,
    variant: Variant,
    target: Target,
    *,
    cost: CostCount = "true",
    tolerance: float = 0.005,
) -> Solution:
    """The recipe of `variant` whose mean cost over `images` meets the target, calibrated; the model is not changed."""
    if variant.method != PRESET:
        options: dict[str, Any] = {"options": variant.options, "how": variant.how}
        return solve(model, images, METHODS[variant.method], target, cost=cost, tolerance=tolerance, **options)
    evaluator = Evaluator(model, gather_images(model, images), cost=cost, loss=variant.options.get("loss"))
    goal = target.macs_below(evaluator.full)
    found = sweep_preset(evaluator, target, variant.options.get("static", False), variant.options.get("merge_every", 1))
    macs = found.macs.mean().item()
    return Solution(
        recipe=found.recipe,
        knob=None,
        gmacs=macs / 1e9,
        cut=1 - macs / evaluator.full,
        target_cut=1 - goal / evaluator.full,
        met=abs(macs / goal - 1) <= tolerance,
    )


def _check_preset(options: Mapping[str, Any], native: bool) -> None:
    if native:
        raise BadOption("a preset is made for a cost and has no parameters of its own; give it among the methods")
    unknown = [name for name in options if name not in PRESET_OPTIONS]
    if unknown:
        raise BadOption(f"a preset takes the options {', '.join(PRESET_OPTIONS)}; got {', '.join(unknown)}")
    check_merge_every(options.get("merge_every", 1))
