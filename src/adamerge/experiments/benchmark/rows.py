"""The rows of a benchmark, and the CSV files that they are appended to."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from adamerge.core.errors import BadOption
from adamerge.core.files import write_atomically
from adamerge.experiments.csv_tables import read_columns, read_table, rename_columns, write_table


@dataclass(frozen=True, kw_only=True)
class BenchmarkRow:
    """One contender at one batch size.

    Times are milliseconds per batch.  `speedup` is relative to `best_unmerged`, the fastest unmerged contender of the
    group: the rows with the same date, batch size and dtype.  `ideal_*` is unmerged cost / merged cost, `reached_*` is
    (speedup - 1) / (ideal - 1).  `cost` is the count that `target` is given in.  `stages` holds milliseconds by stage,
    `deciding` the share of decisions and merges in the forward pass.  `peak_mb` is the peak of allocated device memory
    in 10^6 bytes, `own_mb` the part of it that the call allocated.
    """

    model: str
    weights: str
    images: str
    image_size: int
    batch: int
    dtype: str
    method: str
    way: str
    options: str = ""
    knob: float | None = None
    target: str = ""
    cost: str = ""
    images_per_second: float | None = None
    ms_p20: float | None = None
    ms_p50: float | None = None
    ms_p80: float | None = None
    speedup: float | None = None
    best_unmerged: str = ""
    cut_true: float | None = None
    cut_paper: float | None = None
    ideal_true: float | None = None
    ideal_paper: float | None = None
    reached_true: float | None = None
    reached_paper: float | None = None
    stages: str = ""
    deciding: float | None = None
    peak_mb: float | None = None
    own_mb: float | None = None
    syncs: int | None = None
    rounds: int = 0
    inner: int = 0
    device: str
    versions: str
    date: str
    error: str = ""


COLUMNS = tuple(field.name for field in fields(BenchmarkRow))


def append_rows(path: str | os.PathLike[str], rows: Sequence[BenchmarkRow]) -> None:
    """Append rows to a CSV file; a new file gets a header.  A killed process leaves all of these rows or none."""
    before = check_file(path)
    write_atomically(path, before + write_table(COLUMNS, [asdict(row) for row in rows], header=not before))


def check_file(path: str | os.PathLike[str]) -> str:
    """The content of a CSV file of rows, with the current column names; a file with other columns is refused."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            text = file.read()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"cannot add rows to {path}: {error}. Give another file.") from error
    if text and read_columns(text) != list(COLUMNS):
        raise BadOption(f"{path} has other columns than this version's benchmark rows; give a new file")
    text = rename_columns(text)
    return text if not text or text.endswith("\n") else text + "\n"


def read_rows(path: str | os.PathLike[str]) -> list[BenchmarkRow]:
    """Read the rows that `append_rows` wrote."""
    if not Path(path).is_file():
        raise BadOption(f"there is no file {path}; `adamerge bench --out {path}` makes one")
    kinds = get_type_hints(BenchmarkRow)
    found = read_table(check_file(path))
    return [BenchmarkRow(**{name: _value(kinds[name], text) for name, text in line.items()}) for line in found]


def _value(kind: Any, text: str) -> Any:
    if type(None) in get_args(kind):
        return None if text == "" else get_args(kind)[0](text)
    return kind(text)
