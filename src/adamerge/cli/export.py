"""The command `adamerge export`: a merged model as a file of another engine."""

from pathlib import Path
from typing import Annotated, Any

import typer

from adamerge.cli.flags import (
    EMBEDDED,
    Calibration,
    CalibrationImages,
    Data,
    Device,
    Dtype,
    Method,
    Model,
    NumClasses,
    Pretrained,
    SkipBad,
    Weights,
    Workers,
    calibration_source,
    console,
    report_unreadable,
)
from adamerge.core.files import check_can_write

Kind = Annotated[str, typer.Option("--format", help="onnx, openvino, torch or aoti.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="The file to write; by default `model` with the format's suffix.")
]
Images = Annotated[int, typer.Option("--images", min=1, help="How many images to compare the file with the model on.")]


def export(
    context: typer.Context,
    model: Model = EMBEDDED,
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    data: Data = EMBEDDED,
    method: Method = "tome",
    format: Kind = "onnx",
    out: Out = None,
    images: Images = 64,
    calibration: Calibration = None,
    calibration_images: CalibrationImages = 256,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    workers: Workers = 2,
    skip_bad: SkipBad = False,
) -> None:
    """Write a merged model as an ONNX, OpenVINO, torch.export or AOTInductor file, checked on images."""
    from adamerge.cli.chosen_method import PresetChoice, make_calibrated, read_choice
    from adamerge.cli.loading import load_data, load_model
    from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
    from adamerge.exporting.api import export as write
    from adamerge.exporting.formats import find_format, target_path

    target = target_path(format, out)
    check_can_write(target)
    find_format(format).check_installed()
    method, choice = read_choice(method, context.args)
    source = calibration_source(data, calibration) if isinstance(choice, PresetChoice) else calibration
    net = load_model(model, weights, pretrained, device, dtype, num_classes=num_classes)
    reading: dict[str, Any] = {"batch_size": 64, "workers": workers, "labelled": False}
    known = {"seed": CALIBRATION_SEED, "limit": calibration_images, **reading}
    recipe = make_calibrated(choice, net, lambda: load_data(net, str(source), **known), given=source is not None)
    batches = load_data(net, data, seed=TEST_SEED, limit=images, **reading)
    made = write(net, batches, format, target, recipe=recipe)
    console.print(f"wrote {made.path}: {made.check}", soft_wrap=True, highlight=False, markup=False)
    report_unreadable(batches.complaint(), skip_bad, "The file was written, and compared on the others.")
