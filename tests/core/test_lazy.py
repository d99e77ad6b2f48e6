"""A lazy field is computed once, when first read; in all else it is a field like any other."""

from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

from adamerge.core.lazy import deferred, lazy_fields


@lazy_fields("value", "other")
@dataclass(frozen=True)
class Example:
    value: int
    name: str
    other: int | None = None


def counted() -> tuple[list[int], Example]:
    calls: list[int] = []

    def make() -> int:
        calls.append(1)
        return 7

    return calls, Example(deferred(make), "a")


def test_a_deferred_value_is_computed_once_and_only_when_read():
    calls, example = counted()
    assert example.name == "a" and calls == []
    assert (example.value, example.value) == (7, 7) and calls == [1]


def test_a_plain_value_and_a_default_are_fields_as_ever():
    assert Example(3, "a") == Example(value=3, name="a", other=None) != Example(4, "a")
    assert [field.name for field in fields(Example)] == ["value", "name", "other"]
    assert repr(Example(3, "a", 5)) == "Example(value=3, name='a', other=5)"


def test_replace_keeps_a_deferred_value_and_takes_a_new_one():
    calls, example = counted()
    assert replace(example, name="b") == Example(7, "b") and calls == [1]
    assert replace(example, value=8).value == 8
    assert replace(example, value=deferred(lambda: 9)).value == 9


def test_a_frozen_dataclass_stays_frozen():
    _, example = counted()
    with pytest.raises(FrozenInstanceError):
        example.value = 3  # pyright: ignore[reportAttributeAccessIssue]
