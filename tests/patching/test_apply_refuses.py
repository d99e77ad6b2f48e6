"""`apply` refuses a recipe that cannot run on the model, before anything is changed."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import adamerge
from adamerge.core.budget import Fixed, Threshold, ZScore
from adamerge.core.errors import AdamergeError, BadOption, BadStats, NotApplied
from adamerge.core.parts import part
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Centrality, Uniform
from adamerge.methods import adamerge as published
from adamerge.methods import ats, dymu, evit, none, pitome, tome, vid_tldr

STATS = adamerge.LayerStats((0.3, 0.2, 0.1), (0.1, 0.2, 0.3))


def build(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    sizes = dict(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=4, num_classes=10)
    return VisionTransformer(**sizes, **options).eval()  # pyright: ignore[reportArgumentType]


def refused(model: VisionTransformer, recipe: Recipe, error: type[AdamergeError], text: str) -> None:
    """Applying fails with this error; what was applied before, or nothing, is still there."""
    images = torch.randn(2, 3, 64, 64)
    for before in (None, tome(2)):
        if before is not None:
            adamerge.apply(model, before)
        with torch.no_grad():
            output = model(images)
            with pytest.raises(error, match=text):
                adamerge.apply(model, recipe)
            assert torch.equal(model(images), output)
        if before is None:
            with pytest.raises(NotApplied):
                adamerge.trace(model)


@pytest.mark.parametrize("numbers", [(1, 2), (1,) * 50, ()], ids=len)
@pytest.mark.parametrize("budget", [Fixed, ZScore, Threshold], ids=lambda budget: budget.__name__)
def test_numbers_for_another_number_of_layers(budget, numbers):
    recipe = replace(tome(1), budget=budget(numbers))
    recipe = recipe if recipe.adaptive is None else recipe.with_stats(replace(STATS, threshold=(0.1, 0.2, 0.3)))
    refused(build(), recipe, BadOption, rf"gives {len(numbers)} numbers.* the model has 3 blocks")


@pytest.mark.parametrize("recipe", [published(6), dymu(2)], ids=["z-score", "threshold"])
def test_no_statistics(recipe):
    refused(build(), recipe, BadStats, "adapts to calibrated statistics and has none; make them with")


def test_statistics_without_the_thresholds_that_are_needed():
    refused(build(), dymu(2, STATS), BadStats, "hold no thresholds, which this recipe needs; run `adamerge calibrate")


@pytest.mark.parametrize("recipe", [evit(0.5), ats(8)], ids=["evit", "ats"])
def test_class_attention_in_a_model_without_a_class_token(recipe):
    model = build(class_token=False, global_pool="avg")
    refused(model, recipe, BadOption, r"ClassAttention\(\) reads the class token's attention, .* has no class token")


@pytest.mark.parametrize("recipe", [tome(2), vid_tldr(2), evit(0.5), ats(8), pitome(0.8)])
def test_attention_that_is_read_before_it_is_computed(recipe):
    text = r"reads attention .*, which do not exist before the block; use site='after_attention'"
    refused(build(), replace(recipe, site="before_block"), BadOption, text)


@pytest.mark.parametrize(
    "recipe", [published(0), published(0.5), published((0, 0, 0)), dymu(0), none(), evit(1.0)], ids=str
)
def test_a_recipe_that_never_merges_needs_nothing(recipe):
    model = adamerge.apply(build(class_token=False, global_pool="avg"), recipe)
    with torch.no_grad():
        model(torch.randn(2, 3, 64, 64))
    assert adamerge.trace(model).merged.tolist() == [0, 0]


@pytest.mark.parametrize("recipe", [published((1, 2)), published((1,) * 50)])
def test_calibration_refuses_the_same_numbers_before_it_reads_an_image(recipe):
    def images():
        raise AssertionError("an image was read")
        yield

    with pytest.raises(BadOption, match=r"r_max gives .* numbers.* the model has 3 blocks"):
        adamerge.calibrate(build(), images(), recipe, passes=1, progress=False)


def test_a_part_of_ones_own_can_say_what_it_needs():
    @part
    @dataclass(frozen=True)
    class Attended:
        needs_class_token: ClassVar[bool] = True

        def __call__(self, evidence):
            return evidence.class_attention

        def macs(self, n, at):
            return 0 * n

    recipe = replace(tome(2), salience=Attended())
    refused(build(class_token=False, global_pool="avg"), recipe, BadOption, "Attended.* has no class token")
    adamerge.apply(build(), recipe)


def test_what_can_run_is_applied():
    for salience in (Uniform(), Centrality()):
        adamerge.apply(build(), replace(tome(1), budget=Fixed((1, 0, 2)), salience=salience))
