"""`adamerge tune` writes one file that every command takes, and says what is wrong before it works for long."""

import json
from pathlib import Path

import pytest
from test_commands import call

from adamerge.core.recipe import Recipe

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tuned") / "recipe.json"
    assert call("tune", "--cut", "0.3", "--images", "8", "--tries", "1", "--out", str(path)) == 0
    return path


def test_tune_writes_a_recipe_with_its_statistics(recipe):
    stats = Recipe.load(recipe).stats
    assert stats is not None and stats.images == 6 and len(stats.threshold) == 12


def test_eval_takes_a_recipe_file(recipe, tmp_path):
    out = tmp_path / "out.json"
    assert call("eval", "--recipe", str(recipe), "--images", "8", "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["method"] == "recipe" and report["gmacs_true"] < 0.8 * report["gmacs_true_unmerged"]


def test_flops_prices_a_recipe_file_for_an_average_image(recipe, capsys):
    assert call("flops", f"--recipe={recipe}") == 0
    told = capsys.readouterr().out
    assert "/ -30." in told or "/ -29." in told


def test_calibrate_takes_a_recipe_file(recipe, tmp_path):
    assert call("calibrate", "--recipe", str(recipe), "--images", "4", "--out", str(tmp_path / "stats.json")) == 0
    assert len(json.loads((tmp_path / "stats.json").read_text())["threshold"]) == 12


def test_compare_takes_recipe_files(recipe, tmp_path):
    words = ["--recipe", str(recipe), "--images", "4", "--calibration-images", "4", "--out", str(tmp_path / "out")]
    assert call("compare", *words) == 0
    lines = (tmp_path / "out" / "results.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == ["none", "recipe"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tune", "--cut", "0.3", "--gmacs", "1"], "give one of cut, gmacs and latency_ratio, to say what it may cost"),
        (["tune", "--cut", "1.5"], "cut is the share of the cost to save and must be between 0 and 1; got 1.5"),
        (["tune", "--gmacs", "-1"], "gmacs is a cost and must be above 0; got -1.0"),
        (["tune", "--images", "4"], "tuning needs at least 8 images, a few hundred are good; got 4"),
        (["tune", "--images", "8", "--tries", "0"], "tries must be a whole number >= 1; got 0"),
        (["tune", "--images", "8", "--cost", "half"], "cost must be one of true, paper; got 'half'"),
        (["tune", "--images", "8", "--loss", "l2"], "loss must be one of kl, features; got 'l2'"),
        (["tune", "--images", "8", "--gmacs", "9"], "9 GMACs is no saving: the unmerged model costs"),
        (["tune", "--data", "nowhere"], "nowhere is not a folder"),
        (["eval", "--recipe", "no.json"], "cannot read the recipe no.json"),
        (["eval", "--recipe", "no.json", "--r", "3"], "a recipe file brings all its options: give --recipe FILE"),
        (["eval", "--method", "recipe"], "a recipe file brings all its options: give --recipe FILE and no others"),
        (["compare", "--recipe", "no.json", "--out", "x"], "cannot read the recipe no.json"),
    ],
)
def test_a_mistake_gets_a_message_and_no_traceback(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 1
    error = capsys.readouterr().err
    assert told in " ".join(error.split()) and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
