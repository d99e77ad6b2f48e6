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
    """The layers of one block for an array of `rows` packed rows in this layout."""

    view: View
    layout: Layout
    rows: int

    def qkv(self, x: Float[Tensor, "n d"]) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = zip(*map(self.view.qkv, self._images(x)), strict=True)
        return self._joined(query), self._joined(key), self._joined(value)

    def project(self, attended: Float[Tensor, "n h k"]) -> Float[Tensor, "n d"]:
        return self._joined([*map(self.view.project, self._images(attended))])

    def mlp(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return self._joined([*map(self.view.mlp, self._images(x))])

    def _images(self, rows: Tensor) -> list[Tensor]:
        return [rows[begin:end] for begin, end in pairwise(self.layout.offsets.tolist())]

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The rows of all images, and unused rows of zeros after them."""
        unused = pieces[0].new_zeros((self.rows - self.layout.total, *pieces[0].shape[1:]))
        return torch.cat([*pieces, unused])


def layers_for(view: View, recipe: Recipe, layout: Layout, rows: int) -> View | ImageLayers:
    """The layers of a block for an array of `rows` packed rows: the view's own, or for each image alone."""
    if isinstance(view, OneDnnView) or not recipe.ragged or not layout.images:
        return view
    return ImageLayers(view, layout, rows)
