"""The folder that results are written to: its manifest, its lock, and the names of its files.

Names that begin with `_` or `.` are no data to pyarrow, pandas and Spark when they read the folder.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adamerge.core.errors import BadOutput
from adamerge.core.files import check_can_write, read_json, write_atomically
from adamerge.digest import digest_json

MANIFEST = "_manifest.json"
LOCK = "_lock"
SUCCESS = "_SUCCESS"
UNREADABLE = "_unreadable"
SCHEMA = 1
ADVICE = "Give another --out, or delete this folder to begin anew."


class OutputFolder:
    """A folder of results of one job.

    `job` is JSON data with everything that the results depend on.  A folder of another job is refused.
    """

    def __init__(self, path: str | os.PathLike[str], job: dict[str, Any], parts: int):
        self.path, self.job, self.parts = Path(path), json.loads(json.dumps(job)), parts
        self.digest = digest_json(self.job)

    def part(self, index: int) -> Path:
        """The file of a part."""
        return self.path / f"part-{index:05d}-of-{self.parts:05d}.parquet"

    def unreadable(self, index: int) -> Path:
        """The table of the images of a part that could not be read; there is none if all could."""
        return self.path / UNREADABLE / self.part(index).name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one run.  A process that is killed releases it.

        The lock is one of fcntl: it also works on network file systems, and worker processes do not inherit it.
        """
        check_can_write(self.path, folder=True)
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / LOCK, "a+", encoding="utf-8") as file:
            _take(file, self.path)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def prepare(self) -> None:
        """Check that the folder is empty or of this job, write the manifest, and delete what killed runs left."""
        manifest = self.path / MANIFEST
        if manifest.exists():
            self._compare(manifest)
        else:
            others = sorted(entry.name for entry in self.path.iterdir() if entry.name not in (LOCK, MANIFEST))
            if others:
                raise BadOutput(
                    f"{self.path} holds other files ({', '.join(others[:3])}{', …' if len(others) > 3 else ''}) and no "
                    f"{MANIFEST}: it is not the output of an earlier run. Give an empty or a new folder."
                )
            write_atomically(manifest, json.dumps({"schema": SCHEMA, **self.job}, indent=1) + "\n")
        self.delete_leftovers()

    def delete_leftovers(self) -> None:
        """Delete the temporary files of processes that were killed; no process may be writing."""
        for left in (*self.path.glob(".part-*"), *(self.path / UNREADABLE).glob(".part-*")):
            left.unlink(missing_ok=True)

    def _compare(self, manifest: Path) -> None:
        theirs = read_json(manifest, "manifest", ADVICE, BadOutput)
        mine = {"schema": SCHEMA, **self.job}
        if theirs == mine:
            return
        theirs = theirs if isinstance(theirs, dict) else {}
        differing = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        raise BadOutput(
            f"{self.path} holds the results of another run: it differs in {', '.join(differing)}. Results of two runs "
            f"are not mixed. {ADVICE}"
        )

    def succeed(self) -> None:
        """Say that all parts are there."""
        write_atomically(self.path / SUCCESS, "")


def _take(file: Any, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has no such locks: two runs into one folder are not noticed there
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        raise BadOutput(
            f"another run writes to {folder} now ({file.read() or 'its process is not known'}). Wait for its end, or "
            "give another --out."
        ) from error
