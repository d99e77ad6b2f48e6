"""What deciding takes: every method beside itself with its choices made before, in one interleaved run.

The share of a kernel says little where kernels run side by side.  Left out, the decision is missing from the time, and
all else is the same: the same merges of the same images.  A merge also does a layer norm, which a block without a merge
does by itself; what the kernels of both take stands beside it.  Recipes are those that `benchmarks/speed.py` kept.
Needs a CUDA device; writes benchmarks/results/deciding.csv.

    python benchmarks/deciding.py --data IMAGES --recipes RECIPES/main.json [--batch 256]
"""

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import timm
import torch
from reading import RESULTS, write
from speed import load
from torch import Tensor, nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.experiments.benchmark import folder_images, twin
from adamerge.experiments.benchmark.timing import Timing, interleave, watch_device
from adamerge.experiments.versions import versions
from adamerge.patching.apply import apply, stack_of
from adamerge.runtime.packed.state import PackedState
from adamerge.runtime.triton.kernels.choice import Choice
from adamerge.runtime.triton.lowering import Lowered, lower
from adamerge.runtime.triton.merging import MergeDecider

MODEL, BLOCKS = "vit_base_patch16_224", 12
INNER = 3


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipes", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = timm.create_model(MODEL).to(device, torch.bfloat16).eval()
    images, _ = folder_images(model, arguments.data, arguments.batch, workers=arguments.workers)
    images = images.to(device, torch.bfloat16)
    found = {entry.method: entry.recipe for entry in load(arguments.recipes) if entry.recipe is not None}
    with torch.inference_mode():
        graphs = [graph for recipe in found.values() for graph in both(model, recipe, images)]
        calls = [lambda turn, graph=graph: graph(images) for graph in graphs]
        times = interleave(calls, [INNER] * len(calls), device, rounds=arguments.rounds, progress=False)
        rows: list[dict[str, Any]] = []
        for method, graph, whole, decided in zip(found, graphs[::2], times[::2], times[1::2], strict=True):
            assert isinstance(whole, Timing) and isinstance(decided, Timing), (whole, decided)
            _, stages = watch_device(lambda graph=graph: graph(images), device)
            rows.append(
                {
                    "model": MODEL,
                    "method": method,
                    "batch": arguments.batch,
                    "ms_p50": whole.quantile(0.5),
                    "ms_decided_p50": decided.quantile(0.5),
                    # Round by round: both are measured within one, and a slow round is slow for both.
                    "deciding": 1 - Timing(shares(whole, decided), INNER).quantile(0.5),
                    "merges": merges(found[method]),
                    "merge_ms": stages["merge"],
                    "residual_ms": stages["residual"],
                    "all_ms": stages["all"],
                    "device": versions(str(device))["device"],
                    "torch": torch.__version__,
                }
            )
            print(rows[-1], flush=True)
    write(arguments.out / "deciding.csv", rows)


def merges(recipe: Recipe) -> int:
    """How many blocks merge; each of the others does its norm in a kernel that merges nothing."""
    lowered = lower(recipe, prefix=1, class_token=True)
    assert isinstance(lowered, Lowered), lowered
    return sum(recipe.may_merge(layer, BLOCKS) for layer in range(BLOCKS))


def shares(whole: Timing, decided: Timing) -> tuple[float, ...]:
    """What is left of each round's time without the decision."""
    return tuple(b / a for a, b in zip(whole.rounds, decided.rounds, strict=True))


class KeepChoices(MergeDecider):
    """Decides, and keeps what was decided at each layer."""

    def __init__(self, lowered: Lowered, depth: int):
        super().__init__(lowered, depth)
        self.kept: dict[int, Choice] = {}

    def decide(self, state: PackedState, layer: int, *args: Any) -> Choice:
        self.kept[layer] = super().decide(state, layer, *args)
        return self.kept[layer]


class GiveChoices(MergeDecider):
    """Gives copies of choices made before, and computes nothing."""

    def __init__(self, other: KeepChoices):
        super().__init__(other.lowered, other.depth)
        self.kept = {
            layer: Choice(*(getattr(choice, field.name).clone() for field in fields(choice)))
            for layer, choice in other.kept.items()
        }

    def class_attention(self, *_: Any) -> None:
        return None

    def decide(self, state: PackedState, layer: int, *_: Any) -> Choice:
        return self.kept[layer]


def both(model: nn.Module, recipe: Recipe, images: Tensor) -> tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]:
    """The merged model in a graph, and another that is given the choices of the first."""
    merged, given = (apply(twin(model), recipe, "packed") for _ in range(2))
    backend = stack_of(merged).selector.triton()
    assert isinstance(backend.lowered, Lowered), backend.lowered
    backend.decider = keeper = KeepChoices(backend.lowered, BLOCKS)
    deciding = adamerge.capture(merged, images)
    expected = deciding(images).clone()
    stack_of(given).selector.triton().decider = GiveChoices(keeper)
    replaying = adamerge.capture(given, images)
    assert torch.equal(replaying(images), expected), "what was chosen before is not what was chosen"
    return deciding, replaying


if __name__ == "__main__":
    main()
