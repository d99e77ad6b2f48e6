"""The tokens of a batch between two blocks, packed: one row per token, no padding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from adamerge.core.types import AllTokens
from adamerge.runtime.packed.layout import Layout, Packed, PerRow, unfold, uniform_layout
from adamerge.runtime.profiling import stage
from adamerge.runtime.trace import LayerTrace


@dataclass(frozen=True)
class PackedState:
    """The packed tokens `x`, where each image's rows are (`layout`), and how many patches each token stands for.

    `history[b, p]` is the patch token that original patch `p` of image `b` is part of now, counted within its image.
    `merged` is False until the first merge.  `steps` has one function per finished layer; calling it builds that
    layer's trace, so that a trace that is not read costs nothing.

    Three values are None unless a kernel computed them together with `x`: `logs`, the base-2 logarithms of the sizes;
    `normed`, the output of the next block's first norm; `inverse`, one over the length of each token.
    """

    x: Packed
    layout: Layout
    size: PerRow
    history: Int[Tensor, "b patches"]
    class_token: bool = False
    merged: bool = False
    logs: PerRow | None = None
    normed: Packed | None = None
    inverse: PerRow | None = None
    steps: tuple[Callable[[], LayerTrace], ...] = ()

    def with_changes(self, **fields: Any) -> "PackedState":
        """A copy with other values in some fields: `dataclasses.replace`, in a fraction of its time."""
        made = object.__new__(PackedState)
        vars(made).update(vars(self), **fields)
        return made

    @property
    def layer(self) -> int:
        """The layer that comes next."""
        return len(self.steps)


def pack_rows(x: AllTokens) -> Packed:
    """Tokens `(b, t, d)` as contiguous rows `(b * t, d)`.

    Without a class token, some hosts give tokens in the memory layout of a convolution.  For one image they would stay
    in it; products of another layout round differently, and kernels read rows.
    """
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2]).contiguous()


def pack(x: AllTokens, prefix: int, class_token: bool = False) -> PackedState:
    """The state before the first block: `(b, t, d)` tokens, each of size 1; the first `prefix` are prefix tokens."""
    b, n = x.shape[:2]
    size = torch.ones(b * n, device=x.device)
    history = torch.arange(n - prefix, device=x.device, dtype=torch.int32).repeat(b, 1)
    return PackedState(pack_rows(x), uniform_layout(b, n, prefix, x.device), size, history, class_token)


def unpack(state: PackedState) -> AllTokens:
    """The tokens in the host's shape, `(b, t, d)`: every original patch gets a copy of the token it was merged into."""
    images, patches = state.history.shape
    if not state.merged:
        return state.x.view(images, state.layout.prefix + patches, state.x.shape[1])
    with stage("finish"):
        return unfold(state.x, state.history, state.layout)
