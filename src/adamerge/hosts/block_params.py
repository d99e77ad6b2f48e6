"""Reads weights and biases of a plain block, for hosts whose blocks are built from torch's own layers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from adamerge.runtime.block_view import Activation, LinearParams, NormParams, PlainBlockParams, SplitBlockParams

# Activations of the host libraries, by the names of their classes.
ACTIVATIONS: dict[str, Activation] = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
}
LIBRARIES = ("timm", "transformers", "open_clip")
LINEARS = (nn.Linear, NonDynamicallyQuantizableLinear)
Qkv = nn.Module | tuple[nn.Module, nn.Module, nn.Module] | LinearParams


@dataclass(frozen=True)
class PlainBlockLayers:
    """The layers of a pre-norm block, in the order in which they run.

    `qkv` is one layer, three layers, or a weight and a bias.  `gamma1` and `gamma2` are the factors of LayerScale, None
    without it.  `idle` layers must do nothing.  `around` are the modules that contain the others.
    """

    norm1: nn.Module
    qkv: Qkv
    project: nn.Module
    gamma1: Tensor | None
    norm2: nn.Module
    fc1: nn.Module
    act: nn.Module
    fc2: nn.Module
    gamma2: Tensor | None
    idle: tuple[nn.Module, ...] = ()
    around: tuple[nn.Module, ...] = ()

    def modules(self) -> Iterator[nn.Module]:
        """All modules that must run as their class says."""
        qkv = self.qkv if isinstance(self.qkv, tuple) else (self.qkv,)
        yield from (layer for layer in qkv if isinstance(layer, nn.Module))
        yield from (self.norm1, self.project, self.norm2, self.fc1, self.act, self.fc2, *self.around)


def extract_block(
    block: PlainBlockLayers, ignores_hook: Callable[[Any], bool] = lambda hook: False
) -> PlainBlockParams | SplitBlockParams | None:
    """The tensors of a block; None where a layer is of another kind, or where it or a module around it has a hook.

    Hooks that `ignores_hook` are the library's own and do not count.
    """
    if any(_altered(module, ignores_hook) for module in block.modules()):
        return None
    if any(type(module) is not nn.Identity for module in block.idle):
        return None
    norm1, norm2, activation = block.norm1, block.norm2, _activation(block.act)
    if activation is None or not (isinstance(norm1, nn.LayerNorm) and isinstance(norm2, nn.LayerNorm)):
        return None
    project, fc1, fc2 = (_linear_params(layer) for layer in (block.project, block.fc1, block.fc2))
    if project is None or fc1 is None or fc2 is None:
        return None
    with_qkv = partial(
        PlainBlockParams,
        _norm_params(norm1),
        project=project,
        gamma1=block.gamma1,
        norm2=_norm_params(norm2),
        fc1=fc1,
        fc2=fc2,
        gamma2=block.gamma2,
        activation=activation,
    )
    if isinstance(block.qkv, tuple):
        query, key, value = (_linear_params(layer) for layer in block.qkv)
        if query is None or key is None or value is None:
            return None
        return SplitBlockParams((query, key, value), with_qkv)
    qkv = block.qkv if isinstance(block.qkv, LinearParams) else _linear_params(block.qkv)
    return None if qkv is None or not _is_plain_tensor(qkv.weight) else with_qkv(qkv)


def extract_params(block: PlainBlockLayers) -> PlainBlockParams | None:
    """The same for blocks in which one layer gives queries, keys and values."""
    found = extract_block(block)
    return found if isinstance(found, PlainBlockParams) else None


def _altered(module: nn.Module, ignores_hook: Callable[[Any], bool]) -> bool:
    """Whether a hook or a `forward` of its own makes a module do something else than its class says."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or not all(map(ignores_hook, hooks))


def _activation(act: nn.Module) -> Activation | None:
    """The name of an activation that kernels know."""
    if type(act) is nn.GELU:
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    known = type(act).__module__.split(".")[0] in LIBRARIES
    return ACTIVATIONS.get(type(act).__name__) if known else None


def _is_plain_tensor(weight: Tensor) -> bool:
    """Whether a weight is a plain tensor, not a subclass such as a quantised or sharded one."""
    return type(weight) in (Tensor, nn.Parameter)


def _norm_params(layer: nn.LayerNorm) -> NormParams:
    return NormParams(layer.weight, layer.bias, layer.eps)


def _linear_params(layer: nn.Module) -> LinearParams | None:
    if type(layer) not in LINEARS or not isinstance(layer, nn.Linear) or not _is_plain_tensor(layer.weight):
        return None
    return LinearParams(layer.weight, layer.bias)
