"""Is the library still as fast?  Times two checkouts of it in turn, in one run, and prints the ratio of their times.

Each checkout runs in a process of its own; they take turns, so that a slow minute is slow for both.  Recipes are made
by the first and read by the second.  Rows are added to a CSV file.

    python benchmarks/same_speed.py --before ../old --after . --device cuda --out benchmarks/results/same-speed.csv
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of ViT-B/16 at the paper's 13.4 G tier; adaptive recipes are calibrated to about that cost.
MODEL = "vit_base_patch16_224"
CUT = 0.23
CALIBRATION = 32
WARM_UP = 3
SPAN_MS = 30.0
# Device -> batch sizes and ways to run a merged model there.
CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "cuda": ((256, 32, 8, 1), ("captured", "plain")),
    "cpu": ((8,), ("packed", "reference")),
}


@dataclass
class Worker:
    """A process that runs one checkout of the library."""

    label: str
    process: subprocess.Popen[str]

    @staticmethod
    def start(label: str, tree: Path, device: str) -> "Worker":
        """Start a process that imports the library from `tree`."""
        environment = {**os.environ, "PYTHONPATH": str((tree / "src").resolve())}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", device]
        pipe = subprocess.PIPE
        return Worker(label, subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))

    def ask(self, **question: Any) -> Any:
        """Send a question and wait for the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self.label!r} ended: see its error above")
        return json.loads(answer)


class Bench:
    """What a worker answers: recipes, prepared calls and their times."""

    def __init__(self, device: str):
        import timm
        import torch

        import adamerge
        from adamerge.embedded import scenes

        torch.manual_seed(0)
        self.torch, self.adamerge, self.device = torch, adamerge, torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model: Any = timm.create_model(MODEL).to(self.device, self.dtype).eval()
        size = self.model.patch_embed.img_size[0]
        most = max(CASES[device][0])
        drawn = scenes(0, most + CALIBRATION, seed=5, size=size, device=self.device).images
        self.images = ((drawn - 0.5) / 0.5).to(self.dtype)
        self.call: Callable[[], Any] = lambda: None

    def recipes(self) -> dict[str, str]:
        """Recipes as JSON, calibrated here."""
        methods, images = self.adamerge.methods, self.images[-CALIBRATION:]
        found = {"tome": methods.tome(8)}
        for name, recipe in {"adamerge": methods.adamerge(16.0), "dymu": methods.dymu(8.0)}.items():
            stats = self.adamerge.calibrate(self.model, images, recipe, how="sequential", progress=False)
            found[name] = recipe.with_stats(stats)
        found["preset"] = self.adamerge.presets.best(self.model, images, CUT)
        return {name: recipe.to_json() for name, recipe in found.items()}

    def prepare(self, recipe: str | None, way: str, batch: int) -> float:
        """Get one call ready; return its milliseconds when warm."""
        adamerge, images = self.adamerge, self.images[:batch].contiguous()
        adamerge.remove(self.model)
        if recipe is not None:
            runtime = way if way in ("packed", "reference") else "auto"
            adamerge.apply(self.model, adamerge.Recipe.from_json(recipe), runtime)
        run = adamerge.capture(self.model, images) if way == "captured" else self.model
        self.call = lambda: run(images)
        return min(self.time(1) for _ in range(WARM_UP))

    def time(self, calls: int) -> float:
        """Milliseconds a call, from an idle device to an idle device."""
        import time

        torch = self.torch
        wait = torch.cuda.synchronize if self.device.type == "cuda" else (lambda: None)
        with torch.inference_mode():
            wait()
            begin = time.perf_counter()
            for _ in range(calls):
                self.call()
            wait()
        return 1e3 * (time.perf_counter() - begin) / calls

    def about(self) -> dict[str, str]:
        """What the numbers were measured with."""
        name = self.torch.cuda.get_device_name() if self.device.type == "cuda" else platform.machine()
        return {"device": name, "torch": self.torch.__version__, "threads": str(self.torch.get_num_threads())}


def answer(device: str) -> None:
    """Answer questions from standard input until it ends."""
    bench = Bench(device)
    for line in sys.stdin:
        question = json.loads(line)
        result = getattr(bench, question.pop("what"))(**question)
        print(json.dumps(result), flush=True)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All cases of a device, both checkouts in turn: a row for each case, as soon as it is measured."""
    trees = {"before": arguments.before, "after": arguments.after}
    workers = [Worker.start(label, tree, arguments.device) for label, tree in trees.items()]
    recipes = workers[0].ask(what="recipes")
    about = workers[0].ask(what="about")
    batches, ways = CASES[arguments.device]
    cases = [("none", None, "plain", batch) for batch in batches]
    cases += [(name, text, way, batch) for batch in batches for way in ways for name, text in recipes.items()]
    for name, text, way, batch in cases:
        warm = [worker.ask(what="prepare", recipe=text, way=way, batch=batch) for worker in workers]
        calls = max(1, min(50, round(SPAN_MS / min(warm))))
        times: list[list[float]] = [[], []]
        for turn in range(arguments.rounds):
            # Who goes first changes from round to round.
            for index in (0, 1) if turn % 2 else (1, 0):
                times[index].append(workers[index].ask(what="time", calls=calls))
        before, after = (statistics.median(column) for column in times)
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        row = {"model": MODEL, "batch": batch, "method": name, "way": way, "before_ms": before, "after_ms": after}
        row |= {"ratio": after / before, "rounds": arguments.rounds, **about, "date": date}
        print(f"{name:10} {way:10} batch {batch:4}: {before:9.3f} -> {after:9.3f} ms, {after / before:.3f}", flush=True)
        yield row


def main() -> None:
    """Measure and add the rows to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", metavar="DEVICE", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="a checkout of the library")
    parser.add_argument("--after", type=Path, default=Path("."), help="another")
    parser.add_argument("--device", choices=list(CASES), default="cpu")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, help="a CSV file that rows are added to")
    arguments = parser.parse_args()
    if arguments.worker:
        answer(arguments.worker)
        return
    if arguments.before is None:
        parser.error("--before is needed: a checkout of the library to compare with")
    # Not at the top: a worker imports the library from another checkout, which may lack what this module needs.
    from reading import append

    for row in measure(arguments):
        if arguments.out is not None:
            append(arguments.out, [row])


if __name__ == "__main__":
    main()
