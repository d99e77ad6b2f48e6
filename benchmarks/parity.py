"""Does `runtime="packed"` choose the same merges as the reference, in float32 and in half precision?

Choices of an image are a matter of rounding where the reference itself chooses otherwise in float64, or when every
pixel is moved by a few roundings; such images are ties and counted apart.  Writes benchmarks/results/parity-MODEL.csv.

    python benchmarks/parity.py --weights WEIGHTS --data IMAGES --calibration OTHER_IMAGES [--device cuda]
"""

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from reading import RESULTS, write
from safetensors.torch import load_file
from torch import Tensor, nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.experiments.benchmark import folder_images
from adamerge.experiments.versions import versions
from adamerge.methods import adamerge as published
from adamerge.methods import dymu, tome
from adamerge.presets import best
from adamerge.runtime.backend import Runtime
from adamerge.runtime.trace import Trace, join

BATCH = 250
# Moved pixels: how often, and by how much of themselves: eight roundings of float32.  With four moves, runs of the same
# code disagreed about single images.
MOVES, MOVE = 16, 2.0**-20
ALONE = 32


@dataclass(frozen=True)
class Outcome:
    """Logits in float64, and what was chosen."""

    logits: Tensor
    trace: Trace

    def distance(self, other: "Outcome") -> float:
        """How far the logits are apart, root mean square."""
        return (self.logits - other.logits).square().mean().sqrt().item()

    def same_counts(self, other: "Outcome") -> Tensor:
        """Which images merge as many at every layer."""
        return (self.trace.counts == other.trace.counts).all(1)

    def same_slots(self, other: "Outcome") -> Tensor:
        """Which images send every patch to the same slot at every layer."""
        mine, theirs = (torch.stack([o.trace.slots(at) for at in range(len(o.trace.layers))], 1) for o in (self, other))
        return (mine == theirs).flatten(1).all(1)


def main() -> None:
    """Compare and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    # By default convolutions round float32 to ten bits, in another way for another number of images.
    torch.backends.cudnn.allow_tf32 = False
    model = timm.create_model(arguments.model).eval()
    model.load_state_dict(load_file(arguments.weights))
    model.to(arguments.device)
    images, _ = folder_images(model, arguments.data, arguments.images)
    calibration, _ = folder_images(model, arguments.calibration, 64)
    images, calibration = images.to(arguments.device), calibration.to(arguments.device)
    rows: list[dict[str, Any]] = []
    for name, recipe in recipes(model, calibration):
        rows.append({"model": arguments.model, "method": name, **compared(model, recipe, images)})
        rows[-1] |= {"device": versions(arguments.device)["device"], "torch": torch.__version__}
        print(rows[-1], flush=True)
        write(arguments.out / f"parity-{arguments.model}.csv", rows)


def recipes(model: nn.Module, calibration: Tensor) -> Iterator[tuple[str, Recipe]]:
    """Published AdaMerge, AdaMerge by cosines, DyMU, ToMe and the preset, at about a quarter of the cost."""

    def calibrated(recipe: Recipe) -> Recipe:
        return recipe.with_stats(adamerge.calibrate(model, calibration, recipe, how="sequential", progress=False))

    yield "tome", tome(8)
    yield "dymu", calibrated(dymu(8.0))
    yield "preset", best(model, calibration, 0.25)
    yield "adamerge (cosine)", calibrated(published(16.0, affinity="cosine"))
    yield "adamerge", calibrated(published(16.0))


def compared(model: nn.Module, recipe: Recipe, images: Tensor) -> dict[str, Any]:
    """The figures of one recipe."""
    full = run(model, recipe, "reference", images)
    packed = run(model, recipe, "packed", images)
    tied = ~full.same_slots(run(model, recipe, "reference", images, torch.float64))
    generator = torch.Generator(images.device).manual_seed(0)
    for _ in range(MOVES):
        moved = images * (1 + MOVE * torch.randn(images.shape, generator=generator, device=images.device))
        tied |= ~full.same_slots(run(model, recipe, "reference", moved))
    half, packed_half = (run(model, recipe, runtime, images, torch.bfloat16) for runtime in ("reference", "packed"))
    alone = [run(model, recipe, "packed", images[i : i + 1]) for i in range(min(ALONE, len(images)))]
    among = packed.trace.counts[: len(alone)]
    same = packed.same_slots(full)
    return {
        "images": len(images),
        "same_r": packed.same_counts(full).double().mean().item(),
        "same_slots": same.double().mean().item(),
        "ties": tied.double().mean().item(),
        "same_slots_without_ties": same[~tied].double().mean().item(),
        "logits_float32": (packed.logits - full.logits)[same].abs().amax().item(),
        "bf16_error_reference": full.distance(half),
        "bf16_error_packed": full.distance(packed_half),
        "alone_same_r": (torch.cat([o.trace.counts for o in alone]) == among).all(1).double().mean().item(),
        "alone_logits": (torch.cat([o.logits for o in alone]) - packed.logits[: len(alone)]).abs().amax().item(),
    }


def run(
    model: nn.Module, recipe: Recipe, runtime: Runtime, images: Tensor, dtype: torch.dtype = torch.float32
) -> Outcome:
    """A copy of the model with the recipe, on all images."""
    merged = adamerge.apply(copy.deepcopy(model).to(dtype), recipe, runtime)
    logits, traces = [], []
    with torch.inference_mode():
        for batch in images.split(BATCH):
            logits.append(merged(batch.to(dtype)).double())
            traces.append(adamerge.trace(merged))
    return Outcome(torch.cat(logits), join(traces))


if __name__ == "__main__":
    main()
