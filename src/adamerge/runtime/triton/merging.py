"""Decides merges with kernels and carries them out on packed tokens."""

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.plan import Plan
from adamerge.runtime.block_view import NormParams
from adamerge.runtime.packed.layout import Layout, Packed, PackedHeads, PerRow, pad
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.trace import LayerTrace
from adamerge.runtime.triton.gemm_dispatch import GemmDispatch
from adamerge.runtime.triton.kernels.affinity import affinity
from adamerge.runtime.triton.kernels.attention_entropy import attention_entropy
from adamerge.runtime.triton.kernels.choice import Choice, ColumnSums, Entropy, Length, Rule
from adamerge.runtime.triton.kernels.class_attention import class_attention
from adamerge.runtime.triton.kernels.decide import decide
from adamerge.runtime.triton.kernels.match import match
from adamerge.runtime.triton.kernels.mean_key_unit import mean_key_unit
from adamerge.runtime.triton.kernels.merge import merge
from adamerge.runtime.triton.kernels.received_attention import received_attention
from adamerge.runtime.triton.kernels.residual import add
from adamerge.runtime.triton.lowering import Lowered


class MergeDecider:
    """Decides the merges of a lowered recipe with kernels; keeps the calibrated numbers of each device."""

    def __init__(self, lowered: Lowered, depth: int):
        self.lowered, self.depth = lowered, depth
        self._thresholds: dict[torch.device, Tensor | None] = {}

    def class_attention(
        self, query: PackedHeads, key: PackedHeads, layout: Layout, scale: float, logs: PerRow | None
    ) -> Float[Tensor, "heads total"] | None:
        """The class token's attention to every token, if it is the recipe's salience."""
        wanted = self.lowered.attention_from == "class token"
        return class_attention(query, key, layout, scale, logs) if wanted else None

    @property
    def reads_all_weights(self) -> bool:
        """Whether the salience is made of the attention of all tokens, so that attention has to leave its sums."""
        return self.lowered.attention_from in ("all tokens", "entropy")

    def salience_of_all_weights(
        self,
        query: PackedHeads,
        key: PackedHeads,
        log_sums: Float[Tensor, "heads total"],
        layout: Layout,
        scale: float,
        logs: PerRow | None,
    ) -> Entropy | Float[Tensor, "heads total"]:
        """What the salience is made of: the attention that tokens receive, or the entropy of what they give."""
        if self.lowered.attention_from == "entropy":
            return Entropy(attention_entropy(query, key, log_sums, layout, scale, logs))
        return received_attention(query, key, log_sums, layout, scale, logs)

    def decide(
        self,
        state: PackedState,
        layer: int,
        gemm: GemmDispatch,
        key: PackedHeads | None = None,
        attention: Entropy | Float[Tensor, "heads total"] | None = None,
    ) -> Choice:
        """Decide the merges of a layer, by the attention keys where they are given, else by the tokens."""
        lowered, layout, inverse = self.lowered, state.layout, state.inverse
        split, salience = lowered.policy.split, attention
        if key is not None:
            value, partner = match(mean_key_unit(key, gemm.row_count_if_many(state)), layout, split)
        elif lowered.affinity is not None:
            parts, rows, value, partner = affinity(state.x, inverse, layout, split, lowered.affinity)
            salience = ColumnSums(parts, rows)
        else:
            if inverse is None:
                inverse = add(state.x, None, inverse=True, counted=gemm.row_count_if_many(state))[2]
            value, partner = match(state.x, layout, split, inverse=inverse)
        rule, policy = self._rule(layer, layout), lowered.policy_at(layer, self.depth)
        return decide(value, partner, state.size, state.history, layout, policy, rule, salience)

    def _rule(self, layer: int, layout: Layout) -> Rule:
        """The count rule of a layer, with its calibrated numbers on the device."""
        merges = self.lowered.known_merges(layer, self.depth, layout.most)
        if merges is not None:
            return Rule("fixed", merges)
        device = layout.offsets.device
        if device not in self._thresholds:
            self._thresholds[device] = self.lowered.numbers(self.depth, device)
        numbers = self._thresholds[device]
        assert numbers is not None
        return Rule("threshold" if numbers.shape[1] == 1 else "zscore", numbers=numbers[layer])


def carry_out(
    state: PackedState,
    choice: Choice,
    length: Length | None,
    branch: Packed | None = None,
    gamma: Float[Tensor, " d"] | None = None,
    norm: NormParams | None = None,
) -> PackedState:
    """Merge `x + gamma * branch` as chosen.  The arrays keep their length until the counts are read back."""
    x, normed, size, logs, offsets = merge(
        state.x, state.size, state.layout, choice, branch=branch, gamma=gamma, norm=norm, length=length
    )
    layout = replace(state.layout, offsets=offsets, uniform=False)
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
        steps=(*state.steps, partial(_layer_trace, state.layout, choice, layout, size)),
    )


def without_merge(state: PackedState) -> PackedState:
    """The state after a layer that merges nothing: only the trace of that layer is added."""
    return replace(state, steps=(*state.steps, partial(_identity_trace, state.layout, state.size)))


def _layer_trace(before: Layout, choice: Choice, after: Layout, size: Tensor) -> LayerTrace:
    """The trace of a merge, padded to the longest image."""
    count = choice.count.long()
    fewest, width = torch.stack([count.amin(), count.amax()]).tolist() if len(count) else (before.most, before.most)
    plan = Plan(pad(choice.slot.long(), before, before.most, -1), count, width, ragged=fewest != width)
    return LayerTrace(plan, pad(choice.salience, before, before.most), pad(size, after, width), choice.redundancy)


def _identity_trace(layout: Layout, size: PerRow) -> LayerTrace:
    """The trace of a layer that merges nothing: no salience and no redundancy were measured."""
    n = layout.most
    count = layout.patches.long()
    place = torch.arange(n, device=count.device)
    plan = Plan(torch.where(place < count[:, None], place, -1), count, n, ragged=not layout.uniform)
    sizes = pad(size, layout, n)
    return LayerTrace(plan, torch.ones_like(sizes), sizes, torch.zeros_like(count, dtype=sizes.dtype))
