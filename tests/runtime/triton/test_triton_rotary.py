"""Hosts that turn queries and keys by their places: the kernels do what the reference does."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.families import RECIPES
from hosts.zoo import ZOO, Member
from marks import mostly_slow
from torch import Tensor, nn
from triton.runtime.errors import OutOfResources

import adamerge
from adamerge.hosts.base import find_host
from adamerge.methods import random, tome
from adamerge.patching.apply import stack_of
from adamerge.patching.stack import Stack
from adamerge.presets import protect
from adamerge.runtime import backend
from adamerge.runtime.block_view import PlainView
from adamerge.runtime.module_watch import ModuleWatch
from adamerge.runtime.triton import forward, graph_cache
from adamerge.runtime.triton.graph_cache import GraphCache
from adamerge.runtime.triton.graph_capture import CapturedGraph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("EVA-02", "EVA-02_large", "DINOv3", "Perception_Encoder", "rotary_ViT_with_mixed_tables", "rotary_post-norm")
ROTARY = [member for member in ZOO if str(member) in {*(f"timm/{name}" for name in NAMES), "transformers/DINOv3"}]
DINOV3 = next(member for member in ROTARY if str(member) == "timm/DINOv3")
MIXED = next(member for member in ROTARY if str(member) == "timm/rotary_ViT_with_mixed_tables")
CHOSEN = {
    "before the block": RECIPES["adaptive"],
    "by keys": RECIPES["tome"],
    "by keys and class attention": lambda model, images: protect(static=True, r=2.5),
    "decided by the reference": lambda model, images: random(2),
}


def with_kernels(model: nn.Module) -> None:
    """Run the kernels even where there is no device for them: the interpreter stands in."""
    selector = stack_of(model).selector
    selector.choose = lambda x, views, training: backend.TritonWithFallback(selector, x, views)


def made(member: Member) -> tuple[Any, Tensor]:
    member.require()
    return member.build().to(DEVICE), member.images(3).to(DEVICE)


def test_all_rotary_families_are_tried():
    assert len(ROTARY) == len(NAMES) + 1


@pytest.mark.parametrize("recipe", mostly_slow(CHOSEN, ["before the block", "by keys"]))
@pytest.mark.parametrize("member", mostly_slow(ROTARY, ROTARY[:2]), ids=str)
def test_same_plans_same_outputs(member: Member, recipe):
    model, images = made(member)
    chosen = CHOSEN[recipe](model, images)
    with torch.inference_mode():
        expected = member.see(adamerge.apply(model, chosen, "reference"), images)
        before = adamerge.trace(model)
        adamerge.apply(model, chosen)
        with_kernels(model)
        found = member.see(model, images)
    after = adamerge.trace(model)
    assert expected.std() > 0.01
    assert torch.equal(before.r, after.r) and before.merged.sum() > 0
    assert torch.equal(before.slots(), after.slots())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_rotary_batch_on_cuda_takes_the_kernels(monkeypatch, unchecked):
    model, _ = made(DINOV3)
    monkeypatch.setattr(backend, "why_no_kernels", lambda: None)
    selector = stack_of(adamerge.apply(model, tome(2))).selector
    tokens: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=torch.device("cuda"))
    with torch.inference_mode():
        assert selector.why_reference(tokens, False) is None


def test_a_view_that_does_not_say_how_it_turns_takes_the_reference(unchecked):
    from adamerge.hosts.timm import TimmBlock

    host = find_host(made(DINOV3)[0])
    views = [TimmBlock(view.block) for view in host.views]  # pyright: ignore
    tokens: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=torch.device("cuda"))
    selector = backend.BackendSelector(views, tome(2), 5, True, "auto", rotary=True)
    with torch.inference_mode():
        reason = selector.why_reference(tokens, False)
    assert reason is not None and "has no `rotation`" in reason
    assert not selector.may_pack


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["timm/DINOv3", "timm/EVA-02"])
def test_counts_under_capture_stay_on_the_device(name):
    """Without asking for counts, arrays keep their length and the result is the same."""
    member = next(member for member in ROTARY if str(member) == name)
    model, images = made(member)
    adamerge.apply(model, RECIPES["adaptive"](model, images))
    with_kernels(model)
    with torch.inference_mode():
        expected = member.see(model, images)
        stack_of(model).selector.triton().is_capturing = lambda x: True
        torch.testing.assert_close(member.see(model, images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["timm/DINOv3", "timm/EVA-02"])
@pytest.mark.parametrize("autocast", [False, True], ids=["converted", "autocast"])
def test_half_precision_errs_no_more_than_twice_as_the_reference(name, autocast):
    member = next(member for member in ROTARY if str(member) == name)
    model, images = made(member)
    with torch.inference_mode():
        exact = member.see(adamerge.apply(copy.deepcopy(model).double(), tome(3), "reference"), images.double())
        if not autocast:
            model, images = model.half(), images.half()
        with torch.autocast(DEVICE, torch.float16, enabled=autocast):
            half = member.see(adamerge.apply(model, tome(3), "reference"), images)
            adamerge.apply(model, tome(3))
            with_kernels(model)
            found = member.see(model, images)
    assert 0 < (found - exact).norm() <= 2 * (half - exact).norm()


def test_a_batch_without_images_gives_outputs_without_images():
    model, images = made(DINOV3)
    adamerge.apply(model, tome(2))
    with_kernels(model)
    with torch.inference_mode():
        assert model(images[:0]).shape == (0, 10)


@pytest.mark.parametrize(
    "member, kernel, fails", [(DINOV3, "rotate", 0), (DINOV3, "rotate", 2), (MIXED, "unfold", 0)], ids=str
)
def test_where_a_kernel_cannot_run_the_reference_turns_all_layers(member, kernel, fails, monkeypatch):
    """By the tables of each layer, which differ in the last host."""
    model, images = made(member)
    own, calls = getattr(forward, kernel), []

    def refuses(*args, **kwargs):
        calls.append(args)
        if len(calls) > fails:
            raise OutOfResources(300_000, 101_376, "shared memory")
        return own(*args, **kwargs)

    with torch.inference_mode():
        expected = adamerge.apply(model, tome(2), "reference")(images)
        adamerge.apply(model, tome(2))
        with_kernels(model)
        monkeypatch.setattr(forward, kernel, refuses)
        with pytest.warns(UserWarning, match="a kernel does not run on this device"):
            found = model(images)
    tolerance = 0.0 if DEVICE == "cpu" else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class Recorded:
    """In place of a CUDA graph: reads the same tensors at every replay and overwrites the same output."""

    def __init__(self, run: Any, examples: tuple[Tensor, ...]):
        self.run, self.inputs = run, examples
        self.output = run(*examples)

    def replay(self) -> None:
        self.output[0].copy_(self.run(*self.inputs)[0])


@pytest.mark.parametrize("name", ["timm/DINOv3", "timm/rotary_ViT_with_mixed_tables", "transformers/DINOv3"])
def test_graphs_read_the_tables_of_every_call(name, monkeypatch):
    """A graph reads tables of its own, into which those of each call are copied."""
    member = next(member for member in ROTARY if str(member) == name)
    member.require()
    model, images = member.build().to(DEVICE), member.images(1).to(DEVICE)
    captured: list[Recorded] = []

    def capture(run: Any, *examples: Tensor, pool: Any = None) -> CapturedGraph:
        captured.append(Recorded(run, examples))
        return CapturedGraph(captured[-1], examples, captured[-1].output, [])

    with torch.inference_mode():
        expected = member.see(adamerge.apply(model, tome(2), "reference"), images)
        stack = stack_of(adamerge.apply(model, tome(2)))
        with_kernels(model)
        watch = ModuleWatch(list(stack.children()), stack.convention.ignores_hook)
        monkeypatch.setattr(graph_cache, "CALLS_BEFORE_CAPTURE", 0)
        monkeypatch.setattr(Stack, "graphs", GraphCache(stack._run_blocks, lambda: watch, capture))
        monkeypatch.setattr(Stack, "may_replay", lambda self, x: True)
        torch.testing.assert_close(member.see(model, images), expected, rtol=1e-4, atol=1e-4)
        (graph,) = captured
        assert len(graph.inputs) > 1
        for table in graph.inputs[1:]:
            table.zero_()
        torch.testing.assert_close(member.see(model, images), expected, rtol=1e-4, atol=1e-4)
    assert len(captured) == 1


def is_plain(view: Any) -> bool:
    return isinstance(view, PlainView) and view.params() is not None


def test_which_rotary_blocks_are_plain():
    found = {str(member): {is_plain(view) for view in find_host(made(member)[0]).views} for member in ROTARY[:6]}
    plain = {"timm/DINOv3", "timm/Perception_Encoder", "timm/rotary_ViT_with_mixed_tables"}
    assert found == {str(member): {str(member) in plain} for member in ROTARY[:6]}


@pytest.mark.parametrize(
    "name", ["vit_base_patch16_dinov3", "vit_base_patch16_dinov3_qkvb", "vit_pe_core_base_patch16_224"]
)
def test_large_models_of_timm_are_plain(name):
    timm = pytest.importorskip("timm", minversion="1.0.20")
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    assert all(map(is_plain, find_host(model).views))


def test_biases_that_are_kept_apart_are_those_of_now():
    model, _ = made(next(member for member in ZOO if str(member) == "timm/EVA"))
    view: Any = find_host(model).views[0]
    bias = view.attn
    with torch.no_grad():
        bias.q_bias.fill_(2)
        bias.v_bias.fill_(3)
    width = len(bias.q_bias)
    params = view.params()
    assert params.qkv.bias.tolist() == [2.0] * width + [0.0] * width + [3.0] * width
    assert params.qkv.weight is bias.qkv.weight


def test_hosts_with_a_table_that_is_switched_off_run_too():
    """timm's EVA of the first kind hands its blocks no table."""
    member = next(member for member in ZOO if str(member) == "timm/EVA")
    model, images = made(member)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = member.see(adamerge.apply(model, tome(3), "reference"), images)
        adamerge.apply(model, tome(3))
        with_kernels(model)
        torch.testing.assert_close(member.see(model, images), expected, rtol=1e-4, atol=1e-4)
