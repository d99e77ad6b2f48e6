"""Counts of a batch: images that had different numbers of tokens and now have the same need no padding."""

from dataclasses import replace

import torch

from adamerge.core.plan import Plan
from adamerge.methods import adamerge
from adamerge.runtime import reference


def test_a_batch_that_became_even_has_no_counts_and_no_mask():
    """6 and 5 tokens: the first half of each merges, and 3 are left in both."""
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 4]])
    history = Plan(slots, torch.tensor([6, 5]), 6, ragged=True)
    size = torch.tensor([[1.0] * 6, [1.0, 1.0, 1.0, 1.0, 2.0, 0.0]])
    state = replace(reference.start(x, 0), size=size, history=history, count=torch.tensor([6, 5]))
    assert reference.bias(state, False) is not None
    merged = reference.merge(state, adamerge(r=9), depth=1)
    assert merged.x.shape == (2, 3, 4) and merged.size.sum(1).tolist() == [6.0, 6.0]
    assert reference.bias(merged, False) is None
    evidence = reference.build_evidence(merged, 2)
    assert evidence.valid is None and evidence.counts.tolist() == [3, 3]
    again = reference.merge(merged, adamerge(r=1), depth=2)
    assert again.x.shape == (2, 2, 4), "counts of an earlier layer would hide tokens"
