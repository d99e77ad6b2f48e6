"""Pictures tell the truth: every patch is in exactly one group at every layer, and all pictures say the same."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import adamerge
from adamerge.core.errors import BadImages, BadOption
from adamerge.methods import METHODS, tome
from adamerge.plots import survivors
from adamerge.plots.animation import animation
from adamerge.plots.image_view import ImageView, layout, view_of
from adamerge.plots.layer_sheet import as_strip, layer_sheet, shown_layers
from adamerge.plots.page import write_page
from adamerge.plots.strips import compare_methods
from adamerge.plots.svg_sheet import borders, mean_colours, svg_sheet

STRONG = {
    "adamerge": {"r_max": 12},
    "dsm": {"r": 8, "delay": 1},
    "evit": {"keep": 0.6},
    "ats": {"tokens": 20},
    "none": {},
}


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    torch.manual_seed(0)
    net = VisionTransformer(img_size=96, patch_size=16, embed_dim=48, depth=4, num_heads=4, num_classes=10)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.2))
    return net.eval()


IMAGES = torch.rand(3, 3, 96, 96, generator=torch.Generator().manual_seed(1))


def view(model: VisionTransformer, name: str, image: int = 1) -> ImageView:
    """How a method merges one of the images, strongly."""
    recipe = METHODS[name](**STRONG.get(name, {"r": 6}))
    if recipe.adaptive is not None:
        recipe = recipe.with_stats(adamerge.calibrate(model, IMAGES, recipe, progress=False))
    with adamerge.applied(model, recipe), torch.no_grad():
        model(IMAGES)
        found = view_of(
            adamerge.trace(model), image, name="a", method=name, frames=IMAGES[image], shape=IMAGES.shape[1:]
        )
    return replace(found, before=["cat 80 %"], after=["dog 60 %"], cut=0.25)


@pytest.mark.parametrize("name", METHODS)
def test_every_patch_is_in_one_group_at_every_layer_and_sizes_sum_to_all_patches(model, name):
    seen = view(model, name)
    for layer, count in enumerate(seen.counts):
        slots = seen.leaving[layer]
        assert slots.shape == (36,), "one token for each patch"
        assert sorted(set(slots.tolist())) == list(range(count)), "every token has a patch, and no others are named"
        sizes = torch.bincount(slots, minlength=count)
        assert sizes.sum() == 36
        assert (seen.sizes(layer) == sizes[slots]).all()
        kept, merged = seen.kept(layer), ~seen.kept(layer)
        assert int(kept.sum() + merged.sum()) == 36
        assert int(kept.sum()) == int((sizes == 1).sum()) <= count
    if name != "none":
        assert seen.counts[-1] < 36, "the example merges"


@pytest.mark.parametrize("name", METHODS)
def test_patches_of_one_token_stay_together(model, name):
    seen = view(model, name)
    for layer in range(1, seen.depth):
        assert torch.equal(seen.entering[layer], seen.leaving[layer - 1])
        together = {}
        for before, after in zip(seen.leaving[layer - 1].tolist(), seen.leaving[layer].tolist(), strict=True):
            assert together.setdefault(before, after) == after


def cells(path: str) -> set[tuple[int, int]]:
    """The patches (x, y) that a path of whole patches covers; none twice."""
    found = re.findall(r"M(\d+) (\d+)h1v1h-1z", path)
    assert len(found) == len(set(found))
    return {(int(x), int(y)) for x, y in found}


def tiles(svg: str) -> list[list[str]]:
    """The shapes of each tile: salience, kept and merged, and groups, for one layer after the other."""
    return [re.findall(r'<path d="([^"]*)"', part) for part in svg.split("<g transform=")[1:]]


@pytest.mark.parametrize("name", ["tome", "adamerge", "ats"])
def test_the_svg_says_what_the_trace_says(model, name, tmp_path):
    seen = view(model, name)
    svg = svg_sheet(seen, tmp_path / "v.svg").read_text()
    everything = {(x, y) for x in range(6) for y in range(6)}
    for layer in range(seen.depth):
        salience, kept, groups = tiles(svg)[3 * layer : 3 * layer + 3]
        assert sum(len(cells(path)) for path in salience) == 36
        assert set().union(*map(cells, salience)) == everything
        merged, frames = cells(kept[0]), re.findall(r"M([\d.]+) ([\d.]+)h.9", kept[1])
        alone = {(int(float(x)), int(float(y))) for x, y in frames}
        assert merged | alone == everything and not merged & alone
        assert len(alone) == int(seen.kept(layer).sum())
        regions = [cells(path) for path in groups[:-2]]
        assert sorted(map(len, regions)) == sorted(n for n in torch.bincount(seen.leaving[layer]).tolist() if n > 1)
        assert set().union(*regions) == merged


def test_the_page_holds_what_the_trace_says(model, tmp_path):
    seen = view(model, "adamerge")
    text = write_page([seen, view(model, "tome")], tmp_path / "p.html", model="</script> & co").read_text()
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["model"] == "</script> & co"
    assert data["methods"][0]["slots"] == seen.leaving.tolist()
    assert data["methods"][0]["counts"] == list(seen.counts)
    assert [one["name"] for one in data["methods"]] == ["adamerge", "tome"]
    assert all(0 <= rank <= 100 for ranks in data["methods"][0]["salience"] for rank in ranks)
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text


def test_borders_run_between_different_tokens():
    assert borders(np.array([[0, 0, 1], [2, 0, 1]])) == "M2 0v1M1 1v1M2 1v1M0 1h1"
    assert borders(np.zeros((3, 3))) == ""


def test_the_colour_of_a_group_is_the_mean_of_its_patches(model):
    seen = view(model, "tome")
    slots = seen.leaving[-1]
    token = int(torch.bincount(slots).argmax())
    members = [
        IMAGES[1][:, 16 * (p // 6) :, 16 * (p % 6) :][:, :16, :16] for p in torch.where(slots == token)[0].tolist()
    ]
    mean = (255 * torch.stack(members).mean((0, 2, 3))).round().int().tolist()
    colour = mean_colours(seen, seen.depth - 1)[int(torch.where(slots == token)[0][0])]
    assert max(abs(int(colour[1 + 2 * i : 3 + 2 * i], 16) - mean[i]) for i in range(3)) <= 1


def test_kept_patches_keep_their_colours_and_merged_ones_do_not():
    image = torch.full((3, 40, 40), 0.5)
    pixels = np.asarray(survivors(image, torch.tensor([True, False, False, True]), scale=1)).astype(int)
    assert (pixels[10, 10] == 128).all() and (pixels[30, 30] == 128).all()
    assert pixels[10, 30, 0] > pixels[10, 30, 2] + 40, "orange"
    assert pixels[1, 10, 1] > pixels[1, 10, 0] + 40, "a green frame"


def test_a_sheet_and_an_animation_are_whole_files(model, tmp_path):
    seen = view(model, "tome")
    with Image.open(layer_sheet(seen, tmp_path / "v.png")) as sheet:
        sheet.load()
        assert sheet.width >= 1250
    for kind in ("webp", "gif"):
        with Image.open(animation(seen, tmp_path / f"v.{kind}")) as film:
            assert getattr(film, "n_frames", 1) == seen.depth + 1, "the input and each layer"
    with Image.open(compare_methods([seen, view(model, "dymu")], tmp_path / "m.png")) as sheet:
        sheet.load()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.png", "v.gif", "v.png", "v.webp"]


def test_deep_models_show_some_of_their_layers():
    assert shown_layers(12) == list(range(12))
    many = shown_layers(24)
    assert len(many) == 12 and many[0] == 0 and many[-1] == 23


def test_the_frames_of_a_video_stand_side_by_side():
    tall = Image.new("RGB", (4, 6), "red")
    tall.paste("blue", (0, 3, 4, 6))
    strip = as_strip(tall, 2)
    assert strip.size == (10, 3)
    assert strip.getpixel((0, 0)) == (255, 0, 0) and strip.getpixel((9, 2)) == (0, 0, 255)


@pytest.mark.parametrize(
    ("patches", "shape", "found"),
    [
        (196, (3, 224, 224), (1, (14, 14))),
        (24, (3, 64, 96), (1, (4, 6))),
        (32, (4, 3, 64, 64), (2, (4, 4))),
        (1568, (16, 3, 224, 224), (8, (14, 14))),
    ],
)
def test_patches_have_their_places(patches, shape, found):
    assert layout(patches, shape) == found


def test_wrong_views_are_refused_in_words(model, tmp_path):
    seen = view(model, "tome")
    with pytest.raises(BadImages, match="17 patches do not fill a grid"):
        layout(17, (3, 64, 64))
    with pytest.raises(BadOption, match="methods of one image"):
        write_page([seen, replace(seen, name="b")], tmp_path / "p.html", model="m")
    with pytest.raises(BadOption, match=r"written as \.webp or \.gif"):
        animation(seen, tmp_path / "v.mp4")
    with pytest.raises(BadOption, match=r"ends in \.svg"):
        svg_sheet(seen, tmp_path / "v.png")
    with pytest.raises(BadOption, match="views of one image"):
        compare_methods([], tmp_path / "v.png")
    assert list(tmp_path.iterdir()) == []


def test_a_view_of_an_unmerged_image_keeps_everything(model):
    with adamerge.applied(model, tome(0)), torch.no_grad():
        model(IMAGES)
        seen = view_of(adamerge.trace(model), 0, name="a", method="t", frames=IMAGES[0], shape=(3, 96, 96))
    assert seen.counts == (36,) * 4 and bool(seen.kept(3).all())
