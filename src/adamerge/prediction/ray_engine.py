"""Makes the files of parts in the workers of Ray Data, on one machine or a cluster.

A worker makes one part at a time and commits it.  Ray starts a worker that died again and repeats its part; the commit
is a rename, so that every part is there once and whole.
"""

import copy
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from adamerge.core import errors
from adamerge.core.errors import AdamergeError, BadOption, ProcessLost
from adamerge.core.packages import import_package
from adamerge.core.recipe import Recipe
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, remove
from adamerge.patching.stack import installed
from adamerge.prediction.forward import Forward
from adamerge.prediction.output_folder import OutputFolder
from adamerge.prediction.part_files import count_rows, is_finished
from adamerge.prediction.part_run import RunOptions, run_parts
from adamerge.prediction.report import Spent
from adamerge.prediction.sources import Part
from adamerge.prediction.tasks import Task

WHAT = "--engine ray"


@dataclass(frozen=True)
class Work:
    """What every worker gets: the model without merging, on the CPU, and what makes the parts with it."""

    model: nn.Module
    device: str
    recipe: Recipe | None
    task: Task
    folder: OutputFolder
    parts: dict[int, Part]
    batch: int
    options: RunOptions


class PartWorker:
    """A worker: holds the model, and makes the part of each row that Ray Data gives it."""

    def __init__(self, reference: Any):
        self.work: Work = _ray().get(reference)
        model = self.work.model.to(self.work.device)
        if self.work.recipe is not None:
            apply(model, self.work.recipe, self.work.options.runtime)
        self.forward = Forward(model, self.work.task)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Make one part; what took how long, and what could not be read, as a row of plain values."""
        work, part = self.work, self.work.parts[int(row["part"])]
        done, failed, error = Spent(0.0, 0.0, 0.0, 0.0, 0), [], None
        try:
            if is_finished(work.folder, part):  # by a worker that died before it could say so
                done = replace(done, images=count_rows(work.folder.part(part.index)))
            else:
                with torch.inference_mode():
                    progress = run_parts(self.forward, work.folder, [part], work.batch, work.options)
                done, failed = progress.clock.spent(), progress.failed
        except (AdamergeError, torch.OutOfMemoryError) as raised:  # Ray would wrap it and lose its type
            error = [type(raised).__name__, str(raised)]
        return {"part": part.index, "failed": json.dumps(failed), "error": json.dumps(error), **asdict(done)}


def run_parts_on_ray(
    forward: Forward, task: Task, folder: OutputFolder, parts: Sequence[Part], batch: int, options: RunOptions
) -> tuple[Spent, list[tuple[str, str]]]:
    """Make the files of these parts in workers of Ray; the time spent, and the parts that could not be read."""
    begin = time.perf_counter()
    ray = _ray()
    if not parts:
        return Spent(0.0, 0.0, 0.0, 0.0, 0), []
    work = _describe(forward, task, folder, parts, batch, options)
    rows: list[dict[str, Any]] = []
    with _connected(ray, options.engine_workers):
        workers = min(_count_workers(ray, forward.device, options.engine_workers), len(parts))
        bar = tqdm(desc="images", unit="", disable=not options.progress)
        try:
            for row in _results(ray, work, workers):
                rows.append(row)
                bar.update(row["images"])
        finally:
            bar.close()
    folder.delete_leftovers()
    each = {name: sum(row[name] for row in rows) / workers for name in ("waited", "computed", "wrote")}
    spent = Spent(time.perf_counter() - begin, images=sum(row["images"] for row in rows), **each)
    rows.sort(key=lambda row: row["part"])
    return spent, [(label, reason) for row in rows for label, reason in json.loads(row["failed"])]


def check_engine(options: RunOptions, processes: int) -> None:
    """Refuse an engine that there is not, workers without one, and Ray inside torchrun."""
    if options.engine not in ("local", "ray"):
        raise BadOption(f"engine must be local or ray; got {options.engine!r}")
    number = options.engine_workers
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise BadOption(f"engine_workers is the number of Ray's workers, at least 1; got {number!r}")
    if options.engine == "local":
        if number is not None:
            raise BadOption("engine_workers is for the engine ray; give --engine ray too, or leave it out")
        return
    if processes > 1:
        raise BadOption("--engine ray starts its own workers; run it without torchrun")
    _ray()


def _describe(
    forward: Forward, task: Task, folder: OutputFolder, parts: Sequence[Part], batch: int, options: RunOptions
) -> Work:
    """What the workers need.  The model is copied without its merging, which each worker applies again."""
    stack = installed(find_host(forward.model))
    recipe, runtime = (None, options.runtime) if stack is None else (stack.recipe, stack.selector.runtime)
    model = copy.deepcopy(remove(forward.model)).to("cpu")
    theirs = OutputFolder(Path(folder.path).absolute(), folder.job, folder.parts)
    how = replace(options, runtime=runtime, progress=False)
    kinds = {part.index: part for part in parts}
    return Work(model, forward.device.type, recipe, task, theirs, kinds, batch, how)


@contextmanager
def _connected(ray: Any, workers: int | None) -> Iterator[None]:
    """Use the Ray of this process; else connect to the cluster in RAY_ADDRESS, or start Ray here for this run."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            processors = max(os.cpu_count() or 1, workers or 1)
            ray.init(address="local", num_cpus=processors, include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises many types
        where = f"connect to RAY_ADDRESS={address}" if address else "start Ray on this machine"
        raise BadOption(f"cannot {where}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _count_workers(ray: Any, device: torch.device, wanted: int | None) -> int:
    """How many workers to start: one for each GPU, or for two processors."""
    there = ray.cluster_resources()
    cards = int(there.get("GPU", 0))
    if device.type == "cuda" and not cards:
        raise BadOption("Ray has no GPU here, and the model is on cuda; start Ray on machines with GPUs, or use cpu")
    if wanted is not None:
        return wanted
    return cards if device.type == "cuda" else max(1, int(there.get("CPU", 1)) // 2)


def _results(ray: Any, work: Work, workers: int) -> Iterator[dict[str, Any]]:
    """The rows of all parts, as they are made."""
    data = import_package("ray.data", WHAT, "ray")
    indices = [{"part": index} for index in work.parts]
    with _only_errors_shown(data):
        rows = data.from_items(indices, override_num_blocks=len(indices)).map(
            PartWorker,
            fn_constructor_args=(ray.put(work),),
            compute=data.ActorPoolStrategy(size=workers),
            num_cpus=1,
            num_gpus=1 if work.device == "cuda" else 0,
        )
        try:
            for row in rows.iter_rows():
                _raise_error(json.loads(row["error"]))
                yield row
        except ray.exceptions.RayError as error:
            said = " ".join(str(error).split())[-300:]
            raise ProcessLost(
                f"Ray could not finish the run: {said}. Run the same command again; finished files are kept."
            ) from error


@contextmanager
def _only_errors_shown(data: Any) -> Iterator[None]:
    """Keep Ray Data's plans, times and progress bars out of the command's output."""
    context, logger = data.DataContext.get_current(), logging.getLogger("ray.data")
    levels, bars = [(one, one.level) for one in (logger, *logger.handlers)], context.enable_progress_bars
    context.enable_progress_bars = False
    for one, _ in levels:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        for one, level in levels:
            one.setLevel(level)


def _raise_error(error: list[str] | None) -> None:
    """Raise the error that ended a worker's part, if one did."""
    if error is not None:
        name, message = error
        raise getattr(errors, name, torch.OutOfMemoryError)(message)


def _ray() -> Any:
    return import_package("ray", WHAT, "ray")
