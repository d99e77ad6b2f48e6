"""docs/design.md names what exists, and its two walks name what runs, in the order in which it runs."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from scripts import ROOT, load_script

import adamerge
from adamerge.cli.app import main
from adamerge.embedded import load, preprocess, scenes

PACKAGE = ROOT / "src" / "adamerge"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
NAME = re.compile(r"`([\w/]+\.py):([\w.]+)`")
STEP = re.compile(r"^\d+\. `([\w/]+\.py):([\w.]+)`", re.MULTILINE)

Call = tuple[str, str]


def definitions(file: Path) -> dict[str, int]:
    """Everything that a file defines at its top or in a class, with the line where it begins."""
    found: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[prefix + node.name] = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update({prefix + name.id: node.lineno for name in targets if isinstance(name, ast.Name)})

    visit(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return found


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", DESIGN, re.DOTALL | re.MULTILINE)
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_function_named_on_a_page_exists(page):
    for file, name in NAME.findall(page.read_text(encoding="utf-8")):
        assert (PACKAGE / file).exists(), f"{page.name} names {file}"
        assert name in definitions(PACKAGE / file), f"{page.name} names {file}:{name}"


def calls_of(action: Callable[[], Any], named: list[Call]) -> list[Call]:
    """Those of the `named` functions that `action` calls, in the order of their first calls."""
    lines = {(str(PACKAGE / file), definitions(PACKAGE / file)[name]): (file, name) for file, name in named}
    called: dict[Call, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        call = lines.get((frame.f_code.co_filename, frame.f_code.co_firstlineno))
        if event == "call" and call is not None:
            called.setdefault(call)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return list(called)


def test_an_image_takes_the_steps_of_its_walk():
    model, images = load(), preprocess(scenes(0, 3).images)
    stats = adamerge.calibrate(model, images, r_max=14, progress=False)
    recipe = adamerge.methods.adamerge(r_max=14, stats=stats)

    def walk() -> None:
        adamerge.apply(model, recipe, "reference")
        with torch.no_grad():
            model(images)
        assert adamerge.trace(model).merged.min() > 0
        adamerge.remove(model)

    steps = STEP.findall(section("Walk 1: an image"))
    assert len(steps) > 20 and calls_of(walk, steps) == steps


def test_a_tuning_takes_the_steps_of_its_walk(tmp_path, monkeypatch):
    out = tmp_path / "recipe.json"
    words = ["tune", "--cut", "0.3", "--images", "8", "--tries", "12", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["adamerge", *words])

    def walk() -> None:
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code

    steps = STEP.findall(section("Walk 2: a tuning"))
    assert len(steps) > 15 and calls_of(walk, steps) == steps
    assert adamerge.Recipe.load(out).ragged


def test_every_step_of_a_walk_is_found():
    """A step that the pattern missed would not be checked."""
    for title in ("Walk 1: an image", "Walk 2: a tuning"):
        numbers = re.findall(r"^(\d+)\. ", section(title), re.MULTILINE)
        assert numbers == [str(1 + at) for at in range(len(STEP.findall(section(title))))]


def test_every_room_has_a_row():
    imports = load_script("import_graph")
    rooms = {imports.room(module) for module in imports.modules()} - {"", "__main__"}
    rows = section("Rooms")
    for room in rooms:
        assert f"`src/adamerge/{room}/`" in rows or f"`src/adamerge/{room}.py`" in rows, f"{room} has no row"


@pytest.mark.parametrize("thing", ["paper", "host", "kernel", "count of costs", "figure", "command", "data", "test"])
def test_the_page_says_where_a_new_thing_goes(thing):
    rows = re.findall(rf"^\| {thing}[^|]*\| (.*)$", section("Where does a new … go?"), re.MULTILINE)
    assert rows and all(re.search(r"`(?:src|tests)/", row) for row in rows), rows


def test_no_term_of_the_glossary_is_explained_twice():
    terms = re.findall(r"^\| ([^|]+) \| ", section("Glossary"), re.MULTILINE)
    assert len(terms) == len(set(terms)) > 30
