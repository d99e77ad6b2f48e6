"""One run of a benchmark: all contenders at one batch size after the other, each batch size a group of rows."""

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm

import adamerge
from adamerge.core.errors import BadImages, BadOption
from adamerge.core.recipe import Recipe
from adamerge.experiments.benchmark.contenders import (
    MERGED,
    UNMERGED,
    Contender,
    Run,
    describe,
    find_ways,
    merged_contenders,
    twin,
    unmerged_contenders,
)
from adamerge.experiments.benchmark.entries import Entry
from adamerge.experiments.benchmark.rows import Row, append_rows, check_file
from adamerge.experiments.benchmark.timing import Timing, choose_inner, interleave, warm_up, watch_device, watch_memory
from adamerge.experiments.versions import versions
from adamerge.flops import Cost, CostCount, meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import remove
from adamerge.runtime.profiling import Stages

ROUNDS = 20
# Rounds go through so many batches of different images, where there are enough: a batch of one says little of others.
MOST_BATCHES = 8


def bench(
    model: nn.Module,
    images: Tensor,
    recipes: Mapping[str, Recipe] | Sequence[Entry],
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    rounds: int = ROUNDS,
    inner: int | None = None,
    unmerged: Sequence[str] | None = None,
    merged: Sequence[str] | None = None,
    others: Callable[[nn.Module], Sequence[Contender]] | None = None,
    name: str = "",
    weights: str = "",
    source: str = "",
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> list[Row]:
    """Time the unmerged model and every recipe, in every way to run them, in turn; the model is left as it was found.

    A contender that runs out of memory or fails in another way gives a row with the error instead of figures.

    Args:
        model: a supported model, where and in the dtype in which it is to be timed.
        images: what to run on, preprocessed for the model; taken again from the start where a batch needs more.
        recipes: recipes by name, or what `make_entries` gives.
        batch_sizes: each is a group of its own, with speed-ups against the best unmerged contender in it.
        rounds: how often each contender has its turn.
        inner: calls per turn; by default so many that a turn takes 30 ms.
        unmerged: ways to run the unmerged model, of `UNMERGED`; by default all that the device has.
        merged: ways to run recipes, of `MERGED`; by default all that the device has.
        others: gives further contenders, such as other libraries; it gets the unmerged model, to be copied by `twin`.
        name: what the model is called in the rows.
        weights: what its weights are called.
        source: what the images are called.
        out: a CSV file to add the rows to, after each batch size.
        seed: of the order of turns.
        progress: show progress bars.
    """
    _check(images, batch_sizes, rounds, inner)
    if out is not None:
        check_file(out)
    entries = [Entry(*pair) for pair in recipes.items()] if isinstance(recipes, Mapping) else list(recipes)
    parameter = next(model.parameters())
    device, images = parameter.device, images.to(parameter.device, parameter.dtype)
    plain = remove(twin(model)).eval()
    ways, merged_ways = find_ways(UNMERGED, unmerged, device), find_ways(MERGED, merged, device)
    prices = meter(plain)
    known = versions(str(device))
    common = {
        "model": name or type(model).__name__,
        "weights": weights,
        "images": source,
        "image_size": find_host(plain).image[-1],
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": known["device"],
        "versions": json.dumps({**known, "adamerge": adamerge.__version__}),
    }
    rows: list[Row] = []
    for size in batch_sizes:
        group = [*unmerged_contenders(plain, ways, prices)]
        for entry in entries:
            group += merged_contenders(plain, entry, merged_ways, prices)
        group += others(plain) if others is not None else ()
        turns = Turns(_batches(images, size, rounds), rounds, inner, seed, f"batch {size}", progress)
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        with _current(device), torch.inference_mode():
            results = turns.take(group)
            full = prices.unmerged()
        new = _compare([_row(result, full, {**common, "batch": size, "date": date}) for result in results])
        if out is not None:
            append_rows(out, new)
        rows += new
        del group, results
        _clear(device)
    return rows


def _batches(images: Tensor, size: int, rounds: int) -> tuple[Tensor, ...]:
    """Batches of different images, or one with repetitions where there are not enough."""
    number = max(1, min(len(images) // size, rounds, MOST_BATCHES))
    order = torch.arange(number * size, device=images.device) % len(images)
    return tuple(images[order].split(size))


def _check(images: Tensor, batch_sizes: Sequence[int], rounds: int, inner: int | None) -> None:
    if images.dim() != 4 or len(images) == 0:
        raise BadImages(f"expected images as a tensor (images, channels, height, width); got {tuple(images.shape)}")
    if not batch_sizes or any(size < 1 for size in batch_sizes):
        raise BadOption(f"batch sizes must be whole numbers >= 1, at least one of them; got {list(batch_sizes)}")
    if rounds < 1 or (inner is not None and inner < 1):
        raise BadOption(f"rounds and inner must be at least 1; got rounds={rounds} and inner={inner}")


@dataclass
class Result:
    """What is known of a contender after its turns."""

    contender: Contender
    run: Run | None = None
    warm: float = 0.0
    timing: Timing | None = None
    macs: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    peak_mb: float | None = None
    own_mb: float | None = None
    syncs: int | None = None
    error: str = ""


@dataclass(frozen=True)
class Turns:
    """Batches of images of one size, and how often to run on them."""

    batches: tuple[Tensor, ...]
    rounds: int
    inner: int | None
    seed: int
    label: str
    progress: bool

    def take(self, group: Sequence[Contender]) -> list[Result]:
        """Prepare all contenders, then time them in turn, then look at each alone."""
        shown = tqdm(group, f"{self.label}, preparing", leave=False, disable=not self.progress)
        results = [self._attempt(self._prepare, Result(contender, error=contender.error)) for contender in shown]
        ready = [result for result in results if not result.error]
        timings = interleave(
            [self._call(result) for result in ready],
            [self.inner or choose_inner(result.warm) for result in ready],
            self.device,
            rounds=self.rounds,
            seed=self.seed,
            label=self.label,
            progress=self.progress,
        )
        for result, timing in zip(ready, timings, strict=True):
            if isinstance(timing, str):
                result.error, result.run = timing, None
            else:
                result.timing = timing
            self._attempt(self._examine, result)
        return results

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self.batches[0].device

    def _call(self, result: Result) -> Callable[[int], Any]:
        """The contender on the batch of a round; in the same round all have the same."""
        run = result.run
        assert run is not None
        return lambda turn: run(self.batches[turn % len(self.batches)])

    def _attempt(self, do: Callable[[Result], None], result: Result) -> Result:
        """Do it unless the contender failed before; if it fails now, it says why and gives its memory back."""
        if result.error:
            return result
        try:
            do(result)
        except Exception as error:
            result.error, result.run = describe(error), None
        if result.error:
            _free(self.device)
        return result

    def _prepare(self, result: Result) -> None:
        contender, first = result.contender, self.batches[0]
        # A graph takes its memory when it is captured, all others when they are called.
        if contender.captured:
            result.run, result.peak_mb, result.own_mb = watch_memory(lambda: contender.prepare(first), self.device)
        else:
            result.run = contender.prepare(first)
        call = self._call(result)
        result.warm = warm_up(call, len(self.batches), self.device)
        if not contender.captured:
            _, result.peak_mb, result.own_mb = watch_memory(lambda: call(0), self.device)

    def _examine(self, result: Result) -> None:
        """What would disturb the turns: the profiler, the stages, and the price, which may read counts back."""
        contender, call, number = result.contender, self._call(result), len(self.batches)
        if not contender.captured:
            # Once in vain: compiled code is compiled again when somebody listens.
            with Stages(self.device):
                call(0)
            with Stages(self.device) as stages:
                for turn in range(number):
                    call(turn)
            if spent := stages.milliseconds:
                result.stages = {name: ms / number for name, ms in (*spent.items(), ("all", stages.total))}
        prices = [contender.price(batch) for batch in self.batches]
        for cost in get_args(CostCount):
            result.macs[cost] = torch.cat([getattr(price, cost) for price in prices]).mean().item()
        result.syncs, spent = watch_device(lambda: call(0), self.device)
        if contender.captured:
            result.stages = spent


def _row(result: Result, full: Cost, common: Mapping[str, Any]) -> Row:
    contender, timing, stages = result.contender, result.timing, result.stages
    figures: dict[str, Any] = {"peak_mb": result.peak_mb, "own_mb": result.own_mb, "syncs": result.syncs}
    if timing is not None:
        p20, p50, p80 = (timing.quantile(share) for share in (0.2, 0.5, 0.8))
        figures |= {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "images_per_second": 1e3 * common["batch"] / p50}
        figures |= {"rounds": len(timing.rounds), "inner": timing.inner}
    for cost, macs in result.macs.items():
        share = macs / getattr(full, cost).item()
        figures |= {f"cut_{cost}": 1 - share, f"ideal_{cost}": 1 / share}
    if stages:
        figures["stages"] = json.dumps({name: round(ms, 5) for name, ms in stages.items()})
        figures["deciding"] = (stages.get("decide", 0) + stages.get("merge", 0)) / stages["all"]
    return Row(**common, method=contender.method, way=contender.way, **contender.facts, **figures, error=result.error)


def _compare(rows: Sequence[Row]) -> list[Row]:
    """The rows of a group with their speed-ups."""
    unmerged = [row for row in rows if row.method == "none" and row.ms_p50 is not None]
    if not unmerged:
        return list(rows)
    best = min(unmerged, key=lambda row: row.ms_p50 or 0)
    return [_with_speedup(row, best) for row in rows]


def _with_speedup(row: Row, best: Row) -> Row:
    if row.ms_p50 is None or best.ms_p50 is None:
        return row
    speedup = best.ms_p50 / row.ms_p50
    shares = {
        f"reached_{cost}": (speedup - 1) / (ideal - 1)
        for cost in get_args(CostCount)
        if (ideal := getattr(row, f"ideal_{cost}")) is not None and ideal > 1 + 1e-9
    }
    return replace(row, speedup=speedup, best_unmerged=best.way, **shares)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Events and graphs belong to the current device, which need not be the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        # A device that a contender has broken refuses everything; the rows of the others must still be written.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def _clear(device: torch.device) -> None:
    """Make room for the next batch size: captured graphs hold memory, and compiled code is for one shape."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    _free(device)
