"""The checker of types and shapes finds mistakes in calls, results and fields."""

import importlib
import sys

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from typecheck import check_package

SOURCE = """
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, no_type_check

from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    import decimal
    from decimal import Decimal

Row = Float[Tensor, " n"]


def add(a: Row, b: Row) -> Row:
    return a + b


def longer(a: Row) -> Row:
    return a.repeat(2)


def outer(a: Row) -> Float[Tensor, " m"]:
    return longer_unchecked(a)


@no_type_check
def longer_unchecked(a: Row) -> Row:
    return a.repeat(2)


def half(x: float) -> float:
    return x / 2


def exact(x: "Decimal", context: "decimal.Context | None" = None) -> "Later":
    return Later(3)


@dataclass(frozen=True)
class Pair:
    a: Row
    b: Row | None = None

    @staticmethod
    def of(rows: list[Tensor]) -> "Pair":
        return Pair(*rows)

    @cached_property
    def name(self) -> str:
        return 3


@dataclass
class Later:
    number: int
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked")
    (folder / "example_of_checks.py").write_text(SOURCE, encoding="utf-8")
    before = list(sys.path), list(sys.meta_path)
    sys.path.insert(0, str(folder))
    check_package("example_of_checks")
    yield importlib.import_module("example_of_checks")
    sys.path[:], sys.meta_path[:] = before
    del sys.modules["example_of_checks"]


ONE, TWO = torch.ones(2), torch.ones(3)


def test_correct_calls_run(example):
    assert example.add(ONE, ONE).tolist() == [2, 2]
    assert len(example.outer(ONE)) == len(example.longer_unchecked(ONE)) == 4
    assert example.half(3) == 1.5
    assert example.Pair.of([ONE, ONE]).b is ONE and example.exact("anything").number == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.add(ONE, TWO),
        lambda m: m.add(ONE, ONE.long()),
        lambda m: m.add(ONE, ONE[None]),
        lambda m: m.longer(ONE),
        lambda m: m.half("3"),
        lambda m: m.Pair(ONE, TWO),
        lambda m: m.Pair.of((ONE, ONE)),
        lambda m: m.Pair(ONE).name,
        lambda m: m.Later("3"),
    ],
    ids=["lengths", "dtype", "dimensions", "result", "number", "fields", "list", "property", "field"],
)
def test_mistakes_are_found(example, call):
    with pytest.raises(BeartypeCallHintViolation):
        call(example)


def test_checks_can_be_switched_off(example, unchecked):
    assert len(example.longer(ONE)) == 4 and example.half(True) == 0.5
    assert example.Pair(ONE, TWO).name == 3
