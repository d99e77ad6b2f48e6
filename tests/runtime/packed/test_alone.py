"""On a CPU the packed runtime gives an image the same bits alone and in any batch."""

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from torch import nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.methods import adamerge as as_published
from adamerge.methods import dymu
from adamerge.presets import protect

IMAGES = 7
ADAPTIVE = {"published": as_published(r_max=6), "dymu": dymu(3), "preset": protect(r=2.5)}


def recipe_for(name: str, model: nn.Module, images: torch.Tensor) -> Recipe:
    if name not in ADAPTIVE:
        return RECIPES[name](model, images)
    recipe = ADAPTIVE[name]
    return recipe.with_stats(adamerge.calibrate(model, images, recipe, progress=False))


def scenes() -> torch.Tensor:
    """Images of different contrast, so that adaptive counts differ."""
    return pictures(IMAGES) * torch.linspace(0.3, 2, IMAGES)[:, None, None, None]


def another_activation(model: nn.Module) -> None:
    """The blocks are not plain any more, so that their own layers run instead of oneDNN's."""
    for module in model.modules():
        if isinstance(getattr(module, "act", None), nn.GELU):
            module.act = nn.SiLU()


@pytest.mark.parametrize(
    ("plain", "dtype", "threads"),
    [(True, torch.float32, 1), (True, torch.float32, 2), (True, torch.bfloat16, 3), (False, torch.float32, 2)],
)
@pytest.mark.parametrize("name", ["tome", *ADAPTIVE])
def test_an_image_alone_and_among_strangers_gets_the_same_bits(name, plain, dtype, threads):
    if name == "tome" and not plain:
        pytest.skip("fixed counts of a block that is not plain run on the reference")
    model, images = build("vit"), scenes()
    if not plain:
        another_activation(model)
    adamerge.apply(model, recipe_for(name, model, images))
    model, images = model.to(dtype), images.to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            alone, redundancy = [], []
            for image in images.split(1):
                alone.append(model.forward_features(image))
                redundancy.append(adamerge.trace(model).redundancy)
            for batch in (range(IMAGES), range(3, 0, -1), (6, 2)):
                found = model.forward_features(images[list(batch)])
                trace = adamerge.trace(model)
                for image, tokens, own in zip(batch, found, trace.redundancy, strict=True):
                    assert torch.equal(tokens, alone[image][0]), image
                    assert torch.equal(own, redundancy[image][0])
                if name != "tome" and len(batch) == IMAGES:
                    assert len(set(trace.counts[:, -1].tolist())) > 1
    finally:
        torch.set_num_threads(before)
    assert trace.merged.sum() > 0


def test_an_image_that_merges_nothing_among_strangers_that_do_gets_the_bits_of_the_image_alone():
    model, images = build("vit"), scenes()
    recipe = as_published(r_max=3)
    adamerge.apply(model, recipe.with_stats(adamerge.calibrate(model, images, recipe, progress=False)))
    with torch.inference_mode():
        among = model.forward_features(images)
        kept = [int(image) for image in (adamerge.trace(model).counts[:, 0] == adamerge.trace(model).patches).nonzero()]
        assert 0 < len(kept) < IMAGES
        for image in kept:
            assert torch.equal(model.forward_features(images[image : image + 1])[0], among[image])
