"""Random crops, flips and blends of images, so that few images give many different ones."""

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

# The range of the ratio of width to height of a crop, as in timm.
LEAST_RATIO, GREATEST_RATIO = 3 / 4, 4 / 3


def augment(images: Tensor, dice: torch.Generator, smallest_crop: float) -> Tensor:
    """A random crop of each image at the size it had, mirrored half of the time.

    `images` are `(b, channels, height, width)`, or videos `(b, frames, channels, height, width)`.
    """
    b, video = len(images), images.dim() == 5
    windows = _windows(b, dice, smallest_crop).to(images)
    frames = images.flatten(0, 1) if video else images
    if video:
        windows = windows.repeat_interleave(images.shape[1], 0)
    places = affine_grid(windows, list(frames.shape), align_corners=False)
    return grid_sample(frames, places, padding_mode="reflection", align_corners=False).view(images.shape)


def blend(images: Tensor, dice: torch.Generator) -> Tensor:
    """Each image blended with its neighbour in the batch, by a share between 0 and 1 of its own (mixup)."""
    share = torch.rand(len(images), generator=dice).to(images)
    return images.lerp(images.roll(1, 0), share.view(-1, *[1] * (images.dim() - 1)))


def _windows(b: int, dice: torch.Generator, smallest: float) -> Tensor:
    """The affine maps of the crops, `(b, 2, 3)`, in coordinates from -1 to 1."""
    area = smallest + (1 - smallest) * torch.rand(b, generator=dice)
    low, high = math.log(LEAST_RATIO), math.log(GREATEST_RATIO)
    ratio = (low + (high - low) * torch.rand(b, generator=dice)).exp()
    width, height = (area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1)
    x, y = ((1 - side) * (2 * torch.rand(b, generator=dice) - 1) for side in (width, height))
    mirror = 1 - 2 * torch.randint(2, (b,), generator=dice).float()
    zero = torch.zeros(b)
    return torch.stack([torch.stack([mirror * width, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
