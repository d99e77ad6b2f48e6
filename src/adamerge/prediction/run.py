"""Runs a model over a source and writes one parquet file for each part; a stopped run continues where it stopped."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from adamerge.core.errors import BadOption
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.data.folders import preprocessing
from adamerge.digest import digest_json, identify_model
from adamerge.distributed import from_first, in_order, my_share, place
from adamerge.hosts.base import find_host
from adamerge.patching.apply import apply, temporarily_patched
from adamerge.patching.stack import installed
from adamerge.prediction.batch_size import images_in_batch
from adamerge.prediction.forward import Forward, default_batch_tokens
from adamerge.prediction.output_folder import OutputFolder
from adamerge.prediction.part_files import check_pyarrow, is_finished
from adamerge.prediction.part_run import RunOptions, run_parts
from adamerge.prediction.ray_engine import check_engine, run_parts_on_ray
from adamerge.prediction.report import PredictionReport, make_report
from adamerge.prediction.sources import Source
from adamerge.prediction.tasks import Task
from adamerge.runtime.backend import Runtime


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
    check_engine(options, place().world)
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
            if options.engine == "ray":
                spent, failed = run_parts_on_ray(forward, task, folder, mine, batch, options)
            else:
                done = run_parts(forward, folder, mine, batch, options)
                spent, failed = done.clock.spent(), done.failed
            clocks, failed = in_order([spent]), in_order(failed)
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
