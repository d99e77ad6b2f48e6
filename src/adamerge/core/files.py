"""Reading JSON files with clear errors, and writing files atomically."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from adamerge.core.errors import AdamergeError


def read_json(path: str | os.PathLike[str], what: str, advice: str, error: type[AdamergeError]) -> Any:
    """The content of a JSON file.  Raises `error`, with `advice` in its text, if it cannot be read or is not JSON.

    `what` names the kind of file in the text of the error.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, RecursionError) as reason:
        raise error(f"cannot read the {what} {path}: it is not JSON ({reason}). {advice}") from reason
    except (OSError, UnicodeDecodeError) as reason:
        raise error(f"cannot read the {what} {path}: {reason}. {advice}") from reason


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that a reader sees either the old or the new content, never a part of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
