"""Makes the files of parts in one process: reads images, runs the model, writes rows."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from tqdm import tqdm

from adamerge.prediction.forward import Forward, InFlight
from adamerge.prediction.output_folder import OutputFolder
from adamerge.prediction.part_files import PartFile, to_table
from adamerge.prediction.reader import Chunk, make_loader
from adamerge.prediction.report import Clock
from adamerge.prediction.sources import Part
from adamerge.runtime.backend import Runtime

Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class RunOptions:
    """How to run; none of these changes the results of an image beyond rounding.

    `batch_tokens` is the number of tokens in a batch, averaged over the blocks; None takes one that fits the device.
    `workers` is the number of processes that read images.  `engine` is what runs the model: this process ("local") or
    the workers of Ray ("ray"), `engine_workers` of them; each has its own processes that read images.
    """

    runtime: Runtime = "auto"
    batch_tokens: int | None = None
    workers: int = 2
    progress: bool = True
    engine: Engine = "local"
    engine_workers: int | None = None


@dataclass
class Progress:
    """What a run has done so far."""

    clock: Clock
    bar: Any
    open_files: dict[int, PartFile] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)


def run_parts(
    forward: Forward, folder: OutputFolder, parts: Sequence[Part], batch: int, options: RunOptions
) -> Progress:
    """Make the files of these parts."""
    units = [unit for part in parts for unit in part.units(batch)]
    by_index = {part.index: part for part in parts}
    bar = tqdm(desc="images", unit="", disable=not options.progress)
    now = Progress(Clock(forward.device), bar)
    if not units:
        return now
    schema = to_table(*forward.example()).schema
    loader = make_loader(units, forward.transform, batch, options.workers, forward.device)
    try:
        for chunk, results in run_batches(forward, loader, now.clock):
            part = by_index[chunk.part]
            with now.clock.writing():
                if chunk.part not in now.open_files and chunk.failed is None:
                    now.open_files[chunk.part] = PartFile(folder, part, schema)
                _take(now, part, chunk, results)
    finally:
        for file in now.open_files.values():
            file.discard()
        bar.close()
    return now


def _take(now: Progress, part: Part, chunk: Chunk, results: dict[str, Tensor]) -> None:
    """Add a batch to the file of its part; the last one finishes the file."""
    if chunk.failed is not None:
        now.failed.append((part.label, chunk.failed))
        file = now.open_files.pop(part.index, None)
        if file is not None:
            file.discard()
        return
    file = now.open_files[part.index]
    file.add(chunk, results)
    now.bar.update(len(chunk.ids))
    now.clock.images += len(chunk.ids)
    if chunk.last:
        file.commit()
        del now.open_files[part.index]


def run_batches(forward: Forward, loader: Any, clock: Clock) -> Iterator[tuple[Chunk, dict[str, Tensor]]]:
    """The results of each batch, one batch late: the device works on the next one meanwhile."""
    before: InFlight | None = None
    chunks = iter(loader)
    while True:
        begin = time.perf_counter()
        chunk = next(chunks, None)
        clock.waited += time.perf_counter() - begin
        now = None if chunk is None else forward.start(chunk, clock)
        if before is not None:
            yield before.chunk, before.finish(clock)
        if now is None:
            return
        before = now
