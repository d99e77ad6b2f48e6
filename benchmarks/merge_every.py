"""Few merging blocks or many: loss and speed of the preset at small batches on a CPU.

Each block that merges first decides what to merge.  In a small model at batch 1 that takes most of the time which
merging saves.  The preset at every first, second and third block is made on calibration images and judged on others.
Then all of them run in turn with the unmerged model, in torch and in OpenVINO (with the same count in every image).
Rows are added to a CSV file.

    python benchmarks/merge_every.py --weights FILE --calibration FOLDER --data FOLDER
        [--model vit_tiny_patch16_224] [--cuts 0.25,0.5] [--every 1,2,3] [--batches 1,8]
"""

import argparse
import warnings
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from cpu_default import in_turn
from frontier_inputs import read_images
from reading import RESULTS, append
from torch import Tensor, nn

import adamerge
from adamerge import Recipe
from adamerge.cli.loading import load_model
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
from adamerge.experiments.benchmark.engines import EngineFiles, engine_contenders
from adamerge.experiments.benchmark.entries import Entry
from adamerge.experiments.versions import versions
from adamerge.presets import best
from adamerge.search.evaluator import Evaluator, SweepResult

BATCH = 32
ROUNDS = 15
OPENVINO = ("openvino", "openvino bf16")


@dataclass(frozen=True)
class Setting:
    """What is measured: the preset at a cut and at every so many blocks, with fixed or adaptive counts."""

    cut: float
    merge_every: int
    static: bool


Presets = dict[Setting, Recipe]


def presets(model: nn.Module, images: Tensor, cuts: list[float], every: list[int]) -> Presets:
    """The recipes of all settings."""
    settings = [Setting(*each) for each in product(cuts, every, (False, True))]
    return {each: best(model, images, each.cut, static=each.static, merge_every=each.merge_every) for each in settings}


def torch_speeds(model: nn.Module, recipes: Presets, images: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """The median milliseconds of plain calls, by the text of a setting; "none" is the unmerged model."""
    model, images = deepcopy(model).to(dtype), images.to(dtype)
    nets = {str(setting): adamerge.apply(deepcopy(model), recipe) for setting, recipe in recipes.items()}
    calls = {name: partial(net, images) for name, net in {"none": model, **nets}.items()}
    with torch.inference_mode():
        return in_turn(calls, ROUNDS)


def engine_speeds(model: nn.Module, recipes: Presets, images: Tensor, way: str, files: EngineFiles) -> dict[str, float]:
    """The same for exported files."""
    entries = [Entry(str(setting), recipe) for setting, recipe in recipes.items()]
    contenders = engine_contenders(model, entries, [way], files)
    calls = {contender.method: partial(contender.prepare(images), images) for contender in contenders}
    return in_turn(calls, ROUNDS)


def main() -> None:
    """Make the presets, judge them, time them and add the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--calibration", required=True, help="a folder of images")
    parser.add_argument("--data", required=True, help="a folder of images to judge on")
    parser.add_argument("--calibration-images", type=int, default=128)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--cuts", default="0.25,0.5")
    parser.add_argument("--every", default="1,2,3")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--out", type=Path, default=RESULTS / "merge-every.csv")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    model: Any = load_model(given.model, given.weights, False, "cpu", "fp32")
    used, _ = read_images(model, given.calibration, given.calibration_images, seed=CALIBRATION_SEED)
    judged, _ = read_images(model, given.data, given.images, seed=TEST_SEED)
    every = [int(number) for number in given.every.split(",")]
    recipes = presets(model, used, [float(cut) for cut in given.cuts.split(",")], every)
    judge = Evaluator(model, list(judged.split(BATCH)))
    found = {setting: judge.sweep(recipe, calibrate=False) for setting, recipe in recipes.items()}
    files = EngineFiles()
    for batch in (int(size) for size in given.batches.split(",")):
        images = judged[:batch].contiguous()
        for way in ("torch float32", "torch bfloat16", *OPENVINO):
            shown = {setting: recipe for setting, recipe in recipes.items() if setting.static == (way in OPENVINO)}
            if way in OPENVINO:
                medians = engine_speeds(model, shown, images, way, files)
            else:
                medians = torch_speeds(model, shown, images, getattr(torch, way.split()[1]))
            about = {"model": given.model, "engine": way, "batch": batch}
            rows = [{**about, **row(setting, found[setting], judge, medians)} for setting in shown]
            append(given.out, rows)
            print("\n".join(f"{each}" for each in rows), flush=True)


def row(setting: Setting, judged: SweepResult, judge: Evaluator, medians: dict[str, float]) -> dict[str, Any]:
    """One row: the loss on the judged images, and the speed-up over the unmerged model in the same engine."""
    return {
        **asdict(setting),
        "cut_true": round(1 - judged.macs.mean().item() / judge.full, 4),
        "loss": judged.loss.mean().item(),
        "unmerged_ms": round(medians["none"], 3),
        "ms": round(medians[str(setting)], 3),
        "speed_up": round(medians["none"] / medians[str(setting)], 3),
        "images": judge.number,
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "torch": versions("cpu")["torch"],
    }


if __name__ == "__main__":
    main()
