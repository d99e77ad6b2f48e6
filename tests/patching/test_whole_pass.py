"""Hosts that loop over their blocks: all blocks run at once, unless tokens between them are asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hosts.zoo import ZOO, Member

import adamerge
from adamerge.methods import tome
from adamerge.patching.apply import stack_of
from adamerge.patching.stack import Stack

LOOPING = [member for member in ZOO if str(member) in ("timm/EVA-02", "transformers/ViT", "open_clip/CLIP")]


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Grows by one whenever tokens are given back in the host's shape."""
    counted: list[int] = []
    keep: Callable[..., None] = Stack.keep_trace

    def count(self: Stack, trace: Any) -> None:
        if trace is not None:
            counted.append(1)
        keep(self, trace)

    monkeypatch.setattr(Stack, "keep_trace", count)
    return counted


@pytest.mark.parametrize("member", LOOPING, ids=str)
def test_a_loop_that_reads_nothing_between_blocks_gets_one_pass(member: Member, passes):
    member.require()
    model = adamerge.apply(member.build(), tome(2))
    with torch.inference_mode():
        member.see(model, member.images())
    assert len(passes) == 1
    assert len(adamerge.trace(model).layers) == len(stack_of(model))


@pytest.mark.parametrize("member", LOOPING, ids=str)
def test_a_hook_on_a_block_sees_the_tokens_after_it(member: Member, passes):
    member.require()
    # The reference, which runs hooked models: the packed backend rounds differently.
    model, images = adamerge.apply(member.build(), tome(2), "reference"), member.images()
    seen: list[Any] = []
    stack = stack_of(model)
    with torch.inference_mode():
        expected = member.see(model, images)
        handle = stack[1].register_forward_hook(lambda block, given, made: seen.append(made))
        passes.clear()
        got = member.see(model, images)
    assert torch.equal(got, expected)
    assert len(passes) == len(stack)
    made = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert len(torch.unique(made[0, stack.prefix :], dim=0)) < made.shape[1] - stack.prefix
    handle.remove()


def test_hidden_states_are_those_of_every_block(passes):
    member = next(member for member in LOOPING if member.library == "transformers")
    member.require()
    model, images = adamerge.apply(member.build(), tome(2)), member.images()
    with torch.inference_mode():
        alone = model(images)
        passes.clear()
        asked = model(images, output_hidden_states=True)
        distinct = [len(torch.unique(states[0], dim=0)) for states in asked.hidden_states]
        assert len(passes) == len(stack_of(model))
        # Once the library has installed its recorders, they do not keep later passes from running at once.
        passes.clear()
        assert torch.equal(model(images).logits, alone.logits)
    assert len(passes) == 1
    assert torch.equal(asked.logits, alone.logits)
    assert distinct == sorted(distinct, reverse=True)
    assert distinct[0] > distinct[-1]
