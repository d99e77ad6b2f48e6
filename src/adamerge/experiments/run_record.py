"""The file run.json in a folder of results: what was asked for, and whether the run came to its end."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from adamerge.core.errors import BadOutput
from adamerge.core.files import write_atomically
from adamerge.distributed import is_first
from adamerge.experiments.versions import versions

FILE = "run.json"


@dataclass(frozen=True)
class RunRecord:
    """The plan of a run; written before it starts and again when it is finished."""

    folder: Path
    command: str
    plan: Mapping[str, Any]

    def write(self, *, left_out: Sequence[str] = (), finished: bool = False) -> None:
        """Write the file; `left_out` says what could not be measured, and why.

        A full disk does not stop a run before its first result, which would then be shown.
        """
        if not is_first():
            return
        record = {
            "command": self.command,
            **self.plan,
            "left_out": list(left_out),
            "finished": finished,
            "versions": versions(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        with nullcontext() if finished else suppress(BadOutput):
            write_atomically(self.folder / FILE, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder; None if there is none or it cannot be read."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
