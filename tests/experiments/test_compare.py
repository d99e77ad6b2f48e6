"""A comparison: what is measured, what is stored and not measured again, and what is written."""

import csv
import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import timm
import torch
from hosts.families import build, pictures, randomised
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import adamerge
import adamerge.experiments.compare as comparison
from adamerge.core.errors import AdamergeError, BadImages, BadOption
from adamerge.core.match import Bipartite, Keys, Tokens
from adamerge.evaluation import evaluate
from adamerge.experiments.bootstrap import paired
from adamerge.experiments.compare import compare
from adamerge.experiments.comparison_rows import ComparisonRow, headings, texts, to_markdown
from adamerge.methods import METHODS, tome
from adamerge.search.solve import solve
from adamerge.search.target import Target
from adamerge.search.variants import VARIANTS, Variant

METHODS_HERE = {"tome": Variant("tome"), "evit": Variant("evit"), "adaptive": Variant("adamerge")}
BUDGETS = (0.2, Target(gmacs=0.006))
TOLERANCE = 0.03


@pytest.fixture(scope="module")
def model():
    return build("vit", patch_size=8, depth=4)


@pytest.fixture(scope="module")
def calibration():
    return pictures(5, seed=1)


@pytest.fixture(scope="module")
def data(model):
    """Labels that the model gets right about half the time."""
    images = pictures(12, seed=2)
    with torch.no_grad():
        labels = model(images).argmax(1)
    labels[::2] = (labels[::2] + 1) % 10
    return list(zip(images.split(5), labels.split(5), strict=True))


@pytest.fixture(scope="module")
def finished(model, calibration, data, tmp_path_factory):
    """A finished comparison: its folder and its rows."""
    out = tmp_path_factory.mktemp("finished")
    return out, run(model, calibration, data, out)


def run(model, calibration, data, out, **options) -> list[ComparisonRow]:
    settings = dict(methods=METHODS_HERE, budgets=BUDGETS, tolerance=TOLERANCE, name="tiny", progress=False)
    return compare(model, calibration, data, out=out, **{**settings, **options})


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """The labels of the cells that are measured, in order; nothing is drawn."""
    seen: list[str] = []
    inner = comparison.measure

    def counted(shared, cell):
        seen.append(cell.label)
        return inner(shared, cell)

    monkeypatch.setattr(comparison, "measure", counted)
    monkeypatch.setattr(comparison, "_draw", lambda rows, path: None)
    return seen


# --- what is measured ------------------------------------------------------------------------------------------------


def test_every_cell_has_a_row_and_the_first_is_the_unmerged_model(finished):
    _, rows = finished
    assert [(row.method, row.budget) for row in rows] == [
        ("none", "native"),
        *((label, budget) for budget in ("cut 20 %", "0.006 GMACs") for label in METHODS_HERE),
    ]
    first = rows[0]
    assert (first.kl, first.agreement, first.speedup, first.cut_true, first.delta_top1) == (0, 1, 1, 0, 0)
    assert first.top1 == 0.5 and first.images == 12 and first.model == "tiny"


def test_a_row_says_what_solving_and_evaluating_by_hand_say(finished, model, calibration, data):
    _, rows = finished
    row = next(row for row in rows if (row.method, row.budget) == ("adaptive", "cut 20 %"))
    solution = solve(model, calibration, METHODS["adamerge"], 0.2, tolerance=TOLERANCE)
    figures = evaluate(model, data, solution.recipe, progress=False).summary()
    for name in ("top1", "top5", "agreement", "kl", "gmacs_true", "gmacs_paper", "merged_mean", "merged_std", "images"):
        assert getattr(row, name) == pytest.approx(figures[name], rel=1e-5), name
    assert row.knob == solution.knob and row.met and row.target_cut == pytest.approx(0.2)
    assert row.delta_top1 == pytest.approx(100 * (figures["top1"] - figures["top1_unmerged"]))
    assert row.cut_paper == pytest.approx(1 - figures["gmacs_paper"] / figures["gmacs_paper_unmerged"])
    assert row.speedup > 0 and row.images_per_second > 0


def test_the_difference_to_the_rival_is_paired_over_images(finished, model, calibration, data):
    _, rows = finished
    at = {row.method: row for row in rows if row.budget == "cut 20 %"}
    kl = []
    for name in ("evit", "tome"):
        recipe = solve(model, calibration, METHODS[name], 0.2, tolerance=TOLERANCE).recipe
        kl.append(evaluate(model, data, recipe, progress=False).kl)
    expected = paired(*kl)
    row = at["evit"]
    assert (row.kl_vs_rival, row.kl_vs_rival_low, row.kl_vs_rival_high) == (
        pytest.approx(expected.mean, rel=1e-4),
        pytest.approx(expected.low, rel=1e-4),
        pytest.approx(expected.high, rel=1e-4),
    )
    assert row.top1_vs_rival == pytest.approx(100 * (row.top1 - at["tome"].top1))
    assert row.rival == "tome" and row.rival_met == at["tome"].met
    assert at["tome"].rival == "" and at["tome"].kl_vs_rival is None


def test_the_unmerged_model_runs_once_and_beside_a_few_timed_batches(model, calibration, data, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "TIMED", 0)
    runs: list[int] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    run(model, calibration, data, tmp_path, methods=["tome"], budgets=[], native={"a": Variant("tome", {"r": 2})})
    handle.remove()
    # The unmerged model runs 3 batches once and then 1 for each of the 2 cells; both cells run 3 batches.
    assert len(runs) == 3 + 2 + 2 * 3


def test_a_rival_that_is_missing_is_added(model, calibration, data, tmp_path):
    rows = run(model, calibration, data, tmp_path, methods=["evit"], budgets=[0.2])
    assert [row.method for row in rows] == ["none", "evit", "tome"]


def test_native_parameters_need_no_target(model, calibration, data, tmp_path):
    native = {"tome r=3": Variant("tome", {"r": 3}), "ours": Variant("adamerge", {"r_max": 4.0}, how="sequential")}
    rows = run(model, calibration, data, tmp_path, budgets=[], native=native)
    assert [row.method for row in rows] == ["none", "tome r=3", "ours"]
    assert [(row.knob, row.target_cut, row.met) for row in rows[1:]] == [(3, None, True), (4.0, None, True)]
    assert json.loads(rows[2].options) == {"r_max": 4.0, "how": "sequential"}
    assert rows[1].kl == pytest.approx(evaluate(model, data, tome(3), progress=False).summary()["kl"], rel=1e-5)


def test_a_target_out_of_reach_is_left_out_with_a_warning(model, calibration, data, tmp_path):
    methods = {"tome": Variant("tome"), "late": Variant("dsm", {"delay": 3})}
    with pytest.warns(UserWarning, match=r"^left out: late, cut 40 %: dsm cannot meet cut 40 % on this model: "):
        rows = run(model, calibration, data, tmp_path, methods=methods, budgets=[0.4])
    assert [row.method for row in rows] == ["none", "tome"]
    assert "* late, cut 40 %: dsm cannot meet cut 40 % on this model" in (tmp_path / "results.md").read_text("utf-8")


def test_the_model_is_left_as_it_was_found(calibration, data, tmp_path):
    model = adamerge.apply(build("vit", patch_size=8, depth=4), tome(2)).train()
    blocks = model.blocks
    run(model, calibration, data, tmp_path, budgets=[], native={"a": Variant("adamerge", {"r_max": 3.0})})
    assert model.blocks is blocks and all(module.training for module in model.modules())


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_finished_comparison_is_not_measured_again(finished, model, calibration, data, measured):
    out, rows = finished
    assert run(model, calibration, data, out) == rows
    assert measured == []


def test_a_killed_run_goes_on_where_it_stopped(model, calibration, data, tmp_path, finished, monkeypatch, measured):
    counted = comparison.measure

    def killed(shared, cell):
        if len(measured) == 3:
            raise KeyboardInterrupt
        return counted(shared, cell)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(comparison, "measure", killed)
        run(model, calibration, data, tmp_path)
    assert len(list((tmp_path / "cells").iterdir())) == 3
    assert len((tmp_path / "cells.jsonl").read_text("utf-8").splitlines()) == 3
    assert measured == ["none", "tome", "evit"]
    measured.clear()
    rows = run(model, calibration, data, tmp_path)
    assert measured == ["adaptive", "tome", "evit", "adaptive"]
    assert [(row.method, row.kl, row.knob) for row in rows] == [(row.method, row.kl, row.knob) for row in finished[1]]


def test_a_damaged_cell_is_measured_again(model, calibration, data, tmp_path, measured):
    native = {"a": Variant("tome", {"r": 2})}
    run(model, calibration, data, tmp_path, budgets=[], native=native)
    for file in (tmp_path / "cells").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    measured.clear()
    run(model, calibration, data, tmp_path, budgets=[], native=native)
    assert measured == ["none", "a"]


@pytest.mark.parametrize("change", ["images", "labels", "calibration", "head", "options", "cost", "dtype"])
def test_a_change_of_anything_that_affects_a_cell_makes_it_another_cell(calibration, data, tmp_path, measured, change):
    model = build("vit", patch_size=8, depth=4)
    options = {"budgets": [], "native": {"a": Variant("tome", {"r": 2})}}
    run(model, calibration, data, tmp_path, **options)
    measured.clear()
    if change == "images":
        data = [(images.flip(0), labels) for images, labels in data]
    if change == "labels":
        data = [(images, labels.flip(0)) for images, labels in data]
    if change == "calibration":
        calibration = calibration.flip(0)
    if change == "head":
        model.load_state_dict({**model.state_dict(), "head.weight": torch.randn(10, 48)})
    if change == "options":
        options["native"] = {"a": Variant("tome", {"r": 3})}
    if change == "cost":
        options["cost"] = "paper"
    if change == "dtype":
        model = model.double()
    run(model, calibration, data, tmp_path, **options)
    assert measured == (["a"] if change == "options" else ["none", "a"])


def test_recipes_that_differ_only_in_the_class_of_a_part_are_different_cells(
    model, calibration, data, tmp_path, measured
):
    """Both metrics have no fields, so only the names of their classes tell them apart."""
    by_keys = tome(2)
    assert isinstance(by_keys.links, Bipartite) and by_keys.links.metric == Keys()
    by_tokens = replace(by_keys, links=replace(by_keys.links, metric=Tokens()))
    for recipe in (by_keys, by_tokens):
        run(model, calibration, data, tmp_path, methods=[], budgets=[], recipes={"mine": recipe})
    assert measured == ["none", "mine", "mine"]


def test_a_cell_keeps_a_number_for_every_image(finished):
    out, rows = finished
    files = sorted((out / "cells").iterdir())
    assert len(files) == len(rows) and not any(file.name.startswith(".") for file in files)
    names = {"top1", "top5", "full_top1", "agreement", "kl", "true", "paper", "merged"}
    for file in files:
        kept = load_file(file)
        assert set(kept) >= names and all(kept[name].shape == (12,) for name in names)
        assert torch.equal(kept["r"].sum(1), kept["merged"]) and kept["r"].shape == (12, 4)
        if kept["merged"].unique().numel() > 1:
            assert kept["simplest_images"].shape == kept["complex_images"].shape == (4, 3, 96, 96)
            assert (64 - kept["merged"])[kept["simplest_numbers"]].tolist() == kept["simplest_tokens"].tolist()
            assert kept["complex_tokens"].tolist() == sorted((64 - kept["merged"]).tolist(), reverse=True)[:4]
        else:
            assert set(kept) == {*names, "r"}
    facts = [json.loads(line) for line in (out / "cells.jsonl").read_text("utf-8").splitlines()]
    assert [fact["method"] for fact in facts] == [row.method for row in rows]


# --- what is written -------------------------------------------------------------------------------------------------


def test_the_csv_holds_the_rows(finished):
    out, rows = finished
    with open(out / "results.csv", encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == [field.name for field in fields(ComparisonRow)]
    for line, row in zip(read, rows, strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in asdict(row).items()}


def test_the_markdown_holds_the_rows(finished):
    out, rows = finished
    text = (out / "results.md").read_text("utf-8")
    assert text == to_markdown(rows)
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert table[0] == list(headings(rows)) and "Δ KL vs tome" in table[0]
    assert [cells[0] for cells in table[2:]] == ["unmerged", *(row.method for row in rows[1:])]


def test_a_target_that_is_not_met_is_marked(finished):
    row = finished[1][1]
    missed = ComparisonRow(**{**asdict(row), "met": False})
    assert texts(missed)[1] == "cut 20 % ≈" and texts(ComparisonRow(**{**asdict(row), "met": True}))[1] == "cut 20 %"


def test_the_picture_is_drawn_and_repeats(finished, tmp_path):
    from adamerge.experiments.comparison_plot import pareto

    out, rows = finished
    with Image.open(out / "pareto.png") as picture:
        assert picture.size[0] == 2400 and len(set(picture.convert("L").tobytes())) > 20
    again = pareto(rows, tmp_path / "again.png")
    assert again.read_bytes() == (out / "pareto.png").read_bytes()
    with pytest.raises(BadOption, match=r"^pareto needs at least one row; got none$"):
        pareto([], tmp_path / "none.png")


def test_mistakes_are_named_before_anything_runs(model, calibration, data, tmp_path, unchecked, measured):
    for options, text in (
        (dict(methods=["tomato"]), "there is no variant 'tomato'; choose from adamerge, "),
        (dict(methods={"a": Variant("tomato")}), "there is no method 'tomato'; choose one of adamerge, "),
        (dict(methods={"a": Variant("tome", {"q": 1})}), "tome cannot be made with {'q': 1, 'r': 0}: "),
        (dict(native={"a": Variant("tome")}), "tome cannot be made with {}: "),
        (dict(methods=[]), "there is nothing to compare; give methods and budgets, native variants, or recipes"),
        (dict(budgets=[2.0]), "cut is the share of the cost to save and must be between 0 and 1; got 2.0"),
        (dict(cost="false"), "cost must be one of true, paper; got 'false'"),
    ):
        with pytest.raises(BadOption, match="^" + re.escape(text)):
            run(model, calibration, data, tmp_path, **options)
    with pytest.raises(BadImages, match="pass a list or a DataLoader, not an iterator"):
        run(model, calibration, iter(data), tmp_path)
    with pytest.raises(BadImages, match=r"^there are no images to compare on"):
        run(model, calibration, [], tmp_path)
    assert measured == [] and list(tmp_path.iterdir()) == []


# --- the command -----------------------------------------------------------------------------------------------------


def command(*words: str):
    import typer

    from adamerge.cli.compare import compare as entry

    app = typer.Typer()
    app.command()(entry)
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "250"})


def folder(root: Path, seed: int) -> str:
    """An ImageFolder with one small image for each of a timm model's thousand classes."""
    pixels = torch.randint(0, 256, (1000, 8, 8, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    for label, image in enumerate(pixels.numpy()):
        (root / f"{label:04}").mkdir(parents=True)
        Image.fromarray(image).save(root / f"{label:04}" / "0.png")
    return str(root)


def test_the_command_compares_a_timm_model_on_folders(tmp_path):
    model = randomised(timm.create_model("test_vit"), seed=0)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    places = ["--data", folder(tmp_path / "data", 0), "--calibration", folder(tmp_path / "calibration", 1)]
    settings = ["--methods", "evit, tome", "--cut", "0.2", "--images", "5", "--calibration-images", "3"]
    words = ["--model", "test_vit", "--weights", str(tmp_path / "weights.safetensors"), *places, *settings]
    done = command("--out", str(tmp_path / "out"), "--workers", "0", "--batch-size", "3", "--dtype", "bf16", *words)
    assert done.exit_code == 0, (done.output, done.exception)
    with open(tmp_path / "out" / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["none", "evit", "tome"]
    assert {(row["model"], row["images"], row["dtype"]) for row in rows} == {("test_vit", "5", "bfloat16")}
    assert "evit" in done.output and "cut 20 %" in done.output
    (tmp_path / "data" / "0000" / "0.png").write_text("no image")
    done = command("--out", str(tmp_path / "out"), "--workers", "0", *words)
    assert isinstance(done.exception, BadImages) and str(done.exception).endswith(
        "Pass --skip-bad to compare on the others."
    )


def test_the_command_compares_on_the_embedded_model(tmp_path):
    words = ["--images", "6", "--calibration-images", "2", "--native", "tome:r=8", "--native", "evit:keep=0.7"]
    done = command("--out", str(tmp_path), *words)
    assert done.exit_code == 0, done.output
    with open(tmp_path / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["none", "tome:r=8", "evit:keep=0.7"]
    assert {row["model"] for row in rows} == {"embedded"} and {row["images"] for row in rows} == {"6"}
    for name in ("results.csv", "results.md", "pareto.png"):
        assert f"wrote {tmp_path / name}" in done.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--cut", "0.1", "--gmacs", "3"], "give either --cut or --gmacs, not both"),
        (["--cut", "a"], "--cut is numbers separated by commas, such as 0.2,0.4; got 'a'"),
        (["--native", "tome"], "tome needs --r; it takes --r NUMBER, --proportional-attention"),
        (["--native", "tome:8"], "--native is METHOD:OPTION=VALUE,OPTION=VALUE, such as tome:r=8; got 'tome:8'"),
        (["--native", "tome:q=8"], "tome does not know '--q=8'; it takes --r NUMBER, --proportional-attention"),
        (["--data", "somewhere"], "methods are calibrated on images other than those they are judged on"),
    ],
)
def test_mistakes_on_the_command_line_are_named(tmp_path, words, text):
    done = command("--out", str(tmp_path), *words)
    assert isinstance(done.exception, AdamergeError) and str(done.exception).startswith(text)


def test_every_label_can_be_given_on_the_command_line():
    from adamerge.cli.lists import read_labels

    assert read_labels(", ".join(VARIANTS)) == list(VARIANTS)


def test_values_on_the_command_line_are_read_as_numbers_truths_and_words():
    from adamerge.cli.lists import read_native

    text = "adamerge:r-max=9.5,split=alternating,proportional_attention=true"
    options = {"r_max": 9.5, "split": "alternating", "proportional_attention": True}
    assert read_native(text) == (text, Variant("adamerge", options))
