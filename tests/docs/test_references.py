"""What the documents point at exists: files, tests, pages, versions."""

import ast
import re
from pathlib import Path

import pytest

import adamerge

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FILE = re.compile(r"`((?:src|tests|docs|benchmarks)/[\w/.-]*?)(?:::(\w+))?`")
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_every_test_named_on_a_page_exists(page):
    for path, name in FILE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
        if name:
            body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
            assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}, f"{path} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_decision_has_a_row_and_a_test():
    rows = re.findall(r"^\| (D\d+) \|.*$", (ROOT / "docs" / "paper.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [f"D{number}" for number in range(1, 17)]
    for line in (ROOT / "docs" / "paper.md").read_text(encoding="utf-8").splitlines():
        if re.match(r"\| D\d+ \|", line):
            assert "`tests/" in line, line


def test_the_changelog_and_the_citation_know_the_version():
    assert f"## [{adamerge.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {adamerge.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
