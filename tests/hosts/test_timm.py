"""The contract that every supported timm model keeps under every recipe."""

import copy
import io
import pickle

import pytest
import torch
from hosts.families import DEPTH, FLIPPED, RECIPES, build, pictures
from hosts.timm_cases import run
from timm.layers.attention import Attention
from torch import nn

import adamerge
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published
from adamerge.methods import none, tome
from adamerge.patching.apply import stack_of

FLAT = LayerStats((0.3,) * DEPTH, (0.1,) * DEPTH)

IDLE = {
    "adaptive": published(0.0, FLAT),
    "flipped": published(0.9, FLAT, **FLIPPED),
    "fixed": published(r=0),
    "tome": tome(0),
    "none": none(),
}


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


def test_images_one_by_one_and_padded_to_the_longest_get_the_same_result(case):
    """The reference runs ragged images alone on a CPU and pads them elsewhere; only here both can be seen."""
    adamerge.apply(case.model, case.recipe, "reference")
    alone = run(case.model, case.images)
    r, slots = adamerge.trace(case.model).r, adamerge.trace(case.model).slots()
    stack_of(case.model).selector.per_image_on_cpu = False
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
