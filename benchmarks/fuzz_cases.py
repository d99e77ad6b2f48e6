"""The cases of the fuzzer: a tiny model, a batch of images and a recipe, drawn from a seed and the case's number."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz_recipes import draw_recipe
from torch import Tensor

from adamerge.core.errors import AdamergeError
from adamerge.core.recipe import Recipe
from adamerge.hosts.base import find_host

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from hosts import families, zoo  # pyright: ignore[reportMissingImports]

# Families of timm are built for each of these sizes, the others for their own.
SIDES: tuple[int | tuple[int, int], ...] = (16, 32, 48, 64, 80, 96, (48, 80), (32, 112))
DTYPES = (torch.float32,) * 7 + (torch.float64, torch.bfloat16, torch.float16)
# Their outputs compare all images with two texts.
WITH_TEXT = ("transformers/CLIP", "transformers/SigLIP")
KINDS = ("rich",) * 4 + ("plain to rich",) * 4 + ("constant", "zeros", "large", "tiny", "one not finite", "repeated")


@dataclass(frozen=True)
class Host:
    """A tiny model, the shape of its images, and how it is called."""

    name: str
    model: Any
    shape: tuple[int, ...]
    see: Callable[[Any, Tensor], Tensor]
    # A product of the host's own is over all images, and rounds by how many there are.
    ends_in_a_product: bool

    @property
    def depth(self) -> int:
        return find_host(self.model).depth


@dataclass(frozen=True)
class Case:
    """What is tried: `recipe` is an error where the library refused to make it."""

    number: int
    host: str
    side: int | tuple[int, int]
    dtype: torch.dtype
    batch: int
    images: str
    seed: int
    features: bool
    gradients: bool
    recipe: Recipe | AdamergeError


def draw_case(seed: int, number: int) -> Case:
    """The case of a number; the same for the same seed."""
    choose = random.Random(f"{seed} {number}")
    name = choose.choice(_names())
    side = choose.choice(SIDES) if name.startswith("timm family") else 64
    host = build_host(name, side, torch.float32)
    patches = max((host.shape[-1] // 16) * (host.shape[-2] // 16), 1)
    fields: dict[str, Any] = dict(
        dtype=choose.choice(DTYPES),
        batch=choose.choice([1, 2, 2, 3, 4, 5, 8]) if name not in WITH_TEXT else 2,
        images=choose.choice(KINDS),
        seed=choose.randrange(2**31),
        features=choose.random() < 0.3,
        gradients=choose.random() < 0.05,
    )
    recipe: Recipe | AdamergeError
    try:
        recipe = draw_recipe(choose, host.depth, patches)
    except AdamergeError as error:
        recipe = error
    return Case(number, name, side, recipe=recipe, **fields)


@cache
def _names() -> tuple[str, ...]:
    members = [str(member) for member in zoo.ZOO]
    # As many cases for the families of many sizes as for all libraries.
    return (*members, *[f"timm family {name}" for name in families.FAMILIES] * 4)


@cache
def build_host(name: str, side: int | tuple[int, int], dtype: torch.dtype) -> Host:
    """A model, built once."""
    if name.startswith("timm family "):
        high, wide = (side, side) if isinstance(side, int) else side
        model = families.build(name.removeprefix("timm family "), img_size=(high, wide)).to(dtype)
        # Of a single patch the host's patch embedding makes one product for all images.
        return Host(name, model, (3, high, wide), lambda model, images: model(images), high * wide == 16 * 16)
    (member,) = [member for member in zoo.ZOO if str(member) == name]
    # So does the language model of LLaVA with all images.
    product = member.ends_in_a_product or member.name == "LLaVA"
    return Host(name, member.build().to(dtype), member.shape, member.see, product)


def draw_images(case: Case, shape: tuple[int, ...]) -> Tensor:
    """The batch of a case, in float32; the model's dtype comes later."""
    generator = torch.Generator().manual_seed(case.seed)
    rich = torch.randn(case.batch, *shape, generator=generator)
    plain = torch.randn(case.batch, *shape[:-2], 1, 1, generator=generator).expand_as(rich)
    share = torch.rand(case.batch, *(1 for _ in shape), generator=generator)
    made: dict[str, Callable[[], Tensor]] = {
        "rich": lambda: rich,
        "plain to rich": lambda: share * rich + (1 - share) * plain,
        "constant": lambda: plain.clone(),
        "zeros": lambda: torch.zeros_like(rich),
        "large": lambda: 1e3 * rich,
        "tiny": lambda: 1e-6 * rich,
        "repeated": lambda: rich[:1].expand_as(rich).clone(),
    }
    if case.images in made:
        return made[case.images]()
    rich[case.seed % case.batch].view(-1)[case.seed % 100 :: 7] = (float("nan"), float("inf"))[case.seed % 2]
    return rich
