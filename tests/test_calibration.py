"""Calibration measures what it says and leaves the model as it found it."""

import re
from dataclasses import replace

import pytest
import torch
from hosts.families import DEPTH, FLIPPED, build, pictures
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adamerge
from adamerge import calibrate, calibration
from adamerge.core.budget import Threshold, ZScore
from adamerge.core.errors import BadImages, BadOption
from adamerge.core.recipe import Recipe
from adamerge.core.salience import ClassAttention
from adamerge.core.stats import LayerStats
from adamerge.core.weight_patch import WeightPatch
from adamerge.distributed import Place
from adamerge.hosts.base import find_host
from adamerge.methods import adamerge as published
from adamerge.methods import tome
from adamerge.patching.apply import stack_of
from adamerge.search.evaluator import Evaluator

NEVER = 1e9
# Statistics with which an adaptive recipe reads the tokens and merges none.
UNREACHABLE = LayerStats((NEVER,) * DEPTH, (1.0,) * DEPTH)

RECIPES = {
    "published": published(6.0),
    "flipped": published(7.0, **FLIPPED),
    "after attention": replace(tome(0), budget=ZScore(6.0), order="kept"),
    "after attention in ToMe's order": replace(tome(0), budget=ZScore(6.0)),
}


@pytest.fixture
def model():
    return build("vit").double()


@pytest.fixture
def images() -> Tensor:
    return pictures(7).double()


def redundancy(model: nn.Module, images: Tensor, recipe: Recipe) -> Tensor:
    """What a recipe sees of every image at every layer, one image at a time."""
    rows = []
    with torch.no_grad():
        for image in images:
            adamerge.apply(model, recipe)(image[None])
            rows.append(adamerge.trace(model).redundancy[0])
    adamerge.remove(model)
    return torch.stack(rows)


def summed_up(values: Tensor) -> LayerStats:
    """Mean and population standard deviation, by hand."""
    mean = [sum(column) / len(column) for column in values.T.tolist()]
    std = [
        (sum((v - m) ** 2 for v in column) / len(column)) ** 0.5
        for column, m in zip(values.T.tolist(), mean, strict=True)
    ]
    return LayerStats(tuple(mean), tuple(std))


def close(a: LayerStats, b: LayerStats, tolerance: float = 1e-9) -> None:
    assert a.mean == pytest.approx(b.mean, abs=tolerance)
    assert a.std == pytest.approx(b.std, abs=tolerance)


def quietly(model: nn.Module, images, recipe: Recipe | None = None, **options) -> LayerStats:
    return calibrate(model, images, recipe, progress=False, **options)


# --- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_each_pass_measures_under_the_statistics_of_the_one_before(model, images, recipe, passes):
    """D13: pass 1 merges nothing."""
    expected = summed_up(redundancy(model, images, recipe.with_stats(UNREACHABLE)))
    for _ in range(passes - 1):
        expected = summed_up(redundancy(model, images, recipe.with_stats(expected)))
    stats = quietly(model, images, recipe, how="iterative", passes=passes)
    close(stats, expected)
    assert (stats.how, stats.passes, stats.images) == ("iterative", passes, 7)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_sequential_way_measures_each_layer_behind_the_merges_before_it(model, images, recipe):
    mean, std = [NEVER] * DEPTH, [1.0] * DEPTH
    for layer in range(DEPTH):
        # A mean out of reach merges nothing at the layers that are not measured yet.
        seen = redundancy(model, images, recipe.with_stats(LayerStats(tuple(mean), tuple(std))))
        found = summed_up(seen[:, layer : layer + 1])
        mean[layer], std[layer] = found.mean[0], found.std[0]
    stats = quietly(model, images, recipe, how="sequential")
    close(stats, LayerStats(tuple(mean), tuple(std)))
    assert (stats.how, stats.passes, stats.images) == ("sequential", 1, 7)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_measuring_again_with_sequential_statistics_gives_the_same_statistics(model, images, recipe):
    """Self-consistent: nothing to iterate, nothing to oscillate.  The iterative way has no such promise."""
    stats = quietly(model, images, recipe, how="sequential")
    close(summed_up(redundancy(model, images, recipe.with_stats(stats))), stats)


@pytest.mark.parametrize("how", ["iterative", "sequential"])
def test_idle_layers_have_mean_and_std_zero_and_do_not_change_the_others(model, images, how):
    """In both ways of calibration, and in the tuner's sweep."""
    r_max = tuple(6.0 * (layer % 2 == 0) for layer in range(DEPTH))
    recipe = published(r_max)
    stats = quietly(model, images, recipe, how=how)
    seen = redundancy(model, images, recipe.with_stats(stats))
    assert not seen[:, 1::2].any() and seen[:, ::2].all()
    assert stats.mean[1] == stats.std[1] == 0.0
    if how == "sequential":
        assert stats.mean[2] == pytest.approx(summed_up(seen).mean[2])
    swept = Evaluator(model, [images]).sweep(recipe).recipe.stats
    assert swept is not None and swept.mean[1] == swept.std[1] == 0.0


@pytest.mark.parametrize("r", [0.0, (0.0, 3.0, 2.0)])
def test_thresholds_of_idle_layers_are_the_same_in_every_way_of_calibration(model, images, r):
    recipe = replace(tome(0), budget=Threshold(r))
    stats, swept = quietly(model, images, recipe), Evaluator(model, [images]).sweep(recipe).recipe.stats
    assert swept is not None and stats == swept
    assert (stats.mean[0], stats.std[0]) == (0.0, 0.0)


@pytest.mark.parametrize("r_max", [0.0, 0.5, (0.0, 0.5, 0.0)])
def test_the_first_pass_measures_only_layers_that_may_merge(model, images, r_max):
    for passes in (1, 2):
        stats = quietly(model, images, published(r_max), passes=passes)
        assert stats.mean == stats.std == (0.0,) * DEPTH


def test_the_ways_differ(model, images):
    first, second = (quietly(model, images, r_max=6.0, passes=p) for p in (1, 2))
    sequential = quietly(model, images, r_max=6.0, how="sequential")
    assert first.mean[0] == pytest.approx(second.mean[0]) == pytest.approx(sequential.mean[0])
    assert first.mean[1] != pytest.approx(second.mean[1], abs=1e-6)
    assert first.mean[2] != pytest.approx(sequential.mean[2], abs=1e-6)


def test_by_default_it_is_two_passes_as_published(model, images):
    stats = quietly(model, images, r_max=6.0)
    assert (stats.how, stats.passes) == ("iterative", 2)
    assert stats == quietly(model, images, published(6.0), how="iterative", passes=2)


def test_on_a_cpu_passes_that_merge_run_on_the_reference(model, images, monkeypatch):
    """So that statistics are the same to the bit whatever runtime is fastest."""
    own, asked = calibration.apply, []
    monkeypatch.setattr(calibration, "apply", lambda model, recipe, way: asked.append(way) or own(model, recipe, way))
    quietly(model, images, r_max=4.0, passes=3)
    assert asked == ["reference", "reference"]


def test_old_statistics_in_the_recipe_are_not_looked_at(model, images):
    stale = LayerStats((5.0,), (1.0,))
    assert quietly(model, images, published(6.0, stale)) == quietly(model, images, published(6.0))


@pytest.mark.parametrize("how", ["iterative", "sequential"])
def test_a_patch_that_the_model_is_merged_with_is_not_measured(model, images, how):
    expected = quietly(model, images, r_max=6.0, how=how)
    change = {f"blocks.{layer}.norm1.bias": torch.ones(48) for layer in range(DEPTH)}
    adamerge.apply(model, replace(tome(2), patch=WeightPatch.make(change, find_host(model).fingerprint())))
    assert quietly(model, images, r_max=6.0, how=how) == expected


def test_the_recipe_is_kept_without_its_statistics(model, images):
    stats = quietly(model, images, published(6.0, LayerStats((5.0,), (1.0,)), split="alternating"))
    assert stats.recipe["budget"]["stats"] is None
    assert stats.recipe["links"]["split"]["part"] == "Alternating"


# --- what it is fed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["iterative", "sequential"])
def test_a_tensor_a_list_pairs_and_a_loader_are_the_same_images(model, images, how):
    labels = torch.arange(7)
    expected = quietly(model, images, r_max=6.0, how=how)
    for feed in (
        [images[:3], images[3:]],
        (images[:1], images[1:]),
        [(images[:5], labels[:5]), (images[5:], labels[5:])],
        [[images[:4], labels[:4]], [images[4:], labels[4:]]],
        DataLoader(TensorDataset(images, labels), batch_size=2),
        DataLoader(images, batch_size=3),  # pyright: ignore[reportArgumentType]
    ):
        stats = quietly(model, feed, r_max=6.0, how=how)
        close(stats, expected)
        assert stats.images == 7


@pytest.mark.parametrize("options", [dict(how="sequential"), dict(passes=1)])
def test_one_pass_takes_a_generator(model, images, options):
    close(quietly(model, iter([images]), r_max=6.0, **options), quietly(model, images, r_max=6.0, **options))


def test_images_are_brought_into_the_models_precision(model, images):
    close(quietly(model, images.float(), r_max=6.0), quietly(model, images.float().double(), r_max=6.0))
    assert quietly(model.bfloat16(), images, r_max=6.0).images == 7


@pytest.mark.parametrize("how", ["iterative", "sequential"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_broken_image_does_not_spoil_the_statistics(model, images, how, value):
    broken = torch.cat([images, images[:1]])
    broken[7, 0, 3, 3] = value
    stats = quietly(model, broken, r_max=6.0, how=how)
    close(stats, quietly(model, images, r_max=6.0, how=how))
    assert stats.images == 7


def test_one_image_is_enough(model, images):
    stats = quietly(model, images[:1], r_max=6.0)
    assert stats.std == (0.0,) * DEPTH and stats.images == 1


def test_a_process_without_images_takes_part_in_every_layer_of_the_others(model, images, monkeypatch):
    """What the first of two processes sends is recorded, and given to the second, which has no images."""
    recipe, sent = replace(tome(0), budget=Threshold(3.0)), []
    alone = quietly(model, [images], recipe)

    def gather_in_first(everything: list, mine: list) -> None:
        sent.append(mine)
        everything[:] = [mine, []]

    def gather_in_second(everything: list, mine: list) -> None:
        everything[:] = [sent.pop(0), mine]

    for rank, gather in enumerate((gather_in_first, gather_in_second)):
        monkeypatch.setattr("adamerge.distributed._place", Place(rank, 2))
        monkeypatch.setattr("torch.distributed.all_gather_object", gather)
        assert quietly(model, [images], recipe) == alone
    assert sent == []


# --- how it leaves the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["iterative", "sequential"])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_found(model, images, how, merged, training):
    if merged:
        adamerge.apply(model, tome(2))
    model.train(training)
    model.norm.train(not training)
    blocks, random = model.blocks, torch.get_rng_state()
    modes = [m.training for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    quietly(model, images, r_max=6.0, how=how)
    assert model.blocks is blocks
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    if merged:
        assert stack_of(model).recipe == tome(2)


@pytest.mark.parametrize("how", ["iterative", "sequential"])
def test_the_model_is_left_as_it_was_found_when_calibration_fails(model, images, how):
    adamerge.apply(model, tome(2)).train()
    blocks = model.blocks
    with pytest.raises(AssertionError, match="doesn't match model"):
        quietly(model, [images, images[:, :, :32, :32]], r_max=6.0, how=how)
    assert model.blocks is blocks and all(m.training for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_calibrating_in_training_mode_measures_in_evaluation_mode(images):
    model = build("vit", drop_path_rate=0.5).double()
    expected = quietly(model, images, r_max=6.0)
    assert quietly(model.train(), images, r_max=6.0) == expected


@pytest.mark.parametrize("how", ["iterative", "sequential"])
def test_without_progress_nothing_is_printed(model, images, how, capfd):
    quietly(model, images, r_max=6.0, how=how)
    assert capfd.readouterr() == ("", "")
    calibrate(model, images, r_max=6.0, how=how)
    shown = capfd.readouterr().err
    steps = {"iterative": ["pass 1 of 2", "pass 2 of 2"], "sequential": ["embedding", "layers"]}[how]
    assert all(f"calibrating, {step}: " in shown for step in steps)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["iterative", "sequential"])
@pytest.mark.parametrize("nothing", [[], torch.zeros(0, 3, 64, 64)], ids=["list", "tensor"])
def test_no_images_are_refused(model, how, nothing):
    with pytest.raises(BadImages, match="there are no images to calibrate on; pass at least one batch"):
        quietly(model, nothing, r_max=6.0, how=how)


@pytest.mark.parametrize("how", ["iterative", "sequential"])
def test_only_broken_images_are_refused(model, images, how):
    with pytest.raises(BadImages, match="every calibration image gives non-finite features; check the preprocessing"):
        quietly(model, images * float("nan"), r_max=6.0, how=how)


def test_a_generator_cannot_be_gone_through_twice(model, images):
    message = (
        "2 passes go over the images 2 times, but an iterator can be gone through only once; pass a list or a Data"
    )
    with pytest.raises(BadImages, match=message):
        quietly(model, (batch for batch in [images]), r_max=6.0)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(3, 64, 64),
        torch.zeros(2, 3, 64, 64, dtype=torch.uint8),
        [torch.zeros(3, 64, 64)],
        [(torch.zeros(2, 3, 64, 64, dtype=torch.uint8), torch.zeros(2))],
    ],
    ids=["one image", "bytes", "list of images", "pairs of bytes"],
)
def test_images_of_the_wrong_shape_or_type_are_refused(model, wrong):
    message = (
        r"expected image batches as floating-point tensors \(images, channels, height, width\), preprocessed for the "
        r"model; got torch\.\w+ of shape .*\. Is the batch dimension or the transform missing\?"
    )
    with pytest.raises(BadImages, match=message):
        quietly(model, wrong, r_max=6.0)


@pytest.mark.parametrize("wrong", [["a.jpg"], [None], [{"image": 3}], [[]]], ids=repr)
def test_what_is_no_image_is_refused(model, wrong):
    with pytest.raises(BadImages, match=r"expected a tensor of images, or an iterable of .*; it gave a \w+"):
        quietly(model, wrong, r_max=6.0)


def test_a_fixed_recipe_is_refused(model, images):
    with pytest.raises(
        BadOption, match=r"only adaptive budgets have statistics; this recipe's is Fixed\(r=3.*no calib"
    ):
        quietly(model, images, tome(3))


@pytest.mark.parametrize("options", [dict(), dict(recipe=published(6.0), r_max=6.0)])
def test_either_a_recipe_or_r_max_is_needed(model, images, options):
    with pytest.raises(BadOption, match="give either a recipe or r_max, to say what is calibrated"):
        quietly(model, images, **options)


@pytest.mark.parametrize("passes", [0, -1, True, 1.5])
def test_passes_must_be_a_whole_number_from_one_up(unchecked, model, images, passes):
    with pytest.raises(BadOption, match=re.escape(f"passes must be a whole number >= 1; got {passes!r}")):
        quietly(model, images, r_max=6.0, passes=passes)


def test_an_unknown_way_is_refused(unchecked, model, images):
    with pytest.raises(BadOption, match="how must be one of iterative, sequential; got 'backwards'"):
        quietly(model, images, r_max=6.0, how="backwards")


def test_thresholds_are_found_layer_by_layer_only(model, images):
    recipe = replace(tome(0), budget=Threshold(3.0))
    with pytest.raises(BadOption) as caught:
        quietly(model, images, recipe, how="iterative")
    told = "recipes that cut at a threshold are calibrated layer by layer; use how='sequential'"
    assert str(caught.value) == told
    assert quietly(model, images, recipe, how="sequential") == quietly(model, images, recipe)


@pytest.mark.parametrize("how", ["iterative", "sequential"])
def test_a_recipe_that_cannot_run_on_the_model_is_refused_before_an_image_is_read(how):
    recipe = replace(tome(0), budget=ZScore(6.0), salience=ClassAttention())
    told = r"^ClassAttention\(\) reads the class token's attention, but this model has no class token; "
    with pytest.raises(BadOption, match=told):
        quietly(build("average_pool"), [], recipe, how=how)
