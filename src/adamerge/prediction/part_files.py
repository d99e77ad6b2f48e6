"""Writes the file of one part: to a temporary name first, then renamed, so that a file that is there is whole."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from adamerge.core.errors import BadOutput
from adamerge.core.packages import import_package
from adamerge.digest import digest_json
from adamerge.prediction.output_folder import OutputFolder
from adamerge.prediction.reader import Chunk, UnreadableImage
from adamerge.prediction.sources import Part

# Rows in a row group of a parquet file: a reader can take them one by one.
ROW_GROUP = 1024
# The key of our metadata in a parquet file.
KEY = b"adamerge"
WHAT = "writing parquet files"


class PartFile:
    """The rows of one part.  Nothing is visible under the part's name before `commit`."""

    def __init__(self, folder: OutputFolder, part: Part, schema: Any):
        self.folder, self.part = folder, part
        self.path = folder.part(part.index)
        self.temporary = _temporary(self.path)
        self.unreadable: list[UnreadableImage] = []
        self._waiting: list[Any] = []
        try:
            self._writer = _parquet().ParquetWriter(self.temporary, schema.with_metadata(_metadata(folder, part)))
        except OSError as error:
            raise self._failure(error) from error

    def add(self, chunk: Chunk, columns: dict[str, Tensor]) -> None:
        """Add the results of a batch."""
        self.unreadable += chunk.unreadable
        if not chunk.ids:
            return
        self._waiting.append(to_table(chunk, columns))
        if sum(len(table) for table in self._waiting) >= ROW_GROUP:
            self._write(everything=False)

    def commit(self) -> None:
        """Write the rest, put it on the disk, and give the file its name."""
        self._write(everything=True)
        try:
            self._writer.close()
            self._commit_unreadable()
            _publish(self.temporary, self.path)
        except OSError as error:
            raise self._failure(error) from error

    def discard(self) -> None:
        """Forget the rows; the part can be made again.  After `commit` this does nothing."""
        with suppress(OSError, AttributeError):  # of a full disk, which was reported already
            self._writer.close()
        self.temporary.unlink(missing_ok=True)

    def _write(self, *, everything: bool) -> None:
        """Write waiting rows in groups of `ROW_GROUP`; fewer only at the end of the part."""
        if not self._waiting:
            return
        table = _arrow().concat_tables(self._waiting).combine_chunks()
        whole = len(table) if everything else len(table) - len(table) % ROW_GROUP
        try:
            for first in range(0, whole, ROW_GROUP):
                self._writer.write_table(table.slice(first, min(ROW_GROUP, whole - first)))
        except OSError as error:
            raise self._failure(error) from error
        self._waiting = [table.slice(whole)] if whole < len(table) else []

    def _commit_unreadable(self) -> None:
        """Write the table of unreadable images before the part, whose name says that both are done."""
        target = self.folder.unreadable(self.part.index)
        if not self.unreadable:
            target.unlink(missing_ok=True)
            return
        target.parent.mkdir(exist_ok=True)
        rows = [{"id": one.id, "path": one.path, "reason": one.reason} for one in self.unreadable]
        temporary = _temporary(target)
        try:
            _save(_arrow().Table.from_pylist(rows), temporary, _metadata(self.folder, self.part))
            _publish(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def _failure(self, error: OSError) -> BadOutput:
        self.discard()
        said = error.strerror or str(error)
        return BadOutput(
            f"cannot write {self.path}: {said}. The finished files are kept; make room there and run the same command "
            "again, which continues after them."
        )


def is_finished(folder: OutputFolder, part: Part) -> bool:
    """Whether the file of a part is there; a file that is damaged or of other images is refused."""
    path = folder.part(part.index)
    if not path.exists():
        return False
    try:
        found = (_parquet().read_metadata(path).metadata or {}).get(KEY)
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise BadOutput(f"{path} is damaged ({error}). Delete this file and run the same command again.") from error
    if found != _metadata(folder, part)[KEY]:
        raise BadOutput(
            f"{path} was made from other images than {part.label} has now. Delete this file and run the same command "
            "again, or give another --out."
        )
    return True


def count_rows(path: Path) -> int:
    """The rows of a parquet file; 0 if it is not there."""
    return _parquet().read_metadata(path).num_rows if path.exists() else 0


def check_pyarrow() -> None:
    """Refuse to begin without pyarrow."""
    _parquet()


def unreadable_images(folder: OutputFolder, parts: Sequence[Part]) -> list[UnreadableImage]:
    """The images that could not be read, of all finished parts."""
    found: list[UnreadableImage] = []
    for part in parts:
        path = folder.unreadable(part.index)
        if path.exists():
            found += [UnreadableImage(**row) for row in _parquet().read_table(path).to_pylist()]
    return found


def _arrow() -> Any:
    return import_package("pyarrow", WHAT, "predict")


def _parquet() -> Any:
    return import_package("pyarrow.parquet", WHAT, "predict")


def to_table(chunk: Chunk, columns: dict[str, Tensor]) -> Any:
    """The rows of a batch: id, path, and the columns, which hold a number or a vector for each image."""
    arrow = _arrow()
    fields: dict[str, Any] = {
        "id": arrow.array(chunk.ids, arrow.string()),
        "path": arrow.array(chunk.paths, arrow.string()),
    }
    return arrow.table(fields | {name: _column(values) for name, values in columns.items()})


def _column(values: Tensor) -> Any:
    flat = _arrow().array(values.contiguous().flatten().numpy())
    return flat if values.dim() == 1 else _arrow().FixedSizeListArray.from_arrays(flat, values.shape[1])


def _metadata(folder: OutputFolder, part: Part) -> dict[bytes, bytes]:
    """What a file says about itself: the digests of the job and of the part's images."""
    return {KEY: json.dumps({"job": folder.digest, "images": digest_json([part.names, part.size])}).encode()}


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")


def _save(table: Any, path: Path, metadata: dict[bytes, bytes]) -> None:
    _parquet().write_table(table.replace_schema_metadata(metadata), path)


def _publish(temporary: Path, target: Path) -> None:
    """Put a file on the disk, then under its name, then the name on the disk."""
    _synchronise(temporary)
    os.replace(temporary, target)
    _synchronise(target.parent)


def _synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
