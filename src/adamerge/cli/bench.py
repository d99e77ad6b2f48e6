"""The command `adamerge bench`: the speed of methods, compared with the fastest unmerged model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from adamerge.cli.flags import (
    EMBEDDED,
    CalibrationImages,
    Cost,
    Device,
    Model,
    Native,
    NumClasses,
    Pretrained,
    RandomWeights,
    Recipes,
    Workers,
    console,
    note,
    report_unreadable,
)
from adamerge.cli.lists import read_cuts, read_labels, read_natives, read_sizes
from adamerge.core.errors import BadImages, BadOption, BadOutput
from adamerge.core.files import check_can_write

if TYPE_CHECKING:
    from torch import Tensor, nn

    from adamerge.core.recipe import Recipe
    from adamerge.experiments.benchmark import BenchmarkRow, Contender, Entry
    from adamerge.search.variants import Variant

    Others = Callable[[nn.Module], Sequence[Contender]]

# The table needs this many characters in a line to show all columns.
WIDE = 150
# Column -> its text for a row that has times.
CELLS: "dict[str, Callable[[BenchmarkRow], str]]" = {
    "batch": lambda row: str(row.batch),
    "dtype": lambda row: row.dtype,
    "method": lambda row: row.method,
    "way": lambda row: row.way,
    "cut": lambda row: _text(row.cut_true, "{:.1%}"),
    "ms": lambda row: _text(row.ms_p50, "{:.3f}"),
    "p20–p80": lambda row: f"{row.ms_p20:.3f}–{row.ms_p80:.3f}",
    "images/s": lambda row: _text(row.images_per_second, "{:.0f}"),
    "speed-up": lambda row: _text(row.speedup, "{:.2f}×"),
    "ideal": lambda row: _text(row.ideal_true, "{:.2f}×"),
    "reached": lambda row: _text(row.reached_true, "{:.0%}"),
    "deciding": lambda row: _text(row.deciding, "{:.1%}"),
    "MB": lambda row: _text(row.own_mb, "{:.0f}"),
    "waits": lambda row: _text(row.syncs, "{}"),
}
# The columns that are shown in a narrower terminal.
NARROW = ("batch", "method", "way", "cut", "ms", "speed-up", "ideal")


Methods = Annotated[str, typer.Option("--methods", help="Labels as in `adamerge compare`, separated by commas.")]
Cuts = Annotated[str, typer.Option("--cut", help="Shares of the cost to save, separated by commas.")]
Batches = Annotated[str, typer.Option("--batch", help="Batch sizes, separated by commas.")]
Dtypes = Annotated[str, typer.Option("--dtype", help="fp32, bf16 or fp16; several separated by commas.")]
Data = Annotated[str, typer.Option("--data", help="An ImageFolder; generated images by default.")]
Calibration = Annotated[
    str | None, typer.Option("--calibration", help="Another ImageFolder; by default other images of --data.")
]
Images = Annotated[
    int | None, typer.Option("--images", help="How many images to time on; by default the largest batch, at least 64.")
]
ImageSize = Annotated[int | None, typer.Option("--image-size", help="Pixels, if not the model's own.")]
Rounds = Annotated[int, typer.Option("--rounds", help="How often each contender is timed.")]
Inner = Annotated[int | None, typer.Option("--inner", help="Calls per round; by default as many as take 30 ms.")]
Unmerged = Annotated[
    str | None, typer.Option("--unmerged", help="Ways to run the unmerged model; by default all of the device.")
]
Ways = Annotated[str | None, typer.Option("--ways", help="Ways to run the methods; by default all of the device.")]
EngineNames = Annotated[
    str | None,
    typer.Option("--engine", help="Engines to compete: torch, openvino, onnxruntime, aoti; by default torch alone."),
]
Out = Annotated[Path, typer.Option("--out", help="A CSV file; rows are added to it.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="A PNG of speed-ups against batch sizes.")]


def bench(
    model: Model = EMBEDDED,
    weights: RandomWeights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    methods: Methods = "tome,adamerge",
    native: Native = None,
    recipe: Recipes = None,
    cut: Cuts = "0.23",
    cost: Cost = "true",
    batch: Batches = "1,8,32",
    dtype: Dtypes = "fp32",
    device: Device = "cpu",
    data: Data = EMBEDDED,
    calibration: Calibration = None,
    calibration_images: CalibrationImages = 64,
    images: Images = None,
    image_size: ImageSize = None,
    rounds: Rounds = 20,
    inner: Inner = None,
    unmerged: Unmerged = None,
    ways: Ways = None,
    engine: EngineNames = None,
    workers: Workers = 2,
    out: Out = Path("bench.csv"),
    plot: Plot = None,
) -> None:
    """Time methods against the fastest unmerged model, in one interleaved run; rows are added to a CSV file."""
    import torch

    from adamerge.cli.loading import load_model
    from adamerge.experiments.benchmark import bench as run
    from adamerge.experiments.benchmark import make_entries
    from adamerge.experiments.benchmark.rows import check_file
    from adamerge.flops import check_cost

    sizes, targets = read_sizes(batch), read_cuts(cut, "0.23,0.5")
    labels, natives, recipes = _read_methods(methods, native, recipe)
    check_cost(cost)
    check_can_write(out)
    check_file(out)
    _check_plot(plot)
    wanted = max(*sizes, 64) if images is None else images
    how: dict[str, Any] = {"batch_sizes": sizes, "rounds": rounds, "inner": inner, "out": out}
    how |= {"unmerged": _read_ways(unmerged), "merged": _read_ways(ways)}
    how |= {"name": model, "weights": _name_of_weights(model, weights, pretrained)}
    shape: dict[str, Any] = {"random": True, "image_size": image_size, "num_classes": num_classes}
    engines, rows = _read_engines(engine, how), list["BenchmarkRow"]()
    for number in _read_dtypes(dtype, model, sizes, out):
        torch.manual_seed(0)
        net = load_model(model, weights, pretrained, device, number, **shape)
        shown, known, source = _images(net, data, calibration, wanted, calibration_images, workers)
        goal: dict[str, Any] = {"native": natives, "recipes": recipes, "cost": cost}
        entries = make_entries(net, known, labels, targets, **goal)
        try:
            rows += run(net, shown, entries, source=source, others=engines(entries), **how)
        except BadOutput as error:
            console.print(table([*rows, *error.result], console.width))
            raise
    _show(rows, out, plot)


def _read_dtypes(text: str, model: str, sizes: Sequence[int], out: Path) -> list[str]:
    """The dtypes in `--dtype`; all but the first, which `run` notes, are noted as asked for."""
    from adamerge.cli.loading import read_dtype
    from adamerge.experiments.benchmark.requests import note_request

    names = [name.strip() for name in text.split(",")]
    kinds = [str(read_dtype(name)).removeprefix("torch.") for name in names]
    for kind in kinds[1:]:
        note_request(out, {"model": model, "dtype": kind}, sizes)
    return names


def _read_engines(text: str | None, how: dict[str, Any]) -> "Callable[[Sequence[Entry]], Others | None]":
    """What gives the contenders of other engines than torch; ways of torch are left out of `how` unless wanted."""
    if text is None:
        return lambda entries: None
    from adamerge.experiments.benchmark.engines import TORCH, EngineFiles, engine_contenders, read_engines

    names = read_labels(text)
    found, files = read_engines(names), EngineFiles()
    # Beside other engines, torch runs in the two ways that most people use.
    for side, way in (("unmerged", "eager"), ("merged", "packed")):
        how[side] = (how[side] or [way]) if TORCH in names else []
    return lambda entries: lambda net: list(engine_contenders(net, entries, found, files))


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix.lower() != ".png":
        raise BadOption(f"--plot writes a PNG; got {str(plot)!r}. Let its name end in .png.")
    check_can_write(plot)


def _read_methods(
    methods: str, native: list[str] | None, files: list[Path] | None
) -> "tuple[list[str], dict[str, Variant], dict[str, Recipe]]":
    """The labels in `--methods`, the variants in `--native` and the recipes in `--recipe`; there has to be one."""
    from adamerge.core.recipe import Recipe
    from adamerge.search.variants import find_variant

    labels = read_labels(methods)
    for label in labels:
        find_variant(label)
    natives = read_natives(native)
    recipes = {path.stem: Recipe.load(path) for path in files or ()}
    if not labels and not natives and not recipes:
        raise BadOption("there is nothing to time beside the unmerged model; give --methods, --native or --recipe")
    return labels, natives, recipes


def _read_ways(text: str | None) -> list[str] | None:
    return None if text is None else read_labels(text)


def _show(rows: "Sequence[BenchmarkRow]", out: Path, plot: Path | None) -> None:
    """Print the table and the errors, draw the figure; fails if no contender could be timed."""
    console.print(table(rows, console.width))
    for words in dict.fromkeys(f"{row.method}, {row.way}: {row.error}" for row in rows if row.error):
        note(words)
    console.print(f"added {len(rows)} rows to {out}", soft_wrap=True, highlight=False)
    if plot is not None:
        from adamerge.experiments.benchmark.plot import speed

        first = rows[0].dtype
        console.print(f"wrote {speed([row for row in rows if row.dtype == first], plot)}", soft_wrap=True)
    if all(row.error for row in rows):
        raise BadOption(f"no contender could be timed; the first said: {rows[0].error}")


def table(rows: "Sequence[BenchmarkRow]", width: int = WIDE) -> Table:
    """The rows as a table; a narrow terminal gets fewer columns, the CSV file has all of them."""
    first = rows[0]
    found = Table(title=f"{first.model} ({first.weights}), {first.image_size} pixels, {first.device}")
    shown = [name for name in CELLS if width >= WIDE or name in NARROW]
    for name in shown:
        found.add_column(name, justify="left" if name in ("dtype", "method", "way") else "right", overflow="fold")
    for row in rows:
        cells = {name: CELLS[name](row) for name in shown} if row.ms_p50 is not None else _failed(row)
        found.add_row(*(cells.get(name, "") for name in shown))
    return found


def _failed(row: "BenchmarkRow") -> dict[str, str]:
    """The cells of a contender that has no times."""
    known = {name: CELLS[name](row) for name in ("batch", "dtype", "method", "way")}
    return {**known, "cut": row.target, "ms": row.error.partition(":")[0]}


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _name_of_weights(model: str, weights: Path | None, pretrained: bool) -> str:
    """Where the weights come from, for the rows: a file, a library, or `random`."""
    if model == EMBEDDED:
        return "embedded"
    library, _, rest = model.rpartition(":")
    own = pretrained or (library and Path(rest).is_dir())
    return weights.name if weights is not None else (library or "timm") if own else "random"


def _images(
    net: "nn.Module", data: str, calibration: str | None, count: int, calibrating: int, workers: int
) -> "tuple[Tensor, Tensor, str]":
    """The images to time on, the images to calibrate on, and the name of their source."""
    from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
    from adamerge.experiments.benchmark import drawn_images, folder_images

    if count < 1 or calibrating < 2:
        raise BadOption(f"--images must be at least 1 and --calibration-images 2; got {count} and {calibrating}")
    if data == EMBEDDED:
        shown, source = drawn_images(net, count, seed=TEST_SEED), "drawn"
    elif calibration is None:
        # Read at once and then divided, so that both parts are spread over the folder.
        pool, files = folder_images(net, data, count + calibrating, workers=workers)
        report_unreadable(files.complaint(), skip_bad=True)
        if len(pool) < 3:
            raise BadImages(f"{data} has too few images to calibrate on some and time on others; give --calibration")
        share = min(calibrating, len(pool) // 2)
        order = [index * len(pool) // share for index in range(share)]
        others = sorted(set(range(len(pool))) - set(order))
        return pool[others], pool[order], Path(data).name
    else:
        shown, files = folder_images(net, data, count, workers=workers)
        source = Path(data).name
        report_unreadable(files.complaint(), skip_bad=True)
    if calibration is None or calibration == EMBEDDED:
        return shown, drawn_images(net, calibrating, seed=CALIBRATION_SEED), source
    known, files = folder_images(net, calibration, calibrating, workers=workers)
    report_unreadable(files.complaint(), skip_bad=True)
    return shown, known, source
