"""Merging at every block against merging at every second block: KL divergence at the same cost.

Every recipe is calibrated on some images and evaluated on others, on which it saves a quarter of the true cost.  A row
is written to benchmarks/results/blocks.csv as soon as it is measured; rows in that file are not measured again.

    python benchmarks/blocks.py --weights MODEL=FILE [--weights …] --calibration IMAGES --data OTHER_IMAGES
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from reading import RESULTS, read, write
from safetensors.torch import load_file
from torch import Tensor, nn

from adamerge.core.budget import Fixed, Threshold, ZScore
from adamerge.experiments.benchmark import folder_images
from adamerge.experiments.bootstrap import paired
from adamerge.methods import Method, dymu, tome
from adamerge.methods import adamerge as published
from adamerge.search.evaluator import Evaluator, SweepResult
from adamerge.search.solve import solve

NAME = "blocks"
CUT = 0.25
# The tolerance of the cut on the evaluation images, and the number of attempts to meet it.
NEAR, TRIES = 0.003, 5
EVERY, SECOND = "every", "every second"


def methods(depth: int, blocks: str) -> dict[str, Method]:
    """ToMe, ToMe with AdaMerge's counts or DyMU's, and AdaMerge, at every block or at every second one."""

    def spread(r: float) -> float | tuple[float, ...]:
        return r if blocks == EVERY else tuple(r if layer % 2 == 0 else 0.0 for layer in range(depth))

    makes = {
        "tome": lambda r: replace(tome(0), budget=Fixed(spread(r))),
        "tome (adaptive)": lambda r: replace(tome(0), budget=ZScore(spread(r))),
        "dymu": lambda r: replace(dymu(0), budget=Threshold(spread(r))),
        "adamerge": lambda r: published(spread(r)),
    }
    return {name: Method(make, "r", 0, 98) for name, make in makes.items()}


def judged(model: nn.Module, calibration: Tensor, method: Method, judge: Evaluator) -> tuple[float | None, SweepResult]:
    """The knob at which the evaluation images save `CUT`, and their results.

    A cut solved on calibration images is only approximately met on other images, so it is corrected.
    """
    cut, goal = 0.0, CUT
    for _ in range(TRIES):
        solution = solve(model, calibration, method, goal)
        found = judge.sweep(solution.recipe, calibrate=False)
        cut = 1 - found.macs.mean().item() / judge.full
        if abs(cut - CUT) <= NEAR:
            return solution.knob, found
        goal += CUT - cut
    raise SystemExit(f"the evaluation images save {cut:.1%}, not {CUT:.0%}; use more images")


def main() -> None:
    """Measure the rows that are not in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", action="append", required=True, metavar="MODEL=FILE")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--judged", type=int, default=1000)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = list(read(NAME)) if (RESULTS / f"{NAME}.csv").is_file() else []
    for name, _, path in (pair.partition("=") for pair in arguments.weights):
        model: Any = timm.create_model(name).eval()
        model.load_state_dict(load_file(path))
        calibration = folder_images(model, arguments.calibration, arguments.images)[0]
        judge = Evaluator(model, folder_images(model, arguments.data, arguments.judged)[0].split(32))
        facts = {"images": len(calibration), "judged": judge.number, "torch": torch.__version__}
        known = {(row["method"], row["blocks"]) for row in rows if row["model"] == name}
        first: Tensor | None = None
        for blocks in (EVERY, SECOND):
            for method, make in methods(len(model.blocks), blocks).items():
                # ToMe comes first, and all are compared with it.
                if (method, blocks) in known and first is not None:
                    continue
                knob, found = judged(model, calibration, make, judge)
                first = found.loss if first is None else first
                if (method, blocks) in known:
                    continue
                loss, error = found.loss.mean().item(), found.loss.std().item() / judge.number**0.5
                row = {"model": name, "method": method, "blocks": blocks, "knob": knob, "loss": loss}
                row |= {"standard_error": error, "cut_true": 1 - found.macs.mean().item() / judge.full}
                apart = paired(found.loss, first)
                row |= {"apart": apart.mean, "apart_low": apart.low, "apart_high": apart.high}
                rows.append(row | facts)
                print(f"{name} {method}, {blocks} block: {loss:.4f} ± {error:.4f}", flush=True)
                write(RESULTS / f"{NAME}.csv", rows)


if __name__ == "__main__":
    main()
