"""Generates labelled images: each shows one object on a background between plain and cluttered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adamerge.core.errors import BadOption
from adamerge.embedded.backdrops import (
    add_grain,
    cover,
    mix_colour,
    paint_backdrop,
    scatter_fragments,
    scatter_occluders,
)
from adamerge.embedded.distances import union
from adamerge.embedded.draws import Draws
from adamerge.embedded.shapes import CLASSES, FAMILIES, Family
from adamerge.embedded.sketches import Sketch

TEST_SEED = 0
TRAINING_SEED = 1
CALIBRATION_SEED = 2

# Difficulty of the data set, from 0 (easy) to 2: it scales how small objects get, how faint their details are, how many
# fragments and occluders there are, how strong the noise and how low the contrast is.
DIFFICULTY = 1.5

_SMALLEST_SIZE = 32
# Images drawn at once: on CPU few, so that temporaries fit into the cache; on CUDA many, for fewer kernel launches.
_PIECE = {"cpu": 24, "cuda": 1024}


@dataclass(frozen=True)
class Scenes:
    """Images (n, 3, size, size) in [0, 1], labels (n,), visible object pixels (n, size, size), clutter (n,)."""

    images: Tensor
    labels: Tensor
    masks: Tensor
    clutter: Tensor


@dataclass(frozen=True)
class _Pose:
    """The object's centre and half side in units of half an image, its rotation and its stretch, each (n, 1, 1)."""

    cx: Tensor
    cy: Tensor
    half: Tensor
    turn: Tensor
    stretch: Tensor

    def select(self, rows: Tensor) -> _Pose:
        return _Pose(self.cx[rows], self.cy[rows], self.half[rows], self.turn[rows], self.stretch[rows])


def scenes(
    first: int,
    count: int,
    *,
    seed: int = TEST_SEED,
    size: int = 224,
    device: torch.device | str = "cpu",
    label: int | None = None,
    difficulty: float = DIFFICULTY,
) -> Scenes:
    """Draw images `first` to `first + count - 1` of the unlimited data set of `seed`.

    An image depends only on its index and the seed, not on the other images of the call.  Each run of `len(CLASSES)`
    images that starts at a multiple of it has every class once.  With `label`, all images show that class; background,
    pose and colours stay as they are without it.

    Args:
        first: index of the first image.
        count: number of images.
        seed: which data set; 0 is for tests, 1 for training, 2 for calibration.
        size: height and width in pixels.
        device: where the images are drawn.
        label: the class of all images; by default each image has its own.
        difficulty: from 0 (easy) to 2; the embedded model was trained with the default.
    """
    _check(first, count, size, label, difficulty)
    device = torch.device(device)
    piece = _PIECE.get(device.type, _PIECE["cpu"])
    parts = []
    with torch.no_grad():
        for start in range(first, first + count, piece):
            indices = torch.arange(start, min(start + piece, first + count))
            labels = _label(indices, seed) if label is None else torch.full_like(indices, label)
            parts.append(_render(indices, labels, seed, size, device, difficulty))
    return parts[0] if len(parts) == 1 else _join(parts)


def _check(first: int, count: int, size: int, label: int | None, difficulty: float) -> None:
    """Refuse arguments of `scenes` that make no sense."""
    if first < 0 or count < 1:
        raise BadOption(f"expected first >= 0 and count >= 1, got first={first}, count={count}; ask for some images")
    if size < _SMALLEST_SIZE:
        raise BadOption(f"expected size >= {_SMALLEST_SIZE} pixels, got {size}; draw larger and shrink the images")
    if label is not None and not 0 <= label < len(CLASSES):
        raise BadOption(f"expected a label from 0 to {len(CLASSES) - 1}, got {label}; see adamerge.embedded.CLASSES")
    if not 0.0 <= difficulty <= 2.0:
        raise BadOption(f"expected a difficulty from 0 to 2, got {difficulty}; the model expects {DIFFICULTY:g}")


def _label(indices: Tensor, seed: int) -> Tensor:
    """The labels of images: each run of `len(CLASSES)` images has all classes, shuffled."""
    classes = len(CLASSES)
    rounds = Draws.of(indices // classes, seed ^ 0x5BD1E995).uniform("round", classes)
    return rounds.argsort(dim=1, stable=True).gather(1, (indices % classes)[:, None]).squeeze(1)


def _render(indices: Tensor, labels: Tensor, seed: int, size: int, device: torch.device, difficulty: float) -> Scenes:
    """Draw the images with these indices and labels."""
    draws = Draws.of(indices.to(device), seed)
    axis = (torch.arange(size, device=device, dtype=torch.float32) * 2.0 + 1.0) / size - 1.0
    x, y = axis.view(1, 1, size), axis.view(1, size, 1)
    (clutter,) = draws.scalars("clutter", 1)

    images = paint_backdrop(x, y, draws, clutter)
    images = scatter_fragments(images, x, y, draws, (clutter * 1.1 * difficulty).clamp(max=1.0))
    pose = _choose_pose(draws, difficulty)
    objects = torch.zeros_like(images[:, :1])
    for family, rows, variants in _by_family(labels, device):
        part, alpha = _draw_object(
            family, images[rows], x, y, draws.select(rows), pose.select(rows), variants, difficulty
        )
        images[rows], objects[rows] = part, alpha
    occlusion = (clutter * 0.75 * difficulty).clamp(max=1.0)
    images, hidden = scatter_occluders(images, x, y, draws, occlusion, (pose.cx, pose.cy, pose.half))
    images = _expose(images, x, y, draws, difficulty)
    # Rounded to 8 bits: a saved PNG has exactly these values, and devices that round differently agree.
    images = images.clamp_(0.0, 1.0).mul_(255.0).round_().div_(255.0)
    masks = ((objects > 0.5) & (hidden < 0.5)).squeeze(1)
    return Scenes(images, labels.to(device), masks, clutter.flatten())


def _choose_pose(draws: Draws, difficulty: float) -> _Pose:
    """Random poses; objects get smaller with difficulty."""
    u, v, size, turn, stretch = draws.scalars("pose", 5)
    half = 0.70 - min(0.45 * difficulty, 0.54) * size
    room = 0.96 - half
    return _Pose(
        cx=(2.0 * u - 1.0) * room,
        cy=(2.0 * v - 1.0) * room,
        half=half,
        turn=(2.0 * turn - 1.0) * (math.pi / 6.0),
        stretch=1.0 + 0.16 * (stretch - 0.5),
    )


def _by_family(labels: Tensor, device: torch.device) -> Iterator[tuple[Family, Tensor, Tensor]]:
    """For each family among the labels: the family, the rows that show it and their variants, on the device."""
    # Grouped on CPU and copied once: grouping on a GPU would need a synchronisation per family.
    counts = labels.bincount(minlength=len(CLASSES)).tolist()
    order, classes = torch.stack((labels.argsort(stable=True), labels)).to(device)
    first = start = 0
    for family in FAMILIES:
        after = first + len(family.variants)
        stop = start + sum(counts[first:after])
        if stop > start:
            rows = order[start:stop]
            yield family, rows, classes[rows] - first
        first, start = after, stop


def _draw_object(
    family: Family, image: Tensor, x: Tensor, y: Tensor, draws: Draws, pose: _Pose, variants: Tensor, difficulty: float
) -> tuple[Tensor, Tensor]:
    """Draw one family over its images; gives the images and the silhouettes (n, 1, height, width)."""
    cos, sin = pose.turn.cos(), pose.turn.sin()
    dx, dy = x - pose.cx, y - pose.cy
    across, down = pose.half * pose.stretch, pose.half / pose.stretch
    u = dx * (cos / across) + dy * (sin / across)
    v = dy * (cos / down) - dx * (sin / down)
    per_pixel = pose.half * (0.5 * image.shape[-1])
    layers = family.draw(_choose_colours(u, v, draws, variants, difficulty))

    silhouette = union(*(layer.distance for layer in layers if layer.solid))
    outline, shade, gleam = draws.scalars("finish", 3)
    # A soft shadow and a dark outline make an object visible on a background of the same colour.
    glow = (1.0 - silhouette / 0.22).clamp_(0.0, 1.0).mul_(0.35 * shade).unsqueeze(1)
    ink = mix_colour(gleam, torch.full_like(gleam, 0.3), 0.08 + 0.12 * shade)
    image = torch.lerp(image, ink, glow)
    image = torch.lerp(image, ink, cover(silhouette - 0.045, per_pixel).mul_(_scale(0.35 + 0.65 * outline)))
    inside = cover(silhouette, per_pixel)
    for layer in layers:
        image = torch.lerp(image, layer.colour, cover(layer.distance, per_pixel))
    light = (u * -0.13 - v * 0.16).clamp_(-0.25, 0.25).mul_(0.4 + 0.6 * gleam).unsqueeze(1)
    return image.add_(light.mul_(inside)), inside


def _choose_colours(u: Tensor, v: Tensor, draws: Draws, variants: Tensor, difficulty: float) -> Sketch:
    """The input of a drawing, with random colours."""
    hue, saturation, value, other, pale, deep, warmth, fade = draws.scalars("colours", 8)
    main = mix_colour(hue, 0.4 + 0.5 * saturation, 0.55 + 0.37 * value)
    # Details are light or dark on the main colour; mixing both with it makes them harder to see.
    faded = _scale((0.62 * difficulty * fade).clamp(max=0.85))
    light = mix_colour(0.08 + 0.1 * warmth, 0.05 + 0.2 * pale, 0.98 - 0.1 * pale)
    dark = mix_colour(warmth, torch.full_like(warmth, 0.35), 0.1 + 0.15 * deep)
    return Sketch(
        x=u,
        y=v,
        variant=variants.view(-1, 1, 1),
        main=main,
        second=mix_colour(hue + 0.25 + 0.5 * other, 0.4 + 0.5 * saturation, 0.5 + 0.45 * other),
        light=torch.lerp(light, main, faded),
        dark=torch.lerp(dark, main, faded),
        leaf=mix_colour(0.22 + 0.2 * warmth, 0.5 + 0.3 * pale, 0.4 + 0.35 * value),
        wood=mix_colour(0.04 + 0.06 * warmth, 0.45 + 0.3 * pale, 0.3 + 0.3 * deep),
        variation=draws.scalars("whims", 2),
    )


def _expose(image: Tensor, x: Tensor, y: Tensor, draws: Draws, difficulty: float) -> Tensor:
    """Apply a brightness gradient, a colour cast, a contrast and noise."""
    gain, contrast, turn, slope, noise, red, blue = draws.scalars("exposure", 7)
    angle = turn * (2.0 * math.pi)
    slant = (x * angle.cos() + y * angle.sin()).mul_(0.2 * slope).add_(0.85 + 0.3 * gain).unsqueeze(1)
    cast = torch.cat((1.0 + 0.16 * (red - 0.5), torch.ones_like(red), 1.0 + 0.16 * (blue - 0.5)), dim=1).unsqueeze(-1)
    sharpness = _scale(1.0 - 0.5 * difficulty * contrast)
    image = (image.mul_(slant).mul_(cast) - 0.5).mul_(sharpness).add_(0.5)
    return add_grain(image, draws, 0.01 + 0.13 * difficulty * noise * noise)


def _scale(numbers: Tensor) -> Tensor:
    """(n, 1, 1) as (n, 1, 1, 1), to broadcast over channels as well."""
    return numbers.unsqueeze(1)


def _join(parts: list[Scenes]) -> Scenes:
    """Several batches as one."""
    return Scenes(
        torch.cat([part.images for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat([part.masks for part in parts]),
        torch.cat([part.clutter for part in parts]),
    )
