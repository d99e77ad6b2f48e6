"""Runs a model over a source and writes one parquet file for each part; a stopped run continues where it stopped."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from adamerge.core.errors import BadOption
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.data.folders import preprocessing
from adamerge.digest import digest_json, identify_model
from adamerge.distributed import from_first, in_order, my_share
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, temporarily_patched
from adamerge.patching.stack import installed
from adamerge.prediction.batch_size import images_in_batch
from adamerge.prediction.forward import Forward, InFlight, default_batch_tokens
from adamerge.prediction.output_folder import OutputFolder
from adamerge.prediction.part_files import PartFile, check_pyarrow, is_finished, to_table
from adamerge.prediction.reader import Chunk, make_loader
from adamerge.prediction.report import Clock, PredictionReport, make_report
from adamerge.prediction.sources import Part, Source
from adamerge.prediction.tasks import Task
from adamerge.runtime.backend import Runtime


@dataclass(frozen=True)
class RunOptions:
    """How to run; none of these changes the results of an image beyond rounding.

    `batch_tokens` is the number of tokens in a batch, averaged over the blocks; None takes one that fits the device.
    `workers` is the number of processes that read images.
    """

    runtime: Runtime = "auto"
    batch_tokens: int | None = None
    workers: int = 2
    progress: bool = True


@dataclass
class Progress:
    """What a run has done so far."""

    clock: Clock
    bar: Any
    open_files: dict[int, PartFile] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)


def run(
    model: nn.Module,
    source: Source,
    out: str | os.PathLike[str],
    recipe: Recipe | None,
    task: Task,
    options: RunOptions,
) -> PredictionReport:
    """Write the results of `task` for all images; the model is restored afterwards.

    Without a recipe the model runs as it is, merged or not.
    """
    check_pyarrow()
    with temporarily_patched(model), torch.inference_mode():
        if recipe is not None:
            apply(model, recipe, options.runtime)
        stack = installed(find_host(model))
        recipe = None if stack is None else stack.recipe
        device = next(model.parameters()).device
        tokens = default_batch_tokens(device) if options.batch_tokens is None else options.batch_tokens
        batch = images_in_batch(model, recipe, tokens)
        forward = Forward(model, task)
        job = describe_job(model, source, recipe, task, options.runtime)
        folder = OutputFolder(out, job, len(source.parts))
        with ExitStack() as held, _named_memory_errors():
            remaining = from_first(lambda: _prepare(folder, source, held))
            mine = list(my_share([source.parts[index] for index in remaining]))
            done = _run_parts(forward, folder, mine, batch, options)
            clocks, failed = in_order([done.clock.spent()]), in_order(done.failed)
            return from_first(lambda: make_report(folder, source, clocks, failed, len(source.parts) - len(remaining)))


def _prepare(folder: OutputFolder, source: Source, held: ExitStack) -> list[int]:
    """Hold the folder, check it, and find the parts that have no file yet; one process does it for all."""
    held.enter_context(folder.locked())
    folder.prepare()
    return [part.index for part in source.parts if not is_finished(folder, part)]


@contextmanager
def _named_memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BadOption(
            f"the device has too little memory for a batch: {str(error).splitlines()[0]} Give fewer --batch-tokens and "
            "run the same command again; finished files are kept."
        ) from error


def describe_job(
    model: nn.Module, source: Source, recipe: Recipe | None, task: Task, runtime: Runtime
) -> dict[str, Any]:
    """Everything that the results depend on, as JSON data."""
    parameter = next(model.parameters())
    return {
        "command": task.name,
        "model": {"class": type(model).__name__, **identify_model(model)},
        "recipe": None if recipe is None else to_json(recipe),
        "preprocessing": preprocessing(model),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": parameter.device.type,
        "runtime": runtime,
        "columns": vars(task),
        "input": {
            "kind": source.kind,
            "parts": len(source.parts),
            "names": digest_json([part.names for part in source.parts]),
            "images": source.images,
        },
    }


def _run_parts(
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
