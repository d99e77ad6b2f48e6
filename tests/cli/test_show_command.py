"""`adamerge show` draws images with a model, continues where it stopped, and names what it cannot read."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_commands import call

from adamerge.embedded import scenes
from adamerge.methods import tome

pytestmark = pytest.mark.usefixtures("unchecked")
FAST = ["--no-svg", "--animation", "none"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images, and two files that are none."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for index, image in enumerate(scenes(0, 2, size=96).images):
        pixels = (255 * image).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"photo{index}.jpg")
    whole = (folder / "photo0.jpg").read_bytes()
    (folder / "cut-off.jpg").write_bytes(whole[:200])
    (folder / "text.png").write_text("no image")
    return folder


def test_one_image_gives_all_kinds_of_files(tmp_path, capsys):
    out = tmp_path / "out"
    assert call("show", "embedded:1", "--method", "tome", "--r", "12", "--html", "--out", str(out)) == 0
    names = {"embedded-0-tome.png", "embedded-0-tome.svg", "embedded-0-tome.webp", "embedded-0.html", "show.json"}
    assert {file.name for file in out.iterdir()} == names
    printed = capsys.readouterr().out
    assert f"wrote {out / 'embedded-0.html'}" in printed and "drew 1 of 1 images" in printed
    assert "clock" in (out / "embedded-0.html").read_text(), "the classes have names"


def test_methods_are_drawn_side_by_side_at_equal_cost(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--method", "tome,evit,none", "--cut", "0.4", "--html", *FAST]
    assert call("show", "embedded:1", *words, "--calibration-images", "4", "--out", str(out)) == 0
    assert {file.name for file in out.iterdir()} == {
        "embedded-0-tome.png",
        "embedded-0-evit.png",
        "embedded-0-none.png",
        "embedded-0-methods.png",
        "embedded-0.html",
        "show.json",
    }
    page = (out / "embedded-0.html").read_text()
    methods = json.loads(page.split('type="application/json">')[1].split("</script>")[0])["methods"]
    assert [round(one["cut"], 1) for one in methods] == [0.4, 0.4, 0.0]
    assert methods[2]["after"] == methods[2]["before"]


def test_files_that_are_no_images_are_named_and_the_others_drawn(photos, tmp_path, capsys):
    recipe, out = tmp_path / "mild.json", tmp_path / "out"
    tome(8).save(recipe)
    words = ["show", str(photos), str(photos / "photo1.jpg"), "--recipe", str(recipe), *FAST, "--out", str(out)]
    assert call(*words) == 1
    told = capsys.readouterr()
    assert "2 of 5 could not be read" in told.err and "cut-off.jpg" in told.err and "text.png" in told.err
    drawn = {"photo0-mild.png", "photo1-mild.png", "photo1-2-mild.png", "show.json"}
    assert {file.name for file in out.iterdir()} == drawn
    assert call(*words, "--skip-bad") == 0
    assert "drew 0 of 5 images" in capsys.readouterr().out


def test_a_run_that_was_stopped_continues_and_other_settings_draw_anew(photos, tmp_path, capsys, monkeypatch):
    """Pictures that are there are left alone: their files do not change."""
    out, pair = tmp_path / "out", [str(photos / "photo0.jpg"), str(photos / "photo1.jpg")]
    words = [*pair, "--method", "tome", "--r", "8", *FAST, "--out", str(out)]
    with monkeypatch.context() as patch:
        real = Image.open

        def interrupted(file, *more):
            if "photo1" in str(file):
                raise KeyboardInterrupt
            return real(file, *more)

        patch.setattr(Image, "open", interrupted)
        assert call("show", *words) == 130
    first = out / "photo0-tome.png"
    before = first.stat().st_mtime_ns
    assert {file.name for file in out.iterdir()} == {"photo0-tome.png", "show.json"}
    assert call("show", *words) == 0
    assert "drew 1 of 2 images" in capsys.readouterr().out and first.stat().st_mtime_ns == before
    (out / "photo1-tome.png").unlink()
    assert call("show", *words) == 0
    assert (out / "photo1-tome.png").is_file() and first.stat().st_mtime_ns == before
    Image.new("RGB", (50, 50), "red").save(pair[0])
    assert call("show", *words) == 0
    assert first.stat().st_mtime_ns != before, "the image changed"
    before = first.stat().st_mtime_ns
    assert call("show", *[word.replace("8", "9") if word == "8" else word for word in words]) == 0
    assert first.stat().st_mtime_ns != before, "the recipe changed"


def test_your_own_images_calibrate_a_model_without_other_images(photos, tmp_path, capsys):
    """A model that is not the embedded one, and no --calibration."""
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    given = ["--model", "vit_tiny_patch16_224", "--weights", str(tmp_path / "w.safetensors"), "--num-classes", "5"]
    words = [str(photos / "photo0.jpg"), *given, *FAST, "--out", str(tmp_path / "out")]
    assert call("show", *words) == 0
    told = capsys.readouterr()
    assert "note: calibrating on the 1 image(s) that are shown" in told.err
    assert (tmp_path / "out" / "photo0-preset.png").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.jpg"], "there is no file or folder 'nowhere.jpg'; give image files (.jpg"),
        (["--r", "8", "--method", "tome"], "there are no images to draw"),
        (["embedded:0"], "that many generated images, at least 1; got 'embedded:0'"),
        (["embedded", "--animation", "mp4"], "must be one of webp, gif, none; got 'mp4'"),
        (["embedded", "--method", "tome,evit", "--r", "8"], "options of a method need exactly one --method"),
        (["embedded", "--method", "nothing"], "there is no variant 'nothing'"),
        (["embedded", "--method", "tome", "--speed", "8"], "tome does not know '--speed'"),
        (["embedded", "--cut", "1.5", "--method", "tome"], "cut"),
    ],
)
def test_wrong_words_are_refused(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("show", *words, "--out", "out") == 1
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
