"""The command `adamerge compare`: methods side by side at equal cost."""

import json
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from adamerge.cli.flags import (
    EMBEDDED,
    BatchSize,
    CalibrationImages,
    Cost,
    Data,
    Device,
    Dtype,
    Limit,
    Model,
    Native,
    Pretrained,
    SkipBad,
    Weights,
    Workers,
    console,
    note,
)
from adamerge.core.errors import BadImages, BadOption

if TYPE_CHECKING:
    from adamerge.experiments.comparison_rows import ComparisonRow
    from adamerge.search.target import Target
    from adamerge.search.variants import Variant

DEFAULT_CUTS = "0.1,0.2,0.3,0.4,0.5"


def compare(
    out: Annotated[Path, typer.Option("--out", help="Folder for results; a run that was interrupted goes on.")],
    model: Model = EMBEDDED,
    weights: Weights = None,
    pretrained: Pretrained = False,
    data: Data = EMBEDDED,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="Another ImageFolder, or 'embedded'; labels are not used.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="Labels, separated by commas; all by default.")
    ] = None,
    cut: Annotated[
        str | None, typer.Option("--cut", help=f"Shares of the cost to save; {DEFAULT_CUTS} by default.")
    ] = None,
    gmacs: Annotated[str | None, typer.Option("--gmacs", help="Instead of --cut, 10^9 MACs per image.")] = None,
    native: Native = None,
    recipe: Annotated[
        list[Path] | None, typer.Option("--recipe", help="A recipe file, such as `adamerge tune` writes; repeatable.")
    ] = None,
    cost: Cost = "true",
    rival: Annotated[str, typer.Option("--rival", help="Whom all others are compared with.")] = "tome",
    calibration_images: CalibrationImages = 256,
    limit: Limit = None,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    reread: Annotated[
        bool,
        typer.Option("--reread", help="Read the images again for each cell: slower, but they need not fit memory."),
    ] = False,
    skip_bad: SkipBad = False,
) -> None:
    """Compare methods at equal cost: accuracy, divergence, speed, with intervals, as a table and a picture."""
    from adamerge.cli.loading import load_data, load_model
    from adamerge.core.recipe import Recipe
    from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
    from adamerge.experiments.compare import compare as run
    from adamerge.experiments.comparison_rows import headings, texts
    from adamerge.flops import check_cost
    from adamerge.search.variants import VARIANTS

    check_cost(cost)
    natives = dict(read_native(text) for text in native or ())
    recipes = {path.stem: Recipe.load(path) for path in recipe or ()}
    budgets = read_budgets(cut, gmacs, bool(natives or recipes))
    labels = list(VARIANTS) if methods is None else read_labels(methods)
    calibration = _calibration(data, calibration)
    net = load_model(model, weights, pretrained, device, dtype)
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    seen = load_data(net, calibration, seed=CALIBRATION_SEED, limit=calibration_images, labelled=False, **reading)
    shown = load_data(net, data, seed=TEST_SEED, limit=limit, **reading)
    number = next(net.parameters()).dtype
    known = [images.to(number) for images, _ in seen]
    kept = shown if reread else [(images.to(number), truth) for images, truth in shown]
    _complain((seen.complaint(), shown.complaint()), skip_bad)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        rows = run(
            net,
            known,
            kept,
            labels,
            budgets,
            out=out,
            native=natives,
            recipes=recipes,
            cost=cost,  # pyright: ignore[reportArgumentType]
            rival=rival,
            name=model,
        )
    console.print(_table(rows, headings(rows), map(texts, rows)))
    for caught in notes:
        note(caught.message)
    for name in ("results.csv", "results.md", "pareto.png"):
        if (out / name).is_file():
            console.print(f"wrote {out / name}", soft_wrap=True, highlight=False)
    if reread:
        _complain((shown.complaint(),), skip_bad)


def read_labels(text: str) -> list[str]:
    """Labels separated by commas; those inside parentheses belong to a label."""
    return [label.strip() for label in re.split(r",(?![^(]*\))", text)]


def read_budgets(cut: str | None, gmacs: str | None, natives: bool) -> "list[Target]":
    """The targets in `--cut` or `--gmacs`; the default ones unless native parameters say everything."""
    from adamerge.search.target import Target

    if cut is not None and gmacs is not None:
        raise BadOption("give either --cut or --gmacs, not both")
    if gmacs is not None:
        return [Target(gmacs=number) for number in _numbers("--gmacs", gmacs)]
    if cut is None and natives:
        return []
    return [Target(cut=number) for number in _numbers("--cut", cut if cut is not None else DEFAULT_CUTS)]


def read_native(text: str) -> "tuple[str, Variant]":
    """`tome:r=8,proportional_attention=false` as a label and a variant."""
    from adamerge.cli.options import read_recipe
    from adamerge.search.variants import Variant

    name, _, settings = text.partition(":")
    words = [word.strip() for word in settings.split(",") if word.strip()]
    for word in words:
        if "=" not in word:
            raise BadOption(f"--native is METHOD:OPTION=VALUE,OPTION=VALUE, such as tome:r=8; got {text!r}")
    # Read as the other commands read them, for the same complaints; statistics are measured here.
    read_recipe(name, [f"--{word}" for word in words], without=["stats"])
    pairs = (word.split("=", 1) for word in words)
    return text, Variant(name, {key.strip().replace("-", "_"): _value(value) for key, value in pairs})


def _value(text: str) -> Any:
    """A number, true, false, or a word."""
    try:
        return json.loads(text.strip().lower())
    except json.JSONDecodeError:
        return text.strip()


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise BadOption(f"{flag} is numbers separated by commas, such as 0.2,0.4; got {text!r}") from None


def _calibration(data: str, calibration: str | None) -> str:
    if calibration is None and data != EMBEDDED:
        raise BadOption(
            "methods are calibrated on images other than those they are judged on: give --calibration FOLDER, "
            "such as a part of the training set; its labels are not used"
        )
    return calibration if calibration is not None else EMBEDDED


def _complain(complaints: Sequence[str | None], skip_bad: bool) -> None:
    for complaint in filter(None, complaints):
        if not skip_bad:
            raise BadImages(f"{complaint}. Pass --skip-bad to compare on the others.")
        note(complaint)


def _table(rows: "Sequence[ComparisonRow]", names: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    first = rows[0]
    table = Table(title=f"{first.model}, {first.images} images, {first.dtype} on {first.device}")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < 2 else "right")
    for line in lines:
        table.add_row(*line)
    return table
