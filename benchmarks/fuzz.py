"""Random cases for as long as one lets it: recipes on tiny models of all libraries, or broken files.

A case is drawn from the seed and its number, so that any case can be repeated with `--case`.  A run goes on after the
last case of its seed in benchmarks/results/fuzz.csv.  Every chunk adds a row there, also when a run is stopped.

Kinds: `recipes` compares the packed backend with the reference, an image alone with the same among others, and the
model before and after; `kernels` does so with the Triton kernels in Triton's interpreter, which is far slower; `cuda`
with the kernels on a CUDA device, plainly and as CUDA graphs; `files` reads broken recipes, statistics, images and
weights.
Columns: `ran`; `refused` by an error of the library's own; `host`, where the model cannot run even without merging,
such as a convolution of an unusual dtype; `near_ties` ran, with plans that rounding changed: equal in float64.

    python benchmarks/fuzz.py --seconds 600
    python benchmarks/fuzz.py --kind recipes --seed 0 --case 1234
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

KINDS = ("recipes", "kernels", "cuda", "files")
COUNTED = ("ran", "refused", "host", "near_ties", "failures")
# Gives what became of a case, and what is wrong; with the third argument it prints all about it.
Try = Callable[[int, int, bool], tuple[str, list[str]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try cases until the time or the number is used up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="recipes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9, help="stop after this many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--chunk", type=int, default=1000, help="cases in a row of the results")
    parser.add_argument("--case", type=int, help="only this case, with everything about it")
    parser.add_argument("--rows", type=Path, help="the CSV file to add rows to")
    given = parser.parse_args(arguments)
    # A run in the background is stopped by SIGTERM, and writes its row as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.kind == "kernels":
        os.environ["TRITON_INTERPRET"] = "1"
    try_case = _how_to_try(given.kind)
    if given.case is not None:
        outcome, problems = try_case(given.seed, given.case, True)
        print(f"{outcome}; {len(problems)} problems", *problems, sep="\n")
        return int(bool(problems))
    return _try_many(given, try_case)


def _try_many(given: argparse.Namespace, try_case: Try) -> int:
    from reading import RESULTS

    rows = given.rows or RESULTS / "fuzz.csv"
    first, earlier = _done(rows, given.kind, given.seed)
    until, left, failures = time.monotonic() + given.seconds, given.cases, 0
    print(f"{given.kind}, seed {given.seed}: {earlier} cases so far; going on with case {first}", flush=True)
    while left > 0 and time.monotonic() < until:
        row = _chunk(given, try_case, first, min(given.chunk, left), until)
        if not row["cases"]:
            break
        first, left, failures = first + row["cases"], left - row["cases"], failures + row["failures"]
        _add(rows, row)
        each = 1000 * row["seconds"] / row["cases"]
        print(f"{first} cases, {failures} failures in this run, {each:.0f} ms for each", flush=True)
        if row["stopped"]:
            break
    return int(failures > 0)


def _chunk(given: argparse.Namespace, try_case: Try, first: int, cases: int, until: float) -> dict[str, Any]:
    """Try a chunk and count; it ends early when time is over or the user stops it."""
    begin, done, stopped = time.monotonic(), 0, False
    counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
    try:
        for number in range(first, first + cases):
            if time.monotonic() > until:
                break
            outcome, problems = try_case(given.seed, number, False)
            counts["failures" if problems else outcome] += 1
            if problems or outcome == "near_ties":
                print(f"case {number}: {'; '.join(problems) or 'a near tie'}", flush=True)
            done += 1
    except KeyboardInterrupt:
        stopped = True
    return {
        "kind": given.kind,
        "seed": given.seed,
        "first": first,
        "cases": done,
        **counts,
        "seconds": round(time.monotonic() - begin, 1),
        "stopped": stopped,
    }


def _add(path: Path, row: dict[str, Any]) -> None:
    from reading import ROOT, append

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    kept = {name: value for name, value in row.items() if name != "stopped"}
    append(path, [{**kept, "commit": commit.strip() or "unknown", "date": date}])


def _done(path: Path, kind: str, seed: int) -> tuple[int, int]:
    """The number of the next case, and how many cases of this kind there were with any seed."""
    from adamerge.experiments.csv_tables import read_table

    if not path.exists():
        return 0, 0
    rows = [row for row in read_table(path.read_text(encoding="utf-8")) if row["kind"] == kind]
    own = [int(row["first"]) + int(row["cases"]) for row in rows if row["seed"] == str(seed)]
    return max(own, default=0), sum(int(row["cases"]) for row in rows)


def _how_to_try(kind: str) -> Try:
    import torch

    torch.set_num_threads(1)
    if kind == "files":
        from fuzz_files import try_file

        return try_file
    from fuzz_cases import draw_case
    from fuzz_checks import try_case as check

    def try_case(seed: int, number: int, loud: bool) -> tuple[str, list[str]]:
        try:
            case = draw_case(seed, number)
            if loud:
                print(case)
            outcome = check(case, kind)
        except Exception:
            # Drawing a recipe raises only the library's own errors, and a check raises none.
            return "failed", [traceback.format_exc()]
        return ("near_ties" if outcome.near_tie else outcome.kind), outcome.problems

    return try_case


if __name__ == "__main__":
    sys.exit(main())
