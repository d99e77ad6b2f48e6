"""A module with one method replaced: it stays the same object, keeps its attributes and passes for its class.

Its class changes, not its attributes: copies of a module, replicas on other devices among them, have their own `self`.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn


@cache
def _kind(base: type[nn.Module], method: str, around: Callable[..., Any]) -> type[nn.Module]:
    """A subclass that passes for its base, whose `method` is `around(own, self, ...)`, `own` being the base's."""
    own = getattr(base, method)

    @wraps(own)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(own, self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _blank, (base, method, around), self.__dict__

    named = {name: getattr(base, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(
        base.__name__, (base,), {**named, method: replaced, "__reduce_ex__": __reduce_ex__, "adamerge_base": base}
    )


def _blank(base: type[nn.Module], method: str, around: Callable[..., Any]) -> nn.Module:
    return object.__new__(_kind(base, method, around))


def put_on(module: nn.Module, method: str, around: Callable[..., Any]) -> None:
    """Have `method` of a module run as `around(own, self, ...)`, a function at the top of its file."""
    take_off(module)
    module.__class__ = _kind(type(module), method, around)


def take_off(module: nn.Module) -> None:
    """Undo `put_on`."""
    module.__class__ = own_class(module)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, whatever it passes for."""
    return getattr(type(module), "adamerge_base", type(module))
