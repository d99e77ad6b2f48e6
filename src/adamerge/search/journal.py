"""The journal of a search: what was tried and what came out, one line each, so that a stopped search goes on."""

import json
import os
from pathlib import Path
from typing import Any

from adamerge.core.errors import BadOption
from adamerge.core.files import write_atomically


class Journal:
    """Results by what was tried.  With a file, every result is on disk before the next is tried."""

    def __init__(self, path: str | os.PathLike[str] | None, task: dict[str, Any]):
        self.path = None if path is None else Path(path)
        self.lines = [json.dumps(task, sort_keys=True)]
        self.known: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def recall(self, tried: Any) -> Any | None:
        """What came out, if it was tried before."""
        return self.known.get(json.dumps(tried, sort_keys=True))

    def note(self, tried: Any, result: Any) -> None:
        """Keep what came out."""
        self.known[json.dumps(tried, sort_keys=True)] = result
        self.lines.append(json.dumps([tried, result], sort_keys=True))
        if self.path is not None:
            write_atomically(self.path, "\n".join(self.lines) + "\n")

    def _read(self, path: Path) -> None:
        try:
            head, *rest = path.read_text(encoding="utf-8").splitlines()
            task, results = json.loads(head), [json.loads(line) for line in rest]
            known = {json.dumps(tried, sort_keys=True): result for tried, result in results}
        except (OSError, ValueError, TypeError) as error:
            raise BadOption(
                f"{path} is not the journal of a search ({error}); give another file to resume from, or delete it"
            ) from error
        if json.dumps(task, sort_keys=True) != self.lines[0]:
            mine = json.loads(self.lines[0])
            differing = [name for name in mine if not isinstance(task, dict) or task.get(name) != mine[name]]
            raise BadOption(
                f"{path} is the journal of another search: it differs in {', '.join(differing) or 'its fields'}; "
                "give another file to resume from, or delete it"
            )
        self.lines, self.known = [head, *rest], known
