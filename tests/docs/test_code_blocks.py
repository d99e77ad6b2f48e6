"""Every Python block of the documents runs, those of one page after another in one namespace."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from adamerge.core.parts import PARTS
from adamerge.hosts.base import LIBRARIES
from adamerge.methods import METHODS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NEEDS_NETWORK = "# needs network"


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a page that can run here, each with the number of lines before it."""
    found = [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]
    return [(before, code) for before, code in found if not code.startswith(NEEDS_NETWORK)]


PAGES = [
    page
    for page in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    if blocks(page.read_text(encoding="utf-8"))
]


@pytest.fixture
def tables() -> Iterator[None]:
    """A page may register parts, methods and hosts; nobody else sees them."""
    shared: list[Any] = [PARTS, METHODS, LIBRARIES]
    kept = [dict(table) for table in shared]
    yield
    for table, before in zip(shared, kept, strict=True):
        table.clear()
        table.update(before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_a_page_runs(page, tables, monkeypatch, tmp_path):
    """The namespace is a module, as it is in a script: classes know where they come from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(vars(module))
    for lines, code in blocks(page.read_text(encoding="utf-8")):
        exec(compile("\n" * lines + code, str(page), "exec"), vars(module))
    assert set(vars(module)) > before, "code that names nothing shows nothing"


def test_blocks_are_found_with_their_lines_and_those_that_need_a_network_are_not():
    text = "a\n```python\nx = 1\n```\n```python\n# needs network\ny = 2\n```\n```\nz\n```\n```python\nv = 3\n```\n"
    assert blocks(text) == [(2, "x = 1\n"), (12, "v = 3\n")]


@pytest.mark.parametrize("name", ["method.md", "paper.md", "add-a-method.md", "add-a-model.md"])
def test_the_pages_that_teach_have_code(name):
    assert blocks((ROOT / "docs" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_is_closed(page):
    """An open one would hide all code after it."""
    fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0 and not any(fences[1::2])
