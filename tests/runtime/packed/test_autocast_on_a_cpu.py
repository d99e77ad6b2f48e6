"""Under `torch.autocast` a CPU packs tokens too, and computes what the host computes in bfloat16 in bfloat16."""

from copy import deepcopy

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from torch import nn

import adamerge
from adamerge.methods import tome
from adamerge.patching.apply import stack_of
from adamerge.runtime.packed import onednn

pytestmark = pytest.mark.skipif(
    not (onednn.available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="oneDNN has no bfloat16 here"
)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def packs(model: nn.Module) -> bool:
    """Whether tokens in float32 are packed now."""
    tokens = torch.zeros(1, 17, 48)
    return stack_of(model).selector.why_reference(tokens, training=False) is None


@pytest.mark.parametrize("recipe", ["tome", "adaptive"])
@pytest.mark.parametrize("family", ["vit", "deit3"])
def test_results_are_as_exact_as_those_of_the_reference(family, recipe):
    model, images = build(family), pictures(6)
    chosen = RECIPES[recipe](model, images)
    with torch.inference_mode():
        exact = adamerge.apply(model, chosen, "reference")(images)
        with autocast():
            theirs = adamerge.apply(model, chosen, "reference")(images)
            ours = adamerge.apply(model, chosen)(images)
            assert packs(model) and adamerge.trace(model).merged.sum() > 0
    error, own = (ours - exact).norm(), (theirs - exact).norm()
    assert 0 < error < 2 * own and ours.dtype == theirs.dtype


def test_an_image_alone_and_among_strangers_gets_the_same_bits():
    model, images = build("vit"), pictures(7)
    adamerge.apply(model, RECIPES["adaptive"](model, images))
    with torch.inference_mode(), autocast():
        together = model(images)
        assert packs(model) and len(set(adamerge.trace(model).merged.tolist())) > 1
        alone = torch.cat([model(image) for image in images.split(1)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_changed_parameter_is_used_at_the_next_call(part):
    model, images = build("vit"), pictures(2)
    adamerge.apply(model, tome(2))
    with torch.inference_mode(), autocast():
        before = model(images)
        getattr(model.get_submodule("blocks.1.mlp.fc1"), part).data.mul_(-2)
        after, expected = model(images), deepcopy(model)(images)
    assert torch.equal(after, expected) and not torch.allclose(after, before)


def test_a_call_with_autocast_does_not_change_a_call_without():
    model, images = build("vit"), pictures(2)
    adamerge.apply(model, tome(2))
    with torch.inference_mode():
        before = model(images)
        with autocast():
            cast = model(images)
        after = model(images)
    assert torch.equal(before, after) and not torch.equal(cast, before)


def test_a_dtype_that_onednn_does_not_compute_in_takes_the_reference():
    model = adamerge.apply(build("vit"), tome(2))
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        assert not packs(model)
