"""How fast merging is: every contender in turn, in one run, beside the best that the unmerged model can do."""

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
