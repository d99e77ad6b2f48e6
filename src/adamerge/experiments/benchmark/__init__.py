"""Benchmarks: merged and unmerged models timed in turn in one run, with speed-ups over the fastest unmerged one."""

from adamerge.data.image_tensors import drawn_images, folder_images
from adamerge.experiments.benchmark.contenders import (
    MERGED,
    UNMERGED,
    Contender,
    Way,
    merged_contenders,
    twin,
    unmerged_contenders,
)
from adamerge.experiments.benchmark.entries import Entry, make_entries
from adamerge.experiments.benchmark.rows import BenchmarkRow, append_rows, read_rows
from adamerge.experiments.benchmark.run import bench

__all__ = [
    "MERGED",
    "UNMERGED",
    "BenchmarkRow",
    "Contender",
    "Entry",
    "Way",
    "append_rows",
    "bench",
    "drawn_images",
    "folder_images",
    "make_entries",
    "merged_contenders",
    "read_rows",
    "twin",
    "unmerged_contenders",
]
