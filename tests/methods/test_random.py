"""Random merging draws once for each layer and length."""

import torch

from adamerge.core.evidence import Evidence
from adamerge.core.match import Links
from adamerge.methods.papers.random import AtRandom


def links(seed: int, n: int = 12) -> Links:
    evidence = Evidence(raw=torch.zeros(2, n, 1), size=torch.ones(2, n), layer=1, depth=3)
    return AtRandom(seed)(evidence, evidence.size)


def test_later_passes_draw_nothing(monkeypatch):
    """A CUDA graph cannot copy draws from the CPU."""
    first, shorter = links(912), links(912, 10)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: (_ for _ in ()).throw(AssertionError("drawn again")))
    again = links(912)
    assert torch.equal(again.partner, first.partner) and torch.equal(again.value, first.value)
    assert torch.equal(links(912, 10).value, shorter.value)


def test_draws_kept_in_inference_mode_serve_training():
    with torch.inference_mode():
        expected = links(913).value.clone()
    weight = torch.ones(12, requires_grad=True)
    (weight * links(913).value).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, expected.sum(0))


def test_the_seed_and_the_length_change_the_draws():
    assert not torch.equal(links(914).value, links(915).value)
    assert not torch.equal(links(914).partner[:, :10], links(914, 10).partner)
