"""A patched module comes back as it was; where another library patched on top, an error comes before any change."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hosts.families import build, pictures
from hosts.zoo import ZOO
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.utils import parametrize

import adamerge
from adamerge.core.errors import PatchConflict
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published
from adamerge.methods import tome
from adamerge.patching.apply import stack_of

ADAPTIVE = published(6.0, LayerStats((0.3,) * 3, (0.1,) * 3))


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def timm_vit() -> nn.Module:
    return build("vit")


def transformers_vit() -> nn.Module:
    (member,) = [member for member in ZOO if str(member) == "transformers/ViT"]
    member.require()
    return member.build()


def run(model: Any, images: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(images)
    return out if isinstance(out, Tensor) else out.logits if "logits" in out else out.pooler_output


def state(model: nn.Module) -> tuple[list[Any], ...]:
    """Classes, modes and tensors of all modules."""
    modules = list(model.modules())
    return [type(m) for m in modules], [m.training for m in modules], [id(p) for p in model.parameters()]


# Maker, a module that is patched, its parameter, the recipe it is patched for.
PATCHED: list[tuple[Callable[[], nn.Module], str, str, Recipe]] = [
    (timm_vit, "patch_embed.proj", "weight", tome(2)),
    (timm_vit, "", "pos_embed", tome(2)),
    (timm_vit, "", "cls_token", ADAPTIVE),
    (transformers_vit, "classifier", "weight", ADAPTIVE),
    (transformers_vit, "vit.embeddings.patch_embeddings.projection", "weight", tome(2)),
]
patched = pytest.mark.parametrize(("make", "path", "name", "recipe"), PATCHED)


@patched
def test_a_parametrization_on_a_patched_module_is_refused_and_not_lost(make, path, name, recipe):
    model, images = make(), pictures(2)
    plain = run(model, images)
    adamerge.apply(model, recipe)
    module = model.get_submodule(path)
    parametrize.register_parametrization(module, name, Halved())
    before, out = state(model), run(model, images)
    for undo in (adamerge.remove, lambda model: adamerge.apply(model, tome(1))):
        with pytest.raises(PatchConflict, match=r"expected class .* got Parametrized\w+ .*remove_parametrizations"):
            undo(model)
        assert state(model) == before and stack_of(model).recipe == recipe
        assert parametrize.is_parametrized(module, name)
        assert torch.equal(run(model, images), out)
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    adamerge.remove(model)
    assert torch.equal(run(model, images), plain)
    assert [type(m) for m in model.modules()] == [type(m) for m in make().modules()]


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (timm_vit, "norm"),
        (timm_vit, "head"),
        (timm_vit, "blocks.0.attn.qkv"),
        (transformers_vit, "vit.layernorm"),
        (transformers_vit, "vit.layers.0.layernorm_before"),
    ],
)
def test_a_parametrization_on_a_module_that_is_not_patched_stays(make, path):
    model, images = make(), pictures(2)
    paths = [name for name, _ in model.named_modules()]
    if path not in paths:  # transformers 4 calls the container otherwise
        path = path.replace("vit.layers", "vit.encoder.layer")
    twin = copy.deepcopy(model)
    parametrize.register_parametrization(twin.get_submodule(path), "weight", Halved())
    adamerge.apply(model, ADAPTIVE)
    module = model.get_submodule(path)
    parametrize.register_parametrization(module, "weight", Halved())
    adamerge.apply(model, tome(2))
    adamerge.remove(model)
    assert model.get_submodule(path) is module and parametrize.is_parametrized(module, "weight")
    assert torch.equal(run(model, images), run(twin, images))


@patched
def test_a_parametrization_from_before_survives_applying_and_removing(make, path, name, recipe):
    model, images = make(), pictures(2)
    module = model.get_submodule(path)
    parametrize.register_parametrization(module, name, Halved())
    before, plain = state(model), run(model, images)
    for _ in range(2):
        adamerge.apply(model, recipe)
        run(model, images)
    adamerge.remove(model)
    assert state(model) == before and torch.equal(run(model, images), plain)
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    assert torch.equal(run(model, images), run(make(), images))


def test_a_forward_that_another_library_set_on_a_patched_module_is_refused_and_not_lost():
    model, images = build("vit"), pictures(2)
    adamerge.apply(model, tome(2))
    proj: Any = model.patch_embed.proj
    own, calls = proj.forward, []
    out = run(model, images)
    proj.forward = lambda x: calls.append(len(x)) or own(x)
    theirs, before = proj.forward, state(model)
    for undo in (adamerge.remove, lambda model: adamerge.apply(model, ADAPTIVE)):
        with pytest.raises(PatchConflict, match=r"patch_embed\.proj.*expected .*`forward`.* got .*lambda"):
            undo(model)
        assert state(model) == before and proj.forward is theirs
    assert torch.equal(run(model, images), out) and calls == [2]
    del proj.forward
    adamerge.remove(model)
    assert type(proj) is nn.Conv2d and "forward" not in vars(proj)


def test_a_library_that_puts_the_method_back_as_an_attribute_is_no_conflict():
    """That is how most undo it: `own = module.forward; module.forward = other; module.forward = own`."""
    model: Any = build("vit")
    proj = model.patch_embed.proj
    attributes = set(vars(proj))
    adamerge.apply(model, tome(2))
    proj.forward = proj.forward
    twin = copy.deepcopy(model)
    for each in (model, twin):
        adamerge.remove(each)
        assert type(each.patch_embed.proj) is nn.Conv2d and set(vars(each.patch_embed.proj)) == attributes


def test_a_forward_from_before_survives_applying_and_removing():
    model: Any = build("vit")
    proj, images = model.patch_embed.proj, pictures(2)
    own, calls = proj.forward, []
    proj.forward = lambda x: calls.append(len(x)) or own(x)
    theirs, before, plain = proj.forward, state(model), run(model, images)
    adamerge.apply(model, tome(2))
    run(model, images)
    adamerge.apply(model, ADAPTIVE)
    adamerge.remove(model)
    assert proj.forward is theirs and state(model) == before
    assert torch.equal(run(model, images), plain) and calls == [2, 2, 2]


def test_a_method_that_another_library_set_on_the_class_is_called_before_and_after_removing(monkeypatch):
    model, images, calls = build("vit"), pictures(2), []
    adamerge.apply(model, ADAPTIVE)
    own = VisionTransformer.forward_head
    monkeypatch.setattr(VisionTransformer, "forward_head", lambda self, x: calls.append(len(x)) or own(self, x))
    run(model, images)
    assert calls == [1, 1]
    adamerge.remove(model)
    run(model, images)
    assert calls == [1, 1, 2]


def test_functions_that_take_merging_off_for_a_while_refuse_and_leave_the_model_as_it_was():
    model, images = build("vit").train(), pictures(2)
    adamerge.apply(model, ADAPTIVE)
    parametrize.register_parametrization(model.patch_embed.proj, "weight", Halved())
    before = state(model)
    with pytest.raises(PatchConflict, match=r"patch_embed\.proj"):
        adamerge.calibrate(model, images, r_max=0.5, progress=False)
    assert state(model) == before and stack_of(model).recipe == ADAPTIVE
