"""Finds hooks on the modules of blocks, and calls modules so that their hooks run."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as torch_module

from adamerge.core.errors import HookNotCalled
from adamerge.runtime.block_view import View
from adamerge.runtime.module_watch import ChildWatch

# The registries of a module that `nn.Module.__call__` reads, and those for all modules of a process.
REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# All attributes of a module in which torch keeps hooks around its call.
HOOK_ATTRIBUTES = (
    *REGISTRIES,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
)
GLOBAL_REGISTRIES = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)

# Layer, path in the block, and module; the path of a block itself is empty.
Place = tuple[int, str, nn.Module]
Function = TypeVar("Function", bound=Callable[..., Any])

_lock = threading.RLock()


@dataclass(frozen=True)
class Hooks:
    """Where hooks are.

    Attributes:
        where: the first place, in words: `block 3`, `attn.proj of block 3`, or `all modules` for hooks of the process.
        inside: whether one is on a part of a block, which sees merged tokens.
        whole: whether one is on a block or on its attention as a whole, which only calls of modules reach.
    """

    where: str
    inside: bool
    whole: bool = True

    @property
    def reason(self) -> str:
        """Why the blocks run by the host's own modules."""
        return f"there is a hook on {self.where}"


class HookFinder:
    """Finds hooks on blocks and on their parts.  It runs at every forward pass, so it keeps flat lists of registries.

    Hooks that are `ignored` are the host library's own.  A view may say which modules of its block are never called
    (`uncalled`), and in whose place its own code runs (`replaced`); hooks or methods there are refused.
    """

    def __init__(self, blocks: Sequence[nn.Module], views: Sequence[View], ignored: Callable[[Any], bool]):
        self._blocks, self._views, self._ignored = blocks, views, ignored
        self._watch: ChildWatch | None = None
        self._registries: list[dict[int, Any]] = []
        self._replaced: list[nn.Module] = []

    def find(self) -> Hooks | None:
        """Where hooks are now; None where there are none.  Hooks that would not be called raise `HookNotCalled`."""
        if self._watch is None or self._watch.changed():
            self._watch = ChildWatch(self._blocks)
            modules = [module for block in self._blocks for module in block.modules()]
            self._registries = [getattr(module, name) for module in modules for name in REGISTRIES]
            self._replaced = [module for view in self._views for module in getattr(view, "replaced", ())]
        for module in self._replaced:
            if has_own_forward(module):
                self._refuse("`forward` was replaced on", module)
        hooked = list(self._hooked_modules()) if any(self._registries) else []
        uncalled = {module for view in self._views for module in getattr(view, "uncalled", ())} if hooked else ()
        for _, _, module in hooked:
            if module in uncalled:
                self._refuse("there is a hook on", module)
        if hooked:
            inside = any(path for _, path, _ in hooked)
            whole = any(not path or module in self._replaced for _, path, module in hooked)
            return Hooks(_in_words(*hooked[0][:2]), inside, whole)
        return Hooks("all modules", inside=False) if any(GLOBAL_REGISTRIES) else None

    def _hooked_modules(self) -> Iterator[Place]:
        """All modules that have hooks."""
        for layer, path, module in self._places():
            hooks = [hook for name in REGISTRIES for hook in getattr(module, name).values()]
            if not all(map(self._ignored, hooks)):
                yield layer, path, module

    def _places(self) -> Iterator[Place]:
        for layer, block in enumerate(self._blocks):
            for path, module in block.named_modules():
                yield layer, path, module

    def _refuse(self, what: str, refused: nn.Module) -> None:
        where = next(_in_words(layer, path) for layer, path, module in self._places() if module is refused)
        raise HookNotCalled(
            f"{what} {where}, which a merged model does not call: merging runs between its parts. Undo that, or put a "
            "hook on the block or on a part that is called (a norm, a projection, the MLP), or call "
            "adamerge.remove(model)."
        )


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
        vars(module)["forward"] = _Instead(function)
        try:
            return module(*args, **kwargs)
        finally:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own


@dataclass(frozen=True)
class _Instead:
    """What `call_as` lays over the `forward` of a module for one call."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody replaced `forward` of this one module, as in `module.forward = function`."""
    return "forward" in vars(module) and not isinstance(vars(module)["forward"], _Instead)
