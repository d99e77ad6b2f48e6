"""Finds Chromium, and opens windows that need no network."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request, Route

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Root cannot use the sandbox, and small containers have little shared memory.
OPTIONS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
# Where pages may read from: the disk, the page itself, and servers on this machine.
LOCAL_SCHEMES = {"file", "data", "blob", "about"}
LOCAL_HOSTS = {"127.0.0.1", "localhost"}
# A shared machine is slow; nothing waits this long unless it is broken.
PATIENCE_MS = 20_000


def find_chromium() -> str | None:
    """The program in the environment variable CHROMIUM, or the first of the known names that is installed."""
    found = (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *NAMES) if name)
    return next((path for path in found if path is not None), None)


def reason_to_skip() -> str | None:
    """Why there is no browser; None if there is one."""
    if find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    if find_chromium() is None:
        return "there is no Chromium: apt-get install chromium, or set CHROMIUM to its path"
    return None


@contextmanager
def window(browser: "Browser", width: int = 1280, height: int = 900) -> "Iterator[Page]":
    """A new window.  At the end, a page that asked for the network or reported an error raises AssertionError."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.route("**/*", lambda route, request: _refuse_network(route, request, complaints))
    page.on("pageerror", lambda error: complaints.append(f"error in the page: {error}"))
    page.on("console", lambda said: complaints.append(f"console: {said.text}") if said.type == "error" else None)
    try:
        yield page
    finally:
        page.close()
    assert not complaints, "; ".join(complaints)


def _refuse_network(route: "Route", request: "Request", complaints: list[str]) -> None:
    """Let requests to this machine through; all others fail and are noted."""
    address = urlsplit(request.url)
    if address.scheme in LOCAL_SCHEMES or address.hostname in LOCAL_HOSTS:
        route.continue_()
        return
    complaints.append(f"the page asked for {request.url}")
    route.abort()
