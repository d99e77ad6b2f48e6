"""The journal of a search: one line for each candidate and its result, so that a stopped search can continue."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adamerge.core.errors import BadOption
from adamerge.core.files import write_atomically
from adamerge.distributed import from_first, is_first


class Journal:
    """Results by candidate, both as JSON.  With a path, each result is written before the next candidate is tried.

    The first line of the file is `task`, which identifies the search.  A file of another task is refused.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, task: Mapping[str, Any] | None = None):
        self.path = None if path is None else Path(path)
        self.lines = [json.dumps(task or {}, sort_keys=True)]
        self.results: dict[str, Any] = {}
        if self.path is not None and from_first(self.path.exists):
            self._read(self.path)

    def lookup(self, tried: Any) -> Any | None:
        """The result, or None if it was not tried yet."""
        return self.results.get(json.dumps(tried, sort_keys=True))

    def record(self, tried: Any, result: Any) -> None:
        """Keep the result, and write the file."""
        self.results[json.dumps(tried, sort_keys=True)] = result
        self.lines.append(json.dumps([tried, result], sort_keys=True))
        if self.path is not None and is_first():
            write_atomically(self.path, "\n".join(self.lines) + "\n")

    def _read(self, path: Path) -> None:
        try:
            head, *rest = from_first(lambda: path.read_text(encoding="utf-8")).splitlines()
            task, entries = json.loads(head), [json.loads(line) for line in rest]
            results = {json.dumps(tried, sort_keys=True): result for tried, result in entries}
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
        self.lines, self.results = [head, *rest], results
