"""Probes see what enters the blocks of every family, and leave the model as they found it."""

from typing import Any

import pytest
import torch
from hosts.zoo import ZOO, Member
from torch import Tensor, nn

import adamerge
from adamerge.hosts.base import find_host
from adamerge.methods import tome
from adamerge.patching.apply import temporarily_patched
from adamerge.patching.probes import GivenTokens, PassThrough, embed
from adamerge.patching.stack import install

# transformers records the output of every block of these, found by its class; a probe is no block.
READ_EVERY_BLOCK = ("transformers/DINOv2_backbone", "transformers/LLaVA")


@pytest.fixture(params=ZOO, ids=str)
def member(request) -> Member:
    request.param.require()
    return request.param


@pytest.fixture(params=[member for member in ZOO if str(member) not in READ_EVERY_BLOCK], ids=str)
def reads_last_block(request) -> Member:
    request.param.require()
    return request.param


def seen_by_hooks(model: nn.Module, images: Tensor) -> tuple[Tensor, list[dict[str, Any]], Tensor]:
    """The tokens that enter the first block, the keywords of every call of a block, and what leaves the last one."""
    host, enters, keywords, leaves = find_host(model), [], [], []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        enters.append(args[0])
        keywords.append(kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        leaves.append(out[0] if isinstance(out, tuple) else out)

    blocks = list(host.container.children())
    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(after) for block in blocks]
    (host.entry or model)(images)
    for handle in handles:
        handle.remove()
    return enters[0], keywords, leaves[-1]


@torch.no_grad()
def test_embed_gives_what_hooks_on_the_blocks_see(member):
    model, images = member.build(), member.images()
    tokens, keywords, _ = seen_by_hooks(model, images)
    host = find_host(model)
    blocks = host.blocks
    state, tables = embed(host, model, images)
    assert torch.equal(state.x, tokens) and state.prefix == host.prefix
    assert host.blocks is blocks
    assert len(tables) == host.depth
    for found, given in zip(tables, keywords, strict=True):
        table = given.get(host.convention.rotary_keyword or "")
        expected = () if table is None else (table,) if isinstance(table, Tensor) else tuple(table)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@torch.no_grad()
def test_given_tokens_take_the_place_of_what_the_blocks_give(reads_last_block):
    member = reads_last_block
    model, images = member.build(), member.images()
    plain = member.see(model, images)
    last, host = seen_by_hooks(model, images)[2], find_host(model)
    with temporarily_patched(model):
        for _ in range(2):
            install(host, GivenTokens(host, last))
        assert torch.equal(member.see(model, images), plain)
        install(host, GivenTokens(host, torch.zeros_like(last)))
        assert not torch.equal(member.see(model, images), plain)
        install(host, host.container)
        assert torch.equal(member.see(model, images), plain)
    assert torch.equal(member.see(model, images), plain)


@torch.no_grad()
def test_tokens_pass_through_unchanged_and_are_observed(reads_last_block):
    member = reads_last_block
    model, images = member.build(), member.images()
    tokens, host, seen = seen_by_hooks(model, images)[0], find_host(model), []
    with temporarily_patched(model):
        install(host, PassThrough(host, seen.append))
        passed = member.see(model, images)
        install(host, GivenTokens(host, tokens))
        assert torch.equal(member.see(model, images), passed)
    assert len(seen) == 1 and torch.equal(seen[0], tokens)


@torch.no_grad()
def test_a_merged_model_still_merges_after_a_probe(member):
    model, images = adamerge.apply(member.build(), tome(3)), member.images()
    merged, host = member.see(model, images), find_host(model)
    embed(host, model, images)
    assert torch.equal(member.see(model, images), merged)
