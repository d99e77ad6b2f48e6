"""How much of the promised speed-up is left in other engines?  Merged and unmerged models, engine by engine.

All engines of a batch size run in turn in one process, each merged model beside the unmerged one in the same engine.
Weights are random, images are drawn.  Recipes with fixed counts are solved for a cut of the true cost and kept in a
folder, and so are the exported files: use another folder for another device or dtype.  Rows are added to a CSV file.

    python benchmarks/engines.py --work FOLDER [--models vit_tiny_patch16_224,…] [--batches 1,8] [--cuts 0.25,0.5]
        [--methods tome,preset] [--engines openvino,onnxruntime,torch] [--rounds 10] [--only-files]
        [--device cpu] [--dtype float32] [--out benchmarks/results/engines.csv]

On a GPU, for example: --device cuda --dtype bfloat16 --models vit_base_patch16_224 --batches 32,256
--engines torch,aoti,onnxruntime.  An engine that is missing there gives a row with the reason.
"""

import argparse
import contextlib
import datetime
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from reading import append
from torch import Tensor, nn

import adamerge
from adamerge import Recipe
from adamerge.embedded import scenes
from adamerge.experiments.benchmark import Entry, bench
from adamerge.experiments.benchmark.engines import ENGINES, TORCH, EngineFiles, engine_contenders
from adamerge.exporting.formats import find_format
from adamerge.search.solve import solve
from adamerge.search.target import Target

MODELS = "vit_tiny_patch16_224,vit_small_patch16_224,vit_base_patch16_224"
CALIBRATION = 16


class KeptFiles(EngineFiles):
    """Files that stay in a folder between runs."""

    def __init__(self, folder: Path, names: dict[str, str]):
        super().__init__()
        self.kept, self.names = folder, names

    def file(self, model: nn.Module, recipe: Recipe, format: str, images: Tensor) -> Path:
        path = self.kept / f"{self.names[recipe.to_json()]}{find_format(format).suffix}"
        if not path.exists():
            path.write_bytes(super().file(model, recipe, format, images).read_bytes())
        return path


def recipe_of(name: str, method: str, cut: float, model: nn.Module, images: Tensor, folder: Path) -> Recipe:
    """The recipe of a method at a cut, from the folder or solved on `images`."""
    path = folder / f"{name}-{method}-{cut}.json"
    if not path.exists():
        if method == "preset":
            recipe = adamerge.presets.best(model, images, cut=cut, static=True)
        else:
            recipe = solve(model, images, adamerge.methods.METHODS[method], Target(cut=cut)).recipe
        recipe.save(path)
    return Recipe.load(path)


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def measure(name: str, options: argparse.Namespace) -> None:
    """Time one model and add its rows."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    batches = [int(size) for size in options.batches.split(",")]
    images = (scenes(0, max(*batches, CALIBRATION), seed=5, size=224).images - 0.5) / 0.5
    options.work.mkdir(parents=True, exist_ok=True)
    cuts = [float(cut) for cut in options.cuts.split(",")]
    recipes = {
        (method, cut): recipe_of(name, method, cut, model, images[:CALIBRATION], options.work)
        for method in options.methods.split(",")
        for cut in cuts
    }
    names = {recipe.to_json(): f"{name}-{method}-{cut}" for (method, cut), recipe in recipes.items()}
    names[adamerge.methods.none().to_json()] = f"{name}-none"
    files = KeptFiles(options.work, names)
    engines = options.engines.split(",")
    ways = [way for engine in engines for way in ENGINES[engine]]
    place = torch.device(options.device), getattr(torch, options.dtype)
    model, images = model.to(*place), images.to(*place)
    if options.only_files:
        for recipe in (adamerge.methods.none(), *recipes.values()):
            print(files.file(model, recipe, "aoti" if "aoti" in engines else "onnx", images), flush=True)
        return
    entries = [Entry(f"{method} {cut:.0%}", recipe) for (method, cut), recipe in recipes.items()]
    plain, merged = ([], []) if TORCH not in engines else (["eager"], ["packed"])
    if TORCH in engines and options.device != "cpu":
        plain, merged = ["graph"], ["packed graph"]
    rows = bench(
        model,
        images,
        entries if merged else [],
        batch_sizes=batches,
        rounds=options.rounds,
        unmerged=plain,
        merged=merged,
        others=lambda net: list(engine_contenders(net, entries, ways, files)),
        name=name,
        weights="random",
        source="drawn",
        progress=False,
    )
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    append(options.out, [_row(row, rows, date) for row in rows])


def _row(row: Any, rows: list[Any], date: str) -> dict[str, Any]:
    """One row of the file: times are medians; the share is speed-up over the ratio of costs, both in one engine."""
    torch_ways = {"packed": "eager", "packed graph": "graph"}
    same = [each for each in rows if each.batch == row.batch and each.method == "none"]
    (unmerged,) = [each for each in same if each.way == torch_ways.get(row.way, row.way)]
    before, after = unmerged.ms_p50, row.ms_p50
    speedup = before / after if before is not None and after is not None else None
    return {
        "model": row.model,
        "device": row.device,
        "dtype": row.dtype,
        "batch": row.batch,
        "method": row.method,
        "engine": row.way,
        "cut_true": "" if row.cut_true is None else round(row.cut_true, 4),
        "ms": "" if row.ms_p50 is None else round(row.ms_p50, 3),
        "speed_up": "" if speedup is None else round(speedup, 4),
        "ratio_of_costs": "" if row.ideal_true is None else round(row.ideal_true, 4),
        "share": "" if speedup is None or row.ideal_true is None else round(speedup / row.ideal_true, 4),
        "fastest_unmerged": "" if row.speedup is None else round(row.speedup, 4),
        "versions": row.versions,
        "date": date,
        "error": row.error,
    }


def main() -> None:
    """Time every model of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--cuts", default="0.25,0.5")
    parser.add_argument("--methods", default="tome,preset")
    parser.add_argument("--engines", default="openvino")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only-files", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engines.csv"))
    options = parser.parse_args()
    with quiet_warnings():
        for name in options.models.split(","):
            measure(name, options)


if __name__ == "__main__":
    main()
