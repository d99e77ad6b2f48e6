"""The backend that runs while a merged model is exported: what the reference gives, in operators that engines have."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adamerge.core.combine import BySize, part_at
from adamerge.core.evidence import Heads
from adamerge.core.recipe import Recipe
from adamerge.exporting.folding import merge_pairs
from adamerge.exporting.pairs import find_pairs
from adamerge.exporting.state import ExportState, rows, start
from adamerge.hosts.base import Host
from adamerge.patching.pruning import pruning_patches
from adamerge.patching.stack import Stack
from adamerge.patching.whole_pass import whole_pass_patches
from adamerge.runtime.block_view import View
from adamerge.runtime.reference import Tables, at_places, attend
from adamerge.runtime.trace import BuildTrace, Trace


class ExportHeads(Heads):
    """Queries, keys and values, with the mean over heads as a sum of slices.

    OpenVINO 2026.4 takes six to nine times as long for a mean over a middle dimension.
    """

    def mean_keys(self, prefix: int, dtype: torch.dtype) -> Tensor:
        first, *others = self.key.to(dtype).unbind(2)
        return (sum(others, first) / (1 + len(others)))[:, prefix:]


class ExportBackend:
    """One pass through the blocks, with static shapes besides the number of images."""

    def __init__(self, x: Tensor, views: Sequence[View], recipe: Recipe, host: Host, unfolded: bool):
        self.views, self.recipe, self.unfolded = views, recipe, unfolded
        self.state = start(x, host.prefix, host.class_token)

    def step(self, layer: int, tables: Tables = ()) -> None:
        state, view, recipe = replace(self.state, tables=tables, layer=layer), self.views[layer], self.recipe
        if recipe.site == "after_attention":
            state, heads = attention(state, view, recipe)
            state = merge(state, recipe, len(self.views), heads)
        else:
            state = merge(state, recipe, len(self.views), None)
            state, _ = attention(state, view, recipe)
        self.state = replace(state, x=state.x + view.mlp(state.x))

    def finish(self) -> Tensor:
        state = self.state
        return rows(state.x, state.slot) if self.unfolded and state.slot is not None else state.x

    def build_trace(self) -> Trace | BuildTrace:
        return _no_trace


def _no_trace() -> Trace:
    raise NotImplementedError("an exported model keeps no trace")


def merge(state: ExportState, recipe: Recipe, depth: int, heads: Heads | None) -> ExportState:
    """Decide the merge of one layer and carry it out."""
    if not recipe.may_merge(state.layer, depth):
        return state
    evidence = state.evidence(depth, heads)
    salience = recipe.salience(evidence)
    pairs = find_pairs(recipe, evidence, salience)
    if pairs is None:
        return state
    weight = None if isinstance(recipe.weight, BySize) else recipe.weight(evidence, salience)
    return merge_pairs(state, pairs, weight, part_at(recipe.combine, state.layer, depth))


def attention(state: ExportState, view: View, recipe: Recipe) -> tuple[ExportState, Heads]:
    """The attention half of a block, and its queries, keys and values."""
    query, key, value = view.qkv(state.x)
    if state.tables:
        query, key = turn(state, view, query), turn(state, view, key)
    extra = bias(state, recipe.proportional_attention)
    attended = attend(view, query, key, value, extra)
    return replace(state, x=state.x + view.project(attended)), ExportHeads(query, key, value, view.scale, extra)


def turn(state: ExportState, view: View, x: Tensor) -> Tensor:
    """Queries or keys with the rotary embedding of the patch tokens' places."""
    place = state.places[:, state.prefix :] - state.prefix
    tables = tuple(at_places(table, place) for table in state.tables)
    return torch.cat([x[:, : state.prefix], view.turn(x[:, state.prefix :], tables)], 1).to(x.dtype)  # pyright: ignore


def bias(state: ExportState, proportional: bool) -> Tensor | None:
    """What is added to the attention scores of each key, `(b, 1, 1, t)`; None where that is 0."""
    if not proportional or state.slot is None:
        return None
    return state.size.log()[:, None, None, :].to(state.x.dtype)


class ExportStack(Stack):
    """The stack of a model that is being exported.

    With `unfolded`, every patch gets a copy of its token after the last block.  Without it the host gets fewer tokens,
    which is enough for heads that read the class token only.
    """

    def __init__(self, host: Host, recipe: Recipe, unfolded: bool = True):
        super().__init__(host, recipe, "reference")
        self.unfolded = unfolded
        # Without the head that runs image by image.
        self._patches = (*whole_pass_patches(host), *pruning_patches(host))

    def choose_backend(self, x: Tensor) -> ExportBackend:
        return ExportBackend(x, self.views, self.recipe, self.host, self.unfolded)
