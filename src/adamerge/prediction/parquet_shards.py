"""Parquet files with images as a source: one output file for each input file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from adamerge.core.errors import BadImages
from adamerge.core.packages import import_package
from adamerge.prediction.sources import Part, Sample, Source, Unit

# Where images and their names are, if the user does not say it: the first column of these.
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "image_bytes", "bytes", "content")
ID_COLUMNS = ("id", "__key__", "key", "image_id", "file_name", "filename")
# Rows that are read at once.
ROWS = 64


@dataclass(frozen=True)
class ColumnNames:
    """The columns of the images and of their ids; None takes the first one of a usual name."""

    image: str | None = None
    id: str | None = None


def parquet_source(files: Sequence[str], columns: ColumnNames | None = None) -> Source:
    """Parquet files with a column of encoded images: bytes, or the structs of bytes and path of `datasets`."""
    columns = _choose(files[0], columns or ColumnNames())
    parts = []
    for index, file in enumerate(files):
        names = [Path(file).name, columns.image, columns.id]
        parts.append(Part(index, file, names, partial(_units, index, file, columns), Path(file).stat().st_size))
    return Source("parquet", parts)


def _choose(file: str, wanted: ColumnNames) -> ColumnNames:
    """The columns of a file; one that cannot be found is an error that lists what there is."""
    try:
        there = _parquet().read_schema(file).names
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise BadImages(
            f"cannot read the parquet file {file}: {error}. Repair it, or take it out of --data."
        ) from error
    image = wanted.image if wanted.image is not None else next((name for name in IMAGE_COLUMNS if name in there), None)
    name = wanted.id if wanted.id is not None else next((name for name in ID_COLUMNS if name in there), None)
    for column, option in ((image, "--image-column"), (name, "--id-column")):
        if column not in there and (column is not None or option == "--image-column"):
            what = f"no column {column!r}" if column is not None else "no column of images with a usual name"
            raise BadImages(f"{file} has {what}; it has {', '.join(there)}. Give one of them as {option}.")
    return ColumnNames(image, name)


def _parquet() -> Any:
    return import_package("pyarrow.parquet", "reading parquet files", "predict")


def _units(part: int, file: str, columns: ColumnNames, batch: int) -> list[Unit]:
    return [Unit(part, True, partial(_samples, file, columns))]


def _samples(file: str, columns: ColumnNames) -> Iterator[Sample]:
    wanted = [name for name in (columns.image, columns.id) if name is not None]
    row = 0
    with _parquet().ParquetFile(file, pre_buffer=False) as table:
        for group in table.iter_batches(ROWS, columns=wanted, use_threads=False):
            for values in group.to_pylist():
                content = _content(values[columns.image], Path(file).parent)
                name = values[columns.id] if columns.id is not None else f"{Path(file).name}#{row}"
                yield Sample(str(name), f"{file}#{row}", content)
                row += 1


def _content(image: Any, home: Path) -> Any:
    """The bytes of an image, or the path of its file; an error as a value if there is neither."""
    if isinstance(image, dict) and image.get("bytes") is None and isinstance(image.get("path"), str):
        return str(home / image["path"])
    found = image.get("bytes") if isinstance(image, dict) else image
    if isinstance(found, bytes):
        return found
    return ValueError(f"expected the bytes of an image, got {type(found).__name__}")
