"""`adamerge reproduce`: the paper's tables and claims on the embedded model, or on yours."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from adamerge.cli.flags import EMBEDDED, BatchSize, Device, Dtype, Model, Pretrained, SkipBad, Weights, Workers, console
from adamerge.core.errors import BadImages, BadOption

if TYPE_CHECKING:
    from adamerge.experiments.reproduce import Section

COLOURS = {"holds": "green", "does not hold": "red", "cannot tell": "yellow", "not applicable": "bright_black"}


def reproduce(
    parts: Annotated[list[str], typer.Argument(help="table1, table2, ablation, layers, refinement, proposition, all.")],
    model: Model = EMBEDDED,
    weights: Weights = None,
    pretrained: Pretrained = False,
    data: Annotated[str, typer.Option("--data", help="An ImageFolder to evaluate on, or 'embedded'.")] = EMBEDDED,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="An ImageFolder to calibrate on; else 1 % of --data.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    images: Annotated[int | None, typer.Option("--images", help="Evaluate on this many images.")] = None,
    calibration_images: Annotated[
        int | None, typer.Option("--calibration-images", help="Calibrate on this many images.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", help="Repeat table 1 this often, for mean ± std.")] = 1,
    batch_size: BatchSize = 48,
    workers: Workers = 2,
    out: Annotated[Path, typer.Option("--out", help="Folder for the report and its data.")] = Path(
        "adamerge-reproduce"
    ),
    skip_bad: SkipBad = False,
) -> None:
    """The paper's tables and claims beside what comes out here, with verdicts.  Interrupted runs go on where they
    stopped."""
    from adamerge.cli.loading import load_model
    from adamerge.experiments.reproduce import choose, embedded_experiment, folder_experiment, run

    choose(parts)
    for name, value in (("--runs", runs), ("--batch-size", batch_size), ("--images", images)):
        if value is not None and value < 1:
            raise BadOption(f"{name} must be at least 1; got {value}")
    readers = []
    if data == EMBEDDED:
        if model != EMBEDDED or calibration not in (None, EMBEDDED):
            raise BadOption(
                "the generated images carry the labels of the embedded model; give your own with --data FOLDER, and "
                "--calibration FOLDER to calibrate on others"
            )
        net = load_model(model, weights, pretrained, device, dtype)
        bench = embedded_experiment(
            model=net,
            device=device,
            images=images,
            calibration_images=calibration_images,
            batch_size=batch_size,
        )
    else:
        net = load_model(model, weights, pretrained, device, dtype)
        bench, readers = folder_experiment(
            net,
            data,
            calibration,
            name=model,
            images=images,
            calibration_images=calibration_images,
            batch_size=batch_size,
            workers=workers,
        )
    for note in bench.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    run(parts, replace(bench, runs=runs), out, each=show)
    console.print(f"wrote {out / 'report.md'}", highlight=False)
    complaints = [complaint for reader in readers if (complaint := reader.complaint())]
    if complaints and not skip_bad:
        raise BadImages(f"{'; '.join(complaints)}. The report is for the others; pass --skip-bad to accept that.")
    for complaint in complaints:
        console.print(f"note: {complaint}", style="yellow", markup=False, highlight=False)


def show(section: "Section") -> None:
    """Print a finished part: its tables, its claims with verdicts, its notes."""
    console.rule(section.title)
    for grid in section.grids:
        # E[r_l] would be read as markup.
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
