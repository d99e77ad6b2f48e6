"""The mean cost of a merged model, one image at a time: what solver, preset and tuner should have found."""

import torch
from torch import Tensor, nn

import adamerge


def mean_cost(model: nn.Module, images: Tensor, recipe: adamerge.Recipe, cost: str = "true") -> float:
    """Multiply-accumulates per image."""
    adamerge.apply(model, recipe)
    costs = []
    with torch.no_grad():
        for image in images:
            model(image[None])
            costs.append(getattr(adamerge.flops.cost(model), cost).item())
    adamerge.remove(model)
    return sum(costs) / len(costs)
