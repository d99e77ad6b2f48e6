"""Paths for results are checked before the work, and what was computed is printed even if it cannot be written."""

import errno
import json
import os
from pathlib import Path

import pytest
from test_commands import call

from adamerge.core.stats import LayerStats

pytestmark = pytest.mark.usefixtures("unchecked")

# A model that does not exist: the path has to be refused before the model is looked for.
NOTHING = ["--model", "nothing"]


@pytest.mark.parametrize(
    "words",
    [
        ["eval", *NOTHING, "--method", "none", "--json"],
        ["calibrate", *NOTHING, "--r-max", "9", "--out"],
        ["tune", *NOTHING, "--out"],
        ["tune", *NOTHING, "--resume"],
        ["bench", *NOTHING, "--out"],
        ["bench", *NOTHING, "--plot"],
        ["compare", *NOTHING, "--out"],
        ["reproduce", "table1", "--data", "x", *NOTHING, "--out"],
        ["demo", "--out"],
        ["show", "embedded", *NOTHING, "--out"],
    ],
    ids=lambda words: words[0] + words[-1],
)
def test_a_path_that_cannot_be_written_is_refused_first(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    assert call(*words, "file/sub/result.png") == 1
    told = "error: BadOutput: cannot write file/sub/result.png: file is a file, not a folder. Give another path."
    assert told in capsys.readouterr().err
    assert os.listdir() == ["file"] and Path("file").read_text() == "kept"


@pytest.fixture
def full_disk(monkeypatch) -> None:
    """No file can be written any more."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fail)


FULL = "No space left on device. Give another path, or make room there."


def test_eval_prints_its_table_on_a_full_disk(full_disk, tmp_path, capsys):
    out = tmp_path / "x.json"
    assert call("eval", "--method", "none", "--images", "2", "--json", str(out)) == 1
    printed = capsys.readouterr()
    assert "agreement with unmerged" in printed.out and f"cannot write {out}: {FULL}" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_calibrate_prints_its_table_and_the_file_on_a_full_disk(full_disk, tmp_path, capsys):
    out = tmp_path / "stats.json"
    assert call("calibrate", "--r-max", "9", "--images", "2", "--out", str(out)) == 1
    printed = capsys.readouterr()
    assert "iterative, 2 images" in printed.out and f"cannot write {out}: {FULL}" in printed.err
    _, _, text = printed.out.partition("the content of the file that could not be written:\n")
    (tmp_path / "copied.json").write_text(text)
    stats = LayerStats.load(tmp_path / "copied.json")
    assert stats.images == 2 and stats.file_text() == json.dumps(json.loads(text), indent=1) + "\n"


def test_compare_prints_the_cells_it_measured_on_a_full_disk(full_disk, tmp_path, capsys):
    words = ["--native", "tome:r=8", "--images", "2", "--calibration-images", "2"]
    assert call("compare", *words, "--out", str(tmp_path / "out")) == 1
    printed = capsys.readouterr()
    assert "unmerged" in printed.out and "100.00%" in printed.out and FULL in printed.err


def test_bench_prints_its_rows_on_a_full_disk(full_disk, tmp_path, capsys):
    words = ["--batch", "1", "--rounds", "1", "--inner", "1", "--methods", "", "--native", "tome:r=8", "--images", "1"]
    out = tmp_path / "bench.csv"
    assert call("bench", *words, "--unmerged", "eager", "--ways", "reference", "--out", str(out)) == 1
    printed = capsys.readouterr()
    assert "tome:r=8" in printed.out and "eager" in printed.out and f"cannot write {out}: {FULL}" in printed.err
