"""The lines of code that docs/method.md quotes for the paper's equations still stand where it says."""

import json
import re
from pathlib import Path

import pytest

import adamerge

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.+?) \| `(src/[\w/]+\.py)` \| `(.+)` \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)


@pytest.mark.parametrize("file, code", [(file, code) for _, file, code in ROWS])
def test_a_quoted_line_stands_in_the_named_file(file, code):
    lines = [line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    assert code in lines, f"{file} changed; quote the line that computes this now in docs/method.md"


@pytest.mark.parametrize("number", range(1, 7))
def test_every_equation_of_the_method_has_a_line(number):
    assert any(f"({number})" in what for what, _, _ in ROWS)


def test_no_row_of_the_table_is_overlooked():
    assert len(ROWS) == len(re.findall(r"^\|.*`src/", PAGE, re.MULTILINE)) > 15


def test_every_field_of_a_statistics_file_is_explained(tmp_path):
    adamerge.LayerStats((0.5,), (0.1,)).save(tmp_path / "stats.json")
    for name in json.loads((tmp_path / "stats.json").read_text(encoding="utf-8")):
        assert re.search(rf"^\| `{name}` \| .+ \|$", PAGE, re.MULTILINE), f"docs/method.md does not explain {name}"
