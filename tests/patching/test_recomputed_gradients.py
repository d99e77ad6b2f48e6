"""With gradients enabled the packed backend runs, and gradients are those of the reference."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from hosts.zoo import TIMM, TRANSFORMERS
from torch import Tensor, nn

import adamerge
from adamerge.methods import tome
from adamerge.patching import recomputed_gradients, stack
from adamerge.patching.apply import stack_of
from adamerge.patching.stack import Stack
from adamerge.runtime.autocast import autocast_dtype
from adamerge.runtime.triton.graph_cache import CALLS_BEFORE_CAPTURE, GraphCache
from adamerge.runtime.triton.graph_capture import CapturedGraph

BF16 = torch.bfloat16


def gradients(model: nn.Module, images: Tensor, autocast: bool = False) -> dict[str, Tensor]:
    """The gradients of a loss with respect to the images and all parameters; zeros where none arrives."""
    model.zero_grad(set_to_none=True)
    images = images.clone().requires_grad_()
    with torch.autocast("cpu", BF16, enabled=autocast):
        logits: Tensor = model(images)
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    found = {"images": images, **dict(model.named_parameters())}
    return {name: torch.zeros_like(one) if one.grad is None else one.grad.clone() for name, one in found.items()}


def record(run: Any, *examples: Tensor, pool: Any = None) -> CapturedGraph:
    """In place of a CUDA graph: runs the blocks again on the same inputs, and overwrites what they gave before."""
    inputs = tuple(example.clone() for example in examples)
    output = run(*inputs)

    class Again:
        def replay(self) -> None:
            output[0].copy_(run(*inputs)[0])

    return CapturedGraph(Again(), inputs, output, [])


def far_apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest entry of each tensor.

    A bias of keys changes nothing: its gradient is rounding.  So the divisor is a thousandth of the largest or more.
    """
    scale = {name: float(one.abs().max()) for name, one in expected.items()}
    assert all(scale.values())
    least = max(scale.values()) / 1000
    return max(float((found[name] - expected[name]).abs().max()) / max(scale[name], least) for name in expected)


@pytest.mark.parametrize("recipe", ["tome", "adaptive"])
def test_nothing_has_to_be_disabled_for_the_packed_backend(recipe):
    model, images = build("vit"), pictures(3)
    adamerge.apply(model, RECIPES[recipe](model, images))
    with torch.no_grad():
        expected, merged = model(images), adamerge.trace(model).merged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model(images)
    assert torch.equal(found, expected) and found.requires_grad
    assert merged.sum() > 0 and torch.equal(adamerge.trace(model).merged, merged)
    assert adamerge.explain(model, images).backend == "packed"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", ["tome", "adaptive"])
def test_gradients_are_those_of_the_reference(recipe, autocast):
    model, images = build("vit"), pictures(3)
    chosen = RECIPES[recipe](model, images)
    expected = gradients(adamerge.apply(model, chosen, "reference"), images, autocast)
    found = gradients(adamerge.apply(model, chosen), images, autocast)
    assert far_apart(found, expected) < (0.05 if autocast else 1e-4)
    assert not autocast or far_apart(gradients(model, images), expected) > 0, "autocast changes nothing here"


def test_the_backward_pass_computes_in_the_dtype_of_the_forward_pass(monkeypatch):
    model, images = adamerge.apply(build("vit"), tome(3)), pictures(2)
    seen = []
    own = recomputed_gradients.ReferenceBackend

    def watch(selector, x, views):
        seen.append(autocast_dtype(x.device))
        return own(selector, x, views)

    monkeypatch.setattr(recomputed_gradients, "ReferenceBackend", watch)
    gradients(model, images, autocast=True)
    gradients(model, images)
    assert seen == [BF16, None]


def test_gradients_of_a_host_that_loops_over_its_blocks():
    member = next(member for member in TRANSFORMERS if member.name == "ViT")
    model, images = member.build(), member.images()
    adamerge.apply(model, tome(3), "reference")
    expected = gradients(_Sees(member, model), images)
    adamerge.apply(model, tome(3))
    assert adamerge.explain(model, images).backend == "packed"
    assert far_apart(gradients(_Sees(member, model), images), expected) < 1e-4


def test_gradients_of_a_host_whose_rotary_tables_differ_by_layer():
    """Learned tables are frozen here: where they need gradients of their own, the reference runs from the start."""
    member = next(member for member in TIMM if member.name == "rotary ViT with mixed tables")
    member.require()
    model, images = member.build(), member.images(2)
    model.rope.requires_grad_(False)
    tables = model.rope.get_embed()
    assert not torch.allclose(tables[0], tables[1], atol=0.1) and not torch.allclose(tables[0], tables[2], atol=0.1)
    adamerge.apply(model, tome(3), "reference")
    expected = {name: one for name, one in gradients(model, images).items() if not name.startswith("rope.")}
    adamerge.apply(model, tome(3))
    assert adamerge.explain(model, images).backend == "packed"
    assert far_apart(gradients(model, images), expected) < 1e-4


class _Sees(nn.Module):
    """A member of the zoo as a module from images to a tensor."""

    def __init__(self, member, model):
        super().__init__()
        self.member, self.model = member, model

    def forward(self, images: Tensor) -> Tensor:
        return self.member.see(self.model, images)


@pytest.mark.parametrize("recipe", ["tome", "adaptive"])
def test_cuda_graphs_run_with_gradients_enabled(recipe, monkeypatch):
    """Graphs of a CPU: a stand-in runs the blocks again where CUDA would replay a graph."""
    model, images = build("vit"), pictures(3)
    chosen = RECIPES[recipe](model, images)
    expected = gradients(adamerge.apply(model, chosen, "reference"), images)
    monkeypatch.setattr(stack, "GraphCache", partial(GraphCache, capture=record))
    monkeypatch.setattr(Stack, "may_replay", lambda self, x: not torch.is_grad_enabled())
    adamerge.apply(model, chosen)
    for calls in range(CALLS_BEFORE_CAPTURE + 2):
        assert len(stack_of(model).graphs) == (calls > CALLS_BEFORE_CAPTURE)
        assert far_apart(gradients(model, images), expected) < 1e-4


def test_only_what_needs_a_gradient_gets_one():
    model, images = adamerge.apply(build("vit"), tome(3)), pictures(2)
    model.requires_grad_(False)
    assert not model(images).requires_grad
    assert model(images.clone().requires_grad_()).requires_grad
    bias = model.get_parameter("blocks.1.mlp.fc1.bias").requires_grad_()
    model(images).sum().backward()
    assert bias.grad is not None and all(p.grad is None for p in model.parameters() if p is not bias)


def test_a_frozen_model_with_a_trained_head_packs():
    model, images = adamerge.apply(build("vit"), tome(3)), pictures(2)
    model.requires_grad_(False).get_submodule("head").requires_grad_(True)
    assert adamerge.explain(model, images).backend == "packed"
    model(images).sum().backward()
    assert model.get_parameter("head.weight").grad is not None


def test_weights_that_changed_before_the_backward_pass_are_noticed():
    model, images = adamerge.apply(build("vit"), tome(3)), pictures(2)
    loss = model(images).sum()
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.fc1.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_derivatives_of_gradients_are_those_of_the_reference():
    model, images = build("vit"), pictures(2)
    for block in model.blocks:
        setattr(block.attn, "fused_attn", False)  # noqa: B010  timm calls it final; torch's has no second derivative

    def curvature(runtime) -> Tensor:
        adamerge.apply(model, tome(3), runtime)
        tokens = images.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(tokens).square().sum(), tokens, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), tokens)[0]

    expected = curvature("reference")
    assert far_apart({"images": curvature("auto")}, {"images": expected}) < 1e-3


def test_transforms_of_torch_func_follow_the_reference():
    model, images = build("vit"), pictures(2)
    adamerge.apply(model, tome(3), "reference")
    expected = gradients(model, images)["images"]
    adamerge.apply(model, tome(3))
    found = torch.func.grad(lambda x: (model(x) * torch.linspace(-1, 1, 10)).sum())(images)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("why", ["a hook", "training", "reference"])
def test_what_needs_every_operation_takes_the_reference(why):
    model, images = build("vit"), pictures(2)
    adamerge.apply(model, tome(3), "reference" if why == "reference" else "auto")
    model.train(why == "training")
    if why == "a hook":
        model.get_submodule("blocks.1.mlp").register_forward_hook(lambda *_: None)
    assert adamerge.explain(model, images).backend == "reference"
