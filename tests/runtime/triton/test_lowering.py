"""Recipes are lowered to the options of the kernels, or the part that the kernels do not know is named."""

from dataclasses import replace

import pytest

from adamerge.core.recipe import Recipe
from adamerge.methods import adamerge, ats, dsm, dymu, evit, pitome, random, tofu, tome, vid_tldr
from adamerge.presets import protect
from adamerge.runtime.triton.lowering import Lowered, NotLowered, length_at, lower


def lowered(recipe: Recipe) -> Lowered:
    found = lower(recipe, prefix=1, class_token=True)
    assert isinstance(found, Lowered), found
    return found


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (pitome(r=2), "split ByEnergy"),
        (random(2), "links AtRandom"),
        (evit(0.6), "links IntoOne"),
        (ats(9), "links Sampled"),
        (dsm(2, windows=True), "reach SameWindow"),
        (replace(tome(2), site="before_block"), "salience Uniform with metric Keys at before_block"),
    ],
)
def test_the_part_that_the_kernels_do_not_know_is_named(recipe, reason):
    assert lower(recipe, prefix=1, class_token=True) == NotLowered(reason)


def test_a_combination_that_changes_with_the_layer_is_lowered_layer_by_layer():
    found = lowered(tofu(2))
    assert [found.policy_at(layer, 4).weigh for layer in range(4)] == ["keep", "keep", "size", "size"]
    assert [length_at(found.combine, layer, 4) for layer in range(4)] == [None, None, "largest", "largest"]


def test_salience_by_the_class_token_needs_one():
    assert lowered(protect(r=2.0)).attention_from == "class token"
    assert lowered(protect(r=2.0, class_token=False)).attention_from == "all tokens"
    assert lowered(vid_tldr(2)).attention_from == "entropy"
    assert lowered(tome(2)).attention_from is None
    found = lower(protect(r=2.0), prefix=0, class_token=False)
    assert isinstance(found, NotLowered) and found.reason.startswith("salience ClassShare")


@pytest.mark.parametrize("recipe", [tome(3), adamerge(r=3), dsm(3, 1)], ids=["tome", "adamerge", "dsm"])
def test_fixed_counts_are_known_before_the_tokens_are(recipe):
    found = lowered(recipe)
    assert recipe.may_merge(1, 3)
    assert [found.known_merges(1, 3, patches) for patches in (0, 1, 2, 5, 50)] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("recipe", [adamerge(3.0), dymu(3.0)])
def test_counts_that_adapt_are_not_known_before(recipe):
    assert lowered(recipe).known_merges(1, 3, 50) is None
