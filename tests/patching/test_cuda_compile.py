"""`torch.compile` around a merged model on a CUDA device takes its blocks as one operator.  Needs a CUDA device."""

from typing import Any

import pytest
import timm
import torch

import adamerge
from adamerge.methods import adamerge as published
from adamerge.methods import ats, tome
from adamerge.patching.apply import stack_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("recipe", [tome(8), ats(120)], ids=["tome", "ats"])
def test_no_graph_breaks_and_the_outputs_of_the_model_as_it_is(recipe):
    torch.manual_seed(0)
    model: Any = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10).to("cuda", torch.bfloat16).eval()
    adamerge.apply(model, recipe)
    images = torch.randn(4, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        torch.compiler.reset()
        assert torch._dynamo.explain(model)(images).graph_break_count == 0
        expected = model(images)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(4):
            torch.testing.assert_close(compiled(images), expected, rtol=0.05, atol=0.05)
    # The operator ran the blocks as the plain call does: by now as a CUDA graph.
    assert len(stack_of(model).graphs) == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch cannot leave operators out")
@pytest.mark.parametrize("recipe", [tome(8), published(16.0)], ids=["tome", "published"])
def test_the_cuda_graphs_of_a_compiler_leave_the_blocks_out(recipe):
    """Compiled code embeds patches with another rounding, which can decide whether a token merges in a few images."""
    torch.manual_seed(0)
    model: Any = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10).to("cuda").eval()
    torch.nn.init.normal_(model.head.weight)
    batches = torch.randn(6, 4, 3, 224, 224, device="cuda")
    if recipe.adaptive is not None:
        recipe = recipe.with_stats(adamerge.calibrate(model, batches[0], recipe, progress=False))
    adamerge.apply(model, recipe)
    torch.compiler.reset()
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.inference_mode():
        for images in batches:
            expected, slots = model(images), adamerge.trace(model).slots()
            found = compiled(images).clone()
            same = (adamerge.trace(model).slots() == slots).all(1)
            assert same.sum() >= 3
            largest = float(expected.abs().max())
            torch.testing.assert_close(found[same], expected[same], rtol=1e-3, atol=1e-3 * largest)


def test_with_gradients_enabled_the_blocks_are_one_operator_too():
    torch.manual_seed(0)
    model: Any = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10).to("cuda").eval()
    torch.nn.init.normal_(model.head.weight)
    adamerge.apply(model, tome(8))
    images = torch.randn(4, 3, 224, 224, device="cuda")
    expected = gradients(model, model, images)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        found = gradients(model, compiled, images)
    assert list(found) == list(expected) and len(found) > 40
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-3, atol=1e-3 * float(one.abs().max()))
    assert len(stack_of(model).graphs) == 1


def gradients(model: Any, call: Any, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of a call, and the gradients of a sum of it with respect to the parameters."""
    model.zero_grad(set_to_none=True)
    out = call(images)
    (out * torch.linspace(-1, 1, out.shape[-1], device="cuda")).sum().backward()
    return {"out": out.detach()} | {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
