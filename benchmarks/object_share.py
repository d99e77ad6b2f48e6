"""Does merging keep the object?  Counts object patches among what each method keeps, on drawn images with known masks.

Every method has the same cost.  Figures are of the tokens that enter the last block: what the last block merges is not
attended to any more.  Takes about 90 seconds on one core with the default options.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from reading import RESULTS, write
from torch import Tensor
from torch.nn.functional import avg_pool2d

from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.embedded import load, preprocess, scenes
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
from adamerge.experiments.bootstrap import intervals
from adamerge.flops import meter
from adamerge.patching.apply import applied, trace
from adamerge.search.solve_variant import solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import find_variant

METHODS = (
    "preset",
    "tome",
    "pitome",
    "dsm",
    "tofu",
    "evit",
    "ats",
    "dymu",
    "vid_tldr",
    "random",
    "adamerge",
    "adamerge (cosine, exchanged)",
    "adamerge (protecting, exchanged)",
)
PATCH = 16
BATCH = 48


def main() -> None:
    """Write a row for each method and cut."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--calibration-images", type=int, default=16)
    parser.add_argument("--cuts", default="0.4")
    parser.add_argument("--methods", default=";".join(METHODS), help="labels, separated by semicolons")
    parser.add_argument("--out", type=Path, default=RESULTS / "object-share.csv")
    arguments = parser.parse_args()
    begin = time.monotonic()
    model = load()
    calibration = preprocess(scenes(0, arguments.calibration_images, seed=CALIBRATION_SEED).images)
    drawn = scenes(0, arguments.images, seed=TEST_SEED)
    objects = object_patches(drawn.masks)
    full = meter(model).unmerged().true.item()
    rows: list[dict[str, Any]] = []
    for cut in map(float, arguments.cuts.split(",")):
        for label in arguments.methods.split(";"):
            try:
                recipe = solve_variant(model, calibration, find_variant(label), Target(cut=cut)).recipe
            except BadOption as error:
                print(f"left out: {error}", flush=True)
                continue
            figures, saved = measure(model, recipe, preprocess(drawn.images), objects, full)
            rows.append({"method": label, "target_cut": cut, "cut": saved, "images": len(objects), **figures})
            write(arguments.out, rows)
            print(
                f"[{time.monotonic() - begin:5.0f} s] {label} at {cut:.0%}: {figures['tokens_object']:.1%}", flush=True
            )


def object_patches(masks: Tensor) -> Tensor:
    """(images, patches): whether at least half of a patch belongs to the object."""
    return avg_pool2d(masks.float()[:, None], PATCH).flatten(1) >= 0.5


def measure(model: Any, recipe: Recipe, images: Tensor, objects: Tensor, full: float) -> tuple[dict[str, float], float]:
    """The figures of a recipe, as means over images with intervals; and the share of the cost that it saves."""
    columns, costs = [], []
    prices = meter(model)
    with applied(model, recipe), torch.inference_mode():
        for batch, here in zip(images.split(BATCH), objects.split(BATCH), strict=True):
            model(batch)
            seen = trace(model)
            costs.append(prices.cost(seen.counts, recipe).true)
            columns += [shares(slots, mine) for slots, mine in zip(seen.slots(-2), here, strict=True)]
    named: dict[str, float] = {}
    for name, one in zip(NAMES, intervals(torch.stack(columns)), strict=True):
        named |= {name: one.mean, f"{name}_low": one.low, f"{name}_high": one.high}
    return named, 1 - torch.cat(costs).mean().item() / full


NAMES = ("patches_object", "tokens", "tokens_object", "object_kept", "background_kept")


def shares(slots: Tensor, objects: Tensor) -> Tensor:
    """Of one image, under `NAMES`.

    The share of object patches among all patches; the number of tokens; the share of tokens of which at least half is
    object; the shares of object patches, and of the others, that are tokens of their own.
    """
    sizes = torch.bincount(slots)
    of_object = torch.bincount(slots, weights=objects.double())
    alone = sizes[slots] == 1

    def mean(values: Tensor) -> Tensor:
        return values.double().mean() if len(values) else torch.zeros((), dtype=torch.float64)

    found = sizes > 0
    number = found.sum().double()
    majority = mean(2 * of_object[found] >= sizes[found])
    return torch.stack([mean(objects), number, majority, mean(alone[objects]), mean(alone[~objects])])


if __name__ == "__main__":
    main()
