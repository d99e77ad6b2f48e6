"""The parts of the preset: the share of attention as salience, and a score that multiplies it with the distance."""

from dataclasses import replace

import pytest
import torch
from examples import noise, seeds, seen
from hypothesis import given
from hypothesis import strategies as st

from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence, Heads, Widths
from adamerge.core.match import Alternating, Bipartite, Protect, SimilarityOnly, Tokens
from adamerge.core.parts import from_json, to_json
from adamerge.core.salience import AttentionShare, ClassShare

SHARES = [ClassShare(), AttentionShare()]


def attended(b: int, n: int, seed: int, count: torch.Tensor | None = None, prefix: int = 1) -> Evidence:
    """Evidence after attention, with a class token."""
    query, key, value = (noise(b, prefix + n, 2, 4, seed=seed + i) for i in range(3))
    bias = None
    if count is not None:
        here = torch.arange(n) < count[:, None]
        bias = torch.zeros(b, n, dtype=torch.float64).masked_fill(~here, float("-inf"))
        bias = torch.nn.functional.pad(bias, (prefix, 0))[:, None, None]
    heads = Heads(query, key, value, 0.5, bias)
    return replace(seen(noise(b, n, 8, seed=seed + 3), count=count, prefix=prefix), heads=heads, class_token=True)


@pytest.mark.parametrize("share", SHARES, ids=lambda s: type(s).__name__)
@given(n=st.integers(1, 9), seed=seeds)
def test_shares_average_to_one_in_every_image(share, n, seed):
    s = share(attended(2, n, seed))
    assert (s >= 0).all()
    torch.testing.assert_close(s.mean(1), torch.ones(2, dtype=s.dtype))


@pytest.mark.parametrize("share", SHARES, ids=lambda s: type(s).__name__)
@given(n=st.integers(2, 7), extra=st.integers(1, 4), seed=seeds)
def test_padding_changes_no_share(share, n, extra, seed):
    count = torch.tensor([n, n + extra])
    whole = attended(2, n + extra, seed, count)
    heads = whole.heads
    assert heads is not None
    short = replace(
        seen(whole.raw[:1, :n], prefix=1),
        heads=Heads(heads.query[:1, : n + 1], heads.key[:1, : n + 1], heads.value[:1, : n + 1], 0.5),
        class_token=True,
    )
    s = share(whole)
    torch.testing.assert_close(s[:1, :n], share(short))
    assert s[0, n:].tolist() == [0.0] * extra


def test_a_share_is_attention_over_its_mean():
    evidence = attended(2, 6, 0)
    torch.testing.assert_close(
        ClassShare()(evidence), evidence.class_attention / evidence.class_attention.mean(1, keepdim=True)
    )
    received = evidence.attention.sum(1)[:, 1:]
    torch.testing.assert_close(AttentionShare()(evidence), received / received.mean(1, keepdim=True))


def test_one_row_of_attention_costs_a_row_and_all_of_it_costs_all():
    at, n = Widths(dim=12, heads=3, key_dim=4, prefix=1), torch.tensor([5])
    assert ClassShare().macs(n, at).tolist() == [6 * 12]
    assert AttentionShare().macs(n, at).tolist() == [36 * 12]


@given(seed=seeds, strength=st.floats(0, 3))
def test_protection_never_changes_the_partner(seed, strength):
    """As with every salience of the source alone (D2)."""
    evidence, salience = seen(noise(2, 9, 4, seed=seed)), noise(2, 9, seed=seed + 1).abs()
    plain = Bipartite(Alternating(), Tokens(), SimilarityOnly())(evidence, salience)
    kept = Bipartite(Alternating(), Tokens(), Protect(strength))(evidence, salience)
    assert torch.equal(plain.partner, kept.partner) and torch.equal(plain.source, kept.source)


@given(seed=seeds)
def test_without_strength_the_order_is_that_of_similarity(seed):
    similarity, salience = noise(3, 9, seed=seed).tanh(), noise(3, 9, seed=seed + 1).abs()
    assert torch.equal(Protect(0.0)(similarity, salience).argsort(1), similarity.argsort(1))


@given(similarity=st.floats(-1, 0.99), low=st.floats(0.01, 5), more=st.floats(0.01, 5), strength=st.floats(0.1, 2))
def test_salient_tokens_merge_later_and_similar_ones_sooner(similarity, low, more, strength):
    score = Protect(strength)
    at = torch.tensor([[similarity, similarity]], dtype=torch.float64)
    value = score(at, torch.tensor([[low, low + more]], dtype=torch.float64))
    assert value[0, 0] > value[0, 1]
    nearer = score(at + torch.tensor([[0.0, 0.005]]), torch.full((1, 2), low, dtype=torch.float64))
    assert nearer[0, 1] > nearer[0, 0]


def test_an_unattended_token_merges_first_and_a_duplicate_has_score_zero():
    value = Protect(0.5)(torch.tensor([[0.9, -0.9, 1.0]]), torch.tensor([[1.0, 0.0, 9.0]]))
    assert value[0].tolist() == pytest.approx([-0.1, 0.0, 0.0])


@pytest.mark.parametrize("strength", [-0.1, float("nan"), float("inf"), True, "1", None])
def test_a_strength_must_be_a_number_that_is_not_negative(unchecked, strength):
    with pytest.raises(BadOption, match="strength must be a finite number >= 0; got "):
        Protect(strength)


@pytest.mark.parametrize("part", [Protect(0.3), ClassShare(), AttentionShare()], ids=str)
def test_the_parts_survive_json(part):
    assert from_json(to_json(part)) == part
