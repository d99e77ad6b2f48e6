"""Runs a merged model from several threads on streams of their own, with random batch sizes, for as long as one wants.

Every output is compared with that of the same model without CUDA graphs, and memory is watched.  One row is added to a
CSV file.  The exit status is 1 if an output differed or memory grew.

    python benchmarks/gpu_load.py --seconds 60 [--threads 8] [--method tome] [--dtype float32] [--out FILE.csv]
"""

import argparse
import datetime
import random
import sys
import threading
import time
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from reading import append
from torch import Tensor, nn

import adamerge
from adamerge.methods import METHODS

OPTIONS: dict[str, dict[str, Any]] = {"tome": {"r": 8}, "adamerge": {"r_max": 16.0}, "dymu": {"r": 8.0}}
OPTIONS |= {"ats": {"tokens": 120}, "pitome": {"r": 8}, "vid_tldr": {"r": 8}}
SIZE = 224
LARGEST = 64
# How far outputs may be apart, of their largest: a batch that runs in a larger graph rounds otherwise.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
# Memory is flat if its peak in the second half of the time is at most this many times that of the first half.
GROWTH = 1.1


class Load:
    """Counts what the threads did."""

    def __init__(self, model: nn.Module, batches: list[Tensor], expected: list[Tensor], tolerance: float):
        self.model, self.batches, self.expected, self.tolerance = model, batches, expected, tolerance
        self.lock = threading.Lock()
        self.calls = self.images = self.wrong = 0
        self.errors: list[str] = []
        self.stop = threading.Event()

    def work(self, seed: int) -> None:
        """Call the model on random batches until told to stop."""
        chance = random.Random(seed)
        try:
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                while not self.stop.is_set():
                    self._call(chance.randrange(len(self.batches)))
        except Exception as error:  # A thread that ends silently would look like success.
            self.errors.append(f"{type(error).__name__}: {error}")
            self.stop.set()

    def _call(self, index: int) -> None:
        out, expected = self.model(self.batches[index]), self.expected[index]
        differs = bool((out - expected).abs().max() > self.tolerance * expected.abs().max())
        with self.lock:
            self.calls += 1
            self.images += len(out)
            self.wrong += differs


def build(method: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A merged model, and the same without CUDA graphs."""
    import timm

    torch.manual_seed(0)
    model: Any = timm.create_model("vit_tiny_patch16_224", num_classes=10).to("cuda", dtype).eval()
    # Heads are made of zeros; outputs without spread would agree by accident.
    torch.nn.init.normal_(model.head.weight)
    recipe = METHODS[method](**OPTIONS[method])
    if recipe.adaptive is not None:
        images = torch.randn(32, 3, SIZE, SIZE, device="cuda", dtype=dtype)
        recipe = recipe.with_stats(adamerge.calibrate(model, images, recipe, progress=False))
    plain = adamerge.apply(deepcopy(model), recipe, cuda_graphs=False)
    return adamerge.apply(model, recipe), plain


def watch(load: Load, seconds: float, threads: int) -> list[int]:
    """Run the threads for some seconds; the bytes reserved on the device, about every second."""
    workers = [threading.Thread(target=load.work, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    reserved, end = [], time.monotonic() + seconds
    while time.monotonic() < end and not load.stop.wait(min(1.0, seconds / 10)):
        reserved.append(torch.cuda.memory_reserved())
    load.stop.set()
    for worker in workers:
        worker.join()
    torch.cuda.synchronize()
    return reserved


def main() -> None:
    """Run the load and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--shapes", type=int, default=200, help="how many random batches, of 1 to 64 images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="tome", choices=sorted(OPTIONS))
    parser.add_argument("--dtype", default="float32", choices=sorted(TOLERANCES))
    parser.add_argument("--out", type=Path, help="a CSV file that a row is added to")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    dtype, chance = getattr(torch, arguments.dtype), random.Random(arguments.seed)
    model, plain = build(arguments.method, dtype)
    everything = torch.randn(LARGEST, 3, SIZE, SIZE, device="cuda", dtype=dtype)
    sizes = [chance.randint(1, LARGEST) for _ in range(arguments.shapes)]
    batches = [everything[chance.randint(0, LARGEST - size) :][:size] for size in sizes]
    with torch.inference_mode():
        expected = [plain(batch) for batch in batches]
    torch.cuda.synchronize()
    load = Load(model, batches, expected, TOLERANCES[arguments.dtype])
    reserved = watch(load, arguments.seconds, arguments.threads)
    half = max(1, len(reserved) // 2)
    first, second = max(reserved[:half], default=0), max(reserved[half:], default=0)
    flat = second <= GROWTH * first
    row = {"method": arguments.method, "dtype": arguments.dtype, "seconds": arguments.seconds}
    row |= {"threads": arguments.threads, "shapes": arguments.shapes, "seed": arguments.seed, "calls": load.calls}
    row |= {"images": load.images, "wrong": load.wrong, "errors": len(load.errors)}
    row |= {"reserved_mb_first_half": first >> 20, "reserved_mb_second_half": second >> 20, "memory_flat": flat}
    row |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    row |= {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    print("\n".join(f"{name:<24}{value}" for name, value in row.items()))
    print("\n".join(load.errors))
    if arguments.out is not None:
        append(arguments.out, [row])
    sys.exit(0 if flat and not load.wrong and not load.errors else 1)


if __name__ == "__main__":
    main()
