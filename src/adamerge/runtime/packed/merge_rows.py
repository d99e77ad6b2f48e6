"""Carries out the merges of packed tokens on a CPU: rows that stay are copied, and only merged rows are averaged.

Numbers of rows are in NumPy: these arrays are so small that the calls take the time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, from_numpy

from adamerge.core.combine import BySalience, BySalienceAndSize, Drop, MeanNorm
from adamerge.core.plan import Plan
from adamerge.core.recipe import Recipe
from adamerge.core.types import PerImage, PerToken
from adamerge.runtime.packed.layout import Layout, pad, ragged_layout, round_up_rows
from adamerge.runtime.packed.links import PackedLinks
from adamerge.runtime.packed.selection import Selection, redundancy_of
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.trace import LayerTrace


@dataclass(frozen=True)
class MergedRows:
    """The packed rows that merge: row `gone[i]` into row `target[i]`, both numbered before the merge.

    `cell` and `target_cell` are the places of their tokens in a `(b, patches)` array.
    """

    gone: np.ndarray
    target: np.ndarray
    cell: np.ndarray
    target_cell: np.ndarray


def merge_rows(state: PackedState, recipe: Recipe, links: PackedLinks, selection: Selection) -> PackedState:
    """The state after the selected links have merged."""
    layout = state.layout
    counts = [n - merged for n, merged in zip(layout.counts, selection.number, strict=True)]
    redundancy = partial(redundancy_of, links)
    if counts == layout.counts:
        return _unchanged(state, links.salience, redundancy)
    after = ragged_layout(counts, layout.prefix, state.x.device)
    rows = _merged_rows(state, links, selection)
    origin = _staying_rows(layout, rows, links, selection, recipe.order == "sources_first")
    slot = np.empty(layout.total, dtype=np.int64)
    slot[origin] = np.arange(after.total)
    goal = slot[rows.target]
    slot[rows.gone] = goal
    # An adaptive recipe leaves another number of tokens in every batch; see `round_up_rows`.
    allocated = round_up_rows(after.total) if recipe.ragged else after.total
    source = np.zeros(allocated, dtype=np.int64)
    source[: after.total] = origin
    x = state.x.index_select(0, from_numpy(source))
    before = state.size.numpy()
    size = before[source]
    np.add.at(size, goal, before[rows.gone])
    if not isinstance(recipe.combine, Drop):
        x.index_copy_(0, from_numpy(goal), _averages(state, recipe, links, rows, goal).to(x.dtype))
    shift = np.array(after.bounds[:-1])[:, None] + layout.prefix
    history = slot[state.history.numpy() + (np.array(layout.bounds[:-1])[:, None] + layout.prefix)] - shift
    record = partial(build_layer_trace, layout, after, from_numpy(slot), from_numpy(size), links.salience, redundancy)
    return state.with_changes(
        x=x,
        size=from_numpy(size),
        layout=after,
        history=from_numpy(history.astype(np.int32)),
        merged=True,
        steps=(*state.steps, record),
    )


def merge_nothing(state: PackedState) -> PackedState:
    """The state after a layer at which the recipe cannot merge."""
    wide = torch.promote_types(state.x.dtype, torch.float32)
    return _unchanged(state, None, lambda: torch.zeros(state.layout.images, dtype=wide))


def _unchanged(state: PackedState, salience: PerToken | None, redundancy: Callable[[], PerImage]) -> PackedState:
    layout = state.layout
    record = partial(build_layer_trace, layout, layout, None, state.size, salience, redundancy)
    return state.with_changes(steps=(*state.steps, record))


def _merged_rows(state: PackedState, links: PackedLinks, selection: Selection) -> MergedRows:
    """The rows of the selected links, in the order of the batch."""
    layout, patches = state.layout, state.history.shape[1]
    image, source = selection.image, selection.source
    split = links.splits[0]
    own = split.first_source + split.step * source
    first_target = np.array([each.first_target for each in links.splits])[image]
    target = first_target + split.step * links.target.numpy()[image, source]
    begin, cell = np.array(layout.bounds)[image] + layout.prefix, patches * image
    return MergedRows(begin + own, begin + target, cell + own, cell + target)


def _staying_rows(
    layout: Layout, rows: MergedRows, links: PackedLinks, selection: Selection, sources_first: bool
) -> np.ndarray:
    """The rows that stay, in their new order: unchanged, or in images that merge the sources before the targets."""
    stays = np.ones(layout.total, dtype=bool)
    stays[rows.gone] = False
    split = links.splits[0]
    if not sources_first or split.step == 1:
        return stays.nonzero()[0]
    tokens = np.arange(layout.longest)
    patches = tokens[layout.prefix :]
    order = np.concatenate(
        [tokens[: layout.prefix], patches[split.first_source :: 2], patches[split.first_target :: 2]]
    )
    if not min(selection.number):
        order = np.where(np.array(selection.number)[:, None] > 0, order, tokens)
    bounds = np.array(layout.bounds)
    row = bounds[:-1, None] + order
    if not layout.uniform:
        # Places behind the last token of an image get a row that does not stay.
        row = np.where(order < np.diff(bounds)[:, None], row, rows.gone[0])
    return row[stays[row]]


def _averages(
    state: PackedState, recipe: Recipe, links: PackedLinks, rows: MergedRows, goal: np.ndarray
) -> Float[Tensor, "m d"]:
    """The average that each merged row becomes part of, in float32 or better; rows of one slot get the same."""
    weight = _weights(state, recipe, links, rows.gone, rows.cell)
    own = _weights(state, recipe, links, rows.target, rows.target_cell)
    # One of the merged rows stands for all of the same slot: their sums are kept at its place.
    place = np.empty(goal.max() + 1, dtype=np.int64)
    place[goal] = np.arange(len(goal))
    place = place[goal]
    total = (own + np.bincount(place, weight, len(goal)))[place]
    members = 1 + np.bincount(place, minlength=len(goal))[place]
    zero = total == 0
    if zero.any():
        total, weight, own = (np.where(zero, *both) for both in ((members, total), (1, weight), (1, own)))
    wide = torch.promote_types(state.x.dtype, torch.float32)
    share, own = (from_numpy(each / total).to(wide)[:, None] for each in (weight, own))
    gone, kept = (state.x.index_select(0, from_numpy(each)).to(wide) for each in (rows.gone, rows.target))
    index = from_numpy(place)
    mean = (own * kept).index_add_(0, index, share * gone).index_select(0, index)
    if not isinstance(recipe.combine, MeanNorm):
        return mean
    gone, kept = (each.norm(dim=-1, keepdim=True) for each in (gone, kept))
    length = (own * kept).index_add_(0, index, share * gone).index_select(0, index)
    factor = length / mean.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
    # A mean of norm 0 has no direction and is not rescaled.
    return mean * torch.where(factor.isfinite(), factor, 1)


def _weights(state: PackedState, recipe: Recipe, links: PackedLinks, row: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """The weights of some tokens in the averages that they become part of."""
    size = state.size.numpy()[row]
    if not isinstance(recipe.weight, (BySalience, BySalienceAndSize)):
        return size
    salience = np.ones_like(size) if links.salience is None else links.salience.numpy().reshape(-1)[cell]
    return salience if isinstance(recipe.weight, BySalience) else salience * size


def build_layer_trace(
    before: Layout,
    after: Layout,
    slot: Tensor | None,
    size: Tensor,
    salience: PerToken | None,
    redundancy: Callable[[], PerImage],
) -> LayerTrace:
    """The trace of one layer.

    Args:
        before: the layout before the merge.
        after: the layout after it.
        slot: for every row before the merge, the row after it that it became part of; None if nothing merged.
        size: the sizes after the merge.
        salience: of every patch token before the merge, `(b, patches)`; None if all were equal.
        redundancy: computes the redundancy of every image.
    """
    slot = torch.arange(before.total) if slot is None else slot
    exists = torch.arange(before.most) < before.patches[:, None]
    own = pad(slot, before, before.most) - after.offsets[:-1, None] - after.prefix
    plan = Plan(torch.where(exists, own, -1), after.patches.long(), after.most, ragged=not after.uniform)
    mean = redundancy()
    shown = exists.to(mean.dtype) if salience is None else salience[:, : before.most]
    return LayerTrace(plan, shown, pad(size, after, after.most).to(mean.dtype), mean)
