"""Where images come from, divided into parts: each part becomes one output file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adamerge.core.errors import BadOption
from adamerge.data.folders import even_indices
from adamerge.data.image_files import images_below

# The number of images in an output file, where the input does not divide them already.
SHARD_SIZE = 4096


@dataclass(frozen=True)
class Sample:
    """One image of a source.

    `content` is the path of an image file, the bytes of one, decoded pixels (height, width, channels) in uint8, or an
    error that says why there is no image.
    """

    id: str
    path: str
    content: Any


@dataclass(frozen=True)
class Unit:
    """Images of one part that one process reads in order; `last` says whether they are the last of their part."""

    part: int
    last: bool
    samples: Callable[[], Iterator[Sample]]


@dataclass(frozen=True)
class Part:
    """The images of one output file.

    `label` names the part in messages.  `names` is JSON data that tells its images from others; `size` is the size of
    the input file, if there is one.  `units` takes the number of images in a batch.
    """

    index: int
    label: str
    names: Any
    units: Callable[[int], Sequence[Unit]]
    size: int | None = None


@dataclass(frozen=True)
class Source:
    """Images in a fixed order, divided into parts.  `images` is their number, if it is known without reading them."""

    kind: str
    parts: Sequence[Part]
    images: int | None = None


def folder_source(root: str | Path, *, shard_size: int = SHARD_SIZE, limit: int | None = None) -> Source:
    """The images in a folder and below it, sorted by name; `limit` takes that many, evenly spaced."""
    check_shard_size(shard_size)
    paths = images_below(root)
    if limit is not None:
        paths = [paths[index] for index in even_indices(len(paths), limit)]
    ids = [Path(path).relative_to(root).as_posix() for path in paths]
    parts = []
    for index, first in enumerate(range(0, len(paths), shard_size)):
        mine = slice(first, first + shard_size)
        units = partial(_file_units, index, tuple(ids[mine]), tuple(paths[mine]))
        parts.append(Part(index, f"images {first} to {first + len(ids[mine]) - 1}", ids[mine], units))
    return Source("folder", parts, len(paths))


def _file_units(part: int, ids: tuple[str, ...], paths: tuple[str, ...], batch: int) -> list[Unit]:
    """The files of a part, a batch in each unit."""
    firsts = range(0, len(ids), batch)
    return [
        Unit(part, first == firsts[-1], partial(_files, ids[first : first + batch], paths[first : first + batch]))
        for first in firsts
    ]


def _files(ids: tuple[str, ...], paths: tuple[str, ...]) -> Iterator[Sample]:
    for name, path in zip(ids, paths, strict=True):
        yield Sample(name, path, path)


def drawn_source(count: int, *, seed: int, size: int, shard_size: int = SHARD_SIZE) -> Source:
    """`count` images of the embedded generator, of `size` pixels."""
    check_shard_size(shard_size)
    parts = []
    for index, first in enumerate(range(0, count, shard_size)):
        after = min(first + shard_size, count)
        units = partial(_drawn_units, index, first, after, (seed, size))
        parts.append(Part(index, f"images {first} to {after - 1}", [seed, size, first, after], units))
    return Source("embedded", parts, count)


def _drawn_units(part: int, first: int, after: int, kind: tuple[int, int], batch: int) -> list[Unit]:
    starts = range(first, after, batch)
    return [
        Unit(part, start == starts[-1], partial(_drawn, start, min(batch, after - start), *kind)) for start in starts
    ]


def _drawn(first: int, count: int, seed: int, size: int) -> Iterator[Sample]:
    from adamerge.embedded import scenes

    images = scenes(first, count, seed=seed, size=size).images.mul(255).round().to(torch.uint8)
    for index, image in enumerate(images, first):
        yield Sample(str(index), f"embedded:{seed}/{index}", image.permute(1, 2, 0).numpy())


def check_shard_size(number: int) -> None:
    """Refuse what is not a number of images."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise BadOption(f"shard_size is the number of images in an output file, at least 1; got {number!r}")
