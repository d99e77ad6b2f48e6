"""A plain block on a CPU with oneDNN's products, GELU in the product before it.

In float32 torch's own linear layer asks MKL, whose speed falls with the number of rows; merging is about having fewer.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import layer_norm

from adamerge.runtime.block_view import BlockShape, LinearParams, NormParams, PlainBlockParams, PlainView, View


def with_onednn(view: View, x: Tensor) -> View:
    """The view with oneDNN's products where the block is plain and they exist; otherwise the view as it is."""
    if not (isinstance(view, PlainView) and x.device.type == "cpu" and x.dtype == torch.float32 and available()):
        return view
    numbers = view.params()
    return view if numbers is None else OneDnnView(view, numbers)


def available() -> bool:
    """Whether oneDNN is there, and nobody turned it off (`torch.backends.mkldnn.enabled`)."""
    there = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(there) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@dataclass(frozen=True)
class OneDnnView:
    """A view of the same block: the same numbers up to rounding, in less time."""

    view: View
    numbers: PlainBlockParams

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
        products = _product(_normed(x, self.numbers.norm1), self.numbers.qkv)
        query, key, value = products.unflatten(-1, (3, shape.heads, shape.key_dim)).unbind(-3)
        return query, key, value

    def project(self, attended: Float[Tensor, "n h k"]) -> Float[Tensor, "n d"]:
        return _scaled(_product(attended.flatten(-2), self.numbers.project), self.numbers.gamma1)

    def mlp(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        hidden = _product(_normed(x, self.numbers.norm2), self.numbers.fc1, activate=True)
        return _scaled(_product(hidden, self.numbers.fc2), self.numbers.gamma2)


def _product(x: Tensor, layer: LinearParams, activate: bool = False) -> Tensor:
    """A linear layer, with exact GELU if asked for."""
    then, how = ("gelu", "none") if activate else ("none", "")
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, then, [], how)


def _normed(x: Tensor, norm: NormParams) -> Tensor:
    return layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def _scaled(branch: Tensor, gamma: Tensor | None) -> Tensor:
    return branch if gamma is None else branch * gamma
