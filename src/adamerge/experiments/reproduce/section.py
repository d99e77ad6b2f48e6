"""A part of the reproduction as data: tables with our figures and the paper's, claims, notes and pictures."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from adamerge.experiments.reproduce.claims import Claim

ABSENT = "–"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: its key in a row, and its name in files.
        heading: its name in the report.
        form: the format of its numbers.
        paper: the key of the paper's figure in a row; empty if the paper has none.
    """

    key: str
    heading: str
    form: str = "{}"
    paper: str = ""

    @property
    def title(self) -> str:
        """The heading in the report."""
        return f"{self.heading} (paper)" if self.paper else self.heading

    def write(self, row: Mapping[str, Any]) -> str:
        """The cell of a row as text, with the paper's figure in brackets; a missing figure is a dash."""
        value, theirs = row.get(self.key), row.get(self.paper)
        text = ABSENT if value is None else self.form.format(value)
        return text if theirs is None else f"{text} ({self.form.format(theirs)})"


@dataclass(frozen=True)
class Grid:
    """A table: rows of numbers, and columns that format them."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[dict[str, Any], ...]

    def cells(self) -> list[list[str]]:
        """The cells of all rows as text, in the order of the columns."""
        return [[column.write(row) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class Section:
    """A finished part of the reproduction; `settings` are those it was measured with."""

    part: str
    title: str
    grids: tuple[Grid, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    pictures: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The section as JSON data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Section":
        """The section from the data of `to_json`."""
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
