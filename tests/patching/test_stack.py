"""The module in the place of a host's blocks: reading it changes nothing, and it gives the blocks back in its state."""

import pytest
import torch
from hosts.zoo import ZOO, Member

import adamerge
from adamerge.hosts.base import find_host
from adamerge.methods import ats, dymu, tome
from adamerge.patching.apply import stack_of


@pytest.fixture(params=[member for member in ZOO if str(member) in ("timm/ViT", "transformers/ViT")], ids=str)
def member(request) -> Member:
    request.param.require()
    return request.param


def test_reading_the_container_changes_no_module(member):
    model = member.build().eval()
    container = find_host(model).container
    adamerge.apply(model, tome(2)).train()
    modules = list(container.modules())
    before = [dict(vars(module)) for module in modules]
    assert find_host(model).container is container
    assert [dict(vars(module)) for module in modules] == before


def test_blocks_are_given_back_in_the_state_of_the_stack(member):
    model = member.build().eval()
    blocks = list(find_host(model).container.children())
    adamerge.apply(model, tome(2)).train()
    for number, block in enumerate(find_host(model).blocks.children()):
        block.mark = number  # pyright: ignore
    adamerge.apply(model, tome(3))
    assert [block.mark for block in find_host(model).blocks.children()] == list(range(len(blocks)))
    adamerge.remove(model)
    assert list(find_host(model).container.children()) == blocks
    assert [vars(block)["mark"] for block in blocks] == list(range(len(blocks)))
    assert {module.training for module in model.modules()} == {True}


@pytest.mark.parametrize("runtime", ["reference", "packed"])
@pytest.mark.parametrize("recipe", [tome(2), dymu(2), ats(6)], ids=["tome", "dymu", "ats"])
def test_the_tokens_that_are_left_are_those_of_the_trace(member, runtime, recipe):
    model = member.build().eval()
    images = torch.randn(3, *find_host(model).image, generator=torch.Generator().manual_seed(0))
    if recipe.adaptive is not None:
        recipe = recipe.with_stats(adamerge.calibrate(model, images[:2], recipe, progress=False))
    stack = stack_of(adamerge.apply(model, recipe, runtime))
    assert stack.tokens_left is None
    with torch.inference_mode():
        model(images)
    left = stack.tokens_left
    assert left is not None and left.tolist() == adamerge.trace(model).counts[:, -1].tolist()
    assert min(left.tolist()) < adamerge.trace(model).patches
