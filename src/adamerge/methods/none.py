"""The unmerged model, as a recipe."""

from adamerge.core.recipe import Recipe
from adamerge.methods.tome import tome


def none() -> Recipe:
    """Merge nothing: bit for bit the host."""
    return tome(0)
