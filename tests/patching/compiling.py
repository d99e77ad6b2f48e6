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

FIXED = {"tome": tome(3), "adamerge": published(r=3)}
ADAPTIVE = published(6.0, LayerStats((0.3,) * 3, (0.1,) * 3))
# Member -> recipes with fixed counts that are compiled and exported.  Tracing takes seconds, so both are traced once
# only: what a host adds to a trace is the same for both.
CHOSEN = {
    "timm/ViT": ("tome", "adamerge"),
    "timm/DINOv3": ("adamerge",),
    "transformers/ViT": ("adamerge",),
    "transformers/DINOv3": ("tome",),
    "torchvision/ViT": ("adamerge",),
    "open_clip/CLIP": ("tome",),
}
# One host that calls its blocks as a whole, one that loops over them, one with rotary tables.
IN_PIECES = ("timm/ViT", "transformers/ViT", "timm/DINOv3")


def compiled(member: Member, recipe: Recipe, whole: bool) -> float:
    """The largest difference between the compiled merged model and the same one run plainly."""
    torch.compiler.reset()
    # Adaptive counts are traced for each image.
    model, images = adamerge.apply(member.build(), recipe), member.images(4 if whole else 2)
    with torch.no_grad():
        plain, r = member.see(model, images), adamerge.trace(model).r
        out = torch.compile(lambda x: member.see(model, x), backend="eager", fullgraph=whole)(images)
    assert torch.equal(adamerge.trace(model).r, r)
    assert whole or len(r.unique(dim=0)) > 1
    return float((out - plain).abs().max())


def main() -> None:
    """Fixed budgets as one graph, an adaptive one in pieces."""
    found: dict[str, float] = {}
    torch.set_num_threads(1)
    for member in ZOO:
        if str(member) in CHOSEN and importlib.util.find_spec(member.library):
            for name in CHOSEN[str(member)]:
                found[f"{member} {name}"] = compiled(member, FIXED[name], whole=True)
            if str(member) in IN_PIECES:
                found[f"{member} adaptive"] = compiled(member, ADAPTIVE, whole=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
