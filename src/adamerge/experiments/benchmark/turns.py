"""Runs a group of contenders on the same batches: warm-up, interleaved timing, then costs, stages and memory."""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from adamerge.experiments.benchmark.contenders import Contender, Run, describe
from adamerge.experiments.benchmark.timing import Timing, choose_inner, interleave, warm_up, watch_device, watch_memory
from adamerge.flops import CostCount
from adamerge.runtime.profiling import Stages


@dataclass
class ContenderResult:
    """What was measured of a contender.

    `macs` holds the mean multiply-accumulates per image by cost count, `stages` milliseconds by stage.  `warm` is the
    fastest warm-up call in milliseconds.  `error` says why figures are missing.
    """

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
    """Batches of one size, and how often each contender runs on them.

    Attributes:
        batches: the batches; round `i` uses batch `i` modulo their number, for all contenders.
        rounds: how often each contender is timed.
        inner: calls per round; None chooses a number for each contender.
        seed: for the order of the contenders in each round.
        label: the text of the progress bar.
        progress: show progress bars.
    """

    batches: tuple[Tensor, ...]
    rounds: int
    inner: int | None
    seed: int
    label: str
    progress: bool

    def take(self, group: Sequence[Contender]) -> list[ContenderResult]:
        """Prepare all contenders, time them in turn, then profile each of them separately."""
        shown = tqdm(group, f"{self.label}, preparing", leave=False, disable=not self.progress)
        results = [
            self._attempt(self._prepare, ContenderResult(contender, error=contender.error)) for contender in shown
        ]
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
            self._attempt(self._profile, result)
        return results

    @property
    def device(self) -> torch.device:
        """The device of the images."""
        return self.batches[0].device

    def _call(self, result: ContenderResult) -> Callable[[int], Any]:
        """Takes the number of a round and runs the contender on its batch."""
        run = result.run
        assert run is not None
        return lambda turn: run(self.batches[turn % len(self.batches)])

    def _attempt(self, step: Callable[[ContenderResult], None], result: ContenderResult) -> ContenderResult:
        """Run `step` unless the contender has failed before; on an error, record it and free the memory."""
        if result.error:
            return result
        try:
            step(result)
        except Exception as error:
            result.error, result.run = describe(error), None
        if result.error:
            free_memory(self.device)
        return result

    def _prepare(self, result: ContenderResult) -> None:
        contender, first = result.contender, self.batches[0]
        # A CUDA graph allocates its memory at capture; all others allocate in each call.
        if contender.captured:
            result.run, result.peak_mb, result.own_mb = watch_memory(lambda: contender.prepare(first), self.device)
        else:
            result.run = contender.prepare(first)
        call = self._call(result)
        result.warm = warm_up(call, len(self.batches), self.device)
        if not contender.captured:
            _, result.peak_mb, result.own_mb = watch_memory(lambda: call(0), self.device)

    def _profile(self, result: ContenderResult) -> None:
        """Measure what would disturb the timing: stages, synchronisations, and costs, which read counts back."""
        contender, call, number = result.contender, self._call(result), len(self.batches)
        if not contender.captured:
            # The first call is not measured: compiled code is compiled again when stages are recorded.
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


def free_memory(device: torch.device) -> None:
    """Release unused memory of the device."""
    gc.collect()
    if device.type == "cuda":
        # After a fatal CUDA error every call fails; the rows of the other contenders must still be written.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
