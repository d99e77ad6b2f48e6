"""A plain block on CPU with oneDNN's linear layers; GELU is fused into the first layer of the MLP.

For float32, torch's linear layer calls MKL, which does less work per second when there are fewer rows.  Merging makes
rows fewer, and oneDNN keeps more of its speed then.  It also computes a row in the same order for any number of rows.
"""

from dataclasses import dataclass
from functools import cached_property

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
from adamerge.runtime.packed.kept_weights import KeptWeight, join, keep_joined

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
    project, fc1, fc2 = (_prepared((layer,), dtype) for layer in (joined.project, joined.fc1, joined.fc2))
    return OneDnnView(view, joined, _prepared(qkv, dtype), project, fc1, fc2, dtype)


@dataclass(frozen=True)
class PreparedLayer:
    """A linear layer as oneDNN reads it, and the tensors of which it has copies."""

    weight: Tensor
    bias: Tensor | None
    copied: tuple[tuple[tuple[Tensor, ...], KeptWeight | None], ...]


def _prepared(layers: tuple[LinearParams, ...], dtype: torch.dtype) -> PreparedLayer:
    """Layers as one, as oneDNN reads it in `dtype`."""
    weights = tuple(layer.weight for layer in layers)
    biases = tuple(layer.bias for layer in layers if layer.bias is not None)
    if biases and len(biases) < len(layers):
        # A layer without a bias has a bias of 0.
        with torch.inference_mode(False):
            zero = [torch.zeros(len(layer.weight), dtype=layer.weight.dtype) for layer in layers]
        biases = tuple(each if layer.bias is None else layer.bias for layer, each in zip(layers, zero, strict=True))
    made, copied = [], []
    for sources in (weights, biases) if biases else (weights,):
        kept, as_it_is = keep_joined(sources, dtype), len(sources) == 1 and sources[0].dtype is dtype
        if kept is None and as_it_is:
            made.append(sources[0])
            continue
        made.append(join(sources, dtype) if kept is None else kept.made)
        copied.append((sources, kept))
    return PreparedLayer(made[0], made[1] if biases else None, tuple(copied))


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
    qkv_layer: PreparedLayer
    project_layer: PreparedLayer
    fc1: PreparedLayer
    fc2: PreparedLayer
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors of the host that were read; what is copied is in a form of its own."""
        block = self.block
        layers = (self.qkv_layer, self.project_layer, self.fc1, self.fc2)
        copied = [tensor for layer in layers for sources, _ in layer.copied for tensor in sources]
        norms = (block.norm1.weight, block.norm1.bias, block.norm2.weight, block.norm2.bias)
        biases = [layer.bias for layer in (block.project, block.fc1, block.fc2)]
        return (*copied, *norms, *biases, block.qkv.bias, block.gamma1, block.gamma2)

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
        return self._shape

    @cached_property
    def _shape(self) -> BlockShape:
        return self.view.shape

    def qkv(self, x: Float[Tensor, "n d"]) -> tuple[Tensor, Tensor, Tensor]:
        shape = self._shape
        projected = _linear(self._normed(x, self.block.norm1), self.qkv_layer)
        query, key, value = projected.view(-1, 3, shape.heads, shape.key_dim).unbind(1)
        return query, key, value

    def project(self, attended: Float[Tensor, "n h k"]) -> Float[Tensor, "n d"]:
        return _scaled(_linear(attended.flatten(-2), self.project_layer), self.block.gamma1)

    def mlp(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return _scaled(_linear(self._hidden(x), self.fc2), self.block.gamma2)

    def add_project(self, x: Float[Tensor, "n d"], attended: Float[Tensor, "n h k"]) -> Float[Tensor, "n d"]:
        """`x + project(attended)`, with the sum in the product."""
        if self.block.gamma1 is not None or x.dtype is not self.dtype:
            return x + self.project(attended)
        return _linear_and_add(attended.flatten(-2), self.project_layer, x)

    def add_mlp(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """`x + mlp(x)`, with the sum in the last product."""
        if self.block.gamma2 is not None or x.dtype is not self.dtype:
            return x + self.mlp(x)
        return _linear_and_add(self._hidden(x), self.fc2, x)

    def _hidden(self, x: Tensor) -> Tensor:
        return _linear(self._normed(x, self.block.norm2), self.fc1, ACTIVATIONS[self.block.activation])

    def _normed(self, x: Tensor, norm: NormParams) -> Tensor:
        return layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps).to(self.dtype)


def linear(x: Float[Tensor, "n d"], weight: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """The products of all rows of two contiguous matrices."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


def _linear(x: Tensor, layer: PreparedLayer, activation: tuple[str, str] = NO_ACTIVATION) -> Tensor:
    """A linear layer, followed by an activation."""
    name, variant = activation
    return torch.ops.mkldnn._linear_pointwise.default(x, layer.weight, layer.bias, name, [], variant)


def _linear_and_add(x: Tensor, layer: PreparedLayer, other: Tensor) -> Tensor:
    """A linear layer, and `other` added to its result."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, other, layer.weight, layer.bias, "add")


def _scaled(branch: Tensor, gamma: Tensor | None) -> Tensor:
    return branch if gamma is None else branch * gamma
