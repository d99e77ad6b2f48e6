"""Models in float32 under autocast run with kernels and as CUDA graphs.  Needs a CUDA device."""

import copy
import gc
from typing import Any

import pytest
import timm
import torch
from hosts.families import randomised
from torch import Tensor

import adamerge
from adamerge.methods import adamerge as published
from adamerge.methods import dymu, tome
from adamerge.patching.apply import stack_of
from adamerge.runtime.triton.graph_cache import CALLS_BEFORE_CAPTURE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HALVES = [torch.bfloat16, torch.float16]


def build(**options: Any) -> Any:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10, **options)
    return model.to("cuda").eval()


def pictures(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(seed)).to("cuda")


def calibrated(model: Any, recipe: adamerge.Recipe) -> adamerge.Recipe:
    if not recipe.ragged:
        return recipe
    return recipe.with_stats(adamerge.calibrate(model, pictures(8, seed=9), recipe, progress=False))


@torch.inference_mode()
def features(model: Any, images: Tensor, dtype: torch.dtype | None = None, calls: int = 1) -> Tensor:
    """The tokens after the last norm, under autocast to a dtype if there is one; `calls` calls in one context."""
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        found = [model.forward_features(images) for _ in range(calls)]
    return found[-1]


def error_of_median(found: Tensor, exact: Tensor) -> Tensor:
    """The error of the image in the middle of all images, in order of their errors."""
    return (found - exact).flatten(1).norm(dim=1).median()


def spoil_free_memory() -> None:
    """Overwrite what torch's allocator has freed."""
    gc.collect()
    torch.full((2**27,), float("nan"), device="cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("method", [tome(8), dymu(8.0), published(16.0)], ids=["tome", "dymu", "published"])
def test_the_error_is_no_more_than_twice_that_of_the_reference(method, dtype):
    """The published method compares tokens in the dtype of autocast, so it errs as a model in that dtype does.

    In half precision a few images merge other tokens, those that are almost equally alike: with the kernels and with
    the reference.  So the error of the median image is compared.
    """
    # Random parameters everywhere tell tokens apart; as made, all are almost the same, and rounding decides.
    model, images = randomised(build(), 0).to("cuda"), pictures(32)
    recipe = calibrated(model, method)
    reference: Any = adamerge.apply(copy.deepcopy(model), recipe, "reference")
    exact, expected = features(reference, images), features(reference, images, dtype)
    if recipe.site == "before_block":
        halved: Any = adamerge.apply(copy.deepcopy(model).to(dtype), recipe, "reference")
        expected = features(halved, images.to(dtype)).float()
    fast: Any = adamerge.apply(model, recipe, cuda_graphs=False)
    found = features(fast, images, dtype)
    with torch.inference_mode(), torch.autocast("cuda", dtype):
        assert stack_of(fast).selector.why_reference(images, False) is None
    assert found.dtype == torch.float32
    assert 0 < error_of_median(found, exact) <= 2 * error_of_median(expected, exact)
    assert adamerge.trace(fast).merged.sum() > 0


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("method", [tome(8), dymu(8.0), published(16.0)], ids=["tome", "dymu", "published"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_graph_gives_what_the_kernels_give(method, dtype, qk_norm):
    """Blocks with a norm of queries and keys run their own layers, whose cast weights autocast would keep."""
    model = build(qk_norm=qk_norm)
    recipe = calibrated(model, method)
    plain: Any = adamerge.apply(copy.deepcopy(model), recipe, cuda_graphs=False)
    fast: Any = adamerge.apply(model, recipe)
    features(fast, pictures(6), dtype, calls=CALLS_BEFORE_CAPTURE + 1)
    assert len(stack_of(fast).graphs) == 1
    spoil_free_memory()
    for seed in (1, 2):
        assert torch.equal(features(fast, pictures(6, seed), dtype), features(plain, pictures(6, seed), dtype))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_weights_written_in_place_are_seen(qk_norm):
    fast, images = adamerge.apply(build(qk_norm=qk_norm), tome(8)), pictures(4)
    before = features(fast, images, torch.bfloat16, calls=CALLS_BEFORE_CAPTURE + 1)
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.data.copy_(parameter.data.flip(0))
    plain = adamerge.apply(adamerge.remove(copy.deepcopy(fast)), tome(8), cuda_graphs=False)
    found = features(fast, images, torch.bfloat16)
    assert torch.equal(found, features(plain, images, torch.bfloat16))
    assert not torch.equal(found, before)


def test_calls_with_and_without_autocast_have_graphs_of_their_own():
    model, images = build(), pictures(4)
    plain: Any = adamerge.apply(copy.deepcopy(model), tome(8), cuda_graphs=False)
    fast: Any = adamerge.apply(model, tome(8))
    for _ in range(2):
        for dtype in (None, *HALVES):
            found = features(fast, images, dtype, calls=CALLS_BEFORE_CAPTURE + 1)
            assert torch.equal(found, features(plain, images, dtype))
    assert len(stack_of(fast).graphs) == 3


@pytest.mark.parametrize("method", [tome(8), dymu(8.0)], ids=["tome", "dymu"])
def test_capture_by_hand_works_and_outlives_autocast(method):
    model, images = build(), pictures(4)
    fast: Any = adamerge.apply(model, calibrated(model, method), cuda_graphs=False)
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        expected = fast(images)
        captured = adamerge.capture(fast, images)
    spoil_free_memory()
    assert torch.equal(captured(images), expected)
