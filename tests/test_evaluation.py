"""The KL divergence of an evaluation is that of the class probabilities."""

import torch
from torch.distributions import Categorical
from torch.distributions import kl_divergence as reference

from adamerge.evaluation import judge, kl_divergence


def logits(seed: int) -> torch.Tensor:
    return torch.randn(7, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_divergence_is_from_the_unmerged_to_the_merged_probabilities():
    full, merged = logits(0), logits(1)
    found = kl_divergence(full.log_softmax(1), merged.log_softmax(1))
    torch.testing.assert_close(found, reference(Categorical(logits=full), Categorical(logits=merged)))
    assert not torch.allclose(found, kl_divergence(merged.log_softmax(1), full.log_softmax(1)))


def test_a_model_that_changes_nothing_diverges_by_exactly_nothing():
    full = logits(0).float()
    *_, agreement, kl = judge(full, full.clone(), full.argmax(1))
    assert agreement.all() and (kl == 0).all()
