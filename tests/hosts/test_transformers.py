"""What only transformers does: recording, checkpointing, attention back-ends, saving, towers inside other models."""

import inspect
from typing import Any

import pytest
import torch
from hosts.zoo import TRANSFORMERS, WORDS, Member
from torch import Tensor, nn

import adamerge
from adamerge.core.errors import BadOption, UnsupportedModel
from adamerge.evaluation import evaluate
from adamerge.methods import adamerge as published
from adamerge.methods import none, tome

transformers = pytest.importorskip("transformers")

SEES = [member for member in TRANSFORMERS if member.name not in ("CLIP", "SigLIP", "LLaVA")]
PAIRS = [member for member in TRANSFORMERS if member.name in ("CLIP", "SigLIP")]


def member_named(name: str) -> Member:
    (found,) = [member for member in TRANSFORMERS if member.name == name]
    return found


@pytest.fixture(params=SEES, ids=str)
def member(request) -> Member:
    request.param.require()
    return request.param


def untouched(model: nn.Module, message: str) -> None:
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModel, match=message):
        adamerge.apply(model, tome(3))
    assert {name: id(module) for name, module in model.named_modules()} == before


# --- recording ------------------------------------------------------------------------------------------------------


def test_hidden_states_are_full_maps_of_every_layer(member):
    model, images = member.build(), member.images()
    with torch.no_grad():
        plain = model(images, output_hidden_states=True).hidden_states
        adamerge.apply(model, none())
        same = model(images, output_hidden_states=True).hidden_states
        adamerge.apply(model, tome(3))
        merged = model(images, output_hidden_states=True).hidden_states
    trace = adamerge.trace(model)
    assert len(plain) == len(same) == len(merged) == 4
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    assert torch.equal(merged[0], plain[0])
    assert [state.shape for state in merged] == [state.shape for state in plain]
    for layer, state in enumerate(merged[1:]):
        patches, slots = state[:, trace.prefix :], trace.slots(layer)
        for image in range(len(images)):
            assert len(patches[image].unique(dim=0)) == len(slots[image].unique()) == trace.patches - 3 * (layer + 1)
            for slot in slots[image].unique():
                group = patches[image, slots[image] == slot]
                assert torch.equal(group, group[:1].expand_as(group))


def test_hidden_states_are_recorded_whenever_recording_began(member):
    """transformers installs its hooks on the first request, and leaves them or parts of them behind."""
    model, images = member.build(), member.images()
    with torch.no_grad():
        model(images, output_hidden_states=True)
        merged = adamerge.apply(model, tome(3))(images, output_hidden_states=True).hidden_states
        again = model(images, output_hidden_states=True).hidden_states
        plain = adamerge.remove(model)(images, output_hidden_states=True).hidden_states
        assert torch.equal(
            adamerge.apply(model, tome(3))(images, output_hidden_states=True).hidden_states[-1], merged[-1]
        )
    assert all(torch.equal(a, b) for a, b in zip(merged, again, strict=True))
    assert len(plain) == len(merged) == 4 and not torch.equal(plain[-1], merged[-1])


def test_a_users_hook_on_a_block_sees_it_run(member):
    model, images = member.build(), member.images()
    seen: list[Tensor] = []
    blocks = [module for module in model.modules() if type(module).__name__.endswith("Layer")]
    blocks[1].register_forward_hook(lambda _, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        adamerge.apply(model, tome(3))(images)
    assert len(seen) == 1 and seen[0].shape[1] == adamerge.trace(model).patches + adamerge.trace(model).prefix


def test_attention_weights_are_refused_and_the_model_goes_on(member):
    model, images = member.build(), member.images()
    # 4.x says by a warning that this attention records nothing.
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    with torch.no_grad():
        good = adamerge.apply(model, tome(3))(images)[0]
        for _ in range(2):
            with pytest.raises(BadOption, match=r"no attention weights .* leave output_attentions out"):
                model(images, output_attentions=True)
        after = model(images)[0]
        first, second = (x[0] if isinstance(x, tuple) else x for x in (good, after))
        assert torch.equal(first, second)
        adamerge.remove(model)
        assert model(images, output_attentions=True).attentions is not None


# --- ways to run ----------------------------------------------------------------------------------------------------


def test_eager_attention_agrees_with_the_host_to_its_rounding(member):
    """The host scales scores, the runtime scales queries; both are right to a rounding."""
    model, images = member.build(), member.images()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    with torch.no_grad():
        host = member.see(model, images)
        torch.testing.assert_close(member.see(adamerge.apply(model, none()), images), host, atol=1e-5, rtol=1e-5)
        eager = member.see(adamerge.apply(model, tome(3)), images)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = "sdpa"
        torch.testing.assert_close(member.see(model, images), eager, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["ViT", "DINOv2", "CLIP vision"])
def test_gradient_checkpointing_is_refused_while_training(name):
    member = member_named(name)
    model, images = member.build(), member.images()
    adamerge.apply(model, tome(3))
    # The name from 5.23 on; the old one warns there.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")()
    assert member.see(model, images).isfinite().all(), "without training there are no checkpoints"
    model.train()
    with pytest.raises(BadOption, match=rf"would run .* call model.*{kind}_checkpointing_disable"):
        model(images)
    getattr(model, f"{kind}_checkpointing_disable")()
    member.see(model, images).sum().backward()


@pytest.mark.parametrize("name", ["ViT", "DINOv2"])
def test_masks_that_the_library_makes_while_it_is_captured_are_no_masks(name, monkeypatch):
    """5.x cannot look at values then, and until 5.9 it makes a mask although nobody gave one."""
    masks = pytest.importorskip("transformers.masking_utils")
    if not hasattr(masks, "_ignore_bidirectional_mask_sdpa"):
        pytest.skip("this version makes no masks for these models")
    member = member_named(name)
    model, images = adamerge.apply(member.build(), tome(3)), member.images()
    with torch.inference_mode():
        expected = member.see(model, images)
        monkeypatch.setattr(masks, "_ignore_bidirectional_mask_sdpa", lambda *_, **__: False)
        assert torch.equal(member.see(model, images), expected)
        trace = adamerge.trace(model)
        mask = torch.ones(len(images), trace.prefix + trace.patches)
        with pytest.raises(BadOption, match="attention masks and merging do not go together"):
            model(images, attention_mask=mask)


def test_attention_masks_are_refused():
    member = member_named("ViT")
    model, images = adamerge.apply(member.build(), tome(3)), member.images()
    masks = {"attention_mask": torch.zeros(4, 1, 17, 17), "head_mask": torch.ones(3, 4)}
    taken = inspect.signature(transformers.ViTModel.forward).parameters
    mask = {name: mask for name, mask in masks.items() if name in taken}
    if not mask:
        pytest.skip("this version's ViT takes no mask")
    with pytest.raises(BadOption, match="attention masks and merging do not go together"):
        model(images, **mask)


def test_positions_may_be_interpolated_to_another_size():
    member = member_named("ViT")
    model = adamerge.apply(member.build(), tome(3))
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        assert model(images, interpolate_pos_encoding=True).logits.isfinite().all()
    assert adamerge.trace(model).counts.tolist() == [[33, 30, 27]] * 2


def test_dropout_and_drop_path_draw_the_same_random_numbers():
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("ViT", dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3)),
        ("DINOv2", dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3, drop_path_rate=0.4)),
        ("CLIP vision", dict(attention_dropout=0.3)),
    ]
    for name, options in kinds:
        member = member_named(name)
        model: Any = member.make(**options).train()  # pyright: ignore[reportCallIssue]
        images = member.images()
        torch.manual_seed(3)
        host = member.see(model, images)
        torch.manual_seed(3)
        assert torch.equal(member.see(adamerge.apply(model, none()), images), host)
        assert not torch.equal(member.see(model, images), host)


def test_a_classifier_is_evaluated_by_its_logits():
    member = member_named("ViT")
    model, images = member.build(), member.images()
    found = evaluate(model, [(images, torch.tensor([0, 1, 2, 3]))], tome(3), progress=False)
    assert found.top1.shape == (4,) and (found.cost.true < found.full_cost.true).all()


# --- saving ---------------------------------------------------------------------------------------------------------


def test_a_merged_model_saves_what_the_plain_one_saves(member, tmp_path):
    model, images = member.build(), member.images()
    model.save_pretrained(tmp_path / "plain")
    with torch.no_grad():
        plain = member.see(model, images)
        merged = member.see(adamerge.apply(model, tome(3)), images)
        model.save_pretrained(tmp_path / "merged")
        names = sorted(path.name for path in (tmp_path / "plain").iterdir())
        assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == names
        for name in names:
            assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
        adamerge.save_recipe(model, tmp_path / "merged")
        loaded = type(model).from_pretrained(tmp_path / "merged").eval()
        assert torch.equal(member.see(loaded, images), plain)
        recipe = adamerge.load_recipe(tmp_path / "merged")
        assert torch.equal(member.see(adamerge.apply(loaded, recipe), images), merged)


# --- towers in other models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", PAIRS, ids=str)
def test_the_text_tower_is_left_alone(member):
    model, images = member.build(), member.images()
    parts = {name: id(module) for name, module in model.text_model.named_modules()}
    with torch.no_grad():
        words = model.text_model(input_ids=WORDS).pooler_output
        adamerge.apply(model, tome(3))
        assert torch.equal(model.text_model(input_ids=WORDS).pooler_output, words)
        match = model(input_ids=WORDS, pixel_values=images).logits_per_image
    assert {name: id(module) for name, module in model.text_model.named_modules()} == parts
    assert match.shape == (4, 2) and adamerge.trace(model).merged.tolist() == [9] * 4


@pytest.mark.parametrize("member", PAIRS, ids=str)
def test_a_model_with_two_towers_is_calibrated_on_images_alone(member):
    model, images = member.build(), member.images()
    stats = adamerge.calibrate(model, images, r_max=4, progress=False)
    adamerge.apply(model, published(4, stats))
    member.see(model, images)
    assert adamerge.flops.cost(model).true.shape == (4,)


def test_two_vision_towers_are_too_many():
    one, other = member_named("ViT").build(), member_named("DINOv2").build()

    class Both(transformers.PreTrainedModel):
        config_class = transformers.ViTConfig
        _supports_sdpa = True

        def __init__(self):
            super().__init__(one.config)
            self.first, self.second = one, other

    untouched(Both(), "Both has 2 vision towers; pass one of first.vit, second instead")


# --- refusals -------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=64, patch_size=16
)


def test_models_that_cannot_be_merged_are_refused_with_the_reason():
    beit = transformers.BeitModel(transformers.BeitConfig(**TINY, use_relative_position_bias=True))
    untouched(beit, "transformers' BeitModel is not supported: it adds a learned bias for every pair of positions")
    mae = transformers.ViTMAEModel(transformers.ViTMAEConfig(**TINY))
    untouched(mae, "ViTMAEModel is not supported: it drops patches at random; .* load the checkpoint as a ViTModel")
    bert = transformers.BertModel(transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    untouched(bert, r"BertModel is not supported. Supported are ViT, .* The nearest is ViTForImageClassification\.")


def test_a_block_with_something_added_is_refused():
    model = member_named("ViT").build()
    blocks = [module for module in model.modules() if type(module).__name__ == "ViTLayer"]
    blocks[1].adapter = nn.Linear(48, 48)
    untouched(model, "block 1 of this model is a ViTLayer built otherwise than ViTLayer is in transformers")
