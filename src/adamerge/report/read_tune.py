"""Reads what `adamerge tune` wrote: the recipe, and the journal of the search (`--resume FILE`)."""

import json
from pathlib import Path
from typing import Any

from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.report.charts import Point, Series, bars, curves
from adamerge.report.html_table import Shown, pairs, table
from adamerge.report.run_report import RunReport


def read_recipe(path: Path) -> RunReport:
    """The report of a recipe file: its parts, and the tokens that it merges at each block on average."""
    Recipe.load(path)  # refuses a file that is no recipe
    written = json.loads(path.read_text(encoding="utf-8"))["recipe"]
    parts = {name: _words(part) for name, part in written.items() if name not in ("part", "budget")}
    budget = written["budget"]
    parts["budget"] = _words({name: value for name, value in budget.items() if name not in ("stats", "r")})
    blocks = [pairs("The parts of the recipe", parts)]
    counts = budget.get("r")
    if isinstance(counts, list):
        points = [Point(str(i), repr(float(r)), f"block {i}: {float(r):.2f}") for i, r in enumerate(counts)]
        labels = ("block", "tokens merged per image, on average")
        blocks.insert(0, bars("Tokens that the recipe merges at each block", labels, [Series("", points)]))
    stats = budget.get("stats") or {}
    known = {key: str(stats[key]) for key in ("how", "images", "passes") if key in stats}
    summary = (f"The file is a recipe: adamerge.apply(model, {str(path)!r}) uses it.",)
    return RunReport("tune", path.stem, str(path), summary, (), blocks, known)


def read_journal(path: Path) -> RunReport:
    """The report of a journal: loss and cost of every candidate, and the best of them."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    task: dict[str, Any] = json.loads(head)
    entries = [json.loads(line) for line in lines]
    rows = [
        {"number": str(index), "kind": _kind(tried), "loss": repr(result[0]), "macs": repr(result[1])}
        for index, (tried, result) in enumerate(entries)
        if isinstance(result, list) and len(result) == 2
    ]
    if not rows:
        raise BadOption(f"{path} is the journal of a search that tried nothing yet")
    points = [_point(row) for row in rows]
    labels = ("recipes tried before", "loss")
    drawn = curves("Every recipe that was tried", labels, [Series("tried", points)]) if len(points) > 1 else ""
    columns = (
        Shown("number", "number"),
        Shown("kind", "kind"),
        Shown("loss", "loss", "{:.4g}"),
        Shown("macs", "MACs per image", "{:.4g}"),
    )
    ranked = sorted(rows, key=lambda row: float(row["loss"]))
    summary = (f"The search tried {len(rows)} recipes. The journal does not say whether it came to its end.",)
    missing = ["the recipe: it is in the file of --out, which is written at the end; give that file too"]
    kept = {key: str(value) for key, value in task.items() if not isinstance(value, (dict, list))}
    blocks = [drawn, table("Recipes by loss", columns, ranked, source=path.name)]
    return RunReport("tune", path.stem, str(path), summary, missing, [b for b in blocks if b], kept)


def _point(row: dict[str, str]) -> Point:
    tip = f"number {row['number']}: {row['kind']}\nloss {float(row['loss']):.4g}\n{float(row['macs']) / 1e9:.4g} GMACs"
    return Point(row["number"], row["loss"], tip)


def _kind(tried: Any) -> str:
    """The parts that tell candidates apart, in words."""
    if not isinstance(tried, dict):
        return json.dumps(tried)[:80]
    links, salience, budget = (tried.get(name) or {} for name in ("links", "salience", "budget"))
    metric = (links.get("metric") or {}).get("part", "")
    names = [salience.get("part", ""), links.get("part", ""), metric, budget.get("part", "")]
    return ", ".join(name for name in names if name) or "candidate"


def _words(part: Any) -> str:
    """A part of a recipe as one line."""
    if isinstance(part, dict):
        inner = ", ".join(f"{name}={_words(value)}" for name, value in part.items() if name != "part")
        return f"{part.get('part', '')}({inner})" if inner else str(part.get("part", ""))
    return str(part)
