"""Triton's interpreter without the work that it repeats: a third of the time of the tests of kernels."""

import inspect
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

if find_spec("triton") is not None and not torch.cuda.is_available():
    from triton.language import core
    from triton.runtime import interpreter

    @cache
    def _builtins(package: Any) -> list[str]:
        """The names that the interpreter replaces in a package, which is not patched yet."""
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def _patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        """What the interpreter does at every launch and every call of a device function, without a search for names."""
        for name in _builtins(package):
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_builtin = _patch_builtin
