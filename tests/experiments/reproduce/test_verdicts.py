"""Verdicts on claims: an interval decides only if it lies on one side of the bound."""

import pytest
import torch
from tiny_experiment import interval, outcome

from adamerge.core.stats import LayerStats
from adamerge.experiments.reproduce import table1, table2
from adamerge.experiments.reproduce.claims import (
    above,
    at_least,
    below,
    differences,
    every,
    fact,
    judge_all,
    spell,
    within,
)
from adamerge.experiments.reproduce.refinement import drops, pass_claims, subset_claims

IMAGES = 400


def share(right: int) -> torch.Tensor:
    """Answers of which the first `right` are right."""
    return torch.arange(IMAGES) < right


@pytest.mark.parametrize(
    ("low", "high", "least", "greater", "less"),
    [
        (0.5, 1.0, "holds", "holds", "does not hold"),
        (-0.5, 1.0, "cannot tell", "cannot tell", "cannot tell"),
        (-1.0, -0.5, "does not hold", "does not hold", "holds"),
        (0.0, 0.0, "holds", "cannot tell", "cannot tell"),
        (0.0, 1.0, "holds", "cannot tell", "cannot tell"),
        (-1.0, 0.0, "cannot tell", "cannot tell", "cannot tell"),
    ],
)
def test_an_interval_decides_only_when_it_lies_on_one_side(low, high, least, greater, less):
    found = interval(low, high)
    assert (at_least(found), above(found), below(found)) == (least, greater, less)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.05, 0.05, "holds"),
        (-0.05, 0.5, "cannot tell"),
        (0.2, 0.5, "does not hold"),
        (-0.5, -0.2, "does not hold"),
    ],
)
def test_a_change_is_small_when_all_of_its_interval_is(low, high, verdict):
    assert within(interval(low, high), 0.09) == verdict


def test_one_failure_spoils_a_statement_about_all_and_one_open_case_leaves_it_open():
    assert every(["holds", "holds"]) == "holds"
    assert every(["holds", "cannot tell"]) == "cannot tell"
    assert every(["cannot tell", "does not hold", "holds"]) == "does not hold"
    assert every(["holds", "not applicable"]) == "holds"
    assert every(["not applicable"]) == every([]) == "not applicable"
    assert (fact(True), fact(False)) == ("holds", "does not hold")


def test_the_figure_that_decided_is_named():
    found = [interval(0.5, 1.0), interval(-2.0, -1.0), interval(-9.0, 1.0)]
    claim = judge_all("at every tier", "+1", found, ["first", "second", "third"], at_least)
    assert claim.verdict == "does not hold"
    assert claim.decisive == "-1.50 [-2.00, -1.00] second"
    assert spell(interval(-0.5, 1.5)) == "+0.50 [-0.50, +1.50]"


def test_a_verdict_that_cannot_be_given_names_the_sample_size():
    claim = judge_all("x", "y", [interval(-1, 1)], ["here"], at_least)
    assert claim.verdict_text == "cannot tell at this sample size"


def test_differences_are_paired():
    """Two models that are right on the same images have a difference of 0 with an interval of width 0."""
    same, apart = differences([(share(200), share(200)), (share(240), share(200))])
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    assert apart.mean == pytest.approx(0.1)
    assert 0.05 < apart.low < 0.1 < apart.high < 0.15
    assert differences([]) == []


def measured(ours: list[int], rival: list[int]) -> table1.Measured:
    return [
        {"AdaMerge": [outcome(share(a))], "ToMe": [outcome(share(b))], "DSM": [outcome(share(b))]}
        for a, b in zip(ours, rival, strict=True)
    ]


class Twelve:
    depth = 12


class Five:
    depth = 5


@pytest.mark.parametrize(
    ("ours", "rival", "verdict"),
    [
        ([300] * 6, [260] * 6, "holds"),
        ([300] * 6, [300] * 6, "holds"),
        ([300] * 5 + [200], [260] * 6, "does not hold"),
        ([300] * 6, [260] * 5 + [301], "cannot tell"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_adamerge_must_be_as_good_as_a_rival_at_every_tier(ours, rival, verdict):
    claim = table1.versus(Twelve(), measured(ours, rival), "AdaMerge", "ToMe", "anywhere")  # pyright: ignore
    assert claim.verdict == verdict
    assert claim.paper == "+0.01 +0.18 +0.37 +0.61 +1.14 +1.67"


@pytest.mark.usefixtures("unchecked")
def test_tiers_where_dsm_would_skip_the_whole_model_are_left_out():
    good_after_two = measured([200, 200, 200, 300, 300, 300], [260] * 6)
    claim = table1.versus(Five(), good_after_two, "AdaMerge", "DSM", "anywhere")  # pyright: ignore
    assert claim.verdict == "holds"
    assert claim.ours.count("[") == 3


def test_a_gap_widens_monotonically_only_when_every_step_is_up():
    def claim(gaps: list[int]):
        return table2.widening([(100.0 * share(200 + gap), 100.0 * share(200)) for gap in gaps], "here")

    assert claim([0, 20, 40, 60, 80, 100]).verdict == "holds"
    assert claim([0, 20, 40, 20, 80, 100]).verdict == "does not hold"
    assert claim([0, 20, 40, 41, 80, 100]).verdict == "cannot tell"
    assert "from ~14.9G to ~14.4G" in claim([0, 20, 40, 20, 80, 100]).decisive
    assert claim([0] * 6).paper == "+0.17 +0.19 +0.24 +0.53 +0.53"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-2.0, -0.5, "holds"),
        (-9.0, -3.0, "holds"),
        (-0.8, -0.5, "does not hold"),
        (-0.5, 0.5, "does not hold"),
        (-3.0, 1.0, "cannot tell"),
    ],
)
def test_a_third_pass_costs_a_point_or_it_does_not(low, high, verdict):
    assert drops(interval(low, high)) == verdict


def stats(*mean: float) -> LayerStats:
    return LayerStats(mean, tuple(1.0 for _ in mean))


def test_two_passes_are_enough_when_the_third_leaves_the_means_where_they_are():
    passes = {1: stats(0.1, 0.2), 2: stats(0.15, 0.21), 3: stats(0.1504, 0.21)}
    stable, harmful = pass_claims({n: outcome(share(300)) for n in (1, 2, 3)}, passes)
    assert stable.verdict == "holds"
    assert "0.00040" in stable.ours and "0.05000" in stable.ours
    assert harmful.verdict == "does not hold"
    moved, harmful = pass_claims(
        {1: outcome(share(300)), 2: outcome(share(300)), 3: outcome(share(280))}, {**passes, 3: stats(0.1, 0.2)}
    )
    assert (moved.verdict, harmful.verdict) == ("does not hold", "holds")


def test_subsets_are_judged_on_accuracy_and_on_statistics_for_both_calibrations():
    keys = [(how, part) for how in ("iterative", "sequential") for part in (0.1, 0.2, 0.4, 1.0)]
    outcomes = {key: outcome(share(300 if key[0] == "iterative" else int(300 * key[1]))) for key in keys}
    found = {key: stats(0.5, 0.5 + (0 if key[0] == "iterative" else key[1])) for key in keys}
    accuracy, means, accuracy2, means2 = subset_claims(outcomes, found)
    assert (accuracy.verdict, means.verdict) == ("holds", "holds")
    assert (accuracy2.verdict, means2.verdict) == ("does not hold", "does not hold")
    assert means2.ours == "0.90000"


def test_the_setting_that_meets_a_cost_is_read_off_the_measured_ones():
    points = [(1.0, 10.0), (9.0, 6.0), (11.0, 5.0)]
    assert table1.interpolate(points, 8.0) == 5.0
    assert table1.interpolate(points, 5.5) == 10.0
    assert table1.interpolate(points, 4.0) == 13.0
    assert table1.interpolate(points, 12.0) == 1.0
    assert table1.interpolate([(1.0, 10.0), (9.0, 10.0)], 8.0) == 1.0
