"""Every family of timm's, and every case of it with a recipe."""

import pytest
import torch
from hosts.families import FAMILIES, RECIPES, build, pictures
from hosts.timm_cases import Case


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(params=RECIPES)
def case(family: str, request) -> Case:
    model, images = build(family), pictures()
    recipe = RECIPES[request.param](model, images)
    with torch.no_grad():
        return Case(family, model, recipe, images, model(images))
