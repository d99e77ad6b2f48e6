"""Commands calibrate on other images than they judge on, and print the figures under their names."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

# Imported before functions are replaced: a module that is first imported meanwhile would keep the replacement.
import adamerge.cli.chosen_method
import adamerge.evaluation
import adamerge.experiments.compare
import adamerge.finetuning.trainer
import adamerge.repairing.repairer
import adamerge.search.tuner
from adamerge.cli.app import app
from adamerge.embedded import preprocess, scenes
from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED
from adamerge.evaluation import Evaluation
from adamerge.flops import Cost
from adamerge.methods import tome

# The shape checker trips over typer's own types.
pytestmark = pytest.mark.usefixtures("unchecked")


def drawn(seed: int, number: int) -> torch.Tensor:
    return preprocess(scenes(0, number, seed=seed).images)


class Stop(Exception):
    """Ends a command once its images are known."""


@pytest.fixture
def seen(monkeypatch) -> dict[str, Any]:
    """What the commands pass on, by name: nothing runs."""
    found: dict[str, Any] = {}

    def keep(*names: str):
        def stop(model, *given, **options):
            found.update(zip(names, given, strict=False))
            found.update(options)
            raise Stop

        return stop

    monkeypatch.setattr("adamerge.evaluation.evaluate", keep("data"))
    monkeypatch.setattr("adamerge.calibration.calibrate", keep("images"))
    for name in ("calibrate", "solve_variant"):
        monkeypatch.setattr(f"adamerge.cli.chosen_method.{name}", keep("images"))
    monkeypatch.setattr("adamerge.search.tuner.tune_with_report", keep("images"))
    monkeypatch.setattr("adamerge.experiments.compare.compare", keep("images", "data"))
    monkeypatch.setattr("adamerge.repairing.repairer.repair_with_report", keep("images"))
    monkeypatch.setattr("adamerge.finetuning.trainer.finetune", keep("images"))
    return found


def run(*words: str) -> str:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"}).output


def first(data: Any) -> torch.Tensor:
    batch = next(iter(data))
    return batch if isinstance(batch, torch.Tensor) else batch[0]


def test_an_evaluation_reads_the_test_images(seen):
    run("eval", "--method", "tome", "--r", "2", "--images", "2")
    assert torch.equal(first(seen["data"]), drawn(TEST_SEED, 2))
    assert not torch.equal(drawn(TEST_SEED, 2), drawn(CALIBRATION_SEED, 2))


PRESET = ["--method", "preset"]
ADAPTIVE = ["--method", "adamerge", "--r-max", "3", "--calibration", "embedded"]


@pytest.mark.parametrize("words", [PRESET, ADAPTIVE], ids=["preset", "adaptive"])
def test_an_evaluation_calibrates_on_the_calibration_images(seen, words):
    run("eval", *words, "--images", "2", "--calibration-images", "3")
    assert torch.equal(first(seen["images"]), drawn(CALIBRATION_SEED, 3))


def photos(root: Path, colour: str, folders: int) -> str:
    """A folder of one image in each of its folders, all of one colour."""
    for number in range(folders):
        (root / f"{number:02d}").mkdir(parents=True)
        Image.new("RGB", (40, 40), colour).save(root / f"{number:02d}" / "a.png")
    return str(root)


def test_an_evaluation_in_a_folder_calibrates_on_the_images_of_the_other_folder(seen, tmp_path):
    judged, other = photos(tmp_path / "judged", "black", 24), photos(tmp_path / "other", "white", 3)
    run("eval", *PRESET, "--data", judged, "--calibration", other, "--workers", "0", "--calibration-images", "2")
    images = first(seen["images"])
    assert len(images) == 2 and images.min() > 0, "the other images are not white"


def test_a_search_reads_the_calibration_images(seen, tmp_path):
    run("tune", "--cut", "0.3", "--images", "8", "--out", str(tmp_path / "recipe.json"))
    assert torch.equal(first(seen["images"]), drawn(CALIBRATION_SEED, 8))


def test_a_calibration_reads_the_calibration_images(seen, tmp_path):
    run("calibrate", "--r-max", "3", "--images", "2", "--out", str(tmp_path / "stats.json"))
    assert torch.equal(first(seen["images"]), drawn(CALIBRATION_SEED, 2))


def test_a_comparison_calibrates_on_some_images_and_judges_on_others(seen, tmp_path):
    run("compare", "--out", str(tmp_path), "--methods", "tome", "--images", "2", "--calibration-images", "3")
    assert torch.equal(first(seen["images"]), drawn(CALIBRATION_SEED, 3))
    assert torch.equal(first(seen["data"]), drawn(TEST_SEED, 2))


def test_a_comparison_in_a_folder_calibrates_on_the_images_of_the_other_folder(seen, tmp_path):
    judged, other = photos(tmp_path / "judged", "black", 24), photos(tmp_path / "other", "white", 3)
    words = ["--data", judged, "--calibration", other, "--workers", "0", "--images", "2", "--calibration-images", "2"]
    run("compare", "--out", str(tmp_path / "out"), "--methods", "tome", *words)
    assert first(seen["images"]).min() > 0 > first(seen["data"]).max()


def test_a_repair_reads_the_calibration_images(seen, tmp_path):
    recipe, out = tmp_path / "recipe.json", tmp_path / "repaired.json"
    tome(2).save(recipe)
    run("repair", "--recipe", str(recipe), "--images", "8", "--out", str(out))
    assert torch.equal(first(seen["images"]), drawn(CALIBRATION_SEED, 8))


def test_a_training_calibrates_on_some_images_and_judges_on_others(seen, tmp_path):
    words = ["--images", "2", "--calibration-images", "3", "--out", str(tmp_path)]
    run("finetune", *PRESET, *words)
    assert torch.equal(first(seen["images"]), drawn(CALIBRATION_SEED, 3))
    run("finetune", "--method", "tome", "--r", "2", *words)
    assert torch.equal(first(seen["judge"]), drawn(TEST_SEED, 2))


def test_the_table_of_an_evaluation_has_every_figure_under_its_name(monkeypatch):
    """Every figure is a number of its own, so that none can stand for another."""

    def share(number: int) -> torch.Tensor:
        return torch.arange(100) < number

    known = Evaluation(
        top1=share(51),
        top5=share(62),
        full_top1=share(73),
        agreement=share(84),
        kl=torch.full((100,), 0.125, dtype=torch.float64),
        cost=Cost(torch.full((100,), 1.5e9).double(), torch.full((100,), 2.5e9).double()),
        full_cost=Cost(torch.tensor([3.5e9]).double(), torch.tensor([4.5e9]).double()),
        r=torch.tensor([[1, 5], [3, 5]] * 50),
        seconds=2.0,
        full_seconds=7.0,
        timed=34,
        patches=16,
    )
    monkeypatch.setattr(adamerge.evaluation, "evaluate", lambda *given, **options: known)
    text = run("eval", "--method", "tome", "--r", "2", "--images", "2")
    for name, figures in {
        "top-1": ["51.00%", "unmerged 73.00%"],
        "top-5": ["62.00%"],
        "agreement with unmerged": ["84.00%"],
        "KL(unmerged ‖ merged)": ["0.1250"],
        "GMACs, paper's count": ["1.5000", "unmerged 3.5000"],
        "GMACs, true": ["2.5000", "unmerged 4.5000"],
        "merged tokens": ["7.0 ± 1.0"],
        "r per layer": ["2.0 5.0"],
        "speed": ["3.50×", "17 images/s"],
    }.items():
        [line] = [line for line in text.splitlines() if re.search(rf"[│|] {re.escape(name)} ", line)]
        cells = re.split(r" *[│|] *", line.strip("│| "))
        assert all(any(figure in cell for cell in cells[1:]) for figure in figures), (line, figures)
