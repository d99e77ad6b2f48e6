"""Recipes at random: the methods with random options, and random compositions of the parts that recipes are made of."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adamerge import methods
from adamerge.core.budget import Budget, Everything, Fixed, Keep, Threshold, ZScore
from adamerge.core.combine import Average, BySalience, BySalienceAndSize, BySize, Drop, KeepNorm, MeanNorm
from adamerge.core.match import (
    Alternating,
    Bipartite,
    Everywhere,
    Keys,
    Matching,
    Protect,
    SalientFirst,
    SalientLast,
    SameWindow,
    Sequential,
    SimilarityOnly,
    Tokens,
)
from adamerge.core.recipe import Recipe
from adamerge.core.salience import AttentionShare, Centrality, ClassAttention, ClassShare, Sharpness, Uniform
from adamerge.core.stats import LayerStats
from adamerge.methods.papers.ats import Sampled
from adamerge.methods.papers.evit import IntoOne
from adamerge.methods.papers.pitome import ByEnergy, Ratio
from adamerge.methods.papers.random import AtRandom
from adamerge.methods.papers.tofu import DropThenKeepNorm
from adamerge.presets import protect

# Numbers that no rule takes: one of them is put into a recipe now and then.
WRONG: tuple[Any, ...] = (-1, float("nan"), float("inf"), (), (1.0, 2.0), "3", None, 10**30)


def draw_recipe(choose: random.Random, depth: int, patches: int) -> Recipe:
    """A recipe for a model of `depth` blocks and `patches` patches.  One in twenty cannot run; some are not even made.

    Raises what the library raises when it refuses an option.
    """
    recipe = (_method if choose.random() < 0.5 else _composition)(choose, depth, patches)
    if choose.random() < 0.05:
        return _spoilt(choose, recipe)
    return recipe


def draw_stats(choose: random.Random, depth: int) -> LayerStats:
    """Statistics that were not measured, of the order of measured ones."""

    def numbers(draw: Callable[[], float]) -> tuple[float, ...]:
        return tuple(draw() for _ in range(depth))

    return LayerStats(
        numbers(lambda: choose.uniform(-0.2, 1)),
        numbers(lambda: 10 ** choose.uniform(-4, 0)),
        numbers(lambda: choose.uniform(-1, 1)),
    )


def _number(choose: random.Random, depth: int, patches: int) -> float | tuple[float, ...]:
    """How many tokens merge at a layer: whole or not, for all layers or for each, sometimes more than there are."""
    if choose.random() < 0.25:
        return tuple(choose.choice([0, 1, 2.5, patches / 4, patches / 3]) for _ in range(depth))
    return choose.choice([1, 2, 3, 0.5, 2.7, patches / 5, patches / 3, patches, 3 * patches])


def _method(choose: random.Random, depth: int, patches: int) -> Recipe:
    """A method by name, or the preset, with random options."""
    stats, r = draw_stats(choose, depth), _number(choose, depth, patches)
    attention = choose.random() < 0.5
    name = choose.choice([*methods.METHODS, "preset", "adamerge"])
    if name == "preset":
        static, with_class = choose.random() < 0.3, choose.random() < 0.7
        recipe = protect(choose.choice([0, 0.5, 0.75, 2.0]), static=static, r=_one(r), class_token=with_class)
        return recipe if static else recipe.with_stats(stats)
    made: dict[str, Callable[[], Recipe]] = {
        "adamerge": lambda: methods.adamerge(
            r,
            stats,
            alpha=choose.choice([1.0, 2.0, -1.0, 0.0]),
            temperature=choose.choice([1.0, 0.5, 3.0]),
            affinity=choose.choice(["dot", "scaled", "cosine"]),
            split=choose.choice(["sequential", "alternating"]),
            direction=choose.choice(["published", "protecting", "off"]),
            averaging=choose.choice(["salience", "size", "salience_size"]),
            proportional_attention=attention,
        ),
        "pitome": lambda: (
            methods.pitome(_one(r), margin=choose.uniform(0.3, 1), proportional_attention=attention)
            if choose.random() < 0.5
            else methods.pitome(ratio=choose.uniform(0.3, 1), proportional_attention=attention)
        ),
        "dsm": lambda: methods.dsm(
            _one(r), choose.randrange(depth + 1), windows=choose.random() < 0.5, proportional_attention=attention
        ),
        "tofu": lambda: methods.tofu(_one(r), until=choose.uniform(0, 1), proportional_attention=attention),
        "evit": lambda: methods.evit(choose.uniform(0.05, 1), proportional_attention=attention),
        "ats": lambda: methods.ats(
            choose.choice([1, 4, patches // 2 + 1, patches, 10 * patches]),
            first=choose.choice([0.0, 0.25, 0.7]),
            proportional_attention=attention,
        ),
        "dymu": lambda: methods.dymu(_one(r), stats, proportional_attention=attention),
        "none": methods.none,
    }
    return made[name]() if name in made else getattr(methods, name)(_one(r))


def _one(r: float | tuple[float, ...]) -> float:
    return max(r) if isinstance(r, tuple) else r


def _budget(choose: random.Random, depth: int, patches: int) -> Budget:
    r, stats = _number(choose, depth, patches), draw_stats(choose, depth)
    return choose.choice(
        [
            lambda: Fixed(r, choose.randrange(depth + 1)),
            lambda: ZScore(r, stats, choose.uniform(-2, 2), choose.uniform(0.2, 3)),
            lambda: ZScore(r, stats),
            lambda: Threshold(r, stats),
            lambda: Ratio(choose.uniform(0.2, 1)),
            lambda: Keep(choose.uniform(0.05, 1), tuple(choose.sample([0.0, 0.25, 0.4, 0.5, 0.75, 0.9], 3))),
            Everything,
        ]
    )()


def _links(choose: random.Random, budget: Budget, before: bool) -> Matching:
    other = choose.random()
    if other < 0.08:
        return IntoOne()
    if other < 0.16:
        return AtRandom(choose.randrange(3))
    if other < 0.24 and not before:
        return Sampled(choose.choice([1, 3, 9, 200]), choose.choice([0.0, 0.25]))
    splits: list[Any] = [Sequential(), Alternating(), Alternating(from_prefix=True)]
    if not budget.ragged and not before:
        splits.append(ByEnergy(choose.uniform(0.2, 1), budget))
    scores = [SalientFirst(), SalientLast(), SimilarityOnly(), Protect(), Protect(choose.uniform(0, 3))]
    metric = Tokens() if before or choose.random() < 0.5 else Keys()
    reach = choose.choice([Everywhere(), Everywhere(), SameWindow(), SameWindow(1.0)])
    return Bipartite(choose.choice(splits), metric, choose.choice(scores), reach)


def _composition(choose: random.Random, depth: int, patches: int) -> Recipe:
    """Any parts together."""
    before = choose.random() < 0.4
    budget = _budget(choose, depth, patches)
    salience: list[Any] = [Uniform(), Centrality("dot"), Centrality("scaled"), Centrality("cosine")]
    if not before:
        salience += [ClassAttention(), ClassShare(), Sharpness(), AttentionShare()]
    chosen, links = choose.choice(salience), _links(choose, budget, before)
    combine = choose.choice([Average(), Average(), Drop(), MeanNorm(), KeepNorm(), DropThenKeepNorm(0.5)])
    if isinstance(combine, (Drop, DropThenKeepNorm)) and isinstance(getattr(links, "split", None), ByEnergy):
        # Two tokens have the same energy up to rounding, which would say which of them is dropped.
        combine = Average()
    return Recipe(
        site="before_block" if before else "after_attention",
        salience=chosen,
        links=links,
        budget=budget,
        weight=choose.choice([BySalience(), BySize(), BySalienceAndSize()]),
        combine=combine,
        order=choose.choice(["kept", "sources_first"]),
        proportional_attention=choose.random() < 0.5,
    )


def _spoilt(choose: random.Random, recipe: Recipe) -> Recipe:
    """The recipe with something that cannot be: a wrong number, statistics of another depth or none, another site."""
    budget: Any = recipe.budget
    ways: list[Callable[[], Recipe]] = [
        lambda: replace(recipe, site="before_block"),
        lambda: replace(recipe, site=choose.choice(["before_block", "somewhere"])),
        lambda: replace(recipe, budget=Fixed(choose.choice(WRONG))),
        lambda: replace(recipe, budget=ZScore(choose.choice(WRONG), draw_stats(choose, 3))),
        lambda: replace(recipe, links=ByEnergy(choose.uniform(-1, 2), budget)),  # pyright: ignore[reportArgumentType]
        lambda: recipe.with_stats(None),
        lambda: recipe.with_stats(draw_stats(choose, choose.choice([1, 7]))),
    ]
    return choose.choice(ways)()
