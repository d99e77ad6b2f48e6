"""Repairs the tuned recipes of the frontier and judges them on other images.

Images are files that `benchmarks/repair_inputs.py unpack` wrote.  A task is a model, a cut, a number of images and
options of repair; tasks run in separate processes, several at a time.  Rows are added to a CSV file as they are
measured.

    python benchmarks/repair_inputs.py unpack carry/cal.pt /tmp/cal.pt
    python benchmarks/repair_inputs.py unpack carry/val.pt /tmp/val.pt
    python benchmarks/repair.py --weights carry --used /tmp/cal.pt --judge /tmp/val.pt --device cuda
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from reading import RESULTS, append
from repair_inputs import read_images, tuned_recipe
from torch import Tensor

from adamerge.cli.loading import load_model
from adamerge.experiments.bootstrap import paired
from adamerge.experiments.versions import versions
from adamerge.repairing.options import RepairOptions
from adamerge.repairing.repairer import repair_with_report
from adamerge.search.evaluator import AT_ONCE, AT_ONCE_ELSEWHERE, Evaluator, SweepResult
from adamerge.search.tuner import hold_out

RESAMPLES = 10_000
SIZES = {"vit_small_patch14_reg4_dinov2": 224}


def main() -> None:
    """Run all tasks, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="a folder with MODEL.safetensors")
    parser.add_argument("--used", type=Path, required=True, help="images to repair on")
    parser.add_argument("--judge", type=Path, required=True, help="images to judge on, with labels")
    parser.add_argument("--models", default="vit_tiny_patch16_224,deit_tiny_patch16_224")
    parser.add_argument("--cuts", default="0.4,0.5,0.6")
    parser.add_argument("--images", default="1000")
    parser.add_argument("--judge-images", type=int, default=2000)
    parser.add_argument("--options", default="{}", help="options of repair as JSON; a list runs each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--recipes", type=Path, help="a folder for the repaired recipes")
    parser.add_argument("--out", type=Path, default=RESULTS / "repair.csv")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task is not None:
        model, cut, images, options = json.loads(given.task)
        append(given.out, [measure(given, model, cut, images, options)])
        return
    listed: Any = json.loads(given.options)
    tasks = itertools.product(
        given.models.split(","),
        map(float, given.cuts.split(",")),
        map(int, given.images.split(",")),
        listed if isinstance(listed, list) else [listed],
    )
    running: list[subprocess.Popen[bytes]] = []
    for task in tasks:
        while len(running) >= given.parallel:
            running = [one for one in running if one.poll() is None]
            time.sleep(0.05)
        running.append(subprocess.Popen([sys.executable, *sys.argv, "--task", json.dumps(task)]))
    if any(one.wait() for one in running):
        raise SystemExit("a task failed")


def measure(given: argparse.Namespace, name: str, cut: float, images: int, options: dict[str, Any]) -> dict[str, Any]:
    """The row of a task."""
    begin = time.monotonic()
    # Several tasks share the processor's cores.
    if given.device != "cpu" or given.parallel > 1:
        torch.set_num_threads(1)
    model = load_model(
        name, given.weights / f"{name}.safetensors", False, given.device, "fp32", image_size=SIZES.get(name)
    )
    used, _ = read_images(model, given.used, images)
    judged, labels = read_images(model, given.judge, given.judge_images)
    size = AT_ONCE.get(given.device, AT_ONCE_ELSEWHERE)
    tuned = tuned_recipe(Evaluator(model, hold_out(list(used.split(size)))[0]), name, cut)
    print(f"{name} {cut:.0%}: tuned recipe after {time.monotonic() - begin:.0f} s", flush=True)
    report = repair_with_report(model, used, tuned, RepairOptions(**{"progress": False, **options}))
    judge = Evaluator(model, list(judged.split(size)))
    before, after = (judge.sweep(recipe, calibrate=False) for recipe in (tuned, report.recipe))
    print(
        f"{name} {cut:.0%} {images} {options}: {report}; judged {before.loss.mean():.4f} -> {after.loss.mean():.4f}, "
    )
    if given.recipes is not None:
        report.recipe.save(given.recipes / f"{name}-{100 * cut:.0f}-{images}.json")
    low, high = ratio_interval(after.loss, before.loss)
    full = torch.cat([wanted[0].argmax(1) for wanted in judge.wanted]).cpu() == labels
    return {
        "model": name,
        "cut": cut,
        "images": images,
        "options": json.dumps(options),
        "repaired": report.repaired,
        "numbers": report.numbers,
        "bytes": 0 if report.recipe.patch is None else len(report.recipe.patch.data),
        "seconds": round(report.seconds, 2),
        "used_before": report.loss_before,
        "used_after": report.loss_after,
        "held_out_before": report.check_before,
        "held_out_after": report.check_after,
        "judged_before": before.loss.mean().item(),
        "judged_after": after.loss.mean().item(),
        "ratio": after.loss.mean().item() / before.loss.mean().item(),
        "ratio_low": low,
        "ratio_high": high,
        **points("points_before", before, full, labels),
        **points("points_after", after, full, labels),
        "cut_before": 1 - before.macs.mean().item() / judge.full,
        "cut_after": 1 - after.macs.mean().item() / judge.full,
        "judge_images": len(labels),
        "device": versions(given.device)["device"],
        "at_once": given.parallel,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "versions": json.dumps(versions(given.device)),
    }


def points(name: str, result: SweepResult, full: Tensor, labels: Tensor) -> dict[str, float | str]:
    """The change of top-1 in points with its interval; empty for a model without classes."""
    if result.choice is None:
        return {name: "", f"{name}_low": "", f"{name}_high": ""}
    found = paired((result.choice == labels).double(), full.double())
    return {name: 100 * found.mean, f"{name}_low": 100 * found.low, f"{name}_high": 100 * found.high}


def ratio_interval(above: Tensor, below: Tensor, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the ratio of two means over the same images."""
    dice, n = torch.Generator().manual_seed(seed), len(above)
    ratios = []
    for _ in range(RESAMPLES // 500):
        drawn = torch.randint(n, (500, n), generator=dice)
        ratios.append(above.double()[drawn].mean(1) / below.double()[drawn].mean(1))
    low, high = torch.cat(ratios).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


if __name__ == "__main__":
    main()
