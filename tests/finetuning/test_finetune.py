"""Fine-tuning trains a merging model, and a run that was stopped ends with the same weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

import adamerge
from adamerge.core.errors import BadImages, BadOption
from adamerge.core.recipe import Recipe
from adamerge.core.weight_patch import WeightPatch
from adamerge.finetuning import trainer
from adamerge.finetuning.options import FinetuneOptions
from adamerge.hosts.base import find_host
from adamerge.methods import adamerge as published
from adamerge.methods import tome

QUICK: dict[str, Any] = {"epochs": 3, "batch_size": 8, "learning_rate": 1e-3, "progress": False}
STATES = ["model.safetensors", "adamerge.json", "log.csv", "checkpoint.safetensors"]


def make_model(drop: float = 0.0) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 3, "drop_path_rate": drop}
    return VisionTransformer(img_size=32, patch_size=8, **sizes).eval()


class Colours:
    """Images whose mean colour is their label, with noise that is drawn anew in every epoch."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = 0.5 * torch.randn(3, 32, 32)
        image[index % 3] += 1
        return image, index % 3


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(out, recipe: Recipe, drop: float = 0.0, **options: Any) -> Any:
    model = make_model(drop)
    adamerge.finetune(model, Colours(), recipe, out, options=FinetuneOptions(**{**QUICK, **options}))
    return model


def test_a_merging_model_learns_and_everything_is_written(tmp_path):
    data = Colours()
    judge = [(torch.stack([data[i][0] for i in range(24)]), torch.tensor([i % 3 for i in range(24)]))]
    model = make_model()
    options = FinetuneOptions(**{**QUICK, "epochs": 6})
    recipe = adamerge.finetune(model, data, tome(2), tmp_path, judge=judge, options=options)
    assert recipe == tome(2) == adamerge.load_recipe(tmp_path)
    assert same(load_file(tmp_path / "model.safetensors"), weights(model))
    rows = [line.split(",") for line in (tmp_path / "log.csv").read_text().splitlines()[1:]]
    found = {name: [float(value) for _, each, value in rows if each == name] for name in ("loss", "top1")}
    assert len(found["loss"]) == 6 and len(found["top1"]) == 7
    steps = [int(step) for step, name, _ in rows if name == "top1"]
    assert steps == [0, 6, 12, 18, 24, 30, 36]
    assert found["loss"][-1] < 0.8 * found["loss"][0] and found["top1"][-1] > 0.8
    assert list((tmp_path / "tensorboard").iterdir())
    with pytest.raises(adamerge.AdamergeError, match="does not merge"):
        adamerge.trace(model)


def test_the_seed_gives_the_weights_and_workers_change_nothing(tmp_path):
    one = run(tmp_path / "one", tome(2), drop=0.1)
    assert same(weights(one), weights(run(tmp_path / "two", tome(2), drop=0.1, workers=1)))
    assert not same(weights(one), weights(run(tmp_path / "three", tome(2), drop=0.1, seed=1)))


@pytest.mark.parametrize("stop", [1, 7, 12])
def test_a_stopped_run_ends_with_the_same_weights(stop, tmp_path, monkeypatch):
    """With everything that has a state: drop-path, mixup, the moving average, a teacher, statistics, half batches."""
    options: dict[str, Any] = {"ema": 0.9, "distillation": 0.5, "mixup": 0.2, "recalibrate": 1, "accumulate": 2}
    options |= {"calibration_images": 16, "save_every": 1, "batch_size": 4, "warm_up": 1, "epochs": 2}
    whole = run(tmp_path / "whole", published(r_max=4.0), drop=0.1, **options)
    keep = trainer.Finetuning._write

    def kill(self):
        keep(self)
        if self.done == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Finetuning, "_write", kill)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "part", published(r_max=4.0), drop=0.1, **options)
    again = run(tmp_path / "part", published(r_max=4.0), drop=0.1, **options)
    assert same(weights(again), weights(whole))
    for name in STATES:
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    refusal = "is the file of another training: it differs in learning_rate; choose another folder for the results, or "
    with pytest.raises(BadOption, match=refusal):
        run(tmp_path / "part", published(r_max=4.0), drop=0.1, **{**options, "learning_rate": 1.0})


def test_the_moving_average_is_what_is_written(tmp_path):
    plain, average = run(tmp_path / "a", tome(2)), run(tmp_path / "b", tome(2), ema=0.99)
    start = weights(make_model())

    def moved(model: Any) -> float:
        return sum(((value - start[name]) ** 2).sum().item() for name, value in weights(model).items())

    assert 0 < moved(average) < 0.5 * moved(plain)


def test_statistics_are_measured_again(tmp_path):
    recipe = adamerge.finetune(
        make_model(),
        Colours(),
        published(r_max=4.0),
        tmp_path,
        options=FinetuneOptions(**QUICK, recalibrate=2, calibration_images=16),
    )
    first = adamerge.calibrate(make_model(), torch.randn(8, 3, 32, 32), r_max=4.0, progress=False)
    assert recipe.stats is not None and recipe.stats.images == 16
    assert recipe.stats.mean != first.mean
    assert adamerge.load_recipe(tmp_path) == recipe


def test_the_patch_of_a_repaired_recipe_becomes_a_part_of_the_weights(tmp_path):
    from dataclasses import replace

    start = make_model()
    patch = WeightPatch.make({"norm.bias": torch.ones(32)}, find_host(start).fingerprint())
    trained = run(tmp_path, replace(tome(2), patch=patch), learning_rate=0.0)
    assert torch.equal(trained.norm.bias, start.norm.bias + 1)
    assert torch.equal(trained.norm.weight, start.norm.weight)
    assert adamerge.load_recipe(tmp_path).patch is None


def test_a_teacher_is_followed_by_the_divergence_from_its_probabilities():
    """KL(teacher || student): the student has to answer wherever the teacher does."""
    taught, learned = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    stand_in: Any = SimpleNamespace(
        options=FinetuneOptions(distillation=1.0),
        mixup=None,
        device=torch.device("cpu"),
        model=lambda images: learned,
        teacher=lambda images: taught,
    )
    loss = trainer.Finetuning._loss(stand_in, torch.zeros(1, 3, 32, 32), torch.tensor([0]))
    # 0.5 log(0.5 / 0.9) + 0.5 log(0.5 / 0.1); the other way it is 0.37.
    assert loss.item() == pytest.approx(0.5108, abs=1e-4)


def test_a_run_does_not_continue_with_other_images(tmp_path):
    class Mirrored(Colours):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            image, label = super().__getitem__(index)
            return image.flip(-1), label

    class Relabelled(Colours):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            image, label = super().__getitem__(index)
            return image, (label + 1) % 3

    run(tmp_path, tome(2), epochs=1)
    for data in (Mirrored(), Relabelled()):
        with pytest.raises(BadOption, match="differs in some_images"):
            adamerge.finetune(make_model(), data, tome(2), tmp_path, options=FinetuneOptions(**{**QUICK, "epochs": 1}))


def test_labels_that_the_model_has_no_class_for_are_refused(tmp_path):
    class TooMany(Colours):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return super().__getitem__(index)[0], 3 if index == 17 else 0

    with pytest.raises(BadImages, match="a label is 3, but the model has 3 classes, 0 to 2"):
        adamerge.finetune(make_model(), TooMany(), tome(2), tmp_path, options=FinetuneOptions(**QUICK))


def test_mistakes_are_named(tmp_path, unchecked):
    with pytest.raises(BadImages, match="a batch has 64 images, but there are only 48 to train on"):
        run(tmp_path, tome(2), batch_size=64)
    with pytest.raises(BadOption, match=r"pass loader\.dataset instead of a loader"):
        adamerge.finetune(make_model(), iter([]), tome(2), tmp_path)
    with pytest.raises(BadOption, match="mixup needs an even batch_size; got 3"):
        run(tmp_path, tome(2), batch_size=3, mixup=0.5)
    mistakes: dict[str, Any] = {"epochs": 0, "accumulate": 0.5, "learning_rate": -1, "ema": 1, "distillation": 2}
    for name, wrong in mistakes.items():
        with pytest.raises(BadOption, match=f"{name} must be"):
            FinetuneOptions(**{name: wrong})
