"""The ragged road with kernels: attention, decision and merge, and all that lies between a plain block's products.

The host never waits for the device without need: while the counts of a merge come back, the next product already runs
on the rows there were before.  Under CUDA graph capture nobody waits at all: arrays keep the length they began with,
and kernels read on the device how much of them is used.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.plan import Plan
from adamerge.core.recipe import Recipe
from adamerge.core.types import AllTokens
from adamerge.runtime.block_view import NormParams, PlainBlockParams, PlainView, View
from adamerge.runtime.packed import forward as packed
from adamerge.runtime.packed.layout import Layout, Packed, PackedHeads, PerRow, pad
from adamerge.runtime.packed.state import PackedState, pack, unpack
from adamerge.runtime.profiling import stage
from adamerge.runtime.trace import LayerTrace
from adamerge.runtime.triton.gemm_dispatch import GemmDispatch
from adamerge.runtime.triton.graph_keepalive import note_used
from adamerge.runtime.triton.kernels.affinity import affinity
from adamerge.runtime.triton.kernels.attention import attend
from adamerge.runtime.triton.kernels.class_attention import class_attention
from adamerge.runtime.triton.kernels.decide import Choice, Rule, decide
from adamerge.runtime.triton.kernels.match import Split, match
from adamerge.runtime.triton.kernels.mean_key_unit import mean_key_unit
from adamerge.runtime.triton.kernels.merge import merge
from adamerge.runtime.triton.kernels.residual import add
from adamerge.runtime.triton.kernels.unfold import unfold
from adamerge.runtime.triton.lowering import Lowered, lower
from adamerge.runtime.triton.readback import Readback, capturing
from adamerge.runtime.triton.side_stream import SideStream

# Where a pass has handed its tokens on, so that they are freed as soon as nobody needs them.
EMPTY = pack(torch.empty(0, 0, 0), 0)


class TritonBackend:
    """The kernels' road for one recipe and one host's blocks; what does not change between batches is kept here."""

    def __init__(self, views: Sequence[View], recipe: Recipe, prefix: int, class_token: bool):
        self.views, self.recipe, self.prefix, self.class_token = tuple(views), recipe, prefix, class_token
        self.fusion: Lowered | str = lower(recipe, prefix, class_token)
        self.shapes = [view.shape for view in views]
        self._thresholds: dict[torch.device, Tensor | None] = {}
        self._beginning: tuple[object, Layout, PerRow, Tensor] | None = None
        # What graphs read, whoever captured them: another shape must not free it.
        self._captured: list[object] = []

    def start(self, x: AllTokens) -> "TritonForward":
        """A batch as it enters the first block.  What depends on its shape alone is made once."""
        note_used(self)
        key = (x.shape[:2], x.device)
        if self._beginning is None or self._beginning[0] != key:
            state = pack(x, self.prefix, self.class_token)
            if not capturing(x):
                self._beginning = key, state.layout, state.size, state.history
            return TritonForward(self, state)
        if capturing(x):
            self._captured.append(self._beginning)
        return TritonForward(self, PackedState(x.reshape(-1, x.shape[2]), *self._beginning[1:], self.class_token))

    def rule(self, fusion: Lowered, layer: int, layout: Layout) -> Rule:
        """The count rule of a layer, its calibrated numbers on the device."""
        merges = fusion.merges(layer, layout.most)
        if merges is not None:
            return Rule("fixed", merges)
        device = layout.offsets.device
        if device not in self._thresholds:
            self._thresholds[device] = fusion.numbers(len(self.views), device)
        numbers = self._thresholds[device]
        assert numbers is not None
        return Rule("threshold" if numbers.shape[1] == 1 else "zscore", numbers=numbers[layer])


class TritonForward:
    """One pass over the blocks."""

    def __init__(self, road: TritonBackend, state: PackedState):
        self.road, self.state = road, state
        counting = capturing(state.x) and isinstance(road.fusion, Lowered) and road.fusion.budget.ragged
        self.arithmetic = GemmDispatch(counting)
        self.numbers = [view.params() if isinstance(view, PlainView) else None for view in road.views]

    def step(self, layer: int) -> None:
        """One block.  What a half of it needed is freed before the next begins."""
        state = self._first_half(layer)
        with stage("mlp"):
            self.state = self._second_half(state, layer)

    def _first_half(self, layer: int) -> PackedState:
        """Attention, with the merge before it or after it."""
        road, state, self.state = self.road, self.state, EMPTY
        fusion, recipe = road.fusion, road.recipe
        merging = not isinstance(fusion, Lowered) or fusion.may_merge(layer)
        before, after = (merging and recipe.site == site for site in ("before_block", "after_attention"))
        wait = None
        if before:
            state, wait = self._merge_before(state, layer, self.numbers[layer])
        with stage("qkv"):
            query, key, value = self._qkv(state, layer)
        if wait is not None:
            state = wait.over(state)
            query, key, value = (side[: state.layout.total] for side in (query, key, value))
        scale, logs = road.views[layer].scale, _log_sizes(state, recipe)
        glances, choice, wait = None, None, None
        beside = SideStream(state.x)
        if after and isinstance(fusion, Lowered):
            with stage("decide"), beside:
                glances = class_attention(query, key, state.layout, scale, logs) if fusion.glances else None
                if fusion.keys:
                    choice, wait = self._choose(state, fusion, layer, key, glances)
        with stage("attention"):
            attended = attend(query, key, value, state.layout, scale, logs)
        heads = (query, key, value, scale) if after and not isinstance(fusion, Lowered) else None
        held = (query, key) if beside.active else None
        del query, key, value
        with stage("project"):
            numbers = self.numbers[layer]
            if numbers is None:
                branch, gamma, norm = self.road.views[layer].project(attended), None, None
            else:
                state, branch = self.arithmetic.add_to(state, attended.flatten(1), numbers.project, numbers.gamma1)
                gamma, norm = numbers.gamma1, numbers.norm2
            if choice is None:
                compared = after and isinstance(fusion, Lowered)
                state = self.arithmetic.sum(state, branch, gamma, None if compared else norm, compared)
                branch, gamma = None, None
        if after and isinstance(fusion, Lowered):
            beside.join()
            del held
            if choice is None or wait is None:
                with stage("decide"):
                    choice, wait = self._choose(state, fusion, layer, None, glances)
            with stage("merge"):
                return wait.over(self._carry_out(state, fusion, choice, branch, gamma, norm))
        if after:
            return packed.merge(state, recipe, len(road.views), heads)
        if not merging:
            told = partial(_identity_trace, state.layout, state.size)
            state = replace(state, steps=(*state.steps, told))
        return state

    def finish(self) -> AllTokens:
        """The tokens in the host's own shape."""
        state = self.state
        if not state.merged:
            return unpack(state)
        with stage("finish"):
            return unfold(state.x, state.history, state.layout)

    def _merge_before(
        self, state: PackedState, layer: int, numbers: PlainBlockParams | None
    ) -> tuple[PackedState, "Readback | None"]:
        fusion = self.road.fusion
        if not isinstance(fusion, Lowered):
            return packed.merge(state, self.road.recipe, len(self.road.views)), None
        with stage("decide"):
            choice, wait = self._choose(state, fusion, layer, None, None)
        with stage("merge"):
            norm = None if numbers is None else numbers.norm1
            return self._carry_out(state, fusion, choice, None, None, norm), wait

    def _choose(
        self,
        state: PackedState,
        fusion: Lowered,
        layer: int,
        key: PackedHeads | None,
        glances: Float[Tensor, "heads total"] | None,
    ) -> "tuple[Choice, Readback]":
        """Decide by the keys, or by the tokens; the counts are already on their way back."""
        layout, inverse = state.layout, state.inverse
        split = Split(fusion.alternating, fusion.first, fusion.half)
        sums = None
        if key is not None:
            value, partner = match(mean_key_unit(key, self.arithmetic.many(state)), layout, split)
        elif fusion.affinity is not None:
            parts, rows, value, partner = affinity(state.x, inverse, layout, split, fusion.affinity)
            sums = parts, rows
        else:
            if inverse is None:
                inverse = add(state.x, None, inverse=True, counted=self.arithmetic.many(state))[2]
            value, partner = match(state.x, layout, split, inverse=inverse)
        choice = decide(
            value,
            partner,
            state.size,
            state.history,
            layout,
            split,
            self.road.rule(fusion, layer, layout),
            score=fusion.score,
            strength=fusion.strength,
            weigh=fusion.weigh,
            sources_first=fusion.sources_first,
            sums=sums,
            glances=glances,
        )
        return choice, Readback(choice.count, layout, fusion.merges(layer, layout.most))

    def _carry_out(
        self,
        state: PackedState,
        fusion: Lowered,
        choice: Choice,
        branch: Packed | None,
        gamma: Float[Tensor, " d"] | None,
        norm: NormParams | None,
    ) -> PackedState:
        """Merge as chosen; the arrays keep their length until the counts are back."""
        x, normed, size, logs, offsets = merge(
            state.x,
            state.size,
            state.layout,
            choice,
            branch=branch,
            gamma=gamma,
            norm=norm,
            keep_length=fusion.keep_length,
        )
        layout = replace(state.layout, offsets=offsets, uniform=False)
        told = partial(_layer_trace, state.layout, choice, layout, size)
        return replace(
            state,
            x=x,
            normed=normed,
            inverse=None,
            size=size,
            logs=logs,
            layout=layout,
            history=choice.history,
            merged=True,
            steps=(*state.steps, told),
        )

    def _qkv(self, state: PackedState, layer: int) -> tuple[PackedHeads, PackedHeads, PackedHeads]:
        numbers = self.numbers[layer]
        if numbers is None:
            return self.road.views[layer].qkv(state.x)
        normed = state.normed if state.normed is not None else add(state.x, None, norm=numbers.norm1)[1]
        assert normed is not None
        shape = self.road.shapes[layer]
        product = self.arithmetic.linear(state, normed, numbers.qkv)
        query, key, value = product.unflatten(1, (3, shape.heads, shape.key_dim)).unbind(1)
        return query, key, value

    def _second_half(self, state: PackedState, layer: int) -> PackedState:
        """The MLP, and what the next block begins with."""
        numbers = self.numbers[layer]
        last = layer + 1 == len(self.road.views)
        following = None if last else self.numbers[layer + 1]
        fusion, before = self.road.fusion, self.road.recipe.site == "before_block"
        decides = before and not last and isinstance(fusion, Lowered) and fusion.may_merge(layer + 1)
        norm = None if following is None or decides or (before and isinstance(fusion, str)) else following.norm1
        if numbers is None:
            branch, gamma = self.road.views[layer].mlp(state.x), None
        else:
            normed = state.normed if state.normed is not None else add(state.x, None, norm=numbers.norm2)[1]
            assert normed is not None
            hidden = self.arithmetic.linear(state, normed, numbers.fc1, activate=True)
            state, branch = self.arithmetic.add_to(state, hidden, numbers.fc2, numbers.gamma2)
            gamma = numbers.gamma2
        return self.arithmetic.sum(state, branch, gamma, norm, decides)


def _log_sizes(state: PackedState, recipe: Recipe) -> PerRow | None:
    """What attention adds to the scores of each key."""
    if not (recipe.proportional_attention and state.merged):
        return None
    return state.size.log2() if state.logs is None else state.logs


def _layer_trace(before: Layout, choice: Choice, after: Layout, size: Tensor) -> LayerTrace:
    """What a layer did, padded as traces are."""
    count = choice.count.long()
    fewest, width = torch.stack([count.amin(), count.amax()]).tolist() if len(count) else (before.most, before.most)
    plan = Plan(pad(choice.slot.long(), before, before.most, -1), count, width, ragged=fewest != width)
    return LayerTrace(plan, pad(choice.salience, before, before.most), pad(size, after, width), choice.redundancy)


def _identity_trace(layout: Layout, size: PerRow) -> LayerTrace:
    """A layer that merges nothing does not look at the tokens either."""
    n = layout.most
    count = layout.patches.long()
    place = torch.arange(n, device=count.device)
    plan = Plan(torch.where(place < count[:, None], place, -1), count, n, ragged=not layout.uniform)
    sizes = pad(size, layout, n)
    return LayerTrace(plan, torch.ones_like(sizes), sizes, torch.zeros_like(count, dtype=sizes.dtype))
