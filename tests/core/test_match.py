"""Every source is linked to the most similar target, whatever else is in the batch."""

from dataclasses import replace

import pytest
import reference
import torch
from examples import AFFINITIES, DIRECTIONS, SPLITS, formula, linked, noise, seeds, seen
from hypothesis import given
from hypothesis import strategies as st

from adamerge.core.errors import BadOption
from adamerge.core.evidence import Heads, Widths
from adamerge.core.match import (
    Alternating,
    Bipartite,
    Keys,
    Links,
    SalientFirst,
    SalientLast,
    Sequential,
    SimilarityOnly,
    Tokens,
)
from adamerge.core.salience import Centrality


def sides_of(split, n: int, prefix: int = 0) -> tuple[list[int], list[int]]:
    sides = split(seen(torch.zeros(1, n, 2), prefix=prefix))
    return sides.source[sides.source_valid].tolist(), sides.target[sides.target_valid].tolist()


def test_the_published_split_is_the_first_half_and_the_rest():
    assert sides_of(Sequential(), 6) == ([0, 1, 2], [3, 4, 5])
    assert sides_of(Sequential(), 7) == ([0, 1, 2], [3, 4, 5, 6])
    assert sides_of(Sequential(), 1) == ([], [0])


def test_the_alternating_split_starts_with_a_source():
    assert sides_of(Alternating(), 6) == ([0, 2, 4], [1, 3, 5])
    assert sides_of(Alternating(), 7) == ([0, 2, 4, 6], [1, 3, 5])
    assert sides_of(Alternating(), 1)[0] == []


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
def test_the_split_of_tome_counts_the_prefix_tokens(prefix):
    """Token 0, prefix included, is even; even tokens are sources."""
    sources, targets = sides_of(Alternating(from_prefix=True), 7, prefix)
    assert sources == [i for i in range(7) if (i + prefix) % 2 == 0]
    assert targets == [i for i in range(7) if (i + prefix) % 2 == 1]


@pytest.mark.parametrize("split", [Sequential(), Alternating(), Alternating(from_prefix=True)], ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 2])
@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_every_token_of_an_image_is_on_exactly_one_side(split, prefix, counts):
    n = max(counts)
    sides = split(seen(torch.zeros(len(counts), n, 2), count=torch.tensor(counts), prefix=prefix))
    for image, count in enumerate(counts):
        sources = sides.source[image][sides.source_valid[image]].tolist()
        targets = sides.target[image][sides.target_valid[image]].tolist()
        alone = sides_of(split, count, prefix)
        assert (sources, targets) == alone
        if count > 1:
            assert sorted(sources + targets) == list(range(count))
            assert sources and targets


@pytest.mark.parametrize("split", [Sequential(), Alternating(), Alternating(from_prefix=True)], ids=str)
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_cost_of_matching_is_the_number_of_pairs_compared(split, prefix, n):
    sources, targets = sides_of(split, n, prefix)
    assert split.pairs(torch.tensor(n)).item() == len(sources) * len(targets)
    at = Widths(dim=10, heads=2, key_dim=3, prefix=prefix)
    for metric, width in ((Tokens(), 10), (Keys(), 3)):
        macs = Bipartite(split, metric, SimilarityOnly()).macs(torch.tensor(n), at)
        assert macs.item() == width * len(sources) * len(targets)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@given(n=st.integers(3, 10), d=st.integers(2, 6), seed=seeds)
def test_links_are_the_papers_equation(split, direction, n, d, seed):
    x = noise(2, n, d, seed=seed)
    links = linked(x, split, direction)
    for image in range(2):
        tokens = x[image].tolist()
        partner, score = reference.links(tokens, reference.salience(tokens, "dot"), split, direction)
        assert links.source[image].nonzero().flatten().tolist() == sorted(partner)
        assert {i: int(links.partner[image, i]) for i in partner} == partner
        assert [float(links.value[image, i]) for i in partner] == pytest.approx(list(score.values()), abs=1e-6)
        assert links.redundancy[image].item() == pytest.approx(sum(score.values()) / len(score), abs=1e-6)
    assert links.most == len(partner)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@given(n=st.integers(2, 12), seed=seeds)
def test_salience_never_changes_the_partner(split, direction, n, seed):
    """D2: it scales a whole row."""
    x = noise(2, n, 4, seed=seed)
    matching = Bipartite(SPLITS[split], Tokens(), DIRECTIONS[direction])
    plain = matching(seen(x), torch.ones(2, n, dtype=torch.float64))
    weighed = matching(seen(x), noise(2, n, seed=seed + 1).sigmoid())
    assert torch.equal(plain.partner, weighed.partner)
    assert torch.equal(plain.source, weighed.source)


def test_the_three_directions_scale_the_similarity_by_their_formulas():
    similarity, salience = torch.tensor([[0.5, -0.5, 1.0]]), torch.tensor([[0.0, 0.25, 1.0]])
    assert SalientFirst()(similarity, salience).tolist() == [[0.0, -0.125, 1.0]]
    assert SalientLast()(similarity, salience).tolist() == [[0.5, -0.375, 0.0]]
    assert SimilarityOnly()(similarity, salience).tolist() == [[0.5, -0.5, 1.0]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("affinity", AFFINITIES)
@pytest.mark.parametrize("garbage", [40.0, float("nan")])
@given(n=st.integers(3, 9), extra=st.integers(1, 5), seed=seeds)
def test_padding_changes_no_link(split, direction, affinity, garbage, n, extra, seed):
    x, stranger = noise(1, n, 4, seed=seed), noise(1, n + extra, 4, seed=seed + 1)
    padded = torch.cat([torch.cat([x, garbage + noise(1, extra, 4, seed=seed + 2)], 1), stranger])
    evidence = seen(padded, count=torch.tensor([n, n + extra]))
    matching, salience = Bipartite(SPLITS[split], Tokens(), DIRECTIONS[direction]), Centrality(affinity)
    links = matching(evidence, salience(evidence))
    for image, alone in enumerate((x, stranger)):
        own = matching(seen(alone), salience(seen(alone)))
        length = alone.shape[1]
        assert torch.equal(links.source[image, :length], own.source[0])
        assert not links.source[image, length:].any()
        sources = own.source[0]
        assert torch.equal(links.partner[image, :length][sources], own.partner[0][sources])
        torch.testing.assert_close(links.value[image, :length][sources], own.value[0][sources], atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(links.redundancy[image], own.redundancy[0], atol=1e-9, rtol=1e-9)


def test_redundancy_is_the_mean_over_the_sources_alone():
    links = Links(
        torch.tensor([[0.5, 9.0, 0.25, -9.0]]), torch.zeros(1, 4).long(), torch.tensor([[True, False, True, False]]), 2
    )
    assert links.redundancy.item() == 0.375


def test_an_image_without_sources_has_redundancy_zero():
    links = Links(torch.tensor([[7.0]]), torch.zeros(1, 1).long(), torch.tensor([[False]]), 0)
    assert links.redundancy.item() == 0.0


def test_equally_similar_partners_go_to_the_lower_position():
    """D10.  Unit vectors, so that ties are exact."""
    e = torch.eye(3, dtype=torch.float64)
    x = torch.stack([e[0], e[1], e[2], e[0], e[1], e[0], e[1], e[2]])[None]
    links = linked(x, "sequential", "off")
    assert links.partner[0, :4].tolist() == [5, 4, 7, 5]
    orthogonal = torch.stack([e[0], e[0], e[1], e[2]])[None]
    assert linked(orthogonal, "sequential", "off").partner[0, :2].tolist() == [2, 2]


def test_a_token_of_zeros_has_similarity_zero_to_all_tokens():
    x = formula(1)
    x[0, 0] = 0
    links = linked(x, "sequential", "off")
    assert links.value[0, 0] == 0 and links.partner[0, 0] == 4
    assert links.value.isfinite().all()


def test_the_only_token_of_an_image_is_no_source():
    for split in SPLITS:
        links = linked(noise(2, 1, 3, seed=0), split)
        assert not links.source.any() and links.most == 0


def test_keys_are_compared_after_averaging_over_heads_and_without_the_prefix():
    key = noise(2, 1 + 6, 3, 4, seed=0)
    heads = Heads(noise(2, 7, 3, 4, seed=1), key, noise(2, 7, 3, 4, seed=2), 0.5)
    evidence = seen(noise(2, 6, 12, seed=3), prefix=1)
    evidence = type(evidence)(**{**vars(evidence), "heads": heads})
    torch.testing.assert_close(Keys()(evidence), sum(key[:, 1:, h] for h in range(3)) / 3)
    by_keys = Bipartite(Sequential(), Keys(), SimilarityOnly())(evidence, torch.ones(2, 6, dtype=torch.float64))
    assert torch.equal(by_keys.partner, linked(key[:, 1:].mean(2), direction="off").partner)


def test_keys_before_attention_are_refused():
    with pytest.raises(
        BadOption,
        match="a part of this recipe reads attention keys, which do not exist before the block; "
        "use site='after_attention', or a part that reads the tokens",
    ):
        Keys()(seen(noise(1, 4, 3, seed=0)))


def test_half_precision_tokens_are_compared_in_float32():
    """D1: 300 squared times 8 channels overflows float16."""
    x = (300 * noise(1, 8, 8, seed=0)).half()
    links = linked(x, "sequential", "off")
    assert links.value.dtype == torch.float32 and links.value.isfinite().all()
    assert torch.equal(links.partner, linked(x.double(), "sequential", "off").partner)


@pytest.mark.parametrize("split", SPLITS)
def test_links_are_on_the_device_of_the_tokens(split):
    links = linked(noise(2, 6, 3, seed=0).to("meta"), split)
    assert {part.device.type for part in (links.value, links.partner, links.source)} == {"meta"}


def test_attention_values_are_those_of_the_tokens_after_the_prefix_heads_concatenated():
    value = noise(2, 1 + 6, 3, 4, seed=0)
    evidence = seen(noise(2, 6, 12, seed=1), prefix=1)
    with pytest.raises(BadOption, match="reads attention values, which do not exist before the block; "):
        evidence.values  # noqa: B018
    found = replace(evidence, heads=Heads(value, value, value, 0.5)).values
    assert torch.equal(found, torch.cat([value[:, 1:, head] for head in range(3)], -1))
