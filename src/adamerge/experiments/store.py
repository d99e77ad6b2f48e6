"""Results of finished measurements in a folder, so that an interrupted experiment resumes where it stopped."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from adamerge.core.errors import BadOutput
from adamerge.core.files import write_atomically
from adamerge.digest import digest_json
from adamerge.distributed import from_first, is_first

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredResult:
    """The result of one measurement: JSON data, and tensors by name."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


class ResultStore:
    """A folder with one file for each result.

    A result is stored under its settings: JSON data with everything that affects it.  The file is named after their
    digest and holds them, so that a result is only ever returned for the settings it was measured with.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)

    def load(self, settings: Any) -> StoredResult | None:
        """The result with these settings; None if there is none or its file is damaged."""
        return read_result(self._path(settings), _text(settings))

    def save(self, settings: Any, result: StoredResult) -> None:
        """Store a result; an interrupted call leaves no partial file."""
        tensors = {name: tensor.contiguous() for name, tensor in result.tensors.items()}
        metadata = {"facts": json.dumps(result.facts), "settings": _text(settings)}
        write_atomically(self._path(settings), save(tensors, metadata))

    def load_or_measure(self, settings: Any, measure: Callable[[], StoredResult]) -> StoredResult:
        """The stored result with these settings; without one, `measure` is called and its result stored.

        If it cannot be stored, the error has it in `result`.
        """
        result = from_first(lambda: self.load(settings))
        if result is not None:
            LOGGER.info("read the result of an earlier run from %s", self._path(settings))
            return result
        result = measure()
        try:
            if is_first():
                self.save(settings, result)
        except BadOutput as error:
            error.result = result
            raise
        return result

    def file_name(self, settings: Any) -> str:
        """The name of the file for these settings, whether it is there or not."""
        return f"{digest_json(settings)}.safetensors"

    def _path(self, settings: Any) -> Path:
        return self.folder / self.file_name(settings)


def read_result(path: Path, settings: str | None = None) -> StoredResult | None:
    """The result in a file; None if there is none, if it is damaged, or if it has other settings than those given."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            if settings is not None and metadata["settings"] != settings:
                return None
            names = file.keys()
            return StoredResult(json.loads(metadata["facts"]), {name: file.get_tensor(name) for name in names})
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _text(settings: Any) -> str:
    return json.dumps(settings, sort_keys=True)
