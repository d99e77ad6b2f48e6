"""`adamerge finetune` says what it did and how to go on, and takes folders whose names are the model's classes."""

import shutil

import pytest
from PIL import Image
from test_commands import call

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.embedded import CLASSES, scenes

pytestmark = pytest.mark.usefixtures("unchecked")
QUICK = ["--method", "tome", "--r", "13", "--batch-size", "8", "--epochs", "1", "--workers", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An image of each class in a folder with the name of the class."""
    root = tmp_path_factory.mktemp("images")
    drawn = scenes(0, 24, seed=5)
    for index, name in enumerate(CLASSES):
        (root / name).mkdir()
        picture = (255 * drawn.images[drawn.labels == index][0]).byte().permute(1, 2, 0).numpy()
        Image.fromarray(picture).save(root / name / "image.png")
    return root


def test_a_model_is_finetuned_and_its_weights_are_evaluated(folder, tmp_path, capsys):
    out = tmp_path / "tuned"
    assert call("finetune", *QUICK, "--data", str(folder), "--judge", str(folder), "--out", str(out)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert {"model.safetensors", "adamerge.json", "log.csv"} <= {path.name for path in out.iterdir()}
    assert Recipe.load(out) == adamerge.methods.tome(13)
    rows = [line.split(",") for line in (out / "log.csv").read_text().splitlines()]
    found = [float(value) for _, name, value in rows if name == "top1"]
    # The names of the folders, sorted, are not in the order of the model's classes.
    assert sorted(CLASSES) != list(CLASSES) and min(found) > 0.5
    assert f"top-1 {found[0]:.2%} before, {found[-1]:.2%} after" in told
    assert f"--weights {out / 'model.safetensors'} --recipe {out / 'adamerge.json'}" in told
    words = ["--weights", str(out / "model.safetensors"), "--recipe", str(out / "adamerge.json")]
    assert call("eval", *words, "--data", str(folder), "--workers", "0") == 0
    assert f"{found[-1]:.2%}" in capsys.readouterr().out


def test_options_reach_the_training(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr("adamerge.finetuning.trainer.finetune", lambda *_, options, **__: seen.update(vars(options)))
    words = ["--label-smoothing", "0.1", "--weight-decay", "0.2", "--calibration-images", "9", "--accumulate", "3"]
    assert call("finetune", *QUICK, *words, "--images", "8", "--out", str(tmp_path)) == 0
    assert {name: seen[name] for name in ("label_smoothing", "weight_decay", "calibration_images", "accumulate")} == {
        "label_smoothing": 0.1,
        "weight_decay": 0.2,
        "calibration_images": 9,
        "accumulate": 3,
    }


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_file_that_cannot_be_read_is_named_in_one_line(folder, tmp_path, capsys, workers):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / CLASSES[3] / "image.png").write_bytes(b"no image")
    words = [*QUICK, "--workers", workers, "--data", str(broken), "--out", str(tmp_path / "out")]
    assert call("finetune", *words) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert "image.png; remove it or replace it, then run again" in " ".join(told.split())


def test_unreadable_images_to_judge_on_are_named(folder, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / sorted(CLASSES)[0] / "image.png").write_bytes(b"no image")
    words = [*QUICK, "--data", "embedded", "--images", "8", "--judge", str(broken), "--out", str(tmp_path / "out")]
    assert call("finetune", *words) == 0
    assert "1 image file(s) could not be read and were left out" in " ".join(capsys.readouterr().err.split())
