"""A preset is solved for a target as a method is, and gives the recipe of `adamerge.presets.best`."""

from collections.abc import Mapping
from typing import Any

import pytest
from hosts.families import build, pictures

import adamerge
from adamerge.core.errors import BadOption
from adamerge.search.solve_variant import check_variant, solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import PRESETS, Variant, find_variant


@pytest.mark.parametrize("label", PRESETS)
def test_a_preset_is_the_recipe_of_best(label):
    model, images = build("vit"), pictures(6)
    found = solve_variant(model, images, find_variant(label), Target(cut=0.2), tolerance=0.05)
    assert found.recipe == adamerge.presets.best(model, images, 0.2, static="static" in label)
    assert found.knob is None and found.target_cut == pytest.approx(0.2)
    assert found.met is (abs((1 - found.cut) / 0.8 - 1) <= 0.05)


@pytest.mark.parametrize(
    ("options", "native", "told"),
    [
        ({"merge_every": 0}, False, "merge_every must be a whole number >= 1: 2 merges at every second block; got 0"),
        ({"r": 3}, False, "a preset takes the options loss, static, merge_every; got r"),
        ({}, True, "a preset is made for a cost and has no parameters of its own; give it among the methods"),
    ],
)
def test_wrong_variants_of_the_preset_are_refused(options: Mapping[str, Any], native, told):
    with pytest.raises(BadOption, match=f"^{told}$"):
        check_variant(Variant("preset", options), native=native)


def test_the_options_of_a_native_variant_set_its_strength_and_those_of_others_leave_it_open():
    check_variant(Variant("tome", {"proportional_attention": False}))
    check_variant(Variant("tome", {"r": 3}), native=True)
    with pytest.raises(BadOption, match=r"tome cannot be made with \{\}: .*'r'"):
        check_variant(Variant("tome"), native=True)
    with pytest.raises(BadOption, match=r"tome cannot be made with .*unexpected keyword argument 'bogus'"):
        check_variant(Variant("tome", {"bogus": 3}))
