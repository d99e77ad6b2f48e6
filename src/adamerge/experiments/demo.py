"""A demonstration without network access: the embedded model on generated images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from adamerge.calibration import calibrate
from adamerge.core.errors import BadOption
from adamerge.core.files import check_can_write, write_atomically
from adamerge.core.recipe import Recipe
from adamerge.embedded import CLASSES, Scenes, load, preprocess, scenes
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
from adamerge.evaluation import evaluate
from adamerge.methods import adamerge, none, tome
from adamerge.patching.apply import apply, remove, trace
from adamerge.plots import frontier, gallery

CALIBRATION_IMAGES = 48
# For each compression: r_max of AdaMerge as published, r_max of the variant below, and r of ToMe.
TIERS = ((14, 12, 4), (27, 28, 12))
# With cosine affinity, centrality is high for tokens similar to the others, so background merges first.
VARIANT: dict[str, Any] = {
    "affinity": "cosine",
    "split": "alternating",
    "averaging": "size",
    "proportional_attention": True,
}


def run(out: Path, images: int, show: Callable[[Any], None]) -> None:
    """Calibrate, evaluate and plot; calls `show` with the table, and a line for each file that it wrote to `out`."""
    if images < 1:
        raise BadOption(f"the number of images must be at least 1; got {images}")
    check_can_write(out, folder=True)
    model = load()
    drawn = scenes(0, images, seed=TEST_SEED)
    data = list(zip(preprocess(drawn.images).split(64), drawn.labels.split(64), strict=True))
    calibration = preprocess(scenes(0, CALIBRATION_IMAGES, seed=CALIBRATION_SEED).images)
    rows = [{"method": "none", "setting": "unmerged", **evaluate(model, data, none()).summary()}]
    shown = none()
    for published, variant, r in TIERS:
        shown = _calibrated(model, calibration, adamerge(variant, **VARIANT))
        recipes = {
            ("AdaMerge", f"r_max={published}"): _calibrated(model, calibration, adamerge(published)),
            ("AdaMerge cosine", f"r_max={variant}"): shown,
            ("ToMe", f"r={r}"): tome(r),
        }
        for (method, setting), recipe in recipes.items():
            rows.append({"method": method, "setting": setting, **evaluate(model, data, recipe).summary()})
    show(_table(rows))
    write_atomically(out / "results.json", json.dumps(rows, indent=1) + "\n")
    picture = draw_gallery(model, shown, drawn, out / "merging.png")
    curve = frontier(rows, out / "frontier.png", cost="gmacs_true")
    for path in (out / "results.json", picture, curve):
        show(f"wrote {path}")


def draw_gallery(model: nn.Module, recipe: Recipe, drawn: Scenes, path: Path) -> Path:
    """Plot four scenes, from plain to cluttered, with what the model merged in each."""
    by_clutter = drawn.clutter.argsort()
    chosen = by_clutter[torch.linspace(0, len(by_clutter) - 1, 4).long()]
    apply(model, recipe)
    with torch.inference_mode():
        model(preprocess(drawn.images[chosen]))
    seen = trace(model)
    remove(model)
    titles = [CLASSES[label] for label in drawn.labels[chosen].tolist()]
    return gallery(drawn.images[chosen], seen, path, titles=titles)


def _calibrated(model: nn.Module, images: torch.Tensor, recipe: Recipe) -> Recipe:
    return recipe.with_stats(calibrate(model, images, recipe))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"The embedded model on {rows[0]['images']} generated images")
    for column in ("method", "top-1", "KL", "GMACs", "cut", "merged", "speed"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["setting"] if row["method"] == "none" else f"{row['method']} {row['setting']}",
            f"{row['top1']:.1%}",
            f"{row['kl']:.4f}",
            f"{row['gmacs_true']:.3f}",
            f"{1 - row['gmacs_true'] / row['gmacs_true_unmerged']:.0%}",
            f"{row['merged_mean']:.0f} ± {row['merged_std']:.0f}",
            f"{row['speedup']:.2f}×",
        )
    return table
