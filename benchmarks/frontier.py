"""Tune at several cuts and compare with other methods, whose own parameters are tuned as well.

The settings of the other methods are solved for the cost and selected by KL divergence on the tuning images.  All
methods are evaluated on other images.  Rows are written as they are measured.  Images are a folder (root/class/image)
or a file that torch.save wrote with `images` (uint8, cropped for the model, or float, preprocessed) and `labels`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from frontier_inputs import meet, read_images
from reading import RESULTS, append
from torch import Tensor, nn

from adamerge.cli.loading import load_model
from adamerge.core.budget import Adaptive
from adamerge.core.errors import BadOption
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
from adamerge.experiments.bootstrap import intervals, paired
from adamerge.experiments.versions import versions
from adamerge.methods import METHODS
from adamerge.search.evaluator import AT_ONCE, AT_ONCE_ELSEWHERE, Evaluator, SweepResult
from adamerge.search.local_search import SearchLimits, search_candidates
from adamerge.search.scaling import preset_at, scale_to_target
from adamerge.search.target import Target
from adamerge.search.tuner import hold_out

WEIGHED = [{"proportional_attention": True}, {"proportional_attention": False}]
UNWEIGHED = WEIGHED[::-1]
EXCHANGED = {"split": "alternating", "averaging": "size", "proportional_attention": True}
# The settings to try for each method; the first is its default.  The knob is solved for the cost.
OPEN: dict[str, list[dict[str, Any]]] = {
    "tome": WEIGHED,
    "pitome": [{"margin": margin} | weighed for weighed in WEIGHED for margin in (0.9, 0.75, 0.5)],
    "dsm": [{"delay": delay} for delay in (4, 1, 2, 3, 5, 6)] + [{"delay": delay, "windows": True} for delay in (2, 4)],
    "tofu": [{"until": until} | weighed for weighed in WEIGHED for until in (0.5, 0.25, 0.75)],
    "evit": UNWEIGHED,
    "ats": [{"first": first} | weighed for weighed in UNWEIGHED for first in (0.25, 0.1, 0.4)],
    "dymu": WEIGHED,
    "vid_tldr": WEIGHED,
    "adamerge": [
        {},
        {"affinity": "cosine"},
        {"affinity": "cosine", **EXCHANGED},
        {"affinity": "cosine", "direction": "protecting", **EXCHANGED},
        {"direction": "protecting", **EXCHANGED},
    ],
    "random": [{}],
}


@dataclass(frozen=True)
class Found:
    """A method at a cut: the recipe, and its loss and cut on the tuning images."""

    method: str
    options: dict[str, Any]
    knob: float | None
    recipe: Recipe
    loss: float
    cut: float
    untuned: bool
    sweeps: int = 0
    seconds: float = 0.0


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--image-size", type=int, help="another than the model's own; its positions are resampled")
    parser.add_argument("--tune", default="embedded", help="images to tune on: a folder, a .pt file, or 'embedded'")
    parser.add_argument("--judge", default="embedded", help="images to evaluate on, likewise")
    parser.add_argument("--tune-images", type=int, default=512)
    parser.add_argument("--judge-images", type=int, default=2000)
    parser.add_argument("--sample", type=int, default=0, help="of a .pt file, tune on images this far from the usual")
    parser.add_argument("--cuts", default="0.3,0.4,0.2,0.5,0.1,0.6")
    parser.add_argument("--tries", type=int, default=60, help="recipes to try at the first cut; half as many later")
    parser.add_argument("--methods", default=",".join(OPEN))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipes", type=Path, help="a folder for the tuned recipes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--append", action="store_true", help="add cuts to the rows that are there")
    arguments = parser.parse_args()
    given = (arguments.model, arguments.weights, False, arguments.device, arguments.dtype)
    model = load_model(*given, image_size=arguments.image_size)
    frontier = Frontier(model, arguments)
    out: Path = arguments.out or RESULTS / f"frontier-{arguments.model}.csv"
    if not arguments.append:
        out.unlink(missing_ok=True)
    for cut in map(float, arguments.cuts.split(",")):
        for row in frontier.rows(cut):
            append(out, [row])


class Frontier:
    """A model with images to tune on and images to evaluate on; later searches start from the first tuned recipe."""

    def __init__(self, model: nn.Module, arguments: argparse.Namespace):
        self.model, self.arguments = model, arguments
        self.begin = time.monotonic()
        tune, _ = read_images(model, arguments.tune, arguments.tune_images, CALIBRATION_SEED, arguments.sample)
        judge, self.labels = read_images(model, arguments.judge, arguments.judge_images, TEST_SEED)
        size = AT_ONCE.get(next(model.parameters()).device.type, AT_ONCE_ELSEWHERE)
        # The other methods are selected and calibrated on the images that the search uses.
        self.bench = Evaluator(model, hold_out(list(tune.split(size)))[0])
        self.one = Evaluator(model, [tune[:1]])
        self.judges = Evaluator(model, list(judge.split(size)))
        # A backbone has no classes; its accuracies are set to 0.
        self.full = torch.cat([wanted[0].argmax(1) for wanted in self.judges.wanted]).cpu()
        if self.judges.loss == "features":
            self.full = torch.full_like(self.full, -1)
        self.starts: tuple[Any, ...] = ()
        top1 = (self.full == self.labels).double().mean().item()
        self.log(f"{self.bench.number} images to tune on, {len(self.labels)} to evaluate on, unmerged top-1 {top1:.2%}")

    def log(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", flush=True)

    def rows(self, cut: float) -> Iterator[dict[str, Any]]:
        """The rows of one cut: the tuned recipe, the preset, then all other methods."""
        target = Target(cut=cut)
        found, judged = self.level(target, self.tuned(target))
        tuned = judged
        yield self.row(cut, found, judged, tuned, best=True)
        found, judged = self.level(target, self.preset)
        yield self.row(cut, found, judged, tuned, best=True)
        for method in self.arguments.methods.split(","):
            variants = [
                (made(target), made) for made in (self.variant(method, number) for number in range(len(OPEN[method])))
            ]
            reached = [(first, made) for first, made in variants if first is not None]
            if not reached:
                self.log(f"{method} cannot cut {cut:.0%}")
                continue
            best = min((first for first, _ in reached), key=lambda one: one.loss)
            for first, made in reached:
                if first is best or first.untuned:
                    found, judged = self.level(target, made, first)
                    yield self.row(cut, found, judged, tuned, best=first is best)

    def level(
        self, target: Target, make: Callable[[Target], Found | None], found: Found | None = None
    ) -> tuple[Found, SweepResult]:
        """A recipe that meets the target on the evaluation images, and its results there.

        Calibrated counts meet a cost on the calibration images; on other images the cost may differ.  To compare all
        methods at one cost, a recipe that misses it is made again for a corrected target.  This uses only costs, no
        outputs or labels, and changes only the scale of the recipe.
        """
        goal = asked = target.macs(self.bench.full)
        found = found if found is not None else make(target)
        assert found is not None
        judged = self.judges.sweep(found.recipe, calibrate=False)
        for _ in range(3):
            error = judged.macs.mean().item() - goal
            if abs(error) <= 0.003 * goal:
                break
            asked -= error
            again = make(Target(gmacs=asked / 1e9))
            if again is None:
                break
            found, judged = again, self.judges.sweep(again.recipe, calibrate=False)
        return found, judged

    def tuned(self, target: Target) -> Callable[[Target], Found]:
        """Search at a target, from the first tuned recipe if there is one; gives what makes the result for a target."""
        begin, swept = time.monotonic(), self.bench.sweeps
        limits = SearchLimits(self.arguments.tries // (2 if self.starts else 1), seed=self.arguments.seed)
        trial, tried = search_candidates(self.bench, target, limits, starts=self.starts)
        if not self.starts:
            self.starts = ((trial.family, trial.rates),)
        spent, passes = time.monotonic() - begin, self.bench.sweeps - swept
        shown = {"tried": tried, "family": to_json(trial.family), "rates": [round(rate, 4) for rate in trial.rates]}

        def make(target: Target) -> Found:
            outcome = self.bench.sweep(scale_to_target(self.bench, trial.family, trial.rates, target).recipe)
            if self.arguments.recipes is not None:
                outcome.recipe.save(
                    self.arguments.recipes / f"{self.arguments.model}-{100 * self.cut(target):.0f}.json"
                )
            return Found("tuned", shown, None, outcome.recipe, *self.figures(outcome), False, passes, spent)

        return make

    def preset(self, target: Target) -> Found:
        """The preset, without tuning."""
        outcome = self.bench.sweep(preset_at(self.bench, target), calibrate=False)
        return Found("preset", {}, None, outcome.recipe, *self.figures(outcome), True)

    def variant(self, name: str, number: int) -> Callable[[Target], Found | None]:
        """What makes a setting of a method for a target; it gives None if the method cannot reach the target."""
        options = OPEN[name][number]

        def make(target: Target) -> Found | None:
            begin, swept = time.monotonic(), self.bench.sweeps
            try:
                knob, outcome = self.solved(name, options, target)
            except BadOption:
                return None
            spent, passes = time.monotonic() - begin, self.bench.sweeps - swept
            return Found(name, options, knob, outcome.recipe, *self.figures(outcome), number == 0, passes, spent)

        return make

    def solved(self, name: str, options: dict[str, Any], target: Target) -> tuple[float, SweepResult]:
        """The knob that meets the target, and the results on the tuning images."""
        method, goal = METHODS[name], target.macs(self.bench.full)

        def sweep(bench: Evaluator, knob: float) -> SweepResult:
            return bench.sweep(method(**{**options, str(method.knob): knob}))

        gentle = method(**{**options, str(method.knob): method.gentle})
        varies = isinstance(gentle.budget, Adaptive) or gentle.ragged or options.get("windows", False)
        bench = self.bench if varies else self.one
        knob = meet(lambda knob: sweep(bench, knob).macs.mean().item(), method.gentle, method.strong, goal)
        return knob, sweep(self.bench, knob)

    def cut(self, target: Target) -> float:
        """The share of the cost that a target saves."""
        return 1 - target.macs(self.bench.full) / self.bench.full

    def figures(self, outcome: SweepResult) -> tuple[float, float]:
        """The mean loss and the cut."""
        return outcome.loss.mean().item(), 1 - outcome.macs.mean().item() / self.bench.full

    def row(self, cut: float, found: Found, mine: SweepResult, tuned: SweepResult, best: bool) -> dict[str, Any]:
        """A row of the table."""
        right, theirs = self.right(mine), self.right(tuned)
        (kl,) = intervals(mine.loss[:, None])
        delta, against = paired(right, (self.full == self.labels).double()), paired(tuned.loss, mine.loss)
        cosines = ["", ""] if mine.cosines is None else mine.cosines.mean(0).tolist()
        points, now = paired(theirs, right), datetime.now(timezone.utc)
        self.log(
            f"cut {cut:.0%} {found.method:9} {'best' if best else 'default':7} KL {kl.mean:.4f}, tuned/this "
            f"{tuned.loss.mean().item() / max(kl.mean, 1e-12):.2f}, {100 * delta.mean:+.2f} points, "
            f"really {self.figures(mine)[1]:.1%}, {found.seconds:.0f} s, {found.sweeps} sweeps"
        )
        return {
            "model": self.arguments.model,
            "cut": cut,
            "method": found.method,
            "options": json.dumps(found.options),
            "knob": found.knob,
            "untuned": found.untuned,
            "best": best,
            "tune_kl": found.loss,
            **_ends("kl", kl, 1),
            "top1": right.mean().item(),
            **_ends("delta_top1", delta, 100),
            "cut_tune": found.cut,
            "cut_judge": self.figures(mine)[1],
            "tuned_ratio": tuned.loss.mean().item() / max(kl.mean, 1e-12),
            **_ends("tuned_minus_this", against, 1),
            "tuned_top1_minus_this": 100 * points.mean,
            "tuned_top1_low": 100 * points.low,
            "tuned_top1_high": 100 * points.high,
            "cosine_pooled": cosines[0],
            "cosine_patches": cosines[1],
            "sweeps": found.sweeps,
            "seconds": round(found.seconds, 2),
            "tune_images": self.bench.number,
            "sample": self.arguments.sample,
            "judge_images": len(self.labels),
            "device": versions(self.arguments.device)["device"],
            "dtype": self.arguments.dtype,
            "date": now.strftime("%Y-%m-%d"),
            "versions": json.dumps(versions(self.arguments.device)),
        }

    def right(self, outcome: SweepResult) -> Tensor:
        """1 for each image that is classified correctly, else 0."""
        if outcome.choice is None:
            return torch.zeros(len(self.labels), dtype=torch.float64)
        return (outcome.choice == self.labels).double()


def _ends(name: str, interval: Any, scale: float) -> dict[str, float]:
    ends = {"": interval.mean, "_low": interval.low, "_high": interval.high}
    return {name + end: scale * value for end, value in ends.items()}


if __name__ == "__main__":
    main()
