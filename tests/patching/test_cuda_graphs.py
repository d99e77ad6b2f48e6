"""Blocks that run as CUDA graphs by themselves give what they give without.  Needs a CUDA device."""

import copy
import threading
import warnings
from typing import Any

import pytest
import timm
import torch
from hosts.families import randomised
from torch import Tensor

import adamerge
from adamerge.methods import adamerge as published
from adamerge.methods import ats, dsm, dymu, evit, pitome, random, tofu, tome, vid_tldr
from adamerge.patching.apply import stack_of
from adamerge.runtime.trace import Trace
from adamerge.runtime.triton.graph_cache import CALLS_BEFORE_CAPTURE, MOST_GRAPHS
from adamerge.runtime.triton.graph_capture import capture_graph
from adamerge.runtime.triton.side_stream import SideStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10)
    return model.to("cuda", dtype).eval()


def pictures(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def recipes(model: Any) -> dict[str, adamerge.Recipe]:
    images = pictures(8, seed=9, dtype=next(model.parameters()).dtype)
    adaptive = {"published": published(16.0), "dymu": dymu(8.0)}
    stats = {name: adamerge.calibrate(model, images, recipe, progress=False) for name, recipe in adaptive.items()}
    found = {name: recipe.with_stats(stats[name]) for name, recipe in adaptive.items()}
    return {"tome": tome(8), **found}


@torch.inference_mode()
def warm(model: Any, images: Tensor) -> None:
    for _ in range(CALLS_BEFORE_CAPTURE + 1):
        model(images)


def same_trace(one: Trace, other: Trace) -> bool:
    slots = all(torch.equal(one.slots(layer), other.slots(layer)) for layer in range(len(one.layers)))
    return slots and torch.equal(one.counts, other.counts) and torch.equal(one.redundancy, other.redundancy)


@pytest.mark.parametrize("method", ["tome", "published", "dymu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_graph_gives_what_the_kernels_give(method, dtype):
    model = build(dtype)
    recipe = recipes(model)[method]
    plain = adamerge.apply(copy.deepcopy(model), recipe, cuda_graphs=False)
    fast: Any = adamerge.apply(model, recipe)
    warm(fast, pictures(6, dtype=dtype))
    assert len(stack_of(fast).graphs) == 1
    with torch.inference_mode():
        for seed, count in ((1, 6), (2, 6), (3, 4)):
            images = pictures(count, seed, dtype)
            expected, got = plain(images), fast(images)
            if count == 6:
                assert torch.equal(got, expected)
                assert same_trace(adamerge.trace(fast), adamerge.trace(plain))
            assert torch.allclose(got.float(), expected.float(), atol=0.05)
            assert torch.equal(adamerge.trace(fast).counts, adamerge.trace(plain).counts)
    assert len(stack_of(fast).graphs) == 1
    assert len(stack_of(plain).graphs) == 0


OTHERS = {
    "pitome": pitome(0.9),
    "dsm": dsm(8, 1),
    "dsm in windows": dsm(8, 1, windows=True),
    "tofu": tofu(8),
    "evit": evit(0.7),
    "ats": ats(120),
    "vid_tldr": vid_tldr(8),
    "random": random(8),
}


@pytest.mark.parametrize("recipe", OTHERS.values(), ids=OTHERS)
def test_every_method_runs_as_a_graph_and_merges_as_the_reference(recipe):
    """Random parameters everywhere tell tokens apart, so that rounding does not change which of them merge."""
    model = randomised(build(torch.float32), 0).to("cuda")
    reference = adamerge.apply(copy.deepcopy(model), recipe, "reference")
    plain = adamerge.apply(copy.deepcopy(model), recipe, cuda_graphs=False)
    fast = adamerge.apply(model, recipe)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm(fast, pictures(4, dtype=torch.float32))
        assert stack_of(fast).graphs.failure is None and len(stack_of(fast).graphs) == 1
        for seed in (1, 2):
            images = pictures(4, seed, torch.float32)
            found, expected = fast(images), plain(images)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found, reference(images), rtol=1e-3, atol=1e-3)
            assert torch.equal(adamerge.trace(fast).counts, adamerge.trace(reference).counts)
            assert torch.equal(adamerge.trace(fast).slots(), adamerge.trace(reference).slots())


def test_outputs_and_inputs_are_the_callers_own():
    fast: Any = adamerge.apply(build(), tome(8))
    images = pictures(4)
    warm(fast, images)
    with torch.inference_mode():
        features = fast.forward_features(images)
        kept = features.clone()
        fast.forward_features(pictures(4, 1))
    assert torch.equal(features, kept)


def test_changes_of_the_model_are_seen():
    fast: Any = adamerge.apply(build(), tome(8))
    images = pictures(4)
    warm(fast, images)

    def check() -> None:
        plain = adamerge.apply(adamerge.remove(copy.deepcopy(fast)), stack_of(fast).recipe, cuda_graphs=False)
        with torch.inference_mode():
            for _ in range(CALLS_BEFORE_CAPTURE + 2):
                assert torch.equal(fast(images), plain(images))

    with torch.no_grad():
        fast.blocks[0].mlp.fc1.weight.mul_(1.5)
    check()
    fast.blocks[0].attn.qkv.weight.data = fast.blocks[0].attn.qkv.weight.data * 0.5
    check()
    fast.load_state_dict({name: value * 1.01 for name, value in fast.state_dict().items()})
    check()
    fast.blocks[1].mlp = copy.deepcopy(fast.blocks[2].mlp)
    check()
    adamerge.apply(fast, tome(12))
    check()
    fast.half()
    images = images.half()
    check()
    seen: list[int] = []
    handle = fast.blocks[2].mlp.register_forward_hook(lambda *_: seen.append(1))
    with torch.inference_mode(), pytest.warns(UserWarning, match="there is a hook on mlp of block 2"):
        fast(images)
    assert seen
    handle.remove()
    check()


def test_the_graph_runs_with_gradients_enabled_and_they_are_those_of_the_reference():
    model = build(torch.float32)
    slow: Any = adamerge.apply(copy.deepcopy(model), tome(8), "reference")
    fast: Any = adamerge.apply(model, tome(8))
    images = pictures(4, dtype=torch.float32)
    warm(fast, images)
    with torch.inference_mode():
        expected = fast(images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(fast(images), expected)
    assert adamerge.explain(fast, images).backend == "triton" and len(stack_of(fast).graphs) == 1
    for each in (fast, slow):
        each(images).square().sum().backward()
    for name, parameter in slow.named_parameters():
        found = fast.get_parameter(name).grad
        assert (found - parameter.grad).norm() <= 1e-3 * parameter.grad.norm() + 1e-6, name


def test_eight_threads_on_streams_of_their_own_equal_one():
    model = build()
    fast: Any = adamerge.apply(model, recipes(model)["dymu"])
    batches = [pictures(4, seed) for seed in range(8)]
    warm(fast, batches[0])
    with torch.inference_mode():
        expected = [fast(batch) for batch in batches]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                for index in range(number, number + 8):
                    out = fast(batches[index % 8])
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(out, expected[index % 8]):
                        wrong.append(index)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_captures_take_streams_that_nobody_else_has():
    """torch's ring of streams comes round after 32: another thread's work would become a part of the graph."""
    others = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    used: list[int] = []

    def run(x: Tensor) -> Tensor:
        used.append(torch.cuda.current_stream().cuda_stream)
        with SideStream(x) as side:
            used.append(torch.cuda.current_stream().cuda_stream)
            made = x + 1
        side.join()
        return made

    capture_graph(run, torch.zeros(4, device="cuda"))
    assert len(set(used)) == 2 and not others & set(used)


def test_memory_is_bounded_over_many_shapes():
    fast: Any = adamerge.apply(build(), tome(8))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 40, (200,), generator=generator).tolist()
    most: list[int] = []
    with torch.inference_mode():
        for size in sizes:
            fast(pictures(size))
            most.append(torch.cuda.memory_reserved())
    assert len(stack_of(fast).graphs) <= MOST_GRAPHS
    assert max(most[100:]) <= 1.5 * max(most[:100])


def test_capture_by_hand_and_copies_work_beside_graphs():
    fast: Any = adamerge.apply(build(), tome(8))
    images = pictures(4)
    warm(fast, images)
    with torch.inference_mode():
        expected = fast(images)
        captured = adamerge.capture(fast, images)
        assert torch.equal(captured(images), expected)
    assert torch.equal(captured(images.clone()), expected)
    with torch.inference_mode():
        twin = copy.deepcopy(fast)
        assert torch.equal(twin(images), expected)
        warm(twin, images)
        assert torch.equal(twin(images), expected)
