"""With the triton backend the patch embedding is one matrix product; after `remove` it is a convolution again."""

import copy
import io
import pickle

import pytest
import torch
from hosts.families import FAMILIES, RECIPES, build, pictures
from torch import nn

import adamerge
from adamerge.methods import none, tome
from adamerge.patching import patch_embedding as patches
from adamerge.patching.patch_embedding import convolve_by_matmul, patch_convolutions


def proj(model: nn.Module) -> nn.Module:
    (found,) = patch_convolutions(model)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "grid"), [((2, 2), (1, 1)), ((3, 5), (4, 2)), ((16, 16), (7, 9))])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_product_is_the_convolution(size, grid, bias, layout):
    convolution = nn.Conv2d(3, 10, size, size, bias=bias).double()
    sides = [side * number for side, number in zip(size, grid, strict=True)]
    images = torch.randn(2, 3, *sides, dtype=torch.float64).to(memory_format=layout)
    found = convolve_by_matmul(convolution, images)
    torch.testing.assert_close(found, convolution(images))
    assert found.flatten(2).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("bias", [True, False])
def test_no_images_make_no_patches(bias):
    convolution = nn.Conv2d(3, 10, 16, 16, bias=bias)
    images = torch.zeros(0, 3, 64, 48)
    found = convolve_by_matmul(convolution, images)
    assert found.shape == convolution(images).shape == (0, 10, 4, 3) and found.dtype == images.dtype


def test_a_model_gives_no_outputs_for_no_images(monkeypatch):
    model = adamerge.apply(build("vit"), tome(2))
    monkeypatch.setattr(patches, "matmul_pays", lambda *_: True)
    with torch.inference_mode():
        assert model(torch.zeros(0, 3, 64, 64)).shape == (0, 10)


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(3, 4, 3, 2),
        nn.Conv2d(3, 4, 2, 2, padding=1),
        nn.Conv2d(3, 4, 2, 2, dilation=2),
        nn.Conv2d(4, 4, 2, 2, groups=2),
        nn.Conv2d(3, 4, 1),
    ],
    ids=["overlapping", "padded", "dilated", "grouped", "of single pixels"],
)
def test_other_convolutions_are_left_alone(other):
    assert patch_convolutions(nn.Sequential(other)) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_cuts_by_a_product_gives_the_same(family, monkeypatch):
    model, images = build(family), pictures(2)
    recipe = RECIPES["tome"](model, images)
    with torch.inference_mode():
        expected = adamerge.apply(model, recipe)(images)
        asked = []
        monkeypatch.setattr(patches, "matmul_pays", lambda *given: asked.append(given) or True)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    assert bool(asked) == bool(patch_convolutions(model))


def test_nothing_of_it_stays_behind():
    model = build("vit")
    own = proj(model)
    before = dict(own.__dict__)
    adamerge.apply(model, tome(2))
    assert type(proj(model)) is not nn.Conv2d and isinstance(proj(model), nn.Conv2d) and proj(model) is own
    for copied in (copy.deepcopy(model), pickle.load(io.BytesIO(pickle.dumps(model)))):
        assert type(proj(copied)) is type(own) and proj(copied) is not own
    adamerge.remove(model)
    assert type(own) is nn.Conv2d and own.__dict__ == before


def test_the_reference_and_recipes_that_merge_nothing_convolve():
    model = build("vit")
    assert type(proj(adamerge.apply(model, tome(2), "reference"))) is nn.Conv2d
    assert type(proj(adamerge.apply(model, none()))) is nn.Conv2d
    assert type(proj(adamerge.apply(model, tome(0)))) is nn.Conv2d


def test_a_processor_convolves_and_gradients_do():
    images = torch.zeros(1, 3, 4, 4)
    convolution = nn.Conv2d(3, 8, 2, 2)
    with torch.no_grad():
        assert not patches.matmul_pays(convolution, images)
        assert not patches.matmul_pays(convolution.half(), images.half())
