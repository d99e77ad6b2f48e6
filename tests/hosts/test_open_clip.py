"""open_clip and torchvision: zero-shot classification with a merged vision tower, and what is refused."""

from typing import Any

import pytest
import torch
from hosts.zoo import OTHERS, Member
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import adamerge
from adamerge.core.errors import BadOption, UnsupportedModel
from adamerge.methods import adamerge as published
from adamerge.methods import none, tome

open_clip = pytest.importorskip("open_clip")

CLIPS = [member for member in OTHERS if member.library == "open_clip"]
WORDS = torch.arange(1, 25).view(3, 8)


@pytest.fixture(params=CLIPS, ids=str)
def member(request) -> Member:
    return request.param


def zero_shot(model: Any, images: Tensor) -> Tensor:
    """Probabilities of three descriptions, the way open_clip's own README has it."""
    with torch.no_grad():
        seen, said = model.encode_image(images), model.encode_text(WORDS)
        seen, said = seen / seen.norm(dim=-1, keepdim=True), said / said.norm(dim=-1, keepdim=True)
        return (100.0 * seen @ said.mT).softmax(-1)


def test_zero_shot_classification_runs_merged_and_the_text_tower_is_left_alone(member):
    model, images = member.build(), member.images()
    text = {name: id(part) for name, part in model.named_modules() if not name.startswith("visual")}
    plain = zero_shot(model, images)
    with torch.no_grad():
        said = model.encode_text(WORDS)
    stats = adamerge.calibrate(model, images, r_max=4, progress=False)
    adamerge.apply(model, published(4, stats))
    merged = zero_shot(model, images)
    assert adamerge.trace(model).merged.sum() > 0
    assert merged.shape == plain.shape == (4, 3) and not torch.equal(merged, plain)
    torch.testing.assert_close(merged.sum(1), torch.ones(4))
    with torch.no_grad():
        assert torch.equal(model.encode_text(WORDS), said)
    assert {name: id(part) for name, part in model.named_modules() if not name.startswith("visual")} == {
        **text,
        "": id(model),
    }
    adamerge.apply(model, none())
    torch.testing.assert_close(zero_shot(model, images), plain, atol=1e-3, rtol=1e-3)
    assert torch.equal(zero_shot(adamerge.remove(model), images), plain)


def test_image_and_text_together_run_merged(member):
    model, images = member.build(), member.images()
    adamerge.apply(model, tome(3))
    with torch.no_grad():
        seen, said, scale = model(images, WORDS)
    assert seen.shape == (4, 24) and said.shape == (3, 24) and scale.isfinite()


def test_intermediates_are_full_maps():
    member = CLIPS[0]
    model, images = member.build(), member.images()
    adamerge.apply(model, tome(3))
    with torch.no_grad():
        maps = model.visual.forward_intermediates(images)["image_intermediates"]
    trace = adamerge.trace(model)
    assert [m.shape for m in maps] == [(4, 48, 4, 4)] * 3
    for layer, m in enumerate(maps):
        tokens = m.flatten(2).mT
        assert [len(row.unique(dim=0)) for row in tokens] == trace.counts[:, layer].tolist()


def test_a_tower_alone_is_supported():
    member = CLIPS[0]
    model, images = member.build(), member.images()
    with torch.no_grad():
        together = model.encode_image(images)
        torch.testing.assert_close(adamerge.apply(model.visual, none())(images), together, atol=1e-5, rtol=1e-5)
    adamerge.apply(model.visual, tome(3))
    assert adamerge.flops.meter(model).patches == 16


def test_gradient_checkpointing_is_refused():
    member = CLIPS[0]
    model, images = member.build(), member.images()
    adamerge.apply(model, tome(3))
    model.set_grad_checkpointing(True)
    with pytest.raises(BadOption, match="gradient checkpointing would run a merged block twice"):
        model.encode_image(images)


def refused(model: nn.Module, message: str) -> None:
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModel, match=message):
        adamerge.apply(model, tome(3))
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_other_towers_and_blocks_are_refused_by_name():
    make: Any = CLIPS[0].make
    refused(make(layers=(1, 1, 1, 1), width=16), "the vision tower of this open_clip model is a ModifiedResNet; ")
    refused(make(qk_norm=True), "block 0 of this model is a CustomResidualAttentionBlock; supported is open_clip's")
    strange: Any = make()
    strange.visual.transformer.resblocks[2].attn = nn.MultiheadAttention(48, 4, add_zero_attn=True, batch_first=True)
    refused(strange, "the attention of block 2 is a MultiheadAttention with other widths, extra keys or another order")


def test_torchvisions_other_models_are_refused_by_name():
    refused(ResNet(BasicBlock, [1, 1, 1, 1]), "torchvision's ResNet is not supported; .* The nearest is vit_b_16.")
    (vit,) = [member for member in OTHERS if member.library == "torchvision"]
    model: Any = vit.build()
    model.encoder.layers[1] = nn.Identity()
    refused(model, "block 1 of this model is a Identity; supported is torchvision's EncoderBlock")
