"""Checks of the numbers that parts and options are given."""

import math

from adamerge.core.errors import BadOption

# More tokens than any image has, and small enough for an integer.
MOST_TOKENS = 2**31
# Greater whole numbers are not exact as floats, and tensors may refuse them.
GREATEST_WHOLE = 2**53


def is_finite_number(value: object) -> bool:
    """Whether a value is a finite number; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= GREATEST_WHOLE if isinstance(value, int) else math.isfinite(value)


def check_number(name: str, value: object, at_least: float | None = None, at_most: float | None = None) -> None:
    """Refuse what is not a finite number, too small or too great."""
    if not isinstance(value, (int, float)) or not is_finite_number(value):
        raise BadOption(f"{name} must be a finite number; got {value!r}")
    if at_least is not None and value < at_least:
        raise BadOption(f"{name} must be >= {at_least}; got {value!r}")
    if at_most is not None and value > at_most:
        raise BadOption(f"{name} must be <= {at_most}; got {value!r}")


def check_numbers(name: str, values: float | tuple[float, ...]) -> None:
    """Refuse what is neither a finite number >= 0 nor one for each layer."""
    for value in values if isinstance(values, tuple) else (values,):
        check_number(name, value, at_least=0)
