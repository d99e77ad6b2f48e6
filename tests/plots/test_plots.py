"""Pictures say what the plan says, files are whole, and wrong input is refused in words."""

import gc
import itertools
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from adamerge.core.errors import BadImages, BadOption
from adamerge.core.plan import Plan
from adamerge.plots import (
    MethodColumn,
    frontier,
    gallery,
    heat,
    layers,
    mosaic,
    side_by_side,
    slots_entering,
    tradeoff,
)
from adamerge.plots.canvas import drawing
from adamerge.plots.cost_plot import spread_apart
from adamerge.runtime.trace import LayerTrace, Trace

PATCH = 20


def noise(rows: int, cols: int) -> Tensor:
    """An image of eight-bit colours, no two neighbours alike."""
    levels = torch.randint(40, 200, (3, rows * PATCH, cols * PATCH), generator=torch.Generator().manual_seed(0))
    return levels / 255


def patch_of(picture: Image.Image, row: int, col: int, margin: int = 0) -> np.ndarray:
    """The pixels of one patch at scale 1, without `margin` pixels on each side."""
    pixels = np.asarray(picture).astype(int)
    inside = (
        slice(row * PATCH + margin, (row + 1) * PATCH - margin),
        slice(col * PATCH + margin, (col + 1) * PATCH - margin),
    )
    return pixels[inside]


def slots(*rows: str) -> Tensor:
    """Slots from letters: 'aab' is two patches of one token beside one of another."""
    letters = "".join(rows)
    return torch.tensor([sorted(set(letters)).index(letter) for letter in letters])


def traced(images: int = 3, depth: int = 4, patches: int = 16) -> Trace:
    """A trace that merges the last two tokens of every image at each layer, and of image 0 three."""
    steps = []
    count = torch.full((images,), patches)
    for layer in range(depth):
        width = int(count.max())
        fewer = count - 1 - (torch.arange(images) == 0).long()
        at = torch.arange(width).expand(images, -1)
        slot = torch.where(at < count[:, None], torch.minimum(at, fewer[:, None] - 1), -1)
        plan = Plan(slot, fewer, int(fewer.max()), True)
        salience = torch.rand(images, width, generator=torch.Generator().manual_seed(layer))
        steps.append(LayerTrace(plan, salience, torch.ones(images, plan.width), torch.zeros(images)))
        count = fewer
    return Trace(tuple(steps), prefix=1, before_block=True)


def test_a_merged_group_has_the_mean_colour_of_its_patches_even_where_they_do_not_touch():
    image = noise(3, 3)
    picture = mosaic(image, slots("abc", "def", "gha"), scale=1)
    members = torch.stack([image[:, :PATCH, :PATCH], image[:, -PATCH:, -PATCH:]])
    mean = (members.mean((0, 2, 3)) * 255).round().int().numpy()
    for row, col in ((0, 0), (2, 2)):
        inside = patch_of(picture, row, col, margin=3)
        assert (abs(inside - mean) <= 1).all()
        assert (inside == inside[0, 0]).all()


def test_a_patch_alone_keeps_its_pixels():
    image = noise(3, 3)
    picture = mosaic(image, slots("aab", "cde", "fgh"), scale=1)
    own = (image.permute(1, 2, 0) * 255).round().int().numpy()
    for row, col in ((0, 2), (1, 1), (2, 0)):
        inside = patch_of(Image.fromarray(own.astype(np.uint8)), row, col, margin=3)
        assert (patch_of(picture, row, col, margin=3) == inside).all()


def test_lines_run_exactly_between_different_tokens():
    """Along the middle of each patch, a side is light and rimmed with dark if and only if the neighbour differs."""
    image = torch.full((3, 3 * PATCH, 3 * PATCH), 0.5)
    grid = ("aab", "acb", "ddd")
    pixels = np.asarray(mosaic(image, slots(*grid), scale=1)).astype(int)[..., 0]
    grey = 128
    for row in range(3):
        for col in range(3):
            middle, far = row * PATCH + PATCH // 2, (col + 1) * PATCH
            if col < 2:
                across = pixels[middle, far - PATCH // 2 : far + PATCH // 2]
                assert (across.max() > 200) == (grid[row][col] != grid[row][col + 1])
                assert (across.min() < grey - 20) == (grid[row][col] != grid[row][col + 1])
                assert (across == across[::-1]).all(), "the line is centred on the border"
            middle, far = col * PATCH + PATCH // 2, (row + 1) * PATCH
            if row < 2:
                across = pixels[far - PATCH // 2 : far + PATCH // 2, middle]
                assert (across.max() > 200) == (grid[row][col] != grid[row + 1][col])
                assert (across == across[::-1]).all(), "the line is centred on the border"
    assert (patch_of(Image.fromarray(pixels.astype(np.uint8)), 0, 0)[:PATCH, :15] == grey).all(), "none at the frame"


def test_one_token_for_everything_has_no_lines():
    pixels = np.asarray(mosaic(noise(2, 2), slots("aa", "aa")))
    assert (pixels == pixels[0, 0]).all()


def test_lines_can_be_told_from_black_and_from_white():
    for level in (0.0, 1.0):
        pixels = np.asarray(mosaic(torch.full((3, 32, 32), level), slots("ab", "ab"))).astype(int)
        assert np.ptp(pixels) > 60


def test_a_mosaic_is_three_times_the_image_unless_told():
    assert mosaic(noise(2, 3), slots("aab", "cdb"), grid=(2, 3)).size == (9 * PATCH, 6 * PATCH)
    assert mosaic(noise(2, 2), slots("ab", "cd"), scale=1.5).size == (3 * PATCH, 3 * PATCH)


@pytest.mark.parametrize("by", ["rank", "value"])
def test_heat_spreads_the_salience_of_a_token_over_its_patches(by):
    image = torch.full((3, 3 * PATCH, 3 * PATCH), 0.5)
    picture = heat(image, torch.tensor([0.9, 0.1, 0.5, 7.0]), slots("aab", "cca", "bbb"), scale=1, by=by)
    colour = {name: patch_of(picture, *at)[0, 0] for name, at in {"a": (0, 0), "b": (0, 2), "c": (1, 0)}.items()}
    for row, names in enumerate(("aab", "cca", "bbb")):
        for col, name in enumerate(names):
            assert (patch_of(picture, row, col) == colour[name]).all()
    brightness = {name: value.sum() for name, value in colour.items()}
    assert brightness["a"] > brightness["c"] > brightness["b"]


def test_ranks_do_not_depend_on_the_distribution():
    image, at = noise(2, 2), slots("ab", "cd")
    even = heat(image, torch.tensor([0.1, 0.2, 0.3, 0.4]), at)
    uneven = heat(image, torch.tensor([1e-30, 1e-9, 1e-8, 1.0]), at)
    assert even.tobytes() == uneven.tobytes()
    assert even.tobytes() != heat(image, torch.tensor([1e-30, 1e-9, 1e-8, 1.0]), at, by="value").tobytes()


def test_equal_salience_is_one_colour():
    image = torch.full((3, 32, 32), 0.5)
    pixels = np.asarray(heat(image, torch.ones(4), slots("ab", "cd")))
    assert (pixels == pixels[0, 0]).all()


def test_the_salience_of_a_layer_goes_with_the_slots_before_it():
    trace = traced()
    assert slots_entering(trace, 0).tolist() == [list(range(16))] * 3
    assert torch.equal(slots_entering(trace, 2), trace.slots(1))
    assert torch.equal(slots_entering(trace, -1), trace.slots(-2))


def png(path: Path) -> Image.Image:
    """A PNG, decoded to its last pixel, alone in its folder."""
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        picture.load()
        return picture.convert("RGB")


def test_a_gallery_has_a_row_for_each_image_and_five_columns(tmp_path):
    trace, images = traced(), torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    one = png(gallery(images[:1], trace, tmp_path / "one" / "g.png"))
    three = png(gallery(images, trace, tmp_path / "three" / "g.png", titles=["a cat", "$5 & $6", "long " * 30]))
    assert one.width == three.width and 1500 < three.width < 1700
    assert three.height > 2.5 * one.height
    corners = [three.getpixel(at) for at in ((0, 0), (three.width - 1, 0), (0, three.height - 1))]
    assert corners == [(255, 255, 255)] * 3


def test_a_gallery_shows_the_pictures_pixel_for_pixel(tmp_path):
    trace, images = traced(), torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    sheet = np.asarray(png(gallery(images, trace, tmp_path / "g.png")))
    last = np.asarray(mosaic(images[0], trace.slots()[0], scale=76 / 16))
    right = sheet.shape[1] - 20
    height, width = last.shape[:2]
    assert (sheet[74 : 74 + height, right - width : right] == last).all()


def test_a_gallery_of_a_one_layer_network_is_drawn(tmp_path):
    png(gallery(torch.rand(1, 3, 32, 32), traced(depth=1), tmp_path / "g.png"))


@dataclass(frozen=True)
class Row:
    method: str
    gmacs: float
    top1: float


ROWS = [Row("adamerge", 3.0, 0.78), Row("adamerge", 2.0, 0.74), Row("tome", 2.5, 0.75), Row("none", 4.6, 0.8)]


def test_a_frontier_is_drawn_from_dataclasses_or_mappings(tmp_path):
    one = png(frontier(ROWS, tmp_path / "a" / "f.png", title="ViT-S"))
    two = png(frontier([vars(row) for row in ROWS], tmp_path / "b" / "f.png", title="ViT-S"))
    assert one.size == (1200, 800)
    assert one.tobytes() == two.tobytes()
    rows = [{"method": "tome", "cut": 0.3, "top1": 0.7}, {"method": "none", "top1": 0.8}]
    assert png(frontier(rows, tmp_path / "c" / "f.png", cost="cut")).size == (1200, 800)


def test_layers_are_drawn_from_a_trace_or_a_table_or_several(tmp_path):
    trace = traced()
    one = png(layers(trace, tmp_path / "a" / "l.png"))
    two = png(layers(trace.r, tmp_path / "b" / "l.png"))
    assert one.size == (1200, 640)
    assert one.tobytes() == two.tobytes()
    png(layers({"mild": trace, "bold": 2 * trace.r}, tmp_path / "c" / "l.png", title="two"))


def test_a_user_s_style_does_not_change_a_figure(tmp_path):
    plain = png(layers(traced(), tmp_path / "a" / "l.png"))
    with matplotlib.rc_context({"font.family": "DejaVu Serif", "axes.facecolor": "black"}):
        styled = png(layers(traced(), tmp_path / "b" / "l.png"))
    assert plain.tobytes() == styled.tobytes()


def test_a_figure_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "f.png"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), drawing(path, 100, 100):
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["f.png"]


def test_a_drawn_figure_lets_go_of_its_pixels_without_the_garbage_collector(tmp_path):
    gc.collect()
    gc.disable()
    try:
        with drawing(tmp_path / "a.png", 200, 200) as figure:
            figure.figimage(np.zeros((50, 50, 3), np.uint8))
            figure.add_axes((0.1, 0.1, 0.5, 0.5)).bar([0, 1], [1, 2])
            figure.text(0.1, 0.9, "words")
            held = [weakref.ref(part) for part in (figure, figure.images[0], figure.canvas)]
        del figure
        assert [part() for part in held] == [None] * 3
    finally:
        gc.enable()


def test_nothing_imports_pyplot_and_adamerge_alone_imports_no_matplotlib(tmp_path):
    program = (
        "import sys, adamerge\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import torch, adamerge.plots as show\n"
        "show.heat(torch.zeros(3, 8, 8), torch.zeros(4), torch.arange(4))\n"
        "show.layers(torch.ones(2, 2), sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    path = tmp_path / "l.png"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.is_file()


def test_labels_keep_their_order_and_their_distance():
    heights = spread_apart([0.9, 0.91, -3.0, 0.1, 0.9], 0.06)
    order = sorted(range(5), key=lambda index: heights[index])
    assert order == [2, 3, 4, 0, 1]
    gaps = [heights[b] - heights[a] for a, b in itertools.pairwise(order)]
    assert min(gaps) > 0.06 - 1e-9
    assert min(heights) >= 0 and max(heights) <= 1
    assert spread_apart([0.2, 0.8], 0.1) == [0.2, 0.8]


def test_a_tradeoff_with_a_line_far_below_still_tells_the_others_apart(tmp_path):
    """The far line may change the bottom edge only: the others stay where they are."""
    near = {"ours": [(0.3, 0.79), (0.5, 0.78)], "tome": [(0.3, 0.78), (0.5, 0.76)]}
    low = png(tradeoff({**near, "x": [(0.3, 0.4)]}, 0.8, tmp_path / "a" / "t.png", winner="ours"))
    lower = png(tradeoff({**near, "x": [(0.3, 0.2)]}, 0.8, tmp_path / "b" / "t.png", winner="ours"))
    assert low.size == (1200, 720)
    # The strip right of x = 10 %, where the far line has left the plot in both.
    box = (300, 40, 830, 600)
    assert low.crop(box).tobytes() == lower.crop(box).tobytes()


def test_methods_stand_side_by_side_pixel_for_pixel(tmp_path):
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    trace = traced()
    one, two = (MethodColumn(trace.slots(layer)[:2], ["a", "b"]) for layer in (0, -1))
    path = side_by_side(images, {"one": one, "two": two}, tmp_path / "s.png", titles=["x", "y"])
    sheet = np.asarray(png(path))
    last = np.asarray(mosaic(images[0], two.slots[0], scale=76 / 16))
    right, (height, width) = sheet.shape[1] - 20, last.shape[:2]
    assert (sheet[74 : 74 + height, right - width : right] == last).all()


IMAGE = torch.zeros(3, 32, 32)
FOUR = torch.arange(4)


@pytest.mark.parametrize(
    ("draw", "error", "words"),
    [
        (
            lambda: mosaic(IMAGE, torch.arange(6)),
            BadOption,
            "6 slots do not fill a square grid; pass grid=(rows, columns)",
        ),
        (lambda: mosaic(IMAGE, FOUR, grid=(1, 3)), BadOption, "grid=(1, 3) has 3 patches but there are 4 slots"),
        (lambda: mosaic(IMAGE, FOUR - 1), BadOption, "slots must be whole numbers >= 0, one per patch, of one image"),
        (lambda: mosaic(IMAGE, FOUR[None]), BadOption, "Use trace.slots(layer)[i] for image i."),
        (lambda: mosaic(IMAGE, torch.arange(9)), BadImages, "32 x 32 pixels cannot be cut into 3 x 3 patches"),
        (lambda: mosaic(IMAGE[None], FOUR), BadImages, "expected one image as floats (3, height, width) in [0, 1]"),
        (lambda: mosaic(IMAGE - 2, FOUR), BadImages, "got values from -2 to -2. Undo the model's normalisation first"),
        (lambda: mosaic(IMAGE + float("nan"), FOUR), BadImages, "expected an image in [0, 1]; got values from nan"),
        (lambda: mosaic(IMAGE, FOUR, scale=0.1), BadOption, "scale=0.1 leaves patches of 2 x 2 pixels"),
        (lambda: mosaic(IMAGE, FOUR, scale=-1.0), BadOption, "scale must be a number above 0; got -1.0"),
        (lambda: heat(IMAGE, torch.ones(3), FOUR), BadOption, "for tokens 0 to 3; got shape (3,)"),
        (lambda: heat(IMAGE, FOUR / 0, FOUR), BadOption, "salience must be finite"),
        (lambda: slots_entering(traced(), 4), BadOption, "layer must be from 0 to 3 (or -4 to -1); got 4"),
        (lambda: gallery(torch.rand(4, 3, 32, 32), traced(), "g.png"), BadImages, "expected 1 to 3 images"),
        (lambda: gallery(IMAGE[None], traced(), "g.png", titles=["a", "b"]), BadOption, "each of the 1 images; got 2"),
        (
            lambda: gallery(IMAGE[None], traced(), "g.png", salience_layers=(0, 9)),
            BadOption,
            "salience_layers must be two layers from 0 to 3 (or -4 to -1); got (0, 9)",
        ),
        (lambda: gallery(IMAGE[None], traced(), "g.jpg"), BadOption, "got the path 'g.jpg'. Let its name end in .png."),
        (lambda: frontier([], "f.png"), BadOption, "at least one row of a method that merges"),
        (lambda: frontier([ROWS[-1]], "f.png"), BadOption, "at least one row of a method that merges"),
        (lambda: frontier([3], "f.png"), BadOption, "rows must be mappings or dataclasses; row 0 is a int"),
        (lambda: frontier([{"method": "tome"}], "f.png"), BadOption, "row 0 lacks gmacs, top1; it has method"),
        (lambda: frontier([Row("tome", 2.0, 74.0)], "f.png"), BadOption, "Divide percentages by 100."),
        (
            lambda: frontier([Row("tome", float("nan"), 0.7)], "f.png"),
            BadOption,
            "gmacs of row 0 must be a finite number",
        ),
        (lambda: frontier([*ROWS, Row("none", 4.6, 0.7)], "f.png"), BadOption, "(method 'none') must have one top1"),
        (lambda: tradeoff({}, 0.8, "t.png"), BadOption, "draws 1 to 7 methods with at least one point each; got 0"),
        (
            lambda: tradeoff({"a": [(0.3, 0.7)]}, 0.8, "t.png", winner="b"),
            BadOption,
            "the winner must be one of a; got 'b'",
        ),
        (lambda: side_by_side(IMAGE[None], {}, "s.png", titles=["a"]), BadImages, "and a method"),
        (
            lambda: side_by_side(IMAGE[None], {"a": MethodColumn(FOUR[None], [])}, "s.png", titles=["a"]),
            BadOption,
            "for each of the 1 images; got 1 titles",
        ),
        (lambda: layers({}, "l.png"), BadOption, "settings must be at least one"),
        (
            lambda: layers(torch.ones(3), "l.png"),
            BadOption,
            "a table of merged tokens (images, layers); got shape (3,)",
        ),
        (
            lambda: layers({"a": torch.ones(2, 3), "b": torch.ones(2, 4)}, "l.png"),
            BadOption,
            "all with the same number of layers; got {'a': 3, 'b': 4}",
        ),
    ],
)
def test_wrong_input_is_refused_in_words(draw, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        draw()
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []
