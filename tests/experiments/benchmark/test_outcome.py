"""What a benchmark leaves: rows in a file, a picture, and what its command prints."""

import csv
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from clocks import run, save_images
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

from adamerge.cli.bench import table
from adamerge.core.errors import AdamergeError, BadOption
from adamerge.experiments.benchmark import BenchmarkRow, append_rows, read_rows

# --- the file --------------------------------------------------------------------------------------------------------


def test_rows_are_added_to_the_file_and_come_back_as_they_were(model, clock, tmp_path):
    out = tmp_path / "deep" / "rows.csv"
    first = run(model, out=out)
    before = out.read_text()
    second = run(model, batch_sizes=[1, 3], out=out)
    after = out.read_text()
    assert after.startswith(before) and after.count("images_per_second") == 1
    assert read_rows(out) == first + second
    with out.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(first) + len(second)


def test_a_file_of_an_older_version_is_read_and_added_to(model, clock, tmp_path):
    """0.1.0 called the column `sense`."""
    out = tmp_path / "rows.csv"
    first = run(model, out=out)
    now = out.read_text()
    out.write_text(now.replace(",cost,", ",sense,", 1))
    assert read_rows(out) == first
    second = run(model, out=out)
    assert read_rows(out) == first + second and out.read_text().startswith(now)


def test_a_file_of_other_columns_is_refused_before_anything_is_timed_and_stays(model, clock, tmp_path):
    out = tmp_path / "rows.csv"
    out.write_text("a,b\n1,2\n")
    with pytest.raises(BadOption, match="has other columns than this version's benchmark rows; give a new file"):
        run(model, out=out)
    assert out.read_text() == "a,b\n1,2\n" and clock.log == []


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(BadOption, match=r"there is no file .*; `adamerge bench --out"):
        read_rows(tmp_path / "rows.csv")
    with pytest.raises(BadOption, match="cannot add rows to"):
        append_rows(tmp_path, [])


# --- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_shows_each_method_in_its_fastest_way_of_the_latest_run(model, clock, tmp_path):
    from adamerge.experiments.benchmark.plot import _curves, speed

    rows = run(model, batch_sizes=[1, 2])
    slow = [replace(row, way="other", speedup=0.5) for row in rows if row.method == "tome"]
    old = [replace(row, date="2020-01-01T00:00:00Z", speedup=9.0) for row in rows if row.method == "tome"]
    curves = _curves([*slow, *rows, *old])
    assert {name: [(row.batch, row.way) for row in points] for name, points in curves.items()} == {
        "tome": [(1, "reference"), (2, "reference")]
    }
    assert [row.speedup for row in curves["tome"]] == pytest.approx([1.25, 1.25])
    path = speed(rows, tmp_path / "speed.png")
    with Image.open(path) as picture:
        assert picture.width == 1280
    with pytest.raises(BadOption, match="at least one merged row with a speed-up"):
        speed(rows[:1], tmp_path / "none.png")
    with pytest.raises(BadOption, match="one picture shows one model, dtype and device"):
        speed([*rows, replace(rows[-1], dtype="float16", batch=9)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


# --- the command -----------------------------------------------------------------------------------------------------


def call(*words: str):
    from adamerge.cli.app import app

    return CliRunner().invoke(app, ["bench", *words])


QUICK = ("--unmerged", "eager", "--rounds", "2", "--images", "2", "--calibration-images", "2", "--inner", "1")


@pytest.mark.usefixtures("unchecked")
def test_the_command_adds_rows_and_shows_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--batch", "1,2", "--methods", "tome", "--native", "tome:r=8", "--cut", "0.3", "--plot", "speed.png")
    done = call(*words, *QUICK, "--ways", "reference")
    assert done.exit_code == 0, done.output
    rows = read_rows("bench.csv")
    assert [(row.batch, row.method, row.target) for row in rows] == [
        (size, *one) for size in (1, 2) for one in (("none", ""), ("tome", "cut 30 %"), ("tome:r=8", "native"))
    ]
    assert {(row.model, row.weights, row.images) for row in rows} == {("embedded", "embedded", "drawn")}
    assert rows[1].cut_true == pytest.approx(0.3, abs=0.02) and rows[1].cost == "true"
    assert "added 6 rows to bench.csv" in done.output and "speed-up" in done.output
    assert Path("speed.png").is_file()


@pytest.mark.usefixtures("unchecked")
def test_random_weights_are_said_to_be_random_and_folders_are_parted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = save_images(tmp_path / "pictures", 8)
    words = ("--model", "vit_tiny_patch16_224", "--image-size", "32", "--data", str(root), "--workers", "0")
    done = call(*words, "--batch", "2", "--methods", "", "--native", "tome:r=1", *QUICK)
    assert done.exit_code == 0, done.output
    rows = read_rows("bench.csv")
    assert {(row.weights, row.images, row.image_size) for row in rows} == {("random", "pictures", 32)}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "x"], "--batch is whole numbers separated by commas, such as 1,8,32; got 'x'"),
        (["--batch", "4,0"], "--batch sizes must be at least 1; got '4,0'"),
        (["--cut", "x"], "--cut is numbers separated by commas, such as 0.23,0.5; got 'x'"),
        (["--cut", "2"], "cut is the share of the cost to save and must be between 0 and 1; got 2.0"),
        (["--methods", "foo"], "there is no variant 'foo'; choose from adamerge"),
        (["--methods", ""], "there is nothing to time beside the unmerged model; give --methods, --native or --recipe"),
        (["--cost", "half"], "cost must be one of true, paper; got 'half'"),
        (["--dtype", "int8"], "--dtype must be one of fp32, bf16, fp16; got 'int8'"),
        (["--plot", "speed.jpg"], "--plot writes a PNG; got 'speed.jpg'. Let its name end in .png."),
        (["--images", "0"], "--images must be at least 1 and --calibration-images 2; got 0 and 64"),
        (["--image-size", "64"], "the embedded model takes images of 224 pixels; got --image-size 64"),
        (["--model", "vit_nothing"], "timm has no model 'vit_nothing'"),
        (
            ["--model", "resnet18", "--image-size", "64"],
            "timm could not make 'resnet18' with random weights for images of 64 pixels",
        ),
        (["--data", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_a_mistake_on_the_command_line_gets_a_message(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = call(*words).exception
    assert isinstance(error, AdamergeError) and message in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unchecked")
def test_weights_in_a_file_are_called_after_it(tmp_path, monkeypatch):
    import timm

    monkeypatch.chdir(tmp_path)
    save_file(timm.create_model("vit_tiny_patch16_224", img_size=32).state_dict(), "tiny.safetensors")
    words = ("--model", "vit_tiny_patch16_224", "--image-size", "32", "--weights", "tiny.safetensors")
    done = call(*words, "--batch", "1", "--methods", "", "--native", "tome:r=1", *QUICK)
    assert done.exit_code == 0, done.output
    assert {row.weights for row in read_rows("bench.csv")} == {"tiny.safetensors"}


def test_a_table_that_has_no_room_leaves_columns_out_and_cuts_no_word():
    row = BenchmarkRow(
        model="vit_base_patch16_224", weights="random", images="drawn", image_size=224, batch=256, dtype="bfloat16",
        method="adamerge", way="packed graph", ms_p20=19.0, ms_p50=19.1, ms_p80=19.8, speedup=1.22, cut_true=0.209,
        ideal_true=1.26, device="cpu", versions="{}", date="2026-01-01",
    )  # fmt: skip
    shown = {}
    for width in (80, 150):
        console = Console(width=width, record=True, file=StringIO())
        console.print(table([row, replace(row, ms_p50=None, target="cut 23 %", error="OutOfMemoryError: much")], width))
        shown[width] = console.export_text()
        assert "…" not in shown[width] and "packed graph" in shown[width] and "OutOfMemory" in shown[width]
    assert "bfloat16" in shown[150] and "bfloat16" not in shown[80]
