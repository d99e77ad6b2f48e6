"""How much faster could a merged file be if merging cost nothing?  Files that merge beside files that drop tokens.

A file that drops the last tokens at every layer has the same widths and no operators that decide and merge: none that
merges can be faster.  Batch 1, OpenVINO, random weights; the three files of a row run in turn in one process.  Recipes
are those of `benchmarks/engines.py`, kept in its folder.  Rows are added to a CSV file.

    python benchmarks/export_slices.py --work FOLDER [--models vit_tiny_patch16_224,…] [--cuts 0.25,0.5] [--rounds 25]
        [--out benchmarks/results/export-slices.csv]
"""

import argparse
import statistics
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import openvino
import timm
import torch
from engines import MODELS, quiet_warnings, recipe_of
from reading import RESULTS, append
from torch import Tensor

import adamerge
from adamerge import Recipe
from adamerge.embedded import scenes
from adamerge.exporting import backend
from adamerge.exporting.formats import find_format
from adamerge.exporting.openvino_format import compile_file
from adamerge.exporting.program import export_program
from adamerge.exporting.state import ExportState
from adamerge.hosts.base import find_host
from adamerge.timing import time_call

CPU = torch.device("cpu")
WARM_UP, CALLS = 4, 4


def drop_last(state: ExportState, recipe: Recipe, depth: int, heads: Any) -> ExportState:
    """In place of a merge: the last patch tokens are dropped, as many as the recipe would merge away."""
    patches = state.tokens - state.prefix
    r = min(recipe.budget.fixed_count(state.layer, depth, patches) or 0, patches // 2)
    return replace(state, x=state.x[:, : state.tokens - r], size=state.size[:, : state.tokens - r])


def write_files(name: str, recipe: Recipe, images: Tensor, folder: Path) -> dict[str, Path]:
    """ONNX files of the unmerged model, of the merged one, and of one that drops tokens."""
    paths = {}
    for way, one in (("unmerged", adamerge.methods.none()), ("merges", recipe), ("drops", recipe)):
        torch.manual_seed(0)
        host = find_host(timm.create_model(name).eval())
        paths[way] = folder / f"{way}.onnx"
        with patch.object(backend, "merge", drop_last if way == "drops" else backend.merge):
            find_format("onnx").write(export_program(host, one, images, ("output",)), paths[way], {})
    return paths


def measure(name: str, cut: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a model at a cut: one for each precision."""
    images = (scenes(0, 16, seed=5, size=224).images - 0.5) / 0.5
    torch.manual_seed(0)
    recipe = recipe_of(name, "tome", cut, timm.create_model(name).eval(), images, options.work)
    rows = []
    with TemporaryDirectory() as folder:
        paths = write_files(name, recipe, images[:2], Path(folder))
        for precision in ("f32", "bf16"):
            requests = {way: compile_file(path, precision, batch=1) for way, path in paths.items()}
            image = images[:1].numpy()
            calls = {
                way: partial(compiled.create_infer_request().infer, {0: image}, share_inputs=True)
                for way, compiled in requests.items()
            }
            times: dict[str, list[float]] = {way: [] for way in calls}
            for turn in range(WARM_UP + options.rounds):
                for way, call in calls.items():
                    _, seconds = time_call(lambda call=call: [call() for _ in range(CALLS)][-1], CPU)
                    if turn >= WARM_UP:
                        times[way].append(seconds)
            median = {way: statistics.median(column) for way, column in times.items()}
            rows.append(
                {
                    "model": name,
                    "precision": precision,
                    "cut": cut,
                    "merges": round(median["unmerged"] / median["merges"], 4),
                    "drops": round(median["unmerged"] / median["drops"], 4),
                    "ratio_of_costs": round(1 / (1 - cut), 4),
                    "rounds": options.rounds,
                    "threads": torch.get_num_threads(),
                    "openvino": openvino.__version__,
                    "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure every model at every cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--cuts", default="0.25,0.5")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS / "export-slices.csv")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    with quiet_warnings():
        for name in options.models.split(","):
            for cut in map(float, options.cuts.split(",")):
                append(options.out, measure(name, cut, options))


if __name__ == "__main__":
    main()
