"""The command `adamerge tune`: searches a recipe for a model at a given cost and writes it to a file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from adamerge.cli.flags import (
    EMBEDDED,
    BatchSize,
    Cost,
    Device,
    Dtype,
    Model,
    NumClasses,
    Pretrained,
    SkipBad,
    Weights,
    Workers,
    console,
    report_unreadable,
    save,
)
from adamerge.core.files import check_can_write

Out = Annotated[Path, typer.Option("--out", help="The file to write the recipe to.")]
Cut = Annotated[float | None, typer.Option("--cut", help="The share of the cost to save; 0.3 by default.")]
Gmacs = Annotated[float | None, typer.Option("--gmacs", help="Instead of --cut, 10^9 MACs per image.")]
LatencyRatio = Annotated[
    float | None,
    typer.Option("--latency-ratio", help="Instead of --cut, the share of the unmerged model's time, measured here."),
]
Data = Annotated[str, typer.Option("--data", help="An ImageFolder, or 'embedded'; no labels are used.")]
Images = Annotated[int, typer.Option("--images", help="Tune on this many images, spread over the folder.")]
Loss = Annotated[str | None, typer.Option("--loss", help="kl or features; by default kl if the model gives logits.")]
Static = Annotated[bool, typer.Option("--static", help="Merge the same number in every image.")]
MergeEvery = Annotated[
    int | None,
    typer.Option("--merge-every", help="Merge at every k-th block only; with --latency-ratio, what loses least."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the order in which changes are tried.")]
Tries = Annotated[int, typer.Option("--tries", help="How many recipes to try.")]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", help="Seconds after which the search ends with the best so far.")
]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="A file that keeps what was tried; a stopped search continues from it.")
]


def tune(
    out: Out = Path("recipe.json"),
    cut: Cut = None,
    gmacs: Gmacs = None,
    latency_ratio: LatencyRatio = None,
    cost: Cost = "true",
    model: Model = EMBEDDED,
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    data: Data = EMBEDDED,
    limit: Images = 256,
    loss: Loss = None,
    static: Static = False,
    merge_every: MergeEvery = None,
    seed: Seed = 0,
    tries: Tries = 100,
    time_limit: TimeLimit = None,
    resume: Resume = None,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    skip_bad: SkipBad = False,
) -> None:
    """Find the recipe that changes a model's output least at a given cost; no labels, no training."""
    from adamerge.cli.loading import load_data, load_model
    from adamerge.embedded.scene_generator import CALIBRATION_SEED
    from adamerge.search.options import TuningOptions
    from adamerge.search.tuner import tune_with_report

    # Made first, so that wrong options are refused before the model and the images are read.
    given: dict[str, Any] = {"cut": cut, "gmacs": gmacs, "latency_ratio": latency_ratio, "cost": cost, "loss": loss}
    given |= {"static": static, "merge_every": merge_every, "seed": seed, "tries": tries, "time_limit": time_limit}
    given |= {"resume": resume}
    options = TuningOptions(**given)
    check_can_write(out)
    net = load_model(model, weights, pretrained, device, dtype, num_classes=num_classes)
    shown = load_data(
        net, data, seed=CALIBRATION_SEED, batch_size=batch_size, workers=workers, limit=limit, labelled=False
    )
    images = [batch for batch, _ in shown]
    report_unreadable(shown.complaint(), skip_bad, "Pass --skip-bad to tune on the others.")
    found = tune_with_report(net, images, options)
    console.print(str(found), highlight=False)
    save(found.recipe, out)
    console.print(f"use it with adamerge.apply(model, {str(out)!r})", highlight=False, soft_wrap=True)
