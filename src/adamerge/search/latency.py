"""The cut that makes a model as fast as asked, measured on the device it is on."""

import statistics

import torch

from adamerge.core.budget import check_number
from adamerge.core.errors import BadOption
from adamerge.core.recipe import Recipe
from adamerge.patching.apply import apply, temporarily_patched
from adamerge.patching.stack import install
from adamerge.search.evaluator import Evaluator
from adamerge.search.solve import Target
from adamerge.timing import time_call

REPEATS = 7
CUTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def cut_of(bench: Evaluator, ratio: float) -> float:
    """The smallest cut, to 2.5 points, at which the preset takes at most `ratio` of the unmerged model's time."""
    from adamerge.presets import settle

    check_number("latency_ratio", ratio)
    if not 0 < ratio < 1:
        raise BadOption(f"latency_ratio is a share of the unmerged time and must be between 0 and 1; got {ratio!r}")
    measured = []
    low = 0.0
    for cut in CUTS:
        try:
            recipe = settle(bench, Target(cut=cut))
        except BadOption as error:
            measured.append(f"a cut of {cut:.0%} cannot be had ({error})")
            continue
        reached = _ratio(bench, recipe)
        measured.append(f"{reached:.2f} at a cut of {cut:.0%}")
        if reached <= ratio:
            break
        low = cut
    else:
        raise BadOption(
            f"a latency ratio of {ratio:g} is out of reach on this device with {len(bench.images[0])} images at once: "
            f"{', '.join(measured)}; ask for more time, or pass larger batches"
        )
    high = cut
    while high - low > 0.03:
        middle = (low + high) / 2
        if _ratio(bench, settle(bench, Target(cut=middle))) <= ratio:
            high = middle
        else:
            low = middle
    return high


def _ratio(bench: Evaluator, recipe: Recipe) -> float:
    """The merged model's time over the unmerged one's: medians over repeats that take turns."""
    model, entry, batch = bench.model, bench.entry, bench.images[0]
    times: tuple[list[float], list[float]] = ([], [])
    with temporarily_patched(model), torch.inference_mode():
        for _ in range(REPEATS):
            install(bench.host, bench.host.container)
            times[0].append(time_call(lambda: entry(batch), batch.device)[1])
            apply(model, recipe)
            times[1].append(time_call(lambda: entry(batch), batch.device)[1])
    # The first of each warms up.
    return statistics.median(times[1][1:]) / statistics.median(times[0][1:])
