"""The command `adamerge repair`: wins back a part of what merging with a recipe lost; writes the repaired recipe."""

from pathlib import Path
from typing import Annotated, Any

import typer

from adamerge.cli.flags import (
    EMBEDDED,
    BatchSize,
    Device,
    Dtype,
    Model,
    NumClasses,
    Pretrained,
    SkipBad,
    Weights,
    Workers,
    console,
    note,
    report_unreadable,
    save,
)
from adamerge.core.files import check_can_write

RecipeFile = Annotated[Path, typer.Option("--recipe", help="The recipe to repair, such as `adamerge tune` writes.")]
Out = Annotated[Path, typer.Option("--out", help="The file for the repaired recipe; its patch is written beside it.")]
Data = Annotated[str, typer.Option("--data", help="An ImageFolder, or 'embedded'; no labels are used.")]
Images = Annotated[int, typer.Option("--images", help="Repair on this many images, spread over the folder.")]
Loss = Annotated[str | None, typer.Option("--loss", help="kl or features; by default kl if the model gives logits.")]
Epochs = Annotated[int | None, typer.Option("--epochs", help="Passes over the images.")]
LearningRate = Annotated[float | None, typer.Option("--learning-rate", help="The largest learning rate.")]
StepImages = Annotated[int | None, typer.Option("--step-images", help="Images in a step of the training.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the crops and of the order of the images.")]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="A file that keeps the training; a stopped one continues from it.")
]


def repair(
    recipe: RecipeFile,
    out: Out = Path("repaired.json"),
    model: Model = EMBEDDED,
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    data: Data = EMBEDDED,
    limit: Images = 512,
    loss: Loss = None,
    epochs: Epochs = None,
    learning_rate: LearningRate = None,
    step_images: StepImages = None,
    seed: Seed = 0,
    resume: Resume = None,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    skip_bad: SkipBad = False,
) -> None:
    """Win back a part of what merging with a recipe lost; no labels.  Norms and biases are trained."""
    from adamerge.cli.loading import load_data, load_model
    from adamerge.core.recipe import Recipe
    from adamerge.embedded.scene_generator import CALIBRATION_SEED
    from adamerge.repairing.options import RepairOptions
    from adamerge.repairing.repairer import repair_with_report

    # Made first, so that wrong options are refused before the model and the images are read.
    given: dict[str, Any] = {"loss": loss, "epochs": epochs, "learning_rate": learning_rate, "batch_size": step_images}
    given |= {"seed": seed, "resume": resume}
    options = RepairOptions(**{name: value for name, value in given.items() if value is not None})
    check_can_write(out)
    merging = Recipe.load(recipe)
    net = load_model(model, weights, pretrained, device, dtype, num_classes=num_classes)
    shown = load_data(
        net, data, seed=CALIBRATION_SEED, batch_size=batch_size, workers=workers, limit=limit, labelled=False
    )
    images = [batch for batch, _ in shown]
    report_unreadable(shown.complaint(), skip_bad, "Pass --skip-bad to repair on the others.")
    found = repair_with_report(net, images, merging, options)
    console.print(str(found), highlight=False)
    if not found.repaired:
        note("the held-out images lose more with the changes; more images (--images) or fewer --epochs may help")
    save(found.recipe, out)
    console.print(f"use it with adamerge.apply(model, {str(out)!r})", highlight=False, soft_wrap=True)
