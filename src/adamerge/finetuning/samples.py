"""Training images whose order and augmentation depend only on the seed and the epoch, so that a run can continue."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from adamerge.core.errors import AdamergeError, BadImages


class SeededDataset(Dataset[tuple[Tensor, int]]):
    """The items of a dataset, with all random numbers that an item draws set by its index, the epoch and the seed."""

    def __init__(self, inner: Any, seed: int, epoch: int):
        self.inner, self.seed, self.epoch = inner, seed, epoch

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with fixed_randomness(self.seed, self.epoch, index):
            image, label = self.inner[index][:2]
        return image, int(label)


@contextmanager
def fixed_randomness(*numbers: int) -> Iterator[None]:
    """Random numbers of Python, NumPy and torch on the CPU that depend only on `numbers`; restored afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    value = mix(*numbers)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def mix(*numbers: int) -> int:
    """One seed from several numbers; small changes give another."""
    value = 0
    for number in numbers:
        value = (value * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return value


def epoch_batches(data: Any, size: int, seed: int, epoch: int, *, first: int = 0, workers: int = 0) -> DataLoader[Any]:
    """The batches of an epoch in random order, from batch `first` on.  A last batch that is not full is left out."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(mix(seed, epoch))).tolist()
    chosen = [order[i : i + size] for i in range(0, number_of_steps(len(data), size) * size, size)]
    dataset = SeededDataset(data, seed, epoch)
    return DataLoader(dataset, batch_sampler=chosen[first:], num_workers=workers)  # pyright: ignore[reportArgumentType]


def number_of_steps(images: int, size: int) -> int:
    """How many whole batches an epoch has."""
    if images < size:
        raise BadImages(f"a batch has {size} images, but there are only {images} to train on; use a smaller batch_size")
    return images // size


def read(batches: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a loader; an error in a process that reads images becomes the error that it was."""
    # Begun here and not with the first batch: the loader draws a random number, which must not be one of a step.
    return _read(iter(batches))


def _read(begun: Iterator[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    try:
        yield from begun
    except AdamergeError as error:
        # torch adds where the error was; the last line has its own text.
        text = str(error).strip().splitlines()[-1]
        raise type(error)(text.removeprefix(f"{type(error).__module__}.{type(error).__qualname__}: ")) from error


def evenly_spaced(data: Any, number: int) -> tuple[Tensor, Tensor]:
    """Images and labels of a dataset as one batch, evenly spaced, with the augmentation of an epoch never trained."""
    count = min(number, len(data))
    chosen: Sequence[int] = [i * len(data) // count for i in range(count)]
    seeded = SeededDataset(data, 0, 2**31)
    images, labels = default_collate([seeded[index] for index in chosen])
    return images, labels


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that are no class of the model."""
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise BadImages(
            f"a label is {int(wrong[0])}, but the model has {classes} classes, 0 to {classes - 1}; fine-tuning keeps "
            "the classes of the model"
        )
