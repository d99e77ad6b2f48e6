"""The command line as a whole: version, tracebacks on request, Ctrl-C, warnings, help."""

import inspect
import warnings
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from test_commands import call

import adamerge
from adamerge.cli.compare import WIDE, table
from adamerge.cli.tune import tune
from adamerge.search.options import TuningOptions

pytestmark = pytest.mark.usefixtures("unchecked")


def test_the_version_is_shown(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith(f"adamerge {adamerge.__version__}, Python 3.")


@pytest.mark.parametrize("words", [["-h"], ["--help"]])
def test_the_help_names_every_command_and_debug(words, capsys):
    assert call(*words) == 0
    told = capsys.readouterr().out
    assert "--debug" in told and "traceback" in told and "--version" in told
    for name in ("calibrate", "eval", "flops", "methods", "demo", "show", "compare", "bench", "reproduce", "tune"):
        assert f" {name} " in told


@pytest.mark.parametrize("words", [["--debug", "eval", "--method", "foo"], ["eval", "--method", "foo", "--debug"]])
def test_debug_adds_the_traceback_to_the_message(words, capsys):
    assert call(*words) == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last)") and "find_method" in told
    assert told.splitlines()[-1].startswith("error: BadOption: there is no method 'foo'; choose one of adamerge")


def fail(error: BaseException):
    def raising(*args, **kwargs):
        raise error

    return raising


def test_ctrl_c_ends_in_a_message(capsys, monkeypatch):
    monkeypatch.setattr("adamerge.cli.options.usage", fail(KeyboardInterrupt()))
    assert call("methods") == 130
    told = capsys.readouterr().err
    assert told == "error: interrupted; no file was left half-written\n"


def test_an_unexpected_error_says_how_to_see_more(capsys, monkeypatch):
    monkeypatch.setattr("adamerge.cli.options.usage", fail(RuntimeError("broken")))
    assert call("methods") == 1
    told = "error: unexpected RuntimeError: broken (run again with --debug for the traceback)\n"
    assert capsys.readouterr().err == told


def test_warnings_are_notes_without_lines_of_code(capsys, monkeypatch):
    monkeypatch.setattr("adamerge.cli.options.usage", lambda make: warnings.warn("look here", stacklevel=2) or "")
    with warnings.catch_warnings():
        warnings.simplefilter("once")
        assert call("methods") == 0
    assert capsys.readouterr().err == "note: look here\n"


@pytest.mark.parametrize("command", ["eval", "tune"])
def test_a_negative_number_of_workers_is_refused_first(command, capsys):
    assert call(command, "--model", "nothing", "--workers", "-1") == 1
    assert capsys.readouterr().err == "error: BadOption: --workers must be at least 0; got -1\n"


def test_tune_has_the_defaults_of_the_library():
    """The command cannot import them: its help is shown without torch."""
    shown = inspect.signature(tune).parameters
    same = {field.name: field.default for field in fields(TuningOptions) if field.name in shown}
    assert len(same) == 11 and {name: shown[name].default for name in same} == same


def test_the_table_of_a_comparison_fits_80_columns(capsys):
    row = SimpleNamespace(
        model="embedded", images=100, dtype="float32", device="cpu", rival="tome",
        method="adamerge (sequential calibration)", budget="cut 30 %", met=False,
        knob=12.3456, cut_true=0.301, cut_paper=0.31, top1=0.7512, delta_top1=-1.5,
        delta_top1_low=-2.25, delta_top1_high=-0.75, agreement=0.9, kl=0.0123, kl_low=0.01, kl_high=0.02,
        merged_mean=100.0, merged_std=2.0, speedup=1.25, top1_vs_rival=0.1, top1_vs_rival_low=0.0,
        top1_vs_rival_high=0.2, kl_vs_rival=0.1, kl_vs_rival_low=0.0, kl_vs_rival_high=0.2, rival_met=True,
    )  # fmt: skip
    rows: Any = [row]
    Console(width=80).print(table(rows, 80))
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80 and "…" not in narrow
    for text in ("adamerge", "calibration)", "cut 30 % ≈", "30.1%", "75.12%", "-1.50", "0.0123", "1.25×"):
        assert text in narrow
    Console(width=WIDE).print(table(rows, WIDE))
    wide = capsys.readouterr().out
    assert "-1.50 [-2.25, -0.75]" in wide and "Δ KL vs tome" in wide and "…" not in wide


def test_a_file_of_statistics_is_no_recipe(tmp_path, capsys):
    path = tmp_path / "stats.json"
    adamerge.LayerStats((0.3,) * 12, (0.1,) * 12).save(path)
    assert call("eval", "--recipe", str(path)) == 1
    told = (
        f"error: BadOption: {path}: this is a file of statistics, as `adamerge calibrate` writes it, not of a recipe."
    )
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare", "--calibration-images", "0", "--out", "x"], "--calibration-images must be at least 1; got 0"),
        (["flops", "--model", "vit_base"], "timm has no model 'vit_base'; near are vit_base_mci_224, vit_base_patch"),
        (["flops", "--model", "vit_bse_patch16_224"], "near are vit_base_patch16_224, "),
    ],
)
def test_small_mistakes_get_the_right_name(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 1
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_statistics_of_one_image_get_a_note(tmp_path, capsys):
    assert call("calibrate", "--r-max", "9", "--images", "1", "--passes", "1", "--out", str(tmp_path / "s.json")) == 0
    assert "note: the statistics of a single image have no spread" in capsys.readouterr().err
