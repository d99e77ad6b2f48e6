"""The preset and recipe files are methods of the command line, and fine-tuned heads can be loaded."""

import csv
import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from test_commands import call

from adamerge.cli.loading import load_model
from adamerge.core.errors import BadOption
from adamerge.methods import tome

pytestmark = pytest.mark.usefixtures("unchecked")

FEW = ["--images", "4", "--calibration-images", "4"]


@pytest.mark.parametrize("options", [["--cut", "0.3"], ["--cut", "0.3", "--static"]], ids=len)
def test_eval_takes_the_preset(options, tmp_path):
    out = tmp_path / "out.json"
    assert call("eval", "--method", "preset", *options, *FEW, "--json", str(out)) == 0
    report = json.loads(out.read_text())
    assert report["method"] == "preset" and report["options"] == options
    assert report["gmacs_true"] / report["gmacs_true_unmerged"] == pytest.approx(0.7, abs=0.06)
    assert (report["merged_std"] == 0) == ("--static" in options)


def test_eval_calibrates_an_adaptive_method_if_it_is_given_images(tmp_path):
    out = tmp_path / "out.json"
    words = ["--method", "adamerge", "--r-max", "9", "--calibration", "embedded", *FEW]
    assert call("eval", *words, "--json", str(out)) == 0
    assert json.loads(out.read_text())["merged_mean"] > 0


def test_compare_takes_the_preset(tmp_path):
    words = ["--methods", "preset", "--rival", "preset (static)", "--cut", "0.3", *FEW]
    assert call("compare", *words, "--out", str(tmp_path)) == 0
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["none", "preset", "preset (static)"]
    assert all(abs(float(row["cut_true"]) - 0.3) < 0.06 and row["knob"] == "" for row in rows[1:])


def test_bench_takes_the_preset_and_recipe_files(tmp_path):
    tome(8).save(tmp_path / "mine.json")
    words = ["--batch", "1", "--rounds", "1", "--inner", "1", "--images", "1", "--calibration-images", "2"]
    words += ["--methods", "preset", "--recipe", str(tmp_path / "mine.json"), "--cut", "0.3"]
    out = tmp_path / "bench.csv"
    assert call("bench", *words, "--unmerged", "eager", "--ways", "reference", "--out", str(out)) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["target"], row["error"]) for row in rows] == [
        ("none", "", ""),
        ("preset", "cut 30 %", ""),
        ("mine", "recipe", ""),
    ]


def test_flops_prices_the_preset(capsys):
    assert call("flops", "--method", "preset", "--cut", "0.4") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "merged:" in line and "unmerged" not in line]
    assert -41 < float(line.rpartition("/ ")[2].removesuffix("%)")) < -39


def test_methods_lists_the_preset(capsys):
    assert call("methods") == 0
    assert "preset  The recipe of `adamerge.presets.best`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["eval", "--method", "preset", "--data", "x", "--model", "nothing"],
            "methods are calibrated on images other than those they are judged on: give --calibration FOLDER",
        ),
        (
            ["eval", "--method", "preset", "--cut", "2"],
            "cut is the share of the cost to save and must be between 0 and 1",
        ),
        (
            ["eval", "--method", "preset", "--r", "2"],
            "preset does not know '--r'; it takes --cut NUMBER, --gmacs NUMBER, --cost true|paper, --loss kl|features, "
            "--static, --merge-every NUMBER. The options of the command itself are in its --help.",
        ),
        (
            ["compare", "--native", "preset:cut=0.3", "--out", "x"],
            "a preset is made for a cost: give --methods preset --cut 0.3 instead of --native preset:cut=0.3",
        ),
        (
            ["calibrate", "--method", "preset"],
            "a preset is made for a cost and for images; use it with eval, compare, bench or flops",
        ),
        (
            ["compare", "--methods", "foo", "--model", "nothing", "--out", "x"],
            "there is no variant 'foo'; choose from adamerge",
        ),
    ],
)
def test_a_mistake_with_a_preset_gets_a_message(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 1
    assert told in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """The weights of a ViT with seven classes."""
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=7).state_dict(), path)
    return path


def test_weights_with_a_head_of_other_classes_are_loaded_by_their_number(weights, capsys):
    words = ["flops", "--model", "vit_tiny_patch16_224", "--weights", str(weights)]
    assert call(*words) == 1
    assert "Its head has 7 classes: give that number with --num-classes." in capsys.readouterr().err
    assert call(*words, "--num-classes", "7") == 0
    assert "12 blocks" in capsys.readouterr().out


def test_models_of_torchvision_get_the_number_of_classes():
    model = load_model("torchvision:vit_b_32", None, False, "cpu", "fp32", random=True, num_classes=3, image_size=32)
    with torch.inference_mode():
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("embedded", {}, "the embedded model has its own classes; leave --num-classes out"),
        ("transformers:x", {}, "a model of transformers is made by its configuration; leave --num-classes out"),
        ("vit_tiny_patch16_224", {"pretrained": True}, r"pretrained weights have their own. Got 7 and --pretrained$"),
        ("vit_tiny_patch16_224", {"num_classes": 0}, r"^--num-classes is the number .* at least 1; .* Got 0$"),
    ],
)
def test_a_number_of_classes_is_refused_where_it_cannot_be_chosen(name, options, told):
    pretrained, number = options.get("pretrained", False), options.get("num_classes", 7)
    with pytest.raises(BadOption, match=told):
        load_model(name, None, pretrained, "cpu", "fp32", num_classes=number)
