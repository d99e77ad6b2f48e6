"""An image that is not finite changes no bit of another image of its batch, whatever merges."""

from itertools import product

import pytest
import torch
from hosts.families import build, pictures
from marks import mostly_slow, products_mix_rows

import adamerge
from adamerge import methods
from adamerge.presets import protect

FLOAT, HALF = torch.float32, torch.bfloat16
IMAGES, BROKEN = 5, 3
OTHERS = [image for image in range(IMAGES) if image != BROKEN]
RECIPES = {
    "adamerge": methods.adamerge(6.0),
    "dymu": methods.dymu(3),
    "preset": protect(r=2.5),
    "tome": methods.tome(3),
    "pitome": methods.pitome(3),
    "dsm": methods.dsm(3, delay=1),
    "tofu": methods.tofu(3),
    "evit": methods.evit(0.7),
    "ats": methods.ats(9),
    "vid_tldr": methods.vid_tldr(3),
    "random": methods.random(3),
    "none": methods.none(),
}


@pytest.fixture(scope="module")
def calibrated():
    """The recipes with statistics where they need them."""
    model, images = build("vit"), pictures(IMAGES)
    stats = {
        name: adamerge.calibrate(model, images, recipe, passes=1, progress=False)
        for name, recipe in RECIPES.items()
        if recipe.adaptive is not None
    }
    return {name: recipe.with_stats(stats[name]) if name in stats else recipe for name, recipe in RECIPES.items()}


def test_every_method_is_tried():
    assert set(methods.METHODS) <= set(RECIPES)


CASES = [(*case, dtype) for case in product(RECIPES, ("reference", "packed")) for dtype in (FLOAT, HALF)]
ALWAYS = [("adamerge", "packed", HALF), ("dymu", "packed", FLOAT), ("tome", "reference", HALF), ("ats", "packed", HALF)]


@pytest.mark.filterwarnings("ignore:runtime='packed' was asked for")
@pytest.mark.parametrize(("name", "runtime", "dtype"), mostly_slow(CASES, ALWAYS))
def test_an_image_that_is_not_finite_changes_no_other(calibrated, name, runtime, dtype):
    if products_mix_rows(dtype):
        pytest.skip("this machine's oneDNN lets a row of a product read the next one")
    model, images = build("vit").to(dtype), pictures(IMAGES).to(dtype)
    adamerge.apply(model, calibrated[name], runtime)
    with torch.inference_mode():
        expected = model.forward_features(images)
        plans = adamerge.trace(model).slots()
        for value in (float("nan"), float("inf")):
            broken = images.clone()
            broken[BROKEN].view(-1)[::7] = value
            found = model.forward_features(broken)
            assert torch.equal(found[OTHERS], expected[OTHERS])
            assert torch.equal(adamerge.trace(model).slots()[OTHERS], plans[OTHERS])
            assert not found[BROKEN].isfinite().all()
