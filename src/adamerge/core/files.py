"""Reading JSON files with clear errors, and writing files atomically."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from adamerge.core.errors import AdamergeError, BadOutput


def read_json(path: str | os.PathLike[str], what: str, advice: str, error: type[AdamergeError]) -> Any:
    """The content of a JSON file.  Raises `error`, with `advice` in its text, if it cannot be read or is not JSON.

    `what` names the kind of file in the text of the error.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as reason:
        raise error(f"cannot read the {what} {path}: {reason}. {advice}") from reason
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"cannot read the {what} {path}: it is not JSON ({reason}). {advice}") from reason


def is_schema(found: Any, known: int) -> bool:
    """Whether the schema number of a file is the one that this version knows; neither true nor 1.0 is 1."""
    return type(found) is int and found == known


def check_can_write(path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Refuse a path that a result cannot be written to; called before the work whose result it is.

    With `folder`, the result is several files in the folder `path`.  Missing folders are made later, by
    `write_atomically`; nothing is left behind here.
    """
    target = Path(path)
    try:
        if is_special(target) and os.access(target, os.W_OK):
            return
        if not folder and target.is_dir():
            raise BadOutput(f"cannot write {path}: it is a folder. Give the name of a file.")
        home = target if folder else target.parent
        while not home.exists() and home != home.parent:
            home = home.parent
        if not home.is_dir():
            raise BadOutput(f"cannot write {path}: {home} is a file, not a folder. Give another path.")
        with tempfile.NamedTemporaryFile(dir=home, prefix=f".{target.name}."):
            pass
    except (OSError, ValueError) as reason:
        if isinstance(reason, BadOutput):
            raise
        raise _failure(path, reason) from reason


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that a reader sees either the old or the new content, never a part of it.

    What is no file and no folder, such as /dev/stdout, is written to directly.
    """
    target, data = Path(path), content.encode() if isinstance(content, str) else content
    try:
        if is_special(target):
            target.write_bytes(data)
        else:
            _replace(target, data)
    except (OSError, ValueError) as reason:
        raise _failure(path, reason) from reason


def _replace(target: Path, data: bytes) -> None:
    """Write a file beside `target`, then put it in its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def is_special(target: Path) -> bool:
    """Whether a path is there and neither a file nor a folder: a device or a pipe."""
    return target.exists() and not target.is_file() and not target.is_dir()


def _failure(path: str | os.PathLike[str], reason: OSError | ValueError) -> BadOutput:
    said = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return BadOutput(f"cannot write {path}: {said}. Give another path, or make room there.")
