"""Reading the numbers of a plain block, for hosts whose blocks are built from torch's own layers."""

from collections.abc import Iterable

from torch import Tensor, nn

from adamerge.runtime.view import Affine, Norm, Numbers


def read(
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
) -> Numbers | None:
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
    products = [_affine(layer) for layer in (qkv, project, fc1, fc2) if type(layer) is nn.Linear and _plain(layer)]
    if len(products) < 4:
        return None
    first, second, third, fourth = products
    return Numbers(_norm(norm1), first, second, gamma1, _norm(norm2), third, fourth, gamma2)


def _plain(layer: nn.Linear) -> bool:
    """Whether the weight is a tensor and not something that only acts like one, such as a quantised or sharded one."""
    return type(layer.weight) in (Tensor, nn.Parameter)


def _norm(layer: nn.LayerNorm) -> Norm:
    return Norm(layer.weight, layer.bias, layer.eps)


def _affine(layer: nn.Linear) -> Affine:
    return Affine(layer.weight, layer.bias)
