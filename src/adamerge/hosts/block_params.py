"""Reading the numbers of a plain block, for hosts whose blocks are built from torch's own layers."""

from collections.abc import Iterable

from torch import Tensor, nn

from adamerge.runtime.block_view import LinearParams, NormParams, PlainBlockParams


def extract_params(
    *,
    norm1: nn.Module,
    qkv: nn.Module,
    project: nn.Module,
    gamma1: Tensor | None,
    norm2: nn.Module,
    fc1: nn.Module,
    act: nn.Module,
    fc2: nn.Module,
    gamma2: Tensor | None,
    idle: Iterable[nn.Module] = (),
    around: Iterable[nn.Module] = (),
) -> PlainBlockParams | None:
    """The block's numbers; None where one of its layers is of another kind, or where somebody hooked into it.

    `idle` layers must do nothing; `around` are the modules that contain these, whose hooks count as well.
    """
    layers = (norm1, qkv, project, norm2, fc1, act, fc2)
    if any(module._forward_hooks or module._forward_pre_hooks for module in (*layers, *around)):
        return None
    if any(type(module) is not nn.Identity for module in idle):
        return None
    if type(act) is not nn.GELU or act.approximate != "none":
        return None
    if not (isinstance(norm1, nn.LayerNorm) and isinstance(norm2, nn.LayerNorm)):
        return None
    products = [
        _linear_params(layer)
        for layer in (qkv, project, fc1, fc2)
        if type(layer) is nn.Linear and _is_plain_tensor(layer)
    ]
    if len(products) < 4:
        return None
    first, second, third, fourth = products
    return PlainBlockParams(_norm_params(norm1), first, second, gamma1, _norm_params(norm2), third, fourth, gamma2)


def _is_plain_tensor(layer: nn.Linear) -> bool:
    """Whether the weight is a tensor and not something that only acts like one, such as a quantised or sharded one."""
    return type(layer.weight) in (Tensor, nn.Parameter)


def _norm_params(layer: nn.LayerNorm) -> NormParams:
    return NormParams(layer.weight, layer.bias, layer.eps)


def _linear_params(layer: nn.Linear) -> LinearParams:
    return LinearParams(layer.weight, layer.bias)
