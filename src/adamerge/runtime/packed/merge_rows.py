"""Carries out the merges of packed tokens on a CPU: rows that stay are copied, and only merged rows are averaged."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.combine import BySalience, BySalienceAndSize, Drop, MeanNorm
from adamerge.core.plan import Plan
from adamerge.core.recipe import Recipe
from adamerge.core.types import PerImage, PerToken
from adamerge.runtime.packed.layout import Layout, PerRow, RowSlots, pad, ragged_layout, round_up_rows
from adamerge.runtime.packed.links import PackedLinks
from adamerge.runtime.packed.selection import Selection, redundancy_of
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.trace import LayerTrace


@dataclass(frozen=True)
class MergedRows:
    """The packed rows that merge: row `gone[i]` into row `target[i]`, both numbered before the merge.

    `cell` and `target_cell` are the places of their tokens in a `(b, patches)` array.
    """

    gone: RowSlots
    target: RowSlots
    cell: RowSlots
    target_cell: RowSlots


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
    slot = torch.empty(layout.total, dtype=torch.long)
    slot[origin] = torch.arange(after.total)
    goal = slot[rows.target]
    slot[rows.gone] = goal
    # An adaptive recipe leaves another number of tokens in every batch; see `round_up_rows`.
    allocated = round_up_rows(after.total) if recipe.ragged else after.total
    source = torch.nn.functional.pad(origin, (0, allocated - after.total))
    x, size = state.x.index_select(0, source), state.size.index_select(0, source)
    if not isinstance(recipe.combine, Drop):
        x.index_copy_(0, goal, _averages(state, recipe, links, rows, goal).to(x.dtype))
    size.index_add_(0, goal, state.size.index_select(0, rows.gone))
    before, behind = layout.offsets[:-1, None] + layout.prefix, after.offsets[:-1, None] + layout.prefix
    history = (slot[state.history + before] - behind).int()
    record = partial(build_layer_trace, layout, after, slot, size, links.salience, redundancy)
    return replace(state, x=x, size=size, layout=after, history=history, merged=True, steps=(*state.steps, record))


def merge_nothing(state: PackedState) -> PackedState:
    """The state after a layer at which the recipe cannot merge."""
    wide = torch.promote_types(state.x.dtype, torch.float32)
    return _unchanged(state, None, lambda: torch.zeros(state.layout.images, dtype=wide))


def _unchanged(state: PackedState, salience: PerToken | None, redundancy: Callable[[], PerImage]) -> PackedState:
    layout = state.layout
    record = partial(build_layer_trace, layout, layout, None, state.size, salience, redundancy)
    return replace(state, steps=(*state.steps, record))


def _merged_rows(state: PackedState, links: PackedLinks, selection: Selection) -> MergedRows:
    """The rows of the selected links, in the order of the batch."""
    layout, patches = state.layout, state.history.shape[1]
    image, source = selection.merged.nonzero(as_tuple=True)
    split = links.splits[0]
    own = split.first_source + split.step * source
    first_target = torch.tensor([each.first_target for each in links.splits])
    target = first_target[image] + split.step * links.target[image, source]
    begin, cell = (layout.offsets + layout.prefix)[image], patches * image
    return MergedRows(begin + own, begin + target, cell + own, cell + target)


def _staying_rows(
    layout: Layout, rows: MergedRows, links: PackedLinks, selection: Selection, sources_first: bool
) -> RowSlots:
    """The rows that stay, in their new order: unchanged, or in images that merge the sources before the targets."""
    stays = torch.ones(layout.total, dtype=torch.bool)
    stays[rows.gone] = False
    split = links.splits[0]
    if not sources_first or split.step == 1:
        return stays.nonzero()[:, 0]
    tokens = torch.arange(layout.longest)
    patches = tokens[layout.prefix :]
    order = torch.cat([tokens[: layout.prefix], patches[split.first_source :: 2], patches[split.first_target :: 2]])
    if not min(selection.number):
        order = torch.where(torch.tensor(selection.number)[:, None] > 0, order, tokens)
    row = layout.offsets[:-1, None] + order
    if not layout.uniform:
        # Places behind the last token of an image get a row that does not stay.
        row = torch.where(order < layout.offsets.diff()[:, None], row, rows.gone[0])
    return row[stays[row]]


def _averages(
    state: PackedState, recipe: Recipe, links: PackedLinks, rows: MergedRows, goal: RowSlots
) -> Float[Tensor, "m d"]:
    """The average that each merged row becomes part of, in float32 or better; rows of one slot get the same."""
    weight = _weights(state, recipe, links, rows.gone, rows.cell)
    own = _weights(state, recipe, links, rows.target, rows.target_cell)
    # One of the merged rows stands for all of the same slot: their sums are kept at its place.
    place = torch.empty(int(goal.max()) + 1, dtype=torch.long)
    place[goal] = torch.arange(len(goal))
    place = place[goal]
    total = own.index_add(0, place, weight)[place]
    members = torch.ones_like(own).index_add(0, place, torch.ones_like(weight))[place]
    divisor = torch.where(total == 0, 1, total)
    share, own = (torch.where(total == 0, 1 / members, each / divisor)[:, None] for each in (weight, own))
    gone, kept = (state.x.index_select(0, each).to(share.dtype) for each in (rows.gone, rows.target))
    mean = (own * kept).index_add_(0, place, share * gone)[place]
    if not isinstance(recipe.combine, MeanNorm):
        return mean
    gone, kept = (each.norm(dim=-1, keepdim=True) for each in (gone, kept))
    length = (own * kept).index_add_(0, place, share * gone)[place]
    factor = length / mean.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
    # A mean of norm 0 has no direction and is not rescaled.
    return mean * torch.where(factor.isfinite(), factor, 1)


def _weights(state: PackedState, recipe: Recipe, links: PackedLinks, row: RowSlots, cell: RowSlots) -> PerRow:
    """The weights of some tokens in the averages that they become part of."""
    size = state.size[row].to(torch.promote_types(state.x.dtype, torch.float32))
    if not isinstance(recipe.weight, (BySalience, BySalienceAndSize)):
        return size
    salience = torch.ones_like(size) if links.salience is None else links.salience.flatten()[cell]
    return salience if isinstance(recipe.weight, BySalience) else salience * size


def build_layer_trace(
    before: Layout,
    after: Layout,
    slot: RowSlots | None,
    size: Float[Tensor, " rows"],
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
