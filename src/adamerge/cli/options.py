"""Options of a method, such as `--r-max 14 --split alternating`, read by the signature of its function."""

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.methods import METHODS, Method
from adamerge.search.variants import PRESET

# The name of the method where a recipe file is given.
RECIPE = "recipe"


def find_method(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise BadOption(f"there is no method {name!r}; choose one of {', '.join((*METHODS, PRESET))}")
    return METHODS[name]


def read_recipe(name: str, words: Sequence[str], *, without: Sequence[str] = ()) -> Recipe:
    """The recipe of method `name` with the options in `words`; options named in `without` are not accepted.

    `--recipe FILE` replaces the method and all its options.
    """
    if name == RECIPE or any(word.partition("=")[0] == "--recipe" for word in words):
        return _from_file(words)
    if name == PRESET:
        raise BadOption("a preset is made for a cost and for images; use it with eval, compare, bench or flops")
    method = find_method(name)
    return method(**read_options(name, method.make, words, without))


def read_options(
    name: str, make: Callable[..., Any], words: Sequence[str], without: Sequence[str] = ()
) -> dict[str, Any]:
    """The arguments for `make` in `words`, under the names of its parameters; `name` is what messages call it."""
    kinds = {key: kind for key, kind in get_type_hints(make).items() if key != "return" and key not in without}
    given: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        negated = key.startswith("no_") and kinds.get(key[3:]) is bool
        key = key[3:] if negated else key
        if not flag.startswith("--") or key not in kinds:
            raise BadOption(
                f"{name} does not know {word!r}; it takes {describe(kinds) or 'no options'}. The options of the "
                "command itself are in its --help."
            )
        if kinds[key] is bool and not equals:
            given[key] = not negated
            continue
        if not equals:
            if not rest:
                raise BadOption(f"{flag} needs a value ({_kind(kinds[key])})")
            text = rest.pop(0)
        given[key] = _value(flag, text, kinds[key])
    parameters = inspect.signature(make).parameters
    missing = [k for k in kinds if parameters[k].default is inspect.Parameter.empty and k not in given]
    if missing:
        raise BadOption(f"{name} needs {', '.join(_flag(k) for k in missing)}; it takes {describe(kinds)}")
    return given


def _from_file(words: Sequence[str]) -> Recipe:
    """The recipe in `--recipe FILE`."""
    flag, *rest = [part for word in words for part in word.split("=", 1)] or [""]
    if flag != "--recipe" or len(rest) != 1:
        raise BadOption(
            f"a recipe file brings all its options: give --recipe FILE and no others; got {' '.join(words)!r}"
        )
    return Recipe.load(rest[0])


def describe(kinds: dict[str, Any]) -> str:
    """The options as a user types them."""
    return ", ".join(f"{_flag(k)}" if kind is bool else f"{_flag(k)} {_kind(kind)}" for k, kind in kinds.items())


def usage(make: Callable[..., Any]) -> str:
    """All options of a method's function as a user types them."""
    return describe({k: kind for k, kind in get_type_hints(make).items() if k != "return"})


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _bare(kind: Any) -> Any:
    """The type inside `X | None`; the type of one number where there may be one for each block."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = [k for k in get_args(kind) if k is not type(None) and get_origin(k) is not tuple]
    return kind


def _many(kind: Any) -> bool:
    """Whether there may be a number for each block."""
    return any(get_origin(k) is tuple for k in get_args(kind))


def _kind(kind: Any) -> str:
    if _many(kind):
        return "NUMBER[,NUMBER…]"
    kind = _bare(kind)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "NUMBER", float: "NUMBER", LayerStats: "FILE.json", str: "TEXT"}.get(kind, "VALUE")


def _value(flag: str, text: str, kind: Any) -> Any:
    if _many(kind) and "," in text:
        return tuple(_value(flag, part, _bare(kind)) for part in text.split(","))
    kind = _bare(kind)
    if kind is LayerStats:
        return LayerStats.load(text)
    if get_origin(kind) is Literal or kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise BadOption(f"{flag} is true or false; got {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise BadOption(f"{flag} must be {wanted}; got {text!r}") from None
