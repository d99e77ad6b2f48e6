"""The command `adamerge reproduce`: the paper's tables and claims, measured on the embedded model or on another."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

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
    report_unreadable,
)
from adamerge.cli.report import show_page
from adamerge.core.errors import BadOption
from adamerge.core.files import check_can_write

if TYPE_CHECKING:
    from adamerge.experiments.reproduce import Section

COLOURS = {"holds": "green", "does not hold": "red", "cannot tell": "yellow", "not applicable": "bright_black"}


Parts = Annotated[list[str], typer.Argument(help="table1, table2, ablation, layers, refinement, proposition, or all.")]
Data = Annotated[str, typer.Option("--data", help="An ImageFolder to evaluate on, or 'embedded'.")]
Calibration = Annotated[
    str | None, typer.Option("--calibration", help="An ImageFolder to calibrate on; by default 1 % of --data.")
]
Images = Annotated[int | None, typer.Option("--images", help="Evaluate on this many images.")]
CalibrationImages = Annotated[int | None, typer.Option("--calibration-images", help="Calibrate on this many images.")]
Runs = Annotated[int, typer.Option("--runs", help="Repeat table 1 this often, for mean ± std.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the report and its data.")]


def reproduce(
    parts: Parts,
    model: Model = EMBEDDED,
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    data: Data = EMBEDDED,
    calibration: Calibration = None,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    images: Images = None,
    calibration_images: CalibrationImages = None,
    runs: Runs = 1,
    batch_size: BatchSize = 48,
    workers: Workers = 2,
    out: Out = Path("adamerge-reproduce"),
    skip_bad: SkipBad = False,
) -> None:
    """Measure the paper's tables and claims, with verdicts.  An interrupted run continues where it stopped."""
    from adamerge.cli.loading import load_model
    from adamerge.experiments.reproduce import choose, embedded_experiment, folder_experiment, run

    choose(parts)
    check_can_write(out, folder=True)
    for flag, value in (("--runs", runs), ("--batch-size", batch_size), ("--images", images)):
        if value is not None and value < 1:
            raise BadOption(f"{flag} must be at least 1; got {value}")
    if data == EMBEDDED and (model != EMBEDDED or calibration not in (None, EMBEDDED)):
        raise BadOption(
            "the generated images carry the labels of the embedded model; give your own images with --data FOLDER, and "
            "--calibration FOLDER to calibrate on others"
        )
    net = load_model(model, weights, pretrained, device, dtype, num_classes=num_classes)
    sizes: dict[str, Any] = {"images": images, "calibration_images": calibration_images, "batch_size": batch_size}
    if data == EMBEDDED:
        experiment, readers = embedded_experiment(model=net, device=device, **sizes), []
    else:
        experiment, readers = folder_experiment(net, data, calibration, name=model, workers=workers, **sizes)
    for text in experiment.notes:
        console.print(f"note: {text}", markup=False, highlight=False)
    run(parts, replace(experiment, runs=runs), out, each=show)
    console.print(f"wrote {out / 'report.md'}", highlight=False)
    show_page([out])
    complaints = [complaint for reader in readers if (complaint := reader.complaint())]
    advice = "The report is for the others; pass --skip-bad to accept that."
    report_unreadable("; ".join(complaints) or None, skip_bad, advice)


def show(section: "Section") -> None:
    """Print the tables, the claims with verdicts, and the notes of a finished part."""
    console.rule(section.title)
    for grid in section.grids:
        # As Text: rich would take the brackets of E[r_l] for markup.
        table = Table(*(column.title for column in grid.columns), title=Text(grid.title))
        for row in grid.cells():
            table.add_row(*map(Text, row))
        console.print(table)
    if section.claims:
        table = Table("the paper says", "paper", "here", "verdict", title="claims", show_lines=True)
        for claim in section.claims:
            table.add_row(
                *map(Text, (claim.text, claim.paper, claim.ours)), Text(claim.verdict_text, COLOURS[claim.verdict])
            )
        console.print(table)
    for note in section.notes:
        console.print(f"• {note}", markup=False, highlight=False)
