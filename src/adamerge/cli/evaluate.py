"""The command `adamerge eval`: accuracy, agreement, cost and speed of a method."""

import json
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from adamerge.cli.flags import (
    FIGURES_ADVICE,
    BatchSize,
    Calibration,
    CalibrationImages,
    Data,
    Device,
    Dtype,
    Limit,
    Method,
    Model,
    NumClasses,
    Pretrained,
    SkipBad,
    Weights,
    Workers,
    calibration_source,
    console,
    report_unreadable,
)
from adamerge.core.files import check_can_write, write_atomically

if TYPE_CHECKING:
    from adamerge.evaluation import Evaluation

Runtime = Annotated[str, typer.Option("--runtime", help="auto, reference or packed. auto packs for inference.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]


def evaluate(
    context: typer.Context,
    model: Model = "embedded",
    weights: Weights = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    data: Data = "embedded",
    method: Method = "adamerge",
    calibration: Calibration = None,
    calibration_images: CalibrationImages = 256,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    limit: Limit = None,
    skip_bad: SkipBad = False,
    runtime: Runtime = "auto",
    json_file: Json = None,
) -> None:
    """Measure accuracy, agreement with the unmerged model, cost and speed of a method."""
    from adamerge.cli.chosen_method import PresetChoice, make_calibrated, read_choice
    from adamerge.cli.loading import load_data, load_model
    from adamerge.distributed import is_first
    from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
    from adamerge.evaluation import evaluate as judge
    from adamerge.experiments.versions import versions

    if json_file is not None:
        check_can_write(json_file)
    method, choice = read_choice(method, context.args)
    source = calibration_source(data, calibration) if isinstance(choice, PresetChoice) else calibration
    net = load_model(model, weights, pretrained, device, dtype, num_classes=num_classes)
    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    batches = load_data(net, data, seed=TEST_SEED, limit=limit, shared=True, **reading)
    known = {"seed": CALIBRATION_SEED, "limit": calibration_images, "labelled": False, **reading}
    recipe = make_calibrated(choice, net, lambda: load_data(net, str(source), **known), given=source is not None)
    found = judge(net, batches, recipe, runtime=cast(Any, runtime))
    settings = {"model": model, "method": method, "options": context.args, "runtime": runtime}
    settings |= {"device": device, "dtype": dtype}
    report = {**settings, **found.summary(), "unreadable": list(batches.unreadable), "versions": versions(device)}
    console.print(_figures(report))
    if json_file is not None and is_first():
        write_atomically(json_file, json.dumps({**report, **_images(found)}, indent=1) + "\n")
        console.print(f"wrote {json_file}", soft_wrap=True, highlight=False)
    report_unreadable(batches.complaint(), skip_bad, FIGURES_ADVICE)


def _images(found: "Evaluation") -> dict[str, Any]:
    """What a report draws: the tokens of each image, and the images with the fewest and the most as JPEG files."""
    from adamerge.data.thumbnails import to_jpeg

    shown: dict[str, Any] = {"patches": found.patches, "tokens_kept": json.dumps(found.kept.tolist())}
    for kind in ("simplest", "complex") if found.extremes else ():
        pixels, *facts = (found.extremes[f"{kind}_{part}"] for part in ("images", "numbers", "tokens"))
        files = [b64encode(to_jpeg(image)).decode() for image in pixels]
        named = zip(files, *(fact.tolist() for fact in facts), strict=True)
        shown[kind] = [{"image": number, "tokens": tokens, "jpeg": file} for file, number, tokens in named]
    return shown


def _figures(report: dict[str, Any]) -> Table:
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
