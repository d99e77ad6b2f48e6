"""Features in the order and resolution of the original patches."""

from typing import Any

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from torch import Tensor

import adamerge
from adamerge.core.errors import BadOption, NotApplied
from adamerge.methods import tome


def seen_inside(model: Any, images: Tensor) -> list[Tensor]:
    """What the second norm of every block is given: the tokens after that layer's merge."""
    inside: list[Tensor] = []
    norms = [block.norm2 for block in model.blocks.children()]
    handles = [norm.register_forward_pre_hook(lambda _, args: inside.append(args[0])) for norm in norms]
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return inside


@pytest.mark.parametrize("family", ["vit", "dinov2_registers", "average_pool"])
def test_features_inside_the_model_come_back_to_every_patch(family):
    model, images = build(family), pictures()
    adamerge.apply(model, tome(3))
    inside, trace = seen_inside(model, images), adamerge.trace(model)
    for layer, features in enumerate(inside):
        assert features.shape[1] == trace.prefix + 16 - 3 * (layer + 1)
        full = adamerge.unmerge(features, model, layer)
        assert full.shape == (5, trace.prefix + 16, 48)
        assert torch.equal(full[:, : trace.prefix], features[:, : trace.prefix])
        slots = trace.slots(layer)
        for image in range(5):
            assert torch.equal(full[image, trace.prefix :], features[image, trace.prefix + slots[image]])
        patches = adamerge.unmerge(features[:, trace.prefix :], model, layer)
        assert torch.equal(patches, full[:, trace.prefix :])


def test_without_a_layer_the_last_one_is_meant():
    model, images = build("vit"), pictures()
    adamerge.apply(model, tome(3))
    features = seen_inside(model, images)[-1]
    assert torch.equal(adamerge.unmerge(features, model), adamerge.unmerge(features, model, 2))


def test_features_of_another_layer_or_batch_are_refused():
    model, images = build("vit"), pictures()
    adamerge.apply(model, tome(3))
    inside = seen_inside(model, images)
    message = "after layer -1 the last batch had 5 images with at most 7 merged tokens .of 16. and 1 prefix"
    for features in (inside[0], inside[-1][:2]):
        with pytest.raises(BadOption, match=message):
            adamerge.unmerge(features, model)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_hook_that_asks_too_early_is_told_so(layer):
    """The trace of the batch before would have the wrong slots."""
    model, images = build("vit"), pictures()
    adamerge.apply(model, tome(3))
    with torch.no_grad():
        model(images)
    norm = model.get_submodule(f"blocks.{layer}.norm2")
    norm.register_forward_pre_hook(lambda _, args: adamerge.unmerge(args[0], model, layer) is None)
    with pytest.raises((NotApplied, BadOption), match=r"after model\(images\)"):
        model(images)


def test_a_model_that_does_not_merge_has_nothing_to_unmerge():
    with pytest.raises(NotApplied):
        adamerge.unmerge(torch.zeros(1, 17, 48), build("vit"))


def test_features_of_images_with_different_counts_come_back_to_every_patch():
    """Hooks inside a block see the whole batch, padded to its longest image."""
    model, images = build("vit"), pictures()
    adamerge.apply(model, RECIPES["adaptive"](model, images))
    inside, trace = seen_inside(model, images), adamerge.trace(model)
    assert len(set(trace.counts[:, -1].tolist())) > 1 and len(inside) == len(trace.layers)
    for layer, features in enumerate(inside):
        full, slots = adamerge.unmerge(features, model, layer), trace.slots(layer)
        assert full.shape == (5, trace.prefix + 16, 48)
        for image in range(5):
            assert torch.equal(full[image, trace.prefix :], features[image, trace.prefix + slots[image]])
