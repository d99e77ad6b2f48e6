"""The options that several commands share, and where they print."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

EMBEDDED = "embedded"
console = Console()
problems = Console(stderr=True)

Model = Annotated[
    str, typer.Option("--model", help="A timm model name, 'embedded', transformers:FOLDER or torchvision:NAME.")
]
Weights = Annotated[Path | None, typer.Option("--weights", help="A safetensors file for the model.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download the library's own weights.")]
Data = Annotated[str, typer.Option("--data", help="An ImageFolder (root/class/image), or 'embedded'.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
Dtype = Annotated[str, typer.Option("--dtype", help="fp32, bf16 or fp16.")]
BatchSize = Annotated[int, typer.Option("--batch-size")]
Workers = Annotated[int, typer.Option("--workers", help="Processes that read images.")]
Limit = Annotated[int | None, typer.Option("--images", help="Use this many images, spread over the folder.")]
Native = Annotated[
    list[str] | None, typer.Option("--native", help="A method by its own parameters, tome:r=8; may be repeated.")
]
CalibrationImages = Annotated[int, typer.Option("--calibration-images", help="How many to calibrate on.")]
Cost = Annotated[str, typer.Option("--cost", help="The count of multiply-accumulates to use: true or paper.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Succeed although some image files cannot be read.")]


def note(text: object) -> None:
    """Tell what a user should know although the command succeeds."""
    problems.print(f"note: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)
