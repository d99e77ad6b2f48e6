"""The command `adamerge finetune`: trains a model on labelled images while it merges."""

from pathlib import Path
from typing import Annotated, Any

import typer

from adamerge.cli.flags import (
    EMBEDDED,
    Calibration,
    CalibrationImages,
    Device,
    Limit,
    Method,
    Model,
    NumClasses,
    Pretrained,
    Weights,
    Workers,
    console,
    note,
)
from adamerge.core.files import check_can_write

Out = Annotated[Path, typer.Option("--out", help="Folder for weights, recipe, figures and the checkpoint.")]
Data = Annotated[str, typer.Option("--data", help="An ImageFolder to train on, or 'embedded'.")]
Judge = Annotated[
    str | None, typer.Option("--judge", help="An ImageFolder to measure top-1 on, at first and after each epoch.")
]
Epochs = Annotated[int, typer.Option("--epochs", help="Passes over the images.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="The largest learning rate.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Images in a batch.")]
Accumulate = Annotated[int, typer.Option("--accumulate", help="Batches in a step.")]
WarmUp = Annotated[int, typer.Option("--warm-up", help="Epochs in which the learning rate rises.")]
Ema = Annotated[float, typer.Option("--ema", help="Decay of the moving average of the weights; 0: none.")]
Distillation = Annotated[float, typer.Option("--distillation", help="Share of the loss to the unmerged model.")]
LabelSmoothing = Annotated[float, typer.Option("--label-smoothing", help="Share of the target of all classes.")]
WeightDecay = Annotated[float, typer.Option("--weight-decay", help="Of weights; norms and biases have none.")]
Mixup = Annotated[float, typer.Option("--mixup", help="Strength of mixup; 0: none.")]
Augment = Annotated[str, typer.Option("--augment", help="timm's auto-augmentation, such as rand-m9-mstd0.5; or none.")]
MixedPrecision = Annotated[bool, typer.Option("--mixed-precision", help="Compute in bfloat16 by autocast.")]
Recalibrate = Annotated[int, typer.Option("--recalibrate", help="Calibrate again every so many epochs; 0: never.")]
SaveEvery = Annotated[int, typer.Option("--save-every", help="Steps between two checkpoints.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of order, augmentation and dropout.")]


def finetune(
    context: typer.Context,
    out: Out = Path("adamerge-finetuned"),
    model: Model = EMBEDDED,
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    data: Data = EMBEDDED,
    judge: Judge = None,
    method: Method = "preset",
    calibration: Calibration = None,
    calibration_images: CalibrationImages = 256,
    epochs: Epochs = 30,
    learning_rate: LearningRate = 5e-6,
    batch_size: BatchSize = 64,
    accumulate: Accumulate = 1,
    warm_up: WarmUp = 0,
    ema: Ema = 0.0,
    distillation: Distillation = 0.0,
    label_smoothing: LabelSmoothing = 0.0,
    weight_decay: WeightDecay = 0.05,
    mixup: Mixup = 0.0,
    augment: Augment = "rand-m9-mstd0.5-inc1",
    mixed_precision: MixedPrecision = False,
    recalibrate: Recalibrate = 5,
    save_every: SaveEvery = 100,
    seed: Seed = 0,
    device: Device = "cpu",
    workers: Workers = 2,
    limit: Limit = None,
) -> None:
    """Train a model on labelled images while it merges with a method or a recipe.

    A run that was stopped continues when it is called again with the same --out.
    """
    given = dict(locals())
    from adamerge.cli.chosen_method import make_calibrated, read_choice
    from adamerge.cli.loading import load_data, load_model
    from adamerge.cli.training_data import training_data
    from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
    from adamerge.finetuning.options import FinetuneOptions
    from adamerge.finetuning.trainer import finetune as train

    options = FinetuneOptions(**{name: given[name] for name in vars(FinetuneOptions()) if name in given})
    check_can_write(out, folder=True)
    _, choice = read_choice(method, context.args)
    net = load_model(model, weights, pretrained, device, "fp32", num_classes=num_classes)
    images = training_data(net, data, limit, augment)
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    known = {"seed": CALIBRATION_SEED, "limit": options.calibration_images, "labelled": False, **reading}
    source = calibration if calibration is not None else data
    recipe = make_calibrated(choice, net, lambda: load_data(net, source, **known), given=True)
    judged = EMBEDDED if judge is None and data == EMBEDDED else judge
    batches = None if judged is None else load_data(net, judged, seed=TEST_SEED, limit=limit, **reading)
    train(net, images, recipe, out, judge=batches, options=options)
    _tell(out, model, None if batches is None else batches.complaint())


def _tell(out: Path, model: str, complaint: str | None) -> None:
    """Say what became better, what was written, how to use it, and which images could not be read."""
    from adamerge.finetuning.outputs import RunFolder

    judged = RunFolder(out).figures("top1")
    if judged:
        console.print(f"top-1 {judged[0]:.2%} before, {judged[-1]:.2%} after", highlight=False)
    weights, recipe = out / "model.safetensors", out / "adamerge.json"
    console.print(f"wrote {weights} and {recipe}; use them with", soft_wrap=True, highlight=False)
    console.print(
        f"adamerge eval --model {model} --weights {weights} --recipe {recipe}", soft_wrap=True, highlight=False
    )
    if complaint is not None:
        note(complaint)
