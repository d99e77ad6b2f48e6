"""Video: space and time are one sequence, so that tokens merge across frames."""

from typing import Any

import pytest
import torch
from hosts.zoo import TRANSFORMERS

import adamerge
from adamerge.methods import adamerge as published
from adamerge.methods import tome

(VIDEOMAE,) = [member for member in TRANSFORMERS if member.name == "VideoMAE"]


@pytest.fixture
def model() -> Any:
    VIDEOMAE.require()
    return VIDEOMAE.build()


def test_a_still_scene_merges_across_time(model):
    """Where nothing moves, tokens come to stand for the same place at several moments.

    ToMe's turns put a patch and itself a moment later on the same side when frames have an even number of patches, so
    that both meet in a third; a split by salience does not.
    """
    torch.manual_seed(0)
    still = torch.randn(2, 1, 3, 64, 64).expand(2, 4, 3, 64, 64).contiguous()
    # Places in time and space are added to the tokens; without them only what is seen counts.
    model.videomae.embeddings.position_embeddings *= 0
    for recipe in (tome(8), published(r=8)):
        with torch.no_grad():
            adamerge.apply(model, recipe)(still)
        slots = adamerge.trace(model).slots()
        assert all((slots[video, :16] == slots[video, 16:]).sum() >= 8 for video in range(2))


def test_a_video_is_calibrated_and_priced_like_an_image(model):
    videos = VIDEOMAE.images()
    stats = adamerge.calibrate(model, videos, r_max=8, progress=False)
    adamerge.apply(model, published(8, stats))
    with torch.no_grad():
        model(videos)
    full = adamerge.flops.meter(model)
    assert full.patches == 32 and adamerge.trace(model).patches == 32
    assert (adamerge.flops.cost(model).paper < full.unmerged().paper).all()


@pytest.mark.slow
def test_a_video_of_full_size_costs_less(model):
    """VideoMAE-B: 16 frames of 224 pixels are 1,568 tokens; ToMe takes 65 of them away in each layer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.VideoMAEForVideoClassification(transformers.VideoMAEConfig(num_hidden_layers=12)).eval()
    with torch.no_grad():
        adamerge.apply(model, tome(65))(torch.randn(1, 16, 3, 224, 224))
    counts = adamerge.trace(model).counts[0].tolist()
    assert counts == [1568 - 65 * (layer + 1) for layer in range(12)]
    cost, full = adamerge.flops.cost(model), adamerge.flops.meter(model).unmerged()
    assert float(cost.true / full.true) < 0.75
