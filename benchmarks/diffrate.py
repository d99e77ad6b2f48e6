"""Runs the published schedules of DiffRate for DeiT-Ti next to our tuned recipe at the same cost.

The schedules are the numbers of tokens, class token included, that stay in each layer after pruning and after merging,
from compression_rate.json of https://github.com/OpenGVLab/DiffRate (Chen et al., ICCV 2023).  They were trained on
ImageNet; no weight was.  No code of that repository is used.  Our reading of the paper as a recipe: tokens are sorted
by the class token's attention; the least attended ones are pruned, the next ones merge into the most similar token that
stays.  A pruned token has weight 0 in the average of the token that is most similar to it; it still counts for that
token's size in proportional attention.

    python benchmarks/diffrate.py --weights FILE --calibration FOLDER --judge FOLDER
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from reading import RESULTS, append, read
from torch import Tensor
from torch.nn.functional import normalize

from adamerge.cli.loading import load_data, load_model
from adamerge.core.budget import Fixed
from adamerge.core.evidence import Evidence, Widths
from adamerge.core.match import Links
from adamerge.core.parts import from_json, part
from adamerge.core.recipe import Recipe
from adamerge.core.salience import ClassAttention
from adamerge.core.types import PerToken
from adamerge.experiments.bootstrap import paired
from adamerge.experiments.csv_tables import read_table
from adamerge.experiments.versions import versions
from adamerge.search.evaluator import Evaluator, SweepResult
from adamerge.search.families import protect
from adamerge.search.scaling import scale_to_target
from adamerge.search.target import Target

MODEL = "deit_tiny_patch16_224"
PATCHES = 196
# How far the cut of the tuned recipe may be from that of a schedule.
NEAR = 0.002
# GFLOPs that DiffRate names a schedule by: tokens after pruning, tokens after merging.
SCHEDULES = {
    "0.6": (
        (197, 196, 180, 157, 130, 107, 86, 73, 63, 51, 40, 3),
        (197, 187, 167, 139, 114, 90, 76, 66, 57, 45, 37, 3),
    ),
    "0.8": (
        (197, 197, 196, 186, 166, 147, 117, 103, 92, 80, 74, 3),
        (197, 196, 190, 172, 154, 125, 107, 96, 84, 78, 70, 3),
    ),
    "1.0": (
        (197, 197, 196, 194, 188, 184, 178, 164, 156, 137, 129, 21),
        (197, 197, 196, 190, 186, 154, 148, 156, 145, 135, 125, 21),
    ),
}


@part
@dataclass(frozen=True)
class IntoAttended:
    """Links the least attended tokens to the most similar of the others; `left` patches stay in each layer."""

    left: tuple[int, ...]
    needs_attention: ClassVar[str] = "weights"

    def __call__(self, evidence: Evidence, salience: PerToken) -> Links:
        keep = self.left[evidence.layer]
        stays = rank(salience) < keep
        tokens = normalize(evidence.tokens, dim=-1)
        similarity = (tokens @ tokens.mT).masked_fill(~stays[:, None, :], float("-inf"))
        return Links(-salience, similarity.argmax(-1), ~stays, salience.shape[1] - keep)

    def macs(self, n: Tensor, at: Widths) -> Tensor:
        """The similarities of those that go to those that stay; a number of tokens belongs to one layer."""
        stay = torch.zeros(PATCHES + 1, dtype=n.dtype)
        for before, after in pairwise((PATCHES, *self.left)):
            stay[before] = after
        kept = stay.to(n.device)[n.long()]
        return (n - kept) * kept * at.dim


@part
@dataclass(frozen=True)
class PrunedAreLost:
    """Weights are sizes, and 0 for tokens after the first `left` in the order of attention."""

    left: tuple[int, ...]

    def __call__(self, evidence: Evidence, salience: PerToken) -> PerToken:
        return torch.where(rank(salience) < self.left[evidence.layer], evidence.size, 0)


def rank(salience: PerToken) -> Tensor:
    """The place of each token in the order from most to least salient; ties go to the lower index."""
    order = salience.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(salience.shape[1], device=salience.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def counts_left(schedule: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The patches left after pruning and after merging in each layer; never more than before."""
    pruned: list[int] = []
    merged: list[int] = []
    left = PATCHES
    for after_pruning, after_merging in zip(*schedule, strict=True):
        pruned.append(min(left, after_pruning - 1))
        left = min(pruned[-1], after_merging - 1)
        merged.append(left)
    return tuple(pruned), tuple(merged)


def diffrate(schedule: tuple[tuple[int, ...], tuple[int, ...]]) -> Recipe:
    """Our reading of DiffRate with a schedule."""
    pruned, merged = counts_left(schedule)
    gone = tuple(float(before - after) for before, after in pairwise((PATCHES, *merged)))
    return Recipe(
        site="after_attention",
        salience=ClassAttention(),
        links=IntoAttended(merged),
        budget=Fixed(gone),
        weight=PrunedAreLost(pruned),
        proportional_attention=True,
    )


def preset_parts(recipe: Recipe) -> Recipe:
    """The counts of a recipe with the parts of our preset."""
    return replace(protect(class_token=True, static=True), budget=recipe.budget)


def tuned_at(evaluator: Evaluator, cut: float) -> Recipe:
    """The tuned recipe of the frontier whose cut is nearest, scaled to this cut on the calibration images."""
    rows = [row for row in read(f"frontier-{MODEL}") if row["method"] == "tuned"]
    options = json.loads(min(rows, key=lambda row: abs(float(row["cut"]) - cut))["options"])
    scaled = scale_to_target(evaluator, from_json(options["family"]), tuple(options["rates"]), Target(cut=cut))
    return evaluator.sweep(scaled.recipe).recipe


def tuned_on(judge: Evaluator, bench: Evaluator, cut: float) -> SweepResult:
    """The tuned recipe on the images to judge on; scaled once more if its cut there is not the wanted one.

    Only their cost is used for that.
    """
    found = judge.sweep(tuned_at(bench, cut), calibrate=False)
    error = 1 - found.macs.mean().item() / judge.full - cut
    return found if abs(error) <= NEAR else judge.sweep(tuned_at(bench, cut - error), calibrate=False)


def images_of(model: Any, source: str, limit: int | None) -> tuple[list[Tensor], Tensor]:
    """Batches of images of a folder, and all labels."""
    found = list(load_data(model, source, seed=0, batch_size=32, workers=0, limit=limit, labelled=True))
    return [images for images, _ in found], torch.cat([labels for _, labels in found])


def main() -> None:
    """Write a row for each schedule and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--calibration", required=True, help="a folder of images to calibrate our recipe on")
    parser.add_argument("--judge", required=True, help="a folder of images with labels")
    parser.add_argument("--calibration-images", type=int, default=200)
    parser.add_argument("--judge-images", type=int)
    parser.add_argument("--schedules", default="0.8,0.6,1.0")
    parser.add_argument("--out", type=Path, default=RESULTS / "diffrate.csv")
    given = parser.parse_args()
    begin = time.monotonic()
    model = load_model(MODEL, given.weights, False, "cpu", "fp32")
    done = read_table(given.out.read_text(encoding="utf-8")) if given.out.exists() else []
    used, _ = images_of(model, given.calibration, given.calibration_images)
    judged, labels = images_of(model, given.judge, given.judge_images)
    bench, judge = Evaluator(model, used), Evaluator(model, judged)
    full = torch.cat([wanted[0].argmax(1) for wanted in judge.wanted]) == labels
    print(f"unmerged: top-1 {full.double().mean():.2%}, {time.monotonic() - begin:.0f} s", flush=True)
    for name in given.schedules.split(","):
        if any(row["schedule"] == name for row in done):
            continue
        theirs = judge.sweep(diffrate(SCHEDULES[name]))
        cut = 1 - theirs.macs.mean().item() / judge.full
        found = {
            "DiffRate's schedule, our reading of its merging": theirs,
            "DiffRate's schedule, the preset's merging": judge.sweep(preset_parts(theirs.recipe)),
            "tuned": tuned_on(judge, bench, cut),
        }
        rows = [row(name, label, one, found["tuned"], full, labels, judge.full) for label, one in found.items()]
        append(given.out, rows)
        for one in rows:
            print({key: one[key] for key in ("method", "cut", "kl", "points")}, flush=True)


def row(
    schedule: str, label: str, one: SweepResult, tuned: SweepResult, full: Tensor, labels: Tensor, macs: float
) -> dict[str, Any]:
    """A row of the results."""
    right, best = ((each.choice == labels).double() for each in (one, tuned))
    points, against = paired(right, full.double()), paired(best, right)
    apart = paired(tuned.loss, one.loss)
    return {
        "model": MODEL,
        "schedule": schedule,
        "method": label,
        "cut": 1 - one.macs.mean().item() / macs,
        "gmacs": one.macs.mean().item() / 1e9,
        "top1": right.mean().item(),
        **_interval("points", points, 100),
        **_interval("tuned_minus_this", against, 100),
        "kl": one.loss.mean().item(),
        **_interval("tuned_kl_minus_this", apart, 1),
        "images": len(labels),
        "device": "cpu",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "versions": json.dumps(versions()),
    }


def _interval(name: str, found: Any, factor: float) -> dict[str, float]:
    ends = {"": found.mean, "_low": found.low, "_high": found.high}
    return {f"{name}{end}": round(factor * value, 6) for end, value in ends.items()}


if __name__ == "__main__":
    main()
