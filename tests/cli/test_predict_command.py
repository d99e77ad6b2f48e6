"""The commands `adamerge predict` and `adamerge embed` as a user types them."""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

import adamerge
from adamerge.cli.app import main
from adamerge.embedded import scenes

pytestmark = pytest.mark.usefixtures("unchecked")


def call(*words: str | Path) -> int:
    """Run a command in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["adamerge", *map(str, words)])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("images")
    for index, image in enumerate(scenes(0, 5).images):
        Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()).save(home / f"{index}.png")
    (home / "broken.png").write_bytes(b"no image")
    return home


def test_predict_writes_classes_and_names_what_it_could_not_read(folder, tmp_path, capsys):
    words = ["predict", "--data", folder, "--out", tmp_path / "out", "--method", "tome", "--r", "8", "--top", "2"]
    words += ["--workers", "0", "--shard-size", "4"]
    assert call(*words) == 1
    said = capsys.readouterr()
    assert "5 images in 2 file(s)" in said.out and "broken.png" in said.err and "--skip-bad" in said.err
    table = pq.read_table(tmp_path / "out").to_pydict()
    assert table["id"] == [f"{index}.png" for index in range(5)] and [len(row) for row in table["classes"]] == [2] * 5
    assert call(*words, "--skip-bad") == 0
    assert "(2 of an earlier run)" in capsys.readouterr().out


def test_embed_takes_a_recipe_file_and_generated_images(tmp_path, capsys):
    adamerge.methods.tome(r=8).save(tmp_path / "recipe.json")
    words = ["embed", "--images", "3", "--out", tmp_path / "out", "--workers", "0"]
    assert call(*words, "--recipe", tmp_path / "recipe.json") == 0
    table = pq.read_table(tmp_path / "out").to_pydict()
    assert len(table["features"]) == 3 and len(table["features"][0]) == 128 and table["tokens"] == [100] * 3
    assert call(*words) == 1
    assert "results of another run: it differs in recipe" in capsys.readouterr().err


def test_wrong_options_are_refused_before_anything_is_written(tmp_path, capsys):
    assert call("predict", "--out", tmp_path / "out", "--images", "0") == 1
    assert call("predict", "--out", tmp_path / "out", "--top", "0") == 1
    assert call("embed", "--out", tmp_path / "out", "--data", tmp_path / "nothing") == 1
    said = capsys.readouterr().err
    assert "--images must be at least 1" in said and "at least 1; got 0" in said and "there is no" in said
    assert not (tmp_path / "out").exists()
