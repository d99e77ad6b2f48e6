"""Kills `adamerge embed` over 10,000 generated images with SIGKILL twenty times, and compares its files.

One undisturbed run, then one job in another folder that is killed at random moments, each time started again, and at
last left to finish.  After every kill each file that is there must be whole.  At the end the files must be those of the
undisturbed run to the byte, with every image in exactly one row.  Adds the row "embed" to
benchmarks/results/kill-and-resume.csv.  The folder `--home` keeps images and files: a stopped script goes on from it.

    python benchmarks/kill_and_embed.py --home /tmp/embed
"""

import argparse
import json
import os
import random
import signal
import sys
import tarfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from kill_and_resume import preload
from PIL import Image
from reading import RESULTS, append

from adamerge.core.files import write_atomically
from adamerge.embedded import scenes

# Images of this size are drawn fast; the model's own transform enlarges them.
SIZE = 64
IN_SHARD = 100
OPTIONS = ["--method", "tome", "--r", "40", "--workers", "1", "--batch-tokens", "4096"]


def main() -> int:
    """Draw, embed undisturbed, embed with kills, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True, help="folder for images and results")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--number", type=int, default=20, help="how many kills")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    parser.add_argument(
        "--rows", type=Path, default=RESULTS / "kill-and-resume.csv", help="the CSV file to add the row to"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    draw(given.home / "shards", given.images)
    preload()
    state = State(given.home / "state.json")
    undisturbed, killed = given.home / "undisturbed", given.home / "killed"
    begin = time.monotonic()
    while not (undisturbed / "_SUCCESS").exists():
        _, code = run(given.home / "shards", undisturbed, float("inf"))
        if code != 0:
            raise SystemExit(f"embed fails undisturbed:\n{Path(str(undisturbed) + '.txt').read_text()[-2000:]}")
    state.add("usual", time.monotonic() - begin)
    kill(given, killed, state)
    row = {"command": "embed", "seed": given.seed, "killed": state.values["killed"]}
    row |= compare(undisturbed, killed, given.images, state)
    row |= {"left_over": len(list(killed.glob(".*"))), "seconds": round(state.values["seconds"])}
    row["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    print(row, flush=True)
    append(given.rows, [row])
    return int(row["different"] + row["half_files"] + row["errors"] > 0)


class State:
    """Counts that survive the script."""

    def __init__(self, path: Path):
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, number: float) -> None:
        """Add to a count, and write it."""
        self.values[name] = self.values.get(name, 0) + number
        write_atomically(self.path, json.dumps(self.values))


def draw(home: Path, images: int) -> None:
    """WebDataset shards of generated images."""
    home.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, images, IN_SHARD)):
        path = home / f"shard-{number:04d}.tar"
        if path.exists():
            continue
        with tarfile.open(path.with_suffix(".half"), "w") as archive:
            for index, content in pngs(first, min(IN_SHARD, images - first)):
                member = tarfile.TarInfo(f"{index:06d}.png")
                member.size = len(content)
                archive.addfile(member, BytesIO(content))
        path.with_suffix(".half").rename(path)


def pngs(first: int, count: int) -> Iterator[tuple[int, bytes]]:
    """The number and the file of some images."""
    drawn = scenes(first, count, size=SIZE).images.mul(255).round().byte().permute(0, 2, 3, 1)
    for index, image in enumerate(drawn.numpy(), first):
        file = BytesIO()
        Image.fromarray(image).save(file, "PNG")
        yield index, file.getvalue()


def kill(given: argparse.Namespace, out: Path, state: State) -> None:
    """Run the job, kill it, run it again, until there were enough kills; then let it finish."""
    choose = random.Random(given.seed + int(state.values.get("killed", 0)))
    longest = 2 * state.values["usual"] / (given.number + 2)
    while not (out / "_SUCCESS").exists():
        enough = state.values.get("killed", 0) >= given.number
        seconds, code = run(given.home / "shards", out, float("inf") if enough else choose.uniform(0, longest))
        state.add("seconds", seconds)
        state.add("killed", code == -signal.SIGKILL)
        state.add("errors", code not in (0, -signal.SIGKILL))
        state.add("half_files", sum(not whole(path) for path in out.glob("part-*")))
        print(
            f"kill {state.values['killed']:.0f} after {seconds:.1f} s, {len(list(out.glob('part-*')))} files",
            flush=True,
        )
        if state.values["errors"]:
            return


def whole(path: Path) -> bool:
    """Whether a parquet file can be read to its end."""
    try:
        return len(pq.read_table(path)) > 0
    except Exception as error:
        print(f"{path}: {error}", flush=True)
        return False


def compare(undisturbed: Path, killed: Path, images: int, state: State) -> dict[str, Any]:
    """What is wrong with the files at the end."""
    theirs, mine = ({path.name: path.read_bytes() for path in home.glob("part-*")} for home in (undisturbed, killed))
    different = sum(theirs.get(name) != mine.get(name) for name in {*theirs, *mine})
    ids = pq.read_table(killed, columns=["id"]).column("id").to_pylist()
    if sorted(ids) != [f"{index:06d}" for index in range(images)]:
        print(f"{len(ids)} rows, {len(set(ids))} different images", flush=True)
        different += 1
    return {"different": different, "half_files": state.values["half_files"], "errors": state.values["errors"]}


def run(shards: Path, out: Path, limit: float) -> tuple[float, int]:
    """Run the command in a child process for at most `limit` seconds: (seconds, exit code, or minus the signal)."""
    begin, child = time.monotonic(), os.fork()
    if child == 0:
        _run_and_exit(["embed", "--data", str(shards), "--out", str(out), *OPTIONS], Path(f"{out}.txt"))
    try:
        while time.monotonic() - begin <= limit:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return time.monotonic() - begin, os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        raise
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return time.monotonic() - begin, os.waitstatus_to_exitcode(status)


def _run_and_exit(words: list[str], printed: Path) -> None:
    code: Any = 1
    try:
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from adamerge.cli.app import main

        sys.argv = ["adamerge", *words]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
