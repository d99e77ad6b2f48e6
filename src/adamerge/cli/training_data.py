"""Labelled images to train on: a folder with timm's augmentation, or images that the embedded generator draws."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from adamerge.cli.flags import EMBEDDED
from adamerge.core.errors import BadImages
from adamerge.data.folders import even_indices, training_folder

# Drawn images to train on are others than those to calibrate and to judge on.
DRAWN, DRAWN_SEED = 1024, 977


@dataclass(frozen=True)
class DrawnImages:
    """Images of the embedded generator, without augmentation."""

    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from adamerge.embedded import preprocess, scenes

        drawn = scenes(index, 1, seed=DRAWN_SEED)
        return preprocess(drawn.images)[0], int(drawn.labels[0])


@dataclass(frozen=True)
class ReadableImages:
    """Images of a folder; a file that cannot be read is an error."""

    folder: Any
    chosen: list[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label, path = self.folder[self.chosen[index]]
        if image is None:
            raise BadImages(f"cannot read {path}; remove it or replace it, then run again: the training continues")
        return image, label


def training_data(model: nn.Module, data: str, limit: int | None, augment: str) -> "DrawnImages | ReadableImages":
    """The images to train on by the names of the command line."""
    if data == EMBEDDED:
        return DrawnImages(limit if limit is not None else DRAWN)
    folder = training_folder(model, data, augment)
    return ReadableImages(folder, even_indices(len(folder), limit if limit is not None else len(folder)))
