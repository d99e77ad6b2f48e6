"""Ablation of the preset's recipe family: one change at a time, not tuned, with the preset's merges per layer.

Thresholds and rates are found on calibration images, and the KL divergence is measured on others.  A row is written to
benchmarks/results/ablation-frontier.csv as soon as it is measured; rows in that file are not measured again.

    python benchmarks/ablation.py --weights MODEL=FILE [--weights …] --calibration IMAGES --data OTHER_IMAGES
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from reading import RESULTS, read, write
from safetensors.torch import load_file

from adamerge.core.combine import Average, BySalienceAndSize, BySize
from adamerge.core.match import Alternating, Bipartite, Keys, Protect, Tokens
from adamerge.core.recipe import Recipe
from adamerge.core.salience import AttentionShare, Uniform
from adamerge.experiments.benchmark import folder_images
from adamerge.search.evaluator import Evaluator
from adamerge.search.families import STRENGTH, protect, rates
from adamerge.search.scaling import scale_to_target
from adamerge.search.target import Target

NAME = "ablation-frontier"
CUTS = (0.3, 0.5)


def linked(metric: Keys | Tokens, strength: float = STRENGTH, from_prefix: bool = True) -> Bipartite:
    """The matching of the family with another metric, strength or split."""
    return Bipartite(Alternating(from_prefix=from_prefix), metric, Protect(strength))


def variants() -> dict[str, tuple[Recipe, str]]:
    """Label -> recipe, and where it is used now."""
    family = protect()
    plain = replace(family, salience=Uniform(), links=linked(Tokens(), 0.0), weight=BySize())
    return {
        "the family: keys, strength 0.75, averaged by attention, mean norm kept": (family, "yes"),
        "the same number in every image": (protect(static=True), "`static=True`"),
        "no protection, no attention in the average (tokens, by size)": (plain, "models without class token"),
        "the same before the block": (replace(plain, site="before_block"), "no"),
        "the attention of all tokens instead of the class token's": (
            replace(family, salience=AttentionShare()),
            "models without class token",
        ),
        "plain weighted mean instead of the mean norm": (replace(family, combine=Average()), "no"),
        "averaged by size": (replace(family, weight=BySize()), "tuner"),
        "averaged by attention times size": (replace(family, weight=BySalienceAndSize()), "no"),
        "strength 0.5": (replace(family, links=linked(Keys(), 0.5)), "tuner"),
        "strength 1": (replace(family, links=linked(Keys(), 1.0)), "tuner"),
        "tokens instead of keys": (replace(family, links=linked(Tokens())), "tuner"),
        "order of ToMe (unmerged sources first)": (replace(family, order="sources_first"), "no"),
        "turns counted without the prefix": (replace(family, links=linked(Keys(), from_prefix=False)), "no"),
        "no proportional attention": (replace(family, proportional_attention=False), "tuner, early merges"),
    }


def main() -> None:
    """Measure the rows that are not in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", action="append", required=True, metavar="MODEL=FILE")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=160)
    parser.add_argument("--judged", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = list(read(NAME)) if (RESULTS / f"{NAME}.csv").is_file() else []
    known = {(row["what"], row["model"], float(row["cut"])) for row in rows}
    for name, _, path in (pair.partition("=") for pair in arguments.weights):
        model = timm.create_model(name).eval()
        model.load_state_dict(load_file(path))
        model.to(arguments.device)
        bench, judge = (
            Evaluator(model, folder_images(model, folder, number)[0].split(32))
            for folder, number in ((arguments.calibration, arguments.images), (arguments.data, arguments.judged))
        )
        facts = {"images": bench.number, "judged": judge.number, "device": arguments.device, "torch": torch.__version__}
        for cut in CUTS:
            spread = rates(cut, bench.host.depth, bench.reads_patches)
            for what, (recipe, kept) in variants().items():
                if (what, name, cut) in known:
                    continue
                calibrated = bench.sweep(scale_to_target(bench, recipe, spread, Target(cut=cut)).recipe).recipe
                found = judge.sweep(calibrated, calibrate=False)
                loss, error = found.loss.mean().item(), found.loss.std().item() / judge.number**0.5
                row = {"loss": loss, "standard_error": error, "cut_true": 1 - found.macs.mean().item() / bench.full}
                rows.append({"what": what, "kept": kept, "model": name, "cut": cut, **row, **facts})
                print(f"{name} {cut:.0%} {what}: {loss:.4f} ± {error:.4f}", flush=True)
                write(RESULTS / f"{NAME}.csv", rows)


if __name__ == "__main__":
    main()
