"""The written result: JSON and CSV for each part, and one Markdown report that says first what fails."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from adamerge.core.files import write_atomically
from adamerge.experiments.csv_tables import write_table
from adamerge.experiments.reproduce.claims import Claim
from adamerge.experiments.reproduce.section import Grid, Section

CLAIM_COLUMNS = ("part", "text", "paper", "ours", "decisive", "verdict")


def write_section(section: Section, out: Path) -> None:
    """One part as JSON, and each of its tables as CSV."""
    for grid in section.grids:
        write_atomically(out / f"{grid.name}.csv", write_table(_keys(grid), grid.rows))
    write_atomically(out / f"{section.part}.json", json.dumps(section.to_json(), indent=1, ensure_ascii=False) + "\n")


def read_section(part: str, out: Path, settings: dict[str, Any]) -> Section | None:
    """The part as it was written, if it was measured with these settings."""
    try:
        section = Section.from_json(json.loads((out / f"{part}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return section if section.settings == settings else None


def write_report(sections: Sequence[Section], out: Path, bench_notes: Sequence[str] = ()) -> Path:
    """`report.md` and `claims.csv` for all sections."""
    claims = [{"part": s.part, **vars(claim)} for s in sections for claim in s.claims]
    write_atomically(out / "claims.csv", write_table(CLAIM_COLUMNS, claims))
    path = out / "report.md"
    write_atomically(path, markdown(sections, bench_notes))
    return path


def markdown(sections: Sequence[Section], bench_notes: Sequence[str] = ()) -> str:
    """The report: what fails, what it was measured on, then every part."""
    blocks = ["# The paper's tables, reproduced", opening(sections), *_setting(sections, bench_notes)]
    for section in sections:
        blocks.append(f"## {section.title}")
        for grid in section.grids:
            blocks += [f"**{grid.title}**", _table([c.title for c in grid.columns], grid.cells())]
        blocks += [f"![{section.title}]({picture})" for picture in section.pictures]
        if section.claims:
            rows = [[claim.text, claim.paper, claim.ours, f"**{claim.told}**"] for claim in section.claims]
            blocks.append(_table(["the paper says", "paper", "here", "verdict"], rows))
        if section.notes:
            blocks.append("\n".join(f"- {note}" for note in section.notes))
    return "\n\n".join(blocks) + "\n"


def opening(sections: Sequence[Section]) -> str:
    """The first paragraphs: how many claims come out, every one that does not, with its figures, and what is open."""
    claims = [claim for section in sections for claim in section.claims]
    count = {
        v: sum(c.verdict == v for c in claims) for v in ("holds", "does not hold", "cannot tell", "not applicable")
    }
    told = (
        f"Of {len(claims)} claims of the paper checked here, {count['holds']} hold, {count['does not hold']} do not "
        f"hold, {count['cannot tell']} cannot be told at this sample size"
    )
    if count["not applicable"]:
        told += f" and {count['not applicable']} do not apply to this model"
    told += "."
    failing = [claim for claim in claims if claim.verdict == "does not hold"]
    if failing:
        told += f" Not holding here: {_listed(failing)}."
    told += " Differences are in points of top-1 with paired bootstrap intervals, each 95 % by itself."
    unsure = [claim for claim in claims if claim.verdict == "cannot tell"]
    return f"{told}\n\nOpen: {_listed(unsure)}." if unsure else told


def _listed(claims: Iterable[Claim]) -> str:
    return "; ".join(
        f"({number}) {claim.text}: {claim.decisive or claim.ours}" for number, claim in enumerate(claims, 1)
    )


def _setting(sections: Sequence[Section], bench_notes: Sequence[str]) -> list[str]:
    if not sections:
        return []
    settings = sections[0].settings
    lines = [f"- {name}: {settings[name]}" for name in ("model", "data", "calibration", "dtype") if name in settings]
    if "versions" in settings:
        lines.append("- " + ", ".join(f"{name} {version}" for name, version in settings["versions"].items()))
    return ["\n".join([*lines, *(f"- {note}" for note in bench_notes)])]


def _keys(grid: Grid) -> list[str]:
    """The printed columns first, then figures that only the files have."""
    keys = [key for column in grid.columns for key in (column.key, column.paper) if key]
    return keys + sorted({key for row in grid.rows for key in row} - set(keys))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_line(headings), _line(["---"] * len(headings)), *(_line(row) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    # A bar inside a cell would end it.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
