"""Kernels are not compiled again for every batch size.  Needs a CUDA device."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch

import adamerge
from adamerge.methods import adamerge as published
from adamerge.methods import ats, dymu, tome
from adamerge.runtime.triton import kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RECIPES = {"tome": tome(8), "published": published(16.0), "dymu": dymu(8.0), "ats": ats(120)}


def kernel_caches() -> Iterator[tuple[str, dict[int, Any]]]:
    """The name of each kernel, and where Triton keeps what it compiled of it in this process, by device."""
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for name, kernel in vars(module).items():
            caches = getattr(kernel, "device_caches", None)
            if caches is not None and kernel.fn.__module__ == module.__name__:
                yield f"{info.name}.{name}", caches


def compiled() -> Counter[str]:
    """How many times each kernel is compiled in this process."""
    return Counter({name: sum(len(cache[0]) for cache in caches.values()) for name, caches in kernel_caches()})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", RECIPES)
def test_batch_sizes_from_1_to_64_share_their_kernels(method):
    """Small batches have tiles of their own, so a few kernels are compiled twice, and none for each batch size."""
    torch.manual_seed(0)
    model: Any = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10).to("cuda", torch.bfloat16).eval()
    recipe, images = RECIPES[method], torch.randn(64, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    if recipe.adaptive is not None:
        recipe = recipe.with_stats(adamerge.calibrate(model, images[:8], recipe, progress=False))
    adamerge.apply(model, recipe, cuda_graphs=False)
    for _, caches in kernel_caches():  # of tests before this one
        caches.clear()
    with torch.inference_mode():
        for batch in (1, 2, 16, 32, 64):
            model(images[:batch])
        some = compiled()
        for batch in range(1, 65):
            model(images[:batch])
        every = compiled()
    print(f"{method}: {some.total()} compilations for five batch sizes, {every.total()} for 64; {dict(every)}")
    assert some.total() > 0
    # Tile shapes change at a few batch sizes, which the five need not meet.
    assert (every - some).total() <= 4, dict(every - some)
