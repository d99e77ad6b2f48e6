"""Every family with every method on a CUDA device: plans of the reference, no larger errors, any batch.

`make gpu` runs these; without a device they skip.
"""

import copy
from typing import Any

import pytest
import torch
from hosts.zoo import ZOO, Member
from torch import Tensor, nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.methods import METHODS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Some parts are decided by the reference, which a warning says.
    pytest.mark.filterwarnings("ignore"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "adamerge": {"r_max": 6},
    "tome": {"r": 3},
    "pitome": {"r": 3},
    "dsm": {"r": 4, "delay": 1},
    "tofu": {"r": 3},
    "evit": {"keep": 0.6},
    "ats": {"tokens": 9},
    "dymu": {"r": 3},
    "vid_tldr": {"r": 3},
    "random": {"r": 3},
}
IMAGES = 12


def recipe_for(method: str, model: nn.Module, images: Tensor) -> Recipe:
    """The recipe of a method, calibrated if it adapts; skips where the method needs what the model has not."""
    recipe = METHODS[method](**OPTIONS[method])
    try:
        if recipe.adaptive is not None:
            recipe = recipe.with_stats(adamerge.calibrate(model, images, recipe, progress=False))
        adamerge.apply(copy.deepcopy(model), recipe)
    except adamerge.AdamergeError as error:
        pytest.skip(str(error))
    return recipe


def run(member: Member, model: nn.Module, images: Tensor, recipe: Recipe, runtime: Any) -> tuple[Tensor, Any]:
    """The outputs in float32 and the trace of a merged copy of the model."""
    merged = adamerge.apply(copy.deepcopy(model), recipe, runtime)
    with torch.inference_mode():
        return member.see(merged, images).float(), adamerge.trace(merged)


def errors(found: Tensor, exact: Tensor) -> Tensor:
    """The error of each image."""
    return (found - exact).flatten(1).norm(dim=1)


def farthest(found: Tensor, exact: Tensor) -> Tensor:
    """The largest error of each image."""
    return (found - exact).abs().flatten(1).amax(1)


def runs(member: Member, model: nn.Module, images: Tensor) -> bool:
    """Whether the unmerged model runs as it is.  timm 1.0.29 makes mixed rotary tables in float32 only."""
    try:
        with torch.inference_mode():
            member.see(model, images)
    except RuntimeError:
        return False
    return True


def test_every_method_is_tried():
    assert set(OPTIONS) == set(METHODS) - {"none"}


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("member", ZOO, ids=str)
def test_kernels_keep_the_contract_of_the_reference(member, method):
    member.require()
    model, images = member.build(), member.images(IMAGES)
    recipe = recipe_for(method, model, images)
    model, images = model.to("cuda"), images.to("cuda")
    exact, expected = run(member, model, images, recipe, "reference")
    found, trace = run(member, model, images, recipe, "auto")
    assert torch.equal(trace.counts, expected.counts)
    assert torch.equal(trace.slots(), expected.slots())
    # Nobody is nearer to the exact output than rounding allows: some means have weights that are all nearly 0.
    allowed, wide = 1e-3 * max(1.0, float(exact.abs().max())), exact
    if runs(member, copy.deepcopy(model).double(), images.double()):
        wide, _ = run(member, copy.deepcopy(model).double(), images.double(), recipe, "reference")
    assert (farthest(exact, wide) <= allowed).any()
    assert (farthest(found, wide) <= allowed + 2 * farthest(exact, wide)).all()

    alone, its_trace = run(member, model, images[:1], recipe, "auto")
    assert torch.equal(its_trace.counts[0], trace.counts[0])
    assert farthest(alone[:1], wide[:1]) <= allowed + 2 * farthest(exact[:1], wide[:1])

    half, small = model.bfloat16(), images.bfloat16()
    if not runs(member, half, small):
        return
    reference, reference_trace = run(member, half, small, recipe, "reference")
    kernels, kernel_trace = run(member, half, small, recipe, "auto")
    # Where tokens are almost equally alike, rounding decides which merge: a quarter of the images have no such tokens,
    # or all have.  It decides about as often for the kernels as for the reference.
    assert errors(kernels, exact).quantile(0.25) <= 2 * errors(reference, exact).quantile(0.25)
    merged_alike = [
        int((each.slots() == expected.slots()).flatten(1).all(1).sum()) for each in (reference_trace, kernel_trace)
    ]
    assert merged_alike[1] >= merged_alike[0] - IMAGES // 2
