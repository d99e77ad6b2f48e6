"""The command `adamerge compare`: methods side by side at equal cost."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from adamerge.cli.flags import (
    EMBEDDED,
    BatchSize,
    Calibration,
    CalibrationImages,
    Cost,
    Data,
    Device,
    Dtype,
    Limit,
    Model,
    Native,
    NumClasses,
    Pretrained,
    Recipes,
    SkipBad,
    Weights,
    Workers,
    calibration_source,
    console,
    note,
    report_unreadable,
)
from adamerge.cli.lists import read_cuts, read_gmacs, read_labels, read_natives
from adamerge.cli.report import show_page
from adamerge.core.errors import BadOption, BadOutput
from adamerge.core.files import check_can_write

if TYPE_CHECKING:
    from adamerge.experiments.comparison_rows import ComparisonRow
    from adamerge.search.target import Target

DEFAULT_CUTS = "0.1,0.2,0.3,0.4,0.5"
# The table needs this many characters in a line to show all columns.
WIDE = 220
# The columns that are shown in a narrower terminal.
NARROW = ("method", "budget", "cut true", "top-1", "Δ top-1", "KL", "speed-up")
RESULT_FILES = ("results.csv", "results.md", "pareto.png")
ADVICE = "Pass --skip-bad to compare on the others."

Out = Annotated[Path, typer.Option("--out", help="Folder for results; an interrupted run continues from it.")]
Methods = Annotated[
    str | None, typer.Option("--methods", help="Labels, separated by commas, and 'preset'; all by default.")
]
Cut = Annotated[str | None, typer.Option("--cut", help=f"Shares of the cost to save; {DEFAULT_CUTS} by default.")]
Gmacs = Annotated[str | None, typer.Option("--gmacs", help="Instead of --cut, 10^9 MACs per image.")]
Rival = Annotated[str, typer.Option("--rival", help="The method that all others are compared with.")]
Reread = Annotated[
    bool, typer.Option("--reread", help="Read the images again for each cell: slower, but they need not fit memory.")
]


def compare(
    out: Out,
    model: Model = EMBEDDED,
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    data: Data = EMBEDDED,
    calibration: Calibration = None,
    methods: Methods = None,
    cut: Cut = None,
    gmacs: Gmacs = None,
    native: Native = None,
    recipe: Recipes = None,
    cost: Cost = "true",
    rival: Rival = "tome",
    calibration_images: CalibrationImages = 256,
    limit: Limit = None,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    reread: Reread = False,
    skip_bad: SkipBad = False,
) -> None:
    """Compare methods at equal cost: accuracy, divergence and speed with intervals, as a table and a figure."""
    from adamerge.cli.loading import load_data, load_model
    from adamerge.core.recipe import Recipe
    from adamerge.distributed import Share
    from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
    from adamerge.experiments.compare import compare as run
    from adamerge.flops import check_cost

    check_cost(cost)
    check_can_write(out, folder=True)
    natives = read_natives(native)
    recipes = {path.stem: Recipe.load(path) for path in recipe or ()}
    budgets = _read_budgets(cut, gmacs, bool(natives or recipes))
    labels = _read_methods(methods, rival)
    calibration = calibration_source(data, calibration)
    net = load_model(model, weights, pretrained, device, dtype, num_classes=num_classes)
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    seen = load_data(net, calibration, seed=CALIBRATION_SEED, limit=calibration_images, labelled=False, **reading)
    shown = load_data(net, data, seed=TEST_SEED, limit=limit, shared=True, **reading)
    number = next(net.parameters()).dtype
    known = [images.to(number) for images, _ in seen]
    kept = shown if reread else Share((images.to(number), truth) for images, truth in shown)
    report_unreadable(seen.complaint(), skip_bad, ADVICE)
    report_unreadable(shown.complaint(), skip_bad, ADVICE)
    more: dict[str, Any] = {"native": natives, "recipes": recipes, "cost": cost, "rival": rival, "name": model}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            rows = run(net, known, kept, labels, budgets, out=out, **more)
        except BadOutput as error:
            _show(error.result, [caught.message for caught in notes], out)
            raise
    _show(rows, [caught.message for caught in notes], out)
    show_page([out])
    if reread:
        report_unreadable(shown.complaint(), skip_bad, ADVICE)


def _read_methods(methods: str | None, rival: str) -> list[str]:
    """The labels in `--methods`, all by default; unknown ones are refused."""
    from adamerge.search.variants import PRESET, VARIANTS, find_variant

    labels = [*VARIANTS, PRESET] if methods is None else read_labels(methods)
    for label in (*labels, rival):
        find_variant(label)
    return labels


def _read_budgets(cut: str | None, gmacs: str | None, others: bool) -> "list[Target]":
    """The targets in `--cut` or `--gmacs`; without both, the default cuts, or none if there are `others` to compare."""
    if cut is not None and gmacs is not None:
        raise BadOption("give either --cut or --gmacs, not both")
    if gmacs is not None:
        return read_gmacs(gmacs)
    if cut is None and others:
        return []
    return read_cuts(cut if cut is not None else DEFAULT_CUTS)


def _show(rows: "Sequence[ComparisonRow]", notes: Sequence[object], out: Path) -> None:
    """Print the table, the warnings of the run, and the files that it wrote."""
    if rows:
        console.print(table(rows, console.width))
    for text in notes:
        note(text)
    for name in RESULT_FILES:
        if (out / name).is_file():
            console.print(f"wrote {out / name}", soft_wrap=True, highlight=False)


def table(rows: "Sequence[ComparisonRow]", width: int = WIDE) -> Table:
    """The rows as a table; a narrow terminal gets fewer columns and no intervals, the files have all of them."""
    from adamerge.experiments.comparison_rows import headings, texts

    first, names, wide = rows[0], headings(rows), width >= WIDE
    found = Table(title=f"{first.model}, {first.images} images, {first.dtype} on {first.device}")
    shown = [index for index, name in enumerate(names) if wide or name in NARROW]
    for index in shown:
        found.add_column(names[index], justify="left" if index < 2 else "right", overflow="fold")
    for row in rows:
        cells = texts(row)
        found.add_row(*(cells[index] if wide else cells[index].partition(" [")[0] for index in shown))
    return found
