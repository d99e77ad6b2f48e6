"""Every supported timm model in every precision and on odd images."""

import pytest
import torch
from hosts.families import DEPTH, FLIPPED, RECIPES, build, pictures
from hosts.timm_cases import run

import adamerge
from adamerge.core.salience import Centrality
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published
from adamerge.methods import tome

# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_merged_model_runs_in_every_precision(case, dtype):
    single = run(case.merged(), case.images)
    case.model.to(dtype)
    out = run(case.model, case.images.to(dtype))
    assert out.dtype == dtype and out.isfinite().all()
    assert adamerge.trace(case.model).layers[0].salience.dtype == torch.promote_types(dtype, torch.float32)
    # A rounded token may pick another partner: the mean tells a wrong network from a rounded one.  Dot products
    # saturate the softmax, and then more digits show more salience.
    saturated = case.recipe.salience == Centrality("dot")
    tolerance = 0.7 if dtype == torch.bfloat16 else 0.3 if saturated or dtype == torch.float16 else 1e-4
    assert (out.double() - single).abs().mean() < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_activations_in_half_precision_do_not_overflow_the_decision(dtype):
    """D1: tokens of 300, 48 channels, have dot products of four millions."""
    model = build("vit")
    model.patch_embed.proj.weight.data *= 300
    images = pictures()
    recipe = RECIPES["adaptive"](model, images)
    adamerge.apply(model.to(dtype), recipe)
    out, trace = run(model, images.to(dtype)), adamerge.trace(model)
    assert out.isfinite().all() and trace.redundancy.isfinite().all()
    assert (trace.merged > 0).any() and trace.layers[0].salience.amax() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_does_not_reach_the_decision(dtype):
    """D1 again: autocast would take the dot products in half precision and overflow."""
    model = build("vit")
    model.patch_embed.proj.weight.data *= 300
    images = pictures()
    recipe = RECIPES["adaptive"](model, images)
    adamerge.apply(model, recipe)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        model(images)
    trace = adamerge.trace(model)
    assert trace.redundancy.isfinite().all()
    assert trace.layers[0].salience.dtype == torch.float32
    assert (trace.merged > 0).any()


# --- odd inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [16, 32, 48, 80])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", ["adaptive", "flipped", "fixed", "tome"])
@pytest.mark.parametrize("family", ["vit", "deit_distilled", "average_pool"])
def test_any_number_of_patches_and_images_and_more_merges_than_possible(family, name, number, side):
    model, images = build(family, img_size=side), pictures(3, side=side)[:number]
    greedy = LayerStats((-9.0,) * DEPTH, (0.1,) * DEPTH)
    recipe = {
        "adaptive": published(99.0, greedy),
        "flipped": published(99.0, greedy, **FLIPPED),
        "fixed": published(r=99),
        "tome": tome(99),
    }[name]
    out = run(adamerge.apply(model, recipe), images)
    assert out.shape == (number, 10) and out.isfinite().all()
    left = (side // 16) ** 2
    for _ in range(DEPTH):
        left -= left // 2
    counts = adamerge.trace(model).counts
    assert counts.shape == (number, DEPTH) and (counts >= 1).all()
    if name != "flipped":
        assert (counts[:, -1] <= left).all()


def test_a_batch_without_images_comes_out_as_from_the_host(case):
    nothing = case.images[:0]
    assert run(case.model, nothing).shape == run(case.merged(), nothing).shape == (0, 10)
    assert adamerge.trace(case.model).counts.shape == (0, DEPTH)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_image_comes_out_as_from_the_host_and_spoils_no_other(case, value):
    """In float64, because a broken image merges less and so changes the shapes that its neighbours are computed in."""
    case.merged().double()
    good = run(case.model, case.images.double())
    r = adamerge.trace(case.model).r
    broken = case.images.double()
    broken[2, 1, 20, 33] = value
    out, others = run(case.model, broken), [0, 1, 3, 4]
    assert torch.equal(adamerge.trace(case.model).r[others], r[others])
    torch.testing.assert_close(out[others], good[others], atol=1e-9, rtol=0)
    host = run(adamerge.remove(case.model), broken)
    assert host[2].isnan().all()
    torch.testing.assert_close(out[2], host[2], equal_nan=True)


def test_a_broken_image_merges_nothing_when_counts_adapt(family):
    """D9."""
    model, images = build(family), pictures()
    recipe = RECIPES["adaptive"](model, images)
    images[1, 0, 5, 5] = float("nan")
    run(adamerge.apply(model, recipe), images)
    assert adamerge.trace(model).r[1].tolist() == [0] * DEPTH


def test_an_image_of_the_wrong_size_gets_the_hosts_own_error_and_does_no_harm(case):
    good = run(case.merged(), case.images)
    with pytest.raises(AssertionError, match="Input height \\(80\\) doesn't match model \\(64\\)"):
        run(case.model, pictures(2, side=80))
    assert torch.equal(run(case.model, case.images), good)


def test_images_of_another_size_merge_where_the_host_takes_them():
    model = build("vit", dynamic_img_size=True)
    adamerge.apply(model, published(r=3))
    assert run(model, pictures(2, side=96)).isfinite().all()
    assert adamerge.trace(model).counts.tolist() == [[33, 30, 27]] * 2
