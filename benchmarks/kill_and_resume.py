"""Kills commands with SIGKILL at random moments, runs them again, and compares the result with an undisturbed one.

For each command: one undisturbed run on the embedded model, then `--number` times in a new folder a run that is killed
at a moment between its begin and its usual end, a look at the files that it left, and a second run.  The second result
must be that of the undisturbed run, apart from times and dates, and every file must be whole, before and after.  Adds a
row for each command to benchmarks/results/kill-and-resume.csv.

    python benchmarks/kill_and_resume.py --number 20 --command compare --command tune
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reading import RESULTS, ROOT, append
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, uint8

from adamerge.experiments.csv_tables import read_table

# The smallest work that writes every kind of file.
COMMANDS: dict[str, list[str]] = {
    "calibrate": ["--images", "24", "--batch-size", "8", "--r-max", "8", "--workers", "0", "--out", "stats.json"],
    "tune": ["--images", "12", "--tries", "4", "--cut", "0.3", "--resume", "journal.jsonl", "--out", "recipe.json"],
    "repair": [
        *["--recipe", str(ROOT / "tests" / "files" / "0.1.0" / "recipe-tome.json"), "--images", "12", "--epochs", "8"],
        *["--step-images", "3", "--resume", "training.safetensors", "--out", "repaired.json"],
    ],
    "finetune": [
        *["--method", "adamerge", "--r-max", "8", "--images", "16", "--batch-size", "4", "--epochs", "4"],
        *["--learning-rate", "1e-3", "--save-every", "1", "--recalibrate", "2", "--ema", "0.9", "--workers", "0"],
        *["--out", "finetuned"],
    ],
    "compare": [
        *["--images", "16", "--calibration-images", "8", "--methods", "tome,random,evit", "--cut", "0.2,0.3"],
        *["--batch-size", "8", "--workers", "0", "--out", "compared"],
    ],
    "reproduce": [
        *["layers", "proposition", "--model", "embedded", "--data", "embedded", "--images", "16"],
        *["--calibration-images", "8", "--batch-size", "8", "--workers", "0", "--out", "reproduced"],
    ],
    "bench": [
        *[
            "--model",
            "embedded",
            "--methods",
            "tome",
            "--cut",
            "0.2",
            "--batch",
            "1,2",
            "--rounds",
            "2",
            "--inner",
            "1",
        ],
        *["--images", "4", "--calibration-images", "4", "--device", "cpu", "--out", "bench.csv"],
    ],
}
# A command that adds to these files leaves what is complete when it is killed, and adds all of it when it runs again.
ADDED_TO = ("bench.csv", "bench.asked.json")
# Fields that may differ between two runs: measured times and memory, and what follows from them.
TIMED = {
    *("seconds", "full_seconds", "images_per_second", "speedup", "ms_p20", "ms_p50", "ms_p80", "best_unmerged"),
    *("reached_true", "reached_paper", "stages", "deciding", "peak_mb", "own_mb", "date", "time", "elapsed"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill and resume each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", action="append", choices=COMMANDS, help="repeatable; all by default")
    parser.add_argument("--number", type=int, default=20, help="kills of each command")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    parser.add_argument(
        "--rows", type=Path, default=RESULTS / "kill-and-resume.csv", help="the CSV file to add rows to"
    )
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    preload()
    bad = 0
    for command in given.command or COMMANDS:
        row = try_command(command, given.number, given.seed)
        print(row, flush=True)
        append(given.rows, [row])
        bad += row["different"] + row["half_files"] + row["errors"]
    return int(bad > 0)


def try_command(command: str, number: int, seed: int) -> dict[str, Any]:
    """The row of a command.  A run that is stopped gives the row of what it did."""
    choose = random.Random(f"{command} {seed}")
    begin = time.monotonic()
    counts: dict[str, int] = dict.fromkeys(("killed", "different", "half_files", "errors", "left_over"), 0)
    with tempfile.TemporaryDirectory() as home:
        undisturbed = Path(home) / "undisturbed"
        usual, code = run(command, undisturbed, float("inf"))
        if code != 0:
            raise SystemExit(f"{command} fails undisturbed:\n{(undisturbed / 'output.txt').read_text()[-2000:]}")
        folders = (Path(home) / str(index) for index in range(100 * number))
        try:
            while counts["killed"] < number:
                folder = next(folders)
                seconds, code = run(command, folder, choose.uniform(0, usual))
                if code == -signal.SIGKILL:
                    resume(command, undisturbed, folder, counts)
                else:
                    # It was faster this time.
                    usual = min(usual, seconds)
        except KeyboardInterrupt:
            print(f"stopped after {counts['killed']} kills", flush=True)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return {"command": command, "seed": seed, **counts, "seconds": round(time.monotonic() - begin), "date": date}


def resume(command: str, undisturbed: Path, folder: Path, counts: dict[str, int]) -> None:
    """Run a killed command again and count what is wrong before and after."""
    problems = half_files(folder)
    seconds, code = run(command, folder, float("inf"))
    differing = differences(undisturbed, folder) if code == 0 else [(folder / "output.txt").read_text()[-500:]]
    counts["killed"] += 1
    counts["half_files"] += bool(problems)
    counts["errors"] += code != 0
    counts["different"] += bool(differing) and code == 0
    counts["left_over"] += len(hidden(folder))
    print(f"{command} {counts['killed']}: resumed in {seconds:.1f} s", *problems, *differing, sep="; ", flush=True)


def preload() -> None:
    """Import what the commands need, so that moments fall into their work and not into imports."""
    import timm
    import torch

    import adamerge.cli.app
    import adamerge.experiments.benchmark.run
    import adamerge.experiments.compare
    import adamerge.experiments.reproduce.build_experiment
    import adamerge.finetuning.trainer
    import adamerge.repairing.repairer
    import adamerge.search.tuner

    torch.set_num_threads(1)
    assert adamerge and timm


def run(command: str, folder: Path, limit: float) -> tuple[float, int]:
    """Run a command in a child process for at most `limit` seconds: (seconds, exit code, or minus the signal)."""
    folder.mkdir(exist_ok=True)
    begin, child = time.monotonic(), os.fork()
    if child == 0:
        _run_and_exit(command, folder)
    try:
        while time.monotonic() - begin <= limit:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return time.monotonic() - begin, os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return time.monotonic() - begin, os.waitstatus_to_exitcode(status)


def _run_and_exit(command: str, folder: Path) -> None:
    code: Any = 1
    try:
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        from adamerge.cli.app import main

        sys.argv = ["adamerge", command, *COMMANDS[command]]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def results(folder: Path) -> list[Path]:
    """The files that a command wrote, apart from what it printed and figures."""
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    kinds = (".json", ".csv", ".md", ".jsonl", ".safetensors")
    return [path for path in found if path.suffix in kinds and path not in hidden(folder)]


def hidden(folder: Path) -> list[Path]:
    """Files beside results that a killed write leaves.  No command reads them."""
    return [path.relative_to(folder) for path in folder.rglob(".*") if path.is_file()]


def half_files(folder: Path) -> list[str]:
    """Results that cannot be read."""
    problems = []
    for path in results(folder):
        try:
            if path.suffix == ".safetensors":
                load_file(folder / path)
                continue
            text = (folder / path).read_text(encoding="utf-8")
            if path.suffix == ".json":
                json.loads(text)
            elif not text.endswith("\n"):
                raise ValueError("no end of line at its end")
            if path.suffix == ".csv":
                assert all(None not in row and None not in row.values() for row in read_table(text))
        except (ValueError, AssertionError, SafetensorError) as error:
            problems.append(f"half a file: {path}: {error}")
    return problems


def differences(undisturbed: Path, folder: Path) -> list[str]:
    """The files whose content differs apart from times."""
    mine, theirs = results(folder), results(undisturbed)
    if mine != theirs:
        return [f"files {[str(p) for p in mine]}, undisturbed {[str(p) for p in theirs]}"]
    found = []
    for path in mine:
        one, other = _content(folder / path), _content(undisturbed / path)
        if path.name in ADDED_TO:
            one = one[-len(other) :]
        if one != other:
            found.append(f"{path}: {_first_difference(one, other)}")
    return found


def _content(path: Path) -> Any:
    """What has to be equal in a file."""
    if path.suffix == ".safetensors":
        return _tensors(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return _without_times(json.loads(text))
    if path.suffix == ".csv":
        return _without_times(read_table(text))
    if path.suffix == ".jsonl":
        return [_without_times(json.loads(line)) for line in text.splitlines()]
    # Reports have the figures of the other files, with times between them.
    return None


def _tensors(path: Path) -> dict[str, Any]:
    """The tensors of a file, and its metadata, which are JSON: several of them are written in any order."""
    with safe_open(path, "pt") as file:
        about = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
    # By their bytes: not a number equals itself.
    data = {name: [str(each.dtype), list(each.shape), _digest(each)] for name, each in load_file(path).items()}
    return _without_times({"metadata": about, "tensors": data})


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(uint8).numpy().tobytes()).hexdigest()


def _first_difference(mine: Any, theirs: Any, where: str = "") -> str:
    """Where two contents differ first."""
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        inner = [(key, mine[key], theirs[key]) for key in mine]
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        inner = list(zip(range(len(mine)), mine, theirs, strict=True))
    else:
        return f"{where}: {str(mine)[:100]}, undisturbed {str(theirs)[:100]}"
    key, one, other = next(each for each in inner if each[1] != each[2])
    return _first_difference(one, other, f"{where}/{key}")


def _without_times(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_times(value) for key, value in data.items() if key not in TIMED}
    return [_without_times(value) for value in data] if isinstance(data, list) else data


if __name__ == "__main__":
    sys.exit(main())
