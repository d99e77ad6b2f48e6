"""Runs batches layer by layer on the reference backend: all batches go through a block before the next block runs.

Used by calibration, by the tuner's sweep, and by passes that merge nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from adamerge.core.budget import Fixed
from adamerge.core.errors import BadOption
from adamerge.core.evidence import Heads
from adamerge.core.lazy import deferred
from adamerge.core.match import Links
from adamerge.core.recipe import Linked, Recipe
from adamerge.core.stats import LayerStats, summarise
from adamerge.distributed import in_order, place
from adamerge.runtime import reference
from adamerge.runtime.block_view import View
from adamerge.runtime.reference import State, Tables


@dataclass(frozen=True)
class HostBlock:
    """One block of a host: its view, and the rotary tables that the host passes to it, if any."""

    view: View
    tables: Tables = ()


# Takes a layer and the links of every batch at this layer; gives the recipe to merge with there.
ChooseRecipe = Callable[[int, Sequence[Links]], Recipe]


def run_layers(
    states: Sequence[State], blocks: Sequence[HostBlock], recipe: Recipe, choose: ChooseRecipe | None = None
) -> list[State]:
    """Run all blocks with `recipe`; gives the states after the last block.

    With `choose`, `recipe` only finds the links of each layer, and `choose` gives the recipe that merges them.  The two
    recipes may differ in their budgets only.
    """
    states, depth = list(states), len(blocks)
    for layer, block in enumerate(blocks):
        states = [replace(state, tables=block.tables) for state in states]
        if choose is None:
            states = [reference.step(state, block.view, recipe, depth) for state in states]
            continue
        waiting = [_before_merge(state, block.view, recipe, depth) for state in states]
        chosen = choose(layer, [links for _, _, (_, links) in waiting])
        states = [
            reference.after_merge(reference.merge(state, chosen, depth, heads, linked), block.view, chosen)
            for state, heads, linked in waiting
        ]
    return states


def _before_merge(state: State, view: View, recipe: Recipe, depth: int) -> tuple[State, Heads | None, Linked]:
    """Run a batch up to the merge of a block; gives its state, its heads, and its salience and links.

    The heads are not kept in memory while other batches run: reading them computes them again.
    """
    reached, heads = reference.before_merge(state, view, recipe)
    linked = reference.link(reached, recipe, depth, heads)
    if heads is None:
        return reached, None, linked
    again = cache(lambda: reference.attention(state, view, recipe)[1])
    query, key, value = (deferred(partial(_side, again, name)) for name in ("query", "key", "value"))
    return reached, Heads(query, key, value, heads.scale, heads.bias), linked


def _side(heads: Callable[[], Heads], name: str) -> Tensor:
    return getattr(heads(), name)


def measure_unmerged(states: Sequence[State], blocks: Sequence[HostBlock], recipe: Recipe) -> Float[Tensor, "n l"]:
    """The redundancy of every image at every layer by the recipe's links, while nothing merges; 0 at idle layers."""
    unmerged = replace(recipe, budget=Fixed(0))
    states = run_layers(states, blocks, recipe, lambda layer, links: unmerged)
    return torch.cat([torch.stack([step.redundancy for step in state.steps], 1) for state in states])


def calibrate_layers(
    states: Sequence[State], blocks: Sequence[HostBlock], recipe: Recipe, done: Callable[[], object] = lambda: None
) -> tuple[list[State], LayerStats]:
    """Calibrate an adaptive recipe; gives the states after the last block, and the statistics.

    Each layer is measured on tokens that the calibrated layers before it have merged.  `done` is called after each.
    """
    budget = recipe.adaptive
    if budget is None or not blocks:
        raise BadOption(f"only adaptive budgets have statistics; this recipe's is {recipe.budget}")
    columns: list[Tensor] = []
    thresholds: list[float] = []
    stats: list[LayerStats] = []

    def choose(layer: int, links: Sequence[Links]) -> Recipe:
        columns.append(torch.cat(in_order([batch.redundancy.double().cpu() for batch in links])))
        if budget.needs_thresholds:
            thresholds.append(budget.threshold(_of_all_processes(links), layer))
        stats.append(summarise(torch.stack(columns, 1), thresholds))
        done()
        return recipe.with_stats(stats[-1])

    return run_layers(states, blocks, recipe, choose), stats[-1]


def _of_all_processes(links: Sequence[Links]) -> Sequence[Links]:
    """The links of the batches of all processes."""
    if place().world == 1:
        return links
    sent = [(batch.value.cpu(), batch.partner.cpu(), batch.source.cpu()) for batch in links]
    return [Links(value, partner, source, None) for value, partner, source in in_order(sent)]
