"""The attention that tokens receive is that of plain torch."""

import pytest
import torch
from awkward import LENGTHS, layout, noise

from adamerge.runtime.triton.kernels.received_attention import received_attention, received_attention_reference


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_tokens_receive_attention_from_their_own_image(name, sized):
    where = layout(name)
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    logs = noise(where.total, seed=1).abs().mul(5).ceil().log2() if sized else None
    found, expected = (
        sums(query, key, where, 0.3, logs) for sums in (received_attention, received_attention_reference)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # Every token gives away one unit of attention in every head.
    torch.testing.assert_close(found.sum(1), torch.full_like(found[:, 0], where.total))


@pytest.mark.parametrize("dim", [33, 64, 72])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_of_any_width(dim, dtype):
    where = layout("registers")
    query, key, _ = noise(where.total, 3, 1, dim, dtype=dtype).unbind(1)
    found = received_attention(query, key, where, dim**-0.5)
    expected = received_attention_reference(query, key, where, dim**-0.5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_an_image_gets_the_same_bits_alone():
    where = layout("registers")
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    begin, end = where.offsets.tolist()[1:3]
    alone = type(where)(
        where.offsets[:2] * 0 + torch.tensor([0, end - begin]).to(where.offsets), 5, end - begin, end - begin
    )
    found = received_attention(query[begin:end], key[begin:end], alone, 0.3)
    assert torch.equal(found, received_attention(query, key, where, 0.3)[:, begin:end])


def test_queries_may_lie_differently_in_memory():
    where = layout("edges")
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    expected = received_attention_reference(query, key, where, 0.3)
    torch.testing.assert_close(received_attention(query.contiguous(), key, where, 0.3), expected, rtol=1e-4, atol=1e-6)
