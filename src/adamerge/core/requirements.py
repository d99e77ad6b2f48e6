"""Whether a recipe can run on a model, known before the first image."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe


def check_can_run(recipe: Recipe, depth: int, class_token: bool, *, with_stats: bool = True) -> None:
    """Refuse a recipe that cannot run on a model of `depth` blocks, with or without a class token.

    A part says what it needs by class attributes: `needs_attention`, the name of what it reads of the attention, and
    `needs_class_token`.  Statistics are not asked for without `with_stats`.
    """
    parts = list(_parts(recipe))
    for one in parts:
        check = getattr(one, "check_depth", None)
        if check is not None:
            check(depth, with_stats=with_stats)
    if not any(recipe.may_merge(layer, depth) for layer in range(depth)):
        return
    for one in parts:
        if getattr(one, "budget", recipe.budget) != recipe.budget:
            raise BadOption(f"{one} was made for another budget than the recipe's, {recipe.budget}; give both the same")
        what = getattr(one, "needs_attention", None)
        if what is not None and recipe.site == "before_block":
            raise BadOption(
                f"{one} reads attention {what}, which do not exist before the block; "
                "use site='after_attention', or a part that reads the tokens"
            )
        if getattr(one, "needs_class_token", False) and not class_token:
            raise BadOption(
                f"{one} reads the class token's attention, but this model has no class token; "
                "use a part that reads the tokens or the keys"
            )


def _parts(value: Any) -> Iterator[Any]:
    """A part and all parts inside it, apart from the recipe itself."""
    if not is_dataclass(value):
        return
    if not isinstance(value, Recipe):
        yield value
    for each in fields(value):
        yield from _parts(getattr(value, each.name))
