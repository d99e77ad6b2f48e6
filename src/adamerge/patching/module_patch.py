"""A module with methods replaced: it stays the same object, keeps its attributes and passes for its class.

Its class changes, not its attributes: copies of a module, replicas on other devices among them, have their own `self`.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

Around = Callable[..., Any]
# What methods of a class are replaced by, and a method of a module.
Patches = tuple[tuple[str, Around], ...]
MethodPatch = tuple[nn.Module, str, Around]


@cache
def _patched_class(base: type[nn.Module], worn: Patches) -> type[nn.Module]:
    """A subclass that passes for its base, whose methods are `around(own, self, ...)`, `own` being the base's."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _blank_instance, (base, worn), self.__dict__

    named = {name: getattr(base, name) for name in ("__doc__", "__module__", "__qualname__")}
    replaced = {method: _wrapped(getattr(base, method), around) for method, around in worn}
    hidden = {"__reduce_ex__": __reduce_ex__, "adamerge_base": base, "adamerge_worn": worn}
    return type(base.__name__, (base,), {**named, **replaced, **hidden})


def _wrapped(own: Around, around: Around) -> Around:
    @wraps(own)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(own, self, *args, **kwargs)

    return replaced


def _blank_instance(base: type[nn.Module], worn: Patches) -> nn.Module:
    return object.__new__(_patched_class(base, worn))


def patch(module: nn.Module, method: str, around: Around) -> None:
    """Have `method` of a module run as `around(own, self, ...)`, a function at the top of its file."""
    worn = dict(getattr(type(module), "adamerge_worn", ()))
    module.__class__ = _patched_class(unpatched_class(module), tuple({**worn, method: around}.items()))


def unpatch(module: nn.Module) -> None:
    """Undo all that was `put_on`."""
    module.__class__ = unpatched_class(module)


def unpatched_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, whatever it passes for."""
    return getattr(type(module), "adamerge_base", type(module))
