"""A plain block on CPU with oneDNN's linear layers; GELU is fused into the first layer of the MLP.

For float32, torch's linear layer calls MKL, which does less work per second when there are fewer rows.  Merging makes
rows fewer, and oneDNN keeps more of its speed then.  It also computes a row in the same order for any number of rows.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import layer_norm

from adamerge.runtime.block_view import (
    BlockShape,
    LinearParams,
    NormParams,
    PlainBlockParams,
    PlainView,
    SplitBlockParams,
    View,
)
from adamerge.runtime.packed.kept_weights import joined_bias, packed_weight

# The activations that oneDNN computes together with a linear layer, by its names for them.
ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}
NO_ACTIVATION = ("none", "")


def with_onednn(view: View, x: Tensor, autocast: torch.dtype | None = None) -> View:
    """A view of the same block that calls oneDNN; `view` itself if the block is not plain, or `x` not for oneDNN.

    `autocast` is the dtype of linear layers and attention under `torch.autocast`.
    """
    dtype = autocast or x.dtype
    if not (isinstance(view, PlainView) and x.device.type == "cpu" and available() and _supported(dtype)):
        return view
    weights = view.params()
    if weights is None or (autocast is not None and x.dtype not in (torch.float32, autocast)):
        return view
    qkv = weights.qkv if isinstance(weights, SplitBlockParams) else (weights.qkv,)
    joined = weights.with_qkv(qkv[0]) if isinstance(weights, SplitBlockParams) else weights
    layers = (*qkv, joined.project, joined.fc1, joined.fc2)
    fits = autocast is not None or all(layer.weight.dtype is dtype for layer in layers)
    if joined.activation not in ACTIVATIONS or not fits:
        return view
    return OneDnnView(
        view,
        joined,
        _prepared(qkv, dtype),
        _prepared((joined.project,), dtype),
        _prepared((joined.fc1,), dtype),
        _prepared((joined.fc2,), dtype),
        dtype,
    )


def _prepared(layers: tuple[LinearParams, ...], dtype: torch.dtype) -> LinearParams:
    """Layers as one, as oneDNN reads it in `dtype`."""
    bias = joined_bias([each.bias for each in layers], [len(each.weight) for each in layers], dtype)
    return LinearParams(packed_weight([each.weight for each in layers], dtype), bias)


def available() -> bool:
    """Whether this torch has oneDNN and `torch.backends.mkldnn.enabled` is set."""
    usable = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(usable) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _supported(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in `dtype` on this machine."""
    half = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or bool(half)


@dataclass(frozen=True)
class OneDnnView:
    """A view of the same block whose linear layers run in oneDNN: the same results up to rounding."""

    view: View
    block: PlainBlockParams
    qkv_layer: LinearParams
    project_layer: LinearParams
    fc1: LinearParams
    fc2: LinearParams
    dtype: torch.dtype

    @property
    def fused(self) -> bool:
        return self.view.fused

    @property
    def scale(self) -> float:
        return self.view.scale

    @property
    def dropout(self) -> float:
        return self.view.dropout

    @property
    def shape(self) -> BlockShape:
        return self.view.shape

    def qkv(self, x: Float[Tensor, "n d"]) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.view.shape
        projected = _linear(self._normed(x, self.block.norm1), self.qkv_layer)
        query, key, value = projected.unflatten(-1, (3, shape.heads, shape.key_dim)).unbind(-3)
        return query, key, value

    def project(self, attended: Float[Tensor, "n h k"]) -> Float[Tensor, "n d"]:
        return _scaled(_linear(attended.flatten(-2), self.project_layer), self.block.gamma1)

    def mlp(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        hidden = _linear(self._normed(x, self.block.norm2), self.fc1, ACTIVATIONS[self.block.activation])
        return _scaled(_linear(hidden, self.fc2), self.block.gamma2)

    def _normed(self, x: Tensor, norm: NormParams) -> Tensor:
        return layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps).to(self.dtype)


def _linear(x: Tensor, layer: LinearParams, activation: tuple[str, str] = NO_ACTIVATION) -> Tensor:
    """A linear layer, followed by an activation."""
    name, variant = activation
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, name, [], variant)


def _scaled(branch: Tensor, gamma: Tensor | None) -> Tensor:
    return branch if gamma is None else branch * gamma
