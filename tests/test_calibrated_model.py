"""Calibrated statistics are taken by the model that they were measured on, and refused by others."""

import warnings

import pytest
import torch
from hosts.families import DEPTH, build, pictures
from torch import Tensor, nn

import adamerge
from adamerge import calibrate
from adamerge.core.errors import BadStats
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published


@pytest.fixture
def model():
    return build("vit").double()


@pytest.fixture
def images() -> Tensor:
    return pictures(7).double()


def quietly(model: nn.Module, images, recipe: Recipe | None = None, **options) -> LayerStats:
    return calibrate(model, images, recipe, progress=False, **options)


@pytest.fixture
def stats(model, images) -> LayerStats:
    return quietly(model, images, r_max=6.0)


def test_statistics_are_taken_by_the_model_they_were_made_for(model, images, stats, tmp_path):
    """Also from a file, in any precision, and never with a warning."""
    stats.save(tmp_path / "stats.json")
    loaded = LayerStats.load(tmp_path / "stats.json")
    assert loaded == stats
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            adamerge.apply(model.to(dtype), published(6.0, loaded))
            adamerge.apply(model, Recipe.from_json(published(6.0, stats).to_json()))


@pytest.mark.parametrize("how", ["iterative", "sequential"])
def test_statistics_of_a_model_in_bfloat16_are_taken_in_single_precision(images, how):
    model = build("vit")
    rounded = quietly(build("vit").bfloat16(), images, r_max=6.0, how=how)
    assert adamerge.apply(model, published(6.0, rounded)) is model


def refused(model: nn.Module, stats: LayerStats, message: str) -> None:
    blocks = model.blocks
    with pytest.raises(BadStats, match=message):
        adamerge.apply(model, published(6.0, stats))
    assert model.blocks is blocks


def test_statistics_of_a_model_with_other_weights_are_refused(stats):
    refused(
        build("vit", seed=1),
        stats,
        "calibrated on a model of the same shape with other weights. Run `adamerge calibrate` on this one",
    )


def test_statistics_of_a_model_that_was_trained_on_are_refused(model, stats):
    """One block's weights moved are another model."""
    for parameter in model.blocks[2].parameters():
        parameter.data += 0.1
    refused(model, stats, "same shape with other weights")


def test_statistics_of_a_deeper_model_are_refused(stats):
    refused(
        build("vit", depth=4),
        stats,
        "these statistics cover 3 layers, the model has 4; they were calibrated on another model",
    )


def test_statistics_of_another_class_prefix_or_width_are_refused(stats):
    refused(
        build("deit_distilled"), stats, "its class is 'VisionTransformer', this model's is 'VisionTransformerDistilled'"
    )
    refused(build("average_pool"), stats, "its prefix is 1, this model's is 0")
    refused(build("vit", embed_dim=32), stats, "another model: its parameters is .*, this model's is ")


def test_statistics_by_hand_are_only_checked_for_their_depth(model, images):
    adamerge.apply(model, published(6.0, LayerStats((0.3,) * DEPTH, (0.1,) * DEPTH)))
    refused(model, LayerStats((0.3,), (0.1,)), "these statistics cover 1 layers, the model has 3")


@pytest.mark.parametrize(
    "options, name",
    [(dict(split="alternating"), "links"), (dict(affinity="cosine"), "salience"), (dict(averaging="size"), "weight")],
)
def test_statistics_of_another_recipe_are_taken_with_a_warning(model, stats, options, name):
    with pytest.warns(
        UserWarning, match=f"these statistics were calibrated for another recipe \\({{'{name}': .* Calibrate"
    ):
        adamerge.apply(model, published(6.0, stats, **options))
    with pytest.warns(UserWarning, match="r_max"):
        adamerge.apply(model, published(9.0, stats))
