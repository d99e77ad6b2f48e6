"""Checks of the numbers that parts and options are given."""

import math

from adamerge.core.errors import BadOption


def check_number(name: str, value: object, at_least: float | None = None) -> None:
    """Refuse what is not a finite number, or is too small."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadOption(f"{name} must be a finite number; got {value!r}")
    if at_least is not None and value < at_least:
        raise BadOption(f"{name} must be >= {at_least}; got {value!r}")


def check_numbers(name: str, values: float | tuple[float, ...]) -> None:
    """Refuse what is neither a finite number >= 0 nor one for each layer."""
    for value in values if isinstance(values, tuple) else (values,):
        check_number(name, value, at_least=0)
