"""Finds the cut at which the merged model takes a given share of the unmerged time, measured on its device."""

import logging
import statistics

import torch

from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.distributed import from_first
from adamerge.patching.apply import apply, temporarily_patched
from adamerge.patching.stack import install
from adamerge.search.evaluator import Evaluator
from adamerge.search.scaling import preset_at, sweep_preset
from adamerge.search.target import Target
from adamerge.timing import time_call

REPEATS = 7
# Tried in this order until one is fast enough; then bisected to this precision.
CUTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
PRECISION = 0.03
# At every how many blocks the preset that is timed merges.
MERGE_EVERY = (1, 2, 3)
LOGGER = logging.getLogger(__name__)


def schedule_for_latency(evaluator: Evaluator, ratio: float, static: bool = False) -> tuple[float, int]:
    """A cut, and at every how many blocks to merge, so that the preset takes at most `ratio` of the unmerged time.

    Among those that do, the preset with the least loss.  In small models and batches, deciding what to merge takes most
    of what merging saves; there fewer merging blocks with a smaller cut lose less at the same time.
    """
    found: list[tuple[float, float, int]] = []
    refusals: list[BadOption] = []
    for merge_every in MERGE_EVERY:
        try:
            cut = cut_for_latency(evaluator, ratio, static, merge_every)
        except BadOption as error:
            refusals.append(error)
            continue
        loss = sweep_preset(evaluator, Target(cut=cut), static, merge_every).loss.mean().item()
        LOGGER.info("merging at every %d. block: a cut of %.1f %%, loss %.4g", merge_every, 100 * cut, loss)
        found.append((loss, cut, merge_every))
    if not found:
        raise refusals[0]
    _, cut, merge_every = min(found)
    return cut, merge_every


def cut_for_latency(evaluator: Evaluator, ratio: float, static: bool = False, merge_every: int = 1) -> float:
    """The smallest cut, to 2.5 points, at which the preset takes at most `ratio` of the unmerged model's time.

    `static` times the preset that merges the same number in every image, `merge_every=2` the one that merges at every
    second block.
    """
    measured = []
    low = 0.0
    for cut in CUTS:
        try:
            recipe = preset_at(evaluator, Target(cut=cut), static, merge_every)
        except BadOption as error:
            measured.append(f"a cut of {cut:.0%} is out of reach ({error})")
            continue
        reached = relative_latency(evaluator, recipe)
        measured.append(f"{reached:.2f} at a cut of {cut:.0%}")
        if reached <= ratio:
            break
        low = cut
    else:
        raise BadOption(
            f"a latency ratio of {ratio:g} is out of reach on this device with {len(evaluator.images[0])} images at "
            f"once: {', '.join(measured)}; ask for more time, or pass larger batches"
        )
    high = cut
    while high - low > PRECISION:
        middle = (low + high) / 2
        recipe = preset_at(evaluator, Target(cut=middle), static, merge_every)
        if relative_latency(evaluator, recipe) <= ratio:
            high = middle
        else:
            low = middle
    return high


def relative_latency(evaluator: Evaluator, recipe: Recipe) -> float:
    """Merged time divided by unmerged time on the first batch: medians of runs that alternate, in one process."""
    return from_first(lambda: _measure(evaluator, recipe))


def _measure(evaluator: Evaluator, recipe: Recipe) -> float:
    model, entry, batch = evaluator.model, evaluator.entry, evaluator.images[0]
    times: tuple[list[float], list[float]] = ([], [])
    with temporarily_patched(model), torch.inference_mode():
        for _ in range(REPEATS):
            install(evaluator.host, evaluator.host.container)
            times[0].append(time_call(lambda: entry(batch), batch.device)[1])
            apply(model, recipe)
            times[1].append(time_call(lambda: entry(batch), batch.device)[1])
    # The first run of each is the warm-up.
    return statistics.median(times[1][1:]) / statistics.median(times[0][1:])
