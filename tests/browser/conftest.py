"""A real browser for the tests in this folder: Debian's Chromium, driven by playwright.

Every test here has the mark `browser`.  Without Chromium or playwright they are skipped with the reason.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import OPTIONS, find_chromium, reason_to_skip, window

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it where there is no browser."""
    reason = reason_to_skip()
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="package")
def browser() -> "Iterator[Browser]":
    """One Chromium for all tests of the folder."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(OPTIONS))
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    """A new window of 1280 x 900; open a file with `page.goto(path.as_uri())`.

    The test fails if the page asks for the network or reports an error.
    """
    with window(browser) as page:
        yield page
