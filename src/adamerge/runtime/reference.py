"""The reference backend: plain torch, with every image padded to the longest of its batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence, Heads
from adamerge.core.plan import Plan, first, fold, keep_all, tally, unfold
from adamerge.core.recipe import Linked, Recipe
from adamerge.core.types import AllTokens, Counts, PerToken, Slots
from adamerge.runtime.block_view import ModularView, View
from adamerge.runtime.profiling import stage
from adamerge.runtime.trace import LayerTrace

Tables = tuple[Tensor, ...]
# In training on a CPU, batches of adaptive recipes are padded to a multiple of so many tokens.  oneDNN keeps the code
# that it compiles for each number of tokens: without this, a training takes gigabytes for it.
TRAINING_MULTIPLE = 8


@dataclass(frozen=True)
class State:
    """The tokens of a batch between two layers.

    `x` holds the prefix tokens, then the patch tokens, then padding.  `size`, `place` and `count` cover patch tokens
    only: how many patches a token stands for, the first of these patches, and how many tokens an image has (None if no
    image has padding).  `history` maps every original patch to its token.  `steps` are the traces of the layers so far.
    `tables` are the host's rotary tables, if it has any, with a row for each original patch.  After a merge of an
    adaptive recipe, the number of tokens in `x` is a multiple of `multiple`.
    """

    x: AllTokens
    size: PerToken
    place: Slots
    prefix: int
    class_token: bool
    history: Plan
    count: Counts | None = None
    steps: tuple[LayerTrace, ...] = ()
    tables: Tables = ()
    multiple: int = 1

    @property
    def layer(self) -> int:
        """The number of the next layer."""
        return len(self.steps)


def turn(state: State, view: View, x: Tensor) -> Tensor:
    """Queries or keys `x` with the rotary embedding of the patch tokens' places; prefix tokens stay as they are."""
    # Not isinstance: a check of a protocol reads every property of the view, and some of them count parameters.
    turning = getattr(view, "turn", None)
    if turning is None:
        raise BadOption(
            f"the host handed rotary tables to a block whose view, {type(view).__name__}, has no `turn`; "
            "give the view one, or refuse the model in its `host` function"
        )
    rows = tuple(at_places(table, state.place) for table in state.tables)
    return torch.cat([x[:, : state.prefix], turning(x[:, state.prefix :], rows)], 1).to(x.dtype)


def at_places(table: Tensor, place: Slots) -> Tensor:
    """The rows at `place` of a table, `(patches, k)` or `(heads, patches, k)`: `(b, n, heads or 1, k)`."""
    rows = table[..., place, :]
    return rows.movedim(0, 2) if table.dim() == 3 else rows[:, :, None]


def start(x: AllTokens, prefix: int, class_token: bool = False) -> State:
    """The state of a batch that enters the first block."""
    b, n = x.shape[0], x.shape[1] - prefix
    size = torch.ones(b, n, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    unmerged = keep_all(b, n, x.device)
    return State(x, size, unmerged.slot, prefix, class_token, unmerged)


def start_training(state: State) -> State:
    """The same state for a pass that trains."""
    return replace(state, multiple=TRAINING_MULTIPLE) if state.x.device.type == "cpu" else state


def step(state: State, view: View, recipe: Recipe, depth: int, hooked: bool = False) -> State:
    """One block, with the recipe's merge before it or between its attention and its MLP.

    With `hooked`, attention is called as a module where the view can do so, so that hooks on that module run.
    """
    state, heads = before_merge(state, view, recipe, hooked)
    return after_merge(merge(state, recipe, depth, heads), view, recipe, hooked)


def before_merge(state: State, view: View, recipe: Recipe, hooked: bool = False) -> tuple[State, Heads | None]:
    """What a block computes before its merge: attention, or nothing if the merge comes first."""
    return attention(state, view, recipe, hooked) if recipe.site == "after_attention" else (state, None)


def after_merge(state: State, view: View, recipe: Recipe, hooked: bool = False) -> State:
    """What a block computes after its merge: attention, if the merge comes first, and the MLP."""
    if recipe.site == "before_block":
        state, _ = attention(state, view, recipe, hooked)
    with stage("mlp"):
        return replace(state, x=state.x + view.mlp(state.x))


def link(state: State, recipe: Recipe, depth: int, heads: Heads | None = None) -> Linked:
    """The salience and the links of the tokens that are about to be merged."""
    with torch.autocast(state.x.device.type, enabled=False):
        return recipe.link(build_evidence(state, depth, heads))


def attention(state: State, view: View, recipe: Recipe, hooked: bool = False) -> tuple[State, Heads]:
    """The attention half of a block, and its queries, keys and values."""
    if hooked and hasattr(view, "attention_branch"):
        return _attention_by_modules(state, cast(ModularView, view), recipe)
    with stage("qkv"):
        query, key, value = view.qkv(state.x)
        if state.tables:
            query, key = turn(state, view, query), turn(state, view, key)
    with stage("attention"):
        extra = bias(state, recipe.proportional_attention)
        attended = attend(view, query, key, value, extra)
    with stage("project"):
        return replace(state, x=state.x + view.project(attended)), Heads(query, key, value, view.scale, extra)


def _attention_by_modules(state: State, view: ModularView, recipe: Recipe) -> tuple[State, Heads]:
    """The same as `attention`, computed inside calls of the host's attention modules."""
    extra = bias(state, recipe.proportional_attention)
    made: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend_heads(query: Tensor, key: Tensor, value: Tensor, drop: Callable[[Tensor], Tensor] | None) -> Tensor:
        if state.tables:
            query, key = turn(state, view, query), turn(state, view, key)
        made.append((query, key, value))
        return attend(view, query, key, value, extra, drop)

    branch = view.attention_branch(state.x, attend_heads)
    # Blocks with several attention modules side by side have the heads of all.
    query, key, value = (torch.cat([heads[side] for heads in made], -2) for side in range(3))
    return replace(state, x=state.x + branch), Heads(query, key, value, view.scale, extra)


def finish(state: State) -> AllTokens:
    """The tokens in the host's shape: every patch gets a copy of the token that it is part of.

    So the host's pooling weighs a merged token by its size, and no padding reaches the host.
    """
    if state.history.is_identity:
        return state.x
    with stage("finish"):
        return unfold(state.x, state.history.after_prefix(state.prefix))


def resume(state: State, x: AllTokens) -> State:
    """Go on from tokens in the host's shape: what `finish` gave, perhaps changed since, by a hook for example.

    A merged token takes the mean of the changes of its patches.  Tokens that were not changed stay what they were.
    """
    b, patches = state.history.slot.shape
    expected = (b, state.prefix + patches, state.x.shape[-1])
    if not isinstance(x, Tensor) or x.shape != expected:
        found = f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise BadOption(
            f"a hook on a block gave {found} in the place of the tokens {expected}; a merged model needs one token for "
            "each patch there. Let the hook keep the shape, or call adamerge.remove(model)."
        )
    if state.history.is_identity:
        return replace(state, x=x)
    given, slots = x[:, state.prefix :], state.history
    held = given.gather(1, state.place[..., None].expand(-1, -1, given.shape[-1]))
    changes = given - unfold(held, slots)
    mean = fold(changes, slots, torch.ones_like(slots.slot, dtype=state.size.dtype))
    return replace(state, x=torch.cat([x[:, : state.prefix], held + mean], 1))


def build_evidence(state: State, depth: int, heads: Heads | None = None) -> Evidence:
    """What a recipe may read of the tokens that are about to be merged."""
    return Evidence(
        raw=state.x[:, state.prefix :],
        size=state.size,
        layer=state.layer,
        depth=depth,
        prefix=state.prefix,
        class_token=state.class_token,
        count=state.count,
        heads=heads,
        place=state.place,
        patches=state.history.slot.shape[1],
    )


def merge(state: State, recipe: Recipe, depth: int, heads: Heads | None = None, linked: Linked | None = None) -> State:
    """Decide one merge and carry it out; `linked` is the result of `link`, if it was called before."""
    evidence = build_evidence(state, depth, heads)
    # Without autocast, which would compute the products of the decision in half precision, where they overflow (D1).
    with stage("decide"), torch.autocast(state.x.device.type, enabled=False):
        decision = recipe.decide(evidence, linked)
    if recipe.ragged and state.multiple > 1 and not decision.plan.is_identity:
        tokens = -(-(state.prefix + decision.plan.width) // state.multiple) * state.multiple
        decision = replace(decision, plan=decision.plan.padded_to(tokens - state.prefix))
    plan, x, size, place = decision.plan, state.x, state.size, state.place
    with stage("merge"):
        if not plan.is_identity:
            patches = recipe.combine(x[:, state.prefix :], decision, evidence)
            x, size, place = torch.cat([x[:, : state.prefix], patches], 1), tally(size, plan), first(place, plan)
        history = state.history.then(plan)
    record = LayerTrace(plan, decision.salience.detach(), size.detach(), decision.links.redundancy.detach())
    count, steps = plan.count if plan.ragged else None, (*state.steps, record)
    return replace(state, x=x, size=size, place=place, count=count, history=history, steps=steps)


def bias(state: State, proportional: bool) -> Tensor | None:
    """What is added to the attention scores of each key, `(b, 1, 1, tokens)`: -inf for padding, log size if wanted.

    None if it would be all zeros, so that the host's own fused attention can run.
    """
    prefix, n = state.prefix, state.x.shape[1] - state.prefix
    proportional = proportional and not state.history.is_identity
    if state.count is None and not proportional:
        return None
    extra = torch.zeros_like(state.size)
    if proportional:
        # Padding has size 0: its log is -inf, which is right, but its gradient is NaN.
        extra = state.size.clamp_min(1).log()
    if state.count is not None:
        extra = extra.masked_fill(torch.arange(n, device=extra.device) >= state.count[:, None], float("-inf"))
    return torch.nn.functional.pad(extra, (prefix, 0))[:, None, None, :].to(state.x.dtype)


def attend(
    view: View,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Attention as the host computes it; all tensors are `(b, tokens, heads, k)`.

    `drop` is the host's module for dropout of attention weights; it is called where the weights are computed.
    """
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if view.fused and not _trains_in_bfloat16_on_cpu(query):
        out = scaled_dot_product_attention(query, key, value, bias, dropout_p=view.dropout, scale=view.scale)
    else:
        scores = (query * view.scale) @ key.mT
        weights = (scores if bias is None else scores + bias).softmax(-1)
        weights = dropout(weights, view.dropout) if drop is None else drop(weights)
        out = weights @ value
    return out.transpose(1, 2)


def _trains_in_bfloat16_on_cpu(query: Tensor) -> bool:
    """Whether gradients are computed in bfloat16 on a CPU.

    torch's fused attention takes four times as long there as two products (2.15, EPYC Zen 5, 2026-11-18).
    """
    return query.requires_grad and query.dtype is torch.bfloat16 and query.device.type == "cpu"
