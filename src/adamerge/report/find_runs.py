"""Tells which command wrote a folder or a file, and reads it."""

import json
from collections.abc import Callable
from pathlib import Path

from adamerge.core.errors import AdamergeError, BadOption
from adamerge.experiments.benchmark.rows import COLUMNS as BENCH_COLUMNS
from adamerge.experiments.csv_tables import read_columns, read_table
from adamerge.experiments.reproduce import PARTS
from adamerge.experiments.run_record import read_record
from adamerge.report.read_bench import read_bench
from adamerge.report.read_compare import read_compare, report_rows
from adamerge.report.read_eval import read_eval
from adamerge.report.read_reproduce import read_reproduce
from adamerge.report.read_tune import read_journal, read_recipe
from adamerge.report.run_report import RunReport

EXPECTED = (
    "a run is a folder of `adamerge compare` or `adamerge reproduce`, a CSV file of `bench` or `compare`, a JSON file "
    "of `eval --json`, or a recipe or journal of `tune`"
)
# Columns that only the rows of a comparison have together.
COMPARE_COLUMNS = {"method", "budget", "delta_top1", "cut_true", "speedup"}


def find_runs(path: Path) -> list[RunReport]:
    """The runs in a folder, or the run of a file."""
    if not path.exists():
        raise BadOption(f"there is no {path}; {EXPECTED}")
    try:
        return _folder(path) if path.is_dir() else [_file(path)]
    except AdamergeError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadOption(
            f"cannot read {path} as the result of a run ({type(error).__name__}: {error}); {EXPECTED}"
        ) from error


def _folder(folder: Path) -> list[RunReport]:
    """A folder of one run, or all runs among its files and in the folders right below it."""
    command = (read_record(folder) or {}).get("command")
    if command == "compare" or (folder / "results.csv").is_file() or (folder / "cells.jsonl").is_file():
        return [read_compare(folder)]
    if (
        command == "reproduce"
        or (folder / "claims.csv").is_file()
        or any((folder / f"{p}.json").is_file() for p in PARTS)
    ):
        return [read_reproduce(folder)]
    found = [run for file in sorted(folder.iterdir()) if file.is_file() and (run := _if_known(file)) is not None]
    if not found:
        raise BadOption(f"{folder} has no results of a run; {EXPECTED}")
    return found


def _if_known(file: Path) -> RunReport | None:
    """The run of a file in a folder of several files; None if it is something else."""
    read = _reader(file)
    return read(file) if read is not None else None


def _file(path: Path) -> RunReport:
    read = _reader(path)
    if read is None:
        raise BadOption(f"{path} is not the result of a run; {EXPECTED}")
    return read(path)


def _reader(path: Path) -> Callable[[Path], RunReport] | None:
    """What reads this file; None if nothing does."""
    if path.suffix == ".csv":
        columns = set(read_columns(path.read_text(encoding="utf-8")))
        if columns >= COMPARE_COLUMNS:
            return lambda file: report_rows(read_table(file.read_text(encoding="utf-8")), str(file), file.name)
        return read_bench if columns == set(BENCH_COLUMNS) else None
    if path.suffix == ".jsonl":
        return read_journal
    if path.suffix != ".json":
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and "recipe" in content and "std" not in content:
        # Statistics name a recipe too; they are no run.
        return read_recipe
    if isinstance(content, dict) and {"top1", "kl", "r_per_layer"} <= set(content):
        return lambda file: read_eval(content, str(file))
    return None
