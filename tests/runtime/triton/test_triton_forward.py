"""The triton backend gives what the reference gives, on whole models."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from marks import mostly_slow
from torch import nn
from triton.runtime.errors import OutOfResources

import adamerge
from adamerge.core.budget import ZScore
from adamerge.core.combine import BySize
from adamerge.core.errors import BadStats
from adamerge.core.match import Tokens
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Uniform
from adamerge.methods import adamerge as published
from adamerge.methods import ats, dsm, dymu, evit, pitome, random, tofu, tome, vid_tldr
from adamerge.patching.apply import stack_of
from adamerge.presets import protect
from adamerge.runtime import backend
from adamerge.runtime.triton import forward, gemm_dispatch, merging
from adamerge.runtime.triton.graph_keepalive import collect_used
from adamerge.runtime.triton.kernels.linear import linear
from adamerge.runtime.triton.readback import capturing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def calibrated(model: nn.Module, recipe: Recipe) -> Recipe:
    return recipe.with_stats(adamerge.calibrate(model, pictures(4), recipe, progress=False))


def by_tokens(recipe: Recipe) -> Recipe:
    return replace(recipe, links=replace(recipe.links, metric=Tokens()))  # pyright: ignore[reportArgumentType]


MORE: dict[str, Callable[..., Recipe]] = {
    "threshold": lambda model, images: calibrated(model, dymu(2.5)),
    "adaptive at every second block": lambda model, images: calibrated(model, published((5.0, 0.0, 5.0))),
    "by keys at every second block": lambda model, images: calibrated(
        model, replace(tome(0), budget=ZScore((5.0, 0.0, 5.0)))
    ),
    "delayed": lambda model, images: dsm(2.5, 1),
    "energy": lambda model, images: pitome(r=2),
    "pruning": lambda model, images: tofu(2),
    "keep": lambda model, images: evit(0.6),
    "random": lambda model, images: random(2),
    "preset": lambda model, images: calibrated(model, protect(r=2.5)),
    "preset without class token": lambda model, images: calibrated(model, protect(r=2.5, class_token=False)),
    "preset on tokens": lambda model, images: calibrated(model, by_tokens(protect(r=2.5))),
    "static preset": lambda model, images: replace(protect(static=True, r=2.5), weight=BySize()),
    "tokens alone": lambda model, images: replace(by_tokens(protect(0.0, static=True, r=2.0)), salience=Uniform()),
}


# Tried on one family of models only.
ONCE: dict[str, Callable[..., Recipe]] = {
    "sampling": lambda model, images: ats(9),
    "sharpness": lambda model, images: vid_tldr(2),
    "windows before the block": lambda model, images: replace(by_tokens(dsm(2, 0, windows=True)), site="before_block"),
}


def with_kernels(model: nn.Module) -> None:
    """Use the triton backend; without a CUDA device Triton's interpreter runs the kernels."""
    selector = stack_of(model).selector
    selector.choose = lambda x, views, training: backend.TritonWithFallback(selector, x, views)


def pretend_capture(model: nn.Module) -> None:
    """Run as under CUDA graph capture: counts stay on the device."""
    stack_of(model).selector.triton().is_capturing = lambda x: True


# Every recipe runs on a ViT; with LayerScale, those of each way to decide.
ON_VIT = [("vit", recipe) for recipe in RECIPES | MORE | ONCE]
WITH_LAYER_SCALE = [("deit3", recipe) for recipe in ("adaptive", "tome", "threshold", "energy", "preset on tokens")]


@pytest.mark.parametrize(
    "family, recipe",
    mostly_slow([*ON_VIT, *(("deit3", recipe) for recipe in RECIPES | MORE)], [*ON_VIT, *WITH_LAYER_SCALE]),
)
def test_same_plans_same_outputs(family, recipe):
    model, images = build(family).to(DEVICE), pictures(3).to(DEVICE)
    chosen = (RECIPES | MORE | ONCE)[recipe](model, images)
    with torch.inference_mode():
        expected = adamerge.apply(model, chosen, "reference")(images)
        before = adamerge.trace(model)
        adamerge.apply(model, chosen, "packed")
        with_kernels(model)
        found = model(images)
    after = adamerge.trace(model)
    assert expected.std() > 0.1
    assert torch.equal(before.r, after.r) and before.merged.sum() > 0
    assert torch.equal(before.slots(), after.slots())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.layers[-1].size, before.layers[-1].size)
    if recipe.endswith("every second block"):
        assert before.redundancy[:, 1].tolist() == after.redundancy[:, 1].tolist() == [0.0] * len(images)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_without_images_gives_outputs_without_images(recipe):
    model = build("vit").to(DEVICE)
    adamerge.apply(model, RECIPES[recipe](model, pictures(3).to(DEVICE)), "packed")
    with_kernels(model)
    with torch.inference_mode():
        assert model(pictures(1).to(DEVICE)[:0]).shape == (0, 10)
    assert adamerge.trace(model).r.shape == (0, 3)


# Rows after the last image are not initialised, and the interpreter computes with numpy, which warns of overflows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "recipe, capturing",
    mostly_slow(
        [("adaptive", False), ("threshold", True), ("preset on tokens", False)],
        [("threshold", True), ("preset on tokens", False)],
    ),
)
def test_half_precision_errs_no_more_than_twice_as_the_reference(recipe, capturing, monkeypatch):
    """Interpreted, there are two processors, and these products are large: sums of residuals are made by them."""
    model, images = build("deit3", embed_dim=256, mlp_ratio=1, depth=2).to(DEVICE), pictures(10).to(DEVICE)
    chosen = (RECIPES | MORE)[recipe](model, images)
    added = []
    monkeypatch.setattr(gemm_dispatch, "linear_fused", lambda *a, **k: added.append(k.get("onto")) or linear(*a, **k))
    with torch.inference_mode():
        exact = adamerge.apply(copy.deepcopy(model).double(), chosen, "reference")(images.double())
        half = adamerge.apply(model.half(), chosen, "reference")(images.half())
        adamerge.apply(model, chosen, "packed")
        with_kernels(model)
        if capturing:
            pretend_capture(model)
        found = model(images.half())
    assert (found - exact).norm() <= 2 * (half - exact).norm()
    assert DEVICE == "cuda" or any(sum_ is not None for sum_ in added)


@pytest.mark.parametrize("family", ["qk_norm", "dinov2", "average_pool", "dinov2_registers", "deit_distilled"])
def test_blocks_that_are_not_plain_run_their_own_layers(family):
    model, images = build(family).to(DEVICE), pictures(2).to(DEVICE)
    chosen = RECIPES["tome"](model, images)
    with torch.inference_mode():
        expected = adamerge.apply(model, chosen, "reference")(images)
        adamerge.apply(model, chosen, "packed")
        with_kernels(model)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


def test_a_hook_on_a_layer_is_called():
    model, images = build("vit").to(DEVICE), pictures(1).to(DEVICE)
    seen = []
    block: Any = model.blocks[1]
    block.mlp.fc1.register_forward_hook(lambda *_: seen.append(1))
    adamerge.apply(model, RECIPES["tome"](model, images), "packed")
    with_kernels(model)
    with torch.inference_mode(), pytest.warns(UserWarning, match="there is a hook on mlp.fc1 of block 1"):
        model(images)
    assert seen == [1]


def test_intermediate_layers_have_the_hosts_shape():
    model, images = build("vit").to(DEVICE), pictures(2).to(DEVICE)
    chosen = RECIPES["tome"](model, images)
    with torch.inference_mode():
        adamerge.apply(model, chosen, "reference")
        expected = model.get_intermediate_layers(images, 2)
        adamerge.apply(model, chosen, "packed")
        with_kernels(model)
        for found, reference in zip(model.get_intermediate_layers(images, 2), expected, strict=True):
            torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", [adamerge.methods.adamerge(4.0), dymu(2.0)], ids=["z-score", "threshold"])
def test_a_recipe_that_was_not_calibrated_is_refused_in_the_references_words(recipe):
    with pytest.raises(BadStats, match="adapts to calibrated statistics and has none"):
        adamerge.apply(build("vit").to(DEVICE), recipe, "packed")


# Rows after the last image are not initialised, and the interpreter computes with numpy, which warns of overflows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("recipe", ["adaptive", "sampling"])
def test_counts_under_capture_stay_on_the_device(recipe):
    """Without asking for counts, arrays keep their length and the result is the same."""
    model, images = build("vit").to(DEVICE), pictures(3).to(DEVICE)
    chosen = (RECIPES | ONCE)[recipe](model, images)
    adamerge.apply(model, chosen, "packed")
    with_kernels(model)
    with torch.inference_mode():
        expected = model(images)
        pretend_capture(model)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


def test_what_a_captured_graph_reads_outlives_other_shapes_and_recipes():
    """A graph goes on reading the arrays of its batch shape, whatever the model does in between."""
    model, images = build("vit").to(DEVICE), pictures(3).to(DEVICE)
    adamerge.apply(model, RECIPES["tome"](model, images), "packed")
    with_kernels(model)
    tokens = torch.empty(3, 17, 1, device=DEVICE)
    with torch.inference_mode():
        model(images)
        triton = stack_of(model).selector.triton()
        offsets = weakref.ref(triton.start(tokens).state.layout.offsets)
        pretend_capture(model)
        with collect_used() as used:
            model(images)
        triton.is_capturing = capturing
        assert any(one is triton for one in used) and triton.start(tokens).state.layout.offsets is offsets()
        model(images[:1])
        assert triton.start(tokens).state.layout.offsets is not offsets()
    adamerge.remove(model)
    del triton
    gc.collect()
    assert offsets() is not None
    used.clear()
    gc.collect()
    assert offsets() is None


@pytest.mark.parametrize("kernel, fails", [("attend", 0), ("attend", 2), ("merge", 1), ("unfold", 0)])
def test_where_a_kernel_cannot_run_the_reference_does_and_says_so_once(kernel, fails, monkeypatch, unchecked):
    model, images = build("vit").to(DEVICE), pictures(3).to(DEVICE)
    recipe = RECIPES["adaptive"](model, images)
    room = merging if kernel == "merge" else forward
    own, calls = getattr(room, kernel), []

    def refuses(*args, **kwargs):
        calls.append(args)
        if len(calls) > fails:
            raise OutOfResources(300_000, 101_376, "shared memory")
        return own(*args, **kwargs)

    with torch.inference_mode():
        expected = adamerge.apply(model, recipe, "reference")(images)
        before = adamerge.trace(model)
        adamerge.apply(model, recipe, "packed")
        with_kernels(model)
        monkeypatch.setattr(room, kernel, refuses)
        told = (
            r"a kernel does not run on this device \(OutOfResources: out of resource: shared memory.*\); the reference"
        )
        with pytest.warns(UserWarning, match=told):
            found = model(images)
        # On CUDA the reference itself adds in any order.
        tolerance = 0.0 if DEVICE == "cpu" else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(adamerge.trace(model).slots(), before.slots())
        asked: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=torch.device("cuda"))
        selector = stack_of(model).selector
        assert selector.why_reference(asked, False) == selector.triton_failure is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selector.warn_once("the next batch has nothing new to say")
