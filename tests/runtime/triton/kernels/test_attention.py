"""The attention kernel agrees with attention image by image."""

import pytest
import torch
from awkward import LENGTHS, layout, noise

from adamerge.runtime.triton.kernels.attention import attend, attend_reference


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_image_attends_to_its_own_tokens(name, sized):
    where = layout(name)
    query, key, value = noise(where.total, 3, 2, 32).unbind(1)
    size = noise(where.total, seed=1).abs().mul(5).ceil() if sized else None
    expected = attend_reference(query, key, value, where, 0.3, size)
    found = attend(query, key, value, where, 0.3, None if size is None else size.log2())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dim", [33, 64, 80, 128])
def test_heads_of_any_width(dim):
    where = layout("edges")
    query, key, value = noise(where.total, 3, 1, dim).unbind(1)
    found = attend(query, key, value, where, dim**-0.5)
    torch.testing.assert_close(found, attend_reference(query, key, value, where, dim**-0.5, None), rtol=1e-5, atol=2e-6)


def test_queries_and_values_may_lie_differently_in_memory():
    where = layout("edges")
    query, key, value = noise(where.total, 3, 2, 32).unbind(1)
    expected = attend_reference(query, key, value, where, 0.3, None)
    torch.testing.assert_close(attend(query.contiguous(), key, value, where, 0.3), expected, rtol=1e-5, atol=2e-6)


def test_half_precision_errs_no_more_than_twice_as_torch_does():
    where = layout("vit")
    query, key, value = noise(where.total, 3, 1, 64, dtype=torch.float16).unbind(1)
    exact = attend_reference(query.double(), key.double(), value.double(), where, 0.125, None)
    ours = (attend(query, key, value, where, 0.125) - exact).norm()
    torchs = (attend_reference(query, key, value, where, 0.125, None) - exact).norm()
    assert ours <= 2 * torchs


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter's arithmetic is numpy's, which warns.
@pytest.mark.parametrize("dim", [32, 24])
def test_a_broken_image_spoils_no_other(dim):
    """Its tokens come right after those of another image, whose tiles reach beyond its last token."""
    where = layout("edges")
    query, key, value = noise(3, where.total, 1, dim).unbind()
    clean = attend(query, key, value, where, 0.3)
    begin, end = where.offsets[1:3].tolist()
    key[begin:end] = value[begin:end] = float("nan")
    broken = attend(query, key, value, where, 0.3)
    others = torch.ones(where.total, dtype=torch.bool)
    others[begin:end] = False
    assert torch.equal(broken[others], clean[others]) and broken[begin:end].isnan().all()
