"""Folders of images as they are on real disks: empty classes, links in circles, hidden folders, no classes."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from adamerge.core.errors import BadImages, BadOption
from adamerge.data.folders import folder_loader
from adamerge.data.image_files import find_images, read_image
from adamerge.embedded import load


def picture(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(path)
    return str(path)


def test_files_and_labels_are_those_of_torchvision(tmp_path):
    from torchvision.datasets import ImageFolder

    for name in ("b/z.png", "b/deep/a.JPG", "b/deep-er/c.png", "a/2.jpeg", "a/10.png", "c/x.webp"):
        picture(tmp_path / name)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "elsewhere.txt").write_text("no class")
    (tmp_path / "c" / "link").symlink_to(tmp_path / "b" / "deep")
    wanted = ImageFolder(str(tmp_path))
    assert find_images(tmp_path) == (wanted.classes, wanted.samples) and len(wanted.samples) == 7


def test_an_empty_class_folder_is_skipped_with_its_name_and_the_others_keep_their_labels(tmp_path):
    files = [(picture(tmp_path / "a" / "1.png"), 0), (picture(tmp_path / "c" / "1.png"), 2)]
    (tmp_path / "b").mkdir()
    told = f"^1 class folder.s. of {tmp_path} hold no images and are skipped, .* keep their labels: b$"
    with pytest.warns(UserWarning, match=told):
        assert find_images(tmp_path) == (["a", "b", "c"], files)


def test_links_in_a_circle_give_every_image_once(tmp_path):
    files = [(picture(tmp_path / "a" / "1.png"), 0), (picture(tmp_path / "a" / "sub" / "2.png"), 0)]
    (tmp_path / "a" / "sub" / "up").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "sub" / "self").symlink_to(tmp_path / "a" / "sub")
    (tmp_path / "a" / "broken").symlink_to(tmp_path / "nowhere")
    assert find_images(tmp_path) == (["a"], files)


def test_links_back_to_the_folder_of_all_classes_give_no_image_twice(tmp_path):
    files = [(picture(tmp_path / "a" / "1.png"), 0), (picture(tmp_path / "b" / "2.png"), 1)]
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    assert find_images(tmp_path) == (["a", "b"], files)
    (tmp_path / "self").symlink_to(tmp_path)
    with pytest.warns(UserWarning, match="hold no images and are skipped, .*: self$"):
        assert find_images(tmp_path) == (["a", "b", "self"], files)


def test_hidden_folders_are_no_classes(tmp_path):
    files = [(picture(tmp_path / "a" / "1.png"), 0)]
    picture(tmp_path / ".cache" / "1.png")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert find_images(tmp_path) == (["a"], files)


def test_images_without_class_folders_serve_where_labels_are_not_used(tmp_path):
    path = picture(tmp_path / "1.png")
    assert find_images(tmp_path, labelled=False) == ([tmp_path.name], [(path, 0)])
    with pytest.raises(BadImages) as caught:
        find_images(tmp_path)
    told = f"{tmp_path} holds no images in class folders (root/class/image.jpg); image files end in .jpg, .jpeg, .png"
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_folder_without_images_is_refused(labelled, tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(BadImages, match=f"^{tmp_path} holds no images"):
        find_images(tmp_path, labelled)


def test_a_negative_number_of_workers_is_refused(tmp_path):
    with pytest.raises(BadOption, match=r"^workers is the number of processes .* must be at least 0; got -1$"):
        folder_loader(load(), os.fspath(tmp_path), workers=-1)


def test_all_kinds_of_images_are_read_as_rgb_without_warnings(tmp_path):
    """The same grey ramp, of 8 and of 16 bits, with and without transparency, as a palette and in CMYK."""
    ramp = np.linspace(0, 255, 32).astype(np.uint8)[None].repeat(8, 0)
    grey = Image.fromarray(ramp)
    grey.save(tmp_path / "grey.png")
    Image.fromarray(ramp.astype(np.uint16) * 257).save(tmp_path / "sixteen.png")
    grey.convert("RGBA").save(tmp_path / "rgba.png")
    grey.convert("P").save(tmp_path / "palette.png", transparency=bytes(4))
    grey.convert("RGB").convert("CMYK").save(tmp_path / "cmyk.tif")
    for path in sorted(tmp_path.iterdir()):
        image = read_image(str(path))
        assert image.mode == "RGB", path.name
        difference = np.abs(np.asarray(image).astype(int) - ramp[..., None]).max()
        assert difference <= 1, (path.name, difference)


def test_an_empty_name_is_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture(Path("a/1.png"))
    assert find_images("") == (["a"], [("./a/1.png", 0)])


def test_folders_with_the_names_of_the_models_classes_get_its_labels(tmp_path):
    model = load()
    names = model.pretrained_cfg["label_names"]  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]
    for name in names:
        picture(tmp_path / name / "1.png")
    found = folder_loader(model, tmp_path, workers=0).dataset
    assert found.classes == list(names) != sorted(names)  # pyright: ignore[reportAttributeAccessIssue]
    assert [names[label] for _, label in found.samples] == sorted(names)  # pyright: ignore[reportAttributeAccessIssue]
    for index, name in enumerate(sorted(names)):
        (tmp_path / name).rename(tmp_path / f"{index:02}-{name}")
    found = folder_loader(model, tmp_path, workers=0).dataset
    assert [label for _, label in found.samples] == list(range(24))  # pyright: ignore[reportAttributeAccessIssue]
