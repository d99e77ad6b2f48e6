"""The embedded images are reproducible, balanced, correctly masked and range from plain to cluttered."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from timm.data.config import resolve_model_data_config

from adamerge.core.errors import BadOption, BadWeights
from adamerge.embedded import CLASSES, Scenes, build, load, preprocess, scenes
from adamerge.embedded.scene_generator import TEST_SEED, TRAINING_SEED
from adamerge.embedded.shapes import FAMILIES

ONE_LEVEL = 1.01 / 255.0

GOLDEN_LABELS = [18, 1, 17]
# Mean brightness in sixteenths on a 4 x 4 grid, row by row.
GOLDEN_SIXTEENTHS = [
    [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7],
    [7, 8, 8, 8, 8, 8, 8, 9, 7, 9, 8, 9, 8, 8, 8, 9],
    [9, 9, 9, 9, 9, 9, 9, 9, 9, 8, 9, 9, 9, 9, 9, 9],
]

LOOKALIKES = [
    (first, second)
    for family in FAMILIES
    for number, first in enumerate(family.variants)
    for second in family.variants[number + 1 :]
]


@cache
def sample() -> Scenes:
    return scenes(0, 48)


def test_an_image_is_the_same_in_any_batch() -> None:
    together, alone = scenes(20, 10), scenes(23, 1)
    assert together.labels[3] == alone.labels[0]
    assert together.clutter[3] == alone.clutter[0]
    assert (together.images[3] - alone.images[0]).abs().max() <= ONE_LEVEL
    assert torch.equal(together.masks[3], alone.masks[0])


def test_drawing_twice_gives_the_same_images() -> None:
    first, second = scenes(5, 2), scenes(5, 2)
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.masks, second.masks)


def test_another_seed_gives_other_images() -> None:
    tested, trained = scenes(0, 8, seed=TEST_SEED, size=64), scenes(0, 8, seed=TRAINING_SEED, size=64)
    assert ((tested.images - trained.images).abs().mean(dim=(1, 2, 3)) > 0.02).all()
    assert (tested.clutter != trained.clutter).all()


def test_neighbouring_images_differ() -> None:
    images = scenes(0, 24, size=64).images.flatten(1)
    distances = torch.cdist(images, images)
    assert distances[~torch.eye(24, dtype=torch.bool)].min() > 1.0


def test_images_have_the_promised_shapes_and_range() -> None:
    drawn = sample()
    assert drawn.images.shape == (48, 3, 224, 224) and drawn.images.dtype == torch.float32
    assert drawn.labels.shape == (48,) and drawn.labels.dtype == torch.long
    assert drawn.masks.shape == (48, 224, 224) and drawn.masks.dtype == torch.bool
    assert drawn.clutter.shape == (48,)
    assert drawn.images.min() >= 0.0 and drawn.images.max() <= 1.0


def test_images_hold_eight_bit_levels() -> None:
    levels = sample().images[:4] * 255.0
    assert torch.allclose(levels, levels.round(), atol=1e-3)


def test_every_run_of_images_shows_each_class_once() -> None:
    labels = torch.cat([scenes(48, 24, size=32).labels, scenes(72, 24, size=32).labels]).view(2, 24)
    assert torch.equal(labels.sort(dim=1).values, torch.arange(24).expand(2, 24))
    assert not torch.equal(labels[0], labels[1])


def test_class_names_are_distinct_and_match_the_labels() -> None:
    assert len(set(CLASSES)) == len(CLASSES) == 24
    assert sample().labels.max() < len(CLASSES)


def test_masks_cover_a_sensible_area() -> None:
    area = sample().masks.float().mean(dim=(1, 2))
    assert area.min() > 0.005
    assert area.max() < 0.5
    assert 0.05 < area.mean() < 0.25


def test_a_mask_outlines_the_object_and_not_the_background() -> None:
    # Two classes at the same place share background and pose, so they differ near their masks only.
    star, mug = (scenes(0, 6, label=CLASSES.index(name), difficulty=0.0) for name in ("star", "mug"))
    near = torch.nn.functional.max_pool2d((star.masks | mug.masks).float(), 21, stride=1, padding=10) > 0.0
    changed = (star.images - mug.images).abs().amax(dim=1) > 0.2
    assert (changed & near).float().mean() > 0.1
    assert (changed & ~near).float().mean() < 0.002


@pytest.mark.parametrize(("first", "second"), LOOKALIKES)
def test_lookalikes_differ_in_a_small_visible_detail(first: str, second: str) -> None:
    one, other = (scenes(0, 3, label=CLASSES.index(name), difficulty=0.5) for name in (first, second))
    changed = (one.images - other.images).abs().amax(dim=1) > 0.1
    share = (changed & (one.masks | other.masks)).sum(dim=(1, 2)) / one.masks.sum(dim=(1, 2))
    assert (share > 0.01).all()
    assert share.mean() < 0.45


def test_clutter_is_uniform_and_independent_of_the_class() -> None:
    drawn = scenes(0, 720, size=32)
    assert abs(drawn.clutter.mean() - 0.5) < 0.05
    assert torch.histc(drawn.clutter, 4, 0.0, 1.0).min() > 140
    by_class = torch.stack([drawn.clutter[drawn.labels == label].mean() for label in range(len(CLASSES))])
    assert (by_class - 0.5).abs().max() < 0.2


def test_clutter_raises_the_variance_of_the_background() -> None:
    drawn = scenes(0, 240, size=64, difficulty=0.5)
    background = ~drawn.masks
    weight = background.sum(dim=(1, 2)).view(-1, 1)
    pixels = drawn.images * background.unsqueeze(1)
    mean = pixels.sum(dim=(2, 3)) / weight
    spread = ((drawn.images - mean[:, :, None, None]).square() * background.unsqueeze(1)).sum(dim=(2, 3)) / weight
    plain, cluttered = drawn.clutter < 0.25, drawn.clutter > 0.75
    assert spread[cluttered].mean() > 1.5 * spread[plain].mean()


def test_difficulty_shrinks_the_objects() -> None:
    easy, hard = (scenes(0, 48, size=64, difficulty=level).masks.float().mean() for level in (0.0, 1.0))
    assert hard < 0.8 * easy


def test_three_known_images_are_unchanged() -> None:
    drawn = scenes(0, 3)
    assert drawn.labels.tolist() == GOLDEN_LABELS
    coarse = torch.nn.functional.avg_pool2d(drawn.images.mean(dim=1, keepdim=True), 56).flatten(1) * 16.0
    # Half a unit is the rounding of the stored numbers; the rest forgives other versions' arithmetic.
    assert (coarse - torch.tensor(GOLDEN_SIXTEENTHS, dtype=torch.float32)).abs().max() < 0.6


def test_preprocessing_maps_the_range_to_plus_minus_one() -> None:
    assert torch.equal(preprocess(torch.tensor([0.0, 0.5, 1.0])), torch.tensor([-1.0, 0.0, 1.0]))


def test_importing_the_scenes_does_not_import_timm() -> None:
    # What the rest of the package imports is not at stake here.
    program = "import sys, adamerge; seen = set(sys.modules); import adamerge.embedded; "
    program += "sys.exit('timm' in set(sys.modules) - seen)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_timm_reads_the_preprocessing_from_the_model() -> None:
    config = resolve_model_data_config(build())
    assert config["input_size"] == (3, 224, 224)
    assert config["mean"] == config["std"] == (0.5, 0.5, 0.5)
    assert config["interpolation"] == "bicubic"
    assert config["crop_pct"] == 1.0


def test_half_precision_weights_load_in_single_precision(tmp_path: Path) -> None:
    trained = build()
    save_file({name: tensor.half() for name, tensor in trained.state_dict().items()}, tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_size <= 6_000_000
    loaded = load(tmp_path / "weights.safetensors")
    assert not loaded.training
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name].half().float())


def test_missing_weights_are_explained(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match="train_embedded"):
        load(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"first": -1, "count": 1}, "first >= 0"),
        ({"first": 0, "count": 0}, "count >= 1"),
        ({"first": 0, "count": 1, "size": 8}, "size >= 32"),
        ({"first": 0, "count": 1, "label": 24}, "label from 0 to 23"),
        ({"first": 0, "count": 1, "difficulty": 3.0}, "difficulty from 0 to 2"),
    ],
)
def test_impossible_requests_are_refused_with_a_reason(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadOption, match=reason):
        scenes(**arguments)
