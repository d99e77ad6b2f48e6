"""How many tokens merge: the paper's formula, its corners, and what is refused."""

import pytest
import reference
import torch
from examples import formula, linked, seen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adamerge.core.budget import Budget, Everything, Fixed, Keep, Threshold, ZScore
from adamerge.core.errors import BadOption, BadStats
from adamerge.core.match import Links
from adamerge.core.stats import LayerStats
from adamerge.methods.papers.pitome import Ratio

finite = st.floats(-3, 3)


def links_of(redundancy: list[float]) -> Links:
    """Links of one source each, so that the redundancy of each image is what is asked for; with tokens to spare."""
    value = torch.zeros(len(redundancy), 512, dtype=torch.float64)
    value[:, 0] = torch.tensor(redundancy, dtype=torch.float64)
    source = torch.zeros(value.shape, dtype=torch.bool)
    source[:, 0] = True
    return Links(value, torch.ones(value.shape).long(), source, 1)


def adaptive(r_max: float, mean: float = 0.0, std: float = 1.0, alpha: float = 1.0, temperature: float = 1.0) -> ZScore:
    return ZScore(r_max, LayerStats((mean,), (std,)), alpha, temperature)


def count(budget: Budget, links: Links, layer: int = 0) -> int | Tensor:
    return budget(links, seen(links.value[..., None], layer=layer))


def merges(budget: Budget, *redundancy: float, layer: int = 0) -> list[int]:
    r = count(budget, links_of(list(redundancy)), layer)
    return [r] * len(redundancy) if isinstance(r, int) else r.tolist()


@given(
    redundancy=st.lists(finite, min_size=1, max_size=4),
    r_max=st.floats(0, 60),
    mean=finite,
    std=st.floats(0.001, 2),
    alpha=finite,
    temperature=st.floats(0.1, 5),
)
def test_the_count_is_the_papers_formula(redundancy, r_max, mean, std, alpha, temperature):
    expected = [reference.number(s, r_max, mean, std, alpha, temperature) for s in redundancy]
    assert merges(adaptive(r_max, mean, std, alpha, temperature), *redundancy) == expected


def test_the_count_in_numbers():
    """sigmoid(0) = 1/2, sigmoid(1) = 0.731, sigmoid(-1) = 0.269."""
    assert merges(adaptive(10.0, 0.25, 0.125), 0.25, 0.375, 0.125, 0.75, -5.0) == [5, 7, 2, 9, 0]


def test_alpha_steepens_and_temperature_flattens():
    assert merges(adaptive(100.0), 1.0) == [73]
    assert merges(adaptive(100.0, alpha=2.0), 1.0) == [88]
    assert merges(adaptive(100.0, temperature=2.0), 1.0) == [62]
    assert merges(adaptive(100.0, alpha=2.0, temperature=2.0), 1.0) == [73]
    assert merges(adaptive(100.0, alpha=-1.0), 1.0) == [26]


def test_r_max_may_be_a_real_number():
    """D16: half of 9.9 is 4, half of 10.1 is 5."""
    assert merges(adaptive(9.9), 0.0) == [4]
    assert merges(adaptive(10.1), 0.0) == [5]


@pytest.mark.parametrize("r_max", [0.0, 0.5, 0.999])
def test_an_r_max_below_one_never_merges_and_never_asks_the_device(r_max):
    assert count(adaptive(r_max), links_of([100.0, 0.0])) == 0


def test_a_layer_where_all_images_agreed_decides_by_sign():
    """D9: std 0 counts as tiny."""
    assert merges(adaptive(10.0, 0.3, 0.0), 0.31, 0.29) == [10, 0]
    assert merges(adaptive(10.0, 0.25, 0.0), 0.25) == [5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_image_that_is_not_finite_merges_nothing(value):
    """D9."""
    assert merges(adaptive(10.0), value, 0.0) == [0, 5]


def test_an_enormous_r_max_merges_all_there_is():
    """A number beyond 64 bits must not wrap around to a negative count (D9)."""
    assert merges(adaptive(1e300), 0.0)[0] >= 1


def test_an_enormous_fixed_number_is_cut_to_one_that_every_device_can_hold():
    assert Fixed(1e30).at(0) == Fixed((1e30, 1.0)).at(0) == 2**31


def test_each_layer_is_compared_with_its_own_statistics():
    budget = ZScore(100.0, LayerStats((0.0, 1.0), (1.0, 0.5)))
    assert [merges(budget, 1.0, layer=layer) for layer in (0, 1)] == [[73], [50]]


def test_each_layer_may_have_an_r_max_of_its_own():
    budget = ZScore((100.0, 0.0, 20.0), LayerStats((0.0,) * 3, (1.0,) * 3))
    assert [merges(budget, 0.0, layer=layer) for layer in range(3)] == [[50], [0], [10]]
    assert [budget.may_merge(layer, 3) for layer in range(3)] == [True, False, True]


@pytest.mark.parametrize(("r_max", "ragged"), [((0.0, 0.9), False), ((0.0, 1.0), True), ((), False)])
def test_counts_differ_where_any_layer_may_merge(r_max, ragged):
    """Below 1 the floor leaves nothing."""
    assert ZScore(r_max).ragged is ragged


def test_an_r_max_for_each_layer_of_another_model_is_refused():
    budget = ZScore((4.0, 4.0), LayerStats((0.0,) * 3, (1.0,) * 3))
    with pytest.raises(BadOption, match="r_max gives a number for each of 2 layers but layer 2 was asked for; was"):
        merges(budget, 0.0, layer=2)


def test_the_count_carries_no_gradient():
    links = linked(formula(2).requires_grad_())
    r = count(adaptive(8.0, 0.2, 0.1), links)
    assert isinstance(r, torch.Tensor) and not r.requires_grad and r.dtype == torch.long


def test_a_fixed_budget_is_the_same_number_everywhere():
    assert [count(Fixed(4), links_of([0.1, 0.9]), layer) for layer in (0, 7)] == [4, 4]


def test_a_fraction_is_spread_over_the_layers_so_that_the_sum_is_met():
    assert [count(Fixed(2.5), links_of([0.1]), layer) for layer in range(4)] == [2, 3, 2, 3]
    assert sum(int(count(Fixed(1.3), links_of([0.1]), layer)) for layer in range(10)) == 13


def test_a_delayed_budget_leaves_the_first_layers_alone():
    assert [count(Fixed(2.5, delay=2), links_of([0.1]), layer) for layer in range(5)] == [0, 0, 2, 3, 2]


@given(r=st.lists(st.floats(0, 20), min_size=1, max_size=12))
def test_a_fixed_schedule_meets_its_sum_and_rests_where_its_number_is_zero(r):
    budget = Fixed(tuple(r))
    merged = [int(count(budget, links_of([0.1]), layer)) for layer in range(len(r))]
    assert abs(sum(merged) - sum(r)) <= 1
    assert all(m == 0 for m, wanted in zip(merged, r, strict=True) if wanted == 0)
    assert all(abs(m - wanted) <= 1 for m, wanted in zip(merged, r, strict=True))
    assert [budget.may_merge(layer, len(r)) for layer in range(len(r))] == [m > 0 for m in merged]


@pytest.mark.parametrize("r", [True, "3", None, float("nan"), float("inf")])
def test_a_fixed_number_must_be_a_finite_number(unchecked, r):
    with pytest.raises(BadOption, match=f"r must be a finite number; got {r!r}"):
        Fixed(r)


def test_a_fixed_number_must_not_be_negative():
    with pytest.raises(BadOption, match="r must be >= 0; got -1"):
        Fixed(-1)


@pytest.mark.parametrize("delay", [-1, True, 1.5])
def test_a_delay_must_be_a_whole_number_of_layers(unchecked, delay):
    with pytest.raises(BadOption, match=f"delay is a number of layers and must be a whole number >= 0; got {delay!r}"):
        Fixed(3, delay)


@pytest.mark.parametrize("name", ["r_max", "alpha", "temperature"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "3", None])
def test_the_numbers_of_an_adaptive_budget_must_be_finite(unchecked, name, value):
    with pytest.raises(BadOption, match=f"{name} must be a finite number; got {value!r}"):
        ZScore(**{"r_max": 9.0, name: value})


def test_a_negative_r_max_is_refused():
    with pytest.raises(BadOption, match=r"r_max must be >= 0; got -1\.0"):
        ZScore(-1.0)
    with pytest.raises(BadOption, match=r"r_max must be >= 0; got -2\.0"):
        ZScore((4.0, -2.0))


@pytest.mark.parametrize("temperature", [0.0, -2.0])
def test_a_temperature_must_be_positive(temperature):
    with pytest.raises(BadOption, match=f"temperature divides the z-score and must be > 0; got {temperature}"):
        ZScore(9.0, temperature=temperature)


def test_a_recipe_without_statistics_says_how_to_make_them():
    with pytest.raises(BadStats, match=r"adapts to calibrated statistics and has none; .*adamerge.calibrate\(model, "):
        count(ZScore(9.0), links_of([0.1]))


def test_statistics_of_a_shallower_model_are_refused():
    with pytest.raises(
        BadStats, match="stats cover 1 layers but layer 7 was asked for; were they calibrated on another"
    ):
        count(adaptive(9.0), links_of([0.1]), 7)


@given(low=finite, high=finite)
def test_a_more_redundant_image_never_merges_less(low, high):
    few, many = merges(adaptive(23.0, 0.1, 0.7), min(low, high), max(low, high))
    assert 0 <= few <= many <= 23


def thresholds(*rows: list[float]) -> Links:
    """Links of these values, all of them sources."""
    value = torch.tensor(rows, dtype=torch.float64)
    return Links(value, torch.zeros(value.shape).long(), torch.ones(value.shape, dtype=torch.bool), value.shape[1])


@given(
    values=st.lists(
        st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=6, max_size=6, unique=True), min_size=1, max_size=3
    ),
    wanted=st.tuples(st.floats(0, 6), st.floats(0, 6)),
)
def test_as_many_links_pass_a_layers_threshold_as_were_wanted_for_it(values, wanted):
    links = thresholds(*values)
    budget = Threshold(wanted)
    found = [budget.threshold([links], layer) for layer in (0, 1)]
    budget = budget.with_stats(LayerStats((0.0, 0.0), (1.0, 1.0), tuple(found)))
    for layer in (0, 1):
        total = int(torch.as_tensor(count(budget, links, layer)).sum())
        flat = sorted((v for row in values for v in row), reverse=True)
        rank = min(round(wanted[layer] * len(values)), len(flat))
        # Equal values in two images stand on one side of a threshold together.
        assert total == rank or flat[max(rank - 1, 0)] == flat[min(rank, len(flat) - 1)]


def test_one_number_for_all_layers_is_that_number_for_each():
    links = thresholds([0.1, 0.5, 0.3], [0.2, 0.9, 0.4])
    assert Threshold(1.5).threshold([links], 1) == Threshold((9.0, 1.5)).threshold([links], 1)
    assert Threshold(1.5).ragged and Threshold((0.0, 1.0)).ragged and not Threshold((0.0, 0.0)).ragged


def test_a_layer_that_should_merge_nothing_never_asks_the_device():
    budget = Threshold((0.0, 2.0), LayerStats((0.0, 0.0), (1.0, 1.0), (-5.0, -5.0)))
    links = thresholds([0.1, 0.5])
    assert count(budget, links, 0) == 0
    assert torch.as_tensor(count(budget, links, 1)).tolist() == [2]


def test_a_schedule_for_another_depth_is_refused():
    with pytest.raises(BadOption, match="r gives a number for each of 2 layers but layer 2 was asked for; was it "):
        Threshold((1.0, 2.0)).wanted(2)


def test_every_number_of_a_schedule_is_checked():
    with pytest.raises(BadOption, match=r"r must be >= 0; got -1\.0"):
        Threshold((1.0, -1.0))


# --- what every count rule says before any token is read -------------------------------------------------------------


@pytest.mark.parametrize(
    "zero",
    [
        Fixed(0),
        Fixed((0.0,) * 4),
        Fixed(3, delay=4),
        Fixed(0.2),
        ZScore(0.0),
        ZScore(0.9),
        ZScore((0.0,) * 4),
        Threshold(0.0),
        Threshold((0.0,) * 4),
        Keep(1.0),
        Ratio(1.0),
    ],
    ids=repr,
)
def test_a_rule_that_merges_nothing_says_so_however_it_is_written(zero):
    assert isinstance(zero, Budget) and not zero.ragged
    assert not any(zero.may_merge(layer, 4) for layer in range(4))
    assert [zero.fixed_count(layer, 4, 16) for layer in range(4)] == [0] * 4


@pytest.mark.parametrize(
    "rule", [Fixed(0.5), Fixed((0.0, 2.5, 1.0, 0.4)), Fixed(2, delay=1), Keep(0.5), Ratio(0.75)], ids=repr
)
def test_a_fixed_count_is_the_number_that_the_rule_gives(rule):
    links = thresholds([0.1] * 16)
    for layer in range(4):
        fixed = rule.fixed_count(layer, 4, 16)
        assert rule(links, seen(links.value[..., None], layer=layer, depth=4)) == fixed
        assert rule.may_merge(layer, 4) == (fixed > 0)


@pytest.mark.parametrize(
    "rule", [ZScore(1.0), ZScore((0.0, 4.0, 0.0, 1.0)), Threshold((0.0, 0.1, 0.0, 3.0)), Everything()], ids=repr
)
def test_a_count_that_depends_on_the_image_is_no_fixed_count(rule):
    assert rule.ragged
    for layer in range(4):
        assert rule.fixed_count(layer, 4, 16) == (None if rule.may_merge(layer, 4) else 0)
    assert rule.may_merge(1, 4) and rule.may_merge(3, 4)


def test_a_threshold_counts_finite_links_of_sources_only():
    value, source = torch.tensor([[0.9, 0.8, float("nan"), 0.1]]), torch.tensor([[True, False, True, True]])
    links = Links(value, torch.zeros(1, 4, dtype=torch.long), source, None)
    assert Threshold(1.0).threshold([links]) == pytest.approx(0.5)
