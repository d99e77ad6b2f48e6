"""Dataclass fields that may be given as a function, called when the field is first read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Deferred:
    """A value that has not been computed yet."""

    make: Callable[[], Any]


def deferred(make: Callable[[], T]) -> T:
    """A value for one of the fields that `lazy_fields` names: `make()` is called once, when the field is first read.

    It has the type of the field, as the result of `dataclasses.field` does.
    """
    return cast(T, Deferred(make))


def lazy_fields(*names: str) -> Callable[[C], C]:
    """Decorate a dataclass so that these fields take a value or `deferred(make)`; reading one always gives the value.

    All else is as in any dataclass: `dataclasses.replace`, comparing and printing read the fields, and so compute them.
    """

    def install(cls: C) -> C:
        hints = cls.__init__.__annotations__
        for name in names:
            setattr(cls, name, _LazyField(name))
            hints[name] = hints[name] | Deferred
        return cls

    return install


class _LazyField:
    """Keeps a field in the instance's `__dict__`, and replaces a deferred value by the computed one."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        value = vars(instance)[self.name]
        if isinstance(value, Deferred):
            value = vars(instance)[self.name] = value.make()
        return value

    def __set__(self, instance: object, value: Any) -> None:
        vars(instance)[self.name] = value
