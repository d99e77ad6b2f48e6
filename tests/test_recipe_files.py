"""Recipes travel beside weights."""

import json
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import adamerge
from adamerge.core.errors import BadOption, NotApplied
from adamerge.core.recipe import Recipe
from adamerge.methods import METHODS, none, tome
from adamerge.methods import adamerge as published
from adamerge.search.solve import make_recipe

STATS = adamerge.LayerStats((0.3, 0.2, 0.1), (0.1, 0.2, 0.3), images=5)


def model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=4, num_classes=10).eval()


def test_a_recipe_comes_back_with_its_statistics(tmp_path):
    recipe = published(6.0, STATS)
    path = adamerge.save_recipe(recipe, tmp_path)
    assert path == tmp_path / "adamerge.json"
    assert adamerge.load_recipe(tmp_path) == adamerge.load_recipe(path) == adamerge.load_recipe(str(path)) == recipe


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_recipe_comes_back(name, tmp_path):
    method = METHODS[name]
    recipe = make_recipe(method, {} if method.knob is None else {method.knob: method.gentle})
    adamerge.save_recipe(recipe, tmp_path)
    assert adamerge.load_recipe(tmp_path) == recipe


def test_parts_of_a_method_are_known_before_the_method_is_used(tmp_path):
    none().save(tmp_path / "recipe.json")
    code = "import sys, adamerge; print(adamerge.Recipe.load(sys.argv[1]) == adamerge.methods.none())"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "recipe.json")], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_a_merged_model_and_its_recipe_are_rebuilt_from_a_folder(tmp_path):
    images = torch.randn(3, 3, 64, 64)
    merged = adamerge.apply(model(), tome(2))
    with torch.no_grad():
        out = merged(images)
    torch.save(merged.state_dict(), tmp_path / "weights.pt")
    adamerge.save_recipe(merged, tmp_path)
    other = model()
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    adamerge.apply(other, tmp_path)
    assert adamerge.load_recipe(tmp_path) == tome(2)
    with torch.no_grad():
        assert torch.equal(other(images), out)


def test_a_recipe_on_the_hub_is_downloaded(tmp_path, monkeypatch):
    adamerge.save_recipe(tome(3), tmp_path)
    asked = []

    def download(repo: str, name: str, *, revision: str | None) -> str:
        asked.append((repo, name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert adamerge.load_recipe("someone/vit-tome", revision="v1") == tome(3)
    assert asked == [("someone/vit-tome", "adamerge.json", "v1")]


def test_what_is_nowhere_is_refused_with_both_places(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(BadOption, match=r"'a/b' is neither a folder or file here nor a repository .* offline"):
        adamerge.load_recipe("a/b")


def test_a_folder_without_a_recipe_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(BadOption, match=r"cannot read the recipe .*adamerge\.json.* Make it with .*\.save_recipe"):
        adamerge.load_recipe(tmp_path)
    path = adamerge.save_recipe(tome(3), tmp_path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(BadOption, match="cannot read the recipe"):
        adamerge.load_recipe(tmp_path)
    path.write_text(json.dumps({"schema": 9}))
    with pytest.raises(BadOption, match=r"\.json: a recipe's file has schema 1 and a recipe; this one has schema 9"):
        adamerge.load_recipe(tmp_path)
    path.write_text(json.dumps([1]))
    with pytest.raises(BadOption, match="this describes tuple"):
        adamerge.load_recipe(tmp_path)
    path.write_text(json.dumps({"schema": 1, "recipe": {"part": "Fixed", "r": 2}}))
    with pytest.raises(BadOption, match="this describes Fixed"):
        adamerge.load_recipe(tmp_path)


def test_whatever_wrote_the_file_every_reader_reads_it(tmp_path):
    """Files of earlier versions among them: what `Recipe.save` wrote was bare."""
    recipe = published(6.0, STATS)
    recipe.save(tmp_path / "recipe.json")
    assert (tmp_path / "recipe.json").read_bytes() == adamerge.save_recipe(recipe, tmp_path).read_bytes()
    (tmp_path / "bare.json").write_text(recipe.to_json())
    for name in ("recipe.json", "adamerge.json", "bare.json"):
        text = (tmp_path / name).read_text()
        assert Recipe.load(tmp_path / name) == adamerge.load_recipe(tmp_path / name) == recipe
        assert Recipe.from_json(text) == recipe


def test_only_a_merged_model_has_a_recipe(tmp_path):
    with pytest.raises(NotApplied, match="this model does not merge"):
        adamerge.save_recipe(model(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_a_whole_recipe_of_another_schema_is_refused(tmp_path, schema):
    path = tmp_path / "recipe.json"
    adamerge.methods.tome(2).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "schema": schema}))
    with pytest.raises(BadOption, match=f"has schema 1 and a recipe; this one has schema {schema!r}"):
        adamerge.Recipe.load(path)
