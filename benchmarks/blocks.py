"""Merging at every block, or at every second one: how far the output moves, at the same cost.

Every recipe is solved for a quarter of the true cost on some images and judged on others.  A row is added to
benchmarks/results/blocks.csv as soon as it is known; rows that are there are not measured again.

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
from torch import Tensor

from adamerge.benchmark import folder_images
from adamerge.bootstrap import paired
from adamerge.core.budget import Fixed, Threshold, ZScore
from adamerge.methods import Method, dymu, tome
from adamerge.methods import adamerge as published
from adamerge.solve import solve
from adamerge.tuning.bench import Bench

NAME = "blocks"
CUT = 0.25
EVERY, SECOND = "every", "every second"


def methods(depth: int, blocks: str) -> dict[str, Method]:
    """ToMe, ToMe with counts that adapt, and AdaMerge, at every block or at every second one."""

    def spread(r: float) -> float | tuple[float, ...]:
        return r if blocks == EVERY else tuple(r if layer % 2 == 0 else 0.0 for layer in range(depth))

    makes = {
        "tome": lambda r: replace(tome(0), budget=Fixed(spread(r))),
        "tome (adaptive)": lambda r: replace(tome(0), budget=ZScore(spread(r))),
        "dymu": lambda r: replace(dymu(0), budget=Threshold(spread(r))),
        "adamerge": lambda r: published(spread(r)),
    }
    return {name: Method(make, "r", 0, 98) for name, make in makes.items()}


def main() -> None:
    """Measure what is not there yet."""
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
        judge = Bench(model, folder_images(model, arguments.data, arguments.judged)[0].split(32))
        facts = {"images": len(calibration), "judged": judge.number, "torch": torch.__version__}
        known = {(row["method"], row["blocks"]) for row in rows if row["model"] == name}
        first: Tensor | None = None
        for blocks in (EVERY, SECOND):
            for method, make in methods(len(model.blocks), blocks).items():
                # ToMe comes first, and all are compared with it.
                if (method, blocks) in known and first is not None:
                    continue
                solution = solve(model, calibration, make, CUT)
                found = judge.sweep(solution.recipe, calibrate=False)
                first = found.loss if first is None else first
                if (method, blocks) in known:
                    continue
                loss, error = found.loss.mean().item(), found.loss.std().item() / judge.number**0.5
                row = {"model": name, "method": method, "blocks": blocks, "knob": solution.knob, "loss": loss}
                row |= {"standard_error": error, "cut_true": 1 - found.macs.mean().item() / judge.full}
                apart = paired(found.loss, first)
                row |= {"apart": apart.mean, "apart_low": apart.low, "apart_high": apart.high}
                rows.append(row | facts)
                print(f"{name} {method}, {blocks} block: {loss:.4f} ± {error:.4f}", flush=True)
                write(RESULTS / f"{NAME}.csv", rows)


if __name__ == "__main__":
    main()
