"""The options of fine-tuning, all checked in one place."""

from dataclasses import dataclass

from adamerge.core.checks import check_number
from adamerge.core.errors import BadOption


@dataclass(frozen=True)
class FinetuneOptions:
    """How to fine-tune; the defaults are the settings of the AdaMerge paper, where it has any.

    Args:
        epochs: passes over the training images.
        learning_rate: the largest learning rate of AdamW; it falls along a cosine.
        warm_up: epochs in which the learning rate rises.
        weight_decay: of weights; norms and biases have none.
        batch_size: images in a batch.
        accumulate: batches whose gradients are added up before a step.
        label_smoothing: the share of the target that all classes have in common.
        mixup: the strength of timm's mixup; 0 is none.
        distillation: the share of the loss that compares with the unmerged model as it was at the beginning.
        ema: the decay of the moving average of the weights; 0 is none.
        mixed_precision: compute in bfloat16 by autocast.
        recalibrate: measure the statistics of an adaptive recipe again every so many epochs; 0 is never.
        calibration_images: how many training images to measure them on.
        save_every: write the checkpoint every so many steps, and after each epoch.
        seed: of the order of the images, of augmentation and of dropout.
        workers: processes that read images; 0 is this one.
        progress: show a progress bar.
    """

    epochs: int = 30
    learning_rate: float = 5e-6
    warm_up: int = 0
    weight_decay: float = 0.05
    batch_size: int = 64
    accumulate: int = 1
    label_smoothing: float = 0.0
    mixup: float = 0.0
    distillation: float = 0.0
    ema: float = 0.0
    mixed_precision: bool = False
    recalibrate: int = 5
    calibration_images: int = 256
    save_every: int = 100
    seed: int = 0
    workers: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        least = {"epochs": 1, "batch_size": 1, "accumulate": 1, "calibration_images": 2, "save_every": 1}
        for name in (*least, "warm_up", "recalibrate", "seed", "workers"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least.get(name, 0):
                raise BadOption(f"{name} must be a whole number >= {least.get(name, 0)}; got {number!r}")
        for name in ("learning_rate", "weight_decay", "mixup"):
            check_number(name, getattr(self, name), at_least=0)
        for name in ("label_smoothing", "distillation", "ema"):
            number = getattr(self, name)
            check_number(name, number, at_least=0)
            if number > 1 or (name == "ema" and number == 1):
                raise BadOption(f"{name} must be between 0 and 1; got {number!r}")
