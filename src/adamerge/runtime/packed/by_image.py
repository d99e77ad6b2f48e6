"""Runs the layers of a block on the packed rows of each image alone.

oneDNN computes a row in the same order for any number of rows.  Other layers can round by that number, so with adaptive
counts each image runs alone: its result is the same to the bit in any batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.recipe import Recipe
from adamerge.runtime.block_view import View
from adamerge.runtime.packed.layout import Layout
from adamerge.runtime.packed.onednn import OneDnnView


@dataclass(frozen=True)
class ImageLayers:
    """The layers of one block for an array of `rows` packed rows; each image has the rows between two bounds."""

    view: View
    bounds: Sequence[int]
    rows: int

    def qkv(self, x: Float[Tensor, "n d"]) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = zip(*map(self.view.qkv, self._images(x)), strict=True)
        return self._joined(query), self._joined(key), self._joined(value)

    def project(self, attended: Float[Tensor, "n h k"]) -> Float[Tensor, "n d"]:
        return self._joined([*map(self.view.project, self._images(attended))])

    def mlp(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return self._joined([*map(self.view.mlp, self._images(x))])

    def add_project(self, x: Float[Tensor, "n d"], attended: Float[Tensor, "n h k"]) -> Float[Tensor, "n d"]:
        """`x + project(attended)`."""
        return x + self.project(attended)

    def add_mlp(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """`x + mlp(x)`."""
        return x + self.mlp(x)

    def _images(self, rows: Tensor) -> list[Tensor]:
        return [rows[begin:end] for begin, end in pairwise(self.bounds)]

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The rows of all images, and unused rows of zeros after them."""
        if len(pieces) == 1 and len(pieces[0]) == self.rows:
            return pieces[0]
        unused = pieces[0].new_zeros((self.rows - self.bounds[-1], *pieces[0].shape[1:]))
        return torch.cat([*pieces, unused])


def layers_for(view: View, recipe: Recipe, layout: Layout, rows: int) -> OneDnnView | ImageLayers:
    """The layers of a block for an array of `rows` packed rows: oneDNN's or, of other views, for each image alone.

    Where the result may depend on the batch, and without images, all rows are one image.
    """
    if type(view) is OneDnnView:
        return view
    if recipe.ragged and layout.images:
        return ImageLayers(view, layout.bounds, rows)
    return ImageLayers(view, [0, rows], rows)
