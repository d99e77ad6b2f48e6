"""Tuning runs the blocks of every host itself, and takes what it gives for what the merged model gives."""

import pytest
import torch
from hosts.zoo import ZOO

import adamerge
from adamerge.core.errors import UnsupportedModel
from adamerge.hosts.base import image_entry
from adamerge.methods import none, tome
from adamerge.presets import best
from adamerge.search.evaluator import Evaluator

# What gives no row for each image, logits or features.
WITHOUT = ("ViT-MSN", "I-JEPA", "DINOv2 backbone")


@pytest.fixture(params=[member for member in ZOO if member.name not in WITHOUT], ids=str)
def member(request):
    request.param.require()
    return request.param


def answer(model, images):
    with torch.inference_mode():
        output = image_entry(model)(images)
    if isinstance(output, torch.Tensor):
        return output
    return output.logits if "logits" in output else output.pooler_output


def test_a_sweep_loses_and_costs_what_the_merged_model_does(member):
    model, images = member.build(), member.images(6)
    plain = answer(model, images)
    evaluator = Evaluator(model, [images[:4], images[4:]])
    assert evaluator.sweep(none()).loss.abs().max() < 1e-6
    recipe = tome(3)
    outcome = evaluator.sweep(recipe)
    assert torch.equal(answer(model, images), plain)
    adamerge.apply(model, recipe)
    merged = answer(model, images)
    assert torch.equal(adamerge.trace(model).counts, outcome.counts)
    if evaluator.loss == "kl":
        a, b = plain.double().log_softmax(1), merged.double().log_softmax(1)
        torch.testing.assert_close(outcome.loss, (a.exp() * (a - b)).sum(1), atol=1e-6, rtol=1e-4)
    else:
        cosine = torch.nn.functional.cosine_similarity(plain.double(), merged.double())
        assert outcome.cosines is not None
        torch.testing.assert_close(outcome.cosines[:, 0], cosine, atol=1e-6, rtol=0)


def test_every_host_has_its_preset_and_is_tuned(member):
    model, images = member.build(), member.images(8)
    recipe = best(model, images, cut=0.2)
    found = adamerge.tune(model, images, cut=0.2, tries=3, progress=False)
    for one in (recipe, found):
        adamerge.apply(model, one)
        assert answer(model, images).isfinite().all()
        assert (adamerge.trace(model).counts[:, -1] < member.patches).any()


@pytest.mark.parametrize("member", [member for member in ZOO if member.name in WITHOUT], ids=str)
def test_a_model_without_a_row_for_each_image_is_refused(member):
    member.require()
    with pytest.raises(UnsupportedModel, match="a model that gives one row for each image, logits or features"):
        adamerge.tune(member.build(), member.images(8), cut=0.3, progress=False)


@pytest.mark.parametrize("member", [m for m in ZOO if m.name in ("CLIP", "CLIP vision", "DINOv2")], ids=str)
def test_towers_and_backbones_are_compared_by_their_features(member):
    member.require()
    evaluator = Evaluator(member.build(), [member.images()])
    assert evaluator.loss == ("kl" if member.library == "timm" else "features")
