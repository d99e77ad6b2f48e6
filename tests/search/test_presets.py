"""The preset meets its cost without a search, wherever it is called, and beats ToMe untuned."""

import pytest
import torch
from hosts.families import build, pictures
from search.mean_cost import mean_cost

import adamerge
from adamerge import presets
from adamerge.core.budget import Threshold
from adamerge.core.errors import BadOption
from adamerge.flops import meter
from adamerge.search.evaluator import Evaluator

FINE = {"patch_size": 8, "depth": 4}


@pytest.fixture(scope="module")
def model():
    return build("vit", **FINE)


@pytest.fixture(scope="module")
def images():
    return pictures(12)


def test_the_preset_meets_its_cost_without_a_search(model, images):
    recipe = presets.best(model, images, 0.3)
    assert mean_cost(model, images, recipe) == pytest.approx(0.7 * meter(model).unmerged().true.item(), rel=0.006)
    assert isinstance(recipe.budget, Threshold) and isinstance(recipe.budget.r, tuple)


def test_a_preset_may_merge_at_every_third_block_only(images):
    model = build("vit", patch_size=8, depth=12)
    recipe = presets.best(model, images, 0.3, merge_every=3)
    assert mean_cost(model, images, recipe) == pytest.approx(0.7 * meter(model).unmerged().true.item(), rel=0.006)
    assert [layer for layer in range(12) if recipe.may_merge(layer, 12)] == [4, 7, 10, 11]
    with pytest.raises(BadOption, match="merge_every must be a whole number >= 1: 2 merges at every second block; got"):
        presets.best(model, images, 0.3, merge_every=0)


def test_a_count_that_does_not_exist_is_refused_by_the_name_of_the_option(model, images, unchecked):
    with pytest.raises(BadOption, match=r"^cost must be one of true, paper; got 'bogus'$"):
        presets.best(model, images, 0.3, cost="bogus")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="unexpected keyword argument 'count'"):
        presets.best(model, images, 0.3, count="true")  # pyright: ignore[reportCallIssue]


def test_the_preset_meets_its_cost_in_the_papers_count(model, images):
    recipe = presets.best(model, images, 0.2, cost="paper")
    full = meter(model).unmerged().paper.item()
    assert mean_cost(model, images, recipe, "paper") == pytest.approx(0.8 * full, rel=0.006)


def test_the_untuned_preset_diverges_far_less_than_tome_on_the_embedded_model():
    """The main claim, on the one trained model that is always here; docs/frontier.md has the others."""
    from adamerge.embedded import load, preprocess, scenes
    from adamerge.methods import METHODS
    from adamerge.search.solve import solve

    model, images = load(), preprocess(scenes(0, 16, seed=3).images)
    evaluator = Evaluator(model, [images])
    recipe = presets.best(model, images, 0.3)
    tome = solve(model, images, METHODS["tome"], 0.3).recipe
    mine, theirs = (evaluator.sweep(one, calibrate=False) for one in (recipe, tome))
    assert mine.macs.mean() <= 1.006 * theirs.macs.mean()
    assert mine.loss.mean() < 0.2 * theirs.loss.mean()


@pytest.mark.parametrize("family", ["vit", "average_pool_with_class_token", "map_pool"])
def test_a_model_made_in_inference_mode_gets_the_same_preset_and_the_same_tuning(family, images):
    """Its parameters are inference tensors, which no computation under autograd may use."""
    plain = build(family, **FINE)
    expected = presets.best(plain, images, 0.3), adamerge.tune(plain, images, 0.3, tries=2, progress=False)
    with torch.inference_mode():
        made_here = build(family, **FINE)
        own = images.clone()
        assert presets.best(made_here, own, 0.3) == expected[0]
        assert adamerge.tune(made_here, own, 0.3, tries=2, progress=False) == expected[1]
    assert presets.best(made_here, own, 0.3) == expected[0], "also where inference mode has ended"
    assert all(parameter.is_inference() and parameter.requires_grad for parameter in made_here.parameters())
