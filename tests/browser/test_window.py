"""The browser of these tests opens files, and notices pages that need a network or report an error."""

from pathlib import Path
from typing import TYPE_CHECKING

import chromium
import pytest
from chromium import reason_to_skip, window

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGE = """<!doctype html><html><head><meta charset="utf-8"><title>a page</title></head>
<body><button onclick="this.textContent = 'pressed'">press</button>{more}</body></html>"""


def write(folder: Path, more: str = "") -> str:
    file = folder / "page.html"
    file.write_text(PAGE.format(more=more), encoding="utf-8")
    return file.as_uri()


def test_a_file_is_opened_and_its_script_runs(page: "Page", tmp_path):
    page.goto(write(tmp_path))
    page.click("button")
    assert page.title() == "a page"
    assert page.inner_text("button") == "pressed"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('<img src="https://example.org/a.png" alt="">', "the page asked for https://example.org/a.png"),
        ("<script>missing()</script>", "missing is not defined"),
        ("<script>console.error('it failed')</script>", "console: it failed"),
    ],
)
def test_a_page_that_needs_a_network_or_fails_is_noticed(browser: "Browser", tmp_path, more, told):
    with pytest.raises(AssertionError, match=told), window(browser) as page:
        page.goto(write(tmp_path, more))


def test_a_machine_without_chromium_has_a_reason_to_skip(monkeypatch):
    assert reason_to_skip() is None
    monkeypatch.setattr(chromium, "NAMES", ())
    monkeypatch.delenv("CHROMIUM", raising=False)
    assert str(reason_to_skip()).startswith("there is no Chromium: apt-get install chromium")
