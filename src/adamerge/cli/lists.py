"""Options that hold several values: `--batch 1,8,32`, `--cut 0.2,0.3`, `--methods tome,dsm`, `--native tome:r=8`."""

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from adamerge.core.errors import BadOption

if TYPE_CHECKING:
    from adamerge.search.target import Target
    from adamerge.search.variants import Variant


def read_labels(text: str) -> list[str]:
    """Labels separated by commas; commas inside parentheses are part of a label.  No text, no labels."""
    return [label.strip() for label in re.split(r",(?![^(]*\))", text)] if text.strip() else []


def read_sizes(text: str) -> list[int]:
    """Batch sizes separated by commas."""
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        raise BadOption(f"--batch is whole numbers separated by commas, such as 1,8,32; got {text!r}") from None
    if min(sizes) < 1:
        raise BadOption(f"--batch sizes must be at least 1; got {text!r}")
    return sizes


def read_cuts(text: str, example: str = "0.2,0.4") -> "list[Target]":
    """The targets in `--cut`."""
    from adamerge.search.target import Target

    return [Target(cut=number) for number in _numbers("--cut", text, example)]


def read_gmacs(text: str) -> "list[Target]":
    """The targets in `--gmacs`."""
    from adamerge.search.target import Target

    return [Target(gmacs=number) for number in _numbers("--gmacs", text, "0.2,0.4")]


def read_natives(texts: Iterable[str] | None) -> "dict[str, Variant]":
    """All values of `--native`, each under its own text."""
    return dict(read_native(text) for text in texts or ())


def read_native(text: str) -> "tuple[str, Variant]":
    """`tome:r=8,proportional_attention=false` as a label and a variant."""
    from adamerge.cli.options import read_recipe
    from adamerge.search.variants import PRESET, Variant

    name, _, settings = text.partition(":")
    words = [word.strip() for word in settings.split(",") if word.strip()]
    for word in words:
        if "=" not in word:
            raise BadOption(f"--native is METHOD:OPTION=VALUE,OPTION=VALUE, such as tome:r=8; got {text!r}")
    if name == PRESET:
        raise BadOption(f"a preset is made for a cost: give --methods preset --cut 0.3 instead of --native {text}")
    # Checks the options as the other commands do.  Statistics are no option here: they are measured.
    read_recipe(name, [f"--{word}" for word in words], without=["stats"])
    pairs = (word.split("=", 1) for word in words)
    return text, Variant(name, {key.strip().replace("-", "_"): _value(value) for key, value in pairs})


def _value(text: str) -> Any:
    """A number, true, false, or a word."""
    try:
        return json.loads(text.strip().lower())
    except json.JSONDecodeError:
        return text.strip()


def _numbers(flag: str, text: str, example: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise BadOption(f"{flag} is numbers separated by commas, such as {example}; got {text!r}") from None
