"""A patch goes into a model with its recipe and comes out bit for bit, whatever happens in between."""

import copy
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import adamerge
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.core.weight_patch import WeightPatch
from adamerge.hosts.base import find_host
from adamerge.methods import tome

IMAGES = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
NAMES = ("blocks.0.norm1.weight", "blocks.1.mlp.fc2.bias", "norm.bias", "head.bias")


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return VisionTransformer(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=4, num_classes=10).eval()


def patched_recipe(model: Any) -> Recipe:
    parameters = dict(model.named_parameters())
    dice = torch.Generator().manual_seed(2)
    changes = {name: torch.randn(parameters[name].shape, generator=dice) / 3 for name in NAMES}
    patch = WeightPatch.make(changes, find_host(model).fingerprint())
    return replace(tome(2), patch=patch)


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_patch_changes_what_the_model_gives_and_removing_it_restores_every_bit():
    model = make_model()
    recipe, before = patched_recipe(model), values(model)
    with torch.no_grad():
        adamerge.apply(model, tome(2))
        plain = model(IMAGES)
        adamerge.apply(model, recipe)
        repaired = model(IMAGES)
    assert recipe.patch is not None
    changes, now = recipe.patch.changes, values(model)
    for name in before:
        assert torch.equal(now[name], before[name] + changes[name] if name in changes else before[name])
    assert not torch.allclose(plain, repaired)
    adamerge.remove(model)
    assert same(values(model), before)


@pytest.mark.parametrize("inference", [False, True])
def test_a_patch_is_applied_once_however_often_it_is_applied(inference):
    model = make_model()
    recipe, before = patched_recipe(model), values(model)
    with torch.inference_mode(inference):
        adamerge.apply(model, recipe)
        once = values(model)
        adamerge.apply(model, recipe)
        assert same(values(model), once)
        with adamerge.applied(model, tome(1)):
            assert same(values(model), before)
        assert same(values(model), once)
        adamerge.remove(model)
    assert same(values(model), before)
    assert model.norm.bias.requires_grad and not model.norm.bias.is_inference()


def test_the_state_of_a_patched_model_is_that_of_the_model_without_the_patch(tmp_path):
    model = make_model()
    recipe, before = patched_recipe(model), {name: value.clone() for name, value in model.state_dict().items()}
    adamerge.apply(model, recipe)
    assert same(model.state_dict(), before)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    adamerge.save_recipe(model, tmp_path)
    with torch.no_grad():
        out = model(IMAGES)
    other = make_model(seed=5)
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    with torch.no_grad():
        assert torch.equal(adamerge.apply(other, tmp_path)(IMAGES), out)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_that_are_loaded_into_a_patched_model_get_the_patch(assign):
    model = make_model()
    recipe = patched_recipe(model)
    adamerge.apply(model, recipe)
    other = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.clone() for name, value in other.items()}, assign=assign)
    assert recipe.patch is not None
    assert torch.equal(model.head.bias, other["head.bias"] + recipe.patch.changes["head.bias"])
    adamerge.remove(model)
    assert same(model.state_dict(), other)
    assert same(values(model), other)


def test_training_a_patched_model_is_kept_when_the_patch_is_removed():
    model = make_model()
    recipe, before = patched_recipe(model), values(model)
    adamerge.apply(model, recipe)
    with torch.no_grad():
        model.head.bias += 0.25
    assert torch.allclose(model.state_dict()["head.bias"], before["head.bias"] + 0.25, atol=1e-6)
    adamerge.remove(model)
    assert torch.allclose(model.head.bias, before["head.bias"] + 0.25, atol=1e-6)
    assert torch.equal(model.norm.bias, before["norm.bias"])


def test_copies_of_a_patched_model_can_be_restored():
    model = make_model()
    recipe, before = patched_recipe(model), values(model)
    adamerge.apply(model, recipe)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(values(other), values(model)) and same(other.state_dict(), before)
        assert same(values(adamerge.remove(other)), before)
        assert not any(module._state_dict_hooks for module in other.modules())
    assert not same(values(model), before)


def test_a_patched_model_that_changed_its_dtype_is_restored_in_it():
    model, wanted = make_model(), make_model().bfloat16()
    adamerge.apply(model, patched_recipe(model))
    model.bfloat16()
    adamerge.remove(model)
    assert same(values(model), values(wanted))


def test_a_repaired_recipe_comes_back_from_its_two_files(tmp_path):
    recipe = patched_recipe(make_model())
    path = adamerge.save_recipe(recipe, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adamerge.json", "adamerge.safetensors"]
    assert len(path.read_text()) < 3000
    assert adamerge.load_recipe(tmp_path) == Recipe.from_json(recipe.to_json()) == recipe
    assert hash(adamerge.load_recipe(tmp_path)) == hash(recipe)
    recipe.save(tmp_path / "mine.json")
    assert Recipe.load(tmp_path / "mine.json") == recipe and (tmp_path / "mine.safetensors").is_file()
    assert Recipe.from_json(recipe.file_text()) == recipe
    assert "content" not in repr(recipe)


def test_the_patch_of_a_recipe_on_the_hub_is_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    recipe, asked = patched_recipe(make_model()), []
    adamerge.save_recipe(recipe, tmp_path)

    def download(repo: str, name: str, *, revision: str | None) -> str:
        asked.append(name)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert adamerge.load_recipe("someone/repaired") == recipe
    assert asked == ["adamerge.json", "adamerge.safetensors"]


def test_a_recipe_without_a_patch_is_written_as_before():
    assert "patch" not in json.loads(tome(2).to_json())


def test_damaged_and_missing_patches_are_refused(tmp_path):
    adamerge.save_recipe(patched_recipe(make_model()), tmp_path)
    patch, file = tmp_path / "adamerge.safetensors", tmp_path / "adamerge.json"
    data, text = patch.read_bytes(), file.read_text()
    patch.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BadOption, match=r"is not the patch that the recipe was written with: its SHA-256 differs"):
        adamerge.load_recipe(tmp_path)
    patch.unlink()
    with pytest.raises(BadOption, match=r"cannot read the patch of the recipe, .*adamerge\.safetensors"):
        adamerge.load_recipe(tmp_path)
    file.write_text(text.replace("adamerge.safetensors", "../adamerge.safetensors"))
    with pytest.raises(BadOption, match=r"named without a folder; got '\.\./adamerge\.safetensors'"):
        adamerge.load_recipe(tmp_path)


@pytest.mark.parametrize("data", [b"", b"12345678", b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"])
def test_what_is_no_patch_is_refused(data):
    with pytest.raises(BadOption, match="not a safetensors file of a patch"):
        WeightPatch.from_bytes(data)


def test_a_patch_of_numbers_that_are_not_finite_is_refused():
    with pytest.raises(BadOption, match=r"changes norm\.bias by numbers that are not finite"):
        WeightPatch.make({"norm.bias": torch.full((3,), torch.nan)}, {})
    with pytest.raises(BadOption, match="is not base64 text"):
        WeightPatch("ä")


def test_a_patch_for_another_model_is_refused_and_nothing_is_changed():
    model, other = make_model(), make_model(seed=3)
    before = values(other)
    with pytest.raises(
        BadOption, match="patch of this recipe was made for a model of the same shape with other weights"
    ):
        adamerge.apply(other, patched_recipe(model))
    fingerprint = find_host(other).fingerprint()
    for name, message in (("nothing.bias", "which this model does not have"), ("norm.bias", r"of shape \(5,\)")):
        recipe = replace(tome(2), patch=WeightPatch.make({name: torch.ones(5)}, fingerprint))
        with pytest.raises(BadOption, match=message):
            adamerge.apply(other, recipe)
    assert same(values(other), before)


def test_a_patch_says_how_much_it_changes():
    assert str(patched_recipe(make_model()).patch) == "patch of 154 numbers in 4 parameters"
