"""Draws the pictures of the README and the docs: accuracy against compute from benchmarks/results, and merged images.

Takes about a minute on two cores.  `--only plots` draws from the CSV files only.
"""

import argparse
from pathlib import Path

import torch
from reading import MODELS, ROOT, read

from adamerge.data.inputs import Input
from adamerge.embedded import CLASSES, load, preprocess, scenes
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
from adamerge.experiments.showing import Shower
from adamerge.patching.apply import applied, trace
from adamerge.plots import MethodColumn, side_by_side, tradeoff
from adamerge.plots.layer_sheet import layer_sheet
from adamerge.search.solve_variant import solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import find_variant

IMAGES = ROOT / "docs" / "images"
# Of the methods that were compared, those that are nearest to ours, ToMe, and AdaMerge as published.
COMPARED = {"dsm": "DSM", "dymu": "DyMU", "tome": "ToMe", "adamerge": "AdaMerge (paper)"}
OURS = {"tuned": "adamerge.tune", "preset": "adamerge.presets.best"}
LARGEST_CUT = 0.5
# The picture of the README: the scenes, the cut, and how many images calibrate.
SCENES, CUT, CALIBRATION_IMAGES = (7, 12), 0.5, 64
SHOWN = {"tome": "ToMe", "adamerge": "AdaMerge (paper)", "preset": "adamerge.presets.best"}


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("plots", "images"))
    parser.add_argument("--out", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    if arguments.only != "images":
        for model in MODELS:
            print(draw_plot(model, arguments.out / f"pareto-{model}.png"))
    if arguments.only != "plots":
        for path in draw_images(arguments.out):
            print(path)


def draw_plot(model: str, path: Path) -> Path:
    """Accuracy against compute saved, with few lines: ours, and the strongest others."""
    frontier, compared = read(f"frontier-{model}"), read(f"compare-{model}")
    full = float(compared[0]["top1"])
    curves = {
        label: [(float(row["cut_judge"]), float(row["top1"])) for row in frontier if row["method"] == method]
        for method, label in OURS.items()
    }
    for method, label in COMPARED.items():
        curves[label] = [(float(row["cut_true"]), float(row["top1"])) for row in compared if row["method"] == method]
    near = {label: [point for point in points if point[0] <= LARGEST_CUT + 0.02] for label, points in curves.items()}
    title = f"{model}, {compared[0]['images']} ImageNet-1k validation images"
    return tradeoff(near, full, path, winner=OURS["tuned"], title=title)


def draw_images(out: Path) -> list[Path]:
    """Scenes by several methods at equal cost side by side, and one scene layer by layer."""
    model = load()
    calibration = preprocess(scenes(0, CALIBRATION_IMAGES, seed=CALIBRATION_SEED).images)
    recipes = {
        label: solve_variant(model, calibration, find_variant(name), Target(cut=CUT)).recipe
        for name, label in SHOWN.items()
    }
    drawn = [scenes(index, 1, seed=TEST_SEED) for index in SCENES]
    images, labels = torch.cat([one.images for one in drawn]), torch.cat([one.labels for one in drawn]).tolist()
    columns: dict[str, MethodColumn] = {}
    for label, recipe in recipes.items():
        with applied(model, recipe), torch.inference_mode():
            answers = model(preprocess(images)).argmax(1).tolist()
            seen = trace(model)
        captions = [
            f"{left} tokens  {'✓' if answer == truth else '✗ ' + CLASSES[answer]}"
            for answer, truth, left in zip(answers, labels, seen.counts[:, -2].tolist(), strict=True)
        ]
        columns[label] = MethodColumn(seen.slots(-2), captions, f"{CUT:.0%} of the compute saved")
    titles = [CLASSES[truth] for truth in labels]
    (view,) = Shower(model, {SHOWN["preset"]: recipes[SHOWN["preset"]]}).views(Input("a cat", drawn=SCENES[0]))
    return [
        side_by_side(images, columns, out / "merging.png", titles=titles),
        layer_sheet(view, out / "layers.png"),
    ]


if __name__ == "__main__":
    main()
