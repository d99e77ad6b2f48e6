"""Schedules meet their cost, merge no more than they can, and begin the earlier the more is cut."""

import pytest
from hosts.families import build

from adamerge.flops import meter
from adamerge.search.families import first_layer_and_slope, protect, rates
from adamerge.search.schedule import MERGE_ALL, at_every, expected_macs, linear_rates, merged_per_layer, scale_rates


@pytest.fixture(scope="module")
def model():
    return build("vit", patch_size=8, depth=4)


@pytest.mark.parametrize("cut", [0.01, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_schedule_is_scaled_to_its_cost(model, cut, first):
    prices, family = meter(model), protect()
    goal = (1 - cut) * prices.unmerged().true.item()
    for last in (None, MERGE_ALL):
        scaled = scale_rates(linear_rates(4, first, 0.5, last), goal, prices, family, "true")
        assert expected_macs(scaled, prices, family, "true") == pytest.approx(goal, rel=1e-6)
        if cut <= 0.1:
            assert scaled[:first] == (0.0,) * first, "idle layers merge only where the others cannot meet the cost"


def test_layers_are_counted_from_the_first_that_merges_and_the_last_stays():
    assert at_every((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 1) == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert at_every((0.0, 1.0, 2.0, 3.0, 4.0, 5.0), 2) == (0.0, 1.0, 0.0, 3.0, 0.0, 5.0)
    assert at_every((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, MERGE_ALL), 4) == (0.0, 1.0, 0.0, 0.0, 0.0, 5.0, MERGE_ALL)
    assert at_every((0.0, 1.0, 2.0, 3.0), 9) == (0.0, 1.0, 0.0, 3.0)
    assert at_every((0.0, 0.0), 2) == (0.0, 0.0)


def test_a_schedule_merges_at_most_every_second_token():
    assert merged_per_layer((MERGE_ALL, 0.0, MERGE_ALL), 100) == (50.0, 0.0, 25.0)


@pytest.mark.parametrize("depth", [1, 2, 3, 12, 24, 40])
def test_presets_spread_their_merges_over_any_depth(depth):
    for cut in (0.05, 0.2, 0.3, 0.4, 0.5, 0.9):
        for reads in (True, False):
            spread = rates(cut, depth, reads)
            assert len(spread) == depth and min(spread) >= 0 and max(spread) > 0
    firsts = [first_layer_and_slope(cut, depth)[0] for cut in (0.1, 0.2, 0.4, 0.5, 0.6)]
    assert firsts == sorted(firsts, reverse=True), "the more is cut, the earlier merging begins"


def test_the_first_layer_and_the_slope_of_the_preset_with_twelve_layers_are_known():
    found = [first_layer_and_slope(cut, 12) for cut in (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.9)]
    assert found == [(5, 1.0), (5, 1.0), (4, 1.0), (4, 0.0), (3, 0.0), (2, 2.0), (1, 2.0)]
    assert first_layer_and_slope(0.1, 24)[0] == 10 and first_layer_and_slope(0.1, 1)[0] == 0
    assert rates(0.2, 12) == (*(0.0,) * 4, *(pytest.approx(1 + n / 7) for n in range(7)), MERGE_ALL)
    assert rates(0.2, 12, reads_patches=True)[-1] == 2.0
