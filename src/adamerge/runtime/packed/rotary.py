"""Turns queries and keys of packed rows by the places of their tokens: rotary position embedding on a CPU."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from adamerge.runtime.block_view import RotaryView, View
from adamerge.runtime.packed.layout import PackedHeads
from adamerge.runtime.packed.state import PackedState


@dataclass(frozen=True)
class RowTables:
    """Cosines and sines for each packed row, `(rows, heads or 1, k)`, and the tables and history they come from.

    The sine of the first channel of each pair has its sign changed.
    """

    tables: tuple[Tensor, ...]
    history: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool


class RowTurner:
    """Turns the queries and keys of one forward pass.  Rows of tables are read again after a merge."""

    def __init__(self) -> None:
        self._read: RowTables | None = None

    def turn(
        self, query: PackedHeads, key: PackedHeads, state: PackedState, view: View, tables: tuple[Tensor, ...]
    ) -> tuple[PackedHeads, PackedHeads]:
        """Queries and keys, turned; `tables` are those that the host handed to the block of `view`."""
        read = self._read
        same = read is not None and read.history is state.history and len(query) == len(read.cos)
        if read is None or not same or any(map(lambda new, old: new is not old, tables, read.tables)):
            read = self._read = read_rows(state, cast(RotaryView, view), tables)
        return turn_rows(query, read), turn_rows(key, read)


def read_rows(state: PackedState, view: RotaryView, tables: tuple[Tensor, ...]) -> RowTables:
    """The rows of the tables at the place of each packed row.  Prefix tokens and unused rows are turned by nothing."""
    rotation = view.rotation(tables)
    sign = torch.ones(rotation.sin.shape[-1], dtype=rotation.sin.dtype)
    (sign[::2] if rotation.interleaved else sign[: len(sign) // 2]).fill_(-1)
    place = torch.from_numpy(row_places(state))
    cos, sin = (_at_places(*both, place) for both in ((rotation.cos, 1.0), (rotation.sin * sign, 0.0)))
    return RowTables(tables, state.history, cos, sin, rotation.interleaved)


def row_places(state: PackedState) -> np.ndarray:
    """The first patch that the token of each packed row stands for; the number of patches for all other rows."""
    history = state.history.numpy()
    images, patches = history.shape
    place = np.full(len(state.x), patches, dtype=np.int64)
    row = history + state.layout.first_patches
    np.minimum.at(place, row.ravel(), np.tile(np.arange(patches), images))
    return place


def _at_places(table: Tensor, nowhere: float, place: Tensor) -> Tensor:
    """Rows of a table, `(patches, k)` or `(heads, patches, k)`; rows behind its last are full of `nowhere`."""
    table = table if table.dim() == 3 else table[None]
    longer = torch.nn.functional.pad(table, (0, 0, 0, 1), value=nowhere)
    return longer.index_select(1, place).transpose(0, 1)


def turn_rows(x: PackedHeads, rows: RowTables) -> PackedHeads:
    """Queries or keys, turned.  Every number is rounded after each product and sum, as in any other batch."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2) if rows.interleaved else (2, half))
    other = pairs.flip(-1 if rows.interleaved else -2).flatten(-2)
    return (x * rows.cos).add_(other * rows.sin).to(x.dtype)
