"""The entropy of tokens' attention is that of plain torch."""

import pytest
import torch
from awkward import DEVICE, layout, noise
from torch import Tensor

from adamerge.runtime.packed.layout import Layout, ragged_layout
from adamerge.runtime.triton.kernels.attention import attend
from adamerge.runtime.triton.kernels.attention_entropy import attention_entropy, attention_entropy_reference


def entropy(query: Tensor, key: Tensor, where: Layout, scale: float, logs: Tensor | None = None) -> Tensor:
    """As the backend does it: attention leaves the logarithms of its sums."""
    log_sums = torch.empty(query.shape[1], query.shape[0], device=DEVICE)
    attend(query, key, key, where, scale, logs, log_sums)
    return attention_entropy(query, key, log_sums, where, scale, logs)


@pytest.mark.parametrize("name, sized", [("one", False), ("edges", True), ("registers", True), ("vit", False)])
def test_the_entropy_is_that_of_the_attention_averaged_over_heads(name, sized):
    where = layout(name)
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    logs = noise(where.total, seed=1).abs().mul(5).ceil().log2() if sized else None
    expected = attention_entropy_reference(query, key, where, 0.3, logs)
    torch.testing.assert_close(entropy(query, key, where, 0.3, logs), expected, rtol=1e-4, atol=1e-5)
    assert (expected <= torch.tensor(float(where.longest)).log2() + 1e-5).all()


@pytest.mark.parametrize("dim, dtype", [(33, torch.float32), (72, torch.float16)])
def test_heads_of_any_width_and_dtype(dim, dtype):
    where = layout("registers")
    query, key, _ = noise(where.total, 3, 1, dim, dtype=dtype).unbind(1)
    expected = attention_entropy_reference(query, key, where, dim**-0.5)
    torch.testing.assert_close(entropy(query, key, where, dim**-0.5), expected, rtol=1e-3, atol=1e-4)


def test_an_image_gets_the_same_bits_alone():
    where = layout("registers")
    query, key, _ = noise(where.total, 3, 2, 32).unbind(1)
    begin, end = where.offsets.tolist()[1:3]
    alone = entropy(query[begin:end], key[begin:end], ragged_layout([end - begin - 5], 5, DEVICE), 0.3)
    assert torch.equal(alone, entropy(query, key, where, 0.3)[begin:end])


def test_a_batch_without_images_has_none():
    nothing = torch.zeros(0, 2, 32, device=DEVICE)
    assert entropy(nothing, nothing, ragged_layout([], 1, DEVICE), 0.3).shape == (0,)
