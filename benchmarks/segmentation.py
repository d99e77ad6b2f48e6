"""Segmentation against cost: a linear probe trained on unmerged features, applied unchanged to merged ones.

The embedded model sees images from the embedded generator, which knows every object's pixels.  Runs on a CPU in about
ten minutes; writes benchmarks/results/segmentation.csv and docs/images/segmentation.png.
"""

import csv
import io
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate
from tqdm import tqdm

import adamerge
from adamerge.core.files import write_atomically
from adamerge.embedded import CLASSES, load, preprocess, scenes
from adamerge.embedded.scenes import CALIBRATION_SEED, TEST_SEED, TRAINING_SEED
from adamerge.flops import meter
from adamerge.methods import METHODS
from adamerge.models.host import find_host
from adamerge.solve import find_variant, solve
from adamerge.versions import versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "segmentation.csv"
PICTURE = ROOT / "docs" / "images" / "segmentation.png"
METHODS_SHOWN = ("adamerge", "adamerge (cosine)", "adamerge (cosine, exchanged)", "tome", "dsm", "random")
CUTS = (0.1, 0.2, 0.3, 0.4, 0.5)
RIVAL = "tome"
TRAINING, TEST, CALIBRATION, BATCH = 1200, 240, 24, 24
LABELS = len(CLASSES) + 1  # the background is label 0
GRID = 14


def drawn(seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images and of the label of every pixel."""
    for first in range(0, count, BATCH):
        some = scenes(first, min(BATCH, count - first), seed=seed)
        yield preprocess(some.images), some.masks * (some.labels + 1)[:, None, None]


def features(model: Any, images: Tensor) -> Tensor:
    """The patch features of the last block as maps, `(b, d, grid, grid)`; merged models give full ones."""
    return model.forward_intermediates(images, indices=1, norm=True, intermediates_only=True)[0]


def train(model: Any) -> torch.nn.Conv2d:
    """A linear probe on unmerged features: the label of a patch is that of most of its pixels."""
    xs, ys = [], []
    with torch.no_grad():
        for images, pixels in tqdm(drawn(TRAINING_SEED, TRAINING), "features", TRAINING // BATCH):
            xs.append(features(model, images).flatten(2).mT.flatten(0, 1))
            cells = pixels.unflatten(2, (GRID, -1)).unflatten(1, (GRID, -1)).movedim(3, 2).flatten(3)
            ys.append(cells.mode(-1).values.flatten())
    x, y = torch.cat(xs), torch.cat(ys)
    torch.manual_seed(0)
    probe = torch.nn.Linear(x.shape[1], LABELS)
    steps = 3000
    optimiser = torch.optim.AdamW(probe.parameters(), lr=1e-2, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in tqdm(range(steps), "probe"):
        some = torch.randint(len(x), (4096,))
        optimiser.zero_grad()
        cross_entropy(probe(x[some]), y[some]).backward()
        optimiser.step()
        schedule.step()
    head = torch.nn.Conv2d(x.shape[1], LABELS, 1)
    head.weight.data, head.bias.data = probe.weight.data[:, :, None, None], probe.bias.data  # pyright: ignore
    return head


def judge(model: Any, head: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Intersections and unions of every image and label, and what every image cost."""
    both, either, counts = [], [], []
    host, prices = find_host(model), meter(model)
    with torch.no_grad():
        for images, pixels in drawn(TEST_SEED, TEST):
            logits = head(features(model, images))
            found = interpolate(logits, size=pixels.shape[1:], mode="bilinear", align_corners=False).argmax(1)
            hit = torch.where(found == pixels, found, LABELS)
            same, one, other = (_count(labels) for labels in (hit, found, pixels))
            both.append(same)
            either.append(one + other - same)
            if host.stack is not None:
                counts.append(adamerge.trace(model).counts)
    recipe = host.stack.recipe if host.stack is not None else None
    costs = prices.cost(torch.cat(counts), recipe) if counts else prices.unmerged()
    return torch.cat(both), torch.cat(either), costs.true


def _count(labels: Tensor) -> Tensor:
    rows = torch.zeros(len(labels), LABELS + 1, dtype=torch.float64)
    return rows.scatter_add_(1, labels.flatten(1), torch.ones_like(labels.flatten(1), dtype=torch.float64))[:, :LABELS]


def miou(both: Tensor, either: Tensor) -> Tensor:
    """The mean over labels of intersection over union, of sums over the images (the last dimension but one)."""
    return (both.sum(-2) / either.sum(-2).clamp_min(1)).mean(-1)


def interval(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], times: int = 1000) -> tuple[float, float]:
    """The paired bootstrap interval of the difference of two mIoU over the same images."""
    random = torch.Generator().manual_seed(0)
    differences = []
    for _ in range(times):
        some = torch.randint(TEST, (TEST,), generator=random)
        differences.append(miou(one[0][some], one[1][some]) - miou(other[0][some], other[1][some]))
    low, high = torch.stack(differences).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def main() -> None:
    """Train, measure every cell, write the rows and the picture."""
    model: Any = load()
    head = train(model)
    full = judge(model, head)
    calibration = preprocess(scenes(0, CALIBRATION, seed=CALIBRATION_SEED).images)
    rows: list[dict[str, Any]] = [_row("none", 0.0, full, full, None)]
    for cut in CUTS:
        cells = {}
        for label in METHODS_SHOWN:
            variant = find_variant(label)
            found = solve(
                model,
                calibration,
                METHODS[variant.method],
                cut,
                tolerance=0.02,
                options=variant.options,
                how=variant.how,
            )
            adamerge.apply(model, found.recipe)
            cells[label] = judge(model, head)
            adamerge.remove(model)
        for label, cell in cells.items():
            rows.append(_row(label, cut, cell, full, None if label == RIVAL else cells[RIVAL]))
            print(rows[-1], flush=True)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(RESULTS, file.getvalue())
    draw(rows)


Cell = tuple[Tensor, Tensor, Tensor]


def _row(label: str, cut: float, cell: Cell, full: Cell, rival: Cell | None) -> dict[str, Any]:
    low, high = interval(cell[:2], full[:2])
    against = (None, None, None)
    if rival is not None:
        against = (float(miou(*cell[:2]) - miou(*rival[:2])), *interval(cell[:2], rival[:2]))
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
        "images": TEST,
        "model": "embedded",
        "device": known["device"],
        "torch": known["torch"],
        "adamerge": adamerge.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def draw(rows: list[dict[str, Any]]) -> None:
    """mIoU over the true cut, a line for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    start = rows[0]
    for label in METHODS_SHOWN:
        cells = [start, *(row for row in rows if row["method"] == label)]
        axes.plot([100 * c["cut_true"] for c in cells], [100 * c["miou"] for c in cells], marker="o", ms=4, label=label)
    axes.set_xlabel("cost saved (true multiply–accumulates), %")
    axes.set_ylabel("mIoU, %")
    axes.set_title("A linear probe on unmerged features, run on merged ones")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
