"""A timm model with a recipe and some images, for the tests of timm's contract."""

from dataclasses import dataclass

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import adamerge
from adamerge.core.recipe import Recipe


@dataclass(frozen=True)
class Case:
    """One model, one recipe, some images, and what the model makes of them without merging."""

    family: str
    model: VisionTransformer
    recipe: Recipe
    images: Tensor
    plain: Tensor

    def merged(self) -> VisionTransformer:
        adamerge.apply(self.model, self.recipe)
        return self.model


def run(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)
