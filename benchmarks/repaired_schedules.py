"""Does another schedule win if recipes are judged by what they lose after a repair?

Candidates are the families of the tuner at several first layers and slopes, and the tuned recipe, all at the same cost.
Each is swept, repaired for a few epochs with its thresholds calibrated again afterwards, and judged before and after on
images that were used for neither.  Rows are added to a CSV file as they are measured; candidates that it has are
skipped.  With few epochs the smaller models are not repaired at all, and nothing is learned of them:

    python benchmarks/repaired_schedules.py --weights FOLDER --used CAL --judge VAL --device cuda \\
        --images 500 --epochs 16 --judge-images 2000 [--model vit_tiny_patch16_224] [--cut 0.5]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
from reading import RESULTS, append
from repair import ratio_interval
from repair_inputs import read_images, tuned_recipe

from adamerge.cli.loading import load_model
from adamerge.core.recipe import Recipe
from adamerge.experiments.csv_tables import read_table
from adamerge.experiments.versions import versions
from adamerge.repairing.options import RepairOptions
from adamerge.repairing.repairer import repair_with_report
from adamerge.search.evaluator import AT_ONCE, AT_ONCE_ELSEWHERE, Evaluator
from adamerge.search.families import families, first_layer_and_slope
from adamerge.search.scaling import scale_to_target
from adamerge.search.schedule import MERGE_ALL, linear_rates
from adamerge.search.target import Target
from adamerge.search.tuner import hold_out

NAMES = ("keys, averaged by attention", "tokens, averaged by attention", "keys, averaged by size")
# Layers later than the preset's first one, and what is added to its slope.
CHANGES = ((0, 0.0), (-1, 0.0), (1, 0.0), (2, 0.0), (0, 2.0), (0, -1.0))


def main() -> None:
    """Measure the candidates of one model at one cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="a folder with MODEL.safetensors")
    parser.add_argument("--used", type=Path, required=True, help="images to calibrate and repair on")
    parser.add_argument("--judge", type=Path, required=True, help="images to judge on")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--cut", type=float, default=0.5)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--judge-images", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "repaired-schedules.csv")
    given = parser.parse_args()
    model = load_model(given.model, given.weights / f"{given.model}.safetensors", False, given.device, "fp32")
    size = AT_ONCE.get(given.device, AT_ONCE_ELSEWHERE)
    used, _ = read_images(model, given.used, given.images)
    judge = Evaluator(model, list(read_images(model, given.judge, given.judge_images)[0].split(size)))
    evaluator = Evaluator(model, hold_out(list(used.split(size)))[0])
    rows = read_table(given.out.read_text(encoding="utf-8")) if given.out.exists() else []
    known = {(row["model"], row["cut"], row["candidate"]) for row in rows}
    for name, make in candidates(evaluator, given.model, given.cut):
        if (given.model, str(given.cut), name) in known:
            continue
        begin, recipe = time.monotonic(), make()
        report = repair_with_report(model, used, recipe, RepairOptions(epochs=given.epochs, progress=False))
        before, after = (judge.sweep(one, calibrate=False) for one in (recipe, report.recipe))
        low, high = ratio_interval(after.loss, before.loss)
        row = {
            "model": given.model,
            "cut": given.cut,
            "candidate": name,
            "images": given.images,
            "epochs": given.epochs,
            "repaired": report.repaired,
            "used_before": report.loss_before,
            "used_after": report.loss_after,
            "judged_before": before.loss.mean().item(),
            "judged_after": after.loss.mean().item(),
            "ratio_low": low,
            "ratio_high": high,
            "cut_before": 1 - before.macs.mean().item() / judge.full,
            "cut_after": 1 - after.macs.mean().item() / judge.full,
            "judge_images": given.judge_images,
            "seconds": round(time.monotonic() - begin, 1),
            "device": versions(given.device)["device"],
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        }
        append(given.out, [row])
        print({key: row[key] for key in ("candidate", "judged_before", "judged_after", "cut_after")}, flush=True)


def candidates(evaluator: Evaluator, model: str, cut: float) -> Iterator[tuple[str, Callable[[], Recipe]]]:
    """The tuned recipe, the first family with several schedules, and the others with the preset's: names and makers."""
    yield "tuned", partial(tuned_recipe, evaluator, model, cut)
    depth, last = evaluator.host.depth, None if evaluator.reads_patches else MERGE_ALL
    first, slope = first_layer_and_slope(cut, depth)
    for number, (name, family) in enumerate(zip(NAMES, families(evaluator.host.class_token), strict=True)):
        for later, steeper in CHANGES if number == 0 else CHANGES[:1]:
            rates = linear_rates(depth, max(first + later, 0), slope + steeper, last)
            named = f"{name}, from layer {max(first + later, 0)}, slope {slope + steeper:g}"
            yield named, partial(scaled_recipe, evaluator, family, rates, cut)


def scaled_recipe(evaluator: Evaluator, family: Recipe, rates: tuple[float, ...], cut: float) -> Recipe:
    """A schedule scaled to the cost and calibrated on the evaluator's images."""
    return evaluator.sweep(scale_to_target(evaluator, family, rates, Target(cut=cut)).recipe).recipe


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
