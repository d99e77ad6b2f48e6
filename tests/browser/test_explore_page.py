"""`adamerge explore` in a browser: load, upload, drag, switch, compare, bad uploads, a narrow window."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chromium import window
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """One server for all tests."""
    pytest.importorskip("gradio", reason="adamerge explore needs gradio: pip install 'adamerge[explore]'")
    from adamerge.explore.app import serving
    from adamerge.explore.models import embedded_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gradio and of what it imports
        with serving({"embedded": embedded_model()}) as (_, where):
            yield where


def opened(page: "Page", address: str) -> None:
    """Open the page and wait for its first result."""
    page.goto(address)
    page.wait_for_selector(".view .method")


def tokens(page: "Page", method: int = 0) -> int:
    """The tokens that are left with the first or the second method."""
    return int(page.locator(".view .method .tokens strong").nth(method).inner_text())


def until_changed(page: "Page", before: str) -> None:
    """Wait until the result is another one."""
    page.wait_for_function("before => document.querySelector('#result').innerText !== before", arg=before)


def choose(page: "Page", control: str, option: str) -> None:
    """Choose from a dropdown by keyboard."""
    page.locator(f"{control} input").click()
    page.locator(f"{control} input").fill(option)
    page.keyboard.press("Enter")


def test_load_drag_switch_and_compare(page: "Page", address):
    opened(page, address)
    assert page.locator(".view .card h2").all_inner_texts()[0] == "unmerged"
    assert page.locator(".view .method").count() == 2
    before, result = tokens(page, 1), page.locator("#result").inner_text()
    # Drag: the handle is moved by the keyboard, 20 steps of 1 %.
    page.locator("#cut input[type=range]").focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    page.wait_for_url("**/?cut=50")
    assert tokens(page, 1) < before and page.locator("#result").inner_text() != result
    # Switch the first method, by keyboard only.
    choose(page, "#first", "evit")
    page.wait_for_url("**/?a=evit&cut=50")
    assert page.locator(".view .method h2").first.inner_text().startswith("evit")
    # One method only.
    choose(page, "#second", "nothing")
    page.wait_for_function("document.querySelectorAll('.view .method').length === 1")


def test_the_address_restores_the_state(page: "Page", address):
    opened(page, f"{address}?a=tome&b=dymu&mode=r+or+r_max&r=5&example=3")
    headings = page.locator(".view .method h2").all_inner_texts()
    assert [heading.split()[0] for heading in headings] == ["tome", "dymu"] and "at 5" in headings[0]
    assert tokens(page) == 196 - 12 * 5
    assert page.locator("#cut input[type=range]").is_disabled()


def test_an_image_is_uploaded_and_bad_ones_are_refused(page: "Page", address, tmp_path):
    one, huge, broken = tmp_path / "one.png", tmp_path / "huge.png", tmp_path / "broken.jpg"
    Image.new("RGB", (1, 1), (255, 0, 0)).save(one)
    Image.new("1", (10_000, 10_000)).save(huge)
    broken.write_bytes(b"\xff\xd8\xff\xe0 not a photograph")
    opened(page, address)
    before = page.locator("#result").inner_text()
    status, chooser = page.locator("#status"), page.locator("input[type=file]").last
    for path, told in ((broken, "not an image that can be read"), (huge, "100.0 megapixels and may have 50")):
        chooser.set_input_files(path)
        page.wait_for_function("told => document.querySelector('#status').innerText.includes(told)", arg=told)
        assert status.locator("[role=alert]").is_visible() and page.locator(".view .method").count() == 2
        page.get_by_label("Clear").or_(page.get_by_label("Remove")).first.click()
        page.wait_for_function("document.querySelector('#status').innerText === ''")
    chooser.set_input_files(one)
    until_changed(page, before)
    assert page.locator(".view .method").count() == 2


def test_an_example_is_chosen(page: "Page", address):
    opened(page, address)
    before = page.locator("#result").inner_text()
    page.locator("#examples button").nth(2).click()
    page.wait_for_url("**/?example=2")
    until_changed(page, before)


def test_a_phone_shows_everything_without_scrolling_sideways(browser: "Browser", address):
    with window(browser, 360, 800) as page:
        opened(page, address)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        box = page.locator(".view .method").first.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360


@pytest.mark.slow
def test_ten_windows_at_once_all_get_their_result(browser: "Browser", address):
    pages = [browser.new_page() for _ in range(10)]
    for number, page in enumerate(pages):
        page.goto(f"{address}?a=tome&b=evit&cut={20 + 4 * number}", wait_until="commit")
    for page in pages:
        page.wait_for_selector(".view .method", timeout=60_000)
        assert page.locator(".view .method").count() == 2
        page.close()
