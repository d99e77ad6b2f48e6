"""Which runtime a batch takes, and what users hear of it."""

from contextlib import nullcontext

import pytest
import torch
from hosts.families import RECIPES, build, pictures
from torch._subclasses.fake_tensor import FakeTensorMode

import adamerge
from adamerge.core.errors import BadImages, BadOption
from adamerge.methods import tome
from adamerge.patching.apply import stack_of
from adamerge.patching.cuda_graphs import check_backend
from adamerge.runtime.triton.kernels.launch import why_triton_too_old


def test_an_unknown_runtime_is_refused_and_nothing_changes(unchecked):
    model = build("vit")
    blocks = model.blocks
    with pytest.raises(BadOption, match="runtime must be one of auto, reference, packed; got 'fast'"):
        adamerge.apply(model, tome(2), "fast")  # pyright: ignore[reportArgumentType]
    assert model.blocks is blocks


@pytest.mark.parametrize("why", ["training", "autocast", "merges nothing"])
def test_what_only_the_reference_can_do_it_does(why):
    model = adamerge.apply(build("vit"), tome(0 if why == "merges nothing" else 2), "packed")
    model.train(why == "training")
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.float16, enabled=why == "autocast"),
        pytest.warns(UserWarning, match=f"{why}.*; the reference runs instead"),
    ):
        model(pictures(2))


@pytest.mark.parametrize("recipe", ["tome", "adaptive"])
def test_automatically_a_cpu_packs_in_silence(recipe):
    model, images = build("vit"), pictures(3)
    chosen = RECIPES[recipe](model, images)
    with torch.inference_mode():
        expected = adamerge.apply(model, chosen, "reference")(images)
        before = adamerge.trace(model)
        packed = adamerge.apply(model, chosen, "packed")(images)
        assert torch.equal(adamerge.apply(model, chosen)(images), packed)
    assert before.merged.sum() > 0 and torch.equal(before.slots(), adamerge.trace(model).slots())
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)
    assert stack_of(model).selector.runtime == "auto"


def test_automatically_a_recipe_that_merges_nothing_gives_the_bits_of_the_host():
    model, images = build("vit"), pictures(3)
    with torch.inference_mode():
        expected = model(images)
        assert torch.equal(adamerge.apply(model, tome(0))(images), expected)


@pytest.mark.parametrize("recipe", ["tome", "fixed"])
def test_automatically_tensors_without_values_take_the_reference(recipe):
    model, images = build("vit"), pictures(2)
    adamerge.apply(model, RECIPES[recipe](model, images))
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.empty(images.shape)).shape == (2, 10)


def test_a_triton_that_the_kernels_were_never_run_with_is_not_used(monkeypatch):
    triton = pytest.importorskip("triton")
    for version, told in (
        ("3.9.1+git1", None),
        ("3.10.0", None),
        ("3.2.0", "Triton 3.2.0 is older than 3.6, with which"),
    ):
        monkeypatch.setattr(triton, "__version__", version)
        found = why_triton_too_old()
        assert found is None if told is None else found is not None and found.startswith(told)


def test_a_graph_needs_a_cuda_device():
    with pytest.raises(BadImages, match="CUDA graphs need images on a CUDA device; these are on cpu"):
        adamerge.capture(build("vit"), pictures(1))


@pytest.mark.parametrize(
    ("runtime", "training", "told"),
    [
        ("reference", False, "needs the kernels, but runtime='reference' was asked for. Apply the recipe with"),
        ("auto", True, "needs the kernels, but the model is in training mode"),
        ("auto", False, None),
    ],
)
def test_a_graph_of_adaptive_counts_needs_the_kernels(runtime, training, told):
    model, images = build("vit"), pictures(2)
    adaptive = RECIPES["adaptive"](model, images)
    with torch.inference_mode():
        check_backend(adamerge.apply(model, tome(2), runtime).train(training), images)
        adamerge.apply(model, adaptive, runtime)
        with pytest.raises(BadOption, match=told) if told else nullcontext():
            check_backend(model, images)
        check_backend(lambda images: images, images)
