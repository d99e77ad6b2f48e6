"""What a drawing is given and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_NOWHERE = 1e3


@dataclass(frozen=True)
class Sketch:
    """Where and with what to draw: pixel positions in the object's frame, its colours and its whims.

    Positions are (n, height, width), colours (n, 3, 1, 1), the variant and every whim in [0, 1) (n, 1, 1).
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
    """A shape filled with a colour; `solid` layers make up the silhouette, the others lie inside it."""

    distance: Tensor
    colour: Tensor
    solid: bool = False


def only(distance: Tensor, wanted: Tensor) -> Tensor:
    """Move the shape out of sight in the images that do not want it."""
    return distance + (~wanted) * _NOWHERE
