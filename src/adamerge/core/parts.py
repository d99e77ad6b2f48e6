"""The registry of recipe parts, and recipes as JSON: reading one back creates registered parts and nothing else."""

from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from typing import Any, TypeVar

from adamerge.core.errors import BadOption
from adamerge.core.field_types import check_fields

PARTS: dict[str, type] = {}
# In the metadata of a field: its value is not written where it is None.
LEFT_OUT_IF_NONE = "left_out_if_none"
P = TypeVar("P", bound=type)


def part(cls: P) -> P:
    """Class decorator: register a frozen dataclass as a part of recipes, under its class name.

    A class that is defined again, as by a notebook cell that runs twice, replaces the older definition.  A name that a
    class of another module has is refused with `BadOption`.
    """
    older = PARTS.get(cls.__name__, cls)
    if (older.__module__, older.__qualname__) != (cls.__module__, cls.__qualname__):
        raise BadOption(f"there is a part called {cls.__name__!r} already ({older}); choose another name")
    PARTS[cls.__name__] = cls
    return cls


def check_parts(value: Any) -> None:
    """Refuse a part whose fields, or those of a part inside it, do not fit their annotations; the error names one."""
    if not is_dataclass(value):
        return
    inner = {each.name: getattr(value, each.name) for each in fields(value)}
    check_fields(type(value), inner, tuple(PARTS.values()))
    for each in inner.values():
        check_parts(each)


def to_json(value: Any) -> Any:
    """A part, with all parts inside it, as plain JSON data."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = {f.name: to_json(getattr(value, f.name)) for f in fields(value) if f.init and not _absent(value, f)}
        return {"part": type(value).__name__, **inner}
    if isinstance(value, (tuple, list)):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {"plain": value}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BadOption(
        f"a recipe is made of parts, numbers, texts and lists; {value!r} ({type(value).__name__}) is neither"
    )


def _absent(value: Any, field: "Field[Any]") -> bool:
    """Whether a field is left out of the JSON data: one that older versions do not know, where it is None."""
    return field.metadata.get(LEFT_OUT_IF_NONE, False) and getattr(value, field.name) is None


def from_json(data: Any) -> Any:
    """The part that `to_json` wrote.  Only registered parts are created; anything else is refused with `BadOption`."""
    if isinstance(data, list):
        return tuple(from_json(v) for v in data)
    if not isinstance(data, dict):
        return data
    if "plain" in data:
        return data["plain"]
    inner = {k: from_json(v) for k, v in data.items() if k != "part"}
    name = data.get("part")
    make: Callable[..., Any] | None = PARTS.get(name) if isinstance(name, str) else None
    if make is None:
        raise BadOption(f"unknown part {data.get('part')!r}; this version knows {', '.join(sorted(PARTS))}")
    check_fields(PARTS[str(name)], inner, tuple(PARTS.values()))
    try:
        return make(**inner)
    except TypeError as error:
        raise BadOption(f"the part {data['part']} cannot be made from {inner}: {error}") from error
