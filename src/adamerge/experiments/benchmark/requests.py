"""What was asked of benchmarks, in a file beside their rows: a report tells what a stopped run did not time."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from adamerge.core.errors import BadOutput
from adamerge.core.files import is_special, write_atomically


def requests_file(rows: str | os.PathLike[str]) -> Path:
    """The file of requests beside a CSV file of rows: bench.csv -> bench.asked.json."""
    return Path(rows).with_suffix(".asked.json")


def note_request(rows: str | os.PathLike[str], common: Mapping[str, Any], batch_sizes: Sequence[int]) -> None:
    """Note, before anything is timed, that rows of these batch sizes will be added; `common` are columns they share."""
    if is_special(Path(rows)):
        return
    asked = {"date": _now(), "columns": {key: str(value) for key, value in common.items()}, "batch": list(batch_sizes)}
    text = json.dumps([*read_requests(rows), asked], indent=1, ensure_ascii=False)
    # A full disk does not stop a run before its first result, which would then be shown.
    with suppress(BadOutput):
        write_atomically(requests_file(rows), text + "\n")


def read_requests(rows: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The requests beside a CSV file, the oldest first; none if there is no such file or it cannot be read."""
    try:
        found = json.loads(requests_file(rows).read_text(encoding="utf-8"))
        return [
            {"date": str(one["date"]), "columns": dict(one["columns"]), "batch": [int(size) for size in one["batch"]]}
            for one in found
        ]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def not_timed(requests: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each model and dtype with the batch sizes that were asked for and have no rows since."""
    found: dict[str, str] = {}
    for one in requests:
        columns = one["columns"]
        timed = {
            int(row["batch"])
            for row in rows
            if row["date"] >= one["date"] and all(row.get(key) == value for key, value in columns.items())
        }
        left = [size for size in one["batch"] if size not in timed]
        if left:
            name = ", ".join(columns[key] for key in ("model", "dtype") if key in columns)
            found.setdefault(f"{name}, batch {', '.join(map(str, left))}", one["date"])
    return [f"{what}: asked for on {date} and not timed since; run the command again" for what, date in found.items()]


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
