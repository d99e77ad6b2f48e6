"""The strongest links merge, never more than an image has; ties and orders are deterministic."""

import pytest
import torch
from examples import DIRECTIONS, SPLITS, formula, linked, noise, seeds
from hypothesis import given
from hypothesis import strategies as st

from adamerge.core.match import Links
from adamerge.core.plan import fold
from adamerge.core.select import select


def some_links(value: list[float], partner: list[int], source: list[bool]) -> Links:
    return Links(torch.tensor([value]), torch.tensor([partner]), torch.tensor([source]), sum(source))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("order", ["kept", "sources_first"])
@given(n=st.integers(1, 12), r=st.integers(0, 15), seed=seeds)
def test_every_slot_up_to_the_count_is_taken_and_r_tokens_are_gone(split, order, n, r, seed):
    links = linked(noise(2, n, 3, seed=seed), split)
    plan = select(links, r, None, order)
    assert links.most is not None
    gone = min(r, links.most)
    assert plan.width == n - gone and plan.count.tolist() == [n - gone] * 2 and not plan.ragged
    for row in plan.slot.tolist():
        assert sorted(set(row)) == list(range(n - gone))


@pytest.mark.parametrize("split", SPLITS)
@given(n=st.integers(1, 12), r=st.lists(st.integers(0, 15), min_size=3, max_size=3), seed=seeds)
def test_each_image_merges_its_own_number(split, n, r, seed):
    links = linked(noise(3, n, 3, seed=seed), split)
    plan = select(links, torch.tensor(r))
    assert links.most is not None
    gone = [min(k, links.most) for k in r]
    assert plan.count.tolist() == [n - k for k in gone]
    assert plan.width == n - min(gone) and plan.ragged == (len(set(gone)) > 1)
    for row, count in zip(plan.slot.tolist(), plan.count.tolist(), strict=True):
        assert sorted(set(row)) == list(range(count))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("order", ["kept", "sources_first"])
@given(n=st.integers(1, 12), r=st.integers(0, 15), seed=seeds)
def test_a_number_for_all_and_the_same_number_for_each_agree(split, direction, order, n, r, seed):
    links = linked(noise(2, n, 3, seed=seed), split, direction)
    static, each = select(links, r, None, order), select(links, torch.tensor([r, r]), None, order)
    assert torch.equal(static.slot, each.slot)
    assert torch.equal(static.count, each.count) and static.width == each.width and static.ragged == each.ragged


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("order", ["kept", "sources_first"])
@given(counts=st.lists(st.integers(1, 10), min_size=2, max_size=3), r=st.integers(0, 8), seed=seeds)
def test_an_image_gets_the_same_plan_alone_and_padded_in_a_batch(split, order, counts, r, seed):
    n = max(counts)
    images = [noise(1, c, 3, seed=seed + k) for k, c in enumerate(counts)]
    singles = [linked(x, split) for x in images]
    wide = Links(
        torch.cat([torch.nn.functional.pad(s.value, (0, n - s.value.shape[1]), value=99.0) for s in singles]),
        torch.cat([torch.nn.functional.pad(s.partner, (0, n - s.value.shape[1])) for s in singles]),
        torch.cat([torch.nn.functional.pad(s.source, (0, n - s.value.shape[1])) for s in singles]),
        n // 2,
        torch.cat([s.room for s in singles if s.room is not None]),
    )
    valid = torch.arange(n) < torch.tensor(counts)[:, None]
    for number in (r, torch.full((len(counts),), r)):
        together = select(wide, number, valid, order)
        for image, (single, count) in enumerate(zip(singles, counts, strict=True)):
            alone = select(single, r, None, order)
            assert together.slot[image].tolist() == alone.slot[0].tolist() + [-1] * (n - count)
            assert together.count[image] == alone.count[0]
        assert together.width == together.count.max()
        assert together.ragged == (len(set(together.count.tolist())) > 1)


@pytest.mark.parametrize("order", ["kept", "sources_first"])
@pytest.mark.parametrize("zeros", [0, torch.tensor([0])], ids=["for all", "for each"])
def test_a_plan_that_is_identity_keeps_every_token_in_place(order, zeros):
    plan = select(linked(formula(1), "alternating"), zeros, None, order)
    assert plan.is_identity
    assert plan.slot.tolist() == [list(range(9))]


@pytest.mark.parametrize("order", ["kept", "sources_first"])
def test_an_image_that_merges_nothing_keeps_its_order_alone_and_in_a_batch(order):
    """D14: the next split is taken in this order."""
    links = linked(formula(2), "alternating")
    alone = select(linked(formula(2)[:1], "alternating"), torch.tensor([0]), None, order)
    x = formula(2)
    among = select(links, torch.tensor([0, 3]), None, order)
    lone = x[:1] if alone.is_identity else fold(x[:1], alone, torch.ones(1, 9, dtype=x.dtype))
    assert torch.equal(fold(x, among, torch.ones(2, 9, dtype=x.dtype))[:1], lone)


def test_the_strongest_links_merge_first_and_other_tokens_keep_their_order():
    """D8."""
    links = some_links([0.1, 0.9, 0.5, 0, 0, 0], [3, 5, 3, 3, 4, 5], [True, True, True, False, False, False])
    assert select(links, 1).slot.tolist() == [[0, 4, 1, 2, 3, 4]]
    assert select(links, 2).slot.tolist() == [[0, 3, 1, 1, 2, 3]]
    assert select(links, 3).slot.tolist() == [[0, 2, 0, 0, 1, 2]]


def test_the_order_of_tome_puts_unmerged_sources_first():
    links = some_links(
        [0, 0.1, 0, 0.9, 0, 0.5, 0], [0, 2, 2, 4, 4, 0, 6], [False, True, False, True, False, True, False]
    )
    assert select(links, 1, None, "sources_first").slot.tolist() == [[2, 0, 3, 4, 4, 1, 5]]
    assert select(links, 2, None, "sources_first").slot.tolist() == [[1, 0, 2, 3, 3, 1, 4]]


def test_ties_go_to_the_lower_index():
    """D10; 40 equal values, because short sorts are stable by chance."""
    n = 80
    source = [i < 40 for i in range(n)]
    links = some_links([0.5 if s else 0.0 for s in source], [79] * n, source)
    merged = [i for i, slot in enumerate(select(links, 7).slot[0].tolist()) if slot == n - 7 - 1]
    assert merged == [*range(7), 79]
    each = select(links, torch.tensor([7]))
    assert torch.equal(each.slot, select(links, 7).slot)


def test_negative_links_merge_when_there_are_no_better_ones():
    links = some_links([-0.9, -0.2, 0.0, 0.0], [2, 3, 2, 3], [True, True, False, False])
    assert select(links, 1).slot.tolist() == [[0, 2, 1, 2]]
    assert select(links, 5).slot.tolist() == [[0, 1, 0, 1]]


def test_a_source_of_value_minus_infinity_still_ranks_before_every_other_token():
    links = some_links([float("-inf"), 0.0], [1, 1], [True, False])
    assert select(links, 1).slot.tolist() == [[0, 0]]


@pytest.mark.parametrize("order", ["kept", "sources_first"])
def test_values_that_are_not_numbers_still_make_a_plan(order):
    links = some_links([float("nan"), float("nan"), 0.0, 0.0], [2, 2, 2, 3], [True, True, False, False])
    plan = select(links, 1, None, order)
    assert sorted(set(plan.slot[0].tolist())) == [0, 1, 2]


def test_a_negative_number_merges_nothing():
    assert select(linked(formula(1)), -3).is_identity


def test_choosing_carries_no_gradient_and_leaves_the_links_as_they_are():
    links = linked(formula(1).requires_grad_())
    before = links.value.detach().clone()
    plan = select(links, 2)
    assert not plan.slot.requires_grad
    assert torch.equal(links.value, before)


def test_an_empty_batch_gives_an_empty_plan():
    links = linked(noise(0, 6, 3, seed=0))
    assert select(links, 2).slot.shape == (0, 6)
    assert select(links, torch.zeros(0, dtype=torch.long)).slot.shape == (0, 6)


@pytest.mark.parametrize("r", [0, 2], ids=["keeps all", "merges"])
def test_a_plan_is_on_the_device_of_its_links(r):
    plan = select(linked(noise(2, 6, 3, seed=0).to("meta")), r)
    assert plan.slot.device.type == plan.count.device.type == "meta"
