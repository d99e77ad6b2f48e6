"""A plain block on CPU with oneDNN's linear layers; GELU is fused into the first layer of the MLP.

For float32, torch's linear layer calls MKL, which does less work per second when there are fewer rows.  Merging makes
rows fewer, and oneDNN keeps more of its speed then.  It also computes a row in the same order for any number of rows.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import layer_norm

from adamerge.runtime.block_view import BlockShape, LinearParams, NormParams, PlainBlockParams, PlainView, View


def with_onednn(view: View, x: Tensor) -> View:
    """A view of the same block that calls oneDNN; `view` itself if the block is not plain, or `x` not for oneDNN."""
    if not (isinstance(view, PlainView) and x.device.type == "cpu" and available() and _supported(x.dtype)):
        return view
    weights = view.params()
    if not isinstance(weights, PlainBlockParams) or weights.activation != "gelu":
        return view
    return OneDnnView(view, weights)


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
    weights: PlainBlockParams

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
        projected = _linear(_normed(x, self.weights.norm1), self.weights.qkv)
        query, key, value = projected.unflatten(-1, (3, shape.heads, shape.key_dim)).unbind(-3)
        return query, key, value

    def project(self, attended: Float[Tensor, "n h k"]) -> Float[Tensor, "n d"]:
        return _scaled(_linear(attended.flatten(-2), self.weights.project), self.weights.gamma1)

    def mlp(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        hidden = _linear(_normed(x, self.weights.norm2), self.weights.fc1, activate=True)
        return _scaled(_linear(hidden, self.weights.fc2), self.weights.gamma2)


def _linear(x: Tensor, layer: LinearParams, activate: bool = False) -> Tensor:
    """A linear layer, followed by exact GELU if `activate`."""
    activation, variant = ("gelu", "none") if activate else ("none", "")
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, activation, [], variant)


def _normed(x: Tensor, norm: NormParams) -> Tensor:
    return layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def _scaled(branch: Tensor, gamma: Tensor | None) -> Tensor:
    return branch if gamma is None else branch * gamma
