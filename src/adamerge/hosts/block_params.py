"""Reads weights and biases of a plain block, for hosts whose blocks are built from torch's own layers."""

from dataclasses import dataclass

from torch import Tensor, nn

from adamerge.runtime.block_view import LinearParams, NormParams, PlainBlockParams


@dataclass(frozen=True)
class PlainBlockLayers:
    """The layers of a pre-norm block, in the order in which they run.

    `gamma1` and `gamma2` are the factors of LayerScale, None without it.  `idle` layers must do nothing.  `around` are
    the modules that contain the others.
    """

    norm1: nn.Module
    qkv: nn.Module
    project: nn.Module
    gamma1: Tensor | None
    norm2: nn.Module
    fc1: nn.Module
    act: nn.Module
    fc2: nn.Module
    gamma2: Tensor | None
    idle: tuple[nn.Module, ...] = ()
    around: tuple[nn.Module, ...] = ()


def extract_params(block: PlainBlockLayers) -> PlainBlockParams | None:
    """The tensors of a block; None where a layer is of another kind, or where it or a module around it has a hook."""
    norm1, norm2, act = block.norm1, block.norm2, block.act
    layers = (norm1, block.qkv, block.project, norm2, block.fc1, act, block.fc2)
    if any(module._forward_hooks or module._forward_pre_hooks for module in (*layers, *block.around)):
        return None
    if any(type(module) is not nn.Identity for module in block.idle):
        return None
    if type(act) is not nn.GELU or act.approximate != "none":
        return None
    if not (isinstance(norm1, nn.LayerNorm) and isinstance(norm2, nn.LayerNorm)):
        return None
    products = [
        _linear_params(layer)
        for layer in (block.qkv, block.project, block.fc1, block.fc2)
        if type(layer) is nn.Linear and _is_plain_tensor(layer)
    ]
    if len(products) < 4:
        return None
    qkv, project, fc1, fc2 = products
    return PlainBlockParams(
        _norm_params(norm1), qkv, project, block.gamma1, _norm_params(norm2), fc1, fc2, block.gamma2
    )


def _is_plain_tensor(layer: nn.Linear) -> bool:
    """Whether the weight is a plain tensor, not a subclass such as a quantised or sharded one."""
    return type(layer.weight) in (Tensor, nn.Parameter)


def _norm_params(layer: nn.LayerNorm) -> NormParams:
    return NormParams(layer.weight, layer.bias, layer.eps)


def _linear_params(layer: nn.Linear) -> LinearParams:
    return LinearParams(layer.weight, layer.bias)
