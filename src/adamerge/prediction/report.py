"""What a run did: images, files, what could not be read, and what limited its speed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from adamerge.prediction.output_folder import UNREADABLE, OutputFolder
from adamerge.prediction.part_files import count_rows, unreadable_images
from adamerge.prediction.reader import UnreadableImage
from adamerge.prediction.sources import Source

# A message names at most this many files.
MOST_NAMED = 5


@dataclass(frozen=True)
class Spent:
    """Where the time of a run went, in seconds: waiting for images, the model on its device, writing files."""

    seconds: float
    waited: float
    computed: float
    wrote: float
    images: int


class Clock:
    """Measures where the time of a run goes; the fields are those of `Spent`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.begin = time.perf_counter()
        self.waited = self.computed = self.wrote = 0.0
        self.images = 0

    def spent(self) -> Spent:
        """The times until now."""
        return Spent(time.perf_counter() - self.begin, self.waited, self.computed, self.wrote, self.images)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The model runs."""
        begin = time.perf_counter()
        yield
        self.computed += time.perf_counter() - begin

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Results are written."""
        begin = time.perf_counter()
        yield
        self.wrote += time.perf_counter() - begin


@dataclass(frozen=True)
class PredictionReport:
    """The result of `adamerge.predict` or `adamerge.embed`.

    Attributes:
        out: the folder of the parquet files.
        images: rows in all files, of this run and of earlier ones.
        files: how many files there are.
        new_images: rows that this run added.
        finished_before: files that were there already.
        unreadable: images that could not be decoded; they are in the tables in `_unreadable`.
        failed: (shard, reason) of input shards that could not be read to their end; they have no output file.
        seconds: time of this run.
        limit: what took most of it: "reading images", "the model" or "writing files".
        busy: share of the time in which the model ran on its device.
    """

    out: Path
    images: int
    files: int
    new_images: int
    finished_before: int
    unreadable: tuple[UnreadableImage, ...]
    failed: tuple[tuple[str, str], ...]
    seconds: float
    limit: str
    busy: float

    def __str__(self) -> str:
        speed = f", {self.new_images / self.seconds:.0f} images/s" if self.new_images else ""
        before = f" ({self.finished_before} of an earlier run)" if self.finished_before else ""
        lines = [f"{self.images} images in {self.files} file(s){before} in {self.out}"]
        if self.new_images:
            lines.append(
                f"{self.new_images} images in {self.seconds:.1f} s{speed}; the model ran {self.busy:.0%} of the time, "
                f"most of it took {self.limit}"
            )
        return "\n".join(lines)

    def complaint(self) -> str | None:
        """A message about images and shards that could not be read; None if there are none."""
        parts = []
        if self.unreadable:
            named = _named([image.path for image in self.unreadable])
            number = len(self.unreadable)
            parts.append(f"{number} image(s) could not be read, {self.out / UNREADABLE} lists them: {named}")
        if self.failed:
            named = _named([f"{shard} ({reason})" for shard, reason in self.failed])
            parts.append(
                f"{len(self.failed)} input shard(s) could not be read and have no output file; repair them and run the "
                f"same command again: {named}"
            )
        return ". ".join(parts) or None


def make_report(
    folder: OutputFolder,
    source: Source,
    clocks: Sequence[Spent],
    failed: Sequence[tuple[str, str]],
    finished_before: int,
) -> PredictionReport:
    """The report of a run that ended, in one process or in several; marks the folder as complete if it is."""
    files = [folder.part(part.index) for part in source.parts]
    rows = [count_rows(path) for path in files if path.exists()]
    if len(rows) == len(files):
        folder.succeed()
    seconds = max(clock.seconds for clock in clocks)
    computed = sum(clock.computed for clock in clocks) / len(clocks)
    spent = {"reading images": sum(clock.waited for clock in clocks) / len(clocks), "the model": computed}
    spent["writing files"] = sum(clock.wrote for clock in clocks) / len(clocks)
    return PredictionReport(
        out=folder.path,
        images=sum(rows),
        files=len(rows),
        new_images=sum(clock.images for clock in clocks),
        finished_before=finished_before,
        unreadable=tuple(unreadable_images(folder, source.parts)),
        failed=tuple(failed),
        seconds=seconds,
        limit=max(spent, key=lambda what: spent[what]),
        busy=min(1.0, computed / max(seconds, 1e-9)),
    )


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")
