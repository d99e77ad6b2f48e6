"""The contract that every supported timm model keeps under every recipe."""

import copy
import io
import math
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import timm
import torch
from families import DEPTH, FAMILIES, FLIPPED, RECIPES, build, measured, pictures, randomised
from timm.layers.attention import Attention
from timm.models.beit import Beit
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn

import adamerge
from adamerge.core.errors import BadOption, NotApplied, UnsupportedModel
from adamerge.core.recipe import Recipe
from adamerge.core.salience import Centrality
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published
from adamerge.methods import none, tome
from adamerge.models.host import find_host
from adamerge.models.surgery import applied

FLAT = LayerStats((0.3,) * DEPTH, (0.1,) * DEPTH)

IDLE = {
    "adaptive": published(0.0, FLAT),
    "flipped": published(0.9, FLAT, **FLIPPED),
    "fixed": published(r=0),
    "tome": tome(0),
    "none": none(),
}


@dataclass(frozen=True)
class Case:
    """One model, one recipe, some images, and what the model makes of them without merging."""

    family: str
    model: VisionTransformer
    recipe: Recipe
    images: Tensor
    plain: Tensor

    def merged(self) -> VisionTransformer:
        adamerge.apply(self.model, self.recipe)
        return self.model


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(params=RECIPES)
def case(family: str, request) -> Case:
    model, images = build(family), pictures()
    recipe = RECIPES[request.param](model, images)
    with torch.no_grad():
        return Case(family, model, recipe, images, model(images))


def run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)


def fuse(model: nn.Module, fused: bool) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            setattr(module, "fused_attn", fused)  # noqa: B010  timm calls it final


# --- nothing merged, nothing changed -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("recipe", IDLE.values(), ids=IDLE)
def test_merging_nothing_changes_no_bit(family, recipe, fused):
    model, images = build(family), pictures()
    fuse(model, fused)
    host = run(model, images)
    assert host.std(0).min() > 0.05, "outputs without spread would agree by accident"
    assert torch.equal(run(adamerge.apply(model, recipe), images), host)
    assert torch.equal(adamerge.apply(model, recipe)(images), model(images))
    assert adamerge.trace(model).r.sum() == 0


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_training_without_merging_draws_the_same_random_numbers(family, fused):
    """Drop-path, dropout of attention, projection and MLP, in the host's own order."""
    model = build(family, drop_path_rate=0.4, attn_drop_rate=0.3, proj_drop_rate=0.2).train()
    fuse(model, fused)
    images = pictures()
    torch.manual_seed(3)
    host = run(model, images)
    torch.manual_seed(3)
    assert torch.equal(run(adamerge.apply(model, none()), images), host)
    assert not torch.equal(run(model, images), host)


# --- merging --------------------------------------------------------------------------------------------------------


def test_every_case_merges_and_leaves_the_shape_alone(case):
    out = run(case.merged(), case.images)
    trace = adamerge.trace(case.model)
    assert out.shape == case.plain.shape and out.isfinite().all()
    assert trace.merged.sum() > 0 and (out - case.plain).abs().max() > 1e-2
    with torch.no_grad():
        features = case.model.forward_features(case.images)
    assert features.shape == (5, case.model.num_prefix_tokens + 16, 48)


def test_adaptive_recipes_give_images_their_own_counts(family):
    model, images = build(family), pictures()
    run(adamerge.apply(model, RECIPES["adaptive"](model, images)), images)
    assert len({tuple(row) for row in adamerge.trace(model).r.tolist()}) > 2


def test_fixed_recipes_merge_exactly_their_number(family):
    model, images = build(family), pictures()
    for recipe in (tome(3), published(r=3)):
        run(adamerge.apply(model, recipe), images)
        assert adamerge.trace(model).r.tolist() == [[3, 3, 3]] * 5


def test_fused_and_plain_attention_agree(case):
    case.merged()
    fuse(case.model, True)
    fused = run(case.model, case.images)
    fuse(case.model, False)
    torch.testing.assert_close(run(case.model, case.images), fused, atol=1e-5, rtol=1e-5)


def test_an_image_gets_the_same_result_alone_and_among_strangers(case):
    """D14."""
    case.merged()
    together, r = run(case.model, case.images), None
    r = adamerge.trace(case.model).r
    for image in range(len(case.images)):
        alone = run(case.model, case.images[image : image + 1])
        assert torch.equal(adamerge.trace(case.model).r, r[image : image + 1])
        if case.recipe.ragged:
            assert torch.equal(alone, together[image : image + 1])
        torch.testing.assert_close(alone, together[image : image + 1], atol=1e-5, rtol=0)


def test_images_one_by_one_and_padded_to_the_longest_get_the_same_result(case, monkeypatch):
    """On a CPU ragged images run alone, elsewhere they are padded; this is the only place where both can be seen."""
    case.merged()
    alone = run(case.model, case.images)
    r, slots = adamerge.trace(case.model).r, adamerge.trace(case.model).slots()
    monkeypatch.setattr(Recipe, "ragged", property(lambda _: False))
    torch.testing.assert_close(run(case.model, case.images), alone, atol=1e-5, rtol=0)
    assert torch.equal(adamerge.trace(case.model).r, r)
    assert torch.equal(adamerge.trace(case.model).slots(), slots)


def test_a_run_repeats_exactly(case):
    case.merged()
    assert torch.equal(run(case.model, case.images), run(case.model, case.images))


def test_patches_of_one_token_leave_with_one_feature(case):
    case.merged()
    with torch.no_grad():
        features = case.model.forward_features(case.images)[:, case.model.num_prefix_tokens :]
    slots = adamerge.trace(case.model).slots()
    for image in range(len(slots)):
        for slot in slots[image].unique():
            group = features[image, slots[image] == slot]
            assert torch.equal(group, group[:1].expand_as(group))
        assert len(features[image].unique(dim=0)) == len(slots[image].unique())


@pytest.mark.parametrize("family", ["average_pool", "average_pool_with_class_token"])
@pytest.mark.parametrize("name", RECIPES)
def test_average_pooling_is_the_mean_over_patches_not_over_tokens(family, name):
    model, images = build(family), pictures()
    adamerge.apply(model, RECIPES[name](model, images))
    out = run(model, images)
    with torch.no_grad():
        features = model.forward_features(images)[:, model.num_prefix_tokens :]
    last, slots = adamerge.trace(model).layers[-1], adamerge.trace(model).slots()
    pooled = []
    for image in range(len(images)):
        total = torch.zeros(features.shape[-1])
        for slot in range(int(last.plan.count[image])):
            member = int((slots[image] == slot).nonzero()[0])
            total += last.size[image, slot] * features[image, member]
        assert last.size[image].sum() == 16
        pooled.append(total / 16)
    with torch.no_grad():
        expected = model.head(model.fc_norm(torch.stack(pooled)))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_sizes_count_the_patches_of_every_token(case):
    run(case.merged(), case.images)
    trace = adamerge.trace(case.model)
    for layer in range(DEPTH):
        slots = trace.slots(layer)
        for image in range(len(slots)):
            held = trace.layers[layer].size[image]
            assert held.tolist() == [(slots[image] == s).sum().item() for s in range(len(held))]


# --- intermediates --------------------------------------------------------------------------------------------------


def test_intermediates_are_maps_of_full_resolution_and_the_last_is_the_output(case):
    case.merged()
    prefix = case.model.num_prefix_tokens
    with torch.no_grad():
        features = case.model.forward_features(case.images)
        trace = adamerge.trace(case.model)
        final, maps = case.model.forward_intermediates(case.images, norm=True)
    assert [m.shape for m in maps] == [(5, 48, 4, 4)] * DEPTH
    assert torch.equal(final, features)
    assert torch.equal(maps[-1], features[:, prefix:].mT.reshape(5, 48, 4, 4))
    assert torch.equal(adamerge.trace(case.model).slots(), trace.slots())
    for layer, m in enumerate(maps):
        tokens, slots = m.flatten(2).mT, trace.slots(layer)
        for image in range(5):
            for slot in slots[image].unique():
                group = tokens[image, slots[image] == slot]
                assert torch.equal(group, group[:1].expand_as(group))


def test_intermediates_can_stop_early(case):
    case.merged()
    with torch.no_grad():
        maps = case.model.forward_intermediates(case.images, intermediates_only=True)
        early = case.model.forward_intermediates(
            case.images, indices=[0, 1], stop_early=True, intermediates_only=True, output_fmt="NLC"
        )
    assert len(adamerge.trace(case.model).layers) == 2
    for a, b in zip(early, maps, strict=False):
        assert torch.equal(a, b.flatten(2).mT)


# --- parameters, checkpoints, copies --------------------------------------------------------------------------------


def test_a_checkpoint_loads_before_and_after(case):
    before = list(case.model.state_dict())
    other = build(case.family, seed=1)
    case.merged()
    assert list(case.model.state_dict()) == before
    assert [n for n, _ in case.model.named_parameters()] == [n for n, _ in other.named_parameters()]
    case.model.load_state_dict(other.state_dict())
    adamerge.apply(other, case.recipe)
    assert torch.equal(run(case.model, case.images), run(other, case.images))


def test_removing_gives_the_same_container_and_the_same_bits_back(case):
    container = case.model.blocks
    run(case.merged(), case.images)
    assert case.model.blocks is not container
    assert adamerge.remove(case.model) is case.model
    assert case.model.blocks is container
    assert torch.equal(run(case.model, case.images), case.plain)
    assert torch.equal(run(adamerge.remove(case.model), case.images), case.plain)


def test_applying_twice_is_applying_once(case):
    container = case.model.blocks
    once = run(case.merged(), case.images)
    assert torch.equal(run(case.merged(), case.images), once)
    assert len(case.model.blocks) == DEPTH
    adamerge.apply(case.model, tome(1))
    adamerge.apply(case.model, case.recipe)
    assert torch.equal(run(case.model, case.images), once)
    assert adamerge.remove(case.model).blocks is container


def test_the_merged_models_blocks_are_the_hosts_own(case):
    blocks = list(case.model.blocks.children())
    case.merged()
    assert list(case.model.blocks.children()) == blocks
    assert case.model.blocks[1] is blocks[1] and case.model.blocks[-1] is blocks[-1]
    assert len(list(case.model.modules())) == len(set(case.model.modules()))


def test_a_copy_merges_like_the_original_and_shares_nothing(case):
    out = run(case.merged(), case.images)
    twin = copy.deepcopy(case.model)
    assert torch.equal(run(twin, case.images), out)
    nn.init.zeros_(case.model.blocks[0].attn.qkv.weight)
    assert torch.equal(run(twin, case.images), out)
    assert not torch.equal(run(case.model, case.images), out)
    assert torch.equal(run(adamerge.remove(twin), case.images), case.plain)


def test_state_and_model_can_be_pickled(case):
    out = run(case.merged(), case.images)
    state = pickle.loads(pickle.dumps(case.model.state_dict()))
    case.model.load_state_dict(state)
    assert torch.equal(run(case.model, case.images), out)
    file = io.BytesIO()
    torch.save(case.model, file)
    file.seek(0)
    assert torch.equal(run(torch.load(file, weights_only=False), case.images), out)


# --- training -------------------------------------------------------------------------------------------------------


def test_a_gradient_reaches_every_parameter_and_the_image(case):
    case.merged()
    images = case.images.clone().requires_grad_()
    case.model(images).square().sum().backward()
    assert images.grad is not None and images.grad.isfinite().all() and images.grad.abs().sum() > 0
    for name, parameter in case.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_training_with_drop_path_runs(family):
    model, images = build(family, drop_path_rate=0.5), pictures()
    recipe = RECIPES["adaptive"](model, images)
    adamerge.apply(model, recipe).train()
    first, second = model(images), model(images)
    first.sum().backward()
    assert first.isfinite().all() and not torch.equal(first, second)
    assert adamerge.trace(model).merged.sum() > 0


@pytest.mark.parametrize("training", [True, False])
def test_removing_keeps_the_mode_the_merged_model_was_in(training):
    model = build("vit").train(not training)
    adamerge.apply(model, tome(2)).train(training)
    adamerge.remove(model)
    assert {m.training for m in model.modules()} == {training}


@pytest.mark.parametrize("training", [True, False])
def test_applying_again_keeps_the_mode_the_merged_model_was_in(training):
    model = build("vit").train(not training)
    adamerge.apply(model, tome(2)).train(training)
    adamerge.apply(model, tome(3))
    assert {m.training for m in model.modules()} == {training}
    adamerge.remove(model)
    assert {m.training for m in model.modules()} == {training}


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_merged_model_runs_in_every_precision(case, dtype):
    single = run(case.merged(), case.images)
    case.model.to(dtype)
    out = run(case.model, case.images.to(dtype))
    assert out.dtype == dtype and out.isfinite().all()
    assert adamerge.trace(case.model).layers[0].salience.dtype == torch.promote_types(dtype, torch.float32)
    # A rounded token may pick another partner: the mean tells a wrong network from a rounded one.  Dot products
    # saturate the softmax, and then more digits show more salience.
    saturated = case.recipe.salience == Centrality("dot")
    tolerance = 0.7 if dtype == torch.bfloat16 else 0.3 if saturated or dtype == torch.float16 else 1e-4
    assert (out.double() - single).abs().mean() < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_activations_in_half_precision_do_not_overflow_the_decision(dtype):
    """D1: tokens of 300, 48 channels, have dot products of four millions."""
    model = build("vit")
    model.patch_embed.proj.weight.data *= 300
    images = pictures()
    recipe = RECIPES["adaptive"](model, images)
    adamerge.apply(model.to(dtype), recipe)
    out, trace = run(model, images.to(dtype)), adamerge.trace(model)
    assert out.isfinite().all() and trace.redundancy.isfinite().all()
    assert (trace.merged > 0).any() and trace.layers[0].salience.amax() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_does_not_reach_the_decision(dtype):
    """D1 again: autocast would take the dot products in half precision and overflow."""
    model = build("vit")
    model.patch_embed.proj.weight.data *= 300
    images = pictures()
    recipe = RECIPES["adaptive"](model, images)
    adamerge.apply(model, recipe)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        model(images)
    trace = adamerge.trace(model)
    assert trace.redundancy.isfinite().all()
    assert trace.layers[0].salience.dtype == torch.float32
    assert (trace.merged > 0).any()


# --- odd inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [16, 32, 48, 80])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", ["adaptive", "flipped", "fixed", "tome"])
@pytest.mark.parametrize("family", ["vit", "deit_distilled", "average_pool"])
def test_any_number_of_patches_and_images_and_more_merges_than_possible(family, name, number, side):
    model, images = build(family, img_size=side), pictures(3, side=side)[:number]
    greedy = LayerStats((-9.0,) * DEPTH, (0.1,) * DEPTH)
    recipe = {
        "adaptive": published(99.0, greedy),
        "flipped": published(99.0, greedy, **FLIPPED),
        "fixed": published(r=99),
        "tome": tome(99),
    }[name]
    out = run(adamerge.apply(model, recipe), images)
    assert out.shape == (number, 10) and out.isfinite().all()
    left = (side // 16) ** 2
    for _ in range(DEPTH):
        left -= left // 2
    counts = adamerge.trace(model).counts
    assert counts.shape == (number, DEPTH) and (counts >= 1).all()
    if name != "flipped":
        assert (counts[:, -1] <= left).all()


def test_a_batch_without_images_comes_out_as_from_the_host(case):
    nothing = case.images[:0]
    assert run(case.model, nothing).shape == run(case.merged(), nothing).shape == (0, 10)
    assert adamerge.trace(case.model).counts.shape == (0, DEPTH)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_image_comes_out_as_from_the_host_and_spoils_no_other(case, value):
    """In float64, because a broken image merges less and so changes the shapes that its neighbours are computed in."""
    case.merged().double()
    good = run(case.model, case.images.double())
    r = adamerge.trace(case.model).r
    broken = case.images.double()
    broken[2, 1, 20, 33] = value
    out, others = run(case.model, broken), [0, 1, 3, 4]
    assert torch.equal(adamerge.trace(case.model).r[others], r[others])
    torch.testing.assert_close(out[others], good[others], atol=1e-9, rtol=0)
    host = run(adamerge.remove(case.model), broken)
    assert host[2].isnan().all()
    torch.testing.assert_close(out[2], host[2], equal_nan=True)


def test_a_broken_image_merges_nothing_when_counts_adapt(family):
    """D9."""
    model, images = build(family), pictures()
    recipe = RECIPES["adaptive"](model, images)
    images[1, 0, 5, 5] = float("nan")
    run(adamerge.apply(model, recipe), images)
    assert adamerge.trace(model).r[1].tolist() == [0] * DEPTH


def test_an_image_of_the_wrong_size_gets_the_hosts_own_error_and_does_no_harm(case):
    good = run(case.merged(), case.images)
    with pytest.raises(AssertionError, match="Input height \\(80\\) doesn't match model \\(64\\)"):
        run(case.model, pictures(2, side=80))
    assert torch.equal(run(case.model, case.images), good)


def test_images_of_another_size_merge_where_the_host_takes_them():
    model = build("vit", dynamic_img_size=True)
    adamerge.apply(model, published(r=3))
    assert run(model, pictures(2, side=96)).isfinite().all()
    assert adamerge.trace(model).counts.tolist() == [[33, 30, 27]] * 2


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


@pytest.mark.parametrize("block", [ParallelScalingBlock, DiffParallelScalingBlock])
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
    with pytest.raises(BadOption, match=r"cannot read the recipe tome: .* Make it with `adamerge tune`, or give a"):
        adamerge.apply(model, "tome")
    with pytest.raises(NotApplied):
        adamerge.trace(model)


def test_a_recipe_without_its_statistics_is_refused_when_it_runs():
    model, images = build("vit"), pictures()
    adamerge.apply(model, published(9.0))
    with pytest.raises(ValueError, match="adapts to calibrated statistics and has none"):
        run(model, images)


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
    with pytest.raises(BadOption, match=message):
        model.forward_features(images, is_causal=True)
    assert run(model, images).isfinite().all()


def test_a_trace_needs_a_merged_model_that_has_run():
    model, images = build("vit"), pictures()
    with pytest.raises(NotApplied, match=r"this model does not merge; call adamerge.apply\(model, recipe\) first"):
        adamerge.trace(model)
    adamerge.apply(model, tome(2))
    with pytest.raises(NotApplied, match=r"the merged model has not run yet; call model\(images\) before"):
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
    stack = applied(model)
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
    first, second, _ = applied(adamerge.apply(build("vit"), tome(2)))[:]
    x = first(torch.randn(2, 17, 48))
    with pytest.raises(BadOption, match=r"tokens were changed between blocks 0 and 1, by a hook .* adamerge.remove"):
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
