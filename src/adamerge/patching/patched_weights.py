"""Puts the changes of a recipe's patch into the parameters of a model, and takes them out bit for bit.

While a patch is in force, `state_dict` gives the parameters without it and `load_state_dict` adds it to what is loaded,
so that checkpoints are the same with and without a patch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadOption
from adamerge.core.weight_patch import ADVICE, WeightPatch


@dataclass
class PatchedParameter:
    """A parameter `name` of `module`, what is added to it, its values without that, and its values with it."""

    module: nn.Module
    name: str
    change: Tensor
    own: Tensor | None = None
    patched: Tensor | None = None

    @property
    def parameter(self) -> Tensor:
        """The parameter as the module has it now."""
        return self.module._parameters[self.name]  # pyright: ignore[reportReturnType]

    def put(self) -> None:
        """Add the change.  The values with it are kept, so that their place in memory is the same the next time."""
        now = self.parameter.data
        same = self.own is not None and self.patched is not None and now.data_ptr() == self.own.data_ptr()
        if not same or not _equal(self.patched, self._sum(now)):
            self.patched = self._sum(now)
        self.own = now
        assert self.patched is not None
        self.parameter.data = self.patched

    def take(self) -> None:
        """Give the parameter the values that it has without the change."""
        self.parameter.data = self.values()

    def values(self) -> Tensor:
        """The values without the change: those from before, or, if the parameter was trained since, the difference."""
        now = self.parameter.data
        assert self.own is not None
        if _equal(now, self._sum(self.own).to(now)):
            return self.own.to(now)
        return (now.float() - self.change.to(now.device)).to(now)

    def _sum(self, own: Tensor) -> Tensor:
        return (own.float() + self.change.to(own.device)).to(own)


class PatchedWeights:
    """All parameters of a model that a patch changes."""

    def __init__(self, model: nn.Module, patch: WeightPatch):
        self.parameters = [_find(model, path, change) for path, change in patch.changes.items()]

    def enter(self) -> None:
        """Add the changes to the parameters."""
        with torch.inference_mode(False):
            for parameter in self.parameters:
                parameter.put()
        for module in self._modules():
            module._register_state_dict_hook(self._give_own)
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)

    def leave(self) -> None:
        """Give the parameters back what they were."""
        with torch.inference_mode(False):
            for parameter in self.parameters:
                parameter.take()
        for module in self._modules():
            for hooks in (
                module._state_dict_hooks,
                module._load_state_dict_pre_hooks,
                module._load_state_dict_post_hooks,
            ):
                for key in [key for key, hook in hooks.items() if _owner(hook) is self]:
                    del hooks[key]

    def _modules(self) -> list[nn.Module]:
        return list(dict.fromkeys(parameter.module for parameter in self.parameters))

    def _of(self, module: nn.Module) -> list[PatchedParameter]:
        return [parameter for parameter in self.parameters if parameter.module is module]

    def _give_own(self, module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
        for parameter in self._of(module):
            if prefix + parameter.name in state:
                state[prefix + parameter.name] = parameter.values().detach()

    def _before_load(self, module: nn.Module, *args: Any) -> None:
        with torch.inference_mode(False):
            for parameter in self._of(module):
                parameter.take()

    def _after_load(self, module: nn.Module, *args: Any) -> None:
        with torch.inference_mode(False):
            for parameter in self._of(module):
                parameter.own = None
                parameter.put()


@contextmanager
def weights_patched(model: nn.Module, patch: WeightPatch | None) -> Iterator[None]:
    """Have the changes of a patch in the parameters inside a `with` block; nothing happens without a patch."""
    weights = None if patch is None else PatchedWeights(model, patch)
    if weights is not None:
        weights.enter()
    try:
        yield
    finally:
        if weights is not None:
            weights.leave()


def _owner(hook: Any) -> Any:
    """The object whose method a hook is; torch wraps some hooks."""
    return getattr(getattr(hook, "hook", hook), "__self__", None)


def _equal(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _find(model: nn.Module, path: str, change: Tensor) -> PatchedParameter:
    where, _, name = path.rpartition(".")
    try:
        module = model.get_submodule(where)
    except AttributeError:
        module = None
    found = None if module is None else module._parameters.get(name)
    if module is None or found is None:
        raise BadOption(f"the patch changes the parameter {path}, which this model does not have. {ADVICE}")
    if found.shape != change.shape or not found.is_floating_point():
        raise BadOption(
            f"the patch changes {path} as floats of shape {tuple(change.shape)}; the model's is {found.dtype} of shape "
            f"{tuple(found.shape)}. {ADVICE}"
        )
    return PatchedParameter(module, name, change)
