"""timm's class tokens and positions come to the patches by a kernel where kernels run, and by the host elsewhere."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hosts.families import FAMILIES, build, pictures
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import adamerge
from adamerge.methods import none, tome
from adamerge.patching import position_embedding as positions
from adamerge.patching.apply import stack_of

pytest.importorskip("triton")

# Kernels run on a CUDA device or, by Triton's interpreter, on a CPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernel_pays(model: Any, x: Tensor) -> bool:
    return positions.kernel_pays(stack_of(model).selector, model, x)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_gives_what_the_host_gives(family, monkeypatch):
    model, images = build(family).to(DEVICE), pictures(3).to(DEVICE)
    with torch.inference_mode():
        x = model.patch_embed(images).contiguous()
        expected = model._pos_embed(x)
        adamerge.apply(model, tome(2))
        asked = []

        def pays(selector, host, tokens):
            asked.append(positions.positions_match(host, tokens))
            return asked[-1]

        monkeypatch.setattr(positions, "kernel_pays", pays)
        assert torch.equal(model._pos_embed(x), expected)
    assert asked == ([] if family == "deit_distilled" else [True]), "a variant with a way of its own is left alone"


def test_images_of_any_size_are_left_to_the_host(monkeypatch):
    model = build("vit", dynamic_img_size=True)
    adamerge.apply(model, tome(2))
    monkeypatch.setattr(positions, "half_precision_inference", lambda *_: True)
    with torch.inference_mode():
        assert model(torch.randn(2, 3, 80, 64)).shape == (2, 10)
        assert not kernel_pays(model, model.patch_embed(pictures(1)))


def test_positions_of_another_size_are_the_hosts_to_refuse(monkeypatch):
    model: Any = adamerge.apply(build("vit"), tome(2))
    x = model.patch_embed(pictures(1)).contiguous()
    monkeypatch.setattr(positions, "half_precision_inference", lambda *_: True)
    assert kernel_pays(model, x)
    assert not kernel_pays(model, x[:, 1:])
    assert not kernel_pays(model, x.transpose(1, 2).contiguous().transpose(1, 2))
    model.pos_embed = None
    assert not kernel_pays(model, x)


def test_dropout_is_the_hosts(monkeypatch):
    model = build("vit", pos_drop_rate=1.0).to(DEVICE)
    adamerge.apply(model, tome(2))
    monkeypatch.setattr(positions, "half_precision_inference", lambda *_: True)
    model.train()
    with torch.no_grad():
        x = model.patch_embed(pictures(1).to(DEVICE)).contiguous()
        assert kernel_pays(model, x)
        assert not model._pos_embed(x).any()


def test_a_processor_gradients_and_single_precision_take_the_hosts_way():
    model: Any = adamerge.apply(build("vit"), tome(2))
    x = model.patch_embed(pictures(1)).contiguous()
    assert not kernel_pays(model, x)
    with torch.inference_mode():
        assert not kernel_pays(model, x)


def test_where_the_kernel_cannot_run_the_host_does_and_kernels_are_not_tried_again(monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    model: Any = build("vit")
    calls = []

    def refuses(*_):
        calls.append(1)
        raise errors.OutOfResources(3, 2, "registers")

    with torch.inference_mode():
        x = model.patch_embed(pictures(2)).contiguous()
        expected = model._pos_embed(x)
        adamerge.apply(model, tome(2))
        monkeypatch.setattr(positions, "half_precision_inference", lambda *_: True)
        monkeypatch.setattr("adamerge.runtime.triton.kernels.embed.embed", refuses)
        with pytest.warns(UserWarning, match="a kernel does not run on this device .*registers.*; the reference runs"):
            assert torch.equal(model._pos_embed(x), expected)
        assert torch.equal(model._pos_embed(x), expected) and len(calls) == 1


def test_a_copy_of_a_model_tries_its_own_kernels(monkeypatch):
    """A copy may be moved to another device, where kernels run or do not."""
    model: Any = adamerge.apply(build("vit"), tome(2))
    monkeypatch.setattr(positions, "half_precision_inference", lambda *_: True)
    x = model.patch_embed(pictures(1)).contiguous()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        asked = []
        monkeypatch.setattr(positions, "kernel_pays", lambda selector, *_, asked=asked: asked.append(selector))
        copied._pos_embed(x)
        assert asked == [stack_of(copied).selector] and asked != [stack_of(model).selector]


def test_nothing_of_it_stays_behind():
    model = build("vit")
    attributes = vars(model).keys() | set()
    adamerge.apply(model, tome(2))
    assert type(model) is not VisionTransformer and isinstance(model, VisionTransformer)
    assert repr(model).startswith("VisionTransformer(")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is type(model)
    adamerge.remove(model)
    assert type(model) is VisionTransformer and vars(model).keys() == attributes
    for merged in (lambda: adamerge.apply(model, tome(2), "reference"), lambda: adamerge.apply(model, none())):
        assert getattr(type(merged()), "_pos_embed") is VisionTransformer._pos_embed  # noqa: B009
