"""Parts are known by their class names; a class that a notebook cell defines again replaces the older one."""

import textwrap
from collections.abc import Iterator
from dataclasses import replace

import pytest

from adamerge.core import parts
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.methods import tome

CELL = textwrap.dedent(
    """
    from dataclasses import dataclass
    from adamerge.core.parts import part

    @part
    @dataclass(frozen=True)
    class FromACell:
        power: float = {power}

        def __call__(self, evidence):
            return evidence.size ** self.power

        def macs(self, n, at):
            return 0 * n
    """
)


@pytest.fixture(autouse=True)
def registered_parts_are_restored(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(parts, "PARTS", dict(parts.PARTS))
    yield


def run_cell(power: float, module: str = "__main__") -> type:
    """Run the text of a cell as a notebook does, and give the class it defines."""
    names: dict = {"__name__": module}
    exec(CELL.format(power=power), names)
    return names["FromACell"]


def test_the_class_of_a_cell_that_is_run_again_replaces_the_older_one():
    older, newer = run_cell(1.0), run_cell(2.0)
    assert older is not newer
    text = replace(tome(4), salience=newer()).to_json()
    assert type(Recipe.from_json(text).salience) is newer
    assert Recipe.from_json(text.replace('"power": 2.0', '"power": 3.0')).salience == newer(3.0)


def test_a_recipe_written_with_the_older_class_is_read_with_the_newer_one():
    older = run_cell(1.0)
    text = replace(tome(4), salience=older(0.5)).to_json()
    newer = run_cell(2.0)
    assert Recipe.from_json(text).salience == newer(0.5)


def test_a_part_of_another_module_with_the_same_name_is_refused():
    run_cell(1.0)
    with pytest.raises(BadOption, match=r"part called 'FromACell' already .*__main__.*choose another name"):
        run_cell(1.0, module="another")


def test_a_cell_cannot_replace_a_part_of_the_library():
    names: dict = {"__name__": "__main__"}
    with pytest.raises(BadOption, match="there is a part called 'Uniform' already"):
        exec(CELL.format(power=1.0).replace("FromACell", "Uniform"), names)
