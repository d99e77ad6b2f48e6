"""The explorer without its server: uploads, what is computed, and the state in the address."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from adamerge.core.errors import BadImages, BadOption
from adamerge.embedded import preprocess, scenes
from adamerge.embedded.scene_generator import CALIBRATION_SEED
from adamerge.explore import ladders, uploads
from adamerge.explore.app import FIRST, NOTHING, Page, address
from adamerge.explore.explorer import COUNT, CUT
from adamerge.explore.models import embedded_model
from adamerge.explore.render import render
from adamerge.explore.uploads import take_upload

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def page() -> Page:
    return Page({"embedded": embedded_model()})


def without_times(text: str) -> str:
    return re.sub(r"<span>[\d.]+ ms[^<]*</span>", "", text)


def test_an_upload_is_read_and_its_file_is_deleted(tmp_path):
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (3000, 2000), (10, 200, 30)).save(path)
    image = take_upload(path)
    assert image.mode == "RGB" and image.size == (1024, 683)
    assert not path.exists()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "I;16", "CMYK"])
def test_one_pixel_of_any_mode_is_shown(mode, tmp_path, page):
    path = tmp_path / ("one.tif" if mode == "CMYK" else "one.png")
    Image.new(mode, (1, 1)).save(path)
    assert "tokens left" in page.show(take_upload(path), "embedded", "tome", NOTHING, CUT, 30, 14, 0)[0]


def test_bad_files_are_refused_before_they_are_decoded_and_are_deleted(tmp_path, monkeypatch):
    def decode(path):
        raise AssertionError("it was decoded")

    huge, text, big = tmp_path / "huge.png", tmp_path / "text.png", tmp_path / "big.png"
    Image.new("1", (10_000, 10_000)).save(huge)
    text.write_text("no image")
    big.write_bytes(b"\x89PNG" + bytes(uploads.MOST_BYTES))
    monkeypatch.setattr(uploads, "read_image", decode)
    for path, told in (
        (huge, "10000 × 10000 = 100.0 megapixels and may have 50"),
        (text, "not an image that can be read"),
        (big, "20.0 MB and may have 20"),
    ):
        with pytest.raises(BadImages, match=told):
            take_upload(path)
        assert not path.exists()


def test_a_bomb_and_a_damaged_file_are_refused(tmp_path, page):
    bomb, damaged = tmp_path / "bomb.png", tmp_path / "damaged.png"
    Image.new("1", (30_000, 30_000)).save(bomb)
    Image.effect_noise((200, 200), 50).save(damaged)
    damaged.write_bytes(damaged.read_bytes()[:500])
    assert "far more than 50 megapixels" in page.upload(str(bomb))[1]
    image, said = page.upload(str(damaged))
    assert image is None and "the image is damaged" in said and 'role="alert"' in said
    assert page.upload(str(tmp_path / "gone.png"))[0] is None


def test_tokens_of_every_layer_cover_every_patch_once_and_cost_less(page):
    explored = page.models["embedded"]
    view = explored.look(page.examples[0], ["adamerge", "tome"], CUT, 0.3)
    for method in view.methods:
        for layer in method.layers:
            assert layer.slots.shape == (14, 14)
            assert sorted(set(layer.slots.ravel().tolist())) == list(range(layer.tokens))
        counts = [layer.tokens for layer in method.layers]
        assert counts == sorted(counts, reverse=True) and counts[-1] < method.patches == 196
        assert method.answer.gmacs < view.unmerged.gmacs
    assert not explored.model.training and type(explored.model.blocks).__name__ == "Sequential"
    logits = explored.model(preprocess(scenes(0, 1).images))
    assert view.unmerged.classes[0][1] == pytest.approx(logits.softmax(1).max().item(), abs=0.02)


def test_tokens_have_the_mean_colour_of_their_patches(page):
    image = Image.fromarray(np.full((224, 224, 3), (200, 100, 50), np.uint8))
    found = render(page.models["embedded"].look(image, ["tome"], CUT, 0.4))
    assert found.count("<svg") == 1 + 12 and "This method uses no salience" in found
    assert "no salience is used here" not in found, "said once, not at every block"
    assert "same class as unmerged" in found or "another class than unmerged" in found


def test_ten_visitors_at_once_get_what_each_would_get_alone(page):
    states = [
        ("embedded", a, b, CUT, cut, 14, cut % 6) for a, b, cut in [("tome", "evit", 20), ("adamerge", "tome", 35)]
    ]
    alone = [without_times(page.show(None, *state)[0]) for state in states]
    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(lambda number: without_times(page.show(None, *states[number % 2])[0]), range(10)))
    assert found == [alone[number % 2] for number in range(10)]
    assert alone[0] != alone[1]


def test_a_method_without_r_says_so(page):
    result, said, _ = page.show(None, "embedded", "evit", NOTHING, COUNT, 30, 14, 0)
    assert result == "" and "evit has neither r nor r_max: its knob is &#x27;keep&#x27;" in said
    with pytest.raises(BadOption, match="preset has neither r nor r_max: it has no knob"):
        ladders.at_count(ladders.embedded_ladders()["preset"], "preset", 8)


def test_the_address_brings_the_state_back(page):
    state = {**FIRST, "model": "embedded", "a": "dymu", "b": NOTHING, "mode": COUNT, "r": 9, "example": 4}
    query = dict(pair.split("=") for pair in address(state)[1:].replace("+", " ").replace("%3A", ":").split("&"))
    assert page.restore(query) == list(state.values())
    first = [*{**FIRST, "model": "embedded"}.values()]
    assert page.restore({}) == first and address({**FIRST, "model": "embedded"}) == ""
    assert page.restore({"a": "<script>", "cut": "-3", "r": "9999", "example": "x", "model": "/etc"}) == first


def test_the_recipes_of_the_package_are_those_that_are_calibrated_now():
    """The file is made by benchmarks/explore_ladders.py; run it again if this fails."""
    model, images = embedded_model().model, preprocess(scenes(0, ladders.IMAGES, seed=CALIBRATION_SEED).images)
    stored = ladders.embedded_ladders()
    assert set(stored) == set(ladders.LABELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladders, "COUNTS", (8,))
        for label in ("tome", "dymu"):
            (made,) = ladders.build_ladder(model, images, label)
            kept = ladders.at_count(stored[label], label, 8)
            assert kept.knob == 8 and kept.cut == pytest.approx(made.cut, abs=1e-3)
            assert made.recipe.links == kept.recipe.links and made.recipe.combine == kept.recipe.combine
    assert all(max(rung.cut for rung in ladder) > 0.49 for ladder in stored.values())
