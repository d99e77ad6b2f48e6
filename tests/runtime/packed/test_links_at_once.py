"""Images of equal length are compared in one product only where each gets the same bits as alone."""

import torch

from adamerge.runtime.packed import links


def test_products_together_that_differ_from_those_alone_are_not_used(monkeypatch):
    own, calls = torch.bmm, []

    def other_order(a, b):
        calls.append(len(a))
        return own(a, b) * (1 + 2**-20)

    rows = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(0))
    left, right = rows[:, ::2], rows[:, 1::2].mT
    expected = torch.stack([a @ b for a, b in zip(left, right, strict=True)])
    links._same_together.cache_clear()
    monkeypatch.setattr(torch, "bmm", other_order)
    try:
        assert torch.equal(links._products(left, right), expected)
    finally:
        links._same_together.cache_clear()
    # The trial alone.
    assert calls == [4]
