"""Checks values, read from a file or given in Python, against the annotations of the fields that they are for."""

import inspect
import types
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from functools import cache, lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from adamerge.core.checks import is_finite_number
from adamerge.core.errors import BadOption

SIMPLE: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "null",
}


def check_fields(kind: type, values: Mapping[str, Any], parts: tuple[type, ...]) -> None:
    """Refuse values that do not fit the annotated fields of a part, one of `parts`; the error names the field."""
    protocols = _protocols(parts)
    for name, annotation in annotations(kind).items():
        if name in values and not fits(values[name], annotation, protocols):
            wanted = describe(annotation)
            raise BadOption(f"the field {name!r} of {kind.__name__} must be {wanted}; got {_short(values[name])}")


@lru_cache(maxsize=1)
def _protocols(parts: tuple[type, ...]) -> frozenset[Any]:
    """The protocols of all fields of all parts."""
    return frozenset(each for part in parts for each in annotations(part).values() if is_protocol(each))


@cache
def annotations(kind: type) -> dict[str, Any]:
    """The annotations of a part's fields; none if they name something that cannot be found."""
    try:
        return get_type_hints(kind)
    except (NameError, AttributeError, TypeError):
        return {}


def fits(value: Any, annotation: Any, protocols: Collection[Any]) -> bool:
    """Whether a value may be in a field with this annotation.  An annotation of an unknown kind allows everything.

    `protocols` are those of all fields of all parts.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice, protocols) for choice in inner)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if origin is tuple and len(inner) == 2 and inner[1] is ...:
        return isinstance(value, tuple) and all(fits(each, inner[0], protocols) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping)
    if annotation is float:
        return is_finite_number(value)
    if annotation is int:
        return isinstance(value, int) and is_finite_number(value)
    if is_protocol(annotation):
        return _is_of_kind(value, annotation, protocols)
    return not isinstance(annotation, type) or isinstance(value, annotation)


def describe(annotation: Any) -> str:
    """What may be in a field with this annotation, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, inner))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        return f"a list of {describe(inner[0]).removeprefix('a ')}s"
    if origin is Mapping:
        return "a mapping"
    if annotation in SIMPLE:
        return SIMPLE[annotation]
    name = getattr(annotation, "__name__", str(annotation))
    return f"a {name.lower() if is_protocol(annotation) else name} part"


def is_protocol(annotation: Any) -> bool:
    """Whether an annotation is a protocol, such as `Salience`."""
    return isinstance(annotation, type) and getattr(annotation, "_is_protocol", False)


def _is_of_kind(value: Any, protocol: Any, protocols: Collection[Any]) -> bool:
    """Whether a part can be called as the protocol says.

    A part whose call has the arguments and the methods of another protocol is of that kind.  Names of arguments that no
    protocol has tell nothing; then their number must be right.
    """
    if not is_dataclass(value) or isinstance(value, type) or not isinstance(value, protocol):
        return False
    names = _arguments(type(value))
    kinds = [kind for kind in protocols if _arguments(kind) == names and isinstance(value, kind)]
    if not kinds:
        return len(names) == len(_arguments(protocol))
    most = max(len(vars(kind)) for kind in kinds)
    return any(kind is protocol for kind in kinds if len(vars(kind)) == most)


@cache
def _arguments(kind: type) -> tuple[str, ...]:
    """The names of the arguments with which an object of this class is called."""
    return tuple(inspect.signature(kind.__call__).parameters)[1:]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
