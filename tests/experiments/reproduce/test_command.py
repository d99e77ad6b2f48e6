"""`adamerge reproduce` as a user types it."""

import pytest
import typer
from typer.testing import CliRunner

from adamerge.cli import reproduce as command
from adamerge.core.errors import BadImages, BadOption

app = typer.Typer()
app.command()(command.reproduce)


def call(*words: str):
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_embedded_model_needs_no_options(tmp_path):
    result = call("proposition", "layers", "--images", "2", "--calibration-images", "2", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = (tmp_path / "report.md").read_text()
    assert report.index("Layer-wise") < report.index("Proposition 1")
    assert "2 generated images" in report and "not ViT-B/16 on ImageNet" in report
    assert (tmp_path / "layers.png").exists()


@pytest.fixture
def photos(tmp_path):
    """An ImageFolder with the classes of the embedded model, one small picture each, one of them damaged."""
    from PIL import Image

    for label in range(24):
        folder = tmp_path / "photos" / f"{label:02d}"
        folder.mkdir(parents=True)
        Image.new("RGB", (40, 40), (10 * label, 0, 255 - 10 * label)).save(folder / "a.png")
    (tmp_path / "photos" / "03" / "b.png").write_bytes(b"no picture")
    return tmp_path / "photos"


def folder_call(photos, tmp_path, *words: str):
    return call(
        *("proposition", "--data", str(photos), "--out", str(tmp_path / "out")),
        *("--workers", "0", "--calibration-images", "4", *words),
    )


def test_without_a_calibration_folder_evaluation_images_are_used_and_the_report_says_so(photos, tmp_path):
    (photos / "03" / "b.png").unlink()
    result = folder_call(photos, tmp_path, "--images", "3")
    assert result.exit_code == 0, result.output
    report = (tmp_path / "out" / "report.md").read_text()
    assert "4 images of the evaluation data itself" in report
    assert "photos (3 images)" in report


def test_unreadable_files_are_named_at_the_end(photos, tmp_path):
    with pytest.raises(BadImages, match=r"1 image file\(s\) could not be read.*b\.png.*--skip-bad"):
        folder_call(photos, tmp_path, "--images", "25")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table9"], "unknown: table9"),
        (["table1", "--model", "vit_tiny_patch16_224"], "carry the labels of the embedded model"),
        (["table1", "--calibration", "somewhere"], "carry the labels of the embedded model"),
        (["table1", "--runs", "0"], "--runs must be at least 1; got 0"),
        (["table1", "--images", "0"], "--images must be at least 1; got 0"),
        (["table1", "--pretrained"], "brings its own weights"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(words, message, tmp_path):
    with pytest.raises(BadOption, match=message):
        call(*words, "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())
