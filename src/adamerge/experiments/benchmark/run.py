"""A benchmark run: for each batch size, all contenders are timed in turn and give a group of rows."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, get_args

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadImages, BadOption, BadOutput
from adamerge.core.files import check_can_write
from adamerge.core.recipe import Recipe
from adamerge.experiments.benchmark.contenders import (
    MERGED,
    UNMERGED,
    Contender,
    Way,
    find_ways,
    merged_contenders,
    twin,
    unmerged_contenders,
)
from adamerge.experiments.benchmark.entries import Entry
from adamerge.experiments.benchmark.requests import note_request
from adamerge.experiments.benchmark.rows import BenchmarkRow, append_rows, check_file
from adamerge.experiments.benchmark.turns import ContenderResult, Turns, free_memory
from adamerge.experiments.versions import versions
from adamerge.flops import Cost, CostCount, Meter, meter
from adamerge.hosts.base import find_host
from adamerge.patching.apply import remove

ROUNDS = 20
# The rounds use up to this many different batches, because adaptive counts differ from batch to batch.
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
) -> list[BenchmarkRow]:
    """Time the unmerged model and every recipe, in every way to run them; the model itself is not changed.

    A contender that fails, for example for lack of memory, gives a row with the error instead of figures.

    Args:
        model: a supported model, on the device and in the dtype to time.
        images: preprocessed images (n, channels, height, width); repeated where a batch needs more.
        recipes: recipes by name, or the entries of `make_entries`.
        batch_sizes: each gives a group of rows, with speed-ups over the fastest unmerged contender of the group.
        rounds: how often each contender is timed.
        inner: calls per round; by default as many as take 30 ms.
        unmerged: ways to run the unmerged model, names of `UNMERGED`; by default all that the device supports.
        merged: ways to run recipes, names of `MERGED`; by default all that the device supports.
        others: takes the unmerged model and gives further contenders, such as other libraries on a `twin` of it.
        name: the model's name in the rows.
        weights: the name of its weights.
        source: the name of the images.
        out: a CSV file; the rows of each batch size are added to it.  If that fails, the error has them in `result`.
        seed: for the order of the contenders in each round.
        progress: show progress bars.
    """
    _check(images, batch_sizes, rounds, inner, out)
    entries = [Entry(*pair) for pair in recipes.items()] if isinstance(recipes, Mapping) else list(recipes)
    images = images.to(next(model.parameters()))
    plain = remove(twin(model)).eval()
    ways = find_ways(UNMERGED, unmerged, images.device), find_ways(MERGED, merged, images.device)
    prices = meter(plain)
    common = {"model": name or type(model).__name__, "weights": weights, "images": source, **_about(plain)}
    rows: list[BenchmarkRow] = []
    _begin(out, common, batch_sizes)
    for size in batch_sizes:
        group = [*_contenders(plain, entries, ways, prices), *(others(plain) if others is not None else ())]
        turns = Turns(_batches(images, size, rounds), rounds, inner, seed, f"batch {size}", progress)
        facts = {**common, "batch": size, "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
        with _current(images.device), torch.inference_mode():
            results = turns.take(group)
        new = _compare([_row(result, prices.unmerged(), facts) for result in results])
        rows += new
        _add(out, new, rows)
        del group, results
        _clear(images.device)
    return rows


def _begin(out: str | os.PathLike[str] | None, common: Mapping[str, Any], sizes: Sequence[int]) -> None:
    """Write what was asked for, and a file with the names of the columns: a report can read the run from now on."""
    if out is None:
        return
    note_request(out, {key: common[key] for key in ("model", "image_size", "dtype", "device")}, sizes)
    # A full disk stops the run after its first rows, which are shown then.
    with suppress(BadOutput):
        append_rows(out, [])


def _add(out: str | os.PathLike[str] | None, new: Sequence[BenchmarkRow], rows: Sequence[BenchmarkRow]) -> None:
    """Append `new` to the file, if there is one; if that fails, the error has all rows in `result`."""
    if out is None:
        return
    try:
        append_rows(out, new)
    except BadOutput as error:
        error.result = list(rows)
        raise


def _contenders(
    model: nn.Module, entries: Sequence[Entry], ways: tuple[Mapping[str, Way], Mapping[str, Way]], prices: Meter
) -> Iterator[Contender]:
    """The unmerged model in each of the first ways, every entry in each of the second."""
    yield from unmerged_contenders(model, ways[0], prices)
    for entry in entries:
        yield from merged_contenders(model, entry, ways[1], prices)


def _about(model: nn.Module) -> dict[str, Any]:
    """The columns that say what was run and with which versions."""
    parameter = next(model.parameters())
    known = versions(str(parameter.device))
    return {
        "image_size": find_host(model).image[-1],
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": known["device"],
        "versions": json.dumps(known),
    }


def _batches(images: Tensor, size: int, rounds: int) -> tuple[Tensor, ...]:
    """Batches of different images; a single batch with repeated images if there are fewer than `size`."""
    number = max(1, min(len(images) // size, rounds, MOST_BATCHES))
    order = torch.arange(number * size, device=images.device) % len(images)
    return tuple(images[order].split(size))


def _check(
    images: Tensor, batch_sizes: Sequence[int], rounds: int, inner: int | None, out: str | os.PathLike[str] | None
) -> None:
    """Refuse bad arguments of `bench` before anything is timed."""
    if images.dim() != 4 or len(images) == 0:
        raise BadImages(f"expected images as a tensor (images, channels, height, width); got {tuple(images.shape)}")
    if not batch_sizes or any(size < 1 for size in batch_sizes):
        raise BadOption(f"batch sizes must be whole numbers >= 1, at least one of them; got {list(batch_sizes)}")
    if rounds < 1 or (inner is not None and inner < 1):
        raise BadOption(f"rounds and inner must be at least 1; got rounds={rounds} and inner={inner}")
    if out is not None:
        check_can_write(out)
        check_file(out)


def _row(result: ContenderResult, full: Cost, common: Mapping[str, Any]) -> BenchmarkRow:
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
    return BenchmarkRow(
        **common, method=contender.method, way=contender.way, **contender.facts, **figures, error=result.error
    )


def _compare(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    """The rows of a group with their speed-ups over its fastest unmerged row."""
    unmerged = [row for row in rows if row.method == "none" and row.ms_p50 is not None]
    if not unmerged:
        return list(rows)
    best = min(unmerged, key=lambda row: row.ms_p50 or 0)
    return [_with_speedup(row, best) for row in rows]


def _with_speedup(row: BenchmarkRow, best: BenchmarkRow) -> BenchmarkRow:
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
    """Makes the model's device the current one, which CUDA events and graphs need."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _clear(device: torch.device) -> None:
    """Release what one batch size used: memory of captured graphs, and code compiled for its shape."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    free_memory(device)
