"""Reads and writes CSV tables; columns that version 0.1.0 named otherwise are read under their current names."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Name in files of 0.1.0 -> name now.
RENAMED = {"sense": "cost"}


def write_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, header: bool = True) -> str:
    """The rows as CSV text with these columns; None and missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_table(text: str) -> list[dict[str, str]]:
    """The rows of CSV text, as a dictionary of strings each."""
    return list(csv.DictReader(io.StringIO(rename_columns(text))))


def read_columns(text: str) -> list[str]:
    """The column names of CSV text."""
    return [RENAMED.get(name, name) for name in next(csv.reader(io.StringIO(text)), [])]


def rename_columns(text: str) -> str:
    """CSV text whose header has the current names; the rows are left as they are."""
    header, newline, rows = text.partition("\n")
    return ",".join(RENAMED.get(name, name) for name in header.split(",")) + newline + rows
