"""How long a batch takes on a CPU beside a process that keeps one core busy, with one thread and with several.

Also counts the operations of a batch that compute something: torch may divide each of them between its threads.
Adds rows to benchmarks/results/busy-neighbour.csv.  Run it on a machine that does nothing else.

    python benchmarks/busy_neighbour.py --threads 2
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import timm
import torch
from reading import RESULTS, append
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import adamerge
from adamerge import Recipe

MODEL = "vit_tiny_patch16_224"
WAYS = ("unmerged", "packed", "reference")


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs, apart from views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Time all ways, with and without a neighbour."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=Path, default=RESULTS / "busy-neighbour.csv")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = timm.create_model(MODEL).eval()  # pyright: ignore[reportPrivateImportUsage]
    images = torch.randn(given.batch, 3, 224, 224) * torch.linspace(0.2, 2, given.batch)[:, None, None, None]
    recipe = adamerge.methods.adamerge(14)
    recipe = recipe.with_stats(adamerge.calibrate(model, images, recipe, passes=1, progress=False))
    rows = []
    for threads in sorted({1, given.threads}):
        torch.set_num_threads(threads)
        for neighbours in (0, 1):
            with busy(neighbours):
                for way in WAYS:
                    seconds, operations = _measure(model, recipe, way, images, given.rounds)
                    rows.append(_row(way, images, threads, neighbours) | {"operations": operations, "seconds": seconds})
                    print(rows[-1], flush=True)
    append(given.rows, rows)


def _measure(model: nn.Module, recipe: Recipe, way: str, images: Tensor, rounds: int) -> tuple[float, int]:
    """The median time of a batch, and the number of its operations."""
    adamerge.remove(model)
    if way != "unmerged":
        adamerge.apply(model, recipe, way)  # pyright: ignore[reportArgumentType]
    with torch.inference_mode():
        with Operations() as operations:
            model(images)
        seconds = statistics.median(_timed(lambda: model(images)) for _ in range(rounds))
    return round(seconds, 4), operations.count


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep that many cores busy."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    for other in others:
        other.start()
    if others:
        time.sleep(3)
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


def _spin() -> None:
    while True:
        pass


def _row(way: str, images: Tensor, threads: int, neighbours: int) -> dict[str, object]:
    return {
        "model": MODEL,
        "way": way,
        "batch": len(images),
        "threads": threads,
        "cores": os.cpu_count(),
        "busy_neighbours": neighbours,
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
