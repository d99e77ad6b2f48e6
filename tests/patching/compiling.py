"""Compiles merged models and prints what came of it as JSON; run by itself, without the run-time checker of types."""

import importlib.util
import json
import sys

import torch
from hosts.zoo import ZOO, Member

import adamerge
from adamerge.core.recipe import Recipe
from adamerge.core.stats import LayerStats
from adamerge.methods import adamerge as published
from adamerge.methods import tome
from adamerge.patching.apply import stack_of

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
# Counts of images differ after the first block; tracing two such blocks takes half as long as three.
TWICE_ADAPTIVE = published((6.0, 0.0, 6.0), LayerStats((0.3,) * 3, (0.1,) * 3))
# One host that calls its blocks as a whole, one that loops over them; with more time, one with rotary tables too.
IN_PIECES: dict[str, Recipe] = {"timm/ViT": TWICE_ADAPTIVE, "transformers/ViT": TWICE_ADAPTIVE}
SLOWLY_IN_PIECES: dict[str, Recipe] = {name: ADAPTIVE for name in ("timm/ViT", "transformers/ViT", "timm/DINOv3")}


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


def hooked(member: Member) -> float:
    """The same for a model whose second block has a hook, which must run."""
    torch.compiler.reset()
    model, images = adamerge.apply(member.build(), tome(3)), member.images()
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        plain = model(images)
        stack_of(model).block(1).register_forward_hook(lambda _, args, out: seen.append(out))
        out = torch.compile(model, backend="eager")(images)
    assert len(seen) == 1
    return float((out - plain).abs().max())


def main(which: str) -> None:
    """Fixed budgets as one graph and adaptive ones in pieces, or more adaptive ones."""
    found: dict[str, float] = {}
    torch.set_num_threads(1)
    fixed, adaptive = ({}, SLOWLY_IN_PIECES) if which == "slow" else (CHOSEN, IN_PIECES)
    for member in ZOO:
        if not importlib.util.find_spec(member.library):
            continue
        for name in fixed.get(str(member), ()):
            found[f"{member} {name}"] = compiled(member, FIXED[name], whole=True)
        if str(member) in adaptive:
            found[f"{member} adaptive"] = compiled(member, adaptive[str(member)], whole=False)
    if which != "slow":
        found["timm/ViT hooked"] = hooked(next(member for member in ZOO if str(member) == "timm/ViT"))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
