"""An entry of the table of methods: a function that makes recipes, and its knob, the option that sets the cost."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adamerge.core.recipe import Recipe


@dataclass(frozen=True)
class Method:
    """A method: `make` returns its recipe, and `knob` names the option that trades accuracy for cost.

    The knob's value `gentle` merges least and `strong` merges most; the cost falls from the first to the second.
    `fixed` are options that a variant of a method sets.  A `Method` is called with the options of `make`.
    """

    make: Callable[..., Recipe]
    knob: str | None = None
    gentle: float = 0
    strong: float = 0
    fixed: tuple[tuple[str, Any], ...] = ()

    def __call__(self, **options: Any) -> Recipe:
        return self.make(**{**dict(self.fixed), **options})

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.make.__doc__ or "").strip().splitlines()[0]
