"""Under autocast the kernels compute in half precision what the host computes so, on tokens in float32."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from torch import Tensor, nn

import adamerge
from adamerge.core.match import Tokens
from adamerge.core.recipe import Recipe
from adamerge.methods import dymu, pitome
from adamerge.patching.apply import stack_of
from adamerge.presets import protect
from adamerge.runtime import backend
from adamerge.runtime.triton import forward, gemm_dispatch, merging
from adamerge.runtime.triton.kernels.linear import linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's products of bfloat16 are wrong; tests/patching/test_cuda_autocast.py has that dtype.
HALF = torch.float16


def recipe(name: str, model: nn.Module, images: Tensor) -> Recipe:
    if name in RECIPES:
        return RECIPES[name](model, images)
    made = {"threshold": dymu(2.5), "energy": pitome(r=2)}.get(name)
    if made is None:
        made = protect(r=2.5)
        made = replace(made, links=replace(made.links, metric=Tokens()))  # pyright: ignore[reportArgumentType]
    return made.with_stats(adamerge.calibrate(model, images, made, progress=False)) if made.ragged else made


@contextmanager
def autocast(dtype: torch.dtype = HALF) -> Iterator[None]:
    with torch.inference_mode(), torch.autocast(DEVICE, dtype):
        yield


def with_kernels(model: nn.Module, capturing: bool = False) -> None:
    """Use the triton backend; without a CUDA device Triton's interpreter runs the kernels."""
    selector = stack_of(model).selector
    selector.choose = lambda x, views, training: backend.TritonWithFallback(selector, x, views)
    if capturing:
        selector.triton().is_capturing = lambda x: True


def features(model: Any, images: Tensor) -> Tensor:
    return model.forward_features(images)


# Rows after the last image are not initialised, and the interpreter computes with numpy, which warns of overflows.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "family, name, capturing",
    [
        ("vit", "tome", False),
        ("vit", "adaptive", False),
        ("deit3", "threshold", True),
        ("vit", "preset on tokens", False),
        pytest.param("vit", "energy", False, marks=pytest.mark.slow),
        ("qk_norm", "tome", False),
        pytest.param("dinov2", "tome", False, marks=pytest.mark.slow),
    ],
)
def test_the_error_is_no_more_than_twice_that_of_the_reference(family, name, capturing):
    model, images = build(family).to(DEVICE), pictures(3).to(DEVICE)
    chosen = recipe(name, model, images)
    with torch.inference_mode():
        exact = features(adamerge.apply(copy.deepcopy(model).double(), chosen, "reference"), images.double())
    with autocast():
        expected = features(adamerge.apply(model, chosen, "reference"), images)
        adamerge.apply(model, chosen, "packed")
        with_kernels(model, capturing)
        found = features(model, images)
    assert adamerge.trace(model).merged.sum() > 0
    assert found.dtype == expected.dtype == torch.float32
    assert 0 < (found - exact).norm() <= 2 * (expected - exact).norm()
    assert (expected - exact).norm() < 0.1 * exact.norm()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [pytest.param("adaptive", marks=pytest.mark.slow), "threshold"])
def test_products_and_attention_are_in_half_precision_and_sums_are_not(name, monkeypatch):
    """Interpreted, there are two processors, and these products are large."""
    model, images = build("deit3", embed_dim=256, mlp_ratio=1, depth=2).to(DEVICE), pictures(10).to(DEVICE)
    chosen = recipe(name, model, images)
    products, queries, compared, streams = [], [], [], []

    def linear_seen(x, weight, *args, **options):
        assert options.get("onto") is None
        products.append((x.dtype, weight.dtype))
        return linear(x, weight, *args, **options)

    def seen(room, kernel, where):
        own = getattr(room, kernel)
        monkeypatch.setattr(room, kernel, lambda x, *a, **k: where.append(x.dtype) or own(x, *a, **k))

    monkeypatch.setattr(gemm_dispatch, "linear_fused", linear_seen)
    seen(forward, "attend", queries)
    seen(merging, "affinity", compared)
    seen(merging, "match", compared)
    seen(merging, "merge", streams)
    adamerge.apply(model, chosen, "packed")
    with_kernels(model)
    with autocast():
        assert features(model, images).dtype == torch.float32
    assert set(queries) == set(compared) == {HALF} and set(streams) == {torch.float32}
    assert DEVICE == "cuda" or (products and set(products) == {(HALF, HALF)})


def test_a_pass_takes_the_dtype_it_is_told_to_compute_in():
    model, images = build("vit").to(DEVICE), pictures(2).to(DEVICE)
    adamerge.apply(model, RECIPES["tome"](model, images), "packed")
    triton = stack_of(model).selector.triton()
    tokens = torch.randn(2, 17, 48, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    outputs = []
    with torch.inference_mode():
        for dtype in (None, HALF):
            started = triton.start(tokens, dtype)
            for layer in range(3):
                started.step(layer)
            outputs.append(started.finish())
    exact, half = outputs
    assert exact.dtype == half.dtype == torch.float32
    assert 1e-5 < (half - exact).norm() / exact.norm() < 1e-2


def test_tokens_in_the_dtype_of_autocast_stay_in_it_until_a_factor_in_float32():
    """As torch promotes: half precision plus half precision stays, a float32 LayerScale lifts the sum to float32."""
    for family, expected in (("vit", HALF), ("deit3", torch.float32)):
        model, images = build(family).to(DEVICE), pictures(2).to(DEVICE)
        adamerge.apply(model, RECIPES["tome"](model, images), "packed")
        tokens = torch.randn(2, 17, 48, generator=torch.Generator().manual_seed(0)).to(DEVICE, HALF)
        with autocast():
            own = stack_of(model).container(tokens)
            started = stack_of(model).selector.triton().start(tokens, HALF)
            for layer in range(3):
                started.step(layer)
            assert started.finish().dtype == own.dtype == expected


def test_weights_written_in_place_are_seen():
    model, images = build("vit").to(DEVICE), pictures(2).to(DEVICE)
    chosen = RECIPES["tome"](model, images)
    adamerge.apply(model, chosen, "packed")
    with_kernels(model)
    with autocast():
        before = features(model, images)
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.flip(0))
        found = features(model, images)
        twin = adamerge.apply(adamerge.remove(copy.deepcopy(model)), chosen, "packed")
        with_kernels(twin)
        assert torch.equal(found, features(twin, images))
    assert (found - before).norm() > 0.1 * before.norm()
