"""The forward pass of one block on packed tokens, in plain torch.

Layers compute on existing tokens only.  Merges are decided by `Recipe.decide` on padded copies, as in the reference.
The triton backend calls `merge` for recipes that its kernels cannot decide.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from adamerge.core.combine import Average, Drop, MeanNorm
from adamerge.core.decision import Decision
from adamerge.core.match import Links
from adamerge.core.plan import Plan, tally
from adamerge.core.recipe import Recipe
from adamerge.core.types import PerImage
from adamerge.runtime.block_view import View
from adamerge.runtime.packed.attention import attend_each
from adamerge.runtime.packed.by_image import layers_for
from adamerge.runtime.packed.evidence import (
    PackedAttention,
    build_evidence,
    groups_of,
    join,
    redundancy_of,
    whole_batch,
)
from adamerge.runtime.packed.layout import (
    Layout,
    Packed,
    PerRow,
    pad,
    ragged_layout,
    round_up_rows,
    token_index,
    uniform_layout,
    unpad,
)
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.profiling import stage
from adamerge.runtime.trace import LayerTrace

# Combine parts that read the decision only, so that they can run on packed rows instead of padded tokens.
COMBINE_ANY_ROWS = (Average, Drop, MeanNorm)


def step(state: PackedState, view: View, recipe: Recipe, depth: int) -> PackedState:
    """Run one block; the recipe's merge comes before it or between its attention and its MLP."""
    if recipe.site == "before_block":
        state = merge(state, recipe, depth)
    layers = layers_for(view, recipe, state.layout, len(state.x))
    with stage("qkv"):
        query, key, value = layers.qkv(state.x)
    with stage("attention"):
        size = state.size if recipe.proportional_attention and state.merged else None
        attended = attend_each(query, key, value, state.layout, view.scale, size, state.history.shape[1])
    with stage("project"):
        state = replace(state, x=state.x + layers.project(attended))
    if recipe.site == "after_attention":
        state = merge(state, recipe, depth, (query, key, value, view.scale))
        layers = layers_for(view, recipe, state.layout, len(state.x))
    with stage("mlp"):
        return replace(state, x=state.x + layers.mlp(state.x))


def merge(
    state: PackedState,
    recipe: Recipe,
    depth: int,
    heads: PackedAttention | None = None,
) -> PackedState:
    """Decide one merge on padded copies of the tokens, as the reference does, and apply it to the packed rows.

    `heads` are the queries, keys and values of this block when the merge comes after attention.  The new state's `x`
    can have unused rows at its end.
    """
    layout = state.layout
    with stage("decide"), torch.autocast(state.x.device.type, enabled=False):
        groups = groups_of(state, recipe)
        evidence = [build_evidence(state, recipe, depth, heads, group) for group in groups]
        decisions = [recipe.decide(each) for each in evidence]
        decision = join(groups, decisions, layout)
        redundancy = partial(redundancy_of, groups, decisions, layout)
    plan = decision.plan
    if plan.is_identity:
        return replace(state, steps=(*state.steps, partial(_layer_trace, decision, layout, state.size, redundancy)))
    with stage("merge"):
        after = uniform_layout(layout.images, layout.prefix + plan.width, layout.prefix, state.x.device)
        if plan.ragged:
            after = ragged_layout(plan.count.tolist(), layout.prefix, state.x.device)
        # An adaptive recipe leaves another number of tokens in every batch; see `round_up_rows`.
        rows = round_up_rows(after.total) if recipe.ragged and state.x.device.type == "cpu" else after.total
        packed = _as_one_image(decision, layout, after, rows)
        size = tally(state.size[None, : layout.total], packed.plan)[0]
        if type(recipe.combine) in COMBINE_ANY_ROWS:
            x = recipe.combine(state.x[None, : layout.total], packed, evidence[0])[0]
        else:
            padded = build_evidence(state, recipe, depth, heads, whole_batch(layout))
            patches = recipe.combine(padded.raw, decision, padded)
            x = unpad(torch.cat([_prefix_tokens(state.x, layout), patches], 1), token_index(after))
            x = torch.nn.functional.pad(x, (0, 0, 0, rows - after.total))
        history = plan.slot.gather(1, state.history.long()).int()
    return replace(
        state,
        x=x,
        size=size,
        layout=after,
        history=history,
        merged=True,
        logs=None,
        normed=None,
        inverse=None,
        steps=(*state.steps, partial(_layer_trace, decision, after, size, redundancy)),
    )


def _as_one_image(decision: Decision, layout: Layout, after: Layout, width: int) -> Decision:
    """The decision for the batch as a decision for one image that has all packed rows, `(1, total)`.

    Prefix tokens are included, each alone in its slot.  The plan has `width` slots; those after the last image stay
    empty.
    """
    plan, links, prefix, tokens = decision.plan, decision.links, layout.prefix, token_index(layout)

    def row(value: Tensor, fill: float = 0) -> Tensor:
        return unpad(torch.nn.functional.pad(value, (prefix, 0), value=fill), tokens)[None]

    def absolute(slots: Plan, target: Layout) -> Tensor:
        return unpad(slots.after_prefix(prefix).slot + target.offsets[:-1, None], tokens)[None]

    slot, partner = absolute(plan, after), absolute(replace(plan, slot=links.partner), layout)
    count = torch.full((1,), after.total, device=slot.device)
    own = Links(row(links.value), partner, row(links.source), None)
    return Decision(Plan(slot, count, width), row(decision.weight, 1), row(decision.salience, 1), own)


def _prefix_tokens(x: Packed, layout: Layout) -> Tensor:
    """The prefix tokens of every image, `(b, prefix, d)`."""
    row = layout.offsets[:-1, None] + torch.arange(layout.prefix, device=x.device)
    return x.index_select(0, row.flatten()).view(layout.images, layout.prefix, x.shape[1])


def _layer_trace(decision: Decision, after: Layout, size: PerRow, redundancy: Callable[[], PerImage]) -> LayerTrace:
    """The trace of one layer; `after` and `size` are the layout and the sizes after its merge."""
    padded = pad(size, after, after.most).to(decision.salience.dtype)
    return LayerTrace(decision.plan, decision.salience, padded, redundancy())
