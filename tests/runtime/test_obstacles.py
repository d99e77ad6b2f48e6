"""On CUDA a model that runs without kernels says so.  Fake tensors replace a device here."""

import warnings
from dataclasses import replace

import pytest
import torch
from hosts.families import build
from torch._subclasses.fake_tensor import FakeTensorMode

import adamerge
from adamerge.methods import pitome, tome
from adamerge.patching.apply import stack_of
from adamerge.runtime.obstacles import BatchFacts, find_obstacle

GOOD = BatchFacts("cuda", torch.bfloat16, gradients=False, training=False, autocast=None)


def kernels_run() -> None:
    return None


@pytest.fixture(autouse=True)
def no_capture(monkeypatch):
    """Asking a device that does not exist would be an error."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_nothing_is_in_the_way_of_inference_in_a_known_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert find_obstacle(replace(GOOD, dtype=dtype), True, None, kernels_run) is None
    on_cpu = BatchFacts("cpu", torch.float64, gradients=False, training=False, autocast=None)
    assert find_obstacle(on_cpu, True, None, lambda: "no kernels") is None


@pytest.mark.parametrize("computes", [torch.bfloat16, torch.float16])
def test_autocast_is_not_in_the_way_on_cuda(computes):
    for tokens in (torch.float32, computes):
        assert find_obstacle(replace(GOOD, dtype=tokens, autocast=computes), True, None, kernels_run) is None


@pytest.mark.parametrize(
    ("change", "reason", "advice"),
    [
        ({"autocast": torch.float16}, "in torch.float16 and the tokens are torch.bfloat16", "leave the model"),
        ({"autocast": torch.float64}, "in torch.float64 and the tokens", "in torch.bfloat16 or float16"),
        ({"gradients": True}, "gradients are enabled", "inside torch.inference_mode()"),
        ({"dtype": torch.float64}, "no kernels for torch.float64", "convert the model"),
        ({"dtype": torch.float64, "gradients": True}, "no kernels for torch.float64", "convert the model"),
        ({"device": "mps"}, "on CPUs and CUDA devices only, and these are on mps", ""),
    ],
)
def test_an_obstacle_has_a_reason_and_what_to_do(change, reason, advice):
    found = find_obstacle(replace(GOOD, **change), True, None, kernels_run)
    assert found is not None and reason in found.reason and advice in (found.advice or "")


def test_missing_kernels_are_an_obstacle():
    found = find_obstacle(GOOD, True, None, lambda: "Triton is not installed")
    assert found is not None and found.reason == "Triton is not installed" and "Triton" in (found.advice or "")


def test_compilers_with_gradients_enabled_do_not_reach_the_search_for_kernels():
    def search():
        raise AssertionError("torch.compile cannot follow this")

    found = find_obstacle(replace(GOOD, gradients=True), True, None, search)
    assert found is not None and found.reason == "gradients are enabled"


def test_training_and_recipes_that_merge_nothing_are_no_surprise():
    training = find_obstacle(replace(GOOD, training=True, gradients=True), True, None, kernels_run)
    nothing = find_obstacle(replace(GOOD, gradients=True), False, None, kernels_run)
    assert training is not None and training.advice is None
    assert nothing is not None and nothing.advice is None


def choose(model: torch.nn.Module, *, device: str = "cuda", training: bool = False, replica: bool = False) -> list[str]:
    """The warnings of three batches of tokens on a device that need not exist."""
    stack = stack_of(model)
    views = stack.views[::-1] if replica else stack.views
    with warnings.catch_warnings(record=True) as caught, FakeTensorMode():
        warnings.simplefilter("always")
        for _ in range(3):
            stack.selector.choose(torch.empty(2, 17, 48, device=device), views, training)
    return [str(warning.message) for warning in caught]


def test_gradients_on_cuda_are_said_once_and_what_to_write():
    (told,) = choose(adamerge.apply(build("vit"), tome(2)))
    assert told == (
        "the merged blocks run without kernels because gradients are enabled; call the model inside "
        "torch.inference_mode()"
    )


def test_an_unknown_part_of_the_recipe_is_said_once():
    with torch.inference_mode():
        (told,) = choose(adamerge.apply(build("vit"), pitome(r=2)))
    assert "the kernels do not know this recipe's split ByEnergy" in told and "decides its merges" in told


def test_what_is_normal_use_is_not_told():
    merged = adamerge.apply(build("vit"), tome(2))
    assert choose(merged, training=True) == []
    assert choose(merged, device="cpu") == []
    assert choose(adamerge.apply(build("vit"), tome(0))) == []
    assert choose(adamerge.apply(build("vit"), tome(2), "reference")) == []
    with torch.inference_mode():
        assert choose(adamerge.apply(build("vit"), tome(2)), replica=True) == []
        assert choose(adamerge.apply(build("vit"), tome(2))) == []
