"""The command `adamerge tune`: the best recipe for a model at a wanted cost, as one file."""

from pathlib import Path
from typing import Annotated

import typer

from adamerge.cli.flags import (
    EMBEDDED,
    BatchSize,
    Cost,
    Device,
    Dtype,
    Model,
    Pretrained,
    SkipBad,
    Weights,
    Workers,
    console,
    note,
)
from adamerge.core.errors import BadImages


def tune(
    out: Annotated[Path, typer.Option("--out", help="Where the recipe goes.")] = Path("recipe.json"),
    cut: Annotated[float | None, typer.Option("--cut", help="The share of the cost to save; 0.3 by default.")] = None,
    gmacs: Annotated[float | None, typer.Option("--gmacs", help="Instead of --cut, 10^9 MACs per image.")] = None,
    latency_ratio: Annotated[
        float | None, typer.Option("--latency-ratio", help="Instead of --cut, the share of time, measured here.")
    ] = None,
    cost: Cost = "true",
    model: Model = EMBEDDED,
    weights: Weights = None,
    pretrained: Pretrained = False,
    data: Annotated[str, typer.Option("--data", help="An ImageFolder, or 'embedded'; no labels are used.")] = EMBEDDED,
    limit: Annotated[int, typer.Option("--images", help="Tune on this many images, spread over the folder.")] = 256,
    loss: Annotated[str | None, typer.Option("--loss", help="kl or features; by default what the model gives.")] = None,
    static: Annotated[bool, typer.Option("--static", help="Merge the same number in every image.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the order in which changes are tried.")] = 0,
    tries: Annotated[int, typer.Option("--tries", help="How many recipes to try.")] = 100,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Seconds after which the best so far is taken.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="A file that keeps what was tried, to go on from.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    skip_bad: SkipBad = False,
) -> None:
    """Find the recipe that changes a model's output least at a wanted cost; no labels, no training."""
    from adamerge.cli.loading import load_data, load_model
    from adamerge.embedded.scene_generator import CALIBRATION_SEED
    from adamerge.search.options import TuningOptions
    from adamerge.search.tuner import tune_with_report

    # Before the model and the images are read: an option that means nothing is refused at once.
    options = TuningOptions(
        cut=cut,
        cost=cost,  # pyright: ignore[reportArgumentType]
        gmacs=gmacs,
        latency_ratio=latency_ratio,
        loss=loss,  # pyright: ignore[reportArgumentType]
        static=static,
        seed=seed,
        tries=tries,
        time_limit=time_limit,
        resume=resume,
    )
    net = load_model(model, weights, pretrained, device, dtype)
    shown = load_data(
        net, data, seed=CALIBRATION_SEED, batch_size=batch_size, workers=workers, limit=limit, labelled=False
    )
    images = [batch for batch, _ in shown]
    complaint = shown.complaint()
    if complaint is not None and not skip_bad:
        raise BadImages(f"{complaint}. Pass --skip-bad to tune on the others.")
    found = tune_with_report(net, images, options)
    found.recipe.save(out)
    console.print(str(found), highlight=False)
    if complaint is not None:
        note(complaint)
    console.print(f"wrote {out}; use it with adamerge.apply(model, {str(out)!r})", highlight=False, soft_wrap=True)
