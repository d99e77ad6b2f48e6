"""For benchmarks/frontier.py: reads images and labels, and finds the knob that meets a cost."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from adamerge.cli.loading import load_data
from adamerge.core.errors import BadOption
from adamerge.data.folders import even_indices


def meet(cost: Callable[[float], float], gentle: float, strong: float, goal: float, tries: int = 14) -> float:
    """The knob between two values whose cost is within 0.3 % of the goal, or the nearest; by secant and bisection."""
    ends = [(cost(gentle), gentle), (cost(strong), strong)]
    if not ends[1][0] <= goal <= ends[0][0]:
        raise BadOption("out of reach")
    seen = list(ends)
    for turn in range(tries):
        (high, mild), (low, hard) = ends
        share = 0.5 if turn % 3 == 2 else min(max((high - goal) / max(high - low, 1e-9), 0.03), 0.97)
        knob = mild + share * (hard - mild)
        found = (cost(knob), knob)
        seen.append(found)
        if abs(found[0] / goal - 1) < 0.003:
            break
        ends = [found, ends[1]] if found[0] > goal else [ends[0], found]
    return min(seen, key=lambda one: abs(one[0] - goal))[1]


def read_images(model: nn.Module, source: str, limit: int, seed: int, sample: int = 0) -> tuple[Tensor, Tensor]:
    """Images and labels from a folder, a file or the embedded generator."""
    if not source.endswith(".pt"):
        pairs = list(load_data(model, source, seed=seed, batch_size=64, workers=2, limit=limit))
        return torch.cat([images for images, _ in pairs]), torch.cat([labels for _, labels in pairs])
    content = torch.load(source, weights_only=True)
    chosen = (torch.tensor(even_indices(len(content["labels"]), limit)) + sample) % len(content["labels"])
    images, labels = content["images"][chosen], content["labels"][chosen]
    if images.dtype == torch.uint8:
        config = model.pretrained_cfg  # pyright: ignore[reportAttributeAccessIssue]
        mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))  # pyright: ignore
        images = (images.float() / 255 - mean) / std
    return images, labels
