"""Plain blocks of transformers, open_clip and torchvision run by kernels: as their own layers do."""

from typing import Any

import pytest
import torch
from hosts.zoo import ZOO, Member
from marks import mostly_slow

import adamerge
from adamerge.hosts.base import find_host
from adamerge.methods import tome
from adamerge.patching.apply import stack_of
from adamerge.runtime import backend
from adamerge.runtime.block_view import PlainView
from adamerge.runtime.triton.join_params import join_params

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = {
    "torchvision/ViT": "gelu",
    "open_clip/CLIP": "gelu",
    "open_clip/CLIP_with_LayerScale": "gelu",
    "transformers/ViT": "gelu",
    "transformers/DeiT": "gelu",
    "transformers/DINOv2": "gelu",
    "transformers/DINOv3": "gelu",
    "transformers/CLIP_vision": "quick_gelu",
    "transformers/SigLIP_vision": "gelu_tanh",
    "transformers/VideoMAE": "gelu",
    "timm/CLIP": "quick_gelu",
}


def member_named(name: str) -> Member:
    (found,) = [member for member in ZOO if str(member) == name]
    found.require()
    return found


def not_called(*_: Any) -> Any:
    raise AssertionError("a plain block does not call the layers of its host")


def params_of(model: Any) -> list[Any]:
    return [view.params() if isinstance(view, PlainView) else None for view in find_host(model).views]


@pytest.mark.parametrize("name", PLAIN)
def test_blocks_give_the_parameters_that_their_layers_use(name):
    model = member_named(name).build()
    view, params = find_host(model).views[1], join_params(params_of(model))[1]
    assert params is not None and params.activation == PLAIN[name]
    x, shape = torch.randn(5, view.shape.dim), view.shape
    with torch.no_grad():
        normed = torch.nn.functional.layer_norm(
            x, x.shape[1:], params.norm1.weight, params.norm1.bias, params.norm1.eps
        )
        made = torch.nn.functional.linear(normed, params.qkv.weight, params.qkv.bias)
        for found, expected in zip(
            made.unflatten(1, (3, shape.heads, shape.key_dim)).unbind(1), view.qkv(x), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", mostly_slow(PLAIN, ["open_clip/CLIP_with_LayerScale", "transformers/CLIP_vision"]))
def test_kernels_give_what_the_reference_gives(name, monkeypatch):
    member = member_named(name)
    model, images = member.build().to(DEVICE), member.images(2).to(DEVICE)
    with torch.inference_mode():
        expected = member.see(adamerge.apply(model, tome(3), "reference"), images)
        slots = adamerge.trace(model).slots()
        adamerge.apply(model, tome(3), "packed")
        selector = stack_of(model).selector
        selector.choose = lambda x, views, training: backend.TritonWithFallback(selector, x, views)
        for view in {type(view) for view in selector.views}:
            for step in ("qkv", "project", "mlp"):
                monkeypatch.setattr(view, step, not_called)
        found = member.see(model, images)
    assert torch.equal(adamerge.trace(model).slots(), slots)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_changed_weights_are_seen_at_the_next_pass():
    model = member_named("transformers/ViT").build()
    before = join_params(params_of(model))[0]
    with torch.no_grad():
        find_host(model).views[0].block.attention.k_proj.weight.mul_(2)  # pyright: ignore
    after = join_params(params_of(model))[0]
    assert before is not None and after is not None
    query, key, value = (after.qkv.weight - before.qkv.weight).chunk(3)
    assert key.abs().max() > 0 and not query.any() and not value.any()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("transformers/ViT", "mlp.fc1"),
        ("transformers/ViT", "attention.v_proj"),
        ("transformers/ViT", "attention"),
        ("transformers/ViT", "dropout"),
        ("transformers/DINOv2", "layer_scale2"),
        ("torchvision/ViT", "mlp"),
        ("open_clip/CLIP", "attn.out_proj"),
    ],
)
def test_a_hook_or_a_forward_of_its_own_makes_a_block_run_its_layers(name, path):
    model = member_named(name).build()
    block: Any = find_host(model).views[0]
    part = block.block.get_submodule(path)
    assert block.params() is not None
    handle = part.register_forward_hook(lambda *_: None)
    assert block.params() is None
    handle.remove()
    part.forward = part.forward
    assert block.params() is None


@pytest.mark.parametrize("name", ["transformers/DINOv2_giant", "transformers/ViT"])
def test_other_layers_and_training_are_not_plain(name):
    model = member_named(name).build()
    assert params_of(model.train(name == "transformers/ViT")) == [None] * 3
