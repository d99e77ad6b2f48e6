"""What the library knows of a method besides its function: the knob that sets its cost."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adamerge.core.recipe import Recipe


@dataclass(frozen=True)
class Method:
    """A method by name: the function that makes its recipe, and the parameter that trades accuracy for cost.

    `gentle` is the knob's value that merges least, `strong` the one that merges most; the cost falls from one to the
    other.  `fixed` are options of a variant.
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
