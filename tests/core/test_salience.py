"""Salience is in [0, 1], does not depend on padding and is the paper's equation."""

from dataclasses import replace

import pytest
import reference
import torch
from examples import AFFINITIES, noise, seeds, seen
from hypothesis import given
from hypothesis import strategies as st

from adamerge.core.errors import BadOption
from adamerge.core.evidence import Heads, Widths
from adamerge.core.salience import Centrality, Sharpness, Uniform, min_max_scale


@pytest.mark.parametrize("affinity", AFFINITIES)
@given(n=st.integers(3, 9), d=st.integers(1, 6), seed=seeds)
def test_centrality_is_the_papers_equation(affinity, n, d, seed):
    x = noise(2, n, d, seed=seed)
    s = Centrality(affinity)(seen(x))
    for image in range(2):
        expected = reference.salience(x[image].tolist(), affinity)
        assert s[image].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("affinity", AFFINITIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@given(n=st.integers(2, 12), scale=st.sampled_from([1e-3, 1.0, 300.0]), seed=seeds)
def test_salience_reaches_from_zero_to_one_in_every_image(affinity, dtype, n, scale, seed):
    """300 squared, 8 channels long, is beyond float16 (D1)."""
    s = Centrality(affinity)(seen(scale * noise(3, n, 8, seed=seed, dtype=dtype)))
    assert s.dtype == torch.promote_types(dtype, torch.float32)
    assert ((s >= 0) & (s <= 1)).all()
    assert (s.amax(1) == 1).all()


@pytest.mark.parametrize("affinity", AFFINITIES)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_tokens_of_a_constant_image_matter_the_same(affinity, padding, dtype):
    """D4: rounding must not be mistaken for a difference, at any number of tokens or channels."""
    for n in (1, 2, 5, 7, 9, 14, 16, 36, 49, 196):
        for d in (1, 3, 16, 48):
            x = noise(1, 1, d, seed=n + d, dtype=dtype).expand(1, n, d)
            x = torch.cat([x, noise(1, padding, d, seed=1, dtype=dtype)], 1)
            s = Centrality(affinity)(seen(x, count=torch.tensor([n]) if padding else None))
            assert s[0, :n].tolist() == [1.0] * n, f"{n} tokens of {d} channels"


def test_two_tokens_of_equal_affinity_matter_the_same():
    """Cosines are symmetric and 1 on the diagonal: two tokens get the same attention from each other (D4)."""
    s = Centrality("cosine")(seen(torch.cat([noise(1, 2, 9, seed=seed) for seed in range(20)])))
    assert s.tolist() == [[1.0, 1.0]] * 20


def test_the_only_token_of_an_image_has_salience_one():
    assert Centrality()(seen(noise(2, 1, 4, seed=0))).tolist() == [[1.0], [1.0]]


def test_without_salience_all_tokens_matter_the_same():
    assert Uniform()(seen(noise(2, 3, 4, seed=0))).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("affinity", AFFINITIES)
@pytest.mark.parametrize("garbage", [0.0, 50.0, float("inf"), float("nan")])
@given(n=st.integers(3, 9), extra=st.integers(1, 5), seed=seeds)
def test_padding_changes_no_salience(affinity, garbage, n, extra, seed):
    x = noise(1, n, 4, seed=seed)
    stranger = noise(1, n + extra, 4, seed=seed + 1)
    padded = torch.cat([torch.cat([x, garbage + noise(1, extra, 4, seed=seed + 2)], 1), stranger])
    s = Centrality(affinity)(seen(padded, count=torch.tensor([n, n + extra])))
    torch.testing.assert_close(s[:1, :n], Centrality(affinity)(seen(x)), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(s[1:], Centrality(affinity)(seen(stranger)), atol=1e-9, rtol=1e-9)
    assert s[0, n:].tolist() == [0.0] * extra


@given(n=st.integers(2, 9), seed=seeds)
def test_the_scaled_affinity_is_the_dot_product_of_shorter_tokens(n, seed):
    x = noise(2, n, 9, seed=seed)
    torch.testing.assert_close(Centrality("scaled")(seen(x)), Centrality("dot")(seen(x / 3**0.5)))


@given(n=st.integers(3, 9), seed=seeds)
def test_the_cosine_affinity_does_not_see_lengths(n, seed):
    x = noise(2, n, 9, seed=seed)
    longer = x * (1 + noise(2, n, 1, seed=seed + 1).abs())
    torch.testing.assert_close(Centrality("cosine")(seen(x)), Centrality("cosine")(seen(longer)))


@given(n=st.integers(2, 9), seed=seeds)
def test_salience_follows_the_tokens_when_they_change_places(n, seed):
    x, turn = noise(2, n, 4, seed=seed), torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(Centrality()(seen(x[:, turn])), Centrality()(seen(x))[:, turn])


def test_min_max_scaling_keeps_the_order_and_gives_padding_zero():
    s = torch.tensor([[3.0, 1.0, 2.0, 99.0]])
    valid = torch.tensor([[True, True, True, False]])
    assert min_max_scale(s, valid).tolist() == [[1.0, 0.0, 0.5, 0.0]]
    assert min_max_scale(s[:, :3]).tolist() == [[1.0, 0.0, 0.5]]


def test_equal_values_are_scaled_to_one_with_a_finite_gradient():
    s = torch.ones(1, 3, requires_grad=True)
    out = min_max_scale(s)
    out.sum().backward()
    assert out.tolist() == [[1.0] * 3]
    assert s.grad is not None and s.grad.isfinite().all()


def test_an_image_with_nan_tokens_changes_no_other_image():
    x = noise(3, 6, 4, seed=0)
    alone = Centrality()(seen(x[[0, 2]]))
    x[1, 2, 1] = float("nan")
    s = Centrality()(seen(x))
    assert s[1].isnan().all()
    torch.testing.assert_close(s[[0, 2]], alone)


@pytest.mark.parametrize("affinity", AFFINITIES)
def test_salience_has_the_gradient_of_its_equation(affinity):
    x = noise(2, 5, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: Centrality(affinity)(seen(a)), (x,))


def attended(query, count=None, bias=None):
    """Tokens with these queries in one head, which are also their keys."""
    heads = Heads(query[:, :, None], query[:, :, None], query[:, :, None], 1.0, bias)
    return replace(seen(query, count=count), heads=heads)


def test_sharpness_has_a_finite_gradient_where_attention_is_zero_and_none_goes_into_the_padding():
    """The derivative of the entropy is infinite there: at padding, and where the softmax underflows."""
    x = noise(2, 9, 3, seed=2).requires_grad_()
    hidden = torch.zeros(2, 1, 1, 9, dtype=x.dtype)
    hidden[0, ..., 7:] = -torch.inf
    hidden[1, ..., 0] = -1e4
    evidence = attended(x, torch.tensor([7, 9]), hidden)
    assert (evidence.attention == 0).any(2).all(), "every token has a weight of 0"
    Sharpness()(evidence)[:, :7].square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert (x.grad[:, :7].abs().sum((1, 2)) > 0).all() and (x.grad[0, 7:] == 0).all()


def test_a_weight_of_zero_adds_nothing_to_the_entropy_and_not_a_number_stays_one():
    x = noise(1, 6, 3, seed=4)
    hidden = torch.zeros(1, 1, 1, 6, dtype=x.dtype)
    hidden[..., 4:] = -torch.inf
    alone = Sharpness()(attended(x[:, :4]))
    assert 0 < (alone > 0).sum() < 4
    torch.testing.assert_close(Sharpness()(attended(x, torch.tensor([4]), hidden))[:, :4], alone)
    x[0, 2, 1] = torch.nan
    assert Sharpness()(attended(x)).isnan().all()


def test_the_affinity_costs_one_product_of_all_pairs_and_uniform_salience_nothing():
    at = Widths(dim=7, heads=2, key_dim=2, prefix=1)
    assert Centrality().macs(torch.tensor([3, 5]), at).tolist() == [63, 175]
    assert Uniform().macs(torch.tensor([3, 5]), at).tolist() == [0, 0]


def test_an_unknown_affinity_is_refused(unchecked):
    with pytest.raises(BadOption, match="affinity must be one of dot, scaled, cosine; got 'l2'"):
        Centrality("l2")  # pyright: ignore[reportArgumentType]
