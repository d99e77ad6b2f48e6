"""Interleaved timing: in each round all contenders run once, so that slow periods affect all of them."""

import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from adamerge.experiments.benchmark.contenders import describe
from adamerge.runtime.profiling import KERNELS
from adamerge.timing import time_call

# Milliseconds between two clock readings, so that reading the clock is negligible.
SPAN_MS = 30.0
MOST_INNER = 50
WARM_UP = 3
SYNCS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"}
FORWARD = "adamerge.forward"


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call for each round; a round makes `inner` calls."""

    rounds: tuple[float, ...]
    inner: int

    def quantile(self, share: float) -> float:
        """The quantile of the rounds, in milliseconds; `share` is from 0 to 1."""
        return torch.tensor(self.rounds, dtype=torch.float64).quantile(share).item()


def warm_up(call: Callable[[int], Any], turns: int, device: torch.device) -> float:
    """Call on every batch, at least `WARM_UP` times; gives the milliseconds of the fastest call."""
    return min(time_calls(call, turn, 1, device) for turn in range(max(turns, WARM_UP)))


def choose_inner(milliseconds: float) -> int:
    """The number of calls that take about `SPAN_MS`, from the milliseconds of one."""
    return max(1, min(MOST_INNER, round(SPAN_MS / max(milliseconds, 1e-6))))


def interleave(
    calls: Sequence[Callable[[int], Any]],
    inner: Sequence[int],
    device: torch.device,
    *,
    rounds: int,
    seed: int = 0,
    label: str = "",
    progress: bool = True,
) -> list[Timing | str]:
    """Time all calls in turn, in a new random order in each round.

    A call takes the number of the round.  A call that raises is not run again; its result is the error text.
    """
    times: list[list[float]] = [[] for _ in calls]
    failed: dict[int, str] = {}
    shuffler = random.Random(seed)
    for turn in tqdm(range(rounds), label, leave=False, disable=not progress):
        order = [index for index in range(len(calls)) if index not in failed]
        shuffler.shuffle(order)
        for index in order:
            try:
                times[index].append(time_calls(calls[index], turn, inner[index], device))
            except Exception as error:
                failed[index] = describe(error)
    return [failed.get(index, Timing(tuple(times[index]), inner[index])) for index in range(len(calls))]


def time_calls(call: Callable[[int], Any], turn: int, inner: int, device: torch.device) -> float:
    """Milliseconds per call over `inner` calls.

    The device is synchronised before the first call, so that no launches are queued while another contender runs.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(inner):
            call(turn)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / inner

    def repeat() -> None:
        for _ in range(inner):
            call(turn)

    return 1e3 * time_call(repeat, device)[1] / inner


def watch_memory(call: Callable[[], Any], device: torch.device) -> tuple[Any, float | None, float | None]:
    """The result of a call, the peak of allocated device memory, and the call's part of it, in 10^6 bytes."""
    if device.type != "cuda":
        return call(), None, None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return result, peak / 1e6, (peak - before) / 1e6


def watch_device(call: Callable[[], Any], device: torch.device) -> tuple[int | None, dict[str, float]]:
    """The number of synchronisations of a call, and milliseconds of device time by stage."""
    if device.type != "cuda":
        return None, {}
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        with record_function(FORWARD):
            call()
        torch.cuda.synchronize(device)
    events = seen.events() or ()
    counted = count_syncs(events)
    return _warned_syncs(call) if counted is None else counted, stages_of_kernels(events)


def stages_of_kernels(events: Iterable[Any]) -> dict[str, float]:
    """Milliseconds of device time by stage, of other kernels ("others") and in total ("all").

    Empty if no kernel belongs to a known stage.  A kernel counts from its start or from the end of the kernel that
    ended before it, whichever is later.  So time that two kernels overlap is counted once, and a kernel that starts
    early and waits for its predecessor is not charged for the wait.
    """
    spent: dict[str, float] = {}
    over = 0.0
    kernels = [event for event in events if str(event.device_type).endswith("CUDA") and event.name != FORWARD]
    for event in sorted(kernels, key=lambda event: event.time_range.end):
        stage = KERNELS.get(event.name, "others")
        spent[stage] = spent.get(stage, 0.0) + (event.time_range.end - max(event.time_range.start, over)) / 1e3
        over = event.time_range.end
    return {**spent, "all": sum(spent.values())} if spent.keys() - {"others"} else {}


def _warned_syncs(call: Callable[[], Any]) -> int:
    """The number of synchronisations that torch warns of, for machines on which the profiler cannot see the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing CUDA operation" in str(note.message) for note in notes)


def count_syncs(events: Iterable[Any]) -> int | None:
    """The number of synchronisations inside the forward pass; None if the profiler recorded no CUDA calls.

    Only events inside the forward pass count, because the profiler itself synchronises at its end.
    """
    found = list(events)
    if not any(event.name.startswith("cuda") for event in found):
        return None
    # The profiler also records the mark on the device's timeline.
    marks = [event.time_range for event in found if event.name == FORWARD and str(event.device_type).endswith("CPU")]
    if not marks:
        return None
    mark = marks[0]
    return sum(event.name in SYNCS and mark.start <= event.time_range.start <= mark.end for event in found)
