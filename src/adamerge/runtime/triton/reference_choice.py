"""Decisions by the parts of a recipe, in torch, for recipes that the kernels cannot decide.

The parts read padded copies of the packed tokens.  Nothing waits for the device, so this can be part of a CUDA graph.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from adamerge.core.combine import Drop, part_at
from adamerge.core.evidence import Heads
from adamerge.core.lazy import lazy_fields
from adamerge.core.match import Links
from adamerge.core.recipe import Recipe
from adamerge.core.types import Counts, Features, PerToken
from adamerge.runtime.packed.layout import Layout, PerRow, pad
from adamerge.runtime.packed.merge_each import PackedAttention
from adamerge.runtime.packed.merge_padded import build_evidence, padded_heads
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.triton.kernels.choice import Choice
from adamerge.runtime.triton.kernels.class_attention import class_attention
from adamerge.runtime.triton.kernels.select import PaddedLinks, select


@lazy_fields("query", "key", "value", "bias")
@dataclass(frozen=True)
class PackedHeadsOfLayer(Heads):
    """Queries, keys and values of packed tokens.

    What parts read most is computed from the packed rows, and padded when it is one number for each token: padded
    copies of all heads in float32 would take longer than attention.
    """

    packed: PackedAttention = field(kw_only=True)
    layout: Layout = field(kw_only=True)
    logs: PerRow | None = field(kw_only=True)

    def mean_keys(self, prefix: int, dtype: torch.dtype) -> Features:
        return self._pad(self.packed[1].mean(1, dtype=dtype))

    def value_norms(self, prefix: int, dtype: torch.dtype) -> PerToken:
        return self._pad(torch.linalg.vector_norm(self.packed[2], dim=(1, 2), dtype=dtype))

    def class_weights(self, prefix: int, dtype: torch.dtype) -> PerToken:
        query, key, _, scale = self.packed
        return self._pad(class_attention(query, key, self.layout, scale, self.logs).mean(0))

    def _pad(self, rows: Tensor) -> Tensor:
        return pad(rows, self.layout, self.layout.most)


def choose_by_reference(
    state: PackedState, recipe: Recipe, depth: int, attention: PackedAttention | None, logs: PerRow | None
) -> tuple[Choice, int | None]:
    """The choice of a recipe's own parts, and the number of merges where it is the same and known for every image.

    `attention` are the queries, keys and values of a merge after attention, and `logs` what attention added to scores.
    """
    heads = None
    if attention is not None:
        make = partial(PackedHeadsOfLayer, packed=attention, layout=state.layout, logs=logs)
        heads = padded_heads(state, recipe, attention, make)
    evidence = build_evidence(state, depth, heads)
    with torch.autocast(state.x.device.type, enabled=False):
        salience, links = recipe.link(evidence)
        merges = _merges(links, recipe.budget(links, evidence), state.layout.uniform)
        dropped = isinstance(part_at(recipe.combine, state.layer, depth), Drop)
        weight = None if dropped else recipe.weight(evidence, salience)
    padded = PaddedLinks(links.value, links.partner, links.source, salience, weight)
    choice = select(padded, merges, state.history, state.layout, sources_first=recipe.order == "sources_first")
    known = isinstance(merges, int) and state.layout.uniform and links.most is not None
    return choice, merges if known and isinstance(merges, int) else None


def _merges(links: Links, wanted: int | Counts, uniform: bool) -> int | Counts:
    """How many links merge: as many as wanted, or as there may; a Python number where that is known."""
    if isinstance(wanted, int) and uniform and links.most is not None:
        return max(min(wanted, links.most), 0)
    return wanted if links.room is None else links.room.clamp(max=wanted)
