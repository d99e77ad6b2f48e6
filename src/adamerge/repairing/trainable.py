"""Swaps parameters of a model for trainable copies, and puts the model's own back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# The parameters or the buffers of a module, by name.
Registry = dict[str, Any]


class ParameterSwap:
    """A model whose norms and biases (all parameters with one dimension) can be exchanged for trainable copies.

    Everything is in float32 while the swap is in force.  The model's own parameters and buffers are not changed.
    """

    def __init__(self, model: nn.Module):
        self._own: list[tuple[Registry, str, Tensor]] = []
        self._frozen: list[tuple[Registry, str, Tensor]] = []
        self._trained: list[tuple[Registry, str, nn.Parameter]] = []
        self.parameters: dict[str, nn.Parameter] = {}
        seen: dict[int, Tensor] = {}
        for path, module in model.named_modules():
            registries: tuple[Registry, ...] = (module._parameters, module._buffers)
            for registry in registries:
                for name, tensor in registry.items():
                    if tensor is None or not tensor.is_floating_point():
                        continue
                    self._own.append((registry, name, tensor))
                    first = id(tensor) not in seen
                    frozen = seen.setdefault(id(tensor), _float_copy(tensor))
                    self._frozen.append((registry, name, frozen))
                    if first and registry is module._parameters and tensor.dim() == 1:
                        trained = nn.Parameter(frozen.clone())
                        self._trained.append((registry, name, trained))
                        self.parameters[f"{path}.{name}" if path else name] = trained
        self.own = {path: parameter.detach().clone() for path, parameter in self.parameters.items()}

    def use_own(self) -> None:
        """Let the model compute with its own values."""
        for registry, name, tensor in self._frozen:
            registry[name] = tensor

    def use_trained(self) -> None:
        """Let the model compute with the trainable copies."""
        for registry, name, parameter in self._trained:
            registry[name] = parameter

    def restore(self) -> None:
        """Put the model's own parameters and buffers back."""
        for registry, name, tensor in self._own:
            registry[name] = tensor

    def keep(self, paths: list[str]) -> None:
        """Train only these parameters."""
        kept = [self.parameters[path] for path in paths]
        self._trained = [one for one in self._trained if any(one[2] is parameter for parameter in kept)]
        self.parameters = {path: self.parameters[path] for path in paths}

    def changes(self) -> dict[str, Tensor]:
        """What training added to each parameter."""
        return {path: parameter.detach() - self.own[path] for path, parameter in self.parameters.items()}


@contextmanager
def trainable(model: nn.Module) -> Iterator[ParameterSwap]:
    """The model with trainable copies of its norms and biases inside a `with` block; afterwards it is what it was."""
    with torch.inference_mode(False), torch.enable_grad():
        swap = ParameterSwap(model)
        try:
            yield swap
        finally:
            swap.restore()


def _float_copy(tensor: Tensor) -> Tensor:
    """The values in float32, without gradients; not a copy if the tensor can be used as it is."""
    plain = tensor.clone() if tensor.is_inference() else tensor
    return plain.detach().float()
