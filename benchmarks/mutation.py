"""How many small mistakes in the library its tests notice: mutation testing, by area, in a copy of the source tree.

For each area a sample of mutants (benchmarks/mutants.py) is drawn.  Each is tried with the tests nearest to its file;
it is killed if one of them fails.  The state file keeps what was tried, so that a stopped run can go on.  A finished
area adds a row to benchmarks/results/mutation.csv.  Mutants that change no behaviour are listed, with the reason, in
benchmarks/equivalent_mutants.tsv and are not counted.

    python benchmarks/mutation.py --area methods --number 60 --state /tmp/mutation.jsonl
"""

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mutants import Mutant, mutants
from mutation_areas import AREAS, FIRST

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "mutation.csv"
EQUIVALENT = ROOT / "benchmarks" / "equivalent_mutants.tsv"
COPIED = ("src", "tests", "benchmarks", "docs", "pyproject.toml")
# A mutant may take this many times as much processor time as the tests without one, and this many times as long as that
# processor time: other processes may have the cores.
PATIENCE = 3.0
WAITING = 20.0
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Task:
    """A mutant of a file of an area, and the tests to try it with."""

    area: str
    file: str
    mutant: Mutant
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.file}: {self.mutant.name}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Try a sample of mutants of each area."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", choices=AREAS, help="repeatable; all areas by default")
    parser.add_argument("--number", type=int, default=50, help="mutants for each area; 0 lists what there is")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose sources and tests are tried")
    parser.add_argument("--label", default="", help="a name for the rows, such as a version")
    parser.add_argument("--state", type=Path, help="keeps what was tried")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the CSV file to add rows to")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which to stop")
    given = parser.parse_args(arguments)
    # An interrupted run ends its children.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    state = State(given.state)
    until = time.monotonic() + given.time_limit
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(given.root, Path(folder))
        for area in given.area or AREAS:
            tasks = sample(tree, area, given.number, given.seed)
            print(f"{area}: {len(tasks)} mutants", flush=True)
            if given.number and try_all(tree, tasks, state, until):
                add_row(given.rows, summarise(area, tasks, state, given.label, given.seed))


def sample(tree: Path, area: str, number: int, seed: int) -> list[Task]:
    """Mutants of an area, drawn at random; all of them if there are no more, or if `number` is 0."""
    globs, tests = AREAS[area]
    files = sorted({path for glob in globs for path in (tree / "src" / "adamerge").glob(glob)})
    skipped = equivalent_names(EQUIVALENT)
    tasks = []
    for path in files:
        name = path.relative_to(tree / "src" / "adamerge").as_posix()
        nearest = nearest_tests(tree, name, tests)
        tasks += [Task(area, name, mutant, nearest) for mutant in mutants(path.read_text(encoding="utf-8"))]
    tasks = [task for task in tasks if task.name not in skipped]
    if not 0 < number < len(tasks):
        return tasks
    # Every mutant has its own number, so that a mutant more or less in a file does not change the whole sample.
    rank = {task.name: random.Random(f"{seed} {task.name}").random() for task in tasks}
    return sorted(tasks, key=lambda task: rank[task.name])[:number]


def nearest_tests(tree: Path, name: str, tests: Sequence[str]) -> tuple[str, ...]:
    """The test files of an area that there are, the nearest to a source file first.

    These are the ones that `FIRST` has for the file, then those whose name has the name of the file.
    """
    found, first, stem = [], FIRST.get(name, ()), Path(name).stem
    for test in tests:
        path = tree / test
        found += sorted(path.glob("test_*.py")) if path.is_dir() else [path] if path.exists() else []
    names = [path.relative_to(tree).as_posix() for path in found]
    ahead = [test for test in first if test in names]
    names.sort(key=lambda test: (ahead.index(test) if test in ahead else len(ahead), stem not in Path(test).stem))
    return tuple(names)


def equivalent_names(path: Path) -> set[str]:
    """The mutants that change no behaviour: one for each line, followed by a tab and the reason."""
    if not path.exists():
        return set()
    return {line.split("\t")[0] for line in path.read_text(encoding="utf-8").splitlines() if line}


class State:
    """What was tried: one line of JSON for each mutant."""

    def __init__(self, path: Path | None):
        self.path = path
        self.known: dict[str, str] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                name, outcome = json.loads(line)
                self.known[name] = outcome

    def record(self, name: str, outcome: str) -> None:
        self.known[name] = outcome
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, outcome]) + "\n")


def copy_tree(root: Path, folder: Path) -> Path:
    """A copy of the sources and tests; mutants are written there and never into the checkout."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=ignore)
        elif (root / name).exists():
            shutil.copy2(root / name, folder / name)
    return folder


def try_all(tree: Path, tasks: Sequence[Task], state: State, until: float) -> bool:
    """Try the tasks that are not known yet; returns whether all are known afterwards."""
    waiting = [task for task in tasks if task.name not in state.known]
    limits: dict[frozenset[str], float] = {}
    for done, task in enumerate(waiting):
        if time.monotonic() > until:
            return False
        kind = frozenset(task.tests)
        if kind not in limits:
            limits[kind] = PATIENCE * time_tests(tree, task.tests, state) + 10
        outcome, seconds = try_mutant(tree, task, limits[kind])
        state.record(task.name, outcome)
        print(f"{done + 1}/{len(waiting)} {outcome} {seconds:.1f} s {task.mutant.line} {task.name}", flush=True)
    return True


def time_tests(tree: Path, tests: Sequence[str], state: State) -> float:
    """Seconds of processor time of the tests without a mutant, from the state if they are there.  Writes bytecode."""
    name = f"without a mutant: {' '.join(sorted(tests))}"
    known = name in state.known
    outcome, seconds = run_tests(tree, ["--collect-only", *tests] if known else tests, 900, write_bytecode=True)
    if outcome != "survived":
        print((tree / "output.txt").read_text(encoding="utf-8", errors="replace")[-3000:])
        raise SystemExit(f"the tests do not pass without a mutant: {outcome}, {' '.join(tests)}")
    if not known:
        state.record(name, f"{seconds:.1f}")
        print(f"the tests take {seconds:.0f} s", flush=True)
    return float(state.known[name])


def try_mutant(tree: Path, task: Task, limit: float) -> tuple[str, float]:
    """Write the mutant, run its tests, and put the file back."""
    path = tree / "src" / "adamerge" / task.file
    original, times = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(task.mutant.text, encoding="utf-8")
    # Another time of modification, so that no older bytecode is taken for the mutant's.
    os.utime(path, (times.st_atime, times.st_mtime + 1000))
    try:
        return run_tests(tree, task.tests, limit)
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, (times.st_atime, times.st_mtime))


def run_tests(tree: Path, tests: Sequence[str], limit: float, write_bytecode: bool = False) -> tuple[str, float]:
    """Run tests in a child of this process, which has torch loaded already: "survived", "killed" or "timed out".

    Also gives the seconds of processor time.  `limit` is in them, so that a busy machine makes no mutant late.  Time
    passes by polls: a process that was stopped and goes on has lost none.
    """
    preload()
    child = os.fork()
    if child == 0:
        _run_and_exit(tree, tests, limit, write_bytecode)
    ended = False
    try:
        for _ in range(int(WAITING * limit / POLL_SECONDS)):
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                ended = True
                late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
                outcome = "timed out" if late else "survived" if status == 0 else "killed"
                return outcome, usage.ru_utime + usage.ru_stime
            time.sleep(POLL_SECONDS)
        return "timed out", limit
    finally:
        if not ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def preload() -> None:
    """Import what the tests need and what is not mutated."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    import hypothesis
    import jaxtyping
    import timm
    import torch.utils.flop_counter
    import transformers

    assert hypothesis and jaxtyping and timm and transformers


def _run_and_exit(tree: Path, tests: Sequence[str], limit: float, write_bytecode: bool) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 10))
    code: Any = 1
    try:
        output = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        sys.dont_write_bytecode = not write_bytecode
        sys.path[:] = [str(tree / "src"), *(p for p in sys.path if not (Path(p) / "adamerge").is_dir())]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("adamerge", "mutants")]:
            del sys.modules[name]
        import pytest

        # pytest would rewrite the assertions of its plugins, and warns that they are loaded already.
        quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *quiet, *tests])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def summarise(area: str, tasks: Sequence[Task], state: State, label: str, seed: int) -> dict[str, Any]:
    """The row of an area; a mutant that runs too long is noticed, too."""
    outcomes = [state.known[task.name] for task in tasks]
    killed, survived, late = (outcomes.count(name) for name in ("killed", "survived", "timed out"))
    return {
        "area": area,
        "label": label,
        "mutants": len(tasks),
        "killed": killed,
        "timed_out": late,
        "survived": survived,
        "noticed": round((killed + late) / max(len(tasks), 1), 4),
        "seed": seed,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Print a row and add it to the file."""
    from reading import append

    print(row, flush=True)
    append(path, [row])


if __name__ == "__main__":
    main()
