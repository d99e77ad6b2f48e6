"""A benchmark times in turns, compares with the best unmerged contender, and loses nothing when something fails."""

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.families import RECIPES, build, pictures
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import adamerge
from adamerge.benchmark import (
    MERGED,
    UNMERGED,
    Contender,
    Entry,
    Row,
    Way,
    append_rows,
    bench,
    contenders,
    drawn_images,
    folder_images,
    make_entries,
    read_rows,
    timing,
    twin,
)
from adamerge.benchmark.rows import COLUMNS
from adamerge.benchmark.timing import FORWARD, Timing, choose_inner, interleave, waits_within
from adamerge.core.errors import AdamergeError, BadImages, BadOption
from adamerge.flops import meter
from adamerge.methods import METHODS, tome
from adamerge.models.surgery import apply
from adamerge.runtime import stages
from adamerge.solve import Target, Variant, solve

CPU = torch.device("cpu")
MEMORY = {"peak_mb", "own_mb", "syncs"}


class Clock:
    """A clock that moves only when a contender runs, and remembers who ran on what."""

    def __init__(self):
        self.now = 0.0
        self.log: list[tuple[str, float]] = []

    def perf_counter(self) -> float:
        return self.now

    def way(self, name: str, milliseconds: float, **options: Any) -> Way:
        """A way to run a model that takes this long."""

        def make(model: nn.Module, images: torch.Tensor):
            def run(images: torch.Tensor) -> torch.Tensor:
                self.now += milliseconds / 1e3
                self.log.append((name, images.sum().item()))
                return model(images)

            return run

        return Way(make, **options)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Unmerged, eager takes 20 ms and compiled 10; merged, 8 ms."""
    clock = Clock()
    for room in (timing, stages):
        monkeypatch.setattr(room, "time", clock)
    monkeypatch.setitem(UNMERGED, "eager", clock.way("eager", 20.0))
    monkeypatch.setitem(UNMERGED, "compiled", clock.way("compiled", 10.0))
    monkeypatch.setitem(MERGED, "reference", clock.way("reference", 8.0, runtime="reference"))
    return clock


@pytest.fixture(scope="module")
def model():
    return build("vit")


def run(model: nn.Module, recipes: Any = None, **options: Any) -> list[Row]:
    settings: dict[str, Any] = dict(
        batch_sizes=[2], rounds=4, inner=1, merged=["reference"], progress=False, name="tiny"
    )
    return bench(model, pictures(6), {"tome": tome(3)} if recipes is None else recipes, **{**settings, **options})


# --- figures ---------------------------------------------------------------------------------------------------------


def test_a_row_has_everything_that_this_device_can_measure(model, clock):
    rows = run(model, weights="random", source="pictures")
    assert [(row.method, row.way) for row in rows] == [("none", "eager"), ("none", "compiled"), ("tome", "reference")]
    for row in rows:
        missing = {name for name in COLUMNS if getattr(row, name) in (None, "")}
        own = {"options", "knob", "target", "sense", "error"}
        unmerged = {"stages", "deciding", "reached_true", "reached_paper"}
        assert missing == MEMORY | own | (unmerged if row.method == "none" else set())
        assert (row.batch, row.image_size, row.dtype, row.device, row.rounds) == (2, 64, "float32", "cpu", 4)
        assert adamerge.__version__ in row.versions and row.date.endswith("Z")


def test_speed_ups_are_ratios_against_the_best_unmerged_contender(model, clock):
    rows = {row.way: row for row in run(model)}
    assert {row.best_unmerged for row in rows.values()} == {"compiled"}
    assert [rows[way].speedup for way in ("eager", "compiled", "reference")] == pytest.approx([0.5, 1, 1.25])
    merged = rows["reference"]
    assert (merged.ms_p20, merged.ms_p50, merged.ms_p80) == pytest.approx((8, 8, 8))
    assert merged.images_per_second == pytest.approx(2 / 0.008)
    assert merged.ideal_true and merged.reached_true == pytest.approx(0.25 / (merged.ideal_true - 1))
    assert merged.ideal_paper and merged.reached_paper == pytest.approx(0.25 / (merged.ideal_paper - 1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_cut_is_that_of_the_tokens_that_these_images_kept(model, clock, recipe):
    images = pictures(6)
    chosen = RECIPES[recipe](model, images)
    row = run(model, {"it": chosen}, batch_sizes=[3], rounds=2)[-1]
    with torch.inference_mode():
        merged = apply(twin(model), chosen)
        merged(images)
        cost, full = adamerge.flops.cost(merged), meter(model).unmerged()
    assert row.cut_true == pytest.approx(1 - (cost.true.mean() / full.true).item())
    assert row.cut_paper == pytest.approx(1 - (cost.paper.mean() / full.paper).item())
    assert row.ideal_paper == pytest.approx((full.paper / cost.paper.mean()).item())


def test_the_unmerged_model_saves_nothing_and_has_no_gain_to_reach(model, clock):
    row = run(model)[0]
    assert (row.cut_true, row.ideal_true, row.cut_paper, row.ideal_paper) == (0, 1, 0, 1)
    assert row.reached_true is None and row.reached_paper is None


def test_stages_add_up_to_less_than_the_whole_and_deciding_is_the_share_of_two(model):
    row = run(model, rounds=1, unmerged=["eager"])[-1]
    spent = json.loads(row.stages)
    whole = spent.pop("all")
    assert set(spent) == set(stages.STAGES) and 0 < sum(spent.values()) <= whole
    assert row.deciding == pytest.approx((spent["decide"] + spent["merge"]) / whole, rel=1e-2)


def test_quantiles_are_over_rounds():
    times = Timing(tuple(map(float, range(1, 12))), 1)
    assert [times.quantile(share) for share in (0.2, 0.5, 0.8)] == [3, 6, 9]


def test_a_short_call_is_repeated_until_a_turn_is_long_enough():
    assert [choose_inner(ms) for ms in (100.0, 30.0, 3.0, 0.0)] == [1, 1, 10, timing.MOST_INNER]


@pytest.mark.parametrize(("device", "expected"), [("CPU", 2), ("CUDA", None)])
def test_only_waits_inside_the_forward_pass_are_counted(device, expected):
    def event(name: str, start: float, end: float, kind: str = "DeviceType.CPU"):
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=kind)

    seen = [
        event(FORWARD, 10, 20, f"DeviceType.{device}"),
        event(FORWARD, 11, 25, "DeviceType.CUDA"),
        event("cudaLaunchKernel", 11, 12),
        event("cudaStreamSynchronize", 12, 13),
        event("cudaMemcpyAsync", 13, 13),
        event("cudaEventSynchronize", 19, 20),
        event("cudaDeviceSynchronize", 22, 23),
        event("cudaStreamSynchronize", 5, 6),
    ]
    assert waits_within(seen) == expected


def test_a_profiler_that_saw_no_device_cannot_say_how_often_it_waited():
    assert waits_within([]) is None


def test_a_turn_is_as_long_as_asked_for(model, clock):
    assert [row.inner for row in run(model, inner=None)] == [2, 3, 4]
    rows = run(model, inner=5)
    assert [row.inner for row in rows] == [5, 5, 5]
    assert [row.ms_p50 for row in rows] == pytest.approx([20, 10, 8])


# --- turns -----------------------------------------------------------------------------------------------------------


def test_contenders_run_in_turn_in_another_order_each_round():
    log: list[tuple[int, int]] = []
    calls = [lambda turn, who=who: log.append((turn, who)) for who in range(4)]
    interleave(calls, [2, 1, 3, 1], CPU, rounds=6, seed=1, progress=False)
    rounds = [[who for turn, who in log if turn == number] for number in range(6)]
    assert log == [(number, who) for number, one in enumerate(rounds) for who in one]
    assert all(Counter(one) == {0: 2, 1: 1, 2: 3, 3: 1} for one in rounds)
    orders = [tuple(dict.fromkeys(one)) for one in rounds]
    assert all(
        [who for who in order for _ in range((2, 1, 3, 1)[who])] == one
        for order, one in zip(orders, rounds, strict=True)
    )
    assert len(set(orders)) > 1
    again, log[:] = list(log), []
    interleave(calls, [2, 1, 3, 1], CPU, rounds=6, seed=1, progress=False)
    assert log == again


def test_in_a_round_all_have_the_same_images_and_rounds_go_through_different_ones(model, clock):
    run(model, batch_sizes=[1], rounds=12)
    # Every contender warms up on all six images, and once more for its memory.
    turns = clock.log[3 * (6 + 1) :][: 3 * 12]
    rounds = [turns[first : first + 3] for first in range(0, len(turns), 3)]
    assert all({name for name, _ in one} == {"eager", "compiled", "reference"} for one in rounds)
    assert all(len({value for _, value in one}) == 1 for one in rounds)
    values = [one[0][1] for one in rounds]
    assert len(set(values)) == 6 and values[:6] == values[6:]
    assert values[:6] == [image.sum().item() for image in pictures(6).split(1)]


def test_everybody_is_warm_before_the_first_turn(model, clock):
    run(model, rounds=1, unmerged=["eager", "compiled"])
    first = [name for name, _ in clock.log[: 3 * (timing.WARM_UP + 1)]]
    assert Counter(first) == {name: timing.WARM_UP + 1 for name in ("eager", "compiled", "reference")}


def test_a_batch_larger_than_the_images_repeats_them(model, clock):
    rows = run(model, batch_sizes=[8], unmerged=["eager"])
    assert [row.batch for row in rows] == [8, 8] and not any(row.error for row in rows)
    assert {value for _, value in clock.log} == {pictures(6)[torch.arange(8) % 6].sum().item()}


def test_who_fails_has_no_further_turn():
    log: list[int] = []

    def fail(turn: int) -> None:
        log.append(turn)
        if turn == 1:
            raise RuntimeError("broken")

    found = interleave([fail, lambda turn: None], [1, 1], CPU, rounds=5, progress=False)
    assert log == [0, 1] and found[0] == "RuntimeError: broken"
    assert isinstance(found[1], Timing) and len(found[1].rounds) == 5


# --- failures --------------------------------------------------------------------------------------------------------


def failing(error: Exception, after: int = 0):
    """Another contender, that fails after some calls."""
    left = [after]

    def run(images: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    return lambda model: [Contender("bad", "tried", lambda images: run, lambda images: meter(model).unmerged())]


@pytest.mark.parametrize("after", [0, timing.WARM_UP + 2])
def test_a_contender_that_fails_gives_a_row_with_the_reason_and_the_others_go_on(model, clock, after):
    rows = run(model, others=failing(torch.OutOfMemoryError("no room\nfor more"), after), unmerged=["eager"])
    assert [row.error for row in rows] == ["", "", "OutOfMemoryError: no room"]
    assert rows[-1].ms_p50 is None and rows[-1].speedup is None
    assert rows[1].speedup == pytest.approx(2.5)


def test_a_model_that_cannot_be_prepared_gives_a_row_with_the_reason(model, clock, monkeypatch):
    def make(model, images):
        raise RuntimeError("no compiler")

    monkeypatch.setitem(UNMERGED, "compiled", Way(make))
    rows = run(model)
    assert {row.way: row.error for row in rows} == {
        "eager": "",
        "compiled": "RuntimeError: no compiler",
        "reference": "",
    }
    assert rows[-1].best_unmerged == "eager"


def test_without_an_unmerged_contender_there_are_times_but_no_speed_ups(model, clock, monkeypatch):
    monkeypatch.setitem(UNMERGED, "eager", Way(lambda model, images: {}["eager"]))
    rows = run(model, unmerged=["eager"])
    assert rows[0].error.startswith("KeyError") and rows[1].ms_p50 == pytest.approx(8) and not rows[1].speedup


def test_a_target_out_of_reach_gives_a_row_that_says_so(model, clock):
    entries = make_entries(model, pictures(4), ["tome"], [0.2, 0.999], progress=False)
    rows = run(model, entries, unmerged=["eager"])
    assert [row.target for row in rows] == ["", "cut 20 %", "cut 99.9 %"]
    assert "cannot meet cut 99.9 %" in rows[2].error and not rows[1].error


def test_an_interrupted_run_keeps_the_batch_sizes_that_were_done(model, clock, tmp_path):
    out, calls = tmp_path / "rows.csv", []

    def others(net):
        calls.append(net)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return []

    with pytest.raises(KeyboardInterrupt):
        run(model, batch_sizes=[1, 2], others=others, out=out)
    assert {row.batch for row in read_rows(out)} == {1}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_sizes": []}, "at least one of them"),
        ({"batch_sizes": [0]}, r"whole numbers >= 1, at least one of them; got \[0\]"),
        ({"rounds": 0}, "rounds and inner must be at least 1"),
        ({"unmerged": ["graph"]}, "'graph' is a CUDA graph and the model is on cpu; leave it out or use CUDA"),
        ({"merged": ["magic"]}, "there is no way 'magic' to run a model; choose from packed"),
    ],
)
def test_a_mistake_gets_a_message(model, options, told):
    with pytest.raises(BadOption, match=told):
        run(model, **options)


def test_images_must_be_images(model):
    with pytest.raises(BadImages, match=r"expected images as a tensor .* got \(0, 3, 64, 64\)"):
        bench(model, torch.zeros(0, 3, 64, 64), {})


# --- contenders ------------------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was_found_and_its_twin_has_the_same_parameters(clock):
    model = build("vit").train()
    apply(model, tome(2))
    blocks, keys = model.blocks, list(model.state_dict())
    run(model)
    assert model.blocks is blocks and model.training and list(model.state_dict()) == keys
    copy = twin(model)
    assert copy is not model and copy.blocks is not blocks
    assert all(a is b for a, b in zip(copy.parameters(), model.parameters(), strict=True))


def test_every_contender_gives_the_outputs_of_its_recipe(model):
    images = pictures(4)
    ways = {name: way for name, way in MERGED.items() if not way.captured}
    chosen = RECIPES["adaptive"](model, images)
    prices = meter(model)
    found = list(contenders.merged_contenders(model, Entry("it", chosen), ways, prices))
    with torch.inference_mode():
        expected = apply(twin(model), chosen)(images)
        for contender in found:
            torch.testing.assert_close(contender.prepare(images)(images), expected, rtol=1e-4, atol=1e-4)


def test_what_depends_on_the_images_is_not_captured_blindly(model):
    images = pictures(4)
    ways = {"graph": Way(contenders.graph, captured=True, runtime="reference")}
    for name, number in (("tome", 1), ("adaptive", 0)):
        entry = Entry(name, RECIPES[name](model, images))
        assert len(list(contenders.merged_contenders(model, entry, ways, meter(model)))) == number


def test_entries_are_what_solve_finds(model):
    images = pictures(5, seed=1)
    variants = {"tome": Variant("tome"), "it": Variant("adamerge", {"affinity": "cosine"})}
    native = {"tome r=2": Variant("tome", {"r": 2})}
    entries = make_entries(model, images, variants, [0.2], native=native, sense="paper", tolerance=0.03, progress=False)
    assert [entry.method for entry in entries] == ["tome", "it", "tome r=2"]
    for entry, (label, variant) in zip(entries[:2], variants.items(), strict=True):
        options = {"sense": "paper", "tolerance": 0.03, "options": variant.options}
        found = solve(model, images, METHODS[variant.method], Target(cut=0.2), **options)
        assert (entry.recipe, entry.knob, entry.target) == (found.recipe, found.knob, "cut 20 %"), label
    assert entries[1].recipe and entries[1].recipe.stats is not None
    assert (entries[2].recipe, entries[2].knob, entries[2].target) == (tome(2), 2, "native")
    with pytest.raises(BadOption, match="there is no variant 'foo'"):
        make_entries(model, images, ["foo"], [0.2])


@pytest.mark.slow
def test_the_real_ways_of_this_device_run(model):
    rows = run(model, rounds=2)
    assert [row.way for row in rows if row.method == "none"] == ["eager", "compiled"]
    assert not any(row.error for row in rows)


# --- images ----------------------------------------------------------------------------------------------------------


def test_drawn_images_have_the_models_size_and_normalisation():
    from adamerge.embedded import load, preprocess, scenes

    torch.testing.assert_close(drawn_images(load(), 3, seed=5), preprocess(scenes(0, 3, seed=5).images))
    small = drawn_images(build("vit").to(torch.bfloat16), 2, seed=0)
    assert small.shape == (2, 3, 64, 64) and small.dtype == torch.bfloat16


def save_images(root: Path, number: int) -> Path:
    for index in range(number):
        home = root / f"class{index % 3}"
        home.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (90, 80), (20 * index, 100, 50)).save(home / f"{index}.png")
    return root


def test_images_of_a_folder_need_no_labels_of_the_model_and_get_its_size(model, tmp_path):
    root = save_images(tmp_path / "images", 6)
    (root / "class0" / "broken.png").write_bytes(b"nothing")
    images, files = folder_images(model, root, 10, workers=0)
    assert images.shape == (6, 3, 64, 64)
    assert "broken.png" in (files.complaint() or "")
    (tmp_path / "none" / "a").mkdir(parents=True)
    (tmp_path / "none" / "a" / "broken.png").write_bytes(b"nothing")
    with pytest.raises(BadImages, match=r"none of the images in .* could be read"):
        folder_images(model, tmp_path / "none", 3, workers=0)


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
    from adamerge.show.speed import _curves, speed

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
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    words = ("--batch", "1,2", "--methods", "tome", "--native", "tome:r=8", "--cut", "0.3", "--plot", "speed.png")
    done = call(*words, *QUICK, "--ways", "reference")
    assert done.exit_code == 0, done.output
    rows = read_rows("bench.csv")
    assert [(row.batch, row.method, row.target) for row in rows] == [
        (size, *one) for size in (1, 2) for one in (("none", ""), ("tome", "cut 30 %"), ("tome:r=8", "native"))
    ]
    assert {(row.model, row.weights, row.images) for row in rows} == {("embedded", "embedded", "drawn")}
    assert rows[1].cut_paper == pytest.approx(0.3, abs=0.02) and rows[1].sense == "paper"
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
    ("words", "told"),
    [
        (["--batch", "x"], "--batch is whole numbers separated by commas, such as 1,8,32; got 'x'"),
        (["--batch", "4,0"], "--batch sizes must be at least 1; got '4,0'"),
        (["--cut", "x"], "--cut is numbers separated by commas, such as 0.23,0.5; got 'x'"),
        (["--cut", "2"], "cut is the share of the cost to save and must be between 0 and 1; got 2.0"),
        (["--methods", "foo"], "there is no variant 'foo'; choose from adamerge"),
        (["--methods", ""], "there is nothing to time beside the unmerged model; give --methods or --native"),
        (["--count", "half"], "--count must be paper or true; got 'half'"),
        (["--dtype", "int8"], "--dtype must be one of fp32, bf16, fp16; got 'int8'"),
        (["--plot", "speed.jpg"], "--plot writes a PNG; got 'speed.jpg'. Let its name end in .png."),
        (["--images", "0"], "--images must be at least 1 and --calibration-images 2; got 0 and 64"),
        (["--image-size", "64"], "the embedded model takes images of 224 pixels; got --image-size 64"),
        (["--model", "vit_nothing"], "timm has no model 'vit_nothing'"),
        (["--model", "resnet18", "--image-size", "64"], "timm could not make 'resnet18' for images of 64 pixels"),
        (["--data", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_a_mistake_on_the_command_line_gets_a_message(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = call(*words).exception
    assert isinstance(error, AdamergeError) and told in str(error)
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
