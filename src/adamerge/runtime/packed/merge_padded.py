"""Merges all images of a packed batch at once, on copies that are padded to the longest image.

The triton backend calls `merge_padded` for recipes that combine tokens in a way that its kernels do not know.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from adamerge.core.combine import Average, Drop, MeanNorm
from adamerge.core.decision import Decision
from adamerge.core.evidence import Evidence, Heads
from adamerge.core.lazy import deferred
from adamerge.core.match import Links
from adamerge.core.plan import Plan, first, keep_all, tally
from adamerge.core.recipe import Recipe
from adamerge.core.types import Slots
from adamerge.runtime.packed.layout import (
    Layout,
    Packed,
    PerRow,
    pad,
    ragged_layout,
    token_index,
    uniform_layout,
    unpad,
)
from adamerge.runtime.packed.merge_each import PackedAttention
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.profiling import stage
from adamerge.runtime.trace import LayerTrace

# Combine parts that read the decision only, so that they can run on packed rows instead of padded tokens.
COMBINE_ANY_ROWS = (Average, Drop, MeanNorm)


def merge_padded(
    state: PackedState,
    recipe: Recipe,
    depth: int,
    heads: PackedAttention | None = None,
) -> PackedState:
    """Decide one merge on padded copies of the tokens, as the reference does, and apply it to the packed rows.

    `heads` are the queries, keys and values of this block when the merge comes after attention.
    """
    layout = state.layout
    with stage("decide"):
        evidence = build_evidence(state, depth, None if heads is None else padded_heads(state, recipe, heads))
        with torch.autocast(state.x.device.type, enabled=False):
            decision = recipe.decide(evidence)
    plan = decision.plan
    if plan.is_identity:
        return replace(state, steps=(*state.steps, partial(_layer_trace, decision, layout, state.size)))
    with stage("merge"):
        after = uniform_layout(layout.images, layout.prefix + plan.width, layout.prefix, state.x.device)
        if plan.ragged:
            after = ragged_layout(plan.count.tolist(), layout.prefix, state.x.device)
        packed = _as_one_image(decision, layout, after)
        size = tally(state.size[None, : layout.total], packed.plan)[0]
        if type(recipe.combine) in COMBINE_ANY_ROWS:
            x = recipe.combine(state.x[None, : layout.total], packed, evidence)[0]
        else:
            patches = recipe.combine(evidence.raw, decision, evidence)
            x = unpad(torch.cat([_prefix_tokens(state.x, layout), patches], 1), token_index(after))
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
        steps=(*state.steps, partial(_layer_trace, decision, after, size)),
    )


def build_evidence(state: PackedState, depth: int, heads: Heads | None) -> Evidence:
    """The evidence for one merge, padded to the longest image.  Tokens, places and heads are padded when first read."""
    layout = state.layout
    return Evidence(
        raw=deferred(lambda: pad(state.x, layout, layout.most)),
        size=pad(state.size, layout, layout.most).to(torch.promote_types(state.x.dtype, torch.float32)),
        layer=state.layer,
        depth=depth,
        prefix=layout.prefix,
        class_token=state.class_token,
        count=None if layout.uniform else layout.patches.long(),
        heads=heads,
        place=deferred(lambda: _places(state)),
        patches=state.history.shape[1],
    )


def padded_heads(
    state: PackedState, recipe: Recipe, attention: PackedAttention, make: Callable[..., Heads] = Heads
) -> Heads:
    """Queries, keys and values of all tokens, `(b, longest, heads, k)`; each array is padded when first read."""
    query, key, value, scale = attention
    all_tokens = replace(state.layout, prefix=0)
    return make(
        query=deferred(lambda: pad(query, all_tokens, all_tokens.longest)),
        key=deferred(lambda: pad(key, all_tokens, all_tokens.longest)),
        value=deferred(lambda: pad(value, all_tokens, all_tokens.longest)),
        scale=scale,
        bias=deferred(lambda: _bias(state, recipe, all_tokens)),
    )


def _places(state: PackedState) -> Slots:
    """The first original patch that each patch token stands for, `(b, n)`; 0 in padding."""
    images, patches = state.history.shape
    past = Plan(state.history.long(), state.layout.patches.long(), state.layout.most)
    return first(keep_all(images, patches, state.x.device).slot, past)


def _as_one_image(decision: Decision, layout: Layout, after: Layout) -> Decision:
    """The decision for the batch as a decision for one image that has all packed rows, `(1, total)`.

    Prefix tokens are included, each alone in its slot.
    """
    plan, links, prefix, tokens = decision.plan, decision.links, layout.prefix, token_index(layout)

    def row(value: Tensor, fill: float = 0) -> Tensor:
        return unpad(torch.nn.functional.pad(value, (prefix, 0), value=fill), tokens)[None]

    def absolute(slots: Plan, target: Layout) -> Tensor:
        return unpad(slots.after_prefix(prefix).slot + target.offsets[:-1, None], tokens)[None]

    slot, partner = absolute(plan, after), absolute(replace(plan, slot=links.partner), layout)
    count = torch.full((1,), after.total, device=slot.device)
    own = Links(row(links.value), partner, row(links.source), None)
    return Decision(Plan(slot, count, after.total), row(decision.weight, 1), row(decision.salience, 1), own)


def _bias(state: PackedState, recipe: Recipe, all_tokens: Layout) -> Tensor | None:
    """What this block's attention added to its scores, `(b, 1, 1, longest)`: log sizes, and -inf for padding."""
    proportional = recipe.proportional_attention and state.merged
    if all_tokens.uniform and not proportional:
        return None
    value = state.size.log() if proportional else torch.zeros_like(state.size)
    return pad(value, all_tokens, all_tokens.longest, float("-inf"))[:, None, None, :].to(state.x.dtype)


def _prefix_tokens(x: Packed, layout: Layout) -> Tensor:
    """The prefix tokens of every image, `(b, prefix, d)`."""
    row = layout.offsets[:-1, None] + torch.arange(layout.prefix, device=x.device)
    return x.index_select(0, row.flatten()).view(layout.images, layout.prefix, x.shape[1])


def _layer_trace(decision: Decision, after: Layout, size: PerRow) -> LayerTrace:
    """The trace of one layer; `after` and `size` are the layout and the sizes after its merge."""
    padded = pad(size, after, after.most).to(decision.salience.dtype)
    return LayerTrace(decision.plan, decision.salience, padded, decision.links.redundancy)
