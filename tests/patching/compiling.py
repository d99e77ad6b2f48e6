"""Compiles merged models and prints what came of it as JSON; run by itself, without the run-time checker of types."""

import importlib.util
import json

import torch
from hosts.zoo import ZOO, Member

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published
from adamerge.methods import tome

CHOSEN = ("timm/ViT", "timm/DINOv3", "transformers/ViT", "transformers/DINOv3", "torchvision/ViT", "open_clip/CLIP")
FIXED = {"tome": tome(3), "adamerge": published(r=3)}
ADAPTIVE = published(6.0, LayerStats((0.3,) * 3, (0.1,) * 3))


def compiled(member: Member, recipe: Recipe, whole: bool) -> float:
    """The largest difference between the compiled merged model and the same one run plainly."""
    torch.compiler.reset()
    model, images = adamerge.apply(member.build(), recipe), member.images()
    with torch.no_grad():
        plain, r = member.see(model, images), adamerge.trace(model).r
        out = torch.compile(lambda x: member.see(model, x), backend="eager", fullgraph=whole)(images)
    assert torch.equal(adamerge.trace(model).r, r)
    return float((out - plain).abs().max())


def main() -> None:
    """Fixed budgets as one graph, an adaptive one in pieces."""
    found: dict[str, float] = {}
    torch.set_num_threads(1)
    for member in ZOO:
        if str(member) in CHOSEN and importlib.util.find_spec(member.library):
            for name, recipe in FIXED.items():
                found[f"{member} {name}"] = compiled(member, recipe, whole=True)
            if member.library != "open_clip":
                found[f"{member} adaptive"] = compiled(member, ADAPTIVE, whole=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
