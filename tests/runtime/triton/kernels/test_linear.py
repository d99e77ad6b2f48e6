"""The linear kernels multiply as torch does, with their activation, and stop where the device says."""

import pytest
import torch
from awkward import DEVICE, noise

from adamerge.runtime.block_view import Activation
from adamerge.runtime.triton.kernels.linear import (
    activation_reference,
    leaves_idle,
    linear,
    linear_reference,
    worthwhile,
)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize("rows, inputs, outputs", [(1, 96, 33), (17, 200, 130), (70, 96, 64)])
def test_pointers(rows, inputs, outputs, activation):
    x, weight, bias = noise(rows, inputs), noise(outputs, inputs, seed=1) * inputs**-0.5, noise(outputs, seed=2)
    found = linear(x, weight, bias, activation=activation)
    torch.testing.assert_close(found, linear_reference(x, weight, bias, activation=activation), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("left", ["none", "few", "half", "three in four"])
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "quick_gelu"])
def test_bulk_copies(activation, left):
    """Interpreted, there are two processors and four programs; sizes are off the tile in all directions.

    What is left when all programs have had as many tiles is cut in two, if it is enough for half of them or fewer.
    """
    inputs = 96
    rows, outputs = {"none": (500, 248), "few": (270, 264), "half": (270, 248), "three in four": (840, 120)}[left]
    if DEVICE.type == "cuda":
        rows, outputs = 4000, {"none": 3000, "few": 2056, "half": 1400, "three in four": 1600}[left]
    x, weight = noise(rows, inputs, dtype=torch.float16), noise(outputs, inputs, seed=1, dtype=torch.float16) / 8
    bias = noise(outputs, seed=2, dtype=torch.float16)
    assert worthwhile(x, weight, False)
    found = linear(x, weight, bias, activation=activation).float()
    expected = linear_reference(x.double(), weight.double(), bias.double(), activation=activation).float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_large_product_is_added_to_something(scaled):
    """What a product, a factor and a sum give one after the other, each rounded; a device may round the last two at
    once."""
    rows, inputs, outputs = (270, 96, 264) if DEVICE.type == "cpu" else (4000, 96, 2056)
    half = torch.float16
    x, weight = noise(rows, inputs, dtype=half), noise(outputs, inputs, seed=1, dtype=half) / 8
    bias, onto = noise(outputs, seed=2, dtype=half), noise(rows, outputs, seed=3, dtype=half)
    gamma = noise(outputs, seed=4, dtype=half) if scaled else None
    product = linear(x, weight, bias)
    found = linear(x, weight, bias, gamma=gamma, onto=onto)
    apart = onto + (product * gamma if gamma is not None else product)
    assert torch.equal(found, apart) or (scaled and (found - apart).abs().max() <= 2**-9 * product.abs().max())
    expected = linear_reference(x, weight, bias, gamma=gamma, onto=onto)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=4e-3)


def test_rows_of_results_that_bulk_copies_cannot_write_are_left_to_the_library():
    assert not worthwhile(noise(9000, 96, dtype=torch.float16), noise(4001, 96, dtype=torch.float16), False)


def test_products_between_small_and_large_are_left_to_the_library():
    weight = noise(256, 96, dtype=torch.float16)
    processors = 2 if DEVICE.type == "cpu" else torch.cuda.get_device_properties(DEVICE).multi_processor_count
    small, between = noise(32, 96, dtype=torch.float16), noise(64 * processors, 96, dtype=torch.float16)
    assert worthwhile(small, weight, True) and not worthwhile(small, weight, False)
    assert not worthwhile(between, weight, True)
    assert not worthwhile(small.float(), weight.float(), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_after_the_last_are_not_written(dtype):
    x, weight = noise(300, 96, dtype=dtype), noise(600, 96, seed=1, dtype=dtype) / 8
    expected = linear_reference(x.double(), weight.double(), None).float()
    spoiled = x.clone()
    spoiled[200:] = float("nan")
    found = linear(spoiled, weight, None, rows=torch.tensor([200], dtype=torch.int32, device=DEVICE))
    torch.testing.assert_close(found[:200].float(), expected[:200], rtol=2e-3, atol=2e-3)


def test_gelu_is_exact_to_float32():
    x, found = activated(torch.linspace(-12, 12, 4001))
    exact = torch.nn.functional.gelu(x.double())
    wrong = (found - exact).abs()
    assert wrong.max() < 5e-7
    near = (x < 0) & (x > -5)
    assert (wrong[near] / exact[near].abs()).max() < 2**-12


@pytest.mark.parametrize("activation", ["gelu_tanh", "quick_gelu"])
def test_activations_by_a_sigmoid_are_exact_to_float32(activation):
    x, found = activated(torch.linspace(-12, 12, 4001), activation)
    exact = activation_reference(x.double(), activation)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=5e-7)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the square of a number that large
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu"])
def test_activations_keep_what_is_not_a_number(activation):
    _, found = activated(torch.tensor([float("nan"), float("inf"), -3e38, 3e38, 0.0]), activation)
    assert found[0].isnan() and found[1] == float("inf")
    assert found[2].abs() < 5e-7 and found[3] == torch.tensor(3e38) and found[4] == 0


def activated(values: torch.Tensor, activation: Activation = "gelu") -> tuple[torch.Tensor, torch.Tensor]:
    """The values on the device, and what becomes of them in the epilogue of a product that leaves them as they are."""
    x = torch.zeros(len(values), 16, device=DEVICE)
    x[:, 0] = values.to(DEVICE)
    weight = torch.zeros(1, 16, device=DEVICE)
    weight[0, 0] = 1
    return x[:, 0], linear(x, weight, None, activation=activation)[:, 0]


@pytest.mark.parametrize("tiles, expected", [(264, False), (300, True), (396, False), (410, True), (462, False)])
def test_idle_programs(tiles, expected):
    """A last round of tiles that keeps few of 264 programs busy is a waste; one cut in halves for all is not."""
    assert leaves_idle(tiles, 264) is expected
