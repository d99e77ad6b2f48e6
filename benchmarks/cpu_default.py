"""How fast is `adamerge.apply(model, recipe); model(images)` on a CPU?  Merged models beside the unmerged one.

All contenders of a batch size run in turn in one process.  Weights are random: time does not depend on what they mean,
and counts adapt to the images all the same.  Recipes are made once and kept in a folder.  Rows are added to a CSV file.

    python benchmarks/cpu_default.py --recipes FOLDER [--models vit_tiny_patch16_224,…] [--batches 1,8,32]
        [--dtype float32] [--out benchmarks/results/cpu-default.csv]
"""

import argparse
import datetime
import statistics
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plain_call import ALL, recipe_for, timm_model
from reading import append
from torch import Tensor, nn

import adamerge
from adamerge import Recipe
from adamerge.embedded import scenes
from adamerge.hosts.base import find_host
from adamerge.timing import time_call

MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")
CALIBRATION = 16
PATCHES = 196
SPAN_S = 0.3
CPU = torch.device("cpu")


def recipes_of(name: str, model: nn.Module, images: Tensor, folder: Path) -> dict[str, Recipe]:
    """The recipes for a model: from the folder, or made on `images` and kept there."""
    found = {}
    for method in ALL:
        path = folder / f"{name}-{method}.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            recipe_for(method, model, images, PATCHES, find_host(model).depth).save(path)
        found[method] = Recipe.load(path)
    return found


def measure(name: str, batches: list[int], arguments: argparse.Namespace) -> None:
    """Time one model at some batch sizes, and add the rows of each to the file."""
    torch.manual_seed(0)
    model = timm_model(name).eval()
    images = (scenes(0, max(*batches, CALIBRATION), seed=5, size=224).images - 0.5) / 0.5
    recipes = recipes_of(name, model, images[:CALIBRATION], arguments.recipes)
    unmerged = float(adamerge.flops.meter(model).unmerged().true)
    dtype = getattr(torch, arguments.dtype)
    model, images = model.to(dtype), images.to(dtype)
    models = {method: adamerge.apply(deepcopy(model), recipe) for method, recipe in recipes.items()}
    for batch in batches if not arguments.only_recipes else ():
        shown = images[:batch].contiguous()
        calls = {"unmerged": partial(model, shown), **{method: partial(net, shown) for method, net in models.items()}}
        with torch.inference_mode():
            medians = in_turn(calls, arguments.rounds)
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rounds": arguments.rounds}
        rows = []
        for method, net in models.items():
            left = float(adamerge.flops.cost(net).true.mean()) / unmerged
            gain = medians["unmerged"] / medians[method]
            row: dict[str, Any] = {"model": name, "dtype": arguments.dtype, "batch": batch, "method": method}
            row |= {"cut_true": round(1 - left, 4), "ratio_of_costs": round(1 / left, 3)}
            row |= {"unmerged_ms": round(medians["unmerged"], 3), "ms": round(medians[method], 3)}
            rows.append({**row, "speed_up": round(gain, 3), "share": round(gain * left, 3), **about, "date": date})
            print({key: rows[-1][key] for key in (*row, "speed_up", "share")}, flush=True)
        if arguments.out is not None:
            append(arguments.out, rows)


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median milliseconds of each call; all take turns."""
    counts, times = {}, {name: [] for name in calls}
    for name, call in calls.items():
        warm = [time_call(call, CPU)[1] for _ in range(2)]
        counts[name] = max(1, round(SPAN_S / min(warm)))
    for _ in range(rounds):
        for name, call in calls.items():
            _, seconds = time_call(lambda call=call, name=name: [call() for _ in range(counts[name])][-1], CPU)
            times[name].append(1e3 * seconds / counts[name])
    return {name: statistics.median(column) for name, column in times.items()}


def main() -> None:
    """Measure the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--recipes", type=Path, required=True, help="a folder in which recipes are kept")
    parser.add_argument("--only-recipes", action="store_true", help="make the recipes and time nothing")
    parser.add_argument("--out", type=Path, help="a CSV file that rows are added to")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in arguments.models.split(","):
        measure(name, [int(batch) for batch in arguments.batches.split(",")], arguments)


if __name__ == "__main__":
    main()
