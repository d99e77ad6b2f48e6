"""The command `adamerge bench`: how fast methods are beside the best that the unmerged model can do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from adamerge.cli.compare import read_labels, read_native
from adamerge.cli.flags import (
    EMBEDDED,
    CalibrationImages,
    Cost,
    Device,
    Model,
    Native,
    Pretrained,
    Workers,
    console,
    note,
)
from adamerge.core.errors import BadImages, BadOption

if TYPE_CHECKING:
    from torch import Tensor, nn

    from adamerge.experiments.benchmark import BenchmarkRow


# Columns of text that hold the whole table.
WIDE = 150
# What a column shows of a row that has times.
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
NARROW = ("batch", "method", "way", "cut", "ms", "speed-up", "ideal")


def bench(
    model: Model = EMBEDDED,
    weights: Annotated[
        Path | None, typer.Option("--weights", help="A safetensors file; random weights without one.")
    ] = None,
    pretrained: Pretrained = False,
    methods: Annotated[
        str, typer.Option("--methods", help="Labels as in `adamerge compare`, separated by commas.")
    ] = "tome,adamerge",
    native: Native = None,
    cut: Annotated[str, typer.Option("--cut", help="Shares of the cost to save, separated by commas.")] = "0.23",
    cost: Cost = "true",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, separated by commas.")] = "1,8,32",
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, bf16 or fp16; several separated by commas.")] = "fp32",
    device: Device = "cpu",
    data: Annotated[str, typer.Option("--data", help="An ImageFolder; images are drawn without one.")] = EMBEDDED,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="Another ImageFolder; by default other images of --data.")
    ] = None,
    calibration_images: CalibrationImages = 64,
    images: Annotated[
        int | None, typer.Option("--images", help="How many images to time on; by default the largest batch, or 64.")
    ] = None,
    image_size: Annotated[int | None, typer.Option("--image-size", help="Pixels, if not the model's own.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="How often each contender has its turn.")] = 20,
    inner: Annotated[int | None, typer.Option("--inner", help="Calls per turn; by default 30 ms worth.")] = None,
    unmerged: Annotated[
        str | None, typer.Option("--unmerged", help="Ways to run the unmerged model; all of the device by default.")
    ] = None,
    ways: Annotated[
        str | None, typer.Option("--ways", help="Ways to run the methods; all of the device by default.")
    ] = None,
    workers: Workers = 2,
    out: Annotated[Path, typer.Option("--out", help="A CSV file that rows are added to.")] = Path("bench.csv"),
    plot: Annotated[Path | None, typer.Option("--plot", help="A PNG of speed-ups against batch sizes.")] = None,
) -> None:
    """Time methods beside the best unmerged model, in one interleaved run; rows are added to a CSV file."""
    import torch

    from adamerge.cli.loading import load_model
    from adamerge.experiments.benchmark import bench as run
    from adamerge.experiments.benchmark import make_entries
    from adamerge.experiments.benchmark.rows import check_file
    from adamerge.flops import check_cost
    from adamerge.search.target import Target
    from adamerge.search.variants import find_variant

    sizes = read_sizes(batch)
    targets = [Target(cut=number) for number in _cuts(cut)]
    labels = read_labels(methods) if methods.strip() else []
    for label in labels:
        find_variant(label)
    natives = dict(read_native(text) for text in native or ())
    if not labels and not natives:
        raise BadOption("there is nothing to time beside the unmerged model; give --methods or --native")
    check_cost(cost)
    check_file(out)
    if plot is not None and plot.suffix.lower() != ".png":
        raise BadOption(f"--plot writes a PNG; got {str(plot)!r}. Let its name end in .png.")
    wanted = max(*sizes, 64) if images is None else images
    rows: list[BenchmarkRow] = []
    for number in dtype.split(","):
        torch.manual_seed(0)
        net = load_model(model, weights, pretrained, device, number.strip(), random=True, image_size=image_size)
        shown, known, source = _images(net, data, calibration, wanted, calibration_images, workers)
        entries = make_entries(net, known, labels, targets, native=natives, cost=cost)
        rows += run(
            net,
            shown,
            entries,
            batch_sizes=sizes,
            rounds=rounds,
            inner=inner,
            unmerged=None if unmerged is None else read_labels(unmerged),
            merged=None if ways is None else read_labels(ways),
            name=model,
            weights=_weights(model, weights, pretrained),
            source=source,
            out=out,
        )
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


def read_sizes(text: str) -> list[int]:
    """Batch sizes separated by commas."""
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        raise BadOption(f"--batch is whole numbers separated by commas, such as 1,8,32; got {text!r}") from None
    if min(sizes) < 1:
        raise BadOption(f"--batch sizes must be at least 1; got {text!r}")
    return sizes


def table(rows: "Sequence[BenchmarkRow]", width: int = WIDE) -> Table:
    """The rows as a user reads them; where there is little room, without what can be looked up in the file."""
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
    told = {name: CELLS[name](row) for name in ("batch", "dtype", "method", "way")}
    return {**told, "cut": row.target, "ms": row.error.partition(":")[0]}


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _cuts(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise BadOption(f"--cut is numbers separated by commas, such as 0.23,0.5; got {text!r}") from None


def _weights(model: str, weights: Path | None, pretrained: bool) -> str:
    if model == EMBEDDED:
        return "embedded"
    library, _, rest = model.rpartition(":")
    own = pretrained or (library and Path(rest).is_dir())
    return weights.name if weights is not None else (library or "timm") if own else "random"


def _images(
    net: "nn.Module", data: str, calibration: str | None, count: int, calibrating: int, workers: int
) -> "tuple[Tensor, Tensor, str]":
    """What to time on, what to calibrate on, and what to call it."""
    from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
    from adamerge.experiments.benchmark import drawn_images, folder_images

    if count < 1 or calibrating < 2:
        raise BadOption(f"--images must be at least 1 and --calibration-images 2; got {count} and {calibrating}")
    if data == EMBEDDED:
        shown, source = drawn_images(net, count, seed=TEST_SEED), "drawn"
    elif calibration is None:
        # Taken together and then parted in turn, so that both are spread over the folder.
        pool, files = folder_images(net, data, count + calibrating, workers=workers)
        _complain(files.complaint())
        if len(pool) < 3:
            raise BadImages(f"{data} has too few images to calibrate on some and time on others; give --calibration")
        share = min(calibrating, len(pool) // 2)
        order = [index * len(pool) // share for index in range(share)]
        others = sorted(set(range(len(pool))) - set(order))
        return pool[others], pool[order], Path(data).name
    else:
        shown, files = folder_images(net, data, count, workers=workers)
        source = Path(data).name
        _complain(files.complaint())
    if calibration is None or calibration == EMBEDDED:
        return shown, drawn_images(net, calibrating, seed=CALIBRATION_SEED), source
    known, files = folder_images(net, calibration, calibrating, workers=workers)
    _complain(files.complaint())
    return shown, known, source


def _complain(complaint: str | None) -> None:
    if complaint is not None:
        note(complaint)
