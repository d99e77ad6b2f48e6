"""Training images whose order and augmentation depend only on the seed and the epoch, so that a run can continue."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from adamerge.core.errors import BadImages


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


def evenly_spaced(data: Any, number: int) -> Tensor:
    """Images of a dataset as one batch, evenly spaced, with the augmentation of an epoch that is never trained."""
    count = min(number, len(data))
    chosen: Sequence[int] = [i * len(data) // count for i in range(count)]
    seeded = SeededDataset(data, 0, 2**31)
    return default_collate([seeded[index][0] for index in chosen])
