"""The command `adamerge show`: what merging does to your images with your model, as pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adamerge.cli.flags import (
    EMBEDDED,
    Calibration,
    CalibrationImages,
    Device,
    Dtype,
    Model,
    NumClasses,
    Pretrained,
    Recipes,
    SkipBad,
    Weights,
    console,
    note,
    report_unreadable,
)
from adamerge.core.errors import BadImages
from adamerge.core.files import check_can_write

if TYPE_CHECKING:
    from torch import Tensor, nn

    from adamerge.data.inputs import Input

# Images of the user's that are calibrated on where no others are given, and how many are too few.
OWN_IMAGES, FEW = 64, 16
NAMED = 5

Paths = Annotated[list[str], typer.Argument(help="Image files, folders of images, or 'embedded' for generated ones.")]
Methods = Annotated[
    str | None,
    typer.Option(
        "--method", help="Methods of `adamerge methods`, or 'preset', separated by commas; preset by default."
    ),
]
Cut = Annotated[float, typer.Option("--cut", help="The share of the cost that every method saves.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the pictures; an interrupted run continues from it.")]
Html = Annotated[bool, typer.Option("--html", help="Also write one page of HTML for each image.")]
Svg = Annotated[bool, typer.Option("--svg/--no-svg", help="Write SVG beside PNG.")]
Animation = Annotated[str, typer.Option("--animation", help="webp, gif or none.")]


def show(
    images: Paths,
    out: Out = Path("adamerge-show"),
    model: Model = EMBEDDED,
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    method: Methods = None,
    recipe: Recipes = None,
    cut: Cut = 0.3,
    calibration: Calibration = None,
    calibration_images: CalibrationImages = 64,
    html: Html = False,
    svg: Svg = True,
    animation: Animation = "webp",
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    skip_bad: SkipBad = False,
) -> None:
    """Draw what merging does to images: salience, kept and merged patches, groups, tokens per layer, predictions.

    Several methods, separated by commas, are drawn side by side at equal cost.
    """
    from adamerge.cli.loading import load_model
    from adamerge.cli.shown_methods import make_recipes, read_wanted
    from adamerge.data.inputs import InputReader, find_inputs
    from adamerge.experiments.showing import ShowOptions, show_images

    check_can_write(out, folder=True)
    options = ShowOptions(svg=svg, animation=animation, html=html)
    paths, words = split_words(images)
    wanted = read_wanted(method, words, recipe or ())
    net = load_model(model, weights, pretrained, device, dtype, num_classes=num_classes)
    inputs = find_inputs(paths, video=InputReader(net).video)
    source = calibration if calibration is not None else EMBEDDED if model == EMBEDDED else None
    with console.status(f"finding the strength of {', '.join(wanted)} for a cut of {cut:.0%}"):
        recipes = make_recipes(net, wanted, cut, lambda: calibration_tensors(net, source, calibration_images, inputs))
    report = show_images(net, inputs, recipes, out, options, name=model)
    for files in list(report.written.values())[:NAMED]:
        for file in files:
            console.print(f"wrote {out / file}", soft_wrap=True, highlight=False)
    done = f"drew {len(report.written)} of {len(inputs)} images into {out}"
    more = f"; {report.skipped} were there already" if report.skipped else ""
    console.print(done + more, soft_wrap=True, highlight=False)
    complaint = None
    if report.unreadable:
        named = "; ".join(report.unreadable[:NAMED]) + ("; …" if len(report.unreadable) > NAMED else "")
        complaint = f"{len(report.unreadable)} of {len(inputs)} could not be read and were left out: {named}"
    report_unreadable(complaint, skip_bad, "Pass --skip-bad to accept that.")


def split_words(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths among the words of the command line, and the options of the method with their values.

    A word after an option is its value, unless it is a file or a folder.
    """
    paths: list[str] = []
    words: list[str] = []
    for word in given:
        after_option = bool(words) and words[-1].startswith("--") and "=" not in words[-1]
        if word.startswith("--") or (after_option and not Path(word).exists()):
            words.append(word)
        else:
            paths.append(word)
    if not paths:
        raise BadImages("there are no images to draw; give image files, folders, or 'embedded' for generated images")
    return paths, words


def calibration_tensors(
    model: "nn.Module", source: str | None, number: int, inputs: "Sequence[Input]"
) -> "Sequence[Tensor]":
    """Batches to calibrate on: of the source, or of the user's own images where none is given."""
    import torch

    from adamerge.cli.loading import load_data
    from adamerge.data.inputs import InputReader
    from adamerge.embedded.scene_generator import CALIBRATION_SEED

    if source is not None:
        known: dict[str, Any] = {"seed": CALIBRATION_SEED, "batch_size": 32, "workers": 0, "limit": number}
        return [images for images, _ in load_data(model, source, labelled=False, **known)]
    reader, found = InputReader(model), []
    for one in inputs[:OWN_IMAGES]:
        try:
            found.append(reader.read(one))
        except BadImages:
            continue  # named when it is drawn
    if not found:
        raise BadImages(f"none of the {len(inputs)} images can be read; give others")
    if len(found) < FEW:
        note(
            f"calibrating on the {len(found)} image(s) that are shown; for thresholds as in use, give --calibration "
            "FOLDER or --recipe FILE"
        )
    return list(torch.stack(found).split(32))
