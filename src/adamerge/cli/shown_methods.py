"""The methods of `adamerge show`: recipe files, methods with their own options, and methods at a cut."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from adamerge.calibration import calibrate
from adamerge.cli.lists import read_labels
from adamerge.cli.options import find_method, read_options
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.methods import METHODS
from adamerge.search.solve_variant import check_variant, solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import PRESET, Variant, find_variant

Wanted = Recipe | Variant


def read_wanted(method: str | None, words: Sequence[str], recipes: Sequence[Path]) -> dict[str, Wanted]:
    """What to show, by label: recipes as they are, and variants that have to be solved for the cut."""
    found: dict[str, Wanted] = {path.stem: Recipe.load(path) for path in recipes}
    labels = read_labels(method) if method is not None else [] if found else [PRESET]
    if words and len(labels) != 1:
        raise BadOption(
            f"options of a method need exactly one --method; got {' '.join(words)!r} and {labels or 'none'}"
        )
    for label in labels:
        found[label] = _with_options(label, words) if words else _plain(label)
    return found


def _plain(label: str) -> Wanted:
    """A method without options: at the cut, unless it has no knob."""
    if label in METHODS and METHODS[label].knob is None:
        return METHODS[label]()
    return find_variant(label) if label not in METHODS else Variant(label)


def _with_options(label: str, words: Sequence[str]) -> Wanted:
    """A method with options: at the cut, unless one of them sets its strength."""
    method = find_method(label)
    options = read_options(label, method.make, words)
    if method.knob is None or method.knob in options or options.get("r") is not None:
        return method(**options)
    variant = Variant(label, options)
    check_variant(variant)
    return variant


def make_recipes(
    model: nn.Module, wanted: Mapping[str, Wanted], cut: float, images: Callable[[], Sequence[Tensor]]
) -> dict[str, Recipe]:
    """The recipes, solved for the cut and calibrated on `images()` where that is needed."""
    target, known = Target(cut=cut), None
    found: dict[str, Recipe] = {}
    for label, one in wanted.items():
        if isinstance(one, Recipe) and (one.adaptive is None or one.stats is not None):
            found[label] = one
            continue
        known = images() if known is None else known
        given: Any = list(known)
        if isinstance(one, Recipe):
            found[label] = one.with_stats(calibrate(model, given, one, progress=False))
        else:
            found[label] = solve_variant(model, given, one, target).recipe
    return found
