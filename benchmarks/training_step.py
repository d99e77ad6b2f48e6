"""How long does a training step take while tokens are merged?  Merged models beside the unmerged one, all in turn.

A step is a forward pass under autocast to bfloat16, a backward pass and an update by AdamW.  Weights are random, images
drawn.  Recipes are solved for a cut of the true cost.  Rows are added to a CSV file.

    python benchmarks/training_step.py --device cuda --model vit_base_patch16_224 --batch 128 [--compile]
"""

import argparse
import statistics
import warnings
from collections.abc import Callable
from copy import deepcopy
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import timm
import torch
from reading import RESULTS, append
from timm.data.config import resolve_model_data_config
from torch import Tensor, nn

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.embedded import scenes
from adamerge.methods import METHODS
from adamerge.search.solve import solve
from adamerge.search.target import Target
from adamerge.timing import time_call

CALIBRATION = 32
WARM_UP = 3


def step(model: Callable[[Tensor], Tensor], optimiser: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """One step of training."""
    optimiser.zero_grad()
    with torch.autocast(images.device.type, torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimiser.step()


def recipes(model: nn.Module, images: Tensor, methods: list[str], cut: float) -> dict[str, Recipe]:
    """The recipe of each method at a cut."""
    found = {}
    for name in methods:
        if name == "preset":
            found[name] = adamerge.presets.best(model, images, cut)
        else:
            found[name] = solve(model, images, METHODS[name], Target(cut=cut)).recipe
    return found


def main() -> None:
    """Time the steps and add a row for each contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--cut", type=float, default=0.4)
    parser.add_argument("--methods", default="tome,adamerge,preset")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="also compiled, where counts are fixed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS / "training-step.csv")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(given.device)
    model = timm.create_model(given.model).to(device).eval()
    size = resolve_model_data_config(model)["input_size"][-1]
    drawn = scenes(0, max(given.batch, CALIBRATION), seed=5, size=size, device=device).images
    images = (drawn - 0.5) / 0.5
    labels = torch.randint(0, 1000, (given.batch,), device=device)
    found = recipes(model, images[:CALIBRATION], given.methods.split(","), given.cut)
    calls: dict[str, Callable[[], None]] = {}
    for name, recipe in {"unmerged": adamerge.methods.none(), **found}.items():
        net = adamerge.apply(deepcopy(model), recipe) if name in found else deepcopy(model)
        net.train()
        optimiser = torch.optim.AdamW(net.parameters(), lr=1e-6)
        calls[name] = partial(step, net, optimiser, images[: given.batch], labels)
        if given.compile and not recipe.ragged:
            compiled = torch.compile(net, dynamic=False)
            calls[f"{name}, compiled"] = partial(step, compiled, optimiser, images[: given.batch], labels)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(WARM_UP + given.rounds):
        for name, call in calls.items():
            _, seconds = time_call(call, device)
            if round_number >= WARM_UP:
                times[name].append(1e3 * seconds)
    medians = {name: statistics.median(column) for name, column in times.items()}
    for name, ms in medians.items():
        row = {"model": given.model, "batch": given.batch, "cut": given.cut if name.split(",")[0] in found else 0.0}
        row |= {"contender": name, "ms": round(ms, 3), "speed_up": round(medians["unmerged"] / ms, 3)}
        row |= {"rounds": given.rounds, "device": _device_name(device), "torch": torch.__version__}
        row |= {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d")}
        print(f"{name:24} {ms:9.2f} ms  {row['speed_up']:.2f}x", flush=True)
        append(given.out, [row])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
