"""The command line in several processes: `torchrun --nproc-per-node 2 -m adamerge eval …`."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from adamerge.cli.flags import console
from adamerge.core.errors import BadOption

# The commands that share their images among processes.
SHARING = ("eval", "calibrate", "compare", "tune", "predict", "embed")


@contextmanager
def several_processes(words: Sequence[str]) -> Iterator[None]:
    """Run a command as one of the processes that torchrun started; only the first prints.  Alone, this does nothing."""
    if not started_by_torchrun():
        yield
        return
    command = next((word for word in words if not word.startswith("-")), "")
    if command not in SHARING:
        raise BadOption(
            f"`adamerge {command}` runs in one process; torchrun started {os.environ['WORLD_SIZE']}. Commands that "
            f"share their images are {', '.join(SHARING)}"
        )
    if os.environ["RANK"] != "0":
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, which happens later
    from adamerge.distributed import sharing

    with sharing() as place:
        console.quiet = place.rank > 0
        yield


def started_by_torchrun() -> bool:
    """Whether there are other processes; found out without importing torch."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def process_name() -> str:
    """What an error of this process begins with, where there are several."""
    return f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: " if started_by_torchrun() else ""
