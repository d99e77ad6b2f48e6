"""Which cases of long lists run always, and which machines cannot run some of them."""

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import pytest
import torch


def mostly_slow(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """The cases for `parametrize`; those that are not in `always` are marked slow."""
    return [case if case in always else pytest.param(*_values(case), marks=pytest.mark.slow) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    """The values of a case: a tuple is one value for each argument."""
    return case if isinstance(case, tuple) else (case,)


@cache
def products_mix_rows(dtype: torch.dtype) -> bool:
    """Whether a row of a matrix product on this CPU takes up values of the next row that are not finite.

    Older versions of oneDNN do so with AMX in bfloat16 if rows are no multiple of 32 long; see docs/reliability.md.
    """
    rows = torch.ones(200, 48, dtype=dtype)
    rows[1::2] = float("nan")
    with torch.inference_mode():
        return not bool((rows @ torch.ones(48, 144, dtype=dtype))[::2].isfinite().all())
