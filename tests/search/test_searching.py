"""The pieces of a search: its journal, its check on other images, its goal, its steps."""

from typing import Any

import pytest
import torch
from hosts.families import build, pictures
from tqdm import tqdm

import adamerge
from adamerge.core.errors import BadOption
from adamerge.evaluation import kl_divergence
from adamerge.methods import tome
from adamerge.search.evaluator import Evaluator
from adamerge.search.journal import Journal
from adamerge.search.local_search import LimitReached, LocalSearch, SearchLimits, change_rate
from adamerge.search.options import TuningOptions
from adamerge.search.scaling import Candidate, Scaler
from adamerge.search.schedule import MERGE_ALL, linear_rates
from adamerge.search.target import Target
from adamerge.search.tuner import hold_out, tune_with_report


@pytest.fixture(scope="module")
def model():
    return build("vit", patch_size=8, depth=3)


def test_a_journal_belongs_to_one_seed_one_set_of_images_and_one_kind_of_recipe(model, tmp_path):
    images, journal = pictures(8), tmp_path / "tried.jsonl"

    def search(given: Any = images, net: Any = model, **options: Any) -> None:
        settings = {"cut": 0.2, "tries": 1, "progress": False, "resume": journal, **options}
        tune_with_report(net, given, TuningOptions(**settings))

    search()
    for options, name in (
        ({"seed": 1}, "seed"),
        ({"given": images.flip(0)}, "images"),
        ({"static": True}, "static"),
        ({"cost": "paper"}, "count"),
        ({"loss": "features"}, "loss"),
        ({"cut": 0.3}, "target"),
        ({"net": build("vit", seed=1, patch_size=8, depth=3)}, "model"),
    ):
        with pytest.raises(BadOption, match=f"is the journal of another search: it differs in {name};"):
            search(**options)
    search()


def test_the_check_applies_what_was_found_to_images_that_were_held_out(model):
    """With the statistics of the tuning images: calibrated on themselves, the held-out ones would look better."""
    images = pictures(12)
    found = tune_with_report(model, images, TuningOptions(cut=0.3, tries=1, progress=False))
    others = images[3::4]
    with torch.no_grad():
        full = model(others).double().log_softmax(1)
        adamerge.apply(model, found.recipe)
        merged = model(others).double().log_softmax(1)
        macs = adamerge.flops.cost(model).true.mean().item()
        adamerge.remove(model)
    assert found.check_loss == pytest.approx(kl_divergence(full, merged).mean().item(), rel=1e-4)
    assert found.check_gmacs == pytest.approx(macs / 1e9, rel=1e-6)
    unmerged = adamerge.flops.meter(model).unmerged().true.item()
    assert found.check_cut == pytest.approx(1 - macs / unmerged) and found.cut == pytest.approx(0.3, abs=0.005)
    assert found.gmacs == pytest.approx((1 - found.cut) * unmerged / 1e9)
    assert (found.images, found.check_images) == (9, 3) and found.check_gmacs != found.gmacs
    assert found.recipe.stats is not None and found.recipe.stats.images == 9


def test_every_fourth_image_is_held_out_and_batches_keep_their_size():
    images = list(torch.arange(10.0)[:, None, None, None].split(4))
    tuning, held_out = hold_out(images)
    assert torch.cat(tuning).flatten().tolist() == [0, 1, 2, 4, 5, 6, 8, 9]
    assert torch.cat(held_out).flatten().tolist() == [3, 7]
    assert [len(batch) for batch in tuning] == [4, 4]


def candidate(loss: float, macs: float, score: float | None = None) -> Candidate:
    return Candidate(tome(1), (1.0,), tome(1), loss, macs, loss if score is None else score)


class GivenCosts(Evaluator):
    """What a search reads of an evaluator, without a model."""

    def __init__(self, **fields: Any):
        vars(self).update(fields)


class Prepared(LocalSearch):
    """A search in which every try gives the next of these candidates; the goal is a cost of 100."""

    def __init__(self, *found: Candidate, tries: int = 100, until: float = torch.inf):
        super().__init__(
            GivenCosts(full=200.0), Target(cut=0.5), Journal(), SearchLimits(tries, until=until), tqdm(disable=True)
        )
        self.waiting = list(found)
        self.given: list[tuple[float, ...]] = []
        setattr(self.scaler, "scale", self._next)  # noqa: B010

    def _next(self, family: Any, rates: Any) -> Candidate:
        self.given.append(tuple(rates))
        return self.waiting.pop(0)


def tried(*found: Candidate) -> Candidate | None:
    search = Prepared(*found)
    for _ in found:
        search.try_candidate(tome(1), (1.0,))
    return search.best


def test_a_candidate_whose_cost_misses_the_goal_is_never_better():
    good, cheap, dear = candidate(0.3, 100.2), candidate(0.4, 90.0), candidate(0.1, 110.0)
    assert tried(good, dear, cheap) is good, "a smaller loss at a higher cost"
    assert tried(dear, good) is good, "the first is replaced as soon as one meets the goal"
    assert tried(dear, cheap) is dear, "where none meets the goal, the first stays"
    better = candidate(0.2, 99.8)
    assert tried(good, better) is better and tried(better, good) is better


def test_candidates_are_compared_by_their_scores_and_equal_ones_by_order():
    low, high = candidate(0.3, 100.4, score=0.31), candidate(0.31, 99.7, score=0.30)
    assert tried(low, high) is high
    twin = candidate(0.31, 99.7, score=0.30)
    assert tried(high, twin) is high


@pytest.mark.parametrize(("macs", "met"), [(100.49, True), (99.51, True), (100.51, False), (99.49, False)])
def test_a_goal_is_met_within_half_a_percent(macs, met):
    assert Prepared().scaler.meets_goal(candidate(0.1, macs)) == met


def test_the_first_candidate_is_always_tried_and_then_the_limits_hold():
    some = [candidate(1.0 / n, 100.0) for n in range(1, 6)]
    search = Prepared(*some, tries=2)
    search.try_candidate(tome(1), (1.0,))
    search.try_candidate(tome(1), (1.0,))
    with pytest.raises(LimitReached):
        search.try_candidate(tome(1), (1.0,))
    assert search.tried == 2 and search.best is some[1]
    late = Prepared(*some, until=0.0)
    late.try_candidate(tome(1), (1.0,))
    with pytest.raises(LimitReached):
        late.try_candidate(tome(1), (1.0,))


def test_changes_say_whether_one_was_better():
    search = Prepared(candidate(0.5, 100.0), candidate(0.6, 100.0), candidate(0.4, 100.0), candidate(0.45, 100.0))
    search.try_candidate(tome(1), (1.0,))
    assert not search.try_changes(lambda best: [(tome(1), (2.0,))])
    assert search.try_changes(lambda best: [(tome(1), (3.0,)), (tome(1), (4.0,))])
    assert search.given == [(1.0,), (2.0,), (3.0,), (4.0,)] and search.best is not None and search.best.loss == 0.4


def test_layers_are_changed_both_ways_in_steps_that_halve():
    """Nothing helps: each layer is tried up and down with steps of 0.6, 0.3 and 0.15, and then it ends."""
    start = Candidate(tome(1), (1.0, 1.0), tome(1), 0.1, 100.0, 0.1)
    search = Prepared(start, *(candidate(0.2, 100.0) for _ in range(12)))
    search.try_candidate(tome(1), start.rates)
    search.try_layers()
    assert search.waiting == []
    changes = [[round(b - a, 6) for a, b in zip(start.rates, one, strict=True)] for one in search.given[1:]]
    for layer in range(2):
        mine = [change[layer] for change in changes if change[layer]]
        assert sorted(map(abs, mine), reverse=True) == [0.6, 0.6, 0.3, 0.3, 0.15, 0.15]
        assert sum(mine) == pytest.approx(0)
    assert all(change.count(0.0) == 1 for change in changes), "one layer at a time"


def test_a_step_that_helps_is_kept_and_grows():
    start = Candidate(tome(1), (1.0,), tome(1), 0.5, 100.0, 0.5)
    better = Candidate(tome(1), (1.6,), tome(1), 0.4, 100.0, 0.4)
    search = Prepared(start, better, *(candidate(0.9, 100.0) for _ in range(20)))
    search.try_candidate(tome(1), start.rates)
    search.try_layers()
    assert search.best is better
    # The next step is 1.2 * 0.6 of its own rate.
    assert search.given[2] == (pytest.approx(1.6 + 0.72 * 1.6),)


def test_a_rate_changes_by_a_share_of_itself_and_of_the_mean():
    rates = (0.0, 1.0, 3.0, MERGE_ALL)
    # The mean of rates that are neither 0 nor all: 2.
    assert change_rate(rates, 1, 0.5) == (0.0, pytest.approx(1 + 0.5 * (0.6 * 1 + 0.4 * 2)), 3.0, MERGE_ALL)
    assert change_rate(rates, 0, 0.5) == (pytest.approx(0.5 * 0.4 * 2), 1.0, 3.0, MERGE_ALL)
    assert change_rate(rates, 0, -0.5) == rates, "a layer that merges nothing cannot merge less"
    assert change_rate(rates, 3, 0.5) == rates, "one that merges all cannot merge more"
    assert change_rate(rates, 3, -0.5) == (0.0, 1.0, 3.0, pytest.approx(2 - 0.5 * 2))


def test_linear_rates_begin_at_a_layer_and_rise_to_the_last():
    assert linear_rates(5, 2, 1.0) == (0.0, 0.0, 1.0, 1.5, 2.0)
    assert linear_rates(3, 0, -2.0) == (1.0, 0.0, 0.0)
    assert linear_rates(3, 1, 1.0) == (0.0, 1.0, 2.0)
    assert linear_rates(3, 2, 1.0) == (0.0, 0.0, 1.0)
    assert linear_rates(3, 0, 0.0, MERGE_ALL) == (1.0, 1.0, MERGE_ALL)


def test_a_scale_is_corrected_until_the_measured_cost_is_the_goal(model):
    """The images cost 3 % more than the schedule says: one correction, which the next schedule starts with."""
    prices = adamerge.flops.meter(model)
    evaluator = GivenCosts(full=prices.unmerged().true.item(), prices=prices, cost="true")
    costs: list[float] = []

    def measure(recipe: adamerge.Recipe) -> tuple[float, float]:
        r = recipe.budget.r  # pyright: ignore[reportAttributeAccessIssue]
        counts = prices.patches - torch.tensor([r], dtype=torch.float64).cumsum(1)
        costs.append(1.03 * prices.cost(counts, recipe).true.item())
        return 0.5, costs[-1]

    scaler = Scaler(evaluator, Target(cut=0.1), measure)
    family = adamerge.presets.protect()
    found = scaler.scale(family, (0.0, 1.0, 1.0))
    assert found.macs == pytest.approx(0.9 * evaluator.full, rel=0.005) and found.rates[0] == 0
    assert len(costs) == 2 and costs[0] == pytest.approx(1.03 * 0.9 * evaluator.full, rel=0.005)
    assert found.score == pytest.approx(0.5 * 2.718281828 ** (8 * (found.macs / scaler.goal - 1)))
    scaler.scale(family, (1.0, 1.0, 1.0))
    assert len(costs) == 3


def test_where_no_cost_meets_the_goal_the_nearest_is_taken(model):
    """Not the first one and not the last."""
    prices = adamerge.flops.meter(model)
    evaluator = GivenCosts(full=prices.unmerged().true.item(), prices=prices, cost="true")
    results = iter([(0.1, 1.1), (0.2, 0.9), (0.3, 1.02), (0.4, 0.95)])

    def measure(recipe: adamerge.Recipe) -> tuple[float, float]:
        loss, excess = next(results)
        return loss, excess * 0.8 * evaluator.full

    found = Scaler(evaluator, Target(cut=0.2), measure).scale(adamerge.presets.protect(), (0.0, 1.0, 1.0))
    assert found.loss == 0.3 and found.macs == pytest.approx(1.02 * 0.8 * evaluator.full)
