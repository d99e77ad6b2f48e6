"""Reads the units of a source into batches of pixels, in this process or in several."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from adamerge.data.folders import preprocessing
from adamerge.data.image_files import read_image
from adamerge.prediction.sources import Sample, Unit

# A reason for an unreadable image or shard is cut to this many characters.
LONGEST_REASON = 300


@dataclass(frozen=True)
class UnreadableImage:
    """An image that could not be decoded, and why."""

    id: str
    path: str
    reason: str


@dataclass(frozen=True)
class Chunk:
    """A batch of images of one part.

    `last` says that the part has no more images.  `failed` is why the rest of the part cannot be read, if it cannot.
    """

    part: int
    ids: tuple[str, ...]
    paths: tuple[str, ...]
    pixels: UInt8[Tensor, "b c h w"] | None
    unreadable: tuple[UnreadableImage, ...] = ()
    last: bool = False
    failed: str | None = None

    def pin_memory(self) -> "Chunk":
        """The same with its pixels in pinned memory; torch's DataLoader calls it."""
        return self if self.pixels is None else replace(self, pixels=self.pixels.pin_memory())


@dataclass
class _Waiting:
    """Images that were read and are not in a batch yet."""

    ids: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    pixels: list[Tensor] = field(default_factory=list)
    unreadable: list[UnreadableImage] = field(default_factory=list)

    def chunk(self, part: int, *, last: bool = False) -> Chunk:
        pixels = torch.stack(self.pixels) if self.pixels else None
        return Chunk(part, tuple(self.ids), tuple(self.paths), pixels, tuple(self.unreadable), last)


class Reader(IterableDataset[Chunk]):
    """Batches of `batch` images of each unit.

    With several worker processes, each reads every n-th unit.  A batch has images of one unit only and does not
    depend on the number of processes.
    """

    def __init__(self, units: Sequence[Unit], transform: Callable[[Any], Tensor], batch: int):
        self.units, self.transform, self.batch = units, transform, batch

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        mine = self.units if worker is None else self.units[worker.id :: worker.num_workers]
        for unit in mine:
            yield from self._chunks(unit)

    def _chunks(self, unit: Unit) -> Iterator[Chunk]:
        waiting = _Waiting()
        try:
            for sample in unit.samples():
                self._add(sample, waiting)
                if len(waiting.pixels) == self.batch:
                    yield waiting.chunk(unit.part)
                    waiting = _Waiting()
        except Exception as error:  # a shard can be damaged in many ways, and libraries raise many types
            yield Chunk(unit.part, (), (), None, failed=reason_of(error))
            return
        yield waiting.chunk(unit.part, last=unit.last)

    def _add(self, sample: Sample, waiting: _Waiting) -> None:
        try:
            pixels = self.transform(sample.content)
        except Exception as error:  # for damaged files Pillow raises many types, even SyntaxError
            waiting.unreadable.append(UnreadableImage(sample.id, sample.path, reason_of(error)))
            return
        waiting.ids.append(sample.id)
        waiting.paths.append(sample.path)
        waiting.pixels.append(pixels)


def make_loader(
    units: Sequence[Unit], transform: Callable[[Any], Tensor], batch: int, workers: int, device: torch.device
) -> DataLoader[Chunk]:
    """Chunks in an order that depends only on the units and the number of workers."""
    reader, workers = Reader(units, transform, batch), min(workers, len(units))
    return DataLoader(reader, batch_size=None, num_workers=workers, pin_memory=device.type == "cuda")


def reason_of(error: Exception) -> str:
    """What an error says, in one line and without the addresses of objects in memory."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.split(" <_io.BytesIO")[0]
    return f"{type(error).__name__}: {text}"[:LONGEST_REASON]


class Transform:
    """Makes pixels (channels, height, width) in uint8 of the content of a sample, as timm prepares images for a model.

    Decoded pixels that have the model's image size already are taken as they are.
    """

    def __init__(self, model: nn.Module):
        from timm.data import create_transform  # pyright: ignore[reportPrivateImportUsage]

        settings = preprocessing(model)
        self.size = tuple(settings["input_size"][1:])
        # Without the last steps, scaling and normalising: uint8 goes from process to process, a quarter of the bytes.
        self.prepare: Any = create_transform(**settings, is_training=False, use_prefetcher=True)

    def __call__(self, content: Any) -> Tensor:
        if isinstance(content, Exception):
            raise content
        if isinstance(content, np.ndarray):
            if content.dtype != np.uint8 or content.ndim != 3 or content.shape[2] != 3:
                raise ValueError(f"expected pixels (height, width, 3) in uint8, got {content.dtype} {content.shape}")
            if content.shape[:2] == self.size:
                return torch.from_numpy(content).permute(2, 0, 1)
        return self.prepare(_decoded(content))


def _decoded(content: Any) -> Any:
    """The image of a sample, as a PIL image in RGB."""
    if isinstance(content, str):
        return read_image(content)
    if isinstance(content, bytes):
        return read_image(BytesIO(content))
    from PIL import Image

    return Image.fromarray(content)
