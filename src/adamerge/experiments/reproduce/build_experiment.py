"""Builds experiments: the embedded model on generated images, or any model on image folders."""

from pathlib import Path

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadImages, BadOption
from adamerge.data.folders import Folder, Readable, folder_loader
from adamerge.experiments.reproduce.experiment import Experiment

EMBEDDED = "embedded"
# With these numbers all parts take some minutes on two cores.
EMBEDDED_IMAGES = 360
EMBEDDED_CALIBRATION_IMAGES = 96
BATCH_SIZE = 48
# Calibration images are kept in memory; 2048 of 224 pixels in float32 take 1.2 GB.
MOST_CALIBRATION_IMAGES = 2048
FEWEST_CALIBRATION_IMAGES = 64
# Up to this many evaluation images are kept in memory; more are read from disk in each pass.
MOST_KEPT = 4096


def embedded_experiment(
    *,
    model: nn.Module | None = None,
    device: str = "cpu",
    images: int | None = None,
    calibration_images: int | None = None,
    batch_size: int = BATCH_SIZE,
) -> Experiment:
    """The embedded model on images of its generator.  `model` is the embedded model in another dtype."""
    from adamerge.embedded import load, preprocess, scenes
    from adamerge.embedded.scene_generator import CALIBRATION_SEED, TEST_SEED

    count = EMBEDDED_IMAGES if images is None else images
    calibrating = EMBEDDED_CALIBRATION_IMAGES if calibration_images is None else calibration_images
    model = load().to(device) if model is None else model
    drawn = scenes(0, count, seed=TEST_SEED, device=device)
    data = list(zip(preprocess(drawn.images).split(batch_size), drawn.labels.split(batch_size), strict=True))
    calibration = preprocess(scenes(0, calibrating, seed=CALIBRATION_SEED, device=device).images)
    names = {
        "model": EMBEDDED,
        "data": f"{count} generated images (seed {TEST_SEED})",
        "calibration": f"{calibrating} other generated images (seed {CALIBRATION_SEED})",
    }
    note = (
        "The embedded model is a 12-block, 128-wide ViT for 24 classes of generated scenes, not ViT-B/16 on ImageNet. "
        "Absolute figures cannot agree with the paper's; orderings and trends can."
    )
    return Experiment(model, data, calibration, names, (note,))


def folder_experiment(
    model: nn.Module,
    data: str | Path,
    calibration: str | Path | None = None,
    *,
    name: str,
    images: int | None = None,
    calibration_images: int | None = None,
    batch_size: int = 64,
    workers: int = 2,
) -> tuple[Experiment, list[Readable]]:
    """A model on an ImageFolder; also the readers of its images, which list the files that could not be read.

    The model has its weights and is on its device.  Without a calibration folder, images of `data` are used.
    """
    readable = Readable(folder_loader(model, data, batch_size=batch_size, workers=workers, limit=images))
    kept = (images or len(Folder(data, None))) <= MOST_KEPT
    source = Path(data if calibration is None else calibration)
    available = len(Folder(source, None))
    wanted, notes = _calibration_count(available, calibration is not None, calibration_images)
    calibrating = Readable(folder_loader(model, source, batch_size=batch_size, workers=workers, limit=wanted))
    parts: list[Tensor] = [batch for batch, _ in calibrating]
    if not parts:
        raise BadImages(f"none of the calibration images in {source} could be read; give another --calibration folder")
    pixels = torch.cat(parts)
    names = {
        "model": name,
        "data": f"{Path(data).name} ({'all' if images is None else images} images)",
        "calibration": f"{len(pixels)} of {available} images of {source.name}",
    }
    experiment = Experiment(model, list(readable) if kept else readable, pixels, names, tuple(notes))
    return experiment, [readable, calibrating]


def _calibration_count(available: int, own_folder: bool, wanted: int | None) -> tuple[int, list[str]]:
    """The number of calibration images to use, and notes about it for the report."""
    if wanted is not None and wanted < 2:
        raise BadOption(f"--calibration-images must be at least 2, a spread needs two; got {wanted}")
    if own_folder:
        count = min(available, MOST_CALIBRATION_IMAGES if wanted is None else wanted)
        if wanted is not None or count == available:
            return count, []
        return count, [
            f"{count} of {available} calibration images, evenly spaced, were used, because they are kept in memory; "
            "--calibration-images takes another number."
        ]
    one_percent = max(available // 100, FEWEST_CALIBRATION_IMAGES)
    count = min(available, one_percent if wanted is None else wanted)
    why = f" (1 %, at least {FEWEST_CALIBRATION_IMAGES})" if wanted is None else ""
    return count, [
        f"No calibration folder was given: the statistics come from {count} images of the evaluation data itself, "
        f"evenly spaced{why}. No labels are used, but the images overlap. The paper calibrates on training images; "
        "pass --calibration FOLDER for that."
    ]
