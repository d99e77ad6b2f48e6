"""The triton backend: packed tokens, with kernels for attention, decision, merge and what lies between the GEMMs.

The host does not synchronise without need: while the counts of a merge are read back, the next GEMM already runs on the
rows there were before.  Under CUDA graph capture there is no synchronisation at all: arrays keep their first length,
and kernels read on the device how many rows are used.

Under autocast, linear layers and attention compute in its dtype, as the host's would.  The tokens keep the dtype in
which they entered (mostly float32), and layer norms read them so.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.recipe import Recipe
from adamerge.core.types import AllTokens
from adamerge.runtime.block_view import NormParams, PlainView, RotaryView, View
from adamerge.runtime.packed.layout import Packed, PackedHeads, PerRow, RowSlots
from adamerge.runtime.packed.merge_each import PackedAttention
from adamerge.runtime.packed.merge_padded import merge_padded
from adamerge.runtime.packed.state import PackedState, pack, unpack
from adamerge.runtime.profiling import stage
from adamerge.runtime.reference import Tables
from adamerge.runtime.triton.first_state import FirstState
from adamerge.runtime.triton.gemm_dispatch import GemmDispatch
from adamerge.runtime.triton.graph_keepalive import note_used
from adamerge.runtime.triton.join_params import join_params
from adamerge.runtime.triton.kernels.attention import attend
from adamerge.runtime.triton.kernels.choice import Choice, Entropy, Length
from adamerge.runtime.triton.kernels.residual import add
from adamerge.runtime.triton.kernels.rotate import rotate, token_places
from adamerge.runtime.triton.kernels.unfold import unfold
from adamerge.runtime.triton.lowering import Lowered, NotLowered, known_combine, length_at, lower
from adamerge.runtime.triton.merging import MergeDecider, carry_out, without_merge
from adamerge.runtime.triton.readback import Readback, capturing
from adamerge.runtime.triton.reference_choice import choose_by_reference
from adamerge.runtime.triton.side_stream import SideStream
from adamerge.runtime.triton.weight_casts import cast_params

# The state of a pass that has handed its tokens to a function, which frees them as early as possible.
EMPTY = pack(torch.empty(0, 0, 0), 0)


class TritonBackend:
    """The kernels for one recipe and one host's blocks, and what does not change between batches.

    `decider` makes the decisions of a lowered recipe, and `is_capturing` says whether a CUDA graph is being captured;
    both may be replaced, to measure or to test a pass without them.
    """

    def __init__(self, views: Sequence[View], recipe: Recipe, prefix: int, class_token: bool):
        self.views, self.recipe, self.prefix, self.class_token = tuple(views), recipe, prefix, class_token
        self.lowered: Lowered | NotLowered = lower(recipe, prefix, class_token)
        self.decider = MergeDecider(self.lowered, len(views)) if isinstance(self.lowered, Lowered) else None
        self.is_capturing: Callable[[Tensor], bool] = capturing
        self.shapes = [view.shape for view in views]
        self.first_state = FirstState(prefix, class_token)

    @property
    def not_lowered(self) -> str | None:
        """The part of the recipe that the kernels do not know, so that the reference decides; None if there is none."""
        return self.lowered.reason if isinstance(self.lowered, NotLowered) else None

    def start(self, x: AllTokens, autocast: torch.dtype | None = None) -> "TritonForward":
        """A pass for the tokens that enter the first block.

        `autocast` is the dtype in which autocast computes linear layers and attention; None without autocast.
        """
        note_used(self)
        return TritonForward(self, self.first_state.make(x, self.is_capturing(x)), autocast)


class TritonForward:
    """One pass over the blocks."""

    def __init__(self, backend: TritonBackend, state: PackedState, autocast: torch.dtype | None = None):
        self.backend, self.state, self.autocast = backend, state, autocast
        self.captured = backend.is_capturing(state.x)
        self.gemm = GemmDispatch(self.captured and backend.recipe.ragged)
        params = join_params([view.params() if isinstance(view, PlainView) else None for view in backend.views])
        self.params = params if autocast is None else cast_params(params, autocast)
        # Rotary tables of the block that runs now, and the places of tokens with the history that they come from.
        self.tables: Tables = ()
        self._places: tuple[Tensor, RowSlots] | None = None

    def step(self, layer: int, tables: Tables = ()) -> None:
        """Run one block.  What the attention half used is freed before the MLP half begins."""
        self.tables = tables
        state = self._attention_half(layer)
        with stage("mlp"):
            self.state = self._mlp_half(state, layer)

    def finish(self) -> AllTokens:
        """The tokens in the host's own shape."""
        state = self.state
        if not state.merged:
            return unpack(state)
        with stage("finish"):
            return unfold(state.x, state.history, state.layout)

    def _attention_half(self, layer: int) -> PackedState:
        """Attention, with the merge before it or after it: decided by kernels, by the reference, or none."""
        lowered, before = self.backend.lowered, self.backend.recipe.site == "before_block"
        if not self.backend.recipe.may_merge(layer, len(self.backend.views)):
            return without_merge(self._attention(layer))
        if isinstance(lowered, NotLowered):
            return (
                self._reference_merge_then_attention(layer) if before else self._attention_then_reference_merge(layer)
            )
        return self._merge_then_attention(layer, lowered) if before else self._attention_then_merge(layer, lowered)

    def _attention(self, layer: int, readback: Readback | None = None) -> PackedState:
        """The attention half without a merge, or after one whose counts are still being read back."""
        state = self._take_state()
        with stage("qkv"):
            query, key, value = self._qkv(state, layer)
        if readback is not None:
            state = readback.cut(state)
            query, key, value = (side[: state.layout.total] for side in (query, key, value))
        with stage("attention"):
            scale, logs = self.backend.views[layer].scale, self._log_sizes(state)
            attended = attend(query, key, value, state.layout, scale, logs)
        del query, key, value
        with stage("project"):
            state, branch, gamma, norm = self._project(state, layer, attended)
            return self.gemm.sum(state, branch, gamma, norm, compared=False)

    def _reference_merge_then_attention(self, layer: int) -> PackedState:
        """A merge that the reference decides, then attention."""
        state, params = self._take_state(), self.params[layer]
        self.state, readback = self._merge_by_reference(state, None, None, None if params is None else params.norm1)
        del state
        return self._attention(layer, readback)

    def _attention_then_reference_merge(self, layer: int) -> PackedState:
        """Attention, then a merge that the reference decides: it may use all queries, keys and values."""
        state = self._take_state()
        with stage("qkv"):
            query, key, value = self._qkv(state, layer)
        with stage("attention"):
            scale, logs = self.backend.views[layer].scale, self._log_sizes(state)
            attended = attend(query, key, value, state.layout, scale, logs)
        with stage("project"):
            state, branch, gamma, norm = self._project(state, layer, attended)
            state = self.gemm.sum(state, branch, gamma, None, compared=False)
        state, readback = self._merge_by_reference(state, (query, key, value, scale), logs, norm)
        return state if readback is None else readback.cut(state)

    def _merge_by_reference(
        self, state: PackedState, attention: PackedAttention | None, logs: PerRow | None, norm: NormParams | None
    ) -> tuple[PackedState, Readback | None]:
        """Merge as the recipe's own parts decide, by the merge kernel if it knows how the recipe combines tokens."""
        recipe, depth = self.backend.recipe, len(self.backend.views)
        if not known_combine(recipe.combine):
            return merge_padded(state, recipe, depth, attention), None
        with stage("decide"):
            choice, merges = choose_by_reference(state, recipe, depth, attention, logs)
            readback = Readback(choice.count, state.layout, merges, wait=not self.captured)
        with stage("merge"):
            return carry_out(state, choice, length_at(recipe.combine, state.layer, depth), norm=norm), readback

    def _merge_then_attention(self, layer: int, lowered: Lowered) -> PackedState:
        """A merge that kernels decide, then attention.  The counts are read back while the first GEMM runs."""
        state = self._take_state()
        with stage("decide"):
            choice, readback = self._decide(state, layer)
        with stage("merge"):
            params = self.params[layer]
            norm = None if params is None else params.norm1
            self.state = carry_out(state, choice, self._length(layer, lowered), norm=norm)
        del state
        return self._attention(layer, readback)

    def _attention_then_merge(self, layer: int, lowered: Lowered) -> PackedState:
        """Attention, then a merge that kernels decide.

        Under graph capture, decisions by keys run on a side stream, concurrently with attention.  Decisions by tokens,
        or by the attention of all tokens, come after it.
        """
        state, decider = self._take_state(), self.backend.decider
        assert decider is not None
        with stage("qkv"):
            query, key, value = self._qkv(state, layer)
        scale, logs = self.backend.views[layer].scale, self._log_sizes(state)
        side, decided = SideStream(state.x), None
        with stage("decide"), side:
            attention = decider.class_attention(query, key, state.layout, scale, logs)
            if lowered.by_keys and not decider.reads_all_weights:
                decided = self._decide(state, layer, key, attention)
        with stage("attention"):
            log_sums = _room_for_log_sums(query) if decider.reads_all_weights else None
            attended = attend(query, key, value, state.layout, scale, logs, log_sums)
        if log_sums is not None:
            with stage("decide"):
                attention = decider.salience_of_all_weights(query, key, log_sums, state.layout, scale, logs)
                decided = self._decide(state, layer, key, attention) if lowered.by_keys else None
        read_aside = (query, key) if side.active else None
        del query, key, value
        with stage("project"):
            state, branch, gamma, norm = self._project(state, layer, attended)
            if decided is None:
                state = self.gemm.sum(state, branch, gamma, None, compared=True)
                branch, gamma = None, None
        side.join()
        del read_aside
        if decided is None:
            with stage("decide"):
                decided = self._decide(state, layer, None, attention)
        with stage("merge"):
            choice, readback = decided
            return readback.cut(carry_out(state, choice, self._length(layer, lowered), branch, gamma, norm))

    def _length(self, layer: int, lowered: Lowered) -> Length | None:
        """The length of merged tokens at a layer, where it is not that of the average."""
        return length_at(lowered.combine, layer, len(self.backend.views))

    def _decide(
        self,
        state: PackedState,
        layer: int,
        key: PackedHeads | None = None,
        attention: Entropy | Float[Tensor, "heads total"] | None = None,
    ) -> tuple[Choice, Readback]:
        """Decide a merge with kernels, and begin to read its counts back."""
        decider = self.backend.decider
        assert decider is not None
        compared = state if key is not None else self._in_compared_dtype(state)
        choice = decider.decide(compared, layer, self.gemm, key, attention)
        merges = decider.lowered.known_merges(layer, decider.depth, state.layout.most)
        return choice, Readback(choice.count, state.layout, merges, wait=not self.captured)

    def _in_compared_dtype(self, state: PackedState) -> PackedState:
        """The tokens as they are compared: under autocast in its dtype, because products in float32 would take longer
        than the whole block.  Sums are in float32 still, so nothing overflows that the host's layers can compute."""
        if self.autocast is None or state.x.dtype == self.autocast:
            return state
        return replace(state, x=state.x.to(self.autocast), inverse=None)

    def _qkv(self, state: PackedState, layer: int) -> tuple[PackedHeads, PackedHeads, PackedHeads]:
        params = self.params[layer]
        if params is None:
            query, key, value = self.backend.views[layer].qkv(state.x)
            query, key = self._turn(query, state, layer), self._turn(key, state, layer)
            if self.autocast is not None:
                # Norms of queries and keys give float32; the host's attention casts all three.
                query, key, value = (each.to(self.autocast) for each in (query, key, value))
            return query, key, value
        normed = state.normed if state.normed is not None else add(state.x, None, norm=params.norm1)[1]
        assert normed is not None
        shape = self.backend.shapes[layer]
        product = self.gemm.linear(state, normed, params.qkv).unflatten(1, (3 * shape.heads, shape.key_dim))
        self._turn(product[:, : 2 * shape.heads], state, layer, in_place=True)
        query, key, value = product.unflatten(1, (3, shape.heads)).unbind(1)
        return query, key, value

    def _turn(self, x: PackedHeads, state: PackedState, layer: int, in_place: bool = False) -> PackedHeads:
        """Queries or keys turned by the host's rotary tables, if it has any.  Places are computed once for a merge."""
        if not self.tables:
            return x
        if self._places is None or self._places[0] is not state.history:
            self._places = state.history, token_places(state.history, state.layout)
        view = self.backend.views[layer]
        rotation = cast(RotaryView, view).rotation(self.tables)
        return rotate(x, self._places[1], rotation, in_place=in_place)

    def _project(
        self, state: PackedState, layer: int, attended: PackedHeads
    ) -> tuple[PackedState, Packed | None, Float[Tensor, " d"] | None, NormParams | None]:
        """The state, the attention branch (None if the state already holds it), its gamma, and the next norm."""
        params = self.params[layer]
        if params is None:
            return state, self.backend.views[layer].project(attended), None, None
        state, branch = self.gemm.add_to(state, attended.flatten(1), params.project, params.gamma1)
        return state, branch, params.gamma1, params.norm2

    def _mlp_half(self, state: PackedState, layer: int) -> PackedState:
        """The MLP, and the norm or the token lengths that the next block begins with."""
        recipe, depth = self.backend.recipe, len(self.backend.views)
        params, lowered, last = self.params[layer], self.backend.lowered, layer + 1 == depth
        merge_next = not last and recipe.site == "before_block" and recipe.may_merge(layer + 1, depth)
        following = None if last or merge_next else self.params[layer + 1]
        norm = None if following is None else following.norm1
        if params is None:
            branch, gamma = self.backend.views[layer].mlp(state.x), None
        else:
            normed = state.normed if state.normed is not None else add(state.x, None, norm=params.norm2)[1]
            assert normed is not None
            hidden = self.gemm.linear(state, normed, params.fc1, params.activation)
            state, branch = self.gemm.add_to(state, hidden, params.fc2, params.gamma2)
            gamma = params.gamma2
        return self.gemm.sum(state, branch, gamma, norm, compared=merge_next and isinstance(lowered, Lowered))

    def _log_sizes(self, state: PackedState) -> PerRow | None:
        """What attention adds to the scores of each key, if anything."""
        if not (self.backend.recipe.proportional_attention and state.merged):
            return None
        return state.size.log2() if state.logs is None else state.logs

    def _take_state(self) -> PackedState:
        """Hand the tokens over: the pass keeps no reference to them."""
        state, self.state = self.state, EMPTY
        return state


def _room_for_log_sums(query: PackedHeads) -> Float[Tensor, "heads total"]:
    return torch.empty((query.shape[1], query.shape[0]), dtype=torch.float32, device=query.device)
