"""The true cost is what torch executes, to the last multiply-accumulate."""

from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from hosts.families import DEPTH, FAMILIES, RECIPES, build, pictures
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import adamerge
from adamerge import flops
from adamerge.core.budget import Fixed
from adamerge.core.errors import BadOption, NotApplied, UnsupportedModel
from adamerge.methods import adamerge as published
from adamerge.methods import evit, none, tome

M = TypeVar("M", bound=nn.Module)


def plain_attention(model: M) -> M:
    """Without fused attention every product is a matrix product that torch counts.

    Frozen, because torch's counter (2.15) stumbles over a trainable parameter that is handed to a module under no_grad.
    """
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010  timm calls it final
    return model.requires_grad_(False)


def executed(model: nn.Module, images: Tensor) -> int:
    """What torch counts.  It does not count products of oneDNN, so merged models run on the reference."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(images)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_unmerged_cost_is_what_torch_executes(family):
    model = plain_attention(build(family))
    assert flops.meter(model).unmerged().true.tolist() == [executed(model, pictures(1))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RECIPES)
def test_the_cost_of_a_merged_image_is_what_torch_executes(family, name):
    model, images = plain_attention(build(family)), pictures()
    adamerge.apply(model, RECIPES[name](model, images), "reference")
    for image in images:
        macs = executed(model, image[None])
        assert flops.cost(model).true.tolist() == [macs]


@pytest.mark.parametrize("side", [16, 32, 48, 80])
@pytest.mark.parametrize("recipe", [published(r=99), tome(99), published(r=2, split="alternating")], ids=range(3))
def test_the_cost_is_exact_at_any_number_of_patches(side, recipe):
    model = adamerge.apply(plain_attention(build("vit", img_size=side)), recipe, "reference")
    macs = executed(model, pictures(1, side=side))
    assert flops.cost(model).true.tolist() == [macs]


@pytest.mark.parametrize("family", ["vit", "deit_distilled", "map_pool"])
def test_every_image_of_a_batch_has_its_own_cost(family):
    model, images = plain_attention(build(family)), pictures()
    adamerge.apply(model, RECIPES["adaptive"](model, images))
    with torch.no_grad():
        model(images)
    together = flops.cost(model)
    assert len(set(together.true.tolist())) > 2
    for image in range(len(images)):
        with torch.no_grad():
            model(images[image : image + 1])
        alone = flops.cost(model)
        assert alone.true[0] == together.true[image] and alone.paper[0] == together.paper[image]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_price_does_not_depend_on_fused_attention_or_on_what_is_trained(family):
    """torch's counter sees no fused attention on a CPU."""
    expected = flops.meter(plain_attention(build(family)))
    assert flops.meter(build(family).requires_grad_(False)) == expected
    assert flops.meter(build(family)) == expected


@pytest.mark.parametrize("recipe", [tome(3), published(r=3)], ids=["tome", "adamerge"])
def test_images_of_another_size_cost_what_they_cost(recipe):
    """A model that takes any size starts with other counts."""
    model = adamerge.apply(plain_attention(build("vit", dynamic_img_size=True)), recipe, "reference")
    macs = executed(model, pictures(1, side=96))
    assert flops.cost(model).true.tolist() == [macs]


def test_the_paper_counts_blocks_alone_at_the_tokens_that_enter_them():
    model, images = build("vit"), pictures()
    d, blocks = 48, []
    for recipe in (tome(3), published(r=3)):
        with torch.no_grad():
            adamerge.apply(model, recipe)(images)
        entering = [17, 14, 11] if recipe == tome(3) else [14, 11, 8]
        blocks.append(sum(12 * n * d * d + 2 * n * n * d for n in entering))
        assert flops.cost(model).paper.tolist() == [blocks[-1]] * 5
    assert blocks[0] > blocks[1]


NOTHING = {
    "tome(0)": tome(0),
    "r=0": published(r=0),
    "by layer": replace(tome(0), budget=Fixed((0.0,) * DEPTH)),
    "too little": tome(0.9 / DEPTH),
}


@pytest.mark.parametrize("recipe", [none(), *NOTHING.values(), evit(1.0)], ids=["none", *NOTHING, "evit"])
def test_merging_nothing_costs_the_unmerged_model(recipe):
    """A layer that cannot merge decides nothing, in whatever way its budget says so."""
    model, images = plain_attention(build("vit")), pictures(1)
    price = flops.meter(model).unmerged()
    macs = executed(adamerge.apply(model, recipe), images)
    assert flops.cost(model).paper.tolist() == price.paper.tolist()
    assert flops.cost(model).true.tolist() == [macs] == price.true.tolist()


def test_a_layer_that_a_fraction_leaves_without_a_merge_pays_for_no_decision():
    """0.5 a layer is 0, 1, 0 in three layers."""
    model, images = plain_attention(build("vit")), pictures(1)
    costs = []
    for recipe in (tome(0.5), replace(tome(0), budget=Fixed((0.0, 1.0, 0.0)))):
        macs = executed(adamerge.apply(model, recipe, "reference"), images)
        assert adamerge.trace(model).counts.tolist() == [[16, 15, 15]]
        costs.append(flops.cost(model).true.tolist())
        assert costs[-1] == [macs]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("merged", [True, False])
def test_metering_leaves_the_model_as_it_was_found(merged):
    model, images = build("vit"), pictures()
    if merged:
        adamerge.apply(model, tome(3))
    model.train()
    blocks = model.blocks
    with torch.no_grad():
        model(images)
    flops.meter(model)
    assert model.blocks is blocks and all(m.training for m in model.modules())
    if merged:
        assert adamerge.trace(model).r.tolist() == [[3, 3, 3]] * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_price_does_not_depend_on_the_precision(dtype):
    assert flops.meter(build("vit").to(dtype)) == flops.meter(build("vit"))


def test_a_model_without_values_on_another_device_has_the_same_price():
    assert flops.meter(build("vit").to("meta")) == flops.meter(build("vit"))


def test_a_cost_needs_a_merged_model_that_has_run():
    model = build("vit")
    with pytest.raises(NotApplied, match="this model does not merge"):
        flops.cost(model)
    adamerge.apply(model, tome(3))
    with pytest.raises(NotApplied, match="has not run yet"):
        flops.cost(model)
    with pytest.raises(UnsupportedModel, match="not supported"):
        flops.meter(nn.Linear(2, 2))


@pytest.mark.parametrize("wrong", ["bogus", "", None, ["true"]])
def test_the_name_of_a_count_is_checked(wrong):
    for known in ("true", "paper"):
        flops.check_cost(known)
    with pytest.raises(BadOption, match="cost must be one of true, paper; got "):
        flops.check_cost(wrong)
