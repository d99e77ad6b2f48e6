"""Several processes that share the images give the numbers of one; started by torchrun, on CPUs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from distributed_job import work
from prediction.examples import part_bytes
from scripts import ROOT

from adamerge.core.errors import BadOption
from adamerge.distributed import Place, Share, from_first, in_order, is_first, my_share, read_place, sharing

TESTS = Path(__file__).parent


def torchrun(processes: int, *words: object, **more) -> subprocess.CompletedProcess[str]:
    """Run a script or a module in several processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*launcher, *map(str, words)], capture_output=True, text=True, env=environment(), timeout=300, **more
    )


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(TESTS)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": ""}


def check_equal(mine: dict, theirs: dict) -> None:
    assert mine["integers"] == theirs["integers"]
    for name, values in theirs["numbers"].items():
        torch.testing.assert_close(torch.tensor(mine["numbers"][name]), torch.tensor(values), rtol=1e-6, atol=1e-6)
    assert 0 < mine["timed"] <= theirs["timed"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The folder and the numbers of one process."""
    home = tmp_path_factory.mktemp("alone")
    return home, json.loads(json.dumps(work(home)))


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_give_the_numbers_of_one(processes, alone, tmp_path):
    """23 images in 6 batches of 4, 11 images in 6 files, and a set of one batch: not divisible by the processes."""
    home, theirs = alone
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [start_process(rank, processes, port, tmp_path) for rank in range(processes)]
    assert [os.waitpid(pid, 0)[1] for pid in started] == [0] * processes
    check_equal(json.loads((tmp_path / "numbers.json").read_text()), theirs)
    assert part_bytes(tmp_path / "embedded") == part_bytes(home / "embedded")
    assert sum(map(sum, theirs["integers"]["r"])) > 0, "something has to merge"


def start_process(rank: int, world: int, port: int, out: Path) -> int:
    """A copy of this process with the environment of torchrun: it need not import torch again."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
        with sharing():
            found = work(out)
            if is_first():
                (out / "numbers.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_torchrun_starts_the_processes(processes, alone, tmp_path):
    home, theirs = alone
    done = torchrun(processes, TESTS / "distributed_job.py", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    check_equal(json.loads(done.stdout.splitlines()[-1]), theirs)
    assert part_bytes(tmp_path / "embedded") == part_bytes(home / "embedded")


def test_alone_nothing_is_shared():
    assert list(my_share([1, 2, 3])) == [1, 2, 3] and in_order([1, 2]) == [1, 2]
    assert from_first(lambda: "mine") == "mine" and is_first()


def test_a_share_is_every_nth_item_and_a_share_of_a_share_is_all_of_it(monkeypatch):
    monkeypatch.setattr("adamerge.distributed._place", Place(1, 3))
    assert list(my_share(range(8))) == [1, 4, 7]
    assert list(my_share(Share([1, 4, 7]))) == [1, 4, 7] == list(my_share(iter([1, 4, 7]), Share()))


def test_the_environment_of_torchrun_is_read_and_checked():
    given = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "here"}
    assert read_place(given) == Place(2, 4, 1)
    assert read_place({"WORLD_SIZE": "4"}) == Place() == read_place({})
    for wrong in ({"RANK": "4"}, {"RANK": "-1"}, {"RANK": "first"}):
        with pytest.raises(BadOption, match="as torchrun sets them"):
            read_place(given | wrong)


EVAL = ["--method", "tome", "--r", "8", "--images", "21", "--batch-size", "4", "--workers", "0"]
CALIBRATE = ["--r-max", "14", "--images", "21", "--batch-size", "4", "--workers", "0", "--out", "stats.json"]
COMPARE = ["--images", "21", "--calibration-images", "7", "--batch-size", "4", "--workers", "0", "--cut", "0.3"]
COMPARE += ["--methods", "tome,adamerge,preset", "--out", "out"]
TUNE = ["--images", "13", "--batch-size", "4", "--cut", "0.3", "--tries", "3", "--workers", "0", "--out", "recipe.json"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_commands_write_the_same_files(processes, tmp_path):
    commands = {"eval": [*EVAL, "--json", "eval.json"], "calibrate": CALIBRATE, "compare": COMPARE, "tune": TUNE}
    commands["predict"] = ["--method", "tome", "--r", "8", "--images", "21", "--shard-size", "4", "--out", "predicted"]
    for name, number in (("alone", 1), ("shared", processes)):
        (tmp_path / name).mkdir()
        for command, words in commands.items():
            done = torchrun(number, "-m", "--", "adamerge", command, *words, cwd=tmp_path / name)
            assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
            assert done.stdout.count("wrote") == {"predict": 0, "compare": 3}.get(command, 1), "only one process prints"
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert part_bytes(alone / "predicted") == part_bytes(shared / "predicted")
    timed = ("images_per_second", "images_per_second_unmerged", "speedup")
    for name in ("eval.json", "stats.json", "recipe.json"):
        mine, theirs = (json.loads((home / name).read_text()) for home in (shared, alone))
        for field in timed:
            mine.pop(field, None)
            theirs.pop(field, None)
        assert near(mine, theirs), name
    ours, others = ((home / "out" / "results.csv").read_text().splitlines() for home in (shared, alone))
    assert len(ours) == len(others) == 5
    for mine, theirs in zip(ours, others, strict=True):
        assert [one for one in mine.split(",")[:8]] == [one for one in theirs.split(",")[:8]]
    assert sorted(path.name for path in (shared / "out" / "cells").iterdir()) == sorted(
        path.name for path in (alone / "out" / "cells").iterdir()
    ), "a comparison that was begun by one process can be finished by several"


def near(mine, theirs) -> bool:
    """Whether JSON data is the same, numbers up to 1e-6."""
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(near(mine[name], theirs[name]) for name in theirs)
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(near, mine, theirs))
    if isinstance(theirs, float):
        return mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    return mine == theirs


@pytest.mark.slow
def test_a_killed_process_ends_the_run_with_a_report_and_the_run_continues(tmp_path):
    words = ["-m", "--", "adamerge", "embed", "--method", "tome", "--r", "8", "--images", "400", "--shard-size", "4"]
    words += ["--workers", "0", "--out"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    with subprocess.Popen(
        [*launcher, str(tmp_path / "out")], stderr=subprocess.PIPE, text=True, env=environment()
    ) as run:
        while len(list((tmp_path / "out").glob("part-*"))) < 6:
            time.sleep(0.05)
            assert run.poll() is None
        (victim,) = [pid for pid in children(run.pid) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(victim, signal.SIGKILL)
        _, said = run.communicate(timeout=120)
    assert run.returncode != 0 and "SIGKILL" in said
    before = len(list((tmp_path / "out").glob("part-*")))
    assert 6 <= before < 100
    done = torchrun(3, *words, tmp_path / "out")
    assert done.returncode == 0 and f"400 images in 100 file(s) ({before} of an earlier run)" in done.stdout
    assert torchrun(1, *words, tmp_path / "alone").returncode == 0
    assert part_bytes(tmp_path / "out") == part_bytes(tmp_path / "alone")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_command_for_one_process_is_refused():
    done = torchrun(2, "-m", "--", "adamerge", "methods")
    assert done.returncode != 0 and "`adamerge methods` runs in one process; torchrun started 2" in done.stderr
