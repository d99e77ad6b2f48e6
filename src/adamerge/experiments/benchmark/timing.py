"""Time in turns: contenders run one after the other, round after round, so that a slow minute is slow for all."""

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

# A span between two readings of the clock lasts at least this long, so that reading it costs nothing.
SPAN_MS = 30.0
MOST_INNER = 50
WARM_UP = 3
WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"}
FORWARD = "adamerge.forward"


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call, one figure for each round; a round makes `inner` calls."""

    rounds: tuple[float, ...]
    inner: int

    def quantile(self, share: float) -> float:
        """The time that this share of the rounds stays under."""
        return torch.tensor(self.rounds, dtype=torch.float64).quantile(share).item()


def warm_up(call: Callable[[int], Any], turns: int, device: torch.device) -> float:
    """Call until lazy set-up is done, on every batch that will come; milliseconds of the fastest call."""
    return min(time_calls(call, turn, 1, device) for turn in range(max(turns, WARM_UP)))


def choose_inner(milliseconds: float) -> int:
    """How many calls make a span long enough to be read."""
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
    """Time all calls in turn, in another order each round; one that fails gives what it said and drops out.

    A call gets the number of the round.
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
    """Milliseconds per call over `inner` calls, from an idle device to an idle device.

    The device waits before the first: a contender whose launches are slow must not queue them while another runs.
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
    """What the call gives, the most memory in use meanwhile, and how much of it the call took, in 10^6 bytes."""
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
    """How often a call makes the host wait for the device, and how long the device worked at each stage."""
    if device.type != "cuda":
        return None, {}
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        with record_function(FORWARD):
            call()
        torch.cuda.synchronize(device)
    events = seen.events() or ()
    counted = waits_within(events)
    return _warned_waits(call) if counted is None else counted, stages_of_kernels(events)


def stages_of_kernels(events: Iterable[Any]) -> dict[str, float]:
    """Milliseconds that the device spent in the kernels of each stage, in all others and in all; nothing where none of
    them is known.

    A kernel counts from the end of the one that ended before it: of two side by side the later to end counts from the
    end of the other, and one that was put in place early is not charged for its waiting.
    """
    spent: dict[str, float] = {}
    over = 0.0
    kernels = [event for event in events if str(event.device_type).endswith("CUDA") and event.name != FORWARD]
    for event in sorted(kernels, key=lambda event: event.time_range.end):
        stage = KERNELS.get(event.name, "others")
        spent[stage] = spent.get(stage, 0.0) + (event.time_range.end - max(event.time_range.start, over)) / 1e3
        over = event.time_range.end
    return {**spent, "all": sum(spent.values())} if spent.keys() - {"others"} else {}


def _warned_waits(call: Callable[[], Any]) -> int:
    """The waits that torch itself warns of, for machines that do not let the profiler see the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing CUDA operation" in str(note.message) for note in notes)


def waits_within(events: Iterable[Any]) -> int | None:
    """The waits inside the forward pass; None where the profiler saw nothing of CUDA and cannot know.

    The profiler itself waits at its end, hence the look at the times.
    """
    found = list(events)
    if not any(event.name.startswith("cuda") for event in found):
        return None
    # The profiler also repeats the mark on the device's own time line.
    marks = [event.time_range for event in found if event.name == FORWARD and str(event.device_type).endswith("CPU")]
    if not marks:
        return None
    mark = marks[0]
    return sum(event.name in WAITS and mark.start <= event.time_range.start <= mark.end for event in found)
