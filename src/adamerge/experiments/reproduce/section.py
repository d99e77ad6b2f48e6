"""One part of the reproduction as data: tables with the paper's figures beside ours, claims, notes and pictures."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from adamerge.experiments.reproduce.claims import Claim

ABSENT = "–"


@dataclass(frozen=True)
class Column:
    """What a column is called in files and in print, how its numbers are written, and which other figure of a row is
    the paper's."""

    key: str
    heading: str
    form: str = "{}"
    paper: str = ""

    @property
    def title(self) -> str:
        """The heading, with a word on what stands in brackets."""
        return f"{self.heading} (paper)" if self.paper else self.heading

    def write(self, row: Mapping[str, Any]) -> str:
        """The cell of a row as text, the paper's figure in brackets; figures that do not exist are a dash."""
        value, theirs = row.get(self.key), row.get(self.paper)
        text = ABSENT if value is None else self.form.format(value)
        return text if theirs is None else f"{text} ({self.form.format(theirs)})"


@dataclass(frozen=True)
class Grid:
    """A table: raw numbers for files, columns that know how to print them."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[dict[str, Any], ...]

    def cells(self) -> list[list[str]]:
        """The rows as text, in the order of the columns."""
        return [[column.write(row) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class Section:
    """A finished part."""

    part: str
    title: str
    grids: tuple[Grid, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Section":
        """The section that `to_json` wrote."""
        grids = tuple(
            Grid(g["name"], g["title"], tuple(Column(**c) for c in g["columns"]), tuple(g["rows"]))
            for g in data["grids"]
        )
        claims = tuple(Claim(**c) for c in data["claims"])
        return Section(
            data["part"],
            data["title"],
            grids,
            claims,
            tuple(data["notes"]),
            tuple(data["pictures"]),
            dict(data["settings"]),
        )
