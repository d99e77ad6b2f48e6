"""Reads images from a folder with a timm model's preprocessing; unreadable files are skipped and listed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from adamerge.core.errors import BadImages, BadOption
from adamerge.data.image_files import find_images, read_image
from adamerge.distributed import in_order, my_share
from adamerge.hosts.base import find_host


@dataclass(frozen=True)
class Batch:
    """The images and labels of a batch, and the paths of the files that could not be read."""

    images: Tensor
    labels: Tensor
    unreadable: tuple[str, ...] = ()


class Folder(Dataset[tuple[Tensor | None, int, str]]):
    """An ImageFolder (`root/class/image`) of (image, label, path); the image is None if the file cannot be read.

    Files and labels are in the order of torchvision's ImageFolder.  A class folder without images keeps its label and
    gives a warning; hidden folders are no classes.  Without `labelled`, the images may also be in `root` itself.
    """

    def __init__(self, root: str | Path, transform: Any, *, labelled: bool = True):
        self.transform = transform
        self.classes, self.samples = find_images(root, labelled)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor | None, int, str]:
        path, label = self.samples[index]
        try:
            image = read_image(path)
        except Exception:  # for damaged files Pillow raises many types, even SyntaxError
            return None, label, path
        return self.transform(image), label, path


def folder_loader(
    model: nn.Module,
    root: str | Path,
    *,
    batch_size: int = 64,
    workers: int = 2,
    limit: int | None = None,
    labelled: bool = True,
    shared: bool = False,
) -> DataLoader[Batch]:
    """Batches of an ImageFolder with timm's evaluation transform for `model`.

    `limit` selects that many evenly spaced images, so that all classes are covered.  If `labelled`, the folder must
    have as many classes as the model; otherwise labels have no meaning.  Labels are in the order of the sorted names of
    the folders, or, if these are the names of the model's classes, in the model's order.  If `shared`, only the batches
    of this process are read, where several share the images.
    """
    if workers < 0:
        raise BadOption(f"workers is the number of processes that read images and must be at least 0; got {workers}")
    from timm.data import create_transform  # pyright: ignore[reportPrivateImportUsage]

    transform = create_transform(**preprocessing(model), is_training=False)
    folder = Folder(root, transform, labelled=labelled)
    if labelled:
        _label_for(model, folder, root)
    chosen = folder if limit is None else Subset(folder, even_indices(len(folder), limit))
    if not shared:
        return DataLoader(chosen, batch_size, num_workers=workers, collate_fn=collate)  # pyright: ignore
    firsts = my_share(range(0, len(chosen), batch_size))
    mine = [list(range(first, min(first + batch_size, len(chosen)))) for first in firsts]
    return DataLoader(chosen, batch_sampler=mine, num_workers=workers, collate_fn=collate)  # pyright: ignore


def training_folder(model: nn.Module, root: str | Path, augment: str) -> Folder:
    """An ImageFolder with timm's transform for training: random crops, flips and its auto-augmentation `augment`."""
    from timm.data import create_transform  # pyright: ignore[reportPrivateImportUsage]

    chosen = None if augment == "none" else augment
    try:
        transform = create_transform(**preprocessing(model), is_training=True, auto_augment=chosen)
    except (AssertionError, ValueError) as error:
        raise BadOption(f"timm knows no auto-augmentation {augment!r}: {error}; one is rand-m9-mstd0.5-inc1") from error
    folder = Folder(root, transform)
    _label_for(model, folder, root)
    return folder


def _label_for(model: nn.Module, folder: Folder, root: str | Path) -> None:
    """Refuse a folder with another number of classes.  Folders with the names of the model's classes get its labels."""
    classes = getattr(model, "num_classes", len(folder.classes))
    if len(folder.classes) != classes:
        raise BadImages(
            f"{root} has {len(folder.classes)} class folders but the model has {classes} classes, so labels would not "
            "match; use a folder with one sub-folder per class of the model, in the model's order when sorted by name"
        )
    names = class_names(model)
    if names != folder.classes and sorted(names) == folder.classes:
        folder.samples = [(path, names.index(folder.classes[label])) for path, label in folder.samples]
        folder.classes = names


def class_names(model: nn.Module) -> list[str]:
    """The names of the classes that a timm model has in its configuration; none if it has none."""
    config: Any = getattr(model, "pretrained_cfg", None)
    names = config.get("label_names") if isinstance(config, dict) else getattr(config, "label_names", None)
    return list(names) if names else []


def normalise(model: nn.Module, images: Tensor) -> Tensor:
    """Images in [0, 1], normalised with the mean and standard deviation of `model`."""
    mean, std = _mean_and_std(model, images)
    return (images - mean) / std


def denormalise(model: nn.Module, images: Tensor) -> Tensor:
    """Images as they were before `normalise`."""
    mean, std = _mean_and_std(model, images)
    return images * std + mean


def _mean_and_std(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    wanted = preprocessing(model)
    mean, std = (torch.tensor(wanted[name], device=images.device)[:, None, None] for name in ("mean", "std"))
    return mean, std


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """timm's evaluation settings for a model, with the model's current image size."""
    from timm.data import resolve_model_data_config  # pyright: ignore[reportPrivateImportUsage]

    settings: dict[str, Any] = resolve_model_data_config(model)
    return settings | {"input_size": find_host(model).image}


def even_indices(total: int, limit: int) -> list[int]:
    """`limit` evenly spaced indices below `total`; all if `limit` is larger."""
    if limit < 1:
        raise BadImages(f"the number of images must be at least 1; got {limit}")
    return [i * total // limit for i in range(limit)] if limit < total else list(range(total))


def collate(items: list[tuple[Tensor | None, int, str]]) -> Batch:
    """The batch of all items that could be read."""
    good = [(image, label) for image, label, _ in items if image is not None]
    images = torch.stack([image for image, _ in good]) if good else torch.empty(0, 3, 1, 1)
    labels = torch.tensor([label for _, label in good], dtype=torch.long)
    return Batch(images, labels, tuple(path for image, _, path in items if image is None))


class Readable:
    """Iterates over (images, labels) of a loader, and collects the paths of unreadable files in `unreadable`.

    `is_share` says that the loader reads only the batches of this process.  At the end of the iteration every process
    has the paths of all.
    """

    def __init__(self, loader: DataLoader[Batch], *, is_share: bool = False):
        self.loader, self.is_share = loader, is_share
        self.unreadable: list[str] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.loader:
            self.unreadable += [path for path in batch.unreadable if path not in self.unreadable]
            if len(batch.images):
                yield batch.images, batch.labels
        if self.is_share:
            self.unreadable = sorted(set(in_order(self.unreadable)))

    def complaint(self) -> str | None:
        """A message about unreadable files; None if there are none."""
        if not self.unreadable:
            return None
        named = ", ".join(self.unreadable[:5]) + (", …" if len(self.unreadable) > 5 else "")
        return f"{len(self.unreadable)} image file(s) could not be read and were left out: {named}"
