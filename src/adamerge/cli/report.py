"""The command `adamerge report`: one HTML page about finished or stopped runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from adamerge.cli.flags import console

Runs = Annotated[
    list[Path],
    typer.Argument(help="Folders and files that eval --json, compare, reproduce, bench and tune wrote."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="The page to write; by default report.html in the folder of a single run."),
]


def report(runs: Runs, out: Out = None) -> None:
    """Make one HTML page about runs: tables, plots, claims and versions.  It opens without a network."""
    show_page(runs, out)


def show_page(runs: Sequence[Path], out: Path | None = None) -> None:
    """Write the page and print its address."""
    from adamerge.report import write_report

    address = write_report(runs, out).resolve().as_uri()
    console.print(f"report: {address}", soft_wrap=True, highlight=False)
