"""ATS samples the tokens that even steps over the cumulative scores hit."""

import pytest
import torch

import adamerge
from adamerge.core.errors import BadOption
from adamerge.core.evidence import Evidence, Heads
from adamerge.methods.papers.ats import Sampled


def expected(score: list[float], points: int) -> set[int]:
    """The tokens that the points hit, one point after the other."""
    hit, total = set(), sum(score)
    for number in range(points):
        at, token, reached = (number + 0.5) / points, 0, score[0] / total
        while reached < at and token + 1 < len(score):
            token += 1
            reached += score[token] / total
        hit.add(token)
    return hit


@pytest.mark.parametrize("points", [1, 5, 40, 1000, 2**16, 2**16 + 1, 70_001])
def test_the_tokens_that_points_hit_are_kept(points):
    generator = torch.Generator().manual_seed(0)
    # Scores of very different sizes: a few tokens are so small that no point hits them.
    salience = torch.rand(2, 12, generator=generator, dtype=torch.float64) ** 20
    heads = torch.ones(2, 12, 1, 1, dtype=torch.float64)
    evidence = Evidence(
        raw=torch.zeros(2, 12, 1), size=torch.ones(2, 12), layer=0, depth=1, heads=Heads(heads, heads, heads, 1.0)
    )
    links = Sampled(points, first=0)(evidence, salience)
    for image in range(2):
        kept = {token for token in range(12) if not links.source[image, token]}
        assert kept == expected(salience[image].tolist(), points)
        assert len(kept) < 12, "some tokens are not hit"


def test_a_milliard_points_are_not_listed():
    salience = torch.rand(1, 16, generator=torch.Generator().manual_seed(0))
    heads = torch.ones(1, 16, 1, 1)
    evidence = Evidence(
        raw=torch.zeros(1, 16, 1), size=torch.ones(1, 16), layer=0, depth=1, heads=Heads(heads, heads, heads, 1.0)
    )
    links = Sampled(10**9, first=0)(evidence, salience)
    assert not links.source.any(), "every token is hit"
    assert adamerge.methods.ats(10**9).links == Sampled(10**9)


def test_more_points_than_any_image_has_tokens_are_refused():
    with pytest.raises(BadOption, match=r"^points must be <= 2147483648; got 2147483649$"):
        Sampled(2**31 + 1)
    with pytest.raises(BadOption, match=r"^tokens must be <= 2147483648; got 2147483649$"):
        adamerge.methods.ats(2**31 + 1)
