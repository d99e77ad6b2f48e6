"""The functions `adamerge.predict` and `adamerge.embed`."""

import os

from torch import nn

from adamerge.core.recipe import Recipe
from adamerge.prediction.locate import find_source
from adamerge.prediction.part_run import Engine, RunOptions
from adamerge.prediction.report import PredictionReport
from adamerge.prediction.run import run
from adamerge.prediction.sources import SHARD_SIZE, Source
from adamerge.prediction.tasks import Features, TopClasses
from adamerge.runtime.backend import Runtime

Data = str | os.PathLike[str] | Source


def predict(
    model: nn.Module,
    data: Data,
    out: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    top: int = 5,
    runtime: Runtime = "auto",
    batch_tokens: int | None = None,
    shard_size: int = SHARD_SIZE,
    workers: int = 2,
    progress: bool = True,
    engine: Engine = "local",
    engine_workers: int | None = None,
) -> PredictionReport:
    """Write the most likely classes of every image in `data` to parquet files in the folder `out`.

    A run that was stopped, at any moment and in any way, continues when it is called again with the same arguments:
    finished files are kept, and every image is in exactly one file.  On a CPU the files are then the same to the byte.
    A folder with results of another model, recipe or input is refused.

    Args:
        model: a supported classifier; it is restored afterwards.
        data: a folder of images; WebDataset shards or parquet files, as a folder of them, a pattern
            (`shards/*.tar`, `shards/{000..099}.tar`) or one file; or a `Source`.  Each shard gives one output file.
        out: the folder for the results.  Columns: `id`, `path`, `classes`, `probabilities`, `tokens` (patch tokens
            that the image kept).  Images that cannot be read are in the tables of the folder `_unreadable` there.
        recipe: what to merge; by default the model runs as it is.
        top: how many classes to write.
        runtime: as in `adamerge.apply`.
        batch_tokens: tokens in a batch, averaged over the blocks; more images fit where more tokens merge.
        shard_size: images in an output file, for a folder of images.
        workers: processes that read images; 0 reads in this one.
        progress: show a progress bar.
        engine: "local" runs the model in this process; "ray" in workers of Ray Data, on the cluster in RAY_ADDRESS or
            on this machine.  Each worker makes one file at a time.
        engine_workers: how many workers Ray starts; by default one for each GPU, or one for two processors.
    """
    options = RunOptions(runtime, batch_tokens, workers, progress, engine, engine_workers)
    return run(model, _source(data, shard_size), out, _read(recipe), TopClasses(top), options)


def embed(
    model: nn.Module,
    data: Data,
    out: str | os.PathLike[str],
    recipe: Recipe | str | os.PathLike[str] | None = None,
    *,
    runtime: Runtime = "auto",
    batch_tokens: int | None = None,
    shard_size: int = SHARD_SIZE,
    workers: int = 2,
    progress: bool = True,
    engine: Engine = "local",
    engine_workers: int | None = None,
) -> PredictionReport:
    """Write a feature vector of every image in `data` to parquet files in the folder `out`.

    The features are what enters the classifier, or the pooled output of a model without one, in float32.  Columns:
    `id`, `path`, `features`, `tokens`.  The arguments, and how a stopped run continues, are those of
    `adamerge.predict`.
    """
    options = RunOptions(runtime, batch_tokens, workers, progress, engine, engine_workers)
    return run(model, _source(data, shard_size), out, _read(recipe), Features(), options)


def _read(recipe: Recipe | str | os.PathLike[str] | None) -> Recipe | None:
    return Recipe.load(recipe) if isinstance(recipe, (str, os.PathLike)) else recipe


def _source(data: Data, shard_size: int) -> Source:
    return data if isinstance(data, Source) else find_source(os.fspath(data), shard_size=shard_size)
