"""The command line: reads options, calls the library, prints results."""

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.table import Table
from typer.core import TyperGroup

from adamerge.cli.bench import bench
from adamerge.cli.compare import compare
from adamerge.cli.flags import (
    BatchSize,
    Data,
    Device,
    Dtype,
    Limit,
    Model,
    Pretrained,
    SkipBad,
    Weights,
    Workers,
    console,
    notes_for_warnings,
    problems,
    report_unreadable,
    save,
)
from adamerge.cli.reproduce import reproduce
from adamerge.cli.tune import tune
from adamerge.core.errors import AdamergeError
from adamerge.core.files import check_can_write, write_atomically

DEBUG = "--debug"


class Interrupted(Exception):
    """The user pressed Ctrl-C.  Typer would print "Aborted!" for a KeyboardInterrupt."""


class Commands(TyperGroup):
    """The group of commands; turns Ctrl-C into an error that `main` reports."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted; no file was left half-written") from error


app = typer.Typer(
    cls=Commands,
    help="Token merging for pretrained Vision Transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ADVICE = "The figures above are for the others; pass --skip-bad to accept that."
METHOD_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}

Method = Annotated[
    str, typer.Option("--method", help="A method of `adamerge methods`, followed by its options; or use --recipe FILE.")
]


def _print_version(wanted: bool) -> bool:
    if not wanted:
        return wanted
    from importlib.metadata import version
    from platform import python_version

    from adamerge import __version__

    others = ", ".join(f"{name} {version(name)}" for name in ("torch", "timm"))
    console.print(f"adamerge {__version__}, Python {python_version()}, {others}", highlight=False)
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show the traceback of an error; works before and after the command.")
    ] = False,
) -> None:
    """Token merging for pretrained Vision Transformers."""


@app.command(context_settings=METHOD_OPTIONS)
def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", help="The file to write the statistics to.")] = Path("stats.json"),
    model: Model = "embedded",
    weights: Weights = None,
    pretrained: Pretrained = False,
    data: Data = "embedded",
    method: Method = "adamerge",
    how: Annotated[str | None, typer.Option("--how", help="iterative (published) or sequential (ours).")] = None,
    passes: Annotated[int, typer.Option("--passes", help="Passes over the images; iterative only.")] = 2,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    limit: Limit = None,
    skip_bad: SkipBad = False,
) -> None:
    """Measure the statistics of an adaptive method and write them to a file."""
    from adamerge.calibration import calibrate as measure
    from adamerge.cli.loading import load_data, load_model
    from adamerge.cli.options import read_recipe
    from adamerge.embedded.scene_generator import CALIBRATION_SEED

    check_can_write(out)
    recipe = read_recipe(method, context.args, without=["stats"])
    net = load_model(model, weights, pretrained, device, dtype)
    batches = load_data(
        net, data, seed=CALIBRATION_SEED, batch_size=batch_size, workers=workers, limit=limit, labelled=False
    )
    stats = measure(net, batches, recipe, how=how, passes=passes)  # pyright: ignore[reportArgumentType]
    table = Table("layer", "mean", "std", title=f"{stats.how}, {stats.images} images, {stats.passes} pass(es)")
    for layer, (mean, std) in enumerate(zip(stats.mean, stats.std, strict=True)):
        table.add_row(str(layer), f"{mean:.4f}", f"{std:.4f}")
    console.print(table)
    save(stats, out)
    report_unreadable(batches.complaint(), skip_bad, ADVICE)


@app.command("eval", context_settings=METHOD_OPTIONS)
def evaluate(
    context: typer.Context,
    model: Model = "embedded",
    weights: Weights = None,
    pretrained: Pretrained = False,
    data: Data = "embedded",
    method: Method = "adamerge",
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    limit: Limit = None,
    skip_bad: SkipBad = False,
    runtime: Annotated[
        str, typer.Option("--runtime", help="auto, reference or packed. auto packs for inference.")
    ] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Measure accuracy, agreement with the unmerged model, cost and speed of a method."""
    from adamerge.cli.loading import load_data, load_model
    from adamerge.cli.options import RECIPE, read_recipe
    from adamerge.embedded.scene_generator import TEST_SEED
    from adamerge.evaluation import evaluate as judge
    from adamerge.experiments.versions import versions

    if json_file is not None:
        check_can_write(json_file)
    recipe = read_recipe(method, context.args)
    net = load_model(model, weights, pretrained, device, dtype)
    batches = load_data(net, data, seed=TEST_SEED, batch_size=batch_size, workers=workers, limit=limit)
    figures = judge(net, batches, recipe, runtime=cast(Any, runtime)).summary()
    method = RECIPE if any(word.partition("=")[0] == "--recipe" for word in context.args) else method
    settings = {"model": model, "method": method, "options": context.args, "runtime": runtime}
    settings |= {"device": device, "dtype": dtype}
    report = {**settings, **figures, "unreadable": list(batches.unreadable), "versions": versions(device)}
    console.print(_figures(report))
    if json_file is not None:
        write_atomically(json_file, json.dumps(report, indent=1) + "\n")
        console.print(f"wrote {json_file}", soft_wrap=True, highlight=False)
    report_unreadable(batches.complaint(), skip_bad, ADVICE)


@app.command(context_settings=METHOD_OPTIONS)
def flops(
    context: typer.Context,
    model: Model = "embedded",
    method: Method = "none",
) -> None:
    """Print the multiply-accumulates of a model with a method, in both counts (paper and true).

    For an adaptive method, this is the cost of an image whose redundancy is the calibrated mean at every layer.
    """
    from adamerge.cli.options import read_recipe
    from adamerge.cli.pricing import price

    for line in price(model, read_recipe(method, context.args)):
        console.print(line, soft_wrap=True)


@app.command()
def methods() -> None:
    """List the methods and their options."""
    from adamerge.cli.options import usage
    from adamerge.methods import METHODS

    for name, method in METHODS.items():
        console.print(f"[bold]{name}[/bold]  {method.summary}", highlight=False)
        console.print(f"    {usage(name) or 'no options'}", markup=False, highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the figures and the table.")] = Path("adamerge-demo"),
    images: Annotated[int, typer.Option("--images", help="How many images to evaluate on.")] = 168,
) -> None:
    """Calibrate and evaluate AdaMerge on the embedded model at several compressions, and draw figures."""
    from adamerge.experiments.demo import run

    run(out, images, console.print)


app.command()(compare)
app.command()(bench)
app.command()(reproduce)
app.command()(tune)


def main() -> None:
    """Run the command line.  A failure ends in a message; `--debug` adds the traceback."""
    debug = DEBUG in sys.argv
    try:
        with notes_for_warnings():
            app([word for word in sys.argv[1:] if word != DEBUG], prog_name="adamerge")
    except AdamergeError as error:
        _fail(f"{type(error).__name__}: {error}", error, debug)
    except Interrupted as error:
        _fail(str(error), error, debug, code=130)
    except Exception as error:
        advice = "" if debug else f" (run again with {DEBUG} for the traceback)"
        _fail(f"unexpected {type(error).__name__}: {error}{advice}", error, debug)


def _fail(message: str, error: Exception, debug: bool, code: int = 1) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    problems.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(code)


def _figures(report: dict) -> Table:
    table = Table(title=f"{report['method']} on {report['model']}, {report['images']} images", show_header=False)
    rows = [
        ("top-1", f"{report['top1']:.2%}", f"unmerged {report['top1_unmerged']:.2%}"),
        ("top-5", f"{report['top5']:.2%}", ""),
        ("agreement with unmerged", f"{report['agreement']:.2%}", ""),
        ("KL(unmerged ‖ merged)", f"{report['kl']:.4f}", ""),
        ("GMACs, paper's count", f"{report['gmacs_paper']:.4f}", f"unmerged {report['gmacs_paper_unmerged']:.4f}"),
        ("GMACs, true", f"{report['gmacs_true']:.4f}", f"unmerged {report['gmacs_true_unmerged']:.4f}"),
        ("merged tokens", f"{report['merged_mean']:.1f} ± {report['merged_std']:.1f}", "per image"),
        ("r per layer", " ".join(f"{r:.1f}" for r in report["r_per_layer"]), "mean"),
        ("speed", f"{report['speedup']:.2f}×", f"{report['images_per_second']:.0f} images/s, same run"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    main()
