"""The class token's attention is that of plain torch."""

import pytest
import torch
from awkward import LENGTHS, layout, noise

from adamerge.runtime.triton.kernels.class_attention import class_attention, class_attention_reference


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_head_looks_at_its_own_image(name, sized):
    where = layout(name)
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    logs = noise(where.total, seed=1).abs().mul(5).ceil().log2() if sized else None
    found, expected = (look(query, key, where, 0.3, logs) for look in (class_attention, class_attention_reference))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.sum(1), torch.full_like(found[:, 0], where.images))


@pytest.mark.parametrize("dim", [33, 64, 80, 128])
def test_heads_of_any_width(dim):
    where = layout("edges")
    query, key, _ = noise(where.total, 3, 1, dim).unbind(1)
    found, expected = (look(query, key, where, dim**-0.5) for look in (class_attention, class_attention_reference))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_queries_may_lie_differently_in_memory():
    where = layout("edges")
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    expected = class_attention_reference(query, key, where, 0.3)
    torch.testing.assert_close(class_attention(query.contiguous(), key, where, 0.3), expected, rtol=1e-5, atol=1e-7)
