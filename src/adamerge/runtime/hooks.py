"""Finds hooks on the modules of blocks, and calls modules so that their hooks run."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as torch_module

from adamerge.runtime.module_watch import ChildWatch

# The registries of a module that `nn.Module.__call__` reads, and those for all modules of a process.
REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_REGISTRIES = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)

Function = TypeVar("Function", bound=Callable[..., Any])

_lock = threading.RLock()


@dataclass(frozen=True)
class Hooks:
    """Where hooks are.

    Attributes:
        where: the first place, in words: `block 3`, `attn.proj of block 3`, or `all modules` for hooks of the process.
        inside: whether one is on a part of a block, which sees merged tokens.
    """

    where: str
    inside: bool

    @property
    def reason(self) -> str:
        """Why the blocks run by the host's own modules."""
        return f"there is a hook on {self.where}"


class HookFinder:
    """Finds hooks on blocks and on their parts.  It runs at every forward pass, so it keeps flat lists of registries.

    Hooks that are `ignored` are the host library's own.
    """

    def __init__(self, blocks: Callable[[], Sequence[nn.Module]], ignored: Callable[[Any], bool]):
        self._blocks, self._ignored = blocks, ignored
        self._watch: ChildWatch | None = None
        self._registries: list[dict[int, Any]] = []

    def find(self) -> Hooks | None:
        """Where hooks are now; None where there are none."""
        if self._watch is None or self._watch.changed():
            blocks = self._blocks()
            self._watch = ChildWatch(blocks)
            modules = [module for block in blocks for module in block.modules()]
            self._registries = [getattr(module, name) for module in modules for name in REGISTRIES]
        if any(self._registries):
            hooked = list(self.hooked_modules())
            if hooked:
                return Hooks(_in_words(*hooked[0][:2]), any(path for _, path, _ in hooked))
        return Hooks("all modules", inside=False) if any(GLOBAL_REGISTRIES) else None

    def hooked_modules(self) -> Iterator[tuple[int, str, nn.Module]]:
        """Layer, path in the block, and module of all that have hooks; the path of a block itself is empty."""
        for layer, block in enumerate(self._blocks()):
            for path, module in block.named_modules():
                hooks = [hook for name in REGISTRIES for hook in getattr(module, name).values()]
                if not all(map(self._ignored, hooks)):
                    yield layer, path, module


def _in_words(layer: int, path: str) -> str:
    return f"{path} of block {layer}" if path else f"block {layer}"


def constant_for_compilers(function: Function) -> Function:
    """Mark a function that a compiler calls once, when it traces; it keeps the result.

    The same as `torch.compiler.assume_constant_result`, which would import the compiler together with this package.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def call_as(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module with `function` in the place of its `forward`, so that its hooks run around the function.

    Threads that call the same module wait for each other.
    """
    with _lock:
        own = vars(module).get("forward")
        vars(module)["forward"] = function
        try:
            return module(*args, **kwargs)
        finally:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own
