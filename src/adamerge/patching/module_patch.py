"""Replaces methods of one module and puts them back.  The module stays the same object with the same attributes.

A patched module gets a subclass of its class.  An attribute would be bound to one object; a class also serves copies
and replicas.  Undoing checks first that the class and the methods are still those of the patch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from types import MethodType
from typing import Any

from torch import nn
from torch.fx import Proxy

from adamerge.core.errors import PatchConflict

# Called as `around(own, self, *args, **kwargs)`, where `own` is the method of the unpatched class; with a context, as
# `around(own, self, context, *args, **kwargs)`.  It must be a function at the top of its file, so that models can be
# pickled.
Around = Callable[..., Any]


@dataclass(frozen=True)
class Replacement:
    """What a method of a class is replaced by.  All modules with the same replacements share a class."""

    method: str
    around: Around
    has_context: bool


Replaced = tuple[Replacement, ...]


@dataclass(frozen=True)
class MethodPatch:
    """`method` of `module` is to run as `around`.

    `context` is passed to `around`, where it is not None.  It is kept on the module, so that a copy of the model has a
    copy of it.
    """

    module: nn.Module
    method: str
    around: Around
    context: Any = None


@cache
def _patched_class(base: type[nn.Module], replaced: Replaced) -> type[nn.Module]:
    """A subclass with the name of its base, in which these methods are replaced."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _blank_instance, (base, replaced), self.__dict__

    named = {name: getattr(base, name) for name in ("__doc__", "__module__", "__qualname__")}
    methods = {each.method: _wrapped(base, each) for each in replaced}
    hidden = {"__reduce_ex__": __reduce_ex__, "adamerge_base": base, "adamerge_replaced": replaced}
    return type(base.__name__, (base,), {**named, **methods, **hidden})


def _wrapped(base: type[nn.Module], replacement: Replacement) -> Around:
    method, around, has_context = replacement.method, replacement.around, replacement.has_context

    @wraps(getattr(base, method))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Proxy) for value in args):
            # torch.fx traces; the stack of blocks says what to do instead.
            return getattr(base, method)(self, *args, **kwargs)
        if has_context:
            args = (self.adamerge_context[method], *args)
        # Read at each call: the class is kept, and another library may replace the method of the base meanwhile.
        return around(getattr(base, method), self, *args, **kwargs)

    return call


def _blank_instance(base: type[nn.Module], replaced: Replaced) -> nn.Module:
    return object.__new__(_patched_class(base, replaced))


def patch(wanted: MethodPatch) -> None:
    """Replace a method.  One that is set on the module itself is left alone: the class's method is not called then."""
    module, method = wanted.module, wanted.method
    if method in vars(module):
        return
    if wanted.context is not None:
        vars(module).setdefault("adamerge_context", {})[method] = wanted.context
    others = [each for each in _replaced(module) if each.method != method]
    replaced = (*others, Replacement(method, wanted.around, wanted.context is not None))
    module.__class__ = _patched_class(unpatched_class(module), replaced)


def unpatch(module: nn.Module) -> None:
    """Undo all patches of a module.  Call `conflict` first."""
    for each in _replaced(module):
        # Left by a library that replaced the method for a while; it would keep the patch in force.
        vars(module).pop(each.method, None)
    vars(module).pop("adamerge_context", None)
    module.__class__ = unpatched_class(module)


def unpatched_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without our patch."""
    return vars(type(module)).get("adamerge_base", type(module))


def conflict(module: nn.Module) -> str | None:
    """What another library changed on a module after it was patched: `expected …, got …`; None where nothing."""
    kind = type(module)
    patched = [base for base in kind.__mro__ if "adamerge_base" in vars(base)]
    if patched and patched[0] is not kind:
        return f"expected class {kind.__mro__[1].__name__}, got {kind.__name__} on top of it"
    for method in [each.method for each in _replaced(module)]:
        found = vars(module).get(method)
        ours = isinstance(found, MethodType) and found.__self__ is module and found.__func__ is vars(kind)[method]
        if found is not None and not ours:
            return f"expected the method `{method}` of its class, got {found!r} set on the module"
    return None


def refuse_conflict(model: nn.Module, module: nn.Module, reason: str | None) -> None:
    """Raise an error if there is a reason not to undo the patch of a module of `model`."""
    if reason is None:
        return
    paths = [path for path, other in model.named_modules() if other is module]
    where = f"its module {paths[0]}" if paths and paths[0] else "the model"
    raise PatchConflict(
        f"adamerge.apply patched {where}, and another library changed it since: {reason}. Nothing was changed now. "
        "Undo the other change first (a parametrization by torch.nn.utils.parametrize.remove_parametrizations), "
        "then call this again; the other change can be made again afterwards."
    )


def _replaced(module: nn.Module) -> Replaced:
    return vars(type(module)).get("adamerge_replaced", ())
