"""Segmentation against cost: a linear probe trained on unmerged features and applied to merged features.

Images come from the embedded generator, which gives the mask of every object.  On one core the embedded model takes
about twenty minutes, DINOv2 ten:

    python benchmarks/segmentation.py
    python benchmarks/segmentation.py --model vit_small_patch14_reg4_dinov2 --weights FILE --image-size 224 \
        --training 300 --test 72 --calibration 24 --tries 16 --cuts 0.2,0.35,0.5 --methods tuned,preset,adamerge,tome

"repaired" among the methods repairs the tuned recipe on --repair-images drawn images.  For DINOv2 this takes another
ten minutes:

        --methods tuned,repaired,tome --repaired-cuts 0.35,0.5

Rows that are measured again in benchmarks/results/segmentation.csv are replaced, and docs/images/segmentation.png is
plotted again.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from segmentation_rows import SHOWN, with_kept, write_and_draw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from tqdm import tqdm

import adamerge
from adamerge.cli.lists import read_labels
from adamerge.cli.loading import load_model
from adamerge.core.recipe import Recipe
from adamerge.data.folders import normalise
from adamerge.embedded import CLASSES, scenes
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED, TRAINING_SEED
from adamerge.experiments.versions import versions
from adamerge.flops import meter
from adamerge.hosts.base import find_host
from adamerge.methods import METHODS
from adamerge.patching.stack import installed
from adamerge.repairing.options import RepairOptions
from adamerge.repairing.repairer import repair_with_report
from adamerge.search.evaluator import Evaluator, gather_images
from adamerge.search.local_search import SearchLimits, search_candidates
from adamerge.search.scaling import preset_at, scale_to_target
from adamerge.search.solve import solve
from adamerge.search.target import Target
from adamerge.search.variants import find_variant

RIVAL = "tome"
BATCH = 24
LABELS = len(CLASSES) + 1  # the background is label 0
# If the cut on the test images is off by more than this, the recipe is made again.
NEAR = 0.01
AGAIN = 2

Cell = tuple[Tensor, Tensor, Tensor]


Batches = Iterable[tuple[Tensor, Tensor]]


def drawn(model: nn.Module, seed: int, count: int) -> Batches:
    """Batches of preprocessed images, and of the label of every pixel."""
    for first in range(0, count, BATCH):
        some = scenes(first, min(BATCH, count - first), seed=seed)
        yield normalise(model, some.images), some.masks * (some.labels + 1)[:, None, None]


def features(model: Any, images: Tensor) -> Tensor:
    """The patch features of the last block as maps (b, d, grid, grid); merged tokens are unfolded."""
    return model.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)[0]


def train(model: Any, count: int) -> nn.Conv2d:
    """Train a linear probe on unmerged features; the label of a patch is the most frequent one of its pixels."""
    xs, ys = [], []
    with torch.no_grad():
        for images, pixels in tqdm(drawn(model, TRAINING_SEED, count), "features", -(-count // BATCH)):
            maps = features(model, images)
            grid = maps.shape[-1]
            xs.append(maps.flatten(2).mT.flatten(0, 1))
            cells = pixels.unflatten(2, (grid, -1)).unflatten(1, (grid, -1)).movedim(3, 2).flatten(3)
            ys.append(cells.mode(-1).values.flatten())
    x, y = torch.cat(xs), torch.cat(ys)
    torch.manual_seed(0)
    probe = nn.Linear(x.shape[1], LABELS)
    steps = 3000
    optimiser = torch.optim.AdamW(probe.parameters(), lr=1e-2, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in tqdm(range(steps), "probe"):
        some = torch.randint(len(x), (4096,))
        optimiser.zero_grad()
        cross_entropy(probe(x[some]), y[some]).backward()
        optimiser.step()
        schedule.step()
    head = nn.Conv2d(x.shape[1], LABELS, 1)
    head.weight.data, head.bias.data = probe.weight.data[:, :, None, None], probe.bias.data  # pyright: ignore
    return head


def judge(model: Any, head: nn.Module, test: Batches) -> Cell:
    """Intersections and unions for every test image and label, and the cost of every image."""
    both, either, counts = [], [], []
    host, prices = find_host(model), meter(model)
    stack = installed(host)
    with torch.no_grad():
        for images, pixels in test:
            logits = head(features(model, images))
            found = interpolate(logits, size=pixels.shape[1:], mode="bilinear", align_corners=False).argmax(1)
            hit = torch.where(found == pixels, found, LABELS)
            same, one, other = (_count(labels) for labels in (hit, found, pixels))
            both.append(same)
            either.append(one + other - same)
            if stack is not None:
                counts.append(adamerge.trace(model).counts)
    recipe = stack.recipe if stack is not None else None
    costs = prices.cost(torch.cat(counts), recipe) if counts else prices.unmerged()
    return torch.cat(both), torch.cat(either), costs.true


def _count(labels: Tensor) -> Tensor:
    rows = torch.zeros(len(labels), LABELS + 1, dtype=torch.float64)
    return rows.scatter_add_(1, labels.flatten(1), torch.ones_like(labels.flatten(1), dtype=torch.float64))[:, :LABELS]


def miou(both: Tensor, either: Tensor) -> Tensor:
    """The mean over labels of intersection over union; both are summed over the images, the second last dimension."""
    return (both.sum(-2) / either.sum(-2).clamp_min(1)).mean(-1)


def interval(one: Cell, other: Cell, times: int = 1000) -> tuple[float, float]:
    """The paired bootstrap interval of the difference of two mIoU on the same images."""
    random = torch.Generator().manual_seed(0)
    number = len(one[0])
    differences = []
    for _ in range(times):
        some = torch.randint(number, (number,), generator=random)
        differences.append(miou(one[0][some], one[1][some]) - miou(other[0][some], other[1][some]))
    low, high = torch.stack(differences).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


@dataclass
class Field:
    """A model with its probe, and all recipes that are compared.

    The tuned recipe and the preset use the loss on patch features.  They use no probe, label or mask.
    """

    model: Any
    head: nn.Module
    calibration: Tensor
    test: Batches
    tries: int
    to_repair: Tensor
    repair_options: dict[str, Any]

    def __post_init__(self) -> None:
        self.bench = Evaluator(self.model, gather_images(self.model, self.calibration), loss="features")
        self.full = judge(self.model, self.head, self.test)
        self.starts: tuple[Any, ...] = ()
        # For each cut: what makes the tuned recipe, and the target that gave this cut on the test images.
        self.found: dict[float, tuple[Callable[[float], Recipe], float]] = {}

    def level(self, label: str, cut: float) -> Cell:
        """The results of a method at a cut on the test images.

        A recipe whose cut on the test images differs from that on the calibration images is made again for a corrected
        target.  This uses only costs, and changes only the scale of the recipe.
        """
        make, asked, seen = self.maker(label, cut), cut, []
        if label == "repaired":
            asked = self.found[cut][1]
        for _ in range(AGAIN):
            adamerge.apply(self.model, make(asked))
            cell = judge(self.model, self.head, self.test)
            adamerge.remove(self.model)
            error = 1 - float(cell[2].mean() / self.full[2].mean()) - cut
            seen.append((abs(error), asked, cell))
            if abs(error) <= NEAR or not 0 < asked - error < 1:
                break
            asked -= error
        nearest, asked, cell = min(seen, key=lambda one: one[0])
        if label == "tuned":
            self.found[cut] = make, asked
        print(f"{label} at {cut:.0%}: mIoU {miou(*cell[:2]):.2%}, off by {nearest:.2%}", flush=True)
        return cell

    def maker(self, label: str, cut: float) -> Callable[[float], Recipe]:
        """A function that makes the recipe of a method for a cut."""
        if label == "preset":
            return lambda asked: preset_at(self.bench, Target(cut=asked))
        if label == "tuned":
            return self.tuned(cut)
        if label == "repaired":
            return lambda asked: self.repaired(self.found[cut][0](asked))
        variant = find_variant(label)
        method = METHODS[variant.method]
        options: dict[str, Any] = {"tolerance": NEAR, "options": variant.options, "how": variant.how}
        return lambda asked: solve(self.model, self.calibration[:BATCH], method, asked, **options).recipe

    def tuned(self, cut: float) -> Callable[[float], Recipe]:
        """Search on the calibration images, starting from the result at the previous cut."""
        limits = SearchLimits(self.tries // (2 if self.starts else 1))
        trial, _ = search_candidates(self.bench, Target(cut=cut), limits, starts=self.starts)
        self.starts = ((trial.family, trial.rates),)
        print(f"tuned at {cut:.0%}: loss {trial.loss:.4g}, {trial.family}", flush=True)

        def make(asked: float) -> Recipe:
            found = scale_to_target(self.bench, trial.family, trial.rates, Target(cut=asked)).recipe
            return self.bench.sweep(found).recipe

        return make

    def repaired(self, recipe: Recipe) -> Recipe:
        """The recipe with a patch that was trained on drawn images without labels."""
        options = RepairOptions(loss="features", progress=False, **self.repair_options)
        report = repair_with_report(self.model, self.to_repair, recipe, options)
        print(report, flush=True)
        return report.recipe


def main() -> None:
    """Train the probe, measure every method at every cut, write the rows and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--image-size", type=int, help="another than the model's own; its positions are resampled")
    parser.add_argument("--training", type=int, default=1200, help="images that the probe is trained on")
    parser.add_argument("--test", type=int, default=240)
    parser.add_argument("--calibration", type=int, default=96, help="images to tune on; methods use the first 24")
    parser.add_argument("--tries", type=int, default=24, help="recipes to try at the first cut; half as many later")
    parser.add_argument("--cuts", default="0.1,0.2,0.3,0.4,0.5")
    parser.add_argument("--methods", default=SHOWN)
    parser.add_argument("--repair-images", type=int, default=96, help="images to repair on")
    parser.add_argument("--repair-options", default='{"epochs": 6, "batch_size": 8, "learning_rate": 0.0005}')
    parser.add_argument("--repaired-cuts", help="the cuts at which 'repaired' is measured; all if left out")
    given = parser.parse_args()
    model = load_model(given.model, given.weights, False, "cpu", "fp32", image_size=given.image_size)
    head = train(model, given.training)
    calibration = normalise(model, scenes(0, given.calibration, seed=CALIBRATION_SEED).images)
    to_repair = normalise(model, scenes(0, given.repair_images, seed=CALIBRATION_SEED).images)
    test = list(drawn(model, TEST_SEED, given.test))
    how = json.loads(given.repair_options)
    field = Field(model, head, calibration, test, given.tries, to_repair, how)
    rows = [row(given.model, "none", 0.0, field.full, field.full, None)]
    for cut in map(float, given.cuts.split(",")):
        skipped = given.repaired_cuts is not None and cut not in map(float, given.repaired_cuts.split(","))
        labels = [label for label in read_labels(given.methods) if label != "repaired" or not skipped]
        cells = {label: field.level(label, cut) for label in labels}
        for label, cell in cells.items():
            rival = None if label == RIVAL else cells[RIVAL]
            options = json.dumps({"images": given.repair_images, **how}) if label == "repaired" else ""
            rows.append({**row(given.model, label, cut, cell, field.full, rival), "options": options})
            print(rows[-1], flush=True)
        write_and_draw(with_kept(rows))


def row(model: str, label: str, cut: float, cell: Cell, full: Cell, rival: Cell | None) -> dict[str, Any]:
    """A row of the results."""
    low, high = interval(cell, full)
    against = (None, None, None)
    if rival is not None:
        against = (float(miou(*cell[:2]) - miou(*rival[:2])), *interval(cell, rival))
    known = versions()
    return {
        "method": label,
        "target_cut": cut,
        "cut_true": round(float(1 - cell[2].mean() / full[2].mean()), 4),
        "miou": round(float(miou(*cell[:2])), 4),
        "lost": round(float(miou(*cell[:2]) - miou(*full[:2])), 4),
        "lost_low": round(low, 4),
        "lost_high": round(high, 4),
        **{
            name: "" if value is None else round(value, 4)
            for name, value in zip(("vs_tome", "vs_tome_low", "vs_tome_high"), against, strict=True)
        },
        "images": len(cell[0]),
        "model": model,
        "device": known["device"],
        "torch": known["torch"],
        "adamerge": adamerge.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
