"""The rows of benchmarks/results, and how a figure with its interval is written."""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a file."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def interval(row: Row, name: str, digits: int) -> str:
    """A figure with its interval."""
    value, low, high = (float(row[name + end]) for end in ("", "_low", "_high"))
    return f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
