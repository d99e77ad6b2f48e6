"""Long lists of cases: some run always, the others with `-m slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """The cases for `parametrize`; those that are not in `always` are marked slow."""
    return [case if case in always else pytest.param(*_values(case), marks=pytest.mark.slow) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    """The values of a case: a tuple is one value for each argument."""
    return case if isinstance(case, tuple) else (case,)
