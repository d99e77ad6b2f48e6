"""Hooks on blocks and on their parts run on merged models."""

from typing import Any

import pytest
import torch
from hosts.families import build, pictures
from hosts.zoo import ZOO, Member
from torch import Tensor, nn

import adamerge
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published
from adamerge.methods import evit, none, tome
from adamerge.patching.apply import stack_of

ADAPTIVE = published(6.0, LayerStats((0.3,) * 3, (0.1,) * 3))
NAMES = ("timm/ViT", "timm/DINOv3", "timm/parallel", "torchvision/ViT", "open_clip/CLIP", "transformers/ViT")
HOSTS = [member for member in ZOO if str(member) in NAMES]


def tokens_of(made: Any) -> Tensor:
    return made[0] if isinstance(made, tuple) else made


def run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(images)


@pytest.mark.parametrize("member", HOSTS, ids=str)
@pytest.mark.parametrize("recipe", [tome(2), ADAPTIVE], ids=["fixed", "adaptive"])
def test_a_hook_on_a_block_sees_its_tokens_in_the_hosts_shape(member: Member, recipe):
    member.require()
    model, images = adamerge.apply(member.build(), recipe), member.images()
    block, given, made = stack_of(model).block(1), [], []
    with torch.inference_mode():
        expected = member.see(model, images)
        block.register_forward_pre_hook(lambda module, args: given.append((module, args[0])))
        block.register_forward_hook(lambda module, args, out: made.append((module, tokens_of(out))))
        got = member.see(model, images)
    torch.testing.assert_close(got, expected)
    trace = adamerge.trace(model)
    assert len(given) == len(made) == 1 and given[0][0] is made[0][0] is block
    for layer, (_, tokens) in ((0, given[0]), (1, made[0])):
        assert tokens.shape[:2] == (len(images), trace.prefix + trace.patches)
        distinct = [len(torch.unique(image[trace.prefix :], dim=0)) for image in tokens]
        assert distinct == trace.counts[:, layer].tolist() and min(distinct) < trace.patches


@pytest.mark.parametrize("member", HOSTS, ids=str)
def test_hooks_of_every_kind_on_every_module_change_nothing_if_they_only_look(member: Member):
    member.require()
    model, images = adamerge.apply(member.build(), tome(2)), member.images().requires_grad_()
    expected, seen = member.see(model, images), set()
    for name, module in stack_of(model).named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.add(name))
        module.register_full_backward_hook(lambda *_: None)
    got = member.see(model, images)
    torch.testing.assert_close(got, expected)
    got.square().sum().backward()
    assert len([name for name in seen if name.endswith(("attn", "attention"))]) >= 3


def zero(module: nn.Module, args: Any, out: Any) -> Any:
    return (out[0] * 0, *out[1:]) if isinstance(out, tuple) else out * 0


@pytest.mark.parametrize("member", HOSTS, ids=str)
def test_a_hook_that_changes_a_block_changes_the_model_as_it_does_unmerged(member: Member):
    """The first block gives zeros: every token then is a function of nothing, merged or not."""
    member.require()
    model, images = member.build(), member.images()
    container = stack_of(adamerge.apply(model, none())).container
    adamerge.remove(model)
    with torch.no_grad():
        without = member.see(model, images)
        next(iter(container.children())).register_forward_hook(zero)
        expected = member.see(model, images)
        adamerge.apply(model, none())
        torch.testing.assert_close(member.see(model, images), expected)
        # A token of zeros is merged with others of zeros, whatever the recipe.
        adamerge.apply(model, tome(2))
        torch.testing.assert_close(member.see(model, images), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, without, atol=1e-2)


@pytest.mark.parametrize("recipe", [tome(2), evit(0.5)], ids=["tome", "evit"])
def test_a_merged_token_takes_the_mean_change_of_its_patches(recipe):
    model: Any = adamerge.apply(build("vit"), recipe)
    change, before, after = torch.randn(3, 17, 48), [], []

    def add_in_place(module: nn.Module, args: Any, out: Tensor) -> None:
        before.append(out.clone())
        out += change

    model.blocks[1].register_forward_hook(add_in_place)
    model.blocks[2].norm1.register_forward_pre_hook(lambda _, args: after.append(args[0]))
    run(model, pictures(3))
    trace = adamerge.trace(model)
    torch.testing.assert_close(after[0][:, 0], before[0][:, 0] + change[:, 0])
    for image, slots in enumerate(trace.slots(1)):
        for slot in range(int(trace.counts[image, 1])):
            members = 1 + (slots == slot).nonzero().flatten()
            expected = before[0][image, members[0]] + change[image, members].mean(0)
            torch.testing.assert_close(after[0][image, 1 + slot], expected)


def test_gradients_reach_full_backward_hooks_of_every_block():
    model: Any = adamerge.apply(build("vit"), tome(2))
    images = pictures(2)
    model(images).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    seen: list[Tensor] = []
    for block in model.blocks.children():
        block.register_full_backward_hook(lambda module, inner, outer: seen.append(outer[0]))
    model(images).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=1e-3, rtol=1e-3)
    assert len(seen) == 3 and all(gradient.abs().max() > 0 for gradient in seen)
