"""Tensors of images for calibration and timing: generated, or read from a folder."""

from pathlib import Path

import torch
from torch import Tensor, nn

from adamerge.core.errors import BadImages
from adamerge.data.folders import Readable, folder_loader, normalise
from adamerge.hosts.base import find_host


def drawn_images(model: nn.Module, count: int, *, seed: int) -> Tensor:
    """`count` images of the embedded generator, with the size, normalisation, dtype and device of the model."""
    from adamerge.embedded import scenes

    parameter = next(model.parameters())
    _, height, width = find_host(model).image
    if height != width:
        raise BadImages(f"drawn images are square and this model takes {height}×{width}; give a folder of images")
    drawn = scenes(0, count, seed=seed, size=height, device=parameter.device)
    return normalise(model, drawn.images).to(parameter.dtype)


def folder_images(model: nn.Module, root: str | Path, count: int, *, workers: int = 2) -> tuple[Tensor, Readable]:
    """Evenly spaced images (count, 3, h, w) of a folder, preprocessed for the model; and their reader."""
    parameter = next(model.parameters())
    batches = Readable(folder_loader(model, root, workers=workers, limit=count, labelled=False))
    parts = [images.to(parameter.dtype) for images, _ in batches]
    if not parts:
        raise BadImages(f"none of the images in {root} could be read; give another folder")
    return torch.cat(parts).to(parameter.device), batches
