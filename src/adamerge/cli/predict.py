"""The commands `adamerge predict` and `adamerge embed`: a model over many images, results as parquet files."""

from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adamerge.cli.flags import (
    EMBEDDED,
    Device,
    Dtype,
    Limit,
    Method,
    Model,
    NumClasses,
    Pretrained,
    SkipBad,
    Weights,
    Workers,
    console,
    report_unreadable,
)
from adamerge.core.errors import BadOption
from adamerge.core.files import check_can_write

if TYPE_CHECKING:
    from torch import nn

    from adamerge.prediction.sources import Source
    from adamerge.prediction.tasks import Task

ADVICE = "The results of the others are written; pass --skip-bad to accept that."

Out = Annotated[Path, typer.Option("--out", help="Folder for the parquet files; a stopped run continues from it.")]
Data = Annotated[
    str, typer.Option("--data", help="A folder of images, WebDataset shards or parquet files, or 'embedded'.")
]
ImageColumn = Annotated[str | None, typer.Option("--image-column", help="The column of images in parquet files.")]
IdColumn = Annotated[str | None, typer.Option("--id-column", help="The column of ids in parquet files.")]
Top = Annotated[int, typer.Option("--top", help="How many classes to write for each image.")]
Runtime = Annotated[str, typer.Option("--runtime", help="auto, reference or packed. auto packs for inference.")]
BatchTokens = Annotated[
    int | None, typer.Option("--batch-tokens", help="Tokens in a batch, averaged over the blocks; fits the device.")
]
Engine = Annotated[str, typer.Option("--engine", help="local: this process; ray: workers of Ray, see RAY_ADDRESS.")]
EngineWorkers = Annotated[
    int | None, typer.Option("--engine-workers", help="Workers of Ray; by default one for each GPU or two processors.")
]
ShardSize = Annotated[int, typer.Option("--shard-size", help="Images in an output file, for a folder.")]


def predict(
    context: typer.Context,
    out: Out,
    model: Model = EMBEDDED,
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    data: Data = EMBEDDED,
    method: Method = "none",
    top: Top = 5,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    batch_tokens: BatchTokens = None,
    shard_size: ShardSize = 4096,
    image_column: ImageColumn = None,
    id_column: IdColumn = None,
    workers: Workers = 2,
    limit: Limit = None,
    skip_bad: SkipBad = False,
    runtime: Runtime = "auto",
    engine: Engine = "local",
    engine_workers: EngineWorkers = None,
) -> None:
    """Write the most likely classes of many images to parquet files; a stopped run continues."""
    options = dict(locals())
    from adamerge.prediction.tasks import TopClasses

    _run(TopClasses(options.pop("top")), **options)


def embed(**options: Any) -> None:
    """Write a feature vector of many images to parquet files; a stopped run continues."""
    from adamerge.prediction.tasks import Features

    _run(Features(), **options)


# typer reads the options of a command from its signature: those of `predict`, but no number of classes.
embed.__signature__ = Signature(  # pyright: ignore[reportFunctionMemberAccess]
    [each for each in signature(predict).parameters.values() if each.name != "top"]
)

LOADING = ("weights", "num_classes", "pretrained", "device", "dtype")
READING = ("data", "limit", "shard_size", "image_column", "id_column")


def _run(
    task: "Task", context: typer.Context, out: Path, model: str, method: str, skip_bad: bool, **options: Any
) -> None:
    """Read the options, run, and report.  Those that neither load the model nor find images are the run's own."""
    from adamerge.cli.loading import load_model
    from adamerge.cli.options import read_recipe
    from adamerge.prediction.part_run import RunOptions
    from adamerge.prediction.run import run

    loading, reading = ({name: options.pop(name) for name in names} for names in (LOADING, READING))
    check_can_write(out, folder=True)
    recipe = read_recipe(method, context.args)
    net = load_model(model, **loading)
    source = _source(net, **reading)
    found = run(net, source, out, recipe, task, RunOptions(**options))
    console.print(str(found), soft_wrap=True, highlight=False)
    report_unreadable(found.complaint(), skip_bad, ADVICE)


def _source(
    model: "nn.Module",
    data: str,
    limit: int | None,
    shard_size: int,
    image_column: str | None,
    id_column: str | None,
) -> "Source":
    from adamerge.embedded.scene_generator import TEST_SEED
    from adamerge.hosts.base import find_host
    from adamerge.prediction.locate import find_source
    from adamerge.prediction.parquet_shards import ColumnNames
    from adamerge.prediction.sources import drawn_source

    if limit is not None and limit < 1:
        raise BadOption(f"--images must be at least 1; got {limit}")
    if data == EMBEDDED:
        size = find_host(model).image[-1]
        return drawn_source(limit if limit is not None else 1024, seed=TEST_SEED, size=size, shard_size=shard_size)
    return find_source(data, shard_size=shard_size, limit=limit, columns=ColumnNames(image_column, id_column))
