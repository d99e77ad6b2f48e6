"""The residual kernel adds, norms and measures as torch does."""

import pytest
import torch
from awkward import DEVICE, MIXED, noise

from adamerge.runtime.block_view import NormParams
from adamerge.runtime.triton.kernels.residual import add, add_reference


@pytest.mark.parametrize("rows, width", [(1, 96), (3, 192), (17, 768), (5, 1280)])
@pytest.mark.parametrize("branch", [False, True])
def test_sum_norm_and_lengths(rows, width, branch):
    x, more = noise(rows, width), noise(rows, width, seed=1) if branch else None
    gamma = noise(width, seed=2) if branch else None
    norm = NormParams(noise(width, seed=3), noise(width, seed=4), 1e-6)
    found = add(x, more, gamma=gamma, norm=norm, inverse=True)
    for ours, expected in zip(found, add_reference(x, more, gamma=gamma, norm=norm, inverse=True), strict=True):
        assert ours is not None and expected is not None
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=3e-6)


def test_a_norm_without_numbers_of_its_own():
    x = noise(4, 96)
    norm = NormParams(None, None, 1e-5)
    found, expected = add(x, None, norm=norm)[1], add_reference(x, None, norm=norm)[1]
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_the_sum_is_rounded_as_torch_rounds_it():
    x, more = noise(9, 96, dtype=torch.float16), noise(9, 96, seed=1, dtype=torch.float16)
    assert torch.equal(add(x, more)[0], x + more)


@pytest.mark.parametrize("stream, half, factor", [*MIXED, (torch.float32, torch.bfloat16, None)], ids=str)
def test_a_branch_of_another_dtype_gives_the_dtype_that_torch_gives(stream, half, factor):
    x, more = noise(9, 96, dtype=stream), noise(9, 96, seed=1, dtype=half)
    gamma = None if factor is None else noise(96, seed=2, dtype=factor)
    norm = NormParams(noise(96, seed=3), noise(96, seed=4), 1e-6, half)
    sum_, normed, inverse = add(x, more, gamma=gamma, norm=norm, inverse=True)
    expected = x + (more if gamma is None else gamma * more)
    assert sum_.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(sum_, expected, rtol=1e-6, atol=1e-6)
    assert normed is not None and normed.dtype == half
    exact = torch.nn.functional.layer_norm(expected, (96,), norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(normed.float(), exact, rtol=torch.finfo(half).eps, atol=1e-5)
    torch.testing.assert_close(inverse, 1 / expected.norm(dim=1))
    for ours, theirs in zip((sum_, normed), add_reference(x, more, gamma=gamma, norm=norm), strict=False):
        assert theirs is not None and ours.dtype == theirs.dtype


def test_a_row_of_zeros_has_a_finite_inverse_length():
    inverse = add(torch.zeros_like(noise(2, 96)), None, inverse=True)[2]
    assert inverse is not None and inverse.isfinite().all()


def test_rows_after_the_last_are_not_written():
    x, more = noise(11, 96), noise(11, 96, seed=1)
    norm = NormParams(None, None, 1e-6)
    counted = torch.tensor([6], dtype=torch.int32, device=DEVICE)
    spoiled = x.clone()
    spoiled[6:] = float("nan")
    found = add(spoiled, more, norm=norm, inverse=True, counted=counted)
    for ours, expected in zip(found, add_reference(x, more, norm=norm, inverse=True), strict=True):
        assert ours is not None and expected is not None
        torch.testing.assert_close(ours[:6], expected[:6], rtol=1e-5, atol=3e-6)
