"""The command line as a user meets it: results where promised, and a message instead of a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import adamerge
from adamerge.cli.app import app, main

# Users run without the shape checker, which also trips over typer's own types.
pytestmark = pytest.mark.usefixtures("unchecked")

FIGURES = {
    "top1", "top5", "agreement", "kl", "gmacs_paper", "gmacs_true", "merged_mean", "merged_std", "r_per_layer",
    "images_per_second", "model", "method", "versions",
}  # fmt: skip


def call(*words: str) -> int:
    """Run a command in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["adamerge", *words])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images for each of the embedded model's classes."""
    from adamerge.embedded import CLASSES, scenes

    drawn = scenes(0, 24, size=224)
    root = tmp_path / "images"
    for image, label in zip(drawn.images, drawn.labels.tolist(), strict=True):
        home = root / f"{label:02d}-{CLASSES[label].replace(' ', '-')}"
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image.permute(1, 2, 0) * 255).byte().numpy()).save(home / "a.png")
    return root


def test_calibrate_then_eval_writes_all_figures(tmp_path, folder, capsys):
    stats, out = tmp_path / "stats.json", tmp_path / "out.json"
    assert call("calibrate", "--images", "8", "--r-max", "9", "--out", str(stats)) == 0
    words = ["--data", str(folder), "--workers", "0", "--r-max", "9", "--stats", str(stats), "--json", str(out)]
    assert call("eval", "--method", "adamerge", *words) == 0
    report = json.loads(out.read_text())
    assert set(report) >= FIGURES
    assert report["images"] == 24 and len(report["r_per_layer"]) == 12
    assert 0 < report["gmacs_paper"] < report["gmacs_paper_unmerged"]
    assert "agreement with unmerged" in capsys.readouterr().out


def test_eval_packs_on_request(tmp_path):
    out = {runtime: tmp_path / f"{runtime}.json" for runtime in ("reference", "packed")}
    for runtime, file in out.items():
        words = ["--method", "tome", "--r", "8", "--images", "8", "--runtime", runtime, "--json", str(file)]
        assert call("eval", *words) == 0
    found = {runtime: json.loads(file.read_text()) for runtime, file in out.items()}
    assert [report["runtime"] for report in found.values()] == ["reference", "packed"]
    assert found["packed"]["kl"] == pytest.approx(found["reference"]["kl"], rel=1e-3) and found["packed"]["kl"] > 0


def test_the_unmerged_model_is_method_none(tmp_path):
    out = tmp_path / "none.json"
    assert call("eval", "--method", "none", "--images", "8", "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["kl"] == 0 and report["agreement"] == 1 and report["gmacs_true"] == report["gmacs_true_unmerged"]


def test_an_unreadable_image_is_named_and_counted_and_skipped_only_on_request(tmp_path, folder, capsys):
    (folder / "00-clock-before-six" / "broken.png").write_bytes(b"not an image")
    out = tmp_path / "out.json"
    words = ["eval", "--method", "none", "--data", str(folder), "--workers", "0", "--json", str(out)]
    assert call(*words) == 1
    told = capsys.readouterr().err
    assert "1 image file(s) could not be read" in told and "broken.png" in told and "--skip-bad" in told
    assert json.loads(out.read_text())["images"] == 24
    assert call(*words, "--skip-bad") == 0
    assert "broken.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["eval", "--method", "none", "--runtime", "fast"],
            "runtime must be one of auto, reference, packed; got 'fast'",
        ),
        (["eval", "--method", "foo"], "there is no method 'foo'; choose one of adamerge"),
        (["eval", "--method", "tome", "--r-max", "3"], "tome does not know '--r-max'; it takes --r NUMBER"),
        (["eval", "--method", "tome"], "tome needs --r"),
        (["eval", "--method", "tome", "--r", "x"], "--r must be a number; got 'x'"),
        (["eval", "--method", "tome", "--r"], "--r needs a value"),
        (["eval", "--method", "adamerge", "--r-max", "-1"], "r_max must be >= 0; got -1.0"),
        (["eval", "--method", "adamerge", "--r-max", "nan"], "r_max must be a finite number; got nan"),
        (["eval", "--method", "adamerge", "--r-max", "8,x"], "--r-max must be a number; got 'x'"),
        (["eval", "--method", "adamerge", "--r-max"], "--r-max needs a value (NUMBER[,NUMBER…])"),
        (["eval", "--method", "adamerge", "--r-max", "9"], "adapts to calibrated statistics and has none"),
        (["eval", "--method", "adamerge", "--r-max", "9", "--stats", "no.json"], "cannot read the statistics no.json"),
        (["eval", "--method", "none", "--data", "nowhere"], "nowhere is not a folder"),
        (["eval", "--method", "none", "--images", "0"], "at least 1"),
        (["eval", "--method", "none", "--dtype", "int8"], "--dtype must be one of fp32, bf16, fp16; got 'int8'"),
        (["eval", "--method", "none", "--device", "moon"], "cannot be put on device 'moon'"),
        (["eval", "--method", "none", "--model", "vit_tiny_patch16_224"], "needs weights: --weights FILE.safetensors"),
        (["eval", "--method", "none", "--model", "vit_nothing", "--pretrained"], "timm has no model 'vit_nothing'"),
        (["calibrate", "--method", "tome", "--r", "3"], "only adaptive budgets have statistics"),
        (["calibrate", "--r-max", "9", "--how", "sideways"], "how must be one of iterative, sequential"),
        (["flops", "--method", "ats", "--tokens", "9"], "depends on the images"),
    ],
)
def test_a_mistake_gets_a_message_and_no_traceback(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 1
    error = capsys.readouterr().err
    assert told in " ".join(error.split()) and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_model_are_refused_with_the_keys_that_differ(tmp_path, capsys):
    save_file({"head.weight": torch.zeros(2, 2), "stranger": torch.zeros(1)}, tmp_path / "w.safetensors")
    words = ["--model", "vit_tiny_patch16_224", "--weights", str(tmp_path / "w.safetensors")]
    assert call("eval", "--method", "none", *words) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "does not fit the model" in told and "1 unknown ['stranger']" in told and "Is it for another model?" in told


def test_a_folder_of_other_classes_is_refused(folder, capsys):
    (folder / "99-unicorn").mkdir()
    Image.new("RGB", (8, 8)).save(folder / "99-unicorn" / "a.png")
    assert call("eval", "--method", "none", "--data", str(folder), "--workers", "0") == 1
    assert "has 25 class folders but the model has 24 classes" in " ".join(capsys.readouterr().err.split())


def test_flops_prints_the_papers_figure(capsys):
    assert call("flops", "--model", "vit_base_patch16_224", "--method", "tome", "--r", "8") == 0
    assert "13.441 GMACs in the paper's count" in capsys.readouterr().out


def test_flops_prices_counts_that_adapt_at_every_second_block(capsys):
    assert call("flops", "--method", "adamerge", "--r-max", ",".join(["8", "0"] * 6)) == 0
    (left,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens left")]
    counts = [int(word) for word in left.split(":")[1].split()]
    assert counts == [counts[0] - 4 * (layer // 2) for layer in range(12)]


def test_methods_lists_every_method(capsys):
    from adamerge.methods import METHODS

    assert call("methods") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in METHODS)


def test_the_demo_writes_its_table_and_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("adamerge.experiments.demo.CALIBRATION_IMAGES", 8)
    monkeypatch.setattr("adamerge.experiments.demo.TRIES", 1)
    assert call("demo", "--images", "4", "--out", str(tmp_path / "demo")) == 0
    files = {"results.json", "recipe.json", "mosaic.png", "pareto.png"}
    assert {p.name for p in (tmp_path / "demo").iterdir()} == files
    printed = capsys.readouterr()
    assert printed.out.count("◀ best") == 2, "one for each cut"
    assert "adamerge.apply(model, recipe)" in printed.out.splitlines()[-1]
    assert printed.err.count("\n") == 1, "one progress bar"
    rows = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert [row["method"] for row in rows] == [
        "none",
        *2 * ("ToMe", "AdaMerge (paper)", "preset (ours)", "tuned (ours)"),
    ]
    # Few images: the cuts are near their targets, not at them.
    assert all(abs(row["cut"] - row["target_cut"]) < 0.1 for row in rows)


def test_the_module_is_the_command_and_shows_its_help_without_torch():
    """In one new process for all commands: torch and timm take seconds to import."""
    code = """if True:
        import runpy, sys
        for words in (["--help"], ["-h"], ["--version"], *([name, "--help"] for name in NAMES)):
            sys.argv = ["adamerge", *words]
            try:
                runpy.run_module("adamerge", run_name="__main__")
            except SystemExit as end:
                assert not end.code, words
        heavy = {"torch", "timm", "torchvision", "transformers", "matplotlib", "numpy", "PIL"} & set(sys.modules)
        assert not heavy, heavy
    """
    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    code = f"NAMES = {names}\n{code}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Usage: adamerge") == 2 + len(names) and f"adamerge {adamerge.__version__}" in run.stdout
