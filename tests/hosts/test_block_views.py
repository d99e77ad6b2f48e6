"""Views of timm's rarer blocks: shared key heads, parallel branches, rotary tables that differ from block to block."""

from typing import Any

import pytest
import torch
from hosts.families import TINY, build, pictures, randomised
from timm.layers import attention
from timm.models.eva import Eva
from timm.models.vision_transformer import ParallelThingsBlock
from torch.utils.flop_counter import FlopCounterMode

import adamerge
from adamerge import flops
from adamerge.hosts.base import find_host
from adamerge.methods import none, tome
from adamerge.patching.probes import embed
from adamerge.runtime.layerwise import HostBlock, run_layers
from adamerge.runtime.reference import attend


def test_a_query_head_reads_the_key_head_of_its_group():
    """timm: head h uses key head h // groups."""
    if "num_kv_heads" not in attention.AttentionRope.__init__.__code__.co_varnames:
        pytest.skip("this release of timm has no grouped queries")
    model = randomised(Eva(**TINY, use_rot_pos_emb=True, attn_type="rope", qkv_fused=False).eval(), 0)
    block: Any = model.blocks[1]
    grouped = attention.AttentionRope(48, num_heads=4, num_kv_heads=2, qkv_fused=False)
    block.attn = attn = randomised(grouped, 1).eval()
    view, x = find_host(model).views[1], torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        query, key, value = view.qkv(x)
        assert key.shape == query.shape == value.shape == (2, 9, 4, 12)
        expected = attn(block.norm1(x))
        found = attn.proj(attend(view, query, key, value, None).flatten(-2))
    torch.testing.assert_close(found, expected)


def test_the_cost_of_parallel_branches_is_what_torch_executes():
    model = build("vit", block_fn=ParallelThingsBlock).requires_grad_(False)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010  timm calls it final
    counter = FlopCounterMode(display=False)
    for recipe in (none(), tome(3)):
        adamerge.apply(model, recipe)
        with torch.no_grad(), counter:
            model(pictures(1))
        assert flops.cost(model).true.tolist() == [counter.get_total_flops() // 2]


def test_every_block_has_its_own_rotary_tables():
    """In a whole pass, block by block, and layer by layer as calibration and the tuner run."""
    model = randomised(Eva(**TINY, use_rot_pos_emb=True, rope_type="mixed", attn_type="rope").eval(), 0)
    images = pictures(2)
    with torch.no_grad():
        expected = model.forward_features(images)
        host = find_host(model)
        state, tables = embed(host, model, images)
        assert len(tables) == 3 and not torch.equal(tables[0][0], tables[1][0])
        blocks = [HostBlock(view, table) for view, table in zip(host.views, tables, strict=True)]
        torch.testing.assert_close(model.norm(run_layers([state], blocks, none())[0].x), expected)
        adamerge.apply(model, none())
        torch.testing.assert_close(model.forward_features(images), expected)
        last, _ = model.forward_intermediates(images, norm=True)
        torch.testing.assert_close(last, expected)
