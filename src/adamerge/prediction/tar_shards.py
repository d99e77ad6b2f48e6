"""WebDataset shards (tar files) as a source: one output file for each shard."""

import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from adamerge.core.packages import import_package
from adamerge.prediction.sources import Part, Sample, Source, Unit

# The field of a sample that holds its image: the first of these that it has.  `.npy` holds decoded pixels.
IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp", "npy", "bmp", "ppm", "pgm", "tif", "tiff")
WHAT = "reading WebDataset shards"
BLOCK = 512


def tar_source(shards: Sequence[str]) -> Source:
    """WebDataset shards: paths, or what else WebDataset opens (`pipe:…`, `https://…`), in this order."""
    _webdataset("tariterators")
    parts = []
    for index, shard in enumerate(shards):
        path = Path(shard)
        size = path.stat().st_size if path.is_file() else None
        parts.append(Part(index, shard, path.name, partial(_units, index, shard), size))
    return Source("webdataset", parts)


def expand_braces(text: str) -> list[str]:
    """`shard-{000..009}.tar` as ten names."""
    return _webdataset("shardlists").expand_urls(text)


def _webdataset(module: str) -> Any:
    return import_package(f"webdataset.{module}", WHAT, "predict")


def _units(part: int, shard: str, batch: int) -> list[Unit]:
    return [Unit(part, True, partial(_samples, shard))]


def _samples(shard: str) -> Iterator[Sample]:
    members = _local_members(shard) if Path(shard).exists() else _remote_members(shard)
    for sample in _webdataset("tariterators").group_by_keys(members):
        key = sample["__key__"]
        field = next((name for name in IMAGE_FIELDS if name in sample), None)
        if field is None:
            there = ", ".join(name for name in sample if not name.startswith("__"))
            wrong = ValueError(f"the sample has no image: it has {there}, an image is one of {', '.join(IMAGE_FIELDS)}")
            yield Sample(key, f"{shard}/{key}", wrong)
            continue
        content = sample[field]
        yield Sample(key, f"{shard}/{key}.{field}", _array(content) if field == "npy" else content)


def _array(content: bytes) -> Any:
    """The array in a .npy file; an error as a value if there is none, as other images of the shard can be read."""
    try:
        return np.load(BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        return error


def _local_members(shard: str) -> Iterator[dict[str, Any]]:
    """The files in a tar file.

    Python takes a damaged header for the end of the archive.  A shard that ends so is an error here: images after it
    would be lost without a word.
    """
    with tarfile.open(shard) as archive:
        while (member := archive.next()) is not None:
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None and not member.name.startswith("__"):
                yield {"fname": member.name, "data": file.read(), "__url__": shard}
            archive.members = []  # pyright: ignore[reportAttributeAccessIssue]
        stream: Any = archive.fileobj
        stream.seek(archive.offset)
        end = stream.read(BLOCK)
    if len(end) < BLOCK or any(end):
        raise tarfile.ReadError(f"the archive is cut off or damaged at byte {archive.offset}")


def _remote_members(shard: str) -> Iterator[dict[str, Any]]:
    """The files in what WebDataset opens."""
    tars = _webdataset("tariterators")
    return tars.tar_file_expander(tars.url_opener([{"url": shard}]))
