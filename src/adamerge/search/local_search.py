"""The search of the tuner: tries families, then schedules, then protection strengths, then single layers."""

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from adamerge.core.match import Bipartite, Protect
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.distributed import from_first
from adamerge.search.evaluator import Evaluator
from adamerge.search.families import families, first_layer_and_slope, rates
from adamerge.search.journal import Journal
from adamerge.search.scaling import Candidate, Scaler, mean_loss_and_macs
from adamerge.search.schedule import MERGE_ALL, Rates, at_every, linear_rates
from adamerge.search.target import Target

# The slope of rates that fall from the first layer to the last, for most merges in the first layers.
FALLING_SLOPE = -0.8
LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchLimits:
    """How long to search, and where: at most `tries` candidates, until `time.monotonic()` reaches `until`.

    `seed` sets the order in which layers are changed.  All candidates merge at every `merge_every`-th layer.
    """

    tries: int
    seed: int = 0
    until: float = torch.inf
    progress: bool = False
    merge_every: int = 1


class LimitReached(Exception):
    """The time is up or all tries are used; the best candidate so far is the result."""


class LocalSearch:
    """Tries candidates of one cost and keeps the best."""

    def __init__(self, evaluator: Evaluator, target: Target, journal: Journal, limits: SearchLimits, bar: tqdm):
        self.evaluator, self.journal, self.limits, self.bar = evaluator, journal, limits, bar
        self.scaler = Scaler(evaluator, target, self._measure)
        self.random = random.Random(limits.seed)
        self.best: Candidate | None = None
        self.tried = 0

    def try_candidate(self, family: Recipe, rates: Sequence[float]) -> Candidate:
        """Scale a family's rates to the goal and measure it; it becomes the best if it meets the goal and loses less.

        Raises LimitReached when nothing more may be tried; the first candidate is always tried.
        """
        limits = self.limits
        if self.best is not None and (self.tried >= limits.tries or self._time_is_up()):
            raise LimitReached
        self.tried += 1
        found, meets = self.scaler.scale(family, at_every(rates, self.limits.merge_every)), self.scaler.meets_goal
        if self.best is None or (meets(found) and (not meets(self.best) or found.score < self.best.score)):
            self.best = found
            LOGGER.info("recipe %d: loss %.4g at %.4g GMACs, the best so far", self.tried, found.loss, found.macs / 1e9)
        self.bar.update()
        self.bar.set_postfix_str(f"loss {self.best.loss:.3g}", refresh=False)
        return found

    def _time_is_up(self) -> bool:
        """All processes stop at the same candidate: the first one looks at its clock."""
        return from_first(lambda: time.monotonic() > self.limits.until)

    def try_changes(self, changes: Callable[[Candidate], Iterable[tuple[Recipe, Sequence[float]]]]) -> bool:
        """Try all changes of the best; returns whether one was better."""
        start = self.best
        assert start is not None
        for family, changed in changes(start):
            self.try_candidate(family, changed)
        return self.best is not start

    def try_layers(self, step: float = 0.6, smallest: float = 0.12) -> None:
        """Change the rate of one layer at a time, in random order, until all steps are below `smallest`.

        A layer's step grows after a change that helped; it is halved when neither more nor less helped.
        """
        assert self.best is not None
        depth = len(self.best.rates)
        steps, sign = [step] * depth, [1] * depth
        while max(steps) > smallest:
            order = [layer for layer in range(depth) if steps[layer] > smallest and self._may_change(layer)]
            if not order:
                return
            self.random.shuffle(order)
            for layer in order:
                for _ in range(2):
                    before = self.best
                    changed = change_rate(before.rates, layer, sign[layer] * steps[layer])
                    # A layer that merges nothing cannot merge less, and one that merges all cannot merge more.
                    if changed != before.rates:
                        self.try_candidate(before.family, changed)
                    if self.best is not before:
                        steps[layer] = min(1.2 * steps[layer], 1.0)
                        break
                    sign[layer] = -sign[layer]
                else:
                    steps[layer] /= 2

    def _may_change(self, layer: int) -> bool:
        """Whether changing the rate of a layer keeps the number of layers that merge."""
        assert self.best is not None
        return self.limits.merge_every == 1 or self.best.rates[layer] > 0

    def _measure(self, recipe: Recipe) -> tuple[float, float]:
        """The mean loss and cost of a recipe, from the journal if it is there."""
        tried: Any = to_json(recipe)
        known = self.journal.lookup(tried)
        if known is None:
            known = mean_loss_and_macs(self.evaluator, recipe)
            self.journal.record(tried, list(known))
        return known[0], known[1]


def search_candidates(
    evaluator: Evaluator,
    target: Target,
    limits: SearchLimits,
    *,
    journal: Journal | None = None,
    static: bool = False,
    starts: Sequence[tuple[Recipe, Rates]] = (),
) -> tuple[Candidate, int]:
    """The best candidate at a target, and how many were tried.

    Args:
        evaluator: the model and the images.
        target: the cost that every candidate has to meet.
        limits: when to stop.
        journal: results that are known already; new ones are added.
        static: search only recipes that merge the same number in every image.
        starts: families with rates that are tried first.
    """
    host = evaluator.host
    cut = 1 - target.macs_below(evaluator.full) / evaluator.full
    with tqdm(total=limits.tries, desc=f"tuning, {target}", disable=not limits.progress) as bar:
        search = LocalSearch(evaluator, target, journal if journal is not None else Journal(), limits, bar)
        try:
            for family, start in starts:
                search.try_candidate(family, start)
            default = rates(cut, host.depth, evaluator.reads_patches)
            for family in families(host.class_token, static):
                search.try_candidate(family, default)
            _try_linear_rates(search, cut)
            search.try_changes(_merge_early)
            search.try_changes(_vary_strength)
            search.try_layers()
            while search.try_changes(lambda best: _vary_strength(best, (0.8, 1.25))):
                pass
            search.try_layers(0.3, 0.05)
        except LimitReached:
            pass
    assert search.best is not None
    return search.best, search.tried


def _try_linear_rates(search: LocalSearch, cut: float) -> None:
    """Try to begin one layer earlier or later than the preset, then other slopes from the better first layer."""
    assert search.best is not None
    depth, last = search.evaluator.host.depth, None if search.evaluator.reads_patches else MERGE_ALL
    first, slope = first_layer_and_slope(cut, depth)
    first_by_score = {search.best.score: first}
    for other in (first - 1, first + 1):
        if 0 <= other < depth:
            found = search.try_candidate(search.best.family, linear_rates(depth, other, slope, last))
            first_by_score[found.score] = other
    first = first_by_score[min(first_by_score)]
    for other in sorted({0.0, 1.0, 2.0} - {slope}):
        search.try_candidate(search.best.family, linear_rates(depth, first, other, last))


def _merge_early(best: Candidate) -> Iterator[tuple[Recipe, Rates]]:
    """Most merges in the first layers, without proportional attention: best for DINOv2 at cuts of 50 % and more."""
    depth, last = len(best.rates), best.rates[-1] if best.rates[-1] >= MERGE_ALL else None
    yield replace(best.family, proportional_attention=False), linear_rates(depth, 0, FALLING_SLOPE, last)


def _vary_strength(best: Candidate, factors: Sequence[float] = (0.67, 1.5)) -> Iterator[tuple[Recipe, Rates]]:
    """The best recipe with its strength of protection times each factor."""
    links = best.family.links
    if isinstance(links, Bipartite) and isinstance(links.score, Protect):
        for factor in factors:
            score = Protect(round(factor * links.score.strength, 4))
            yield replace(best.family, links=replace(links, score=score)), best.rates


def change_rate(rates: Rates, layer: int, step: float) -> Rates:
    """The rates with one layer's changed by `step`, as a share of its own rate and of the mean of nonzero rates."""
    finite = [rate for rate in rates if rate < MERGE_ALL]
    typical = sum(finite) / max(sum(rate > 0 for rate in finite), 1)
    merges_all = rates[layer] >= MERGE_ALL
    start = typical if merges_all else rates[layer]
    rate = MERGE_ALL if merges_all and step > 0 else start + step * (0.6 * start + 0.4 * typical)
    return (*rates[:layer], max(rate, 0.0), *rates[layer + 1 :])
