"""Carries out the merges of packed tokens on a CPU: rows that stay are copied, and only merged rows are averaged.

Numbers of rows are in NumPy: these arrays are so small that the calls take the time.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, from_numpy

from adamerge.core.combine import BySalience, BySize, Drop, MeanNorm
from adamerge.core.plan import Plan
from adamerge.core.recipe import Recipe
from adamerge.core.types import PerImage, PerToken
from adamerge.runtime.packed.layout import Layout, pad, ragged_layout, round_up_rows
from adamerge.runtime.packed.links import PackedLinks
from adamerge.runtime.packed.selection import Selection, redundancy_of
from adamerge.runtime.packed.split import ImageSplit
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.trace import LayerTrace


class MergedRows(NamedTuple):
    """The packed rows that merge: row `gone[i]` of image `image[i]` into row `target[i]`, both numbered before."""

    image: np.ndarray
    gone: np.ndarray
    target: np.ndarray


def merge_rows(state: PackedState, recipe: Recipe, links: PackedLinks, selection: Selection) -> PackedState:
    """The state after the selected links have merged."""
    layout = state.layout
    redundancy = partial(redundancy_of, links)
    if not any(selection.number):
        return _unchanged(state, links.salience, redundancy)
    counts = [n - merged for n, merged in zip(layout.counts, selection.number, strict=True)]
    after = ragged_layout(counts, layout.prefix, state.x.device)
    rows = _merged_rows(state, links, selection)
    stays = np.ones(layout.total, dtype=bool)
    stays[rows.gone] = False
    if recipe.order == "sources_first" and links.splits[0].step != 1:
        order = _sources_first(layout, links.splits[0], selection, rows)
        origin = order[stays[order]]
    else:
        origin = stays.nonzero()[0]
    slot = np.empty(layout.total, dtype=np.int64)
    slot[origin] = np.arange(after.total)
    goal = slot[rows.target]
    slot[rows.gone] = goal
    before = state.size.numpy()
    # An adaptive recipe leaves another number of tokens in every batch; see `round_up_rows`.
    unused = round_up_rows(after.total) - after.total if recipe.ragged else 0
    source = np.concatenate((origin, np.zeros(unused, dtype=np.int64))) if unused else origin
    size = before[source]
    np.add.at(size, goal, before[rows.gone])
    x = state.x.index_select(0, from_numpy(source))
    if not isinstance(recipe.combine, Drop):
        both = np.concatenate((rows.target, rows.gone))
        # One of the merged rows stands for all of the same slot: their sums are kept at its place.
        place = np.empty(after.total, dtype=np.int64)
        place[goal] = np.arange(len(goal))
        place = place[goal]
        if isinstance(recipe.weight, BySize):
            share = before[both] / np.concatenate((size[goal], size[goal]))
        else:
            share = _shares(_weights(state, recipe, links, both, rows.image), place)
        x.index_copy_(0, from_numpy(goal), _averages(state, recipe, both, share, place).to(x.dtype))
    history = slot[state.history.numpy() + layout.first_patches] - after.first_patches
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
    image, source, split = selection.image, selection.source, links.splits[0]
    begin = state.layout.first_patches[image, 0]
    first_target = split.first_target
    if split.step == 1 and not state.layout.uniform:
        first_target = np.array([each.first_target for each in links.splits])[image]
    target = first_target + split.step * links.target.numpy()[image, source]
    return MergedRows(image, begin + (split.first_source + split.step * source), begin + target)


def _sources_first(layout: Layout, split: ImageSplit, selection: Selection, rows: MergedRows) -> np.ndarray:
    """All rows in the order after the merge: in images that merge, the sources come before the targets."""
    order = _order_in_image(layout.longest, layout.prefix, split.first_source, split.first_target)
    if layout.uniform and min(selection.number):
        return (layout.first_patches - layout.prefix + order).ravel()
    merges = np.array(selection.number)[:, None] > 0
    order = np.where(merges, order, np.arange(layout.longest))
    row = layout.first_patches - layout.prefix + order
    # Places behind the last token of an image get a row that does not stay.
    return np.where(order < np.diff(layout.bounds)[:, None], row, rows.gone[0]).ravel()


@lru_cache(1024)
def _order_in_image(tokens: int, prefix: int, first_source: int, first_target: int) -> np.ndarray:
    """The tokens of an image: its prefix, its sources and its targets, which alternate."""
    every = np.arange(tokens)
    patches = every[prefix:]
    return np.concatenate([every[:prefix], patches[first_source::2], patches[first_target::2]])


def _shares(weight: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The weights of targets and of what merges into them, divided by their sums; all equal where a sum is 0."""
    merges = len(place)
    total = (weight[:merges] + np.bincount(place, weight[merges:], merges))[place]
    if not total.all():
        zero, members = total == 0, 1 + np.bincount(place, minlength=merges)[place]
        total, weight = np.where(zero, members, total), np.where(np.tile(zero, 2), 1, weight)
    return weight / np.concatenate((total, total))


def _averages(
    state: PackedState, recipe: Recipe, both: np.ndarray, share: np.ndarray, place: np.ndarray
) -> Float[Tensor, "m d"]:
    """The average that each merged row becomes part of, in float32 or better; rows of one slot get the same.

    `both` are the targets and then the rows that merge into them, with their shares.
    """
    wide = torch.promote_types(state.x.dtype, torch.float32)
    part = from_numpy(share).to(wide)[:, None]
    tokens, index = state.x.index_select(0, from_numpy(both)).to(wide), from_numpy(place)
    mean = _sums(tokens * part, index)
    if not isinstance(recipe.combine, MeanNorm):
        return mean
    length = _sums(tokens.norm(dim=-1, keepdim=True) * part, index)
    factor = length / mean.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
    # A mean of norm 0 has no direction and is not rescaled.
    return mean * torch.where(factor.isfinite(), factor, 1)


def _sums(both: Float[Tensor, "members d"], place: Tensor) -> Float[Tensor, "m d"]:
    """The parts of targets, which are the first half, and of all that merge into them, added up."""
    target, gone = both.chunk(2)
    return target.index_add_(0, place, gone).index_select(0, place)


def _weights(state: PackedState, recipe: Recipe, links: PackedLinks, both: np.ndarray, image: np.ndarray) -> np.ndarray:
    """The weights, by salience, of targets and of the tokens that merge into them in their averages."""
    size = state.size.numpy()[both]
    salience = np.ones_like(size)
    if links.salience is not None:
        images = np.concatenate((image, image))
        salience = links.salience.numpy()[images, both - state.layout.first_patches[images, 0]]
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
