"""What must hold for every method."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import adamerge
from adamerge import Recipe
from adamerge.core.budget import Adaptive
from adamerge.core.plan import tally
from adamerge.methods import METHODS

STRONG = {
    "adamerge": {"r_max": 6},
    "tome": {"r": 3},
    "pitome": {"r": 3},
    "dsm": {"r": 4, "delay": 1},
    "tofu": {"r": 3},
    "evit": {"keep": 0.6},
    "ats": {"tokens": 9},
    "dymu": {"r": 3},
    "vid_tldr": {"r": 3},
    "random": {"r": 3},
    "none": {},
}
ZERO = {**{name: {"r": 0} for name in STRONG}, "adamerge": {"r_max": 0}, "evit": {"keep": 1.0}, "none": {}}
# Sampling needs a point on every token to keep all; no number of points promises that.
WITHOUT_ZERO = {"ats"}
AVERAGING_BY_SIZE = ("tome", "pitome", "dsm", "dymu", "random")


@pytest.fixture
def model() -> VisionTransformer:
    torch.manual_seed(0)
    net = VisionTransformer(img_size=64, patch_size=16, embed_dim=48, depth=4, num_heads=4, num_classes=10)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.2))
    return net.eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(6, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def ready(name: str, options: dict, model, images) -> Recipe:
    recipe = METHODS[name](**options)
    if isinstance(recipe.budget, Adaptive):
        recipe = recipe.with_stats(adamerge.calibrate(model, images, recipe, progress=False))
    return recipe


def test_every_method_is_tested_here():
    assert set(STRONG) == set(METHODS)


@pytest.mark.parametrize("name", sorted(set(STRONG) - {"none"}))
def test_a_strong_setting_merges(name, model, images):
    adamerge.apply(model, ready(name, STRONG[name], model, images))
    with torch.no_grad():
        model(images)
    assert (adamerge.trace(model).merged > 0).all()


@pytest.mark.parametrize("name", sorted(set(STRONG) - WITHOUT_ZERO))
def test_a_zero_budget_is_the_host_bit_for_bit(name, model, images):
    with torch.no_grad():
        expected = model(images)
        adamerge.apply(model, ready(name, ZERO[name], model, images))
        assert torch.equal(model(images), expected)
    assert expected.std() > 0.1


@pytest.mark.parametrize("name", STRONG)
def test_an_image_does_not_depend_on_its_batch(name, model, images):
    adamerge.apply(model, ready(name, STRONG[name], model, images))
    with torch.no_grad():
        together, r = model(images), adamerge.trace(model).r
        for i in range(len(images)):
            assert (model(images[i : i + 1]) - together[i]).abs().max() < 1e-5
            assert torch.equal(adamerge.trace(model).r[0], r[i])


@pytest.mark.parametrize("name", STRONG)
def test_sizes_count_every_patch_once(name, model, images):
    adamerge.apply(model, ready(name, STRONG[name], model, images))
    with torch.no_grad():
        model(images)
    seen = adamerge.trace(model)
    assert torch.equal(seen.layers[-1].size.sum(1), torch.full((6,), 16.0))
    assert torch.equal(tally(torch.ones(6, 16), seen.plan()), seen.layers[-1].size)


@pytest.mark.parametrize("name", AVERAGING_BY_SIZE)
def test_averaging_by_size_conserves_mass(name, model, images):
    recipe = ready(name, STRONG[name], model, images)
    # The packed backend averages merged rows itself; its outputs are compared with those of the reference elsewhere.
    adamerge.apply(model, recipe, "reference")
    before, after = [], []
    original = type(recipe.combine).__call__

    def watch(self, x, decision, evidence):
        out = original(self, x, decision, evidence)
        before.append((evidence.size[..., None] * x).sum(1))
        after.append((tally(evidence.size, decision.plan)[..., None] * out).sum(1))
        return out

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(type(recipe.combine), "__call__", watch)
        model(images)
    assert before
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STRONG)
def test_gradients_reach_the_image_and_every_block(name, model, images):
    adamerge.apply(model, ready(name, STRONG[name], model, images))
    images.requires_grad_()
    model(images).square().sum().backward()
    assert images.grad is not None and images.grad.isfinite().all() and images.grad.abs().sum() > 0
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", STRONG)
def test_a_recipe_survives_json(name, model, images):
    recipe = ready(name, STRONG[name], model, images)
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize("name", ["evit", "ats"])
def test_methods_that_read_the_class_token_say_so_when_there_is_none(name):
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, class_token=False, global_pool="avg", depth=4, embed_dim=48, num_heads=4
    ).eval()
    with pytest.raises(adamerge.AdamergeError, match="this model has no class token"):
        adamerge.apply(model, METHODS[name](**STRONG[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STRONG)
def test_on_a_cpu_an_image_alone_and_among_strangers_gets_the_same_bits(name, dtype, model, images):
    adamerge.apply(model, ready(name, STRONG[name], model, images))
    model, images = model.to(dtype), images.to(dtype)
    random = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        alone = torch.cat([model.forward_features(image) for image in images.split(1)])
        for size in (2, 3, 6, 11):
            batch = torch.randint(len(images), (size,), generator=random)
            assert torch.equal(model.forward_features(images[batch]), alone[batch])
