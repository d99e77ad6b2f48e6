"""Measures the rows of docs/speed.md: published methods, the preset and a tuned recipe against unmerged models.

Weights are random: time does not depend on what they were trained for, and counts still adapt to the images.  Each
batch size is one interleaved run; its rows are added to benchmarks/results/bench-MODEL.csv.  Official ToMe is timed if
a checkout of it is given.  Recipes are stored in the folder `--recipes` and reused by later runs.

    python benchmarks/speed.py --data IMAGES --calibration OTHER_IMAGES [--tome ../ToMe] [--parts main,equal,half,…]
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from blocks import EVERY, SECOND, methods
from official import official_tome
from torch import Tensor, nn

import adamerge
from adamerge.core.budget import Fixed
from adamerge.core.files import write_atomically
from adamerge.core.recipe import Recipe
from adamerge.experiments.benchmark import Contender, Entry, bench, folder_images, make_entries, twin
from adamerge.experiments.benchmark.contenders import pricing
from adamerge.experiments.csv_tables import RENAMED
from adamerge.flops import CostCount, meter
from adamerge.methods import adamerge as published
from adamerge.methods import dymu, tome
from adamerge.patching.apply import apply
from adamerge.presets import best
from adamerge.search.solve import solve

RESULTS = Path(__file__).resolve().parent / "results"
CALIBRATION = 48
UNMERGED = ["graph", "compiled graph"]
TRIES = 12
# Batch sizes at which official ToMe is timed.
OFFICIAL = (1, 256)


@dataclass(frozen=True)
class Part:
    """A model at some batch sizes.

    `cut` is the cut to solve for, in the count `cost`.  Without it, every layer merges `share` of the image's patches,
    on average if counts adapt.  `ours` adds the preset and a tuned recipe, `seldom` recipes that merge at every second
    block.
    """

    model: str
    batches: tuple[int, ...]
    cut: float | None = None
    cost: CostCount = "paper"
    share: float = 0.0
    ours: bool = False
    seldom: bool = False


PARTS = {
    "main": Part("vit_base_patch16_224", (256, 1, 8, 32, 128), cut=0.23, ours=True),
    "equal": Part("vit_base_patch16_224", (256,), cut=0.25, cost="true", ours=True, seldom=True),
    "half": Part("vit_base_patch16_224", (256,), share=16 / 196),
    "large": Part("vit_large_patch16_224", (64, 8), share=4 / 196),
    "deep": Part("vit_large_patch16_224", (64, 8), share=8 / 196),
    "wide": Part("vit_base_patch16_384", (64, 8), share=8 / 196),
    "base": Part("vit_base_patch16_224", (64, 8), share=8 / 196),
}


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of images to time on")
    parser.add_argument("--calibration", type=Path, required=True, help="another, to calibrate on")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tome", type=Path, help="a checkout of official ToMe")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the rows")
    parser.add_argument("--recipes", type=Path, help="a folder that keeps the recipes, to be used again")
    parser.add_argument("--solve", action="store_true", help="only find the recipes")
    arguments = parser.parse_args()
    for name in arguments.parts.split(","):
        measure(name, PARTS[name], arguments)


def measure(name: str, part: Part, arguments: argparse.Namespace) -> None:
    """Time one part."""
    torch.manual_seed(0)
    model: Any = timm.create_model(part.model).cuda().to(torch.bfloat16).eval()
    kept: Path | None = arguments.recipes and arguments.recipes / f"{name}.json"
    if kept is not None and kept.is_file():
        recipes = load(kept)
    else:
        calibration, _ = folder_images(model, arguments.calibration, CALIBRATION, workers=arguments.workers)
        recipes = entries(model, calibration, part)
        if kept is not None:
            save(kept, recipes)
    if arguments.solve:
        return
    images, _ = folder_images(model, arguments.data, max(256, *part.batches), workers=arguments.workers)
    official: Path | None = arguments.tome if part.cut is not None and part.cost == "paper" else None
    for batch in part.batches:
        rows = bench(
            model,
            images,
            recipes,
            batch_sizes=[batch],
            rounds=arguments.rounds,
            unmerged=UNMERGED,
            # Without a CUDA graph, the launches limit the speed on a slow host.
            merged=["packed graph"],
            others=None if official is None or batch not in OFFICIAL else others(official),
            name=part.model,
            weights="random",
            source=arguments.data.name,
            out=arguments.out / f"bench-{part.model}.csv",
            progress=False,
        )
        for row in rows:
            shown = row.error or f"{row.ms_p50:.3f} ms, {row.speedup:.3f}×, {row.deciding}, true cut {row.cut_true:.1%}"
            print(row.model, row.batch, row.method, row.way, shown, flush=True)


def entries(model: nn.Module, calibration: Tensor, part: Part) -> Sequence[Entry]:
    """The recipes of a part."""
    if part.cut is not None:
        solved = make_entries(
            model, calibration, ["adamerge", "dymu", "tome"], [part.cut], cost=part.cost, progress=False
        )
        facts: dict[str, Any] = {"target": solved[0].target, "cost": part.cost}
        depth = len(model.blocks)  # pyright: ignore[reportArgumentType]
        more = {"tome (adaptive)": methods(depth, EVERY)["tome (adaptive)"]}
        if part.seldom:
            more |= {f"{name}, {SECOND} block": method for name, method in methods(depth, SECOND).items()}
        for name, method in more.items():
            found = solve(model, calibration, method, part.cut, cost=part.cost)
            solved.append(Entry(name, found.recipe, knob=found.knob, **facts))
        if not part.ours:
            return solved
        solved.append(Entry("one token", one_token(model), **facts))
        preset = best(model, calibration, part.cut, cost=part.cost)
        tuned = adamerge.tune(model, calibration, part.cut, cost=part.cost, tries=TRIES, progress=False)
        return [*solved, Entry("preset", preset, **facts), Entry("tuned", tuned, **facts)]
    patches: int = model.patch_embed.num_patches  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
    r = round(part.share * patches, 3)

    def calibrated(recipe: Recipe) -> Recipe:
        return recipe.with_stats(adamerge.calibrate(model, calibration, recipe, how="sequential", progress=False))

    return [
        Entry("adamerge", calibrated(published(2 * r)), knob=2 * r),
        Entry("dymu", calibrated(dymu(r)), knob=r),
        Entry("tome", tome(r), knob=r),
        Entry("one token", one_token(model)),
    ]


def one_token(model: Any) -> Recipe:
    """A recipe with one merge in the last block: it shows the speed of the runtime without merging."""
    return replace(tome(1), budget=Fixed(1, delay=len(model.blocks) - 1))


def save(path: Path, found: Sequence[Entry]) -> None:
    """Write entries to a JSON file."""
    rows = [{"method": e.method, **e.facts, "recipe": e.recipe and e.recipe.to_json()} for e in found]
    write_atomically(path, json.dumps(rows, indent=1))


def load(path: Path) -> list[Entry]:
    """Read the entries that `save` wrote."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    rows = [Entry(**{RENAMED.get(name, name): value for name, value in row.items()}) for row in found]
    return [replace(row, recipe=row.recipe and Recipe.from_json(str(row.recipe))) for row in rows]


def others(checkout: Path) -> Callable[[nn.Module], Sequence[Contender]]:
    """Official ToMe at the paper's r = 8."""

    def make(plain: nn.Module) -> list[Contender]:
        ours = apply(twin(plain), tome(8))
        price = pricing(ours, tome(8), meter(plain))
        return [Contender("tome (official, r=8)", "eager", lambda images: official_tome(plain, checkout, 8), price)]

    return make


if __name__ == "__main__":
    main()
