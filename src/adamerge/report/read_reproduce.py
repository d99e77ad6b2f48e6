"""Reads a folder of `adamerge reproduce`: claims, tables and merges per layer."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from adamerge.experiments.csv_tables import read_columns, read_table
from adamerge.experiments.reproduce import PARTS
from adamerge.experiments.reproduce.section import Section
from adamerge.experiments.run_record import read_record
from adamerge.report.charts import Point, Series, bars, curves
from adamerge.report.html_table import Shown, framed, table
from adamerge.report.run_report import RunReport

INTERVAL = re.compile(r" ?\[([^\[\]]*,[^\[\]]*)\]")
SIGNS = {"holds": "✓ holds", "does not hold": "✗ does not hold", "cannot tell": "? cannot tell"}
CLASSES = {"holds": "holds", "does not hold": "fails"}
CLAIM_COLUMNS = (
    Shown("text", "claim"),
    Shown("paper", "paper"),
    Shown("here", "here"),
    Shown("interval", "95 % interval"),
    Shown("verdict", "verdict"),
)
LAYERS = ("layers-iterative", "layers-sequential")
# Tables of table1 that are drawn as curves: the methods of the paper.
DRAWN = ("AdaMerge", "ToMe", "PiToMe", "DSM", "AdaMerge at ToMe's cost")


def read_reproduce(folder: Path) -> RunReport:
    """The report of a folder; parts that were asked for and are not there are named."""
    record = read_record(folder) or {}
    sections = {part: found for part in PARTS if (found := _section(folder / f"{part}.json")) is not None}
    settings: dict[str, Any] = next((s.settings for s in sections.values()), record.get("settings", {}))
    claims = _claims(folder)
    wanted = record.get("parts", [])
    missing = [
        f"{part}: not finished; run the same command again, results so far are kept"
        for part in wanted
        if part not in sections
    ]
    blocks = [_claims_table(claims)] if claims else []
    blocks += [_plot(folder), *(_layers(folder, name) for name in LAYERS)]
    blocks += [block for name in _tables(folder) for block in [_grid(folder, name, sections)]]
    counts = {verdict: sum(claim["verdict"] == verdict for claim in claims) for verdict in SIGNS}
    said = (
        f"Of {len(claims)} claims of the paper, {counts['holds']} hold here, {counts['does not hold']} do not hold, "
        f"and {counts['cannot tell']} cannot be decided on these images."
    )
    notes = tuple(str(note) for note in record.get("notes", ()))
    others = [part for part in PARTS if part not in sections and part not in wanted]
    if others and sections:
        notes += (f"Parts that nobody asked for: {', '.join(others)}.",)
    title = str(settings.get("model", folder.name))
    provenance = {key: json.dumps(v) if isinstance(v, dict) else str(v) for key, v in settings.items()}
    summary = ((said,) if claims else ()) + notes
    return RunReport("reproduce", title, str(folder), summary, missing, [b for b in blocks if b], provenance)


def _section(path: Path) -> Section | None:
    try:
        return Section.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _rows(path: Path) -> list[dict[str, str]]:
    return read_table(path.read_text(encoding="utf-8")) if path.is_file() else []


def _tables(folder: Path) -> list[str]:
    """The names of the CSV files with tables, those of known parts first."""
    names = [path.stem for path in sorted(folder.glob("*.csv")) if path.stem != "claims"]
    order = list(PARTS)
    return sorted(names, key=lambda name: order.index(part) if (part := name.split("-")[0]) in order else len(order))


def _claims(folder: Path) -> list[dict[str, str]]:
    return _rows(folder / "claims.csv")


def _claims_table(claims: Sequence[Mapping[str, str]]) -> str:
    """Claim, paper, here, interval, verdict."""
    body = "".join(f"<tr>{_claim(claim)}</tr>" for claim in claims)
    return framed("Claims of the paper", CLAIM_COLUMNS, body, source="claims.csv")


def _claim(claim: Mapping[str, str]) -> str:
    here, intervals = split_intervals(claim["ours"])
    verdict = claim["verdict"]
    kind = CLASSES.get(verdict, "")
    decisive = f'<br><span class="note">decides: {escape(claim["decisive"])}</span>' if claim.get("decisive") else ""
    texts = (claim["text"], claim["paper"], here, intervals)
    cells = "".join(f'<td data-v="{escape(text)}">{escape(text)}</td>' for text in texts)
    return f'{cells}<td data-v="{escape(verdict)}" class="{kind}">{escape(SIGNS.get(verdict, verdict))}{decisive}</td>'


def split_intervals(text: str) -> tuple[str, str]:
    """The figures of a claim and their intervals: "+1.0 [-2.0, +4.0]" gives "+1.0" and "[-2.0, +4.0]"."""
    return INTERVAL.sub("", text), "; ".join(f"[{ends}]" for ends in INTERVAL.findall(text))


def _grid(folder: Path, name: str, sections: Mapping[str, Section]) -> str:
    """A table with the headings of its part; without the part's file, with the names in the CSV."""
    path = folder / f"{name}.csv"
    known = next((grid for s in sections.values() for grid in s.grids if grid.name == name), None)
    if known is None:
        shown = [Shown(key, key.replace("_", " "), "{:.4g}") for key in read_columns(path.read_text(encoding="utf-8"))]
        return table(name, shown, _rows(path), source=path.name)
    shown = []
    for column in known.columns:
        shown.append(Shown(column.key, column.heading or column.key, column.form if column.form != "{}" else ""))
        if column.paper:
            shown.append(Shown(column.paper, f"{column.heading}, paper", column.form))
    return table(known.title, shown, _rows(path), source=path.name)


def _layers(folder: Path, name: str) -> str:
    """E[r_l] as bars for each r_max."""
    series = []
    for row in _rows(folder / f"{name}.csv"):
        if row["source"] == "ours":
            values = [
                (key.removeprefix("block_"), text) for key, text in row.items() if key.startswith("block_") and text
            ]
            label = f"r_max={row['r_max']}"
            points = [Point(i, text, f"{label}, block {i}: {float(text):.2f}") for i, text in values]
            series.append(Series(label, points))
    title = f"Tokens merged at each block, E[r_l], {name.removeprefix('layers-')} calibration"
    return bars(title, ("block", "tokens merged per image"), series) if series else ""


def _plot(folder: Path) -> str:
    """Accuracy against cost from table 1."""
    rows = [row for row in _rows(folder / "table1.csv") if row["method"] in DRAWN]
    named = {name: [row for row in rows if row["method"] == name] for name in DRAWN}
    series = [Series(name, [_point(row) for row in found]) for name, found in named.items() if found]
    labels = ("compute saved (paper's count), %", "change of top-1, points")
    return curves("Table 1: accuracy against cost", labels, series, level=0) if series else ""


def _point(row: Mapping[str, str]) -> Point:
    top1, delta, cut = (float(row[key]) for key in ("top1", "delta", "cut"))
    tip = f"{row['method']}, {row['setting']}\ntop-1 {top1:.2f} % ({delta:+.2f} points)\ncut {cut:.1f} %"
    return Point(row["cut"], row["delta"], tip)
