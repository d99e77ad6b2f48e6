"""Repair wins back a part of what merging lost, on other images too, and leaves the model as it was."""

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from hosts.families import TINY, pictures, randomised
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch.nn.functional import interpolate

import adamerge
from adamerge.core.errors import BadImages, BadOption
from adamerge.evaluation import kl_divergence
from adamerge.patching.apply import temporarily_patched
from adamerge.repairing import distillation
from adamerge.repairing.augmentation import augment, blend
from adamerge.repairing.distillation import Distillation
from adamerge.repairing.options import RepairOptions
from adamerge.repairing.repairer import repair_with_report
from adamerge.repairing.trainable import trainable
from adamerge.repairing.two_models import TwoModels
from adamerge.search.evaluator import Evaluator

OPTIONS = RepairOptions(epochs=16, learning_rate=5e-3, progress=False)


def make_model() -> Any:
    """A small model whose patches matter: its weights are larger than those that timm draws."""
    torch.manual_seed(0)
    return enlarge(VisionTransformer(img_size=48, patch_size=8, embed_dim=48, depth=4, num_heads=4, num_classes=10))


def enlarge(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model.eval()


def draw(number: int, seed: int) -> torch.Tensor:
    """Images with large and small structures."""
    dice = torch.Generator().manual_seed(seed)
    sides = (3, 6, 12, 48)
    parts = [torch.randn(number, 3, side, side, generator=dice) for side in sides]
    return torch.stack([interpolate(part, 48) for part in parts]).sum(0)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def images():
    return draw(96, 1)


@pytest.fixture(scope="module")
def recipe(model, images):
    return adamerge.presets.best(model, images, cut=0.6)


@pytest.fixture(scope="module")
def report(model, images, recipe):
    return repair_with_report(model, images, recipe, OPTIONS)


def test_less_is_lost_on_images_that_were_not_used(model, recipe, report):
    judge = Evaluator(model, [draw(256, 2)])
    before, after = (judge.sweep(one, calibrate=False) for one in (recipe, report.recipe))
    assert report.repaired and report.check_after < report.check_before
    assert after.loss.mean() < 0.8 * before.loss.mean()
    assert after.macs.mean().item() == pytest.approx(before.macs.mean().item(), rel=0.02)
    assert str(report).startswith("repaired: loss ")


def test_the_applied_model_gives_what_was_judged(model, images, report):
    with torch.no_grad():
        full = model(images).log_softmax(1)
    with adamerge.applied(model, report.recipe), torch.inference_mode():
        merged = model(images).log_softmax(1)
    kl = (full.exp() * (full - merged)).sum(1)
    used = torch.arange(len(images)) % 4 != 3
    assert kl[used].mean().item() == pytest.approx(report.loss_after, rel=1e-3)
    assert kl[~used].mean().item() == pytest.approx(report.check_after, rel=1e-3)


def test_what_merging_loses_before_is_judged_with_the_statistics_of_the_images_used(model, images, recipe, report):
    held_out = torch.arange(len(images)) % 4 == 3
    calibrated = Evaluator(model, [images[~held_out]]).sweep(recipe).recipe
    before = Evaluator(model, [images[held_out]]).sweep(calibrated, calibrate=False)
    assert report.check_before == pytest.approx(before.loss.mean().item(), rel=1e-3)


def test_only_norms_and_biases_of_the_blocks_and_after_them_change(model, report):
    changes = report.recipe.patch.changes
    parameters = dict(model.named_parameters())
    assert all(parameters[name].dim() == 1 for name in changes)
    assert {"norm.weight", "head.bias", "blocks.0.norm1.bias", "blocks.3.mlp.fc2.bias"} <= changes.keys()
    assert not any(name.startswith("patch_embed") for name in changes)
    assert all(change.abs().max() > 0 for change in changes.values())


def test_the_same_seed_gives_the_same_patch_and_the_model_is_not_changed(model, images, recipe):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    options = {"epochs": 1, "progress": False}
    with torch.inference_mode():
        one = adamerge.repair(model, images.clone(), recipe, seed=1, **options)
    model.train()
    again, other = (adamerge.repair(model, images, recipe, seed=seed, **options) for seed in (1, 2))
    assert model.training and model.blocks[0].training
    model.eval()
    assert one == again != other
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_stopped_repair_continues_to_the_same_patch(model, images, recipe, tmp_path, monkeypatch):
    options = {"epochs": 2, "batch_size": 24, "progress": False}
    whole = adamerge.repair(model, images, recipe, **options)
    written = []
    keep = distillation.Distillation._write

    def stop(self, *args):
        keep(self, *args)
        written.append(self.done)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(distillation.Distillation, "_write", stop)
    file = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        adamerge.repair(model, images, recipe, resume=file, **options)
    assert adamerge.repair(model, images, recipe, resume=file, **options) == whole
    assert written == list(range(1, 7)), "no step was done twice"
    with pytest.raises(BadOption, match="is the file of another training: it differs in seed;"):
        adamerge.repair(model, images, recipe, resume=file, seed=4, **options)
    file.write_bytes(b"half a file")
    with pytest.raises(BadOption, match="is not the file of a training"):
        adamerge.repair(model, images, recipe, resume=file, **options)


def test_a_repair_that_does_not_help_gives_the_recipe_back(model, images, recipe, caplog):
    report = repair_with_report(model, images, recipe, replace(OPTIONS, epochs=1, learning_rate=10.0))
    assert not report.repaired and report.recipe is recipe
    assert report.check_after >= report.check_before
    assert str(report).startswith("not repaired: ")
    assert "not repaired" in caplog.text


def test_a_batch_whose_gradient_is_not_finite_spoils_nothing(model, images, recipe, monkeypatch):
    own, calls = TwoModels.compare, []

    def compare(self: TwoModels, batch: torch.Tensor) -> torch.Tensor:
        calls.append(batch)
        return own(self, batch) * (torch.nan if len(calls) in (2, 5) else 1.0)

    monkeypatch.setattr(TwoModels, "compare", compare)
    found = repair_with_report(model, images, recipe, replace(OPTIONS, epochs=8))
    assert len(calls) > 5 and found.repaired


def test_features_of_a_backbone_without_classes_are_repaired():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 70, "depth": 4, "embed_dim": 48, "num_heads": 4, "init_values": 0.5}
    backbone = enlarge(timm.create_model("vit_small_patch14_reg4_dinov2", **sizes))
    images = interpolate(draw(64, 3), 70)
    report = repair_with_report(backbone, images, adamerge.methods.tome(6), OPTIONS)
    assert report.repaired and report.check_after < report.check_before
    assert report.recipe.patch is not None and "blocks.0.ls1.gamma" in report.recipe.patch.changes
    assert report.recipe.stats is None


def test_bfloat16_on_a_cpu_gives_nearly_the_same_loss(model, images, recipe):
    options = replace(OPTIONS, epochs=1)
    plain, fast = (repair_with_report(model, images, recipe, replace(options, autocast=on)) for on in (False, True))
    assert plain.recipe != fast.recipe
    assert fast.check_after == pytest.approx(plain.check_after, rel=0.05)


@pytest.mark.parametrize("supported", [True, False])
def test_a_cpu_that_can_multiply_bfloat16_does_so(model, images, recipe, monkeypatch, supported):
    monkeypatch.setattr(distillation, "_multiplies_bfloat16", lambda: supported)
    with trainable(model) as swap:
        training = Distillation(TwoModels(model, recipe, swap, "kl"), images, OPTIONS)
        told = Distillation(training.models, images, replace(OPTIONS, autocast=not supported))
    assert training.autocast is supported and told.autocast is not supported


def test_half_precision_models_are_repaired_in_float32(model, images, recipe):
    half = make_model().bfloat16()
    report = repair_with_report(half, images, recipe, replace(OPTIONS, epochs=1))
    assert next(half.parameters()).dtype is torch.bfloat16
    assert report.repaired


def test_what_cannot_be_repaired_is_refused(model, images, recipe, report, unchecked):
    with pytest.raises(BadOption, match=r"expected a Recipe such as adamerge\.tune gives, or its file, got int"):
        adamerge.repair(model, images, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadOption, match="this recipe is repaired already"):
        adamerge.repair(model, images, report.recipe)
    with pytest.raises(BadImages, match="at least 8 images"):
        adamerge.repair(model, images[:4], recipe)
    for name, wrong in (("epochs", 0), ("batch_size", 1.5), ("seed", "a"), ("learning_rate", -1), ("loss", "mse")):
        with pytest.raises(BadOption, match=f"{name} must be"):
            adamerge.repair(model, images, recipe, **{name: wrong})  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadOption, match=r"temperature must be >= 0\.1; got 0"):
        RepairOptions(temperature=0)


def test_crops_are_parts_of_their_image_and_depend_on_the_dice_alone():
    columns = torch.arange(32.0).expand(5, 1, 32, 32)
    one, again = (augment(columns, torch.Generator().manual_seed(1), 0.3) for _ in range(2))
    assert torch.equal(one, again)
    spread = one.amax((1, 2, 3)) - one.amin((1, 2, 3))
    assert one.shape == columns.shape and bool((spread < 31.5).all()) and len(set(spread.tolist())) == 5
    rising = one[:, 0, 0, -1] > one[:, 0, 0, 0]
    assert bool(rising.any()) and not bool(rising.all()), "some are mirrored"
    videos = torch.stack([columns, columns], 1)
    moved = augment(videos, torch.Generator().manual_seed(1), 0.3)
    assert torch.equal(moved[:, 0], one) and torch.equal(moved[:, 1], one)


def test_a_blend_lies_between_its_image_and_another_one_of_the_batch():
    images = torch.eye(4)[:, :, None, None].expand(4, 4, 2, 2)
    one, again = (blend(images, torch.Generator().manual_seed(2)) for _ in range(2))
    assert torch.equal(one, again) and one.shape == images.shape
    shares = one[:, :, 0, 0]
    torch.testing.assert_close(shares.sum(1), torch.ones(4))
    own, others = shares.diagonal(), shares - torch.diag(shares.diagonal())
    assert others.count_nonzero(1).tolist() == [1, 1, 1, 1] and others.argmax(1).tolist() == [3, 0, 1, 2]
    assert bool((own > 0).all()) and len(set(own.tolist())) == 4, "each image has a share of its own"
    torch.testing.assert_close(blend(images[:1], torch.Generator()), images[:1])


def test_steps_blend_their_images_unless_they_are_told_not_to(model, images, recipe):
    with trainable(model) as swap:
        models = TwoModels(model, recipe, swap, "kl")
        blended, plain = (
            Distillation(models, images, replace(OPTIONS, blend=choice)).batch(3) for choice in (True, False)
        )
    assert plain.shape == blended.shape and not torch.equal(plain, blended)
    # Blends of different images have less contrast.
    assert blended.var() < 0.9 * plain.var()


def test_the_loss_of_training_is_the_divergence_of_softened_probabilities(model, images, recipe):
    """KL(full || merged) of softmax(logits / T), times T squared, computed here from the two models' own outputs."""
    batch, temperature = images[:6], 2.0
    with temporarily_patched(model), trainable(model) as swap:
        loss = TwoModels(model, recipe, swap, "kl", temperature).compare(batch).item()
    with torch.no_grad():
        full = (model(batch).double() / temperature).softmax(1)
        with adamerge.applied(model, recipe, "reference"):
            merged = (model(batch).double() / temperature).softmax(1)
    expected = temperature**2 * (full * (full / merged).log()).sum(1).mean().item()
    assert expected > 0.01 and loss == pytest.approx(expected, rel=1e-4)


def test_every_block_is_trained_with_its_own_rotary_tables():
    """Each has other ones here; the loss is computed again from what the two models give."""
    model = randomised(Eva(**TINY, use_rot_pos_emb=True, rope_type="mixed", attn_type="rope").eval(), 0)
    batch, recipe = pictures(4), adamerge.methods.tome(3)
    with temporarily_patched(model), trainable(model) as swap:
        loss = TwoModels(model, recipe, swap, "kl").compare(batch).item()
    with torch.no_grad():
        full = model(batch).double().log_softmax(1)
        with adamerge.applied(model, recipe, "reference"):
            merged = model(batch).double().log_softmax(1)
    assert loss == pytest.approx(kl_divergence(full, merged).mean().item(), rel=1e-3)
