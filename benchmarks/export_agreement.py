"""Do exported files give what the merged model gives?  Real images, trained weights, every engine of a CPU.

Each row compares a file, run by its own engine, with the merged model in torch on the same images.

    python benchmarks/export_agreement.py --model vit_tiny_patch16_224 --weights FILE --calibration FOLDER --data FOLDER
        [--images 1000] [--cut 0.3] [--formats onnx,openvino] [--out benchmarks/results/export-agreement.csv]
"""

import argparse
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from frontier_inputs import read_images
from reading import RESULTS, append
from torch import Tensor, nn

import adamerge
from adamerge import Recipe
from adamerge.cli.loading import load_model
from adamerge.exporting.check import compare
from adamerge.exporting.formats import find_format
from adamerge.search.solve_variant import solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import find_variant

BATCH = 50
ENGINES = {"onnx": "onnxruntime", "openvino": "openvino"}


def recipes(model: nn.Module, calibration: Tensor, cut: float) -> Iterator[tuple[str, Recipe]]:
    """ToMe and the preset with fixed counts, at the same cost."""
    yield f"tome {cut:.0%}", solve_variant(model, calibration, find_variant("tome"), Target(cut=cut)).recipe
    yield f"static preset {cut:.0%}", adamerge.presets.best(model, calibration, cut=cut, static=True)


def main() -> None:
    """Write a row for each recipe and format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--calibration-images", type=int, default=64)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--cut", type=float, default=0.3)
    parser.add_argument("--formats", default="onnx,openvino")
    parser.add_argument("--out", type=Path, default=RESULTS / "export-agreement.csv")
    given = parser.parse_args()
    model = load_model(given.model, given.weights, False, "cpu", "fp32")
    calibration = read_images(model, given.calibration, given.calibration_images, 0)[0]
    images = read_images(model, given.data, given.images, 0)[0]
    with TemporaryDirectory() as folder:
        for name, recipe in recipes(model, calibration, given.cut):
            with torch.inference_mode(), adamerge.applied(model, recipe):
                expected = torch.cat([model(batch) for batch in images.split(BATCH)])
            for format in given.formats.split(","):
                writer = find_format(format)
                made = adamerge.export(model, images[:8], format, Path(folder) / f"m{writer.suffix}", recipe=recipe)
                run = writer.load(made.path, ("output",), "cpu")
                found = torch.cat([run(batch)["output"] for batch in images.split(BATCH)])
                check = compare({"output": expected}, {"output": found})
                row = {
                    "model": given.model,
                    "method": name,
                    "engine": ENGINES[format],
                    "version": version(ENGINES[format]),
                    "images": check.images,
                    "agreement": check.agreement,
                    "kl": f"{check.kl:.3g}",
                    "median_difference": f"{check.median_difference:.3g}",
                    "differing": round(check.differing, 4),
                    "largest_difference": f"{check.largest_difference:.3g}",
                    "largest_output": f"{expected.abs().max().item():.3g}",
                }
                append(given.out, [row])
                print(row, flush=True)


if __name__ == "__main__":
    main()
