"""The command line: reads options, calls the library, prints results."""

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table
from typer.core import TyperGroup

from adamerge.cli.bench import bench
from adamerge.cli.compare import compare
from adamerge.cli.evaluate import evaluate
from adamerge.cli.explore import explore
from adamerge.cli.export import export
from adamerge.cli.finetune import finetune
from adamerge.cli.flags import (
    FIGURES_ADVICE,
    BatchSize,
    Data,
    Device,
    Dtype,
    Limit,
    Method,
    Model,
    NumClasses,
    Pretrained,
    RandomWeights,
    SkipBad,
    Weights,
    Workers,
    console,
    note,
    notes_for_warnings,
    problems,
    report_unreadable,
    save,
)
from adamerge.cli.predict import embed, predict
from adamerge.cli.processes import process_name, several_processes
from adamerge.cli.repair import repair
from adamerge.cli.report import report
from adamerge.cli.reproduce import reproduce
from adamerge.cli.show import show
from adamerge.cli.tune import tune
from adamerge.core.errors import AdamergeError
from adamerge.core.files import check_can_write

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
METHOD_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}


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
    num_classes: NumClasses = None,
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
    net = load_model(model, weights, pretrained, device, dtype, num_classes=num_classes)
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "limit": limit, "labelled": False}
    batches = load_data(net, data, seed=CALIBRATION_SEED, shared=True, **reading)
    stats = measure(net, batches, recipe, how=how, passes=passes)  # pyright: ignore[reportArgumentType]
    table = Table("layer", "mean", "std", title=f"{stats.how}, {stats.images} images, {stats.passes} pass(es)")
    for layer, (mean, std) in enumerate(zip(stats.mean, stats.std, strict=True)):
        table.add_row(str(layer), f"{mean:.4f}", f"{std:.4f}")
    console.print(table)
    save(stats, out)
    if stats.images < 2:
        note("the statistics of a single image have no spread, so that other images merge nothing; use a few hundred")
    report_unreadable(batches.complaint(), skip_bad, FIGURES_ADVICE)


@app.command(context_settings=METHOD_OPTIONS)
def flops(
    context: typer.Context,
    model: Model = "embedded",
    weights: RandomWeights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    method: Method = "none",
) -> None:
    """Print the multiply-accumulates of a model with a method, in both counts (paper and true).

    For an adaptive method, this is the cost of an image whose redundancy is the calibrated mean at every layer.
    """
    from adamerge.cli.chosen_method import read_choice
    from adamerge.cli.loading import load_model
    from adamerge.cli.pricing import price

    _, choice = read_choice(method, context.args)
    net = load_model(model, weights, pretrained, "cpu", "fp32", random=True, num_classes=num_classes)
    for line in price(model, net, choice):
        console.print(line, soft_wrap=True)


@app.command()
def methods() -> None:
    """List the methods and their options."""
    from adamerge.cli.chosen_method import preset
    from adamerge.cli.options import usage
    from adamerge.methods import METHODS

    for name, make in {"preset": preset, **{name: method.make for name, method in METHODS.items()}}.items():
        summary = (make.__doc__ or "").strip().splitlines()[0]
        console.print(f"[bold]{name}[/bold]  {summary}", highlight=False)
        console.print(f"    {usage(make) or 'no options'}", markup=False, highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the figures and the table.")] = Path("adamerge-demo"),
    images: Annotated[int, typer.Option("--images", help="How many images to evaluate on.")] = 168,
) -> None:
    """Compare ToMe, AdaMerge, the preset and a tuned recipe on the embedded model, and draw figures; about a minute."""
    from adamerge.experiments.demo import run

    run(out, images, console.print)


app.command("eval", context_settings=METHOD_OPTIONS)(evaluate)
app.command(context_settings=METHOD_OPTIONS)(show)
app.command()(compare)
app.command()(bench)
app.command(context_settings=METHOD_OPTIONS)(export)
app.command()(repair)
app.command(context_settings=METHOD_OPTIONS)(finetune)
app.command()(reproduce)
app.command()(report)
app.command()(explore)
app.command()(tune)
app.command(context_settings=METHOD_OPTIONS)(predict)
app.command(context_settings=METHOD_OPTIONS)(embed)


def main() -> None:
    """Run the command line.  A failure ends in a message; `--debug` adds the traceback."""
    debug = DEBUG in sys.argv
    try:
        words = [word for word in sys.argv[1:] if word != DEBUG]
        with notes_for_warnings(), several_processes(words):
            app(words, prog_name="adamerge")
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
    problems.print(f"error: {process_name()}{message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
