"""Options that several commands share, and the consoles that they print to."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from adamerge.core.errors import BadImages, BadOption, BadOutput

if TYPE_CHECKING:
    from adamerge.core.recipe import Recipe
    from adamerge.core.stats import LayerStats

EMBEDDED = "embedded"
FIGURES_ADVICE = "The figures above are for the others; pass --skip-bad to accept that."
console = Console()
problems = Console(stderr=True)


def _check_calibration(number: int) -> int:
    if number < 1:
        raise BadOption(f"--calibration-images must be at least 1; got {number}")
    return number


def _check_workers(number: int) -> int:
    if number < 0:
        raise BadOption(f"--workers must be at least 0; got {number}")
    return number


Model = Annotated[
    str, typer.Option("--model", help="A timm model name, 'embedded', transformers:FOLDER or torchvision:NAME.")
]
Method = Annotated[
    str,
    typer.Option(
        "--method", help="A method of `adamerge methods`, or 'preset', followed by its options; or use --recipe FILE."
    ),
]
RandomWeights = Annotated[Path | None, typer.Option("--weights", help="A safetensors file; random weights by default.")]
Weights = Annotated[Path | None, typer.Option("--weights", help="A safetensors file for the model.")]
NumClasses = Annotated[
    int | None, typer.Option("--num-classes", help="Classes of the head in --weights, if not the model's own number.")
]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download the library's own weights.")]
Data = Annotated[str, typer.Option("--data", help="An ImageFolder (root/class/image), or 'embedded'.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
Dtype = Annotated[str, typer.Option("--dtype", help="fp32, bf16 or fp16.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Images in a batch.")]
Workers = Annotated[
    int, typer.Option("--workers", callback=_check_workers, help="Processes that read images; 0: this one.")
]
Limit = Annotated[int | None, typer.Option("--images", help="Use this many images, spread over the folder.")]
Native = Annotated[
    list[str] | None, typer.Option("--native", help="A method by its own parameters, such as tome:r=8; repeatable.")
]
CalibrationImages = Annotated[
    int, typer.Option("--calibration-images", callback=_check_calibration, help="How many images to calibrate on.")
]
Cost = Annotated[
    str, typer.Option("--cost", help="How multiply-accumulates are counted: true (all) or paper (blocks only).")
]
Recipes = Annotated[
    list[Path] | None, typer.Option("--recipe", help="A recipe file, such as `adamerge tune` writes; repeatable.")
]
Calibration = Annotated[
    str | None,
    typer.Option("--calibration", help="Images to calibrate on: another folder, or 'embedded'; labels are not used."),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Succeed although some image files cannot be read.")]


def calibration_source(data: str, calibration: str | None) -> str:
    """Where the images to calibrate on come from: other ones than those in `data`."""
    if calibration is None and data != EMBEDDED:
        raise BadOption(
            "methods are calibrated on images other than those they are judged on: give --calibration FOLDER, "
            "such as a part of the training set; its labels are not used"
        )
    return calibration if calibration is not None else EMBEDDED


def note(text: object) -> None:
    """Print a note to stderr; the command still succeeds."""
    if console.quiet:
        return
    problems.print(f"note: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def notes_for_warnings() -> Iterator[None]:
    """Print the warnings of the library as notes, without the lines of code that they come from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where, **more: note(message)
        yield


def save(result: "LayerStats | Recipe", path: Path) -> None:
    """Write a result that took long to find; if that fails, print it as the file would have been."""
    from adamerge.distributed import is_first

    if not is_first():
        return
    try:
        result.save(path)
    except BadOutput:
        console.print("the content of the file that could not be written:", result.file_text(), sep="\n", markup=False)
        raise
    console.print(f"wrote {path}", soft_wrap=True, highlight=False)


def report_unreadable(complaint: str | None, skip_bad: bool, advice: str = "") -> None:
    """Fail with `complaint` and `advice` if some files could not be read; with `skip_bad`, only print a note."""
    if complaint is None:
        return
    if not skip_bad:
        raise BadImages(f"{complaint}. {advice}")
    note(complaint)
