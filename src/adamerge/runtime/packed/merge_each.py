"""Merges each image of a packed batch alone, by `Recipe.decide`: for recipes with parts that are not in `links.py`."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from adamerge.core.decision import Decision
from adamerge.core.evidence import Evidence, Heads
from adamerge.core.lazy import deferred
from adamerge.core.plan import Plan, first, keep_all, tally
from adamerge.core.recipe import Recipe
from adamerge.core.types import Slots
from adamerge.runtime.packed.layout import PackedHeads, ragged_layout, round_up_rows
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.trace import LayerTrace, Trace, join

# Query, key and value of all packed rows, and the scale of their scores.
PackedAttention = tuple[PackedHeads, PackedHeads, PackedHeads, float]


def merge_each(state: PackedState, recipe: Recipe, depth: int, heads: PackedAttention | None) -> PackedState:
    """Decide and carry out one merge in every image of a batch that has at least one."""
    layout = state.layout
    images = range(layout.images)
    evidence = [_evidence(state, recipe, depth, heads, image) for image in images]
    decisions = [recipe.decide(each) for each in evidence]
    pieces = [_merged(state, recipe, *each) for each in zip(images, evidence, decisions, strict=True)]
    sizes = [tally(each.size, decided.plan) for each, decided in zip(evidence, decisions, strict=True)]
    steps = (*state.steps, partial(_trace, decisions, sizes))
    if all(decided.plan.is_identity for decided in decisions):
        return replace(state, steps=steps)
    after = ragged_layout([decided.plan.width for decided in decisions], layout.prefix, state.x.device)
    unused = (round_up_rows(after.total) if recipe.ragged else after.total) - after.total
    prefix = state.size.new_ones(layout.prefix)
    per_row = [row for size in sizes for row in (prefix, size[0].to(prefix.dtype))]
    slots = [decided.plan.slot[0, state.history[image]] for image, decided in enumerate(decisions)]
    return replace(
        state,
        x=torch.cat([*pieces, state.x.new_zeros(unused, state.x.shape[1])]),
        size=torch.cat([*per_row, prefix.new_zeros(unused)]),
        layout=after,
        history=torch.stack(slots).int(),
        merged=True,
        steps=steps,
    )


def _evidence(state: PackedState, recipe: Recipe, depth: int, heads: PackedAttention | None, image: int) -> Evidence:
    """The evidence for one merge of one image."""
    layout, patches = state.layout, state.history.shape[1]
    begin, end = layout.bounds[image : image + 2]
    whole = slice(begin, end)
    own = slice(begin + layout.prefix, end)
    size = state.size[own].to(torch.promote_types(state.x.dtype, torch.float32))[None]
    seen = None
    if heads is not None:
        biased = recipe.proportional_attention and layout.counts[image] != patches
        bias = state.size[whole].log().to(state.x.dtype)[None, None, None] if biased else None
        seen = Heads(*(side[whole][None] for side in heads[:3]), scale=heads[3], bias=bias)
    return Evidence(
        raw=state.x[own][None],
        size=size,
        layer=state.layer,
        depth=depth,
        prefix=layout.prefix,
        class_token=state.class_token,
        heads=seen,
        place=deferred(lambda: _places(state.history[image], layout.counts[image])),
        patches=patches,
    )


def _places(history: Tensor, count: int) -> Slots:
    """The first original patch that each patch token of an image stands for, `(1, n)`."""
    past = Plan(history[None].long(), torch.tensor([count]), count)
    return first(keep_all(1, len(history), history.device).slot, past)


def _merged(state: PackedState, recipe: Recipe, image: int, evidence: Evidence, decision: Decision) -> Tensor:
    """The rows of one image after its merge."""
    begin, end = state.layout.bounds[image : image + 2]
    if decision.plan.is_identity:
        return state.x[begin:end]
    combined = recipe.combine(evidence.raw, decision, evidence)[0]
    return torch.cat([state.x[begin : begin + state.layout.prefix], combined])


def _trace(decisions: list[Decision], sizes: list[Tensor]) -> LayerTrace:
    """The trace of one layer."""
    parts = [
        LayerTrace(decided.plan, decided.salience, size, decided.links.redundancy)
        for decided, size in zip(decisions, sizes, strict=True)
    ]
    return join([Trace((part,), 0, False) for part in parts]).layers[0]
