"""Reads and writes the CSV files of benchmarks/results, and formats a figure with its interval."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adamerge.core.files import write_atomically
from adamerge.experiments.csv_tables import read_columns, read_table, write_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a CSV file in benchmarks/results; `name` is without the suffix."""
    return read_table((RESULTS / f"{name}.csv").read_text(encoding="utf-8"))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a CSV file, atomically; the first row gives the columns."""
    write_atomically(path, write_table(list(rows[0]), rows))


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a CSV file; a new file gets a header first.  The first row gives the columns."""
    columns, new = list(rows[0]), not path.exists()
    if not new and (found := read_columns(path.read_text(encoding="utf-8"))) != columns:
        raise SystemExit(f"{path} has the columns {found}, the new rows have {columns}: give another file")
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write(write_table(columns, rows, header=new))


def interval(row: Row, name: str, digits: int) -> str:
    """A figure with its interval as text, from the columns `name`, `name_low` and `name_high`."""
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    return f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
