"""Which loops over the blocks read nothing between two of them, so that all blocks may run at the last one's call."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from adamerge.hosts.base import BlockStack, Host
from adamerge.patching.module_patch import MethodPatch

# The stack whose owner runs a method that loops over all its blocks and reads nothing in between.
_looped: ContextVar[nn.Module | None] = ContextVar("adamerge_looped_stack", default=None)


def whole_pass_patches(host: Host) -> tuple[MethodPatch, ...]:
    """The patch that marks the host's loop over its blocks, where the host has one."""
    return () if host.loop is None else (MethodPatch(host.owner, host.loop, mark_loop),)


def mark_loop(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the host's loop `own`, and let its stack know that it may wait for the last block."""
    stacks = [child for child in self.children() if isinstance(child, BlockStack)]
    if not stacks or _asks_for_hidden_states(self, args, kwargs):
        return own(self, *args, **kwargs)
    if torch.compiler.is_compiling():
        # Compilers do not follow context variables.
        stacks[0].looped = True
        try:
            return own(self, *args, **kwargs)
        finally:
            stacks[0].looped = False
    token = _looped.set(stacks[0])
    try:
        return own(self, *args, **kwargs)
    finally:
        _looped.reset(token)


def in_whole_pass(stack: BlockStack) -> bool:
    """Whether the loop that runs now over the blocks of `stack` reads nothing between them."""
    return stack.looped if torch.compiler.is_compiling() else _looped.get() is stack


def _asks_for_hidden_states(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether transformers 4 is asked for the tokens between blocks, by position, by keyword or by configuration."""
    asked = kwargs.get("output_hidden_states")
    if asked is None:
        asked = getattr(getattr(owner, "config", None), "output_hidden_states", False)
    return bool(asked) or any(value is True for value in args)
