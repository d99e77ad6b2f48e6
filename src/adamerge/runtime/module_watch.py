"""Noticing changes of modules between two calls."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


class ChildWatch:
    """Compares modules with what they were: whether each has the same children."""

    def __init__(self, roots: Sequence[nn.Module]):
        self._families = [module._modules for root in roots for module in root.modules()]
        self._sizes = [len(children) for children in self._families]
        self._children = [(children, name, child) for children in self._families for name, child in children.items()]

    def changed(self) -> bool:
        """Whether a module has another child than before."""
        if list(map(len, self._families)) != self._sizes:
            return True
        return any(registry.get(name) is not child for registry, name, child in self._children)


class ModuleWatch:
    """Compares modules with what they were: their children, their modes, and where their parameters lie in memory.

    Values written into a parameter's memory are no change: a CUDA graph that reads that memory reads the new values.
    This runs at every forward pass, so it reads registries directly and keeps flat lists.
    """

    def __init__(self, roots: Sequence[nn.Module], ignored: Callable[[Any], bool] = lambda hook: False):
        self._ignored = ignored
        modules = [module for root in roots for module in root.modules()]
        self._modes = [(module.__dict__, module.training) for module in modules]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._children = ChildWatch(roots)
        self._tensors = [
            (registry, name, tensor, tensor.data_ptr(), tensor.dtype)
            for module in modules
            for registry in (module._parameters, module._buffers)
            for name, tensor in registry.items()
            if tensor is not None
        ]

    def changed(self) -> bool:
        """Whether a child, a mode, a parameter or the memory of one is another than before."""
        if self._children.changed():
            return True
        for registry, name, tensor, address, dtype in self._tensors:
            if registry.get(name) is not tensor or tensor.data_ptr() != address or tensor.dtype is not dtype:
                return True
        return any(attributes["training"] is not training for attributes, training in self._modes)

    def hooked(self) -> bool:
        """Whether any of the modules has a forward hook, besides those that are `ignored`."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return True
        return any(self._hooks) and not all(self._ignored(hook) for hooks in self._hooks for hook in hooks.values())
