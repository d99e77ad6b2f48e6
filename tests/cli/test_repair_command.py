"""`adamerge repair` writes a repaired recipe that every command takes."""

import json

import pytest
from test_commands import call

import adamerge
from adamerge.core.recipe import Recipe

pytestmark = pytest.mark.usefixtures("unchecked")
QUICK = ["--images", "8", "--epochs", "1"]


def test_a_recipe_is_repaired_and_evaluated(tmp_path, capsys):
    plain, repaired, figures = (tmp_path / name for name in ("plain.json", "repaired.json", "figures.json"))
    adamerge.methods.tome(13).save(plain)
    words = ["--recipe", str(plain), "--out", str(repaired), "--resume", str(tmp_path / "state")]
    assert call("repair", *words, *QUICK) == 0
    told = capsys.readouterr().out
    assert "repaired: loss " in told and "use it with adamerge.apply" in told.replace("\n", " ")
    recipe = Recipe.load(repaired)
    assert (recipe.patch is None) == ("not repaired" in told)
    assert call("eval", "--recipe", str(repaired), "--images", "8", "--json", str(figures)) == 0
    assert json.loads(figures.read_text())["method"] == "recipe"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--recipe", "no.json"], "cannot read the recipe no.json"),
        (["--recipe", "no.json", "--epochs", "0"], "epochs must be a whole number >= 1; got 0"),
        (["--recipe", "no.json", "--loss", "l2"], "loss must be one of kl, features; got 'l2'"),
        (["--recipe", "no.json", "--out", "."], "cannot write .: it is a folder"),
    ],
)
def test_a_mistake_gets_a_message(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("repair", *words) == 1
    assert told in " ".join(capsys.readouterr().err.split())
