"""Input and output of the functions that draw an object: `Sketch` and `Layer`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_FAR_AWAY = 1e3


@dataclass(frozen=True)
class Sketch:
    """Input of a drawing: pixel positions in the object's frame, its variant, its colours and random numbers.

    `x` and `y` are (n, height, width), colours (n, 3, 1, 1), `variant` (n, 1, 1).  `variation` has two random numbers
    in [0, 1), each (n, 1, 1), for details that do not change the class.
    """

    x: Tensor
    y: Tensor
    variant: Tensor
    main: Tensor
    second: Tensor
    light: Tensor
    dark: Tensor
    leaf: Tensor
    wood: Tensor
    variation: tuple[Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """A shape, given by its signed distance, filled with a colour.  The silhouette is the union of `solid` layers."""

    distance: Tensor
    colour: Tensor
    solid: bool = False


def only(distance: Tensor, wanted: Tensor) -> Tensor:
    """The shape in images where `wanted` is True; in the others its distance is so large that it is not drawn."""
    return distance + (~wanted) * _FAR_AWAY
