"""Compiles merged models and prints what came of it as JSON; run by itself, without the run-time checker of types."""

import copy
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import torch
from hosts.zoo import ZOO, Member
from torch import Tensor

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
# One host that calls its blocks as a whole, one that loops over them, one with rotary tables.
ADAPTING = ("timm/ViT", "transformers/ViT", "timm/DINOv3")


def compiled(member: Member, recipe: Recipe) -> float:
    """The largest difference between the compiled merged model and the same one run plainly."""
    torch.compiler.reset()
    model, images = adamerge.apply(member.build(), recipe), member.images(4)
    with torch.no_grad():
        plain, r = member.see(model, images), adamerge.trace(model).r
        out = torch.compile(lambda x: member.see(model, x), backend="eager", fullgraph=True)(images)
    assert torch.equal(adamerge.trace(model).r, r)
    assert not recipe.ragged or len(r.unique(dim=0)) > 1
    return float((out - plain).abs().max())


def hooked(member: Member) -> float:
    """The same for a model whose second block has a hook, which must run."""
    torch.compiler.reset()
    model, images = adamerge.apply(member.build(), tome(3)), member.images()
    seen: list[object] = []
    with torch.no_grad():
        plain = model(images)
        stack_of(model).block(1).register_forward_hook(lambda _, args, out: seen.append(out))
        out = torch.compile(model, backend="eager")(images)
    assert len(seen) == 1
    return float((out - plain).abs().max())


def gradients(member: Member, call: Callable[[Any], Any], model: Any) -> dict[str, Tensor]:
    """The output of a call, and the gradients of a sum of it with respect to the parameters that get any."""
    model.zero_grad(set_to_none=True)
    out = call(member.images(3))
    out = getattr(out, "logits", out)
    (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    return {"out": out.detach()} | {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def with_gradients(member: Member) -> float:
    """The largest difference, of the output or a gradient, between the compiled model and the same run plainly."""
    torch.compiler.reset()
    model = adamerge.apply(member.build(), ADAPTIVE)
    expected = gradients(member, model, model)
    found = gradients(member, torch.compile(model, backend="aot_eager", fullgraph=True), model)
    assert list(found) == list(expected) and len(found) > 20
    return max(float((found[name] - one).abs().max()) for name, one in expected.items())


def compiled_copies(member: Member) -> float:
    """The same for a copy with other weights, through the stages of a real backend, under autocast."""
    torch.compiler.reset()
    first = adamerge.apply(member.build(), ADAPTIVE)
    second, images = copy.deepcopy(first), member.images(2)
    for parameter in second.parameters():
        parameter.data *= 0.9
    differences = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for model in (first, second):
            plain = member.see(model, images)
            out = torch.compile(model, backend="aot_eager", fullgraph=True)(images)
            differences.append(float((getattr(out, "logits", out) - plain).abs().max()))
    return max(differences)


def main() -> None:
    """Every model as one graph: fixed budgets traced, the blocks of an adaptive one as one operator."""
    found: dict[str, float] = {}
    torch.set_num_threads(1)
    for member in ZOO:
        if str(member) in CHOSEN and importlib.util.find_spec(member.library):
            for name in CHOSEN[str(member)]:
                found[f"{member} {name}"] = compiled(member, FIXED[name])
            if str(member) in ADAPTING:
                found[f"{member} adaptive"] = compiled(member, ADAPTIVE)
                found[f"{member}, gradients"] = with_gradients(member)
            if str(member) == ADAPTING[0]:
                found[f"{member}, copies"] = compiled_copies(member)
                found[f"{member}, hooked"] = hooked(member)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
