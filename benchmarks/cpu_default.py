"""How fast is `adamerge.apply(model, recipe); model(images)` on a CPU?  Merged models beside the unmerged one.

All contenders of a batch size run in turn in one process.  Weights are random: time does not depend on what they mean,
and counts adapt to the images all the same.  Recipes are made once and kept in a folder.  Rows of a CSV file with the
same model, dtype, batch and method are replaced.

    python benchmarks/cpu_default.py --recipes FOLDER [--models vit_tiny_patch16_224,…] [--batches 1,8,32]
        [--dtype float32|bfloat16|autocast] [--out benchmarks/results/cpu-default.csv]
"""

import argparse
import datetime
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plain_call import ALL, recipe_for, timm_model, transformers_model
from reading import write
from torch import Tensor, nn

import adamerge
from adamerge import Recipe
from adamerge.embedded import scenes
from adamerge.experiments.csv_tables import read_table
from adamerge.hosts.base import find_host
from adamerge.timing import time_call

MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")
SMALL = dict(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
# Models of other libraries by names of ours; all others are timm's.
OTHERS = {"transformers_vit_small": partial(transformers_model, "ViTConfig", "ViTForImageClassification", **SMALL)}
KEY = ("model", "dtype", "batch", "method")
CALIBRATION = 16
PATCH = 16
SPAN_S = 0.3
CPU = torch.device("cpu")


def recipes_of(name: str, model: nn.Module, images: Tensor, methods: Sequence[str], folder: Path) -> dict[str, Recipe]:
    """The recipes for a model: from the folder, or made on `images` and kept there."""
    found, patches = {}, (images.shape[-1] // PATCH) ** 2
    for method in methods:
        path = folder / f"{name}-{method}.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            recipe_for(method, model, images, patches, find_host(model).depth).save(path)
        found[method] = Recipe.load(path)
    return found


def measure(name: str, batches: list[int], arguments: argparse.Namespace) -> None:
    """Time one model at some batch sizes, and add the rows of each to the file."""
    torch.manual_seed(0)
    model = OTHERS.get(name, partial(timm_model, name))().eval()
    size = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))[-1]
    images = (scenes(0, max(*batches, CALIBRATION), seed=5, size=size).images - 0.5) / 0.5
    recipes = recipes_of(name, model, images[:CALIBRATION], arguments.methods.split(","), arguments.recipes)
    unmerged = float(adamerge.flops.meter(model).unmerged().true)
    casts = arguments.dtype == "autocast"
    dtype = torch.float32 if casts else getattr(torch, arguments.dtype)
    model, images = model.to(dtype), images.to(dtype)
    models = {method: adamerge.apply(deepcopy(model), recipe) for method, recipe in recipes.items()}
    for batch in batches if not arguments.only_recipes else ():
        shown = images[:batch].contiguous()
        calls = {"unmerged": partial(model, shown), **{method: partial(net, shown) for method, net in models.items()}}
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
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
            replace_rows(arguments.out, rows)


def replace_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put rows into a CSV file, in the place of those of the same models, dtypes, batches and methods."""
    new = {tuple(str(row[name]) for name in KEY): row for row in rows}
    found = read_table(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = [new.pop(tuple(row[name] for name in KEY), row) for row in found]
    write(path, [*kept, *new.values()])


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
    parser.add_argument("--methods", default=",".join(ALL))
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
