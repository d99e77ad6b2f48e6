"""The attention that tokens receive is that of plain torch."""

from itertools import product

import pytest
import torch
from awkward import DEVICE, LENGTHS, layout, noise
from marks import mostly_slow
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, ragged_layout
from adamerge.runtime.triton.kernels.attention import attend
from adamerge.runtime.triton.kernels.received_attention import received_attention, received_attention_reference


def received(query: Tensor, key: Tensor, where: Layout, scale: float, logs: Tensor | None = None) -> Tensor:
    """As the backend does it: attention leaves the logarithms of its sums."""
    log_sums = torch.empty(query.shape[1], query.shape[0], device=DEVICE)
    attend(query, key, key, where, scale, logs, log_sums)
    return received_attention(query, key, log_sums, where, scale, logs)


@pytest.mark.parametrize(
    "name, sized", mostly_slow(product(LENGTHS, [False, True]), [*product(set(LENGTHS) - {"large"}, [False, True])])
)
def test_tokens_receive_attention_from_their_own_image(name, sized):
    where = layout(name)
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    logs = noise(where.total, seed=1).abs().mul(5).ceil().log2() if sized else None
    found = received(query, key, where, 0.3, logs)
    torch.testing.assert_close(found, received_attention_reference(query, key, where, 0.3, logs), rtol=1e-4, atol=1e-6)
    # Every token gives away one unit of attention in every head.
    torch.testing.assert_close(found.sum(1), torch.full_like(found[:, 0], where.total))


@pytest.mark.parametrize("dim", [33, 64, 72])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_of_any_width(dim, dtype):
    where = layout("registers")
    query, key, _ = noise(where.total, 3, 1, dim, dtype=dtype).unbind(1)
    found = received(query, key, where, dim**-0.5)
    expected = received_attention_reference(query, key, where, dim**-0.5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_an_image_gets_the_same_bits_alone():
    where = layout("registers")
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    begin, end = where.offsets.tolist()[1:3]
    alone = received(query[begin:end], key[begin:end], ragged_layout([end - begin - 5], 5, DEVICE), 0.3)
    assert torch.equal(alone, received(query, key, where, 0.3)[:, begin:end])


def test_queries_may_lie_differently_in_memory():
    where = layout("edges")
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    expected = received_attention_reference(query, key, where, 0.3)
    torch.testing.assert_close(received(query.contiguous(), key, where, 0.3), expected, rtol=1e-4, atol=1e-6)


def test_a_batch_without_images_receives_nothing():
    nothing = torch.zeros(0, 2, 32, device=DEVICE)
    assert received(nothing, nothing, ragged_layout([], 1, DEVICE), 0.3).shape == (2, 0)
