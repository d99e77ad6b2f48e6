"""A real ImageNet model on real images, where both lie beside the checkout."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

import adamerge
from adamerge.data.folders import folder_loader
from adamerge.methods import METHODS
from adamerge.search.evaluator import Evaluator
from adamerge.search.solve import solve

BESIDE = Path(__file__).resolve().parents[2] / "shared"
WEIGHTS = BESIDE / "weights" / "vit_tiny_patch16_224.safetensors"
IMAGES = BESIDE / "data" / "imagenet-val-2k"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not WEIGHTS.is_file() or not IMAGES.is_dir(), reason="no real weights and images beside us"),
]


def test_the_untuned_preset_diverges_less_than_half_as_far_as_delayed_merging():
    """DSM is the best rival at this cut (docs/results.md)."""
    model: Any = timm.create_model("vit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(WEIGHTS))
    images = next(iter(folder_loader(model, IMAGES, batch_size=64, workers=0, limit=64))).images
    bench = Evaluator(model, list(images.split(32)))
    mine = bench.sweep(adamerge.presets.best(model, images, 0.3), calibrate=False)
    rival = bench.sweep(solve(model, images, METHODS["dsm"], 0.3).recipe)
    assert mine.macs.mean() <= 1.006 * rival.macs.mean()
    assert mine.loss.mean() < 0.5 * rival.loss.mean()


WAYS = [
    pytest.param(r_max, how, marks=() if (r_max, how) == (14, "iterative") else pytest.mark.slow, id=f"{r_max}-{how}")
    for how in ("iterative", "sequential")
    for r_max in (9, 14, 23)
]


@pytest.mark.parametrize(("r_max", "how"), WAYS)
def test_an_image_among_64_strangers_has_the_same_counts_and_logits_as_alone(r_max, how):
    """To the bit on a CPU, where blocks and head run image by image."""
    model: Any = timm.create_model("vit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(WEIGHTS))
    images = next(iter(folder_loader(model, IMAGES, batch_size=64, workers=0, limit=64))).images
    with torch.inference_mode():
        plain = model(images)
        stats = adamerge.calibrate(model, images, r_max=r_max, how=how, progress=False)
        adamerge.apply(model, adamerge.methods.adamerge(r_max=r_max, stats=stats))
        together, r = model(images), adamerge.trace(model).r
        assert r.sum(1).unique().numel() > 5
        for i in range(64):
            assert torch.equal(model(images[i : i + 1])[0], together[i])
            assert torch.equal(adamerge.trace(model).r[0], r[i])
        assert torch.equal(adamerge.remove(model)(images), plain)
