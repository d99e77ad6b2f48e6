"""What of timm's is refused, with which words, and what a merged model says of itself."""

import math
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import timm
import torch
from hosts.families import build, measured, pictures, randomised
from hosts.timm_cases import run
from timm.layers.attention import Attention
from timm.models import vision_transformer
from timm.models.beit import Beit
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import nn

import adamerge
from adamerge.core.errors import BadOption, NotApplied, UnsupportedModel
from adamerge.hosts.base import find_host
from adamerge.methods import adamerge as published
from adamerge.methods import none, tome
from adamerge.patching.apply import stack_of

# Blocks whose MLP runs beside their attention; older releases of timm have but one kind.
BESIDE = [ParallelScalingBlock, getattr(vision_transformer, "DiffParallelScalingBlock", ParallelScalingBlock)]

# --- refusals -------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Something that holds a model."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


def untouched(model: nn.Module, message: str) -> None:
    """Every entry refuses the model with the message and leaves it alone."""
    before = {name: id(module) for name, module in model.named_modules()}
    for entry in (
        lambda: adamerge.apply(model, tome(3)),
        lambda: adamerge.remove(model),
        lambda: adamerge.trace(model),
    ):
        with pytest.raises(UnsupportedModel, match=message):
            entry()
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_models_of_no_known_library_are_refused_with_the_list_of_what_is_supported():
    untouched(
        nn.Sequential(nn.Conv2d(3, 4, 3)),
        r"torch.nn.modules.container.Sequential is not supported; supported are vision transformers of timm, "
        r"transformers, torchvision, open_clip; the README lists them",
    )
    untouched(Wrapper(build("vit")), "Wrapper is not supported; .* pass the inner model, such as model.module")


def test_timms_other_models_are_refused_by_name():
    untouched(
        ResNet(BasicBlock, (1, 1, 1, 1), channels=(4, 4, 4, 4), stem_width=4),  # pyright: ignore[reportArgumentType]
        r"timm's ResNet is not supported; .* The nearest is vit_base_patch16_224\.",
    )
    relative = Beit(img_size=64, patch_size=16, embed_dim=48, depth=2, num_heads=4, use_rel_pos_bias=True)
    untouched(
        relative, "timm's Beit is not supported: it adds a learned bias for every pair of positions, and a merged"
    )


@pytest.mark.parametrize("block", BESIDE)
def test_blocks_of_another_kind_are_refused_by_name(block):
    untouched(
        build("vit", block_fn=block),
        f"block 0 of this model is a {block.__name__}; supported are timm's Block, .* Attention, .*. Blocks whose MLP "
        "runs beside their attention, or whose attention is differential, are not supported",
    )


def test_a_single_foreign_block_is_found():
    class Mine(Attention):
        pass

    model: Any = build("vit")
    model.blocks[2].attn.__class__ = Mine
    untouched(model, "block 2 of this model is a Mine")


def test_gated_attention_is_refused():
    model: Any = build("vit")
    model.blocks[1].attn.gate = nn.Linear(48, 48)
    untouched(model, "block 1 of this model gates its attention output, which is not supported yet")


@pytest.mark.parametrize("thing", ["vit_base_patch16_224", None, VisionTransformer])
def test_what_is_no_model_is_refused(unchecked, thing):
    with pytest.raises(
        UnsupportedModel, match=f"expected a torch.nn.Module, got {type(thing).__name__}; pass the model"
    ):
        adamerge.apply(thing, tome(3))


def test_a_recipe_must_be_a_recipe(unchecked):
    model = build("vit")
    with pytest.raises(BadOption, match=r"expected a Recipe such as adamerge.methods.adamerge\(r_max=14, .* got int"):
        adamerge.apply(model, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadOption, match=r"cannot read the recipe tome: .* Make it with `adamerge tune` .*, or give a"):
        adamerge.apply(model, "tome")
    with pytest.raises(NotApplied):
        adamerge.trace(model)


def test_a_recipe_without_its_statistics_is_refused():
    model, images = build("vit"), pictures()
    expected = run(model, images)
    with pytest.raises(ValueError, match="adapts to calibrated statistics and has none"):
        adamerge.apply(model, published(9.0))
    assert torch.equal(run(model, images), expected)


def test_gradient_checkpointing_is_refused(case):
    case.merged()
    case.model.set_grad_checkpointing(True)
    for call in (case.model, case.model.forward_intermediates):
        with pytest.raises(
            BadOption,
            match=r"gradient checkpointing would run a merged block twice .* model.set_grad_checkpointing\(False\)",
        ):
            call(case.images)
    case.model.set_grad_checkpointing(False)
    assert run(case.model, case.images).isfinite().all()


def test_attention_masks_are_refused():
    model, images = adamerge.apply(build("vit"), tome(2)), pictures()
    message = r"attention masks and merging do not go together; call adamerge.remove\(model\) first"
    assert isinstance(model, VisionTransformer)
    with pytest.raises(BadOption, match=message):
        model.forward_features(images, attn_mask=torch.zeros(17, 17))
    # Older releases of timm have no such option.
    if "is_causal" in signature(model.forward_features).parameters:
        with pytest.raises(BadOption, match=message):
            model.forward_features(images, is_causal=True)
    assert run(model, images).isfinite().all()


def test_a_trace_needs_a_merged_model_that_has_run():
    model, images = build("vit"), pictures()
    with pytest.raises(NotApplied, match=r"this model does not merge; call adamerge.apply\(model, recipe\) first"):
        adamerge.trace(model)
    adamerge.apply(model, tome(2))
    with pytest.raises(
        NotApplied, match=r"the merged model has not run yet, or its first block runs now; call model\(images\) b"
    ):
        adamerge.trace(model)
    run(model, images)
    assert adamerge.trace(model).merged.tolist() == [6] * 5
    adamerge.apply(model, tome(1))
    with pytest.raises(NotApplied, match="has not run yet"):
        adamerge.trace(model)


def test_hybrids_have_a_network_before_their_patches():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_r_s16_p8_224")
    host = find_host(model)
    assert host.image == (3, 224, 224) and host.depth == 12


def test_blocks_run_in_order_from_the_first_or_not_at_all():
    model = adamerge.apply(build("vit"), tome(2))
    stack = stack_of(model)
    with pytest.raises(BadOption, match=r"\[1:None:None\] is not of the form \[:k\]. Use adamerge.remove"):
        stack[1:]
    first, second, _ = stack[:]
    x = torch.randn(2, 17, 48)
    with pytest.raises(NotApplied, match="block 1 of a merged model ran out of turn; blocks run once each, in order"):
        second(x)
    y = second(first(x))
    with pytest.raises(NotApplied, match="block 1 of a merged model ran out of turn"):
        second(y)


def test_tokens_changed_between_blocks_are_refused():
    """They would be lost: the run holds the merged tokens, the host only copies of them."""
    first, second, _ = stack_of(adamerge.apply(build("vit"), tome(2)))[:]
    x = first(torch.randn(2, 17, 48))
    with pytest.raises(BadOption, match=r"changed the tokens between blocks 0 and 1; .* by a hook .* adamerge.remove"):
        second(x + 1)
    assert second(x).shape == x.shape


# --- what the model says of itself ----------------------------------------------------------------------------------


def test_a_merged_model_prints_its_recipe():
    assert "proportional_attention=True" in repr(adamerge.apply(build("vit"), tome(2)))


def test_the_recipe_of_a_subclass_of_timms_model_applies():
    class Mine(VisionTransformer):
        pass

    model, images = build("vit"), pictures()
    model.__class__ = Mine
    plain = run(model, images)
    assert torch.equal(run(adamerge.apply(model, none()), images), plain)


@pytest.mark.skipif("attn_head_dim" not in signature(Attention.__init__).parameters, reason="timm is too old for it")
def test_heads_may_be_of_any_width():
    """head_dim need not be dim / heads."""
    model: Any = build("vit")
    images = pictures()
    for block in model.blocks:
        block.attn = Attention(48, num_heads=4, attn_head_dim=7, qkv_bias=True)
    randomised(model, 3)
    plain = run(model, images)
    assert model.blocks[0].attn.attn_dim == 28
    assert torch.equal(run(adamerge.apply(model, none()), images), plain)
    assert run(adamerge.apply(model, tome(3)), images).isfinite().all()


def test_the_statistics_used_in_these_tests_split_the_images():
    """Half of r_max is where an average image ends; the sigmoid's corners would make weak tests."""
    model, images = build("vit"), pictures()
    stats = measured(model, images, published(6.0))
    run(adamerge.apply(model, published(6.0, stats)), images)
    assert math.isclose(adamerge.trace(model).r[:, 0].double().mean().item(), 2.5, abs_tol=1)
    assert replace(published(6.0, stats)).stats == stats
