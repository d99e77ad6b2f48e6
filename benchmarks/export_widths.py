"""Would an export of adaptive recipes pay?  What a file with fixed widths costs, and how good it is.

A file has fixed shapes, so a layer has one width for all images.  Images with fewer tokens are padded to it, and images
with more are merged down to it.  The width is a quantile of the token counts over calibration images; the greatest
count (quantile 1) keeps the result of nearly all images as it is.  Each row has beside it the preset with the same
count in every image, `static=True`, at the cost of that file.

    python benchmarks/export_widths.py --model vit_tiny_patch16_224 --weights FILE --calibration FOLDER --data FOLDER
        [--calibration-images 128] [--images 256] [--methods preset,adamerge] [--cuts 0.3,0.5]
        [--out benchmarks/results/export-widths.csv]
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from frontier_inputs import read_images
from reading import RESULTS, append
from torch import Tensor, nn

import adamerge
from adamerge import Recipe
from adamerge.cli.loading import load_model
from adamerge.core.budget import Budget
from adamerge.core.evidence import Evidence
from adamerge.core.match import Links
from adamerge.evaluation import kl_divergence
from adamerge.flops import Meter, meter
from adamerge.presets import best
from adamerge.search.solve_variant import solve_variant
from adamerge.search.target import Target
from adamerge.search.variants import find_variant

QUANTILES = (1.0, 0.9, 0.5)
BATCH = 32


@dataclass(frozen=True)
class AtMost:
    """A budget that also merges what is beyond the width of a layer."""

    inner: Budget
    widths: tuple[int, ...]
    ragged = True

    def may_merge(self, layer: int, depth: int) -> bool:
        return self.inner.may_merge(layer, depth)

    def fixed_count(self, layer: int, depth: int, patches: int) -> int | None:
        return None

    def __call__(self, links: Links, evidence: Evidence) -> Tensor:
        beyond = (evidence.counts - self.widths[evidence.layer]).clamp_min(0)
        return beyond.maximum(torch.as_tensor(self.inner(links, evidence), device=beyond.device))


def run(model: nn.Module, images: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the patch tokens that each image has after each layer."""
    logits, counts = [], []
    with torch.inference_mode(), adamerge.applied(model, recipe):
        for batch in images.split(BATCH):
            logits.append(model(batch).double().log_softmax(1))
            counts.append(adamerge.trace(model).counts)
    return torch.cat(logits), torch.cat(counts)


def rows_of(method: str, cut: float, model: nn.Module, calibration: Tensor, images: Tensor) -> list[dict[str, Any]]:
    """The adaptive recipe itself, and files of several widths, each with the static preset at its cost."""
    recipe = solve_variant(model, calibration, find_variant(method), Target(cut=cut)).recipe
    prices: Meter = meter(model)
    whole = prices.unmerged().true.item()
    with torch.inference_mode():
        full = torch.cat([model(batch) for batch in images.split(BATCH)]).double().log_softmax(1)
    seen = run(model, calibration, recipe)[1]
    merged, counts = run(model, images, recipe)
    shared = {"method": method, "cut": cut, "images": len(images)}
    own = 1 - prices.cost(counts, recipe).true.mean().item() / whole
    kl = kl_divergence(full, merged).mean().item()
    rows = [{**shared, "widths": "each image its own", "cut_true": own, "kl": kl}]
    for quantile in QUANTILES:
        widths = torch.quantile(seen.double(), quantile, dim=0).ceil()
        file_cut = 1 - prices.cost(widths[None], recipe).true.item() / whole
        capped = replace(recipe, budget=AtMost(recipe.budget, tuple(int(width) for width in widths)))
        found, found_counts = run(model, images, capped)
        row = {**shared, "widths": f"quantile {quantile}", "cut_true": file_cut}
        row["kl"] = kl_divergence(full, found).mean().item()
        row["forced"] = (found_counts != counts).any(1).double().mean().item()
        if file_cut > 0.01:
            preset = best(model, calibration, cut=file_cut, static=True)
            static, static_counts = run(model, images, preset)
            row["static_cut"] = 1 - prices.cost(static_counts, preset).true.mean().item() / whole
            row["static_kl"] = kl_divergence(full, static).mean().item()
        rows.append(row)
    return rows


def main() -> None:
    """Write the rows of each method and cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--calibration-images", type=int, default=128)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--methods", default="preset,adamerge")
    parser.add_argument("--cuts", default="0.3,0.5")
    parser.add_argument("--out", type=Path, default=RESULTS / "export-widths.csv")
    given = parser.parse_args()
    model = load_model(given.model, given.weights, False, "cpu", "fp32")
    calibration = read_images(model, given.calibration, given.calibration_images, 0)[0]
    images = read_images(model, given.data, given.images, 0)[0]
    for method in given.methods.split(","):
        for cut in map(float, given.cuts.split(",")):
            rows = rows_of(method, cut, model, calibration, images)
            fields = ("method", "cut", "images", "widths", "cut_true", "kl", "forced", "static_cut", "static_kl")
            shown = [{name: row.get(name, "") for name in fields} for row in rows]
            rounded = [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in shown]
            append(given.out, [{"model": given.model, **row} for row in rounded])
            print(*rounded, sep="\n", flush=True)


if __name__ == "__main__":
    main()
