"""The forward pass of one block on packed tokens, in plain torch.

Layers compute on existing tokens only.  The result of an image is the same to the bit in any batch.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from adamerge.core.recipe import Recipe
from adamerge.core.salience import AttentionShare, ClassShare
from adamerge.runtime.block_view import View
from adamerge.runtime.packed.attention import AttentionReader, attend_with_bias
from adamerge.runtime.packed.by_image import layers_for
from adamerge.runtime.packed.layout import PackedHeads, PerRow
from adamerge.runtime.packed.links import find_links, links_known
from adamerge.runtime.packed.merge_each import PackedAttention, merge_each
from adamerge.runtime.packed.merge_padded import merge_padded
from adamerge.runtime.packed.merge_rows import merge_nothing, merge_rows
from adamerge.runtime.packed.selection import select_links
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.profiling import stage

# Turns queries and keys by the places of their tokens.
Turn = Callable[[PackedHeads, PackedHeads, PackedState], tuple[PackedHeads, PackedHeads]]

# Whose attention a salience is a share of.
ATTENTION_READ: dict[type, Literal["class token", "all tokens"]] = {
    ClassShare: "class token",
    AttentionShare: "all tokens",
}


def step(state: PackedState, view: View, recipe: Recipe, depth: int, turn: Turn | None = None) -> PackedState:
    """Run one block on a CPU; the recipe's merge comes before it or between its attention and its MLP.

    `turn` turns queries and keys where the host has rotary positions.
    """
    if recipe.site == "before_block":
        state = merge_on_cpu(state, recipe, depth)
    layers = layers_for(view, recipe, state.layout, len(state.x))
    with stage("qkv"):
        query, key, value = layers.qkv(state.x)
        if turn is not None:
            query, key = turn(query, key, state)
    with stage("attention"):
        patches, bias = state.history.shape[1], None
        if recipe.proportional_attention and state.merged:
            bias = log_sizes(patches, state.size)
        reader = _reader(state, recipe, depth)
        attended = attend_with_bias(query, key, value, state.layout, view.scale, bias, patches, reader)
    with stage("project"):
        state = state.with_changes(x=layers.add_project(state.x, attended))
    if recipe.site == "after_attention":
        state = merge_on_cpu(state, recipe, depth, (query, key, value, view.scale), reader)
        layers = layers_for(view, recipe, state.layout, len(state.x))
    with stage("mlp"):
        return state.with_changes(x=layers.add_mlp(state.x))


def merge_on_cpu(
    state: PackedState,
    recipe: Recipe,
    depth: int,
    heads: PackedAttention | None = None,
    reader: AttentionReader | None = None,
) -> PackedState:
    """Decide one merge and apply it to the packed rows; the result of an image does not depend on the others.

    `heads` are the queries, keys and values of this block, and `reader` has the attention that its tokens got, when the
    merge comes after attention.  The new state's `x` can have unused rows at its end.
    """
    if not recipe.may_merge(state.layer, depth):
        return merge_nothing(state)
    if not state.layout.images:
        return merge_padded(state, recipe, depth, heads)
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
        if not links_known(recipe):
            with stage("decide"):
                return merge_each(state, recipe, depth, heads)
        with stage("decide"):
            received = None if reader is None else reader.received
            links = find_links(state, recipe, None if heads is None else heads[1], received)
            selection = select_links(links, recipe, state.layer)
        with stage("merge"):
            return merge_rows(state, recipe, links, selection)


def _reader(state: PackedState, recipe: Recipe, depth: int) -> AttentionReader | None:
    """What reads the attention that tokens get, if the recipe's salience is a share of it."""
    queries = ATTENTION_READ.get(type(recipe.salience))
    if queries is None or not links_known(recipe) or not recipe.may_merge(state.layer, depth):
        return None
    wide = torch.promote_types(state.x.dtype, torch.float32)
    received = torch.zeros(state.history.shape, dtype=wide)
    return AttentionReader(queries, received, state.layout.prefix)


def log_sizes(patches: int, size: PerRow) -> PerRow:
    """The logarithms of sizes, each a whole number up to `patches`, from a table: torch rounds a logarithm by its place
    in an array."""
    return torch.from_numpy(_logarithms(patches, size.dtype)[size.numpy().astype(np.intp)])


@lru_cache(16)
def _logarithms(most: int, dtype: torch.dtype) -> np.ndarray:
    return torch.arange(most + 1, dtype=dtype).log().numpy()
