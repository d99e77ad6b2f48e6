"""Writes the results: JSON and CSV files for each part, and a Markdown report that starts with what does not hold."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from adamerge.core.files import write_atomically
from adamerge.experiments.csv_tables import write_table
from adamerge.experiments.reproduce.claims import Claim, Verdict
from adamerge.experiments.reproduce.section import Grid, Section

CLAIM_COLUMNS = ("part", "text", "paper", "ours", "decisive", "verdict")


def write_section(section: Section, out: Path) -> None:
    """Write a part as JSON and each of its tables as CSV."""
    for grid in section.grids:
        write_atomically(out / f"{grid.name}.csv", write_table(_keys(grid), grid.rows))
    write_atomically(out / f"{section.part}.json", json.dumps(section.to_json(), indent=1, ensure_ascii=False) + "\n")


def read_section(part: str, out: Path, settings: dict[str, Any]) -> Section | None:
    """Read a part that `write_section` wrote; None if there is none with these settings."""
    try:
        section = Section.from_json(json.loads((out / f"{part}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return section if section.settings == settings else None


def write_report(sections: Sequence[Section], out: Path, notes: Sequence[str] = ()) -> Path:
    """Write `report.md` and `claims.csv` for all sections; gives the path of the report."""
    claims = [{"part": s.part, **vars(claim)} for s in sections for claim in s.claims]
    write_atomically(out / "claims.csv", write_table(CLAIM_COLUMNS, claims))
    path = out / "report.md"
    write_atomically(path, markdown(sections, notes))
    return path


def markdown(sections: Sequence[Section], notes: Sequence[str] = ()) -> str:
    """The report: what does not hold, what was measured, then every part."""
    blocks = ["# The paper's tables, reproduced", opening(sections), *_setting(sections, notes)]
    for section in sections:
        blocks.append(f"## {section.title}")
        for grid in section.grids:
            blocks += [f"**{grid.title}**", _table([c.title for c in grid.columns], grid.cells())]
        blocks += [f"![{section.title}]({picture})" for picture in section.pictures]
        if section.claims:
            rows = [[claim.text, claim.paper, claim.ours, f"**{claim.verdict_text}**"] for claim in section.claims]
            blocks.append(_table(["the paper says", "paper", "here", "verdict"], rows))
        if section.notes:
            blocks.append("\n".join(f"- {note}" for note in section.notes))
    return "\n\n".join(blocks) + "\n"


def opening(sections: Sequence[Section]) -> str:
    """The first paragraphs: how many claims hold, a list of those that do not, and a list of those that are open."""
    claims = [claim for section in sections for claim in section.claims]
    by_verdict = {verdict: [claim for claim in claims if claim.verdict == verdict] for verdict in get_args(Verdict)}
    failing, unsure, outside = (by_verdict[v] for v in ("does not hold", "cannot tell", "not applicable"))
    text = (
        f"Of {len(claims)} claims of the paper, {len(by_verdict['holds'])} hold here and {len(failing)} do not hold. "
        f"For {len(unsure)} the sample is too small to tell."
    )
    if outside:
        text += f" {len(outside)} do not apply to this model."
    text += " Differences are percentage points of top-1. Intervals are 95 % paired bootstrap intervals."
    if failing:
        text += f" Claims that do not hold:\n{_listed(failing)}"
    return f"{text}\n\nClaims that this sample cannot decide:\n{_listed(unsure)}" if unsure else text


def _listed(claims: Iterable[Claim]) -> str:
    return "\n".join(
        f"{number}. {claim.text}: {claim.decisive or claim.ours}" for number, claim in enumerate(claims, 1)
    )


def _setting(sections: Sequence[Section], notes: Sequence[str]) -> list[str]:
    if not sections:
        return []
    settings = sections[0].settings
    lines = [f"- {name}: {settings[name]}" for name in ("model", "data", "calibration", "dtype") if name in settings]
    if "versions" in settings:
        lines.append("- " + ", ".join(f"{name} {version}" for name, version in settings["versions"].items()))
    return ["\n".join([*lines, *(f"- {note}" for note in notes)])]


def _keys(grid: Grid) -> list[str]:
    """The keys of the printed columns first, then those that are only in the files."""
    keys = [key for column in grid.columns for key in (column.key, column.paper) if key]
    return keys + sorted({key for row in grid.rows for key in row} - set(keys))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_line(headings), _line(["---"] * len(headings)), *(_line(row) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    # A bar inside a cell must be escaped.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
