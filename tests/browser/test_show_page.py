"""The page of `adamerge show --html`, opened from disk: pointing, the slider, the keyboard, a narrow window."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from chromium import window

from adamerge.data.inputs import Input
from adamerge.embedded import load
from adamerge.experiments.showing import Shower
from adamerge.methods import evit, tome
from adamerge.plots.page import method_data, write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> tuple[Path, Any]:
    """A page with two methods, and what it was told about the first."""
    torch.manual_seed(0)
    views = Shower(load(), {"tome": tome(12), "evit": evit(0.7)}).views(Input("a <b>photo</b>", drawn=7))
    return write_page(views, tmp_path_factory.mktemp("page") / "p.html", model="embedded"), method_data(views[0])


def open_page(page: "Page", path: Path, hash: str = "") -> None:
    page.goto(path.as_uri() + hash)
    page.wait_for_selector("body[data-ready]")


def pixels(page: "Page") -> str:
    return page.evaluate("document.querySelector('canvas').toDataURL()")


def test_the_slider_moves_through_the_layers(page: "Page", shown):
    path, told = shown
    open_page(page, path)
    assert page.inner_text("h1") == "a <b>photo</b>", "a name is text, not markup"
    assert page.inner_text("figcaption .count >> nth=0") == f"{told['counts'][-1]} of 196 tokens"
    last = pixels(page)
    page.fill("#layer", "4")
    assert page.inner_text("figcaption .count >> nth=0") == f"{told['counts'][3]} of 196 tokens"
    assert page.inner_text("#layer-name") == "After layer 3"
    assert pixels(page) != last
    page.focus("#layer")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#layer-name") == "After layer 4"


def test_a_patch_that_is_pointed_at_shows_its_token_at_every_layer(page: "Page", shown):
    path, told = shown
    open_page(page, path)
    box = page.locator("canvas").first.bounding_box()
    assert box is not None
    at = {"x": box["width"] * 12.5 / 14, "y": box["height"] * 1.5 / 14}
    patch = 1 * 14 + 12  # in the background
    page.locator("canvas").first.hover(position=at)  # pyright: ignore[reportArgumentType]
    sizes = [sum(slot == slots[patch] for slot in slots) for slots in told["slots"]]
    rows = [row.split("\t") for row in page.inner_text("#history").splitlines()]
    assert [int(row[2]) for row in rows] == sizes and sizes[-1] > 1
    assert [int(row[3]) for row in rows] == [ranks[patch] for ranks in told["salience"]]
    assert "row 2, column 13 shares its token with" in page.inner_text("#patch")
    assert any("tokens became one" in row[4] for row in rows)
    page.locator("canvas").first.click(position=at)  # pyright: ignore[reportArgumentType]
    page.mouse.move(0, 0)
    assert "row 2, column 13" in page.inner_text("#patch"), "a click keeps it"
    assert f"patch={patch}" in page.url


def test_the_keyboard_does_all_of_it(page: "Page", shown):
    open_page(page, shown[0], "#layer=6")
    page.focus("canvas")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert "row 2, column 2" in page.inner_text("#patch")
    page.keyboard.press("[")
    assert page.inner_text("#layer-name") == "After layer 4"
    page.keyboard.press("Escape")
    assert page.inner_text("#patch") == ""


def test_views_methods_and_themes_can_be_switched(page: "Page", shown):
    open_page(page, shown[0])
    seen = {pixels(page)}
    for view in ("kept", "salience", "image"):
        page.check(f"input[value={view}]")
        seen.add(pixels(page))
    assert len(seen) == 4
    page.select_option("#first", label="evit")
    page.select_option("#second", label="nothing")
    assert page.locator("canvas").count() == 1
    assert page.inner_text("figcaption strong").strip() == "evit"
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.click("#theme")
    assert page.evaluate(colour) != before


def test_a_narrow_window_and_a_broken_link_do_no_harm(browser: "Browser", shown):
    with window(browser, 360, 640) as page:
        open_page(page, shown[0], "#layer=999&patch=-3&view=nothing&first=7")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.inner_text("#layer-name") == "After layer 11"
    with window(browser) as page:
        page.emulate_media(color_scheme="dark")
        open_page(page, shown[0])
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 22, 26)"


def test_the_page_is_small_and_whole(shown):
    text = shown[0].read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert [len(slots) for slots in data["methods"][0]["slots"]] == [196] * 12
