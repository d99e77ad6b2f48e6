"""The search: families first, then how the merges are spread over the layers, then how much is protected."""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from adamerge.core.match import Bipartite, Protect
from adamerge.core.parts import to_json
from adamerge.core.recipe import Recipe
from adamerge.search.evaluator import Evaluator
from adamerge.search.journal import Journal
from adamerge.search.schedule import ALL, Rates, expected, fit, scheduled

# A cost is met when it is this near, as a share of it.
TOLERANCE = 0.005
# How much faster than the cost the logarithm of the loss falls: about 8 on vit_tiny and deit_tiny at cuts of 20 to
# 50 %.  Two recipes of slightly different cost are compared at one, so that the search does not live on the tolerance.
STEEPNESS = 8.0
CORRECTIONS = 4


@dataclass(frozen=True)
class Trial:
    """A family with rates that meet the goal, and what it lost on the images."""

    family: Recipe
    rates: Rates
    recipe: Recipe
    loss: float
    macs: float
    score: float


class BudgetSpent(Exception):
    """The time is up or the tries are used; the best so far is the answer."""


class Search:
    """Tries recipes of one cost, each at most once, and remembers the best."""

    def __init__(
        self, bench: Evaluator, goal: float, journal: Journal, *, seed: int, until: float, tries: int, bar: tqdm
    ):
        self.bench, self.goal, self.journal, self.until, self.tries = bench, goal, journal, until, tries
        self.dice, self.bar = random.Random(seed), bar
        self.best: Trial | None = None
        self.tried = 0
        # How much images cost more on average than the average counts would.
        self.excess = 1.0

    def attempt(self, family: Recipe, rates: Sequence[float]) -> Trial:
        """Scale the rates to the goal, sweep over the images, correct the scale until the cost is met."""
        if self.best is not None and (self.tried >= self.tries or time.monotonic() > self.until):
            raise BudgetSpent
        self.tried += 1
        bench, nearest = self.bench, None
        for _ in range(CORRECTIONS):
            fitted = fit(rates, self.goal / self.excess, bench.prices, family, bench.sense)
            recipe = scheduled(family, fitted, bench.prices.patches)
            loss, macs = self._measured(recipe)
            score = loss * math.exp(STEEPNESS * (macs / self.goal - 1))
            trial = Trial(family, fitted, recipe, loss, macs, score)
            if nearest is None or abs(macs - self.goal) < abs(nearest.macs - self.goal):
                nearest = trial
            if self._meets(trial):
                break
            self.excess = macs / expected(fitted, bench.prices, family, bench.sense)
        assert nearest is not None
        met, had = self._meets(nearest), self.best is not None and self._meets(self.best)
        if self.best is None or (met and (not had or nearest.score < self.best.score)):
            self.best = nearest
        self.bar.update()
        self.bar.set_postfix_str(f"loss {self.best.loss:.3g}", refresh=False)
        return nearest

    def _meets(self, trial: Trial) -> bool:
        return abs(trial.macs / self.goal - 1) <= TOLERANCE

    def _measured(self, recipe: Recipe) -> tuple[float, float]:
        tried: Any = to_json(recipe)
        known = self.journal.recall(tried)
        if known is None:
            outcome = self.bench.sweep(recipe)
            known = [outcome.loss.mean().item(), outcome.macs.mean().item()]
            self.journal.note(tried, known)
        return known[0], known[1]

    def improve(self, changes: Callable[[Trial], Iterable[tuple[Recipe, Sequence[float]]]]) -> bool:
        """Try changes of the best; whether one was better."""
        start = self.best
        assert start is not None
        for family, rates in changes(start):
            self.attempt(family, rates)
        return self.best is not start

    def walk(self, step: float = 0.6, smallest: float = 0.12) -> None:
        """Move merges to and from one layer at a time, in random order; steps grow where they help, else shrink."""
        assert self.best is not None
        depth = len(self.best.rates)
        steps, way = [step] * depth, [1] * depth
        while max(steps) > smallest:
            order = [layer for layer in range(depth) if steps[layer] > smallest]
            self.dice.shuffle(order)
            for layer in order:
                for _ in range(2):
                    before = self.best
                    change = moved(before.rates, layer, way[layer] * steps[layer])
                    # Who merges nothing cannot merge less, who merges all not more.
                    if change != before.rates:
                        self.attempt(before.family, change)
                    if self.best is not before:
                        steps[layer] = min(1.2 * steps[layer], 1.0)
                        break
                    way[layer] = -way[layer]
                else:
                    steps[layer] /= 2


def moved(rates: Rates, layer: int, step: float) -> Rates:
    """The rates with more (or less) at one layer, by a share of its own rate and of a typical one."""
    finite = [rate for rate in rates if rate < ALL]
    typical = sum(finite) / max(sum(rate > 0 for rate in finite), 1)
    whole = rates[layer] >= ALL
    start = typical if whole else rates[layer]
    rate = ALL if whole and step > 0 else start + step * (0.6 * start + 0.4 * typical)
    return (*rates[:layer], max(rate, 0.0), *rates[layer + 1 :])


def strengths(best: Trial, factors: Sequence[float] = (0.67, 1.5)) -> Iterable[tuple[Recipe, Rates]]:
    """The best recipe, protecting less and more."""
    links = best.family.links
    if isinstance(links, Bipartite) and isinstance(links.score, Protect):
        for factor in factors:
            score = Protect(round(factor * links.score.strength, 4))
            yield replace(best.family, links=replace(links, score=score)), best.rates


def quiet() -> tqdm:
    """A progress bar that shows nothing."""
    return tqdm(disable=True)
