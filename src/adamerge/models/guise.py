"""A module with methods replaced: it stays the same object, keeps its attributes and passes for its class.

Its class changes, not its attributes: copies of a module, replicas on other devices among them, have their own `self`.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

Around = Callable[..., Any]
# What methods of a class are replaced by, and a method of a module.
Worn = tuple[tuple[str, Around], ...]
Replaced = tuple[nn.Module, str, Around]


@cache
def _kind(base: type[nn.Module], worn: Worn) -> type[nn.Module]:
    """A subclass that passes for its base, whose methods are `around(own, self, ...)`, `own` being the base's."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _blank, (base, worn), self.__dict__

    named = {name: getattr(base, name) for name in ("__doc__", "__module__", "__qualname__")}
    replaced = {method: _replaced(getattr(base, method), around) for method, around in worn}
    hidden = {"__reduce_ex__": __reduce_ex__, "adamerge_base": base, "adamerge_worn": worn}
    return type(base.__name__, (base,), {**named, **replaced, **hidden})


def _replaced(own: Around, around: Around) -> Around:
    @wraps(own)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(own, self, *args, **kwargs)

    return replaced


def _blank(base: type[nn.Module], worn: Worn) -> nn.Module:
    return object.__new__(_kind(base, worn))


def put_on(module: nn.Module, method: str, around: Around) -> None:
    """Have `method` of a module run as `around(own, self, ...)`, a function at the top of its file."""
    worn = dict(getattr(type(module), "adamerge_worn", ()))
    module.__class__ = _kind(own_class(module), tuple({**worn, method: around}.items()))


def take_off(module: nn.Module) -> None:
    """Undo all that was `put_on`."""
    module.__class__ = own_class(module)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, whatever it passes for."""
    return getattr(type(module), "adamerge_base", type(module))
