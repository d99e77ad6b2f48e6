"""The page of methods says what the table of methods says."""

from pathlib import Path

import pytest

from adamerge.methods import METHODS
from adamerge.methods.catalogue import TRAINED, knob, options, render
from adamerge.methods.registry import Method

ROOT = Path(__file__).parents[2]
# These three come from no other paper: the subject of this library, its absence and its floor.
OWN = {"adamerge", "none", "random"}


def test_the_page_is_what_the_table_of_methods_gives():
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert page == render(), "run `python -m adamerge.methods.catalogue > docs/methods.md`"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_comes_from_its_paper(name):
    make = METHODS[name].make
    if make.__name__ not in OWN:
        assert "From the paper" in (make.__doc__ or ""), f"the docstring of {name} does not say what is its paper's"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_row_with_a_sentence(name):
    (row,) = [line for line in render().splitlines() if line.startswith(f"| `{name}` |")]
    summary = METHODS[name].summary
    assert summary.endswith(".") and summary.replace("|", "\\|") in row


@pytest.mark.parametrize("name", METHODS)
def test_a_knob_is_an_option_of_its_method(name):
    method = METHODS[name]
    assert method.knob is None or f"`{method.knob}" in options(method)


def test_every_trained_method_the_paper_cites_is_on_the_page():
    cited = {"DynamicViT", "A-ViT", "AdaViT", "Evo-ViT", "SPViT", "IA-RED²", "Patch Slimming"}
    assert {trained.name for trained in TRAINED} == cited
    for trained in TRAINED:
        assert all((trained.source, trained.idea, trained.weights, trained.parts))
        assert f"| {trained.name} | {trained.source} |" in render()


def test_a_variant_shows_its_own_values_and_a_pipe_does_not_break_the_table():
    variant = Method(METHODS["tome"].make, "r", 0, 8, (("proportional_attention", False),))
    assert options(variant) == "`r`, `proportional_attention=False`"
    assert knob(variant) == "`r`: 0 to 8" and knob(METHODS["none"]) == ""
    lines = [line for line in render().splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {6}
