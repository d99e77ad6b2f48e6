"""Files that older versions wrote are still read, and mean the same."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import adamerge
from adamerge.embedded import load, preprocess, scenes

FOLDER = Path(__file__).parent / "files" / "0.1.0"
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def images():
    return preprocess(scenes(**EXPECTED["images"]).images)


@pytest.mark.parametrize("name", EXPECTED["counts"])
def test_a_recipe_of_an_older_version_leaves_as_many_tokens_as_it_did(name, model, images):
    adamerge.apply(model, FOLDER / name)
    with torch.inference_mode():
        model(images)
    assert adamerge.trace(model).counts.tolist() == EXPECTED["counts"][name]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("recipe-*.json")), ids=lambda path: path.stem)
def test_a_recipe_of_an_older_version_is_written_back_as_it_was(path, tmp_path):
    adamerge.Recipe.load(path).save(tmp_path / "recipe.json")
    assert (tmp_path / "recipe.json").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("stats-*.json")), ids=lambda path: path.stem)
def test_statistics_of_an_older_version_are_written_back_as_they_were(path, tmp_path):
    adamerge.LayerStats.load(path).save(tmp_path / "stats.json")
    assert (tmp_path / "stats.json").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def test_a_search_of_an_older_version_goes_on_from_its_journal(model, tmp_path):
    about = EXPECTED["journal"]
    images = preprocess(scenes(**about["images"]).images)
    if hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest() != about["sha256"]:
        pytest.skip("the images are drawn with other bits on this machine, so the journal is of another search here")
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes((FOLDER / about["file"]).read_bytes())
    options = {name: about[name] for name in ("cut", "seed", "tries")}
    found = adamerge.tune(model, images, resume=journal, progress=False, **options)
    assert journal.read_bytes() == (FOLDER / about["file"]).read_bytes(), "nothing was tried again"
    assert found == adamerge.Recipe.load(FOLDER / about["recipe"])
